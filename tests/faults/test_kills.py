"""SIGKILL at random times and at each operation of the disk: nothing is lost, nothing comes twice, no byte differs.

`python -m benchmarks.kills` tries more of the same.
"""

from __future__ import annotations

import pytest
import torch

from tests.faults import checkpointing, loading, preparing
from tests.faults.killing import Findings, computes_nothing
from tests.faults.points import run_points

# A program each, for what it imports takes longer than some kills; and a test each, for tests of one file may run in
# several processes, each of which would have to try the program's kinds again.
PROGRAMS = {
    "preparing": {"preparing": 12, "preparing-shared": 8, "preparing-operations": 1, "store-failures": 1},
    "loading": {
        "stream": 15, "loses-its-window": 4, "loses-a-step": 4, "loader": 8, "stream-workers": 2, "fed": 6,
    },
    "training": {"checkpoints": 1, "checkpoint-failures": 1, "training": 3, "training-large-files": 2},
    "drawing": {"drawing": 20, "draws-by-process": 2},
}  # fmt: skip
# Of a loader that loses its place, and of answers that depend on the process: what is found out.
CONTROLS = {
    "loses-its-window": ("differing", "lost"),
    "loses-a-step": ("differing", "doubled"),
    "draws-by-process": ("differing",),
}
# The kills came at times that matter: each of these was found more often than so many times.
TIMES = {
    "preparing": {"with something committed": 5},
    "stream": {
        "while a window held rows": 1, "killed ten times in a row": 0, "gone on with other ranks or workers": 3,
    },
    "fed": {"while a window held rows": 0},
    "training": {"with a checkpoint": 0},
    "drawing": {
        "while answers waited": 5, "sampling": 2, "judging": 2, "updating": 2, "delivering": 1, "writing answers": 2,
        "files": 2,
    },
}  # fmt: skip
POINTS = {"preparing-operations": 60, "checkpoints": 60, "store-failures": 100}  # more than so many operations
# The share of failures that is told: all but a checkpoint that cannot be read, which is set aside and named, and one
# that cannot be renamed away.
TOLD = {"store-failures": 1.0, "checkpoint-failures": 0.9, "training-large-files": 1.0}


@pytest.mark.parametrize("program", PROGRAMS)
def test_after_a_kill_or_a_failure_everything_is_as_it_would_have_been(program: str) -> None:
    points = PROGRAMS[program]
    for kind, found in zip(points, run_points(points, seed=1), strict=True):
        if kind in CONTROLS:
            assert all(getattr(found, count) > 0 for count in CONTROLS[kind]), found
        else:
            assert found.is_clean, found
        for fact, number in TIMES.get(kind, {}).items():
            assert found.facts[fact] > number, (fact, found)
        assert found.points > POINTS.get(kind, 0), found
        if kind in TOLD:
            assert found.facts["told"] > 0 and found.facts["told"] >= TOLD[kind] * found.points, found


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
