"""``luthier store``: the encoded samples on this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from luthier.cli import EXIT_UNTRUE, JsonTarget, reporting
from luthier.errors import UserError
from luthier.writing import counted

if TYPE_CHECKING:
    from luthier.store.care import Cleaning, StoreHealth, StoreInfo

app = typer.Typer(no_args_is_help=True, help="The encoded samples on this machine: list, check, clean up, export.")

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

Stores = Annotated[
    Path | None,
    typer.Argument(metavar="FOLDER", help="What data.store names, or one store in it. Default: ~/.cache/luthier/store"),
]
OneStore = Annotated[Path, typer.Argument(metavar="STORE", help="The folder of one store.", show_default=False)]


def seconds(text: str) -> float:
    """``30d`` in seconds; also s, m, h and w. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a length of time; write 30d, 12h, 90m or 2w")
    return float(match[1]) * SECONDS[match[2]]


def size(text: str) -> int:
    """``50GB`` in bytes; also MB, TB or plain bytes. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 50GB, 800MB or 2TB")
    return int(float(match[1]) * BYTES[match[2]])


@app.command("ls")
def list_(folder: Stores = None, json: JsonTarget = None) -> None:
    """List the stores: what made them, how large they are, when they were last used.

    [dim]Example[/]   luthier store ls
    [dim]Example[/]   luthier store ls /data/store --json -
    """
    with reporting(json) as output:
        from luthier.store.care import list_stores

        root = _root(folder)
        found = list_stores(root)
        told = [_store(info) for info in found] or [_no_store(root)]
        output.console.print(Text("\n").join(told), soft_wrap=True)
        output.emit({"root": str(root), "stores": [_plain(asdict(info)) for info in found]})


@app.command("verify")
def verify(
    folder: Stores = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is damaged: those rows will be encoded again.")
    ] = False,
    json: JsonTarget = None,
) -> None:
    """Read every byte of every store and name what is damaged; the exit code is then 3.

    [dim]Example[/]   luthier store verify
    [dim]Example[/]   luthier store verify /data/store --repair
    """
    with reporting(json) as output:
        from luthier.store.care import store_folders, verify_store

        root, reports = _root(folder), []
        for store in store_folders(root):
            with _progress(output.console, f"reading {store.name}") as on_shard:
                health = verify_store(store, repair=repair, on_shard=on_shard)
            reports.append(health)
            output.console.print(_health(health), soft_wrap=True)
        if not reports:
            output.console.print(_no_store(root), soft_wrap=True)
        output.emit({"stores": [_plain(asdict(health)) for health in reports]})
    if any(health.damaged for health in reports):
        raise typer.Exit(EXIT_UNTRUE)


@app.command("gc")
def gc(
    folder: Stores = None,
    older_than: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar="30d", help="Also remove stores that were not used for so long."),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(parser=size, metavar="50GB", help="Remove the stores used least recently until this is enough."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: JsonTarget = None,
) -> None:
    """Remove the remains of killed processes and, if you say so, stores by age or size.

    A store that a process uses is left alone. What is gone is encoded again when a run needs it.

    [dim]Example[/]   luthier store gc --older-than 30d --dry-run
    [dim]Example[/]   luthier store gc --max-size 50GB
    """
    with reporting(json) as output:
        from luthier.store.care import clean_stores

        cleaning = clean_stores(_root(folder), older_than=older_than, max_bytes=max_size, dry_run=dry_run)
        _tell_cleaning(cleaning, output.console, dry_run=dry_run)
        output.emit({"dry_run": dry_run, **{key: _plain(value) for key, value in asdict(cleaning).items()}})


@app.command("export")
def export(
    store: OneStore,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The parquet file to write.", show_default=False)],
    json: JsonTarget = None,
) -> None:
    """Write a store as a parquet file: ids, targets, weights, branches and notes of every sample.

    [dim]Example[/]   luthier store export ~/.cache/luthier/store/NAME samples.parquet
    """
    with reporting(json) as output:
        from luthier.store.care import export_store

        with _progress(output.console, f"writing {target.name}") as on_samples:
            num_samples = export_store(store, target, on_samples=on_samples)
        output.console.print(Text.assemble(("Exported ", "bold"), f"{counted(num_samples, 'sample')} to {target}"))
        output.emit({"store": str(store), "file": str(target), "samples": num_samples})


def _root(folder: Path | None) -> Path:
    """The folder of the stores. Raises `UserError` where one is named that is not there."""
    from luthier.store.format import default_root

    if folder is not None and not folder.exists():
        raise UserError(
            f"there is no {folder}", hint=f"name what data.store names; without a name it is {default_root()}"
        )
    return folder or default_root()


def _no_store(root: Path) -> Text:
    return Text(f"no store in {root}", style="dim")


def _store(info: StoreInfo) -> Text:
    """Its name in a line of its own, so that it can be copied, and what there is to say of it."""
    made_for = str(info.about.get("model") or info.about.get("tokenizer") or "")
    when = "in use" if info.in_use else time.strftime("last used %Y-%m-%d %H:%M", time.localtime(info.last_use))
    sizes = f"{counted(info.num_samples, 'sample')}, {counted(info.num_tokens, 'token')}, {_human(info.num_bytes)}"
    text = Text.assemble(
        (info.folder.name, "bold"), f"\n  {sizes}, {when}", (f", made for {made_for}" * bool(made_for), "dim")
    )
    return text if info.problem is None else text.append(f"\n  {info.problem}", style="yellow")


def _health(health: StoreHealth) -> Text:
    what = (
        f"{counted(health.num_samples, 'sample')} in {counted(health.num_shards, 'shard')}, {_human(health.num_bytes)}"
    )
    if not health.damaged:
        return Text.assemble(("sound    ", "green"), f"{health.folder}  ", (what, "dim"))
    text = Text.assemble(("damaged  ", "bold red"), f"{health.folder}  ", (what, "dim"))
    for damage in health.damaged:
        lost = "" if damage.num_samples is None else f" ({counted(damage.num_samples, 'sample')})"
        text.append(f"\n         {damage.detail}{lost}")
    if health.repaired:
        text.append("\n         dropped: those rows will be encoded again", style="green")
    else:
        text.append(
            "\n         `luthier store verify --repair` drops it: those rows will be encoded again", style="dim"
        )
    return text


def _tell_cleaning(cleaning: Cleaning, console: Console, *, dry_run: bool) -> None:
    for removed in cleaning.removed:
        console.print(
            Text.assemble(f"{_human(removed.num_bytes):>9}  {removed.path}  ", (removed.reason, "dim")), soft_wrap=True
        )
    for path in cleaning.in_use:
        console.print(Text.assemble("   in use  ", str(path)), style="yellow", soft_wrap=True)
    total = _human(sum(removed.num_bytes for removed in cleaning.removed))
    console.print(Text.assemble(("Would free " if dry_run else "Freed ", "bold"), total))


@contextmanager
def _progress(console: Console, doing: str) -> Iterator[Callable[[int, int], None]]:
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _human(num_bytes: int) -> str:
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def _plain(value: object) -> object:
    match value:
        case Path():
            return str(value)
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value
