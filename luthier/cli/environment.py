"""``luthier env`` and ``luthier version``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from luthier import __version__
from luthier.cli.output import JsonTarget, reporting

if TYPE_CHECKING:
    from luthier.check.environment import Environment


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
    from luthier.check.environment import environment

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
    table.add_row("cpu", f"{found.cpu}, {found.cpu_count} cores, {found.usable_cpus} usable")
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
