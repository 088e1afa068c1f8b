"""``rl``: answers that the model has drawn become likelier the better they are judged. K targets, S answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from luthier.config.objective import LOSSES
from luthier.config.rollout import GapAction, RolloutConfig
from luthier.errors import TrainingError
from luthier.models.passes import ModelPass
from luthier.objectives import Measure, Measures, TokenSettings
from luthier.objectives.measures import measure
from luthier.objectives.policy_losses import Divisor, PolicyScores, divided, outside_of_clip, units
from luthier.records import Batch
from luthier.training.losses.parts import ObjectiveParts
from luthier.training.losses.step_losses import BothLosses, MicroLoss, Reduce, Stateless, Tell
from luthier.training.losses.tokens import TokenLosses
from luthier.training.report.result import ENTROPY

REWARD, FINISHED, LENGTH, GAP, CLIPPED = "reward", "finished", "answer_tokens", "gap", "clipped"
FLOOR, FLOOR_OF_16_BITS, TIMES_THE_FIRST = 1e-4, 2e-2, 4.0


def policy_losses(parts: ObjectiveParts, forward: ModelPass, tell: Tell) -> BothLosses:
    """Held-out rows are measured by plain cross-entropy of the answers that they hold."""
    objective, exact = parts.config.objective, parts.autocast is None
    floor = FLOOR if exact and next(parts.model.parameters()).dtype == torch.float32 else FLOOR_OF_16_BITS
    return (
        PolicyLosses(
            forward=forward,
            name=objective.loss_name,
            numbers=objective.numbers,
            rollout=parts.config.rollout,
            floor=floor,
            tell=tell,
        ),
        TokenLosses(forward=forward, settings=TokenSettings(), num_sources=parts.num_sources[1]),
    )


@dataclass(kw_only=True, slots=True, eq=False)
class PolicyLosses(Stateless):
    """``floor``: a gap that rounding alone may make. What the first step finds is remembered: larger gaps are told."""

    forward: ModelPass
    name: str
    numbers: dict[str, float]
    rollout: RolloutConfig
    floor: float
    tell: Tell
    _first_gap: float | None = None
    _gaps: list[Measure] = field(default_factory=list)  # of the step

    @property
    def measured(self) -> tuple[str, ...]:
        """See `StepLosses`."""
        return (REWARD, *self._each_reward, FINISHED, LENGTH, GAP, CLIPPED, ENTROPY)

    @property
    def _each_reward(self) -> list[str]:
        """The measures of single rewards; where there is one, it is `REWARD` but for its weight."""
        return [f"{REWARD}/{reward.label}" for reward in self.rollout.rewards]

    @property
    def divisor(self) -> Divisor:
        """What a step's sum is divided by."""
        return Divisor(LOSSES.named(self.name).divisor)

    def num_units(self, batch: Batch) -> int:
        """Targets or answers, as the loss has it."""
        answers = 0 if batch.policy is None else len(batch.policy.rewards_S)
        return units(self.divisor, num_targets=batch.num_targets, num_answers=answers)

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        """See `StepLosses`."""
        self._gaps = []

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        """See `StepLosses`."""
        scored, _ = self.forward.token_scores(model, batch, entropy=True)
        found, policy = scored.scores, batch.policy
        if policy is None:  # nothing was drawn on this rank
            return MicroLoss(loss_sum=scored.anchor + found.logps_K.sum(), num_units=0, measures=self._nothing())
        device = found.logps_K.device
        assert len(policy.behaviour_K) == len(found.logps_K), "what was drawn and what is scored are the same tokens"
        scores = PolicyScores(
            logps_K=found.logps_K,
            behaviour_K=policy.behaviour_K.to(device),
            advantages_S=policy.advantages_S.to(device),
            segments_K=policy.answers_K.to(device),
        )
        losses_K = LOSSES.named(self.name).compute(scores, self.numbers)
        parts_K = divided(losses_K, scores, self.divisor, self.rollout.max_new_tokens)
        assert found.entropy_K is not None
        gap = measure((found.logps_K.detach() - scores.behaviour_K).abs())
        self._gaps.append(gap)
        return MicroLoss(
            loss_sum=parts_K.sum() + scored.anchor,
            num_units=self.num_units(batch),
            measures={
                REWARD: measure(policy.rewards_S.to(device)),
                **{
                    name: measure(values_S, ~values_S.isnan())
                    for name, values_S in zip(self._each_reward, policy.values_SF.to(device).unbind(1), strict=True)
                },
                FINISHED: measure(policy.finished_S.to(device)),
                LENGTH: measure(scores.lengths_S),
                GAP: gap,
                CLIPPED: measure(outside_of_clip(scores, self.numbers)),
                ENTROPY: measure(found.entropy_K),
            },
        )

    def end_step(self, reduce: Reduce) -> None:
        """Compare the step's gap with its bound. Raises `TrainingError` where it is larger."""
        zero = torch.zeros((), dtype=torch.float64, device=self.forward.device)
        total = sum((gap.total for gap in self._gaps), zero)
        count = sum((gap.count for gap in self._gaps), zero)
        total, count = reduce(torch.stack([total, count]))
        gap = float(total / count.clamp(min=1))
        if self._first_gap is None:
            self._first_gap = gap
        bound = self.rollout.max_gap or max(self.floor, TIMES_THE_FIRST * min(self._first_gap, self.floor))
        if gap <= bound:
            return
        what = (
            f"the model gives the answers of this step other probabilities in training than when they were drawn: "
            f"{gap:.2g} nats a token on the mean, at most {bound:.2g} were expected"
        )
        hint = "rollout.max_gap raises the bound, rollout.on_gap: warn goes on"
        if self.rollout.on_gap is GapAction.STOP:
            raise TrainingError(what, hint=hint)
        self.tell(what)

    def state(self) -> dict[str, Any]:
        """The gap of the first step."""
        return {} if self._first_gap is None else {"first_gap": self._first_gap}

    def load_state(self, state: Any) -> None:
        """See `StepLosses`."""
        self._first_gap = state.get("first_gap")

    def _nothing(self) -> Measures:
        return {name: measure(torch.zeros(0, device=self.forward.device)) for name in self.measured}
