"""The Jinja environment that runs chat templates with tracked strings.

It is the sandbox that transformers uses (same options, globals and filters), with three additions:

- All output and all concatenation goes through `concatenate`, so shadows are joined as texts are.
- `emit` stamps what is printed with the message that is being rendered at that moment (its *scope*). The scope follows
  the template's own loops: each loop announces the object it stands at, and an object that is one of the conversation's
  messages, by identity, is the scope until the loop ends.
- Filters and methods that would lose track of content raise `LostProvenance` instead.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from luthier.rendering.codegen import GenerationBlock, TrackingCodeGenerator
from luthier.rendering.trace import Loop, Trace
from luthier.rendering.tracked import (
    SCAFFOLD,
    LostProvenance,
    Tracked,
    concatenate,
    dump_json,
    holds_tracked,
    shadow_of,
)

# Filters that either leave strings alone or only call string methods, which `Tracked` mirrors.
TRACEABLE_FILTERS = frozenset(
    "abs attr batch capitalize count d default dictsort first float groupby int items join last length list lower map "  # noqa: SIM905
    "max min reject rejectattr replace reverse round safe select selectattr slice sort string sum tojson trim unique "
    "upper wordcount".split()
)


class TrackingEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with provenance. One environment renders one conversation at a time."""

    code_generator_class = TrackingCodeGenerator
    concat = staticmethod(concatenate)
    intercepted_binops = frozenset({"%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self.trace = Trace()
        for name, function in list(self.filters.items()):
            if name not in TRACEABLE_FILTERS:
                self.filters[name] = _untraceable(name, function)
        self.filters["join"] = _join
        _furnish(self)

    # ------------------------------------------------------------------------- called by the compiled template

    def emit(self, value: Any) -> Tracked:
        """Print a value."""
        return self.trace.stamp(self.to_text(value))

    def to_text(self, value: Any) -> str:
        """A value as it is printed. Content inside a list or dict is refused: its Python form is nobody's intent."""
        if isinstance(value, str):
            return value
        if isinstance(value, dict | list | tuple) and holds_tracked(value):
            raise LostProvenance(f"printing a {type(value).__name__} as Python writes it")
        return str(value)

    def open_loop(self) -> None:
        self.trace.loops.append(Loop(self.trace.scope))

    def close_loop(self) -> None:
        self.trace.scope = self.trace.loops.pop().outer_scope

    def enter(self, *items: Any) -> None:
        """A loop stands at these items now."""
        trace, loop = self.trace, self.trace.loops[-1]
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
        if type(owner) is str and holds_tracked(args):
            obj = getattr(Tracked(owner, SCAFFOLD * len(owner)), obj.__name__)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (
            operator == "%"
            and isinstance(left, str)
            and holds_tracked(right if isinstance(right, tuple) else (left, right))
        ):
            raise LostProvenance("%-formatting")
        return super().call_binop(context, operator, left, right)


def plain_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox that chat templates run in everywhere, without provenance."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    _furnish(environment)
    return environment


class TemplateDict:
    """``dict`` for templates, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """``namespace`` for templates, closed to names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name an attribute `self`
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _furnish(environment: ImmutableSandboxedEnvironment) -> None:
    environment.filters["tojson"] = dump_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        raise LostProvenance("join by attribute")
    texts = [item if isinstance(item, str) else str(item) for item in value]
    return Tracked(d, shadow_of(d)).join(texts)


def _untraceable(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if holds_tracked(args) or holds_tracked(kwargs):
            raise LostProvenance(f"the filter {name!r}")
        return function(*args, **kwargs)

    return guarded


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as chat templates expect


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name!r}: names may not begin with an underscore"
        )
