"""Adapters in files: going on from one, merging some before a run, saving and merging one after it."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import math
import mmap
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from luthier.config.adapters import MUTATING
from luthier.config.choices import AdapterType
from luthier.config.schema import AdapterConfig
from luthier.errors import ModelError
from luthier.models.adapter_targets import with_exact_modules
from luthier.models.quantized import dequantized, is_quantized, page_out
from luthier.writing import counted, write_text

_IS_OF_ADAPTER = re.compile(r"\.(lora|oft|vera)_")  # not a module that is saved whole, nor an embedding beside it
_DIGEST = "digest.txt"
_HEADS = ("classifier", "score")  # what PEFT adds to the modules of a model that judges


def existing_settings(source: str, key: str) -> PeftConfig:
    """The settings of an adapter that is there; raises `ModelError` where none is."""
    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / CONFIG_NAME).is_file():  # not a name on the Hub
        inside = folder / "model"  # of a run
        hint = f"set {key}: {inside}" if (inside / CONFIG_NAME).is_file() else f"name a folder with {CONFIG_NAME}"
        raise ModelError(f"{key} {source!r} is not an adapter: the folder has no {CONFIG_NAME}", hint=hint)
    try:
        return PeftConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        hint = f"name a folder with {CONFIG_NAME}"
        raise ModelError(f"{key} {source!r} is not an adapter: {error}", hint=hint) from error


def task_of(model: PreTrainedModel) -> str:
    """What PEFT calls the model's task. It trains the head of a reward model, which is new, whole; and it asks a model
    that is said to answer for what only such a model has."""
    return "CAUSAL_LM" if model.can_generate() else "SEQ_CLS"


def _has_other_task(model: PreTrainedModel, settings: PeftConfig) -> bool:
    """Whether an adapter comes from a model of another task, as that of a reward model does which goes on from SFT."""
    return settings.task_type is not None and settings.task_type != task_of(model)


def _to_merge(model: PreTrainedModel, source: str, key: str) -> PeftConfig:
    """The settings of an adapter that is merged: for a model of another task it has matrices alone."""
    settings = existing_settings(source, key)
    if settings.is_prompt_learning:
        kind = settings.peft_type.value.lower()
        raise ModelError(
            f"{key} {source!r} is of type {kind}, which is tokens before the text and no change of weights"
        )
    if _has_other_task(model, settings):
        settings.task_type = None
    return settings


def check_existing(section: AdapterConfig, source: str) -> PeftConfig:
    """The settings of an adapter to go on from; raises `ModelError` where none is there, or one of another type."""
    found = existing_settings(source, "adapter.name_or_path")
    kind = found.peft_type.value.lower()
    if kind != section.type.value:
        is_known = any(each.is_beside and each.value == kind for each in AdapterType)
        way = f"set adapter.type: {kind}"
        if not is_known:
            merged = "" if found.is_prompt_learning else "; adapter.merge_first takes it into the weights"
            way = f"write the name of a LoRA, an OFT or a VeRA: {kind} is not trained{merged}"
        what = f"adapter.name_or_path {source!r} is of type {kind}, adapter.type is {section.type.value}"
        raise ModelError(what, hint=way)
    return found


def continue_adapter(model: PreTrainedModel, section: AdapterConfig, source: str) -> PeftModel:
    settings = check_existing(section, source)
    try:
        with quiet_peft(source):
            if _has_other_task(model, settings):  # what else is trained, the head of a reward model, begins anew
                adapted = shape_existing(model, section, source)
                state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
                set_peft_model_state_dict(adapted, {**state, **load_peft_weights(source, device="cpu")})
            else:
                adapted = PeftModel.from_pretrained(model, source, is_trainable=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"adapter.name_or_path {source!r} does not fit the model: {error}") from error
    _check_fit(adapted, source)
    set_matrices(with_exact_modules(adapted), load_peft_weights(source, device="cpu"))
    return adapted


def load_to_answer(model: PreTrainedModel | PeftModel, source: str, name: str = "default") -> PeftModel:
    """The model with the adapter in a folder, not to be trained, beside those that it has. Raises `ModelError` for one
    that does not fit."""
    try:
        with quiet_peft(source):
            if isinstance(model, PeftModel):
                adapted = model
                adapted.load_adapter(source, adapter_name=name)
            else:
                adapted = PeftModel.from_pretrained(model, source, adapter_name=name)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the adapter in {source} does not fit its base: {error}") from error
    _check_fit(adapted, source, "the adapter", name=name)
    set_matrices(with_exact_modules(adapted), load_peft_weights(source, device="cpu"), name)
    return adapted


def shape_existing(model: PreTrainedModel, section: AdapterConfig, source: str) -> PeftModel:
    """The model with matrices of the sizes of an adapter's, and not its weights, which may be larger than the memory.

    Raises `ModelError` where the adapter is missing, is of another type, or does not fit the model.
    """
    settings = check_existing(section, source)
    if _has_other_task(model, settings):
        settings.task_type = task_of(model)
        settings.modules_to_save = [one for one in settings.modules_to_save or () if one not in _HEADS] or None
    settings.inference_mode, settings.base_model_name_or_path = False, None
    if isinstance(settings, LoraConfig):
        settings.init_lora_weights = True  # an initialisation that reads the weights has none to read
    try:
        with quiet_peft():
            adapted = get_peft_model(model, settings)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise _misfit(source, str(error).splitlines()[0]) from error
    _check_fit(adapted, source)
    return adapted


def merge_first(model: PreTrainedModel, section: AdapterConfig) -> PreTrainedModel:
    """The model with the adapters of ``adapter.merge_first`` merged into its weights, in their order.

    Raises `ModelError` for one that is missing, does not fit the model, or cannot be merged.
    """
    for index, source in enumerate(section.merge_first):
        key = f"adapter.merge_first[{index}]"
        try:
            with quiet_peft(source):
                adapted = PeftModel.from_pretrained(model, source, config=_to_merge(model, source, key))
            _check_fit(adapted, source, key)
            set_matrices(adapted, load_peft_weights(source, device="cpu"))
            model = merge_adapter(adapted)
        except (OSError, ValueError, RuntimeError, SafetensorError, AttributeError, NotImplementedError) as error:
            raise ModelError(f"{key} {source!r} cannot be merged: {error}") from error
    return model


def check_mergeable(model: PreTrainedModel, source: str, key: str) -> None:
    """Raise `ModelError` where an adapter is missing or does not fit a model, which may be without weights."""
    settings = _to_merge(model, source, key)
    settings.inference_mode, settings.base_model_name_or_path = True, None
    if isinstance(settings, LoraConfig):
        settings.init_lora_weights = True
    try:
        with quiet_peft():
            adapted = get_peft_model(model, settings)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise _misfit(source, str(error).splitlines()[0], key) from error
    try:
        _check_fit(adapted, source, key)
    finally:
        adapted.unload()


def merge_adapter(model: PeftModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The base model with the adapter added to its weights, in ``dtype`` where one is given. The adapter is gone
    afterwards.

    A quantized base is dequantized before: a sum that was rounded to few bits again would not be what was trained.
    Raises `ModelError` where transformers cannot dequantize it.
    """
    base = model.get_base_model()
    if is_quantized(base):
        with tempfile.TemporaryDirectory(prefix="luthier_adapter_") as folder, quiet_peft():
            model.save_pretrained(folder, save_embedding_layers=saves_embeddings(model))
            base = dequantized(_without_rows(model.unload()))
            give_back_freed()
            with quiet_peft(folder):
                model = PeftModel.from_pretrained(base, folder)
            set_matrices(with_exact_modules(model), load_peft_weights(folder, device="cpu"))
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):  # trained in float32
            for trained in module.modules_to_save.values():
                for weight, was in zip(trained.parameters(), module.original_module.parameters(), strict=True):
                    weight.data = weight.data.to(dtype or was.dtype)
    _take_in_rows(model)
    _untie(model)
    _merge_layers(model, dtype)
    model = model if dtype is None else model.to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")  # this is what was wanted
        return model.merge_and_unload(safe_merge=True)


def _without_rows(model: PreTrainedModel) -> PreTrainedModel:
    """The model without what is left of rows of new tokens on a layer that had another adapter, too."""
    for name, module in list(model.named_modules()):
        if isinstance(module, TrainableTokensWrapper):
            model.set_submodule(name, module.token_adapter.get_base_layer())
    return model


def _take_in_rows(model: PeftModel) -> None:
    """Write rows of new tokens into a layer that another adapter is on, too: PEFT would leave them out."""
    for module in list(model.modules()):
        if isinstance(module, BaseTunerLayer) and isinstance(module.base_layer, TrainableTokensWrapper):
            rows = module.base_layer.token_adapter
            rows.merge(safe_merge=True)
            module.base_layer = rows.get_base_layer()


def _untie(model: PeftModel) -> None:
    """Give an adapted layer a weight of its own where it shares one, as an embedding and an output layer do: else what
    is added to one of them would be added to both. Rows of new tokens are trained alike in both."""
    shared = Counter(
        id(weight)
        for module in model.modules()
        for weight in module._parameters.values()
        if weight is not None  # a bias that a layer does not have
    )
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer) or isinstance(module, TrainableTokensLayer):
            continue
        layer = module.get_base_layer()
        for name, weight in list(layer.named_parameters(recurse=False)):
            if shared[id(weight)] > 1:
                shared[id(weight)] -= 1
                setattr(layer, name, nn.Parameter(weight.data, requires_grad=False))
                config = model.get_base_model().config
                config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def _merge_layers(model: PeftModel, dtype: torch.dtype | None) -> None:
    """Merge layer by layer, so that there is never a weight both in memory and in the file that it came from. Layers
    that PEFT unloads in a way of their own are left to it.

    A merge takes several times its layer's weight for a moment, so the largest layers come first, while most of the
    others are still in the file."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer) and not hasattr(module, "unload_and_optionally_merge_module")
    ]
    for module in sorted(layers, key=_num_bytes, reverse=True):
        before = [weight.data for weight in module.get_base_layer().parameters(recurse=False)]
        if dtype is not None:
            module.to(dtype)
        module.merge(safe_merge=True)
        after = {weight.data_ptr() for weight in module.get_base_layer().parameters(recurse=False)}
        for weight in before:
            if weight.data_ptr() not in after:
                _leave_in_file(weight)
        del before
        give_back_freed()


def _num_bytes(module: BaseTunerLayer) -> int:
    return sum(weight.nbytes for weight in module.get_base_layer().parameters())


def _leave_in_file(weight: torch.Tensor) -> None:
    """Take the pages of a weight that is about to be dropped out of memory, where it lies in a memory-mapped file."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if weight.device.type == "cpu" and end > start:
        page_out(start, end - start)


def give_back_freed(*, cycles: bool = False) -> None:
    """Have glibc return freed blocks to the system; with ``cycles``, those of objects that refer to each other, too."""
    if cycles:
        gc.collect()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


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
    with quiet_peft():
        model.save_pretrained(str(folder))
    settings.init_lora_weights = named
    write_text(folder / _DIGEST, _digest(folder / SAFETENSORS_WEIGHTS_NAME))


def linear_layers(model: PeftModel) -> Iterator[tuple[str, LoraLayer]]:
    """The linear layers that have a LoRA beside them, by name."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear):
            yield name, layer


@torch.no_grad()
def take_out(layer: LoraLayer, whole_OI: torch.Tensor, A_RI: torch.Tensor, B_OR: torch.Tensor) -> None:
    """Leave in the base what the weight has beside ``B A``, scaled, with which the adapter begins."""
    moved_OI = layer.scaling["default"] * (B_OR.float() @ A_RI.float())
    layer.get_base_layer().weight.data = (whole_OI.float() - moved_OI).to(whole_OI.dtype)


def take_out_initial(model: PeftModel, folder: Path) -> None:
    """The same for all layers of a run that goes on, by the adapter that `keep_initial_adapter` saved.

    Raises `ModelError` where that is missing or damaged.
    """
    file = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        whole = (folder / _DIGEST).read_text(encoding="utf-8") == _digest(file)
        values = load_file(file) if whole else {}
    except (OSError, ValueError, SafetensorError):
        whole = False
    if not whole:
        raise ModelError(
            f"{folder}, the adapter with which this run began, is missing or damaged: nothing else says what was "
            "taken out of the base",
            hint="begin again with output.overwrite: true",
        )
    for name, layer in linear_layers(model):
        first = [values[f"{name}.lora_{part}.weight"].to(layer.get_base_layer().weight.device) for part in "AB"]
        take_out(layer, layer.get_base_layer().weight.data, *first)


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def saves_embeddings(model: PeftModel) -> bool | str:
    """What PEFT calls ``save_embedding_layers``: a table that has grown is saved whole, unless the adapter has the rows
    of new tokens by themselves. It has not where a LoRA is on the table, whose first rows for them are nowhere else."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if getattr(model.peft_config[model.active_adapter], "trainable_token_indices", None) is None:
        return False if all(isinstance(end, ModulesToSaveWrapper) for end in ends) else "auto"  # else three copies
    return any(isinstance(end, LoraLayer) and not isinstance(end.base_layer, TrainableTokensWrapper) for end in ends)


def save_adapter(
    model: PeftModel, folder: Path, *, initial: Path | None = None, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Write the adapter in PEFT's format, loadable on the untouched base model.

    With ``initial`` (PiSSA, OLoRA) it becomes a plain LoRA of twice the rank, since ``B A - B0 A0`` is what was learned
    (Meng et al. 2024, appendix C of arXiv:2404.02948).
    """
    with quiet_peft():
        model.save_pretrained(str(folder), state_dict=weights, save_embedding_layers=saves_embeddings(model))
    if initial is not None:
        scales = {f"{name}.": layer.scaling[model.active_adapter] for name, layer in linear_layers(model)}
        _subtract(folder, initial, scales)


def _subtract(folder: Path, initial: Path, scales: Mapping[str, float]) -> None:
    """Make of a saved adapter what it has learned since ``initial``: each A has A0 below it, each B has -B0 beside it.
    What is saved beside these matrices, as a module that is trained whole or DoRA's norms, stays: PEFT's own conversion
    drops it. A base weight that is saved too, as the output layer's is, has what was taken out of it again."""
    learned, first = (load_file(each / SAFETENSORS_WEIGHTS_NAME) for each in (folder, initial))
    for name, matrix in learned.items():
        layer = name.removesuffix("base_layer.weight")
        if layer != name and layer in scales:
            moved_OI = scales[layer] * (first[f"{layer}lora_B.weight"].float() @ first[f"{layer}lora_A.weight"].float())
            learned[name] = (matrix.float() + moved_OI).to(matrix.dtype)
        if "lora_A" in name or "lora_embedding_A" in name:
            learned[name] = torch.cat([matrix, first[name].to(matrix)], dim=0)
        elif "lora_B" in name or "lora_embedding_B" in name:
            learned[name] = torch.cat([matrix, -first[name].to(matrix)], dim=1)
    save_file(learned, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    with quiet_peft():
        settings: Any = PeftConfig.from_pretrained(str(folder))
    larger = math.sqrt(2) if settings.use_rslora else 2  # which leaves alpha / r, or alpha / sqrt(r), as it was
    settings.init_lora_weights, settings.r, settings.lora_alpha = True, 2 * settings.r, larger * settings.lora_alpha
    settings.rank_pattern = {name: 2 * rank for name, rank in settings.rank_pattern.items()}
    settings.alpha_pattern = {name: larger * alpha for name, alpha in settings.alpha_pattern.items()}
    settings.save_pretrained(str(folder))


def _check_fit(adapted: PeftModel, source: str, key: str = "adapter.name_or_path", *, name: str = "default") -> None:
    """Compare names and shapes of an adapter's file with those that the model wants; PEFT passes over what is left.

    Raises `ModelError` for a matrix of another shape, one that is missing, or one that has no place in the model.
    Adapters of the Hub, and those that are no safetensors file, are left to PEFT.
    """
    folder = Path(source).expanduser()
    file = folder / SAFETENSORS_WEIGHTS_NAME
    if not file.is_file():
        if folder.is_dir() and not (folder / WEIGHTS_NAME).is_file():
            raise _misfit(source, f"its weights, {SAFETENSORS_WEIGHTS_NAME}, are not there", key)
        return
    try:
        with safe_open(file, framework="pt") as weights:
            found = {name: list(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise _misfit(source, f"{file.name} cannot be read: {error}", key) from error
    with quiet_peft():
        state = get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False)
    wanted = {name: list(weight.shape) for name, weight in state.items()}
    for name in sorted(wanted.keys() & found.keys()):
        if found[name] != wanted[name]:
            raise _misfit(source, f"{name} is {found[name]}, and the model wants {wanted[name]}", key)
    missing = sorted(name for name in wanted.keys() - found.keys() if _IS_OF_ADAPTER.search(name))
    homeless = sorted(name for name in found.keys() - wanted.keys() if _IS_OF_ADAPTER.search(name))
    for names, of, what in (
        (homeless, found, "have no place in the model"),
        (missing, wanted, "that the model wants are not in it"),
    ):
        if names:
            raise _misfit(
                source, f"{len(names)} of {counted(len(of), 'matrix', 'matrices')} {what}, the first: {names[0]}", key
            )


@torch.no_grad()
def set_matrices(adapted: PeftModel, weights: Mapping[str, torch.Tensor], name: str = "default") -> None:
    """Give an adapter's matrices, and modules that are trained whole, what a file has under their own names.

    PEFT loads them before. It takes matrices of some models (DeepSeek-OCR 2) for weights of their base, renames them,
    and leaves the model's as they were; and it rounds the modules to the type of the base.
    """
    with quiet_peft():
        own = get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False)
    for key, matrix in own.items():
        if key in weights:
            value = weights[key].to(matrix.device)
            if isinstance(matrix, DTensor):  # sharded; each rank has read the whole file
                value = distribute_tensor(value, matrix.device_mesh, matrix.placements, src_data_rank=None)
            matrix.copy_(value)


def _misfit(source: str, why: str, key: str = "adapter.name_or_path") -> ModelError:
    return ModelError(
        f"{key} {source!r} does not fit the model: {why}",
        hint="name the model that the adapter was trained on in model.name_or_path (base_model_name_or_path in its "
        "adapter_config.json), or another adapter",
    )


@contextmanager
def quiet_peft(source: str | Path | None = None) -> Iterator[None]:
    """Silence eight warnings of PEFT: of how EVA could need less memory; of a property that transformers has renamed,
    though both names say the same; of mutated base weights, which are converted as the warning advises, and that PEFT's
    own conversion could not take all of them; of an adapted embedding that is saved whole; of its own settings for
    fused experts, which it applies, but looks for among modules only; of layers of GPT-2's kind, for which it sets what
    they need; and of a layer whose weight is another's, too, which `merge_adapter` gives one of its own. Also of
    matrices that PEFT misses in ``source``, if that is a folder: `_check_fit` and `set_matrices` see to them."""
    with warnings.catch_warnings():
        if source is not None and (Path(source).expanduser() / SAFETENSORS_WEIGHTS_NAME).is_file():
            warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not", category=RuntimeWarning)
        warnings.filterwarnings("ignore", message="lora with eva initialization used with", category=UserWarning)
        warnings.filterwarnings("ignore", message="Using Rank-Stabilized LoRA with rank_pattern", category=UserWarning)
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`", category=UserWarning)
        warnings.filterwarnings("ignore", message=".* changes the base weights of the model", category=UserWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False but", category=UserWarning)
        warnings.filterwarnings("ignore", message="Model (has|with) `tie_word_embeddings=True`", category=UserWarning)
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield
