"""The data sets ``preset:lookups`` and ``preset:lookups_sft``: questions that a tool answers, if it is asked rightly.

A book of a shop has price and stock of every item, each a digit, which the tool ``look_up`` tells.
A question asks for one of the two. The conversations of ``lookups_sft`` show how the tool is called and how its result
is said, but they ask it for either column, whatever the question wants: a model that learned them is right about half
of the time. Which column is wanted is learned from the rewards of ``lookups``, whose rows hold questions and answers.

What ``test`` asks, an item and a column, is never asked in ``train``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from zlib import crc32

from luthier.presets.questions import JsonObject, ask, is_held_out, require_split

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
    "lamp", "chair", "table", "book", "cup", "plate", "spoon", "knife", "bowl", "pan", "clock", "mirror", "carpet",
    "pillow", "basket", "bottle", "broom", "brush", "bucket", "candle", "coat", "hat", "shoe", "scarf", "glove", "belt",
    "ring", "drum", "flute", "harp", "horn", "lute", "violin", "cello", "rope", "saw", "hammer", "nail", "ladder",
    "wheel", "cart", "boat", "tent", "bag", "box", "pen", "map", "kite",
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
    """What the book of the shop says: a digit. Raises ``ValueError`` for what it does not have."""
    if column not in COLUMNS:
        raise ValueError(f"there is no column {column!r}")
    if item not in _ITEMS:
        raise ValueError(f"there is no item {item!r}")
    return str(crc32(f"{item} {column}".encode()) % 10)


def lookup_rows(split: str) -> Iterator[JsonObject]:
    """``{"messages": [QUESTION, ANSWER]}``; always the same, shuffled. Raises `SourceError` for another split."""
    require_split("lookups", split)
    rows = [
        {"messages": [*ask(question), {"role": "assistant", "content": look_up(column, item)}]}
        for column, item, question in _asked(split)
    ]
    Random("lookups").shuffle(rows)
    yield from rows


def lookup_sft_rows(split: str) -> Iterator[JsonObject]:
    """``{"tools": …, "messages": [QUESTION, CALL, RESULT, ANSWER]}``: each question twice, once with each column."""
    require_split("lookups_sft", split)
    rows = []
    for _, item, question in _asked(split):
        for called in COLUMNS:
            arguments, said = {"column": called, "item": item}, look_up(called, item)
            call = {"type": "function", "function": {"name": "look_up", "arguments": json.dumps(arguments)}}
            rows.append(
                {
                    "tools": [DECLARATION],
                    "messages": [
                        *ask(question),
                        {"role": "assistant", "content": "", "tool_calls": [call]},
                        {"role": "tool", "name": "look_up", "content": said},
                        {"role": "assistant", "content": said},
                    ],
                }
            )
    Random("lookups_sft").shuffle(rows)
    yield from rows


def _asked(split: str) -> Iterator[tuple[str, str, str]]:
    """Column, item and question."""
    for item in _ITEMS:
        for column in COLUMNS:
            if is_held_out(f"{item} {column}") is (split == "test"):
                for question in _QUESTIONS[column]:
                    yield column, item, question.format(item)
