"""Rows whose text holds what a processor writes for an item: its place, if it is what this model's would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoProcessor

import luthier
from luthier.errors import RowError
from luthier.media.processors.processor import MediaProcessor
from luthier.records import ImageHeader
from luthier.sources.formats.media import parted_slots, written_slots
from tests.conftest import reason_is, refused
from tests.media.tiny_folder import write_folder

SIZES = {"wide.png": (120, 56), "tall.png": (56, 140)}
OPEN, PAD, CLOSE = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("model"))
    for name, size in SIZES.items():
        Image.new("RGB", size).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(folder)


def slots_of(processor: Any, name: str) -> str:
    width, height = SIZES[name]
    [string] = MediaProcessor.of(processor).expand([ImageHeader(width=width, height=height)])
    assert string == PAD * (len(string) // len(PAD)) and len(string) > 3 * len(PAD)
    return string


def row_of(question: str, *names: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "Ann."}]
    return {"messages": messages, "images": list(names)}


def encoded(row: dict[str, Any], folder: Path, processor: Any) -> Any:
    absolute = {**row, "images": [str(folder / name) for name in row["images"]]}
    tokenizer = luthier.load_tokenizer(folder)
    return luthier.encode(absolute, tokenizer, processor=processor, media={"roots": [str(folder)]})


@pytest.mark.parametrize("frame", ["{}", f"{OPEN}{{}}{CLOSE}"])
def test_a_row_that_holds_its_slots_is_the_row_with_a_marker(frame: str, folder: Path, processor: Any) -> None:
    held = encoded(row_of(f"See: {frame.format(slots_of(processor, 'wide.png'))} what?", "wide.png"), folder, processor)
    marked = encoded(row_of("See: <image> what?", "wide.png"), folder, processor)
    assert held.input_ids.tolist() == marked.input_ids.tolist()
    assert held.media == marked.media


def test_items_beside_each_other_are_told_apart_by_their_marks(folder: Path, processor: Any) -> None:
    both = "".join(f"{OPEN}{slots_of(processor, name)}{CLOSE}" for name in SIZES)
    held = encoded(row_of(f"{both}Which?", *SIZES), folder, processor)
    marked = encoded(row_of("<image><image>Which?", *SIZES), folder, processor)
    assert held.input_ids.tolist() == marked.input_ids.tolist()


@pytest.mark.parametrize("more", [-1, 1])
def test_another_number_of_slots_is_refused_with_both_numbers(more: int, folder: Path, processor: Any) -> None:
    count = slots_of(processor, "wide.png").count(PAD)
    reason = (
        rf"media_slots: the text has {count + more} <\|image_pad\|> for this image, and its header promises {count}"
    )
    with pytest.raises(RowError, match=reason):
        encoded(row_of(f"{PAD * (count + more)} what?", "wide.png"), folder, processor)
    behind = f"{slots_of(processor, 'tall.png')} and {PAD * (count + more)} what?"
    with pytest.raises(RowError, match=reason):
        encoded(row_of(behind, "tall.png", "wide.png"), folder, processor)


def test_other_marks_than_the_models_own_are_refused(folder: Path, processor: Any) -> None:
    with pytest.raises(RowError, check=reason_is("media_slots")):
        encoded(row_of(f"<img>{slots_of(processor, 'wide.png')}</img> what?", "wide.png"), folder, processor)


def test_without_a_stretch_for_each_item_the_row_is_refused_as_ever(folder: Path, processor: Any) -> None:
    slots = slots_of(processor, "wide.png")
    for question in (f"{slots} and?", f"{slots} and <image>", "what?", "<br><br> a <br><br> b <br><br>"):
        with refused(RowError, "media_count", "2"):
            encoded(row_of(question, *SIZES), folder, processor)


def test_slots_are_text_in_a_row_without_media_and_beside_markers(folder: Path, processor: Any) -> None:
    slot = luthier.load_tokenizer(folder).control_id(PAD)
    told = encoded(row_of(f"What is {PAD * 3}?"), folder, processor)
    assert slot not in told.input_ids.tolist() and not told.media
    beside = encoded(row_of(f"<image> What is {PAD * 3}?", "wide.png"), folder, processor)
    [item] = beside.media
    assert beside.input_ids.tolist().count(slot) == item.length


@pytest.mark.parametrize(
    "text, spans, parts",
    [
        ("a <i><i> b", [(2, 8)], [(2, 8)]),
        ("<s><i><i><e><s><i><i><e>", [(0, 24)], [(0, 12), (12, 24)]),
        ("<i><i><i>", [(0, 9)], [(0, 9)]),
        ("[IMG][IMG][END] c", [(0, 15)], [(0, 15)]),
        ("<s>12*15<t><i><i><e>", [(0, 20)], [(0, 20)]),
        ("<b>bold</b> <i>", [], []),
        ("1 < 2 > 0", [], []),
    ],
)
def test_stretches_are_found_by_a_token_that_is_repeated(
    text: str, spans: list[tuple[int, int]], parts: list[tuple[int, int]]
) -> None:
    assert written_slots(text) == spans
    assert parted_slots(text) == parts
