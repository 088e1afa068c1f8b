"""What rows say of their own loss, in all the ways that data sets write it, and thinking that stands in the text."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spoken_rows import ADDRESS, ASSISTANT, CALL, USER, chat, convert, said

from luthier.config.choices import Format
from luthier.config.inputs import SourceConfig
from luthier.errors import RowError
from luthier.records import Conversation, Document, Feedback, Message, Preference, TargetRule, Text, Thinking, ToolCall
from luthier.sources.detect import detect_layout
from luthier.sources.formats import MAX_SPANS
from luthier.sources.formats.turns import split_thinking
from tests.conftest import reason_is, refused

THINK = ("<think>", "</think>")


def answer(**fields: Any) -> Message:
    return chat(USER, ASSISTANT | fields).messages[1]


def marked(message: Message) -> list[tuple[str, bool | None, float]]:
    return [(part.text, part.train, part.weight) for part in message.parts if isinstance(part, Text | Thinking)]


# ----------------------------------------------------------------------------------------------- messages and parts


@pytest.mark.parametrize(
    ("fields", "train", "weight"),
    [
        ({"training": False}, False, 1.0),
        ({"training": True, "train": None}, True, 1.0),
        ({"loss": False}, False, 1.0),
        ({"train": 0}, False, 1.0),
        ({"train": 1}, True, 1.0),
        ({"train": True, "loss": 1}, True, 1.0),
        ({"weight": 1}, None, 1.0),
        ({"weight": 0}, False, 1.0),
        ({"train": True, "weight": 0}, False, 1.0),
        ({"train": False, "loss_weight": 1.0}, False, 1.0),
    ],
)
def test_every_name_for_the_flag_of_a_message_means_the_same(
    fields: dict[str, Any], train: bool | None, weight: float
) -> None:
    assert answer(**fields) == said("assistant", "Hello", train=train, weight=weight)


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"train": "yes"}, "train is true or false, not string"),
        ({"train": 2}, "train is true or false, not the number 2"),
        ({"loss": 0.31}, "loss is true or false, not the number 0.31"),
        ({"train": True, "training": False}, "train is True and training is False"),
        ({"weight": -0.5}, "weight is from 0 to 1e"),
        ({"loss_weight": "1"}, "loss_weight is from 0 to 1e"),
        ({"weight": float("nan")}, "weight is from 0 to 1e"),
    ],
)
def test_flags_that_are_none_are_refused(fields: dict[str, Any], detail: str) -> None:
    with pytest.raises(RowError, match=detail) as caught:
        answer(**fields)
    assert caught.value.reason == "bad_weight" and str(caught.value.field).startswith("messages[1]")


def test_one_key_alone_says_whether_a_message_is_learned_where_the_source_names_it() -> None:
    turns = [{**USER, "weight": 1.0}, {**ASSISTANT, "weight": 0, "train": True}, {**ASSISTANT, "loss": False}]
    found = convert({"messages": turns}, tags={"train_tag": "weight"})
    assert isinstance(found, Conversation)
    assert [(message.train, message.weight) for message in found.messages] == [(True, 1.0), (False, 1.0), (None, 1.0)]
    with pytest.raises(RowError, check=reason_is("bad_weight")):
        convert({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, tags={"train_tag": "weight"})


def test_parts_of_every_kind_say_their_own() -> None:
    row = chat(
        {"role": "user", "content": [{"type": "text", "text": "<image>?", "weight": 0.5}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "training": False},
                {"type": "text", "text": "x", "train": True},
                {"type": "tool_call", "value": CALL, "weight": 2},
                {"type": "function", **CALL, "weight": 3},
            ],
            "tool_calls": [CALL | {"train": False}],
        },
        images=["a.png"],
    )
    assert row.messages[0].parts[1] == Text(text="?", weight=0.5)
    assert row.messages[1].parts == (
        Thinking(text="t", train=False),
        Text(text="x", train=True),
        ToolCall(name="add", arguments={"a": 1}, id="c1", weight=2.0),
        ToolCall(name="add", arguments={"a": 1}, id="c1", weight=3.0),
        ToolCall(name="add", arguments={"a": 1}, id="c1", train=False),
    )


def test_calls_in_sharegpt_text_say_their_own() -> None:
    calls = json.dumps([{"name": "f", "arguments": {}, "weight": 2}, {"name": "g", "arguments": {"weight": 9}}])
    row = convert({"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": calls}]})
    assert isinstance(row, Conversation)
    assert row.messages[1].parts == (
        ToolCall(name="f", arguments={}, weight=2.0),
        ToolCall(name="g", arguments={"weight": 9}),
    )


def test_a_fault_of_a_part_names_its_key() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "weight": -1}]
    with pytest.raises(RowError) as caught:
        answer(content=content)
    assert caught.value.field == "messages[1].content[1].weight"


# ------------------------------------------------------------------------------------------------------------ spans


def test_spans_cut_the_text_and_say_what_they_say() -> None:
    spans = [{"start": 0, "end": 2, "train": False}, {"start": 4, "end": 5, "weight": 2.5}]
    assert marked(answer(spans=spans)) == [("He", False, 1), ("ll", None, 1), ("o", None, 2.5)]


def test_of_overlapping_spans_the_later_wins_each_key_on_its_own() -> None:
    spans = [
        {"start": 0, "end": 4, "train": False, "weight": 2},
        {"start": 1, "end": 3, "train": True},
        {"start": 2, "end": 5, "weight": 3},
    ]
    assert marked(answer(spans=spans)) == [
        ("H", False, 2), ("e", True, 2), ("l", True, 3), ("l", False, 3), ("o", None, 3),
    ]  # fmt: skip


def test_a_span_of_weight_zero_is_not_trained() -> None:
    assert marked(answer(spans=[{"start": 1, "end": 5, "weight": 0}])) == [("H", None, 1), ("ello", False, 1)]


def test_spans_count_characters_of_python_not_bytes() -> None:
    assert marked(answer(content="a😀é!", spans=[{"start": 1, "end": 2, "train": False}])) == [
        ("a", None, 1), ("😀", False, 1), ("é!", None, 1),
    ]  # fmt: skip


def test_spans_beside_media_count_the_markers_as_they_are_written() -> None:
    text = "ab<image>cd"
    row = chat(USER | {"content": text, "spans": [{"start": 1, "end": 10, "train": True}]}, ASSISTANT, images=["a.png"])
    assert marked(row.messages[0]) == [("a", None, 1), ("b", True, 1), ("c", True, 1), ("d", None, 1)]


def test_spans_of_a_part_count_the_part() -> None:
    content = [{"type": "text", "text": "ab", "weight": 2, "spans": [{"start": 1, "end": 2, "weight": 3}]}, "cd"]
    assert marked(answer(content=content)) == [("a", None, 2), ("b", None, 6), ("cd", None, 1)]


@pytest.mark.parametrize(
    ("spans", "field", "detail"),
    [
        ({"start": 0, "end": 1}, "spans", "a list, not object"),
        ([3], "spans[0]", "an object with start and end, not number"),
        ([{"end": 1, "train": True}], "spans[0].start", "this is missing"),
        ([{"start": 0, "end": 1.0, "train": True}], "spans[0].end", "this is number"),
        ([{"start": 0, "end": True, "train": True}], "spans[0].end", "this is boolean"),
        ([{"start": 0, "end": 1, "train": True}, {"start": 2, "end": 2, "train": True}], "spans[1]", "ends at 2"),
        ([{"start": 3, "end": 2, "train": True}], "spans[0]", "ends at 2, not after its start 3"),
        ([{"start": -1, "end": 2, "train": True}], "spans[0]", "from -1 to 2, the text has 5 characters"),
        ([{"start": 0, "end": 6, "train": True}], "spans[0]", "from 0 to 6, the text has 5 characters"),
        ([{"start": 0, "end": 1}], "spans[0]", "neither train nor weight"),
        ([{"start": 0, "end": 1, "weight": -1}], "spans[0].weight", "from 0 to 1e"),
        ([{"start": 0, "end": 1, "train": True}] * (MAX_SPANS + 1), "spans", "are allowed"),
    ],
)
def test_spans_that_mark_nothing_are_refused_with_the_numbers(spans: Any, field: str, detail: str) -> None:
    with pytest.raises(RowError, match=detail) as caught:
        answer(spans=spans)
    assert (caught.value.field, caught.value.address) == (f"messages[1].{field}", ADDRESS)
    assert caught.value.reason in ("bad_span", "bad_weight")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}], "spans": [{"start": 0, "end": 1}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "spans": [{"start": 0, "end": 1}]},
    ],
)
def test_spans_of_what_is_no_text_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(RowError, check=reason_is("bad_span")):
        chat(USER, message)


def test_spans_said_in_two_ways_are_refused() -> None:
    with pytest.raises(RowError, match="say it once: the message has spans and train_detail"):
        answer(spans=[], train_detail=[])


DETAIL = [
    {"begin_offset": 0, "end_offset": 1, "train": True},
    {"begin_offset": 3, "end_offset": 3, "train": True},
    {"begin_offset": 4, "end_offset": 4, "train": False},
]


@pytest.mark.parametrize("key", ["train_detail", "training_detail"])
def test_the_ends_of_axolotls_details_are_in_and_what_none_names_is_off(key: str) -> None:
    message = answer(**{key: DETAIL})
    assert message.train is True
    assert marked(message) == [("He", True, 1), ("l", False, 1), ("l", True, 1), ("o", False, 1)]


def test_axolotls_details_make_a_question_a_target_and_give_way_to_its_flag() -> None:
    row = chat(USER | {"train_detail": [{"begin_offset": 0, "end_offset": 0, "training": True}]}, ASSISTANT)
    assert row.messages[0].train is True and marked(row.messages[0]) == [("H", True, 1), ("i", False, 1)]
    assert answer(train_detail=DETAIL, train=False) == said("assistant", "Hello", train=False)
    assert answer(train_detail=[]) == said("assistant", "Hello", train=False)
    assert answer(train_detail=None) == said("assistant", "Hello")


@pytest.mark.parametrize(
    "entry",
    [{"begin_offset": 0, "end_offset": 5, "train": True}, {"begin_offset": 0, "end_offset": 1}, "x", {"train": True}],
)
def test_details_that_mark_nothing_are_refused(entry: Any) -> None:
    with refused(RowError, "messages[1].train_detail[0]", "bad_span"):
        answer(train_detail=[entry])


TEXTS = st.text("ab<think>\n/", max_size=30) | st.sampled_from(["<think>\nab\n</think>\n\ncd", "<think></think>x"])
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.booleans()), max_size=5)


@given(text=TEXTS, spans=SPANS)
def test_spans_change_no_character_and_the_last_decides(text: str, spans: list[tuple[int, int, bool]]) -> None:
    inside = [(start, end, train) for start, end, train in spans if start < end <= len(text)]
    entries = [{"start": start, "end": end, "train": train} for start, end, train in inside]
    message = answer(content=text, spans=entries)
    assert "".join(as_written(part) for part in message.parts) == text
    position = 0
    for part in message.parts:
        assert isinstance(part, Text | Thinking)
        first = position + (part.written_start if isinstance(part, Thinking) else 0)
        for place in range(first, first + len(part.text)):
            over = [train for start, end, train in inside if start <= place < end]
            assert part.train == (over[-1] if over else None)
        position += len(as_written(part))


def as_written(part: object) -> str:
    assert isinstance(part, Text | Thinking)
    return part.written if isinstance(part, Thinking) and part.written is not None else part.text


# ------------------------------------------------------------------------------------------------------------- rows


def test_a_row_has_its_own_policy_and_weight() -> None:
    row = chat(USER, ASSISTANT, train_on="last_assistant", weight=0.5)
    assert (row.train_on, row.weight) == ("last_assistant", 0.5)
    assert (chat(USER, ASSISTANT).train_on, chat(USER, ASSISTANT).weight) == (None, 1.0)


def test_the_rows_policy_wins_over_that_of_its_data_set() -> None:
    row = {"instruction": "a", "output": "b"}
    assert convert(row, train_on="none").train_on == "none"  # type: ignore[union-attr]
    assert convert(row | {"train_on": "all"}, train_on="none").train_on == "all"  # type: ignore[union-attr]
    assert convert(row | {"train_on": ""}, train_on="none").train_on == "none"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"instruction": "a", "output": "b"},
        {"prompt": "a", "completion": "b"},
        {"text": "a"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "completion": "b", "label": True},
    ],
)
def test_rows_of_every_format_have_a_weight_and_the_rules_of_their_data_set(row: dict[str, Any]) -> None:
    rules = [{"pattern": "b", "train": False}]
    converted = convert(row | {"weight": 2}, targets=rules)
    assert isinstance(converted, Conversation | Document | Preference | Feedback)
    assert (converted.weight, converted.rules) == (2.0, (TargetRule(pattern="b", train=False),))


@pytest.mark.parametrize(("value", "weight"), [("0.25", 0.25), ("3", 3.0), ("", 1.0), (0, 0.0), (None, 1.0)])
def test_the_weight_of_a_row_may_be_a_cell_of_a_table(value: Any, weight: float) -> None:
    assert chat(USER, ASSISTANT, weight=value).weight == weight


@pytest.mark.parametrize("value", ["heavy", -1, "1e400", True, [1], 1e7, "nan"])
def test_a_column_that_is_no_weight_is_refused_and_can_be_named_away(value: Any) -> None:
    with pytest.raises(RowError, match=r"weight bad_weight: .*columns: \{weight: …\}"):
        chat(USER, ASSISTANT, weight=value)
    row = convert({"messages": [USER, ASSISTANT], "weight": value}, columns={"weight": "none"})
    assert isinstance(row, Conversation) and row.weight == 1.0


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with refused(RowError, "train_on", "bad_train_on", "'assistants'", "last_assistant"):
        chat(USER, ASSISTANT, train_on="assistants")


def test_text_rows_have_spans() -> None:
    row = convert({"text": "abc", "spans": [{"start": 0, "end": 1, "train": False}]}, format=Format.TEXT)
    assert isinstance(row, Document)
    assert row.parts == (Text(text="a", train=False), Text(text="bc"))


def test_what_a_data_set_says_of_targets_is_part_of_its_layout_as_plain_data() -> None:
    """The store's keys are made of it: rows that mean something else are encoded anew."""

    def written(**fields: Any) -> str:
        source = SourceConfig.model_validate({"path": "x", **fields})
        return json.dumps(asdict(detect_layout(source, [{"text": "a"}])), sort_keys=True)

    said: list[dict[str, Any]] = [
        {},
        {"targets": [{"part": "answer", "weight": 2}]},
        {"targets": [{"part": "answer", "weight": 3}]},
        {"thinking": "text"},
        {"thinking_tags": ["[", "]"]},
        {"train_on": "none"},
    ]
    assert len({written(**fields) for fields in said}) == len(said)


# --------------------------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("<think>\na\n</think>\n\nb", "a", "b"),
        ("<think>a</think>b", "a", "b"),
        ("\n <think>\na\n</think>\n\nb", "a", "b"),
        ("<think>\n\na\n\n</think>\n\n\n\nb", "\na\n", "\n\nb"),
        ("<think>\n\n</think>\n\nb", "", "b"),
        ("<think>\n</think>b", "", "b"),
        ("<think></think>b", "", "b"),
        ("<think>\na\n</think>\n", "a", ""),
        ("<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        ("<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
        ("<think>a</think> b", "a", " b"),
        ("a\n</think>\n\nb", "a", "b"),
        (" a\n</think>", " a", ""),
        ("</think>\n\nb", "", "b"),
    ],
)
def test_thinking_at_the_beginning_of_a_text_becomes_a_part(text: str, thought: str, rest: str) -> None:
    first, *others = split_thinking(text, THINK)
    assert isinstance(first, Thinking) and first.written is not None
    assert first.text == thought == first.written[first.written_start :][: len(thought)]
    assert others == ([Text(text=rest)] if rest else [])
    assert first.written + rest == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "b",
        "<think>a",
        "b<think>a</think>",
        "Close it with </think>.",
        "</think>b",
        "a\n</think>\nb\n</think>\nc",
        "a\n</think> b",
        "x <think>\n</think>\n",
        "<THINK>a</THINK>",
    ],
)
def test_what_is_no_whole_thought_at_the_beginning_stays_text(text: str) -> None:
    assert split_thinking(text, THINK) == [Text(text=text)]


@given(text=st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "é"]), max_size=12).map("".join))
def test_no_character_of_a_text_is_lost(text: str) -> None:
    parts = split_thinking(text, THINK)
    assert "".join(as_written(part) for part in parts) == text
    assert [type(part) for part in parts] in ([Text], [Thinking], [Thinking, Text])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {"role": "assistant", "content": "<think>a</think>b"}]},
        {"messages": [USER, {"role": "assistant", "content": "<think>a</think>b", "name": "x"}]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "<think>a</think>b"}]}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "<think>a</think>b"}]},
        {"instruction": "Hi", "output": "<think>a</think>b"},
        {"prompt": "Hi", "completion": "<think>a</think>b"},
    ],
)
def test_thinking_is_found_in_every_format(row: dict[str, Any]) -> None:
    converted = convert(row)
    assert isinstance(converted, Conversation)
    thought = Thinking(text="a", written="<think>a</think>", written_start=7)
    assert converted.messages[1].parts == (thought, Text(text="b"))
    left_alone = convert(row, thinking="text")
    assert isinstance(left_alone, Conversation)
    assert left_alone.messages[1].parts == (Text(text="<think>a</think>b"),)


def test_thinking_is_found_in_history_and_in_pairs() -> None:
    row = convert({"instruction": "Hi", "output": "x", "history": [["q", "<think>a</think>b"]]})
    assert isinstance(row, Conversation) and isinstance(row.messages[1].parts[0], Thinking)
    pair = convert({"prompt": "Hi", "chosen": "<think>a</think>b", "rejected": "c"})
    assert isinstance(pair, Preference) and isinstance(pair.chosen[0].parts[0], Thinking)


def test_only_assistants_think_and_only_once() -> None:
    text = "<think>a</think>b"
    row = chat(
        {"role": "user", "content": text}, {"role": "assistant", "content": text, "reasoning_content": "r"}, USER,
        {"role": "assistant", "content": ["Well. ", text]},
    )  # fmt: skip
    assert row.messages[0].parts == (Text(text=text),)
    assert row.messages[1].parts == (Thinking(text="r"), Text(text=text))
    assert row.messages[3].parts == (Text(text="Well. "), Text(text=text))


def test_thinking_may_have_tags_of_its_own() -> None:
    row = convert({"prompt": "Hi", "completion": "[T]a[/T]b<think>c</think>"}, thinking_tags=["[T]", "[/T]"])
    assert isinstance(row, Conversation)
    assert row.messages[1].parts == (
        Thinking(text="a", written="[T]a[/T]", written_start=3),
        Text(text="b<think>c</think>"),
    )


def test_flags_and_spans_reach_thought_and_answer_in_the_rows_own_count() -> None:
    text = "<think>\nab\n</think>\n\ncd"
    message = answer(
        content=text, spans=[{"start": 0, "end": 9, "train": False}, {"start": 22, "end": 23, "weight": 2}]
    )
    assert marked(message) == [("a", False, 1), ("b", None, 1), ("c", None, 1), ("d", None, 2)]
    parts = answer(content=[{"type": "text", "text": text, "train": True}]).parts
    assert [part.train for part in parts if isinstance(part, Text | Thinking)] == [True, True]
