"""The feed as training sees it: a process that resolves rows ahead of training.

Any number of processes may read what it leaves (`luthier.loader.feed_files`); the one that started it ends it.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Self

import msgspec

from luthier.config.choices import MixtureBy
from luthier.config.inputs import MediaCache
from luthier.config.schema import Packing, RunConfig, SourceConfig
from luthier.errors import SourceError, UserError
from luthier.loader.feed_files import ALIVE, FACTS, FAILED, Failure, FeedFacts, FeedJob, portion_file
from luthier.loader.feeding import run_feed
from luthier.loader.settings import units_of
from luthier.preparation.portions import ResolvedPortion
from luthier.sources import resolve_sources
from luthier.sources.files import find_files
from luthier.store.manifest import FEEDS
from luthier.store.shard_reader import store_gone
from luthier.store.store import store_folder

SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.05  # seconds between two looks
SECONDS_WITHOUT_SIGN = 60.0  # of a feed that another machine has started: thirty of its beats
SECONDS_TO_END = 8.0  # more than it gives itself


class FeedReader:
    """Reads what a feed leaves in its folder. ``alive`` says whether the feed may still be at work.

    Without it, as on a machine that did not start the feed, no sign of life for `SECONDS_WITHOUT_SIGN` is its end.
    """

    def __init__(self, folder: Path, *, alive: Callable[[], bool] | None = None) -> None:
        self.folder = folder
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
                raise store_gone(self.folder)
            if not is_alive and self._alive is None:
                raise self._no_sign()
            if not is_alive:
                raise UserError(
                    "the process that prepares rows ahead of training died without a word",
                    hint="if memory ran out, set data.workers lower; or prepare first: luthier prepare CONFIG",
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
    """A feed of this process. Use it in a ``with`` block, or `close` it."""

    def __init__(self, job: FeedJob, process: SpawnProcess, lifeline: Connection) -> None:
        """Use `Feed.start`."""
        self.job = job
        self.reader = FeedReader(job.folder, alive=process.is_alive)
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

    def close(self) -> None:
        """End the process and remove its files."""
        self._lifeline.close()  # its other end notices
        self._process.join(SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        shutil.rmtree(self.job.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------------------- where the feed's process leaves its files


BYTES_WORTH_A_FEED = 32_000_000  # of files: less is prepared in the time that the model takes to load


def prepares_meanwhile(config: RunConfig) -> bool:
    """The answer depends on the config and the files' sizes alone, never on what the store has."""
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
    return store_folder(config.data.store, "").parent / FEEDS / name


def _num_bytes(sources: list[SourceConfig]) -> int:
    total = 0
    for source in sources:
        try:
            total += sum(file.size for file in find_files(source))
        except SourceError:  # not of files, or missing: whoever opens it says so
            return 0
    return total
