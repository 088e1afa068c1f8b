"""What a key may hold, in words: read off the JSON schema of `RunConfig`, so that it is said in one place only."""

from __future__ import annotations

import copy
import functools
from typing import Any

from luthier.config.inputs import MixtureConfig, SourceConfig, TargetRuleConfig
from luthier.config.objective import ReferenceConfig
from luthier.config.rollout import CodeConfig, CorrectionConfig, EngineConfig, RewardActorsConfig, RewardConfig
from luthier.config.schema import RunConfig, Section
from luthier.config.tree import KeyPath
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
        case {"enum": values}:
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


# --------------------------------------------------------------------------------------------------------------------
# What can be read off the schema for people and editors: docs/config.md, and a JSON schema.


_INTRODUCTION = """# The run description

A run is described by one YAML file (or the same as JSON), read as YAML 1.2. Only the model and
the data are required; every other key has a default. This is a whole run:

```yaml
model: preset:tiny-qwen3
data:
  train: rows.jsonl
```

All mistakes are reported at once, before anything heavy is imported: file, line, key, what is wrong, and what to do.
For example:

```
run.yaml:4 train.lr: the section train has no such key (Luthier's name for it is train.learning_rate)
run.yaml:5 train.max_steps: expected a whole number of at least 1 or null, got 2.5 (write 2 or 3)
run.yaml:8 data.eval_split: rows are held out (0.1) although data.eval (line 7) names eval data (keep one: …)
override adapter=LORA adapter.type: expected one of full, freeze, lora, oft, got the text "LORA" (did you mean lora? …)
```

This page is generated from the code by `luthier.config.words.config_reference()`.

## Rules

- **Overrides**: `train.learning_rate=1e-4`, `data.train[0].path=x.jsonl` (or `data.train.0.path=x.jsonl`). The value is
  read as YAML. `adapter=lora` replaces the whole section.
- **Paths** are relative to the current directory, not to the file. `~` is your home folder.
- **Shorthands**: `model: NAME`, `objective: NAME`, `adapter: TYPE`, and one source (`train: rows.jsonl`) instead of a
  list. A list of texts may be one text.
- **Numbers**: `1e-4`, `.5` and `1e5` are numbers, but not in quotes. Where a whole number is expected, `3.0` is
  accepted and `2.5` is not. `010` is refused, because it could mean 8 or 10.
- **Booleans** are `true` and `false`. `yes`, `no`, `on` and `off` are texts (so `strategy: no` works).
- **A share or a number** (`eval_split`, `max_drop`, `warmup_steps`): a number below 1 is a share, a whole number is a
  count. `1.0` is refused: write 1 for one row or step.
- **No value** (`key:` with nothing after it) is an error, except where `null` is allowed.
- Anchors, aliases and merge keys work up to 10,000 values; tags (`!!…`) are refused.
"""


def config_reference() -> str:
    """docs/config.md: one table per section, printed from the schema."""
    parts = [_INTRODUCTION]
    for name, field in RunConfig.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type) and issubclass(kind, Section), name
        parts.append(_section(f"`{name}`", kind, (name,)))
        if name == "data":
            parts.append(_section("`data.train[…]`, `data.eval[…]`", SourceConfig, ("data", "train", 0)))
            parts.append(_section("`data.mixture`", MixtureConfig, ("data", "mixture")))
        if name == "objective":
            parts.append(_section("`objective.reference`", ReferenceConfig, ("objective", "reference")))
        if name == "rollout":
            parts.append(_section("`rollout.rewards[…]`", RewardConfig, ("rollout", "rewards", 0)))
            parts.append(_section("`rollout.engine`", EngineConfig, ("rollout", "engine")))
            parts.append(_section("`rollout.reward_actors`", RewardActorsConfig, ("rollout", "reward_actors")))
            parts.append(_section("`rollout.correction`", CorrectionConfig, ("rollout", "correction")))
            parts.append(_section("`rollout.tools[…]`, `rollout.environment`", CodeConfig, ("rollout", "tools", 0)))
        if name == "template":
            title = "`template.targets[…]`, `data.train[…].targets[…]`"
            parts.append(_section(title, TargetRuleConfig, ("template", "targets", 0)))
    return "\n".join(parts)


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


def _section(title: str, kind: type[Section], path: tuple[str | int, ...]) -> str:
    lines = [f"## {title}", "", _prose(kind.__doc__), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        schema = schema_at((*path, name))
        assert schema is not None, name
        listed = field.default if isinstance(field.default, list) else []
        are_sections = bool(listed) and isinstance(listed[0], Section)
        given = [each.model_dump(exclude_unset=True) for each in listed] if are_sections else schema.get("default")
        default = "required" if field.is_required() else f"`{_shown(given)}`"
        meaning = _prose(field.description).replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(schema)} | {default} | {meaning} |")
    return "\n".join([*lines, ""])


def _type(schema: JsonSchema) -> str:
    items = resolve(schema.get("items", {}))
    names = choices(schema) or choices(items)
    if len(names) < 15:
        return expected(schema) if not choices(items) else f"a list of {', '.join(names)}"
    return f"one of {', '.join(names)}"


def _shown(default: object) -> str:
    """As YAML has it; of a section the values that are set."""
    match default:
        case None | bool():
            return "null" if default is None else str(default).lower()
        case [*items]:
            return f"[{', '.join(map(_shown, items))}]"
        case {}:
            set_to = {key: value for key, value in default.items() if value is not None and value != []}
            return f"{{{', '.join(f'{key}: {_shown(value)}' for key, value in set_to.items())}}}"
        case _:
            return f"{default}"


def _prose(text: str | None) -> str:
    """A docstring as a paragraph of Markdown."""
    return " ".join((text or "").split()).replace("``", "`")
