"""The Jinja environment that runs chat templates with tracked strings.

It is the sandbox that transformers uses (same options, globals and filters), with these additions:

- All output and all concatenation goes through `concatenate`, so sketches are joined as texts are.
- `emit` stamps what is printed with the message that is being rendered at that moment (its *scope*). The scope follows
  the template's own loops: each loop announces the object it stands at, and an object that is one of the conversation's
  messages, by identity, is the scope until the loop ends.
- All text in it is tracked, the template's own too (`own`). Text whose origin is not known cannot be put together
  with other text, nor printed.
- Filters, functions and methods keep track of a row's text, or raise `LostProvenance` where it takes part (`allowed`);
  those that look at it in ways that cannot be repeated pin it.
- What all of it may use up is limited (`luthier.templating`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Undefined, nodes
from jinja2 import filters as jinja_filters
from jinja2 import tests as jinja_tests
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import FilterArgumentError
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, pass_environment
from markupsafe import Markup, escape

from luthier.rendering.trace import Loop, Trace
from luthier.rendering.tracked import (
    Followed,
    Marked,
    RowValue,
    Tracked,
    cased,
    concatenate,
    is_own,
    own_text,
    pin,
    refuse,
    row_text,
    row_value,
    settled,
    traced,
    unmarked,
)
from luthier.rendering.value_text import dump_json, formatted_by, owner_of, printed_by, text_of, written_as
from luthier.templating import BoundedCodeGenerator, TemplateLimits, announce
from luthier.templating.sandbox import SMALL, Sandbox, TemplateDict, TemplateNamespace, furnish, raise_exception
from luthier.templating.sandbox import truncate as cut_short
from luthier.templating.sizes import check_operator

# --------------------------------------------------------------------------------------------------------------------
# How chat templates are compiled, so that their environment sees output, concatenation and loops.
#
# It extends Jinja's code generator at its seams (`visit_*`, `_output_*`); `tests/rendering` holds canaries that fail
# if a release of Jinja moves them.


class TrackingCodeGenerator(BoundedCodeGenerator):
    """Compiles constants, output, ``~`` and loops so that the environment sees them."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.own({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not (isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.getitem(")  # the name is no text
        self.visit(node.node, frame)
        self.write(f", {node.arg.value!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        # `tracked in plain` is a method of the plain string, which would tell nobody
        if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin"):
            super().visit_Compare(node, frame)
            return
        self.write("(not " if node.ops[0].op == "notin" else "(")
        self.write("environment.contains(environment.compared(")
        self.visit(node.ops[0].expr, frame)
        self.write("), environment.compared(")
        self.visit(node.expr, frame)
        self.write(")))")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, _announce("enter", node.target))
        self.writeline("environment.open_loop()")
        CodeGenerator.visit_For(self, node, frame)  # `enter` takes the step
        self.writeline("environment.close_loop()")

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:
        super().visit_Assign(node, frame)
        # `{% set message = messages[i] %}` in a loop over indices stands for `{% for message in messages %}`
        if isinstance(node.target, nodes.Name):
            self.visit(_announce("assign", node.target), frame)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        # `{% autoescape true %}` changes what printing, `~`, macros and filters do
        if not all(isinstance(option.value, nodes.Const) and not option.value.value for option in node.options):
            self.writeline("environment.refuse_escaping()", node)
        super().visit_EvalContextModifier(node, frame)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: object) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible  # nothing is worked out before there is a row
        return node.data

    def _output_const_repr(self, group: Iterable[object]) -> str:
        return f"environment.emit(environment.own({''.join(str(part) for part in group)!r}))"

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: object) -> None:
        self.write("environment.emit(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: object) -> None:
        self.write(f", {node.lineno})")


def _announce(hook: str, target: nodes.Node) -> nodes.ExprStmt:
    targets = [target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name)
    return announce(hook, [name.name for name in targets], target.lineno)


# --------------------------------------------------------------------------------------------------------------------
# What a template may do with a row's text: the lists of everything that keeps track of it.
#
# A filter or function that is in none of these lists works for the template's own text, and raises `LostProvenance`
# as soon as a value takes part that may hold a row's.


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
# Those among them that ask for the type of a value, which a row's does not show (`RowBool`, `RowNone`, `Followed`).
TYPE_TESTS = frozenset("boolean false float integer mapping none number string true".split())  # noqa: SIM905
# Tests that use operators and methods.
MIRRORED_TESTS = frozenset(
    "== != > >= < <= eq equalto ne gt greaterthan ge lt lessthan le".split()  # noqa: SIM905
)
# What may be called with a row's text: it hands on what it is given, or is followed by itself.
CONTAINERS = (list, tuple, dict)
OWNERS_OF_METHODS = (Tracked, *CONTAINERS, Cycler, Joiner, LoopContext, TemplateDict, Extension)
CALLABLES = (Macro, BlockReference, LoopContext, Cycler, Joiner, TemplateDict, Undefined)
TYPES = frozenset({Cycler, Joiner, TemplateNamespace, range})


def may_be_called(function: object) -> bool:
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
        if name in TYPE_TESTS:
            environment.tests[name] = _of_type(function)
        elif name not in KIND_TESTS | MIRRORED_TESTS:
            environment.tests[name] = _pinning(function)
    environment.tests |= {"iterable": _is_iterable, "sequence": _is_sequence, "sameas": _is_same}


_titled = cased(jinja_filters.do_title)


def _text_filters(trace_of: Callable[[], Trace]) -> dict[str, Callable[..., object]]:
    """Filters of text; what is no text is taken as it would be printed."""

    def text(value: object) -> Tracked:
        return text_of(value, trace_of())

    @pass_environment
    def join(environment: Environment, value: Any, d: Any = "", attribute: str | int | None = None) -> Tracked:
        if attribute is not None:
            value = map(jinja_filters.make_attrgetter(environment, attribute), value)
        return concatenate([text(d)], trace_of()).join(map(text, value))

    def tojson(value: object, *args: Any, **kwargs: Any) -> Tracked:
        names = ("ensure_ascii", "indent", "separators", "sort_keys")
        return dump_json(value, trace_of(), **dict(zip(names, args, strict=False)), **kwargs)

    def replace(value: object, old: object, new: object, count: int | None = None) -> Tracked:
        return text(value).replace(text(old), text(new), -1 if count is None else count)

    def format(value: object, *args: object, **kwargs: object) -> Tracked:
        if args and kwargs:
            raise FilterArgumentError("the filter 'format' takes values or named values, not both")
        return printed_by(text(value), kwargs or args, trace_of(), what="the filter 'format'")

    def title(value: object) -> Tracked:
        titled = text(value)
        return settled(jinja_filters.do_title(titled), trace_of()) if titled._is_own else _titled(titled)

    def indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> Tracked:
        newline = own_text("\n", trace_of())
        step = text(width) if isinstance(width, str) else own_text(" " * width, trace_of())
        head, *rest = (text(value) + newline).splitlines()
        return newline.join(
            [step + head if first else head, *(step + line if blank or line else line for line in rest)]
        )

    @pass_environment
    def truncate(
        environment: Sandbox, value: Any, length: int = 255, killwords: Any = False, end: Any = None, leeway: Any = None
    ) -> object:
        end = own_text("...", trace_of()) if end is None else text(end)
        return cut_short(environment, text(value), length, killwords, end, leeway)

    def default(value: object, default_value: object = "", boolean: bool = False) -> object:
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
def _attr(environment: Environment, value: object, name: object) -> object:
    pin(name)
    if isinstance(value, Followed):
        value._use()
    return jinja_filters.do_attr(environment, value, str.__str__(name))


def _for_own_text(name: str, function: Callable[..., object], trace_of: Callable[[], Trace]) -> Callable[..., object]:
    """A function that keeps no track, for the template's own text alone. What it returns is that too."""

    @functools.wraps(function)
    def guarded(*args: object, **kwargs: object) -> object:
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


def _pinning(function: Any) -> Callable[..., object]:
    @functools.wraps(function)
    def looking(*args: object, **kwargs: object) -> object:
        pin([arg for arg in args if not isinstance(arg, Context | Environment | nodes.EvalContext)])
        pin(kwargs)
        return function(*args, **kwargs)

    return looking


def _reading(function: Any, trace_of: Callable[[], Trace]) -> Callable[..., object]:
    pinning = _pinning(function)

    @functools.wraps(function)
    def number(*args: object, **kwargs: object) -> object:
        made = pinning(*args, **kwargs)
        owner = owner_of(args, trace_of())
        return made if owner is None or not isinstance(made, int | float) else row_value(made, owner)

    return number


def _of_type(function: Any) -> Callable[[object], bool]:
    return lambda value: bool(function(value.sample if isinstance(value, Followed) else unmarked(value)))


def _escaped(value: object, trace: Trace) -> Tracked:
    tracked = text_of(value, trace)
    if isinstance(tracked, Marked):
        return tracked
    if tracked._is_own:
        return _as_safe(own_text(str(escape(str.__str__(tracked))), trace), trace)
    return _as_safe(written_as(tracked, "html"), trace)


def _as_safe(tracked: Tracked, trace: Trace) -> Tracked:
    return Marked(str.__str__(tracked), tracked._sketch, tracked._owners, trace)


def _random(_value: object) -> object:
    refuse("the filter 'random', which gives another text each time,")


def _is_iterable(value: object) -> bool:
    return isinstance(value, str) or bool(jinja_tests.test_iterable(value))


def _is_sequence(value: object) -> bool:
    return isinstance(value, str) or bool(jinja_tests.test_sequence(value))


def _is_same(value: object, other: object) -> bool:
    if isinstance(value, str) and isinstance(other, str) and not (is_own(value) and is_own(other)):
        refuse("the test 'sameas'")
    if isinstance(value, Followed) or isinstance(other, Followed):
        return bool(value == other)  # which asks
    return unmarked(value) is unmarked(other)


HIDDEN = ("_block_vars", "_loop_vars")  # what a compiled template adds to every call


class TrackingEnvironment(Sandbox):
    """The sandbox of chat templates, with provenance. One environment renders one conversation at a time."""

    code_generator_class = TrackingCodeGenerator

    def __init__(self, now: datetime, limits: TemplateLimits) -> None:
        super().__init__(limits)
        self.trace = Trace()
        furnish(self, now)
        restrict(self, lambda: self.trace)
        self.tests["in"] = lambda item, container: self.contains(container, item)
        self.seal()

    # ------------------------------------------------------------------------- called by the compiled template

    def own(self, value: Any) -> Any:
        """A text that the template holds, or a variable that it is given: nothing of it is a row's."""
        known = self.trace.literals.get(value) if type(value) is str else None
        if known is not None:
            return known
        return settled(value, self.trace)

    def concat(self, parts: Iterable[object]) -> Tracked:
        """Join what was printed, or stands around ``~``."""
        if isinstance(parts, tuple):
            self.check_join(parts)
        return concatenate(self.collected(text_of(part, self.trace) for part in parts), self.trace)

    def emit(self, value: object, line: int | None = None) -> Tracked:
        """Print a value. ``line`` of the template is None for its own text."""
        text = value if isinstance(value, Tracked) else text_of(self.printed(value), self.trace)
        length = str.__len__(text)
        if length > SMALL:
            self.meter.make(length, "the output")
        if line is not None:
            self.trace.prints.append((line, text))
        owners = self.trace.stamp(text._owners)
        return text if owners is text._owners else Tracked(text, text._sketch, owners, self.trace)

    def contains(self, container: Any, item: Any) -> bool:
        """``item in container``."""
        return item in (traced(container, self.trace) if isinstance(container, str) else container)

    def refuse_escaping(self) -> NoReturn:
        """A block begins in which all that is printed is escaped."""
        refuse("autoescape")

    def open_loop(self) -> None:
        self.trace.loops.append(Loop(self.trace.scope))

    def close_loop(self) -> None:
        self.trace.scope = self.trace.loops.pop().outer_scope

    def enter(self, *items: object) -> None:
        """A loop stands at these items now."""
        trace, loop = self.trace, self.trace.loops[-1]
        self.step()
        trace.scope, loop.assigned, loop.at_message = loop.outer_scope, False, False
        for item in items:
            if id(item) in trace.message_of:
                trace.scope, loop.at_message = trace.message_of[id(item)], True

    def assign(self, item: object) -> None:
        """A variable was set. In a loop over indices the first message taken into a variable is the loop's."""
        loops = self.trace.loops
        if loops and not loops[-1].at_message and not loops[-1].assigned and id(item) in self.trace.message_of:
            self.trace.scope, loops[-1].assigned = self.trace.message_of[id(item)], True

    # -------------------------------------------------------------------------------------- hooks of the sandbox

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls from the template. What keeps no track is called with the template's own text alone."""
        owner = getattr(obj, "__self__", None) if isinstance(obj, types.BuiltinMethodType) else None
        if type(owner) is str:
            obj = getattr(traced(owner, self.trace), obj.__name__)
        if may_be_called(obj):
            if isinstance(obj, TemplateDict):  # the names are the template's
                kwargs = {name if name in HIDDEN else self.own(name): value for name, value in kwargs.items()}
            return super().call(context, obj, *args, **kwargs)
        given = [value for name, value in kwargs.items() if name not in HIDDEN]
        if not (is_own(owner) and is_own(args) and is_own(given)):
            refuse(f"calling {getattr(obj, '__name__', type(obj).__name__)} with text of the row")
        return self.own(super().call(context, obj, *args, **kwargs))

    def getattr(self, obj: object, attribute: str) -> object:
        """``obj.attribute``."""
        return obj._use() if isinstance(obj, Followed) else super().getattr(obj, attribute)

    def getitem(self, obj: object, argument: object) -> object:
        """``obj[argument]``. Where a row's text is looked up, it is pinned."""
        if isinstance(obj, Followed):
            obj._use()
        if isinstance(argument, Tracked):
            pin(argument)
            argument = argument if isinstance(obj, dict) else str.__str__(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """``left operator right``; ``%`` after a text is a format."""
        if operator != "%" or not isinstance(left, str):
            return super().call_binop(context, operator, left, right)
        check_operator(self.meter, operator, left, right)
        return printed_by(left, right, self.trace)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``format`` and ``format_map`` of texts."""
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, Tracked) or value.__name__ not in ("format", "format_map"):
            return super().wrap_str_format(value)
        fields, is_map = SandboxedFormatter(self), value.__name__ == "format_map"

        @functools.wraps(value)  # the name by which it is measured
        def formatted(*args: Any, **kwargs: object) -> str:
            if is_map and (len(args) != 1 or kwargs):
                raise TypeError("format_map() takes exactly one argument")
            given, named = ((), args[0]) if is_map else (args, kwargs)
            return formatted_by(owner, lambda name: fields.get_field(name, given, named)[0], self.trace)

        formatted.keeps_track = True  # type: ignore[attr-defined]
        return formatted
