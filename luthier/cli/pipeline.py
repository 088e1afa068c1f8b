"""What commands share: their arguments, and the printing of what a run says before it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from luthier.cli.preparing import preparing
from luthier.library import Listener, Remark

if TYPE_CHECKING:
    from luthier.check.loaded import Loaded
    from luthier.preparation.prepare import Progress
    from luthier.preparation.prepared import Prepared

ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="The run description, a YAML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that win over the file's: train.max_steps=10"),
]


@contextmanager
def listening(console: Console, heard: Listener | None = None) -> Iterator[Listener]:
    """A listener for the functions of `luthier.library`: it shows remarks, and a line of progress while rows are
    prepared. ``heard`` gets every event, once the line is gone where the event ends it.
    """
    from luthier.check.loaded import Loaded
    from luthier.config.schema import RunConfig
    from luthier.preparation.prepare import Progress

    with ExitStack() as line:
        shown: list[Callable[[Progress], None]] = []

        def hear(event: object) -> None:
            match event:
                case RunConfig():
                    wanted = event.tracking.progress
                    shown.append(line.enter_context(preparing(console, wanted=wanted)))
                case Progress():
                    shown[-1](event)
                case Loaded():
                    line.close()
                case Remark():
                    console.print(Text(event.text, style="yellow"))
            if heard is not None:
                heard(event)

        yield hear


def tell_preparation(loaded: Loaded, console: Console) -> None:
    """One line: how many rows, how many of them new, how long it took; and where the lost ones are."""
    prepared = loaded.prepared
    text = Text.assemble(
        ("Prepared ", "bold"),
        f"{prepared.num_encoded + prepared.num_reused:,} rows in {loaded.seconds:.1f} s",
        (f"   {prepared.num_encoded:,} encoded, {prepared.num_reused:,} from the store", "dim"),
    )
    console.print(text)
    for remark in _remarks(prepared):
        console.print(Text(f"  {remark}", style="dim"))
    if prepared.quarantine is not None:
        console.print(Text.assemble(("  lost rows are in ", "yellow"), str(prepared.quarantine)))


def _remarks(prepared: Prepared) -> list[str]:
    """How files were read, source by source, where that was found out or left to a default; each is told once."""
    import numpy as np

    sides = [prepared.train] if prepared.eval is None else [prepared.train, prepared.eval]
    told = [f"{source.name}: {remark}" for side in sides for source in side.sources for remark in source.remarks]
    if prepared.eval is not None:
        held_out = prepared.eval.sample_ids
        same = int(np.isin(held_out, prepared.train.sample_ids).sum())
        if same:
            told.append(f"{same:,} of {len(held_out):,} held-out rows are trained on, too: their loss says little")
    return list(dict.fromkeys(told))
