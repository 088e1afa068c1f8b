"""How far the model's distributions are from those of another. C targets of a chunk, V vocabulary.

p is the other model's (a reference, a teacher), q the one that is trained, m = beta p + (1 - beta) q. The generalised
Jensen-Shannon divergence (arXiv:2306.13649) is

    beta KL(p || m) + (1 - beta) KL(q || m)

which is 0 at both ends. Divided by beta it goes to KL(p || q) for small beta, divided by 1 - beta to KL(q || p) for
large beta; as in TRL, ``beta`` 0 and 1 stand for these two themselves.

With ``top_k`` the two are compared on the k tokens that p finds likeliest, and on all others together, their tail: how
p divides the tail is not looked at, and tokens that it takes for noise pull at nothing.
"""

from __future__ import annotations

import math

import torch

UNSEEN = -100.0  # log-probability of ids that a model never gives: masked ones, or those that it does not have


def divergence(q_CV: torch.Tensor, p_CV: torch.Tensor, beta: float, top_k: int = 0) -> torch.Tensor:
    """Of each target, [C], differentiable by both; ``q_CV`` and ``p_CV`` are log-probabilities, none of them -inf.
    ``top_k`` 0 compares all tokens."""
    assert 0 <= beta <= 1, f"beta {beta}"
    if 0 < top_k < p_CV.shape[1]:
        ids_CK = p_CV.topk(top_k, dim=1).indices
        q_CV, p_CV = _top_and_tail(q_CV, ids_CK), _top_and_tail(p_CV, ids_CK)
    if beta == 0:
        return _kl(p_CV, q_CV)
    if beta == 1:
        return _kl(q_CV, p_CV)
    m_CV = _mixture(q_CV, p_CV, beta)
    return beta * _kl(p_CV, m_CV) + (1 - beta) * _kl(q_CV, m_CV)


def divergence_with_slope(
    q_CV: torch.Tensor, p_CV: torch.Tensor, beta: float, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence, [C], and its derivative by the logits that ``q_CV`` is of, [C, V]."""
    if 0 < top_k < p_CV.shape[1]:
        ids_CK = p_CV.topk(top_k, dim=1).indices
        q_CB = _top_and_tail(q_CV, ids_CK)  # B: the top k and the tail
        values_C, slope_CB = divergence_with_slope(q_CB, _top_and_tail(p_CV, ids_CK), beta)
        # a token of the tail moves it by its share of the tail's probability
        slope_CV = (q_CV - q_CB[:, -1:]).clamp_(max=0).exp_().mul_(slope_CB[:, -1:])
        return values_C, slope_CV.scatter_(1, ids_CK, slope_CB[:, :-1])
    if beta == 0:
        return _kl(p_CV, q_CV), q_CV.exp() - p_CV.exp()
    other_CV = p_CV if beta == 1 else _mixture(q_CV, p_CV, beta)
    gaps_CV, probs_CV = q_CV - other_CV, q_CV.exp()
    reverse_C = (probs_CV * gaps_CV).sum(dim=1)
    # d / d q_i = s (log(q_i / m_i) + constants), s = 1 - beta: the derivative of m cancels between the two terms
    slope_CV = gaps_CV.sub_(reverse_C[:, None]).mul_(probs_CV)
    if beta == 1:
        return reverse_C, slope_CV
    return beta * _kl(p_CV, other_CV) + (1 - beta) * reverse_C, slope_CV.mul_(1 - beta)


def log_probabilities(logits_CV: torch.Tensor, vocabulary: int | None = None) -> torch.Tensor:
    """Of logits, at least `UNSEEN`. ``vocabulary``: as many ids as the other model has. Of two models with the same
    tokens one may have further rows in its output layer, which stand for nothing: they are left out, or never given."""
    known_CV = logits_CV if vocabulary is None else logits_CV[:, :vocabulary]
    logps_CV = known_CV.log_softmax(dim=1).clamp(min=UNSEEN)
    missing = 0 if vocabulary is None else vocabulary - logps_CV.shape[1]
    return torch.nn.functional.pad(logps_CV, (0, missing), value=UNSEEN) if missing else logps_CV


def _top_and_tail(logps_CV: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens, and of all others together: [C, K + 1]."""
    others_CV = logps_CV.scatter(1, ids_CK, float("-inf"))
    tail_C = others_CV.logsumexp(dim=1, keepdim=True).clamp(min=UNSEEN)
    return torch.cat([logps_CV.gather(1, ids_CK), tail_C], dim=1)


def _kl(a_CV: torch.Tensor, b_CV: torch.Tensor) -> torch.Tensor:
    """KL(a || b)."""
    return (a_CV.exp() * (a_CV - b_CV)).sum(dim=1)


def _mixture(q_CV: torch.Tensor, p_CV: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.logaddexp(p_CV + math.log(beta), q_CV + math.log1p(-beta))
