"""What a plain (unquoted) YAML value means: the core schema of YAML 1.2, and text for all that is in doubt.

    true -> True    12 -> 12    1e-4 -> 0.0001    .5 -> 0.5    ~ -> None
    yes -> "yes"    010 -> "010"    12:30:45 -> "12:30:45"    1_000 -> "1_000"    2024-01-01 -> "2024-01-01"

A number field refuses the texts of the second line, so that nothing is guessed.
"""

from __future__ import annotations

import re

LONGEST_NUMBER = 400  # characters; a longer one is text, as no number that is meant needs them

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_OTHER_BASE = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_plain(text: str) -> bool | int | float | str | None:
    """The value of an unquoted text."""
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OTHER_BASE.fullmatch(text):
        return int(text, base=0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def number_meant(text: str) -> str | None:
    """The number that a text may have been meant as, as it should be written; None if it is none.

    1_000 -> 1000, "1,000" -> 1000, 10% -> 0.1, 2e-5 in quotes -> 2e-5
    """
    text = text.strip()
    if len(text) > LONGEST_NUMBER:
        return None
    if re.fullmatch(r"[0-9]{1,3}([_,][0-9]{3})+", text):
        return re.sub(r"[_,]", "", text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?%", text):
        return f"{float(text[:-1]) / 100:g}"
    if thousands := re.fullmatch(r"([1-9][0-9]*)[kK]", text):
        return thousands[1] + "000"
    value = read_plain(text)
    return text if isinstance(value, int | float) and not isinstance(value, bool) else None
