"""A cache of keys and values that rows join and leave while the others go on.

All rows end at one place, as if they were padded on the left, so that a model's masks and windows hold as they are:

    row 0   . . . a b c d e        start 0, end 8: what the model is given
    row 1   . . . . . f g h        a row of three tokens has joined one of five
    row 2   i j k l m n o p

# B rows, R rows that there is room for, H heads, C places that there is room for, D numbers a head, T tokens
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from luthier.models import plain_model

_TRIAL_PROMPTS = (11, 5)
_MOST_ERROR = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the spread of the scores
_MOST_ERROR_OF_SHORT_FLOATS = 0.1


class _EndAligned(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer of it. Keys and values are [R, H, C, D], of which [:B, :, start:end] are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.start = self.end = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        """Write the new tokens [B, H, T, D] behind the others."""
        assert self.keys is not None and self.values is not None, "rows join before they are read"
        new = slice(self.end, self.end + key_states.shape[2])
        self.keys[: self.count, :, new] = key_states
        self.values[: self.count, :, new] = value_states
        self.end = new.stop
        used = (slice(self.count), slice(None), slice(self.start, self.end))
        return self.keys[used], self.values[used]

    def get_seq_length(self) -> int:
        """The tokens of the longest row."""
        return self.end - self.start

    def join(self, keys_HTD: torch.Tensor, values_HTD: torch.Tensor, *, rows: int, longest: int) -> None:
        """One more row, behind the others; it is the first of ``rows`` that join together, of at most ``longest``
        tokens."""
        length = keys_HTD.shape[1]
        if self.keys is None or self.count + rows > len(self.keys) or longest > self.end:
            self._move(max(longest, self.end - self.start), self.count + rows, (keys_HTD, values_HTD))
        assert self.keys is not None and self.values is not None
        self.keys[self.count, :, self.end - length : self.end] = keys_HTD
        self.values[self.count, :, self.end - length : self.end] = values_HTD
        self.start = min(self.start, self.end - length)
        self.count += 1

    def make_room(self) -> None:
        """Room for one more token of each row."""
        assert self.keys is not None and self.values is not None
        if self.end == self.keys.shape[2]:
            self._move(self.end - self.start, len(self.keys), (self.keys[0], self.values[0]))

    def _move(self, width: int, rows: int, like: tuple[torch.Tensor, torch.Tensor]) -> None:
        """To a place with room for this many rows and half as many tokens again. Keys and values are ``like`` these
        [H, T, D], whose D may differ."""
        has = 0 if self.keys is None else len(self.keys)
        rows = has if rows <= has else max(rows, 2 * has)
        own = slice(width - (self.end - self.start), width)
        for name, like_HTD in zip(("keys", "values"), like, strict=True):
            shape = (rows, len(like_HTD), width + max(64, width // 2), like_HTD.shape[2])
            old, new = getattr(self, name), like_HTD.new_zeros(shape)
            if self.count:
                new[: self.count, :, own] = old[: self.count, :, self.start : self.end]
            setattr(self, name, new)
        self.start, self.end, self.is_initialized = own.start, width, True

    def leave(self, row: int, longest: int) -> None:
        """The last row takes the place of this one; ``longest`` is how many tokens those that are left have at most."""
        assert self.keys is not None and self.values is not None
        self.count -= 1
        if row < self.count:
            self.keys[row] = self.keys[self.count]
            self.values[row] = self.values[self.count]
        self.start = self.end - longest


class JoinedCache:
    """The cache of the rows that are being answered. ``lengths`` says how many tokens of each are in it."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.cache: Cache | None = None

    def join(self, new: Sequence[tuple[Cache, int, int]]) -> None:
        """More rows: of each what a model has read, a row of it, and how many tokens at its end are the new row's."""
        longest = max((length for _, _, length in new), default=0)
        for number, (prompts, row, length) in enumerate(new):
            if self.cache is None:
                self.cache = Cache(layers=[_EndAligned() for _ in prompts.layers])
            for layer, read in zip(self.cache.layers, prompts.layers, strict=True):
                if read.keys is not None:  # layers may share those of others
                    keys_HTD, values_HTD = read.keys[row, :, -length:], read.values[row, :, -length:]
                    layer.join(keys_HTD, values_HTD, rows=len(new) - number, longest=longest)
            self.lengths.append(length)

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        assert self.cache is not None
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()
        if not self.lengths:
            self.cache = None  # and with it all memory
            return
        for layer in self.cache.layers:
            if layer.keys is not None:
                layer.leave(row, max(self.lengths))

    def read(self, model: Any, tokens: Sequence[int]) -> torch.Tensor:
        """The scores [B, V] behind one more token of each row."""
        assert self.cache is not None
        for layer in self.cache.layers:
            if layer.keys is not None:
                layer.make_room()
        self.lengths = [length + 1 for length in self.lengths]
        lengths_B = np.array(self.lengths)
        mask_BT = np.arange(lengths_B.max())[::-1] < lengths_B[:, None]
        return _scores(model, np.array(tokens)[:, None], mask_BT, lengths_B[:, None] - 1, self.cache)


def read_prompts(model: Any, prompts: Sequence[Any]) -> tuple[Cache, torch.Tensor]:
    """What a model remembers of prompts, int[T] each, and its scores [B, V] behind them."""
    width = max(map(len, prompts))
    mask_BT = np.arange(width)[::-1] < np.array([[len(prompt)] for prompt in prompts])
    ids_BT = np.zeros(mask_BT.shape, np.int64)
    ids_BT[mask_BT] = np.concatenate(prompts)
    cache = DynamicCache()  # of whole rows, also where the model looks through a window, which its masks say
    return cache, _scores(model, ids_BT, mask_BT, (mask_BT.cumsum(1) - 1).clip(0), cache)


def _scores(model: Any, ids_BT: Any, mask_BT: Any, positions_BT: Any, cache: Cache) -> torch.Tensor:
    arrays = {
        "input_ids": ids_BT.astype(np.int64),
        "attention_mask": mask_BT.astype(np.int64),
        "position_ids": positions_BT.astype(np.int64),
    }
    device = next(model.parameters()).device
    inputs = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    remembered = {_cache_name(plain_model(model)): cache}
    scores: torch.Tensor = model(**inputs, **remembered, use_cache=True, logits_to_keep=1).logits[:, -1]
    return scores


def _cache_name(base: nn.Module) -> str:
    """``cache`` in transformers from 5.24 on, ``past_key_values`` before and in code of a model's own."""
    return "cache" if "cache" in inspect.signature(type(base).forward).parameters else "past_key_values"


def rows_can_join(model: Any, base: PreTrainedModel) -> bool:
    """Whether a model answers a row that joins others as it answers that row alone: tried on the model itself.

    A row of five tokens joins one of eleven that has gone on for a step, and the scores of both are held against those
    of whole forward passes. A model that keeps other states than keys and values is not tried.
    """
    asked = inspect.signature(base.forward).parameters
    if base.config.is_encoder_decoder or not {"position_ids", _cache_name(base), "logits_to_keep"} <= set(asked):
        return False
    own = DynamicCache(config=base.config)
    if {type(layer) for layer in own.layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return False
    size = base.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, size, 14), rng.integers(0, size, 7)]
    try:
        joined = _trial(model, rows)
        alone = [model(torch.from_numpy(row)[None].to(joined[0].device), use_cache=False).logits[0] for row in rows]
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, NotImplementedError):
        return False
    expected = [alone_TV[-len(found_TV) :] for alone_TV, found_TV in zip(alone, joined, strict=True)]
    most = _MOST_ERROR.get(joined[0].dtype, _MOST_ERROR_OF_SHORT_FLOATS)
    return all(
        bool((found.float() - right.float()).abs().max() <= most * right.float().std())
        for found, right in zip(joined, expected, strict=True)
    )


def _trial(model: Any, rows: Sequence[Any]) -> list[torch.Tensor]:
    """The scores behind the last tokens of two rows, of which the second joins the first."""
    (first_T, second_T), (first, second), joined = rows, _TRIAL_PROMPTS, JoinedCache()
    cache, scores_1V = read_prompts(model, [first_T[:first]])
    joined.join([(cache, 0, first)])
    found_first, found_second = [scores_1V[0], joined.read(model, first_T[first : first + 1])[0]], []
    cache, scores_1V = read_prompts(model, [second_T[:second]])
    joined.join([(cache, 0, second)])
    found_second.append(scores_1V[0])
    for tokens in zip(first_T[first + 1 :], second_T[second:], strict=True):
        scores_BV = joined.read(model, tokens)
        found_first.append(scores_BV[0])
        found_second.append(scores_BV[1])
    return [torch.stack(found_first), torch.stack(found_second)]
