"""Held-out rows answered under the rewards of a run: by greedy search, and drawn several times each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import GenerateConfig, RunConfig
from luthier.engines import Completion
from luthier.errors import UserError
from luthier.metrics import JUDGE, Answered, Metric, measured, told_of_values
from luthier.packing import Segments
from luthier.records import Address, Segment
from luthier.rewards.judging import DrawnAnswer, RewardJudge, behind_thought
from luthier.sources.origins import resolve_sources
from luthier.sources.source import RowsByAddress, open_sources
from luthier.training.generate import Question, answering, wanted
from luthier.training.report import GenerationRecord, GenerationRound
from luthier.training.rollouts.drawing import Rollouts
from luthier.training.rollouts.talks import ModelCall, NoteCount, Talks, Trajectory, sampling

REWARD = "reward"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOutTalks:
    """Held-out rows that are answered in several turns, by the tools or the environment of training.

    ``greedy`` and ``drawn`` hold the conversations; both know the rows of ``questions``.
    """

    questions: list[Question]
    greedy: Talks
    drawn: Talks
    note: NoteCount

    def answer_all(self, step: int, rollouts: Rollouts, metrics: Mapping[str, Metric]) -> GenerationRound:
        """See `generate.answer_all`. A record's prompt is what the model was sent last, with all that was said before;
        what is compared with the row's answer is what it said then."""
        begun = time.perf_counter()
        found = self.greedy.draw(self.questions, 0, version=step, note=self.note, refused={})
        tokenizer = rollouts.tokenizer
        records, compared = [], []
        for key, question in enumerate(self.questions):
            answer = found.get((key, 0))
            expected = question.expected(tokenizer) or ""
            text = "" if answer is None else answer.text(tokenizer)
            said = behind_thought(text, rollouts.thought_end)
            records.append(
                GenerationRecord(
                    address=str(question.address),
                    prompt=tokenizer.decode(question.prompt if answer is None else answer.calls[-1].prompt),
                    expected=expected,
                    generated=text,
                    equal=answer is not None and said == expected,
                    finished=answer is not None and answer.finished,
                )
            )
            if answer is not None:
                compared.append(Answered(row=str(question.address), expected=expected, generated=(said,)))
        told = GenerationRound(
            step=step,
            records=tuple(records),
            seconds=time.perf_counter() - begun,
            metrics=measured(metrics, compared),
        )
        drawn = self.drawn.draw(self.questions, 0, version=step, note=self.note, refused={})
        return _judged(told, self._as_texts(found, rollouts), self._as_texts(drawn, rollouts), rollouts.judge)

    def _as_texts(self, found: Mapping[tuple[int, int], Trajectory], rollouts: Rollouts) -> list[DrawnAnswer]:
        asked = [rollouts.asked_text(key, question) for key, question in enumerate(self.questions)]
        return [rollouts.with_answer(asked[key], found[key, sample]) for key, sample in sorted(found)]


def with_rewards(
    found: GenerationRound,
    questions: Sequence[Question],
    rollouts: Rollouts,
    settings: GenerateConfig,
    answers: Mapping[int, Completion],
) -> GenerationRound:
    """The round with the mean of each reward of its ``answers``, by the number of their question, and of
    ``rollout.answers`` that are drawn to each question: ``greedy/NAME``, ``sampled/NAME``, and ``pass@K`` where all
    rewards are 0 or 1. A question that was not answered counts in none."""
    greedy = [
        replace(_as_text(answer, questions, rollouts), generated=found.records[key].generated)
        for key, answer in sorted(answers.items())
    ]
    return _judged(found, greedy, _drawn(questions, rollouts, settings), rollouts.judge)


def _judged(
    found: GenerationRound, greedy: Sequence[DrawnAnswer], drawn: Sequence[DrawnAnswer], judge: RewardJudge
) -> GenerationRound:
    rows = [one.address for one in found.records]
    told: dict[str, dict[str, object]] = {}
    for kind, answers in (("greedy", greedy), ("sampled", drawn)):
        judged = judge.judge(answers)
        columns = {REWARD: judged.total_N}
        if len(judge.labels) > 1:
            columns |= {label: judged.values_NF[:, number] for number, label in enumerate(judge.labels)}
        for name, values_N in columns.items():
            told |= _told(f"{kind}/{name}", values_N, [answer.group for answer in answers], rows)
    return replace(found, metrics={**found.metrics, **told})


def _drawn(questions: Sequence[Question], rollouts: Rollouts, settings: GenerateConfig) -> list[DrawnAnswer]:
    """Drawn as in training; with the same random numbers at every round, so that rounds differ by the weights alone."""
    drawing = sampling(rollouts.config, seed=settings.seed, max_new_tokens=settings.max_new_tokens)
    requests = [question.request(number, drawing, rollouts.config.answers) for number, question in enumerate(questions)]
    answers = [answer for answer in rollouts.held_out_engine.generate(requests) if isinstance(answer, Completion)]
    answers.sort(key=lambda answer: (answer.key, answer.sample))
    return [_as_text(answer, questions, rollouts) for answer in answers]


def _as_text(answer: Completion, questions: Sequence[Question], rollouts: Rollouts) -> DrawnAnswer:
    question = questions[answer.key]
    call = ModelCall(prompt=question.prompt, completion=answer, version=0)
    return rollouts.with_answer(rollouts.asked_text(answer.key, question), Trajectory(calls=(call,)))


def _told(
    name: str, values_N: NDArray[np.float64], owners: Sequence[int], rows: Sequence[str]
) -> dict[str, dict[str, object]]:
    values: list[list[float]] = [[] for _ in rows]
    for owner, value in zip(owners, values_N.tolist(), strict=True):
        if not np.isnan(value):
            values[owner].append(value)
    found = told_of_values(values, rows)
    if not found:
        return {}
    most = max(map(len, values))
    likely = found.get(f"pass@{most}")
    return {name: found} | ({f"{name} pass@{most}": {"mean": likely}} if likely is not None else {})


def held_out_talks(
    rollouts: object, config: RunConfig, held_out: Segments, tell: Callable[[str], None]
) -> HeldOutTalks | None:
    """Held-out rows answered as those of training are, where answers take several turns. Raises `UserError`."""
    if not isinstance(rollouts, Rollouts) or rollouts.talks is None:
        return None
    if JUDGE in config.eval.metrics:
        what = "eval.metrics: answers of several turns are not judged by the metric judge"
        raise UserError(what, hint="remove it: the run's rewards judge them", key="eval.metrics")
    told: set[str] = set()

    def note(what: str, _: int) -> None:
        if what not in told:
            tell(f"held-out rows: {what}")
        told.add(what)

    first: dict[Address, Segment] = {}  # of the first rows
    for index in wanted(held_out):
        segment = held_out[index]
        if len(first) == config.eval.generate_rows and segment.address not in first:
            break
        first[segment.address] = segment
    (train, own), talks, settings = resolve_sources(config.data), rollouts.talks, answering(config)
    greedy = replace(
        talks,
        engine=rollouts.held_out_engine,
        rows=RowsByAddress(sources=open_sources(own or train, seed=config.runtime.seed)),
        config=talks.config.model_copy(update={"answers": 1}),
        settings=settings,
    )
    drawing = sampling(talks.config, seed=settings.seed, max_new_tokens=settings.max_new_tokens)
    return HeldOutTalks(
        questions=greedy.questions(list(first.values()), note),
        greedy=greedy,
        drawn=replace(greedy, config=talks.config, settings=drawing),
        note=note,
    )
