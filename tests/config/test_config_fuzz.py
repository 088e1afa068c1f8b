"""Whatever the text, a configuration or a ConfigError comes of it, in our words."""

from __future__ import annotations

import json
import math

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from luthier.config.loading import PEERS, dump_config, load_config_text
from luthier.config.schema import RunConfig
from luthier.errors import ConfigError
from tests.conftest import examples

FUZZ = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
WHOLE = dump_config(
    RunConfig.model_validate(
        {
            "model": {
                "name_or_path": "preset:tiny-qwen3",
                "config_overrides": {"rope": {"theta": 1e4, "x": [1, None]}},
            },
            "data": {"train": ["preset:skills", {"path": "a.jsonl", "columns": {"messages": "m"}}], "eval": ["b"]},
            "adapter": {"type": "lora", "lora_alpha": 8.0},
        }
    )
)
LINES = WHOLE.splitlines(keepends=True)
SNIPPETS = [
    "{", "}", "[", "]", "'", '"', "\\", "|", ">-", "...", "#", "%", "@", "~", "yes", "010", "1e999", ".nan", "-1", "0",
    "no", "null", "true", "~root/x", "**", "/", "#5", "preset:", "hub:", ":", "*a", "!", "!!x ", '"\\ud800"', '"\\xZZ"',
    "\t", ": ", "- ", "&a ", "<<: ", "---\n", "\n", "  ", "? ", "\0", "\ud7ff", "\ufeff", "\r", "\x85", "1" * 500,
]  # fmt: skip


def read(text: str, name: str = "run.yaml", overrides: tuple[str, ...] = ()) -> None:
    try:
        load_config_text(text, name, overrides)
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            line = str(problem)
            assert problem.where.startswith((name, "override ")) and problem.what
            assert not any(
                leak in line for leak in ("Input should", "pydantic", "Value error", "Extra inputs", "<class")
            )


@given(st.text(max_size=200) | st.text("ab:-{}[]'\"&*!|>%@#, \n\t?~0.e<", max_size=60))
@FUZZ
@example("? - a\n: b")
@example("&a : *a")
@example("{a: [b, {c: d}]")
@example("!<tag:x> a")
@example("- &x [*x]")
@example("a: |1\n")
@example("'\\")
@example("%TAG ! x\n---\n")
def test_any_text_is_read_or_told(text: str) -> None:
    read(text)
    read(text, "run.json")


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 12), st.sampled_from(SNIPPETS) | st.text(max_size=3)),
        min_size=1,
        max_size=4,
    )
)
@FUZZ
def test_a_damaged_description_is_read_or_told(edits: list[tuple[int, int, str]]) -> None:
    text = WHOLE
    for position, length, snippet in edits:
        text = text[:position] + snippet + text[position + length :]
    read(text)


@given(
    order=st.lists(st.integers(0, len(LINES) - 1), min_size=1, max_size=30),
    values=st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=5), min_size=30, max_size=30),
)
@FUZZ
def test_a_description_with_other_values_is_read_or_told(order: list[int], values: list[str]) -> None:
    lines = list(LINES)
    for index, value in zip(order, values, strict=False):
        lines[index] = lines[index].split(":")[0] + ": " + value + "\n"
    read("".join(lines))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    section=st.sampled_from(list(RunConfig.model_fields)),
    key=st.sampled_from(sorted({k for f in RunConfig.model_fields.values() for k in f.annotation.model_fields})),  # type: ignore[union-attr]
    value=JSON_VALUES,
)
@FUZZ
def test_any_value_at_any_key_is_read_or_told(section: str, key: str, value: object) -> None:
    base = {"model": {"name_or_path": "preset:tiny-qwen3"}, "data": {"train": ["preset:skills"]}}
    base[section] = {**base.get(section, {}), key: value}
    read(json.dumps(base), "run.json")
    read(json.dumps({**base, section: value}), "run.json")


LF = "model_name_or_path: preset:tiny-qwen3\nstage: sft\ndataset: a\noutput_dir: o\ntemplate: qwen3\n"
AXOLOTL = "base_model: preset:tiny-qwen3\ndatasets: [{path: preset:skills, type: chat_template}]\nmicro_batch_size: 1\n"
TRL = "model_name_or_path: preset:tiny-qwen3\ndataset_name: preset:skills\noutput_dir: o\n"
SWIFT = "model: preset:tiny-qwen3\ndataset: [preset:skills]\ntrain_type: lora\n"
OTHERS = {"LLaMA-Factory": LF, "axolotl": AXOLOTL, "TRL": TRL, "ms-swift": SWIFT}
THEIR_KEYS = [(peer.name, key) for peer in PEERS if peer.name in OTHERS for key in sorted(peer.known)]


@given(which=st.sampled_from(THEIR_KEYS), value=JSON_VALUES)
@example(("LLaMA-Factory", "cutoff_len"), "none")
@example(("LLaMA-Factory", "tensor_model_parallel_size"), 0)
@example(("axolotl", "batch_size"), [])
@example(("axolotl", "val_set_size"), 1e999)
@example(("TRL", "max_length"), "auto")
@settings(FUZZ, max_examples=examples(100))
def test_any_value_in_a_file_of_another_tool_is_read_or_told(which: tuple[str, str], value: object) -> None:
    tool, key = which
    shown = ".inf" if value == math.inf else json.dumps(value)
    read(f"{OTHERS[tool]}{key}: {shown}\n")


@given(
    key=st.sampled_from(
        ["train.max_steps", "data.train[0]", "data.train.0.path", "model", "adapter", "a.b", "data.train[1].x"]
    )
    | st.text(max_size=12),
    value=st.sampled_from(SNIPPETS) | st.text(max_size=12),
    equals=st.sampled_from(["=", "", "=="]),
)
@FUZZ
def test_any_override_is_taken_or_told(key: str, value: str, equals: str) -> None:
    read(WHOLE, overrides=(key + equals + value,))
