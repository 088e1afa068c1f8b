"""Models whose pictures and videos stand on the same tokens (GLM-4V, Molmo 2): a batch may hold both.

transformers' forward counts the features of each kind against all of these tokens, or refuses a batch of both kinds. A
hook computes the two and hands them over as one, in the order of their tokens. A batch of one kind is left as it is.

B rows, T tokens, S slots of both kinds, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from luthier.media.families import FrameMarks, SharedSlots
from luthier.models.parts import families_of


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

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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

    def _frames(self, module: nn.Module, ids_BT: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
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
