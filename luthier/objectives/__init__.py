"""Scores to losses: always sums, never means; the trainer divides by the whole step's count."""

from __future__ import annotations

from luthier.objectives.alignment import log_square_sums
from luthier.objectives.comparison import pair_loss_sum
from luthier.objectives.feedback_losses import (
    FeedbackBaselines,
    FeedbackScores,
    FeedbackSettings,
    feedback_loss_sum,
    kl_baseline,
    kl_measure,
)
from luthier.objectives.head import AnyHead, Head
from luthier.objectives.hidden_loss import Reference, hidden_loss_sum
from luthier.objectives.measures import Measure, Measures, SequenceLoss, measure
from luthier.objectives.pair_formulas import PairBaselines, PairSettings
from luthier.objectives.pair_scores import PairScores, pair_scores
from luthier.objectives.reward import reward_loss_sum
from luthier.objectives.running_mean import RunningMean
from luthier.objectives.sequences import SequenceScores, sequence_scores, tail_discount
from luthier.objectives.settings import feedback_settings, pair_settings, token_settings
from luthier.objectives.sorted_sides import Counterparts, counterparts
from luthier.objectives.token_loss import TokenLoss, losses_by_source, token_loss_sum
from luthier.objectives.token_losses import TokenSettings
from luthier.objectives.token_scores import TokenScores, token_scores

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
    "Reference",
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
