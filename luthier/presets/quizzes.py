"""The preset data sets of pictures and of sounds: a few questions in a row about the same thing, and which of them are
held out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from itertools import zip_longest
from math import ceil
from random import Random
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from luthier.writing import JsonObject, counted

_TEST_SHARE = 10  # one key in ten is held out
_MOST_TURNS = 4  # of a conversation in `train`


def is_held_out(key: str) -> bool:
    """Whether what the key stands for is asked in ``test`` only. It is the same in every data set."""
    return crc32(key.encode()) % _TEST_SHARE == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class QuizQuestion:
    """``key`` names what must be generalised, and alone decides whether the question is held out."""

    key: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Quiz:
    """Something to look at or to listen to, as parts of a message, and all that can be asked about it."""

    shown: Sequence[JsonObject]
    questions: Sequence[QuizQuestion]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuizSkill:
    """One thing to learn. ``num_train`` and ``num_test`` are rows."""

    name: str
    draw: Callable[[Random], Quiz]
    num_train: int
    num_test: int = 30


def quiz_rows(skills: Sequence[QuizSkill], split: str) -> Iterator[JsonObject]:
    """The rows of a split, always the same: ``{"skill": NAME, "messages": [...]}``.

    A row of ``train`` asks up to four questions about what it shows, none of which is held out; a row of ``test`` asks
    one that is. ``train`` has its skills shuffled, in ``test`` they take turns.
    """
    counts = [skill.num_train if split == "train" else skill.num_test for skill in skills]
    turns = zip_longest(*([number] * count for number, count in enumerate(counts)))
    order = [number for turn in turns for number in turn if number is not None]
    if split == "train":
        Random("order").shuffle(order)
    drawn = [_quiz_rows_of(skill, split) for skill in skills]
    yield from (next(drawn[number]) for number in order)


def _quiz_rows_of(skill: QuizSkill, split: str) -> Iterator[JsonObject]:
    """Row after row, without end: who wants a few pays for no more."""
    rng = Random(f"{skill.name} {split}")
    most = _MOST_TURNS if split == "train" else 1
    while True:
        quiz = skill.draw(rng)
        asked = [question for question in quiz.questions if is_held_out(question.key) == (split == "test")]
        if asked:
            chosen = rng.sample(asked, min(most, len(asked)))
            yield {"skill": skill.name, "messages": _messages(quiz.shown, chosen)}


def _messages(shown: Sequence[JsonObject], asked: Sequence[QuizQuestion]) -> list[JsonObject]:
    messages: list[JsonObject] = []
    for turn in asked:
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    messages[0]["content"] = [*shown, {"type": "text", "text": messages[0]["content"]}]
    return messages


def _quiz(shown: JsonObject, answers: dict[str, str], key: str) -> Quiz:
    questions = [QuizQuestion(key=key, question=asked, answer=answer) for asked, answer in answers.items()]
    return Quiz(shown=[shown], questions=questions)


# ---- The data set ``preset:pictures``: questions about small pictures, learnable from nothing in a few minutes.
#
# A picture shows one thing, or up to four alike. What it shows (a number, a colour and a shape, or a digit and a
# colour) alone decides whether it is held out: ``test`` asks about two red squares, and ``train`` never shows any.
#
#     describe  what do you see?       the number, the colour and the shape
#     ask       how many, which …      the same, one by one
#     digit     which digit is it?     the digit, or its colour

_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}


def picture_rows(split: str) -> Iterator[JsonObject]:
    """``{"skill": NAME, "messages": MESSAGES}``, pictures as ``{"type": "image", "image": {"bytes": PNG}}`` before the
    first question; else as `quiz_rows` says.
    """
    yield from quiz_rows(PICTURE_SKILLS, split)


def _draw_describe(rng: Random) -> Quiz:
    count, colour, shape = _things(rng)
    asked = rng.choice(["What do you see?", "Describe the picture."])
    answer = f"{_NUMBERS[count].capitalize()} {colour} {_named(shape, count)}."
    return _quiz(_image(draw_shapes(shape, colour, count, rng)), {asked: answer}, f"{_NUMBERS[count]} {colour} {shape}")


def _draw_ask(rng: Random) -> Quiz:
    count, colour, shape = _things(rng)
    answers = {
        "How many are there?": f"{_NUMBERS[count].capitalize()}.",
        "Which colour?": f"{colour.capitalize()}.",
        "Which shape?": f"A {shape}.",
    }
    return _quiz(_image(draw_shapes(shape, colour, count, rng)), answers, f"{_NUMBERS[count]} {colour} {shape}")


def _draw_digit(rng: Random) -> Quiz:
    digit, colour = rng.choice(list(DIGITS)), rng.choice(list(COLOURS))
    answers = {"Which digit is it?": f"It is {digit}.", "Which colour?": f"{colour.capitalize()}."}
    return _quiz(_image(draw_digit(digit, colour, rng)), answers, f"{colour} {digit}")


def _image(picture: bytes) -> JsonObject:
    return {"type": "image", "image": {"bytes": picture}}


def _things(rng: Random) -> tuple[int, str, str]:
    """How many, of which colour and shape."""
    return rng.choice(list(_NUMBERS)), rng.choice(list(COLOURS)), rng.choice(list(SHAPES))


def _named(shape: str, count: int) -> str:
    """``"cross", 2`` -> ``"crosses"``"""
    return shape if count == 1 else f"{shape}{'es' if shape == 'cross' else 's'}"


PICTURE_SKILLS: Sequence[QuizSkill] = (
    QuizSkill(name="describe", draw=_draw_describe, num_train=3600, num_test=60),
    QuizSkill(name="ask", draw=_draw_ask, num_train=3600, num_test=90),
    QuizSkill(name="digit", draw=_draw_digit, num_train=4000, num_test=60),
)


# --------------------------------------------------------------------------------------------------------------------
# Small pictures: one coloured thing on a plain dark ground, or a few alike, as the bytes of a PNG file.
#
# A picture is a square of four cells, two by two. Sizes, places and shades differ a little from one to the next, as
# `Random` draws them.


SIZE = 32  # pixels, wide and high
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 215, 50),
    "purple": (160, 50, 190),
    "white": (245, 245, 245),
    "orange": (245, 130, 20),
    "pink": (250, 140, 200),
    "cyan": (40, 205, 225),
}
_DrawShape = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]

# Where a shape is: of points with y down and x to the right, -1 to 1 within its box.
SHAPES: dict[str, _DrawShape] = {
    "circle": lambda y, x: y**2 + x**2 <= 1,
    "square": lambda y, x: np.maximum(abs(y), abs(x)) <= 0.9,
    "triangle": lambda y, x: (abs(x) <= (y + 1) / 2) & (y <= 0.9),
    "cross": lambda y, x: np.minimum(abs(y), abs(x)) <= 0.3,
    "ring": lambda y, x: abs(y**2 + x**2 - 0.7) <= 0.3,
}
# 5 x 7 dots, row by row
DIGITS = {
    "0": ".###.|#...#|#...#|#...#|#...#|#...#|.###.", "1": "..#..|.##..|..#..|..#..|..#..|..#..|.###.",
    "2": ".###.|#...#|....#|...#.|..#..|.#...|#####", "3": "#####|...#.|..#..|...#.|....#|#...#|.###.",
    "4": "...#.|..##.|.#.#.|#..#.|#####|...#.|...#.", "5": "#####|#....|####.|....#|....#|#...#|.###.",
    "6": "..##.|.#...|#....|####.|#...#|#...#|.###.", "7": "#####|....#|...#.|..#..|.#...|.#...|.#...",
    "8": ".###.|#...#|#...#|.###.|#...#|#...#|.###.", "9": ".###.|#...#|#...#|.####|....#|...#.|.##..",
}  # fmt: skip
_CELLS = [(SIZE / 4, SIZE / 4), (SIZE / 4, SIZE * 3 / 4), (SIZE * 3 / 4, SIZE / 4), (SIZE * 3 / 4, SIZE * 3 / 4)]
_FINE = 2  # points of a pixel, each way: edges are mixtures of the two colours


@dataclass(frozen=True, kw_only=True, slots=True)
class _Box:
    """Where a thing is drawn: its middle and half its sides, in pixels."""

    y: float
    x: float
    half_height: float
    half_width: float


def draw_shapes(shape: str, colour: str, count: int, rng: Random) -> bytes:
    """A PNG of ``count`` (1 to 4) things alike: one is large, several are small and each in a cell of its own."""
    if count == 1:
        boxes = [_square_box(rng, SIZE / 2, SIZE / 2, radius=rng.uniform(9, 12), slack=3)]
    else:
        boxes = [_square_box(rng, y, x, radius=rng.uniform(5, 6.25), slack=0.75) for y, x in rng.sample(_CELLS, count)]
    return _paint(SHAPES[shape], boxes, colour, rng)


def draw_digit(digit: str, colour: str, rng: Random) -> bytes:
    """A PNG of one large digit."""
    dots = np.array([[dot == "#" for dot in line] for line in DIGITS[digit].split("|")])
    half_height = rng.uniform(10, 13)
    y, x = SIZE / 2 + rng.uniform(-2, 2), SIZE / 2 + rng.uniform(-4, 4)
    box = _Box(y=y, x=x, half_height=half_height, half_width=half_height * 0.65)
    return _paint(lambda down, right: _within(dots, down, right), [box], colour, rng)


def _square_box(rng: Random, y: float, x: float, *, radius: float, slack: float) -> _Box:
    """A box somewhere about a point."""
    y, x = y + rng.uniform(-slack, slack), x + rng.uniform(-slack, slack)
    return _Box(y=y, x=x, half_height=radius, half_width=radius)


def _within(dots: NDArray[np.bool_], y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which points of a box, -1 to 1, lie in one of its dots that are set."""
    row, column = (((part + 1) / 2 * n).astype(int) for part, n in zip((y, x), dots.shape, strict=True))
    return np.asarray(dots[row, column])


def _paint(mask: _DrawShape, boxes: Sequence[_Box], colour: str, rng: Random) -> bytes:
    """The pixels follow from the arguments alone; their compression may differ from one zlib to another."""
    covered = np.zeros((SIZE * _FINE, SIZE * _FINE), dtype=bool)
    for box in boxes:
        rows, down = _points(box.y, box.half_height)
        columns, right = _points(box.x, box.half_width)
        covered[rows, columns] = mask(down[:, None], right[None, :])
    fine = covered.astype(np.float64).reshape(SIZE, _FINE, SIZE, _FINE)
    share = np.einsum("yaxb->yx", fine)[..., None] / _FINE**2  # of each pixel
    ground = rng.uniform(10, 50)
    lit = np.array(COLOURS[colour]) * rng.uniform(0.85, 1.0)
    return _png((ground + (lit - ground) * share).astype(np.uint8))


def _points(middle: float, half: float) -> tuple[slice, NDArray[np.float64]]:
    """Which points of the fine grid lie within ``half`` pixels of ``middle``, and where between -1 and 1."""
    first = max(0, ceil((middle - half) * _FINE - 0.5))
    stop = min(SIZE * _FINE, ceil((middle + half) * _FINE - 0.5))
    return slice(first, stop), ((np.arange(first, stop) + 0.5) / _FINE - middle) / half


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """uint8[H, W, 3] as a file of 8 bits a channel, lines as they are."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each begins with its filter: 0, none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


# ---- The data set ``preset:sounds``: questions about short sounds, learnable from nothing in a few minutes.
#
# A sound is one to four beeps, all alike, or one tone that glides. Three skills ask about it:
#
#     beeps        how many, long or short, high or low, what do they sound like?    one thing each
#     tone         where does it go, what does it sound like?                        one thing each
#     description  what do you hear?                                                 all of it, of either
#
# Nothing in a row tells the answer but the sound: what is asked together is independent. What is held out are sounds:
# ``test`` plays combinations of number, length, pitch (in steps of two semitones), timbre and glide that ``train``
# never plays.


def sound_rows(split: str) -> Iterator[JsonObject]:
    """``{"skill": NAME, "messages": MESSAGES}``, a sound as ``{"type": "audio", "audio": {"bytes": WAV}}`` before the
    first question; else as `quiz_rows` says.
    """
    yield from quiz_rows(SOUND_SKILLS, split)


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
    told = f"{_NUMBERS[number]} {length} {pitch} {timbre} beep{'s' if number > 1 else ''}"
    return _Sound(
        wav=play_beeps(number, hertz=PITCHES[pitch][step], length=length, timbre=timbre, seed=rng.getrandbits(32)),
        key=f"{told} {step}",
        answers={
            "How many beeps are there?": f"There {'are' if number > 1 else 'is'} {_NUMBERS[number]}.",
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
    return _quiz({"type": "audio", "audio": {"bytes": sound.wav}}, sound.answers, sound.key)


def _draw_description(rng: Random) -> Quiz:
    sound = rng.choice([_beeps, _beeps, _tone])(rng)
    return _quiz({"type": "audio", "audio": {"bytes": sound.wav}}, {"What do you hear?": sound.description}, sound.key)


SOUND_SKILLS: Sequence[QuizSkill] = (
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
