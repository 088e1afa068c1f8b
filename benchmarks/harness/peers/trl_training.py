"""Training with TRL on rows that are ids already. Argument: the job, a JSON file (see benchmarks/training.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from step_costs import StepCosts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

COSTS = StepCosts()


class Answers(trl.SFTTrainer):
    """Counts the targets of each step."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        # as the loss counts them: what the collator leaves of the labels
        COSTS.count(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
        return batches, num_items


class Pairs(trl.DPOTrainer):
    """Takes pairs that are ids already, and counts the targets of each step."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        COSTS.count(sum(int(batch["completion_mask"][:, 1:].sum()) for batch in batches))
        return batches, num_items


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    logging.disable_progress_bar()
    rows = [json.loads(line) for line in Path(job["ids"]).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["length"] = sum(len(ids) for name, ids in row.items() if name != "labels")
    settings: dict[str, Any] = {
        "output_dir": job["output"],
        "num_train_epochs": job["epochs"],
        "per_device_train_batch_size": job["rows_per_batch"],
        "gradient_accumulation_steps": job["accumulation"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "optim": job["optim"],
        "max_length": job["max_length"],
        "train_sampling_strategy": "group_by_length",
        "length_column_name": "length",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": job["seed"],
    }
    common: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        "train_dataset": Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(job["model"]),
        "callbacks": [COSTS],
    }
    if job["objective"] == "dpo":
        arguments = trl.DPOConfig(**settings, remove_unused_columns=False, precompute_ref_log_probs=True)
        trainer: Any = Pairs(args=arguments, **common)
    else:
        if job["packed"]:  # every row of it is full already
            settings |= {"packing": True, "train_sampling_strategy": "random"}
        trainer = Answers(args=trl.SFTConfig(**settings), **common)
    trainer.train()
    COSTS.tell(trl.__version__, len(trainer.train_dataset))


main()
