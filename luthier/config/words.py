"""What a key may hold, in words: read off the JSON schema of `RunConfig`, so that it is said in one place only."""

from __future__ import annotations

import copy
import functools
from typing import Any

from luthier.config import KeyPath
from luthier.config.inputs import Section
from luthier.config.schema import RunConfig
from luthier.plugins import load_plugins, num_added
from luthier.writing import counted

JsonSchema = dict[str, Any]

_LISTED = {"SourceConfig": "sources", "TargetRuleConfig": "rules", "RewardConfig": "rewards", "CodeConfig": "functions"}


def raw_schema() -> JsonSchema:
    """The JSON schema of a run description in its long form, without the shorthands; plugins' names and keys in it."""
    load_plugins()
    return _schema(num_added())


@functools.lru_cache(maxsize=1)
def _schema(_: int) -> JsonSchema:
    return RunConfig.model_json_schema()


def schema_at(path: KeyPath) -> JsonSchema | None:
    """The schema of the value at ``path``, with its default and description; None where no key is known."""
    schema: JsonSchema | None = raw_schema()
    for step in path:
        if schema is None:
            return None
        schema = _below(schema, step)
    return schema


def known_keys(path: KeyPath) -> tuple[str, ...]:
    """The keys of the section at ``path``; empty if it is no section."""
    schema = schema_at(path)
    return tuple(schema.get("properties", ())) if schema is not None else ()


def all_keys() -> tuple[str, ...]:
    """Every ``section.key``, and the keys of a source as ``data.train[0].key``."""
    keys = [f"{section}.{key}" for section in known_keys(()) for key in known_keys((section,))]
    return (*keys, *(f"data.train[0].{key}" for key in known_keys(("data", "train", 0))))


def expected(schema: JsonSchema) -> str:
    """What is allowed, as a noun phrase: ``a number above 0``, ``a whole number from 0 to 7, or "auto"``."""
    match schema:
        case {"anyOf": options}:
            phrases = [expected(resolve(option)) for option in options]
            return " or ".join(dict.fromkeys(_merge_numbers(phrases)))
        case {"const": value}:
            return f"{value}"
        case {"enum": values}:
            return (
                f"one of {', '.join(map(str, values))}"
                if len(values) < 15
                else f"one of {counted(len(values), 'name')}"
            )
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "integer"}:
            return f"a whole number{_bounds(schema)}"
        case {"type": "number"}:
            return f"a number{_bounds(schema)}"
        case {"type": "string", "examples": [example]}:
            return f"a name such as {example}"
        case {"type": "string", "format": "path"}:
            return "a path"
        case {"type": "string"}:
            return "a text (not empty)" if schema.get("minLength") else "a text"
        case {"type": "array"}:
            items = resolve(schema.get("items", {}))
            are_numbers = items.get("type") in ("integer", "number")
            return f"a list of {_LISTED.get(items.get('title', ''), 'numbers' if are_numbers else 'texts')}"
        case {"type": "object"}:
            return "a section (key: value lines)" if "properties" in schema else "a mapping (key: value lines)"
        case {"type": "null"}:
            return "null"
        case _:
            return "a value"


def choices(schema: JsonSchema) -> tuple[str, ...]:
    """The names that are allowed, where names are."""
    match schema:
        case {"anyOf": options}:
            return tuple(choice for option in options for choice in choices(resolve(option)))
        case {"const": value}:
            return (str(value),)
        case {"enum": values} | {"examples": values}:
            return tuple(map(str, values))
        case _:
            return ()


def kinds(schema: JsonSchema) -> frozenset[str]:
    """The JSON types that are allowed."""
    match schema:
        case {"anyOf": options}:
            return frozenset().union(*(kinds(resolve(option)) for option in options))
        case {"type": str(kind)}:
            return frozenset({kind})
        case _:
            return frozenset()


def resolve(schema: JsonSchema) -> JsonSchema:
    """Follow a reference; what stands beside it (default, description) wins over what it points to."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    target: JsonSchema = raw_schema()["$defs"][reference.rsplit("/", 1)[1]]
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}


def _below(schema: JsonSchema, step: str | int) -> JsonSchema | None:
    if isinstance(step, int):
        items = schema.get("items")
        return None if items is None else resolve(items)
    child = schema.get("properties", {}).get(step)
    if child is None and isinstance(schema.get("additionalProperties"), dict):
        child = schema["additionalProperties"]
    return None if child is None else resolve(child)


def _bounds(schema: JsonSchema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    words = [
        f" of at least {low:g}" if low is not None else f" above {above:g}" if above is not None else "",
        f" and at most {high}" if high is not None else f" and below {below:g}" if below is not None else "",
    ]
    return "".join(words)


def _merge_numbers(phrases: list[str]) -> list[str]:
    numbers = [phrase for phrase in phrases if phrase.startswith("a number")]
    if numbers and any(phrase.startswith("a whole number") for phrase in phrases):
        return ["a share (from 0, below 1)", *(phrase for phrase in phrases if phrase not in numbers)]
    return phrases


def config_schema() -> JsonSchema:
    """The JSON schema (draft 2020-12) for editors: all keys with their descriptions, shorthands allowed."""
    schema = copy.deepcopy(raw_schema())
    definitions: dict[str, JsonSchema] = schema["$defs"]
    sections: dict[str, type[Section]] = {kind.__name__: kind for kind in Section.__subclasses__()}
    for name, definition in list(definitions.items()):
        kind = sections.get(name)
        if kind is not None and kind.shorthand is not None:
            short = {"type": "string", "minLength": 1, "description": f"Short for {{{kind.shorthand}: …}}."}
            described: JsonSchema = {key: definition.pop(key) for key in ("title", "description") if key in definition}
            definitions[name] = {**described, "anyOf": [short, definition]}
        properties = definition.get("properties", {})
        properties.update({key: _with_single_entry(value) for key, value in properties.items()})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _with_single_entry(schema: JsonSchema) -> JsonSchema:
    """A list may be written as its only entry."""
    if schema.get("type") != "array":
        return schema
    around: JsonSchema = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    bare = {key: value for key, value in schema.items() if key not in around}
    return {**around, "anyOf": [bare, bare["items"]]}
