"""Between a session of an engine, whose thread tells tokens, and the coroutine that waits for them."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol

import numpy as np
from pydantic import ValidationError

from luthier.config import choices
from luthier.config.schema import GenerateConfig, ServeConfig
from luthier.encoding import Tools
from luthier.encoding.replies import ReplyReader, StopCutter, reply_form
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Finish, Ids, NewTokens, Refusal, Request, Session, WeightsName
from luthier.errors import TemplateError
from luthier.rendering.replies import ReplyDelta, joined_deltas
from luthier.rendering.replies.learning import TEXT
from luthier.serve import ChatBody, CompletionBody, RefusedRequest, SamplingBody, invalid, texts_of
from luthier.serve.gate import Counts
from luthier.writing import counted

MOST_HELD = 16  # tokens that may be parts of one character
HALF_CHARACTER = "\ufffd"  # what a tokenizer prints for bytes that are no whole character, yet


class WeightTurns:
    """Many requests may be answered at a time, while nobody changes the weights; a change waits for them to end, and
    those that come later wait for the change."""

    def __init__(self) -> None:
        self._answering, self._changing, self._changed = 0, 0, asyncio.Condition()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """The turn of one request."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._changing)
            self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            await self._tell()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """The turn of a change."""
        self._changing += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._answering)
                yield
        finally:
            self._changing -= 1
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Asker:
    """Asks a session, and counts the tokens of prompts and answers. ``taken`` says which delivered weights answer."""

    def __init__(
        self,
        session: Session,
        limits: ServeConfig,
        counts: Counts,
        turns: WeightTurns,
        taken: Callable[[], WeightsName | None] = lambda: None,
    ) -> None:
        self.session, self.limits, self.counts, self.turns, self.taken = session, limits, counts, turns, taken
        self._keys = itertools.count()

    async def tell(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, NewTokens], None]:
        """What is added to the answers of some requests, each with its number, until all are finished: those of the
        first request come first. Whoever closes this before ends them.

        Raises `RefusedRequest` where the engine refuses, and for the time that a request may take.
        """
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[NewTokens | Refusal] = asyncio.Queue()

        def on_tokens(new: NewTokens | Refusal) -> None:
            with suppress(RuntimeError):  # the loop has ended, so nobody waits
                loop.call_soon_threadsafe(told.put_nowait, new)

        left: dict[int, int] = {}  # key -> samples that are not finished
        first: dict[int, int] = {}  # key -> number of its first answer
        begins: dict[int, int] = {}  # key -> the first of its samples
        try:
            for request in requests:
                key = next(self._keys)
                first[key] = sum(one.num_samples for one in requests[: len(first)])
                begins[key] = request.first_sample
                self.counts.tokens["prompt"] += len(request.prompt)
                self.session.submit(replace(request, key=key), on_tokens)
                left[key] = request.num_samples
            while left:
                new = await told.get()
                if isinstance(new, Refusal):
                    del left[new.key]
                    status = 500 if new.reason == "engine_failed" else 400
                    what = "the model failed while it answered" if status == 500 else new.detail
                    raise RefusedRequest(status, what, code=new.reason)
                left[new.key] -= new.finish is not None
                if not left[new.key]:
                    del left[new.key]
                self.counts.tokens["answer"] += len(new.ids)
                yield first[new.key] + new.sample - begins[new.key], new
        finally:
            for key in left:
                self.session.cancel(key)


def too_late(seconds: float, *, what: str = "the answer was not finished") -> RefusedRequest:
    """What a client is told whose answer takes too long."""
    what = f"{what} within {seconds:g} s"
    return RefusedRequest(504, what, code="timeout", hint="ask for fewer tokens (max_tokens), or raise serve.timeout")


# Values that ask for nothing: they switch off what the server's own section says.
OFF: Mapping[str, tuple[float, ...]] = {
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
}  # fmt: skip
_AS_SENT = ("temperature", "num_beams", "length_penalty", *OFF)


def settings_of(
    body: SamplingBody,
    own: GenerateConfig,
    stops: Collection[int],
    limits: ServeConfig,
    *,
    prompt: int,
    context: int,
) -> GenerateConfig:
    """How an answer is drawn: as the request says, and where it says nothing as the section ``generate`` (``own``)
    does. Each field that is sent takes the place of what the section says; of stop tokens the model's own ``stops``
    stay. An engine (`CompletionBody.draw`) says all that there is to say, so nothing of the section counts for it.

    ``prompt`` is its length in tokens, ``context`` the most that prompt and answer may have. Raises `RefusedRequest`.
    """
    if isinstance(body, CompletionBody) and body.draw is not None:
        own, stops = GenerateConfig(), ()
    asked = longest_of(body, limits)
    room = context if asked is not None or own.max_length is None else min(context, own.max_length)
    check_room(prompt, room, 1 if asked is None else asked)
    longest = min(own.max_new_tokens, limits.max_tokens) if asked is None else asked
    sent = {name: value for name in _AS_SENT if (value := getattr(body, name)) is not None}
    changed: dict[str, object] = {
        **{name: None if value in OFF.get(name, ()) else value for name, value in sent.items()},
        "max_new_tokens": max(1, min(longest, room - prompt)),
        "max_length": None,  # the room is counted above
        "seed": secrets.randbits(31) if body.seed is None else body.seed,
    }
    if body.stop is not None:
        changed["stop_strings"] = texts_of(body.stop)
    if body.stop_token_ids is not None:
        changed["stop_token_ids"] = [*stops, *body.stop_token_ids]
    if body.temperature is not None:
        is_cold = body.temperature < choices.COLDEST
        changed |= {"do_sample": not is_cold, "temperature": own.temperature if is_cold else body.temperature}
    elif any(changed.get(name) is not None for name in ("top_p", "top_k", "min_p")):
        changed["do_sample"] = True
    try:
        settings = GenerateConfig(**{**own.model_dump(), **changed})
    except ValidationError as error:
        wrong = error.errors()[0]
        param = str(wrong["loc"][0])
        raise invalid(param, f"{param}: {wrong['msg']}") from None
    _check_samples(body, settings, limits)
    if settings.num_beams == 1 and body.length_penalty not in (None, 1):
        raise invalid("length_penalty", "length_penalty says nothing without beams", "send num_beams, too")
    return settings


def longest_of(body: SamplingBody, limits: ServeConfig) -> int | None:
    """The longest answer that a request asks for. Raises `RefusedRequest`."""
    asked, name = body.max_tokens, "max_tokens"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if asked is not None and asked != body.max_completion_tokens:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens are two names of one limit, and differ")
        asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is not None and asked > limits.max_tokens:
        raise invalid(name, f"{name} is {asked:,}, the limit is {limits.max_tokens:,}", "serve.max_tokens is the limit")
    return asked


def check_room(prompt: int, context: int, answer: int = 0) -> None:
    """Raises `RefusedRequest` for a prompt without tokens, and where a prompt and an answer of so many tokens are more
    than the context."""
    if not prompt:
        hint = "this model has no begin token, so a text of no letters is no prompt"
        raise invalid("prompt", "the prompt has no tokens", hint)
    check_fewest(prompt, context, answer, has="has")


def check_fewest(prompt: int, context: int, answer: int = 0, *, has: str = "has at least") -> None:
    """The same for a prompt of so many tokens or more. Nothing is known of one of 0 tokens or more."""
    if prompt and prompt + answer > context:
        what = (
            f"the prompt {has} {counted(prompt, 'token')} and the answer may have {answer:,}, the context has "
            f"{context:,}"
        )
        hint = "serve.max_context or the model's own is the limit, and generate.max_length without max_tokens"
        raise RefusedRequest(400, what, code="context_length_exceeded", param="messages", hint=hint)


def _check_samples(body: SamplingBody, settings: GenerateConfig, limits: ServeConfig) -> None:
    count = body.n or 1
    if count > limits.max_samples:
        raise invalid("n", f"n is {count}, the limit is {limits.max_samples}", "serve.max_samples is the limit")
    if count > 1 and not settings.do_sample:
        what = f"{counted(count, 'answer is', 'answers are')} all the same while the likeliest token is taken"
        raise invalid("n", what, "give a temperature above 0")
    if (body.num_beams or 1) > limits.max_samples:
        what = f"num_beams is {body.num_beams}, the limit is {limits.max_samples}"
        raise invalid("num_beams", what, "serve.max_samples is the limit")
    if settings.num_beams > 1 and (body.stream or count > 1):
        raise RefusedRequest(
            400,
            "a search with beams gives one answer, at its end",
            code="not_supported",
            param="stream",
            hint="num_beams: 1 turns it off",
        )


class AnswerReader(Protocol):
    """Reads one answer as it comes; once for each."""

    def feed(self, new: NewTokens) -> ReplyDelta:
        """What the tokens add."""


class MessageReader:
    """An answer as a message, with its thought and its calls apart (`ReplyReader`)."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader

    def feed(self, new: NewTokens) -> ReplyDelta:
        """What the tokens add. A call comes as it is drawn (`ReplyDelta.call_pieces`)."""
        delta = self._reader.feed(new.ids[:-1] if new.finish is Finish.STOP else new.ids)
        return delta if new.finish is None else joined_deltas([delta, self._reader.close()])


class TextReader:
    """The text of one answer as it comes. Half a character is held back.

    Joined it is `Completion.text`; or, ``behind`` the ids of a prompt, what the answer adds to the text of the prompt:
    alone, many tokenizers decode an answer without the space that it begins with.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str], behind: Sequence[int] = ()) -> None:
        self._tokenizer, self._cutter = tokenizer, StopCutter(stop_strings)
        self._ids = list(behind[-MOST_HELD:])
        self._shown, self._read = 0, len(self._ids)  # what was told last is the text of ids[shown:read]

    def feed(self, new: NewTokens) -> ReplyDelta:
        """The text that the tokens add."""
        ids, is_last = new.ids.tolist(), new.finish is not None
        self._ids += ids[:-1] if new.finish is Finish.STOP else ids
        return ReplyDelta(content=self._cutter.cut(self._decoded(is_last=is_last), is_last=is_last))

    def _decoded(self, *, is_last: bool) -> str:
        known = self._tokenizer.decode(self._ids[self._shown : self._read])
        text = self._tokenizer.decode(self._ids[self._shown :])
        if text.endswith(HALF_CHARACTER) and len(self._ids) - self._read < MOST_HELD and not is_last:
            return ""
        self._shown, self._read = self._read, len(self._ids)
        return text[len(known if text.startswith(known) else known.rstrip(HALF_CHARACTER)) :]


def reader_of(
    tokenizer: Tokenizer,
    prompt: Ids,
    *,
    tools: Tools | None,
    kwargs: Mapping[str, object] | None,
    stop_strings: Sequence[str],
) -> AnswerReader:
    """What reads an answer behind a prompt as a message; as one text where the model's template writes answers that
    cannot be read back. Raises `RefusedRequest` for tools whose calls cannot be."""
    try:
        if TEXT in reply_form(tokenizer, kwargs).unreadable and not tools:
            return TextReader(tokenizer, stop_strings)
        reader = ReplyReader(
            tokenizer,
            tools=tools,
            template_kwargs=kwargs,
            prompt=prompt,
            stop_strings=stop_strings,
            calls_in_pieces=True,
        )
        return MessageReader(reader)
    except TemplateError as error:
        param = "tools" if tools else "messages"
        raise RefusedRequest(400, error.message, code="unreadable_reply", param=param, hint=error.hint) from None


def joined_tokens(tokens: Sequence[NewTokens]) -> NewTokens:
    """All that was told of one answer as if it had been told at once."""
    return replace(
        tokens[-1],
        ids=np.concatenate([new.ids for new in tokens]),
        logprobs=np.concatenate([new.logprobs for new in tokens]),
        top_ids=np.concatenate([new.top_ids for new in tokens]),
        top_logprobs=np.concatenate([new.top_logprobs for new in tokens]),
    )
