"""Which row, pack or batch ``luthier show`` shows, and what it says of the settings above it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from luthier.check.show.html import page_html, previews
from luthier.check.show.token_origins import SegmentOrigin, row_origins, segment_origin
from luthier.check.show.view import RowView, show_batch, show_pack, show_sample
from luthier.collation import CollateSettings
from luthier.config import num_processes
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import UserError
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.reader import BatchReader
from luthier.loader.settings import Loaded, eval_settings, media_of, plan_of_run
from luthier.packing import UnitKind
from luthier.packing.epoch import EpochPlan, plan_epoch
from luthier.preparation import PreparedSet
from luthier.preparation.segments import SegmentIndex
from luthier.records import Pack
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources
from luthier.writing import counted, write_text


class Kind(StrEnum):
    """What is counted."""

    ROW = "row"
    PACK = "pack"
    BATCH = "batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The ``number``-th row, pack or micro-batch of one side of the data, counted from 1; or the row at an ``address``
    (``rows.jsonl:45``), whichever side it is on."""

    kind: Kind
    number: int
    held_out: bool
    address: str = ""

    @classmethod
    def of_options(cls, *, row: int | str | None, pack: int | None, batch: int | None, held_out: bool) -> Selection:
        """At most one of the three may be given; raises `UserError` else. Nothing given is row 1."""
        options: dict[Kind, int | str | None] = {Kind.ROW: row, Kind.PACK: pack, Kind.BATCH: batch}
        given = {kind: number for kind, number in options.items() if number is not None} or {Kind.ROW: 1}
        if len(given) > 1:
            names = " and ".join(f"--{kind}" for kind in given)
            raise UserError(f"{names} exclude each other", hint="give one of them")
        ((kind, number),) = given.items()
        if isinstance(number, int) or number.isdecimal():
            return cls(kind=kind, number=int(number), held_out=held_out)
        if not number.rpartition(":")[2].isdecimal():
            hint = "a number counts the rows of the training data; an address, as in messages, is FILE:LINE"
            raise UserError(f"--row {number}: this is no number and no address", hint=hint)
        return cls(kind=kind, number=1, held_out=held_out, address=number)

    @property
    def title(self) -> str:
        """``pack 3 of the training data``."""
        if self.address:
            return f"row {self.address}"
        return f"{self.kind.value} {self.number} of the {'held-out' if self.held_out else 'training'} data"

    def views(self, loaded: Loaded) -> list[RowView]:
        """The rows to show, each token with its owner; raises `UserError` where there is no such thing."""
        index = loaded.held_out if self.held_out else loaded.train
        if self.address:
            index, number = self._found(loaded)
            return replace(self, number=number, address="")._row(index, loaded)
        if index is None:
            hint = "name some with data.eval, or set data.eval_split"
            raise UserError("this run has no held-out data", hint=hint, key="data.eval")
        match self.kind:
            case Kind.ROW:
                return self._row(index, loaded)
            case Kind.PACK:
                return self._pack(index, loaded)
            case Kind.BATCH:
                return self._batch(index, loaded)
            case _:
                raise AssertionError(f"unknown kind {self.kind!r}")

    def _found(self, loaded: Loaded) -> tuple[SegmentIndex, int]:
        """The side of the data that has the row at the address, and its number there."""
        name, _, line = self.address.rpartition(":")
        for index in filter(None, (loaded.train, loaded.held_out)):
            files = [n for n, file in enumerate(index.prepared.files) if f"/{file}".endswith(f"/{name}")]
            rows = np.isin(index.prepared.file_ids, files) & (index.prepared.row_numbers == int(line))
            if rows.any():
                return index, int(np.argmax(rows)) + 1
        lost = loaded.prepared.quarantine
        where = f"it may be among the rows that are lost: {lost}" if lost else "is it within the slice of its source?"
        raise UserError(f"--row {self.address}: the run has no such row", hint=where)

    def _row(self, index: SegmentIndex, loaded: Loaded) -> list[RowView]:
        prepared, tokenizer = index.prepared, loaded.encoder.tokenizer
        self._check(len(prepared), "rows")
        row = self.number - 1
        of_row = self._origins([row], prepared, loaded)[row]
        segments = np.flatnonzero(index.row_ids == row).tolist()
        if index.units is UnitKind.FEEDBACK_KL:
            segments = segments[:1]  # another row's completion is a matter of the batch
        if not segments:  # cut away: show what it would have been
            views = show_sample(prepared[row], tokenizer, control=tokenizer.control_ids, origins=of_row)
            return [replace(view, title=f"{view.title} (not trained: over data.max_length)") for view in views]
        title = str(prepared.address(row))
        return [
            show_pack(
                Pack(segments=(index[segment],)),
                tokenizer,
                title=f"{title}{_part_of_row(index, number, len(segments))}",
                control=tokenizer.control_ids,
                origins=[segment_origin(index, segment, of_row)],
            )
            for number, segment in enumerate(segments, start=1)
        ]

    def _pack(self, index: SegmentIndex, loaded: Loaded) -> list[RowView]:
        """One pack, or, of padded rows that are compared, all of a unit."""
        plan, rows = self._plan(index, loaded)
        tokenizer = loaded.encoder.tokenizer
        together = index.units.size if not loaded.config.train.packing.is_packed else 1
        self._check((len(plan.planned.pack_bounds) - 1) // together, "packs")
        first = (self.number - 1) * together
        micro_batch = int(np.searchsorted(plan.planned.batch_bounds, first, side="right")) - 1
        start = first - int(plan.planned.batch_bounds[micro_batch])
        packs, origins = self._packs(plan, rows, micro_batch, index, loaded)
        chosen = slice(start, start + together)
        return [
            show_pack(pack, tokenizer, title=self.title, control=tokenizer.control_ids, origins=of_pack)
            for pack, of_pack in zip(packs[chosen], origins[chosen], strict=True)
        ]

    def _batch(self, index: SegmentIndex, loaded: Loaded) -> list[RowView]:
        config, tokenizer = loaded.config, loaded.encoder.tokenizer
        plan, rows = self._plan(index, loaded)
        self._check(len(plan.planned), "micro-batches")
        packs, origins = self._packs(plan, rows, self.number - 1, index, loaded)
        has_media = any(segment.media for pack in packs for segment in pack.segments)
        media = media_of(config, tokenizer.files.folder) if has_media else None
        reader = BatchReader(index.prepared.store, collation_of(loaded), shared=plan.settings.shared, media=media)
        batch = reader.read(rows.of_plan(plan, self.number - 1, step=0))
        control = tokenizer.control_ids
        return show_batch(batch, tokenizer, title=self.title, control=control, origins=origins, packs=packs)

    def _plan(self, index: SegmentIndex, loaded: Loaded) -> tuple[EpochPlan, NumberedRows]:
        """The first epoch as training has it, or evaluation."""
        rows, ranks = NumberedRows.of_index(index), num_processes()
        if self.held_out:
            return plan_epoch(rows, eval_settings(loaded.config, num_ranks=ranks), epoch=0), rows
        return plan_of_run(loaded.config, rows, num_ranks=ranks).epoch(0), rows

    def _packs(
        self, plan: EpochPlan, rows: NumberedRows, micro_batch: int, index: SegmentIndex, loaded: Loaded
    ) -> tuple[list[Pack], list[list[SegmentOrigin]]]:
        numbers = [[int(segment) for segment in pack] for pack in plan[micro_batch].packs]
        of_rows = {int(index.row_ids[segment]) for pack in numbers for segment in pack}
        of_row = self._origins(of_rows, index.prepared, loaded)
        packs = BatchReader(index.prepared.store, collation_of(loaded)).packs(rows.of_plan(plan, micro_batch, step=0))
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
        if not 1 <= self.number <= count:
            raise UserError(f"--{self.kind} {self.number}: there are {count} {what}", hint=f"choose 1 to {count}")


def write_page(path: Path, rows: Sequence[RowView], loaded: Loaded, *, title: str, facts: Mapping[str, str]) -> None:
    """The rows as a page that needs nothing else, with pictures of their media."""
    measurer = loaded.encoder.measurer
    processor = measurer.processor if any(row.media for row in rows) else None
    pictures = previews(rows, processor, measurer.access)
    write_text(path, page_html(rows, title=title, facts=facts, previews=pictures))


def collation_of(loaded: Loaded) -> CollateSettings:
    """How the run lays segments out, but for the boundaries that the kernels of some devices take."""
    return CollateSettings(
        packed=loaded.config.train.packing.is_packed,
        pad_token_id=loaded.encoder.tokenizer.pad_token_id,
        pad_to_multiple_of=loaded.config.train.pad_to_multiple_of,
    )


def _part_of_row(index: SegmentIndex, number: int, count: int) -> str:
    """Which of a row's segments it is, in a title."""
    match index.units:
        case UnitKind.PAIRS | UnitKind.REWARDS:
            return ", chosen" if number == 1 else ", rejected"
        case UnitKind.NONE if count > 1:
            return f", segment {number} of {count}"
        case _:
            return ""


# ---------------------------------------------------------------- what stands above tokens: the settings that made them


FINGERPRINT_DIGITS = 12  # enough to tell two templates apart by eye


def run_facts(config: RunConfig, encoder: Encoder) -> dict[str, str]:
    """What decides ids and targets: model, tokenizer, ``max_length``, all that is set of template and media, and what
    a template's clock tells the rows.
    """
    model = config.model
    tokenizer = encoder.tokenizer
    facts = {"model": _short(model.name_or_path)}
    if model.tokenizer_name_or_path is not None:
        facts["tokenizer"] = _short(model.tokenizer_name_or_path)
    facts["vocabulary"] = counted(tokenizer.vocab_size, "token")
    facts["template"] = _template(config, encoder)
    facts["train_on"] = config.template.train_on.value
    said = config.template.model_dump(mode="json", exclude={"chat_template", "train_on"}, exclude_defaults=True)
    facts |= {f"template.{key}": _words(value) for key, value in said.items()}
    told = config.media.model_dump(mode="json", exclude={"roots", "url_hosts"}, exclude_defaults=True)
    facts |= {f"media.{key}": _words(value) for key, value in told.items()}
    if (template := tokenizer.template) is not None and (clock := template.clock_note) is not None:
        facts["clock"] = clock
    facts["max_length"] = f"{config.data.max_length:,}"
    facts["encoder"] = encoder.fingerprint[:FINGERPRINT_DIGITS]
    return facts


def _template(config: RunConfig, encoder: Encoder) -> str:
    template = encoder.tokenizer.template
    if template is None:
        return "none"
    given = config.template.chat_template
    if given is None:
        name = "the model's own"
    else:
        name = Path(given).name if "\n" not in given and "{" not in given else "given in the config"
    return f"{name} · {template.fingerprint[:FINGERPRINT_DIGITS]}"


def _words(value: object) -> str:
    """``{"enable_thinking": False}`` -> ``enable_thinking=False``."""
    match value:
        case dict():
            return ", ".join(f"{key}={one}" for key, one in value.items())
        case list():
            return "; ".join(_words(one) for one in value)
        case _:
            return str(value)


def _short(name: str) -> str:
    """``/models/Qwen/Qwen3-8B`` -> ``Qwen/Qwen3-8B``: a page that is passed on need not tell where files lie."""
    parts = [part for part in name.split("/") if part]
    return "/".join(parts[-2:]) if name.startswith(("/", "~", ".")) else name
