"""In 16 bits rows give what they give alone, however they are laid out, as nearly as 16 bits can say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tree
from tiny_rows import epoch_steps, run_data
from torch import nn

from luthier.collation.collator import collate_packs, collate_trees
from luthier.encoding.tokenizer import Tokenizer
from luthier.models.attention import SEGMENTS, register_attention
from luthier.models.mixers import Isolation, attention_inputs, layer_windows
from luthier.models.passes import casting
from luthier.objectives import Head
from luthier.objectives.hidden_loss import hidden_loss_sum
from luthier.objectives.token_scores import token_scores
from luthier.records import Batch, Pack
from luthier.training.fit import fit_data
from luthier.training.report import RunResult

BF16 = torch.bfloat16
SAMPLES = [tree(9, 5, 7, seed=1), tree(6, 11, 4, seed=2), tree(8, 6, seed=3)]
LEAVES = [segment for sample in SAMPLES for segment in sample.segments()]
ALONE = [collate_packs([Pack(segments=(leaf,))], packed=False, pad_token_id=0) for leaf in LEAVES]
LAYOUTS: dict[str, tuple[str | None, list[Batch], Isolation]] = {
    "alone": (None, ALONE, Isolation.PADDED),
    "padded": (
        None,
        [collate_packs([Pack(segments=(leaf,)) for leaf in LEAVES], packed=False, pad_token_id=0)],
        Isolation.PADDED,
    ),
    "packed": (
        SEGMENTS,
        [collate_packs([Pack(segments=tuple(LEAVES))], packed=True, pad_token_id=0)],
        Isolation.SEGMENTS,
    ),
    "shared": (SEGMENTS, [collate_trees([SAMPLES], pad_token_id=0)], Isolation.SEGMENTS),
    "shared, by masks": (None, [collate_trees([SAMPLES], pad_token_id=0)], Isolation.MASKS),
}


def scored(model: nn.Module, layout: str, *, to: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """float64[K] log-probabilities, and all gradients of their sum in one row."""
    attention, batches, isolation = LAYOUTS[layout]
    model.set_attn_implementation(attention or "sdpa")
    model.zero_grad()
    found = []
    for batch in batches:
        with casting(torch.device("cpu"), to):
            logits_BTV = model(**attention_inputs(batch, isolation, windows=layer_windows(model))).logits
        logps_NV = logits_BTV.flatten(0, 1).float().log_softmax(-1)
        found.append(logps_NV[batch.targets.positions_K, batch.targets.ids_K])
    logps_K = torch.cat(found)
    logps_K.sum().backward()
    gradient = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    return logps_K.detach().double(), gradient


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """How far from it, as a share of its size."""
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("weights", ["in bf16", "cast"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_no_layout_is_further_from_exact_arithmetic_than_rows_alone(name: str, weights: str) -> None:
    register_attention()
    rough, exact = tiny_model(name), tiny_model(name)
    if weights == "in bf16":
        rough.to(BF16)
        exact.load_state_dict(rough.state_dict())  # the same weights, computed with exactly
    to = BF16 if weights == "cast" else None
    logps_K, gradient = scored(exact.double(), "alone")
    found = {layout: scored(rough, layout, to=to) for layout in LAYOUTS}
    alone = [off(found["alone"][0], logps_K), off(found["alone"][1], gradient)]
    assert 1e-4 < alone[0] < 2e-2 and 1e-4 < alone[1] < 5e-2, alone  # it is rounded, and not wrong
    for layout, (rough_K, rough_gradient) in found.items():
        assert off(rough_K, logps_K) < 1.5 * alone[0], layout
        assert off(rough_gradient, gradient) < 1.5 * alone[1], layout


def test_control_a_leak_is_far_more_than_rounding() -> None:
    model, exact = tiny_model("qwen3").to(BF16), tiny_model("qwen3")
    exact.load_state_dict(model.state_dict())
    logps_K, _ = scored(exact.double(), "alone")
    (batch,) = LAYOUTS["packed"][1]
    with torch.no_grad():
        leaking = model(input_ids=batch.model_inputs["input_ids"]).logits.flatten(0, 1).float().log_softmax(-1)
    assert off(leaking[batch.targets.positions_K, batch.targets.ids_K].double(), logps_K) > 0.1


@pytest.mark.parametrize("to", [BF16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_head_in_chunks_is_as_near_as_its_products(
    to: torch.dtype, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of 16 bits are summed in 32: what is left is the rounding of the products and of the gradients."""
    monkeypatch.setattr("luthier.objectives.CHUNK_ELEMENTS", 7 * 300)
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(50, 16).to(to), torch.randn(300, 16).to(to), torch.randint(300, (50,))
    for loss in (_token_loss, _scores):
        exact, rough = (_head_gradients(loss, hidden, weight, ids, kind, softcap) for kind in (torch.float64, to))
        assert off(rough[0], exact[0]) < 1e-3 * (8 if to is BF16 else 1)
        for found, expected in zip(rough[1:], exact[1:], strict=True):
            assert off(found, expected) < 4e-3 * (2 if to is BF16 else 1)


def _head_gradients(
    loss: Any, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, kind: torch.dtype, softcap: float | None
) -> list[torch.Tensor]:
    hidden_KD, weight_VD = (x.to(kind, copy=True).requires_grad_() for x in (hidden, weight))
    found = loss(hidden_KD, Head(weight_VD=weight_VD, scale=0.5, softcap=softcap), ids)
    found.backward()
    return [found.detach().double(), hidden_KD.grad.double(), weight_VD.grad.double()]


def _token_loss(hidden_KD: torch.Tensor, head: Head, ids_K: torch.Tensor) -> torch.Tensor:
    return hidden_loss_sum(hidden_KD, head, ids_K).loss_sum


def _scores(hidden_KD: torch.Tensor, head: Head, ids_K: torch.Tensor) -> torch.Tensor:
    return token_scores(hidden_KD, head, ids_K).logps_K.sum()


LORA = {"adapter": {"type": "lora", "r": 4, "init_lora_weights": "gaussian"}, "model__dtype": "bfloat16"}
RUNS: dict[str, dict[str, Any]] = {
    "sft": {"objective": "sft"},
    "dpo": {"objective": "dpo"},
    "dpo, lora": {"objective": "dpo", **LORA},
}
DIVISIONS: dict[str, dict[str, Any]] = {
    "packed": {"train__packing": "best_fit", "micro_batches": 8, "train__shared_prompts": False},
    "shared": {"train__packing": "best_fit", "micro_batches": 8, "train__shared_prompts": True},
    "alone": {"train__per_device_train_batch_size": 1},
}


def run(root: Path, tokenizer: Tokenizer, case: str, name: str, **changes: Any) -> RunResult:
    settings = {key: value for key, value in RUNS[case].items() if key != "objective"}
    settings |= {"eval__strategy": "steps", "eval__steps": 3, "train__precision": "bf16", **changes}
    config = epoch_steps(root / name, {"name": RUNS[case]["objective"]}, rows=8, **settings)
    return fit_data(config, tokenizer, run_data(root / "store", config, rows=range(8), held_out=range(4, 8)))


@pytest.mark.parametrize("case", RUNS)
def test_a_run_in_bf16_does_not_depend_on_how_its_rows_are_divided(
    tmp_path: Path, tokenizer: Tokenizer, case: str
) -> None:
    whole = run(tmp_path, tokenizer, case, "whole", train__per_device_train_batch_size=8)
    assert whole.model.precision == "bf16" and whole.steps[2].loss < whole.steps[0].loss
    if RUNS[case]["objective"] == "dpo":  # before the first step the policy is its reference
        assert whole.steps[0].loss == pytest.approx(math.log(2), abs=1e-3)
    for name, changes in DIVISIONS.items():
        if name == "shared" and RUNS[case]["objective"] == "sft":
            continue
        found = run(tmp_path, tokenizer, case, name, **changes)
        for step, expected in zip(found.steps, whole.steps, strict=True):
            assert step.loss == pytest.approx(expected.loss, rel=1e-2), (name, step.step)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=5e-2), (name, step.step)
        assert found.evals[-1].loss == pytest.approx(whole.evals[-1].loss, rel=1e-2), name
