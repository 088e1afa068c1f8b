"""The feed's own process: index the sources, then resolve the rows that training needs, in the order of need."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import StoreError, UserError
from luthier.loader.feed_files import (
    ALIVE,
    BEAT_SECONDS,
    FACTS,
    FAILED,
    Failure,
    FeedFacts,
    FeedJob,
    portion_file,
    publish,
)
from luthier.loader.run_order import RunOrder, held_out_rows, mixture_of
from luthier.preparation.portions import ResolvedPortion
from luthier.preparation.prepare import QUARANTINE_FILE
from luthier.preparation.quarantine import Quarantine
from luthier.preparation.resolver import resolve_portions
from luthier.sources import RowIndex, Source, open_sources, resolve_sources
from luthier.store.manifest import SPOOL
from luthier.store.store import store_folder

Ints = NDArray[np.int64]

FIRST_PORTION = 256  # rows: the first step does not wait for more than it needs
PORTION = 4096
SECONDS_TO_END = 3.0
PORTIONS_IN_HASTE, NICENESS = 3, 10
MOST_PORTIONS = 500  # of a run: each is a shard of the store


def run_feed(job: FeedJob, lifeline: Connection) -> None:
    """The process's life. What stops it is written down for the readers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    feeding = _Feeding(job.config, job.folder)
    threading.Thread(target=feeding.watch, args=(lifeline,), daemon=True).start()
    try:
        feeding.run()
    except BaseException as error:  # noqa: BLE001  the edge of a process: the readers raise it again
        if not isinstance(error, UserError):
            traceback.print_exc()
        with suppress(StoreError):  # without the folder, which the readers then tell
            publish(job.folder / FAILED, msgspec.json.encode(Failure.of(error)))


class _Feeding:
    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.stop = threading.Event()
        self.quarantine = Quarantine(config.output.dir / QUARANTINE_FILE)

    def watch(self, lifeline: Connection) -> None:
        """Give signs of life until the parent lets go, or dies; then there is little time left."""
        beats = itertools.count()
        with suppress(EOFError, OSError):
            self._beat(next(beats))
            while not lifeline.poll(BEAT_SECONDS):
                self._beat(next(beats))
            lifeline.recv_bytes()
        self.stop.set()
        time.sleep(SECONDS_TO_END)
        self.quarantine.close()
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
        sizes = [len(index) for index in train_indexes]
        held_out = held_out_rows(sum(sizes), config.data.eval_split if not evaluation else None, seed=seed)
        held_out = held_out if not evaluation else np.arange(sum(map(len, eval_indexes)), dtype=np.int64)
        order = RunOrder.of_sources(
            sizes,
            mixture_of(config, [source.config.weight for source in train]),
            seed=seed,
            held_out=np.zeros(0, np.int64) if evaluation else held_out,
        )
        eval_portions = [held_out[start : start + PORTION] for start in range(0, len(held_out), PORTION)]
        self._publish_facts(train, train_indexes, evaluation, len(eval_portions), len(held_out))
        with self.quarantine:
            sides = (evaluation, eval_indexes) if evaluation else (train, train_indexes)
            self._resolve("eval", *sides, iter(eval_portions))
            self._resolve("train", train, train_indexes, needed_portions(order))

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
        num_eval_portions: int,
        num_eval_rows: int,
    ) -> None:
        identity = hashlib.sha256("\0".join(index.identity for index in indexes).encode()).hexdigest()
        facts = FeedFacts(
            num_rows=[len(index) for index in indexes],
            names=[source.name for source in sources],
            weights=[source.config.weight for source in sources],
            eval_names=[source.name for source in evaluation],
            eval_weights=[source.config.weight for source in evaluation],
            num_eval_portions=num_eval_portions,
            num_eval_rows=num_eval_rows,
            identity=identity,
            encoder=self.encoder.fingerprint,
        )
        publish(self.folder / FACTS, msgspec.json.encode(facts))

    def _resolve(
        self, kind: str, sources: Sequence[Source], indexes: Sequence[RowIndex], portions: Iterator[Ints]
    ) -> None:
        resolved = resolve_portions(
            sources,
            indexes,
            self._until_stopped(portions),
            self.encoder,
            self.store,
            split=kind,
            workers=self.config.data.workers,
        )
        with closing(resolved):
            for number, portion in enumerate(resolved):
                if self.stop.is_set():  # the folder may be another run's by now
                    return
                self._hand_over(kind, number, portion)
                if kind == "train" and number == PORTIONS_IN_HASTE:
                    os.nice(NICENESS)  # training has begun: on a CPU it goes first

    def _until_stopped(self, portions: Iterator[Ints]) -> Iterator[Ints]:
        for portion in portions:
            if self.stop.is_set():
                return
            yield portion

    def _hand_over(self, kind: str, number: int, portion: ResolvedPortion) -> None:
        for row in portion.lost:
            self.quarantine.add(row.error, split=kind, raw=row.raw)
        publish(self.folder / portion_file(kind, number), portion.to_bytes())


def needed_portions(order: RunOrder) -> Iterator[Ints]:
    """All rows to train on, each once: as the first epoch needs them, then the others. A few at first, then more."""
    rows = order(0)
    _, first = np.unique(rows, return_index=True)
    rows = rows[np.sort(first)]
    rows = np.concatenate([rows, np.setdiff1d(order.rows, rows, assume_unique=True)])
    size, largest, start = FIRST_PORTION, max(PORTION, len(rows) // MOST_PORTIONS), 0
    while start < len(rows):
        yield rows[start : start + size]
        start += size
        size = min(2 * size, largest)
