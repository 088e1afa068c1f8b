"""What the preset data sets of pictures and sounds share: a few questions in a row about the same thing, and which of
them are held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from zlib import crc32

from luthier.writing import JsonObject

_TEST_SHARE = 10  # one key in ten is held out
_MOST_TURNS = 4  # of a conversation in `train`


def is_held_out(key: str) -> bool:
    """Whether what the key stands for is asked in ``test`` only. It is the same in every data set."""
    return crc32(key.encode()) % _TEST_SHARE == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class QuizQuestion:
    """``key`` names what must be generalised, and alone decides whether the question is held out."""

    key: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Quiz:
    """Something to look at or to listen to, as parts of a message, and all that can be asked about it."""

    shown: Sequence[JsonObject]
    questions: Sequence[QuizQuestion]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuizSkill:
    """One thing to learn. ``num_train`` and ``num_test`` are rows."""

    name: str
    draw: Callable[[Random], Quiz]
    num_train: int
    num_test: int = 30


def quiz_rows(skills: Sequence[QuizSkill], split: str) -> Iterator[JsonObject]:
    """The rows of a split, always the same: ``{"skill": NAME, "messages": [...]}``.

    A row of ``train`` asks up to four questions about what it shows, none of which is held out; a row of ``test`` asks
    one that is. ``train`` has its skills shuffled, in ``test`` they take turns.
    """
    counts = [skill.num_train if split == "train" else skill.num_test for skill in skills]
    turns = zip_longest(*([number] * count for number, count in enumerate(counts)))
    order = [number for turn in turns for number in turn if number is not None]
    if split == "train":
        Random("order").shuffle(order)
    drawn = [_quiz_rows_of(skill, split) for skill in skills]
    yield from (next(drawn[number]) for number in order)


def _quiz_rows_of(skill: QuizSkill, split: str) -> Iterator[JsonObject]:
    """Row after row, without end: who wants a few pays for no more."""
    rng = Random(f"{skill.name} {split}")
    most = _MOST_TURNS if split == "train" else 1
    while True:
        quiz = skill.draw(rng)
        asked = [question for question in quiz.questions if is_held_out(question.key) == (split == "test")]
        if asked:
            chosen = rng.sample(asked, min(most, len(asked)))
            yield {"skill": skill.name, "messages": _messages(quiz.shown, chosen)}


def _messages(shown: Sequence[JsonObject], asked: Sequence[QuizQuestion]) -> list[JsonObject]:
    messages: list[JsonObject] = []
    for turn in asked:
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    messages[0]["content"] = [*shown, {"type": "text", "text": messages[0]["content"]}]
    return messages
