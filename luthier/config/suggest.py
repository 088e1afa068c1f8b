"""The nearest known name to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_NAME = 80  # characters; a longer one is no typing slip, and comparing it takes long
SHORTEST_STEM = 4  # characters of a name's beginning that tell what was meant


def nearest(key: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that ``key`` was most likely meant to be, or None if none is near.

    >>> nearest("learning_rte", ["learning_rate", "warmup_steps"])
    'learning_rate'
    """
    if len(key) > LONGEST_NAME:
        return None
    by_form = {_form(name): name for name in allowed}
    form = _form(key)
    if form in by_form:
        return by_form[form]
    if len(form) >= SHORTEST_STEM:
        for known, name in by_form.items():
            if known.startswith(form):
                return name  # adamw -> adamw_torch, the first of its family
    close = difflib.get_close_matches(form, by_form, n=1, cutoff=0.7)
    return by_form[close[0]] if close else None


def _form(name: str) -> str:
    # Learning-Rate, learningRate and learning_rate are one name
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
