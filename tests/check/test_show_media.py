"""Media among tokens: one thing to see, wherever a row is shown, with its picture on a page and all its numbers."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from media_encoders import encoder_of
from PIL import Image as Pillow
from rich.console import Console
from verify_cases import AT, chat, message

from luthier.check.show import item_words, placed_media
from luthier.check.show.html import (
    LONGEST_SIDE,
    WAVE_HEIGHT,
    WAVE_WIDTH,
    outline,
    page_html,
    preview,
    previews,
    tokens_html,
)
from luthier.check.show.token_origins import (
    SegmentOrigin,
    TokenOrigin,
    leaf_owners,
    name_owners,
    speakers_of,
    token_owners,
)
from luthier.check.show.view import RowView, show_batch, show_pack, show_sample
from luthier.check.terminal import RowText, TokenTable
from luthier.collation import MediaInputs
from luthier.collation.collator import collate_packs
from luthier.config.choices import RowKind
from luthier.encoding.encoder import Encoder
from luthier.media.families import MediaKind
from luthier.media.files import MediaAccess
from luthier.media.geometry.videos import sampled_frames
from luthier.records import (
    Audio,
    AudioHeader,
    Document,
    Image,
    MediaItem,
    Pack,
    Preference,
    Row,
    Text,
    Video,
    VideoHeader,
)

SLOTS = ("<|image_pad|>", "<|video_pad|>")


def two_pictures(folder: Path) -> Row:
    wide, tall = (Image(source=str(folder / name)) for name in ("wide.png", "tall.png"))
    return chat(message("user", "Is ", wide, " or ", tall, " it?"), message("assistant", "The first."))


def film(folder: Path) -> Row:
    return chat(message("user", Video(source=str(folder / "film.mp4")), "What?"), message("assistant", "Gray."))


def view_of(row: Row, encoder: Encoder) -> RowView:
    """The row as ``luthier show`` has it, with owners."""
    sample, tokenizer = encoder.encode(row), encoder.tokenizer
    expansions = [expansion.text for expansion in encoder.expansions(row)]
    (pieces,) = leaf_owners(sample, token_owners(encoder.render(row), tokenizer, expansions=expansions))
    speakers = speakers_of(row, default_system=None)
    owners = name_owners(pieces, speakers, special=tokenizer.control.special)
    control = frozenset(tokenizer.control_id(token) for token in tokenizer.control.tokens)
    origin = SegmentOrigin(run=1, num_runs=1, start=0, run_tokens=len(owners), owners=tuple(owners))
    (view,) = show_sample(sample, tokenizer, control=control, origins=[origin])
    return view


def printed(renderable: object, *, colour: bool = False) -> str:
    file = io.StringIO()
    system = "truecolor" if colour else None
    Console(width=110, file=file, force_terminal=colour, color_system=system, _environ={}).print(renderable)
    return file.getvalue()


def page_of(row: Row, encoder: Encoder) -> str:
    view = view_of(row, encoder)
    found = previews([view], encoder.measurer.processor, encoder.measurer.access)
    return page_html([view], title="row 1", previews=found)


def data_of(page: str) -> dict[str, list[object]]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    ((segment),) = json.loads(data)
    return segment


# ------------------------------------------------------------------------------------------------------- terminal


def test_both_answers_of_a_pair_have_owners_whatever_media_they_hold(vl_folder: Path, media_folder: Path) -> None:
    """The rejected one has more of them than the chosen one."""
    encoder = encoder_of(vl_folder, media_folder, kind=RowKind.PAIR)
    wide, tall = (Image(source=str(media_folder / name)) for name in ("wide.png", "tall.png"))
    asked, said = message("user", wide, "What?"), message("assistant", "A shape.")
    rejected = (said, message("user", tall, " and ", wide, "?"), message("assistant", "Two."))
    row = Preference(prompt=(asked,), chosen=(message("assistant", "Wide."),), rejected=rejected)
    sample, texts = encoder.encode(row), [expansion.text for expansion in encoder.expansions(row)]
    assert (
        [item.media for item in encoder.expansions(row)] == list(encoder.render(row).media) == [wide, wide, tall, wide]
    )
    pieces = leaf_owners(sample, token_owners(encoder.render(row), encoder.tokenizer, expansions=texts))
    assert [len(of_run) for of_run in pieces] == [len(segment) for segment in sample.segments()]


def test_an_item_is_one_thing_in_the_text_of_a_row(vl_encoder: Encoder, media_folder: Path) -> None:
    view = view_of(two_pictures(media_folder), vl_encoder)
    counts = [item.length for item in view.media]
    shown = printed(RowText(row=view), colour=False)
    text = "\n".join(line.strip() for line in shown.splitlines())
    assert f"Is <|vision_start|>\n⟨image 90×40 · {counts[0]} tokens⟩\n<|vision_end|> or" in text
    assert f"<|vision_start|>\n⟨image 40×90 · {counts[1]} tokens⟩\n<|vision_end|> it?" in text
    assert not any(slot in text for slot in SLOTS)
    assert "2 media items" in text.splitlines()[0]


@pytest.mark.parametrize("colour", [True, False])
def test_in_a_terminal_an_item_has_a_line_of_its_own(vl_encoder: Encoder, media_folder: Path, colour: bool) -> None:
    view = view_of(two_pictures(media_folder), vl_encoder)
    shown = printed(RowText(row=view), colour=colour)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in shown.splitlines()]
    assert f"⟨image 90×40 · {view.media[0].length} tokens⟩" in lines
    assert not any(slot in shown for slot in SLOTS)
    assert ("⟦The first." in shown) is not colour


def test_the_table_has_one_line_for_an_item(vl_encoder: Encoder, media_folder: Path) -> None:
    view = view_of(two_pictures(media_folder), vl_encoder)
    lines = printed(TokenTable(row=view)).splitlines()
    assert len([line for line in lines if "⟨image ×" in line]) == 2
    first = next(line for line in lines if "⟨image ×" in line)
    slot = vl_encoder.tokenizer.control_id(SLOTS[0])
    assert first.split()[:2] == [str(view.media[0].start), str(slot)]
    assert f"×{view.media[0].length}⟩" in first
    assert "0 user · media" in first
    in_items = sum(item.length for item in view.media)
    assert len(lines) == 2 + len(view.tokens) - in_items + len(view.media)


def test_the_limit_of_a_first_look_counts_an_item_as_one(vl_encoder: Encoder, media_folder: Path) -> None:
    view = view_of(film(media_folder), vl_encoder)
    (item,) = view.media
    assert item.length > 20
    shown = printed(RowText(row=view, max_tokens=item.start + 3))
    assert "⟨video" in shown
    assert f"{len(view.tokens) - item.start - item.length - 2} more tokens" in shown
    assert "⟨video" not in printed(RowText(row=view, max_tokens=item.start))


def test_words_say_kind_size_and_tokens() -> None:
    film = VideoHeader(width=640, height=360, num_frames=250, fps=20.0)
    item = MediaItem(media=Video(source="a.mp4"), header=film, start=0, length=1200)
    assert item_words(item) == "video 640×360 · 12.5 s · 1,200 tokens"
    pictures = replace(item, header=replace(film, extracted=True, num_frames=8), length=1)
    assert item_words(pictures) == "video 640×360 · 8 pictures · 1 token"
    sound = AudioHeader(num_samples=48_000, sampling_rate=16_000)
    assert item_words(replace(item, media=Audio(source="a.wav"), header=sound)) == "audio 3.0 s · 1,200 tokens"


# --------------------------------------------------------------------------------------------------------- owners


@pytest.mark.parametrize("family", ["vl_encoder", "timed_encoder"])
def test_all_that_stands_for_an_item_belongs_to_the_media_of_its_message(
    family: str, media_folder: Path, request: pytest.FixtureRequest
) -> None:
    view = view_of(film(media_folder), request.getfixturevalue(family))
    (item,) = view.media
    inside = view.tokens[item.start : item.start + item.length]
    assert {token.owner for token in inside} == {TokenOrigin(message=0, role="user", field="media")}
    assert {token.media for token in inside} == {0}
    assert {token.media for token in view.tokens if token not in inside} == {None}


def test_media_of_a_document_have_a_voice_of_their_own(vl_encoder: Encoder, media_folder: Path) -> None:
    parts = (Image(source=str(media_folder / "wide.png")), Text(text="A bird."))
    view = view_of(Document(parts=parts, address=AT), vl_encoder)
    owner = view.tokens[view.media[0].start].owner
    assert owner == TokenOrigin(field="media")
    assert owner is not None and owner.voice == "media"


def test_items_of_a_pack_are_placed_in_the_pack(vl_encoder: Encoder, media_folder: Path) -> None:
    (first,) = vl_encoder.encode(two_pictures(media_folder)).segments()
    (second,) = vl_encoder.encode(film(media_folder)).segments()
    pack = Pack(segments=(first, second))
    view = show_pack(pack, vl_encoder.tokenizer, title="pack")
    assert view.media == placed_media(pack.segments)
    for number, item in enumerate(view.media):
        tokens = view.tokens[item.start : item.start + item.length]
        assert {token.media for token in tokens} == {number}
        assert {token.name for token in tokens} == {SLOTS[0] if number < 2 else SLOTS[1]}


# ---------------------------------------------------------------------------------------------------------- batch


def test_a_batch_shows_positions_on_all_axes(vl_encoder: Encoder, media_folder: Path) -> None:
    pack = Pack(segments=tuple(vl_encoder.encode(two_pictures(media_folder)).segments()))
    media = MediaInputs(vl_encoder.media_source)
    media.access = vl_encoder.measurer.access
    for packed in (True, False):
        batch = collate_packs([pack], packed=packed, pad_token_id=0, media=media)
        (view,) = show_batch(batch, vl_encoder.tokenizer, title="batch", packs=[pack])
        assert [token.position for token in view.tokens] == list(range(len(view.tokens)))
        found = np.array([token.axes for token in view.tokens])
        expected = batch.model_inputs["position_ids"][-3:, 0].T.numpy()
        assert np.array_equal(found, expected)
        slot = view.tokens[view.media[0].start + 1]
        assert len(set(slot.axes)) > 1
        assert slot.place == f"{slot.position} ({slot.axes[0]},{slot.axes[1]},{slot.axes[2]})"
        assert view.tokens[0].place == "0 (0)"


def test_media_that_are_lost_are_a_finding(vl_encoder: Encoder, media_folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "gone.png"
    own.write_bytes((media_folder / "wide.png").read_bytes())
    encoder = encoder_of(Path(vl_encoder.model.name_or_path), tmp_path)
    row = chat(message("user", Image(source=str(own)), "Who?"), message("assistant", "Ann."))
    (gone,) = encoder.encode(row).segments()
    (kept,) = vl_encoder.encode(two_pictures(media_folder)).segments()
    own.unlink()
    pack = Pack(segments=(gone, kept))
    media = MediaInputs(encoder.media_source)
    media.access = MediaAccess(encoder.media.model_copy(update={"roots": [tmp_path, media_folder]}))
    batch = collate_packs([pack], packed=True, pad_token_id=0, media=media)
    (view,) = show_batch(batch, vl_encoder.tokenizer, title="batch", packs=[pack])
    lost, other = view.segments
    assert "media_missing" in (lost.finding or "")
    assert other.finding is None
    assert [item.start for item in view.media] == [item.start + len(gone) for item in kept.media]


# ----------------------------------------------------------------------------------------------------------- page


def test_a_page_has_a_box_for_each_item_and_every_number(vl_encoder: Encoder, media_folder: Path) -> None:
    row = two_pictures(media_folder)
    view, page = view_of(row, vl_encoder), page_of(row, vl_encoder)
    assert page.count('<i class="item"') == 2
    for item, name in zip(view.media, ("wide.png", "tall.png"), strict=True):
        assert f'<span class="what">{item_words(item)}</span><span class="of">{name}</span>' in page
        assert f"<span>&lt;|image_pad|&gt;<em>×{item.length}</em></span>" in page
    data = data_of(page)
    assert data["ids"] == [token.id for token in view.tokens]
    assert data["names"].count("<|image_pad|>") == sum(item.length for item in view.media)
    # the script goes through what is shown and takes as many tokens as the sizes say
    shown = re.findall(r"<([bi])(?: [^>]*)?>", page.split('<article class="segment">')[1].split("</article>")[0])
    assert len(shown) == sum(size > 0 for size in data["sizes"])
    assert sum(data["sizes"]) == len(view.tokens)


def test_thumbnails_are_small_pictures_of_the_item(vl_encoder: Encoder, media_folder: Path) -> None:
    row = chat(message("user", Image(source=str(media_folder / "blue.png"))), message("assistant", "Blue."))
    page = page_of(row, vl_encoder)
    (uri,) = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" width="160" height="80"', page)
    picture = Pillow.open(io.BytesIO(base64.b64decode(uri)))
    assert picture.size == (LONGEST_SIDE, LONGEST_SIDE // 2)
    red, green, blue = picture.convert("RGB").getpixel((80, 40))
    assert blue > 240 and max(red, green) < 16


def test_only_a_page_with_pictures_may_show_pictures(vl_encoder: Encoder, media_folder: Path) -> None:
    row = two_pictures(media_folder)
    assert "default-src 'none'; img-src data:; style-src" in page_of(row, vl_encoder)
    bare = page_html([view_of(row, vl_encoder)], title="row 1")
    assert "img-src" not in bare and "<img" not in bare
    assert bare.count('<i class="item"') == 2
    fragment = tokens_html([view_of(row, vl_encoder)])
    assert "⟨" not in fragment and fragment.count('<i class="item" title="') == 2


def test_a_video_shows_the_frames_that_are_taken_with_their_times(timed_encoder: Encoder, media_folder: Path) -> None:
    (item,) = view_of(film(media_folder), timed_encoder).media
    processor = timed_encoder.measurer.processor
    assert processor is not None and isinstance(item.header, VideoHeader)
    found = preview(item, processor, timed_encoder.measurer.access)
    taken = sampled_frames(processor.settings(MediaKind.VIDEO), item.header)
    assert 1 < len(taken) < 12
    assert [picture.caption for picture in found.pictures] == [f"{index / 10:.2f} s" for index in taken]
    assert found.facts == ("film.mp4", "30 frames, 10 a second", f"the model sees {len(taken)} frames")


def test_a_long_video_shows_some_of_its_frames_from_first_to_last(vl_encoder: Encoder, media_folder: Path) -> None:
    (item,) = view_of(film(media_folder), vl_encoder).media
    extracted = replace(item, header=replace(item.header, extracted=True))  # so that all 30 are taken
    assert vl_encoder.measurer.processor is not None
    found = preview(extracted, vl_encoder.measurer.processor, vl_encoder.measurer.access)
    assert len(found.pictures) == 12
    assert (found.pictures[0].caption, found.pictures[-1].caption) == ("0.00 s", "2.90 s")
    assert found.facts[-1] == "the model sees 30 frames, 12 of them here"


def test_times_that_a_processor_writes_are_in_the_box(timed_encoder: Encoder, media_folder: Path) -> None:
    page = page_of(film(media_folder), timed_encoder)
    slots = re.findall(r'<span class="slots">(.*?)</span></i>', page)
    assert len(slots) == 1
    inside = re.findall(r"<span>(.*?)</span>", slots[0] + "</span>")
    assert any(re.fullmatch(r"&lt;\d+\.\d seconds&gt;", text) for text in inside)
    assert any(re.fullmatch(r"&lt;\|video_pad\|&gt;<em>×\d+</em>", text) for text in inside)


def test_a_sound_is_an_outline_with_its_seconds(vl_encoder: Encoder, media_folder: Path) -> None:
    header = AudioHeader(num_samples=32_000, sampling_rate=16_000)
    access = vl_encoder.measurer.access
    media = Audio(source=str(media_folder / "sound.wav"))
    with access.open(media.source) as content:
        header = replace(header, version=content.version)
    item = MediaItem(media=media, header=header, start=0, length=50)
    assert vl_encoder.measurer.processor is not None
    found = preview(item, vl_encoder.measurer.processor, access)
    assert found.facts == ("sound.wav", "32,000 samples, 16,000 a second")
    heights = outline_heights(found.wave or "")
    assert len(heights) == WAVE_WIDTH
    # the first second is ten times softer than the second one
    assert np.allclose(heights[: WAVE_WIDTH // 2 - 1].mean() * 10, heights[WAVE_WIDTH // 2 + 1 :].mean(), rtol=0.05)


def outline_heights(path: str) -> np.ndarray:
    points = np.array([[float(number) for number in point.split(",")] for point in re.findall(r"[\d.]+,[\d.]+", path)])
    over, under = points[: len(points) // 2, 1], points[len(points) // 2 :, 1][::-1]
    return under - over


@pytest.mark.parametrize("samples", [np.zeros(5_000), np.ones(1), np.full(7, -1.0)], ids=["silence", "one", "short"])
def test_outlines_of_odd_sounds_stay_in_their_box(samples: np.ndarray) -> None:
    path = outline(samples.astype(np.float32))
    numbers = [tuple(map(float, point.split(","))) for point in re.findall(r"-?[\d.]+,-?[\d.]+", path)]
    assert numbers and all(0 <= x <= WAVE_WIDTH and 0 <= y <= WAVE_HEIGHT for x, y in numbers)


def test_what_cannot_be_decoded_any_more_is_said_in_its_box(
    vl_encoder: Encoder, media_folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "gone.png"
    own.write_bytes((media_folder / "wide.png").read_bytes())
    encoder = encoder_of(Path(vl_encoder.model.name_or_path), tmp_path)
    view = view_of(chat(message("user", Image(source=str(own))), message("assistant", "Ann.")), encoder)
    own.unlink()
    found = previews([view], encoder.measurer.processor, encoder.measurer.access)
    page = page_html([view], title="row 1", previews=found)
    assert '<span class="lost">! media_missing' in page
    assert "<img" not in page


def test_the_name_of_a_file_cannot_break_out_of_the_page(vl_encoder: Encoder, media_folder: Path) -> None:
    name = '"><script>alert(1)<img onerror=x>.png'
    (media_folder / name).write_bytes((media_folder / "wide.png").read_bytes())
    page = page_of(
        chat(message("user", Image(source=str(media_folder / name))), message("assistant", "Ann.")), vl_encoder
    )
    assert page.count("<script") == 2  # the page's own data and script
    assert "<img onerror" not in page
