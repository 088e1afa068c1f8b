"""All the ways in which data sets write preferences and feedback come to the same record."""

from __future__ import annotations

from typing import Any

import pytest
from spoken_rows import ADDRESS, ASSISTANT, USER, convert, said

from luthier.errors import RowError
from luthier.records import Feedback, Preference
from tests.conftest import reason_is

BAD = {"role": "assistant", "content": "What"}
PAIR = Preference(
    prompt=(said("user", "Hi"),),
    chosen=(said("assistant", "Hello"),),
    rejected=(said("assistant", "What"),),
    address=ADDRESS,
)
GOOD_SHARE, BAD_SHARE = {"from": "gpt", "value": "Hello"}, {"from": "gpt", "value": "What"}

PAIRS: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "What"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}], "chosen": GOOD_SHARE, "rejected": BAD_SHARE},
    "messages": {"messages": [USER], "chosen": ASSISTANT, "rejected": BAD},
    "texts": {"prompt": "Hi", "chosen": "Hello", "rejected": "What"},
    "prompt as messages": {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [BAD]},
    "prompt as messages, answers as texts": {"prompt": [USER], "chosen": "Hello", "rejected": "What"},
    "implicit prompt": {"chosen": [USER, ASSISTANT], "rejected": [USER, BAD]},
    "prompt said twice": {"prompt": "Hi", "chosen": [USER, ASSISTANT], "rejected": [USER, BAD]},
    "an answer beside a worse one": {"messages": [USER, ASSISTANT], "rejected_response": "What"},
    "an answer beside a worse message": {"messages": [USER, ASSISTANT], "rejected": BAD},
    "an answer beside the whole of a worse one": {"messages": [USER, ASSISTANT], "rejected_messages": [USER, BAD]},
    "responses": {"instruction": "Hi", "chosen_response": "Hello", "rejected_response": "What"},
    "scores beside": {"prompt": "Hi", "chosen": "Hello", "rejected": "What", "score_chosen": 7, "score_rejected": 2},
}


@pytest.mark.parametrize("form", PAIRS)
def test_each_form_of_a_pair_is_the_same_record(form: str) -> None:
    assert convert(PAIRS[form]) == PAIR


@pytest.mark.parametrize(
    ("value", "margin"), [(1.5, 1.5), (-2, -2.0), ("0.25", 0.25), ("-3", -3.0), ("", None), (None, None)]
)
def test_margins_are_numbers_also_as_text(value: Any, margin: float | None) -> None:
    row = convert({**PAIRS["texts"], "margin": value})
    assert isinstance(row, Preference) and row.margin == margin


@pytest.mark.parametrize("value", ["much", True, [1], 1e9, "nan"])
def test_what_is_no_margin_is_refused(value: Any) -> None:
    with pytest.raises(RowError, check=reason_is("bad_margin")):
        convert({**PAIRS["texts"], "margin": value})


@pytest.mark.parametrize(
    ("label", "desirable"),
    [
        (True, True), (False, False), (1, True), (0, False), (1.0, True), (0.0, False), ("true", True),
        ("False", False),        ("1", True), ("0", False), ("desirable", True), ("Undesirable", False),
        (" chosen ", True), ("rejected", False),
    ],
)  # fmt: skip
def test_labels_are_verdicts_in_all_their_spellings(label: Any, desirable: bool) -> None:
    expected = Feedback(
        prompt=(said("user", "Hi"),), completion=(said("assistant", "Hello"),), desirable=desirable, address=ADDRESS
    )
    forms: list[dict[str, Any]] = [
        {"prompt": "Hi", "completion": "Hello", "kto_tag": label},
        {"messages": [USER, ASSISTANT], "kto_tag": label},
        {"instruction": "Hi", "input": "", "output": "Hello", "kto_tag": label},
        {"conversations": [{"from": "human", "value": "Hi"}, GOOD_SHARE], "kto_tag": label},
    ]
    assert [convert(form) for form in forms] == [expected] * len(forms)


@pytest.mark.parametrize("label", ["perhaps", 2, 0.5, [], {"good": 1}])
def test_what_is_no_verdict_is_refused(label: Any) -> None:
    with pytest.raises(RowError, check=reason_is("bad_label")):
        convert({"prompt": "Hi", "completion": "Hello", "kto_tag": label})


def test_a_label_that_may_be_a_class_is_not_taken_for_a_verdict() -> None:
    assert not isinstance(convert({"prompt": "Hi", "completion": "Hello", "label": 1}), Feedback)
