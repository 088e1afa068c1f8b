"""What is said of a run by the number of its steps: that they are few, and what would make them more."""

from __future__ import annotations

import math

from luthier.config.choices import Strategy
from luthier.config.schema import Packing, RunConfig
from luthier.loader.numbered_rows import RowTable
from luthier.loader.settings import plan_of_run
from luthier.writing import counted

FEW_STEPS = 20  # fewer teach next to nothing, whatever the rate


def ways_to_more_steps(config: RunConfig, rows: RowTable, *, num_ranks: int) -> tuple[str, ...]:
    """Settings of which each gives a run at least `FEW_STEPS` steps, as ``key: value``; none, where it has as many.

    Each is tried: what is given is what the changed run would do.
    """

    def total(**changes: object) -> int:
        changed = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        return plan_of_run(changed, rows, num_ranks=num_ranks).count_steps()

    train = config.train
    if total() >= FEW_STEPS:
        return ()
    found: list[dict[str, object]] = []
    if train.max_steps is not None:
        found.append({"max_steps": FEW_STEPS})
    else:
        epochs = math.ceil(train.num_train_epochs * FEW_STEPS / total())
        while total(num_train_epochs=float(epochs)) < FEW_STEPS:
            epochs += 1
        found.append({"num_train_epochs": epochs})
    if train.packing.is_packed and train.packing is not Packing.SPLIT and train.shared_prompts is not True:
        found += [{"packing": Packing.NONE, "per_device_train_batch_size": size} for size in (16, 8, 4, 2, 1)]
    elif train.per_device_train_batch_size > 1:
        found.append({"per_device_train_batch_size": 1})
    if train.gradient_accumulation_steps > 1:
        found.append({"gradient_accumulation_steps": 1})
    if train.tokens_per_step is not None:
        found.append(
            {"tokens_per_step": max(1, int(rows.whole().lengths.sum() * train.num_train_epochs) // (2 * FEW_STEPS))}
        )
    enough = [found[0], *(changes for changes in found[1:] if total(**changes) >= FEW_STEPS)]
    unpacked = [changes for changes in enough if "packing" in changes]
    kept = [changes for changes in enough if "packing" not in changes] + unpacked[:1]
    return tuple(" and ".join(f"train.{key}: {value}" for key, value in changes.items()) for changes in kept)


def length_notes(config: RunConfig, total_steps: int, micro_batches: int | None = None) -> tuple[str, ...]:
    """What is asked of a run and will not happen, as it has so few steps, or its epoch so few ``micro_batches``."""
    evaluation, output, train = config.eval, config.output, config.train
    evaluates = bool(config.data.eval or config.data.eval_use or config.data.eval_split)
    every = [
        (
            "eval.steps",
            evaluation.steps,
            evaluates and evaluation.strategy is Strategy.STEPS,
            "evaluated before and after",
        ),
        ("output.save_steps", output.save_steps, output.save_strategy is Strategy.STEPS, "saved at its end alone"),
        ("tracking.logging_steps", config.tracking.logging_steps, True, "logged at its end alone"),
    ]
    notes = [
        f"{key} is {number:,}, and the run has {counted(total_steps, 'step')}: it is {what}"
        for key, number, applies, what in every
        if applies and number > total_steps
    ]
    patience = evaluation.early_stopping_patience
    if evaluates and patience is not None:
        steps = evaluation.steps if evaluation.strategy is Strategy.STEPS else 1
        steps = steps * total_steps if steps < 1 else steps
        if patience * steps >= total_steps:
            what = (
                f"{counted(patience, 'evaluation does', 'evaluations do')} not fit into {counted(total_steps, 'step')}"
            )
            notes.append(f"eval.early_stopping_patience: {what}: the run cannot stop early")
    if micro_batches is not None and train.gradient_accumulation_steps > micro_batches:
        asked = (
            f"asks for {train.gradient_accumulation_steps:,} micro-batches a step, and an epoch has {micro_batches:,}"
        )
        notes.append(f"train.gradient_accumulation_steps {asked}: every step is a whole epoch, the rest of it is blank")
    return tuple(notes)
