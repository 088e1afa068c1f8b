"""Liger's own kernel, under Triton's interpreter, which has to be asked for before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HANG_SECONDS

TESTS = Path(__file__).parents[1]
KERNELS = TESTS / "objectives" / "test_head_kernels.py"
RUNS = TESTS / "training" / "test_train_head_kernels.py"
ASKED = [  # the interpreter takes a millisecond a target: two of the runs are enough
    str(KERNELS),
    f"{RUNS}::test_a_run_by_the_kernel_is_the_run_by_chunks[sft]",
    f"{RUNS}::test_a_run_by_the_kernel_is_the_run_by_chunks[dpo, lora]",
    f"{RUNS}::test_a_kernel_that_is_as_good_is_taken",
]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter already")
def test_all_that_is_asked_of_a_kernel_holds_for_ligers() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *ASKED]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-500:]
