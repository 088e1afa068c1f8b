"""A run's folder on disks that are full, broken, or in layers: what failing each operation in turn does not tell."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from luthier.errors import CheckpointError
from luthier.training.folder import FILES, RunFiles
from luthier.training.folder import checkpoint as checkpoints
from luthier.training.folder.run_folder import open_run_folder
from luthier.training.report import LOG_FILE, EvalRecord
from luthier.training.report.events import LogFile, read_log
from tests.faults.checkpointing import Run
from tests.faults.killing import before_each


def fail(*, at: str, code: int, name: str = ""):
    def before(operation: str, path: Path) -> None:
        if operation == at and name in path.name:
            raise OSError(code, os.strerror(code))

    return before_each(RunFiles, before)


def record(step):
    return EvalRecord(step=step, epoch=0.5, loss=1.0, perplexity=2.0, token_accuracy=0.5, num_targets=9, seconds=1.0)


def test_a_full_disk_is_one_error_with_path_bytes_and_way_out(tmp_path):
    run = Run.begun(tmp_path)
    with fail(at="write", code=errno.ENOSPC, name="manifest"), pytest.raises(CheckpointError) as caught:
        run.go_on()
    text = str(caught.value)
    assert text.startswith(
        f"{tmp_path}/.saving-checkpoint-15/manifest.json cannot be written: No space left on device ("
    )
    assert "bytes are free there)" in text and "hint: free space there" in text
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-10"]
    run.go_on()
    assert run.faults(ended=True) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_line_of_the_log_that_does_not_fit_is_told(tmp_path):
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"log\.jsonl cannot be written: No space left"):
        FILES.append(tmp_path / LOG_FILE, b"{}\n")


def test_half_a_line_that_was_written_before_the_disk_was_full_is_taken_back(tmp_path, monkeypatch):
    log = LogFile(tmp_path / LOG_FILE, step=-1)
    log(record(1))
    real = os.write

    def full(descriptor, content):
        if len(content) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content[:-20])

    with monkeypatch.context() as patch, pytest.raises(CheckpointError):
        patch.setattr(os, "write", full)
        log(record(2))
    log(record(3))
    assert [line.step for line in read_log(tmp_path / LOG_FILE)[1]] == [1, 3]


def test_a_disk_that_takes_little_at_a_time_gets_everything(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[:7]))
    FILES.write(tmp_path / "file", bytes(range(256)))
    FILES.append(tmp_path / "file", b"and more of it")
    assert (tmp_path / "file").read_bytes() == bytes(range(256)) + b"and more of it"


@pytest.mark.parametrize("operation", ["mkdir", "create", "write", "sync", "rename"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(tmp_path, operation):
    run = Run(tmp_path / "run")
    code = errno.EXDEV if operation == "rename" else errno.EROFS
    with fail(at=operation, code=code), pytest.raises(CheckpointError, match=str(tmp_path)) as caught:
        open_run_folder(run.config, print)
    assert operation != "rename" or "two file systems" in str(caught.value)
    open_run_folder(run.config, print)  # control
    assert [path.name for path in run.folder.iterdir()] == ["run_config.json"]


def test_a_checkpoint_in_a_lower_layer_is_deleted_though_it_cannot_be_renamed(tmp_path):
    Run.begun(tmp_path)
    with fail(at="rename", code=errno.EXDEV, name=".removed-"):
        checkpoints.rotate(tmp_path, 1)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-10"]


def test_what_cannot_be_deleted_stops_no_run_counts_for_nothing_and_goes_later(tmp_path):
    Run.begun(tmp_path)
    with fail(at="remove", code=errno.EBUSY, name=".removed-"):
        checkpoints.rotate(tmp_path, 1)
        assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-10"]
        assert len(list(tmp_path.glob(".removed-*"))) == 1
    checkpoints.rotate(tmp_path, 1)
    assert not list(tmp_path.glob(".removed-*"))


def test_broken_checkpoints_do_not_count_when_old_ones_are_deleted(tmp_path):
    run = Run.begun(tmp_path)
    run.save(15)
    run.save(20)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-15", "checkpoint-20"]
    (tmp_path / "checkpoint-20" / "manifest.json").unlink()
    run.save(25)
    # were checkpoint-20 counted, checkpoint-15 would be gone, and one whole one be left of two
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == [
        "checkpoint-15",
        "checkpoint-20",
        "checkpoint-25",
    ]
    said = []
    (tmp_path / "checkpoint-25" / "optimizer.json").write_bytes(b"?")
    assert checkpoints.newest_whole(tmp_path, said.append) == tmp_path / "checkpoint-15"
    assert len(said) == 2


def test_the_final_model_takes_the_place_of_the_one_before_at_once(tmp_path):
    model = tmp_path / "model"
    for weights in (b"first", b"second"):
        with checkpoints.replacing(model) as staging:
            (staging / "weights").write_bytes(weights)
        assert (model / "weights").read_bytes() == weights
    with pytest.raises(CheckpointError), checkpoints.replacing(model) as staging:
        (staging / "weights").write_bytes(b"third")
        raise OSError(errno.ENOSPC, "No space left on device")
    with fail(at="rename", code=errno.EIO, name="model"), pytest.raises(CheckpointError):  # noqa: SIM117
        with checkpoints.replacing(model) as staging:
            (staging / "weights").write_bytes(b"third")
    assert (model / "weights").read_bytes() == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_names_is_replaced_and_the_link_stays(tmp_path, there):
    link, disk = tmp_path / "model", tmp_path / "disk"
    (disk / "mine" if there else disk).mkdir(parents=True)
    link.symlink_to(disk / "mine")
    for weights in (b"first", b"second"):
        with checkpoints.replacing(link) as staging:
            (staging / "weights").write_bytes(weights)
        assert (disk / "mine" / "weights").read_bytes() == weights
    assert link.is_symlink() and [path.name for path in disk.iterdir()] == ["mine"]
    assert {path.name for path in tmp_path.iterdir()} == {"model", "disk"}


def test_of_a_checkpoint_that_was_moved_elsewhere_the_link_is_deleted(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    Run.begun(run)
    (run / "checkpoint-5").rename(moved)
    (run / "checkpoint-5").symlink_to(moved)
    checkpoints.rotate(run, 1)
    assert [path.name for path in run.glob("*checkpoint-*")] == ["checkpoint-10"] and any(moved.iterdir())


def test_a_fault_that_is_not_the_disks_is_left_as_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"), checkpoints.saving(tmp_path / ".saving-checkpoint-1"):
        raise RuntimeError("CUDA out of memory")
