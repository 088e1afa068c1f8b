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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError
from luthier.layout import segment_ids, segment_starts, tree_positions, tree_reach
from luthier.layout.position_schemes import Advance, Arrangement, Canvas, MediaGrids, PositionScheme, TokenType
from luthier.records import Branch, Ints
from luthier.writing import counted

# --------------------------------------------------------------------------------------------------------------------
# Positions of pictures that are cut in slices: a small view of the whole, then its slices, on one canvas.
#
#     <image> view </image> <slice> a </slice><slice> b </slice> \n <slice> c </slice><slice> d </slice>
#
# The canvas is the slices put together; the view is stretched over it. Time stands still at the canvas' origin. The
# marks lie on the corners of what they enclose, and text goes on one past the canvas' longer side.
#
# T tokens of a row, C crops (views and slices), F frames (pictures, or frames of a video: a view and its slices),
# S slices, M tokens of some crops. Everything is done for all crops of a row at once.


AnyInt = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Crops:
    """Where crops are, how many rows and columns of tokens they have, and the frame that each is in."""

    start_C: Ints
    end_C: Ints
    size_C2: Ints
    frame_C: Ints

    def where(self, chosen_C: NDArray[np.bool_]) -> _Crops:
        return _Crops(**{field.name: getattr(self, field.name)[chosen_C] for field in fields(self)})

    def tokens(self) -> tuple[Ints, Ints, Ints, Ints]:
        """[M]: where each token is in the row, its crop, and its row and column there."""
        lengths_C = self.end_C - self.start_C
        crop_M = np.repeat(np.arange(len(lengths_C)), lengths_C)
        inner_M = np.arange(len(crop_M)) - segment_starts(lengths_C)[crop_M]
        row_M, column_M = np.divmod(inner_M, self.size_C2[crop_M, 1])
        return self.start_C[crop_M] + inner_M, crop_M, row_M, column_M


def canvas_positions(
    canvas: Canvas,
    ids_T: AnyInt,
    types_T: AnyInt,
    sizes: Mapping[int, Ints],
    branches: Sequence[Branch],
) -> Ints:
    """int64[3, T]. ``sizes`` [N, 2] are those of the crops of each kind of `TokenType`, in the order of their tokens.

    Raises `RowError` (``media_mismatch``) where there are more or fewer crops than sizes, or of other sizes.
    """
    branch_T = segment_ids([branch.length for branch in branches])
    crops, is_slice_C = _find_crops(canvas, ids_T, types_T, sizes, branch_T)
    views, slices = crops.where(~is_slice_C), crops.where(is_slice_C)
    if not len(views.start_C):
        return np.repeat(tree_positions(branches)[None], 3, axis=0)
    columns_F = _num_columns(slices, len(views.start_C))
    canvas_F2 = _canvas_sizes(views, slices, columns_F)
    closed_F = _closed(canvas, ids_T, crops, branches, branch_T)

    opening_F = views.start_C - 1
    edge_T1 = np.zeros(len(ids_T) + 1, dtype=np.int64)
    np.add.at(edge_T1, opening_F, 1)
    np.add.at(edge_T1, closed_F, -1)
    covered_T = np.cumsum(edge_T1)[:-1] > 0
    advance_T = np.where(covered_T, 0, 1)
    advance_T[views.start_C] = canvas_F2.max(axis=1) + 1
    reached_T = tree_reach(advance_T, branches)
    origin_F = reached_T[views.start_C]

    begun_T = np.zeros(len(ids_T), dtype=np.int64)
    begun_T[opening_F] = 1
    frame_T = np.cumsum(begun_T) - 1  # where the marks of two frames meet they are the second's
    positions_3T = np.repeat(np.where(covered_T, origin_F[frame_T], reached_T)[None], 3, axis=0)
    _place_view(positions_3T, views, canvas_F2, origin_F, closed_F)
    _place_slices(positions_3T, slices, columns_F, origin_F, closed_F)
    positions_3T[1:, opening_F] = np.maximum(origin_F - 1, 0)
    return positions_3T


def _find_crops(
    canvas: Canvas, ids_T: AnyInt, types_T: AnyInt, sizes: Mapping[int, Ints], branch_T: Ints
) -> tuple[_Crops, NDArray[np.bool_]]:
    """All crops of a row, and which of them are slices: those behind that mark, but for a branch's first."""
    changes_T = np.ones(len(types_T) + 1, dtype=np.bool_)
    changes_T[1:-1] = (types_T[1:] != types_T[:-1]) | (branch_T[1:] != branch_T[:-1])
    edges = np.flatnonzero(changes_T)
    start_C, end_C = edges[:-1], edges[1:]
    seen_C = types_T[start_C] > 0
    start_C, end_C = start_C[seen_C], end_C[seen_C]
    size_C2 = np.zeros((len(start_C), 2), dtype=np.int64)
    for kind, sizes_N2 in sizes.items():
        of_kind = types_T[start_C] == kind
        if of_kind.sum() != len(sizes_N2):
            raise RowError(
                "media_mismatch",
                f"the tokens form {of_kind.sum()} crops, but {counted(len(sizes_N2), 'size is', 'sizes are')} known",
            )
        size_C2[of_kind] = sizes_N2
    wrong = np.flatnonzero(size_C2.prod(axis=1) != end_C - start_C)
    if len(wrong):
        (height, width), count = size_C2[wrong[0]], end_C[wrong[0]] - start_C[wrong[0]]
        raise RowError("media_mismatch", f"a crop has {counted(count, 'token')}, but its size is {height} x {width}")
    branch_C = branch_T[start_C]
    opens_C = np.ones(len(start_C), dtype=np.bool_)
    opens_C[1:] = branch_C[1:] != branch_C[:-1]
    bare = np.flatnonzero((start_C == 0) | (branch_T[start_C - 1] != branch_C))
    if len(bare):
        raise RowError("media_mismatch", f"{len(bare)} crops lack the mark that must stand before each")
    is_slice_C = (ids_T[start_C - 1] == canvas.slice_start) & ~opens_C
    crops = _Crops(start_C=start_C, end_C=end_C, size_C2=size_C2, frame_C=np.cumsum(~is_slice_C) - 1)
    return crops, is_slice_C


def _num_columns(slices: _Crops, num_frames: int) -> Ints:
    """[F]: slices come row by row, and the first line break of a frame says how many a row has; 1 if there are none."""
    count_F = np.bincount(slices.frame_C, minlength=num_frames)
    columns_F = np.maximum(count_F, 1)
    np.minimum.at(
        columns_F,
        slices.frame_C[:-1],
        np.where(_breaks(slices), _numbers(slices)[:-1] + 1, columns_F.max()),
    )
    return np.where(count_F % columns_F == 0, columns_F, count_F)


def _breaks(slices: _Crops) -> NDArray[np.bool_]:
    """[S - 1]: whether a line ends behind a slice: more than two marks stand between it and the next of its frame."""
    gap_S = slices.start_C[1:] - slices.end_C[:-1]
    found: NDArray[np.bool_] = (gap_S > 2) & (slices.frame_C[1:] == slices.frame_C[:-1])
    return found


def _numbers(slices: _Crops) -> Ints:
    """[S]: the number of each slice in its frame."""
    return np.arange(len(slices.frame_C)) - np.searchsorted(slices.frame_C, slices.frame_C)


def _canvas_sizes(views: _Crops, slices: _Crops, columns_F: Ints) -> Ints:
    """[F, 2]: of the slices put together; of the view, where there are none."""
    count_F = np.bincount(slices.frame_C, minlength=len(columns_F))
    sizes_F2 = views.size_C2.copy()
    cut_F = count_F > 0
    grid_F2 = np.stack([count_F // columns_F, columns_F], axis=1)
    sizes_F2[cut_F] = grid_F2[cut_F] * _first_sizes(slices, len(columns_F))[cut_F]
    return sizes_F2


def _first_sizes(slices: _Crops, num_frames: int) -> Ints:
    """[F, 2]: of each frame's first slice, by which the others are placed."""
    found_F2 = np.zeros((num_frames, 2), dtype=np.int64)
    found_F2[slices.frame_C[::-1]] = slices.size_C2[::-1]
    return found_F2


def _closed(canvas: Canvas, ids_T: AnyInt, crops: _Crops, branches: Sequence[Branch], branch_T: Ints) -> Ints:
    """[F]: behind the marks that follow a frame's last crop."""
    last = np.flatnonzero(np.append(crops.frame_C[1:] != crops.frame_C[:-1], True))
    others = np.append(np.flatnonzero(~np.isin(ids_T, astuple(canvas))), len(ids_T))
    lengths = np.array([branch.length for branch in branches], dtype=np.int64)
    ends = segment_starts(lengths) + lengths
    found = others[np.searchsorted(others, crops.end_C[last])]
    closed_F: Ints = np.minimum(found, ends[branch_T[crops.start_C[last]]])
    return closed_F


def _place_view(positions_3T: Ints, views: _Crops, canvas_F2: Ints, origin_F: Ints, closed_F: Ints) -> None:
    """Stretched over the canvas, and the mark behind it on the canvas' far corner."""
    at_M, frame_M, row_M, column_M = views.tokens()
    for axis, inner_M in ((1, row_M), (2, column_M)):
        length_M, count_M = canvas_F2[frame_M, axis - 1], views.size_C2[frame_M, axis - 1]
        positions_3T[axis, at_M] = origin_F[frame_M] + _stretched(inner_M, length_M, count_M)
    marked = views.end_C < closed_F
    positions_3T[1:, views.end_C[marked]] = (origin_F[:, None] + canvas_F2)[marked].T


def _stretched(index_M: Ints, length_M: Ints, count_M: Ints) -> Ints:
    """The ``index``-th of ``count`` of ``length`` places, the ends among them: in 32 bits from either end, as torch."""
    end_M, last_M = (length_M - 1).astype(np.float32), (count_M - 1).astype(np.float32)
    step_M = end_M / np.maximum(last_M, np.float32(1))
    index = index_M.astype(np.float32)
    places_M = np.where(index_M < count_M / 2, step_M * index, end_M - step_M * (last_M - index))
    return np.rint(places_M).astype(np.int64)


def _place_slices(positions_3T: Ints, slices: _Crops, columns_F: Ints, origin_F: Ints, closed_F: Ints) -> None:
    """Each at its place of the canvas, its marks on its corners, and line breaks past the end of their line."""
    first_S2 = _first_sizes(slices, len(columns_F))[slices.frame_C]
    line_S, column_S = np.divmod(_numbers(slices), columns_F[slices.frame_C])
    origin_S = origin_F[slices.frame_C]
    corner_S2 = origin_S[:, None] + np.stack([line_S, column_S], axis=1) * first_S2
    at_M, slice_M, row_M, inner_M = slices.tokens()
    positions_3T[1, at_M], positions_3T[2, at_M] = corner_S2[slice_M, 0] + row_M, corner_S2[slice_M, 1] + inner_M
    last = np.flatnonzero(_breaks(slices))  # of a line
    lengths = slices.start_C[last + 1] - slices.end_C[last] - 2
    broken = np.repeat(last, lengths)
    between = slices.end_C[broken] + 1 + np.arange(len(broken)) - segment_starts(lengths).repeat(lengths)
    positions_3T[1, between] = (origin_S + (line_S + 1) * first_S2[:, 0] - 1)[broken]
    positions_3T[2, between] = (origin_S + columns_F[slices.frame_C] * first_S2[:, 1])[broken]
    marked = slices.end_C < closed_F[slices.frame_C]
    positions_3T[1:, slices.end_C[marked]] = (corner_S2 + slices.size_C2 - 1)[marked].T
    positions_3T[1:, slices.start_C - 1] = corner_S2.T


Positions = Ints | NDArray[np.float32]


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


def _compiled(scheme: PositionScheme, types_T: AnyInt, grids: MediaGrids, branches: Sequence[Branch]) -> Ints | None:
    """The same in one compiled pass; None where it does not apply, or something is wrong, which the other way tells."""
    if scheme.arrangement is not Arrangement.GRID or scheme.fractional or not scheme.text_row:
        return None
    try:
        fill = _compiled_fill()
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
    fits = fill(types_T, branches_n2, tuple(grids_N3), tuple(times), by_extent, found_4T)
    return found_4T if fits else None


@cache
def _compiled_fill() -> Callable[..., bool]:
    from numba import njit

    compiled: Callable[..., bool] = njit(cache=True)(_fill_positions)
    return compiled


def _fill_positions(
    types_T: Ints,
    branches_n2: Ints,
    grids: tuple[Ints, Ints],
    times: tuple[Ints, Ints],
    by_extent: bool,
    found_4T: Ints,
) -> bool:
    """Write text positions and those of three axes, in one pass that numba compiles. False, with nonsense written,
    where tokens and grids do not fit.

    ``branches_n2`` are parents and lengths; ``grids`` [N, 3] of images and of videos, in tokens; ``times`` the
    positions in time of their grids, one item behind the other; ``by_extent`` as `Advance.EXTENT`.
    """
    ends_n2 = np.zeros((len(branches_n2), 2), dtype=np.int64)  # text and reach behind each branch
    items, clocks = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    at = 0
    for branch in range(len(branches_n2)):
        parent, end = branches_n2[branch, 0], at + branches_n2[branch, 1]
        text, reach = (ends_n2[parent, 0], ends_n2[parent, 1]) if parent >= 0 else (0, 0)
        while at < end:
            kind = types_T[at] - 1
            if kind < 0:
                found_4T[0, at] = text
                found_4T[1:, at] = reach
                at, text, reach = at + 1, text + 1, reach + 1
                continue
            if kind > 1 or items[kind] == len(grids[kind]):
                return False
            steps, height, width = grids[kind][items[kind]]
            size = steps * height * width
            if size == 0 or at + size > end:
                return False
            clock = 0
            for step in range(steps):
                clock = times[kind][clocks[kind] + step]
                for row in range(height):
                    for column in range(width):
                        if types_T[at] != kind + 1:
                            return False
                        found_4T[0, at], found_4T[1, at] = text, reach + clock
                        found_4T[2, at], found_4T[3, at] = reach + row, reach + column
                        at, text = at + 1, text + 1
            items[kind] += 1
            clocks[kind] += steps
            reach += max(height, width) if by_extent else max(clock + 1, height, width)
        ends_n2[branch, 0], ends_n2[branch, 1] = text, reach
    return bool(at == len(types_T) and items[0] == len(grids[0]) and items[1] == len(grids[1]))


# --------------------------------------------------------------------------------------------------------- grids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Placed:
    """The items of one kind and their tokens: ``at_M`` in the row, ``item_M`` of the N, ``inner_M`` within the item."""

    first_N: Ints
    last_N: Ints
    at_M: Ints
    item_M: Ints
    inner_M: Ints


def _grid_positions(
    scheme: PositionScheme, types_T: AnyInt, grids: MediaGrids, branches: Sequence[Branch]
) -> Positions:
    dtype: type[object] = np.float32 if scheme.fractional else np.int64
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


def _grids_of(scheme: PositionScheme, kind: TokenType, grids: MediaGrids) -> tuple[Ints, NDArray[np.float32] | None]:
    """Items of this kind as grids of tokens, and the seconds between their grids in time."""
    merge, row_end = scheme.spatial_merge, np.array([0, 0, int(scheme.row_ends)])
    if kind is TokenType.IMAGE:
        return grids.image_N3.astype(np.int64) // np.array([1, merge, merge]) + row_end, None
    video_N3 = grids.video_N3.astype(np.int64) // np.array([scheme.temporal_merge, merge, merge]) + row_end
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


def _woven(types_T: AnyInt, advance_T: Positions, offsets_AT: Positions) -> Ints:
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


def _place(is_kind_T: NDArray[np.bool_], sizes_N: Ints, kind: TokenType, *, spread: bool) -> _Placed:
    at_M = np.flatnonzero(is_kind_T)
    if len(at_M) != sizes_N.sum():
        raise RowError(
            "media_mismatch",
            f"{len(at_M)} {kind.name.lower()} tokens, but its {len(sizes_N)} grids take {int(sizes_N.sum())}",
        )
    starts_N = segment_starts(sizes_N)
    item_M = np.repeat(np.arange(len(sizes_N)), sizes_N)
    first_N, last_N = at_M[starts_N], at_M[starts_N + sizes_N - 1]
    torn = np.flatnonzero(last_N - first_N + 1 != sizes_N)
    if len(torn) and not spread:
        first, size = int(first_N[torn[0]]), int(sizes_N[torn[0]])
        raise RowError(
            "media_mismatch",
            f"{kind.name.lower()} of {counted(size, 'token')} at {first} is interrupted by other tokens",
        )
    return _Placed(
        first_N=first_N, last_N=last_N, at_M=at_M, item_M=item_M, inner_M=np.arange(len(at_M)) - starts_N[item_M]
    )


def _indexed_positions(scheme: PositionScheme, types_T: AnyInt, grids: MediaGrids, branches: Sequence[Branch]) -> Ints:
    positions_AT = np.repeat(tree_positions(branches)[None], scheme.num_axes, axis=0)
    grid_N3, _ = _grids_of(scheme, TokenType.IMAGE, grids)
    if not len(grid_N3):
        return positions_AT
    num_rows, num_columns = grid_N3[:, 1], grid_N3[:, 2]
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
