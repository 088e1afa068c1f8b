"""Forward and backward pass of small models with recurrent layers: rows of one segment, padded to the longest, beside
the same segments in one packed row, whose recurrent layers run segment by segment.

python benchmarks/recurrent.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import BambaConfig, BambaModel, Lfm2Config, Lfm2Model, Qwen3NextConfig, Qwen3NextModel

from luthier.collation.collator import collate_packs
from luthier.models import set_text_attention
from luthier.models.attention import SEGMENTS, register_attention
from luthier.models.isolation import ChosenIsolation
from luthier.models.mixers import Isolation, part_mixers
from luthier.records import Batch, Pack, Segment

TOKENS = 4096
ROUNDS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "qwen3_next": lambda: Qwen3NextModel(
        Qwen3NextConfig(
            **SIZES, num_hidden_layers=4, layer_types=KINDS, head_dim=32, linear_num_value_heads=4,
            linear_num_key_heads=2, linear_key_head_dim=32, linear_value_head_dim=32, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=192, shared_expert_intermediate_size=192,
        )
    ),
    "lfm2": lambda: Lfm2Model(Lfm2Config(**SIZES, num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"])),
    "bamba": lambda: BambaModel(
        BambaConfig(
            **SIZES, num_hidden_layers=3, attn_layer_indices=[2], mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1,
            mamba_d_state=32, mamba_chunk_size=64,
        )
    ),
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    register_attention()
    table = Table("model", "row", "padded tokens", "padded, one a row", "packed", "faster by")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        for row, batch in workloads():
            padded, packed = ways(model)
            parted = padded.arranged(batch, pad_token_id=0)
            best = [
                min(run(model, each, way) for _ in range(ROUNDS)) for way, each in ((padded, parted), (packed, batch))
            ]
            speeds = [f"{TOKENS / seconds:,.0f} tokens/s" for seconds in best]
            count = f"{parted.model_inputs['input_ids'].numel():,}"
            table.add_row(name, row, count, *speeds, f"{best[0] / best[1]:.1f}")
    Console(width=120).print(table)


def ways(model: nn.Module) -> tuple[ChosenIsolation, ChosenIsolation]:
    mixers = part_mixers(model)
    assert mixers
    padded = ChosenIsolation(isolation=Isolation.PADDED, attention="sdpa", windows={})
    packed = ChosenIsolation(isolation=Isolation.SEGMENTS, attention=SEGMENTS, windows={}, mixers=mixers)
    return padded, packed


def workloads() -> Iterator[tuple[str, Batch]]:
    rng = np.random.default_rng(0)
    for low, high in ((16, 64), (50, 500), (50, 2000)):
        segments, left = [], TOKENS
        while left:
            length = min(left, int(np.exp(rng.uniform(np.log(low), np.log(high)))))  # many short ones, a few long ones
            ids = rng.integers(3, 512, length, dtype=np.int32)
            segments.append(Segment(input_ids=ids, target=np.arange(length) > 0))
            left -= length
        batch = collate_packs([Pack(segments=tuple(segments))], packed=True, pad_token_id=0)
        yield f"{len(segments)} segments of {low} to {high}", batch


def run(model: nn.Module, batch: Batch, way: ChosenIsolation) -> float:
    """CPU seconds."""
    model.zero_grad()
    set_text_attention(model, way.attention)
    start = time.process_time()
    inputs = way.inputs(batch, device=torch.device("cpu"))
    model(**inputs).last_hidden_state.square().mean().backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
