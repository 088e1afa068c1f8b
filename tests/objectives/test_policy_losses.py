"""Losses of policies: against their formulas, and against the exact gradient of what is expected, by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from luthier.config.objective import LOSSES, losses_of
from luthier.config.rollout import CorrectionConfig, CorrectionKind, CorrectionLevel
from luthier.objectives.policy_losses import (
    Advantage,
    Divisor,
    PolicyScores,
    advantages,
    correction_weights,
    divided,
    generalised_advantages,
    k3,
    kl_losses,
    led_weight,
    outside_of_clip,
    units,
    whitened,
    without_kl,
)

LONGEST = 11
KINDS = (CorrectionKind.TRUNCATE, CorrectionKind.MASK)


def with_values(scores: PolicyScores) -> PolicyScores:
    generator = torch.Generator().manual_seed(11)
    values, expected, returns = (
        torch.randn(len(scores.behaviour_K), generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return replace(scores, values_K=values.requires_grad_(), expected_K=expected, returns_K=returns)


def drawn(seed: int, lengths: Sequence[int] = (3, 1, 5, 2), near: float = 0.3) -> PolicyScores:
    generator = torch.Generator().manual_seed(seed)
    total, segments = sum(lengths), torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    behaviour = -torch.rand(total, generator=generator, dtype=torch.float64) * 3
    moved = behaviour + near * torch.randn(total, generator=generator, dtype=torch.float64)
    found = PolicyScores(
        logps_K=moved.requires_grad_(),
        behaviour_K=behaviour,
        advantages_K=torch.randn(len(lengths), generator=generator, dtype=torch.float64)[segments],
        segments_K=segments,
        num_answers=len(lengths),
    )
    return with_values(found)


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
            case "dapo" | "grpo" | "dr_grpo" | "max_rl" | "reinforce_pp" | "reinforce_pp_baseline":
                near = ratios.clip(1 - numbers["clip_low"], 1 + numbers["clip_high"])
                each = -torch.min(ratios * advantage, near * advantage)
            case "ppo":
                near = ratios.clip(1 - numbers["clip_low"], 1 + numbers["clip_high"])
                each = -torch.min(ratios * advantage, near * advantage)
                of = scores.segments_K == number
                assert scores.values_K is not None and scores.expected_K is not None and scores.returns_K is not None
                value, then, returned = scores.values_K[of], scores.expected_K[of], scores.returns_K[of]
                moved = torch.clip(value, then - numbers["value_clip"], then + numbers["value_clip"])
                worse = torch.max((value - returned) ** 2, (moved - returned) ** 2)
                each = each + 0.5 * numbers["value_weight"] * worse
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
    if name == "ppo":
        assert scores.values_K is not None and scores.values_K.grad is not None and scores.values_K.grad.any()
        assert again.values_K is not None and again.values_K.grad is not None
        np.testing.assert_allclose(scores.values_K.grad, again.values_K.grad, atol=1e-12)


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
            advantages_K=torch.full((2,), reward, dtype=torch.float64),
            segments_K=torch.zeros(2, dtype=torch.int64),
            num_answers=1,
        )
        loss = divided(row.compute(with_values(scores), row.numbers), scores, divisor, 2).sum()
        mean += chance * torch.autograd.grad(loss, logits)[0]
        value = (logits.log_softmax(-1)[range(2), answer].sum().exp()) * reward
        exact += torch.autograd.grad(-value, logits)[0]
    share = {Divisor.TOKENS: 1, Divisor.ANSWERS: 2, Divisor.CONSTANT: 2, Divisor.ANSWER_SUMS: 1}[divisor]
    np.testing.assert_allclose(mean * share, exact, atol=1e-12)


@pytest.mark.parametrize("name", losses_of("rl"))
def test_a_step_in_parts_is_the_whole_step(name: str) -> None:
    whole = drawn(7)
    row, divisor = LOSSES[name], Divisor(LOSSES[name].divisor)
    assert whole.values_K is not None and whole.expected_K is not None and whole.returns_K is not None
    total = divided(row.compute(whole, row.numbers), whole, divisor, LONGEST).sum().item()
    parts = 0.0
    for chosen in ([0, 1], [2], [3]):
        of_K = torch.isin(whole.segments_K, torch.tensor(chosen))
        part = PolicyScores(
            logps_K=whole.logps_K[of_K],
            behaviour_K=whole.behaviour_K[of_K],
            advantages_K=whole.advantages_K[of_K],
            segments_K=whole.segments_K[of_K] - chosen[0],
            num_answers=len(chosen),
            values_K=whole.values_K[of_K],
            expected_K=whole.expected_K[of_K],
            returns_K=whole.returns_K[of_K],
        )
        parts += divided(row.compute(part, row.numbers), part, divisor, LONGEST).sum().item()
    assert parts == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("length", [1, 7, 1_000])
def test_a_policy_that_has_not_moved_has_the_ratio_one_at_any_length(length: int) -> None:
    for name in losses_of("rl"):
        scores = drawn(1, (length,), near=0.0)
        numbers = {**LOSSES[name].numbers, "value_weight": 0.0}
        losses_K = LOSSES[name].compute(scores, numbers)
        assert not outside_of_clip(scores, LOSSES[name].numbers).any()
        if name not in ("cispo", "sapo"):
            total = float(losses_K.detach().sum())
            assert total == pytest.approx(-float(scores.advantages_S) * (1 if name == "rloo" else length))


@pytest.mark.parametrize("name", [name for name in losses_of("rl") if "clip_low" in LOSSES[name].numbers])
def test_targets_that_count_as_clipped_are_those_without_a_gradient(name: str) -> None:
    row, scores = LOSSES[name], drawn(5, (3, 1, 5, 2, 4, 6))
    losses_K = row.compute(scores, {**row.numbers, "value_weight": 0.0})
    (gradient_K,) = torch.autograd.grad(losses_K.sum(), scores.logps_K)
    clipped_K = outside_of_clip(scores, row.numbers, row.ratio_of)
    assert 0 < clipped_K.sum() < len(clipped_K)
    assert torch.equal(clipped_K, gradient_K == 0)


def test_advantages_are_those_of_their_names() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.0])
    centred = rewards - 0.375
    np.testing.assert_allclose(advantages(rewards, Advantage.CENTRED), centred)
    np.testing.assert_allclose(advantages(rewards, Advantage.STANDARD), centred / (np.std(rewards, ddof=1) + 1e-4))
    others = [one - np.delete(rewards, at).mean() for at, one in enumerate(rewards)]
    np.testing.assert_allclose(advantages(rewards, Advantage.LEAVE_ONE_OUT), others)
    np.testing.assert_allclose(advantages(rewards, Advantage.RELATIVE), centred / 0.375)
    np.testing.assert_array_equal(advantages(rewards, Advantage.REWARD), rewards)
    np.testing.assert_array_equal(advantages(rewards[:1], Advantage.REWARD), rewards[:1])


@pytest.mark.parametrize("kind", [kind for kind in Advantage if kind is not Advantage.REWARD])
def test_answers_that_are_all_alike_teach_nothing(kind: Advantage) -> None:
    for rewards in ([0.1] * 3, [0.1 + 0.2] * 8, [5.0], []):
        assert not advantages(np.array(rewards), kind).any()
    assert advantages(np.array([0.3, 0.1 + 0.2]), Advantage.CENTRED).any()  # 0.30000000000000004 is another reward


# ------------------------------------------------------------------------------------------------------ KL divergence


def three_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy and of its reference for a first and a second token of three, and of what drew its answers."""
    generator = torch.Generator().manual_seed(3)
    policy, reference, before = (torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    return policy.requires_grad_(), reference, before


def all_answers(*logits: torch.Tensor) -> list[list[torch.Tensor]]:
    """Of every answer of two tokens, what each of these policies gives its tokens."""
    answers = itertools.product(range(3), repeat=2)
    return [[one.log_softmax(-1)[range(2), answer] for one in logits] for answer in answers]


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


def exact_kl(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    logps, others = policy.log_softmax(-1), reference.log_softmax(-1)
    return (logps.exp() * (logps - others)).sum()


@pytest.mark.parametrize("moved", [False, True])
def test_the_expected_gradient_of_the_kl_loss_is_that_of_kl(moved: bool) -> None:
    """By every answer of two tokens, as often as it is drawn: by the policy itself, and by one before it."""
    policy, reference, before = three_tokens()
    drew = before if moved else policy.detach()
    mean, wrong = torch.zeros_like(policy), torch.zeros_like(policy)
    for now, of_reference, then in all_answers(policy, reference, drew):
        scores = PolicyScores(
            logps_K=now, behaviour_K=then, advantages_K=now, segments_K=torch.zeros(2, dtype=torch.int64), num_answers=1
        )
        mean += then.sum().exp() * gradient(kl_losses(scores, of_reference).sum(), policy)
        wrong += then.sum().exp() * gradient(k3(now, of_reference).sum(), policy)
    expected = gradient(exact_kl(policy, reference), policy)
    np.testing.assert_allclose(mean, expected, atol=1e-12)
    assert (wrong - expected).abs().max() > 0.05, "control: k3 without its correction has another gradient"


def test_the_corrected_k3_has_the_same_gradient_on_every_token() -> None:
    policy, reference, before = three_tokens()
    for now, of_reference, then in all_answers(policy, reference, before):
        scores = PolicyScores(
            logps_K=now, behaviour_K=then, advantages_K=now, segments_K=torch.zeros(2, dtype=torch.int64), num_answers=1
        )
        corrected = (now - then).exp() * k3(now, of_reference)
        ours = gradient(kl_losses(scores, of_reference).sum(), policy)
        np.testing.assert_allclose(ours, gradient(corrected.sum(), policy), atol=1e-12)


@pytest.mark.parametrize("kind", [Advantage.LEAVE_ONE_OUT, Advantage.REWARD])
def test_the_expected_gradient_with_kl_in_the_reward_is_that_of_reward_and_kl(kind: Advantage) -> None:
    """All pairs of two answers to a prompt; KL is here that of whole answers."""
    policy, reference, _ = three_tokens()
    rewards = [math.sin(2 * number) for number in range(9)]
    every = all_answers(policy, reference)
    mean = torch.zeros_like(policy)
    for (one, other), ((now, its), (then, others)) in zip(
        itertools.product(range(9), repeat=2), itertools.product(every, repeat=2), strict=True
    ):
        logps_K, segments_K = torch.cat([now, then]), torch.tensor([0, 0, 1, 1])
        kl_K = 0.3 * (logps_K - torch.cat([its, others])).detach()
        of_S = torch.from_numpy(advantages(np.array([rewards[one], rewards[other]]), kind))
        advantages_K = without_kl(of_S, kl_K, kind, segments_K, torch.zeros(2, dtype=torch.int64))
        mean += logps_K.detach().sum().exp() * gradient((advantages_K * logps_K).sum() / 2, policy)
    expected = sum(now.sum().exp() * reward for (now, _), reward in zip(every, rewards, strict=True))
    assert isinstance(expected, torch.Tensor)
    np.testing.assert_allclose(mean, gradient(expected - 0.3 * exact_kl(policy, reference), policy), atol=1e-12)


def test_the_weight_of_kl_is_led_to_its_target() -> None:
    numbers = LOSSES["ppo"].numbers
    assert led_weight(0.2, 6.0, 128, numbers) == pytest.approx(0.2)
    assert led_weight(0.2, 6.6, 100, numbers) == pytest.approx(0.2 * (1 + 0.1 * 100 / 10_000))
    assert led_weight(0.2, 60.0, 100, numbers) == pytest.approx(0.2 * (1 + 0.2 * 100 / 10_000))
    assert led_weight(0.2, 0.0, 100, numbers) == pytest.approx(0.2 * (1 - 0.2 * 100 / 10_000))
    assert led_weight(0.2, 60.0, 100, {**numbers, "kl_target": 0.0}) == 0.2


def test_equal_probabilities_have_the_weight_one_at_any_length() -> None:
    for level, how, length in itertools.product(CorrectionLevel, KINDS, (1, 7, 4_000)):
        scores = drawn(2, (length, 2))
        weights = correction_weights(scores, scores.behaviour_K, CorrectionConfig(level=level, how=how))
        assert weights.tolist() == [1.0] * (length + 2)


@pytest.mark.parametrize("length", [1, 10, 1_000])
def test_the_weight_of_an_answer_does_not_grow_with_its_length(length: int) -> None:
    scores = drawn(2, (length,))
    answer = CorrectionConfig(level=CorrectionLevel.ANSWER, how=CorrectionKind.TRUNCATE)
    weights = correction_weights(scores, scores.behaviour_K - 0.1, answer)
    np.testing.assert_allclose(weights, math.exp(0.1))


def test_weights_outside_of_their_bounds_are_truncated_or_masked() -> None:
    scores = drawn(2, (2, 2))
    found = {}
    for level, how in itertools.product(CorrectionLevel, KINDS):
        correction = CorrectionConfig(level=level, how=how, low=0.5, high=0.8)
        sampler_K = scores.behaviour_K - torch.tensor([0.9, 0.3, 0.6, 0.6], dtype=torch.float64).log()
        found[f"{level} {how}"] = correction_weights(scores, sampler_K, correction).tolist()
    whole = math.sqrt(0.9 * 0.3)
    assert found == {
        "token truncate": pytest.approx([0.8, 0.5, 0.6, 0.6]),
        "token mask": pytest.approx([0, 0, 0.6, 0.6]),
        "answer truncate": pytest.approx([whole, whole, 0.6, 0.6]),
        "answer mask": pytest.approx([whole, whole, 0.6, 0.6]),
    }


@pytest.mark.parametrize(("kind", "expected"), [
    (Advantage.LEAVE_ONE_OUT, [10 - 3 + 4, 10 - 3 + 4, 20 - 4 + 3]),
    (Advantage.REWARD, [10 - 3, 10 - 2, 20 - 4]),
])  # fmt: skip
def test_kl_in_the_reward_is_taken_off_what_an_answer_or_target_brings(kind: Advantage, expected: list[int]) -> None:
    answers, kl_K = torch.tensor([10.0, 20.0]), torch.tensor([1.0, 2.0, 4.0])
    found = without_kl(answers, kl_K, kind, torch.tensor([0, 0, 1]), torch.tensor([0, 0]))
    assert found.tolist() == expected


def test_an_answer_alone_is_compared_with_none() -> None:
    of_S, one = torch.zeros(1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    kl_K = torch.ones(3, dtype=torch.float64)
    assert not without_kl(of_S, kl_K, Advantage.LEAVE_ONE_OUT, one, one[:1]).any()


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (1.0, 0.0)])
def test_advantages_of_targets_are_those_of_the_sum_over_what_follows(discount: float, decay: float) -> None:
    scores = drawn(5, (3, 1, 5))
    rewards, values = scores.behaviour_K, scores.advantages_K + scores.logps_K.detach()
    found = generalised_advantages(rewards, values, scores.segments_K, discount=discount, decay=decay)
    expected = []
    for start, end in ((0, 3), (3, 4), (4, 9)):
        after = [*values[start + 1 : end].tolist(), 0.0]
        steps = [rewards[start + t].item() + discount * v - values[start + t].item() for t, v in enumerate(after)]
        expected += [
            sum((discount * decay) ** (k - t) * steps[k] for k in range(t, end - start)) for t in range(end - start)
        ]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert len(generalised_advantages(rewards[:0], values[:0], scores.segments_K[:0], discount=1, decay=1)) == 0


def test_whitened_advantages_have_mean_0_and_deviation_1_over_all_parts() -> None:
    parts = [torch.tensor([3.0, 1.0, 2.0]), torch.tensor([], dtype=torch.float32), torch.tensor([-4.0])]
    cpu = torch.device("cpu")
    white = torch.cat(whitened(parts, lambda sums: sums, cpu))
    assert white.mean().item() == pytest.approx(0, abs=1e-6) and white.std(correction=0).item() == pytest.approx(1)
    other = [torch.tensor([5.0])]  # another rank's, of which this one knows sums alone
    sums = iter([torch.tensor([5.0, 1.0]), torch.tensor([(5 - 7 / 5) ** 2])])
    both = torch.cat(whitened(parts, lambda own: own + next(sums), cpu))
    np.testing.assert_allclose(both, torch.cat(whitened([*parts, *other], lambda own: own, cpu))[:4], atol=1e-6)
    assert not torch.cat(whitened([torch.ones(3)], lambda sums: sums, cpu)).any()
    assert whitened([], lambda sums: sums, cpu) == []
