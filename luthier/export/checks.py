"""By which bounds two models are compared that should be the same, and what the proof of an exported folder says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from luthier import records
from luthier.check.golden import GoldenContext, Rounding
from luthier.engines import Ids
from luthier.engines.local import LocalEngine
from luthier.errors import first_line
from luthier.models import plain_model
from luthier.models.quantized import is_quantized
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How far apart two models may be that should be the same. ``tie``: a place where the trained model holds two
    tokens for so nearly equally likely is no evidence for either. ``same``: the share of the other places that
    have the same likeliest token."""

    logprob: float = np.inf
    kl: float = 1e-3
    kl_at_one: float = np.inf
    tie: float = 0.05
    same: float = 0.99


BOUNDS = {
    "exact": Bound(logprob=1e-4, tie=1e-3),
    "llama.cpp": Bound(logprob=1e-3, tie=0.01),  # float32 as well, by other sums
    "cast": Bound(kl_at_one=0.1),
    "8 bits": Bound(kl=5e-3, kl_at_one=0.5, tie=0.1),
    "fp8": Bound(kl=2e-2, kl_at_one=1.0, tie=0.3, same=0.98),  # 3 bits behind the leading one, where int8 has 7
    "coarse": Bound(kl=5e-2, kl_at_one=2.0, tie=0.7, same=0.95),  # 4 bits, or fp8 for what goes into layers, too
}
EXACT, CAST, EIGHT_BITS = "exact", "cast", "8 bits"
NUM_DRAWS = 4  # roundings at random: in a mixture of experts only some of them change the choice of an expert
ROUNDINGS = 4  # a difference of so many times that of one more rounding still counts as rounding


def bound_of(dtypes: Sequence[str], *, rounds_inputs: bool) -> str:
    """By which bounds models that compute in these types are compared. ``rounds_inputs``: the trained one also rounds
    what goes into its layers to 8 bits, as LLM.int8 does, and the exported one does not."""
    if rounds_inputs:
        return EIGHT_BITS
    return EXACT if set(dtypes) == {"float32"} else CAST


# --------------------------------------------------------------------------------------------------------------------
# What the proof of an exported folder says: its checks, and what each of them found.


MAX_SHOWN = 5  # findings of a check that are told one by one


class ExportCheck(StrEnum):
    """What is proven of an exported folder."""

    FILES = "files"
    TEMPLATE = "template"
    STOPS = "stops"
    SPECIAL_IDS = "special_ids"
    TOKENS = "tokens"
    DTYPE = "dtype"
    LOADS = "loads"
    WEIGHTS = "weights"
    MERGED = "merged"
    DIFFERS = "differs"
    PICTURES = "pictures"
    LOGPROBS = "logprobs"
    ANSWERS = "answers"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFinding:
    """Something that does not hold: where, and the numbers that disagree."""

    where: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """One check: ``told`` is what was compared, with its numbers."""

    check: ExportCheck
    told: str
    findings: tuple[ExportFinding, ...] = ()
    num_findings: int = 0

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return not self.num_findings


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportProof:
    """All checks of a folder. ``rounding`` is there where the model loses more by rounding than others."""

    results: tuple[ExportResult, ...]
    rounding: Rounding | None = None

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return all(result.ok for result in self.results)

    def to_json(self) -> dict[str, object]:
        """For programs: the checks by name."""
        return {
            "ok": self.ok,
            "rounding": None if self.rounding is None else msgspec.to_builtins(self.rounding),
            "checks": {
                result.check.value: {
                    "ok": result.ok,
                    "told": result.told,
                    "findings": [{"where": one.where, "what": one.what} for one in result.findings],
                    "num_findings": result.num_findings,
                }
                for result in self.results
            },
        }


def check_result(check: ExportCheck, told: str, faults: Sequence[tuple[str, str]]) -> ExportResult:
    """A check with the faults that it found, of which the first are told: where, what."""
    shown = tuple(ExportFinding(where=where, what=what) for where, what in faults[:MAX_SHOWN])
    return ExportResult(check=check, told=told, findings=shown, num_findings=len(faults))


# --------------------------------------------------------------------------------------------------------------------
# Distributions of a context, the trained model's and the exported one's.


Ask = Callable[[torch.dtype | None, int], NDArray[np.float32]]
"""What a model gives at the places of a context, [N, V]. With a dtype, its weights are rounded to it once more; the
number is the seed of that."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldContext:
    """A context of the trained model held against the same ids in the exported one."""

    golden: GoldenContext
    kl_N: NDArray[np.float64]
    apart_N: NDArray[np.float64]  # the largest difference of a likely token's log-probability
    same_N: NDArray[np.bool_]  # both think the same token the likeliest, or hold both for equally likely
    base_kl_N: NDArray[np.float64] | None
    ask: Ask | None = None

    @property
    def is_answer(self) -> bool:
        return self.golden.greedy_from is not None


def hold(
    golden: GoldenContext,
    logprobs_of: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    found_NV: NDArray[np.float32],
    bound: str,
    *,
    trained_NV: NDArray[np.float32] | None = None,
    base_NV: NDArray[np.float32] | None = None,
    ask: Ask | None = None,
) -> HeldContext:
    """Compare the distributions of a context. Without ``trained_NV``, the trained model's own, that is by its likeliest
    tokens and what is left for all others, which can only be less far apart. ``base_NV`` is of the model without its
    adapter."""
    top_NK, wanted_NK = np.array(golden.top_ids, np.int64), np.array(golden.top_logprobs, np.float64)
    found_NK = logprobs_of(top_NK).astype(np.float64)
    best_N = found_NV.argmax(axis=1)
    if trained_NV is None:
        kl_N = _kl(_with_rest(wanted_NK), _with_rest(found_NK))
        # of a token that is not among the likeliest all that is known is that it is less likely than these
        lead_N = wanted_NK[:, 0] - np.where(top_NK == best_N[:, None], wanted_NK, -np.inf).max(axis=1)
    else:
        kl_N = _kl(trained_NV, found_NV)
        lead_N = wanted_NK[:, 0] - np.take_along_axis(trained_NV, best_N[:, None], axis=1)[:, 0]
    return HeldContext(
        golden=golden,
        kl_N=kl_N,
        apart_N=np.abs(found_NK - wanted_NK).max(axis=1),
        same_N=lead_N <= BOUNDS[bound].tie,
        base_kl_N=None if trained_NV is None or base_NV is None else _kl(trained_NV, base_NV),
        ask=ask,
    )


def _with_rest(logprobs_NK: NDArray[np.float64]) -> NDArray[np.float64]:
    rest_N = np.clip(1 - np.exp(logprobs_NK).sum(axis=1), 1e-9, 1)
    return np.concatenate([logprobs_NK, np.log(rest_N)[:, None]], axis=1)


def _kl(p_NV: NDArray[Any], q_NV: NDArray[Any]) -> NDArray[np.float64]:
    p_NV, q_NV = p_NV.astype(np.float64), q_NV.astype(np.float64)
    return np.asarray((np.exp(p_NV) * (p_NV - q_NV)).sum(axis=1)).clip(min=0.0)  # rounding may give less


def rounding_of(held: Sequence[HeldContext], dtype: torch.dtype) -> Rounding:
    """How far a model is from itself with its weights rounded to ``dtype`` once more, in these contexts."""
    kls, same = [], []
    for ask in (one.ask for one in held if one.ask is not None):
        found_NV = ask(None, 0)
        for draw in range(NUM_DRAWS):
            rounded_NV = ask(dtype, draw)
            kls.append(_kl(found_NV, rounded_NV))
            lead_N = found_NV.max(axis=1) - found_NV[np.arange(len(found_NV)), rounded_NV.argmax(axis=1)]
            same.append(lead_N <= BOUNDS[CAST].tie)
    kl_N, same_N = np.concatenate(kls), np.concatenate(same)
    return Rounding(kl=float(kl_N.mean()), kl_at_one=float(kl_N.max()), same=float(same_N.mean()))


def allowed_by(bound: str, rounding: Rounding | None) -> Bound:
    """A bound. It is wider for a model that was found to change more by rounding alone: `ROUNDINGS` times that change,
    as no two roundings change a model alike. It is never wider than that of 4 bits."""
    allowed, most = BOUNDS[bound], BOUNDS["coarse"]
    if rounding is None:
        return allowed
    return replace(
        allowed,
        kl=min(max(allowed.kl, ROUNDINGS * rounding.kl), most.kl),
        kl_at_one=min(max(allowed.kl_at_one, ROUNDINGS * rounding.kl_at_one), most.kl_at_one),
        same=max(min(allowed.same, 1 - ROUNDINGS * (1 - rounding.same)), most.same),
    )


def compared(
    check: ExportCheck, held: Sequence[HeldContext], bound: str, rounding: Rounding | None = None
) -> ExportResult:
    """Whether distributions are as near to each other as the types of the weights allow."""
    if not held:
        return check_result(check, "no context to compare", [])
    kl = float(np.concatenate([one.kl_N for one in held]).mean())
    apart = float(np.concatenate([one.apart_N for one in held]).max())
    same_N = np.concatenate([one.same_N for one in held])
    same, places = float(same_N.mean()), len(same_N)
    told = (
        f"{len(held)} contexts, {counted(places, 'place')}: KL {kl:.2g} a token, log-probabilities within {apart:.2g}, "
        f"{same:.1%} with the same likeliest token"
    )
    if rounding is not None:
        told += f"; rounding its weights once more costs KL {rounding.kl:.2g} a token"
    faults: list[tuple[str, str]] = []
    allowed = allowed_by(bound, rounding)
    for one in held:
        where, one_apart, one_kl = one.golden.row, float(one.apart_N.max()), float(one.kl_N.max())
        if not one_apart <= allowed.logprob:
            faults.append(
                (where, f"a log-probability is {one_apart:.2g} away, at most {allowed.logprob:g} is rounding")
            )
        elif not one_kl <= allowed.kl_at_one:
            faults.append((where, f"KL {one_kl:.2g} at one token, at most {allowed.kl_at_one:.2g} is rounding"))
    if not kl <= allowed.kl:
        faults.append(("all contexts", f"KL {kl:.2g} a token, at most {allowed.kl:.2g} is rounding"))
    if (~same_N).sum() > max(1, (1 - allowed.same) * places):  # of few places one says little
        what = f"{same:.1%} with the same likeliest token, at least {allowed.same:.0%} should be"
        faults.append(("all contexts", what))
    return check_result(check, told, faults)


# ----------------------------------------------------------------------------------------------------------------------
# Models of 16 bits, computed in float32 weight by weight: what they do without the rounding of their sums.
#
# Two models with the same weights differ in 16 bits by how their sums are rounded, in a deep model by more than what a
# wrong weight may do. In float32 only the weights tell them apart. A weight is in float32 for no longer than the
# operation that needs it, and a large one of a matrix product piece by piece.
#
# # N places of a context, V vocabulary


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
