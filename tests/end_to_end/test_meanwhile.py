"""Training that begins with the first rows: the same run whatever the store held before, and after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.config.loading import load_config
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import BudgetError, CheckpointError, SourceError
from luthier.loader.feed import Feed, FeedJob, feed_folder, prepares_meanwhile
from luthier.loader.plan import StreamPlan
from luthier.presets import dataset_rows
from luthier.records import Address
from luthier.training.data import open_live_data
from luthier.training.fit import fit_data
from luthier.training.report import RunResult
from luthier.training.report.events import Event, EventListener, Started, StepDone
from luthier.training.trainer import Trainer
from tests.programs import start_program

NUM_ROWS = 400


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [json.dumps(row) for row, _ in zip(dataset_rows("skills", "train"), range(NUM_ROWS), strict=False)]
    lines[3] = "{"  # a row that is lost
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_config(folder: Path, rows: Path, store: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model.name_or_path": "preset:tiny-qwen3",
        "data.train": str(rows),
        "data.max_length": 256,
        "data.store": str(store),
        "data.prepare": "meanwhile",
        "data.workers": 0,
        "train.packing": "window",
        "train.num_train_epochs": 1,
        "train.gradient_accumulation_steps": 4,
        "train.learning_rate": 0.001,
        "output.dir": str(folder / "out"),
        "output.save_strategy": "steps",
        "output.save_steps": 5,
        "tracking.progress": False,
        "runtime.device": "cpu",
        "runtime.threads": 1,
        **changes,
    }
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def run_of(folder: Path, rows: Path, store: Path, **changes: Any) -> RunResult:
    config = load_config(str(write_config(folder, rows, store, **changes)))
    return train(config)


def train(config: RunConfig, *, on_event: EventListener | None = None) -> RunResult:
    torch.set_num_threads(1)
    tokenizer = Encoder.from_config(config).tokenizer
    with Feed.start(FeedJob(config=config, folder=feed_folder(config))) as feed:
        return fit_data(config, tokenizer, lambda: open_live_data(config, feed.reader), on_event=on_event)


@pytest.fixture(scope="module")
def cold(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, Path]:
    """A whole run on an empty store, and the store that it leaves."""
    folder = tmp_path_factory.mktemp("cold")
    return run_of(folder, rows, folder / "store"), folder / "store"


def losses(result: RunResult) -> list[tuple[int, float, float | None, float]]:
    return [(step.step, step.loss, step.grad_norm, step.learning_rate) for step in result.steps]


def test_every_row_is_trained_or_accounted_for(cold: tuple[RunResult, Path]) -> None:
    result, _ = cold
    ledger = result.ledger
    assert ledger["read"] == NUM_ROWS == ledger["trained"] + sum(ledger["quarantined"].values())
    assert sum(ledger["quarantined"].values()) == 1
    assert result.train_data.segments >= NUM_ROWS - 1
    assert result.global_step == result.max_steps == result.steps[-1].step
    assert result.epochs == 1.0
    assert result.steps[-1].learning_rate < 1e-4 < result.steps[len(result.steps) // 2].learning_rate
    quarantine = Path(result.output_dir) / "quarantine.jsonl"
    assert len(quarantine.read_text().splitlines()) == 1


def test_a_finished_run_started_again_trains_no_further(
    cold: tuple[RunResult, Path], rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more steps had been expected than there were."""
    result, store = cold
    monkeypatch.setattr(StreamPlan, "_expected_steps", lambda *_: (10_000, False))
    again = run_of(store.parent, rows, store)
    assert again.resumed_from == f"checkpoint-{result.global_step}"
    assert (again.global_step, again.max_steps) == (result.global_step, result.max_steps)
    assert losses(again) == losses(result)


@pytest.mark.parametrize("expected", [3, 10_000])
def test_a_view_hears_how_many_steps_there_are_once_that_is_known(
    cold: tuple[RunResult, Path], rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: int
) -> None:
    result, store = cold
    monkeypatch.setattr(StreamPlan, "_expected_steps", lambda *_: (expected, False))
    heard: list[Event] = []
    train(load_config(str(write_config(tmp_path, rows, store))), on_event=heard.append)
    (started,) = (event for event in heard if isinstance(event, Started))
    done = [event for event in heard if isinstance(event, StepDone)]
    assert started.max_steps in (expected, result.max_steps) and all(event.step <= event.max_steps for event in done)
    assert (done[-1].step, done[-1].max_steps) == (result.max_steps, result.max_steps)


def test_a_warm_store_gives_the_same_run(cold: tuple[RunResult, Path], rows: Path, tmp_path: Path) -> None:
    result, store = cold
    warm = run_of(tmp_path, rows, store)
    assert losses(warm) == losses(result)
    assert warm.ledger == result.ledger


def test_worker_processes_give_the_same_run(cold: tuple[RunResult, Path], rows: Path, tmp_path: Path) -> None:
    result, store = cold
    warm = run_of(tmp_path, rows, store, **{"runtime.dataloader_num_workers": 2})
    assert losses(warm) == losses(result)


def test_held_out_rows_are_not_trained_on(rows: Path, tmp_path: Path, cold: tuple[RunResult, Path]) -> None:
    _, store = cold
    result = run_of(tmp_path, rows, store, **{"data.eval_split": 50, "train.max_steps": 6, "eval.strategy": "steps"})
    assert result.eval_data is not None and 40 <= result.eval_data.segments <= 60
    assert len(result.evals) >= 2 and result.evals[-1].loss < result.evals[0].loss


def test_a_killed_run_goes_on_with_the_same_steps(cold: tuple[RunResult, Path], rows: Path, tmp_path: Path) -> None:
    result, _ = cold
    config = write_config(tmp_path, rows, tmp_path / "store")
    running = start_program("luthier.__main__", ["train", str(config)], said=tmp_path / "said")
    wait_for(lambda: not running.is_alive() or any((tmp_path / "out").glob("checkpoint-[0-9]*")))
    assert running.pid is not None and running.is_alive(), (tmp_path / "said").read_text()
    feeds = children_of(running.pid)
    running.kill()
    running.join()
    assert feeds
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in feeds))
    resumed = train(load_config(str(config)))
    assert resumed.resumed_from is not None
    assert losses(resumed) == losses(result)
    assert resumed.ledger["read"] == NUM_ROWS
    later = sorted(
        (tmp_path / "out").glob("checkpoint-[0-9]*"), key=lambda path: int(path.name.removeprefix("checkpoint-"))
    )
    # also where the store was deleted in between: the rows are prepared again
    (later[-1] / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "store")
    again = train(load_config(str(config)))
    assert again.resumed_from not in (None, later[-1].name) and losses(again) == losses(result)
    # and not with other rows
    stat = rows.stat()
    rows_kept = rows.read_bytes()
    try:
        rows.write_bytes(rows_kept.replace(b"assistant", b"assistanT", 1))
        os.utime(rows, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size and time
        (later[-1] / "manifest.json").unlink()  # so that there is something to go on from
        with pytest.raises(CheckpointError, match="trained on other rows"):
            train(load_config(str(config)))
    finally:
        rows.write_bytes(rows_kept)
        os.utime(rows, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("ends", ["max_steps", "SIGTERM"])
def test_a_run_that_ends_early_says_which_rows_its_steps_saw(
    cold: tuple[RunResult, Path], rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    taken: dict[int, set[Address]] = {}
    original = Trainer.read_step

    def recorded(self: Trainer, steps: Any) -> Any:
        def watched() -> Any:
            for batches in steps:
                seen = {address for batch in batches for address in batch.addresses}
                taken.setdefault(self.state.global_step + 1, set()).update(seen)
                yield batches

        return original(self, watched())

    def stop(event: Event) -> None:
        if ends == "SIGTERM" and isinstance(event, StepDone) and event.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "read_step", recorded)
    changes: dict[str, Any] = {"train.max_steps": 2} if ends == "max_steps" else {}
    result = train(load_config(str(write_config(tmp_path, rows, cold[1], **changes))), on_event=stop)
    expected = set[Address]().union(*(seen for step, seen in taken.items() if step <= result.global_step))
    ledger = result.ledger
    lost = sum(ledger["quarantined"].values()) + sum(ledger["dropped"].values())
    assert result.global_step == 2 and 0 < len(expected) == ledger["trained"] < NUM_ROWS - 1
    assert ledger["prepared"] == ledger["trained"] + ledger["not_yet_trained"] == ledger["read"] - lost
    assert ledger["read"] <= NUM_ROWS


def test_what_stops_the_feed_stops_training(rows: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(line for row in rows.read_text().splitlines()[4:] for line in (row, "{")))
    with pytest.raises(BudgetError, match="rows are lost"):
        run_of(tmp_path, broken, tmp_path / "store")
    gone = tmp_path / "gone.jsonl"
    gone.write_bytes(rows.read_bytes())
    config = load_config(str(write_config(tmp_path, gone, tmp_path / "store")))
    gone.unlink()
    with pytest.raises(SourceError, match="no such file"):
        train(config)


def test_small_data_is_prepared_before(rows: Path, tmp_path: Path) -> None:
    small = load_config(str(write_config(tmp_path, rows, tmp_path / "store", **{"data.prepare": "auto"})))
    assert not prepares_meanwhile(small)
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(64_000_000)
    config = load_config(str(write_config(tmp_path, large, tmp_path / "store", **{"data.prepare": "auto"})))
    assert prepares_meanwhile(config)


def wait_for(condition: Any, *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]
