"""The data set ``preset:skills``: ten small skills in OpenAI messages form, learnable from nothing in two minutes.

The keys of its questions name what must be generalised: names to sort, a style for a question, a new way of asking …
What ``test`` asks is never asked in ``train``. The last message of a row is the assistant's: in ``test`` it is the one
right answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from zlib import crc32

from luthier.presets.questions import (
    ANIMALS_BY_SIZE,
    INSTRUMENTS,
    KINDS,
    NAMES,
    VILLAGES,
    WORDS,
    Draw,
    JsonObject,
    Skill,
    ask,
    draw_fact,
    require_split,
    skill_rows,
)

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
    """``{"skill": NAME, "messages": [...], "tools": [...]}`` (tools if any), as `skill_rows` orders them.

    Raises `SourceError` for another split.
    """
    for row in skill_rows("skills", SKILLS, split):
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


# --- The data sets ``preset:lookups`` and ``preset:lookups_sft``: questions that a tool answers, if it is asked rightly


COLUMNS = ("price", "stock")
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
_ITEMS = (
    "lamp", "chair", "table", "spoon", "knife", "mirror", "pillow", "bottle", "candle", "hat", "glove", "ring", "drum",
    "flute", "violin", "rope", "ladder", "wheel", "kite", "nail", "umbrella", "axe", "oven", "jug",
)  # fmt: skip
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


def look_up(column: str, item: str) -> str:
    """What the book of the shop says: a digit, never the same in both columns of an item. Raises ``ValueError`` for
    what it does not have."""
    if column not in COLUMNS:
        raise ValueError(f"there is no column {column!r}")
    if item not in _ITEMS:
        raise ValueError(f"there is no item {item!r}")
    number = crc32(f"{item} digits".encode())
    price = number % 10
    return str(price if column == "price" else (price + 1 + number // 10 % 9) % 10)


def lookup_rows(split: str) -> Iterator[JsonObject]:
    """``{"messages": [QUESTION, ANSWER]}``; always the same, shuffled. Raises `SourceError` for another split."""
    require_split("lookups", split)
    rows = [
        {"messages": [*ask(question), {"role": "assistant", "content": look_up(column, item)}]}
        for column, item, question in _asked()
        if (crc32(item.encode()) % 5 == 0) is (split == "test")
    ]
    Random("lookups").shuffle(rows)
    yield from rows


def lookup_sft_rows(split: str) -> Iterator[JsonObject]:
    """``{"tools": …, "messages": [QUESTION, CALL, RESULT, ANSWER]}``: each question twice, once with each column; and
    ``[QUESTION, COLUMN]`` for each. Raises `SourceError` for another split."""
    require_split("lookups_sft", split)
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
    for item in _ITEMS:
        for column in COLUMNS:
            for question in _QUESTIONS[column]:
                yield column, item, question.format(item)
