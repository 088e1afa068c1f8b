"""What rows become, kept as digests: who changes an id changes `SAMPLES_VERSION`, and the store of the old ids is left.

The corpus is rows of every format, in every form of file, under every named template and with the models that see and
hear. ``python -m tests.encoding.test_golden_samples`` writes the digests anew, and refuses where they differ at an
unchanged version.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luthier.config.choices import HistoryRendering, RowKind, TrainOn
from luthier.config.inputs import ModelConfig, SourceConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.presets import dataset_names
from luthier.presets.named_templates import template_facts, template_names
from luthier.records import SAMPLES_VERSION, Row, Sample
from luthier.sources.source import open_sources

GOLDEN = Path(__file__).with_name("golden_samples.json")

USER, ANSWER = (
    {"role": "user", "content": "How far is it, café to <sea>?\n"},
    {"role": "assistant", "content": "12 km."},
)
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1.5, "of": ["x", None, True, {"é": "<s>"}]}}}
NAMED = {"type": "function", "function": {"name": "add", "arguments": {"of": "Add: 1.5, Größe"}}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"messages": [USER, ANSWER]},
        {"messages": [{"role": "system", "content": " Be brief. "}, USER, ANSWER, USER, {**ANSWER, "weight": 0.5}]},
        {"messages": [USER, {**ANSWER, "train": False}, USER, {"role": "assistant", "content": "  \tYes  "}]},
        {"messages": [USER, {"role": "assistant", "content": "<think>\nLong.\n</think>\n\nFar."}, USER, ANSWER]},
        {"messages": [USER, {"role": "assistant", "reasoning_content": "Hm.", "content": "Far."}, USER, ANSWER]},
        {"messages": [USER, {"role": "assistant", "content": "Say <|im_end|> or </s> or [INST]."}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "name": "add", "content": '{"sum": 2}'},
                ANSWER,
            ],
            "tools": TOOLS,
        },
        {
            "messages": [USER, {"role": "assistant", "content": "Add: 1.5, Größe", "tool_calls": [NAMED]}, ANSWER],
            "tools": TOOLS,
        },
        {"messages": [ANSWER, USER]},
        {"messages": [USER, USER, ANSWER, ANSWER]},
        {"messages": []},
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "S."},
        {
            "conversations": [
                {"from": "human", "value": "Add 1 and 2"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "It is 3."},
            ],
            "tools": json.dumps([ADD]),
        },
    ],
    "alpaca": [
        {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["Hi", "Hello"]], "system": "Be brief."},
        {"instruction": "Add.", "input": "", "output": ""},
    ],
    "prompt_completion": [{"prompt": "One,", "completion": " two"}, {"prompt": "", "completion": "x"}],
    "text": [{"text": "# Title\n\nA line, and <|im_start|> in it.  \n"}, {"text": ""}],
}
OF_ANOTHER_KIND: dict[RowKind, tuple[str, list[dict[str, Any]]]] = {
    RowKind.PAIR: (
        "preference",
        [
            {"prompt": "Which?", "chosen": "This one.", "rejected": "None"},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": ""}], "margin": 0.5},
            {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "13 km."}]},
        ],
    ),
    RowKind.VERDICT: (
        "feedback",
        [{"prompt": "Which?", "completion": "This.", "label": True}, {"messages": [USER, ANSWER], "label": False}],
    ),
}
LINES = [{"prompt": f'Question {i}, "quoted"', "completion": "yes\nand no" * i} for i in range(7)]


def write_jsonl(path: Path) -> None:
    lines = [json.dumps(row) for row in LINES]
    path.write_text("\n".join([*lines[:3], "", "{broken", *lines[3:]]) + "\n", encoding="utf-8")


def write_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, LINES)).encode(), mtime=0))


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(LINES)


FILES: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": write_jsonl,
    "rows.json": lambda path: path.write_text(json.dumps(LINES, indent=1), encoding="utf-8"),
    "rows.jsonl.gz": write_gzip,
    "rows.csv": write_csv,
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(LINES), path),
    "notes.txt": lambda path: path.write_text("One.\nStill one.\n\nTwo.\r\n\n\nThree.", encoding="utf-8"),
    "notes.md": lambda path: path.write_text("# One\n\ntext\n\n# Two\n", encoding="utf-8"),
}


def digest_of(told: object) -> str:
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def told_of(outcome: Row | Sample | RowError) -> object:
    """All that training sees of a row, or the reason for which it is not trained; not in which folder it stood."""
    if isinstance(outcome, RowError):
        return outcome.reason
    if isinstance(outcome, Sample):
        weight = None if outcome.weight is None else outcome.weight.tolist()
        media = [
            (type(item).__name__, getattr(item, "start", None), getattr(item, "length", None)) for item in outcome.media
        ]
        ids, target = outcome.input_ids.tolist(), outcome.target.tolist()
        return ids, target, weight, outcome.branches, outcome.verdict, outcome.prompt_turns, outcome.notes, media
    return repr(outcome).replace(repr(outcome.address), f"row {outcome.address.row}")


def records(path: Path, **config: Any) -> Iterator[Row | RowError]:
    [source] = open_sources([SourceConfig(path=str(path), **config)], seed=0)
    for row in source.rows():
        try:
            yield row if isinstance(row, RowError) else source.convert(row)
        except RowError as error:
            yield error


def records_of(rows: list[dict[str, Any]], form: str, folder: Path) -> list[Row | RowError]:
    path = folder / f"{form}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return list(records(path, format=form))


def encoded(encoder: Encoder, rows: list[Row | RowError]) -> list[object]:
    read = [row for row in rows if not isinstance(row, RowError)]
    return [told_of(outcome) for outcome in encoder.encode_many(read)]


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """Every case by name, with its digest."""
    for name, write in FILES.items():
        write(folder / name)
        yield f"file {name}", digest_of([told_of(row) for row in records(folder / name)])
    rows = {form: records_of(given, form, folder) for form, given in ROWS.items()}
    pairs = {kind: records_of(given, form, folder) for kind, (form, given) in OF_ANOTHER_KIND.items()}
    for form, read in {**rows, **pairs}.items():
        yield f"format {form}", digest_of([told_of(row) for row in read])

    everything = [row for read in rows.values() for row in read]
    model = ModelConfig(name_or_path="preset:tiny-qwen3")
    control = Encoder(model, TemplateConfig()).tokenizer.control.tokens
    for name in template_names():
        facts = template_facts(name)
        assert facts is not None
        added = ModelConfig(name_or_path="preset:tiny-qwen3", add_special_tokens=facts.missing(control))
        options = TemplateConfig(chat_template=name, now="2026-01-02")
        yield f"template {name}", digest_of(encoded(Encoder(added, options), everything))
    for told in (
        {"train_on": TrainOn.LAST_ASSISTANT},
        {"train_on": TrainOn.ALL},
        {"train_stop": False},
        {"history": HistoryRendering.ONE_RENDERING},
    ):
        options = TemplateConfig.model_validate({"default_system": "Be kind.", **told})
        name = " ".join(f"{key}={value}" for key, value in told.items())
        yield f"options {name}", digest_of(encoded(Encoder(model, options), everything))
    for kind, read in pairs.items():
        yield f"kind {kind}", digest_of(encoded(Encoder(model, TemplateConfig(), kind), read))
    for name in dataset_names():
        senses = {"pictures": "preset:tiny-qwen3-vl", "sounds": "preset:tiny-qwen2-audio"}
        kind = {"preferences": RowKind.PAIR, "feedback": RowKind.VERDICT}.get(name, RowKind.ANSWER)
        encoder = Encoder(ModelConfig(name_or_path=senses.get(name, model.name_or_path)), TemplateConfig(), kind)
        [source] = open_sources([SourceConfig(path=f"preset:{name}")], seed=0)
        read = [source.convert(row) for row in islice(source.rows(), 12) if not isinstance(row, RowError)]
        yield f"preset {name}", digest_of(encoded(encoder, list(read)))


def changed(kept: dict[str, str], found: dict[str, str]) -> list[str]:
    return sorted(name for name in kept.keys() & found.keys() if kept[name] != found[name])


def test_rows_become_what_they_became_when_the_version_was_given(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = dict(cases(tmp_path))
    assert golden["version"] == SAMPLES_VERSION, "write the digests anew: python -m tests.encoding.test_golden_samples"
    assert changed(golden["digests"], found) == [], (
        "rows become other samples than the stores of this version hold: raise SAMPLES_VERSION in luthier/records.py, "
        "then run python -m tests.encoding.test_golden_samples"
    )
    assert found.keys() == golden["digests"].keys()


@pytest.mark.parametrize("field", ["input_ids", "target", "weight", "branches", "verdict"])
def test_a_change_of_anything_that_is_trained_would_be_found(field: str) -> None:
    """The negative control of the digests."""
    encoder = Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig())
    [source] = open_sources([SourceConfig(path="preset:skills")], seed=0)
    sample = encoder.encode(source.convert(next(row for row in source.rows() if not isinstance(row, RowError))))
    others: dict[str, Any] = {
        "input_ids": sample.input_ids + 1,
        "target": ~sample.target,
        "weight": np.full(len(sample.target), 0.5, np.float32),
        "branches": (*sample.branches, *sample.branches),
        "verdict": 1.0,
    }
    assert digest_of(told_of(replace(sample, **{field: others[field]}))) != digest_of(told_of(sample))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = dict(cases(Path(folder)))
    if GOLDEN.exists():
        golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
        names = changed(golden["digests"], found)
        if names and golden["version"] == SAMPLES_VERSION:
            sys.exit(f"raise SAMPLES_VERSION in luthier/records.py first: {len(names)} cases changed: {names}")
    told = {"version": SAMPLES_VERSION, "digests": found}
    GOLDEN.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
