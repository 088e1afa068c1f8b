"""State of an optimizer, a schedule, random numbers: as JSON and safetensors, which hold data and nothing that runs.

A state is made of None, bools, numbers, strings, lists, tuples, dicts with simple keys, arrays of numpy, and tensors.
``NAME.json`` holds its structure, ``NAME.safetensors`` the tensors, where there are any.

    {"step": tensor(3.), "betas": (0.9, inf)}  ->  NAME.json         {"dict": [["step", {"tensor": "step"}],
                                                                      ["betas", {"tuple": [0.9, {"float": "inf"}]}]]}
                                                   NAME.safetensors  step
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from luthier.errors import CheckpointError
from luthier.models import sharding
from luthier.training.folder import FILES, reported
from luthier.writing import counted

STRUCTURE, TENSORS = ".json", ".safetensors"
READING_FAULTS = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, RecursionError, OverflowError,
    MemoryError, struct.error, SafetensorError,
)  # fmt: skip
"""What reading or taking over a file with unexpected content may raise: our own checks, JSON, safetensors, torch."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def write_state(folder: Path, name: str, state: object) -> None:
    """Write a state. Raises `CheckpointError` if it holds something that is no data, with its place in the state."""
    tensors: dict[str, torch.Tensor] = {}
    content = json.dumps(_encoded(state, name, "", tensors), allow_nan=False)
    if tensors:
        with reported(folder / (name + TENSORS)):
            save_file(_apart(tensors), folder / (name + TENSORS))
    FILES.write(folder / (name + STRUCTURE), content.encode())


def check_writable(name: str, state: object) -> None:
    """Raise `CheckpointError` where `write_state` would, for what a state holds."""
    _encoded(state, name, "", {})


def read_state(folder: Path, name: str) -> Any:
    """What `write_state` wrote, tensors on the CPU. Raises `CheckpointError` if it cannot be read."""
    path = folder / (name + TENSORS)
    if not path.exists():
        return _read(folder, name, _no_tensor)
    with _opened(path) as tensors:
        return _read(folder, name, tensors.get_tensor)


def check_state(folder: Path, name: str) -> Any:
    """As `read_state` without reading any tensor: each is an empty one of its shape, on the meta device."""
    path = folder / (name + TENSORS)
    if not path.exists():
        return _read(folder, name, _no_tensor)
    with _opened(path) as tensors:

        def outline(key: str) -> torch.Tensor:
            whole = tensors.get_slice(key)
            shape = whole.get_shape()
            some = whole[:0] if shape else tensors.get_tensor(key)
            return torch.empty(shape, dtype=some.dtype, device="meta")

        return _read(folder, name, outline)


def has_state(folder: Path, name: str) -> bool:
    """Whether `write_state` wrote it there."""
    return (folder / (name + STRUCTURE)).exists()


def _read(folder: Path, name: str, tensor: Callable[[str], torch.Tensor]) -> object:
    path = folder / (name + STRUCTURE)
    try:
        return _decoded(json.loads(path.read_bytes(), parse_constant=_no_constant), tensor)
    except READING_FAULTS as error:
        raise unreadable(path, error) from error


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except READING_FAULTS as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """The error for a file of a checkpoint that is not what was written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(
        f"{path} cannot be read: {reason[:200] or type(error).__name__}", hint="go on from another checkpoint"
    )


# -------------------------------------------------------------------------------------------------------- encoding

QUANTIZED_STATES = {"OptimState8bit": "torchao.optim.subclass_8bit", "OptimState4bit": "torchao.optim.subclass_4bit"}
"""Optimizer states of few bits that are tensors of a kind of their own: plain tensors and numbers make them."""


def _encoded(value: object, name: str, at: str, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case torch.Tensor() if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_sparse:
            key = at or "value"
            tensors[key] = value.detach().contiguous()
            return {"tensor": key}
        case torch.Tensor() if type(value).__name__ in QUANTIZED_STATES:
            of_kind: Any = value
            parts, settings = of_kind.__tensor_flatten__()
            inner = {part: getattr(value, part) for part in parts}
            content = {"kind": type(value).__name__, "parts": inner, "settings": list(settings)}
            return {"quantized": _encoded(content, name, at, tensors)}
        case np.ndarray() if value.dtype.kind in "biuf":
            return {"array": [value.dtype.str, list(value.shape), value.reshape(-1).tolist()]}
        case np.generic() if value.dtype.kind in "biuf":
            return _encoded(value.item(), name, at, tensors)
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case list():
            return [_encoded(each, name, _below(at, number), tensors) for number, each in enumerate(value)]
        case tuple():
            return {"tuple": [_encoded(each, name, _below(at, number), tensors) for number, each in enumerate(value)]}
        case Mapping() if all(isinstance(key, str | int | float | bool | None) for key in value):
            pairs = [[key, _encoded(each, name, _below(at, key), tensors)] for key, each in value.items()]
            return {"dict": pairs}
        case _:
            raise CheckpointError(
                f"the {name} state holds a {type(value).__module__}.{type(value).__qualname__} at {at or 'its top'}, "
                "which is not plain data: it cannot be written into a checkpoint",
                hint="choose another train.optim, or set output.save_only_model: true",
            )


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as safetensors wants them: none shares its memory with another."""
    seen: set[int] = set()
    found = {}
    for key, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[key] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found


def _below(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


# -------------------------------------------------------------------------------------------------------- decoding


def _decoded(found: object, tensor: Callable[[str], torch.Tensor]) -> object:
    if isinstance(found, list):
        return [_decoded(each, tensor) for each in found]
    if not isinstance(found, dict):
        return found
    ((kind, content),) = found.items()
    match kind:
        case "float":
            return _NOT_FINITE[content]
        case "tensor":
            return tensor(content)
        case "array":
            dtype, shape, values = content
            return np.array(values, dtype=np.dtype(dtype)).reshape(shape)
        case "quantized":
            state: Any = _decoded(content, tensor)
            quantized = getattr(import_module(QUANTIZED_STATES[state["kind"]]), state["kind"])
            return quantized.__tensor_unflatten__(state["parts"], state["settings"])
        case "dtype":
            return _named_dtype(content)
        case "tuple":
            return tuple(_decoded(each, tensor) for each in content)
        case "dict":
            return {key: _decoded(each, tensor) for key, each in content}
        case _:
            raise ValueError(f"{kind!r} is not a kind of value")


def _named_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a number type")
    return dtype


def _no_tensor(key: str) -> torch.Tensor:
    raise ValueError(f"the tensor {key!r} is missing, as there is no file of tensors")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


# --------------------------------------------------------------------------------------------------------------------
# What a run has to remember beside its weights to go on exactly: the optimizer, its two points, random numbers.
#
# Schedule-free optimizers (https://arxiv.org/abs/2405.15682) train at one point of weights, y, and have learned
# another, x, their average: ``optimizer.eval()`` puts x into the model, ``optimizer.train()`` y. Everything that
# looks at the weights (evaluation, answers, checkpoints, the final model) is to see x. Going to x and back rounds, so
# y is kept aside and put back bit by bit: a run that evaluates or saves takes the same steps as one that does not.


OF_WEIGHTS_SHAPE = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "z"})
"""Tensors that optimizers keep for a weight, and that have its shape."""

NUMPY_WORDS = 624  # of the Mersenne twister


# ------------------------------------------------------------------------------------------------------- optimizer


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, out of accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def has_two_points(optimizer: object) -> bool:
    """Whether it evaluates at other weights than it trains at: it has a ``train()`` and an ``eval()`` of its own."""
    plain = plain_optimizer(optimizer)
    return all(callable(getattr(plain, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluation_point(optimizer: object) -> Iterator[list[torch.Tensor] | None]:
    """The model has the weights that were learned; afterwards those that are trained, bit by bit. Yields the latter, on
    the CPU and in the optimizer's order, or None for an optimizer that has one point."""
    if not has_two_points(optimizer):
        yield None
        return
    plain: Any = plain_optimizer(optimizer)
    trained = [_own_part(weight).to("cpu", copy=True) for weight in _weights(plain)]
    plain.eval()
    try:
        yield trained
    finally:
        plain.train()
        with torch.no_grad():
            for weight, value in zip(_weights(plain), trained, strict=True):
                _own_part(weight).copy_(value)


def go_to_evaluation_point(optimizer: object) -> None:
    """Training is over: the model has the weights that were learned from here on."""
    if has_two_points(optimizer):
        plain: Any = plain_optimizer(optimizer)
        plain.eval()


def optimizer_state(
    optimizer: object, trained: list[torch.Tensor] | None, *, sharded: bool, keep: bool
) -> dict[str, object]:
    """The state at the evaluation point; ``trained`` are the weights of the other one. Of a sharded model every rank
    has to ask at once, and gets the whole if it ``keep``s it."""
    plain = plain_optimizer(optimizer)
    if not sharded:
        return {"optimizer": plain.state_dict(), "trained": trained}
    whole = None
    if trained is not None:
        parts = zip(_weights(plain), trained, strict=True)
        whole = [sharding.undivided(_as_part(part, weight)).cpu() for weight, part in parts]
    return {"optimizer": sharding.whole_optimizer_state(plain, keep=keep), "trained": whole}


def check_optimizer_state(state: Any) -> None:
    """Raise one of `READING_FAULTS` if this is no state of any optimizer."""
    found = state["optimizer"]
    numbers = [number for group in found["param_groups"] for number in group["params"]]
    if sorted(numbers) != list(range(len(numbers))) or not set(found["state"]) <= set(numbers):
        raise ValueError("the optimizer's state is not of the weights that it lists")
    if not all(isinstance(values, dict) for values in found["state"].values()):
        raise TypeError("the optimizer's state of a weight is not a dict")
    if state["trained"] is not None and len(state["trained"]) != len(numbers):
        raise ValueError(
            f"{counted(len(state['trained']), 'weight is', 'weights are')} trained, the optimizer lists {len(numbers)}"
        )


def put_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Go on with a state that `optimizer_state` gave, where the model has the weights saved with it.

    Raises one of `READING_FAULTS` if it is that of another optimizer or of other weights.
    """
    check_optimizer_state(state)
    plain: Any = plain_optimizer(optimizer)
    saved, weights = state["optimizer"], _weights(plain)
    for theirs, ours in zip(saved["param_groups"], plain.param_groups, strict=True):
        check_alike(_settings(theirs), _settings(ours), "param_groups")
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                f"{counted(len(theirs['params']), 'weight')} in a group, this optimizer has {len(ours['params'])}"
            )
    order = [number for group in saved["param_groups"] for number in group["params"]]
    lower = {number for group in saved["param_groups"] if "rank" in group for number in group["params"]}  # GaLore's
    for number, weight in zip(order, weights, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if number not in lower and name in OF_WEIGHTS_SHAPE and value is not None and value.shape != weight.shape:
                there, here = tuple(value.shape), tuple(weight.shape)
                raise ValueError(f"{name} of weight {number} has {there}, the weight {here}")
    plain.load_state_dict(saved)
    _keep_dtypes(plain, saved, order)
    if state["trained"] is not None:
        plain.train()
        with torch.no_grad():
            for weight, value in zip(weights, state["trained"], strict=True):
                if value.shape != weight.shape:
                    raise ValueError(f"a trained weight has {tuple(value.shape)}, the model's {tuple(weight.shape)}")
                weight.copy_(sharding.part_of(value, weight))


def _keep_dtypes(optimizer: torch.optim.Optimizer, saved: dict[str, Any], order: list[int]) -> None:
    """torch gives what it loads the weight's type, and some optimizers keep float32 beside weights of 16 bits, or what
    their settings name. Only 16 bits that none names become float32: the weight had 16 bits in an earlier version."""
    asked = {value for group in optimizer.param_groups for value in group.values() if isinstance(value, torch.dtype)}
    for number, weight in zip(order, _weights(optimizer), strict=True):
        for name, value in saved["state"].get(number, {}).items():
            there = optimizer.state[weight].get(name)
            is_cast = isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor) and there.dtype != value.dtype
            if not is_cast or isinstance(there, DTensor):
                continue
            if weight.dtype is torch.float32 and value.dtype in {torch.bfloat16, torch.float16} - asked:
                continue
            optimizer.state[weight][name] = value.to(there.device)


def _settings(group: Mapping[str, object]) -> dict[str, object]:
    # "step" is no setting: some optimizers count their updates there, from the first one on
    return {name: value for name, value in group.items() if name not in ("params", "param_names", "step")}


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _own_part(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _as_part(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert isinstance(weight, DTensor)
    whole: Any = weight.detach().clone()
    whole.to_local().copy_(part)
    found: torch.Tensor = whole
    return found


def check_alike(there: Any, here: object, at: str) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless one value could stand for the other: of the same keys and types.
    Numbers are numbers, and None may stand for anything."""
    if there is None or here is None:
        return
    numbers = (int, float)
    if isinstance(here, bool) or isinstance(there, bool) or not isinstance(here, numbers):
        if type(there) is not type(here):
            raise TypeError(f"{at} is of type {type(there).__name__}, not {type(here).__name__}")
    elif not isinstance(there, numbers):
        raise TypeError(f"{at} is of type {type(there).__name__}, not {type(here).__name__}")
    if isinstance(here, dict):
        if there.keys() != here.keys():
            names = ", ".join(sorted(map(str, there.keys() ^ here.keys())))
            raise ValueError(f"{at} has other entries: {names}")
        for name, value in here.items():
            check_alike(there[name], value, f"{at}.{name}")
    elif isinstance(here, list | tuple):
        for one, other in zip(there, here, strict=isinstance(here, tuple)):
            check_alike(one, other, at)


# -------------------------------------------------------------------------------------------------- random numbers


def random_state(*, of_device: bool = True) -> dict[str, Any]:
    """Where the random numbers of this process are, on its device too."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if of_device and torch.cuda.is_available() else state


def check_random_state(state: Any) -> None:
    """Raise one of `READING_FAULTS` if `set_random_state` could not take this."""
    random.Random().setstate(state["python"])
    _, words, position, *_ = state["numpy"]
    if words.shape != (NUMPY_WORDS,) or words.dtype != np.uint32 or not 0 <= position <= NUMPY_WORDS:
        raise ValueError("no state of numpy's random numbers")
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.Generator(device="cuda").set_state(state["cuda"])


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers where `random_state` left them."""
    check_random_state(state)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
