"""Jinja as chat templates are run with: transformers' sandbox, under limits of time, steps, memory and text.

It knows nothing of conversations, so that what renders rows and what verifies them can both stand on it. Here is what a
template may use up, and the meter that counts it while it runs; and how templates are compiled so that it can.

A template comes with a model from anywhere, and a few characters of it can ask for more than any machine has. Nothing
that is done in a template is interrupted from outside; instead no single operation is begun that would make too much
(`luthier.templating.sizes`), and between operations the meter looks at the steps, the time and the memory so far.

Steps and sizes are the same on every machine. Time and memory are the last resort: they stop the run, they never
decide what becomes of a row.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

MAX_ITEMS = 1_000_000  # of one list
MAX_BITS = 200_000  # of one whole number
MAX_HEAVY_CHARS = 100_000  # of a text given to what is slow, such as `wordwrap`
STEPS_BETWEEN_LOOKS = 64
CHARS_BETWEEN_LOOKS = 1_000_000
LOOKS_BETWEEN_MEMORY = 32
CHARS_BETWEEN_MEMORY = 8_000_000

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateLimits:
    """What one render of a template may use up; the section ``template.limits`` of a run.

    max_seconds       of processor time
    max_steps         rounds of loops, and calls of macros, filters, tests and methods, together
    max_output_chars  characters of any one text that it makes: its output, or a string on the way
    max_memory_mb     growth of the process's memory
    max_source_chars  characters of the template itself
    """

    max_seconds: float = 3.0
    max_steps: int = 500_000
    max_output_chars: int = 16_000_000
    max_memory_mb: int = 250
    max_source_chars: int = 100_000


_TIME_OF_DAY = re.compile(r"%[-#]?[HIMSpXcTRrfs]")  # in formats of times


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateSettings:
    """Under which circumstances a template runs: the time that it is told (None: the present), and its limits."""

    now: datetime | None = None
    limits: TemplateLimits = field(default_factory=TemplateLimits)

    @classmethod
    def of(cls, now: str | None, limits: Mapping[str, Any]) -> TemplateSettings:
        """From what the section ``template`` says of them."""
        return cls(now=None if now is None else datetime.fromisoformat(now), limits=TemplateLimits(**limits))

    def clock_note(self, source: str, variables: Set[str], given: Set[str]) -> str | None:
        """What to know of a template that has a clock; ``given`` are the run's variables."""
        dates = sorted(name for name in variables - given if "date" in name and name != "strftime_now")
        if "strftime_now" in source and not given & {name for name in variables if "date" in name}:
            day = (self.now or datetime.now()).date().isoformat()
            told = "as template.now says" if self.now is not None else "today; template.now fixes it for later runs"
            if self.now is None and _TIME_OF_DAY.search(source):
                told += ", and the time of day, which is that at which each row was first prepared today"
            return f"the chat template reads the clock: every row is told that it is {day}, {told}"
        if dates:
            return f"the chat template reads {', '.join(dates)}, which nothing gives it; template.kwargs does"
        return None


class OverLimit(jinja2.TemplateError):
    """A template asked for more than it may have. ``key`` is the limit in the section ``template.limits``, if one is
    in the way; ``depends_on_machine`` whether another machine might have finished.
    """

    def __init__(self, what: str, *, key: str | None = None) -> None:
        super().__init__(what)
        self.key = key

    @property
    def depends_on_machine(self) -> bool:
        """Whether it was stopped for its time or memory."""
        return self.key in ("max_seconds", "max_memory_mb")

    @property
    def hint(self) -> str:
        if self.key is None:
            return "no chat template needs that; take another one (template.chat_template)"
        return f"if the template is meant to, raise template.limits.{self.key}; else take another (chat_template)"


class RenderUsage:
    """What one render has used up so far."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self.start()

    def start(self) -> None:
        self.steps = self._looks = self._chars = self._chars_of_memory = 0
        self._began = self._memory = -1.0  # small renders are over before the first look, so they need not know

    def step(self) -> None:
        """One more round of a loop, or one more call. Raises `OverLimit`."""
        self.steps += 1
        if not self.steps % STEPS_BETWEEN_LOOKS:
            self._look()

    def make(self, chars: float, what: str) -> None:
        """``what`` is about to make a text of ``chars`` characters. Raises `OverLimit`."""
        if chars > self.limits.max_output_chars:
            most = self.limits.max_output_chars
            raise OverLimit(f"{what} would make {_number(chars)} characters, and {most:,} are allowed",
                            key="max_output_chars")  # fmt: skip
        self._chars += int(chars)
        if self._chars > CHARS_BETWEEN_LOOKS:
            self._look()

    def hold(self, items: float, what: str) -> None:
        """``what`` is about to make a list of so many items. Raises `OverLimit`."""
        if items > MAX_ITEMS:
            raise OverLimit(f"{what} would make {_number(items)} items, and {MAX_ITEMS:,} are allowed")
        self.make(4 * items, what)

    def _look(self) -> None:
        limits = self.limits
        if self.steps > limits.max_steps:
            raise OverLimit(f"it goes on and on: stopped after {limits.max_steps:,} steps", key="max_steps")
        now = time.thread_time()
        if self._began < 0:
            self._began = now
        seconds = now - self._began
        if seconds > limits.max_seconds:
            raise OverLimit(
                f"it takes too long: stopped after {seconds:.1f} of {limits.max_seconds:g} seconds of processor time",
                key="max_seconds",
            )
        self._chars_of_memory += self._chars
        self._chars = 0
        self._looks += 1
        if self._looks % LOOKS_BETWEEN_MEMORY == 0 or self._chars_of_memory > CHARS_BETWEEN_MEMORY:
            self._chars_of_memory = 0
            self._look_at_memory()

    def _look_at_memory(self) -> None:
        now = _resident_mb()
        if self._memory < 0:
            self._memory = now
        grown = now - self._memory
        if grown > self.limits.max_memory_mb:
            raise OverLimit(
                f"it takes too much memory: stopped after {grown:,.0f} of {self.limits.max_memory_mb:,} MB",
                key="max_memory_mb",
            )


def _resident_mb() -> float:
    """Memory of this process; where the system does not tell it, the most it ever had."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6
    except OSError:
        unit = 1e6 if sys.platform == "darwin" else 1e3
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _number(value: float) -> str:
    return f"{value:,.0f}" if value < 1e15 else "more than 10^15"


# ----------------------------------------------------------------------------------------------------------------------
# How chat templates are compiled, so that their environment sees loops, comparisons, output and slices.
#
# It extends Jinja's code generator at its seams (`visit_*`, `_output_*`); `tests/templating` holds canaries that fail
# if a release of Jinja moves them.


DICT_ATTRIBUTES = frozenset(dir(dict))


class BoundedCodeGenerator(CodeGenerator):
    """Has the environment count rounds of loops, and look at whatever is joined, compared, printed or cut."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, announce("step", [], node.lineno))
        super().visit_For(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(")  # a hook (`announce`) is no call of the template's
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        if not isinstance(node.node, nodes.Name) or node.attr in DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        # `message.role` of a dict that has it, without a call; `environment.getattr` would give the same
        name = frame.symbols.ref(node.node.name)
        self.write(f"({name}[{node.attr!r}] if type({name}) is dict and {node.attr!r} in {name} else ")
        super().visit_Getattr(node, frame)
        self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        # `a + b + c` is one call
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        self.write("environment.added(context, (")
        for term in (left, *reversed(terms)):
            self.visit(term, frame)
            self.write(", ")
        self.write("))")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(context.eval_ctx.autoescape, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._compared(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        operator = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in",
                    "notin": "not in"}[node.op]  # fmt: skip
        self.write(f" {operator} ")
        self._compared(node.expr, frame)

    def _compared(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):  # it stands in the template, so it is small
            self.visit(node, frame)
            return
        self.write("environment.compared(")
        self.visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.held(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.held(")
        super().visit_Dict(node, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # nothing is worked out while a template is read: what it makes is bounded where it runs
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        super()._output_child_pre(node, frame, finalize)
        self.write("environment.printed(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")
        super()._output_child_post(node, frame, finalize)


class GenerationBlock(Extension):
    """``{% generation %}``: other tools mark trained text with it; here ownership is known without, so it passes on."""

    tags = {"generation"}  # noqa: RUF012  declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Callable[[], str]) -> str:
        return caller()


def announce(hook: str, names: list[str], line: int) -> nodes.ExprStmt:
    """A statement that calls the environment's method ``hook`` with some variables."""
    loaded: list[nodes.Expr] = [nodes.Name(name, "load") for name in names]
    call = nodes.Call(nodes.EnvironmentAttribute(hook), loaded, [], None, None)
    return nodes.ExprStmt(call, lineno=line)


def variables_of(tree: nodes.Template) -> frozenset[str]:
    """The variables that a template reads of what it is given. Jinja's own list also has names that are set in one
    branch only; such a name is a variable if it is read where it may not be set yet.

    {% if a %}{% set b = 1 %}{{ b }}{% endif %}{{ c }} -> {"a", "c"}
    """
    return frozenset(find_undeclared_variables(tree) & _read_unset(tree, set()))


def _read_unset(node: nodes.Node, known: set[str]) -> set[str]:
    """The names that a node reads and that need not be ``known``; those that it sets in any case become so."""
    match node:
        case nodes.Name():
            if node.ctx == "load":
                return {node.name} - known
            known.add(node.name)
            return set()
        case nodes.Assign():
            return _read_unset(node.node, known) | _read_unset(node.target, known)
        case nodes.If():
            found = _all_unset([node.test, *(one.test for one in node.elif_)], known)
            ends = [set(known) for _ in range(2 + len(node.elif_))]
            for branch, end in zip((node.body, *(one.body for one in node.elif_), node.else_), ends, strict=True):
                found |= _all_unset(branch, end)
            known |= set.intersection(*ends)
            return found
        case nodes.For():
            found, inside = _read_unset(node.iter, known), set(known)
            children = (node.target, *([] if node.test is None else [node.test]), *node.body)
            return found | _all_unset(children, inside | {"loop"}) | _all_unset(node.else_, set(known))
        case nodes.With():
            return _all_unset(node.values, known) | _all_unset([*node.targets, *node.body], set(known))
        case nodes.AssignBlock():
            return _all_unset(node.body, set(known)) | _read_unset(node.target, known)
        case nodes.Macro() | nodes.CallBlock() | nodes.FilterBlock():
            found = _all_unset(node.iter_child_nodes(), set(known))
            known |= {node.name} if isinstance(node, nodes.Macro) else set()
            return found
        case _:
            return _all_unset(node.iter_child_nodes(), known)


def _all_unset(several: Iterable[nodes.Node], known: set[str]) -> set[str]:
    return {name for node in several for name in _read_unset(node, known)}
