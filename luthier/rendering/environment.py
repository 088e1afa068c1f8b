"""The Jinja environment that runs chat templates with tracked strings.

It is the sandbox that transformers uses (same options, globals and filters), with these additions:

- All output and all concatenation goes through `concatenate`, so sketches are joined as texts are.
- `emit` stamps what is printed with the message that is being rendered at that moment (its *scope*). The scope follows
  the template's own loops: each loop announces the object it stands at, and an object that is one of the conversation's
  messages, by identity, is the scope until the loop ends.
- Filters and methods that would lose track of content raise `LostProvenance` instead; those that look at it in ways
  that cannot be repeated pin it.
- Loops, repetitions and recursion have an end.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import tests as jinja_tests
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from luthier.rendering.codegen import GenerationBlock, TrackingCodeGenerator
from luthier.rendering.json_text import dump_json
from luthier.rendering.sandbox import Sandbox, TemplateNamespace
from luthier.rendering.trace import Loop, Trace
from luthier.rendering.tracked import LostProvenance, Tracked, concatenate, holds_tracked, pin

MAX_ROUNDS = 300_000  # of all loops of one render together
MAX_POWER = 1_000
MAX_REPEATED = 10_000_000  # characters that one `*` may make

# Filters that leave strings alone or only use methods and comparisons, which `Tracked` mirrors.
MIRRORED_FILTERS = frozenset(
    "attr batch capitalize count d default dictsort first groupby items last length list lower map max min reject "  # noqa: SIM905
    "rejectattr replace reverse select selectattr slice sort string trim unique upper".split()
)
# Filters that read text and give a number.
READING_FILTERS = frozenset("abs float int round sum wordcount".split())  # noqa: SIM905
# Tests of the kind of a thing, not of its text.
KIND_TESTS = frozenset(
    "boolean callable defined false filter float integer mapping none number sameas string test true undefined".split()  # noqa: SIM905
)
# Tests that use operators and methods.
MIRRORED_TESTS = frozenset(
    "== != > >= < <= eq equalto ne gt greaterthan ge lt lessthan le lower upper".split()  # noqa: SIM905
)


class EndlessTemplate(jinja2.TemplateError):
    """A template that would not come to an end."""


class TrackingEnvironment(Sandbox):
    """The sandbox of chat templates, with provenance. One environment renders one conversation at a time."""

    code_generator_class = TrackingCodeGenerator
    intercepted_binops = frozenset({"%", "*", "**"})

    def __init__(self, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self.trace = Trace()
        _furnish(self, now)
        for name, function in list(self.filters.items()):
            if name in READING_FILTERS:
                self.filters[name] = _pinning(function)
            elif name not in MIRRORED_FILTERS:
                self.filters[name] = _untraceable(name, function)
        self.globals["strftime_now"] = _pinning(now.strftime)
        self.filters |= {"join": self._join, "tojson": self._tojson, "safe": _safe}
        for name, function in list(self.tests.items()):
            if name not in KIND_TESTS | MIRRORED_TESTS:
                self.tests[name] = _pinning(function)
        self.tests |= {"iterable": _is_iterable, "sequence": _is_sequence, "in": self._is_in}

    # ------------------------------------------------------------------------- called by the compiled template

    def concat(self, parts: Iterable[str]) -> Tracked:
        """Join what was printed."""
        return concatenate(parts, self.trace)

    def emit(self, value: Any) -> Tracked:
        """Print a value."""
        text = concatenate([self.to_text(value)], self.trace)
        return Tracked(text, text._sketch, self.trace.stamp(text._owners), self.trace)

    def to_text(self, value: Any) -> str:
        """A value as it is printed. Content inside a list or dict is refused: its Python form is nobody's intent."""
        if isinstance(value, str):
            return value
        if isinstance(value, dict | list | tuple) and holds_tracked(value):
            raise LostProvenance(f"printing a {type(value).__name__} as Python writes it")
        return str(value)

    def contains(self, container: Any, item: Any) -> bool:
        """``item in container``."""
        if isinstance(container, str) and isinstance(item, Tracked) and not isinstance(container, Tracked):
            container = concatenate([container], self.trace)
        return item in container

    def open_loop(self) -> None:
        self.trace.loops.append(Loop(self.trace.scope))

    def close_loop(self) -> None:
        self.trace.scope = self.trace.loops.pop().outer_scope

    def enter(self, *items: Any) -> None:
        """A loop stands at these items now."""
        trace, loop = self.trace, self.trace.loops[-1]
        trace.rounds += 1
        if trace.rounds > MAX_ROUNDS:
            raise EndlessTemplate(f"its loops run on and on: stopped after {MAX_ROUNDS:,} rounds")
        trace.scope, loop.assigned, loop.at_message = loop.outer_scope, False, False
        for item in items:
            if id(item) in trace.message_of:
                trace.scope, loop.at_message = trace.message_of[id(item)], True

    def assign(self, item: Any) -> None:
        """A variable was set. In a loop over indices the first message taken into a variable is the loop's."""
        loops = self.trace.loops
        if loops and not loops[-1].at_message and not loops[-1].assigned and id(item) in self.trace.message_of:
            self.trace.scope, loops[-1].assigned = self.trace.message_of[id(item)], True

    # -------------------------------------------------------------------------------------- hooks of the sandbox

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls from the template. A method of a plain string given tracked ones is called on a tracked copy."""
        owner = obj.__self__ if isinstance(obj, types.BuiltinMethodType) else None
        if type(owner) is str and (holds_tracked(args) or holds_tracked(kwargs)):
            obj = getattr(concatenate([owner], self.trace), obj.__name__)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "%":
                if isinstance(left, str) and holds_tracked(right if isinstance(right, tuple) else (left, right)):
                    raise LostProvenance("%-formatting")
            case "**":
                if isinstance(right, int) and abs(right) > MAX_POWER:
                    raise jinja2.TemplateError(f"it raises a number to the power {right:,}, which is too much")
            case "*":
                size, times = (left, right) if isinstance(right, int) else (right, left)
                if isinstance(times, int) and isinstance(size, str | list | tuple):
                    length = str.__len__(size) if isinstance(size, str) else len(size)
                    if length * times > MAX_REPEATED:
                        raise jinja2.TemplateError(f"it repeats something {times:,} times, which is too much")
        return super().call_binop(context, operator, left, right)

    # --------------------------------------------------------------------------------------- filters and tests

    def _is_in(self, item: Any, container: Any) -> bool:
        return self.contains(container, item)

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            raise LostProvenance("join by attribute")
        texts = [item if isinstance(item, str) else self.to_text(item) for item in value]
        return concatenate([d], self.trace).join(texts)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return dump_json(
            value, self.trace, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )


def plain_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """The sandbox that chat templates run in everywhere, without provenance. ``now`` is the time for it."""
    environment = _PlainEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    _furnish(environment, now)
    return environment


class _PlainEnvironment(Sandbox):
    intercepted_binops = frozenset({"*", "**"})  # worked out when the template runs, not when it is read


class TemplateDict:
    """``dict`` for templates, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _furnish(environment: ImmutableSandboxedEnvironment, now: datetime) -> None:
    environment.filters["tojson"] = _plain_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime  # local time, as chat templates expect
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace


def _safe(value: Any) -> Any:
    # Nothing is escaped in chat templates, so what is marked as safe is printed as it is.
    return value if isinstance(value, Tracked) else Markup(value)


def _plain_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _is_iterable(value: Any) -> bool:
    return isinstance(value, str) or bool(jinja_tests.test_iterable(value))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, str) or bool(jinja_tests.test_sequence(value))


def _untraceable(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if holds_tracked(args) or holds_tracked(kwargs):
            raise LostProvenance(f"the filter {name!r}")
        return function(*args, **kwargs)

    return guarded


def _pinning(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def looking(*args: Any, **kwargs: Any) -> Any:
        pin(args)
        pin(kwargs)
        return function(*args, **kwargs)

    return looking


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))
