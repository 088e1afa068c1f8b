"""Which layers get an adapter: those that ``adapter.target_modules`` names, but for layers where it would have no
effect. Layers that PEFT would leave out, as it takes their names for those of experts, get one too. And modules that
are trained whole beside it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from functools import partial

import torch
from peft import LoraConfig, PeftModel
from peft.utils.other import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from luthier.config.adapters import FROM_BASE_AND_ROWS, REGEX
from luthier.config.choices import AdapterType
from luthier.config.schema import AdapterConfig
from luthier.errors import ModelError
from luthier.models import ModelParts, find_parts, output_layer, read_past, unlike_linear
from luthier.models.quantized import packed_layers
from luthier.models.routers import router_names

ALL_LINEAR = "all-linear"


def left_out(model: PreTrainedModel, section: AdapterConfig) -> list[str]:
    """Which layers and experts have no adapter in a model that is adapted, though they are meant, and why; N for
    numbers."""
    if not section.type.is_beside or section.name_or_path is not None:
        return []
    parts = find_parts(model)
    unheard = read_past(model) if section.target_modules == [ALL_LINEAR] else []
    unknown = _meant_like_experts(model, section, parts) if section.type is AdapterType.LORA else []
    experts = [
        name
        for name, weight in model.named_parameters()
        if weight.ndim > 2 and ".experts." in name and "base_layer" not in name and not weight.requires_grad
    ]
    is_all = section.type is AdapterType.LORA and section.target_modules == [ALL_LINEAR]
    of_rows = "token_adapter"  # PEFT's own module for the rows of new tokens in an output layer
    uncalled = [name for name in unheard if parts.of(name) in section.train_parts and of_rows not in name]
    unlike = [name for name in unlike_linear(model) if is_all and parts.of(name) in section.train_parts]
    found = {
        "experts in one tensor: adapter.target_parameters names them": experts if is_all else [],
        "the model takes their weights without calling these layers": uncalled,
        "they give something else than a linear layer": unlike,
        "PEFT takes their names for the experts of a layer, and adapts no quantized weight beside these": unknown,
    }
    return [f"{', '.join(collapse(names))} ({why})" for why, names in found.items() if names]


def _linear_modules(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> list[str]:
    found = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)}
    found = (found | packed_layers(model).keys()) - set(unlike_linear(model))
    return [name for name, _ in model.named_modules() if name in found and parts.of(name) in section.train_parts]


def check_some_targeted(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> None:
    """A module that is trained and saved whole gets no adapter: PEFT leaves it out of the targets without a word.

    Raises `ModelError` where that leaves nothing of what ``adapter.target_modules`` names.
    """
    saved = section.modules_to_save
    linear = _linear_modules(model, section, parts)
    for pattern in section.target_modules:
        matched = [name for name in linear if pattern == ALL_LINEAR or _matches(name, pattern)]
        if pattern == ALL_LINEAR:  # which are those of the layers, not the embedding and the output layer
            ends = (model.get_input_embeddings(), output_layer(model))
            matched = [name for name in matched if not any(model.get_submodule(name) is end for end in ends)]
        if saved and matched and all(_is_in(name, saved) for name in matched):
            raise ModelError(
                f"adapter.modules_to_save: {', '.join(saved)} trains and saves whole all modules that "
                f"adapter.target_modules ({pattern}) names: nothing is left to adapt of "
                f"{', '.join(collapse(matched))}",
                hint=f"take {pattern} out of adapter.target_modules, or those modules out of adapter.modules_to_save; "
                "adapter.type: full trains all weights",
            )


def _is_in(name: str, modules: list[str]) -> bool:
    """Whether a module is one of these, or is inside of one; they are named by the ends of their names."""
    steps = name.split(".")
    paths = [".".join(steps[:end]) for end in range(1, len(steps) + 1)]
    return any(path == each or path.endswith(f".{each}") for path in paths for each in modules)


def targeted(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> str | list[str]:
    """What PEFT calls target_modules: ``all-linear``, suffixes as they were given, or the full names that match."""
    patterns = section.target_modules
    if ALL_LINEAR in patterns:
        if len(patterns) > 1:
            raise ModelError(f"adapter.target_modules: {ALL_LINEAR} stands alone", hint="drop the other patterns")
        packed = packed_layers(model)  # PEFT adapts these, and does not find them by this word
        return [name for name in packed if parts.of(name) in section.train_parts] if packed else ALL_LINEAR
    linear, unheard = _linear_modules(model, section, parts), set(read_past(model))
    is_lora = section.type is AdapterType.LORA
    chosen: list[str] = []
    for pattern in patterns:
        matched = [name for name in linear if _matches(name, pattern)]
        if matched and unheard.issuperset(matched):
            raise ModelError(
                f"adapter.target_modules: {pattern!r} names {', '.join(collapse(matched))}, whose weights the model "
                "takes without calling these layers: an adapter there would have no effect",
                hint="name other modules, or train these whole (adapter.modules_to_save)",
            )
        if not matched and not (is_lora and _is_of_experts(model, pattern)):
            where = f" in {', '.join(section.train_parts)} (adapter.train_parts)" if parts else ""
            raise ModelError(
                f"adapter.target_modules: no linear module matches {pattern!r}{where}",
                hint=f"there are {', '.join(collapse(linear))}",
            )
        chosen.extend(name for name in matched if name not in unheard)
    return list(patterns) if _are_plain(patterns) else sorted(set(chosen))


def _are_plain(patterns: Iterable[str]) -> bool:
    """Whether these are ends of names, such as PEFT takes them, or its word for all layers."""
    return all(re.fullmatch(r"\w+", pattern) or pattern == ALL_LINEAR for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """``q_proj`` and ``self_attn.*`` match the end of a dotted name, ``model.layers.0.*`` the whole of it."""
    return is_whole(name, pattern) or fnmatch.fnmatchcase(name, "*." + pattern)


def is_whole(name: str, pattern: str) -> bool:
    """Whether the whole name is meant: by a pattern of a shell, or a regular expression after ``regex:``."""
    if pattern.startswith(REGEX):
        return re.fullmatch(pattern.removeprefix(REGEX), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def collapse(names: Iterable[str]) -> list[str]:
    """Layer numbers become ``N``: ``layers.0.q, layers.1.q`` -> ``layers.N.q``."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".N", name) for name in names))


def inside(model: PreTrainedModel, targets: str | list[str], outside: str) -> list[str]:
    """The full names of the targets that a regular expression leaves."""
    ends = (model.get_input_embeddings(), output_layer(model))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and not any(module is end for end in ends)
        and (targets == ALL_LINEAR or any(name == each or name.endswith(f".{each}") for each in targets))
        and not re.fullmatch(outside, name)
    ]


def frozen_routers(model: PreTrainedModel) -> list[str]:
    if found := router_names(model):
        return found
    raise ModelError(
        f"adapter.train_routers is false, and {type(model).__name__} has no experts to choose among",
        hint="remove the key",
    )


def excluded(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> str | None:
    """A regular expression for the names of modules that get no adapter; None: there are none."""
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    routers = [] if section.train_routers else [re.escape(name) for name in frozen_routers(model) if name in linear]
    outside = parts.outside(model, section.train_parts)
    unfit = [re.escape(name) for name in (*read_past(model), *unlike_linear(model))]
    return "|".join([*([] if outside is None else [outside]), *routers, *unfit]) or None


# ------------------------------------------------------------------------------------------------------- experts
#
# In some families the experts of a layer were linear layers once and are tensors now, which PEFT adapts in the place of
# whatever is named as they were (``gate_proj``): layers without experts and shared experts would get no adapter, and a
# pattern for these alone would adapt the experts. They are adapted by their weights here, as PEFT also reads them back.


def adapt_experts(settings: LoraConfig, model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> None:
    """Complete what PEFT is told to adapt by the layers whose names it takes for experts, where they are meant; without
    routers, where these are not trained.

    Raises `ModelError` for patterns that name a part of one tensor, such layers with quantized weights, or nothing that
    is trained, and for first values that are found for layers alone.
    """
    named = _meant_like_experts(model, section, parts)
    whole = [name for name in named if _is_whole_weight(model.get_submodule(name))]
    if len(whole) < len(named) and not _are_plain(section.target_modules):
        names = ", ".join(collapse(name for name in named if name not in whole))
        raise ModelError(
            f"adapter.target_modules: PEFT takes the names of {names} for the experts of a layer, and adapts no "
            "quantized weight beside these",
            hint="leave them out of adapter.target_modules, or remove model.quantization",
        )
    if not isinstance(settings.target_modules, str):
        settings.target_modules = set(settings.target_modules or ()) - set(named)
    try:
        convert_peft_config_for_transformers(settings, model, None)
    except ValueError as error:
        raise ModelError(f"adapter.target_modules: {error}", hint="name all of them, or none") from error
    parameters = {*(settings.target_parameters or ()), *(f"{name}.weight" for name in whole)}
    if not section.train_routers:
        routers = [f".{name}.weight" for name in frozen_routers(model)]
        parameters = {each for each in parameters if not any(name.endswith(f".{each}") for name in routers)}
    if not parameters and not settings.target_modules:
        raise ModelError(
            "adapter.target_modules: it names routers alone, and adapter.train_routers is false",
            hint="name other layers, or set adapter.train_routers: true",
        )
    if parameters and section.init_lora_weights in ("eva", *FROM_BASE_AND_ROWS):
        raise ModelError(
            f"adapter.init_lora_weights is {section.init_lora_weights}, which looks at the inputs of linear layers; "
            "PEFT adapts the experts of a layer, and layers named like them, as tensors",
            hint="set adapter.init_lora_weights: true, or name other layers in adapter.target_modules, as q_proj",
        )
    settings.target_parameters = sorted(parameters) or None
    for pattern in (settings.rank_pattern, settings.alpha_pattern) if whole else ():
        pattern.update({rf"{name}\.weight": value for name, value in pattern.items() if not name.startswith(".*")})


def _meant_like_experts(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> list[str]:
    """The linear layers that ``adapter.target_modules`` means and whose names PEFT takes for the experts of a layer."""
    patterns, without = section.target_modules, [*read_past(model), *section.modules_to_save]
    ends = (model.get_input_embeddings(), output_layer(model))
    by_end: dict[str, list[str]] = {}
    for name in _linear_modules(model, section, parts):
        layer = model.get_submodule(name)
        is_inner = isinstance(layer, nn.Linear) and not any(layer is end for end in ends) and not _is_in(name, without)
        if is_inner and any(each == ALL_LINEAR or _matches(name, each) for each in patterns):
            by_end.setdefault(name.rpartition(".")[2], []).append(name)
    return [name for end, names in by_end.items() if _is_of_experts(model, end) for name in names]


def _is_of_experts(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT would adapt the experts of a layer, or what chooses them, if it were told this name."""
    trial = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(trial, model, None)
    except ValueError:  # it is one of several that are one tensor now
        return True
    return name not in (trial.target_modules or ())


def _is_whole_weight(layer: nn.Module) -> bool:
    weight: torch.Tensor = layer.weight.data  # type: ignore[assignment]
    return type(weight) is torch.Tensor and weight.is_floating_point()


# --------------------------------------------------------------------------------------------- modules trained whole


def with_exact_modules(model: PeftModel) -> PeftModel:
    """Modules that are trained whole get float32 weights, as PEFT gives its matrices: the optimizer's updates are too
    small for 16 bits. They take from the layers around them, and give these, what they did before."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for trained in module.modules_to_save.values():
                rough = [weight for weight in trained.parameters() if weight.dtype in (torch.bfloat16, torch.float16)]
                if rough:
                    trained.register_forward_pre_hook(_take_exact, with_kwargs=True)
                    module.register_forward_hook(partial(_give_back, rough[0].dtype))
                for weight in rough:
                    weight.data = weight.data.float()
    return model


def _take_exact(trained: nn.Module, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
    dtype = next(trained.parameters()).dtype
    return _floats_as(dtype, args), {name: _floats_as(dtype, value) for name, value in kwargs.items()}


def _give_back(dtype: torch.dtype, _module: nn.Module, _args: object, given: object) -> object:
    return _floats_as(dtype, given)


def _floats_as(dtype: torch.dtype, value: object) -> object:
    if isinstance(value, tuple):
        return tuple(_floats_as(dtype, each) for each in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
