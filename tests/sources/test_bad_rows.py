"""The corpus of bad rows: what becomes of each kind, read from the beginning and by number.

The numbers are those of the list of bad inputs that Luthier was designed against. Rows that only a template, a
tokenizer or a packer can judge are accepted here as they stand.
"""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier.config.choices import Format, SameRole
from luthier.config.inputs import DataConfig, SourceConfig
from luthier.errors import RowError, SourceError
from luthier.records import BLANK_ANSWER, Conversation, Document, Message, Row, Text
from luthier.sources import RowBytes
from luthier.sources.origins import resolve_sources
from luthier.sources.source import Source, open_sources, repeated_ids

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


def chat(*messages: Any, **columns: Any) -> bytes:
    return json.dumps({"messages": list(messages), **columns}).encode()


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": arguments}}]}


GOOD = chat(USER, ASSISTANT)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A line among good ones: why it is refused and what its report says; without a reason it is accepted.

    ``notes``: what is counted of an accepted one.
    """

    number: int
    line: bytes
    reason: str | None = None
    report: str = ""
    notes: tuple[tuple[str, int], ...] = ()


CASES = {
    "garbage": Case(number=2, line=b"\x00\x01 not json", reason="invalid_json", report="byte 0"),
    "invalid UTF-8": Case(number=6, line=GOOD[:-4] + b"\xe9" + GOOD[-4:], reason="invalid_utf8", report="offset"),
    "half a surrogate pair": Case(
        number=7,
        line=chat(USER, ASSISTANT | {"content": "\ud800"}),
        reason="lone_surrogate",
        report=":messages[1].content",
    ),
    "NUL and control characters": Case(number=8, line=chat(USER, ASSISTANT | {"content": "\x00\x01\x1f\x7f"})),
    "CRLF": Case(number=9, line=GOOD + b"\r"),
    "a key twice": Case(number=10, line=GOOD[:-1] + b', "messages": []}', reason="duplicate_key", report="'messages'"),
    "NaN": Case(number=11, line=GOOD[:-1] + b', "score": NaN}', reason="non_finite_number", report="NaN"),
    "Infinity": Case(number=11, line=GOOD[:-1] + b', "score": -Infinity}', reason="non_finite_number", report="Inf"),
    "100,000 levels": Case(number=12, line=b'{"a":' * 100_000 + b"1" + b"}" * 100_000, reason="nesting", report="100"),
    "70 MB": Case(number=13, line=b'{"a": "' + b"x" * 70_000_000 + b'"}', reason="row_too_long", report="70,000,010"),
    "messages an object": Case(number=15, line=b'{"messages": {"role": "user"}}', reason="not_messages"),
    "no content": Case(number=16, line=chat(USER, {"role": "assistant"}), reason="missing_content", report="[1]"),
    "content null": Case(number=17, line=chat(USER, ASSISTANT | {"content": None}), reason="missing_content"),
    "content null beside calls": Case(number=17, line=chat(USER, call("{}") | {"content": None})),
    "a number as content": Case(number=18, line=chat(USER | {"content": 3}), reason="bad_content", report="number"),
    "a boolean as content": Case(number=18, line=chat(USER | {"content": True}), reason="bad_content", report="bool"),
    "unknown role": Case(number=20, line=chat({"role": "narrator", "content": "x"}), reason="unknown_role", report="u"),
    "two users in a row": Case(
        number=21, line=chat(USER, USER, ASSISTANT), notes=(("two user messages in a row", 1),)
    ),
    "three assistants in a row": Case(
        number=21, line=chat(USER, *[ASSISTANT] * 3), notes=(("two assistant messages in a row", 2),)
    ),
    "assistant first": Case(
        number=22, line=chat(ASSISTANT, USER, ASSISTANT), notes=(("the assistant speaks first", 1),)
    ),
    "no assistant": Case(number=23, line=chat(USER)),
    "no message": Case(number=24, line=chat(), reason="empty_messages"),
    "a blank answer": Case(number=25, line=chat(USER, ASSISTANT | {"content": " \n"}), notes=((BLANK_ANSWER, 1),)),
    "an empty answer": Case(number=25, line=chat(USER, ASSISTANT | {"content": ""}), notes=((BLANK_ANSWER, 1),)),
    "a blank answer to be learned": Case(number=25, line=chat(USER, {**ASSISTANT, "content": " ", "train": True})),
    "a call without text": Case(number=25, line=chat(USER, call("{}") | {"content": " "})),
    "a thought without answer": Case(number=25, line=chat(USER, {**ASSISTANT, "content": "", "reasoning": "Hm."})),
    "arguments that are no JSON": Case(number=26, line=chat(USER, call("{oops")), reason="bad_tool_call"),
    "a result without a call": Case(
        number=27, line=chat(USER, {"role": "tool", "content": "2"}), reason="tool_result_without_call"
    ),
    "a million equal characters": Case(
        number=28,
        line=chat(USER, ASSISTANT | {"content": "a" * 1_000_000}),
        reason="text_too_long",
        report=":messages[1].content text_too_long: 1,000,000 characters",
    ),
    "a million less one": Case(number=28, line=chat(USER, ASSISTANT | {"content": "ä" * 999_999})),
    "the same id twice": Case(number=32, line=chat(USER, ASSISTANT, id=1)),
    "control string of a user": Case(number=36, line=chat(USER | {"content": "<|im_end|>"}, ASSISTANT)),
    "control string of an assistant": Case(number=37, line=chat(USER, ASSISTANT | {"content": "a<|im_end|>b"})),
    "<image> of an assistant": Case(number=38, line=chat(USER, ASSISTANT | {"content": "the tag <image>"})),
    "brackets": Case(number=39, line=chat(USER, ASSISTANT | {"content": "[[1, 2], [3, 4]]"})),
}  # fmt: skip


def source_of(path: Path, **fields: Any) -> Source:
    configs, _ = resolve_sources(DataConfig(train=[SourceConfig(path=str(path), **fields)]))
    [source] = open_sources(configs, seed=0)
    return source


def outcomes(source: Source, rows: Any) -> list[Row | RowError]:
    """What becomes of each row: the record, or the error."""
    found: list[Row | RowError] = []
    for row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            found.append(source.convert(source.reader.read(row)))
        except RowError as error:
            found.append(error)
    return found


def both_ways(source: Source) -> list[Row | RowError]:
    """The outcomes read from the beginning; by number, backwards, they are the same."""
    index = source.index()
    assert index is not None
    in_order = outcomes(source, source.row_bytes())
    by_number = outcomes(source, index.read(np.arange(len(index))[::-1]))[::-1]
    assert [_comparable(one) for one in in_order] == [_comparable(one) for one in by_number]
    return in_order


def _comparable(outcome: Row | RowError) -> Any:
    return (type(outcome), str(outcome)) if isinstance(outcome, RowError) else outcome


@pytest.mark.parametrize("name", CASES)
def test_a_bad_row_is_lost_alone_for_a_named_reason_and_an_odd_one_is_kept(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + case.line + b"\n" + GOOD + b"\n")
    before, outcome, after = both_ways(source_of(path, format=Format.MESSAGES))
    assert isinstance(before, Conversation)
    assert isinstance(after, Conversation)
    assert (str(before.address), str(after.address)) == (f"{path}:1", f"{path}:3")
    if case.reason is None:
        assert isinstance(outcome, Conversation)
        expected = json.loads(case.line)["messages"]
        assert [message.text for message in outcome.messages] == [message.get("content") or "" for message in expected]
        assert outcome.notes == case.notes
    else:
        assert isinstance(outcome, RowError)
        assert outcome.reason == case.reason
        assert str(outcome).startswith(f"{path}:2")
        assert case.report in str(outcome)


def test_no_bad_row_makes_another_one_bad(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [case.line for case in CASES.values() if len(case.line) < 10_000_000]
    path.write_bytes(b"".join(GOOD + b"\n\n" + line + b"\n" for line in lines))
    found = both_ways(source_of(path))
    assert all(isinstance(row, Conversation) for row in found[::2])
    reasons = [row.reason if isinstance(row, RowError) else None for row in found[1::2]]
    assert reasons == [case.reason for case in CASES.values() if len(case.line) < 10_000_000]


def test_a_last_line_that_is_cut_off_is_named_with_line_and_bytes(tmp_path: Path) -> None:  # 1
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD[:40])
    _, error = both_ways(source_of(path))
    assert isinstance(error, RowError)
    assert str(error).startswith(f"{path}:2 truncated_json: the row ends after 40 bytes")
    assert "the file ends there too" in str(error) and "still being written" in str(error)


def test_a_line_that_is_cut_off_before_others_says_nothing_of_the_file(tmp_path: Path) -> None:  # 1
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD[:40] + b"\n" + GOOD)
    error, _ = both_ways(source_of(path, format=Format.MESSAGES))
    assert isinstance(error, RowError) and error.reason == "truncated_json"
    assert "the file" not in str(error)


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:  # 3, 4
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n" + GOOD + b"\n\n  \t\r\n" + GOOD)
    rows = both_ways(source_of(path))
    assert [row.address.row for row in rows if row.address] == [2, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD.decode().encode("utf-16"), "iconv -f UTF-16"),  # 5
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"[" + GOOD + b",\n" + GOOD + b"]", r"its name must end in \.json"),  # 14
        (b"", "the file is empty"),  # 33
        (b"\n \n", "there is no row in it"),  # 33
    ],
    ids=["UTF-16", "Git LFS", "an array", "empty", "blank"],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        source_of(path)


def test_a_type_that_changes_late_loses_those_rows(tmp_path: Path) -> None:  # 19
    path = tmp_path / "rows.jsonl"
    lines = [GOOD] * 900 + [chat(USER | {"content": 7}), chat(USER | {"content": False})]
    path.write_bytes(b"\n".join(lines))
    lost = [str(row) for row in both_ways(source_of(path)) if isinstance(row, RowError)]
    assert [text.partition(" ")[0] for text in lost] == [f"{path}:{n}:messages[0].content" for n in (901, 902)]


def test_a_line_of_300_mb_is_passed_over_by_number_in_flat_memory(tmp_path: Path) -> None:  # 13
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n")
    with path.open("ab") as file:
        for _ in range(300):
            file.write(b"x" * 1_000_000)
        file.write(b"\n" + GOOD)
    source = source_of(path)
    tracemalloc.start()
    index = source.index()
    assert index is not None
    rows = index.read(np.array([2, 1, 0]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.address.row for row in rows if row.address] == [3, 2, 1]
    assert isinstance(rows[1], RowError)
    assert "300,000,001 bytes" in str(rows[1])
    assert peak < 40_000_000


def test_a_file_that_vanishes_comes_back_and_is_read_on(tmp_path: Path) -> None:  # 34
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD)
    source = source_of(path)
    index = source.index()
    assert index is not None
    aside = path.rename(tmp_path / "aside")
    with pytest.raises(SourceError, match="vanished"):
        index.read(np.array([1]))
    with pytest.raises(SourceError, match="vanished"):
        list(source.row_bytes())
    aside.rename(path)
    assert isinstance(index.read(np.array([1]))[0], RowBytes)


def test_a_file_that_is_edited_during_a_run_is_refused_with_both_sizes(tmp_path: Path) -> None:  # 35
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD)
    source = source_of(path)
    index = source.index()
    assert index is not None
    path.write_bytes(GOOD)
    for read in (lambda: index.read(np.array([0])), lambda: list(source.row_bytes())):
        with pytest.raises(
            SourceError, match=rf"changed while it was in use: {2 * len(GOOD) + 1} bytes .* {len(GOOD)} now"
        ):
            read()


def test_a_file_that_is_edited_after_its_last_row_was_read_is_told_by_its_source(tmp_path: Path) -> None:  # 35
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD)
    source = source_of(path)
    assert len(list(source.row_bytes())) == 2
    source.check_unchanged()
    with path.open("ab") as file:
        file.write(b"\n" + GOOD)
    with pytest.raises(SourceError, match="changed while it was in use"):
        source.check_unchanged()


# ------------------------------------------------------------------------------------ 21: two of one role in a row


def say(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


def merged(tmp_path: Path, *messages: dict[str, Any]) -> Row | RowError:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(chat(*messages))
    (outcome,) = outcomes(source := source_of(path, same_role=SameRole.MERGE), source.row_bytes())
    return outcome


def test_merged_turns_are_the_row_that_says_it_in_one_message(tmp_path: Path) -> None:
    outcome = merged(tmp_path, say("user", "a"), say("user", "b"), say("assistant", "c"), say("assistant", "d"))
    assert isinstance(outcome, Conversation)
    assert outcome.messages == (
        Message(role="user", parts=(Text(text="a\n\nb"),)),
        Message(role="assistant", parts=(Text(text="c\n\nd"),)),
    )
    assert outcome.notes == (("user messages in a row, merged", 1), ("assistant messages in a row, merged", 1))


def test_merging_keeps_a_call_behind_its_text_and_adds_no_line_to_an_empty_one(tmp_path: Path) -> None:
    outcome = merged(tmp_path, say("user", ""), say("user", "b"), say("assistant", "c"), call("{}"))
    assert isinstance(outcome, Conversation)
    assert [message.text for message in outcome.messages] == ["b", "c"]
    assert [type(part).__name__ for part in outcome.messages[1].parts] == ["Text", "ToolCall"]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([say("user", "a"), say("assistant", "b", weight=0.5), say("assistant", "c")], "of their loss"),
        ([say("user", "a"), say("assistant", "b"), say("assistant", "c", reasoning="d")], "the second one thinks"),
        ([say("user", "a"), call("{}"), say("assistant", "c")], "calls come after the text"),
    ],
    ids=["weights", "thinking", "calls"],
)
def test_turns_that_one_message_cannot_say_are_not_merged(
    tmp_path: Path, messages: list[dict[str, Any]], why: str
) -> None:
    outcome = merged(tmp_path, *messages)
    assert isinstance(outcome, RowError)
    assert outcome.reason == "same_role" and outcome.field == "messages[2]" and why in str(outcome)


def test_the_policy_of_a_source_wins_over_that_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(chat(USER, USER, ASSISTANT))
    sources = [SourceConfig(path=str(path)), SourceConfig(path=str(path), same_role=SameRole.KEEP, text_limit=2)]
    configs, _ = resolve_sources(DataConfig(train=sources, same_role=SameRole.QUARANTINE))
    first, second = (outcomes(source, source.row_bytes())[0] for source in open_sources(configs, seed=0))
    assert isinstance(first, RowError) and first.reason == "same_role"
    assert isinstance(second, RowError) and second.reason == "text_too_long"


def test_results_of_several_calls_are_no_two_of_one_role(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "1"}
    outcome = merged(tmp_path, USER, call("{}"), result, result, ASSISTANT)
    assert isinstance(outcome, Conversation)
    assert len(outcome.messages) == 5 and outcome.notes == ()


# ------------------------------------------------------------------------------------------- 28: texts over the limit


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"messages": [USER, call({"x": ["a" * 50]}), ASSISTANT]}, "messages[1].tool_calls"),
        ({"messages": [USER, ASSISTANT | {"reasoning_content": "a" * 50}]}, "messages[1].reasoning_content"),
        ({"text": "a" * 50}, "text"),
        ({"prompt": "a", "chosen": "b", "rejected": "a" * 50}, "rejected[0].content"),
    ],
    ids=["calls", "thinking", "document", "preference"],
)
def test_every_kind_of_text_has_the_limit(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(row).encode())
    for limit, expected in ((50, field), (51, None)):
        (outcome,) = outcomes(source := source_of(path, text_limit=limit), source.row_bytes())
        assert (outcome.field if isinstance(outcome, RowError) else None) == expected


def test_a_text_that_is_cut_into_spans_is_still_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps({"text": "a" * 50, "spans": [{"start": 10, "end": 20, "train": False}]}).encode())
    (outcome,) = outcomes(source := source_of(path, text_limit=50), source.row_bytes())
    assert isinstance(outcome, RowError) and outcome.reason == "text_too_long"
    (outcome,) = outcomes(source := source_of(path), source.row_bytes())
    assert isinstance(outcome, Document) and len(outcome.parts) == 3


# ---------------------------------------------------------------------------------------------------- 32: row ids


def test_repeated_ids_are_counted_with_the_first_pair(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ids = ["a", "b", None, None, "c", "b", 1, "1", "a", "b"]
    path.write_bytes(b"\n".join([*(chat(USER, ASSISTANT, id=one) for one in ids), b"{broken"]))
    found = repeated_ids(source_of(path))
    assert found is not None
    assert (found.rows, found.id) == (3, '"b"')
    assert [address.row for address in found.first] == [2, 6]


@pytest.mark.parametrize("fields", [[{}, {}], [{"id": 1}, {"id": 2}], [{"id": None}, {"id": None}]])
def test_ids_that_differ_or_are_missing_are_no_repetition(tmp_path: Path, fields: list[dict[str, Any]]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(chat(USER, ASSISTANT, **each) for each in fields))
    assert repeated_ids(source_of(path)) is None


def test_a_source_without_ids_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD] * 1_000 + [chat(USER, ASSISTANT, id=1)] * 2))
    assert repeated_ids(source_of(path)) is None
    path.write_bytes(b"\n".join([GOOD] * 999 + [chat(USER, ASSISTANT, id=1)] * 2))
    assert repeated_ids(source_of(path)) is not None
