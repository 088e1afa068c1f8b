"""The bodies of answers, as OpenAI's interface has them: whole, or in pieces as tokens come."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Finish, NewTokens, Request, WeightsName
from luthier.rendering.replies import CallPiece, ReplyDelta, joined_pieces
from luthier.serve import RefusedRequest
from luthier.serve.asking import HALF_CHARACTER, AnswerReader, Asker, joined_tokens, too_late
from luthier.writing import JsonObject

FINISHES = {Finish.STOP: "stop", Finish.STRING: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """One request of a client: what the engine is asked, and how the answers are told.

    questions  one for each prompt; all are answered alike
    readers    one for each answer
    echoes     of each prompt its text, and its tokens from the second on as if they had been emitted; or ``()``
    token_ids  whether answers are told as ids, too
    answered   False: nothing is emitted, only the prompts are told
    until      when its time is over, on the loop's clock; None: never
    """

    questions: tuple[Request, ...]
    readers: tuple[AnswerReader, ...]
    model: str
    is_chat: bool
    logprobs: bool = False
    token_ids: bool = False
    usage_at_end: bool = False  # of a stream
    echoes: tuple[Echo, ...] = ()
    answered: bool = True
    until: float | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def echo(self, number: int) -> Echo | None:
        """The prompt of answer ``number``, where it is told."""
        return self.echoes[number // self.questions[0].num_samples] if self.echoes else None

    def envelope(self, *, streamed: bool) -> JsonObject:
        """What every answer and every piece of one begins with."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        if streamed and self.is_chat:
            kind = "chat.completion.chunk"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Echo:
    """A prompt that is told with its answer."""

    text: str
    first: int  # its first token, which nothing predicts
    others: NewTokens | None  # None where no probabilities are asked for


@dataclass(kw_only=True, slots=True)
class _CallsSoFar:
    """Of one answer: whether it has calls, and whether one of them is none (cut off, no JSON)."""

    has_any: bool = False
    is_broken: bool = False

    def add(self, delta: ReplyDelta) -> None:
        """What the next piece has."""
        self.has_any |= bool(delta.call_pieces)
        self.is_broken |= delta.num_malformed > 0

    @property
    def called_by(self) -> tuple[Finish, ...]:
        """What may have ended an answer that calls tools: a stop string has not, if it may have ended a call."""
        return (Finish.STOP, *([] if self.is_broken else [Finish.STRING])) if self.has_any else ()


class Teller:
    """Tells the answers to requests."""

    def __init__(self, answers: Asker, tokenizer: Tokenizer) -> None:
        self.answers, self.tokenizer = answers, tokenizer
        self._before = tokenizer.encode_whole("a")[-1:].tolist()

    async def whole(self, asked: ClientRequest) -> JsonObject:
        """The answers of a request, when all are finished. Raises `RefusedRequest`."""
        told: list[list[NewTokens]] = [[] for _ in asked.readers]
        try:
            async with (
                asyncio.timeout_at(asked.until),
                self.answers.turns.answering(),
                aclosing(self._told(asked)) as tokens,
            ):
                weights = self.answers.taken()
                async for number, new in tokens:
                    told[number].append(new)
        except TimeoutError:
            raise too_late(self.answers.limits.timeout) from None
        choices = []
        for number, pieces in enumerate(told):
            answer = joined_tokens(pieces) if pieces else None
            delta = ReplyDelta() if answer is None else asked.readers[number].feed(answer)
            choices.append(self._choice(asked, number, delta, answer, echo=asked.echo(number)))
        count = sum(len(new.ids) for pieces in told for new in pieces)
        by = _drawn_by(weights)
        return asked.envelope(streamed=False) | {"choices": choices, "usage": usage(asked, count), **by}

    async def pieces(self, asked: ClientRequest) -> AsyncGenerator[JsonObject, None]:
        """The same as it comes. What goes wrong on the way is the last piece."""
        begun = asked.envelope(streamed=True)
        count, calls = 0, [_CallsSoFar() for _ in asked.readers]
        try:
            async with (
                asyncio.timeout_at(asked.until),
                self.answers.turns.answering(),
                aclosing(self._told(asked)) as tokens,
            ):
                begun |= _drawn_by(self.answers.taken())
                for number in range(len(asked.readers)):
                    if asked.is_chat:
                        opening = {"role": "assistant", "content": ""}
                        first = {"index": number, "delta": opening, "logprobs": None, "finish_reason": None}
                        yield begun | {"choices": [first]}
                    elif asked.echoes:
                        told = self._choice(asked, number, ReplyDelta(), None, echo=asked.echo(number), is_piece=True)
                        yield begun | {"choices": [told]}
                async for number, new in tokens:
                    count += len(new.ids)
                    delta = asked.readers[number].feed(new)
                    if delta or asked.logprobs or new.finish is not None:
                        told = self._choice(asked, number, delta, new, is_piece=True, calls=calls[number])
                        yield begun | {"choices": [told]}
        except TimeoutError:
            yield too_late(self.answers.limits.timeout).body
            return
        except RefusedRequest as refused:
            yield refused.body
            return
        if asked.usage_at_end:
            yield begun | {"choices": [], "usage": usage(asked, count)}

    def _told(self, asked: ClientRequest) -> AsyncGenerator[tuple[int, NewTokens], None]:
        return self.answers.tell(asked.questions if asked.answered else ())

    def _choice(
        self,
        asked: ClientRequest,
        number: int,
        delta: ReplyDelta,
        new: NewTokens | None,
        *,
        echo: Echo | None = None,
        is_piece: bool = False,
        calls: _CallsSoFar | None = None,
    ) -> JsonObject:
        """An answer, or a piece of one that had these ``calls`` before; without tokens the prompt alone is told."""
        calls = calls or _CallsSoFar()
        calls.add(delta)
        content: JsonObject = {"text": delta.content if echo is None else echo.text + delta.content}
        if asked.is_chat:
            content = {"delta": _spoken(delta, is_piece=True)} if is_piece else {"message": _message(delta)}
        finish = None if new is None or new.finish is None else FINISHES[new.finish]
        if new is not None and new.finish in calls.called_by:
            finish = "tool_calls"
        if new is None and not asked.answered:
            finish = FINISHES[Finish.LENGTH]
        logprobs: JsonObject | None = None
        if asked.logprobs and asked.is_chat:
            logprobs = None if new is None else self._chat_logprobs(new)
        elif asked.logprobs:
            logprobs = self._text_logprobs(echo, new)
        if asked.token_ids:
            content["token_ids"] = [] if new is None else new.ids.tolist()
            if not is_piece:
                question = asked.questions[number // asked.questions[0].num_samples]
                content["prompt_token_ids"] = question.prompt.tolist()
        return {"index": number, **content, "logprobs": logprobs, "finish_reason": finish}

    def _chat_logprobs(self, new: NewTokens) -> JsonObject:
        return {
            "content": [
                self._token(number, logprob)
                | {"top_logprobs": [self._token(*one) for one in zip(tops, values, strict=True)]}
                for number, logprob, tops, values in _shown(new)
            ],
            "refusal": None,
        }

    def _text_logprobs(self, echo: Echo | None, new: NewTokens | None) -> JsonObject:
        """Of every token, that which ended the answer included: harnesses count on one for each that they asked for."""
        shown: list[Any] = []
        if echo is not None:
            shown = [(echo.first, None, None, None), *([] if echo.others is None else _shown(echo.others))]
        shown += [] if new is None else _shown(new, whole=True)
        return {
            "tokens": [self._text(number) for number, *_ in shown],
            "token_logprobs": [logprob for _, logprob, *_ in shown],
            "top_logprobs": [None if tops is None else self._named(tops, values) for _, _, tops, values in shown],
        }

    def _text(self, number: int) -> str:
        """The text of a token behind another one: alone, many tokenizers decode it without the space it begins with."""
        return self.tokenizer.decode([*self._before, number])[len(self.tokenizer.decode(self._before)) :]

    def _named(self, tops: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        """The likeliest tokens, the likeliest first, by their texts: of two with one text the likelier."""
        found: dict[str, float] = {}
        for number, logprob in zip(tops, values, strict=True):
            found.setdefault(self._text(number), logprob)
        return found

    def _token(self, number: int, logprob: float) -> JsonObject:
        text = self._text(number)
        is_whole = HALF_CHARACTER not in text  # else its bytes are those of a part of a character
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}


def _drawn_by(weights: WeightsName | None) -> JsonObject:
    """The weights that draw an answer, where they were delivered."""
    return {} if weights is None else {"weights": {"version": weights.version, "digest": weights.digest}}


def _message(whole: ReplyDelta) -> JsonObject:
    """An answer as an assistant's message."""
    content = whole.content if whole.content or not whole.call_pieces else None
    return {"role": "assistant", "content": content} | {
        name: value for name, value in _spoken(whole, is_piece=False).items() if name != "content"
    }


def _spoken(delta: ReplyDelta, *, is_piece: bool) -> JsonObject:
    """Thought, text and calls, those that there are. The calls of a stream are numbered."""
    calls = [({"index": piece.number} if is_piece else {}) | _call(piece) for piece in joined_pieces(delta.call_pieces)]
    parts = {"reasoning_content": delta.reasoning, "content": delta.content, "tool_calls": calls}
    return {name: value for name, value in parts.items() if value}


def _call(piece: CallPiece) -> JsonObject:
    """A call, or more of the arguments of one that was told before."""
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    named = {"id": piece.id or f"call_{secrets.token_hex(12)}", "type": "function"}
    return named | {"function": {"name": piece.name, "arguments": piece.arguments}}


def _shown(new: NewTokens, *, whole: bool = False) -> list[tuple[int, float, list[int], list[float]]]:
    """Tokens with their logprobs and the likeliest at their places; the token that ended the answer is told with the
    ``whole`` of it only."""
    rows = zip(new.ids.tolist(), new.logprobs.tolist(), new.top_ids.tolist(), new.top_logprobs.tolist(), strict=True)
    found = list(rows)
    return found[:-1] if new.finish is Finish.STOP and not whole else found


def usage(asked: ClientRequest, completion: int) -> dict[str, int]:
    """Tokens of the prompt and of all answers, those that ended them included."""
    prompt = sum(len(question.prompt) for question in asked.questions)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
