"""Broken templates are found by name, completions that no rendering has are read, stock templates raise no alarm."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from verify_broken_templates import (
    BROKEN,
    CALLS,
    CLOSED,
    OPENED,
    RIGHT,
    SAID,
    Broken,
    believing_sample,
    last_only,
    prompt_of,
    run_with,
    sample_of,
    template,
)
from verify_cases import THINKING, TOOLS, chat, encoder, message
from verify_chats import CHATS

from luthier.check.verify import Check
from luthier.check.verify.row import RowVerifier
from luthier.encoding import _records
from luthier.errors import RowError
from luthier.presets import tokenizer_folder
from luthier.records import Conversation
from tests.oracles.catalogue import catalogue
from tests.oracles.vocabulary import encoder_of


def broken(source: str, row: Conversation, completion: str | None = None) -> dict[Check, str]:
    """What is found wrong with a row's last answer; ``completion`` is what is learned, if not what the template has."""
    row = last_only(row)
    if completion is None:
        sample = believing_sample(source, row)
    else:
        sample = sample_of(prompt_of(source, row, len(row.messages) - 1), completion)
    return {
        violation.check: violation.what for violation in RowVerifier(run_with(source)).verify(row, sample).violations
    }


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_broken_template_is_found_by_its_check(case: Broken) -> None:
    assert case.found_by in broken(case.source, case.row)


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_a_template_that_prints_a_row_in_its_own_way_is_right(case: Broken) -> None:
    assert broken(case.source, case.row) == {}


def test_broken_templates_are_many() -> None:
    assert len({case.name for case in BROKEN}) == len(BROKEN) >= 40


# --------------------------------------------------------------------------- completions that no rendering has

STOP = "<|im_end|>"
DROPS = template(SAID, ask=OPENED)  # the prompt opens a thought, history shows none
EMPTY = template(SAID, ask=CLOSED)  # the prompt writes an empty thought, history shows none
REOPENS = template("</think>" + SAID, ask=CLOSED)  # T3: history begins with the closing tag
PLAIN = chat(message("user", "Hi"), message("assistant", "Yes, it is."))
THOUGHT = chat(*THINKING.messages[:2])


@pytest.mark.parametrize(
    ("source", "row", "completion"),
    [
        (DROPS, PLAIN, "\n</think>\n\nYes, it is.<|im_end|>"),
        (DROPS, PLAIN, "</think>\n\nYes, it is.<|im_end|>"),
        (DROPS, PLAIN, "</think>Yes, it is.<|im_end|>"),
        (DROPS, THOUGHT, "add them\n</think>\n\ntwo<|im_end|>"),
        (EMPTY, PLAIN, "Yes, it is.<|im_end|>"),
        (REOPENS, PLAIN, "Yes, it is.<|im_end|>"),
    ],
)
def test_what_the_model_must_emit_after_its_prompt_is_accepted(source: str, row: Conversation, completion: str) -> None:
    assert broken(source, row, completion) == {}


@pytest.mark.parametrize(
    ("source", "row", "completion", "found_by"),
    [
        (REOPENS, PLAIN, "</think>Yes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (EMPTY, PLAIN, "\n</think>\n\nYes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (EMPTY, PLAIN, "<think>\n\n</think>\n\nYes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (EMPTY, PLAIN, "<|im_start|>assistant\nYes, it is.<|im_end|>", Check.NOTHING_SUPPLIED_TRAINED),
        (EMPTY, PLAIN, "yes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (EMPTY, PLAIN, "Yes, it<|im_end|>", Check.ANSWER_DECODES),
        (EMPTY, PLAIN, "Yes, it is. Yes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (EMPTY, PLAIN, "Well: Yes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (EMPTY, PLAIN, "Yes, it is.", Check.STOP_TRAINED),
        (EMPTY, PLAIN, "Yes, it is.<|im_end|><|im_end|>", Check.NOTHING_SUPPLIED_TRAINED),
        (EMPTY, PLAIN, "Yes, it is.<|im_end|>\n", Check.NOTHING_SUPPLIED_TRAINED),
        (DROPS, PLAIN, "Yes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (DROPS, PLAIN, "<think>\n</think>\n\nYes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (DROPS, PLAIN, "</think>\n</think>\n\nYes, it is.<|im_end|>", Check.ANSWER_DECODES),
        (DROPS, THOUGHT, "</think>\n\ntwo<|im_end|>", Check.ANSWER_DECODES),
        (DROPS, THOUGHT, "add them\n</think>\n\n<|im_end|>", Check.ANSWER_DECODES),
        (DROPS, THOUGHT, "two\n</think>\n\nadd them<|im_end|>", Check.ANSWER_DECODES),
        (DROPS, THOUGHT, "<think>\nadd them\n</think>\n\ntwo<|im_end|>", Check.ANSWER_DECODES),
        (DROPS, THOUGHT, "add them\n</think>\n\nadd them\n\ntwo<|im_end|>", Check.ANSWER_DECODES),
        (DROPS, THOUGHT, "add them\n\ntwo\n</think><|im_end|>", Check.ANSWER_DECODES),
        (DROPS, THOUGHT, "add\n</think>\n\ntwo<|im_end|>", Check.ANSWER_DECODES),
    ],
)  # fmt: skip
def test_what_the_model_must_not_emit_after_its_prompt_is_found(
    source: str, row: Conversation, completion: str, found_by: Check
) -> None:
    assert found_by in broken(source, row, completion)


@pytest.mark.parametrize("completion", ["Yes, it is.", "  Yes, it is.", " Yes, it is. ", "[/INST] Yes, it is."])
def test_a_turn_without_a_header_is_compared_token_by_token(completion: str) -> None:
    row = chat(message("system", "Be brief."), *PLAIN.messages)
    assert broken(NEWEST, row, f" Yes, it is.{STOP}") == {}
    assert Check.COMPLETION_TOKENS in broken(NEWEST, row, completion + STOP)


def test_a_context_without_what_the_prompt_opens_is_found() -> None:
    row = last_only(PLAIN)
    sample = sample_of(prompt_of(template(SAID), row, 1), "Yes, it is.<|im_end|>")
    found = RowVerifier(run_with(DROPS)).verify(row, sample).violations
    assert Check.PROMPT_TOKENS in {violation.check for violation in found}


# -------------------------------------------------------------------------- training and verification at one

BEGUN = chat(message("assistant", "Welcome."), message("user", "Hi"), message("assistant", "Yes, it is."))
ROW = chat(message("user", "Go"), message("assistant", "One."), message("assistant", "Two."))
CALLED = Conversation(messages=TOOLS.messages[:2], tools=TOOLS.tools, address=TOOLS.address)
SPOKEN = replace(CALLED, messages=(CALLED.messages[0], message("assistant", "So.", *CALLED.messages[1].parts)))
ONCE = "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<|im_start|>assistant\n{% endif %}"
LAST = "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # none of an empty history
SWITCH = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{{ '' if thinking else '</think>' }}{% endif %}"
NAMED = (
    "{% for m in messages %}{{ '<|endoftext|>' if loop.first }}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ENCLOSED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content }}"
    "<|END_RESPONSE|>{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
NEWEST = (  # Mistral's first templates: the system message stands in the newest question, while nothing follows it
    "{% set s = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ s if loop.last }}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    " {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
BRIEF = chat(message("system", "Be brief."), *PLAIN.messages, *ROW.messages[:2])
TWICE = template(CALLS + "<|im_end|>\n<|im_start|>assistant\n" + SAID)
CLOSING = "\n</think>\n\n"


@pytest.mark.parametrize(
    ("source", "row", "learned"),
    [
        # a switch's prompt closes the thought that the other one opens and history closes
        (template("</think>" + SAID, ask=SWITCH), PLAIN, ["Yes, it is.<|im_end|>"]),
        # no header is given behind an answer, or before the first question: the model never writes one
        (template(SAID, ask=ONCE), BEGUN, ["Yes, it is.<|im_end|>"]),
        (template(SAID, ask="").replace("{% endfor %}", LAST + "{% endfor %}"), BEGUN, ["Yes, it is.<|im_end|>"]),
        # tags of a header that look like those of a thought that is closed, behind a begin token
        (NAMED, BEGUN, ["Yes, it is.<|im_end|>"]),
        # an answer before the first question, behind a thought that its prompt opens
        (template(SAID, ask=OPENED), BEGUN, [CLOSING + "Welcome.<|im_end|>", CLOSING + "Yes, it is.<|im_end|>"]),
        # generation ends with the first stop, whatever is printed behind it
        (template("{{ m.content }}\n<|im_end|>\n<|endoftext|>"), PLAIN, ["Yes, it is.\n<|im_end|>"]),
        (TWICE, CALLED, ["<tool_call>\n…\n</tool_call><|im_end|>"]),
        # tags that enclose an answer are the model's own, where the template always writes the header
        (ENCLOSED, PLAIN, ["<|START_RESPONSE|>Yes, it is.<|END_RESPONSE|><|im_end|>"]),
        # prompts add no header, and only what stands before the turn is rendered otherwise
        (NEWEST, BRIEF, [" Yes, it is.<|im_end|>", " One.<|im_end|>"]),
        # white space before the header differs
        (template(SAID, header="\n\n<|im_start|>assistant\n"), PLAIN, ["Yes, it is.<|im_end|>"]),
    ],
)
def test_what_is_learned_under_odd_templates_is_what_verification_expects(
    source: str, row: Conversation, learned: list[str]
) -> None:
    under_test = encoder(chat_template=source + "{# #}")
    sample = under_test.encode(row)
    found = [
        re.sub(r"(?<=<tool_call>\n).*(?=\n)", "…", under_test.tokenizer.decode(ids[target].tolist()))
        for ids, target in sample.unroll()
        if target.any()
    ]
    assert sorted(found) == sorted(learned)
    assert [str(violation) for violation in RowVerifier(under_test).verify(row, sample).violations] == []


@pytest.mark.parametrize(
    ("source", "row", "reason"),
    [
        (template(SAID, ask=ONCE), ROW, "prompt_not_reproduced"),  # the header would be learned
        (TWICE, SPOKEN, "answer_lost"),  # inference ends before the words
    ],
)
def test_what_verification_would_reject_is_not_trained(source: str, row: Conversation, reason: str) -> None:
    with pytest.raises(RowError) as refused:
        encoder(chat_template=source + "{# #}").encode(row)
    assert refused.value.reason == reason


# In the manner of DeepSeek R1, QwQ, Qwen3 and GLM: the prompt opens a thought, or the model does, and tags in an
# answer's text are read.
R1 = template("{{ m.content.split('</think>')[-1] }}<|im_end|>", ask=OPENED)
QWQ = template("{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>", ask=OPENED)
TURN = (
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content %}{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0] %}{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
QWEN = template(TURN + "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ said }}<|im_end|>", ask=OPENED + "\n")
GLM = template(TURN + "<think>{{ thought.strip() }}</think>\n{{ said }}<|im_end|>")
TAGGED = (
    "The tag </think> closes it.",
    "</think> comes first.",
    "It ends with </think>",
    "First\n</think>\n\nthen.",
    "</think>\n\nYes.",
    "<think>\nHm.\n</think>\n\nYes.",
    "<think>\n\n</think>\n\nYes.",
    "<think></think>",
    "</think>",
    "So <think> it </think> is.",
)


@pytest.mark.parametrize("source", [R1, QWQ, QWEN, GLM], ids=["r1", "qwq", "qwen", "glm"])
def test_an_answer_with_tags_of_thoughts_is_learned_as_verification_expects_or_refused(source: str) -> None:
    under_test = encoder(chat_template=source)
    verifier, asked = RowVerifier(under_test), {"role": "user", "content": "Q?"}
    trained = set()
    for text in TAGGED:
        answer = {"role": "assistant", "content": text}
        for more in ([], [asked, {"role": "assistant", "content": "Fine."}]):
            (row,) = _records([{"messages": [asked, answer, *more]}], ())
            try:
                sample = under_test.encode(row)
            except RowError as refused:
                assert refused.reason in ("prompt_not_reproduced", "answer_changed", "answer_lost", "blank_answer")
                continue
            trained.add(text)
            assert [str(violation) for violation in verifier.verify(row, sample).violations] == [], text
    assert trained >= {*TAGGED[3:7]}


# ------------------------------------------------------------------------------------------------- no false alarms

PART = 10  # of the conversations one in so many, others for each template; all of them take minutes


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_stock_and_named_templates_raise_no_alarm(tmp_path: Path, name: str) -> None:
    encoder = encoder_of(tokenizer_folder("tiny"), tmp_path, catalogue()[name])
    verifier, offset = RowVerifier(encoder), sorted(catalogue()).index(name) % PART
    drawn = list(CHATS.items())[offset::PART]
    for (case, row), sample in zip(drawn, encoder.encode_many([row for _, row in drawn]), strict=True):
        if not isinstance(sample, RowError):
            assert [str(violation) for violation in verifier.verify(row, sample).violations] == [], case
