"""Arrays that go from a worker to the trainer through shared memory."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from luthier.collation import Grid
from luthier.loader import worker as slots_module
from luthier.loader.worker import ALIGNMENT, LEAST_BYTES, SharedArrays, done_of, grid_of

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="there are no slots elsewhere")


@pytest.fixture
def sides() -> tuple[SharedArrays, SharedArrays]:
    """The trainer's and the worker's view of the same files, as two processes have them."""
    trainer = SharedArrays.create(3)
    return trainer, SharedArrays(trainer.descriptors)


def numbers(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def grid_with(**inputs: np.ndarray) -> Grid:
    one = np.ones((1, 4))
    return Grid(
        ids_BT=one.astype(np.int32),
        learned_BT=one.astype(bool),
        weights_BT=None,
        lengths=((4,),),
        inputs=tuple(inputs.items()),
    )


@linux_only
def test_what_one_side_writes_the_other_reads(sides: tuple[SharedArrays, SharedArrays]) -> None:
    trainer, worker = sides
    arrays = [numbers(100, 77), numbers(3, dtype=np.int64), numbers(2, 5000, dtype=np.int64), numbers(300, 77)]
    offsets = worker.write(1, arrays)
    assert offsets[1] == -1, "three numbers go with the message"
    assert all(offset % ALIGNMENT == 0 for offset in offsets if offset >= 0)
    for array, offset in zip(arrays, offsets, strict=True):
        if offset >= 0:
            np.testing.assert_array_equal(trainer.read(1, offset, array.dtype, array.shape), array, strict=True)


@linux_only
def test_a_slot_grows_and_what_was_read_of_it_stays(sides: tuple[SharedArrays, SharedArrays]) -> None:
    trainer, worker = sides
    for size in (LEAST_BYTES, 10 * LEAST_BYTES, LEAST_BYTES // 2, 40 * LEAST_BYTES):
        array = numbers(size)
        [offset] = worker.write(0, [array])
        read = trainer.read(0, offset, array.dtype, array.shape)
        worker.write(0, [np.zeros_like(array)])
        np.testing.assert_array_equal(read, array)


@linux_only
def test_slots_do_not_share_memory(sides: tuple[SharedArrays, SharedArrays]) -> None:
    trainer, worker = sides
    for slot in range(3):
        worker.write(slot, [np.full(LEAST_BYTES, slot, np.float32)])
    assert [int(trainer.read(slot, 0, np.dtype(np.float32), (LEAST_BYTES,))[-1]) for slot in range(3)] == [0, 1, 2]


@linux_only
def test_an_overwritten_slot_shows(sides: tuple[SharedArrays, SharedArrays]) -> None:
    """Control: what is read late is what was written last, so the number of slots matters."""
    trainer, worker = sides
    early, late = grid_with(pixels=numbers(LEAST_BYTES)), grid_with(pixels=-numbers(LEAST_BYTES))
    done = done_of(early, worker, 0)
    done_of(late, worker, 0)
    np.testing.assert_array_equal(dict(grid_of(done, trainer).inputs)["pixels"], dict(late.inputs)["pixels"])


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_grid_arrives_as_it_was_sent_with_and_without_slots(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform != sys.platform == "linux":
        monkeypatch.setattr(slots_module.sys, "platform", platform)
    trainer = SharedArrays.create(2)
    worker = SharedArrays(trainer.descriptors)
    assert len(trainer.descriptors) == (2 if platform == "linux" else 0)
    sent = grid_with(pixel_values=numbers(200, 100), image_grid_thw=numbers(1, 3, dtype=np.int64), none=numbers(0, 7))
    done = done_of(sent, worker, 1 if trainer.descriptors else 0)
    assert (len(done.inputs[0].data) == 0) == (platform == "linux")
    arrived = grid_of(done, trainer)
    for (name, value), (other, read) in zip(sent.inputs, arrived.inputs, strict=True):
        assert name == other
        np.testing.assert_array_equal(read, value, strict=True)
        assert read.flags.writeable, "a tensor is made of its memory"
    trainer.close()
    trainer.close()
