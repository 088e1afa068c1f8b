"""The feed as training sees it: a process that resolves rows ahead of training.

Any number of processes may read what it leaves; the one that started it ends it.

    <folder>/facts.json         rows of each source, written first
    <folder>/eval-00000.bin     portions of the held-out rows
    <folder>/train-00000.bin    portions of the training rows, in the order in which they are needed
    <folder>/failed.json        why the feed had to stop
    <folder>/alive              a number that grows every `BEAT_SECONDS`, for readers that cannot see the process

A file appears under its name when it is whole.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from luthier.config.choices import MixtureBy, Packing
from luthier.config.inputs import MediaCache, SourceConfig
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import BudgetError, ModelError, SourceError, StoreError, TemplateError, TokenizerError, UserError
from luthier.loader.settings import mixture_of, units_of
from luthier.packing.order import EpochOrder, RowOrder, hold_out_part
from luthier.plugins import GUARD
from luthier.preparation import Quarantine, SourceInfo, empty_side, info_of, num_held_out, remarks_on
from luthier.preparation.prepare import QUARANTINE_FILE
from luthier.preparation.resolver import ResolvedPortion, Resolver, read_by_number
from luthier.records import Ints
from luthier.sources.files import find_files
from luthier.sources.origins import resolve_sources
from luthier.sources.row_index import RowIndex
from luthier.sources.source import Source, open_sources
from luthier.store import shard_reader
from luthier.store.disk import Disk
from luthier.store.format import FEEDS, SPOOL, default_root, store_folder

FACTS, FAILED, ALIVE = "facts.json", "failed.json", "alive"
BEAT_SECONDS = 2.0
_KINDS: dict[str, type[UserError]] = {
    kind.__name__: kind for kind in (SourceError, TemplateError, TokenizerError, ModelError, StoreError, BudgetError)
}


class FeedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first row that is trained on is read. ``identity`` covers the files as they were found.

    eval_sources   none where rows of the training sources are held out
    num_tried      so many of the rows in `packing.order.hold_out_part` were looked at for evaluation
    num_eval_rows  those of them that are not lost, or those of the evaluation's own sources
    """

    num_rows: list[int]
    sources: tuple[SourceInfo, ...]
    eval_sources: tuple[SourceInfo, ...]
    num_eval_portions: int
    num_eval_rows: int
    num_tried: int
    identity: str
    encoder: str

    @property
    def told(self) -> list[str]:
        """How many rows there are, and what is to be known of their sources, in sentences."""
        held_out = f", {self.num_eval_rows:,} held out" if self.num_eval_rows else ""
        counts = f"rows: {sum(self.num_rows):,}, sources: {len(self.num_rows)}{held_out}"
        return [counts, *remarks_on([*self.sources, *self.eval_sources])]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a feed stopped. ``kind`` is the name of a class in `luthier.errors`."""

    kind: str
    message: str
    hint: str | None = None
    key: str | None = None
    path: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An error as another process can raise it again."""
        if isinstance(error, UserError):
            path = error.path if isinstance(error, SourceError) else None
            kind = type(error).__name__
            return cls(kind=kind, message=error.message, hint=error.hint, key=error.key, path=path)
        return cls(kind="UserError", message=f"preparing rows failed: {type(error).__name__}: {error}")

    def error(self) -> UserError:
        error = _KINDS.get(self.kind, UserError)(self.message, hint=self.hint, key=self.key)
        if isinstance(error, SourceError):
            error.path = self.path
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedPlace:
    """A place in a run's orders: of an ``epoch`` the rows from ``position`` on are needed next, and those ``before``
    it at some positions, which wait in a window."""

    epoch: int
    position: int
    before: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedJob:
    """What a feed is to do. ``after``: the place of a run that goes on, whose next rows are handed over first."""

    config: RunConfig
    folder: Path
    after: FeedPlace | None = None


def portion_file(kind: str, number: int) -> str:
    return f"{kind}-{number:05}.bin"


def publish(path: Path, content: bytes) -> None:
    """Write a file at once or not at all; after a power cut nobody reads it. Raises `StoreError`."""
    Disk().publish(path, [content], durable=False)


SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.05  # seconds between two looks
SECONDS_WITHOUT_SIGN = 60.0  # of a feed that another machine has started: thirty of its beats
SECONDS_TO_END = 8.0  # more than it gives itself


class FeedReader:
    """Reads what a feed leaves in its folder. ``alive`` says whether the feed may still be at work.

    Without it, as on a machine that did not start the feed, no sign of life for `SECONDS_WITHOUT_SIGN` is its end.
    ``lost``: where the run's lost rows are listed, which one of its processes does.
    """

    def __init__(
        self, folder: Path, *, alive: Callable[[], bool] | None = None, lost: Quarantine | None = None
    ) -> None:
        self.folder, self.lost = folder, lost
        self._alive = alive
        self._sign: tuple[bytes | None, float] | None = None  # the last one, and when it was seen first
        self._facts: FeedFacts | None = None

    def facts(self) -> FeedFacts:
        """Waits for them. Raises what stopped the feed."""
        if self._facts is None:
            self._facts = msgspec.json.decode(self._wait_for(FACTS), type=FeedFacts)
        return self._facts

    def portions(self, kind: str, count: int | None = None) -> Iterator[ResolvedPortion]:
        """The portions of ``eval`` or ``train``, each when it is there. Raises what stopped the feed."""
        numbers = itertools.count() if count is None else range(count)
        return (ResolvedPortion.from_bytes(self._wait_for(portion_file(kind, number))) for number in numbers)

    def _wait_for(self, name: str) -> bytes:
        path, wait = self.folder / name, SHORTEST_WAIT
        while True:
            # asked first: what a feed wrote before it ended counts
            is_alive = self._gives_signs() if self._alive is None else self._alive()
            if path.exists():
                return path.read_bytes()
            failed = self.folder / FAILED
            if failed.exists():
                raise msgspec.json.decode(failed.read_bytes(), type=Failure).error()
            if self._alive is not None and not self.folder.is_dir():  # who started the feed has made its folder
                raise shard_reader.store_gone(self.folder)
            if not is_alive and self._alive is None:
                raise self._no_sign()
            if not is_alive:
                raise UserError(
                    "the process that prepares rows ahead of training died without a message",
                    hint="if memory ran out, set data.workers lower, or prepare first: luthier prepare CONFIG; "
                    + GUARD,
                )
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _gives_signs(self) -> bool:
        try:
            sign = (self.folder / ALIVE).read_bytes()
        except OSError:
            sign = None
        now = time.monotonic()
        if self._sign is None or sign != self._sign[0]:
            self._sign = (sign, now)
        return now - self._sign[1] < SECONDS_WITHOUT_SIGN

    def _no_sign(self) -> UserError:
        state = "has not changed" if self.folder.is_dir() else "is not there"
        return UserError(
            f"the process that prepares rows has given no sign for {SECONDS_WITHOUT_SIGN:.0f} seconds: on "
            f"{socket.gethostname()} {self.folder} {state}",
            hint="data.store has to be a folder that all machines see; or set data.prepare: before. If the first "
            "process of the run has died, what it printed says why",
        )


class Feed:
    """A feed of this process, and the list of rows that its run loses. Use it in a ``with`` block, or `close` it."""

    def __init__(self, job: FeedJob, process: SpawnProcess, lifeline: Connection) -> None:
        """Use `Feed.start`."""
        self.job = job
        listed = job.config.output.dir / QUARANTINE_FILE
        self._lost = Quarantine(listed, temporary=listed.with_name(f".{listed.name}.partial"))
        self.reader = FeedReader(job.folder, alive=process.is_alive, lost=self._lost)
        self._process = process
        self._lifeline = lifeline

    @classmethod
    def start(cls, job: FeedJob) -> Self:
        """Start the process. It ends when this one does."""
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        context = get_context("spawn")
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(target=run_feed, args=(job, theirs), name="luthier-feed")
        process.start()
        theirs.close()
        return cls(job, process, ours)

    def close(self, *, has_failed: bool = False) -> None:
        """End the process and remove its files. Raises `UserError` if the list of lost rows cannot be written.

        Where the run ``has_failed`` before its last row had come, a list that is there already says more, and stays.
        """
        self._lifeline.close()  # its other end notices
        self._process.join(SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        shutil.rmtree(self.job.folder, ignore_errors=True)
        if has_failed and self._lost.path.exists():
            self._lost.discard()
        else:
            self._lost.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.close(has_failed=error is not None)


# ---------------------------------------------------------------------------- where the feed's process leaves its files


BYTES_WORTH_A_FEED = 32_000_000  # of files: less is prepared in the time that the model takes to load


def prepares_meanwhile(config: RunConfig) -> bool:
    """Whether a feed prepares the rows of a run while it trains: by its config and the sizes of its files alone, never
    by what the store has."""
    if config.train.packing is not Packing.WINDOW or config.data.prepare == "before":
        return False
    if units_of(config).are_compared:  # partners are drawn from the whole set, and pairs are planned as a whole
        return False
    if config.media.cache is not MediaCache.NONE:  # the encoders see all items before training
        return False
    if config.data.mixture.by is MixtureBy.TOKENS:  # shares of tokens need all lengths
        return False
    if config.data.prepare == "meanwhile":
        return True
    return _num_bytes(resolve_sources(config.data)[0]) >= BYTES_WORTH_A_FEED


def feed_folder(config: RunConfig) -> Path:
    """One for each output folder, beside the store: the same on all ranks."""
    name = hashlib.sha256(str(config.output.dir.resolve()).encode()).hexdigest()[:16]
    return (config.data.store or default_root()) / FEEDS / name


def _num_bytes(sources: list[SourceConfig]) -> int:
    total = 0
    for source in sources:
        try:
            total += sum(file.size for file in find_files(source))
        except SourceError:  # not of files, or missing: whoever opens it says so
            return 0
    return total


# ----------- The feed's own process: index the sources, then resolve the rows that training needs, in the order of need


FIRST_PORTION = 256  # rows: the first step does not wait for more than it needs
PORTION = 4096
SECONDS_LEFT = 3.0
PORTIONS_IN_HASTE, NICENESS = 3, 10
MOST_PORTIONS = 500  # of a run: each is a shard of the store


def run_feed(job: FeedJob, lifeline: Connection) -> None:
    """The process's life. What stops it is written down for the readers."""
    for sent in (signal.SIGINT, signal.SIGHUP):  # to the whole group, and the parent's to answer
        signal.signal(sent, signal.SIG_IGN)
    feeding = _Feeding(job)
    threading.Thread(target=feeding.watch, args=(lifeline,), daemon=True).start()
    try:
        feeding.run()
    except BaseException as error:  # noqa: BLE001  the edge of a process: the readers raise it again
        if not isinstance(error, UserError):
            traceback.print_exc()
        with suppress(StoreError):  # without the folder, which the readers then tell
            publish(job.folder / FAILED, msgspec.json.encode(Failure.of(error)))


class _Feeding:
    def __init__(self, job: FeedJob) -> None:
        self.config = job.config
        self.folder, self.after = job.folder, job.after
        self.num_handed, self.num_files = Counter[str](), Counter[str]()  # portions of each kind, and their files
        self.num_tried = self.num_kept = 0  # of the rows that are evaluated on
        self.stop = threading.Event()

    def watch(self, lifeline: Connection) -> None:
        """Give signs of life until the parent lets go, or dies; then there is little time left."""
        beats = itertools.count()
        with suppress(EOFError, OSError):
            self._beat(next(beats))
            while not lifeline.poll(BEAT_SECONDS):
                self._beat(next(beats))
            lifeline.recv_bytes()
        self.stop.set()
        time.sleep(SECONDS_LEFT)
        os._exit(0)  # in the midst of a portion; whatever it encodes in other processes ends with it

    def _beat(self, number: int) -> None:
        with suppress(StoreError):  # what cannot be written will be told of a portion
            publish(self.folder / ALIVE, str(number).encode())

    def run(self) -> None:
        config = self.config
        train_configs, eval_configs = resolve_sources(config.data)
        seed = config.runtime.seed
        train = open_sources(train_configs, seed=seed)
        evaluation = open_sources(eval_configs, seed=seed) if eval_configs else []
        encoder = Encoder.from_config(config)
        self.store = store_folder(config.data.store, encoder.fingerprint)
        self.encoder = encoder
        train_indexes, eval_indexes = self._indexes(train), self._indexes(evaluation)
        sizes = tuple(len(index) for index in train_indexes)
        if evaluation:
            everything = np.arange(sum(map(len, eval_indexes)), dtype=np.int64)
            self._resolve("eval", evaluation, eval_indexes, _cut_up(everything))
        else:
            self._hold_out(train, train_indexes, sum(sizes))
        order = RowOrder(
            counts=sizes,
            mixture=mixture_of(config, [source.config.weight for source in train]),
            seed=seed,
            held_out=np.sort(hold_out_part(sum(sizes), 0, self.num_tried, seed=seed)),
        )
        self._publish_facts(train, train_indexes, evaluation)
        self._resolve("train", train, train_indexes, needed_portions(order, self.after))

    def _hold_out(self, train: Sequence[Source], indexes: Sequence[RowIndex], num_rows: int) -> None:
        """Resolve the rows that are held out, and others in place of those that are lost."""
        size, seed = self.config.data.eval_split, self.config.runtime.seed
        wanted = num_held_out(size, num_rows) if size else 0
        if size and not 0 < wanted < num_rows:
            raise empty_side(size, wanted, num_rows)
        while self.num_kept < wanted and self.num_tried < num_rows:
            missing = wanted - self.num_kept
            rows = np.sort(hold_out_part(num_rows, self.num_tried, self.num_tried + missing, seed=seed))
            self.num_tried += len(rows)
            self._resolve("eval", train, indexes, _cut_up(rows))
            if self.stop.is_set():
                return

    def _indexes(self, sources: Sequence[Source]) -> list[RowIndex]:
        spool = self.store.parent / SPOOL
        found = []
        for source in sources:
            index = source.index(spool=spool)
            if index is None:
                raise UserError(
                    f"{source.name}: a stream cannot be shuffled as a whole",
                    hint="set train.packing: best_fit, which prepares all rows first",
                    key="train.packing",
                )
            found.append(index)
        return found

    def _publish_facts(
        self,
        sources: Sequence[Source],
        indexes: Sequence[RowIndex],
        evaluation: Sequence[Source],
    ) -> None:
        identity = hashlib.sha256("\0".join(index.identity for index in indexes).encode()).hexdigest()
        facts = FeedFacts(
            num_rows=[len(index) for index in indexes],
            sources=tuple(info_of(source, self.config) for source in sources),
            eval_sources=tuple(info_of(source, self.config) for source in evaluation),
            num_eval_portions=self.num_handed["eval"],
            num_eval_rows=self.num_kept,
            num_tried=self.num_tried,
            identity=identity,
            encoder=self.encoder.fingerprint,
        )
        publish(self.folder / FACTS, msgspec.json.encode(facts))

    def _resolve(
        self, kind: str, sources: Sequence[Source], indexes: Sequence[RowIndex], portions: Iterator[Ints]
    ) -> None:
        """Hand over portions of rows as they are resolved."""
        known = self.num_files[kind]  # a second pass over the same sources counts its files anew
        resolver = Resolver(sources=sources, encoder=self.encoder, folder=self.store, split=kind, eager=True)
        read = read_by_number(indexes, itertools.takewhile(lambda _: not self.stop.is_set(), portions))
        with closing(resolver.resolve(read, workers=self.config.data.workers)) as resolved:
            for portion in resolved:
                if self.stop.is_set():  # the folder may be another run's by now
                    return
                if kind == "eval":
                    self.num_kept += int((portion.sample_ids >= 0).sum())
                self.num_files[kind] += len(portion.new_files)
                numbered = replace(portion, file_ids=portion.file_ids + known)
                publish(self.folder / portion_file(kind, self.num_handed[kind]), numbered.to_bytes())
                self.num_handed[kind] += 1
                if kind == "train" and self.num_handed[kind] == PORTIONS_IN_HASTE + 1:
                    os.nice(NICENESS)  # training has begun: on a CPU it goes first


def needed_portions(order: RowOrder, after: FeedPlace | None) -> Iterator[Ints]:
    """All rows to train on, each once, in the order in which a run needs them that begins, or goes on ``after`` a
    place. A few at first, then more. What is remembered is a byte a row."""
    largest, size = max(PORTION, order.num_rows // MOST_PORTIONS), FIRST_PORTION
    gathered, number = [], 0
    for rows in _once_each(order, after or FeedPlace(epoch=0, position=0)):
        gathered.append(rows)
        number += len(rows)
        while number >= size:
            together = np.concatenate(gathered)
            yield together[:size]
            gathered, number = [together[size:]], number - size
            size = min(2 * size, largest)
    if number:
        yield np.concatenate(gathered)


def _once_each(order: RowOrder, after: FeedPlace) -> Iterator[Ints]:
    seen = np.zeros(order.num_rows, dtype=np.bool_)
    seen[order.held_out] = True
    here, following = order.epoch(after.epoch), order.epoch(after.epoch + 1) if after.position else None
    waiting = [here.rows(position, position + 1) for position in after.before]
    later = () if following is None else _stretches(following, 0)
    for rows in itertools.chain(waiting, _stretches(here, after.position), later):
        _, first = np.unique(rows, return_index=True)
        rows = rows[np.sort(first)]
        rows = rows[~seen[rows]]
        seen[rows] = True
        yield rows
    for start in range(0, len(seen), PORTION):
        yield start + np.flatnonzero(~seen[start : start + PORTION])


def _stretches(order: EpochOrder, start: int) -> Iterator[Ints]:
    return (order.rows(place, place + PORTION) for place in range(start, len(order), PORTION))


def _cut_up(rows: Ints) -> Iterator[Ints]:
    return (rows[start : start + PORTION] for start in range(0, len(rows), PORTION))
