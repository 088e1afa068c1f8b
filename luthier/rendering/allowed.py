"""What a template may do with a row's text: the lists of everything that keeps track of it.

A filter or function that is in none of these lists works for the template's own text, and raises `LostProvenance` as
soon as a value takes part that may hold a row's.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, Undefined, nodes
from jinja2 import filters as jinja_filters
from jinja2 import tests as jinja_tests
from jinja2.exceptions import FilterArgumentError
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import safe_range
from jinja2.utils import Cycler, Joiner, pass_environment
from markupsafe import Markup, escape

from luthier.rendering.trace import Trace
from luthier.rendering.tracked import (
    Marked,
    RowValue,
    Tracked,
    concatenate,
    is_own,
    own_text,
    pin,
    refuse,
    row_text,
    row_value,
    settled,
    unmarked,
)
from luthier.rendering.value_text import dump_json, owner_of, printed_by, text_of, written_as
from luthier.templating.plain import TemplateDict, raise_exception
from luthier.templating.sandbox import Sandbox, TemplateNamespace
from luthier.templating.sandbox import truncate as cut_short

# Filters that hand on what they are given, or only use operators and methods, which `Tracked` has with track.
PASSING_FILTERS = frozenset(
    "batch count d default dictsort first groupby items last length list map max min reject rejectattr reverse "  # noqa: SIM905
    "select selectattr slice sort sum unique".split()
)
# Filters that read text and give a number.
READING_FILTERS = frozenset("abs float int round wordcount".split())  # noqa: SIM905
# Tests of the kind of a thing, not of its text.
KIND_TESTS = frozenset(
    "boolean callable defined false filter float integer mapping none number string test true undefined".split()  # noqa: SIM905
)
# Those among them that ask for True, False or None, which a row's are not (`RowBool`, `RowNone`).
CONSTANT_TESTS = frozenset("boolean false integer none true".split())  # noqa: SIM905
# Tests that use operators and methods.
MIRRORED_TESTS = frozenset(
    "== != > >= < <= eq equalto ne gt greaterthan ge lt lessthan le".split()  # noqa: SIM905
)
# What may be called with a row's text: it hands on what it is given, or is followed by itself.
CONTAINERS = (list, tuple, dict)
OWNERS_OF_METHODS = (Tracked, *CONTAINERS, Cycler, Joiner, LoopContext, TemplateDict, Extension)
CALLABLES = (Macro, BlockReference, LoopContext, Cycler, Joiner, TemplateDict, Undefined)
TYPES = frozenset({Cycler, Joiner, TemplateNamespace, range})


def may_be_called(function: Any) -> bool:
    """Whether a function keeps track of text that it is given."""
    if isinstance(function, type):
        return function in TYPES
    if function in (raise_exception, safe_range) or hasattr(function, "keeps_track"):
        return True
    if isinstance(function, types.MethodType | types.BuiltinMethodType):
        return isinstance(function.__self__, OWNERS_OF_METHODS)
    return isinstance(function, CALLABLES)


def restrict(environment: Environment, trace_of: Callable[[], Trace]) -> None:
    """Let the filters and tests of an environment keep track, or refuse. ``trace_of`` gives the run's trace."""
    for name, function in list(environment.filters.items()):
        if name in READING_FILTERS:
            environment.filters[name] = _reading(function, trace_of)
        elif name not in PASSING_FILTERS:
            environment.filters[name] = _for_own_text(f"the filter {name!r}", function, trace_of)
    environment.filters |= _text_filters(trace_of)
    for name, function in list(environment.tests.items()):
        if name in CONSTANT_TESTS:
            environment.tests[name] = _seeing_constants(function)
        elif name not in KIND_TESTS | MIRRORED_TESTS:
            environment.tests[name] = _pinning(function)
    environment.tests |= {"iterable": _is_iterable, "sequence": _is_sequence, "sameas": _is_same}


def _text_filters(trace_of: Callable[[], Trace]) -> dict[str, Callable[..., Any]]:
    """Filters of text; what is no text is taken as it would be printed."""

    def text(value: Any) -> Tracked:
        return text_of(value, trace_of())

    def join(value: Any, d: Any = "", attribute: str | int | None = None) -> Tracked:
        if attribute is not None:
            refuse("join by attribute")
        return concatenate([text(d)], trace_of()).join(map(text, value))

    def tojson(value: Any, *args: Any, **kwargs: Any) -> Tracked:
        names = ("ensure_ascii", "indent", "separators", "sort_keys")
        return dump_json(value, trace_of(), **dict(zip(names, args, strict=False)), **kwargs)

    def replace(value: Any, old: Any, new: Any, count: int | None = None) -> Tracked:
        return text(value).replace(text(old), text(new), -1 if count is None else count)

    def format(value: Any, *args: Any, **kwargs: Any) -> Tracked:
        if args and kwargs:
            raise FilterArgumentError("the filter 'format' takes values or named values, not both")
        return printed_by(text(value), kwargs or args, trace_of(), what="the filter 'format'")

    def title(value: Any) -> Tracked:
        titled = text(value)
        return settled(jinja_filters.do_title(titled), trace_of()) if titled._is_own else titled._case(_title)

    def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Tracked:
        newline = own_text("\n", trace_of())
        step = text(width) if isinstance(width, str) else own_text(" " * width, trace_of())
        head, *rest = (text(value) + newline).splitlines()
        return newline.join(
            [step + head if first else head, *(step + line if blank or line else line for line in rest)]
        )

    @pass_environment
    def truncate(
        environment: Sandbox, value: Any, length: int = 255, killwords: Any = False, end: Any = None, leeway: Any = None
    ) -> Any:
        end = own_text("...", trace_of()) if end is None else text(end)
        return cut_short(environment, text(value), length, killwords, end, leeway)

    def default(value: Any, default_value: Any = "", boolean: bool = False) -> Any:
        return settled(default_value, trace_of()) if isinstance(value, Undefined) or (boolean and not value) else value

    return {
        "string": text,
        "trim": lambda value, chars=None: text(value).strip(chars),
        "lower": lambda value: text(value).lower(),
        "upper": lambda value: text(value).upper(),
        "capitalize": lambda value: text(value).capitalize(),
        "safe": lambda value: _as_safe(text_of(value, trace_of()), trace_of()),
        "e": lambda value: _escaped(value, trace_of()),
        "escape": lambda value: _escaped(value, trace_of()),
        "random": _random,
        "attr": _attr,
        **{f.__name__: f for f in (join, tojson, replace, format, title, indent, truncate, default)},
        "d": default,
    }


@pass_environment
def _attr(environment: Environment, value: Any, name: Any) -> Any:
    pin(name)
    return jinja_filters.do_attr(environment, value, str.__str__(name))


def _for_own_text(name: str, function: Callable[..., Any], trace_of: Callable[[], Trace]) -> Callable[..., Any]:
    """A function that keeps no track, for the template's own text alone. What it returns is that too."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = [arg for arg in args if not isinstance(arg, Context | Environment | nodes.EvalContext)]
        given += kwargs.values()
        numbers = [arg for arg in given if isinstance(arg, RowValue)]
        if not all(is_own(arg) or isinstance(arg, RowValue) for arg in given):
            refuse(name)
        made = function(*map(unmarked, args), **{key: unmarked(value) for key, value in kwargs.items()})
        if not numbers:
            return settled(made, trace_of())
        if not isinstance(made, str):
            refuse(name)
        text = row_text(str.__str__(made), numbers[0].owner, trace_of())
        return _as_safe(text, trace_of()) if isinstance(made, Markup) else text

    return guarded


def _pinning(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def looking(*args: Any, **kwargs: Any) -> Any:
        pin([arg for arg in args if not isinstance(arg, Context | Environment | nodes.EvalContext)])
        pin(kwargs)
        return function(*args, **kwargs)

    return looking


def _reading(function: Any, trace_of: Callable[[], Trace]) -> Callable[..., Any]:
    pinning = _pinning(function)

    @functools.wraps(function)
    def number(*args: Any, **kwargs: Any) -> Any:
        made = pinning(*args, **kwargs)
        owner = owner_of(args, trace_of())
        return made if owner is None or not isinstance(made, int | float) else row_value(made, owner)

    return number


def _seeing_constants(function: Any) -> Callable[[Any], bool]:
    return lambda value: bool(function(unmarked(value)))


def _title(text: str) -> str:
    return jinja_filters.do_title(str.__str__(text))


def _escaped(value: Any, trace: Trace) -> Tracked:
    tracked = text_of(value, trace)
    if isinstance(tracked, Marked):
        return tracked
    if tracked._is_own:
        return _as_safe(own_text(str(escape(str.__str__(tracked))), trace), trace)
    return _as_safe(written_as(tracked, "html"), trace)


def _as_safe(tracked: Tracked, trace: Trace) -> Tracked:
    return Marked(str.__str__(tracked), tracked._sketch, tracked._owners, trace)


def _random(_value: Any) -> Any:
    refuse("the filter 'random', which gives another text each time,")


def _is_iterable(value: Any) -> bool:
    return isinstance(value, str) or bool(jinja_tests.test_iterable(value))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, str) or bool(jinja_tests.test_sequence(value))


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, str) and isinstance(other, str) and not (is_own(value) and is_own(other)):
        refuse("the test 'sameas'")
    return unmarked(value) is unmarked(other)
