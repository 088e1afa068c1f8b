"""Losses of preference pairs, as a table over the log-probabilities of whole answers. P pairs.

Adding one is a function (`pair_formulas`) and a row. The losses of pairs are summed, and the trainer divides by the
number of pairs of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import luthier.objectives.pair_formulas as formulas
from luthier.errors import UserError
from luthier.objectives.pair_formulas import PairBaselines, PairSettings
from luthier.objectives.pair_scores import PairScores
from luthier.objectives.sorted_sides import SortedSides, gaps, ratios

PairFunction = Callable[[PairScores, PairSettings, PairBaselines], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLoss:
    """A row of the table. ``function(scores, settings, baselines)`` gives the loss of each pair, float32[P].

    per_token     compares log-probabilities per target, not of whole answers
    sorts         the two sets that it compares in ascending order (`PairBaselines.counterparts`); None: it does not
    needs_delta   wants the running mean of rewards (`PairBaselines.delta`)
    needs_kl      wants the mean log-ratios of the step's answers (`PairBaselines.chosen_kl`, ``rejected_kl``)
    needs_alignment   wants to know how much answers look like the policy's own (`PairScores.alignment_P`)
    formula, paper, says   for docs/objectives.md
    """

    name: str
    function: PairFunction
    needs_reference: bool = True
    per_token: bool = False
    sorts: SortedSides | None = None
    needs_delta: bool = False
    needs_kl: bool = False
    needs_alignment: bool = False
    formula: str
    paper: str
    says: str


def pair_loss_named(name: str) -> PairLoss:
    """The row, or `UserError` with the names there are."""
    if name not in PAIR_LOSSES:
        raise UserError(f"there is no loss of pairs {name!r}", hint=f"choose one of: {', '.join(PAIR_LOSSES)}")
    return PAIR_LOSSES[name]


def _row(name: str, function: PairFunction, formula: str, paper: str, says: str, **needs: Any) -> PairLoss:
    return PairLoss(name=name, function=function, formula=formula, paper=paper, says=says, **needs)


_COMPARED_WITH_REFERENCE = (
    _row(
        "sigmoid", formulas.sigmoid, "-log s(b (rc - rd))", "2305.18290",
        "DPO; with label smoothing, conservative DPO",
    ),
    _row("hinge", formulas.hinge, "max(0, 1 - b (rc - rd))", "2305.10425", "SLiC's hinge on DPO's margin"),
    _row(
        "robust", formulas.robust, "((1-e) l(+) - e l(-)) / (1 - 2e)", "2403.00409",
        "unbiased, e of the pairs swapped",
    ),
    _row("exo_pair", formulas.exo_pair, "KL((p, 1-p), (1-e, e)), p = s(b (rc - rd))", "2402.00856", "EXO: reverse KL"),
    _row("nca_pair", formulas.nca_pair, "-log s(b rc) - log s(-b rc)/2 - log s(-b rd)/2", "2402.05369", "NCA"),
    _row(
        "bco_pair", formulas.bco_pair, "-log s(b rc - delta) - log s(-(b rd - delta))", "2404.04656", "BCO on pairs",
        needs_delta=True,
    ),
    _row(
        "mpo", formulas.mpo, "(1-w) sigmoid + w bco_pair + sft_weight x nll(c), w = bco_share", "2411.10442",
        "MPO: DPO, BCO and the answer itself", needs_delta=True,
    ),
    _row(
        "wpo", formulas.wpo, "-w(c) w(d) log s(b (rc - rd)), w = exp(mean of log p - log sum q^2)", "2406.11827",
        "WPO: pairs count by how much both answers are like the policy's own", needs_alignment=True,
    ),
    _row(
        "sppo_hard", formulas.sppo_hard, "(rc - 1/(2b))^2 + (rd + 1/(2b))^2", "2405.00675",
        "SPPO with certain winners",
    ),
    _row(
        "discopop", formulas.discopop, "(1-m) l(+) + m exp(-b(rc - rd)), m = s(b(rc - rd)/tau)", "2406.08414",
        "DiscoPOP",
    ),
    _row("apo_zero", formulas.apo_zero, "s(-b rc) + s(b rd)", "2408.06266", "chosen up, rejected down"),
    _row("apo_down", formulas.apo_down, "s(b rc) + s(-b (rc - rd))", "2408.06266", "both down, the rejected further"),
    _row("forward_kl", formulas.forward_kl, "-log s(b (exp(-rd) - exp(-rc)))", "2309.16240", "f-DPO"),
    _row("js_divergence", formulas.js_divergence, "-log s(b (log s(rc) - log s(rd)))", "2309.16240", "f-DPO"),
    _row(
        "alpha_divergence", formulas.alpha_divergence,
        "-log s(b (exp((a-1) rc) - exp((a-1) rd)) / (a-1)), a = divergence_alpha",
        "2309.16240", "f-DPO; a = 0 is the forward KL, a = 1 DPO",
    ),
    _row(
        "kto_pair", formulas.kto_pair, "(s(-b (rc - kl_d)) + s(-b (kl_c - rd))) / 2", "2402.01306", "KTO on pairs",
        needs_kl=True,
    ),
)  # fmt: skip
_PER_TOKEN = (
    PairLoss(
        name="ipo",
        function=formulas.ipo,
        per_token=True,
        formula="(rc/|c| - rd/|d| - 1/(2b))^2",
        paper="2310.12036",
        says="IPO, per token as its authors do",
    ),
    PairLoss(
        name="sigmoid_norm",
        function=formulas.sigmoid_norm,
        per_token=True,
        formula="-log s(b (rc/|c| - rd/|d|))",
        paper="2411.15124",
        says="length-normalised DPO",
    ),
    PairLoss(
        name="simpo",
        function=formulas.simpo,
        needs_reference=False,
        per_token=True,
        formula="-log s(b (lc/|c| - ld/|d|) - gamma)",
        paper="2405.14734",
        says="SimPO; its paper's b is 2 to 10",
    ),
    PairLoss(
        name="alphapo",
        function=formulas.alphapo,
        needs_reference=False,
        per_token=True,
        formula="-log s(b (u(lc/|c|) - u(ld/|d|)) - gamma), u(l) = (1 - e^(-a l)) / a, a = alphapo_alpha",
        paper="2501.03884",
        says="AlphaPO: SimPO with a bent reward",
    ),
    PairLoss(
        name="orpo",
        function=formulas.orpo,
        needs_reference=False,
        per_token=True,
        formula="-b log s(odds(lc/|c|) - odds(ld/|d|)) + sft_weight x nll(c), odds(l) = l - log(1 - e^l)",
        paper="2403.07691",
        says="ORPO; b is its lambda",
    ),
)
_SORTED = (
    _row(
        "aot", formulas.aot, "-log s(b (sort(lc - ld) - sort(ref_c - ref_d)))", "2406.05882",
        "AOT on pairs, sorted over the step", sorts=gaps,
    ),
    _row(
        "aot_unpaired", formulas.aot_unpaired, "-log s(b (sort(rc) - sort(rd)))", "2406.05882",
        "AOT on two sets, sorted over the step", sorts=ratios,
    ),
)  # fmt: skip
_WITHOUT_REFERENCE = (
    _row("cpo", formulas.cpo, "-log s(b (lc - ld)) + sft_weight x nll(c)", "2401.08417", "CPO", needs_reference=False),
)
PAIR_LOSSES: dict[str, PairLoss] = {
    row.name: row for rows in (_COMPARED_WITH_REFERENCE, _PER_TOKEN, _SORTED, _WITHOUT_REFERENCE) for row in rows
}
