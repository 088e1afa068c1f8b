"""The sandbox as transformers furnishes it: the same filters and globals, and no provenance."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2

from luthier.templating.limits import TemplateLimits
from luthier.templating.sandbox import Sandbox, TemplateNamespace

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
