"""Several data sets in one run: losses and counts of each, whether rows are prepared before training or meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.config.loading import load_config_text
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.loader.feed import Feed, FeedJob, feed_folder
from luthier.preparation.prepare import prepare
from luthier.presets import dataset_rows
from luthier.training.data import open_live_data
from luthier.training.fit import fit, fit_data
from luthier.training.report import RunResult

SIZES = {"first": 120, "second": 60, "held_a": 9, "held_b": 12, "held_c": 15}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    rows = dataset_rows("skills", "train")
    found = {}
    for name, size in SIZES.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(next(rows)) + "\n" for _ in range(size)), encoding="utf-8")
        found[name] = str(path)
    return found


def config_of(folder: Path, files: dict[str, str], store: Path, **data: Any) -> RunConfig:
    tree = {
        "model": "preset:tiny-qwen3",
        "data": {
            "train": [files["first"], {"path": files["second"], "weight": 2}],
            "max_length": 256, "store": str(store), "workers": 0, **data,
        },
        "train": {"packing": "window", "num_train_epochs": 1, "gradient_accumulation_steps": 4},
        "eval": {"strategy": "epoch"},
        "output": {"dir": str(folder), "save_strategy": "no"},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu", "threads": 1},
    }  # fmt: skip
    return load_config_text(json.dumps(tree), "run.json")


def run_before(config: RunConfig) -> RunResult:
    torch.set_num_threads(1)
    encoder = Encoder.from_config(config)
    return fit(config, encoder, prepare(config, encoder))


def run_meanwhile(config: RunConfig) -> RunResult:
    torch.set_num_threads(1)
    with Feed.start(FeedJob(config=config, folder=feed_folder(config))) as feed:
        tokenizer = Encoder.from_config(config).tokenizer
        return fit_data(config, tokenizer, lambda: open_live_data(config, feed.reader))


@pytest.mark.parametrize("run", [run_before, run_meanwhile])
def test_losses_and_counts_of_each_data_set_are_reported(run: Any, files: dict[str, str], tmp_path: Path) -> None:
    held_out = [files[name] for name in ("held_a", "held_b", "held_c")]
    result = run(config_of(tmp_path / "out", files, tmp_path / "store", eval=held_out))
    one, two = result.mixture
    assert (one.name, two.name) == (files["first"], files["second"])
    assert (one.rows, two.rows) == (120, 120)
    assert one.tokens + two.tokens == sum(step.tokens for step in result.steps)
    for source in result.mixture:
        assert source.targets == sum(step.targets_by_source.get(source.name, 0) for step in result.steps)
    for record in (*result.steps, *result.evals):
        targets = record.targets_by_source
        mean = sum(record.loss_by_source[name] * targets[name] for name in targets) / sum(targets.values())
        assert mean == pytest.approx(record.loss, rel=1e-6)
    assert [list(one.loss_by_source) for one in result.evals] == [held_out] * len(result.evals)


@pytest.mark.parametrize("run", [run_before, run_meanwhile])
def test_rows_that_are_held_out_keep_their_data_set(run: Any, files: dict[str, str], tmp_path: Path) -> None:
    result = run(config_of(tmp_path / "out", files, tmp_path / "store", eval_split=30))
    assert set(result.evals[0].loss_by_source) == {files["first"], files["second"]}
    held_of_first, held_of_second = 120 - result.mixture[0].rows, 60 - result.mixture[1].rows // 2
    assert held_of_first > 0 and held_of_second > 0 and held_of_first + held_of_second >= 30
