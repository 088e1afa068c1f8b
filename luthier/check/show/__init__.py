"""What the model sees of a row: as data (`view`), in a terminal and as a page.

Here: tokens and media items as a person reads them, characters whole, though a tokenizer may split one over several,
white space and control characters made visible. For terminals and pages alike; what is here needs no colour.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.records import AudioHeader, ImageHeader, MediaItem, Segment, VideoHeader
from luthier.writing import counted

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders give for bytes that are no character yet
MAX_TOKENS_PER_CHARACTER = 8  # a character is 4 bytes at most; joined emoji decode one by one
OPEN, CLOSE = "⟦", "⟧"  # around what is learned, where there is no colour
_SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x1b": "␛"}


class TokenDecoder(Protocol):
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


def token_texts(ids: Sequence[int], vocabulary: TokenDecoder) -> list[TokenText]:
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


def visible(text: str) -> str:
    """Text in which what moves or hides the cursor is a sign: ``"a\\n" -> "a↵"``. Spaces stay spaces.

    Format characters such as bidirectional overrides are spelled out; the joiner of emoji is left in place.
    """
    return "".join(_SHOWN.get(character) or _sign(character) for character in text)


def lines_visible(text: str) -> str:
    """As `visible`, but a line feed is shown and made."""
    return "↵\n".join(visible(line) for line in text.split("\n"))


def _next_group(ids: Sequence[int], before: list[int], vocabulary: TokenDecoder) -> tuple[list[int], str]:
    for size in range(1, len(ids) + 1):
        text = _continuation(before, list(ids[:size]), vocabulary)
        if REPLACEMENT not in text:
            return list(ids[:size]), text
    # no whole character comes of it: bytes that are none, or a replacement character in the data itself
    return [ids[0]], vocabulary.decode([ids[0]]) or REPLACEMENT


def _continuation(before: list[int], ids: list[int], vocabulary: TokenDecoder) -> str:
    prefix = vocabulary.decode(before) if before else ""
    whole = vocabulary.decode([*before, *ids])
    return whole[len(prefix) :] if whole.startswith(prefix) else vocabulary.decode(ids)


def _sign(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cc" or (category == "Cf" and character != "\N{ZERO WIDTH JOINER}"):
        return f"‹U+{ord(character):04X}›"
    return character


# --------------------------------------------------------------------------------------------------------------------
# Media items among the tokens of a row: where they stand, and what a person calls them.


OPEN_ITEM, CLOSE_ITEM = "⟨", "⟩"


def placed_media(segments: Sequence[Segment]) -> tuple[MediaItem, ...]:
    """The items of segments that stand one behind the other, where they are in the whole."""
    placed: list[MediaItem] = []
    before = 0
    for segment in segments:
        placed += (replace(item, start=item.start + before) for item in segment.media)
        before += len(segment)
    return tuple(placed)


def numbers_along(items: Sequence[MediaItem], num_tokens: int) -> list[int | None]:
    """For each token the number of the item that it stands for: items at 1:3 and 3:4 -> ``[None, 0, 0, 1, None]``."""
    numbers: list[int | None] = [None] * num_tokens
    for number, item in enumerate(items):
        numbers[item.start : item.start + item.length] = [number] * item.length
    return numbers


def item_words(item: MediaItem) -> str:
    """``image 300×168 · 50 tokens``, ``video 640×360 · 12.5 s · 400 tokens``, ``audio 3.2 s · 80 tokens``."""
    tokens = counted(item.length, "token")
    return f"{header_words(item)} · {tokens}"


def header_words(item: MediaItem) -> str:
    """What kind of item it is, and how large."""
    match item.header:
        case ImageHeader(width=width, height=height):
            return f"image {width}×{height}"
        case VideoHeader(width=width, height=height, num_frames=count, extracted=True):
            return f"video {width}×{height} · {counted(count, 'picture')}"
        case VideoHeader(width=width, height=height) as header:
            return f"video {width}×{height} · {header.seconds:.1f} s"
        case AudioHeader() as header:
            return f"audio {header.seconds:.1f} s"
        case _:
            raise AssertionError(f"unknown header {item.header!r}")


def source_name(item: MediaItem) -> str:
    """The name of its file, without the folders: ``/data/images/1.jpg -> 1.jpg``; of bytes, how many they are."""
    match item.media.source:
        case str() as name:
            return name.rstrip("/").rsplit("/", 1)[-1]
        case bytes() as content:
            return counted(len(content), "byte")
        case frames:
            return counted(len(frames), "file")
