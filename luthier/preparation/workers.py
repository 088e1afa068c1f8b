"""Encoding chunks of rows, in this process or in others: the same results in the same order."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Generic, Literal, Protocol, TypeVar

from luthier.config.machine import usable_cores
from luthier.errors import RowError, UserError
from luthier.plugins import GUARD
from luthier.records import MediaItem, Row, Sample
from luthier.sources import RowBytes
from luthier.sources.source import RowReader
from luthier.store.format import EncodedSample, freeze_sample

# A worker has to import the data path, load the tokenizer and make its own recordings: four seconds or so, in which one
# process encodes a hundred megabytes. So much has to be left that all together gain by it.
BYTES_WORTH_WORKERS = 300_000_000
BYTES_HERE = 48_000_000  # are encoded before anyone asks what is left: the first rows come soonest from here
SECONDS_BETWEEN_LOOKS = 0.5  # for the parent
CHUNKS_AHEAD = 3  # per worker: enough that none waits, few enough that memory stays small
LONGEST_CHUNK = 3600.0  # seconds for the rows of one chunk, long videos among them; then the worker hangs
MOST_WORKERS = 16  # one process reads and writes for all; beyond this it is what they wait for

# When Python looks for cycles: rows make few, and looking through all that is alive costs a tenth of the time.
RARELY = (50_000, 20, 100)

Outcome = EncodedSample | RowError
Tag = TypeVar("Tag")


class RowEncoder(Protocol):
    """What preparation needs of `luthier.encoding.encoder.Encoder`. It must survive pickling if there are workers."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of all that decides a sample, beside the row."""

    @property
    def about(self) -> Mapping[str, str]:
        """What a person would want to know of it."""

    @property
    def takes_media(self) -> bool:
        """Whether samples may have pictures, videos or sounds."""

    def encode_many(self, rows: Iterable[Row]) -> Iterator[Sample | RowError]:
        """One outcome per row, in order."""

    def media_change(self, media: Sequence[MediaItem]) -> bytes | None:
        """What tells a sample's media from those that are there now; None if they are the same."""

    def expect_many_rows(self) -> None:
        """Get ready for much text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk(Generic[Tag]):
    """Rows to encode together, and whatever the caller wants back.

    ``source_ids`` says which reader is each row's, ``num_bytes`` is the rows' raw size.
    """

    tag: Tag
    rows: Sequence[RowBytes]
    source_ids: Sequence[int]
    num_bytes: int


def encode_chunks(
    chunks: Iterator[Chunk[Tag]],
    encoder: RowEncoder,
    readers: Sequence[RowReader],
    *,
    workers: int | Literal["auto"],
    bytes_left: Callable[[], float],
) -> Generator[tuple[Tag, list[Outcome]], None, None]:
    """Each chunk's tag with one outcome per row, in the order of the chunks.

    ``workers`` 0 encodes here; ``auto`` starts processes once `BYTES_HERE` were encoded here, if `BYTES_WORTH_WORKERS`
    are then left (``bytes_left``, as far as anyone knows). A daemonic process always encodes here.
    A `RowError` is an outcome; everything else that an encoder raises is raised, with a note that names the row.
    Raises `UserError` if a worker dies, or hangs and is ended after `LONGEST_CHUNK`. Close the generator to stop the
    workers.
    """
    if current_process().daemon:  # Python lets such a process (of a pool, say) start none
        workers = 0
    with _few_collections():
        if workers == "auto":
            num_workers = min(usable_cores(), MOST_WORKERS)
            yield from _encode_here_first(chunks, encoder, readers, num_workers, bytes_left)
        elif workers == 0:
            for chunk in chunks:
                yield chunk.tag, encode_read_rows(encoder, readers, chunk.rows, chunk.source_ids)
        else:
            yield from _encode_elsewhere(chunks, encoder, readers, workers)


def encode_read_rows(
    encoder: RowEncoder, readers: Sequence[RowReader], rows: Sequence[RowBytes], source_ids: Sequence[int]
) -> list[Outcome]:
    """Decode, convert and encode; one outcome per row."""
    read: list[Row | RowError] = []
    for row, source in zip(rows, source_ids, strict=True):
        reader = readers[source]
        try:
            read.append(reader.convert(reader.read(row)))
        except RowError as error:
            read.append(error)
    encoded = iter(_encode_all(encoder, [item for item in read if not isinstance(item, RowError)]))
    outcomes: list[Outcome] = []
    for row, item in zip(rows, read, strict=True):
        outcome = item if isinstance(item, RowError) else next(encoded)
        if isinstance(outcome, RowError):
            outcomes.append(outcome.at(outcome.address or row.address))  # without the frames of its traceback
        else:
            outcomes.append(freeze_sample(outcome))
    return outcomes


def _encode_all(encoder: RowEncoder, rows: Sequence[Row]) -> list[Sample | RowError]:
    try:
        return list(encoder.encode_many(rows))
    except UserError:
        raise
    except Exception:
        for row in rows:  # which of them was it?
            try:
                list(encoder.encode_many([row]))
            except Exception as error:
                error.add_note(f"while encoding {row.address}")
                raise
        raise


@contextmanager
def _few_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _encode_here_first(
    chunks: Iterator[Chunk[Tag]],
    encoder: RowEncoder,
    readers: Sequence[RowReader],
    num_workers: int,
    bytes_left: Callable[[], float],
) -> Iterator[tuple[Tag, list[Outcome]]]:
    bytes_here = 0
    for chunk in chunks:
        yield chunk.tag, encode_read_rows(encoder, readers, chunk.rows, chunk.source_ids)
        bytes_here += chunk.num_bytes
        if num_workers > 1 and bytes_here >= BYTES_HERE and bytes_left() >= BYTES_WORTH_WORKERS:
            yield from _encode_elsewhere(chunks, encoder, readers, num_workers)
            return


def _encode_elsewhere(
    chunks: Iterator[Chunk[Tag]], encoder: RowEncoder, readers: Sequence[RowReader], num_workers: int
) -> Iterator[tuple[Tag, list[Outcome]]]:
    # spawned, not forked: the tokenizer's threads do not survive a fork. None starts before it has something to do.
    context = get_context("spawn")
    watched, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=context,
        initializer=_start_worker,
        initargs=(encoder, readers, watched, os.getpid(), LONGEST_CHUNK),
    )
    under_way: deque[tuple[Chunk[Tag], Future[list[Outcome]] | None]] = deque()
    try:
        for chunk in chunks:
            under_way.append(
                (chunk, pool.submit(_encode_in_worker, chunk.rows, chunk.source_ids) if chunk.rows else None)
            )
            if len(under_way) > CHUNKS_AHEAD * num_workers:
                yield _next_done(under_way)
        while under_way:
            yield _next_done(under_way)
    except BrokenProcessPool as error:
        raise _worker_died(chunk if not under_way else under_way[0][0]) from error
    finally:
        lifeline.close()  # whatever they still encode is not wanted: nobody waits for it, at Ctrl-C or an error
        pool.shutdown(wait=True, cancel_futures=True)
        watched.close()


def _next_done(under_way: deque[tuple[Chunk[Tag], Future[list[Outcome]] | None]]) -> tuple[Tag, list[Outcome]]:
    chunk, future = under_way[0]
    outcomes = [] if future is None else future.result()
    under_way.popleft()
    return chunk.tag, outcomes


def _worker_died(chunk: Chunk[Tag]) -> UserError:
    near = chunk.rows[0].address if chunk.rows else "the first rows"
    return UserError(
        f"a process that encodes rows died or hung, at or after {near}",
        hint="if it hung, the line is printed above; if memory ran out, set data.workers lower (0: no processes); "
        + GUARD,
    )


_worker_encoder: RowEncoder
_worker_readers: Sequence[RowReader]
_worker_limit: float


def _start_worker(
    encoder: RowEncoder, readers: Sequence[RowReader], lifeline: Connection, parent: int, limit: float
) -> None:
    """Get ready, and end when the parent lets go of the lifeline or ends, however it does. ``limit``: seconds for a
    chunk."""
    global _worker_encoder, _worker_readers, _worker_limit
    for sent in (signal.SIGINT, signal.SIGHUP):  # to the whole group, and the parent's to answer
        signal.signal(sent, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(parent, lifeline.poll), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    gc.freeze()
    gc.set_threshold(*RARELY)
    _worker_encoder, _worker_readers, _worker_limit = encoder, readers, limit
    encoder.expect_many_rows()


def end_with_parent(parent: int, wait: Callable[[float], object] = time.sleep) -> None:
    """End this process, which ``parent`` started, when that one has ended, however it did. ``wait`` waits so many
    seconds; this process ends, too, when it gives something that is true."""
    while os.getppid() == parent and not wait(SECONDS_BETWEEN_LOOKS):
        pass
    os._exit(1)


def _encode_in_worker(rows: Sequence[RowBytes], source_ids: Sequence[int]) -> list[Outcome]:
    faulthandler.dump_traceback_later(_worker_limit, exit=True)  # the parent waits for us
    try:
        return encode_read_rows(_worker_encoder, _worker_readers, rows, source_ids)
    finally:
        faulthandler.cancel_dump_traceback_later()
