"""What the data sets of a run are called."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def distinct_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """A name for each of ``count`` data sets, no two the same.

    ``(["a", "b", "a"], 3) -> ("a", "b", "a (2)")``, ``([], 2) -> ("source 1", "source 2")``
    """
    given = [*names, *(f"source {number}" for number in range(len(names) + 1, count + 1))]
    found: list[str] = []
    for name in given:
        copies = (f"{name} ({number})" for number in itertools.count(2))
        found.append(name if name not in found else next(copy for copy in copies if copy not in given + found))
    return tuple(found)
