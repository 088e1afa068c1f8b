"""Divergences between distributions: their formulas, their limits, their derivatives, and heads of other widths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from luthier import objectives as head
from luthier.objectives import Head
from luthier.objectives.hidden_loss import (
    UNSEEN,
    ReferenceHidden,
    divergence,
    divergence_with_slope,
    hidden_loss_sum,
    log_probabilities,
)
from luthier.objectives.loss_sums import TokenSettings

C, V, D = 5, 23, 4
BETAS = pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])


def logits(seed: int, width: int = V) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(C, width, generator=generator, dtype=torch.float64)).requires_grad_()


@BETAS
@pytest.mark.parametrize("top_k", [0, 1, 4, V - 1, V + 1])
def test_the_slope_is_its_derivative(beta: float, top_k: int) -> None:
    mine, teacher = logits(2), logits(3).detach().log_softmax(1)
    values = divergence(mine.log_softmax(1), teacher, beta, top_k)
    (expected,) = torch.autograd.grad(values.sum(), mine)
    found, slope = divergence_with_slope(mine.detach().log_softmax(1), teacher, beta, top_k)
    torch.testing.assert_close(found, values.detach())
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize(("beta", "end"), [(1e-7, 0.0), (1 - 1e-7, 1.0)])
def test_near_its_ends_it_is_a_share_of_the_two_divergences(beta: float, end: float) -> None:
    student, teacher = ((logits(seed).detach() / 3).log_softmax(1) for seed in (4, 5))
    near, slope = divergence_with_slope(student, teacher, beta)
    at_end, slope_at_end = divergence_with_slope(student, teacher, end)
    share = beta if end == 0 else 1 - beta
    torch.testing.assert_close(near / share, at_end, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(slope / share, slope_at_end, rtol=1e-3, atol=1e-3)


@BETAS
def test_equal_distributions_are_no_distance_apart_and_others_are(beta: float) -> None:
    student, teacher = logits(6).detach().log_softmax(1), logits(7).detach().log_softmax(1)
    same, slope = divergence_with_slope(student, student.clone(), beta)
    torch.testing.assert_close(same, torch.zeros_like(same))
    torch.testing.assert_close(slope, torch.zeros_like(slope))
    assert (divergence(student, teacher, beta) > 0.05).all()


@BETAS
@pytest.mark.parametrize("width", [V - 3, V, V + 6])
@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_teacher_may_have_rows_more_or_fewer_that_stand_for_nothing(
    beta: float, width: int, by_function: bool, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2 * (V + 6))
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(C, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    of_teacher = torch.randn(width, D, generator=generator, dtype=torch.float64)
    reference = ReferenceHidden(hidden_KD=hidden.detach() + 1, head=Head(weight_VD=of_teacher))
    settings = TokenSettings(loss="gkd", beta=beta, top_k=top_k)
    any_head = (lambda rows: rows @ weight.T) if by_function else Head(weight_VD=weight)
    found = hidden_loss_sum(hidden, any_head, torch.arange(C), settings=settings, reference=reference).loss_sum
    teacher = log_probabilities((reference.hidden_KD @ of_teacher.T)[:, :V], V)
    expected = divergence((hidden @ weight.T).log_softmax(1), teacher, beta, top_k).sum()
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@BETAS
def test_with_the_top_tokens_all_others_are_one(beta: float) -> None:
    student, teacher = logits(6).detach().log_softmax(1), logits(7).detach().log_softmax(1)
    ids = teacher.argsort(1, descending=True)
    merged = []
    for logps in (student, teacher):
        ordered = logps.gather(1, ids).exp()
        merged.append(torch.cat([ordered[:, :3], ordered[:, 3:].sum(1, keepdim=True)], dim=1).log())
    torch.testing.assert_close(divergence(student, teacher, beta, 3), divergence(*merged, beta))
    assert (divergence(student, teacher, beta, 3) < divergence(student, teacher, beta)).all(), "less is told apart"
    exchanged = student.clone()  # within the tail
    exchanged[torch.arange(C)[:, None], ids[:, [10, 20]]] = student.gather(1, ids[:, [20, 10]])
    torch.testing.assert_close(divergence(exchanged, teacher, beta, 3), divergence(student, teacher, beta, 3))


@BETAS
def test_masked_ids_and_certain_distributions_give_numbers(beta: float) -> None:
    student, teacher = logits(9).detach().float(), logits(10).detach().float() * 1_000
    student[:, 3], teacher[:, 5] = float("-inf"), float("-inf")
    found, slope = divergence_with_slope(log_probabilities(student), log_probabilities(teacher), beta)
    assert found.isfinite().all() and slope.isfinite().all()
    found, slope = divergence_with_slope(log_probabilities(student), log_probabilities(teacher), beta, 2)
    assert found.isfinite().all() and slope.isfinite().all()
    assert np.isclose(log_probabilities(student)[:, 3], UNSEEN).all()


def test_no_tensor_of_all_targets_by_the_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 2 * V)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(one))
            return out

    many, weight = torch.randn(64, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    reference = ReferenceHidden(hidden_KD=torch.randn(64, D), head=Head(weight_VD=torch.randn(V, D)))
    settings = TokenSettings(loss="gkd", beta=0.5)
    with Watch():
        ids = torch.zeros(64, dtype=torch.int64)
        hidden_loss_sum(many, Head(weight_VD=weight), ids, settings=settings, reference=reference).loss_sum.backward()
        mine = max(sizes)
        F.kl_div(many @ weight.T, many @ weight.T, reduction="sum")  # control: the plain way makes one
    assert mine <= max(2 * V, 64 * D) and max(sizes) >= 64 * V
