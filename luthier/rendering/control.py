"""Control tokens: the strings that mean something to the model beyond their letters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class ControlTokens:
    """The control vocabulary of a tokenizer under a chat template, as far as rendering needs it.

    tokens   all control strings: special tokens, and added tokens that the template writes itself (``<think>``)
    special  those that the tokenizer calls special
    stops    those that end a generation (end of sequence, and the generation config's)
    lstrip   those that swallow white space on their left when a text is tokenized; ``rstrip``: on their right
    opening  what the tokenizer puts before plain text (a begin-of-sequence token, or nothing)
    closing  what ends a plain document (the end-of-sequence token)
    """

    tokens: frozenset[str]
    special: frozenset[str] = frozenset()
    stops: frozenset[str] = frozenset()
    lstrip: frozenset[str] = frozenset()
    rstrip: frozenset[str] = frozenset()
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = field(default=())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokens, key=lambda token: (-len(token), token))
        return re.compile("|".join(map(self._one, longest_first)) or r"(?!)")

    def _one(self, token: str) -> str:
        before = r"\s*" if token in self.lstrip else ""
        after = r"\s*" if token in self.rstrip else ""
        return f"{before}{re.escape(token)}{after}"

    def find(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Every control string in a text: the span it takes, white space it swallows included, and the token."""
        for match in self._pattern.finditer(text):
            found = match.group()
            yield match.start(), match.end(), found if found in self.tokens else found.strip()
