"""Rows with media cost more than their tokens: the store knows what encoders run through, and steps are even by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from luthier.config.choices import Overflow, Packing
from luthier.ledger import Ledger
from luthier.loader.numbered_rows import places_of
from luthier.media.families import MediaKind
from luthier.media.families.table import FAMILIES
from luthier.packing import PATCH_COST, PlanSettings, SegmentTable, UnitKind
from luthier.packing.epoch import plan_epoch, straggler_factor
from luthier.preparation import PreparedSet, SourceInfo
from luthier.preparation.segments import SegmentIndex
from luthier.records import Branch, Image, ImageHeader, MediaItem, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample, measure_encoders, row_key

FINGERPRINT = "ab" * 32


def item(start: int, length: int, encoder_length: int) -> MediaItem:
    header = ImageHeader(width=64, height=64)
    return MediaItem(
        media=Image(source="a.png"), header=header, start=start, length=length, encoder_length=encoder_length
    )


def sample(num_tokens: int, *items: MediaItem, branches: tuple[tuple[int, int], ...] = ()) -> Sample:
    """All tokens but the first ones, with the media in them, are targets."""
    target = np.arange(num_tokens) >= max([1, *(one.start + one.length for one in items)])
    return Sample(
        input_ids=np.zeros(num_tokens, dtype=np.int32),
        target=target,
        branches=tuple(Branch(parent=parent, length=length) for parent, length in branches or ((-1, num_tokens),)),
        media=items,
    )


def prepared_of(folder: Path, samples: list[Sample]) -> PreparedSet:
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for number, one in enumerate(samples):
        writer.add(row_key(str(number).encode(), fingerprint=FINGERPRINT, conversion=""), freeze_sample(one))
    writer.commit()
    numbers = np.arange(len(samples), dtype=np.int64)
    return PreparedSet(
        store=SampleStore.open(folder, fingerprint=FINGERPRINT),
        sample_ids=numbers,
        source_ids=np.zeros_like(numbers),
        file_ids=np.zeros_like(numbers),
        row_numbers=numbers + 1,
        files=("rows.jsonl",),
        sources=(SourceInfo(name="one", weight=1.0),),
        ledger=Ledger(read=len(samples), prepared=len(samples)),
    )


PAIR = replace(sample(12, item(1, 4, 60), branches=((-1, 6), (0, 3), (0, 3))), verdict=0.0, prompt_turns=(0,))


def test_each_leaf_counts_the_items_that_it_shows() -> None:
    of_answers = sample(10, item(0, 2, 8), item(5, 2, 100), branches=((-1, 4), (0, 4), (0, 2)))
    assert measure_encoders(of_answers) == (108, 8)
    assert measure_encoders(PAIR) == (60, 60)
    assert measure_encoders(sample(10)) == ()


def test_the_table_says_what_the_store_says(tmp_path: Path) -> None:
    index = SegmentIndex(
        prepared_of(tmp_path, [sample(10, item(1, 4, 64)), sample(8)]), max_length=16, overflow=Overflow.DROP
    )
    extra = index.table().extra_costs
    assert extra is not None and extra.tolist() == [64 * PATCH_COST, 0]
    assert places_of(index)["encoder"].tolist() == [64, 0]  # what a plan of rows that still arrive reads


def test_rows_of_text_have_no_costs_besides_their_tokens(tmp_path: Path) -> None:
    index = SegmentIndex(prepared_of(tmp_path, [sample(10), sample(8)]), max_length=16, overflow=Overflow.DROP)
    assert index.table().extra_costs is None


def test_a_pair_runs_its_picture_twice_and_windows_share_the_costs_of_a_row(tmp_path: Path) -> None:
    pairs = SegmentIndex(
        prepared_of(tmp_path / "pairs", [PAIR]), max_length=16, overflow=Overflow.DROP, units=UnitKind.PAIRS
    )
    assert pairs.encoder_lengths.tolist() == [60, 60]
    split = SegmentIndex(
        prepared_of(tmp_path / "split", [sample(12, item(0, 2, 60))]), max_length=6, overflow=Overflow.SPLIT
    )
    assert split.encoder_lengths.sum() == 60 and len(split) == 2


def test_steps_are_balanced_by_what_encoders_run_through(tmp_path: Path) -> None:
    """Rows of one length, some with large pictures: by tokens alone all micro-batches would be the same."""
    rng = np.random.default_rng(0)
    patches = np.where(rng.random(512) < 0.3, rng.integers(2_000, 16_000, 512), 0).tolist()
    samples = [sample(64, *([item(1, 16, count)] if count else [])) for count in patches]
    table = SegmentIndex(prepared_of(tmp_path, samples), max_length=64, overflow=Overflow.DROP).table()
    settings = PlanSettings(packing=Packing.BEST_FIT, capacity=64, micro_batches_per_step=4, num_ranks=4)
    unknown = replace(table, extra_costs=None)

    def factor(planned: SegmentTable) -> float:
        """Of several epochs, for an order may be a lucky one."""
        factors = [straggler_factor(plan_epoch(planned, settings, epoch=e), table, settings, 4) for e in range(8)]
        return sum(factors) / len(factors)

    assert factor(table) < 1.2 < 2 < factor(unknown)


def test_the_table_of_families_says_how_many_positions_become_a_token() -> None:
    folds = {
        (row.name, kind.value): rule.fold for row in FAMILIES.values() for kind in MediaKind if (rule := row.rule(kind))
    }
    assert folds["qwen2_5_vl", "image"] == folds["qwen2_5_vl", "video"] == 4
    assert folds["gemma3", "image"] == 16 and folds["llava", "image"] == 1 and folds["mllama", "image"] == 6400
    assert all(fold >= 1 for fold in folds.values())
