"""Features of single rows with videos and sounds, merged, are what the processor makes of the whole batch."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from luthier.errors import ModelError, RowError
from luthier.media.families import MediaKind
from luthier.media.files.decoding import Decoded, DecodedImage, DecodedVideo
from luthier.media.geometry.videos import sampled_frames
from luthier.media.processors.calling import TOKEN_OUTPUTS, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import ImageHeader, MediaHeader, VideoHeader
from tests.conftest import reason_is
from tests.media.test_media_families import own_ids as own_picture_ids
from tests.media.test_media_families import picture, random_sizes
from tests.media.test_media_video_families import NUM_SIZES, clip, frames_of, metadata_of
from tests.media.tiny_av_processors import AUDIO, VIDEO

Row = list[MediaHeader]

PICTURE, WIDE = ImageHeader(width=60, height=41), ImageHeader(width=80, height=30)
SHORT, LONG, SLOW = clip(56, 40, 9, 6.0), clip(40, 70, 21, 12.0), clip(50, 50, 8, 2.0)
BATCHES: dict[str, list[Row]] = {
    "alone": [[LONG]],
    "text first": [[], [SHORT]],
    "mixed": [[LONG], [PICTURE, SHORT], [], [SLOW, WIDE, LONG], [PICTURE]],
}
EVEN = [clip(56, 40, 8, 6.0), clip(40, 70, 8, 12.0)]
# Classes whose videos have to be of as many frames as all others of a batch.
OF_ONE_LENGTH = {"internvl", "llava_onevision", "llava_next_video", "video_llava", "smolvlm"}
# Classes that take one video, or no pictures beside it.
NESTED = {"smolvlm", "llava_onevision", "gemma4", "gemma4_unified"}


def rows_of(family: str, kind: str) -> list[Row]:
    short, long = EVEN
    match family, kind:
        case "smolvlm", _:  # its processor puts the frames in the place of pictures, and drops those
            return [[long], [short]]
        case "molmo2", "mixed":
            return [[LONG], [PICTURE], [], [WIDE, SHORT]]
        case "minimax_m3_vl", _:  # frames of a size that needs no resizing
            return [[clip(56, 84, 9, 6.0)], [PICTURE, clip(28, 56, 4, 2.0)], []]
        case _, "mixed" if family in OF_ONE_LENGTH:
            return [[long], [PICTURE, short], [], [short, WIDE, long], [PICTURE]]
        case _:
            return BATCHES[kind]


def decoded(media: MediaProcessor, row: Row) -> list[tuple[MediaHeader, Decoded]]:
    return [(item, _decoded(media, item)) for item in row]


def _decoded(media: MediaProcessor, item: MediaHeader) -> Decoded:
    if isinstance(item, ImageHeader):
        return DecodedImage(pixels=picture_of(item))
    assert isinstance(item, VideoHeader)
    taken = sampled_frames(media.settings(MediaKind.VIDEO), item)
    return DecodedVideo(frames=frames_of(item)[taken], frame_indices=tuple(taken), fps=item.fps)


def picture_of(item: ImageHeader) -> Image.Image:
    pixels = np.random.default_rng(item.width).integers(0, 256, (item.height, item.width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def own_batch(family: str, media: MediaProcessor, rows: list[Row]) -> dict[str, Any]:
    """The processor's own output for whole videos, of which it takes frames itself."""
    kinds = {ImageHeader: "image", VideoHeader: "video"}
    texts = ["hello " + " ".join(media.placeholder(kinds[type(item)]) for item in row) for row in rows]
    pictures = [[picture_of(item) for item in row if isinstance(item, ImageHeader)] for row in rows]
    videos = [item for row in rows for item in row if isinstance(item, VideoHeader)]
    arguments: dict[str, Any] = {}
    if any(pictures):
        arguments["images"] = pictures if family in NESTED else [item for row in pictures for item in row]
        arguments["images_kwargs"] = {"return_tensors": "pt"}
    arguments["videos"] = [frames_of(video) for video in videos]
    told = {"video_metadata": metadata_of(videos), "return_metadata": True}
    arguments["videos_kwargs"] = {**told, "return_tensors": "pt"}
    padding = {"padding": True, "padding_side": "right", "return_tensors": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some classes put tensors into numpy's functions
        return dict(media.processor(text=texts, text_kwargs=padding, **arguments))


def assert_same(media: MediaProcessor, ours: dict[str, NDArray[Any]], own: dict[str, Any]) -> None:
    skipped = TOKEN_OUTPUTS | set(media.family.token_inputs) | set(media.family.dropped)
    assert set(ours) == set(own) - skipped
    for key, value in ours.items():
        theirs = np.asarray(own[key])
        theirs = theirs.astype(np.float32) if theirs.dtype == np.float64 else theirs  # as its tensors are
        assert value.dtype.kind == theirs.dtype.kind, key
        np.testing.assert_array_equal(value, theirs, err_msg=key)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", sorted(VIDEO))
def test_merged_features_of_videos_are_the_processors_own_batch(family: str, kind: str) -> None:
    media = MediaProcessor.of(VIDEO[family]())
    rows = rows_of(family, kind)
    ours = merge_features(media.family, [media.features(decoded(media, row)) for row in rows])
    assert_same(media, ours, own_batch(family, media, rows))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe", "gemma4"])
def test_inputs_along_the_tokens_of_videos_are_the_processors_own(family: str) -> None:
    media = MediaProcessor.of(VIDEO[family]())
    rows = rows_of(family, "mixed")
    own = own_batch(family, media, rows)
    for number, row in enumerate(rows):
        length = sum(own["attention_mask"][number])
        ids = np.asarray(own["input_ids"][number])[:length]
        for name, values in media.token_inputs(ids, media.features(decoded(media, row))).items():
            np.testing.assert_array_equal(values, np.asarray(own[name][number])[:length], err_msg=name)


def test_positions_get_the_grids_and_the_seconds_of_a_video() -> None:
    media = MediaProcessor.of(VIDEO["qwen2_5_vl"]())
    features = media.features(decoded(media, [LONG]))
    frames = len(sampled_frames(media.settings(MediaKind.VIDEO), LONG))
    assert features["video_grid_thw"].tolist()[0][0] == -(-frames // 2)
    # two frames of a grid, taken at the rate at which 21 of 21 frames are taken: 12 a second
    np.testing.assert_allclose(features["second_per_grid_ts"], [2 / 12])


@pytest.mark.parametrize("name", ["llava_onevision", "llava_next_video", "video_llava"])
def test_videos_of_other_numbers_of_frames_in_a_batch_name_the_way_out(name: str) -> None:
    rows = [{"pixel_values_videos": np.zeros((1, frames, 3, 28, 28), dtype=np.float32)} for frames in (4, 6)]
    with pytest.raises(ModelError, check=lambda error: "media.max_frames" in str(error.hint)):
        merge_features(MediaProcessor.of(VIDEO[name]()).family, rows)


def test_other_frames_than_were_planned_are_noticed() -> None:
    media = MediaProcessor.of(VIDEO["qwen3_vl"]())
    [(_, video)] = decoded(media, [LONG])
    assert isinstance(video, DecodedVideo)
    late = DecodedVideo(frames=video.frames, frame_indices=(*video.frame_indices[:-1], 20), fps=12.0)
    other = clip(40, 70, 21, 6.0)
    with pytest.raises(RowError, check=reason_is("media_mismatch")):
        media.features([(other, late)])


# Families whose pictures no other test looks at, as their processors also watch or hear.
ALSO_SEE = (
    "cosmos3_edge", "gemma3n", "gemma4", "gemma4_unified", "glm5_next", "llava_next_video", "nemotron_h_omni",
    "phi4_multimodal", "qwen2_5_omni", "qwen3_omni_moe", "video_llava",
)  # fmt: skip


@pytest.mark.parametrize("family", ALSO_SEE)
def test_pictures_of_families_that_watch_or_hear_are_counted_too(family: str) -> None:
    processor = (VIDEO | AUDIO)[family]()
    media = MediaProcessor.of(processor)
    for index, (width, height) in enumerate(random_sizes(family, NUM_SIZES)):
        item = ImageHeader(width=width, height=height)
        [own] = own_picture_ids(family, processor, [media.placeholder("image")], [[picture(width, height, index)]])
        [string] = media.expand([item])
        assert processor.tokenizer(string, add_special_tokens=False)["input_ids"] == own, item


@pytest.mark.parametrize("family", [name for name in ALSO_SEE if name != "nemotron_h_omni"])
def test_features_of_pictures_of_families_that_watch_or_hear_are_merged_too(family: str) -> None:
    media = MediaProcessor.of((VIDEO | AUDIO)[family]())
    rows: list[Row] = [[PICTURE], [], [WIDE, PICTURE]]
    texts = ["hello " + " ".join([media.placeholder("image")] * len(row)) for row in rows]
    pictures = [[picture_of(item) for item in row if isinstance(item, ImageHeader)] for row in rows]
    nested: Any = pictures if family in NESTED else [item for row in pictures for item in row]
    padding = {"padding": True, "padding_side": "right", "return_tensors": None}
    own = media.processor(text=texts, images=nested, images_kwargs={"return_tensors": "pt"}, text_kwargs=padding)
    ours = merge_features(media.family, [media.features(decoded(media, row)) for row in rows])
    assert_same(media, ours, dict(own))
