"""Encoding chunks of rows, in this process or in others: the same results in the same order."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Generic, Literal, Protocol, TypeVar

from luthier.encoding.shard import EncodedSample, freeze_sample
from luthier.errors import RowError, UserError
from luthier.records import Row, Sample
from luthier.sources import RowBytes, RowReader

# A worker has to import the data path, load the tokenizer and make its own recordings: four seconds or so, in which one
# process does as much as this.
BYTES_WORTH_WORKERS = 48_000_000
CHUNKS_AHEAD = 3  # per worker: enough that none waits, few enough that memory stays small
MOST_WORKERS = 16  # one process reads and writes for all; beyond this it is what they wait for

Outcome = EncodedSample | RowError
Tag = TypeVar("Tag")


class RowEncoder(Protocol):
    """What preparation needs of `luthier.encoding.encoder.Encoder`. It must survive pickling if there are workers."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of all that decides a sample, beside the row."""

    def encode_many(self, rows: Iterable[Row]) -> Iterator[Sample | RowError]:
        """One outcome per row, in order."""

    def expect_many_rows(self) -> None:
        """Get ready for much text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk(Generic[Tag]):
    """Rows of one source to encode together, and whatever the caller wants back. ``num_bytes``: the rows' raw size."""

    tag: Tag
    reader: RowReader
    rows: Sequence[RowBytes]
    num_bytes: int


def encode_chunks(
    chunks: Iterator[Chunk[Tag]], encoder: RowEncoder, *, workers: int | Literal["auto"]
) -> Generator[tuple[Tag, list[Outcome]], None, None]:
    """Each chunk's tag with one outcome per row, in the order of the chunks.

    ``workers`` 0 encodes here; ``auto`` starts processes once `BYTES_WORTH_WORKERS` were encoded here and more comes.
    A `RowError` is an outcome; everything else that an encoder raises is raised, with a note that names the row.
    Raises `UserError` if a worker dies. Close the generator to stop the workers.
    """
    num_workers = min(_num_cores(), MOST_WORKERS) if workers == "auto" else workers
    if workers == 0 or workers == "auto":
        bytes_here = 0
        for chunk in chunks:
            yield chunk.tag, encode_rows(encoder, chunk.reader, chunk.rows)
            bytes_here += chunk.num_bytes
            if num_workers > 1 and bytes_here >= BYTES_WORTH_WORKERS:
                break
        else:
            return
    yield from _encode_elsewhere(chunks, encoder, num_workers)


def encode_rows(encoder: RowEncoder, reader: RowReader, rows: Sequence[RowBytes]) -> list[Outcome]:
    """Decode, convert and encode; one outcome per row."""
    read: list[Row | RowError] = []
    for row in rows:
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


def _encode_elsewhere(
    chunks: Iterator[Chunk[Tag]], encoder: RowEncoder, num_workers: int
) -> Iterator[tuple[Tag, list[Outcome]]]:
    # spawned, not forked: the tokenizer's threads do not survive a fork. None starts before it has something to do.
    pool = ProcessPoolExecutor(
        num_workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(encoder,)
    )
    under_way: deque[tuple[Chunk[Tag], Future[list[Outcome]] | None]] = deque()
    try:
        for chunk in chunks:
            under_way.append((chunk, pool.submit(_encode_in_worker, chunk.reader, chunk.rows) if chunk.rows else None))
            if len(under_way) > CHUNKS_AHEAD * num_workers:
                yield _next_done(under_way)
        while under_way:
            yield _next_done(under_way)
    except BrokenProcessPool as error:
        raise _worker_died(chunk if not under_way else under_way[0][0]) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _num_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))  # what this process may use, which in a container is less than there are
    return os.cpu_count() or 1


def _next_done(under_way: deque[tuple[Chunk[Tag], Future[list[Outcome]] | None]]) -> tuple[Tag, list[Outcome]]:
    chunk, future = under_way[0]
    outcomes = [] if future is None else future.result()
    under_way.popleft()
    return chunk.tag, outcomes


def _worker_died(chunk: Chunk[Tag]) -> UserError:
    near = chunk.rows[0].address if chunk.rows else "the first rows"
    return UserError(
        f"a process that encodes rows died, at or after {near}",
        hint="if memory ran out, set data.workers lower (0: no processes). A script that calls Luthier needs "
        "`if __name__ == '__main__':` around the call, because workers import it",
    )


_worker_encoder: RowEncoder


def _start_worker(encoder: RowEncoder) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    _worker_encoder = encoder
    encoder.expect_many_rows()


def _encode_in_worker(reader: RowReader, rows: Sequence[RowBytes]) -> list[Outcome]:
    return encode_rows(_worker_encoder, reader, rows)
