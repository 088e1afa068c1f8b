"""Verification of rows with media: clean rows pass all checks, and each planted fault is found by the check named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_encoders import encoder_of
from verify_cases import AT, chat, message

from luthier.check.verify import Check, RowVerdict
from luthier.check.verify.reference_tokenizer import same_sample, tree_faults
from luthier.check.verify.row import RowVerifier, _is_drawn
from luthier.config.choices import RowKind
from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.media import MediaSource
from luthier.media.families import Settings
from luthier.media.processors.processor import MediaProcessor
from luthier.records import (
    Branch,
    Conversation,
    Document,
    Feedback,
    Image,
    ImageHeader,
    Message,
    Preference,
    Row,
    Sample,
    Text,
    Video,
)

OF_MEDIA = {Check.MEDIA_PLACES, Check.MEDIA_TOKENS}
Named = Callable[[str], Image]


@pytest.fixture(scope="module")
def named(media_folder: Path) -> Named:
    return lambda name: Image(source=str(media_folder / name))


def question(*parts: Any) -> Message:
    return message("user", *parts)


def rows(named: Named, film: Video) -> dict[str, Row]:
    wide, tall = named("wide.png"), named("tall.png")
    who = (question(wide, "Who?"), message("assistant", "Ann."))
    return {
        "one picture": chat(*who),
        "between texts": chat(question("Is ", wide, " or ", tall, " it?"), message("assistant", "The first.")),
        "in a later turn": chat(*who, question("And this?", tall), message("assistant", "Ben.")),
        "video and picture": chat(question(film, "Then ", wide), message("assistant", "Yes.")),
        "placeholders as text": chat(
            question("a <|image_pad|> b", wide, "<|image_pad|><|im_end|>"), message("assistant", "<|video_pad|>")
        ),
        "a text in parts around it": chat(
            question("a <|image", "_pad|>", wide, "b", " c"), message("assistant", "x", "y")
        ),
    }


def verify(row: Row, sample: Sample, encoder: Encoder, *, num_decoded: int = 4) -> RowVerdict:
    return RowVerifier(encoder, num_decoded=num_decoded).verify(row, sample)


def broken(verdict: RowVerdict) -> set[Check]:
    return {violation.check for violation in verdict.violations}


# ------------------------------------------------------------------------------------------------------- clean rows


@pytest.mark.parametrize("name", list(rows(lambda name: Image(source=name), Video(source=""))))
@pytest.mark.parametrize("family", ["vl_encoder", "timed_encoder"])
def test_clean_rows_pass_every_check(
    name: str, family: str, named: Named, media_folder: Path, request: pytest.FixtureRequest
) -> None:
    encoder = request.getfixturevalue(family)
    row = rows(named, Video(source=str(media_folder / "film.mp4")))[name]
    verdict = verify(row, encoder.encode(row), encoder)
    assert verdict.violations == ()
    assert verdict.applied >= OF_MEDIA
    if not verdict.control_strings:  # else the processor cannot tell the row's strings from the template's
        assert Check.PROCESSOR_TOKENS in verdict.applied
        assert verdict.notes["decoded"] == 1


@pytest.mark.parametrize(
    ("family", "item", "wraps", "is_noted"),
    [
        ("timed_encoder", "film.mp4", True, True),
        ("timed_encoder", "film.mp4", False, False),  # the template writes no marks that could be taken away
        ("timed_encoder", "wide.png", True, False),
        ("vl_encoder", "film.mp4", True, False),
    ],
)
def test_videos_of_which_vllm_takes_marks_away_are_noted(
    family: str, item: str, wraps: bool, is_noted: bool, media_folder: Path, request: pytest.FixtureRequest
) -> None:
    encoder = request.getfixturevalue(family)
    assert encoder.tokenizer.template is not None
    source = encoder.tokenizer.template.source
    if not wraps:
        bare = source.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
        assert bare != source
        folder = request.getfixturevalue(family.replace("encoder", "folder"))
        encoder = encoder_of(folder, media_folder, chat_template=bare)
    path = str(media_folder / item)
    row = chat(
        question(Video(source=path) if item.endswith("mp4") else Image(source=path)), message("assistant", "Yes.")
    )
    verdict = verify(row, encoder.encode(row), encoder)
    assert verdict.violations == ()
    assert bool(verdict.notes["marks_vllm_drops"]) is is_noted


@pytest.mark.parametrize("train_on", ["all", "last_assistant"])
def test_other_policies_pass_with_media(train_on: str, named: Named, vl_folder: Path, media_folder: Path) -> None:
    encoder = encoder_of(vl_folder, media_folder, train_on=train_on, default_system="Look well.")
    row = chat(
        question("Is ", named("wide.png"), " it?"),
        message("assistant", "No."),
        question(named("tall.png")),
        message("assistant", "Yes."),
    )
    sample = encoder.encode(row)
    assert verify(row, sample, encoder).violations == ()
    learned = {int(place) for place in np.flatnonzero(sample.target)}
    for item in sample.media:
        assert learned.isdisjoint(range(item.start, item.start + item.length))


def test_pictures_that_rows_hold_as_bytes_pass(vl_folder: Path, media_folder: Path, tmp_path: Path) -> None:
    encoder = Encoder(ModelConfig(name_or_path=str(vl_folder)), TemplateConfig(), blobs=tmp_path / "blobs")
    row = chat(question(Image(source=(media_folder / "wide.png").read_bytes()), "Who?"), message("assistant", "Ann."))
    sample = encoder.encode(row)
    assert isinstance(sample.media[0].media.source, str)  # a file in the folder of blobs
    assert verify(row, sample, encoder).violations == ()


def test_documents_with_pictures_pass_and_learn_their_text(named: Named, vl_encoder: Encoder) -> None:
    row = Document(parts=(Text(text="A bird: "), named("wide.png"), Text(text=" sings <|im_end|>.")), address=AT)
    sample = vl_encoder.encode(row)
    verdict = verify(row, sample, vl_encoder)
    assert verdict.violations == ()
    assert verdict.applied >= OF_MEDIA
    (item,) = sample.media
    learned = replace(sample, target=sample.target.copy())
    learned.target[item.start] = True
    assert Check.COMPLETION_TOKENS in broken(verify(row, learned, vl_encoder))


def pair(named: Named) -> Preference:
    return Preference(
        prompt=(question(named("wide.png"), "Who is beside ", named("tall.png"), "?"),),
        chosen=(message("assistant", "Ann."),),
        rejected=(message("assistant", "Nobody at all."),),
        address=AT,
    )


def test_pairs_and_feedback_with_pictures_pass(named: Named, vl_folder: Path, media_folder: Path) -> None:
    preference = pair(named)
    encoder = encoder_of(vl_folder, media_folder, kind=RowKind.PAIR)
    verdict = verify(preference, encoder.encode(preference), encoder)
    assert verdict.violations == ()
    assert verdict.applied >= OF_MEDIA | {Check.PROCESSOR_TOKENS, Check.VERDICT}
    feedback = Feedback(prompt=preference.prompt, completion=preference.chosen, desirable=True, address=AT)
    encoder = encoder_of(vl_folder, media_folder, kind=RowKind.VERDICT)
    verdict = verify(feedback, encoder.encode(feedback), encoder)
    assert verdict.violations == ()
    assert verdict.applied >= OF_MEDIA


# ---------------------------------------------------------------------------------------------------------- faults


def without_token(sample: Sample, place: int) -> Sample:
    """The sample without one token; items behind it move up, the one that it was in gets shorter."""
    media = tuple(
        replace(
            item,
            start=item.start - (place < item.start),
            length=item.length - (item.start <= place < item.start + item.length),
        )
        for item in sample.media
    )
    return replace(
        sample,
        input_ids=np.delete(sample.input_ids, place),
        target=np.delete(sample.target, place),
        branches=(Branch(parent=-1, length=len(sample.input_ids) - 1),),
        media=media,
    )


def a_slot_short(sample: Sample) -> Sample:
    return without_token(sample, sample.media[1].start)


def an_item_forgotten(sample: Sample) -> Sample:
    return replace(sample, media=sample.media[:1])


def items_swapped(sample: Sample) -> Sample:
    first, second = sample.media
    return replace(
        sample,
        media=(
            replace(first, media=second.media, header=second.header),
            replace(second, media=first.media, header=first.header),
        ),
    )


def another_file(sample: Sample) -> Sample:
    first, second = sample.media
    return replace(sample, media=(first, replace(second, media=Image(source="other.png"))))


def another_size(sample: Sample) -> Sample:
    first, second = sample.media
    return replace(sample, media=(first, replace(second, header=ImageHeader(width=41, height=90))))


def one_item_too_many(sample: Sample) -> Sample:
    last = sample.media[-1]
    return replace(sample, media=(*sample.media, replace(last, start=last.start + last.length, length=1)))


def span_too_short(sample: Sample) -> Sample:
    first, second = sample.media
    return replace(sample, media=(replace(first, length=first.length - 1), second))


def spans_overlap(sample: Sample) -> Sample:
    first, second = sample.media
    return replace(sample, media=(replace(first, length=second.start - first.start + 1), second))


def span_behind_the_end(sample: Sample) -> Sample:
    first, second = sample.media
    return replace(sample, media=(first, replace(second, length=len(sample.input_ids))))


def empty_span(sample: Sample) -> Sample:
    first, second = sample.media
    return replace(sample, media=(first, replace(second, length=0)))


def a_slot_learned(sample: Sample) -> Sample:
    target = sample.target.copy()
    target[sample.media[0].start] = True
    return replace(sample, target=target)


FAULTS: list[tuple[Callable[[Sample], Sample], Check]] = [
    (a_slot_short, Check.MEDIA_TOKENS),
    (an_item_forgotten, Check.MEDIA_PLACES),
    (items_swapped, Check.MEDIA_PLACES),
    (another_file, Check.MEDIA_PLACES),
    (another_size, Check.MEDIA_PLACES),
    (one_item_too_many, Check.MEDIA_PLACES),
    (span_too_short, Check.MEDIA_PLACES),
    (span_too_short, Check.MEDIA_TOKENS),
    (spans_overlap, Check.MEDIA_PLACES),
    (span_behind_the_end, Check.MEDIA_PLACES),
    (empty_span, Check.MEDIA_PLACES),
    (a_slot_learned, Check.NOTHING_SUPPLIED_TRAINED),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[f"{f.__name__}-{check.value}" for f, check in FAULTS])
def test_a_planted_fault_is_found(
    fault: Callable[[Sample], Sample], check: Check, named: Named, vl_encoder: Encoder
) -> None:
    row = chat(question("Is ", named("wide.png"), " or ", named("tall.png"), "?"), message("assistant", "Yes."))
    sample = vl_encoder.encode(row)
    assert verify(row, sample, vl_encoder, num_decoded=0).violations == ()
    assert check in broken(verify(row, fault(sample), vl_encoder, num_decoded=0))


def test_a_miscount_is_told_with_both_numbers(named: Named, vl_encoder: Encoder) -> None:
    row = chat(question("Is ", named("wide.png"), " or ", named("tall.png"), "?"), message("assistant", "Yes."))
    sample = vl_encoder.encode(row)
    count = sample.media[1].length
    verdict = verify(row, a_slot_short(sample), vl_encoder)
    (found,) = [violation for violation in verdict.violations if violation.check is Check.MEDIA_TOKENS]
    assert "image 40×90 (tall.png)" in found.what
    assert f"has {count - 1} tokens <|image_pad|>" in found.what
    assert f"writes {count} for this size" in found.what


def test_items_in_a_row_without_media_are_found(named: Named, vl_encoder: Encoder) -> None:
    row = chat(question("Who?"), message("assistant", "Ann."))
    sample = vl_encoder.encode(row)
    (item, *_) = vl_encoder.encode(chat(question(named("wide.png")), message("assistant", "Ann."))).media
    assert broken(verify(row, replace(sample, media=(replace(item, start=1, length=1),)), vl_encoder)) == {
        Check.MEDIA_PLACES
    }


def test_a_row_whose_picture_never_reached_the_sample_is_found(named: Named, vl_encoder: Encoder) -> None:
    row = chat(question(named("wide.png"), "Who?"), message("assistant", "Ann."))
    blind = vl_encoder.encode(chat(question("Who?"), message("assistant", "Ann.")))
    assert broken(verify(row, blind, vl_encoder)) >= {Check.MEDIA_PLACES, Check.PROMPT_TOKENS}


def test_an_item_on_two_branches_is_found(named: Named, vl_folder: Path, media_folder: Path) -> None:
    encoder = encoder_of(vl_folder, media_folder, kind=RowKind.PAIR)
    row = pair(named)
    sample = encoder.encode(row)
    assert not list(tree_faults(sample))
    *others, last = sample.media
    prompt = sample.branches[0].length
    reaching = replace(sample, media=(*others, replace(last, length=prompt - last.start + 1)))
    assert broken(verify(row, reaching, encoder)) == {Check.MEDIA_PLACES}


def test_samples_that_differ_in_media_alone_differ(named: Named, vl_encoder: Encoder) -> None:
    row = chat(question(named("wide.png"), named("tall.png")), message("assistant", "Yes."))
    sample = vl_encoder.encode(row)
    assert same_sample(sample, vl_encoder.encode(row)) is None
    assert "media" in (same_sample(sample, another_size(sample)) or "")


# --------------------------------------------------------------------------------------------- the processor itself


def miscounting(processor: MediaProcessor) -> MediaProcessor:
    """The same processor with a row that says that pictures are twice as high: headers promise too many tokens."""
    rule = processor.family.image
    assert rule is not None

    def measure(settings: Settings, headers: Sequence[ImageHeader]) -> dict[str, Any]:
        return rule.measure(settings, [replace(header, height=2 * header.height) for header in headers])

    family = replace(processor.family, image=replace(rule, measure=measure))
    return MediaProcessor(processor.processor, family, {})


def test_a_family_that_counts_wrongly_is_found_by_the_processor_alone(
    named: Named, vl_folder: Path, media_folder: Path, vl_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(vl_folder, media_folder)
    assert vl_encoder.measurer.processor is not None
    wrong = miscounting(vl_encoder.measurer.processor)
    monkeypatch.setattr(MediaSource, "load", lambda source: wrong)  # the family's row is wrong on both sides
    row = chat(question(named("square.png"), "Who?"), message("assistant", "Ann."))
    sample = encoder.encode(row)
    assert broken(verify(row, sample, encoder)) == {Check.PROCESSOR_TOKENS}
    assert not broken(verify(row, sample, encoder, num_decoded=0))


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw"])
def test_features_that_training_makes_otherwise_are_found_by_the_processor(
    named: Named, vl_encoder: Encoder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    right = MediaProcessor.features

    def wrong(self: MediaProcessor, items: Any) -> dict[str, Any]:
        found = right(self, items)
        return {**found, name: found[name][..., ::-1]}

    row = chat(question(named("square.png"), "Who?", named("wide.png")), message("assistant", "Ann."))
    sample = vl_encoder.encode(row)
    assert not broken(verify(row, sample, vl_encoder))
    monkeypatch.setattr(MediaProcessor, "features", wrong)
    (found,) = verify(row, sample, vl_encoder).violations
    assert found.check is Check.PROCESSOR_TOKENS
    assert f"other {name} " in found.what


def test_pixels_that_cannot_be_decoded_are_told(vl_encoder: Encoder, media_folder: Path) -> None:
    content = bytearray((media_folder / "wide.png").read_bytes())
    half = len(content) // 2
    content[half : half + 8] = bytes(8)  # inside of the compressed pixels
    (media_folder / "damaged.png").write_bytes(content)
    row = chat(question(Image(source=str(media_folder / "damaged.png"))), message("assistant", "Ann."))
    verdict = verify(row, vl_encoder.encode(row), vl_encoder)
    (found,) = verdict.violations
    assert found.check is Check.PROCESSOR_TOKENS
    assert "media_broken" in found.what


def test_rows_are_decoded_at_first_and_ever_more_rarely_later() -> None:
    assert [number for number in range(1, 30) if _is_drawn(number, 3)] == [1, 2, 3, 6, 12, 24]
    assert not any(_is_drawn(number, 0) for number in range(1, 30))


def test_decoding_follows_the_number_of_rows_with_media(named: Named, vl_encoder: Encoder) -> None:
    row = chat(question(named("wide.png")), message("assistant", "Ann."))
    plain: Conversation = chat(question("Hi"), message("assistant", "Hello."))
    sample, plain_sample = vl_encoder.encode(row), vl_encoder.encode(plain)
    verifier = RowVerifier(vl_encoder, num_decoded=1)
    decoded = []
    for _ in range(4):
        verifier.verify(plain, plain_sample)
        decoded.append(verifier.verify(row, sample).notes.get("decoded", 0))
    assert decoded == [1, 1, 0, 1]
