"""``luthier prepare``, ``plan``, ``show`` and ``stats``: the data, before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from luthier.cli.output import EXIT_UNTRUE, JsonTarget, Output, reporting
from luthier.cli.pipeline import (
    ConfigFile,
    Loaded,
    Overrides,
    plan_of,
    prepare_data,
    read_config,
    read_to_plan,
    schedule_of,
    tell_preparation,
)
from luthier.writing import write_text

if TYPE_CHECKING:
    from luthier.check.plan import RunPlan
    from luthier.check.show import RowView
    from luthier.config.schema import RunConfig
    from luthier.train.schedule import Schedule


RowNumber = Annotated[int | None, typer.Option(metavar="N", min=1, help="The N-th row; without an option, the first.")]
PackNumber = Annotated[int | None, typer.Option(metavar="N", min=1, help="The N-th pack of the first epoch.")]
BatchNumber = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="The N-th micro-batch of the first epoch, as the model gets it.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="Leave the work to a Ray cluster: auto (this node's), local, ray://host:10001."
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Estimate for this device: h100, a100, l4 … Without it, for the one here."),
]
Utilisation = Annotated[
    float | None,
    typer.Option(metavar="SHARE", min=0.001, max=1.0, help="Share of the device's peak that training will reach."),
]


class Split(StrEnum):
    """Which side of the data."""

    TRAIN = "train"
    EVAL = "eval"


def prepare(config: ConfigFile, overrides: Overrides = None, ray: RayAddress = None, json: JsonTarget = None) -> None:
    """Render and encode all rows into the store; use it to find bad rows early, or on a machine without a GPU.

    Training does this by itself; what is in the store is not encoded again.
    Started several times, on as many machines as see data and store, it
    shares the work among them.

    [dim]Example[/]   luthier prepare run.yaml
    [dim]Example[/]   luthier prepare run.yaml --ray auto
    """
    with reporting(json) as output:
        run = read_config(config, overrides, output)
        from luthier.check.tables import ledger_line

        loaded = prepare_data(run, output.console, ray_address=ray)
        tell_preparation(loaded, output.console)
        sides = {"train": loaded.train, "eval": loaded.held_out}
        ledgers = {name: side.ledger.to_json() for name, side in sides.items() if side is not None}
        for name, ledger in ledgers.items():
            output.console.print(f"[bold]{name}[/]")
            output.console.print(ledger_line(ledger))
        prepared = loaded.prepared
        output.emit(
            {
                "ledger": ledgers["train"],
                "eval_ledger": ledgers.get("eval"),
                "encoded": prepared.num_encoded,
                "reused": prepared.num_reused,
                "quarantine": None if prepared.quarantine is None else str(prepared.quarantine),
                "seconds": loaded.seconds,
            }
        )


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    device: DeviceName = None,
    utilisation: Utilisation = None,
    json: JsonTarget = None,
) -> None:
    """Say exactly what a run will do, without a model: rows, tokens, targets, packs, steps, padding, mixture.

    Use it to choose data.max_length, batch size and packing. Time and memory are estimated, and said to be.

    [dim]Example[/]   luthier plan run.yaml --device h100
    [dim]Example[/]   luthier plan run.yaml train.packing=none --json -
    """
    with reporting(json) as output:
        run = read_to_plan(config, overrides, output)
        import msgspec

        from luthier.check.devices import check_name
        from luthier.check.plan import with_media
        from luthier.check.tables import plan_table
        from luthier.loader.choosing import prepares_meanwhile

        check_name(device)  # before the data is prepared, which may take long
        loaded = prepare_data(run, output.console)
        tell_preparation(loaded, output.console)
        schedule = schedule_of(loaded)
        model_config = loaded.encoder.media_source.model_config()
        found = with_media(plan_of(loaded, schedule), loaded.train, loaded.held_out, model_config=model_config)
        output.console.print()
        output.console.print(plan_table(found))
        if prepares_meanwhile(run):
            output.console.print(
                "[dim]  `luthier train` shuffles these rows as they come (data.prepare): its packs, steps and held-out "
                "rows are others, about as many[/]"
            )
        output.console.print()
        estimate = _estimate(loaded, schedule, found, output, device=device, utilisation=utilisation)
        output.emit({**msgspec.to_builtins(found), "estimate": estimate})


def stats(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Describe the data: lengths, targets and the share that is learned, per source, with histograms.

    Use it to get to know a data set, and to see what data.max_length would cost. Ids that come twice are told.

    [dim]Example[/]   luthier stats run.yaml
    """
    with reporting(json) as output:
        run = read_config(config, overrides, output)
        import msgspec

        from luthier.check.stats import stats as stats_of
        from luthier.check.tables import ledger_line, stats_table

        loaded = prepare_data(run, output.console)
        sides = {"train": loaded.prepared.train, "eval": loaded.prepared.eval}
        told: dict[str, Any] = {"ledger": loaded.train.ledger.to_json()}
        output.console.print(ledger_line(told["ledger"]))
        output.console.print()
        for name, side in sides.items():
            if side is not None:
                found = stats_of(side, split=name, max_length=run.data.max_length)
                output.console.print(stats_table(found))
                output.console.print()
                told[name] = msgspec.to_builtins(found, str_keys=True)
        output.emit({**told, "repeated_ids": _repeated_ids(run, output)})


def show(
    config: ConfigFile,
    overrides: Overrides = None,
    row: RowNumber = None,
    pack: PackNumber = None,
    batch: BatchNumber = None,
    split: Annotated[Split, typer.Option(help="Which side of the data.")] = Split.TRAIN,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that needs nothing else.")] = None,
    json: JsonTarget = None,
) -> None:
    """Show what the model sees, token by token: id, text, owner, target, weight, position, label.

    Use it whenever data, template or train_on changed. Green is learned, all else is only read.

    The owner is the message, role and field that a token comes from, found by rendering the row once more. If that
    does not give what the store holds, it is said in red, and the exit code is 3.

    [dim]Example[/]   luthier show run.yaml
    [dim]Example[/]   luthier show run.yaml --pack 3 --html pack.html
    """
    with reporting(json) as output:
        run = read_config(config, overrides, output)
        from luthier.check.facts import run_facts
        from luthier.cli.selection import Selection

        selection = Selection.of_options(row=row, pack=pack, batch=batch, held_out=split is Split.EVAL)
        loaded = prepare_data(run, output.console)
        views = selection.views(loaded)
        facts = run_facts(run, loaded.encoder)
        _print_views(views, facts, output)
        if html is not None:
            from luthier.check.previews import previews
            from luthier.check.show_html import page_html

            measurer = loaded.encoder.measurer
            processor = measurer.processor if any(view.media for view in views) else None
            pictures = previews(views, processor, measurer.access)
            write_text(html, page_html(views, title=selection.title, facts=facts, previews=pictures))
            output.console.print(f"[dim]page in[/] {html}", highlight=False)
        output.emit({"facts": facts, **_views_as_json(views)})
    if any(view.findings for view in views):
        raise typer.Exit(EXIT_UNTRUE)


def _estimate(
    loaded: Loaded,
    schedule: Schedule,
    found: RunPlan,
    output: Output,
    *,
    device: str | None,
    utilisation: float | None,
) -> dict[str, Any] | None:
    """Print the estimate; None, and why, where the model's config cannot be read here or says too little."""
    import msgspec

    from luthier.check.estimate_terminal import estimate_table
    from luthier.cli.estimating import estimate_of
    from luthier.errors import ModelError

    try:
        estimate = estimate_of(loaded, schedule, found, device=device, utilisation=utilisation)
    except ModelError as error:
        output.console.print(Text(f"No estimate: {error}", style="yellow"))
        return None
    output.console.print(estimate_table(estimate))
    told: dict[str, Any] = msgspec.to_builtins(estimate)
    return told


def _repeated_ids(run: RunConfig, output: Output) -> list[dict[str, Any]]:
    """Rows whose id an earlier row of their source has; streams of the Hub are not read for it."""
    from luthier.sources import open_sources, repeated_ids, resolve_sources

    train, held_out = resolve_sources(run.data)
    files = [config for config in (*train, *held_out) if not config.streaming]
    told = []
    for source in open_sources(files, seed=run.runtime.seed):
        found = repeated_ids(source)
        if found is not None:
            first, again = map(str, found.first)
            rows = f"{found.rows:,} rows have" if found.rows > 1 else "1 row has"
            line = f"{source.name}: {rows} the id of an earlier row; the first: {found.id} at {first} and {again}"
            output.console.print(Text(line, style="yellow"))
            told.append({"source": found.source, "rows": found.rows, "id": found.id, "first": [first, again]})
    return told


def _print_views(views: list[RowView], facts: Mapping[str, str], output: Output) -> None:
    from luthier.check.show_terminal import coloured_text, facts_line, token_table

    output.console.print(facts_line(facts))
    for view in views:
        output.console.print()
        output.console.print(token_table(view))
        output.console.print()
        output.console.print(coloured_text(view))  # below the long table: it is what one sees first in a terminal


def _views_as_json(views: list[RowView]) -> dict[str, Any]:
    import msgspec

    findings = list(dict.fromkeys(finding for view in views for finding in view.findings))
    return {"rows": msgspec.to_builtins(views), "findings": findings}
