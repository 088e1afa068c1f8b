"""Tokens as a person reads them: characters whole, though a tokenizer may split one over several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders give for bytes that are no character yet
MAX_TOKENS_PER_CHARACTER = 8  # a character is 4 bytes at most; joined emoji decode one by one


class Vocabulary(Protocol):
    """What is needed of a tokenizer to show its tokens."""

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of ids, control tokens included."""

    def token(self, token_id: int) -> str:
        """The vocabulary's own name of an id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """What one token adds to the text. A character that is split over tokens is shown at the first of them.

    [E4 BD][A0] -> TokenText(text="你", tokens=2), TokenText(text="", tokens=0)
    """

    text: str
    tokens: int  # how many tokens, from this one on, make up ``text``; 0: shown with an earlier token


def token_texts(ids: Sequence[int], vocabulary: Vocabulary) -> list[TokenText]:
    """One `TokenText` per id; joined, the texts are what the ids decode to."""
    texts: list[TokenText] = []
    before: list[int] = []  # the last group: decoders that drop a leading space do so only at the very start
    while len(texts) < len(ids):
        group, text = _next_group(ids[len(texts) : len(texts) + MAX_TOKENS_PER_CHARACTER], before, vocabulary)
        texts.append(TokenText(text=text, tokens=len(group)))
        texts.extend(TokenText(text="", tokens=0) for _ in group[1:])
        before = group
    return texts


def spans(texts: Sequence[TokenText]) -> list[range]:
    """The tokens of each shown text: ``[2, 0, 1] -> [range(0, 2), range(2, 3)]``."""
    starts = [index for index, text in enumerate(texts) if text.tokens] + [len(texts)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _next_group(ids: Sequence[int], before: list[int], vocabulary: Vocabulary) -> tuple[list[int], str]:
    for size in range(1, len(ids) + 1):
        text = _continuation(before, list(ids[:size]), vocabulary)
        if REPLACEMENT not in text:
            return list(ids[:size]), text
    # no whole character comes of it: bytes that are none, or a replacement character in the data itself
    return [ids[0]], vocabulary.decode([ids[0]]) or REPLACEMENT


def _continuation(before: list[int], ids: list[int], vocabulary: Vocabulary) -> str:
    prefix = vocabulary.decode(before) if before else ""
    whole = vocabulary.decode([*before, *ids])
    return whole[len(prefix) :] if whole.startswith(prefix) else vocabulary.decode(ids)
