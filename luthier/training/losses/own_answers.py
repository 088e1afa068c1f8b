"""``best_of_n``, ``online_dpo`` and ``distill``: losses of other objectives, on answers that the model has drawn.

N answers of a step, F rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from luthier.config.objective import LOSSES
from luthier.models.passes import ModelPass
from luthier.objectives import Measures, TokenSettings, measure, token_settings
from luthier.objectives.policy_losses import Advantage
from luthier.records import Batch, DrawnInStep
from luthier.training.losses.pairs import pair_losses
from luthier.training.losses.parts import ObjectiveParts
from luthier.training.losses.policies import measures_of_drawing, names_of_drawing, policy_losses
from luthier.training.losses.reference_choice import reference_model
from luthier.training.losses.step_losses import BothLosses, MicroLoss, Reduce, StepLosses, Tell
from luthier.training.losses.tokens import TokenLosses, token_losses
from luthier.training.rollouts.gap_watch import DRAWING


def best_answer_losses(parts: ObjectiveParts, forward: ModelPass, tell: Tell) -> BothLosses:
    """The best answers are learned as rows of ``sft`` are."""
    trained, held_out = token_losses(parts, forward, tell)
    return _with_facts(trained, parts), held_out


def own_pair_losses(parts: ObjectiveParts, forward: ModelPass, tell: Tell) -> BothLosses:
    """The best and the worst answer are compared as those of a row of ``dpo``. Held-out rows hold one answer each,
    and are measured by its cross-entropy."""
    trained, _ = pair_losses(parts, forward, tell)
    return _with_facts(trained, parts), _of_held_out(parts, forward)


def teacher_losses(parts: ObjectiveParts, forward: ModelPass, tell: Tell) -> BothLosses:
    """Answers are learned from a teacher: by its probability of each token (``opd``), or by its whole distribution."""
    objective = parts.config.objective
    if LOSSES.named(objective.loss_name).advantage == Advantage.TEACHER:
        return policy_losses(parts, forward, tell)
    policy = replace(forward, temperature=parts.config.rollout.temperature)
    teacher = reference_model(parts, policy, tell)
    num_sources, _ = parts.num_sources
    trained = TokenLosses(
        forward=policy, settings=token_settings(objective), reference=teacher, num_sources=num_sources
    )
    return _with_facts(trained, parts), _of_held_out(parts, forward)


def _of_held_out(parts: ObjectiveParts, forward: ModelPass) -> TokenLosses:
    return TokenLosses(forward=forward, settings=TokenSettings(), num_sources=parts.num_sources[1])


def _with_facts(losses: StepLosses, parts: ObjectiveParts) -> AnswerFacts:
    rollout = parts.config.rollout
    more = DRAWING if rollout.engine.is_elsewhere else ()
    return AnswerFacts(losses=losses, rewards=tuple(reward.label for reward in rollout.rewards), of_drawing=more)


@dataclass(kw_only=True, slots=True, eq=False)
class AnswerFacts:
    """Other losses, with measures of all answers that were drawn for a step, whether they are learned from or not.
    ``rewards`` are the names of the F rewards."""

    losses: StepLosses
    rewards: tuple[str, ...]
    of_drawing: tuple[str, ...] = ()  # names of what is measured of samplers elsewhere

    @property
    def forward(self) -> ModelPass:
        """See `StepLosses`."""
        return self.losses.forward

    @property
    def measured(self) -> tuple[str, ...]:
        """See `StepLosses`."""
        return (*names_of_drawing(self.rewards), *self.losses.measured, *self.of_drawing)

    def num_units(self, batch: Batch) -> int:
        """See `StepLosses`."""
        return self.losses.num_units(batch)

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        """See `StepLosses`."""
        self.losses.begin_step(model, batches, reduce)

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        """See `StepLosses`."""
        found = self.losses.loss(model, batch)
        return MicroLoss(
            loss_sum=found.loss_sum,
            num_units=found.num_units,
            measures={**self._facts(batch.drawn, found.loss_sum.device), **found.measures},
            by_source=found.by_source,
        )

    def end_step(self, reduce: Reduce) -> Measures:
        """See `StepLosses`."""
        return self.losses.end_step(reduce)

    def state(self) -> dict[str, Any]:
        """See `StepLosses`."""
        return self.losses.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `StepLosses`."""
        self.losses.load_state(state)

    def _facts(self, drawn: DrawnInStep | None, device: torch.device) -> Measures:
        names = (*names_of_drawing(self.rewards), *self.of_drawing)
        nothing = {name: measure(torch.zeros(0, device=device)) for name in names}
        return {**nothing, **measures_of_drawing(drawn, self.rewards, device)}
