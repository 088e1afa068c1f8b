"""A chat template as verification runs it: plainly, with the processor's own strings in the place of media.

    template    <|vision_start|><|image_pad|><|vision_end|>Who?
    expanded    <|vision_start|><|image_pad|> × 50<|vision_end|>Who?

An inference server does the same with what a chat template prints. Headers are probed anew; what stands for an item is
asked again for each number of items that a history has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from luthier.encoding.measuring import slots_of
from luthier.errors import RowError
from luthier.media import MediaAccess, MediaProcessor, probe
from luthier.records import Media, MediaHeader, Message
from luthier.rendering.media_slots import MediaSlots, kind_of_media, media_of
from luthier.rendering.template import ChatTemplate, Tools


class PlainTemplate(Protocol):
    """What verification asks of a template."""

    source: str
    kwargs: dict[str, Any]

    @property
    def variables(self) -> frozenset[str]:
        """The variables that it reads."""

    @property
    def reads_thinking(self) -> bool:
        """Whether it looks at a message's thinking."""

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        """The text that inference sees; raises `RowError`."""


@dataclass(frozen=True, kw_only=True)
class MediaReader:
    """What reads the media of rows for verification."""

    processor: MediaProcessor
    access: MediaAccess

    @cached_property
    def slots(self) -> MediaSlots:
        """What stands for an item in what a template prints."""
        return slots_of(self.processor)

    def read(self, media: Sequence[Media], text: str) -> RowMedia:
        """The media of a row that is printed as ``text``. Raises `RowError` for an item that cannot be used."""
        headers = tuple(probe(item, self.access) for item in media)
        found = RowMedia(reader=self, items=tuple(media), headers=headers, printed=text)
        places = found.places(text, len(media))
        found.order = tuple(place.number for place in places)
        if self.processor.looks_behind:
            ends = [place.start for place in places[1:]] + [len(text)]
            behind = {place.number: text[place.stop : end] for place, end in zip(places, ends, strict=True)}
            found.following = [behind[number] for number in range(len(media))]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The characters ``[start, stop)`` of a printed text that stand for a row's item ``number``."""

    number: int
    start: int
    stop: int


class RowMedia:
    """A row's media, and what the processor writes for them.

    items      in the order of their messages, with their ``headers``
    printed    what the template prints for the row, with a placeholder for each item
    order      their numbers in the order in which the template prints them: images, then videos, of some
    following  the text behind each item, for processors that look at it; else ()
    """

    def __init__(
        self, *, reader: MediaReader, items: tuple[Media, ...], headers: tuple[MediaHeader, ...], printed: str
    ) -> None:
        self.reader, self.items, self.headers, self.printed = reader, items, headers, printed
        self.order: Sequence[int] = range(len(items))
        self.following: Sequence[str] = ()
        self._texts: dict[int, list[str]] = {}

    def texts(self, count: int) -> list[str]:
        """The strings of the first ``count`` items, where inference is shown no others."""
        if count not in self._texts:
            self._texts[count] = self.reader.processor.expand(self.headers[:count], self.following[:count])
        return self._texts[count]

    def expand(self, text: str, count: int) -> str:
        """A text that was printed for the first ``count`` items, with their strings in it. Raises as `places`."""
        parts, end = [], 0
        for place in self.places(text, count):
            parts += [text[end : place.start], self.texts(count)[place.number]]
            end = place.stop
        return "".join([*parts, text[end:]])

    def places(self, text: str, count: int) -> list[Place]:
        """Where a text that was printed for the first ``count`` items has them, in the order of the text.

        The n-th token of a kind is the place of its n-th item. Raises `RowError` where these are not as many.
        """
        slots = self.reader.slots
        left: dict[str, list[int]] = {token: [] for token in slots.tokens.values()}
        for number, item in enumerate(self.items[:count]):
            left[slots.tokens[kind_of_media(item)]].append(number)
        token_of = {token: token for token in left} | {whole: token for token, whole in slots.wrapped.items()}
        pattern = "|".join(map(re.escape, sorted(token_of, key=len, reverse=True)))
        matches = list(re.finditer(pattern, text))
        for token, numbers in left.items():
            printed = sum(token_of[match[0]] == token for match in matches)
            if printed != len(numbers):
                what = f"the chat template printed {token} {printed} times for {len(numbers)} items"
                raise RowError("media_places", what, field="messages")
        return [
            Place(number=left[token_of[match[0]]].pop(0), start=match.start(), stop=match.end()) for match in matches
        ]


class ExpandedTemplate:
    """A template that prints, for the messages of one row, what the processor makes of its placeholders."""

    def __init__(self, template: ChatTemplate, media: RowMedia) -> None:
        self.template, self.media = template, media
        self.source = template.source
        self.kwargs = template.kwargs

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads."""
        return self.template.variables

    @property
    def reads_thinking(self) -> bool:
        """Whether the template looks at a message's thinking."""
        return self.template.reads_thinking

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        """The text with its media expanded; ``messages`` begin as the row's do. Raises `RowError`."""
        text = self.template.render(messages, tools, generation_prompt=generation_prompt, **kwargs)
        return self.media.expand(text, len(media_of(messages)))


def expanded(template: ChatTemplate, media: RowMedia | None) -> PlainTemplate:
    """The template as it prints a row with these media; itself, if there are none."""
    return template if media is None else ExpandedTemplate(template, media)
