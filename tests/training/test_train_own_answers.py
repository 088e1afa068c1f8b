"""Runs that learn from a teacher, from the best of their answers, or from the best and the worst as a pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_rollouts import LAYOUTS, ROLLOUT, evenness, ids, losses, rollouts
from tiny_runs import make_config, make_data, make_segments

from luthier.config.loading import load_draft
from luthier.config.objective import Learned
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Finish
from luthier.errors import ConfigError, ModelError
from luthier.metrics import METRICS, Metric
from luthier.objectives.policy_losses import Advantage
from luthier.records import Address
from luthier.training.fit import fit_data
from luthier.training.generate import Question
from luthier.training.losses import token_settings
from luthier.training.report import RunResult
from luthier.training.rollouts import BELOW_BAR, NOT_CHOSEN, AnswerChoice, AnswerGroup, Fate, fates
from luthier.training.rollouts.talks import ModelCall, Trajectory, answer_tree

Train = Callable[..., RunResult]
OWN = {"rollout": ROLLOUT, "data__max_length": 64}
TEACHER = "objective.reference.name_or_path=preset:tiny-qwen3"
LEARNS = {"train__max_steps": 15, "train__learning_rate": 1e-2}


@pytest.fixture(autouse=True)
def _a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "evenness", Metric(of_row=evenness))


def objective(name: str, teacher: Path, **more: Any) -> dict[str, Any]:
    """``opd`` or ``gkd`` from this teacher, or an objective that needs none."""
    if name not in ("opd", "gkd"):
        return {"name": name, **more}
    return {"name": "distill", "loss": name, "reference": {"name_or_path": str(teacher)}, **more}


def rollout(**more: Any) -> dict[str, Any]:
    return {**ROLLOUT, **more}


KINDS = pytest.mark.parametrize("name", ["opd", "gkd", "best_of_n", "online_dpo"])


@KINDS
def test_steps_do_not_depend_on_how_answers_are_laid_out(
    name: str, train: Train, knows_few: Path, knows_half: Path
) -> None:
    own = 0.5 if name == "gkd" else 1.0
    changes = {"objective": objective(name, knows_half), "model": {"name_or_path": str(knows_few)}, **OWN}
    changes["rollout"] = rollout(own=own, keep=2 if name == "best_of_n" else 1)
    changes["train__adam_epsilon"] = 1e-2  # else Adam takes whole steps along gradients that are rounding alone
    runs = {}
    for layout in ("alone", "packed", "shared"):
        runs[layout] = train(
            make_data(make_segments(12)), folder=layout, train__max_steps=3, **changes, **LAYOUTS[layout]
        )
    alone = runs.pop("alone")
    assert all(step.grad_norm > 1e-3 for step in alone.steps), "there is something to learn"
    for layout, run in runs.items():
        assert losses(run) == pytest.approx(losses(alone), rel=1e-4, abs=2e-6), layout
        norms = [step.grad_norm for step in run.steps]
        assert norms == pytest.approx([step.grad_norm for step in alone.steps], rel=1e-3), layout
        assert ids(run) == ids(alone), layout


@pytest.mark.parametrize(
    ("name", "more"),
    [("best_of_n", {}), ("best_of_n", {"loss": "dft"}), ("online_dpo", {}), ("online_dpo", {"loss": "simpo"})],
)
def test_rewarded_answers_become_likelier(name: str, more: dict[str, Any], knows_few: Path, train: Train) -> None:
    changes = {**OWN, **LEARNS, "model": {"name_or_path": str(knows_few)}, "rollout": rollout(answers=8)}
    run = train(make_data(make_segments(12)), objective=objective(name, knows_few, **more), **changes)
    rewards = [step.measures["reward"] for step in run.steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15, rewards
    drawn = [answer["reward"] for answer in rollouts(Path(run.output_dir))[0]]
    assert rewards[0] == pytest.approx(np.mean(drawn)), "all answers are measured, not those alone that are learned"


@pytest.mark.parametrize(("name", "beta"), [("opd", None), ("gkd", 0.5), ("gkd", 0.0), ("gkd", 1.0)])
def test_a_teacher_is_followed_without_a_reward(
    name: str, beta: float | None, knows_few: Path, knows_half: Path, train: Train
) -> None:
    more = {} if beta is None else {"gkd_beta": beta, "gkd_top_k": 8 if beta == 0 else 0}
    changes = {
        **OWN,
        **LEARNS,
        "train__max_steps": 40,
        "model": {"name_or_path": str(knows_few)},
        "rollout": rollout(rewards=[]),
    }
    run = train(make_data(make_segments(12)), objective=objective(name, knows_half, **more), **changes)
    odd = [
        np.mean([(i % 2) for one in step for i in one["ids"] if i != 2034]) for step in rollouts(Path(run.output_dir))
    ]
    assert odd[0] > 0.4 and np.mean(odd[-3:]) < 0.25, odd  # the teacher gives no odd ids
    assert "reward" not in run.steps[0].measures
    if name == "opd":
        kl = [step.measures["kl_k1"] for step in run.steps]
        assert kl[0] > 0.5 and np.mean(kl[-3:]) < 0.5 * kl[0], kl


@pytest.mark.parametrize("name", ["opd", "gkd"])
def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(name: str, knows_few: Path, train: Train) -> None:
    changes = {**OWN, "model": {"name_or_path": str(knows_few)}, "train__max_steps": 1}
    run = train(make_data(make_segments(12)), objective=objective(name, knows_few), **changes)
    (step,) = run.steps
    assert abs(step.loss) < 1e-6 and step.target_tokens > 0
    assert step.grad_norm < 1e-4


def test_answers_of_rows_are_learned_from_in_the_place_of_own_ones(
    knows_few: Path, knows_half: Path, train: Train
) -> None:
    segments = make_segments(8)
    targets = sum(int(segment.target.sum()) for segment in segments)
    changes = {**OWN, "model": {"name_or_path": str(knows_few)}, "train__max_steps": 1}
    changes["objective"] = objective("gkd", knows_half)
    none = train(make_data(segments), folder="none", **{**changes, "rollout": rollout(own=0.0, prompts_per_step=8)})
    assert none.steps[0].target_tokens == targets and rollouts(Path(none.output_dir)) == [[]]
    some = train(make_data(segments), folder="some", **{**changes, "rollout": rollout(own=0.5, prompts_per_step=8)})
    (drawn,) = rollouts(Path(some.output_dir))
    assert 0 < len({answer["row"] for answer in drawn}) < 8


def test_prompts_without_an_answer_above_the_bar_teach_nothing(knows_few: Path, train: Train) -> None:
    changes = {**OWN, "model": {"name_or_path": str(knows_few)}, "objective": "best_of_n", "train__max_steps": 2}
    none = train(make_data(make_segments(12)), folder="none", **{**changes, "rollout": rollout(bar=2.0)})
    assert [step.target_tokens for step in none.steps] == [0, 0] and losses(none) == [0.0, 0.0]
    assert all(0 < step.measures["reward"] < 1 for step in none.steps), "what was drawn is measured all the same"
    some = train(make_data(make_segments(12)), folder="some", **{**changes, "rollout": rollout(bar=0.6, answers=6)})
    best = {}
    for answer in rollouts(Path(some.output_dir))[0]:
        if answer["reward"] >= max(0.6, best.get(answer["row"], (0, 0))[0] + 1e-12):
            best[answer["row"]] = answer["reward"], len(answer["ids"])
    assert best and some.steps[0].target_tokens == sum(length for _, length in best.values())


def test_each_pass_over_a_step_compares_its_answers_with_the_whole_step(knows_few: Path, train: Train) -> None:
    """Also the second one, whatever the micro-batches are."""
    changes = {**OWN, "model": {"name_or_path": str(knows_few)}, "rollout": rollout(passes=2, prompts_per_step=6)}
    changes |= {"objective": {"name": "online_dpo", "loss": "aot_unpaired"}, "train__adam_epsilon": 1e-2}
    changes |= {"train__warmup_steps": 0, "train__learning_rate": 3e-2}
    alone, padded = (
        train(make_data(make_segments(12)), folder=name, train__max_steps=2, **changes, **LAYOUTS[name])
        for name in ("alone", "padded")
    )
    assert losses(padded) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_run_that_goes_on_learns_what_it_would_have(passes: int, tmp_path: Path, tokenizer: Tokenizer) -> None:
    def run(folder: str, steps: int) -> RunResult:
        saving = {"output__save_strategy": "steps", "output__save_steps": 2, "train__lr_scheduler_type": "constant"}
        changes = {**OWN, **saving, "objective": {"name": "online_dpo", "loss": "bco_pair"}, "train__max_steps": steps}
        changes["rollout"] = rollout(passes=passes)
        return fit_data(make_config(tmp_path / folder, **changes), tokenizer, make_data(make_segments(12)))

    whole = run("whole", 4)
    run("parts", 2)
    again = run("parts", 4)
    assert losses(again)[-2:] == losses(whole)[-2:]
    assert rollouts(tmp_path / "parts") == rollouts(tmp_path / "whole")


def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path, knows_few: Path, knows_half: Path, train: Train) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in knows_half.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    spec = json.loads((other / "tokenizer.json").read_text())
    vocabulary = spec["model"]["vocab"]
    one, two = (next(token for token, number in vocabulary.items() if number == wanted) for wanted in (300, 301))
    vocabulary[one], vocabulary[two] = 301, 300
    (other / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ModelError) as caught:
        changes = {**OWN, "model": {"name_or_path": str(knows_few)}}
        train(make_data(make_segments(12)), objective=objective("opd", other), **changes)
    assert "300" in caught.value.message and "objective.reference.name_or_path" in caught.value.message


# ------------------------------------------------------------------------------------------------- which are learned


def group(rewards: list[float]) -> AnswerGroup:
    prompt = np.array([1, 2], dtype=np.int32)
    answers = []
    for sample in range(len(rewards)):
        drawn = np.array([10 + sample, 3], dtype=np.int32)
        completion = Completion(key=0, sample=sample, ids=drawn, logprobs=np.zeros(2, np.float32), finish=Finish.STOP)
        answers.append(Trajectory(calls=(ModelCall(prompt=prompt, completion=completion, version=0),)))
    address = Address(file="rows.jsonl", row=1)
    return AnswerGroup(
        question=Question(prompt=prompt, answer=prompt, address=address),
        answers=answers,
        rewards_G=np.array(rewards, dtype=np.float64),
        values_GF=np.array(rewards, dtype=np.float64)[:, None],
        advantages_G=np.zeros(len(rewards)),
        tree=answer_tree(prompt, answers, address),
    )


@pytest.mark.parametrize(
    ("learned", "keep", "bar", "chosen"),
    [
        (Learned.ALL, 1, None, [0, 1, 2, 3]),
        (Learned.BEST, 1, None, [1]),
        (Learned.BEST, 3, None, [1, 2, 0]),
        (Learned.BEST, 3, 0.9, [1, 2]),
        (Learned.BEST, 3, 1.5, []),
        (Learned.PAIR, 1, None, [1, 3]),
    ],
)
def test_chosen_are_the_best_above_the_bar_or_the_best_and_the_worst(
    learned: Learned, keep: int, bar: float | None, chosen: list[int]
) -> None:
    found = AnswerChoice(learned=learned, keep=keep, bar=bar).of(group([0.5, 1.0, 1.0, 0.0]))
    assert [answer.sample for answer in found.answers] == chosen
    assert found.rewards_G.tolist() == [[0.5, 1.0, 1.0, 0.0][place] for place in chosen]
    assert found.tree.sample.target.sum() == 2 * len(chosen)


def test_answers_of_equal_rewards_are_no_pair() -> None:
    assert not AnswerChoice(learned=Learned.PAIR).of(group([0.3, 0.3, 0.3])).answers
    assert not AnswerChoice(learned=Learned.PAIR).of(group([])).answers


T, N, D, C, B = Fate.TRAINED, Fate.NO_SIGNAL, "late", NOT_CHOSEN, BELOW_BAR


@pytest.mark.parametrize(
    ("choice", "rewards", "kind", "expected"),
    [
        ({"learned": Learned.COMPARED}, [1.0, None, 0.0], Advantage.STANDARD, [T, D, T]),
        ({"learned": Learned.COMPARED}, [1.0, None, 1.0], Advantage.STANDARD, [N, D, N]),
        ({"learned": Learned.COMPARED}, [0.0, None, 0.0], Advantage.REWARD, [T, D, T]),
        ({"learned": Learned.COMPARED}, [None, None], Advantage.CENTRED, [D, D]),
        ({"learned": Learned.PAIR}, [1.0, 0.5, None, 0.0], Advantage.STANDARD, [T, C, D, T]),
        ({"learned": Learned.PAIR}, [1.0, 1.0], Advantage.STANDARD, [N, N]),
        ({"learned": Learned.BEST, "keep": 1, "bar": 0.5}, [0.7, 0.9, None, 0.1], Advantage.STANDARD, [C, T, D, B]),
        ({"learned": Learned.ALL}, [None, 1.0], Advantage.TEACHER, [T, T]),
    ],
)
def test_each_answer_has_one_fate(
    choice: dict[str, Any], rewards: list[float | None], kind: Advantage, expected: list[str]
) -> None:
    rewards_G = np.array([np.nan if one is None else one for one in rewards])
    reasons = ["late" if one is None else "" for one in rewards]
    assert fates(rewards_G, reasons, AnswerChoice(**choice), kind) == expected


# ------------------------------------------------------------------------------------------------------- descriptions


WRONG = {
    "objective=distill": "objective.reference.name_or_path",
    "objective={name: distill, reference: precomputed}": "objective.reference.source",
    "objective={name: online_dpo, reference: precomputed}": "objective.reference.source",
    "objective={name: online_dpo, label_smoothing: 0.6}": "objective.label_smoothing",
    "rollout.keep=2": "rollout.keep",
    "rollout.bar=1": "rollout.bar",
    "rollout.own=0.5": "rollout.own",
    "objective=best_of_n rollout.keep=9": "rollout.keep",
    "objective=best_of_n rollout.rewards=[]": "rollout.rewards",
    "objective=best_of_n rollout.dead_groups=drop": "rollout.dead_groups",
    "objective=online_dpo rollout.answers=1": "rollout.answers",
    "objective={name: best_of_n, loss: sigmoid}": "objective.loss",
    "objective={name: rl, gkd_beta: 0.5}": "objective.gkd_beta",
}


@pytest.mark.parametrize("overrides", WRONG)
def test_what_contradicts_is_told_at_its_key(overrides: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: preset:tiny-qwen3\ndata: {train: preset:skills}\nobjective: rl\nrollout: {answers: 4}\n")
    given = [overrides] if "{" in overrides else overrides.split(" ")
    with pytest.raises(ConfigError) as caught:
        load_draft(path, given)
    assert WRONG[overrides] in [problem.key for problem in caught.value.problems]


def test_one_answer_and_no_reward_are_enough_for_a_teacher(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: preset:tiny-qwen3\ndata: {train: preset:skills}\nrollout: {answers: 1, rewards: []}\n")
    told = load_draft(path, ["objective={name: distill, loss: gkd, reference: {name_or_path: preset:tiny-qwen3}}"])
    assert told.config.objective.number("gkd_beta") == 0.5 and token_settings(told.config.objective).top_k == 0
    told = load_draft(path, ["objective.name=distill", "objective.loss=gkd", "objective.gkd_top_k=64", TEACHER])
    assert token_settings(told.config.objective).top_k == 64
