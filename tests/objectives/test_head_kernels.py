"""A kernel in place of chunks: the same losses and gradients, and whatever it cannot do is left to the chunks.

The kernel is one in plain torch; `test_train_liger` runs this file again with Liger's.
"""

from __future__ import annotations

from dataclasses import replace
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from tiny_kernel import PlainKernel, kernel_under_test

from luthier.objectives import Head, KernelAnswer, KernelTask, LossKernel
from luthier.objectives.hidden_loss import ReferenceHidden, hidden_loss_sum
from luthier.objectives.loss_sums import TokenSettings
from luthier.objectives.token_scores import token_scores
from luthier.training.losses.objective import LIMITS, kernel_problem

K, V, D = 9, 37, 6
ALL_OF_IT = TokenSettings(label_smoothing=0.1, z_loss=0.01)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {}, "softcap": {"softcap": 2.5}, "scale": {"scale": -0.25}, "both": {"scale": 4.0, "softcap": 3.0},
}  # fmt: skip
WEIGHTS = {
    "alike": None,
    "equal": torch.full((K,), 0.3),
    "different": torch.linspace(-0.5, 2.0, K),
    "zero": torch.zeros(K),
}
TOLERANCES = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 5e-2, "rtol": 2e-2},
    torch.float16: {"atol": 5e-3, "rtol": 5e-3},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> LossKernel:
    return kernel_under_test(monkeypatch)


class Untouched:
    """A kernel that nobody may ask."""

    name = "untouched"

    def __call__(self, task: KernelTask) -> KernelAnswer:
        raise AssertionError("the kernel was asked")


def case(
    kernel: LossKernel | None,
    *,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    vocabulary: int = V,
    **of: Any,
) -> tuple[torch.Tensor, Head, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(size).to(dtype) for size in ((K, D), (vocabulary, D), (vocabulary,)))
    weight.requires_grad_(not frozen)
    bias.requires_grad_(not frozen)
    ids = torch.randint(0, vocabulary, (K,))
    return hidden.requires_grad_(), Head(weight_VD=weight, bias_V=bias, kernel=kernel, **of), ids


def inputs_of(hidden: torch.Tensor, head: Head) -> list[torch.Tensor]:
    assert head.bias_V is not None
    return [one for one in (hidden, head.weight_VD, head.bias_V) if one.requires_grad]


def assert_same_sums(
    found: tuple[torch.Tensor, Head, torch.Tensor],
    weights: torch.Tensor | None,
    settings: TokenSettings,
    **tolerance: float,
) -> None:
    hidden, head, ids = found
    sources = torch.arange(K) % 3
    mine, chunked = (
        hidden_loss_sum(hidden, one, ids, weights, settings=settings, sources_K=sources, num_sources=3)
        for one in (head, replace(head, kernel=None))
    )
    torch.testing.assert_close(mine.loss_sum, chunked.loss_sum, **tolerance)
    assert mine.by_source is not None and chunked.by_source is not None
    torch.testing.assert_close(mine.by_source, chunked.by_source, **tolerance)
    torch.testing.assert_close(mine.by_source.sum(dim=1)[0].float(), mine.loss_sum.detach(), atol=1e-3, rtol=1e-4)
    assert mine.num_correct == chunked.num_correct and mine.num_targets == K
    assert_same_gradients(0.7 * mine.loss_sum, 0.7 * chunked.loss_sum, inputs_of(hidden, head), **tolerance)


def assert_same_gradients(
    mine: torch.Tensor, other: torch.Tensor, inputs: list[torch.Tensor], **tolerance: float
) -> None:
    found, expected = torch.autograd.grad(mine, inputs), torch.autograd.grad(other, inputs)
    for one, another in zip(found, expected, strict=True):
        assert one.dtype == another.dtype
        torch.testing.assert_close(one, another, **tolerance)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_sums_and_gradients_are_those_of_the_chunks(kernel: LossKernel, name: str, frozen: bool, weights: str) -> None:
    found = case(kernel, frozen=frozen, **HEADS[name])
    settings = TokenSettings() if weights in ("alike", "different") else ALL_OF_IT
    assert_same_sums(found, WEIGHTS[weights], settings, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("setting", ["label_smoothing", "z_loss"])
def test_label_smoothing_and_z_loss_are_those_of_the_chunks(kernel: LossKernel, setting: str) -> None:
    for name in ("plain", "both"):
        assert_same_sums(
            case(kernel, **HEADS[name]), None, TokenSettings(**{setting: 0.1}), **TOLERANCES[torch.float32]
        )


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("frozen", [True, False])
def test_log_probabilities_and_gradients_are_those_of_the_chunks(kernel: LossKernel, name: str, frozen: bool) -> None:
    hidden, head, ids = case(kernel, frozen=frozen, **HEADS[name])
    mine, chunked = (token_scores(hidden, one, ids) for one in (head, replace(head, kernel=None)))
    torch.testing.assert_close(mine.logps_K, chunked.logps_K, **TOLERANCES[torch.float32])
    assert torch.equal(mine.correct_K, chunked.correct_K)
    counts = torch.linspace(-2e-3, 1e-3, K)  # small, as those of a step of many pairs are
    weighted = [500 * (one.logps_K * counts).sum() for one in (mine, chunked)]
    assert_same_gradients(*weighted, inputs_of(hidden, head), **TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [True, False])
def test_in_16_bits_it_is_as_good_as_16_bits_are(kernel: LossKernel, dtype: torch.dtype, frozen: bool) -> None:
    found = case(kernel, dtype=dtype, frozen=frozen)
    assert_same_sums(found, None, TokenSettings(), **TOLERANCES[dtype])
    assert_same_sums(found, WEIGHTS["different"], ALL_OF_IT, **TOLERANCES[dtype])
    hidden, head, ids = found
    mine, chunked = (token_scores(hidden, one, ids) for one in (head, replace(head, kernel=None)))
    torch.testing.assert_close(mine.logps_K, chunked.logps_K, **TOLERANCES[dtype])
    assert mine.logps_K.dtype == torch.float32
    counts = torch.linspace(-2e-3, 1e-3, K)
    weighted = [500 * (one.logps_K * counts).sum() for one in (mine, chunked)]
    assert_same_gradients(*weighted, inputs_of(hidden, head), **TOLERANCES[dtype])


def test_under_autocast_weights_in_32_bits_are_computed_in_16(kernel: LossKernel) -> None:
    hidden, head, ids = case(kernel)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_sums((hidden, head, ids), None, ALL_OF_IT, **TOLERANCES[torch.bfloat16])
        mine, chunked = (token_scores(hidden, one, ids) for one in (head, replace(head, kernel=None)))
    torch.testing.assert_close(mine.logps_K, chunked.logps_K, **TOLERANCES[torch.bfloat16])
    # backward outside of autocast, as trainers do
    sums = [one.logps_K.sum() for one in (mine, chunked)]
    assert_same_gradients(*sums, inputs_of(hidden, head), **TOLERANCES[torch.bfloat16])


def test_a_vocabulary_of_several_blocks_that_the_last_does_not_fill(kernel: LossKernel) -> None:
    found = case(kernel, vocabulary=2**15 + 99, softcap=20.0)  # the kernels' largest block is of 2^15
    assert_same_sums(found, WEIGHTS["different"], ALL_OF_IT, atol=1e-4, rtol=1e-4)


def test_of_equally_likely_ids_the_first_is_the_predicted_one(kernel: LossKernel) -> None:
    hidden, head, _ = case(kernel)
    head = replace(head, weight_VD=torch.zeros(V, D), bias_V=torch.zeros(V).index_fill(0, torch.tensor([5, 20]), 1.0))
    ids = torch.full((K,), 20)
    ids[::2] = 5
    assert token_scores(hidden, head, ids).correct_K.tolist() == (ids == 5).tolist()
    assert hidden_loss_sum(hidden, head, ids).num_correct == (K + 1) // 2


@pytest.mark.parametrize("frozen", [True, False])
def test_one_target(kernel: LossKernel, frozen: bool) -> None:
    hidden, head, ids = case(kernel, frozen=frozen)
    mine, chunked = (
        hidden_loss_sum(hidden[:1], one, ids[:1], torch.tensor([2.0])).loss_sum
        for one in (head, replace(head, kernel=None))
    )
    torch.testing.assert_close(mine, chunked)
    assert_same_gradients(mine, chunked, inputs_of(hidden, head), **TOLERANCES[torch.float32])


def test_nothing_is_computed_that_nobody_needs() -> None:
    kernel = PlainKernel()
    hidden, head, ids = case(kernel)
    with torch.no_grad():
        hidden_loss_sum(hidden, head, ids)
        token_scores(hidden, head, ids)
    token_scores(hidden, head, ids)  # what each counts is known in the backward pass only
    hidden_loss_sum(hidden, case(kernel, frozen=True)[1], ids)
    token_scores(hidden, case(kernel, frozen=True)[1], ids)
    hidden_loss_sum(hidden.detach(), head, ids)
    nothing = (False, False, False)
    expected = [nothing, nothing, nothing, (True, False, False), (True, False, False), (False, True, True)]
    assert [task.needs for task in kernel.tasks] == expected


def test_a_kernel_is_given_counts_of_at_most_one() -> None:
    kernel = PlainKernel()
    hidden, head, ids = case(kernel)
    hidden_loss_sum(hidden, head, ids, torch.full((K,), 300.0))
    token_scores(hidden, head, ids).logps_K.mul(1e-6).sum().backward()
    counts = [task.counts_K for task in kernel.tasks]
    assert counts[0] is not None and counts[0].tolist() == [1.0] * K
    assert counts[1] is None and counts[2] is not None and counts[2].tolist() == [-1.0] * K


def test_the_gradient_of_a_sum_can_be_asked_for_once() -> None:
    hidden, head, ids = case(PlainKernel())
    loss = hidden_loss_sum(hidden, head, ids).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be asked for once"):
        loss.backward()


def test_what_a_kernel_cannot_do_is_done_by_the_chunks() -> None:
    hidden, head, ids = case(Untouched())
    plain = replace(head, kernel=None)
    reference = ReferenceHidden(hidden_KD=hidden.detach(), head=plain)
    for loss in ("dft", "eaft", "asft"):
        more = {"settings": TokenSettings(loss=loss), "reference": reference if loss == "asft" else None}
        mine, chunked = (hidden_loss_sum(hidden, one, ids, **more).loss_sum for one in (head, plain))
        assert torch.equal(mine, chunked)
    assert token_scores(hidden, head, ids, entropy=True).entropy_K is not None
    for other in (
        case(Untouched(), dtype=torch.float64),
        case(Untouched(), scale=0.3),
        case(Untouched(), dtype=torch.float16, scale=0.5),
        (hidden[:0], head, ids[:0]),
    ):
        mine, chunked = (hidden_loss_sum(other[0], one, other[2]) for one in (other[1], replace(other[1], kernel=None)))
        assert torch.equal(mine.loss_sum, chunked.loss_sum) and mine.num_correct == chunked.num_correct
        mine.loss_sum.backward()
        scores = [token_scores(other[0], one, other[2]) for one in (other[1], replace(other[1], kernel=None))]
        assert torch.equal(scores[0].logps_K, scores[1].logps_K)
    for asked in ((hidden, head, ids), case(Untouched(), scale=0.5)):  # control
        with pytest.raises(AssertionError, match="the kernel was asked"):
            hidden_loss_sum(*asked)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("frozen", [True, False])
def test_the_proof_lets_a_right_kernel_pass(kernel: LossKernel, dtype: torch.dtype, frozen: bool) -> None:
    hidden, head, ids = case(kernel, dtype=dtype, frozen=frozen)
    assert kernel_problem(hidden, head, ids, settings=ALL_OF_IT) is None
    if dtype == torch.float32:  # in 16 bits it needs some targets, over which rounding averages out
        assert kernel_problem(hidden[:1], head, ids[:1], settings=ALL_OF_IT) is None
    assert head.weight_VD.grad is None and hidden.grad is None


def _one_percent_more(place: int) -> Any:
    def lie(answer: KernelAnswer) -> KernelAnswer:
        gradients = tuple(
            gradient * 1.01 if index == place and gradient is not None else gradient
            for index, gradient in enumerate(answer.gradients)
        )
        return replace(answer, gradients=gradients)

    return lie


def _one_row(answer: KernelAnswer) -> KernelAnswer:
    losses_K = answer.losses_K.clone()
    losses_K[3] += 0.3
    losses_K[5] -= 0.3
    return replace(answer, losses_K=losses_K)


LIES: dict[str, tuple[Any, str]] = {
    "loss": (lambda one: replace(one, losses_K=one.losses_K * 1.01), "a mean loss of "),
    "one row": (_one_row, "log-probabilities differ by 0.3"),
    "prediction": (lambda one: replace(one, predicted_K=one.predicted_K * 0), "targets it is told otherwise"),
    "hidden": (_one_percent_more(0), "the gradient of the hidden states differs by 0.0"),
    "weight": (_one_percent_more(1), "the gradient of the weight differs by 0.0"),
    "bias": (_one_percent_more(2), "the gradient of the bias differs by 0.0"),
    "nan": (lambda one: replace(one, losses_K=one.losses_K * torch.nan), "a mean loss of nan"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIES)
def test_a_kernel_that_is_one_percent_off_is_found_out(name: str, dtype: torch.dtype) -> None:
    lie, says = LIES[name]
    hidden, head, ids = case(PlainKernel(lie), dtype=dtype)
    ids[::2] = (hidden @ head.weight_VD.T + head.bias_V).argmax(dim=1)[::2]
    problem = kernel_problem(hidden, head, ids, settings=TokenSettings())
    assert problem is not None and says in problem


def test_the_proof_knows_weights_that_a_kernel_leaves_out() -> None:
    class Forgetful(PlainKernel):
        def __call__(self, task: KernelTask) -> KernelAnswer:
            return super().__call__(replace(task, counts_K=None))

    hidden, head, ids = case(Forgetful(), frozen=True)
    problem = kernel_problem(hidden, head, ids, settings=TokenSettings())
    assert problem is not None and "the gradient of the hidden states" in problem


class _Broken(PlainKernel):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __call__(self, task: KernelTask) -> KernelAnswer:
        raise self.error


def test_a_kernel_that_does_not_run_and_a_head_that_fits_none_are_told_why() -> None:
    for error, says in (
        (TypeError("unexpected keyword argument\nmore lines"), "TypeError: unexpected keyword argument"),
        # what Triton leaves through where its launcher cannot be built
        (CalledProcessError(1, ["gcc", "main.c"]), "CalledProcessError: Command '['gcc', 'main.c']' returned non-zero"),
        (PermissionError(13, "Permission denied", "triton-cache"), "PermissionError: [Errno 13] Permission denied"),
    ):
        hidden, head, ids = case(_Broken(error))
        problem = kernel_problem(hidden, head, ids, settings=TokenSettings())
        assert problem is not None and problem.startswith(says)
    _, double, _ = case(PlainKernel(), dtype=torch.float64)
    assert (
        kernel_problem(hidden.double(), double, ids, settings=TokenSettings()) == "the output layer computes in float64"
    )
    problem = kernel_problem(hidden, replace(head, scale=0.3), ids, settings=TokenSettings())
    assert problem is not None and problem.startswith("its logits are multiplied by 0.3")
