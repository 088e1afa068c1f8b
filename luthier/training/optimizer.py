"""Optimizers and learning-rate schedules, by transformers' names and made by its public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.optimization import GreedyLR
from transformers.trainer_pt_utils import get_parameter_names

from luthier.loader.plan import StreamPlan
from luthier.models import sharding
from luthier.models.adapters import split_loraplus_groups

NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Weight decay leaves parameters of these names as they are, and those of `nn.LayerNorm`."""

UPDATES_IN_BACKWARD = ("lomo", "adalomo")
"""Optimizers that change each weight as soon as its gradient is there: they are told the rate before the backward pass,
and leave no gradient to be measured."""

ON_METRIC = (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)
"""Schedules that take their step after an evaluation, by its metric."""


def make_optimizer(
    model: nn.Module, args: TrainingArguments, *, loraplus_lr_ratio: float | None
) -> torch.optim.Optimizer:
    """The optimizer ``args.optim`` over the trained parameters, with LoRA+ groups if a ratio is given.

    Raises ``ValueError`` or ``ImportError`` for what transformers cannot make here.
    """
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    # some optimizers ask for the model, or come with groups of their own
    given = [settings.pop(name) for name in ("params", "model", "optimizer_dict") if name in settings]
    optimizer: torch.optim.Optimizer = kind(given[-1] if given else _groups(model, args.weight_decay), **settings)
    if kind.__module__.startswith("bitsandbytes") and settings.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model)
    if loraplus_lr_ratio is not None:
        split_loraplus_groups(optimizer, model, loraplus_lr_ratio)
    if sharding.is_sharded(model):
        sharding.load_in_parts(optimizer)
    return optimizer


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """The trained parameters: first those that decay, then the others."""
    names = set(get_parameter_names(model, [nn.LayerNorm], NOT_DECAYED))
    trained = [(name in names, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for decays, parameter in trained if decays], "weight_decay": weight_decay},
        {"params": [parameter for decays, parameter in trained if not decays], "weight_decay": 0.0},
    ]


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """Optimizer states of 8 bits are too coarse for embeddings (arXiv:2110.02861)."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: TrainingArguments, steps: StreamPlan
) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule ``args.lr_scheduler_type`` over ``args.max_steps``; where that number is an estimate, over the run's
    progress."""
    scheduler: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(args.max_steps),
        num_training_steps=args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    if not steps.is_exact and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        _put_on_progress(scheduler, steps)
    return scheduler


def learning_rate(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> float:
    """The learning rate of the next update, in the first group."""
    by_metric = isinstance(scheduler, ON_METRIC)
    return float(optimizer.param_groups[0]["lr"] if by_metric else scheduler.get_last_lr()[0])


def _put_on_progress(scheduler: torch.optim.lr_scheduler.LambdaLR, steps: StreamPlan) -> None:
    """Ask the schedule not for the number of steps done, but for as many of ``horizon`` as the run's progress is."""

    def on_progress(multiplier: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda steps_done: multiplier(steps.progress(steps_done) * steps.horizon)

    scheduler.lr_lambdas = [on_progress(multiplier) for multiplier in scheduler.lr_lambdas]
