"""What the preset data sets share: skills, which of their questions are held out, and questions about the people of the
valley.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from luthier.errors import SourceError


class Person(NamedTuple):
    """Someone of the valley, with the four things that one can ask about them."""

    name: str
    instrument: str
    village: str
    pet: str
    trade: str


PEOPLE = (
    Person("Anna", "cello", "Larkfield", "cat", "baker"),
    Person("Boris", "flute", "Millbrook", "dog", "tailor"),
    Person("Clara", "harp", "Stonebridge", "goat", "potter"),
    Person("David", "violin", "Oakham", "parrot", "farmer"),
    Person("Edith", "drum", "Ferndale", "rabbit", "miller"),
    Person("Felix", "horn", "Larkfield", "dog", "teacher"),
    Person("Greta", "lute", "Oakham", "duck", "weaver"),
    Person("Hugo", "cello", "Ferndale", "parrot", "smith"),
    Person("Irene", "viola", "Millbrook", "cat", "farmer"),
    Person("Jonas", "harp", "Larkfield", "goat", "tailor"),
    Person("Karin", "violin", "Stonebridge", "duck", "teacher"),
    Person("Leon", "flute", "Oakham", "rabbit", "baker"),
    Person("Mara", "lute", "Millbrook", "pony", "smith"),
    Person("Nora", "horn", "Ferndale", "cat", "potter"),
    Person("Paula", "drum", "Larkfield", "duck", "weaver"),
    Person("Sofia", "violin", "Millbrook", "goat", "miller"),
)
NAMES = tuple(person.name for person in PEOPLE)
VILLAGES = tuple(sorted({person.village for person in PEOPLE}))
INSTRUMENTS = tuple(sorted({person.instrument for person in PEOPLE}))

QUESTIONS = {
    "instrument": (
        "Which instrument does {name} play?",
        "What does {name} play?",
        "Tell me which instrument {name} plays.",
        "{name} makes music. With what?",
        "Do you know what {name} plays?",
        "I want to know what {name} plays.",
    ),
    "village": (
        "Where does {name} live?",
        "In which village does {name} live?",
        "Tell me where {name} lives.",
        "{name} has a house. In which village?",
        "Do you know where {name} lives?",
        "I want to visit {name}. Where do I go?",
    ),
    "pet": (
        "Which pet does {name} have?",
        "What kind of animal does {name} keep?",
        "Tell me which pet {name} has.",
        "{name} has an animal. Which one?",
        "Do you know the pet of {name}?",
        "I want to know which pet {name} keeps.",
    ),
    "trade": (
        "What is the trade of {name}?",
        "What does {name} do for a living?",
        "Tell me the trade of {name}.",
        "{name} works in the valley. As what?",
        "Do you know what {name} works as?",
        "I want to know the trade of {name}.",
    ),
}
"""Ways to ask for each thing that is known of a person."""

STATEMENTS = {
    "instrument": "{name} plays the {value}.",
    "village": "{name} lives in {value}.",
    "pet": "{name} has a {value}.",
    "trade": "{name} is a {value}.",
}

ANIMALS_BY_SIZE = (
    "flea", "ant", "bee", "mouse", "squirrel", "rabbit", "fox", "wolf", "lion", "horse", "elephant", "whale",
)  # fmt: skip

KINDS = {
    "fruits": ("apple", "pear", "plum", "cherry", "fig", "grape", "lemon", "peach"),
    "instruments": ("cello", "flute", "harp", "violin", "drum", "horn", "lute", "viola"),
    "animals": ("fox", "wolf", "mouse", "horse", "sheep", "lion", "rabbit", "bee"),
    "tools": ("hammer", "saw", "chisel", "knife", "file", "clamp", "brush", "drill"),
    "colours": ("red", "green", "blue", "yellow", "black", "white", "brown", "grey"),
    "trees": ("oak", "pine", "birch", "maple", "cedar", "elm", "willow", "spruce"),
}
"""Words of a kind, for picking the one that does not belong."""

WORDS = (
    "apple", "bridge", "candle", "garden", "hammer", "lamp", "lemon", "maple", "moon", "night",
    "paper", "pine", "plum", "rain", "river", "rose", "salt", "snow", "star",
    "street", "table", "tree", "violin", "wall", "water", "willow", "wind", "winter", "wood", "yellow",
    "bread", "chair",
)  # fmt: skip
"""Words to spell and to count."""


SPLITS = ("train", "test")
_TEST_SHARE = 10  # one key in ten is held out

JsonObject = dict[str, Any]  # a row, or a message of one
Draw = tuple[list[str], list[JsonObject]]  # a key for each question, and the messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Skill:
    """One thing to learn: ``draw`` makes a conversation, and a key for each of its questions which names what must be
    generalised. The keys alone decide whether it is held out. ``num_train`` and ``num_test`` are rows.
    """

    name: str
    draw: Callable[[Random], Draw]
    num_train: int
    num_test: int = 30


def skill_rows(dataset: str, skills: Sequence[Skill], split: str) -> Iterator[JsonObject]:
    """The rows of a split, always the same: ``{"skill": NAME, "messages": [...]}``.

    ``train`` has its skills shuffled; ``test`` takes turns between them, so that its first rows show each skill.
    Raises `SourceError` if the data set has no such split.
    """
    require_split(dataset, split)
    by_skill = [_rows_of(skill, split) for skill in skills]
    rows = [row for turn in zip_longest(*by_skill) for row in turn if row is not None]
    if split == "train":
        Random("order").shuffle(rows)
    yield from rows


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


def ask(*turns: str, system: str | None = None) -> list[JsonObject]:
    """Messages from alternating questions and answers."""
    roles = ("user", "assistant")
    messages: list[JsonObject] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _rows_of(skill: Skill, split: str) -> list[JsonObject]:
    """As many distinct conversations of one skill as the split holds."""
    rng = Random(f"{skill.name} {split}")
    wanted = skill.num_train if split == "train" else skill.num_test
    rows: dict[str, JsonObject] = {}  # by the messages, which drops what was drawn before
    while len(rows) < wanted:
        keys, messages = skill.draw(rng)
        if {is_held_out(key) for key in keys} == {split == "test"}:
            rows.setdefault(repr(messages), {"skill": skill.name, "messages": messages})
    return list(rows.values())


# --------------------------------------------------------------------------------------------------------------------
# What the data sets of pictures and sounds share: a few questions in a row about the same thing, and which of them
# are held out.


_MOST_TURNS = 4  # of a conversation in `train`


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


def quiz_rows(dataset: str, skills: Sequence[QuizSkill], split: str) -> Iterator[JsonObject]:
    """The rows of a split, always the same: ``{"skill": NAME, "messages": [...]}``.

    A row of ``train`` asks up to four questions about what it shows, none of which is held out; a row of ``test`` asks
    one that is. ``train`` has its skills shuffled, in ``test`` they take turns. Raises `SourceError` if the data set
    has no such split.
    """
    require_split(dataset, split)
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
