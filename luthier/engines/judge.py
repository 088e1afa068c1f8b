"""The judge of the metric ``judge``: a model behind a server, which gives answers a score in words that end with it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from luthier.config.schema import JudgeConfig
from luthier.engines.json_client import JsonClient, ServerLate, ServerRefused, ServerUnreachable, token_from
from luthier.engines.pool import BUSY, PAUSES
from luthier.errors import UserError
from luthier.rendering.messages import ControlTokens

PROMPT = """\
Judge an answer to a question. Give it a number from {low} to {high}: {high} if it is right, whole and does what was \
asked, {low} if it is wrong or of no use.

The question:
{question}

An answer that is known to be right:
{expected}

The answer to judge:
{answer}

Say in a few sentences why, and end with a line of this form:
Score: NUMBER
"""
WRONG_QUESTION = (400, 413, 422)  # a status that says that this question is wrong, and others need not be
MOST_LATE = 16  # replies in a row that do not come in time, after which the server is given up
_SCORE = re.compile(r"""score[\s*_:="'`]*(-?\d+(?:\.\d+)?)""", re.IGNORECASE)
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*")
Told = TypeVar("Told")
_PLACE = re.compile(r"\{([a-z]+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedAnswer:
    """An answer as a reader sees it, without control tokens, and what it is judged by."""

    question: str
    answer: str
    expected: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The score of an answer, or why there is none."""

    score: float | None
    reason: str = ""


class AnswerScorer:
    """Asks the server of a section ``judge`` about answers, ``batch_size`` of them at a time."""

    def __init__(self, config: JudgeConfig) -> None:
        """Nothing is sent yet. Raises `UserError` where no server is named, and for what is no http address."""
        if config.url is None:
            raise UserError("the metric judge needs a server that judges", hint="set judge.url", key="judge.url")
        self.config, self.prompt = config, config.prompt or PROMPT
        self.client = JsonClient(
            config.url,
            timeout=config.timeout,
            token=token_from(config.token_env, option="judge.token_env"),
            option="judge.url",
            token_option="judge.token_env",
            refused="judge.url is asked for /v1/chat/completions; judge.model names the model",
        )

    @property
    def settings(self) -> dict[str, object]:
        """What decides a score: scores of other settings are not compared with these."""
        said = self.config.model_dump(mode="json", include={"url", "model", "low", "high", "max_new_tokens"})
        return {**said, "prompt": self.prompt}

    def judge(self, answers: Sequence[JudgedAnswer]) -> Iterator[Judgement]:
        """A judgement of each answer, in their order.

        Raises `ServerUnreachable`, `ServerRefused` and `UserError` where the server cannot be asked at all. An answer
        whose reply is late, has no score or one outside of the scale, or whose question is refused, has none.
        """
        late = 0
        pool = ThreadPoolExecutor(self.config.batch_size, thread_name_prefix="luthier-judge")
        try:
            for found in pool.map(self._judged, answers):
                late = late + 1 if isinstance(found, ServerLate) else 0
                if isinstance(found, ServerLate):
                    if late == MOST_LATE:
                        raise found
                    yield Judgement(score=None, reason="the judge does not reply in time")
                else:
                    yield found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _model(self) -> dict[str, object]:
        name = self.config.model or patiently(self.client.first_model).get("id")
        return {} if name is None else {"model": name}

    def _judged(self, answer: JudgedAnswer) -> Judgement | ServerLate:
        said = {"role": "user", "content": self.question(answer)}
        body = {"messages": [said], "temperature": 0, "max_tokens": self.config.max_new_tokens}

        def ask() -> dict[str, object] | ServerLate:
            try:
                return self.client.post("/v1/chat/completions", {**self._model, **body})
            except ServerLate as error:  # who was asked once has had the time there is
                return error

        try:
            told = patiently(ask)
        except ServerRefused as refusal:
            if refusal.status not in WRONG_QUESTION:
                raise
            return Judgement(score=None, reason=f"the judge's server refuses the question ({refusal.status})")
        return told if isinstance(told, ServerLate) else self._score(told)

    def question(self, answer: JudgedAnswer) -> str:
        """What the judge is asked about an answer; texts of the answer that look like places stay what they are."""
        values = {
            "question": answer.question,
            "answer": answer.answer,
            "expected": answer.expected or "",
            "low": f"{self.config.low:g}",
            "high": f"{self.config.high:g}",
        }
        paragraphs = re.split(r"\n{2,}", self.prompt)
        if answer.expected is None:
            paragraphs = [one for one in paragraphs if "{expected}" not in one]
        return _PLACE.sub(lambda place: values.get(place[1], place[0]), "\n\n".join(paragraphs))

    def _score(self, told: Mapping[str, Any]) -> Judgement:
        try:
            text = told["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            hint = "judge.url names a server that answers /v1/chat/completions as OpenAI's does"
            raise UserError(
                f"{self.client.url} does not answer with a chat completion", hint=hint, key="judge.url"
            ) from error
        alone = _NUMBER.fullmatch(text or "")
        named = [alone[1]] if alone else _SCORE.findall(text or "")
        if not named:
            return Judgement(score=None, reason="the judge's reply has no score")
        score = float(named[-1])
        if not self.config.low <= score <= self.config.high:
            return Judgement(score=None, reason="the judge's score is outside of the scale")
        return Judgement(score=score)


def patiently(ask: Callable[[], Told]) -> Told:
    """What asking gives; it is tried again where the server cannot be reached or is busy, four times in all."""
    for pause in PAUSES:
        try:
            return ask()
        except ServerUnreachable:
            pass
        except ServerRefused as refusal:
            if refusal.status not in BUSY:
                raise
        time.sleep(pause)
    return ask()


def as_read(text: str, message: Mapping[str, Any] | None, control: ControlTokens) -> str:
    """An answer or a prompt as a reader sees it: what its message says, and calls, but no thought; or, where it was not
    read back, its text without control tokens."""
    if message is None or not isinstance(message.get("content"), str):
        return control.without(text).strip()
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return control.without("\n".join([*([said] if (said := message["content"]) else []), *calls])).strip()
