"""Speech recognition: a sound goes in, its transcript is learned; what is no sound is named with all that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import luthier
from luthier.check.verify.row import RowVerifier
from luthier.config.inputs import LongAudio, MediaConfig, ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.measuring import CUT_SOUND, SPLIT_SOUND
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowError
from luthier.media import split_long_sounds, windows
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import decode, probe
from luthier.records import Audio, AudioHeader, Conversation, Document, Message, Text
from luthier.store.format import media_from_bytes, media_to_bytes
from tests.media.media_files import RATE, sound, tone, wav
from tests.media.tiny_av_folders import write_audio_folder
from tests.media.tiny_av_processors import qwen2_audio


@pytest.fixture(scope="module")
def processor() -> Any:
    return qwen2_audio()


@pytest.fixture(scope="module")
def tokenizer(processor: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("asr")
    processor.save_pretrained(folder)
    return luthier.load_tokenizer(folder, chat_template="default")


def heard(array: Any, transcript: str, rate: int = RATE) -> dict[str, Any]:
    sound = {"type": "audio", "audio": {"array": array, "sampling_rate": rate}}
    return {"messages": [{"role": "user", "content": [sound]}, {"role": "assistant", "content": transcript}]}


def test_the_transcript_is_learned_and_the_sound_is_what_the_processor_hears(
    processor: Any, tokenizer: Tokenizer
) -> None:
    rows = [heard(tone(0.5), "one beep"), heard(tone(1.2), "a longer beep")]
    samples = [luthier.encode(row, tokenizer, processor=processor) for row in rows]
    learned = [processor.tokenizer.decode(sample.input_ids[sample.target]) for sample in samples]
    assert learned == ["one beep</s>", "a longer beep</s>"]
    media = luthier.media_inputs(processor, {"model_type": "qwen2_audio"})
    ours = luthier.collate(samples, media=media).model_inputs
    text = "".join([processor.audio_token] * 2)
    own = processor(text=text, audio=[tone(0.5), tone(1.2)], sampling_rate=RATE, return_tensors="pt")
    assert (ours["input_ids"] == processor.audio_token_id).sum() == (own["input_ids"] == processor.audio_token_id).sum()
    # sounds of Python rows are kept as WAV of 16 bits
    assert np.allclose(ours["input_features"], own["input_features"], atol=2e-2)
    assert (ours["feature_attention_mask"] == own["feature_attention_mask"]).all()


def test_a_sound_that_is_longer_than_the_model_hears_is_counted_or_refused_as_the_run_says(
    processor: Any, tokenizer: Tokenizer
) -> None:
    window = processor.feature_extractor.n_samples / RATE
    rows = [heard(tone(window), "all of it"), heard(tone(window + 1), "most of it")]
    rows[1]["messages"][0]["content"] += rows[0]["messages"][0]["content"]  # before and behind one that is not cut
    rows[1]["messages"][0]["content"].insert(0, rows[0]["messages"][0]["content"][0])
    whole, cut = luthier.encode_many(rows, tokenizer, processor=processor)
    assert not isinstance(whole, RowError) and not isinstance(cut, RowError)
    assert [dict(sample.notes).get(CUT_SOUND) for sample in (whole, cut)] == [None, 1]
    whole, refused = luthier.encode_many(
        rows, tokenizer, processor=processor, media={"long_audio": "quarantine"}, errors="return"
    )
    assert not isinstance(whole, RowError)
    assert isinstance(refused, RowError) and refused.reason == "media_limit"


# --------------------------------------------------------------------------------------- sounds that are split


@pytest.fixture(scope="module")
def splitting(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("split")
    media = MediaConfig(roots=[folder], long_audio=LongAudio.SPLIT)
    model = ModelConfig(name_or_path=str(write_audio_folder(folder / "model")))
    return Encoder(model, TemplateConfig(), media=media, blobs=folder / "blobs")


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 11_025])
@pytest.mark.parametrize("seconds", [30.001, 59.9, 60.0, 61.3, 2_399.0])
def test_windows_are_the_fewest_that_hold_all_of_a_sound(rate: int, seconds: float) -> None:
    header = AudioHeader(num_samples=round(seconds * rate), sampling_rate=rate)
    found = windows(header, 30.0)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == header.num_samples
    lengths = [end - start for start, end in found]
    assert max(lengths) <= 30 * rate and max(lengths) - min(lengths) <= 1
    assert len(found) == -(-header.num_samples // (30 * rate))


@pytest.mark.parametrize(("suffix", "codec"), [("wav", None), ("flac", "flac"), ("mp3", "libmp3lame")])
def test_the_windows_of_a_split_sound_hold_its_samples(suffix: str, codec: str | None, splitting: Encoder) -> None:
    """Together they are the sound, as it is decoded whole; and verification, which splits the row anew, agrees."""
    samples = np.concatenate([tone(33), tone(32.5, hertz=660.0)])
    path = splitting.media.roots[0] / f"long.{suffix}"
    if codec is None:
        path.write_bytes(wav(samples))
    else:
        sound(path, samples, codec=codec)
    question = Message(role="user", parts=(Audio(source=str(path)), Text(text="What is said?")))
    row = Conversation(messages=(question, Message(role="assistant", parts=(Text(text="Two tones."),))))
    sample = splitting.encode(row)
    assert dict(sample.notes) == {SPLIT_SOUND: 1}
    access = MediaAccess(splitting.media)
    items, _ = media_from_bytes(media_to_bytes(sample.media))
    assert items == sample.media and len(items) == 3
    parts = [decode(item.media, item.header, access).samples for item in items]  # type: ignore[union-attr]
    whole = decode(Audio(source=str(path)), probe(Audio(source=str(path)), access), access)
    assert np.array_equal(np.concatenate(parts), whole.samples)  # type: ignore[union-attr]
    verdict = RowVerifier(splitting, num_decoded=1).verify(row, sample)
    assert verdict.violations == ()

    cutting = Encoder(splitting.model, splitting.options, media=MediaConfig(roots=splitting.media.roots))
    assert splitting.fingerprint != cutting.fingerprint
    cut = cutting.encode(row)
    assert dict(cut.notes) == {CUT_SOUND: 1}
    assert RowVerifier(splitting).verify(row, cut).violations  # the row promises three, the sample has one


def test_sounds_are_split_wherever_they_stand_and_others_stay(splitting: Encoder) -> None:
    for length, name in ((31.0, "over.wav"), (29.0, "under.wav")):
        (splitting.media.roots[0] / name).write_bytes(wav(tone(length)))
    over, under = (Audio(source=str(splitting.media.roots[0] / name)) for name in ("over.wav", "under.wav"))
    gone = Audio(source=str(splitting.media.roots[0] / "gone.wav"))
    document = Document(parts=(Text(text="a"), under, over, gone))
    split = split_long_sounds(document, splitting.measurer.processor, MediaAccess(splitting.media))
    first, second = (Audio(source=over.source, window=window) for window in ((0, 248_000), (248_000, 496_000)))
    assert split.parts == (Text(text="a"), under, first, second, gone)
    assert split_long_sounds(split, splitting.measurer.processor, MediaAccess(splitting.media)) == split
    with pytest.raises(RowError) as caught:
        splitting.encode(document)
    assert caught.value.reason == "media_missing"


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((2, 800), np.float32), r"float32\[2, 800\]"),
        (np.zeros(0, np.float32), r"float32\[0\]"),
        (np.zeros(800, np.int64), "int64"),
        (np.zeros(800, np.complex64), r"complex64\[800\]"),
    ],
)
def test_a_sound_of_another_shape_or_type_is_named_with_its_row(
    array: Any, said: str, processor: Any, tokenizer: Tokenizer
) -> None:
    rows = [heard(tone(0.5), "fine"), heard(array, "broken")]
    good, bad = luthier.encode_many(rows, tokenizer, processor=processor, errors="return")
    assert not isinstance(good, RowError)
    assert isinstance(bad, RowError) and bad.reason == "bad_media" and bad.address is not None
    assert bad.address.row == 2
    with pytest.raises(RowError, match=said):
        raise bad
