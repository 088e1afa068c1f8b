"""How models with positions of several axes count: what a token stands for, and the parameters of each way.

A axes, T tokens of a row, N items (pictures or videos).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.errors import ModelError

AnyInt = NDArray[np.integer]


class TokenType(IntEnum):
    """What a token stands for, as transformers' ``mm_token_type_ids`` has it."""

    TEXT = 0
    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


class Arrangement(StrEnum):
    """Where the tokens of an item lie. GRID: on a grid in time, height and width, and the text behind it past that.
    INDEXED: the last three axes are column, row and the picture's number in its segment, while positions go on by one a
    token. CANVAS: pictures are cut in slices (`layout.mrope`).
    """

    GRID = "grid"
    INDEXED = "indexed"
    CANVAS = "canvas"


class Advance(StrEnum):
    """How far an item moves the text behind it. EXTENT: the longer side of its grid; a video's time does not count, and
    its end may lie ahead of the words behind it. REACH: past the largest position of its last token.
    """

    EXTENT = "extent"
    REACH = "reach"


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvas:
    """The ids that stand between the crops of a picture."""

    slice_start: int
    slice_end: int
    image_start: int
    image_end: int
    newline: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionScheme:
    """How a model counts.

    num_axes            A; more than 3 under INDEXED, where those before the last three count as text does
    spatial_merge       patches of a side that become one token
    temporal_merge      the same in time; of videos only
    positions_a_second  of a video's time; None: one for each of its grids in time
    rate_first          positions a second times the seconds of a step, then times the steps; else the steps come first
    per_frame           each grid in time of a video is an item of its own, with timestamps between them or not
    row_ends            each row of a grid ends in a token of its own
    fractional          time is not rounded, and neither is anything behind it: positions are float32
    shared_borders      of two tokens that open, or close, a video with its sound both have one position
    canvas              of CANVAS
    text_row            in packed rows positions of text come before the axes, by which models tell segments apart;
                        transformers' HunYuan-VL takes such a row for an axis too many
    """

    arrangement: Arrangement = Arrangement.GRID
    num_axes: int = 3
    spatial_merge: int = 2
    temporal_merge: int = 1
    positions_a_second: float | None = None
    rate_first: bool = False
    per_frame: bool = False
    row_ends: bool = False
    advance: Advance = Advance.EXTENT
    fractional: bool = False
    shared_borders: bool = False
    canvas: Canvas | None = None
    text_row: bool = True


def _no_grids() -> NDArray[np.int64]:
    return np.zeros((0, 3), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MediaGrids:
    """The media of a row, in the order of their tokens.

    image_N3, video_N3  patches in time, height and width (of CANVAS: height and width, one for each slice)
    seconds_N           of a video, between two of its grids in time; None: one
    """

    image_N3: AnyInt = field(default_factory=_no_grids)
    video_N3: AnyInt = field(default_factory=_no_grids)
    seconds_N: NDArray[np.floating] | None = None


def position_scheme(name: str, config: Mapping[str, object]) -> PositionScheme:
    """The named way of counting, with the numbers that a model's config (as a dict) has for it.

    Raises `ModelError` for a name that is not in the table, and for a canvas whose marks the config does not name.
    """
    if name not in _VARIANTS:
        raise ModelError(f"no way of counting positions is called {name!r}", hint=f"there are {', '.join(_VARIANTS)}")
    variant = _VARIANTS[name]
    found = {key: _entry(config, path) for key, path in variant.reads.items()}
    found = {key: value for key, value in found.items() if value is not None}  # else transformers' own default
    match variant.scheme.arrangement:
        case Arrangement.GRID:
            pass
        case Arrangement.INDEXED:
            if sections := found.pop("num_axes", None):
                found["num_axes"] = len(sections)
        case Arrangement.CANVAS:
            found["spatial_merge"] = 2 if found.pop("spatial_merge", None) == "4x" else 4
            found["canvas"] = _canvas(name, config)
        case _:
            raise AssertionError(variant.scheme.arrangement)
    return replace(variant.scheme, **found)


def token_types(
    ids_T: AnyInt,
    *,
    image: Sequence[int] = (),
    video: Sequence[int] = (),
    audio: Sequence[int] = (),
    video_span: tuple[int, int] | None = None,
) -> NDArray[np.int64]:
    """int64[T] of `TokenType`, by the ids of each kind.

    ``video_span``: ids that open and close a video whose frames are written with the tokens of pictures.
    """
    types_T = np.zeros(len(ids_T), dtype=np.int64)
    for kind, ids in ((TokenType.IMAGE, image), (TokenType.VIDEO, video), (TokenType.AUDIO, audio)):
        for token in ids:
            types_T[ids_T == token] = kind
    if video_span is not None:
        opened, closed = (np.cumsum(ids_T == token) for token in video_span)
        types_T[(types_T == TokenType.IMAGE) & (opened > closed)] = TokenType.VIDEO
    return types_T


@dataclass(frozen=True, kw_only=True, slots=True)
class _Variant:
    """``reads``: which entry of the config says what; an entry that is not written there keeps the scheme's value."""

    scheme: PositionScheme
    reads: Mapping[str, str] = field(default_factory=dict)


_MERGE = {"spatial_merge": "vision_config.spatial_merge_size"}
_SECONDS = {"positions_a_second": "position_id_per_seconds"}
_VARIANTS = {
    "grid": _Variant(scheme=PositionScheme(), reads=_MERGE),
    "grid_seconds": _Variant(
        scheme=PositionScheme(positions_a_second=4, rate_first=True),
        reads={**_MERGE, "positions_a_second": "vision_config.tokens_per_second"},
    ),
    "grid_frames": _Variant(scheme=PositionScheme(per_frame=True), reads=_MERGE),
    "grid_row_ends": _Variant(scheme=PositionScheme(per_frame=True, row_ends=True), reads=_MERGE),
    "grid_merged_time": _Variant(
        scheme=PositionScheme(temporal_merge=2),
        reads={**_MERGE, "temporal_merge": "vision_config.temporal_merge_size"},
    ),
    "grid_sound": _Variant(
        scheme=PositionScheme(positions_a_second=25, advance=Advance.REACH, shared_borders=True),
        reads={**_MERGE, **_SECONDS},
    ),
    "grid_sound_fractional": _Variant(
        scheme=PositionScheme(positions_a_second=25, advance=Advance.REACH, fractional=True),
        reads={**_MERGE, **_SECONDS},
    ),
    "indexed": _Variant(
        scheme=PositionScheme(arrangement=Arrangement.INDEXED, num_axes=4, row_ends=True, text_row=False),
        reads={**_MERGE, "num_axes": "text_config.rope_parameters.mrope_section"},
    ),
    "canvas": _Variant(
        scheme=PositionScheme(arrangement=Arrangement.CANVAS), reads={"spatial_merge": "downsample_mode"}
    ),
}


def _entry(config: Mapping[str, object], path: str) -> Any:
    """``a.b`` -> ``config["a"]["b"]``; None where an entry on the way is missing."""
    found: object = config
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def _canvas(name: str, config: Mapping[str, object]) -> Canvas:
    marks: dict[str, Any] = {mark.name: config.get(f"{mark.name}_id") for mark in fields(Canvas)}
    if missing := [f"{key}_id" for key, value in marks.items() if value is None]:
        raise ModelError(f"positions of {name!r} are found by marks, and the model's config has no {missing[0]}")
    return Canvas(**marks)
