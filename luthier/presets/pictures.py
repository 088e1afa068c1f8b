"""The data set ``preset:pictures``: questions about small pictures, learnable from nothing in a few minutes.

A picture shows one thing, or up to four alike. What it shows (a number, a colour and a shape, or a digit and a colour)
alone decides whether it is held out: ``test`` asks about two red squares, and ``train`` never shows any.

    describe  what do you see?       the number, the colour and the shape
    ask       how many, which …      the same, one by one
    digit     which digit is it?     the digit, or its colour
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from luthier.presets.drawing import COLOURS, DIGITS, SHAPES, draw_digit, draw_shapes
from luthier.presets.quizzes import Question, Quiz, QuizSkill, quiz_rows

_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}


def picture_rows(split: str) -> Iterator[dict[str, Any]]:
    """``{"skill": NAME, "messages": MESSAGES}``, pictures as ``{"type": "image", "image": {"bytes": PNG}}`` before the
    first question; else as `quiz_rows` says. Raises `SourceError` for another split.
    """
    yield from quiz_rows("pictures", SKILLS, split)


def _draw_describe(rng: Random) -> Quiz:
    count, colour, shape = _things(rng)
    asked = rng.choice(["What do you see?", "Describe the picture."])
    answer = f"{_NUMBERS[count].capitalize()} {colour} {_named(shape, count)}."
    return _quiz(draw_shapes(shape, colour, count, rng), {asked: answer}, f"{_NUMBERS[count]} {colour} {shape}")


def _draw_ask(rng: Random) -> Quiz:
    count, colour, shape = _things(rng)
    answers = {
        "How many are there?": f"{_NUMBERS[count].capitalize()}.",
        "Which colour?": f"{colour.capitalize()}.",
        "Which shape?": f"A {shape}.",
    }
    return _quiz(draw_shapes(shape, colour, count, rng), answers, f"{_NUMBERS[count]} {colour} {shape}")


def _draw_digit(rng: Random) -> Quiz:
    digit, colour = rng.choice(list(DIGITS)), rng.choice(list(COLOURS))
    answers = {"Which digit is it?": f"It is {digit}.", "Which colour?": f"{colour.capitalize()}."}
    return _quiz(draw_digit(digit, colour, rng), answers, f"{colour} {digit}")


def _things(rng: Random) -> tuple[int, str, str]:
    """How many, of which colour and shape."""
    return rng.choice(list(_NUMBERS)), rng.choice(list(COLOURS)), rng.choice(list(SHAPES))


def _named(shape: str, count: int) -> str:
    """``"cross", 2`` -> ``"crosses"``"""
    return shape if count == 1 else f"{shape}{'es' if shape == 'cross' else 's'}"


def _quiz(picture: bytes, answers: dict[str, str], key: str) -> Quiz:
    return Quiz(
        shown=[{"type": "image", "image": {"bytes": picture}}],
        questions=[Question(key=key, question=asked, answer=answer) for asked, answer in answers.items()],
    )


SKILLS: Sequence[QuizSkill] = (
    QuizSkill(name="describe", draw=_draw_describe, num_train=3600, num_test=60),
    QuizSkill(name="ask", draw=_draw_ask, num_train=3600, num_test=90),
    QuizSkill(name="digit", draw=_draw_digit, num_train=4000, num_test=60),
)
