"""Fixtures that all rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

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
