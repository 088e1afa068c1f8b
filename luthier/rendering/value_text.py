"""Values as text, with track: ``json.dumps``, Python's ``repr`` and its formats, whose every character has an owner.

Brackets, quotes, numbers and commas of a row's list or dict belong to the row as its strings do.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import groupby
from string import Formatter
from typing import Any, NoReturn

from jinja2 import Undefined

from luthier.rendering.text_references import has_reference, is_reference, quote_of
from luthier.rendering.trace import SCAFFOLD, Trace, plain
from luthier.rendering.tracked import (
    Followed,
    FollowedNumber,
    FollowedTool,
    Marked,
    RowFloat,
    RowInt,
    RowNone,
    Tracked,
    concatenate,
    is_own,
    own_text,
    refuse,
    row_text,
    settled,
    traced,
    unmarked,
)


def text_of(value: object, trace: Trace) -> Tracked:
    """A value as a template prints it. Raises `LostProvenance` for what has no text that could be followed."""
    match value:
        case str():
            return traced(value, trace)
        case RowInt() | RowFloat() | RowNone():
            return row_text(str(value), value.owner, trace)
        case FollowedNumber():
            return value.text
        case list() | tuple() | dict():
            owner = owner_of(value, trace)
            if owner is not None:
                writer = _ReprWriter(trace, owner)
                return writer.gathered(writer.write(value))
            if not is_own(value):
                refuse_to_print(value)
            return own_text(str(settled(value, trace)), trace)
        case _ if isinstance(value, KeysView | ValuesView | ItemsView):
            items = text_of(list(value), trace)
            return concatenate([own_text(f"{type(value).__name__}(", trace), items, own_text(")", trace)], trace)
        case _ if is_own(value):
            return own_text(str(value), trace)
        case _:
            refuse_to_print(value)


def dump_json(
    value: object,
    trace: Trace,
    *,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Tracked:
    """Equal to ``json.dumps`` character for character."""
    indent = plain(indent) if isinstance(indent, str) else indent
    item, key = (plain(text) for text in separators or ("," if indent is not None else ", ", ": "))
    assert item is not None and key is not None
    owner = owner_of(value, trace)
    if owner is None:
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=(item, key), sort_keys=sort_keys)
        return own_text(text, trace)
    step = " " * indent if isinstance(indent, int) else indent
    number = None if sort_keys else trace.tools.get(id(value))  # to sort is to ask
    known = trace.written.get((number, ensure_ascii, step, item, key))
    if known is not None:
        text, sketch = known
        return Tracked(text, sketch, owner * len(sketch), trace)
    writer = _JsonWriter(trace, owner, ensure_ascii=ensure_ascii, step=step, separators=(item, key), sort=sort_keys)
    written = writer.gathered(writer.write(value, "\n"))
    if number is not None and set(written._owners) == {owner}:
        trace.written[number, ensure_ascii, step, item, key] = str.__str__(written), written._sketch
    return written


def refuse_to_print(value: object) -> NoReturn:
    """Refuse a value whose text as Python writes it cannot be followed."""
    refuse(f"printing a {type(value).__name__.removeprefix('Template').lower()} as Python writes it")


def written_as(text: Tracked, *operation: object, owner: str | None = None) -> Tracked:
    """A text changed by an operation that takes it character by character; ``owner`` is whose all of it is."""
    trace = text._trace
    runs = zip(text._sketch, text._owners, strict=True) if owner is None else [(text._sketch, owner)]
    parts = []
    for run, of_run in runs:
        char = run if is_reference(run[:1] or " ") else trace.fix(run)
        derived = trace.derive(char, *operation)
        parts.append(Tracked(trace.value(derived), derived, of_run, trace))
    return parts[0] if len(parts) == 1 else concatenate(parts, trace)


def owner_of(value: object, trace: Trace) -> str | None:
    """Whose a value is; None if all of it is the template's own."""
    found = trace.container_owners.get(id(value))
    if found is not None:
        return found
    match value:
        case Tracked():
            return None if value._is_own else next((o for o in value._owners if not trace.is_own(o)), SCAFFOLD)
        case RowInt() | RowFloat() | RowNone() | Followed():
            return value.owner
        case Mapping():
            return _first_owner((item for pair in value.items() for item in pair), trace)
        case list() | tuple():
            return _first_owner(value, trace)
        case str():
            return None if is_own(value) else SCAFFOLD  # its writer refuses it
        case _:
            return None


def _first_owner(items: Iterable[object], trace: Trace) -> str | None:
    return next((owner for item in items if (owner := owner_of(item, trace)) is not None), None)


class _Writer:
    """Writes a value of which ``owner`` is the owner of all that is not a string of its own."""

    def __init__(self, trace: Trace, owner: str) -> None:
        self.trace, self.owner = trace, owner

    def gathered(self, parts: Iterable[str]) -> Tracked:
        """What was written, in one: strings of the value, which are tracked, and what stands between them."""
        tracked: list[Tracked] = []
        for is_string, run in groupby(parts, key=lambda part: isinstance(part, Tracked)):
            if is_string:
                tracked += [part for part in run if isinstance(part, Tracked)]
            else:
                tracked.append(row_text("".join(run), self.owner, self.trace))
        return concatenate(tracked, self.trace)

    def number(self, number: FollowedNumber) -> Tracked:
        """A number, which belongs to whom the value belongs to."""
        return Tracked(str.__str__(number.text), number.text._sketch, self.owner, self.trace)

    def quoted(self, text: str, quote: str, operation: tuple[object, ...]) -> Iterator[str]:
        """A string between quotes, each of its characters escaped as ``operation`` does it."""
        own = traced(text, self.trace)
        yield quote
        yield written_as(own, *operation, owner=None if has_reference(own._sketch) else self.owner)
        yield quote


class _ReprWriter(_Writer):
    operation = "repr"

    def write(self, value: object) -> Iterator[str]:
        match value:
            case str():
                own = traced(value, self.trace)
                quote = quote_of(str.__str__(own))
                self.trace.ask("quote", own._sketch, answer=quote)
                yield from self.quoted(own, quote, (self.operation, quote))
            case dict():
                yield "{"
                for index, (name, item) in enumerate(value.items()):
                    yield from self._comma(index)
                    yield from self.write(name)
                    yield ": "
                    yield from self.write(item)
                yield "}"
            case list() | tuple():
                yield "[" if isinstance(value, list) else "("
                for index, item in enumerate(value):
                    yield from self._comma(index)
                    yield from self.write(item)
                yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
            case FollowedNumber():
                yield self.number(value)
            case None | bool() | int() | float() | complex() | range() | Undefined() | RowNone():
                yield repr(value)
            case _:
                refuse_to_print(value)

    def _comma(self, index: int) -> Iterator[str]:
        if index:
            yield ", "


class _AsciiWriter(_ReprWriter):
    operation = "ascii"


class _JsonWriter(_Writer):
    def __init__(
        self,
        trace: Trace,
        owner: str,
        *,
        ensure_ascii: bool,
        step: str | None,
        separators: tuple[str, str],
        sort: bool,
    ) -> None:
        super().__init__(trace, owner)
        self.ensure_ascii, self.step, self.sort = ensure_ascii, step, sort
        self.item, self.key = separators

    def write(self, value: object, newline: str) -> Iterator[str]:
        match value:
            case str():
                yield from self.quoted(value, '"', ("json", self.ensure_ascii))
            case Mapping() if value:
                pairs = sorted(value.items()) if self.sort else value.items()
                yield from self._block("{}", newline, pairs)
            case list() | tuple() if value:
                yield from self._block("[]", newline, ((None, item) for item in value))
            case FollowedNumber():
                yield self.number(value)
            case FollowedTool():
                yield self._rewritten(value, newline)
            case _:
                yield json.dumps(unmarked(value), ensure_ascii=self.ensure_ascii)

    def _rewritten(self, tool: FollowedTool, newline: str) -> Tracked:
        if self.sort or tool.owner != self.owner:
            tool._use()
        style = (self.ensure_ascii, self.step, self.item, self.key)
        if style == (False, None, ", ", ": "):
            return tool.text
        return written_as(tool.text, "rewrite", *style, newline)

    def _block(self, brackets: str, newline: str, items: Iterable[tuple[object, object]]) -> Iterator[str]:
        inner = newline + self.step if self.step is not None else ""
        before = brackets[0] + inner
        for name, item in items:
            yield before
            if brackets == "{}":
                yield from self._name(name)
                yield self.key
            yield from self.write(item, inner)
            before = self.item + inner
        yield (newline if self.step is not None else "") + brackets[1]

    def _name(self, name: object) -> Iterator[str]:
        if isinstance(name, str):
            yield from self.quoted(name, '"', ("json", self.ensure_ascii))
        else:
            text = json.dumps(
                {unmarked(name): 0}, ensure_ascii=self.ensure_ascii
            )  # 1 -> "1", true -> "true", as json does it
            yield text[1 : text.rindex(":")]


# ------------------------------------------------------------------------------------------------------------ formats

PERCENT = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?(?P<flags>[-+ #0]*)(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<kind>.)",
    re.DOTALL,
)
# How a text is laid out by ``{:…}``; what else may stand there is for numbers.
LAYOUT = re.compile(r"(?:(?P<fill>.)?(?P<align>[<>^]))?(?P<width>[1-9]\d*)?(?:\.(?P<precision>\d+))?s?", re.DOTALL)


def printed_by(form: str, values: Any, trace: Trace, *, what: str = "the operator %") -> Tracked:
    """``form % values``.

    Raises `LostProvenance` where the format itself is a row's, or ``%a`` would print a row's text.
    """
    form = _own_format(form, trace, what)
    named, rest = isinstance(values, Mapping), iter(values if type(values) is tuple else (values,))

    def number(digits: str | None) -> str:
        return str(int(_next(rest))) if digits == "*" else digits or ""

    parts, end = [], 0
    for match in PERCENT.finditer(form):
        parts.append(own_text(form[end : match.start()], trace))
        end, kind = match.end(), match["kind"]
        if kind == "%":
            parts.append(own_text("%", trace))
            continue
        width = number(match["width"])
        precision = None if match["precision"] is None else number(match["precision"]) or "0"
        value = values[match["key"]] if named and match["key"] is not None else _next(rest)
        spec = f"%{match['flags']}{width}{'' if precision is None else '.' + precision}{kind}"
        made = _by_number(value, functools.partial(_percent, spec), trace)
        if made is None and kind not in "srac":
            refuse(f"{what} with %{kind}")
        if made is None:
            text = _converted(value, kind, trace)
            align = "<" if "-" in match["flags"] or width.startswith("-") else ">"
            made = _laid_out(text, width.lstrip("-"), precision, trace, align=align)
        parts.append(made)
    return concatenate([*parts, own_text(form[end:], trace)], trace)


def formatted_by(form: str, value_of_field: Callable[[str], object], trace: Trace) -> Tracked:
    """``form.format(…)``; ``value_of_field`` looks a field up (``0``, ``name``, ``0.a[b]``).

    Raises `LostProvenance` where the format itself is a row's.
    """
    what = "str.format"
    return _Fields(value_of_field, trace, what).filled(_own_format(form, trace, what))


class _Fields:
    def __init__(self, value_of_field: Callable[[str], object], trace: Trace, what: str) -> None:
        self.value_of_field, self.trace, self.what, self.num_unnamed = value_of_field, trace, what, 0

    def filled(self, form: str) -> Tracked:
        parts: list[Tracked] = []
        for own, name, layout, conversion in Formatter().parse(form):
            parts.append(own_text(own, self.trace))
            if name is not None:
                parts.append(self._field(name, layout or "", conversion))
        return concatenate(parts, self.trace)

    def _field(self, name: str, layout: str, conversion: str | None) -> Tracked:
        if name[:1] in ("", ".", "["):
            name, self.num_unnamed = f"{self.num_unnamed}{name}", self.num_unnamed + 1
        value = self.value_of_field(name)
        layout = _own_format(self.filled(layout), self.trace, self.what)
        if conversion is None:
            made = _by_number(value, lambda number: format(number, layout), self.trace)
            if made is not None:
                return made
        elif conversion not in "sra":
            refuse(f"{self.what} with !{conversion}")
        text = _converted(value, conversion, self.trace)
        match = LAYOUT.fullmatch(layout)
        if match is None or (layout and conversion is None and not isinstance(value, str)):
            refuse(f"{self.what} with {layout!r}")
        return _laid_out(text, match["width"], match["precision"], self.trace, match["fill"], match["align"] or "<")


def repr_of(value: object, trace: Trace) -> Tracked:
    """``repr(value)``."""
    if not isinstance(value, str):
        return text_of(value, trace)
    own = traced(value, trace)
    if own._is_own:
        return own_text(repr(str.__str__(own)), trace)
    writer = _ReprWriter(trace, owner_of(own, trace) or SCAFFOLD)
    return writer.gathered(writer.write(own))


def ascii_of(value: object, trace: Trace) -> Tracked:
    """``ascii(value)``: its repr with all that is not ASCII escaped."""
    owner = owner_of(value, trace)
    if owner is None:
        printed = repr_of(value, trace)
        return own_text(str.__str__(printed).encode("ascii", "backslashreplace").decode("ascii"), trace)
    if not isinstance(value, str | list | tuple | dict):  # a number
        return text_of(value, trace)
    writer = _AsciiWriter(trace, owner)
    return writer.gathered(writer.write(value))


def _converted(value: object, conversion: str | None, trace: Trace) -> Tracked:
    match conversion:
        case "r":
            return repr_of(value, trace)
        case "a":
            return ascii_of(value, trace)
        case _:
            return text_of(value, trace)


def _own_format(form: str, trace: Trace, what: str) -> str:
    """A format as plain text. Only the template may say how its texts are put together."""
    own = traced(form, trace)
    if not own._is_own or isinstance(own, Marked):
        refuse(what)
    return str.__str__(own)


def _percent(spec: str, value: object) -> str:
    return spec % (value,)


def _next(values: Iterator[Any]) -> Any:
    for value in values:
        return value
    raise TypeError("not enough arguments for format string")


def _by_number(value: object, write: Callable[[object], str], trace: Trace) -> Tracked | None:
    """A number of a row, or a value of the template's own, as Python writes it; None for all else."""
    if isinstance(value, RowInt | RowFloat | RowNone):
        return row_text(write(unmarked(value)), value.owner, trace)
    if is_own(value):
        return own_text(write(str.__str__(value) if isinstance(value, str) else value), trace)
    return None


def _laid_out(
    text: Tracked, width: str | None, precision: str | None, trace: Trace, fill: str | None = None, align: str = "<"
) -> Tracked:
    """A text cut to ``precision`` characters, and filled up to ``width``."""
    if precision is not None:
        text = text[: int(precision)]
    missing = int(width) - len(text) if width else 0  # to ask for its length is to note it
    if missing <= 0:
        return text
    before = {"<": 0, ">": missing, "^": missing // 2}[align]
    gap = fill or " "
    return own_text(gap * before, trace) + text + own_text(gap * (missing - before), trace)
