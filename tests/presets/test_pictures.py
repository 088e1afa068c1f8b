"""The data set ``preset:pictures``: what its rows promise, read back from the pixels."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from luthier.presets.quizzes import COLOURS, DIGITS, PICTURE_SKILLS, SHAPES, SIZE, draw_digit, draw_shapes, picture_rows

Row = dict[str, Any]
Mask = NDArray[np.bool_]
NUMBERS = ("one", "two", "three", "four")


@pytest.fixture(scope="module")
def train() -> list[Row]:
    return list(picture_rows("train"))


@pytest.fixture(scope="module")
def test() -> list[Row]:
    return list(picture_rows("test"))


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)))


def picture(row: Row) -> NDArray[np.uint8]:
    return pixels_of(row["messages"][0]["content"][0]["image"]["bytes"])


def turns(row: Row) -> Iterator[tuple[str, str]]:
    """The questions of a row with their answers."""
    texts = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"] for m in row["messages"]]
    yield from zip(texts[::2], texts[1::2], strict=True)


def lit(pixels: NDArray[np.uint8]) -> Mask:
    """Which pixels are not ground."""
    return np.asarray(np.ptp(pixels, axis=2) + pixels.max(axis=2).astype(int) > 110)


def colour_in(pixels: NDArray[np.uint8]) -> str:
    """The name whose direction is nearest to that of the brightest pixel."""
    brightest = pixels.reshape(-1, 3)[pixels.sum(axis=2).argmax()].astype(float)
    values = np.array(list(COLOURS.values()), dtype=float)
    return list(COLOURS)[int((values @ brightest / np.linalg.norm(values, axis=1)).argmax())]


def things_in(mask: Mask) -> list[Mask]:
    """The separate areas, each cut out of the picture."""
    rest, found = {(int(y), int(x)) for y, x in np.argwhere(mask)}, []
    while rest:
        area, edge = set[tuple[int, int]](), [rest.pop()]
        while edge:
            y, x = edge.pop()
            area.add((y, x))
            near = {(y + down, x + right) for down, right in product((-1, 0, 1), repeat=2)} & rest
            rest -= near
            edge += near
        if len(area) > 8:  # less is a smudge of an edge
            rows, columns = zip(*area, strict=True)
            found.append(mask[min(rows) : max(rows) + 1, min(columns) : max(columns) + 1])
    return found


def shape_of(thing: Mask) -> str:
    """By what a shape alone has: a hole, a broad foot, straight edges, how much of its box it fills."""
    height, width = thing.shape
    if not thing[height // 2 - 1 : height // 2 + 1, width // 2 - 1 : width // 2 + 1].any():
        return "ring"
    third = height // 3
    if thing[-third:].sum() > 2 * thing[:third].sum():
        return "triangle"
    if thing.mean() > 0.9 and thing[0].mean() > 0.7:
        return "square"
    return "circle" if thing.mean() > 0.64 else "cross"


def digit_of(thing: Mask) -> str:
    """The digit whose dots agree best with the area's, both without what is empty around them."""
    height, width = thing.shape
    agreed = {}
    for digit, lines in DIGITS.items():
        dots = np.array([[dot == "#" for dot in line] for line in lines.split("|")])
        dots = dots[:, dots.any(axis=0)]
        rows, columns = (
            [int((i + 0.5) * size / n) for i in range(n)] for size, n in zip((height, width), dots.shape, strict=True)
        )
        agreed[digit] = np.mean(thing[np.ix_(rows, columns)] == dots)
    return max(agreed, key=lambda digit: agreed[digit])


def seen(row: Row) -> set[str]:
    """All words for what the picture shows: ``{"two", "red", "ring"}``, ``{"7", "blue"}``."""
    pixels = picture(row)
    things = things_in(lit(pixels))
    if row["skill"] == "digit":
        return {colour_in(pixels), digit_of(things[0])}
    return {NUMBERS[len(things) - 1], colour_in(pixels), *map(shape_of, things)}


def said(answer: str) -> set[str]:
    """``"Two red crosses."`` -> ``{"two", "red", "cross"}``; words that say nothing of the picture are left out."""
    words = {re.sub(r"(?<=.{3})(?<=ss)es$|(?<=[eg])s$", "", word) for word in re.findall(r"\w+", answer.lower())}
    return words - {"a", "it", "is"}


def faults(row: Row) -> list[str]:
    """Answers of a row that the pixels do not show."""
    there = seen(row)
    return [f"{question} {answer} {there}" for question, answer in turns(row) if not said(answer) <= there]


def test_each_skill_has_the_rows_it_declares(train: list[Row], test: list[Row]) -> None:
    assert Counter(row["skill"] for row in train) == {skill.name: skill.num_train for skill in PICTURE_SKILLS}
    assert Counter(row["skill"] for row in test) == {skill.name: skill.num_test for skill in PICTURE_SKILLS}
    assert test == list(picture_rows("test")), "they are the same every time"


def test_answers_say_what_the_pixels_show(train: list[Row], test: list[Row]) -> None:
    assert [fault for row in [*test, *train[:500]] for fault in faults(row)] == []
    told = set[str]().union(*(said(answer) for row in test for _, answer in turns(row)))
    assert told == {*NUMBERS, *COLOURS, *SHAPES} | (told & set(DIGITS)), (
        "the words that are told are those of the pixels"
    )


def test_the_check_of_answers_finds_pictures_that_were_exchanged(test: list[Row]) -> None:
    described = [row for row in test if row["skill"] == "describe"]
    wrong = [
        faults(row | {"messages": [other["messages"][0], *row["messages"][1:]]}) for row, other in pairwise(described)
    ]
    others = [next(turns(row))[1] != next(turns(other))[1] for row, other in pairwise(described)]
    assert [bool(found) for found in wrong] == others and sum(others) > 40


def test_no_combination_that_is_asked_for_was_shown_in_training(train: list[Row], test: list[Row]) -> None:
    def combinations(rows: list[Row]) -> set[frozenset[str]]:
        """What whole rows tell; a digit or a number comes with its colour."""
        told = (frozenset().union(*(said(answer) for _, answer in turns(row))) for row in rows)
        return {words for words in told if len(words) >= 2}

    assert {frozenset(seen(row)) for row in test} & combinations(train) == set()
    assert {frozenset(seen(row)) for row in train[:500]} & combinations(test) == set()
    assert len(combinations(train)) > 150, "all others were shown"


def test_rows_of_training_ask_several_questions_about_a_picture(train: list[Row]) -> None:
    asked = {
        skill.name: {len(list(turns(row))) for row in train if row["skill"] == skill.name} for skill in PICTURE_SKILLS
    }
    assert asked == {"describe": {1}, "ask": {3}, "digit": {2}}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_drawn_whole_wherever_they_stand(shape: str) -> None:
    for seed, count in product(range(20), (1, 2, 3, 4)):
        things = things_in(lit(pixels_of(draw_shapes(shape, "white", count, Random(seed)))))
        assert [shape_of(thing) for thing in things] == [shape] * count


@pytest.mark.parametrize("digit", DIGITS)
def test_digits_can_be_read(digit: str) -> None:
    for seed in range(20):
        (thing,) = things_in(lit(pixels_of(draw_digit(digit, "yellow", Random(seed)))))
        assert digit_of(thing) == digit


def test_a_picture_is_fixed_by_its_random_numbers_and_has_one_colour_on_a_dark_ground() -> None:
    data = draw_shapes("ring", "red", 3, Random(1))
    assert data == draw_shapes("ring", "red", 3, Random(1)) != draw_shapes("ring", "red", 3, Random(2))
    pixels = pixels_of(data)
    assert pixels.shape == (SIZE, SIZE, 3)
    assert np.ptp(pixels[~lit(pixels)], axis=1).max() < 60 and pixels[~lit(pixels)].max() < 110
    assert colour_in(pixels) == "red"
