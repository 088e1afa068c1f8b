"""A run's steps against the papers: loss, gradient and what is reported, for every loss, in one layout or another."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import written_out as paper
from tiny_rows import CONTINUATIONS, make_row, run_data
from tiny_runs import TINY, make_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from luthier.config.objective import LOSSES, ObjectiveConfig, losses_of
from luthier.encoding.tokenizer import Tokenizer
from luthier.presets import model_folder
from luthier.training.fit import fit_data
from luthier.training.report import RunResult

PAIR_LOSSES = losses_of("dpo")

ROWS = range(6)
SIZES = {**TINY, "initializer_range": 0.15}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"train__per_device_train_batch_size": 4, "train__gradient_accumulation_steps": 2},
    "packed": {"train__packing": "best_fit", "train__gradient_accumulation_steps": len(ROWS)},
    "shared": {
        "train__packing": "best_fit",
        "train__shared_prompts": True,
        "train__gradient_accumulation_steps": len(ROWS),
    },
}
SMOOTHED = {name for name, options in LOSSES.items() if "label_smoothing" in options.numbers}
PAIRS: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in PAIR_LOSSES),
    *((name, {"label_smoothing": 0.1}) for name in PAIR_LOSSES if name in SMOOTHED - {"exo_pair"}),
    ("sigmoid", {"ld_alpha": 0.4, "sft_weight": 0.7}),
    ("ipo", {"ld_alpha": 0.4}),
    ("alpha_divergence", {"divergence_alpha": 1.5}),
]
TOKENS: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}),
    ("cross_entropy", {"label_smoothing": 0.1, "z_loss": 1e-3}),
    ("dft", {"label_smoothing": 0.1}),
    ("eaft", {"eaft_alpha": 0.7}),
    ("asft", {"asft_alpha": 0.3}),
]
FEEDBACK: list[tuple[str, dict[str, float]]] = [
    ("kto", {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.05}),
    ("kto", {"sft_weight": 0.7}),
    ("apo_zero_unpaired", {"desirable_weight": 1.3, "undesirable_weight": 0.6}),
    ("bco", {"sft_weight": 0.7}),
]
Run = Callable[..., RunResult]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference model that is not the one that training begins with."""
    folder = tmp_path_factory.mktemp("other")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("tiny-qwen3"), **SIZES)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[paper.Step]:
    return paper.steps_taken(monkeypatch)


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Run:
    """``run(objective, layout, **changes)``: two steps on all rows, the second from other weights than the first."""

    def train(
        objective: dict[str, Any], layout: str, *, weighted: bool = True, held_out: range = range(0), **changes: Any
    ) -> RunResult:
        config = make_config(
            tmp_path / "run",
            objective=objective,
            model__config_overrides=dict(SIZES),
            train__max_steps=2,
            train__max_grad_norm=1e9,  # gradients as they are, not clipped
            train__learning_rate=5e-3,
            train__lr_scheduler_type="constant",
            **LAYOUTS[layout],
            **changes,
        )
        data = run_data(tmp_path / "store", config, rows=ROWS, weighted=weighted, held_out=held_out)
        return fit_data(config, tokenizer, data)

    return train


def exact(folder: Path, kind: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    return kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", **settings).eval()


def rows_of(objective: str, *, weighted: bool = True) -> list[Any]:
    count = CONTINUATIONS[objective]
    return [make_row(row, continuations=count, weighted=weighted, verdict=objective != "sft") for row in ROWS]


def numbers_of(objective: str, loss: str, given: dict[str, float]) -> dict[str, float]:
    section = ObjectiveConfig(name=objective, loss=loss, **given)
    return {key: section.number(key) for key in LOSSES[loss].numbers}


def named(cases: list[tuple[str, dict[str, float]]]) -> list[str]:
    return [" ".join([loss, *(f"{key}={value:g}" for key, value in given.items())]) for loss, given in cases]


def require_same(loss: torch.Tensor, step: paper.Step, model: Any, told: float) -> None:
    """``loss``, of ``model``, against the loss that a run told and the gradients that it had."""
    model.zero_grad()
    loss.backward()
    assert told == pytest.approx(loss.item(), rel=1e-5)
    assert paper.gradient_error(step.gradients, model) < 1e-4


@pytest.mark.parametrize(
    ("loss", "given", "layout"),
    [(*case, layout) for case, layout in zip(PAIRS, cycle(LAYOUTS), strict=False)],
    ids=named(PAIRS),
)
def test_pairs_are_learned_as_the_papers_say(
    run: Run, steps: list[paper.Step], tmp_path: Path, other: Path, loss: str, given: dict[str, float], layout: str
) -> None:
    row = PAIR_LOSSES[loss]
    weighted = row.sorts is None  # what a weight does to a sorted comparison no paper says
    reference = {"reference": {"name_or_path": str(other), "source": "model"}} if row.reference else {}
    result = run({"name": "dpo", "loss": loss, **given, **reference}, layout, weighted=weighted)
    model, numbers = exact(tmp_path / "run" / "model"), numbers_of("dpo", loss, given)
    rows, asked = rows_of("dpo", weighted=weighted), exact(other) if reference else None
    model.load_state_dict(steps[0].weights)
    with torch.no_grad():
        before = paper.pairs_of(model, asked, rows)
    model.load_state_dict(steps[1].weights)
    pairs = paper.pairs_of(model, asked, rows, ld_alpha=given.get("ld_alpha", 1.0))
    pairs.delta = float(numbers["beta"] * torch.cat([before.rc, before.rd]).mean())
    expected = (pairs.weights * paper.pair_losses(loss, numbers, pairs)).mean()
    require_same(expected, steps[1], model, result.steps[1].loss)
    lengths = (pairs.len_c, pairs.len_d) if row.per_token and not row.reference else (1, 1)
    chosen, rejected = numbers["beta"] * pairs.rc / lengths[0], numbers["beta"] * pairs.rd / lengths[1]
    measures = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).double(),
        "logps/chosen": pairs.c,
        "logps/rejected": pairs.d,
        "nll": pairs.nll / pairs.len_c.mean(),
    }
    expected_measures = {name: float(values.detach().mean()) for name, values in measures.items()}
    assert result.steps[1].measures == pytest.approx(expected_measures, rel=1e-4, abs=1e-5)


def test_the_tail_of_the_longer_answer_counts_less_without_a_reference_too(
    run: Run, steps: list[paper.Step], tmp_path: Path
) -> None:
    run({"name": "dpo", "loss": "sigmoid", "ld_alpha": 0.4, "reference": "none"}, "shared")
    model, rows = exact(tmp_path / "run" / "model"), rows_of("dpo")
    model.load_state_dict(steps[0].weights)
    pairs = paper.pairs_of(model, None, rows, ld_alpha=0.4)
    assert not torch.equal(pairs.len_c, pairs.len_d)
    (pairs.weights * paper.pair_losses("sigmoid", numbers_of("dpo", "sigmoid", {}), pairs)).mean().backward()
    assert paper.gradient_error(steps[0].gradients, model) < 1e-4


@pytest.mark.parametrize(
    ("loss", "given", "layout"),
    [(*case, layout) for case, layout in zip(TOKENS, cycle(["padded", "packed"]), strict=False)],
    ids=named(TOKENS),
)
def test_tokens_are_learned_as_the_papers_say(
    run: Run, steps: list[paper.Step], tmp_path: Path, other: Path, loss: str, given: dict[str, float], layout: str
) -> None:
    reference = {"reference": {"name_or_path": str(other), "source": "model"}} if LOSSES[loss].reference else {}
    result = run({"name": "sft", "loss": loss, **given, **reference}, layout)
    model = exact(tmp_path / "run" / "model")
    model.load_state_dict(steps[1].weights)
    asked = exact(other) if reference else None
    expected = paper.token_loss(loss, numbers_of("sft", loss, given), model, asked, rows_of("sft"))
    require_same(expected, steps[1], model, result.steps[1].loss)


@pytest.mark.parametrize(
    ("loss", "given", "layout"),
    [(*case, layout) for case, layout in zip(FEEDBACK, ("shared", "packed", "padded", "packed"), strict=True)],
    ids=named(FEEDBACK),
)
def test_verdicts_are_learned_as_the_papers_say(
    run: Run, steps: list[paper.Step], tmp_path: Path, loss: str, given: dict[str, float], layout: str
) -> None:
    result = run({"name": "kto", "loss": loss, "reference": "model", **given}, layout)
    rows, numbers = rows_of("kto"), numbers_of("kto", loss, given)
    model, reference = exact(tmp_path / "run" / "model"), exact(tmp_path / "run" / "model")
    reference.load_state_dict(steps[0].weights)
    model.load_state_dict(steps[1].weights)

    def ratio(segment: Any) -> torch.Tensor:
        with torch.no_grad():
            asked = paper.answer_logps(reference, segment)
        return (paper.answer_logps(model, segment) - asked).sum()

    with torch.no_grad():
        foreign = list(paper.strangers(steps[1], rows)) if loss == "kto" else []
        kl = max(0.0, sum(float(ratio(each)) for each in foreign) / len(foreign)) if foreign else 0.0
    assert loss != "kto" or kl > 0.01, "it takes part"
    answers = [row.segments()[0] for row in rows]
    ratios, good = torch.stack([ratio(each) for each in answers]), torch.tensor([row.verdict > 0 for row in rows])
    losses = paper.verdict_losses(loss, numbers, ratios, good, kl)  # BCO's delta is 0: no step has moved the policy
    means = torch.stack([-paper.answer_logps(model, each).mean() for each in answers])
    losses = losses + numbers["sft_weight"] * torch.where(good, means, 0.0)
    expected = (torch.tensor([paper.mean_weight(each) for each in answers]).double() * losses).mean()
    require_same(expected, steps[1], model, result.steps[1].loss)
    told = result.steps[1].measures.get("kl")
    assert told == pytest.approx(kl, rel=1e-4) if loss == "kto" else told is None, "no loss but KTO's estimates it"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts, of which routers choose some more often than others."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes), dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=1.0 if "gate.weight" in name else 0.15)
    model.save_pretrained(folder)
    return folder


def balance_of(model: Any, segments: list[Any]) -> torch.Tensor:
    """transformers' loss over all tokens of some segments, each of which goes through the model alone."""
    layers: list[list[torch.Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    for segment in segments:
        ids = torch.from_numpy(segment.input_ids.astype("int64"))[None]
        found = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
        for kept, logits in zip(layers, found, strict=True):
            kept.append(logits)
    return load_balancing_loss_func(tuple(map(torch.cat, layers)), model.config.num_experts, 2)


@pytest.mark.parametrize(("objective", "layout"), [("dpo", "padded"), ("dpo", "shared"), ("kto", "shared")])
def test_experts_are_balanced_over_the_answers_that_are_learned_and_no_others(
    run: Run, steps: list[paper.Step], tmp_path: Path, experts: Path, objective: str, layout: str
) -> None:
    """Neither the reference's passes count nor those by which the KL is estimated; a shared prompt does, for each."""
    loss = {"dpo": "sigmoid", "kto": "kto"}[objective]
    settings = {"model": {"name_or_path": str(experts)}, "train__router_aux_loss_coef": 0.5}
    result = run({"name": objective, "loss": loss, "reference": "model"}, layout, weighted=False, **settings)
    rows, numbers = rows_of(objective, weighted=False), numbers_of(objective, loss, {})
    model, reference = (exact(experts, experts_implementation="eager") for _ in range(2))
    model.load_state_dict(steps[1].weights)
    if objective == "dpo":
        expected = paper.pair_losses(loss, numbers, paper.pairs_of(model, reference, rows)).mean()
    else:

        def ratio(segment: Any) -> torch.Tensor:
            with torch.no_grad():
                asked = paper.answer_logps(reference, segment)
            return (paper.answer_logps(model, segment) - asked).sum()

        with torch.no_grad():
            kl = max(0.0, float(torch.stack([ratio(each) for each in paper.strangers(steps[1], rows)]).mean()))
        good = torch.tensor([row.verdict > 0 for row in rows])
        ratios = torch.stack([ratio(row.segments()[0]) for row in rows])
        expected = paper.verdict_losses(loss, numbers, ratios, good, kl).mean()
    balance = balance_of(model, [segment for row in rows for segment in row.segments()])
    model.zero_grad()
    (expected + 0.5 * balance).backward()
    assert result.steps[1].loss == pytest.approx(expected.item(), rel=1e-5), "loss is the objective's own"
    assert result.steps[1].measures["router_aux_loss"] == pytest.approx(balance.item(), rel=1e-5)
    assert paper.gradient_error(steps[1].gradients, model) < 1e-4
    assert balance.item() > 2.01, "it is 2 where all experts are chosen alike"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewards_are_learned_as_the_paper_says(run: Run, steps: list[paper.Step], tmp_path: Path, layout: str) -> None:
    result = run({"name": "rm", "center_rewards": 0.01}, layout)
    model = exact(tmp_path / "run" / "model", AutoModelForSequenceClassification)
    model.load_state_dict(steps[1].weights)
    losses = []
    for row in rows_of("rm"):
        ids = [torch.from_numpy(each.input_ids.astype("int64"))[None] for each in row.segments()]
        chosen, rejected = (model.score(model.model(each, use_cache=False).last_hidden_state[0, -1]) for each in ids)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected - row.verdict) + 0.01 * (chosen + rejected) ** 2
        losses.append(paper.mean_weight(row.segments()[0]) * loss)
    require_same(torch.cat(losses).mean(), steps[1], model, result.steps[1].loss)


def test_a_number_that_is_off_by_a_hundredth_would_show(run: Run, steps: list[paper.Step], tmp_path: Path) -> None:
    """Control, of losses and of gradients."""
    result = run({"name": "dpo", "loss": "simpo"}, "packed")
    model, numbers = exact(tmp_path / "run" / "model"), numbers_of("dpo", "simpo", {})
    model.load_state_dict(steps[1].weights)
    pairs = paper.pairs_of(model, None, rows_of("dpo"))
    wrong = (pairs.weights * paper.pair_losses("simpo", {**numbers, "gamma": 1.01}, pairs)).mean()
    wrong.backward()
    assert abs(result.steps[1].loss / wrong.item() - 1) > 1e-4
    assert paper.gradient_error(steps[1].gradients, model) > 1e-4


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        ({"name": "sft", "label_smoothing": 0.1, "z_loss": 0.1}, "packed"),
        ({"name": "dpo", "loss": "aot"}, "shared"),
        ({"name": "kto", "reference": "model"}, "shared"),
    ],
)
def test_held_out_rows_are_told_with_the_entropy_of_their_targets(
    run: Run, tmp_path: Path, objective: dict[str, Any], layout: str
) -> None:
    layout = {"eval__strategy": "steps", "eval__steps": 2} | {"layout": layout}
    result = run(objective, weighted=False, held_out=range(6, 9), **layout)
    model, entropies, nll = exact(tmp_path / "run" / "model"), [], []
    for row in (make_row(row, continuations=CONTINUATIONS[objective["name"]]) for row in range(6, 9)):
        for segment in row.segments():
            with torch.no_grad():
                _, logits_NV = paper.target_logits(model, segment.input_ids, segment.target)
                nll.append(-paper.answer_logps(model, segment))
            entropies.append(torch.distributions.Categorical(logits=logits_NV).entropy())
    found = result.evals[-1]
    assert found.measures["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)
    if objective["name"] == "sft":  # held-out rows are told by plain cross-entropy, whatever is learned by
        assert found.loss == pytest.approx(float(torch.cat(nll).mean()), rel=1e-4)
    assert all("entropy" not in step.measures for step in result.steps), "it would cost a pass over the logits"
