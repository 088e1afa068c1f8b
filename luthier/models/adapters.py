"""Which weights are trained: all, some (freeze), or an adapter beside them (PEFT: the LoRA family, OFT)."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from peft import EvaConfig, LoraConfig, OFTConfig, PeftConfig, PeftModel, VeraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from luthier.config.adapters import FROM_BASE_AND_ROWS, MUTATING
from luthier.config.choices import AdapterType, ModelPart
from luthier.config.schema import AdapterConfig
from luthier.errors import ModelError
from luthier.models import ModelParts, adapter_targets, evaluating, find_parts, output_layer
from luthier.models.adapter_files import continue_adapter, quiet_peft, task_of
from luthier.models.model import REWARD_HEAD
from luthier.models.quantized import num_packed, num_weights
from luthier.models.vocabulary import ends_of
from luthier.writing import counted

_ALWAYS_TOLD = ("r", "lora_alpha")
_TOLD_FIRST = ("peft_type", *_ALWAYS_TOLD, "target_modules")
_NO_FACTS = ("base_model_name_or_path", "auto_mapping", "inference_mode", "peft_version", "revision", "task_type")


def apply_adapter(
    model: PreTrainedModel, section: AdapterConfig, *, new_ids: Sequence[int] = ()
) -> PreTrainedModel | PeftModel:
    """Mark what is trained. Frozen parameters have ``requires_grad`` False afterwards, and so have all in parts of the
    model that ``adapter.train_parts`` leaves out. Under LoRA the rows of ``new_ids`` are trained, and no others of the
    embedding (PEFT's trainable tokens).

    Raises `ModelError` where a pattern matches nothing (with the names there are), where nothing would be trained, and
    where an adapter to go on from is of another type.
    """
    parts = find_parts(model)
    routers = [] if section.train_routers else adapter_targets.frozen_routers(model)
    match section.type:
        case AdapterType.FULL | AdapterType.FREEZE | AdapterType.LLAMA_PRO:
            if section.type is AdapterType.FREEZE:
                _freeze(model, section)
            elif section.type is AdapterType.LLAMA_PRO:
                _train_new_layers(model, section.expand_layers or 1)
            else:
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(parts.of(name) in section.train_parts)
            for name in routers:
                model.get_submodule(name).requires_grad_(False)
            _check_some_trained(model, section, parts)
            return model
        case AdapterType.LORA | AdapterType.OFT | AdapterType.VERA:
            if section.name_or_path is not None:
                return continue_adapter(model, section, section.name_or_path)
            return adapter_targets.with_exact_modules(_new_adapter(model, section, parts, new_ids))
        case _:
            raise AssertionError(section.type)


def parts_left_out(model: PreTrainedModel, section: AdapterConfig) -> tuple[ModelPart, ...]:
    """The parts of a multimodal model whose weights stay as they are, by ``adapter.train_parts``."""
    if section.type in (AdapterType.FREEZE, AdapterType.LLAMA_PRO):
        return ()
    parts = find_parts(model)
    there = {parts.of(name) for name, _ in model.named_parameters()}
    return tuple(part for part in ModelPart if part in there and part not in section.train_parts)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """``(all, trainable)`` numbers of parameters; tied ones count once."""
    parameters = list(model.parameters())
    return sum(map(num_weights, parameters)) + num_packed(model), sum(p.numel() for p in parameters if p.requires_grad)


def adapter_facts(model: nn.Module) -> dict[str, object]:
    """What PEFT's config of the adapter says, in JSON types: rank, scale and targets, and what differs from PEFT's
    defaults; {} without an adapter."""
    if not isinstance(model, PeftModel):
        return {}
    settings = model.peft_config[model.active_adapter]
    usual = {each.name: each.default for each in dataclasses.fields(settings)}
    found: dict[str, Any] = {}
    for name, value in settings.to_dict().items():
        said = getattr(value, "value", value)
        if name not in _NO_FACTS and (name in _ALWAYS_TOLD or (said and said != usual.get(name))):
            found[name] = sorted(said) if isinstance(said, set) else said
    for name in ("target_modules", "target_parameters"):
        if isinstance(found.get(name), list):
            found[name] = adapter_targets.collapse(found[name])
    first = {name: found.pop(name) for name in _TOLD_FIRST if name in found}
    return {**first, **dict(sorted(found.items()))}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The stack of decoder layers: the module list as long as the config says; None where there is none."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():  # towers have layers too
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    return None


def _check_some_trained(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> None:
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    there = {parts.of(name) for name, _ in model.named_parameters()}
    raise ModelError(
        f"adapter.train_parts {', '.join(section.train_parts)}: {type(model).__name__} has no such part",
        hint=f"it has {', '.join(part for part in ModelPart if part in there)}",
    )


# ------------------------------------------------------------------------------------------------------- freeze


def _freeze(model: PreTrainedModel, section: AdapterConfig) -> None:
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.startswith(f"{REWARD_HEAD}."):
            parameter.requires_grad_(True)  # it is new, and one row
    count = section.freeze_trainable_layers
    if count:
        layers = decoder_layers(model)
        if layers is None:
            raise ModelError(
                f"{type(model).__name__} has no list of decoder layers",
                hint="use adapter.freeze_trainable_modules instead",
            )
        if abs(count) > len(layers):
            raise ModelError(f"adapter.freeze_trainable_layers is {count}, more than the model's {len(layers)}")
        step, left = divmod(len(layers), count)
        if section.freeze_spread and (left or step < 1):
            what = f"adapter.freeze_spread: {counted(len(layers), 'layer')} cannot be divided into {count} equal parts"
            raise ModelError(what, hint="set adapter.freeze_trainable_layers to the number of layers that were put in")
        last = layers[step - 1 :: step] if section.freeze_spread else layers[-count:] if count > 0 else layers[:-count]
        for layer in last:
            layer.requires_grad_(True)
    for pattern in section.freeze_trainable_modules:
        matched = [
            p for name, p in model.named_parameters(remove_duplicate=False) if adapter_targets.is_whole(name, pattern)
        ]
        if not matched:
            names = ", ".join(adapter_targets.collapse(name for name, _ in model.named_parameters()))
            what = f"adapter.freeze_trainable_modules: no parameter matches {pattern!r}"
            raise ModelError(what, hint=f"there are {names}")
        for parameter in matched:
            parameter.requires_grad_(True)
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "adapter.type freeze leaves nothing to train",
            hint="set adapter.freeze_trainable_layers (2: the last two) or adapter.freeze_trainable_modules",
        )


def tied_by_name(model: nn.Module, patterns: Iterable[str]) -> dict[str, str]:
    """Names by which patterns mean a weight that has another, its first: ``lm_head.weight`` of a tied model."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    named = [name for name in weights if any(adapter_targets.is_whole(name, pattern) for pattern in patterns)]
    first = {id(weight): name for name, weight in model.named_parameters()}
    return {name: other for name in named if (other := first[id(weights[name])]) not in named}


# -------------------------------------------------------------------------------------------------- new layers


_WRITES = re.compile(  # parameters by which a layer adds to the hidden states, in the names of transformers' models
    r"(^|\.)(o_proj|out_proj|down_proj|c_proj|dense|dense_4h_to_h|fc2|w2|wo|output_linear)(\.weight|\.bias|_bias)?$"
)


def _train_new_layers(model: PreTrainedModel, count: int) -> None:
    """Put ``count`` new decoder layers between those that are there, evenly, and train them alone (LLaMA Pro,
    arXiv:2401.02415). Each is a copy of the one below it whose outputs are 0, so the model computes what it did.

    Raises `ModelError` where there is no list of layers, fewer of them than new ones, or where the new ones would do
    something, or would not be where transformers' own class of the model has them.
    """
    layers, config = decoder_layers(model), model.config.get_text_config()
    name = type(model).__name__
    if layers is None or count > len(layers):
        there = "no list of decoder layers" if layers is None else counted(len(layers), "decoder layer")
        raise ModelError(f"adapter.expand_layers is {count}, and {name} has {there}", hint="expand it by fewer layers")
    depth = len(layers)
    copied = [(number + 1) * depth // count - 1 for number in range(count)]  # 6 by 2 -> after layers 2 and 5
    before = _first_logits(model)
    expanded: list[nn.Module] = []
    new: list[nn.Module] = []
    for number, layer in enumerate(layers):
        expanded.append(layer)
        if number in copied:
            new.append(_silent_copy(layer, model))
            expanded.append(new[-1])
    for key, value in list(config.to_dict().items()):
        if isinstance(value, list) and len(value) == depth and _is_by_layer(model, key, value):
            longer = [[each, each] if number in copied else [each] for number, each in enumerate(value)]
            setattr(config, key, [each for part in longer for each in part])
    config.num_hidden_layers = len(expanded)
    layers.extend(new)  # as many as there will be; then all of them in their order
    for number, layer in enumerate(expanded):
        layers[number] = layer
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = number  # type: ignore[assignment]
    _check_expanded(model, before)
    model.requires_grad_(False)
    for module in [*new, *([model.get_submodule(REWARD_HEAD)] if hasattr(model, REWARD_HEAD) else [])]:
        module.requires_grad_(True)


def _is_by_layer(model: PreTrainedModel, key: str, value: list[object]) -> bool:
    """Whether a list in the config has an entry for each layer, such as its kind of attention, and is not as long as
    there are layers by chance: with one entry less there is no such model."""
    config = copy.deepcopy(model.config)
    try:
        setattr(config.get_text_config(), key, value[:-1])
        with torch.device("meta"):
            type(model)(config)
    except Exception:  # noqa: BLE001 - whatever the class's own code raises
        return True
    return "layer" in key


def _silent_copy(layer: nn.Module, model: PreTrainedModel) -> nn.Module:
    shared = {id(config): config for config in (model.config, model.config.get_text_config())}
    copied = copy.deepcopy(layer, shared)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if _WRITES.search(name):
                parameter.zero_()
    return copied


def _check_expanded(model: PreTrainedModel, before: torch.Tensor | None) -> None:
    name = type(model).__name__
    with torch.device("meta"):
        again = type(model)(copy.deepcopy(model.config))
    ours = {key: value.shape for key, value in model.state_dict().items()}
    if ours != {key: value.shape for key, value in again.state_dict().items()}:
        raise ModelError(
            f"adapter.type llama_pro: {name} with more layers has others than copies of those that are there",
            hint="set adapter.type: lora or freeze",
        )
    after = _first_logits(model)
    if before is not None and after is not None and not torch.equal(before, after):
        raise ModelError(
            f"adapter.type llama_pro: a new layer of {name} changes what the model computes, as it writes to the "
            "hidden states by weights that are not known here",
            hint="set adapter.type: lora or freeze",
        )


def _first_logits(model: PreTrainedModel) -> torch.Tensor | None:
    """What the model makes of a few tokens; None without weights."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    ids = torch.arange(8, device=model.device)[None]
    with evaluating(model), torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


# --------------------------------------------------------------------------------------------------------- PEFT


def _new_adapter(
    model: PreTrainedModel, section: AdapterConfig, parts: ModelParts, new_ids: Sequence[int]
) -> PeftModel:
    targets = adapter_targets.targeted(model, section, parts)
    modules = [name for name, _ in model.named_modules() if name]
    for wanted in section.modules_to_save:
        if not any(name == wanted or name.endswith("." + wanted) for name in modules):
            raise ModelError(
                f"adapter.modules_to_save: the model has no module {wanted!r}",
                hint=f"there are {', '.join(adapter_targets.collapse(modules))}",
            )
    adapter_targets.check_some_targeted(model, section, parts)
    common: dict[str, object] = {
        "task_type": task_of(model),
        "target_modules": targets,
        "modules_to_save": list(section.modules_to_save) or None,
        "exclude_modules": adapter_targets.excluded(model, section, parts),
    }
    match section.type:
        case AdapterType.OFT:
            settings: PeftConfig = OFTConfig(r=0, oft_block_size=section.oft_block_size, **common)
        case AdapterType.VERA:
            if (outside := common.pop("exclude_modules")) is not None:  # it can only be told what to adapt
                common["target_modules"] = adapter_targets.inside(model, targets, str(outside))
            settings = VeraConfig(r=section.r, vera_dropout=section.lora_dropout, **common)
        case _:
            rows = _trainable_rows(model, section, targets, new_ids) or None
            with quiet_peft():
                settings = _lora_config(model, section, trainable_token_indices=rows, **common)
            adapter_targets.adapt_experts(settings, model, section, parts)
    try:
        with quiet_peft():
            adapted = get_peft_model(model, settings)
    except (ValueError, AssertionError) as error:  # ranks and block sizes that the layers do not allow
        if "ParamWrapper" not in str(error):
            raise ModelError(f"adapter.type {section.type}: {error}") from error
        raise ModelError(
            f"adapter.type {section.type}: PEFT adapts the experts of a layer as tensors, not as layers, and there "
            f"{str(error).partition('not work with ')[2].rstrip('.')} is not possible",
            hint="remove that key, or name layers without experts in adapter.target_modules: [q_proj, v_proj]",
        ) from error
    except (TypeError, AttributeError) as error:  # a layer that the adapter, or its initialisation, knows nothing of
        start = section.init_lora_weights
        if not (str(error).startswith("Target module") or isinstance(start, str)):
            raise
        begins = f" with init_lora_weights {start}" if isinstance(start, str) else ""
        hint = "set adapter.type: lora with init_lora_weights: true, or name other modules in adapter.target_modules"
        raise ModelError(f"adapter.type {section.type}{begins}: {error}", hint=hint) from error
    _check_patterns(adapted, section)
    check_first_values(adapted, section)
    return adapted


def _lora_config(model: PreTrainedModel, section: AdapterConfig, **common: object) -> LoraConfig:
    names = [name for name, _ in model.named_parameters()]
    for wanted in section.target_parameters:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
            raise ModelError(
                f"adapter.target_parameters: the model has no parameter {wanted!r}",
                hint=f"there are {', '.join(adapter_targets.collapse(names))}",
            )
    return LoraConfig(
        r=section.r,
        lora_alpha=section.lora_alpha if section.lora_alpha is not None else 2 * section.r,
        lora_dropout=section.lora_dropout,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        # these values come later: of rows that are read, and of whole weights that are read again
        init_lora_weights=True
        if section.init_lora_weights in ("loftq", *FROM_BASE_AND_ROWS)
        else section.init_lora_weights,
        target_parameters=list(section.target_parameters) or None,
        eva_config=EvaConfig(rho=1.0) if section.init_lora_weights == "eva" else None,  # the ranks stay as asked
        rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
        **common,
    )


def check_first_values(adapted: nn.Module, section: AdapterConfig) -> None:
    """Raise `ModelError` where ``adapter.init_lora_weights`` takes parts out of a weight that the model uses elsewhere,
    or is not made for a layer: PEFT would leave it as any LoRA begins, or take its weight the wrong way round."""
    start = str(section.init_lora_weights)
    if section.type is not AdapterType.LORA or section.name_or_path is not None:
        return
    bases = [layer.get_base_layer() for layer in adapted.modules() if isinstance(layer, LoraLayer)]
    is_plain = isinstance(section.init_lora_weights, bool) or start == "gaussian"
    if bases and not is_plain and all(isinstance(base, nn.Embedding) for base in bases):
        raise ModelError(
            f"adapter.init_lora_weights is {start}, which is made for linear layers, and only the embedding is adapted",
            hint="name linear layers in adapter.target_modules, or set adapter.init_lora_weights: true",
        )
    if not start.startswith(MUTATING):
        return
    uses = Counter(
        id(weight) for module in adapted.modules() for weight in module._parameters.values() if weight is not None
    )
    for name, layer in adapted.named_modules():
        if not isinstance(layer, LoraLayer) or isinstance(layer.get_base_layer(), nn.Embedding):
            continue  # an embedding begins as any LoRA does
        base, shown = layer.get_base_layer(), name.removeprefix("base_model.model.")
        base = base.token_adapter.get_base_layer() if isinstance(base, TrainableTokensWrapper) else base
        key, way = f"adapter.init_lora_weights is {start}", "or set adapter.init_lora_weights: true"
        if isinstance(base, nn.Linear) and uses[id(base.weight)] > 1:
            raise ModelError(
                f"{key}, which takes a part out of the weight of {shown}, and the model uses this weight elsewhere "
                "too, as its embedding",
                hint=f"take {shown} out of adapter.target_modules, {way}",
            )
        if isinstance(base, Conv1D) and not start.startswith("pissa"):
            what = f"{key}, which is made for linear layers, and {shown} ({type(base).__name__}) is none"
            raise ModelError(what, hint=f"set adapter.init_lora_weights: pissa, {way}")


def _check_patterns(adapted: PeftModel, section: AdapterConfig) -> None:
    """Raise `ModelError` for a pattern of ranks or scales that is the end of no adapted module's name: PEFT passes it
    over."""
    tuner: Any = adapted.base_model
    parameters = tuner.targeted_parameter_names
    names = [*tuner.targeted_module_names, *parameters, *(name.removesuffix(".weight") for name in parameters)]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(section, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                raise ModelError(
                    f"adapter.{key}: no module that is adapted has a name that ends with {pattern!r}",
                    hint=f"there are {', '.join(adapter_targets.collapse(names))}",
                )


def _trainable_rows(
    model: PreTrainedModel, section: AdapterConfig, targets: str | list[str], new_ids: Sequence[int]
) -> dict[str, list[int]]:
    """Which rows of which layers PEFT is to train beside the matrices; a layer that is trained anyway is left out.

    Raises `ModelError` for an output layer whose rows PEFT cannot train apart.
    """
    if not new_ids:
        return {}
    trained = [*section.modules_to_save, *(targets if isinstance(targets, list) else ())]
    found = {}
    _check_shared_rows(model, section, len(new_ids))
    for name, end in ends_of(model).items():
        if any(name == each or name.endswith(f".{each}") for each in trained):
            continue
        if not isinstance(end, nn.Embedding) and (type(end) is not nn.Linear or end.bias is not None):
            raise ModelError(
                f"the rows of {counted(len(new_ids), 'new token')} in {name} ({type(end).__name__}) cannot be trained",
                hint=f"set adapter.modules_to_save: [{name.rpartition('.')[2]}]",
            )
        found[name] = list(new_ids)
    return found


def _check_shared_rows(model: PreTrainedModel, section: AdapterConfig, count: int) -> None:
    """Raise `ModelError` where the rows of new tokens are learned in an embedding that is the output layer's weight,
    too, and that layer is trained in a way in which PEFT cannot have them."""
    last, ends = output_layer(model), list(ends_of(model))
    if last is None or len(ends) > 1:
        return
    name = next(name for name, module in model.named_modules() if module is last)
    first, rows = ends[0].rpartition(".")[2], f"the rows of {counted(count, 'new token')} are learned in the embedding"
    saved, adapted = (
        [each for each in named if name == each or name.endswith(f".{each}")]
        for named in (section.modules_to_save, section.target_modules)
    )
    if saved and not any(ends[0] == each or ends[0].endswith(f".{each}") for each in section.modules_to_save):
        raise ModelError(
            f"adapter.modules_to_save trains {saved[0]} apart from the embedding, whose weight it has, and {rows}",
            hint=f"set adapter.modules_to_save: [{first}, {saved[0]}], or leave {saved[0]} out",
        )
    if adapted and section.use_dora:
        raise ModelError(
            f"PEFT has no DoRA on {adapted[0]}, whose weight is the embedding's, where {rows}",
            hint=f"set adapter.use_dora: false, or take {adapted[0]} out of adapter.target_modules",
        )
