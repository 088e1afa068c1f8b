"""``online_dpo`` and ``distill``: losses of other objectives, on answers that the model has drawn."""

from __future__ import annotations

from dataclasses import replace

from luthier.config.objective import LOSSES
from luthier.models.passes import ModelPass
from luthier.objectives import TokenSettings, token_settings
from luthier.objectives.policy_losses import Advantage
from luthier.training.losses.pairs import pair_losses
from luthier.training.losses.parts import ObjectiveParts
from luthier.training.losses.policies import policy_losses
from luthier.training.losses.reference_choice import reference_model
from luthier.training.losses.step_losses import BothLosses, Tell
from luthier.training.losses.tokens import TokenLosses


def own_pair_losses(parts: ObjectiveParts, forward: ModelPass, tell: Tell) -> BothLosses:
    """The best and the worst answer are compared as those of a row of ``dpo``. Held-out rows hold one answer each,
    and are measured by its cross-entropy."""
    trained, _ = pair_losses(parts, forward, tell)
    return trained, _of_held_out(parts, forward)


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
    return trained, _of_held_out(parts, forward)


def _of_held_out(parts: ObjectiveParts, forward: ModelPass) -> TokenLosses:
    return TokenLosses(forward=forward, settings=TokenSettings(), num_sources=parts.num_sources[1])
