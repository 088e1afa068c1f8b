"""An exported folder with its linear layers in 8 bits, as transformers writes and loads them by torchao."""

from __future__ import annotations

import gc
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from luthier.config.choices import QuantizationType
from luthier.config.inputs import QuantizationConfig
from luthier.errors import UserError, install_hint
from luthier.models.quantized import kept_modules, layers_to_quantize, loading_config
from luthier.writing import counted, rename

KINDS = {"int8": QuantizationType.TORCHAO_INT8, "fp8": QuantizationType.TORCHAO_FP8}
QUANTIZED_BOUNDS = {"int8": "8 bits", "fp8": "fp8"}  # kind -> `BOUNDS`


def check_torchao() -> None:
    """Raise `UserError` where what quantizes is not installed."""
    if importlib.util.find_spec("torchao") is None:
        hint = f"{install_hint('torchao')}; or leave export.quantize away"
        raise UserError("quantizing needs the package torchao, which is not installed", hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedForm:
    """How a model is quantized: its class, which modules keep their bits, and how many layers do not."""

    kind: str
    model_class: type[PreTrainedModel]
    kept: tuple[str, ...]
    num_layers: int


def quantized_form(model: PreTrainedModel, kind: str) -> QuantizedForm:
    """How this model is quantized. Raises `ModelError` where it has no layer for that."""
    section = QuantizationConfig(type=KINDS[kind])
    layers = layers_to_quantize(model, section)
    kept = tuple(kept_modules(model, section))
    return QuantizedForm(kind=kind, model_class=type(model), kept=kept, num_layers=len(layers))


def quantize_folder(whole: Path, target: Path, form: QuantizedForm, dtype: str, max_shard_gb: float) -> str:
    """Write ``target`` of a folder with whole weights, which is removed; what was done, in words."""
    computed_in = getattr(torch, dtype)
    config = loading_config(QuantizationConfig(type=KINDS[form.kind]), computed_in, form.kept)
    model = form.model_class.from_pretrained(
        str(whole), dtype=computed_in, quantization_config=config, local_files_only=True
    )
    model.save_pretrained(str(target), max_shard_size=int(max_shard_gb * 10**9))
    del model
    gc.collect()
    for path in whole.iterdir():
        if ".safetensors" not in path.name and not (target / path.name).exists():
            rename(path, target / path.name)
    shutil.rmtree(whole)
    return f"{counted(form.num_layers, 'linear layer is', 'linear layers are')} in {form.kind}, by torchao"
