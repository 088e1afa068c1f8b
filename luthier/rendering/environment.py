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

from jinja2.runtime import Context
from jinja2.sandbox import SandboxedFormatter

from luthier.rendering.allowed import may_be_called, restrict
from luthier.rendering.codegen import TrackingCodeGenerator
from luthier.rendering.trace import Loop, Trace
from luthier.rendering.tracked import Tracked, concatenate, is_own, pin, refuse, settled, traced
from luthier.rendering.value_text import formatted_by, printed_by, text_of
from luthier.templating.limits import TemplateLimits
from luthier.templating.plain import TemplateDict, furnish
from luthier.templating.sandbox import SMALL, Sandbox
from luthier.templating.sizes import check_operator

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

    def concat(self, parts: Iterable[Any]) -> Tracked:
        """Join what was printed, or stands around ``~``."""
        if isinstance(parts, tuple):
            self.check_join(parts)
        return concatenate(self.collected(text_of(part, self.trace) for part in parts), self.trace)

    def emit(self, value: Any, line: int | None = None) -> Tracked:
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

    def enter(self, *items: Any) -> None:
        """A loop stands at these items now."""
        trace, loop = self.trace, self.trace.loops[-1]
        self.step()
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

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``. Where a row's text is looked up, it is pinned."""
        if isinstance(argument, Tracked):
            pin(argument)
            argument = argument if isinstance(obj, dict) else str.__str__(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
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
        def formatted(*args: Any, **kwargs: Any) -> Any:
            if is_map and (len(args) != 1 or kwargs):
                raise TypeError("format_map() takes exactly one argument")
            given, named = ((), args[0]) if is_map else (args, kwargs)
            return formatted_by(owner, lambda name: fields.get_field(name, given, named)[0], self.trace)

        formatted.keeps_track = True  # type: ignore[attr-defined]
        return formatted
