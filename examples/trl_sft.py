"""Luthier's batches in TRL's SFTTrainer: offline, on a CPU, in less than a minute.

    python examples/trl_sft.py [--steps 40] [--out output/trl_sft]

Rendering, masks and packing are Luthier's; model, loss, optimizer and logging are TRL's. What matters:

- ``skip_prepare_dataset`` and a collator that does nothing: what comes is tokens already, batch by batch.
- ``to_dict(labels="unshifted")``: TRL shifts labels inside its loss.

The same holds for transformers' own Trainer, without ``skip_prepare_dataset`` and ``max_length``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import luthier
from luthier.presets import model_folder, tokenizer_folder

MODEL = "preset:tiny-qwen3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("output/trl_sft"))
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
    accumulation = 2
    loader = luthier.Loader(prepared, max_length=512, gradient_accumulation_steps=accumulation)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("tiny-qwen3"))),
        args=SFTConfig(
            output_dir=str(arguments.out / "trainer"),
            max_steps=arguments.steps,
            per_device_train_batch_size=1,  # one of our batches; how many rows that has is `batch_size` of the loader
            gradient_accumulation_steps=accumulation,
            learning_rate=3e-3,
            adam_beta2=0.98,
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=None,
            remove_unused_columns=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=IterableDataset.from_generator(endless, gen_kwargs={"loader": loader}),
        data_collator=only,
        processing_class=PreTrainedTokenizerFast.from_pretrained(tokenizer_folder("tiny-qwen3")),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss per target: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


def endless(loader: luthier.Loader) -> Iterator[dict[str, Any]]:
    """Epoch after epoch, each in its own order; the trainer stops after ``max_steps``."""
    while True:
        for batch in loader:
            yield batch.to_dict(labels="unshifted")


def only(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch itself: nothing is left to collate."""
    (batch,) = batches
    return batch


if __name__ == "__main__":
    main()
