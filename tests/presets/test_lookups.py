"""The data sets of the tool task: what their rows promise."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from luthier.errors import SourceError
from luthier.presets import SPLITS, dataset_rows
from tests.presets.rows_script import SCRIPT

COLUMNS, look_up = SCRIPT.COLUMNS, SCRIPT.look_up

Row = dict[str, Any]


def said(row: Row) -> list[str]:
    return [message["content"] for message in row["messages"]]


def called(row: Row) -> dict[str, str] | None:
    """What a row's call asks for, if it has one."""
    for message in row["messages"]:
        for call in message.get("tool_calls", []):
            arguments: dict[str, str] = json.loads(call["function"]["arguments"])
            return arguments
    return None


@pytest.mark.parametrize(("split", "num_questions"), [("train", 190), ("test", 50)])
def test_the_answer_is_what_the_tool_says_of_the_column_that_is_asked_for(split: str, num_questions: int) -> None:
    rows = list(dataset_rows("lookups", split))
    columns = columns_asked()
    assert len(rows) == num_questions and all(said(row)[0] in columns for row in rows)
    for row in rows:
        question, answer = said(row)
        assert answer == look_up(columns[question], item_of(question))
        other = COLUMNS[1 - COLUMNS.index(columns[question])]
        assert answer != look_up(other, item_of(question)), "the other column's answer is never right"
    answers = Counter(said(row)[1] for row in rows)
    assert max(answers.values()) < 0.25 * len(rows), "no digit is right often"


def columns_asked(*splits: str) -> dict[str, str]:
    """Which column a question is about, as the rows without a call say."""
    rows = [
        said(row) for split in splits or SPLITS for row in dataset_rows("lookups_sft", split) if called(row) is None
    ]
    return {question.removesuffix(" Price or stock?"): answer for question, answer in rows}


def item_of(question: str) -> str:
    (item,) = {word for word in re.findall(r"\w+", question) if _is_item(word)}
    return item


def _is_item(word: str) -> bool:
    try:
        look_up("price", word)
    except ValueError:
        return False
    return True


def test_conversations_call_either_column_and_their_results_are_not_those_of_the_tool() -> None:
    rows = [row for row in dataset_rows("lookups_sft", "train") if called(row) is not None]
    by_question: dict[str, list[str]] = {}
    true = 0
    for row in rows:
        arguments, (question, _, result, answer) = called(row) or {}, said(row)
        by_question.setdefault(question, []).append(arguments["column"])
        assert result == answer
        true += result == look_up(**arguments)
    assert all(sorted(columns) == sorted(COLUMNS) for columns in by_question.values())
    assert 0.05 < true / len(rows) < 0.15, "as often as by chance"


def test_held_out_questions_are_about_other_items() -> None:
    items = [{item_of(said(row)[0]) for row in dataset_rows("lookups", split)} for split in SPLITS]
    assert [len(one) for one in items] == [19, 5] and not items[0] & items[1]
    pairs = [{(item_of(asked), column) for asked, column in columns_asked(split).items()} for split in SPLITS]
    assert not pairs[0] & pairs[1]
    with pytest.raises(SourceError):
        list(dataset_rows("lookups", "other"))
