"""What encoders of images and audio keep for the backward pass, against what autograd really keeps of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SiglipVisionConfig,
)

from luthier.check.plan.estimate import memory_of
from luthier.check.plan.work import EpochWork, shape_of
from luthier.config.choices import Packing
from luthier.models import plain_model
from luthier.models.adapters import apply_adapter
from luthier.packing import PATCH_COST, PlanSettings, SegmentTable
from luthier.packing.epoch import plan_epoch
from tests.check.test_estimates import QWEN, Kept, one_row, run_config
from tests.check.test_estimates import built as built_text

WIDTH, INSIDE, LAYERS, HEADS, TEXT = 256, 768, 4, 4, 320
LANGUAGE: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": TEXT, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 5,
    "num_key_value_heads": 5,
}  # fmt: skip
USUAL: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": INSIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "image_size": 224, "patch_size": 14,
}  # fmt: skip
GRID_N3 = torch.tensor([[1, 24, 16]])


@dataclass(frozen=True)
class Case:
    config: Any
    positions: int
    call: Callable[[Any], Any]
    model: Any = AutoModelForImageTextToText


def of_patches(numbers: int) -> Callable[[Any], Any]:
    return lambda model: model.model.get_image_features(torch.randn(len_of(GRID_N3), numbers), GRID_N3)


def of_sounds(model: Any) -> Any:
    heard = model.model.audio_tower(torch.randn(3, 128, 600)).last_hidden_state
    return model.model.multi_modal_projector(heard)


def len_of(grid_N3: torch.Tensor) -> int:
    return int(grid_N3.prod(dim=1).sum())


def qwen(vision: dict[str, Any]) -> dict[str, Any]:
    scaling = {"type": "default", "rope_type": "default", "mrope_section": [8, 12, 12]}
    text = {**LANGUAGE, "rope_scaling": scaling, "rope_parameters": scaling}
    return {"text_config": text, "vision_config": vision, "image_token_id": 1, "video_token_id": 2,
            "vision_start_token_id": 3, "vision_end_token_id": 4}  # fmt: skip


CASES = {
    "qwen2 vl": Case(
        Qwen2VLConfig(**qwen({"depth": LAYERS, "embed_dim": WIDTH, "hidden_size": TEXT, "mlp_ratio": 3,
                              "num_heads": HEADS, "patch_size": 14})),
        len_of(GRID_N3), of_patches(3 * 2 * 14 * 14),
    ),
    "qwen2.5 vl": Case(
        Qwen2_5_VLConfig(**qwen({"depth": LAYERS, "hidden_size": WIDTH, "out_hidden_size": TEXT, "num_heads": HEADS,
                                 "intermediate_size": INSIDE, "patch_size": 14, "fullatt_block_indexes": [1]})),
        len_of(GRID_N3), of_patches(3 * 2 * 14 * 14),
    ),
    "qwen3 vl": Case(
        Qwen3VLConfig(**qwen({"depth": LAYERS, "hidden_size": WIDTH, "out_hidden_size": TEXT, "num_heads": HEADS,
                              "intermediate_size": INSIDE, "patch_size": 16, "deepstack_visual_indexes": [0, 1],
                              "num_position_embeddings": 576})),
        len_of(GRID_N3), of_patches(3 * 2 * 16 * 16),
    ),
    "clip": Case(
        LlavaConfig(vision_config=CLIPVisionConfig(**USUAL), text_config=LlamaConfig(**LANGUAGE), image_token_index=1,
                    vision_feature_layer=-1),
        2 * 257, lambda model: model.model.get_image_features(torch.randn(2, 3, 224, 224)),
    ),
    "siglip": Case(
        LlavaConfig(vision_config=SiglipVisionConfig(**USUAL, vision_use_head=False), image_token_index=1,
                    text_config=LlamaConfig(**LANGUAGE), vision_feature_layer=-1,
                    vision_feature_select_strategy="full"),
        2 * 256, lambda model: model.model.get_image_features(torch.randn(2, 3, 224, 224)),
    ),
    "pixtral": Case(
        LlavaConfig(vision_config=PixtralVisionConfig(**USUAL), text_config=LlamaConfig(**LANGUAGE),
                    image_token_index=1, vision_feature_layer=-1, vision_feature_select_strategy="full"),
        14 * 16, lambda model: model.model.get_image_features(
            torch.randn(1, 3, 196, 224), image_sizes=torch.tensor([[196, 224]])),
    ),
    "audio": Case(
        Qwen2AudioConfig(
            audio_config={"d_model": WIDTH, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS,
                          "encoder_ffn_dim": INSIDE, "max_source_positions": 300},
            text_config=LANGUAGE, audio_token_index=1),
        3 * 300, of_sounds,
        Qwen2AudioForConditionalGeneration,
    ),
}  # fmt: skip


def kept_by(model: Any, call: Callable[[Any], Any], *, in_16_bits: bool) -> int:
    """Bytes that autograd kept, weights and their casts left out."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    shapes = {tuple(each.shape) for each in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes if len(shape) == 2}
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(tensor: torch.Tensor) -> Kept:
        kept.add(held := Kept(tensor))
        return held

    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_16_bits),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor),
    ):
        found = call(model)
    while gc.collect():
        pass
    assert found is not None
    sizes = {}
    for each in kept:
        is_cast = tuple(each.tensor.shape) in shapes and each.tensor.dtype is torch.bfloat16
        storage = each.tensor.untyped_storage()
        if storage.data_ptr() not in own and not is_cast:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def built(case: Case, run: Any, dtype: torch.dtype = torch.float32) -> Any:
    make = getattr(case.model, "from_config", None) or case.model._from_config
    return apply_adapter(make(case.config, attn_implementation="sdpa", dtype=dtype), run.adapter).train()


PARTS = {
    "all": {"type": "full", "train_parts": ["language_model", "projector", "tower"]},
    "lora": {"type": "lora", "r": 8, "target_modules": "all-linear", "train_parts": ["language_model", "tower"]},
    "projector": {"type": "full", "train_parts": ["language_model", "projector"]},
}


@pytest.mark.parametrize("in_16_bits", [False, True], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", CASES)
def test_what_encoders_keep_is_about_what_autograd_keeps_of_them(name: str, parts: str, in_16_bits: bool) -> None:
    case = CASES[name]
    run = run_config(PARTS[parts], precision="bf16" if in_16_bits else "fp32")
    model = built(case, run, torch.bfloat16 if in_16_bits and parts == "lora" else torch.float32)
    kept = kept_by(model, lambda model: case.call(plain_model(model)), in_16_bits=in_16_bits)
    work = one_row(encoded=case.positions)
    assert memory_of(shape_of(model), work, run, on_gpu=False).encoders == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("name", CASES)
def test_recomputed_layers_keep_their_input_and_one_layer(name: str) -> None:
    case, run = CASES[name], run_config(PARTS["all"], precision="fp32")
    model = built(case, run)
    shape, work = shape_of(model), one_row(encoded=case.positions)
    (one,) = shape.encoders
    again = run.model_copy(update={"train": run.train.model_copy(update={"gradient_checkpointing": True})})
    plain, less = (memory_of(shape, work, config, on_gpu=False).encoders for config in (run, again))
    whole = kept_by(model, case.call, in_16_bits=False)
    model.activation_checkpointing_enable()
    inputs = kept_by(model, case.call, in_16_bits=False)
    assert inputs < whole / 2, "it is recomputed"
    one_layer = (plain - 4 * case.positions * one.around) / LAYERS
    assert less == pytest.approx(inputs + one_layer + 4 * case.positions * INSIDE, rel=0.1)


def test_a_frozen_encoder_keeps_nothing_and_its_adapters_are_not_the_language_models() -> None:
    case = CASES["siglip"]
    work = one_row(encoded=case.positions)
    frozen = run_config({"type": "lora", "r": 8, "target_modules": "all-linear", "train_parts": ["language_model"]})
    model = built(case, frozen)
    assert kept_by(model, lambda model: case.call(plain_model(model)), in_16_bits=False) == 0
    shape, both = shape_of(model), run_config(PARTS["lora"])
    assert memory_of(shape, work, frozen, on_gpu=False).encoders == 0
    of_both = shape_of(built(case, both))
    assert of_both.adapted == shape.adapted and len(of_both.encoders[0].adapted) == 6 * LAYERS
    less, more = memory_of(shape, work, frozen, on_gpu=False), memory_of(of_both, work, both, on_gpu=False)
    assert more.activations == less.activations and more.total - less.total > more.encoders > 0


def test_a_model_of_text_has_no_encoders() -> None:
    run = run_config()
    shape = shape_of(built_text(QWEN, run))
    assert shape.encoders == () and memory_of(shape, one_row(encoded=100), run, on_gpu=False).encoders == 0


def test_the_positions_are_those_of_the_largest_micro_batch() -> None:
    table = replace(SegmentTable.of_lengths([10, 10, 10]), extra_costs=PATCH_COST * np.array([50, 70, 0]))
    for size, most in ((1, 70), (3, 120)):
        plan = plan_epoch(table, PlanSettings(capacity=10, packing=Packing.NONE, rows_per_micro_batch=size), epoch=0)
        assert EpochWork.of_plan(plan, table).largest_encoded == most
