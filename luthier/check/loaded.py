"""A run up to the point where a model would be needed: its rows are encoded, and cut to ``data.max_length``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.loader.run_settings import units_of
from luthier.preparation.prepare import Progress, prepare
from luthier.preparation.prepared import Prepared
from luthier.preparation.segments import SegmentIndex


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loaded:
    """A run whose rows are in the store. ``train`` and ``held_out`` are the segments that training would see.

    ``seconds`` is how long preparation took.
    """

    config: RunConfig
    encoder: Encoder
    prepared: Prepared
    train: SegmentIndex
    held_out: SegmentIndex | None
    seconds: float


def load_rows(
    config: RunConfig, *, on_progress: Callable[[Progress], None] | None = None, ray_address: str | None = None
) -> Loaded:
    """Render and encode what of the run's rows the store does not have; raises what `preparation.prepare` raises."""
    started = time.perf_counter()
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder, on_progress=on_progress, ray_address=ray_address)
    limit, overflow, units = config.data.max_length, config.data.overflow, units_of(config)
    held_out = prepared.eval
    return Loaded(
        config=config,
        encoder=encoder,
        prepared=prepared,
        train=SegmentIndex(prepared.train, max_length=limit, overflow=overflow, units=units),
        held_out=None if held_out is None else SegmentIndex(held_out, max_length=limit, overflow=overflow, units=units),
        seconds=time.perf_counter() - started,
    )
