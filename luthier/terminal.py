"""The one console through which words reach a terminal: no text of a row, a file or a key can steer it.

Everything that Luthier prints for people goes through `Terminal`. Its own colours are control segments of rich; what
stands in a text is text, so an escape sequence in a file's name is shown as ``\\u001b[31m`` and does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from luthier.writing import printable


class Terminal(Console):
    """rich's console, with every control character of every text made visible."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable; those that are not rich's own control codes are `printable`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def stderr_terminal(**options: Any) -> Terminal:
    """The console for everything that is no result."""
    return Terminal(stderr=True, **options)
