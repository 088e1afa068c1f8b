"""``luthier quickstart``: a whole run in a few minutes, with nothing to download."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from luthier.cli.output import JsonTarget, reporting
from luthier.cli.training import train_and_tell


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
    Senses, typer.Argument(metavar="[text|vl|audio]", help="What it learns from: words, pictures, or sounds.")
]
OutputFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the results go.")]


def quickstart(
    senses: WhatItLearns = Senses.TEXT,
    out: OutputFolder = Path("luthier-quickstart"),
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
            overrides = [f"output.dir={out}", "output.overwrite=true"]
            report = train_and_tell(str(config), overrides, output.console, quickstart=True)
        output.emit(report.to_json())
    if report.result.exit_code:
        raise typer.Exit(report.result.exit_code)
