"""The run's folder: what is in it already, whether this run may go on from it, and the rows that it has lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pydantic import ValidationError
from xxhash import xxh32_intdigest

from luthier.config.adapters import own_values
from luthier.config.schema import RUN_CONFIG, RunConfig
from luthier.errors import CheckpointError, ModelError, RowError, UserError
from luthier.ledger import Ledger
from luthier.loader.feed import FeedPlace
from luthier.loader.stream_state import LoaderState
from luthier.packing.planner import PlannerPlace
from luthier.records import Address, Batch
from luthier.training.folder import FILES, artifacts, told_difference
from luthier.training.folder import checkpoint as checkpoints
from luthier.training.folder.state import has_state
from luthier.training.report import LOG_FILE, LOSS_PNG, REPORT_HTML, REPORT_JSON, RESULT_FILE
from luthier.writing import JsonObject, counted

MODEL_FOLDER, MERGED_FOLDER, INITIAL_ADAPTER = "model", "merged", "initial_adapter"
BASE_FOLDER = "base"  # of an adapter whose base is nowhere else: random weights, or adapters were merged first
ROLLOUTS_FOLDER, WEIGHTS_FOLDER = "rollouts", "weights"  # answers of each step; what samplers were given
PREDICTIONS_FOLDER = "predictions"
LOST_FILE = "lost_media.jsonl"

# Everything that a run leaves, or that is made of it. `RUN_CONFIG` is beside it, and says whose it is. The lists of
# lost rows (``quarantine.jsonl``) are of the data, and each preparation writes them anew.
LEFT_FOLDERS = (
    MODEL_FOLDER, MERGED_FOLDER, f"{MERGED_FOLDER}.{checkpoints.BROKEN}", BASE_FOLDER, INITIAL_ADAPTER,
    ROLLOUTS_FOLDER, WEIGHTS_FOLDER,
)  # fmt: skip
LEFT_FILES = (RESULT_FILE, REPORT_JSON, REPORT_HTML, LOSS_PNG, LOG_FILE, LOST_FILE)

# What may differ between a run and the run that goes on from it: places, views, and how a step is shared out (that the
# steps are the same is checked against the loader's state).
FREE = (
    "output", "tracking", "eval", "generate", "serve", "runtime.device", "runtime.dataloader_num_workers",
    "runtime.threads", "data.workers", "data.store", "data.max_drop", "train.gradient_accumulation_steps",
    "train.per_device_train_batch_size", "runtime.seed", "data.max_length", "train.packing",
)  # fmt: skip

WRITTEN_TO: dict[str, Any] = {
    "output": True, "tracking": True, "export": True, "rollout": {"engine": {"weights": True}},
}  # fmt: skip
"""What of a description names places that are written to, or nothing on disk."""

LENGTHS = ("train.max_steps", "train.num_train_epochs")  # a run may be made longer, also once it has finished


def open_run_folder(config: RunConfig, report: Callable[[str], None]) -> Path | None:
    """Prepare ``output.dir`` (main process only) and return the checkpoint to go on from, if any.

    Where the run begins anew, nothing of an earlier one stays there. Raises `CheckpointError` where the folder holds a
    run with another configuration or a finished run without checkpoints, where ``output.resume`` names a checkpoint
    that cannot be used, where this run reads what would be deleted, and where nothing can be written.
    """
    run = config.output.dir
    FILES.make_folder(run)
    checkpoints.clean_leftovers(run)
    checkpoints.check_writable(run)
    if config.output.overwrite:
        found = None
    elif config.output.resume == "never":
        _refuse_existing(run)
        found = None
    elif config.output.resume == "auto":
        found = _resume_auto(config, run, report)
    else:
        found = _resume_named(Path(config.output.resume).expanduser(), run, report)
        if _is_elsewhere(found, run):
            _begin_with(found, config)
    if found is None:
        _refuse_to_clear(config)
        _clear(run, with_checkpoints=config.output.overwrite)
    write_run_config(config, run)
    return found


def place_to_feed(config: RunConfig) -> FeedPlace | None:
    """Where the run in ``output.dir`` goes on, so that the rows it needs are prepared first. It is a guess: wrong, it
    costs time and nothing else, since all rows are handed over."""
    output = config.output
    if output.overwrite or output.resume == "never":
        return None
    found = checkpoints.checkpoints(output.dir) if output.resume == "auto" else [Path(output.resume).expanduser()]
    try:
        waiting = LoaderState.load(max(found, key=checkpoints.checkpoint_step)).waiting if found else {}
    except (CheckpointError, ValueError):
        return None
    if not waiting.get("place"):
        return None
    place = PlannerPlace.from_json(waiting["place"])
    before = tuple(np.unique(place.carried["position"]).tolist())
    return FeedPlace(epoch=int(waiting["epoch"]), position=place.position, before=before)


def check_run_folder(config: RunConfig) -> None:
    """Raise `CheckpointError` where the folder holds a run that this one may not go on from. Nothing is written."""
    run, output = config.output.dir, config.output
    if not run.is_dir():
        return
    there = checkpoints.checkpoints(run)
    if output.resume == "never" and not output.overwrite:
        _refuse_existing(run)
    if output.overwrite or output.resume == "never" or (output.resume == "auto" and not there):
        _refuse_to_clear(config)
    if output.resume == "auto" and not output.overwrite and (there or (run / RESULT_FILE).exists()):
        _refuse_another(run, config)
    if output.resume not in ("auto", "never") and not output.overwrite and _is_elsewhere(Path(output.resume), run):
        _refuse_beside(config)


def write_run_config(config: RunConfig, folder: Path) -> None:
    """Write the resolved run description, which every command takes as it does the user's own."""
    values = config.model_dump(mode="json")
    checkpoints.write_json(folder / RUN_CONFIG, {**values, "adapter": own_values(config.adapter, values["adapter"])})


def _resume_auto(config: RunConfig, run: Path, report: Callable[[str], None]) -> Path | None:
    newest = checkpoints.newest_whole(run, report)
    finished = (run / RESULT_FILE).exists()
    if newest is None and not finished:
        return None  # a run that failed or was killed before its first checkpoint holds nothing worth keeping
    longer = _refuse_another(run, config)
    if newest is None:
        raise CheckpointError(
            f"{run} holds a finished run and no checkpoint to go on from",
            hint="choose another output.dir; to begin anew in this one, set output.overwrite: true",
        )
    _check_resumable(newest)
    for key, there, here in longer:
        report(f"{key} was {there}, it is {here}: going on, with the learning rate of a run of that length")
    return newest


def _refuse_another(run: Path, config: RunConfig) -> list[tuple[str, object, object]]:
    """Raise `CheckpointError` if the folder's run had another configuration; being longer is none, and is given."""
    differing = differences(_as_read_today(_read_run_config(run)), config.model_dump(mode="json"))
    longer = [each for each in differing if each[0] in LENGTHS and _is_more(*each[1:])]
    others = [each for each in differing if each not in longer]
    if others:
        lines = "\n".join(f"  {line}" for each in others for line in told_difference(*each))
        raise CheckpointError(
            f"{run} holds a run with another configuration:\n{lines}",
            hint="output.overwrite: true starts anew there (its checkpoints are deleted); or choose another "
            "output.dir; or name the checkpoint to go on from in output.resume",
        )
    return longer


def _is_more(there: object, here: object) -> bool:
    return isinstance(there, int | float) and isinstance(here, int | float) and here > there


def _resume_named(checkpoint: Path, run: Path, report: Callable[[str], None]) -> Path:
    checkpoints.checkpoint_step(checkpoint)
    fault: str | None = "no such folder"
    if checkpoint.is_dir():
        fault = checkpoints.damage(checkpoint) or checkpoints.unusable(checkpoint)
    if fault is not None:
        raise CheckpointError(
            f"output.resume: {checkpoint} cannot be used: {fault}",
            hint="name a whole checkpoint-N folder, or set output.resume: auto",
        )
    _check_resumable(checkpoint)
    if checkpoint.resolve().parent == run.resolve():
        for aside in checkpoints.set_aside_newer(checkpoint):
            report(f"going on from {checkpoint.name}: a later one is set aside as {aside.name}")
    return checkpoint


def _is_elsewhere(checkpoint: Path, run: Path) -> bool:
    return checkpoint.expanduser().resolve().parent != run.resolve()


def _begin_with(checkpoint: Path, config: RunConfig) -> None:
    """Make the folder that of a run which goes on from a checkpoint of another folder: with what that run has logged
    and lost, and with nothing of any other."""
    run = config.output.dir
    _refuse_beside(config)
    if not _has_begun_alike(config):
        _refuse_to_clear(config)
        _clear(run, with_checkpoints=False)
    for before in (checkpoint.parent / LOG_FILE, checkpoint.parent / LOST_FILE):
        if before.is_file():
            FILES.write(run / before.name, before.read_bytes())


def _refuse_beside(config: RunConfig) -> None:
    """Raise `CheckpointError` where the folder of a run that goes on from another folder's checkpoint holds a run that
    has not begun there: checkpoints and curves of both would be taken for those of one."""
    run, checkpoint = config.output.dir, config.output.resume
    if (checkpoints.checkpoints(run) or (run / RESULT_FILE).exists()) and not _has_begun_alike(config):
        raise CheckpointError(
            f"output.resume names {checkpoint}, and {run} holds a run that has not begun there",
            hint="choose another output.dir; or, to go on with the run that is there, leave output.resume out",
        )


def _has_begun_alike(config: RunConfig) -> bool:
    """Whether the folder's run is this one, begun from the same checkpoint."""
    if not (config.output.dir / RUN_CONFIG).exists():
        return False
    there, here = _as_read_today(_read_run_config(config.output.dir)), config.model_dump(mode="json")
    output = there.get("output")
    is_same_start = isinstance(output, dict) and output.get("resume") == here["output"]["resume"]
    return is_same_start and all(key in LENGTHS for key, *_ in differences(there, here))


def _check_resumable(checkpoint: Path) -> None:
    if not has_state(checkpoint, checkpoints.OPTIMIZER_STATE):
        raise CheckpointError(
            f"{checkpoint} has no optimizer state (it was saved with output.save_only_model)",
            hint="start anew with output.overwrite: true, or set model.name_or_path to it in another output.dir",
        )


def _refuse_existing(run: Path) -> None:
    present = [name for name in (RESULT_FILE, LOG_FILE) if (run / name).exists()]
    present += [path.name for path in checkpoints.checkpoints(run)]
    if present:
        raise CheckpointError(
            f"output.resume is never, but {run} holds a run: {', '.join(present)}",
            hint="choose another output.dir; to begin anew in this one, set output.overwrite: true",
        )


def _left(run: Path, *, with_checkpoints: bool) -> list[Path]:
    """What a run has left in a folder, and is there; nothing where none has begun there: it is the user's own then.
    `RUN_CONFIG`, which says whose the others are, comes last."""
    if not (run / RUN_CONFIG).exists() and not (run / RESULT_FILE).exists() and not checkpoints.checkpoints(run):
        return []
    names: tuple[str, ...] = LEFT_FOLDERS
    if (run / MODEL_FOLDER).is_dir():  # else they are of a model before its training, which may use this folder
        names = (*names, PREDICTIONS_FOLDER)
    found = [*(checkpoints.left_checkpoints(run) if with_checkpoints else []), *(run / name for name in names)]
    files = [run / name for name in (*LEFT_FILES, RUN_CONFIG)]
    return [*(folder for folder in found if folder.is_dir()), *(file for file in files if file.is_file())]


def _clear(run: Path, *, with_checkpoints: bool) -> None:
    """Delete what a run has left, by name; anything else in the folder stays. Checkpoints that are set aside stay, too,
    unless ``with_checkpoints``."""
    for path in _left(run, with_checkpoints=with_checkpoints):
        (FILES.remove_folder if path.is_dir() else FILES.remove_file)(path)


def _refuse_to_clear(config: RunConfig) -> None:
    """Raise `CheckpointError` where the run reads files that would be deleted, such as the model of the run before, and
    where it would replace a folder that no run has left, such as the user's own ``model``."""
    output = config.output
    left = [path.resolve() for path in _left(output.dir, with_checkpoints=output.overwrite)]
    folders = [] if left else [output.dir / name for name in LEFT_FOLDERS]
    if own := [folder.name for folder in folders if folder.is_dir() and any(folder.iterdir())]:
        raise CheckpointError(
            f"{output.dir} holds {', '.join(own)}, which no run has left there, and a run has folders of that name",
            hint="choose another output.dir, such as a new folder in it",
        )
    if named := named_within(config, left):
        what = f"{named}, which this run would delete as it begins anew in {output.dir}"
        raise CheckpointError(what, hint="choose another output.dir")


def named_within(config: RunConfig, folders: Collection[Path]) -> str | None:
    """Of what a run reads the first file or folder in one of these, which are resolved: ``KEY names PATH``."""
    for key, text in _texts(config.model_dump(mode="json", exclude=WRITTEN_TO), ""):
        with suppress(OSError, ValueError, RuntimeError):  # not every text can be a path
            if any(Path(text).expanduser().resolve().is_relative_to(each) for each in folders):
                return f"{key} names {text}"
    return None


def _texts(tree: object, at: str) -> Iterator[tuple[str, str]]:
    """All texts of a description, each with its key: ``("data.train[0].path", "rows.jsonl")``."""
    if isinstance(tree, str):
        yield at, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, f"{at}.{key}" if at else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _texts(value, f"{at}[{index}]")


def _read_run_config(run: Path) -> dict[str, object]:
    try:
        return checkpoints.read_json(run / RUN_CONFIG)
    except CheckpointError as error:
        raise CheckpointError(
            f"{run} holds a run, but its {RUN_CONFIG} cannot be read: {error.message}",
            hint="choose another output.dir; to begin anew in this one, set output.overwrite: true",
        ) from error


def _as_read_today(there: dict[str, object]) -> dict[str, object]:
    """A setting that was not there yet when the run was begun counts as its default."""
    try:
        return RunConfig.model_validate(there).model_dump(mode="json")
    except ValidationError:  # a setting that has gone, or has another meaning: it is told as a difference
        return there


def differences(there: dict[str, object], here: dict[str, object]) -> list[tuple[str, object, object]]:
    """``(dotted key, value there, value here)`` of every setting that differs and is not free to."""
    first, second = _flatten(there), _flatten(here)
    changed = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    fixed = [key for key in changed if not any(key == free or key.startswith(f"{free}.") for free in FREE)]
    return [(key, first.get(key), second.get(key)) for key in fixed]


def refuse_unfollowed(described: RunConfig, asked: RunConfig, answering: RunConfig) -> None:
    """Raise `UserError` for settings that are asked for beside those of a run, and that what the run has left, which
    answers, does not have: a model that is whole keeps its own config, template and tokens."""
    said, wanted, has = (_flatten(each.model_dump(mode="json")) for each in (described, asked, answering))
    changed = [key for key in wanted if wanted[key] != said.get(key)]
    if lost := [key for key in changed if wanted[key] != has.get(key)]:
        hint = "leave it out, or describe another model: model: RUN/model, train: {enabled: false}"
        raise UserError(
            f"{', '.join(lost)}: a trained run answers with what it has saved, so this is not followed", hint=hint
        )


def _flatten(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def other_models(config: RunConfig) -> dict[str, dict[str, str]]:
    """The files of all models that a run reads again as it goes on, beside the weights of a checkpoint, by the names in
    its description: the adapters that it began with, its reference, and models that judge answers. The code of rewards,
    tools and environments, too."""
    paths = {name: Path(name).expanduser() for name in _read_again(config)}
    digests = {
        name: {"": artifacts.digest_of_file(path)} if path.is_file() else artifacts.model_digests(path)
        for name, path in paths.items()
    }
    return {name: found for name, found in digests.items() if found}


def _read_again(config: RunConfig) -> dict[str, str]:
    """Which key names each of them."""
    adapter, reference = config.adapter, config.objective.reference.name_or_path
    named: list[tuple[str, str | None]] = [("adapter.merge_first", str(name)) for name in adapter.merge_first]
    named += [("adapter.name_or_path", adapter.name_or_path), ("objective.reference.name_or_path", reference)]
    named += [("rollout.rewards", name) for each in config.rollout.rewards for name in (each.model, each.adapter)]
    files = [each.file for each in config.rollout.rewards] + [each.file for each in config.rollout.tools]
    files.append(None if config.rollout.environment is None else config.rollout.environment.file)
    named += [("rollout", str(file)) for file in files if file is not None]
    if adapter.merge_first or (config.objective.needs_reference and reference is None):
        named.append(("model.name_or_path", config.model.name_or_path))
    return {name: key for key, name in named if name is not None}


def refuse_other_models(checkpoint: Path, config: RunConfig, tokenizer: Path, tell: Callable[[str], object]) -> None:
    """Raise `ModelError` where a run that goes on from this checkpoint would read files that have changed since it was
    begun: of the base of its adapter, or of `other_models`. Of code it is told."""
    base, others = checkpoint / checkpoints.BASE_FILES, checkpoint / checkpoints.OTHER_MODELS
    if base.is_file():
        artifacts.refuse_another_base(checkpoints.read_json(base), config.model, tokenizer)
    known = checkpoints.read_json(others) if others.is_file() else {}
    for name, found in other_models(config).items() if known else ():
        if known.get(name, found) == found:
            continue
        if "" in found:
            tell(f"the code in {name} has changed since {checkpoint.name}: it may answer otherwise than before")
        else:
            raise ModelError(
                f"{name} is not what it was when the run of {checkpoint} was begun: its files have changed since",
                hint="put them back, or begin anew with output.overwrite: true",
                key=_read_again(config)[name],
            )


# ---------------------------------------------------------------------- rows whose media are gone when their turn comes


MAX_TOLD = 10  # of a run; the file has them all
UNREADABLE_LINE = "unreadable line of lost_media.jsonl"  # a note of the ledger: a row was lost, and which is not known


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file. ``check`` is the hash of the others, so that a changed number does not take another row."""

    file: str
    row: int
    counted: bool
    reason: str
    detail: str
    check: int

    @classmethod
    def of(cls, error: RowError, *, counted: bool) -> _Entry:
        assert error.address is not None
        told = (error.address.file, error.address.row, counted, error.reason, error.detail)
        check = xxh32_intdigest(msgspec.json.encode(told))
        return cls(file=told[0], row=told[1], counted=counted, reason=error.reason, detail=error.detail, check=check)


class LostMediaRows:
    """Those of one run, of all that it went on from too. Every rank adds its own to one file, a line at a time."""

    def __init__(self, folder: Path, ledger: JsonObject, *, max_drop: float, tell: Callable[[str], object]) -> None:
        """``ledger`` is that of the training rows, as JSON, ``max_drop`` as in `Ledger.check`."""
        self.path = folder / LOST_FILE
        self._ledger = Ledger.from_json(ledger) if ledger else None  # segments from memory have none
        self._max_drop = max_drop
        self._tell = tell
        self._known: set[Address] = set()
        entries, damaged = _entries(self.path)
        for error, is_counted in entries:
            self._count(error, counted=is_counted)
        if damaged:
            count = counted(len(damaged), "line")
            where = f"{self.path}:{damaged[0]}"
            noted = f"the ledger notes it as {UNREADABLE_LINE!r}"
            tell(f"{count} cannot be read (the first: {where}), and {noted}")

    def watch(self, batches: Iterable[Batch], *, counted: bool = True) -> Iterator[Batch]:
        """The batches; what they lost is noted on the way. ``counted`` is for rows of the ledger.

        Raises `BudgetError` when more of them are lost than ``data.max_drop`` allows.
        """
        for batch in batches:
            for address, loss in batch.lost:
                self._add(RowError(loss.reason, loss.detail, address=address), counted=counted)
            yield batch

    def _add(self, error: RowError, *, counted: bool) -> None:
        assert error.address is not None
        if error.address in self._known:
            return
        line = msgspec.json.encode(_Entry.of(error, counted=counted)) + b"\n"
        torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")  # by a process that was killed
        FILES.append(self.path, b"\n" * torn + line)
        self._count(error, counted=counted)
        if len(self._known) <= MAX_TOLD:
            self._tell(f"lost: {error}; padding stands in its place")
        if counted and self._ledger is not None:
            self._ledger.check(max_drop=self._max_drop)

    def _count(self, error: RowError, *, counted: bool) -> None:
        assert error.address is not None
        if error.address not in self._known and counted and self._ledger is not None:
            self._ledger.lose_kept(error)
        self._known.add(error.address)


def ledger_of_run(ledger: dict[str, object], folder: Path, trained: Collection[Address]) -> dict[str, object]:
    """What became of the rows when the run ended: rows that any rank lost on the way are quarantined, and of the others
    those in ``trained`` (the rows that finished steps took) are trained. Asserts the ledger's identity."""
    if not ledger:
        return ledger
    found = Ledger.from_json(ledger)
    entries, damaged = _entries(folder / LOST_FILE)
    lost = {error.address: error for error, counted in entries if counted}
    for error in lost.values():
        found.lose_kept(error)
    found.trained = len(set(trained) - lost.keys())
    if damaged:
        found.note(UNREADABLE_LINE, len(damaged))
    found.check(max_drop=found.read)
    return found.to_json()


def _entries(path: Path) -> tuple[list[tuple[RowError, bool]], list[int]]:
    """The lost rows of a file, with whether each is a row of the ledger; and the numbers of lines that say none.

    A last line without a newline was torn by a kill; its row will be lost again, and told. Once another line is written
    behind it, it is a line that says no row, like a damaged one.
    """
    if not path.is_file():
        return [], []
    found, damaged = [], []
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            damaged.append(number)
            continue
        error = RowError(entry.reason, entry.detail, address=Address(file=entry.file, row=entry.row))
        if entry == _Entry.of(error, counted=entry.counted):
            found.append((error, entry.counted))
        else:
            damaged.append(number)
    return found, damaged
