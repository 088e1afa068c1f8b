"""The data sets ``preset:lookups`` and ``preset:lookups_sft``: questions that a tool answers, if it is asked rightly.

A book of a shop has price and stock of every item, each a digit, which the tool ``look_up`` tells.
A question asks for one of the two. The conversations of ``lookups_sft`` show how the tool is called and how its result
is said, but they ask it for either column, whatever the question wants: a model that learned them is right about half
of the time. Which column is wanted is learned from the rewards of ``lookups``, whose rows hold questions and answers.

Two things make the task one for a tool. The results in ``lookups_sft`` are drawn at random, so a model can only read
them, not know them by heart. And some rows of it ask which column a question is about, without any call: nothing else
there depends on what a question wants, and a tiny model would learn to ignore it.

``train`` and ``test`` of ``lookups`` ask for different items, so whoever answers ``test`` has to call the tool, for the
column that the question wants. In ``lookups_sft``, which shows how to call it for all items, ``test`` asks for an item
and a column that its ``train`` does not ask for together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from zlib import crc32

from luthier.presets.questions import JsonObject, ask, require_split

COLUMNS = ("price", "stock")
_QUESTIONS = {
    "price": (
        "How much is the {}?", "What does the {} cost?", "Tell me the price of the {}.", "I buy the {}. How much?",
        "Is the {} dear?",
    ),
    "stock": (
        "Is the {} sold out?", "Do we have the {}?", "Tell me the stock of the {}.", "How often is the {} there?",
        "I want to count the {}. How many?",
    ),
}  # fmt: skip
_ITEMS = (
    "lamp", "chair", "table", "spoon", "knife", "mirror", "pillow", "bottle", "candle", "hat", "glove", "ring", "drum",
    "flute", "violin", "rope", "ladder", "wheel", "kite", "nail", "umbrella", "axe", "oven", "jug",
)  # fmt: skip
DECLARATION = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What the book of the shop says.",
        "parameters": {
            "type": "object",
            "properties": {"column": {"type": "string"}, "item": {"type": "string"}},
            "required": ["column", "item"],
        },
    },
}


def look_up(column: str, item: str) -> str:
    """What the book of the shop says: a digit, never the same in both columns of an item. Raises ``ValueError`` for
    what it does not have."""
    if column not in COLUMNS:
        raise ValueError(f"there is no column {column!r}")
    if item not in _ITEMS:
        raise ValueError(f"there is no item {item!r}")
    number = crc32(f"{item} digits".encode())
    price = number % 10
    return str(price if column == "price" else (price + 1 + number // 10 % 9) % 10)


def lookup_rows(split: str) -> Iterator[JsonObject]:
    """``{"messages": [QUESTION, ANSWER]}``; always the same, shuffled. Raises `SourceError` for another split."""
    require_split("lookups", split)
    rows = [
        {"messages": [*ask(question), {"role": "assistant", "content": look_up(column, item)}]}
        for column, item, question in _asked()
        if (crc32(item.encode()) % 5 == 0) is (split == "test")
    ]
    Random("lookups").shuffle(rows)
    yield from rows


def lookup_sft_rows(split: str) -> Iterator[JsonObject]:
    """``{"tools": …, "messages": [QUESTION, CALL, RESULT, ANSWER]}``: each question twice, once with each column; and
    ``[QUESTION, COLUMN]`` for each. Raises `SourceError` for another split."""
    require_split("lookups_sft", split)
    rng = Random(f"lookups_sft {split}")
    rows = []
    for column, item, question in _asked():
        if (crc32(f"{item} {column}".encode()) % 5 == 0) is not (split == "test"):
            continue
        for called in COLUMNS:
            rows.append(ask(question) + _call_and_answer(called, item, str(rng.randrange(10))))
        rows.append(ask(f"{question} Price or stock?", column))
    rng.shuffle(rows)
    yield from ({"tools": [DECLARATION], "messages": messages} for messages in rows)


def _call_and_answer(column: str, item: str, said: str) -> list[JsonObject]:
    arguments = json.dumps({"column": column, "item": item})
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": arguments}}],
        },
        {"role": "tool", "name": "look_up", "content": said},
        {"role": "assistant", "content": said},
    ]


def _asked() -> Iterator[tuple[str, str, str]]:
    """Column, item and question."""
    for item in _ITEMS:
        for column in COLUMNS:
            for question in _QUESTIONS[column]:
                yield column, item, question.format(item)
