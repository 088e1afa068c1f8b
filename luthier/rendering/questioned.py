"""`Questioned`: a string that tells a trace whatever is asked of it, so that no answer goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

from luthier.rendering.references import has_reference, is_reference
from luthier.rendering.trace import SCAFFOLD, Trace


class Questioned(str):
    """Text with a sketch and owners. Compares, hashes and tests like the plain string it is."""

    __slots__ = ("_owners", "_sketch", "_trace")
    _sketch: str
    _owners: str
    _trace: Trace

    def __new__(cls, text: str, sketch: str, owners: str, trace: Trace) -> Self:
        """Raise AssertionError if sketch and owners differ in length."""
        self = str.__new__(cls, text)
        assert len(sketch) == len(owners), "every character of a sketch has an owner"
        self._sketch, self._owners, self._trace = sketch, owners, trace
        return self

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("tracked strings stay inside one render")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        return bool(self._ask("equal", other, answer=str.__eq__(self, other)))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self._pinned())

    def __lt__(self, other: str) -> bool:
        return bool(self._ask("less", other, answer=str.__lt__(self, other)))

    def __gt__(self, other: str) -> bool:
        return self._swapped_ask("less", other, answer=str.__gt__(self, other))

    def __le__(self, other: str) -> bool:
        return not self > other

    def __ge__(self, other: str) -> bool:
        return not self < other

    def __contains__(self, text: object) -> bool:
        if not isinstance(text, str):
            raise TypeError(f"a text holds no {type(text).__name__}")
        return bool(self._ask("contains", text, answer=str.__contains__(self, text)))

    def __bool__(self) -> bool:
        return bool(self._ask("true", answer=str.__len__(self) > 0))

    def __len__(self) -> int:
        return int(self._ask("length", answer=str.__len__(self)))

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return self._starts("startswith", prefix, bounds)

    def endswith(self, suffix: Any, *bounds: Any) -> bool:
        return self._starts("endswith", suffix, bounds)

    def _starts(self, question: str, affixes: Any, bounds: tuple[Any, ...]) -> bool:
        choices = affixes if isinstance(affixes, tuple) else (affixes,)
        if bounds:
            texts = tuple(plain(choice) for choice in choices)
            return bool(getattr(str, question)(self._pinned(), texts, *bounds))
        return any(self._ask(question, affix, answer=getattr(str, question)(self, affix)) for affix in choices)

    @property
    def _is_own(self) -> bool:
        """Whether it is the template's own text, with nothing of a row."""
        return not has_reference(self._sketch) or self._trace.is_own(self._owners)

    def _ask(self, question: str, *others: str, answer: Any) -> Any:
        self._trace.ask(
            question, self._sketch, *(sketch_and_owners(other, self._trace)[0] for other in others), answer=answer
        )
        return answer

    def _swapped_ask(self, question: str, other: str, answer: bool) -> bool:
        self._trace.ask(question, sketch_and_owners(other, self._trace)[0], self._sketch, answer=answer)
        return answer

    def _pinned(self) -> Self:
        for char in filter(is_reference, dict.fromkeys(self._sketch)):
            self._trace.ask("equal", char, self._trace.fix(self._trace.value(char)), answer=True)
        return self


def sketch_and_owners(text: str, trace: Trace) -> tuple[str, str]:
    """Those of any string: its own, or the template's own text."""
    if isinstance(text, Questioned):
        return text._sketch, text._owners
    if has_reference(text):  # private-use characters of its own
        text = trace.fix(text)
    return text, SCAFFOLD * len(text)


def plain(text: str | None) -> str | None:
    """The text of an argument; where it is a row's, it is pinned."""
    return str.__str__(text._pinned()) if isinstance(text, Questioned) else text


def _looking(name: str) -> Callable[..., Any]:
    def look(self: Questioned, *arguments: Any) -> Any:
        for argument in arguments:
            plain(argument)
        return getattr(str, name)(self._pinned(), *arguments)

    return look


for _name in ("find", "rfind", "index", "rindex", "count", "isalpha", "isalnum", "isascii", "isdecimal",
              "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
              "isupper"):  # fmt: skip
    setattr(Questioned, _name, _looking(_name))
