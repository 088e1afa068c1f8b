"""Steps of TRL's GRPO on prompts as users have them. Argument: the job, a JSON file (see benchmarks/rl.py)."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from step_costs import StepCosts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

COSTS = StepCosts()
DRAWING: list[float] = []


class Drawing(trl.GRPOTrainer):
    """Counts what drawing the answers of a step costs."""

    def _generate(self, *args: Any, **keys: Any) -> Any:
        start = time.process_time()
        try:
            return super()._generate(*args, **keys)
        finally:
            DRAWING.append(time.process_time() - start)


def equals(completions: list[list[dict[str, str]]], expected: list[str], **_: Any) -> list[float]:
    """Whether an answer is the row's."""
    return [float(said[0]["content"].strip() == gold) for said, gold in zip(completions, expected, strict=True)]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    logging.disable_progress_bar()
    rows = [json.loads(line) for line in Path(job["rows"]).read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": row["messages"][:1], "expected": row["messages"][1]["content"]} for row in rows]
    settings = trl.GRPOConfig(
        output_dir=job["output"],
        num_generations=job["answers"],
        per_device_train_batch_size=job["rows_per_batch"],
        gradient_accumulation_steps=job["prompts"] * job["answers"] // job["rows_per_batch"],
        max_completion_length=job["new_tokens"],
        max_steps=job["steps"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        loss_type="dapo",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = Drawing(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        args=settings,
        reward_funcs=equals,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[COSTS],
    )
    start = time.process_time()
    trainer.train()
    steps = [end - begun for begun, end in pairwise([start, *COSTS.facts["cpu"]])]
    # learning is all that is not drawing: scoring, the update, and a little bookkeeping
    learning = [step - drawing for step, drawing in zip(steps, DRAWING, strict=True)]
    COSTS.facts |= {"step": steps, "drawing": DRAWING, "learning": learning}
    COSTS.tell(trl.__version__, len(rows))


main()
