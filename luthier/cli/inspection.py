"""``luthier prepare``, ``plan``, ``show``, ``stats`` and ``verify``: the data, before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from luthier import library
from luthier.cli import (
    EXIT_UNTRUE,
    ConfigFile,
    JsonTarget,
    Output,
    Overrides,
    listening,
    reporting,
    saying,
    tell_preparation,
)
from luthier.errors import UserError
from luthier.writing import counted, write_text

if TYPE_CHECKING:
    from luthier.sources.source import RepeatedIds


ShownRow = Annotated[
    str | None,
    typer.Option(metavar="N", help="The N-th row of that side, or the one at an address (rows.jsonl:45). Default: 1."),
]
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
        from luthier.check.plan.terminal import ledger_line
        from luthier.loader.settings import Loaded

        heard: list[Loaded] = []

        def keep(event: object) -> None:
            if isinstance(event, Loaded):
                heard.append(event)

        with listening(output.console, keep) as listen:
            prepared = library.prepare(config, overrides=overrides or (), ray_address=ray, on_event=listen)
        (loaded,) = heard
        tell_preparation(loaded, output.console)
        sides = {"train": loaded.train, "eval": loaded.held_out}
        ledgers = {name: side.ledger.to_json() for name, side in sides.items() if side is not None}
        for name, ledger in ledgers.items():
            output.console.print(f"[bold]{name}[/]")
            output.console.print(ledger_line(ledger))
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
        import msgspec

        from luthier.check.plan.terminal import estimate_table, plan_table
        from luthier.loader.settings import Loaded

        def heard(event: object) -> None:
            if isinstance(event, Loaded):
                tell_preparation(event, output.console)

        with listening(output.console, heard) as listen:
            found = library.plan(
                config, overrides=overrides or (), device=device, utilisation=utilisation, on_event=listen
            )
        output.console.print()
        output.console.print(plan_table(found))
        output.console.print()
        if found.estimate is None:
            output.console.print(Text(f"No estimate: {found.no_estimate}", style="yellow"))
        else:
            output.console.print(estimate_table(found.estimate))
        output.emit(msgspec.to_builtins(found))


def stats(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Describe the data: lengths, targets and the share that is learned, per source, with histograms.

    Use it to get to know a data set, and to see what data.max_length would cost. Ids that come twice are told.

    [dim]Example[/]   luthier stats run.yaml
    """
    with reporting(json) as output:
        import msgspec

        from luthier.check.plan.terminal import ledger_line, stats_table

        with listening(output.console) as listen:
            found = library.stats(config, overrides=overrides or (), on_event=listen)
        output.console.print(ledger_line(found.ledger))
        output.console.print()
        told: dict[str, object] = {"ledger": found.ledger}
        for side in (found.train, found.eval):
            if side is not None:
                output.console.print(stats_table(side))
                output.console.print()
                told[side.split] = msgspec.to_builtins(side, str_keys=True)
        if found.contamination is not None:
            style = "yellow" if found.contamination.found else None
            output.console.print(Text(found.contamination.sentence, style=style or ""))
            told["contamination"] = msgspec.to_builtins(found.contamination)
        output.emit({**told, "repeated_ids": [_repeated_ids(repeated, output) for repeated in found.repeated_ids]})


def show(  # noqa: PLR0913
    config: ConfigFile,
    overrides: Overrides = None,
    row: ShownRow = None,
    pack: PackNumber = None,
    batch: BatchNumber = None,
    split: Annotated[Split, typer.Option(help="Which side of the data.")] = Split.TRAIN,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that needs nothing else.")] = None,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Show what the run drew, as `luthier rollouts` of its folder does.")
    ] = False,
    json: JsonTarget = None,
) -> None:
    """Show what the model sees, token by token: id, text, owner, target, weight, position, label.

    Use it whenever data, template or train_on changed. Green is learned, all else is only read.

    The owner is the message, role and field that a token comes from, found by rendering the row once more. If that
    does not give what the store holds, it is said in red, and the exit code is 3.

    [dim]Example[/]   luthier show run.yaml
    [dim]Example[/]   luthier show run.yaml --pack 3 --html pack.html
    [dim]Example[/]   luthier show examples/grpo.yaml --rollouts
    """
    if rollouts:
        _show_rollouts(Path(config), overrides, None, _number(row), html, json)
        return
    with reporting(json) as output:
        import msgspec

        with listening(output.console) as listen:
            shown = library.show(
                config,
                overrides=overrides or (),
                row=row,
                pack=pack,
                batch=batch,
                split=split.value,
                html=html,
                on_event=listen,
            )
        _print_rows(shown, output)
        if html is not None:
            output.tell_place("page", html)
        output.emit({"facts": shown.facts, "rows": msgspec.to_builtins(shown.rows), "findings": shown.findings})
    if shown.findings:
        raise typer.Exit(EXIT_UNTRUE)


def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that drew answers (output.dir).")],
    step: Annotated[int | None, typer.Option(metavar="N", min=1, help="Those of step N; without it, the last.")] = None,
    row: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Those to row N of the data, in all steps.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that needs nothing else.")] = None,
    json: JsonTarget = None,
) -> None:
    """Show what a run with objective rl drew: prompts, and answers with rewards, advantages and probabilities.

    The best answer to a prompt comes first; green ones became likelier by that step.

    [dim]Example[/]   luthier rollouts output/grpo
    [dim]Example[/]   luthier rollouts output/grpo --row 12 --html row.html
    """
    _show_rollouts(run, None, step, row, html, json)


def _show_rollouts(
    run: Path, overrides: Overrides, step: int | None, row: int | None, html: Path | None, json: JsonTarget
) -> None:
    """Of a run's folder, or of the folder that a run description names."""
    with reporting(json) as output:
        import msgspec

        from luthier.config.loading import load_config
        from luthier.training.report.drawn_answers import chosen_groups, groups_page, groups_text

        if run.is_file():
            run = load_config(run, overrides or ()).output.dir
        groups = chosen_groups(run, step=step, row=row)
        output.console.print(groups_text(groups))
        if html is not None:
            write_text(html, groups_page(groups, title=run.name))
            output.tell_place("page", html)
        output.emit({"groups": msgspec.to_builtins(groups)})


def _repeated_ids(found: RepeatedIds, output: Output) -> dict[str, object]:
    """Print rows whose id an earlier row of their source has, and give them for JSON."""
    first, again = map(str, found.first)
    rows = counted(found.rows, "row has", "rows have")
    line = f"{found.source}: {rows} the id of an earlier row; the first: {found.id} at {first} and {again}"
    output.console.print(Text(line, style="yellow"))
    return {"source": found.source, "rows": found.rows, "id": found.id, "first": [first, again]}


def _number(row: str | None) -> int | None:
    if row is not None and not row.isdecimal():
        raise typer.BadParameter("the rows of drawn answers are chosen by number", param_hint="--row")
    return None if row is None else int(row)


def _print_rows(shown: library.Shown, output: Output) -> None:
    from luthier.check.terminal import RowText, TokenTable

    facts = (Text.assemble((f"{name} ", "dim"), value) for name, value in shown.facts.items())
    output.console.print(Text(" · ").join(facts))
    for view in shown.rows:
        output.console.print()
        output.console.print(TokenTable(row=view))
        output.console.print()
        output.console.print(RowText(row=view))  # below the long table: it is what one sees first in a terminal


# ---------------------------------------- ``luthier verify``: is what training sees what inference sees, on these rows?


MAX_SHOWN = 10  # golden prompts that are told one by one


def verify(  # noqa: PLR0913
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="The run description, a YAML file.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    sample: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="N rows, chosen by the run's seed. Default: all.")
    ] = None,
    split: Annotated[Split, typer.Option(help="Which side of the data.")] = Split.TRAIN,
    stored: Annotated[
        bool, typer.Option("--stored", help="Verify the store, preparing it first, and its batches.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Compare with the tokens of a running server, as http://localhost:8000."),
    ] = None,
    golden: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --against: ask for the golden prompts of an export's parity.json."),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the server's bearer token."),
    ] = None,
    max_failures: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after N failing rows. Default: read all.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Prove that training sees what inference sees, on your own rows; use it before every long run.

    Every answer's context and targets are computed a second time, from plain renders of the chat template and the
    tokenizer's own vocabulary, and compared token for token. Exit code 3: something is not true of this data.

    [dim]Example[/]   luthier verify run.yaml
    [dim]Example[/]   luthier verify run.yaml --sample 1000 --against http://localhost:8000
    [dim]Example[/]   luthier verify --against http://localhost:8000 --golden exported/parity.json
    """
    if config is None or golden is not None:
        _verify_golden(golden, against, token_env, json, is_described=config is not None)
        return
    with reporting(json) as output:
        from luthier.check.terminal import failed_row, report_table
        from luthier.check.verify.run import Side, VerifyOptions
        from luthier.engines.json_client import token_from

        options = VerifyOptions(
            split=Side(split.value),
            sample=sample,
            stored=stored,
            against=against,
            max_failures=max_failures,
            token=token_from(token_env),
        )
        with _progress(output.console) as listen:
            report = library.verify(config, options, overrides=overrides or (), on_event=listen)
        output.console.print(report_table(report))
        for row in report.failed_rows:
            output.console.print()
            output.console.print(failed_row(row))
        output.emit(report.to_json())
    if not report.ok:
        raise typer.Exit(EXIT_UNTRUE)


def _verify_golden(
    golden: str | None, against: str | None, token_env: str | None, json: str | None, *, is_described: bool
) -> None:
    """Whether a server makes the ids of golden prompts that training made of them."""
    with reporting(json) as output:
        if golden is None or against is None or is_described:
            what = "--golden is compared with a server, and takes no run" if golden else "no run description is named"
            hint = "luthier verify run.yaml, or luthier verify --against URL --golden parity.json"
            raise UserError(what, hint=hint)
        from luthier.check.golden import read_parity, served_otherwise
        from luthier.check.verify.reference_tokenizer import TokenServer
        from luthier.engines.json_client import token_from

        parity = read_parity(Path(golden).expanduser())
        faults = served_otherwise(parity, TokenServer(against, token=token_from(token_env)))
        asked = len(parity.prompts)
        output.console.print(
            f"{asked - len(faults):,} of "
            f"{counted(asked, 'golden prompt is', 'golden prompts are')} served as they were trained"
        )
        for row, what in faults[:MAX_SHOWN]:
            output.console.print(f"[red]{escape(row)}[/]: {escape(what)}", highlight=False)
        failures: list[object] = [{"row": row, "what": what} for row, what in faults]
        output.emit({"ok": not faults, "prompts": asked, "failures": failures})
    if faults:
        raise typer.Exit(EXIT_UNTRUE)


@contextmanager
def _progress(console: Console) -> Iterator[library.Listener]:
    from luthier.check.verify.run import VerifyProgress
    from luthier.config.schema import RunConfig

    with ExitStack() as stack:
        lines: list[Callable[[str], None]] = []

        def show(event: object) -> None:
            match event:
                case RunConfig() if event.tracking.progress and console.is_terminal:
                    lines.append(stack.enter_context(saying(console, "verifying")))
                case VerifyProgress():
                    failed = f", {event.failed:,} fail" if event.failed else ""
                    lost = f", {event.lost:,} refused" if event.lost else ""
                    for say in lines:
                        say(f"{counted(event.read, 'row')}{failed}{lost}")

        yield show
