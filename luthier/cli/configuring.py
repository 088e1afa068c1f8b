"""``luthier config``: the run description itself."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import asdict
from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from luthier import __version__
from luthier.cli.output import JsonTarget, reporting
from luthier.cli.pipeline import ConfigFile, Overrides
from luthier.cli.training import train_and_tell
from luthier.config.adapters import own_values
from luthier.config.peers.translation import Translation
from luthier.config.schema import RunConfig
from luthier.config.tree import ListNode, MappingNode, Node, plain
from luthier.config.yaml_text import read_plain
from luthier.terminal import stderr_terminal
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
        from luthier.cli.configuring import dump_config
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
        from luthier.cli.configuring import dump_translation
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
    stderr_terminal().print(f"[dim]schema in[/] {out}", highlight=False)


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
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("luthier", found.luthier)
    table.add_row("python", found.python)
    table.add_row("platform", found.platform)
    table.add_row("cpu", f"{found.cpu}, {counted(found.cpu_count, 'core')}, {found.usable_cpus} usable")
    table.add_row("memory", _memory(found))
    table.add_row("cuda", found.cuda or "none")
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


# --------------------------------------------------------------------------------------------------------------------
# A `RunConfig` -> YAML that `load_config` reads back to an equal one. Defaults are written out, so that a saved run
# keeps its meaning when a default changes.


_PLAIN = re.compile(r"[A-Za-z_/.~][A-Za-z0-9_./+-]*(:[A-Za-z0-9_./+-]+)?")
# what YAML 1.1 readers take for a boolean: quoted, although ours does not
_OLD_BOOLEANS = frozenset({"y", "n", "yes", "no", "on", "off"})
_NEVER_FOLDED = 1 << 30  # characters of a line


class _Explicit(RoundTripRepresenter):
    """Writes ``null`` where ruamel writes nothing."""


_Explicit.add_representer(type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null"))


def dump_config(config: RunConfig) -> str:
    """The run description as YAML text.

    Raises TypeError where a free-form value (``config_overrides``, ``kwargs`` …) is no plain YAML value.
    """
    values = config.model_dump(mode="python")
    values["adapter"] = own_values(config.adapter, values["adapter"])
    yaml = YAML()
    yaml.Representer = _Explicit
    yaml.width = _NEVER_FOLDED
    yaml.indent(mapping=2, sequence=4, offset=2)
    written = io.StringIO()
    yaml.dump(_plain_value(values), written)
    return written.getvalue()


def dump_translation(translation: Translation, name: str) -> str:
    """What the file ``name`` of another tool says, as a run description of ours that loads: of each line the comment
    says where it comes from, and comments at the end name what was passed over."""
    values = CommentedMap()
    for section in RunConfig.model_fields:
        if (node := translation.tree.entries.get(section)) is not None:
            values[section] = _with_comments(node, section, translation)
    yaml = YAML()
    yaml.Representer = _Explicit
    yaml.width = _NEVER_FOLDED
    yaml.indent(mapping=2, sequence=4, offset=2)
    written = io.StringIO()
    yaml.dump(values, written)
    head = [f"Read from {name}.", *translation.told]
    tail = [f"{key} is passed over: {why}" for key, why in translation.passed.items()]
    return "".join(f"# {line}\n" for line in head) + written.getvalue() + "".join(f"# {line}\n" for line in tail)


def _with_comments(node: Node, key: str, translation: Translation) -> object:
    if isinstance(node, ListNode):
        return [_with_comments(item, f"{key}[{index}]", translation) for index, item in enumerate(node.items)]
    if not isinstance(node, MappingNode):
        return _plain_value(plain(node))
    commented = CommentedMap()
    for name, value in node.entries.items():
        commented[name] = _with_comments(value, f"{key}.{name}", translation)
        if (theirs := translation.origins.get(f"{key}.{name}")) is not None:
            line = "" if value.where.line is None else f", line {value.where.line}"
            commented.yaml_add_eol_comment(f"{theirs}{line}", name)
    return commented


def _plain_value(value: object) -> object:
    """The value as YAML has it; a text that a reader could take for anything else is in quotes."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            is_plain = _PLAIN.fullmatch(value) and isinstance(read_plain(value), str)
            return str(value) if is_plain and value.lower() not in _OLD_BOOLEANS else DoubleQuotedScalarString(value)
        case dict():
            return {_plain_value(str(key)): _plain_value(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_plain_value(entry) for entry in value]
        case _ if hasattr(value, "__fspath__"):
            return _plain_value(str(value))
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written to YAML: {value!r}")
