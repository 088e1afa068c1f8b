"""Templates that cut, turn, hide and rewrite text: the assistant's words and the stop are learned, or nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError, TemplateError
from luthier.records import Sample
from tests.oracles.adversarial import ADVERSARIES, FIRST, STOP, Adversary, of_questions
from tests.oracles.chat_rows import Chat, as_conversation, assistant, hugging_face_render, system, user

# Rows of one shape that differ in all that a template may ask about: length, letters, order, words, white space.
ANSWERS = (
    ("charlie delta", "golf hotel"),
    ("x y", "kilo lima mike november oscar papa"),
    ("zulu yankee", "aa ab"),
    ("rr vv", "bergamo annp"),
    ("1 2", "eeee zzz"),
)
SPECIAL = {"eos_token": STOP, "pad_token": "<|endoftext|>"}


def names(*, refused: bool) -> list[str]:
    """The adversaries that are refused, or those that are not."""
    return [name for name, adversary in ADVERSARIES.items() if (adversary.refused is not None) == refused]


def chats() -> Iterator[Chat]:
    for first, second in ANSWERS:
        yield [user(FIRST), assistant(first), user("echo foxtrot"), assistant(second)]
        yield [system("india juliett"), user(FIRST), assistant(first), user("quebec"), assistant(second)]


def encoder(adversary: Adversary) -> Encoder:
    options = {"chat_template": adversary.source, "train_on": "assistant"}
    return Encoder(ModelConfig(name_or_path="preset:tiny"), TemplateConfig.model_validate(options))


@pytest.mark.parametrize("name", [name for name in names(refused=False) if ADVERSARIES[name].spoils is None])
def test_what_can_be_followed_is_exact(name: str) -> None:
    adversary, ours = ADVERSARIES[name], encoder(ADVERSARIES[name])
    for chat, outcome in zip(chats(), ours.encode_many(map(as_conversation, chats())), strict=True):
        assert isinstance(outcome, Sample), outcome
        check(ours, adversary, chat, outcome)


SPOILING = [name for name, adversary in ADVERSARIES.items() if adversary.spoils is not None]


@pytest.mark.parametrize("name", SPOILING)
def test_an_answer_that_is_not_printed_as_the_row_has_it_is_refused(name: str) -> None:
    adversary, ours = ADVERSARIES[name], encoder(ADVERSARIES[name])
    refused = 0
    for chat, outcome in zip(chats(), ours.encode_many(map(as_conversation, chats())), strict=True):
        turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        if all(adversary.answer(chat[i - 1]["content"], chat[i]["content"]) == chat[i]["content"] for i in turns):
            assert isinstance(outcome, Sample), outcome
            check(ours, adversary, chat, outcome)
            continue
        assert isinstance(outcome, RowError)
        assert outcome.reason in {adversary.spoils, "answer_changed"}, outcome  # one letter upside down is a case
        refused += 1
    assert refused


@pytest.mark.parametrize("name", SPOILING)
def test_whatever_is_done_to_questions_can_be_followed(name: str) -> None:
    adversary = Adversary(source=of_questions(ADVERSARIES[name].source))
    ours = encoder(adversary)
    for chat, outcome in zip(chats(), ours.encode_many(map(as_conversation, chats())), strict=True):
        assert isinstance(outcome, Sample), outcome
        check(ours, adversary, chat, outcome)


@pytest.mark.parametrize("name", names(refused=True))
def test_what_cannot_be_followed_is_refused_for_its_own_reason(name: str) -> None:
    adversary, ours = ADVERSARIES[name], encoder(ADVERSARIES[name])
    for outcome in ours.encode_many(map(as_conversation, chats())):
        assert isinstance(outcome, RowError)
        assert outcome.reason == adversary.refused
        if adversary.line is not None:
            assert f"line {adversary.line}: " in str(outcome)


def test_a_template_without_end_stops_the_run() -> None:
    source = "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="on and on"):
        encoder(Adversary(source=source)).encode(as_conversation(next(chats())))


def check(ours: Encoder, adversary: Adversary, chat: Chat, sample: Sample) -> None:
    """The text is transformers'; the targets are the assistant's words, as the template prints them, and the stop."""
    paths = sample.unroll()
    text = hugging_face_render(adversary.source, chat, **SPECIAL)
    clock = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+")  # no two renders are made in the same microsecond
    assert clock.sub("", ours.tokenizer.decode(paths[-1][0])) == clock.sub("", text)
    learned = sorted(ours.tokenizer.decode(ids[target]) for ids, target in paths)
    expected = [
        adversary.answer(chat[index - 1]["content"], message["content"]) + STOP
        for index, message in enumerate(chat)
        if message["role"] == "assistant"
    ]
    assert learned == ["".join(expected)] or learned == sorted(expected)


def test_a_word_of_the_question_among_the_targets_is_seen() -> None:
    adversary = ADVERSARIES["index loop"]
    chat = next(chats())
    strays = [{**message, "role": "assistant"} if index == 2 else message for index, message in enumerate(chat)]
    sample = encoder(adversary).encode(as_conversation(strays))
    with pytest.raises(AssertionError):
        check(encoder(adversary), adversary, chat, sample)
