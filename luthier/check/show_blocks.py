"""A segment laid out for a page: blocks of one message each, in them stretches of targets and of context."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from luthier.check.owners import PROMPT, STOP, TEMPLATE, Owner
from luthier.check.show import TokenView
from luthier.check.show_text import lines_visible, shown_spans

UNKNOWN = "unknown"  # the voice of tokens whose owner is not known
# Spaces that a reader would not see: two and more, or a whole token of them.
_HIDDEN_SPACES = re.compile(r"^ +$| {2,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One shown text: a token, or the tokens that a character is split over. ``looks`` are names of its look."""

    text: str
    tokens: Sequence[TokenView]
    looks: tuple[str, ...]

    @property
    def words(self) -> str:
        """Its numbers in one line."""
        first = self.tokens[0]
        ids = " ".join(str(token.id) for token in self.tokens)
        parts = [
            f"id {ids}",
            "owner unknown" if first.owner is None else str(first.owner),
            f"position {first.position}",
        ]
        parts.append(f"target, weight {first.weight:g}" if first.target else "context")
        return " · ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Neighbouring texts that are all targets, or all context."""

    is_target: bool
    num_tokens: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Neighbouring tokens of one message, or of none. ``fields`` are what of the message they show."""

    voice: str
    message: int | None
    name: str
    fields: tuple[str, ...]
    num_tokens: int
    num_targets: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A part of the overview strip: tokens ``start`` and on, in the colour of a voice or of targets."""

    start: int
    length: int
    voice: str
    is_target: bool


def blocks(tokens: Sequence[TokenView]) -> list[Block]:
    """The blocks of a segment's tokens, in the order of the text."""
    return [_block(list(group)) for _, group in groupby(shown_spans(tokens), key=lambda span: _speaker(span[0].owner))]


def bands(of_segment: Sequence[Block]) -> list[Band]:
    """Where the messages and the targets of a segment lie."""
    found = []
    start = 0
    for block in of_segment:
        found.append(Band(start=start, length=block.num_tokens, voice=block.voice, is_target=False))
        inner = start
        for stretch in block.stretches:
            if stretch.is_target:
                found.append(Band(start=inner, length=stretch.num_tokens, voice=block.voice, is_target=True))
            inner += stretch.num_tokens
        start += block.num_tokens
    return found


def token_data(tokens: Sequence[TokenView]) -> dict[str, object]:
    """All numbers of a segment as columns, as short as they can be: a page of 20 000 tokens should stay small.

    What follows from another column is null: positions that count up from 0, weights that are all 1, a label that is
    the next token wherever that is a target.
    """
    owners = list(dict.fromkeys("–" if token.owner is None else str(token.owner) for token in tokens))
    number_of = {owner: number for number, owner in enumerate(owners)}
    weights = [token.weight for token in tokens]
    positions = [token.position for token in tokens]
    labels = [token.label for token in tokens]
    expected = [after.id if after.target else None for _, after in pairwise(tokens)] + [None]
    return {
        "first": tokens[0].index if tokens else 0,
        "segment": tokens[0].segment if tokens else 0,
        "ids": [token.id for token in tokens],
        "names": [token.name for token in tokens],
        "sizes": None if all(token.num_tokens == 1 for token in tokens) else [token.num_tokens for token in tokens],
        "owners": owners,
        "owner": [number_of["–" if token.owner is None else str(token.owner)] for token in tokens],
        "target": "".join("1" if token.target else "0" for token in tokens),
        "weights": None if set(weights) <= {1.0} else weights,
        "positions": None if positions == list(range(len(tokens))) else positions,
        "labels": None if labels == expected else labels,
    }


def spaces_visible(text: str) -> str:
    """Dots for spaces that one would not see: two and more, or nothing but spaces."""
    return _HIDDEN_SPACES.sub(lambda found: "·" * len(found.group()), text)


def _speaker(owner: Owner | None) -> tuple[int | None, str | None]:
    return (None, UNKNOWN) if owner is None else (owner.message, owner.role)


def _block(spans: Sequence[Sequence[TokenView]]) -> Block:
    tokens = [token for span in spans for token in span]
    owners = list(dict.fromkeys(token.owner for token in tokens if token.owner is not None))
    fields = tuple(dict.fromkeys(owner.field for owner in owners if owner.voice != TEMPLATE))
    message, role = _speaker(tokens[0].owner)
    name = role or (fields[0] if fields else TEMPLATE)
    return Block(
        voice=name,
        message=message,
        name=name,
        fields=tuple(field for field in fields if field != name),
        num_tokens=len(tokens),
        num_targets=sum(token.target for token in tokens),
        stretches=tuple(_stretches(spans)),
    )


def _stretches(spans: Sequence[Sequence[TokenView]]) -> Iterator[Stretch]:
    for is_target, group in groupby(spans, key=lambda span: any(token.target for token in span)):
        marks = tuple(_mark(span) for span in group)
        yield Stretch(is_target=is_target, num_tokens=sum(len(mark.tokens) for mark in marks), marks=marks)


def _mark(span: Sequence[TokenView]) -> Mark:
    first = span[0]
    looks = []
    if first.control:
        looks.append("control")
    if first.owner is not None:
        looks += [_LOOKS[first.owner.field]] if first.owner.field in _LOOKS else []
    if any(token.target and token.weight != 1 for token in span):
        looks.append("weighted")
    return Mark(text=lines_visible(spaces_visible(first.text)) or "∅", tokens=span, looks=tuple(looks))


_LOOKS = {TEMPLATE: "template", PROMPT: "template", STOP: "stop", "reasoning_content": "thought"}
