"""A look at the real model before a packed run: what keeps the segments of a row apart, on the user's first samples.

Nothing about a model is believed. Each way of isolation (`attention_inputs`) is tried on the model itself: changing one
segment must not move the logits of the next at all, and packed logits must be those of the segment alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn

from luthier.collation import CollateSettings, collate_packs, collate_trees, unpacked
from luthier.errors import ModelError
from luthier.records import Batch, Branch, Pack, Sample, Segment
from luthier.train.attention import SEGMENTS, register_attention
from luthier.train.attention_inputs import Isolation, Windows, attention_inputs, layer_windows
from luthier.train.streams import Segments

TOKENS_TRIED = 24  # of each segment: enough for any attention to reach across
TOLERANCE = 1e-4  # of the largest logit; the same kernels run on the same shapes, so isolated logits do not move at all
# Mean difference over mean size of the logits, packed and alone: other shapes run other kernels, which round otherwise.
ALONE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# Layers that carry a state from token to token, past any mask. They are exact in padded rows of one segment.
RECURRENT = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
        "mamba2", "minimax", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
        "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    }
)  # fmt: skip

# What a model may raise that cannot be called a certain way: transformers refuses attentions by ValueError, and has no
# contract for what becomes of a mask that a model does not expect.
_REFUSALS = (ModelError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenIsolation:
    """What keeps segments apart in this run, proven on its model.

    attention  transformers' name of the attention that the model has now
    windows    and ``additive``: what `attention_inputs` needs
    notes      why ways before this one were not taken, for the run's log
    """

    isolation: Isolation
    attention: str
    windows: Windows
    additive: bool = False
    notes: tuple[str, ...] = ()

    def arranged(self, batch: Batch, *, pad_token_id: int) -> Batch:
        """The batch as this way needs it: rows of one segment, where nothing else keeps segments apart."""
        if self.isolation is not Isolation.PADDED or "attention_mask" in batch.model_inputs:
            return batch
        return unpacked(batch, pad_token_id=pad_token_id)

    def inputs(self, batch: Batch, *, device: torch.device) -> dict[str, Any]:
        """What the model is called with, for a batch that is `arranged`."""
        return attention_inputs(batch, self.isolation, windows=self.windows, additive=self.additive, device=device)


def choose_isolation(
    model: nn.Module,
    segments: Segments,
    how: CollateSettings,
    *,
    device: torch.device,
    asked: str = "auto",
    shared: bool = False,
) -> ChosenIsolation:
    """The first way of isolation that holds on this model, which is given the attention for it.

    asked   ``model.attn_implementation``. ``auto``: FlashAttention's own isolation where the model was loaded with it,
            else ``luthier_segments``, transformers' masks by positions, masks of ours, rows of one segment
    shared  rows will be token trees that share their beginnings, which only plans and masks can say

    Raises `ModelError` where nothing that was asked for holds, by name and with every reason.
    """
    register_attention()
    plain = _plain(model)
    loaded = str(plain.config._attn_implementation)
    padded = [(Isolation.PADDED, loaded)] if asked == "auto" else []
    ways = _ways(loaded, asked, shared=shared)
    notes = []
    if plain.config.get_text_config().model_type in RECURRENT:
        ways.clear()
        notes.append("its layers carry a state from token to token, whatever mask there is")
    for isolation, attention in ways + padded:
        try:
            plain.set_attn_implementation(attention)
            windows = {} if isolation in (Isolation.POSITIONS, Isolation.PADDED) else layer_windows(plain)
            chosen = ChosenIsolation(
                isolation=isolation,
                attention=attention,
                windows=windows,
                additive=attention == "eager",
                notes=tuple(notes),
            )
            problem = _problem(model, chosen, segments, how, shared=shared, device=device)
        except _REFUSALS as error:
            problem = str(error).partition("\n")[0]
        if problem is None:
            return chosen
        notes.append(f"{attention} by {isolation}: {problem}")
    plain.set_attn_implementation(loaded)
    raise ModelError(
        f"{type(plain).__name__} does not keep {'branches' if shared else 'packed sequences'} apart: "
        + "; ".join(notes),
        hint="set model.attn_implementation: auto, or train.packing: none",
    )


def _plain(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _ways(loaded: str, asked: str, *, shared: bool) -> list[tuple[Isolation, str]]:
    """Ways to try, in order, each with its attention."""
    own = loaded if asked == "auto" else asked
    segments = [(Isolation.SEGMENTS, SEGMENTS)] if asked in ("auto", SEGMENTS) else []
    positions = [] if shared or own == SEGMENTS else [(Isolation.POSITIONS, own)]
    masks = [(Isolation.MASKS, own)] if own in ("sdpa", "eager") else []
    if own == "flex_attention":
        masks = [(Isolation.BLOCKS, own)]
    if own.startswith("flash"):  # it computes no more pairs than ours does, in one kernel
        return positions + segments
    return segments + positions + masks


def _problem(
    model: nn.Module,
    chosen: ChosenIsolation,
    segments: Segments,
    how: CollateSettings,
    *,
    shared: bool,
    device: torch.device,
) -> str | None:
    """What is wrong with this way on this model; None: it holds."""
    first, second = _cut(segments[0]), _cut(segments[len(segments) - 1])
    changed = replace(first, input_ids=first.input_ids[::-1] // 2)

    def last_logits(*row: Segment, shares: bool = False) -> torch.Tensor:
        """[n, V] of the last segment of a row; with ``shares`` the first is the beginning of all others."""
        batch = chosen.arranged(_as_tree(row, how) if shares else _as_pack(row, how), pad_token_id=how.pad_token_id)
        logits_BTV: torch.Tensor = model(**chosen.inputs(batch, device=device)).logits
        before = row[:-1] if chosen.isolation is not Isolation.PADDED else row[:shares]
        return logits_BTV[-1, sum(map(len, before)) :][: len(row[-1])]

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if shared:
                pairs = [last_logits(second, other, second, shares=True) for other in (first, changed)]
                alone = last_logits(_joined(second, second))[len(second) :]
            else:
                pairs = [last_logits(other, second) for other in (first, changed)]
                alone = last_logits(second)
    finally:
        model.train(training)
    return _moved(*pairs) or _differs(pairs[0], alone)


def _moved(one: torch.Tensor, other: torch.Tensor) -> str | None:
    moved, scale = float((one - other).abs().max()), float(one.abs().max())
    if moved <= TOLERANCE * scale:
        return None
    return f"changing one moved the logits of the next in its row by {moved:.2g} (largest logit {scale:.2g})"


def _differs(packed: torch.Tensor, alone: torch.Tensor) -> str | None:
    difference = float((packed - alone).float().abs().mean() / alone.float().abs().mean().clamp(min=1e-9))
    allowed = ALONE[packed.dtype]
    if difference <= allowed:
        return None
    return f"packed logits differ by {difference:.2g} of their size from those of the segment alone ({allowed} allowed)"


def _cut(segment: Segment) -> Segment:
    """The segment's first tokens, nothing to learn in them."""
    ids = segment.input_ids[:TOKENS_TRIED]
    return Segment(input_ids=ids, target=segment.target[:TOKENS_TRIED] & False, address=segment.address)


def _joined(*segments: Segment) -> Segment:
    ids = np.concatenate([segment.input_ids for segment in segments])
    return Segment(input_ids=ids, target=np.zeros(len(ids), dtype=np.bool_))


def _as_pack(segments: Sequence[Segment], how: CollateSettings) -> Batch:
    return collate_packs(
        [Pack(segments=tuple(segments))], packed=True, pad_token_id=how.pad_token_id, varlen=how.varlen
    )


def _as_tree(segments: Sequence[Segment], how: CollateSettings) -> Batch:
    """The first segment continued by each of the others."""
    whole = _joined(*segments)
    branches = tuple(Branch(parent=0 if place else -1, length=len(each)) for place, each in enumerate(segments))
    tree = Sample(input_ids=whole.input_ids, target=whole.target, branches=branches)
    return collate_trees([[tree]], pad_token_id=how.pad_token_id)
