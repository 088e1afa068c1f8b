"""What each token of an answer counts in the loss, where parts of the answer count differently.

The parts are looked for in the rendered text, and a token's characters are the tokenizer's own offsets. A token that
lies across two parts goes with the one that it ends in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.check.verify_policy import TurnPolicy
from luthier.check.verify_tokens import Ids, ReferenceTokenizer
from luthier.records import Text, Thinking, ToolCall

Weights = NDArray[np.float32]  # one per token; NaN where it cannot be told


def answer_weights(policy: TurnPolicy, ids: Ids, text: str, tokenizer: ReferenceTokenizer, *, forged: bool) -> Weights:
    """What each of ``ids`` counts, which are ``text`` as the model emits it; float32[T]."""
    if policy.uniform:
        return np.full(len(ids), policy.scaffold, dtype=np.float32)
    return token_weights(text, tokenizer.continued_spans(text, forged=forged), policy)


def token_weights(text: str, spans: Sequence[tuple[int, int]], policy: TurnPolicy) -> Weights:
    """The weight of each token, float32[T]; token ``i`` covers the characters ``spans[i]`` of ``text``."""
    characters = _character_weights(text, policy)
    ends = np.array([end - 1 for _, end in spans], dtype=np.int64)
    return characters[ends]


def _character_weights(text: str, policy: TurnPolicy) -> Weights:
    weights = np.full(len(text), policy.scaffold, dtype=np.float32)
    end = 0
    for pieces in _stretches(policy):
        whole = "".join(piece for piece, _ in pieces)
        place = text.find(whole.strip(), end)
        if place < 0:  # the template wrote it in other words
            return np.full(len(text), np.nan, dtype=np.float32)
        start = place - (len(whole) - len(whole.lstrip()))  # white space at its ends is trimmed, or stands there
        end = place + len(whole.strip())
        for piece, weight in pieces:
            weights[max(start, place) : min(start + len(piece), end)] = weight
            start += len(piece)
    return weights


def _stretches(policy: TurnPolicy) -> Iterator[list[tuple[str, float]]]:
    """What templates print in one go, in the order in which they do: thoughts, texts, each string of a tool call."""
    thoughts = [(part.text, weight) for part, weight in policy.pieces if isinstance(part, Thinking)]
    texts = [(part.text, weight) for part, weight in policy.pieces if isinstance(part, Text)]
    yield from (pieces for pieces in (thoughts, texts) if pieces)
    for part, weight in policy.pieces:
        if isinstance(part, ToolCall):
            yield [(part.name, weight)]
            for leaf in _strings(part.arguments):
                yield [(leaf, weight)]


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield str(key)
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)
        case _:
            return
