"""Losses of policies: against their formulas, and against the exact gradient of what is expected, by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from luthier.config.objective import LOSSES, losses_of
from luthier.objectives.policy_losses import (
    Advantage,
    Divisor,
    PolicyScores,
    advantages,
    divided,
    outside_of_clip,
    units,
)

LONGEST = 11


def drawn(seed: int, lengths: Sequence[int] = (3, 1, 5, 2), near: float = 0.3) -> PolicyScores:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    behaviour = -torch.rand(total, generator=generator, dtype=torch.float64) * 3
    moved = behaviour + near * torch.randn(total, generator=generator, dtype=torch.float64)
    return PolicyScores(
        logps_K=moved.requires_grad_(),
        behaviour_K=behaviour,
        advantages_S=torch.randn(len(lengths), generator=generator, dtype=torch.float64),
        segments_K=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
    )


def ours(name: str, scores: PolicyScores) -> torch.Tensor:
    """The loss of a step that is these answers."""
    row = LOSSES[name]
    divisor = Divisor(row.divisor)
    losses_K = divided(row.compute(scores, row.numbers), scores, divisor, LONGEST)
    return losses_K.sum() / units(divisor, num_targets=len(losses_K), num_answers=len(scores.advantages_S))


def by_hand(name: str, scores: PolicyScores) -> torch.Tensor:
    """The same, an answer at a time, as the papers write it."""
    numbers = LOSSES[name].numbers
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number, advantage in enumerate(scores.advantages_S):
        now, before = (values[scores.segments_K == number] for values in (scores.logps_K, scores.behaviour_K))
        ratios, length = torch.exp(now - before), len(now)
        whole = torch.exp((now - before).mean())
        match name:
            case "dapo" | "grpo" | "dr_grpo" | "max_rl":
                near = ratios.clip(1 - numbers["clip_low"], 1 + numbers["clip_high"])
                each = -torch.min(ratios * advantage, near * advantage)
            case "gspo":
                near = whole.clip(1 - numbers["clip_low"], 1 + numbers["clip_high"])
                each = -torch.min(whole * advantage, near * advantage).expand(length)
            case "cispo":
                each = -torch.clip(ratios.detach(), max=1 + numbers["clip_high"]) * advantage * now
            case "sapo":
                t = numbers["sapo_positive"] if advantage > 0 else numbers["sapo_negative"]
                each = -advantage * 4 / (t * (1 + torch.exp(-t * (ratios - 1))))
            case "rloo":
                whole = torch.exp((now - before).sum())
                near = whole.clip(1 - numbers["clip_low"], 1 + numbers["clip_high"])
                each = -torch.min(whole * advantage, near * advantage)[None]
        match name:
            case "grpo" | "gspo" | "sapo":
                total, count = total + each.mean(), count + 1
            case "dr_grpo":
                total, count = total + each.sum() / LONGEST, count + 1
            case "rloo":
                total, count = total + each.sum(), count + 1
            case _:
                total, count = total + each.sum(), count + length
    return total / count


@pytest.mark.parametrize("name", losses_of("rl"))
@pytest.mark.parametrize("seed", range(4))
def test_losses_and_gradients_are_those_of_their_formulas(name: str, seed: int) -> None:
    scores, again = drawn(seed), drawn(seed)
    loss, expected = ours(name, scores), by_hand(name, again)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    loss.backward()
    expected.backward()
    assert scores.logps_K.grad is not None and again.logps_K.grad is not None
    np.testing.assert_allclose(scores.logps_K.grad, again.logps_K.grad, atol=1e-12)


@pytest.mark.parametrize("name", losses_of("rl"))
def test_at_the_first_update_the_gradient_is_that_of_the_expected_reward(name: str) -> None:
    """All answers of one or two tokens of a policy with three, each as often as it is drawn: the mean gradient is the
    policy gradient of the rewards, but for how much each answer's length counts."""
    logits = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]], dtype=torch.float64, requires_grad=True)
    row, divisor = LOSSES[name], Divisor(LOSSES[name].divisor)
    rewards = {answer: math.sin(1 + 3 * answer[0] + answer[1]) for answer in itertools.product(range(3), repeat=2)}
    mean, exact = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    for answer, reward in rewards.items():
        logps = logits.log_softmax(-1)[range(2), answer]
        chance = logps.sum().exp().item()
        scores = PolicyScores(
            logps_K=logps,
            behaviour_K=logps.detach(),
            advantages_S=torch.tensor([reward], dtype=torch.float64),
            segments_K=torch.zeros(2, dtype=torch.int64),
        )
        loss = divided(row.compute(scores, row.numbers), scores, divisor, 2).sum()
        mean += chance * torch.autograd.grad(loss, logits)[0]
        value = (logits.log_softmax(-1)[range(2), answer].sum().exp()) * reward
        exact += torch.autograd.grad(-value, logits)[0]
    share = {Divisor.TOKENS: 1, Divisor.ANSWERS: 2, Divisor.CONSTANT: 2, Divisor.ANSWER_SUMS: 1}[divisor]
    np.testing.assert_allclose(mean * share, exact, atol=1e-12)


@pytest.mark.parametrize("name", losses_of("rl"))
def test_a_step_in_parts_is_the_whole_step(name: str) -> None:
    whole = drawn(7)
    row, divisor = LOSSES[name], Divisor(LOSSES[name].divisor)
    total = divided(row.compute(whole, row.numbers), whole, divisor, LONGEST).sum().item()
    parts = 0.0
    for chosen in ([0, 1], [2], [3]):
        of_K = torch.isin(whole.segments_K, torch.tensor(chosen))
        part = PolicyScores(
            logps_K=whole.logps_K[of_K],
            behaviour_K=whole.behaviour_K[of_K],
            advantages_S=whole.advantages_S[chosen],
            segments_K=whole.segments_K[of_K] - chosen[0],
        )
        parts += divided(row.compute(part, row.numbers), part, divisor, LONGEST).sum().item()
    assert parts == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("length", [1, 7, 1_000])
def test_a_policy_that_has_not_moved_has_the_ratio_one_at_any_length(length: int) -> None:
    for name in losses_of("rl"):
        scores = drawn(1, (length,), near=0.0)
        losses_K = LOSSES[name].compute(scores, LOSSES[name].numbers)
        assert not outside_of_clip(scores, LOSSES[name].numbers).any()
        if name not in ("cispo", "sapo"):
            total = float(losses_K.detach().sum())
            assert total == pytest.approx(-float(scores.advantages_S) * (1 if name == "rloo" else length))


def test_advantages_are_those_of_their_names() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.0])
    centred = rewards - 0.375
    np.testing.assert_allclose(advantages(rewards, Advantage.CENTRED), centred)
    np.testing.assert_allclose(advantages(rewards, Advantage.STANDARD), centred / (np.std(rewards, ddof=1) + 1e-4))
    others = [one - np.delete(rewards, at).mean() for at, one in enumerate(rewards)]
    np.testing.assert_allclose(advantages(rewards, Advantage.LEAVE_ONE_OUT), others)
    np.testing.assert_allclose(advantages(rewards, Advantage.RELATIVE), centred / 0.375)


@pytest.mark.parametrize("kind", Advantage)
def test_answers_that_are_all_alike_teach_nothing(kind: Advantage) -> None:
    for rewards in ([0.1] * 3, [0.1 + 0.2] * 8, [5.0], []):
        assert not advantages(np.array(rewards), kind).any()
    assert advantages(np.array([0.3, 0.1 + 0.2]), Advantage.CENTRED).any()  # 0.30000000000000004 is another reward
