"""Why an engine and training give the same answer other probabilities: what each cause would look like, compared.

A cause that says what the engine's numbers would have been (a *probe*) is believed where it explains most of the gap:
``engine -1.2 -0.4 -3.0``, ``training -0.8 -0.3 -2.1``, ``training at temperature 0.7 -1.2 -0.4 -3.0`` is a forgotten
temperature. What is left is told by where the gaps are. N tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from luthier.engines.engine import Completion, Finish
from luthier.writing import counted

Logps = NDArray[np.float32]


class Cause(StrEnum):
    """What makes the gap, in words, with what to look at."""

    TRAINING_PASS = (
        "training's own pass over packed rows differs from the model alone: try train.packing: none, and "
        "train.torch_compile: false"
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
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            return f"{where} has the token {int(ids.max())}, and the model has {counted(vocabulary, 'token')}"
        if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
            return f"{where} has a log-probability that is none: {float(logprobs[int(np.nanargmax(logprobs))]):.4g}"
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
