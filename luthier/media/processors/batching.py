"""What a processor makes of single rows, joined to what it would make of them together.

Two steps, since a row of a batch may hold several samples: `join_features` puts the samples of a row together,
`merge_features` the rows of a batch. Both follow the `Batching` that the family declares for each output, and know no
family by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luthier.errors import ModelError
from luthier.media.families.family import Family, Features


def join_features(family: Family, samples: Sequence[Features]) -> dict[str, NDArray[np.generic]]:
    """The outputs for one row of a batch from those of its samples, in their order; {} if none has media.

    Raises `ModelError` if an output's sizes disagree along an axis that the family does not pad.
    """
    return {key: _concatenated(family, key, samples, by_row=False) for key in _keys(samples)}


def merge_features(family: Family, rows: Sequence[Features]) -> dict[str, NDArray[np.generic]]:
    """The outputs for a batch from those of its rows; a row of text alone has {}.

    Outputs that are batched by row get an empty (padded) row for it; the others skip it. Those that a processor leaves
    out where an item is alone are left out here too. Raises as `join_features`.
    """
    merged = {key: _concatenated(family, key, rows, by_row=family.batching[key].by_row) for key in _keys(rows)}
    return {key: value for key, value in merged.items() if key not in family.derived or len(value) > 1}


def _keys(rows: Sequence[Features]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _concatenated(family: Family, key: str, rows: Sequence[Features], *, by_row: bool) -> NDArray[np.generic]:
    batching = family.batching[key]
    arrays = [row[key] for row in rows if key in row]
    if batching.offset is not None:
        arrays = _shifted(key, batching.offset, batching.offset_axes, rows)
    if by_row:
        empty = arrays[0][:, :0] if arrays[0].ndim > 1 else np.zeros_like(arrays[0])
        arrays = [row.get(key, empty) for row in rows]
    axis = 0 if by_row else batching.axis
    if batching.pad is not None:
        arrays = _padded(arrays, axis, batching.pad)
    _check_shapes(family, key, arrays, axis)
    if len(arrays) == 1:
        return arrays[0]
    as_it_lies = _one_piece(arrays) if axis == 0 else None
    return np.concatenate(arrays, axis=axis) if as_it_lies is None else as_it_lies


def _one_piece(arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.generic] | None:
    """Arrays that lie one behind the other in the memory of one larger array, as a view of it; None if they do not."""
    whole = arrays[0].base
    if not isinstance(whole, np.ndarray) or not whole.flags.c_contiguous or not whole.size:
        return None
    place = first = (_address(arrays[0]) - _address(whole)) // whole.strides[0]
    for array in arrays:
        same = array.base is whole and array.dtype == whole.dtype and array.shape[1:] == whole.shape[1:]
        if not same or not array.flags.c_contiguous or _address(array) != _address(whole) + place * whole.strides[0]:
            return None
        place += len(array)
    return whole[first:place]


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _shifted(key: str, target: str, axes: int, rows: Sequence[Features]) -> list[NDArray[np.generic]]:
    """Indices into ``target``, counted from the first row on; negative ones mean "none" and stay."""
    arrays: list[NDArray[np.generic]] = []
    before = 0
    for row in rows:
        if key in row:
            arrays.append(np.where(np.less(row[key], 0), row[key], np.add(row[key], before)))
            before += math.prod(row[target].shape[:axes])
    return arrays


def _padded(arrays: list[NDArray[np.generic]], axis: int, pad: float | tuple[float, ...]) -> list[NDArray[np.generic]]:
    """All arrays with the largest size along every axis but ``axis``, filled up at the end."""
    largest = np.max([array.shape for array in arrays], axis=0).tolist()
    padded = []
    for array in arrays:
        shape = [
            have if place == axis % array.ndim else want
            for place, (want, have) in enumerate(zip(largest, array.shape, strict=True))
        ]
        if shape == list(array.shape):
            padded.append(array)
            continue
        full = np.empty(shape, dtype=array.dtype)
        full[...] = pad if isinstance(pad, float | int) else _repeated(pad, shape[-1])
        full[tuple(slice(size) for size in array.shape)] = array
        padded.append(full)
    return padded


def _repeated(pad: tuple[float, ...], length: int) -> list[float]:
    """(1, 0) for 4 -> 1, 0, 0, 0"""
    return [*pad, *[pad[-1]] * (length - len(pad))]


def _check_shapes(family: Family, key: str, arrays: list[NDArray[np.generic]], axis: int) -> None:
    shapes = {tuple(np.delete(array.shape, axis).tolist()) for array in arrays}
    types = {array.dtype for array in arrays}
    if len(shapes) > 1 or len(types) > 1:
        listed = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise ModelError(
            f"{key!r} of {family.name} cannot be batched along axis {axis}: the rows have {listed}",
            hint="declare how it is padded in the family's row, or train with one row a batch",
        )
