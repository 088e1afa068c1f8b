"""``luthier train``: a run from its config to its report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from luthier.cli.output import JsonTarget, reporting
from luthier.cli.pipeline import (
    ConfigFile,
    Loaded,
    Overrides,
    is_main_process,
    plan_of,
    prepare_data,
    read_to_train,
    tell_preparation,
)
from luthier.terminal import Terminal

if TYPE_CHECKING:
    from luthier.check.show import RowView
    from luthier.config.schema import RunConfig
    from luthier.encoding.encoder import Encoder
    from luthier.loader.feed import FeedReader
    from luthier.records import Segment
    from luthier.train.live import LiveData
    from luthier.train.report import Report

MAX_TOKENS_SHOWN = 400  # of the sample in the terminal; `luthier show` has all


def train(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Train as the config says; use it when `luthier show` and `luthier plan` look right.

    Prints the plan and one sample with its targets in green, trains, and
    leaves model, checkpoints, report.html, report.json and loss.png in
    output.dir. Ctrl-C finishes the step and saves a checkpoint; the same
    command goes on from there.

    [dim]Example[/]   luthier train run.yaml
    [dim]Example[/]   luthier train run.yaml train.max_steps=10 --json -
    [dim]Example[/]   torchrun --nproc-per-node 8 -m luthier train run.yaml
    """
    with reporting(json) as output:
        console = output.console if is_main_process() else Terminal(quiet=True)
        run = read_to_train(config, overrides, output, console)
        report = run_and_report(run, console)
        if is_main_process():
            output.emit(report.to_json())
    if report.result.exit_code:
        raise typer.Exit(report.result.exit_code)


def run_and_report(config: RunConfig, console: Console, *, quickstart: bool = False) -> Report:
    """Prepare, plan, show one sample, train and report; what is raised is what the stages raise."""
    from luthier.loader.choosing import prepares_meanwhile

    if prepares_meanwhile(config):
        return _run_meanwhile(config, console)
    loaded = prepare_data(config, console)
    tell_preparation(loaded, console)
    report_parts = _tell_plan_and_sample(loaded, console)

    from luthier.train.fit import fit
    from luthier.train.report import Report, summary, write_report

    result = fit(config, loaded.encoder, loaded.prepared)
    report = Report(result=result, quickstart=quickstart, **report_parts)
    if is_main_process():
        files = write_report(report)
        console.print()
        console.print(summary(report, files))
    return report


def _run_meanwhile(config: RunConfig, console: Console) -> Report:
    """Train while another process prepares the rows, and report."""
    from luthier.loader.choosing import feed_folder
    from luthier.loader.feed import Feed, FeedReader
    from luthier.loader.feed_files import FeedJob

    folder = feed_folder(config)
    with Feed.start(FeedJob(config=config, folder=folder)) if is_main_process() else nullcontext() as feed:
        reader = FeedReader(folder) if feed is None else feed.reader
        console.print("[bold]Preparing rows while training[/] [dim]in the order in which they are needed[/]")

        from luthier.encoding.encoder import Encoder
        from luthier.train.fit import fit_data
        from luthier.train.live import open_live_data
        from luthier.train.report import Report, summary, write_report

        encoder = Encoder.from_config(config)
        samples: list[Any] = []

        def open_data() -> LiveData:
            data = open_live_data(config, reader)
            samples.append(_tell_live(data, reader, encoder, console))
            return data

        result = fit_data(config, encoder.tokenizer, open_data)
        fingerprints = {"encoder": encoder.fingerprint, "tokenizer": encoder.tokenizer.fingerprint}
        report = Report(result=result, fingerprints=fingerprints, sample=samples[0])
    if is_main_process():
        files = write_report(report)
        console.print()
        console.print(summary(report, files))
    return report


def _tell_live(data: LiveData, reader: FeedReader, encoder: Encoder, console: Console) -> Any:
    from luthier.check.show_html import tokens_html
    from luthier.errors import UserError
    from luthier.loader.feeding import FIRST_PORTION

    facts = reader.facts()
    held_out = f", {facts.num_eval_rows:,} held out" if facts.num_eval_rows else ""
    console.print(f"{sum(facts.num_rows):,} rows in {len(facts.num_rows)} sources{held_out}")
    order = data.order(0)
    for start in range(0, len(order), FIRST_PORTION):  # the first rows may all be lost
        data.rows.wait_for(order[start : start + 1])
        if len(data.train):
            break
    else:
        data.rows.wait_for(order)
    if not len(data.train):
        hint = "what became of them is in quarantine.jsonl, in output.dir"
        raise UserError("no training row is left", hint=hint, key="data.train")
    sample = [_view_of(data.train[0], encoder)]
    _tell_sample(sample, console)
    return tokens_html(sample)


def _tell_plan_and_sample(loaded: Loaded, console: Console) -> dict[str, Any]:
    import msgspec

    from luthier.check.show_html import tokens_html
    from luthier.check.tables import plan_table
    from luthier.cli.selection import Selection

    plan = plan_of(loaded)
    console.print()
    console.print(plan_table(plan))
    first_row = Selection.of_options(row=int(loaded.train.row_ids[0]) + 1, pack=None, batch=None, held_out=False)
    sample = first_row.views(loaded)
    _tell_sample(sample, console)
    return {
        "plan": msgspec.to_builtins(plan),
        "sample": tokens_html(sample),
        "fingerprints": {
            "encoder": loaded.encoder.fingerprint,
            "tokenizer": loaded.encoder.tokenizer.fingerprint,
        },
    }


def _tell_sample(sample: Sequence[RowView], console: Console) -> None:
    from luthier.check.show_terminal import coloured_text

    console.print()
    console.print("[bold]The first sample[/] [dim]as the model sees it; luthier show has the others[/]")
    for view in sample:
        console.print(coloured_text(view, max_tokens=MAX_TOKENS_SHOWN))


def _view_of(segment: Segment, encoder: Encoder) -> RowView:
    from luthier.check.show import show_pack
    from luthier.records import Pack

    tokenizer = encoder.tokenizer
    control = frozenset(tokenizer.control_id(token) for token in tokenizer.control.tokens)
    return show_pack(Pack(segments=(segment,)), tokenizer, title=str(segment.address), control=control)
