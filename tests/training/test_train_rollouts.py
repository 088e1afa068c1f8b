"""Runs that learn from answers of their own: the same under any layout and after a kill, and true to what was drawn."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_rollouts import LAYOUTS, ROLLOUT, evenness, ids, losses, rollouts, step_gradients
from tiny_runs import make_config, make_data, make_segments

from luthier.config.loading import load_draft
from luthier.config.objective import LOSSES, losses_of
from luthier.config.rollout import RolloutConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Refusal, Request
from luthier.engines.local import LocalEngine
from luthier.errors import CheckpointError, ConfigError, TrainingError, UserError
from luthier.loader.settings import train_settings
from luthier.metrics import METRICS, Metric
from luthier.training.fit import fit_data
from luthier.training.folder.run_folder import ROLLOUTS_FOLDER
from luthier.training.losses.policies import PolicyBaselines, PolicyLosses
from luthier.training.preflight import check_run
from luthier.training.report import RunResult
from luthier.training.report.events import Note
from luthier.training.rollouts import drawing
from luthier.training.rollouts.drawing import NO_QUESTION, NOT_STOPPED

Train = Callable[..., RunResult]
RL: dict[str, Any] = {
    "objective": {"name": "rl", "loss": "dapo"},
    "rollout": ROLLOUT,
    "data__max_length": 64,
}


@pytest.fixture(autouse=True)
def _a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "evenness", Metric(of_row=evenness))


LEARNS = {
    "rollout": {**RL["rollout"], "answers": 8},
    "train__max_steps": 15,
    "train__learning_rate": 1e-2,
}


def test_other_code_of_a_reward_than_before_is_told(train: Train, tmp_path: Path) -> None:
    code, told = tmp_path / "judge.py", list[list[str]]()
    own = {**RL, "rollout": {**ROLLOUT, "rewards": [{"function": f"{code}:reward"}]}}
    saving = {"output__save_strategy": "steps", "output__save_steps": 1}
    for number, steps in ((1, 1), (1, 2), (2, 3)):
        code.write_text(f"def reward(answer):\n    return len(answer) * {number}\n", encoding="utf-8")
        notes = list[str]()
        told.append(notes)
        hears = lambda event, notes=notes: notes.append(event.text) if isinstance(event, Note) else None  # noqa: E731
        train(make_data(make_segments(12)), on_event=hears, train__max_steps=steps, **own, **saving)
    assert [sum("has changed since checkpoint" in note for note in notes) for notes in told] == [0, 0, 1]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "gspo", "rloo", "reinforce_pp", "ppo"])
def test_steps_do_not_depend_on_how_answers_are_laid_out(loss: str, train: Train) -> None:
    runs = {}
    for name, layout in LAYOUTS.items():
        changes = {**RL, "objective": {"name": "rl", "loss": loss}, **layout}
        runs[name] = train(make_data(make_segments(12)), folder=name, train__max_steps=3, **changes)
    alone = runs.pop("alone")
    assert all(step.grad_norm > 1e-3 for step in alone.steps), "there is something to learn"
    for name, run in runs.items():
        assert losses(run) == pytest.approx(losses(alone), abs=2e-6), name
        norms = [step.grad_norm for step in run.steps]
        assert norms == pytest.approx([step.grad_norm for step in alone.steps], rel=1e-4), name
        assert ids(run) == ids(alone), name
    for step in alone.steps:
        assert step.measures["gap"] < 1e-5 and step.measures["clipped"] == 0


@pytest.mark.parametrize("loss", losses_of("rl"))
def test_every_loss_teaches_what_is_rewarded(loss: str, knows_few: Path, train: Train) -> None:
    objective = {"name": "rl", "loss": loss, "kl_weight": 0.01}
    changes = {**RL, **LEARNS, "objective": objective, "model": {"name_or_path": str(knows_few)}}
    run = train(make_data(make_segments(12)), **changes)
    rewards = [step.measures["reward"] for step in run.steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards


@pytest.mark.parametrize("loss", ["grpo", "reinforce_pp"])
def test_kl_holds_the_model_near_its_reference(loss: str, knows_few: Path, train: Train) -> None:
    distances = []
    for weight in (1e-9, 1.0):
        objective = {"name": "rl", "loss": loss, "kl_weight": weight}
        changes = {**RL, **LEARNS, "objective": objective, "model": {"name_or_path": str(knows_few)}}
        run = train(make_data(make_segments(12)), folder=str(weight), **changes)
        assert abs(run.steps[0].measures["kl_k1"]) < 1e-6 and abs(run.steps[0].measures["kl_k3"]) < 1e-6
        distances.append(np.mean([step.measures["kl_k3"] for step in run.steps[-5:]]))
    assert 0 < distances[1] < 0.5 * distances[0]


def test_the_base_under_an_adapter_is_the_reference_of_a_second_model(train: Train) -> None:
    found = []
    for source in ("base", "model"):
        objective = {"name": "rl", "loss": "grpo", "kl_weight": 0.1, "reference": source}
        changes = {**RL, "objective": objective, "adapter": {"type": "lora"}}
        run = train(make_data(make_segments(12)), folder=source, train__learning_rate=1e-2, **changes)
        found.append([(step.loss, step.measures["kl_k3"]) for step in run.steps])
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert found[0][-1][1] > 1e-5


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "gspo", "rloo"])
def test_rewards_and_their_opposites_have_opposite_gradients(
    loss: str, knows_few: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the expected gradient of rewards by chance is zero: neither lengths, cut answers nor groups of one reward,
    which are left out, lead anywhere."""
    gradients = []
    for sign in (0, 1):
        coin = lambda expected, generated, sign=sign: float(hash_of(generated) % 2 == sign)  # noqa: E731
        monkeypatch.setitem(METRICS._rows, "coin", Metric(of_row=coin))
        rollout = {**ROLLOUT, "answers": 4, "rewards": ["coin"], "dead_groups": "drop"}
        changes = {**RL, "objective": {"name": "rl", "loss": loss}, "rollout": rollout, "train__max_steps": 1}
        changes["model"] = {"name_or_path": str(knows_few)}
        with step_gradients() as found:
            run = train(make_data(make_segments(12)), folder=str(sign), **changes)
        gradients += found
        drawn = rollouts(Path(run.output_dir))[0]
        assert len({answer["finish"] for answer in drawn}) == len({answer["reward"] for answer in drawn}) == 2
        assert len({len(answer["ids"]) for answer in drawn}) > 2, "answers of several lengths"
        assert {answer["fate"] for answer in drawn} == {"trained", "no signal"}
    one, other = gradients
    assert float(one.norm()) > 1e-3
    torch.testing.assert_close(one, -other, atol=1e-5 * float(one.abs().max()), rtol=1e-4)


def hash_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest())


def test_rewards_of_chance_teach_nothing(knows_few: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    generator = np.random.default_rng(2)
    monkeypatch.setitem(METRICS._rows, "chance", Metric(of_row=lambda *_: float(generator.random())))
    rollout = {**LEARNS["rollout"], "rewards": ["chance"]}
    changes = {**RL, **LEARNS, "rollout": rollout, "model": {"name_or_path": str(knows_few)}}
    run = train(make_data(make_segments(12)), **changes)
    told = [[evenness("", answer["generated"]) for answer in step] for step in rollouts(Path(run.output_dir))]
    assert abs(np.mean(told[-3:]) - np.mean(told[:3])) < 0.1


EVEN_LENGTH = "matches:(..)*"  # a reward of 0 or 1, which all answers to a prompt often share
ASKS_ANEW = {"rewards": [EVEN_LENGTH], "dead_groups": "resample"}


@pytest.mark.parametrize(
    ("updates", "loss", "more"),
    [(1, "dapo", {}), (4, "dapo", {}), (4, "ppo", {}), (1, "dapo", ASKS_ANEW), (4, "dapo", ASKS_ANEW)],
)
def test_a_run_that_goes_on_draws_and_learns_what_it_would_have(
    updates: int, loss: str, more: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    data = make_data(make_segments(12))
    own = {**RL, "rollout": {**RL["rollout"], "updates": updates, **more}, "objective": {"name": "rl", "loss": loss}}

    def run(folder: str, **changes: Any) -> RunResult:
        saving = {"output__save_strategy": "steps", "output__save_steps": 2}
        config = make_config(tmp_path / folder, **{**own, **changes, **saving})
        return fit_data(config, tokenizer, data)

    whole = run("whole", train__max_steps=5)
    run("parts", train__max_steps=5)
    for path in (tmp_path / "parts").iterdir():  # as if it had been killed in its fourth step
        if path.is_dir() and path.name not in ("checkpoint-2", ROLLOUTS_FOLDER):
            shutil.rmtree(path)
    for step in (3, 4, 5)[updates // 2 :]:  # those of steps 3 and 4 may have been drawn in the first
        (tmp_path / "parts" / ROLLOUTS_FOLDER / f"{step:06d}.jsonl").unlink()
    (tmp_path / "parts" / "result.json").unlink()
    again = run("parts", train__max_steps=5)
    assert losses(again)[-3:] == losses(whole)[-3:]
    assert rollouts(tmp_path / "parts") == rollouts(tmp_path / "whole")
    lines = Counter(line["fate"] for step in rollouts(tmp_path / "whole") for line in step)
    assert again.answers == whole.answers and whole.answers["sampled"] == lines.total()
    assert lines.total() > 5 * 4 * 3 if more else lines.total() == 5 * 4 * 3
    assert (whole.answers["trained"], whole.answers["no_signal"]) == (lines["trained"], lines["no signal"])
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_value_head_learns_what_to_expect_and_stays_out_of_the_model(knows_few: Path, train: Train) -> None:
    objective = {"name": "rl", "loss": "ppo", "kl_weight": 0.5, "kl_horizon": 100, "value_weight": 1.0}
    changes = {**RL, **LEARNS, "objective": objective, "model": {"name_or_path": str(knows_few)}}
    run = train(make_data(make_segments(12)), **changes, output__save_strategy="steps", output__save_steps=15)
    assert run.steps[0].measures["explained_variance"] == 0, "it begins by expecting 0 everywhere"
    errors = [step.measures["value_loss"] for step in run.steps]
    assert np.mean(errors[-5:]) < 0.5 * errors[0], errors
    weights = [step.measures["kl_weight"] for step in run.steps]
    assert weights[0] == 0.5 and weights[1] == pytest.approx(0.5 * (1 - 0.2 * 32 / 100)), "KL is far below its target"
    names = load_file(Path(run.output_dir) / "model" / "model.safetensors").keys()
    assert not any("value_head" in name for name in names)
    state = json.loads((Path(run.output_dir) / "checkpoint-15" / "objective_state.json").read_text())
    assert any(state["value_head"]["weight"]) and state["kl_weight"] < weights[-1]


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_explained_variance_is_the_share_of_what_came_that_had_been_expected(scale: float) -> None:
    returns, expected = scale * torch.randn(2, 9, generator=torch.Generator().manual_seed(0)) + scale
    step_losses = PolicyLosses(
        forward=Mock(device=torch.device("cpu")), row=LOSSES.named("ppo"), numbers={"kl_weight": 0.0}, reference=None,
        value_head=Mock(), rollout=RolloutConfig(), gaps=Mock(end_step=lambda reduce: {}),
    )  # fmt: skip
    for part in (slice(4), slice(4, None)):
        policy = Mock(expected_K=expected[part], advantages_S=torch.zeros(2))
        found = PolicyBaselines(advantages_K=returns[part], reference_K=None, returns_K=returns[part])
        step_losses._prepared[Mock(policy=policy)] = found
    told = step_losses.end_step(lambda sums: sums)["explained_variance"]
    assert float(told.total) == pytest.approx(1 - float((returns - expected).var() / returns.var()), rel=1e-5)


def test_several_steps_learn_from_answers_of_the_same_weights(train: Train) -> None:
    """Drawn at once, a fourth of the rows each; after the first step the ratio is no longer 1."""
    changes = {**RL, "train__learning_rate": 1e-2, "train__max_steps": 6}
    alone = train(make_data(make_segments(24)), folder="alone", **changes)
    run = train(make_data(make_segments(24)), **{**changes, "rollout": {**RL["rollout"], "updates": 4}})
    rows = [[{one["row"] for one in step} for step in rollouts(Path(each.output_dir))] for each in (alone, run)]
    assert rows[0] == rows[1], "each step learns from the rows that it has in the plan"
    assert ids(run)[0] == ids(alone)[0] and ids(run)[1] != ids(alone)[1]
    still = train(make_data(make_segments(24)), folder="still", **{**changes, "train__learning_rate": 1e-12})
    assert ids(run)[:4] == ids(still)[:4] and ids(run)[4] != ids(still)[4]
    assert ["gap" in step.measures for step in run.steps] == [True, False, False, False, True, False]
    moved = [step.measures["clipped"] for step in run.steps]
    assert moved[0] == moved[4] == 0 and max(moved) > 0


def test_a_checkpoint_without_the_answers_of_the_next_step_is_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    saving = {"output__save_strategy": "steps", "output__save_steps": 1}

    def run(updates: int, steps: int) -> RunResult:
        changes = {**RL, "rollout": {**RL["rollout"], "updates": updates}, "train__max_steps": steps}
        return fit_data(make_config(tmp_path / "run", **changes, **saving), tokenizer, make_data(make_segments(12)))

    run(1, 1)
    with pytest.raises(CheckpointError) as caught:
        run(4, 3)
    assert "rollout.updates" in caught.value.message


def test_a_checkpoint_with_the_answers_to_other_prompts_is_told(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait in it were drawn by a run that asked no others for prompts that teach nothing."""
    monkeypatch.setitem(METRICS._rows, "same", Metric(of_row=lambda *_: 1.0))
    saving = {"train__max_steps": 4, "output__save_strategy": "steps", "output__save_steps": 2}

    def run(dead_groups: str, **changes: Any) -> RunResult:
        rollout = {**ROLLOUT, "rewards": ["same"], "updates": 4, "dead_groups": dead_groups}
        given = {**RL, **saving, "rollout": rollout, **changes}
        return train(make_data(make_segments(12)), folder=dead_groups, **given)

    run("drop")
    with pytest.raises(CheckpointError) as caught:
        run("resample", output__resume=str(tmp_path / "drop" / "checkpoint-2"))
    assert "step 3" in caught.value.message and "rows.jsonl:" in caught.value.message
    assert "section rollout" in (caught.value.hint or "")


def test_rows_without_a_question_and_stops_that_are_not_read_are_told_once(train: Train) -> None:
    segments = make_segments(12)
    for segment in segments[::2]:
        segment.input_ids[-1] = 11  # cut before its stop token
    told: list[str] = []
    changes = {**RL, "generate": {"stop_strings": ["a"]}}
    run = train(make_data(segments), on_event=lambda event: told.append(getattr(event, "text", "")), **changes)
    assert told.count(NO_QUESTION) == told.count(NOT_STOPPED) == 1
    asked = {answer["row"] for step in rollouts(Path(run.output_dir)) for answer in step}
    assert asked and all(int(row.rpartition(":")[2]) % 2 == 0 for row in asked)


def test_two_epochs_draw_other_answers_to_the_same_questions(train: Train) -> None:
    run = train(make_data(make_segments(4)), train__max_steps=2, train__learning_rate=1e-12, **RL)
    first, second = rollouts(Path(run.output_dir))
    texts = [{(one["row"], one["sample"]): one["ids"] for one in step} for step in (first, second)]
    assert texts[0].keys() == texts[1].keys()
    assert all(texts[0][key] != texts[1][key] for key in texts[0])


def test_questions_of_several_data_sets_are_learned_from_together_and_tokens_are_those_of_answers_too(
    train: Train,
) -> None:
    data = replace(make_data(make_segments(8), weights=(1.0, 1.0)), names=("first", "second"))
    run = train(data, train__max_steps=2, **RL)
    drawn = rollouts(Path(run.output_dir))
    assert len(run.steps) == 2 and run.steps[-1].grad_norm > 0
    tokens, targets = sum(step.tokens for step in run.steps), sum(step.target_tokens for step in run.steps)
    assert tokens > targets == sum(len(answer["ids"]) for step in drawn for answer in step)


# --------------------------------------------------------------------------------------- faults of what draws answers


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[Completion], Completion]) -> None:
    real = LocalEngine.generate

    def generate(self: LocalEngine, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        for answer in real(self, requests):
            yield change(answer) if isinstance(answer, Completion) else answer

    monkeypatch.setattr(LocalEngine, "generate", generate)


FAULTS: dict[str, Callable[[Completion], Completion]] = {
    "temperature": lambda one: replace(one, logprobs=one.logprobs * np.float32(0.7)),
    "truncated sampling": lambda one: replace(one, logprobs=one.logprobs + np.float32(0.01)),
    "shifted": lambda one: replace(one, logprobs=np.roll(one.logprobs, 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_probabilities_that_are_not_those_of_training_stop_the_run(
    fault: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    tampered(monkeypatch, FAULTS[fault])
    with pytest.raises(TrainingError) as caught:
        train(make_data(make_segments(12)), **RL)
    assert "nats a token" in caught.value.message


@pytest.mark.parametrize("adapter", [{}, {"type": "lora", "target_modules": ["lm_head", "q_proj"]}])
def test_temperature_is_of_what_draws_and_of_what_learns(
    adapter: dict[str, Any], knows_few: Path, train: Train
) -> None:
    """A head that is a plain layer, and one that is a function."""
    entropies = []
    for temperature in (1.0, 0.5):
        rollout = {**RL["rollout"], "temperature": temperature}
        changes = {**RL, "rollout": rollout, "model": {"name_or_path": str(knows_few)}}
        run = train(make_data(make_segments(12)), folder=str(temperature), train__max_steps=2, **changes)
        assert all(step.measures["gap"] < 1e-5 for step in run.steps)
        entropies.append(run.steps[0].measures["entropy"])
    assert entropies[1] < 0.9 * entropies[0]


def test_keys_that_would_draw_from_some_tokens_alone_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "rl.yaml"
    path.write_text("model: preset:tiny-qwen3\ndata: {train: preset:skills}\nobjective: rl\nrollout: {top_p: 0.9}\n")
    with pytest.raises(ConfigError) as caught:
        load_draft(path)
    (problem,) = caught.value.problems
    assert problem.key == "rollout.top_p" and problem.hint is not None and "another policy" in problem.hint


def test_a_gap_may_be_told_and_gone_on_with(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, FAULTS["temperature"])
    told: list[str] = []
    changes = {**RL, "rollout": {**RL["rollout"], "on_gap": "warn"}}
    train(make_data(make_segments(12)), on_event=lambda event: told.append(getattr(event, "text", "")), **changes)
    assert sum("nats a token" in text for text in told) == 4


def test_a_correction_weighs_what_the_sampler_gives_other_probabilities(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(make_data(make_segments(12)), folder="plain", train__max_steps=2, **RL)
    tampered(monkeypatch, lambda one: replace(one, logprobs=one.logprobs + np.float32(0.5)))
    told: list[str] = []
    rollout = {**RL["rollout"], "correction": {"level": "answer", "how": "truncate"}, "updates": 2}
    run = train(
        make_data(make_segments(12)),
        on_event=lambda event: told.append(getattr(event, "text", "")),
        train__max_steps=2,
        **{**RL, "rollout": rollout},
    )
    assert sum("nats a token" in text for text in told) == 1
    assert [step.measures["correction_weight"] for step in run.steps] == pytest.approx([math.exp(-0.5)] * 2, rel=1e-4)
    assert run.steps[0].grad_norm == pytest.approx(math.exp(-0.5) * plain.steps[0].grad_norm, rel=1e-3)


def test_a_first_step_of_unfinished_answers_stops_the_run(train: Train) -> None:
    with pytest.raises(TrainingError) as caught:
        train(make_data(make_segments(12)), **{**RL, "rollout": {**RL["rollout"], "min_finished": 0.5}})
    assert caught.value.hint is not None and "max_new_tokens" in caught.value.hint


@pytest.mark.parametrize("others", [0, 100])
def test_answers_of_all_processes_say_whether_enough_are_finished(
    others: int, knows_few: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has as many answers, of which ``others`` are finished."""
    monkeypatch.setattr(drawing, "summed_over_ranks", lambda own, _: [own[0] + others, own[1] + 100])
    rollout = {**RL["rollout"], "min_finished": 0.5, "max_new_tokens": 40}
    changes = {**RL, "rollout": rollout, "model": {"name_or_path": str(knows_few)}, "data__max_length": 128}
    if others:
        train(make_data(make_segments(12)), **changes)
        return
    with pytest.raises(TrainingError) as caught:
        train(make_data(make_segments(12)), **changes)
    assert "of the 112 answers" in caught.value.message


def test_the_mean_of_each_reward_is_a_measure_of_the_step(train: Train) -> None:
    rewards = ["evenness", {"metric": "exact", "weight": 0.5}, {"metric": "evenness", "name": "again"}]
    run = train(make_data(make_segments(12)), **{**RL, "rollout": {**RL["rollout"], "rewards": rewards}})
    for step, answers in zip(run.steps, rollouts(Path(run.output_dir)), strict=True):
        for name in ("evenness", "exact", "again"):
            values = [answer["rewards"][name] for answer in answers]
            assert step.measures[f"reward/{name}"] == pytest.approx(np.mean(values), abs=1e-6)


def test_answers_without_a_reward_are_measured_and_not_learned_from(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS._rows, "some", Metric(of_row=lambda _, said: math.nan if len(said) % 2 else 1.0))
    changes = {**RL, "rollout": {**RL["rollout"], "rewards": ["some", {"metric": "length", "weight": 0.0}]}}
    run = train(make_data(make_segments(12)), **changes)
    for step, answers in zip(run.steps, rollouts(Path(run.output_dir)), strict=True):
        judged = [answer for answer in answers if answer["reward"] is not None]
        assert len(judged) < len(answers)
        assert step.target_tokens == sum(len(answer["ids"]) for answer in judged)
        assert step.measures["answer_tokens"] == pytest.approx(np.mean([len(answer["ids"]) for answer in answers]))
        lengths = [answer["rewards"]["length"] for answer in answers]
        assert step.measures["reward/length"] == pytest.approx(np.mean(lengths))


def test_a_row_that_a_step_asks_twice_counts_twice(train: Train) -> None:
    data = make_data(make_segments(3), weights=(2.0,))
    run = train(data, **{**RL, "rollout": {**RL["rollout"], "prompts_per_step": 6}})
    for step, answers in zip(run.steps, rollouts(Path(run.output_dir)), strict=True):
        assert Counter(answer["row"] for answer in answers) == dict.fromkeys({a["row"] for a in answers}, 6)
        assert step.target_tokens == sum(len(answer["ids"]) for answer in answers)
        first = {answer["row"]: answers[3 * n : 3 * n + 3] for n, answer in enumerate(answers[::3])}
        for answer in answers:
            drawn = [a["reward"] for a in first[answer["row"]]]
            spread = np.std(drawn, ddof=1) + 1e-4
            assert answer["advantage"] == pytest.approx((answer["reward"] - np.mean(drawn)) / spread, abs=1e-6)


@pytest.mark.parametrize(("dead", "targets"), [("keep", True), ("drop", False)])
def test_groups_whose_answers_are_all_alike_are_kept_or_dropped(
    dead: str, targets: bool, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS._rows, "same", Metric(of_row=lambda *_: 1.0))
    changes = {**RL, "rollout": {**RL["rollout"], "dead_groups": dead, "rewards": ["same"]}}
    run = train(make_data(make_segments(12)), train__weight_decay=0.0, **changes)
    assert losses(run) == [0.0] * 4
    assert all(bool(step.target_tokens) is targets for step in run.steps)
    for step, answers in zip(run.steps, rollouts(Path(run.output_dir)), strict=True):  # it tells of all that were drawn
        assert step.measures["reward"] == step.measures["reward/same"] == 1
        assert step.measures["answer_tokens"] == pytest.approx(np.mean([len(answer["ids"]) for answer in answers]))


def test_other_prompts_are_asked_for_those_that_teach_nothing(knows_few: Path, train: Train) -> None:
    """As many as there were, each row once in a step, and again for those of them that teach nothing either. The loss
    is divided by what teaches something."""
    rollout = {**ROLLOUT, "answers": 2, "rewards": [EVEN_LENGTH], "dead_groups": "resample", "resample_rounds": 2}
    changes = {**RL, "model": {"name_or_path": str(knows_few)}, "train__learning_rate": 1e-12, "train__max_steps": 5}
    run = train(make_data(make_segments(40)), **{**changes, "rollout": rollout})
    drop = train(make_data(make_segments(40)), folder="drop", **{**changes, "rollout": {**rollout, **DROPS}})
    sizes = []
    for step, answers, others in zip(
        run.steps, *(rollouts(Path(each.output_dir)) for each in (run, drop)), strict=True
    ):
        assert answers[: len(others)] == others, "the first round is that of a run that only drops"
        groups = [answers[place : place + 2] for place in range(0, len(answers), 2)]
        assert all(one["row"] == other["row"] for one, other in groups)
        assert len({one["row"] for one, _ in groups}) == len(groups)
        is_dead = [one["reward"] == other["reward"] for one, other in groups]
        assert [group[0]["fate"] == "no signal" for group in groups] == is_dead
        first, second = sum(is_dead[:4]), sum(is_dead[4 : 4 + sum(is_dead[:4])])
        assert len(groups) == 4 + first + second and step.measures["asked_anew"] == first + second
        assert step.target_tokens == sum(len(one["ids"]) for one in answers if one["fate"] == "trained")
        sizes.append((first, second))
    assert any(second for _, second in sizes) and len(set(sizes)) > 1, sizes
    assert run.answers["sampled"] == run.answers["trained"] + run.answers["no_signal"] > drop.answers["sampled"]
    assert run.answers["trained"] > 1.2 * drop.answers["trained"]


DROPS: dict[str, Any] = {"dead_groups": "drop", "resample_rounds": 3}


def test_asking_other_prompts_ends_where_no_row_is_left(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "same", Metric(of_row=lambda *_: 1.0))
    rollout = {**ROLLOUT, "rewards": ["same"], "dead_groups": "resample", "resample_rounds": 9}
    run = train(make_data(make_segments(10)), **{**RL, "rollout": rollout, "train__max_steps": 2})
    for step, answers in zip(run.steps, rollouts(Path(run.output_dir)), strict=True):
        assert len({answer["row"] for answer in answers}) == 10 and len(answers) == 30
        assert step.measures["asked_anew"] == 6 and step.target_tokens == 0
    assert run.answers == {**run.answers, "sampled": 60, "trained": 0, "no_signal": 60}


# ------------------------------------------------------------------------------------------------------- descriptions


WRONG = {
    "rollout.rewards=[]": "rollout.rewards",
    "rollout.rewards=[{weight: 2}]": "rollout.rewards[0]",
    "rollout.rewards=[{function: 'no.py:f'}]": "rollout.rewards[0].function",
    "rollout.tools=['no.py:f']": "rollout.tools[0].code",
    "rollout.tools=[f]": "rollout.tools[0].code",
    "rollout.environment='no.py:F'": "rollout.environment.code",
    "rollout.rewards=[{metric: exact, function: 'no.py:f'}]": "rollout.rewards[0]",
    "rollout.rewards=[exact, exact]": "rollout.rewards[1].name",
    "rollout.rewards=[exact, {metric: json, name: exact}]": "rollout.rewards[1].name",
    "rollout.answers=1": "rollout.answers",
    "rollout.resample_rounds=5": "rollout.resample_rounds",
    "train.gradient_accumulation_steps=2": "train.gradient_accumulation_steps",
    "train.tokens_per_step=100": "train.tokens_per_step",
    "train.optim=lomo": "train.optim",
    "objective=sft": "rollout",
    "objective={name: rl, reference: model}": "objective.reference.source",
    "objective={name: rl, kl_weight: 0.1, reference: precomputed}": "objective.reference.source",
    "objective={name: rl, kl_weight: 0.1, reference: none}": "objective.reference.source",
    "objective={name: rl, loss: cispo, clip_low: 0.1}": "objective.clip_low",
    "adapter={type: lora, lora_dropout: 0.1}": "adapter.lora_dropout",
    "train.neftune_noise_alpha=5": "train.neftune_noise_alpha",
}


def test_a_loss_that_compares_no_answers_takes_one_and_drops_none(tmp_path: Path) -> None:
    path = tmp_path / "rl.yaml"
    path.write_text(
        "model: preset:tiny-qwen3\ndata: {train: preset:skills}\nobjective: {name: rl, loss: reinforce_pp}\n"
    )
    assert load_draft(path, ["rollout.answers=1"]).config.rollout.answers == 1
    for dead in ("drop", "resample"):
        with pytest.raises(ConfigError) as caught:
            load_draft(path, [f"rollout.dead_groups={dead}"])
        assert [problem.key for problem in caught.value.problems] == ["rollout.dead_groups"]


@pytest.mark.parametrize("override", WRONG)
def test_what_such_a_run_cannot_do_is_told_at_its_key(override: str, tmp_path: Path) -> None:
    path = tmp_path / "rl.yaml"
    path.write_text("model: preset:tiny-qwen3\ndata: {train: preset:skills}\nobjective: rl\nrollout: {answers: 4}\n")
    assert load_draft(path).config.objective.loss_name == "dapo"
    with pytest.raises(ConfigError) as caught:
        load_draft(path, [override])
    assert WRONG[override] in [problem.key for problem in caught.value.problems]


@pytest.mark.parametrize("rewards", ["[exat]", "['regex:(']", "[regex]", "['exact:x']"])
def test_metrics_that_are_no_rewards_are_told_before_a_row_is_encoded(rewards: str, tmp_path: Path) -> None:
    path = tmp_path / "rl.yaml"
    path.write_text(
        f"model: preset:tiny-qwen3\ndata: {{train: preset:skills}}\nobjective: rl\noutput: {{dir: {tmp_path}/o}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        check_run(load_draft(path, [f"rollout.rewards={rewards}"], to_train=True))
    assert [problem.key for problem in caught.value.problems] == ["rollout.rewards[0].metric"]


def test_prompts_that_processes_cannot_share_evenly_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, **RL)
    assert train_settings(config, num_ranks=2).micro_batches_per_step == 4
    with pytest.raises(UserError) as caught:
        train_settings(config, num_ranks=3)
    assert caught.value.key == "rollout.prompts_per_step"
