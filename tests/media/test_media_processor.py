"""The adapter: which row a processor gets, what a run's options do to it, and processors that nobody has described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf

from luthier.config.inputs import MediaConfig
from luthier.errors import ModelError, RowError
from luthier.layout.position_schemes import position_scheme
from luthier.media.families import MediaKind, PackingSupport
from luthier.media.families.rows_grid import quick_patches
from luthier.media.families.table import FAMILIES, family_of
from luthier.media.files.decoding import DecodedImage
from luthier.media.processors.calling import AreaLimits, merge_features
from luthier.media.processors.processor import MediaProcessor, process_pictures
from luthier.records import ImageHeader
from tests.conftest import reason_is, refused
from tests.media.test_media_families import our_ids, own_ids, picture
from tests.media.tiny_processors import BUILDERS, tiny_tokenizer

LARGE = ImageHeader(width=300, height=200)


def slots(media: MediaProcessor, header: ImageHeader = LARGE) -> int:
    return media.expand([header])[0].count("<|image_pad|>")


# -------------------------------------------------------------------------------------------------------- the table


def test_names_of_families_are_unique() -> None:
    names = [family.name for family in FAMILIES.values()]
    assert len(set(names)) == len(names)
    assert names == list(FAMILIES)


def test_every_row_names_classes_that_exist() -> None:
    remote = {
        "KimiVLProcessor",
        "MiniCPMOProcessor",
        "MiniCPMVProcessor",
        "MossVLProcessor",
        "NemotronParseProcessor",
        "YoutuVLProcessor",
    }  # with their models
    for family in FAMILIES.values():
        for name in family.processors:
            assert name in remote or hasattr(hf, name), f"{family.name}: transformers has no {name}"


def test_every_row_says_why_it_is_padded_and_how_positions_are_counted() -> None:
    for family in FAMILIES.values():
        assert bool(family.reason) == (family.packing is PackingSupport.PADDED), family.name
        if family.positions not in (None, "canvas"):  # a canvas also wants the names of its marks
            position_scheme(family.positions, {})


def test_models_that_share_a_class_are_told_apart_by_the_type_of_the_model() -> None:
    processor = BUILDERS["qwen3_vl"]()
    assert family_of(processor).name == family_of(processor, "qwen3_vl_moe").name == "qwen3_vl"
    assert family_of(processor, "qwen3_5_moe").name == "qwen3_5"


# ---------------------------------------------------------------------------------------------------------- options


def test_options_of_a_run_change_what_is_planned_and_what_is_made() -> None:
    processor = BUILDERS["qwen2_vl"]()
    plain = MediaProcessor.of(processor, MediaConfig())
    small = MediaProcessor.of(processor, MediaConfig(max_pixels=8 * 28 * 28))
    assert slots(plain) == 35
    assert slots(small) == 6
    made = small.features([(LARGE, DecodedImage(pixels=picture(300, 200)))])
    assert made["image_grid_thw"].prod() == 6 * 4
    assert plain.fingerprint == MediaProcessor.of(processor).fingerprint != small.fingerprint


def test_tiles_are_switched_off_by_an_option() -> None:
    media = MediaProcessor.of(BUILDERS["internvl"](), MediaConfig(crop_to_patches=False))
    assert media.expand([LARGE]) == ["<img>" + "<IMG_CONTEXT>" * 4 + "</img>"]
    assert media.features([(LARGE, DecodedImage(pixels=picture(300, 200)))])["pixel_values"].shape == (1, 3, 28, 28)


def test_tiles_that_no_option_switches_off_are_not_said_to_be_off() -> None:
    with pytest.raises(ModelError, match="crop_to_patches"):
        MediaProcessor.of(BUILDERS["llava_next"](), MediaConfig(crop_to_patches=False))


def test_limits_that_a_processor_does_not_know_are_met_before_it() -> None:
    media = MediaProcessor.of(BUILDERS["pixtral"](), MediaConfig(max_pixels=2000))
    made = media.features([(LARGE, DecodedImage(pixels=picture(300, 200)))])
    assert made["image_sizes"].tolist() == [[48, 64]]  # 54x36, in whole patches of 16
    assert media.expand([LARGE])[0].count("[IMG]") == 3 * 4


def test_areas_are_within_their_limits() -> None:
    limits = AreaLimits(least=400, most=10000)
    assert limits.header(ImageHeader(width=400, height=100)) == ImageHeader(width=200, height=50)
    assert limits.header(ImageHeader(width=50, height=50)) == ImageHeader(width=50, height=50)
    assert limits.header(ImageHeader(width=3, height=3)) == ImageHeader(width=20, height=20)
    for width, height in ((999, 7), (1, 20000), (333, 334), (7, 3)):
        area = np.prod(limits.picture(picture(width, height)).size)
        assert 400 <= area <= 10000 or min(width, height) == 1


def test_an_option_that_a_family_cannot_meet_is_refused() -> None:
    with refused(ModelError, "media.pan_and_scan", "max_pixels"):
        MediaProcessor.of(BUILDERS["qwen2_vl"](), MediaConfig(pan_and_scan=True))
    MediaProcessor.of(BUILDERS["llava"](), MediaConfig(fps=2.0))  # it sees no videos: nothing to meet


# ------------------------------------------------------------------------------------------------- files, other classes


def test_a_saved_processor_plans_as_the_one_that_was_saved(tmp_path: Path) -> None:
    processor = BUILDERS["qwen3_vl"]()
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    loaded = MediaProcessor.load(str(tmp_path), MediaConfig())
    assert loaded is not None
    assert loaded.family.name == "qwen3_5"
    assert loaded.expand([LARGE]) == MediaProcessor.of(processor).expand([LARGE])


def test_a_folder_without_a_processor_is_a_text_model(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    assert MediaProcessor.load(str(tmp_path), MediaConfig()) is None


def test_a_damaged_processor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    with pytest.raises(ModelError, match="the processor cannot be loaded"):
        MediaProcessor.load(str(tmp_path), MediaConfig())


class NewProcessor(hf.LlavaNextProcessor):
    """A class that the table does not know; what it writes differs from its parent's by a mark."""

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        return f"({super().replace_image_token(image_inputs, image_idx, **kwargs)})"


class SilentProcessor(hf.ProcessorMixin):
    """A class that does not say what it writes."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> MediaProcessor:
    monkeypatch.setattr("luthier.media.families.table.FAMILIES", {})
    parent = BUILDERS["llava_next"]()
    return MediaProcessor.of(
        NewProcessor(parent.image_processor, parent.tokenizer, 7, "default", num_additional_image_tokens=1)
    )


def test_a_class_without_a_row_is_counted_by_doing_and_padded(unknown: MediaProcessor) -> None:
    assert unknown.family.packing is PackingSupport.PADDED
    assert "no row" in unknown.family.reason
    for width, height in ((40, 90), (64, 64)):
        own = own_ids("new", unknown.processor, ["<image>"], [[picture(width, height)]])
        assert our_ids(unknown, ["", ""], [ImageHeader(width=width, height=height)]) == own[0]


def test_its_outputs_are_batched_where_that_is_plain_and_else_refused(unknown: MediaProcessor) -> None:
    def made(width: int, height: int) -> dict[str, Any]:
        return unknown.features(
            [(ImageHeader(width=width, height=height), DecodedImage(pixels=picture(width, height)))]
        )

    merged = merge_features(unknown.family, [made(40, 90), made(90, 40)])
    assert merged["image_sizes"].tolist() == [[90, 40], [40, 90]]
    with pytest.raises(ModelError, match="'pixel_values' of unknown"):
        merge_features(unknown.family, [made(40, 90), made(64, 64)])  # three tiles and five


def test_a_class_that_does_not_say_what_it_writes_is_refused() -> None:
    silent = SilentProcessor(BUILDERS["llava"]().image_processor, BUILDERS["llava"]().tokenizer)
    with refused(ModelError, "SilentProcessor", "replace_image_token"):
        MediaProcessor.of(silent)


def test_a_setting_that_a_formula_needs_and_does_not_find_is_refused() -> None:
    settings = MediaProcessor.of(BUILDERS["qwen2_vl"]()).settings(MediaKind.IMAGE)
    with pytest.raises(ModelError, match="has no setting 'num_mirrors'"):
        settings["num_mirrors"]


def test_sizes_that_break_a_processor_are_the_rows_fault() -> None:
    media = MediaProcessor.of(BUILDERS["lfm2_vl"]())
    with pytest.raises(RowError, check=reason_is("media_refused")):
        media.features([(ImageHeader(width=68, height=1307), DecodedImage(pixels=picture(68, 1307)))])


# --------------------------------------------------------------------------------------------------------- quick pixels


@pytest.mark.parametrize("patch", [14, 16])
def test_quick_patches_are_the_processors_own_bit_for_bit(patch: int) -> None:
    sizes = [(37, 91), (112, 112), (200, 33), (64, 57), (28, 28), (300, 200)]
    images = hf.Qwen2VLImageProcessor(
        patch_size=patch, size={"shortest_edge": 4 * patch * patch, "longest_edge": 90 * patch * patch}
    )
    family = BUILDERS["qwen2_vl"]()
    media = MediaProcessor.of(hf.Qwen2VLProcessor(images, family.tokenizer, family.video_processor))
    settings = media.settings(MediaKind.IMAGE)
    pictures = [picture(*size, seed) for seed, size in enumerate(sizes)]
    quick, own = quick_patches(settings, [pictures]), process_pictures(settings, pictures)[0]
    assert quick is not None
    for key in ("pixel_values", "image_grid_thw"):
        np.testing.assert_array_equal(quick[0][key], own[key].numpy(), strict=True)


@pytest.mark.parametrize("setting", [{"do_normalize": False}, {"resample": 2}, {"do_resize": False}])
def test_with_other_settings_the_processor_makes_the_patches(setting: dict[str, Any]) -> None:
    family = BUILDERS["qwen2_vl"]()
    images = hf.Qwen2VLImageProcessor(**setting)
    media = MediaProcessor.of(hf.Qwen2VLProcessor(images, family.tokenizer, family.video_processor))
    assert quick_patches(media.settings(MediaKind.IMAGE), [[picture(56, 56)]]) is None
    made = media.features([(ImageHeader(width=56, height=56), DecodedImage(pixels=picture(56, 56)))])
    np.testing.assert_array_equal(made["pixel_values"], images([picture(56, 56)], return_tensors="pt")["pixel_values"])


def test_a_processor_without_its_packages_says_which_and_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    monkeypatch.setattr("luthier.media.processors.processor.find_spec", lambda name: None if name == "PIL" else name)
    with pytest.raises(ModelError) as refused:
        MediaProcessor.load(str(tmp_path), MediaConfig())
    assert "PIL" in refused.value.message and "torchvision" not in refused.value.message
    assert "pip install" in str(refused.value.hint) and "pillow" in str(refused.value.hint)
