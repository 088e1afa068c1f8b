"""Answers judged by all rewards of a run. N answers, F rewards."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import nan
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from luthier.config.rollout import ENVIRONMENT, RewardConfig
from luthier.errors import UserError
from luthier.metrics import chosen_metrics
from luthier.records import NOWHERE, Address, Message
from luthier.rewards import child
from luthier.rewards.function_process import FunctionProcess, NoReward


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnAnswer:
    """An answer and what it is judged by.

    prompt, expected  as text: what was asked, and the right answer as the row has it, None where it has none
    finished          whether it ends with a stop token
    columns           of the row, for what judges its answers
    num_tokens        of the answer
    group             the same number for all answers to one prompt, which stand side by side
    outcome           what the environment of its conversation says
    conversation      all its messages, where it took several turns, as in a row of OpenAI's form
    address           of the row
    prompt_ids, ids   what the model was sent last, and what it drew then with its stop token, int32[T]; without ``ids``
                      nobody has drawn it, and its text counts
    messages          those of the conversation, as records
    has_media         the prompt holds pictures, videos or sounds
    thought_end       what ends a thought (``</think>``), where the chat template shows any
    """

    prompt: str
    expected: str | None
    generated: str
    finished: bool
    columns: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    group: int = 0
    outcome: float | None = None
    conversation: Sequence[Mapping[str, object]] = ()
    address: Address = NOWHERE
    prompt_ids: NDArray[np.int32] | None = None
    ids: NDArray[np.int32] | None = None
    messages: tuple[Message, ...] = ()
    has_media: bool = False
    thought_end: str | None = None

    @property
    def said(self) -> str:
        """The answer without the thought before it: what metrics compare."""
        return behind_thought(self.generated, self.thought_end)

    def saying(self, text: str, num_tokens: int) -> DrawnAnswer:
        """The same question with another answer, which is finished. No environment has seen it."""
        other = replace(self, generated=text, num_tokens=num_tokens, finished=True, outcome=None)
        return replace(other, ids=None, conversation=(), messages=())


def behind_thought(text: str, thought_end: str | None) -> str:
    """``<think>Hm.</think> Five.`` -> ``Five.``; all of a text in which no thought ends."""
    _, found, behind = text.partition(thought_end) if thought_end else ("", "", "")
    return behind.lstrip() if found else text


MATCHES = "matches:"  # before a pattern that whole answers are held against
ASKED_AT_ONCE = 64  # answers in one request to a server
SERVER_MEMORY = 2_000_000_000  # bytes for the process that asks it

NO_OPINION = "no reward has an opinion"

Opinion = float | None | NoReward  # None: it has none; NoReward: it should have one
AnswerJudge = Callable[[Sequence[DrawnAnswer]], Iterable[Opinion]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judged:
    """``total_N`` float64: the weighted sum, nan where no reward had an opinion. ``values_NF`` float64: each reward
    before its weight, nan where it had none. ``missing``: why there is none, and how often. ``reasons_N``: why no
    reward had an opinion of an answer; "" where one had, and nothing where nobody asks."""

    total_N: NDArray[np.float64]
    values_NF: NDArray[np.float64]
    missing: Counter[str]
    reasons_N: Sequence[str] = ()


class RewardJudge:
    """All rewards of a run. Functions' processes are started when they are first asked, and ended by `close`."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        *,
        max_new_tokens: int = 256,
        models: Mapping[int, AnswerJudge] | None = None,
    ) -> None:
        """``max_new_tokens``: tokens of the longest answer that is drawn. ``models`` judge for rewards that are reward
        models, and for others that are judged elsewhere, by their numbers in the list. Raises `UserError` for what is
        no reward."""
        self.rewards = rewards
        self._models = models or {}
        self._max_new_tokens = max_new_tokens
        self._exits = ExitStack()
        self._judges = [self._told(number, reward) for number, reward in enumerate(rewards)]

    @property
    def labels(self) -> list[str]:
        """The rewards' names in logs."""
        return [reward.label for reward in self.rewards]

    def judge(self, answers: Sequence[DrawnAnswer]) -> Judged:
        """The rewards of some answers. What fails or takes too long is counted, and its answer has no such reward."""
        values_NF = np.full((len(answers), len(self.rewards)), nan)
        missing: Counter[str] = Counter()
        reasons_N = [""] * len(answers)
        for number, (reward, judge) in enumerate(zip(self.rewards, self._judges, strict=True)):
            for place, (_, found) in enumerate(zip(answers, judge(answers), strict=True)):
                if isinstance(found, NoReward):
                    missing[f"{reward.label}: {found}"] += 1
                    reasons_N[place] = reasons_N[place] or f"{reward.label}: {found}"
                elif found is not None:
                    values_NF[place, number] = found
        weights_F = np.array([reward.weight for reward in self.rewards])
        # a reward of weight 0 is told, and judges nothing
        silent_N = np.isnan(values_NF[:, weights_F != 0]).all(axis=1)
        total_N = np.where(silent_N, nan, np.nansum(values_NF * weights_F, axis=1))
        reasons_N = [(why or NO_OPINION) if silent else "" for why, silent in zip(reasons_N, silent_N, strict=True)]
        return Judged(total_N=total_N, values_NF=values_NF, missing=missing, reasons_N=reasons_N)

    def opinions(self, number: int, answers: Sequence[DrawnAnswer]) -> list[Opinion]:
        """What one of the rewards says of some answers."""
        return list(self._judges[number](answers))

    def close(self) -> None:
        """End the processes."""
        self._exits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _told(self, number: int, reward: RewardConfig) -> AnswerJudge:
        try:
            return self._judge(number, reward)
        except UserError as error:
            key = f"rollout.rewards[{number}].metric"
            what = error.message.removeprefix("rollout.rewards: ")
            raise UserError(f"{key}: {what}", hint=error.hint, key=key) from error

    def _judge(self, number: int, reward: RewardConfig) -> AnswerJudge:
        if reward.is_model or number in self._models:
            return lambda answers: self._models[number](answers)
        if reward.metric == ENVIRONMENT:
            return lambda answers: [answer.outcome for answer in answers]
        if reward.metric is not None:
            return self._by_metric(reward, reward.metric)
        if reward.url is not None:
            memory = min(reward.max_memory, SERVER_MEMORY)
            asking = FunctionProcess(Path(child.__file__), "ask", timeout=reward.timeout, max_memory=memory)
            url, timeout, process = reward.url, reward.timeout, self._exits.enter_context(asking)
            return lambda answers: _by_server(process, url, timeout, answers)
        assert reward.file is not None, "a reward is a metric, a function, a server or a model"
        process = self._exits.enter_context(
            FunctionProcess(reward.file, reward.function_name, timeout=reward.timeout, max_memory=reward.max_memory)
        )
        return lambda answers: _by_function(process, answers, plain=reward.plain)

    def _by_metric(self, reward: RewardConfig, metric: str) -> AnswerJudge:
        if metric.startswith(MATCHES):
            pattern = _pattern(metric)
            return lambda answers: [float(pattern.fullmatch(answer.generated) is not None) for answer in answers]
        if not _compares(metric):
            of_length = length_reward(metric, self._max_new_tokens)
            return lambda answers: [of_length(answer.num_tokens) for answer in answers]
        found, _ = chosen_metrics([metric])
        of_row = found[metric].of_row
        if of_row is None:
            raise UserError(
                f"rollout.rewards: the metric {metric!r} gives no number for the text of one answer",
                hint="take rougeL, exact, contains or regex:PATTERN",
                key="rollout.rewards",
            )

        def judge(answer: DrawnAnswer) -> float | None:
            expected = expected_of(answer, reward.column)
            return None if expected is None else of_row(expected, answer.said)

        return lambda answers: map(judge, answers)


def check_columns(rewards: Sequence[RewardConfig], questions: Iterable[tuple[bool, Mapping[str, object]]]) -> None:
    """Raise `UserError` for a metric that compares with what none of the questions has: a column, or the right answer.
    Of each question it is told whether it has an answer, and its columns; no more are looked at than needed."""
    comparing = {number: one.column for number, one in enumerate(rewards) if one.metric and _compares(one.metric)}
    needed = set(comparing.values())
    seen: set[str] = set()
    count = 0
    for has_answer, columns in questions:
        count += 1
        seen.update(columns)
        needed -= {name for name, value in columns.items() if value is not None}
        needed -= {None} if has_answer else set()
        if not needed:
            return
    if not count:
        return
    column = min(needed, key=str)
    number = next(number for number, its_column in comparing.items() if its_column == column)
    there = f"there are: {', '.join(sorted(seen)[:20])}" if seen else "they have no columns but the prompt"
    if column is None:
        what = f"{rewards[number].label} compares with the row's right answer, and none of {count} rows has one"
        hint = "name the column that has it: columns: {expected: …} of the data set, or column: … of the reward"
        raise UserError(f"rollout.rewards[{number}]: {what}", hint=f"{hint}; {there}", key=f"rollout.rewards[{number}]")
    what = f"rollout.rewards[{number}].column: none of {count} rows has a column {column!r}"
    raise UserError(what, hint=there, key=f"rollout.rewards[{number}].column")


def _compares(metric: str) -> bool:
    return metric != ENVIRONMENT and not metric.startswith(MATCHES) and metric.partition(":")[0] not in LENGTHS


def _pattern(metric: str) -> re.Pattern[str]:
    try:
        return re.compile(metric.removeprefix(MATCHES), re.DOTALL)
    except re.error as error:
        what = f"rollout.rewards: {metric!r} is no regular expression: {error}"
        raise UserError(
            what, hint="PATTERN in matches:PATTERN is a Python regular expression", key="rollout.rewards"
        ) from None


def expected_of(answer: DrawnAnswer, column: str | None) -> str | None:
    """What a metric compares with: the row's column of this name as text, None where it has none; or its answer."""
    if column is None:
        return answer.expected
    value = answer.columns.get(column)
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _by_server(process: FunctionProcess, url: str, timeout: float, answers: Sequence[DrawnAnswer]) -> list[Opinion]:
    found: list[Opinion] = []
    for start in range(0, len(answers), ASKED_AT_ONCE):
        some = answers[start : start + ASKED_AT_ONCE]
        asked = [{"answer": one.generated, **_facts(one)} for one in some]
        found += process.call([one.generated for one in some], {"url": url, "asked": asked, "timeout": timeout})
    return found


def _facts(answer: DrawnAnswer) -> dict[str, object]:
    """What an answer is judged by, beside itself."""
    return {
        "expected": answer.expected,
        "prompt": answer.prompt,
        "finished": answer.finished,
        "columns": dict(answer.columns),
    }


def _by_function(process: FunctionProcess, answers: Sequence[DrawnAnswer], *, plain: bool) -> list[Opinion]:
    """What a function says of each answer, or of all answers to a prompt at once, as it wants to be asked."""
    found: list[Opinion] = []
    for _, members in groupby(answers, key=attrgetter("group")):
        group = list(members)
        try:
            together = process.takes_groups
        except NoReward as error:
            found += [error] * len(group)
            continue
        if together:
            own: dict[str, object] = {
                "plain": plain,
                "finished": [one.finished for one in group],
            }
            own["conversation"] = [list(one.conversation) for one in group]
            found += process.call([one.generated for one in group], {**_facts(group[0]), **own})
            continue
        for one in group:
            found += process.call([one.generated], {**_facts(one), "conversation": list(one.conversation)})
    return found


# ----------- Rewards of an answer's length alone, by name: what they are told is tokens, and the most that may be drawn


SHARE_OF_THE_END = 5  # DAPO: the last 4,096 of 20,480 tokens


def _length(num_tokens: int, most: int, _: int) -> float:
    """The share that it has of the longest answer. A negative weight favours short ones."""
    return num_tokens / most


def _overlong(num_tokens: int, most: int, end: int) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13): 0 up to ``end`` tokens before the longest answer, from
    there on down to -1."""
    return max(-1.0, min(0.0, (most - end - num_tokens) / end))


LENGTHS: dict[str, Callable[[int, int, int], float]] = {"length": _length, "overlong": _overlong}


def length_reward(name: str, most: int) -> Callable[[int], float]:
    """The reward of this name, ``overlong`` or ``overlong:64``, where ``most`` tokens are drawn. Raises `UserError`."""
    of, colon, argument = name.partition(":")
    end = max(1, most // SHARE_OF_THE_END)
    if colon:
        if of != "overlong" or not argument.isdecimal() or not 1 <= int(argument) <= most:
            raise UserError(
                f"rollout.rewards: {name!r} is not a reward of lengths",
                hint=f"overlong:TOKENS takes from 1 to rollout.max_new_tokens ({most}); length takes nothing",
                key="rollout.rewards",
            )
        end = int(argument)
    return lambda num_tokens: LENGTHS[of](num_tokens, most, end)
