"""The encoders of a multimodal model, for what a step keeps in memory of them: how their layers are made, and what is
around these, read off modules without weights (torch's meta device). A position is a patch of an image or a frame of
audio.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from luthier.check.plan.work import ONE_STEP
from luthier.models import find_parts, plain_model

_ADAPTERS = ("lora_", "vera_", "oft_")  # how the modules of adapters are called
_FIRST = ("q", "k", "v", "wq", "wk", "wv", "in_proj", "c_attn")  # how the names of attention's first matrices begin
_POOLS = nn.AvgPool1d | nn.AvgPool2d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_OF_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderShape:
    """One encoder of images or audio, with its projector.

    layers              how many it has
    trained             whether their weights are trained; of a frozen one ``adapted`` says what has gradients
    adapted             as `ModelShape.adapted`
    width               of its stream
    feed_forward        inside the feed-forward part
    kept_inside         how many tensors as wide as that a step keeps, if it is trained
    queries, keys       heads x their width
    in_one              whether one matrix makes queries, keys and values
    readers             how many matrices of a layer read the stream
    norms               of the stream in a layer
    norms_by_torch      whether they are torch's own `LayerNorm`
    norms_heads         whether queries and keys have norms of their own
    around              numbers for each position that are kept outside of the layers, by convolutions, norms, mergers
                        and projectors
    """

    layers: int
    trained: bool
    adapted: tuple[tuple[str, int, int, int], ...]
    width: int
    feed_forward: int
    kept_inside: int
    queries: int
    keys: int
    in_one: bool
    readers: int
    norms: int
    norms_by_torch: bool
    norms_heads: bool
    around: float


Adapted = tuple[tuple[str, int, int, int], ...]  # as `ModelShape.adapted`


def apart(model: nn.Module, adapted: Adapted) -> tuple[Adapted, tuple[EncoderShape, ...]]:
    """Of all layers with an adapter those of the language model; and the encoders whose layers are made in the usual
    way, with theirs."""
    plain: PreTrainedModel = plain_model(model)
    parts = find_parts(plain)
    projectors = list(map(plain.get_submodule, parts.projector))
    found = []
    for name in parts.tower:
        tower = plain.get_submodule(name)
        layers = _layers(tower)
        if layers is not None:
            outside = [each for each in projectors if each not in set(tower.modules())]
            found.append(_encoder(tower, layers, tuple(one for one in adapted if _is_in(one[0], (name,))), outside))
    elsewhere = (*parts.tower, *parts.projector)
    return tuple(one for one in adapted if not _is_in(one[0], elsewhere)), tuple(found)


def _is_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(f".{module}." in f".{name}." for module in modules)


def _layers(tower: nn.Module) -> nn.ModuleList | None:
    """The list of layers with attention that has most of the weights; None where there is none, or where layers of
    several widths are in stages."""
    lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList) and _attends(module)]
    found = max(lists, key=lambda each: sum(one.numel() for one in each.parameters()), default=None)
    if found is None or any(_attends(each) for each in found[0].modules() if isinstance(each, nn.ModuleList)):
        return None
    return found if any(True for _ in _linear(found[0])) else None


def _attends(layers: nn.ModuleList) -> bool:
    return any("attn" in name or "attention" in name for name, _ in layers.named_modules())


def _encoder(tower: nn.Module, layers: nn.ModuleList, adapted: Adapted, projectors: list[nn.Module]) -> EncoderShape:
    first = layers[0]
    linear = list(_linear(first))
    width = next((one.in_features for name, one in linear if name.startswith(_FIRST)), linear[0][1].in_features)
    norms = [each for each in first.modules() if _is_norm(each) and _width_of(each) == width]
    readers = [one for name, one in linear if one.in_features == width and _reads(name, one, width)]
    makes_all = any(one.out_features == 3 * width for name, one in linear if name.startswith(_FIRST))
    inside = max(
        (one.in_features for _, one in linear if one.out_features == width and one.in_features != width), default=width
    )
    of = {name: one.out_features for name, one in linear}
    queries = next((out for name, out in of.items() if name.startswith("q") and not name.startswith("qkv")), width)
    keys = next((out for name, out in of.items() if name.startswith("k")), queries)
    entries = [one.out_features for name, one in linear if one in readers and not name.startswith(_FIRST)]
    gates = sum(out // inside for out in entries if out in (inside, 2 * inside))
    trained = any(one.requires_grad for name, one in layers.named_parameters() if not _is_of_adapter(name))
    passes = trained or bool(adapted)
    return EncoderShape(
        layers=len(layers),
        trained=trained,
        adapted=adapted,
        width=width,
        feed_forward=inside,
        kept_inside=4 if gates > 1 else _kept_inside(tower),
        queries=queries,
        keys=keys,
        in_one=makes_all,
        readers=len(readers),
        norms=len(norms),
        norms_by_torch=any(isinstance(each, nn.LayerNorm) for each in norms),
        norms_heads=any(name.endswith("q_norm") and _is_norm(each) for name, each in first.named_modules()),
        around=_around(tower, layers, width, passes=passes)
        + _pooled(tower) * sum(_chain(each, width, passes=passes) for each in projectors),
    )


def _around(tower: nn.Module, layers: nn.ModuleList, width: int, *, passes: bool) -> float:
    """What convolutions before the layers read, and norms and mergers beside them; ``passes``: gradients come to the
    layers."""
    inner = set(layers.modules())
    before, behind = _convolutions(tower, layers)
    numbers, rate = float(sum(one.in_channels for one in behind if passes or one.weight.requires_grad)), 1.0
    for one in reversed(before):  # from the positions back to pixels, or to a spectrogram
        if one.weight.requires_grad:
            # of several the ones before the last are followed by a function, which keeps what it reads, too
            numbers += rate * one.out_channels * (len(before) > 1)
            rate *= math.prod(one.stride)
            numbers += rate * one.in_channels
    mergers = list(_mergers(tower, layers))
    held = {each for merger in mergers for each in merger.modules()}
    alone = [each for each in tower.modules() if _is_norm(each) and each not in inner and each not in held]
    numbers += sum(_width_of(each) for each in alone if (passes or _is_trained(each)) and _width_of(each) == width)
    entering = behind[-1].out_channels if behind else width
    fewer = 1 / math.prod(math.prod(one.stride) for one in behind)
    return numbers + fewer * sum(_chain(each, entering, passes=passes) for each in mergers)


def _convolutions(tower: nn.Module, layers: nn.ModuleList) -> tuple[list[Convolution], list[Convolution]]:
    """Those before the layers, and those behind them, which make fewer positions of these."""
    inner = set(layers.modules())
    order = list(tower.modules())
    found = [one for one in order if isinstance(one, Convolution) and one not in inner]
    place = order.index(layers)
    return [one for one in found if order.index(one) < place], [one for one in found if order.index(one) > place]


def _mergers(module: nn.Module, layers: nn.ModuleList) -> Iterator[nn.Module]:
    """The outermost modules beside the layers that have matrices and neither convolutions nor tables."""
    for child in module.children():
        kinds = [type(each) for each in child.modules()]
        if child is layers:
            continue
        is_list = isinstance(child, nn.ModuleList) or layers in child.modules()
        if not is_list and any(issubclass(kind, nn.Linear) for kind in kinds):
            if not any(issubclass(kind, Convolution | nn.Embedding) for kind in kinds):
                yield child
        elif is_list:
            yield from _mergers(child, layers)


def _pooled(tower: nn.Module) -> float:
    """How many positions of a projector there are for one of the encoder."""
    strides = [one.stride for one in tower.modules() if isinstance(one, _POOLS)]
    return 1 / math.prod(math.prod(each) if isinstance(each, tuple) else each for each in strides)


def _chain(module: nn.Module, width: int, *, passes: bool) -> float:
    """Numbers for each position that a merger or projector keeps: what its norm and its matrices read, and what the
    functions between these do. A matrix that reads several widths has several positions in one. Where it is frozen and
    gradients pass, its matrices keep nothing."""
    is_trained = _is_trained(module)
    if not (is_trained or passes):
        return 0.0
    numbers = float(sum(_width_of(each) for each in module.modules() if _is_norm(each) and _width_of(each) == width))
    rate, current = 1.0, width
    matrices = list(_linear(module))
    for number, (_, one) in enumerate(matrices):
        if one.in_features > current and one.in_features % current == 0:
            rate *= current / one.in_features
        numbers += rate * one.in_features * is_trained
        if number + 1 < len(matrices):
            numbers += rate * one.out_features
        current = one.out_features
    wide = [_width_of(each) for each in module.modules() if _is_norm(each) and _width_of(each) > width]
    return numbers + sum(width for each in wide if each % width == 0)  # as wide as the positions that are joined


def _linear(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The matrices by the last part of their names, those of adapters left out."""
    for name, one in module.named_modules():
        if isinstance(one, nn.Linear) and not _is_of_adapter(name):
            yield name.removesuffix(".base_layer").removesuffix(".linear").rpartition(".")[2].lower(), one


def _reads(name: str, one: nn.Linear, width: int) -> bool:
    return one.out_features != width or name.startswith(_FIRST)


def _is_of_adapter(name: str) -> bool:
    return any(part in name for part in _ADAPTERS)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None


def _width_of(norm: nn.Module) -> int:
    return sum(one.numel() for name, one in norm.named_parameters() if name == "weight")


def _is_trained(module: nn.Module) -> bool:
    return any(one.requires_grad for one in module.parameters())


def _kept_inside(tower: nn.Module) -> int:
    """Without a gate: what goes into the function and what comes out, one more of ``x sigmoid(1.7 x)``, and three more
    of a function that is written as a formula."""
    config = getattr(tower, "config", None)
    said: Mapping[str, Any] = {} if config is None else config.to_dict()
    names = {said.get(name) for name in _OF_ACTIVATIONS} - {None}
    if "quick_gelu" in names:
        return 3
    return 2 if names & ONE_STEP or not names else 5
