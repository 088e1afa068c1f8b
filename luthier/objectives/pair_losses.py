"""Losses of preference pairs, as a table over the log-probabilities of whole answers. P pairs.

Adding one is a function and a row. Each gives the loss of every pair, [P]; they are summed, and the trainer divides by
the number of pairs of the whole step. With r the log-ratio ``log policy - log reference`` of an answer, c the chosen
and d the rejected one, most are functions of ``beta (r_c - r_d)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from luthier.errors import UserError
from luthier.objectives.pair_scores import PairScores
from luthier.objectives.sorted_sides import Counterparts, SortedSides, counterparts, gaps, ratios


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSettings:
    """The numbers of a pair loss; each loss reads its own (`PAIR_LOSSES`, ``objective`` of the run description).

    label_smoothing  how likely a pair has its answers swapped
    gamma            SimPO's target margin
    sft_weight       what the chosen answer's cross-entropy per token counts beside the loss
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    discopop_tau: float = 0.05
    sft_weight: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBaselines:
    """What a loss compares rewards with, estimated outside of the pairs at hand; a micro-batch must not decide it.

    delta                    ``bco_pair``: the running mean of rewards, see `RunningMean`; 0 without one
    chosen_kl, rejected_kl   ``kto_pair``: mean log-ratios of the chosen and of the rejected answers of the whole step,
                             at least 0. None: estimated from the pairs at hand
    counterparts             ``aot``: what the pairs at hand are compared with in the sorted step. None: they are all
    """

    delta: float = 0.0
    chosen_kl: float | None = None
    rejected_kl: float | None = None
    counterparts: Counterparts | None = None


NO_BASELINES = PairBaselines()
PairFunction = Callable[[PairScores, PairSettings, PairBaselines], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLoss:
    """A row of the table. ``function(scores, settings, baselines)`` gives the loss of each pair, float32[P].

    per_token     compares log-probabilities per target, not of whole answers
    sorts         the two sets that it compares in ascending order (`PairBaselines.counterparts`); None: it does not
    needs_delta   wants the running mean of rewards (`PairBaselines.delta`)
    needs_kl      wants the mean log-ratios of the step's answers (`PairBaselines.chosen_kl`, ``rejected_kl``)
    formula, paper, says   for docs/objectives.md
    """

    name: str
    function: PairFunction
    needs_reference: bool = True
    per_token: bool = False
    sorts: SortedSides | None = None
    needs_delta: bool = False
    needs_kl: bool = False
    formula: str
    paper: str
    says: str


def pair_loss_named(name: str) -> PairLoss:
    """The row, or `UserError` with the names there are."""
    if name not in PAIR_LOSSES:
        raise UserError(f"there is no loss of pairs {name!r}", hint=f"choose one of: {', '.join(PAIR_LOSSES)}")
    return PAIR_LOSSES[name]


def _logistic(logits_P: torch.Tensor, smoothing: float) -> torch.Tensor:
    losses_P = -F.logsigmoid(logits_P)
    return losses_P if not smoothing else (1 - smoothing) * losses_P - smoothing * F.logsigmoid(-logits_P)


def _sigmoid(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return _logistic(settings.beta * scores.ratio_gap_P, settings.label_smoothing)


def _sigmoid_norm(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return _logistic(settings.beta * scores.mean_ratio_gap_P, 0.0)


def _hinge(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return torch.relu(1 - settings.beta * scores.ratio_gap_P)


def _ipo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return (scores.mean_ratio_gap_P - 1 / (2 * settings.beta)).square()


def _robust(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    logits_P, smoothing = settings.beta * scores.ratio_gap_P, settings.label_smoothing
    clean_P, swapped_P = -F.logsigmoid(logits_P), -F.logsigmoid(-logits_P)
    return ((1 - smoothing) * clean_P - smoothing * swapped_P) / (1 - 2 * smoothing)


def _exo_pair(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    # KL of the model's preference (p, 1-p) to the smoothed label (1-e, e)
    logits_P, e = settings.beta * scores.ratio_gap_P, settings.label_smoothing
    log_p_P, log_other_P = F.logsigmoid(logits_P), F.logsigmoid(-logits_P)
    return log_p_P.exp() * (log_p_P - math.log1p(-e)) + log_other_P.exp() * (log_other_P - math.log(e))


def _nca_pair(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    chosen_P, rejected_P = settings.beta * scores.chosen_ratios_P, settings.beta * scores.rejected_ratios_P
    return -F.logsigmoid(chosen_P) - 0.5 * F.logsigmoid(-chosen_P) - 0.5 * F.logsigmoid(-rejected_P)


def _bco_pair(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    chosen_P = settings.beta * scores.chosen_ratios_P - baselines.delta
    rejected_P = settings.beta * scores.rejected_ratios_P - baselines.delta
    return -F.logsigmoid(chosen_P) - F.logsigmoid(-rejected_P)


def _sppo_hard(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    half = 0.5 / settings.beta
    return (scores.chosen_ratios_P - half).square() + (scores.rejected_ratios_P + half).square()


def _aot(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    gap_P, reference_P = gaps(scores)
    other = baselines.counterparts or counterparts(gap_P, reference_P)
    return _logistic(settings.beta * (gap_P - other.left_P), settings.label_smoothing)


def _aot_unpaired(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    chosen_P, rejected_P = ratios(scores)
    other = baselines.counterparts or counterparts(chosen_P, rejected_P)
    from_chosen_P = _logistic(settings.beta * (chosen_P - other.left_P), settings.label_smoothing)
    from_rejected_P = _logistic(settings.beta * (other.right_P - rejected_P), settings.label_smoothing)
    # either side of a comparison counts it, with the other side constant: half of both values, all of both slopes
    both_P = from_chosen_P + from_rejected_P
    return both_P - 0.5 * both_P.detach()


def _discopop(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    logits_P = settings.beta * scores.ratio_gap_P
    share_P = torch.sigmoid(logits_P / settings.discopop_tau)
    return (1 - share_P) * -F.logsigmoid(logits_P) + share_P * torch.exp(-logits_P)


def _apo_zero(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    beta = settings.beta
    return torch.sigmoid(-beta * scores.chosen_ratios_P) + torch.sigmoid(beta * scores.rejected_ratios_P)


def _apo_down(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    beta = settings.beta
    return torch.sigmoid(beta * scores.chosen_ratios_P) + torch.sigmoid(-beta * scores.ratio_gap_P)


def _kto_pair(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    chosen_P, rejected_P = scores.chosen_ratios_P, scores.rejected_ratios_P
    chosen_kl = _kl_or_mean(baselines.chosen_kl, chosen_P)
    rejected_kl = _kl_or_mean(baselines.rejected_kl, rejected_P)
    # each half is measured against the other half's; the halves' mean, as a pair is two rows
    good_P = torch.sigmoid(-settings.beta * (chosen_P - rejected_kl))
    bad_P = torch.sigmoid(-settings.beta * (chosen_kl - rejected_P))
    return 0.5 * (good_P + bad_P)


def _kl_or_mean(known: float | None, ratios_P: torch.Tensor) -> torch.Tensor:
    if known is not None:
        return ratios_P.new_tensor(known)
    # unlike the estimate of `feedback_losses` this one is differentiated, as its authors have it
    return ratios_P.mean().clamp(min=0) if len(ratios_P) else ratios_P.new_zeros(())


def _simpo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    logits_P = settings.beta * (scores.chosen_mean_P - scores.rejected_mean_P) - settings.gamma
    return _logistic(logits_P, settings.label_smoothing)


def _orpo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    log_odds_P = _log_odds(scores.chosen_mean_P) - _log_odds(scores.rejected_mean_P)
    return -settings.beta * F.logsigmoid(log_odds_P)


def _log_odds(logps: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) from log p < 0, exact at both ends: log1p(-p) where p is small, log(-expm1) where it is near 1.

    At log p = 0, which float32 reaches, the smallest number below takes its place: the odds would be infinite.
    """
    logps = logps.clamp(max=-torch.finfo(logps.dtype).tiny)
    is_small = logps < -0.6931  # p = 1/2
    # the branch that is not taken gets a harmless argument, else its infinite slope makes 0 x inf
    small = torch.log1p(-torch.where(is_small, logps, -1.0).exp())
    large = torch.log(-torch.expm1(torch.where(is_small, -1.0, logps)))
    return logps - torch.where(is_small, small, large)


def _cpo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return _logistic(settings.beta * (scores.chosen_P - scores.rejected_P), settings.label_smoothing)


def _row(name: str, function: PairFunction, formula: str, paper: str, says: str, **needs: Any) -> PairLoss:
    return PairLoss(name=name, function=function, formula=formula, paper=paper, says=says, **needs)


_COMPARED_WITH_REFERENCE = (
    _row("sigmoid", _sigmoid, "-log s(b (rc - rd))", "2305.18290", "DPO; with label smoothing, conservative DPO"),
    _row("hinge", _hinge, "max(0, 1 - b (rc - rd))", "2305.10425", "SLiC's hinge on DPO's margin"),
    _row("robust", _robust, "((1-e) l(+) - e l(-)) / (1 - 2e)", "2403.00409", "unbiased, e of the pairs swapped"),
    _row("exo_pair", _exo_pair, "KL((p, 1-p), (1-e, e)), p = s(b (rc - rd))", "2402.00856", "EXO: reverse KL"),
    _row("nca_pair", _nca_pair, "-log s(b rc) - log s(-b rc)/2 - log s(-b rd)/2", "2402.05369", "NCA"),
    _row(
        "bco_pair", _bco_pair, "-log s(b rc - delta) - log s(-(b rd - delta))", "2404.04656", "BCO on pairs",
        needs_delta=True,
    ),
    _row("sppo_hard", _sppo_hard, "(rc - 1/2b)^2 + (rd + 1/2b)^2", "2405.00675", "SPPO with certain winners"),
    _row("discopop", _discopop, "(1-m) l(+) + m exp(-b(rc - rd)), m = s(b(rc - rd)/tau)", "2406.08414", "DiscoPOP"),
    _row("apo_zero", _apo_zero, "s(-b rc) + s(b rd)", "2408.06266", "chosen up, rejected down"),
    _row("apo_down", _apo_down, "s(b rc) + s(-b (rc - rd))", "2408.06266", "both down, the rejected further"),
    _row(
        "kto_pair", _kto_pair, "(s(-b (rc - kl_d)) + s(-b (kl_c - rd))) / 2", "2402.01306", "KTO on pairs",
        needs_kl=True,
    ),
)  # fmt: skip
_PER_TOKEN = (
    PairLoss(
        name="ipo",
        function=_ipo,
        per_token=True,
        formula="(rc/|c| - rd/|d| - 1/2b)^2",
        paper="2310.12036",
        says="IPO, per token as its authors do",
    ),
    PairLoss(
        name="sigmoid_norm",
        function=_sigmoid_norm,
        per_token=True,
        formula="-log s(b (rc/|c| - rd/|d|))",
        paper="2411.15124",
        says="length-normalised DPO",
    ),
    PairLoss(
        name="simpo",
        function=_simpo,
        needs_reference=False,
        per_token=True,
        formula="-log s(b (lc/|c| - ld/|d|) - gamma)",
        paper="2405.14734",
        says="SimPO; its paper's b is 2 to 10",
    ),
    PairLoss(
        name="orpo",
        function=_orpo,
        needs_reference=False,
        per_token=True,
        formula="-b log s(odds(lc/|c|) - odds(ld/|d|)) + sft_weight x nll(c), odds(l) = l - log(1 - e^l)",
        paper="2403.07691",
        says="ORPO; b is its lambda",
    ),
)
_SORTED = (
    _row(
        "aot", _aot, "-log s(b (sort(lc - ld) - sort(ref_c - ref_d)))", "2406.05882",
        "AOT on pairs, sorted over the step", sorts=gaps,
    ),
    _row(
        "aot_unpaired", _aot_unpaired, "-log s(b (sort(rc) - sort(rd)))", "2406.05882",
        "AOT on two sets, sorted over the step", sorts=ratios,
    ),
)  # fmt: skip
_WITHOUT_REFERENCE = (
    _row("cpo", _cpo, "-log s(b (lc - ld)) + sft_weight x nll(c)", "2401.08417", "CPO", needs_reference=False),
)
PAIR_LOSSES: dict[str, PairLoss] = {
    row.name: row for rows in (_COMPARED_WITH_REFERENCE, _PER_TOKEN, _SORTED, _WITHOUT_REFERENCE) for row in rows
}
