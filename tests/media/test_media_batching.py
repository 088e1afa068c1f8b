"""Features of single samples, joined and merged, are what the processor makes of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from luthier.errors import ModelError, RowError
from luthier.media.families import CAT, PAD_CAT, STACK, Batching, Family, Modules
from luthier.media.files.decoding import DecodedImage
from luthier.media.processors.calling import TOKEN_OUTPUTS, join_features, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import ImageHeader
from tests.conftest import refused
from tests.media.test_media_families import NESTED, around, picture
from tests.media.tiny_processors import BUILDERS

# Rows of a batch: the sizes of their pictures. Alone, several, none, mixed with text.
SHAPES = ([(90, 61)], [(30, 40), (133, 52)], [], [(64, 64)], [(28, 120), (75, 75), (41, 200)])
BATCHES = {
    "alone": SHAPES[:1],
    "several": SHAPES[1:2],
    "mixed": SHAPES,
    "text first": [[], [(50, 70)]],
}


def decoded(pictures: list[Image.Image]) -> list[tuple[ImageHeader, DecodedImage]]:
    return [(ImageHeader(width=item.width, height=item.height), DecodedImage(pixels=item)) for item in pictures]


def pictures_of(batch: list[list[tuple[int, int]]]) -> list[list[Image.Image]]:
    return [[picture(*size, 10 * row + place) for place, size in enumerate(sizes)] for row, sizes in enumerate(batch)]


def text_of(family: str, media: MediaProcessor, count: int) -> str:
    opened, closed = around(family)
    slots = [f"{opened}{media.placeholder('image')}{closed}"] * count
    return "".join(slots) + "hello" if family == "paligemma" else " a ".join(["hello", *slots, "bye"])


def own_batch(family: str, media: MediaProcessor, rows: list[list[Image.Image]]) -> dict[str, Any]:
    """The processor's own output for the batch, padded on the right."""
    texts = [text_of(family, media, len(row)) for row in rows]
    images: Any = rows if family in NESTED else [item for row in rows for item in row]
    return dict(
        media.processor(
            text=texts,
            images=images,
            images_kwargs={"return_tensors": "pt"},
            text_kwargs={"padding": True, "padding_side": "right", "return_tensors": None},
        )
    )


def our_batch(media: MediaProcessor, rows: list[list[Image.Image]]) -> dict[str, NDArray[Any]]:
    samples = [media.features(decoded(row)) for row in rows]
    return merge_features(media.family, [join_features(media.family, [sample]) for sample in samples])


def as_array(value: Any) -> NDArray[Any]:
    if isinstance(value, list):
        return np.asarray([as_array(item) for item in value])
    is_half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return np.asarray(value.float() if is_half else value)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_merged_features_are_the_processors_own_batch(family: str, kind: str) -> None:
    media = MediaProcessor.of(BUILDERS[family]())
    rows = pictures_of(BATCHES[kind])
    if family == "mllama":  # whose processor fails on batches with a row of text alone
        rows = [row for row in rows if row]
    own = own_batch(family, media, rows)
    ours = our_batch(media, rows)
    skipped = TOKEN_OUTPUTS | set(media.family.token_inputs) | set(media.family.dropped)
    assert set(ours) == set(own) - skipped
    for key, value in ours.items():
        theirs = as_array(own[key])
        assert value.dtype == theirs.dtype, key
        np.testing.assert_array_equal(value, theirs, err_msg=key)


@pytest.mark.parametrize("family", [name for name in sorted(BUILDERS) if name != "mllama"])
def test_inputs_along_the_tokens_are_the_processors_own(family: str) -> None:
    media = MediaProcessor.of(BUILDERS[family]())
    rows = pictures_of(SHAPES)
    own = own_batch(family, media, rows)
    for number, row in enumerate(rows):
        shown = np.asarray(own["attention_mask"][number], dtype=bool)
        ids = np.asarray(own["input_ids"][number])[shown]
        for name, values in media.token_inputs(ids, media.features(decoded(row))).items():
            np.testing.assert_array_equal(values, as_array(own[name][number])[shown], err_msg=name)


def test_mllama_sees_each_picture_up_to_the_next() -> None:
    media = MediaProcessor.of(BUILDERS["mllama"]())
    for row in pictures_of(SHAPES):
        for text in ("<|image|>" * len(row) + "<s>ab", "<s>" + " x ".join(["a", *["<|image|>"] * len(row), "b"])):
            if not row:
                continue
            own = media.processor(text=[text], images=[row], images_kwargs={"return_tensors": "pt"})
            made = media.token_inputs(np.asarray(own["input_ids"][0]), media.features(decoded(row)))
            np.testing.assert_array_equal(made["cross_attention_mask"], own["cross_attention_mask"][0])


def test_mllama_gives_a_row_of_text_a_picture_that_is_not_there() -> None:
    media = MediaProcessor.of(BUILDERS["mllama"]())
    [row] = pictures_of([[(30, 40)]])
    merged = merge_features(media.family, [media.features(decoded(row)), {}])
    assert merged["aspect_ratio_mask"][1].tolist() == [[1, 0, 0, 0]]
    assert merged["aspect_ratio_ids"].tolist()[1] == [0]
    assert not merged["pixel_values"][1].any()


def test_a_row_of_several_samples_holds_the_pictures_of_all() -> None:
    """Packed: two samples of one and two pictures are a row of three, as if they were one sample."""
    for family in ("idefics3", "pixtral", "qwen2_vl"):
        media = MediaProcessor.of(BUILDERS[family]())
        [row] = pictures_of([[(30, 40), (133, 52), (64, 64)]])
        apart = [media.features(decoded(row[:1])), {}, media.features(decoded(row[1:]))]
        together = media.features(decoded(row))
        for key, value in join_features(media.family, apart).items():
            np.testing.assert_array_equal(value, together[key], err_msg=f"{family} {key}")


def test_what_was_decoded_is_compared_with_the_plan() -> None:
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    lies = [(ImageHeader(width=300, height=200), DecodedImage(pixels=picture(40, 40)))]
    with refused(RowError, "media_mismatch", "35", "<|image_pad|>", "4"):
        media.features(lies)


def test_media_of_no_sample_are_no_inputs() -> None:
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    assert media.features([]) == {}
    assert merge_features(media.family, [{}, {}]) == {}


FAMILY = Family(
    name="made_up",
    processors=(),
    batching={
        "flat": CAT,
        "padded": PAD_CAT,
        "stacked": STACK,
        "index": Batching(offset="flat"),
        "late": Batching(axis=1),
        "white": Batching(pad=7),
        "tupled": Batching(axis=1, by_row=True, pad=(1, 0)),
    },
    modules=Modules(tower=()),
)


def test_each_way_of_batching_on_integers() -> None:
    first = {
        "flat": np.array([1, 2]),
        "padded": np.array([[1, 2, 3]]),
        "stacked": np.array([[[1], [2]]]),
        "index": np.array([0, 1, -1]),
        "late": np.array([[1, 2]]),
        "white": np.array([[1]]),
        "tupled": np.array([[[5, 5]]]),
    }
    second = {
        "flat": np.array([3]),
        "padded": np.array([[4]]),
        "stacked": np.array([[[3]]]),
        "index": np.array([0, -1]),
        "late": np.array([[3]]),
        "white": np.array([[2, 3]]),
    }
    merged = merge_features(FAMILY, [first, {}, second])
    assert merged["flat"].tolist() == [1, 2, 3]
    assert merged["padded"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert merged["stacked"].tolist() == [[[1], [2]], [[0], [0]], [[3], [0]]]
    assert merged["index"].tolist() == [0, 1, -1, 2, -1]
    assert merged["late"].tolist() == [[1, 2, 3]]
    assert merged["white"].tolist() == [[1, 7], [2, 3]]
    assert merged["tupled"].tolist() == [[[5, 5]], [[1, 0]], [[1, 0]]]
    assert join_features(FAMILY, [first, second])["stacked"].tolist() == [[[1], [2], [3]]]


def test_sizes_that_disagree_and_are_not_padded_are_refused() -> None:
    with refused(ModelError, "'flat'", "made_up", "1", "2", "3"):
        merge_features(FAMILY, [{"flat": np.zeros((1, 2), np.int64)}, {"flat": np.zeros((1, 3), np.int64)}])
