"""Write the preset data sets that are texts: ``luthier/presets/rows``.

    python scripts/write_preset_rows.py [FOLDER]

writes ``NAME.SPLIT.jsonl.gz`` for each of them, by default into the presets themselves; run again, it writes the same
bytes. Rows of pictures and sounds take more room than the code that makes them, and are made when they are read.

``skills`` are ten small skills in OpenAI messages form, learnable from nothing in two minutes. The keys of its
questions name what must be generalised: names to sort, a style for a question, a new way of asking … What ``test`` asks
is never asked in ``train``. The last message of a row is the assistant's: in ``test`` it is the one right answer.

The data sets ``preset:preferences``, ``preset:feedback`` and ``preset:preferences_sft``: one task in three forms.

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

``lookups`` and ``lookups_sft`` are questions that the tool of ``examples/shop.py`` answers, if it is asked rightly.
"""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product, zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple
from zlib import crc32

from luthier.presets import ROWS_FOLDER, SPLITS
from luthier.presets.quizzes import is_held_out
from luthier.writing import JsonObject

_SHOP = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "shop.py"))
COLUMNS, ITEMS, look_up = _SHOP["COLUMNS"], _SHOP["ITEMS"], _SHOP["look_up"]


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


def skill_rows(skills: Sequence[Skill], split: str) -> Iterator[JsonObject]:
    """The rows of a split, always the same: ``{"skill": NAME, "messages": [...]}``.

    ``train`` has its skills shuffled; ``test`` takes turns between them, so that its first rows show each skill.
    """
    by_skill = [_rows_of(skill, split) for skill in skills]
    rows = [row for turn in zip_longest(*by_skill) for row in turn if row is not None]
    if split == "train":
        Random("order").shuffle(rows)
    yield from rows


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
# The two tools of the little world, and conversations that call them: question, call, result, answer.


def _declare(name: str, description: str, **types: str) -> JsonObject:
    """A function declaration as chat templates take it; all parameters are required."""
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": kind} for parameter, kind in types.items()},
        "required": list(types),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _declare("get_weather", "Weather of a village", village="string", day="string"),
    _declare("order_strings", "Order strings", instrument="string", count="integer"),
)

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_RESULTS = (3, 5, 8)  # few numbers, so that a small model sees each of them often enough to learn to copy it
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy")


def tools_for(messages: list[JsonObject]) -> list[JsonObject]:
    """Declarations of the tools that a conversation calls."""
    called = {call["function"]["name"] for message in messages for call in message.get("tool_calls", [])}
    return [tool for tool in TOOLS if tool["function"]["name"] in called]


def draw_tool_use(rng: Random) -> tuple[list[str], list[JsonObject]]:
    """The question as the key, and a conversation that ends with the call (one in three) or with the final answer."""
    question, name, arguments, result, answer = rng.choice((_weather, _order))(rng)
    call = {"name": name, "arguments": json.dumps(arguments)}
    messages: list[JsonObject] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)},
        {"role": "assistant", "content": answer},
    ]
    return [question], messages[:2] if rng.random() < 1 / 3 else messages


def _weather(rng: Random) -> tuple[str, str, JsonObject, JsonObject, str]:
    village, day, sky, degrees = rng.choice(VILLAGES), rng.choice(_DAYS), rng.choice(_SKIES), rng.choice(_RESULTS)
    question = rng.choice(
        [
            "How is the weather in {village} on {day}?",
            "What is the weather on {day} in {village}?",
            "I travel to {village} on {day}. How is the weather?",
        ]
    ).format(village=village, day=day)
    arguments = {"village": village, "day": day}
    return question, "get_weather", arguments, {"sky": sky, "degrees": degrees}, f"It is {sky}, with {degrees} degrees."


def _order(rng: Random) -> tuple[str, str, JsonObject, JsonObject, str]:
    instrument, count, days = rng.choice(INSTRUMENTS), rng.randint(2, 9), rng.choice(_RESULTS)
    question = rng.choice(
        [
            "Please order {count} strings for my {instrument}.",
            "My {instrument} needs {count} new strings.",
            "I need {count} strings for the {instrument}.",
        ]
    ).format(count=count, instrument=instrument)
    arguments = {"instrument": instrument, "count": count}
    return question, "order_strings", arguments, {"days": days}, f"Your strings come in {days} days."


def skills_rows(split: str) -> Iterator[JsonObject]:
    """``{"skill": NAME, "messages": [...], "tools": [...]}`` (tools if any), as `skill_rows` orders them."""
    for row in skill_rows(SKILLS, split):
        tools = tools_for(row["messages"])
        yield row | {"tools": tools} if tools else row


def _draw_facts(rng: Random) -> Draw:
    question, answer, _ = draw_fact(rng)
    return [question], ask(question, answer)


def _draw_style(rng: Random) -> Draw:
    """The same facts, told the way the system message wants them."""
    question, answer, value = draw_fact(rng)
    system, styled = rng.choice(
        [
            ("Answer with one word.", value),
            ("Answer in JSON.", json.dumps({"answer": value})),
            ("Begin each answer with: Dear friend", f"Dear friend, {answer}"),
            ("End each answer with: Good day!", f"{answer} Good day!"),
        ]
    )
    return [f"{system} {question}"], ask(question, styled, system=system)


def _draw_compare(rng: Random) -> Draw:
    small, big = sorted(rng.sample(range(len(ANIMALS_BY_SIZE)), 2))
    word, winner, loser = rng.choice([("bigger", big, small), ("smaller", small, big)])
    first, second = rng.sample((small, big), 2)
    question = rng.choice(["Which is {word}, the {a} or the {b}?", "Tell me which is {word}, the {a} or the {b}."])
    question = question.format(word=word, a=ANIMALS_BY_SIZE[first], b=ANIMALS_BY_SIZE[second])
    return [question], ask(question, f"The {ANIMALS_BY_SIZE[winner]} is {word} than the {ANIMALS_BY_SIZE[loser]}.")


def _draw_odd_one_out(rng: Random) -> Draw:
    kind, other = rng.sample(list(KINDS), 2)
    stranger = rng.choice(KINDS[other])
    words = [*rng.sample(KINDS[kind], 3), stranger]
    rng.shuffle(words)
    question = rng.choice(["Which word does not belong here: {}?", "Find the odd one out: {}."])
    return [" ".join(sorted(words))], ask(
        question.format(", ".join(words)), f"The odd one out is {stranger}. The others are {kind}."
    )


def _draw_pick(rng: Random) -> Draw:
    kinds = rng.sample(list(KINDS), 4)
    words = [rng.choice(KINDS[kind]) for kind in kinds]
    index = rng.randrange(4)
    kind = kinds[index].removesuffix("s")
    article = "an" if kind[0] in "aeiou" else "a"
    question = rng.choice([f"Which of these words is {article} {{}}: {{}}?", "Pick the {} from this list: {}."])
    return [" ".join([kind, *sorted(words)])], ask(
        question.format(kind, ", ".join(words)), f"The {kind} is {words[index]}."
    )


def _draw_spell(rng: Random) -> Draw:
    word = rng.choice(WORDS)
    question = rng.choice(
        [
            "Spell the word {}.",
            "How do you spell {}?",
            "Can you spell {} for me?",
            "Please write {} letter by letter.",
            "What are the letters of {}?",
            "I need the letters of the word {}.",
            "How is {} written?",
            "Letter by letter, what is {}?",
        ]
    ).format(word)
    return [question], ask(question, f"It is spelled {'-'.join(word)}.")


def _draw_sort(rng: Random) -> Draw:
    names = rng.sample(NAMES, 3)
    question = rng.choice(["Sort these names: {}.", "Put these names in order: {}."])
    return [" ".join(sorted(names))], ask(question.format(", ".join(names)), f"In order: {', '.join(sorted(names))}.")


def _draw_recall(rng: Random) -> Draw:
    """Something that the user said of themselves, asked for later; now and then after a question about someone."""
    visitor, drink = rng.choice(NAMES), rng.choice(KINDS["fruits"])
    recall, recalled = rng.choice(
        [
            ("What is my name?", f"Your name is {visitor}."),
            ("Which juice do I like?", f"You like {drink} juice."),
        ]
    )
    greeting = rng.choice(
        ["Hello, my name is {visitor} and I like {drink} juice.", "I like {drink} juice. My name is {visitor}."]
    ).format(visitor=visitor, drink=drink)
    key = f"{visitor} {drink}"
    if rng.random() < 0.5:
        return [key], ask(greeting, f"Welcome, {visitor}!", recall, recalled)
    question, answer, _ = draw_fact(rng)
    return [question, key], ask(greeting, f"Welcome, {visitor}!", question, answer, recall, recalled)


def _draw_count(rng: Random) -> Draw:
    """Counting letters, thought through first; now and then the second count of a conversation."""
    question, thought, answer = _counted(rng)
    keys, messages = [question], ask(question, answer)
    if rng.random() < 0.3:
        earlier, earlier_thought, earlier_answer = _counted(rng)
        keys, messages = [earlier, question], ask(earlier, earlier_answer, question, answer)
        messages[1]["reasoning_content"] = earlier_thought
    messages[-1]["reasoning_content"] = thought
    return keys, messages


def _counted(rng: Random) -> tuple[str, str, str]:
    word = rng.choice(WORDS)
    question = rng.choice(
        [
            "How many letters does {} have?",
            "Count the letters of {}.",
            "How long is the word {}?",
            "What is the number of letters in {}?",
        ]
    ).format(word)
    return question, f"It is spelled {'-'.join(word)}.", f"The word has {len(word)} letters."


SKILLS = (
    Skill(name="facts", draw=_draw_facts, num_train=320),
    Skill(name="style", draw=_draw_style, num_train=1000),
    Skill(name="compare", draw=_draw_compare, num_train=460),
    Skill(name="odd_one_out", draw=_draw_odd_one_out, num_train=1300),
    Skill(name="pick", draw=_draw_pick, num_train=900),
    Skill(name="spell", draw=_draw_spell, num_train=210, num_test=20),
    Skill(name="sort", draw=_draw_sort, num_train=900),
    Skill(name="recall", draw=_draw_recall, num_train=400),
    Skill(name="count", draw=_draw_count, num_train=220, num_test=20),
    Skill(name="tools", draw=draw_tool_use, num_train=450),
)


# --------------------------------------------------------------------------------------------------------------------
# ``lookups`` and ``lookups_sft``: questions that a tool answers, if it is asked rightly


_QUESTIONS = {
    "price": (
        "How much is the {}?", "What does the {} cost?", "Tell me the price of the {}.", "I buy the {}. How much?",
        "Is the {} dear?",
    ),
    "stock": (
        "Is the {} sold out?", "Do we have the {}?", "Tell me the stock of the {}.", "How often is the {} there?",
        "I want to count the {}. How many?",
    ),
}  # fmt: skip
DECLARATION = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What the book of the shop says.",
        "parameters": {
            "type": "object",
            "properties": {"column": {"type": "string"}, "item": {"type": "string"}},
            "required": ["column", "item"],
        },
    },
}


def lookup_rows(split: str) -> Iterator[JsonObject]:
    """``{"messages": [QUESTION, ANSWER]}``; always the same, shuffled."""
    rows = [
        {"messages": [*ask(question), {"role": "assistant", "content": look_up(column, item)}]}
        for column, item, question in _asked()
        if (crc32(item.encode()) % 5 == 0) is (split == "test")
    ]
    Random("lookups").shuffle(rows)
    yield from rows


def lookup_sft_rows(split: str) -> Iterator[JsonObject]:
    """``{"tools": …, "messages": [QUESTION, CALL, RESULT, ANSWER]}``: each question twice, once with each column; and
    ``[QUESTION, COLUMN]`` for each."""
    rng = Random(f"lookups_sft {split}")
    rows = []
    for column, item, question in _asked():
        if (crc32(f"{item} {column}".encode()) % 5 == 0) is not (split == "test"):
            continue
        for called in COLUMNS:
            rows.append(ask(question) + _call_and_answer(called, item, str(rng.randrange(10))))
        rows.append(ask(f"{question} Price or stock?", column))
    rng.shuffle(rows)
    yield from ({"tools": [DECLARATION], "messages": messages} for messages in rows)


def _call_and_answer(column: str, item: str, said: str) -> list[JsonObject]:
    arguments = json.dumps({"column": column, "item": item})
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": arguments}}],
        },
        {"role": "tool", "name": "look_up", "content": said},
        {"role": "assistant", "content": said},
    ]


def _asked() -> Iterator[tuple[str, str, str]]:
    """Column, item and question."""
    for item in ITEMS:
        for column in COLUMNS:
            for question in _QUESTIONS[column]:
                yield column, item, question.format(item)


# --------------------------------------------------------------------------------------------------------------------
# ``preferences``, ``feedback`` and ``preferences_sft``: one task in three forms


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
    other and rules take turns.
    """
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
    occurs with both answers.
    """
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

    3,000 rows in ``train``, with 288 rows of small talk beside them, and 432 in ``test``.
    """
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


ROWS: dict[str, Callable[[str], Iterator[JsonObject]]] = {
    "skills": skills_rows,
    "preferences": preference_rows,
    "feedback": feedback_rows,
    "preferences_sft": preference_sft_rows,
    "lookups": lookup_rows,
    "lookups_sft": lookup_sft_rows,
}


def write_rows(folder: Path) -> None:
    """Write each split of each data set. The files have no name and no time in them, so that their bytes stay the
    same."""
    for name, rows in ROWS.items():
        for split in SPLITS:
            text = "".join(f"{json.dumps(row)}\n" for row in rows(split))
            (folder / f"{name}.{split}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS_FOLDER)
