"""A model that merges the frames of a video's chunk into one (Kimi K2.5): its videos reach it at all.

transformers' class splits the merged features as if there were as many as before, and joins only chunks of equally many
frames; so it fails on any video of more than one frame. A hook encodes the chunks itself, those of as many frames at a
time, and hands the features over. One whose weights are divided among ranks needs chunks of as many frames on all.

N chunks, P patches of them, S slots, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from luthier.models.parts import families_of

PIXELS, GRIDS = "pixel_values_videos", "video_grid_thw"


def merge_frames_by_chunk(model: PreTrainedModel) -> bool:
    """Hook the model, if its family says so (`Family.merges_frames`)."""
    family = next((family for family in families_of(model.config) if family.merges_frames), None)
    if family is None:
        return False
    (tower,), (projector,) = family.modules.tower, family.modules.projector
    merging = _Merging(model.get_submodule(tower), model.get_submodule(projector))
    model.get_submodule(model.base_model_prefix).register_forward_pre_hook(merging, with_kwargs=True)
    return True


class _Merging:
    """Called before the forward of the model's inside."""

    def __init__(self, tower: nn.Module, projector: nn.Module) -> None:
        self.tower: Any = tower
        self.projector = projector

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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
        kernel = self.tower.merge_kernel_size[0] * self.tower.merge_kernel_size[1]
        found: dict[int, torch.Tensor] = {}
        for num_frames in sorted(set(grids_N3[:, 0].tolist())):
            numbers = (grids_N3[:, 0] == num_frames).nonzero()[:, 0].tolist()
            seen = self.tower(torch.cat([chunks[n] for n in numbers]), grid_thw=grids_N3[numbers])
            slots = self.projector(seen.pooler_output).squeeze(1)
            sizes = (grids_N3[numbers, 1:].prod(-1) // kernel).tolist()
            found |= dict(zip(numbers, torch.split(slots, sizes), strict=True))
        return tuple(found[number] for number in range(len(chunks)))
