"""Positions of several axes (M-RoPE, arXiv:2409.12191): time, height and width of media tokens, from ids and grids.

Text counts on all axes alike. A picture stands at the position that the text before it has reached; its tokens lie on a
grid there, and the text behind it goes on past the grid. Two rows of two merged patches between two words each:

    types   0 0  1 1 1 1  0 0
    time    0 1  2 2 2 2  4 5
    height  0 1  2 2 3 3  4 5
    width   0 1  2 3 2 3  4 5

What differs from model to model is a `PositionScheme`. Segments count anew, branches of a tree go on
where their parent ends. A axes, T tokens of a row, N items (pictures, videos or their frames), M tokens of these.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError
from luthier.layout.mrope_canvas import canvas_positions
from luthier.layout.position_schemes import Advance, Arrangement, MediaGrids, PositionScheme, TokenType
from luthier.layout.trees import segment_starts, tree_positions, tree_reach
from luthier.records import Branch

AnyInt = NDArray[np.integer]
Positions = NDArray[np.int64] | NDArray[np.float32]


def mrope_positions(
    scheme: PositionScheme,
    types_T: AnyInt,
    grids: MediaGrids,
    branches: Sequence[Branch],
    *,
    ids_T: AnyInt | None = None,
) -> Positions:
    """[A, T], int64, or float32 under ``fractional``: equal to what ``get_rope_index`` gives for each path alone.

    ``types_T`` are `TokenType`; ``ids_T`` are read by CANVAS only. Sounds count as text does, but for one that is
    woven into its video: there each counts for itself, from where the video begins.

    Raises `RowError` (``media_mismatch``) where tokens and grids do not fit each other.
    """
    match scheme.arrangement:
        case Arrangement.GRID:
            return _grid_positions(scheme, types_T, grids, branches)
        case Arrangement.INDEXED:
            return _indexed_positions(scheme, types_T, grids, branches)
        case Arrangement.CANVAS:
            assert scheme.canvas is not None and ids_T is not None, "a canvas is found by its markers"
            sizes = {
                int(kind): grid_N3[:, -2:].astype(np.int64) // scheme.spatial_merge
                for kind, grid_N3 in ((TokenType.IMAGE, grids.image_N3), (TokenType.VIDEO, grids.video_N3))
            }
            return canvas_positions(scheme.canvas, ids_T, types_T, sizes, branches)
        case _:
            raise AssertionError(scheme.arrangement)


def packed_mrope(
    scheme: PositionScheme,
    types_T: AnyInt,
    grids: MediaGrids,
    branches: Sequence[Branch],
    *,
    ids_T: AnyInt | None = None,
) -> Positions:
    """[1 + A, T]: `mrope_positions` under a row that counts tokens, by which models tell packed segments apart; [A, T]
    where the scheme has no such row.
    """
    if "numba" in sys.modules:  # as in workers that have processed a picture; loading it takes longer than it saves
        found_4T = _compiled(scheme, types_T, grids, branches)
        if found_4T is not None:
            return found_4T
    media_AT = mrope_positions(scheme, types_T, grids, branches, ids_T=ids_T)
    if not scheme.text_row:
        return media_AT
    return np.concatenate([tree_positions(branches).astype(media_AT.dtype)[None], media_AT])


def _compiled(
    scheme: PositionScheme, types_T: AnyInt, grids: MediaGrids, branches: Sequence[Branch]
) -> NDArray[np.int64] | None:
    """The same in one compiled pass; None where it does not apply, or something is wrong, which the other way tells."""
    if scheme.arrangement is not Arrangement.GRID or scheme.fractional or not scheme.text_row:
        return None
    try:
        from luthier.layout.mrope_kernel import fill_positions
    except (ImportError, RuntimeError):  # no folder in which it may keep what it compiled
        return None
    grids_N3, times = [], []
    for kind in (TokenType.IMAGE, TokenType.VIDEO):
        grid_N3, interval_N = _grids_of(scheme, kind, grids)
        steps_N = grid_N3[:, 0]
        steps = np.arange(steps_N.sum()) - np.repeat(segment_starts(steps_N), steps_N)
        seconds = steps if interval_N is None else _seconds(scheme, steps, np.repeat(interval_N, steps_N))
        grids_N3.append(np.ascontiguousarray(grid_N3))
        times.append(seconds.astype(np.int64))
    found_4T = np.empty((4, len(types_T)), dtype=np.int64)
    branches_n2 = np.array([(branch.parent, branch.length) for branch in branches], dtype=np.int64).reshape(-1, 2)
    types_T = np.ascontiguousarray(types_T, dtype=np.int64)
    by_extent = scheme.advance is Advance.EXTENT
    fits = fill_positions(types_T, branches_n2, tuple(grids_N3), tuple(times), by_extent, found_4T)
    return found_4T if fits else None


# --------------------------------------------------------------------------------------------------------- grids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Placed:
    """The items of one kind and their tokens: ``at_M`` in the row, ``item_M`` of the N, ``inner_M`` within the item."""

    first_N: NDArray[np.int64]
    last_N: NDArray[np.int64]
    at_M: NDArray[np.int64]
    item_M: NDArray[np.int64]
    inner_M: NDArray[np.int64]


def _grid_positions(
    scheme: PositionScheme, types_T: AnyInt, grids: MediaGrids, branches: Sequence[Branch]
) -> Positions:
    dtype: type[Any] = np.float32 if scheme.fractional else np.int64
    offsets_AT = np.zeros((3, len(types_T)), dtype=dtype)
    advance_T = np.ones(len(types_T), dtype=dtype)
    woven_R2 = _woven(types_T, advance_T, offsets_AT)
    for kind in (TokenType.IMAGE, TokenType.VIDEO):
        grid_N3, interval_N = _grids_of(scheme, kind, grids)
        placed = _place(types_T == kind, grid_N3.prod(axis=1), kind, spread=len(woven_R2) > 0)
        if not len(placed.at_M):
            continue
        _, height_N, width_N = grid_N3.T
        time_M, cell_M = np.divmod(placed.inner_M, (height_N * width_N)[placed.item_M])
        # in 32 bits and in the model's order: others round elsewhere
        time_M = time_M if interval_N is None else _seconds(scheme, time_M, interval_N[placed.item_M])
        offsets_AT[:, placed.at_M] = time_M, *np.divmod(cell_M, width_N[placed.item_M])
        advance_T[placed.at_M] = 0
        if scheme.advance is Advance.EXTENT:
            advance_T[placed.last_N] = np.maximum(height_N, width_N)
        else:
            advance_T[placed.last_N] = offsets_AT[:, placed.last_N].max(axis=0) + 1
    for first, last in woven_R2:
        advance_T[first : last + 1] = 0
        advance_T[last] = offsets_AT[:, last].max() + 1
        if scheme.shared_borders:
            advance_T[[first - 2, last + 1]] = 0
    return tree_reach(advance_T, branches) + offsets_AT


def _grids_of(
    scheme: PositionScheme, kind: TokenType, grids: MediaGrids
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """Items of this kind as grids of tokens, and the seconds between their grids in time."""
    merge = scheme.spatial_merge
    if kind is TokenType.IMAGE:
        return grids.image_N3.astype(np.int64) // np.array([1, merge, merge]), None
    video_N3 = grids.video_N3.astype(np.int64) // np.array([scheme.temporal_merge, merge, merge])
    if scheme.per_frame:
        video_N3 = np.repeat(video_N3, video_N3[:, 0], axis=0)
        video_N3[:, 0] = 1
        return video_N3, None
    if scheme.positions_a_second is None:
        return video_N3, None
    seconds_N = np.ones(len(video_N3)) if grids.seconds_N is None else grids.seconds_N
    return video_N3, seconds_N.astype(np.float32)


def _seconds(scheme: PositionScheme, steps_M: AnyInt, seconds_M: NDArray[np.float32]) -> NDArray[np.float32]:
    assert scheme.positions_a_second is not None
    whole_M, rate = steps_M.astype(np.float32), np.float32(scheme.positions_a_second)
    found: NDArray[np.float32] = whole_M * (rate * seconds_M) if scheme.rate_first else whole_M * seconds_M * rate
    return found if scheme.fractional else np.trunc(found)


def _woven(types_T: AnyInt, advance_T: Positions, offsets_AT: Positions) -> NDArray[np.int64]:
    """int64[R, 2]: first and last token of each run in which a video's tokens and its sound's stand among each other.

    The sound's offsets are filled in.
    """
    if not (types_T == TokenType.AUDIO).any():
        return np.zeros((0, 2), dtype=np.int64)
    inside_T = np.concatenate([[False], types_T >= TokenType.VIDEO, [False]])
    first_R, end_R = np.flatnonzero(inside_T[1:] != inside_T[:-1]).reshape(-1, 2).T
    num_heard_R = np.diff(np.concatenate([[0], np.cumsum(types_T == TokenType.AUDIO)])[[first_R, end_R]], axis=0)[0]
    both = (num_heard_R > 0) & (num_heard_R < end_R - first_R)
    for first, end in zip(first_R[both], end_R[both], strict=True):
        heard = first + np.flatnonzero(types_T[first:end] == TokenType.AUDIO)
        offsets_AT[:, heard] = np.arange(len(heard))
    return np.stack([first_R[both], end_R[both] - 1], axis=1)


def _place(is_kind_T: NDArray[np.bool_], sizes_N: NDArray[np.int64], kind: TokenType, *, spread: bool) -> _Placed:
    at_M = np.flatnonzero(is_kind_T)
    if len(at_M) != sizes_N.sum():
        raise RowError(
            "media_mismatch",
            f"{len(at_M)} {kind.name.lower()} tokens for {len(sizes_N)} grids of {int(sizes_N.sum())} tokens",
        )
    starts_N = segment_starts(sizes_N)
    item_M = np.repeat(np.arange(len(sizes_N)), sizes_N)
    first_N, last_N = at_M[starts_N], at_M[starts_N + sizes_N - 1]
    torn = np.flatnonzero(last_N - first_N + 1 != sizes_N)
    if len(torn) and not spread:
        first, size = int(first_N[torn[0]]), int(sizes_N[torn[0]])
        raise RowError("media_mismatch", f"{kind.name.lower()} of {size} tokens at {first} is torn by other tokens")
    return _Placed(
        first_N=first_N, last_N=last_N, at_M=at_M, item_M=item_M, inner_M=np.arange(len(at_M)) - starts_N[item_M]
    )


def _indexed_positions(
    scheme: PositionScheme, types_T: AnyInt, grids: MediaGrids, branches: Sequence[Branch]
) -> NDArray[np.int64]:
    positions_AT = np.repeat(tree_positions(branches)[None], scheme.num_axes, axis=0)
    grid_N3, _ = _grids_of(scheme, TokenType.IMAGE, grids)
    if not len(grid_N3):
        return positions_AT
    num_rows, num_columns = grid_N3[:, 1], grid_N3[:, 2] + 1  # each row of a picture ends in a token of its own
    sizes_N = num_rows * num_columns
    is_image_T = types_T == TokenType.IMAGE
    bordered = bool(is_image_T.sum() == (sizes_N + 2).sum())  # one token before and one behind, which count as text
    placed = _place(is_image_T, sizes_N + 2 * bordered, TokenType.IMAGE, spread=False)
    inner_M = placed.inner_M - bordered
    on_grid = (inner_M >= 0) & (inner_M < sizes_N[placed.item_M])
    row_M, column_M = np.divmod(inner_M, num_columns[placed.item_M])
    starts_T = np.zeros(len(types_T), dtype=np.int64)
    starts_T[placed.first_N] = 1
    number_M = tree_reach(starts_T, branches)[placed.first_N][placed.item_M]
    positions_AT[-3:, placed.at_M[on_grid]] = np.stack([column_M, row_M, number_M])[:, on_grid]
    return positions_AT
