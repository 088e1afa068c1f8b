"""Dialogues in one text, as HH-RLHF has them: ``"\\n\\nHuman: Hi\\n\\nAssistant: Hello!"``."""

from __future__ import annotations

import re

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def read_transcript(text: str) -> list[tuple[str, str]]:
    """``(role, text)`` of each turn; empty for a text that does not begin with what a human says.

    White space around a turn's text belongs to the form and is left out.
    """
    marks = list(_TURN.finditer(text))
    if not marks or marks[0].start() > 0 or marks[0][1] != "Human":
        return []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [(_ROLES[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
