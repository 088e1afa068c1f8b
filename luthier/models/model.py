"""Loading the model: a folder, a Hub id, or a preset with random weights. Each decision is noted with its reason."""

from __future__ import annotations

import importlib.util
import tempfile
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification

from luthier.config.choices import Precision, QuantizationType, Sharding
from luthier.config.inputs import ModelConfig
from luthier.config.schema import RunConfig
from luthier.errors import ModelError, first_line
from luthier.media.families import Attention
from luthier.models import batch_invariance, families_of, is_multimodal, multimodal_class, text_attention
from luthier.models.adapted_code import in_older_code, older_names, restore_buffers, with_tower
from luthier.models.adapter_files import mutates_base
from luthier.models.attention import SEGMENTS, register_attention
from luthier.models.quantized import (
    ask_for_trainable,
    check_stored,
    has_4bit,
    is_quantized,
    is_read_whole,
    kept_modules,
    layers_to_quantize,
    loading_config,
    quantization_note,
    settle,
    stored_method,
)
from luthier.models.routers import choose_experts
from luthier.models.vocabulary import (
    Vocabulary,
    check_computes,
    check_padding,
    check_tokens,
    fit_generation,
    fit_padding,
    fit_unborn,
    fit_vocabulary,
    overridden,
)
from luthier.presets import model_folder
from luthier.sources.origins import modelscope_folder

PRESET = "preset:"
FLASH = frozenset({"flash_attention_2", "flash_attention_3"})
FLASH_CAPABILITY = (8, 0)  # Ampere
_PRODUCTS = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
REWARD_HEAD = "score"  # transformers' name for the module that makes a reward of a hidden state
RANDOM_WEIGHTS = "random weights"  # how the note of a model begins that was not loaded
NEW_HEAD = "a new reward head"  # how the note begins that tells of one with random weights


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model in training mode, on the CPU, and how it came to be. ``source`` is what was loaded from, ``first_values``
    are those of the notes that tell of values which a checkpoint replaces."""

    model: PreTrainedModel
    source: str
    attn_implementation: str
    notes: tuple[str, ...]
    first_values: tuple[str, ...] = ()

    @property
    def varlen(self) -> bool:
        """Whether packed batches need the boundaries of their segments as cumulative lengths."""
        # a model with towers hands what it is given on to them, and FlashAttention there has boundaries of its own:
        # its text is kept apart by positions instead
        return self.attn_implementation in FLASH and not is_multimodal(self.model.config)


def load_model(config: RunConfig, vocabulary: Vocabulary) -> LoadedModel:
    """Load or build the model that ``config.model`` describes, and fit its embeddings to the vocabulary.

    Raises `ModelError` for a model that cannot be found or read, unknown ``config_overrides``, an attention
    implementation that this model or machine does not have, and a vocabulary smaller than the tokenizer's.
    """
    section = config.model
    source, random_init = source_of(section)
    notes: list[str] = []
    model_config = _model_config(section, source, as_it_is=_only_answers(config))
    check_tokens(model_config, section, vocabulary, unborn=random_init)
    if is_reward_model(config):
        model_config.num_labels = 1
    check_stored(model_config, section.quantization, merges=_merging_key(config))
    attention = _attention(section, model_config, notes)
    dtype = _dtype(config, model_config, notes)
    if random_init:
        # the seed is set here, not earlier: the weights must not depend on what drew random numbers before
        torch.manual_seed(config.runtime.seed)
        fit_unborn(model_config, vocabulary, notes)
        model = _build(config, model_config, attention, dtype)
        notes.append(f"{RANDOM_WEIGHTS}, seed {config.runtime.seed}")
    else:
        model = _load(config, source, model_config, attention, dtype, notes)
    first = [note for note in notes if note.startswith((RANDOM_WEIGHTS, NEW_HEAD))]
    resized = fit_vocabulary(model, section, vocabulary)
    notes += resized
    choose_experts(model, section.experts_implementation)
    if is_reward_model(config):
        fit_padding(model, vocabulary, notes)
    else:
        fit_generation(model, vocabulary, notes)
    if is_quantized(model):
        notes.append(quantization_note(model))
    _mend(model)
    return LoadedModel(
        model=model,
        source=source,
        attn_implementation=text_attention(model),
        notes=tuple(notes),
        first_values=(*first, *resized),
    )


def _mend(model: PreTrainedModel) -> None:
    """What models of some families need before they compute a batch as its rows alone; then training mode."""
    restore_buffers(model)
    batch_invariance.hook(model)
    settle(model)
    vars(model.config.get_text_config()).setdefault("use_cache", True)  # Inkling's config says nothing of caches
    model.train()


def quantize_whole(loaded: LoadedModel, config: RunConfig) -> LoadedModel:
    """The model quantized as ``model.quantization`` says, where it was loaded whole: one of random weights, or one that
    adapters were merged into. transformers quantizes what it reads, so the model goes through files beside the run's.
    """
    model = loaded.model
    if config.model.quantization.type is QuantizationType.NONE or is_quantized(model):
        return loaded
    config.output.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.output.dir, prefix=".whole_model_") as folder:
        # every rank reads files of its own, where transformers writes those of the first rank alone
        object.__setattr__(model, "should_save_on_this_rank", lambda _is_main: True)
        model.save_pretrained(folder)
        given = _quantizing(config, model)
        attention = with_tower(model.config, model.config._attn_implementation)
        try:
            with older_names(model.config):
                quantized: PreTrainedModel = type(model).from_pretrained(
                    folder, attn_implementation=attention, dtype=model.dtype, use_safetensors=True, **given
                )
        except (ValueError, ImportError, RuntimeError) as error:
            what = f"{config.model.quantization.type} cannot be made of {type(model).__name__}: {first_line(error)}"
            raise ModelError(f"model.quantization: {what}", hint="set model.quantization: nf4") from error
    quantized.name_or_path = model.name_or_path
    quantized.config.get_text_config().use_cache = model.config.get_text_config().use_cache
    choose_experts(quantized, config.model.experts_implementation)
    _mend(quantized)
    return replace(loaded, model=quantized, notes=(*loaded.notes, quantization_note(quantized)))


def _merging_key(config: RunConfig) -> str | None:
    """The key that has an adapter merged into the model, if there is one."""
    return "adapter.merge_first" if config.adapter.merge_first else "adapter.merge" if config.adapter.merge else None


def check_quantized(config: RunConfig, weightless: PreTrainedModel) -> None:
    """Raise `ModelError` where the model cannot be quantized as asked, or comes quantized in a way that cannot be
    loaded or trained here."""
    section = config.model.quantization
    method = check_stored(weightless.config, section, merges=_merging_key(config))
    if method is not None and not config.adapter.type.is_beside:
        hint = "set adapter: lora (or another adapter), or name the model with weights of 16 bits"
        what = f"comes quantized ({method}), and weights of few bits are not trained"
        raise ModelError(f"adapter.type: the model {what}", hint=hint)
    if method is not None and config.adapter.use_dora and method in ("awq", "gptq"):
        what = f"comes quantized ({method}), and PEFT has no DoRA beside such layers"
        hint = "set adapter.use_dora: false, or name the model with weights of 16 bits, with model.quantization: nf4"
        raise ModelError(f"adapter.use_dora: the model {what}", hint=hint)
    if method is not None and mutates_base(config.adapter):
        what = f"comes quantized ({method}), and {config.adapter.init_lora_weights} takes a part out of whole weights"
        raise ModelError(f"adapter.init_lora_weights: the model {what}", hint="set adapter.init_lora_weights: true")
    if method is not None and config.runtime.sharding is not Sharding.NONE and not has_4bit(weightless.config):
        what = f"comes quantized ({method}), and FSDP would divide its bytes without the scales that say what they mean"
        hint = "set runtime.sharding: none, with the whole model on each device, or name one with weights of 16 bits"
        raise ModelError(f"runtime.sharding: the model {what}", hint=hint)
    layers_to_quantize(weightless, section, config.adapter.modules_to_save)


def _quantizing(config: RunConfig, weightless: PreTrainedModel) -> dict[str, object]:
    """What ``from_pretrained`` is told so that it quantizes; ``weightless`` is the model, with weights or without.

    Raises as `layers_to_quantize`.
    """
    section, trained = config.model.quantization, config.adapter.modules_to_save
    layers_to_quantize(weightless, section, trained)
    kept = kept_modules(weightless, section, trained)
    how = loading_config(section, _PRODUCTS[run_precision(config)], kept)
    return {"quantization_config": how, "device_map": _device_map(config)}


def _device_map(config: RunConfig) -> dict[str, object]:
    """Where a quantized model is loaded; one that is to be divided may be too large for a device as a whole."""
    is_divided = config.runtime.sharding is not Sharding.NONE and torch.distributed.is_initialized()
    return {"": torch.cuda.current_device() if run_device(config) == "cuda" and not is_divided else "cpu"}


def is_reward_model(config: RunConfig) -> bool:
    """Whether the model ends in one number a token instead of logits."""
    return not config.objective.kind.has_head


def build_weightless(config: RunConfig, vocabulary: Vocabulary) -> PreTrainedModel:
    """The model of `load_model` on torch's meta device: all its shapes and no numbers; only its config is read.

    Raises `ModelError` for a config that cannot be found or read, and for ``config_overrides`` that make no model.
    """
    section = config.model
    source, random_init = source_of(section)
    model_config = _model_config(section, source)
    check_tokens(model_config, section, vocabulary, unborn=random_init)
    fit_unborn(model_config, vocabulary, [])
    with torch.device("meta"):
        model = _build(config, model_config, None, _dtype(config, model_config, []))
    if section.config_overrides:
        plain = config.model_copy(update={"model": section.model_copy(update={"config_overrides": {}})})
        check_computes(model, section, lambda: build_weightless(plain, vocabulary))
    return model


def check_choices(config: RunConfig) -> None:
    """Raise `ModelError` where the model's config, or attention and kernels as the run names them, cannot be had."""
    source, _ = source_of(config.model)
    _attention(config.model, _model_config(config.model, source), [])
    use_liger(config.model)


def use_liger(section: ModelConfig) -> bool:
    """Whether Liger's kernels are used. Raises `ModelError` if they are demanded where they cannot run."""
    installed = importlib.util.find_spec("liger_kernel") is not None
    match section.use_liger_kernel:
        case "auto":
            return installed and torch.cuda.is_available()
        case True:
            if not (installed and torch.cuda.is_available()):
                missing = "no CUDA device is there" if installed else "liger-kernel is not installed"
                raise ModelError(f"model.use_liger_kernel is true, but {missing}", hint="set it to auto or false")
            return True
        case False:
            return False
        case _:
            raise AssertionError(section.use_liger_kernel)


def run_precision(config: RunConfig) -> Precision:
    """What ``train.precision`` means on this machine; never ``auto``."""
    asked = config.train.precision
    if asked is not Precision.AUTO:
        return asked
    on_gpu = run_device(config) == "cuda"
    return Precision.BF16 if on_gpu and torch.cuda.is_bf16_supported() else Precision.FP32


def run_device(config: RunConfig) -> str:
    """``cuda`` or ``cpu``. Raises `ModelError` if CUDA is asked for and absent."""
    if config.runtime.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.runtime.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("runtime.device is cuda, but torch sees no CUDA device", hint="set runtime.device: auto")
    return config.runtime.device


def source_of(section: ModelConfig) -> tuple[str, bool]:
    """Where to load from, and whether the weights are random."""
    if section.name_or_path.startswith(PRESET):
        return str(model_folder(section.name_or_path.removeprefix(PRESET))), True
    name = section.name_or_path
    if not Path(name).expanduser().exists():
        fetched = modelscope_folder(name, revision=section.revision, cache_dir=section.cache_dir)
        name = name if fetched is None else str(fetched)
    return name, section.random_init


def _hub_arguments(section: ModelConfig, source: str) -> dict[str, object]:
    arguments: dict[str, object] = {"trust_remote_code": section.trust_remote_code, "cache_dir": section.cache_dir}
    if not Path(source).is_dir():
        arguments["revision"] = section.revision
    return arguments


def _only_answers(config: RunConfig) -> bool:
    """Whether weights are neither trained nor changed, so that a model answers as it does for others."""
    section = config.adapter
    return not (config.train.enabled or section.type.is_beside or section.merge_first or section.name_or_path)


def _model_config(section: ModelConfig, source: str, *, as_it_is: bool = False) -> PretrainedConfig:
    try:
        found = AutoConfig.from_pretrained(source, **_hub_arguments(section, source))
    except (OSError, ValueError, KeyError) as error:
        hint = "name a folder with config.json, a Hub id, or preset:NAME"
        if "trust_remote_code" in str(error):
            hint = "read that code, and set model.trust_remote_code: true if you trust it"
        raise ModelError(f"model.name_or_path {section.name_or_path!r}: {first_line(error)}", hint=hint) from error
    if not (as_it_is and stored_method(found) == "compressed-tensors"):
        ask_for_trainable(found)
    if not section.config_overrides:
        return found
    written, _ = type(found).get_config_dict(source, **_hub_arguments(section, source))
    return overridden(found, section, written)


def _attention(section: ModelConfig, model_config: PretrainedConfig, notes: list[str]) -> str | None:
    """The implementation to ask transformers for; None lets it take sdpa, or eager for models that have no sdpa."""
    asked = section.attn_implementation
    if asked == SEGMENTS:
        register_attention()
        return asked
    on_gpu = torch.cuda.is_available()
    in_blocks = (Attention.IMAGE_BLOCKS, Attention.WHOLE_BLOCKS, Attention.PREFIX)
    sees_blocks = any(family.attention in in_blocks for family in families_of(model_config))
    if asked == "auto":
        if sees_blocks:
            notes.append(
                "attention by transformers' choice: FlashAttention cannot let an image's tokens see each other"
            )
            return None
        if on_gpu and importlib.util.find_spec("flash_attn") is not None:
            notes.append("attention flash_attention_2: flash-attn is installed and a GPU is there")
            return "flash_attention_2"
        notes.append("attention by transformers' choice: " + ("flash-attn is not installed" if on_gpu else "no GPU"))
        return None
    if asked in FLASH and sees_blocks:
        raise ModelError(
            f"model.attn_implementation {asked} cannot let the tokens of an image see each other both ways, as "
            f"{type(model_config).__name__} wants it",
            hint="set model.attn_implementation: auto",
        )
    if asked in FLASH | {"flex_attention"} and not on_gpu:
        # flex_attention has no backward on the CPU
        raise ModelError(
            f"model.attn_implementation {asked} trains on a GPU only, and torch sees none",
            hint="set model.attn_implementation: auto",
        )
    if asked in FLASH and torch.cuda.get_device_capability() < FLASH_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        raise ModelError(
            f"model.attn_implementation {asked} needs a GPU of compute capability 8.0, {name} has {major}.{minor}",
            hint="set model.attn_implementation: auto",
        )
    return asked


def _dtype(config: RunConfig, model_config: PretrainedConfig, notes: list[str]) -> torch.dtype:
    asked = config.model.dtype
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked]
    if not config.adapter.type.is_beside:
        notes.append("weights in float32: the optimizer's updates are too small for 16 bits")
        return torch.float32
    stored = model_config.dtype
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _model_class(config: RunConfig, model_config: PretrainedConfig) -> Any:
    if is_reward_model(config):
        return reward_class(model_config)
    return in_older_code(multimodal_class(model_config) or AutoModelForCausalLM, model_config)


def _build(
    config: RunConfig, model_config: PretrainedConfig, attention: str | None, dtype: torch.dtype
) -> PreTrainedModel:
    section = config.model
    try:
        model: PreTrainedModel = _model_class(config, model_config).from_config(
            model_config, attn_implementation=attention, dtype=dtype, trust_remote_code=section.trust_remote_code
        )
    except (ValueError, ImportError) as error:
        raise ModelError(f"model.name_or_path {section.name_or_path!r}: {first_line(error)}") from error
    except (RuntimeError, ArithmeticError, LookupError, TypeError, AttributeError, AssertionError) as error:
        if not section.config_overrides:
            raise
        raise ModelError(
            f"model.config_overrides: {type(model_config).__name__} makes no model with these entries: "
            f"{type(error).__name__}: {first_line(error)}",
            hint="sizes that are not changed have to fit those that are",
        ) from error
    return model


def _load(
    config: RunConfig,
    source: str,
    model_config: PretrainedConfig,
    attention: str | None,
    dtype: torch.dtype,
    notes: list[str],
) -> PreTrainedModel:
    section = config.model
    check_padding(model_config, section)
    quantizing: dict[str, object] = {}
    if is_read_whole(model_config):
        how = f"comes quantized ({stored_method(model_config)}): its weights are made whole as they are loaded"
        notes.append(f"{type(model_config).__name__.removesuffix('Config')} {how}")
    elif stored_method(model_config) is not None:
        quantizing = {"device_map": _device_map(config)}
    elif section.quantization.type is not QuantizationType.NONE and not config.adapter.merge_first:
        with torch.device("meta"):
            quantizing = _quantizing(config, _build(config, deepcopy(model_config), None, dtype))
    torch.manual_seed(config.runtime.seed)  # for a reward head that is not in the file
    model: PreTrainedModel
    try:
        model, info = _model_class(config, model_config).from_pretrained(
            source,
            config=model_config,
            attn_implementation=attention,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=True,  # never a pickle
            **quantizing,
            **_hub_arguments(section, source),
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"model.name_or_path {section.name_or_path!r}: {first_line(error)}",
            hint="weights must be safetensors; for random weights set model.random_init: true",
        ) from error
    problems = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "mismatched_keys") if info[kind]}
    if is_reward_model(config) and problems == {"missing_keys": [f"{REWARD_HEAD}.weight"]}:
        notes.append(f"{NEW_HEAD}, seed {config.runtime.seed}: the file has none")
        return model
    if problems:
        listed = "; ".join(f"{kind}: {len(keys)} ({', '.join(keys[:5])} …)" for kind, keys in problems.items())
        raise ModelError(
            f"the weights in {source} do not fill {type(model).__name__}: {listed}",
            hint="the parts without weights would be random; check model.config_overrides, or set model.random_init",
        )
    return model


# --------------------------------------------------------------------------------------------------------------------
# The class of a reward model: transformers' own, or, for models that it has none of, one in the same manner.
#
# Most multimodal models have no ``…ForSequenceClassification`` in transformers. Theirs is made here of what
# transformers makes the others of: the base model, and a linear layer ``score`` on its hidden states. `reward_class`
# gives the same class again, so ``reward_class(config).from_pretrained(folder)`` loads what was saved.


def reward_class(model_config: PretrainedConfig) -> Any:
    """What has ``from_pretrained`` and ``from_config`` for reward models of this config.

    Raises `ModelError` for a config that no class with a head is made of.
    """
    kind = type(model_config)
    if kind in AutoModelForSequenceClassification._model_mapping:
        return AutoModelForSequenceClassification
    comes_with_files = any(row.has_own_class for row in families_of(model_config))
    generating = None if comes_with_files else multimodal_class(model_config)
    if generating is None:
        raise ModelError(
            f"transformers knows no reward model for a {kind.__name__}, and none from which one could be made",
            hint="train a reward model of another family",
        )
    return _made_of(generating._model_mapping[kind])


@cache
def _made_of(generating: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """``Qwen2_5_VLForConditionalGeneration`` -> ``Qwen2_5_VLForSequenceClassification``."""
    plain = next(each for each in generating.__mro__[1:] if issubclass(each, PreTrainedModel))
    name = generating.__name__.partition("For")[0]
    # of a class that is not its own transformers renames no weights by the kind of model
    members = {"__module__": generating.__module__, "from_config": classmethod(_from_config)}
    made: type[PreTrainedModel] = type(
        f"{name}ForSequenceClassification", (GenericForSequenceClassification, plain), members
    )
    # files may call weights otherwise than modules do; which names are which goes by the class
    renamed = get_checkpoint_conversion_mapping(generating.__name__)
    if renamed is not None:
        register_checkpoint_conversion_mapping(made.__name__, renamed, overwrite=True)
    return made


def _from_config(
    cls: Any, /, model_config: PretrainedConfig, *, trust_remote_code: bool = False, **kwargs: object
) -> object:
    """As the Auto classes have it; the code is ours, whoever is trusted."""
    return cls._from_config(model_config, **kwargs)
