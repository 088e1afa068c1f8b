"""Optimizers and learning-rate schedules. Most optimizers that transformers names are made by its public functions.

Not those of GaLore and APOLLO, whose modules it wants named, nor those that update weights during the backward pass,
whose gradients it does not measure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import Adafactor, PreTrainedModel, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.optimization import GreedyLR
from transformers.pytorch_utils import Conv1D
from transformers.trainer_pt_utils import get_parameter_names
from transformers.training_args import OptimizerNames

from luthier.config.choices import FOLLOWS_MEASURE, AdapterType, Offload, Precision, RatePart
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import RunConfig, TrainConfig
from luthier.errors import UNPLACED, ConfigError, ModelError, Problem
from luthier.loader.plan import StreamPlan
from luthier.loader.settings import warmup_steps
from luthier.models import adapters, find_parts, output_layer, plain_model, routers, sharding, vocabulary
from luthier.models.model import run_device, run_precision, use_liger
from luthier.training.callbacks import is_greater_better
from luthier.training.updates import BlockAdamW, Group, MuonWithAdamW, OffloadedOptimizer, tell_projectors
from luthier.writing import counted


class RunArguments(TrainingArguments):  # type: ignore[misc]
    """Arguments that tell trackers the run description, too, by its own keys: transformers knows no data, objective and
    adapter of ours."""

    described: dict[str, object]

    def to_dict(self) -> dict[str, object]:
        return {**super().to_dict(), **self.described}


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
        "per_device_eval_batch_size": config.eval.per_device_eval_batch_size,
        "num_train_epochs": train.num_train_epochs,
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
        # `Flow` decides when; this and what follows only tells callbacks and trackers
        "eval_strategy": config.eval.strategy.value if evaluates else "no",
        "eval_on_start": evaluates_first,
        "eval_steps": config.eval.steps,
        "save_strategy": config.output.save_strategy.value,
        "save_steps": config.output.save_steps,
        "save_total_limit": config.output.save_total_limit,
        "save_only_model": config.output.save_only_model,
        "metric_for_best_model": config.eval.metric_for_best_model,
        "greater_is_better": is_greater_better(config.eval),
        "logging_steps": tracking.logging_steps,
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    try:
        found = RunArguments(**arguments)
    except ValueError as error:
        raise ConfigError([Problem(where=UNPLACED, key="train", what=str(error).strip())]) from error
    # for callbacks and trackers, too: what transformers would refuse, or act by
    if found.optim != train.optim:
        found.optim = train.optim
    told = config.model_dump(mode="json", exclude_defaults=True)
    # keys within a setting may be any text, which trackers take for no name
    found.described = {f"{section}.{key}": value for section, keys in told.items() for key, value in keys.items()}
    found.torch_compile = train.torch_compile
    found.load_best_model_at_end = config.eval.load_best_model_at_end
    return found


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


NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Weight decay leaves parameters of these names as they are, and those of norms (`decayed_names`)."""

ON_METRIC = (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)
"""Schedules that take their step after an evaluation, by its metric."""


def make_optimizer(model: nn.Module, args: TrainingArguments, config: RunConfig) -> torch.optim.Optimizer:
    """The optimizer ``train.optim`` over the trained parameters, with groups for those that have a rate of their own.
    ``args`` are the run in transformers' words.

    Raises `ModelError`, ``ValueError`` or ``ImportError`` for what cannot be made here.
    """
    factors = rate_factors(model, config)
    check_blocks(model, config)
    optimizer = _made(model, args, config.train)
    split_by_rate(optimizer, factors)
    if Offload.OPTIMIZER in config.train.offload:
        optimizer = OffloadedOptimizer(optimizer)
    if sharding.is_sharded(model):
        sharding.load_in_parts(optimizer)
    return optimizer


def _made(model: nn.Module, args: TrainingArguments, train: TrainConfig) -> torch.optim.Optimizer:
    if "bitsandbytes" in sys.modules:  # it would take settings of an earlier run's weights for weights of this one
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
    own = {name: default for name, default in OPTIMIZERS[train.optim].settings.items() if not isinstance(default, type)}
    own = {name: default[0] if isinstance(default, tuple) else default for name, default in own.items()}
    own |= train.optim_args
    adam = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    match train.optim.removesuffix("_layerwise"):
        case "muon":
            return _muon(model, args, own, adam)
        case "badam":
            return _badam(model, args, own, adam)
        case "adam_mini":
            return _adam_mini(model, args, adam)
        case "galore_adamw" | "galore_adamw_8bit" | "galore_adafactor" | "apollo_adamw":
            return _low_rank(model, args, own, adam, name=train.optim)
        case "lomo":
            return torch.optim.SGD(_groups(model, args.weight_decay), lr=args.learning_rate)
        case "adalomo":
            groups = _groups(model, args.weight_decay)
            found: torch.optim.Optimizer = Adafactor(
                groups, lr=args.learning_rate, scale_parameter=True, relative_step=False
            )
            return found
        case _:
            return _transformers_own(model, args, train)


def _transformers_own(model: nn.Module, args: TrainingArguments, train: TrainConfig) -> torch.optim.Optimizer:
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    # transformers reads settings from a text, and leaves some of them texts
    settings |= {name: value for name, value in train.optim_args.items() if type(value) is not str and name in settings}
    if train.optim == "stable_adamw" and not torch.cuda.is_available():
        settings["triton"] = False
    optimizer: torch.optim.Optimizer = kind(_groups(model, args.weight_decay), **settings)
    if kind.__module__.startswith("bitsandbytes") and settings.get("optim_bits") == 8:
        # Optimizer states of 8 bits are too coarse for embeddings (arXiv:2110.02861).
        from bitsandbytes.optim import GlobalOptimManager

        manager = GlobalOptimManager.get_instance()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer


def decayed_names(model: nn.Module) -> set[str]:
    """The names of the parameters that decay: all but biases and norms. transformers goes by names alone and lets the
    norms of some models decay, such as those that end in a number."""
    norms = {type(module) for module in model.modules() if _is_norm(module)}
    return set(get_parameter_names(model, [nn.LayerNorm, *norms], NOT_DECAYED))


def _is_norm(module: nn.Module) -> bool:
    is_leaf = next(module.children(), None) is None
    return is_leaf and "norm" in type(module).__name__.lower()


def _groups(
    model: nn.Module, weight_decay: float, only: Callable[[nn.Parameter], bool] = lambda _: True, **more: object
) -> list[Group]:
    """The trained parameters: first those that decay, then the others. ``more`` stands in both groups."""
    names = decayed_names(model)
    trained = [
        (name in names, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and only(parameter)
    ]
    return [
        {"params": [parameter for decays, parameter in trained if decays], "weight_decay": weight_decay, **more},
        {"params": [parameter for decays, parameter in trained if not decays], "weight_decay": 0.0, **more},
    ]


def hidden_matrices(model: nn.Module) -> set[int]:
    """``id`` of each matrix that takes hidden states to hidden states: of linear layers but the output layer."""
    plain = plain_model(model)
    ends: Iterable[nn.Module | None] = ()
    if isinstance(plain, PreTrainedModel):
        ends = (plain.get_input_embeddings(), output_layer(plain))
    outer = {id(weight) for end in ends if end is not None for weight in end.parameters()}
    found = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | Conv1D)}
    return found - outer


def _muon(model: nn.Module, args: TrainingArguments, own: dict[str, Any], adam: Group) -> torch.optim.Optimizer:
    hidden, decay = hidden_matrices(model), args.weight_decay
    return MuonWithAdamW(
        _groups(model, decay, lambda weight: id(weight) in hidden),
        _groups(model, decay, lambda weight: id(weight) not in hidden),
        muon={"lr": args.learning_rate, **own},
        adamw=adam,
    )


def check_blocks(model: nn.Module, config: RunConfig) -> None:
    """Raises `ModelError` where ``adapter.type: freeze`` has chosen weights that badam would leave as they are."""
    train = config.train
    if train.optim != "badam" or train.optim_args.get("ends") or config.adapter.type is not AdapterType.FREEZE:
        return
    layers = adapters.decoder_layers(plain_model(model))
    inside = {id(weight) for layer in layers or () for weight in layer.parameters()}
    left = [name for name, weight in model.named_parameters() if weight.requires_grad and id(weight) not in inside]
    if left:
        raise ModelError(
            f"adapter.freeze_trainable_modules trains {left[0]}, and badam trains decoder layers only",
            hint="set train.optim_args: {ends: true}, or train.optim: adamw_torch",
        )


def _badam(model: nn.Module, args: TrainingArguments, own: dict[str, Any], adam: Group) -> torch.optim.Optimizer:
    layers = adapters.decoder_layers(model) if isinstance(model, PreTrainedModel) else [model]
    if layers is None:
        raise ModelError(f"{type(model).__name__} has no list of decoder layers, which badam takes one by one")
    places = {id(weight): number for number, layer in enumerate(layers) for weight in layer.parameters()}
    ends = own.pop("ends")
    if not ends:
        for weight in model.parameters():
            weight.requires_grad_(weight.requires_grad and id(weight) in places)
    blocks = [
        _groups(model, args.weight_decay, partial(_is_in_block, places, number))
        for number in [*range(len(layers)), *([None] if ends else [])]
    ]
    trained = [block for block in blocks if any(group["params"] for group in block)]
    if not trained:
        raise ModelError("badam trains decoder layers, and none is trained", hint="set train.optim: adamw_torch")
    return BlockAdamW(trained, seed=args.seed, **own, **adam)


def _is_in_block(places: dict[int, int], number: int | None, weight: nn.Parameter) -> bool:
    return places.get(id(weight)) == number


def _adam_mini(model: nn.Module, args: TrainingArguments, adam: Group) -> torch.optim.Optimizer:
    from adam_mini import Adam_mini

    decays = decayed_names(model)
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    optimizer: Any = Adam_mini(named, weight_decay=args.weight_decay, dim=1, n_heads=1, verbose=False, **adam)
    if isinstance(model, PreTrainedModel):
        text = model.config.get_text_config()
        heads = text.num_attention_heads
        # it would take the width of a head for that of the model over their number, which not every model has
        optimizer.head_numel = text.hidden_size * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    for (name, weight), group in zip(named, optimizer.param_groups, strict=True):
        group["weight_decay"] = args.weight_decay if name in decays else 0.0
        is_by_head = any(each in group["name"] for each in optimizer.wqk_names) and "bias" not in group["name"]
        if is_by_head and weight.numel() % optimizer.head_numel:
            raise ModelError(
                f"adam_mini: {name} has {counted(weight.numel(), 'number')}, which are no whole heads of "
                f"{optimizer.head_numel:,}",
                hint="set train.optim: adamw_torch",
            )
    found: torch.optim.Optimizer = optimizer
    return found


def _low_rank(
    model: nn.Module, args: TrainingArguments, own: dict[str, Any], adam: Group, *, name: str
) -> torch.optim.Optimizer:
    hidden, decay = hidden_matrices(model), args.weight_decay
    groups = [
        *_groups(model, decay, lambda weight: id(weight) not in hidden),
        *_groups(model, decay, lambda weight: id(weight) in hidden, **own),
    ]
    kinds = {
        "galore_adamw": ("galore_torch", "GaLoreAdamW", {**adam, "no_deprecation_warning": True}),
        "galore_adamw_8bit": ("galore_torch", "GaLoreAdamW8bit", adam),
        "galore_adafactor": (
            "galore_torch",
            "GaLoreAdafactor",
            {"lr": args.learning_rate, "scale_parameter": False, "relative_step": False},
        ),
        "apollo_adamw": ("apollo_torch", "APOLLOAdamW", adam),
    }
    package, kind, settings = kinds[name.removesuffix("_layerwise")]
    optimizer: torch.optim.Optimizer = getattr(import_module(package), kind)(groups, **settings)
    tell_projectors(optimizer)
    return optimizer


def rate_factors(model: nn.Module, config: RunConfig) -> dict[int, float]:
    """By ``id``: how many times ``train.learning_rate`` the rate of a parameter is, where it is not that rate.

    With ``train.layer_decay`` d and L decoder layers it is d for the last layer, d^L for the first and d^(L+1) for the
    embedding (arXiv:2106.08254); a part that has its own rate does not decay. LoRA+ (arXiv:2402.12354) multiplies that
    of B. Raises `ModelError` for a part that the model lacks or that is not trained.
    """
    train, ratio = config.train, config.adapter.loraplus_lr_ratio
    factors: dict[int, float] = {}
    if train.layer_decay < 1.0:
        plain = plain_model(model)
        layers = adapters.decoder_layers(plain)
        if layers is None:
            raise ModelError(f"train.layer_decay: {type(plain).__name__} has no list of decoder layers")
        stack = [plain.get_input_embeddings(), *layers]
        for below, module in enumerate(reversed(stack), start=1):
            factors |= {id(weight): train.layer_decay**below for weight in module.parameters()}
    for part, rate in train.learning_rates.items():
        factors |= dict.fromkeys(_trained_of(model, part), rate / train.learning_rate)
    if ratio is not None:
        of_b = [id(p) for name, p in model.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name]
        if not of_b:
            raise ModelError("adapter.loraplus_lr_ratio is set, but the adapter has no lora_B", hint="remove the key")
        factors |= {weight: factors.get(weight, 1.0) * ratio for weight in of_b}
    return factors


def _trained_of(model: nn.Module, part: RatePart) -> list[int]:
    plain = plain_model(model)
    match part:
        case RatePart.EMBEDDING | RatePart.OUTPUT_LAYER:
            ends = list(vocabulary.ends_of(plain).values())
            last = output_layer(plain)
            if isinstance(last, ModulesToSaveWrapper) and len(ends) == 1:
                ends.append(last)  # it is trained apart from the embedding, whose weight it had
            if part is RatePart.OUTPUT_LAYER and len(ends) == 1:
                what = f"{type(plain).__name__} has no output layer but its embedding"
                raise ModelError(f"train.learning_rates: {what}", hint="name embedding instead")
            weights = list(ends[part is RatePart.OUTPUT_LAYER].parameters())
        case RatePart.ROUTER:
            weights = [
                weight for name in routers.router_names(plain) for weight in plain.get_submodule(name).parameters()
            ]
        case RatePart.PROJECTOR | RatePart.TOWER:
            parts = find_parts(plain)
            weights = [weight for name, weight in plain.named_parameters() if parts.of(name).value == part.value]
    if found := [id(weight) for weight in weights if weight.requires_grad]:
        return found
    what = f"no weight of the {part} of {type(plain).__name__} is trained"
    raise ModelError(f"train.learning_rates: {what}", hint=f"remove {part}, or train it (adapter)")


def split_by_rate(optimizer: torch.optim.Optimizer, factors: dict[int, float]) -> None:
    """Move weights that have another rate into groups of their own, behind those that are there."""
    for group in list(optimizer.param_groups):
        by_factor: dict[float, list[nn.Parameter]] = {}
        for weight in group["params"]:
            by_factor.setdefault(factors.get(id(weight), 1.0), []).append(weight)
        group["params"] = by_factor.pop(1.0, [])
        settings = {name: value for name, value in group.items() if name != "params"}
        for factor, weights in by_factor.items():
            optimizer.add_param_group({**settings, "params": weights, "lr": settings["lr"] * factor})


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: TrainingArguments, steps: StreamPlan
) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule ``args.lr_scheduler_type`` over ``args.max_steps``; where that number is an estimate, over the run's
    progress. One that goes by a measure is told whether that is to rise."""
    follows = args.lr_scheduler_type in FOLLOWS_MEASURE
    direction = {"mode": "max" if args.greater_is_better else "min"} if follows else {}
    warmup = args.get_warmup_steps(args.max_steps)
    scheduler: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=max(args.max_steps, warmup + 1),  # `polynomial` divides by their difference
        scheduler_specific_kwargs={**direction, **(args.lr_scheduler_kwargs or {})} or None,
    )
    if not steps.is_exact and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        _put_on_progress(scheduler, steps)
    return scheduler


def take_up_schedule(scheduler: torch.optim.lr_scheduler.LRScheduler, state: dict[str, Any]) -> None:
    """Go on from the state that a schedule was saved in, at this schedule's own rates: it may be one of more steps, and
    the rate in the state, as in the optimizer's, is that of the shorter one's next step, as a rule 0."""
    scheduler.load_state_dict(state)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        return
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
    scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": rates})


def learning_rate(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> float:
    """The learning rate of the next update, in the first group."""
    by_metric = isinstance(scheduler, ON_METRIC)
    return float(optimizer.param_groups[0]["lr"] if by_metric else scheduler.get_last_lr()[0])


def _put_on_progress(scheduler: torch.optim.lr_scheduler.LambdaLR, steps: StreamPlan) -> None:
    """Ask the schedule not for the number of steps done, but for as many of ``horizon`` as the run's progress is."""

    def on_progress(multiplier: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda steps_done: multiplier(steps.progress(steps_done) * steps.horizon)

    scheduler.lr_lambdas = [on_progress(multiplier) for multiplier in scheduler.lr_lambdas]
