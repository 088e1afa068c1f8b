"""Losses that compare answers: reward models, preference pairs, single answers with a verdict.

S segments, U units (pairs, or rows with a verdict).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from luthier.config.objective import LOSSES
from luthier.objectives import (
    FeedbackBaselines,
    FeedbackScores,
    FeedbackSettings,
    Measure,
    Measures,
    PairBaselines,
    PairSettings,
    RunningMean,
    SequenceLoss,
    SequenceScores,
    feedback_loss_sum,
    kl_baseline,
    kl_measure,
    pair_loss_sum,
    pair_scores,
    reward_loss_sum,
    sequence_scores,
    tail_discount,
)
from luthier.objectives.feedback_losses import feedback_loss_named
from luthier.objectives.measures import measure
from luthier.objectives.pair_losses import pair_loss_named
from luthier.records import Batch
from luthier.train.passes import ModelPass
from luthier.train.references import Reference
from luthier.train.result import ACCURACIES, MARGINS, REWARDS
from luthier.train.step_losses import MicroLoss, Reduce, Stateless


@dataclass(kw_only=True, slots=True, eq=False)
class RewardLosses(Stateless):
    """``rm``: the reward of the chosen answer above that of the rejected one."""

    forward: ModelPass
    center_rewards: float = 0.0
    num_sources: int = 1

    @property
    def measured(self) -> tuple[str, ...]:
        """See `StepLosses`."""
        return (*REWARDS, ACCURACIES, MARGINS)

    def num_units(self, batch: Batch) -> int:
        """Pairs."""
        return len(batch.units)

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        """See `StepLosses`."""
        rewards_S = self.forward.rewards(model, batch)
        found = reward_loss_sum(
            rewards_S,
            pairs_of(batch).to(rewards_S.device),
            margins_P=torch.tensor([unit.verdict for unit in batch.units], device=rewards_S.device),
            weights_P=weights_of(batch, rewards_S.device),
            center_rewards=self.center_rewards,
        )
        return _micro_loss(found, rewards_S.sum() * 0, batch, self.num_sources)


@dataclass(kw_only=True, slots=True, eq=False)
class PairLosses:
    """``dpo`` and its kin: the chosen answer likelier than the rejected one. ``reference`` None: compared with nothing.

    ``ld_alpha``: what targets beyond the shorter answer's length count.
    """

    forward: ModelPass
    name: str
    settings: PairSettings
    reference: Reference | None
    ld_alpha: float = 1.0
    num_sources: int = 1
    _rewards: RunningMean = field(default_factory=RunningMean)
    _baselines: PairBaselines = field(default_factory=PairBaselines)
    _under_way: list[Measures] = field(default_factory=list)  # of the step

    @property
    def measured(self) -> tuple[str, ...]:
        """See `StepLosses`."""
        return (*REWARDS, ACCURACIES, MARGINS, "logps/chosen", "logps/rejected", "nll")

    def num_units(self, batch: Batch) -> int:
        """Pairs."""
        return len(batch.units)

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        """Settle what the pairs of this step are compared with."""
        row = pair_loss_named(self.name)
        self._baselines = PairBaselines(delta=self._rewards.mean) if row.needs_delta else PairBaselines()
        if row.needs_kl:
            chosen, rejected = self._mean_ratios(model, batches, reduce)
            self._baselines = PairBaselines(chosen_kl=max(chosen, 0.0), rejected_kl=max(rejected, 0.0))

    def end_step(self, reduce: Reduce) -> None:
        """Remember the step's rewards, where the loss compares with those of all steps."""
        if pair_loss_named(self.name).needs_delta:
            self._rewards = _after(self._rewards, self._under_way, self.forward.device, reduce)
            self._under_way = []

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        """See `StepLosses`."""
        policy, ref_logps_S, anchor = self._scores(model, batch)
        scores = pair_scores(
            policy,
            pairs_of(batch).to(policy.logps_S.device),
            ref_logps_S=ref_logps_S,
            weights_P=weights_of(batch, policy.logps_S.device),
        )
        found = pair_loss_sum(scores, self.name, self.settings, self._baselines)
        if pair_loss_named(self.name).needs_delta and torch.is_grad_enabled():
            self._under_way.append(found.measures)
        return _micro_loss(found, anchor, batch, self.num_sources)

    def state(self) -> dict[str, Any]:
        """The running mean of rewards, where the loss has one."""
        return {"rewards": self._rewards.to_state()} if pair_loss_named(self.name).needs_delta else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `StepLosses`."""
        if "rewards" in state:
            self._rewards = RunningMean.from_state(state["rewards"])

    def _scores(self, model: nn.Module, batch: Batch) -> tuple[SequenceScores, torch.Tensor | None, torch.Tensor]:
        scored, targets = self.forward.token_scores(model, batch)
        counts_K = None
        if self.ld_alpha != 1 and batch.units:
            pairs_P2 = pairs_of(batch).to(targets.segments_K.device)
            counts_K = tail_discount(targets.segments_K, batch.num_segments, pairs_P2, ld_alpha=self.ld_alpha)
        policy = sequence_scores(scored.scores.logps_K, targets.segments_K, batch.num_segments, counts_K=counts_K)
        wants = self.reference is not None and batch.units
        ref_logps_S = self.reference.logps(batch, counts_K) if self.reference is not None and wants else None
        return policy, ref_logps_S, scored.anchor

    def _mean_ratios(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> tuple[float, float]:
        totals = torch.zeros(3, dtype=torch.float64, device=self.forward.device)
        for batch in batches:
            with torch.no_grad():
                policy, ref_logps_S, _ = self._scores(model, batch)
            pairs_P2 = pairs_of(batch).to(totals.device)
            ratios_S = policy.logps_S if ref_logps_S is None else policy.logps_S - ref_logps_S
            totals[:2] += ratios_S.double()[pairs_P2].sum(dim=0)
            totals[2] += len(pairs_P2)
        chosen, rejected, count = reduce(totals).tolist()
        return chosen / max(count, 1), rejected / max(count, 1)


@dataclass(kw_only=True, slots=True, eq=False)
class FeedbackLosses:
    """``kto`` and its kin: good answers likelier, bad ones less likely than the reference has them."""

    forward: ModelPass
    name: str
    settings: FeedbackSettings
    reference: Reference
    num_sources: int = 1
    _rewards: RunningMean = field(default_factory=RunningMean)
    _baselines: FeedbackBaselines = field(default_factory=FeedbackBaselines)
    _under_way: list[Measures] = field(default_factory=list)  # of the step
    _compared: list[tuple[Batch, torch.Tensor]] = field(default_factory=list)  # the reference's, of the step's batches

    @property
    def measured(self) -> tuple[str, ...]:
        """See `StepLosses`."""
        return (*REWARDS, ACCURACIES, "logps/chosen", "logps/rejected", "nll", "kl")

    def num_units(self, batch: Batch) -> int:
        """Rows with a verdict."""
        return len(batch.units)

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        """Estimate KL(policy, reference) over the whole step, or take the mean reward of the steps before."""
        if feedback_loss_named(self.name).needs_delta:
            self._baselines = FeedbackBaselines(delta=self._rewards.mean)
        self._compared = []
        if LOSSES[self.name].estimates_kl:
            totals = torch.zeros(2, dtype=torch.float64, device=self.forward.device)
            for batch in batches:
                totals += self._kl(model, batch)
            total, count = reduce(totals)
            self._baselines = FeedbackBaselines(kl=kl_baseline(Measure(total=total, count=count)))

    def end_step(self, reduce: Reduce) -> None:
        """Remember the step's rewards, where the loss compares with those of all steps."""
        self._compared = []
        if feedback_loss_named(self.name).needs_delta:
            self._rewards = _after(self._rewards, self._under_way, self.forward.device, reduce)
            self._under_way = []

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        """See `StepLosses`."""
        policy, ref_logps_S, anchor = self._scores(model, batch)
        own_U = torch.tensor([unit.segments[0] for unit in batch.units], dtype=torch.int64, device=anchor.device)
        desirable_U = torch.tensor([unit.verdict > 0 for unit in batch.units], dtype=torch.bool, device=anchor.device)
        scores = FeedbackScores(
            logps_R=policy.logps_S[own_U],
            ref_logps_R=ref_logps_S[own_U],
            desirable_R=desirable_U,
            lengths_R=policy.lengths_S[own_U],
            weights_R=weights_of(batch, anchor.device),
        )
        found = feedback_loss_sum(scores, self.name, self.settings, self._baselines)
        if feedback_loss_named(self.name).needs_delta and torch.is_grad_enabled():
            self._under_way.append(found.measures)
        kl = measure(scores.logps_R.new_full((len(batch.units),), self._baselines.kl))
        # good rows above and bad rows below what they are compared with
        ratios_U = scores.logps_R.detach() - scores.ref_logps_R - self._baselines.kl
        accuracy = measure((ratios_U > 0) == desirable_U)
        found = replace(found, measures={**found.measures, "kl": kl, ACCURACIES: accuracy})
        return _micro_loss(found, anchor, batch, self.num_sources)

    def state(self) -> dict[str, Any]:
        """The running mean of rewards, where the loss has one."""
        return {"rewards": self._rewards.to_state()} if feedback_loss_named(self.name).needs_delta else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `StepLosses`."""
        if "rewards" in state:
            self._rewards = RunningMean.from_state(state["rewards"])

    def _scores(self, model: nn.Module, batch: Batch) -> tuple[SequenceScores, torch.Tensor, torch.Tensor]:
        scored, targets = self.forward.token_scores(model, batch)
        policy = sequence_scores(scored.scores.logps_K, targets.segments_K, batch.num_segments)
        return policy, self._reference(batch), scored.anchor

    def _reference(self, batch: Batch) -> torch.Tensor:
        if not batch.units:
            return torch.zeros(batch.num_segments, device=self.forward.device)
        known = next((logps_S for one, logps_S in self._compared if one is batch), None)
        return self.reference.logps(batch) if known is None else known

    def _kl(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """float64[2]: sum and count over the completions that belong to other prompts."""
        others = [unit.segments[1] for unit in batch.units if len(unit.segments) > 1]
        if not others:
            return torch.zeros(2, dtype=torch.float64, device=self.forward.device)
        with torch.no_grad():
            policy, ref_logps_S, _ = self._scores(model, batch)
        if model.training:  # its loss comes next, and needs the same of the reference
            self._compared.append((batch, ref_logps_S))
        found = kl_measure(policy.logps_S[others], ref_logps_S[others])
        return torch.stack([found.total, found.count])


def pairs_of(batch: Batch) -> torch.Tensor:
    """int64[U, 2]: the segments of each unit, the chosen or own one first."""
    return torch.tensor([unit.segments for unit in batch.units], dtype=torch.int64).reshape(-1, 2)


def weights_of(batch: Batch, device: torch.device) -> torch.Tensor | None:
    """float32[U]: what each unit counts: the mean weight of the targets of its first segment. None: 1.0 everywhere."""
    if batch.targets.weights_K is None:
        return None
    segments_K, weights_K = batch.targets.segments_K, batch.targets.weights_K
    sums_S = torch.zeros(batch.num_segments).index_add(0, segments_K, weights_K)
    counts_S = torch.bincount(segments_K, minlength=batch.num_segments).clamp(min=1)
    first_U = torch.tensor([unit.segments[0] for unit in batch.units], dtype=torch.int64)
    return (sums_S / counts_S)[first_U].to(device)


def _micro_loss(found: SequenceLoss, anchor: torch.Tensor, batch: Batch, num_sources: int) -> MicroLoss:
    by_source = None
    if num_sources > 1:
        sources_U = torch.tensor([batch.sources[unit.segments[0]] for unit in batch.units], dtype=torch.int64)
        counted_2U = torch.stack([found.losses_U, torch.ones_like(found.losses_U)]).double()
        by_source = torch.zeros(2, num_sources, dtype=torch.float64, device=anchor.device)
        by_source.index_add_(1, sources_U.to(anchor.device), counted_2U)
    return MicroLoss(
        loss_sum=found.loss_sum + anchor, num_units=found.num_units, measures=found.measures, by_source=by_source
    )


def _after(mean: RunningMean, step: Sequence[Measures], device: torch.device, reduce: Reduce) -> RunningMean:
    """With the rewards of a step on all ranks."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for measures in step:
        for name in REWARDS:
            totals += torch.stack([measures[name].total, measures[name].count])
    total, count = reduce(totals).tolist()
    return mean.after(total, count)
