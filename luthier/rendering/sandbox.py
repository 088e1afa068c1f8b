"""The sandbox that chat templates run in, with and without provenance."""

from __future__ import annotations

import types
from typing import Any, NoReturn

import jinja2
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

DICT_ATTRIBUTES = frozenset(dir(dict))
STRING_METHODS = frozenset(
    "endswith lower lstrip partition removeprefix removesuffix replace rpartition rsplit rstrip split splitlines "  # noqa: SIM905
    "startswith strip title upper".split()
)
LOOP_ATTRIBUTES = frozenset("depth depth0 first index index0 last length revindex revindex0".split())  # noqa: SIM905


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which takes no detour where the answer is known: one line of a template asks ten times."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``: keys of dicts, methods of strings, what loops and namespaces have."""
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if isinstance(obj, str) and attribute in STRING_METHODS:
            return getattr(obj, attribute)
        if type(obj) is LoopContext and attribute in LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        if type(obj) is TemplateNamespace and attribute[:1] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(obj) is types.BuiltinMethodType and isinstance(obj.__self__, str) and obj.__name__ in STRING_METHODS:
            for name in ("_block_vars", "_loop_vars"):  # what a compiled template adds to every call
                kwargs.pop(name, None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


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


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name!r}: names may not begin with an underscore"
        )


class TemplateDict:
    """``dict`` for templates, without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def raise_exception(message: Any) -> NoReturn:
    """What chat templates call to refuse a conversation."""
    raise jinja2.TemplateError(str.__str__(str(message)))
