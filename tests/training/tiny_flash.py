"""FlashAttention's varlen function by its documentation, on the CPU, put where transformers looks for the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash

NAME = "flash_attention_2"
HALF = (torch.float16, torch.bfloat16)


@dataclass(kw_only=True)
class Kernel:
    """What was asked of it. ``dtypes`` are those that it takes; ``leaks``: it sees a batch as one sequence."""

    dtypes: tuple[torch.dtype, ...] = HALF
    leaks: bool = False
    lengths: list[tuple[int, ...]] = field(default_factory=list)
    windows: set[tuple[int, int]] = field(default_factory=set)
    dense: int = 0

    def varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        s_aux: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> torch.Tensor:
        """[N, H, D] of ``q`` [N, H, D] and ``k``, ``v`` [N, G, D]. A window of (left, right) is that many tokens beside
        the token itself; under ``causal`` none to the right."""
        if q.dtype not in self.dtypes or not q.dtype == k.dtype == v.dtype:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        assert causal and dropout_p == 0 and q.dim() == 3 and len(q) == len(k) == len(v)
        lengths = []
        for bounds, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
            assert bounds.dtype == torch.int32 and int(bounds[0]) == 0 and int(bounds[-1]) == len(q)
            lengths = bounds.diff().tolist()
            assert min(lengths) > 0 and max(lengths) == int(longest)
        self.lengths.append(tuple(lengths))
        self.windows.add(window_size)
        parts = [len(q)] if self.leaks else lengths
        each = zip(*(torch.split(x, parts) for x in (q, k, v)), strict=True)
        return torch.cat([_attend(*part, softmax_scale, window_size[0], softcap, s_aux) for part in each])

    def rows(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: object) -> torch.Tensor:
        """``flash_attn_func``: [B, T, H, D], each row one sequence."""
        self.dense += 1
        bounds = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1], dtype=torch.int32)
        settings = {name: value for name, value in settings.items() if not name.startswith("max_seqlen")}
        flat = (x.flatten(0, 1) for x in (q, k, v))
        found = self.varlen(*flat, bounds, bounds, q.shape[1], q.shape[1], **settings)  # type: ignore[arg-type]
        return found.unflatten(0, q.shape[:2])


def install(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """As if flash-attn and a GPU were there."""
    for name, value in {
        "_loaded_implementation": NAME,
        "_flash_fn": kernel.rows,
        "_flash_varlen_fn": kernel.varlen,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": flash._pad_input,
        "_unpad_fn": flash._unpad_input,
        "_process_flash_kwargs_fn": flash._lazy_define_process_function(kernel.varlen),
        "_process_with_kvcache_kwargs_fn": dict,
    }.items():
        monkeypatch.setattr(flash, name, value)
    monkeypatch.setitem(flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda self, *_, **__: True)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    left: int,
    softcap: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    query, key, value = (
        x.transpose(0, 1).float() for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    )
    scores = query @ key.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (distance >= 0) if left < 0 else (distance >= 0) & (distance <= left)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.float().view(-1, 1, 1).expand(-1, len(q), 1)], dim=-1)
    shares = scores.softmax(dim=-1)[..., : len(q)]
    return (shares @ value).transpose(0, 1).to(q.dtype)
