"""A look at the real model before a packed run: what keeps the segments of a row apart, on the user's first samples.

Nothing about a model is believed. Each way of isolation (`attention_inputs`) is tried on the model itself: changing one
segment must not move the logits of the next at all, and packed logits must be those of the segment alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from luthier.collation import CollateSettings
from luthier.collation.collator import collate_packs, collate_trees, unpacked
from luthier.errors import ModelError, first_line
from luthier.media.families import PREFIX_TYPES
from luthier.models import (
    MediaNeeds,
    evaluating,
    is_multimodal,
    plain_model,
    set_text_attention,
    sharding,
    stretched_beyond,
    text_attention,
)
from luthier.models.attention import PLAN, SEGMENTS, BlockReach, plan_attention, register_attention
from luthier.models.encoders import with_encoder_outputs
from luthier.models.mixers import Isolation, Windows, attention_inputs, layer_windows, part_mixers
from luthier.models.quantized import rounds_inputs
from luthier.packing import Segments
from luthier.records import Batch, Branch, Pack, Sample, Segment

# Models with layers that carry a state from token to token, past any mask. Where those are no `MIXERS`, or nothing else
# would be packed (Mamba), rows hold one segment.
RECURRENT = frozenset(
    {
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba",
        "zamba2",
    }
)  # fmt: skip

# What a model may raise that cannot be called a certain way: transformers refuses attentions by ValueError, and has no
# contract for what becomes of a mask that a model does not expect.
_REFUSALS = (ModelError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


def choose_isolation(
    model: nn.Module,
    segments: Segments,
    how: CollateSettings,
    *,
    device: torch.device,
    asked: str = "auto",
    shared: bool = False,
    needs: MediaNeeds | None = None,
    num_rows: int = 1,
) -> ChosenIsolation:
    """The first way of isolation that holds on this model, which is given the attention for it.

    asked   ``model.attn_implementation``. ``auto``: FlashAttention's own isolation where the model was loaded with it,
            else ``luthier_segments``, transformers' masks by positions, masks of ours, rows of one segment. Recurrent
            layers that `models.mixers` knows run segment by segment with the first two
    shared  rows will be token trees that share their beginnings, which only plans and masks can say
    needs   of a multimodal model. What is tried are words alone, some of them called a picture
    rows    of a batch, ``num_rows`` of them, are tried: FlashAttention reads where segments begin off positions in a
            batch of one row, and in no other

    Raises `ModelError` where nothing that was asked for holds, by name and with every reason.
    """
    register_attention()
    needs = needs or MediaNeeds()
    plain = plain_model(model)
    loaded = text_attention(plain)
    padded = [(Isolation.PADDED, loaded)] if asked == "auto" else []
    mixers = part_mixers(plain)
    ways, notes = _possible(_ways(loaded, asked, shared=shared), plain, needs, mixers)
    trial = Trial(model, segments, how, needs, shared=shared, device=device, num_rows=num_rows)
    reaches = _reaches(needs)
    fault = f"does not keep {'branches' if shared else 'packed sequences'} apart"
    for (isolation, attention), reach in product(ways + padded, reaches):
        try:
            set_text_attention(plain, attention)
            has_masks = isolation not in (Isolation.POSITIONS, Isolation.PADDED)
            chosen = ChosenIsolation(
                isolation=isolation,
                attention=attention,
                windows=layer_windows(plain, recurrent=bool(mixers)) if has_masks else {},
                additive=attention == "eager",
                reach=reach,
                needs=needs,
                mixers=() if isolation is Isolation.PADDED else mixers,
                shared=shared and isolation is not Isolation.PADDED,
                notes=tuple(notes),
            )
            problem = trial.problem(chosen)
        except _REFUSALS as error:
            problem = first_line(error)
            if isolation is Isolation.PADDED and not isinstance(error, ModelError):  # as transformers itself calls it
                fault = "cannot compute its first rows"
        if problem is None:
            return chosen
        notes.append(f"{attention} by {isolation}{_within(reach, needs)}: {problem}")
    set_text_attention(plain, loaded)
    raise ModelError(f"{plain._get_name()} {fault}: {'; '.join(notes)}", hint=_way_out(plain))


def _way_out(plain: nn.Module) -> str:
    if rounds_inputs(plain):
        why = "a base in int8 computes large values apart, so what stands beside a sequence changes its numbers"
        return f"{why}: set train.packing: none, or model.quantization: nf4 or torchao_int8"
    return "set model.attn_implementation: auto, or train.packing: none"


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


def _possible(
    ways: list[tuple[Isolation, str]], model: Any, needs: MediaNeeds, mixers: tuple[str, ...]
) -> tuple[list[tuple[Isolation, str]], list[str]]:
    """The ways that are worth trying on this model, and why the others are not."""
    if needs.refusal is not None:
        return [], [needs.refusal]
    if mixers:
        planned = [way for way in ways if way[0] in (Isolation.SEGMENTS, Isolation.POSITIONS)]
        return planned, [] if planned else [f"its recurrent layers ({', '.join(mixers)}) take no masks"]
    if model.config.get_text_config().model_type in RECURRENT:
        return [], ["its layers carry a state from token to token, whatever mask there is"]
    return ways, []


def _reaches(needs: MediaNeeds) -> list[BlockReach]:
    """Where pictures may be seen both ways. Windows are longer than what is tried: there the family's row counts."""
    if not needs.types:
        return [BlockReach.NOWHERE]
    left_out = BlockReach.EVERYWHERE if needs.whole else BlockReach.WHOLE
    return [reach for reach in BlockReach if reach is not left_out]


def _within(reach: BlockReach, needs: MediaNeeds) -> str:
    return f", images seen both ways {reach}" if needs.types else ""


# --------------------------------------------------------------------------------------------------------------------
# Trying a way of isolation on the model itself, on the first tokens of two segments.


Result = TypeVar("Result")

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
        # the model's own way, with words and with pictures that it sees both ways, which ours has to be equal to
        plain = plain_model(model)
        reads_words = text_attention(plain) in ("sdpa", "eager") and not is_multimodal(plain.config)
        with sharding.uncompiled(model):  # the run has no use for graphs of it
            self.own = self._quietly(self._own) if needs.types or reads_words else None

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

    def _quietly(self, ask: Callable[[], Result]) -> Result:
        with evaluating(self.model), torch.no_grad():
            return ask()


def check_rows(model: nn.Module, first: Segment, how: CollateSettings, *, padded: bool, device: torch.device) -> None:
    """Raise `ModelError` where a row's beginning has other logits than alone before later tokens, or (``padded``)
    beside a longer row, padded to its length."""
    # beyond this length a row stretches its own positions, from its beginning on
    most = min(TOKENS_TRIED, stretched_beyond(plain_model(model).config) or TOKENS_TRIED)
    whole, part = _cut(first, most), _cut(first, most // 2)

    def logits(*rows: Segment) -> torch.Tensor:
        """[n, V] of the last row."""
        batch = collate_packs([Pack(segments=(row,)) for row in rows], packed=False, pad_token_id=how.pad_token_id)
        inputs = attention_inputs(batch, Isolation.PADDED, windows={}, device=device)
        found_BTV: torch.Tensor = model(**inputs).logits
        return found_BTV[-1, : len(rows[-1])]

    name = plain_model(model)._get_name()
    with evaluating(model), torch.no_grad(), sharding.uncompiled(model):
        alone = logits(part)
        if problem := _differs(logits(whole)[: len(part)], alone, "with later tokens, its"):
            hint = "take a model that predicts the next token, which encoders such as BERT do not"
            raise ModelError(f"{name} sees what comes later in a row: {problem}", hint=hint)
        if padded and (problem := _differs(logits(whole, part), alone, "padded")):
            hint = "set train.per_device_train_batch_size and eval.per_device_eval_batch_size to 1"
            raise ModelError(f"{name} reads a padded row otherwise: {problem}", hint=hint)


def _moved(one: torch.Tensor, other: torch.Tensor) -> str | None:
    moved, scale = float((one - other).abs().max()), float(one.abs().max())
    if moved <= TOLERANCE * scale:
        return None
    return f"changing one moved the logits of the next in its row by {moved:.2g} (largest logit {scale:.2g})"


def _differs(found: torch.Tensor, alone: torch.Tensor, how: str = "packed") -> str | None:
    difference = float((found - alone).float().abs().mean() / alone.float().abs().mean().clamp(min=1e-9))
    kind = found.device.type  # norms give 32 bits of what was computed in 16
    allowed = ALONE[torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else found.dtype]
    if difference <= allowed:
        return None
    return f"{how} logits differ by {difference:.2g} of their size from those of the segment alone ({allowed} allowed)"


def _cut(segment: Segment, most: int = TOKENS_TRIED) -> Segment:
    """The segment's first tokens, nothing to learn in them."""
    return Segment(input_ids=segment.input_ids[:most], target=segment.target[:most] & False, address=segment.address)


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


# --------------------------------------------------------------------------------------------------------------------
# What keeps the segments of a row apart in a run, once it is found.


_OF_WORDS = {
    "input_ids", "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenIsolation:
    """What keeps segments apart in this run, proven on its model.

    attention  transformers' name of the attention that the model has now
    windows    ``additive``, ``reach``: what `attention_inputs` needs
    needs      of a multimodal model
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
                f"packed rows with {', '.join(sorted(features))} cannot be split into segments, as this model needs: "
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

    def _is_feature(self, name: str, value: object) -> bool:
        """Whether an input was made of images, videos or audio: whether it does not lie along the tokens."""
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
