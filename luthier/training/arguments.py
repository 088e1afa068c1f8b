"""Our run description in transformers' words: what callbacks, trackers, optimizers and schedules of it read."""

from __future__ import annotations

from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.training_args import OptimizerNames

from luthier.config.schema import Precision, RunConfig, TrainConfig
from luthier.errors import UNPLACED, ConfigError, Problem
from luthier.loader.settings import warmup_steps
from luthier.models.model import run_device, run_precision, use_liger
from luthier.training.callbacks import is_greater_better


def training_arguments(
    config: RunConfig, *, max_steps: int, evaluates: bool, evaluates_first: bool
) -> TrainingArguments:
    """The arguments of one run of ``max_steps`` steps. Also sets up torch.distributed, under torchrun.

    Raises `ConfigError` for values that only transformers knows to be wrong, such as an optimizer's name.
    """
    train, tracking = config.train, config.tracking
    _check_trackers(tracking.report_to)
    precision = run_precision(config)
    arguments: dict[str, object] = {
        "output_dir": str(config.output.dir),
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        # the whole run is one pass over our stream; epochs are the schedule's affair
        "num_train_epochs": 1,
        "max_steps": max_steps,
        **optimization(train, warmup_steps=warmup_steps(train, max_steps)),
        "bf16": precision is Precision.BF16,
        "fp16": precision is Precision.FP16,
        "neftune_noise_alpha": train.neftune_noise_alpha,
        # activations are recomputed without the reentrant variant, which loses gradients of frozen inputs
        "activation_checkpointing": train.gradient_checkpointing,
        "activation_checkpointing_kwargs": {"use_reentrant": False} if train.gradient_checkpointing else None,
        "use_liger_kernel": use_liger(config.model),
        # the loss is ours
        "liger_kernel_config": {"cross_entropy": False, "fused_linear_cross_entropy": False},
        "seed": config.runtime.seed,
        "use_cpu": run_device(config) == "cpu",
        "dataloader_num_workers": config.runtime.dataloader_num_workers,
        "report_to": list(tracking.report_to) or "none",
        "run_name": tracking.run_name,
        # `Flow` decides when; this only tells the loop that evaluation may happen
        "eval_strategy": "steps" if evaluates else "no",
        "eval_on_start": evaluates_first,
        "eval_steps": max(1, int(config.eval.steps)),
        "save_strategy": "steps",
        "save_steps": max(1, int(config.output.save_steps)),
        "save_only_model": config.output.save_only_model,
        "metric_for_best_model": config.eval.metric_for_best_model,
        "greater_is_better": is_greater_better(config.eval),
        "logging_steps": tracking.logging_steps,
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    try:
        return TrainingArguments(**arguments)
    except ValueError as error:
        raise ConfigError([Problem(where=UNPLACED, key="train", what=str(error).strip())]) from error


def optimization(train: TrainConfig, *, warmup_steps: int) -> dict[str, object]:
    """What transformers is told of the optimizer and its schedule."""
    return {
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler_type,
        "lr_scheduler_kwargs": dict(train.lr_scheduler_kwargs) or None,
        "warmup_steps": warmup_steps,
        # of an optimizer that is not transformers' own it knows the name of its default
        "optim": train.optim if train.optim in list(OptimizerNames) else OptimizerNames.ADAMW_TORCH.value,
        "optim_args": ",".join(f"{name}={value}" for name, value in train.optim_args.items()) or None,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm,
    }


def _check_trackers(names: list[str]) -> None:
    """Now, not when the first line is to be sent."""
    installed = get_available_reporting_integrations()
    for name in names:
        if name not in installed:
            there = ", ".join(installed) or "none at all"
            raise ConfigError(
                [
                    Problem(
                        where=UNPLACED,
                        key="tracking.report_to",
                        what=f"{name!r} is not installed",
                        hint=f"there is {there}",
                    )
                ]
            )
