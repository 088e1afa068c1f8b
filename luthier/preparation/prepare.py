"""Rows to stored samples: what a run does before its first step, and what a second run hardly does at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from luthier.config.machine import usable_cores
from luthier.config.schema import RUN_CONFIG, RunConfig
from luthier.errors import BudgetError, UserError, install_hint
from luthier.ledger import Ledger
from luthier.preparation import Numbering, Prepared, PreparedSet, Quarantine, hold_out, info_of
from luthier.preparation.resolver import Progress, ResolvedPortion, Resolver, read_in_order
from luthier.preparation.sharing import UnitResolver, place_units, resolve_units
from luthier.preparation.work_units import WorkUnits, decode_result
from luthier.preparation.workers import RowEncoder
from luthier.records import Ints
from luthier.sources.origins import resolve_sources
from luthier.sources.source import Source, open_sources
from luthier.store import SampleStore
from luthier.store.format import SPOOL, store_folder

QUARANTINE_FILE = "quarantine.jsonl"
PREVIEW_FILE = "quarantine.preview.jsonl"


def lost_rows_of(config: RunConfig, *, trains: bool = False) -> Quarantine:
    """The list of a run's lost rows, ``quarantine.jsonl`` in its output folder.

    Where that already holds a run, the file is that run's, and only one that ``trains`` there writes it; others write
    ``quarantine.preview.jsonl``.
    """
    is_kept = not trains and (config.output.dir / RUN_CONFIG).is_file()
    return Quarantine(config.output.dir / (PREVIEW_FILE if is_kept else QUARANTINE_FILE))


def prepare(
    config: RunConfig,
    encoder: RowEncoder,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    ray_address: str | None = None,
    quarantine: Quarantine | None = None,
) -> Prepared:
    """Encode what the run's data has and the store has not, and say which samples the run will see.

    Several processes may do so at once: they share the work. ``ray_address`` leaves it to a Ray cluster. Rows that are
    lost are written to ``quarantine``, which stays open for those that are lost later; None: `lost_rows_of`.

    Raises `SourceError`, `StoreError`, `BudgetError` if more rows are lost than ``data.max_drop`` allows, and
    `UserError` if none is left.
    """
    if quarantine is None:
        with closing(lost_rows_of(config)) as own:
            return prepare(config, encoder, on_progress=on_progress, ray_address=ray_address, quarantine=own)
    train_configs, eval_configs = resolve_sources(config.data)
    folder = store_folder(config.data.store, encoder.fingerprint)
    num_encoded = num_reused = 0
    collections = []
    for split, configs in (("train", train_configs), ("eval", eval_configs)):
        sources = open_sources(configs, seed=config.runtime.seed) if configs else []
        resolver = Resolver(
            sources=sources, encoder=encoder, folder=folder, split=split, eager=False, on_progress=on_progress
        )
        collections.append(Collection(split=split, sources=sources))
        with closing(_portions(sources, resolver, config.data.workers, ray_address)) as portions:
            collections[-1].add_all(portions, quarantine)
        for source in sources:
            source.check_unchanged()  # after the last row, too
        num_encoded += resolver.num_encoded
        num_reused += resolver.num_reused
    lost = quarantine.written
    store = SampleStore.open(folder, fingerprint=encoder.fingerprint)
    sets = [collection.finish(store, config, lost) for collection in collections]
    # rows that are evaluated on are ordered among themselves, however many others were lost
    train, evaluation = sets[0], replace(sets[1], numbering=None) if eval_configs else None
    if evaluation is None and config.data.eval_split:
        train, evaluation = hold_out(train, config.data.eval_split, seed=config.runtime.seed, quarantine=quarantine)
    return Prepared(
        train=train,
        eval=evaluation,
        num_encoded=num_encoded,
        num_reused=num_reused,
        quarantine=quarantine.written,
    )


def _portions(
    sources: Sequence[Source], resolver: Resolver, workers: int | Literal["auto"], ray_address: str | None
) -> Generator[ResolvedPortion, None, None]:
    units = WorkUnits.of(sources, spool=resolver.folder.parent / SPOOL)
    if units is None or not units.units:  # a stream has no parts that could be shared
        return resolver.resolve(read_in_order(sources), workers=workers)
    if ray_address is not None:
        return resolve_units_with_ray(units, resolver, address=ray_address)
    return resolve_units(units, resolver, workers=workers)


# --------------------------------------------------------------------------------------------------------------------
# Resolved portions become a set: columns of numbers, 28 bytes a row, for there may be many millions.


NumberType = TypeVar("NumberType", np.int32, np.int64)


@dataclass(kw_only=True, slots=True, eq=False)
class Collection:
    """The rows of one split that stay, and the account of those that do not."""

    split: str
    sources: Sequence[Source]
    ledger: Ledger = field(default_factory=Ledger)
    files: list[str] = field(default_factory=list)
    _rows: list[Ints] = field(default_factory=list)
    _sample_ids: list[Ints] = field(default_factory=list)
    _source_ids: list[NDArray[np.int32]] = field(default_factory=list)
    _file_ids: list[NDArray[np.int32]] = field(default_factory=list)
    _row_numbers: list[Ints] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)  # of each source, the rows that were read
    _ids: dict[int, list[NDArray[np.uint64]]] = field(default_factory=dict)  # by source: ids of two may be alike

    def add_all(self, portions: Iterable[ResolvedPortion], quarantine: Quarantine) -> None:
        """Take in portions, in their order; lost rows go into quarantine."""
        for portion in portions:
            self.ledger.add(portion.ledger)
            self.files.extend(portion.new_files)
            for row in portion.lost:
                quarantine.add(row.error, split=self.split, raw=row.raw)
            if len(portion.id_digests):
                self._ids.setdefault(int(portion.source_ids[0]), []).append(portion.id_digests)
            here = np.bincount(portion.source_ids, minlength=len(self.sources)).tolist()
            self._counts = [sum(pair) for pair in zip(self._counts or [0] * len(here), here, strict=True)]
            stays = portion.sample_ids >= 0
            self._rows.append(portion.rows[stays])
            self._sample_ids.append(portion.sample_ids[stays])
            self._source_ids.append(portion.source_ids[stays].astype(np.int32))
            self._file_ids.append(portion.file_ids[stays].astype(np.int32))
            self._row_numbers.append(portion.row_numbers[stays])

    def finish(self, store: SampleStore, config: RunConfig, lost: Path | None) -> PreparedSet:
        """The set of the rows that are kept. Raises `BudgetError` or `UserError`."""
        self._check(config.data.max_drop, lost)
        sample_ids = _joined(self._sample_ids, np.int64)
        is_used = np.zeros(len(store), dtype=np.bool_)
        is_used[sample_ids] = True
        repeated = len(sample_ids) - int(is_used.sum())
        if repeated:
            self.ledger.note("repeated", repeated)
        if repeated_ids := sum(map(_num_repeated, self._ids.values())):
            self.ledger.note("repeated_id", repeated_ids)  # `luthier stats` says which
        return PreparedSet(
            store=store,
            sample_ids=sample_ids,
            source_ids=_joined(self._source_ids, np.int32),
            file_ids=_joined(self._file_ids, np.int32),
            row_numbers=_joined(self._row_numbers, np.int64),
            files=tuple(self.files),
            sources=tuple(info_of(source, config) for source in self.sources),
            ledger=self.ledger,
            numbering=Numbering(
                rows=_joined(self._rows, np.int64), counts=tuple(self._counts or [0] * len(self.sources))
            ),
        )

    def _check(self, max_drop: float, lost: Path | None) -> None:
        try:
            self.ledger.check(max_drop=max_drop)
        except BudgetError as error:
            key = f"data.{self.split}" if error.key == "data" else error.key
            raise BudgetError(f"{error.message}\n  all of them: {lost}", hint=error.hint, key=key) from None
        if not self.ledger.prepared and (self.sources or self.split == "train"):
            why = f": {self.ledger.reasons()}" if self.ledger.lost else ""
            raise UserError(
                f"no row is left for {self.split}: {self.ledger.read} were read, {self.ledger.lost} are lost{why}",
                hint=f"name data with data.{self.split}" if lost is None else f"see {lost}",
                key=f"data.{self.split}",
            )


def _num_repeated(parts: list[NDArray[np.uint64]]) -> int:
    """How many ids an earlier row of the source has."""
    digests = np.concatenate(parts)
    digests = digests[digests > 0]
    return len(digests) - len(np.unique(digests))


def _joined(parts: list[NDArray[NumberType]], kind: type[NumberType]) -> NDArray[NumberType]:
    """The parts as one array; the list is emptied, so that the memory is needed once."""
    joined = np.concatenate([np.zeros(0, kind), *parts])
    parts.clear()
    return joined


# ---- Preparing on a Ray cluster: units are tasks of actors, one for each core, which put samples into the shared store


TASKS_AHEAD = 2  # per actor: one at work, one waiting
MAX_RESTARTS = 3
PATIENCE = 1800.0  # seconds in which a cluster finishes no unit; one takes seconds, or minutes with files of slow hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What an actor needs to know of the work."""

    sources: Sequence[Source]
    encoder: RowEncoder
    folder: Path
    split: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskDone:
    """What came of a unit."""

    encoded: bytes
    num_encoded: int
    num_reused: int


class UnitActor:
    """Lives in a process of the cluster, keeps its encoder, and resolves one unit after the other."""

    def __init__(self, task: Task) -> None:
        units = WorkUnits.of(task.sources, spool=task.folder.parent / SPOOL)
        assert units is not None, "a stream has no units"
        self._done: dict[int, bytes] = {}
        self._resolver = Resolver(
            sources=task.sources, encoder=task.encoder, folder=task.folder, split=task.split, eager=False
        )
        self._identity = units.identity
        self._units = UnitResolver(units=units, resolver=self._resolver, workers=0, on_done=self._done.__setitem__)

    def resolve(self, number: int, identity: str) -> TaskDone:
        """Resolve a unit. Raises `UserError` if this node sees other data."""
        if identity != self._identity:
            raise UserError(
                "a node of the cluster sees other data than this process: paths, sizes or times of files differ",
                hint="give all nodes one file system, and the same version of Luthier",
            )
        resolver = self._resolver
        before = resolver.num_encoded, resolver.num_reused
        resolver.store = resolver.store.refresh()
        self._units.resolve([number])
        return TaskDone(
            encoded=self._done.pop(number),
            num_encoded=resolver.num_encoded - before[0],
            num_reused=resolver.num_reused - before[1],
        )


def resolve_units_with_ray(
    units: WorkUnits, resolver: Resolver, *, address: str
) -> Generator[ResolvedPortion, None, None]:
    """All rows of all units in their order, resolved by the cluster at ``address`` (``auto``: the one of this node,
    ``local``: processes of this machine). Close the generator to stop its work.

    Raises `UserError` if Ray is not installed or no cluster answers, and what `Resolver.resolve` raises.
    """
    ray = import_ray("--ray")
    is_mine = not ray.is_initialized()
    if is_mine:
        connect(ray, address, option="--ray")
    try:
        yield from place_units(units, _results(ray, units, resolver), resolver)
    finally:
        if is_mine:
            ray.shutdown()


def _results(ray: Any, units: WorkUnits, resolver: Resolver) -> Iterator[bytes]:
    """The encoded results, in order; actors work ahead, no further than `TASKS_AHEAD` each."""
    task = Task(sources=resolver.sources, encoder=resolver.encoder, folder=resolver.folder, split=resolver.split)
    num_actors = max(1, min(int(ray.cluster_resources().get("CPU", 1)), len(units.units)))
    kind = ray.remote(num_cpus=1, max_restarts=MAX_RESTARTS, max_task_retries=MAX_RESTARTS)(UnitActor)
    shared = ray.put(task)
    actors = [kind.remote(shared) for _ in range(num_actors)]
    free = [actor for actor in actors for _ in range(TASKS_AHEAD)]
    todo = iter(range(len(units.units)))
    under_way: dict[object, tuple[int, object]] = {}
    done: dict[int, bytes] = {}
    identity = units.identity
    for wanted in range(len(units.units)):
        while wanted not in done:
            while free and (number := next(todo, None)) is not None:
                actor = free.pop(0)
                under_way[actor.resolve.remote(number, identity)] = number, actor
            finished, _ = ray.wait(list(under_way), num_returns=1, timeout=PATIENCE)
            if not finished:
                number = under_way[next(iter(under_way))][0]
                raise UserError(
                    f"the Ray cluster has finished no part for {PATIENCE:g} s; it is at part {number + 1} of "
                    f"{len(units.units)}",
                    hint="`ray status` says which machines and CPUs it has, and `ray list actors` which processes live",
                )
            number, actor = under_way.pop(finished[0])
            free.append(actor)
            told = _result(ray, finished[0])
            done[number] = told.encoded
            resolver.share = (wanted + len(done)) / len(units.units)
            lost = len(decode_result(told.encoded).lost)
            source = units.units[number].source
            resolver.count(encoded=told.num_encoded, reused=told.num_reused, lost=lost, source=source)
        yield done.pop(wanted)


def _result(ray: Any, finished: object) -> TaskDone:
    try:
        found = ray.get(finished)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from error
        raise
    except ray.exceptions.RayActorError as error:
        hint = f"it was started {MAX_RESTARTS + 1} times; if memory ran out, start Ray with fewer CPUs a node"
        raise UserError(f"a process of the Ray cluster died: {error}", hint=hint) from error
    assert isinstance(found, TaskDone), f"an actor gave {type(found).__name__}"
    return found


def import_ray(option: str) -> Any:
    """The package. Raises `UserError` where it is not installed, saying which ``option`` wants it."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise UserError(f"{option}: the package 'ray' is not installed", hint=install_hint("ray")) from error


def connect(ray: Any, address: str, *, option: str, cpus: int | None = None) -> None:
    """Join the cluster at ``address``; on this machine alone (``local``) with at least so many ``cpus``. Raises
    `UserError`."""
    more: dict[str, Any] = {}
    if address == "local":  # its processes work for this command, and for nobody else
        more["_system_config"] = {"worker_niceness": 0}
        more["num_cpus"] = usable_cores() if cpus is None else max(cpus, usable_cores())
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **more)
    except (ConnectionError, ValueError) as error:
        hint = f"`ray start --head` begins a cluster; {option} local uses the cores of this machine"
        raise UserError(f"{option} {address}: no cluster answers: {error}", hint=hint) from error
