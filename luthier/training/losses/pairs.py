"""``dpo`` and related losses make the chosen answer of a pair likelier than the rejected one.

Some of these losses compare a pair with the whole step. They look at its micro-batches once before, without gradients;
the reference is asked then, and not again. S segments, P pairs of a micro-batch, M pairs of the step on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from accelerate import PartialState
from torch import nn

from luthier.config.objective import LOSSES
from luthier.models.passes import ModelPass
from luthier.objectives import AnyHead, Measure
from luthier.objectives.loss_sums import pair_loss_sum, reward_loss_sum
from luthier.objectives.pair_formulas import (
    Counterparts,
    PairBaselines,
    PairScores,
    PairSettings,
    SequenceScores,
    SortedSides,
    counterparts,
    pair_scores,
    sequence_scores,
    tail_discount,
)
from luthier.objectives.token_scores import TokenScores, log_square_sums, token_scores
from luthier.records import Batch, Targets
from luthier.training import losses as step_losses
from luthier.training.losses.reference_choice import choose_reference, ld_alpha
from luthier.training.losses.references import Reference
from luthier.training.losses.tokens import held_out_losses
from luthier.training.report import ACCURACIES, ENTROPY, MARGINS, REWARDS


def pair_losses(
    parts: step_losses.ObjectiveParts, forward: ModelPass, tell: step_losses.Tell
) -> step_losses.BothLosses:
    """The losses of a run, the same on held-out rows."""
    objective = parts.config.objective
    losses = PairLosses(
        forward=forward,
        name=objective.loss_name,
        settings=step_losses.answer_settings(objective, PairSettings),
        reference=choose_reference(parts, forward, tell) if objective.needs_reference else None,
        ld_alpha=ld_alpha(parts.config),
        num_sources=max(parts.num_sources),
    )
    return losses, losses


def own_pair_losses(
    parts: step_losses.ObjectiveParts, forward: ModelPass, tell: step_losses.Tell
) -> step_losses.BothLosses:
    """The best and the worst of the model's own answers are compared as those of a row. Held-out rows hold one answer
    each."""
    trained, _ = pair_losses(parts, forward, tell)
    return trained, held_out_losses(parts, forward)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Known:
    """Of a micro-batch after the look ahead: what the reference gives it, and what its pairs are sorted with."""

    ref_logps_S: torch.Tensor | None
    counterparts: Counterparts | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Answers:
    """What the policy gives the answers of a micro-batch.

    scores    each target times what it counts (``counts_K``; None: all alike); ``whole``: all alike
    aligned   how much likelier than what the policy writes by itself (`log_square_sums`); None where nobody asked
    entropy   of its choices at targets, if asked for
    """

    scores: SequenceScores
    whole: SequenceScores
    aligned: SequenceScores | None
    counts_K: torch.Tensor | None
    anchor: torch.Tensor
    entropy: Measure


@dataclass(kw_only=True, slots=True, eq=False)
class PairLosses(step_losses.AnswerLosses):
    """``reference`` None: compared with nothing. ``ld_alpha``: what targets beyond the shorter answer count."""

    settings: PairSettings
    reference: Reference | None
    ld_alpha: float = 1.0
    _baselines: PairBaselines = field(default_factory=PairBaselines)
    _known: deque[_Known] = field(default_factory=deque)  # of the step's micro-batches that are still to come

    @property
    def measured(self) -> tuple[str, ...]:
        return (*REWARDS, ACCURACIES, MARGINS, "logps/chosen", "logps/rejected", "nll", ENTROPY)

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: step_losses.Reduce) -> None:
        """Settle what the pairs of this step are compared with."""
        row = LOSSES.named(self.name)
        self._known = deque()
        self._under_way = []  # of a further pass over the step before, whose rewards count once
        self._baselines = PairBaselines(delta=self._rewards.mean) if row.needs_delta else PairBaselines()
        if row.needs_kl:
            chosen, rejected = _mean_ratios(self._looked_ahead(model, batches), self.forward.device, reduce)
            self._baselines = PairBaselines(chosen_kl=max(chosen, 0.0), rejected_kl=max(rejected, 0.0))
        elif row.sides is not None and not _is_whole_step(batches):
            found = _of_sorted_step(self._looked_ahead(model, batches), row.sides, reduce)
            self._known = deque(
                replace(known, counterparts=those) for known, those in zip(self._known, found, strict=True)
            )

    def loss(self, model: nn.Module, batch: Batch) -> step_losses.MicroLoss:
        """See `StepLosses`; after a look ahead micro-batches come in the order of `begin_step`."""
        known = self._known.popleft() if self._known else None
        policy = self._policy(model, batch, entropy=not torch.is_grad_enabled())
        ref_logps_S = self._asked(batch, policy.counts_K) if known is None else known.ref_logps_S
        same = ref_logps_S is None or len(ref_logps_S) == batch.num_segments
        assert same, "micro-batches in another order than when the step began"
        scores = self._pair_scores(batch, policy, ref_logps_S)
        baselines = replace(self._baselines, counterparts=None if known is None else known.counterparts)
        found = pair_loss_sum(scores, self.name, self.settings, baselines)
        self.note_rewards(found)
        found = replace(found, measures={**found.measures, ENTROPY: policy.entropy})
        return step_losses.micro_loss(found, policy.anchor, batch, self.num_sources)

    def _looked_ahead(self, model: nn.Module, batches: Iterable[Batch]) -> list[PairScores]:
        """The scores of each micro-batch, without gradients; what the reference gives is kept for `loss`."""
        found = []
        for batch in batches:
            with torch.no_grad():
                policy = self._policy(model, batch, entropy=False)
            ref_logps_S = self._asked(batch, policy.counts_K)
            self._known.append(_Known(ref_logps_S=ref_logps_S))
            found.append(self._pair_scores(batch, policy, ref_logps_S))
        return found

    def _policy(self, model: nn.Module, batch: Batch, *, entropy: bool) -> _Answers:
        asks = LOSSES.named(self.name).needs_alignment

        def score(hidden_KD: torch.Tensor, head: AnyHead, targets: Targets) -> tuple[TokenScores, torch.Tensor | None]:
            squares_K = log_square_sums(hidden_KD, head) if asks else None
            return token_scores(hidden_KD, head, targets.ids_K, entropy=entropy), squares_K

        scored, targets = self.forward.scored(model, batch, score)
        found, squares_K = scored.scores
        logps_K, segments_K, counts_K = found.logps_K, targets.segments_K, None
        whole = discounted = sequence_scores(logps_K, segments_K, batch.num_segments)
        aligned = None
        if squares_K is not None:
            aligned = sequence_scores(logps_K.detach() - squares_K, segments_K, batch.num_segments)
        if self.ld_alpha != 1 and batch.units:
            pairs_P2 = step_losses.pairs_of(batch).to(segments_K.device)
            counts_K = tail_discount(segments_K, batch.num_segments, pairs_P2, ld_alpha=self.ld_alpha)
            discounted = sequence_scores(logps_K, segments_K, batch.num_segments, counts_K=counts_K)
        return _Answers(
            scores=discounted,
            whole=whole,
            aligned=aligned,
            counts_K=counts_K,
            anchor=scored.anchor,
            entropy=step_losses.entropy_of(found),
        )

    def _asked(self, batch: Batch, counts_K: torch.Tensor | None) -> torch.Tensor | None:
        if self.reference is None or not (batch.units or self.reference.on_all_ranks):
            return None
        return self.reference.logps(batch, counts_K)

    def _pair_scores(self, batch: Batch, policy: _Answers, ref_logps_S: torch.Tensor | None) -> PairScores:
        device = policy.scores.logps_S.device
        return pair_scores(
            policy.scores,
            step_losses.pairs_of(batch).to(device),
            ref_logps_S=ref_logps_S,
            weights_P=step_losses.weights_of(batch, device),
            whole=policy.whole if policy.counts_K is not None else None,
            aligned=policy.aligned,
        )


def _is_whole_step(batches: Iterable[Batch]) -> bool:
    """Whether a step is one micro-batch on one rank, which can be sorted when its loss is asked for."""
    return isinstance(batches, Sequence) and len(batches) == 1 and PartialState().num_processes == 1


def _mean_ratios(step: Sequence[PairScores], device: torch.device, reduce: step_losses.Reduce) -> tuple[float, float]:
    """Of the chosen and of the rejected answers of a step on all ranks."""
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for scores in step:
        ratios_P2 = torch.stack([scores.chosen_ratios_P, scores.rejected_ratios_P], dim=1).double()
        totals[:2] += ratios_P2.sum(dim=0)
        totals[2] += len(ratios_P2)
    chosen, rejected, count = reduce(totals).tolist()
    return chosen / max(count, 1), rejected / max(count, 1)


def _of_sorted_step(step: Sequence[PairScores], sides: SortedSides, reduce: step_losses.Reduce) -> list[Counterparts]:
    """For each micro-batch of this rank what its pairs are compared with among those of all micro-batches and ranks."""
    values_P2 = torch.cat([torch.stack(sides(scores), dim=1) for scores in step])
    all_M2, first = _of_all_ranks(values_P2, reduce)
    found = counterparts(*all_M2.unbind(dim=1))
    of_step = []
    for scores in step:
        of_step.append(found[first : first + len(scores)])
        first += len(scores)
    return of_step


def _of_all_ranks(values_P2: torch.Tensor, reduce: step_losses.Reduce) -> tuple[torch.Tensor, int]:
    """The rows of all ranks, [M, 2], rank after rank, and where those of this one begin."""
    ranks = PartialState()
    sizes_W = torch.zeros(ranks.num_processes, dtype=torch.int64, device=values_P2.device)
    sizes_W[ranks.process_index] = len(values_P2)
    sizes = reduce(sizes_W).tolist()
    first = sum(sizes[: ranks.process_index])
    all_M2 = values_P2.new_zeros(sum(sizes), 2)
    all_M2[first : first + len(values_P2)] = values_P2
    return reduce(all_M2), first


# --------------------------------------------------------------- ``rm``: a reward model from pairs. S segments, P pairs


def reward_losses(
    parts: step_losses.ObjectiveParts, forward: ModelPass, tell: step_losses.Tell
) -> step_losses.BothLosses:
    """The losses of a run, the same on held-out rows."""
    objective, num_sources = parts.config.objective, max(parts.num_sources)
    losses = RewardLosses(forward=forward, name=objective.loss_name, numbers=objective.numbers, num_sources=num_sources)
    return losses, losses


@dataclass(kw_only=True, slots=True, eq=False)
class RewardLosses(step_losses.Stateless):
    """``rm``: the reward of the chosen answer above that of the rejected one."""

    forward: ModelPass
    name: str
    numbers: Mapping[str, float]
    num_sources: int

    @property
    def measured(self) -> tuple[str, ...]:
        return (*REWARDS, ACCURACIES, MARGINS)

    def num_units(self, batch: Batch) -> int:
        """Pairs."""
        return len(batch.units)

    def loss(self, model: nn.Module, batch: Batch) -> step_losses.MicroLoss:
        rewards_S = self.forward.rewards(model, batch)
        found = reward_loss_sum(
            rewards_S,
            step_losses.pairs_of(batch).to(rewards_S.device),
            margins_P=torch.tensor([unit.verdict for unit in batch.units], device=rewards_S.device),
            weights_P=step_losses.weights_of(batch, rewards_S.device),
            name=self.name,
            numbers=self.numbers,
        )
        return step_losses.micro_loss(found, rewards_S.sum() * 0, batch, self.num_sources)
