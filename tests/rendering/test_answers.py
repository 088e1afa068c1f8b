"""What is learned of a turn reads as the row has it, or the row is put aside under a reason of its own."""

from __future__ import annotations

import pytest

from luthier.errors import RowError
from luthier.presets.named_templates import named_template
from luthier.records import Message, Thinking, ToolCall
from luthier.rendering.answers import require_answer
from luthier.rendering.control import ControlTokens
from tests.rendering.chat import CHATML, CONTROL, assistant, conversation, renderer, user
from tests.rendering.test_render import trained

SAID = assistant("Yes.")
THOUGHT = assistant(Thinking(text="Hm."), "Yes.")
CALL = assistant("I look.", ToolCall(name="find", arguments={"what": 'a "b"', "where": ["é"], "n": 3}))
TAGS = assistant("The tag <think> opens and </think> closes.")


def reason_of(message: Message, learned: str, *, has_header: bool = True, may_lack_thought: bool = False) -> str | None:
    try:
        require_answer(
            message, learned, control=CONTROL, has_header=has_header, may_lack_thought=may_lack_thought, field="m"
        )
    except RowError as error:
        return error.reason
    return None


@pytest.mark.parametrize(
    "message, learned",
    [
        (SAID, "Yes."),
        (SAID, "\n\nYes.\n"),
        (SAID, "</think>\n\nYes."),
        (SAID, "[ANSWER]Yes.[/ANSWER]"),
        (SAID, '"Yes."'),
        (SAID, "<|im_start|>final<|im_end|>Yes."),  # a channel
        (assistant(" a\n"), "a"),
        (assistant("final"), "<|im_start|>final<|im_end|>final"),
        (assistant("e"), "<|im_start|>message<|im_end|>e"),
        (THOUGHT, "<think>\nHm.\n</think>\n\nYes."),
        (THOUGHT, "Hm.</think>Yes."),
        (assistant(Thinking(text="Yes, I think."), "Yes"), "<think>Yes, I think.</think>Yes"),
        (TAGS, "The tag <think> opens and </think> closes."),
        (assistant("<think>a</think>\n\nb"), "<think>\na\n</think>\nb"),  # laid out anew
        (
            CALL,
            'I look.<call>{"name": "find", "arguments": {"what": "a \\"b\\"", "where": ["\\u00e9"], "n": 3}}</call>',
        ),
        (CALL, "I look.\nAction: find\nInput: {'what': 'a \"b\"', 'where': ['é'], 'n': 3}"),
    ],
)
def test_tags_and_white_space_around_the_texts_are_fine(message: Message, learned: str) -> None:
    assert reason_of(message, learned) is None


@pytest.mark.parametrize(
    "message, learned, reason",
    [
        (SAID, "Ye", "answer_lost"),
        (SAID, "", "answer_lost"),
        (SAID, "yes.", "answer_changed"),
        (SAID, "Yes.Yes.", "answer_repeated"),
        (SAID, "Yes.\n</a>\nYes.", "answer_repeated"),
        (SAID, "Sure: Yes.", "words_added"),
        (SAID, "Yes. Anything else?", "words_added"),
        (SAID, "<a>Sure</a>Yes.", "words_added"),
        (assistant("a b  c"), "a b c", "answer_changed"),
        (THOUGHT, "<think>\nH\n</think>\n\nYes.", "answer_lost"),
        (THOUGHT, "Yes.", "answer_lost"),
        (THOUGHT, "Yes.<think>Hm.</think>", "answer_changed"),
        (TAGS, " closes.", "answer_lost"),
        (TAGS, "<think>\n opens and\n</think>\n\n closes.", "answer_lost"),
        (assistant("so </think> it is"), "<think>\nso \n</think>\n\n it is", "answer_lost"),
        (CALL, 'I look.{"name": "fin"}', "answer_lost"),
        (CALL, 'I look.{"name": "find", "what": "a"}', "answer_lost"),
    ],
)
def test_text_that_is_lost_changed_repeated_or_added_is_named(message: Message, learned: str, reason: str) -> None:
    found = reason_of(message, learned)
    assert found == reason or (found, reason) == ("answer_changed", "answer_lost")


def test_a_header_that_no_prompt_writes_is_a_word_of_the_template() -> None:
    assert reason_of(SAID, "<|im_start|>assistant\nYes.") is None
    assert reason_of(SAID, "<|im_start|>assistant\nYes.", has_header=False) == "words_added"


def test_the_thought_of_an_earlier_turn_may_be_left_out_where_one_rendering_does() -> None:
    assert reason_of(THOUGHT, "Yes.", may_lack_thought=True) is None


@pytest.mark.parametrize(
    "content, reason",
    [
        ("message.content[:8]", "answer_lost"),
        ("message.content | lower", "answer_changed"),
        ("message.content + message.content", "answer_repeated"),
        ("'Sure: ' + message.content", "words_added"),
        ("message.content.split('</think>')[-1]", "answer_lost"),
    ],
)
def test_each_row_of_a_shape_is_looked_at_where_the_template_cuts(content: str, reason: str) -> None:
    spoiling = CHATML.replace(
        "message.content +", f"(({content}) if message.role == 'assistant' else message.content) +"
    )
    one = renderer(spoiling)
    spoiled = conversation(user("u"), assistant("A Long </think> answer, with LETTERS."))
    for row in (spoiled, spoiled):
        with pytest.raises(RowError) as caught:
            one.render(row)
        assert caught.value.reason == reason
    whole = {"message.content[:8]": "short", "message.content | lower": "low", content: "plain"}[content]
    if reason in ("answer_lost", "answer_changed"):
        (path,) = one.render(conversation(user("u"), assistant(whole))).paths
        assert trained(path) == whole + "<|im_end|>"
        with pytest.raises(RowError):
            one.render(spoiled)


def test_a_refusal_names_a_template_that_would_take_the_row() -> None:
    row = conversation(user("u"), assistant(ToolCall(name="find", arguments={"what": "a"})))
    with pytest.raises(RowError, match="a template that takes this row") as caught:
        renderer().render(row)
    assert caught.value.reason == "dropped_by_template"
    name = str(caught.value).rsplit("template.chat_template: ", 1)[1]
    source = named_template(name)
    assert source is not None
    assert "find" in trained(renderer(source).render(row).paths[0])


def test_a_template_whose_tokens_the_tokenizer_lacks_is_not_named() -> None:
    row = conversation(user("u"), assistant(ToolCall(name="find", arguments={"what": "a"})))
    lacking = ControlTokens(tokens=frozenset({"<|im_end|>"}), stops=frozenset({"<|im_end|>"}))
    with pytest.raises(RowError) as caught:
        renderer(control=lacking).render(row)
    assert "template.chat_template" not in str(caught.value)
