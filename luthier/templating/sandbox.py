"""The sandbox that chat templates run in, under limits, and how a template is compiled for it.

Whatever a template does comes through here: operators, what is joined, compared, printed and cut, and every call of a
filter, a test, a method or a function. Each is asked first what it would make (`luthier.templating.sizes`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import FilterArgumentError
from jinja2.ext import loopcontrols
from jinja2.filters import do_truncate, make_attrgetter
from jinja2.runtime import Context, LoopContext, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from luthier.errors import TemplateError
from luthier.templating import (
    DICT_ATTRIBUTES,
    MAX_ITEMS,
    BoundedCodeGenerator,
    GenerationBlock,
    OverLimit,
    RenderUsage,
    TemplateLimits,
    sizes,
)
from luthier.writing import counted

STRING_METHODS = frozenset(
    "endswith lower lstrip partition removeprefix removesuffix replace rpartition rsplit rstrip split splitlines "  # noqa: SIM905
    "startswith strip title upper".split()
)
QUICK_METHODS = STRING_METHODS & sizes.FREE_METHODS
LOOP_ATTRIBUTES = frozenset("depth depth0 first index index0 last length revindex revindex0".split())  # noqa: SIM905
SMALL = 10_000  # characters that are joined without asking
MAX_NESTING = 100  # of expressions and blocks in the source of a template
KEPT = 64  # templates that need not be read again: a refusal tries the named ones, each with every kind of row
MAX_NODES = 20_000  # of them all; the largest template that we know has 1,404, and 22 in each other

# What was read in this process, by source. Whoever is given a tree only looks at it; and the code that Jinja writes is
# the same for all environments of a class, which have the same filters, tests and hooks.
_TREES: dict[str, nodes.Template] = {}
_CODES: dict[tuple[type[Sandbox], str], types.CodeType] = {}


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a meter, which takes no detour where the answer is known: one line asks ten times."""

    code_generator_class = BoundedCodeGenerator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})  # worked out when run, not when read

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols], optimized=False
        )
        self.meter = RenderUsage(limits)
        self.step = self.meter.step  # a loop goes round
        self.filters |= {"sum": _sum, "truncate": truncate}

    def seal(self) -> None:
        """Have the meter look at filters and tests; to be called when there are no more to come."""
        for name, function in list(self.filters.items()):
            self.filters[name] = _metered(self.meter, name, function, is_free=name in sizes.FREE_FILTERS)
        for name, function in list(self.tests.items()):
            if name not in sizes.FREE_TESTS:
                self.tests[name] = _metered(self.meter, name, function)

    def tree(self, source: str) -> nodes.Template:
        """The template as a tree. Raises `TemplateError` with the line if it is no valid Jinja, or too large."""
        limit = self.meter.limits.max_source_chars
        if len(source) > limit:
            raise TemplateError(
                f"the chat template has {counted(len(source), 'character')}; "
                f"template.limits.max_source_chars is {limit:,}",
                hint="if the template is meant to, raise template.limits.max_source_chars",
            )
        tree = _TREES.get(source)
        if tree is None:
            with _reading():
                tree = self.parse(source)
            _check_tree(tree)
            _keep(_TREES, source, tree)
        return tree

    def compiled(self, source: str) -> jinja2.Template:
        """The template, ready to run; `tree` comes first. Raises `TemplateError`."""
        key = type(self), source
        code = _CODES.get(key)
        if code is None:
            with _reading(), warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # of Python, on what Jinja made of `true.x`
                code = self.compile(source)
            _keep(_CODES, key, code)
        return self.template_class.from_code(self, code, self.make_globals(None))

    # ------------------------------------------------------------------------- called by the compiled template

    def concat(self, parts: Iterable[str]) -> str:
        """What was printed, joined."""
        return "".join(self.collected(parts))

    def collected(self, parts: Iterable[str]) -> list[str]:
        """Texts that are about to be joined."""
        kept, chars, next_look = [], 0, SMALL
        for part in parts:
            kept.append(part)
            chars += str.__len__(part)
            if chars > next_look:
                self.meter.make(chars, "the output")
                next_look = chars + SMALL
        return kept

    def joined(self, escapes: bool, parts: tuple[object, ...]) -> str:
        """``one ~ other``."""
        self.check_join(parts)
        return markup_join(parts) if escapes else str_join(parts)

    def added(self, context: Context, terms: tuple[Any, ...]) -> object:
        """``one + other + …``, from left to right."""
        chars = 0
        for term in terms:
            if type(term) is not str:
                break
            chars += len(term)
        else:
            if chars < SMALL:
                return "".join(terms)
        return functools.reduce(lambda left, right: self.call_binop(context, "+", left, right), terms)

    def check_join(self, parts: Iterable[object]) -> None:
        """Raise `OverLimit` if parts are too much together."""
        chars = sum(sizes.size(part) if isinstance(part, str) else sizes.weigh(part) for part in parts)
        if chars > SMALL:
            self.meter.make(chars, "the operator ~")

    def compared(self, value: object) -> object:
        """An operand of a comparison, as it is."""
        kind = type(value)
        if kind is str or kind is bool or kind is int:
            return value
        if not isinstance(value, str) and not sizes.is_flat(value):
            self.meter.make(sizes.weigh(value), "a comparison")
        return value

    def printed(self, value: object) -> object:
        """What is about to be printed, as it is."""
        if not isinstance(value, str):
            self.meter.make(sizes.weigh(value), "printing a value")
        return value

    def cut(self, value: object) -> object:
        """``value[start:stop]``, as it is."""
        if isinstance(value, str):
            self.meter.make(str.__len__(value), "a slice")
        elif isinstance(value, list | tuple):
            self.meter.hold(len(value), "a slice")
        return value

    def held(self, value: Any) -> object:
        """A tuple or dict that the template has just written down, as it is."""
        sizes.check_tuples((value,) if isinstance(value, tuple) else value.values())
        return value

    # -------------------------------------------------------------------------------------- hooks of the sandbox

    def getattr(self, obj: object, attribute: str) -> object:
        """``obj.attribute``: keys of dicts, methods of strings, what loops and namespaces have."""
        if type(obj) is dict:
            if attribute not in DICT_ATTRIBUTES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif type(obj) is LoopContext:
            if attribute in LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif type(obj) is TemplateNamespace:
            if attribute[:1] != "_":
                values = object.__getattribute__(obj, "_Namespace__attrs")
                return values[attribute] if attribute in values else self.undefined(obj=obj, name=attribute)
        elif isinstance(obj, str) and attribute in STRING_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> object:
        """``left operator right``."""
        if operator == "+" or operator == "-":
            if type(left) is int and type(right) is int and -SMALL < left < SMALL and -SMALL < right < SMALL:
                return left + right if operator == "+" else left - right
            are_texts = operator == "+" and isinstance(left, str) and isinstance(right, str)
            if are_texts and str.__len__(left) + str.__len__(right) < SMALL:
                return left + right
        sizes.check_operator(self.meter, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: object) -> object:
        """Calls from the template: of methods, macros and functions."""
        self.meter.step()
        if _is_quick(obj, args, kwargs):
            made = obj(*args)
            return _measured(self.meter, obj.__name__, made) if isinstance(made, str) else made
        if isinstance(obj, Macro | LoopContext):
            return super().call(context, obj, *args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in ("_block_vars", "_loop_vars")}
        args, given = _drained(self.meter, args), dict(zip(given, _drained(self.meter, given.values()), strict=True))
        inner = getattr(obj, "__wrapped__", obj)  # jinja2 wraps str.format, and luthier what reads text
        owner, name = getattr(inner, "__self__", None), getattr(inner, "__name__", type(inner).__name__)
        sizes.check_tuples((*args, *given.values()))
        if name not in sizes.FREE_METHODS or not isinstance(owner, str | dict):
            sizes.check_call(self.meter, sizes.TemplateCall(name, owner, args, given), is_method=True)
        return _measured(self.meter, name, super().call(context, obj, *args, **{**kwargs, **given}))


def _is_quick(obj: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether a call is of a string's own method, with strings alone, and makes no more than it is given."""
    return (
        type(obj) in (types.BuiltinMethodType, types.MethodType)
        and isinstance(obj.__self__, str)
        and obj.__name__ in QUICK_METHODS
        and len(kwargs) == ("_loop_vars" in kwargs) + ("_block_vars" in kwargs)
        and all(isinstance(argument, str) for argument in args)
    )


def _metered(meter: RenderUsage, name: str, function: Any, *, is_free: bool = False) -> Callable[..., object]:
    """A filter or test, asked first what it would make."""
    wanted = getattr(function, "jinja_pass_arg", None)  # an environment, or the like
    first = 0 if wanted is None else 1

    def free(*args: object, **kwargs: object) -> object:
        meter.step()
        return function(*args, **kwargs)

    def metered(*args: object, **kwargs: object) -> object:
        meter.step()
        context, given = args[:first], _drained(meter, args[first:])
        if given:
            sizes.check_call(meter, sizes.TemplateCall(name, given[0], given[1:], kwargs))
        # what gave items one by one still does: `length` and `tojson` take no generator in transformers either
        passed = (iter(each) if each is not own else own for each, own in zip(given, args[first:], strict=True))
        return _measured(meter, name, function(*context, *passed, **kwargs))

    asked = free if is_free else metered
    if wanted is not None:
        asked.jinja_pass_arg = wanted  # type: ignore[attr-defined]
    return asked


def _measured(meter: RenderUsage, name: str, made: object) -> object:
    """What a call made, as it is."""
    if isinstance(made, str):
        meter.make(str.__len__(made), repr(name))
    elif isinstance(made, list):
        meter.hold(len(made), repr(name))
    return made


def _drained(meter: RenderUsage, values: Iterable[object]) -> tuple[Any, ...]:
    """Values with lists in the place of what gives items one by one, so that they can be weighed."""
    return tuple(_drain(meter, value) if isinstance(value, Iterator) else value for value in values)


def _drain(meter: RenderUsage, items: Iterator[object]) -> object:
    if isinstance(items, LoopContext):
        return items
    kept = []
    for item in items:
        kept.append(item)
        meter.step()
        if len(kept) > MAX_ITEMS:
            raise OverLimit(f"a list of more than {MAX_ITEMS:,} items")
    return kept


@pass_environment
def _sum(
    environment: Sandbox, iterable: Iterable[object], attribute: str | int | None = None, start: object = 0
) -> object:
    take: Callable[[Any], Any] = (lambda item: item) if attribute is None else make_attrgetter(environment, attribute)
    total = start
    for item in iterable:
        environment.meter.step()
        value = take(item)
        if isinstance(value, str):
            raise TypeError("sum() can't sum strings")
        sizes.check_operator(environment.meter, "+", total, value)
        total = total + value
    return total


def _keep(read: dict[Any, Any], key: object, value: object) -> None:
    if len(read) >= KEPT:
        read.pop(next(iter(read)), None)
    read[key] = value


@pass_environment
def truncate(
    environment: Sandbox,
    text: str,
    length: int = 255,
    killwords: bool = False,
    end: str = "...",
    leeway: int | None = None,
) -> str:
    """Jinja's filter, which asserts what a template gives it. Raises ``FilterArgumentError`` instead."""
    try:
        return do_truncate(environment, text, length, killwords, end, leeway)
    except AssertionError as error:
        raise FilterArgumentError(str(error)) from error


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"chat template, line {error.lineno}: {error.message}", hint="template.chat_template must be valid Jinja"
        ) from error
    except (RecursionError, MemoryError, SyntaxError, SystemError) as error:  # the last three are Python's compiler's
        raise TemplateError(
            f"chat template: it is nested too deeply to be read ({type(error).__name__})",
            hint=f"at most {MAX_NESTING} expressions and blocks may stand in each other",
        ) from error
    except (ValueError, OverflowError) as error:  # a number of too many digits
        raise TemplateError(f"chat template: it cannot be read: {str(error)[:200]}") from error


def _check_tree(tree: nodes.Template) -> None:
    """Raise `TemplateError` for a template of too many parts, or with too many in each other."""
    left: list[tuple[nodes.Node, int, int]] = [(tree, 0, 1)]
    seen = 0
    while left:
        node, depth, line = left.pop()
        line = node.lineno or line
        seen += 1
        if depth > MAX_NESTING or seen > MAX_NODES:
            what = f"more than {MAX_NESTING} expressions and blocks in each other"
            what = what if depth > MAX_NESTING else f"more than {MAX_NODES:,} expressions and blocks"
            raise TemplateError(f"chat template, line {line}: {what}", hint="no chat template needs so many")
        left += [(child, depth + 1, line) for child in node.iter_child_nodes()]


class TemplateNamespace(Namespace):
    """``namespace`` for templates, closed to names that begin with an underscore."""

    def __init__(*args: object, **kwargs: object) -> None:  # a template may name an attribute `self`
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name!r}: names may not begin with an underscore"
        )


# ---------------------------- The sandbox as transformers furnishes it: the same filters and globals, and no provenance


# What a template may raise: its own words, and Python's where it trips over a row (`1 // 0`, an encoding that is none).
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
MAX_WORDS = 2_000  # characters of what a template says when it refuses a conversation


def plain_environment(now: datetime, limits: TemplateLimits) -> Sandbox:
    """The sandbox that chat templates run in everywhere. ``now`` is the time for it."""
    environment = Sandbox(limits)
    furnish(environment, now)
    environment.seal()
    return environment


def furnish(environment: Sandbox, now: datetime) -> None:
    """Add the filters and globals that transformers adds."""
    environment.filters["tojson"] = _plain_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime  # local time, as chat templates expect
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace


class TemplateDict:
    """``dict`` for templates, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[object, object]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[object, object]:
        return dict.fromkeys(*args, **kwargs)


def _plain_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> NoReturn:
    """What chat templates call to refuse a conversation."""
    raise jinja2.TemplateError(str.__str__(str(message))[:MAX_WORDS])
