"""A training file of axolotl's (YAML) -> the tree of a run description, each value with its place.

Most keys are lines of ``axolotl.toml``. The functions here are for what several keys decide together, and
`axolotl_rows` reads the data sets; what their files leave open is filled in with their defaults.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from luthier.config import MappingNode, Node, Scalar
from luthier.config import plain as value_of
from luthier.config.peers import DEFAULTS, DrawnAnswers, axolotl_rows, read_metric, share_as_deepspeed, trl, trl_rows
from luthier.config.peers.translation import OUR_SECTIONS, Peer, Translator, names_of
from luthier.writing import JsonObject, counted

_MARKS = frozenset({"datasets", "pretraining_dataset", "sequence_len", "micro_batch_size", "num_epochs", "plugins"})
_SIMPLE_NAME = re.compile(r"[\w.-]+")
_PAIRS = {"dpo": None, "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_LORA_KEYS = (
    "lora_model_dir", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear",
    "lora_target_parameters", "lora_modules_to_save", "lora_rank_pattern", "lora_alpha_pattern", "loraplus_lr_ratio",
    "loraplus_lr_embedding", "peft", "peft_use_dora", "peft_use_rslora", "peft_init_lora_weights",
    "peft_layers_to_transform", "peft_layers_pattern", "merge_lora",
)  # fmt: skip


def _is_its(tree: MappingNode) -> bool:
    """True if the tree names a ``base_model`` and has axolotl's flat keys and no section of ours."""
    keys = set(tree.entries)
    return "base_model" in keys and bool(_MARKS & keys) and not OUR_SECTIONS & keys


def _purpose(reading: Translator) -> None:
    """What the file is for. What learns from answers that are drawn in the run is not translated."""
    reading.entries = {key: _number(node) for key, node in reading.entries.items() if value_of(node) is not None}
    reading.fill_in("defaults")
    rl, told = reading.take("rl"), len(reading.problems)
    if rl in ("gdpo", "ebft"):
        what = f"{rl} learns from answers drawn in the run, and is not translated"
        reading.refuse("rl", what, "write it as a run description of Luthier's, with objective: rl (docs/rl.md)")
    elif rl not in (None, False, "", "kto", "grpo", *_PAIRS):
        reading.refuse("rl", f"{rl} is no objective", f"write one of {', '.join(_PAIRS)}, kto, grpo")
    for key, what in (("process_reward_model", "single steps of an answer are not judged"),
                      ("diffusion", "diffusion models are not trained"),
                      ("kd_trainer", "a file that learns from another model's logits is not translated")):  # fmt: skip
        if reading.take(key) not in (None, False):
            hint = "write it as a run description with objective: distill" if key == "kd_trainer" else None
            reading.refuse(key, what, hint)
    for key in ("ebft", "chat_template", "chat_template_jinja", "streaming"):
        reading.take(key)  # read below, where rows ask for it
    for index, name in enumerate(names_of(reading.take("plugins") or [])):
        _plugin(reading, index, name)
    reading.is_no_run = len(reading.problems) > told


def _number(node: Node) -> Node:
    """``500_000`` is a number for the YAML that axolotl reads."""
    if isinstance(node, Scalar) and not node.quoted and re.fullmatch(r"\d+(_\d+)+", node.text):
        return replace(node, value=int(node.text))
    return node


def _plugin(reading: Translator, index: int, name: str) -> None:
    plugins, words = reading.peer.table["plugins"], name.split(".")
    known = next((word for word in words if word in plugins), None)
    if known is None:
        reading.refuse(f"plugins[{index}]", f"{name} is a program of its own, which may change what is trained",
                       "remove the line, if the run does without it")  # fmt: skip
    elif plugins[known]:
        reading.refuse(f"plugins[{index}]", plugins[known])
    else:
        reading.passed["plugins"] = "what they compute is the same here; their own keys say what else they are to do"


def _objective(reading: Translator) -> None:
    rl, is_reward = reading.take("rl"), reading.flag("reward_model")
    of, is_drawn = "reward_model" if is_reward else "rl", rl == "grpo"
    reading.pass_over(() if rl else {"dpo_label_smoothing"}, "it belongs to rl: dpo")
    kinds = "verdicts" if rl == "kto" else "pairs" if is_reward or (rl and not is_drawn) else "answers"
    rows = axolotl_rows.read_data(reading, kinds)
    if is_drawn:
        _drawn(reading)
    elif is_reward:
        reading.set("objective.name", "rm", of)
    elif rl:
        _preferences(reading, str(rl))
    elif rows.formats == {"text"}:
        reading.set("objective.name", "pt", "pretraining_dataset" if "pretraining_dataset" in reading.entries else
                    "datasets[0].type")  # fmt: skip
        reading.set("data.overflow", "split", "sequence_len")
        reading.take("excess_length_strategy")
    if reading.flag("use_eaft"):
        reading.set("objective.loss", "eaft", "use_eaft")
        reading.copy("objective.eaft_alpha", "eaft_alpha")
        reading.take("eaft_k")
        reading.told.append("use_eaft: the entropy of a token is that of all words, not of the eaft_k likeliest")
    if reading.flag("train_on_inputs") and not rl:
        reading.set("template.train_on", "all", "train_on_inputs")
    _lengths(reading, rows)


def _drawn(reading: Translator) -> None:
    """``rl: grpo``: the section ``trl`` has the settings of TRL's trainer."""
    given = _mapping(reading, "trl")
    given = {key: value for key, value in given.items() if value is not None}
    asked, answer = reading.take("sequence_len"), given.get("max_completion_length", DEFAULTS["max_completion_length"])
    if isinstance(asked, int) and isinstance(answer, int):
        reading.set("data.max_length", asked + answer, "sequence_len")  # theirs is the prompt's alone
    rows = reading.take("micro_batch_size"), reading.take("gradient_accumulation_steps") or 1
    reading.read.discard("micro_batch_size")
    reading.take("vllm")
    listed = reading.take("datasets")
    first = listed[0] if isinstance(listed, list) and listed else listed
    found = trl_rows.columns_of(str(first.get("path"))) if isinstance(first, dict) else None
    DrawnAnswers(
        reading=reading, given=given, at=lambda key: f"trl.{key}", rows=rows, rows_key="micro_batch_size",
        plain=found is not None and "prompt" in found.texts,
    ).read()  # fmt: skip


def _preferences(reading: Translator, rl: str) -> None:
    """The loss and its numbers, with the defaults of TRL, which axolotl calls."""
    loss = _PAIRS.get(rl)
    reading.set("objective.name", "kto" if rl == "kto" else "dpo", "rl")
    kinds, _ = reading.take("dpo_loss_type"), reading.take("dpo_loss_weights")
    if kinds is not None and rl == "dpo":
        loss = trl.mixed_losses(reading, "dpo_loss_type", "dpo_loss_weights")
    elif loss is not None:
        reading.set("objective.loss", loss, "rl")
    trl.smooth_pairs(reading, "dpo_label_smoothing", loss or "sigmoid")
    reading.switch("objective.loss", "wpo", "dpo_use_weighting")
    if rl == "dpo":
        reading.copy("objective.sft_weight", "rpo_alpha")
    beta = _mapping(reading, "trl").get("beta")  # it goes before the others, as in axolotl
    given = ["trl"] if beta is not None else [
        key for key in ("rl_beta", "dpo_beta", "orpo_alpha") if reading.take(key) is not None
    ]  # fmt: skip
    if not given:
        reading.fill_in("defaults", "rl")
        given = ["rl_beta"]
    reading.set("objective.beta", reading.take(given[0]) if beta is None else beta, given[0])
    if rl == "simpo":
        reading.fill_in("defaults", "simpo")
        reading.set("objective.gamma", reading.take("simpo_gamma"), "simpo_gamma")
        if share := reading.take("cpo_alpha"):
            reading.set("objective.sft_weight", share, "cpo_alpha")
    if rl == "kto":
        for ours in ("desirable_weight", "undesirable_weight"):
            if weight := reading.take(f"kto_{ours}"):
                reading.set(f"objective.{ours}", weight, f"kto_{ours}")
    reading.switch("objective.reference.source", "precomputed", "precompute_ref_log_probs")


def _lengths(reading: Translator, rows: axolotl_rows.RowsRead) -> None:
    strategy, is_packed = reading.take("excess_length_strategy"), reading.flag("sample_packing")
    if "overflow" not in _entries(reading, "data"):
        ways = {"drop": "drop", "truncate": "truncate", "raise": "error"}
        if strategy is not None and str(strategy) not in ways:
            reading.refuse("excess_length_strategy", f"{strategy} is no way", f"write one of {', '.join(ways)}")
        reading.set("data.overflow", ways.get(str(strategy), "drop"), "excess_length_strategy")
        if "text" in rows.formats:
            reading.told.append("sequence_len: texts over it are dropped beside other rows, where axolotl cuts them")
    reading.set("data.max_drop", 0.5, "sequence_len")  # their runs never stop for rows that are lost
    is_stream = reading.take("pretraining_dataset") is not None
    reading.set("train.packing", "split" if is_stream else "window" if is_packed else "none",
                "pretraining_dataset" if is_stream else "sample_packing")  # fmt: skip


def _mapping(reading: Translator, key: str) -> JsonObject:
    value = reading.take(key)
    if value not in (None, False, "") and not isinstance(value, dict):
        reading.refuse(key, f"this is a mapping, not {value!r}")
    return dict(value) if isinstance(value, dict) else {}


def _entries(reading: Translator, section: str) -> JsonObject:
    node = reading.tree.entries.get(section)
    return dict(node.entries) if isinstance(node, MappingNode) else {}


def _tokens(reading: Translator) -> None:
    """New tokens. A padding token is never learned; the others are those that the template, or a document, ends in."""
    special, plain = _mapping(reading, "special_tokens"), reading.take("tokens") or []
    old = plain if isinstance(plain, dict) else {}
    named = {**old, **special}
    more = names_of(named.pop("additional_special_tokens", None) or [])
    named.pop("pad_token", None)
    added = list(dict.fromkeys([*(str(token) for token in named.values() if token), *more]))
    if added:
        reading.set("model.add_special_tokens", added, "special_tokens" if special else "tokens")
        reading.told.append("special_tokens: tokens that the tokenizer lacks are added; which ones begin and end a "
                            "text, the tokenizer and the template say")  # fmt: skip
    # one that is named in both is a control token, as axolotl adds these first
    if isinstance(plain, list) and (ordinary := [str(token) for token in plain if str(token) not in added]):
        reading.set("model.add_tokens", ordinary, "tokens")


def _adapter(reading: Translator) -> None:
    kind, unfrozen = reading.take("adapter"), reading.take("unfrozen_parameters")
    names, frozen = reading.take("lora_target_modules"), reading.flag("freeze_mm_modules")
    is_pattern = isinstance(names, str) and not _SIMPLE_NAME.fullmatch(names)
    if "processor_type" in reading.entries and not (frozen or unfrozen or (kind and is_pattern)):
        # nothing but this key keeps axolotl from what sees and hears; a pattern says itself where it is
        reading.set("adapter.train_parts", ["language_model", "projector", "tower"], "processor_type")
    if not kind:
        reading.pass_over(_LORA_KEYS, "it belongs to adapter: lora")
        if unfrozen:
            _unfrozen(reading, names_of(unfrozen))
        return
    if kind not in ("lora", "qlora"):
        reading.refuse("adapter", f"{kind} is not there", "write lora or qlora, or nothing to train all weights")
        return
    reading.set("adapter.type", "lora", "adapter")
    if unfrozen:
        reading.passed["unfrozen_parameters"] = "an adapter freezes all weights beside it, here as with axolotl"
    if (folder := reading.take("lora_model_dir")) is not None:
        reading.set("adapter.name_or_path", str(folder), "lora_model_dir")
        others = (key for key in _LORA_KEYS if key not in ("lora_model_dir", "merge_lora", "loraplus_lr_ratio"))
        reading.pass_over(others, "the adapter that goes on says it")
        return
    _targets(reading)
    _loftq(reading)
    reading.copy("train.learning_rates.embedding", "embedding_lr")


def _loftq(reading: Translator) -> None:
    """``peft: {loftq_config: {loftq_bits: 4}}``: the base is quantized, and LoRA begins with what that takes away."""
    given = _mapping(reading, "peft")
    config = given.get("loftq_config")
    if given and (len(given) > 1 or not isinstance(config, dict) or config.get("loftq_bits", 4) != 4):
        reading.refuse("peft", "of axolotl's peft there is loftq_config, with loftq_bits: 4", "remove the rest of it")
    elif given:
        reading.set("model.quantization.type", "nf4", "peft")
        reading.set("adapter.init_lora_weights", "loftq", "peft")


def _targets(reading: Translator) -> None:
    """Modules that LoRA stands in: a list of names, or one regular expression."""
    names, is_all = reading.take("lora_target_modules"), reading.flag("lora_target_linear")
    if is_all or names in ("all-linear", ["all-linear"]):
        reading.set("adapter.target_modules", ["all-linear"], "lora_target_linear" if is_all else "lora_target_modules")
    elif isinstance(names, str) and not _SIMPLE_NAME.fullmatch(names):
        reading.set("adapter.target_modules", [f"regex:{names}"], "lora_target_modules")
    elif names:
        reading.set("adapter.target_modules", names_of(names), "lora_target_modules")
    else:
        reading.told.append("adapter: no modules are named, so LoRA stands in all linear layers")
    numbers, lists = reading.take("peft_layers_to_transform"), reading.take("peft_layers_pattern")
    if numbers in (None, []):
        return
    if isinstance(names, str) and not _SIMPLE_NAME.fullmatch(names) and not is_all:
        reading.refuse("peft_layers_to_transform", "lora_target_modules is a pattern, which names layers itself")
        return
    chosen = ["[^.]+"] if is_all or not names or "all-linear" in names else map(re.escape, names_of(names))
    layers = "|".join(str(number) for number in (numbers if isinstance(numbers, list) else [numbers]))
    # the first number in a name says the layer, or the one behind a name that is given
    before = rf"(?:.*\.)?(?:{'|'.join(names_of(lists))})\." if lists else r"(?:[^.\d][^.]*\.){2,}"
    pattern = rf"regex:{before}(?:{layers})\.(?:.*\.)?(?:{'|'.join(chosen)})"
    reading.set("adapter.target_modules", [pattern], "peft_layers_to_transform")


def _unfrozen(reading: Translator, patterns: list[str]) -> None:
    """Regular expressions that parameters' names begin with, where a dot is a dot unless a plus follows."""
    found = []
    for index, pattern in enumerate(patterns):
        if re.search(r"\[-?\d*:-?\d*\]$", pattern):
            what = f"{pattern}: rows of a parameter are not trained without the others"
            reading.refuse(f"unfrozen_parameters[{index}]", what, "train all of it")
        found.append("regex:" + re.sub(r"\.(?!\+)", r"\.", pattern) + ".*")
    reading.set("adapter.type", "freeze", "unfrozen_parameters")
    reading.set("adapter.freeze_trainable_modules", found, "unfrozen_parameters")


def _quantization(reading: Translator) -> None:
    """bitsandbytes: four bits as nf4, eight as int8."""
    four, eight = reading.flag("load_in_4bit"), reading.flag("load_in_8bit")
    kind, settings = reading.take("adapter"), _mapping(reading, "bnb_config_kwargs")
    of = "load_in_4bit" if four else "load_in_8bit"
    if kind == "qlora" and not four:
        what = "qlora is LoRA beside weights in four bits, and load_in_4bit is not on"
        reading.refuse("adapter", what, "write load_in_4bit: true, or adapter: lora")
    loaded_as = reading.take("model_quantization_config_kwargs")
    if isinstance(loaded_as, dict) and loaded_as.get("dequantize") is True:
        reading.take("model_quantization_config")
        reading.passed["model_quantization_config"] = "weights in mxfp4 or fp8 are read whole, as dequantize asks"
    if not (four or eight):
        return
    reading.set("model.quantization.type", "nf4" if four else "int8", of)
    names = {"bnb_4bit_quant_type": "type", "bnb_4bit_use_double_quant": "double_quantization",
             "bnb_4bit_compute_dtype": "compute_dtype", "llm_int8_skip_modules": "skip_modules"}  # fmt: skip
    for key, value in settings.items():
        if key not in names:
            reading.refuse(f"bnb_config_kwargs.{key}", f"of bitsandbytes' settings there are {', '.join(names)}")
            continue
        value = str(value).removeprefix("torch.") if key == "bnb_4bit_compute_dtype" else value
        reading.set(f"model.quantization.{names[key]}", value, f"bnb_config_kwargs.{key}")


def _precision(reading: Translator) -> None:
    bf16, fp16 = reading.take("bf16"), reading.flag("fp16")
    pure = [key for key in ("bfloat16", "float16", "float32") if reading.flag(key)]
    if bf16 in (True, "true", "full"):
        reading.set("train.precision", "bf16", "bf16")
    elif fp16:
        reading.set("train.precision", "fp16", "fp16")
    elif pure:
        reading.set("train.precision", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[pure[0]], pure[0])
    elif bf16 is False or bf16 == "false":
        reading.set("train.precision", "fp32", "bf16")
    if not reading.take("adapter") and bf16 not in (False, "false") and not fp16:
        reading.told.append("bf16: weights that are trained are kept in fp32 and computed in bf16, where axolotl keeps "
                            "them in bf16; model.dtype: bfloat16 does so")  # fmt: skip
    keeps, moves = reading.take("gradient_checkpointing"), reading.take("activation_offloading")
    if isinstance(keeps, str) and keeps.startswith(("offload", "unsloth")):
        keeps, moves = True, True
    if keeps is not None:
        reading.set("train.gradient_checkpointing", keeps, "gradient_checkpointing")
    if moves not in (None, False) and keeps not in (None, False):
        reading.told.append("gradient_checkpointing: what layers begin with stays on the device, nothing is moved")
    elif moves not in (None, False):
        of = "activation_offloading" if "activation_offloading" in reading.entries else "gradient_checkpointing"
        reading.set("train.offload", ["activations"], of)


def _attention(reading: Translator) -> None:
    """FlashAttention 2 and xformers are taken where they are there: all ways compute the same."""
    flags = {"flash_attention": "flash_attention_2", "flex_attention": "flex_attention", "sdp_attention": "sdpa",
             "eager_attention": "eager", "xformers_attention": "xformers", "sage_attention": "sage"}  # fmt: skip
    value, of = reading.take("attn_implementation"), "attn_implementation"
    for key, name in flags.items():
        if reading.flag(key) and value is None:
            value, of = name, key
    match str(value).removeprefix("kernels-community/"):
        case "None":
            pass
        case "sage" | "fp8" | "sage-attention":
            reading.refuse(of, f"{value} computes attention in few bits, which is not there", "write sdpa")
        case "flash_attention_2" | "xformers":
            reading.passed[of] = "model.attn_implementation: auto takes FlashAttention 2 where it is installed"
        case _ if "/" in str(value):
            reading.passed[of] = "model.attn_implementation: auto takes a kernel that is installed"
        case name:
            reading.set("model.attn_implementation", name, of)
    way = reading.take("experts_implementation")
    if way in ("eager", "batched_mm", "grouped_mm"):
        reading.set("model.experts_implementation", way, "experts_implementation")
    elif way is not None:
        reading.passed["experts_implementation"] = "experts are computed by transformers' own ways"


def _optimizer(reading: Translator) -> None:
    whole, each = reading.take("batch_size"), reading.take("micro_batch_size")
    reading.read.discard("micro_batch_size")
    if whole is not None and "gradient_accumulation_steps" not in reading.entries:
        steps = whole // each if isinstance(whole, int) and isinstance(each, int) and each > 0 else 0
        if steps < 1:
            reading.refuse(
                "batch_size",
                f"{counted(whole, 'row is', 'rows are')} not a multiple of micro_batch_size: {each}",
                "write a multiple of it",
            )
        reading.set("train.gradient_accumulation_steps", max(steps, 1), "batch_size")
    names = {"ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit", "optimi_adamw": "adamw_torch"}
    optimizer = names.get(theirs := str(reading.take("optimizer")), theirs)
    reading.set("train.optim", optimizer, "optimizer")
    if _shares(reading) and reading.flag("torch_compile"):
        reading.passed["torch_compile"] = "a model that devices share is not compiled"
    schedule, lowest = str(reading.take("lr_scheduler")), reading.take("cosine_min_lr_ratio")
    if schedule in ("one_cycle", "rex"):
        reading.refuse("lr_scheduler", f"the schedule {schedule} is not there", "cosine comes nearest")
    elif lowest is not None and schedule == "cosine":
        reading.set("train.lr_scheduler_type", "cosine_with_min_lr", "cosine_min_lr_ratio")
        reading.set("train.lr_scheduler_kwargs.min_lr_rate", lowest, "cosine_min_lr_ratio")
    else:
        reading.set("train.lr_scheduler_type", schedule, "lr_scheduler")
    steps, share = reading.take("warmup_steps"), reading.take("warmup_ratio")
    if steps is not None:
        reading.set("train.warmup_steps", steps, "warmup_steps")
    elif share is not None:
        reading.set("train.warmup_steps", share, "warmup_ratio")
        if "warmup_ratio" in reading.defaults:
            reading.told.append(f"warmup_steps: {share:.0%} of all steps; of more than 3,333, axolotl warms up for 100")
    reading.copy("train.learning_rates.embedding", "embedding_lr")


def _devices(reading: Translator) -> None:
    """How several processes share the model."""
    fsdp, config, shards = reading.take("fsdp"), _mapping(reading, "fsdp_config"), reading.take("dp_shard_size")
    reading.take("fsdp_version")
    if (path := reading.take("deepspeed")) not in (None, "", False):
        share_as_deepspeed(reading, path)
    elif shards == 1:
        reading.passed |= {key: "dp_shard_size is 1: nothing is shared" for key in ("fsdp_config",) if config}
    elif fsdp or config or shards:
        of = "fsdp_config" if config else "fsdp" if fsdp else "dp_shard_size"
        reading.set("runtime.sharding", "fsdp", of)
        settings = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
        if settings.get("activation_checkpointing") and not reading.flag("gradient_checkpointing"):
            reading.set("train.gradient_checkpointing", True, "fsdp_config")
        if settings.get("offload_params"):
            reading.told.append("fsdp_config: nothing is moved to the CPU, which only costs GPU memory")


def _shares(reading: Translator) -> bool:
    node = _entries(reading, "runtime").get("sharding")
    return node is not None and value_of(node) == "fsdp"


def _evaluation(reading: Translator) -> None:
    size, times, steps = reading.take("val_set_size"), reading.take("evals_per_epoch"), reading.take("eval_steps")
    strategy = reading.take("eval_strategy") or reading.take("evaluation_strategy")
    reading.take("evaluation_strategy")
    generates = reading.flag("generate_samples")
    reading.take("greater_is_better")
    is_held_out = bool(size or reading.take("test_datasets"))
    read_metric(reading, {}, is_read=is_held_out)
    if not is_held_out:
        for key in ("eval_batch_size", "early_stopping_patience", "load_best_model_at_end"):
            if reading.take(key):
                reading.passed[key] = "no rows are held out"
    else:
        if size:
            whole = int(size) if isinstance(size, float) and 1 <= size < math.inf else size
            reading.set("data.eval_split", whole, "val_set_size")
        _when(reading, "eval", times, "evals_per_epoch", steps, "eval_steps", strategy, "eval_strategy")
        of = "eval_batch_size" if reading.take("eval_batch_size") else "micro_batch_size"
        reading.set("eval.per_device_eval_batch_size", reading.take(of), of)
        reading.read.discard("micro_batch_size")
        if generates:
            _samples(reading)
    times, steps, when = (reading.take(key) for key in ("saves_per_epoch", "save_steps", "save_strategy"))
    _when(reading, "output", times, "saves_per_epoch", steps, "save_steps", when, "save_strategy")


def _when(reading: Translator, section: str, times: Any, times_key: str, steps: Any, steps_key: str, strategy: Any,
          strategy_key: str) -> None:  # fmt: skip
    """So many times in an epoch, every so many steps, or by a strategy."""
    word = "save_" if section == "output" else ""
    if steps:
        reading.set(f"{section}.{word}strategy", "steps", steps_key)
        reading.set(f"{section}.{word}steps", steps, steps_key)
    elif times:
        epochs = reading.take("num_epochs")
        reading.read.discard("num_epochs")
        is_share = times != 1 and isinstance(times, int) and isinstance(epochs, int | float) and times * epochs > 1
        reading.set(f"{section}.{word}strategy", "steps" if is_share else "epoch", times_key)
        if is_share:
            reading.set(f"{section}.{word}steps", math.floor(1e6 / (times * epochs)) / 1e6, times_key)
    elif strategy is not None:
        value = "no" if strategy is False else strategy
        reading.set(f"{section}.{word}strategy", value, strategy_key)


def _samples(reading: Translator) -> None:
    reading.fill_in("defaults", "generated")
    reading.set("eval.generate_rows", reading.take("num_generation_samples"), "num_generation_samples")
    reading.set("generate.max_new_tokens", reading.take("generation_max_new_tokens"), "generation_max_new_tokens")
    draws = reading.flag("generation_do_sample")
    reading.set("generate.do_sample", draws, "generation_do_sample")
    for key in ("temperature", "top_p", "top_k"):
        if (value := reading.take(f"generation_{key}")) is not None and draws:
            reading.set(f"generate.{key}", value, f"generation_{key}")
    reading.told.append("generate_samples: held-out rows are answered before and after training")


def _folder(reading: Translator) -> None:
    start, goes_on = reading.take("resume_from_checkpoint"), reading.flag("auto_resume_from_checkpoints")
    if start not in (None, "", False, True):
        reading.set("output.resume", str(start), "resume_from_checkpoint")
    elif start is True or goes_on:
        reading.set("output.resume", "auto", "resume_from_checkpoint" if start else "auto_resume_from_checkpoints")
    else:
        reading.told.append("output_dir: a run that is started again goes on from its newest checkpoint; "
                            "output.resume=never begins anew")  # fmt: skip
    trackers = {"use_wandb": "wandb", "use_mlflow": "mlflow", "use_comet": "comet_ml", "use_tensorboard": "tensorboard",
                "use_trackio": "trackio", "use_swanlab": "swanlab"}  # fmt: skip
    used = [key for key in trackers if reading.flag(key)]
    if reading.take("wandb_project") and "use_wandb" not in used and reading.take("use_wandb") is None:
        used.append("wandb_project")
        trackers["wandb_project"] = "wandb"
    if used:
        reading.set("tracking.report_to", [trackers[key] for key in used], used[0])
    for key in ("wandb_name", "mlflow_run_name", "trackio_run_name", "swanlab_experiment_name"):
        if (name := reading.take(key)) and used:
            reading.set("tracking.run_name", str(name), key)


AXOLOTL = Peer(
    name="axolotl",
    file="axolotl.toml",
    is_its=_is_its,
    rules=(_purpose, _objective, _tokens, _adapter, _quantization, _precision, _attention, _devices,
           _optimizer, _evaluation, _folder),
)  # fmt: skip
