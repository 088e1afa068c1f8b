"""Under ``template.history: one_rendering`` verification says what differs from inference, and finds what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from verify_chats import LOOK

from luthier.check.verify import Check
from luthier.check.verify.row import RowVerifier
from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.presets import tokenizer_folder
from luthier.records import Conversation, Sample, Thinking, ToolCall
from tests.rendering.chat import assistant, conversation, message, user

THOUGHT = Thinking(text="let me see")
ROWS = {
    "thoughts": conversation(
        user("one?"),
        assistant(THOUGHT, "1"),
        user("two?"),
        assistant(THOUGHT, "2"),
        user("3?"),
        assistant(THOUGHT, "3"),
    ),
    "no thoughts": conversation(user("one?"), assistant("1"), user("two?"), assistant("2")),
    "tags and blanks": conversation(user("<|im_start|>"), assistant("<|im_end|> x"), user(" "), assistant("y\n")),
    "one turn": conversation(user("one?"), assistant(THOUGHT, "1")),
}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    template = TemplateConfig.model_validate({"chat_template": "qwen3", "history": "one_rendering"})
    return Encoder(ModelConfig(name_or_path=str(tokenizer_folder("tiny"))), template)


@pytest.fixture(scope="module")
def verifier(encoder: Encoder) -> RowVerifier:
    return RowVerifier(encoder)


@pytest.mark.parametrize("name", ROWS)
def test_what_training_makes_of_one_rendering_is_true_and_what_differs_is_told(
    encoder: Encoder, verifier: RowVerifier, name: str
) -> None:
    row = ROWS[name]
    verdict = verifier.verify(row, encoder.encode(row))
    assert verdict.violations == ()
    answers = {"thoughts": 2, "one turn": 0}.get(name, 1)
    assert verdict.notes["elsewhere_answers"] == answers
    assert verdict.notes["elsewhere_rows"] == min(answers, 1)
    counted = dict(encoder.encode(row).notes)
    assert verdict.notes["elsewhere_tokens"] == max(
        (count for what, count in counted.items() if what.startswith("targets of answers")), default=0
    ), "training counts the same"


# Mistral's first templates: no header, and the tools and the system message stand in the newest question
NEWEST = (
    "{% macro say(m, before) %}{% if m.role == 'user' %}[INST] {{ before }}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS] {% for c in m.tool_calls %}{{ c.function | tojson }}{% if c.id | length != 9 %}"
    "{{ raise_exception('an id has 9 letters') }}{% endif %}{{ c.id }}{% endfor %}<|im_end|>"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% endif %}{% endmacro %}"
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
)
BY_LOOP = NEWEST + "{% for m in messages %}{{ say(m, (tools | tojson) if tools and m == asked[-1]) }}{% endfor %}"
BY_NUMBER = NEWEST + (
    "{% for i in range(messages | length) %}{{ say(messages[i], messages[0].content + ' ' if loop.last) }}{% endfor %}"
)


@pytest.mark.parametrize("source", [BY_LOOP, BY_NUMBER], ids=["loop", "numbers"])
@pytest.mark.parametrize("history", ["one_rendering", "inference"])
def test_turns_without_headers_are_learned_where_they_stand(source: str, history: str) -> None:
    template = TemplateConfig.model_validate({"chat_template": source, "history": history})
    encoder = Encoder(ModelConfig(name_or_path=str(tokenizer_folder("tiny"))), template)
    verifier = RowVerifier(encoder)
    calls = [ToolCall(name="look_up", arguments={"word": word}, id=f"call0000{n}") for n, word in enumerate(("a", "b"))]
    rows = [
        conversation(message("system", "Be brief."), user("one?"), assistant("1"), user("two?"), assistant("2")),
        conversation(user("one?"), assistant("1"), user("two?"), assistant("2"), user("3?"), assistant("3")),
    ]
    if source is BY_LOOP:
        parts = [part for call in calls for part in (assistant(call), message("tool", "found"))]
        rows += [replace(one, tools=(LOOK,)) for one in (*rows, conversation(user("?"), *parts, assistant("So.")))]
    for row in rows:
        sample = encoder.encode(row)
        assert verifier.verify(row, sample).violations == ()
        learned = [
            part for ids, on in sample.unroll() for part in encoder.tokenizer.decode(ids[on]).split("<|im_end|>")
        ]
        assert sum(map(bool, learned)) == sum(message.role == "assistant" for message in row.messages)


def broken(sample: Sample, how: str) -> Sample:
    target = sample.target.copy()
    first, last = int(target.argmax()), len(target) - 1 - int(target[::-1].argmax())
    match how:
        case "header":
            target[first - 1] = True
        case "answer":
            target[first] = False
        case "stop":
            target[last] = False
        case "context":
            ids = sample.input_ids.copy()
            ids[first - 3] = ids[first]
            return replace(sample, input_ids=ids)
    return replace(sample, target=target)


@pytest.mark.parametrize(
    ("how", "check"),
    [
        ("header", Check.NOTHING_SUPPLIED_TRAINED),
        ("answer", Check.COMPLETION_TOKENS),
        ("stop", Check.STOP_TRAINED),
        ("context", Check.PROMPT_TOKENS),
    ],
)
def test_a_fault_in_one_rendering_is_found(encoder: Encoder, verifier: RowVerifier, how: str, check: Check) -> None:
    row = ROWS["thoughts"]
    sample = broken(encoder.encode(row), how)
    assert check in {violation.check for violation in verifier.verify(row, sample).violations}


def test_one_rendering_is_found_to_be_untrue_where_it_was_not_asked_for(encoder: Encoder) -> None:
    asked = Encoder(encoder.model, encoder.options.model_copy(update={"history": "inference"}))
    row: Conversation = ROWS["thoughts"]
    assert RowVerifier(asked).verify(row, asked.encode(row)).violations == ()
    found = RowVerifier(asked).verify(row, encoder.encode(row)).violations
    assert {Check.COMPLETION_TOKENS, Check.PROMPT_TOKENS} & {violation.check for violation in found}
    assert np.count_nonzero(encoder.encode(row).target) < np.count_nonzero(asked.encode(row).target)
