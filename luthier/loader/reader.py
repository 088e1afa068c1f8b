"""Planned micro-batches -> batches. A plan says where the tokens of a micro-batch are, in numbers that are cheap to
send to a worker; the store's tokens are read, cut and collated here. What trainer and workers say to each other, too.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.collation import CollateSettings, Grid, MediaInputs, blank_grid, lay_out, lay_out_trees
from luthier.collation.collator import to_batch
from luthier.config.inputs import MediaConfig
from luthier.layout import leaf_segment, span_of, splice, tree_of_runs
from luthier.layout.cutting import SegmentCut, take_window
from luthier.media import FeatureFiles, MediaSource
from luthier.packing import UnitKind
from luthier.records import Address, Batch, LostMedia, Pack, Sample, Segment, Unit
from luthier.store import SampleStore

# One record a segment: leaf ``leaf`` of sample ``sample``, its first ``head`` tokens and ``start:stop``, ``open_end``
# as in `layout.cutting.SegmentCut`; ``file`` and ``row`` say where its row was read, ``source`` from which data set.
# Where it is compared, its first ``prompt`` tokens are the prompt. Where ``tail_stop`` is not 0, tokens
# ``tail_start:tail_stop`` of the first leaf of sample ``tail`` follow: another row's completion. ``encoder`` is what
# encoders run through for its media (`SegmentIndex.encoder_lengths`). Its first ``held`` tokens are those of the
# segment before it.
PLACE = np.dtype(
    [
        ("sample", "<i8"),
        ("leaf", "<i4"),
        ("start", "<i4"),
        ("stop", "<i4"),
        ("num_targets", "<i4"),
        ("file", "<i4"),
        ("open_end", "?"),
        ("row", "<i8"),
        ("source", "<i4"),
        ("head", "<i4"),
        ("prompt", "<i4"),
        ("tail", "<i8"),
        ("tail_start", "<i4"),
        ("tail_stop", "<i4"),
        ("encoder", "<i4"),
        ("held", "<i4"),
    ]
)

Places = NDArray[Any]  # of dtype PLACE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedMicroBatch:
    """The packs of one micro-batch: pack ``p`` is ``places[pack_bounds[p]:pack_bounds[p + 1]]``.

    step   the optimizer step that it is part of, from 0
    files  the names that ``file`` points to, of those files that occur here
    units  how many segments, one behind the other, are compared
    A blank (no places) is what a rank gets where a step has fewer micro-batches than ranks have slots.
    """

    step: int
    places: Places
    pack_bounds: Sequence[int]
    files: dict[int, str]
    units: UnitKind = UnitKind.NONE

    @property
    def is_blank(self) -> bool:
        return len(self.places) == 0

    def packs(self) -> Iterator[Places]:
        return (self.places[start:stop] for start, stop in itertools.pairwise(self.pack_bounds))

    def addresses(self) -> list[Address]:
        return [self.address(place) for place in self.places]

    def sources(self) -> tuple[int, ...]:
        """The source of each segment in it."""
        return tuple(self.places["source"].tolist())

    def address(self, place: Places) -> Address:
        return Address(file=self.files[int(place["file"])], row=int(place["row"]))


def segment_at(sample: Sample, place: Places) -> Segment:
    """The segment of a sample that a place names, without what follows from another."""
    return part_of(leaf_segment(sample, int(place["leaf"])), place)


def part_of(segment: Segment, place: Places) -> Segment:
    window = SegmentCut(
        head=int(place["head"]),
        start=int(place["start"]),
        stop=int(place["stop"]),
        open_end=bool(place["open_end"]),
        num_targets=int(place["num_targets"]),
    )
    return take_window(segment, window)


class BatchReader:
    """Reads micro-batches from a store, which may be added to meanwhile."""

    def __init__(
        self, store: SampleStore, how: CollateSettings, *, shared: bool = False, media: MediaInputs | None = None
    ) -> None:
        """``shared``: segments that begin alike hold that once (`collation.lay_out_trees`); rows have to be packed.
        ``media``: what a multimodal model gets besides."""
        self.store, self.media = store, media
        self.how = how
        self.shared = shared

    def read(self, planned: PlannedMicroBatch) -> Batch:
        """The batch. Raises `StoreError` if its bytes are damaged, ``IndexError`` for a sample that is in no commit."""
        return self.to_batch(self.lay_out(planned), planned)

    def lay_out(self, planned: PlannedMicroBatch) -> Grid:
        """The batch as a worker sends it; a blank is two tokens of padding and has no targets. Raises as `read`."""
        grid = self._tokens(planned)
        return grid if self.media is None else self.media.fill(grid, self.how)

    def _tokens(self, planned: PlannedMicroBatch) -> Grid:
        if planned.is_blank:
            return blank_grid(self.how)
        last = max(int(planned.places["sample"].max()), int(planned.places["tail"].max()))
        if last >= len(self.store):
            self.store = self.store.refresh()
        if self.shared and planned.places["held"].any():
            return lay_out_trees([self._trees(places) for places in planned.packs()], self.how)
        return lay_out([Pack(segments=tuple(map(self._segment, places))) for places in planned.packs()], self.how)

    def packs(self, planned: PlannedMicroBatch) -> list[Pack]:
        """The segments themselves, with their rows' addresses. Raises as `read`."""
        return [
            Pack(segments=tuple(replace(self._segment(place), address=planned.address(place)) for place in places))
            for places in planned.packs()
        ]

    def to_batch(self, grid: Grid, planned: PlannedMicroBatch) -> Batch:
        """What a worker laid out, as tensors, with the addresses, sources and units of its segments."""
        return to_batch(
            grid,
            self.how,
            addresses=tuple(planned.addresses()),
            sources=planned.sources(),
            units=() if not planned.units.are_compared else self._units(planned),
        )

    def _units(self, planned: PlannedMicroBatch) -> tuple[Unit, ...]:
        size, places = planned.units.size, planned.places
        samples = places["sample"]
        verdicts = self.store.verdicts[samples].tolist()
        leaves = self.store.leaf_bounds[samples] + places["leaf"]
        leaves[places["tail_stop"] > 0] = -1
        return tuple(
            Unit(
                segments=tuple(range(first, first + size)),
                verdict=verdicts[first],
                leaves=tuple(leaves[first : first + size].tolist()),
            )
            for first in range(0, len(places), size)
        )

    def _segment(self, place: Places) -> Segment:
        segment = segment_at(self.store[int(place["sample"])], place)
        if not place["tail_stop"]:
            return segment
        theirs = leaf_segment(self.store[int(place["tail"])], 0)
        return splice(segment, span_of(theirs, int(place["tail_start"]), int(place["tail_stop"])))

    def _trees(self, places: Places) -> list[Sample]:
        segments = [self._segment(place) for place in places]
        held = places["held"].tolist()
        bounds = [*(number for number, count in enumerate(held) if not count), len(held)]
        return [tree_of_runs(segments[start:stop], held[start:stop]) for start, stop in pairwise(bounds)]


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
