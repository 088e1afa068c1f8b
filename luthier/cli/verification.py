"""``luthier verify``: is what training sees what inference sees, on these rows?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from luthier import library
from luthier.cli.inspection import Split
from luthier.cli.output import EXIT_UNTRUE, JsonTarget, reporting
from luthier.cli.pipeline import Overrides
from luthier.errors import UserError
from luthier.writing import counted

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
    stored: Annotated[bool, typer.Option("--stored", help="Verify what is in the store, preparing it first.")] = False,
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
        from luthier.check.verify.run import Side, VerifyOptions
        from luthier.check.verify.terminal import failed_row, report_table
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
        from luthier.check.verify.server import TokenServer
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

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ExitStack() as stack:
        bar = Progress(*columns, console=console, transient=True)
        task = bar.add_task("verifying", total=None)

        def show(event: object) -> None:
            match event:
                case RunConfig() if event.tracking.progress and console.is_terminal:
                    stack.enter_context(bar)
                case VerifyProgress():
                    failed = f", {event.failed:,} fail" if event.failed else ""
                    lost = f", {event.lost:,} refused" if event.lost else ""
                    bar.update(task, description=f"verifying: {counted(event.read, 'row')}{failed}{lost}")

        yield show
