"""What keeps the segments of a row apart in a run, once it is found."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from luthier.collation import unpacked
from luthier.errors import ModelError
from luthier.models.attention import PLAN
from luthier.models.attention_inputs import Isolation, Windows, attention_inputs
from luthier.models.attention_plan import BlockReach, plan_attention
from luthier.models.media_needs import MediaNeeds
from luthier.models.tower_inputs import with_encoder_outputs
from luthier.records import Batch

_OF_WORDS = {
    "input_ids", "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenIsolation:
    """What keeps segments apart in this run, proven on its model.

    attention  transformers' name of the attention that the model has now
    windows    ``additive``, ``reach``: what `attention_inputs` needs
    needs      of a model that sees or hears
    mixers     classes of the recurrent layers that run segment by segment (`models.mixers`); () where there are none,
               or where rows hold one segment anyway
    shared     branches of trees that share their beginnings are kept apart, too, and need not be taken apart for it
    notes      why ways before this one were not taken, for the run's log
    """

    isolation: Isolation
    attention: str
    windows: Windows
    additive: bool = False
    reach: BlockReach = BlockReach.NOWHERE
    needs: MediaNeeds = field(default_factory=MediaNeeds)
    mixers: tuple[str, ...] = ()
    shared: bool = False
    notes: tuple[str, ...] = ()

    def arranged(self, batch: Batch, *, pad_token_id: int) -> Batch:
        """The batch as this way needs it: rows of one segment, where nothing else keeps segments apart.

        Raises `ModelError` where rows with media cannot be parted: their features are kept row by row, or answers share
        them.
        """
        if self.isolation is not Isolation.PADDED or "attention_mask" in batch.model_inputs:
            return batch
        parted = unpacked(batch, pad_token_id=pad_token_id)
        features = {name: v for name, v in batch.model_inputs.items() if self._is_feature(name, v)}
        shared = any(branch.parent >= 0 for row in batch.branches for branch in row)
        if features and (shared or not features.keys().isdisjoint(self.needs.by_row)):
            raise ModelError(
                f"packed rows with {', '.join(sorted(features))} cannot be parted again, and have to be: "
                + "; ".join(self.notes),
                hint="set train.packing: none",
            )
        if shared:
            return parted
        return replace(parted, model_inputs={**parted.model_inputs, **features, **self._along_tokens(batch, parted)})

    def inputs(self, batch: Batch, *, device: torch.device) -> dict[str, Any]:
        """What the model is called with, for a batch that is `arranged`."""
        positions = batch.model_inputs.get("position_ids")
        several = self.needs.num_positions if self.isolation is not Isolation.PADDED else None
        if several is not None and positions is not None and positions.dim() == 2:
            # words alone count the same on all axes; without a row that is theirs the model would not see segments
            rows = positions.expand(several, -1, -1)
            batch = replace(batch, model_inputs={**batch.model_inputs, "position_ids": rows})
        inputs = attention_inputs(
            batch, self.isolation, windows=self.windows, additive=self.additive, reach=self.reach, device=device
        )
        if self.mixers and PLAN not in inputs:  # attention has no need of it by positions, recurrent layers do
            inputs[PLAN] = plan_attention(batch.branches, width=inputs["input_ids"].shape[1])
        return with_encoder_outputs(inputs)

    def _is_feature(self, name: str, value: Any) -> bool:
        """Whether an input was made of pictures, videos or sounds: whether it does not lie along the tokens."""
        plain = name in _OF_WORDS or name in self.needs.along
        return isinstance(value, torch.Tensor) and not plain

    def _along_tokens(self, batch: Batch, parted: Batch) -> dict[str, torch.Tensor]:
        """What stands beside the ids in a packed batch [B, T], in rows of one segment [S, W]; padding is 0."""
        width = batch.model_inputs["input_ids"].shape[1]
        lengths = [sum(branch.length for branch in row) for row in batch.branches]
        from_N = torch.cat([torch.arange(length) + row * width for row, length in enumerate(lengths)])
        to_SW = parted.model_inputs["attention_mask"].bool()

        def moved(value_BT: torch.Tensor) -> torch.Tensor:
            found = value_BT.new_zeros((*to_SW.shape, *value_BT.shape[2:]))
            found[to_SW] = value_BT.flatten(0, 1)[from_N]
            return found

        inputs = {name: moved(batch.model_inputs[name]) for name in self.needs.along if name in batch.model_inputs}
        positions = batch.model_inputs["position_ids"]
        if positions.dim() == 3:  # without the row of text positions, which tells packed segments apart
            axes = positions[1:] if self.needs.text_row else positions
            inputs["position_ids"] = torch.stack([moved(axis_BT) for axis_BT in axes])
        return inputs
