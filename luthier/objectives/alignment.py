"""How much what is written looks like the model's own writing. K targets, C targets of a chunk, V vocabulary."""

from __future__ import annotations

import torch

from luthier.objectives.head import AnyHead, ChunkedHead, Head, chunks_of
from luthier.objectives.token_scores import probe_vocabulary


def log_square_sums(hidden_KD: torch.Tensor, head: AnyHead) -> torch.Tensor:
    """``log sum p^2`` over the vocabulary at each target, float32[K], constant.

    It is the log of the probability that a token drawn from the model has on average, which WPO (arXiv:2406.11827)
    measures a target's own against.
    """
    with torch.no_grad():
        parts = list(_by_weights(hidden_KD, head) if isinstance(head, Head) else _by_function(hidden_KD, head))
    return torch.cat(parts) if parts else hidden_KD.new_empty(0, dtype=torch.float32)


def _by_weights(hidden_KD: torch.Tensor, head: Head) -> list[torch.Tensor]:
    work = ChunkedHead(head, hidden_KD, dtype=head.compute_dtype)
    return [_of(work.logits(rows)[0]) for rows in work.chunks()]


def _by_function(hidden_KD: torch.Tensor, head: AnyHead) -> list[torch.Tensor]:
    assert not isinstance(head, Head)
    vocabulary = probe_vocabulary(head, hidden_KD)
    logits = (head(hidden_KD[rows]) for rows in chunks_of(len(hidden_KD), vocabulary))
    return [_of(logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))) for logits_CV in logits]


def _of(logits_CV: torch.Tensor) -> torch.Tensor:
    # sum p^2 = sum exp(2 x) / (sum exp(x))^2
    lse_C = logits_CV.logsumexp(dim=1)
    return logits_CV.mul(2).logsumexp(dim=1) - 2 * lse_C
