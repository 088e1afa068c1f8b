"""An exported folder with its linear layers in 8 or 4 bits: by torchao, as transformers writes and loads them, or as
compressed-tensors by llmcompressor, which runs in an environment of its own.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from luthier.config.choices import QuantizationType
from luthier.config.inputs import QuantizationConfig
from luthier.config.schema import ExportConfig
from luthier.errors import ModelError, UserError, install_hint
from luthier.models.quantized import kept_modules, layers_to_quantize, loading_config
from luthier.writing import counted, rename

KINDS = {"int8": QuantizationType.TORCHAO_INT8, "fp8": QuantizationType.TORCHAO_FP8}
SCHEMES = {
    "w8a8": "W8A8",
    "fp8_dynamic": "FP8_DYNAMIC",
    "w4a16": "W4A16",
}  # by llmcompressor -> compressed-tensors' name
NEED_DATA = ("w8a8", "w4a16")  # rounded by GPTQ, which looks at what goes into each layer
QUANTIZED_BOUNDS = {"int8": "8 bits", "fp8": "fp8", "w8a8": "8 bits", "fp8_dynamic": "coarse", "w4a16": "coarse"}
GROUP_SIZES = (128, 64, 32)  # weights of w4a16 that share a scale; vLLM has kernels for these
PROGRAM = Path(__file__).with_name("llmcompressor_program.py")
ASK_TIMEOUT, COMPRESS_TIMEOUT = 120.0, 24 * 3600.0  # seconds


def check_quantizer(section: ExportConfig) -> None:
    """Raise `UserError` where what quantizes is not installed, here or in the environment that is named."""
    if section.quantize in KINDS and importlib.util.find_spec("torchao") is None:
        hint = f"{install_hint('torchao')}; or leave export.quantize away"
        raise UserError("quantizing needs the package torchao, which is not installed", hint=hint)
    if section.quantize not in SCHEMES:
        return
    if importlib.util.find_spec("compressed_tensors") is None:
        what = "such weights are proven by the package compressed-tensors, which is not installed"
        raise UserError(what, hint="pip install 'compressed-tensors>=0.20,<0.21'; or leave export.quantize away")
    assert section.llmcompressor is not None, "the section demands it"
    python = str(section.llmcompressor.expanduser())
    command = [python, "-I", "-c", "from importlib.metadata import version; print(version('llmcompressor'))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT, check=False)
        said = "" if done.returncode == 0 else _last_line(done.stderr)
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        hint = "make it so: python -m venv llmc && llmc/bin/pip install llmcompressor; and name llmc/bin/python"
        raise UserError(f"export.llmcompressor: {python} is no Python with llmcompressor: {said}", hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedForm:
    """How a model is quantized: its class, which modules keep their bits, and how many layers do not.

    ignored     the linear layers that keep their bits
    group_size  how many weights of a row share a scale in 4 bits
    """

    kind: str
    model_class: type[PreTrainedModel]
    kept: tuple[str, ...]
    num_layers: int
    ignored: tuple[str, ...]
    group_size: int


def quantized_form(model: PreTrainedModel, kind: str) -> QuantizedForm:
    """How this model is quantized. Raises `ModelError` where it has no layer for that."""
    section = QuantizationConfig(type=KINDS.get(kind, QuantizationType.TORCHAO_INT8))  # the layers are the same ones
    layers = layers_to_quantize(model, section)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    widths: list[Any] = [layer.in_features for layer in layers.values()]
    fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    if kind == "w4a16" and not fitting:
        what = f"{type(model).__name__} has linear layers whose inputs {GROUP_SIZES[-1]} does not divide"
        raise ModelError(f"export.quantize: {what}, as 4 bits need", hint="choose export.quantize: w8a8")
    return QuantizedForm(
        kind=kind,
        model_class=type(model),
        kept=tuple(kept_modules(model, section)),
        num_layers=len(layers),
        ignored=tuple(name for name in linear if name not in layers),
        group_size=fitting[0] if fitting else 0,
    )


def quantize_folder(
    whole: Path,
    target: Path,
    form: QuantizedForm,
    *,
    section: ExportConfig,
    dtype: str,
    calibration: Sequence[list[int]],
) -> str:
    """Write ``target`` of a folder with whole weights, which is removed; what was done, in words. ``calibration`` holds
    ids of trained contexts, for the kinds that need data. Raises `ModelError` where llmcompressor fails."""
    if form.kind in SCHEMES:
        told = _by_llmcompressor(whole, target, form, section, calibration)
    else:
        told = _by_torchao(whole, target, form, section, dtype)
    for path in whole.iterdir():
        if ".safetensors" not in path.name and not (target / path.name).exists():
            rename(path, target / path.name)
    shutil.rmtree(whole)
    return f"{counted(form.num_layers, 'linear layer is', 'linear layers are')} in {form.kind}, by {told}"


def _by_torchao(whole: Path, target: Path, form: QuantizedForm, section: ExportConfig, dtype: str) -> str:
    computed_in = getattr(torch, dtype)
    config = loading_config(QuantizationConfig(type=KINDS[form.kind]), computed_in, form.kept)
    model = form.model_class.from_pretrained(
        str(whole), dtype=computed_in, quantization_config=config, local_files_only=True
    )
    model.save_pretrained(str(target), max_shard_size=int(section.max_shard_gb * 10**9))
    del model
    gc.collect()
    return "torchao"


def _by_llmcompressor(
    whole: Path, target: Path, form: QuantizedForm, section: ExportConfig, calibration: Sequence[list[int]]
) -> str:
    """The other environment writes weights alone; every other file stays the one that was proven."""
    scheme: object = SCHEMES[form.kind]
    if form.kind == "w4a16":
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": form.group_size}
        scheme = {"targets": ["Linear"], "weights": weights}
    ids = list(calibration) if form.kind in NEED_DATA else []
    with tempfile.TemporaryDirectory(dir=target, prefix=".compressed_") as scratch:
        made, job = Path(scratch) / "made", Path(scratch) / "job.json"
        said = {
            "whole": str(whole.resolve()),
            "target": str(made.resolve()),
            "model_class": form.model_class.__name__,
            "scheme": scheme,
            "ignore": list(form.ignored),
            "ids": ids,
            "max_shard_size": int(section.max_shard_gb * 10**9),
        }
        job.write_text(json.dumps(said), encoding="utf-8")
        _run_program(str(section.llmcompressor), job)
        for path in made.glob("*.safetensors*"):
            path.chmod((whole / "config.json").stat().st_mode)  # it writes them for its own user alone
            rename(path, target / path.name)
        config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
        theirs = json.loads((made / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = theirs["quantization_config"]
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    group = f", {counted(form.group_size, 'weight')} to a scale" if form.kind == "w4a16" else ""
    on = f", calibrated on {counted(len(ids), 'context')} of the run's rows" if ids else ""
    return f"llmcompressor{group}{on}"


def _run_program(python: str, job: Path) -> None:
    command = [str(Path(python).expanduser()), "-I", str(PROGRAM), str(job.resolve())]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=job.parent,  # it writes logs where it stands
            env=offline,
            capture_output=True,
            text=True,
            timeout=COMPRESS_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"llmcompressor is not done in {COMPRESS_TIMEOUT:g} s") from error
    if done.returncode:
        hint = "a newer llmcompressor may take it; or choose export.quantize: int8 or fp8, by torchao"
        raise ModelError(f"llmcompressor does not take this model: {_last_line(done.stderr)}", hint=hint)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word"])[-1].strip()[:300]
