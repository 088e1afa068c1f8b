"""A store as a table that other tools read."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from luthier.encoding.disk import TEMPORARY
from luthier.encoding.store import SampleStore
from luthier.errors import StoreError, UserError

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLES_AT_ONCE = 512  # also the rows of a row group: some 10 MB of long samples


def export_store(
    folder: Path, target: Path, *, on_samples: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Write all samples of a store as parquet, in its order; how many there are.

    Columns: ``row_key`` (hex), ``input_ids``, ``target``, ``weight`` (null where all targets count 1), ``branches``
    (``parent``, ``length``), ``notes`` (a map), ``verdict`` (null where rows are not compared). The file is whole or
    not there. Raises `StoreError` if a sample is damaged, and `UserError` if ``target`` cannot be written.
    """
    import pyarrow.parquet as pq

    store = SampleStore.open(folder, fingerprint=None)
    if not len(store):
        raise StoreError(f"{folder}: there is no store here, or nothing in it", hint="`luthier store ls` lists stores")
    schema = _schema()
    temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for start in range(0, len(store), SAMPLES_AT_ONCE):
                stop = min(start + SAMPLES_AT_ONCE, len(store))
                writer.write_batch(_batch(store, start, stop, schema))
                on_samples(stop, len(store))
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written: {error.strerror or error}", hint="name a file in a folder you may write to"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return len(store)


def _schema() -> pa.Schema:
    import pyarrow as pa

    branch = pa.struct([("parent", pa.int32()), ("length", pa.int32())])
    return pa.schema(
        [
            pa.field("row_key", pa.string(), nullable=False),
            pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("target", pa.list_(pa.bool_()), nullable=False),
            pa.field("weight", pa.list_(pa.float32())),
            pa.field("branches", pa.list_(branch), nullable=False),
            pa.field("notes", pa.map_(pa.string(), pa.int64()), nullable=False),
            pa.field("verdict", pa.float32()),
        ]
    )


def _batch(store: SampleStore, start: int, stop: int, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    samples = [store[number] for number in range(start, stop)]
    columns: dict[str, Any] = {
        "row_key": [key.tobytes().hex() for key in store.keys_of(np.arange(start, stop))],
        "input_ids": [sample.input_ids for sample in samples],
        "target": [sample.target for sample in samples],
        "weight": [sample.weight for sample in samples],
        "branches": [
            [{"parent": branch.parent, "length": branch.length} for branch in sample.branches] for sample in samples
        ],
        "notes": [list(sample.notes) for sample in samples],
        "verdict": [sample.verdict for sample in samples],
    }
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
