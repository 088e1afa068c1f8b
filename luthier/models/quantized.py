"""Frozen weights in 8 or 4 bits: how transformers is told to load them, what they take, and how they get whole again.

bitsandbytes and torchao do the work, through transformers; a model that comes quantized is loaded as its config says,
or with whole weights where its form is one that cannot be trained on.
The embedding, the output layer and norms keep all their bits, and so do experts that a model keeps in one tensor.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, TorchAoConfig
from transformers.integrations import dequantize_and_replace
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from luthier.config.choices import QuantizationType
from luthier.config.inputs import QuantizationConfig
from luthier.errors import ModelError, first_line
from luthier.models import cast_to, read_past, unlike_linear
from luthier.models.routers import router_names
from luthier.writing import JsonObject, counted

PACKAGES = {
    "awq": "gptqmodel optimum",  # PEFT asks for both
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel optimum",
    "torchao": "torchao",
}
"""What a model that comes quantized needs beside transformers, by the ``quant_method`` of its config."""

_OF_BITSANDBYTES = ("Linear4bit", "Linear8bitLt")
_PACKED = ("awq", "gptq")  # gptqmodel's layers, which have no `weight`
_BLOCK, _BLOCK_OF_SCALES = 64, 256  # of bitsandbytes' 4 bits
_INT4_GROUP = 128  # weights that share a scale in torchao's int4
_MADV_PAGEOUT = 21  # Linux 5.4. It loses nothing: a page that is asked for again is read again
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def loading_config(section: QuantizationConfig, computed_in: torch.dtype, kept: Iterable[str]) -> object:
    """What ``from_pretrained`` takes as ``quantization_config``. ``computed_in`` is what ``compute_dtype: auto`` means;
    ``kept`` names all modules that keep their bits."""
    skip = list(kept)
    match section.type:
        case QuantizationType.NF4 | QuantizationType.FP4:
            return BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=section.type.value,
                bnb_4bit_use_double_quant=section.double_quantization,
                bnb_4bit_compute_dtype=_DTYPES.get(section.compute_dtype, computed_in),
                llm_int8_skip_modules=skip,
            )
        case QuantizationType.INT8:
            return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
        case _:
            return TorchAoConfig(_torchao_config(section.type), modules_to_not_convert=skip)


def _torchao_config(kind: QuantizationType) -> object:
    from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig

    match kind:
        case QuantizationType.TORCHAO_INT8:
            return Int8WeightOnlyConfig()
        case QuantizationType.TORCHAO_FP8:
            return Float8WeightOnlyConfig()
        case QuantizationType.TORCHAO_INT4:
            return Int4WeightOnlyConfig(group_size=_INT4_GROUP, int4_packing_format="tile_packed_to_4d")
        case _:
            raise AssertionError(kind)


def kept_modules(model: PreTrainedModel, section: QuantizationConfig, trained: Iterable[str] = ()) -> list[str]:
    """Names of the modules that are not quantized: those that transformers keeps, routers, as a small error there sends
    a token to other experts, those whose weights the model reads past them, those by whose weights it chooses the type
    of what it gives them, those that the user names, and those that are ``trained`` as a whole."""
    by_transformers = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]
    ours = [
        *router_names(model),
        *map(re.escape, (*read_past(model), *unlike_linear(model), *cast_to(model), *section.skip_modules)),
    ]
    return list(dict.fromkeys([*by_transformers, *ours, *trained]))


def layers_to_quantize(
    model: PreTrainedModel, section: QuantizationConfig, trained: Iterable[str] = ()
) -> dict[str, nn.Module]:
    """The linear layers of a model, which may have no weights, that ``section`` quantizes.

    Raises `ModelError` where there are none, and where ``skip_modules`` names none of the model's.
    """
    if section.type is QuantizationType.NONE:
        return {}
    linear = _linear(model)
    if not (section.type.is_4bit or section.type is QuantizationType.INT8):  # torchao passes over those of GPT-2's kind
        linear = {name: layer for name, layer in linear.items() if isinstance(layer, nn.Linear)}
    for wanted in map(re.escape, section.skip_modules):
        if all(should_convert_module(name, [wanted]) for name in linear):
            raise ModelError(
                f"model.quantization.skip_modules: no linear layer of {type(model).__name__} is named by {wanted!r}",
                hint="name modules by the ends of their names, such as o_proj",
            )
    kept = kept_modules(model, section, trained)
    found = {name: layer for name, layer in linear.items() if should_convert_module(name, kept)}
    if not found:
        raise ModelError(
            f"model.quantization is {section.type}, and {type(model).__name__} has no linear layer of a class that "
            "transformers quantizes, beside its output layer and routers",
            hint="remove model.quantization, or set it to nf4 or int8"
            if _linear(model)
            else "remove model.quantization",
        )
    return found


def stored_method(config: PretrainedConfig) -> str | None:
    """The ``quant_method`` of a model that comes quantized, else None."""
    said = _said(config)
    return (
        None
        if said is None
        else str(getattr(said.get("quant_method"), "value", said.get("quant_method") or "bitsandbytes"))
    )


def has_4bit(config: PretrainedConfig) -> bool:
    """Whether a model comes in bitsandbytes' 4 bits, whose scales stay on each device while FSDP divides the rest."""
    return stored_method(config) == "bitsandbytes" and bool((_said(config) or {}).get("load_in_4bit"))


def _said(config: PretrainedConfig) -> JsonObject | None:
    stored: Any = getattr(config, "quantization_config", None)
    return stored if stored is None or isinstance(stored, dict) else stored.to_dict()


def ask_for_trainable(config: PretrainedConfig) -> None:
    """Let transformers load a model that comes quantized in a form that adapters are trained on: with whole weights,
    the numbers that the quantized ones stand for, where it does not train the form (fp8, mxfp4, compressed-tensors),
    and with kernels that have a backward pass, where gptqmodel would take its fastest (GPTQ, AWQ)."""
    method = stored_method(config)
    takes = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method or "")
    asked: JsonObject = {}
    if method in _PACKED:
        asked = {"backend": "auto_trainable"}
    elif takes is not None and "dequantize" in inspect.signature(takes).parameters:
        asked = {"dequantize": True}
    if asked:
        config.quantization_config = {**(_said(config) or {}), **asked}


def is_read_whole(config: PretrainedConfig) -> bool:
    """Whether a model comes quantized and has whole weights once it is loaded."""
    return bool((_said(config) or {}).get("dequantize"))


def check_stored(config: PretrainedConfig, section: QuantizationConfig, *, merges: str | None) -> str | None:
    """Ask transformers whether a model that comes quantized can be loaded and trained under an adapter here; gives its
    method, None where its weights are whole once they are loaded. ``merges``: the key that wants an adapter merged.

    Raises `ModelError` where a package is missing, transformers does not train that method, or an adapter cannot be
    merged into it.
    """
    method = stored_method(config)
    if method is None:
        return None
    key = f"model.name_or_path: the model comes quantized ({method}), and "
    hint = "name the model with weights of 16 bits, with model.quantization: nf4 for little memory"
    is_whole = is_read_whole(config)
    if section.type is not QuantizationType.NONE and not is_whole:
        what = f"model.quantization: {section.type} is asked for, but the model comes quantized ({method})"
        raise ModelError(what, hint="remove model.quantization, or name the model with weights of 16 bits")
    packages = PACKAGES.get(method, "").split()
    lacking = [package for package in packages if importlib.util.find_spec(package.replace("-", "_")) is None]
    try:
        if lacking:
            raise ImportError(lacking)
        quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        quantizer.validate_environment(device_map=None)
        trainable = bool(quantizer.is_trainable)
    except (ImportError, ValueError, RuntimeError) as error:
        why = f"{' and '.join(lacking)}, which it needs, cannot be imported" if lacking else first_line(error)
        wanted = lacking or (packages if isinstance(error, ImportError) else [])  # one that is there may be too old
        install = f"pip install -U {' '.join(wanted)}; or {hint}" if wanted else hint
        raise ModelError(f"{key}it cannot be loaded here: {why}", hint=install) from error
    if is_whole:
        return None
    if not trainable:
        raise ModelError(f"{key}transformers cannot train adapters on such weights", hint=hint)
    if merges and not _is_dequantizable(quantizer):
        what = f"transformers does not turn such weights back into whole ones, which {merges} needs"
        raise ModelError(f"{key}{what}", hint=f"remove {merges}, or {hint}")
    return method


def _is_dequantizable(quantizer: HfQuantizer) -> bool:
    known = type(quantizer)._dequantize is not HfQuantizer._dequantize
    return known or quantizer.quantization_config.quant_method in ("torchao", *_PACKED)


def is_quantized(model: nn.Module) -> bool:
    """Whether transformers loaded some of its weights with fewer bits."""
    return getattr(model, "hf_quantizer", None) is not None


def packed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of GPTQ and AWQ, which have no ``weight``: their numbers are packed in a buffer ``qweight``."""
    return {name: layer for name, layer in model.named_modules() if "qweight" in layer._buffers}


def num_packed(model: nn.Module) -> int:
    """How many numbers the buffers of `packed_layers` stand for, and the bytes of layers in 4 bits beside their own
    number, where FSDP has divided them: such a weight no longer says its shape."""
    sizes: list[Any] = list(packed_layers(model).values())
    in_4bit: list[Any] = [layer for layer in model.modules() if type(layer).__name__ == "Linear4bit"]
    in_4bit = [layer for layer in in_4bit if type(layer).__module__.startswith("bitsandbytes")]  # not PEFT's
    divided = [layer for layer in in_4bit if not hasattr(layer.weight, "quant_state")]
    shown = sum(int(layer.weight.numel()) for layer in divided)
    return sum(int(layer.in_features * layer.out_features) for layer in [*sizes, *divided]) - shown


def rounds_inputs(model: nn.Module) -> bool:
    """Whether some layers also round what goes into them, as bitsandbytes' of 8 bits do."""
    return any(type(parameter).__name__ == "Int8Params" for parameter in model.parameters())


def settle(model: PreTrainedModel) -> None:
    """Keep layers of bitsandbytes and gptqmodel in the format that has a backward pass: on some CPUs they change their
    weights, when they first run in evaluation, into one that has none. In 8 bits bitsandbytes' keep their scales on a
    CPU, where PEFT's DoRA puts another parameter without them in the weight's place. A model that came quantized and
    was read whole is saved whole."""
    if not is_quantized(model):
        _write_whole_weights(model)
    for layer in model.modules():
        if "qweight" in layer._buffers and hasattr(layer, "linear_mode"):
            layer.linear_mode = "train"
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
        if type(layer).__name__ == "Linear8bitLt":
            layer.register_forward_pre_hook(_with_scales)


def _with_scales(layer: Any, _: object) -> None:
    if layer.weight.CB is not None and layer.weight.SCB is None:
        layer.weight.SCB = layer.state.SCB


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """The model with whole weights in its own type, in place: the numbers that its quantized layers computed with.

    Raises `ModelError` for a method that transformers cannot undo.
    """
    quantizer: Any = model.hf_quantizer
    _write_whole_weights(model)
    if packed := packed_layers(model):
        for name, layer in packed.items():
            model.set_submodule(name, _unpacked(layer, model.config.dtype))
        quantizer.remove_quantization_config(model)
        return model
    if quantizer.quantization_config.quant_method == "bitsandbytes":
        for name in [name for name, layer in model.named_modules() if type(layer).__name__ in _OF_BITSANDBYTES]:
            _make_whole(model, name)
        quantizer.remove_quantization_config(model)
        return model
    if quantizer.quantization_config.quant_method != "torchao":
        try:
            whole: PreTrainedModel = quantizer.dequantize(model, dtype=model.config.dtype)
        except NotImplementedError as error:
            raise ModelError(f"weights of {type(model).__name__} cannot be made whole again: {error}") from error
        return whole
    for layer in model.modules():
        for name, weight in list(layer.named_parameters(recurse=False)):
            if hasattr(weight, "__tensor_flatten__"):
                whole = weight.dequantize().to(model.config.dtype)
                setattr(layer, name, nn.Parameter(whole, requires_grad=False))
    quantizer.remove_quantization_config(model)
    return model


def _write_whole_weights(model: PreTrainedModel) -> None:
    """Have a model that came quantized, and whose weights are whole, be saved with them: ``save_pretrained`` takes the
    way back to the form in which a model was read, and would write numbers of few bits."""
    if read := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [each for each in read if not _reads_quantized(each)]


def _make_whole(model: PreTrainedModel, name: str) -> None:
    """Put a whole layer in the place of one of bitsandbytes', whose numbers are freed at once. Given a whole model,
    transformers has those of all layers until the last one is whole, and one of 4 bits is its weight's `module`."""
    layer: Any = model.get_submodule(name)
    place: Any = dequantize_and_replace(
        nn.ModuleDict({"it": layer}),
        quantization_config=model.hf_quantizer.quantization_config,
        dtype=model.config.dtype,
    )
    is_turned = getattr(layer, "source_cls", None) is Conv1D
    model.set_submodule(name, _turned_back(place["it"]) if is_turned else place["it"])
    layer.weight = None


def _turned_back(layer: Any) -> Conv1D:
    """A layer of GPT-2's kind again, whose weight [inputs, outputs] transformers turns round as it quantizes it, and
    leaves so."""
    with torch.device("meta"):
        plain = Conv1D(layer.out_features, layer.in_features)
    plain.weight = nn.Parameter(layer.weight.data.T.contiguous(), requires_grad=False)
    plain.bias = layer.bias
    return plain


@torch.no_grad()
def _unpacked(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """The layer with a weight, which is what it makes of unit vectors: gptqmodel has a way of its own for each of its
    kernels to give it."""
    bias, device = layer.bias, layer.qweight.device
    layer.bias = None
    kind = torch.float32 if device.type == "cpu" else layer.scales.dtype  # many CPUs are slow at 16 bits
    weight_IO: torch.Tensor = layer(torch.eye(layer.in_features, dtype=kind, device=device))
    with torch.device("meta"):
        whole = nn.Linear(layer.in_features, layer.out_features, bias=bias is not None)
    whole.weight = nn.Parameter(weight_IO.T.contiguous().to(dtype), requires_grad=False)
    if bias is not None:
        whole.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return whole


def whole_weight(layer: nn.Module) -> torch.Tensor:
    """The weight of one linear layer as float32: the numbers that a quantized one computes with, on its device."""
    weight: Any = layer.weight
    if type(weight).__name__ != "Int8Params":
        whole_OI: torch.Tensor = dequantize_module_weight(layer)
        return whole_OI.to(torch.float32)
    # PEFT's function would set a part of the state that the layer's first pass wants to find empty
    state: Any = layer.state
    scales_O: torch.Tensor = state.SCB if weight.SCB is None else weight.SCB
    ints_OI: torch.Tensor = weight.data
    return ints_OI.to(torch.float32) * (scales_O.to(torch.float32) / 127)[:, None]


def _reads_quantized(conversion: object) -> bool:
    return any(getattr(each, "hf_quantizer", None) is not None for each in getattr(conversion, "operations", ()))


def bytes_when_quantized(
    model: PreTrainedModel, section: QuantizationConfig, trained: Iterable[str] = ()
) -> dict[int, int]:
    """By ``id`` of each weight of `layers_to_quantize`, or of each that comes quantized and stays so, the bytes it will
    take. Raises as that."""
    said = _said(model.config)
    if said is None or is_read_whole(model.config):
        weights = _weights(layers_to_quantize(model, section, trained))
        return {id(weight): _quantized_bytes(weight, section) for weight in weights}
    skipped = said.get("modules_to_not_convert") or said.get("llm_int8_skip_modules") or ()
    kept = [*get_keys_to_not_convert(model), *skipped]
    linear = {name: layer for name, layer in _linear(model).items() if should_convert_module(name, kept)}
    return {id(weight): _stored_bytes(weight, said) for weight in _weights(linear)}


def _linear(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if type(layer) in (nn.Linear, Conv1D)}


def _weights(layers: Mapping[str, nn.Module]) -> list[torch.Tensor]:
    return [weight for layer in layers.values() for name, weight in layer.named_parameters() if name == "weight"]


def _stored_bytes(weight: torch.Tensor, said: Mapping[str, Any]) -> int:
    """What a weight takes in a model that comes quantized as its config says: by bitsandbytes, or in groups of numbers
    that share a scale of 16 bits and a zero point, as in GPTQ and AWQ."""
    if said.get("load_in_4bit") or said.get("load_in_8bit"):
        kind = QuantizationType.NF4 if said.get("load_in_4bit") else QuantizationType.INT8
        double = bool(said.get("bnb_4bit_use_double_quant"))
        return _quantized_bytes(weight, QuantizationConfig(type=kind, double_quantization=double))
    bits, group = int(said.get("bits") or 8), int(said.get("group_size") or -1)
    groups = weight.numel() // group if group > 0 else weight.shape[0]
    return weight.numel() * bits // 8 + groups * (16 + bits) // 8


def _quantized_bytes(weight: torch.Tensor, section: QuantizationConfig) -> int:
    """What a layer's weight takes once it is quantized, with its scales; it may have no numbers yet.

    4 bits: a scale for each block of 64, in float32, or in 8 bits with one for each 256 of them; 8 bits: one for
    each row.
    """
    numbers, rows = weight.numel(), weight.shape[0]
    match section.type:
        case QuantizationType.NF4 | QuantizationType.FP4:
            blocks = -(-numbers // _BLOCK)
            scales = (
                blocks + 4 * (-(-blocks // _BLOCK_OF_SCALES) + 256 + 1) if section.double_quantization else 4 * blocks
            )
            return -(-numbers // 2) + scales + 4 * 16
        case QuantizationType.INT8 | QuantizationType.TORCHAO_FP8:
            return numbers + 4 * rows
        case QuantizationType.TORCHAO_INT8:
            return numbers + 5 * rows  # a zero point too
        case QuantizationType.TORCHAO_INT4:
            return numbers // 2 + 4 * (numbers // _INT4_GROUP)
        case _:
            return numbers * weight.element_size()


def num_weights(parameter: torch.Tensor) -> int:
    """How many numbers a parameter stands for; one of 4 bits has two in a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())


def num_bytes(parameter: torch.Tensor) -> int:
    """What a parameter takes, scales and code books of a quantized one included."""
    return sum(tensor.numel() * tensor.element_size() for tensor in held_tensors(parameter))


def held_tensors(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storage of their own that a parameter consists of: numbers, and scales of a quantized one."""
    if hasattr(parameter, "__tensor_flatten__"):  # torchao's: tensors in a tensor
        for name in parameter.__tensor_flatten__()[0]:
            yield from held_tensors(getattr(parameter, name))
        return
    yield parameter.data
    if (scales := getattr(parameter, "SCB", None)) is not None:
        yield scales
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from (tensor for tensor in (state.absmax, state.code, state.offset) if tensor is not None)
        state = state.state2


def quantization_note(model: PreTrainedModel) -> str:
    """``14 linear layers quantized, 62% of the weights; all weights take 1.2 MiB instead of 4.0``."""
    every = list(model.parameters())
    packed = [buffer for layer in packed_layers(model).values() for buffer in layer.buffers()]
    whole = model.config.dtype.itemsize
    quantized = [p for p in every if num_bytes(p) != p.numel() * p.element_size() or not p.is_floating_point()]
    numbers = sum(map(num_weights, every)) + num_packed(model)
    share = (sum(map(num_weights, quantized)) + num_packed(model)) / max(1, numbers)
    before, after = numbers * whole / 2**20, sum(map(num_bytes, [*every, *packed])) / 2**20
    layers = (
        f"{counted(len(quantized) + len(packed_layers(model)), 'linear layer')} quantized, {share:.0%} of the weights"
    )
    return f"{layers}; all weights take {after:,.1f} MiB instead of {before:,.1f}"


def page_out(start: int, num_bytes: int) -> None:
    """Take pages of a memory-mapped file, at an address, out of memory."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_PAGEOUT)


def leave_files() -> None:
    """Take the pages of all memory-mapped files of weights out of memory. What was quantized as it was read is asked
    for no more, but its pages would stay as long as anything of the same file is in use, such as a norm."""
    with suppress(OSError):  # other systems have no such list
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.endswith(".safetensors"):
                start, end = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
                page_out(start, end - start)


@contextmanager
def leaving_files(every: float = 0.5) -> Iterator[None]:
    """Do so ``every`` so many seconds, while a model is quantized as it is read: else its whole files are resident in
    the end, beside what was made of them."""
    is_read = Event()

    def leave() -> None:
        while not is_read.wait(every):
            leave_files()

    thread = Thread(target=leave, name="leave-files", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_read.set()
        thread.join()
