"""Losses at margins that no run should see, and some do: a number, with a gradient that is one."""

from __future__ import annotations

import pytest
import torch

from luthier.config.objective import ObjectiveConfig, losses_of
from luthier.objectives.loss_sums import (
    FeedbackBaselines,
    FeedbackScores,
    FeedbackSettings,
    feedback_loss_sum,
    pair_loss_sum,
    reward_loss_sum,
)
from luthier.objectives.pair_formulas import PairBaselines, PairScores, PairSettings
from luthier.training.losses import answer_settings

PAIR_LOSSES = losses_of("dpo")
FEEDBACK_LOSSES = losses_of("kto")

GAPS = torch.tensor([1e4, -1e4, 300.0, -300.0, 0.0])


def scores(gaps_P: torch.Tensor) -> PairScores:
    """One answer at log-probability -1, the other that much below; answers of one target, and no reference."""
    return PairScores(
        chosen_P=-1 + gaps_P.clamp(max=0),
        rejected_P=-1 - gaps_P.clamp(min=0),
        chosen_lengths_P=torch.ones(len(gaps_P), dtype=torch.int64),
        rejected_lengths_P=torch.ones(len(gaps_P), dtype=torch.int64),
    )


@pytest.mark.parametrize("beta", [None, 10.0])
@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_pair_losses_and_their_slopes_stay_numbers(name: str, beta: float | None) -> None:
    gaps_P = GAPS.clone().requires_grad_()
    settings = answer_settings(ObjectiveConfig(name="dpo", loss=name, beta=beta), PairSettings)
    found = pair_loss_sum(scores(gaps_P), name, settings, PairBaselines(delta=0.5))
    found.loss_sum.backward()
    assert found.loss_sum.isfinite() and gaps_P.grad is not None and gaps_P.grad.isfinite().all()


def test_discopop_is_its_mixture_between_the_extremes() -> None:
    """What keeps it a number changes none: m exp(-x) as one exponential, in float64 against two factors."""
    gaps_P = torch.linspace(-6, 6, 25, dtype=torch.float64)
    found = pair_loss_sum(scores(gaps_P), "discopop", PairSettings(beta=1.0, discopop_tau=0.3)).losses_U
    share_P = torch.sigmoid(gaps_P / 0.3)
    torch.testing.assert_close(found, (1 - share_P) * torch.log1p((-gaps_P).exp()) + share_P * (-gaps_P).exp())


def test_the_alpha_divergence_ends_in_the_forward_kl_and_in_dpo() -> None:
    gaps_P = torch.linspace(-2, 2, 9, dtype=torch.float64)

    def losses(name: str, **numbers: float) -> torch.Tensor:
        return pair_loss_sum(scores(gaps_P), name, PairSettings(beta=0.3, **numbers)).losses_U

    torch.testing.assert_close(losses("alpha_divergence", divergence_alpha=0.0), losses("forward_kl"))
    torch.testing.assert_close(losses("alpha_divergence", divergence_alpha=1.0), losses("sigmoid"))
    near = losses("alpha_divergence", divergence_alpha=1 + 1e-7)
    torch.testing.assert_close(near, losses("sigmoid"), rtol=1e-5, atol=0)
    torch.testing.assert_close(losses("alphapo", alphapo_alpha=0.0, gamma=0.2), losses("simpo", gamma=0.2))


def test_losses_near_the_end_of_their_alpha_keep_their_digits_in_float32() -> None:
    """Where exp(x) - 1 would have lost all of x, and the loss be that of no gap."""
    gaps_P = torch.linspace(-2, 2, 9)

    def losses(name: str, **numbers: float) -> torch.Tensor:
        return pair_loss_sum(scores(gaps_P), name, PairSettings(beta=0.3, **numbers)).losses_U

    torch.testing.assert_close(losses("alpha_divergence", divergence_alpha=1 - 1e-7), losses("sigmoid"))
    torch.testing.assert_close(losses("alphapo", alphapo_alpha=1e-7, gamma=0.2), losses("simpo", gamma=0.2))


@pytest.mark.parametrize("name", list(FEEDBACK_LOSSES))
def test_feedback_losses_and_their_slopes_stay_numbers(name: str) -> None:
    logps_R = torch.cat([GAPS, GAPS]).requires_grad_()
    rows = FeedbackScores(
        logps_R=logps_R,
        ref_logps_R=torch.zeros(10),
        desirable_R=torch.arange(10) < 5,
        lengths_R=torch.ones(10, dtype=torch.int64),
    )
    settings = FeedbackSettings(beta=10.0, sft_weight=1.0)
    loss = feedback_loss_sum(rows, name, settings, FeedbackBaselines(kl=1e4, delta=-1e4)).loss_sum
    loss.backward()
    assert loss.isfinite() and logps_R.grad is not None and logps_R.grad.isfinite().all()


def test_rewards_far_apart_stay_numbers() -> None:
    rewards_S = torch.tensor([1e4, -1e4, 0.0, 0.0]).requires_grad_()
    loss = reward_loss_sum(rewards_S, torch.tensor([[0, 1], [1, 0], [2, 3]]), numbers={"center_rewards": 0.01}).loss_sum
    loss.backward()
    assert loss.isfinite() and rewards_S.grad is not None and rewards_S.grad.isfinite().all()
