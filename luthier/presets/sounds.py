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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from luthier.presets.beeping import GLIDES, LENGTHS, PITCHES, Timbre, play_beeps, play_glide
from luthier.presets.quizzes import Question, Quiz, QuizSkill, quiz_rows

_NUMBERS = ("one", "two", "three", "four")


def sound_rows(split: str) -> Iterator[dict[str, Any]]:
    """``{"skill": NAME, "messages": MESSAGES}``, a sound as ``{"type": "audio", "audio": {"bytes": WAV}}`` before the
    first question; else as `quiz_rows` says. Raises `SourceError` for another split.
    """
    yield from quiz_rows("sounds", SKILLS, split)


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
    questions = [Question(key=sound.key, question=question, answer=answer) for question, answer in answers.items()]
    return Quiz(shown=[{"type": "audio", "audio": {"bytes": sound.wav}}], questions=questions)


SKILLS: Sequence[QuizSkill] = (
    QuizSkill(name="beeps", draw=partial(_draw, _beeps), num_train=2500, num_test=80),
    QuizSkill(name="tone", draw=partial(_draw, _tone), num_train=2000, num_test=50),
    QuizSkill(name="description", draw=_draw_description, num_train=2000, num_test=50),
)
