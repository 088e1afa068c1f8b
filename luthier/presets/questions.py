"""What the preset data sets share: questions about the people of the valley, and which questions are held out."""

from __future__ import annotations

from random import Random
from typing import Any
from zlib import crc32

from luthier.errors import SourceError
from luthier.presets.world import PEOPLE, QUESTIONS, STATEMENTS

SPLITS = ("train", "test")
_TEST_SHARE = 10  # one key in ten is held out


def require_split(dataset: str, split: str) -> None:
    """Raises `SourceError` if a preset data set has no such split."""
    if split not in SPLITS:
        raise SourceError(f"preset:{dataset} has no split {split!r}", hint=f"its splits are {' and '.join(SPLITS)}")


def is_held_out(key: str) -> bool:
    """Whether what the key stands for is asked in ``test`` only. It is the same in every data set."""
    return crc32(key.encode()) % _TEST_SHARE == 0


def draw_fact(rng: Random) -> tuple[str, str, str]:
    """A question about a person, the sentence that answers it, and the value that it is about."""
    person = rng.choice(PEOPLE)
    attribute = rng.choice(list(QUESTIONS))
    value = getattr(person, attribute)
    question = rng.choice(QUESTIONS[attribute]).format(name=person.name)
    return question, STATEMENTS[attribute].format(name=person.name, value=value), value


def ask(*turns: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages from alternating questions and answers."""
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]
