"""A template that writes an empty thought before the model answers, and only there: what is learned comes behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl

from luthier.errors import RowError
from luthier.records import Conversation, Piece, Thinking
from luthier.rendering import ControlTokens
from luthier.rendering.openings import _is_edge, ending_of
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy
from luthier.rendering.template import ChatTemplate
from tests.rendering.chat import CHATML, assistant, conversation, renderer, user
from tests.rendering.test_render import trained, whole

# The template of the smaller Gemma 4 models as TRL has it, with the line that the larger ones have besides.
SMALL = (Path(trl.__file__).parent / "chat_templates" / "gemma4_v5.jinja").read_text(encoding="utf-8")
LARGE = SMALL + (
    "{%- if add_generation_prompt and not enable_thinking"
    " and ns.prev_message_type not in ['tool_response', 'tool_call'] -%}"
    "{{- '<|channel>thought\n<channel|>' -}}{%- endif -%}"
)
TOKENS = ("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>")
GEMMA = ControlTokens(tokens=frozenset(TOKENS), special=frozenset(TOKENS), stops=frozenset({"<turn|>"}))
TWO_TURNS = conversation(user("hi"), assistant("hello"), user("more"), assistant("bye"))
THOUGHT = conversation(user("hi"), assistant(Thinking(text="Greet."), "hello"))
EMPTY = "<|turn>model\n<|channel>thought\n<channel|>"


def paths_of(source: str, row: Conversation, **kwargs: Any) -> tuple[ChatTemplate, list[tuple[Piece, ...]]]:
    template = ChatTemplate(source, special_tokens={"bos_token": "<bos>"}, kwargs=kwargs)
    rendered = Renderer(template, GEMMA, TargetPolicy()).render(row)
    return template, [path for path in rendered.paths if trained(path)]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_each_turn_is_the_prompt_of_inference_and_the_answer(kwargs: dict[str, Any]) -> None:
    template, paths = paths_of(LARGE, TWO_TURNS, **kwargs)
    found = {trained(path): whole(path) for path in paths}
    assert set(found) == {"hello<turn|>", "bye<turn|>"}
    for number, answer in ((1, "hello<turn|>"), (3, "bye<turn|>")):
        prompt = template.render(TWO_TURNS.messages[:number], generation_prompt=True)
        assert prompt.endswith(EMPTY)
        assert found[answer].startswith(prompt + answer)
    assert found["bye<turn|>"].count("<|channel>") == 1  # the first answer stands in its history as rendered


def test_rows_of_one_shape_are_replayed_with_the_thought() -> None:
    """The first replay is compared with what the template prints."""
    template = ChatTemplate(LARGE, special_tokens={"bos_token": "<bos>"})
    renderer = Renderer(template, GEMMA, TargetPolicy())
    for number in range(20):
        row = conversation(user(f"hi {number}"), assistant(f"hello {number}"))
        (path,) = renderer.render(row).paths
        prompt = template.render(row.messages[:1], generation_prompt=True)
        assert whole(path).startswith(f"{prompt}hello {number}<turn|>") and prompt.endswith(EMPTY)


def test_the_thought_is_context_and_never_learned() -> None:
    _, paths = paths_of(LARGE, TWO_TURNS)
    for path in paths:
        assert "channel" in whole(path) and "channel" not in trained(path)


def test_a_thought_of_the_rows_own_is_learned_as_a_model_that_thinks_has_it() -> None:
    template, [path] = paths_of(LARGE, THOUGHT)
    assert trained(path) == "<|channel>thought\nGreet.\n<channel|>hello<turn|>"
    assert whole(path).startswith(template.render(THOUGHT.messages[:1], generation_prompt=True, enable_thinking=True))


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_a_template_that_writes_no_thought_is_left_as_it_is(kwargs: dict[str, Any]) -> None:
    template, [path] = paths_of(SMALL, TWO_TURNS, **kwargs)
    assert whole(path) == template.render(TWO_TURNS.messages)


def test_where_thinking_is_asked_for_nothing_is_written_before_the_answer() -> None:
    template, [path] = paths_of(LARGE, TWO_TURNS, enable_thinking=True)
    assert whole(path) == template.render(TWO_TURNS.messages) and EMPTY not in whole(path)


def test_a_thought_that_is_left_open_is_closed_by_the_model() -> None:
    """DeepSeek-R1's prompt: what the model must emit begins with the end of its thought."""
    opens = SMALL + "{%- if add_generation_prompt -%}{{- '<|channel>thought\n' -}}{%- endif -%}"
    template, paths = paths_of(opens, TWO_TURNS)
    found = {trained(path): whole(path) for path in paths}
    assert set(found) == {"\n<channel|>hello<turn|>", "\n<channel|>bye<turn|>"}
    for number, answer in ((1, "\n<channel|>hello<turn|>"), (3, "\n<channel|>bye<turn|>")):
        prompt = template.render(TWO_TURNS.messages[:number], generation_prompt=True)
        assert found[answer].startswith(prompt + answer)


def test_an_answer_that_the_template_prints_without_a_header_is_learned_behind_the_prompt_of_inference() -> None:
    row = conversation(user("hi"), assistant("hello"), assistant("again"))
    template, [path] = paths_of(SMALL, row)
    prompt = template.render(row.messages[:2], generation_prompt=True)
    assert prompt.endswith("hello<turn|>\n<|turn>model\n")
    assert whole(path).startswith(prompt + "again<turn|>") and trained(path) == "hello<turn|>again<turn|>"


@pytest.mark.parametrize(
    "prompt, opening, closing, is_open",
    [
        ("<m><think></think>", "<think>", "</think>", False),
        ("<m><think>\n\n</think>\n\n", "<think>", "</think>", False),
        ("[M][THINK][/THINK]", "[THINK]", "[/THINK]", False),
        ("<m><|channel>thought\n<channel|>", "<|channel>thought", "<channel|>", False),
        ("<m><|START_THOUGHT|>", "<|START_THOUGHT|>", "<|END_THOUGHT|>", True),
        ("<m><think>\n", "<think>", "</think>", True),
        ("<m></think>", "<think>", "</think>", False),
        ("<m><scratch>", "", "", False),  # nobody knows of </scratch>
        ("<m><a></b>", "", "", False),  # no pair
        ("[INST] so [/INST]", "", "", False),  # closes a question
        ("<assistant>", "", "", False),  # begins a turn
    ],
)
def test_a_prompt_tells_by_its_tags_what_it_opens_and_closes(
    prompt: str, opening: str, closing: str, is_open: bool
) -> None:
    ending = ending_of(prompt, "</assistant>")
    assert (ending.opening, ending.closing, ending.is_open) == (opening, closing, is_open)
    assert bool(closing) == (ending.header_end < len(prompt))


@pytest.mark.parametrize("name", ["", "thought", "assistant_2"])
@pytest.mark.parametrize("space", ["", "\n", "\n\n", " \t\n\x1c"])
@pytest.mark.parametrize(
    "tags", ["<think>", "<think>{}</think>", "<|channel>{}<channel|>", "[THINK]", "◁think▷{}◁/think▷"]
)
def test_how_a_prompt_ends_does_not_depend_on_what_stands_far_before(tags: str, name: str, space: str) -> None:
    tail = "<m>" + (tags.format(name + space) if "{}" in tags else tags + name + space)
    known = "</think>\0[/THINK]"
    alone = ending_of(tail, known)
    for before in ("word " * 200, "word " * 2000, "<think>a</think>" * 30, "[THINK]" * 40 + "x" * 300, "<" + "y" * 39):
        longer = ending_of(before + tail, known)
        assert replace(longer, header_end=longer.header_end - len(before)) == alone


def test_a_text_is_cut_neither_in_a_tag_nor_in_a_word() -> None:
    text = "<a>of it <b>"
    assert [place for place in range(1, len(text)) if _is_edge(text, place)] == [3, 5, 6, 8, 9]


@pytest.mark.parametrize("prompt", ["<think></think>", "<think>\n"])
@pytest.mark.parametrize("parts", [("Hm.</think>Yes.",), ("Hm.</thi", "nk>Yes."), ("say <", "think", ">")])
def test_an_answer_with_a_tag_of_the_prompts_thought_is_refused_in_one_part_and_in_several(
    prompt: str, parts: tuple[str, ...]
) -> None:
    supplying = CHATML.replace("'<|im_start|>assistant\n' }}", f"'<|im_start|>assistant\n{prompt}' }}}}")
    found = renderer(supplying)
    for text in ("Yes.", "No."):  # the blueprint of others of this shape is not taken for it
        found.render(conversation(user("u"), assistant(*([text] * len(parts)))))
    with pytest.raises(RowError) as caught:
        found.render(conversation(user("u"), assistant(*parts)))
    assert caught.value.reason == "prompt_not_reproduced"
