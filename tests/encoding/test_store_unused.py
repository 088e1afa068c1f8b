"""What `luthier store gc` takes beside the stores: what killed runs left, and what has not been used for long."""

from __future__ import annotations

import os
import time
from pathlib import Path

from luthier.store import StoreWriter
from luthier.store.care import clean_stores
from luthier.store.format import FEEDS, SPOOL, UNITS

DAY = 86_400.0


def aged(path: Path, days: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        path.write_bytes(b"x")
    else:
        path.mkdir()
    then = time.time() - days * DAY
    os.utime(path, (then, then))
    return path


def test_feeds_of_killed_runs_go_after_a_day_and_old_files_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / f"v3-{'a' * 32}"
    StoreWriter(folder, fingerprint="a" * 64)
    dead, alive = aged(tmp_path / FEEDS / "dead", 2), aged(tmp_path / FEEDS / "alive", 0.1)
    old, new = aged(tmp_path / SPOOL / "old.rows", 40), aged(tmp_path / SPOOL / "new.rows", 3)
    unit = aged(folder / UNITS / "abc.unit", 40)
    clean_stores(tmp_path, dry_run=True)
    assert dead.exists()
    clean_stores(tmp_path)
    assert not dead.exists() and alive.exists() and old.exists() and unit.exists()
    clean_stores(tmp_path, older_than=30 * DAY)
    assert not old.exists() and not unit.exists() and new.exists() and alive.exists()
    assert folder.exists()
