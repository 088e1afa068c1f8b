"""A model's chat template, ready to run: plain, or traced so that every character has an owner."""

from __future__ import annotations

import functools
import hashlib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

from luthier.errors import RowError, TemplateError
from luthier.records import Message
from luthier.rendering.environment import TrackingEnvironment, plain_environment
from luthier.rendering.messages import marked_messages, marked_tools, plain_messages
from luthier.rendering.trace import Owner, Trace
from luthier.rendering.tracked import LostProvenance, Tracked

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A rendered text, and for each character the number of its owner in ``owners``."""

    text: str
    shadow: str
    owners: Sequence[Owner]

    def owner(self, position: int) -> Owner:
        """Whose the character at ``position`` is."""
        return self.owners[ord(self.shadow[position])]


class ChatTemplate:
    """One Jinja chat template with the variables it is given.

    ``special_tokens`` are the variables that a tokenizer provides (``bos_token`` …), ``kwargs`` the user's
    (``enable_thinking`` …). Raises `TemplateError` if the template is no valid Jinja.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.kwargs = dict(kwargs or {})
        self._environment = TrackingEnvironment()
        try:
            self._traced = self._environment.from_string(source)
            self._plain = plain_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"chat template, line {error.lineno}: {error.message}",
                hint="template.chat_template must be valid Jinja",
            ) from error

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads and does not set itself."""
        return frozenset(find_undeclared_variables(self._environment.parse(self.source)))

    @functools.cached_property
    def literals(self) -> str:
        """All text that the template can write by itself, pieces joined by NUL."""
        tree = self._environment.parse(self.source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return "\0".join(texts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Covers the template and everything it is given; for a template that prints the date, the date too."""
        today = date.today().isoformat() if "strftime_now" in self.source else None
        return hashlib.sha256(repr((self.source, self.special_tokens, self.kwargs, today)).encode()).hexdigest()

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        """The text that inference sees. Raises `RowError` if the template refuses the conversation."""
        try:
            return self._plain.render(
                **self._arguments(kwargs),
                messages=plain_messages(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise _refusal(error) from error

    def trace(self, messages: Sequence[Message], tools: Tools = (), **kwargs: Any) -> Traced:
        """The same text without a generation prompt, with owners. Raises `RowError` where track is lost."""
        trace = self._environment.trace = Trace()
        try:
            output = self._traced.render(
                **self._arguments(kwargs),
                messages=marked_messages(messages, trace),
                tools=marked_tools(tools, trace),
                add_generation_prompt=False,
            )
        except LostProvenance as error:
            raise RowError("untraceable", f"{_line(error)}{error} loses track of where text came from") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise _refusal(error) from error
        assert isinstance(output, Tracked)
        return Traced(text=str.__str__(output), shadow=output._shadow, owners=trace.owners)

    def _arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.special_tokens, "documents": None, **self.kwargs, **kwargs}


def _refusal(error: Exception) -> RowError:
    if isinstance(error, RowError):
        return error
    return RowError("template", f"the chat template refuses this row: {_line(error)}{error}")


def _line(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f"line {lines[-1]}: " if lines else ""
