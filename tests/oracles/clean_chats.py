"""41 conversations without any trick, as data sets have them."""

from __future__ import annotations

from typing import Any

from tests.oracles.chat_rows import CLOCK, WEATHER, Chat, assistant, call, result, system, user

UNICODE = "naïve Ünïcode 日本語 עברית 👩‍🔧 — “quoted” ½"
LOOK = [call("get_weather", 1, place="Cremona")]
MIST = result("14 degrees, mist", name="get_weather", number=1)
BOTH = [call("get_weather", 1, place="Cremona"), call("get_time", 2, zone="CET")]
TIME = result("07:45", name="get_time", number=2)
NESTED = [call("get_weather", 1, place="Cremona", when={"day": 3, "hours": [9, 12.5], "round": True})]


def _plain() -> dict[str, Chat]:
    ask = [user("Name a wood."), assistant("Spruce, from the valley.")]
    back = [user("And one for the back?"), assistant("Maple.\n\nFlamed maple.")]
    glue = [user("Glue?"), assistant("Hide glue, 60 °C.")]
    return {
        "one question": ask,
        "two questions": [*ask, *back],
        "three questions": [*ask, *back, *glue],
        "six questions": [*ask, *back, *glue, *ask, *back, *glue],
        "system": [system("You build violins."), *ask],
        "system, two questions": [system("You build violins."), *ask, *back],
        "system with lines": [system("Rules:\n- be brief\n- be kind\n"), *glue],
        "one word": [user("Yes or no?"), assistant("Yes")],
        "long answer": [user("Tell me all."), assistant("The top is spruce. " * 60)],
        "code": [user("Sort it."), assistant("```python\nxs = sorted(xs)\nprint(xs[0])\n```")],
        "json in the answer": [user("As JSON."), assistant('{"wood": "spruce", "mm": [2.5, 3.0], "ok": true}')],
        "unicode": [user(UNICODE), assistant(UNICODE[::-1].strip())],
        "begins with a line break": [user("Indent it."), assistant("\n    indented()")],
        "ends with a line break": [user("A line."), assistant("A line.\n")],
        "begins with a space": [user("Go on: Spruce"), assistant(" and maple")],
        "markdown": [user("A table."), assistant("| wood | use |\n|---|---|\n| spruce | top |\n\n**Done.**")],
        "the answer repeats the question": [user("spruce"), assistant("spruce")],
        "equal answers": [user("1?"), assistant("same"), user("2?"), assistant("same")],
        "two questions in a row": [user("One."), user("Two."), assistant("Three.")],
        "two answers in a row": [user("One."), assistant("Two."), assistant("Three.")],
        "numbers": [user("6 * 7"), assistant("42")],
        "letters of a template": [user("Which?"), assistant("Use {{ name }} and {% if x %}.")],
        "comparison signs": [user("Which?"), assistant("a < b and b > c, so a[0] != c[1].")],
    }


def _thoughts() -> dict[str, Chat]:
    sums = [user("2 + 2?"), assistant("4", thought="Two and two make four.")]
    more = [user("3 + 3?"), assistant("6", thought="Three and three.")]
    return {
        "a thought": sums,
        "a thought in each turn": [*sums, *more],
        "a thought in the last turn": [user("2 + 2?"), assistant("4"), *more],
        "a thought in the first turn": [*sums, user("3 + 3?"), assistant("6")],
        "a thought of lines": [user("2 + 2?"), assistant("4", thought="First two.\n\nThen two.\nFour.")],
        "a thought, system": [system("Think first."), *sums],
        "thoughts, three turns": [*sums, *more, user("4?"), assistant("8", thought="Twice four.")],
        "a thought with words of the answer": [user("2 + 2?"), assistant("It is 4", thought="It is 4, I think.")],
    }


def _tools() -> dict[str, Chat]:
    ask = [user("What is the weather in Cremona?"), assistant("", calls=LOOK)]
    done = [*ask, MIST, assistant("Mist at 14 degrees.")]
    return {
        "a call": ask,
        "a call, answered": done,
        "a call with words": [user("Weather?"), assistant("I will look.", calls=LOOK)],
        "two calls": [user("Weather and time?"), assistant("", calls=BOTH)],
        "two calls, answered": [user("Both?"), assistant("", calls=BOTH), MIST, TIME, assistant("Mist, and 07:45.")],
        "nested arguments": [user("Weather?"), assistant("", calls=NESTED), MIST, assistant("Mist.")],
        "a call after a call": [
            *ask, MIST, assistant("", calls=[call("get_time", 2, zone="CET")]), TIME, assistant("Mist at 07:45."),
        ],
        "a call in the second turn": [user("Hello."), assistant("Hello."), *done],
        "a question after a call": [*done, user("Thanks."), assistant("You are welcome.")],
        "a thought before a call": [
            user("Weather?"), assistant("", thought="I must look.", calls=LOOK), MIST,
            assistant("Mist.", thought="It says mist."),
        ],
    }  # fmt: skip


def clean_chats() -> dict[str, tuple[Chat, tuple[dict[str, Any], ...]]]:
    """All of them by name, each with the tools on offer."""
    plain = {name: (chat, ()) for name, chat in (_plain() | _thoughts()).items()}
    return plain | {name: (chat, (WEATHER, CLOCK)) for name, chat in _tools().items()}
