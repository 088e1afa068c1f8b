"""What only a process of its own can show: power cuts, exit codes, two ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import exit_codes, start_ranks
from tiny_runs import make_config, make_data, make_segments

from luthier.encoding.tokenizer import Tokenizer
from luthier.training import fit
from luthier.training.fit import fit_data
from luthier.training.processes import lost_ranks
from luthier.training.report import RunResult
from tests.conftest import HANG_SECONDS

Train = Callable[..., RunResult]
DATA = make_data(make_segments(13), make_segments(5, seed=8), weights=(1.0, 1.0))
SAVING = {"train__max_steps": 7, "output__save_strategy": "steps", "output__save_steps": 2}
PROGRAM = Path(__file__).with_name("tiny_process.py")


RANKS = {
    "train__max_steps": None, "train__num_train_epochs": 2, "eval__strategy": "epoch", "output__save_strategy": "epoch",
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "kill_in_step_5": {"changes": SAVING},
    "kill_while_saving": {"changes": SAVING},
    "one_signal": {"changes": {"train__max_steps": 7}},
    "two_signals": {"changes": {"train__max_steps": 7}},
    # and when that run is done, the same two ranks do it again, and one of them is lost
    "quiet": {"changes": {**RANKS, "train__gradient_accumulation_steps": 2}, "ranks": 2, "then": ["lose_rank_1"]},
    "hang_rank_1": {"changes": {**RANKS, "train__gradient_accumulation_steps": 2}, "ranks": 2},
}


@dataclass(frozen=True)
class Ended:
    folder: Path
    codes: list[int]
    errors: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """What became of every job, by mode."""
    root = tmp_path_factory.mktemp("jobs")
    started = {}
    for mode, job in JOBS.items():
        first, *then = (
            {"mode": each, "folder": str(root / each), "changes": job["changes"]}
            for each in (mode, *job.get("then", ()))
        )
        given = json.dumps({**first, "then": then})
        started[mode] = start_ranks(PROGRAM, given, size=job.get("ranks", 1), errors=root / f"{mode}.stderr")
    hanging = started["hang_rank_1"][1]
    started["hang_rank_1"][0].join(HANG_SECONDS)
    hanging.kill()  # nothing else ends it
    codes = {mode: exit_codes(processes) for mode, processes in started.items()}
    return {mode: Ended(root / mode, codes[mode], (root / f"{mode}.stderr").read_text()) for mode in JOBS}


@pytest.mark.parametrize(("mode", "newest"), [("kill_in_step_5", 4), ("kill_while_saving", 2)])
def test_a_killed_run_goes_on_from_the_newest_whole_checkpoint_with_the_same_losses(
    ended: dict[str, Ended], train: Train, tmp_path: Path, tokenizer: Tokenizer, mode: str, newest: int
) -> None:
    whole = train(DATA, folder="whole", **SAVING)
    killed = ended[mode]
    assert killed.codes == [-signal.SIGKILL], killed.errors
    resumed = fit_data(make_config(killed.folder, **SAVING), tokenizer, DATA)
    assert resumed.resumed_from == f"checkpoint-{newest}"
    assert [step.loss for step in resumed.steps] == [step.loss for step in whole.steps]
    assert [step.grad_norm for step in resumed.steps] == [step.grad_norm for step in whole.steps]
    assert not list(killed.folder.glob(".saving-*"))
    weights = Path("model") / "model.safetensors"
    assert (killed.folder / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


@pytest.mark.parametrize(("mode", "checkpoints"), [("one_signal", 1), ("two_signals", 0)])
def test_sigterm_exits_with_143_and_a_second_one_does_not_wait(
    ended: dict[str, Ended], mode: str, checkpoints: int
) -> None:
    assert ended[mode].codes == [143], ended[mode].errors
    assert "SIGTERM: finishing the step, then saving" in ended[mode].errors
    assert len(list(ended[mode].folder.glob("checkpoint-*"))) == checkpoints


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_a_rank_that_is_gone_is_named_by_the_other(ended: dict[str, Ended]) -> None:
    lost = ended["quiet"]
    assert (lost.folder / "model").is_dir(), lost.errors  # the run before ended well
    assert lost.codes == [1, -signal.SIGKILL], lost.errors  # the CLI makes 2 of it: it is no fault of ours
    (told,) = [line for line in lost.errors.splitlines() if "luthier.errors.TrainingError: " in line]
    assert "rank 0 has lost rank 1 (process " in told and "gone without a word" in told


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_a_rank_that_hangs_is_given_up_and_named_by_the_other(ended: dict[str, Ended]) -> None:
    hung = ended["hang_rank_1"]
    assert hung.codes == [1, -signal.SIGKILL], hung.errors
    (told,) = [line for line in hung.errors.splitlines() if "luthier.errors.TrainingError: " in line]
    assert "rank 0 has lost rank 1 (process " in told and "is stopped" in told and "Timed out" in told


def test_ranks_wait_as_long_as_the_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(fit, "PartialState", lambda **settings: given.update(settings))
    fit._set_up_process(make_config(tmp_path))
    assert given["timeout"] == timedelta(minutes=30)
    fit._set_up_process(make_config(tmp_path, runtime__rank_timeout=90))
    assert given["timeout"] == timedelta(seconds=90)


def test_a_rank_is_lost_that_said_so_or_whose_process_is_gone(tmp_path: Path) -> None:
    host, gone = socket.gethostname(), subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    signs: list[dict[str, Any]] = [
        {"host": host, "pid": os.getpid()},
        {"host": host, "pid": gone.pid},
        {"host": host, "pid": gone.pid, "done": True},
        {"host": "another", "pid": gone.pid},  # nobody can see from here
        {"host": "another", "pid": 7, "error": "out of memory"},
    ]
    for rank, sign in enumerate(signs):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(sign))
    (tmp_path / "rank-5.json").write_text("{")
    hanging = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    os.waitpid(hanging.pid, os.WUNTRACED)
    (tmp_path / "rank-6.json").write_text(json.dumps({"host": host, "pid": hanging.pid}))
    found = lost_ranks(tmp_path, 7)
    hanging.kill()
    hanging.wait()
    assert (
        set(found) == {1, 4, 6} and "is stopped" in found[6] and "out of memory" in found[4] and "another" in found[4]
    )


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_ranks_train_as_one_and_one_goes_on_where_two_stopped(
    ended: dict[str, Ended], train: Train, tokenizer: Tokenizer
) -> None:
    """Thirteen rows, four micro-batches a step: the last step of each epoch is smaller, and one rank has a dummy."""
    one = train(DATA, train__gradient_accumulation_steps=4, **RANKS)
    folder = ended["quiet"].folder
    assert (folder / "model").is_dir(), ended["quiet"].errors
    two = RunResult.load(folder)
    assert (one.world_size, two.world_size) == (1, 2)
    assert [s.loss for s in two.steps] == pytest.approx([s.loss for s in one.steps], rel=1e-5)
    assert [s.grad_norm for s in two.steps] == pytest.approx([s.grad_norm for s in one.steps], rel=1e-4)
    assert [s.target_tokens for s in two.steps] == [s.target_tokens for s in one.steps]
    assert [s.tokens for s in two.steps] == [s.tokens for s in one.steps]
    assert [e.loss for e in two.evals] == pytest.approx([e.loss for e in one.evals], rel=1e-5)
    assert [e.num_targets for e in two.evals] == [e.num_targets for e in one.evals]
    for found, expected in zip((*two.steps, *two.evals), (*one.steps, *one.evals), strict=True):
        assert found.loss_by_source == pytest.approx(expected.loss_by_source, rel=1e-5)
        assert found.targets_by_source == expected.targets_by_source
    assert len(two.steps[0].targets_by_source) == 2
    assert two.mixture == one.mixture and [source.rows for source in two.mixture] == [14, 12]
    # half of it again, on one rank
    (folder / "checkpoint-8" / "manifest.json").unlink()
    again = fit_data(make_config(folder, train__gradient_accumulation_steps=4, **RANKS), tokenizer, DATA)
    assert again.resumed_from == "checkpoint-4"
    assert [s.loss for s in again.steps] == pytest.approx([s.loss for s in one.steps], rel=1e-5)
    assert again.mixture == one.mixture
