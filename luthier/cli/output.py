"""Where a command prints: words for people, JSON for programs, never mixed.

``--json -`` puts JSON alone on stdout and sends everything else, stray prints of libraries included, to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from luthier.errors import ConfigError, UserError
from luthier.writing import to_json, write_text

STDOUT = "-"
EXIT_UNTRUE = 3  # what was asked was answered, and the answer is no: it differs, it does not hold

JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; '-' is stdout, with words on stderr."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The two channels of a command: ``console`` for words, ``emit`` for the one JSON document."""

    console: Console
    json_target: str | None
    json_stream: TextIO  # stdout as it was before prints were sent to stderr

    def emit(self, data: dict[str, Any]) -> None:
        """Write ``data`` to the JSON target, if one was asked for. Not a number becomes null, as JSON wants it."""
        match self.json_target:
            case None:
                return
            case "-":
                print(to_json(data), file=self.json_stream, flush=True)
            case path:
                write_text(Path(path), to_json(data) + "\n")
                self.console.print(f"[dim]JSON in[/] {path}", highlight=False)


@contextlib.contextmanager
def reporting(json_target: str | None) -> Iterator[Output]:
    """The output of a command that reports; a user's mistake is also told as JSON, ``{"error": {…}}``."""
    stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        if json_target == STDOUT:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        output = Output(console=Console(), json_target=json_target, json_stream=stdout)
        try:
            yield output
        except UserError as error:
            output.emit({"error": error_as_json(error)})
            raise


def error_as_json(error: UserError) -> dict[str, Any]:
    """An error for programs: its class, message, hint, and a config's problems one by one."""
    told: dict[str, Any] = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    if isinstance(error, ConfigError):
        told["problems"] = [
            {"where": problem.where, "key": problem.key, "what": problem.what, "hint": problem.hint}
            for problem in error.problems
        ]
    return told
