"""Which weights are trained: all, some (freeze), or an adapter beside them (PEFT: the LoRA family, OFT)."""

from __future__ import annotations

import fnmatch
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, OFTConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from luthier.config.schema import AdapterConfig, AdapterType, Part
from luthier.errors import ModelError
from luthier.models.model import REWARD_HEAD
from luthier.models.parts import ModelParts, find_parts

ALL_LINEAR = "all-linear"
MUTATING = ("pissa", "olora")  # initialisations that move a part of the base weights into the adapter


def apply_adapter(
    model: PreTrainedModel, section: AdapterConfig, parts: ModelParts | None = None
) -> PreTrainedModel | PeftModel:
    """Mark what is trained. Frozen parameters have ``requires_grad`` False afterwards, and so have all in parts of the
    model that ``adapter.train_parts`` leaves out. ``parts`` None: those that `find_parts` finds by itself.

    Raises `ModelError` where a pattern matches nothing (with the names there are), where nothing would be trained, and
    where an adapter to go on from is of another type.
    """
    parts = find_parts(model) if parts is None else parts
    match section.type:
        case AdapterType.FULL:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parts.of(name) in section.train_parts)
            _check_some_trained(model, section, parts)
            return model
        case AdapterType.FREEZE:
            _freeze(model, section)
            return model
        case AdapterType.LORA | AdapterType.OFT:
            if section.name_or_path is not None:
                return _continue_adapter(model, section, section.name_or_path)
            return _new_adapter(model, section, parts)
        case _:
            raise AssertionError(section.type)


def parts_left_out(model: PreTrainedModel, section: AdapterConfig) -> tuple[Part, ...]:
    """The parts of a model that sees or hears whose weights stay as they are, by ``adapter.train_parts``."""
    if section.type is AdapterType.FREEZE:
        return ()
    parts = find_parts(model)
    there = {parts.of(name) for name, _ in model.named_parameters()}
    return tuple(part for part in Part if part in there and part not in section.train_parts)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """``(all, trainable)`` numbers of parameters; tied ones count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def mutates_base(section: AdapterConfig) -> bool:
    """Whether the adapter's initialisation changed the base weights, so that saving needs a conversion."""
    initial = section.init_lora_weights
    return (
        section.type is AdapterType.LORA
        and section.name_or_path is None
        and isinstance(initial, str)
        and initial.startswith(MUTATING)
    )


def keep_initial_adapter(model: PeftModel, folder: Path) -> None:
    """Save the adapter as it was initialised: `save_adapter` subtracts it again. For `mutates_base` only."""
    settings = model.peft_config["default"]
    named, settings.init_lora_weights = settings.init_lora_weights, True
    model.save_pretrained(str(folder))
    settings.init_lora_weights = named


def save_adapter(
    model: PeftModel, folder: Path, *, initial: Path | None = None, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Write the adapter in PEFT's format, loadable on the untouched base model.

    With ``initial`` (PiSSA, OLoRA) it becomes a plain LoRA of twice the rank, since ``B A - B0 A0`` is what was learned
    (Meng et al. 2024, appendix C of arXiv:2404.02948).
    """
    if initial is None:
        model.save_pretrained(str(folder), state_dict=weights)
        return
    settings = model.peft_config["default"]
    before = (settings.init_lora_weights, settings.r, settings.lora_alpha)
    # PEFT rewrites the settings of the folder it compares with, so it gets a copy; its name is to have no dots
    scratch = folder / "initial_adapter"
    shutil.copytree(initial, scratch, dirs_exist_ok=True)
    try:
        with _quiet_peft():
            model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(scratch))
    finally:
        settings.init_lora_weights, settings.r, settings.lora_alpha = before
        shutil.rmtree(scratch)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The stack of decoder layers: the module list as long as the config says; None where there is none."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():  # towers have layers too
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    return None


def merge_adapter(model: PeftModel) -> PreTrainedModel:
    """The base model with the adapter added to its weights. The adapter is gone afterwards."""
    return model.merge_and_unload(safe_merge=True)


def split_loraplus_groups(optimizer: torch.optim.Optimizer, model: nn.Module, ratio: float) -> None:
    """Give LoRA's B matrices ``ratio`` times the learning rate (LoRA+, arXiv:2402.12354), in groups of their own."""
    is_b = {id(p) for name, p in model.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name}
    if not is_b:
        raise ModelError(
            "adapter.loraplus_lr_ratio is set, but the adapter has no lora_B", hint="use adapter.type: lora"
        )
    for group in list(optimizer.param_groups):
        mine = [p for p in group["params"] if id(p) in is_b]
        if not mine:
            continue
        group["params"] = [p for p in group["params"] if id(p) not in is_b]
        settings = {key: value for key, value in group.items() if key != "params"}
        optimizer.add_param_group({**settings, "params": mine, "lr": settings["lr"] * ratio})


def _check_some_trained(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> None:
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    there = {parts.of(name) for name, _ in model.named_parameters()}
    raise ModelError(
        f"adapter.train_parts {', '.join(section.train_parts)}: {type(model).__name__} has no such part",
        hint=f"it has {', '.join(part for part in Part if part in there)}",
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
                f"{type(model).__name__} has no list of {model.config.get_text_config().num_hidden_layers} layers",
                hint="use adapter.freeze_trainable_modules instead",
            )
        if abs(count) > len(layers):
            raise ModelError(f"adapter.freeze_trainable_layers is {count}, the model has {len(layers)} layers")
        for layer in layers[-count:] if count > 0 else layers[:-count]:
            layer.requires_grad_(True)
    for pattern in section.freeze_trainable_modules:
        matched = [p for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            names = _collapse(name for name, _ in model.named_parameters())
            raise ModelError(
                f"adapter.freeze_trainable_modules: no parameter matches {pattern!r}",
                hint=f"there are {', '.join(names)}",
            )
        for parameter in matched:
            parameter.requires_grad_(True)
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "adapter.type freeze leaves nothing to train",
            hint="set adapter.freeze_trainable_layers (2: the last two) or adapter.freeze_trainable_modules",
        )


# --------------------------------------------------------------------------------------------------------- PEFT


def _new_adapter(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> PeftModel:
    targets = _targets(model, section, parts)
    _check_modules_to_save(model, section.modules_to_save)
    # a reward model's head is new, so it is trained as a whole, which PEFT knows by the kind of task
    common: dict[str, Any] = {
        "task_type": "CAUSAL_LM" if model.can_generate() else "SEQ_CLS",
        "target_modules": targets,
        "modules_to_save": list(section.modules_to_save) or None,
        "exclude_modules": parts.outside(model, section.train_parts),
    }
    if section.type is AdapterType.OFT:
        settings: PeftConfig = OFTConfig(r=0, oft_block_size=section.oft_block_size, **common)
    else:
        settings = LoraConfig(
            r=section.r,
            lora_alpha=section.lora_alpha if section.lora_alpha is not None else 2 * section.r,
            lora_dropout=section.lora_dropout,
            use_rslora=section.use_rslora,
            use_dora=section.use_dora,
            init_lora_weights=section.init_lora_weights,
            **common,
        )
    try:
        with _quiet_peft():
            return get_peft_model(model, settings)
    except (ValueError, AssertionError) as error:  # ranks and block sizes that the layers do not allow
        raise ModelError(f"adapter.type {section.type}: {error}") from error


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Silence three warnings of PEFT: of a property that transformers has renamed, though both names say the same; of
    mutated base weights, given while PEFT itself does the conversion that the warning advises; and of its own settings
    for fused experts, which it applies, but looks for among modules only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not", category=RuntimeWarning)
        warnings.filterwarnings("ignore", message=".* changes the base weights of the model", category=UserWarning)
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


def _continue_adapter(model: PreTrainedModel, section: AdapterConfig, source: str) -> PeftModel:
    try:
        found = PeftConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"adapter.name_or_path {source!r} is no adapter: {error}", hint="name a folder with adapter_config.json"
        ) from error
    kind = found.peft_type.value.lower()
    if kind != section.type.value:
        raise ModelError(
            f"adapter.name_or_path {source!r} is of type {kind}, adapter.type is {section.type.value}",
            hint=f"set adapter.type: {kind}",
        )
    try:
        with _quiet_peft():
            return PeftModel.from_pretrained(model, source, is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"adapter.name_or_path {source!r} does not fit the model: {error}") from error


def _targets(model: PreTrainedModel, section: AdapterConfig, parts: ModelParts) -> str | list[str]:
    """What PEFT calls target_modules: ``all-linear``, suffixes as they were given, or the full names that match."""
    patterns = section.target_modules
    if ALL_LINEAR in patterns:
        if len(patterns) > 1:
            raise ModelError(f"adapter.target_modules: {ALL_LINEAR} stands alone", hint="drop the other patterns")
        return ALL_LINEAR
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and parts.of(name) in section.train_parts
    ]
    chosen: list[str] = []
    for pattern in patterns:
        matched = [name for name in linear if _matches(name, pattern)]
        if not matched:
            raise ModelError(
                f"adapter.target_modules: no linear module matches {pattern!r}{_of_parts(parts, section)}",
                hint=f"there are {', '.join(_collapse(linear))}",
            )
        chosen.extend(matched)
    plain = all(re.fullmatch(r"\w+", pattern) for pattern in patterns)
    return list(patterns) if plain else sorted(set(chosen))


def _of_parts(parts: ModelParts, section: AdapterConfig) -> str:
    return f" in {', '.join(section.train_parts)} (adapter.train_parts)" if parts else ""


def _check_modules_to_save(model: PreTrainedModel, names: list[str]) -> None:
    modules = [name for name, _ in model.named_modules() if name]
    for wanted in names:
        if not any(name == wanted or name.endswith("." + wanted) for name in modules):
            raise ModelError(
                f"adapter.modules_to_save: the model has no module {wanted!r}",
                hint=f"there are {', '.join(_collapse(modules))}",
            )


def _matches(name: str, pattern: str) -> bool:
    """``q_proj`` and ``self_attn.*`` match the end of a dotted name, ``model.layers.0.*`` the whole of it."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, "*." + pattern)


def _collapse(names: Iterable[str]) -> list[str]:
    """Layer numbers become ``N``: ``layers.0.q, layers.1.q`` -> ``layers.N.q``."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".N", name) for name in names))
