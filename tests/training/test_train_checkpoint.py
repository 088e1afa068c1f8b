"""Checkpoints are whole or do not count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from luthier.errors import CheckpointError
from luthier.training.folder import checkpoint as checkpoints


def _write(run: Path, step: int, content: str = "weights") -> Path:
    staging = checkpoints.staging_folder(run, step)
    (staging / "deep").mkdir(parents=True)
    (staging / "model.bin").write_text(content)
    (staging / "deep" / "state.json").write_text(str(step))
    return checkpoints.seal(staging)


def test_a_sealed_checkpoint_verifies_and_leaves_no_staging_folder(tmp_path: Path) -> None:
    sealed = _write(tmp_path, 5)
    assert sealed == tmp_path / "checkpoint-5"
    assert checkpoints.damage(sealed) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda c: (c / "model.bin").unlink(), "model.bin is missing"),
        (lambda c: (c / "model.bin").write_text("weight"), "has 6 bytes, written were 7"),
        (lambda c: (c / "model.bin").write_text("Weights"), "other content"),
        (lambda c: (c / "manifest.json").unlink(), "no manifest.json"),
        (lambda c: (c / "manifest.json").write_text("{"), "cannot be read"),
    ],
)
def test_every_kind_of_damage_is_found(tmp_path: Path, harm, said: str) -> None:  # type: ignore[no-untyped-def]
    sealed = _write(tmp_path, 5)
    harm(sealed)
    assert said in (checkpoints.damage(sealed) or "")


def test_the_newest_whole_one_is_found_and_damaged_ones_are_named_and_set_aside(tmp_path: Path) -> None:
    _write(tmp_path, 5)
    _write(tmp_path, 10)
    broken = _write(tmp_path, 20)
    (broken / "deep" / "state.json").write_text("garbage")
    said: list[str] = []
    assert checkpoints.newest_whole(tmp_path, said.append) == tmp_path / "checkpoint-10"
    assert said == [
        "checkpoint-20 is damaged (deep/state.json has 7 bytes, written were 2); set aside as checkpoint-20.broken"
    ]
    assert (tmp_path / "checkpoint-20.broken").is_dir()
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-10"]


def test_rotation_counts_whole_names_only_and_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100):
        _write(tmp_path, step)
    os.replace(_write(tmp_path, 50), tmp_path / "checkpoint-50.broken")
    checkpoints.rotate(tmp_path, 2, tmp_path / "checkpoint-5")
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-100"]
    checkpoints.rotate(tmp_path, None)
    checkpoints.rotate(tmp_path, 1)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-100"]
    assert (tmp_path / "checkpoint-50.broken").is_dir()


def test_a_kill_while_saving_leaves_nothing_that_counts(tmp_path: Path) -> None:
    _write(tmp_path, 5)
    (checkpoints.staging_folder(tmp_path, 10)).mkdir()
    (checkpoints.staging_folder(tmp_path, 10) / "model.bin").write_text("half")
    assert checkpoints.newest_whole(tmp_path, pytest.fail) == tmp_path / "checkpoint-5"
    checkpoints.clean_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_a_step_saved_again_replaces_the_first_at_once_or_not_at_all(tmp_path: Path) -> None:
    _write(tmp_path, 5, "old")
    sealed = _write(tmp_path, 5, "new")
    assert (sealed / "model.bin").read_text() == "new"
    # killed between the two renames
    os.replace(sealed, tmp_path / ".replaced-checkpoint-5")
    checkpoints.clean_leftovers(tmp_path)
    assert checkpoints.newest_whole(tmp_path, pytest.fail) == sealed


def test_going_on_from_an_older_one_sets_the_later_ones_aside(tmp_path: Path) -> None:
    older, _ = _write(tmp_path, 5), _write(tmp_path, 10)
    assert [path.name for path in checkpoints.set_aside_newer(older)] == ["checkpoint-10.superseded"]
    assert checkpoints.checkpoints(tmp_path) == [older]


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoints.checkpoint_step(tmp_path / "model")
