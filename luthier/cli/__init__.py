"""The command ``luthier``: thin; each command parses, calls and prints.

Here: where a command prints (words for people, JSON for programs, never mixed), and the arguments that commands share.

``--json -`` puts JSON alone on stdout and sends everything else, stray prints of libraries included, to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from typer.core import TyperCommand

from luthier.errors import ConfigError, LuthierError, UserError, first_line, install_hint
from luthier.ledger import SAME_AS_HELD_OUT
from luthier.library import Listener, Remark
from luthier.terminal import Terminal
from luthier.writing import counted, to_json, write_text

if TYPE_CHECKING:
    from luthier.loader.settings import Loaded
    from luthier.preparation import Prepared
    from luthier.preparation.resolver import Progress as Progressed

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
    """The error itself; for a missing package of an extra, for memory or open files that ran out, for a home folder
    that is not known, a working folder that is gone, and code that came with the model, the `UserError` that says what
    to do."""
    if _is_of_memory(error):
        return UserError(
            f"memory ran out: {first_line(error)}",
            hint="less is needed with a smaller data.max_length or train.per_device_train_batch_size, with "
            "train.gradient_checkpointing: true, adapter: lora, or a smaller model; luthier plan estimates it",
        )
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib's, which has no class of its own
        return UserError(
            "a path begins with ~, or is below ~/.cache, and there is no such home folder",
            hint="set HOME, or XDG_CACHE_HOME and data.store; or write the path without ~",
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(f"{error.strerror}: {error.filename or 'a pipe'}", hint="raise the limit: ulimit -n 4096")
    if isinstance(error, FileNotFoundError) and error.errno and error.filename is None:  # `os.getcwd`'s
        return UserError("the folder that this was started in is gone", hint="cd to one that is there")
    if (place := _in_models_code(error)) is not None:
        return UserError(
            f"the code that came with the model failed ({place}): {type(error).__name__}: {first_line(error)}",
            hint="mend that code, or take a model without code of its own; transformers alone calls it in the same way",
        )
    if not isinstance(error, ModuleNotFoundError):
        return error
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    if extra is None:
        return error
    return UserError(f"this needs the package {package!r}, which is not installed", hint=install_hint(extra))


def _in_models_code(error: BaseException) -> str | None:
    """``FILE:LINE`` where code that a model brings (transformers keeps it in a package of its own) has failed;
    None where it is ours that has, also if that code called it."""
    if isinstance(error, LuthierError) or not isinstance(error, Exception):
        return None
    ours, theirs = Path(__file__).parents[1], "transformers_modules"
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    known = [(path, line) for path, line in frames if theirs in path.parts or path.is_relative_to(ours)]
    return f"{known[-1][0]}:{known[-1][1]}" if known and theirs in known[-1][0].parts else None


def _is_of_memory(error: BaseException) -> bool:
    """torch has a class for a GPU's memory, and for the machine's own a sentence of its allocator."""
    words = r"can't allocate memory|not enough memory|failed to map segment"  # the last are of torch that is loaded
    told = isinstance(error, RuntimeError | ImportError) and re.search(words, str(error))
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


# ---- Which options go together: one that would be taken and not followed is refused, before anything is loaded.

# Options that say nothing without another.
NEEDS: Mapping[str, Mapping[str, str]] = {
    "chat": {"--model": "--engine"},
    "predict": {"--model": "--engine"},
    "verify": {"--golden": "--against", "--token-env": "--against"},
}
# Options, or values of them, beside which others are not followed; None: all but --json.
EXCLUDES: Mapping[str, Mapping[str, tuple[str, ...] | None]] = {
    "export": {
        "--check": None,
        "--no-proof": ("--push",),
        "--format gguf": ("--quantize", "--max-shard"),
        "--format hf": ("--outtype", "--llama-cpp", "--modelfile"),
    },
    "serve": {"--accept-weights": ("--adapter",)},
    "show": {"--rollouts": ("--pack", "--batch", "--split")},
    "verify": {"--golden": ("--sample", "--split", "--stored", "--max-failures")},
}


class PairedCommand(TyperCommand):
    """A command with options that need or exclude each other."""

    def invoke(self, ctx: Any) -> Any:
        """Raises `UserError` for options that do not go together."""
        with reporting(ctx.params.get("json")):
            _check_pairs(str(self.name), _given(ctx))
        return super().invoke(ctx)


def _given(context: Any) -> list[str]:
    """What stands on the line, also with its value: ``["--format", "--format gguf", "--no-proof"]``."""
    found = []
    for option in context.command.params:
        if option.param_type_name == "option" and context.get_parameter_source(option.name).name != "DEFAULT":
            value = context.params[option.name]
            flag = (option.secondary_opts if value is False else option.opts)[0]
            found += [flag] if isinstance(value, bool) else [flag, f"{flag} {value}"]
    return found


def _check_pairs(command: str, given: Sequence[str]) -> None:
    for option, needed in NEEDS.get(command, {}).items():
        if option in given and needed not in given:
            raise UserError(f"{option} has no effect without {needed}", hint=f"add {needed}, or leave out {option}")
    for option, excluded in EXCLUDES.get(command, {}).items():
        others = [flag for flag in given if " " not in flag and flag not in (option, "--json")]
        wrong = [flag for flag in others if excluded is None or flag in excluded]
        if option in given and wrong:
            told = ", ".join(wrong)
            raise UserError(f"{told} cannot be given together with {option}", hint=f"leave out {told}, or {option}")


# ---- What commands share: their arguments, and the printing of what a run says before it trains.

ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="The run description, a YAML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that win over the file's: train.max_steps=10"),
]


@contextmanager
def saying(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """A line with a clock on what is being done, gone at the end. What it gives says how far that is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=f"{what}: {text}")


@contextmanager
def listening(console: Console, heard: Listener | None = None) -> Iterator[Listener]:
    """A listener for the functions of `luthier.library`: it shows a line of progress while rows are prepared, and all
    remarks, those on the data among them. ``heard`` gets every event, once the line is gone where the event ends it.
    """
    from luthier.config.schema import RunConfig
    from luthier.loader.settings import Loaded
    from luthier.preparation.resolver import Progress as Progressed

    with ExitStack() as line:
        shown: list[Callable[[Progressed], None]] = []

        def hear(event: object) -> None:
            match event:
                case RunConfig():
                    wanted = event.tracking.progress
                    shown.append(line.enter_context(preparing(console, wanted=wanted)))
                case Progressed():
                    shown[-1](event)
                case Loaded():
                    line.close()
                case Remark():
                    console.print(Text(event.text, style="yellow"))
            if heard is not None:
                heard(event)
            for remark in _remarks(event.prepared) if isinstance(event, Loaded) else ():
                console.print(Text(f"  {remark}", style="dim"))

        yield hear


def tell_preparation(loaded: Loaded, console: Console) -> None:
    """One line: how many rows, what they are for, how many of them are new, how long it took; where lost ones are."""
    prepared = loaded.prepared
    uses = _uses(loaded)
    text = Text.assemble(
        ("Prepared ", "bold"),
        f"{counted(prepared.num_encoded + prepared.num_reused, 'row')} in {loaded.seconds:.1f} s",
        f": {', '.join(uses)}" if len(uses) > 1 else "",
        (f"   {prepared.num_encoded:,} encoded, {prepared.num_reused:,} from the store", "dim"),
    )
    console.print(text)
    if prepared.quarantine is not None:
        console.print(Text.assemble(("  lost rows are in ", "yellow"), str(prepared.quarantine)))


def _uses(loaded: Loaded) -> list[str]:
    """What the prepared rows are for; these numbers add up to theirs."""
    train, held_out = loaded.train, loaded.held_out
    cut_away = len(train.lost_rows) + (0 if held_out is None else len(held_out.lost_rows))
    same = train.ledger.notes[SAME_AS_HELD_OUT]
    uses = [f"{train.ledger.prepared:,} to train on"]
    uses += [] if held_out is None else [f"{held_out.ledger.prepared:,} to evaluate on"]
    uses += [f"{same:,} left out as the same are evaluated on"] if same else []
    return uses + ([f"{cut_away:,} lost to data.max_length"] if cut_away else [])


def _remarks(prepared: Prepared) -> list[str]:
    """What is to be known of the sources, and whether rows are on both sides."""
    import numpy as np

    from luthier.preparation import remarks_on

    told = remarks_on([*prepared.train.sources, *(prepared.eval.sources if prepared.eval is not None else ())])
    if prepared.eval is not None:
        held_out = prepared.eval.sample_ids
        same = int(np.isin(held_out, prepared.train.sample_ids).sum())
        if same:
            told.append(
                f"{same:,} of {counted(len(held_out), 'held-out row is', 'held-out rows are')} "
                f"trained on, too: their loss says little"
            )
    return told


# --------------------------------------------------------------------------------------------------------------------
# The line that preparation shows while it works: how far it is, how fast, and how long it will still take.


RATE_SECONDS = 10.0  # rates are those of the last seconds: the first are spent on getting ready


@contextmanager
def preparing(console: Console, *, wanted: bool) -> Iterator[Callable[[Progressed], None]]:
    """Show progress while the block runs: call what this gives with each report. Nothing where nobody looks on."""
    if not wanted or not console.is_terminal:
        yield lambda progress: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[rates]}", style="dim"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=None, rates="")
        meter = RateMeter()

        def show(now: Progressed) -> None:
            nonlocal meter, task
            if meter.split not in ("", now.split):
                bar.remove_task(task)
                task = bar.add_task("preparing", total=None, rates="")
                meter = RateMeter()
            meter.add(now, time.perf_counter())
            total = None if now.share is None else 1.0
            bar.update(task, description=describe(now), completed=now.share or 0, total=total, rates=meter.rates())

        yield show


def describe(now: Progressed) -> str:
    """Rows by what became of them."""
    lost = f", {now.lost:,} lost" if now.lost else ""
    return f"preparing {now.split}: {counted(now.read, 'row')}, {now.encoded:,} encoded{lost}"


@dataclass(kw_only=True, slots=True, eq=False)
class RateMeter:
    """Rates over the last `RATE_SECONDS`."""

    split: str = ""
    _seen: deque[tuple[float, int, int]] = field(default_factory=deque)  # seconds, rows, tokens

    def add(self, now: Progressed, seconds: float) -> None:
        """Take in a report made at this time."""
        self.split = now.split
        self._seen.append((seconds, now.read, now.num_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= seconds - RATE_SECONDS:
            self._seen.popleft()

    def rates(self) -> str:
        """``"2,310 rows/s, 4.9M tokens/s"``; nothing before two reports."""
        if len(self._seen) < 2:
            return ""
        (start, rows, tokens), (stop, rows_now, tokens_now) = self._seen[0], self._seen[-1]
        seconds = max(stop - start, 1e-9)
        of_rows = f"{(rows_now - rows) / seconds:,.0f} rows/s"
        per_second = (tokens_now - tokens) / seconds
        return of_rows if not per_second else f"{of_rows}, {_short(per_second)} tokens/s"


def _short(number: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"
