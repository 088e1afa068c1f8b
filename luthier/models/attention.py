"""Attention within segments only, for any decoder of transformers: there is no mask of a whole row, and pairs of tokens
that may not see each other are computed only among few tokens that attend together, as a call of its own for each would
cost more. The cost of a packed row is the sum of its segments' squares, not the square of the row.

``luthier_segments`` is registered through transformers' public interfaces. Which tokens see which comes with the call
(``model(…, attention_plan=plan)``) and is handed down to every attention layer; ``cu_seq_lens_q``, as FlashAttention
takes them, do as well. With neither it does what sdpa does, so that the same model can generate.

A flat row of N = B x T tokens is cut into *stretches*: a whole segment, a branch of a tree, or padding. H query heads,
G key heads, D width of a head, n tokens of a stretch, L of its path (itself and what it continues).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from luthier.errors import ModelError
from luthier.layout import ancestors, seen_blocks, segment_starts
from luthier.records import Branch
from luthier.writing import counted

SEGMENTS = "luthier_segments"
PLAN = "attention_plan"  # the keyword of the model's call

# What models hand to their attention that changes nothing about it. Anything else that is set is refused: a rule that
# is not known here would be left out in silence.
_WITHOUT_EFFECT = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "layer_idx", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip
_MOST_TOGETHER = 128  # tokens that attend in one call though they are of several stretches
_LEAST_BLOCK = 128  # queries at a time under a sliding window; shorter blocks cost more in calls than they save


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rules:
    """What a layer asks of its attention beside causality; None where it does not."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None
    sinks_H: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _VisibleBlocks:
    """The blocks of a stretch; ``whole``: a sliding window does not cut them."""

    places: tuple[Block, ...]
    whole: bool


def register_attention() -> None:
    """Make ``attn_implementation="luthier_segments"`` known to transformers. May be called again."""
    AttentionInterface.register(SEGMENTS, segments_attention)
    AttentionMaskInterface.register(SEGMENTS, segments_mask)


def segments_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], allow_is_causal_skip: bool = True, **rest: Any
) -> torch.Tensor | None:
    """In place of a mask, a tensor without elements that says which mask transformers would have built.

    Its shape is [2 if positions restart else 1, 1, sliding window or 0, 0]; `segments_attention` compares that with
    what the layer tells it. Padding masks, caches and masks that are more than causal are built as for sdpa.
    """
    device = rest.get("device", "cpu")
    attention_mask, window = rest.get("attention_mask"), rest.get("local_size")
    usual = attention_mask is None and q_length == kv_length and not rest.get("use_vmap")
    ahead, all_before = (False, True) if not usual else _neighbours(mask_function, rest["batch_size"], q_length, device)
    if not usual or "allow_is_bidirectional_skip" in rest or ahead:
        built: torch.Tensor | None = sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            allow_is_causal_skip=allow_is_causal_skip,
            **rest,
        )
        return built
    return torch.empty((1 if all_before else 2, 1, window or 0, 0), dtype=torch.bool, device=device)


def announced(window: int | None, device: torch.device | str) -> torch.Tensor:
    """What `segments_mask` answers for layers with this window and rows of several segments."""
    return torch.empty((2, 1, window or 0, 0), dtype=torch.bool, device=device)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # where a row is cut changes with every batch
def segments_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """[B, T, H, D] from ``query`` [B, H, T, D] and ``key``, ``value`` [B, G, T, D], as transformers calls it.

    Raises `ModelError` where the layer asks for something that is not known here, where a mask stands beside the plan,
    or where the row holds several segments and nothing says where they begin.
    """
    plan: AttentionPlan | None = settings.pop(PLAN, None)
    causal = settings.pop("is_causal", None)
    causal = bool(module.is_causal) if causal is None else bool(causal)
    rules = _rules(module, settings)
    built = attention_mask is not None and attention_mask.numel() > 0
    if plan is not None and (built or not causal):
        raise ModelError(
            f"{type(module).__name__} attends {'under a mask of its own' if built else 'in both directions'}, "
            f"which {SEGMENTS} cannot keep within segments",
            hint="set model.attn_implementation: sdpa",
        )
    if built or not causal or query.shape[2] != key.shape[2]:
        assert not built or attention_mask is not None
        visible = attention_mask if built else query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool)
        return _attend(query, key, value, visible, rules).transpose(1, 2).contiguous(), None
    if attention_mask is not None:
        told = plan is not None or settings.get("cu_seq_lens_q") is not None
        _check_announced(module, attention_mask, rules, planned=told)
    num_rows, _, width, _ = query.shape
    if plan is None:
        bounds = settings.get("cu_seq_lens_q")
        lengths = (width,) * num_rows if bounds is None else tuple(bounds.diff().tolist())
        plan = AttentionPlan(lengths=lengths, contexts=((),) * len(lengths))
    if sum(plan.lengths) != num_rows * width:
        raise ModelError(
            f"{type(module).__name__} got {num_rows} x {counted(width, 'token')}, but its segments "
            f"have {sum(plan.lengths)}"
        )
    return _planned(query, key, value, plan, rules), None


def _rules(module: nn.Module, settings: dict[str, Any]) -> _Rules:
    known = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"} | _WITHOUT_EFFECT
    unset = (None, False)
    unknown = sorted(n for n, value in settings.items() if n not in known and not any(value is each for each in unset))
    if unknown:
        raise ModelError(
            f"{type(module).__name__} gives its attention {', '.join(unknown)}, which {SEGMENTS} does not know",
            hint="set model.attn_implementation: sdpa",
        )
    return _Rules(
        scaling=settings.get("scaling"),
        dropout=settings.get("dropout") or 0.0,
        window=settings.get("sliding_window"),
        softcap=settings.get("softcap"),
        sinks_H=settings.get("s_aux"),
    )


def _neighbours(mask_function: Callable[..., Any], num_rows: int, length: int, device: Any) -> tuple[bool, bool]:
    """Whether some token of a batch sees the one behind it, as within images: then there is more to the mask than
    segments; and whether all see the one before, as they do in rows of one segment."""
    rows_B1 = torch.arange(num_rows, device=device)[:, None]
    tokens_1T = torch.arange(max(length - 1, 0), device=device)[None]
    zero = torch.zeros_like(tokens_1T)
    ahead = torch.as_tensor(mask_function(rows_B1, zero, tokens_1T, tokens_1T + 1)).any()
    before = torch.as_tensor(mask_function(rows_B1, zero, tokens_1T + 1, tokens_1T)).all()
    return bool(ahead), bool(before)


def _check_announced(module: nn.Module, announced: torch.Tensor, rules: _Rules, *, planned: bool) -> None:
    """Compare the mask that would have been built with what the layer says."""
    packed, _, window, _ = announced.shape
    if packed == 2 and not planned:
        raise ModelError(
            f"{type(module).__name__} is not told where segments begin: {PLAN} does not reach it",
            hint="set model.attn_implementation: sdpa",
        )
    if window != (rules.window or 0):
        raise ModelError(
            f"{type(module).__name__} has a local mask of {window or 'no'} tokens and tells its attention "
            f"{rules.window or 'none'}",
            hint="set model.attn_implementation: sdpa",
        )


def _planned(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, rules: _Rules
) -> torch.Tensor:
    """[B, T, H, D]."""
    num_rows, num_heads, width, _ = query.shape
    # split, not slices: the gradient of a split is one cat, that of a slice is a row of zeros for each segment
    # [1, H, N, D]; of one row it is a view.
    queries, keys, values = (
        torch.split(x if len(x) == 1 else x.transpose(0, 1).flatten(1, 2).unsqueeze(0), list(plan.lengths), dim=2)
        for x in (query, key, value)
    )
    found: list[torch.Tensor] = []
    for run in _runs(plan, rules.window, query.device):
        if run.context is None:
            num_tokens = sum(plan.lengths[i] for i in run.own)
            found.append(value.new_zeros((1, num_tokens, num_heads, value.shape[-1])))
            continue
        run_query, run_key, run_value = (
            x[places[0]] if len(places) == 1 else torch.cat([x[i] for i in places], dim=2)
            for x, places in ((queries, run.own), (keys, (*run.context, *run.own)), (values, (*run.context, *run.own)))
        )
        if run.visible_nn is None:
            visible = _VisibleBlocks(plan.blocks_of(run.own[0], rules.window), whole=plan.reach is BlockReach.WHOLE)
            seen = _attend_on_path(run_query, run_key, run_value, rules, visible)
        else:
            before = run_key.shape[2] - run_query.shape[2]
            seen = _attend(run_query, run_key, run_value, F.pad(run.visible_nn, (before, 0), value=True), rules)
        found.append(seen.transpose(1, 2))
    return torch.cat(found, dim=1).view(num_rows, width, num_heads, value.shape[-1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StretchRun:
    """Stretches that attend in one call, as a call costs more than the pairs that are computed in vain.

    own         their numbers
    context     the stretches before them that all of them see; None: padding
    visible_nn  `_visible_within` the run; None: it is one stretch
    """

    own: range
    context: tuple[int, ...] | None
    visible_nn: torch.Tensor | None


def _runs(plan: AttentionPlan, window: int | None, device: torch.device) -> tuple[_StretchRun, ...]:
    """All stretches in order; those are together that `_attend_together`."""
    if (found := plan.runs.get((window, device))) is not None:
        return found
    runs: list[range] = []
    num_tokens = 0
    for stretch, length in enumerate(plan.lengths):
        num_tokens += length
        if runs and num_tokens <= _MOST_TOGETHER and _attend_together(plan, runs[-1], stretch, window):
            runs[-1] = range(runs[-1].start, stretch + 1)
        else:
            runs.append(range(stretch, stretch + 1))
            num_tokens = length
    found = tuple(
        _StretchRun(
            own=run,
            context=plan.contexts[run.start],
            visible_nn=_visible_within(plan, run).to(device) if len(run) > 1 else None,
        )
        for run in runs
    )
    plan.runs[window, device] = found
    return found


def _attend_together(plan: AttentionPlan, run: range, stretch: int, window: int | None) -> bool:
    """Whether the next stretch sees the same before a run as the run does, all of it, and neither has blocks."""
    path, context = plan.contexts[stretch], plan.contexts[run.start]
    if path is None or context is None:
        return False
    outside, within = path[: len(context)], path[len(context) :]
    if outside != context or (within and within[0] < run.start):
        return False
    if plan.blocks_of(run.start, window) or plan.blocks_of(stretch, window):
        return False
    return window is None or sum(plan.lengths[i] for i in (*context, *run, stretch)) <= window


def _visible_within(plan: AttentionPlan, run: range) -> torch.Tensor:
    """bool[n, n]: which of the run's tokens see which of them."""
    paths = [(*(plan.contexts[stretch] or ()), stretch) for stretch in run]
    sees = torch.tensor([[stretch in path for stretch in run] for path in paths])
    lengths = torch.tensor([plan.lengths[stretch] for stretch in run])
    return sees.repeat_interleave(lengths, 0).repeat_interleave(lengths, 1).tril()


def _attend_on_path(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: _Rules, blocks: _VisibleBlocks
) -> torch.Tensor:
    """[1, H, n, D]: queries are the last n of a path of L keys, and each sees what is before it there and its block."""
    n, length = query.shape[2], key.shape[2]
    window = rules.window
    if blocks.places:
        return _attend(query, key, value, _visible_with_blocks(n, length, window, blocks, query.device), rules)
    if window is None or length <= window:
        visible = None if n == length else _visible(n, length, None, query.device)
        return _attend(query, key, value, visible, rules)
    # A block is at least as long as the window, so its queries see their own block and the one before it, no more.
    block = max(window, _LEAST_BLOCK)
    before = min(length - n, window - 1)
    sizes = [length - n - before, before, *(min(block, n - first) for first in range(0, n, block))]
    key_blocks, value_blocks = torch.split(key, sizes, dim=2)[1:], torch.split(value, sizes, dim=2)[1:]
    found = []
    for number, block_query in enumerate(torch.split(query, block, dim=2)):
        block_keys, block_values = (torch.cat(x[number : number + 2], dim=2) for x in (key_blocks, value_blocks))
        visible = _visible(block_query.shape[2], block_keys.shape[2], window, query.device)
        found.append(_attend(block_query, block_keys, block_values, visible, rules))
    return torch.cat(found, dim=2)


def _visible(n: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool[n, L]: the last n of L tokens look back, ``window`` of them at most, themselves among them."""
    distance = _distance(n, length, device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _visible_with_blocks(
    n: int, length: int, window: int | None, blocks: _VisibleBlocks, device: torch.device
) -> torch.Tensor:
    """`_visible`, where tokens of a block among the last n also see what is behind them in it; ``whole``: all of it."""
    visible = _visible(n, length, window if blocks.whole else None, device)
    for start, end in blocks.places:
        visible[start:end, length - n + start : length - n + end] = True
    return visible if window is None or blocks.whole else visible & (_distance(n, length, device) < window)


def _distance(n: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length - n, length, device=device)[:, None] - torch.arange(length, device=device)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, rules: _Rules
) -> torch.Tensor:
    """[B, H, n, D]; ``visible`` None is causal."""
    if rules.softcap is not None or rules.sinks_H is not None:
        return _attend_explicitly(query, key, value, visible, rules)
    grouped = query.shape[1] != key.shape[1]
    if grouped and visible is not None and query.is_cuda:  # no fused CUDA kernel takes groups and a mask
        groups = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        dropout_p=rules.dropout,
        scale=rules.scaling,
        is_causal=visible is None,
        enable_gqa=grouped,
    )


def _attend_explicitly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, rules: _Rules
) -> torch.Tensor:
    """Soft-capped scores (Gemma 2, arXiv:2408.00118) and attention sinks, a score that every head may spend on nothing
    (gpt-oss, arXiv:2508.10925): no fused kernel of torch has them, so the scores of a stretch are held, n x L a head.
    """
    groups = query.shape[1] // key.shape[1]
    if visible is None:
        visible = _visible(query.shape[2], key.shape[2], None, query.device)
    scale = query.shape[-1] ** -0.5 if rules.scaling is None else rules.scaling
    scores = (query @ key.repeat_interleave(groups, 1).transpose(-1, -2)) * scale
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.float().masked_fill(~visible, torch.finfo(torch.float32).min)  # -inf: NaN where nothing is seen
    if rules.sinks_H is not None:
        sinks = rules.sinks_H.float().view(1, -1, 1, 1).expand(len(query), -1, query.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(shares, rules.dropout) @ value.repeat_interleave(groups, 1)


# --------------------------------------------------------------------------------------------------------------------
# Which tokens of a batch see which, as plain numbers: what `models.attention` computes by.


Block = tuple[int, int]
"""First token of a stretch, and the one behind the last, that see each other both ways."""


class BlockReach(StrEnum):
    """In which layers the tokens of a picture see each other both ways."""

    NOWHERE = "nowhere"
    WINDOWS = "windows"  # in layers with a sliding window (Gemma 4)
    EVERYWHERE = "everywhere"  # (Gemma 3)
    WHOLE = "whole"  # everywhere, and past sliding windows (Gemma 4 Unified)

    def covers(self, window: int | None) -> bool:
        """Whether it does in layers with this window; None: with none."""
        match self:
            case BlockReach.NOWHERE:
                return False
            case BlockReach.WINDOWS:
                return window is not None
            case BlockReach.EVERYWHERE | BlockReach.WHOLE:
                return True
            case _:
                raise AssertionError(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """Which tokens of a flattened batch see which. Plain numbers: no layer has to wait for a device to read them.

    lengths   of the stretches, in order; they add up to N
    contexts  for each stretch the numbers of those before it on its path, root first; None: padding, not computed
    blocks    for each stretch those in it; () where there are none at all
    reach     in which layers they are
    runs      which stretches attend in one call, by window and device: found when a layer asks first, for all others
    """

    lengths: tuple[int, ...]
    contexts: tuple[tuple[int, ...] | None, ...]
    blocks: tuple[tuple[Block, ...], ...] = ()
    reach: BlockReach = BlockReach.NOWHERE
    runs: dict[tuple[int | None, torch.device], tuple[_StretchRun, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def blocks_of(self, stretch: int, window: int | None) -> tuple[Block, ...]:
        """Those of a stretch, in layers with this window."""
        return self.blocks[stretch] if self.blocks and self.reach.covers(window) else ()


def plan_attention(
    branches: Sequence[Sequence[Branch]],
    *,
    width: int,
    types_BT: NDArray[np.integer] | None = None,
    reach: BlockReach = BlockReach.NOWHERE,
) -> AttentionPlan:
    """The plan of a batch whose rows, ``width`` tokens wide, are made of these branches; the rest of a row is padding.

    [[whole 3, whole 2]], 6    -> lengths (3, 2, 1), contexts ((), (), None)
    [[root 3, child 2, child 2]], 7 -> lengths (3, 2, 2), contexts ((), (0,), (0,))

    With token types [B, T] (`layout.position_schemes.TokenType`) the tokens of a picture see each other in the layers
    of ``reach``.
    """
    lengths: list[int] = []
    contexts: list[tuple[int, ...] | None] = []
    blocks: list[tuple[Block, ...]] = []
    for number, row in enumerate(branches):
        before = len(lengths)
        lengths += [branch.length for branch in row]
        contexts += [tuple(before + node for node in path) for path in ancestors(row)]
        if tail := width - sum(branch.length for branch in row):
            assert tail > 0, f"{counted(width - tail, 'token')} in a row of {width}"
            lengths.append(tail)
            contexts.append(None)
        if types_BT is not None and reach is not BlockReach.NOWHERE:
            blocks += _blocks(types_BT[number], row)
            blocks += [()] * (len(lengths) - len(blocks))  # the padding
    return AttentionPlan(lengths=tuple(lengths), contexts=tuple(contexts), blocks=tuple(blocks), reach=reach)


def _blocks(types_T: NDArray[np.integer], row: Sequence[Branch]) -> list[tuple[Block, ...]]:
    """For each branch of a row its blocks, counted from where it begins."""
    block_T = seen_blocks(types_T, row)
    found = []
    for start, branch in zip(segment_starts([branch.length for branch in row]), row, strict=True):
        of_branch = block_T[start : start + branch.length]
        at = [np.flatnonzero(of_branch == block) for block in np.unique(of_branch[of_branch >= 0])]
        found.append(tuple((int(places[0]), int(places[-1]) + 1) for places in at))
    return found
