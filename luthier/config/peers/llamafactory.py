"""A training file of LLaMA-Factory's (YAML or JSON) -> the tree of a run description, each value with its place.

Most keys are lines of ``llamafactory.toml``. The functions here are for what several keys decide together; what their
files leave open is filled in with their defaults, in their words, before anything is read.
"""

from __future__ import annotations

import math

from luthier.config import MappingNode, plain
from luthier.config.peers import beside, read_metric, read_sharing, read_timeout, read_trackers
from luthier.config.peers.llamafactory_rows import read_data, read_generation, read_lengths, read_ppo, read_template
from luthier.config.peers.translation import OUR_SECTIONS, Peer, Translator, names_of
from luthier.config.yaml_text import parse_yaml

_MARKS = frozenset({"stage", "finetuning_type", "cutoff_len", "infer_backend", "export_dir", "do_predict"})


def _is_its(tree: MappingNode) -> bool:
    """True if the tree has LLaMA-Factory's flat keys and no section of ours."""
    keys = set(tree.entries)
    marked = bool(_MARKS & keys) or {"dataset", "template"} <= keys
    return marked and "model_name_or_path" in keys and not OUR_SECTIONS & keys


def _purpose(reading: Translator) -> None:
    """What the file is for: nothing is ever trained instead of what a file asks for."""
    if reading.entries.get("export_dir") is not None:
        _exports(reading)
        return
    asks = reading.entries.get("infer_backend") is not None and not reading.entries.get("dataset")
    reading.take("infer_backend")
    if reading.flag("do_predict") or asks:
        _answers(reading, "do_predict" if reading.flag("do_predict") else "infer_backend")
        return
    reading.fill_in("defaults")
    if reading.take("tokenized_path") is not None and "per_device_train_batch_size" in reading.defaults:
        reading.told.append("tokenized_path: LLaMA-Factory stops once rows are encoded; luthier prepare does so")
    reading.copy("data.store", "tokenized_path", str)


def _exports(reading: Translator) -> None:
    """A file that merges a model and writes it: the section ``export``."""
    reading.set("export.dir", str(reading.take("export_dir")), "export_dir")
    if reading.take("export_quantization_bit") is not None:
        reading.refuse("export_quantization_bit", "a model of few bits is not exported", "remove the line: the weights "
                       "are then written in 16 or 32 bits, which llm-compressor or llama.cpp quantize")  # fmt: skip
    if reading.flag("export_legacy_format"):
        reading.refuse("export_legacy_format", "weights are written as safetensors, never as a pickle",
                       "write false")  # fmt: skip
    reading.take("export_legacy_format")
    for key, ours in (("export_size", "export.max_shard_gb"), ("export_device", "runtime.device"),
                      ("infer_dtype", "export.dtype")):  # fmt: skip
        reading.copy(ours, key)
    if reading.take("export_hub_model_id") is not None:
        reading.passed["export_hub_model_id"] = "nothing is uploaded; hf upload NAME DIR does it"
    for key in [key for key in reading.entries if key.startswith("export_quantization_")]:
        reading.take(key)
    _answers(reading, "export_dir")


def _answers(reading: Translator, of: str) -> None:
    """A file that trains nothing: its model with all adapters merged, its template, its rows, and how it answers."""
    reading.fill_in("defaults", "generation")
    reading.fill_in("defaults", "answering")
    reading.set("train.enabled", False, of)
    for key in ("stage", "finetuning_type", "predict_with_generate", "adapter_folder"):
        reading.take(key)
    reading.copy("adapter.merge_first", "adapter_name_or_path", names_of)
    others = (key for key in reading.entries if key.startswith(("lora_", "vllm_", "sglang_")) or key in _ANSWERED)
    reading.pass_over(others, "the model is loaded and answers by Luthier's own engine")
    merged = ", with all of its adapters merged" if "adapter.merge_first" in reading.origins else ""
    does = "luthier export writes its model" if of == "export_dir" else "luthier predict has its model answer"
    reading.told.append(f"{of}: this file trains nothing; {does}{merged}")


_ANSWERED = ("infer_dtype", "overwrite_output_dir", "per_device_eval_batch_size", "report_to",
             "save_only_model", "bf16", "fp16", "pure_bf16", "deepspeed", "fsdp", "ddp_timeout")  # fmt: skip


def _objective(reading: Translator) -> None:
    stage = str(reading.take("stage"))
    reading.set("objective.name", "rl" if stage == "ppo" else stage, "stage")
    if stage == "ppo":
        reading.set("objective.loss", "ppo", "stage")
        read_ppo(reading)
    else:
        judges = [key for key in reading.entries if key.startswith("reward_model")]
        reading.pass_over(judges, "it belongs to stage: ppo")
    losses = {"use_dft_loss": "dft", "use_asft_loss": "asft", "use_eaft_loss": "eaft"}
    for key in (key for key in losses if reading.flag(key) and stage != "dpo"):
        reading.set("objective.loss", losses[key], key)
    if stage == "dpo":
        reading.fill_in("defaults", "dpo")
        loss = str(reading.take("pref_loss"))
        reading.set("objective.loss", loss, "pref_loss")
        if loss in _TAKEN_FOR_SIGMOID:
            reading.told.append(f"pref_loss: {loss} is computed; LLaMA-Factory with TRL 0.24 computes sigmoid instead")
        if loss == "simpo":
            reading.fill_in("defaults", "simpo")
        if loss == "orpo" and isinstance(more := reading.take("pref_ftx"), int | float) and more:
            reading.set("objective.sft_weight", 1 + more, "pref_ftx")  # beside the answer that ORPO learns itself
        reading.pass_over(losses, "it belongs to stage: sft")
    if stage == "kto":
        reading.fill_in("defaults", "kto")
    smooths = {"sft": "label_smoothing_factor", "pt": "label_smoothing_factor", "dpo": "dpo_label_smoothing"}.get(stage)
    reading.pass_over({"label_smoothing_factor", "dpo_label_smoothing"} - {smooths}, "another stage reads it")
    idle = {"pref_loss", "simpo_gamma", "ld_alpha"} if stage != "dpo" else {"kto_chosen_weight", "kto_rejected_weight"}
    idle |= set() if stage in ("dpo", "kto") else {"pref_beta", "pref_ftx", "kto_chosen_weight", "kto_rejected_weight"}
    idle |= {"simpo_gamma"} if reading.take("pref_loss") != "simpo" else set()
    reading.pass_over(idle, "it belongs to another stage or loss")
    if (bits := reading.take("ref_model_quantization_bit")) in (4, 8):
        reading.set("objective.reference.quantization", "nf4" if bits == 4 else "int8", "ref_model_quantization_bit")


def _adapter(reading: Translator) -> None:
    kind = str(reading.take("finetuning_type"))
    reading.set("adapter.type", kind, "finetuning_type")
    if kind in ("lora", "oft", "freeze"):
        reading.fill_in("defaults", kind)
    _existing_adapters(reading, kind)
    lists = {
        "lora_target": "target_modules",
        "oft_target": "target_modules",
        "additional_target": "modules_to_save",
        "freeze_extra_modules": "freeze_trainable_modules",
    }
    for key, ours in lists.items():
        value = reading.take(key)
        goes_on = key == "lora_target" and "adapter.name_or_path" in reading.origins
        if value is None or goes_on or not _belongs(reading, key, kind):
            continue
        names = names_of(value)
        if names == ["all"]:
            names = ["all-linear"]
        elif ours == "freeze_trainable_modules":
            names = [f"*{name}*" for name in names]
        reading.set(f"adapter.{ours}", names, key)
    modules = reading.take("freeze_trainable_modules")
    if kind == "freeze" and modules not in (None, "all"):
        reading.refuse("freeze_trainable_modules", "Luthier trains the whole of the layers that are not frozen",
                       "write all, or name parameters in adapter.freeze_trainable_modules")  # fmt: skip
    if reading.flag("use_llama_pro"):
        _llama_pro(reading)
    if reading.flag("pissa_init"):
        steps = reading.take("pissa_iter")
        start = "pissa" if steps == -1 else f"pissa_niter_{16 if steps is None else steps}"
        reading.set("adapter.init_lora_weights", start, "pissa_init" if steps is None else "pissa_iter")
    reading.take("pissa_iter")
    for key in ("lora_rank", "lora_alpha", "lora_dropout", "loraplus_lr_ratio", "use_rslora", "use_dora",
                "oft_block_size", "freeze_trainable_layers"):  # fmt: skip
        _belongs(reading, key, kind)
    _parts(reading, kind)


def _belongs(reading: Translator, key: str, kind: str) -> bool:
    """False, and passed over, for a key of another method than the one that is used."""
    method = "freeze" if key.startswith("freeze_") else "oft" if key.startswith("oft_") else "lora"
    if key == "additional_target":
        method = kind if kind in ("lora", "oft") else "lora"
    if key in reading.entries and kind != method:
        reading.take(key)
        reading.passed[key] = f"it belongs to finetuning_type: {method}"
        return False
    return True


def _llama_pro(reading: Translator) -> None:
    """Their script llama_pro.py has put layers into the model, the last of each group; these alone are trained."""
    if str(reading.take("finetuning_type")) != "freeze":
        what = "an adapter in new layers only is not there"
        reading.refuse("use_llama_pro", what, "write finetuning_type: freeze, which trains these layers whole")
        return
    reading.set("adapter.freeze_spread", True, "use_llama_pro")


_TAKEN_FOR_SIGMOID = ("hinge", "ipo", "kto_pair")  # it does not hand the name to TRL's function
_ALONE = ("orpo", "simpo")  # losses of pairs that compare with no reference


def _existing_adapters(reading: Translator, kind: str) -> None:
    """All are merged but the last, which goes on; with ``create_new_adapter`` all are."""
    value, is_new = reading.take("adapter_name_or_path"), reading.flag("create_new_adapter")
    reading.take("adapter_folder")
    if value is None:
        return
    folders = names_of(value)
    merged = folders if is_new or kind != "lora" else folders[:-1]
    if merged:
        reading.set("adapter.merge_first", merged, "adapter_name_or_path")
    if len(merged) < len(folders):
        reading.set("adapter.name_or_path", folders[-1], "adapter_name_or_path")
        of_a_new_one = ("lora_rank", "lora_target", "lora_alpha", "lora_dropout")
        reading.pass_over(of_a_new_one, "the adapter that goes on says it")
        stage, loss = reading.take("stage"), reading.take("pref_loss")
        if reading.take("ref_model") is None and (stage in ("kto", "ppo") or (stage == "dpo" and loss not in _ALONE)):
            reading.set("objective.reference.source", "base", "adapter_name_or_path")
            reading.told.append("adapter_name_or_path: the reference is the model without this adapter, as for "
                                "LLaMA-Factory; create_new_adapter: true begins at the reference")  # fmt: skip
        reading.read.discard("ref_model")


def _parts(reading: Translator, kind: str) -> None:
    frozen = {
        "tower": reading.take("freeze_vision_tower") in (None, True),
        "projector": reading.take("freeze_multi_modal_projector") in (None, True),
        "language_model": reading.take("freeze_language_model") is True,
    }
    parts = [part for part in ("language_model", "projector", "tower") if not frozen[part]]
    if parts == ["language_model"] or kind == "freeze":
        return
    named = next(key for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
                 if key in reading.entries)  # fmt: skip
    if not parts:
        reading.refuse(named, "nothing of the model is left to train", "set one of the freeze_* keys to false")
        return
    reading.set("adapter.train_parts", parts, named)


def _precision(reading: Translator) -> None:
    if reading.flag("pure_bf16"):
        reading.set("train.precision", "bf16", "pure_bf16")
        reading.set("model.dtype", "bfloat16", "pure_bf16")
        reading.read |= {"bf16", "fp16"}
    for key in ("bf16", "fp16"):
        reading.switch("train.precision", key, key)
    if reading.take("mixed_precision") not in (None, "no", "bf16", "bf16_mixed", "fp16"):
        reading.refuse("mixed_precision", "this is no type that Luthier computes in", "write bf16: true")
    if reading.flag("fp8"):
        reading.told.append("fp8: products are computed in bf16, not in 8 bits, which is more exact and slower")
    keeps = reading.take("gradient_checkpointing"), reading.take("disable_gradient_checkpointing")
    of = "disable_gradient_checkpointing" if keeps[1] is not None else "gradient_checkpointing"
    reading.set("train.gradient_checkpointing", keeps[1] is not True, of)
    _quantization(reading)
    _new_tokens(reading)


def _new_tokens(reading: Translator) -> None:
    """A file of tokens and what they mean; with ``desc_init`` their rows start from the words."""
    path, start = reading.take("new_special_tokens_config"), reading.take("init_special_tokens")
    if path is None:
        return
    file = beside(str(path), reading.name)
    described = None if file is None else parse_yaml(file.read_text(encoding="utf-8"), str(file)).tree
    if not isinstance(described, MappingNode):
        reading.refuse("new_special_tokens_config", f"there are no token: description lines in {path}")
        return
    reading.set("model.add_special_tokens", list(described.entries), "new_special_tokens_config")
    if str(start).startswith("desc_init"):
        reading.set("model.token_descriptions", described, "new_special_tokens_config")
    reading.told.append("new tokens start from the mean of their words, or of all rows, without noise")


def _quantization(reading: Translator) -> None:
    """Four bits are nf4 or fp4, eight int8, all by bitsandbytes; their other libraries are not there."""
    bits, method = reading.take("quantization_bit"), reading.take("quantization_method")
    kind, double = reading.take("quantization_type"), reading.take("double_quantization")
    reading.read.add("quantization_device_map")
    if bits is None:
        return
    if bits not in (4, 8) or method not in (None, "bnb", "bitsandbytes"):
        what = f"{bits} bits by {method or 'bnb'} are not there"
        reading.refuse("quantization_bit", what, "write 4 or 8, with quantization_method: bnb")
        return
    reading.set("model.quantization.type", str(kind or "nf4") if bits == 4 else "int8", "quantization_bit")
    if bits == 4 and double is not None:
        reading.set("model.quantization.double_quantization", double, "double_quantization")


def _optimizer(reading: Translator) -> None:
    """``use_*`` names an optimizer; its numbers are keys of its own."""
    named = {"use_galore": "galore_adamw", "use_apollo": "apollo_adamw", "use_badam": "badam",
             "use_adam_mini": "adam_mini", "use_muon": "muon"}  # fmt: skip
    used = [key for key in named if reading.flag(key)]
    for key in used[:1]:
        prefix = key.removeprefix("use_")
        optimizer = named[key] + ("_layerwise" if reading.flag(f"{prefix}_layerwise") else "")
        reading.set("train.optim", optimizer, key)
        for setting, (their_key, value) in _settings(reading, prefix).items():
            reading.set(f"train.optim_args.{setting}", value, their_key)
        reading.take("optim")
    for key in used[1:]:
        reading.refuse(key, f"{used[0]} names another optimizer", "keep one of them")
    others = (key for key in reading.entries if key.startswith(("galore_", "apollo_", "badam_")))
    others = (key for key in others if key not in reading.read and not key.startswith("badam_verbose"))
    reading.pass_over(others, "its optimizer is not used, or adapts all linear layers as here")
    if (warm := reading.take("warmup_steps")) in (None, 0):
        share = reading.take("warmup_ratio")
        reading.set("train.warmup_steps", share or 0, "warmup_ratio")
    else:
        reading.read.add("warmup_ratio")
        reading.set("train.warmup_steps", warm, "warmup_steps")


def _settings(reading: Translator, prefix: str) -> dict[str, tuple[str, object]]:
    """An optimizer's numbers, with LLaMA-Factory's defaults: our name -> their key and the value."""
    theirs: dict[str, dict[str, tuple[str, object]]] = {
        "galore": {"rank": ("rank", 16), "update_interval": ("update_proj_gap", 200), "scale": ("scale", 2.0),
                   "proj_type": ("proj_type", "std")},
        "apollo": {"rank": ("rank", 16), "update_interval": ("update_proj_gap", 200), "scale": ("scale", 32.0),
                   "proj": ("proj", "random"), "proj_type": ("proj_type", "std"),
                   "scale_type": ("scale_type", "channel")},
        "badam": {"switch_interval": ("switch_every", 50), "switch_mode": ("switch_mode", "ascending")},
    }  # fmt: skip
    found: dict[str, tuple[str, object]] = {}
    for key, (ours, default) in theirs.get(prefix, {}).items():
        name = f"{prefix}_{key}"
        given = reading.take(name)
        found[ours] = name, default if given is None else given
    if prefix == "badam" and reading.take("badam_mode") not in (None, "layer"):
        reading.refuse("badam_mode", "BAdam trains one layer at a time here", "write badam_mode: layer")
    if reading.flag("apollo_scale_front"):
        reading.refuse("apollo_scale_front", "apollo-torch's optimizer has no such setting", "remove the line")
    target = reading.take(f"{prefix}_target")
    if target is not None and {"mlp"} < set(names_of(target)) <= {"mlp", "self_attn", "attn", "self_attention"}:
        reading.told.append(f"{prefix}_target: all linear layers but the output layer are projected, also those that "
                            "stand neither in an mlp nor in an attention")  # fmt: skip
    elif target not in (None, "all", ["all"]):
        reading.refuse(f"{prefix}_target", "all linear layers but the output layer are projected", "write all")
    return found


def _ktransformers(reading: Translator) -> None:
    """It computes routed experts on the CPU, with LoRA in them; here they are where the model is."""
    is_on = reading.flag("use_kt")
    for key in [key for key in reading.entries if key.startswith("kt_")]:
        value = reading.take(key)
        if is_on and key == "kt_use_lora_experts" and value is True:
            reading.refuse(key, "further experts beside those of the model are not there", "remove the line")
        reading.passed[key] = "it says where and how KTransformers computes experts"
    if not is_on:
        return
    if str(reading.take("finetuning_type")) == "lora":
        reading.set("adapter.target_parameters", ["experts.gate_up_proj", "experts.down_proj"], "use_kt")
    weights = reading.entries.get("kt_weight_path")
    files = "" if weights is None else f", with the weights of the model's own files, not those in {plain(weights)}"
    reading.told.append(
        "use_kt: the experts and their LoRA are computed on the GPU, not on the CPU"
        f"{files}; what memory they need, luthier plan says"
    )


_DIVIDED = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def _megatron(reading: Translator) -> None:
    """Ranks that divide a model between them share their rows; ranks of ours have rows of their own."""
    sizes = [size for key in _DIVIDED if (size := reading.take(key)) is not None]
    if not all(type(size) is int and size > 0 for size in sizes):
        reading.refuse(next(key for key in _DIVIDED if key in reading.entries), "a number of GPUs is at least 1")
        return
    sharers, experts = math.prod(sizes), reading.take("expert_model_parallel_size")
    used = [key for key in ("use_mca", "use_megatron_bridge") if reading.flag(key)]
    if sharers == 1 and experts in (None, 1) and not used:
        return
    key = next(key for key in (*used, *_DIVIDED, "expert_model_parallel_size") if key in reading.entries)
    reading.set("runtime.sharding", "fsdp", key)
    accumulated = reading.take("gradient_accumulation_steps") or 1
    is_count = type(accumulated) is int and accumulated > 0
    fewer = max(1, accumulated // sharers) if is_count else accumulated
    reading.set("train.gradient_accumulation_steps", fewer, "gradient_accumulation_steps")
    if not is_count:  # it is refused where it is checked
        return
    reading.told.append(
        f"{key}: each GPU holds a share of all weights (runtime.sharding: fsdp) and has rows of its own, where "
        f"{sharers} shared theirs: gradient_accumulation_steps is {fewer}, not {accumulated}"
        + (
            ""
            if fewer * sharers == accumulated
            else f", and a step has {fewer * sharers / accumulated:g} times the rows"
        )
    )


def _devices(reading: Translator) -> None:
    """How several processes share the model, and how long each waits for the others."""
    _ktransformers(reading)
    _megatron(reading)
    read_sharing(reading)
    read_timeout(reading, "ddp_timeout")


def _folder(reading: Translator) -> None:
    anew, start = reading.flag("overwrite_output_dir"), reading.take("resume_from_checkpoint")
    if isinstance(start, str) and start.lower() not in ("true", "false", "none", "null"):
        reading.set("output.resume", start, "resume_from_checkpoint")
    elif anew and start not in (True, "true"):
        reading.set("output.overwrite", True, "overwrite_output_dir")
    else:  # theirs goes on from the newest checkpoint, too, where nothing is said
        reading.set("output.resume", "auto", "resume_from_checkpoint")
    reading.set("output.save_total_limit", reading.take("save_total_limit"), "save_total_limit")
    read_trackers(reading)
    reading.switch("tracking.report_to", ["swanlab"], "use_swanlab")


def _evaluation(reading: Translator) -> None:
    when, size = str(reading.take("eval_strategy") or "no"), reading.take("val_size")
    steps, patience = reading.take("eval_steps"), reading.take("early_stopping_steps")
    when = "no" if when in ("False", "false") else when
    is_held_out = bool(size) or reading.entries.get("eval_dataset") is not None
    if is_held_out:
        reading.set("eval.strategy", when, "eval_strategy")
    if size:
        reading.set("data.eval_split", int(size) if size >= 1 else size, "val_size")
    if when == "steps" and is_held_out:
        reading.set("eval.steps", steps or plain(reading.entries["logging_steps"]),
                    "eval_steps" if steps else "logging_steps")  # fmt: skip
    read_metric(reading, is_read=is_held_out)
    if patience:
        reading.set("eval.early_stopping_patience", patience, "early_stopping_steps")
    if not is_held_out:
        reading.take("per_device_eval_batch_size")


_TRAINING = (_objective, _adapter, read_data, read_template, read_lengths, read_generation, _precision, _optimizer,
             _devices, _folder, _evaluation)  # fmt: skip
_ANSWERING = (read_data, read_template, read_generation, _quantization)


def _read(reading: Translator) -> None:
    _purpose(reading)
    if not reading.is_no_run:
        for rule in _ANSWERING if "train.enabled" in reading.origins else _TRAINING:
            rule(reading)


LLAMA_FACTORY = Peer(
    name="LLaMA-Factory",
    file="llamafactory.toml",
    is_its=_is_its,
    rules=(_read,),
)  # fmt: skip
