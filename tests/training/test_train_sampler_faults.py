"""Faults of what draws the answers of a run: each stops it and is told by its name, and a sound one is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_data, make_segments

from luthier.engines import Completion, Finish, Refusal, Request
from luthier.engines.local import NO_ADAPTER, LocalEngine
from luthier.errors import TrainingError
from luthier.metrics import METRICS, Metric
from luthier.models.passes import ModelPass
from luthier.objectives.policy_losses import GapSums
from luthier.rewards.judging import Judged, RewardJudge
from luthier.training.report import RunResult
from luthier.training.rollouts import drawing
from luthier.training.rollouts.early_warnings import NUMBERS
from luthier.training.rollouts.sampler_probes import Cause, ScoredAnswer, cause_of, visible_fault

Train = Callable[..., RunResult]
Answers = Iterator[Completion | Refusal]
Generate = Callable[[LocalEngine, list[Request]], Answers]
REAL = LocalEngine.generate


@pytest.fixture(autouse=True)
def _a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    def evenness(expected: str, generated: str) -> float:
        return sum(ord(letter) % 2 == 0 for letter in generated) / max(len(generated), 1)

    monkeypatch.setitem(METRICS._rows, "evenness", Metric(of_row=evenness))


@pytest.fixture
def run(train: Train, knows_few: Path) -> Train:
    def of(**changes: Any) -> RunResult:
        rollout = {"prompts_per_step": 4, "answers": 4, "max_new_tokens": 12, "min_finished": 0.0}
        return train(
            make_data(make_segments(12)),
            **{
                "objective": {"name": "rl", "loss": "dapo"},
                "rollout": {**rollout, "rewards": ["evenness"]},
                "model": {"name_or_path": str(knows_few)},
                "data__max_length": 128,
                "train__learning_rate": 1e-2,
                **changes,
            },
        )

    return of


def prompts_changed(change: Callable[[Any], Any]) -> Generate:
    def generate(engine: LocalEngine, requests: list[Request]) -> Answers:
        return REAL(engine, [replace(one, prompt=change(one.prompt).astype(np.int32)) for one in requests])

    return generate


def answers_changed(change: Callable[[list[Completion]], list[Completion]]) -> Generate:
    def generate(engine: LocalEngine, requests: list[Request]) -> Answers:
        return iter(change([one for one in REAL(engine, requests) if isinstance(one, Completion)]))

    return generate


def drawn_otherwise(told: Callable[[torch.Tensor], torch.Tensor], **settings: Any) -> Generate:
    """Drawn with ``settings``, and the log-probabilities are ``told(scores_NV)``."""

    def generate(engine: LocalEngine, requests: list[Request]) -> Answers:
        asked = [replace(one, settings=one.settings.model_copy(update=settings)) for one in requests]
        prompts = {one.key: one.prompt for one in requests}
        for answer in REAL(engine, asked):
            assert isinstance(answer, Completion)
            prompt, new_N1 = prompts[answer.key], torch.from_numpy(answer.ids.astype(np.int64))[:, None]
            ids = torch.from_numpy(np.concatenate([prompt, answer.ids]).astype(np.int64))[None]
            with torch.no_grad():
                scores_NV = engine.model.eval()(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            yield replace(answer, logprobs=told(scores_NV).log_softmax(-1).gather(1, new_N1)[:, 0].numpy())

    return generate


def likeliest(scores_NV: torch.Tensor) -> torch.Tensor:
    ordered, order = scores_NV.softmax(-1).sort(-1, descending=True)
    left_out = (ordered.cumsum(-1) - ordered >= 0.8).gather(1, order.argsort(-1))
    return scores_NV.masked_fill(left_out, -torch.inf)


def by_a_copy(change: Callable[[LocalEngine], None] = lambda _: None) -> Generate:
    """By the model as it was in the first step."""
    kept: list[LocalEngine] = []

    def generate(engine: LocalEngine, requests: list[Request]) -> Answers:
        if not kept:
            kept.append(LocalEngine(deepcopy(engine.model), engine.tokenizer, batch_size=engine.batch_size))
            change(kept[0])
        return REAL(kept[0], requests)

    return generate


def swapped(answers: list[Completion]) -> list[Completion]:
    """Log-probabilities go around among the answers of a prompt that are as long."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, answer in enumerate(answers):
        places.setdefault((answer.key, len(answer.ids)), []).append(place)
    found = list(answers)
    for same in places.values():
        for place, other in zip(same, np.roll(same, 1), strict=True):
            found[place] = replace(answers[place], logprobs=answers[other].logprobs)
    return found


def without_stop(answers: list[Completion]) -> list[Completion]:
    return [
        replace(one, ids=one.ids[:-1], logprobs=one.logprobs[:-1]) if one.finish is Finish.STOP else one
        for one in answers
    ]


def with_one_more(answers: list[Completion]) -> list[Completion]:
    return [
        replace(one, ids=np.append(one.ids, one.ids[-1]), logprobs=np.append(one.logprobs, one.logprobs[-1]))
        for one in answers
    ]


COLD = {
    "rollout": {
        "prompts_per_step": 4,
        "answers": 4,
        "max_new_tokens": 12,
        "min_finished": 0.0,
        "rewards": ["evenness"],
        "temperature": 0.7,
    }
}
LORA = {"adapter": {"type": "lora", "r": 8}}
FAULTS: dict[str, tuple[Generate, str]] = {
    "stale": (by_a_copy(), Cause.STALE),
    "temperature": (drawn_otherwise(lambda scores_NV: scores_NV / 0.7, temperature=0.7), Cause.TEMPERATURE),
    "top_p": (drawn_otherwise(likeliest, top_p=0.8), Cause.TRUNCATED),
    "short prompt": (prompts_changed(lambda prompt: prompt[:-1] if len(prompt) > 1 else prompt), Cause.SHORT_PROMPT),
    "doubled begin": (prompts_changed(lambda prompt: np.append(prompt[:1], prompt)), Cause.DOUBLED_BEGIN),
    "other prompt": (prompts_changed(lambda prompt: np.append(prompt, [2034, 2033])), Cause.OTHER_PROMPT),
    "dtype": (by_a_copy(lambda engine: engine.model.to(torch.bfloat16)), Cause.DTYPE),
    "no adapter": (lambda engine, requests: REAL(engine.under(NO_ADAPTER), requests), Cause.NO_ADAPTER),
    "temperature of the run": (
        lambda engine, requests: REAL(engine, [replace(one, tempered=False) for one in requests]),
        Cause.TEMPERATURE,
    ),
    "shifted": (
        answers_changed(lambda them: [replace(one, logprobs=np.roll(one.logprobs, 1)) for one in them]),
        Cause.SHIFTED,
    ),
    "swapped": (answers_changed(swapped), Cause.SWAPPED),
    "lost stop": (answers_changed(without_stop), "lost stop tokens"),
    "stop passed over": (answers_changed(with_one_more), "stop tokens that are passed over"),
}

CHANGES = {"no adapter": LORA, "temperature of the run": COLD}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_told_by_its_name(fault: str, run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, name = FAULTS[fault]
    monkeypatch.setattr(LocalEngine, "generate", lambda self, requests: generate(self, list(requests)))
    with pytest.raises(TrainingError) as caught:
        run(**CHANGES.get(fault, {}))
    assert name in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("changes", "cause"), [({}, Cause.TRAINING_PASS), ({"quantization": "int8"}, Cause.ROUNDED_INPUTS)]
)
def test_a_pass_of_training_that_differs_from_the_model_is_told(
    changes: dict[str, Any], cause: Cause, run: Train, knows_few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ModelPass.token_scores

    def token_scores(self: ModelPass, *args: Any, **keys: Any) -> Any:
        scored, targets = real(self, *args, **keys)
        scores = replace(scored.scores, logps_K=scored.scores.logps_K * 1.1)
        return replace(scored, scores=scores), targets

    monkeypatch.setattr(ModelPass, "token_scores", token_scores)
    with pytest.raises(TrainingError) as caught:
        run(model={"name_or_path": str(knows_few), **changes}, **(LORA if changes else {}))
    assert cause in caught.value.message


def rolled(found: Any) -> Any:
    return np.roll(found, 1)


@pytest.mark.parametrize("fault", ["advantages", "answers"])
def test_advantages_of_the_neighbour_are_told(fault: str, run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has that of the one before, or each token is said to be of the answer before."""
    real_advantages, real_tree = drawing.advantages, drawing.answer_tree
    if fault == "advantages":
        monkeypatch.setattr(drawing, "advantages", lambda *asked: rolled(real_advantages(*asked)))
    else:

        def tree(*asked: Any) -> Any:
            found = real_tree(*asked)
            return replace(found, answers_K=(found.answers_K + 1) % (found.answers_K.max() + 1))

        monkeypatch.setattr(drawing, "answer_tree", tree)
    with pytest.raises(TrainingError) as caught:
        run()
    assert "advantages of others" in caught.value.message


def test_rewards_of_the_neighbour_are_told(run: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of a step gets the reward of the one before."""
    real, told = RewardJudge.judge, list[str]()

    def judge(self: RewardJudge, answers: Any) -> Judged:
        found = real(self, answers)
        return replace(found, total_N=rolled(found.total_N))

    monkeypatch.setattr(RewardJudge, "judge", judge)
    run(train__max_steps=1, on_event=lambda event: told.append(getattr(event, "text", "")))
    assert sum("rewards depend on the order" in text for text in told) == 1


@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_a_sound_sampler_is_left_alone(loss: str, run: Train) -> None:
    told: list[str] = []
    found = run(
        objective={"name": "rl", "loss": loss},
        train__max_steps=100,
        train__learning_rate=2e-3,
        on_event=lambda event: told.append(getattr(event, "text", "")),
    )
    gaps = ("other probabilities", "computes otherwise", "differ from training")
    alarms = (*gaps, "at fault", "depend on the order", "advantages of others")
    assert not [text for text in told if any(alarm in text for alarm in alarms)]
    assert found.steps[-1].grad_norm > 0, "it learns to the end"
    for step in found.steps:
        assert set(NUMBERS) <= set(step.measures)
        assert step.measures["gap"] <= step.measures["gap_p99"] <= step.measures["gap_max"] < 1e-3
        assert step.measures["gap_ratio"] == pytest.approx(1, abs=1e-5)
        assert step.measures["gap_ess"] == pytest.approx(1, abs=1e-5)


def test_an_engine_that_did_not_take_the_weights_is_told_at_the_next_step(
    run: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalEngine.score
    monkeypatch.setattr(LocalEngine, "score", lambda self, ids, start, media=(): real(self, ids, start, media) - 0.01)
    with pytest.raises(TrainingError) as caught:
        run()
    assert "under the same weights" in caught.value.message


# ---------------------------------------------------------------------------------------------------------- as numbers


def test_the_numbers_are_those_of_their_definitions_in_any_parts() -> None:
    rng = torch.Generator().manual_seed(0)
    gaps_K = torch.randn(4000, generator=rng) * 0.1
    segments_K = torch.arange(4000) // 40
    whole, parts = GapSums(torch.device("cpu")), [GapSums(torch.device("cpu")) for _ in range(2)]
    whole.add(gaps_K, segments_K, 100)
    for half, sums in zip((slice(None, 2000), slice(2000, None)), parts, strict=True):
        sums.add(gaps_K[half], segments_K[half] - segments_K[half][0], 50)
    found = GapSums.numbers(whole.sums)
    in_parts = GapSums.numbers(parts[0].sums + parts[1].sums)
    assert found is not None and in_parts is not None
    assert asdict(in_parts) == pytest.approx(asdict(found))
    exact = gaps_K.double()
    answers_S = exact.view(100, 40).sum(1).exp()
    assert found.mean == pytest.approx(float(exact.abs().mean()))
    assert found.p99 == pytest.approx(float(exact.abs().quantile(0.99)), rel=0.04)
    assert found.largest == pytest.approx(float(exact.abs().max()), rel=0.03)
    assert found.k1 == pytest.approx(float(-exact.mean()))
    assert found.k3 == pytest.approx(float((exact.exp() - 1 - exact).mean()))
    assert found.ratio == pytest.approx(float(exact.exp().mean()))
    assert found.sample_size == pytest.approx(float(answers_S.sum() ** 2 / answers_S.square().sum() / 100))
    assert GapSums.numbers(GapSums(torch.device("cpu")).sums) is None


def answers_with(gaps: Callable[[np.random.Generator, int], Any], count: int = 8) -> list[ScoredAnswer]:
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        training = -rng.exponential(size=40).astype(np.float32)
        found.append(
            ScoredAnswer(group=number // 4, engine=(training + gaps(rng, 40)).astype(np.float32), training=training)
        )
    return found


def test_causes_without_a_probe_are_told_by_where_the_gaps_are() -> None:
    def noise(rng: np.random.Generator, count: int) -> Any:
        return rng.normal(size=count)

    def first(rng: np.random.Generator, count: int) -> Any:
        return rng.normal(size=count) * np.where(np.arange(count) < 3, 3, 0.01)

    likelier = answers_with(lambda rng, count: rng.uniform(0, 0.2, size=count))
    assert cause_of(likelier, {}, smallest_before=1e-6) is Cause.TRUNCATED
    assert cause_of(answers_with(first), {}, smallest_before=None) is Cause.OTHER_PROMPT
    assert cause_of(answers_with(noise), {}, smallest_before=1e-6) is Cause.STALE
    assert cause_of(answers_with(noise), {}, smallest_before=None) is Cause.WEIGHTS


WRONG: dict[str, tuple[list[int], list[float]]] = {
    "1 log-prob": ([5, 2], [0.0]),
    "has the token 99": ([99, 2], [0.0, 0.0]),
    "has the token -1": ([-1, 2], [0.0, 0.0]),
    "has the token 50": ([50, 2], [0.0, 0.0]),
    "that is none: nan": ([5, 2], [0.0, np.nan]),
    "none: nan": ([5, 2], [np.nan, np.nan]),
    "that is none: -inf": ([5, 2], [-0.5, -np.inf]),
    "that is none: 0.5": ([5, 2], [0.5, 0.0]),
    "lost stop tokens": ([5, 7], [0.0, 0.0]),
    "passed over": ([2, 2], [0.0, 0.0]),
}


@pytest.mark.parametrize("told", WRONG)
def test_answers_that_no_model_can_have_given_are_refused(told: str) -> None:
    ids, logprobs = map(np.array, WRONG[told])
    answer = Completion(key=0, sample=0, ids=ids, logprobs=logprobs, finish=Finish.STOP)
    fault = visible_fault([answer], frozenset([2]), 50)
    assert fault is not None and told in fault
