"""Checkpoints that are whole or do not count.

A checkpoint is written into a hidden folder; its manifest (each file with size and SHA-256) comes last; then the folder
is renamed to ``checkpoint-N``. A kill at any moment leaves either no ``checkpoint-N`` or a whole one. What is damaged
later (a full disk, a half copy) fails the manifest, is named, and set aside as ``checkpoint-N.broken``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from luthier.errors import CheckpointError

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
LOADER_STATE = "loader_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_STAGING, _REPLACED = ".saving-", ".replaced-"


def staging_folder(run: Path, step: int) -> Path:
    """An empty hidden folder to write ``checkpoint-step`` into; all ranks get the same path."""
    return run / f"{_STAGING}checkpoint-{step}"


def seal(staging: Path) -> Path:
    """Make a written staging folder the checkpoint it is named after, at once. Returns the checkpoint's folder."""
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    listed = {str(path.relative_to(staging)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files}
    for path in files:
        _flush(path)
    manifest = staging / MANIFEST
    manifest.write_text(json.dumps({"version": MANIFEST_VERSION, "files": listed}, indent=1), encoding="utf-8")
    _flush(manifest)
    _flush(staging)
    final = staging.with_name(staging.name.removeprefix(_STAGING))
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():  # the same step saved again, after a resume
        os.replace(final, replaced)
    os.replace(staging, final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def damage(checkpoint: Path, *, digests: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. Without ``digests`` only names and sizes are compared."""
    manifest = checkpoint / MANIFEST
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        version, files = content["version"], content["files"]
    except FileNotFoundError:
        return f"no {MANIFEST}"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    if version != MANIFEST_VERSION:
        return f"{MANIFEST} is of version {version}, this Luthier reads {MANIFEST_VERSION}"
    for name, entry in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, written were {entry['bytes']}"
        if digests and _digest(path) != entry["sha256"]:
            return f"{name} has other content than was written"
    return None


def checkpoints(run: Path) -> list[Path]:
    """The folders named ``checkpoint-N``, oldest step first; those set aside do not count."""
    found = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def clean_leftovers(run: Path) -> None:
    """Remove what a killed save left behind."""
    for path in run.glob(f"{_REPLACED}checkpoint-*"):
        final = path.with_name(path.name.removeprefix(_REPLACED))
        if final.exists():
            shutil.rmtree(path)
        else:  # killed between the two renames: the older copy is the whole one
            os.replace(path, final)
    for path in run.glob(f"{_STAGING}checkpoint-*"):
        shutil.rmtree(path)


def newest_whole(run: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies. Newer damaged ones are set aside and reported."""
    for checkpoint in reversed(checkpoints(run)):
        fault = damage(checkpoint)
        if fault is None:
            return checkpoint
        aside = _set_aside(checkpoint, "broken")
        report(f"{checkpoint.name} is damaged ({fault}); set aside as {aside.name}")
    return None


def set_aside_newer(checkpoint: Path) -> list[Path]:
    """Rename the checkpoints of later steps beside ``checkpoint``: a run that goes on from it does not own them."""
    step = checkpoint_step(checkpoint)
    return [_set_aside(p, "superseded") for p in checkpoints(checkpoint.parent) if checkpoint_step(p) > step]


def rotate(run: Path, limit: int | None, protected: Path | None = None) -> None:
    """Delete the oldest checkpoints over ``limit``; the newest and ``protected`` (the best) always stay."""
    if limit is None:
        return
    found = checkpoints(run)
    keep = set(found[-1:]) | {path for path in found if path == protected}
    surplus = len(found) - max(limit, len(keep))
    for checkpoint in [path for path in found if path not in keep][: max(surplus, 0)]:
        shutil.rmtree(checkpoint)


def checkpoint_step(checkpoint: Path) -> int:
    """``checkpoint-20 -> 20``. Raises `CheckpointError` for other names."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is no checkpoint", hint="checkpoints are named checkpoint-STEP")
    return int(match[1])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON at once or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    os.replace(partial, path)


def _set_aside(checkpoint: Path, suffix: str) -> Path:
    aside = checkpoint.with_name(f"{checkpoint.name}.{suffix}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(checkpoint, aside)
    return aside


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """See that a file's content, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
