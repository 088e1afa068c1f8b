"""The data set ``preset:skills``: what its rows promise."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from luthier.errors import SourceError
from luthier.presets import dataset_rows, tokenizer_folder
from tests.presets.rows_script import SCRIPT

Row = dict[str, Any]


@pytest.fixture(scope="module")
def train() -> list[Row]:
    return list(dataset_rows("skills", "train"))


@pytest.fixture(scope="module")
def test() -> list[Row]:
    return list(dataset_rows("skills", "test"))


def asked(row: Row) -> list[str]:
    """Every prompt that is answered in a row: its tools and the messages before an answer."""
    tools, messages = json.dumps(row.get("tools")), row["messages"]
    return [tools + json.dumps(messages[:i]) for i, message in enumerate(messages) if message["role"] == "assistant"]


def shared_prompts(train: list[Row], test: list[Row]) -> list[str]:
    seen = {prompt for row in train for prompt in asked(row)}
    return [prompt for row in test for prompt in asked(row) if prompt in seen]


def faults(row: Row) -> list[str]:
    """What is wrong with a row's turns and tool calls."""
    found = []
    roles = [message["role"] for message in row["messages"]]
    turns = {"system": {"user"}, "user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"assistant"}}
    if roles[0] not in {"system", "user"} or roles[-1] != "assistant":
        found.append(f"begins with {roles[0]} and ends with {roles[-1]}")
    found += [f"{b} after {a}" for a, b in pairwise(roles) if b not in turns[a]]
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row.get("tools", [])}
    called: set[str] = set()
    for message in row["messages"]:
        for call in message.get("tool_calls", []):
            called.add(call["id"])
            arguments = json.loads(call["function"]["arguments"])
            if set(arguments) != set(declared.get(call["function"]["name"], {}).get("required", [])):
                found.append(f"{call['function']['name']} is called with {sorted(arguments)}")
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            found.append("a result without its call")
    return found


def test_a_split_is_the_same_every_time(train: list[Row], test: list[Row]) -> None:
    assert json.dumps(train) == json.dumps(list(dataset_rows("skills", "train")))
    assert json.dumps(test) == json.dumps(list(dataset_rows("skills", "test")))


def test_each_skill_has_the_rows_it_declares(train: list[Row], test: list[Row]) -> None:
    assert Counter(row["skill"] for row in train) == {skill.name: skill.num_train for skill in SCRIPT.SKILLS}
    assert Counter(row["skill"] for row in test) == {skill.name: skill.num_test for skill in SCRIPT.SKILLS}
    assert 3000 <= len(train) <= 10000 and 200 <= len(test) <= 400


def test_the_first_test_rows_show_every_skill(test: list[Row]) -> None:
    assert [row["skill"] for row in test[: len(SCRIPT.SKILLS)]] == [skill.name for skill in SCRIPT.SKILLS]


def test_no_row_occurs_twice(train: list[Row], test: list[Row]) -> None:
    for rows in (train, test):
        assert len({json.dumps(row["messages"]) for row in rows}) == len(rows)


def test_no_held_out_prompt_is_answered_in_train(train: list[Row], test: list[Row]) -> None:
    assert shared_prompts(train, test) == []
    assert shared_prompts([*train, test[7]], test) == asked(test[7])  # negative control


def test_turns_alternate_and_calls_fit_their_declarations(train: list[Row], test: list[Row]) -> None:
    assert [fault for row in [*train, *test] for fault in faults(row)] == []


def test_the_check_of_turns_and_calls_finds_faults() -> None:
    assert faults({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}) == [
        "begins with user and ends with user",
        "user after user",
    ]
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"village": "Oakham"}'},
    }
    row = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": list(SCRIPT.TOOLS),
    }
    assert faults(row) == ["get_weather is called with ['village']"]


def test_answers_about_people_are_true(train: list[Row], test: list[Row]) -> None:
    truth = {
        question.format(name=person.name): SCRIPT.STATEMENTS[attribute].format(
            name=person.name, value=getattr(person, attribute)
        )
        for person in SCRIPT.PEOPLE
        for attribute, questions in SCRIPT.QUESTIONS.items()
        for question in questions
    }
    rows = [row for row in [*train, *test] if row["skill"] == "facts"]
    assert {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}.items() <= truth.items()


def test_sorted_names_are_sorted(test: list[Row]) -> None:
    for row in test:
        if row["skill"] == "sort":
            names = row["messages"][-1]["content"].removeprefix("In order: ").removesuffix(".").split(", ")
            assert names == sorted(names) and set(names) <= set(SCRIPT.NAMES)


def test_one_question_about_a_word_has_one_answer(train: list[Row], test: list[Row]) -> None:
    answers: dict[str, set[str]] = {}
    for row in [*train, *test]:
        answers.setdefault(asked(row)[-1], set()).add(json.dumps(row["messages"][-1]))
    assert [prompt for prompt, given in answers.items() if len(given) > 1] == []


def test_kinds_do_not_overlap() -> None:
    words = [word for words in SCRIPT.KINDS.values() for word in words]
    assert len(words) == len(set(words))


def test_every_string_is_encoded_without_loss(train: list[Row], test: list[Row]) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder("tiny") / "tokenizer.json"))
    texts = [json.dumps(row) for row in [*train, *test]]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    assert tokenizer.decode_batch([e.ids for e in encodings], skip_special_tokens=False) == texts


def test_an_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(SourceError, match=r"no split 'validation'(.|\n)*train and test"):
        next(dataset_rows("skills", "validation"))
