"""Rows to stored samples: what a run does before its first step, and what a second run hardly does at all."""

from __future__ import annotations

from collections.abc import Callable

from luthier.config.schema import RunConfig
from luthier.encoding.intake import Intake, Progress
from luthier.encoding.prepared import Prepared, PreparedSet, hold_out
from luthier.encoding.quarantine import Quarantine
from luthier.encoding.store import SampleStore, store_folder
from luthier.encoding.workers import RowEncoder
from luthier.sources import open_sources, resolve_sources

__all__ = ["Prepared", "PreparedSet", "Progress", "prepare"]

QUARANTINE_FILE = "quarantine.jsonl"


def prepare(
    config: RunConfig, encoder: RowEncoder, *, on_progress: Callable[[Progress], None] | None = None
) -> Prepared:
    """Encode what the run's data has and the store has not, and say which samples the run will see.

    Rows that are lost are in ``quarantine.jsonl`` in the run's output folder. Raises `SourceError`, `StoreError`,
    `BudgetError` if more rows are lost than ``data.max_drop`` allows, and `UserError` if none is left.
    """
    train_configs, eval_configs = resolve_sources(config.data)
    seed = config.runtime.seed
    folder = store_folder(config.data.store, encoder.fingerprint)
    with Quarantine(config.output.dir / QUARANTINE_FILE) as quarantine:
        intakes = []
        for split, configs in (("train", train_configs), ("eval", eval_configs)):
            sources = open_sources(configs, seed=seed) if configs else []
            intake = Intake(split=split, sources=sources, quarantine=quarantine)
            intake.read_all(encoder, folder, workers=config.data.workers, on_progress=on_progress)
            intakes.append(intake)
    lost = quarantine.path if quarantine.num_rows else None
    store = SampleStore.open(folder, fingerprint=encoder.fingerprint)
    sets = [intake.finish(store, max_drop=config.data.max_drop, lost=lost) for intake in intakes]
    train, evaluation = sets[0], sets[1] if eval_configs else None
    if evaluation is None and config.data.eval_split:
        train, evaluation = hold_out(train, config.data.eval_split, seed=seed)
    return Prepared(
        train=train,
        eval=evaluation,
        num_encoded=sum(intake.num_encoded for intake in intakes),
        num_reused=sum(intake.num_reused for intake in intakes),
        quarantine=lost,
    )
