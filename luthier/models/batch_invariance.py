"""Hooks on models that treat a row in a batch otherwise than the row alone, or take no batch as it is.

One section for each kind of model; `hook` asks each of them whether a model is of its kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from luthier.media import ENCODER_OUTPUTS
from luthier.media.families import SHOWN, Attention, FrameMarks, OwnFrames, SharedSlots
from luthier.models import families_of
from luthier.models.adapted_code import give_image_outputs, name_cache, take_own_inputs

Arguments = tuple[Any, ...]  # of a module's forward, by place
Inputs = dict[str, Any]  # the same by name


def hook(model: PreTrainedModel) -> None:
    """All that a model of its family needs; of most families nothing."""
    if not take_own_inputs(model) and any(family.attention is Attention.CROSS for family in families_of(model.config)):
        see_own_pictures(model)
    give_image_outputs(model)
    hear_own_frames(model)
    keep_running_means(model)
    join_shared_slots(model)
    merge_frames_by_chunk(model)
    encode_videos_apart(model)
    turn_by_own_length(model)
    see_both_ways(model)
    name_cache(model)


# --------------------------------------------------------------------------------------------------------------------
# Phi-4's encoder of images, whose attention transformers marks as causal (`is_causal`). It is so where no tile of a
# call is partly padding, and otherwise looks both ways, as the published code and transformers' eager attention do.


def see_both_ways(model: PreTrainedModel) -> None:
    """Change the mark, if the model's family says so (`Family.both_ways`)."""
    for family in families_of(model.config):
        for module in model.get_submodule(family.both_ways).modules() if family.both_ways else ():
            if hasattr(module, "is_causal"):
                module.is_causal = False


# --------------------------------------------------------------------------------------------------------------------
# Audio encoders that do not mask padding, so that batching changes their output: hooks run each sound as if alone.
#
# transformers' Phi-4 adds its mask to the scores of attention as 0 and 1, so padding of a shorter sound is attended to
# like its frames; Nemotron Omni keeps a token more than its encoder masks; the encoder of Granite Speech has no mask.
# Such an encoder runs on the sounds of one length at a time, without any padding.
#
# N sounds, F frames, C numbers of a frame, E frames of the output.

HEARD = "last_hidden_state"


def hear_own_frames(model: PreTrainedModel) -> int:
    """Hook the encoders of which the model's family says so (`Family.own_frames`); returns how many there are.

    One whose weights are divided among ranks hears all sounds at once, as in transformers: ranks would wait for one
    that has fewer lengths.
    """
    modules = dict(model.named_modules())
    rules = {family.own_frames for family in families_of(model.config)} - {None}
    hooked = 0
    for rule in rules:
        if rule is None or rule.module not in modules:
            continue  # a model without sounds
        calls = _Calls(rule)
        modules[rule.module].register_forward_pre_hook(calls.begin, with_kwargs=True)
        modules[rule.module].register_forward_hook(calls.complete, with_kwargs=True)
        hooked += 1
    return hooked


class _Calls:
    """One call of the encoder, as many as there are lengths: hooks see the first, and make the others."""

    def __init__(self, rule: OwnFrames) -> None:
        self.rule = rule
        # sounds of one length: their numbers, and the call for them
        self.groups: list[tuple[torch.Tensor, Inputs]] = []
        self.num_sounds = 0

    def begin(
        self, module: nn.Module, args: Arguments, kwargs: Inputs
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Let the call be for the sounds of the first length alone."""
        self.groups = []
        given = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        features_NFC = given[self.rule.features]
        mask_NF = None if self.rule.mask is None else given.get(self.rule.mask)
        # Whether all weights are here, none divided among ranks (as by FSDP or ZeRO-3).
        if not all(weight.numel() > 0 and not isinstance(weight, DTensor) for weight in module.parameters()) or (
            mask_NF is None and self.rule.mask is not None
        ):
            return None
        heard_N = _until_silence(features_NFC) if mask_NF is None else mask_NF.sum(dim=1) + self.rule.beyond
        frames_N = heard_N.clamp(max=features_NFC.shape[1])
        lengths = frames_N.unique().tolist()
        if lengths == [features_NFC.shape[1]]:
            return None
        self.num_sounds = len(frames_N)
        for length in lengths:
            these = (frames_N == length).nonzero()[:, 0]
            call = {**given, self.rule.features: features_NFC[these, :length]}
            if self.rule.mask is not None and mask_NF is not None:
                call[self.rule.mask] = mask_NF[these, :length]
            self.groups.append((these, call))
        return (), self.groups[0][1]

    def complete(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object
    ) -> object:
        """Add what the encoder makes of the other lengths; what is behind a sound's end is 0."""
        groups, self.groups = self.groups, []
        if not groups:
            return None
        outputs = [output, *(module.forward(**call) for _, call in groups[1:])]
        heard = [each[HEARD] if isinstance(each, ModelOutput) else each for each in outputs]
        largest = max(value.shape[1] for value in heard)
        whole_NEC = heard[0].new_zeros((self.num_sounds, largest, heard[0].shape[2]))
        for (these, _), value in zip(groups, heard, strict=True):
            filled = nn.functional.pad(value, (0, 0, 0, largest - value.shape[1]))
            whole_NEC = whole_NEC.index_copy(0, these, filled)
        return type(output)(**{HEARD: whole_NEC}) if isinstance(output, ModelOutput) else whole_NEC


def _until_silence(features_NFC: torch.Tensor) -> torch.Tensor:
    """int64[N]: frames up to the last that is not 0 throughout, as what fills up is."""
    numbers_F = torch.arange(1, features_NFC.shape[1] + 1, device=features_NFC.device)
    return ((features_NFC != 0).any(dim=2) * numbers_F).amax(dim=1)


# --------------------------------------------------------------------------------------------------------------------
# Batch norm (the audio encoders of Granite Speech and Nemotron Omni): in training mode it normalises by the mean and
# variance of a batch, so a sound's features would depend on the other sounds of its batch and differ from those at
# inference, and it keeps a running mean of them, which would change encoders that are frozen, too, and others on each
# rank. Hooks let it compute as at inference, with the means and variances that it came with.


def keep_running_means(model: nn.Module) -> int:
    """Hook the layers of batch norm that have running means; returns how many there are."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    for layer in layers:
        layer.register_forward_pre_hook(_as_at_inference)
    return len(layers)


def _as_at_inference(layer: nn.Module, args: Arguments) -> None:
    layer.training = False


# --------------------------------------------------------------------------------------------------------------------
# Models that look at pictures across (Llama 3.2 Vision): a row sees its own pictures and no padding of its batch.
#
# transformers' layer shows a token that has no picture yet *all* vision tokens of its row, unmasked (only its MLP is
# left out), blank pictures included, which fill the row up to the most pictures of the batch; and of a row without
# pictures it makes one that sees blanks, where alone it would skip the layer. Hooks make both what they are alone.
#
# B rows, T tokens, N pictures, V vision tokens of one picture.


MASK = "cross_attention_mask"
ATTENTION = "cross_attn"


def see_own_pictures(model: PreTrainedModel) -> int:
    """Hook all layers of a model that attend across, those with a ``cross_attn``; returns how many there are."""
    rows = _Rows()
    # what adapters wrap is called by its ``forward``, which runs no hooks; what is inside of it is called
    inner = model.get_submodule(model.base_model_prefix)
    inner.register_forward_pre_hook(rows.note, with_kwargs=True)
    layers = {
        name.removesuffix(f".{ATTENTION}"): attention
        for name, attention in inner.named_modules()
        if name.endswith(f".{ATTENTION}")
    }
    for name, attention in layers.items():
        attention.register_forward_pre_hook(rows.hide_filling, with_kwargs=True)
        inner.get_submodule(name).register_forward_hook(rows.skip, with_kwargs=True)
    return len(layers)


class _Rows:
    """What the rows of the batch in the model are; kept for the backward pass, where layers may run again."""

    def __init__(self) -> None:
        self.shown_BN: torch.Tensor | None = None
        self.are_filled = self.are_blind = False  # whether there are fillings; rows without pictures

    def __deepcopy__(self, memo: object) -> _Rows:
        """Itself: a copy of a layer, as an adapter trains it, stands in the same model."""
        return self

    def note(self, module: nn.Module, args: Arguments, kwargs: Inputs) -> None:
        """Which pictures are there: those that a token of the row looks at."""
        mask_BTNt = kwargs.get(MASK)
        self.shown_BN = None if mask_BTNt is None else mask_BTNt.bool().any(dim=3).any(dim=1)
        self.are_filled = self.shown_BN is not None and not bool(self.shown_BN.all())
        self.are_blind = self.shown_BN is not None and not bool(self.shown_BN.any(dim=1).all())

    def hide_filling(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Inputs
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Pictures that are not there are masked for tokens that would see everything."""
        mask_B1TK = kwargs.get("attention_mask")
        if self.shown_BN is None or mask_B1TK is None or not self.are_filled:
            return None
        filling_BN = ~self.shown_BN & self.shown_BN.any(dim=1, keepdim=True)  # a row of fillings alone is skipped
        filling_BK = filling_BN.repeat_interleave(mask_B1TK.shape[-1] // filling_BN.shape[1], dim=1)
        hidden = mask_B1TK.masked_fill(filling_BK[:, None, None, :], torch.finfo(mask_B1TK.dtype).min)
        return args, {**kwargs, "attention_mask": hidden}

    def skip(self, module: nn.Module, args: Arguments, kwargs: Inputs, output: Any) -> object:
        """Rows without pictures pass the layer unchanged."""
        if self.shown_BN is None or not self.are_blind:
            return None
        before = args[0] if args else kwargs["hidden_states"]
        sees_B11 = self.shown_BN.any(dim=1)[:, None, None]
        return torch.where(sees_B11, output, before)


# --------------------------------------------------------------------------------------------------------------------
# A model that merges the frames of a video's chunk into one (Kimi K2.5): its videos reach it at all.
#
# transformers' class splits the merged features as if there were as many as before, and joins only chunks of equally
# many frames; so it fails on any video of more than one frame. A hook encodes the chunks itself, those of as many
# frames at a time, and hands the features over. One whose weights are divided among ranks needs chunks of as many
# frames on all.
#
# N chunks, P patches of them, S slots, H hidden size.


PIXELS, GRIDS = "pixel_values_videos", "video_grid_thw"


def merge_frames_by_chunk(model: PreTrainedModel) -> bool:
    """Hook the model, if its family says so (`Family.merges_frames`)."""
    family = next((family for family in families_of(model.config) if family.merges_frames), None)
    if family is None:
        return False
    (tower,), (projector,) = family.modules.tower, family.modules.projector
    merging = _Merging(model, tower, projector)
    model.get_submodule(model.base_model_prefix).register_forward_pre_hook(merging, with_kwargs=True)
    return True


class _Merging:
    """Called before the forward of the model's inside. ``tower``, ``projector``: names, as an adapter may put other
    modules in their places later."""

    def __init__(self, model: nn.Module, tower: str, projector: str) -> None:
        self.model, self.tower, self.projector = model, tower, projector

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Inputs) -> tuple[Arguments, Inputs] | None:
        if kwargs.get(PIXELS) is None:
            return None
        features = self._features(kwargs[PIXELS], kwargs[GRIDS])
        outputs = {"video": BaseModelOutputWithPooling(pooler_output=features)}
        if kwargs.get("pixel_values") is not None:  # the class takes either pixels or what was made of them
            outputs["image"] = module.get_image_features(  # type: ignore[operator]
                kwargs["pixel_values"], kwargs["image_grid_thw"], return_dict=True
            )
        rest = {name: value for name, value in kwargs.items() if name not in (PIXELS, "pixel_values")}
        return args, {**rest, "mm_encoder_outputs": outputs}

    def _features(self, pixels_P: torch.Tensor, grids_N3: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each chunk [S, H]."""
        chunks = torch.split(pixels_P, grids_N3.prod(-1).tolist())
        tower: Any = self.model.get_submodule(self.tower)
        projector = self.model.get_submodule(self.projector)
        kernel = tower.merge_kernel_size[0] * tower.merge_kernel_size[1]
        found: dict[int, torch.Tensor] = {}
        for num_frames in sorted(set(grids_N3[:, 0].tolist())):
            numbers = (grids_N3[:, 0] == num_frames).nonzero()[:, 0].tolist()
            seen = tower(torch.cat([chunks[n] for n in numbers]), grid_thw=grids_N3[numbers])
            slots = projector(seen.pooler_output).squeeze(1)
            sizes = (grids_N3[numbers, 1:].prod(-1) // kernel).tolist()
            found |= dict(zip(numbers, torch.split(slots, sizes), strict=True))
        return tuple(found[number] for number in range(len(chunks)))


# --------------------------------------------------------------------------------------------------------------------
# Models whose pictures and videos stand on the same tokens (GLM-4V, Molmo 2): a batch may hold both.
#
# transformers' forward counts the features of each kind against all of these tokens, or refuses a batch of both
# kinds. A hook computes the two and hands them over as one, in the order of their tokens. A batch of one kind is left
# as it is.
#
# B rows, T tokens, S slots of both kinds, H hidden size.


def join_shared_slots(model: PreTrainedModel) -> bool:
    """Hook the model, if its family says so (`Family.shared_slots`)."""
    rule = next((family.shared_slots for family in families_of(model.config) if family.shared_slots), None)
    if rule is None:
        return False
    # what adapters wrap is called by its ``forward``, which runs no hooks; what is inside of it is called
    model.get_submodule(model.base_model_prefix).register_forward_pre_hook(_Joining(rule), with_kwargs=True)
    return True


class _Joining:
    """Called before the forward of the model's inside."""

    def __init__(self, rule: SharedSlots) -> None:
        self.rule = rule

    def __call__(self, module: Any, args: Arguments, kwargs: Inputs) -> tuple[Arguments, Inputs] | None:
        rule = self.rule
        if kwargs.get(rule.pictures[0]) is None or kwargs.get(rule.videos[0]) is None:
            return None
        pictures_SH = _features(module.get_image_features, [kwargs[name] for name in rule.pictures])
        videos_SH = _features(module.get_video_features, [kwargs[name] for name in rule.videos])
        ids_BT = kwargs["input_ids"]
        of_video_S = self._frames(module, ids_BT, kwargs)[ids_BT == module.config.image_token_id]
        joined_SH = pictures_SH.new_zeros((len(of_video_S), pictures_SH.shape[1]))
        joined_SH[~of_video_S], joined_SH[of_video_S] = pictures_SH, videos_SH.to(joined_SH.dtype)
        rest = {name: v for name, v in kwargs.items() if name not in (rule.pictures[0], rule.videos[0])}
        return args, {**rest, "mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=(joined_SH,))}}

    def _frames(self, module: nn.Module, ids_BT: torch.Tensor, kwargs: Inputs) -> torch.Tensor:
        """bool[B, T]: tokens of videos."""
        match self.rule.frames:
            case FrameMarks.TYPES:
                frames_BT: torch.Tensor = kwargs["mm_token_type_ids"] == 2
            case FrameMarks.BORDERS:
                config: Any = module.config
                opened_BT = (ids_BT == config.frame_start_token_id).cumsum(1)
                frames_BT = opened_BT > (ids_BT == config.frame_end_token_id).cumsum(1)
            case _:
                raise AssertionError(self.rule.frames)
        return frames_BT


def _features(encode: Any, inputs: list[Any]) -> torch.Tensor:
    """[S, H]"""
    return torch.cat(tuple(encode(*inputs, return_dict=True).pooler_output))


# --------------------------------------------------------------------------------------------------------------------
# A model whose class takes videos of one size in a call, on the tokens of pictures (Nemotron Omni).
#
# transformers 5.23 takes a single one, and fails on its features, which it joins as if they were a list. They are
# computed here, each video by itself and of the size that it has alone, and handed over as those of pictures, with the
# pictures' own in the order of their tokens. So no tokens of a video are left out, as generation may do
# (``video_pruning_rate``).
#
# F frames of all videos, M samples with media, S slots of one of them, H hidden size.


def encode_videos_apart(model: PreTrainedModel) -> bool:
    """Let the model take videos, if its family says so (`Family.videos_apart`)."""
    if not any(family.videos_apart for family in families_of(model.config)):
        return False
    own = inspect.signature(type(model).forward)

    @wraps(type(model).forward)
    def forward(self: Any, **inputs: Any) -> object:
        return _forward_of_videos(self, **inputs)

    # transformers' generate lets only inputs pass that it finds in the signature, and would compute features itself
    *named, rest = (each for name, each in own.parameters.items() if name != ENCODER_OUTPUTS)
    extra = inspect.Parameter(SHOWN, inspect.Parameter.KEYWORD_ONLY, default=None)
    forward.__signature__ = own.replace(parameters=[*named, extra, rest])  # type: ignore[attr-defined]
    # not a hook: what adapters wrap is called by its ``forward``, which runs none
    model.forward = MethodType(forward, model)
    return True


def _forward_of_videos(model: Any, **inputs: Any) -> object:
    frames_F3HW, shown_M3 = inputs.pop(PIXELS, None), inputs.pop(SHOWN, None)
    if frames_F3HW is None:
        return type(model).forward(model, **inputs)
    if shown_M3 is None:  # of one sample alone
        parts = [_features(model.get_video_features, [frames_F3HW])]
    else:
        parts = _in_order(model, frames_F3HW, shown_M3.tolist(), inputs)
    outputs = {ENCODER_OUTPUTS: {"image": BaseModelOutputWithPooling(pooler_output=tuple(parts))}}
    return type(model).forward(model, **inputs, **outputs)


def _in_order(model: Any, frames_F3HW: torch.Tensor, shown: list[list[int]], inputs: Inputs) -> list[torch.Tensor]:
    """For each sample with media [S, H]; pictures are taken out of the inputs."""
    is_split = frames_F3HW.ndim == 5  # [videos, groups, frames of a group x 3, H, W], as of transformers 5.24
    videos = iter(frames_F3HW if is_split else frames_F3HW.split([frames for frames, *_ in shown if frames]))
    pixels, grids = inputs.pop("pixel_values", None), inputs.pop("image_grid_hw", None)
    pictures = iter(() if pixels is None else model.get_image_features(pixels, grids, return_dict=True).pooler_output)
    parts = []
    for frames, height, width in shown:
        if frames:
            video = next(videos)[:frames, :, :height, :width]
            parts.append(_features(model.get_video_features, [video[None] if is_split else video]))
        else:
            parts.extend(next(pictures) for _ in range(height))
    return parts


# --------------------------------------------------------------------------------------------------------------------
# Rotary positions that a long row stretches (``rope_type`` longrope: Phi-3.5, Phi-4-mini; dynamic: InternLM2).
#
# transformers takes the longest row of a batch for all, and with ``dynamic`` the longest so far, until all rows of a
# batch are short again: so a sequence's positions depended on what stood beside it and before it. Here each sequence is
# turned by frequencies of its own length, as if it were alone. The branches of a token tree are one sequence.
#
# B rows, T tokens, D rotary dimensions of a head.


def turn_by_own_length(model: nn.Module) -> int:
    """Let the rotary modules that stretch positions do so sequence by sequence; returns how many there are."""
    found = stretching_modules(model)
    for module in found:
        module.forward = MethodType(_own_turns, module)
    return len(found)


def stretching_modules(model: nn.Module) -> list[nn.Module]:
    """The rotary modules of transformers that stretch positions; classes from elsewhere are not known."""
    return [module for module in model.modules() if any(map(_stretches, _rope_types(module).values()))]


def _rope_types(module: Any) -> dict[str | None, str]:
    """``rope_type`` of a rotary module; by kind of layer, if it has several."""
    told = getattr(module, "rope_type", None)
    return dict(told) if isinstance(told, Mapping) else {None: str(told)}


def _stretches(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type


def _own_turns(module: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> object:
    """As the module's own forward: cosines and sines [B, T, D], or one tensor of both. Positions: int64[B, T]."""
    kind = _rope_types(module)[layer_type]
    forward = partial(type(module).forward, module, x, **({} if layer_type is None else {"layer_type": layer_type}))
    if position_ids.dim() != 2 or not _stretches(kind):
        return forward(position_ids)
    sequence_BT = (position_ids == 0).cumsum(1)
    longest_BS = position_ids.new_zeros(len(position_ids), position_ids.shape[1] + 1)
    longest_BT = longest_BS.scatter_reduce(1, sequence_BT, position_ids + 1, "amax").gather(1, sequence_BT)
    is_long_BT = longest_BT > _limit(module, layer_type, kind)
    length_BT = is_long_BT.long() if kind == "longrope" else longest_BT * is_long_BT  # 0: not stretched
    found: list[torch.Tensor] = []
    for length in length_BT.unique().tolist():
        own_BT = length_BT == length
        if kind != "longrope":
            _forget_long_rows(module, layer_type)
        turns = forward(position_ids * own_BT)
        own = list(turns) if isinstance(turns, tuple) else [turns]
        found = [torch.where(own_BT[..., None], *pair) for pair in zip(own, found, strict=True)] if found else own
    return tuple(found) if len(found) > 1 else found[0]


def _limit(module: Any, layer_type: str | None, kind: str) -> int:
    """Up to how many tokens a sequence has its positions unstretched."""
    if kind != "longrope":
        return int(module.original_max_seq_len)
    rope = module.config.rope_parameters
    return int((rope if layer_type is None else rope[layer_type])["original_max_position_embeddings"])


def _forget_long_rows(module: Any, layer_type: str | None) -> None:
    """The frequencies of short rows, from which the module's own forward begins to stretch."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
