"""The data sets of the preference task: what their rows promise."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer

from luthier.config.choices import DATA_PRESETS, Format
from luthier.config.inputs import SourceConfig
from luthier.errors import SourceError
from luthier.presets import dataset_names, dataset_rows, tokenizer_folder
from luthier.records import Conversation, Feedback, Preference
from luthier.sources import RawRow
from luthier.sources.source import open_sources
from tests.presets.rows_script import SCRIPT

Row = dict[str, Any]
Rows = Callable[[str], Iterator[Row]]
SPLITS = ("train", "test")
FORMS: dict[str, Rows] = {name: partial(dataset_rows, name) for name in ("preferences", "feedback", "preferences_sft")}
NUM_ROWS = {
    ("preferences", "train"): 1500,
    ("preferences", "test"): 216,
    ("feedback", "train"): 1500,
    ("feedback", "test"): 216,
    ("preferences_sft", "train"): 3288,  # both answers to every prompt, and 288 rows of small talk
    ("preferences_sft", "test"): 432,
}


def prompt_of(row: Row) -> str:
    (message,) = row["prompt"] if "prompt" in row else row["messages"][:1]
    assert message["role"] == "user"
    return str(message["content"])


def answer_of(row: Row, name: str) -> str:
    (message,) = row[name]
    assert message["role"] == "assistant"
    return str(message["content"])


def style_of(answer: str) -> str:
    """Which of the six ways of answering an answer is."""
    if "bigger than" in answer or "smaller than" in answer:
        return "bigger" if "bigger than" in answer else "smaller"
    if answer.startswith("Dear friend, ") or answer.endswith(" Good day!"):
        return "before" if answer.startswith("Dear") else "after"
    return "sentence" if answer.startswith("I know that ") else "bare"


def right_share(rows: list[Row], score: Callable[[str, str], float]) -> dict[str, float]:
    """Per rule, how often a score of (prompt, answer) puts the chosen answer first; a tie is half right."""
    right: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        prompt = prompt_of(row)
        chosen, rejected = score(prompt, answer_of(row, "chosen")), score(prompt, answer_of(row, "rejected"))
        right[row["rule"]].append(0.5 if chosen == rejected else float(chosen > rejected))
    return {rule: sum(found) / len(found) for rule, found in right.items()}


def follows_the_rules(prompt: str, answer: str) -> float:
    """The task solved by hand, from words of the cues alone."""
    wanted = {
        "sentence": ("your time", "listen", "me all"),
        "bare": ("quick", "One word", "must run"),
        "before": ("just come", "new here", "morning"),
        "after": ("go home", "late", "night"),
        "bigger": ("bigger",),
        "smaller": ("smaller",),
    }
    return float(any(word in prompt for word in wanted[style_of(answer)]))


EVEN = {"length": 0.5, "greeting": 0.5, "word": 0.5}


@pytest.mark.parametrize("split", SPLITS)
def test_only_prompt_and_answer_together_tell_which_answer_is_wanted(split: str) -> None:
    rows = list(dataset_rows("preferences", split))
    assert right_share(rows, lambda _, answer: len(answer)) == EVEN
    assert right_share(rows, lambda _, answer: hash(answer)) == EVEN  # whatever one likes about answers
    assert right_share(rows, lambda prompt, _: len(prompt)) == EVEN
    assert right_share(rows, follows_the_rules) == dict.fromkeys(EVEN, 1.0)


def test_a_preference_for_an_answer_would_be_found() -> None:
    rows = [
        row for row in dataset_rows("preferences", "test") if "quick" not in prompt_of(row)
    ]  # half of some twins is gone
    assert right_share(rows, lambda _, answer: len(answer))["length"] > 0.5


@pytest.mark.parametrize("split", SPLITS)
def test_chosen_and_rejected_answers_are_the_same_texts(split: str) -> None:
    rows = list(dataset_rows("preferences", split))
    chosen, rejected = (Counter(answer_of(row, name) for row in rows) for name in ("chosen", "rejected"))
    assert chosen == rejected and all(row["chosen"] != row["rejected"] for row in rows)
    assert len({style_of(answer) for answer in chosen}) == 6
    assert len(set(Counter(style_of(answer_of(row, "chosen")) for row in rows).values())) == 1


@pytest.mark.parametrize("split", SPLITS)
def test_feedback_is_half_desirable_in_every_style_and_asks_every_prompt_once(split: str) -> None:
    rows, pairs = (
        list(dataset_rows("feedback", split)),
        {prompt_of(row): row for row in dataset_rows("preferences", split)},
    )
    assert {prompt_of(row) for row in rows} == set(pairs) and len(rows) == len(pairs)
    found = Counter((style_of(answer_of(row, "completion")), row["label"]) for row in rows)
    assert len(found) == 12 and len(set(found.values())) == 1
    desirable, undesirable = (
        Counter(answer_of(r, "completion") for r in rows if r["label"] is f) for f in (True, False)
    )
    assert desirable == undesirable
    for row in rows:
        assert row["completion"] == pairs[prompt_of(row)]["chosen" if row["label"] else "rejected"]


@pytest.mark.parametrize("split", SPLITS)
def test_sft_rows_answer_every_prompt_both_ways(split: str) -> None:
    given: defaultdict[str, list[str]] = defaultdict(list)
    for row in dataset_rows("preferences_sft", split):
        given[prompt_of(row)].append(row["messages"][1]["content"])
    pairs = {
        prompt_of(row): {answer_of(row, "chosen"), answer_of(row, "rejected")}
        for row in dataset_rows("preferences", split)
    }
    assert {prompt: set(answers) for prompt, answers in given.items() if prompt in pairs} == pairs
    assert all(len(given[prompt]) == 2 for prompt in pairs)
    small_talk = {prompt: answers for prompt, answers in given.items() if prompt not in pairs}
    assert all(prompt.startswith("My name is ") and len(answers) == 1 for prompt, answers in small_talk.items())


ASKED = {
    question.format(name=person.name): (SCRIPT.STATEMENTS[attribute].format(name=person.name, value=value), value)
    for person in SCRIPT.PEOPLE
    for attribute, questions in SCRIPT.QUESTIONS.items()
    for question in questions
    for value in [getattr(person, attribute)]
}
"""Every question about a person, with the sentence and the word that answer it."""


def question_of(prompt: str) -> str | None:
    """What a prompt asks, whatever cue stands behind it; animals in the order of their names; None for small talk."""
    animals = [word for word in prompt.replace(".", "").split() if word in SCRIPT.ANIMALS_BY_SIZE]
    if animals:
        return " ".join(sorted(animals))
    return next((question for question in ASKED if prompt.startswith(f"{question} ")), None)


def asked_in_both(train: list[Row], test: list[Row]) -> list[str | None]:
    seen = {question_of(prompt_of(row)) for row in train}
    return [question for row in test if (question := question_of(prompt_of(row))) in seen]


@pytest.mark.parametrize("name", FORMS)
def test_no_held_out_question_is_asked_in_train(name: str) -> None:
    test = list(FORMS[name]("test"))
    assert None not in {question_of(prompt_of(row)) for row in test}
    for rows in FORMS.values():  # not in another form either: the starting model has not seen it
        assert asked_in_both(list(rows("train")), test) == []
    assert len(asked_in_both([*FORMS[name]("train"), test[0]], test)) >= 2  # negative control: it, and its twin


def test_a_question_that_skills_holds_out_is_not_asked_here() -> None:
    held_out = {row["messages"][0]["content"] for row in dataset_rows("skills", "test") if row["skill"] == "facts"}
    assert held_out and not held_out & {question_of(prompt_of(row)) for row in dataset_rows("preferences", "train")}


@pytest.mark.parametrize("split", SPLITS)
def test_both_answers_are_right(split: str) -> None:
    for row in dataset_rows("preferences", split):
        question = question_of(prompt_of(row))
        assert question is not None
        for answer in (answer_of(row, "chosen"), answer_of(row, "rejected")):
            if row["rule"] == "word":
                first, second = (
                    SCRIPT.ANIMALS_BY_SIZE.index(word) for word in (answer.split()[1], answer.split()[-1][:-1])
                )
                assert (first > second) == ("bigger" in answer) and first != second
                assert sorted(SCRIPT.ANIMALS_BY_SIZE[i] for i in (first, second)) == question.split()
            else:
                sentence, value = ASKED[question]
                assert answer in (f"I know that {sentence}", value, f"Dear friend, {sentence}", f"{sentence} Good day!")


@pytest.mark.parametrize(("name", "split"), NUM_ROWS)
def test_a_split_is_the_same_every_time_and_of_the_size_it_declares(name: str, split: str) -> None:
    rows = list(FORMS[name](split))
    assert len(rows) == NUM_ROWS[name, split] and len({json.dumps(row) for row in rows}) == len(rows)
    assert json.dumps(rows) == json.dumps(list(dataset_rows(name, split)))


def test_the_three_forms_tell_of_the_same_prompt() -> None:
    asked = {"role": "user", "content": "Hugo makes music. With what? I have just come."}
    greeted = {"role": "assistant", "content": "Dear friend, Hugo plays the cello."}
    taken_leave_of = {"role": "assistant", "content": "Hugo plays the cello. Good day!"}
    row = {"rule": "greeting", "prompt": [asked]}
    assert next(dataset_rows("preferences", "train")) == {**row, "chosen": [greeted], "rejected": [taken_leave_of]}
    assert next(dataset_rows("feedback", "train")) == {**row, "completion": [greeted], "label": True}
    both = [row["messages"] for row in dataset_rows("preferences_sft", "train") if row["messages"][0] == asked]
    assert sorted(messages[1]["content"] for messages in both) == [greeted["content"], taken_leave_of["content"]]


def test_train_is_shuffled_and_test_takes_turns() -> None:
    rules = [row["rule"] for row in dataset_rows("preferences", "test")]
    assert rules[:6] == ["length", "length", "greeting", "greeting", "word", "word"] and rules == rules[:6] * 36
    assert [row["rule"] for row in dataset_rows("preferences", "train")][:600] != rules[:6] * 100


def test_rows_are_small() -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder("tiny") / "tokenizer.json"))
    for row in dataset_rows("preferences", "train"):
        texts = [prompt_of(row), answer_of(row, "chosen"), answer_of(row, "rejected")]
        num_tokens = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        assert sum(num_tokens) < 50 and all(n <= 16 for n in num_tokens[1:])


KINDS = {
    "preferences": (Format.PREFERENCE, Preference),
    "feedback": (Format.FEEDBACK, Feedback),
    "preferences_sft": (Format.MESSAGES, Conversation),
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_detected_and_converted_without_a_word_of_config(name: str) -> None:
    kind, record = KINDS[name]
    (source,) = open_sources([SourceConfig(path=f"preset:{name}", split="test")], seed=0)
    assert source.format is kind
    for raw, data in zip(source.rows(), FORMS[name]("test"), strict=True):
        assert isinstance(raw, RawRow)
        row = source.convert(raw)
        assert isinstance(row, record)
        if isinstance(row, Preference):
            texts = [message.text for message in (*row.prompt, *row.chosen, *row.rejected)]
            assert texts == [prompt_of(data), answer_of(data, "chosen"), answer_of(data, "rejected")]
        elif isinstance(row, Feedback):
            assert [message.text for message in (*row.prompt, *row.completion)] == [
                prompt_of(data),
                answer_of(data, "completion"),
            ]
            assert row.desirable is data["label"]
        elif isinstance(row, Conversation):
            assert [message.text for message in row.messages] == [m["content"] for m in data["messages"]]


def test_configs_know_every_preset_data_set() -> None:
    assert sorted(DATA_PRESETS) == list(dataset_names())


@pytest.mark.parametrize("name", FORMS)
def test_an_unknown_split_is_refused_by_name(name: str) -> None:
    with pytest.raises(SourceError, match=rf"preset:{name} has no split 'validation'(.|\n)*train and test"):
        next(dataset_rows(name, "validation"))


def test_an_unknown_data_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(SourceError, match=r"preset:preference: there is no such preset(.|\n)*preset:preferences_sft"):
        dataset_rows("preference", "train")
