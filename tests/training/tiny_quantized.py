"""Folders of small models whose weights come in few bits, written in the layouts in which such models are published.

Each function writes a model to a folder and gives the weights that its numbers stand for, by name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import load_file, save_file
from tiny_runs import make_config
from transformers import GptOssConfig, GptOssForCausalLM

from luthier.encoding.tokenizer import Tokenizer, load_tokenizer
from luthier.models.model import load_model
from luthier.models.vocabulary import Vocabulary


def write_base(folder: Path, tokenizer: Tokenizer) -> Path:
    """A small model with its tokenizer, whose weights are far from 0, so that few bits show."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    overrides = {**shape, "initializer_range": 0.1}
    config = make_config(folder, model={"name_or_path": "preset:tiny-qwen3", "config_overrides": overrides})
    load_model(config, Vocabulary.of(tokenizer)).model.save_pretrained(folder)
    for file in tokenizer.files.folder.iterdir():
        if file.name != "config.json" and file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def in_8_bit_floats(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Blocks of 32 x 32 numbers, each with a scale, as DeepSeek and Qwen publish them."""
    weights, written, block = load_file(base / "model.safetensors"), {}, 32
    for name, weight in list(weights.items()):
        if not name.endswith("_proj.weight"):
            written[name] = weight
            continue
        rows, columns = (size // block for size in weight.shape)
        blocks = weight.reshape(rows, block, columns, block)
        scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        in_8_bits = (blocks / scales).to(torch.float8_e4m3fn)
        written[name] = in_8_bits.reshape(weight.shape)
        written[f"{name}_scale_inv"] = scales.reshape(rows, columns)
        weights[name] = (in_8_bits.float() * scales).reshape(weight.shape)
    _write(base, folder, written, {"quant_method": "fp8", "weight_block_size": [block, block]})
    return weights


def in_packed_ints(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """4 bits with a scale for each 32 of a row, by the library that llm-compressor writes its models with."""
    weights, written = load_file(base / "model.safetensors"), {}
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    for name, weight in list(weights.items()):
        if not name.endswith("_proj.weight"):
            written[name] = weight
            continue
        groups = weight.reshape(weight.shape[0], -1, 32)
        scales = groups.abs().amax(dim=-1, keepdim=True) / 7.5
        ints = (groups / scales).round().clamp(-8, 7)
        written[f"{name}_packed"] = pack_to_int32(ints.reshape(weight.shape).to(torch.int8), 4)
        written[f"{name}_scale"] = scales.squeeze(-1)
        written[f"{name}_shape"] = torch.tensor(weight.shape)
        weights[name] = (ints * scales).reshape(weight.shape)
    group = {"targets": ["Linear"], "weights": args}
    _write(base, folder, written, {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    })  # fmt: skip
    return weights


def experts_in_4_bit_floats(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """gpt-oss as it is published: experts' weights in fp4, 32 of them with an exponent."""
    torch.manual_seed(0)
    vocabulary = load_tokenizer("preset:tiny-qwen3").vocab_size
    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    ))  # fmt: skip
    model.save_pretrained(folder)
    weights, written = load_file(folder / "model.safetensors"), {}
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name, weight in list(weights.items()):
        if not name.endswith("_proj"):
            written[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        written[f"{name}_blocks"], written[f"{name}_scales"] = blocks, exponents
        numbers = table[torch.stack([blocks & 15, blocks >> 4], dim=-1).long()].flatten(-2)
        whole = numbers * torch.exp2(exponents.float() - 127)[..., None]
        weights[name] = whole.flatten(-2).transpose(1, 2)
    _write(folder, folder, written, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    for file in base.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return weights


def _write(base: Path, folder: Path, weights: dict[str, torch.Tensor], how: dict[str, object]) -> None:
    folder.mkdir(exist_ok=True)
    for file in base.iterdir():
        if file.suffix != ".safetensors" and not (folder / file.name).exists():
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


def _eight_in_one(ints: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Columns of numbers of 4 bits, eight of them in each int32."""
    packed = sum((ints[:, place::8].long() & 15) << (4 * shift) for shift, place in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def in_gptq_or_awq(base: Path, folder: Path, method: str) -> dict[str, torch.Tensor]:
    """4 bits with a scale and a zero point for each 32 numbers of a row, in the layout of either method."""
    weights, written, size = load_file(base / "model.safetensors"), {}, 32
    for name, weight in list(weights.items()):
        if not name.endswith("_proj.weight"):
            written[name] = weight.half()
            continue
        groups, module = weight.reshape(weight.shape[0], -1, size), name.removesuffix(".weight")
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((most - least) / 15).half().float()
        zeros = (-least / scales).round().clamp(0, 15)
        ints = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
        weights[name] = ((ints - zeros[..., None]) * scales[..., None]).reshape(weight.shape)
        ints_OI, zeros_GO = ints.reshape(weight.shape).int(), zeros.T.int()
        written[f"{module}.scales"] = scales.T.half()
        if method == "gptq":  # along the inputs; zero points are less by 1
            written[f"{module}.qweight"] = _eight_in_one(ints_OI).T
            written[f"{module}.qzeros"] = _eight_in_one(zeros_GO - 1)
            written[f"{module}.g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // size
        else:
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            written[f"{module}.qweight"] = _eight_in_one(ints_OI.T, order)
            written[f"{module}.qzeros"] = _eight_in_one(zeros_GO, order)
    of_method = {"desc_act": False, "sym": False} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    _write(base, folder, written, {"quant_method": method, "bits": 4, "group_size": size, **of_method})
    return weights
