"""Control tokens: the strings that mean something to the model beyond their letters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def with_places(self, tokens: Iterable[str]) -> ControlTokens:
        """The same where these count as control tokens, too: what a template prints for a media item need not be one,
        for a processor replaces it in text (Qianfan-OCR's ``<image>``).
        """
        more = frozenset(tokens) - self.tokens
        return replace(self, tokens=self.tokens | more) if more else self

    def count(self, texts: Sequence[str]) -> Counter[str]:
        """How often each control string stands in some texts."""
        text = "\0".join(texts)
        # far quicker than to look for each of them
        if not any(first in text for first in self._firsts) or not any(stem in text for stem in self._stems):
            return Counter()
        return Counter(token for _, _, token in self.find(text))

    @cached_property
    def _firsts(self) -> frozenset[str]:
        return frozenset(token[:1] for token in self.tokens)

    @cached_property
    def _stems(self) -> frozenset[str]:
        return frozenset(token[:2] for token in self.tokens)

    def without(self, text: str) -> str:
        """The text with no control string left in it."""
        while (found := self._pattern.sub("", text)) != text:  # what is left may come together to another one
            text = found
        return text

    def find(self, text: str, start: int = 0) -> Iterator[tuple[int, int, str]]:
        """Every control string in a text from ``start`` on: where it begins, where it ends, and the token."""
        return ((*match.span(), match.group()) for match in self._pattern.finditer(text, start))
