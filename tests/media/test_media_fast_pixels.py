"""Pixels that are made in fewer passes and copies are those of the processor, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.errors import RowError
from luthier.kernels import write_patches
from luthier.media.files.decoding import DecodedImage
from luthier.media.processors.calling import join_features, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import ImageHeader
from tests.media.media_files import picture
from tests.media.tiny_processors import BUILDERS

SIZES = [(37, 91), (112, 112), (200, 33), (64, 57), (28, 28)]
MEAN, STD = np.float32([122.77, 116.75, 104.09]), np.float32([68.5, 66.63, 70.32])


def sample(*sizes: tuple[int, int]) -> list[tuple[ImageHeader, DecodedImage]]:
    return [
        (ImageHeader(width=width, height=height), DecodedImage(pixels=picture(width, height)))
        for width, height in sizes
    ]


def written(pixels: np.ndarray, patch: int, merge: int, depth: int) -> np.ndarray:
    height, width, channels = pixels.shape
    values = np.full(((height // patch) * (width // patch), channels * depth * patch**2), np.nan, dtype=np.float32)
    write_patches(pixels, MEAN, STD, values, patch=patch, merge=merge)
    return values


def is_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        own.keys() == made.keys() and all(np.array_equal(own[key], made[key]) for key in own)
        for own, made in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("patch", "merge", "depth"), [(14, 2, 2), (16, 2, 2), (4, 1, 3), (6, 3, 1)])
def test_every_byte_is_normalised_and_placed_as_the_processor_does(patch: int, merge: int, depth: int) -> None:
    """Each of the 256 values a channel can have is in it, so no rounding is left out."""
    rng = np.random.default_rng(patch)
    pixels = rng.permuted(np.arange(6 * 4 * (patch * merge) ** 2 * 3) % 256).astype(np.uint8)
    pixels_HWC = pixels.reshape(4 * patch * merge, 6 * patch * merge, 3)
    part = hf.Qwen2VLImageProcessor()
    planes = torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1)[None]
    scaled = part.normalize(planes.to(torch.float32), torch.from_numpy(MEAN), torch.from_numpy(STD))
    own = part.patchify(scaled, patch_size=patch, merge_size=merge, temporal_patch_size=depth)[0][0]
    made = written(pixels_HWC, patch, merge, depth)
    np.testing.assert_array_equal(made, own.numpy(), strict=True)
    changed = pixels_HWC.copy()
    changed[-1, -1, -1] ^= 1
    assert (written(changed, patch, merge, depth) != made).sum() == depth, "control: one byte shows, once a frame"


def test_views_of_other_memory_are_read_as_they_are() -> None:
    """What torch resizes comes as a view: its channels may not lie beside each other."""
    pixels = np.asarray(picture(56, 84))
    planar = np.ascontiguousarray(pixels.transpose(2, 0, 1)).transpose(1, 2, 0)
    assert not planar.flags.c_contiguous
    np.testing.assert_array_equal(written(planar, 14, 2, 2), written(pixels, 14, 2, 2))


def test_samples_together_get_what_each_gets_alone() -> None:
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    samples = [sample(*SIZES[:2]), [], sample(SIZES[2]), sample(*SIZES[3:])]
    together = media.features_of(samples)
    alone = [media.features(items) for items in samples]
    assert is_same(together, alone)
    assert not is_same(together, alone[::-1])


def test_what_was_made_together_is_batched_without_a_copy() -> None:
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    made = media.features_of([sample(*SIZES[:2]), sample(SIZES[2]), sample(*SIZES[3:])])
    rows = [join_features(media.family, made[:2]), join_features(media.family, made[2:])]
    batch = merge_features(media.family, rows)
    assert np.shares_memory(batch["pixel_values"], made[0]["pixel_values"])
    np.testing.assert_array_equal(batch["pixel_values"], np.concatenate([each["pixel_values"] for each in made]))
    turned = merge_features(media.family, [made[2], made[0], made[1]])  # not as they lie: these are copied
    assert not np.shares_memory(turned["pixel_values"], made[0]["pixel_values"])
    np.testing.assert_array_equal(turned["pixel_values"][: len(made[2]["pixel_values"])], made[2]["pixel_values"])


@pytest.mark.parametrize("order", [(0, 2), (0, 0), (1, 0)])
def test_pieces_with_gaps_or_twice_are_not_taken_for_one(order: tuple[int, int]) -> None:
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    made = media.features_of([sample(SIZES[number]) for number in range(3)])
    chosen = [made[number] for number in order]
    batch = merge_features(media.family, chosen)
    for key in ("pixel_values", "image_grid_thw"):
        np.testing.assert_array_equal(batch[key], np.concatenate([each[key] for each in chosen]))


def test_a_sample_that_is_not_what_was_planned_leaves_the_others_alone() -> None:
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    lie = [(ImageHeader(width=300, height=200), DecodedImage(pixels=picture(40, 40)))]
    first, second, third = media.features_of([sample(SIZES[0]), lie, sample(SIZES[1])])
    assert isinstance(second, RowError) and second.reason == "media_mismatch"
    assert is_same([first, third], [media.features(sample(SIZES[0])), media.features(sample(SIZES[1]))])


def test_a_picture_that_breaks_the_quick_way_is_refused_by_itself() -> None:
    """A side 200 times the other is refused by the processor's own rule, in the middle of a batch."""
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    thin = [(ImageHeader(width=64, height=57), DecodedImage(pixels=picture(9000, 28)))]
    first, second = media.features_of([sample(SIZES[0]), thin])
    assert isinstance(second, RowError) and second.reason == "media_refused"
    assert is_same([first], [media.features(sample(SIZES[0]))])


def test_a_fourth_channel_means_nothing() -> None:
    pixels = np.asarray(picture(56, 84))
    values = np.full((24, 1176), np.nan, dtype=np.float32)
    write_patches(np.dstack([pixels, pixels[:, :, :1]]), MEAN, STD, values, patch=14, merge=2)
    np.testing.assert_array_equal(values, written(pixels, 14, 2, 2))


@pytest.mark.parametrize("size", [(56, 84), (300, 200), (2300, 2000)])
def test_pictures_are_read_where_pillow_has_them(size: tuple[int, int]) -> None:
    """As large as their grid, resized, and so large that Pillow has them in several pieces."""
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    own = media.processor.image_processor([picture(*size)], return_tensors="pt")
    made = media.features(sample(size))
    np.testing.assert_array_equal(made["pixel_values"], own["pixel_values"].numpy(), strict=True)
