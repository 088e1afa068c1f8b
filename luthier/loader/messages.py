"""What the trainer and its worker processes say to each other: msgpack in frames, over a socket. Nothing is pickled.

trainer -> worker   Setup, then any number of Work
worker -> trainer   Ready, then for each Work, in its order, Done or Failed
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import numpy as np

from luthier.collation import CollateSettings, Grid
from luthier.loader.places import PLACE, PlannedMicroBatch
from luthier.packing import Units

HEADER_BYTES = 8  # of a frame: its length, big-endian
READ_BYTES = 1 << 20


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Where the samples are, how they are collated, and whose worker this is."""

    folder: str
    fingerprint: str
    how: CollateSettings
    parent: int
    shared: bool = False


class Work(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch to read. ``places`` is the bytes of its table."""

    step: int
    places: bytes
    pack_bounds: list[int]
    units: Units = Units.NONE


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The store is open."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch that was read: the bytes of the arrays of a `Grid`."""

    ids: bytes
    learned: bytes
    weights: bytes | None
    lengths: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...] | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why a micro-batch could not be read. ``kind`` is the name of the exception's class."""

    kind: str
    message: str
    hint: str | None
    traceback: str


Answer = Ready | Done | Failed
Message = Setup | Work | Ready | Done | Failed

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def frame(message: Message) -> bytes:
    """The message as it goes over the socket."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(HEADER_BYTES, "big") + content


class Frames:
    """Bytes as they come, to messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, received: bytes) -> Iterator[Message]:
        """The messages that are whole by now."""
        self._buffer += received
        while len(self._buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._buffer[:HEADER_BYTES], "big")
            if len(self._buffer) < end:
                return
            message = _decoder.decode(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield message


def receive(connection: socket.socket, frames: Frames) -> list[Message]:
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


def done_of(grid: Grid) -> Done:
    """The grid as a message."""
    weights = None if grid.weights_BT is None else grid.weights_BT.tobytes()
    return Done(
        ids=grid.ids_BT.tobytes(),
        learned=grid.learned_BT.tobytes(),
        weights=weights,
        lengths=grid.lengths,
        parents=grid.parents,
    )


def grid_of(done: Done) -> Grid:
    """The grid of a message."""
    shape = len(done.lengths), -1
    return Grid(
        ids_BT=np.frombuffer(done.ids, dtype=np.int32).reshape(shape),
        learned_BT=np.frombuffer(done.learned, dtype=np.bool_).reshape(shape),
        # a copy, because a tensor will be made of its memory, which has to be writable
        weights_BT=None if done.weights is None else np.frombuffer(done.weights, np.float32).reshape(shape).copy(),
        lengths=done.lengths,
        parents=done.parents,
    )
