"""Forward and backward pass of a small model on a packed row of 4,096 tokens: sdpa, which builds a mask of the whole
row, beside attention within segments; and pairs with their prompt twice, beside pairs that share it.

python benchmarks/attention.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3Model

from luthier.collation.collator import collate_packs, collate_trees
from luthier.models.attention import SEGMENTS, register_attention
from luthier.models.mixers import Isolation, attention_inputs
from luthier.records import Batch, Branch, Pack, Sample

TOKENS = 4096
ROUNDS = 4
WAYS = (("sdpa", Isolation.POSITIONS), (SEGMENTS, Isolation.SEGMENTS))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    register_attention()
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        )
    )
    table = Table("row", "tokens", "sdpa, mask of the row", "within segments", "faster by")
    for name, batches in workloads():
        best = [min(run(model, batches[way], *way) for _ in range(ROUNDS)) for way in WAYS]
        tokens = [str(batches[way].model_inputs["input_ids"].numel()) for way in WAYS]
        table.add_row(name, " / ".join(tokens), *(f"{s * 1e3:.0f} ms" for s in best), f"{best[0] / best[1]:.1f}")
    Console(width=120).print(table)


def workloads() -> Iterator[tuple[str, dict[tuple[str, Isolation], Batch]]]:
    rng = np.random.default_rng(0)
    for low, high in ((100, 500), (16, 64), (1000, 2000)):
        samples, left = [], TOKENS
        while left:
            samples.append(tree(rng, min(left, int(rng.integers(low, high + 1)))))
            left -= len(samples[-1].input_ids)
        yield f"{len(samples)} segments of {low} to {high}", dict.fromkeys(WAYS, unrolled(samples))
    for prompt, answer in ((600, 80), (200, 200)):
        pairs = [tree(rng, prompt, answer, answer) for _ in range(TOKENS // (2 * (prompt + answer)))]
        shared = collate_trees([pairs], pad_token_id=0)
        yield f"{len(pairs)} pairs, {prompt} + 2 x {answer}", {WAYS[0]: unrolled(pairs), WAYS[1]: shared}


def tree(rng: np.random.Generator, *lengths: int) -> Sample:
    ids = rng.integers(3, 512, sum(lengths), dtype=np.int32)
    branches = tuple(Branch(parent=0 if node else -1, length=length) for node, length in enumerate(lengths))
    return Sample(input_ids=ids, target=np.ones(len(ids), dtype=np.bool_), branches=branches)


def unrolled(samples: list[Sample]) -> Batch:
    segments = tuple(segment for sample in samples for segment in sample.segments())
    return collate_packs([Pack(segments=segments)], packed=True, pad_token_id=0)


def run(model: Qwen3Model, batch: Batch, attention: str, isolation: Isolation) -> float:
    """CPU seconds."""
    model.zero_grad()
    model.set_attn_implementation(attention)
    start = time.process_time()
    model(**attention_inputs(batch, isolation, windows={})).last_hidden_state.square().sum().backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
