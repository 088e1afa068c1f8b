"""A file of ms-swift 2 (``swift sft|pt|rlhf``, its names and defaults) -> the tree of a run description.

`_old` writes the file as ms-swift has it today, by the renamed keys and the defaults of ``swift_v2.toml``; the
functions of `swift` read it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from luthier.config import MappingNode, Scalar, plain
from luthier.config.peers import config_of, translation
from luthier.config.peers.swift import SWIFT

_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "AUTO": "auto"}
_OF_PAIRS = ("ref_model", "sft_beta", "rpo_alpha", "simpo_gamma", "beta")  # keys that a file for rlhf alone has
_VARIES = (  # keys without a value, and what versions before the last took them for
    ("lr_scheduler_type", "linear"), ("adam_beta2", "0.999"), ("max_grad_norm", "0.5"),
)  # fmt: skip


def _is_its(tree: MappingNode) -> bool:
    """True for the keys that the second version alone has, where nothing is of ours or of another tool."""
    keys = set(tree.entries)
    named = "model_id_or_path" in keys or ({"sft_type", "model_type"} <= keys and "model" not in keys)
    return named and not keys & translation.OUR_SECTIONS


def _old(reading: translation.Translator) -> None:
    """What has another meaning under today's name."""
    if "model" not in reading.entries:
        reading.stop("model_type", "this is a name of ms-swift 2's own list of models, which is not read",
                     "add model_id_or_path, the model's folder or its name on the hub")  # fmt: skip
        return
    config = config_of(str(_said(reading, "model")))
    if {"vision_config", "audio_config", "visual"} & config.keys():
        reading.stop("model", "what ms-swift 2 trains of a model that sees or hears depends on its version",
                     "write the file with the names of today: model, tuner_type, freeze_vit …")  # fmt: skip
        return
    if _said(reading, "objective") in ("pt", {"name": "pt"}) and "tuner_type" not in reading.entries:
        what = "swift pt has other defaults than swift sft, which are not read"
        reading.refuse("sft_type", what, "write sft_type: full, if all weights are to be trained")
    _pass_in_silence(reading)
    _numbers(reading)
    _sets(reading)
    _targets(reading, str(config.get("model_type", "")))
    _pairs(reading)
    changed = [f"{key} {value}" for key, value in _VARIES if key not in reading.entries]
    if changed:
        reading.told.append(f"defaults are those of ms-swift 2.6; versions before it had {', '.join(changed)}")


def _said(reading: translation.Translator, key: str) -> object:
    return plain(reading.entries[key]) if key in reading.entries else None


def _write(reading: translation.Translator, key: str, value: object) -> None:
    """A key of the file gets another value, in its place."""
    reading.entries[key] = translation.node_of(value, reading.where(key))


def _pass_in_silence(reading: translation.Translator) -> None:
    """Values that say what holds anyway."""
    for key, values in (("template", ("AUTO", None)), ("agent_template", ("react_en", None)), ("quant_bits", (0, None)),
                        ("init_weights", ("true", None)), ("bnb_4bit_compute_dtype", ("AUTO", None)),
                        ("max_length", (-1, None))):  # fmt: skip
        if key in reading.entries and _said(reading, key) in values:
            del reading.entries[key]
    if "model_type" in reading.entries:
        reading.passed["model_type"] = "model_id_or_path names the model"
        reading.take("model_type")


def _numbers(reading: translation.Translator) -> None:
    """Types, attention, DeepSpeed's names, and how often is saved."""
    for key in ("torch_dtype", "bnb_4bit_compute_dtype"):
        if (kind := str(_said(reading, key))) in _TYPES:
            _write(reading, key, _TYPES[kind])
    if reading.flag("use_flash_attn"):
        node = reading.entries["use_flash_attn"]
        assert isinstance(node, Scalar), node
        reading.entries["attn_impl"] = replace(node, value="flash_attn", text="flash_attn")
    shared = _said(reading, "deepspeed")
    if isinstance(shared, str) and shared.startswith(("default-zero", "zero2-", "zero3-")):
        _write(reading, "deepspeed", shared.removeprefix("default-").replace("-", "_"))
    if _said(reading, "truncation_strategy") == "truncation_left":
        _write(reading, "truncation_strategy", "left")
    if "save_steps" not in reading.entries and "eval_steps" in reading.entries:
        reading.entries["save_steps"] = reading.entries["eval_steps"]
    share = _said(reading, "freeze_parameters")
    if isinstance(share, float | int) and share:
        reading.refuse("freeze_parameters", reading.peer.table["missing"]["freeze_parameters_ratio"])
        reading.take("freeze_parameters")


def _sets(reading: translation.Translator) -> None:
    """Data sets by the names of its list, files of their own key, and samples of one set."""
    files = translation.names_of(reading.take("custom_train_dataset_path") or [])
    names = [*_names(reading, "dataset"), *files]
    count = reading.take("train_dataset_sample")
    if isinstance(count, int) and count >= 0 and names:
        if len(names) > 1 or "#" in names[0]:
            reading.refuse("train_dataset_sample", "a number of rows is one of a single data set",
                           "write it behind each name: dataset: [NAME#1000]")  # fmt: skip
        names = [f"{names[0]}#{count}", *names[1:]]
    held = reading.take("val_dataset_sample")
    if isinstance(held, int) and held >= 0:
        reading.refuse("val_dataset_sample", "held-out rows are all rows of val_dataset, or a share of dataset",
                       "write val_dataset: [NAME#COUNT], or dataset_test_ratio")  # fmt: skip
    for key, listed in (("dataset", names), ("val_dataset", _names(reading, "val_dataset"))):
        if listed:
            if key not in reading.entries:
                reading.entries[key] = reading.entries["custom_train_dataset_path"]
            named: list[object] = [_full_name(reading, key, each) for each in listed]
            _write(reading, key, named if len(named) > 1 else named[0])
    if not names:
        reading.stop("dataset", "no data set is named", "add dataset: [rows.jsonl]")


def _names(reading: translation.Translator, key: str) -> list[str]:
    said = _said(reading, key)
    return [] if not said else translation.names_of(said)


def _full_name(reading: translation.Translator, key: str, text: str) -> str:
    known: dict[str, str] = reading.peer.table["datasets"]
    name, mark, count = text.partition("#")
    plain_name = name.removeprefix("HF::").removeprefix("MS::")
    if plain_name in known:
        return known[plain_name] + mark + count
    if (
        "/" not in plain_name
        and not Path(plain_name).suffix
        and not Path(plain_name).exists()
        and ":" not in plain_name
    ):
        reading.refuse(key, f"{plain_name} is a name of ms-swift 2's own list of data sets, of which Luthier knows "
                       f"{', '.join(known)}", "write its name on ModelScope, OWNER/NAME, or a file")  # fmt: skip
    return text


def _targets(reading: translation.Translator, model_type: str) -> None:
    """``DEFAULT`` is what ms-swift 2 listed for the model; ``ALL`` are all linear layers but the output layer."""
    kind = str(_said(reading, "tuner_type") or "lora")
    if kind not in ("lora", "vera"):
        return
    key = "target_modules"
    names = _names(reading, key) or ["DEFAULT"]
    found: list[str] = []
    for name in names:
        if name.upper() == "ALL":
            found.append("all-linear")
        elif name.upper() in ("DEFAULT", "AUTO"):
            found += _listed(reading, key, model_type)
        elif name.upper() == "EMBEDDING":
            reading.refuse(key, "LoRA beside an embedding is not there", "write lora_modules_to_save: [embed_tokens]")
        else:
            found.append(name)
    if "target_regex" not in reading.entries:
        _write(reading, key, found)


def _listed(reading: translation.Translator, key: str, model_type: str) -> Sequence[str]:
    table: dict[str, list[str]] = reading.peer.table["default_targets"]
    for names, models in table.items():
        if model_type in models:
            reading.told.append(f"lora_target_modules: DEFAULT is {names.replace(' ', ', ')} for {model_type}")
            return names.split()
    said = f"a model of type {model_type}" if model_type else "a model whose config.json is not here"
    reading.refuse(key, f"DEFAULT stands for a list of ms-swift 2, which Luthier does not know for {said}",
                   "write lora_target_modules: [q_proj, k_proj, v_proj], or ALL")  # fmt: skip
    return ()


def _pairs(reading: translation.Translator) -> None:
    """What is compared, and how much of SFT's loss is added to DPO."""
    kind, share = _said(reading, "rlhf_type"), reading.take("sft_beta")
    if kind is None:
        of = next((key for key in _OF_PAIRS if key in reading.entries), None)
        if of is not None:
            reading.stop(of, "this belongs to swift rlhf, and the file does not say what it learns from",
                         "add rlhf_type: dpo")  # fmt: skip
        return
    if kind != "dpo":
        return
    if share is not None and "rpo_alpha" in reading.entries:
        reading.refuse("sft_beta", "rpo_alpha says it, too", "keep one of the two")
    elif isinstance(share, int | float) and 0 <= share < 1:
        if share:  # (1 - b) DPO + b SFT = (1 - b) (DPO + b / (1 - b) SFT)
            reading.entries["rpo_alpha"] = reading.entries["sft_beta"]
            _write(reading, "rpo_alpha", share / (1 - share))
            reading.told.append(f"sft_beta: the whole loss is divided by {1 - share:g}, which leaves Adam's steps as "
                                "they are")  # fmt: skip
    elif share is not None:
        reading.refuse("sft_beta", f"{share} is no share from 0 to below 1")
    elif "rpo_alpha" not in reading.entries:
        what = (
            "how much of SFT's loss is added to DPO's depends on the version of ms-swift 2 where a file does not say it"
        )
        reading.refuse("rpo_alpha", what, "write rpo_alpha: 1.0, or null for none")


SWIFT_2 = translation.Peer(name="ms-swift 2", file="swift_v2.toml", is_its=_is_its, rules=(_old, *SWIFT.rules))
