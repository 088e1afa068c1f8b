"""The bodies of answers, as OpenAI's interface has them: whole, or in pieces as tokens come."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Finish, NewTokens, Request
from luthier.serve.asking import Asker, TextReader, joined, too_late
from luthier.serve.wire import RefusedRequest

FINISHES = {Finish.STOP: "stop", Finish.STRING: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """One request of a client: what the engine is asked, and how the answer is told."""

    request: Request
    model: str
    is_chat: bool
    logprobs: bool = False
    usage_at_end: bool = False  # of a stream
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, *, streamed: bool) -> dict[str, Any]:
        """What every answer and every piece of one begins with."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        if streamed and self.is_chat:
            kind = "chat.completion.chunk"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


class Teller:
    """Tells the answers to requests."""

    def __init__(self, answers: Asker, tokenizer: Tokenizer) -> None:
        self.answers, self.tokenizer = answers, tokenizer

    async def whole(self, asked: ClientRequest) -> dict[str, Any]:
        """The answers of a request, when all are finished. Raises `RefusedRequest`."""
        told: dict[int, list[NewTokens]] = {number: [] for number in range(asked.request.num_samples)}
        try:
            async with self.answers.limit(), aclosing(self.answers.tell(asked.request)) as tokens:
                async for new in tokens:
                    told[new.sample].append(new)
        except TimeoutError:
            raise too_late(self.answers.limits.timeout) from None
        choices = []
        for sample, pieces in told.items():
            all_of_it = joined(pieces)
            text = TextReader(self.tokenizer, asked.request.settings.stop_strings).feed(all_of_it)
            content = {"message": {"role": "assistant", "content": text}} if asked.is_chat else {"text": text}
            choices.append(self._choice(asked, sample, content, all_of_it))
        count = sum(len(new.ids) for pieces in told.values() for new in pieces)
        return asked.envelope(streamed=False) | {"choices": choices, "usage": usage(asked, count)}

    async def pieces(self, asked: ClientRequest) -> AsyncGenerator[dict[str, Any], None]:
        """The same as it comes. What goes wrong on the way is the last piece."""
        begun = asked.envelope(streamed=True)
        strings = asked.request.settings.stop_strings
        readers = [TextReader(self.tokenizer, strings) for _ in range(asked.request.num_samples)]
        count = 0
        try:
            async with self.answers.limit(), aclosing(self.answers.tell(asked.request)) as tokens:
                if asked.is_chat:
                    for sample in range(len(readers)):
                        first = {"delta": {"role": "assistant", "content": ""}}
                        yield begun | {"choices": [{"index": sample, **first, "logprobs": None, "finish_reason": None}]}
                async for new in tokens:
                    count += len(new.ids)
                    text = readers[new.sample].feed(new)
                    content: dict[str, Any] = (
                        {"delta": {"content": text} if text else {}} if asked.is_chat else {"text": text}
                    )
                    if text or asked.logprobs or new.finish is not None:
                        yield begun | {"choices": [self._choice(asked, new.sample, content, new)]}
        except TimeoutError:
            yield too_late(self.answers.limits.timeout).body
            return
        except RefusedRequest as refused:
            yield refused.body
            return
        if asked.usage_at_end:
            yield begun | {"choices": [], "usage": usage(asked, count)}

    def _choice(self, asked: ClientRequest, sample: int, content: dict[str, Any], new: NewTokens) -> dict[str, Any]:
        finish = None if new.finish is None else FINISHES[new.finish]
        logprobs = None
        if asked.logprobs:
            logprobs = self._chat_logprobs(new) if asked.is_chat else self._text_logprobs(new)
        return {"index": sample, **content, "logprobs": logprobs, "finish_reason": finish}

    def _chat_logprobs(self, new: NewTokens) -> dict[str, Any]:
        return {
            "content": [
                self._token(number, logprob)
                | {"top_logprobs": [self._token(*one) for one in zip(tops, values, strict=True)]}
                for number, logprob, tops, values in _shown(new)
            ],
            "refusal": None,
        }

    def _text_logprobs(self, new: NewTokens) -> dict[str, Any]:
        shown = _shown(new)
        return {
            "tokens": [self.tokenizer.decode([number]) for number, *_ in shown],
            "token_logprobs": [logprob for _, logprob, *_ in shown],
            "top_logprobs": [
                {self.tokenizer.decode([top]): value for top, value in zip(tops, values, strict=True)}
                for _, _, tops, values in shown
            ],
        }

    def _token(self, number: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode([number])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _shown(new: NewTokens) -> list[tuple[int, float, list[int], list[float]]]:
    """Tokens with their logprobs and the likeliest at their places; the token that ended the answer is not told."""
    rows = zip(new.ids.tolist(), new.logprobs.tolist(), new.top_ids.tolist(), new.top_logprobs.tolist(), strict=True)
    found = list(rows)
    return found[:-1] if new.finish is Finish.STOP else found


def usage(asked: ClientRequest, completion: int) -> dict[str, int]:
    """Tokens of the prompt and of all answers, those that ended them included."""
    prompt = len(asked.request.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
