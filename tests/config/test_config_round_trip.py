"""dump_config, the JSON schema for editors, and docs/config.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luthier.config.inputs import DataConfig, ModelConfig
from luthier.config.loading import dump_config, load_config_text
from luthier.config.schema import RUN_CONFIG, RunConfig
from luthier.config.words import config_schema
from luthier.errors import ConfigError
from luthier.training.folder.run_folder import write_run_config
from scripts.doc_tables import config_reference
from tests.conftest import examples

GOOD: dict[str, Any] = {"model": "preset:tiny-qwen3", "data": {"train": ["preset:skills"]}}
texts = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20)
TRICKY = [
    "no", "Yes", "010", "1e-4", "12:30", "~", "null", "#", "#x", "*x", "&x", "!x", "-", "'", '"', "\\", "{}", "[",
    "%x", "@x", "é😀", "<<", "?", ":", "|", ">", "", " a", "a ", "a: b", "- a", "a\nb", "\n", "\t", "\u2028", "\x85",
    "\ufeff", "\x7f", "0x1F", ".5", ".inf",
]  # fmt: skip
tricky = st.sampled_from(TRICKY)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts | tricky,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | tricky, inner, max_size=3),
    max_leaves=8,
)


@given(
    kwargs=st.dictionaries(texts | tricky, anything, max_size=4),
    system=st.none() | texts | tricky,
    rate=st.floats(1e-9, 10),
    share=st.floats(0, 0.999) | st.integers(0, 10**9),
    columns=st.dictionaries(texts | tricky, texts | tricky, max_size=3),
)
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_dumped_is_read_back_equal(
    kwargs: dict[str, Any], system: str | None, rate: float, share: float, columns: dict[str, str]
) -> None:
    values = {
        "model": {"name_or_path": "preset:tiny-qwen3", "config_overrides": kwargs},
        "data": {"train": ["preset:skills", {"path": "a.jsonl", "columns": columns}], "max_drop": share},
        "template": {"default_system": system, "kwargs": kwargs},
        "train": {"learning_rate": rate, "warmup_steps": share},
    }
    config = RunConfig.model_validate(values)
    assert load_config_text(dump_config(config), check_paths=False) == config


@pytest.mark.parametrize(
    "adapter",
    [
        "full",
        {"type": "lora", "r": 8, "target_modules": ["q_proj"]},
        {"type": "oft"},
        {"type": "freeze", "freeze_trainable_layers": 2},
    ],
)
def test_every_type_of_adapter_is_read_back_with_all_defaults_written_out(adapter: Any) -> None:
    config = RunConfig.model_validate(
        {**GOOD, "adapter": adapter, "eval": {"strategy": "no"}, "output": {"dir": "a b"}}
    )
    dumped = dump_config(config)
    assert "num_train_epochs: 3.0" in dumped and 'strategy: "no"' in dumped
    assert load_config_text(dumped, check_paths=False) == config


EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_description_in_a_runs_folder_is_one_of_the_same_run(example: Path, tmp_path: Path) -> None:
    config = load_config_text(example.read_text("utf-8"), str(example), check_paths=False)
    write_run_config(config, tmp_path)
    written = (tmp_path / RUN_CONFIG).read_text("utf-8")
    assert load_config_text(written, RUN_CONFIG, check_paths=False) == config


def test_what_is_no_plain_value_is_not_dumped() -> None:
    config = RunConfig(model=ModelConfig(name_or_path="x", config_overrides={"a": {1, 2}}), data=DataConfig())
    with pytest.raises(TypeError, match="set cannot be written"):
        dump_config(config)


# ------------------------------------------------------------------------------------------------- schema, reference

ACCEPTED: list[dict[str, Any]] = [
    GOOD,
    {"model": {"name_or_path": "x"}, "data": {"train": "a.jsonl", "eval": {"path": "b"}, "eval_split": 0.1}},
    {**GOOD, "adapter": "lora", "objective": "sft", "tracking": {"report_to": "wandb"}},
    {**GOOD, "adapter": {"type": "lora", "target_modules": "all-linear", "lora_alpha": None, "use_dora": True}},
    {**GOOD, "eval": {"strategy": "no"}, "model": {"name_or_path": "x", "use_liger_kernel": "auto"}},
    {**GOOD, "train": {"warmup_steps": 5, "optim": "sgd"}, "template": {"kwargs": {"a": [1, None]}}},
    {**GOOD, "template": {"targets": {"part": "thinking", "train": False}}},
    {
        **GOOD,
        "template": {"targets": [{"role": "user", "turn": "last", "weight": 2}, {"pattern": "a|b", "train": True}]},
    },
    {**GOOD, "data": {"train": {"path": "a", "targets": [{"weight": 0.5}], "thinking_tags": ["[", "]"]}}},
]
REFUSED: list[dict[str, Any]] = [
    {"model": "x"},
    {**GOOD, "model": ""},
    {**GOOD, "trian": {}},
    {**GOOD, "train": {"lr": 1}},
    {**GOOD, "train": {"learning_rate": "1e-4"}},
    {**GOOD, "train": {"learning_rate": 0}},
    {**GOOD, "train": {"optim": "adamw"}},
    {**GOOD, "adapter": {"type": "LORA"}},
    {**GOOD, "runtime": {"seed": 2**40}},
    {**GOOD, "data": {"train": [5]}},
    {**GOOD, "tracking": {"report_to": ["nobody"]}},
    {**GOOD, "template": {"targets": [{"role": "human", "train": True}]}},
    {**GOOD, "template": {"targets": [{"role": "user", "weight": -0.1}]}},
    {**GOOD, "template": {"targets": [{"turn": 2, "train": True}]}},
    {**GOOD, "template": {"targets": ["thinking"]}},
    {**GOOD, "data": {"train": {"path": "a", "thinking": "off"}}},
]


@pytest.mark.parametrize("values", ACCEPTED)
def test_the_json_schema_and_the_loader_accept(values: dict[str, Any]) -> None:
    assert _fits(values, config_schema())
    RunConfig.model_validate(values)


@pytest.mark.parametrize("values", REFUSED)
def test_the_json_schema_and_the_loader_refuse(values: dict[str, Any]) -> None:
    assert not _fits(values, config_schema())
    with pytest.raises(ValueError):
        RunConfig.model_validate(values)


def test_every_key_of_the_json_schema_is_described() -> None:
    schema = config_schema()
    for name, definition in schema["$defs"].items():
        section = next((part for part in definition.get("anyOf", []) if "properties" in part), definition)
        for key, value in section.get("properties", {}).items():
            described = value if "description" in value else schema["$defs"][value["$ref"].rsplit("/", 1)[1]]
            assert described.get("description"), f"{name}.{key}"


def test_the_committed_reference_is_current() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "config.md"
    assert path.read_text(encoding="utf-8") == config_reference(), "run `make docs`"


def test_the_reference_names_every_key_and_its_example_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = config_reference()
    for section, field in RunConfig.model_fields.items():
        assert f"## `{section}`" in reference
        assert all(f"| `{key}` |" in reference for key in field.annotation.model_fields)  # type: ignore[union-attr]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    example = reference.split("```yaml\n")[1].split("```")[0]
    assert load_config_text(example).data.train[0].path == "rows.jsonl"


def _fits(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """The part of JSON schema that ours uses."""
    root = root or schema
    if "$ref" in schema:
        return _fits(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        return any(_fits(value, part, root) for part in schema["anyOf"])
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    match schema.get("type"):
        case "object":
            known = schema.get("properties", {})
            rest = schema.get("additionalProperties", True)
            return (
                isinstance(value, dict)
                and all(key in value for key in schema.get("required", []))
                and all(_fits(value[key], known[key], root) for key in value if key in known)
                and (rest is not False or value.keys() <= known.keys())
            )
        case "array":
            return isinstance(value, list) and all(_fits(entry, schema["items"], root) for entry in value)
        case "string":
            return isinstance(value, str) and len(value) >= schema.get("minLength", 0)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer" | "number" as kind:
            if isinstance(value, bool) or not isinstance(value, int if kind == "integer" else int | float):
                return False
            above, below = schema.get("exclusiveMinimum", -1e99), schema.get("exclusiveMaximum", 1e99)
            return above < value < below and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case None:
            return True
        case kind:
            raise AssertionError(kind)


def test_a_wrong_dump_would_be_noticed() -> None:
    text = dump_config(RunConfig.model_validate(GOOD))
    with pytest.raises(ConfigError):
        load_config_text(text.replace("max_grad_norm: 1.0", "max_grad_norm: -1.0"), check_paths=False)
    changed = load_config_text(text.replace("seed: 42", "seed: 43"), check_paths=False)
    assert changed != RunConfig.model_validate(GOOD)
