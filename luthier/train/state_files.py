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
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from luthier.errors import CheckpointError
from luthier.train.files import FILES, reported

STRUCTURE, TENSORS = ".json", ".safetensors"
UNREADABLE = (
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
            return torch.empty(whole.get_shape(), device="meta")

        return _read(folder, name, outline)


def has_state(folder: Path, name: str) -> bool:
    """Whether `write_state` wrote it there."""
    return (folder / (name + STRUCTURE)).exists()


def _read(folder: Path, name: str, tensor: Callable[[str], torch.Tensor]) -> Any:
    path = folder / (name + STRUCTURE)
    try:
        return _decoded(json.loads(path.read_bytes(), parse_constant=_no_constant), tensor)
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """The error for a file of a checkpoint that is not what was written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(
        f"{path} cannot be read: {reason[:200] or type(error).__name__}", hint="go on from another checkpoint"
    )


# -------------------------------------------------------------------------------------------------------- encoding


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
                "which is no data: it cannot be written into a checkpoint",
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


def _decoded(found: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
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
        case "dtype":
            return _named_dtype(content)
        case "tuple":
            return tuple(_decoded(each, tensor) for each in content)
        case "dict":
            return {key: _decoded(each, tensor) for key, each in content}
        case _:
            raise ValueError(f"{kind!r} is no kind of value")


def _named_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of numbers")
    return dtype


def _no_tensor(key: str) -> torch.Tensor:
    raise ValueError(f"the tensor {key!r} is missing, as there is no file of tensors")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
