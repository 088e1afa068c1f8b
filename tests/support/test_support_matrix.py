"""What the support matrix says is so: every cell was trained, layouts agree, and the page says what runs said."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
import support_matrix as matrix
import torch
from support_matrix import FAMILIES, LAYOUTS, OBJECTIVES, Cell, Outcome, Verdict

from luthier.config.choices import AdapterType, QuantizationType, RatePart
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import AdapterConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.training import fit

PAGE = Path(__file__).parents[2] / "docs" / "support_matrix.md"
Outcomes = dict[Cell, Outcome]


@pytest.fixture(scope="module")
def methods(root: Path, outcomes: Outcomes, tokenizer: Tokenizer) -> dict[str, tuple[float, float]]:
    return matrix.support_methods(root, tokenizer)


@pytest.fixture(scope="module")
def refused(root: Path, methods: dict[str, tuple[float, float]]) -> dict[str, str]:
    return matrix.refused_methods(root)


def test_the_page_says_what_runs_say(outcomes: Outcomes, refused: dict[str, str]) -> None:
    page, found = PAGE.read_text(encoding="utf-8"), matrix.support_page(outcomes, refused)
    packed = [f"a model that comes in {form}" for form in matrix.PACKED]
    assert all(f"| {name} | learns |" in found for name in packed)
    # with these packages, or with a GPU, rows come out otherwise than where the page was made
    optimizers = [f"`train.optim: {name}`" for name in matrix.ON_GPU_ALONE if torch.cuda.is_available()]
    for name in packed + optimizers:
        assert f"\n| {name} |" in page
        page, found = (re.sub(rf"\n\| {re.escape(name)} \|.*", "", text) for text in (page, found))
    assert found == page, "run make docs"


def test_every_method_of_the_page_learns(methods: dict[str, tuple[float, float]]) -> None:
    assert {name: losses for name, losses in methods.items() if not losses[1] < losses[0] - 0.005} == {}
    # an adapter that is gone on from, or merged first, brings what it has learned
    plain = methods["`adapter.type: lora`"][0]
    assert methods["`adapter.name_or_path`"][0] < plain - 0.5
    assert methods["`adapter.merge_first`, of two adapters"][0] < plain - 0.5


def test_every_choice_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    ways = get_args(get_args(AdapterConfig.model_fields["init_lora_weights"].annotation)[1])
    rows = [
        *(f"`train.optim: {name}`" for name in OPTIMIZERS),
        *(f"`adapter.type: {kind}`" for kind in AdapterType),
        *(f"`adapter.init_lora_weights: {way}`" for way in ways if way != "loftq"),  # that one needs a quantized base
        *(f"`model.quantization: {how}`" for how in QuantizationType if how is not QuantizationType.NONE),
        *(f"`train.learning_rates`, of the {part} alone" for part in RatePart),
        *(f"a model that comes in {method}" for method in ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4")),
    ]
    assert [row for row in rows if f"| {row} |" not in page] == []


def test_families_of_attention_are_trained_in_every_way_without_falling_back(outcomes: Outcomes) -> None:
    tried = {cell for cell in outcomes if cell.family != "mamba"}
    assert len(tried) == (len(FAMILIES) - 1) * len(OBJECTIVES) * len(LAYOUTS) * 3
    assert {cell: outcomes[cell] for cell in tried if outcomes[cell].verdict is not Verdict.OK} == {}


def test_the_step_is_the_same_in_all_layouts(outcomes: Outcomes) -> None:
    """What falls back trains the same, too."""
    by_step: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for cell, outcome in outcomes.items():
        if outcome.verdict is not Verdict.REFUSED:
            by_step[cell.family, cell.objective, cell.adapter].append(outcome)
    assert len(by_step) > 70
    for step, found in by_step.items():
        assert len(found) == 3, step
        first = found[0]
        assert first.loss is not None and first.grad_norm is not None
        assert math.isfinite(first.loss) and first.grad_norm > 1e-3, step
        for other in found[1:]:
            assert other.loss == pytest.approx(first.loss, rel=1e-4), step
            assert other.grad_norm == pytest.approx(first.grad_norm, rel=1e-4), step


def test_adapters_begin_with_the_loss_of_the_model_itself(outcomes: Outcomes) -> None:
    """Else a reference of another model was read: two families have the same weights here, and other windows."""
    for cell, outcome in outcomes.items():
        full = outcomes[Cell(cell.family, cell.objective, cell.layout, "full")]
        if outcome.verdict is not Verdict.REFUSED:
            assert outcome.loss == pytest.approx(full.loss, rel=1e-5), cell


def test_a_model_with_a_state_falls_back_and_says_why(outcomes: Outcomes) -> None:
    packed = outcomes[Cell("mamba", "sft", "packed", "full")]
    assert packed.verdict is Verdict.FALLS_BACK and "carry a state from token to token" in packed.reason
    assert outcomes[Cell("mamba", "sft", "padded", "full")].verdict is Verdict.OK


def test_a_cell_that_is_tried_again_comes_out_the_same(root: Path, outcomes: Outcomes, tokenizer: Tokenizer) -> None:
    cell = Cell("gemma3", "kto", "shared", "lora")
    assert matrix.try_cell(root, tokenizer, cell) == outcomes[cell]


def test_a_cell_can_come_out_otherwise(
    root: Path, outcomes: Outcomes, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: what is demanded and not there is refused, and what is no `UserError` is not taken for a refusal."""
    cell = Cell("mamba", "dpo", "packed", "full")
    assert outcomes[cell].verdict is Verdict.FALLS_BACK
    found = matrix.try_cell(root, tokenizer, cell, attention="eager")
    assert found.verdict is Verdict.REFUSED and found.loss is None
    assert found.reason.startswith("MambaForCausalLM does not keep packed sequences apart")
    other = dict(outcomes) | {cell: found}
    assert matrix.support_page(other, {}) != matrix.support_page(outcomes, {})

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(fit, "make_model", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        matrix.try_cell(root, tokenizer, Cell("llama", "sft", "packed", "lora"))
