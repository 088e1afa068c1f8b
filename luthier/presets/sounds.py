"""The data set ``preset:sounds``: questions about short sounds, learnable from nothing in a few minutes.

A sound is one to four beeps, all alike, or one tone that glides. Three skills ask about it:

    beeps        how many, long or short, high or low, what do they sound like?    one thing each
    tone         where does it go, what does it sound like?                        one thing each
    description  what do you hear?                                                 all of it, of either

Nothing in a row tells the answer but the sound: what is asked together is independent. What is held out are sounds:
``test`` plays combinations of number, length, pitch (in steps of two semitones), timbre and glide that ``train`` never
plays.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from random import Random

import numpy as np
from numpy.typing import NDArray

from luthier.presets.quizzes import Quiz, QuizQuestion, QuizSkill, quiz_rows
from luthier.writing import JsonObject, counted

_NUMBERS = ("one", "two", "three", "four")


def sound_rows(split: str) -> Iterator[JsonObject]:
    """``{"skill": NAME, "messages": MESSAGES}``, a sound as ``{"type": "audio", "audio": {"bytes": WAV}}`` before the
    first question; else as `quiz_rows` says.
    """
    yield from quiz_rows(SKILLS, split)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sound:
    """A WAV, the combination that it is one of, and what is true of it: by question, and all in one."""

    wav: bytes
    key: str
    answers: dict[str, str]
    description: str


def _beeps(rng: Random) -> _Sound:
    number, timbre = rng.randint(1, len(_NUMBERS)), rng.choice(list(Timbre))
    length, pitch, step = rng.choice(list(LENGTHS)), rng.choice(list(PITCHES)), rng.randrange(6)
    told = f"{_NUMBERS[number - 1]} {length} {pitch} {timbre} beep{'s' if number > 1 else ''}"
    return _Sound(
        wav=play_beeps(number, hertz=PITCHES[pitch][step], length=length, timbre=timbre, seed=rng.getrandbits(32)),
        key=f"{told} {step}",
        answers={
            "How many beeps are there?": f"There {'are' if number > 1 else 'is'} {_NUMBERS[number - 1]}.",
            "Are they long or short?": f"They are {length}.",
            "Are they high or low?": f"They are {pitch}.",
            "What do they sound like?": f"They are {timbre}.",
        },
        description=f"I hear {told}.",
    )


def _tone(rng: Random) -> _Sound:
    glide, timbre = rng.choice(list(GLIDES)), rng.choice(list(Timbre))
    steps = {"low": rng.randrange(6), "high": rng.randrange(6)}
    course = tuple(PITCHES[pitch][steps[pitch]] for pitch in GLIDES[glide])
    return _Sound(
        wav=play_glide(course, timbre=timbre, seed=rng.getrandbits(32)),
        key=f"{timbre} {glide} {steps['low']} {steps['high']}",
        answers={"Where does it go?": f"It goes {glide}.", "What does it sound like?": f"It is {timbre}."},
        description=f"I hear a {timbre} tone that goes {glide}.",
    )


def _draw(play: Callable[[Random], _Sound], rng: Random) -> Quiz:
    sound = play(rng)
    return _quiz(sound, sound.answers)


def _draw_description(rng: Random) -> Quiz:
    sound = rng.choice([_beeps, _beeps, _tone])(rng)
    return _quiz(sound, {"What do you hear?": sound.description})


def _quiz(sound: _Sound, answers: dict[str, str]) -> Quiz:
    questions = [QuizQuestion(key=sound.key, question=question, answer=answer) for question, answer in answers.items()]
    return Quiz(shown=[{"type": "audio", "audio": {"bytes": sound.wav}}], questions=questions)


SKILLS: Sequence[QuizSkill] = (
    QuizSkill(name="beeps", draw=partial(_draw, _beeps), num_train=2500, num_test=80),
    QuizSkill(name="tone", draw=partial(_draw, _tone), num_train=2000, num_test=50),
    QuizSkill(name="description", draw=_draw_description, num_train=2000, num_test=50),
)


# --------------------------------------------------------------------------------------------------------------------
# Short sounds, a few like beeps or one gliding tone, as the bytes of a WAV file.
#
# Pitches, lengths, gaps, loudness and starts differ a little from one sound to the next, as the seed says.


SAMPLING_RATE = 8000
SECONDS = 1.3  # of every sound, so that nothing is told by how long it takes
_LOWEST = {"low": 150.0, "middle": 330.0, "high": 730.0}
# Hz: six steps of two semitones each; between the three there is more room.
PITCHES = {name: [lowest * 2 ** (step / 6) for step in range(6)] for name, lowest in _LOWEST.items()}
LENGTHS = {"short": 0.08, "long": 0.2}  # seconds of a beep
GLIDES = {"up": ("low", "high"), "down": ("high", "low")}  # the pitches from which and to which a tone glides
_LATEST = 0.04  # seconds of silence before the first tone
_GLIDING = 0.6  # seconds of a tone that glides
_KEPT = 8192  # sounds: a run goes through the rows of a data set several times
_NOISE = 0.01  # of the loudest that a sample can be
_SLOWNESS = 2  # of what makes a tone hiss: the periods of the tone that it takes
_RAMP = 0.01  # seconds in which a tone comes and goes, so that it does not click

_Samples = NDArray[np.float64]


class Timbre(StrEnum):
    """What a tone is made of."""

    PURE = "pure"  # a sine
    HOLLOW = "hollow"  # a square: the odd harmonics alone, as of a clarinet
    HISSING = "hissing"  # noise about the frequency of the tone


@lru_cache(maxsize=_KEPT)
def play_beeps(number: int, *, hertz: float, length: str, timbre: Timbre, seed: int) -> bytes:
    """A WAV of level tones, all alike, with gaps of about a tenth of a second; else as `play_glide`."""
    rng = Random(seed)
    tone = _course_tone([hertz, hertz], LENGTHS[length], timbre, rng)
    return _play([tone] * number, rng)


@lru_cache(maxsize=_KEPT)
def play_glide(course: tuple[float, ...], *, timbre: Timbre, seed: int) -> bytes:
    """A WAV of one tone that glides from each frequency to the next: one channel of 8 bits, 8,000 samples a second,
    1.3 s. Raises ``ValueError`` if that is too short for it.
    """
    rng = Random(seed)
    return _play([_course_tone(course, _GLIDING, timbre, rng)], rng)


def _play(tones: Sequence[_Samples], rng: Random) -> bytes:
    """The tones one after another, soon after the beginning of the sound."""
    gaps = [_silence(rng.uniform(0.08, 0.1)) for _ in tones[1:]]
    played = np.concatenate([part for pair in zip(tones, [*gaps, _silence(0)], strict=True) for part in pair])
    count = round(SECONDS * SAMPLING_RATE)
    if len(played) > count:
        raise ValueError(
            f"{counted(len(tones), 'tone takes', 'tones take')} "
            f"{len(played) / SAMPLING_RATE:.2f} s, a sound has {SECONDS} s"
        )
    start = rng.randint(0, min(count - len(played), round(_LATEST * SAMPLING_RATE)))
    samples = _NOISE * _white(count, rng)
    samples[start : start + len(played)] += rng.uniform(0.4, 0.9) * played
    # Samples from -1 to 1 as PCM, in which 128 is silence.
    data = np.clip(np.rint(128 + 127 * samples), 0, 255).astype(np.uint8).tobytes()
    data += b"\0" * (len(data) % 2)  # chunks have even lengths; the header counts without it
    form = struct.pack("<HHIIHH", 1, 1, SAMPLING_RATE, SAMPLING_RATE, 1, 8)
    chunks = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(samples)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def _course_tone(course: Sequence[float], seconds: float, timbre: Timbre, rng: Random) -> _Samples:
    """A tone from -1 to 1. The frequencies, however many, are evenly spread over its time; between them it glides."""
    count = round(seconds * rng.uniform(0.9, 1.1) * SAMPLING_RATE)
    octaves = np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(course)), np.log2(course))
    phase = 2 * np.pi / SAMPLING_RATE * np.cumsum(np.exp2(octaves) * rng.uniform(0.98, 1.02))
    ramp = np.arange(1, count + 1) / (_RAMP * SAMPLING_RATE)
    return np.asarray(_shaped(timbre, phase, rng) * np.minimum(1, np.minimum(ramp, ramp[::-1])))


def _shaped(timbre: Timbre, phase: _Samples, rng: Random) -> _Samples:
    match timbre:
        case Timbre.PURE:
            return np.sin(phase)
        case Timbre.HOLLOW:  # its first harmonics: those that lie below half the sampling rate at every pitch
            return np.sin(phase) + np.sin(3 * phase) / 3
        case Timbre.HISSING:  # the slower the noise, the nearer to the tone its frequencies lie
            width = round(_SLOWNESS * len(phase) * 2 * np.pi / (phase[-1] - phase[0]))
            noise = np.convolve(_white(len(phase) + width - 1, rng), np.ones(width), mode="valid")
            return np.asarray(np.sin(phase) * noise / np.abs(noise).max())
        case _:
            raise ValueError(f"{timbre!r} is no timbre")


def _white(count: int, rng: Random) -> _Samples:
    return np.frombuffer(rng.randbytes(count), dtype=np.uint8) / 127.5 - 1


def _silence(seconds: float) -> _Samples:
    return np.zeros(round(seconds * SAMPLING_RATE))
