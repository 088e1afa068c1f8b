"""Rows of pairs and feedback that are odd: two turns of one role, no common prompt, a label that is none."""

from __future__ import annotations

from typing import Any

import pytest
from spoken_rows import ADDRESS, ASSISTANT, USER, convert, said

from luthier.config.choices import Format, SameRole
from luthier.config.inputs import SourceConfig
from luthier.errors import RowError, SourceError
from luthier.records import Feedback, Preference
from luthier.sources import RawRow
from luthier.sources.detect import detect_layout
from luthier.sources.source import RowReader
from tests.conftest import reason_is

BAD = {"role": "assistant", "content": "What"}
NOTE = "two {} messages in a row"
ASKED_TWICE = {"prompt": [USER, USER], "chosen": [ASSISTANT], "rejected": [BAD]}
OPEN_END = {"prompt": [USER, ASSISTANT], "chosen": [ASSISTANT], "rejected": [BAD]}


def notes_of(row: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    found = convert(row)
    assert isinstance(found, Preference)
    return found.notes


# ------------------------------------------------------------------------------------------- two turns of one role


def test_two_turns_of_one_role_are_kept_and_counted_once_a_row() -> None:
    assert notes_of(ASKED_TWICE) == ((NOTE.format("user"), 1),)
    assert notes_of(OPEN_END) == ((NOTE.format("assistant"), 1),)
    answered_twice = notes_of({"prompt": [USER, USER], "chosen": [ASSISTANT, ASSISTANT], "rejected": [BAD]})
    assert answered_twice == ((NOTE.format("user"), 1), (NOTE.format("assistant"), 1))
    assert notes_of({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [BAD]}) == ()


def test_merge_joins_the_questions_of_a_pair_and_of_feedback() -> None:
    pair = convert(ASKED_TWICE, same_role=SameRole.MERGE)
    assert isinstance(pair, Preference) and pair.prompt == (said("user", "Hi\n\nHi"),)
    judged = convert({"messages": [USER, USER, ASSISTANT], "kto_tag": True}, same_role=SameRole.MERGE)
    assert isinstance(judged, Feedback) and judged.prompt == (said("user", "Hi\n\nHi"),)


@pytest.mark.parametrize("policy", [SameRole.MERGE, SameRole.QUARANTINE])
def test_an_answer_is_never_merged_into_its_prompt(policy: SameRole) -> None:
    with pytest.raises(RowError, match=f"same_role.*{policy.value}") as caught:
        convert(OPEN_END, same_role=policy)
    assert caught.value.field == "chosen"


def test_quarantine_names_the_side_and_the_message() -> None:
    with pytest.raises(RowError) as caught:
        convert(ASKED_TWICE, same_role=SameRole.QUARANTINE)
    assert (caught.value.reason, caught.value.field) == ("same_role", "prompt[1]")
    rejected = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [BAD, BAD]}
    with pytest.raises(RowError) as caught:
        convert(rejected, same_role=SameRole.QUARANTINE)
    assert caught.value.field == "rejected[1]"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"messages": [USER, USER, ASSISTANT], "kto_tag": True}, "messages[1]"),
        ({"chosen": [USER, USER, ASSISTANT], "rejected": [USER, USER, BAD]}, "chosen[1]"),
        ({"question": [USER, USER], "chosen": [ASSISTANT], "rejected": [BAD]}, "question[1]"),
    ],
)
def test_quarantine_names_the_column_that_the_prompt_was_read_from(row: dict[str, Any], field: str) -> None:
    with pytest.raises(RowError) as caught:
        convert(row, same_role=SameRole.QUARANTINE, columns={"prompt": "question"} if "question" in row else {})
    assert (caught.value.reason, caught.value.field) == ("same_role", field)


# --------------------------------------------------------------------------------------------------- no common prompt


def test_without_a_common_prompt_both_beginnings_and_the_way_out_are_told() -> None:
    sides = {
        "chosen": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT],
        "rejected": [{"role": "system", "content": "Be kind."}, USER, BAD],
    }
    with pytest.raises(RowError, check=reason_is("no_common_prompt")) as caught:
        convert(sides)
    for words in ("system 'Be brief.'", "system 'Be kind.'", "a column of its own"):
        assert words in caught.value.detail


# ----------------------------------------------------------------------------------------------------------- labels


def rows_of(*labels: Any) -> list[dict[str, Any]]:
    return [{"prompt": "Hi", "completion": "Hello", "label": label} for label in labels]


def test_one_bad_label_does_not_make_a_file_of_verdicts_something_else() -> None:
    rows = rows_of("maybe", True, False)
    layout = detect_layout(SourceConfig(path="data/rows.jsonl"), rows)
    assert layout.format is Format.FEEDBACK
    reader = RowReader(layout=layout)
    with pytest.raises(RowError, check=reason_is("bad_label")):
        reader.convert(RawRow(raw=b"", data=rows[0], address=ADDRESS))
    assert isinstance(reader.convert(RawRow(raw=b"", data=rows[1], address=ADDRESS)), Feedback)


@pytest.mark.parametrize("labels", [("true", "neutral", "false"), (0, 1), ("entailment",)])
def test_classes_are_no_verdicts(labels: tuple[Any, ...]) -> None:
    layout = detect_layout(SourceConfig(path="data/rows.jsonl"), rows_of(*labels))
    assert layout.format is Format.PROMPT_COMPLETION


def test_an_unknown_column_of_text_is_told_how_to_be_named() -> None:
    with pytest.raises(SourceError, match=r"\{text: …\}"):
        detect_layout(SourceConfig(path="data/rows.jsonl"), [{"content": "The sky is blue."}])
