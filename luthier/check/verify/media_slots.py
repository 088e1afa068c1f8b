"""What the model's processor writes in the place of media, in what a chat template prints.

    template    <|vision_start|><|image_pad|><|vision_end|>Who?
    expanded    <|vision_start|><|image_pad|> × 50<|vision_end|>Who?

An inference server does the same with what a chat template prints. Headers are probed anew; what stands for an item is
asked again for each number of items that a history has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from luthier.check.verify.plain_template import KINDS, PlainTemplate, Tools
from luthier.errors import RowError
from luthier.media import own_template
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import probe
from luthier.media.processors.processor import MediaProcessor
from luthier.records import Audio, Image, Media, MediaHeader, Message, Part, Text, Video
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """For each kind of media that a model takes, what stands for an item of it.

    tokens   the token that its processor replaces
    inline   what a text gets where no template writes it: the token with the marks of the model's own template
    wrapped  of some tokens what the processor replaces as a whole: the token with its marks
    """

    tokens: Mapping[str, str]
    inline: Mapping[str, str]
    wrapped: Mapping[str, str] = field(default_factory=dict)


def media_of(parts: Iterable[Part]) -> tuple[Media, ...]:
    return tuple(part for part in parts if isinstance(part, Image | Video | Audio))


def media_of_messages(messages: Iterable[Message]) -> tuple[Media, ...]:
    return tuple(item for message in messages for item in media_of(message.parts))


@dataclass(frozen=True, kw_only=True)
class MediaReader:
    """What reads the media of rows for verification."""

    processor: MediaProcessor
    access: MediaAccess

    @cached_property
    def slots(self) -> Slots:
        """What stands for an item in what a template prints."""
        processor = self.processor
        tokens = {str(kind): processor.placeholder(kind) for kind in processor.kinds}
        inline = {str(kind): processor.inline(kind) for kind in processor.kinds}
        wrapped = dict(processor.wrapped)
        own = own_template(processor.processor)
        if own.source is not None:
            template = PlainTemplate(
                own.source, special_tokens=own.special_tokens, kwargs={}, tokens=tokens, inline=inline
            )
            for kind, token in tokens.items():
                framed = None if kind in template.inline else _frame(template, kind, token, own.control)
                if framed is not None:
                    inline[kind] = framed.replace(wrapped.get(token, token), token)
        return Slots(tokens=tokens, inline=inline, wrapped=wrapped)

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
class MediaSpan:
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

    def places(self, text: str, count: int) -> list[MediaSpan]:
        """Where a text that was printed for the first ``count`` items has them, in the order of the text.

        The n-th token of a kind is the place of its n-th item. Raises `RowError` where these are not as many.
        """
        slots = self.reader.slots
        left: dict[str, list[int]] = {token: [] for token in slots.tokens.values()}
        for number, item in enumerate(self.items[:count]):
            left[slots.tokens[KINDS[type(item)]]].append(number)
        token_of = {token: token for token in left} | {whole: token for token, whole in slots.wrapped.items()}
        pattern = "|".join(map(re.escape, sorted(token_of, key=len, reverse=True)))
        matches = list(re.finditer(pattern, text))
        for token, numbers in left.items():
            printed = sum(token_of[match[0]] == token for match in matches)
            if printed != len(numbers):
                what = (
                    f"the chat template printed {token} {counted(printed, 'time')} for {counted(len(numbers), 'item')}"
                )
                raise RowError("media_places", what, field="messages")
        return [
            MediaSpan(number=left[token_of[match[0]]].pop(0), start=match.start(), stop=match.end())
            for match in matches
        ]


class ExpandedTemplate:
    """A template that prints, for the messages of one row, what the processor makes of its placeholders."""

    def __init__(self, template: PlainTemplate, media: RowMedia) -> None:
        self.template, self.media = template, media

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.template.kwargs

    @property
    def variables(self) -> frozenset[str]:
        return self.template.variables

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False, **kwargs: object
    ) -> str:
        """The text with its media expanded; ``messages`` begin as the row's do. Raises `RowError`."""
        text = self.template.render(messages, tools, generation_prompt=generation_prompt, **kwargs)
        return self.media.expand(text, len(media_of_messages(messages)))


def _frame(template: PlainTemplate, kind: str, token: str, control: Collection[str]) -> str | None:
    """The token with the control tokens that a template prints right around it for an item's sake; None if unclear.

    Of ``<|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>so`` the three in the middle.
    """
    words = Text(text="so")
    item = next(some(source="somewhere") for some, name in KINDS.items() if name == kind)
    try:
        shown, plain = (template.render([Message(role="user", parts=parts)]) for parts in ((item, words), (words,)))
    except RowError:
        return None
    start = next((at for at, (one, two) in enumerate(zip(shown, plain, strict=False)) if one != two), len(plain))
    own = shown[start : len(shown) - len(plain[start:])]
    known = "|".join(map(re.escape, sorted({token, *control}, key=len, reverse=True)))
    runs = [match[0] for match in re.finditer(rf"(?:{known})+", own) if token in match[0]]
    return runs[0] if len(runs) == 1 and own.count(token) == 1 else None
