"""The optimizers, a row each: what brings it, its settings in ``train.optim_args``, and where it can be used.

Names are transformers' own, and a few that it does not have. The rows say nothing of torch, so that a mistake in a run
description is told without it; `luthier.training.optimizer` makes the optimizers.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

OptimizerSetting = float | int | bool | str
Default = OptimizerSetting | tuple[OptimizerSetting, ...] | type
"""What a setting is by default: the first of a tuple, which has all that it can be; a type where the optimizer's
package has the default."""


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """An optimizer.

    needs             what is imported for it, and the package that brings it; none: it comes with torch or transformers
    settings          the entries of ``train.optim_args`` that it reads
    in_backward       it changes each weight during the backward pass, as soon as the gradient of that weight is there,
                      and gives back the gradient's memory: a step cannot have several micro-batches
    whole_weights     it is made for weights, not for the small matrices of an adapter
    has_betas         it reads ``train.adam_beta1``, ``adam_beta2`` and, where ``has_epsilon``, ``adam_epsilon``
    averages          it averages its weights instead of having its rate fall
    paper, says       for docs/optimizers.md
    """

    name: str
    settings: Mapping[str, Default] = field(default_factory=dict)
    _: KW_ONLY
    needs: tuple[tuple[str, str], ...] = ()
    in_backward: bool = False
    whole_weights: bool = False
    has_betas: bool = True
    has_epsilon: bool = True
    averages: bool = False
    paper: str = ""
    says: str = ""

    @property
    def offloads(self) -> bool:
        """Whether its states and updates may be on the CPU, by ``train.offload``: torch's and transformers' own."""
        return not (self.needs or self.in_backward or self.name == "badam")

    def faults(self, given: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
        """Of each setting that is no setting of this optimizer: its name, what is wrong, and the way out."""
        for name, value in given.items():
            if name not in self.settings:
                ask = "".join(
                    f"did you mean {close}? " for close in difflib.get_close_matches(name, self.settings, n=1)
                )
                there = f"it reads {', '.join(self.settings)}" if self.settings else "it reads no setting"
                yield name, f"{self.name} has no setting {name}", f"{ask}{there}; rate, decay and betas stand in train"
            elif (wanted := _wanted(self.settings[name], value)) is not None:
                yield name, f"{value!r} is not {wanted}", f"write {name}: {_example(self.settings[name])}"


_LEAST_MEMORY = 0.9  # a setting whose default is from here to 1 is a share of the old in a mean that moves


def _wanted(default: Default, value: object) -> str | None:
    """What a value should be; None: it is."""
    kind = default if isinstance(default, type) else type(default)
    if isinstance(default, tuple):
        return None if value in default else f"one of {', '.join(map(_shown, default))}"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return None if is_number and isinstance(value, int) and value >= 1 else "a whole number from 1 on"
    if is_memory := isinstance(default, float) and _LEAST_MEMORY <= default < 1:
        is_number = is_number and isinstance(value, int | float) and value < 1
    if is_number and isinstance(value, int | float) and value >= 0:
        return None
    return "a number of at least 0 and below 1" if is_memory else "a number from 0 on"


def _example(default: Default) -> str:
    match default:
        case tuple():
            return _shown(default[0])
        case bool():
            return str(not default).lower()
        case type():
            return "100"
        case _:
            return str(default)


def _shown(setting: OptimizerSetting) -> str:
    return str(setting).lower() if isinstance(setting, bool) else str(setting)


_BITSANDBYTES = ("bitsandbytes", "bitsandbytes")
_8BIT: dict[str, Default] = {"block_size": 256, "bf16_stochastic_round": False}
_ADEMAMIX: dict[str, Default] = {
    "beta1": 0.9, "beta2": 0.999, "beta3": 0.9999, "alpha": 5.0, "eps": 1e-8, "t_alpha": int, "t_beta3": int,
}  # fmt: skip
_RMSPROP: dict[str, Default] = {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8, "centered": False}
_GALORE: dict[str, Default] = {
    "rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": ("std", "reverse_std", "right", "left", "full"),
}  # fmt: skip
_APOLLO: dict[str, Default] = {
    "rank": 128, "update_proj_gap": 200, "scale": 1.0, "proj": ("random", "svd"), "scale_type": ("channel", "tensor"),
    "proj_type": ("std",),  # with others apollo-torch's step fails: it scales by rows or columns as for this one
}  # fmt: skip
_PROJECTED = {
    "galore": ("galore-torch", _GALORE, "2403.03507"),
    "apollo": ("apollo-torch", _APOLLO, "2412.05270"),
}
_FREE: dict[str, Default] = {"weight_lr_power": 2.0, "r": 0.0}
_GROK: dict[str, Default] = {
    "alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1, "gradient_clipping": 1.0,
}  # fmt: skip


_torch = OptimizerRow
_bnb = functools.partial(OptimizerRow, needs=(_BITSANDBYTES,))


def _projected(name: str, says: str, *, has_betas: bool = True) -> OptimizerRow:
    """GaLore and APOLLO, on gradients projected to a low rank."""
    package, settings, paper = _PROJECTED[name.partition("_")[0]]
    return OptimizerRow(
        name=name,
        needs=((package.replace("-", "_"), package), _BITSANDBYTES),
        settings=settings,
        in_backward=name.endswith("_layerwise"),
        whole_weights=True,
        has_betas=has_betas,
        paper=paper,
        says=says,
    )


_LAYERWISE = "; each weight is changed during the backward pass, so that no gradient is kept"
_ROWS = (
    _torch("adamw_torch", paper="1711.05101", says="AdamW, the default"),
    _torch("adamw_torch_fused", says="AdamW in one kernel"),
    _torch("adamw_torch_xla", needs=(("torch_xla", "torch_xla"),), says="AdamW for XLA devices"),
    _torch("adamw_torch_npu_fused", needs=(("torch_npu", "torch_npu"),), says="AdamW for NPUs"),
    # transformers sets both so and reads neither; files write them all the same
    _torch("adafactor", {"scale_parameter": (False,), "relative_step": (False,)}, has_betas=False, paper="1804.04235",
           says="Adam with factored states, at a rate from outside"),
    OptimizerRow(
        name="adamw_anyprecision",
        needs=(("torchdistx", "git+https://github.com/pytorch/torchdistx"),),
        settings={"use_kahan_summation": False, **dict.fromkeys(
            ("momentum_dtype", "variance_dtype"), ("float32", "bfloat16", "float16")),
            "compensation_buffer_dtype": ("bfloat16", "float32", "float16")},
        says="AdamW with states of a chosen type",
    ),
    _torch("adamw_torch_4bit", _8BIT, needs=(("torchao", "torchao"),), says="AdamW with states of 4 bits"),
    _torch("adamw_torch_8bit", _8BIT, needs=(("torchao", "torchao"),), says="AdamW with states of 8 bits"),
    _bnb("ademamix", _ADEMAMIX, paper="2409.03137", says="Adam with a second, slower memory of gradients"),
    _torch("sgd", {"momentum": 0.0, "dampening": 0.0, "nesterov": False}, has_betas=False, says="plain gradient steps"),
    _torch("adagrad", {"lr_decay": 0.0, "eps": 1e-10}, has_betas=False, says="Adagrad"),
    _bnb("adamw_bnb_8bit", paper="2110.02861", says="AdamW with states of 8 bits"),
    _bnb("adamw_8bit", paper="2110.02861", says="the same by its other name"),
    _bnb("ademamix_8bit", _ADEMAMIX, says="AdEMAMix with states of 8 bits"),
    _bnb("lion_8bit", has_epsilon=False, says="Lion with states of 8 bits"),
    _bnb("lion_32bit", has_epsilon=False, paper="2302.06675", says="Lion: steps by the sign of the momentum"),
    _bnb("paged_adamw_32bit", says="AdamW; states move to the CPU when the GPU is full"),
    _bnb("paged_adamw_8bit", says="the same with states of 8 bits"),
    _bnb("paged_ademamix_32bit", _ADEMAMIX, says="AdEMAMix; states move to the CPU when the GPU is full"),
    _bnb("paged_ademamix_8bit", _ADEMAMIX, says="the same with states of 8 bits"),
    _bnb("paged_lion_32bit", has_epsilon=False, says="Lion; states move to the CPU when the GPU is full"),
    _bnb("paged_lion_8bit", has_epsilon=False, says="the same with states of 8 bits"),
    _torch("rmsprop", _RMSPROP, has_betas=False, says="RMSprop"),
    _bnb("rmsprop_bnb", {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8}, has_betas=False, says="RMSprop"),
    _bnb("rmsprop_bnb_8bit", {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8}, has_betas=False,
         says="RMSprop with states of 8 bits"),
    _bnb("rmsprop_bnb_32bit", {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8}, has_betas=False, says="RMSprop"),
    _projected("galore_adamw", "AdamW on gradients projected to a low rank"),
    _projected("galore_adamw_8bit", "the same with states of 8 bits; needs a GPU"),
    _projected("galore_adafactor", "Adafactor on gradients projected to a low rank", has_betas=False),
    _projected("galore_adamw_layerwise", f"galore_adamw{_LAYERWISE}"),
    _projected("galore_adamw_8bit_layerwise", f"galore_adamw_8bit{_LAYERWISE}"),
    _projected("galore_adafactor_layerwise", f"galore_adafactor{_LAYERWISE}", has_betas=False),
    _torch("lomo", has_betas=False, in_backward=True, paper="2306.09782",
           says="gradient steps during the backward pass, so that no gradient is kept and no state"),
    _torch("adalomo", has_betas=False, in_backward=True, paper="2310.10195",
           says="Adafactor's steps, scaled by the size of each weight, during the backward pass"),
    _torch("grokadamw", _GROK, needs=(("grokadamw", "grokadamw"),), says="AdamW with amplified slow gradients"),
    *(
        _torch(f"schedule_free_{kind}", _FREE, needs=(("schedulefree", "schedulefree"),), has_betas=kind != "sgd",
               averages=True, paper="2405.15682", says=f"{shown} that needs no schedule: it averages its weights")
        for kind, shown in (("radam", "RAdam"), ("adamw", "AdamW"), ("sgd", "SGD"))
    ),
    _projected("apollo_adamw", "AdamW whose rates come from gradients projected to a low rank"),
    _projected("apollo_adamw_layerwise", f"apollo_adamw{_LAYERWISE}"),
    _torch("stable_adamw", {"decouple_lr": False, "max_lr": float, "kahan_sum": bool},
           needs=(("optimi", "torch-optimi"),), paper="2304.13013", says="AdamW with Adafactor's clipping of updates"),
    _torch("muon", {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": ("match_rms_adamw", "original")},
           paper="2502.16982", says="orthogonal updates of the hidden matrices; AdamW for all other weights"),
    _torch("badam", {"switch_every": 50, "switch_mode": ("random", "ascending", "descending"), "ends": False},
           whole_weights=True, paper="2404.02827", says="AdamW on one decoder layer at a time"),
    OptimizerRow(name="adam_mini", needs=(("adam_mini", "adam-mini"),), whole_weights=True, paper="2406.16793",
                 says="AdamW with one second moment per head or neuron"),
)  # fmt: skip

OPTIMIZERS: dict[str, OptimizerRow] = {row.name: row for row in _ROWS}
