"""Rows of every family of models: what is encoded from headers alone is what the processor makes of decoded media.

The oracle is transformers' own processor on the rendered text, through the check ``processor_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from media_encoders import encoder_of
from verify_cases import chat, message

from luthier.check.verify import Check
from luthier.check.verify.row import RowVerifier
from luthier.records import Audio, Image, Media, Video
from tests.media.tiny_av_processors import AUDIO, VIDEO
from tests.media.tiny_processors import BUILDERS

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Processors that write more around a prompt than a chat template says; `luthier verify` finds it.
WRITES_MORE = {("image", "paligemma"), ("image", "chameleon")}
# Tiny tokenizers and files that lack what encoding needs, by what they lack.
LACKING = {
    ("image", "qianfan_ocr"): "a token for the placeholder",
    ("video", "cohere_compass"): "a token for the placeholder",
    ("image", "kimi_vl"): "files by which a processor is found",
    ("video", "minimax_m3_vl"): "videos of other sizes than multiples of 28",
    ("audio", "voxtral"): "a stop token",
}
CASES = [
    (kind, name, build)
    for kind, table in (("image", BUILDERS), ("video", VIDEO), ("audio", AUDIO))
    for name, build in sorted(table.items())
    if (kind, name) not in LACKING
]


def media_of(kind: str, folder: Path) -> list[Media]:
    match kind:
        case "image":
            return [Image(source=str(folder / name)) for name in ("wide.png", "tall.png")]
        case "video":
            return [Video(source=str(folder / "film.mp4"))]
        case _:
            return [Audio(source=str(folder / "sound.wav"))]


@pytest.mark.parametrize(("kind", "name", "build"), CASES, ids=[f"{kind}-{name}" for kind, name, _ in CASES])
def test_a_row_is_what_the_processor_makes_of_it(
    kind: str, name: str, build: Callable[[], Any], media_folder: Path, tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path)
    encoder = encoder_of(tmp_path, media_folder, chat_template=TEMPLATE)
    parts = [part for item in media_of(kind, media_folder) for part in (item, " and then ")]
    row = chat(message("user", "Look: ", *parts, "what?"), message("assistant", "Nothing much."))
    verdict = RowVerifier(encoder, num_decoded=1).verify(row, encoder.encode(row))
    assert verdict.applied >= {Check.MEDIA_PLACES, Check.MEDIA_TOKENS, Check.PROCESSOR_TOKENS}
    found = {violation.check for violation in verdict.violations}
    assert found == ({Check.PROCESSOR_TOKENS} if (kind, name) in WRITES_MORE else set()), verdict.violations


@pytest.mark.parametrize(("start", "length"), [(0, 1), (-1, 1)], ids=["behind", "before"])
def test_an_item_whose_place_reaches_into_the_text_is_found(
    start: int, length: int, media_folder: Path, tmp_path: Path
) -> None:
    BUILDERS["llava"]().save_pretrained(tmp_path)  # which has no marks around its slots
    encoder = encoder_of(tmp_path, media_folder, chat_template=TEMPLATE)
    (item,) = media_of("image", media_folder)[:1]
    row = chat(message("user", "Look: ", item, " what?"), message("assistant", "Nothing much."))
    sample = encoder.encode(row)
    (own,) = sample.media
    wide = replace(own, start=own.start + start, length=own.length + length)
    verdict = RowVerifier(encoder).verify(row, replace(sample, media=(wide,)))
    assert {violation.check for violation in verdict.violations} == {Check.MEDIA_PLACES}


def test_what_is_left_out_is_there_to_be_left_out() -> None:
    tables = {"image": BUILDERS, "video": VIDEO, "audio": AUDIO}
    assert all(name in tables[kind] for kind, name in [*LACKING, *WRITES_MORE])
    assert len(CASES) > 60
