"""A file of ms-swift's (``swift sft|pt|rlhf FILE``, YAML or JSON) -> the tree of a run description.

Most keys are lines of ``swift.toml``. The functions here are for what several keys decide together. Such a file does
not name its command: with ``rlhf_type`` it is for ``swift rlhf``, else for ``swift sft``, unless the command line has
``objective.name=pt``.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from luthier.config import MappingNode, num_processes
from luthier.config.peers import (
    SWIFT_DEFAULTS,
    DrawnAnswers,
    objective_said,
    read_metric,
    read_trackers,
    share_as_deepspeed,
    translation,
)
from luthier.config.peers.swift_rows import kind_of, read_data, read_lengths, read_template
from luthier.config.peers.trl import mixed_losses
from luthier.writing import counted

_MARKS = frozenset({
    "train_type", "tuner_type", "rlhf_type", "lora_rank", "torch_dtype", "attn_impl", "split_dataset_ratio",
    "loss_scale", "truncation_strategy", "dataset_num_proc", "per_device_train_batch_size", "target_modules",
    "freeze_vit", "use_hf", "model_author", "val_dataset",
})  # fmt: skip
_PAIRS = {"dpo": "sigmoid", "orpo": "orpo", "simpo": "simpo", "cpo": "cpo"}
_BY_DEFAULT = {None: ["cross_entropy"], "simpo": ["simpo"], "cpo": ["sigmoid"]}  # of loss_type
_FROZEN = {  # what it freezes, and whether it does so by default
    "freeze_llm": ("language_model", False),
    "freeze_aligner": ("projector", True),
    "freeze_vit": ("tower", True),
}
_OF_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "modules_to_save", "use_rslora", "use_dora")
_OF_A_NEW_ONE = (*_OF_LORA, "target_modules", "target_regex", "target_parameters", "init_weights", "vera_rank",
                 "vera_dropout")  # fmt: skip
_OF_ANSWERS = "it belongs to answers that are drawn in the run (rlhf_type: grpo, ppo, gkd)"
_TRLS = {  # of answers that are drawn: its keys, TRL's
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "temperature": "temperature",
    "overlong_filter": "mask_truncated_completions",
    "beta": "beta",
    "loss_type": "loss_type",
    "max_completion_length": "max_completion_length",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
}
_NOT_DRAWN: tuple[tuple[str, object, str], ...] = (
    ("advantage_estimator", "grpo", "advantages are those of GRPO; objective.loss: rloo or reinforce_pp has others"),
    ("kl_in_reward", False, "KL stands beside the loss, and not in the reward"),
    ("multi_turn_scheduler", None, "rollout.tools and rollout.environment have conversations of several turns"),
    ("use_gym_env", False, "rollout.environment has conversations of several turns"),
    ("gym_env", None, "rollout.environment has conversations of several turns"),
    ("advantage_reweight", None, "advantages are not weighed by a teacher; objective: distill learns from one"),
    ("sdar_loss_coef", 0.0, "a teacher's loss is not added; objective: distill learns from one"),
    ("teacher_model", None, "a teacher's loss is not added; objective: distill learns from one"),
    ("teacher_model_server", None, "a teacher's loss is not added; objective: distill learns from one"),
    ("chord_sft_dataset", [], "rows that are learned as they stand are not mixed with answers that are drawn"),
    ("rollout_importance_sampling_mode", None, "rollout.correction weighs what the sampler drew otherwise"),
    ("off_policy_sequence_mask_delta", None, "rollout.correction leaves out what the sampler drew otherwise"),
    ("reward_model_plugin", None, "a reward model's own score is the reward"),
)  # fmt: skip


def _is_its(tree: MappingNode) -> bool:
    """True if the tree names model and data sets as ms-swift does, and has no section of ours."""
    keys = set(tree.entries)
    return {"model", "dataset"} <= keys and bool(_MARKS & keys) and not keys & (translation.OUR_SECTIONS - {"model"})


def _purpose(reading: translation.Translator) -> None:
    """What is learned."""
    reading.fill_in("defaults")
    named, kind = objective_said(reading), kind_of(reading)
    if kind in ("ppo", "gkd"):
        what = f"swift rlhf learns by {kind} from answers drawn in the run, and that is not translated"
        ours = "objective: {name: rl, loss: ppo}" if kind == "ppo" else "objective: distill"
        reading.stop("rlhf_type", what, f"write it as a run description of Luthier's, with {ours} (docs/rl.md)")
    elif kind == "grpo":
        _answers(reading)
    elif kind not in (None, "kto", "rm", *_PAIRS):
        reading.refuse("rlhf_type", f"{kind} is no objective", f"write one of {', '.join(_PAIRS)}, kto, rm, grpo")
    elif kind is not None:
        reading.set("objective.name", "dpo" if kind in _PAIRS else str(kind), "rlhf_type")
    else:
        reading.set("objective.name", named or "sft", "objective.name")
        if named is None:
            reading.told.append("objective.name: sft; for a file of swift pt, add objective.name=pt to the command")


def _answers(reading: translation.Translator) -> None:
    """``rlhf_type: grpo``: TRL's keys, with other defaults and some other names."""
    if reading.take("tuner_type") == "lora":
        reading.fill_in("defaults", "lora")
    drawn = {*reading.peer.table["passed"][_OF_ANSWERS], *reading.peer.table["asked"], *_TRLS}
    given = {_TRLS.get(key, key): reading.take(key) for key in reading.entries if key in drawn}
    models = translation.names_of(given.pop("reward_model", None) or [])
    if len(models) > 1 or given.pop("reward_adapters", None):
        reading.refuse("reward_model", "one reward model judges here, with all of its weights in its folder",
                       "write others into rollout.rewards of a run description (luthier config import)")  # fmt: skip
    turns, losses = reading.take("gradient_accumulation_steps"), translation.names_of(given.get("loss_type") or "grpo")
    given |= {"loss_type": losses[0], **({"reward_model_name_or_path": models[0]} if models else {})}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # both are all tokens
    if given.pop("dynamic_sample", None):
        reading.set("rollout.dead_groups", "resample", "dynamic_sample")
        if (times := given.pop("max_resample_times", None)) is not None:
            reading.set("rollout.resample_rounds", times, "max_resample_times")
    if "soft_overlong" in translation.names_of(given.get("reward_funcs") or []) and not given.get("soft_cache_length"):
        reading.refuse("reward_funcs", "soft_overlong has no length to begin at", "write soft_cache_length: TOKENS")
    theirs = {trl: key for key, trl in _TRLS.items()} | {"reward_model_name_or_path": "reward_model"}
    DrawnAnswers(
        reading=reading, given=given, at=lambda key: theirs.get(key, key), plain=True, defaults=SWIFT_DEFAULTS,
        rows=(reading.take("per_device_train_batch_size"), turns or 1), rows_key="per_device_train_batch_size",
        missing=_NOT_DRAWN, model_is_last=True,
    ).read()  # fmt: skip


def _objective(reading: translation.Translator) -> None:
    """The loss and its numbers."""
    kind, losses = kind_of(reading), translation.names_of(reading.take("loss_type") or [])
    smoothed = "label_smoothing_factor" if kind is None else "label_smoothing"
    beta, smooth = reading.take("beta"), reading.take(smoothed)
    others = {"label_smoothing", "label_smoothing_factor"} - {smoothed}
    reading.pass_over(others, "label_smoothing is for rlhf_type, and label_smoothing_factor for swift sft and pt")
    numbers = {key: reading.take(key) for key in ("rpo_alpha", "cpo_alpha", "simpo_gamma", "desirable_weight",
                                                  "undesirable_weight", "ref_model")}  # fmt: skip
    reading.switch("objective.loss", "dft", "enable_dft_loss")
    if numbers["ref_model"] is not None:
        reading.set("objective.reference.name_or_path", str(numbers["ref_model"]), "ref_model")
    _reference_adapter(reading, kind in ("dpo", "kto") or (kind == "grpo" and beta != 0))
    reading.take("loss_weights")
    if kind == "grpo":
        return
    if losses and kind == "dpo":
        mixed_losses(reading)  # it hands both to TRL
    elif len(losses) == 1 and kind == "kto":
        reading.set("objective.loss", losses[0], "loss_type")
    elif losses not in ([], _BY_DEFAULT.get(kind)):
        reading.refuse("loss_type", f"{', '.join(losses)} is no loss for this file", "name losses of rlhf_type: dpo")
    elif kind in _PAIRS:
        reading.set("objective.loss", _PAIRS[str(kind)], "rlhf_type")
    if smooth:
        reading.set("objective.label_smoothing", smooth, smoothed)
    if kind not in (*_PAIRS, "kto"):
        return
    reading.set("objective.beta", (2.0 if kind == "simpo" else 0.1) if beta is None else beta, "beta")
    if kind == "simpo":
        reading.set("objective.gamma", 1.0 if (gamma := numbers["simpo_gamma"]) is None else gamma, "simpo_gamma")
    if kind in ("simpo", "cpo"):
        reading.set("objective.sft_weight", 1.0 if (part := numbers["cpo_alpha"]) is None else part, "cpo_alpha")
    elif numbers["rpo_alpha"] is not None and kind == "dpo":
        reading.set("objective.sft_weight", numbers["rpo_alpha"], "rpo_alpha")
    if kind == "kto":
        for key in ("desirable_weight", "undesirable_weight"):
            if numbers[key] is not None:
                reading.set(f"objective.{key}", numbers[key], key)


def _reference_adapter(reading: translation.Translator, compares: bool) -> None:
    """The reference is the model under ``ref_adapters``, or its base, also where an adapter goes on."""
    begins, refers = (translation.names_of(reading.take(key) or []) for key in ("adapters", "ref_adapters"))
    if not compares or reading.take("ref_model") is not None or begins == refers:
        return  # by itself it is the model that the run begins with
    if len(refers) > 1:
        reading.refuse("ref_adapters", "a reference has one adapter", "merge the others into the model")
    elif refers:
        reading.set("objective.reference.name_or_path", refers[0], "ref_adapters")
    else:
        reading.set("objective.reference.source", "base", "adapters")
        reading.told.append("adapters: the reference is the model without them, as for ms-swift; the same path as "
                            "ref_adapters makes it the model that the run begins with")  # fmt: skip


# ------------------------------------------------------------------ the model and what is trained of it


def _model(reading: translation.Translator) -> None:
    model, is_hf = str(reading.take("model")), reading.flag("use_hf")
    reading.set("model.name_or_path", model, "model")
    is_here = Path(model).expanduser().exists() or model.startswith("preset:")
    if not (is_hf or is_here or os.environ.get("USE_MODELSCOPE_HUB")):
        reading.told.append("model: it comes from Hugging Face; write USE_MODELSCOPE_HUB=1 before the command, and it "
                            "comes from ModelScope as for ms-swift")  # fmt: skip
    kind = str(reading.take("torch_dtype")).removeprefix("torch.")
    half, of = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(kind), "torch_dtype"
    for key, name in (("bf16", "bf16"), ("fp16", "fp16")):
        if reading.flag(key):
            half, of = name, key
    if half is not None:
        reading.set("train.precision", half, of)
    if half == "fp32" and "fp16" not in reading.entries:
        reading.told.append("torch_dtype: the model computes in fp32, where ms-swift computes in fp16 without fp16: "
                            "false")  # fmt: skip
    if reading.take("tuner_type") == "full" and half == "bf16":
        reading.told.append(f"{of}: weights that are trained are kept in fp32 and computed in bf16, where ms-swift "
                            "keeps them in bf16; model.dtype: bfloat16 does so")  # fmt: skip
    if (attention := reading.take("attn_impl")) is not None:
        reading.set(
            "model.attn_implementation", "flash_attention_2" if attention == "flash_attn" else attention, "attn_impl"
        )
    if reading.take("rope_scaling") is not None:
        reading.refuse("rope_scaling", "the factor follows from lengths that this file does not say",
                       "write rope_parameters, such as {rope_type: yarn, factor: 4.0, rope_theta: 1000000.0}, into "
                       "model.config_overrides")  # fmt: skip
    _quantization(reading)


def _quantization(reading: translation.Translator) -> None:
    method, bits = reading.take("quant_method"), reading.take("quant_bits")
    four, double = reading.take("bnb_4bit_quant_type"), reading.take("bnb_4bit_use_double_quant")
    computed_in = reading.take("bnb_4bit_compute_dtype")
    if method is None and bits is None:
        return
    if method not in (None, "bnb") or bits not in (4, 8):
        reading.refuse("quant_bits", f"{bits} bits by {method or 'bnb'} are not there",
                       "write 4 or 8, with quant_method: bnb; a model that comes quantized needs neither")  # fmt: skip
        return
    reading.set("model.quantization.type", str(four or "nf4") if bits == 4 else "int8", "quant_bits")
    if bits == 4:
        reading.set("model.quantization.double_quantization", double is not False, "quant_bits")
        if computed_in is not None:
            kind = str(computed_in).removeprefix("torch.")
            reading.set("model.quantization.compute_dtype", kind, "bnb_4bit_compute_dtype")


def _adapter(reading: translation.Translator) -> None:
    kind, path = str(reading.take("tuner_type")), translation.names_of(reading.take("adapters") or [])
    ours = {"full": "full", "lora": "lora", "vera": "vera", "llamapro": "llama_pro"}
    if kind not in ours:
        reading.stop("tuner_type", f"{kind} is not there", f"write one of {', '.join(ours)}")
        return
    reading.set("adapter.type", ours[kind], "tuner_type")
    kept, said = _trained_parts(reading), [key for key in _FROZEN if key in reading.entries]
    if said:
        reading.set("adapter.train_parts", kept, said[0])
    if path:
        reading.set("adapter.name_or_path", path[0], "adapters")
        reading.pass_over(_OF_A_NEW_ONE, "the adapter that goes on says it")
        if len(path) > 1:
            reading.refuse("adapters", "one adapter is gone on from", "merge the first ones by adapter.merge_first")
        return
    if kind != "full":
        reading.fill_in("defaults", kind)
    names, pattern = translation.names_of(reading.take("target_modules") or []), reading.take("target_regex")
    rank, blocks, start = (reading.take(key) for key in ("vera_rank", "llamapro_num_new_blocks", "init_weights"))
    if kind in ("lora", "vera"):
        wanted = [f"regex:{pattern}"] if pattern else names
        reading.set("adapter.target_modules", wanted, "target_regex" if pattern else "target_modules")
    if kind == "vera":
        reading.set("adapter.r", rank, "vera_rank")
    if kind == "llamapro":
        reading.set("adapter.expand_layers", blocks, "llamapro_num_new_blocks")
    if kind == "lora" and start not in (None, True, "true", "True"):
        reading.set("adapter.init_lora_weights", str(start).replace("-", "_"), "init_weights")  # lora-ga
    if kind in ("full", "llamapro"):
        reading.pass_over((*_OF_LORA, "lorap_lr_ratio"), "it belongs to tuner_type: lora")


def _trained_parts(reading: translation.Translator) -> list[str]:
    frozen = {key: reading.take(key) for key in _FROZEN}
    return [part for key, (part, usual) in _FROZEN.items() if not (usual if frozen[key] is None else frozen[key])]


# ------------------------------------------------------------------ the run


def _schedule(reading: translation.Translator) -> None:
    rate, turns = reading.take("learning_rate"), reading.take("gradient_accumulation_steps")
    rows, world = reading.take("per_device_train_batch_size"), num_processes()
    reading.read.discard("per_device_train_batch_size")
    usual = 1e-5 if reading.take("tuner_type") == "full" else 1e-4
    reading.set("train.learning_rate", usual if rate is None else rate, "learning_rate")
    if kind_of(reading) == "grpo":
        turns = None  # rollout.prompts_per_step says how large a step is
    elif turns is None and isinstance(rows, int) and rows > 0:
        turns = max(1, math.ceil(16 / rows / world))
        reading.told.append(f"gradient_accumulation_steps: {turns}, ms-swift's default, for "
                            f"{counted(rows * turns * world, 'row')} in a step")  # fmt: skip
    if turns is not None:
        reading.set("train.gradient_accumulation_steps", turns, "gradient_accumulation_steps")
    steps, share = reading.take("warmup_steps"), reading.take("warmup_ratio")
    reading.set("train.warmup_steps", steps or share or 0, "warmup_steps" if steps else "warmup_ratio")
    for key, part in (("vit_lr", "tower"), ("aligner_lr", "projector")):
        if part in _trained_parts(reading):
            reading.copy(f"train.learning_rates.{part}", key)
        else:
            reading.pass_over((key,), f"the {part} is frozen")


def _run(reading: translation.Translator) -> None:
    """Devices, checkpoints, evaluation and trackers."""
    shared = reading.take("deepspeed")
    if isinstance(shared, str) and shared.removesuffix("_offload") in ("zero0", "zero1", "zero2", "zero3"):
        moved = {"offload_optimizer": {"device": "cpu"}} if shared.endswith("_offload") else {}
        shared = {"zero_optimization": {"stage": int(shared[4]), **moved}}
    if shared:
        share_as_deepspeed(reading, shared)
    if reading.take("fsdp"):
        reading.set("runtime.sharding", "fsdp", "fsdp")
    reading.set("output.dir", str(reading.take("output_dir")), "output_dir")
    start = reading.take("resume_from_checkpoint")
    reading.set("output.resume", "auto" if start is True else str(start or "never"), "resume_from_checkpoint")
    reading.set("output.save_total_limit", reading.take("save_total_limit"), "save_total_limit")
    saved, every = str(reading.take("save_strategy")), reading.take("save_steps")
    reading.set("output.save_strategy", saved, "save_strategy")
    if saved == "steps":
        reading.set("output.save_steps", every, "save_steps")
    when, steps = reading.take("eval_strategy"), reading.take("eval_steps")
    if reading.take("val_dataset") or reading.take("split_dataset_ratio"):
        when = str(when or saved)
        reading.set("eval.strategy", when, "eval_strategy" if "eval_strategy" in reading.entries else "save_strategy")
        if when == "steps":
            reading.set("eval.steps", steps or every, "eval_steps" if steps else "save_steps")
    best = reading.take("load_best_model_at_end"), reading.take("early_stop_interval")
    reading.take("greater_is_better")
    chooses = when not in (None, "no") and any(best)
    read_metric(reading, is_read=chooses)
    if chooses:
        reading.switch("eval.load_best_model_at_end", True, "load_best_model_at_end")
        reading.copy("eval.early_stopping_patience", "early_stop_interval")
    read_trackers(reading)
    reading.copy("tracking.run_name", "swanlab_exp_name", str)


SWIFT = translation.Peer(
    name="ms-swift",
    file="swift.toml",
    is_its=_is_its,
    rules=(_purpose, _objective, read_data, read_template, read_lengths, _model, _adapter, _schedule, _run),
)
