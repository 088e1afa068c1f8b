"""Recurrent layers on packed rows: each segment goes through them alone, all other layers run on the row as it is.

Gated delta rules (arXiv:2412.06464), state spaces (arXiv:2405.21060) and short convolutions carry what they saw from
token to token, and no mask stops them. The modules that do so, their *mixers*, get the segments of a row as a batch
instead. Which ones comes with the call, as for `models.attention`: models hand ``attention_plan`` down to all layers.

B rows, T tokens a row, N = B x T, S rows of a call, W their width, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from luthier.errors import ModelError
from luthier.models.attention import PLAN, AttentionPlan

# Classes of transformers that take hidden states [B, T, D] first and give the same shape, are causal, and get the
# keywords of the model's call. A layer stands here in place of its mixer where it keeps those keywords to itself.
MIXERS = frozenset(
    {
        "BailingHybridDeltaAttention", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer",
        "JambaMambaDecoderLayer", "KimiLinearDeltaAttention", "Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv",
        "MiniMaxLightningAttention", "NemotronHMamba2Mixer", "OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Zamba2MambaMixer", "ZambaMambaMixer",
    }
)  # fmt: skip

_CACHES = ("cache_params", "past_key_values")
# What speaks of the row as it is packed: kernels would cut by it once more.
_OF_THE_ROW = (
    "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "position_embeddings", "position_ids", "seq_idx",
)  # fmt: skip


def part_mixers(model: nn.Module) -> tuple[str, ...]:
    """Have the mixers of a model run segment by segment where its call has an ``attention_plan``; nothing changes
    where it has none. May be called again.

    Returns the names of their classes; () where the model has none that are known.
    """
    found = set()
    for module in model.modules():
        if (name := type(module).__name__) not in MIXERS:
            continue
        found.add(name)
        if not isinstance(module.forward, _SegmentWise):
            module.forward = _SegmentWise(name, module.forward)
    return tuple(sorted(found))


class _SegmentWise:
    """A mixer's forward pass over a packed batch. It stands before the module's own, which stays as it is."""

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self.name, self.forward = name, forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where a row is cut changes with every batch
    def __call__(self, hidden_states: torch.Tensor, *args: Any, **settings: Any) -> Any:
        """What the module itself gives for ``hidden_states`` [B, T, D], of each segment alone.

        Raises `ModelError` where a mask or a cache comes with the plan.
        """
        plan: AttentionPlan | None = settings.pop(PLAN, None)
        if plan is None:
            return self.forward(hidden_states, *args, **settings)
        if args:
            raise ModelError(
                f"{self.name} is called with {len(args) + 1} positional inputs, which cannot be split into segments"
            )
        for name in ("attention_mask", *_CACHES):
            if settings.get(name) is not None:
                raise ModelError(f"{self.name} got {name}, which it cannot take together with a plan of segments")
        inputs = {name: None if name in _OF_THE_ROW else value for name, value in settings.items()}
        return self._parted(hidden_states, plan, inputs)

    def _parted(self, hidden_BTD: torch.Tensor, plan: AttentionPlan, inputs: dict[str, object]) -> object:
        stretches = torch.split(hidden_BTD.flatten(0, 1), list(plan.lengths))
        found: list[torch.Tensor | None] = [None] * len(stretches)
        beside: tuple[object, ...] | None = None  # states that some give with their output; nobody may read them here
        # TODO(divided weights): ranks may have different numbers of calls. Where each small layer gets its weights from
        # all ranks (ZeRO-3; FSDP that wraps less than a decoder layer) they would wait for each other: one call then.
        for call in plan_calls(plan):
            output = self.forward(_gathered(stretches, call), **inputs)
            if isinstance(output, tuple):
                output, beside = output[0], (None,) * (len(output) - 1)
            _scatter(output, call, plan, into=found)
        done = [torch.zeros_like(own) if new is None else new for own, new in zip(stretches, found, strict=True)]
        output_BTD = torch.cat(done).view(hidden_BTD.shape)
        return output_BTD if beside is None else (output_BTD, *beside)


def _gathered(stretches: tuple[torch.Tensor, ...], call: MixerCall) -> torch.Tensor:
    """[S, W, D]: the rows of a call, zeros behind them, which no token before them sees."""
    parts = []
    for row in call.rows:
        parts += [stretches[stretch] for stretch in row]
        if missing := call.width - sum(len(stretches[stretch]) for stretch in row):
            parts.append(parts[-1].new_zeros((missing, parts[-1].shape[1])))
    return torch.cat(parts).view(len(call.rows), call.width, -1)


def _scatter(
    output_SWD: torch.Tensor, call: MixerCall, plan: AttentionPlan, *, into: list[torch.Tensor | None]
) -> None:
    """Put what a call gave to the stretches that it is of. What rows share is the same in each, and taken once."""
    for row, output_WD in zip(call.rows, output_SWD.unbind(), strict=True):
        lengths = [plan.lengths[stretch] for stretch in row]
        parts = torch.split(output_WD, [*lengths, call.width - sum(lengths)])
        for stretch, part in zip(row, parts, strict=False):
            into[stretch] = part if into[stretch] is None else into[stretch]


# --------------------------------------------------------------------------------------------------------------------
# Which stretches of a batch go through a recurrent layer together, as plain numbers: `models.mixers` computes by
# them.
#
# A recurrent layer carries a state from token to token, so each segment, and each leaf of a token tree with all that
# it continues, is a row of its own for it. Rows of about the same length go through the layer in one call.


TOKENS_PER_CALL = 256  # a call costs about as much as this many tokens more in one of them (benchmarks/recurrent.py)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerCall:
    """Rows that go through a layer together, ``width`` tokens each with padding at the end.

    ``rows``: for each the numbers of the stretches on its path, root first.
    """

    width: int
    rows: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=8)  # every recurrent layer asks for the same batch, and once more where it is checkpointed
def plan_calls(plan: AttentionPlan, tokens_per_call: int = TOKENS_PER_CALL) -> tuple[MixerCall, ...]:
    """The calls for a batch. Every stretch but padding is on the path of some row.

    whole 700, whole 650, whole 30 -> (700: rows (0,), (1,)), (30: row (2,))
    root 5, child 3, child 2       -> (8: rows (0, 1), (0, 2))

    Rows in descending order are cut into calls such that their tokens, padding included, and ``tokens_per_call`` for
    each call are as few as can be.
    """
    paths = [(*context, stretch) for stretch, context in enumerate(plan.contexts) if context is not None]
    continued = {stretch for path in paths for stretch in path[:-1]}
    rows = [path for path in paths if path[-1] not in continued]
    lengths = np.array([sum(plan.lengths[stretch] for stretch in row) for row in rows])
    order = np.argsort(-lengths, kind="stable")
    found = []
    for start, end in _cheapest_cuts(lengths[order], tokens_per_call):
        members = order[start:end]
        found.append(MixerCall(width=int(lengths[members[0]]), rows=tuple(rows[member] for member in members)))
    return tuple(found)


def _cheapest_cuts(descending: NDArray[np.int64], tokens_per_call: int) -> list[tuple[int, int]]:
    """[700, 650, 30], 256 -> [(0, 2), (2, 3)]; a call costs its number of rows times its first one's length."""
    count = len(descending)
    costs = np.zeros(count + 1, dtype=np.int64)  # of the rows before each cut
    begins = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        of_last = costs[:end] + (end - np.arange(end)) * descending[:end] + tokens_per_call
        begins[end] = int(of_last.argmin())
        costs[end] = of_last[begins[end]]
    cuts, end = [], count
    while end:
        cuts.append((int(begins[end]), end))
        end = int(begins[end])
    return cuts[::-1]
