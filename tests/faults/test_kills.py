"""SIGKILL at random times and at each operation of the disk: nothing is lost, nothing comes twice, no byte differs.

`python -m benchmarks.kills` tries more of the same.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.faults import checkpointing, loading, preparing
from tests.faults.killing import Findings, computes_nothing
from tests.faults.points import run_points

# A program each, for what it imports takes longer than some kills.
PREPARING = {"preparing": 12, "preparing-shared": 8, "preparing-operations": 1, "store-failures": 1}
LOADING = {"stream": 15, "loses-its-window": 4, "loses-a-step": 4, "loader": 8, "stream-workers": 2, "fed": 6}
TRAINING = {"checkpoints": 1, "checkpoint-failures": 1, "training": 3, "training-large-files": 2}
DRAWING = {"drawing": 20, "draws-by-process": 2}
PROGRAMS = (PREPARING, LOADING, TRAINING, DRAWING)
CONTROLS = ("loses-its-window", "loses-a-step", "draws-by-process")


@functools.cache
def findings_of(kind: str) -> Findings:
    """Of a kind, which is tried with the others of its program once."""
    (points,) = (program for program in PROGRAMS if kind in program)
    return _tried(tuple(points.items()))[kind]


@functools.cache
def _tried(points: tuple[tuple[str, int], ...]) -> dict[str, Findings]:
    return dict(zip(dict(points), run_points(dict(points), seed=1), strict=True))


@pytest.mark.parametrize("kind", [kind for program in PROGRAMS for kind in program if kind not in CONTROLS])
def test_after_a_kill_or_a_failure_everything_is_as_it_would_have_been(kind: str) -> None:
    found = findings_of(kind)
    assert found.is_clean, found


@pytest.mark.parametrize("kind", [kind for kind in CONTROLS if kind in LOADING])
def test_control_a_loader_that_loses_its_place_is_found_out(kind: str) -> None:
    found = findings_of(kind)
    assert found.differing > 0
    assert found.lost > 0 if kind == "loses-its-window" else found.doubled > 0


def test_control_answers_that_depend_on_the_process_are_found_out() -> None:
    assert findings_of("draws-by-process").differing > 0


def test_the_kills_came_at_times_that_matter() -> None:
    assert findings_of("preparing").facts["with something committed"] > 5
    assert findings_of("preparing-operations").points > 60
    assert findings_of("stream").facts["while a window held rows"] > 1
    assert findings_of("stream").facts["killed ten times in a row"] > 0
    assert findings_of("stream").facts["gone on with other ranks or workers"] > 3
    assert findings_of("fed").facts["while a window held rows"] > 0
    assert findings_of("training").facts["with a checkpoint"] > 0
    assert findings_of("checkpoints").points > 60
    assert findings_of("drawing").facts["while answers waited"] > 5
    for kind in ("sampling", "judging", "updating", "writing answers", "files"):
        assert findings_of("drawing").facts[kind] > 2, kind


def test_failures_are_told() -> None:
    """But for a checkpoint that cannot be read, which is set aside and named, and one that cannot be renamed away."""
    assert findings_of("store-failures").facts["told"] == findings_of("store-failures").points > 100
    assert findings_of("checkpoint-failures").facts["told"] > 0.9 * findings_of("checkpoint-failures").points
    assert findings_of("training-large-files").facts["told"] == findings_of("training-large-files").points


def test_control_a_program_that_forks_and_computes_is_found_out() -> None:
    ones = torch.ones(2)
    with computes_nothing(), pytest.raises(AssertionError, match="in a process that forks"):
        ones.add(1)
    assert ones.add(1).tolist() == [2, 2]


def test_control_what_is_lost_doubled_or_changed_is_counted() -> None:
    log = [{"batches": [["aa", ["f:1", "f:2"]]], "taken": None}, {"batches": [["bb", ["f:3"]]], "taken": None}]
    changed = [{"batches": [["aX", ["f:1", "f:1"]]], "taken": None}, log[1]]
    found = Findings(kind="control")
    found.compare_rows(loading.rows_of(changed), loading.rows_of(log))
    assert (found.lost, found.doubled) == (1, 1)
    assert loading.num_differing(changed, log) == 1 and loading.num_differing(log, log) == 0

    whole = preparing.Account((("f:1", "aa"), ("f:2", "bb")), "{}", "")
    for other, counts in (
        (preparing.Account((("f:1", "aa"),), "{}", ""), (1, 0, 1)),
        (preparing.Account((("f:1", "aa"), ("f:1", "aa"), ("f:2", "bb")), "{}", ""), (0, 1, 1)),
        (preparing.Account((("f:1", "aX"), ("f:2", "bb")), "{}", ""), (0, 0, 1)),
        (preparing.Account(whole.rows, '{"read": 3}', ""), (0, 0, 1)),
        (preparing.Account(whole.rows, "{}", "lost"), (0, 0, 1)),
        (whole, (0, 0, 0)),
    ):
        found = Findings(kind="control")
        preparing.compare(found, other, whole)
        assert (found.lost, found.doubled, found.differing) == counts


def test_control_a_folder_that_is_not_right_is_found_out(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = checkpointing.Run.begun(tmp_path)
    assert run.faults(ended=False) == []
    assert "the log has steps [5, 10]" in run.faults(ended=True)
    run.go_on()
    assert run.faults(ended=True) == []
    (tmp_path / "checkpoint-20" / "optimizer.json").write_bytes(b"half")
    (found,) = run.faults(ended=False)
    assert "checkpoint-20 is damaged (optimizer.json has 4 bytes" in found
