"""Files of ms-swift 2 are read by their old names and with their old defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peer_files import keys_refused, value_of

from luthier.config.loading import load_config_text, load_draft
from luthier.config.peers.swift import SWIFT
from luthier.config.peers.swift_v2 import SWIFT_2
from luthier.errors import ConfigError

RUN = "model_id_or_path: preset:tiny-qwen3\ndataset: preset:skills\nsft_type: lora\nlora_target_modules: ALL\n"
DPO = RUN + "rlhf_type: dpo\nrpo_alpha: null\n"
THEIRS = """model_type: qwen2-7b-instruct
model_id_or_path: MODEL
sft_type: lora
template_type: AUTO
dtype: bf16
dataset: alpaca-zh#500 
train_dataset_sample: -1
custom_train_dataset_path: [own.jsonl]
check_dataset_strategy: warning
lora_target_modules: DEFAULT
lora_dropout_p: 0.1
batch_size: 2
eval_steps: 100
use_flash_attn: true
deepspeed: default-zero3
preprocess_num_proc: 4
self_cognition_sample: 0
quantization_bit: 0
"""


def test_a_file_of_theirs_becomes_the_run_that_it_describes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")
    file = tmp_path / "theirs.yaml"
    file.write_text(THEIRS.replace("MODEL", str(tmp_path / "model")), encoding="utf-8")
    draft = load_draft(file, check_paths=False)
    run = draft.config
    assert [(each.path, each.max_rows) for each in run.data.train] == [
        ("modelscope:AI-ModelScope/alpaca-gpt4-data-zh", 500), ("own.jsonl", None),
    ]  # fmt: skip
    assert (run.model.attn_implementation, run.runtime.sharding, run.data.workers) == ("flash_attention_2", "fsdp", 4)
    assert (run.adapter.target_modules, run.adapter.lora_dropout) == (["q_proj", "k_proj", "v_proj"], 0.1)
    assert (run.train.precision, run.train.per_device_train_batch_size, run.eval.steps) == ("bf16", 2, 100)
    assert (run.output.save_steps, run.output.save_total_limit) == (100, 2)
    # defaults that are others today
    assert (run.data.max_length, run.data.eval_split, run.train.num_train_epochs) == (2048, 0.01, 1)
    assert (run.train.warmup_steps, run.train.gradient_accumulation_steps) == (0.05, 8)
    assert draft.translation is not None and draft.translation.peer == "ms-swift 2"
    # what is told of a value names the key that the file has
    assert draft.translation.origins["adapter.lora_dropout"] == "lora_dropout_p"
    assert any("adam_beta2" in line and "ms-swift 2.6" in line for line in draft.translation.told)


def test_lines_of_the_table_name_keys_that_are_there() -> None:
    table: dict[str, Any] = dict(SWIFT_2.table)
    assert table["defaults"]["max_length"] == 2048 and SWIFT.table["defaults"].get("max_length") is None
    assert set(SWIFT.table["passed"]) < set(table["passed"])
    new = set(table["older"].values())
    assert new <= SWIFT.known, new - SWIFT.known


@pytest.mark.parametrize("key", sorted(SWIFT_2.known - SWIFT.known))
def test_every_old_key_has_an_outcome_of_its_own(key: str) -> None:
    """Each is read, told or refused, and none ends in anything else than words."""
    for value in ("true", "1", "0.5", "text", "[a, b]", "null"):
        text = "".join(line for line in RUN.splitlines(True) if line.split(":")[0] != key) + f"{key}: {value}\n"
        try:
            load_config_text(text, "theirs.yaml", check_paths=False)
        except ConfigError as error:
            assert all("no such key" not in problem.what for problem in error.problems), error


@pytest.mark.parametrize(("text", "ours", "value"), [
    (RUN, "adapter.target_modules", ["all-linear"]),
    (RUN, "objective.name", "sft"),
    (RUN + "train_dataset_sample: 20\n", "data.train[0].max_rows", 20),
    (RUN + "truncation_strategy: truncation_left\n", "data.overflow", "keep_answer"),
    (RUN + "max_length: -1\n", "data.max_length", 2048),  # the model's own
    (RUN + "quantization_bit: 4\nbnb_4bit_comp_dtype: fp32\n", "model.quantization.compute_dtype", "float32"),
    (RUN + "quantization_bit: 4\nbnb_4bit_comp_dtype: AUTO\n", "model.quantization.type", "nf4"),
    (RUN + "save_steps: 7\n", "output.save_steps", 7),
    (RUN + "neftune_alpha: 5\n", "train.neftune_noise_alpha", 5),
    (RUN + "lora_lr_ratio: 16\n", "adapter.loraplus_lr_ratio", 16),
    (RUN + "init_lora_weights: pissa\n", "adapter.init_lora_weights", "pissa"),
    (RUN + "use_dora: true\n", "adapter.use_dora", True),
    (RUN.replace("lora\n", "full\n"), "adapter.type", "full"),
    (RUN.replace("lora\n", "full\n"), "train.learning_rate", 1e-5),
    (DPO, "objective.sft_weight", None),
    (DPO + "ref_model_id_or_path: owner/base\n", "objective.reference.name_or_path", "owner/base"),
    (RUN + "rlhf_type: dpo\nsft_beta: 0.2\n", "objective.sft_weight", 0.25),
    (RUN + "rlhf_type: dpo\nsft_beta: 0\n", "objective.sft_weight", None),
    (RUN + "rlhf_type: simpo\n", "objective.beta", 2.0),
])  # fmt: skip
def test_old_keys_become_what_they_mean_here(text: str, ours: str, value: object) -> None:
    assert value_of(text, ours) == value


@pytest.mark.parametrize(("text", "keys"), [
    ("model_type: qwen2-7b-instruct\nsft_type: lora\ndataset: alpaca-zh\n", ["model_type"]),
    (RUN.replace("ALL", "DEFAULT"), ["lora_target_modules"]),  # its config.json is not looked for
    (RUN.replace("ALL", "EMBEDDING"), ["lora_target_modules"]),
    (RUN.replace("preset:skills", "blossom-math-zh#10"), ["dataset"]),
    (RUN.replace("preset:skills", "self-cognition#10"), ["dataset", "data.train"]),
    (RUN.replace("preset:skills", "[a.jsonl, b.jsonl]") + "train_dataset_sample: 9\n", ["train_dataset_sample"]),
    (RUN + "val_dataset_sample: 9\n", ["val_dataset_sample"]),
    (RUN + "rlhf_type: dpo\n", ["rpo_alpha"]),
    (RUN + "rlhf_type: dpo\nsft_beta: 0.1\nrpo_alpha: 1\n", ["sft_beta"]),
    (RUN + "rlhf_type: dpo\nsft_beta: 1\n", ["sft_beta"]),
    (RUN + "sft_beta: 0.1\n", ["sft_beta"]),
    (RUN + "use_loss_scale: true\n", ["use_loss_scale"]),
    (RUN + "self_cognition_sample: 500\n", ["self_cognition_sample"]),
    (RUN.replace("lora\n", "longlora\n"), ["sft_type"]),
    (RUN.replace("lora\n", "full\n") + "freeze_parameters: 0.5\n", ["freeze_parameters"]),
])  # fmt: skip
def test_what_is_wrong_or_missing_is_told_by_the_key_of_the_file(text: str, keys: list[str]) -> None:
    assert keys_refused(text) == keys


def test_pretraining_needs_the_type_that_it_has_another_default_of() -> None:
    assert keys_refused("objective: pt\n" + RUN) != []  # a section of ours
    assert value_of(RUN, "template.chat_template", "objective.name=pt") == "plain"
    with pytest.raises(ConfigError, match="sft_type"):
        load_config_text(RUN.replace("sft_type: lora\n", ""), "theirs.yaml", ["objective.name=pt"], check_paths=False)


def test_models_that_see_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "vision_config": {}}), encoding="utf-8")
    assert keys_refused(RUN.replace("preset:tiny-qwen3", str(tmp_path))) == ["model_id_or_path"]
