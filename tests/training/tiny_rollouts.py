"""What tests of runs that draw their answers share: a reward, a description, and the answers in a run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from luthier.training.report.result import RunResult
from luthier.training.rollouts.answer_log import FOLDER

ROLLOUT = {"prompts_per_step": 4, "answers": 3, "max_new_tokens": 6, "min_finished": 0.0, "rewards": ["evenness"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"train__packing": "none", "train__per_device_train_batch_size": 1},
    "padded": {"train__packing": "none", "train__per_device_train_batch_size": 8},
    "packed": {"train__packing": "best_fit", "train__shared_prompts": False},
    "shared": {"train__packing": "best_fit", "train__shared_prompts": True},
}


def evenness(expected: str, generated: str) -> float:
    """A reward that any answer may have: which share of its characters have even numbers."""
    return sum(ord(letter) % 2 == 0 for letter in generated) / max(len(generated), 1)


def rollouts(folder: Path) -> list[list[dict[str, Any]]]:
    """The answers of each step."""
    files = sorted((folder / FOLDER).glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def ids(result: RunResult) -> list[list[list[int]]]:
    return [[answer["ids"] for answer in step] for step in rollouts(Path(result.output_dir))]


def losses(result: RunResult) -> list[float]:
    return [step.loss for step in result.steps]
