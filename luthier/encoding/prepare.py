"""Rows to stored samples: what a run does before its first step, and what a second run hardly does at all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Literal

from luthier.config.schema import RunConfig
from luthier.encoding.collection import Collection
from luthier.encoding.intake import read_in_order
from luthier.encoding.naming import SPOOL
from luthier.encoding.portions import ResolvedPortion
from luthier.encoding.prepared import Prepared, PreparedSet, hold_out
from luthier.encoding.quarantine import Quarantine
from luthier.encoding.ray_cluster import resolve_units_with_ray
from luthier.encoding.resolver import Progress, Resolver
from luthier.encoding.sharing import resolve_units
from luthier.encoding.store import SampleStore, store_folder
from luthier.encoding.units import Units
from luthier.encoding.workers import RowEncoder
from luthier.sources import Source, open_sources, resolve_sources

__all__ = ["Prepared", "PreparedSet", "Progress", "prepare"]

QUARANTINE_FILE = "quarantine.jsonl"


def prepare(
    config: RunConfig,
    encoder: RowEncoder,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    ray_address: str | None = None,
) -> Prepared:
    """Encode what the run's data has and the store has not, and say which samples the run will see.

    Several processes may do so at once: they share the work. ``ray_address`` leaves it to a Ray cluster.

    Rows that are lost are in ``quarantine.jsonl`` in the run's output folder. Raises `SourceError`, `StoreError`,
    `BudgetError` if more rows are lost than ``data.max_drop`` allows, and `UserError` if none is left.
    """
    train_configs, eval_configs = resolve_sources(config.data)
    folder = store_folder(config.data.store, encoder.fingerprint)
    num_encoded = num_reused = 0
    collections = []
    with Quarantine(config.output.dir / QUARANTINE_FILE) as quarantine:
        for split, configs in (("train", train_configs), ("eval", eval_configs)):
            sources = open_sources(configs, seed=config.runtime.seed) if configs else []
            resolver = Resolver(
                sources=sources, encoder=encoder, folder=folder, split=split, eager=False, on_progress=on_progress
            )
            collections.append(Collection(split=split, sources=sources))
            with closing(_portions(sources, resolver, config.data.workers, ray_address)) as portions:
                collections[-1].add_all(portions, quarantine)
            for source in sources:
                source.check_unchanged()  # after the last row, too
            num_encoded += resolver.num_encoded
            num_reused += resolver.num_reused
    lost = quarantine.path if quarantine.num_rows else None
    store = SampleStore.open(folder, fingerprint=encoder.fingerprint)
    sets = [collection.finish(store, max_drop=config.data.max_drop, lost=lost) for collection in collections]
    (train, rows), evaluation = sets[0], sets[1][0] if eval_configs else None
    if evaluation is None and config.data.eval_split:
        train, evaluation = hold_out(train, rows, config.data.eval_split, seed=config.runtime.seed)
    return Prepared(
        train=train,
        eval=evaluation,
        num_encoded=num_encoded,
        num_reused=num_reused,
        quarantine=lost,
    )


def _portions(
    sources: Sequence[Source], resolver: Resolver, workers: int | Literal["auto"], ray_address: str | None
) -> Generator[ResolvedPortion, None, None]:
    units = Units.of(sources, spool=resolver.folder.parent / SPOOL)
    if units is None or not units.units:  # a stream has no parts that could be shared
        return resolver.resolve(read_in_order(sources), workers=workers)
    if ray_address is not None:
        return resolve_units_with_ray(units, resolver, address=ray_address)
    return resolve_units(units, resolver, workers=workers)
