"""A store of prompts with one or two continuations, for the tests of units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from luthier.layout import prompt_tree
from luthier.ledger import Ledger
from luthier.preparation import PreparedSet, SourceInfo
from luthier.records import Sample, Segment
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample, row_key

FINGERPRINT = "cd" * 32


def compared_sample(
    number: int, prompt: int, answers: list[int], *, turns: tuple[int, ...] = (), verdict: float = 1.0
) -> Sample:
    """Ids tell where a token is from: ``1000 * row + place``, and 300, 600 more in the continuations."""
    runs = []
    for side, length in enumerate(answers, start=1):
        ids = [1000 * number + n for n in range(prompt)] + [1000 * number + 300 * side + n for n in range(length)]
        target = np.zeros(prompt + length, np.bool_)
        target[prompt:] = True
        runs.append(Segment(input_ids=np.array(ids, np.int32), target=target))
    return replace(prompt_tree(runs, prompt), verdict=verdict, prompt_turns=turns)


def stored(folder: Path, samples: list[Sample]) -> PreparedSet:
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for number, sample in enumerate(samples):
        writer.add(row_key(str(number).encode(), fingerprint=FINGERPRINT, conversion=""), freeze_sample(sample))
    writer.commit()
    count = len(samples)
    return PreparedSet(
        store=SampleStore.open(folder, fingerprint=FINGERPRINT),
        sample_ids=np.arange(count, dtype=np.int64),
        source_ids=np.zeros(count, np.int32),
        file_ids=np.zeros(count, np.int32),
        row_numbers=np.arange(1, count + 1, dtype=np.int64),
        files=("rows.jsonl",),
        sources=(SourceInfo(name="one", weight=1.0),),
        ledger=Ledger(read=count, prepared=count),
    )


def random_rows(folder: Path, count: int, *, continuations: int) -> PreparedSet:
    rng = np.random.default_rng(count)
    samples = []
    for number in range(count):
        prompt = int(rng.integers(6, 40))
        answers = rng.integers(2, 25, continuations).tolist()
        turns = (2, prompt // 2, prompt - 2)
        samples.append(compared_sample(number, prompt, answers, turns=turns, verdict=float(number % 2)))
    return stored(folder, samples)
