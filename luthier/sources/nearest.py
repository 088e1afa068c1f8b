"""Names close to a mistyped one, for the hints of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_names(name: str, names: Iterable[str], limit: int = 3) -> str:
    """``"identiy"`` among data set names -> ``"identity"``; empty if nothing is close."""
    return ", ".join(difflib.get_close_matches(name, list(names), n=limit, cutoff=0.6))
