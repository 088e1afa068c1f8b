"""Recurrent layers on packed rows: each segment goes through them alone, all other layers run on the row as it is.

Gated delta rules (arXiv:2412.06464), state spaces (arXiv:2405.21060) and short convolutions carry what they saw from
token to token, and no mask stops them. The modules that do so, their *mixers*, get the segments of a row as a batch
instead. Which ones comes with the call, as for `models.attention`: models hand ``attention_plan`` down to all layers.

B rows, T tokens a row, N = B x T, S rows of a call, W their width, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from luthier.errors import ModelError
from luthier.layout import ancestors, seen_blocks, segment_ids, tree_mask, tree_positions
from luthier.models import TYPE_INPUTS
from luthier.models.attention import PLAN, AttentionPlan, BlockReach, announced, plan_attention
from luthier.records import Batch

# ----------------------------------------------------------------------------------------------------------------------
# How a model is told which tokens of a batch see each other. B rows, T tokens a row.
#
# way           what the model gets beside ids and positions                  trees   cost of attention
# segments      a plan for `models.attention`                                 yes     sum of squares of segments
# positions     nothing: transformers sees that positions restart             no      square of the row
# masks         a mask for each kind of layer, made by `layout.tree_mask`     yes     square of the row
# blocks        the same for FlexAttention, on a GPU                          yes     blocks in which some pair is seen
# padded        a mask of padding; rows of one segment                        no      square of the row


class Isolation(StrEnum):
    """What keeps the segments of a row apart."""

    SEGMENTS = "segments"
    POSITIONS = "positions"
    MASKS = "masks"
    BLOCKS = "blocks"
    PADDED = "padded"

    @property
    def words(self) -> str:
        """How, for people: the segments are kept apart by …"""
        return {
            Isolation.SEGMENTS: "computing each alone",
            Isolation.POSITIONS: "positions that restart",
            Isolation.MASKS: "masks",
            Isolation.BLOCKS: "blocks of a mask",
            Isolation.PADDED: "padding, each in a row of its own",
        }[self]


Windows = Mapping[str, int | None]
"""For each kind of layer of a model its sliding window; None: the whole of what is before."""


# Layers without attention, or with both ("hybrid", whose attention is full), as configs call them.
_RECURRENT_KINDS = {"conv", "hybrid", "linear_attention", "mlp", "moe"}


def attention_inputs(
    batch: Batch,
    isolation: Isolation,
    *,
    windows: Windows,
    additive: bool = False,
    reach: BlockReach = BlockReach.NOWHERE,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """``batch.model_inputs`` with what this way of isolation needs, on ``device``.

    ``windows`` (`layer_windows`) is read by masks and blocks: where a model has two kinds of layer they are a dict.
    Masks are [B, 1, T, T], bool, or under ``additive`` (the model's attention is ``eager``, which adds them to scores)
    float32 of 0 and the least number. ``reach``: the layers in which pictures are seen both ways.

    Raises AssertionError for token trees or several segments in a row, where the way cannot keep them apart.
    """
    inputs = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in batch.model_inputs.items()}
    width = inputs["input_ids"].shape[1]
    match isolation:
        case Isolation.SEGMENTS:
            plan = plan_attention(batch.branches, width=width, types_BT=_types(batch), reach=reach)
            inputs |= {PLAN: plan, "use_cache": False}
            inputs.pop("attention_mask", None)
            if plan.blocks:  # the model would build a mask for them
                inputs["attention_mask"] = {kind: announced(window, device) for kind, window in windows.items()}
        case Isolation.POSITIONS:
            assert not _has_trees(batch), "positions cannot say what the branches of a tree share"
        case Isolation.MASKS:
            blocks_of = {kind: _blocks(batch) if reach.covers(window) else None for kind, window in windows.items()}
            whole = reach is BlockReach.WHOLE
            seen = {kind: _seen(batch, windows[kind], blocks, whole=whole) for kind, blocks in blocks_of.items()}
            on_device = {kind: _mask(seen_BTT, additive=additive).to(device) for kind, seen_BTT in seen.items()}
            inputs |= {"attention_mask": _one_or_all(on_device), "use_cache": False}
        case Isolation.BLOCKS:
            flex = {
                kind: _block_mask(
                    batch, window, _blocks(batch) if reach.covers(window) else None, device, reach is BlockReach.WHOLE
                )
                for kind, window in windows.items()
            }
            inputs |= {"attention_mask": _one_or_all(flex), "use_cache": False}
        case Isolation.PADDED:
            assert all(len(row) == 1 for row in batch.branches), "a padded row holds one segment"
        case _:
            raise AssertionError(isolation)
    return inputs


def tree_mask_mod(
    batch: Batch,
    *,
    window: int | None,
    device: torch.device | str,
    blocks: Sequence[NDArray[np.int64]] | None = None,
    whole_blocks: bool = False,
) -> Callable[..., torch.Tensor]:
    """`layout.tree_mask` as FlexAttention asks for it: ``(b, h, q, kv) -> bool``. Padding sees padding."""
    width = batch.model_inputs["input_ids"].shape[1]
    num_nodes = max(map(len, batch.branches))
    on_path_BNN = np.zeros((len(batch.branches), num_nodes + 1, num_nodes + 1), dtype=np.bool_)
    node_BT = np.full((len(batch.branches), width), num_nodes)
    position_BT = np.tile(np.arange(width), (len(batch.branches), 1))  # a model's own may have several axes
    block_BT = np.full((len(batch.branches), width), -1)
    on_path_BNN[:, num_nodes, num_nodes] = True  # padding is a node of its own
    for row, branches in enumerate(batch.branches):
        of_tokens = segment_ids([branch.length for branch in branches])
        node_BT[row, : len(of_tokens)] = of_tokens
        position_BT[row, : len(of_tokens)] = tree_positions(branches)
        if blocks is not None:
            block_BT[row, : len(of_tokens)] = blocks[row]
        for node, path in enumerate(ancestors(branches)):
            on_path_BNN[row, node, [*path, node]] = True
    node_of, on_path = torch.from_numpy(node_BT).to(device), torch.from_numpy(on_path_BNN).to(device)
    position, block = (torch.from_numpy(each).to(device) for each in (position_BT, block_BT))

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        distance = position[b, q] - position[b, kv]
        same_block = (block[b, q] == block[b, kv]) & (block[b, q] >= 0)
        found: torch.Tensor = on_path[b, node_of[b, q], node_of[b, kv]] & ((distance >= 0) | same_block)
        return found if window is None else found & ((distance < window) | (same_block & whole_blocks))

    return seen


def layer_windows(model: nn.Module, *, recurrent: bool = False) -> dict[str, int | None]:
    """The kinds of attention layer that a model of transformers has, by its config.

    {"full_attention": None}; Gemma 3: {"sliding_attention": 512, "full_attention": None}

    ``recurrent``: layers that carry a state are left out; something else keeps segments apart there (`models.mixers`).

    Raises `ModelError` for kinds that are no plain causal attention: recurrent, convolutional, chunked, sparse.
    """
    model_config: Any = model.config
    text = model_config.get_text_config()
    entries = text.to_dict()
    window: int | None = entries.get("sliding_window")
    if not entries.get("use_sliding_window", True):
        window = None
    kinds = entries.get("layer_types")
    if not kinds:
        chunk = entries.get("attention_chunk_size")
        kinds = ["chunked_attention" if chunk else "sliding_attention" if window else "full_attention"]
    known = {"full_attention": None, "sliding_attention": window}
    kinds = [kind for kind in kinds if not (recurrent and kind in _RECURRENT_KINDS)]
    if unknown := sorted(set(kinds) - set(known)):
        raise ModelError(
            f"{type(model).__name__} has layers of {', '.join(unknown)}, for whose attention Luthier has no mask",
            hint="set train.packing: none",
        )
    return {kind: known[kind] for kind in dict.fromkeys(kinds)}


def _one_or_all(by_kind: Mapping[str, object]) -> object:
    # of two kinds of layer models take a dict; one that has a single kind may not know what a dict is
    return dict(by_kind) if len(by_kind) > 1 else next(iter(by_kind.values()))


def _has_trees(batch: Batch) -> bool:
    return any(branch.parent >= 0 for row in batch.branches for branch in row)


def _types(batch: Batch) -> NDArray[np.int64] | None:
    """[B, T], by whichever name the model has for them; None where it is given none."""
    for name in TYPE_INPUTS:
        if name in batch.model_inputs:
            found: NDArray[np.int64] = batch.model_inputs[name].numpy()
            return found
    return None


def _blocks(batch: Batch) -> list[NDArray[np.int64]] | None:
    types_BT = _types(batch)
    if types_BT is None:
        return None
    return [seen_blocks(types_T, row) for types_T, row in zip(types_BT, batch.branches, strict=True)]


def _block_mask(
    batch: Batch,
    window: int | None,
    blocks: list[NDArray[np.int64]] | None,
    device: torch.device | str,
    whole: bool,
) -> BlockMask:
    width = batch.model_inputs["input_ids"].shape[1]
    seen = tree_mask_mod(batch, window=window, device=device, blocks=blocks, whole_blocks=whole)
    return create_block_mask(seen, B=len(batch.branches), H=None, Q_LEN=width, KV_LEN=width, device=str(device))


def _seen(
    batch: Batch, window: int | None, blocks: list[NDArray[np.int64]] | None, *, whole: bool
) -> NDArray[np.bool_]:
    width = batch.model_inputs["input_ids"].shape[1]
    of_rows: Sequence[NDArray[np.int64] | None] = blocks or [None] * len(batch.branches)
    return np.stack(
        [
            tree_mask(row, width=width, window=window, blocks_T=blocks_T, whole_blocks=whole)
            for row, blocks_T in zip(batch.branches, of_rows, strict=True)
        ]
    )


def _mask(seen_BTT: NDArray[np.bool_], *, additive: bool) -> torch.Tensor:
    mask = torch.from_numpy(seen_BTT)[:, None]
    if not additive:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


# ----------------------------------------------------------------------------------------------------------------------
# Recurrent layers.


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

_CACHES = ("cache", "cache_params", "past_key_values")  # as of transformers 5.24, and before
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
