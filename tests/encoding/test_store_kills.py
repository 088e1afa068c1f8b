"""SIGKILL at random moments: what was committed stays, what was not is not there, and nothing is mixed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import luthier
from tests.conftest import HANG_SECONDS

PROGRAM = Path(__file__).with_name("killed_processes.py")


def run_program(what, folder, cycles, processes):
    done = start_program(what, folder, cycles, processes)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def start_program(what, folder, cycles, processes):
    environment = {**os.environ, "PYTHONPATH": str(Path(luthier.__file__).parents[1])}
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        str(PROGRAM),
        what,
        str(folder),
        str(cycles),
        str(processes),
    ]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_SECONDS, check=False)


@pytest.mark.parametrize(("cycles", "writers"), [(60, 1), (60, 4)])
def test_writers_killed_at_any_moment_lose_nothing_that_was_committed(tmp_path, cycles, writers):
    seen = run_program("store", tmp_path, cycles, writers)
    assert seen["cycles"] == cycles
    assert seen["committed"] > 100 and seen["shards"] > 10
    assert seen["unfinished"] > 0  # control: some were killed in the middle of writing


def test_control_a_writer_that_says_too_early_that_it_committed_is_found_out(tmp_path):
    done = start_program("control", tmp_path, 60, 2)
    assert done.returncode != 0
    assert "rows that were committed are lost" in done.stderr


def test_units_of_killed_processes_are_taken_over_and_no_others_are_done_twice(tmp_path):
    seen = run_program("work", tmp_path, 60, 3)
    assert seen["units"] == 400
    assert 3 < seen["begun_again"] <= seen["cycles"]  # some were killed while they had a unit, each at most one


def test_control_units_that_nobody_locks_are_done_twice(tmp_path):
    seen = run_program("work-control", tmp_path, 10, 3)
    assert seen["begun_again"] > seen["cycles"]
