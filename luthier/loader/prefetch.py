"""Batches ahead of time: worker processes read what is planned, in order, and are looked after.

Why not torch's DataLoader: it asks its sampler for the next batch before it hands over one that is ready, so a plan
that waits for data would hold up training; its workers load torch and run the user's `__main__`; and a dead one is
reported without its rows, a stuck one not at all.
"""

from __future__ import annotations

import queue
import selectors
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing

from luthier import errors
from luthier.errors import LoaderError, UserError
from luthier.loader.messages import Answer, Done, Failed, grid_of
from luthier.loader.places import PlannedMicroBatch
from luthier.loader.process import WorkerProcess
from luthier.loader.reader import BatchReader
from luthier.records import Batch

AHEAD = 2  # micro-batches per worker: one in its hands, one waiting
PATIENCE = 4.0  # seconds for one micro-batch, which takes milliseconds
SECONDS_BETWEEN_LOOKS = 0.25


def iterate(
    reader: BatchReader,
    planned: Iterator[PlannedMicroBatch],
    *,
    num_workers: int,
    ahead: int = AHEAD,
    patience: float = PATIENCE,
) -> Generator[Batch, None, None]:
    """The batches of ``planned`` in its order. Close the generator to end the workers; they end with it in any case.

    ``num_workers`` 0 reads in this process. With workers, ``planned`` runs in a thread of its own, at most
    ``num_workers * ahead`` micro-batches before the last batch handed over; it may wait as long as it likes without
    holding up batches that are ready. It is closed, if it is a generator, by the side that runs it.

    Raises `LoaderError`, within ``patience`` seconds of waiting, if a worker died, or holds a micro-batch for longer
    than that and waits neither for a disk nor for its share of the processor; what ``planned`` raised, in its place in
    the order; `StoreError` if bytes are damaged.
    """
    if num_workers == 0:
        with closing(_closable(planned)) as plan:
            for micro_batch in plan:
                yield reader.read(micro_batch)
        return
    crew = _Crew(reader, planned, num_workers=num_workers, ahead=ahead, patience=patience)
    try:
        yield from crew.batches()
    finally:
        crew.close()


class _Crew:
    """Workers, the thread that gives them work in turn, and the queue that says whose turn it is to answer."""

    def __init__(
        self,
        reader: BatchReader,
        planned: Iterator[PlannedMicroBatch],
        *,
        num_workers: int,
        ahead: int,
        patience: float,
    ) -> None:
        self._reader = reader
        self._planned = planned
        self._patience = patience
        self._room = threading.Semaphore(num_workers * ahead)
        self._turns: queue.SimpleQueue[WorkerProcess | BaseException | None] = queue.SimpleQueue()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._giver = threading.Thread(target=self._give, name="luthier-plan", daemon=True)
        try:
            for _ in range(num_workers):
                worker = WorkerProcess.start(reader, num_slots=ahead + 1)
                self._workers.append(worker)
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        except BaseException:
            self.close()
            raise
        self._giver.start()

    def batches(self) -> Iterator[Batch]:
        """All of them, in order."""
        while True:
            turn = self._next_turn()
            if turn is None:
                return
            if isinstance(turn, BaseException):
                raise turn
            micro_batch, answer = self._answer_of(turn)
            self._room.release()
            yield self._batch(micro_batch, answer, turn)

    def close(self) -> None:
        """End the workers and the thread; a plan that is waiting for data just then ends when it has it."""
        self._closing = True
        self._room.release()
        for worker in self._workers:
            worker.kill()
        if self._giver.ident is not None:
            self._giver.join(timeout=1.0)
        for worker in self._workers:
            worker.connection.close()
        self._selector.close()

    def _give(self) -> None:
        """The thread's life: take the next micro-batch when there is room, give it to the next worker."""
        try:
            with closing(_closable(self._planned)) as plan:
                number = 0
                while self._room.acquire() and not self._closing:
                    micro_batch = next(plan, None)
                    if micro_batch is None or self._closing:
                        break
                    worker = self._workers[number % len(self._workers)]
                    worker.give(micro_batch)
                    self._turns.put(worker)
                    number += 1
            self._turns.put(None)
        except BaseException as error:  # noqa: BLE001  the edge of a thread: `batches` raises it again
            self._turns.put(error)

    def _next_turn(self) -> WorkerProcess | BaseException | None:
        while True:
            self._listen(seconds=0)
            try:
                return self._turns.get(timeout=SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                continue

    def _answer_of(self, worker: WorkerProcess) -> tuple[PlannedMicroBatch, Answer]:
        silence = 0.0
        num_heard = worker.num_heard
        while not worker.answers:
            looked = time.monotonic()
            self._listen(seconds=SECONDS_BETWEEN_LOOKS)
            # no look counts for more than it was meant to last: this process may have been stopped meanwhile itself
            silence += min(time.monotonic() - looked, SECONDS_BETWEEN_LOOKS)
            if worker.num_heard != num_heard:
                silence, num_heard = 0.0, worker.num_heard
            if not worker.answers and silence > self._patience and worker.is_stuck(silence):
                raise worker.stuck(silence)
        return worker.answers.popleft()

    def _listen(self, *, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            worker: WorkerProcess = key.data
            worker.listen()

    def _batch(self, micro_batch: PlannedMicroBatch, answer: Answer, worker: WorkerProcess) -> Batch:
        match answer:
            case Done():
                return self._reader.to_batch(grid_of(answer, worker.slots), micro_batch)
            case Failed():
                raise _error(micro_batch, answer)
            case _:
                raise AssertionError(answer)


def _error(micro_batch: PlannedMicroBatch, failed: Failed) -> UserError:
    rows = tuple(micro_batch.addresses())
    error: UserError
    if failed.kind == errors.StoreError.__name__:
        error = errors.StoreError(failed.message, hint=failed.hint)
    else:
        what = f"rows of step {micro_batch.step + 1} cannot be read: {failed.kind}: {failed.message}"
        error = LoaderError(what, hint=failed.hint, rows=rows)
    error.add_note(f"in a worker process, for the rows {', '.join(map(str, rows))}\n{failed.traceback}")
    return error


def _closable(planned: Iterator[PlannedMicroBatch]) -> Generator[PlannedMicroBatch, None, None]:
    if isinstance(planned, Generator):
        return planned
    return (micro_batch for micro_batch in planned)
