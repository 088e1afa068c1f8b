"""Checks between keys: what each may hold alone, and what together makes no sense.

Each rule names the keys it reads; a rule is skipped while one of them is faulty, so that no fault is told twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from luthier.config import choices, losses
from luthier.config.adapters import check_adapter, check_blocks, check_features, check_quantization
from luthier.config.choices import Format
from luthier.config.draft import Draft
from luthier.config.inputs import SourceConfig
from luthier.config.optimizers import OPTIMIZERS
from luthier.errors import Problem
from luthier.writing import counted

# --------------------------------------------------------------------------------------------------------------------
# Checks of ``runtime.sharding``: what needs a whole weight somewhere cannot be had of shares.


# Those that look at each number by itself: the norm, root or factors of a share are not those of the weight.
OPTIMIZERS_OF_SHARES = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


def check_sharding(draft: Draft) -> Iterator[Problem]:
    """Problems of other keys with ``runtime.sharding: fsdp``."""
    config = draft.config
    if config.runtime.sharding is choices.Sharding.NONE:
        return
    cited = f"{draft.cite('runtime.sharding')} is {config.runtime.sharding}"
    if config.train.torch_compile:
        yield draft.problem("train.torch_compile", f"a sharded model is not compiled, and {cited}", "set it to false")
    if config.train.precision is choices.Precision.FP16:
        what = f"each rank would scale the loss by what its own share overflows, and {cited}"
        yield draft.problem("train.precision", what, "set train.precision: bf16")
    optim: str = config.train.optim
    if optim not in OPTIMIZERS_OF_SHARES:
        what = f"{optim} is not known to update a share of a weight as it does the whole, and {cited}"
        yield draft.problem("train.optim", what, f"choose {', '.join(OPTIMIZERS_OF_SHARES)}")
    if config.adapter.merge:
        what = f"the base is nowhere whole at the end of the run, and {cited}"
        yield draft.problem("adapter.merge", what, "set adapter.merge: false, and merge the saved adapter with PEFT")
    initial = config.adapter.init_lora_weights
    if isinstance(initial, str) and initial.startswith(("pissa", "olora")):  # others are refused with their rows
        what = f"{initial} moves a part of the base into the adapter, to be taken out of whole weights, and {cited}"
        yield draft.problem("adapter.init_lora_weights", what, "set adapter.init_lora_weights: true")


ConflictCheck = Callable[[Draft], Iterator[Problem]]

# formats whose rows cannot say themselves what is learned of them
_SILENT_FORMATS: frozenset[str] = frozenset({Format.ALPACA, Format.PROMPT_COMPLETION})
MOST_REPEATS = 10_000  # of a row in an epoch: each is planned, and more is meant as a share, or a slip of the pen
_SCHEDULE_NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}


def check_conflicts(draft: Draft) -> list[Problem]:
    """All problems between keys that hold sound values."""
    return [problem for keys, check in _RULES if draft.sound(*keys) for problem in check(draft)]


def _new_tokens(draft: Draft) -> Iterator[Problem]:
    model = draft.config.model
    added = {*model.add_tokens, *model.add_special_tokens}
    for token in model.token_descriptions:
        if token not in added:
            what = f"{token} is described, and neither model.add_tokens nor model.add_special_tokens adds it"
            yield draft.problem(f"model.token_descriptions.{token}", what, "add it, or remove its description")
    for token in model.add_special_tokens:
        if token in model.add_tokens:
            what = f"{token} is to be a control token, and an ordinary one by {draft.cite('model.add_tokens')}"
            yield draft.problem("model.add_special_tokens", what, "name it in one of the two")
    if model.new_token_noise and not added:
        what = "no token is added whose row could have noise"
        yield draft.problem("model.new_token_noise", what, "add tokens by model.add_tokens, or remove the key")


def _training_data(draft: Draft) -> Iterator[Problem]:
    data = draft.config.data
    if not data.train and not data.use and draft.config.train.enabled:
        hint = "give data.train a file, or data.use a name from data.registry; for example data: {train: rows.jsonl}"
        yield draft.problem("data.train", "no training data is named: neither data.train nor data.use", hint)


def _registry(draft: Draft) -> Iterator[Problem]:
    data = draft.config.data
    for key, names in (("data.use", data.use), ("data.eval_use", data.eval_use)):
        if names and data.registry is None:
            what = "these are entries of a registry, and data.registry is not given"
            yield draft.problem(key, what, "add data.registry: dataset_info.json, or name files in data.train")
    if data.use_weights and len(data.use_weights) != len(data.use):
        what = (
            f"these are {counted(len(data.use_weights), 'weight')}, and {draft.cite('data.use')} "
            f"names {counted(len(data.use), 'data set')}"
        )
        yield draft.problem("data.use_weights", what, "write one weight for each, or remove the key")
    if data.registry is not None and not data.use and not data.eval_use:
        what = "neither data.use nor data.eval_use names an entry of it"
        yield draft.problem("data.registry", what, "add data.use: [NAME], or remove the registry")


def _eval_split(draft: Draft) -> Iterator[Problem]:
    data = draft.config.data
    if not data.eval_split:
        return
    for key, named in (("data.eval", data.eval), ("data.eval_use", data.eval_use)):
        if named:
            what = f"rows are held out ({data.eval_split:g}) although {draft.cite(key)} names eval data"
            yield draft.problem("data.eval_split", what, f"keep one: remove data.eval_split or {key}")


def _counted_rows(draft: Draft) -> Iterator[Problem]:
    for at, source in draft.sources:
        if source.max_rows is not None and "#" in source.path and source.path.rsplit("#", 1)[1].isdecimal():
            asked = counted(source.max_rows, "row is", "rows are")
            what = f"{asked} asked for, and {draft.cite(f'{at}.path')} says {source.path}"
            yield draft.problem(f"{at}.max_rows", what, "keep one of the two counts")


def _has_eval_data(draft: Draft) -> bool:
    data = draft.config.data
    return bool(data.eval or data.eval_use or data.eval_split)


def _needs_evaluation(draft: Draft) -> Iterator[Problem]:
    config = draft.config
    wanting = [
        ("eval.load_best_model_at_end", config.eval.load_best_model_at_end),
        ("eval.early_stopping_patience", config.eval.early_stopping_patience is not None),
        ("train.lr_scheduler_type", config.train.lr_scheduler_type in choices.FOLLOWS_MEASURE),
    ]
    for key in (key for key, wants in wanting if wants):
        if config.eval.strategy is choices.Strategy.NO:
            what = f"this needs evaluations, and {draft.cite('eval.strategy')} is no"
            yield draft.problem(key, what, "set eval.strategy: epoch or steps")
        if not _has_eval_data(draft):
            what = "this needs evaluations, and there is no eval data (data.eval, data.eval_use, data.eval_split)"
            yield draft.problem(key, what, "for example data.eval_split: 0.05")


def _generation(draft: Draft) -> Iterator[Problem]:
    config = draft.config
    if (url := config.judge.url) is not None:
        has_token = config.judge.token_env is not None
        yield from losses.server_faults(draft, "judge.url", url, "http://localhost:8000", with_token=has_token)
    if not config.eval.generate_rows:
        return
    if not _has_eval_data(draft):
        what = "answers are generated for held-out rows, and there is no eval data"
        yield draft.problem("eval.generate_rows", what, "for example data.eval_split: 0.05")
    if not config.objective.kind.has_head:
        what = f"a reward model answers nothing, and {draft.cite('objective.name')} is {config.objective.name}"
        yield draft.problem("eval.generate_rows", what, "remove it")
    if "judge" in config.eval.metrics and config.judge.url is None:
        yield draft.problem("eval.metrics", "judge is asked at judge.url, which is not set", "set judge.url")


_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


def _generating(draft: Draft) -> Iterator[Problem]:
    """Settings of a way to generate that is not the one chosen."""
    chosen = draft.config.generate
    if not chosen.do_sample:
        for name in (name for name in _OF_SAMPLING if getattr(chosen, name) is not None):
            what = f"only sampling reads it, and {draft.cite('generate.do_sample')} is false"
            yield draft.problem(f"generate.{name}", what, f"set generate.do_sample: true, or remove {name}")
    if chosen.num_beams == 1 and chosen.length_penalty is not None:
        what = f"only beams read it, and {draft.cite('generate.num_beams')} is 1"
        yield draft.problem("generate.length_penalty", what, "set generate.num_beams: 4, or remove length_penalty")


def _best_checkpoint(draft: Draft) -> Iterator[Problem]:
    evaluation, output = draft.config.eval, draft.config.output
    if not evaluation.load_best_model_at_end or evaluation.strategy is choices.Strategy.NO:
        return
    if output.save_strategy is not evaluation.strategy:
        what = (
            f"every evaluated model must be saved, but {draft.cite('eval.strategy')} is {evaluation.strategy} "
            f"and {draft.cite('output.save_strategy')} is {output.save_strategy}"
        )
        hint = f"set output.save_strategy: {evaluation.strategy}"
        yield draft.problem("eval.load_best_model_at_end", what, hint)
    elif evaluation.strategy is choices.Strategy.STEPS and not _is_multiple(output.save_steps, evaluation.steps):
        what = (
            f"every saved model must be evaluated, but {draft.cite('output.save_steps')} is {output.save_steps}, "
            f"no multiple of {draft.cite('eval.steps')}: {evaluation.steps}"
        )
        yield draft.problem("eval.load_best_model_at_end", what, f"set output.save_steps: {evaluation.steps}")


def _is_multiple(every: float, of: float) -> bool:
    """Of two numbers of steps, or two shares of them."""
    return (every < 1) is (of < 1) and round(every / of) >= 1 and abs(every / of - round(every / of)) < 1e-9


def _metric(draft: Draft) -> Iterator[Problem]:
    config = draft.config
    metric = config.eval.metric_for_best_model
    if not config.goes_by_metric:
        return  # it is not read then, which is told
    known = ("loss", "accuracy") if config.objective.kind.rows.is_compared else ("loss", "perplexity", "token_accuracy")
    if metric not in known:
        what = f"evaluation gives no {metric} where {draft.cite('objective.name')} is {config.objective.name}"
        yield draft.problem("eval.metric_for_best_model", what, f"choose {' or '.join(known)}")


def _padding(draft: Draft) -> Iterator[Problem]:
    config = draft.config
    longest = config.data.max_length * (2 if config.objective.kind.rows.is_compared else 1)  # two answers share a row
    if config.train.pad_to_multiple_of > longest:
        what = (
            f"every row would be filled up to {counted(config.train.pad_to_multiple_of, 'token')}, and with "
            f"{draft.cite('data.max_length')} none has more than {longest:,}"
        )
        yield draft.problem("train.pad_to_multiple_of", what, f"at most {config.data.max_length}; 64 is usual")


def _decay(draft: Draft) -> Iterator[Problem]:
    train = draft.config.train
    taken = train.weight_decay * train.learning_rate
    if taken >= 1:
        what = (
            f"each step takes weight decay x rate of every weight, {train.weight_decay:g} x {train.learning_rate:g} = "
            f"{taken:.3g} of it ({draft.cite('train.learning_rate')}): nothing is left"
        )
        yield draft.problem("train.weight_decay", what, "0.01 to 0.1 is usual")


def _half_weights(draft: Draft) -> Iterator[Problem]:
    """float16 has 11 bits: a weight of 1 changes by 1e-3 or not at all, and a loss scaler takes no such gradients."""
    kind, adapter = draft.config.model.dtype, draft.config.adapter.type
    if kind == "float16" and not adapter.is_beside:
        what = f"weights in float16 round most updates away, and {draft.cite('adapter.type')} is {adapter}"
        yield draft.problem("model.dtype", what, "set model.dtype: float32 or bfloat16, or adapter.type: lora")


def _step_size(draft: Draft) -> Iterator[Problem]:
    train = draft.config.train
    if train.tokens_per_step is not None and train.gradient_accumulation_steps != 1:
        what = (
            f"a step ends at {counted(train.tokens_per_step, 'token')}, and "
            f"{draft.cite('train.gradient_accumulation_steps')} "
            f"says it has {train.gradient_accumulation_steps} micro-batches"
        )
        yield draft.problem("train.tokens_per_step", what, "keep one: remove train.gradient_accumulation_steps")


def _whole_answers(draft: Draft) -> Iterator[Problem]:
    """What the model is asked ends where learning begins, and what it answers with its stop token."""
    template = draft.config.template
    if not draft.config.objective.kind.on_policy:
        return
    policies = [("template", template.train_on), *((at, source.train_on) for at, source in draft.sources)]
    for at in (at for at, policy in policies if policy is choices.TrainOn.ALL):
        what = "a question ends where learning begins, which would be where the row begins"
        yield draft.problem(f"{at}.train_on", what, "set it to assistant, or remove it")
    if not template.train_stop:
        what = "the model answers with its stop token, and rows whose answers lack it are not asked"
        yield draft.problem("template.train_stop", what, "remove it")


def _splitting(draft: Draft) -> Iterator[Problem]:
    name = draft.config.objective.name
    if draft.config.train.packing is choices.Packing.SPLIT and name != "pt":
        what = f"split cuts rows anywhere, which is for plain text, and {draft.cite('objective.name')} is {name}"
        yield draft.problem("train.packing", what, "set train.packing: best_fit, or objective: pt")


def _shortening(draft: Draft) -> Iterator[Problem]:
    """``data.overflow: keep_answer`` gives every answer a prompt of its own length."""
    template = draft.config.template
    if draft.config.data.overflow is not choices.Overflow.KEEP_ANSWER:
        return
    if template.history is choices.HistoryRendering.ONE_RENDERING:
        what = f"answers that are too long get shorter prompts, each its own, and {draft.cite('template.history')} is "
        what += "one_rendering, where all stand in one text"
        yield draft.problem("data.overflow", what, "set template.history: inference, or data.overflow: drop")


def _mixture(draft: Draft) -> Iterator[Problem]:
    mixture = draft.config.data.mixture
    if mixture.by is not choices.MixtureBy.EPOCHS:
        return
    wanting = [
        ("data.mixture.temperature", mixture.temperature is not None),
        ("data.mixture.stop", mixture.stop is not choices.MixtureStop.ALL),
    ]
    for key in (key for key, wants in wanting if wants):
        what = f"this is for mixtures by shares, and {draft.cite('data.mixture.by')} is epochs"
        yield draft.problem(key, what, f"set data.mixture.by: rows or tokens, or remove {key}")


def _weights(draft: Draft) -> Iterator[Problem]:
    if draft.config.data.mixture.by is not choices.MixtureBy.EPOCHS:
        return
    for index, source in enumerate(draft.config.data.train):
        if source.weight > MOST_REPEATS:
            what = f"each row would be seen {counted(source.weight, 'time')} in an epoch, {MOST_REPEATS:,} is the most"
            hint = (
                "train.num_train_epochs says how often all rows are seen; with data.mixture.by: rows weights are shares"
            )
            yield draft.problem(f"data.train[{index}].weight", what, hint)


def _schedule(draft: Draft) -> Iterator[Problem]:
    train = draft.config.train
    needs = _SCHEDULE_NEEDS.get(train.lr_scheduler_type, ())
    if needs and not any(name in train.lr_scheduler_kwargs for name in needs):
        names = " or ".join(needs)
        what = f"{train.lr_scheduler_type} needs {names} in {draft.cite('train.lr_scheduler_kwargs')}"
        example = "{num_decay_steps: 100}" if "num_decay_steps" in needs else "{min_lr_rate: 0.1}"
        yield draft.problem("train.lr_scheduler_type", what, f"for example lr_scheduler_kwargs: {example}")
    rate = draft.cite("train.learning_rate")
    kwargs = {key: value for key, value in train.lr_scheduler_kwargs.items() if isinstance(value, int | float)}
    lowest = kwargs.get("min_lr", kwargs.get("min_lr_rate", 0.0) * train.learning_rate)
    if lowest > train.learning_rate:
        what = f"the schedule would end at a rate of {lowest:g}, higher than {rate}, {train.learning_rate:g}"
        yield draft.problem("train.lr_scheduler_kwargs", what, "min_lr_rate: 0.1 ends at a tenth of the rate")
    decay = kwargs.get("num_decay_steps", 0)
    if "num_decay_steps" in needs and train.max_steps is not None and decay > train.max_steps:
        what = f"the rate falls over {counted(decay, 'step')}, and {draft.cite('train.max_steps')} is {train.max_steps}"
        yield draft.problem("train.lr_scheduler_kwargs", what, f"at most num_decay_steps: {train.max_steps}")


def _optimizer(draft: Draft) -> Iterator[Problem]:
    train, adapter = draft.config.train, draft.config.adapter
    row, cited = OPTIMIZERS[train.optim], f"{draft.cite('train.optim')} is {train.optim}"
    for name, what, hint in row.faults(train.optim_args):
        yield draft.problem(f"train.optim_args.{name}", what, hint)
    if row.whole_weights and adapter.type.is_beside:
        kind = draft.cite("adapter.type")
        what = f"{train.optim} is made for whole weights, and {kind} trains small matrices beside them"
        yield draft.problem("train.optim", what, "set train.optim: adamw_torch, or adapter.type: full")
    if not row.in_backward:
        return
    several = f"{cited}, which changes weights in each backward pass: a step of several would be several steps"
    if train.gradient_accumulation_steps > 1:
        hint = "set train.gradient_accumulation_steps: 1 and a larger train.per_device_train_batch_size"
        yield draft.problem("train.gradient_accumulation_steps", several, hint)
    if train.tokens_per_step is not None:
        hint = "remove it, and set train.per_device_train_batch_size"
        yield draft.problem("train.tokens_per_step", several, hint)
    if train.precision is choices.Precision.FP16:
        what = f"fp16 scales the loss and looks at all gradients before a step, and {cited}, which keeps none of them"
        yield draft.problem("train.precision", what, "set train.precision: bf16 or fp32")


def _offload(draft: Draft) -> Iterator[Problem]:
    train, row = draft.config.train, OPTIMIZERS[draft.config.train.optim]
    if not train.offload:
        return
    key, cited = "train.offload", f"{draft.cite('train.optim')} is {row.name}"
    if draft.config.runtime.sharding is not choices.Sharding.NONE:
        sharded = (
            f"{draft.cite('runtime.sharding')} is {draft.config.runtime.sharding}, which divides the states instead"
        )
        yield draft.problem(key, sharded, "keep one: remove train.offload, or set runtime.sharding: none")
    if choices.Offload.OPTIMIZER in train.offload and not row.offloads:
        names = ", ".join(name for name, each in OPTIMIZERS.items() if each.offloads)
        yield draft.problem(key, f"{cited}, whose states and updates stay where the weights are", f"choose {names}")
    if choices.Offload.OPTIMIZER in train.offload and train.precision is choices.Precision.FP16:
        what = f"{draft.cite('train.precision')} is fp16, whose loss scaler wants optimizer and weights on one device"
        yield draft.problem(key, what, "set train.precision: bf16")
    if choices.Offload.ACTIVATIONS in train.offload:
        recomputed = f"{draft.cite('train.gradient_checkpointing')} is true: activations are computed again, not kept"
        if train.gradient_checkpointing:
            yield draft.problem(key, recomputed, "keep one of the two")
        if train.torch_compile:
            what = f"{draft.cite('train.torch_compile')} is true, and compiled layers keep activations by themselves"
            yield draft.problem(key, what, "keep one of the two")


def _on_cpu(draft: Draft) -> Iterator[Problem]:
    if draft.config.runtime.device == "cpu":
        yield from without_gpu(draft, f"{draft.cite('runtime.device')} is cpu")


def without_gpu(draft: Draft, why: str) -> Iterator[Problem]:
    """What cannot be done without a GPU; ``why`` there is none."""
    config = draft.config
    if config.train.precision is choices.Precision.FP16:
        what = f"fp16 needs a GPU, and {why}"
        yield draft.problem("train.precision", what, "set train.precision: auto, bf16 or fp32")
    attention = str(config.model.attn_implementation)
    if attention.startswith(("flash_attention", "flex_attention")):
        what = f"{attention} needs a GPU, and {why}"
        yield draft.problem("model.attn_implementation", what, "set model.attn_implementation: auto")
    if config.model.use_liger_kernel is True:
        what = f"Liger's kernels need a GPU, and {why}"
        yield draft.problem("model.use_liger_kernel", what, "set model.use_liger_kernel: auto")
    if str(config.train.optim).startswith("paged_"):
        what = f"{config.train.optim} pages memory of a GPU, and {why}"
        yield draft.problem("train.optim", what, "set train.optim: adamw_torch")


def _resumption(draft: Draft) -> Iterator[Problem]:
    output = draft.config.output
    if output.resume in ("auto", "never"):
        return
    if output.overwrite:
        what = f"start anew, and go on from {output.resume}: {draft.cite('output.resume')} says the opposite"
        yield draft.problem("output.overwrite", what, "set output.overwrite: false, or output.resume: never")
    if output.save_only_model:
        what = f"{draft.cite('output.resume')} goes on from a checkpoint, and this run's own would not do for that"
        yield draft.problem(
            "output.save_only_model", what, "set output.save_only_model: false, or output.resume: never"
        )


def _something_to_learn(draft: Draft) -> Iterator[Problem]:
    data, template = draft.config.data, draft.config.template
    if template.train_on is not choices.TrainOn.NONE or data.use or draft.config.objective.name == "pt":
        return
    if any(rule.train for rule in template.targets):
        return
    if data.train and not any(_may_teach(source) for source in data.train):
        what = "nothing is learned: no source has a train_on of its own, and its format has no train flags in rows"
        yield draft.problem("template.train_on", what, "set template.train_on: assistant")


def _may_teach(source: SourceConfig) -> bool:
    if any(rule.train for rule in source.targets):
        return True
    if source.train_on is None:
        return source.format not in _SILENT_FORMATS
    return source.train_on is not choices.TrainOn.NONE


def _thinking(draft: Draft) -> Iterator[Problem]:
    for at, source in draft.sources:
        if source.thinking is choices.ThinkingStyle.TEXT and draft.given(f"{at}.thinking_tags"):
            what = f"tags are given, and {draft.cite(f'{at}.thinking')} leaves them in the text"
            yield draft.problem(f"{at}.thinking_tags", what, "set thinking: tags, or remove the tags")


def _media(draft: Draft) -> Iterator[Problem]:
    media = draft.config.media
    for low, least, high, most in (
        ("min_pixels", media.min_pixels, "max_pixels", media.max_pixels),
        ("video_min_pixels", media.video_min_pixels, "video_max_pixels", media.video_max_pixels),
        ("min_audio_seconds", media.min_audio_seconds, "max_audio_seconds", media.max_audio_seconds),
    ):
        if least is not None and most is not None and least > most:
            what = f"at least {least:.15g}, and {draft.cite(f'media.{high}')} says at most {most:.15g}"
            yield draft.problem(f"media.{low}", what, f"at most {most:.15g}, or raise media.{high}")


_RULES: tuple[tuple[tuple[str, ...], ConflictCheck], ...] = (
    (("model",), _new_tokens),
    (("data.train", "data.use"), _training_data),
    (("data.registry", "data.use", "data.eval_use", "data.use_weights"), _registry),
    (("data.eval_split", "data.eval", "data.eval_use"), _eval_split),
    (("data.train", "data.eval"), _counted_rows),
    (("data.eval", "data.eval_use", "data.eval_split", "eval", "train.lr_scheduler_type"), _needs_evaluation),
    (("data.eval", "data.eval_use", "data.eval_split", "eval.generate_rows", "objective.name", "judge"), _generation),
    (("generate",), _generating),
    (("eval", "output.save_strategy", "output.save_steps"), _best_checkpoint),
    (("eval", "objective.name"), _metric),
    (("train.pad_to_multiple_of", "data.max_length", "objective.name"), _padding),
    (("train.weight_decay", "train.learning_rate"), _decay),
    (("model.dtype", "adapter.type"), _half_weights),
    (("train.tokens_per_step", "train.gradient_accumulation_steps"), _step_size),
    (("train.packing", "objective.name"), _splitting),
    (("template", "data.train", "data.eval", "objective.name"), _whole_answers),
    (("data.overflow", "template.history"), _shortening),
    (("data.mixture",), _mixture),
    (("data.mixture", "data.train"), _weights),
    (("train.lr_scheduler_type", "train.lr_scheduler_kwargs", "train.learning_rate", "train.max_steps"), _schedule),
    (("train", "adapter.type"), _optimizer),
    (("train", "adapter", "model"), check_blocks),
    (("train", "runtime.sharding"), _offload),
    (("runtime.device", "train.precision", "train.optim", "model"), _on_cpu),
    (("output.resume", "output.overwrite", "output.save_only_model"), _resumption),
    (("data.train", "data.use", "template.train_on", "template.targets", "objective.name"), _something_to_learn),
    (("data.train", "data.eval"), _thinking),
    (("media",), _media),
    (("data.train", "data.eval", "objective.name"), losses.check_rows),
    (("objective", "adapter.type"), losses.check_objective),
    (("model.quantization", "objective.reference.quantization"), check_quantization),
    (("objective", "train.packing", "data.overflow", "data.prepare"), losses.check_compared),
    (
        ("objective", "train.shared_prompts", "train.packing", "model.attn_implementation", "template.history"),
        losses.check_shared,
    ),
    (("train.head_kernel", "runtime.device", "objective"), losses.check_head_kernel),
    (("adapter", "model.quantization", "data.prepare", "runtime.sharding"), check_adapter),
    (("runtime.sharding", "train.torch_compile", "train.precision", "train.optim", "adapter"), check_sharding),
    (("objective", "rollout", "train", "runtime.sharding"), losses.check_rollouts),
    (("media.cache", "adapter", "data.prepare", "objective"), check_features),
)
