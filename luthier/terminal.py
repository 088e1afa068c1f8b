"""The one console through which words reach a terminal: no text of a row, a file or a key can steer it.

Everything that Luthier prints for people goes through `Terminal`. Its own colours are control segments of rich; what
stands in a text is text, so an escape sequence in a file's name is shown as ``\\u001b[31m`` and does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table

from luthier.writing import printable


class Terminal(Console):
    """rich's console, with every control character of every text made visible."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable; those that are not rich's own control codes are `printable`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def plain_table(*texts: Column | str, numbers: Sequence[str] = (), gap: int = 3) -> Table:
    """A table without lines and with ``gap`` spaces between its columns: first texts, which are folded, then numbers at
    the right. It has a head where a column has a name."""
    columns = [Column(text, overflow="fold") if isinstance(text, str) else text for text in texts]
    columns += [Column(name, justify="right", no_wrap=True) for name in numbers]
    has_head = any(column.header for column in columns)
    return Table(*columns, box=None, header_style="dim", show_header=has_head, padding=(0, gap, 0, 0))


def facts_table(facts: Iterable[tuple[str, RenderableType]], gap: int = 3) -> Table:
    """A line for each fact: its name and what it is."""
    table = plain_table(Column(style="dim", no_wrap=True), "", gap=gap)
    for name, told in facts:
        table.add_row(name, told)
    return table


stderr_terminal = functools.partial(Terminal, stderr=True)  # the console for everything that is no result
