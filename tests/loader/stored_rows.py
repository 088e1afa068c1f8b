"""A store of random samples, and micro-batches planned over it, for the tests of the loader."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from luthier.collation import CollateSettings
from luthier.ledger import Ledger
from luthier.loader.reader import PLACE, BatchReader, PlannedMicroBatch
from luthier.preparation import PreparedSet, SourceInfo
from luthier.records import Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample, row_key

FINGERPRINT = "ab" * 32
PACKED = CollateSettings(packed=True, pad_token_id=0)
FILES = {0: "rows.jsonl"}


def make_sample(rng: np.random.Generator, *, weights: bool = True) -> Sample:
    """A conversation: a prompt, an answer; every fourth has weights, every third goes two ways."""
    lengths = [int(n) for n in rng.integers(4, 30, 2)]
    if rng.random() < 0.3:
        lengths.append(int(rng.integers(4, 30)))
    total = sum(lengths)
    target = rng.random(total) < 0.5
    target[-1] = True
    return Sample(
        input_ids=rng.integers(3, 100, total, dtype=np.int32),
        target=target,
        weight=rng.choice([0.5, 1.0], total).astype(np.float32) if weights and rng.random() < 0.25 else None,
        branches=(
            Branch(parent=-1, length=lengths[0]),
            *(Branch(parent=0, length=length) for length in lengths[1:]),
        ),
    )


def add_samples(folder: Path, first: int, count: int, *, weights: bool = True) -> SampleStore:
    rng = np.random.default_rng(first)
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for number in range(first, first + count):
        key = row_key(str(number).encode(), fingerprint=FINGERPRINT, conversion="")
        writer.add(key, freeze_sample(make_sample(rng, weights=weights)))
    writer.commit()
    return SampleStore.open(folder, fingerprint=FINGERPRINT)


def make_rows(folder: Path, count: int, *, weights: bool = True) -> PreparedSet:
    store = add_samples(folder, 0, count, weights=weights)
    return PreparedSet(
        store=store,
        sample_ids=np.arange(count, dtype=np.int64),
        source_ids=np.zeros(count, np.int64),
        file_ids=np.zeros(count, np.int64),
        row_numbers=np.arange(1, count + 1, dtype=np.int64),
        files=("rows.jsonl",),
        sources=(SourceInfo(name="one", weight=1.0),),
        ledger=Ledger(read=count, prepared=count),
    )


def plan_rows(
    store: SampleStore, *, rows: int = 4, first: int = 0, stop: int | None = None
) -> Iterator[PlannedMicroBatch]:
    """The first leaf of every sample, so many a pack, one pack a micro-batch; row ``n + 1`` is sample ``n``."""
    for step, start in enumerate(range(first, len(store) if stop is None else stop, rows)):
        places = np.zeros(rows, PLACE)
        places["sample"] = np.arange(start, start + rows)
        places["stop"] = store.leaf_lengths[store.leaf_bounds[places["sample"]]]
        places["row"] = places["sample"] + 1
        places["source"] = places["sample"] % 3
        yield PlannedMicroBatch(step=step, places=places, pack_bounds=[0, rows], files=FILES)


def reader_of(store: SampleStore) -> BatchReader:
    return BatchReader(store, PACKED)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def uses_shared_memory(pid: int | str) -> bool:
    """Whether a process has anything in /dev/shm open or mapped."""
    process = Path(f"/proc/{pid}")
    opened = []
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder is closed by now
            opened.append(os.readlink(descriptor))
    return "/dev/shm/" in (process / "maps").read_text() or any(name.startswith("/dev/shm/") for name in opened)
