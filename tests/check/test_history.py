"""What a template that rewrites history costs is told, and a batch of trees is shown as what the model computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier import encode, load_tokenizer
from luthier.check.plan import history_cost
from luthier.check.show.token_origins import SegmentOrigin
from luthier.check.show.view import show_batch, show_pack
from luthier.collation import CollateSettings
from luthier.config.choices import Overflow
from luthier.config.schema import RunConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.reader import BatchReader
from luthier.loader.settings import train_settings
from luthier.packing.epoch import describe, plan_epoch
from luthier.preparation.segments import SegmentIndex
from luthier.presets import tokenizer_folder
from luthier.records import NOWHERE
from luthier.rendering.blueprint import DIFFERING_ROWS, DIFFERING_TOKENS
from tests.loader.compared_rows import stored

QUESTION, ANSWER, THOUGHT = (
    "and what of it?",
    "well, it is as it was, and it will be so for a long time to come",
    "let me see",
)


@pytest.fixture(scope="module")
def qwen3() -> Tokenizer:
    return load_tokenizer(str(tokenizer_folder("tiny")), chat_template="qwen3")


def row_of(number: int, *, turns: int = 8, thoughts: bool) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        thought = f"<think>\n{THOUGHT} {number}.{turn}\n</think>\n\n" if thoughts else ""
        messages += [
            {"role": "user", "content": f"{QUESTION} {number}.{turn}"},
            {"role": "assistant", "content": f"{thought}{ANSWER} {number}.{turn}"},
        ]
    return {"messages": messages}


def index_of(folder: Path, qwen3: Tokenizer, *, thoughts: bool, max_length: int = 4000, count: int = 6) -> SegmentIndex:
    rows = [row_of(number, thoughts=thoughts) for number in range(count)]
    prepared = stored(folder, [encode(row, qwen3) for row in rows])
    return SegmentIndex(prepared, max_length=max_length, overflow=Overflow.DROP)


def config_of(**train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": "preset:tiny-qwen3"},
            "data": {"max_length": 4000},
            "train": {"packing": "best_fit", **train},
            "output": {"dir": "out"},
        }
    )


@pytest.mark.parametrize(("thoughts", "unrolled"), [(True, 2.0), (False, 3.5)])
def test_rows_of_eight_turns_cost_their_tree(tmp_path: Path, qwen3: Tokenizer, thoughts: bool, unrolled: float) -> None:
    index = index_of(tmp_path, qwen3, thoughts=thoughts)
    found = history_cost(config_of(), index, qwen3.decode)
    assert found is not None and found.is_shared and (found.rows, found.all_rows) == (6, 6)
    assert 1 < found.ratio <= 1.8
    assert found.unrolled / found.text > unrolled
    assert found.habit.startswith("<think>")
    alone = history_cost(config_of(shared_prompts=False), index, qwen3.decode)
    assert alone is not None and alone.ratio == found.unrolled / found.text
    assert "one_rendering" in found.sentence and "6 of 6 rows" in found.sentence
    # the plan counts what is computed
    for config, tokens in ((config_of(), found.shared), (config_of(shared_prompts=False), found.unrolled)):
        plan = plan_epoch(index.table(), train_settings(config), epoch=0)
        assert describe(plan, index.table()).tokens == tokens
    once = [encode(row_of(n, thoughts=thoughts), qwen3, history="one_rendering") for n in range(6)]
    text = sum(len(sample.input_ids) for sample in once)
    assert text <= found.text
    assert sum(dict(sample.notes)[DIFFERING_ROWS] for sample in once) == 6
    assert all(0 < dict(sample.notes)[DIFFERING_TOKENS] < sample.target.sum() for sample in once)


def test_rows_of_one_rendering_and_of_one_turn_cost_nothing(tmp_path: Path, qwen3: Tokenizer) -> None:
    samples = [encode(row_of(1, thoughts=True), qwen3, history="one_rendering")]
    samples.append(encode(row_of(2, turns=1, thoughts=True), qwen3))
    index = SegmentIndex(stored(tmp_path, samples), max_length=4000, overflow=Overflow.DROP)
    assert history_cost(config_of(), index, qwen3.decode) is None


def test_a_tree_longer_than_a_row_is_as_many_trees_as_it_takes(tmp_path: Path, qwen3: Tokenizer) -> None:
    whole = index_of(tmp_path / "whole", qwen3, thoughts=False)
    longest = int(whole.lengths.max())
    index = index_of(tmp_path / "cut", qwen3, thoughts=False, max_length=longest)
    bounds = np.append(np.flatnonzero(index.held == 0), len(index))
    sizes = np.add.reduceat(index.lengths - index.held, bounds[:-1])
    assert sizes.max() <= longest and 6 < len(sizes) < len(index)
    assert index.num_targets.sum() == whole.num_targets.sum(), "each target once"


def test_a_batch_of_trees_is_shown_as_its_sequences_each_with_what_it_shares(tmp_path: Path, qwen3: Tokenizer) -> None:
    index = index_of(tmp_path, qwen3, thoughts=True, count=3)
    settings = train_settings(config_of(per_device_train_batch_size=2))
    plan = plan_epoch(index.table(), settings, epoch=0)
    planned = NumberedRows.of_index(index).of_plan(plan, 0, step=0)
    reader = BatchReader(index.prepared.store, CollateSettings(packed=True, pad_token_id=0), shared=True)
    batch = reader.read(planned)
    assert batch.labels_BT.numel() == 0, "trees"
    shown = show_batch(batch, qwen3, title="batch 1")
    for view, pack in zip(shown, reader.packs(planned), strict=True):
        expected = show_pack(pack, qwen3, title="")
        assert view.tokens == expected.tokens and view.segments == expected.segments
    assert sum(view.num_targets for view in shown) == batch.num_targets
    origin = SegmentOrigin(run=2, num_runs=8, start=0, run_tokens=9, held=5)
    assert "its first 5 tokens" in " ".join(replace(shown[0].segments[0], run=2, num_runs=8, held=origin.held).notes)
    assert str(NOWHERE) != shown[0].segments[0].address
