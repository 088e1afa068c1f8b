"""Positions of three axes (M-RoPE) for a packed row, against the model's own ``get_rope_index``.

A row of 16,384 tokens: documents with two pictures and text each, for Qwen2.5-VL. ``get_rope_index`` knows no
documents within a row, so it is asked for each alone, and once for all as a padded batch; the same positions are
asserted of both, and the quicker one is compared. Torch has one thread; CPU time, medians.

python -m benchmarks.positions [--tokens N] [--documents N] [--images N] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numba  # noqa: F401 — positions are counted by a compiled pass where it is loaded, as in workers
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from benchmarks.harness.processes import load
from luthier.layout.mrope import packed_mrope
from luthier.layout.position_schemes import MediaGrids, position_scheme
from luthier.records import Branch

CONFIG = {"vision_config": {"spatial_merge_size": 2, "tokens_per_second": 2}}
METHODS = ("get_rope_index", "get_vision_position_ids")  # these need a config, and no weights
SIDES = range(6, 50, 2)  # of pictures, in patches
IMAGE = 1  # the type of a picture's tokens; text is 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """D documents in one row: their lengths, the type of each token, the grids of each document's pictures."""

    lengths_D: list[int]
    types_T: NDArray[np.int64]
    grids_DN3: list[NDArray[np.int64]]

    @classmethod
    def make(cls, num_tokens: int, num_documents: int, num_images: int) -> Packed:
        """Pictures take up to half of each document; text around them fills the row."""
        rng = np.random.default_rng(0)
        each = num_images // num_documents
        longest = (2 * num_tokens / num_documents / each) ** 0.5  # 4 patches are a token
        sides = rng.choice([side for side in SIDES if longest / 4 <= side <= longest], (num_documents, each, 2))
        grids = [np.column_stack([np.ones(each, np.int64), own]).astype(np.int64) for own in sides]
        room = num_tokens // num_documents
        lengths = [room] * (num_documents - 1) + [num_tokens - room * (num_documents - 1)]
        types = [_document(length, grid) for length, grid in zip(lengths, grids, strict=True)]
        return cls(lengths_D=lengths, types_T=np.concatenate(types), grids_DN3=grids)


def main() -> int:
    """Print the table; the exit status is that of an assertion."""
    options = _options()
    torch.set_num_threads(1)
    packed = Packed.make(options.tokens, options.documents, options.images)
    ours = _ours(packed)
    alone, batched = _alone(packed), _batched(packed)
    expected_AT = alone()
    assert np.array_equal(ours()[1:], expected_AT), "positions differ from those of get_rope_index"
    assert np.array_equal(batched(), expected_AT), "get_rope_index disagrees with itself"
    told = {
        "luthier.layout.mrope.packed_mrope": _milliseconds(ours, options.rounds * 10),
        "get_rope_index, each document alone": _milliseconds(alone, options.rounds),
        "get_rope_index, a padded batch": _milliseconds(batched, options.rounds),
    }
    Console(width=120).print(_table(packed, told))
    print("the positions of all three are equal")
    return 0


def _document(length: int, grids_N3: NDArray[np.int64]) -> NDArray[np.int64]:
    """Types of a document's tokens: text, a picture, text, a picture, text."""
    sizes = [int(grid.prod()) // 4 for grid in grids_N3]
    text = length - sum(sizes)
    assert text > len(sizes), f"{sum(sizes)} tokens of pictures in a document of {length}"
    types = []
    for size in sizes:
        types += [np.zeros(text // (len(sizes) + 1), np.int64), np.full(size, IMAGE)]
    types.append(np.zeros(length - sum(map(len, types)), np.int64))
    return np.concatenate(types)


def _ours(packed: Packed) -> Callable[[], NDArray[Any]]:
    scheme = position_scheme("grid_seconds", CONFIG)
    grids = MediaGrids(image_N3=np.concatenate(packed.grids_DN3))
    branches = [Branch(parent=-1, length=length) for length in packed.lengths_D]
    return lambda: packed_mrope(scheme, packed.types_T, grids, branches)


def _alone(packed: Packed) -> Callable[[], NDArray[Any]]:
    model = _model()
    ends = np.cumsum(packed.lengths_D)
    documents = [
        (torch.from_numpy(packed.types_T[end - length : end])[None], torch.from_numpy(grids))
        for end, length, grids in zip(ends, packed.lengths_D, packed.grids_DN3, strict=True)
    ]

    def positions() -> NDArray[Any]:
        found = [_rope_index(model, types_1T, grids) for types_1T, grids in documents]
        return torch.cat(found, dim=2)[:, 0].numpy()

    return positions


def _batched(packed: Packed) -> Callable[[], NDArray[Any]]:
    model = _model()
    ends = np.cumsum(packed.lengths_D)
    rows = [
        torch.from_numpy(packed.types_T[end - length : end]) for end, length in zip(ends, packed.lengths_D, strict=True)
    ]
    types_DT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_DT = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    grids = torch.from_numpy(np.concatenate(packed.grids_DN3))

    def positions() -> NDArray[Any]:
        found = _rope_index(model, types_DT, grids, mask_DT)
        return found[:, mask_DT.bool()].numpy()

    return positions


def _model() -> Any:
    config = SimpleNamespace(vision_config=SimpleNamespace(**CONFIG["vision_config"]))
    model = SimpleNamespace(config=config)
    for name in METHODS:
        setattr(model, name, getattr(Qwen2_5_VLModel, name).__get__(model))
    return model


def _rope_index(
    model: Any, types_BT: torch.Tensor, grids: torch.Tensor, mask_BT: torch.Tensor | None = None
) -> torch.Tensor:
    found, _ = model.get_rope_index(
        input_ids=torch.zeros_like(types_BT),  # of which only the shape is read
        mm_token_type_ids=types_BT,
        image_grid_thw=grids,
        attention_mask=mask_BT,
    )
    assert isinstance(found, torch.Tensor)
    return found


def _milliseconds(work: Callable[[], object], rounds: int) -> float:
    work()
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return statistics.median(spent) * 1e3


def _table(packed: Packed, told: dict[str, float]) -> Table:
    num_images = sum(map(len, packed.grids_DN3))
    title = (
        f"{len(packed.types_T):,} tokens, {len(packed.lengths_D)} documents, {num_images} images; "
        f"transformers {version('transformers')}, {load()}"
    )
    table = Table("", "CPU ms", "theirs / ours", title=title, box=None)
    ours, *theirs = told.items()
    table.add_row(ours[0], f"{ours[1]:.2f}", "")
    for name, spent in theirs:
        table.add_row(name, f"{spent:.2f}", f"{spent / ours[1]:.0f}x")
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
