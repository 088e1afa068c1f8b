"""What axolotl and ms-swift themselves make of small rows (`peer_records.json`), against the same files read here.

The tools are not installed where these tests run, so their output stands in the record, as text with what they learn
between ⟦ and ⟧. Both write the same tokens where a tokenizer has ChatML's; what the template prints behind the last
stop token (a newline, which ms-swift learns) is left out of the comparison, as no prompt shows it.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peer_files import value_of

from luthier.config.loading import load_config_text, load_draft
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import load_tokenizer
from luthier.records import Sample
from luthier.sources import RawRow
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources

RECORDS: dict[str, Any] = json.loads(Path(__file__).with_name("peer_records.json").read_text(encoding="utf-8"))
AXOLOTL = "base_model: preset:tiny-qwen3\nlearning_rate: 1.0e-4\ndatasets:\n- path: rows.jsonl\n"
SWIFT = "model: preset:tiny-qwen3\nuse_hf: true\nlora_rank: 8\ndataset: [{path}]\n"


def rendered(text: str, *overrides: str) -> Iterator[list[str]]:
    """The rows of a file as the model sees them, one text for each answer that is compared."""
    config = load_config_text(text, "theirs.yml", list(overrides), check_paths=False)
    encoder, tokenizer = Encoder.from_config(config), load_tokenizer("preset:tiny-qwen3")
    for source in open_sources(resolve_sources(config.data)[0], seed=0):
        for row in source.rows():
            (sample,) = encoder.encode_many([source.convert(row) if isinstance(row, RawRow) else row])
            assert isinstance(sample, Sample), sample
            yield [marked(tokenizer, list(ids), list(target)) for ids, target in sample.unroll()]


def marked(tokenizer: Any, ids: list[int], target: list[bool]) -> str:
    text, start = "", 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or target[end] != target[start]:
            piece = tokenizer.decode(ids[start:end])
            text, start = text + (f"⟦{piece}⟧" if target[start] else piece), end
    return text


def up_to_stop(text: str) -> str:
    return re.sub(r"(<\|im_end\|>)(\n+)⟧", r"\1⟧\2", text).rstrip("\n")


def theirs(record: dict[str, Any]) -> list[list[str]]:
    return [[up_to_stop(text) for text in texts] for texts in record["expected"]]


def rows_file(folder: Path, record: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in record["rows"]), encoding="utf-8")
    return path


@pytest.mark.parametrize("record", RECORDS["axolotl"], ids=lambda record: record["name"])
def test_rows_are_those_of_axolotl(tmp_path: Path, record: dict[str, Any]) -> None:
    file = "".join(f"{line}\n" for line in record["file"].split("\n") if not line.startswith(("sequence_len", "optim")))
    text = AXOLOTL.replace("rows.jsonl", str(rows_file(tmp_path, record))) + textwrap.indent(record["dataset"], "  ")
    found = list(rendered(f"{text}\nsequence_len: 2048\n{file}"))
    assert [[up_to_stop(text) for text in texts] for texts in found] == theirs(record)


@pytest.mark.parametrize("record", RECORDS["ms-swift"], ids=lambda record: record["name"])
def test_rows_are_those_of_ms_swift(tmp_path: Path, record: dict[str, Any]) -> None:
    text = SWIFT.format(path=rows_file(tmp_path, record)) + "max_length: 2048\n" + record["file"]
    assert [[up_to_stop(text) for text in texts] for texts in rendered(text)] == theirs(record)


@pytest.mark.parametrize(("tool", "lines", "said"), [
    ("axolotl", "  type: chat_template\n", "an opening <think>"),
    ("axolotl", "  type: chat_template\ntrain_on_inputs: true\n", "headers of messages are learned"),
    ("axolotl", "  type: chat_template\n  message_field_training: train\n", "with its header"),
    ("axolotl", "  type: 'alpaca:chat'\n", "without axolotl's heading and introduction"),
    ("axolotl", "  type: alpaca_chat.load_concise\n", "without axolotl's heading and introduction"),
    ("axolotl", "  type: alpaca_w_system.load_instruct\n", "without axolotl's heading and introduction"),
    ("axolotl", "  type: {field_output: answer}\n", "an input follows its instruction"),
    ("axolotl", "  type: {format: 'Q: {instruction} A:'}\n", "rows without an input are written by it"),
    ("axolotl", "  type: input_output\ntrain_on_inputs: true\n", "only segments whose label is true"),
    ("axolotl", "  type: completion\npretraining_dataset: rows.jsonl\n", "a text ends in its stop token"),
    ("ms-swift", "", "an empty thought"),
    ("ms-swift", "val_dataset: [held.jsonl#9]\n", "where ms-swift repeats them"),
    ("ms-swift", "rlhf_type: dpo\nloss_scale: default\n", "the last answer is judged"),
    ("ms-swift", "preserve_thinking: true\n", "where thoughts stand"),
    ("ms-swift", "add_non_thinking_prefix: false\n", "where thoughts stand"),
    ("ms-swift", "torch_dtype: float32\n", "computes in fp16"),
])  # fmt: skip
def test_what_the_tools_do_otherwise_is_told(tmp_path: Path, tool: str, lines: str, said: str) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text((AXOLOTL if tool == "axolotl" else SWIFT.format(path="rows.jsonl")) + lines, encoding="utf-8")
    translation = load_draft(file, check_paths=False).translation
    assert translation is not None and any(said in line for line in translation.told), translation


SWIFT_PT = "model: preset:tiny-qwen3\nuse_hf: true\nlora_rank: 8\ncolumns: {body: response}\n"


def test_pretraining_rows_of_one_column_are_texts(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"rows": [{"body": "The red planet is Mars."}]})
    (texts,) = rendered(f"{SWIFT_PT}dataset: [{path}]\n", "objective.name=pt")
    assert texts == ["⟦The red planet is Mars.<|im_end|>⟧"]  # ms-swift 4.6.0, PretrainArguments


def test_the_section_trl_says_beta_before_rl_beta() -> None:
    text = AXOLOTL + "  type: chatml.intel\nrl: dpo\nrl_beta: 0.5\ntrl: {beta: 0.05}\n"
    assert value_of(text, "objective.beta") == 0.05  # axolotl 0.19.0, core/builders/rl.py


@pytest.mark.parametrize(("tool", "lines", "defaults"), [
    (tool, lines, defaults) for tool, cases in RECORDS["defaults"].items() for lines, defaults in cases.items()
])  # fmt: skip
def test_defaults_are_those_of_the_tools(tool: str, lines: str, defaults: dict[str, object]) -> None:
    text = (
        AXOLOTL if tool == "axolotl" else SWIFT.format(path="rows.jsonl").replace("lora_rank: 8\n", "packing: false\n")
    )
    found = {key: value_of(text + lines, key) for key in defaults}
    assert found == defaults
