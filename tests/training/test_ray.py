"""Rows that are prepared, and answers that are drawn, by processes of a Ray cluster: the same as without it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiny_rollouts import ROLLOUT, evenness, ids, losses, rollouts
from tiny_runs import make_config, make_data, make_segments

import luthier
from luthier.config.loading import load_draft
from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Request, SamplerPool
from luthier.errors import ConfigError, SamplerLost, UserError
from luthier.metrics import METRICS, Metric
from luthier.preparation.prepare import connect
from luthier.rewards.judging import DrawnAnswer
from luthier.training.ray_actors import _parts, ray_rewards
from luthier.training.report import RunResult
from luthier.training.rollouts.delivery import ray_samplers

Train = Callable[..., RunResult]
LORA = {"adapter": {"type": "lora", "r": 4, "lora_alpha": 8}}

ray = pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Begun once: runs that find a cluster use it, and leave it."""
    connect(ray, "local", option="--ray", cpus=2)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "evenness", Metric(of_row=evenness))
    monkeypatch.setattr("luthier.training.rollouts.delivery.PAUSES", (0.01, 0.01, 0.01))
    monkeypatch.setattr("luthier.training.ray_actors.PAUSES", (0.1, 0.1, 1.0))


def on_ray(**more: Any) -> dict[str, Any]:
    return {**ROLLOUT, "engine": {"ray": "local", **more}}


def test_a_cluster_prepares_what_one_process_prepares(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "x" * n}] for n in range(1, 51)]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns) + "{broken\n")
    run = {"model": "preset:tiny-qwen3", "data": {"train": str(path), "max_drop": 0.5}}
    alone, together = (
        luthier.prepare(
            {**run, "data": {**run["data"], "store": str(tmp_path / name)}, "output": {"dir": str(tmp_path / name)}},
            ray_address=address,
        )
        for name, address in (("alone", None), ("together", "local"))
    )
    assert together.num_encoded == alone.num_encoded == 50
    assert [row.input_ids.tolist() for row in together.train] == [row.input_ids.tolist() for row in alone.train]
    assert together.train.row_numbers.tolist() == alone.train.row_numbers.tolist() == list(range(1, 51))
    assert alone.quarantine is not None and together.quarantine is not None
    assert together.quarantine.read_text() == alone.quarantine.read_text() != ""


@pytest.mark.parametrize(("adapter", "actors"), [({}, 2), (LORA, 1)], ids=["full", "lora"])
def test_actors_draw_what_the_run_would_have_drawn(
    adapter: dict[str, Any], actors: int, train: Train, knows_few: Path
) -> None:
    told = {"objective": {"name": "rl", "loss": "dapo"}, "data__max_length": 64, **adapter}
    own = {"model": {"name_or_path": str(knows_few)}, "train__max_steps": 3, "train__learning_rate": 1e-2}
    data = make_data(make_segments(24))
    alone = train(data, folder="alone", rollout=ROLLOUT, **told, **own)
    found = train(data, folder="there", rollout=on_ray(actors=actors), **told, **own)
    assert ids(found) == ids(alone) and ids(found)[1] != ids(found)[0]
    assert losses(found) == pytest.approx(losses(alone), abs=1e-6)
    for number, step in enumerate(found.steps):
        assert step.measures["gap"] < 1e-5 and step.measures["versions_behind"] == 0
        names = {answer["weights"] for answer in rollouts(Path(found.output_dir))[number]}
        assert len(names) == 1 and names.pop().startswith(f"{number:08d}-")


def test_what_an_actor_that_dies_was_asked_is_asked_again_and_drawn_the_same(
    knows_few: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = make_config(tmp_path / "run", model={"name_or_path": str(knows_few)}, rollout=on_ray(actors=2))
    settings = GenerateConfig(do_sample=True, temperature=1.0, max_new_tokens=6, seed=3)
    prompt = tokenizer.encode_runs(["What now?"])[0]
    asked = [Request(prompt=prompt, settings=settings, key=key, num_samples=4) for key in range(6)]
    with ExitStack() as closing:
        samplers = ray_samplers(config, tmp_path / "weights", ranks=1, closing=closing)
        pool = SamplerPool(samplers, at_once=8, pauses=(0.01, 0.1, 1.0))
        first = drawn(pool, asked)
        os.kill(ray.get(samplers[0]._actor.__ray_call__.remote(lambda actor: os.getpid())), signal.SIGKILL)
        assert drawn(pool, asked) == first and len(first) == 24
        for sampler in samplers:
            ray.kill(sampler._actor)
        with pytest.raises(SamplerLost, match=r"sampler [01] of the Ray cluster died.*asked 4 times"):
            drawn(pool, asked)


def drawn(pool: SamplerPool, asked: list[Request]) -> dict[tuple[int, int], list[int]]:
    found = [answer for answer in pool.generate(asked) if isinstance(answer, Completion)]
    return {(answer.key, answer.sample): answer.ids.tolist() for answer in found}


def test_an_actor_that_cannot_begin_says_why(
    knows_few: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ExitStack() as closing,
        pytest.raises(UserError, match="3 actors with 1 CPU each need 3, and the cluster has 2"),
    ):
        config = make_config(tmp_path / "run", rollout=on_ray(actors=3))
        ray_samplers(config, tmp_path, ranks=1, closing=closing)
    with ExitStack() as closing, pytest.raises(UserError, match=r"set rollout\.engine\.ray: auto|is local, and 2"):
        ray_samplers(make_config(tmp_path / "run", rollout=on_ray()), tmp_path, ranks=2, closing=closing)
    missing = make_config(tmp_path / "none", model={"name_or_path": str(tmp_path / "nowhere")}, rollout=on_ray())
    with ExitStack() as closing:
        (sampler,) = ray_samplers(missing, tmp_path, ranks=1, closing=closing)
        with pytest.raises(UserError, match="nowhere"):
            sampler.score(tokenizer.encode_runs(["What now?"])[0], 1)


REWARDS = """
import os, signal

def odd(answer, *, columns):
    return float(len(answer) % 2)

def pair(answers):
    return [float(answer == min(answers)) for answer in answers]

def picky(answer):
    if len(answer) % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)  # the function's own process, not the one that judges
    return 1.0
"""


def test_answers_are_judged_on_a_cluster_as_by_the_run_itself(train: Train, knows_few: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    functions = [{"function": f"{tmp_path}/rewards.py:{name}"} for name in ("odd", "pair", "picky")]
    rollout = {**ROLLOUT, "rewards": ["evenness", *functions]}
    own = {"model": {"name_or_path": str(knows_few)}, "train__max_steps": 2, "data__max_length": 64}
    told: list[str] = []
    runs = [
        train(
            make_data(make_segments(12)),
            folder=name,
            objective="rl",
            rollout={**rollout, **more},
            on_event=lambda event: told.append(getattr(event, "text", "")),
            **own,
        )
        for name, more in (("alone", {}), ("there", {"reward_actors": {"ray": "local", "actors": 2}}))
    ]
    rewards = [[[answer["rewards"] for answer in step] for step in rollouts(run.path)] for run in runs]
    assert rewards[0] == rewards[1] and losses(runs[0]) == losses(runs[1])
    assert len({tuple(one.items()) for one in rewards[0][0]}) > 2, "control: they differ"
    assert sum("judged by 2 processes of the Ray cluster" in text for text in told) == 1


def test_answers_whose_judge_dies_are_judged_by_another(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    rollout = {**ROLLOUT, "rewards": [{"function": f"{tmp_path}/rewards.py:odd"}]}
    rollout["reward_actors"] = {"ray": "local", "actors": 2}
    config = make_config(tmp_path / "run", objective="rl", rollout=rollout)
    answers = [
        DrawnAnswer(prompt="", expected=None, generated="x" * number, finished=True, group=number // 3)
        for number in range(10)
    ]
    with ExitStack() as closing:
        judge = ray_rewards(config, ranks=1, closing=closing, tell=lambda _: None)[0]
        expected = [float(number % 2) for number in range(10)]
        assert list(judge(answers)) == expected
        actors = judge.func.__self__.actors  # type: ignore[attr-defined]
        loaded = ray.get(actors[1].__ray_call__.remote(lambda actor: list(sys.modules)))
        assert "luthier.rewards.judging" in loaded and "torch" not in loaded, "functions are judged without it"
        os.kill(ray.get(actors[0].__ray_call__.remote(lambda actor: os.getpid())), signal.SIGKILL)
        assert list(judge(answers)) == expected
        for actor in actors:
            ray.kill(actor)
        with pytest.raises(SamplerLost, match=r"judge [01] of the Ray cluster died.*asked 4 times"):
            judge(answers)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_answers_to_one_prompt_are_judged_together(count: int) -> None:
    groups = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    answers = [
        DrawnAnswer(prompt="", expected=None, generated=str(at), finished=True, group=group)
        for at, group in enumerate(groups)
    ]
    parts = _parts(answers, count)
    assert len(parts) == count and [one for part in parts for one in part] == answers
    for part, other in itertools.combinations(parts, 2):
        assert not {one.group for one in part} & {one.group for one in other}


@pytest.mark.parametrize(
    ("rollout", "key", "said"),
    [
        ("{rewards: [exact], reward_actors: auto}", "rollout.reward_actors", "metrics"),
        ("{reward_actors: {actors: 2}}", "rollout.reward_actors.actors", "rollout.reward_actors.ray"),
        (
            "{rewards: [{url: 'http://localhost:1'}], engine: {ray: local}, reward_actors: auto}",
            "rollout.reward_actors.ray",
            "one cluster",
        ),
    ],
)
def test_judges_that_judge_nothing_are_refused(rollout: str, key: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: preset:tiny-qwen3\ndata: {train: 'preset:preferences'}\nobjective: {name: rl, loss: grpo}\n"
        f"rollout: {rollout}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_draft(path)
    (problem,) = caught.value.problems
    assert problem.key == key and said in problem.what


@pytest.mark.parametrize(
    ("engine", "key", "said"),
    [
        ("{url: 'http://localhost:1', ray: auto}", "rollout.engine.ray", "servers are named, too"),
        ("{actors: 2}", "rollout.engine.actors", "rollout.engine.ray"),
        ("{ray: auto, token_env: TOKEN}", "rollout.engine.token_env", "rollout.engine.url"),
        ("{weights: here}", "rollout.engine.weights", "not set"),
    ],
)
def test_settings_that_nobody_reads_are_refused(engine: str, key: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: preset:tiny-qwen3\ndata: {train: 'preset:preferences'}\nobjective: {name: rl, loss: grpo}\n"
        f"rollout:\n  engine: {engine}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_draft(path)
    (problem,) = caught.value.problems
    assert problem.key == key and said in problem.what and problem.where.endswith("run.yaml:5")
