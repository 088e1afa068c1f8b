"""``luthier prepare``, ``plan``, ``show`` and ``stats``: the data, before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from luthier.cli.output import EXIT_UNTRUE, JsonTarget, Output, reporting
from luthier.cli.pipeline import ConfigFile, Overrides, plan_of, prepare_data, read_config, tell_preparation
from luthier.writing import write_text

if TYPE_CHECKING:
    from luthier.check.show import RowView


RowNumber = Annotated[int | None, typer.Option(metavar="N", min=1, help="The N-th row; without an option, the first.")]
PackNumber = Annotated[int | None, typer.Option(metavar="N", min=1, help="The N-th pack of the first epoch.")]
BatchNumber = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="The N-th micro-batch of the first epoch, as the model gets it.")
]


class Split(StrEnum):
    """Which side of the data."""

    TRAIN = "train"
    EVAL = "eval"


def prepare(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Render and encode all rows into the store; use it to find bad rows early, or on a machine without a GPU.

    Training does this by itself; what is in the store is not encoded again.

    [dim]Example[/]   luthier prepare run.yaml
    """
    with reporting(json) as output:
        run = read_config(config, overrides)
        from luthier.check.tables import ledger_line

        loaded = prepare_data(run, output.console)
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


def plan(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Say exactly what a run will do, without a model: rows, tokens, targets, packs, steps, padding.

    Use it to choose data.max_length, batch size and packing. Nothing is estimated.

    [dim]Example[/]   luthier plan run.yaml
    [dim]Example[/]   luthier plan run.yaml train.packing=none --json -
    """
    with reporting(json) as output:
        run = read_config(config, overrides)
        import msgspec

        from luthier.check.tables import plan_table

        loaded = prepare_data(run, output.console)
        tell_preparation(loaded, output.console)
        found = plan_of(loaded)
        output.console.print()
        output.console.print(plan_table(found))
        output.emit(msgspec.to_builtins(found))


def stats(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Describe the data: lengths, targets and the share that is learned, per source, with histograms.

    Use it to get to know a data set, and to see what data.max_length would cost.

    [dim]Example[/]   luthier stats run.yaml
    """
    with reporting(json) as output:
        run = read_config(config, overrides)
        import msgspec

        from luthier.check.stats import stats as stats_of
        from luthier.check.tables import stats_table

        loaded = prepare_data(run, output.console)
        sides = {"train": loaded.prepared.train, "eval": loaded.prepared.eval}
        told: dict[str, Any] = {"ledger": loaded.train.ledger.to_json()}
        for name, side in sides.items():
            if side is not None:
                found = stats_of(side, split=name, max_length=run.data.max_length)
                output.console.print(stats_table(found))
                output.console.print()
                told[name] = msgspec.to_builtins(found, str_keys=True)
        output.emit(told)


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
        run = read_config(config, overrides)
        from luthier.check.facts import run_facts
        from luthier.cli.selection import Selection

        selection = Selection.of_options(row=row, pack=pack, batch=batch, held_out=split is Split.EVAL)
        loaded = prepare_data(run, output.console)
        views = selection.views(loaded)
        facts = run_facts(run, loaded.encoder)
        _print_views(views, facts, output)
        if html is not None:
            from luthier.check.show_html import page_html

            write_text(html, page_html(views, title=selection.title, facts=facts))
            output.console.print(f"[dim]page in[/] {html}", highlight=False)
        output.emit({"facts": facts, **_views_as_json(views)})
    if any(view.findings for view in views):
        raise typer.Exit(EXIT_UNTRUE)


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
