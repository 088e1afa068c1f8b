"""`Tracked`: a string that knows, character by character, where it came from, and how to come about in another row.

Beside its text it carries a *sketch* (`luthier.rendering.text_references`), in which each string of the row is one
character, and for every character of the sketch its owner. Three things may happen to it in a template:

- It is put together with others, or cut in a way that can be repeated with another row's text (``strip``, ``split``):
  the sketch says so.
- It is tested (``in``, ``==``, truth, length …): the answer is noted in the trace as a guard.
- It is changed in a way that is known character by character (``upper``): its text is *pinned*, that is, noted as a
  guard on the whole text. What comes of it is then fixed.

Any other method of a string raises `LostProvenance` as soon as a row's text takes part. The template's own text is
tracked too (`own_text`), so a plain string in a template is one whose origin nobody knows: `concatenate` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import datetime
from itertools import groupby
from typing import Any, NoReturn, SupportsIndex

from jinja2 import Undefined
from markupsafe import Markup

from luthier.rendering.text_references import has_reference, is_reference
from luthier.rendering.trace import Questioned, Trace, plain, sketch_and_owners


class LostProvenance(Exception):
    """A template did something to content whose characters can no longer be traced."""


def cased(change: Callable[[str], str]) -> Callable[[Tracked], Tracked]:
    """A method that changes the case of a text, as ``change`` does of a plain one."""

    def changed(self: Tracked) -> Tracked:
        text = change(str.__str__(self))
        if str.__len__(text) != str.__len__(self):  # 'ß'.upper() is 'SS'
            refuse("change of case that changes the length")
        return self._fixed(text, self._pinned()._shadow)

    return changed


class Tracked(Questioned):
    """Text with a sketch. Compares, hashes and tests like the plain string it is, and the trace hears of it."""

    __slots__ = ()

    # ------------------------------------------------------------------------------------------ concatenation

    def __add__(self, other: str) -> Tracked:
        return concatenate([self, other], self._trace) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Tracked:
        return concatenate([other, self], self._trace) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> Tracked:
        return Tracked(str.__mul__(self, count), self._sketch * count, self._owners * count, self._trace)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> Tracked:
        pieces: list[str] = []
        for part in parts:
            if not isinstance(part, str):
                refuse("join of something that is no string")
            pieces += [self, part] if pieces else [part]
        return concatenate(pieces, self._trace)

    # ------------------------------------------------------------------------------------------------ slicing

    def __getitem__(self, key: SupportsIndex | slice) -> Tracked:
        if isinstance(key, slice) and self._is_reference:
            return self._derived(str.__getitem__(self, key), "slice", key.start, key.stop, key.step)
        if isinstance(key, int | slice):
            self._pinned()  # first: that there is no such character depends on the text too
        return self._fixed(str.__getitem__(self, key), self._shadow[key])

    def __iter__(self) -> Iterator[Tracked]:
        pairs = zip(str.__iter__(self._pinned()), self._shadow, strict=True)
        return iter([self._fixed(char, owner) for char, owner in pairs])

    def strip(self, chars: str | None = None, /) -> Tracked:
        if self._is_reference:
            return self._derived(str.strip(self, chars), "strip", plain(chars))
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Tracked:
        return self._stripped("lstrip", str.lstrip, chars, first=0)

    def rstrip(self, chars: str | None = None, /) -> Tracked:
        return self._stripped("rstrip", str.rstrip, chars, first=-1)

    def _stripped(self, name: str, strip: Callable[..., str], chars: str | None, *, first: int) -> Tracked:
        """Strip the sketch from one end: whole characters of it go as long as nothing is left of them."""
        chars, trace = plain(chars), self._trace
        text, sketch, owners = strip(self, chars), self._sketch, self._owners
        while sketch:
            char, rest = sketch[first], slice(1, None) if first == 0 else slice(None, -1)
            if is_reference(char):
                derived = trace.derive(char, name, chars)
                left = bool(trace.value(derived))
                if len(sketch) > 1:
                    trace.ask("true", derived, answer=left)
                if left or len(sketch) == 1:
                    sketch = derived + sketch[rest] if first == 0 else sketch[rest] + derived
                    break
            elif strip(char, chars):
                break
            sketch, owners = sketch[rest], owners[rest]
        return Tracked(text, sketch, owners, trace)

    def removeprefix(self, prefix: str, /) -> Tracked:
        return self[str.__len__(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Tracked:
        return self[: -str.__len__(suffix)] if suffix and self.endswith(suffix) else self

    # ---------------------------------------------------------------------------------------------- splitting

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Tracked]:  # type: ignore[override]
        parts = str.split(self, sep, maxsplit)
        return self._parts("split", "parts", parts, plain(sep), int(maxsplit))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Tracked]:  # type: ignore[override]
        parts = str.rsplit(self, sep, maxsplit)
        return self._parts("rsplit", "rparts", parts, plain(sep), int(maxsplit))

    def splitlines(self, keepends: bool = False) -> list[Tracked]:  # type: ignore[override]
        lines, start, shadow = [], 0, self._pinned()._shadow
        for line in str.splitlines(self, keepends=True):
            kept = line if keepends else str.splitlines(line)[0]
            lines.append(self._fixed(kept, shadow[start : start + len(kept)]))
            start += len(line)
        return lines

    def partition(self, sep: str, /) -> tuple[Tracked, Tracked, Tracked]:
        return self._three("partition", str.partition(self, sep), sep)

    def rpartition(self, sep: str, /) -> tuple[Tracked, Tracked, Tracked]:
        return self._three("rpartition", str.rpartition(self, sep), sep)

    def _parts(self, name: str, question: str, parts: list[str], sep: str | None, maxsplit: int) -> list[Tracked]:
        if self._is_reference:
            self._trace.ask(question, self._sketch, arguments=(sep, maxsplit), answer=len(parts))
            return [self._derived(part, name, sep, maxsplit, index) for index, part in enumerate(parts)]
        tracked, position, shadow = [], 0, self._pinned()._shadow
        for part in parts:
            # Splitting at white space leaves gaps of any width; splitting at `sep` leaves exactly `sep`.
            start = str.index(self, part, position) if sep is None else position
            tracked.append(self._fixed(part, shadow[start : start + len(part)]))
            position = start + len(part) + (0 if sep is None else len(sep))
        return tracked

    def _three(self, name: str, parts: tuple[str, str, str], sep: str) -> tuple[Tracked, Tracked, Tracked]:
        separator = plain(sep)
        if self._is_reference:
            first, second, third = (self._derived(part, name, separator, i) for i, part in enumerate(parts))
            return first, second, third
        shadow, one, two = self._pinned()._shadow, len(parts[0]), len(parts[0]) + len(parts[1])
        shadows = (shadow[:one], shadow[one:two], shadow[two:])
        first, second, third = (self._fixed(part, own) for part, own in zip(parts, shadows, strict=True))
        return first, second, third

    # ---------------------------------------------------------------------------------------------- replacing

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Tracked:
        if str.__eq__(old, ""):
            refuse("replace of the empty string")
        if old not in self:
            return self
        whole = self._fixed(str.__str__(self), self._pinned()._shadow)
        return traced(new, self._trace).join(whole.split(plain(old), count))

    lower, upper, casefold = cased(str.lower), cased(str.upper), cased(str.casefold)
    title, capitalize, swapcase = cased(str.title), cased(str.capitalize), cased(str.swapcase)

    # -------------------------------------------------------------------------------------- the shadow of a text

    @property
    def _is_reference(self) -> bool:
        return len(self._sketch) == 1 and is_reference(self._sketch)

    @property
    def _shadow(self) -> str:
        """The owner of each character of the text."""
        pairs = zip(self._sketch, self._owners, strict=True)
        return "".join(owner * len(self._trace.value(char)) for char, owner in pairs)

    def _derived(self, text: str, *operation: object) -> Tracked:
        return Tracked(text, self._trace.derive(self._sketch, *operation), self._owners, self._trace)

    def _fixed(self, text: str, shadow: str) -> Tracked:
        """Text that came of a pinned one, with an owner for each of its characters."""
        sketch, owners, start = "", "", 0
        for owner, run in groupby(shadow):
            length = len(list(run))
            own = text[start : start + length]
            is_scaffold = self._trace.owners[ord(owner)].field is None
            sketch += own if is_scaffold and not has_reference(own) else self._trace.fix(own)
            owners += owner * (len(sketch) - len(owners))
            start += length
        return Tracked(text, sketch, owners, self._trace)


class Marked(Tracked):
    """Text that a template marked as safe. Jinja escapes whatever such text is put together with, so only printing it,
    and asking about it, gives the same as for any other text.
    """

    __slots__ = ()


class RowInt(int):
    """A number of a row. It is printed as the row's text, and so is what comes of it (``n + 1``)."""

    owner: str


class RowFloat(float):
    """A number of a row. It is printed as the row's text, and so is what comes of it (``-x``)."""

    owner: str


class RowBool(RowInt):
    """``True`` or ``False`` of a row, which Python lets nobody mark."""

    def __repr__(self) -> str:
        return repr(bool(self))


class RowNone:
    """``None`` of a row, which Python lets nobody mark."""

    __slots__ = ("owner",)
    owner: str

    def __repr__(self) -> str:
        return repr(None)

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, RowNone)

    def __hash__(self) -> int:
        return hash(None)


class Followed:
    """A number or a tool of a row of which nothing is known but that it is one: ``text`` is how JSON writes it.

    A number can be printed, and a tool written as JSON. Whatever else is done with it depends on which one it is. Then
    `LostProvenance` is raised, and the trace notes it, so that all of it becomes part of the row's shape.
    """

    __slots__ = ("owner", "sample", "text")

    def __init__(self, text: Tracked, sample: object) -> None:
        """``sample`` is one of its type."""
        self.text, self.sample, self.owner = text, sample, text._owners

    def _use(self, *_: object) -> NoReturn:
        self.text._trace.uses_followed = True
        refuse("the use of a number or a tool")


class FollowedNumber(Followed):
    """A number of tool arguments (else `RowInt`, `RowFloat`)."""

    __slots__ = ()


class FollowedTool(Followed):
    """A tool that is a dict."""

    __slots__ = ()
    __getitem__ = __contains__ = __len__ = __iter__ = Followed._use


_USES = "bool eq ne lt le gt ge hash str repr format index int float complex round trunc floor ceil neg pos abs invert"
_OPERATORS = "add sub mul truediv floordiv mod pow divmod matmul and or xor lshift rshift"
for _name in (*_USES.split(), "getattr", *_OPERATORS.split(), *(f"r{_name}" for _name in _OPERATORS.split())):
    setattr(Followed, f"__{_name}__", Followed._use)

RowValue = RowInt | RowFloat | RowNone


def row_value(value: bool | int | float | None, owner: str) -> RowValue:
    """A number, ``True``, ``False`` or ``None`` of a row."""
    made: RowValue
    match value:
        case None:
            made = RowNone()
        case bool():
            made = RowBool(value)
        case int():
            made = RowInt(value)
        case _:
            made = RowFloat(value)
    made.owner = owner
    return made


def unmarked(value: object) -> object:
    """What a `RowValue` stands for; anything else as it is."""
    match value:
        case RowNone():
            return None
        case RowBool():
            return bool(value)
        case RowInt():
            return int(value)
        case RowFloat():
            return float(value)
        case _:
            return value


def _reckoned(kind: type, name: str) -> Callable[..., object]:
    """An operator of numbers, the result of which belongs to whom the number belongs to."""
    plain_operator = getattr(kind, name)

    def reckon(self: RowInt | RowFloat, *others: object) -> object:
        made = plain_operator(self, *others)
        return row_value(made, self.owner) if isinstance(made, int | float) else made

    return reckon


for _kind, _plain_kind in ((RowInt, int), (RowFloat, float)):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _reckoned(_plain_kind, f"__{_name}__"))
        setattr(_kind, f"__r{_name}__", _reckoned(_plain_kind, f"__r{_name}__"))
    for _name in ("__neg__", "__pos__", "__abs__"):
        setattr(_kind, _name, _reckoned(_plain_kind, _name))

# The strings by which a message's dict is read, which are Luthier's own. They are known by identity.
KEYS = ("role", "content", "type", "text", "function", "name", "arguments", "id", "tool_calls", "tool_call_id",
        "thinking", "reasoning_content", "image", "video", "audio")  # fmt: skip
_KEY_IDS = frozenset(map(id, KEYS))


def own_text(text: str, trace: Trace) -> Tracked:
    """Text that is the template's own, or whose every character is (a number that it prints)."""
    known = trace.literals.get(text)
    if known is None:
        known = trace.literals[text] = Tracked(text, *sketch_and_owners(text, trace), trace)
    assert isinstance(known, Tracked)
    return known


def row_text(text: str, owner: str, trace: Trace) -> Tracked:
    """Text that is a row's and the same in all rows of its shape: a number, a bracket of a printed list."""
    return Tracked(text, trace.fix(text), owner, trace)


def traced(text: str, trace: Trace) -> Tracked:
    """A string of a template with its track. Raises `LostProvenance` for one that lost it."""
    if isinstance(text, Tracked):
        return text
    if not text or id(text) in _KEY_IDS:
        return own_text(str.__str__(text), trace)
    refuse("something that does not say where its text came from")


def settled(value: object, trace: Trace) -> Any:
    """What came of values that hold nothing of a row (`is_own`): all strings in it are the template's own."""
    match value:
        case Tracked():
            return value
        case Markup():
            return Marked(str.__str__(value), *sketch_and_owners(str.__str__(value), trace), trace)
        case str():
            return own_text(value, trace)
        case dict():
            return {settled(key, trace): settled(item, trace) for key, item in value.items()}
        case list():
            return [settled(item, trace) for item in value]
        case tuple() if type(value) is tuple:
            return tuple(settled(item, trace) for item in value)
        case _:
            return value


def is_own(value: object) -> bool:
    """Whether a value is known to hold nothing of a row's text."""
    match value:
        case Tracked():
            return value._is_own
        case str():
            return not value or id(value) in _KEY_IDS
        case RowInt() | RowFloat() | RowNone():
            return False
        case None | bool() | int() | float() | complex() | Undefined() | range() | datetime():
            return True
        case dict():
            return all(is_own(item) for pair in value.items() for item in pair)
        case list() | tuple():
            return all(map(is_own, value))
        case _:
            return False


def concatenate(parts: Iterable[str], trace: Trace) -> Tracked:
    """Join strings; in a template all output goes through here. Raises `LostProvenance`."""
    tracked = [traced(part, trace) for part in parts]
    sketch = "".join([part._sketch for part in tracked])
    return Tracked("".join(tracked), sketch, "".join([part._owners for part in tracked]), trace)


def pin(value: object) -> None:
    """Note that all tracked text in a value is looked at in a way that cannot be repeated with another row's.

    Raises `LostProvenance` for an object that may hold text which nobody can find in it (a namespace, a generator).
    """
    match value:
        case Tracked():
            value._pinned()
        case dict():
            for pair in value.items():
                for item in pair:
                    pin(item)
        case list() | tuple() | KeysView() | ValuesView() | ItemsView():
            for item in value:
                pin(item)
        case RowInt() | RowFloat() | RowNone():
            pass
        case _ if not is_own(value):
            refuse(f"looking at the text of a {type(value).__name__.removeprefix('Template').lower()}")


def refuse(what: str) -> NoReturn:
    raise LostProvenance(what)


def _refusing(what: str) -> Callable[..., NoReturn]:
    def method(*_: object, **__: object) -> NoReturn:
        raise LostProvenance(what)

    return method


def _followed(name: str) -> Callable[..., object]:
    """A method of strings: as it is where all takes part is the template's own, followed where `Tracked` can do it."""
    with_track = getattr(Tracked, name) if getattr(Tracked, name) is not getattr(str, name) else None

    def method(self: Tracked, *arguments: object, **named: object) -> object:
        if name not in ("format", "format_map"):  # a width, a count: what it prints is not the number
            arguments = tuple(map(unmarked, arguments))
        if self._is_own and is_own(arguments) and is_own(named):
            return settled(getattr(str, name)(str.__str__(self), *arguments, **named), self._trace)
        if with_track is None:
            raise LostProvenance({"__mod__": "the operator %"}.get(name, f"str.{name}"))
        return with_track(self, *arguments, **named)

    method.__name__ = name
    return method


_METHODS = [_name for _name in dir(str) if not _name.startswith("_") and _name != "maketrans"]
for _name in (*_METHODS, "__mod__", "__format__"):
    setattr(Tracked, _name, _followed(_name))
for _name in ("maketrans", "__rmod__"):
    setattr(Tracked, _name, _refusing(f"str.{_name}"))
for _name in (*_METHODS, "__mod__", "__add__", "__radd__", "__mul__", "__rmul__", "__getitem__", "__iter__"):
    if not _name.startswith(("is", "find", "rfind", "count", "startswith", "endswith")):
        setattr(Marked, _name, _refusing("text that is marked as safe and then used further"))
