"""Encoders of sounds to which the filling of a batch is not hidden: hooks let them hear a sound as if it were alone.

transformers' Phi-4 adds its mask to the scores of attention as 0 and 1, so frames that fill up a shorter sound are
heard like others; Nemotron Omni keeps a token more than its encoder masks; the encoder of Granite Speech has no mask.
Such an encoder runs on the sounds of one length at a time, without any filling.

N sounds, F frames, C numbers of a frame, E frames of the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from luthier.media.families import OwnFrames
from luthier.models.parts import families_of

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
        self.groups: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self.num_sounds = 0

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let the call be for the sounds of the first length alone."""
        self.groups = []
        given = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        features_NFC = given[self.rule.features]
        mask_NF = None if self.rule.mask is None else given.get(self.rule.mask)
        if not _is_whole(module) or (mask_NF is None and self.rule.mask is not None):
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

    def complete(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
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


def _is_whole(module: nn.Module) -> bool:
    """Whether all weights are here, none divided among ranks (as by FSDP or ZeRO-3)."""
    return all(weight.numel() > 0 and not isinstance(weight, DTensor) for weight in module.parameters())
