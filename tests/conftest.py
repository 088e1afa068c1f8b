"""Fixtures that all rooms share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Tests run beside each other, and models are tiny: more threads than one only wait for each other. Programs that tests
# start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# A slow machine is no fault of the code: examples may take their time, and the same ones are tried everywhere.
hypothesis.settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("steady")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of test assets (real tokenizers and data), or a skip that says what is missing."""
    folder = Path(os.environ.get("LUTHIER_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (folder / "tokenizers").is_dir():
        pytest.skip(f"no test assets in {folder}: set LUTHIER_SHARED")
    return folder


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Whichever tests of whichever files ran before in this process, in whichever order: a test finds the same."""
    before = process_state()
    yield
    assert process_state() == before, "this test changes what other tests of its process find"


def process_state() -> dict[str, object]:
    """What all tests of a process share."""
    state: dict[str, object] = {"folder": os.getcwd()}
    state |= {each.name: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    torch = sys.modules.get("torch")
    is_there = torch is not None and hasattr(torch, "is_grad_enabled")  # or on its way
    state["dtype"] = str(torch.get_default_dtype()) if is_there else "torch.float32"  # as it is when it comes
    state["has gradients"] = torch.is_grad_enabled() if is_there else True
    return state
