"""Checkpoints that are whole or do not count.

A checkpoint is written into a hidden folder; its manifest (each file with size and SHA-256) comes last; then the folder
is renamed to ``checkpoint-N``. A kill at any moment leaves either no ``checkpoint-N`` or a whole one. What is damaged
later (a failing disk, a half copy, a file more or less) fails the manifest, and what is whole but cannot be read fails
`unusable`; either is named, and set aside as ``checkpoint-N.broken``. One that is to go is renamed first, so that no
half of it is left under its name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import ValidationError
from safetensors import safe_open
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from luthier.config.schema import RunConfig
from luthier.errors import CheckpointError, UserError
from luthier.loader.stream_state import LoaderState
from luthier.plugins import load_plugins
from luthier.training.folder import FILES, reported
from luthier.training.folder.state import (
    READING_FAULTS,
    STRUCTURE,
    check_optimizer_state,
    check_random_state,
    check_state,
    has_state,
    read_state,
    unreadable,
)
from luthier.training.report import RESULT_FILE
from luthier.writing import JsonObject, counted, holder_of, only_user

MANIFEST = "manifest.json"
MANIFEST_VERSION = 2
_PICKLED_VERSION, _PICKLED_STATE = 1, "optimizer.pt"  # what Luthier wrote before: state as pickles of torch
BASE_FILES = "base_files.json"  # of adapters: digests of the base's files
HELD_OUT_ROWS = "held_out_rows.json"  # a digest of the rows that are evaluated on
OTHER_MODELS = "other_models.json"  # digests of the files of other models that are read again
OBJECTIVE_STATE = "objective_state.json"  # of objectives that remember something from step to step
TRAINER_STATE = "trainer_state.json"  # transformers' name
OPTIMIZER_STATE, SCHEDULER_STATE, SCALER_STATE = "optimizer", "scheduler", "scaler"  # names for `write_state`
INTERVAL_STATE = "interval"  # what the next line of the log is about, as far as it has happened
RANDOM_STATE, RANDOM_STATES = "rng_state_{rank}", "rng_state_*"  # one for each rank
_NAME = re.compile(r"checkpoint-(\d+)")
_STAGING, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removed-"
_PROBE = ".probe"
_RUNNING = ".running"  # there while a run is in the folder; what counts is its lock, which the system frees
LONGEST_ENDING = 10.0  # seconds in which processes of a run that was killed notice it, and end
BROKEN, SUPERSEDED = "broken", "superseded"


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
    FILES.write(staging / MANIFEST, _manifest_bytes(listed))
    FILES.give_ordinary_modes(staging)
    FILES.sync(staging)
    return _put_in_place(staging)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of ``folder`` at once when the block ends well. Where
    ``folder`` is a link, it takes the place of what the link names.

    Raises `CheckpointError`; ``folder`` is as it was then.
    """
    folder = folder.resolve()
    put_back(folder)
    staging = folder.with_name(_STAGING + folder.name)
    FILES.remove_folder(staging)
    FILES.make_folder(staging)
    with saving(staging):
        yield staging
        FILES.give_ordinary_modes(staging)
        for path in [*staging.rglob("*"), staging]:
            FILES.sync(path)
        _put_in_place(staging)


def put_back(folder: Path) -> None:
    """Give a folder its name again whose replacing was killed between the two renames. Raises `CheckpointError`."""
    folder = folder.resolve()
    replaced = folder.with_name(_REPLACED + folder.name)
    if replaced.exists() and not folder.exists():
        FILES.rename(replaced, folder)


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


class UnusableCheckpoint(CheckpointError):
    """A checkpoint whose files are those that were written, and which this run cannot take over all the same."""


@contextmanager
def taking_over(checkpoint: Path, name: str) -> Iterator[None]:
    """Tell what a checkpoint holds and this run cannot take over as one `UnusableCheckpoint`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except READING_FAULTS as error:
        reason = error.message if isinstance(error, UserError) else str(error) or type(error).__name__
        raise UnusableCheckpoint(
            f"{checkpoint}: its {name} cannot be taken over: {reason[:500]}",
            hint="go on from another checkpoint, with output.resume, or begin anew, with output.overwrite: true",
        ) from error


def damage(checkpoint: Path, *, digests: bool = True) -> str | None:
    """In which way a checkpoint's files are not those that were written, or None. Without ``digests`` only names and
    sizes are compared. Hidden files that a file system or a desktop leaves behind do not count.

    Raises `CheckpointError` for a checkpoint of an older Luthier, which is whole and cannot be read.
    """
    if (checkpoint / MANIFEST).exists() and not (checkpoint / MANIFEST).is_file():  # who reads a pipe may wait forever
        return f"{MANIFEST} cannot be read: it is no file"
    try:
        manifest = (checkpoint / MANIFEST).read_bytes()
        files = _listed_files(manifest, checkpoint)
        present = {str(path.relative_to(checkpoint)) for path in _files_of(checkpoint)}
    except FileNotFoundError:
        return f"no {MANIFEST}"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror or error}"
    except CheckpointError:
        raise
    except (ValueError, RecursionError):
        return f"{MANIFEST} cannot be read: it is not what was written"
    if more := sorted(present - files.keys()):
        return f"{more[0]} is there, and was not written with it"
    for name, entry in files.items():
        try:
            fault = _file_damage(checkpoint, name, entry, digests=digests)
        except OSError as error:
            fault = f"{name} cannot be read: {error.strerror or error}"
        if fault is not None:
            return fault
    return None


def _file_damage(checkpoint: Path, name: str, entry: dict[str, object], *, digests: bool) -> str | None:
    path = checkpoint / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{name} has {counted(path.stat().st_size, 'byte')}, written were {entry['bytes']}"
    if digests and _digest(path) != entry["sha256"]:
        return f"{name} has other content than was written"
    return None


def _listed_files(manifest: bytes, checkpoint: Path) -> dict[str, dict[str, object]]:
    """The files that a manifest lists. Raises ``ValueError`` or ``RecursionError`` unless its bytes are just those that
    `seal` writes for what it says, `CheckpointError` for the manifest of an older Luthier."""
    content = json.loads(manifest)
    if not isinstance(content, dict) or not isinstance(files := content.get("files"), dict):
        raise ValueError("no list of files")
    if content.get("version") == _PICKLED_VERSION and (checkpoint / _PICKLED_STATE).exists():
        raise CheckpointError(
            f"{checkpoint} was written by an older Luthier, which pickled the optimizer's state ({_PICKLED_STATE}); "
            "no pickle is read any more",
            hint="finish that run with the Luthier that began it; or begin anew with output.overwrite: true, or "
            "from its weights, with model.name_or_path, in another output.dir",
        )
    for name, entry in files.items():
        is_entry = isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
        if not is_entry or type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
            raise ValueError(f"no size and digest of {name}")
        if Path(name).is_absolute() or ".." in Path(name).parts or not name.isprintable():
            raise ValueError(f"{name!r} is not the name of a file in a checkpoint")
    if manifest != _manifest_bytes(files):
        raise ValueError("not as it was written")
    return files


def _manifest_bytes(files: dict[str, dict[str, object]]) -> bytes:
    return json.dumps({"version": MANIFEST_VERSION, "files": files}, indent=2, ensure_ascii=False).encode()


def _files_of(checkpoint: Path) -> Iterator[Path]:
    """All files but the manifest and hidden ones."""
    for path in checkpoint.rglob("*"):
        if not path.is_dir() and path != checkpoint / MANIFEST and not path.name.startswith("."):
            yield path


def unusable(checkpoint: Path) -> str | None:
    """Why a checkpoint with a valid manifest cannot be gone on from all the same, or None: each of its files is read as
    far as that takes no model. A checkpoint of weights alone is usable so far."""
    try:
        for path in sorted(checkpoint.rglob("*.safetensors")):
            with safe_open(path, framework="numpy") as weights:
                weights.keys()
        if has_state(checkpoint, OPTIMIZER_STATE):
            LoaderState.load(checkpoint)
            _check_training_state(checkpoint)
    except CheckpointError as error:
        return error.message.replace(f"{checkpoint}/", "")
    except READING_FAULTS as error:
        return f"{path.name}: {str(error)[:200] or type(error).__name__}"
    return None


def _check_training_state(checkpoint: Path) -> None:
    """Raise `CheckpointError` if the state of optimizer, schedule, scaler, random numbers, trainer is none."""
    names = [name for name in (SCALER_STATE, INTERVAL_STATE) if has_state(checkpoint, name)]
    checks: list[tuple[str, Any, Callable[[Any], None]]] = [
        (OPTIMIZER_STATE, check_state, check_optimizer_state),
        *((name, check_state, _check_dict) for name in (SCHEDULER_STATE, *names)),
        *((path.stem, read_state, check_random_state) for path in checkpoint.glob(RANDOM_STATES + STRUCTURE)),
    ]
    for name, read, check in checks:
        state = read(checkpoint, name)
        try:
            check(state)
        except READING_FAULTS as error:
            raise unreadable(checkpoint / (name + STRUCTURE), error) from error
    step = _read_trainer_state(checkpoint / TRAINER_STATE).global_step
    if step != checkpoint_step(checkpoint):
        raise CheckpointError(f"{TRAINER_STATE} is of step {step}")
    if (checkpoint / OBJECTIVE_STATE).exists():
        read_json(checkpoint / OBJECTIVE_STATE)


def history(checkpoint: Path, here: TrainerState, stateful: Sequence[ExportableState]) -> TrainerState:
    """The state of a run that goes on: what it has logged, and its best checkpoint if it is still there. Callbacks that
    are ``stateful`` get back what they remember. Raises one of `READING_FAULTS`."""
    there = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
    for name, saved in there.stateful_callbacks.items():
        mine = [each for each in stateful if type(each).__name__ == name]
        for callback, memory in zip(mine, saved if isinstance(saved, list) else [saved], strict=False):
            for attribute, value in memory["attributes"].items():
                setattr(callback, attribute, value)
    beside = checkpoint.parent / f"checkpoint-{there.best_global_step}"  # the run's folder may have moved
    best = next(
        (str(path) for path in (beside, Path(there.best_model_checkpoint or "")) if path.name and path.is_dir()), None
    )
    of_this_run = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size")
    mine_alone = {
        name: getattr(here, name) for name in (*of_this_run, "is_local_process_zero", "is_world_process_zero")
    }
    return replace(there, best_model_checkpoint=best, **mine_alone)


def _check_dict(state: object) -> None:
    if not isinstance(state, dict):
        raise TypeError(f"a {type(state).__name__}, not a dict")


def _read_trainer_state(path: Path) -> _TrainerState:
    try:
        TrainerState(**json.loads(path.read_bytes()))
        return msgspec.convert(json.loads(path.read_bytes()), _TrainerState)
    except READING_FAULTS as error:
        raise unreadable(path, error) from error


class _TrainerState(msgspec.Struct):
    """What the trainer takes over from `TRAINER_STATE`, by transformers' names."""

    global_step: int
    max_steps: int
    log_history: list[JsonObject]
    stateful_callbacks: JsonObject
    epoch: float | None
    best_metric: float | None
    best_global_step: int | None
    best_model_checkpoint: str | None


def read_json(path: Path) -> dict[str, object]:
    """A JSON object. Raises `CheckpointError` if the file holds anything else."""
    try:
        content = json.loads(path.read_bytes())
    except READING_FAULTS as error:
        raise unreadable(path, error) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def named_base_files(left: Path) -> dict[str, str]:
    """Digests of the files of an adapter's base, by their names, as a checkpoint or a run's result has them."""
    beside, result = left / BASE_FILES, left / RESULT_FILE
    found: Any = read_json(beside) if beside.is_file() else {}
    if result.is_file():
        found = read_json(result).get("base_files", {})
    return dict(found)


def said_in(path: Path) -> dict[str, object]:
    """What a run's description says beside the defaults, which it has all written out. Raises `CheckpointError`."""
    load_plugins()  # whose losses have numbers of their own
    try:
        told: dict[str, Any] = read_json(path)
    except CheckpointError as error:
        hint = "put the file back as it was: each checkpoint-N of its run has a copy"
        raise CheckpointError(error.message, hint=hint) from error
    if isinstance(objective := told.get("objective"), dict):  # numbers of other losses, of plugins that may be gone
        told["objective"] = {key: value for key, value in objective.items() if value is not None}
    try:
        return RunConfig.model_validate(told).model_dump(mode="json", exclude_defaults=True)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{path} cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        hint = "it was written by another version of Luthier, or with a plugin that is not installed here"
        raise CheckpointError(what, hint=hint) from error


def checkpoints(run: Path) -> list[Path]:
    """The folders named ``checkpoint-N``, oldest step first; those set aside do not count."""
    found = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def left_checkpoints(run: Path) -> list[Path]:
    """All checkpoints of runs in the folder, those set aside among them; ``checkpoint-best`` is the user's own."""
    names = re.compile(rf"{_NAME.pattern}(\.({BROKEN}|{SUPERSEDED}))?")
    return sorted(path for path in run.glob("checkpoint-*") if names.fullmatch(path.name))


def clean_leftovers(run: Path) -> None:
    """Remove what a killed save left behind. Raises `CheckpointError`."""
    for path in run.glob(f"{_REPLACED}*"):
        put_back(path.with_name(path.name.removeprefix(_REPLACED)))
        FILES.remove_folder(path)
    for pattern in (_STAGING, _REMOVED, _PROBE):
        for path in run.glob(f"{pattern}*"):
            FILES.remove_folder(path)


def hold_run_folder(run: Path, holding: ExitStack) -> None:
    """Keep other runs out of ``output.dir`` until ``holding`` is closed (main process only): checkpoints and curves of
    both would be taken for those of one. Raises `CheckpointError` where another run is in it."""
    path = run / _RUNNING
    if not holding.enter_context(only_user(path, seconds=LONGEST_ENDING)):
        raise CheckpointError(
            f"{run} is in use: {holder_of(path)} trains there",
            hint="wait until that run has ended, or choose another output.dir",
        )
    holding.enter_context(suppress(OSError))
    holding.callback(lambda: path.unlink(missing_ok=True))


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
        fault = damage(checkpoint) or unusable(checkpoint)
        if fault is None:
            return checkpoint
        report(f"{checkpoint.name} is damaged ({fault}); set aside as {set_aside_broken(checkpoint).name}")
    return None


def set_aside_broken(checkpoint: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that it does not count any more; its new path. What was set aside
    under that name before is removed. Raises `CheckpointError`."""
    return _set_aside(checkpoint, BROKEN)


def broken_checkpoints(run: Path) -> list[str]:
    """Names of the checkpoints that are set aside because they cannot be used."""
    return sorted(path.name for path in run.glob(f"checkpoint-*.{BROKEN}"))


def set_aside_newer(checkpoint: Path) -> list[Path]:
    """Rename the checkpoints of later steps beside ``checkpoint``: a run that goes on from it does not own them."""
    step = checkpoint_step(checkpoint)
    return [_set_aside(p, SUPERSEDED) for p in checkpoints(checkpoint.parent) if checkpoint_step(p) > step]


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
        raise CheckpointError(f"{checkpoint} is not a checkpoint", hint="checkpoints are named checkpoint-STEP")
    return int(match[1])


def write_json(path: Path, content: dict[str, object]) -> None:
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
