"""Under ``template.history: one_rendering`` verification says what differs from inference, and finds what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from luthier.check.verify.findings import Check
from luthier.check.verify.row import RowVerifier
from luthier.config.schema import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.presets import tokenizer_folder
from luthier.records import Conversation, Sample, Thinking
from tests.rendering.chat import assistant, conversation, user

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
