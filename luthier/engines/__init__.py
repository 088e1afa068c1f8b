"""Engines turn prompts of token ids into answers of token ids, with their log-probabilities: what every one takes and
gives, and several as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import GenerateConfig
from luthier.engines.json_client import BUSY, PAUSES, ServerRefused, ServerUnreachable, ServerWrong, in_threads
from luthier.errors import LuthierError, SamplerLost, UserError
from luthier.records import MediaItem
from luthier.writing import counted

if TYPE_CHECKING:
    from luthier.encoding.tokenizer import Tokenizer

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


# ----------------------------------------------------------------------------------------------------------------------
# Several samplers as one engine: questions are shared out, and asked again where one fails.


Told = TypeVar("Told")


class StaleWeights(ServerWrong):
    """A sampler answers by other weights than those that it was given last."""


class Sampler(Protocol):
    """One server, or one process, that draws answers. Any thread may ask it."""

    @property
    def name(self) -> str:
        """How messages call it: its address."""

    @property
    def samples_at_once(self) -> int:
        """How many answers to one prompt it is best asked for at once."""

    def answer(self, request: Request) -> list[Completion] | Refusal:
        """All samples of a request, drawn by the weights that are expected; asked once.

        Raises `ServerUnreachable`, `ServerRefused`, `ServerWrong` for what no model can have said, and `StaleWeights`.
        """

    def score(self, ids: Ids, start: int) -> NDArray[np.float32]:
        """Log-probabilities of ``ids[start:]``, as those of an `Engine`. Raises what `answer` raises."""

    def expect(self, weights: WeightsName, folder: Path) -> None:
        """From now on it is to answer by the weights in a folder, which whoever calls `take` gives it."""

    def take(self, weights: WeightsName, folder: Path) -> None:
        """Give it the weights in a folder. Raises what `answer` raises, and `UserError` where it takes none."""


class SamplerPool:
    """An `Engine` over samplers, each of which is asked for ``at_once`` answers at a time.

    A question that gets no answer, or a wrong one, is asked again three times, of another sampler where there is one.
    Whoever answers it draws the same, if the numbers it draws by follow from the request alone.
    """

    def __init__(self, samplers: Sequence[Sampler], *, at_once: int, pauses: Sequence[float] = PAUSES) -> None:
        self.samplers, self.at_once, self.pauses = tuple(samplers), at_once, tuple(pauses)
        self.weights: WeightsName | None = None
        self._folder: Path | None = None
        self._lock = Lock()
        self._busy = [0] * len(self.samplers)
        self._first = 0

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        """The answers as they come. Raises `SamplerLost` where a question stays without an answer."""
        asked = list(requests)
        if not asked:
            return
        unit, over = self._patiently(lambda sampler: sampler.samples_at_once), Event()
        parts = [part for request in asked for part in _parts(request, unit)]
        workers = max(1, len(self.samplers) * self.at_once // unit)
        try:
            with in_threads(lambda part: self._answer(part, over), parts, workers) as answers:
                refused = set[int]()
                for future in as_completed(answers):
                    found = future.result()
                    if isinstance(found, list):
                        yield from (answer for answer in found if answer.key not in refused)
                    elif found.key not in refused:
                        refused.add(found.key)
                        yield found
        finally:
            over.set()

    def score(self, ids: Ids, start: int, media: Sequence[MediaItem] = ()) -> NDArray[np.float32]:
        """Log-probabilities of ``ids[start:]``, float32[T - start]. Raises `SamplerLost`."""
        if media:
            raise UserError("a server is asked with ids, which cannot carry media", hint="omit --engine")
        return self._patiently(lambda sampler: sampler.score(ids, start))

    def session(self) -> PoolSession:
        """A `Session` whose answers are told when they are whole."""
        return PoolSession(self)

    def deliver(self, weights: WeightsName, folder: Path) -> None:
        """Give all samplers the weights in a folder, at once. Raises `SamplerLost` with what one says."""
        self.expect(weights, folder)
        with ThreadPoolExecutor(len(self.samplers), thread_name_prefix="luthier-delivery") as pool:
            given = [
                pool.submit(self._patiently, lambda one: one.take(weights, folder), only=number)
                for number in range(len(self.samplers))
            ]
            for future in given:
                future.result()

    def expect(self, weights: WeightsName, folder: Path) -> None:
        """From now on answers are to be drawn by these weights, which are in a folder."""
        self.weights, self._folder = weights, folder
        for sampler in self.samplers:
            sampler.expect(weights, folder)

    def scores_of_each(self, ids: Ids) -> dict[str, NDArray[np.float32]]:
        """What each sampler says of one sequence, by its name. Raises `SamplerLost`."""
        found = {}
        for number, one in enumerate(self.samplers):
            found[one.name] = self._patiently(lambda sampler: sampler.score(ids, 1), only=number)
        return found

    def _answer(self, request: Request, over: Event) -> list[Completion] | Refusal:
        return self._patiently(lambda sampler: sampler.answer(request), over=over)

    def _patiently(self, ask: Callable[[Sampler], Told], *, only: int | None = None, over: Event | None = None) -> Told:
        """Ask, and ask again where that fails. Raises `SamplerLost`."""
        number = -1
        for pause in (*self.pauses, None):
            with self._chosen(only, number) as number:
                sampler = self.samplers[number]
                try:
                    return ask(sampler)
                except (ServerUnreachable, ServerRefused, ServerWrong) as error:
                    final = isinstance(error, ServerRefused) and error.status not in BUSY
                    tries = len(self.pauses) + 1
                    if final or pause is None:
                        again = "" if final else f" (asked {counted(tries, 'time')})"
                        raise SamplerLost(f"{error.message}{again}", hint=error.hint) from error
                    if isinstance(error, ServerRefused) and (only is not None or len(self.samplers) == 1):
                        pause = max(pause, error.pause)
                    if isinstance(error, StaleWeights):
                        self._renew(sampler)
            time.sleep(pause) if over is None else over.wait(pause)
            if over is not None and over.is_set():
                raise SamplerLost("the question is not asked again, because nobody waits for the answer any more")
        raise AssertionError("the last try returns or raises")

    def _renew(self, sampler: Sampler) -> None:
        """Give a sampler that has begun anew the weights once more; what fails is told by the next answer."""
        if self.weights is not None and self._folder is not None:
            try:
                sampler.take(self.weights, self._folder)
            except (ServerUnreachable, ServerRefused, ServerWrong):
                return

    @contextmanager
    def _chosen(self, only: int | None, not_this: int) -> Iterator[int]:
        """The number of the sampler that has the least to do, and is another than the one that has just failed."""
        with self._lock:
            self._first += 1
            others = [number for number in range(len(self.samplers)) if number != not_this] or [not_this]
            turn = {number: (number - self._first) % len(self.samplers) for number in others}
            number = min(others, key=lambda one: (self._busy[one], turn[one])) if only is None else only
            self._busy[number] += 1
        try:
            yield number
        finally:
            with self._lock:
                self._busy[number] -= 1


class PoolSession:
    """A `Session` over a `SamplerPool`: each request has a thread, and is told at once. What fails is told as a
    `Refusal` whose reason is ``engine_failed``."""

    def __init__(self, pool: SamplerPool) -> None:
        self._pool, self._lock, self._running = pool, Lock(), dict[int, Event]()

    def submit(self, request: Request, on_tokens: OnTokens) -> None:
        """See `Session`. Raises `ValueError` for a key that is in use."""
        over = Event()
        with self._lock:
            if request.key in self._running:
                raise ValueError(f"request {request.key} is being answered: no other of that key can begin")
            self._running[request.key] = over
        Thread(target=self._answer, args=(request, on_tokens, over), name="luthier-request", daemon=True).start()

    def cancel(self, key: int) -> None:
        """See `Session`. The sampler may go on for a while."""
        with self._lock:
            over = self._running.pop(key, None)
        if over is not None:
            over.set()

    def close(self) -> None:
        """See `Session`; threads that still wait for an answer tell nothing of it."""
        for key in list(self._running):
            self.cancel(key)

    def _answer(self, request: Request, on_tokens: OnTokens, over: Event) -> None:
        told: list[NewTokens | Refusal] = []
        try:
            told += [_whole(answer) for answer in self._pool.generate([request])]
        except LuthierError as error:
            told.append(Refusal(key=request.key, reason="engine_failed", detail=str(error)))
        with self._lock:
            is_wanted = not over.is_set()
            self._running.pop(request.key, None)
        for one in told if is_wanted else ():
            on_tokens(one)


def _whole(answer: Completion | Refusal) -> NewTokens | Refusal:
    if isinstance(answer, Refusal):
        return answer
    none = np.zeros((len(answer.ids), 0), np.int32)
    return NewTokens(
        key=answer.key,
        sample=answer.sample,
        ids=answer.ids,
        logprobs=answer.logprobs,
        top_ids=none,
        top_logprobs=none.astype(np.float32),
        finish=answer.finish,
    )


def _parts(request: Request, unit: int) -> Iterator[Request]:
    """Requests for some samples each: of 10 by 4 those for samples 0 to 3, 4 to 7, 8 and 9."""
    end = request.first_sample + request.num_samples
    for first in range(request.first_sample, end, unit):
        yield replace(request, first_sample=first, num_samples=min(unit, end - first))
