"""A worker process: ``python -m luthier.loader.worker DESCRIPTOR``, where the descriptor is its end of a socket. And
what it and the trainer say to each other.

It knows the store and nothing else: no torch (unless there are media, whose processor needs it), no `__main__` of the
user's, a tenth of a trainer's memory. It ends when its socket closes, or, should it be busy then, when it finds that it
has another parent.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.collation import CollateSettings, Grid, MediaInputs
from luthier.config.inputs import MediaConfig
from luthier.errors import UserError
from luthier.loader.reader import PLACE, BatchReader, PlannedMicroBatch
from luthier.media import FeatureFiles, MediaSource
from luthier.packing import UnitKind
from luthier.preparation.workers import end_with_parent
from luthier.records import LostMedia
from luthier.store import SampleStore


def main() -> None:
    """Read micro-batches until nobody wants them any more."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            _serve(connection)
        except (EOFError, ConnectionError):  # the trainer is gone, or has enough
            return


def _serve(connection: socket.socket) -> None:
    messages = _messages(connection)
    setup = next(messages)
    assert isinstance(setup, Setup), setup
    threading.Thread(target=end_with_parent, args=(setup.parent,), daemon=True).start()
    reader = _reader(setup)
    connection.sendall(frame(reader if isinstance(reader, Failed) else Ready()))
    if isinstance(reader, Failed):
        return
    slots = SharedArrays(setup.slots)
    for number, work in enumerate(messages):
        assert isinstance(work, Work), work
        connection.sendall(frame(_answer(reader, work, slots, number % max(1, len(setup.slots)))))


def _messages(connection: socket.socket) -> Iterator[WorkerMessage]:
    frames = Frames()
    while True:
        yield from receive(connection, frames)


def _reader(setup: Setup) -> BatchReader | Failed:
    try:
        store = SampleStore.open(Path(setup.folder), fingerprint=setup.fingerprint)
        media = None if setup.media is None else setup.media.inputs()
        return BatchReader(store, setup.how, shared=setup.shared, media=media)
    except Exception as error:  # noqa: BLE001  the edge of a process: the trainer raises it again
        return _failed(error)


def _answer(reader: BatchReader, work: Work, slots: SharedArrays, slot: int) -> Done | Failed:
    try:
        return done_of(reader.lay_out(planned_of(work)), slots, slot)
    except Exception as error:  # noqa: BLE001  the edge of a process: the trainer raises it again
        return _failed(error)


def _failed(error: Exception) -> Failed:
    told = error if isinstance(error, UserError) else None
    return Failed(
        kind=type(error).__name__,
        message=str(error) if told is None else told.message,
        hint=None if told is None else told.hint,
        traceback=traceback.format_exc(),
    )


# ----------------------------------------------------------------------------------------------------------------------
# What the trainer and its worker processes say to each other: msgpack in frames, over a socket. Nothing is pickled.
#
# trainer -> worker   Setup, then any number of Work
# worker -> trainer   Ready, then for each Work, in its order, Done or Failed


HEADER_BYTES = 8  # of a frame: its length, big-endian
READ_BYTES = 1 << 20


class MediaSetup(msgspec.Struct, frozen=True):
    """A `MediaSource` as plain data."""

    folder: str
    options: dict[str, Any]
    trust_remote_code: bool
    config_folder: str | None = None
    features: str | None = None  # the folder of what encoders made of items before

    @classmethod
    def of(cls, source: MediaSource, *, features: Path | None = None) -> MediaSetup:
        """The source as it is sent."""
        return cls(
            folder=str(source.folder),
            options=source.options.model_dump(mode="json"),
            trust_remote_code=source.trust_remote_code,
            config_folder=None if source.config_folder is None else str(source.config_folder),
            features=None if features is None else str(features),
        )

    def inputs(self) -> MediaInputs:
        source = MediaSource(
            folder=Path(self.folder),
            options=MediaConfig.model_validate(self.options),
            trust_remote_code=self.trust_remote_code,
            config_folder=None if self.config_folder is None else Path(self.config_folder),
        )
        media = MediaInputs(source)
        return media if self.features is None else media.reading(FeatureFiles(Path(self.features)))


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Where the samples are, how they are collated, and for which worker. ``slots``: descriptors of `SharedArrays`."""

    folder: str
    fingerprint: str
    how: CollateSettings
    parent: int
    shared: bool = False
    media: MediaSetup | None = None
    slots: tuple[int, ...] = ()


class Work(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch to read. ``places`` is the bytes of its table."""

    step: int
    places: bytes
    pack_bounds: list[int]
    units: UnitKind = UnitKind.NONE


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The store is open."""


class Array(msgspec.Struct, frozen=True):
    """An input of the model by name: what numpy calls its type, its shape, its bytes, or where these are in a slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""
    offset: int = -1


class Done(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch that was read: the bytes of the arrays of a `Grid`."""

    ids: bytes
    learned: bytes
    weights: bytes | None
    lengths: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...] | None = None
    inputs: tuple[Array, ...] = ()
    lost: tuple[tuple[int, str, str], ...] = ()
    slot: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why a micro-batch could not be read. ``kind`` is the name of the exception's class."""

    kind: str
    message: str
    hint: str | None
    traceback: str


Answer = Ready | Done | Failed
WorkerMessage = Setup | Work | Ready | Done | Failed

_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def frame(message: WorkerMessage) -> bytes:
    """The message as it goes over the socket."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(HEADER_BYTES, "big") + content


class Frames:
    """Bytes as they come, to messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, received: bytes) -> Iterator[WorkerMessage]:
        """The messages that are whole by now."""
        self._buffer += received
        while len(self._buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._buffer[:HEADER_BYTES], "big")
            if len(self._buffer) < end:
                return
            message = _decoder.decode(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield message


def receive(connection: socket.socket, frames: Frames) -> list[WorkerMessage]:
    """Wait for bytes; the messages that they complete. Raises ``EOFError`` where the other side is gone."""
    received = connection.recv(READ_BYTES)
    if not received:
        raise EOFError
    return list(frames.add(received))


def work_of(planned: PlannedMicroBatch) -> Work:
    """The micro-batch as a message; the names of its files stay here."""
    return Work(
        step=planned.step,
        places=planned.places.tobytes(),
        pack_bounds=list(planned.pack_bounds),
        units=planned.units,
    )


def planned_of(work: Work) -> PlannedMicroBatch:
    """The micro-batch of a message, without addresses."""
    places = np.frombuffer(work.places, dtype=PLACE)
    return PlannedMicroBatch(step=work.step, places=places, pack_bounds=work.pack_bounds, files={}, units=work.units)


def done_of(grid: Grid, slots: SharedArrays, slot: int) -> Done:
    """The grid as a message, large inputs in a slot."""
    offsets = slots.write(slot, [value for _, value in grid.inputs])
    weights = None if grid.weights_BT is None else grid.weights_BT.tobytes()
    return Done(
        ids=grid.ids_BT.tobytes(),
        learned=grid.learned_BT.tobytes(),
        weights=weights,
        lengths=grid.lengths,
        parents=grid.parents,
        inputs=tuple(
            Array(
                name=name,
                dtype=value.dtype.str,
                shape=value.shape,
                data=value.tobytes() if offset < 0 else b"",
                offset=offset,
            )
            for (name, value), offset in zip(grid.inputs, offsets, strict=True)
        ),
        slot=slot,
        lost=tuple((loss.group, loss.reason, loss.detail) for loss in grid.lost),
    )


def grid_of(done: Done, slots: SharedArrays) -> Grid:
    """The grid of a message. Nothing of it is in the slots any more."""
    shape = len(done.lengths), -1
    return Grid(
        ids_BT=np.frombuffer(done.ids, dtype=np.int32).reshape(shape),
        learned_BT=np.frombuffer(done.learned, dtype=np.bool_).reshape(shape),
        # a copy, because a tensor will be made of its memory, which has to be writable
        weights_BT=None if done.weights is None else np.frombuffer(done.weights, np.float32).reshape(shape).copy(),
        lengths=done.lengths,
        parents=done.parents,
        inputs=tuple((array.name, _values(array, done.slot, slots)) for array in done.inputs),
        lost=tuple(LostMedia(group=group, reason=reason, detail=detail) for group, reason, detail in done.lost),
    )


def _values(array: Array, slot: int, slots: SharedArrays) -> NDArray[np.generic]:
    dtype = np.dtype(array.dtype)
    if array.offset >= 0:
        return slots.read(slot, array.offset, dtype, array.shape)
    return np.frombuffer(array.data, dtype).reshape(array.shape).copy()


# -------------------------------------------------------------------- large arrays, in memory that both sides have open


LEAST_BYTES = 1 << 14  # smaller arrays go with the message
ALIGNMENT = 64  # bytes
ROOM_TO_GROW = 1.25


class SharedArrays:
    """Memory by number, of one worker. Each side has one of these over the same files."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self._views: list[mmap.mmap | None] = [None] * len(descriptors)

    @classmethod
    def create(cls, number: int) -> SharedArrays:
        """So many empty ones; none on systems without anonymous files, where everything goes with the messages."""
        if sys.platform != "linux":
            return cls([])
        return cls([os.memfd_create(f"luthier-slot-{slot}", os.MFD_CLOEXEC) for slot in range(number)])

    def write(self, slot: int, arrays: Sequence[NDArray[np.generic]]) -> list[int]:
        """Put the large ones into a slot, in place of what it held. Where each begins; -1: it was left out."""
        offsets, end = [], 0
        for array in arrays:
            fits = array.nbytes >= LEAST_BYTES and bool(self.descriptors)
            offsets.append(end if fits else -1)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT if fits else 0
        if end and end > os.fstat(self.descriptors[slot]).st_size:
            os.ftruncate(self.descriptors[slot], int(end * ROOM_TO_GROW))
        for array, offset in zip(arrays, offsets, strict=True):
            if offset >= 0:
                self._array(slot, offset, array.dtype, array.shape)[...] = array
        return offsets

    def read(self, slot: int, offset: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
        """A copy of an array that the other side has written."""
        return self._array(slot, offset, dtype, shape).copy()

    def close(self) -> None:
        """Let go of the memory; twice does no harm."""
        for view in self._views:
            if view is not None:
                view.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors, self._views = (), []

    def _array(
        self, slot: int, offset: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]
    ) -> NDArray[np.generic]:
        end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        view = self._views[slot]
        if view is None or len(view) < end:
            if view is not None:
                view.close()
            view = self._views[slot] = mmap.mmap(self.descriptors[slot], 0)  # all of the file, as large as it is now
        return np.frombuffer(memoryview(view)[offset:end], dtype=dtype).reshape(shape)


if __name__ == "__main__":
    main()
