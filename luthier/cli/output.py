"""Where a command prints: words for people, JSON for programs, never mixed.

``--json -`` puts JSON alone on stdout and sends everything else, stray prints of libraries included, to stderr.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.text import Text

from luthier.errors import ConfigError, UserError, install_hint
from luthier.terminal import Terminal
from luthier.writing import to_json, write_text

STDOUT = "-"
# What each extra of the package brings.
EXTRAS = {
    "train": ("torch", "transformers", "peft", "accelerate", "safetensors", "matplotlib"),
    "hub": ("datasets", "huggingface_hub"),
    "media": ("av", "PIL", "torchvision"),
    "ray": ("ray",),
    "gguf": ("xllamacpp", "gguf", "sentencepiece"),
    "kernels": ("liger_kernel",),
    "metrics": ("sacrebleu",),
    "serve": ("fastapi", "uvicorn"),
}
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
    emitted: list[str] = field(default_factory=list)  # where the one document went, once it did

    def emit(self, data: dict[str, object]) -> None:
        """Write ``data`` to the JSON target, if one was asked for. Not a number becomes null, as JSON wants it."""
        if self.json_target is None:
            return
        self.emitted.append(self.json_target)
        if self.json_target == STDOUT:
            print(to_json(data), file=self.json_stream, flush=True)
        else:
            write_text(Path(self.json_target), to_json(data) + "\n")
            self.tell_place("JSON", self.json_target)

    def tell_place(self, what: str, path: Path | str) -> None:
        """Say where a result is: ``page in diff.html``."""
        self.console.print(Text.assemble((f"{what} in", "dim"), f" {path}"))


@contextlib.contextmanager
def reporting(json_target: str | None) -> Iterator[Output]:
    """The output of a command that reports; whatever ends it early is also told as JSON, ``{"error": {…}}``."""
    stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        if json_target == STDOUT:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        output = Output(console=Terminal(), json_target=json_target, json_stream=stdout)
        try:
            yield output
        except BaseException as error:
            is_told = bool(output.emitted) or isinstance(error, (typer.Exit, GeneratorExit))
            if not is_told and os.environ.get("RANK", "0") == "0":  # of several processes one speaks
                output.emit({"error": error_as_json(error)})
            raise


def as_mistake(error: BaseException) -> BaseException:
    """The error itself; for a missing package of an extra, and for memory that ran out, the `UserError` that says what
    to do."""
    if _is_of_memory(error):
        return UserError(
            f"memory ran out: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="less is needed with a smaller data.max_length or train.per_device_train_batch_size, with "
            "train.gradient_checkpointing: true, adapter: lora, or a smaller model; luthier plan estimates it",
        )
    if not isinstance(error, ModuleNotFoundError):
        return error
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    if extra is None:
        return error
    return UserError(f"this needs the package {package!r}, which is not installed", hint=install_hint(extra))


def _is_of_memory(error: BaseException) -> bool:
    """torch has a class for a GPU's memory, and for the machine's own a sentence of its allocator."""
    told = isinstance(error, RuntimeError) and re.search(r"can't allocate memory|not enough memory", str(error))
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or bool(told)


def error_as_json(error: BaseException) -> dict[str, object]:
    """An error for programs: its class, message, hint, and a config's problems one by one."""
    error = as_mistake(error)
    told: dict[str, object] = {"type": type(error).__name__, "message": str(error), "hint": None}
    if isinstance(error, UserError):
        told |= {"message": error.message, "hint": error.hint, "where": error.where, "key": error.key}
    if isinstance(error, ConfigError):
        told["problems"] = [
            {"where": problem.where, "key": problem.key, "what": problem.what, "hint": problem.hint}
            for problem in error.problems
        ]
    return told
