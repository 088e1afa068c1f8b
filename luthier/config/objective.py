"""What is minimised: the section ``objective``, and which of its keys belong to which loss.

The table of losses says what a loss is told and what it assumes where nobody says; the functions themselves, their
formulas and papers are in `luthier.objectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Literal

from luthier.config.choices import NonEmpty, NonNegative, Positive, Proportion, Share, as_enum
from luthier.config.inputs import Section


class ReferenceSource(StrEnum):
    """Where the log-probabilities of the reference model come from."""

    AUTO = "auto"
    BASE = "base"
    MODEL = "model"
    PRECOMPUTED = "precomputed"
    NONE = "none"


class Quantization(StrEnum):
    """How few bits a frozen model's weights have."""

    INT8 = "int8"
    NF4 = "nf4"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """A loss as a run description sees it.

    families   the objectives that have it
    reference  whether it compares with a reference model
    reference_free  whether it can do without one: it only compares the two answers of a pair, and where a reference
               finds both alike it cancels out. Others measure each answer by itself against the reference
    estimates_kl  whether it wants another row's completion under each prompt, to estimate a KL divergence
    defaults   the keys that it reads beside ``name``, ``loss`` and ``reference``, and what they are by default
    """

    families: tuple[str, ...]
    reference: bool = False
    reference_free: bool = False
    estimates_kl: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)


FAMILIES = ("sft", "pt", "rm", "dpo", "kto")
_TOKENS = ("sft", "pt")
_PAIRS = ("dpo",)
_TOKEN_KEYS = {"label_smoothing": 0.0, "z_loss": 0.0}
_FEEDBACK_KEYS = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "sft_weight": 0.0}


def _pair(*, reference: bool = True, reference_free: bool = False, **defaults: float) -> LossOptions:
    shared = {"beta": 0.1, "sft_weight": 0.0, **({"ld_alpha": 1.0} if reference else {})}
    return LossOptions(
        families=_PAIRS, reference=reference, reference_free=reference_free, defaults={**shared, **defaults}
    )


LOSSES: Mapping[str, LossOptions] = MappingProxyType(
    {
        "cross_entropy": LossOptions(families=_TOKENS, defaults=_TOKEN_KEYS),
        "dft": LossOptions(families=_TOKENS, defaults=_TOKEN_KEYS),
        "eaft": LossOptions(families=_TOKENS, defaults={**_TOKEN_KEYS, "eaft_alpha": 1.0}),
        "asft": LossOptions(families=_TOKENS, reference=True, defaults={**_TOKEN_KEYS, "asft_alpha": 0.1}),
        "bradley_terry": LossOptions(families=("rm",), defaults={"center_rewards": 0.0}),
        "sigmoid": _pair(reference_free=True, label_smoothing=0.0),
        "hinge": _pair(reference_free=True),
        "ipo": _pair(reference_free=True),
        "robust": _pair(reference_free=True, label_smoothing=0.0),
        "exo_pair": _pair(reference_free=True, label_smoothing=1e-3),
        "nca_pair": _pair(),
        "bco_pair": _pair(),
        "mpo": _pair(sft_weight=1.0, bco_share=0.2),
        "wpo": _pair(reference_free=True, label_smoothing=0.0),
        "sppo_hard": _pair(),
        "aot": _pair(reference_free=True, label_smoothing=0.0),
        "aot_unpaired": _pair(reference_free=True, label_smoothing=0.0),
        "discopop": _pair(reference_free=True, discopop_tau=0.05),
        "apo_zero": _pair(),
        "apo_down": _pair(),
        "sigmoid_norm": _pair(reference_free=True),
        "forward_kl": _pair(label_smoothing=0.0),
        "js_divergence": _pair(label_smoothing=0.0),
        "alpha_divergence": _pair(label_smoothing=0.0, divergence_alpha=0.5),
        "kto_pair": _pair(),
        "simpo": _pair(reference=False, beta=2.0, gamma=1.0, label_smoothing=0.0),
        "alphapo": _pair(reference=False, beta=2.0, gamma=1.0, label_smoothing=0.0, alphapo_alpha=0.25),
        "orpo": _pair(reference=False, sft_weight=1.0),
        "cpo": _pair(reference=False, sft_weight=1.0, label_smoothing=0.0),
        "kto": LossOptions(
            families=("kto",),
            reference=True,
            estimates_kl=True,
            defaults=_FEEDBACK_KEYS,
        ),
        "apo_zero_unpaired": LossOptions(
            families=("kto",),
            reference=True,
            defaults=_FEEDBACK_KEYS,
        ),
        "bco": LossOptions(
            families=("kto",),
            reference=True,
            defaults=_FEEDBACK_KEYS,
        ),
    }
)
LOSS_NAMES = tuple(LOSSES)
# The loss that a family stands for where nobody names one.
DEFAULT_LOSS: Mapping[str, str] = MappingProxyType(
    {"sft": "cross_entropy", "pt": "cross_entropy", "rm": "bradley_terry", "dpo": "sigmoid", "kto": "kto"}
)


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
    quantization: Annotated[Quantization, as_enum(Quantization)] | None = None
    """Of a second model (``source: model``, which ``auto`` is then): ``int8``, 8 bits a weight and a scale for each row
    of a layer, or ``nf4``, 4 bits and a scale for 64 weights (QLoRA's format). Its linear layers only."""


class ObjectiveConfig(Section):
    """What is minimised ([objectives.md](objectives.md)). ``objective: sft`` is short for ``objective: {name: sft}``.

    The numbers belong to losses; without a value each has its loss's own default.
    """

    shorthand = "name"

    name: Literal[FAMILIES] = "sft"  # type: ignore[valid-type]
    """``sft``: cross-entropy on targets; ``pt``: the same on plain text (``data.overflow: split`` for long documents);
    ``rm``: a reward model from pairs; ``dpo``: preferences, from pairs; ``kto``: single answers, found good or bad."""
    loss: Literal[LOSS_NAMES] | None = None  # type: ignore[valid-type]
    """Which loss of this objective. Default: ``cross_entropy``, ``bradley_terry``, ``sigmoid`` and ``kto``."""
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
    reference: ReferenceConfig = ReferenceConfig()
    """The model that the loss compares with, where it does."""

    @property
    def loss_name(self) -> str:
        """The loss that is meant, named or not."""
        return self.loss or DEFAULT_LOSS[self.name]

    def number(self, key: str) -> float:
        """What ``key`` is for this loss: the user's value, or the loss's default. Raises KeyError if it reads none."""
        default = LOSSES[self.loss_name].defaults[key]
        given: float | None = self.model_dump(include={key})[key]
        return default if given is None or (key == "label_smoothing" and not given) else given

    @property
    def estimates_kl(self) -> bool:
        """Whether each row comes with another row's completion."""
        return LOSSES[self.loss_name].estimates_kl

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model's log-probabilities are needed."""
        return LOSSES[self.loss_name].reference and self.reference.source is not ReferenceSource.NONE
