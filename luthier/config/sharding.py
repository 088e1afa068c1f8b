"""Checks of ``runtime.sharding``: what needs a whole weight somewhere cannot be had of shares."""

from __future__ import annotations

from collections.abc import Iterator

from luthier.config.choices import Precision, Sharding
from luthier.config.draft import Draft
from luthier.errors import Problem

# Those that look at each number by itself: the norm, root or factors of a share are not those of the weight.
OPTIMIZERS_OF_SHARES = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


def check_sharding(draft: Draft) -> Iterator[Problem]:
    """Problems of other keys with ``runtime.sharding: fsdp``."""
    config = draft.config
    if config.runtime.sharding is Sharding.NONE:
        return
    cited = f"{draft.cite('runtime.sharding')} is {config.runtime.sharding}"
    if config.train.torch_compile:
        yield draft.problem("train.torch_compile", f"a divided model is not compiled, and {cited}", "set it to false")
    if config.train.precision is Precision.FP16:
        what = f"each rank would scale the loss by what its own share overflows, and {cited}"
        yield draft.problem("train.precision", what, "set train.precision: bf16")
    optim: str = config.train.optim
    if optim not in OPTIMIZERS_OF_SHARES:
        what = f"{optim} is not known to update a share of a weight as it does the whole, and {cited}"
        yield draft.problem("train.optim", what, f"choose {', '.join(OPTIMIZERS_OF_SHARES)}")
    if config.adapter.merge:
        what = f"the base is nowhere whole at the end of the run, and {cited}"
        yield draft.problem("adapter.merge", what, "set adapter.merge: false, and merge the saved adapter with PEFT")
    initial = config.adapter.init_lora_weights
    if isinstance(initial, str) and initial.startswith(("pissa", "olora")):
        what = f"{initial} moves a part of the base into the adapter, to be taken out of whole weights, and {cited}"
        yield draft.problem("adapter.init_lora_weights", what, "set adapter.init_lora_weights: true")
