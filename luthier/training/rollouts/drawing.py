"""Answers that the model draws in training, judged and laid out to be learned from.

prompts of a step ──engine──▶ n answers each ──judge──▶ rewards ──▶ advantages ──▶ trees: prompt, n answers ──▶ batches

A step's answers follow from the weights, the seed, the step and the rows: they are the same after a kill, and on any
number of processes. Answers that wait for their step are kept in checkpoints, as the weights that drew them are gone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from luthier.config.objective import Learned
from luthier.config.rollout import DeadGroups, RolloutConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Engine
from luthier.errors import CheckpointError, SamplerLost, TrainingError
from luthier.loader.reader import BatchReader, PlannedMicroBatch
from luthier.objectives.policy_losses import Advantage, advantages
from luthier.records import Batch, Ints, Segment
from luthier.rewards.judging import DrawnAnswer, Judged, RewardJudge, behind_thought
from luthier.sources.formats.turns import message_row
from luthier.training import rollouts
from luthier.training.generate import Question, question_of, shown
from luthier.training.processes import most_over_ranks, summed_over_ranks
from luthier.training.report import ASKED_ANEW, DRAWING
from luthier.training.rollouts import ahead
from luthier.training.rollouts.delivery import Delivery, Snapshot, on_all_ranks
from luthier.training.rollouts.early_warnings import EarlyWarnings, StepAnswers
from luthier.training.rollouts.sampler_probes import SamplerProbes
from luthier.training.rollouts.talks import ModelCall, NoteCount, Talks, Trajectory, answer_tree, draw_number, sampling
from luthier.training.streams import SparePrompts, World
from luthier.writing import counted

SLOTS = "answers with a token that stands for an image, a video or audio are not learned from"
NOT_STOPPED = "generate.stop_* ends greedy answers to held-out rows alone; answers that are drawn end at stop tokens"
NO_QUESTION = "rows are not asked that have no prompt, or whose answer was cut before its stop token"


@dataclass(kw_only=True, slots=True, eq=False)
class _AskedInStep:
    """All that a step has asked, in the order of its questions. ``groups`` has the number of each answer's question,
    ``refused`` says why a question was not answered."""

    questions: list[Question] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    answers: list[Trajectory] = field(default_factory=list)
    texts: list[DrawnAnswer] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    rounds: list[Judged] = field(default_factory=list)

    def judged(self) -> Judged:
        """The rewards of all answers."""
        return Judged(
            total_N=np.concatenate([each.total_N for each in self.rounds]),
            values_NF=np.concatenate([each.values_NF for each in self.rounds]),
            missing=sum((each.missing for each in self.rounds), Counter()),
            reasons_N=[reason for each in self.rounds for reason in each.reasons_N],
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Rollouts:
    """Draws answers to the questions of a step, has them judged, and lays out those that are ``learned`` from."""

    config: RolloutConfig
    engine: Engine
    tokenizer: Tokenizer
    judge: RewardJudge
    advantage: Advantage
    layout: rollouts.AnswerLayout
    seed: int
    folder: Path
    world: World
    tell: Callable[[str], None]
    score: Callable[[Batch], Mapping[str, torch.Tensor]] | None  # of targets, under the weights that drew them
    probes: SamplerProbes | None = None
    warnings: EarlyWarnings | None = None
    learned: Learned = Learned.COMPARED
    talks: Talks | None = None  # where answers take several turns
    slots: frozenset[int] = frozenset()  # ids that stand for media; the model may draw them, and could not read them
    missing: Counter[str] = field(default_factory=Counter)  # what could not be asked or judged, and how often
    kept: ahead.Kept = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # why, by the number of the question, in the last step
    delivery: Delivery | None = None  # where something else draws than the model in this process
    spare: SparePrompts | None = None  # where other prompts are asked for those that teach nothing
    thought_end: str | None = None  # as of `DrawnAnswer`
    in_parts: bool = False  # whether ranks share the weights of the model, so that they make as many passes
    _ahead: ahead.DrawingAhead | None = None
    _read_ahead: dict[int, list[tuple[Question, Segment]]] = field(default_factory=dict)
    _of_step: dict[int, dict[str, float]] = field(default_factory=dict)  # measures of how answers were drawn

    def batches(self, reader: BatchReader, planned: Sequence[PlannedMicroBatch]) -> list[Batch]:
        """What this rank learns from in a step: at least one micro-batch, which is blank where there is nothing."""
        step, own = planned[0].step, self.config.own
        asked = self._read_ahead.pop(step, None) or self._read(reader, planned)
        is_own = [
            own == 1 or not len(question.answer) or draw_number(step, question.address, "own") < own * 2**64
            for question, _ in asked
        ]
        drawn_now = step not in self.kept and (self._ahead is None or step not in self._ahead)
        drawn = self._groups(
            [question for (question, _), ours in zip(asked, is_own, strict=True) if ours], step, reader
        )
        if self.probes is not None:
            self.probes.drawn(drawn, now=drawn_now)
        facts, waiting = rollouts.facts_of(drawn, len(self.judge.rewards)), iter(drawn)
        groups = [
            next(waiting)
            if ours
            else rollouts.group_of_row(question, segment, step, num_rewards=len(self.judge.rewards))
            for (question, segment), ours in zip(asked, is_own, strict=True)
        ]
        groups += waiting  # of prompts that are asked in place of others
        first, *others = self._laid_out(groups, step)
        if self.in_parts:
            most = most_over_ranks(len(others), self.world)
            others += [self.layout.blank() for _ in range(len(others), most)]
        return [replace(first, drawn=replace(facts, measures=self._of_step.pop(step, {}))), *others]

    def begin(self, reader: BatchReader, planned: Sequence[PlannedMicroBatch], *, after: int) -> None:
        step = planned[0].step
        if step in self.kept:
            return
        assert self.delivery is not None, "only samplers elsewhere draw ahead"
        self._ahead = self._ahead or ahead.DrawingAhead()
        self._read_ahead[step] = self._read(reader, planned)
        questions = [question for question, _ in self._read_ahead[step]]
        snapshot = self.delivery.snapshot(after, questions)
        self._ahead.begin(step, partial(self._brought_and_drawn, questions, step, snapshot))

    def _read(self, reader: BatchReader, planned: Sequence[PlannedMicroBatch]) -> list[tuple[Question, Segment]]:
        packs = [pack for one in planned if not one.is_blank for pack in reader.packs(one)]
        return self._asked([segment for pack in packs for segment in pack.segments])

    def _laid_out(self, groups: Sequence[rollouts.AnswerGroup], step: int) -> list[Batch]:
        chosen = [self._choice.of(group) for group in groups]
        kept = [group for group in chosen if self.config.dead_groups is DeadGroups.KEEP or not group.is_dead]
        learned = list(rollouts.micro_batches([group for group in kept if len(group.answers)], self.layout))
        found = [
            self._scored(rows, rollouts.collated(rows, self.layout, age=step % self.updates), step) for rows in learned
        ]
        return found or [self.layout.blank()]

    def _scored(self, rows: Sequence[Sequence[rollouts.AnswerGroup]], batch: Batch, step: int) -> Batch:
        """With what is to be known of the answers under the weights that drew them."""
        if self.score is None:
            return batch
        policy = batch.policy
        assert policy is not None, "what was drawn is for policies"
        names = [ahead.name_of(group.question) for row in rows for group in row]
        answers = [one for name in names for one in self.kept[step][name] if not np.isnan(one.reward)]
        if not all(one.scores for one in answers):
            found = {name: score_K.cpu()[policy.order_K].numpy() for name, score_K in self.score(batch).items()}
            ends = np.cumsum([len(one.answer.ids) for one in answers])[:-1]
            for name, score_N in found.items():
                for one, part in zip(answers, np.split(score_N, ends), strict=True):
                    one.scores[name] = part
        of_all: dict[str, torch.Tensor] = {}
        for name in answers[0].scores:
            drawn_K = torch.from_numpy(np.concatenate([one.scores[name] for one in answers]))
            of_all[name] = torch.empty_like(drawn_K).index_copy(0, policy.order_K, drawn_K)
        return replace(
            batch, policy=replace(policy, expected_K=of_all.get("expected"), trained_K=of_all.get("trained"))
        )

    def _asked(self, segments: Sequence[Segment]) -> list[tuple[Question, Segment]]:
        """The questions of some segments, each with one that its row is in."""
        if self.talks is not None:
            by_row = {segment.address: segment for segment in segments}
            return [(question, by_row[question.address]) for question in self.talks.questions(segments, self._note)]
        stops = frozenset(self.tokenizer.stop_token_ids)
        asked = [(found, segment) for segment in segments if (found := question_of(segment, stops)) is not None]
        if without := len(segments) - len(asked):
            self._note(NO_QUESTION, without)
        return asked

    @property
    def most_rounds(self) -> int:
        """How often a step asks other prompts for those that teach nothing."""
        return 0 if self.spare is None else self.config.resample_rounds

    @property
    def updates(self) -> int:
        return self.config.updates

    @property
    def staleness(self) -> int:
        return self.config.staleness

    @property
    def held_out_engine(self) -> Engine:
        """What answers held-out rows by the weights of now: the model in this process."""
        return self.engine if self.delivery is None else self.delivery.trained

    def save(self, folder: Path, step: int) -> None:
        """See `DrawsAnswers`. Waits for the answers that are being drawn: their weights will be gone."""
        for other in [] if self._ahead is None else self._ahead.finished():
            told = _AskedInStep()
            self.kept[other] = self._judged([question for question, _ in self._read_ahead[other]], other, told)
            self._conclude(told, other)
        waiting = {other: answers for other, answers in self.kept.items() if other >= step}
        if waiting:
            ahead.write_kept(folder, self.world.rank, waiting, updates=self.updates)

    def load(self, folder: Path, step: int) -> None:
        self.kept = ahead.read_kept(folder, updates=self.updates)
        if step % self.updates and step not in self.kept:
            raise CheckpointError(
                f"{folder} does not hold the answers of step {step + 1}, which are drawn before it where "
                f"rollout.updates is {self.updates}",
                hint="set rollout.updates as it was, or begin anew with output.overwrite: true",
            )

    def _groups(self, questions: Sequence[Question], step: int, reader: BatchReader) -> list[rollouts.AnswerGroup]:
        """Of these questions, and of those that are asked in place of them where they teach nothing."""
        kept, told, asked_anew = self.kept.get(step), _AskedInStep(), 0
        found: dict[str, list[ahead.KeptAnswer]] = {}
        groups: list[rollouts.AnswerGroup] = []
        for left in reversed(range(1 + self.most_rounds)):
            answers = self._judged(questions, step, told) if kept is None else kept
            of_round = [self._group(question, ahead.answers_to(question, answers, step)) for question in questions]
            found |= answers
            groups += of_round
            if self.spare is None or not left or not len(others := self._spare_for(of_round, step, asked_anew)):
                break
            questions = [question for question, _ in self._read(reader, [self.spare.share(step, others)])]
            asked_anew += len(others)
        if kept is None:
            self._conclude(told, step)
            first = step - step % self.updates
            self.kept = {other: answers for other, answers in self.kept.items() if other >= first} | {step: found}
        if self.spare is not None:
            self._of_step.setdefault(step, {})[ASKED_ANEW] = float(asked_anew)
        return groups

    def _spare_for(self, groups: Sequence[rollouts.AnswerGroup], step: int, asked_anew: int) -> Ints:
        """Segments that all ranks ask in place of groups that teach nothing, behind those asked before."""
        assert self.spare is not None
        dead = sum(self._choice.of(group).is_dead for group in groups)
        return self.spare.segments(step, asked_anew, asked_anew + int(summed_over_ranks([dead], self.world)[0]))

    def _group(self, question: Question, answers: Sequence[ahead.KeptAnswer]) -> rollouts.AnswerGroup:
        ours = [one for one in answers if self._is_learned(one.reward)]
        rewards_G = np.array([one.reward for one in ours])
        drawn = [one.answer.seeing(question.media) for one in ours]
        return rollouts.AnswerGroup(
            question=question,
            answers=drawn,
            rewards_G=rewards_G,
            values_GF=np.array([one.values_F for one in ours]).reshape(len(ours), len(self.judge.labels)),
            advantages_G=advantages(rewards_G, self.advantage),
            tree=answer_tree(question.prompt, drawn, question.address),
            unjudged=[(one.answer, one.values_F) for one in answers if not self._is_learned(one.reward)],
        )

    def _judged(
        self, questions: Sequence[Question], step: int, told: _AskedInStep
    ) -> dict[str, list[ahead.KeptAnswer]]:
        """The answers by the name of their question; they are added to what the step has asked."""
        drawn = self._drawn_for(questions, step)
        if self.probes is not None:
            self.probes.check(drawn.values())
        places = sorted(drawn)
        asked = [self.asked_text(key, question) for key, question in enumerate(questions, len(told.questions))]
        texts = [self.with_answer(asked[key], drawn[key, sample]) for key, sample in places]
        judged = on_all_ranks(lambda: self.judge.judge(texts), self.world)
        self._count(judged)
        first = len(told.questions)
        told.questions += questions
        told.groups += [first + key for key, _ in places]
        told.answers += [drawn[place] for place in places]
        told.texts += texts
        told.refused |= {first + key: why for key, why in self.refused.items()}
        told.rounds.append(judged)
        names = [ahead.name_of(question) for question in questions]
        found: dict[str, list[ahead.KeptAnswer]] = {name: [] for name in names}
        first_asked = {name: key for key, name in reversed(list(enumerate(names)))}
        for place, total, values_F in zip(places, judged.total_N, judged.values_NF, strict=True):
            name = names[place[0]]
            if place[0] == first_asked[name]:  # a row that is asked twice is given the same answers again
                answer = ahead.KeptAnswer(answer=drawn[place], reward=float(total), values_F=values_F.tolist())
                found[name].append(answer)
        return found

    def _conclude(self, told: _AskedInStep, step: int) -> None:
        """Write down and look at all answers of a step."""
        judged, groups_N = told.judged(), np.array(told.groups, dtype=np.int64)
        fates_N = self._fates(groups_N, judged)
        self._write_counts(step, told, groups_N, fates_N)
        rollouts.write_answers(
            rollouts.answers_file(self.folder, step, self.world.rank),
            [told.questions[key] for key in told.groups],
            told.answers,
            told.texts,
            judged,
            self.judge.labels,
            self._advantages(groups_N, judged.total_N),
            fates_N,
        )
        self._check_finished(step, told.answers)
        if self.warnings is not None:
            self.warnings.step(
                StepAnswers(
                    texts=told.texts,
                    groups_N=groups_N,
                    lengths_N=np.array([len(answer.ids) for answer in told.answers], dtype=np.int64),
                    logps_N=np.array([answer.logprobs.sum() for answer in told.answers], dtype=np.float64),
                    judged=judged,
                )
            )

    def _advantages(self, groups_N: NDArray[np.int64], total_N: NDArray[np.float64]) -> NDArray[np.float64]:
        found_N = np.full(len(total_N), np.nan)
        for group in np.unique(groups_N):
            ours_N = (groups_N == group) & ~np.isnan(total_N)
            found_N[ours_N] = advantages(total_N[ours_N], self.advantage)
        return found_N

    @property
    def _choice(self) -> rollouts.AnswerChoice:
        return rollouts.AnswerChoice(learned=self.learned, keep=self.config.keep, bar=self.config.bar)

    def _fates(self, groups_N: NDArray[np.int64], judged: Judged) -> list[str]:
        found = [""] * len(groups_N)
        for group in np.unique(groups_N):
            ours = np.flatnonzero(groups_N == group).tolist()
            reasons = [judged.reasons_N[place] for place in ours]
            for place, fate in zip(
                ours, rollouts.fates(judged.total_N[ours], reasons, self._choice, self.advantage), strict=True
            ):
                found[place] = fate
        return found

    def _write_counts(self, step: int, told: _AskedInStep, groups_N: NDArray[np.int64], fates_N: Sequence[str]) -> None:
        """What becomes of all answers that the step asks for; those that were not drawn are dropped."""
        counts = Counter(map(str, fates_N))
        drawn_Q = np.bincount(groups_N, minlength=len(told.questions))
        for key, count in enumerate(drawn_Q.tolist()):
            counts[f"not answered: {told.refused.get(key, 'it was not begun')}"] += self.config.answers - count
        if self.world.is_main:
            rollouts.remove_other_ranks(self.folder, step, self.world.size)
        rollouts.write_counts(rollouts.answers_file(self.folder, step, self.world.rank), +counts)

    def _drawn_for(self, questions: Sequence[Question], step: int) -> dict[tuple[int, int], Trajectory]:
        """The answers of a step, drawn now or ahead of it."""
        version, delivery, begun = step - step % self.updates, self.delivery, time.perf_counter()
        if delivery is None:
            self.refused = {}
            return self._drawn(questions, version, self._note, self.refused, step=step)
        if self._ahead is not None and step in self._ahead:
            found = self._ahead.take(step)
        else:
            snapshot = on_all_ranks(lambda: delivery.snapshot(version, questions), self.world)
            if self.probes is not None and delivery.delivered != snapshot.weights:
                self.probes.watch.delivered()
            found = on_all_ranks(lambda: self._brought_and_drawn(questions, step, snapshot), self.world)
        self.refused = dict(found.refused)
        for what, count in found.notes:
            self._note(what, count)
        waited = time.perf_counter() - begun
        of_step = self._of_step.setdefault(step, {})
        for name, seconds in zip(DRAWING[1:], (*found.seconds, waited), strict=True):
            of_step[name] = of_step.get(name, 0.0) + seconds
        of_step[DRAWING[0]] = float(step - found.version)
        return found.answers

    def _brought_and_drawn(self, questions: Sequence[Question], step: int, snapshot: Snapshot) -> ahead.DrawnStep:
        """Called by another thread where answers are drawn ahead."""
        assert self.delivery is not None
        if self.staleness:
            self.delivery.bring(snapshot)
        else:
            on_all_ranks(partial(self.delivery.bring, snapshot), self.world)
        notes: ahead.DrawingNotes = []
        refused: dict[int, str] = {}
        delivering, self.delivery.seconds = self.delivery.seconds, 0.0
        version, begun = snapshot.weights.version, time.perf_counter()
        answers = self._drawn(questions, version, lambda what, count: notes.append((what, count)), refused, step=step)
        if questions and not answers:
            raise SamplerLost(
                f"no question of step {step + 1} was answered: {notes[-1][0] if notes else 'none was asked'}"
            )
        seconds = (time.perf_counter() - begun, delivering)
        return ahead.DrawnStep(answers=answers, version=version, notes=notes, refused=refused, seconds=seconds)

    def _drawn(
        self, questions: Sequence[Question], version: int, note: NoteCount, refused: dict[int, str], *, step: int
    ) -> dict[tuple[int, int], Trajectory]:
        """The answers, by the number of their question and their own."""
        if self.talks is not None:
            return self.talks.draw(questions, step, version=version, note=note, refused=refused)
        settings = sampling(self.config, seed=self.seed)
        requests = [
            replace(
                question.request(number, settings, self.config.answers),
                draw=draw_number(step, question.address),
                tempered=True,
            )
            for number, question in enumerate(questions)
        ]
        drawn: dict[tuple[int, int], Trajectory] = {}
        for answer in self.engine.generate(requests):
            if isinstance(answer, Completion) and not self.slots.isdisjoint(answer.ids.tolist()):
                refused[answer.key] = "it drew a token that stands for media"
                note(SLOTS, 1)
            elif isinstance(answer, Completion):
                call = ModelCall(prompt=questions[answer.key].prompt, completion=answer, version=version)
                drawn[answer.key, answer.sample] = Trajectory(calls=(call,))
            else:
                refused[answer.key] = answer.reason
                note(f"not answered: {answer.reason}: {answer.detail}", 1)
        return drawn

    def _is_learned(self, reward: float) -> bool:
        return self.learned is Learned.ALL or not np.isnan(reward)

    def asked_text(self, key: int, question: Question) -> DrawnAnswer:
        """The question of number ``key`` for what judges answers to it, without an answer yet."""
        end = self.thought_end
        return DrawnAnswer(
            thought_end=end,
            prompt=shown(question, self.tokenizer),
            expected=None if (right := question.expected(self.tokenizer)) is None else behind_thought(right, end),
            columns=question.columns,
            generated="",
            finished=False,
            group=key,
            address=question.address,
            has_media=bool(question.media),
        )

    def with_answer(self, asked: DrawnAnswer, answer: Trajectory) -> DrawnAnswer:
        """A question (`asked_text`) with an answer to it."""
        return replace(
            asked,
            generated=answer.text(self.tokenizer),
            finished=answer.finished,
            num_tokens=len(answer.ids),
            outcome=answer.outcome,
            conversation=[message_row(message) for message in answer.messages],
            prompt_ids=answer.calls[-1].prompt,
            ids=answer.calls[-1].completion.ids,
            messages=answer.messages,
        )

    def _count(self, judged: Judged) -> None:
        for what, count in judged.missing.items():
            self._note(f"rewards: {what}; such an answer is judged by the other rewards, or not learned from", count)

    def _note(self, what: str, count: int) -> None:
        """Count what is missing, and tell it at the first time."""
        if what not in self.missing:
            self.tell(what)
        self.missing[what] += count

    def _check_finished(self, step: int, answers: Sequence[Trajectory]) -> None:
        if step:
            return
        own = [sum(answer.finished for answer in answers), len(answers)]
        finished, drawn = (int(number) for number in summed_over_ranks(own, self.world))
        if not drawn and self.missing:
            hint = "docs/errors.md explains the reason; take other rows, or another objective"
            raise TrainingError(f"no question of the first step was answered: {', '.join(self.missing)}", hint=hint)
        if finished < self.config.min_finished * drawn:
            raise TrainingError(
                f"{finished} of the {counted(drawn, 'answer')} of the first step are finished within "
                f"rollout.max_new_tokens ({self.config.max_new_tokens}): rewards of answers that are cut teach little",
                hint="raise rollout.max_new_tokens, or lower rollout.min_finished to go on like this",
            )
