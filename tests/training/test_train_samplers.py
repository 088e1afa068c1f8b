"""Runs whose answers are drawn by servers: the same as those that draw for themselves, whatever the servers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_rollouts import ROLLOUT, evenness, ids, losses, rollouts
from tiny_runs import make_data, make_segments
from transformers import AutoModelForCausalLM

from luthier.config.loading import load_config, load_draft
from luthier.encoding.encoder import Encoder
from luthier.engines import WeightsName
from luthier.engines.local import LocalEngine, WeightsTaker, digest_of, folder_of
from luthier.errors import ConfigError, SamplerLost, TrainingError, UserError
from luthier.metrics import METRICS, Metric
from luthier.training.report import RunResult
from luthier.training.report.events import Saved
from tests.serve.conftest import TOKEN, Running, running

Train = Callable[..., RunResult]
LORA = {"adapter": {"type": "lora", "r": 4, "lora_alpha": 8}}
RESUMES = {"output__save_strategy": "steps", "output__save_steps": 2, "train__lr_scheduler_type": "constant"}


@pytest.fixture(autouse=True)
def _a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "evenness", Metric(of_row=evenness))
    monkeypatch.setenv("SAMPLER_TOKEN", TOKEN)
    monkeypatch.setattr("luthier.training.rollouts.delivery.PAUSES", (0.01, 0.01, 0.01))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.from_config(load_config({"model": "preset:tiny-qwen3", "data": {}, "train": {"enabled": False}}))


@dataclass
class Samplers:
    """Servers of a model that take weights from ``folder``, and what they were asked."""

    folder: Path
    urls: list[str] = field(default_factory=list)
    takers: list[WeightsTaker] = field(default_factory=list)
    servers: list[Running] = field(default_factory=list)

    def run(self, **more: Any) -> dict[str, Any]:
        """What a description says of them."""
        engine = {"url": self.urls, "token_env": "SAMPLER_TOKEN", "weights": str(self.folder)}
        return {"rollout": {**ROLLOUT, "engine": engine, **more}}


@contextmanager
def samplers_of(model: Path, folder: Path, encoder: Encoder, count: int = 1) -> Iterator[Samplers]:
    if not count:
        yield Samplers(folder=folder)
        return
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(model), encoder.tokenizer, batch_size=8)
    taker = WeightsTaker(engine, folder)
    with (
        running(encoder, engine.session(), score=engine.scored, taker=taker) as server,
        samplers_of(model, folder, encoder, count - 1) as found,
    ):
        found.urls.append(server.url)
        found.takers.append(taker)
        found.servers.append(server)
        yield found


@pytest.fixture
def sampler(knows_few: Path, tmp_path: Path, encoder: Encoder) -> Iterator[Samplers]:
    with samplers_of(knows_few, tmp_path / "weights", encoder) as found:
        yield found


@pytest.fixture
def run(train: Train, knows_few: Path) -> Train:
    def of(folder: str = "run", **changes: Any) -> RunResult:
        told = {"objective": {"name": "rl", "loss": "dapo"}, "rollout": ROLLOUT, "data__max_length": 64}
        own = {"model": {"name_or_path": str(knows_few)}, "train__max_steps": 3, "train__learning_rate": 1e-2}
        return train(make_data(make_segments(24)), folder=folder, **{**told, **own, **changes})

    return of


@pytest.mark.parametrize(("adapter", "count"), [({}, 2), (LORA, 1)])
def test_servers_draw_what_the_run_would_have_drawn(
    adapter: dict[str, Any], count: int, run: Train, knows_few: Path, tmp_path: Path, encoder: Encoder
) -> None:
    alone = run("alone", **adapter)
    with samplers_of(knows_few, tmp_path / "weights", encoder, count) as there:
        found = run("there", **adapter, **there.run())
        asked = [server.gate.counts.answered["/v1/completions", 200] for server in there.servers]
        taken = [server.gate.counts.answered["/v1/weights", 200] for server in there.servers]
    assert ids(found) == ids(alone) and ids(found)[1] != ids(found)[0]
    assert losses(found) == pytest.approx(losses(alone), abs=1e-6)
    assert taken == [3] * count and all(number > 3 for number in asked)
    for number, step in enumerate(found.steps):
        assert step.measures["gap"] < 1e-5 and step.measures["versions_behind"] == 0
        assert step.measures["seconds_sample"] > 0 and step.measures["seconds_deliver"] > 0
        names = {answer["weights"] for answer in rollouts(Path(found.output_dir))[number]}
        assert len(names) == 1 and names.pop().startswith(f"{number:08d}-")
    assert "seconds_sample" not in alone.steps[0].measures
    assert len(list((tmp_path / "weights").iterdir())) == 2, "old weights are removed"


def test_a_server_that_is_gone_ends_the_run_with_a_checkpoint_from_which_it_goes_on(
    run: Train, sampler: Samplers, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("whole", **sampler.run(), **RESUMES)
    real, drawn = WeightsTaker.take, []

    def take(self: WeightsTaker, weights: Any) -> None:
        drawn.append(weights.version)
        if weights.version == 1:
            raise UserError("the disk is full of sand")
        real(self, weights)

    monkeypatch.setattr(WeightsTaker, "take", take)
    with pytest.raises(SamplerLost) as caught:
        run("parts", **sampler.run(), **RESUMES)
    assert "disk is full of sand" in caught.value.message and "checkpoint-1" in caught.value.message
    assert drawn == [0, 1, 1, 1, 1], "it was asked three times more"
    monkeypatch.setattr(WeightsTaker, "take", real)
    again = run("parts", **sampler.run(), **RESUMES)
    assert ids(again) == ids(whole)
    assert losses(again) == pytest.approx(losses(whole), abs=1e-6), "servers round as their batches have it"


def test_a_run_goes_on_between_updates_that_share_answers_whatever_weights_the_server_has(
    run: Train, sampler: Samplers
) -> None:
    changes = {**sampler.run(updates=2), **RESUMES, "output__save_steps": 1, "train__max_steps": 4}
    whole = run("whole", **changes)
    assert sampler.takers[0].taken is not None and sampler.takers[0].taken.version == 2

    def killed(event: object) -> None:
        if isinstance(event, Saved) and event.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("parts", on_event=killed, **changes)
    sampler.takers[0].take(_some_weights(sampler.folder))
    again = run("parts", **changes)
    assert ids(again) == ids(whole)
    assert losses(again) == pytest.approx(losses(whole), abs=1e-6)


def _some_weights(folder: Path) -> WeightsName:
    """Others than any that a run begins with."""
    found = folder_of(folder, 99)
    found.mkdir()
    for file in folder_of(folder, 0).iterdir():
        (found / file.name).write_bytes(file.read_bytes())
    weights = load_file(found / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, found / "model.safetensors", {"format": "pt"})
    return WeightsName(version=99, digest=digest_of(found))


def test_a_server_that_says_that_it_took_weights_and_did_not_is_named(
    run: Train, sampler: Samplers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightsTaker, "_put", lambda self, source: None)
    with pytest.raises(TrainingError) as caught:
        run(**sampler.run())
    assert sampler.urls[0] in caught.value.message and "after 1 step " in caught.value.message


def test_a_server_that_begins_anew_is_given_the_weights_once_more(
    run: Train, sampler: Samplers, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, real = ids(run("alone")), WeightsTaker.take
    lost: list[int] = []

    def take(self: WeightsTaker, weights: Any) -> None:
        real(self, weights)
        if weights.version == 1 and not lost:
            lost.append(weights.version)
            self.taken = None  # as a process is that has just started

    monkeypatch.setattr(WeightsTaker, "take", take)
    assert ids(run(**sampler.run())) == expected and lost == [1]


def test_weights_that_are_not_whole_or_of_another_run_are_not_taken(
    sampler: Samplers, knows_few: Path, tmp_path: Path
) -> None:
    server, folder = sampler.servers[0], folder_of(sampler.folder, 7)
    folder.mkdir(parents=True)
    for file in knows_few.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    right = digest_of(folder)

    def give(**body: Any) -> tuple[int, str]:
        answer = server.http.post("/v1/weights", json=body)
        return answer.status_code, answer.text

    assert give(version=7, digest=right)[0] == 200 and sampler.takers[0].taken is not None
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert give(version=7, digest=digest_of(folder))[0] == 200
    status, said = give(version=7, digest=right)
    assert status == 409 and right in said
    assert give(version=8, digest=right)[0] == 409
    for wrong in ({"version": "../7"}, {"version": -1}, {"version": 7, "path": "/"}):
        assert give(**wrong, digest=right)[0] == 400
    assert server.http.post("/v1/weights", json={}, headers={"Authorization": "Bearer no"}).status_code == 401


def test_a_server_takes_no_weights_unless_it_was_started_to(
    run: Train, knows_few: Path, tmp_path: Path, encoder: Encoder
) -> None:
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(knows_few), encoder.tokenizer)
    with running(encoder, engine.session(), score=engine.scored) as server:
        assert server.http.post("/v1/weights", json={}).status_code == 404
        with pytest.raises(UserError) as caught:
            run(**Samplers(folder=tmp_path / "weights", urls=[server.url]).run())
    assert "--accept-weights" in str(caught.value.hint)


# ---------------------------------------------------------------------------------------------------------- staleness


def test_a_sampler_one_update_behind_is_exactly_that_also_after_a_kill(
    run: Train, sampler: Samplers, tmp_path: Path
) -> None:
    changes = {**sampler.run(staleness=1, correction="truncate"), **RESUMES}
    whole = run("whole", train__max_steps=5, **changes)
    assert [step.measures["versions_behind"] for step in whole.steps] == [0, 1, 1, 1, 1]
    versions = [{one["weights"][:8] for one in step} for step in rollouts(Path(whole.output_dir))]
    assert versions == [{f"{number:08d}"} for number in (0, 0, 1, 2, 3)]
    assert any(step.measures["correction_weight"] != pytest.approx(1, abs=1e-4) for step in whole.steps[1:])

    def killed(event: object) -> None:
        if isinstance(event, Saved) and event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("parts", train__max_steps=5, on_event=killed, **changes)
    again = run("parts", train__max_steps=5, **changes)
    assert ids(again) == ids(whole) and losses(again) == pytest.approx(losses(whole), abs=1e-6)


WRONG = {
    "rollout={staleness: 1}": {"rollout.engine", "rollout.correction"},
    "rollout={staleness: 1, correction: truncate, engine: 'http://a', updates: 2}": {"rollout.updates"},
    "rollout={staleness: 1, correction: truncate, engine: 'http://a', dead_groups: resample}": {"rollout.dead_groups"},
    "rollout={engine: 'ftp://a'}": {"rollout.engine.url[0]"},
    "rollout={engine: {url: ['http://a', 'http://a']}}": {"rollout.engine.url[1]"},
    "rollout={engine: {url: 'http://a', token_env: T}}": {"rollout.engine.url[0]"},
    "rollout={engine: {token_env: T}}": {"rollout.engine.token_env"},
}


@pytest.mark.parametrize("override", WRONG)
def test_what_contradicts_is_told_at_its_key(override: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: preset:tiny-qwen3\ndata: {train: preset:skills}\nobjective: rl\n")
    with pytest.raises(ConfigError) as caught:
        load_draft(path, [override])
    assert {problem.key for problem in caught.value.problems} == WRONG[override]
