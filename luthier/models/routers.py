"""The loss that balances the load of experts (Switch Transformer, https://arxiv.org/abs/2101.03961, equations 4 to 6).

    loss = E sum_e f_e P_e      f_e: how often expert e was chosen, P_e: the router's probability of it,
                                both the mean over all tokens of a step and all layers with experts

f and P are sums over tokens, and their product is not: what micro-batches give alone does not add up to what the whole
step gives. So the choices of the whole step are counted first, on all ranks, without gradients; then each micro-batch
adds its own part of P, and the parts add up to the step's loss. Padding counts nowhere; a token that several segments
begin with in common (the prompt of a pair) counts once for each of them, whether it is computed once or several times.

N tokens of a micro-batch, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from luthier.config.schema import TrainConfig
from luthier.errors import ModelError
from luthier.models import unsharded_class
from luthier.records import Batch
from luthier.writing import counted

Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loads:
    """What routers did with some tokens: how often each expert was chosen, the sum of its probabilities, and the number
    of pairs of a token and a layer. Sums, so they add up."""

    chosen_E: torch.Tensor  # float64
    probability_E: torch.Tensor  # float32, differentiable
    count: torch.Tensor  # float64 scalar

    def plus(self, other: Loads) -> Loads:
        return Loads(
            chosen_E=self.chosen_E + other.chosen_E,
            probability_E=self.probability_E + other.probability_E,
            count=self.count + other.count,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Routers:
    """The routers of a model, which can be watched. Mutable on purpose: the trainer begins and ends watching."""

    modules: list[nn.Module]
    index: int  # of the logits among what a router gives
    num_experts: int
    top_k: int
    coefficient: float
    step: Loads | None = None  # of the whole step and all ranks, while its micro-batches are computed
    _is_on: bool = False
    _with_gradients: bool = True
    _logits: list[torch.Tensor] = field(default_factory=list)
    _found: Loads | None = None

    def __post_init__(self) -> None:
        for module in self.modules:
            module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, arguments: tuple[Any, ...], given: Any) -> None:
        if self._is_on and torch.is_grad_enabled() == self._with_gradients:
            logits = given[self.index] if isinstance(given, tuple) else given
            self._logits.append(logits.reshape(-1, self.num_experts))

    @contextmanager
    def counting(self, *, with_gradients: bool) -> Iterator[None]:
        """Within it forward passes with gradients are counted (a reference's have none), or those without; `taken`
        gives what was found."""
        self._found, self._with_gradients = None, with_gradients
        self._logits.clear()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            self._logits.clear()

    def taken(self) -> Loads:
        """What was found since `counting` began, of all forward passes within it."""
        assert self._found is not None, "no forward pass was counted"
        return self._found

    def count(self, batch: Batch) -> None:
        """Count a forward pass of this batch that is just over. Raises `ModelError` where routers saw other tokens."""
        if not self._is_on or not self._logits:
            return
        logits, self._logits = self._logits, []
        times_N = times_shown(batch).to(logits[0].device)
        if any(len(each) != len(times_N) for each in logits):
            raise ModelError(
                f"its routers saw {counted(len(logits[0]), 'token')} of "
                f"{counted(len(times_N), 'position')}, so their load cannot be counted",
                hint="set train.router_aux_loss_coef: 0",
            )
        for each_NE in logits:
            loads = loads_of(each_NE, times_N, self.top_k)
            self._found = loads if self._found is None else self._found.plus(loads)

    def step_begins(self, own: Loads, reduce: Reduce) -> None:
        """The whole step's loads, of what this rank's micro-batches give. Every rank has to ask at once."""
        sums = reduce(torch.cat([own.chosen_E, own.probability_E.detach().double(), own.count[None]]))
        first, second = sums[: self.num_experts], sums[self.num_experts : -1]
        self.step = Loads(chosen_E=first, probability_E=second, count=sums[-1])

    def loss(self, own: Loads) -> torch.Tensor:
        """This micro-batch's part of the step's loss, without the coefficient; the parts of all ranks add up."""
        assert self.step is not None, "the step has not begun"
        count = self.step.count.clamp(min=1)
        weights_E = (self.num_experts * self.step.chosen_E / count / count).to(own.probability_E.dtype)
        return (weights_E * own.probability_E).sum()


def router_names(model: nn.Module) -> list[str]:
    """The names of the modules that choose experts: beside a layer's ``experts`` they are ``gate`` or ``router``."""
    return [
        f"{name}.{child}"
        for name, module in model.named_modules()
        for child, _ in module.named_children()
        if child in ("gate", "router") and hasattr(module, "experts")
    ]


def choose_experts(model: PreTrainedModel, asked: str) -> None:
    """Set what computes the experts (``model.experts_implementation``). Raises `ModelError` where the model has no
    experts, or cannot have them computed so."""
    if asked == "auto":
        return
    name = type(model).__name__
    if not router_names(model):
        what = f"model.experts_implementation is {asked}, and {name} has no experts"
        raise ModelError(what, hint="remove the key")
    try:
        model.set_experts_implementation(asked)
    except (ValueError, ImportError, RuntimeError) as error:
        what = f"model.experts_implementation {asked} cannot be had for {name}: {error}"
        raise ModelError(what, hint="set model.experts_implementation: auto") from error


def loads_of(logits_NE: torch.Tensor, times_N: torch.Tensor, top_k: int) -> Loads:
    """The loads of one layer. ``times_N`` says how often each token counts, which is 0 for padding."""
    probabilities_NE = logits_NE.softmax(dim=-1)
    chosen_NK = probabilities_NE.detach().topk(top_k, dim=-1).indices
    weights_NE = torch.zeros_like(probabilities_NE, dtype=torch.float64).scatter_(1, chosen_NK, 1.0)
    return Loads(
        chosen_E=(weights_NE * times_N[:, None]).sum(dim=0),
        probability_E=(probabilities_NE.float() * times_N[:, None]).sum(dim=0),
        count=times_N.sum(dtype=torch.float64),
    )


def times_shown(batch: Batch) -> torch.Tensor:
    """int64[B * T]: in how many segments each position of the flattened batch is; 0 for padding."""
    rows, width = batch.model_inputs["input_ids"].shape
    times_BT = torch.zeros((rows, width), dtype=torch.int64)
    for row, branches in enumerate(batch.branches):
        leaves = [0] * len(branches)
        for number in range(len(branches) - 1, -1, -1):  # a branch comes after its parent
            leaves[number] = leaves[number] or 1
            if (parent := branches[number].parent) >= 0:
                leaves[parent] += leaves[number]
        ends = accumulate((branch.length for branch in branches), initial=0)
        for (begin, end), count in zip(pairwise(ends), leaves, strict=True):
            times_BT[row, begin:end] = count
    return times_BT.flatten()


def find_routers(model: nn.Module, asked: float | None) -> Routers | None:
    """The routers of a model for which transformers has this loss; None where there are none or the coefficient is 0.
    ``asked`` None: the coefficient of the model's own config, as TRL does.

    Raises `ModelError` where a coefficient is asked for and the model has no such loss.
    """
    config: Any = model.config
    text = config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", None) if asked is None else asked
    if not coefficient:
        return None
    spec = _recorder(model)
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    modules = [module for module in model.modules() if spec is not None and isinstance(module, spec.target_class)]
    if spec is None or not modules or not num_experts:
        if asked is None:
            return None
        raise ModelError(
            f"train.router_aux_loss_coef is {asked:g}, and {type(model).__name__} has no loss that balances experts",
            hint="remove it; there is such a loss for Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss and related models",
        )
    return Routers(
        modules=modules,
        index=spec.index,
        num_experts=int(num_experts),
        top_k=int(text.num_experts_per_tok),
        coefficient=float(coefficient),
    )


def balanced_routers(model: nn.Module, train: TrainConfig) -> Routers | None:
    """The routers whose load a run is to balance. Raises `ModelError` as `find_routers`, and where the run compiles the
    layers that they stand in."""
    asked = train.router_aux_loss_coef
    found = find_routers(model, asked)
    if found is not None and train.torch_compile and asked:
        raise ModelError(
            f"train.router_aux_loss_coef is {asked:g}, and what routers do in compiled layers is not seen",
            hint="set train.torch_compile: false, or train.router_aux_loss_coef: 0",
        )
    return found


def _recorder(model: nn.Module) -> Any:
    """How transformers takes the router's logits of a model whose file has this loss."""
    if not hasattr(sys.modules[unsharded_class(model).__module__], "load_balancing_loss_func"):
        return None
    for module in model.modules():
        spec = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if hasattr(spec, "target_class"):
            return spec
    return None
