"""Where in a chat template something happened: its line, and the expression that stands there."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from jinja2 import Environment

LONGEST_SHOWN = 160


def expression_at(source: str, line: int, names: Sequence[str]) -> str:
    """``line 3: {{ message.content | urlencode }}: ``, the expression being the one that has most of the names."""
    found: list[tuple[int, str]] = []
    for start, text in _expressions(source):
        if start <= line <= start + text.count("\n"):
            found.append((-sum(name in re.findall(r"\w+|%", text[2:-2]) for name in names), text))
    if not found:
        return f"line {line}: "
    shown = " ".join(min(found, key=lambda pair: pair[0])[1].split())
    return f"line {line}: {shown if len(shown) <= LONGEST_SHOWN else shown[: LONGEST_SHOWN - 1] + '…'}: "


@functools.lru_cache(maxsize=8)
def _expressions(source: str) -> tuple[tuple[int, str], ...]:
    """All that stands between braces in a template, each with the line that it begins in."""
    found: list[tuple[int, str]] = []
    for line, token, text in Environment(trim_blocks=True, lstrip_blocks=True).lex(source):
        if token in ("variable_begin", "block_begin"):
            found.append((line, text))
        elif found and token not in ("data", "comment_begin", "comment", "comment_end"):
            found[-1] = (found[-1][0], found[-1][1] + text)
    return tuple(found)
