"""The program that has written the preset data sets of texts: its words are what tests compare rows with."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

SCRIPT = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "write_preset_rows.py"))
)
