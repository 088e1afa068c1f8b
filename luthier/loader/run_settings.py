"""How a run description says that its data is planned."""

from __future__ import annotations

from luthier.config.schema import RunConfig
from luthier.packing import PlanSettings


def train_settings(config: RunConfig, *, num_ranks: int = 1) -> PlanSettings:
    """Training: a step is accumulation x ranks micro-batches, or as many times that as ``tokens_per_step`` takes."""
    return PlanSettings(
        packing=config.train.packing,
        capacity=config.data.max_length,
        rows_per_micro_batch=config.train.per_device_train_batch_size,
        micro_batches_per_step=config.train.gradient_accumulation_steps * num_ranks,
        num_ranks=num_ranks,
        seed=config.runtime.seed,
        tokens_per_step=config.train.tokens_per_step,
    )


def eval_settings(config: RunConfig, *, num_ranks: int = 1) -> PlanSettings:
    """Evaluation: every held-out segment once, a micro-batch a rank at a time."""
    return PlanSettings(
        packing=config.train.packing,
        capacity=config.data.max_length,
        rows_per_micro_batch=config.eval.per_device_eval_batch_size,
        micro_batches_per_step=num_ranks,
        num_ranks=num_ranks,
        seed=config.runtime.seed,
    )
