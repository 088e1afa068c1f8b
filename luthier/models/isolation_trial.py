"""Trying a way of isolation on the model itself, on the first tokens of two segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from luthier.collation import CollateSettings, collate_packs, collate_trees
from luthier.media import PREFIX_TYPES
from luthier.models.attention_inputs import Isolation
from luthier.models.chosen_isolation import ChosenIsolation
from luthier.models.media_needs import MediaNeeds
from luthier.packing import Segments
from luthier.records import Batch, Branch, Pack, Sample, Segment

Answer = TypeVar("Answer")

TOKENS_TRIED = 24  # of each segment: enough for any attention to reach across
TOLERANCE = 1e-4  # of the largest logit; the same kernels run on the same shapes, so isolated logits do not move at all
# Mean difference over mean size of the logits, packed and alone: other shapes run other kernels, which round otherwise.
ALONE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Trial:
    """What is wrong with a way of isolation on this model, tried on the first tokens of two segments."""

    def __init__(
        self,
        model: nn.Module,
        segments: Segments,
        how: CollateSettings,
        needs: MediaNeeds,
        *,
        shared: bool,
        device: torch.device,
        num_rows: int = 1,
    ) -> None:
        self.model, self.how, self.needs, self.shared, self.device = model, how, needs, shared, device
        self.num_rows = num_rows
        self.first, self.second = _cut(segments[0]), _cut(segments[len(segments) - 1])
        self.changed = replace(self.first, input_ids=self.first.input_ids[::-1] // 2)
        # the model's own way with pictures, which ours has to be equal to
        self.own = self._quietly(self._own) if needs.types else None

    def problem(self, chosen: ChosenIsolation) -> str | None:
        """None: it holds."""
        return self._quietly(lambda: self._problem(chosen))

    def _problem(self, chosen: ChosenIsolation) -> str | None:
        first, second = self.first, self.second
        if self.shared:
            pairs = [self._logits(chosen, second, other, second, shares=True) for other in (first, self.changed)]
            alone = self._logits(chosen, second, second, joined=True)[len(second) :]
        else:
            pairs = [self._logits(chosen, other, second) for other in (first, self.changed)]
            alone = self._logits(chosen, second)
        if self.own is None or chosen.isolation is Isolation.PADDED:  # where the masks are the model's own
            return _moved(*pairs) or _differs(pairs[0], alone)
        return _moved(*pairs) or _differs(self._logits(chosen, second), self.own) or _differs(pairs[0], alone)

    def _logits(
        self, chosen: ChosenIsolation, *row: Segment, shares: bool = False, joined: bool = False
    ) -> torch.Tensor:
        """[n, V] of the last segment of a row; with ``shares`` the first is the beginning of all others, ``joined``
        they are one segment, whose logits are all given."""
        segments = (_joined(*row),) if joined else row
        batch = _as_tree(row, self.how) if shares else _as_packs(segments, self.how, self.num_rows)
        batch = chosen.arranged(self._with_media(batch, row), pad_token_id=self.how.pad_token_id)
        logits_BTV: torch.Tensor = self.model(**chosen.inputs(batch, device=self.device)).logits
        before = segments[:-1] if chosen.isolation is not Isolation.PADDED else segments[:shares]
        return logits_BTV[-1, sum(map(len, before)) :][: len(segments[-1])]

    def _own(self) -> torch.Tensor:
        batch = self._with_media(_as_packs((self.second,), self.how, 1), (self.second,))
        tensors = {k: v.to(self.device) for k, v in batch.model_inputs.items() if isinstance(v, torch.Tensor)}
        logits_BTV: torch.Tensor = self.model(**tensors, use_cache=False).logits
        return logits_BTV[0, : len(self.second)]

    def _with_media(self, batch: Batch, row: Sequence[Segment]) -> Batch:
        """The inputs that a batch with pictures has beside ids: a third of each segment is called one, not at the same
        place in all, where a model that takes one's picture for another's would go unseen."""
        inputs = dict(batch.model_inputs)
        if self.needs.types is not None:
            types_BT = torch.zeros_like(inputs["input_ids"])
            start = 0
            for segment in row:
                third = len(segment) // 3
                before = third // 2 if segment is self.second else third
                types_BT[:, start + before : start + before + third] = 1
                start += len(segment)
            inputs[self.needs.types] = types_BT
        if self.needs.prefix:  # all of it is an answer: a prefix would see the padding of a shorter row
            inputs[PREFIX_TYPES] = torch.ones_like(inputs["input_ids"])
        return replace(batch, model_inputs=inputs)

    def _quietly(self, ask: Callable[[], Answer]) -> Answer:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return ask()
        finally:
            self.model.train(training)


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


def _as_packs(segments: Sequence[Segment], how: CollateSettings, num_rows: int) -> Batch:
    """The segments in a row, and that as often."""
    packs = [Pack(segments=tuple(segments))] * num_rows
    return collate_packs(packs, packed=True, pad_token_id=how.pad_token_id, varlen=how.varlen)


def _as_tree(segments: Sequence[Segment], how: CollateSettings) -> Batch:
    """The first segment continued by each of the others."""
    whole = _joined(*segments)
    branches = tuple(Branch(parent=0 if place else -1, length=len(each)) for place, each in enumerate(segments))
    tree = Sample(input_ids=whole.input_ids, target=whole.target, branches=branches)
    return collate_trees([[tree]], pad_token_id=how.pad_token_id)
