"""How much an operation of a template would make, worked out before it is begun.

Every operation that can make more than it is given stands here with its rule; all others make as much as they are given
at most. Rules may say too much, never too little:

    'x' | center(10**9)            max(1, 10**9) characters
    content | replace('a', b)      len(content) + how often 'a' stands in it * len(b)
    "%*d" | format(10**9, 1)       the widths that it names, and the numbers that it is given
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.utils import Namespace

from luthier.templating import MAX_BITS, MAX_HEAVY_CHARS, MAX_ITEMS, OverLimit, RenderUsage
from luthier.writing import counted

MAX_DEPTH = 50  # of tuples within tuples: Python hashes them without looking how deep they are
MAX_PRECISION = 1_000  # decimals, and characters of a format for times
WORD = re.compile(r"\S+")
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
DIGITS = re.compile(r"\d+")
PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d*)(?:\.(\d*))?")
BRACES = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
WIDTH_GIVEN = re.compile(r"%[-+ #0]*(?:\d*\.)?\*|\{[^{}]*\{[^{]")  # by an argument
# Filters and methods that give one of the things they are given, look at it without walking through it, or do their
# work item by item later on.
FREE_FILTERS = frozenset(
    "attr count first items last length map random reject rejectattr select selectattr sum".split()  # noqa: SIM905
)
FREE_TESTS = frozenset(
    "boolean callable defined false filter float integer iterable mapping none number sameas "  # noqa: SIM905
    "sequence string test true undefined".split()
)
FREE_METHODS = frozenset(
    "capitalize casefold endswith find get isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric "  # noqa: SIM905
    "isprintable isspace istitle isupper items keys lower lstrip partition removeprefix removesuffix rfind rindex "
    "rpartition rstrip startswith strip swapcase title upper values".split()
)
HEAVY = frozenset("float int pprint striptags title urlize wordwrap".split())  # noqa: SIM905  slow ones
QUICK_ENCODINGS = frozenset("ascii latin-1 latin1 utf-16 utf-32 utf-8 utf16 utf32 utf8 utf_8".split())  # noqa: SIM905


def weigh(*values: object) -> int:
    """Characters and items of values, each as often as it is reached: what printing or comparing them takes.

    Stops at more than `MAX_ITEMS` items, with a number beyond any limit.
    """
    total, items, left = 0, 0, list(values)
    length = str.__len__
    while left:
        value = left.pop()
        if isinstance(value, str):
            total += length(value) + 2
            continue
        if isinstance(value, Namespace):
            value = object.__getattribute__(value, "_Namespace__attrs")
        inside: Iterable[Any]
        names: Mapping[Any, Any] = {}
        if isinstance(value, dict):
            items += 2 * len(value)
            names, inside = value, value.values()
        elif isinstance(value, list | tuple | set | frozenset | MappingView):
            items += len(value)
            inside = value  # type: ignore[assignment]  # all views can be gone through
        else:
            total += len(value) if isinstance(value, bytes | range) else _digits(value)
            continue
        if items > MAX_ITEMS:
            return 10**15
        total += 2
        left.extend(inside)
        try:
            total += sum([length(name) + 2 for name in names])
        except TypeError:  # names that are no strings
            left.extend(names)
    return total + 2 * items


def _digits(value: object) -> int:
    return value.bit_length() // 3 + 1 if isinstance(value, int) else 24


def is_flat(value: object) -> bool:
    """Whether comparing or printing a value can take no longer than its own length."""
    return not isinstance(value, dict | list | tuple | set | frozenset | MappingView | Namespace)


def depth(value: object) -> int:
    """How deep containers stand in each other; `weigh` has found that they are not too many."""
    deepest, left = 1, [(value, 1)]
    while left:
        item, level = left.pop()
        deepest = max(deepest, level)
        inside = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
        left += [(other, level + 1) for other in inside if isinstance(other, dict | list | tuple)]
    return deepest


def check_tuples(values: Iterable[object]) -> None:
    """Raise `OverLimit` if tuples stand in each other too deeply."""
    left, seen = [(value, 0) for value in values if isinstance(value, tuple)], 0
    while left:
        value, level = left.pop()
        seen += 1
        if level > MAX_DEPTH or seen > MAX_ITEMS // 100:
            raise OverLimit(f"tuples stand in tuples, more than {MAX_DEPTH} deep")
        left += [(item, level + 1) for item in value if isinstance(item, tuple)]


# ------------------------------------------------------------------------------------------------------- operators


def check_operator(meter: RenderUsage, operator: str, left: object, right: object) -> None:
    """Raise `OverLimit` if ``left operator right`` would make too much."""
    what = f"the operator {operator}"
    if isinstance(left, int) and isinstance(right, int):
        _check_number(operator, left, right, what)
    elif operator == "+":
        if isinstance(left, str | bytes):
            meter.make(size(left) + size(right), what)
        elif isinstance(left, list | tuple):
            meter.hold(len(left) + size(right), what)
    elif operator == "*":
        many, times = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(times, int) and isinstance(many, str | bytes):
            meter.make(size(many) * times, what)
        elif isinstance(times, int) and isinstance(many, list | tuple):
            meter.hold(len(many) * times, what)
    elif operator == "%" and isinstance(left, str | bytes):
        meter.make(_formatted(left, (right,)), what)


def _check_number(operator: str, left: int, right: int, what: str) -> None:
    bits = left.bit_length() + right.bit_length()
    if operator == "**":
        bits = left.bit_length() * max(right, 1)
    if bits > MAX_BITS:
        raise OverLimit(f"{what} would make a number of more than {MAX_BITS:,} bits")


# --------------------------------------------------------------------------------------------- filters and methods


@dataclass(frozen=True, slots=True)
class TemplateCall:
    """A filter, a method or a function of a template and what it is given; ``value`` is what stands before it."""

    name: str
    value: Any
    arguments: Sequence[Any] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> list[Any]:
        return [*self.arguments, *self.named.values()]

    @property
    def largest(self) -> int:
        return max((abs(number) for number in self.given if isinstance(number, int)), default=0)

    @property
    def longest(self) -> int:
        """The length of the longest thing that is given, be it in a tuple or list: ``separators=(", ", ": ")``."""
        inside = (item for value in self.given if isinstance(value, list | tuple) for item in value)
        return max(map(size, (*self.given, *inside)), default=0)


def check_call(meter: RenderUsage, call: TemplateCall, *, is_method: bool = False) -> None:
    """Raise `OverLimit` if a call would make too much, or take too long."""
    rule = (METHOD_RULES if is_method else FILTER_RULES).get(call.name)
    made = weigh(call.value, *call.given) if rule is None else rule(meter, call)
    if call.name in HEAVY and made > MAX_HEAVY_CHARS:
        raise OverLimit(
            f"{call.name!r} is slow, and was given {counted(made, 'character')}; {MAX_HEAVY_CHARS:,} are allowed"
        )
    meter.make(made, repr(call.name))


def size(value: Any) -> int:
    """The length of a text or list; 0 of anything else. Asks no tracked string."""
    if isinstance(value, str):
        return str.__len__(value)
    return len(value) if isinstance(value, bytes | list | tuple | dict | range | MappingView) else 0


def _padded(_: RenderUsage, call: TemplateCall) -> int:
    return max(weigh(call.value), call.largest) + call.longest


def _indented(_: RenderUsage, call: TemplateCall) -> int:
    text = call.value if isinstance(call.value, str) else ""
    lines = 1 + sum(str.count(text, end) for end in LINE_ENDS)
    return weigh(call.value) + lines * max(call.largest, call.longest, 4)


def _replaced(_: RenderUsage, call: TemplateCall) -> int:
    old = call.arguments[0] if call.arguments else ""
    most = max(map(weigh, call.given), default=0)
    if isinstance(call.value, str) and isinstance(old, str):
        return size(call.value) + str.count(call.value, old) * most
    return (weigh(call.value) + 1) * (1 + most)


def _joined(_: RenderUsage, call: TemplateCall) -> int:
    return weigh(call.value) + (size(call.value) + 1) * call.longest


def _joined_by(_: RenderUsage, call: TemplateCall) -> int:
    items = call.given[0] if call.given else ()
    return weigh(items) + (size(items) + 1) * size(call.value)


def _filled(meter: RenderUsage, call: TemplateCall) -> int:
    meter.hold(size(call.value) + call.largest, repr(call.name))
    return 0


def _rounded(_: RenderUsage, call: TemplateCall) -> int:
    if call.largest > MAX_PRECISION:
        raise OverLimit(f"'round' was asked for {counted(call.largest, 'decimal')}; {MAX_PRECISION:,} are allowed")
    return weigh(call.value)


def _listed(meter: RenderUsage, call: TemplateCall) -> int:
    meter.hold(size(call.value), repr(call.name))
    return 0


def _split(meter: RenderUsage, call: TemplateCall) -> int:
    text, pieces = call.value, size(call.value) // 2 + 1
    if pieces > MAX_ITEMS and isinstance(text, str):
        separator = next((item for item in call.given if isinstance(item, str) and item), None)
        pieces = 1 + (sum(1 for _ in WORD.finditer(text)) if separator is None else str.count(text, separator))
    meter.hold(pieces, repr(call.name))
    return size(text)


def _split_lines(meter: RenderUsage, call: TemplateCall) -> int:
    if isinstance(call.value, str):
        meter.hold(1 + sum(str.count(call.value, end) for end in LINE_ENDS), repr(call.name))
    return size(call.value)


def _as_json(_: RenderUsage, call: TemplateCall) -> int:
    weight, step = weigh(call.value), max(call.largest, call.longest)
    return 6 * weight + weight * (step + 1) * (depth(call.value) if step and weight < MAX_ITEMS else 1)


def _encoded(_: RenderUsage, call: TemplateCall) -> int:
    if all(str.lower(name) in QUICK_ENCODINGS for name in call.given if isinstance(name, str)):
        return 4 * size(call.value)
    if size(call.value) > MAX_PRECISION:
        raise OverLimit(f"an unusual encoding was asked for, of {size(call.value):,} characters")
    return 100 * size(call.value)


def _wrapped(_: RenderUsage, call: TemplateCall) -> int:
    return weigh(call.value) * (1 + call.longest)


def _translated(_: RenderUsage, call: TemplateCall) -> int:
    tables = [item.values() if isinstance(item, dict) else item for item in call.given]
    return size(call.value) * max([1, *(size(text) for table in tables for text in table)])


def _timed(_: RenderUsage, call: TemplateCall) -> int:
    if call.longest > MAX_PRECISION:
        raise OverLimit(f"a time was asked for in {counted(call.longest, 'character')}; {MAX_PRECISION:,} are allowed")
    return MAX_PRECISION


def _invented(_: RenderUsage, call: TemplateCall) -> int:
    numbers = [max(abs(number), 1) for number in call.given if isinstance(number, int)]  # a flag is one too: false is 0
    return 20 * math.prod([5, 100, *numbers])


def _format(_: RenderUsage, call: TemplateCall) -> int:
    return _formatted(call.value, call.given)


FILTER_RULES: Mapping[str, Callable[[RenderUsage, TemplateCall], int]] = {
    "batch": _filled,
    "center": _padded,
    "format": _format,
    "indent": _indented,
    "join": _joined,
    "list": _listed,
    "replace": _replaced,
    "round": _rounded,
    "slice": _filled,
    "tojson": _as_json,
    "wordwrap": _wrapped,
}
METHOD_RULES: Mapping[str, Callable[[RenderUsage, TemplateCall], int]] = {
    "center": _padded,
    "decode": _encoded,
    "encode": _encoded,
    "expandtabs": lambda _, call: size(call.value) * max(call.largest, 8),
    "format": _format,
    "format_map": _format,
    "generate_lorem_ipsum": _invented,
    "join": _joined_by,
    "ljust": _padded,
    "replace": _replaced,
    "rjust": _padded,
    "rsplit": _split,
    "split": _split,
    "splitlines": _split_lines,
    "strftime": _timed,
    "to_bytes": lambda _, call: call.largest,
    "translate": _translated,
    "zfill": _padded,
}


# --------------------------------------------------------------------------------------------------------- formats


def _formatted(text: object, arguments: Sequence[object]) -> int:
    """What ``text % arguments`` or ``text.format(*arguments)`` makes at most."""
    if not isinstance(text, str | bytes):
        return weigh(text, *arguments)
    plain = str.__str__(text) if isinstance(text, str) else text.decode("latin-1")
    fields = plain.count("%") + plain.count("{")
    widths = sum(_number(digits) for match in PERCENT.finditer(plain) for digits in match.groups())
    widths += sum(_number(digits) for match in BRACES.finditer(plain) for digits in DIGITS.findall(match[0]))
    if WIDTH_GIVEN.search(plain):
        widths += fields * max(_numbers(arguments), default=0)
    return len(plain) + max(fields, 1) * weigh(*arguments) + widths


def _number(digits: str | None) -> int:
    return 0 if not digits else int(digits) if len(digits) < 16 else 10**15


def _numbers(arguments: Sequence[object]) -> Iterator[int]:
    left = list(arguments)
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield from map(_number, DIGITS.findall(item))
        elif isinstance(item, int):
            yield abs(item)
        elif isinstance(item, dict | list | tuple):
            left.extend(item.values() if isinstance(item, dict) else item)
