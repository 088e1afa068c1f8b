"""Training with LLaMA-Factory on rows that are ids already.

Argument: the job, a JSON file (see benchmarks/training.py).
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from llamafactory.train.sft import trainer as their_trainer
from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp
from step_costs import StepCosts

COSTS = StepCosts()


class Counting(their_trainer.CustomSeq2SeqTrainer):
    """Counts the targets of each step."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        COSTS.count(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
        return batches, num_items


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in Path(job["ids"]).read_text(encoding="utf-8").splitlines()]
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"]), "length": len(row["input_ids"])} for row in rows]
    for row in rows:
        row.update(images=None, videos=None, audios=None)
    tokenized = Path(job["output"]) / "tokenized"
    DatasetDict(train=Dataset.from_list(rows)).save_to_disk(tokenized)
    workflow.CustomSeq2SeqTrainer = Counting
    run_exp(
        {
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "model_name_or_path": job["model"],
            "template": "qwen3",
            "dataset": "rows",  # asked for, not read: the next line is
            "tokenized_path": str(tokenized),
            "cutoff_len": job["max_length"],
            "output_dir": job["output"],
            "overwrite_output_dir": True,
            "num_train_epochs": job["epochs"],
            "per_device_train_batch_size": job["rows_per_batch"],
            "gradient_accumulation_steps": job["accumulation"],
            "learning_rate": job["learning_rate"],
            "lr_scheduler_type": "constant",
            "optim": job["optim"],
            "train_sampling_strategy": "group_by_length",
            "length_column_name": "length",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "fp16": False,
            "disable_gradient_checkpointing": True,
            "seed": job["seed"],
        },
        callbacks=[COSTS],
    )
    COSTS.tell(version("llamafactory"), len(rows))


main()
