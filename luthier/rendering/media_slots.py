"""How media enter a chat template, and where in what it prints they stand.

Templates of multimodal models take ``{"type": "image"}`` among the parts of a message and print the token that the
model's processor replaces (``<|image_pad|>``). Templates of text know no parts; there the token is put into the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from luthier.errors import RowError, TemplateError
from luthier.records import Audio, Image, Media, Message, Part, Video
from luthier.rendering.control import ControlTokens

KINDS: Mapping[type, str] = {Image: "image", Video: "video", Audio: "audio"}
PLURAL = {"image": "images", "video": "videos", "audio": "audios"}  # as their columns are called


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSlots:
    """For each kind (``image``, ``video``, ``audio``) that a model takes, what stands for an item of it.

    tokens  the token that its processor replaces
    inline  what is written into a message's text by whom a template helps not: the token and what goes around it
    written of the tokens those that are not in the vocabulary: the processor finds them in the text (Qianfan-OCR)
    wrapped of some tokens what the processor replaces as a whole where a template prints it: the token with its marks
    """

    tokens: Mapping[str, str]
    inline: Mapping[str, str]
    written: frozenset[str] = frozenset()
    wrapped: Mapping[str, str] = field(default_factory=dict)

    def tokens_of(self, media: Iterable[Media]) -> set[str]:
        """The tokens that stand for some items."""
        return {self.tokens[kind_of_media(item)] for item in media}

    def printed_for(self, media: Iterable[Media]) -> set[str]:
        """The same as templates may print them: with their marks, too, where those go with them."""
        tokens = self.tokens_of(media)
        return tokens | {self.wrapped[token] for token in tokens & self.wrapped.keys()}

    def find(self, text: str, token: str) -> Iterator[re.Match[str]]:
        """Where a text has what stands for an item, with the marks that go with it."""
        return re.finditer("|".join(map(re.escape, filter(None, (self.wrapped.get(token), token)))), text)


NO_SLOTS = MediaSlots(tokens={}, inline={})


def no_slots() -> MediaSlots:
    """Those of a model that takes no media."""
    return NO_SLOTS


class SlotsOnDemand:
    """A model's slots, asked for by the first row with media: finding them takes seconds, and most runs have none."""

    def __init__(self, ask: Callable[[], MediaSlots], control: ControlTokens) -> None:
        self._ask = ask
        self._control = control

    @cached_property
    def slots(self) -> MediaSlots:
        """Those of the model. Raises `TemplateError` where a text could hold what stands for an item."""
        found = self._ask()
        for kind, token in found.tokens.items():
            if token not in self._control.tokens | found.written:
                raise TemplateError(
                    f"{token} stands for {PLURAL[kind]} in this model's processor, and is no control token of its "
                    "tokenizer: any text could hold it",
                    hint=f"make it a special token in tokenizer.json, or set model.add_special_tokens: ['{token}']",
                )
        return found

    def for_media(self, media: Sequence[Media]) -> MediaSlots:
        """The slots, if there is an item. Raises `RowError` for a kind that the model does not take."""
        for item in media:
            if (kind := kind_of_media(item)) not in self.slots.tokens:
                takes = ", ".join(PLURAL[kind] for kind in self.slots.tokens) or "no media"
                raise RowError("media_kind", f"the row has {PLURAL[kind]}, and this model takes {takes}")
        return self.slots if media else NO_SLOTS


def kind_of_media(media: Media) -> str:
    """``image``, ``video`` or ``audio``."""
    return KINDS[type(media)]


def is_media(part: object) -> bool:
    """Whether a part of a message is one."""
    return type(part) in KINDS


def media_of(messages: Iterable[Message]) -> tuple[Media, ...]:
    """The media of some messages, in order."""
    return tuple(item for message in messages for item in media_of_parts(message.parts))


def media_of_parts(parts: Iterable[Part]) -> tuple[Media, ...]:
    """The media among some parts."""
    return tuple(part for part in parts if isinstance(part, Image | Video | Audio))


def place_media(sketch: str, messages: Sequence[Message], slots: MediaSlots) -> dict[int, int]:
    """Where in what was printed which item of the messages stands: ``{position: number}``.

    The n-th token of a kind is the place of the n-th item of that kind. Raises `RowError` where there are more or fewer
    places than items, which is how a template says that it takes none.
    """
    numbers: dict[str, list[int]] = {}
    for number, media in enumerate(media_of(messages)):
        numbers.setdefault(slots.tokens[kind_of_media(media)], []).append(number)
    placed: dict[int, int] = {}
    for token, of_items in numbers.items():
        places = [match.start() for match in slots.find(sketch, token)]
        if len(places) != len(of_items):
            raise RowError(
                "media_places",
                f"the chat template printed {token} {len(places)} times for {len(of_items)} items; use the template "
                "that came with the model",
                field="messages",
            )
        placed.update(zip(places, of_items, strict=True))
    return placed
