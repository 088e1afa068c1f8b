"""What draws the answers of a run, checked: canaries before the first update, and the cause of a gap by trying.

A cause that says what the engine's numbers would have been (a *probe*) is believed where it explains most of the gap:
``engine -1.2 -0.4 -3.0``, ``training -0.8 -0.3 -2.1``, ``training at temperature 0.7 -1.2 -0.4 -3.0`` is a forgotten
temperature. What is left is told by where the gaps are. N tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel

from luthier.config.rollout import GapAction
from luthier.engines import Completion, Engine, Finish, Ids
from luthier.engines.local import NO_ADAPTER, LocalEngine
from luthier.errors import TrainingError
from luthier.models.passes import casting
from luthier.models.quantized import rounds_inputs
from luthier.models.sharding import gather_all
from luthier.records import Batch
from luthier.training.rollouts import AnswerGroup, AnswerLayout, collated
from luthier.training.rollouts.early_warnings import CANARIES, GapWatch
from luthier.training.rollouts.talks import ModelCall, Trajectory, answer_tree
from luthier.writing import counted

_ASKED = 16  # answers that a cause is looked for with
_TOKENS = 256  # of each answer at most
_NUMBERS = 2**24  # of all tokens' probabilities, of which each place has a vocabulary's
_TEMPERATURES = tuple(float(t) for t in np.round(np.arange(0.3, 2.01, 0.02), 2) if t != 1)
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
_COUNTS = (2, 5, 10, 20, 40, 50, 64, 100)

ModelCalls = Sequence[ModelCall]


@dataclass(kw_only=True, slots=True, eq=False)
class SamplerProbes:
    """``engine`` draws the answers; ``trained`` runs the model as it is trained, in this process."""

    engine: Engine
    trained: LocalEngine
    watch: GapWatch
    layout: AnswerLayout
    stops: frozenset[int]
    _groups: Sequence[AnswerGroup] = ()
    _told: set[str] = field(default_factory=set)

    def check(self, answers: Iterable[Trajectory]) -> None:
        """Look at answers before anything is made of them. Raises `TrainingError`."""
        completions = [call.completion for answer in answers for call in answer.calls]
        if (fault := visible_fault(completions, self.stops, self._vocabulary)) is not None:
            self._refuse(fault)

    def drawn(self, groups: Sequence[AnswerGroup], *, now: bool) -> None:
        """Remember the answers of a step, and have some scored by the engine where that is due. ``now``: the engine has
        just drawn them, so it has the weights of training; it may have others where they were drawn ahead or come from
        a checkpoint."""
        self._groups = [group for group in groups if len(group.answers)]
        self.watch.explain = self.explain
        if now and self.watch.needs_canaries:
            self.watch.compares_canaries = True  # on all ranks, also on those without any
            if self._groups:
                self.watch.canaries = self._canaries(self._groups[0])

    def explain(self) -> str:
        """The likeliest cause of the gap in the step's answers, as a sentence. Called before the weights change, by all
        ranks."""
        gather_all(self.trained.model)  # until the next step
        chosen = list(_some_calls(self._groups))
        if not chosen:
            return ""
        answers = [
            ScoredAnswer(
                group=number, engine=call.completion.logprobs[:_TOKENS], training=self._score(call, call.prompt)
            )
            for number, call in chosen
        ]
        if max(float(np.abs(one.engine - one.training).mean()) for one in answers) < self.watch.bound:
            return _sentence(Cause.ROUNDED_INPUTS if rounds_inputs(self.trained.model) else Cause.TRAINING_PASS)
        calls = [call for _, call in chosen]
        probes = {cause: list(make(calls)) for cause, make in self._makers().items()}
        return _sentence(cause_of(answers, probes, smallest_before=self.watch.smallest))

    def _makers(self) -> dict[Cause, Callable[[ModelCalls], Iterator[Probe]]]:
        made: dict[Cause, Callable[[ModelCalls], Iterator[Probe]]] = {
            Cause.DOUBLED_BEGIN: self._with_two_begins,
            Cause.SHORT_PROMPT: self._with_short_prompts,
            Cause.TEMPERATURE: self._at_temperatures,
            Cause.TRUNCATED: self._truncated,
            Cause.DTYPE: self._in_16_bits,
        }
        if isinstance(self.trained.model, PeftModel):
            made[Cause.NO_ADAPTER] = self._without_adapter
        return made

    @property
    def _vocabulary(self) -> int:
        table: Any = self.trained.model.get_input_embeddings()
        return int(table.weight.shape[0])

    def _canaries(self, group: AnswerGroup) -> Batch:
        """Some answers with the log-probabilities that the engine gives them when it is asked."""
        few = [self._scored_by_engine(answer) for answer in group.answers[:CANARIES]]
        asked = replace(
            group,
            answers=few,
            rewards_G=group.rewards_G[:CANARIES],
            values_GF=group.values_GF[:CANARIES],
            advantages_G=group.advantages_G[:CANARIES],
            tree=answer_tree(group.question.prompt, few, group.question.address),
        )
        return collated([[asked]], self.layout, age=0)

    def _scored_by_engine(self, answer: Trajectory) -> Trajectory:
        scored = [
            self.engine.score(_joined(call.prompt, call.completion.ids), len(call.prompt), call.media)
            for call in answer.calls
        ]
        calls = [
            replace(call, completion=replace(call.completion, logprobs=logprobs))
            for call, logprobs in zip(answer.calls, scored, strict=True)
        ]
        return replace(answer, calls=tuple(calls))

    def _refuse(self, fault: str) -> None:
        what = f"what draws the answers is at fault: {fault}"
        if self.watch.config.on_gap is GapAction.STOP:
            raise TrainingError(what, hint="rollout.on_gap: warn goes on")
        if what not in self._told:
            self._told.add(what)
            self.watch.tell(what)

    def _score(self, call: ModelCall, prompt: Ids, *, by: LocalEngine | None = None) -> Logps:
        """As training has it: under the temperature of the run."""
        ids, engine = call.completion.ids[:_TOKENS], by or self.trained
        if self.watch.config.temperature == 1:
            return engine.score(_joined(prompt, ids), len(prompt), call.media)
        places_N, logps_NV = self._of_all_tokens(call, prompt, ids, engine)
        return _taken(torch.from_numpy(logps_NV), places_N)

    def _of_all_tokens(self, call: ModelCall, prompt: Ids, ids: Ids, engine: LocalEngine) -> tuple[Ids, Logps]:
        """The log-probabilities of all tokens, likeliest first, and where those are that were drawn."""
        found = engine.scored(_joined(prompt, ids), len(prompt), call.media, top=self._vocabulary)
        places_N = (found.top_ids == ids[:, None]).argmax(axis=1)
        logps_NV = torch.from_numpy(found.top_logprobs) / self.watch.config.temperature
        return places_N.astype(np.int32), np.asarray(logps_NV.log_softmax(-1).numpy(), dtype=np.float32)

    def _without_adapter(self, calls: ModelCalls) -> Iterator[Probe]:
        base = self.trained.under(NO_ADAPTER)
        yield [self._score(call, call.prompt, by=base) for call in calls]

    def _with_two_begins(self, calls: ModelCalls) -> Iterator[Probe]:
        yield [self._score(call, _joined(call.prompt[:1], call.prompt)) for call in calls]

    def _with_short_prompts(self, calls: ModelCalls) -> Iterator[Probe]:
        for cut in (slice(None, -1), slice(None, -2), slice(None, -3), slice(1, None), slice(2, None)):
            # a cut prompt may lack a part of a picture
            yield [
                self._score(call, call.prompt[cut]) if len(call.prompt[cut]) and not call.media else None
                for call in calls
            ]

    def _in_16_bits(self, calls: ModelCalls) -> Iterator[Probe]:
        for dtype in (torch.bfloat16, torch.float16):
            with casting(self.trained.model.device, dtype):
                yield [self._score(call, call.prompt) for call in calls]

    def _at_temperatures(self, calls: ModelCalls) -> Iterator[Probe]:
        wholes = list(self._whole(calls))
        for temperature in _TEMPERATURES:
            scaled = [(places_N, torch.from_numpy(logps_NV) / temperature) for places_N, logps_NV in wholes]
            yield [_taken(logps_NV.log_softmax(-1), places_N) for places_N, logps_NV in scaled]

    def _truncated(self, calls: ModelCalls) -> Iterator[Probe]:
        """Under the likeliest tokens alone: the share of probability of those that are kept is divided by."""
        wholes = list(self._whole(calls))
        for share in _SHARES:
            yield [_kept(places_N, logps_NV, share=share) for places_N, logps_NV in wholes]
        for count in _COUNTS:
            yield [_kept(places_N, logps_NV, count=count) for places_N, logps_NV in wholes]

    def _whole(self, calls: ModelCalls) -> Iterator[tuple[Ids, Logps]]:
        """Of some answers the probabilities of all tokens, likeliest first, and where those are that were drawn."""
        left = max(8, _NUMBERS // self._vocabulary)
        for call in calls:
            ids = call.completion.ids[: min(_TOKENS, left)]
            left -= len(ids)
            if not len(ids):
                yield np.zeros(0, np.int32), np.zeros((0, 0), np.float32)
                continue
            yield self._of_all_tokens(call, call.prompt, ids, self.trained)


def _joined(*parts: Ids) -> Ids:
    return np.concatenate(parts).astype(np.int32)


def _taken(logps_NV: torch.Tensor, places_N: Ids) -> Logps:
    found = logps_NV.gather(1, torch.from_numpy(places_N.astype(np.int64))[:, None])[:, 0].numpy()
    return np.asarray(found, dtype=np.float32)


def _kept(places_N: Ids, logps_NV: Logps, *, share: float | None = None, count: int | None = None) -> Logps:
    """Log-probabilities among the tokens that are kept, as they were where the drawn one is not."""
    mass_NV = np.exp(logps_NV.astype(np.float64)).cumsum(axis=1)
    if count is not None:
        last_N = np.full(len(logps_NV), min(count, logps_NV.shape[1]) - 1)
    else:
        last_N = (mass_NV < (share or 1.0)).sum(axis=1).clip(max=logps_NV.shape[1] - 1)
    rows = np.arange(len(logps_NV))
    found = logps_NV[rows, places_N] - np.log(mass_NV[rows, last_N])
    return np.where(places_N <= last_N, found, logps_NV[rows, places_N]).astype(np.float32)


def _some_calls(groups: Sequence[AnswerGroup]) -> Iterator[tuple[int, ModelCall]]:
    """Those of whole groups, until there are `_ASKED`, with the number of their group: answers may have been swapped
    within one."""
    count = _ASKED
    for number, group in enumerate(groups):
        calls = [call for answer in group.answers for call in answer.calls if len(call.completion.ids)]
        yield from ((number, call) for call in calls)
        count -= len(calls)
        if count <= 0:
            return


def _sentence(cause: Cause) -> str:
    return f"It looks like {cause}"


Logps = NDArray[np.float32]


class Cause(StrEnum):
    """What makes the gap, in words, with what to look at."""

    TRAINING_PASS = (
        "training's own pass over packed rows differs from the model alone: try train.packing: none, and "
        "train.torch_compile: false"
    )
    ROUNDED_INPUTS = (
        "the base's 8-bit layers: they round what they read, in columns that depend on the other rows of a batch; "
        "model.quantization: nf4 rounds weights alone"
    )
    TEMPERATURE = "a temperature is in the engine's probabilities and not in those of training, or the other way round"
    TRUNCATED = (
        "truncated sampling: the engine's probabilities are those of its likeliest tokens alone; set top_p 1, top_k 0 "
        "and min_p 0 there"
    )
    SHORT_PROMPT = "a short prompt: the engine has answered the prompt without its first or its last tokens"
    DOUBLED_BEGIN = "a doubled begin token: the engine has put another begin token before the prompt"
    OTHER_PROMPT = (
        "another prompt: the gap is in the first tokens of the answers, so what stood before them was not the same; "
        "the engine may have a template of its own"
    )
    NO_ADAPTER = "a missing adapter: the engine answers with the base model alone"
    DTYPE = "another dtype: the engine computes in 16 bits where training computes in more"
    SHIFTED = "shifted log-probabilities: the engine's are those of the token before or behind"
    SWAPPED = "swapped answers: the engine's log-probabilities are those of another answer to the same prompt"
    STALE = "stale weights: the engine answers with the weights of an earlier step"
    WEIGHTS = "other weights, or another way to compute: no simpler cause explains the gap"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredAnswer:
    """The log-probabilities of an answer's tokens, as the engine told them and as training has them, float32[N].
    ``group`` says which prompt it answers."""

    group: int
    engine: Logps
    training: Logps


Probe = Sequence[Logps | None]
"""What the engine would have told of each answer under a cause; None where that is not known."""

EXPLAINED = 0.25  # a cause is believed if it leaves less of the gap than this share
_ROUNDED = 4.0  # rounding is only roughly foreseen: it makes gaps that are at most so many times larger or smaller
_FIRST = 2  # tokens of an answer that are near its prompt
_FIRST_TIMES = 1.5  # how much larger gaps are there, if the prompt was another
_ONE_SIDED = 0.98  # which share of tokens the engine finds likelier, if it knows fewer tokens
_GROWN = 3.0  # a gap that was so many times smaller before


def cause_of(
    answers: Sequence[ScoredAnswer], probes: Mapping[Cause, Sequence[Probe]], *, smallest_before: float | None
) -> Cause:
    """The cause that explains the gap best.

    ``smallest_before``: the smallest mean gap of the steps before, if there are any. A gap that has grown with the
    steps is one of the weights; others are there from the first step on.
    """
    whole = [answer for answer in answers if len(answer.engine) == len(answer.training)]
    if not whole:
        return Cause.SWAPPED
    tried = {Cause.SHIFTED: _shifts(answers), Cause.SWAPPED: [_of_others(answers)], **probes}
    rounded = tried.pop(Cause.DTYPE, ())
    left = {cause: min((_left(answers, one) for one in found), default=1.0) for cause, found in tried.items()}
    best = min(left, key=lambda cause: left[cause])
    if left[best] < EXPLAINED:
        return best
    gaps = np.concatenate([answer.engine - answer.training for answer in whole]).astype(np.float64)
    if float((gaps > 0).mean()) > _ONE_SIDED:
        return Cause.TRUNCATED
    if smallest_before is not None and float(np.abs(gaps).mean()) > _GROWN * smallest_before:
        return Cause.STALE
    if any(_is_rounding(answers, one) for one in rounded):
        return Cause.DTYPE
    return Cause.OTHER_PROMPT if _is_at_the_beginning(whole) else Cause.WEIGHTS


def visible_fault(answers: Sequence[Completion], stops: frozenset[int], vocabulary: int) -> str | None:
    """What is wrong with answers whatever their probabilities are; None where nothing is."""
    for answer in answers:
        ids, logprobs = answer.ids, answer.logprobs
        where = f"sample {answer.sample}"
        if len(ids) != len(logprobs):
            return f"{where} has {counted(len(ids), 'token')} and {len(logprobs)} log-probabilities"
        if len(unknown := ids[(ids < 0) | (ids >= vocabulary)]):
            return f"{where} has the token {unknown[0]}, and the model has {counted(vocabulary, 'token')}"
        if len(wrong := logprobs[~np.isfinite(logprobs) | (logprobs > 1e-3)]):
            return f"{where} has a log-probability that is none: {wrong[0]:.4g}"
        if answer.finish is Finish.STOP and (not len(ids) or int(ids[-1]) not in stops):
            return f"lost stop tokens: {where} is said to be finished, and does not end with a stop token"
        if not stops.isdisjoint(ids[:-1].tolist()):
            return f"stop tokens that are passed over: {where} goes on behind a stop token"
    return None


def _left(answers: Sequence[ScoredAnswer], probe: Probe) -> float:
    """The share of the gap that a probe leaves, over the answers that it says something of."""
    left = before = 0.0
    for answer, foreseen in zip(answers, probe, strict=True):
        if foreseen is None or len(answer.training) != len(answer.engine):
            continue
        known = np.flatnonzero(np.isfinite(foreseen))
        left += float(np.abs(answer.engine[known] - foreseen[known]).sum())
        before += float(np.abs(answer.engine[known] - answer.training[known]).sum())
    return left / before if before else 1.0


def _shifts(answers: Sequence[ScoredAnswer]) -> list[Probe]:
    found: list[Probe] = []
    for by in (1, -1):
        moved = [np.roll(answer.training, by).astype(np.float32) for answer in answers]
        for logps in moved:
            logps[0 if by > 0 else -1 :][:1] = np.nan  # nobody knows what stands there
        found.append(moved)
    return found


def _of_others(answers: Sequence[ScoredAnswer]) -> Probe:
    """For each answer the probabilities of that answer of its group which the engine's are nearest to."""
    found: list[Logps | None] = []
    for answer in answers:
        group = [other.training for other in answers if other.group == answer.group]
        others = [training for training in group if len(training) == len(answer.engine)]
        found.append(min(others, key=lambda logps: float(np.abs(logps - answer.engine).sum()), default=None))
    return found


def _is_rounding(answers: Sequence[ScoredAnswer], probe: Probe) -> bool:
    """Whether the gap is as large as that which fewer bits would make."""
    known = [(a, p) for a, p in zip(answers, probe, strict=True) if p is not None and len(p) == len(a.engine)]
    gap = sum(float(np.abs(answer.engine - answer.training).sum()) for answer, _ in known)
    foreseen = sum(float(np.abs(logps - answer.training).sum()) for answer, logps in known)
    return foreseen > 0 and 1 / _ROUNDED < gap / foreseen < _ROUNDED


def _is_at_the_beginning(answers: Sequence[ScoredAnswer]) -> bool:
    sizes = [np.abs(answer.engine - answer.training) for answer in answers]
    first = np.concatenate([size[:_FIRST] for size in sizes])
    rest = np.concatenate([size[_FIRST:] for size in sizes])
    return len(rest) > 0 and float(first.mean()) > _FIRST_TIMES * float(rest.mean())
