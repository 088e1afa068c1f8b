"""The data set ``preset:sounds``: questions about short sounds.

Five skills, each with a key that alone decides whether a question is held out, so that what ``test`` asks has to be
put together from what ``train`` let hear apart:

    count     how many beeps are there?      the number with the pitch: six low beeps were never counted
    pitch     which tones are played?        the melody of two to four tones: this one was never asked about
    rhythm    which beeps are long?          the rhythm of two to five beeps
    glide     where does the tone go?        the movements, one to three
    more      which sound has more beeps?    the two numbers; there are two sounds
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from luthier.presets.beeping import PITCHES, Tone, play_tones
from luthier.presets.questions import Draw, Skill, skill_rows

_MOST = 6  # beeps to count
_LENGTHS = {"short": 0.09, "long": 0.22}  # seconds
_GLIDES = {"up": ("low", "high"), "down": ("high", "low"), "nowhere": ("middle", "middle")}


def sound_rows(split: str) -> Iterator[dict[str, Any]]:
    """``{"skill": NAME, "messages": MESSAGES}``, sounds as ``{"type": "audio", "audio": {"bytes": WAV}}`` before the
    question; in the order, and with the promises, of `skill_rows`. Raises `SourceError` for another split.
    """
    yield from skill_rows("sounds", SKILLS, split)


def _draw_count(rng: Random) -> Draw:
    number, pitch = rng.randint(1, _MOST), rng.choice(list(PITCHES))
    question = rng.choice(["How many beeps are there?", "Count the beeps."])
    return [f"{number} {pitch}"], _ask([_beeps(number, pitch, rng)], question, f"There are {number}.")


def _draw_pitch(rng: Random) -> Draw:
    names = rng.choices(list(PITCHES), k=rng.randint(2, 4))
    sound = play_tones([Tone.level(PITCHES[name], rng.uniform(0.15, 0.25)) for name in names], rng)
    question = rng.choice(["Which tones are played?", "High or low?"])
    return [" ".join(names)], _ask([sound], question, f"The tones are {', '.join(names)}.")


def _draw_rhythm(rng: Random) -> Draw:
    names, pitch = rng.choices(list(_LENGTHS), k=rng.randint(2, 5)), rng.choice(list(PITCHES))
    sound = play_tones([Tone.level(PITCHES[pitch], _LENGTHS[name]) for name in names], rng)
    question = rng.choice(["What is the rhythm?", "Short or long?"])
    return [" ".join(names)], _ask([sound], question, f"The beeps are {', '.join(names)}.")


def _draw_glide(rng: Random) -> Draw:
    names = rng.choices(list(_GLIDES), k=rng.randint(1, 3))
    ends = [[PITCHES[pitch] for pitch in _GLIDES[name]] for name in names]
    sound = play_tones([Tone(start=start, end=end, seconds=rng.uniform(0.3, 0.4)) for start, end in ends], rng)
    question = rng.choice(["Where does the tone go?", "Up or down?"])
    return [" ".join(names)], _ask([sound], question, f"The tone goes {', '.join(names)}.")


def _draw_more(rng: Random) -> Draw:
    numbers = rng.sample(range(1, _MOST + 1), 2)
    sounds = [_beeps(number, rng.choice(list(PITCHES)), rng) for number in numbers]
    more = "first" if numbers[0] > numbers[1] else "second"
    question = "Which sound has more beeps?"
    answer = f"The {more} has more, {max(numbers)} and not {min(numbers)}."
    return [f"{numbers[0]} and {numbers[1]}"], _ask(sounds, question, answer)


def _beeps(number: int, pitch: str, rng: Random) -> bytes:
    return play_tones([Tone.level(PITCHES[pitch], rng.uniform(0.1, 0.15))] * number, rng)


def _ask(sounds: Sequence[bytes], question: str, answer: str) -> list[dict[str, Any]]:
    heard = [{"type": "audio", "audio": {"bytes": sound}} for sound in sounds]
    return [
        {"role": "user", "content": [*heard, {"type": "text", "text": question}]},
        {"role": "assistant", "content": answer},
    ]


SKILLS = (
    Skill(name="count", draw=_draw_count, num_train=800),
    Skill(name="pitch", draw=_draw_pitch, num_train=1000),
    Skill(name="rhythm", draw=_draw_rhythm, num_train=800),
    Skill(name="glide", draw=_draw_glide, num_train=600),
    Skill(name="more", draw=_draw_more, num_train=800),
)
