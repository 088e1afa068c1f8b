"""What rows of each format mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from spoken_rows import ADDRESS, ASSISTANT, CALL, USER, chat, convert, said

from luthier.config.choices import Format, RowKind
from luthier.errors import RowError, SourceError
from luthier.records import Conversation, Document, Feedback, Image, Preference, Text, Thinking, ToolCall
from luthier.rendering.other_rows import refuse
from tests.conftest import reason_is

# ------------------------------------------------------------------------------------------------------- alpaca


def test_alpaca_joins_instruction_and_input_by_a_newline_after_system_and_history() -> None:
    row = convert(
        {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "history": [["Hi", "Hello"]]}
    )
    assert row == Conversation(
        messages=(
            said("system", "Be brief."),
            said("user", "Hi"),
            said("assistant", "Hello"),
            said("user", "Add.\n1 2"),
            said("assistant", "3"),
        ),
        address=ADDRESS,
    )


def test_alpaca_with_an_empty_input_has_no_newline() -> None:
    row = convert({"instruction": "Add.", "input": "", "output": "3"})
    assert isinstance(row, Conversation)
    assert row.messages == (said("user", "Add."), said("assistant", "3"))


def test_alpaca_with_chosen_and_rejected_is_a_preference_and_with_a_tag_feedback() -> None:
    pair = {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4"}
    expected = Preference(
        prompt=(said("user", "Add.\n1 2"),),
        chosen=(said("assistant", "3"),),
        rejected=(said("assistant", "4"),),
        address=ADDRESS,
    )
    assert convert(pair) == convert(pair, format=Format.ALPACA) == expected
    verdict = convert({"instruction": "Add.", "output": "3", "kto_tag": False}, format=Format.ALPACA)
    assert verdict == Feedback(
        prompt=(said("user", "Add."),), completion=(said("assistant", "3"),), desirable=False, address=ADDRESS
    )


def test_a_partial_column_map_keeps_the_other_defaults() -> None:
    row = {"question": "Add.", "input": "1 2", "output": "3", "note": "x"}
    converted = convert(row, format=Format.ALPACA, columns={"prompt": "question"})
    assert isinstance(converted, Conversation)
    assert converted.messages == (said("user", "Add.\n1 2"), said("assistant", "3"))


def test_a_default_gives_way_where_its_column_is_used_for_something_else() -> None:
    converted = convert({"input": "Add.", "target": "3"}, columns={"prompt": "input", "response": "target"})
    assert isinstance(converted, Conversation)
    assert converted.messages == (said("user", "Add."), said("assistant", "3"))


# ----------------------------------------------------------------------------------------------------- sharegpt


def sharegpt(*turns: tuple[str, Any], **fields: Any) -> Conversation:
    row = convert({"conversations": [{"from": role, "value": value} for role, value in turns], **fields})
    assert isinstance(row, Conversation)
    return row


def test_sharegpt_calls_are_parts_parallel_ones_too_and_observations_are_tool_messages() -> None:
    tool = {"name": "add", "description": "adds", "parameters": {}}
    row = sharegpt(
        ("human", "1+1 and 2+2?"),
        ("function_call", '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": "{\\"a\\": 2}"}]'),
        ("observation", "2"),
        ("observation", "4"),
        ("gpt", "2 and 4"),
        tools='[{"name": "add", "description": "adds", "parameters": {}}]',
    )
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert row.messages[1].parts == (
        ToolCall(name="add", arguments={"a": 1}),
        ToolCall(name="add", arguments={"a": 2}),
    )
    assert row.tools == ({"type": "function", "function": tool},)


def test_a_leading_system_message_wins_over_the_system_column() -> None:
    row = sharegpt(("system", "A"), ("human", "Hi"), ("gpt", "Hello"), system="B")
    assert row.messages[0] == said("system", "A")
    assert len(row.messages) == 3
    assert sharegpt(("human", "Hi"), ("gpt", "Hello"), system="B").messages[0] == said("system", "B")
    blocks = [{"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}}]  # as Anthropic writes it
    assert sharegpt(("human", "Hi"), ("gpt", "Hello"), system=blocks).messages[0] == said("system", "B")


def test_tags_rename_keys_and_roles_and_leave_the_others_alone() -> None:
    row = convert(
        {"dialog": [{"who": "customer", "says": "Hi"}, {"who": "gpt", "says": "Hello"}]},
        format=Format.SHAREGPT,
        columns={"messages": "dialog"},
        tags={"role_tag": "who", "content_tag": "says", "user_tag": "customer"},
    )
    assert isinstance(row, Conversation)
    assert row.messages == (said("user", "Hi"), said("assistant", "Hello"))
    with pytest.raises(RowError, match=r"'human' is not a role; known roles: .*customer"):
        convert(
            {"conversations": [{"from": "human", "value": "Hi"}]},
            format=Format.SHAREGPT,
            tags={"user_tag": "customer"},
        )


def test_sharegpt_ranking_and_verdicts() -> None:
    turns = [{"from": "human", "value": "Hi"}]
    good, bad = {"from": "gpt", "value": "Hello"}, {"from": "gpt", "value": "What"}
    expected = Preference(
        prompt=(said("user", "Hi"),),
        chosen=(said("assistant", "Hello"),),
        rejected=(said("assistant", "What"),),
        address=ADDRESS,
    )
    pair = {"conversations": turns, "chosen": good, "rejected": bad}
    assert convert(pair) == convert(pair, format=Format.SHAREGPT) == expected
    verdict = {"conversations": [*turns, good], "kto_tag": True}
    expected_verdict = Feedback(
        prompt=(said("user", "Hi"),), completion=(said("assistant", "Hello"),), desirable=True, address=ADDRESS
    )
    assert convert(verdict) == convert(verdict, format=Format.SHAREGPT) == expected_verdict


# ------------------------------------------------------------------------------------------------------- openai


def test_openai_messages_keep_thinking_text_and_calls_in_this_order() -> None:
    row = chat(
        USER,
        {
            "role": "assistant",
            "content": "Let me add.",
            "reasoning_content": "Hm.",
            "tool_calls": [CALL, CALL | {"id": "c2"}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        ASSISTANT,
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    assert row.messages[1].parts == (
        Thinking(text="Hm."),
        Text(text="Let me add."),
        ToolCall(name="add", arguments={"a": 1}, id="c1"),
        ToolCall(name="add", arguments={"a": 1}, id="c2"),
    )
    assert row.messages[2] == said("tool", "2", name="add", tool_call_id="c1")
    assert row.tools == ({"type": "function", "function": {"name": "add"}},)


def test_markers_and_tags_inside_answers_stay_text() -> None:
    answer = "So: <think>x</think> <image> [[1, 2], [3, 4]] <|im_end|>"
    row = chat({"role": "user", "content": "<image>?"}, {"role": "assistant", "content": answer}, images=["a.png"])
    assert row.messages[1].parts == (Text(text=answer),)


@pytest.mark.parametrize(
    ("fields", "train", "weight"),
    [
        ({}, None, 1.0),
        ({"train": False}, False, 1.0),
        ({"train": True}, True, 1.0),
        ({"weight": 0}, False, 1.0),
        ({"weight": 0.5}, None, 0.5),
        ({"loss_weight": 0.0}, False, 1.0),
        ({"loss_weight": 1.0}, True, 1.0),
        ({"loss_weight": None, "train": None}, None, 1.0),
    ],
)
def test_what_a_message_says_of_its_loss_is_kept(fields: dict[str, Any], train: bool | None, weight: float) -> None:
    assert chat(USER, ASSISTANT | fields).messages[1] == said("assistant", "Hello", train=train, weight=weight)


def test_typed_parts_of_both_writings_become_the_same_parts() -> None:
    ours = chat(
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "http://x/a.png"}}],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hello"}]},
    )
    v1 = chat(
        {
            "role": "user",
            "content": [{"type": "text", "value": "Hi"}, {"type": "image_url", "value": "http://x/a.png"}],
        },
        {"role": "assistant", "content": [{"type": "reasoning", "value": "Hm."}, {"type": "text", "value": "Hello"}]},
    )
    assert ours == v1
    assert ours.messages[0].parts == (Text(text="Hi"), Image(source="http://x/a.png"))
    assert ours.messages[1].parts == (Thinking(text="Hm."), Text(text="Hello"))


def test_null_fields_are_absent_as_columnar_files_have_them() -> None:
    nulls = {"tool_calls": None, "name": None, "tool_call_id": None, "reasoning_content": None, "function_call": None}
    assert chat(USER | nulls, ASSISTANT | nulls, tools=None, images=None) == chat(USER, ASSISTANT)


# ---------------------------------------------------------------------------------------------------- the others


def test_prompt_completion_marks_answers_of_the_prompt_as_context() -> None:
    assert convert({"prompt": "Hi", "completion": "Hello"}) == Conversation(
        messages=(said("user", "Hi"), said("assistant", "Hello")), address=ADDRESS
    )
    row = convert({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]})
    assert isinstance(row, Conversation)
    assert [message.train for message in row.messages] == [None, False, None, None]


def test_text_rows_are_documents() -> None:
    assert convert({"text": "Once <image>"}) == Document(parts=(Text(text="Once <image>"),), address=ADDRESS)


def test_system_messages_are_left_out_where_the_source_drops_them() -> None:
    row = {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT], "system": "Be kind."}
    kept, dropped = convert(row), convert(row, drop_system=True)
    assert isinstance(kept, Conversation) and isinstance(dropped, Conversation)
    assert kept.messages[1:] == dropped.messages and kept.messages[0].role == "system"
    with pytest.raises(RowError, check=reason_is("empty_messages")):
        convert({"messages": [{"role": "system", "content": "Be brief."}]}, drop_system=True)


def test_text_in_pieces_is_learned_where_its_labels_say() -> None:
    row = {"segments": [{"label": False, "text": "Q"}, {"label": True, "text": "A"}, {"label": True, "text": ""}]}
    assert convert(row) == Document(parts=(Text(text="Q", train=False), Text(text="A", train=True)), address=ADDRESS)


@pytest.mark.parametrize(
    "piece", ["A", {"text": "A"}, {"text": "A", "label": 1}, {"label": True}, {"text": 1, "label": True}]
)
def test_a_piece_of_text_without_a_label_is_refused_by_its_place(piece: object) -> None:
    with pytest.raises(RowError) as caught:
        convert({"segments": [{"label": False, "text": "Q"}, piece]})
    assert (caught.value.reason, caught.value.field) == ("bad_content", "segments[1]")
    with pytest.raises(RowError) as caught:
        convert({"segments": [{"label": True, "text": ""}]})
    assert caught.value.reason == "empty_text"


def test_only_a_prompt_column_that_the_user_named_is_plain_text() -> None:
    expected = Document(parts=(Text(text="Once"),), address=ADDRESS)
    assert convert({"content": "Once"}, columns={"prompt": "content"}) == expected
    with pytest.raises(RowError, check=reason_is("missing_column")):
        convert({"content": "Once"}, format=Format.ALPACA, columns={"prompt": "content"})


def test_preference_rows_share_a_written_or_an_implied_prompt() -> None:
    expected = Preference(
        prompt=(said("user", "Hi"),),
        chosen=(said("assistant", "Hello"),),
        rejected=(said("assistant", "What"),),
        address=ADDRESS,
    )
    rejected = {"role": "assistant", "content": "What"}
    assert convert({"prompt": "Hi", "chosen": "Hello", "rejected": "What"}) == expected
    assert convert({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [rejected]}) == expected
    assert convert({"chosen": [USER, ASSISTANT], "rejected": [USER, rejected]}) == expected
    assert convert({"prompt": "Hi", "chosen": [USER, ASSISTANT], "rejected": [USER, rejected]}) == expected
    assert convert({"chosen_messages": [USER, ASSISTANT], "rejected_messages": [USER, rejected]}) == expected


GPT = {"from": "gpt", "value": "Hello"}
PAIRS = [
    {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
    {"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "No"}]},
    {"messages": [USER, ASSISTANT], "rejected": "No"},
    {"conversations": [{"from": "human", "value": "Hi"}], "chosen": GPT, "rejected": {**GPT, "value": "No"}},
]


@pytest.mark.parametrize("place", range(len(PAIRS)))
def test_the_page_names_the_setting_by_which_the_better_answer_of_a_pair_is_learned(place: int) -> None:
    row, page = PAIRS[place], Path(__file__).parents[2] / "docs" / "data_formats.md"
    with pytest.raises(RowError, match=page.name):
        refuse(convert(row), RowKind.ANSWER)
    table = page.read_text(encoding="utf-8").partition("To learn only the better answers")[2].split("\n\n")[1]
    setting = table.splitlines()[2:][place].split("|")[2].replace("`", "")
    learned = convert(row, **yaml.safe_load(f"{{{setting}}}"))
    assert isinstance(learned, Conversation)
    assert learned.messages == (said("user", "Hi"), said("assistant", "Hello"))


def test_a_column_that_rows_of_the_format_found_do_not_have_is_refused() -> None:
    """Else earlier answers of these conversations would be learned, and not the one that is named."""
    for columns in ({"response": "chosen"}, {"response": "chosen", "rejected": "none"}):
        with pytest.raises(SourceError, match=r"'chosen' for 'response'") as caught:
            convert(PAIRS[3], columns=columns)
        assert "prompt_completion" in str(caught.value.hint)
    for named, row, columns, told in (
        (Format.ALPACA, {"instruction": "a", "output": "b", "m": [USER]}, {"messages": "m"}, "'m' for 'messages'"),
        (Format.MESSAGES, {"messages": [USER, ASSISTANT], "q": "a"}, {"prompt": "q"}, "'q' for 'prompt'"),
        (Format.TEXT, {"text": "a", "s": "b"}, {"system": "s"}, "'s' for 'system'"),
        (Format.TEXT, {"text": "a"}, {"prompt": "text", "text": "text"}, "both 'prompt' and 'text'"),
        (Format.AUTO, {"q": "a"}, {"prompt": "q", "response": "q"}, "both 'prompt' and 'response'"),
        (Format.AUTO, {"q": "a", "r": "b", "s": "c"}, {"response": "r", "completion": "s"}, "completion.*the same"),
    ):
        with pytest.raises(SourceError, match=told):
            convert(row, format=named, columns=columns)


@pytest.mark.parametrize(
    "answer", [{"completion": "b"}, {"chosen": "b", "rejected": "c"}, {}, {"completion": "b", "label": True}]
)
def test_an_input_belongs_to_an_instruction_and_a_history_to_any_prompt(answer: dict[str, object]) -> None:
    rest = {"input": "x", "history": [["q", "r"]], **answer}

    def prompt_of(row: dict[str, object], **told: object) -> list[str]:
        found = convert(row, **told)
        messages = found.messages if isinstance(found, Conversation) else found.prompt
        return [message.text for message in messages][:3]

    assert prompt_of({"prompt": "a", **rest}) == ["q", "r", "a"]
    assert prompt_of({"prompt": "a", **rest}, columns={"query": "input"}) == ["q", "r", "a\nx"]
    alpaca = {"output" if name == "completion" else name: value for name, value in rest.items()}
    assert prompt_of({"instruction": "a", **alpaca}) == ["q", "r", "a\nx"]


def test_feedback_rows_have_a_prompt_or_messages() -> None:
    expected = Feedback(
        prompt=(said("user", "Hi"),), completion=(said("assistant", "Hello"),), desirable=True, address=ADDRESS
    )
    assert convert({"prompt": "Hi", "completion": "Hello", "label": True}) == expected
    assert convert({"prompt": "Hi", "completion": "Hello", "label": "True"}) == expected
    assert convert({"messages": [USER, ASSISTANT], "label": 1}, format=Format.FEEDBACK) == expected
    assert isinstance(convert({"messages": [USER, ASSISTANT], "label": 1}), Conversation)
    with pytest.raises(RowError, check=reason_is("bad_label")):
        convert({"prompt": "Hi", "completion": "Hello", "label": "good"}, format=Format.FEEDBACK)


def test_a_pattern_writes_what_stands_before_a_text_from_the_columns_that_the_row_has() -> None:
    patterns = ["Q: {q} ({hint}) A: ", "Q: {q} A: "]
    for row, before in (({"q": "1+1?", "hint": "add", "a": "2"}, "Q: 1+1? (add) A: "),
                        ({"q": "{hint}?", "hint": "", "a": "2"}, "Q: {hint}? A: ")):  # fmt: skip
        found = convert(row, format="text", columns={"text": "a"}, prompt_format=patterns)
        assert found == Document(parts=(Text(text=before, train=False), Text(text="2")), address=ADDRESS)
    with pytest.raises(RowError) as caught:
        convert({"a": "2"}, format="text", columns={"text": "a"}, prompt_format=patterns)
    assert caught.value.reason == "missing_column" and "needs a text in q" in caught.value.detail


def test_rows_of_instruction_and_response_are_answers_with_their_context() -> None:
    found = convert({"instruction": "Who is it?", "context": "Ann is here.", "response": "Ann.", "category": "qa"})
    assert found == Conversation(
        messages=(said("user", "Who is it?\nAnn is here."), said("assistant", "Ann.")), address=ADDRESS,
    )  # fmt: skip


@pytest.mark.parametrize(("user", "model"), [("human", "bard"), ("human", "bing"), ("prompter", "chatgpt")])
def test_speakers_of_old_data_sets_are_known(user: str, model: str) -> None:
    found = convert({"conversations": [{"from": user, "value": "Hi"}, {"from": model, "value": "Yo"}]})
    assert isinstance(found, Conversation) and [message.role for message in found.messages] == ["user", "assistant"]


def test_a_call_with_an_empty_text_of_arguments_has_none() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": ""}}
    found = convert({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert isinstance(found, Conversation) and found.messages[1].parts == (ToolCall(name="now", arguments={}),)


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}


@pytest.mark.parametrize("name", ["arguments", "parameters", "args", "input"])
@pytest.mark.parametrize("written", [{"a": [1, {}]}, '{"a": [1, {}]}'], ids=["object", "text"])
def test_arguments_are_read_by_each_of_their_names(name: str, written: Any) -> None:
    """A call whose arguments were not read would be learned as one without any."""
    call = ToolCall(name="add", arguments={"a": [1, {}]}, id="c1")
    bare, beside = {"name": "add", name: written}, {"function": {"name": "add"}, name: written}
    empty = {} if name == "arguments" else {"arguments": {}}  # as columns of structs are filled up
    for its in (bare, beside, {"function": bare}, bare | empty, beside | {"function": {"name": "add", **empty}}):
        assert chat(USER, {"role": "assistant", "tool_calls": [{"id": "c1", **its}]}).messages[1].parts == (call,)
        filled = {"type": "tool_use", "id": "c1", "value": None, "text": None, **its}
        assert chat(USER, {"role": "assistant", "content": [filled]}).messages[1].parts == (call,)
        part = {"type": "tool_call", "value": json.dumps({"id": "c1", **its})}
        assert chat(USER, {"role": "assistant", "content": [part]}).messages[1].parts == (call,)
    for its in (bare | {"id": "c1"}, json.dumps(bare | {"id": "c1"})):
        assert chat(USER, {"role": "assistant", "content": None, "function_call": its}).messages[1].parts == (call,)
    talk = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(bare | {"id": "c1"})}]
    found = convert({"conversations": talk})
    assert isinstance(found, Conversation) and found.messages[1].parts == (call,)


def test_anthropics_form_means_what_openais_does() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    blocks = [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "Let me add."},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "0"}, PICTURE]},
        {"type": "tool_result", "content": None, "text": None},
        {"type": "text", "text": "So?"},
        PICTURE,
    ]
    theirs = chat(
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results, "train": False},
        ASSISTANT,
        tools=[{"name": "add", "description": "Adds.", "input_schema": schema}],
    )
    calls = [CALL, CALL | {"id": "c2", "function": {"name": "add", "arguments": "{}"}}]
    image = {"type": "image", "image": {"bytes": "iVBORw0="}}
    ours = chat(
        {"role": "user", "content": [image, {"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Let me add.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "train": False},
        {"role": "tool", "content": [{"type": "text", "text": "0"}, image], "tool_call_id": "c2", "train": False},
        {"role": "tool", "content": "", "train": False},
        {"role": "user", "content": [{"type": "text", "text": "So?"}, image], "train": False},
        ASSISTANT,
        tools=[{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}],
    )
    assert theirs == ours


@pytest.mark.parametrize("name", ["parameters", "input_schema", "inputSchema"])
def test_what_a_declared_tool_takes_is_shown_under_the_name_that_templates_read(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "add", name: schema, "description": "Adds."}
    expected = {"name": "add", "parameters": schema, "description": "Adds."}
    for declared in (function, {"function": function}, {"function": function, "type": "function"}):
        for more in ({}, {} if name == "parameters" else {"parameters": None}):
            its = {**declared, "function": function | more} if "function" in declared else declared | more
            (found,) = chat(USER, ASSISTANT, tools=[its]).tools
            assert found == {"type": "function", "function": expected}
            assert isinstance(found["function"], dict) and list(found["function"]) == list(expected), "in their order"
    (kept,) = chat(USER, ASSISTANT, tools=[{"function": function, "type": "function"}]).tools
    assert list(kept) == ["function", "type"]
