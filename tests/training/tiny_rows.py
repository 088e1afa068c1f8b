"""Stores of random rows of each kind, and their runs: what `tiny_runs` is for segments in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tiny_runs import make_config

from luthier.config.schema import RunConfig
from luthier.ledger import Ledger
from luthier.preparation import Prepared, PreparedSet, SourceInfo
from luthier.records import Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample, row_key
from luthier.training.data import RunData, open_run_data

FINGERPRINT = "ef" * 32
CONTINUATIONS = {"sft": 1, "pt": 1, "rm": 2, "dpo": 2, "kto": 1}
STOP = 2034


def make_row(number: int, *, continuations: int, weighted: bool = False, verdict: bool = True) -> Sample:
    """A prompt and what follows it, random but for its number. Of verdicts, every other one is 1.0, else 0.0; as the
    margins of pairs they are halved. ``weighted``: answers of every third row count 2.0."""
    rng = np.random.default_rng([7, number])
    lengths = [int(rng.integers(2, 12)), *(int(rng.integers(2, 9)) for _ in range(continuations))]
    ids = rng.integers(10, 2000, sum(lengths)).astype(np.int32)
    ids[np.cumsum(lengths)[1:] - 1] = STOP
    target = np.arange(len(ids)) >= lengths[0]
    weight = np.full(len(ids), 2.0 if number % 3 == 0 else 1.0, np.float32) if weighted else None
    branches = tuple(Branch(parent=0 if place else -1, length=length) for place, length in enumerate(lengths))
    said = (number % 2) / (2 if continuations > 1 else 1) if verdict else None
    turns = tuple(turn for turn in (1, 4) if verdict and turn < lengths[0] - 1)
    return Sample(input_ids=ids, target=target, weight=weight, branches=branches, verdict=said, prompt_turns=turns)


def make_turns(number: int, *, turns: int, weighted: bool = False) -> Sample:
    """A conversation whose history is rewritten: each answer is a branch of what is before it, and so is what it is to
    later turns. Every fourth row has two versions of a question besides, a branch off a branch."""
    rng = np.random.default_rng([8, number])
    branches = [(-1, int(rng.integers(2, 9)), False)]
    trunk = 0
    for turn in range(turns):
        branches.append((trunk, int(rng.integers(2, 7)), True))
        if turn + 1 < turns:
            branches.append((trunk, int(rng.integers(3, 9)), False))
            trunk = len(branches) - 1
        if number % 4 == 0 and turn == turns // 2:
            branches.append((trunk, 3, False))
            branches += [(len(branches) - 1, 2, True), (len(branches) - 1, 4, True)]
    ids = rng.integers(10, 2000, sum(length for _, length, _ in branches)).astype(np.int32)
    target = np.concatenate([np.full(length, learned) for _, length, learned in branches])
    ends = np.cumsum([length for _, length, _ in branches]) - 1
    ids[[end for end, (_, _, learned) in zip(ends, branches, strict=True) if learned]] = STOP
    weight = np.where(np.arange(len(ids)) % 3 == 0, 2.0, 1.0).astype(np.float32) if weighted else None
    tree = tuple(Branch(parent=parent, length=length) for parent, length, _ in branches)
    return Sample(input_ids=ids, target=target, weight=weight, branches=tree)


def make_rows(
    folder: Path, objective: str, numbers: range, *, weighted: bool = False, turns: int | None = None
) -> PreparedSet:
    """Rows by number, in a store that may hold others already; with ``turns`` they are those of `make_turns`."""
    count = CONTINUATIONS[objective]
    kind = f"{objective in ('sft', 'pt')} {count} {weighted} {turns}"
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    keys = [row_key(f"{kind} {number}".encode(), fingerprint=FINGERPRINT, conversion="") for number in numbers]
    for number, key in zip(numbers, keys, strict=True):
        if turns is None:
            row = make_row(number, continuations=count, weighted=weighted, verdict=objective not in ("sft", "pt"))
        else:
            row = make_turns(number, turns=turns, weighted=weighted)
        writer.add(key, freeze_sample(row))
    writer.commit()
    store = SampleStore.open(folder, fingerprint=FINGERPRINT)
    samples = store.lookup(np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1))
    assert (samples >= 0).all()
    return PreparedSet(
        store=store,
        sample_ids=samples,
        source_ids=np.zeros(len(keys), np.int32),
        file_ids=np.zeros(len(keys), np.int32),
        row_numbers=np.array(numbers, dtype=np.int64) + 1,
        files=("rows.jsonl",),
        sources=(SourceInfo(name="one", weight=1.0),),
        ledger=Ledger(read=len(keys), prepared=len(keys)),
    )


def run_data(
    store: Path,
    config: RunConfig,
    *,
    rows: range = range(12),
    held_out: range = range(0),
    weighted: bool = False,
    turns: int | None = None,
) -> RunData:
    """The rows of a run of ``config``; those held out are in the same store."""
    train = make_rows(store, config.objective.name, rows, weighted=weighted, turns=turns)
    evaluated = make_rows(store, config.objective.name, held_out, weighted=weighted, turns=turns) if held_out else None
    if evaluated is not None:
        train = replace(
            train, store=evaluated.store, sample_ids=evaluated.store.lookup(train.store.keys_of(train.sample_ids))
        )
    prepared = Prepared(train=train, eval=evaluated, num_encoded=len(train), num_reused=0, quarantine=None)
    return open_run_data(config, prepared, encoder_fingerprint=FINGERPRINT)


def epoch_steps(output: Path, objective: dict[str, Any], *, rows: int = 12, **changes: Any) -> RunConfig:
    """A run whose every step is a whole epoch, so that each way to divide it has the same rows."""
    batch = changes.get("train__per_device_train_batch_size", 1)
    accumulation = changes.pop("micro_batches", -(-rows // batch))
    return make_config(
        output,
        objective=objective,
        train__max_steps=3,
        train__gradient_accumulation_steps=accumulation,
        **changes,
    )
