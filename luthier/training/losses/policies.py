"""``rl``: answers that the model has drawn become likelier the better they are judged. K targets, S answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from luthier.config.loss_rows import Loss
from luthier.config.objective import LOSSES
from luthier.config.rollout import RolloutConfig
from luthier.models import evaluating
from luthier.models.passes import ModelPass, ValueHead, add_value_head
from luthier.models.quantized import rounds_inputs
from luthier.objectives import Measures, computed_losses, measure
from luthier.objectives.policy_losses import (
    Advantage,
    Divisor,
    PolicyScores,
    correction_weights,
    divided,
    generalised_advantages,
    k3,
    kl_losses,
    led_weight,
    outside_of_clip,
    units,
    whitened,
    with_final,
    without_kl,
)
from luthier.objectives.token_scores import TokenScores
from luthier.records import Batch, PolicyTargets
from luthier.training import losses as step_losses
from luthier.training.losses.reference_choice import reference_model
from luthier.training.losses.references import ReferenceModel
from luthier.training.losses.tokens import TokenLosses, held_out_losses
from luthier.training.report import ENTROPY
from luthier.training.rollouts.early_warnings import NUMBERS, GapWatch

CLIPPED = "clipped"
KL_K1, KL_K3 = "kl_k1", "kl_k3"  # estimates of the KL divergence from the reference, by the names of their paper
CORRECTION = "correction_weight"
KL_WEIGHT, VALUE_LOSS = "kl_weight", "value_loss"
EXPLAINED = "explained_variance"  # of what came of answers, by what was expected of them
FLOOR, FLOOR_OF_16_BITS = 1e-4, 2e-2


def policy_losses(
    parts: step_losses.ObjectiveParts, forward: ModelPass, tell: step_losses.Tell
) -> step_losses.BothLosses:
    objective, exact = parts.config.objective, parts.autocast is None
    policy = replace(forward, temperature=parts.config.rollout.temperature)
    exact = exact and next(parts.model.parameters()).dtype == torch.float32 and not rounds_inputs(parts.loaded.model)
    floor = FLOOR if exact else FLOOR_OF_16_BITS
    return (
        PolicyLosses(
            forward=policy,
            row=LOSSES.named(objective.loss_name),
            numbers=objective.numbers,
            reference=reference_model(parts, policy, tell) if objective.needs_reference else None,
            value_head=add_value_head(parts.model, policy) if LOSSES.named(objective.loss_name).expects else None,
            rollout=parts.config.rollout,
            gaps=GapWatch(config=parts.config.rollout, floor=floor, forward=forward, tell=tell),
        ),
        held_out_losses(parts, forward),
    )


def teacher_losses(
    parts: step_losses.ObjectiveParts, forward: ModelPass, tell: step_losses.Tell
) -> step_losses.BothLosses:
    """Answers are learned from a teacher: by its probability of each token (``opd``), or by its whole distribution."""
    objective = parts.config.objective
    if LOSSES.named(objective.loss_name).advantage == Advantage.TEACHER:
        return policy_losses(parts, forward, tell)
    policy = replace(forward, temperature=parts.config.rollout.temperature)
    trained = TokenLosses(
        forward=policy,
        settings=step_losses.token_settings(objective),
        reference=reference_model(parts, policy, tell),
        num_sources=parts.num_sources[0],
    )
    return trained, held_out_losses(parts, forward)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyBaselines:
    """What a micro-batch's loss needs of its step: advantages_K; reference_K, the reference's log-probabilities; and
    returns_K, what came of the answers, for a value head."""

    advantages_K: torch.Tensor
    reference_K: torch.Tensor | None
    returns_K: torch.Tensor | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class PolicyLosses(step_losses.Stateless):
    """The losses of one row of the table; ``gaps`` watches that the answers are those that were drawn."""

    forward: ModelPass
    row: Loss
    numbers: dict[str, float]
    reference: ReferenceModel | None
    value_head: ValueHead | None
    rollout: RolloutConfig
    gaps: GapWatch
    _prepared: dict[Batch, PolicyBaselines] = field(default_factory=dict)
    _kl_weight: float | None = None  # where it is led to a target

    @property
    def measured(self) -> tuple[str, ...]:
        of_kl = () if self.reference is None else (KL_K1, KL_K3)
        of_values = () if self.value_head is None else (KL_WEIGHT, VALUE_LOSS, EXPLAINED)
        corrected = () if not self.rollout.correction.is_on else (CORRECTION,)
        return (*NUMBERS, CLIPPED, ENTROPY, *corrected, *of_kl, *of_values)

    @property
    def divisor(self) -> Divisor:
        return Divisor(self.row.divisor)

    def num_units(self, batch: Batch) -> int:
        """Targets or answers, as the loss has it."""
        answers = 0 if batch.policy is None else len(batch.policy.advantages_S)
        return units(self.divisor, num_targets=batch.num_targets, num_answers=answers)

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: step_losses.Reduce) -> None:
        """Ask the reference about all answers of the step, and settle their advantages."""
        self.gaps.begin_step(model, reduce)
        drawn = {batch: batch.policy for batch in batches if batch.policy is not None}
        found = [self._prepare(batch, policy) for batch, policy in drawn.items()]
        if self.row.whitened:
            advantages = whitened([one.advantages_K for one in found], reduce, self.forward.device)
            found = [replace(one, advantages_K=white) for one, white in zip(found, advantages, strict=True)]
        self._prepared = dict(zip(drawn, found, strict=True))

    def _prepare(self, batch: Batch, policy: PolicyTargets) -> PolicyBaselines:
        device = self.forward.device
        answers_K, advantages_S = policy.answers_K.to(device), policy.advantages_S.to(device)
        reference_K = None if self.reference is None else self.reference.token_logps(batch)
        if self.row.advantage == Advantage.TEACHER:
            assert reference_K is not None, f"{self.row.name} learns from a teacher"
            return PolicyBaselines(advantages_K=reference_K - policy.behaviour_K.to(device), reference_K=reference_K)
        if self.row.kl_in != "reward":
            return PolicyBaselines(advantages_K=advantages_S[answers_K], reference_K=reference_K)
        kl_K = torch.zeros_like(policy.behaviour_K, device=device)
        if reference_K is not None:
            kl_K = self.kl_weight * (_behaviour(policy).to(device) - reference_K)
        order_K = policy.order_K.to(device)
        back_K = order_K.argsort()
        if policy.expected_K is None:
            kind, groups_S = Advantage(self.row.advantage), policy.groups_S.to(device)
            drawn_K = without_kl(advantages_S, kl_K[order_K], kind, answers_K[order_K], groups_S)
            return PolicyBaselines(advantages_K=drawn_K[back_K], reference_K=reference_K)
        expected_K = policy.expected_K.to(device)
        drawn_K = generalised_advantages(
            with_final(-kl_K[order_K], advantages_S, answers_K[order_K]),
            expected_K[order_K],
            answers_K[order_K],
            discount=self.numbers["discount"],
            decay=self.numbers["gae_lambda"],
        )
        advantages_K = drawn_K[back_K]
        return PolicyBaselines(advantages_K=advantages_K, reference_K=reference_K, returns_K=advantages_K + expected_K)

    @property
    def kl_weight(self) -> float:
        return self.numbers["kl_weight"] if self._kl_weight is None else self._kl_weight

    def as_drawn(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """What is to be known of answers under the weights that drew them, [K], by name."""
        if self.value_head is None and not self.rollout.correction.is_on:
            return {}
        with evaluating(model), torch.no_grad():
            scores, values_K, _ = self._scored(model, batch)
        expected = {} if values_K is None else {"expected": values_K}
        return {**expected, **({} if not self.rollout.correction.is_on else {"trained": scores.logps_K})}

    def loss(self, model: nn.Module, batch: Batch) -> step_losses.MicroLoss:
        found, values_K, anchor = self._scored(model, batch)
        policy = batch.policy
        if policy is None:  # nothing was drawn on this rank
            return step_losses.MicroLoss(loss_sum=anchor + found.logps_K.sum(), num_units=0, measures=self._nothing())
        device, prepared = found.logps_K.device, self._prepared[batch]
        assert len(policy.behaviour_K) == len(found.logps_K), "what was drawn and what is scored are the same tokens"
        scores = PolicyScores(
            logps_K=found.logps_K,
            behaviour_K=_behaviour(policy).to(device),
            advantages_K=prepared.advantages_K,
            segments_K=policy.answers_K.to(device),
            num_answers=len(policy.advantages_S),
            values_K=values_K,
            expected_K=None if policy.expected_K is None else policy.expected_K.to(device),
            returns_K=prepared.returns_K,
        )
        losses_K = computed_losses(self.row, found.logps_K, "target", scores, self.numbers)
        if prepared.reference_K is not None and self.row.kl_in == "loss":
            losses_K = losses_K + self.kl_weight * kl_losses(scores, prepared.reference_K)
        sampler_K = policy.behaviour_K.to(device)
        weights_K = torch.ones_like(sampler_K)
        if self.rollout.correction.is_on:
            weights_K = correction_weights(scores, sampler_K, self.rollout.correction)
            losses_K = losses_K * weights_K
        parts_K = divided(losses_K, scores, self.divisor, self.rollout.max_new_tokens)
        assert found.entropy_K is not None
        if policy.age == 0:  # later the weights are others
            self.gaps.add(found.logps_K, sampler_K, scores.segments_K, len(scores.advantages_S))
        return step_losses.MicroLoss(
            loss_sum=parts_K.sum() + anchor,
            num_units=self.num_units(batch),
            measures={
                **self._nothing(),  # the gap's are those of the whole step
                CLIPPED: measure(outside_of_clip(scores, self.numbers, self.row.ratio_of)),
                ENTROPY: measure(found.entropy_K),
                **({} if not self.rollout.correction.is_on else {CORRECTION: measure(weights_K)}),
                **self._distance(found.logps_K.detach(), prepared.reference_K),
                **self._misjudged(scores),
            },
        )

    def _scored(self, model: nn.Module, batch: Batch) -> tuple[TokenScores, torch.Tensor | None, torch.Tensor]:
        """Of the targets; what the value head expects, if there is one; and the anchor, which reaches its weights."""
        if self.value_head is None:
            scored, _ = self.forward.token_scores(model, batch, entropy=True)
            return scored.scores, None, scored.anchor
        valued, _ = self.forward.values(model, batch, self.value_head)
        scores, values_K = valued.scores
        return scores, values_K, valued.anchor + 0 * values_K.sum()

    def _misjudged(self, scores: PolicyScores) -> Measures:
        if scores.values_K is None or scores.returns_K is None:
            return {}
        return {VALUE_LOSS: measure((scores.values_K.detach() - scores.returns_K).square() / 2)}

    def _distance(self, logps_K: torch.Tensor, reference_K: torch.Tensor | None) -> Measures:
        if reference_K is None:
            return {}
        return {KL_K1: measure(logps_K - reference_K), KL_K3: measure(k3(logps_K, reference_K))}

    def end_step(self, reduce: step_losses.Reduce) -> Measures:
        """Compare the step's gap with its bound. Raises `TrainingError` where it is larger."""
        measures = self.gaps.end_step(reduce)
        if self.value_head is None:
            return measures
        told, sums = {KL_WEIGHT: self.kl_weight}, reduce(self._value_sums())
        answers, kl, count, total, squares, errors, squared_errors = sums.tolist()
        if self.reference is not None:
            self._kl_weight = led_weight(self.kl_weight, kl / max(answers, 1), answers, self.numbers)
        if (spread := squares - total**2 / max(count, 1)) > 0:
            told[EXPLAINED] = 1 - (squared_errors - errors**2 / count) / spread
        return {
            **measures,
            **{name: measure(torch.tensor([value], device=sums.device)) for name, value in told.items()},
        }

    def _value_sums(self) -> torch.Tensor:
        """Of the step's answers on this rank: their number and KL; of their targets the number, and the sums of what
        came of them, of what had not been expected, and of the squares of both."""
        sums = torch.zeros(7, dtype=torch.float64, device=self.forward.device)
        for batch, found in self._prepared.items():
            assert batch.policy is not None and batch.policy.expected_K is not None and found.returns_K is not None
            returns_K = found.returns_K.double()
            errors_K = returns_K - batch.policy.expected_K.to(returns_K.device).double()
            kl = returns_K.new_zeros(())
            if found.reference_K is not None:
                kl = (_behaviour(batch.policy).to(returns_K.device) - found.reference_K).double().sum()
            counts = [returns_K.new_tensor(len(batch.policy.advantages_S)), kl, returns_K.new_tensor(len(returns_K))]
            sums += torch.stack(
                [*counts, *(one for of in (returns_K, errors_K) for one in (of.sum(), (of * of).sum()))]
            )
        return sums

    def state(self) -> dict[str, Any]:
        """What gap was found first; of a value head its weights and that of KL."""
        value = {} if self.value_head is None else {"value_head": self.value_head.numbers()}
        weight = {} if self._kl_weight is None else {"kl_weight": self._kl_weight}
        return {**self.gaps.state(), **value, **weight}

    def load_state(self, state: Any) -> None:
        self.gaps.load_state(state)
        self._kl_weight = state.get("kl_weight")
        if self.value_head is not None:
            self.value_head.take(state["value_head"])

    def _nothing(self) -> Measures:
        return {name: measure(torch.zeros(0, device=self.forward.device)) for name in self.measured}


def _behaviour(policy: PolicyTargets) -> torch.Tensor:
    """What the ratio is measured against: where the sampler's numbers are corrected, those of training."""
    return policy.behaviour_K if policy.trained_K is None else policy.trained_K
