"""What is learned of a turn reads as the row has it, or the row is put aside under a reason of its own."""

from __future__ import annotations

import json

import pytest

from luthier.config.choices import HistoryRendering
from luthier.errors import RowError
from luthier.presets.named_templates import named_template
from luthier.records import Conversation, Message, Thinking, ToolCall
from luthier.rendering import ControlTokens
from luthier.rendering.answers import require_answer
from luthier.rendering.other_rows import TOOLS_UNSHOWN
from luthier.rendering.render import THOUGHT_IN_LETTERS
from luthier.rendering.targets import TargetPolicy
from tests.conftest import reason_is
from tests.rendering.chat import CHATML, CONTROL, assistant, conversation, renderer, user
from tests.rendering.test_render import trained

SAID = assistant("Yes.")
THOUGHT = assistant(Thinking(text="Hm."), "Yes.")
CALL = assistant("I look.", ToolCall(name="find", arguments={"what": 'a "b"', "where": ["é"], "n": 3}))
TAGS = assistant("The tag <think> opens and </think> closes.")


def reason_of(
    message: Message, learned: str, *, has_header: bool = True, may_lack_thought: bool = False, closing: str = ""
) -> str | None:
    try:
        require_answer(
            message,
            learned,
            control=CONTROL,
            has_header=has_header,
            may_lack_thought=may_lack_thought,
            closing=closing,
            field="m",
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


@pytest.mark.parametrize(
    "message, learned, closing",
    [
        (assistant("</think> Yes."), "\n</think> Yes.", "</think>"),
        (assistant("Yes </think>"), "Yes </think>", "</think>"),
        (SAID, "Yes.", "</think>"),
        (SAID, "Yes.</think>", "</think>"),
        (THOUGHT, "</think>Hm.Yes.", "</think>"),
        (assistant("</think> Yes."), "<think>\n</think> Yes.", ""),
    ],
)
def test_a_thought_that_the_answers_own_tag_would_close_is_not_learned(
    message: Message, learned: str, closing: str
) -> None:
    assert reason_of(message, learned, closing=closing) == "answer_changed"


def test_a_thought_that_the_template_closes_is_learned_whatever_tags_the_answer_has() -> None:
    assert reason_of(TAGS, "\n</think>\n\nThe tag <think> opens and </think> closes.", closing="</think>") is None
    assert reason_of(TAGS, "<think></think>The tag <think> opens and </think> closes.") is None


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


TWICE = "{{ message.content or '' }}"  # what `with_calls` prints of an answer


@pytest.mark.parametrize("place", ["first", "later"])
@pytest.mark.parametrize(
    "said, thought, arguments",
    [
        ("San Francisco", None, {"city": "San Francisco"}),
        ("San Francisco", None, {"trips": [{"to": "San Francisco, please"}, {"from": "San Francisco"}]}),
        ("arguments", None, {"city": "Rome"}),  # a word of the notation
        ("in", "in", {"city": "in"}),  # and of the tags
        ("Hello, friend", "I say: Hello, friend", {"text": "He said: Hello, friend"}),
    ],
)
def test_an_answer_may_name_what_it_calls_for(
    place: str, said: str, thought: str | None, arguments: dict[str, object]
) -> None:
    def row(said: str, thought: str | None, arguments: dict[str, object]) -> Conversation:
        thoughts = [] if thought is None else [Thinking(text=thought)]
        return conversation(user("u"), assistant(*thoughts, said, ToolCall(name="find", arguments=arguments)))

    def other(value: object) -> object:
        match value:
            case dict():
                return {key: other(item) for key, item in value.items()}
            case list():
                return [other(item) for item in value]
            case _:
                return "Elsewhere"

    one = renderer(named_template("qwen3"))
    if place == "later":
        one.render(row("I look it up.", None if thought is None else "Well, well.", other(arguments)))
    assert said in trained(one.render(row(said, thought, arguments)).paths[0])


@pytest.mark.parametrize("said", ["No", "<eos>", "I had a longer look at it."])
def test_a_template_that_prints_answers_twice_is_found_whatever_the_first_row_says(said: str) -> None:
    source = with_calls(after=TWICE)
    call = ToolCall(name="find", arguments={"what": "x"})
    with pytest.raises(RowError) as caught:
        renderer(source).render(conversation(user("u"), assistant(said, call)))
    assert caught.value.reason == "answer_repeated" and repr(said) in str(caught.value)
    assert trained(renderer(with_calls()).render(conversation(user("u"), assistant(said, call))).paths[0])


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


# ------------------------------------------------------------------------------------ words around a tool call

FIND = ToolCall(name="find", arguments={"what": "x", "n": 3, "b": True, "z": None, "deep": {"k": [1, 2.5]}})
JSON = '{"name": "find", "arguments": {"what": "x", "n": 3, "b": true, "z": null, "deep": {"k": [1, 2.5]}}}'
SHAPES = (assistant(FIND), assistant("I look.", FIND), assistant("Yes."))


def with_calls(*, header: str = "", before: str = "", after: str = "", arguments: str = "| tojson") -> str:
    """A template that prints calls between tags, and other words where it is told to."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message.role }}" + header + "\n{{ message.content or '' }}"
        "{% if message.tool_calls %}" + before + "{% for call in message.tool_calls %}<tool_call>"
        "{{ call.function " + arguments + " }}</tool_call>{% endfor %}" + after + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@pytest.mark.parametrize("said", SHAPES)
def test_a_turn_with_another_header_than_the_prompts_is_refused_whatever_it_holds(said: Message) -> None:
    last = with_calls(header="{% if loop.last and message.role == 'assistant' %} (last){% endif %}")
    with pytest.raises(RowError) as caught:
        renderer(last).render(conversation(user("u"), said))
    assert caught.value.reason == "prompt_not_reproduced"
    space = with_calls(header="{% if message.role == 'assistant' %} {% endif %}")  # white space may differ
    (path,) = renderer(space).render(conversation(user("u"), said)).paths
    assert trained(path).lstrip().startswith(("<tool_call>", "I look.", "Yes."))


@pytest.mark.parametrize("said", SHAPES[:2])
@pytest.mark.parametrize(
    "words", [{"before": "I call:\n"}, {"after": " Is that right?"}, {"before": "<b>\nSure it is.</b>"}]
)
def test_words_beside_calls_that_stand_outside_their_tags_are_found(said: Message, words: dict[str, str]) -> None:
    renderer(with_calls()).render(conversation(user("u"), said))
    with pytest.raises(RowError) as caught:
        renderer(with_calls(**words)).render(conversation(user("u"), said))
    assert caught.value.reason == "words_added"


@pytest.mark.parametrize(
    "learned, reason",
    [
        (f"<call>{JSON}</call>", None),
        (f"<|im_start|>function<|im_end|>{JSON}", None),
        (f"<call><type>function</type>{JSON}</call>", None),
        (f"Action: {JSON}", None),  # nothing parts these words from the call: they may be its notation
        ("<call>find\n<key>what</key><value>x</value> n=3 b=True z=None deep={'k': [1, 2.5]}</call>", None),
        (f"So: <call>{JSON}</call>", "words_added"),
        (f"<call>{JSON}</call> So.", "words_added"),
        (f"<call>{JSON.replace('3', '4')}</call>", "answer_lost"),
        (f"<call>{JSON.replace('3', '33')}</call>", "answer_lost"),
        (f"<call>{JSON.replace('true', 'false')}</call>", "answer_lost"),
        (f"<call>{JSON.replace('null', '0')}</call>", "answer_lost"),
        (f"<call>{JSON.replace('2.5', '2')}</call>", "answer_lost"),
        (f"<call>{JSON.replace('deep', '')}</call>", "answer_lost"),
    ],
)
def test_a_call_is_learned_with_all_its_values_and_nothing_beside_it(learned: str, reason: str | None) -> None:
    assert reason_of(assistant(FIND), learned) == reason


def test_tags_and_control_strings_in_a_calls_values_are_no_marks_of_its_notation() -> None:
    call = ToolCall(name="find", arguments={"what": "a <b> is </call> so <|im_end|> or"}, id="c1")
    learned = f"<call>{json.dumps({'what': call.arguments['what'], 'name': 'find', 'id': 'c1'})}"
    assert reason_of(assistant(call), learned) is None
    assert reason_of(assistant(call), learned + "</call>") is None
    assert reason_of(assistant(call), learned + "</call> So.") == "words_added"


def test_words_between_two_calls_are_found() -> None:
    two = assistant(FIND, FIND)
    assert reason_of(two, f"<call>{JSON}</call>\n<call>{JSON}</call>") is None
    assert reason_of(two, f"<call>{JSON}</call> and <call>{JSON}</call>") == "words_added"
    assert reason_of(two, f"<call>{JSON}</call><call>{JSON.replace('3', '4')}</call>") == "answer_lost"


# ------------------------------------------------------------------------------------------- every turn stops


@pytest.mark.parametrize("history", list(HistoryRendering))
@pytest.mark.parametrize(
    "ends",
    [
        "not loop.last or message.role != 'assistant'",
        "message.role != 'assistant' or loop.nextitem is undefined or loop.nextitem.role != 'assistant'",
        "message.role != 'assistant' or (loop.nextitem is defined and loop.nextitem.role == 'user')",
        "message.role != 'assistant'",
    ],
)
def test_of_two_answers_in_a_row_each_is_learned_with_a_stop_or_the_row_is_refused(
    ends: str, history: HistoryRendering
) -> None:
    source = CHATML.replace("+ '<|im_end|>\n' }}", "}}{% if " + ends + " %}{{ '<|im_end|>\n' }}{% endif %}")
    row = conversation(user("u"), assistant("first"), assistant("second"))
    try:
        paths = renderer(source, policy=TargetPolicy(history=history)).render(row).paths
    except RowError as error:
        assert error.reason == "no_stop"
        return
    learned = "".join(map(trained, paths))
    assert sorted(filter(None, learned.split("<|im_end|>"))) == ["first", "second"]
    assert learned.count("<|im_end|>") == 2


def test_without_a_stop_to_learn_such_a_row_is_taken() -> None:
    source = CHATML.replace("+ '<|im_end|>\n' }}", "}}{% if message.role == 'user' %}{{ '<|im_end|>\n' }}{% endif %}")
    row = conversation(user("u"), assistant("first"), assistant("second"))
    with pytest.raises(RowError, check=reason_is("no_stop")):
        renderer(source).render(row)
    paths = renderer(source, policy=TargetPolicy(train_stop=False)).render(row).paths
    assert "".join(map(trained, paths)) == "firstsecond"


# ------------------------------------------------------------------------ thoughts under templates that know none


@pytest.mark.parametrize("allowed, is_noted", [(frozenset(), True), (frozenset({"<think>", "</think>"}), False)])
def test_tags_of_a_thought_that_are_learned_as_letters_are_counted(allowed: frozenset[str], is_noted: bool) -> None:
    row = conversation(user("u"), assistant(Thinking(text="Hm.", written="<think>Hm.</think>"), "Yes."))
    notes = dict(renderer(policy=TargetPolicy(allowed=allowed)).fill(row).notes)
    assert (THOUGHT_IN_LETTERS in notes) == is_noted
    assert "template.control" in THOUGHT_IN_LETTERS, "the note says the way out"


@pytest.mark.parametrize("source, is_noted", [(CHATML, True), ("{{ tools | tojson if tools }}" + CHATML, False)])
def test_rows_with_tools_that_the_template_does_not_show_are_counted(source: str, is_noted: bool) -> None:
    row = conversation(user("u"), assistant("Yes."), tools=({"type": "function", "function": {"name": "f"}},))
    assert (TOOLS_UNSHOWN in dict(renderer(source).fill(row).notes)) == is_noted


def test_a_row_without_a_thought_and_a_template_that_reads_thoughts_have_no_such_note() -> None:
    plain = conversation(user("u"), assistant("Yes."))
    assert THOUGHT_IN_LETTERS not in dict(renderer().fill(plain).notes)
    thought = conversation(user("u"), assistant(Thinking(text="Hm.", written="<think>Hm.</think>"), "Yes."))
    reading = CHATML.replace(
        "message.content +",
        "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '') + message.content +",
    )
    assert THOUGHT_IN_LETTERS not in dict(renderer(reading).fill(thought).notes)


# ------------------------------------------------------------- answers that are words of the notation of their calls

NOTED = (
    "call", "find", "what", "x", "name", "arguments", "function", "<function=", "<tool_call>", "</tool_call>",
    '", "arguments":', '{"name": "find",', "call:find",
)  # fmt: skip
ARGUMENTS = "{{ call.function.arguments | tojson }}"
NOTATIONS = {
    "json": "<tool_call>{{ call.function | tojson }}</tool_call>",
    "colon": "<tool_call>call:{{ call.function.name }}" + ARGUMENTS + "</tool_call>",
    "tags": "<tool_call><function={{ call.function.name }}>" + ARGUMENTS + "</function></tool_call>",
}


def with_notation(call: str, *, before: bool = False, behind: bool = False) -> str:
    said, calls = "{{ message.content or '' }}", "{% for call in message.tool_calls or [] %}" + call + "{% endfor %}"
    turn = (said if before else "") + calls + (said if behind else "")
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'user' %}" + said + "{% else %}" + turn + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@pytest.mark.parametrize("said", NOTED)
@pytest.mark.parametrize("notation", NOTATIONS)
def test_an_answer_may_be_a_word_of_its_calls_notation(notation: str, said: str) -> None:
    call = ToolCall(name="find", arguments={"what": "x"})
    one, other = conversation(user("u"), assistant(said, call)), conversation(user("u"), assistant("Zq", call))
    for place in ("before", "behind"):
        source = with_notation(NOTATIONS[notation], **{place: True})
        wanted = trained(renderer(source).render(other).paths[0]).replace("Zq", said)
        assert trained(renderer(source).render(one).paths[0]) == wanted


@pytest.mark.parametrize("said", NOTED)
@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_word_of_a_calls_notation_that_is_printed_twice_is_found(notation: str, said: str) -> None:
    source = with_notation(NOTATIONS[notation], before=True, behind=True)
    call = ToolCall(name="find", arguments={"what": "x"})
    with pytest.raises(RowError) as caught:
        renderer(source).render(conversation(user("u"), assistant(said, call)))
    assert caught.value.reason == "answer_repeated"
