"""The data set ``preset:sounds``: what its rows promise, heard again from the samples."""

from __future__ import annotations

import io
import json
import wave
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare
from luthier.presets import model_folder
from luthier.presets.quizzes import (
    GLIDES,
    PITCHES,
    SAMPLING_RATE,
    SECONDS,
    SOUND_SKILLS,
    Timbre,
    play_beeps,
    play_glide,
    sound_rows,
)
from luthier.training.fit import fit

Row = dict[str, Any]
Samples = NDArray[np.float64]

NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}
GAP = 0.06  # seconds; a pause in hissing is shorter


@pytest.fixture(scope="module")
def train() -> list[Row]:
    return list(sound_rows("train"))


@pytest.fixture(scope="module")
def test() -> list[Row]:
    return list(sound_rows("test"))


def sound_of(row: Row) -> bytes:
    (sound,) = (part["audio"]["bytes"] for part in row["messages"][0]["content"] if part["type"] == "audio")
    assert isinstance(sound, bytes)
    return sound


def questions_of(row: Row) -> list[tuple[str, str]]:
    texts = [row["messages"][0]["content"][-1]["text"], *(message["content"] for message in row["messages"][1:])]
    return list(zip(texts[::2], texts[1::2], strict=True))


def samples_of(data: bytes) -> Samples:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 1, SAMPLING_RATE)
        return np.frombuffer(file.readframes(file.getnframes()), dtype=np.uint8) / 127 - 128 / 127


def tones_of(data: bytes) -> list[Samples]:
    """The stretches between gaps: where something is loud."""
    samples = samples_of(data)
    loud = np.flatnonzero(abs(samples) > 0.05)
    after = np.flatnonzero(np.diff(loud) > GAP * SAMPLING_RATE)
    starts, ends = np.concatenate([[0], after + 1]), np.concatenate([after, [len(loud) - 1]])
    return [samples[loud[start] : loud[end] + 1] for start, end in zip(starts, ends, strict=True)]


def course_of(tone: Samples) -> Samples:
    """Where the tone is, in octaves above 1 Hz: of each of its parts the frequency below which half of its power is."""
    middles = []
    for part in np.array_split(tone, 16 if len(tone) > 0.4 * SAMPLING_RATE else 2):
        power = np.cumsum(abs(np.fft.rfft(part * np.hanning(len(part)), n=4096)) ** 2)
        middles.append(np.searchsorted(power, power[-1] / 2) * SAMPLING_RATE / 4096)
    return np.log2(middles)


def step_of(tone: Samples) -> tuple[str, int]:
    """The nearest of all pitches: its name, and the how many-th of that name."""
    octaves = np.median(course_of(tone))
    steps = {(name, step): hertz for name, of_name in PITCHES.items() for step, hertz in enumerate(of_name)}
    return min(steps, key=lambda step: abs(octaves - np.log2(steps[step])))


def timbre_of(tone: Samples) -> str:
    """By how far its peak is above its power: 1.41 for a sine, 1.27 for what is nearly a square."""
    inner = tone[len(tone) // 8 : -len(tone) // 8]
    crest = abs(inner).max() / np.sqrt((inner**2).mean())
    return "hissing" if crest > 1.6 else "pure" if crest > 1.34 else "hollow"


def glide_of(tone: Samples) -> str:
    course = course_of(tone)
    return "up" if np.median(course[-5:]) > np.median(course[:5]) else "down"


def heard(sound: bytes, question: str) -> str:
    """The answer as the samples give it."""
    tones = tones_of(sound)
    number, (pitch, _), timbre = NUMBERS[len(tones)], step_of(tones[0]), timbre_of(tones[0])
    length = "long" if len(tones[0]) > 0.13 * SAMPLING_RATE else "short"
    plural = "s" if len(tones) > 1 else ""
    match question:
        case "How many beeps are there?":
            return f"There {'are' if plural else 'is'} {number}."
        case "Are they long or short?":
            return f"They are {length}."
        case "Are they high or low?":
            return f"They are {pitch}."
        case "What do they sound like?" | "What does it sound like?":
            return f"{'They are' if 'they' in question else 'It is'} {timbre}."
        case "Where does it go?":
            return f"It goes {glide_of(tones[0])}."
        case "What do you hear?" if len(tones[0]) > 0.4 * SAMPLING_RATE:
            return f"I hear a {timbre} tone that goes {glide_of(tones[0])}."
        case "What do you hear?":
            return f"I hear {number} {length} {pitch} {timbre} beep{plural}."
        case other:
            raise AssertionError(other)


def test_each_skill_has_the_rows_it_declares(train: list[Row], test: list[Row]) -> None:
    assert Counter(row["skill"] for row in train) == {skill.name: skill.num_train for skill in SOUND_SKILLS}
    assert Counter(row["skill"] for row in test) == {skill.name: skill.num_test for skill in SOUND_SKILLS}
    assert test == list(sound_rows("test")), "they are the same every time"


def test_answers_say_what_is_heard(train: list[Row], test: list[Row]) -> None:
    asked = [(sound_of(row), *question) for row in [*test, *train[:250]] for question in questions_of(row)]
    assert {question for _, question, _ in asked} == {question for row in train for question, _ in questions_of(row)}
    assert [(question, answer) for sound, question, answer in asked if heard(sound, question) != answer] == []


def test_the_ear_of_these_tests_hears_differences() -> None:
    """Every answer is wrong for a sound that differs in that alone."""
    sound = {"number": 2, "hertz": PITCHES["low"][0], "length": "short", "timbre": Timbre.PURE}
    others = {"number": 3, "hertz": PITCHES["middle"][0], "length": "long", "timbre": Timbre.HOLLOW}
    assert heard(play_beeps(**sound, seed=1), "What do you hear?") == "I hear two short low pure beeps."
    told = {heard(play_beeps(**{**sound, name: other}, seed=1), "What do you hear?") for name, other in others.items()}
    assert told == {
        "I hear three short low pure beeps.",
        "I hear two short middle pure beeps.",
        "I hear two long low pure beeps.",
        "I hear two short low hollow beeps.",
    }
    courses = [tuple(PITCHES[pitch][0] for pitch in pitches) for pitches in GLIDES.values()]
    glides = [play_glide(course, timbre=Timbre.HISSING, seed=1) for course in courses]
    assert [glide_of(tones_of(glide)[0]) for glide in glides] == list(GLIDES)


def test_no_sound_is_played_in_both_splits(train: list[Row], test: list[Row]) -> None:
    """Of the beeps that have a clear pitch, for which the step can be told: number, length, timbre and pitch."""

    def sounds(rows: list[Row]) -> set[tuple[str, tuple[str, int]]]:
        played = [sound_of(row) for row in rows]
        heard_all = [(heard(sound, "What do you hear?"), step_of(tones_of(sound)[0])) for sound in played]
        return {(told, step) for told, step in heard_all if "beep" in told and "hissing" not in told}

    held_out = sounds(test)
    assert len(held_out) > 20 and sounds(train[:700]) & held_out == set()
    assert sounds([*train[:100], *test[:9]]) & held_out != set()  # negative control


def test_sounds_are_equally_long_and_fit_into_the_window_of_the_tiny_model(train: list[Row]) -> None:
    assert {len(samples_of(sound_of(row))) for row in train} == {SECONDS * SAMPLING_RATE}
    processor = json.loads((model_folder("tiny-qwen2-audio") / "processor_config.json").read_text())
    assert processor["feature_extractor"]["chunk_length"] >= SECONDS
    with pytest.raises(ValueError, match=r"6 tones take 1\.\d\d s, a sound has 1\.3 s"):
        play_beeps(6, hertz=500.0, length="long", timbre=Timbre.PURE, seed=1)


def test_a_few_steps_lower_the_loss(tmp_path: Path) -> None:
    overrides = [
        f"output.dir={tmp_path / 'run'}",
        f"data.store={tmp_path / 'store'}",
        "data.train.0.max_rows=60",
        "data.eval=[]",
        "data.workers=0",
        "eval.strategy=no",
        "eval.generate_rows=0",
        "train.max_steps=12",
        "output.save_strategy=no",
        "tracking.progress=false",
        "tracking.logging_steps=1",
    ]
    config = load_config(Path(__file__).parents[2] / "examples" / "quickstart_audio.yaml", overrides)
    encoder = Encoder.from_config(config)
    losses = [step.loss for step in fit(config, encoder, prepare(config, encoder)).steps]
    assert len(losses) == 12 and losses[-1] < 0.7 * losses[0]
