"""Runs of one token in an excerpt, told once: the slots of a picture are many, and all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from luthier.check.diff import Unit

FEWEST = 4  # fewer are written out


def repeats(units: Sequence[Unit], *, at: int = -1) -> Iterator[tuple[int, Unit, int]]:
    """``(place, unit, count)``: ``a b b b b c -> (0, a, 1), (1, b, 4), (5, c, 1)``.

    Learned tokens, characters (which have no id) and the unit at ``at`` stand alone.
    """

    def key(numbered: tuple[int, Unit]) -> tuple[Unit, bool]:
        place, unit = numbered
        return unit, place == at or unit.target or unit.id is None

    for (_, is_single), group in groupby(enumerate(units), key=key):
        same = list(group)
        if is_single or len(same) < FEWEST:
            yield from ((place, unit, 1) for place, unit in same)
        else:
            place, unit = same[0]
            yield place, unit, len(same)
