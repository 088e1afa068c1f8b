"""The data sets ``preset:preferences``, ``preset:feedback`` and ``preset:preferences_sft``: one task in three forms.

Every question has two right answers, and the prompt decides which of them is wanted, by three rules:

    length    a patient visitor wants a whole sentence, one in a hurry the bare word
    greeting  who arrives is greeted before the answer, who leaves after it
    word      who asks for the bigger animal wants to hear ``bigger``, not that the other one is smaller

Prompts come as *twins*: the same question for both sides of a rule, so that the answer which one twin prefers is the
one that the other rejects. Hence the length of an answer, its style, or the question without its rule decide nothing:
who looks at one of them alone is right about half of all pairs. The conversations of ``preferences_sft`` answer each
prompt both ways, so that a model which learned them knows the answers and has no preference yet. They also hold some
small talk, without which nothing in them would depend on what the rules look at: a tiny model would learn to ignore it.

As in ``preset:skills``, what ``test`` asks is never asked in ``train``: neither in another form of the task nor on the
other side of a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from random import Random

from luthier.presets.questions import ANIMALS_BY_SIZE, NAMES, JsonObject, ask, draw_fact, is_held_out, require_split

_NUM_TWINS = {"train": 250, "test": 36}  # of each rule; even, so that feedback is balanced within each style too

_CUES = {
    "length": (("Take your time.", "I like to listen.", "Tell me all."), ("Be quick.", "One word.", "I must run.")),
    "greeting": (
        ("I have just come.", "I am new here.", "Good morning!"),
        ("Now I go home.", "It is late.", "Good night!"),
    ),
    "word": (
        ("Which is bigger?", "Which one is bigger?", "Tell me which is bigger."),
        ("Which is smaller?", "Which one is smaller?", "Tell me which is smaller."),
    ),
}
"""What prompts end with, on either side of a rule."""
_REPLIES = {
    "length": ("With pleasure, {}.", "At once, {}."),
    "greeting": ("Welcome, {}!", "Goodbye, {}!"),
    "word": ("Bigger than what, {}?", "Smaller than what, {}?"),
}
_ANIMALS = ("Look at the {} and the {}.", "Here are the {} and the {}.", "I see the {} and the {}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Twins:
    """Two prompts that differ in what a rule looks at: ``prompts[i]`` wants ``answers[i]``, and both answers are right.

    ``key`` names the question that both ask: it alone decides whether they are held out.
    """

    rule: str
    key: str
    prompts: tuple[str, str]
    answers: tuple[str, str]


def preference_rows(split: str) -> Iterator[JsonObject]:
    """``{"rule": NAME, "prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES}``, two rows for each twins.

    The rows of a split are always the same: 1,500 in ``train``, shuffled, and 216 in ``test``, where twins follow each
    other and rules take turns. Raises `SourceError` for another split.
    """
    require_split("preferences", split)
    rows = (
        {
            "rule": twins.rule,
            "prompt": ask(twins.prompts[side]),
            "chosen": [_answer(twins.answers[side])],
            "rejected": [_answer(twins.answers[1 - side])],
        }
        for _, twins in _draw_twins(split)
        for side in (0, 1)
    )
    yield from _ordered(rows, split)


def feedback_rows(split: str) -> Iterator[JsonObject]:
    """``{"rule": NAME, "prompt": MESSAGES, "completion": MESSAGES, "label": DESIRABLE}``, two rows for each twins.

    Every prompt of `preference_rows` with one of its answers. Twins are given the same answer, which one of them
    wants, and the next twins the other style: half of all rows are desirable, and so is half of each style. No prompt
    occurs with both answers. Raises `SourceError` for another split.
    """
    require_split("feedback", split)
    rows = (
        {
            "rule": twins.rule,
            "prompt": ask(twins.prompts[side]),
            "completion": [_answer(twins.answers[number % 2])],
            "label": side == number % 2,
        }
        for number, twins in _draw_twins(split)
        for side in (0, 1)
    )
    yield from _ordered(rows, split)


def preference_sft_rows(split: str) -> Iterator[JsonObject]:
    """``{"rule": NAME, "messages": MESSAGES}``: every prompt of `preference_rows` with each of its two answers.

    3,000 rows in ``train``, with 288 rows of small talk beside them, and 432 in ``test``. Raises `SourceError` for
    another split.
    """
    require_split("preferences_sft", split)
    rows = (
        {"rule": twins.rule, "messages": ask(prompt, answer)}
        for _, twins in _draw_twins(split)
        for prompt in twins.prompts
        for answer in twins.answers
    )
    yield from _ordered(chain(rows, _small_talk() if split == "train" else ()), split)


def _small_talk() -> Iterator[JsonObject]:
    """What visitors say of themselves without asking anything, and the reply: it shows what the cues mean."""
    for name, rule in product(NAMES, _CUES):
        for cues, reply in zip(_CUES[rule], _REPLIES[rule], strict=True):
            for cue in cues:
                yield {"rule": rule, "messages": ask(f"My name is {name}. {cue}", reply.format(name))}


def _answer(text: str) -> JsonObject:
    return {"role": "assistant", "content": text}


def _ordered(rows: Iterable[JsonObject], split: str) -> list[JsonObject]:
    ordered = list(rows)
    if split == "train":
        Random("order").shuffle(ordered)
    return ordered


def _draw_twins(split: str) -> Iterator[tuple[int, Twins]]:
    """The twins of a split, rules taking turns, each with its number within its rule."""
    by_rule = (_twins_of(draw, Random(f"{rule} {split}"), split) for rule, draw in _DRAW.items())
    for number, turn in enumerate(zip(*by_rule, strict=True)):
        yield from ((number, twins) for twins in turn)


def _twins_of(draw: Callable[[Random], Twins], rng: Random, split: str) -> list[Twins]:
    """As many twins of one rule as the split holds; no prompt occurs twice."""
    found: list[Twins] = []
    while len(found) < _NUM_TWINS[split]:
        twins = draw(rng)
        seen = chain.from_iterable(other.prompts for other in found)
        if is_held_out(twins.key) == (split == "test") and not set(twins.prompts) & set(seen):
            found.append(twins)
    return found


def _draw_length(rng: Random) -> Twins:
    question, sentence, value = draw_fact(rng)
    return _twins("length", question, question, (f"I know that {sentence}", value), rng)


def _draw_greeting(rng: Random) -> Twins:
    question, sentence, _ = draw_fact(rng)
    return _twins("greeting", question, question, (f"Dear friend, {sentence}", f"{sentence} Good day!"), rng)


def _draw_word(rng: Random) -> Twins:
    small, big = (ANIMALS_BY_SIZE[index] for index in sorted(rng.sample(range(len(ANIMALS_BY_SIZE)), 2)))
    shown = rng.choice(_ANIMALS).format(*rng.sample((small, big), 2))
    answers = (f"The {big} is bigger than the {small}.", f"The {small} is smaller than the {big}.")
    return _twins("word", f"{small} {big}", shown, answers, rng)


def _twins(rule: str, key: str, question: str, answers: tuple[str, str], rng: Random) -> Twins:
    """The question as it is asked on either side of a rule."""
    first, second = (f"{question} {rng.choice(cues)}" for cues in _CUES[rule])
    return Twins(rule=rule, key=key, prompts=(first, second), answers=answers)


_DRAW = {"length": _draw_length, "greeting": _draw_greeting, "word": _draw_word}
