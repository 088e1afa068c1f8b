"""A training file of LLaMA-Factory's newer engine (``USE_V1=1``) -> the tree of a run description.

Its settings stand in sections (``peft_config``, ``dist_config`` …), and its data sets in a YAML file of their own. As
its file does not name its command, pairs are asked about: they could be for ``dpo`` or ``rm``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from luthier.config import MappingNode, num_processes, plain
from luthier.config.peers import (
    beside,
    mapping_beside,
    objective_said,
    read_timeout,
    share_as_deepspeed,
    translation,
    trl_rows,
)
from luthier.writing import JsonObject, counted

_MARKS = frozenset({"model_class", "kernel_config", "dist_config", "quant_config", "optim_config", "init_config",
                    "micro_batch_size", "cutoff_len", "batching_strategy", "sample_backend"})  # fmt: skip
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}
# Of `dist_config`: where numbers lie and how they travel, which changes none of them.
_PLACES = frozenset({"name", "config_file", "mixed_precision", "reshard_after_forward", "offload_params", "pin_memory",
                     "ep_size", "ep_dispatcher", "fsdp_implementation", "hook_modules", "fsdp_ignored_modules",
                     "chunk_size"})  # fmt: skip


def _is_its(tree: MappingNode) -> bool:
    """True if the tree has its ``model`` and data sets or an adapter, and no section of ours."""
    keys = set(tree.entries)
    named = "model" in keys and ("peft_config" in keys or ("train_dataset" in keys and bool(_MARKS & keys)))
    return named and not keys & (translation.OUR_SECTIONS - {"model"})


def _section(reading: translation.Translator, key: str) -> JsonObject:
    """A section of theirs; each key of it is read by whoever asks for it."""
    value = reading.take(key)
    if value is not None and (not isinstance(value, dict) or "name" not in value):
        reading.refuse(key, "this section has no name", f"for example {key}: {{name: auto}}")
        return {}
    return dict(value or {})


def _rest(reading: translation.Translator, key: str, section: JsonObject) -> None:
    """What is left of a section is nothing that we know."""
    for name in section:
        reading.refuse(f"{key}.{name}", "Luthier has nothing for this key", "remove the line")


# ------------------------------------------------------------------ what is learned from what


def _data(reading: translation.Translator) -> None:
    adapter = reading.entries.get("peft_config")
    if isinstance(adapter, MappingNode) and "export_dir" in adapter.entries:
        reading.stop("peft_config.export_dir", "this file merges and exports a model, it trains nothing",
                     "luthier export takes a description with train: {enabled: false}, adapter: {merge_first: DIR} "
                     "and export: {dir: DIR}")  # fmt: skip
        return
    reading.fill_in("defaults")
    name = reading.take("train_dataset")
    if name is None:
        reading.stop("train_dataset", "no data set is named", "for example train_dataset: data/rows.yaml")
        return
    listed, where = {"default": {"path": str(name), "source": "local" if os.path.exists(str(name)) else "hf_hub"}}, name
    if str(name).endswith((".yaml", ".yml")):
        listed, where = (
            mapping_beside(reading, "train_dataset", name),
            beside(str(name), reading.name) or name,
        )
        if not listed:
            reading.is_no_run = True
            return
    sources = [_source(reading, str(where), name, entry) for name, entry in listed.items()]
    if any("max_rows" in source for source in sources):
        reading.told.append(
            "train_dataset: size takes so many rows without repeating any; LLaMA-Factory repeats by chance"
        )
    _objective(reading, sources)
    if not reading.is_no_run:
        reading.set("data.train", sources, "train_dataset")


def _source(reading: translation.Translator, where: str, name: str, entry: Any) -> JsonObject:
    """One data set of their list."""
    given = dict(entry) if isinstance(entry, dict) else {}
    path = str(given.pop("path", ""))
    if given.pop("source", "hf_hub") == "local":
        source: JsonObject = {"path": path if os.path.exists(path) else str(beside(path, where) or path)}
    else:
        source = {"path": f"hub:{path}"}
    converter = given.pop("converter", None)
    if converter is not None and str(converter) not in _FORMATS:
        reading.refuse("train_dataset", f"{where}: {name} has a converter {converter}", f"choose {', '.join(_FORMATS)}")
    elif converter is not None:
        source["format"] = _FORMATS[str(converter)]
    for theirs, ours in (("split", "split"), ("size", "max_rows"), ("weight", "weight"), ("streaming", "streaming")):
        value = given.pop(theirs, None)
        is_usual = (theirs, value) in (("split", "train"), ("streaming", False))
        if value is not None and not is_usual and not (theirs == "streaming" and "hub:" not in source["path"]):
            source[ours] = value
    for key in given:
        reading.refuse("train_dataset", f"{where}: {name} has a key {key}, which Luthier does not know", "remove it")
    return source


def _objective(reading: translation.Translator, sources: list[JsonObject]) -> None:
    """``sft`` but for pairs, which are for ``dpo`` or ``rm``: an override says for which."""
    said = objective_said(reading)
    if said is None:
        pairs = any(source.get("format") == "preference" or _has_pairs(source["path"]) for source in sources)
        prefers = [
            key for key in ("pref_loss", "pref_beta", "pref_ftx", "simpo_gamma", "ld_alpha") if key in reading.entries
        ]
        is_reward = reading.take("model_class") == "cls"
        if pairs and not prefers and not is_reward:
            reading.stop("objective.name", "its rows are pairs, which could be for dpo or for rm",
                         "add objective.name=dpo or objective.name=rm to the command")  # fmt: skip
            return
        said = "rm" if is_reward else "dpo" if prefers else "sft"
    reading.take("model_class")
    reading.set("objective.name", said, "objective.name")
    loss, gamma = reading.take("pref_loss"), reading.take("simpo_gamma")
    smooth, ftx = reading.take("dpo_label_smoothing"), reading.take("pref_ftx")
    if said != "dpo":
        idle = ("pref_beta", "ld_alpha", "pref_loss", "simpo_gamma", "dpo_label_smoothing", "pref_ftx")
        reading.pass_over(idle, "it belongs to dpo")
        return
    reading.set("objective.loss", str(loss or "sigmoid"), "pref_loss")
    if "pref_beta" not in reading.entries:
        reading.set("objective.beta", 0.1, "pref_beta")
    if loss == "simpo":
        reading.set("objective.gamma", 0.5 if gamma is None else gamma, "simpo_gamma")
    if loss == "orpo" and isinstance(ftx, int | float) and ftx:
        ftx += 1  # beside the answer that ORPO learns itself
    for ours, key, value in (("label_smoothing", "dpo_label_smoothing", smooth), ("sft_weight", "pref_ftx", ftx)):
        if value:
            reading.set(f"objective.{ours}", value, key)


def _has_pairs(path: str) -> bool:
    rows = None if path.startswith("hub:") else trl_rows.columns_of(path)
    return rows is not None and any(name.startswith("chosen") for name in rows.names)


# ------------------------------------------------------------------ the model


def _model(reading: translation.Translator) -> None:
    trl_rows.train_all_parts(reading, "model")
    attention = reading.take("flash_attn")
    reading.set("model.attn_implementation", str(attention), "flash_attn")
    kernels = _section(reading, "kernel_config")
    if "liger_kernel" in translation.names_of(kernels.get("name", "")):
        reading.set("model.use_liger_kernel", True, "kernel_config")
    if kernels.keys() - {"name"} or (kernels and "model.use_liger_kernel" not in reading.origins):
        reading.passed["kernel_config"] = "kernels are chosen by model.attn_implementation and model.use_liger_kernel"
    quantization = _section(reading, "quant_config")
    bits = quantization.pop("quantization_bit", 4 if quantization.get("name") == "bnb" else None)
    kind, double = quantization.pop("quantization_type", "nf4"), quantization.pop("double_quantization", True)
    computed = quantization.pop("compute_dtype", None)
    if quantization.pop("name", None) not in (None, "auto", "bnb") or bits not in (None, 4, 8):
        reading.refuse(
            "quant_config", f"{bits} bits by this library are not there", "write name: bnb, with 4 or 8 bits"
        )
    elif bits is not None:
        reading.set("model.quantization.type", kind if bits == 4 else "int8", "quant_config")
        if bits == 4:
            reading.set("model.quantization.double_quantization", double, "quant_config")
            if computed is not None:
                reading.set("model.quantization.compute_dtype", str(computed), "quant_config")
    _rest(reading, "quant_config", quantization)


def _adapter(reading: translation.Translator) -> None:
    section = _section(reading, "peft_config")
    kind = section.pop("name", "full")
    if kind not in ("full", "lora", "freeze"):
        reading.refuse("peft_config.name", f"{kind} is no adapter of this engine", "write lora or freeze")
        return
    reading.set("adapter.type", kind, "peft_config")
    section = {**reading.peer.table["defaults"].get(kind, {}), **section}
    if kind == "lora":
        targets = translation.names_of(section.pop("target_modules"))
        reading.set("adapter.target_modules", ["all-linear"] if targets == ["all"] else targets, "peft_config")
        if folders := section.pop("adapter_name_or_path", None):
            *merged, last = translation.names_of(folders)
            if merged:
                reading.refuse(
                    "peft_config.adapter_name_or_path", "its engine goes on from a single adapter", "name one"
                )
            reading.set("adapter.name_or_path", last, "peft_config.adapter_name_or_path")
            section = {key: value for key, value in section.items() if key not in ("r", "lora_alpha", "lora_dropout")}
    modules, extra = section.pop("freeze_trainable_modules", "all"), section.pop("freeze_extra_modules", None)
    section.pop("cast_trainable_params_to_fp32", None)
    if modules != "all":
        reading.refuse("peft_config.freeze_trainable_modules", "Luthier trains the whole of the last layers",
                       "write all, or name parameters in adapter.freeze_trainable_modules")  # fmt: skip
    if extra:
        names = [f"*{name}*" for name in translation.names_of(extra)]
        reading.set("adapter.freeze_trainable_modules", names, "peft_config.freeze_extra_modules")
    for key in (
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "use_dora",
        "modules_to_save",
        "freeze_trainable_layers",
    ):
        value = section.pop(key, None)
        if value is not None:
            reading.set(f"adapter.{key}", value, f"peft_config.{key}")
    _rest(reading, "peft_config", section)


# ------------------------------------------------------------------ the run


def _steps(reading: translation.Translator) -> None:
    most, how = reading.take("cutoff_len"), str(reading.take("batching_strategy"))
    reading.set("data.max_length", most, "cutoff_len")
    reading.set("data.overflow", "keep_answer", "cutoff_len")
    reading.set("data.max_drop", 0.5, "cutoff_len")  # their runs never stop for rows that are lost
    reading.told.append(
        f"cutoff_len: a row over {counted(most, 'token')} loses the oldest turns of its prompt, never a part of its "
        "answer; LLaMA-Factory cuts its end off; the report counts such rows"
    )
    reading.set("train.packing", "none" if how == "normal" else "window", "batching_strategy")
    if how != "normal":
        reading.told.append(
            f"batching_strategy: for {how}, rows share packs of cutoff_len tokens and never see each other"
        )
    micro, whole = reading.take("micro_batch_size"), reading.take("global_batch_size")
    reading.set("train.per_device_train_batch_size", micro, "micro_batch_size")
    if isinstance(whole, int) and isinstance(micro, int):
        ranks = num_processes()
        if whole % (micro * ranks):
            what = (
                f"{counted(whole, 'row')} of a step are no multiple of {counted(micro, 'row')} on "
                f"each of {counted(ranks, 'device')}"
            )
            reading.refuse("global_batch_size", what, f"a multiple of {micro * ranks}")
        else:
            reading.set("train.gradient_accumulation_steps", whole // (micro * ranks), "global_batch_size")
    if reading.take("bf16") is not None:
        reading.set("train.precision", "bf16" if reading.flag("bf16") else "fp32", "bf16")
    _optimizer(reading)


def _optimizer(reading: translation.Translator) -> None:
    """AdamW at one rate throughout, where the file names nothing else."""
    schedule = _section(reading, "lr_scheduler_config")
    reading.set("train.lr_scheduler_type", schedule.pop("name", "constant"), "lr_scheduler_config")
    share = schedule.pop("warmup_ratio", 0)
    reading.set("train.warmup_steps", schedule.pop("warmup_steps", share), "lr_scheduler_config")
    _rest(reading, "lr_scheduler_config", schedule)
    section = _section(reading, "optim_config")
    name = section.pop("name", "adamw_torch")
    if section.pop("lr", None) is not None:
        reading.passed["optim_config.lr"] = "learning_rate overrides it there, too"
    reading.set("train.optim", name, "optim_config")
    reading.set("train.weight_decay", section.pop("wd", 0.1 if name == "muon" else 0.01), "optim_config")
    betas = section.pop("adamw_betas", [0.9, 0.95] if name == "muon" else None)
    if isinstance(betas, list) and len(betas) == 2:
        reading.set("train.adam_beta1", betas[0], "optim_config")
        reading.set("train.adam_beta2", betas[1], "optim_config")
    if (epsilon := section.pop("adamw_eps", None)) is not None:
        reading.set("train.adam_epsilon", epsilon, "optim_config")
    if section:
        reading.set("train.optim_args", section, "optim_config")


def _devices(reading: translation.Translator) -> None:
    section = _section(reading, "dist_config")
    name, quantized = section.get("name"), "model.quantization.type" in reading.origins
    optimizer: Any = plain(reading.tree)["train"]["optim"]  # type: ignore[index]
    if name == "deepspeed":
        share_as_deepspeed(reading, section.get("config_file"))
    elif quantized or optimizer == "muon":
        what = "quantized weights are" if quantized else "muon updates whole matrices: the model is"
        reading.told.append(f"dist_config: {what} whole on each device, not divided between several")
    elif name is not None:
        reading.set("runtime.sharding", "none" if name == "ddp" else "fsdp", "dist_config")
    if section.pop("dcp_path", None) is not None:
        reading.refuse("dist_config.dcp_path", "weights are read from the model's folder, not from a torch checkpoint",
                       "convert it to safetensors, and name that folder as the model")  # fmt: skip
    _rest(reading, "dist_config", {key: value for key, value in section.items() if key not in _PLACES})
    if section.get("ep_size") not in (None, 1):
        reading.told.append(
            "dist_config: experts are divided as all weights are, not by ep_size; the results are the same"
        )
    if reading.take("cp_size") not in (None, 1):
        reading.told.append("cp_size: each row is on one device, not divided between several; the results are the same")
    reading.take("cp_mode")
    read_timeout(reading, "dist_timeout")


def _folder(reading: translation.Translator) -> None:
    steps, epochs, start = (reading.take(key) for key in ("save_steps", "save_epochs", "resume_from_checkpoint"))
    reading.set("output.save_strategy", "steps" if steps else "epoch" if epochs else "no", "save_steps")
    if steps:
        reading.set("output.save_steps", steps, "save_steps")
    elif epochs not in (None, 1, 1.0):
        reading.refuse(
            "save_epochs", f"a checkpoint every {counted(epochs, 'epoch')}", "write save_steps, or save_epochs: 1"
        )
    reading.set("output.resume", "never" if start is None else str(start), "resume_from_checkpoint")
    if "save_total_limit" not in reading.entries:
        reading.set("output.save_total_limit", None, "save_total_limit")
    if reading.entries.get("output_dir") is not None:
        reading.set("output.dir", str(Path(str(reading.take("output_dir")))), "output_dir")


LLAMA_FACTORY_V1 = translation.Peer(
    name="LLaMA-Factory's v1 engine",
    file="llamafactory_v1.toml",
    is_its=_is_its,
    rules=(_data, _model, _adapter, _steps, _devices, _folder),
)
