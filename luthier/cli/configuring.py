"""``luthier config``: the run description itself."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from luthier import __version__
from luthier.cli.output import JsonTarget, reporting
from luthier.cli.pipeline import ConfigFile, Overrides
from luthier.cli.training import train_and_tell
from luthier.terminal import facts_table, stderr_terminal
from luthier.writing import counted, printable, to_json, write_text

if TYPE_CHECKING:
    from luthier.check.bug_report import Environment


app = typer.Typer(no_args_is_help=True, help="Check a run description, or get its schema for your editor.")


@app.command("show")
def show(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Check a config and print it with every default filled in; use it before you start a long run.

    All mistakes are told at once, each with its line and a way out.

    [dim]Example[/]   luthier config show run.yaml
    [dim]Example[/]   luthier config show run.yaml train.learning_rate=1e-4 > resolved.yaml
    """
    with reporting(json) as output:
        from luthier.cli.dumping import dump_config
        from luthier.config.loading import load_draft

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
        from luthier.cli.dumping import dump_translation
        from luthier.config.loading import load_draft
        from luthier.errors import UserError

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
    from luthier.check.bug_report import environment

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
