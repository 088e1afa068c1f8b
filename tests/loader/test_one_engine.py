"""One stream of batches, whatever the size of the files, the state of the store, the ranks, the workers and the way it
is asked for."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier.check.selection import Kind, Selection
from luthier.collation import CollateSettings
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.loader import feed
from luthier.loader.feed import FeedJob, FeedPlace, FeedReader, prepares_meanwhile
from luthier.loader.loader import Loader
from luthier.loader.prefetch import iterate
from luthier.loader.reader import BatchReader
from luthier.loader.settings import load_rows, plan_of_run
from luthier.preparation.prepare import prepare
from luthier.records import Batch
from luthier.training.data import RunData, open_live_data, open_run_data
from luthier.training.folder.run_folder import place_to_feed
from luthier.training.streams import check_rows, loader_state

HOW = CollateSettings(packed=True, pad_token_id=0)
THRESHOLD = 32_000  # bytes, for the 32 MB of feed.BYTES_WORTH_A_FEED
SIZES = {"tiny": 1_000, "below": 31_000, "above": 33_000, "large": 200_000}


@pytest.fixture(autouse=True)
def small_files_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "BYTES_WORTH_A_FEED", THRESHOLD)
    monkeypatch.setattr(feed, "NICENESS", 0)  # it runs in this process


def config_of(folder: Path, size: int, **data: Any) -> RunConfig:
    """A run over a file of so many bytes, with rows that are lost, blank lines and two rows of the same content."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        rng, lines, total = np.random.default_rng(size), [], 0
        while total < size:
            words = " ".join(str(word) for word in rng.integers(0, 999, int(rng.integers(1, 12))))
            turns = [{"role": "user", "content": words}, {"role": "assistant", "content": f"{len(lines) % 97} {words}"}]
            lines.append(json.dumps({"messages": turns}))
            total += len(lines[-1]) + 1
        lines[2:3] = ["{", "", lines[0]]
        rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sections = {"max_length": 64, "store": str(folder / "store"), "workers": 0, "max_drop": 0.5, **data}
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": "preset:tiny-qwen3"},
            "data": {"train": [{"path": str(rows)}], **sections},
            "train": {"packing": "window", "gradient_accumulation_steps": 4, "num_train_epochs": 1.5},
            "output": {"dir": str(folder / "out")},
            "runtime": {"seed": 7},
        }
    )


def prepared_data(config: RunConfig) -> RunData:
    encoder = Encoder.from_config(config)
    return open_run_data(config, prepare(config, encoder), encoder_fingerprint=encoder.fingerprint)


def arriving_data(config: RunConfig, folder: Path, *, after: FeedPlace | None = None) -> RunData:
    folder.mkdir()
    feed._Feeding(FeedJob(config=config, folder=folder, after=after)).run()
    return open_live_data(config, FeedReader(folder, alive=lambda: False))


def digest(batch: Batch) -> str:
    content = hashlib.sha256(repr([str(address) for address in batch.addresses]).encode())
    for tensor in (*batch.model_inputs.values(), batch.labels_BT):
        if hasattr(tensor, "numpy"):
            content.update(tensor.numpy().tobytes())
    return content.hexdigest()


def stream(config: RunConfig, data: RunData, *, ranks: int = 1, workers: int = 0) -> list[str]:
    """The digests of all micro-batches with anything in them, in their order."""
    if ranks > 1:
        accumulation = {"gradient_accumulation_steps": 4 // ranks}
        config = config.model_copy(update={"train": config.train.model_copy(update=accumulation)})
    plan = plan_of_run(config, data.rows, num_ranks=ranks)

    def of_rank(rank: int) -> Iterator[Batch]:
        return iterate(BatchReader(data.rows.store, HOW), plan.micro_batches(rank), num_workers=workers)

    together = zip(*(of_rank(rank) for rank in range(ranks)), strict=True)
    return [digest(batch) for turn in together for batch in turn if batch.addresses]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eval_split", [0, 5])
def test_all_ways_to_a_stream_give_the_same_batches(size: str, eval_split: int, tmp_path: Path) -> None:
    if size == "tiny" and eval_split:
        pytest.skip("ten rows leave nothing to hold out five of")
    config = config_of(tmp_path, SIZES[size], **({"eval_split": eval_split} if eval_split else {}))
    assert prepares_meanwhile(config) == (SIZES[size] > THRESHOLD), "control: both sides of what auto decides"
    cold = arriving_data(config, tmp_path / "cold")
    expected = stream(config, cold)
    assert len(set(expected)) > len(expected) / 2 > 1
    warm, before = arriving_data(config, tmp_path / "warm"), prepared_data(config)
    assert stream(config, warm, ranks=2) == expected
    assert stream(config, before) == stream(config, before, ranks=2) == expected
    of_other_seed = config.model_copy(update={"runtime": config.runtime.model_copy(update={"seed": 8})})
    assert stream(of_other_seed, before) != expected, "control"
    plans = [plan_of_run(config, data.rows, num_ranks=1) for data in (cold, warm, before)]
    assert len({(plan.horizon, plan.is_exact, plan.count_steps()) for plan in plans}) == 1
    assert len({plan.progress(1) for plan in plans}) == 1, "learning rates follow it"
    assert [data.eval is None for data in (cold, before)] == [not eval_split] * 2
    if cold.eval is not None and before.eval is not None:
        held = [[str(data.eval[number].address) for number in range(len(data.eval))] for data in (cold, before)]  # type: ignore[arg-type, index]
        assert held[0] == held[1] and 0 < len(before.eval) <= 5


def test_rows_to_hold_out_are_looked_for_until_all_rows_are_tried(tmp_path: Path) -> None:
    config = config_of(tmp_path, SIZES["tiny"], eval_split=5, max_drop=0.99)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n" * 7 + rows.read_text(encoding="utf-8").partition("\n")[0], encoding="utf-8")
    data = arriving_data(config, tmp_path / "cold")
    assert data.eval is not None and (len(data.eval), len(data.rows)) == (1, 0)
    assert data.eval.ledger.read == 8 and data.rows.ledger.notes == {"held_out": 1}


def test_workers_show_and_the_loader_have_the_same_batches(tmp_path: Path) -> None:
    config = config_of(tmp_path, SIZES["large"])
    data = prepared_data(config)
    expected = stream(config, data)
    assert stream(config, data, workers=1) == stream(config, data, ranks=2, workers=2) == expected
    loader = Loader(
        prepare(config, Encoder.from_config(config)), max_length=64, packing="window", overflow="drop", seed=7,
        gradient_accumulation_steps=4,
    )  # fmt: skip
    of_loader = [digest(batch) for batch in loader if batch.addresses]
    assert of_loader == expected[: len(of_loader)] and len(of_loader) > 0.6 * len(expected)
    assert [digest(batch) for batch in Loader(config, num_workers=0) if batch.addresses] == of_loader
    loaded = load_rows(config)
    planned = list(plan_of_run(config, data.rows, num_ranks=1).micro_batches(0))
    for number in (1, 3, 40):
        views = Selection(kind=Kind.BATCH, number=number, held_out=False).views(loaded)
        shown = [str(segment.address) for view in views for segment in view.segments]
        assert shown == [str(address) for address in planned[number - 1].addresses()]


def test_a_run_that_goes_on_is_fed_from_its_place_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that it needs next come first, those of earlier steps last, and each once."""
    monkeypatch.setattr(feed, "FIRST_PORTION", 64)
    monkeypatch.setattr(feed, "PORTION", 128)
    config = config_of(tmp_path, SIZES["large"])
    config = config.model_copy(update={"train": config.train.model_copy(update={"num_train_epochs": 3})})
    whole = arriving_data(config, tmp_path / "whole")
    plan = plan_of_run(config, whole.rows, num_ranks=1)
    batches = [digest(b) for b in iterate(BatchReader(whole.rows.store, HOW), plan.micro_batches(0), num_workers=0)]
    plan = plan_of_run(config, whole.rows, num_ranks=1)
    done = next(n for n in itertools.count(1) if plan.epoch_after(n) > 1.8)
    state = loader_state(plan, whole, done)
    state.save(make_folder(config.output.dir / f"checkpoint-{done}"))
    after = place_to_feed(config)
    assert after is not None and after.epoch == 1 and after.position > 400
    later = arriving_data(config, tmp_path / "later", after=after)
    resumed = plan_of_run(config, later.rows, num_ranks=1, state=state)
    check_rows(state, loader_state(resumed, later, done), tmp_path)
    assert not later.rows.all_here and len(later.rows) < 0.8 * len(whole.rows), "what came before is not waited for"
    planned = resumed.micro_batches(0, first_step=done)
    rest = [digest(batch) for batch in iterate(BatchReader(later.rows.store, HOW), planned, num_workers=0)]
    assert rest == batches[-len(rest) :] and len(rest) == 4 * (resumed.total_steps - done)
    total = resumed.total_steps
    assert len(resumed.trained_rows(total)) == len(plan.trained_rows(done)) == len(later.rows) == len(whole.rows)
    assert {**later.ledger, "examples": {}} == {**whole.ledger, "examples": {}}, "as they were met"


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
