"""The command ``luthier``: its commands, and the one edge where every error becomes words and an exit code.

Nothing here imports torch or transformers; commands import what they need when they run.
"""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from luthier.cli import comparison, configuration, environment, inspection, quickstart, store, training, verification
from luthier.errors import ConfigError, RowError, UserError

EXIT_OK, EXIT_BUG, EXIT_USER, EXIT_INTERRUPT, EXIT_TERMINATED = 0, 1, 2, 130, 143
TRAIN_EXTRA = ("torch", "transformers", "peft", "accelerate", "safetensors", "matplotlib")
HUB_EXTRA = ("datasets", "huggingface_hub")

app = typer.Typer(
    name="luthier",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\
[bold]Start[/]      luthier quickstart      [dim]a tiny model, offline, in a minute or two[/]
[bold]Look[/]       luthier show run.yaml   [dim]what the model sees, token by token[/]
           luthier plan run.yaml   [dim]what it costs: packs, steps, padding[/]
[bold]Train[/]      luthier train run.yaml

[bold]Exit code[/]  0 done · 1 a bug · 2 yours to mend · 3 the answer is no · 130 Ctrl-C · 143 terminated""",
)


@app.callback()
def luthier() -> None:
    """Fine-tune language models, and see exactly what they are trained on."""


app.command("train", rich_help_panel="Run")(training.train)
app.command("quickstart", rich_help_panel="Run")(quickstart.quickstart)
app.command("prepare", rich_help_panel="Run")(inspection.prepare)
app.command("show", rich_help_panel="Look before you train")(inspection.show)
app.command("verify", rich_help_panel="Look before you train")(verification.verify)
app.command("diff", rich_help_panel="Look before you train")(comparison.diff)
app.command("plan", rich_help_panel="Look before you train")(inspection.plan)
app.command("stats", rich_help_panel="Look before you train")(inspection.stats)
app.add_typer(store.app, name="store", rich_help_panel="About")
app.add_typer(configuration.app, name="config", rich_help_panel="About")
app.command("env", rich_help_panel="About")(environment.env)
app.command("version", rich_help_panel="About")(environment.version)


class Terminated(BaseException):
    """SIGTERM, as an exception: locks are released and worker processes ended on the way out."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process; `docs/errors.md` says what each exit code means."""
    signal.signal(signal.SIGTERM, _raise_terminated)
    raise SystemExit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and give the exit code; errors are told on stderr."""
    try:
        app(args=arguments, prog_name="luthier")
    except SystemExit as left:  # how click leaves, also when all is well
        return left.code if isinstance(left.code, int) else EXIT_OK if left.code is None else EXIT_BUG
    except (UserError, RowError) as error:
        _tell_mistake(error)
        return EXIT_USER
    except ModuleNotFoundError as error:
        return _tell_missing_module(error)
    except KeyboardInterrupt:
        _stderr().print("interrupted", style="yellow")
        return EXIT_INTERRUPT
    except Terminated:
        _stderr().print("terminated", style="yellow")
        return EXIT_TERMINATED
    except Exception as error:  # noqa: BLE001 - the process edge: whatever is left is our bug
        _tell_bug(error)
        return EXIT_BUG
    return EXIT_OK


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _tell_mistake(error: UserError | RowError) -> None:
    console = _stderr()
    match error:
        case ConfigError():
            count = len(error.problems)
            how_many = "1 thing is" if count == 1 else f"{count} things are"
            console.print(Text.assemble(("error", "bold red"), f": {how_many} wrong in this run description"))
            for problem in error.problems:
                key = f" {problem.key}" if problem.key else ""
                console.print(Text.assemble("  ", (problem.where, "cyan"), (key, "bold"), f": {problem.what}"))
                if problem.hint is not None:
                    console.print(Text(f"      {problem.hint}", style="dim"))
        case UserError():
            console.print(Text.assemble(("error", "bold red"), ": ", error.message))
            if error.hint is not None:
                console.print(Text.assemble(("hint", "bold green"), ": ", error.hint))
        case RowError():
            console.print(Text.assemble(("error", "bold red"), ": ", str(error)))
            console.print(Text.assemble(("hint", "bold green"), ": docs/errors.md says what this reason means"))


def _tell_missing_module(error: ModuleNotFoundError) -> int:
    package = (error.name or "").partition(".")[0]
    extra = "train" if package in TRAIN_EXTRA else "hub" if package in HUB_EXTRA else None
    if extra is None:
        _tell_bug(error)
        return EXIT_BUG
    missing = f"this needs the package {package!r}, which is not installed"
    _tell_mistake(UserError(missing, hint=f"pip install 'luthier[{extra}]'"))
    return EXIT_USER


def _tell_bug(error: Exception) -> None:
    console = _stderr()
    console.print(Text("".join(traceback.format_exception(error)), style="dim"))
    console.print(Text.assemble(("this is a bug", "bold red"), f" in luthier: {type(error).__name__}: {error}"))
    console.print("please report it with the lines above, the output of `luthier env`, and your config")


if __name__ == "__main__":
    main(sys.argv[1:])
