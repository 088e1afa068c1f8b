"""Media of rows: by marker, by column, by part; counted, kept as references, never opened."""

from __future__ import annotations

from typing import Any

import pytest
from spoken_rows import ASSISTANT, chat, convert, said

from luthier.errors import RowError
from luthier.records import Audio, Conversation, Image, Preference, Text, Video

# -------------------------------------------------------------------------------------------------------- media


def test_markers_take_the_media_of_their_kind_in_order_relative_to_the_file() -> None:
    row = chat(
        {"role": "user", "content": "<image>A<video><image> and <audio>"},
        ASSISTANT,
        images=["1.png", "/abs/2.png"],
        videos=[["f1.png", "f2.png"]],
    )
    assert row.messages[0].parts == (
        Image(source="data/1.png", root="data"),
        Text(text="A"),
        Video(source=("data/f1.png", "data/f2.png"), root="data"),
        Image(source="/abs/2.png", root="data"),
        Text(text=" and <audio>"),
    )


@pytest.mark.parametrize("item", ["data/a.png", {"path": "data/a.png"}, {"url": "data/a.png"}])
def test_media_are_written_in_several_ways(item: Any) -> None:
    row = convert({"messages": [{"role": "user", "content": "<image>"}], "images": [item]}, media_root="/pictures")
    assert isinstance(row, Conversation)
    assert row.messages[0].parts == (Image(source="/pictures/data/a.png", root="/pictures"),)


def test_media_bytes_and_parts_without_a_reference() -> None:
    bare = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    assert chat(bare, images=[{"bytes": "iVBO", "path": None}]).messages[0].parts[0] == Image(source=b"\x89PN")
    sound = {"type": "input_audio", "input_audio": {"data": "iVBO", "format": "wav"}}
    assert chat({"role": "user", "content": [sound]}).messages[0].parts == (Audio(source=b"\x89PN"),)
    with pytest.raises(RowError, match=r"bad_media.*base64"):
        chat(bare, images=[{"bytes": "?"}])


def test_the_rate_of_a_videos_frames_stands_beside_them_or_with_them() -> None:
    frames = ["1.png", "2.png"]
    ways = ({"video": frames, "fps": 1}, {"video": frames, "sample_fps": 1}, {"frames": frames, "fps": 1})
    for way in (*ways, {"video": {"frames": frames, "fps": 1}}, {"value": frames, "fps": 1.0}):
        (part,) = chat({"role": "user", "content": [{"type": "video", **way}]}, ASSISTANT).messages[0].parts
        assert part == Video(source=("data/1.png", "data/2.png"), root="data", fps=1.0)
    (part,) = chat({"role": "user", "content": [{"type": "video", "video": frames}]}, ASSISTANT).messages[0].parts
    assert part == Video(source=("data/1.png", "data/2.png"), root="data")


@pytest.mark.parametrize(("text", "images"), [("<image>", ["a", "b"]), ("<image><image>", ["a"]), ("none", ["a"])])
def test_places_and_media_must_agree_in_number(text: str, images: list[str]) -> None:
    with pytest.raises(RowError, match=rf"media_count: {text.count('<image>')} places? .* {len(images)} in the row"):
        chat({"role": "user", "content": text}, images=images)


@pytest.mark.parametrize("images", [[], None])
def test_without_media_in_the_row_markers_are_text(images: Any) -> None:
    assert chat({"role": "user", "content": "<image>"}, images=images).messages == (said("user", "<image>"),)


def test_a_pair_whose_sides_both_hold_the_prompt_takes_each_picture_in_both() -> None:
    user = {"role": "user", "content": "<image>"}
    row = convert({"chosen": [user, ASSISTANT], "rejected": [user, ASSISTANT], "images": ["a.png"]})
    assert isinstance(row, Preference)
    assert row.prompt[0].parts == (Image(source="data/a.png", root="data"),)
