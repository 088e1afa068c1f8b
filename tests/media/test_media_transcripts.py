"""Speech recognition: a sound goes in, its transcript is learned; what is no sound is named with all that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import luthier
from luthier.encoding.measuring import CUT_SOUND
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowError
from tests.media.media_files import RATE, tone
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
    whole, cut = luthier.encode_many(rows, tokenizer, processor=processor)
    assert not isinstance(whole, RowError) and not isinstance(cut, RowError)
    assert [dict(sample.notes).get(CUT_SOUND) for sample in (whole, cut)] == [None, 1]
    whole, refused = luthier.encode_many(
        rows, tokenizer, processor=processor, media={"long_audio": "quarantine"}, errors="return"
    )
    assert not isinstance(whole, RowError)
    assert isinstance(refused, RowError) and refused.reason == "media_limit"


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
