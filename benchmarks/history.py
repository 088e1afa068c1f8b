"""A step of training on conversations of eight turns under Qwen3's template, which strips the thoughts of earlier
turns: every answer's context computed for each answer, beside what they share computed once.

python benchmarks/history.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

import luthier
from luthier.collation import CollateSettings
from luthier.collation.collator import collate_packs, collate_trees
from luthier.models.isolation import ChosenIsolation, choose_isolation
from luthier.models.passes import find_head, score_targets
from luthier.objectives.token_scores import token_scores
from luthier.presets import tokenizer_folder
from luthier.records import Batch, Pack, Sample

ROWS, TURNS, ROUNDS = 2, 8, 3
CPU = torch.device("cpu")
HOW = CollateSettings(packed=True, pad_token_id=0)
QUESTION = "What would you say to somebody who asks about the {n}th of {m} things, and why?"
ANSWER = (
    "It depends on which of the things is meant by that. Of the {n}th I would say that it is worth a look, "
    "since it came up {m} times before, and nobody had a better idea of what to do about it. "
) * 2
THOUGHT = "They ask about thing {n} of {m}. I know little of it, so I should say what I would do myself, and be short."


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = luthier.load_tokenizer(str(tokenizer_folder("tiny")), chat_template="qwen3")
    table = Table("rows", "layout", "tokens", "targets", "CPU s a step", "loss", "grad norm", "quicker by")
    for name, thoughts in (("with thoughts", True), ("without", False)):
        samples = [luthier.encode(conversation(row, thoughts=thoughts), tokenizer) for row in range(ROWS)]
        batches = {
            "unrolled": unrolled(samples),
            "shared": collate_trees([[sample] for sample in samples], pad_token_id=0),
        }
        model = make_model(tokenizer.vocab_size)
        chosen = choose_isolation(model, samples[0].segments(), HOW, device=CPU, shared=True)
        seconds: dict[str, list[float]] = {layout: [] for layout in batches}
        found: dict[str, tuple[float, float]] = {}
        for _ in range(ROUNDS):  # in turn, so that a busy machine is busy for both
            for layout, batch in batches.items():
                took, found[layout] = step(model, chosen, batch)
                seconds[layout].append(took)
        medians = {layout: statistics.median(each) for layout, each in seconds.items()}
        for layout, batch in batches.items():
            tokens = sum(branch.length for row in batch.branches for branch in row)
            loss, norm = found[layout]
            quicker = f"{medians['unrolled'] / medians[layout]:.2f}"
            table.add_row(
                name, layout, f"{tokens:,}", f"{batch.num_targets:,}", f"{medians[layout]:.2f}", f"{loss:.6f}",
                f"{norm:.6f}", quicker,
            )  # fmt: skip
    Console(width=120).print(table)


def conversation(row: int, *, thoughts: bool) -> dict[str, Any]:
    messages = []
    for turn in range(TURNS):
        numbers = {"n": turn + 1, "m": row + TURNS}
        thought = f"<think>\n{THOUGHT.format(**numbers)}\n</think>\n\n" if thoughts else ""
        messages.append({"role": "user", "content": QUESTION.format(**numbers)})
        messages.append({"role": "assistant", "content": thought + ANSWER.format(**numbers)})
    return {"messages": messages}


def unrolled(samples: list[Sample]) -> Batch:
    packs = [Pack(segments=tuple(sample.segments())) for sample in samples]
    return collate_packs(packs, packed=True, pad_token_id=0)


def make_model(vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, tie_word_embeddings=True,
        )
    ).train()  # fmt: skip


def step(model: Qwen3ForCausalLM, chosen: ChosenIsolation, batch: Batch) -> tuple[float, tuple[float, float]]:
    """CPU seconds of a forward and a backward pass, the mean loss of the targets, and the norm of its gradients."""
    model.zero_grad()
    targets = batch.targets
    start = time.process_time()
    scored = score_targets(
        model,
        chosen.inputs(batch, device=CPU),
        targets.positions_K,
        lambda hidden_KD, head: token_scores(hidden_KD, head, targets.ids_K).logps_K,
        head=find_head(model),
    )
    loss = -scored.scores.sum() / batch.num_targets
    loss.backward()
    seconds = time.process_time() - start
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return seconds, (loss.item(), norm.item())


if __name__ == "__main__":
    main()
