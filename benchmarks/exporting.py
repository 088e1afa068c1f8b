"""Memory of `luthier export`, its proof included, beside the bytes of the weights: a LoRA on all linear layers of a
model in the shapes of Qwen2.5-7B with random weights. The base is written layer by layer, so only the export takes
memory. With all 28 layers it takes 30 GB of disk, 18 GB of memory and half an hour of a core.

python -m benchmarks.exporting [--layers 28] [--quantization nf4] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from luthier.presets import tokenizer_folder

HIDDEN, INNER, HEADS, KEY_HEADS, VOCABULARY = 3584, 18944, 28, 4, 152_064
KEYS = HIDDEN * KEY_HEADS // HEADS
LINEAR = {  # outputs, inputs
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
SIZE, SIZE_OF_LAST = 0.02, 0.0026  # of weights, and of what a layer adds last: smaller, as in GPT-2, or rounding grows
LAST = ("o_proj", "down_proj")
STAGES = (
    "loading the trained model",
    "recording what it does",
    "merging and writing",
    "loading it again and comparing",
)
RANK, SECONDS = 16, 1.0  # of the adapter; between two looks at the memory


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quantization", choices=["none", "nf4"], default="none")
    parser.add_argument("--folder", type=Path, help="where there is room; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        num_bytes = write_base(folder / "base", options.layers)
        write_adapter(folder / "adapter", options.layers)
        peaks, resident, proven = exported(folder, options.quantization)
    table = Table("", "its own, GB", "of the weights", title=f"{options.layers} layers, {num_bytes / 1e9:.2f} GB")
    for stage, peak in peaks.items():
        table.add_row(stage, f"{peak / 1e9:.2f}", f"{peak / num_bytes:.2f}")
    table.add_row("with mapped files (VmHWM)", f"{resident / 1e9:.2f}", f"{resident / num_bytes:.2f}")
    Console(width=120).print(table, "proven" if proven else "NOT PROVEN")


def tensors(layers: int) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of one file after the other."""
    yield {"model.embed_tokens.weight": noise(VOCABULARY, HIDDEN)}
    yield {"lm_head.weight": noise(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    for layer in range(layers):
        found = {}
        for name, (outputs, inputs) in LINEAR.items():
            size = SIZE_OF_LAST if name.endswith(LAST) else SIZE
            found[f"{name}.weight"] = noise(outputs, inputs, size=size)
            if name.endswith(("q_proj", "k_proj", "v_proj")):
                found[f"{name}.bias"] = noise(outputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        yield {f"model.layers.{layer}.{name}": tensor for name, tensor in found.items()}


def noise(*shape: int, size: float = SIZE) -> torch.Tensor:
    return (torch.randn(*shape) * size).bfloat16()


def write_base(folder: Path, layers: int) -> int:
    """The bytes of its weights."""
    shutil.copytree(tokenizer_folder("tiny-qwen3"), folder)
    torch.manual_seed(0)
    places, num_bytes = dict[str, str](), 0
    for number, found in enumerate(tensors(layers)):
        file = f"model-{number:05d}.safetensors"
        save_file(found, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(found, file)
        num_bytes += sum(tensor.nbytes for tensor in found.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS, "dtype": "bfloat16",
        "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 32_768, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return num_bytes


def write_adapter(folder: Path, layers: int) -> None:
    folder.mkdir()
    found = {}
    for layer in range(layers):
        for name, (outputs, inputs) in LINEAR.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            size = SIZE_OF_LAST if name.endswith(LAST) else SIZE
            found[f"{place}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
            found[f"{place}.lora_B.weight"] = torch.randn(outputs, RANK) * size
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted(name.partition(".")[2] for name in LINEAR)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def exported(folder: Path, quantization: str) -> tuple[dict[str, int], int, bool]:
    """The most memory of its own that each stage took, all that was ever resident, and whether it is proven."""
    described = {
        "model": {"name_or_path": str(folder / "base"), "dtype": "bfloat16", "quantization": quantization},
        "data": {"train": [{"path": "preset:skills", "first_rows": 300}], "max_drop": 0.9},
        "train": {"enabled": False},
        "adapter": {"type": "lora", "merge_first": [str(folder / "adapter")]},
        "runtime": {"threads": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(described), encoding="utf-8")
    command = [sys.executable, "-m", "luthier", "export", str(folder / "run.yaml"), "--to", str(folder / "exported")]
    said = (folder / "said").open("w+", encoding="utf-8")
    peaks, resident = defaultdict[str, int](int), 0
    with said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            stages = [line for line in (folder / "said").read_text(encoding="utf-8").splitlines() if line in STAGES]
            try:
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            except OSError:
                break
            stage = stages[-1] if stages else "starting"
            peaks[stage] = max(peaks[stage], _bytes("Anonymous", rollup))
            resident = max(resident, _bytes("VmHWM", status))
            time.sleep(SECONDS)
    return dict(peaks), resident, process.returncode == 0


def _bytes(name: str, told: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", told, re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024


if __name__ == "__main__":
    main()
