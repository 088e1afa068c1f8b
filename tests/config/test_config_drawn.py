"""Files of TRL's GRPO and RLOO are read as they are: what is drawn, learned from and judged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from peer_files import keys_refused, value_of

from luthier.config.loading import load_config_text
from luthier.config.peers import DEFAULTS, RLOO_DEFAULTS
from luthier.config.peers.trl import TRL

RUN = "model_name_or_path: preset:tiny-qwen3\ndataset_name: owner/rows\n"
DRAWN = f"{RUN}reward_funcs: [accuracy_reward, think_format_reward]\nscale_rewards: group\n"


@pytest.mark.parametrize(("text", "ours", "value"), [
    ("", "objective.loss", "dapo"),
    ("", "rollout.prompts_per_step", 1),
    ("gradient_accumulation_steps: 4\n", "rollout.prompts_per_step", 4),
    ("gradient_accumulation_steps: 2\nsteps_per_generation: 8\n", "rollout.updates", 4),
    ("generation_batch_size: 32\n", "rollout.updates", 4),
    ("num_iterations: 2\n", "rollout.passes", 2),
    ("num_iterations: 2\nmax_steps: 5\n", "train.max_steps", 3),
    ("num_generations: 4\n", "rollout.answers", 4),
    ("max_prompt_length: 100\nmax_completion_length: 28\n", "data.max_length", 128),
    ("max_completion_length: 28\n", "rollout.max_new_tokens", 28),
    ("temperature: 0.9\n", "rollout.temperature", 0.9),
    ("beta: 0.04\n", "objective.kl_weight", 0.04),
    ("epsilon_high: 0.28\n", "objective.clip_high", 0.28),
    ("loss_type: cispo\nepsilon_high: 5.0\n", "objective.clip_high", 4.0),
    ("loss_type: sapo\nsapo_temperature_neg: 1.2\n", "objective.sapo_negative", 1.2),
    ("loss_type: grpo\nimportance_sampling_level: sequence\n", "objective.loss", "gspo"),
    ("loss_type: dr_grpo\nscale_rewards: none\n", "objective.loss", "dr_grpo"),
    ("reward_weights: [1.0, 0.5]\n", "rollout.rewards[1].weight", 0.5),
    ("reward_funcs: [get_soft_overlong_punishment]\n", "rollout.rewards[0].metric", "overlong:256"),
    ("", "rollout.rewards[0].column", "solution"),
    ("normalize_advantages: false\nscale_rewards:\n", "objective.loss", "rloo"),
    ("normalize_advantages: false\nscale_rewards:\n", "objective.kl_weight", 0.05),
    ("normalize_advantages: false\nscale_rewards:\n", "rollout.answers", 2),
], ids=str)  # fmt: skip
def test_files_of_grpo_and_rloo_say_what_is_drawn(text: str, ours: str, value: object) -> None:
    given = {line.split(":")[0] for line in text.splitlines()}
    kept = "".join(line for line in DRAWN.splitlines(keepends=True) if line.split(":")[0] not in given)
    assert value_of(kept + text, ours) == value


@pytest.mark.parametrize(("text", "key"), [
    ("delta: 2.0\n", "delta"), ("entropy_coef: 0.1\n", "entropy_coef"), ("num_generations: 3\n", "num_generations"),
    ("loss_type: luspo\n", "loss_type"), ("loss_type: cispo\n", "epsilon_high"),
    ("reward_weights: [1]\n", "reward_weights"),
    ("steps_per_generation: 3\ngradient_accumulation_steps: 2\n", "steps_per_generation"),
    ("importance_sampling_level: sequnce\n", "importance_sampling_level"),
])  # fmt: skip
def test_what_is_not_there_for_drawn_answers_is_refused_by_its_key(text: str, key: str) -> None:
    assert keys_refused(DRAWN + text) == [key]


def test_a_scale_of_rewards_that_is_none_of_theirs_is_refused() -> None:
    assert keys_refused(DRAWN.replace("scale_rewards: group", "scale_rewards: grop")) == ["scale_rewards"]


@pytest.mark.parametrize("name", ["polite", "rewards.polite"])
def test_a_reward_that_is_nowhere_is_refused(name: str) -> None:
    assert keys_refused(DRAWN.replace("accuracy_reward", name)) == ["reward_funcs"]


def test_functions_are_found_by_their_dotted_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "solution": "2"}), encoding="utf-8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text("def polite(completions, **columns): ...\n", encoding="utf-8")
    text = DRAWN.replace("accuracy_reward", "mine.rewards.polite").replace("owner/rows", "rows.jsonl")
    first = load_config_text(text, "theirs.yaml", check_paths=False).rollout.rewards[0]
    assert (first.function, first.plain) == ("mine/rewards.py:polite", True)


def test_every_key_of_grpo_and_rloo_is_known_with_its_default() -> None:
    import trl

    for command, config, ours in (("grpo", trl.GRPOConfig, DEFAULTS), ("rloo", trl.RLOOConfig, RLOO_DEFAULTS)):
        theirs = {field.name: field.default for field in dataclasses.fields(config)}
        assert [name for name in theirs if not TRL.has_key(name)] == []
        assert {name: theirs[name] for name in ours if name in theirs} == {n: v for n, v in ours.items() if n in theirs}
        assert theirs["learning_rate"] == TRL.table["defaults"]["rl"]["learning_rate"]
        said = {name: value for name, value in theirs.items() if isinstance(value, bool | int | float | str)}
        text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in said.items() if name != "output_dir")
        drawn = f"{RUN}reward_funcs: [accuracy_reward]\n{text}"
        load_config_text(drawn, "theirs.yaml", [f"objective.name={command}"], check_paths=False)
