"""Answers that a run draws itself: drawn, judged, laid out, and kept in its folder.

Here are the answers to one question, from their rewards to a micro-batch, and to the files of the folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from luthier.collation import CollateSettings, MediaInputs, blank_grid
from luthier.collation.collator import batch_of_packs, collate_trees, to_batch
from luthier.config.objective import Learned
from luthier.engines import Completion, Finish
from luthier.errors import TrainingError, UserError
from luthier.objectives.policy_losses import Advantage, advantages
from luthier.records import Batch, DrawnInStep, Pack, PolicyTargets, Segment, Unit
from luthier.rewards.judging import DrawnAnswer, Judged
from luthier.sources.formats.turns import message_row
from luthier.training.folder.run_folder import ROLLOUTS_FOLDER
from luthier.training.generate import Question
from luthier.training.rollouts.talks import AnswerTree, ModelCall, Trajectory, answer_tree
from luthier.writing import JsonObject, write_text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerGroup:
    """A question, its answers with their rewards, and how much better each is than the others. G answers that can be
    learned from; ``unjudged`` are those without a reward, and what rewards that do not count say of them."""

    question: Question
    answers: Sequence[Trajectory]
    rewards_G: NDArray[np.float64]
    values_GF: NDArray[np.float64]  # each reward before its weight; nan: it has no opinion
    advantages_G: NDArray[np.float64]
    tree: AnswerTree
    unjudged: Sequence[tuple[Trajectory, Sequence[float]]] = ()

    @property
    def is_dead(self) -> bool:
        """Whether there is nothing to learn, as all rewards are equal."""
        return not self.advantages_G.any()

    def of(self, places: Sequence[int]) -> AnswerGroup:
        """Some of the answers, in this order."""
        chosen, answers = np.array(places, dtype=np.int64), [self.answers[place] for place in places]
        return AnswerGroup(
            question=self.question,
            answers=answers,
            rewards_G=self.rewards_G[chosen],
            values_GF=self.values_GF[chosen],
            advantages_G=self.advantages_G[chosen],
            tree=answer_tree(self.question.prompt, answers, self.question.address),
        )


def group_of_row(question: Question, segment: Segment, step: int, *, num_rewards: int) -> AnswerGroup:
    """The row's own answer, with its stop token. Nobody drew it: it has no reward, and no probability."""
    start = len(question.prompt)
    ids = segment.input_ids[start : start + len(question.answer) + 1]
    unknown = np.full(len(ids), np.nan, dtype=np.float32)
    answer = Completion(key=-1, sample=0, ids=ids, logprobs=unknown, finish=Finish.STOP)
    call = ModelCall(prompt=question.prompt, completion=answer, version=step, media=question.media)
    answers = [Trajectory(calls=(call,))]
    return AnswerGroup(
        question=question,
        answers=answers,
        rewards_G=np.full(1, np.nan),
        values_GF=np.full((1, num_rewards), np.nan),
        advantages_G=np.full(1, np.nan),
        tree=answer_tree(question.prompt, answers, question.address),
    )


def facts_of(groups: Sequence[AnswerGroup], num_rewards: int) -> DrawnInStep:
    """What the first micro-batch of a step tells of all answers that were drawn for it."""
    unjudged = [one for group in groups for one in group.unjudged]
    answers = [answer for group in groups for answer in group.answers] + [answer for answer, _ in unjudged]
    told = np.array([values_F for _, values_F in unjudged], dtype=np.float64).reshape(len(unjudged), num_rewards)
    nothing = np.full(len(unjudged), np.nan)
    return DrawnInStep(
        rewards_N=torch.from_numpy(np.concatenate([*(one.rewards_G for one in groups), nothing])),
        values_NF=torch.from_numpy(np.concatenate([*(one.values_GF for one in groups), told])),
        finished_N=torch.tensor([answer.finished for answer in answers], dtype=torch.bool),
        lengths_N=torch.tensor([len(answer.ids) for answer in answers], dtype=torch.int64),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerChoice:
    """Which of the judged answers to a prompt are learned from: `RolloutConfig.keep` and its ``bar`` of the best."""

    learned: Learned
    keep: int = 1
    bar: float | None = None

    def places(self, rewards_G: NDArray[np.float64]) -> list[int]:
        """Their places. `Learned.PAIR` gives the best and the worst, in this order, or none where all rewards are
        equal; of equal rewards the answer that was drawn first counts as the better one."""
        if self.learned not in (Learned.BEST, Learned.PAIR) or len(rewards_G) == 0:
            return list(range(len(rewards_G)))
        order: list[int] = np.argsort(-rewards_G, kind="stable").tolist()
        if self.learned is Learned.PAIR:
            return [order[0], order[-1]] if rewards_G[order[0]] > rewards_G[order[-1]] else []
        return [place for place in order[: self.keep] if self.bar is None or rewards_G[place] >= self.bar]

    def of(self, group: AnswerGroup) -> AnswerGroup:
        """The group with these alone."""
        places = self.places(group.rewards_G)
        return group if places == list(range(len(group.answers))) else group.of(places)


class Fate(StrEnum):
    """What becomes of an answer that was asked for. Any other word is why it was dropped."""

    TRAINED = "trained"
    NO_SIGNAL = "no signal"  # it was learned from, or could have been, and says nothing of what to do better


NOT_CHOSEN, BELOW_BAR = "others to its prompt were chosen", "its reward is below rollout.bar"


def fates(rewards_G: NDArray[np.float64], reasons_G: Sequence[str], choice: AnswerChoice, kind: Advantage) -> list[str]:
    """Of all answers to one prompt, those without a reward too, whose ``reasons_G`` say why they have none."""
    if choice.learned is Learned.ALL:
        return [Fate.TRAINED] * len(rewards_G)
    known_N = np.flatnonzero(~np.isnan(rewards_G))
    found = list(reasons_G)
    known = rewards_G[known_N]
    if choice.learned is Learned.COMPARED:
        is_live = kind is Advantage.REWARD or advantages(known, kind).any()
        chosen: list[int] = list(range(len(known))) if is_live else []
        others: str = Fate.NO_SIGNAL
    else:
        chosen, others = choice.places(known), NOT_CHOSEN
        if choice.learned is Learned.PAIR and not chosen:
            others = Fate.NO_SIGNAL
    for number, place in enumerate(known_N.tolist()):
        is_low = choice.learned is Learned.BEST and choice.bar is not None and known[number] < choice.bar
        found[place] = Fate.TRAINED if number in chosen else BELOW_BAR if is_low else others
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerLayout:
    """How groups become micro-batches. ``capacity``: tokens of a row that trees share, ``rows_at_once`` of which are a
    micro-batch. ``shared``: answers share their prompt; else each has its own. ``pairs``: groups are pairs. ``media``:
    what makes the inputs of prompts with media, of a model that sees or hears."""

    how: CollateSettings
    shared: bool
    capacity: int
    rows_at_once: int
    pairs: bool = False
    media: MediaInputs | None = None

    def blank(self) -> Batch:
        """A micro-batch that nothing is learned from."""
        grid = blank_grid(self.how)
        return to_batch(grid if self.media is None else self.media.fill(grid, self.how), self.how)


def micro_batches(groups: Sequence[AnswerGroup], layout: AnswerLayout) -> Iterator[list[list[AnswerGroup]]]:
    """Micro-batches of rows of groups, in their order."""
    rows: list[list[AnswerGroup]] = []
    room = 0
    for group in groups:
        size = len(group.tree.sample.input_ids)
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


def collated(rows: Sequence[Sequence[AnswerGroup]], layout: AnswerLayout, *, age: int) -> Batch:
    """Rows of groups as a micro-batch, with what the loss has to know of each answer. ``age`` as in `PolicyTargets`."""
    groups = [group for row in rows for group in row]
    how, trees = layout.how, [[group.tree.sample for group in row] for row in rows]
    if layout.shared:
        batch = collate_trees(
            trees, pad_token_id=how.pad_token_id, pad_to_multiple_of=how.pad_to_multiple_of, media=layout.media
        )
    else:
        segments = [[segment for tree in row for segment in tree.segments()] for row in trees]
        packs = [Pack(segments=tuple(row)) for row in segments]
        if not how.packed:
            packs = [Pack(segments=(segment,)) for row in segments for segment in row]
        batch = batch_of_packs(packs, how, layout.media)
    if batch.lost:
        address, loss = batch.lost[0]
        raise TrainingError(
            f"{address}: its media could be read when it was asked, and cannot now: {loss.detail}",
            hint="restore the file; the run goes on from its last checkpoint",
        )
    before = np.cumsum([0, *(len(group.answers) for group in groups)])
    answers_K = np.concatenate([group.tree.answers_K + first for group, first in zip(groups, before, strict=False)])
    sizes = np.cumsum([0, *(len(group.tree.numbers_K) for group in groups)])
    numbers_K = [group.tree.numbers_K + first for group, first in zip(groups, sizes, strict=False)]
    policy = PolicyTargets(
        behaviour_K=torch.from_numpy(np.concatenate([group.tree.logprobs_K for group in groups])),
        answers_K=torch.from_numpy(answers_K),
        advantages_S=torch.from_numpy(np.concatenate([group.advantages_G for group in groups]).astype(np.float32)),
        groups_S=torch.from_numpy(np.repeat(np.arange(len(groups)), np.diff(before))),
        order_K=torch.from_numpy(np.argsort(np.concatenate(numbers_K))),
        age=age,
    )
    _check_owners(policy, groups)
    return replace(batch, policy=policy, units=_pairs(batch, answers_K) if layout.pairs else ())


def _check_owners(policy: PolicyTargets, groups: Sequence[AnswerGroup]) -> None:
    """Look once more at what the loss is to read: the targets of an answer have the probabilities of that answer
    together, and of two answers to a prompt the better one has the higher advantage. Raises `TrainingError`."""
    told_S = np.bincount(policy.answers_K.numpy(), policy.behaviour_K.numpy(), minlength=len(policy.advantages_S))
    drawn_S = [float(answer.logprobs.sum(dtype=np.float64)) for group in groups for answer in group.answers]
    wrong_S = ~np.isclose(told_S, drawn_S, rtol=1e-4, atol=1e-4, equal_nan=True)
    advantages_S, first = policy.advantages_S.numpy(), 0
    for group in groups:
        ours = slice(first, first := first + len(group.answers))
        order = np.argsort(group.rewards_G, kind="stable")
        if (np.diff(advantages_S[ours][order]) < 0).any():
            wrong_S[ours] = True
        if wrong_S[ours].any():
            raise TrainingError(
                f"{group.question.address}: its answers were given the advantages of others, or tokens of others",
                hint="this is a fault of Luthier or of a plugin; see docs/rl.md for what a run keeps of its answers",
            )


def _pairs(batch: Batch, answers_K: NDArray[np.int64]) -> tuple[Unit, ...]:
    """Answers 0 and 1, 2 and 3, and so on, by their segments. Raises `UserError` for one that is not one segment."""
    owned = np.unique(np.stack([answers_K, batch.targets.segments_K.numpy()]), axis=1)
    if len(np.unique(owned[0])) < owned.shape[1]:
        raise UserError(
            "online_dpo compares answers of one sequence each, and here the history of one was rewritten on the way",
            hint="take another objective for conversations of several calls",
        )
    segments = owned[1].tolist()
    return tuple(Unit(segments=(a, b), verdict=0.0) for a, b in zip(segments[::2], segments[1::2], strict=True))


# ---- The answers of a run in its folder: what was asked, what was drawn, how it was judged, and what became of it.
#
# rollouts/000001.jsonl          a line for each answer of the first step; of rank 1 in 000001.rank1.jsonl
# rollouts/000001.counts.json    how many of them were asked for and learned from, and why the others were not
#
# A step that is done again writes both again, so that what is added up over the finished steps counts each answer once.


def answers_file(folder: Path, step: int, rank: int) -> Path:
    """Of a step, counted from 0, on one rank."""
    return folder / ROLLOUTS_FOLDER / f"{step + 1:06d}{f'.rank{rank}' if rank else ''}.jsonl"


def write_answers(
    path: Path,
    questions: Sequence[Question],
    answers: Sequence[Trajectory],
    texts: Sequence[DrawnAnswer],
    judged: Judged,
    names: Sequence[str],
    advantages_N: NDArray[np.float64],
    fates_N: Sequence[str],
) -> None:
    """A line of JSON for each answer, with its rewards by name and its advantage by them alone; None: it is not learned
    from. ``texts``: the answers as they were judged; ``fates_N``: see `fates`."""
    lines = [
        {
            "row": str(question.address),
            "sample": answer.sample,
            "prompt": text.prompt,
            "expected": text.expected,
            "generated": text.generated,
            "ids": answer.ids.tolist(),
            "finish": answer.ended or str(answer.finish),
            "logprob": float(answer.logprobs.astype(np.float64).sum()),
            **({"weights": str(weights)} if (weights := answer.calls[0].completion.weights) is not None else {}),
            **({"messages": [message_row(m) for m in answer.messages]} if answer.messages else {}),
            "reward": None if np.isnan(total) else float(total),
            "advantage": None if np.isnan(advantage) else float(advantage),
            "fate": str(fate),
            "rewards": {n: None if np.isnan(v) else float(v) for n, v in zip(names, values, strict=True)},
        }
        for question, answer, text, total, values, advantage, fate in zip(
            questions, answers, texts, judged.total_N, judged.values_NF, advantages_N, fates_N, strict=True
        )
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


COUNTS = ".counts.json"


def write_counts(path: Path, fates: Counter[str]) -> None:
    """Beside the answers in ``path``: how many were asked for, by what became of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.with_name(path.stem + COUNTS), json.dumps(dict(fates), ensure_ascii=False))


def remove_other_ranks(folder: Path, step: int, size: int) -> None:
    """Files of a step, counted from 0, that more ranks than the ``size`` of now have left before a kill."""
    for path in (folder / ROLLOUTS_FOLDER).glob(f"{step + 1:06d}.rank*.json*"):
        rank = path.name.split(".")[1].removeprefix("rank")
        if rank.isdecimal() and int(rank) >= size:
            path.unlink(missing_ok=True)


def ledger_of_answers(folder: Path, num_steps: int) -> JsonObject:
    """What became of every answer that was asked for in the first steps of a run: ``sampled`` = ``trained`` +
    ``no_signal`` + ``dropped``, by reason. ``waiting`` are those that were drawn for steps which did not come, and
    ``steps_without_counts`` finished steps whose file is lost. Nothing, where no step has any."""
    fates: Counter[str] = Counter()
    counted, waiting = set(), 0
    for path in sorted((folder / ROLLOUTS_FOLDER).glob(f"*{COUNTS}")):
        step, found = int(path.name.partition(".")[0]), json.loads(path.read_text())
        if step > num_steps:
            waiting += sum(found.values())
            continue
        counted.add(step)
        fates.update(found)
    if not counted and not waiting:
        return {}
    told: JsonObject = {"sampled": fates.total(), "trained": fates.pop(Fate.TRAINED, 0)}
    told |= {"no_signal": fates.pop(Fate.NO_SIGNAL, 0), "dropped": dict(fates.most_common())}
    told |= {"waiting": waiting, "steps_without_counts": num_steps - len(counted)}
    assert told["sampled"] == told["trained"] + told["no_signal"] + fates.total(), told
    return told
