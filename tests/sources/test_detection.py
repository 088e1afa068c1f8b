"""The format of a source is seen in its rows, or refused with what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luthier.config.choices import Format
from luthier.config.inputs import SourceConfig
from luthier.config.schema import RunConfig
from luthier.errors import RowError, SourceError
from luthier.preparation import info_of
from luthier.records import Conversation
from luthier.sources.source import Source, open_sources
from tests.conftest import refused


def source_of(path: Path, **fields: Any) -> Source:
    [source] = open_sources([SourceConfig(path=str(path), **fields)], seed=0)
    return source


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def messages_of(source: Source) -> list[Any]:
    rows = [source.convert(row) for row in source.rows() if not isinstance(row, RowError)]
    return [row.messages for row in rows if isinstance(row, Conversation)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}]}, Format.SHAREGPT),
        ({"conversations": [{"role": "user", "content": "Hi"}]}, Format.MESSAGES),
        ({"messages": [{"role": "user", "content": "Hi"}]}, Format.MESSAGES),
        ({"instruction": "Hi", "input": None, "output": "Hello"}, Format.ALPACA),
        ({"prompt": "Hi", "completion": "Hello"}, Format.PROMPT_COMPLETION),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, Format.PREFERENCE),
        ({"prompt": "Hi", "completion": "Hello", "label": True}, Format.FEEDBACK),
        ({"text": "Once", "label": 1}, Format.TEXT),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, Format.TOKENS),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 1]}, Format.TOKENS),
    ],
)
def test_the_format_is_seen_in_the_rows(tmp_path: Path, row: dict[str, Any], expected: Format) -> None:
    assert source_of(write_jsonl(tmp_path / "rows.jsonl", [row])).format is expected


def test_an_unknown_format_is_refused_with_what_was_seen_and_what_each_needs(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"frage": "a", "antwort": "b", "nichts": None}])
    with pytest.raises(SourceError) as caught:
        source_of(path)
    report = str(caught.value)
    assert "columns seen: antwort, frage\n" in report
    assert f"{{path: {path}, columns: {{prompt: frage, response: antwort}}}}" in report
    assert "alpaca needs: instruction + output" in report
    mapped = source_of(path, columns={"prompt": "frage", "completion": "antwort"})
    assert [message.text for message in messages_of(mapped)[0]] == ["a", "b"]


def test_columns_and_tags_that_do_not_exist_are_refused_with_the_nearest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "x"}])
    with pytest.raises(SourceError, match=r"no column called 'respons'[\s\S]*did you mean response"):
        source_of(path, columns={"respons": "text"})
    with refused(SourceError, "'roletag'", "role_tag"):
        source_of(path, tags={"roletag": "x"})


def test_columns_and_tags_the_wrong_way_round_are_exchanged_in_the_hint(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"my_question": "a", "my_answer": "b"}])
    given = {"my_question": "prompt", "completion": "my_answer"}
    with refused(SourceError, "Luthier's name first", "columns: {prompt: my_question, completion: my_answer}"):
        source_of(path, columns=given)
    with refused(SourceError, "Luthier's name first", "tags: {user_tag: customer}"):
        source_of(path, tags={"customer": "user_tag"})


def test_an_answer_that_is_a_number_is_told_what_an_answer_is(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": 3}])
    source = source_of(path)
    (row,) = source.rows()
    assert not isinstance(row, RowError)
    with pytest.raises(RowError, match="completion not_messages: an answer is text, a message or a list of messages"):
        source.convert(row)


def test_a_missing_column_says_where_the_format_is_from(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"instruction": "a", "output": "b"}, {"instruction": "a"}])
    source = source_of(path)
    *_, row = source.rows()
    assert not isinstance(row, RowError)
    with pytest.raises(
        RowError, match=r"format alpaca needs 'output' or .*what the columns of the first rows look like"
    ):
        source.convert(row)


# ------------------------------------------------------------------------------------- transcripts, ids, wrong columns


def pair_of(tmp_path: Path, row: dict[str, Any], **settings: Any) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (source,) = open_sources([SourceConfig(path=str(path), **settings)], seed=0)
    (raw,) = source.rows()
    return source.convert(raw)


def said(messages: Any) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


def test_two_transcripts_are_a_pair_whose_prompt_is_what_both_begin_with(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi: there\n\nAssistant: Hello!\n\nHuman: What is\n\n2 + 2?"
    row = {"chosen": f"{start}\n\nAssistant: 4\n\nof course.", "rejected": f"{start}\n\nAssistant: Human: 5"}
    pair = pair_of(tmp_path, row)
    assert said(pair.prompt) == [("user", "Hi: there"), ("assistant", "Hello!"), ("user", "What is\n\n2 + 2?")]
    assert said(pair.chosen) == [("assistant", "4\n\nof course.")]
    assert said(pair.rejected) == [("assistant", "Human: 5")]


def test_a_transcript_is_an_answer_where_the_row_has_its_question(tmp_path: Path) -> None:
    text = "Human: hi\n\nAssistant: hello"
    pair = pair_of(tmp_path, {"prompt": "Write a dialogue.", "chosen": text, "rejected": "No."})
    assert said(pair.chosen) == [("assistant", text)]


@pytest.mark.parametrize("side", ["Assistant: first", "just words", ""])
def test_pairs_without_any_question_are_refused(tmp_path: Path, side: str) -> None:
    with pytest.raises(RowError) as refused:
        pair_of(tmp_path, {"chosen": side, "rejected": "Human: hi\n\nAssistant: You"}, format="preference")
    assert refused.value.reason in {"missing_column", "no_common_prompt", "not_an_answer", "empty_prompt"}


@pytest.mark.parametrize("more", [{}, {"attention_mask": [1, 1], "length": 2}])
def test_rows_of_token_ids_that_do_not_say_what_is_learned_are_refused_with_the_way_out(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    with pytest.raises(SourceError, match="token ids") as refused:
        pair_of(tmp_path, {"input_ids": [1, 2], **more})
    assert refused.value.hint is not None and "format: tokens" in refused.value.hint


def test_ids_beside_a_text_are_left_alone(tmp_path: Path) -> None:
    document = pair_of(tmp_path, {"input_ids": [1, 2], "text": "words"})
    assert document.parts[0].text == "words"


@pytest.mark.parametrize("settings", [{}, {"format": "alpaca"}])
def test_a_column_that_the_config_names_and_no_row_has_is_named_with_those_there_are(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    row = {"question": "Hi", "reply": "You"}
    columns = {"prompt": "qestion", "response": "reply"}
    with pytest.raises(SourceError) as refused:
        pair_of(tmp_path, row, columns=columns, **settings)
    assert "'qestion'" in refused.value.message and "question, reply" in refused.value.message
    assert "question" in str(refused.value.hint)


def test_what_no_format_reads_is_told_where_it_has_a_value(tmp_path: Path) -> None:
    def unread(row: dict[str, Any], **settings: Any) -> tuple[str, ...]:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        return open_sources([SourceConfig(path=str(tmp_path / "rows.jsonl"), **settings)], seed=0)[0].unread

    answer = {"role": "assistant", "content": "a", "reasoning_content": "t", "name": None, "weight": 1, "spans": []}
    image = {"type": "image", "image": "a.png", "max_pixels": 7, "min_pixels": None}
    user = {"role": "user", "content": [{"type": "text", "text": "q"}, image]}
    assert unread({"id": "1", "messages": [user, answer], "tools": [], "system": "s"}) == (
        "messages[].content[].max_pixels",
    )
    masked = answer | {"loss_mask": 0, "refusal": None}
    assert unread({"messages": [user | {"content": "q"}, masked], "chat_template_kwargs": {"x": 1}, "source": ""}) == (
        "messages[].loss_mask",
        "chat_template_kwargs",
    )
    for video, told in (("a.mp4", ("messages[].content[].fps",)), (["1.png", "2.png"], ())):
        part = {"type": "video", "video": video, "fps": 2}
        assert unread({"messages": [{"role": "user", "content": [part]}, answer]}) == told
    assert unread({"messages": [{"role": "user", "content": "q", "images": ["a.png"]}, answer]}) == (), "it is refused"
    # axolotl's key takes the place of all others, and a column may be read under another name
    trained = {"role": "assistant", "content": "a", "learn": True, "train": True}
    found = unread({"talk": [{"role": "user", "content": "q"}, trained]}, columns={"messages": "talk"},
                   format="messages", tags={"train_tag": "learn"})  # fmt: skip
    assert found == ("talk[].train",)
    call = {"type": "function", "id": "c", "function": {"name": "f", "input": {"x": 1}, "strict": True}, "result": "r"}
    part = {"type": "tool_use", "id": "d", "name": "f", "input": {"x": 1}, "caller": "me"}
    asked = {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "https://x.org/a.png", "detail": "low"}},
        {"type": "image", "image": "a.png", "text": "a boat"},
        {"type": "image", "image": {"bytes": "iVBORw0=", "path": "a.png"}},
    ]}  # fmt: skip
    called = {"role": "assistant", "content": [part], "tool_calls": [call]}
    tools = [{"name": "f", "strict": True, "input_schema": {"properties": {"x": {"type": "integer", "y": 1}}}}]
    assert unread({"messages": [asked, called], "tools": tools, "chosen": "c", "meta": {"a": {"b": 1}}}) == (
        "messages[].content[].image_url.detail",
        "messages[].content[].text",
        "messages[].content[].caller",
        "messages[].tool_calls[].function.strict",
        "messages[].tool_calls[].result",
        "chosen",
        "meta",
    )
    sides = {"chosen": [{"role": "assistant", "content": "a", "score": 1}], "rejected": "b", "score_chosen": 1.0}
    assert unread({"prompt": "q", **sides}) == ("chosen[].score", "score_chosen")
    calling = {"from": "function_call", "value": '{"name": "f", "args": {}, "x": 1}'}
    answered = {"from": "gpt", "value": "[" * 9_000 + "]" * 9_000, "note": "b"}
    talk = [{"from": "human", "value": '{"q": 1}'}, calling, answered]
    told = ("conversations[].value.x", "conversations[].note")
    assert unread({"conversations": talk}) == told
    assert unread({"conversations": json.dumps(talk)}) == told, "in JSON text, too, as CSV files have it"


def test_what_a_run_does_not_read_is_told_but_for_rewards(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": "a", **{f"column{n}": n for n in range(20)}}) + "\n")
    (source,) = open_sources([SourceConfig(path=str(path))], seed=0)
    for objective, is_told in (("sft", True), ("rl", False)):
        model = {"name_or_path": "preset:tiny-qwen3"}
        told = {"model": model, "objective": objective, "data": {"train": [{"path": str(path)}]}}
        config = RunConfig.model_validate({**told, "output": {"dir": str(tmp_path)}})
        remarks = info_of(source, config).remarks
        assert any("column11 and 8 more" in remark for remark in remarks) == is_told == bool(remarks)


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (("type", "query", "original_question", "response"), "{prompt: query, response: response}"),
        (("article", "highlights", "id"), "{prompt: article, response: highlights}"),
        (("answer", "b"), "{prompt: b, response: answer}"),
        (("content",), "{text: content}"),
    ],
)
def test_the_way_out_names_columns_that_look_like_questions_and_answers(
    tmp_path: Path, names: tuple[str, ...], meant: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [dict.fromkeys(names, "x")])
    with pytest.raises(SourceError) as caught:
        source_of(path)
    assert meant in str(caught.value.hint)
