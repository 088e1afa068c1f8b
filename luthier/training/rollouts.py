"""Answers that the model draws in training, judged and laid out to be learned from.

prompts of a step ──engine──▶ n answers each ──judge──▶ rewards ──▶ advantages ──▶ trees: prompt, n answers ──▶ batches

A step's answers follow from the weights, the seed, the step and the rows: they are the same after a kill, and on any
number of processes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from luthier.collation import CollateSettings, collate_packs, collate_trees
from luthier.config.rollout import DeadGroups, RolloutConfig
from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Completion, Engine, Finish
from luthier.errors import TrainingError, UserError
from luthier.loader.places import PlannedMicroBatch
from luthier.objectives.policy_losses import Advantage, advantages
from luthier.records import Batch, Branch, Pack, PolicyTargets, Sample
from luthier.rewards.judging import DrawnAnswer, Judged, RewardJudge
from luthier.training.generate import Question, question_of
from luthier.training.streams import ReadsPacks
from luthier.writing import write_text

NO_QUESTION = "rows are not asked that have no prompt, or whose answer was cut before its stop token"
FOLDER = "rollouts"  # in the run's folder: a file of answers for each step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerGroup:
    """A question, its answers with their rewards, and how much better each is than the others. G answers that have a
    reward; those without are in the log alone."""

    question: Question
    answers: Sequence[Completion]
    rewards_G: NDArray[np.float64]
    advantages_G: NDArray[np.float64]

    @property
    def is_dead(self) -> bool:
        """Whether there is nothing to learn, as all rewards are equal."""
        return not self.advantages_G.any()

    @property
    def tree(self) -> Sample:
        """The prompt, and each answer as a branch behind it."""
        prompt, answers = self.question.prompt, [answer.ids for answer in self.answers]
        ids = np.concatenate([prompt, *answers]).astype(np.int32)
        lengths = [len(answer) for answer in answers]
        return Sample(
            input_ids=ids,
            target=np.arange(len(ids)) >= len(prompt),
            branches=(Branch(parent=-1, length=len(prompt)), *(Branch(parent=0, length=n) for n in lengths)),
            address=self.question.address,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Rollouts:
    """``capacity``: tokens of a row that trees share, ``rows_at_once`` of which are a micro-batch. ``shared``: answers
    share their prompt; else each has its own."""

    config: RolloutConfig
    engine: Engine
    tokenizer: Tokenizer
    judge: RewardJudge
    advantage: Advantage
    how: CollateSettings
    shared: bool
    capacity: int
    rows_at_once: int
    seed: int
    folder: Path
    rank: int
    tell: Callable[[str], None]
    missing: Counter[str] = field(default_factory=Counter)  # what could not be asked or judged, and how often

    def batches(self, reader: ReadsPacks, planned: Sequence[PlannedMicroBatch]) -> list[Batch]:
        """What this rank learns from in a step; nothing, where no answer of it is better than another."""
        stops = frozenset(self.tokenizer.stop_token_ids)
        packs = [pack for one in planned if not one.is_blank for pack in reader.packs(one)]
        segments = [segment for pack in packs for segment in pack.segments]
        questions = [found for segment in segments if (found := question_of(segment, stops)) is not None]
        if any(question.media for question in questions):
            raise UserError("objective rl: prompts with pictures, videos or sounds are not learned from yet")
        if without := len(segments) - len(questions):
            self._note(NO_QUESTION, without)
        groups = list(self._groups(questions, planned[0].step))
        kept = [group for group in groups if self.config.dead_groups is DeadGroups.KEEP or not group.is_dead]
        return [self._batch(some) for some in self._shares([group for group in kept if len(group.answers)])]

    def _groups(self, questions: Sequence[Question], step: int) -> Iterator[AnswerGroup]:
        settings = GenerateConfig(
            do_sample=True, temperature=1.0, max_new_tokens=self.config.max_new_tokens, seed=self.seed
        )
        requests = [
            replace(question.request(number, settings, self.config.answers), draw=_draw(step, question))
            for number, question in enumerate(questions)
        ]
        drawn: dict[tuple[int, int], Completion] = {}
        for answer in self.engine.generate(requests):
            if isinstance(answer, Completion):
                drawn[answer.key, answer.sample] = answer
            else:
                self._note(f"not answered: {answer.reason}: {answer.detail}", 1)
        places = sorted(drawn)
        judged = self.judge.judge([self._as_text(questions[key], drawn[key, sample]) for key, sample in places])
        self._count(judged)
        self._write(step, [questions[key] for key, _ in places], [drawn[place] for place in places], judged)
        self._check_finished(step, [drawn[place] for place in places])
        for key, question in enumerate(questions):
            ours = [n for n, (other, _) in enumerate(places) if other == key and not np.isnan(judged.total_N[n])]
            rewards_G = judged.total_N[ours]
            yield AnswerGroup(
                question=question,
                answers=[drawn[places[n]] for n in ours],
                rewards_G=rewards_G,
                advantages_G=advantages(rewards_G, self.advantage),
            )

    def _as_text(self, question: Question, answer: Completion) -> DrawnAnswer:
        return DrawnAnswer(
            prompt=self.tokenizer.decode(question.prompt),
            expected=self.tokenizer.decode(question.answer),
            generated=answer.text(self.tokenizer),
            finished=answer.finish is Finish.STOP,
        )

    def _count(self, judged: Judged) -> None:
        for what, count in judged.missing.items():
            self._note(f"rewards: {what}; such an answer is judged by the other rewards, or not learned from", count)

    def _note(self, what: str, count: int) -> None:
        """Count what is missing, and tell it at the first time."""
        if what not in self.missing:
            self.tell(what)
        self.missing[what] += count

    def _check_finished(self, step: int, answers: Sequence[Completion]) -> None:
        finished = sum(answer.finish is Finish.STOP for answer in answers)
        if step == 0 and answers and finished < self.config.min_finished * len(answers):
            raise TrainingError(
                f"{finished} of the {len(answers)} answers of the first step are finished within "
                f"rollout.max_new_tokens ({self.config.max_new_tokens}): rewards of answers that are cut teach little",
                hint="raise rollout.max_new_tokens, or lower rollout.min_finished to go on like this",
            )

    def _shares(self, groups: Sequence[AnswerGroup]) -> Iterator[list[list[AnswerGroup]]]:
        """Micro-batches of rows of groups, in their order."""
        rows: list[list[AnswerGroup]] = []
        room = 0
        for group in groups:
            size = len(group.tree.input_ids)
            if size > room:
                if len(rows) == self.rows_at_once:
                    yield rows
                    rows = []
                rows.append([])
                room = self.capacity
            rows[-1].append(group)
            room -= size
        if rows:
            yield rows

    def _batch(self, rows: Sequence[Sequence[AnswerGroup]]) -> Batch:
        groups = [group for row in rows for group in row]
        how, trees = self.how, [[group.tree for group in row] for row in rows]
        if self.shared:
            batch = collate_trees(trees, pad_token_id=how.pad_token_id, pad_to_multiple_of=how.pad_to_multiple_of)
        else:
            segments = [[segment for tree in row for segment in tree.segments()] for row in trees]
            packs = [Pack(segments=tuple(row)) for row in segments]
            if not how.packed:
                packs = [Pack(segments=(segment,)) for row in segments for segment in row]
            batch = collate_packs(
                packs,
                packed=how.packed,
                pad_token_id=how.pad_token_id,
                pad_to_multiple_of=how.pad_to_multiple_of,
                varlen=how.varlen,
            )
        answers = [answer for group in groups for answer in group.answers]
        policy = PolicyTargets(
            behaviour_K=torch.from_numpy(np.concatenate([answer.logprobs for answer in answers]).astype(np.float32)),
            advantages_S=_tensor([group.advantages_G for group in groups]),
            rewards_S=_tensor([group.rewards_G for group in groups]),
            finished_S=torch.tensor([answer.finish is Finish.STOP for answer in answers]),
        )
        return replace(batch, policy=policy)

    def _write(self, step: int, questions: Sequence[Question], answers: Sequence[Completion], judged: Judged) -> None:
        names = [reward.name for reward in self.judge.rewards]
        lines = [
            {
                "row": str(question.address),
                "sample": answer.sample,
                "prompt": self.tokenizer.decode(question.prompt),
                "expected": self.tokenizer.decode(question.answer),
                "generated": answer.text(self.tokenizer),
                "ids": answer.ids.tolist(),
                "finish": str(answer.finish),
                "logprob": float(answer.logprobs.astype(np.float64).sum()),
                "reward": None if np.isnan(total) else float(total),
                "rewards": {n: None if np.isnan(v) else float(v) for n, v in zip(names, values, strict=True)},
            }
            for question, answer, total, values in zip(
                questions, answers, judged.total_N, judged.values_NF, strict=True
            )
        ]
        path = self.folder / FOLDER / f"{step + 1:06d}{f'.rank{self.rank}' if self.rank else ''}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _draw(step: int, question: Question) -> int:
    """The number by which a question's answers are drawn in a step."""
    return int.from_bytes(blake2b(f"{step}\0{question.address}".encode(), digest_size=8).digest(), "big")


def _tensor(parts: Sequence[NDArray[np.float64]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))
