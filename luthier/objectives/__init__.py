"""Scores to losses: always sums, never means; the trainer divides by the whole step's count."""

from __future__ import annotations

from luthier.objectives.answer_losses import (
    FeedbackBaselines,
    FeedbackScores,
    FeedbackSettings,
    feedback_loss_sum,
    kl_baseline,
    kl_measure,
    pair_loss_sum,
    reward_loss_sum,
)
from luthier.objectives.head import AnyHead, Head
from luthier.objectives.hidden_loss import ReferenceHidden, hidden_loss_sum
from luthier.objectives.measures import Measure, Measures, RunningMean, SequenceLoss, measure
from luthier.objectives.pair_formulas import (
    Counterparts,
    PairBaselines,
    PairScores,
    PairSettings,
    SequenceScores,
    counterparts,
    pair_scores,
    sequence_scores,
    tail_discount,
)
from luthier.objectives.settings import feedback_settings, pair_settings, token_settings
from luthier.objectives.token_losses import TokenLoss, TokenSettings, losses_by_source, token_loss_sum
from luthier.objectives.token_scores import TokenScores, log_square_sums, token_scores

__all__ = [
    "AnyHead",
    "Counterparts",
    "FeedbackBaselines",
    "FeedbackScores",
    "FeedbackSettings",
    "Head",
    "Measure",
    "Measures",
    "PairBaselines",
    "PairScores",
    "PairSettings",
    "ReferenceHidden",
    "RunningMean",
    "SequenceLoss",
    "SequenceScores",
    "TokenLoss",
    "TokenScores",
    "TokenSettings",
    "counterparts",
    "feedback_loss_sum",
    "feedback_settings",
    "hidden_loss_sum",
    "kl_baseline",
    "kl_measure",
    "log_square_sums",
    "losses_by_source",
    "measure",
    "pair_loss_sum",
    "pair_scores",
    "pair_settings",
    "reward_loss_sum",
    "sequence_scores",
    "tail_discount",
    "token_loss_sum",
    "token_scores",
    "token_settings",
]
