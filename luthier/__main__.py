"""The command ``luthier``, also as ``python -m luthier`` where the command itself is not on the path (torchrun): its
commands, and the one edge where every error becomes words and an exit code.

Nothing here imports torch or transformers; commands import what they need when they run.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import traceback
from itertools import pairwise
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.text import Text

from luthier import __version__
from luthier.cli import (
    STDOUT,
    PairedCommand,
    as_mistake,
    chat,
    comparison,
    configuring,
    error_as_json,
    exporting,
    inspection,
    prediction,
    store,
)
from luthier.errors import ConfigError, RowError, UserError
from luthier.terminal import stderr_terminal
from luthier.writing import counted, to_json

# bitsandbytes is imported where it is installed: it then warns of a kernel that it misses, and at each product in 8
# bits of the rounding that LLM.int8 consists of (docs/adapters.md), which is nothing that a user could change.
for _name in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# When Python looks for cycles: while torch is imported it would do so every few milliseconds, which takes a second.
SELDOM = (10_000, 20, 20)
EXIT_OK, EXIT_BUG, EXIT_USER, EXIT_INTERRUPT, EXIT_UNREAD = 0, 1, 2, 130, 141

app = typer.Typer(
    name="luthier",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\
[bold]Start[/]      luthier quickstart      [dim]a tiny model, offline, in a minute or two[/]
[bold]Look[/]       luthier show run.yaml   [dim]what the model sees, token by token[/]
           luthier plan run.yaml   [dim]what it costs: packs, steps, padding[/]
[bold]Train[/]      luthier train run.yaml

[bold]Exit code[/]  0 done · 1 a bug · 2 yours to fix · 3 the answer is no · 130 Ctrl-C · 143 terminated""",
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def luthier(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """Fine-tune language models, and see exactly what they are trained on."""


app.command("train", rich_help_panel="Run")(configuring.train)
app.command("quickstart", rich_help_panel="Run")(configuring.quickstart)
app.command("prepare", rich_help_panel="Run")(inspection.prepare)
app.command("chat", cls=PairedCommand, rich_help_panel="Run")(chat.chat)
app.command("predict", cls=PairedCommand, rich_help_panel="Run")(prediction.predict)
app.command("eval", rich_help_panel="Run")(prediction.evaluate)
app.command("compare", rich_help_panel="Run")(comparison.compare)
app.command("serve", cls=PairedCommand, rich_help_panel="Run")(prediction.serve)
app.command("rollouts", rich_help_panel="Run")(inspection.rollouts)
app.command("export", cls=PairedCommand, rich_help_panel="Run")(exporting.export)
app.command("show", cls=PairedCommand, rich_help_panel="Look before you train")(inspection.show)
app.command("verify", cls=PairedCommand, rich_help_panel="Look before you train")(inspection.verify)
app.command("diff", rich_help_panel="Look before you train")(comparison.diff)
app.command("plan", rich_help_panel="Look before you train")(inspection.plan)
app.command("stats", rich_help_panel="Look before you train")(inspection.stats)
app.add_typer(store.app, name="store", rich_help_panel="About")
app.add_typer(configuring.app, name="config", rich_help_panel="About")
app.command("env", rich_help_panel="About")(configuring.env)
app.command("version", rich_help_panel="About")(configuring.version)


class Terminated(BaseException):
    """SIGTERM, or SIGHUP where the terminal is closed, as an exception: locks are released, files that are half written
    removed, and worker processes ended on the way out."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.number = number


class ReaderGone(BaseException):
    """Whoever reads standard output has enough of it: ``luthier --help | head``. Nothing is told of it."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process; `docs/errors.md` says what each exit code means."""
    gc.set_threshold(*SELDOM)
    _open_standard_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _raise_terminated)
    if os.environ.get("COLUMNS") == "0":  # a terminal that does not know its width; rich would print nothing
        del os.environ["COLUMNS"]
    sys.stdout = _guarded(sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    try:
        code = run(arguments)
        sys.stdout.flush()
    except ReaderGone:
        code = EXIT_UNREAD
    except (OSError, UserError):  # stderr cannot be written to, or what was left for stdout cannot
        code = EXIT_USER
        _point_stdout_at_nothing()
    # A process that ends need not look through all that torch has made, which takes a second or more. Modules that are
    # built with nanobind (Triton's, as of 3.9) would then print everything that was not freed.
    if not any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type)):
        gc.freeze()
    raise SystemExit(code)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and give the exit code; errors are told on stderr."""
    try:
        code = app(args=arguments, prog_name="luthier", standalone_mode=False)
        if code == EXIT_INTERRUPT:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else EXIT_OK
    except SystemExit as left:  # how completion leaves
        return left.code if isinstance(left.code, int) else EXIT_OK if left.code is None else EXIT_BUG
    except KeyboardInterrupt:
        stderr_terminal().print("interrupted", style="yellow")
        return EXIT_INTERRUPT
    except Terminated as stopped:
        stderr_terminal().print("terminated", style="yellow")
        return 128 + stopped.number
    except ReaderGone:
        return EXIT_UNREAD
    except Exception as raised:  # noqa: BLE001 - the process edge: whatever is left is our bug
        error = as_mistake(raised)
        if isinstance(error, (UserError, RowError)):
            _tell_mistake(error)
            return EXIT_USER
        if hasattr(raised, "format_message"):  # typer's errors of usage have no class that all its versions export
            return _tell_misuse(raised, sys.argv[1:] if arguments is None else arguments)
        _tell_bug(raised)
        return EXIT_BUG


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    raise Terminated(number)


class _Guarded(io.TextIOWrapper):
    """Standard output, whose failures (a full disk) are mistakes of the user; a pipe that was closed is none."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _unwritable(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _unwritable(error) from None


def _open_standard_streams() -> None:
    """Whoever starts a process without its three streams (a daemon) gets streams to nowhere: else the first files that
    are opened have their numbers, and what libraries print goes into checkpoints."""
    opened = set[int]()
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
        opened.add(descriptor)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # what has its number by now is a file of a library: libffi keeps its own open
            nowhere = number if number in opened else os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r", encoding="utf-8", closefd=False))


def _guarded(stream: TextIO) -> TextIO:
    """The process's own output with failures told, and characters that its encoding lacks written as ``\\u2026``.

    A stream that somebody else has put in its place, to capture what is printed, stays theirs and stays as it is.
    """
    if not isinstance(stream, io.TextIOWrapper) or stream is not sys.__stdout__:
        return stream
    is_terminal = stream.isatty()
    return _Guarded(stream.detach(), encoding=stream.encoding, errors="backslashreplace", line_buffering=is_terminal)


def _unwritable(error: OSError) -> UserError | ReaderGone:
    _point_stdout_at_nothing()  # or the interpreter would fail once more when it leaves
    if isinstance(error, BrokenPipeError):
        return ReaderGone()
    return UserError(f"standard output cannot be written to: {error.strerror or error}", hint="make room there")


def _point_stdout_at_nothing() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def _tell_misuse(error: Any, arguments: list[str]) -> int:
    """A command line that cannot be read: what is wrong with it, and where help is."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # a command without its arguments prints its help
        error.show()
        return EXIT_USER
    # an option without its value comes without a context
    where = " ".join(["luthier", *arguments[:1]]) if context is None else context.command_path
    hint = f"{where} --help says what there is"
    option = getattr(error, "option_name", None)
    if option and context and any(parameter.name == "overrides" for parameter in context.command.params):
        from luthier.config.explain import setting_meant  # it takes a while

        if option.lstrip("-") in ("c", "config", "config_file"):
            hint = f"the run description stands without an option: {where} RUN.yaml"
        elif not error.possibilities and (meant := setting_meant(option)) is not None:
            hint = f"settings are written without dashes: {meant}=VALUE; {hint}"
    mistake = UserError(error.format_message(), hint=hint)
    if "--json=-" in arguments or ("--json", STDOUT) in pairwise(arguments):
        print(to_json({"error": error_as_json(mistake)}), flush=True)
    _tell_mistake(mistake)
    return EXIT_USER


def _tell_mistake(error: UserError | RowError) -> None:
    console = stderr_terminal(highlight=False, soft_wrap=True)
    match error:
        case ConfigError():
            count = len(error.problems)
            how_many = counted(count, "thing is", "things are")
            console.print(Text.assemble(("error", "bold red"), f": {how_many} wrong in this run description"))
            for problem in error.problems:
                key = f" {problem.key}" if problem.key else ""
                console.print(Text.assemble("  ", (problem.where, "cyan"), (key, "bold"), f": {problem.what}"))
                if problem.hint is not None:
                    console.print(Text(f"      {problem.hint}", style="dim"))
        case UserError():
            what = Text(error.placed)
            what.stylize("cyan", 0, len(error.where or ""))
            console.print(Text.assemble(("error", "bold red"), ": ", what))
            if error.hint is not None:
                console.print(Text.assemble(("hint", "bold green"), ": ", error.hint))
        case RowError():
            console.print(Text.assemble(("error", "bold red"), ": ", str(error)))
            console.print(Text.assemble(("hint", "bold green"), ": docs/errors.md says what this reason means"))


def _tell_bug(error: Exception) -> None:
    console = stderr_terminal(highlight=False, soft_wrap=True)
    console.print(Text("".join(traceback.format_exception(error)), style="dim"))
    console.print(Text.assemble(("this is a bug", "bold red"), f" in luthier: {type(error).__name__}: {error}"))
    console.print("please report it with the lines above, the output of `luthier env`, and your config")


if __name__ == "__main__":  # a worker process may import this module under another name
    main(sys.argv[1:])
