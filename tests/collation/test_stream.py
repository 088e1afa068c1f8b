"""From the store to batches: the counts that plans promise are the counts that batches have."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from luthier.collation.collator import collate_packs
from luthier.config.choices import Overflow, Packing
from luthier.ledger import Ledger
from luthier.packing import PlanSettings
from luthier.packing.epoch import describe, plan_epoch
from luthier.preparation import PreparedSet, SourceInfo
from luthier.preparation.segments import SegmentIndex
from luthier.records import Branch, Pack, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample, row_key

FINGERPRINT = "ab" * 32


def make_sample(rng):
    """A tree, a single branch, or a document (every token a target), as the dice fall."""
    lengths = rng.integers(1, 30, rng.integers(1, 4))
    branches = tuple(Branch(parent=node - 1 if node < 2 else 0, length=int(n)) for node, n in enumerate(lengths))
    total = int(lengths.sum())
    return Sample(
        input_ids=rng.integers(0, 100, total, dtype=np.int32),
        target=rng.random(total) < rng.choice([0.3, 1.0]),
        weight=rng.choice([0.5, 1.0], total).astype(np.float32) if rng.random() < 0.3 else None,
        branches=branches,
    )


@pytest.fixture
def prepared(tmp_path):
    rng = np.random.default_rng(0)
    writer = StoreWriter(tmp_path, fingerprint=FINGERPRINT)
    n = 120
    for number in range(n):
        writer.add(row_key(bytes([number]), fingerprint=FINGERPRINT, conversion=""), freeze_sample(make_sample(rng)))
    writer.commit()
    return PreparedSet(
        store=SampleStore.open(tmp_path, fingerprint=FINGERPRINT),
        sample_ids=np.arange(n, dtype=np.int64),
        source_ids=np.zeros(n, np.int64),
        file_ids=np.zeros(n, np.int64),
        row_numbers=np.arange(1, n + 1, dtype=np.int64),
        files=("rows.jsonl",),
        sources=(SourceInfo(name="one", weight=1.0),),
        ledger=Ledger(read=n, prepared=n),
    )


def blank(segment):
    """The same tokens with nothing to learn."""
    return replace(segment, target=np.zeros_like(segment.target), weight=None)


def batches_of(index, plan, *, packed):
    for planned in plan:
        packs = [Pack(segments=tuple(index[i] for i in pack)) for pack in planned.packs]
        if planned.dummy:
            packs = [Pack(segments=tuple(blank(segment) for segment in pack.segments)) for pack in packs]
        yield collate_packs(packs, packed=packed, pad_token_id=0)


@pytest.mark.parametrize("overflow", [Overflow.DROP, Overflow.TRUNCATE, Overflow.SPLIT])
@pytest.mark.parametrize("packing", [Packing.NONE, Packing.BEST_FIT, Packing.WINDOW])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_planned_tokens_targets_and_slots_are_those_of_the_batches(prepared, overflow, packing, num_ranks):
    index = SegmentIndex(prepared, max_length=32, overflow=overflow)
    settings = PlanSettings(
        packing=packing, capacity=32, rows_per_micro_batch=2, num_ranks=num_ranks, micro_batches_per_step=2 * num_ranks
    )
    plan = plan_epoch(index.table(), settings, epoch=0)
    summary = describe(plan, index.table())
    batches = list(batches_of(index, plan, packed=packing.is_packed))
    assert sum(batch.num_targets for batch in batches) == summary.targets == index.num_targets.sum()
    real = batches[: len(batches) - plan.num_dummies]
    assert sum(batch.labels_BT.numel() for batch in real) == summary.slots
    assert all(batch.num_targets == 0 for batch in batches[len(real) :])
    assert len(batches) % num_ranks == 0
    learned = torch.cat([batch.labels_BT[batch.labels_BT != -100] for batch in batches])
    expected = np.concatenate([index[i].input_ids[index[i].target] for i in range(len(index))])
    assert sorted(learned.tolist()) == sorted(expected.tolist())


def test_an_index_sent_to_a_loader_worker_gives_the_same_segments(prepared):
    index = SegmentIndex(prepared, max_length=32, overflow=Overflow.SPLIT)
    copy = pickle.loads(pickle.dumps(index))  # noqa: S301  what a DataLoader does with its data set
    for i in range(len(index)):
        assert copy[i].input_ids.tolist() == index[i].input_ids.tolist()
        assert copy[i].target.tolist() == index[i].target.tolist()
        assert copy[i].address == index[i].address
