"""What tests of runs that draw their answers share: a reward, a description, what a run has drawn and learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from luthier.models.sharding import undivided
from luthier.training.folder.run_folder import ROLLOUTS_FOLDER
from luthier.training.report import RunResult
from luthier.training.rollouts.drawing import Rollouts

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
    files = sorted((folder / ROLLOUTS_FOLDER).glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def ids(result: RunResult) -> list[list[list[int]]]:
    return [[answer["ids"] for answer in step] for step in rollouts(Path(result.output_dir))]


def losses(result: RunResult) -> list[float]:
    return [step.loss for step in result.steps]


@contextmanager
def step_gradients() -> Iterator[list[torch.Tensor]]:
    """All gradients of each update; whole, where ranks share them."""
    found: list[torch.Tensor] = []

    def keep(optimizer: Any, args: Any, kwargs: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if any(weight.grad is not None for weight in weights):
            found.append(torch.cat([undivided(w.grad).flatten() for w in weights if w.grad is not None]))

    handle = register_optimizer_step_pre_hook(keep)
    yield found
    handle.remove()


@contextmanager
def micro_batch_counts() -> Iterator[list[int]]:
    """From how many micro-batches this process has learned in each step; blank ones are not counted."""
    found: list[int] = []
    real = Rollouts.batches

    def batches(self: Rollouts, *asked: Any) -> Any:
        batches = real(self, *asked)
        found.append(sum(batch.policy is not None for batch in batches))
        return batches

    Rollouts.batches = batches  # type: ignore[method-assign]
    yield found
    Rollouts.batches = real  # type: ignore[method-assign]
