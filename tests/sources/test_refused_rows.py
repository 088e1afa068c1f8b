"""Rows that mean nothing are refused with a reason and the path to the fault; odd ones that mean something are kept."""

from __future__ import annotations

from typing import Any

import pytest
from spoken_rows import ADDRESS, ASSISTANT, CALL, USER, chat, convert

from luthier.config.choices import Format
from luthier.errors import RowError
from tests.conftest import reason_is


def calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call]}


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("messages", "reason", "field"),
    [
        ({"role": "user", "content": "Hi"}, "not_messages", "messages"),
        ("Hi", "not_messages", "messages"),
        ([], "empty_messages", "messages"),
        (["Hi"], "not_messages", "messages[0]"),
        ([{"role": "user"}], "missing_content", "messages[0].content"),
        ([USER, {"role": "assistant", "content": None}], "missing_content", "messages[1].content"),
        ([{"role": "user", "content": 3}], "bad_content", "messages[0].content"),
        ([{"role": "user", "content": True}], "bad_content", "messages[0].content"),
        ([{"role": "narrator", "content": "Hi"}], "unknown_role", "messages[0].role"),
        ([{"role": ["user"], "content": "Hi"}], "unknown_role", "messages[0].role"),
        ([{"from": "human", "value": "Hi"}], "missing_role", "messages[0].role"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "bad_part", "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "bad_content", "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image"}]}], "bad_media", "messages[0].content[0]"),
        ([USER | {"images": ["a.png"]}, ASSISTANT], "bad_media", "messages[0].images"),
        ([USER, ASSISTANT | {"audio": {"id": "1"}}], "bad_media", "messages[1].audio"),
        ([{"role": "system", "content": [{"type": "tool_result", "text": "2"}]}], "bad_part", "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], "tool_result_without_call", "messages[0]"),
        ([USER, calling(CALL), {"role": "tool", "content": {"sum": 2}}], "bad_part", "messages[2].content[0]"),
        ([USER, calling({"name": "f", "kwargs": {"a": 1}})], "bad_tool_call", "messages[1].tool_calls"),
        ([USER, calling({"name": "f", "input": ["a"]})], "bad_tool_call", "messages[1].tool_calls"),
        ([USER, ASSISTANT | {"weight": -1}], "bad_weight", "messages[1].weight"),
        ([USER, ASSISTANT | {"weight": 10**400}], "bad_weight", "messages[1].weight"),
        ([USER, ASSISTANT | {"train": "yes"}], "bad_weight", "messages[1].train"),
        ([USER, calling({"name": "f", "arguments": "{"})], "bad_tool_call", "messages[1].tool_calls"),
        ([USER, calling({"name": "f", "arguments": "[1]"})], "bad_tool_call", "messages[1].tool_calls"),
        ([USER, calling({"arguments": {}})], "bad_tool_call", "messages[1].tool_calls"),
        ([USER, calling(CALL) | {"function_call": {"name": "g"}}], "bad_tool_call", "messages[1].tool_calls"),
        ([USER, ASSISTANT | {"function_call": ["f"]}], "bad_tool_call", "messages[1].function_call"),
        ([USER, ASSISTANT | {"reasoning": "a", "thinking": "b"}], "bad_content", "messages[1].reasoning"),
        ([USER | {"tool_calls": [CALL]}], "bad_tool_call", "messages[0].tool_calls"),
        ([USER, {"role": "tool", "content": "2"}, ASSISTANT], "tool_result_without_call", "messages[1]"),
        ([{"role": "tool", "content": "2"}], "tool_result_without_call", "messages[0]"),
        (
            [USER, calling(CALL), {"role": "tool", "content": "2", "tool_call_id": "c9"}],
            "tool_result_without_call",
            "messages[2].tool_call_id",
        ),
    ],
)  # fmt: skip
def test_messages_that_mean_nothing_are_refused_with_the_path_into_the_row(
    messages: Any, reason: str, field: str
) -> None:
    with pytest.raises(RowError) as caught:
        convert({"messages": messages}, format=Format.MESSAGES)
    assert (caught.value.reason, caught.value.field, caught.value.address) == (reason, field, ADDRESS)


def test_an_unknown_role_lists_the_known_ones() -> None:
    with pytest.raises(RowError, match=r"'narrator' is not a role; known roles: .*assistant.*system.*tool.*user"):
        chat({"role": "narrator", "content": "Hi"})


@pytest.mark.parametrize(
    "messages",
    [
        [USER, USER, ASSISTANT],
        [ASSISTANT, USER, ASSISTANT],
        [USER],
        [ASSISTANT],
        [USER, {"role": "assistant", "content": " "}],
    ],
)
def test_orders_that_only_a_template_can_judge_are_accepted_as_they_stand(messages: list[dict[str, Any]]) -> None:
    assert [message.role for message in chat(*messages).messages] == [message["role"] for message in messages]


@pytest.mark.parametrize("tools", ["not json", "[1]", [{"description": "nameless"}], 7, '[{"name": 3}]'])
def test_tools_that_declare_nothing_are_refused(tools: Any) -> None:
    with pytest.raises(RowError, check=reason_is("bad_tools")):
        chat(USER, ASSISTANT, tools=tools)


@pytest.mark.parametrize("tools", [None, "", "[]", [], "null"])
def test_no_tools_are_no_tools(tools: Any) -> None:
    assert chat(USER, ASSISTANT, tools=tools).tools == ()


@pytest.mark.parametrize("kind", [kind for kind in Format if kind is not Format.AUTO])
def test_a_row_of_another_format_is_refused_with_the_columns_it_has(kind: Format) -> None:
    with pytest.raises(RowError, match=rf"missing_column: format {kind} needs .*; the row has apple, pear"):
        convert({"pear": "1", "apple": "2"}, format=kind)


def test_a_null_in_a_column_that_is_needed_is_said_to_be_one() -> None:
    with pytest.raises(RowError, match="needs 'completion'; in this row 'completion' is null"):
        convert({"prompt": "Hi", "completion": None}, format=Format.PROMPT_COMPLETION)


def test_a_message_in_the_style_of_other_sources_is_told_the_way_out() -> None:
    odd = {"messages": [{"from": "human", "value": "Hi"}]}
    with pytest.raises(RowError) as caught:
        convert(odd, format=Format.MESSAGES)
    for words in ("written as from/value", "this source as role/content", "a source of their own", "role_tag: from"):
        assert words in caught.value.detail
    odd = {"conversations": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(RowError, match="written as role/content, and this source as from/value"):
        convert(odd, format=Format.SHAREGPT)
    with pytest.raises(RowError) as caught:  # in no style at all
        convert({"messages": [{"who": "user", "says": "Hi"}]}, format=Format.MESSAGES)
    assert "['says', 'who']" in caught.value.detail and "role_tag" in caught.value.detail
    with pytest.raises(RowError, match=r"one value of bytes \(store text as strings\)"):  # of a Parquet file
        convert({"messages": {"bytes": "SGk="}}, format=Format.MESSAGES)
