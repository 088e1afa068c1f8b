"""Optimizers that torch has no class for: two kinds of update in one, one block of weights at a time, updates during
the backward pass; and the states of other packages' optimizers as plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from luthier.config.choices import Offload

Group = dict[str, Any]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for other weights, both torch's own, with one list of groups and one state.

    Muon is defined for matrices alone; its authors leave embeddings and the output layer to AdamW
    (https://kellerjordan.github.io/posts/muon/).
    """

    def __init__(
        self, hidden: list[Group], others: list[Group], *, muon: Mapping[str, Any], adamw: Mapping[str, Any]
    ) -> None:
        self._parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(hidden, **muon),
            "adamw": torch.optim.AdamW(others, **adamw),
        }
        groups = [{**group, "kind": kind} for kind, part in self._parts.items() for group in part.param_groups]
        super().__init__(groups, {"lr": adamw["lr"]})  # which some schedules read

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Both updates. A closure is not called."""
        for kind, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["kind"] == kind]
            part.state = self.state
            part.step()


class BlockAdamW(torch.optim.AdamW):
    """AdamW on one block of weights, then on the next (BAdam, arXiv:2404.02827): all others need neither gradients nor
    states. States begin anew with each block.

    ``blocks``: of each, its groups. After ``switch_every`` updates comes the next, in ``switch_mode`` order: ``random``
    goes through all of them in an order of its own each time, which ``seed`` decides. The number of updates is kept in
    the groups, so that a state that is loaded goes on with the same block.
    """

    def __init__(
        self, blocks: Sequence[list[Group]], *, switch_every: int, switch_mode: str, seed: int, **settings: Any
    ) -> None:
        self.num_blocks, self.switch_every, self.switch_mode, self.seed = len(blocks), switch_every, switch_mode, seed
        groups = [{**group, "block": number, "updates": 0} for number, block in enumerate(blocks) for group in block]
        super().__init__(groups, **settings)
        self.register_load_state_dict_post_hook(lambda _: self._activate())
        self._activate()

    @property
    def block(self) -> int:
        """The number of the block that the next update changes."""
        done, place = divmod(int(self.param_groups[0]["updates"]) // self.switch_every, self.num_blocks)
        match self.switch_mode:
            case "ascending":
                return place
            case "descending":
                return self.num_blocks - 1 - place
            case "random":
                return int(np.random.default_rng([self.seed, done]).permutation(self.num_blocks)[place])
            case _:
                raise AssertionError(self.switch_mode)

    def step(self, closure: Any = None) -> Any:
        """Update the block, and go to the next when it is time."""
        loss = super().step(closure)
        before = self.block
        for group in self.param_groups:
            group["updates"] += 1
        if self.block != before:
            self._activate()
        return loss

    def _activate(self) -> None:
        active = self.block
        for group in self.param_groups:
            for weight in group["params"]:
                weight.requires_grad_(group["block"] == active)
                if group["block"] != active:
                    weight.grad = None
                    self.state.pop(weight, None)


class BackwardUpdates:
    """Updates during the backward pass: each weight is changed as soon as its gradient is there, and the gradient's
    memory is given back (LOMO, arXiv:2306.09782).

    The norm of the whole gradient is known only when no part of it is left. So where gradients are clipped a pass
    before measures the norm and changes nothing. ``waiting`` is the backward pass that `update` is to do, ``norm`` what
    was measured for it.
    """

    def __init__(self, model: nn.Module, step: Callable[[], None]) -> None:
        self.waiting: Callable[[], None] | None = None
        self.norm: torch.Tensor | None = None
        self._step, self._is_measuring, self._scale = step, False, 1.0
        self._squares: list[torch.Tensor] = []
        for weight in model.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._take)

    def measure(self, backward: Callable[[], None]) -> None:
        """Find the norm of the gradient by a backward pass that changes nothing."""
        self._is_measuring = True
        try:
            backward()
        finally:
            self._is_measuring = False
        self.norm = self._drained()

    def update(self, limit: float) -> torch.Tensor:
        """Change all weights, by gradients that are scaled down to ``limit`` if their norm was measured and is higher.
        Gives the norm of the gradient as it was."""
        assert self.waiting is not None
        self._scale = 1.0 if self.norm is None else min(1.0, limit / (float(self.norm) + 1e-6))
        self.waiting()
        self.waiting = self.norm = None
        return self._drained()

    def _drained(self) -> torch.Tensor:
        norm = torch.stack(self._squares).sum().sqrt() if self._squares else torch.zeros(())
        self._squares.clear()
        return norm

    def _take(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        square = weight.grad.float().square().sum()
        self._squares.append(square)
        if not self._is_measuring and bool(torch.isfinite(square)):  # else the trainer stops the run by the norm
            if self._scale != 1.0:
                weight.grad.mul_(self._scale)
            self._step()
        weight.grad = None


# ------------------------------------------------------------------------------------------------------ loss scaler


class LossScaler(torch.amp.GradScaler):
    """That of fp16, of which torch's refuses a step in which no weight has a gradient, as of text where only a tower is
    trained. Such a step is taken as without a scaler."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self.scale(torch.zeros((), device=device))  # a rank may get its first gradients from the others
        self._has_seen = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if _has_gradients(optimizer):
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self._has_seen = _has_gradients(optimizer)
        return super().step(optimizer, *args, **kwargs) if self._has_seen else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if self._has_seen:
            super().update(new_scale)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(weight.grad is not None for group in optimizer.param_groups for weight in group["params"])


# ---------------------------------------------------------------------------------------------------------- offload


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer over copies of the weights in the CPU's memory: its states and its updates are there. Each step
    fetches the gradients and brings the weights back. On a CPU it computes the same and saves nothing.

    ``inner`` has made no step yet. Its groups list the copies from here on.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in inner.param_groups:
            copies = [weight.detach().to("cpu", copy=True) for weight in group["params"]]
            self._pairs += zip(group["params"], copies, strict=True)
            group["params"] = copies
        super().__init__(inner.param_groups, inner.defaults)
        for weight, copied in self._pairs:  # some have states before their first step, as Adagrad in torch 2.9
            for name, value in inner.state.get(weight, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                self.state[copied][name] = value.to("cpu", copy=True) if is_tensor else value

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update. A closure is not called."""
        for weight, copied in self._pairs:
            copied.grad = None if weight.grad is None else weight.grad.to("cpu", copy=True)
        # a state that was loaded has put others in their place
        self._inner.param_groups, self._inner.state = self.param_groups, self.state
        self._inner.step()
        for weight, copied in self._pairs:
            if copied.grad is not None:
                weight.copy_(copied)
                copied.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the weights."""
        for weight, _ in self._pairs:
            weight.grad = None


@contextmanager
def activations_kept(model: nn.Module, offload: Sequence[Offload]) -> Iterator[None]:
    """Where activations are offloaded, what forward passes within it keep for their backward pass is in the CPU's
    memory until then; weights stay where they are. On a CPU that computes the same and saves nothing."""
    if Offload.ACTIVATIONS not in offload:
        yield
        return
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        is_weight = tensor.untyped_storage().data_ptr() in weights
        return tensor.device, tensor if is_weight or tensor.is_sparse else tensor.to("cpu", copy=True)

    def unpack(kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = kept
        return tensor.to(device)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


# ---------------------------------------------------------------------------------------------------- states as data

_PROJECTORS = {
    "galore_torch": ("galore_torch.galore_projector", "GaLoreProjector"),
    "random": ("apollo_torch.random_projector", "GradientProjector"),
    "svd": ("apollo_torch.svd_projector", "GaLoreProjector"),
}


def tell_projectors(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's state say what its projectors are in plain data, and take such a state.

    GaLore and APOLLO keep an object for each weight, which holds the matrix that gradients are projected by. Its
    numbers are put in their order in memory after each step, as a state has them that was written and read: a product
    with a matrix that is in another order is rounded otherwise.
    """
    optimizer.register_step_post_hook(_in_order)
    optimizer.register_state_dict_post_hook(_with_data)
    optimizer.register_load_state_dict_post_hook(_with_projectors)


def _in_order(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for values in optimizer.state.values():
        projector = vars(values["projector"]) if "projector" in values else {}
        for name, value in projector.items():
            if isinstance(value, torch.Tensor):
                projector[name] = value.contiguous()
            elif isinstance(value, list | tuple):
                projector[name] = [each.contiguous() if isinstance(each, torch.Tensor) else each for each in value]


def _with_data(_: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    # the dicts of single weights are those of the optimizer itself
    state = {
        number: {name: _plain(value) if name == "projector" else value for name, value in values.items()}
        for number, values in found["state"].items()
    }
    return {**found, "state": state}


def _plain(projector: object) -> dict[str, Any]:
    # torch cannot load texts inside of a state; the only one stands in the group, too
    return {name: value for name, value in vars(projector).items() if not isinstance(value, str)}


def _with_projectors(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if "rank" not in group:
            continue
        package, name = _PROJECTORS[group.get("proj", "galore_torch")]
        kind = getattr(import_module(package), name)
        for weight in group["params"]:
            values = optimizer.state.get(weight, {})
            if isinstance(values.get("projector"), dict):
                projector = kind(group["rank"], proj_type=group["proj_type"])
                vars(projector).update(values["projector"])
                values["projector"] = projector
