"""`Tracked`: a string that knows, character by character, where it came from.

Beside its text it carries a *shadow*: a string of equal length whose characters are owner numbers (``chr(0)`` is text
of the template itself). Every string operation that a chat template may use is mirrored by the same operation on the
shadow, in C, with no loop over characters:

    Tracked("Hello ", "aaaaaa").strip() + "!"   ->   text "Hello!", shadow "aaaaa\\0"

An operation whose outcome cannot be mirrored raises `LostProvenance`; it never returns an untracked string in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, SupportsIndex

SCAFFOLD = "\0"


class LostProvenance(Exception):
    """A template did something to content whose characters can no longer be traced."""


class Tracked(str):
    """Text with a shadow. Compares, hashes and tests like the plain string it is."""

    __slots__ = ("_shadow",)
    _shadow: str

    def __new__(cls, text: str, shadow: str) -> Tracked:
        """Raise AssertionError if text and shadow differ in length."""
        self = str.__new__(cls, text)
        assert str.__len__(self) == len(shadow), "a shadow is as long as its text"
        self._shadow = shadow
        return self

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("tracked strings stay inside one render")

    # ------------------------------------------------------------------------------------------ concatenation

    def __add__(self, other: str) -> Tracked:
        if not isinstance(other, str):
            return NotImplemented
        return Tracked(str.__add__(self, other), self._shadow + shadow_of(other))

    def __radd__(self, other: str) -> Tracked:
        if not isinstance(other, str):
            return NotImplemented
        return Tracked(str.__add__(other, self), shadow_of(other) + self._shadow)

    def __mul__(self, count: SupportsIndex) -> Tracked:
        return Tracked(str.__mul__(self, count), self._shadow * count)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> Tracked:
        parts = [part if isinstance(part, str) else _refuse("join of something that is no string") for part in parts]
        return Tracked(str.join(self, parts), self._shadow.join(map(shadow_of, parts)))

    # ------------------------------------------------------------------------------------------------ slicing

    def __getitem__(self, key: SupportsIndex | slice) -> Tracked:
        return Tracked(str.__getitem__(self, key), self._shadow[key])

    def __iter__(self) -> Iterator[Tracked]:
        return (Tracked(char, shadow) for char, shadow in zip(str.__iter__(self), self._shadow, strict=True))

    def strip(self, chars: str | None = None, /) -> Tracked:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Tracked:
        text = str.lstrip(self, chars)
        return self if len(text) == len(self) else Tracked(text, self._shadow[len(self) - len(text) :])

    def rstrip(self, chars: str | None = None, /) -> Tracked:
        text = str.rstrip(self, chars)
        return self if len(text) == len(self) else Tracked(text, self._shadow[: len(text)])

    def removeprefix(self, prefix: str, /) -> Tracked:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Tracked:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    # ---------------------------------------------------------------------------------------------- splitting

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Tracked]:  # type: ignore[override]
        return self._locate(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Tracked]:  # type: ignore[override]
        return self._locate(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Tracked]:  # type: ignore[override]
        lines, start = [], 0
        for line in str.splitlines(self, keepends=True):
            tracked = Tracked(line, self._shadow[start : start + len(line)])
            lines.append(tracked if keepends else tracked[: len(str.splitlines(line)[0])])
            start += len(line)
        return lines

    def partition(self, sep: str, /) -> tuple[Tracked, Tracked, Tracked]:
        return self._cut_in_three(str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[Tracked, Tracked, Tracked]:
        return self._cut_in_three(str.rpartition(self, sep))

    def _locate(self, parts: list[str], sep: str | None) -> list[Tracked]:
        tracked, position = [], 0
        for part in parts:
            # Splitting at white space leaves gaps of any width; splitting at `sep` leaves exactly `sep`.
            start = str.index(self, part, position) if sep is None else position
            tracked.append(Tracked(part, self._shadow[start : start + len(part)]))
            position = start + len(part) + (0 if sep is None else len(sep))
        return tracked

    def _cut_in_three(self, parts: tuple[str, str, str]) -> tuple[Tracked, Tracked, Tracked]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:first], self[first:second], self[second:]

    # ---------------------------------------------------------------------------------------------- replacing

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Tracked:
        if old == "":
            _refuse("replace of the empty string")
        if old not in self:
            return self
        replacement = new if isinstance(new, Tracked) else Tracked(new, SCAFFOLD * len(new))
        return replacement.join(self.split(old, count))

    def lower(self) -> Tracked:
        return self._case(str.lower)

    def upper(self) -> Tracked:
        return self._case(str.upper)

    def capitalize(self) -> Tracked:
        return self._case(str.capitalize)

    def title(self) -> Tracked:
        return self._case(str.title)

    def swapcase(self) -> Tracked:
        return self._case(str.swapcase)

    def casefold(self) -> Tracked:
        return self._case(str.casefold)

    def _case(self, change: Callable[[str], str]) -> Tracked:
        text = change(self)
        if len(text) != len(self):  # 'ß'.upper() is 'SS'
            _refuse("change of case that changes the length")
        return Tracked(text, self._shadow)

    # --------------------------------------------------------------------------------- what cannot be mirrored

    def __mod__(self, _: Any) -> NoReturn:
        _refuse("%-formatting")

    def __rmod__(self, _: Any) -> NoReturn:
        _refuse("%-formatting")

    def __format__(self, _: str) -> NoReturn:
        _refuse("str.format")

    def format(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("str.format")

    def format_map(self, *_: Any) -> NoReturn:
        _refuse("str.format_map")

    def center(self, *_: Any) -> NoReturn:
        _refuse("str.center")

    def ljust(self, *_: Any) -> NoReturn:
        _refuse("str.ljust")

    def rjust(self, *_: Any) -> NoReturn:
        _refuse("str.rjust")

    def zfill(self, *_: Any) -> NoReturn:
        _refuse("str.zfill")

    def expandtabs(self, *_: Any) -> NoReturn:
        _refuse("str.expandtabs")

    def translate(self, *_: Any) -> NoReturn:
        _refuse("str.translate")


def shadow_of(text: str) -> str:
    """The shadow of any string: its own, or that of the template's own text."""
    return text._shadow if isinstance(text, Tracked) else SCAFFOLD * len(text)


def plain(text: str) -> str:
    """The text without its shadow, as an exact ``str``."""
    return str.__str__(text)


def concatenate(parts: Iterable[str]) -> Tracked:
    """Join strings, tracked or not; in a template all output goes through here."""
    parts = list(parts)
    return Tracked("".join(parts), "".join(map(shadow_of, parts)))


def holds_tracked(value: Any) -> bool:
    """Whether a value is, or holds, a tracked string."""
    match value:
        case Tracked():
            return True
        case dict():
            return any(holds_tracked(item) for pair in value.items() for item in pair)
        case list() | tuple():
            return any(map(holds_tracked, value))
        case _:
            return False


def dump_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``json.dumps`` that keeps the owners of keys and values; equal to it character for character."""
    if not holds_tracked(value):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    item, key = separators or ("," if indent is not None else ", ", ": ")
    step = " " * indent if isinstance(indent, int) else indent
    return concatenate(_JsonWriter(ensure_ascii, step, item, key, sort_keys).write(value, "\n"))


class _JsonWriter:
    def __init__(self, ensure_ascii: bool, step: str | None, item: str, key: str, sort_keys: bool) -> None:
        self.ensure_ascii, self.step, self.item, self.key, self.sort_keys = ensure_ascii, step, item, key, sort_keys

    def write(self, value: Any, newline: str) -> Iterator[str]:
        match value:
            case Tracked():
                yield self._string(value)
            case Mapping() if value:
                pairs = sorted(value.items()) if self.sort_keys else value.items()
                yield from self._block("{}", newline, [(self._key(name), item) for name, item in pairs])
            case list() | tuple() if value:
                yield from self._block("[]", newline, [(None, item) for item in value])
            case _:
                yield json.dumps(value, ensure_ascii=self.ensure_ascii)

    def _block(self, brackets: str, newline: str, items: list[tuple[str | None, Any]]) -> Iterator[str]:
        inner = newline + self.step if self.step is not None else ""
        yield brackets[0] + inner
        for index, (name, item) in enumerate(items):
            if index:
                yield self.item + inner
            if name is not None:
                yield name
                yield self.key
            yield from self.write(item, inner)
        yield (newline if self.step is not None else "") + brackets[1]

    def _key(self, name: Any) -> str:
        if isinstance(name, Tracked):
            return self._string(name)
        text = json.dumps({name: 0}, ensure_ascii=self.ensure_ascii)  # 1 -> "1", true -> "true", as json does it
        return text[1 : text.rindex(":")]

    def _string(self, text: Tracked) -> Tracked:
        pieces: list[str] = ['"']
        for start, stop in runs(text._shadow):
            escaped = json.dumps(plain(text)[start:stop], ensure_ascii=self.ensure_ascii)[1:-1]
            pieces.append(Tracked(escaped, text._shadow[start] * len(escaped)))
        return concatenate([*pieces, '"'])


def runs(shadow: str) -> Iterator[tuple[int, int]]:
    """Spans of equal characters: ``"aab"`` -> ``(0, 2), (2, 3)``."""
    return (match.span() for match in _RUN.finditer(shadow))


_RUN = re.compile(r"(.)\1*", re.DOTALL)


def _refuse(what: str) -> NoReturn:
    raise LostProvenance(what)
