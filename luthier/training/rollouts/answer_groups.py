"""Answers to one question, from their rewards to a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from luthier.collation import CollateSettings, collate_packs, collate_trees
from luthier.engines.engine import Completion, Finish
from luthier.records import Batch, Branch, Pack, PolicyTargets, Sample
from luthier.training.generate import Question


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerGroup:
    """A question, its answers with their rewards, and how much better each is than the others. G answers that have a
    reward; those without are in the log alone."""

    question: Question
    answers: Sequence[Completion]
    rewards_G: NDArray[np.float64]
    values_GF: NDArray[np.float64]  # each reward before its weight; nan: it has no opinion
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerLayout:
    """How groups become micro-batches. ``capacity``: tokens of a row that trees share, ``rows_at_once`` of which are a
    micro-batch. ``shared``: answers share their prompt; else each has its own."""

    how: CollateSettings
    shared: bool
    capacity: int
    rows_at_once: int


def micro_batches(groups: Sequence[AnswerGroup], layout: AnswerLayout) -> Iterator[list[list[AnswerGroup]]]:
    """Micro-batches of rows of groups, in their order."""
    rows: list[list[AnswerGroup]] = []
    room = 0
    for group in groups:
        size = len(group.tree.input_ids)
        if size > room:
            if len(rows) == layout.rows_at_once:
                yield rows
                rows = []
            rows.append([])
            room = layout.capacity
        rows[-1].append(group)
        room -= size
    if rows:
        yield rows


def collated(rows: Sequence[Sequence[AnswerGroup]], layout: AnswerLayout) -> Batch:
    """Rows of groups as a micro-batch, with what the loss has to know of each answer."""
    groups = [group for row in rows for group in row]
    how, trees = layout.how, [[group.tree for group in row] for row in rows]
    if layout.shared:
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
        values_SF=_tensor([group.values_GF for group in groups]),
        finished_S=torch.tensor([answer.finish is Finish.STOP for answer in answers]),
    )
    return replace(batch, policy=policy)


def _tensor(parts: Sequence[NDArray[np.float64]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))
