"""Tiny random models that see, samples with a picture each, and batches of them made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers as hf
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from luthier.collation.collator import collate_packs, collate_trees
from luthier.layout.mrope import mrope_positions, packed_mrope
from luthier.layout.position_schemes import MediaGrids, position_scheme, token_types
from luthier.models import MediaNeeds
from luthier.records import Batch, Branch, Pack, Sample, Segment

IMAGE, VIDEO, START, END, SOUND, SOUND_START, SOUND_END = 180, 181, 182, 183, 184, 185, 186
WORDS = 170  # ids below are text
WINDOW = 8

# at the usual 0.02 a model hardly looks at other tokens, and every leak is small
SENSITIVE = {"initializer_range": 0.1}
TEXT: dict[str, Any] = {
    "vocab_size": 192, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    **SENSITIVE,
}  # fmt: skip
SEE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14,
    "image_size": 56, **SENSITIVE,
}  # fmt: skip
HEAR: dict[str, Any] = {
    "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32,
    "output_dim": 32, "n_window": 10, **SENSITIVE,
}  # fmt: skip
IDS: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO}
MARKS: dict[str, Any] = {**IDS, "vision_start_token_id": START, "vision_end_token_id": END}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WOVEN: dict[str, Any] = {**MROPE, "mrope_interleaved": True}
QWEN_SEES: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [1], "out_hidden_size": 32, **SENSITIVE,
}  # fmt: skip
QWEN3_SEES: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 64, **SENSITIVE,
}  # fmt: skip
DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
BOTH = ["sliding_attention", "full_attention"]
Features = dict[str, torch.Tensor]
GRID = torch.tensor([[1, 4, 6]])  # patches; merged two by two they are 6 tokens


def _patches(size: int, count: int = 24) -> Callable[[], Features]:
    return lambda: {"pixel_values": torch.randn(count, size), "image_grid_thw": GRID}


def _square(side: int = 56, *axes: int) -> Callable[[], Features]:
    return lambda: {"pixel_values": torch.randn(*(axes or (1,)), 3, side, side)}


def _placed() -> Features:
    rows, columns = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    places = torch.stack([columns, rows], -1).reshape(1, 36, 2)
    return {"pixel_values": torch.rand(1, 36, 768), "image_position_ids": places}


@dataclass(frozen=True, kw_only=True)
class TinyVlm:
    """A model, and what its processor would make of one picture: ``slots`` tokens and the features.

    scheme  of positions; ``types``: the input of token types; ``axis``: along which features of a row are joined
    blocks  whether the tokens of a picture see each other both ways
    """

    make: Callable[[], hf.PreTrainedModel]
    features: Callable[[], Features]
    slots: int
    scheme: str | None = None
    types: str | None = None
    axis: int = 0
    blocks: bool = False
    more: Callable[[], Features] = field(default=dict)

    def needs(self) -> MediaNeeds:
        """As the family's row would say it."""
        return MediaNeeds(
            num_positions=None if self.scheme is None else 4,
            types=self.types if self.blocks else None,
            along=() if self.types is None else (self.types,),
        )


def _of(cls: Any, config: Any) -> Callable[[], hf.PreTrainedModel]:
    return lambda: cls._from_config(config())


VLMS: dict[str, TinyVlm] = {
    "qwen2_vl": TinyVlm(
        make=_of(
            hf.Qwen2VLForConditionalGeneration,
            lambda: hf.Qwen2VLConfig(
                text_config={**TEXT, "rope_parameters": MROPE},
                vision_config={
                    "depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14, "hidden_size": 32,
                    "spatial_merge_size": 2, "temporal_patch_size": 2, **SENSITIVE,
                },
                **MARKS,
            ),
        ),
        features=_patches(1176), slots=6, scheme="grid", types="mm_token_type_ids",
    ),
    "qwen2_5_vl": TinyVlm(
        make=_of(
            hf.Qwen2_5_VLForConditionalGeneration,
            lambda: hf.Qwen2_5_VLConfig(
                text_config={**TEXT, "rope_parameters": MROPE}, vision_config=QWEN_SEES, **MARKS
            ),
        ),
        features=_patches(1176), slots=6, scheme="grid_seconds", types="mm_token_type_ids",
    ),
    "qwen3_vl": TinyVlm(
        make=_of(
            hf.Qwen3VLForConditionalGeneration,
            lambda: hf.Qwen3VLConfig(
                text_config={**TEXT, "head_dim": 16, "rope_parameters": WOVEN},
                vision_config={**QWEN3_SEES, **DEEPSTACK},
                **MARKS,
            ),
        ),
        features=_patches(1536), slots=6, scheme="grid_frames", types="mm_token_type_ids",
    ),
    "qwen3_5": TinyVlm(
        make=_of(
            hf.Qwen3_5ForConditionalGeneration,
            lambda: hf.Qwen3_5Config(
                text_config={
                    **TEXT, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
                    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
                    "linear_value_head_dim": 16, "rope_parameters": {**WOVEN, "partial_rotary_factor": 1.0},
                },
                vision_config=QWEN3_SEES,
                **MARKS,
            ),
        ),
        features=_patches(1536), slots=6, scheme="grid_frames", types="mm_token_type_ids",
    ),
    "glm4v": TinyVlm(
        make=_of(
            hf.Glm4vForConditionalGeneration,
            lambda: hf.Glm4vConfig(
                text_config={**TEXT, "rope_parameters": MROPE},
                vision_config={
                    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14,
                    "image_size": 56, "out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2,
                    **SENSITIVE,
                },
                image_start_token_id=START, image_end_token_id=END, video_start_token_id=187, video_end_token_id=188,
                **IDS,
            ),
        ),
        features=_patches(1176), slots=6, scheme="grid_frames", types="mm_token_type_ids",
    ),
    "gemma3": TinyVlm(
        make=_of(
            hf.Gemma3ForConditionalGeneration,
            lambda: hf.Gemma3Config(
                text_config={**TEXT, "head_dim": 16, "sliding_window": WINDOW, "layer_types": BOTH},
                vision_config=SEE, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=START,
                eoi_token_index=END, **SENSITIVE,
            ),
        ),
        features=_square(), slots=4, types="token_type_ids", blocks=True,
    ),
    "gemma4": TinyVlm(
        make=_of(
            hf.Gemma4ForConditionalGeneration,
            lambda: hf.Gemma4Config(
                text_config={
                    **TEXT, "head_dim": 16, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": BOTH,
                    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 192,
                    "use_bidirectional_attention": "vision",
                },
                vision_config={
                    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 16, "pooling_kernel_size": 3,
                    "position_embedding_size": 64, **SENSITIVE,
                },
                audio_config=None, audio_token_id=SOUND, boi_token_id=START, eoi_token_id=END, **IDS,
            ),
        ),
        features=_placed, slots=4, types="mm_token_type_ids", blocks=True,
    ),
    "llava": TinyVlm(
        make=_of(
            hf.LlavaForConditionalGeneration,
            lambda: hf.LlavaConfig(
                text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**SEE), image_token_index=IMAGE
            ),
        ),
        features=_square(), slots=16,
    ),
    "llava_onevision": TinyVlm(
        make=_of(
            hf.LlavaOnevisionForConditionalGeneration,
            lambda: hf.LlavaOnevisionConfig(
                text_config=hf.Qwen2Config(**TEXT), vision_config=hf.SiglipVisionConfig(**SEE),
                image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=[[56, 56]],
                vision_aspect_ratio="anyres_max_9",
            ),
        ),
        features=_square(56, 1, 2), slots=36,  # the whole, 4 x 4 more, 4 ends of rows
        more=lambda: {"image_sizes": torch.tensor([[56, 56]]), "batch_num_images": torch.tensor([1])},
    ),
    "internvl": TinyVlm(
        make=_of(
            hf.InternVLForConditionalGeneration,
            lambda: hf.InternVLConfig(
                text_config=hf.Qwen2Config(**TEXT),
                vision_config={**SEE, "image_size": (56, 56), "patch_size": (14, 14)},
                image_token_id=IMAGE, image_seq_length=4,
            ),
        ),
        features=_square(), slots=4,
    ),
    "idefics3": TinyVlm(
        make=_of(
            hf.Idefics3ForConditionalGeneration,
            lambda: hf.Idefics3Config(
                text_config=hf.LlamaConfig(**TEXT), vision_config=SEE, image_token_id=IMAGE, scale_factor=2,
                pad_token_id=0,
            ),
        ),
        features=_square(56, 1, 1), slots=4, axis=1,
    ),
    "mistral3": TinyVlm(
        make=_of(
            hf.Mistral3ForConditionalGeneration,
            lambda: hf.Mistral3Config(
                text_config=hf.MistralConfig(**TEXT, head_dim=16, sliding_window=None),
                vision_config=hf.PixtralVisionConfig(**SEE), image_token_index=IMAGE, spatial_merge_size=2,
            ),
        ),
        features=_square(), slots=4, more=lambda: {"image_sizes": torch.tensor([[56, 56]])},
    ),
    "kimi_k25": TinyVlm(
        make=_of(
            hf.Kimi_K25ForConditionalGeneration,
            lambda: hf.Kimi_K25Config(
                text_config=hf.DeepseekV3Config(
                    **{**TEXT, "num_key_value_heads": 2}, moe_intermediate_size=32, n_routed_experts=4, n_group=1,
                    topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
                    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
                ),
                vision_config={**SEE, "pos_emb_height": 8, "pos_emb_width": 8}, projection_hidden_size=32, **MARKS,
            ),
        ),
        features=lambda: {"pixel_values": torch.randn(24, 3, 14, 14), "image_grid_thw": GRID}, slots=6,
    ),
    "phi4_multimodal": TinyVlm(
        make=_of(
            hf.Phi4MultimodalForCausalLM,
            lambda: hf.Phi4MultimodalConfig(
                **TEXT, original_max_position_embeddings=512,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
                vision_config={**SEE, "crop_size": 56, "image_token_id": IMAGE},
                audio_config={
                    "hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2,
                    "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
                    "input_size": 80, "audio_token_id": SOUND,
                },
            ),
        ),
        features=lambda: {
            "image_pixel_values": torch.randn(1, 2, 3, 56, 56), "image_sizes": torch.tensor([[56, 56]]),
            "image_attention_mask": torch.ones(1, 2, 4, 4),
        },
        slots=13,
    ),
    "qwen2_5_omni": TinyVlm(
        make=_of(
            Qwen2_5OmniThinkerForConditionalGeneration,
            lambda: hf.Qwen2_5OmniThinkerConfig(
                text_config={**TEXT, "rope_parameters": MROPE}, vision_config=QWEN_SEES, audio_config=HEAR,
                image_token_index=IMAGE, video_token_index=VIDEO, audio_token_index=SOUND,
                audio_start_token_id=SOUND_START, audio_end_token_id=SOUND_END, vision_start_token_id=START,
                vision_end_token_id=END, user_token_id=3,
            ),
        ),
        features=_patches(1176), slots=6, scheme="grid_sound",
    ),
    "qwen3_omni": TinyVlm(
        make=_of(
            Qwen3OmniMoeThinkerForConditionalGeneration,
            lambda: hf.Qwen3OmniMoeThinkerConfig(
                text_config={
                    **TEXT, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                    "rope_parameters": WOVEN,
                },
                vision_config={**QWEN3_SEES, **DEEPSTACK}, audio_config={**HEAR, "downsample_hidden_size": 8},
                audio_token_id=SOUND, audio_start_token_id=SOUND_START, user_token_id=3, **MARKS,
            ),
        ),
        features=_patches(1536), slots=6, scheme="grid_sound_fractional",
    ),
    "smolvlm": TinyVlm(
        make=_of(
            hf.SmolVLMForConditionalGeneration,
            lambda: hf.SmolVLMConfig(
                text_config=hf.LlamaConfig(**TEXT), vision_config=SEE, image_token_id=IMAGE, scale_factor=2,
                pad_token_id=0,
            ),
        ),
        features=_square(56, 1, 1), slots=4, axis=1,
    ),
}  # fmt: skip


def tiny_vlm(name: str) -> Any:
    """In training mode, with the same weights every time."""
    torch.manual_seed(0)
    return VLMS[name].make().train()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A segment with one picture in it (or none), and the features of that."""

    segment: Segment
    features: Features


def seen(name: str, before: int, after: int, *, seed: int, image: bool = True) -> Seen:
    """``before`` words, a picture, ``after`` words, which are the targets."""
    vlm = VLMS[name]
    rng = np.random.default_rng(seed)
    picture = [START] + [IMAGE] * vlm.slots + [END] if image else []
    ids = [*rng.integers(3, WORDS, before), *picture, *rng.integers(3, WORDS, after)]
    torch.manual_seed(seed)
    features = {**vlm.features(), **vlm.more()} if image else {}
    target = np.arange(len(ids)) >= len(ids) - after
    return Seen(segment=Segment(input_ids=np.array(ids, dtype=np.int32), target=target), features=features)


def packed_batch(name: str, *rows: Sequence[Seen]) -> Batch:
    """Packed rows, with what loaders would add to the ids."""
    packs = [Pack(segments=tuple(each.segment for each in row)) for row in rows]
    return with_media(name, collate_packs(packs, packed=True, pad_token_id=0), *rows)


def shared_batch(name: str, prompt: Seen, answers: Sequence[Seen]) -> Batch:
    """One row: the prompt once, and answers without pictures that go on from it."""
    parts = [prompt, *answers]
    tree = Sample(
        input_ids=np.concatenate([each.segment.input_ids for each in parts]),
        target=np.concatenate([prompt.segment.target & False, *(each.segment.target for each in answers)]),
        branches=tuple(Branch(parent=0 if node else -1, length=len(each.segment)) for node, each in enumerate(parts)),
    )
    return with_media(name, collate_trees([[tree]], pad_token_id=0), parts)


def with_media(name: str, batch: Batch, *rows: Sequence[Seen]) -> Batch:
    """The batch with features, token types and positions of several axes, where the model wants them."""
    vlm = VLMS[name]
    seeing = [each for row in rows for each in row if each.features]
    inputs = dict(batch.model_inputs)
    for key in seeing[0].features if seeing else ():
        inputs[key] = torch.cat([each.features[key] for each in seeing], vlm.axis)
    ids_BT = inputs["input_ids"].numpy()
    types_BT = np.stack([token_types(ids, image=[IMAGE], video=[VIDEO], audio=[SOUND]) for ids in ids_BT])
    if vlm.types is not None:
        inputs[vlm.types] = torch.from_numpy(types_BT)
    if vlm.scheme is not None:
        scheme = position_scheme(vlm.scheme, {})
        placed = []
        for row, types_T, branches in zip(rows, types_BT, batch.branches, strict=True):
            tail = len(types_T) - sum(branch.length for branch in branches)
            grids = MediaGrids(image_N3=np.repeat(GRID.numpy(), sum(bool(each.features) for each in row), axis=0))
            placed.append(packed_mrope(scheme, types_T, grids, [*branches, Branch(parent=-1, length=tail)]))
        inputs["position_ids"] = torch.from_numpy(np.stack(placed, axis=1))
    return replace(batch, model_inputs=inputs)


def padded_inputs(name: str, rows: Sequence[Seen]) -> dict[str, torch.Tensor]:
    """What the model is called with for rows of one segment, right-padded; positions are given where they have axes."""
    vlm = VLMS[name]
    batch = collate_packs([Pack(segments=(each.segment,)) for each in rows], packed=False, pad_token_id=0)
    inputs = {key: batch.model_inputs[key] for key in ("input_ids", "attention_mask")}
    for key in rows[0].features:
        inputs[key] = torch.cat([each.features[key] for each in rows], 0)
    ids_BT = inputs["input_ids"].numpy()
    types = [token_types(ids, image=[IMAGE], video=[VIDEO], audio=[SOUND]) for ids in ids_BT]
    if vlm.types is not None:
        inputs[vlm.types] = torch.from_numpy(np.stack(types))
    if vlm.scheme is not None:
        scheme, width = position_scheme(vlm.scheme, {}), ids_BT.shape[1]
        whole = [Branch(parent=-1, length=width)]
        grids = MediaGrids(image_N3=GRID.numpy())
        inputs["position_ids"] = torch.from_numpy(
            np.stack([mrope_positions(scheme, of_row, grids, whole) for of_row in types], axis=1)
        )
    return inputs


def alone_inputs(name: str, each: Seen) -> dict[str, torch.Tensor]:
    """One segment as inference sees it: the model finds positions and masks by itself."""
    inputs = padded_inputs(name, [each]) if each.features else padded_inputs(name, [replace(each, features={})])
    inputs.pop("position_ids", None)
    return inputs
