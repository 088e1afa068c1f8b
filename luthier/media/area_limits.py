"""Pictures brought within limits of area before a processor that has no such limits sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from luthier.records import ImageHeader

if TYPE_CHECKING:
    import PIL.Image


@dataclass(frozen=True, kw_only=True, slots=True)
class AreaLimits:
    """Fewest and most pixels; None: no limit. The shape is kept up to a pixel: 400x100 with 10000 at most -> 200x50."""

    least: int | None = None
    most: int | None = None

    def header(self, header: ImageHeader) -> ImageHeader:
        """The header of the picture within the limits."""
        width, height = self._size(header.width, header.height)
        return replace(header, width=width, height=height)

    def picture(self, picture: PIL.Image.Image) -> PIL.Image.Image:
        """The picture within the limits, of the size that `header` says."""
        size = self._size(*picture.size)
        return picture if size == picture.size else picture.resize(size)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        area = width * height
        wanted = min(max(area, self.least or area), self.most or max(area, self.least or area))
        if wanted == area:
            return width, height
        scale = math.sqrt(wanted / area)
        # never over the most that may be, so sides are rounded down; up where there is a least
        tidy = math.floor if wanted < area else math.ceil
        return max(1, tidy(width * scale)), max(1, tidy(height * scale))
