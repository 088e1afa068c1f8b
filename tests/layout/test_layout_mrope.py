"""Positions of several axes against transformers' own ``get_rope_index``, on random mixes of text and media."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeModel
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.glm46v.modeling_glm46v import Glm46VModel
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLModel
from transformers.models.hy_v4_vl.modeling_hy_v4_vl import HYV4VLModel
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVLModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
    _get_feat_extract_output_lengths,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from luthier.errors import ModelError, RowError
from luthier.layout import tree_positions
from luthier.layout.mrope import _compiled, mrope_positions, packed_mrope
from luthier.layout.position_schemes import Arrangement, MediaGrids, PositionScheme, position_scheme, token_types
from luthier.records import Branch
from tests.conftest import reason_is, refused

IMG, VID, AUD, VS, VE, AS, AE = 500, 501, 504, 502, 503, 505, 506
VIDEO_START, VIDEO_END = 507, 508
SLICE, SLICE_END, NEWLINE = 510, 511, 512  # of canvases, whose pictures stand between VS and VE

CONFIG: dict[str, Any] = {
    "vision_config": {"spatial_merge_size": 2, "tokens_per_second": 2, "temporal_merge_size": 2},
    "text_config": {"rope_parameters": {"mrope_section": [2, 2, 2, 2]}},
    "audio_config": {"n_window": 50},
    "position_id_per_seconds": 25,
    "seconds_per_chunk": 2,
    "image_token_id": IMG, "video_token_id": VID, "audio_token_id": AUD,
    "vision_start_token_id": VS, "audio_start_token_id": AS,
    "image_start_id": VS, "image_end_id": VE, "slice_start_id": SLICE, "slice_end_id": SLICE_END, "newline_id": NEWLINE,
    "downsample_mode": "16x",
}  # fmt: skip


@dataclass
class Row:
    """One sequence being written, with what a processor would return beside it."""

    ids: list[int] = field(default_factory=list)
    images: list[tuple[int, ...]] = field(default_factory=list)
    videos: list[tuple[int, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    audio: list[int] = field(default_factory=list)  # frames of features

    def grids(self) -> MediaGrids:
        def array(grids: list[tuple[int, ...]]) -> np.ndarray:
            return np.array(grids, dtype=np.int64).reshape(len(grids), len(grids[0]) if grids else 3)

        seconds = np.array(self.seconds, dtype=np.float32) if self.seconds else None
        return MediaGrids(image_N3=array(self.images), video_N3=array(self.videos), seconds_N=seconds)

    def __add__(self, other: Row) -> Row:
        return Row(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


Write = Callable[[np.random.Generator, Row], None]


def text(rng: np.random.Generator, row: Row, least: int = 1) -> None:
    row.ids += rng.integers(3, 490, rng.integers(least, 12)).tolist()


def grid(rng: np.random.Generator, *, frames: int = 1) -> tuple[int, int, int]:
    return frames, 2 * int(rng.integers(1, 7)), 2 * int(rng.integers(1, 7))


def image(rng: np.random.Generator, row: Row) -> None:
    row.images.append(grid(rng))
    row.ids += [VS] + [IMG] * (np.prod(row.images[-1]) // 4) + [VE]


def video(rng: np.random.Generator, row: Row) -> None:
    row.videos.append(grid(rng, frames=int(rng.integers(1, 15))))
    row.seconds.append(2 / float(rng.choice([1, 2, 1.7, 0.3, 24])))
    row.ids += [VS] + [VID] * (np.prod(row.videos[-1]) // 4) + [VE]


def video_of_pairs(rng: np.random.Generator, row: Row) -> None:
    """Two grids in time become one."""
    t, h, w = grid(rng, frames=2 * int(rng.integers(1, 5)))
    row.videos.append((t, h, w))
    row.ids += [VS] + [VID] * (t // 2 * h * w // 4) + [VE]


def video_in_frames(rng: np.random.Generator, row: Row) -> None:
    row.videos.append(grid(rng, frames=int(rng.integers(1, 6))))
    for _ in range(row.videos[-1][0]):
        text(rng, row)
        row.ids += [VS] + [VID] * (np.prod(row.videos[-1][1:]) // 4) + [VE]


def video_of_images(rng: np.random.Generator, row: Row) -> None:
    row.videos.append(grid(rng, frames=int(rng.integers(1, 6))))
    row.ids.append(VIDEO_START)
    for _ in range(row.videos[-1][0]):
        row.ids += [VS] + [IMG] * (np.prod(row.videos[-1][1:]) // 4) + [VE]
        text(rng, row)
    row.ids.append(VIDEO_END)


def image_with_row_ends(rng: np.random.Generator, row: Row) -> None:
    row.images.append(grid(rng))
    _, h, w = row.images[-1]
    row.ids += [VS] + [IMG] * (h // 2 * (w // 2 + 1) + 2) + [VE]


def image_of_ended_rows(rng: np.random.Generator, row: Row) -> None:
    row.images.append(grid(rng))
    _, h, w = row.images[-1]
    row.ids += [VS] + [IMG] * (h // 2 * (w // 2 + 1)) + [VE]


def video_of_ended_rows(rng: np.random.Generator, row: Row) -> None:
    row.videos.append(grid(rng, frames=int(rng.integers(1, 6))))
    t, h, w = row.videos[-1]
    row.ids += [VS] + [VID] * (t * (h // 2) * (w // 2 + 1)) + [VE]


def audio(rng: np.random.Generator, row: Row) -> None:
    row.audio.append(int(rng.integers(5, 700)))
    row.ids += [AS] + [AUD] * sounds(row.audio[-1]) + [AE]


def audio_13(rng: np.random.Generator, row: Row) -> None:
    row.audio.append(int(rng.integers(5, 700)))
    row.ids += [AS] + [AUD] * sounds_13(row.audio[-1]) + [AE]


def sounds(frames: int) -> int:
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def sounds_13(frames: int) -> int:
    return int(_get_feat_extract_output_lengths(torch.tensor(frames)))


def canvas_image(rng: np.random.Generator, row: Row) -> None:
    """A view, sometimes of the whole of up to 3 x 3 slices, sometimes with one too few."""
    sizes = [(4 * int(rng.integers(1, 6)), 4 * int(rng.integers(1, 6))) for _ in range(2)]
    row.images.append(sizes[0])
    row.ids += [VS] + [IMG] * (np.prod(sizes[0]) // 16) + [VE]
    num_rows, columns = int(rng.integers(0, 4)), int(rng.integers(1, 4))
    for line in range(num_rows):
        for _ in range(columns - int(columns > 1 and line == 1 and rng.random() < 0.2)):
            row.images.append(sizes[1])
            row.ids += [SLICE] + [IMG] * (np.prod(sizes[1]) // 16) + [SLICE_END]
        if line + 1 < num_rows:
            row.ids += [NEWLINE] * int(rng.integers(1, 3))
    if rng.random() < 0.5:
        row.ids.append(NEWLINE)


def canvas_video(rng: np.random.Generator, row: Row) -> None:
    size = (4 * int(rng.integers(1, 6)), 4 * int(rng.integers(1, 6)))
    for _ in range(int(rng.integers(1, 4))):
        row.videos.append(size)
        row.ids += [VS] + [VID] * (np.prod(size) // 16) + [VE]
        row.ids += [NEWLINE] * int(rng.integers(0, 2))


def with_grids(cls: Any, *extra: str) -> Callable[[Row, np.ndarray, Any], np.ndarray]:
    """The oracle: the method of the model's class, on an object that has its config and no weights."""

    def positions(row: Row, types: np.ndarray, config: Any) -> np.ndarray:
        given: dict[str, Any] = {
            "image_grid_thw": torch.tensor(row.images) if row.images else None,
            "video_grid_thw": torch.tensor(row.videos) if row.videos else None,
            "second_per_grid_ts": torch.tensor(row.seconds) if row.seconds else None,
        }
        names = ("image_grid_thw", *extra)
        ids = torch.tensor([row.ids])
        return call(cls, config, ids, mm_token_type_ids=torch.from_numpy(types)[None], **{n: given[n] for n in names})

    return positions


def with_sizes(row: Row, types: np.ndarray, config: Any) -> np.ndarray:
    sizes = {
        "target_sizes": torch.tensor(row.images) if row.images else None,
        "target_sizes_videos": torch.tensor(row.videos) if row.videos else None,
    }
    types_1T = torch.from_numpy(types)[None]
    return call(MiniCPMV4_7Model, config, torch.tensor([row.ids]), mm_token_type_ids=types_1T, **sizes)


def with_sound(cls: Any, *, woven: bool = False) -> Callable[[Row, np.ndarray, Any], np.ndarray]:
    def positions(row: Row, types: np.ndarray, config: Any) -> np.ndarray:
        return call(
            cls,
            config,
            torch.tensor([row.ids]),
            image_grid_thw=torch.tensor(row.images) if row.images else None,
            video_grid_thw=torch.tensor(row.videos) if row.videos else None,
            attention_mask=torch.ones(1, len(row.ids), dtype=torch.long),
            use_audio_in_video=woven,
            audio_seqlens=torch.tensor(row.audio) if row.audio else None,
            second_per_grids=torch.tensor(row.seconds) if row.seconds else None,
        )

    return positions


def call(cls: Any, config: Any, ids: torch.Tensor, **arguments: Any) -> np.ndarray:
    fake = SimpleNamespace(config=config, spatial_merge_size=config.vision_config.spatial_merge_size)
    methods = (
        "get_rope_index", "get_vision_position_ids", "get_llm_pos_ids_for_vision", "get_chunked_index",
        "_group_visual_frames",
    )  # fmt: skip
    for name in methods:
        if hasattr(cls, name):
            setattr(fake, name, getattr(cls, name).__get__(fake))
    if hasattr(cls, "_frame_end_idx"):
        fake._frame_end_idx = cls._frame_end_idx
    found, _ = fake.get_rope_index(input_ids=ids, **arguments)
    return found[:, 0].numpy()


def as_config(entries: dict[str, Any]) -> Any:
    """Attributes as a config has them; ``rope_parameters`` stays a dict."""
    return SimpleNamespace(
        **{
            key: as_config(value) if isinstance(value, dict) and key != "rope_parameters" else value
            for key, value in entries.items()
        }
    )


@dataclass
class Case:
    """A model's way of counting, what its rows are made of, and its own function."""

    scheme: str
    oracle: Callable[[Row, np.ndarray, Any], np.ndarray]
    writers: tuple[Write, ...]
    span: tuple[int, int] | None = None


BOTH = ("video_grid_thw",)
CASES = {
    "qwen2_vl": Case("grid", with_grids(Qwen2VLModel, *BOTH), (image, video)),
    "qwen2_5_vl": Case("grid_seconds", with_grids(Qwen2_5_VLModel, *BOTH, "second_per_grid_ts"), (image, video)),
    "qwen3_vl": Case("grid_frames", with_grids(Qwen3VLModel, *BOTH), (image, video_in_frames)),
    "qwen3_5": Case("grid_frames", with_grids(Qwen3_5Model, *BOTH), (image, video_in_frames)),
    "glm4v": Case(
        "grid_frames", with_grids(Glm4vModel, *BOTH), (image, video_of_images), (VIDEO_START, VIDEO_END)
    ),
    "glm46v": Case(
        "grid_frames", with_grids(Glm46VModel, *BOTH), (image, video_of_images), (VIDEO_START, VIDEO_END)
    ),
    "ernie4_5_vl_moe": Case("grid_merged_time", with_grids(Ernie4_5_VLMoeModel, *BOTH), (image, video_of_pairs)),
    "paddleocr_vl": Case("grid", with_grids(PaddleOCRVLModel, *BOTH), (image,)),
    "hunyuan_vl": Case("indexed", with_grids(HunYuanVLModel), (image_with_row_ends,)),
    "hy_v4_vl": Case("grid_row_ends", with_grids(HYV4VLModel, *BOTH), (image_of_ended_rows, video_of_ended_rows)),
    "minicpmv4_7": Case("canvas", with_sizes, (canvas_image, canvas_video)),
    "qwen2_5_omni": Case(
        "grid_sound", with_sound(Qwen2_5OmniThinkerForConditionalGeneration), (image, video, audio)
    ),
    "qwen3_omni_moe": Case(
        "grid_sound_fractional", with_sound(Qwen3OmniMoeThinkerForConditionalGeneration), (image, video, audio_13)
    ),
}  # fmt: skip


def written(case: Case, rng: np.random.Generator, *, num_media: int = 4) -> Row:
    row = Row()
    text(rng, row)
    for number in range(int(rng.integers(0, num_media + 1)) or 1):
        # models that sound a row without pictures count it with another function, which needs no comparison
        case.writers[0 if number == 0 else int(rng.integers(len(case.writers)))](rng, row)
        if case.scheme != "canvas" or rng.random() < 0.5:
            text(rng, row)
    return row


def types_of(case: Case, row: Row) -> np.ndarray:
    return token_types(np.array(row.ids), image=[IMG], video=[VID], audio=[AUD], video_span=case.span)


def found(case: Case, row: Row, branches: list[Branch]) -> np.ndarray:
    scheme = position_scheme(case.scheme, CONFIG)
    return mrope_positions(scheme, types_of(case, row), row.grids(), branches, ids_T=np.array(row.ids))


def expected(case: Case, row: Row) -> np.ndarray:
    types = types_of(case, row)
    if case.scheme != "grid_sound" and case.scheme != "grid_sound_fractional":
        types = np.where(types == 3, 0, types)
    return case.oracle(row, types, as_config(CONFIG))


def agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal; positions that are fractions may differ by rounding, far less than models tell apart."""
    if one.dtype.kind == "f":
        return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=2e-3))
    return one.shape == other.shape and bool((one == other).all())


@pytest.mark.parametrize("name", CASES)
def test_a_segment_has_the_positions_that_its_model_gives_it(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(1)
    for _ in range(40):
        row = written(case, rng)
        assert agree(found(case, row, [Branch(parent=-1, length=len(row.ids))]), expected(case, row))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_omni"])
def test_time_is_rounded_in_the_order_of_each_model(name: str) -> None:
    """15 steps of 0.28 s at 25 positions a second: 104 or 105, by what is multiplied first."""
    case = CASES[name]
    config = {**CONFIG, "vision_config": {**CONFIG["vision_config"], "tokens_per_second": 25}}
    scheme = position_scheme(case.scheme, config)
    differing = 0
    for count, rate in ((7, 25), (11, 25), (1, 3), (29, 60), (17, 12), (58, 24)):
        row = Row(ids=[VS] + [VID] * 300 + [VE], videos=[(300, 2, 2)], seconds=[count / rate])
        ours = mrope_positions(scheme, types_of(case, row), row.grids(), [Branch(parent=-1, length=302)])
        assert agree(ours, case.oracle(row, types_of(case, row), as_config(config)))
        other = replace(scheme, rate_first=not scheme.rate_first)
        wrong = mrope_positions(other, types_of(case, row), row.grids(), [Branch(parent=-1, length=302)])
        differing += not agree(ours, wrong)
    assert differing


@pytest.mark.parametrize("name", CASES)
def test_segments_of_a_pack_count_anew_under_a_row_of_text_positions(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(2)
    rows = [written(case, rng) for _ in range(5)]
    whole = rows[0] + rows[1] + rows[2] + rows[3] + rows[4]
    branches = [Branch(parent=-1, length=len(row.ids)) for row in rows]
    scheme = position_scheme(case.scheme, CONFIG)
    packed = packed_mrope(scheme, types_of(case, whole), whole.grids(), branches, ids_T=np.array(whole.ids))
    assert agree(packed[-scheme.num_axes :], np.concatenate([expected(case, row) for row in rows], axis=1))
    assert len(packed) == scheme.num_axes + (name != "hunyuan_vl")  # whose class takes such a row for an axis
    assert name == "hunyuan_vl" or packed[0].tolist() == [place for row in rows for place in range(len(row.ids))]


@pytest.mark.parametrize("name", CASES)
def test_a_branch_goes_on_where_its_parent_ends_as_if_the_parent_stood_before_it_alone(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(3)
    prompt, chosen, rejected = (written(case, rng, num_media=2) for _ in range(3))
    text(rng, prompt)  # frames of a canvas that nothing parts belong together: a branch begins with words
    for each in (chosen, rejected):
        each.ids.insert(0, 7)
    tree = [Branch(parent=parent, length=len(row.ids)) for parent, row in ((-1, prompt), (0, chosen), (0, rejected))]
    shared = found(case, prompt + chosen + rejected, tree)
    start, middle = len(prompt.ids), len(prompt.ids) + len(chosen.ids)
    assert agree(shared[:, :middle], expected(case, prompt + chosen))
    assert agree(shared[:, middle:], expected(case, prompt + rejected)[:, start:])


def woven_in_chunks(rng: np.random.Generator, row: Row) -> None:
    """A video with its sound, in chunks of two seconds: what is seen of each, then what is heard."""
    t, h, w = grid(rng, frames=int(rng.integers(1, 12)))
    seconds, frames = 2 / float(rng.choice([1.0, 2.0, 1.7])), int(rng.integers(5, 900))
    time_of_each = np.repeat(
        np.trunc(np.arange(t, dtype=np.float32) * np.float32(seconds) * np.float32(25)), h * w // 4
    )
    seen = [(np.flatnonzero((time_of_each // 50) == chunk), VID) for chunk in range(60)]
    heard = [(np.flatnonzero((np.arange(sounds(frames)) // 50) == chunk), AUD) for chunk in range(60)]
    body = [token for pair in zip(seen, heard, strict=True) for places, token in pair for _ in places]
    row.videos.append((t, h, w))
    row.seconds.append(seconds)
    row.audio.append(frames)
    row.ids += [VS, AS, *body, AE, VE]


def woven_by_time(rng: np.random.Generator, row: Row) -> None:
    """A video with its sound, token by token in the order of time."""
    t, h, w = grid(rng, frames=int(rng.integers(1, 12)))
    seconds, frames = 2 / float(rng.choice([1.0, 2.0])), int(rng.integers(5, 900))
    seen = [(time, 0, VID) for time in np.repeat(np.arange(t) * seconds * 25, h * w // 4)]
    heard = [(float(time), 1, AUD) for time in range(sounds_13(frames))]
    row.videos.append((t, h, w))
    row.seconds.append(seconds)
    row.audio.append(frames)
    row.ids += [VS, AS, *(token for _, _, token in sorted(seen + heard)), AE, VE]


@pytest.mark.parametrize(
    ("scheme", "cls", "writers"),
    [
        ("grid_sound", Qwen2_5OmniThinkerForConditionalGeneration, (image, woven_in_chunks, audio)),
        ("grid_sound_fractional", Qwen3OmniMoeThinkerForConditionalGeneration, (image, woven_by_time, audio_13)),
    ],
)
def test_a_video_and_its_sound_count_side_by_side(scheme: str, cls: Any, writers: tuple[Write, ...]) -> None:
    case, rng = Case(scheme, with_sound(cls, woven=True), writers), np.random.default_rng(4)
    for _ in range(40):
        row = written(case, rng)
        writers[1](rng, row)
        text(rng, row)
        assert agree(found(case, row, [Branch(parent=-1, length=len(row.ids))]), expected(case, row))


def test_a_wrong_parameter_is_seen_by_the_comparison() -> None:
    case, rng = CASES["qwen2_5_vl"], np.random.default_rng(8)
    row = Row()
    for write in (text, video, text, image, text):
        write(rng, row)
    wrong = PositionScheme()
    assert row.videos[0][0] > 1
    assert not agree(
        mrope_positions(wrong, types_of(case, row), row.grids(), [Branch(parent=-1, length=len(row.ids))]),
        expected(case, row),
    )


def test_text_alone_has_its_ordinary_positions_on_all_axes() -> None:
    for case in CASES.values():
        row = Row(ids=[5, 6, 7, 8, 9])
        branches = [Branch(parent=-1, length=3), Branch(parent=-1, length=2)]
        assert (found(case, row, branches) == [0, 1, 2, 0, 1]).all()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "hunyuan_vl", "minicpmv4_7"])
@pytest.mark.parametrize("break_it", ["missing token", "missing grid", "torn"])
def test_tokens_that_do_not_fit_their_grids_are_refused_with_both_numbers(name: str, break_it: str) -> None:
    case, rng = CASES[name], np.random.default_rng(6)
    row = Row()
    for write in (text, case.writers[0], text, case.writers[0], text):
        write(rng, row)
    match break_it:
        case "missing token":
            row.ids.remove(IMG)
        case "missing grid":
            row.images.pop()
        case _:
            row.ids.insert(row.ids.index(IMG) + 1, 9)
            row.images[0] = (*row.images[0][:-2], 16, 16) if name == "hunyuan_vl" else row.images[0]
    with pytest.raises(RowError, check=reason_is("media_mismatch")):
        found(case, row, [Branch(parent=-1, length=len(row.ids))])


def test_an_unknown_way_of_counting_is_refused_with_those_there_are() -> None:
    with refused(ModelError, "'grit'", "grid_frames"):
        position_scheme("grit", CONFIG)
    with pytest.raises(ModelError, match="slice_start_id"):
        position_scheme("canvas", {})


def test_numbers_that_a_config_does_not_name_are_those_of_its_class() -> None:
    assert position_scheme("grid_seconds", {}).positions_a_second == 4
    assert position_scheme("grid", {"vision_config": {"spatial_merge_size": 3}}).spatial_merge == 3
    assert position_scheme("indexed", {}).num_axes == 4


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_pass_gives_the_same_positions_or_none(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(8)
    scheme = position_scheme(case.scheme, CONFIG)
    for _ in range(60):
        rows = [written(case, rng, num_media=3) for _ in range(4)]
        for row in rows[1:]:
            row.ids.insert(0, 7)
        whole = rows[0] + rows[1] + rows[2] + rows[3]
        parents = [-1, 0, 0, -1] if rng.random() < 0.5 else [-1, -1, -1, -1]
        branches = [Branch(parent=parent, length=len(row.ids)) for parent, row in zip(parents, rows, strict=True)]
        types, grids = types_of(case, whole), whole.grids()
        compiled = _compiled(scheme, types, grids, branches)
        applies = scheme.arrangement is Arrangement.GRID and not scheme.fractional and not (types == 3).any()
        assert (compiled is not None) == applies
        if compiled is not None:
            plain = mrope_positions(scheme, types, grids, branches, ids_T=np.array(whole.ids))
            assert np.array_equal(compiled, np.concatenate([tree_positions(branches)[None], plain]))
            cut = types.copy()
            cut[np.flatnonzero(cut)[0]] = 0
            assert _compiled(scheme, cut, grids, branches) is None


def test_positions_of_a_long_pack_take_a_small_part_of_the_model_s_own_time() -> None:
    """Generous bounds, for busy machines; the figures of a quiet one are in the benchmarks."""
    case, rng = CASES["qwen2_5_vl"], np.random.default_rng(7)
    rows = []
    while sum(len(row.ids) for row in rows) < 16_000:
        rows.append(written(case, rng, num_media=8))
    whole = sum(rows[1:], rows[0])
    types, grids = types_of(case, whole), whole.grids()
    branches = [Branch(parent=-1, length=len(row.ids)) for row in rows]
    scheme = position_scheme(case.scheme, CONFIG)
    ours = min(_seconds_of(lambda: packed_mrope(scheme, types, grids, branches)) for _ in range(7))
    theirs = min(_seconds_of(lambda: [expected(case, row) for row in rows]) for _ in range(2))
    assert ours < theirs / 10
    assert ours < 0.02


def _seconds_of(function: Callable[[], Any]) -> float:
    start = time.process_time()  # of this process alone, however busy the machine is
    function()
    return time.process_time() - start
