"""Models that see: packed with pictures they compute what they compute alone, as the model itself would."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tree
from tiny_vlms import (
    END,
    START,
    VIDEO,
    VLMS,
    Seen,
    alone_inputs,
    packed_batch,
    padded_inputs,
    seen,
    shared_batch,
    tiny_vlm,
)

from luthier.collation import CollateSettings
from luthier.config.choices import AdapterType
from luthier.config.schema import AdapterConfig
from luthier.errors import ModelError
from luthier.layout import seen_blocks, tree_mask
from luthier.models import MediaNeeds, mixers, set_text_attention, text_attention
from luthier.models.adapters import apply_adapter
from luthier.models.attention import SEGMENTS, AttentionPlan, BlockReach, plan_attention
from luthier.models.batch_invariance import hook
from luthier.models.isolation import ChosenIsolation, choose_isolation
from luthier.models.mixers import Isolation, tree_mask_mod
from luthier.models.passes import find_head, prove_head, score_targets
from luthier.objectives.token_scores import token_scores
from luthier.records import Batch, Branch

CPU = torch.device("cpu")
HOW = CollateSettings(packed=True, pad_token_id=0)
WORDS = [segment for seed in (1, 2) for segment in tree(2, 30, seed=seed).segments()]
SEES_BLOCKS = ["gemma3", "gemma4"]
ASKED = ["auto", "sdpa"]


def rows_of(name: str) -> list[Seen]:
    return [seen(name, before, after, seed=seed) for seed, (before, after) in enumerate([(5, 9), (11, 6), (3, 12)])]


def chosen_for(name: str, model: Any, **more: Any) -> ChosenIsolation:
    return choose_isolation(model, WORDS, HOW, device=CPU, needs=VLMS[name].needs(), **more)


def loss_of(model: Any, inputs: dict[str, Any], batch: Batch) -> torch.Tensor:
    """The sum over the targets, scored under the head as training does."""
    head = find_head(model)
    targets = batch.targets
    scored = score_targets(
        model,
        inputs,
        targets.positions_K,
        lambda hidden_KD, taken: token_scores(hidden_KD, taken, targets.ids_K).logps_K,
        head=head,
    )
    return -scored.scores.sum()


@cache
def expected(name: str) -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
    """Logits of each segment alone, the sum of their losses, and its gradients: by the model's own means."""
    model = tiny_vlm(name)
    logits, total = [], 0.0
    for each in rows_of(name):
        out = model(**alone_inputs(name, each), use_cache=False).logits[0]
        logits.append(out.detach())
        targets = np.flatnonzero(each.segment.target)
        ids = torch.from_numpy(each.segment.input_ids[targets].astype(np.int64))
        loss = torch.nn.functional.cross_entropy(out[targets - 1], ids, reduction="sum")
        loss.backward()
        total += loss.item()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return logits, total, grads


def close(found: torch.Tensor, right: torch.Tensor, allowed: float = 1e-4) -> bool:
    """Relative to the largest of what is right."""
    return float((found - right).abs().max()) <= allowed * max(float(right.abs().max()), 1e-3)


def check_packed(name: str, model: Any, chosen: ChosenIsolation) -> None:
    logits, total, grads = expected(name)
    batch = packed_batch(name, rows_of(name))
    inputs = chosen.inputs(batch, device=CPU)
    with torch.no_grad():
        found = model(**inputs).logits[0]
    assert close(found, torch.cat(logits))
    loss = loss_of(model, inputs, batch)
    loss.backward()
    assert loss.item() == pytest.approx(total, rel=1e-4)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (key not in grads), key
        if parameter.grad is not None:  # some are zero but for rounding, as of a bias that every key has
            allowed = max(float(grads[key].abs().max()), 1e-2 * largest) * 1e-4
            assert float((parameter.grad - grads[key]).abs().max()) <= allowed, key


@pytest.mark.parametrize("name", VLMS)
def test_logits_loss_and_gradients_of_a_packed_row_are_those_of_its_segments_alone(name: str) -> None:
    model = tiny_vlm(name)
    chosen = chosen_for(name, model)
    assert (chosen.isolation, text_attention(model)) == (Isolation.SEGMENTS, SEGMENTS)
    assert model.training
    check_packed(name, model, chosen)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_omni", "qwen3_5", "idefics3", *SEES_BLOCKS])
def test_so_they_are_under_transformers_own_attention(name: str) -> None:
    model = tiny_vlm(name)
    chosen = chosen_for(name, model, asked="sdpa")
    assert chosen.isolation is (Isolation.MASKS if name in SEES_BLOCKS else Isolation.POSITIONS)
    check_packed(name, model, chosen)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_omni", "llava", *SEES_BLOCKS])
def test_rows_of_a_batch_that_end_in_padding_are_no_different(name: str) -> None:
    model = tiny_vlm(name)
    segments = rows_of(name)
    batch = packed_batch(name, segments[:2], segments[2:])
    logits, _, _ = expected(name)
    for asked in ("auto", "sdpa"):
        with torch.no_grad():
            found = model(**chosen_for(name, model, asked=asked).inputs(batch, device=CPU)).logits
        assert close(found[0], torch.cat(logits[:2])) and close(found[1, : len(logits[2])], logits[2])
        set_text_attention(model, "sdpa")


def test_in_which_layers_pictures_are_seen_both_ways_is_found_out_from_the_model() -> None:
    found = {name: chosen_for(name, tiny_vlm(name)).reach for name in SEES_BLOCKS}
    assert found == {"gemma3": BlockReach.EVERYWHERE, "gemma4": BlockReach.WINDOWS}
    causal = tiny_vlm("gemma4")
    causal.config.text_config.use_bidirectional_attention = None
    assert chosen_for("gemma4", causal).reach is BlockReach.NOWHERE


def test_phi_4_sees_a_whole_tile_alike_beside_one_that_is_partly_padding() -> None:
    model = tiny_vlm("phi4_multimodal").eval()
    tower = model.get_submodule("model.embed_tokens_extend.image_embed.img_processor")
    tiles, masks = torch.randn(2, 3, 56, 56), torch.ones(2, 4, 4, dtype=torch.bool)
    masks[1, :, 3:] = False

    def seen_of_first(count: int) -> torch.Tensor:
        with torch.no_grad():
            return tower(tiles[:count], patch_attention_mask=masks[:count]).last_hidden_state[0]

    assert not close(seen_of_first(2), seen_of_first(1), 1e-2), "control: without the hook it is causal"
    hook(model)
    assert close(seen_of_first(2), seen_of_first(1), 1e-5)


def test_videos_of_kimi_pass_the_projector_that_an_adapter_has_put_in() -> None:
    """As `adapter.modules_to_save` does."""
    model = tiny_vlm("kimi_k25").eval()
    hook(model)
    section = AdapterConfig(type=AdapterType.LORA, target_modules=["o_proj"], modules_to_save=["mm_projector"])
    apply_adapter(model, section)
    ids = torch.tensor([[5, START, *[VIDEO] * 6, END, 7]])
    film = {"pixel_values_videos": torch.randn(48, 3, 14, 14), "video_grid_thw": torch.tensor([[2, 4, 6]])}
    model(input_ids=ids, **film, use_cache=False).logits.sum().backward()
    kept = model.get_submodule("model.mm_projector").modules_to_save["default"]
    assert all(weight.grad is not None and weight.grad.any() for weight in kept.parameters())


@pytest.mark.parametrize("name", SEES_BLOCKS)
def test_a_plan_without_blocks_or_with_wrong_ones_is_told_from_the_model_s_own_masks(name: str) -> None:
    model = tiny_vlm(name)
    right = chosen_for(name, model)
    logits, _, _ = expected(name)
    for reach in {BlockReach.WINDOWS, BlockReach.EVERYWHERE} - {right.reach}:
        inputs = replace(right, reach=reach).inputs(packed_batch(name, rows_of(name)), device=CPU)
        with torch.no_grad():
            assert not close(model(**inputs).logits[0], torch.cat(logits), 1e-3)
    with pytest.raises(ModelError, match="under a mask of its own"):
        model(**replace(right, reach=BlockReach.NOWHERE).inputs(packed_batch(name, rows_of(name)), device=CPU))


def test_transformers_own_masks_leak_where_pictures_are_packed_and_are_not_taken() -> None:
    """Were it believed that positions keep them apart, as they do for text, this would go unseen."""
    name = "gemma3"
    model = tiny_vlm(name)
    chosen = chosen_for(name, model, asked="sdpa")
    assert any("sdpa by positions" in note for note in chosen.notes)
    believed = ChosenIsolation(isolation=Isolation.POSITIONS, attention="sdpa", windows={})
    with torch.no_grad():
        found = model(**believed.inputs(packed_batch(name, rows_of(name)), device=CPU)).logits[0]
    assert not close(found, torch.cat(expected(name)[0]), 1e-2)


def test_without_the_row_of_text_positions_segments_are_not_kept_apart_by_positions() -> None:
    model = tiny_vlm("qwen2_vl")
    three = choose_isolation(model, WORDS, HOW, device=CPU, asked="sdpa", needs=MediaNeeds(num_positions=3))
    assert three.isolation is Isolation.MASKS and "sdpa by positions: changing one" in three.notes[0]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("qwen3_5", "auto"), *((n, asked) for n in ("qwen2_vl", "qwen3_vl", "llava", *SEES_BLOCKS) for asked in ASKED)],
)
def test_answers_that_share_a_prompt_with_a_picture_have_the_logits_of_each_alone(name: str, asked: str) -> None:
    model = tiny_vlm(name)
    chosen = chosen_for(name, model, asked=asked, shared=True)
    prompt = seen(name, 6, 5, seed=3)
    answers = [seen(name, 0, length, seed=length, image=False) for length in (7, 4)]
    shared = shared_batch(name, prompt, answers)
    with torch.no_grad():
        found = model(**chosen.inputs(shared, device=CPU)).logits[0]
        set_text_attention(model, "sdpa")
        start = len(prompt.segment)
        for answer in answers:
            ids = np.concatenate([prompt.segment.input_ids, answer.segment.input_ids])
            whole = replace(prompt, segment=replace(prompt.segment, input_ids=ids, target=ids > 0))
            alone = model(**alone_inputs(name, whole), use_cache=False).logits[0]
            end = start + len(answer.segment)
            assert close(found[start:end], alone[len(prompt.segment) :])
            assert close(found[: len(prompt.segment)], alone[: len(prompt.segment)])
            start = end


def test_a_recurrent_model_that_is_not_known_gets_rows_of_one_segment_with_positions_as_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "qwen3_5"
    model = tiny_vlm(name)
    monkeypatch.setattr(mixers, "MIXERS", frozenset())
    chosen = chosen_for(name, model)
    assert chosen.isolation is Isolation.PADDED and "carry a state" in chosen.notes[0]
    logits, _, _ = expected(name)
    with torch.no_grad():
        found = model(**padded_inputs(name, rows_of(name)), use_cache=False).logits
    for row, right in zip(found, logits, strict=True):
        assert close(row[: len(right)], right)


def test_a_family_that_may_not_be_packed_gets_rows_of_its_own_for_the_reason_it_gives() -> None:
    model = tiny_vlm("llava")
    needs = MediaNeeds(refusal="family mllama: text attends to the pictures in layers of their own")
    chosen = choose_isolation(model, WORDS, HOW, device=CPU, needs=needs)
    assert chosen.isolation is Isolation.PADDED and chosen.notes == (needs.refusal,)
    with pytest.raises(ModelError, match="pictures in layers of their own"):
        choose_isolation(model, WORDS, HOW, device=CPU, needs=needs, asked="sdpa")


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "llava"])
def test_packed_pictures_are_parted_into_rows_of_one_segment_where_nothing_else_keeps_them_apart(name: str) -> None:
    model = tiny_vlm(name)
    needs = replace(VLMS[name].needs(), refusal="family: for this test")
    chosen = choose_isolation(model, WORDS, HOW, device=CPU, needs=needs)
    segments = rows_of(name)
    batch = chosen.arranged(packed_batch(name, segments[:2], segments[2:]), pad_token_id=0)
    logits, total, _ = expected(name)
    inputs = chosen.inputs(batch, device=CPU)
    with torch.no_grad():
        found = model(**inputs, use_cache=False).logits
        for row, right in zip(found, logits, strict=True):
            assert close(row[: len(right)], right)
        assert loss_of(model, inputs, batch).item() == pytest.approx(total, rel=1e-4)


def test_packed_words_are_parted_and_pictures_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen3_5"
    model = tiny_vlm(name)
    monkeypatch.setattr(mixers, "MIXERS", frozenset())
    chosen = chosen_for(name, model)
    words = [seen(name, 3, length, seed=length, image=False) for length in (4, 6)]
    parted = chosen.arranged(packed_batch(name, words), pad_token_id=0)
    assert parted.model_inputs["input_ids"].shape == (2, 9)
    for broken, batch in (
        (replace(chosen, needs=replace(chosen.needs, by_row=("pixel_values",))), packed_batch(name, rows_of(name))),
        (chosen, shared_batch(name, seen(name, 3, 1, seed=1), words)),
    ):
        with pytest.raises(ModelError, match=r"grid_thw, pixel_values [\s\S]*a state[\s\S]*packing: none"):
            broken.arranged(batch, pad_token_id=0)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "phi4_multimodal", "llava_onevision"])
def test_the_head_of_a_model_that_sees_is_tapped(name: str) -> None:
    model = tiny_vlm(name)
    chosen = chosen_for(name, model)
    inputs = chosen.inputs(packed_batch(name, rows_of(name)), device=CPU)
    assert prove_head(model, find_head(model), inputs).tapped


def test_blocks_are_runs_of_seen_tokens_that_end_with_their_branch() -> None:
    row = [Branch(parent=-1, length=5), Branch(parent=-1, length=3)]
    types = np.array([0, 1, 1, 0, 1, 2, 0, 3, 9])  # the last is padding, the one before a sound
    assert seen_blocks(types, row).tolist() == [-1, 0, 0, -1, 1, 2, -1, -1]
    assert plan_attention([row], width=9, types_BT=types[None], reach=BlockReach.WINDOWS) == AttentionPlan(
        lengths=(5, 3, 1),
        contexts=((), (), None),
        blocks=(((1, 3), (4, 5)), ((0, 1),), ()),
        reach=BlockReach.WINDOWS,
    )


def test_a_mask_with_blocks_is_causal_but_within_them() -> None:
    row = [Branch(parent=-1, length=4), Branch(parent=-1, length=2)]
    blocks = seen_blocks(np.array([0, 1, 1, 0, 1, 1]), row)
    assert tree_mask(row, width=6, blocks_T=blocks).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, 1],
    ]
    windowed = tree_mask(row, width=6, window=1, blocks_T=blocks)
    assert windowed[1, 2] and not windowed[2, 1] and not windowed[1, 0]
    whole = tree_mask(row, width=6, window=1, blocks_T=blocks, whole_blocks=True)
    assert whole[1, 2] and whole[2, 1] and not whole[1, 0]
    windowed = tree_mask(row, width=6, window=2, blocks_T=blocks)
    assert windowed[3].tolist() == [False, False, True, True, False, False] and windowed[1, 2]


@pytest.mark.parametrize("window", [None, 8])
def test_what_flex_attention_is_told_is_the_mask(window: int | None) -> None:
    batch = packed_batch("gemma3", rows_of("gemma3"))
    (row,), width = batch.branches, batch.model_inputs["input_ids"].shape[1]
    blocks = seen_blocks(batch.model_inputs["token_type_ids"][0].numpy(), row)
    told = tree_mask_mod(batch, window=window, device="cpu", blocks=[blocks])
    at = torch.arange(width)
    zero = torch.zeros((), dtype=torch.long)
    found = told(zero, zero, at[:, None], at[None, :])
    assert torch.equal(found, torch.from_numpy(tree_mask(row, width=width, window=window, blocks_T=blocks)))
