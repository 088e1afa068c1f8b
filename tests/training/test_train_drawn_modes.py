"""Runs that learn from answers of their own: whole weights, some layers, adapters on whole and quantized bases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_rollouts import ROLLOUT, evenness, losses, micro_batch_counts, rollouts, step_gradients
from tiny_runs import TINY, make_data, make_segments

from luthier.engines import Completion, Refusal, Request
from luthier.engines.answering import Answering
from luthier.engines.local import LocalEngine
from luthier.errors import TrainingError
from luthier.metrics import METRICS, Metric
from luthier.training.folder.run_folder import ROLLOUTS_FOLDER
from luthier.training.report import RunResult
from luthier.training.rollouts import answers_file
from luthier.training.rollouts.sampler_probes import Cause
from luthier.training.trainer import Trainer

Train = Callable[..., RunResult]
LORA: dict[str, Any] = {"type": "lora", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "freeze": {"adapter": {"type": "freeze", "freeze_trainable_layers": 1}},
    "lora": {"adapter": LORA},
    "dora": {"adapter": {**LORA, "use_dora": True}},
    "nf4": {"adapter": LORA, "quantization": "nf4"},
    "int8": {"adapter": LORA, "quantization": "int8"},
}
# each way with one objective, each objective with one way or two: all of them would take minutes
TRIED = [
    *(("rl", way) for way in WAYS if way != "full"),
    *(("ppo", way) for way in ("freeze", "int8")),
    ("opd", "lora"),
    ("gkd", "nf4"),
    ("best_of_n", "lora"),
    ("online_dpo", "dora"),
]
FOLLOWS_TEACHER = ("opd", "gkd")
STOP = 2034
IN_PARTS = ("rl", "ppo", "lora")
UNEVEN, SHARDINGS = ("dapo", "grpo", "dr_grpo", "ppo"), ("none", "fsdp")  # one for each divisor, and with a value head
RANKS = Path(__file__).with_name("tiny_drawn_ranks.py")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # PEFT's
)


@pytest.fixture(autouse=True)
def _a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "evenness", Metric(of_row=evenness))


def objectives(teacher: Path) -> dict[str, dict[str, Any]]:
    named = {"reference": {"name_or_path": str(teacher)}}
    return {
        "rl": {"objective": {"name": "rl", "loss": "dapo"}},
        "ppo": {"objective": {"name": "rl", "loss": "ppo", "kl_weight": 0.01}},
        "opd": {"objective": {"name": "distill", "loss": "opd", **named}},
        "gkd": {"objective": {"name": "distill", "loss": "gkd", **named}},
        "best_of_n": {"objective": "best_of_n"},
        "online_dpo": {"objective": "online_dpo"},
    }


def odd_share(run: RunResult) -> list[float]:
    """Of the drawn tokens of each step; `knows_half` gives none."""
    steps = [[number for one in step for number in one["ids"] if number != STOP] for step in rollouts(run.path)]
    return [float(np.mean([number % 2 for number in step])) for step in steps]


@pytest.mark.parametrize(("objective", "way"), TRIED)
def test_what_is_trained_in_any_way_learns_from_its_own_answers(
    objective: str, way: str, knows_few: Path, knows_half: Path, train: Train
) -> None:
    """Of prompts that the model knows: what it answers to others is chance, and ends with the first step."""
    changes = dict(WAYS[way])
    rows = make_segments(12)
    for row in rows:
        row.input_ids[:] = np.where(row.input_ids == STOP, STOP, 10 + row.input_ids % 20)
    run = train(
        make_data(rows),
        model={"name_or_path": str(knows_few), "quantization": changes.pop("quantization", None)},
        rollout={**ROLLOUT, "answers": 16, "max_new_tokens": 2},
        data__max_length=64,
        train__max_steps=24,
        train__learning_rate=3.5e-3,
        **objectives(knows_half)[objective],
        **changes,
    )
    follows = objective in FOLLOWS_TEACHER
    told = [-share for share in odd_share(run)] if follows else [step.measures["reward"] for step in run.steps]
    assert np.mean(told[-3:]) > np.mean(told[:2]) + 0.08, told
    gaps = [step.measures["gap"] for step in run.steps if "gap" in step.measures]
    assert all(gap < (2e-2 if way == "int8" else 1e-5) for gap in gaps)  # its layers round what they read
    assert bool(gaps) == (objective in ("rl", "ppo", "opd"))


def test_answers_are_drawn_and_learned_without_dropout(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_training: list[bool] = []
    real = Answering.step

    def step(self: Answering) -> None:
        in_training.append(self.answerer.model.training)
        real(self)

    monkeypatch.setattr(Answering, "step", step)
    model = {"name_or_path": "preset:tiny-qwen3", "config_overrides": {**TINY, "attention_dropout": 0.5}}
    told: list[str] = []
    run = train(
        make_data(make_segments(12)),
        model=model,
        objective="rl",
        rollout=ROLLOUT,
        data__max_length=64,
        on_event=lambda event: told.append(getattr(event, "text", "")),
    )
    assert max(step.measures["gap"] for step in run.steps) < 1e-5
    assert in_training and not any(in_training)
    assert sum("no dropout (attention_dropout 0.5)" in text for text in told) == 1
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["attention_dropout"] == 0.5, "it is the model's own, for other runs"


def test_a_step_may_learn_several_times_from_its_answers_and_stays_one_step(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated: list[int] = []
    real = Trainer.update

    def update(self: Trainer, number: int = 0) -> None:
        updated.append(number)
        real(self, number)

    monkeypatch.setattr(Trainer, "update", update)
    changes: dict[str, Any] = {"objective": "rl", "data__max_length": 64, "train__learning_rate": 1e-2}
    changes |= {"train__max_steps": 3, "train__warmup_steps": 0, "train__lr_scheduler_type": "linear"}
    once = train(make_data(make_segments(12)), folder="once", rollout=ROLLOUT, **changes)
    assert updated == [0, 0, 0]
    saving = {"output__save_strategy": "steps", "output__save_steps": 1}
    rollout = {**ROLLOUT, "passes": 3}
    run = train(make_data(make_segments(12)), rollout=rollout, **changes, **saving)
    assert updated[3:] == [0, 1, 2] * 3
    drawn = [rollouts(each.path) for each in (once, run)]
    assert drawn[0][0] == drawn[1][0] and drawn[0][1] != drawn[1][1], "the first answers are those of the first weights"
    rows = [[{answer["row"] for answer in step} for step in each] for each in drawn]
    assert rows[0] == rows[1] and run.ledger == once.ledger
    assert [step.learning_rate for step in run.steps] == [step.learning_rate for step in once.steps]
    assert max(step.measures["clipped"] for step in run.steps) > 0 == max(s.measures["clipped"] for s in once.steps)
    assert max(step.measures["gap"] for step in run.steps) < 1e-5
    # a run that goes on behind a step learns what it would have
    shutil.rmtree(run.path / "checkpoint-3")
    again = train(make_data(make_segments(12)), rollout=rollout, **changes, **saving)
    assert losses(again)[-1] == losses(run)[-1] and rollouts(again.path) == drawn[1]


@pytest.mark.parametrize("objective", ["ppo", "gkd", "best_of_n", "online_dpo"])
def test_every_objective_takes_several_passes(objective: str, knows_few: Path, knows_half: Path, train: Train) -> None:
    chosen = objectives(knows_half)[objective]
    changes = {"model": {"name_or_path": str(knows_few)}, "data__max_length": 64, "train__max_steps": 1}
    runs = [
        train(make_data(make_segments(12)), folder=str(n), rollout={**ROLLOUT, "passes": n}, **chosen, **changes)
        for n in (1, 2)
    ]
    weights = [load_file(run.path / "model" / "model.safetensors") for run in runs]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_canaries_and_gaps_hold_at_another_temperature_where_several_steps_share_their_answers(
    knows_few: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = {**ROLLOUT, "temperature": 0.6, "updates": 2, "passes": 2}
    changes: dict[str, Any] = {"objective": "rl", "model": {"name_or_path": str(knows_few)}, "rollout": rollout}
    run = train(make_data(make_segments(12)), data__max_length=64, train__learning_rate=1e-2, **changes)
    assert [step.measures.get("gap", 1.0) < 1e-5 for step in run.steps] == [True, False, True, False]
    real = LocalEngine.generate

    def forgetful(self: LocalEngine, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        return real(self, [replace(request, tempered=False) for request in requests])

    monkeypatch.setattr(LocalEngine, "generate", forgetful)
    with pytest.raises(TrainingError) as caught:
        train(make_data(make_segments(12)), folder="other", data__max_length=64, **changes)
    assert Cause.TEMPERATURE in caught.value.message


def test_control_other_objectives_train_with_the_dropout_of_the_model(train: Train) -> None:
    found = []
    for share in (0.0, 0.5):
        model = {"name_or_path": "preset:tiny-qwen3", "config_overrides": {**TINY, "attention_dropout": share}}
        found.append(losses(train(make_data(make_segments(4)), folder=str(share), model=model, train__max_steps=1)))
    assert found[0] != found[1]


def of_ranks(model: Path, teacher: Path) -> dict[str, dict[str, Any]]:
    """Runs for two ranks, each of which draws the answers to half of a step's prompts."""
    shared = {"model": {"name_or_path": str(model)}, "data__max_length": 64, "train__max_steps": 3}
    shared |= {"rollout": {**ROLLOUT, "updates": 2, "dead_groups": "keep"}, "train__learning_rate": 1e-2}
    chosen = objectives(teacher)
    lora = {"objective": {"name": "rl", "loss": "grpo", "kl_weight": 0.1}, "adapter": LORA}
    jobs = {name: {**shared, **chosen[name]} for name in ("rl", "ppo", "online_dpo")} | {"lora": {**shared, **lora}}
    anew = {**shared["rollout"], "rewards": ["matches:(..)*"], "dead_groups": "resample"}
    jobs["other prompts"] = {**shared, **chosen["rl"], "rollout": anew}
    in_parts = {"runtime__sharding": "fsdp", "eval__generate_rows": 2, "train__per_device_train_batch_size": 1}
    jobs |= {f"{name} in parts": {**jobs[name], **in_parts} for name in IN_PARTS}
    return jobs | {f"{loss}, {sharding}": uneven(model, loss, sharding) for loss in UNEVEN for sharding in SHARDINGS}


def uneven(model: Path, loss: str, sharding: str) -> dict[str, Any]:
    """One step in micro-batches of 34 tokens, which hold one prompt with its answers, or two."""
    return {
        "model": {"name_or_path": str(model)},
        "objective": {"name": "rl", "loss": loss},
        "rollout": {**ROLLOUT, "prompts_per_step": 6},
        "data__max_length": 34,
        "train__max_steps": 1,
        "train__packing": "best_fit",
        "train__per_device_train_batch_size": 1,
        "runtime__sharding": sharding,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, knows_few: Path, knows_half: Path) -> Path:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    jobs = of_ranks(knows_few, knows_half)
    saving = {"output__save_strategy": "steps", "output__save_steps": 2, "train__lr_scheduler_type": "constant"}
    goes_on = {**jobs["ppo in parts"], **saving}
    jobs |= {name: {**goes_on, "train__max_steps": steps} for name, steps in (("whole", 4), ("first part", 2))}
    jobs["second part"] = {**jobs["whole"], "output__dir": str(folder / "first part")}
    errors = folder / "stderr"
    assert run_ranks(RANKS, str(folder), json.dumps(jobs), errors=errors) == [0, 0], errors.read_text()
    return folder


@pytest.mark.parametrize(
    "name", ["rl", "ppo", "online_dpo", "lora", "other prompts", *(f"{name} in parts" for name in IN_PARTS)]
)
def test_two_ranks_draw_and_learn_what_one_process_does(
    name: str, ranks: Path, knows_few: Path, knows_half: Path, train: Train
) -> None:
    """With a value head, too, whose gradients are added up like all others."""
    two = RunResult.load(ranks / name)
    job = of_ranks(knows_few, knows_half)[name]
    one = train(
        make_data(make_segments(12), make_segments(3) if "eval__generate_rows" in job else ()), folder="one", **job
    )
    assert two.world_size == 2
    assert ("sharded over 2 ranks" in (ranks / f"{name}.notes").read_text()) == name.endswith("in parts")
    assert [round_.metrics for round_ in two.generations] == [round_.metrics for round_ in one.generations]
    drawn = [[sorted((a["row"], a["sample"], a["ids"]) for a in step) for step in _by_step(r.path)] for r in (one, two)]
    assert drawn[0] == drawn[1] and two.answers == one.answers
    assert name != "other prompts" or any(step.measures["asked_anew"] for step in one.steps)
    assert losses(two) == pytest.approx(losses(one), rel=1e-3, abs=1e-5)
    norms = [[step.grad_norm for step in run.steps] for run in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    for step, other in zip(two.steps, one.steps, strict=True):
        assert step.measures == pytest.approx(other.measures, rel=1e-3, abs=1e-5)


def test_a_value_head_beside_shared_weights_goes_on_where_it_was(ranks: Path) -> None:
    whole, parts = RunResult.load(ranks / "whole"), RunResult.load(ranks / "first part")
    assert [step.step for step in parts.steps] == [1, 2, 3, 4] and losses(parts) == losses(whole)
    states = [json.loads((run.path / "checkpoint-4" / "objective_state.json").read_text()) for run in (whole, parts)]
    assert states[0] == states[1] and any(states[0]["value_head"]["weight"])


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("loss", UNEVEN)
def test_ranks_with_unequal_numbers_of_micro_batches_have_one_normaliser(
    loss: str, sharding: str, ranks: Path, knows_few: Path, train: Train
) -> None:
    """Targets, answers and a constant are divided by as one process does."""
    name = f"{loss}, {sharding}"
    with step_gradients() as gradients, micro_batch_counts() as counts:
        one = train(make_data(make_segments(12)), folder="one", **uneven(knows_few, loss, "none"))
    two, numbers = (
        RunResult.load(ranks / name),
        [json.loads((ranks / f"{name}.rank{r}.json").read_text()) for r in (0, 1)],
    )
    assert numbers[0] != numbers[1] and sum(counts) > 2, (numbers, counts)
    files = [answers_file(ranks / name, 0, rank).read_text().splitlines() for rank in (0, 1)]
    targets = [sum(len(json.loads(line)["ids"]) for line in lines) for lines in files]
    assert targets[0] != targets[1]
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
    found = load_file(ranks / f"{name}.gradients")["first"]
    assert float(gradients[0].norm()) > 1e-2
    assert float((found - gradients[0]).norm()) < 1e-6 * float(gradients[0].norm())


def _by_step(folder: Path) -> list[list[dict[str, Any]]]:
    """The answers of all ranks."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((folder / ROLLOUTS_FOLDER).glob("*.jsonl")):
        found.setdefault(file.name[:6], []).extend(json.loads(line) for line in file.read_text().splitlines())
    return [found[step] for step in sorted(found)]
