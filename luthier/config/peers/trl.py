"""A file of TRL's command line (``trl sft|dpo|kto|reward|grpo|rloo --config FILE``) -> the tree of a run description.

Most keys are lines of ``trl.toml``. The functions here are for what several keys decide together. Such a file does not
name its command: that follows from its keys, or from the columns of local rows, or is asked for, and never guessed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from luthier.config import MappingNode, num_processes, plain
from luthier.config.objective import losses_of
from luthier.config.peers import (
    DEFAULTS,
    RLOO_DEFAULTS,
    DrawnAnswers,
    config_of,
    mapping_beside,
    objective_said,
    read_metric,
    read_sharing,
    read_trackers,
    translation,
    trl_rows,
)
from luthier.writing import JsonObject, counted

_COMMANDS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "rm"}  # TRL's command -> objective.name
_DRAWN = ("grpo", "rloo")  # its commands that learn from answers drawn in the run
_FOREIGN = frozenset(
    {"base_model", "dataset", "template", "stage", "finetuning_type", "cutoff_len"}
)  # keys of other tools
_KINDS = {"messages": ("sft",), "text": ("sft",), "prompt_completion": ("sft",), "feedback": ("kto",),
          "preference": ("dpo", "kto", "reward")}  # fmt: skip


def _is_its(tree: MappingNode) -> bool:
    """True if the tree names data sets as TRL does, and has no key that marks another tool."""
    keys = set(tree.entries)
    named = "dataset_name" in keys or {"model_name_or_path", "datasets"} <= keys
    return named and not keys & (_FOREIGN | translation.OUR_SECTIONS)


# ------------------------------------------------------------------ which of TRL's commands a file is for


def _keys(reading: translation.Translator) -> None:
    """A model, which TRL's commands need as well."""
    if reading.entries.get("model_name_or_path") is None:
        reading.stop("model_name_or_path", "no model is named", "add model_name_or_path=NAME to the command")


def _command(reading: translation.Translator) -> None:
    """Find the command; a file that could be for several is asked about."""
    said = objective_said(reading)
    drawn = _drawn_command(reading, None if said is None else str(said))
    if reading.is_no_run:
        return
    if drawn is not None:
        reading.fill_in("defaults")
        reading.fill_in("defaults", "rl")
        if "max_length" in reading.defaults:  # these commands have no such key
            reading.entries.pop("max_length")
        reading.set("objective.name", "rl", "objective.name")
        reading.set("objective.loss", drawn, "objective.name")
        return
    command = _inferred(reading) if said is None else _checked(reading, str(said))
    if command is None:
        reading.is_no_run = True
        return
    reading.fill_in("defaults")
    reading.fill_in("defaults", command)
    reading.set("objective.name", "pt" if said == "pt" else _COMMANDS[command], "objective.name")


def _drawn_command(reading: translation.Translator, said: str | None) -> str | None:
    """``grpo`` or ``rloo``, for a file of these commands; None for one of the others."""
    table = reading.peer.table
    shared = {key for keys in (*table["commands"].values(), *table["passed"].values()) for key in keys}
    marks = {
        commands: key for commands, keys in table["on_policy"].items()
        for key in keys if key not in shared and key in reading.entries and plain(reading.entries[key]) is not None
    }  # fmt: skip
    for command in ("ppo", "distillation"):
        if command in marks:
            what = f"this file is for trl {command}, which learns from answers drawn in the run, and is not translated"
            reading.stop(marks[command], what, "write it as a run description of Luthier's (docs/rl.md)")
            return None
    if said is not None and said not in ("rl", *_DRAWN):
        if marks and said in (*_COMMANDS, *_COMMANDS.values(), "pt"):
            key = next(iter(marks.values()))
            reading.stop(key, f"trl {said} has no such key, it is one of trl grpo", "set objective.name=grpo")
        return None
    named = [command for command in _DRAWN if command in marks or said == command]
    named += ["grpo"] if not named and marks and "loss_type" in reading.entries else []
    if len(named) == 1 or (not marks and said is None):
        return next(iter(named), None)
    reading.stop("objective.name", "this file could be for trl grpo or trl rloo: it does not say which",
                 "add objective.name=grpo or objective.name=rloo to the command")  # fmt: skip
    return None


def _checked(reading: translation.Translator, said: str) -> str | None:
    """The command that an override names; None, and a problem, where it cannot be that one."""
    command = {"pt": "sft", "rm": "reward"}.get(said, said)
    if command not in _COMMANDS:
        what = f"{said} is no objective of a file of TRL's"
        reading.stop("objective.name", what, "write sft, dpo, kto, rm, grpo or rloo")
        return None
    for key, commands in _owners(reading).items():
        if command not in commands:
            what = f"trl {command} has no such key, it is one of {_all_of(commands)}"
            reading.stop(key, what, f"remove the line, or set objective.name={_COMMANDS[commands[0]]}")
    return command if not reading.is_no_run else None


def _inferred(reading: translation.Translator) -> str | None:
    """The command that the keys and the rows leave, if they leave one; else it is asked for."""
    left = tuple(_COMMANDS)
    before = ""
    for key, commands in _owners(reading).items():
        both = tuple(command for command in left if command in commands)
        if not both:
            what = f"this is a key of {_all_of(commands)}, and {before} is none of it"
            reading.refuse(key, what, "keep the keys of one command")
            return None
        left, before = both, key if both != left else before
    rows = trl_rows.first_rows(reading)
    if len(left) > 1 and rows is not None and rows.kind is not None:
        left = tuple(command for command in left if command in _KINDS[str(rows.kind)]) or left
        if len(left) == 1:
            reading.told.append(
                f"objective.name: {_COMMANDS[left[0]]}, as the rows have {', '.join(sorted(rows.names))}"
            )
    if len(left) == 1:
        return left[0]
    names = " or ".join(f"objective.name={_COMMANDS[command]}" for command in left)
    reading.refuse("objective.name", f"this file could be for {_all_of(left)}: it does not say what is to be learned",
                   f"add {names} to the command")  # fmt: skip
    return None


def _all_of(commands: tuple[str, ...]) -> str:
    return " or ".join(f"trl {command}" for command in commands)


def _owners(reading: translation.Translator) -> Mapping[str, tuple[str, ...]]:
    """Keys of the file that only some commands have -> those commands."""
    table = reading.peer.table["commands"]
    of_key = {key: tuple(commands.split()) for commands, keys in table.items() for key in keys}
    owners = {key: of_key[key] for key, node in reading.entries.items() if key in of_key and plain(node) is not None}
    if "loss_type" in owners and (named := _of_loss(reading)):
        owners["loss_type"] = named
    if "lora_task_type" in reading.entries and plain(reading.entries["lora_task_type"]) == "SEQ_CLS":
        owners["lora_task_type"] = ("reward",)
    return owners


def _of_loss(reading: translation.Translator) -> tuple[str, ...]:
    names = {name.removeprefix("chunked_") for name in translation.names_of(plain(reading.entries["loss_type"]))}
    known = {
        command: {*losses_of(_COMMANDS[command]), *({"nll"} if command == "sft" else {"sft"})} for command in _COMMANDS
    }
    return tuple(command for command in ("sft", "dpo", "kto") if names <= known[command])


# ------------------------------------------------------------------ what is minimised


def _losses(reading: translation.Translator) -> None:
    objective = trl_rows.objective_of(reading)
    smooth = reading.take("label_smoothing_factor")
    if objective in ("sft", "pt"):
        loss = str(reading.take("loss_type") or "nll")
        if loss not in ("nll", "chunked_nll"):
            reading.set("objective.loss", loss, "loss_type")
        if smooth:
            reading.set("objective.label_smoothing", smooth, "label_smoothing_factor")
    elif objective == "kto":
        reading.copy("objective.loss", "loss_type", str)
        if reading.flag("precompute_ref_log_probs"):
            reading.passed["precompute_ref_log_probs"] = "KTO's reference answers other rows in each epoch"
    elif objective == "dpo":
        _dpo(reading)
    elif objective == "rl":
        _answers(reading)
    if smooth and objective not in ("sft", "pt"):
        reading.passed["label_smoothing_factor"] = "TRL reads it for trl sft alone"
    reading.switch("train.head_kernel", "liger", "use_liger_loss")
    disabled = reading.take("disable_dropout")
    if objective not in ("sft", "pt") and disabled in (None, True) and reading.flag("use_peft"):
        reading.set("adapter.lora_dropout", 0.0, "disable_dropout")
        reading.take("lora_dropout")


def _answers(reading: translation.Translator) -> None:
    """Settings of ``trl grpo`` and ``rloo``, where rows of a batch are answers."""
    table, found = reading.peer.table["on_policy"], plain(reading.tree)
    is_rloo = isinstance(found, dict) and found["objective"]["loss"] == "rloo"
    keys = {*table["grpo rloo"], *table["grpo"], *table["rloo"], *DEFAULTS, "sync_ref_model"}
    given = {key: reading.take(key) for key in reading.entries if key in keys}
    rows = reading.take("per_device_train_batch_size"), reading.take("gradient_accumulation_steps") or 1
    reading.read.discard("per_device_train_batch_size")
    rows_first = trl_rows.first_rows(reading)
    DrawnAnswers(
        reading=reading, given=given, at=str, rows=rows, rows_key="per_device_train_batch_size", is_rloo=is_rloo,
        plain=rows_first is not None and "prompt" in rows_first.texts,
        defaults=RLOO_DEFAULTS if is_rloo else DEFAULTS,
    ).read()  # fmt: skip
    reading.read |= {"precompute_ref_log_probs", "max_prompt_length"}


def _dpo(reading: translation.Translator) -> None:
    if (loss := mixed_losses(reading)) is not None:
        _divergence(reading, loss)
        reading.switch("objective.reference.source", "precomputed", "precompute_ref_log_probs")
        reading.switch("objective.reference.source", "none", "reference_free")


_SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")


def mixed_losses(
    reading: translation.Translator, of: str = "loss_type", weights_of: str = "loss_weights"
) -> str | None:
    """Set the loss of DPO, or the mix that Luthier has of several, as these keys say; None where that is refused."""
    names, given = translation.names_of(reading.take(of) or "sigmoid"), reading.take(weights_of)
    try:
        weights = [float(weight) for weight in translation.names_of(given)] if given else [1.0] * len(names)
    except ValueError:
        weights = []
    if len(weights) != len(names):
        reading.refuse(weights_of, f"{of} has {counted(len(names), 'loss', 'losses')}, and these are "
                       f"{counted(len(weights), 'weight')}", "give one number for each loss")  # fmt: skip
        return None
    mixed = dict(zip(names, weights, strict=True))
    of_answer = mixed.pop("sft", None)
    total = sum(mixed.values())
    if set(mixed) == {"sigmoid", "bco_pair"} and total > 0:
        reading.set("objective.loss", "mpo", of)
        reading.set("objective.bco_share", mixed["bco_pair"] / total, weights_of)
        reading.set("objective.sft_weight", (of_answer or 0.0) / total, weights_of)
    elif len(mixed) == 1 and total > 0:
        (loss,) = mixed
        reading.set("objective.loss", loss, of)
        if of_answer is not None:
            reading.set("objective.sft_weight", of_answer / total, weights_of)
    else:
        reading.refuse(of, f"{', '.join(names)} are not mixed",
                       "choose one loss, with sft beside it or not, or sigmoid, bco_pair and sft")  # fmt: skip
        return None
    if total != 1:
        most = reading.take("max_grad_norm")
        reading.set("train.max_grad_norm", (1.0 if most is None else most) / total, weights_of)
        reading.told.append(f"{weights_of}: the whole loss, and max_grad_norm with it, is divided by {total:g}, "
                            "which leaves Adam's steps as they are")  # fmt: skip
    return next(iter(mixed)) if len(mixed) == 1 else "mpo"


def _divergence(reading: translation.Translator, loss: str) -> None:
    """Settings of DPO that are losses of their own here, and numbers that this loss alone reads."""
    kind, alpha = str(reading.take("f_divergence_type") or "reverse_kl"), reading.take("f_alpha_divergence_coef")
    if kind != "reverse_kl" and loss == "sigmoid":
        reading.set("objective.loss", kind, "f_divergence_type")
        if kind == "alpha_divergence" and alpha is not None:
            reading.set("objective.divergence_alpha", alpha, "f_alpha_divergence_coef")
    elif kind != "reverse_kl":
        reading.refuse("f_divergence_type", f"{kind} goes with loss_type: sigmoid, not with {loss}", "keep one of them")
    if reading.flag("use_weighting"):
        if loss == "sigmoid" and kind == "reverse_kl":
            reading.set("objective.loss", "wpo", "use_weighting")
        else:
            reading.refuse("use_weighting", f"it goes with loss_type: sigmoid, not with {loss}", "keep one of them")
    smooth_pairs(reading, "label_smoothing", loss)
    if (tau := reading.take("discopop_tau")) is not None and loss == "discopop":
        reading.set("objective.discopop_tau", tau, "discopop_tau")


def smooth_pairs(reading: translation.Translator, key: str, loss: str) -> None:
    """``label_smoothing``, which TRL's DPO reads for some losses alone."""
    share = reading.take(key)
    if loss in _SMOOTHED and share:
        reading.set("objective.label_smoothing", share, key)
    elif share:
        reading.told.append(f"{key}: TRL since 0.29 computes {loss} without it, and so does this run; "
                            f"objective.label_smoothing={share} smooths sigmoid")  # fmt: skip


# ------------------------------------------------------------------ the model


def _model(reading: translation.Translator) -> None:
    """Weights, attention and quantization; ``model_init_kwargs`` wins over the keys beside it, as in TRL."""
    trl_rows.train_all_parts(reading, "model_name_or_path")
    inside = _mapping(reading, "model_init_kwargs")
    of = dict.fromkeys(inside, "model_init_kwargs")
    dtype = inside.pop("dtype", inside.pop("torch_dtype", reading.take("dtype")))
    if dtype is not None:
        reading.set("model.dtype", str(dtype).removeprefix("torch."), of.get("dtype", of.get("torch_dtype", "dtype")))
    revision = inside.pop("revision", reading.take("model_revision"))
    if revision is not None:
        reading.set("model.revision", str(revision), of.get("revision", "model_revision"))
    attention = inside.pop("attn_implementation", reading.take("attn_implementation"))
    if attention is not None:
        key = of.get("attn_implementation", "attn_implementation")
        if "/" in str(attention):
            reading.told.append(
                f"attn_implementation: {attention} is a kernel of the Hub's; Luthier takes its own (auto)"
            )
        else:
            reading.set("model.attn_implementation", str(attention), key)
    if inside.pop("trust_remote_code", False):
        reading.set("model.trust_remote_code", True, "model_init_kwargs")
    for key in ("use_cache", "device_map", "low_cpu_mem_usage", "use_kernels"):
        inside.pop(key, None)
    if inside:
        reading.set("model.config_overrides", inside, "model_init_kwargs")
    in_4bit, in_8bit = reading.flag("load_in_4bit"), reading.flag("load_in_8bit")
    kind, double = str(reading.take("bnb_4bit_quant_type") or "nf4"), reading.flag("use_bnb_nested_quant")
    computed = reading.take("bnb_4bit_compute_dtype") or dtype
    reading.origins["model.quantization"] = "load_in_4bit" if in_4bit else "load_in_8bit"
    if in_4bit:
        reading.set("model.quantization.type", kind, "load_in_4bit")
        reading.set("model.quantization.double_quantization", double, "use_bnb_nested_quant")
        if computed in ("float32", "bfloat16", "float16"):
            reading.set("model.quantization.compute_dtype", computed, "dtype")
    elif in_8bit:
        reading.set("model.quantization.type", "int8", "load_in_8bit")


def _mapping(reading: translation.Translator, key: str) -> JsonObject:
    """A mapping, or the JSON text of one, as TRL takes both."""
    value = reading.take(key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            reading.refuse(key, f"this is not JSON: {error}", "write a mapping")
            return {}
    if value is not None and not isinstance(value, dict):
        reading.refuse(key, "this is no mapping", f"for example {key}: {{name: value}}")
    return dict(value) if isinstance(value, dict) else {}


def _adapter(reading: translation.Translator) -> None:
    keys = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters",
            "lora_modules_to_save", "use_rslora", "use_dora")  # fmt: skip
    if not reading.flag("use_peft"):
        reading.set("adapter.type", "full", "use_peft")
        reading.pass_over(keys, "use_peft is false")
        return
    reading.fill_in("defaults", "lora")
    reading.set("adapter.type", "lora", "use_peft")
    targets = reading.take("lora_target_modules")
    if targets is None:
        model_type = str(config_of(str(plain(reading.entries["model_name_or_path"]))).get("model_type"))
        table: Mapping[str, list[str]] = reading.peer.table["peft_targets"]
        targets = next((names for names, kinds in table.items() if model_type in kinds), "q_proj v_proj").split()
        reading.told.append(
            f"lora_target_modules: {', '.join(targets)}, PEFT's choice where none is named; all-linear learns more"
        )
    reading.set("adapter.target_modules", translation.names_of(targets), "lora_target_modules")
    reading.read.discard("lora_target_parameters")
    reading.copy("adapter.modules_to_save", "lora_modules_to_save", translation.names_of)
    if "adapter.lora_dropout" not in reading.origins:
        reading.set("adapter.lora_dropout", reading.take("lora_dropout"), "lora_dropout")


# ------------------------------------------------------------------ the run


def _memory(reading: translation.Translator) -> None:
    if reading.take("bf16") is False and not reading.flag("fp16"):
        reading.set("train.precision", "fp32", "bf16")
    for key in ("fp16", "bf16"):
        reading.switch("train.precision", key, key)
    renamed, recomputes = reading.take("activation_checkpointing"), reading.flag("gradient_checkpointing")
    of = "gradient_checkpointing" if renamed is None else "activation_checkpointing"
    recomputes = recomputes if renamed is None else reading.flag(of)
    reading.set("train.gradient_checkpointing", recomputes, of)
    if reading.flag("activation_offloading"):
        if recomputes:
            reading.told.append(
                "activation_offloading: activations are computed again, as gradient_checkpointing says, and none kept"
            )
        else:
            reading.set("train.offload", ["activations"], "activation_offloading")


def _schedule(reading: translation.Translator) -> None:
    if settings := _mapping(reading, "lr_scheduler_kwargs"):
        reading.set("train.lr_scheduler_kwargs", settings, "lr_scheduler_kwargs")
    share, steps = reading.take("warmup_ratio"), reading.take("warmup_steps")
    of = "warmup_ratio" if share and not steps else "warmup_steps"
    reading.set("train.warmup_steps", share if of == "warmup_ratio" else steps, of)
    every = reading.take("logging_steps")
    if isinstance(every, float) and 0 < every < 1:
        reading.told.append(
            f"logging_steps: a share of all steps, {every}, is no number of steps here; losses are told every 10"
        )
        every = 10
    reading.set("tracking.logging_steps", every, "logging_steps")


def _devices(reading: translation.Translator) -> None:
    """How several processes share the model. Luthier is started by torchrun, which says how many there are."""
    if (launch := reading.take("accelerate_config")) is not None:
        reading.set("runtime.sharding", "fsdp" if _shares(reading, launch) else "none", "accelerate_config")
    read_sharing(reading)
    processes, started = reading.take("num_processes"), num_processes()
    if processes is not None and str(processes) != str(started):
        reading.told.append(f"num_processes: this is {started} of {processes}; start them all by torchrun "
                            f" --nproc-per-node {processes} -m luthier train {reading.name}")  # fmt: skip
    reading.copy("runtime.rank_timeout", "ddp_timeout")


def _shares(reading: translation.Translator, launch: object) -> bool:
    """Whether a profile of accelerate's, or a file of it, gives each process a share of the model."""
    known = {"fsdp1": True, "fsdp2": True, "zero1": True, "zero2": True, "zero3": True}
    profile = {**known, "multi_gpu": False, "single_gpu": False}.get(str(launch))
    if profile is not None:
        return profile
    settings = mapping_beside(reading, "accelerate_config", launch)
    zero = settings.get("deepspeed_config")
    divides = isinstance(zero, dict) and bool(zero.get("zero_stage"))
    return divides or str(settings.get("distributed_type")).upper() == "FSDP"


def _folder(reading: translation.Translator) -> None:
    start = reading.take("resume_from_checkpoint")
    is_asked = start in (True, "true", "True")
    value = "auto" if is_asked else "never" if start in (None, False, "false", "False") else str(start)
    reading.set("output.resume", value, "resume_from_checkpoint")
    reading.set("output.dir", str(reading.take("output_dir")), "output_dir")
    reading.set("output.save_total_limit", reading.take("save_total_limit"), "save_total_limit")
    read_trackers(reading)
    variables = _mapping(reading, "env")
    unset = {name: value for name, value in variables.items() if os.environ.get(str(name)) != str(value)}
    if unset:
        said = " ".join(f"{name}={value}" for name, value in unset.items())
        reading.told.append(f"env: variables of the environment are not set by a file; write {said} before the command")


def _evaluation(reading: translation.Translator) -> None:
    steps, size = reading.take("eval_steps"), reading.take("per_device_eval_batch_size")
    if not trl_rows.evaluates(reading):
        if "data.eval_split" in reading.origins:
            reading.set("eval.strategy", "no", "eval_strategy")
        reading.pass_over(("eval_steps", "per_device_eval_batch_size", "metric_for_best_model"), "eval_strategy is no")
        return
    when = str(reading.take("eval_strategy"))
    reading.set("eval.strategy", when, "eval_strategy")
    reading.set("eval.per_device_eval_batch_size", size, "per_device_eval_batch_size")
    if when == "steps":
        logged = reading.entries["logging_steps"]
        reading.set("eval.steps", steps or plain(logged), "eval_steps" if steps else "logging_steps")
    read_metric(reading, {"mean_token_accuracy": "token_accuracy", "rewards/accuracies": "accuracy"})


TRL = translation.Peer(
    name="TRL",
    file="trl.toml",
    is_its=_is_its,
    rules=(_keys, _command, trl_rows.read_data, trl_rows.read_lessons, _losses, _model, _adapter, _memory, _schedule,
           _devices, _folder, _evaluation),
)  # fmt: skip
