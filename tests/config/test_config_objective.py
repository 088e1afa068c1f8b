"""The objective section: each loss has its own keys, rows and reference, and every mistake is told with its line."""

from __future__ import annotations

import pytest
import torch

from luthier.config.loading import load_config_text
from luthier.config.objective import LOSSES, ReferenceSource, losses_of
from luthier.errors import ConfigError
from luthier.objectives.pair_formulas import NO_BASELINES, PairScores, PairSettings

PAIR_LOSSES = losses_of("dpo")

BASE = "model: preset:tiny-qwen3\ndata: {train: rows.jsonl}\n"


def load(text: str, base: str = BASE):
    return load_config_text(base + text, name="run.yaml", check_paths=False)


def told(text: str, base: str = BASE) -> list[str]:
    try:
        load(text, base)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def chosen(loss):
    """The objective and the loss, with what that objective cannot do without."""
    family = LOSSES[loss].objectives[0]
    return f"name: {family}, loss: {loss}{', reference: {name_or_path: teacher}' if family == 'distill' else ''}"


@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_loss_can_be_chosen_by_its_name_alone(loss):
    objective = load(f"objective: {{{chosen(loss)}}}").objective
    assert objective.loss_name == loss
    assert {key: objective.number(key) for key in LOSSES[loss].numbers} == LOSSES[loss].numbers
    held_near = LOSSES[loss].numbers.get("kl_weight", 0) > 0
    assert objective.needs_reference is (LOSSES[loss].reference or held_near)


@pytest.mark.parametrize("family", ["sft", "pt", "rm", "dpo", "kto"])
def test_a_family_stands_for_its_first_loss(family):
    objective = load(f"objective: {family}").objective
    assert family in LOSSES[objective.loss_name].objectives and objective.loss is None


@pytest.mark.parametrize("loss", list(LOSSES))
def test_every_number_of_a_loss_can_be_set_and_every_other_is_refused(loss):
    own = LOSSES[loss].numbers
    for key in {key for options in LOSSES.values() for key in options.numbers}:
        value = 1 if key == "gkd_top_k" else 0.25
        text = f"objective: {{{chosen(loss)}, {key}: {value}}}"
        if key in own:
            assert load(text).objective.number(key) == value
        else:
            (problem,) = told(text)
            assert problem.startswith(f"run.yaml:3 objective.{key}: the loss {loss} has no such number"), problem


FAULTS = {
    "foreign loss": (
        "objective:\n  name: sft\n  loss: simpo",
        ("run.yaml:5 objective.loss", "simpo is a loss of objective dpo", "objective.name (line 4) is sft"),
    ),
    "robust": (
        "objective: {name: dpo, loss: robust, label_smoothing: 0.5}",
        ("run.yaml:3 objective.label_smoothing", "no better than chance", "below 0.5"),
    ),
    "discount": ("objective: {name: dpo, ld_alpha: 1.5}", ("run.yaml:3 objective.ld_alpha", "at most 1", "1.5")),
    "beta": ("objective: {name: dpo, beta: 0}", ("run.yaml:3 objective.beta", "above 0")),
    "reference of a loss without": (
        "objective:\n  name: dpo\n  loss: simpo\n  reference: model",
        ("run.yaml:6 objective.reference.source", "simpo compares with no reference", "remove"),
    ),
    "another model for a loss without": (
        "objective: {loss: dft, reference: {name_or_path: org/model}}",
        ("run.yaml:3 objective.reference.name_or_path", "dft compares with no reference"),
    ),
    "base without adapter": (
        "objective: {name: dpo, reference: base}",
        ("run.yaml:3 objective.reference.source", "adapter.type (default) is full", "precomputed"),
    ),
    "base and another": (
        "adapter: lora\nobjective: {name: dpo, reference: {source: base, name_or_path: org/model}}",
        ("run.yaml:4 objective.reference.source", "names another", "model or precomputed"),
    ),
    "none and another": (
        "objective: {name: dpo, reference: {source: none, name_or_path: org/model}}",
        ("run.yaml:3 objective.reference.source", "names one", "keep one"),
    ),
    "kto without reference": (
        "objective: {name: kto, reference: none}",
        ("run.yaml:3 objective.reference.source", "kto measures each answer by itself against a reference"),
    ),
    "asft precomputed": (
        "objective: {loss: asft, reference: precomputed}",
        ("run.yaml:3 objective.reference.source", "whole distributions", "base or model"),
    ),
    "quantized where there is no second model": (
        "objective: {name: dpo, reference: {source: precomputed, quantization: int8}}",
        ("run.yaml:3 objective.reference.quantization", "is precomputed, which holds no second model", "source: model"),
    ),
    "quantized for a loss without": (
        "objective: {name: dpo, loss: simpo, reference: {quantization: nf4}}",
        ("run.yaml:3 objective.reference.quantization", "simpo compares with no reference"),
    ),
    "unknown quantization": (
        "objective: {name: dpo, reference: {quantization: int3}}",
        ("run.yaml:3 objective.reference.quantization", "none, nf4, fp4, int8"),
    ),
    "unknown source": (
        "objective: {name: dpo, reference: copy}",
        ("run.yaml:3 objective.reference.source", "auto, base, model, precomputed, none"),
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_each_fault_is_told_with_its_place_and_its_way_out(name):
    text, expected = FAULTS[name]
    (problem,) = told(text)
    for part in expected:
        assert part in problem, problem


@pytest.mark.parametrize(
    ("kind", "objective", "fits"),
    [
        ("preference", "dpo", True),
        ("preference", "rm", True),
        ("preference", "kto", False),
        ("preference", "sft", False),
        ("feedback", "kto", True),
        ("feedback", "dpo", False),
        ("prompt_completion", "dpo", False),
        ("text", "kto", False),
        ("text", "pt", True),
        ("alpaca", "dpo", True),
        ("sharegpt", "kto", True),
        ("auto", "rm", True),
    ],
)
def test_rows_must_be_of_a_kind_that_the_objective_learns_from(kind, objective, fits):
    base = f"model: preset:tiny-qwen3\ndata: {{train: [{{path: rows.jsonl, format: {kind}}}]}}\n"
    problems = told(f"objective: {objective}", base)
    if fits:
        assert problems == []
    else:
        (problem,) = problems
        assert (
            problem.startswith("run.yaml:2 data.train[0].format: ")
            and f"objective.name (line 3) is {objective}" in problem
        )


def test_a_reference_may_be_left_out_where_the_loss_can_do_without():
    objective = load("objective: {name: dpo, loss: ipo, reference: none}").objective
    assert objective.reference.source is ReferenceSource.NONE and not objective.needs_reference
    assert load("objective: {name: dpo, loss: simpo, reference: none}").objective.needs_reference is False
    assert load("adapter: lora\nobjective: {name: dpo, reference: base}").objective.needs_reference


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("pref_loss", "objective.loss"),
        ("pref_ftx", "objective.sft_weight"),
        ("simpo_gamma", "objective.gamma"),
        ("loss_type", "objective.loss"),
        ("rpo_alpha", "objective.sft_weight"),
        ("ref_model", "objective.reference"),
    ],
)
def test_names_of_other_tools_lead_to_ours(theirs, ours):
    assert any(ours in problem for problem in told(f"{theirs}: 1"))


def test_a_loss_named_as_the_objective_is_told_where_it_belongs():
    (problem,) = told("objective: simpo")
    assert "simpo is a loss: write objective: {name: dpo, loss: simpo}" in problem
    (problem,) = told("objective: {name: dpo, loss: kto_pair, reference: auto, beta: 1}\ntrain: {max_steps: x}")
    assert "is a loss" not in problem


def test_an_objective_named_as_the_loss_is_told_with_its_losses():
    (problem,) = told("objective: {name: dpo, loss: rm}")
    assert "rm is an objective: write objective: {name: rm}; its losses are bradley_terry" in problem


@pytest.mark.parametrize("name", [name for name, options in LOSSES.items() if options.reference])
def test_only_losses_that_cancel_a_reference_out_do_without_one(name: str) -> None:
    """A reference that finds both answers alike must change nothing: then there may as well be none."""
    family, is_free = LOSSES[name].objectives[0], LOSSES[name].reference_free
    problems = told(f"objective: {{name: {family}, loss: {name}, reference: none}}\ntrain: {{max_steps: x}}")
    assert any("objective.reference.source" in problem for problem in problems) != is_free
    if family != "dpo":
        return
    loss, chosen, rejected = PAIR_LOSSES[name], torch.tensor([-3.0, -1.0]), torch.tensor([-1.5, -4.0])
    settings = PairSettings(label_smoothing=0.1)

    def value(reference: float) -> torch.Tensor:
        length = torch.tensor([2, 2])
        scores = PairScores(
            chosen_P=chosen, rejected_P=rejected, ref_chosen_P=torch.full((2,), reference),
            ref_rejected_P=torch.full((2,), reference), chosen_lengths_P=length, rejected_lengths_P=length,
        )  # fmt: skip
        return loss.compute(scores, settings, NO_BASELINES)

    assert torch.allclose(value(0.0), value(-7.0)) == is_free
