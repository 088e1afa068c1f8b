"""The data set ``preset:pictures``: questions about small pictures, drawn anew from a seed.

Seven skills. What is asked for is a thing (a red cross) in a place; that combination alone decides whether the question
is held out, so that ``test`` asks for things where ``train`` never asked for them:

    describe  what do you see?                     all the things, in their order
    colour    what colour is the cross?            the colour, the shape and the place
    shape     which shape is red?                  the same
    place     where is the cross?                  the same
    compare   which picture shows a cross?         the same; there are two pictures
    count     how many crosses are there?          the number, what is counted, and how many things there are
    number    which number is written here?        the number, of two digits, and the place
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from luthier.presets.drawing import COLOURS, SHAPES, Cell, Drawing, draw_picture
from luthier.presets.questions import Draw, Skill, skill_rows

_SIZES = ((3, 3), (2, 3), (3, 2))  # cells down, cells across
_FULL_SIZES = ((2, 2), (2, 3), (3, 2))
_DOWN = {2: ("top", "bottom"), 3: ("top", "middle", "bottom")}
_ACROSS = {2: ("left", "right"), 3: ("left", "centre", "right")}
_MOST = 5  # things to count


def picture_rows(split: str) -> Iterator[dict[str, Any]]:
    """``{"skill": NAME, "messages": MESSAGES}``, pictures as ``{"type": "image", "image": {"bytes": PNG}}`` before the
    question; in the order, and with the promises, of `skill_rows`. Raises `SourceError` for another split.
    """
    yield from skill_rows("pictures", SKILLS, split)


def _draw_describe(rng: Random) -> Draw:
    rows, columns = size = rng.choice(_FULL_SIZES)
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    drawn = list(zip(_colours(rng, len(cells)), _shapes(rng, len(cells)), strict=True))
    lines = [", ".join(" ".join(one) for one in drawn[at : at + columns]) for at in range(0, len(drawn), columns)]
    question = rng.choice(["What do you see?", "Describe the picture."])
    return [" and ".join(lines)], _ask([_picture(size, cells, drawn, rng)], question, f"I see: {'; '.join(lines)}.")


def _draw_colour(rng: Random) -> Draw:
    size, cells = _grid(rng, rng.randint(2, 4))
    drawn = list(zip(_colours(rng, len(cells)), rng.sample(list(SHAPES), len(cells)), strict=True))
    colour, shape = drawn[0]
    question = rng.choice(["What colour is the {}?", "Which colour does the {} have?"]).format(shape)
    return [_key(drawn[0], cells[0])], _ask([_picture(size, cells, drawn, rng)], question, f"The {shape} is {colour}.")


def _draw_shape(rng: Random) -> Draw:
    size, cells = _grid(rng, rng.randint(2, 4))
    drawn = list(zip(rng.sample(list(COLOURS), len(cells)), _shapes(rng, len(cells)), strict=True))
    colour, shape = drawn[0]
    question = rng.choice(["Which shape is {}?", "What is the shape of the {} one?"]).format(colour)
    return [_key(drawn[0], cells[0])], _ask(
        [_picture(size, cells, drawn, rng)], question, f"The {colour} one is a {shape}."
    )


def _draw_count(rng: Random) -> Draw:
    number = rng.randint(1, _MOST)
    others = rng.randint(0, min(3, 6 - number))
    size, cells = _grid(rng, number + others)
    if rng.random() < 0.5:
        what = rng.choice(list(SHAPES))
        shapes = [what] * number + [rng.choice([shape for shape in SHAPES if shape != what]) for _ in range(others)]
        drawn, name = list(zip(_colours(rng, len(cells)), shapes, strict=True)), what
    else:
        what = rng.choice(list(COLOURS))
        colours = [what] * number + [rng.choice([one for one in COLOURS if one != what]) for _ in range(others)]
        drawn, name = list(zip(colours, _shapes(rng, len(cells)), strict=True)), f"{what} shape"
    question = f"How many {name}{'es' if name == 'cross' else 's'} are there?"
    return [f"{number} {what} of {len(cells)}"], _ask(
        [_picture(size, cells, drawn, rng)], question, f"The number is {number}."
    )


def _draw_number(rng: Random) -> Draw:
    (rows, columns), number, colour = rng.choice(_SIZES), rng.randrange(10, 100), rng.choice(list(COLOURS))
    row, column = rng.randrange(rows), rng.randrange(columns - 1)
    digits = {(row, column + place): (colour, digit) for place, digit in enumerate(str(number))}
    picture = draw_picture(digits, rows=rows, columns=columns, rng=rng)
    question = rng.choice(["Which number is written here?", "Read the number."])
    return [f"{number} {row} {column}"], _ask([picture], question, f"It is {number}.")


def _draw_place(rng: Random) -> Draw:
    size, cells = _grid(rng, rng.randint(2, 4))
    drawn = list(zip(_colours(rng, len(cells)), rng.sample(list(SHAPES), len(cells)), strict=True))
    shape, (row, column) = drawn[0][1], cells[0]
    place = f"{_DOWN[size[0]][row]} {_ACROSS[size[1]][column]}"
    question = rng.choice(["Where is the {}?", "In which place is the {}?"]).format(shape)
    answer = f"The {shape} is at the {place}."
    return [_key(drawn[0], cells[0])], _ask([_picture(size, cells, drawn, rng)], question, answer)


def _draw_compare(rng: Random) -> Draw:
    colour, shape = rng.choice(list(COLOURS)), rng.choice(list(SHAPES))
    other = rng.choice([one for one in SHAPES if one != shape])
    shown = rng.randrange(2)
    keys, pictures = [], []
    for index in range(2):
        size, cells = _grid(rng, 2)
        rest = rng.choice([one for one in SHAPES if one not in (shape, other)])
        drawn = [(colour if index == shown else _colours(rng, 1)[0], shape if index == shown else other)]
        keys += [_key(drawn[0], cells[0])] if index == shown else []
        pictures.append(_picture(size, cells, [*drawn, (_colours(rng, 1)[0], rest)], rng))
    answer = f"The {('first', 'second')[shown]} picture shows a {colour} {shape}."
    return keys, _ask(pictures, f"Which picture shows a {shape}?", answer)


def _grid(rng: Random, count: int) -> tuple[tuple[int, int], list[Cell]]:
    """The size of a picture, and ``count`` of its cells."""
    rows, columns = size = rng.choice(_SIZES)
    return size, rng.sample([(row, column) for row in range(rows) for column in range(columns)], count)


def _key(drawing: Drawing, cell: Cell) -> str:
    """``"red cross 0 2"``"""
    return f"{' '.join(drawing)} {cell[0]} {cell[1]}"


def _colours(rng: Random, count: int) -> list[str]:
    return rng.choices(list(COLOURS), k=count)


def _shapes(rng: Random, count: int) -> list[str]:
    return rng.choices(list(SHAPES), k=count)


def _picture(size: tuple[int, int], cells: Sequence[Cell], drawn: Sequence[Drawing], rng: Random) -> bytes:
    return draw_picture(dict(zip(cells, drawn, strict=True)), rows=size[0], columns=size[1], rng=rng)


def _ask(pictures: Sequence[bytes], question: str, answer: str) -> list[dict[str, Any]]:
    shown = [{"type": "image", "image": {"bytes": picture}} for picture in pictures]
    return [
        {"role": "user", "content": [*shown, {"type": "text", "text": question}]},
        {"role": "assistant", "content": answer},
    ]


SKILLS = (
    Skill(name="describe", draw=_draw_describe, num_train=2000),
    Skill(name="colour", draw=_draw_colour, num_train=1000),
    Skill(name="shape", draw=_draw_shape, num_train=1000),
    Skill(name="count", draw=_draw_count, num_train=1400),
    Skill(name="number", draw=_draw_number, num_train=1400),
    Skill(name="place", draw=_draw_place, num_train=1200),
    Skill(name="compare", draw=_draw_compare, num_train=1000),
)
