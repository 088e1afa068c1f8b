"""FlexAttention under our block masks. Torch has a backward pass for it on the CPU, of the operator as it is written
down, and refuses to run it there; these tests lift the refusal. Kernels of a GPU are made of the same functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import WINDOW, tiny_model, tree
from tiny_rows import epoch_steps, run_data
from torch import nn
from torch.nn.attention import flex_attention as flex
from transformers.integrations import flex_attention as wrapped

from luthier.collation import CollateSettings
from luthier.collation.collator import collate_packs, collate_trees
from luthier.encoding.tokenizer import Tokenizer
from luthier.layout import tree_mask
from luthier.models import model as loading
from luthier.models.isolation import choose_isolation
from luthier.models.mixers import Isolation, attention_inputs, layer_windows
from luthier.records import Batch, Pack
from luthier.training.fit import fit_data
from luthier.training.report import RunResult

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{begins}")
    for begins in (  # by torch's operator
        "Converting a tensor with requires_grad=True to a scalar",
        "flex_attention called without torch.compile",
        "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    )
]
NAME = "flex_attention"
BLOCK = 128  # of its table: the trees below are longer
SAMPLES = [tree(60, 50, 40, seed=1), tree(70, 30, 90, seed=2), tree(20, 15, seed=3)]
LEAVES = [segment for sample in SAMPLES for segment in sample.segments()]
PACKS = [Pack(segments=tuple(LEAVES[:3])), Pack(segments=tuple(LEAVES[3:]))]
ALONE = [collate_packs([Pack(segments=(leaf,))], packed=False, pad_token_id=0) for leaf in LEAVES]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
BATCHES = {
    "shared": collate_trees([SAMPLES[:2], SAMPLES[2:]], pad_token_id=0),  # the second row ends in padding
    "packed": collate_packs(PACKS, packed=True, pad_token_id=0),
}


@pytest.fixture
def lifted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """FlexAttention trains on the CPU, not compiled; the masks that it is called with."""
    masks: list[Any] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, training: bool = False, **more: Any) -> Any:
        masks.append(more["block_mask"])
        return flex.flex_attention(q, k, v, **more)

    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(wrapped, "compile_friendly_flex_attention", attend)
    return masks


def log_probabilities(model: nn.Module, batches: list[Batch], isolation: Isolation) -> torch.Tensor:
    """[K], with their graph."""
    found = []
    for batch in batches:
        inputs = attention_inputs(batch, isolation, windows=layer_windows(model))
        logits_NV = model(**inputs).logits.flatten(0, 1)
        found.append(logits_NV.log_softmax(-1)[batch.targets.positions_K, batch.targets.ids_K])
    return torch.cat(found)


def gradients(model: nn.Module, logps_K: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logps_K.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_trees_and_packs_give_what_the_sequences_give_alone(name: str, lifted: list[Any]) -> None:
    model = tiny_model(name)
    expected_K = log_probabilities(model, ALONE, Isolation.PADDED)
    expected = gradients(model, expected_K)
    model.set_attn_implementation(NAME)
    for way, batch in BATCHES.items():
        found_K = log_probabilities(model, [batch], Isolation.BLOCKS)
        torch.testing.assert_close(found_K, expected_K, atol=2e-4, rtol=0, msg=lambda m, w=way: f"{w}: {m}")
        found = gradients(model, found_K)
        for weight, gradient in expected.items():
            scale = float(gradient.abs().max())
            worst = float((found[weight] - gradient).abs().max())
            assert worst <= 1e-4 * max(scale, 1.0), f"{way}, {weight}: {worst:.2g} of {scale:.2g}"
    assert len(lifted) == 2 * model.config.num_hidden_layers and all(isinstance(m, flex.BlockMask) for m in lifted)


def test_control_a_mask_without_the_window_or_of_another_tree_is_another_model(lifted: list[Any]) -> None:
    model = tiny_model("gemma3")
    batch = BATCHES["shared"]
    orphans = tuple(tuple(replace(branch, parent=-1) for branch in row) for row in batch.branches)
    with torch.no_grad():
        expected_K = log_probabilities(model, ALONE, Isolation.PADDED)
        model.set_attn_implementation(NAME)
        for windows, branches in (
            ({"sliding_attention": None, "full_attention": None}, batch.branches),
            (layer_windows(model), orphans),
        ):
            inputs = attention_inputs(replace(batch, branches=branches), Isolation.BLOCKS, windows=windows)
            logits_NV = model(**inputs).logits.flatten(0, 1)
            found_K = logits_NV.log_softmax(-1)[batch.targets.positions_K, batch.targets.ids_K]
            assert float((found_K - expected_K).abs().max()) > 1e-2


@pytest.mark.parametrize("window", [None, WINDOW, 200])
@pytest.mark.parametrize("way", BATCHES)
def test_the_table_of_blocks_names_all_in_which_some_pair_is_seen_and_no_other(way: str, window: int | None) -> None:
    """What a compiled kernel skips; the operator as it is written down does not look at it."""
    batch = BATCHES[way]
    mask = attention_inputs(batch, Isolation.BLOCKS, windows={"full_attention": window})["attention_mask"]
    width = batch.model_inputs["input_ids"].shape[1]
    across = -(-width // BLOCK)
    assert mask.BLOCK_SIZE == (BLOCK, BLOCK) and across > 2
    for row, branches in enumerate(batch.branches):
        seen = torch.zeros(across * BLOCK, across * BLOCK, dtype=torch.bool)
        seen[:width, :width] = torch.from_numpy(tree_mask(branches, width=width, window=window))
        tail = sum(branch.length for branch in branches)
        padding = torch.arange(width - tail)
        distance = padding[:, None] - padding
        seen[tail:width, tail:width] = (distance >= 0) & (distance < (window or width))
        expected = seen.unflatten(1, (across, BLOCK)).unflatten(0, (across, BLOCK)).any(dim=3).any(dim=1)
        assert torch.equal(mask.to_dense()[row, 0].bool(), expected)
        assert not expected.all()


@pytest.mark.parametrize("name", ["gemma3"])
def test_it_is_taken_for_trees_where_it_is_asked_for(name: str, lifted: list[Any]) -> None:
    model = tiny_model(name)
    how = CollateSettings(packed=True, pad_token_id=0)
    chosen = choose_isolation(model, LEAVES, how, device=torch.device("cpu"), asked=NAME, shared=True, num_rows=2)
    assert (chosen.isolation, chosen.attention, bool(lifted)) == (Isolation.BLOCKS, NAME, True)


TURNS = {"sft": 4}  # the answers of a row, whose history is rewritten behind each of them


def run(root: Path, tokenizer: Tokenizer, objective: str, folder: str, attention: str) -> RunResult:
    config = epoch_steps(
        root / folder,
        {"name": objective},
        rows=3,
        model={"name_or_path": "preset:tiny-qwen3", "attn_implementation": attention, "config_overrides": SIZES},
        train__packing="best_fit",
        train__precision="bf16",
        train__shared_prompts=True,
    )
    return fit_data(config, tokenizer, run_data(root / "store", config, rows=range(3), turns=TURNS.get(objective)))


@pytest.mark.parametrize("objective", ["dpo", "sft"])
def test_a_run_in_bf16_is_that_of_our_own_attention(
    tmp_path: Path, tokenizer: Tokenizer, lifted: list[Any], monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    monkeypatch.setattr(loading, "_attention", lambda section, *_: str(section.attn_implementation))
    found = run(tmp_path, tokenizer, objective, "flex", NAME)
    assert found.model.attn_implementation == NAME and lifted
    expected = run(tmp_path, tokenizer, objective, "segments", "luthier_segments")
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-2)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=0.1)
