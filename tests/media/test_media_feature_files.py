"""Features of media items in files: found again by the item, joined in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from luthier.errors import StoreError
from luthier.media import FeatureFiles, ItemFeatures, item_key, join_encoded
from luthier.records import Image, ImageHeader


def test_an_item_is_found_by_its_reference_and_version_and_a_damaged_file_is_told(tmp_path: Path) -> None:
    media, header = Image(source="a.png", root="/data"), ImageHeader(width=4, height=2, version="1")
    features = ItemFeatures(
        outputs={"image_grid_thw": np.array([[1, 2, 4]])},
        encoded={"mm_encoder_outputs.image.pooler_output": np.arange(6, dtype=np.uint16).reshape(2, 3)},
    )
    files = FeatureFiles(tmp_path)
    path = files.path(item_key(media, header))
    path.parent.mkdir()
    path.write_bytes(features.to_bytes())
    found = files.read(media, header)
    assert found is not None and files.keys() == {item_key(media, header)}
    for one, other in ((found.outputs, features.outputs), (found.encoded, features.encoded)):
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    assert files.read(media, ImageHeader(width=4, height=2, version="2")) is None
    assert files.read(Image(source="b.png", root="/data"), header) is None
    path.write_bytes(features.to_bytes()[:-3])
    with pytest.raises(StoreError, match=r"damaged[\s\S]*computed again"):
        files.read(media, header)


def test_features_of_items_are_joined_in_their_order() -> None:
    name = "mm_encoder_outputs.image.pooler_output"
    groups = [{name: np.array([[1]])}, {"image_grid_thw": np.array([2])}, {name: np.array([[3], [4]])}]
    joined = join_encoded(groups)
    assert joined.keys() == {name} and joined[name].tolist() == [[1], [3], [4]]


def test_one_path_from_two_folders_is_two_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = ImageHeader(width=4, height=2, version="1")
    keys = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        keys |= {item_key(Image(source=each, root="."), header) for each in ("a.png", str(tmp_path / "b.png"))}
    assert len(keys) == 3, "the same picture, by its absolute path, is one"
