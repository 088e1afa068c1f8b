"""Batches of pictures: our loader (store -> decoded -> features -> batch) against transformers' own processor.

Both get the same photographs from the same files and the same rows in the same batches. Theirs is what a collator does:
PIL opens and decodes, then one call of ``processor(text, images)`` a batch, its texts rendered beforehand. All token
ids and pixels are compared first, bit for bit; the exit status is 1 if any differ. Torch has one thread, and time is
CPU time, of workers too, in the middle of an epoch; ours includes the positions (M-RoPE) and targets, theirs does not.

python -m benchmarks.media_loading [--rows N] [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import AutoProcessor

import luthier
from benchmarks.harness.pictures import picture_rows, vision_model, write_photographs, write_picture_rows
from benchmarks.harness.processes import cpu_seconds, load
from benchmarks.harness.runs import description, qwen3_tokenizer
from luthier.collation import MediaInputs
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import decode
from luthier.records import Batch

BATCH, MAX_LENGTH = 4, 4096
NUM_WARM = 2  # batches that are not measured: first calls load and prepare things
WORKERS = (0, 1)
Row = tuple[str, Path]  # the rendered text, its picture


def main() -> int:
    """Print the tables; 1 if a batch differs."""
    options, tokenizer = _options(), qwen3_tokenizer()
    if tokenizer is None:
        print("nothing to do: this needs the Qwen3 tokenizer (LUTHIER_SHARED)")
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Work.of(Path(name), tokenizer, options.rows)
        differing = work.differences()
        stages, rates = _stage_table(options.rows), _rate_table()
        for name, milliseconds in work.stages().items():
            stages.add_row(name, f"{milliseconds:.2f}")
        for workers in WORKERS:
            rates.add_row(str(workers), *work.rates(workers, options.rounds))
    console = Console(width=130)
    console.print(stages)
    console.print()
    console.print(rates)
    print("ids and pixels of both are " + (f"NOT EQUAL: {', '.join(sorted(differing))}" if differing else "equal"))
    return 1 if differing else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The same batches for both. ``order`` are the rows of each batch, as our loader takes them."""

    model: Path
    prepared: Any
    media: MediaInputs
    processor: Any
    rows: Sequence[Row]
    order: Sequence[Sequence[int]]

    @classmethod
    def of(cls, folder: Path, tokenizer: Path, num_rows: int) -> Work:
        """Write, prepare and load everything."""
        file = folder / "rows.jsonl"
        write_picture_rows(file, write_photographs(folder / "pictures", num_rows))
        model = vision_model(folder / "model", tokenizer)
        sections = {"model": {"name_or_path": str(model), "config_overrides": {}}, "data": {"max_length": MAX_LENGTH}}
        prepared = luthier.prepare(description(folder, file, model, media={"roots": [str(folder)]}, **sections))
        processor = AutoProcessor.from_pretrained(model)
        media = luthier.media_inputs(str(model), roots=[str(folder)])
        rows = [(_rendered(processor, *texts), picture) for *texts, picture in picture_rows(file)]
        made = cls(model=model, prepared=prepared, media=media, processor=processor, rows=rows, order=())
        order = [[address.row - 1 for address in batch.addresses] for batch in made.ours(0)]
        return cls(model=model, prepared=prepared, media=media, processor=processor, rows=rows, order=order)

    def ours(self, num_workers: int) -> luthier.Loader:
        """One epoch of batches."""
        pad = self.processor.tokenizer.pad_token_id
        return luthier.Loader(
            self.prepared,
            max_length=MAX_LENGTH,
            packing="none",
            batch_size=BATCH,
            pad_token_id=pad,
            num_workers=num_workers,
            media=self.media,
        )

    def theirs(self, num_workers: int) -> DataLoader[Any]:
        """The same batches by the processor."""
        return DataLoader(
            self.rows,
            batch_sampler=self.order,
            collate_fn=partial(processed, self.processor),
            num_workers=num_workers,
            worker_init_fn=_one_thread,
        )

    def differences(self) -> set[str]:
        """Names of what is not equal in some batch."""
        found: set[str] = set()
        for batch, theirs in zip(self.ours(0), self.theirs(0), strict=True):
            for name in ("pixel_values", "image_grid_thw", "input_ids", "attention_mask", "mm_token_type_ids"):
                if not torch.equal(torch.as_tensor(batch.model_inputs[name]), theirs[name]):
                    found.add(name)
        return found

    def stages(self) -> dict[str, float]:
        """CPU milliseconds of an image in each stage, ours above theirs."""
        stored, access, processor = self.prepared.train, MediaAccess(self.media.access.config), self.media.processor
        items = [stored[index].media[0] for index in range(len(stored))]
        decoded = [(item.header, decode(item.media, item.header, access)) for item in items]
        texts = [text for text, _ in self.rows]
        pictures = [opened(picture) for _, picture in self.rows]
        epoch = _milliseconds(lambda _: None, self.ours(0))
        ours = {
            "decoding": _milliseconds(lambda item: decode(item.media, item.header, access), items),
            "pixels to features": _milliseconds(lambda item: processor.features([item]), decoded),
        }
        pairs = list(zip(texts, pictures, strict=True))
        theirs = {
            "decoding": _milliseconds(opened, [picture for _, picture in self.rows]),
            "image processor": _milliseconds(lambda pair: self.processor.image_processor([pair[1]]), pairs),
        }
        whole = _milliseconds(lambda pair: called(self.processor, [pair[0]], [pair[1]]), pairs)
        return {
            **{f"luthier: {name}": spent for name, spent in ours.items()},
            "luthier: reading, joining, positions": epoch / BATCH - sum(ours.values()),
            **{f"transformers: {name}": spent for name, spent in theirs.items()},
            "transformers: processor, image processor included": whole,
        }

    def rates(self, num_workers: int, rounds: int) -> list[str]:
        """Images a CPU-second of both, in the middle of an epoch."""
        ours, theirs = [], []
        for _ in range(rounds):  # by turns
            ours.append(_rate(self.ours(num_workers)))
            theirs.append(_rate(self.theirs(num_workers)))
        pairs = [statistics.median(rates) for rates in (ours, theirs)]
        return [f"{pairs[0]:.1f}", f"{pairs[1]:.1f}", f"{pairs[0] / pairs[1]:.2f}x", _spread(ours), _spread(theirs)]


# --------------------------------------------------------------------------------------------- transformers' way


def processed(processor: Any, rows: Sequence[Row]) -> Any:
    """A batch of rows, as a collator makes it."""
    return called(processor, [text for text, _ in rows], [opened(picture) for _, picture in rows])


def called(processor: Any, texts: list[str], pictures: list[Image.Image]) -> Any:
    """The processor on one picture a text."""
    return processor(text=texts, images=[[picture] for picture in pictures], padding=True, return_tensors="pt")


def opened(picture: Path) -> Image.Image:
    """The decoded picture."""
    with Image.open(picture) as image:
        return image.convert("RGB")


def _rendered(processor: Any, question: str, answer: str) -> str:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]},
        {"role": "assistant", "content": answer},
    ]
    return str(processor.tokenizer.apply_chat_template(messages, chat_template=processor.chat_template, tokenize=False))


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------------ measuring


def _milliseconds(work: Callable[[Any], object], items: Iterable[Any]) -> float:
    """CPU time of an item, median, after the first few."""
    spent, start = [], time.process_time()
    for item in items:
        work(item)
        now = time.process_time()
        spent.append(now - start)
        start = now
    return statistics.median(spent[NUM_WARM:]) * 1e3


def _rate(batches: Iterable[Batch | Any]) -> float:
    """Images a CPU-second of this process and its workers, without the first batches and the end."""
    marks, images = [], 0
    for number, _ in enumerate(batches):
        marks.append(cpu_seconds(os.getpid()))
        images += BATCH if number >= NUM_WARM else 0
    return images / (marks[-1] - marks[NUM_WARM - 1])


def _spread(rates: Sequence[float]) -> str:
    return f"{min(rates):.1f} to {max(rates):.1f}"


# ------------------------------------------------------------------------------------------------------------ table


def _stage_table(num_rows: int) -> Table:
    title = f"CPU milliseconds of a photograph, median of {num_rows}; transformers {version('transformers')}, {load()}"
    return Table("", "ms", title=title, box=None)


def _rate_table() -> Table:
    title = f"photographs a CPU-second, batches of {BATCH}; torch {version('torch')}, {load()}"
    columns = ("workers", "luthier", "transformers", "ratio", "luthier, all rounds", "transformers, all rounds")
    return Table(*columns, title=title, box=None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=140)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for temporary files")
    options = parser.parse_args()
    options.rows -= options.rows % BATCH  # whole batches
    return options


if __name__ == "__main__":
    sys.exit(main())
