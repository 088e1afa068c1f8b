"""Luthier's batches in a plain PyTorch loop: offline, on a CPU, in less than a minute.

    python examples/pytorch_loop.py [--steps 60] [--out output/pytorch_loop]

A tiny model learns small skills from nothing. Half way the loop stops, as if it had been killed, and goes on from the
state that it had saved: the loss is what it would have been.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import luthier
from luthier.presets import model_folder

MODEL = "preset:tiny-qwen3"
MAX_LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("output/pytorch_loop"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    prepared = luthier.prepare(
        {
            "model": MODEL,
            "data": {"train": [{"path": "preset:skills"}], "store": str(arguments.out / "store")},
            "output": {"dir": str(arguments.out)},
        }
    )
    # two batches a step, of one packed row each
    loader = luthier.Loader(prepared, max_length=MAX_LENGTH, gradient_accumulation_steps=2)
    print(f"{len(prepared.train)} rows, {len(loader)} batches an epoch")

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("tiny-qwen3")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    half = arguments.steps // 2
    losses = train(model, optimizer, loader, half)
    (arguments.out / "loader.json").write_text(json.dumps(loader.state_dict()))

    # another process would begin here, with the model and the optimizer from its own checkpoint
    loader = luthier.Loader(prepared, max_length=MAX_LENGTH, gradient_accumulation_steps=2)
    loader.load_state_dict(json.loads((arguments.out / "loader.json").read_text()))
    losses += train(model, optimizer, loader, arguments.steps - half)
    print(f"loss per target: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


def train(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, loader: luthier.Loader, num_steps: int
) -> list[float]:
    """So many steps; the loss of each."""
    losses = []
    for step in islice(loader.steps(), num_steps):
        total = 0.0
        for batch in step.batches:
            logits_BTV = model(**batch.model_inputs).logits
            weights = None if batch.weights_BT is None else batch.weights_BT.flatten()
            found = luthier.token_loss_sum(logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), weights)
            # one normaliser for the whole step, however it is cut into batches; with W ranks under DDP, times W,
            # because DDP averages gradients
            loss = found.loss_sum / step.num_targets
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


if __name__ == "__main__":
    main()
