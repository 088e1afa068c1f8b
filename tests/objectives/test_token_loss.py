import pytest
import torch
import torch.nn.functional as F

from luthier.objectives import loss_sums
from luthier.objectives.loss_sums import token_loss_sum

N, V = 37, 53


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=generator) * 3
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[torch.rand(N, generator=generator) < 0.4] = -100
    weights = torch.rand(N, generator=generator) * 2
    return logits, labels, weights


def oracle(logits, labels, weights, smoothing):
    losses = F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)
    return losses.sum() if weights is None else (losses * weights).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_sum_and_gradient_equal_cross_entropy(case, smoothing, weighted, chunk_rows, monkeypatch):
    monkeypatch.setattr(loss_sums, "CHUNK_ELEMENTS", chunk_rows * V)
    logits, labels, weights = case
    weights = weights if weighted else None
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = token_loss_sum(mine, labels, weights, label_smoothing=smoothing)
    expected = oracle(theirs, labels, weights, smoothing)
    torch.testing.assert_close(found.loss_sum, expected)
    (found.loss_sum / 7).backward()
    (expected / 7).backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert found.num_targets == int((labels != -100).sum())
    assert int(found.num_correct) == int((logits.argmax(1) == labels).sum())


def test_bfloat16_logits_are_summed_in_float32_and_get_bfloat16_gradients(case):
    logits, labels, _ = case
    mine = logits.bfloat16().requires_grad_()
    theirs = logits.bfloat16().requires_grad_()
    found = token_loss_sum(mine, labels).loss_sum
    expected = oracle(theirs, labels, None, 0.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert mine.grad.dtype == torch.bfloat16
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_gradient_passes_gradcheck_in_its_own_terms(case):
    # float32 inside, so finite differences of a float64 input are only good to about 1e-2
    logits, _, weights = case
    small = logits[:4, :6].clone().requires_grad_()
    few = torch.tensor([1, -100, 5, 0])

    def loss(x):
        return token_loss_sum(x, few, weights[:4], label_smoothing=0.2).loss_sum

    loss(small).backward()
    step = 1e-2
    for n in range(4):
        for v in range(6):
            nudge = torch.zeros(4, 6)
            nudge[n, v] = step
            slope = (loss(small.detach() + nudge) - loss(small.detach() - nudge)) / (2 * step)
            assert slope.item() == pytest.approx(small.grad[n, v].item(), abs=1e-3)


def test_masked_out_vocabulary_gives_no_nan(case):
    logits, labels, _ = case
    logits[:, -1] = float("-inf")
    labels[labels == V - 1] = 0
    mine = logits.clone().requires_grad_()
    loss = token_loss_sum(mine, labels).loss_sum
    loss.backward()
    torch.testing.assert_close(loss, oracle(logits, labels, None, 0.0))
    assert mine.grad.isfinite().all()


def test_no_targets_give_zero_with_a_zero_gradient():
    logits = torch.randn(3, V, requires_grad=True)
    found = token_loss_sum(logits, torch.full((3,), -100))
    found.loss_sum.backward()
    assert (found.loss_sum.item(), found.num_targets, int(found.num_correct)) == (0.0, 0, 0)
    assert not logits.grad.any()


def test_sums_of_parts_are_the_sum_of_the_whole(case):
    logits, labels, weights = case
    parts = [token_loss_sum(logits[a:b], labels[a:b], weights[a:b]) for a, b in ((0, 10), (10, 11), (11, N))]
    whole = token_loss_sum(logits, labels, weights)
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum)
    assert sum(part.num_targets for part in parts) == whole.num_targets
    assert sum(int(part.num_correct) for part in parts) == int(whole.num_correct)


def test_weights_scale_the_loss_and_not_the_count(case):
    logits, labels, _ = case
    plain, doubled = token_loss_sum(logits, labels), token_loss_sum(logits, labels, torch.full((N,), 2.0))
    torch.testing.assert_close(doubled.loss_sum, 2 * plain.loss_sum)
    assert doubled.num_targets == plain.num_targets


def test_no_float32_copy_of_all_logits_is_made(monkeypatch):
    """The largest float32 tensor made on the way has a chunk's size, in both directions."""
    monkeypatch.setattr(loss_sums, "CHUNK_ELEMENTS", 4 * V)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple) else (out,)
            sizes.extend(t.numel() for t in tensors if isinstance(t, torch.Tensor) and t.dtype == torch.float32)
            return out

    logits = torch.randn(64, V).bfloat16().requires_grad_()
    labels = torch.arange(64) % V
    with Watch():
        token_loss_sum(logits, labels).loss_sum.backward()
        mine = max(sizes)
        sizes.clear()
        F.cross_entropy(logits.float(), labels, reduction="sum").backward()
    assert mine == 4 * V
    assert max(sizes) == 64 * V  # control: the plain way makes one


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_sources_are_told_apart_without_changing_the_loss(case, smoothing, weighted, chunk_rows, monkeypatch):
    monkeypatch.setattr(loss_sums, "CHUNK_ELEMENTS", chunk_rows * V)
    logits, labels, weights = case
    weights = weights if weighted else None
    sources = torch.arange(N) % 4
    sources[sources == 2] = 0  # the third has no token
    told, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = token_loss_sum(told, labels, weights, label_smoothing=smoothing, sources_N=sources, num_sources=4)
    expected = token_loss_sum(plain, labels, weights, label_smoothing=smoothing)
    found.loss_sum.backward()
    expected.loss_sum.backward()
    assert torch.equal(found.loss_sum, expected.loss_sum) and torch.equal(told.grad, plain.grad)
    assert expected.by_source is None
    losses, targets = found.by_source.tolist()
    for source in range(4):
        mine = sources == source
        alone = oracle(logits[mine], labels[mine], None if weights is None else weights[mine], smoothing)
        assert losses[source] == pytest.approx(alone.item(), rel=1e-5)
        assert targets[source] == int((labels[mine] != -100).sum())
    assert sum(losses) == pytest.approx(found.loss_sum.item(), rel=1e-6)
    assert sum(targets) == found.num_targets and not found.by_source.requires_grad


def test_sources_cost_no_more_than_numbers_a_token(case):
    """Beside the plain loss nothing larger than two numbers a target is made."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple) else (out,)
            sizes.append(sum(t.numel() for t in tensors if isinstance(t, torch.Tensor)))
            return out

    logits, labels, weights = case
    with Watch():
        token_loss_sum(logits, labels, weights)
        plain = sorted(sizes)
        sizes.clear()
        token_loss_sum(logits, labels, weights, sources_N=torch.zeros(N, dtype=torch.int64), num_sources=2)
    more = sorted(sizes)
    for size in plain:
        more.remove(size)
    assert more and max(more) <= 2 * N
