"""Preparing on a Ray cluster: units are tasks of actors, one for each core, which put samples into the shared store.

Ray is an optional package and is imported when it is wanted. All nodes must see the data and ``data.store`` under the
same paths. Ray restarts an actor that dies and gives its task to it again; what it had committed is then found.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from luthier.errors import UserError, install_hint
from luthier.preparation.portions import ResolvedPortion
from luthier.preparation.resolver import Resolver
from luthier.preparation.sharing import UnitResolver, place_units
from luthier.preparation.work_units import WorkUnits, decode_result
from luthier.preparation.workers import RowEncoder
from luthier.sources import Source
from luthier.store.manifest import SPOOL

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
    ray = _import_ray()
    is_mine = not ray.is_initialized()
    if is_mine:
        _connect(ray, address)
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
                raise _stuck(under_way[next(iter(under_way))][0], len(units.units))
            number, actor = under_way.pop(finished[0])
            free.append(actor)
            told = _result(ray, finished[0])
            done[number] = told.encoded
            resolver.share = (wanted + len(done)) / len(units.units)
            lost = len(decode_result(told.encoded).lost)
            source = units.units[number].source
            resolver.count(encoded=told.num_encoded, reused=told.num_reused, lost=lost, source=source)
        yield done.pop(wanted)


def _stuck(number: int, num_units: int) -> UserError:
    return UserError(
        f"the Ray cluster has finished no part for {PATIENCE:g} s; it is at part {number + 1} of {num_units}",
        hint="`ray status` says which machines and CPUs it has, and `ray list actors` which processes live",
    )


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


def _import_ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise UserError("--ray: the package 'ray' is not installed", hint=install_hint("ray")) from error


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        hint = "`ray start --head` begins a cluster; `--ray local` uses the cores of this machine"
        raise UserError(f"--ray {address}: no cluster answers: {error}", hint=hint) from error
