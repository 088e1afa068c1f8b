"""What every engine takes and gives: prompts of ids in, ids and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.records import MediaItem

Ids = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One prompt, int32[T], with its ``media``, to be answered ``num_samples`` times under ``settings``.

    ``key`` names the request. What is drawn depends on the settings' seed (0 where there is none), the key, the number
    of the sample and the place of the token, and on nothing else: not on the requests beside it. ``draw`` stands for
    the key in this, so that a server gives two requests of one seed the same answer. Samples are counted from
    ``first_sample`` on, so that several requests may share the samples of one.
    """

    prompt: Ids
    settings: GenerateConfig
    key: int
    media: tuple[MediaItem, ...] = ()
    num_samples: int = 1
    first_sample: int = 0
    draw: int | None = None
    tempered: bool = False  # told probabilities are those at the settings' temperature, not the model's at 1
    top_logprobs: int = 0  # of how many likeliest tokens at each place the probabilities are told, too


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsName:
    """Which weights: those after ``version`` steps of a run, whose files have this ``digest``."""

    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.version:08d}-{self.digest[:12]}"


class Finish(StrEnum):
    """What ended an answer: a stop token, one of the stop strings, or the limit on its length."""

    STOP = "stop"
    STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """Sample ``sample`` of the answer to request ``key``.

    ids       int32[N]    what the model emitted, the stop token included if there was one
    logprobs  float32[N]  natural logarithms of the probabilities that the model gave to them, before the settings of
                          sampling and penalties changed any; of a ``tempered`` request at its temperature
    weights               which weights drew it, where they were delivered and the engine tells
    """

    key: int
    sample: int
    ids: Ids
    logprobs: NDArray[np.float32]
    finish: Finish
    weights: WeightsName | None = None

    def text(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> str:
        """The answer as text, without its stop token, up to the first of the stop strings."""
        ids = self.ids[:-1] if self.finish is Finish.STOP else self.ids
        return before_stop(tokenizer.decode(ids), stop_strings)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewTokens:
    """What was added to sample ``sample`` of the answer to request ``key`` since it was told last.

    ids           int32[N]       the tokens, N >= 1
    logprobs      float32[N]     as those of a `Completion`
    top_ids       int32[N, K]    the K likeliest tokens at each place, the likeliest first; K is ``top_logprobs``
    top_logprobs  float32[N, K]  theirs
    finish        what ended the answer, with its last tokens; else None
    """

    key: int
    sample: int
    ids: Ids
    logprobs: NDArray[np.float32]
    top_ids: Ids
    top_logprobs: NDArray[np.float32]
    finish: Finish | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A request that is not answered, and why: the reason and detail of a `RowError`."""

    key: int
    reason: str
    detail: str


class Engine(Protocol):
    """Something that answers prompts."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        """The answers in the order in which they are finished: ``num_samples`` of each request, or one refusal."""

    def score(self, ids: Ids, start: int, media: Sequence[MediaItem] = ()) -> NDArray[np.float32]:
        """Log-probabilities of ``ids[start:]``, float32[T - start], each behind all ids before it; ``start`` >= 1."""


OnTokens = Callable[[NewTokens | Refusal], None]


class Session(Protocol):
    """An engine that is at work: requests come while others are answered. All its methods may be called by any thread,
    and each request of a session has a key of its own."""

    def submit(self, request: Request, on_tokens: OnTokens) -> None:
        """Begin an answer. ``on_tokens`` is called by a thread of the session, and is to return at once."""

    def cancel(self, key: int) -> None:
        """End a request's answers where they are: nothing more is told of it, and what it held is free again."""

    def close(self) -> None:
        """Cancel all requests, and end the session's threads."""


def before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text up to the first of the stop strings: ``"4\\n\\nUser: and", ["User:"] -> "4\\n\\n"``"""
    return text[: min((place for stop in stop_strings if (place := text.find(stop)) >= 0), default=len(text))]
