"""Rows of token ids are trained as they are, or refused; what cannot be proven of them is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import luthier
from luthier.check.show.token_origins import row_origins
from luthier.check.verify import Check, Method
from luthier.check.verify.run import verify
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import GIVEN_AS_IDS, Encoder
from luthier.errors import RowDropped, RowError, SourceError
from luthier.preparation.prepare import prepare
from luthier.records import Tokenized
from luthier.sources.source import open_sources
from tests.conftest import reason_is

PROMPT, ANSWER, STOP = [10, 11, 12], [13, 14], 2034
IDS = [*PROMPT, *ANSWER, STOP]
ROW = {"input_ids": IDS, "labels": [-100] * 3 + [*ANSWER, STOP]}
MASKED = {"input_ids": IDS, "loss_mask": [0, 0, 0, 1, 1, 1]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return luthier.load_tokenizer("preset:tiny-qwen3")


def config_of(folder: Path, path: Path | list[Any], **data: Any) -> RunConfig:
    tree = {
        "model": {"name_or_path": "preset:tiny-qwen3"},
        "data": {
            "train": path if isinstance(path, list) else str(path),
            "max_length": 16,
            "workers": 0,
            "max_drop": 0.99,
            "store": str(folder / "store"),
        },
        "output": {"dir": str(folder / "out")},
    }
    tree["data"] |= {"workers": 0, "store": str(folder / "store"), **data}
    return RunConfig.model_validate(tree)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        MASKED,
        {**ROW, "loss_mask": [False, False, False, True, True, True]},
        {**MASKED, "attention_mask": [1] * 6, "position_ids": list(range(6)), "length": 6},
        {  # padded on both sides
            "input_ids": [0, 0, *IDS, 0],
            "labels": [-100] * 5 + [*ANSWER, STOP, -100],
            "attention_mask": [0, 0, *[1] * 6, 0],
            "position_ids": [0, 0, *range(6), 0],
        },
        {"input_ids": IDS, "completion_mask": [0, 0, 0, 1, 1, 1.0], "assistant_masks": [0, 0, 0, 1, 1, 1]},
        {**ROW, "seq_lengths": [6]},
    ],
    ids=["labels", "loss_mask", "both", "unpadded", "padded", "trl", "one sequence"],
)
def test_the_ids_without_padding_are_the_sample(row: dict[str, Any], tokenizer: Any) -> None:
    sample = luthier.encode(row, tokenizer)
    assert sample.input_ids.tolist() == IDS
    assert sample.target.tolist() == [False] * 3 + [True] * 3
    assert sample.weight is None and dict(sample.notes) == {GIVEN_AS_IDS: 1}
    weighted = luthier.encode({**row, "weight": 0.5}, tokenizer)
    assert weighted.weight is not None and set(weighted.weight.tolist()) == {0.5}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": [-100] * 5}, "lengths_differ"),
        ({"labels": [*IDS, STOP]}, "lengths_differ"),
        ({"labels": [*IDS[1:], -100]}, "bad_labels"),
        ({"labels": [0] * 6}, "bad_labels"),
        ({"labels": "[1, 2]"}, "bad_labels"),
        ({"labels": [-100] * 5 + [None]}, "bad_labels"),
        ({"loss_mask": [1] * 6}, "bad_labels"),
        ({"loss_mask": [0, 0, 0, 1, 1, 2]}, "bad_loss_mask"),
        ({"loss_mask": [0, 0, 0, 1, 1, "1"]}, "bad_loss_mask"),
        ({"attention_mask": [1, 1, 0, 1, 1, 1]}, "bad_attention_mask"),
        ({"attention_mask": [1, 1, 1, 1, 1, 0]}, "bad_attention_mask"),
        ({"attention_mask": [0] * 6}, "empty"),
        ({"attention_mask": [1] * 5}, "lengths_differ"),
        ({"completion_mask": [0, 0, 0, 1, 1, 1], "assistant_masks": [0, 0, 0, 0, 0, 1]}, "bad_labels"),
        ({"assistant_masks": [0, 0, 0, 1, 1, 2]}, "bad_loss_mask"),
        ({"position_ids": [0, 1, 2, 0, 1, 2]}, "packed_row"),
        ({"seq_lengths": [3, 3]}, "packed_row"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [*IDS[:5], 1.5]}, "bad_input_ids"),
        ({"input_ids": [*IDS[:5], True]}, "bad_input_ids"),
        ({"input_ids": [IDS]}, "bad_input_ids"),
        ({"input_ids": [*IDS[:5], 2**70]}, "bad_input_ids"),
        ({"input_ids": [*IDS[:5], 2**40], "labels": [-100] * 3 + [*ANSWER, 2**40]}, "not_in_vocabulary"),
        ({"input_ids": [-1, *IDS[1:]]}, "not_in_vocabulary"),
    ],
    ids=str,
)
def test_columns_that_are_wrong_or_contradict_each_other_are_refused(
    change: dict[str, Any], reason: str, tokenizer: Any
) -> None:
    with pytest.raises(RowError, check=reason_is(reason)) as refused:
        luthier.encode({**ROW, **change}, tokenizer)
    assert refused.value.field is not None and str(refused.value.address) == "<rows>:1"


@pytest.mark.parametrize(
    "beside",
    [
        {"text": "Hello"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_ids_that_say_what_is_learned_are_taken_before_the_texts_that_they_were_made_of(
    beside: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    assert luthier.encode({**beside, **ROW}, tokenizer).input_ids.tolist() == IDS
    config = config_of(tmp_path, write(tmp_path / "rows.jsonl", {**beside, **ROW}, {**beside, **MASKED}))
    prepared = prepare(config, Encoder.from_config(config)).train
    assert [prepared[row].target.tolist() for row in range(2)] == [[False] * 3 + [True] * 3] * 2
    objective = "dpo" if "chosen" in beside else "sft"  # without a word on what is learned the texts are meant
    assert luthier.encode({**beside, "input_ids": IDS}, tokenizer, objective=objective).input_ids.tolist() != IDS


def test_media_beside_ids_are_refused(tokenizer: Any) -> None:
    with pytest.raises(RowError, check=reason_is("media_count")) as refused:
        luthier.encode({**ROW, "images": ["a.png"]}, tokenizer)
    assert refused.value.field == "images"
    assert luthier.encode({**ROW, "images": []}, tokenizer).input_ids.tolist() == IDS


def test_rows_in_python_may_hold_arrays_and_tuples(tokenizer: Any) -> None:
    for row in (
        {name: np.array(values, np.int32) for name, values in ROW.items()},
        {name: tuple(values) for name, values in ROW.items()},
        {"input_ids": np.array(IDS), "loss_mask": np.array([0, 0, 0, 1, 1, 1], np.bool_)},
    ):
        assert luthier.encode(row, tokenizer).target.tolist() == [False] * 3 + [True] * 3
    with pytest.raises(RowError, match=r"Tensor: give its list, as by tolist\(\)"):
        luthier.encode({name: torch.tensor(values) for name, values in ROW.items()}, tokenizer)


def test_a_row_of_which_nothing_is_learned_is_dropped(tokenizer: Any) -> None:
    for change in ({"labels": [-100] * 6}, {"weight": 0}):
        with pytest.raises(RowDropped, check=reason_is("no_target")):
            luthier.encode({**ROW, **change}, tokenizer)


def test_they_are_no_pairs(tokenizer: Any) -> None:
    with pytest.raises(RowError, check=reason_is("objective")):
        luthier.encode(ROW, tokenizer, objective="dpo")


def test_slots_of_media_are_refused_as_no_media_come_with_them() -> None:
    encoder = Encoder.from_config(
        RunConfig.model_validate({"model": {"name_or_path": "preset:tiny-qwen3-vl"}, "data": {}})
    )
    (slot,) = encoder.tokenizer.encode_whole(encoder.measurer.slots().tokens["image"]).tolist()
    row = Tokenized(input_ids=np.array([10, slot, 11]), target=np.array([False, False, True]))
    with pytest.raises(RowError, check=reason_is("media_count")):
        encoder.encode(row)
    assert encoder.encode(replace(row, input_ids=np.array([10, 12, 11]))).target.any()


def _jsonl(folder: Path) -> Path:
    return write(folder / "rows.jsonl", ROW, ROW)


def _json(folder: Path) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps([ROW, ROW]))
    return path


def _parquet(folder: Path) -> Path:
    table = pa.table({name: pa.array([values] * 2, pa.list_(pa.int32())) for name, values in ROW.items()})
    pa.parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def _saved(folder: Path) -> Path:
    datasets.Dataset.from_list([MASKED, MASKED]).save_to_disk(str(folder / "saved"))
    return folder / "saved"


@pytest.mark.parametrize("made", [_jsonl, _json, _parquet, _saved])
def test_files_of_every_kind_give_the_same_samples(made: Callable[[Path], Path], tmp_path: Path) -> None:
    config = config_of(tmp_path, made(tmp_path))
    prepared = prepare(config, Encoder.from_config(config)).train
    assert [prepared[row].input_ids.tolist() for row in range(2)] == [IDS, IDS]
    assert prepared[1].target.tolist() == [False] * 3 + [True] * 3


def test_ids_without_a_word_on_what_is_learned_are_learned_whole_where_the_format_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"input_ids": IDS})
    source = {"path": str(path), "format": "tokens"}
    config = config_of(tmp_path, [source])
    assert prepare(config, Encoder.from_config(config)).train[0].target.all()
    refused = config.data.train[0].model_copy(update={"train_on": "all"})
    with pytest.raises(SourceError, match="train_on"):
        open_sources([refused], seed=0)


@pytest.mark.parametrize("named", [{}, {"format": "tokens"}])
@pytest.mark.parametrize("silent", [{"input_ids": IDS}, {"input_ids": IDS, "labels": None}])
def test_a_row_that_does_not_say_what_is_learned_is_refused_where_others_do(
    silent: dict[str, Any], named: dict[str, str], tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", ROW, silent, MASKED)
    config = config_of(tmp_path, [{"path": str(path), **named}])
    prepared = prepare(config, Encoder.from_config(config)).train
    assert dict(prepared.ledger.quarantined) == {"missing_column": 1} and prepared.ledger.prepared == 2
    assert [int(prepared[row].target.sum()) for row in range(2)] == [3, 3]


def test_bad_rows_are_counted_and_the_others_are_verified_as_far_as_that_goes(tmp_path: Path) -> None:
    unended = {"input_ids": IDS[:5], "labels": [-100] * 3 + ANSWER}
    long = {"input_ids": [*PROMPT, *[13] * 20], "loss_mask": [0] * 3 + [1] * 20}
    path = write(tmp_path / "rows.jsonl", ROW, unended, {**ROW, "labels": [0] * 6}, long)
    report = verify(config_of(tmp_path, path))
    assert not report.num_failed_rows and report.methods == {Method.GIVEN: 3}
    assert dict(report.ledger.quarantined) == {"bad_labels": 1} and report.ledger.notes["too_long"] == 1
    assert report.notes["given_runs"] == 3 and report.notes["given_open_runs"] == 2
    checked = {result.check: result.rows_checked for result in report.checks}
    assert checked[Check.IDS_IN_VOCABULARY] == 3 and checked[Check.COMPLETION_TOKENS] == 3
    assert checked[Check.PROMPT_TOKENS] == checked[Check.NO_FORGED_CONTROL] == 0
    (told,) = [warning for warning in report.warnings if "not proven" in warning]
    assert "promise 1" in told and "promise 3" in told
    assert Encoder.from_config(config_of(tmp_path, path)).tokenizer.decode([*ANSWER, STOP]) in unquoted(told)


def unquoted(told: str) -> str:
    """The sentence with the escapes of its quotations undone."""
    return told.encode().decode("unicode_escape")


class _Wrong:
    """Encodes a row of ids otherwise than it says."""

    def __init__(self, encoder: Encoder, **changes: Any) -> None:
        self.encoder, self.changes = encoder, changes

    def encode(self, row: Any) -> Any:
        return replace(self.encoder.encode(row), **self.changes)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"input_ids": np.array([10, 11, 12, 13, 15, STOP], np.int32)}, Check.COMPLETION_TOKENS),
        ({"target": np.array([False, False, True, True, True, True])}, Check.COMPLETION_TOKENS),
        ({"input_ids": np.array([10, 11, 12, 13, 14, 999_999], np.int32)}, Check.IDS_IN_VOCABULARY),
        ({"weight": np.full(6, 0.5, np.float32)}, Check.FINITE_WEIGHTS),
    ],
    ids=["other ids", "other targets", "no ids", "other weights"],
)
def test_a_sample_that_is_not_the_row_is_found(changes: dict[str, Any], check: Check, tmp_path: Path) -> None:
    config = config_of(tmp_path, write(tmp_path / "rows.jsonl", ROW))
    report = verify(config, encoder=_Wrong(Encoder.from_config(config), **changes))
    assert report.violations(check) == 1 and not report.ok


def test_owners_and_windows_are_those_of_any_row(tmp_path: Path) -> None:
    long = {"input_ids": [*PROMPT, *[13] * 20], "loss_mask": [0] * 3 + [1] * 20}
    config = config_of(tmp_path, write(tmp_path / "rows.jsonl", long))
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder).train
    ((origin,),) = row_origins(prepared, [0], encoder, open_sources(config.data.train, seed=0)).values()
    assert origin.finding is None and {owner.field for owner in origin.owners} == {"input_ids"}
    assert len(origin.owners) == 23
