"""Texts that hold what a processor writes for an item: ``<|vision_start|><|image_pad|><|image_pad|><|vision_end|>``.

Rows of this form were prepared for one model. They are told by their look alone, and only in rows that say in no other
way where their media stand; that a stretch is one item's, as many slots as its header promises, is checked where the
model's processor is known (`encoding.measuring`).
"""

from __future__ import annotations

import re
from itertools import pairwise

_TOKEN = r"(?:<[^<>\n]{1,48}>|\[[A-Z_]{1,24}\])"
# Tokens one behind the other, with no more between them than what processors write: line breaks, numbers ("12*15").
_STRETCH = re.compile(rf"{_TOKEN}(?:[\s\d.*]{{0,12}}{_TOKEN})*")
_REPEATED = re.compile(rf"({_TOKEN})\1")


def written_slots(text: str) -> list[tuple[int, int]]:
    """Where a text has stretches of tokens in which one is repeated: ``"a <i><i> b"`` -> ``[(2, 8)]``."""
    return [found.span() for found in _STRETCH.finditer(text) if _REPEATED.search(found[0])]


def parted_slots(text: str) -> list[tuple[int, int]]:
    """The same with a stretch cut where its first token comes again: ``"<s><i><i><e><s><i><i><e>"`` has two items."""
    parts = []
    for start, end in written_slots(text):
        first = re.match(_TOKEN, text[start:end])
        assert first is not None, "a stretch begins with a token"
        places = [start + found.start() for found in re.finditer(re.escape(first[0]), text[start:end])]
        repeated = text.startswith(first[0] * 2, start)
        edges = [start, end] if repeated else [*places, end]
        parts += list(pairwise(edges))
    return parts
