"""The process of a tool or of an environment: ``python -m luthier.rewards.tool_child FILE NAME BYTES``.

A function is a tool: it says how it is declared, and is called with a model's arguments. A class is an environment: an
object of it is made for each conversation.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.json_schema import GenerateJsonSchema

from luthier.rewards.child import TellParent, begin
from luthier.rewards.dialogue_environment import Over
from luthier.writing import JsonObject

MOST_CHARACTERS = 100_000  # of a tool's result


class _Untitled(GenerateJsonSchema):
    """Names of arguments are not said again as their titles."""

    def field_title_should_be_set(self, schema: object) -> bool:
        """Never."""
        return False


def declaration(function: Any) -> JsonObject:
    """A function as chat templates take it, from its signature and docstring. Raises ``TypeError`` or pydantic's
    errors, where an argument's type has no JSON schema."""
    parameters = TypeAdapter(function).json_schema(schema_generator=_Untitled)
    if parameters.get("type") != "object":
        raise TypeError("its arguments have no names")
    parameters = {"type": "object", "properties": parameters.get("properties", {}), **parameters}
    parameters.pop("additionalProperties", None)
    about = {"name": function.__name__, "description": inspect.getdoc(function) or function.__name__}
    return {"type": "function", "function": {**about, "parameters": parameters}}


def as_text(result: object) -> str:
    """A tool's result as text: its own, or JSON. Raises ``ValueError`` for one that is too long."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"its result has more than {MOST_CHARACTERS:,} characters")
    return text


def main() -> None:
    """Load it, say what it is, and answer calls until there are no more."""
    found, tell = begin()
    if found is None:
        return
    if inspect.isclass(found):
        _serve_environment(found, tell)
        return
    try:
        get_type_hints(found)
        declared, function = declaration(found), validate_call(found)
    except Exception as error:  # noqa: BLE001  pydantic raises many kinds
        tell(error=f"its signature has no JSON schema: {error}"[:300])
        return
    tell(ready=True, declaration=declared)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            tell(call=asked["call"], result=as_text(function(**asked["arguments"])))
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            tell(call=asked["call"], error=f"the arguments are wrong: {faults}"[:1000])
        except BaseException as error:  # noqa: BLE001  the user's function may do anything
            tell(call=asked["call"], error=f"{type(error).__name__}: {error}"[:1000])


def _serve_environment(kind: Any, tell: TellParent) -> None:
    tell(ready=True)
    made: dict[int, Any] = {}  # by the number of their conversation
    for line in sys.stdin:
        asked = json.loads(line)
        number = asked["number"]
        try:
            match asked["do"]:
                case "start":
                    made[number] = kind()
                    tell(call=asked["call"], messages=_listed(made[number].start(asked["row"])))
                case "step":
                    found = made[number].step(asked["message"])
                    done = {"reward": found.reward} if isinstance(found, Over) else None
                    messages = found.messages if isinstance(found, Over) else found
                    tell(call=asked["call"], messages=_listed(messages), done=done)
                case "end":
                    made.pop(number, None)
                    tell(call=asked["call"])
        except BaseException as error:  # noqa: BLE001  the user's class may do anything
            tell(call=asked["call"], error=f"raises {type(error).__name__}: {error}"[:300])


def _listed(messages: Any) -> list[Any] | None:
    return None if messages is None else [dict(message) for message in messages]


if __name__ == "__main__":
    main()
