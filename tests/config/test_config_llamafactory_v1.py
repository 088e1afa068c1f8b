"""Files of LLaMA-Factory's newer engine are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peer_files import refused, value_of

from luthier.config import MappingNode, parse_path
from luthier.config.loading import load_config_text
from luthier.config.peers.llamafactory_v1 import LLAMA_FACTORY_V1
from luthier.config.words import schema_at
from luthier.config.yaml_text import parse_yaml
from luthier.errors import ConfigError

RUN = "model: preset:tiny-qwen3\ntrain_dataset: owner/rows\nmicro_batch_size: 1\n"
REFUSED = {
    "train_lora/export_lora.yaml": ["peft_config.export_dir"],
    "train_lora/train_lora_dpo.yaml": ["objective.name"],
}


@pytest.fixture
def files(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Its examples, where it is run: in a folder that has `data`."""
    (tmp_path / "data").symlink_to(shared / "data" / "demo")
    (tmp_path / "examples").symlink_to(shared / "data" / "peers" / "llamafactory" / "examples")
    monkeypatch.chdir(tmp_path)
    folder = Path("examples") / "v1"
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def loaded(text: str, *overrides: str) -> dict[str, Any]:
    return load_config_text(text, "theirs.yaml", overrides, check_paths=False).model_dump(mode="json")


@pytest.mark.shared
def test_every_example_file_is_translated_or_refused_by_the_key_that_says_why(files: dict[str, Path]) -> None:
    assert len(files) == 17
    assert refused(files) == REFUSED


def test_lines_of_the_table_name_keys_that_are_there() -> None:
    keys = LLAMA_FACTORY_V1.table["keys"]
    assert [ours for ours in keys.values() if schema_at(parse_path(ours) or ("?",)) is None] == []


@pytest.mark.parametrize(("text", "ours", "value"), [
    ("", "objective.name", "sft"),
    ("", "train.lr_scheduler_type", "constant"),
    ("", "data.overflow", "keep_answer"),
    ("pref_beta: 0.2\n", "objective.name", "dpo"),
    ("pref_loss: simpo\n", "objective.gamma", 0.5),
    ("pref_loss: orpo\npref_ftx: 0.5\n", "objective.sft_weight", 1.5),
    ("model_class: cls\n", "objective.name", "rm"),
    ("peft_config: {name: lora, r: 4, target_modules: all}\n", "adapter.r", 4),
    ("peft_config: {name: lora}\n", "adapter.lora_alpha", 16),
    ("peft_config: {name: freeze}\n", "adapter.freeze_trainable_layers", 2),
    ("peft_config: {name: lora}\nquant_config: {name: bnb, quantization_bit: 8}\n", "model.quantization.type", "int8"),
    ("dist_config: {name: fsdp2, dcp_path: null}\n", "runtime.sharding", "fsdp"),
    ("dist_config: {name: fsdp2}\noptim_config: {name: muon, momentum: 0.9}\n", "train.optim_args.momentum", 0.9),
    ("batching_strategy: padding_free\n", "train.packing", "window"),
    ("global_batch_size: 8\n", "train.gradient_accumulation_steps", 8),
    ("save_steps: 20\n", "output.save_steps", 20),
])  # fmt: skip
def test_keys_become_what_they_mean_here(text: str, ours: str, value: object) -> None:
    assert value_of(RUN + text, ours) == value


@pytest.mark.parametrize(("text", "where", "key"), [
    ("peft_config:\n  name: lora\n  r: 0\n", "theirs.yaml:6", "peft_config.r"),
    ("peft_config:\n  name: lora\n  colour: red\n", "theirs.yaml:6", "peft_config.colour"),
    ("lr_scheduler_config:\n  name: cosine\n  min_lr: 1\n", "theirs.yaml:6", "lr_scheduler_config.min_lr"),
    ("dist_config:\n  name: fsdp2\n  dcp_path: elsewhere\n", "theirs.yaml:6", "dist_config.dcp_path"),
    ("dist_config:\n  name: fsdp2\n  no_such: 1\n", "theirs.yaml:6", "dist_config.no_such"),
    ("kernel_config: {}\n", "theirs.yaml:4", "kernel_config"),
    ("no_such_key: 1\n", "theirs.yaml:4", "no_such_key"),
])  # fmt: skip
def test_a_fault_names_their_line_and_key(text: str, where: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(RUN + text, "theirs.yaml", check_paths=False)
    assert [(problem.where, problem.key) for problem in caught.value.problems] == [(where, key)]


@pytest.mark.parametrize("text", [
    "model: x\ntrain_dataset: y\n",  # a slip in a file of ours as likely as one of theirs
    "model: x\ndata: {train: y}\ncutoff_len: 5\n",
    "model_name_or_path: x\ndataset: y\ncutoff_len: 5\n",
])  # fmt: skip
def test_files_of_other_tools_are_not_taken_for_it(text: str) -> None:
    tree = parse_yaml(text, "other.yaml").tree
    assert isinstance(tree, MappingNode) and not LLAMA_FACTORY_V1.is_its(tree)


def test_lists_of_data_sets_are_read(tmp_path: Path) -> None:
    turn = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(turn) + "\n", encoding="utf-8")
    (tmp_path / "data.yaml").write_text(
        f"one: {{path: {tmp_path / 'rows.jsonl'}, source: local, converter: sharegpt, size: 5}}\n"
        "two: {path: owner/pairs, split: train_prefs, weight: 0.5}\n",
        encoding="utf-8",
    )
    one, two = loaded(RUN.replace("owner/rows", str(tmp_path / "data.yaml")))["data"]["train"]
    assert (one["path"], one["format"], one["max_rows"]) == (str(tmp_path / "rows.jsonl"), "sharegpt", 5)
    assert (two["path"], two["split"], two["weight"]) == ("hub:owner/pairs", "train_prefs", 0.5)


@pytest.mark.shared
def test_an_example_file_trains(files: dict[str, Path], tmp_path: Path) -> None:
    from luthier.library import train

    result = train(files["train_lora/train_lora_dpo.yaml"], overrides=[
        "model=preset:tiny-qwen3", "train_dataset=data/v1_dpo_demo.jsonl", "objective.name=dpo",
        "max_steps=2", f"output_dir={tmp_path / 'out'}", "cutoff_len=512", "data.first_rows=6", "data.max_drop=0.9",
        "runtime.sharding=none", f"data.store={tmp_path / 'store'}", "tracking.progress=false",
    ])  # fmt: skip
    assert result.exit_code == 0 and len(result.steps) == 2
