"""What a value means: as YAML 1.2 says, as a person means it, and never by a guess."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from luthier.config.choices import DATA_PRESETS, MODEL_PRESETS, SCHEDULERS, TRACKERS, Strategy
from luthier.config.explain import nearest, our_name
from luthier.config.loading import load_config, load_config_text
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import RunConfig
from luthier.config.yaml_text import number_meant, read_plain
from luthier.errors import ConfigError
from luthier.presets import dataset_names

GOOD = "model: preset:tiny-qwen3\ndata: {train: preset:skills}\n"


def load(more: str, *overrides: str) -> RunConfig:
    return load_config_text(GOOD + more, "run.yaml", overrides, check_paths=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001), ("1e5", 100000.0), ("1E+5", 100000.0), (".5", 0.5), ("5.", 5.0), ("-.5e1", -5.0),
        ("0", 0), ("-12", -12), ("0x1F", 31), ("0o17", 15), ("true", True), ("FALSE", False),
        ("", None), ("~", None), ("null", None), (".inf", float("inf")), ("-.INF", float("-inf")),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("010", "010"), ("1_000", "1_000"), ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"), ("1e", "1e"), ("e5", "e5"), (".", "."), ("0b1", "0b1"), ("nan", "nan"),
        ("tRUE", "tRUE"), ("٣", "٣"), ("00.5", "00.5"),
    ],
)  # fmt: skip
def test_plain_values_follow_yaml_1_2_and_what_is_in_doubt_is_text(text: str, value: object) -> None:
    assert read_plain(text) == value
    assert type(read_plain(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-4", "1e-4"), ("1,000", "1000"), ("1_000_000", "1000000"), ("10%", "0.1"), ("4k", "4000"), ("true", None),
     ("lots", None), ("1,00", None), ("", None)],
)  # fmt: skip
def test_the_number_that_a_text_was_meant_as(text: str, number: str | None) -> None:
    assert number_meant(text) == number


def test_numbers_are_read_as_a_person_means_them() -> None:
    config = load(
        "train: {learning_rate: 1e-4, max_steps: 1e3, num_train_epochs: 2, warmup_steps: 100.0, weight_decay: .5}"
    )
    train = config.train
    assert (train.learning_rate, train.max_steps, train.num_train_epochs) == (0.0001, 1000, 2.0)
    assert (train.warmup_steps, train.weight_decay) == (100, 0.5)
    assert type(train.max_steps) is int and type(train.num_train_epochs) is float and type(train.warmup_steps) is int


def test_no_is_a_name_where_names_are_and_a_text_where_texts_are() -> None:
    assert load("eval: {strategy: no}").eval.strategy is Strategy.NO
    assert load("output: {save_strategy: no}").output.save_strategy is Strategy.NO
    assert load("tracking: {run_name: no}").tracking.run_name == "no"


def test_shorthands_stand_for_their_sections() -> None:
    config = load("objective: pt\nadapter: lora\ntracking: {report_to: wandb}")
    assert (config.model.name_or_path, config.objective.name, config.adapter.type) == (
        "preset:tiny-qwen3",
        "pt",
        "lora",
    )
    assert config.tracking.report_to == ["wandb"]
    assert [source.path for source in config.data.train] == ["preset:skills"]


def test_anchors_and_merge_keys_work_and_own_keys_win() -> None:
    text = """
model: preset:tiny-qwen3
data:
  train:
  - &base {path: a.jsonl, weight: 2, split: x}
  - {<<: *base, path: b.jsonl}
  - <<: [{split: y, max_rows: 3}, *base]
"""
    sources = load_config_text(text, check_paths=False).data.train
    assert [(s.path, s.weight, s.split, s.max_rows) for s in sources] == [
        ("a.jsonl", 2.0, "x", None),
        ("b.jsonl", 2.0, "x", None),
        ("a.jsonl", 2.0, "y", 3),
    ]


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones() -> None:
    config = load(
        "train: {max_steps: 5}",
        "train.max_steps=6",
        "train.max_steps=7",
        "train.learning_rate=1e-4",
        "model.dtype=float32",
        "data.train[0].path=a.jsonl",
        "data.train.1=b.jsonl",
        "data.train.1.max_rows=9",
        "template.kwargs.enable_thinking=false",
        "adapter=lora",
        "adapter.target_modules=[q_proj, v_proj]",
        "eval.strategy=no",
        "output.save_total_limit=",
    )
    assert (config.train.max_steps, config.train.learning_rate) == (7, 1e-4)
    assert (config.model.name_or_path, config.model.dtype) == ("preset:tiny-qwen3", "float32")
    assert [(source.path, source.max_rows) for source in config.data.train] == [("a.jsonl", None), ("b.jsonl", 9)]
    assert config.template.kwargs == {"enable_thinking": False}
    assert config.adapter.target_modules == ["q_proj", "v_proj"]
    assert config.eval.strategy is Strategy.NO
    assert config.output.save_total_limit is None


def test_overrides_make_what_the_file_leaves_out() -> None:
    overrides = ("data.train[0].path=a.jsonl", "data.train[1]=b.jsonl", "data.use[0]=c", "data.registry=r.json")
    config = load_config_text("model: preset:tiny-qwen3\n", "run.yaml", overrides, check_paths=False)
    assert [source.path for source in config.data.train] == ["a.jsonl", "b.jsonl"]
    assert config.data.use == ["c"]


def test_an_override_of_a_whole_section_clears_what_the_file_said_in_it() -> None:
    assert load("adapter: {type: lora, r: 8}", "adapter=full").adapter == load("").adapter


@pytest.mark.parametrize(
    ("override", "pieces"),
    [
        ("train.lr=1", ("override train.lr=1 train.lr: ", "train.learning_rate")),
        ("train.max_steps=x", ("override train.max_steps=x train.max_steps: ", "whole number", '"x"')),
        ("train", ("override train: ", "not key=value", "for example")),
        ("=1", ("override =1: ", "not key=value")),
        ("train..x=1", ("override train..x=1: ", "not key=value")),
        ("data.train[5].path=x", ("override data.train[5].path=x data.train[5].path: ", "1 is the next free number")),
        ("data.train.path=x", ("override data.train.path=x data.train.path: ", "this is a list")),
        ("data.max_length=1", ("override data.max_length=1 data.max_length: ", "at least 2")),
        ("runtime.seed.x=1", ("override runtime.seed.x=1 runtime.seed: ", "a mapping")),
        ("output.dir=[1", ("override output.dir=[1: ", "not closed")),
        ("output.dir=!!x 1", ("override output.dir=!!x 1: ", "tag")),
        ("model.name_or_path.x=1", ("override model.name_or_path.x=1 model.name_or_path.x: ", "single value")),
        ("a" * 300 + "=1", ("override aaa", "…", "no such section")),
    ],
)
def test_faults_of_overrides_are_told_at_the_override(override: str, pieces: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("", override)
    (line,) = [str(problem) for problem in caught.value.problems]
    assert line.startswith(pieces[0]) and all(piece in line for piece in pieces), line


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("learning_rte", "learning_rate"),
        ("Learning-Rate", "learning_rate"),
        ("learning", "learning_rate"),
        ("xyz", None),
        ("x" * 10_000, None),
        ("", None),
    ],
)
def test_the_nearest_name_is_near(key: str, name: str | None) -> None:
    assert nearest(key, ["warmup_steps", "learning_rate"]) == name


def test_names_of_other_tools_lead_to_keys_that_exist() -> None:
    assert our_name("cutoff_len") == "data.max_length"
    assert our_name("no_tool_calls_it_so") is None


def test_names_of_transformers_are_those_of_the_installed_version() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    trainer_utils = pytest.importorskip("transformers.trainer_utils")
    integrations = pytest.importorskip("transformers.integrations.integration_utils")
    ours = {"muon", "badam", "adam_mini"}
    assert set(OPTIMIZERS) - ours == {name.value for name in training_args.OptimizerNames}
    assert set(SCHEDULERS) == {name.value for name in trainer_utils.SchedulerType}
    assert set(TRACKERS) == set(integrations.INTEGRATION_TO_CALLBACK)


def test_presets_are_those_that_come_with_luthier() -> None:
    presets = Path(__file__).resolve().parents[2] / "luthier" / "presets"
    assert {folder.name for folder in (presets / "models").iterdir() if folder.is_dir()} >= set(MODEL_PRESETS)
    assert set(DATA_PRESETS) == set(dataset_names())


def test_loading_takes_far_below_a_second_and_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    code = (
        "import sys, luthier.config.loading as loading; loading.load_config('run.yaml'); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
    start = time.process_time()
    load_config(tmp_path / "run.yaml")
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize("text", ["# " + "x" * 900_000, "template: {default_system: '" + "x y\n " * 150_000 + "'}"])
def test_a_large_file_is_read_within_seconds(text: str) -> None:
    start = time.process_time()
    load(text)
    assert time.process_time() - start < 10
