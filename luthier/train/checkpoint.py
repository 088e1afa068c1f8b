"""Checkpoints that are whole or do not count.

A checkpoint is written into a hidden folder; its manifest (each file with size and SHA-256) comes last; then the folder
is renamed to ``checkpoint-N``. A kill at any moment leaves either no ``checkpoint-N`` or a whole one. What is damaged
later (a failing disk, a half copy) fails the manifest, is named, and set aside as ``checkpoint-N.broken``. One that is
to go is renamed first, so that no half of it is left under its name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from luthier.errors import CheckpointError, UserError
from luthier.train.files import FILES, reported

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
LOADER_STATE = "loader_state.json"
OBJECTIVE_STATE = "objective_state.json"  # of objectives that remember something from step to step
_NAME = re.compile(r"checkpoint-(\d+)")
_STAGING, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removed-"
_PROBE = ".probe"


def staging_folder(run: Path, step: int) -> Path:
    """An empty hidden folder to write ``checkpoint-step`` into; all ranks get the same path."""
    return run / f"{_STAGING}checkpoint-{step}"


@contextmanager
def saving(staging: Path) -> Iterator[None]:
    """Something is being written into ``staging``: if that fails, the folder is removed again.

    Raises `CheckpointError` for what the disk refuses, whoever wrote, with the path and the way out.
    """
    try:
        with reported(staging):
            yield
    except UserError:
        shutil.rmtree(staging, ignore_errors=True)  # a full disk should not be fuller for having failed
        raise


def seal(staging: Path) -> Path:
    """Make a written staging folder the checkpoint it is named after, at once. Returns the checkpoint's folder.

    Raises `CheckpointError`; what was a checkpoint before still is one.
    """
    found = sorted(staging.rglob("*"))
    listed = {}
    for path in found:
        FILES.sync(path)
        if path.is_file():
            with reported(path, doing="read"):
                listed[str(path.relative_to(staging))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    write_json(staging / MANIFEST, {"version": MANIFEST_VERSION, "files": listed})
    FILES.sync(staging)
    return _put_in_place(staging)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of ``folder`` at once when the block ends well.

    Raises `CheckpointError`; ``folder`` is as it was then.
    """
    staging = folder.with_name(_STAGING + folder.name)
    FILES.remove_folder(staging)
    FILES.make_folder(staging)
    with saving(staging):
        yield staging
        for path in [*staging.rglob("*"), staging]:
            FILES.sync(path)
        _put_in_place(staging)


def _put_in_place(staging: Path) -> Path:
    final = staging.with_name(staging.name.removeprefix(_STAGING))
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():  # saved once already, before this run was gone on with
        FILES.remove_folder(replaced)
        FILES.rename(final, replaced)
    try:
        FILES.rename(staging, final)
    except CheckpointError:
        if replaced.exists():
            FILES.rename(replaced, final)
        raise
    FILES.sync(final.parent)
    FILES.remove_folder(replaced)
    return final


def damage(checkpoint: Path, *, digests: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. Without ``digests`` only names and sizes are compared."""
    manifest = checkpoint / MANIFEST
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        version, files = content["version"], content["files"]
    except FileNotFoundError:
        return f"no {MANIFEST}"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror or error}"
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
        try:
            if digests and _digest(path) != entry["sha256"]:
                return f"{name} has other content than was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def checkpoints(run: Path) -> list[Path]:
    """The folders named ``checkpoint-N``, oldest step first; those set aside do not count."""
    found = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def clean_leftovers(run: Path) -> None:
    """Remove what a killed save left behind. Raises `CheckpointError`."""
    for path in run.glob(f"{_REPLACED}*"):
        final = path.with_name(path.name.removeprefix(_REPLACED))
        if final.exists():
            FILES.remove_folder(path)
        else:  # killed between the two renames: the older copy is the whole one
            FILES.rename(path, final)
    for pattern in (_STAGING, _REMOVED, _PROBE):
        for path in run.glob(f"{pattern}*"):
            FILES.remove_folder(path)


def check_writable(run: Path) -> None:
    """Do in small what saving will do: raises `CheckpointError` now, not after hours of training."""
    probe, renamed = run / _PROBE, run / f"{_PROBE}-renamed"
    FILES.make_folder(probe)
    FILES.write(probe / "file", bytes(4096))
    FILES.rename(probe, renamed)
    FILES.remove_folder(renamed)


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
    """Delete the oldest checkpoints over ``limit``; the newest and ``protected`` (the best) always stay.

    Only what looks whole counts, and what does not is left for `newest_whole` to name. Raises `CheckpointError`.
    """
    for left in run.glob(f"{_REMOVED}*"):
        with suppress(CheckpointError):
            FILES.remove_folder(left)
    if limit is None:
        return
    found = [path for path in checkpoints(run) if damage(path, digests=False) is None]
    keep = set(found[-1:]) | {path for path in found if path == protected}
    surplus = len(found) - max(limit, len(keep))
    for checkpoint in [path for path in found if path not in keep][: max(surplus, 0)]:
        remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; killed on the way, no half of it is left under its name.

    Raises `CheckpointError` if it cannot be renamed. What cannot be deleted then is, at the next chance.
    """
    removed = checkpoint.with_name(f"{_REMOVED}{checkpoint.name}-{uuid.uuid4().hex[:8]}")
    try:
        FILES.rename(checkpoint, removed)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EXDEV:
            raise
        # it is in a lower layer of an overlay: without its manifest it is no checkpoint any more
        FILES.remove_file(checkpoint / MANIFEST)
        removed = checkpoint
    with suppress(CheckpointError):  # on a network file system because somebody reads it: no reason to stop a run
        FILES.remove_folder(removed)


def checkpoint_step(checkpoint: Path) -> int:
    """``checkpoint-20 -> 20``. Raises `CheckpointError` for other names."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is no checkpoint", hint="checkpoints are named checkpoint-STEP")
    return int(match[1])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON at once or not at all. Raises `CheckpointError`."""
    FILES.write(path, json.dumps(content, indent=2, ensure_ascii=False).encode())


def _set_aside(checkpoint: Path, suffix: str) -> Path:
    aside = checkpoint.with_name(f"{checkpoint.name}.{suffix}")
    FILES.remove_folder(aside)
    FILES.rename(checkpoint, aside)
    return aside


def _digest(path: Path) -> str:
    FILES.before("read", path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
