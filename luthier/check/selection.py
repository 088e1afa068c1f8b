"""Which row, pack or batch ``luthier show`` shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from luthier.check.loaded import Loaded
from luthier.check.show.html import page_html
from luthier.check.show.origins import SegmentOrigin, row_origins, segment_origin
from luthier.check.show.previews import previews
from luthier.check.show.view import RowView, show_batch, show_pack, show_sample
from luthier.collation import CollateSettings
from luthier.errors import UserError
from luthier.loader.planning import SegmentPlaces
from luthier.loader.reader import BatchReader
from luthier.loader.run_settings import media_of, train_settings
from luthier.packing import EpochPlan, Units, plan_epoch
from luthier.preparation.prepared import PreparedSet
from luthier.preparation.segments import SegmentIndex
from luthier.records import Pack
from luthier.sources import open_sources, resolve_sources
from luthier.writing import write_text


class Kind(StrEnum):
    """What is counted."""

    ROW = "row"
    PACK = "pack"
    BATCH = "batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The ``number``-th row, pack or micro-batch of one side of the data, counted from 1."""

    kind: Kind
    number: int
    held_out: bool

    @classmethod
    def of_options(cls, *, row: int | None, pack: int | None, batch: int | None, held_out: bool) -> Selection:
        """At most one of the three may be given; raises `UserError` else. Nothing given is row 1."""
        options = {Kind.ROW: row, Kind.PACK: pack, Kind.BATCH: batch}
        given = {kind: number for kind, number in options.items() if number is not None} or {Kind.ROW: 1}
        if len(given) > 1:
            names = " and ".join(f"--{kind}" for kind in given)
            raise UserError(f"{names} exclude each other", hint="give one of them")
        ((kind, number),) = given.items()
        return cls(kind=kind, number=number, held_out=held_out)

    @property
    def title(self) -> str:
        """``pack 3 of the training data``."""
        return f"{self.kind.value} {self.number} of the {'held-out' if self.held_out else 'training'} data"

    def views(self, loaded: Loaded) -> list[RowView]:
        """The rows to show, each token with its owner; raises `UserError` where there is no such thing."""
        index = loaded.held_out if self.held_out else loaded.train
        if index is None:
            hint = "name some with data.eval, or set data.eval_split"
            raise UserError("this run has no held-out data", hint=hint, key="data.eval")
        tokenizer = loaded.encoder.tokenizer
        control = frozenset(tokenizer.control_id(token) for token in tokenizer.control.tokens)
        match self.kind:
            case Kind.ROW:
                return self._row(index, loaded, control)
            case Kind.PACK:
                plan = _plan(index, loaded, rows_per_micro_batch=1)
                self._check(len(plan), "packs")
                return [  # one, or, of padded rows that are compared, all of a unit
                    show_pack(pack, tokenizer, title=self.title, control=control, origins=origins)
                    for pack, origins in zip(*self._packs(plan, index, loaded), strict=True)
                ]
            case Kind.BATCH:
                return self._batch(index, loaded, control)
            case _:
                raise AssertionError(f"unknown kind {self.kind!r}")

    def _row(self, index: SegmentIndex, loaded: Loaded, control: frozenset[int]) -> list[RowView]:
        prepared, tokenizer = index.prepared, loaded.encoder.tokenizer
        self._check(len(prepared), "rows")
        row = self.number - 1
        of_row = self._origins([row], prepared, loaded)[row]
        segments = np.flatnonzero(index.row_ids == row).tolist()
        if index.units is Units.FEEDBACK_KL:
            segments = segments[:1]  # another row's completion is a matter of the batch
        if not segments:  # cut away: show what it would have been
            views = show_sample(prepared[row], tokenizer, control=control, origins=of_row)
            return [_retitled(view, f"{view.title} (not trained: over data.max_length)") for view in views]
        title = str(prepared.address(row))
        return [
            show_pack(
                Pack(segments=(index[segment],)),
                tokenizer,
                title=f"{title}{_part_of_row(index, number, len(segments))}",
                control=control,
                origins=[segment_origin(index, segment, of_row)],
            )
            for number, segment in enumerate(segments, start=1)
        ]

    def _batch(self, index: SegmentIndex, loaded: Loaded, control: frozenset[int]) -> list[RowView]:
        config, tokenizer = loaded.config, loaded.encoder.tokenizer
        rows = config.eval.per_device_eval_batch_size if self.held_out else config.train.per_device_train_batch_size
        plan = _plan(index, loaded, rows_per_micro_batch=rows)
        self._check(len(plan), "micro-batches")
        packs, origins = self._packs(plan, index, loaded)
        has_media = any(segment.media for pack in packs for segment in pack.segments)
        media = media_of(config, tokenizer.files.folder) if has_media else None
        reader = BatchReader(index.prepared.store, _collation(loaded), shared=plan.settings.shared, media=media)
        batch = reader.read(SegmentPlaces.of_index(index).micro_batch(plan, self.number - 1, step=0))
        return show_batch(batch, tokenizer, title=self.title, control=control, origins=origins, packs=packs)

    def _packs(
        self, plan: EpochPlan, index: SegmentIndex, loaded: Loaded
    ) -> tuple[list[Pack], list[list[SegmentOrigin]]]:
        numbers = [[int(segment) for segment in pack] for pack in plan[self.number - 1].packs]
        rows = {int(index.row_ids[segment]) for pack in numbers for segment in pack}
        of_row = self._origins(rows, index.prepared, loaded)
        planned = SegmentPlaces.of_index(index).micro_batch(plan, self.number - 1, step=0)
        packs = BatchReader(index.prepared.store, _collation(loaded)).packs(planned)
        shared = plan.settings.shared
        return packs, [
            [segment_origin(index, segment, of_row[int(index.row_ids[segment])], shared=shared) for segment in pack]
            for pack in numbers
        ]

    def _origins(self, rows: Iterable[int], prepared: PreparedSet, loaded: Loaded) -> dict[int, list[SegmentOrigin]]:
        data = loaded.config.data
        train, evaluation = resolve_sources(data)
        # with data.eval_split the held-out rows are read from the training data
        configs = evaluation if self.held_out and evaluation else train
        sources = open_sources(configs, seed=loaded.config.runtime.seed)
        return row_origins(prepared, set(rows), loaded.encoder, sources)

    def _check(self, count: int, what: str) -> None:
        if self.number > count:
            raise UserError(f"--{self.kind} {self.number}: there are {count} {what}", hint=f"choose 1 to {count}")


def write_page(path: Path, rows: Sequence[RowView], loaded: Loaded, *, title: str, facts: Mapping[str, str]) -> None:
    """The rows as a page that needs nothing else, with pictures of their media."""
    measurer = loaded.encoder.measurer
    processor = measurer.processor if any(row.media for row in rows) else None
    pictures = previews(rows, processor, measurer.access)
    write_text(path, page_html(rows, title=title, facts=facts, previews=pictures))


def _plan(index: SegmentIndex, loaded: Loaded, *, rows_per_micro_batch: int) -> EpochPlan:
    settings = replace(
        train_settings(loaded.config), rows_per_micro_batch=rows_per_micro_batch, micro_batches_per_step=1
    )
    return plan_epoch(index.table(), settings, epoch=0)


def _collation(loaded: Loaded) -> CollateSettings:
    return CollateSettings(
        packed=loaded.config.train.packing.is_packed,
        pad_token_id=loaded.encoder.tokenizer.pad_token_id,
        pad_to_multiple_of=loaded.config.train.pad_to_multiple_of,
    )


def _part_of_row(index: SegmentIndex, number: int, count: int) -> str:
    """Which of a row's segments it is, in a title."""
    match index.units:
        case Units.PAIRS:
            return ", chosen" if number == 1 else ", rejected"
        case Units.NONE if count > 1:
            return f", segment {number} of {count}"
        case _:
            return ""


def _retitled(view: RowView, title: str) -> RowView:
    return replace(view, title=title)
