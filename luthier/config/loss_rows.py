"""The losses, a row each: whose it is, what it is told, its formula, and the function that computes it.

The functions are named, not imported: they need torch, and a mistake in a run description is told without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from luthier.plugins import resolve

Numbers = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss.

    objectives   whose loss it is
    function     ``"package.module:name"``, or the function itself. What it is called with depends on the rows:
                 answers    (`TokenQuantities`, `TokenSettings`) -> the loss of each target, [C]
                 pairs      (`PairScores`, `PairSettings`, `PairBaselines`) -> of each pair, [P]
                 verdicts   (log-ratios [R], signs [R], `FeedbackSettings`, `FeedbackBaselines`) -> of each row, [R]
                 of ``rm``  (chosen rewards [P], rejected [P], margins [P], numbers) -> of each pair, [P]
    numbers      the keys of the section ``objective`` that it reads beside name, loss and reference, and what they are
                 by default. A key that no other loss has becomes one. A plugin's function finds all in ``settings.own``
    explained    what such keys mean, for the page and the schema of run descriptions
    formula, paper, says   for docs/objectives.md

    What it needs to be computed:

    reference        a reference model
    reference_free   it can do without one: it only compares the two answers of a pair, and where a reference finds both
                     alike it cancels out. Others measure each answer by itself against the reference
    estimates_kl     another row's completion under each prompt, to estimate a KL divergence
    per_token        log-probabilities per target, not of whole answers
    sorts            function of `PairScores` that gives the two sets that it compares in ascending order over the step
    needs_delta      the running mean of rewards (``delta`` of `FeedbackBaselines` and `PairBaselines`)
    needs_kl         the mean log-ratios of the step's answers (`PairBaselines.chosen_kl`, ``rejected_kl``)
    needs_alignment  how much answers look like the policy's own (`PairScores.alignment_P`)
    needs_entropy    the entropy of the likeliest tokens (`TokenQuantities.entropy_C`)
    is_plain         nothing: it is cross-entropy as it is, which kernels of other libraries know

    Of a loss over answers that are drawn in the run:

    advantage        how rewards become advantages: `luthier.objectives.policy_losses.Advantage`
    divisor          what the sum of a step is divided by: `Divisor` there
    ratio_of         what its clip looks at: the ratio of each ``target``, of the whole ``answer``, or the geometric
                     ``mean`` of an answer's ratios
    kl_in            where its number ``kl_weight`` acts: in the ``loss``, taken off the ``reward``, or ``nowhere``
    expects          a value head learns what to expect of an answer, which its advantages are measured against
    whitened         advantages are brought to mean 0 and standard deviation 1 over the targets of the step
    """

    name: str
    objectives: tuple[str, ...]
    function: str | Callable[..., Any]
    numbers: Numbers = field(default_factory=dict)
    explained: Mapping[str, str] = field(default_factory=dict)
    formula: str
    says: str
    paper: str = ""
    reference: bool = False
    reference_free: bool = False
    estimates_kl: bool = False
    per_token: bool = False
    sorts: str | Callable[..., Any] | None = None
    needs_delta: bool = False
    needs_kl: bool = False
    needs_alignment: bool = False
    needs_entropy: bool = False
    is_plain: bool = False
    advantage: str = "standard"
    divisor: str = "tokens"
    ratio_of: str = "target"
    kl_in: str = "loss"
    expects: bool = False
    whitened: bool = False

    @property
    def compute(self) -> Callable[..., Any]:
        return resolve(self.function) if isinstance(self.function, str) else self.function

    @property
    def sides(self) -> Callable[..., Any] | None:
        """The function of `sorts`, if it has one."""
        return resolve(self.sorts) if isinstance(self.sorts, str) else self.sorts


def _tokens(name: str, formula: str, paper: str, says: str, *, numbers: Numbers | None = None, **needs: Any) -> Loss:
    return Loss(
        name=name,
        objectives=("sft", "pt", "best_of_n"),
        function=f"luthier.objectives.loss_sums:{name}",
        numbers={"label_smoothing": 0.0, "z_loss": 0.0, **(numbers or {})},
        formula=formula,
        paper=paper,
        says=says,
        **needs,
    )


def _rewards(name: str, formula: str, paper: str, says: str, *, numbers: Numbers) -> Loss:
    function = f"luthier.objectives.loss_sums:{name}"
    return Loss(
        name=name, objectives=("rm",), function=function, numbers=numbers, formula=formula, paper=paper, says=says
    )


def _pairs(
    name: str,
    formula: str,
    paper: str,
    says: str,
    *,
    reference: bool = True,
    numbers: Numbers | None = None,
    **needs: Any,
) -> Loss:
    shared = {"beta": 0.1, "sft_weight": 0.0, **({"ld_alpha": 1.0} if reference else {})}
    return Loss(
        name=name,
        objectives=("dpo", "online_dpo"),
        function=f"luthier.objectives.pair_formulas:{name}",
        numbers={**shared, **(numbers or {})},
        reference=reference,
        formula=formula,
        paper=paper,
        says=says,
        **needs,
    )


def _verdicts(name: str, formula: str, paper: str, says: str, **needs: Any) -> Loss:
    return Loss(
        name=name,
        objectives=("kto",),
        function=f"luthier.objectives.loss_sums:{name}",
        numbers={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "sft_weight": 0.0},
        reference=True,
        formula=formula,
        paper=paper,
        says=says,
        **needs,
    )


def _policies(
    name: str, formula: str, paper: str, says: str, *, function: str = "", numbers: Numbers, **choices: Any
) -> Loss:
    return Loss(
        name=name,
        objectives=("rl",),
        function=f"luthier.objectives.policy_losses:{function or name}",
        numbers={"kl_weight": 0.0, **numbers},
        formula=formula,
        paper=paper,
        says=says,
        **choices,
    )


ROWS = (
    _tokens("cross_entropy", "-log p", "", "maximum likelihood", is_plain=True),
    _tokens("dft", "-sg(p) log p", "2508.05629", "DFT: unlikely targets count less"),
    _tokens(
        "eaft",
        "-sg(H20 / 3)^alpha log p, H20 the entropy of the 20 likeliest tokens",
        "2601.02151",
        "EAFT: targets count by how open the choice was",
        needs_entropy=True,
        numbers={"eaft_alpha": 1.0},
    ),
    _tokens(
        "asft",
        "-sg(p) log p + alpha KL(ref, policy)",
        "2509.23753",
        "ASFT: DFT held to the reference",
        reference=True,
        numbers={"asft_alpha": 0.1},
    ),
    _rewards(
        "bradley_terry",
        "-log s(Rc - Rd - margin) + center_rewards (Rc + Rd)^2",
        "2307.09288",
        "Bradley and Terry; rows' margins",
        numbers={"center_rewards": 0.0},
    ),
    _pairs(
        "sigmoid",
        "-log s(b (rc - rd))",
        "2305.18290",
        "DPO; with label smoothing, conservative DPO",
        reference_free=True,
        numbers={"label_smoothing": 0.0},
    ),
    _pairs("hinge", "max(0, 1 - b (rc - rd))", "2305.10425", "SLiC's hinge on DPO's margin", reference_free=True),
    _pairs(
        "ipo",
        "(rc/|c| - rd/|d| - 1/(2b))^2",
        "2310.12036",
        "IPO, per token as its authors do",
        per_token=True,
        reference_free=True,
    ),
    _pairs(
        "robust",
        "((1-e) l(+) - e l(-)) / (1 - 2e)",
        "2403.00409",
        "unbiased, e of the pairs swapped",
        reference_free=True,
        numbers={"label_smoothing": 0.0},
    ),
    _pairs(
        "exo_pair",
        "KL((p, 1-p), (1-e, e)), p = s(b (rc - rd))",
        "2402.00856",
        "EXO: reverse KL",
        reference_free=True,
        numbers={"label_smoothing": 0.001},
    ),
    _pairs("nca_pair", "-log s(b rc) - log s(-b rc)/2 - log s(-b rd)/2", "2402.05369", "NCA"),
    _pairs("bco_pair", "-log s(b rc - delta) - log s(-(b rd - delta))", "2404.04656", "BCO on pairs", needs_delta=True),
    _pairs(
        "mpo",
        "(1-w) sigmoid + w bco_pair + sft_weight x nll(c), w = bco_share",
        "2411.10442",
        "MPO: DPO, BCO and the answer itself",
        needs_delta=True,
        numbers={"sft_weight": 1.0, "bco_share": 0.2},
    ),
    _pairs(
        "wpo",
        "-w(c) w(d) log s(b (rc - rd)), w = exp(mean of log p - log sum q^2)",
        "2406.11827",
        "WPO: pairs count by how much both answers are like the policy's own",
        needs_alignment=True,
        reference_free=True,
        numbers={"label_smoothing": 0.0},
    ),
    _pairs("sppo_hard", "(rc - 1/(2b))^2 + (rd + 1/(2b))^2", "2405.00675", "SPPO with certain winners"),
    _pairs(
        "aot",
        "-log s(b (sort(lc - ld) - sort(ref_c - ref_d)))",
        "2406.05882",
        "AOT on pairs, sorted over the step",
        reference_free=True,
        sorts="luthier.objectives.pair_formulas:gaps",
        numbers={"label_smoothing": 0.0},
    ),
    _pairs(
        "aot_unpaired",
        "-log s(b (sort(rc) - sort(rd)))",
        "2406.05882",
        "AOT on two sets, sorted over the step",
        reference_free=True,
        sorts="luthier.objectives.pair_formulas:ratios",
        numbers={"label_smoothing": 0.0},
    ),
    _pairs(
        "discopop",
        "(1-m) l(+) + m exp(-b(rc - rd)), m = s(b(rc - rd)/tau)",
        "2406.08414",
        "DiscoPOP",
        reference_free=True,
        numbers={"discopop_tau": 0.05},
    ),
    _pairs("apo_zero", "s(-b rc) + s(b rd)", "2408.06266", "chosen up, rejected down"),
    _pairs("apo_down", "s(b rc) + s(-b (rc - rd))", "2408.06266", "both down, the rejected further"),
    _pairs(
        "sigmoid_norm",
        "-log s(b (rc/|c| - rd/|d|))",
        "2411.15124",
        "length-normalised DPO",
        per_token=True,
        reference_free=True,
    ),
    _pairs("forward_kl", "-log s(b (exp(-rd) - exp(-rc)))", "2309.16240", "f-DPO", numbers={"label_smoothing": 0.0}),
    _pairs(
        "js_divergence", "-log s(b (log s(rc) - log s(rd)))", "2309.16240", "f-DPO", numbers={"label_smoothing": 0.0}
    ),
    _pairs(
        "alpha_divergence",
        "-log s(b (exp((a-1) rc) - exp((a-1) rd)) / (a-1)), a = divergence_alpha",
        "2309.16240",
        "f-DPO; a = 0 is the forward KL, a = 1 DPO",
        numbers={"label_smoothing": 0.0, "divergence_alpha": 0.5},
    ),
    _pairs("kto_pair", "(s(-b (rc - kl_d)) + s(-b (kl_c - rd))) / 2", "2402.01306", "KTO on pairs", needs_kl=True),
    _pairs(
        "simpo",
        "-log s(b (lc/|c| - ld/|d|) - gamma)",
        "2405.14734",
        "SimPO; its paper's b is 2 to 10",
        per_token=True,
        reference=False,
        numbers={"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0},
    ),
    _pairs(
        "alphapo",
        "-log s(b (u(lc/|c|) - u(ld/|d|)) - gamma), u(l) = (1 - e^(-a l)) / a, a = alphapo_alpha",
        "2501.03884",
        "AlphaPO: SimPO with a bent reward",
        per_token=True,
        reference=False,
        numbers={"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0, "alphapo_alpha": 0.25},
    ),
    _pairs(
        "orpo",
        "-b log s(odds(lc/|c|) - odds(ld/|d|)) + sft_weight x nll(c), odds(l) = l - log(1 - e^l)",
        "2403.07691",
        "ORPO; b is its lambda",
        per_token=True,
        reference=False,
        numbers={"sft_weight": 1.0},
    ),
    _pairs(
        "cpo",
        "-log s(b (lc - ld)) + sft_weight x nll(c)",
        "2401.08417",
        "CPO",
        reference=False,
        numbers={"sft_weight": 1.0, "label_smoothing": 0.0},
    ),
    _verdicts("kto", "good: s(-b (r - kl)); bad: s(-b (kl - r))", "2402.01306", "KTO", estimates_kl=True),
    _verdicts(
        "apo_zero_unpaired",
        "good: s(-b r); bad: s(b r)",
        "2408.06266",
        "APO-zero on single answers: KTO without the KL estimate",
    ),
    _verdicts(
        "bco",
        "good: -log s(b r - delta); bad: -log s(-(b r - delta))",
        "2404.04656",
        "BCO, without matching of the two prompt distributions",
        needs_delta=True,
    ),
    _policies(
        "dapo",
        "-min(p A, clip(p) A), A = (r - m) / s",
        "2503.14476",
        "DAPO: every target of the step counts alike",
        function="clipped",
        numbers={"clip_low": 0.2, "clip_high": 0.28},
    ),
    _policies(
        "grpo",
        "-min(p A, clip(p) A), A = (r - m) / s",
        "2402.03300",
        "GRPO: every answer counts alike; its paper's kl_weight is 0.04",
        function="clipped",
        numbers={"clip_low": 0.2, "clip_high": 0.2},
        divisor="answers",
    ),
    _policies(
        "dr_grpo",
        "-min(p A, clip(p) A), A = r - m",
        "2503.20783",
        "Dr. GRPO: neither length nor spread of rewards weighs",
        function="clipped",
        numbers={"clip_low": 0.2, "clip_high": 0.2},
        advantage="centred",
        divisor="constant",
    ),
    _policies(
        "gspo",
        "-min(P A, clip(P) A), A = (r - m) / s",
        "2507.18071",
        "GSPO: the ratio of whole answers",
        numbers={"clip_low": 3e-4, "clip_high": 4e-4},
        divisor="answers",
        ratio_of="mean",
    ),
    _policies(
        "cispo",
        "-sg(min(p, 1 + clip_high)) A log p, A = (r - m) / s",
        "2506.13585",
        "CISPO: no target loses its gradient",
        numbers={"clip_high": 5.0},
    ),
    _policies(
        "sapo",
        "-A s(t (p - 1)) 4 / t, A = (r - m) / s, t by the sign of A",
        "2511.20347",
        "SAPO: a soft gate in the place of the clip",
        numbers={"sapo_positive": 1.0, "sapo_negative": 1.05},
        divisor="answers",
    ),
    _policies(
        "rloo",
        "-min(q A, clip(q) A), q the ratio of the whole answer, A = r - mean of the others",
        "2402.14740",
        "RLOO: KL is taken off the reward",
        numbers={"clip_low": 0.2, "clip_high": 0.2, "kl_weight": 0.05},
        advantage="leave_one_out",
        divisor="answer_sums",
        ratio_of="answer",
        kl_in="reward",
    ),
    _policies(
        "reinforce_pp",
        "-min(p A, clip(p) A), A = (R - m(R)) / s(R), R = r - the KL from a target on",
        "2501.03262",
        "REINFORCE++: answers are compared with the whole step, m(R) and s(R) over its targets",
        function="clipped",
        numbers={"clip_low": 0.2, "clip_high": 0.2, "kl_weight": 0.01},
        advantage="reward",
        kl_in="reward",
        whitened=True,
    ),
    _policies(
        "reinforce_pp_baseline",
        "-min(p A, clip(p) A), A = (R - m(R)) / s(R), R = r - m",
        "2501.03262",
        "REINFORCE++ with the mean of a prompt's rewards as baseline, and KL in the loss",
        function="clipped",
        numbers={"clip_low": 0.2, "clip_high": 0.2, "kl_weight": 0.01},
        advantage="centred",
        whitened=True,
    ),
    _policies(
        "max_rl",
        "-min(p A, clip(p) A), A = (r - m) / m, 0 where m is not above 0",
        "2602.02710",
        "MaxRL: rare right answers count more",
        function="clipped",
        numbers={"clip_low": 0.2, "clip_high": 0.2},
        advantage="relative",
    ),
    _policies(
        "ppo",
        "-min(p A, clip(p) A) + value_weight max((V - R)^2, (clip(V) - R)^2) / 2, A by GAE, whitened over the step",
        "1707.06347",
        "PPO: a value head V learns what to expect, and answers are compared with that; KL is taken off the reward",
        numbers={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_weight": 0.2,
            "kl_target": 6.0,
            "kl_horizon": 10_000.0,
            "discount": 1.0,
            "gae_lambda": 0.95,
            "value_clip": 0.2,
            "value_weight": 0.1,
        },
        advantage="reward",
        kl_in="reward",
        expects=True,
        whitened=True,
    ),
    Loss(
        name="opd",
        objectives=("distill",),
        function="luthier.objectives.policy_losses:opd",
        reference=True,
        advantage="teacher",
        kl_in="nowhere",
        formula="-A p, A = log p_teacher - log p_drawn of each target",
        paper="2306.13649",
        says="on-policy distillation: each token of an own answer as likely as the teacher finds it",
    ),
    Loss(
        name="gkd",
        objectives=("distill",),
        function="luthier.objectives.loss_sums:gkd",
        numbers={"gkd_beta": 0.5, "gkd_top_k": 0},
        reference=True,
        formula="b KL(teacher, m) + (1-b) KL(policy, m), m = b teacher + (1-b) policy, b = gkd_beta",
        paper="2306.13649",
        says="GKD: the whole distribution, on own answers or the row's; 0 is the forward KL, 1 the reverse KL",
    ),
)
