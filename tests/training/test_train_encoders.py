"""Encoders of models that see, on single items: what they give is taken for pixels, or the model is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_vlms import VLMS, alone_inputs, seen, tiny_vlm

from luthier.errors import ModelError
from luthier.media.processors.processor import MediaProcessor
from luthier.models import families_of
from luthier.models.encoders import Encoders, with_encoder_outputs
from tests.conftest import refused
from tests.media.tiny_processors import BUILDERS
from tests.training.tiny_vlm_folders import filled

# tiny models whose forward takes no computed features
TAKE_NONE = {"phi4_multimodal"}


@pytest.mark.parametrize("name", VLMS)
def test_every_kind_of_model_takes_features_for_pixels_or_is_refused(name: str) -> None:
    model, one = filled(tiny_vlm(name)).eval(), seen(name, 4, 5, seed=1)
    family = families_of(model.config)[0]
    cpu = torch.device("cpu")
    if name in TAKE_NONE:
        with pytest.raises(ModelError, match="takes no computed features"):
            Encoders.of(model, family, device=cpu, autocast=None)
        return
    inputs = alone_inputs(name, one)
    kept = Encoders.of(model, family, device=cpu, autocast=None).encode(
        {key: value.numpy() for key, value in one.features.items()}
    )
    words = {key: value for key, value in inputs.items() if key not in one.features}
    arrays = {key: torch.from_numpy(value) for key, value in {**kept.outputs, **kept.encoded}.items()}
    assert kept.encoded and "pixel_values" not in arrays
    with torch.no_grad():
        right = model(**inputs, use_cache=False).logits
        found = model(**with_encoder_outputs({**words, **arrays}), use_cache=False).logits
        other = {key: value.flip(-2) if value.is_floating_point() else value for key, value in arrays.items()}
        wrong = model(**with_encoder_outputs({**words, **other}), use_cache=False).logits
    assert torch.allclose(found, right, atol=1e-5) and not torch.equal(wrong, right)


def test_a_model_that_takes_no_computed_features_is_named() -> None:
    family = MediaProcessor.of(BUILDERS["qwen2_5_vl"]()).family
    cpu = torch.device("cpu")
    with pytest.raises(ModelError, match=r"Phi4MultimodalForCausalLM .* takes no computed features"):
        Encoders.of(tiny_vlm("phi4_multimodal"), family, device=cpu, autocast=None)
    assert Encoders.of(tiny_vlm("kimi_k25"), family, device=cpu, autocast=None).model is not None


def test_flat_inputs_become_what_models_take() -> None:
    half = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    inputs = {
        "input_ids": torch.zeros(1, 2),
        "mm_encoder_outputs.image.pooler_output": half.view(torch.uint16),
        "mm_encoder_outputs.image.deepstack_features.1.0": torch.ones(1),
        "mm_encoder_outputs.image.deepstack_features.0.0": torch.zeros(1),
        "mm_encoder_outputs.video.pooler_output.0": torch.ones(2),
    }
    found = with_encoder_outputs(inputs)
    assert found.keys() == {"input_ids", "mm_encoder_outputs"}
    image, video = found["mm_encoder_outputs"]["image"], found["mm_encoder_outputs"]["video"]
    assert torch.equal(image.pooler_output, half) and image.pooler_output.dtype is torch.bfloat16
    assert image.deepstack_features == ((torch.zeros(1),), (torch.ones(1),))
    assert isinstance(video.pooler_output, tuple) and not hasattr(video, "deepstack_features")
    assert with_encoder_outputs({"input_ids": inputs["input_ids"]}).keys() == {"input_ids"}


def test_pixels_that_no_encoder_takes_are_named_and_sounds_are_kept_as_they_are() -> None:
    model = tiny_vlm("llava")
    encoders = Encoders.of(model, families_of(model.config)[0], device=torch.device("cpu"), autocast=None)
    with refused(ModelError, "LlavaModel", "pixel_values_videos"):
        encoders.encode({"pixel_values_videos": np.zeros((1, 2, 3, 56, 56), dtype=np.float32)})
    sound = {"input_features": np.zeros((1, 8, 20), dtype=np.float32)}
    kept = encoders.encode(sound)
    assert kept.outputs == sound and not kept.encoded
