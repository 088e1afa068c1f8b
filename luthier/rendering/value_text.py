"""Values as text, with track: ``json.dumps`` and Python's ``repr``, whose every character has an owner.

Brackets, quotes, numbers and commas of a row's list or dict belong to the row as its strings do.
"""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import groupby
from typing import Any, NoReturn

from jinja2 import Undefined

from luthier.rendering.questioned import plain
from luthier.rendering.references import has_reference, is_reference, quote_of
from luthier.rendering.trace import SCAFFOLD, Trace
from luthier.rendering.tracked import (
    RowFloat,
    RowInt,
    Tracked,
    concatenate,
    is_own,
    own_text,
    refuse,
    row_text,
    settled,
    traced,
)


def text_of(value: Any, trace: Trace) -> Tracked:
    """A value as a template prints it. Raises `LostProvenance` for what has no text that could be followed."""
    match value:
        case str():
            return traced(value, trace)
        case RowInt() | RowFloat():
            return row_text(str(value), value.owner, trace)
        case list() | tuple() | dict():
            owner = _owner(value, trace)
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
    value: Any,
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
    owner = _owner(value, trace)
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


def refuse_to_print(value: Any) -> NoReturn:
    """Refuse a value whose text as Python writes it cannot be followed."""
    refuse(f"printing a {type(value).__name__.removeprefix('Template').lower()} as Python writes it")


def _owner(value: Any, trace: Trace) -> str | None:
    """Whose a value is; None if all of it is the template's own."""
    found = trace.container_owners.get(id(value))
    if found is not None:
        return found
    match value:
        case Tracked():
            return None if value._is_own else next((o for o in value._owners if not trace.is_own(o)), SCAFFOLD)
        case RowInt() | RowFloat():
            return value.owner
        case Mapping():
            return _first_owner((item for pair in value.items() for item in pair), trace)
        case list() | tuple():
            return _first_owner(value, trace)
        case str():
            return None if is_own(value) else SCAFFOLD  # its writer refuses it
        case _:
            return None


def _first_owner(items: Iterable[Any], trace: Trace) -> str | None:
    return next((owner for item in items if (owner := _owner(item, trace)) is not None), None)


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

    def quoted(self, text: str, quote: str, operation: tuple[Any, ...]) -> Iterator[str]:
        """A string between quotes, each of its characters escaped as ``operation`` does it."""
        own = traced(text, self.trace)
        yield quote
        runs = (
            [(own._sketch, self.owner)]
            if not has_reference(own._sketch)
            else zip(own._sketch, own._owners, strict=True)
        )
        for text, owner in runs:
            char = text if is_reference(text[:1] or " ") else self.trace.fix(text)
            derived = self.trace.derive(char, *operation)
            yield Tracked(self.trace.value(derived), derived, owner, self.trace)
        yield quote


class _ReprWriter(_Writer):
    def write(self, value: Any) -> Iterator[str]:
        match value:
            case str():
                own = traced(value, self.trace)
                quote = quote_of(str.__str__(own))
                self.trace.ask("quote", own._sketch, answer=quote)
                yield from self.quoted(own, quote, ("repr", quote))
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
            case None | bool() | int() | float() | complex() | range() | Undefined():
                yield repr(value)
            case _:
                refuse_to_print(value)

    def _comma(self, index: int) -> Iterator[str]:
        if index:
            yield ", "


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

    def write(self, value: Any, newline: str) -> Iterator[str]:
        match value:
            case str():
                yield from self.quoted(value, '"', ("json", self.ensure_ascii))
            case Mapping() if value:
                pairs = sorted(value.items()) if self.sort else value.items()
                yield from self._block("{}", newline, pairs)
            case list() | tuple() if value:
                yield from self._block("[]", newline, ((None, item) for item in value))
            case _:
                yield json.dumps(value, ensure_ascii=self.ensure_ascii)

    def _block(self, brackets: str, newline: str, items: Iterable[tuple[Any, Any]]) -> Iterator[str]:
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

    def _name(self, name: Any) -> Iterator[str]:
        if isinstance(name, str):
            yield from self.quoted(name, '"', ("json", self.ensure_ascii))
        else:
            text = json.dumps({name: 0}, ensure_ascii=self.ensure_ascii)  # 1 -> "1", true -> "true", as json does it
            yield text[1 : text.rindex(":")]
