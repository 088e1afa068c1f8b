"""``luthier config``: the run description itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from luthier.cli.output import JsonTarget, reporting
from luthier.cli.pipeline import ConfigFile, Overrides
from luthier.terminal import stderr_terminal
from luthier.writing import printable, to_json, write_text

app = typer.Typer(no_args_is_help=True, help="Check a run description, or get its schema for your editor.")


@app.command("show")
def show(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Check a config and print it with every default filled in; use it before you start a long run.

    All mistakes are told at once, each with its line and a way out.

    [dim]Example[/]   luthier config show run.yaml
    [dim]Example[/]   luthier config show run.yaml train.learning_rate=1e-4 > resolved.yaml
    """
    with reporting(json) as output:
        from luthier.config.dumping import dump_config
        from luthier.config.loading import load_config

        resolved = load_config(config, overrides or ())

        if json is None:  # as plain text: colours or wrapped lines would not be YAML any more
            text = dump_config(resolved)
            typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
        output.emit(resolved.model_dump(mode="json"))


@app.command("schema")
def schema(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it to a file.")] = None,
) -> None:
    """Print the JSON schema of run descriptions; point your editor at it for completion and checks.

    In VS Code: put  # yaml-language-server: $schema=luthier.schema.json  on the first line of your config.

    [dim]Example[/]   luthier config schema --out luthier.schema.json
    """
    from luthier.config.reference import config_schema

    text = to_json(config_schema())
    if out is None:
        typer.echo(text)
        return
    write_text(out, text + "\n")
    stderr_terminal().print(f"[dim]schema in[/] {out}", highlight=False)
