"""A tiny model and segments made in memory, so that a whole run takes a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from luthier.config.schema import RunConfig
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.plan import StreamPlan
from luthier.packing import PlanSettings, SegmentTable
from luthier.packing.order import MixtureSettings, RowOrder
from luthier.records import Address, Segment
from luthier.training.data import RunData

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}


def make_segments(count: int, *, seed: int = 0, longest: int = 24, stop: int = 2034) -> list[Segment]:
    """Segments of random ids: a prompt, then an answer that ends with ``stop``; addresses say which is which."""
    rng = np.random.default_rng(seed)
    segments = []
    for row in range(count):
        length = int(rng.integers(6, longest + 1))
        prompt = int(rng.integers(1, length - 3))
        ids = rng.integers(10, 2000, size=length).astype(np.int32)
        ids[-1] = stop
        target = np.arange(length) >= prompt
        segments.append(Segment(input_ids=ids, target=target, address=Address(file="rows.jsonl", row=row + 1)))
    return segments


def padded_batch(segments: Sequence[Segment], pad: int = 0) -> dict[str, torch.Tensor]:
    """What a model of transformers' takes of segments, padded at the right; labels are not shifted."""
    ids = torch.full((len(segments), max(map(len, segments))), pad)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, segment in enumerate(segments):
        given = torch.from_numpy(segment.input_ids).long()
        ids[row, : len(segment)], mask[row, : len(segment)] = given, 1
        labels[row, : len(segment)] = torch.where(torch.from_numpy(segment.target), given, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def losses_by_hand(model: nn.Module, batch: Mapping[str, torch.Tensor], steps: int, rate: float) -> list[float]:
    """Of AdamW on the loss that a model itself computes, on the same rows again and again."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_table(segments: Sequence[Segment], weights: tuple[float, ...] = (1.0,)) -> SegmentTable:
    """The segments are of the data sets, one after the other as they are read, as many as there are weights."""
    rows = np.arange(len(segments), dtype=np.int64)
    return SegmentTable(
        lengths=np.array([len(s) for s in segments], dtype=np.int64),
        num_targets=np.array([int(s.target[1:].sum()) for s in segments], dtype=np.int64),
        row_ids=rows,
        source_ids=rows * len(weights) // max(1, len(rows)),
        source_weights=weights,
    )


def make_plan(table: SegmentTable, settings: PlanSettings, **lengths: Any) -> StreamPlan:
    """The plan of a run over segments that a table describes, and that hold nothing; ``lengths`` as of `StreamPlan`."""
    segments = [
        Segment(
            input_ids=np.zeros(length, np.int32),
            target=np.ones(length, np.bool_),
            address=Address(file="rows.jsonl", row=row + 1),
        )
        for row, length in enumerate(table.lengths.tolist())
    ]
    rows = NumberedRows.of_segments(segments, table)
    mixture = lengths.pop("mixture", None) or MixtureSettings(weights=table.source_weights)
    return StreamPlan(rows, settings, RowOrder(counts=rows.counts, mixture=mixture, seed=settings.seed), **lengths)


def make_data(
    train: Sequence[Segment],
    held_out: Sequence[Segment] = (),
    *,
    fingerprint: str = "data",
    weights: tuple[float, ...] = (1.0,),
) -> RunData:
    eval_table = make_table(held_out, (1.0,) * len(weights)) if held_out else None
    return RunData(
        train=train,
        rows=NumberedRows.of_segments(train, make_table(train, weights)),
        eval=held_out or None,
        eval_rows=None if eval_table is None else NumberedRows.of_segments(held_out, eval_table),
        fingerprint=fingerprint,
    )


def make_config(output: Path, **changes: Any) -> RunConfig:
    """A run of the tiny model; ``changes`` are dotted keys with ``__`` for the dot, or whole sections."""
    tree: dict[str, Any] = {
        "model": {"name_or_path": "preset:tiny-qwen3", "config_overrides": dict(TINY)},
        "data": {"max_length": 32},
        "train": {"max_steps": 4, "learning_rate": 1e-3, "warmup_steps": 0, "packing": "none"},
        "eval": {"strategy": "no"},
        "output": {"dir": str(output), "save_strategy": "no"},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu", "seed": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return RunConfig.model_validate(tree)
