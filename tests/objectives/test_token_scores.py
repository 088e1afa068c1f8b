"""Scores and losses from hidden states against the same from whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from luthier import objectives as head
from luthier.config.objective import LOSSES, losses_of
from luthier.errors import UserError
from luthier.objectives import Head
from luthier.objectives.hidden_loss import ReferenceHidden, hidden_loss_sum
from luthier.objectives.loss_sums import TokenSettings, token_loss_sum
from luthier.objectives.token_scores import token_scores
from tests.conftest import refused

TOKEN_OBJECTIVES = {**losses_of("sft"), "gkd": LOSSES["gkd"]}

K, V, D = 13, 37, 6
CHUNKS = pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
SHAPES = pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.6, None), (1.7, 2.5)])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def chunks(monkeypatch, request):
    rows = request.node.callspec.params.get("chunk_rows", 5) if hasattr(request.node, "callspec") else 5
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", rows * V)


@pytest.fixture
def case():
    torch.manual_seed(0)
    tensors = (torch.randn(K, D), torch.randn(V, D), torch.randn(V))
    hidden, weight, bias = (tensor.double().requires_grad_() for tensor in tensors)
    ids = torch.randint(0, V, (K,))
    return hidden, weight, bias, ids


def logits_of(hidden, weight, bias, scale=1.0, softcap=None):
    logits = scale * (hidden @ weight.T + bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def same_gradients(mine, other, inputs, **tolerance):
    found, expected = torch.autograd.grad(mine, inputs), torch.autograd.grad(other, inputs)
    for one, another in zip(found, expected, strict=True):
        torch.testing.assert_close(one, another, **tolerance)
        assert one.any()


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """The sizes of all floating tensors that are made, and how many matrix products."""

    def __init__(self):
        super().__init__()
        self.sizes, self.products = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm", "aten::addmm_")
        outputs = out if isinstance(out, tuple) else (out,)
        self.sizes += [o.numel() for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point()]
        return out


# ------------------------------------------------------------------------------------------------- token_scores


@CHUNKS
@SHAPES
def test_scores_are_those_of_whole_logits(case, chunk_rows, scale, softcap):
    hidden, weight, bias, ids = case
    found = token_scores(hidden, Head(weight_VD=weight, bias_V=bias, scale=scale, softcap=softcap), ids, entropy=True)
    logits = logits_of(hidden, weight, bias, scale, softcap)
    expected = logits.log_softmax(1).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(found.logps_K, expected)
    assert torch.equal(found.correct_K, logits.argmax(1) == ids)
    torch.testing.assert_close(found.entropy_K, torch.distributions.Categorical(logits=logits.detach()).entropy())
    slopes = torch.linspace(-1, 2, K, dtype=torch.float64)
    same_gradients(found.logps_K @ slopes, expected @ slopes, (hidden, weight, bias))


@SHAPES
@pytest.mark.parametrize("plain", [True, False])
def test_a_tempered_head_divides_its_logits(case, scale, softcap, plain):
    hidden, weight, bias, ids = case
    of = Head(weight_VD=weight, bias_V=bias, scale=scale, softcap=softcap)
    made = head.tempered(of if plain else lambda rows: logits_of(rows, weight, bias, scale, softcap), 0.7)
    expected = (logits_of(hidden, weight, bias, scale, softcap) / 0.7).log_softmax(1).gather(1, ids[:, None])
    torch.testing.assert_close(token_scores(hidden, made, ids).logps_K, expected.squeeze(1))


def small(case):
    """A corner of the case: numeric gradients are taken number by number."""
    hidden, weight, bias, ids = case
    tensors = (hidden[:4, :3], weight[:9, :3], bias[:9])
    return (*(tensor.detach().clone().requires_grad_() for tensor in tensors), ids[:4] % 9)


@pytest.mark.parametrize("chunk", [9, 27, 900])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_gradient_is_the_slope(case, chunk, softcap, frozen, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk)
    *inputs, ids = small(case)
    if frozen:
        inputs = [inputs[0], inputs[1].detach(), inputs[2].detach()]

    def logps(hidden, weight, bias):
        return token_scores(hidden, Head(weight_VD=weight, bias_V=bias, scale=0.7, softcap=softcap), ids).logps_K

    # the first backward pass may use what the forward pass kept, the next ones compute it again
    assert torch.autograd.gradcheck(logps, inputs, nondet_tol=1e-10)


def test_a_wrong_gradient_would_be_noticed(case, monkeypatch):
    hidden, weight, bias, ids = small(case)
    plain = head.HeadGradients.add
    monkeypatch.setattr(
        head.HeadGradients, "add", lambda self, rows, grad, slope: plain(self, rows, grad * 1.01, slope)
    )

    def logps(hidden):
        return token_scores(hidden, Head(weight_VD=weight, bias_V=bias), ids).logps_K

    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(logps, hidden, nondet_tol=1e-10)


@CHUNKS
def test_a_head_that_is_a_function_scores_alike(case, chunk_rows):
    hidden, weight, bias, ids = case
    found = token_scores(hidden, lambda rows: logits_of(rows, weight, bias), ids, entropy=True)
    expected = token_scores(hidden, Head(weight_VD=weight, bias_V=bias), ids, entropy=True)
    torch.testing.assert_close(found.logps_K, expected.logps_K)
    torch.testing.assert_close(found.entropy_K, expected.entropy_K)
    assert torch.equal(found.correct_K, expected.correct_K)
    same_gradients(found.logps_K.sum(), expected.logps_K.sum(), (hidden, weight, bias))


@pytest.mark.parametrize("by_function", [False, True])
def test_no_target_gives_no_score_and_a_zero_gradient(case, by_function):
    hidden, weight, bias, _ = case
    any_head = (lambda rows: logits_of(rows, weight, bias)) if by_function else Head(weight_VD=weight, bias_V=bias)
    found = token_scores(hidden[:0], any_head, torch.zeros(0, dtype=torch.int64))
    found.logps_K.sum().backward()
    assert len(found.logps_K) == len(found.correct_K) == 0 and not weight.grad.any()


def test_of_equal_logits_the_first_is_the_one_ranked_first():
    found = token_scores(torch.zeros(3, D), Head(weight_VD=torch.randn(V, D)), torch.tensor([0, 1, V - 1]))
    assert found.correct_K.tolist() == [True, False, False]


def test_masked_ids_give_no_nan(case):
    hidden, weight, bias, ids = case
    masked = bias.detach().clone()
    masked[-1] = -torch.inf
    ids = ids.masked_fill(ids == V - 1, 0)
    found = token_scores(hidden, Head(weight_VD=weight, bias_V=masked), ids, entropy=True)
    expected = logits_of(hidden, weight, masked)[:, :-1].log_softmax(1).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(found.logps_K, expected)
    assert found.entropy_K.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.logps_K.sum(), (hidden, weight)))


def test_bfloat16_is_as_near_as_its_products_are(case):
    hidden, weight, _, ids = (tensor.detach() if tensor.is_floating_point() else tensor for tensor in case)
    rough = weight.bfloat16().requires_grad_()
    found = token_scores(hidden.bfloat16(), Head(weight_VD=rough), ids)
    expected = (hidden.bfloat16() @ rough.detach().T).float().log_softmax(1).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(found.logps_K.detach(), expected)
    (gradient,) = torch.autograd.grad(found.logps_K.sum(), rough)
    exact = weight.clone().requires_grad_()
    (close,) = torch.autograd.grad(token_scores(hidden, Head(weight_VD=exact), ids).logps_K.sum(), exact)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), close, rtol=0.05, atol=0.1)


def test_gradients_of_a_head_in_16_bits_are_summed_over_chunks_in_32(case, monkeypatch):
    _, weight, bias, _ = (tensor.detach().bfloat16() if tensor.is_floating_point() else tensor for tensor in case)
    many = 400 * K
    hidden, ids = torch.ones(many, D).bfloat16(), torch.randint(0, V, (many,))
    gradients = []
    for chunk_rows in (5, many):
        monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk_rows * V)
        trained = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        scores = token_scores(hidden, Head(weight_VD=trained[0], bias_V=trained[1]), ids)
        gradients.append(torch.autograd.grad(scores.logps_K.sum(), trained))
    for chunked, whole in zip(*gradients, strict=True):  # in 16 bits the chunks behind the first hundred would vanish
        torch.testing.assert_close(chunked, whole, rtol=2**-6, atol=float(whole.abs().max()) * 2**-8)


def test_autocast_decides_the_type_of_the_products(case):
    hidden, weight, _, ids = (tensor.detach() if tensor.is_floating_point() else tensor for tensor in case)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_scores(hidden.float(), Head(weight_VD=weight.float()), ids).logps_K
        logits = F.linear(hidden.float(), weight.float())
    assert logits.dtype == torch.bfloat16 and found.dtype == torch.float32
    torch.testing.assert_close(found, logits.float().log_softmax(1).gather(1, ids[:, None]).squeeze(1))


@pytest.mark.parametrize("loss", [False, True])
def test_nothing_as_large_as_all_logits_is_made(case, loss):
    hidden, weight, _, ids = case
    many, ids = hidden.detach().repeat(8, 1).requires_grad_(), ids.repeat(8)

    def run():
        if loss:
            return hidden_loss_sum(many, Head(weight_VD=weight), ids).loss_sum
        return token_scores(many, Head(weight_VD=weight), ids).logps_K.sum()

    with Watch() as watch:
        run().backward()
    assert max(watch.sizes) <= max(5 * V, 8 * K * D)
    with Watch() as watch:  # control: the plain way makes one
        F.cross_entropy(many @ weight.T, ids)
    assert max(watch.sizes) == 8 * K * V


# ----------------------------------------------------------------------------------------------------- hidden_loss


def formula(name, logits, ids, settings, reference_logits):
    """The loss of each target as its authors write it, from whole logits."""
    logps = logits.log_softmax(1)
    target = logps.gather(1, ids[:, None]).squeeze(1)
    nll = F.cross_entropy(logits, ids, reduction="none", label_smoothing=settings.label_smoothing)
    match name:
        case "cross_entropy":
            losses = nll
        case "dft":
            losses = target.detach().exp() * nll
        case "eaft":
            top = logits.detach().topk(20, dim=1).values.log_softmax(1)
            losses = (-(top.exp() * top).sum(1) / 3.0) ** settings.alpha * nll
        case "asft":
            kl = F.kl_div(logps, reference_logits.softmax(1), reduction="none").sum(1)
            losses = target.detach().exp() * nll + settings.alpha * kl
        case "gkd":
            teacher = reference_logits.log_softmax(1)
            mixed = (settings.beta * teacher.exp() + (1 - settings.beta) * logps.exp()).log()
            of_teacher = F.kl_div(mixed, teacher, reduction="none", log_target=True).sum(1)
            losses = settings.beta * of_teacher + (1 - settings.beta) * (logps.exp() * (logps - mixed)).sum(1)
        case _:
            raise AssertionError(f"{name} has no formula here")
    return losses + settings.z_loss * logits.logsumexp(1) ** 2


@CHUNKS
@SHAPES
@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("name", list(TOKEN_OBJECTIVES))
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.02)])
def test_token_losses_are_their_formulas(case, name, smoothing, z_loss, by_function, chunk_rows, scale, softcap):
    hidden, weight, bias, ids = case
    settings = TokenSettings(
        loss=name, label_smoothing=smoothing, z_loss=z_loss, alpha=0.7, beta=0.3 if name == "gkd" else 0.0
    )
    reference = None
    reference_logits = None
    if TOKEN_OBJECTIVES[name].reference:
        reference = ReferenceHidden(
            hidden_KD=torch.randn(K, D).double(), head=Head(weight_VD=torch.randn(V, D).double())
        )
        reference_logits = reference.hidden_KD @ reference.head.weight_VD.T
    any_head = Head(weight_VD=weight, bias_V=bias, scale=scale, softcap=softcap)
    if by_function:

        def any_head(rows):
            return logits_of(rows, weight, bias, scale, softcap)

    weights = torch.linspace(0, 2, K)
    found = hidden_loss_sum(hidden, any_head, ids, weights, settings=settings, reference=reference)
    logits = logits_of(hidden, weight, bias, scale, softcap)
    expected = formula(name, logits, ids, settings, reference_logits) @ weights.double()
    torch.testing.assert_close(found.loss_sum, expected)
    assert found.num_targets == K and int(found.num_correct) == int((logits.argmax(1) == ids).sum())
    same_gradients(3 * found.loss_sum, 3 * expected, (hidden, weight, bias))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_from_hidden_states_it_is_what_it_is_from_logits(case, smoothing, weighted):
    hidden, weight, bias, ids = (
        tensor.detach().float().requires_grad_() if tensor.is_floating_point() else tensor for tensor in case
    )
    weights, sources = (torch.rand(K) if weighted else None), torch.arange(K) % 3
    apart = {"num_sources": 3}
    found = hidden_loss_sum(
        hidden,
        Head(weight_VD=weight, bias_V=bias),
        ids,
        weights,
        settings=TokenSettings(label_smoothing=smoothing),
        sources_K=sources,
        **apart,
    )
    expected = token_loss_sum(
        F.linear(hidden, weight, bias), ids, weights, label_smoothing=smoothing, sources_N=sources, **apart
    )
    torch.testing.assert_close(found.loss_sum, expected.loss_sum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.by_source, expected.by_source, rtol=1e-5, atol=1e-5)
    assert (found.num_targets, int(found.num_correct)) == (expected.num_targets, int(expected.num_correct))
    same_gradients(found.loss_sum, expected.loss_sum, (hidden, weight, bias), rtol=1e-5, atol=1e-5)


def test_a_frozen_head_and_an_evaluation_cost_no_gradient(case):
    hidden, weight, _, ids = case

    def products(run):
        with Watch() as watch:
            run()
        return watch.products

    num_chunks = -(-K // 5)
    assert products(lambda: hidden_loss_sum(hidden, Head(weight_VD=weight), ids).loss_sum.backward()) == 3 * num_chunks
    frozen = weight.detach()
    score = token_scores
    assert products(lambda: score(hidden, Head(weight_VD=weight), ids).logps_K.sum().backward()) == 4 * num_chunks
    assert products(lambda: score(hidden, Head(weight_VD=frozen), ids).logps_K.sum().backward()) == 2 * num_chunks
    assert products(lambda: hidden_loss_sum(hidden, Head(weight_VD=frozen), ids).loss_sum.backward()) == 2 * num_chunks
    with torch.no_grad():
        assert products(lambda: hidden_loss_sum(hidden, Head(weight_VD=weight), ids)) == num_chunks
        assert products(lambda: token_scores(hidden, Head(weight_VD=weight), ids)) == num_chunks


def test_the_gradient_of_a_sum_is_given_once(case):
    hidden, weight, _, ids = case
    found = hidden_loss_sum(hidden, Head(weight_VD=weight), ids)
    found.loss_sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        found.loss_sum.backward()


def test_no_target_costs_nothing(case):
    hidden, weight, _, ids = case
    found = hidden_loss_sum(hidden[:0], Head(weight_VD=weight), ids[:0])
    found.loss_sum.backward()
    assert (found.loss_sum.item(), found.num_targets, int(found.num_correct)) == (0.0, 0, 0)
    assert not weight.grad.any() and not hidden.grad.any()


def test_token_losses_are_found_by_name():
    hidden, weight = torch.randn(K, D), Head(weight_VD=torch.randn(V, D))
    ids = torch.zeros(K, dtype=torch.int64)
    with refused(UserError, "'cross_entropie'", "cross_entropy"):
        hidden_loss_sum(hidden, weight, ids, settings=TokenSettings(loss="cross_entropie"))
    with pytest.raises(UserError, match=r"(?s)sigmoid is a loss of dpo.*cross_entropy, dft"):
        hidden_loss_sum(hidden, weight, ids, settings=TokenSettings(loss="sigmoid"))
