"""Guards: what a template asked about the row's strings while it was recorded.

    {% if '</think>' in message.content %}     ->   Guard("contains", (U+F0000, "</think>"), (), False)

A recording stands for every row whose strings give the same answers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from luthier.rendering.references import has_reference, is_reference, quote_of


class Guard(NamedTuple):
    """A question (a name of QUESTIONS), the sketches and further arguments it was asked with, and the answer."""

    question: str
    sketches: tuple[str, ...]
    arguments: tuple[Any, ...]
    answer: Any


def _leading(text: str) -> str:
    return "nothing" if not text else "space" if text[0].isspace() else "other"


QUESTIONS: dict[str, Callable[..., Any]] = {
    "equal": operator.eq,
    "less": operator.lt,
    "contains": operator.contains,
    "startswith": str.startswith,
    "endswith": str.endswith,
    "true": bool,
    "length": len,
    "parts": lambda text, sep, maxsplit: len(text.split(sep, maxsplit)),
    "rparts": lambda text, sep, maxsplit: len(text.rsplit(sep, maxsplit)),
    "blank": lambda text: not text.strip(),
    "leading": _leading,
    "quote": quote_of,
}

Check = Callable[[Sequence[str]], bool]


def compile_guards(guards: Iterable[Guard], index_of: Mapping[str, int]) -> list[Check]:
    """Checks to be run on the values of a row; ``index_of`` says where the value of each reference stands."""
    return [_check(guard, index_of) for guard in guards]


def _check(guard: Guard, index_of: Mapping[str, int]) -> Check:
    ask, arguments, answer = QUESTIONS[guard.question], guard.arguments, guard.answer
    first = guard.sketches[0]
    if len(first) == 1 and is_reference(first) and not any(map(has_reference, guard.sketches[1:])):
        index, constants = index_of[first], (*guard.sketches[1:], *arguments)
        match constants:
            case ():
                return lambda values: ask(values[index]) == answer
            case (constant,):
                return lambda values: ask(values[index], constant) == answer
        return lambda values: ask(values[index], *constants) == answer
    operands = [[index_of[char] if is_reference(char) else char for char in sketch] for sketch in guard.sketches]

    def check(values: Sequence[str]) -> bool:
        texts = ["".join(item if isinstance(item, str) else values[item] for item in operand) for operand in operands]
        return bool(ask(*texts, *arguments) == answer)

    return check
