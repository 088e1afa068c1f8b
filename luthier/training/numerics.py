"""What decides how numbers are computed: the run description, whatever the environment says; and what was in force.

accelerate reads dozens of variables, which `accelerate launch` sets: mixed precision, compilers, float8, devices, steps
of accumulation. For the length of a run none of them is there, and torch's own switches are where we put them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn

from luthier.config.choices import Precision
from luthier.errors import TrainingError, UserError
from luthier.records import Address

NOT_FOLLOWED = "ACCELERATE_"
"""Variables of this prefix change how accelerate and transformers compute; where to divide a model is asked before."""

SPOKEN_OF = (
    "MIXED_PRECISION",
    "DYNAMO_BACKEND",
    "GRADIENT_ACCUMULATION_STEPS",
    "TORCH_DEVICE",
    "USE_CPU",
    "FP8_BACKEND",
)
_QUIET = {"", "no", "none", "false", "0", "1"}

# oneDNN reads this when torch is imported, so it cannot be taken back: float32 products would be those of fewer bits
_LOSSY = dict.fromkeys(("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"), ("", "strict"))

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@contextmanager
def own_numerics(environment: MutableMapping[str, str] = os.environ) -> Iterator[list[str]]:
    """Nothing but the run description decides how numbers are computed. Yields what was asked for and is not followed,
    as ``NAME=value``. Afterwards everything is as it was.

    Raises `UserError` for a variable that cannot be undone.
    """
    refuse_lossy(environment)
    taken = {name: environment.pop(name) for name in list(environment) if name.startswith(NOT_FOLLOWED)}
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        told = [name for name in taken if name.removeprefix(NOT_FOLLOWED) in SPOKEN_OF]
        yield [f"{name}={taken[name]}" for name in told if taken[name].lower() not in _QUIET]
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
        for name in list(environment):
            if name.startswith(NOT_FOLLOWED):
                del environment[name]  # what accelerate has set for itself in this run
        environment.update(taken)


def refuse_lossy(environment: Mapping[str, str]) -> None:
    """Raise `UserError` where a variable makes float32 something less, in a library that has read it already."""
    for name, harmless in _LOSSY.items():
        if environment.get(name, "").lower() not in harmless:
            raise UserError(
                f"{name}={environment[name]} makes products of float32 on a CPU less exact than float32",
                hint="leave the variable out, and choose train.precision instead",
            )


def check_in_force(accelerator: Accelerator, asked: Precision) -> None:
    """Raise `UserError` unless the accelerator computes as the run description says."""
    wanted = {"mixed precision": "no" if asked is Precision.FP32 else asked.value, "compiler": "NO"}
    found = {
        "mixed precision": str(accelerator.mixed_precision),
        "compiler": str(accelerator.state.dynamo_plugin.backend.value).upper(),
    }
    for name, value in wanted.items():
        if found[name] != value:
            raise UserError(
                f"train.precision is {asked}, and accelerate's {name} is {found[name]}, not {value}",
                hint="make no Accelerator before the run, or run it in a process of its own",
            )


def computed_in(accelerator: Accelerator, model: nn.Module) -> str:
    """What torch computes the model in, asked of torch: autocast's type where it is on, else those of the weights."""
    device = accelerator.device.type
    with accelerator.autocast():
        if torch.is_autocast_enabled(device):
            return SHORT[torch.get_autocast_dtype(device)]
    found = Counter(SHORT.get(p.dtype, str(p.dtype)) for p in model.parameters() if p.is_floating_point())
    return " and ".join(name for name, _ in found.most_common())


def weight_types(model: nn.Module) -> str:
    """The types that the weights are stored in, those of most numbers first: ``bfloat16 and float32``."""
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        found[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return " and ".join(name for name, _ in found.most_common())


def optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What an optimizer is by its class and groups: ``name``, and ``weight_decay``, of each group that has weights."""
    kind = type(optimizer)
    decays = sorted({group.get("weight_decay", 0.0) for group in optimizer.param_groups if group["params"]})
    return {"name": f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}", "weight_decay": decays}


# --------------------------------------------------------------------------------------------------------------------
# A step whose loss or gradient is no number ends the run before it spoils the weights.


MAX_ROWS_NAMED = 8


def check_finite(
    losses: Sequence[tuple[torch.Tensor, tuple[Address, ...]]], norm: torch.Tensor | float | None, *, step: int
) -> None:
    """Raise `TrainingError`, with the rows, if the loss of one of a step's micro-batches, or the ``norm`` of the step's
    gradient (None: not to be looked at), is not finite."""
    values = [loss for loss, _ in losses]
    if norm is not None:
        values.append(torch.as_tensor(norm, dtype=torch.float32, device=values[0].device))
    if torch.isfinite(torch.stack(values)).all():  # one look at the device a step
        return
    guilty = [addresses for loss, addresses in losses if not torch.isfinite(loss)]
    rows = [str(row) for addresses in guilty or [a for _, a in losses] for row in addresses]
    named = ", ".join(rows[:MAX_ROWS_NAMED]) + (
        f" and {len(rows) - MAX_ROWS_NAMED} more" if len(rows) > MAX_ROWS_NAMED else ""
    )
    what = "the loss" if guilty else f"the gradient's norm ({norm if norm is None else float(norm)})"
    raise TrainingError(
        f"step {step}: {what} is not a finite number; the weights are those of step {step - 1}\n"
        f"  rows of the batch: {named}",
        hint="lower train.learning_rate, raise train.warmup_steps, use train.precision bf16 or fp32, or look at "
        "those rows",
    )


def without_dropout(model: nn.Module) -> list[str]:
    """Set all probabilities of dropout in a model to 0, and give the names that were above: ``attention_dropout 0.1``.
    What its config says stays, and is saved."""
    found = Counter[str]()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            found[f"dropout {module.p:g}"] += 1
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float) and value > 0:
                found[f"{name} {value:g}"] += 1
                setattr(module, name, 0.0)
    return sorted(found)
