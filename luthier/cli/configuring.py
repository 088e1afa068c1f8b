"""``luthier config``, ``luthier env``, ``luthier train``: the run description, the machine, and a run of the two."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from luthier import __version__, library
from luthier.cli import ConfigFile, JsonTarget, Overrides, listening, reporting, tell_preparation
from luthier.errors import UserError
from luthier.terminal import facts_table, stderr_terminal
from luthier.writing import counted, printable, to_json, write_text

if TYPE_CHECKING:
    from luthier.training.report.report import Report

app = typer.Typer(no_args_is_help=True, help="Check a run description, or get its schema for your editor.")


@app.command("show")
def show(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Check a config and print it with every default filled in; use it before you start a long run.

    All mistakes are told at once, each with its line and a way out.

    [dim]Example[/]   luthier config show run.yaml
    [dim]Example[/]   luthier config show run.yaml train.learning_rate=1e-4 > resolved.yaml
    """
    with reporting(json) as output:
        from luthier.config.loading import dump_config, load_draft

        draft = load_draft(config, overrides or ())
        resolved = draft.config
        for line in () if draft.translation is None else draft.translation.summary:
            stderr_terminal().print(f"[yellow]{escape(line)}[/]", highlight=False)

        if json is None:  # as plain text: colours or wrapped lines would not be YAML any more
            text = dump_config(resolved)
            typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
        output.emit(resolved.model_dump(mode="json"))


@app.command("import")
def import_(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the run description that a file of another tool stands for; use it to go on with a file of Luthier's.

    A comment says of each line which key of theirs it comes from, or that it is what their tool does by default.

    [dim]Example[/]   luthier config import llama3_lora_sft.yaml > run.yaml
    """
    with reporting(None):
        from luthier.config.loading import dump_translation, load_draft

        draft = load_draft(config, overrides or (), check_paths=False)
        if draft.translation is None:
            raise UserError(
                f"{config} is a run description of Luthier's already", hint="luthier config show prints it whole"
            )
        text = dump_translation(draft.translation, config)
        typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


@app.command("schema")
def schema(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it to a file.")] = None,
) -> None:
    """Print the JSON schema of run descriptions; point your editor at it for completion and checks.

    In VS Code: put  # yaml-language-server: $schema=luthier.schema.json  on the first line of your config.

    [dim]Example[/]   luthier config schema --out luthier.schema.json
    """
    from luthier.config.words import config_schema

    text = to_json(config_schema())
    if out is None:
        typer.echo(text)
        return
    write_text(out, text + "\n")
    stderr_terminal().print(Text.assemble(("schema in", "dim"), f" {out}"))


# --------------------------------------------------------------------------------------------------------------------
# ``luthier env`` and ``luthier version``.


def version() -> None:
    """Print the version and nothing else; use it in scripts.

    [dim]Example[/]   luthier version
    """
    typer.echo(__version__)


def env(json: JsonTarget = None) -> None:
    """Print what a bug report needs: versions, machine, GPUs. Paste it as it is.

    Nothing that is missing makes it fail; no path, name or environment variable of yours is in it.

    [dim]Example[/]   luthier env
    [dim]Example[/]   luthier env --json env.json
    """
    with reporting(json) as output:
        found = environment()
        output.console.print(_table(found))
        output.emit(asdict(found))


def _table(found: Environment) -> Table:
    facts = [
        ("luthier", found.luthier),
        ("python", found.python),
        ("platform", found.platform),
        ("cpu", f"{found.cpu}, {counted(found.cpu_count, 'core')}, {found.usable_cpus} usable"),
        ("memory", _memory(found)),
        ("cuda", found.cuda or "none"),
    ]
    table = facts_table(facts, gap=2)
    for gpu in found.gpus:
        table.add_row("gpu", f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB, capability {gpu.capability}")
    if found.gpu_note is not None:
        table.add_row("gpu", f"none: {found.gpu_note}")
    table.add_section()
    for name, package_version in found.packages.items():
        table.add_row(name, package_version or "[dim]not installed[/]")
    return table


def _memory(found: Environment) -> str:
    total = "unknown" if found.memory_bytes is None else f"{found.memory_bytes / 2**30:.1f} GiB"
    limit = found.memory_limit_bytes
    return total if limit is None else f"{total}, limited to {limit / 2**30:.1f} GiB"


# --------------------------------------------------------------------------------------------------------------------
# ``luthier quickstart``: a whole run in a few minutes, with nothing to download.


class Senses(StrEnum):
    """What the tiny model is given to understand, and the run description that does it."""

    TEXT = "text"
    PICTURES = "vl"
    SOUNDS = "audio"

    @property
    def file(self) -> str:
        """The packaged run description."""
        return "quickstart.yaml" if self is Senses.TEXT else f"quickstart_{self}.yaml"


WhatItLearns = Annotated[
    Senses, typer.Argument(metavar="[text|vl|audio]", help="What it learns from: text, images, or audio.")
]
OutputFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where the results go. Default: output/quickstart, or …_vl, …_audio."),
]


def quickstart(
    senses: WhatItLearns = Senses.TEXT,
    out: OutputFolder = None,
    json: JsonTarget = None,
) -> None:
    """Train a tiny model from nothing on generated data, offline; use it to see that everything works here.

    The model answers held-out rows before and after; the share of exact answers is printed and reported.

    [dim]Example[/]   luthier quickstart
    [dim]Example[/]   luthier quickstart vl                           [dim]pictures[/]
    [dim]Example[/]   luthier quickstart --out /tmp/first-run --json -
    """
    with reporting(json) as output:
        with as_file(files("luthier.cli") / senses.file) as config:
            overrides = ["output.overwrite=true", *([] if out is None else [f"output.dir={out}"])]
            report = train_and_tell(str(config), overrides, output.console, quickstart=True)
        output.emit(report.to_json())
    if report.result.exit_code:
        raise typer.Exit(report.result.exit_code)


# ---- ``luthier train``: a run from its config to its report.

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
        report = train_and_tell(config, overrides or (), output.console)
        if library.is_main_process():
            output.emit(report.to_json())
    if report.result.exit_code:
        raise typer.Exit(report.result.exit_code)


def train_and_tell(config: str, overrides: Sequence[str], console: Console, *, quickstart: bool = False) -> Report:
    """Train, and print what the run says of itself on the way."""
    with listening(console, lambda event: _tell(event, console)) as listen:
        return library.train_and_report(config, overrides=overrides, on_event=listen, quickstart=quickstart)


def _tell(event: object, console: Console) -> None:
    from luthier.check.plan import RunPlan
    from luthier.check.plan.terminal import plan_table
    from luthier.check.terminal import RowText
    from luthier.loader.settings import Loaded
    from luthier.training.report.report import summary

    match event:
        case Loaded():
            tell_preparation(event, console)
        case RunPlan():
            console.print()
            console.print(plan_table(event))
        case library.FirstSample():
            console.print()
            console.print("[bold]The first sample[/] [dim]as the model sees it; luthier show has the others[/]")
            for view in event.rows:
                console.print(RowText(row=view, max_tokens=MAX_TOKENS_SHOWN))
        case library.Reported():
            console.print()
            console.print(summary(event.report, list(event.files)))


# ---- What a bug report needs to know of the machine and its packages. Nothing absent makes it fail.

PACKAGES = (
    "torch", "transformers", "tokenizers", "accelerate", "peft", "datasets", "huggingface-hub", "safetensors",
    "flash-attn", "liger-kernel", "bitsandbytes", "deepspeed", "numpy", "numba", "pyarrow", "pydantic", "jinja2",
    "msgspec", "ruamel.yaml", "typer", "rich", "matplotlib",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A device as CUDA names it."""

    name: str
    memory_bytes: int
    capability: str  # "9.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The machine. A package that is not installed has the version None; so has whatever could not be found out."""

    luthier: str
    python: str
    platform: str
    cpu: str
    cpu_count: int
    usable_cpus: int  # what this process may use
    memory_bytes: int | None
    memory_limit_bytes: int | None  # of the control group, in containers
    cuda: str | None  # that torch was built for
    gpus: tuple[Gpu, ...]
    gpu_note: str | None  # why there are no gpus to list
    packages: dict[str, str | None]


def environment() -> Environment:
    """Look around. Imports torch where it is installed, for only torch knows which GPUs it can use."""
    from luthier.config.machine import usable_cores

    cuda, gpus, note = _gpus()
    return Environment(
        luthier=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_name(),
        cpu_count=os.cpu_count() or 1,
        usable_cpus=usable_cores(),
        memory_bytes=_physical_memory(),
        memory_limit_bytes=_memory_limit(),
        cuda=cuda,
        gpus=gpus,
        gpu_note=note,
        packages={name: _version(name) for name in PACKAGES},
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf; others may not know these names
        return None


def _memory_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # absent, or "max"
            continue
        if limit < 1 << 60:  # cgroup v1 says "no limit" by a number near 2**63
            return limit
    return None


def _gpus() -> tuple[str | None, tuple[Gpu, ...], str | None]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        return None, (), f"torch cannot be imported: {error}"
    cuda = torch.version.cuda
    if not torch.cuda.is_available():
        return cuda, (), "torch was built without CUDA" if cuda is None else "torch sees no CUDA device"
    try:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a driver that is too old, a device in use by another
        return cuda, (), f"CUDA does not answer: {str(error).splitlines()[0]}"
    gpus = tuple(
        Gpu(name=device.name, memory_bytes=device.total_memory, capability=f"{device.major}.{device.minor}")
        for device in devices
    )
    return cuda, gpus, None
