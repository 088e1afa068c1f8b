"""Preparing under limits that the system enforces: files of a certain size, few open files, no UTF-8, no /tmp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HANG_SECONDS
from tests.faults.points import ONE_THREAD, REPOSITORY

PROGRAM = """
import json, resource, sys
from pathlib import Path
from luthier.errors import StoreError
from tests.faults.preparing import Preparing
limit, root = json.loads(sys.argv[1]), Path(sys.argv[2])
rows = Preparing.of(root, 60)
whole = rows.account("whole")
before = {name: resource.getrlimit(getattr(resource, name)) for name in limit}
for name, value in limit.items():
    resource.setrlimit(getattr(resource, name), (value, before[name][1]))
try:
    told = None
    found = rows.account("limited")
except StoreError as error:
    told = str(error)
for name, value in before.items():
    resource.setrlimit(getattr(resource, name), value)
sys.stdout.write(json.dumps({"told": told, "same": rows.account("limited") == whole}))
"""


def prepare_under(limit: dict[str, int], root: Path, **environment: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(limit), str(root)],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(REPOSITORY), **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("size", [100, 2000])
def test_a_file_that_may_not_grow_is_one_error_and_what_is_missing_is_prepared_later(tmp_path: Path, size: int) -> None:
    found = prepare_under({"RLIMIT_FSIZE": size}, tmp_path)
    assert "File too large" in str(found["told"]) and f"{tmp_path}/limited" in str(found["told"])
    assert found["same"]


def test_few_open_files_no_utf8_and_no_temporary_folder_are_enough(tmp_path: Path) -> None:
    found = prepare_under({"RLIMIT_NOFILE": 64}, tmp_path, LC_ALL="C", PYTHONUTF8="0", TMPDIR="/nowhere")
    assert found == {"told": None, "same": True}
