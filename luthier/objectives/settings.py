"""From the objective section of a run description to the numbers of its loss."""

from __future__ import annotations

from luthier.config.objective import LOSSES, ObjectiveConfig
from luthier.objectives.feedback_losses import FeedbackSettings
from luthier.objectives.pair_formulas import PairSettings
from luthier.objectives.token_losses import TokenSettings

_ALPHA_OF = {"eaft": "eaft_alpha", "asft": "asft_alpha"}


def token_settings(objective: ObjectiveConfig) -> TokenSettings:
    """Of the objectives ``sft`` and ``pt``."""
    loss = objective.loss_name
    return TokenSettings(
        loss=loss,
        label_smoothing=objective.number("label_smoothing"),
        z_loss=objective.number("z_loss"),
        alpha=objective.number(_ALPHA_OF[loss]) if loss in _ALPHA_OF else 1.0,
    )


def pair_settings(objective: ObjectiveConfig) -> PairSettings:
    """Of the objective ``dpo``. ``ld_alpha`` is not among them: it acts on the sums over targets."""
    own = set(LOSSES[objective.loss_name].defaults) & set(PairSettings.__dataclass_fields__)
    return PairSettings(**{key: objective.number(key) for key in own})


def feedback_settings(objective: ObjectiveConfig) -> FeedbackSettings:
    """Of the objective ``kto``."""
    return FeedbackSettings(**{key: objective.number(key) for key in FeedbackSettings.__dataclass_fields__})
