"""What is minimised: the section ``objective``, and which of its keys belong to which loss.

The tables of objectives and losses are open: plugins add rows to them, and the section gets the keys that a new loss is
told by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, cast

from pydantic.fields import FieldInfo

from luthier.config import loss_rows
from luthier.config.choices import (
    NameOf,
    Natural,
    NonEmpty,
    NonNegative,
    Positive,
    Proportion,
    RowKind,
    Share,
    as_enum,
)  # fmt: skip
from luthier.config.inputs import QuantizationConfig, Section
from luthier.config.loss_rows import Loss
from luthier.errors import PluginError, UserError
from luthier.plugins import Table, name_function, refuse_text, resolve


class ReferenceSource(StrEnum):
    """Where the log-probabilities of the reference model come from."""

    AUTO = "auto"
    BASE = "base"
    MODEL = "model"
    PRECOMPUTED = "precomputed"
    NONE = "none"


class Learned(StrEnum):
    """Which of the answers that a run draws to a prompt it learns from."""

    COMPARED = "compared"  # all, each by how much better it is than the others
    ALL = "all"  # all, whatever their rewards
    BEST = "best"  # `rollout.keep` of them, those with the highest rewards
    PAIR = "pair"  # the best and the worst, as a pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What a run learns: from which rows, and which losses there are for it.

    rows          what it learns from
    default_loss  the loss that is meant where nobody names one
    losses        ``"package.module:name"``, or the function itself: (`ObjectiveParts`, `ModelPass`, tell) -> two
                  `StepLosses`: what training minimises, and what is measured on held-out rows
    has_head      the model ends in logits; else in one number a token, a reward
    by_token      the loss of each target is a function of what the head gives there (`TokenQuantities`), not of the
                  log-probabilities of whole answers
    on_policy     it learns from answers that the model draws in the run, to the questions of the rows
    learned       from which of these
    """

    name: str
    rows: RowKind
    default_loss: str
    losses: str | Callable[..., Any]
    has_head: bool = True
    by_token: bool = False
    on_policy: bool = False
    learned: Learned = Learned.COMPARED

    @property
    def compared(self) -> RowKind:
        """What its losses look at: rows as they are, or what the answers to questions become."""
        if self.rows is not RowKind.QUESTION:
            return self.rows
        return RowKind.PAIR if self.learned is Learned.PAIR else RowKind.ANSWER

    @property
    def make_losses(self) -> Callable[..., Any]:
        return resolve(self.losses) if isinstance(self.losses, str) else self.losses


LOSSES: Table[Loss] = Table("loss", {row.name: row for row in loss_rows.ROWS})
OBJECTIVES: Table[Objective] = Table(
    "objective",
    {
        row.name: row
        for row in (
            Objective(
                name="sft",
                rows=RowKind.ANSWER,
                default_loss="cross_entropy",
                losses="luthier.training.losses.tokens:token_losses",
                by_token=True,
            ),
            Objective(
                name="pt",
                rows=RowKind.ANSWER,
                default_loss="cross_entropy",
                losses="luthier.training.losses.tokens:token_losses",
                by_token=True,
            ),
            Objective(
                name="rm",
                rows=RowKind.PAIR,
                default_loss="bradley_terry",
                losses="luthier.training.losses.pairs:reward_losses",
                has_head=False,
            ),
            Objective(
                name="dpo",
                rows=RowKind.PAIR,
                default_loss="sigmoid",
                losses="luthier.training.losses.pairs:pair_losses",
            ),
            Objective(
                name="kto",
                rows=RowKind.VERDICT,
                default_loss="kto",
                losses="luthier.training.losses.verdicts:feedback_losses",
            ),
            Objective(
                name="rl",
                rows=RowKind.QUESTION,
                default_loss="dapo",
                losses="luthier.training.losses.policies:policy_losses",
                on_policy=True,
            ),
            Objective(
                name="distill",
                rows=RowKind.QUESTION,
                default_loss="opd",
                losses="luthier.training.losses.policies:teacher_losses",
                by_token=True,
                on_policy=True,
                learned=Learned.ALL,
            ),
            Objective(
                name="best_of_n",
                rows=RowKind.QUESTION,
                default_loss="cross_entropy",
                losses="luthier.training.losses.tokens:token_losses",
                by_token=True,
                on_policy=True,
                learned=Learned.BEST,
            ),
            Objective(
                name="online_dpo",
                rows=RowKind.QUESTION,
                default_loss="sigmoid",
                losses="luthier.training.losses.pairs:own_pair_losses",
                on_policy=True,
                learned=Learned.PAIR,
            ),
        )
    },
)


def kind_of(objective: str) -> RowKind:
    """The rows that the objective of this name learns from. Raises `UserError` for one that does not exist."""
    return OBJECTIVES.named(objective).rows


def loss_of(rows: RowKind, name: str) -> Loss:
    """The loss of this name, which has to be one for these rows; raises `UserError`."""
    row = LOSSES.named(name)
    if not any(objective in OBJECTIVES and OBJECTIVES[objective].compared is rows for objective in row.objectives):
        theirs = [other for other, one in OBJECTIVES.items() if one.compared is rows]
        hint = (
            f"choose one of: {', '.join(name for name, loss in LOSSES.items() if set(loss.objectives) & set(theirs))}"
        )
        raise UserError(f"{name} is a loss of {' and '.join(row.objectives)}, not of {rows} rows", hint=hint)
    return row


def losses_of(objective: str) -> dict[str, Loss]:
    """The losses of the objective of this name."""
    return {name: row for name, row in LOSSES.items() if objective in row.objectives}


class ReferenceConfig(Section):
    """The model that a loss compares with. ``reference: precomputed`` is short for ``reference: {source: …}``."""

    shorthand = "source"

    source: Annotated[ReferenceSource, as_enum(ReferenceSource)] = ReferenceSource.AUTO
    """``base``: the model under its adapter, which costs no memory; ``model``: a second model, held beside the first;
    ``precomputed``: its log-probabilities are computed once and kept with the data, so that no second model is in
    memory; ``none``: compare with nothing, for losses that only compare the two answers of a pair. ``auto``: base
    under a new ``lora`` or ``oft`` adapter, if no other model is named, else precomputed where the loss allows it, else
    model."""
    name_or_path: NonEmpty | None = None
    """Another model than the one that training starts from: a local folder or a Hub id."""
    revision: NonEmpty = "main"
    """Branch, tag or commit of that model on the Hub."""
    quantization: QuantizationConfig = QuantizationConfig()
    """Of a second model (``source: model``, which ``auto`` is then), as ``model.quantization``."""


class ObjectiveConfig(Section):
    """What is minimised ([objectives.md](objectives.md)). ``objective: sft`` is short for ``objective: {name: sft}``.

    The numbers belong to losses; without a value each has its loss's own default.
    """

    shorthand = "name"

    name: Annotated[str, NameOf(OBJECTIVES.keys)] = "sft"
    """``sft``: cross-entropy on targets; ``pt``: the same on plain text (``data.overflow: split`` for long documents);
    ``rm``: a reward model from pairs; ``dpo``: preferences, from pairs; ``kto``: single answers, found good or bad;
    ``rl``: answers that the model draws itself, to the questions of the rows, and that ``rollout.rewards`` judge. From
    such answers learn ``best_of_n`` (the best of them, by the losses of ``sft``), ``online_dpo`` (the best and the
    worst, by those of ``dpo``) and ``distill`` (what a teacher, ``reference.name_or_path``, thinks of them) too."""
    loss: Annotated[str, NameOf(LOSSES.keys)] | None = None
    """Which loss of this objective. Default: ``cross_entropy``, ``bradley_terry``, ``sigmoid``, ``kto``, ``dapo`` and
    ``opd``."""
    label_smoothing: Share = 0.0
    """``sft``, ``pt``: share of each target's probability that is spread over the vocabulary. Pairs: how likely a pair
    has its two answers swapped (``exo_pair`` cannot do with 0, and takes 0.001 for it)."""
    z_loss: NonNegative | None = None
    """``sft``, ``pt``: weight of the squared log-normaliser, which keeps logits from drifting; such as 1e-4."""
    eaft_alpha: NonNegative | None = None
    """``eaft``: power of the entropy that a target is weighed by."""
    asft_alpha: NonNegative | None = None
    """``asft``: weight of the KL divergence to the reference model."""
    center_rewards: NonNegative | None = None
    """``rm``: weight of the squared sum of a pair's rewards, which centres rewards at 0; such as 0.01."""
    beta: Positive | None = None
    """``dpo``, ``kto``: how strictly the model is held to the reference; in ``orpo`` the weight of the odds ratio."""
    gamma: NonNegative | None = None
    """``simpo``, ``alphapo``: the margin by which the chosen answer should win."""
    discopop_tau: Positive | None = None
    """``discopop``: temperature of the mixing."""
    divergence_alpha: NonNegative | None = None
    """``alpha_divergence``: 0 is ``forward_kl``, 1 the reverse KL, which is ``sigmoid``."""
    alphapo_alpha: NonNegative | None = None
    """``alphapo``: how much more a change counts where an answer is unlikely; 0 is ``simpo``."""
    bco_share: Proportion | None = None
    """``mpo``: which share of the loss is ``bco_pair``, the rest is ``sigmoid``."""
    ld_alpha: Proportion | None = None
    """``dpo``: weight of the tokens beyond the shorter answer's length (LD-DPO); 1 is plain DPO."""
    sft_weight: NonNegative | None = None
    """``dpo``, ``kto``: weight of the cross-entropy of chosen or good answers, per token, which is added."""
    desirable_weight: NonNegative | None = None
    """``kto``: weight of rows that were found good."""
    undesirable_weight: NonNegative | None = None
    """``kto``: weight of rows that were found bad. Good and bad rows should weigh about the same in all."""
    clip_low: NonNegative | None = None
    """``rl``: how far below 1 the ratio of what is to become less likely may fall before it counts no more."""
    clip_high: NonNegative | None = None
    """``rl``: how far above 1 the ratio of what is to become likelier may rise before it counts no more."""
    sapo_positive: Positive | None = None
    """``sapo``: how steep the gate is for answers that are to become likelier."""
    sapo_negative: Positive | None = None
    """``sapo``: how steep the gate is for answers that are to become less likely."""
    kl_weight: NonNegative | None = None
    """``rl``: weight of the KL divergence from the reference model, which keeps the model near it; 0 is none, and needs
    no reference. ``rloo`` and ``reinforce_pp`` take it off the rewards, others have it in the loss
    ([rl.md](rl.md#near-a-reference))."""
    kl_target: NonNegative | None = None
    """``ppo``: the KL of a whole answer, in nats, that ``kl_weight`` is led to: raised while KL is above, lowered while
    it is below. 0: the weight stays as it is."""
    kl_horizon: Positive | None = None
    """``ppo``: in how many answers ``kl_weight`` may change by a fifth."""
    discount: Proportion | None = None
    """``ppo``: what a reward counts one token before it."""
    gae_lambda: Proportion | None = None
    """``ppo``: how far advantages look ahead; 0: to the next value alone, 1: to the end of the answer."""
    value_clip: Positive | None = None
    """``ppo``: how far a value may move from what it was when the answer was drawn, before that counts no more."""
    value_weight: NonNegative | None = None
    """``ppo``: weight of the value head's loss."""
    gkd_beta: Proportion | None = None
    """``gkd``: 0 is KL(teacher || policy), which has all of the teacher's tokens be likely; 1 is KL(policy || teacher),
    which has all that the policy gives be likely to the teacher; between them a Jensen-Shannon divergence."""
    gkd_top_k: Natural | None = None
    """``gkd``: compare on so many tokens, those that the teacher finds likeliest, and on all others together; 0: on
    each token of the vocabulary."""
    reference: ReferenceConfig = ReferenceConfig()
    """The model that the loss compares with, where it does; of ``distill`` the teacher."""

    @property
    def kind(self) -> Objective:
        """The row of `OBJECTIVES` that it names."""
        return OBJECTIVES[self.name]

    @property
    def loss_name(self) -> str:
        """The loss that is meant, named or not."""
        return self.loss or self.kind.default_loss

    def number(self, key: str) -> float:
        """What ``key`` is for this loss: the user's value, or the loss's default. Raises KeyError if it reads none."""
        default = LOSSES[self.loss_name].numbers[key]
        given: float | None = self.model_dump(include={key})[key]
        return default if given is None or (key == "label_smoothing" and not given) else given

    @property
    def estimates_kl(self) -> bool:
        """Whether each row comes with another row's completion."""
        return LOSSES[self.loss_name].estimates_kl

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model's log-probabilities are needed."""
        return self.compares_with_reference and self.reference.source is not ReferenceSource.NONE

    @property
    def compares_with_reference(self) -> bool:
        """Whether the loss, as it is set, has a part that a reference belongs to."""
        row = LOSSES[self.loss_name]
        return row.reference or ("kl_weight" in row.numbers and self.number("kl_weight") > 0)

    @property
    def numbers(self) -> dict[str, float]:
        """Every number of this loss, given or not."""
        return {key: self.number(key) for key in LOSSES[self.loss_name].numbers}


_OWN_KEYS = frozenset(ObjectiveConfig.model_fields)


def register_loss(loss: Loss) -> None:
    """Add a loss to the table. Its objectives may be registered before or after it.

    Numbers that no loss has had so far become keys of the section ``objective``: numbers that are not negative.
    Raises `PluginError` where there is a loss of this name, or where a number is called as another key.
    """
    what = f"the loss {loss.name!r}"
    refuse_text(what, loss.objectives)
    for key, number in loss.numbers.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool) and number >= 0
        if not is_number or not key.isidentifier():
            hint = "a number is named as a key of YAML and of Python is, and its default is a number of at least 0"
            raise PluginError(f"{what} has the number {key!r} with the default {number!r}", hint=hint)
    known = {key for row in LOSSES.values() for key in row.numbers}
    taken = sorted(set(loss.numbers) & (_OWN_KEYS - known))
    if taken:
        raise PluginError(f"{what} calls a number {taken[0]!r}, which is another key of the objective")
    LOSSES.add(loss.name, loss)
    for function in (loss.function, loss.sorts):
        name_function(function, what)
    for key in loss.numbers:
        if key not in ObjectiveConfig.model_fields:
            says = loss.explained.get(key, f"a number of the loss `{loss.name}`")
            ObjectiveConfig.model_fields[key] = FieldInfo.from_annotation(cast(type[Any], NonNegative | None))
            ObjectiveConfig.model_fields[key].default = None
            ObjectiveConfig.model_fields[key].description = f"``{loss.name}``: {says}"
    # Make the section know its new keys, and with it what holds it: the whole run description, where that stands.
    ObjectiveConfig.model_rebuild(force=True)
    for section in Section.__subclasses__():
        if any(field.annotation is ObjectiveConfig for field in section.model_fields.values()):
            section.model_rebuild(force=True)


def register_objective(objective: Objective) -> None:
    """Add an objective to the table. Raises `PluginError` where there is one of this name, or it names no rows."""
    if not isinstance(objective.rows, RowKind) or objective.on_policy != (objective.rows is RowKind.QUESTION):
        what = f"the objective {objective.name!r} has rows={objective.rows!r} and on_policy={objective.on_policy}"
        hint = "rows is luthier.RowKind.ANSWER, PAIR or VERDICT; QUESTION, with on_policy=True, where answers are drawn"
        raise PluginError(what, hint=hint)
    OBJECTIVES.add(objective.name, objective)
    name_function(objective.losses, f"the objective {objective.name!r}")
