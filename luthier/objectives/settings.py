"""From the objective section of a run description to the numbers of its loss."""

from __future__ import annotations

from dataclasses import fields

from luthier.config.objective import ObjectiveConfig
from luthier.objectives.answer_losses import FeedbackSettings
from luthier.objectives.pair_formulas import PairSettings
from luthier.objectives.token_losses import TokenSettings

_ALPHA_OF = {"eaft": "eaft_alpha", "asft": "asft_alpha"}
_BETA, _TOP_K = "gkd_beta", "gkd_top_k"
_ELSEWHERE = ("ld_alpha",)  # acts on the sums over targets, before any loss


def token_settings(objective: ObjectiveConfig) -> TokenSettings:
    """Of an objective whose losses are those of tokens."""
    loss, numbers = objective.loss_name, objective.numbers
    return TokenSettings(
        loss=loss,
        label_smoothing=numbers.get("label_smoothing", 0.0),
        z_loss=numbers.get("z_loss", 0.0),
        alpha=objective.number(_ALPHA_OF[loss]) if loss in _ALPHA_OF else 1.0,
        beta=numbers.get(_BETA, 0.0),
        top_k=int(numbers.get(_TOP_K, 0)),
        own=_others(objective, TokenSettings, *_ALPHA_OF.values(), _BETA, _TOP_K),
    )


def pair_settings(objective: ObjectiveConfig) -> PairSettings:
    """Of an objective that learns from pairs."""
    return PairSettings(**_fields(objective, PairSettings), own=_others(objective, PairSettings))


def feedback_settings(objective: ObjectiveConfig) -> FeedbackSettings:
    """Of an objective that learns from verdicts."""
    return FeedbackSettings(**_fields(objective, FeedbackSettings), own=_others(objective, FeedbackSettings))


def _fields(objective: ObjectiveConfig, kind: type) -> dict[str, float]:
    """The numbers that the settings have a field for."""
    return {key: number for key, number in objective.numbers.items() if key in _names(kind)}


def _others(objective: ObjectiveConfig, kind: type, *known: str) -> dict[str, float]:
    """Those of a plugin's loss."""
    known = (*known, *_names(kind), *_ELSEWHERE)
    return {key: number for key, number in objective.numbers.items() if key not in known}


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
