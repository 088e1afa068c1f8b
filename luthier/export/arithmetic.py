"""Models of 16 bits, computed in float32 weight by weight: what they do without the rounding of their sums.

Two models with the same weights differ in 16 bits by how their sums are rounded, in a deep model by more than what a
wrong weight may do. In float32 only the weights tell them apart. A weight is in float32 for no longer than the
operation that needs it, and a large one of a matrix product piece by piece.

# N places of a context, V vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from luthier import records
from luthier.engines.engine import Ids
from luthier.engines.local import LocalEngine
from luthier.errors import first_line
from luthier.models.quantized import is_quantized
from luthier.models.submodules import plain_model

HALF = (torch.bfloat16, torch.float16)
PIECE = 2**24  # numbers of a weight of a matrix product that are in float32 at once
_PLAIN_ATTENTION = ("eager", "sdpa")  # others are kernels for 16 bits
Args = tuple[Any, ...]
_aten: Any = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_COPIES = (_aten._to_copy.default, _aten.clone.default, _aten.cat.default, _aten.stack.default)


class Float32Arithmetic(TorchDispatchMode):
    """While it is entered, every operation takes and gives float32 where it would take or give 16 bits.

    rounded_to  None, or a dtype of 16 bits: then every weight is taken as if it had been rounded to it once more, by
                as much at random. What the model does then tells what rounding its weights does to it.
    draw        the seed of that
    """

    def __init__(self, rounded_to: torch.dtype | None = None, draw: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noise: torch.Tensor | None = None
        self._used = 0
        if rounded_to is not None:
            # Rounding moves a number by up to half a unit of its last place, which is 1/2 to 1 eps of its size: by
            # about 0.2 eps (root of the mean square), as an even distribution up to 0.35 eps does.
            most = 0.35 * torch.finfo(rounded_to).eps
            noise = torch.rand(PIECE + 2**16, generator=torch.Generator().manual_seed(draw))
            self._noise = noise.mul_(2 * most).add_(1 - most)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """One operation of ATen."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in HALF:
            kwargs["dtype"] = torch.float32
        if func.is_view or func in _COPIES:  # a weight that was copied is still to be taken
            result = func(*(args if func.is_view else tree_map(_wide, args)), **kwargs)
            if isinstance(result, torch.Tensor) and _are_weights(args):
                result.is_weight = True  # type: ignore[attr-defined]
            return result
        if func is _aten.embedding.default:
            rows = func(*args, **kwargs)
            return self.taken(rows, rounds=_is_weight(args[0]))
        if func._schema.is_mutable and getattr(args[0], "dtype", None) in HALF:  # it keeps its numbers where they are
            return func(*args, **kwargs)
        if func in _PRODUCTS and args[-1].dtype in HALF and args[-1].numel() > PIECE:
            return self._in_pieces(func, args, kwargs)
        return func(*tree_map(self.taken, args), **tree_map(self.taken, kwargs))

    def _in_pieces(self, func: Callable[..., torch.Tensor], args: Args, kwargs: dict[str, object]) -> torch.Tensor:
        """A product with a matrix [K, N] of weights, some of its columns after the others."""
        *added, rows_MK, weight_KN = args
        step, pieces = max(1, PIECE // weight_KN.shape[0]), []
        for start in range(0, weight_KN.shape[1], step):
            columns = slice(start, start + step)
            piece = self.taken(weight_KN[:, columns], rounds=_is_weight(weight_KN))
            some = [self.taken(each[..., columns], rounds=_is_weight(each)) for each in added]
            pieces.append(func(*some, _wide(rows_MK), piece, **kwargs))
        return torch.cat(pieces, dim=1)

    def taken(self, value: object, *, rounds: bool | None = None) -> object:
        """What an operation is given in the place of ``value``."""
        wide = _wide(value)
        if self._noise is None or not (_is_weight(value) if rounds is None else rounds):
            return wide
        if not isinstance(wide, torch.Tensor) or not wide.is_floating_point():
            return wide
        self._noise = self._noise.to(wide.device)
        self._used = (self._used + 7919) % 2**16
        pieces = wide.reshape(-1).split(PIECE)
        moved = [piece * self._noise[self._used : self._used + len(piece)] for piece in pieces]
        return torch.cat(moved).view(wide.shape)


class _Convolutions(TorchFunctionMode):
    """Convolutions ask whether their inputs are of one dtype before they get to ATen."""

    def __init__(self, mode: Float32Arithmetic) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """One of torch's functions."""
        kwargs = kwargs or {}
        if func not in _CONVOLUTIONS:
            return func(*args, **kwargs)
        return func(*tree_map(self._mode.taken, args), **tree_map(self._mode.taken, kwargs))


def _wide(value: object) -> object:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


def _is_weight(value: object) -> bool:
    return isinstance(value, nn.Parameter) or getattr(value, "is_weight", False)


def _are_weights(args: Args) -> bool:
    first = args[0]
    return all(map(_is_weight, first)) if isinstance(first, list | tuple) else _is_weight(first)


@contextmanager
def in_float32(model: nn.Module, rounded_to: torch.dtype | None = None, draw: int = 0) -> Iterator[None]:
    """Have a model compute in float32 whatever its weights are in, but for one whose layers are made for fewer bits;
    bitsandbytes' of 4 bits take float32 as well. ``rounded_to`` and ``draw`` are those of `Float32Arithmetic`."""
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    if is_quantized(plain_model(model)) and kinds != {"Parameter", "Params4bit"}:
        yield
        return
    with _plain_attention(model), Float32Arithmetic(rounded_to, draw) as mode, _Convolutions(mode):
        yield


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Attention by torch alone, where a model uses kernels that take 16 bits only."""
    parts: list[Any] = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    used = [each.config._attn_implementation for each in parts]
    if all(name in _PLAIN_ATTENTION for name in used):
        yield
        return
    try:
        parts[0].set_attn_implementation("sdpa")
    except ValueError:  # there is none for it
        parts[0].set_attn_implementation("eager")
    try:
        yield
    finally:
        for each, name in zip(parts, used, strict=True):
            each.config._attn_implementation = name


# --------------------------------------------------------------------------------------------------------------------
# What a model says behind a context, computed so.


def media_arrays(
    engine: LocalEngine, ids: Ids, media: Sequence[records.MediaItem], answer_from: int | None = None
) -> dict[str, NDArray[Any]]:
    """What the model is given of media beside the ids; nothing for a model of text. Raises `RowError` for media that
    are gone."""
    if engine.media is None:
        return {}
    features = engine.media.features(media)
    return engine.media.of_prompts(np.asarray(ids, np.int64)[None], [features], answer_from=answer_from)


@torch.no_grad()
def logprobs_at(
    engine: LocalEngine,
    ids: Ids,
    media: Sequence[records.MediaItem],
    places: Sequence[int],
    answer_from: int,
    *,
    rounded_to: torch.dtype | None = None,
    draw: int = 0,
) -> NDArray[np.float32]:
    """Log-probabilities of all tokens behind ``ids[:p]`` for each place p >= 1, float32[N, V], computed in float32;
    ``rounded_to``: as if the weights had been rounded to it once more, by ``draw``. A model with kernels that take
    16 bits alone computes as it does otherwise; `why_not_in_float32` says so.

    Raises `RowError` for media that are gone.
    """
    ids_BT = np.asarray(ids, np.int64)[None]
    arrays: dict[str, NDArray[Any]] = {"input_ids": ids_BT, "attention_mask": np.ones_like(ids_BT)}
    arrays |= media_arrays(engine, ids, media, answer_from)
    device = next(engine.model.parameters()).device
    inputs = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    at_N = torch.tensor([place - 1 for place in places], device=device)
    keeps = "logits_to_keep" in inspect.signature(plain_model(engine.model).forward).parameters
    inputs |= {"logits_to_keep": at_N} if keeps else {}
    logits_NV = _in_float32_if_it_can(engine.model, inputs, rounded_to, draw)
    logits_NV = logits_NV if len(logits_NV) == len(at_N) else logits_NV[at_N]
    return np.asarray(logits_NV.float().log_softmax(-1).cpu().numpy(), dtype=np.float32)


_NARROW = WeakKeyDictionary[nn.Module, str]()  # models that could not compute in float32, and why


def _in_float32_if_it_can(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], rounded_to: torch.dtype | None, draw: int
) -> torch.Tensor:
    plain = plain_model(model)
    why = _NARROW.get(plain)
    if why is None:
        try:
            with in_float32(model, rounded_to, draw):
                logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
            return logits
        except Exception as error:  # noqa: BLE001 - kernels that take 16 bits alone raise what they like
            why = first_line(error)
    logits = model(**inputs, use_cache=False).logits[0]  # raises what is wrong in any arithmetic
    _NARROW[plain] = why
    return logits


def why_not_in_float32(model: nn.Module) -> str | None:
    """What a model raised where it was to compute in float32; None of one that does."""
    return _NARROW.get(plain_model(model))
