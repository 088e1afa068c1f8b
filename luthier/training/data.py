"""A run's data as training sees it: rows of both sides, here or on their way, and a fingerprint of the whole."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import RunConfig
from luthier.errors import UserError
from luthier.ledger import HELD_OUT, Ledger
from luthier.loader.feed import FeedReader
from luthier.loader.numbered_rows import ArrivalSettings, ArrivingRows, NumberedRows
from luthier.loader.settings import cut_rows, mixture_of
from luthier.packing import Segments, SegmentTable, UnitKind
from luthier.packing.epoch import EpochPlan, describe
from luthier.packing.order import hold_out_part
from luthier.preparation import Prepared, PreparedSet, SourceInfo
from luthier.preparation.resolver import ResolvedPortion
from luthier.preparation.segments import SegmentIndex
from luthier.store import SampleStore
from luthier.store.format import store_folder
from luthier.training.folder.checkpoint import HELD_OUT_ROWS, read_json
from luthier.training.report import RESULT_FILE, DataSummary


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunData:
    """Both sides of the data.

    train, eval        segments by number, those of ``rows`` and ``eval_rows``
    fingerprint        covers the content of the training rows and their order
    names, eval_names  what the sources are called; not needed where segments are from memory
    """

    train: Segments
    rows: NumberedRows
    eval: Segments | None
    eval_rows: NumberedRows | None
    fingerprint: str
    names: tuple[str, ...] = ()
    eval_names: tuple[str, ...] = ()

    @property
    def ledger(self) -> dict[str, object]:
        """What became of the rows that have come so far; segments in memory have no ledger."""
        return {} if self.rows.ledger is None else self.rows.ledger.to_json()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the training data sets, by their number."""
        return distinct_names(self.names, len(self.rows.weights))

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """Names of those that the held-out segments are from."""
        return () if self.eval_rows is None else distinct_names(self.eval_names, len(self.eval_rows.weights))

    def rows_of(self, segments: Segments) -> NumberedRows:
        """The rows of one of the sides."""
        rows = self.rows if segments is self.train else self.eval_rows
        assert rows is not None, "there are no held-out rows"
        return rows


def open_run_data(
    config: RunConfig,
    prepared: Prepared,
    *,
    encoder_fingerprint: str,
    cut: tuple[SegmentIndex, SegmentIndex | None] | None = None,
) -> RunData:
    """The segments of a run whose rows are all prepared, ``cut`` to ``data.max_length`` before or now.

    Raises `BudgetError` if cutting loses more rows than ``data.max_drop`` allows, `UserError` if a side is left empty
    or a segment is too long under ``data.overflow: error``.
    """
    train, held_out = cut or cut_rows(config, prepared)
    check_sides(config, train, held_out)
    rows = NumberedRows.of_index(train)
    return RunData(
        train=train,
        rows=rows,
        eval=held_out,
        eval_rows=None if held_out is None else NumberedRows.of_index(held_out),
        fingerprint=_fingerprint(prepared.train, train.table(), rows, encoder_fingerprint),
        names=tuple(source.name for source in prepared.train.sources),
        eval_names=() if prepared.eval is None else tuple(source.name for source in prepared.eval.sources),
    )


def open_live_data(config: RunConfig, reader: FeedReader) -> RunData:
    """The data that a feed hands over. Waits for the held-out rows. Raises what stopped the feed, and `UserError`."""
    facts = reader.facts()
    store = SampleStore.open(store_folder(config.data.store, facts.encoder), fingerprint=facts.encoder)
    own_eval = bool(config.data.eval or config.data.eval_use)
    eval_sources = facts.eval_sources if own_eval else facts.sources
    evaluation = _evaluation(config, reader, store, eval_sources)
    arriving = ArrivalSettings(
        counts=tuple(facts.num_rows),
        sources=facts.sources,
        max_length=config.data.max_length,
        overflow=config.data.overflow,
        max_drop=config.data.max_drop,
        asked=config.objective.kind.on_policy,
    )
    same = None if evaluation is None or own_eval else evaluation.prepared.sample_ids
    rows = ArrivingRows(reader.portions("train"), store, arriving, held_out=same, lost=reader.lost)
    if facts.num_eval_rows and not own_eval:
        rows.ledger.note(HELD_OUT, facts.num_eval_rows)
    rows.held_out = np.sort(hold_out_part(sum(facts.num_rows), 0, facts.num_tried, seed=config.runtime.seed))
    mixture = mixture_of(config, [source.weight for source in facts.sources])
    parts = [facts.identity, facts.encoder, repr(mixture), repr(rows.held_out.tolist()[:100])]
    return RunData(
        train=rows,
        rows=rows,
        eval=evaluation,
        eval_rows=None if evaluation is None else NumberedRows.of_index(evaluation),
        fingerprint=hashlib.sha256("\0".join(parts).encode()).hexdigest(),
        names=tuple(source.name for source in facts.sources),
        eval_names=() if evaluation is None else tuple(source.name for source in eval_sources),
    )


def check_sides(config: RunConfig, train: SegmentIndex, held_out: SegmentIndex | None) -> None:
    """Raise `BudgetError` or `UserError` where these rows are none to train on, or none to evaluate on."""
    train.ledger.check(max_drop=config.data.max_drop)
    for side, index in (("training", train), ("evaluation", held_out)):
        if index is not None:
            _check_some_left(side, index, config)
            index.table()  # raises where there is nobody to draw a completion from


def _check_some_left(side: str, index: SegmentIndex, config: RunConfig) -> None:
    """Raise `UserError` where cutting to ``data.max_length`` has left nothing."""
    if len(index) == 0:
        policy = "split" if index.units is UnitKind.NONE else "truncate, which shortens prompts"
        raise UserError(
            f"no {side} row is left at data.max_length={config.data.max_length}",
            hint=f"raise data.max_length, or set data.overflow: {policy}",
        )


def summary_of(plan: EpochPlan, rows: NumberedRows) -> DataSummary:
    """The sizes of an epoch of rows that are all here."""
    found = describe(plan, rows.whole())
    return DataSummary(
        segments=found.segments,
        tokens=found.tokens,
        target_tokens=found.targets,
        micro_batches=found.micro_batches,
        fill=1 - found.padding,
    )


def _fingerprint(prepared: PreparedSet, table: SegmentTable, rows: NumberedRows, encoder_fingerprint: str) -> str:
    digest = hashlib.sha256(encoder_fingerprint.encode())
    digest.update(prepared.store.keys[prepared.sample_ids].tobytes())
    for array in (table.lengths, table.num_targets, table.row_ids, table.source_ids, rows.held_out):
        digest.update(array.tobytes())
    if prepared.numbering is not None:
        digest.update(prepared.numbering.rows.tobytes())
    digest.update(json.dumps([rows.counts, table.source_weights]).encode())
    return digest.hexdigest()


def digest_of_rows(segments: Segments) -> str:
    """Of the ids of some segments, in whatever order they come: rows that were held out are known again by it."""
    ids = (segments[number].input_ids for number in range(len(segments)))
    each = sorted(hashlib.blake2b(ids_T.astype(np.int32).tobytes(), digest_size=16).digest() for ids_T in ids)
    return hashlib.sha256(b"".join(each)).hexdigest()


def told_of_held_out(data: RunData) -> dict[str, str]:
    """By what a run that goes on knows its held-out rows again; {} where there are none, or they are in memory."""
    if not isinstance(data.eval, SegmentIndex):
        return {}
    return {"rows": digest_of_keys(data.eval)}


def digest_of_keys(held_out: SegmentIndex) -> str:
    """Of the rows of some segments as the store knows them, in their order."""
    rows = held_out.prepared
    return hashlib.sha256(rows.store.keys_of(rows.sample_ids).tobytes()).hexdigest()


def known_held_out(left: Path) -> Callable[[SegmentIndex], bool] | None:
    """Whether rows are those that were held out, as what a run has left, or a checkpoint, knows them; None where it
    knows of none."""
    for name, key, digest in ((HELD_OUT_ROWS, "rows", digest_of_keys), (RESULT_FILE, "held_out", digest_of_rows)):
        if (left / name).is_file() and (known := read_json(left / name).get(key)):
            return partial(_has_digest, digest, known)
    return None


def _has_digest(digest: Callable[[SegmentIndex], str], known: object, held_out: SegmentIndex) -> bool:
    return digest(held_out) == known


def tell_of_others(checkpoint: Path, data: RunData, tell: Callable[[str], object]) -> None:
    """Say where a run goes on from a checkpoint with other held-out rows than it had."""
    path, here = checkpoint / HELD_OUT_ROWS, told_of_held_out(data)
    if path.is_file() and here and read_json(path) != here:
        tell(
            f"the held-out rows are not those of {checkpoint.name}: losses of before and after cannot be compared, so "
            "the best checkpoint may not be the best"
        )


def are_among(some: SegmentIndex, others: SegmentIndex) -> bool:
    """Whether some segments are of rows of which the others are, too."""
    some_rows, rows = ({each.prepared.address(row) for row in set(each.row_ids.tolist())} for each in (some, others))
    return some_rows <= rows


def _evaluation(
    config: RunConfig, reader: FeedReader, store: SampleStore, sources: tuple[SourceInfo, ...]
) -> SegmentIndex | None:
    portions = list(reader.portions("eval", reader.facts().num_eval_portions))
    if not portions:
        return None
    rows = _prepared_of(portions, store.refresh(), sources)
    index = SegmentIndex(rows, max_length=config.data.max_length, overflow=config.data.overflow)
    if reader.lost is not None:
        for portion in portions:
            for row in portion.lost:
                reader.lost.add(row.error, split="eval", raw=row.raw)
        reader.lost.add_all(index.losses(), split="eval")
    _check_some_left("evaluation", index, config)
    return index


def _prepared_of(portions: list[ResolvedPortion], store: SampleStore, sources: tuple[SourceInfo, ...]) -> PreparedSet:
    ledger = Ledger()
    for portion in portions:
        ledger.add(portion.ledger)
    numbers = np.concatenate([portion.rows for portion in portions])
    kept = np.concatenate([portion.sample_ids for portion in portions]) >= 0
    places = np.flatnonzero(kept)[np.argsort(numbers[kept], kind="stable")]  # as they are read where all are prepared

    def column(name: str) -> NDArray[Any]:
        found: NDArray[Any] = np.concatenate([getattr(portion, name) for portion in portions])[places]
        return found

    return PreparedSet(
        store=store,
        sample_ids=column("sample_ids"),
        source_ids=column("source_ids").astype(np.int32),
        file_ids=column("file_ids").astype(np.int32),
        row_numbers=column("row_numbers"),
        files=tuple(name for portion in portions for name in portion.new_files),
        sources=sources,
        ledger=ledger,
    )


# --------------------------------------------------------------------------------------------------------------------
# What the data sets of a run are called.


def distinct_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """A name for each of ``count`` data sets, no two the same.

    ``(["a", "b", "a"], 3) -> ("a", "b", "a (2)")``, ``([], 2) -> ("source 1", "source 2")``
    """
    given = [*names, *(f"source {number}" for number in range(len(names) + 1, count + 1))]
    found: list[str] = []
    for name in given:
        copies = (f"{name} ({number})" for number in itertools.count(2))
        found.append(name if name not in found else next(copy for copy in copies if copy not in given + found))
    return tuple(found)
