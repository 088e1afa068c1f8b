"""What the function of a loss gives is looked at before it is summed: of targets, pairs, rows, rewards and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import luthier
from luthier.config.objective import LOSSES, ObjectiveConfig
from luthier.objectives import Head
from luthier.objectives.hidden_loss import hidden_loss_sum
from luthier.objectives.loss_sums import FeedbackScores, feedback_loss_sum, pair_loss_sum, reward_loss_sum
from luthier.objectives.pair_formulas import SequenceScores, pair_scores
from luthier.training.losses import answer_settings, token_settings

U = 6
PAIRS_P2 = torch.arange(2 * U).reshape(U, 2)


def of_targets(name: str) -> Any:
    hidden_KD, weight_VD = torch.randn(U, 4, requires_grad=True), torch.randn(9, 4)
    settings = luthier.TokenSettings(loss=name)
    return hidden_loss_sum(hidden_KD, Head(weight_VD=weight_VD), torch.arange(U), None, settings=settings)


def of_targets_of_a_function(name: str) -> Any:
    hidden_KD, weight_VD = torch.randn(U, 4, requires_grad=True), torch.randn(9, 4)
    settings = luthier.TokenSettings(loss=name)
    return hidden_loss_sum(hidden_KD, lambda rows: rows @ weight_VD.T, torch.arange(U), None, settings=settings)


def of_pairs(name: str) -> Any:
    scores = SequenceScores(logps_S=-torch.rand(2 * U).requires_grad_(), lengths_S=torch.ones(2 * U).long())
    return pair_loss_sum(pair_scores(scores, PAIRS_P2), name, luthier.PairSettings())


def of_rows(name: str) -> Any:
    scores = FeedbackScores(
        logps_R=-torch.rand(U).requires_grad_(),
        ref_logps_R=-torch.rand(U),
        desirable_R=torch.arange(U) % 2 == 0,
        lengths_R=torch.ones(U).long(),
    )
    return feedback_loss_sum(scores, name, luthier.FeedbackSettings(), luthier.FeedbackBaselines())


def of_rewards(name: str) -> Any:
    return reward_loss_sum(torch.randn(2 * U).requires_grad_(), PAIRS_P2, name=name)


CALLS: dict[str, tuple[str, Callable[[str], Any], Callable[..., torch.Tensor]]] = {
    "targets": ("sft", of_targets, lambda quantities, _: -quantities.logps_C),
    "targets of a function": ("sft", of_targets_of_a_function, lambda quantities, _: -quantities.logps_C),
    "pairs": ("dpo", of_pairs, lambda scores, *_: -scores.ratio_gap_P),
    "rows": ("kto", of_rows, lambda ratios_R, signs_R, *_: -signs_R * ratios_R),
    "rewards": ("rm", of_rewards, lambda chosen_P, rejected_P, *_: rejected_P - chosen_P),
}
ODD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a mean": (lambda losses_U: losses_U.mean(), "shape []"),
    "a row": (lambda losses_U: losses_U[None], f"shape [1, {U}]"),
    "a column": (lambda losses_U: losses_U[:, None], f"shape [{U}, 1]"),
    "too few": (lambda losses_U: losses_U[1:], f"shape [{U - 1}]"),
    "a number": (lambda losses_U: 1.0, "a float"),
    "without a gradient": (lambda losses_U: losses_U.detach(), "has no gradient"),
}


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSSES, "_rows", dict(LOSSES._rows))
    monkeypatch.setattr(LOSSES, "_added_by", {})


def registered(objective: str, function: Callable[..., Any]) -> str:
    luthier.register_loss(luthier.Loss(name="mine", objectives=(objective,), function=function, formula="", says=""))
    return "mine"


@pytest.mark.parametrize("kind", CALLS)
def test_losses_of_each_unit_are_taken_as_they_are(kind: str) -> None:
    objective, call, right = CALLS[kind]
    found = call(registered(objective, right))
    found.loss_sum.backward()
    assert found.loss_sum.shape == () and torch.isfinite(found.loss_sum)


@pytest.mark.parametrize("kind", ["targets", "targets of a function"])
def test_a_loss_of_targets_has_the_mean_of_the_logits_with_its_slope(kind: str) -> None:
    """Label smoothing as a plugin writes it, beside Luthier's own."""

    def smooth(known: luthier.TokenQuantities, settings: luthier.TokenSettings) -> torch.Tensor:
        return -0.9 * known.logps_C + 0.1 * (known.lse_C - known.mean_logits_C)

    weight_VD, found = torch.randn(9, 4), []
    head: Any = Head(weight_VD=weight_VD) if kind == "targets" else lambda rows: rows @ weight_VD.T
    mine = luthier.TokenSettings(loss=registered("sft", smooth))
    for settings in (mine, luthier.TokenSettings(label_smoothing=0.1)):
        hidden_KD = torch.linspace(-1, 1, 4 * U).reshape(U, 4).requires_grad_()
        loss = hidden_loss_sum(hidden_KD, head, torch.arange(U), None, settings=settings).loss_sum
        loss.backward()
        found.append(torch.cat([loss.detach()[None], hidden_KD.grad.flatten()]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_a_loss_finds_all_of_its_numbers_by_their_keys(objective: str) -> None:
    numbers = {"beta": 0.3, "mine_share": 2.0}
    luthier.register_loss(
        luthier.Loss(name="mine", objectives=(objective,), function=print, numbers=numbers, formula="", says="")
    )
    config = ObjectiveConfig(name=objective, loss="mine", beta=0.4)
    kinds = {"dpo": luthier.PairSettings, "kto": luthier.FeedbackSettings}
    settings = token_settings(config) if objective == "sft" else answer_settings(config, kinds[objective])
    assert settings.own == {"beta": 0.4, "mine_share": 2.0}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", CALLS)
def test_what_is_no_loss_of_each_unit_is_refused(kind: str, odd: str) -> None:
    objective, call, right = CALLS[kind]
    spoil, told = ODD[odd]
    name = registered(objective, lambda *given: spoil(right(*given)))
    with pytest.raises(luthier.PluginError, match="'mine' of this program") as caught:
        call(name)
    assert told in caught.value.message and caught.value.hint
    assert odd == "without a gradient" or f"[{U}] is needed" in caught.value.message


def test_without_gradients_a_loss_needs_none() -> None:
    objective, call, right = CALLS["pairs"]
    name = registered(objective, lambda *given: right(*given).detach())
    with torch.no_grad():
        assert torch.isfinite(call(name).loss_sum)


@pytest.mark.parametrize("kind", CALLS)
def test_what_a_plugin_raises_is_told_with_its_line(kind: str) -> None:
    def broken(*_: object) -> torch.Tensor:
        return torch.zeros(2) @ torch.zeros(3)

    objective, call, _ = CALLS[kind]
    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(luthier.PluginError, match=f"{Path(__file__).name}:{line}.*RuntimeError"):
        call(registered(objective, broken))


def test_memory_that_is_short_is_told_as_such() -> None:
    def hungry(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    objective, call, _ = CALLS["pairs"]
    with pytest.raises(torch.OutOfMemoryError):
        call(registered(objective, hungry))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
def test_a_mean_over_drawn_answers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) for n in range(2)]
    Path("rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    drawing = {"answers": 2, "prompts_per_step": 2, "max_new_tokens": 4, "min_finished": 0, "dead_groups": "keep"}
    run = {
        "model": "preset:tiny-qwen3",
        "data": {"train": "rows.jsonl", "max_length": 64, "store": "store"},
        "objective": {
            "name": "rl",
            "loss": registered("rl", lambda scores, _: -(scores.ratios_K * scores.advantages_K).mean()),
        },
        "rollout": {"rewards": [{"metric": "exact"}], **drawing},
        "train": {"max_steps": 1, "warmup_steps": 0},
        "runtime": {"threads": 1, "device": "cpu"},
        "tracking": {"progress": False},
    }
    with pytest.raises(luthier.PluginError, match="'mine' of this program"):
        luthier.train(run)
