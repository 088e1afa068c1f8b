"""White space and control characters made visible, for terminals and pages alike."""

from __future__ import annotations

import unicodedata

_SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x1b": "␛"}


def visible(text: str) -> str:
    """Text in which what moves or hides the cursor is a sign: ``"a\\n" -> "a↵"``. Spaces stay spaces.

    Format characters such as bidirectional overrides are spelled out; the joiner of emoji is left in place.
    """
    return "".join(_SHOWN.get(character) or _sign(character) for character in text)


def _sign(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cc" or (category == "Cf" and character != "\N{ZERO WIDTH JOINER}"):
        return f"‹U+{ord(character):04X}›"
    return character
