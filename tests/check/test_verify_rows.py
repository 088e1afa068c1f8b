"""What rows, data sets and runs may ask for is verified as they ask for it, and control strings are told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verify_cases import (
    AT,
    HOSTILE,
    PLAIN,
    PRESET,
    ROWS,
    SEAM,
    THINKING,
    TOOLS,
    WEATHER,
    chat,
    encoder,
    message,
    retargeted,
    verify_row,
)

from luthier.check.verify import Check, Method, RowVerdict
from luthier.check.verify.completions import CompletionReading, Said, neutralise
from luthier.check.verify.plain_template import ReferenceFiles
from luthier.check.verify.policy import TurnPolicy
from luthier.check.verify.reference_tokenizer import ReferenceTokenizer, first_difference
from luthier.check.verify.row import RowVerifier
from luthier.check.verify.weights import token_weights
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.records import (
    Branch,
    Conversation,
    Document,
    Preference,
    Row,
    Sample,
    TargetRule,
    Text,
    Thinking,
    ToolCall,
)

SWITCHES: list[dict[str, Any]] = [
    {},
    {"train_on": "last_assistant"},
    {"train_on": "completion"},
    {"train_on": "all"},
    {"train_stop": False},
    {"history": "one_rendering"},
    {"default_system": "Be kind."},
    {"kwargs": {"enable_thinking": True}},
    {"targets": [{"part": "thinking", "train": False}]},
    {"targets": [{"part": "tool_call", "weight": 2}]},
    {"targets": [{"part": "tool_call", "train": False}]},
    {"targets": [{"role": "user", "train": True}]},
    {"targets": [{"role": "assistant", "turn": "first", "train": False}]},
    {"targets": [{"pattern": "o", "train": False}]},
    {"targets": [{"pattern": "you|ou", "weight": 0.5}]},
    {"control": ["<|im_end|>"]},
    {"targets": [{"role": "assistant", "weight": 0.25}]},
]


def verdict(row: Row, under_test: Encoder) -> RowVerdict:
    return RowVerifier(under_test).verify(row, under_test.encode(row))


@pytest.mark.parametrize("options", SWITCHES, ids=str)
@pytest.mark.parametrize("name", sorted(ROWS))
def test_whatever_a_run_asks_for_is_verified_as_it_asks(name: str, options: dict[str, Any]) -> None:
    under_test = encoder(**options)
    try:
        found = verdict(ROWS[name], under_test)
    except RowError as error:  # nothing is left to learn under this policy
        assert error.reason == "no_target", error
        return
    assert [str(violation) for violation in found.violations] == []


@pytest.mark.parametrize("options", [switch for switch in SWITCHES if switch], ids=str)
def test_a_sample_of_another_policy_is_found(options: dict[str, Any]) -> None:
    rows = [row for row in ROWS.values() if isinstance(row, Conversation)]
    plain, other = encoder(), encoder(**options)
    differ = [row for row in rows if _trains(row, other) and _differ(row, plain, other)]
    if not differ:  # it says what the template does anyway
        assert options == {"kwargs": {"enable_thinking": True}}
    for row in differ:
        assert RowVerifier(other).verify(row, plain.encode(row)).violations


WORDS = ("in", "\nin", " k ", "name", "arguments", "{", "\n\n", "two")  # such as templates and calls have of their own


@pytest.mark.parametrize("part", ["thinking", "answer", "tool_call"])
def test_whose_a_word_is_is_told_where_the_template_has_it_too(part: str) -> None:
    policies = [{"train": False}, {"weight": 2}, {"train": True}]
    encoders = [
        encoder(train_on="none" if rule.get("train") else "assistant", targets=[{"part": part, **rule}])
        for rule in policies
    ]
    count = 0
    for one, two in zip(WORDS * 2, WORDS[1:] + WORDS[:1] + WORDS[3:] + WORDS[:3], strict=True):
        call = ToolCall(name=one.strip() or "x", arguments={two: one, "city": two, "n": [1, 2.5, True, None]})
        for row in (
            chat(message("user", "q"), message("assistant", Thinking(text=one), two)),
            chat(
                message("user", "q"),
                message("assistant", two, call),
                message("tool", "1"),
                message("assistant", one),
                tools=(WEATHER,),
            ),
        ):
            for under_test in encoders:
                try:
                    sample = under_test.encode(row)
                except RowError as error:
                    assert error.reason in ("no_target", "answer_repeated")
                    continue
                found = RowVerifier(under_test).verify(row, sample)
                assert [str(violation) for violation in found.violations] == [], (one, two)
                count += 1
    assert count > 60


@pytest.mark.parametrize("text", ["San Francisco", 'He said: "Hello, my good friend"\nand left.', "Größe und Gewicht"])
def test_an_answer_may_name_what_it_calls_for_and_may_not_be_printed_twice(text: str) -> None:
    call = ToolCall(name="weather", arguments={"city": text, "days": [f"In {text}!", {"of": 1}]})
    row = chat(
        message("user", "q"), message("assistant", text, call), message("tool", "1"), message("assistant", "ok"),
        tools=(WEATHER,),
    )  # fmt: skip
    plain = encoder()
    sample = plain.encode(row)
    assert RowVerifier(plain).verify(row, sample).violations == ()
    said = Said.of(row.messages[1].parts, str)
    for times, faults in ((1, 0), (2, 1)):
        completion = text * times + "<call>" + json.dumps(call.arguments, ensure_ascii=False) + "</call>"
        found = CompletionReading(header=lambda: "<m>", prompt="<m>", completion=completion, said=said).faults()
        assert [check for check, _ in found] == [Check.ANSWER_DECODES] * faults


@pytest.mark.parametrize("text", ["<think>", "</think>", "<think>a</think>", 'not "<think>" but\n<thought>'])
def test_a_calls_arguments_may_hold_tags_of_thoughts(text: str) -> None:
    calls = [ToolCall(name="weather", arguments={"city": text, "days": [text, {text: 1}]})] * 2
    row = chat(
        message("user", "q"), message("assistant", *calls), message("tool", "1"), message("assistant", "ok"),
        tools=(WEATHER,),
    )  # fmt: skip
    for under_test in (encoder(), encoder(chat_template="hermes")):
        assert RowVerifier(under_test).verify(row, under_test.encode(row)).violations == ()
    said = Said.of((Thinking(text="so"), *calls), str)
    printed = "".join(f"<call>{json.dumps(call.arguments)}</call>" for call in calls)
    for thought, faults in (("<think>so</think>", 0), ("<think>so", 1), ("<think>so</think></think>", 1), ("so", 0)):
        found = CompletionReading(header=str, prompt="<m>", completion=thought + printed, said=said).faults()
        assert [check for check, _ in found] == [Check.ANSWER_DECODES] * faults, thought


# Qwen3's template reads tags of thoughts in an answer's text, and only while no other question follows.
_QUESTION, _TAGS = message("user", "q"), "<think>\nx\n</think>\n\n"
READ_BY_TEMPLATE = {
    "where it is the last": (
        message("assistant", Text(text="<think> </think>   Yes", weight=0.5)), message("user", "r"),
        message("assistant", "z"),
    ),
    "in a text that is not learned": (message("assistant", Text(text=_TAGS, train=False)),),
    "in a text, and not in a call": (
        message("assistant", Text(text=f"{_TAGS}so"), ToolCall(name="weather", arguments={"city": "<think>"})),
        message("tool", "1"), message("assistant", "z"),
    ),
    "white space of another weight": (message("assistant", Text(text="\n \n", weight=0.5)),),
    "a letter that has two forms": (
        message("assistant", ToolCall(name="weather", arguments={"city": ['"</think>" e\u0301', {"e\u0301": 1}]})),
        message("tool", "1"), message("assistant", "z"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_real", [False, True], ids=["tiny", "qwen3"])
@pytest.mark.parametrize("case", READ_BY_TEMPLATE)
def test_tags_that_a_template_reads_in_texts_raise_no_alarm(
    case: str, is_real: bool, request: pytest.FixtureRequest
) -> None:
    name = str(request.getfixturevalue("shared") / "tokenizers/qwen3") if is_real else PRESET
    under_test = encoder(name, chat_template="qwen3")
    row = chat(_QUESTION, *READ_BY_TEMPLATE[case], tools=(WEATHER,))
    sample = under_test.encode(row)
    assert [str(found) for found in RowVerifier(under_test).verify(row, sample).violations] == []
    for place in np.flatnonzero(sample.target):
        if 0 < (index := int(place)) < len(sample.input_ids) - 1 and sample.target[index - 1] != sample.target[index]:
            other = sample.input_ids.copy()
            other[index] = other[index] + 1
            changed = replace(sample, input_ids=other)
            assert RowVerifier(under_test).verify(row, changed).violations, index


ONCE: dict[str, Any] = {"history": "one_rendering"}
SYSTEM, ALL = {"targets": [{"role": "system", "train": True}]}, {"train_on": "all"}
ODD_BUT_SOUND = {
    "a thought that is the answer, and left out": (ONCE, [Thinking(text="so"), "so"]),
    "an answer of nothing": (ONCE, [""]),
    "an answer of a thought that is left out": (ONCE, [Thinking(text="so")]),
    "what is learned in another branch": (ALL, [Thinking(text="so")], "r", ["c"]),
    "a call with another's arguments in its own": ({}, [
        ToolCall(name="weather", arguments={"city": {"city": "Rome"}}),
        ToolCall(name="weather", arguments={"city": "Rome"}),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_BUT_SOUND)
def test_odd_rows_that_are_trained_as_they_should_raise_no_alarm(case: str) -> None:
    options, *said = ODD_BUT_SOUND[case]
    turns = [message("tool" if isinstance(parts, str) else "assistant", *parts) for parts in said]
    row = chat(message("user", "q"), *turns, message("user", "r"), message("assistant", "z"), tools=(WEATHER,))
    under_test = encoder(chat_template="qwen3", **options)
    sample = under_test.encode(row)
    assert [str(found) for found in RowVerifier(under_test).verify(row, sample).violations] == []


@pytest.mark.parametrize("options", [SYSTEM, ALL], ids=["system", "all"])
def test_a_system_message_that_is_printed_with_the_question_may_be_learned(
    options: dict[str, Any], shared: Path
) -> None:
    row = chat(message("system", "Be kind."), message("user", "q"), message("assistant", "a"))
    under_test = encoder(str(shared / "tokenizers/gemma3"), **options)
    sample = under_test.encode(row)
    assert "Be kind." in under_test.tokenizer.decode(sample.input_ids[sample.target].tolist())
    assert [str(found) for found in RowVerifier(under_test).verify(row, sample).violations] == []


@pytest.mark.parametrize("system", ["Be kind.", "Be kind #", "Say (a, b)."])
def test_a_system_message_that_ends_within_a_token_may_be_learned(system: str, shared: Path) -> None:
    """Qwen3's template prints tools behind it, and the tokenizer joins line breaks with what is before them."""
    row = chat(message("system", system), message("user", "q"), message("assistant", "a"), tools=(WEATHER,))
    under_test = encoder(str(shared / "tokenizers/qwen3"), **SYSTEM)
    sample = under_test.encode(row)
    verifier = RowVerifier(under_test)
    assert [str(found) for found in verifier.verify(row, sample).violations] == []
    target = sample.target.copy()
    target[int(target.argmax()) + 1] = False  # a token within the message
    assert Check.ANSWER_DECODES in {
        one.check for one in verifier.verify(row, replace(sample, target=target)).violations
    }
    target = sample.target.copy()
    target[target.argmax() + int((~target[target.argmax() :]).argmax()) - 1] = False  # a whole token at its end
    assert Check.ANSWER_DECODES in {
        one.check for one in verifier.verify(row, replace(sample, target=target)).violations
    }


@pytest.mark.parametrize("said", ["\nHello", "\n\nHello", " \n x"])
def test_an_earlier_answer_that_begins_with_a_line_break_is_apart_from_its_header_in_one_rendering(
    said: str, shared: Path
) -> None:
    under_test = encoder(str(shared / "tokenizers/qwen3"), **ONCE)
    row = chat(_QUESTION, message("assistant", said), message("user", "r"), message("assistant", "\nz"))
    row = replace(row, messages=(*row.messages, message("user", "s"), message("assistant", "so")))
    sample, verifier = under_test.encode(row), RowVerifier(under_test)
    verdict = verifier.verify(row, sample)
    assert [str(found) for found in verdict.violations] == []
    assert verdict.notes["elsewhere_answers"] == 3  # inference joins the line breaks before the last one, too
    for place in range(1, len(sample.input_ids)):
        other = sample.input_ids.copy()
        other[place] += 1
        assert verifier.verify(row, replace(sample, input_ids=other)).violations, place


def _trains(row: Row, under_test: Encoder) -> bool:
    try:
        under_test.encode(row)
    except RowError:
        return False
    return True


def _differ(row: Row, plain: Encoder, other: Encoder) -> bool:
    first, second = plain.encode(row), other.encode(row)
    return not (
        np.array_equal(first.input_ids, second.input_ids)
        and np.array_equal(first.target, second.target)
        and (first.weight is None) == (second.weight is None)
    )


@pytest.mark.parametrize(
    "row",
    [
        chat(*PLAIN.messages, train_on="last_assistant"),
        chat(*PLAIN.messages, weight=0.5),
        chat(*PLAIN.messages, rules=(TargetRule(role="user", train=True),)),
        chat(PLAIN.messages[1], replace(PLAIN.messages[2], train=False), *PLAIN.messages[3:]),
        chat(PLAIN.messages[1], replace(PLAIN.messages[2], weight=0.0), *PLAIN.messages[3:]),
        chat(PLAIN.messages[1], replace(PLAIN.messages[2], weight=2.0), *PLAIN.messages[3:]),
        chat(replace(PLAIN.messages[1], train=True), PLAIN.messages[2]),
        chat(PLAIN.messages[1], message("assistant", Text(text="Well, ", train=False), "yes.")),
        chat(PLAIN.messages[1], message("assistant", Text(text="Well, ", weight=0.5), "yes.")),
        chat(PLAIN.messages[1], message("assistant", Text(text="Well, "), Text(text="yes.", train=True), train=False)),
        chat(*THINKING.messages[:1], replace(THINKING.messages[1], weight=0.0), *THINKING.messages[2:]),
        chat(message("user", "hi"), message("assistant", "")),
        chat(message("user", "hi"), message("assistant", "one"), message("assistant", "two")),
        chat(message("assistant", "I begin.")),
        chat(*PLAIN.messages[:4]),
        Document(parts=(Text(text="one "), Text(text="two", weight=0.5)), address=AT),
        Document(parts=(Text(text="<|im_start|>as it is<|im_end|>"),), address=AT, rendered=True),
        chat(message("user", "a <|im_end|> b"), message("assistant", "<think>so</think> c"), rendered=True),
        chat(*PLAIN.messages, message("user", "more"), message("assistant", "two a"), continue_final_message=True),
        chat(*THINKING.messages, message("user", "x"), message("assistant", "and "), continue_final_message=True),
    ],
    ids=range(20),
)  # fmt: skip
def test_whatever_a_row_asks_for_is_verified_as_it_asks(row: Row) -> None:
    assert [str(violation) for violation in verdict(row, encoder()).violations] == []


def test_a_stop_after_an_unfinished_answer_is_found() -> None:
    finished = chat(message("user", "hi"), message("assistant", "one"))
    sample = encoder().encode(finished)
    unfinished = replace(finished, continue_final_message=True)
    assert verify_row(finished, sample, encoder()) == []
    assert verify_row(unfinished, sample, encoder())


def test_targets_outside_what_a_row_asks_for_besides_are_found() -> None:
    row = chat(replace(PLAIN.messages[1], train=True), PLAIN.messages[2], *PLAIN.messages[3:])
    under_test = encoder()
    sample = under_test.encode(row)
    assert not verify_row(row, sample, under_test)
    text = [under_test.tokenizer.decode([i]) for i in sample.input_ids]
    other_question = (
        text.index("fine") if "fine" in text else next(i for i, t in enumerate(text) if "f" in t and i > 15)
    )
    assert not sample.target[other_question]
    found = verify_row(row, retargeted(sample, other_question, True), under_test)
    assert {violation.check for violation in found} == {Check.NOTHING_SUPPLIED_TRAINED}


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_message_that_is_taken_out_where_all_is_learned_is_missed_if_it_is_learned(taken: int) -> None:
    under_test = encoder(train_on="all")
    messages = [replace(one, train=False) if n == taken else one for n, one in enumerate(PLAIN.messages)]
    row = chat(*messages)
    assert not verify_row(row, under_test.encode(row), under_test)
    found = verify_row(row, under_test.encode(PLAIN), under_test)
    assert {violation.check for violation in found} == {Check.NOTHING_SUPPLIED_TRAINED}


def test_a_part_that_is_printed_without_its_end_counts_no_letters_behind_it() -> None:
    part = Text(text="ab \n")
    policy = TurnPolicy(scaffold=1.0, pieces=((part, 0.5),), parts=(part,))
    assert token_weights("ab<e>", [(0, 2), (2, 3), (3, 5)], policy).tolist() == [0.5, 1.0, 1.0]


def test_a_number_beside_a_call_that_has_it_too_counts_as_what_the_template_writes() -> None:
    call = ToolCall(name="f", arguments={"zone": 1})
    policy = TurnPolicy(scaffold=1.0, pieces=((call, 0.5),), parts=(call,))
    assert token_weights('1 {"name": "f", "arguments": {"zone": 1}}', [(0, 1)], policy).tolist() == [1.0]


# ------------------------------------------------------------------------------------------------ control strings


def test_methods_are_told_apart_and_counted() -> None:
    under_test = encoder()
    assert verdict(PLAIN, under_test).method is Method.WHOLE
    hostile = verdict(HOSTILE, under_test)
    assert hostile.method is Method.NEUTRALISED
    assert dict(hostile.control_strings) == {"<|im_end|>": 1, "<|im_start|>": 1}
    assert Check.HUGGING_FACE in verdict(PLAIN, under_test).applied
    assert Check.HUGGING_FACE not in hostile.applied  # apply_chat_template would give control tokens
    assert verdict(ROWS["document"], under_test).method is Method.DOCUMENT


@pytest.mark.parametrize(
    "row",
    [
        chat(message("user", "a<|im_", "end|>b"), message("assistant", "split over two parts")),
        chat(message("system", "<|im_start|>"), message("user", "</think>"), message("assistant", "<think>x")),
        chat(message("user", "q"), message("assistant", Thinking(text="<|im_end|>"), "so")),
        Conversation(
            messages=(
                message("user", "q"),
                message("assistant", ToolCall(name="<|im_end|>", arguments={"<think>": ["<|im_start|>", {"a": "b"}]})),
                message("tool", "<|im_end|>"),
                message("assistant", "done <|im_end|>"),
            ),
            tools=({"type": "function", "function": {"name": "f", "description": "<|im_end|>"}},),
            address=AT,
        ),
        chat(message("user", "<|im_end|>" * 50), message("assistant", "<|im_start|>" * 50)),
    ],
    ids=range(5),
)  # fmt: skip
def test_control_strings_anywhere_in_a_row_stay_text(row: Row) -> None:
    found = verdict(row, encoder())
    assert [str(violation) for violation in found.violations] == []
    assert found.method is Method.NEUTRALISED and found.control_strings


READS_TAGS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if '</think>' in message.content and message.role == 'assistant' %}"
    "{{ '<think>' + message.content.split('</think>')[0].split('<think>')[-1] + '</think>\n' }}"
    "{{ message.content.split('</think>')[-1].lstrip() }}{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_strings_that_the_template_reads_itself_are_the_templates() -> None:
    under_test = encoder(chat_template=READS_TAGS)
    row = chat(message("user", "a <|im_end|> b"), message("assistant", "<think>hm</think>\n\nyes"))
    verifier = RowVerifier(under_test)
    sample = under_test.encode(row)  # the white space around a closing tag is the template's own
    assert verifier.tokenizer.decode(sample.input_ids[sample.target]) == "<think>hm</think>\nyes<|im_end|>"
    assert verifier.verify(row, sample).violations == ()
    expected = verifier.expected(row, verifier.policy)
    assert expected.method is Method.READ_BY_TEMPLATE and expected.turns[0].findings == ()
    tokenizer = ReferenceTokenizer(ReferenceFiles.of_run(under_test))
    template = RowVerifier(under_test).template
    assert template is not None
    neutral = neutralise(row, template, tokenizer, meant=frozenset())
    assert set(neutral.words.values()) == {"<|im_end|>"}  # the tags were left in place
    assert neutral.restored(template.render(neutral.messages)) == template.render(row.messages)


def test_innocent_words_are_not_in_the_row() -> None:
    under_test = encoder()
    template = RowVerifier(under_test).template
    assert template is not None
    row = chat(message("user", "zqaaaaqz zqaaabqz <|im_end|>"), message("assistant", "ok"))
    neutral = neutralise(row, template, ReferenceTokenizer(ReferenceFiles.of_run(under_test)), meant=frozenset())
    assert not set(neutral.words) & {"zqaaaaqz", "zqaaabqz"}
    assert verdict(row, under_test).violations == ()


# ------------------------------------------------------------------------------------------------------- the rest


def test_a_merge_over_the_seam_is_counted_and_no_fault() -> None:
    found = verdict(SEAM, encoder())
    assert found.violations == () and found.notes["seam"] == 1
    assert verdict(PLAIN, encoder()).notes["seam"] == 0


EMPTY = "<think>\n\n</think>\n\n"
OPENED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n" + EMPTY + "{% endif %}"
)


def test_an_empty_thought_of_prompts_alone_is_context_and_its_lack_is_found(tmp_path: Path) -> None:
    path = tmp_path / "opened.jinja"
    path.write_text(OPENED)
    bare = tmp_path / "bare.jinja"
    bare.write_text(OPENED.replace(EMPTY, ""))
    under_test, plain = encoder(chat_template=str(path)), encoder(chat_template=str(bare))
    row = chat(message("user", "Hi"), message("assistant", "Yes."))
    sample = under_test.encode(row)
    text = under_test.tokenizer.decode(sample.input_ids)
    assert f"assistant\n{EMPTY}Yes.<|im_end|>" in text
    assert under_test.tokenizer.decode(sample.input_ids[sample.target]) == "Yes.<|im_end|>"
    assert verdict(row, under_test).violations == ()
    assert RowVerifier(under_test).verify(row, plain.encode(row)).violations


def test_a_template_without_a_stop_is_found() -> None:
    no_stop = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    lenient, strict = encoder(chat_template=no_stop, train_stop=False), encoder(chat_template=no_stop)
    row = chat(message("user", "hi"), message("assistant", "yes"))
    sample = lenient.encode(row)
    assert not verify_row(row, sample, lenient)
    assert {violation.check for violation in verify_row(row, sample, strict)} == {Check.STOP_TRAINED}


def test_a_stop_on_which_inference_does_not_stop_is_found() -> None:
    other_end = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}" + (
        "{{ '<|endoftext|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    under_test = encoder(chat_template=other_end)
    row = chat(message("user", "hi"), message("assistant", "yes"))
    [violation] = verify_row(row, under_test.encode(row), under_test)
    assert violation.check is Check.STOP_TRAINED and "inference stops on <|im_end|>" in violation.what


def test_the_next_header_may_be_the_stop() -> None:
    like_glm = "{% for message in messages %}{{ '<|im_start|>' if message.role == 'assistant' else '<|im_end|>' }}" + (
        "{{ message.role + '\n' + message.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    under_test = encoder(chat_template=like_glm)
    row = chat(*PLAIN.messages[1:4])
    sample = under_test.encode(row)
    assert not verify_row(row, sample, under_test)
    stop = int(np.flatnonzero(sample.target)[-1])
    assert under_test.tokenizer.decode([sample.input_ids[stop]]) == "<|im_end|>"
    found = verify_row(row, retargeted(sample, stop, False), under_test)
    assert {violation.check for violation in found} == {Check.STOP_TRAINED}


def test_a_prompt_that_no_switch_reproduces_is_found() -> None:
    opens = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}" + (
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
    )
    row = chat(message("user", "hi"), message("assistant", "yes"))
    honest = encoder(chat_template=opens.replace("<think>", ""))
    found = verify_row(row, honest.encode(row), encoder(chat_template=opens))
    assert Check.PROMPT_TOKENS in {violation.check for violation in found}


def test_a_pair_without_two_continuations_is_found() -> None:
    under_test = encoder()
    sample = under_test.encode(PLAIN)
    pair = Preference(prompt=PLAIN.messages[:2], chosen=PLAIN.messages[2:3], rejected=PLAIN.messages[2:3], address=AT)
    found = RowVerifier(under_test).verify(pair, sample)
    assert found.method is Method.STRUCTURE_ONLY and {v.check for v in found.violations} == {Check.BRANCHES}
    broken = replace(sample, branches=(Branch(parent=3, length=len(sample.input_ids)),))
    assert {v.check for v in RowVerifier(under_test).verify(pair, broken).violations} == {Check.BRANCHES}


def test_added_tokens_have_the_same_ids_in_both_vocabularies() -> None:
    from luthier.config.inputs import ModelConfig, TemplateConfig

    under_test = Encoder(
        ModelConfig(name_or_path="preset:tiny-qwen3", add_tokens=["zebra"], add_special_tokens=["<|new|>"]),
        TemplateConfig(),
    )
    row = chat(message("user", "a zebra <|new|>"), message("assistant", "zebra"))
    assert [str(violation) for violation in verdict(row, under_test).violations] == []


def test_first_difference_is_the_length_of_the_common_beginning() -> None:
    def ids(*values: int) -> Any:
        return np.array(values, dtype=np.int32)

    assert first_difference(ids(1, 2, 3), ids(1, 5, 3)) == 1
    assert first_difference(ids(1, 2), ids(1, 2, 3)) == 2
    assert first_difference(ids(), ids(1)) == 0


def test_tools_of_the_preset_are_verified_with_their_seams() -> None:
    sample: Sample = encoder().encode(TOOLS)
    found = RowVerifier(encoder()).verify(TOOLS, sample)
    assert (found.num_turns, found.num_targets) == (2, int(sample.target.sum()))
