"""What can be read off the schema for people and editors: docs/config.md, and a JSON schema."""

from __future__ import annotations

import copy
from typing import Any

from luthier.config.inputs import MixtureConfig, SourceConfig, TargetRuleConfig
from luthier.config.objective import ReferenceConfig
from luthier.config.schema import RunConfig, Section
from luthier.config.words import JsonSchema, choices, expected, raw_schema, resolve, schema_at

_INTRODUCTION = """# The run description

A run is described by one YAML file (or the same as JSON), read as YAML 1.2. `luthier.config.loading.load_config` reads
it, and reports everything that is wrong with it at once: file, line, key, what is wrong, and the way out.

```yaml
model: preset:tiny-qwen3
data:
  train: rows.jsonl
```

A mistake is answered before anything heavy is imported, for example

```
run.yaml:4 train.lr: the section train has no such key (Luthier's name for it is train.learning_rate)
run.yaml:5 train.max_steps: expected a whole number of at least 1 or null, got 2.5 (write 2 or 3)
run.yaml:8 data.eval_split: rows are held out (0.1) although data.eval (line 7) names eval data (keep one: …)
override adapter=LORA adapter.type: expected one of full, freeze, lora, oft, got the text "LORA" (did you mean lora? …)
```

The three lines of YAML above are a whole run; every other key has a default. This page is printed by
`luthier.config.reference.config_reference()`.

## Rules

- **Overrides**: `train.learning_rate=1e-4`, `data.train[0].path=x.jsonl` (or `data.train.0.path=x.jsonl`). The value is
  read as YAML. `adapter=lora` replaces the whole section.
- **Paths** are relative to the current directory, not to the file. `~` is your home folder.
- **Shorthands**: `model: NAME`, `objective: NAME`, `adapter: TYPE`, and one source (`train: rows.jsonl`) instead of a
  list. A list of texts may be one text.
- **Numbers**: `1e-4`, `.5` and `1e5` are numbers, in quotes they are not. `3.0` is accepted where a whole number is
  expected, `2.5` is not. `010` is refused, as it could be 8 or 10.
- **true and false** are written so. `yes`, `no`, `on` and `off` are texts, never taken for one;
  `strategy: no` works.
- **A share or a number** (`eval_split`, `max_drop`, `warmup_steps`): below 1 it is a share, whole numbers count.
  `1.0` is refused: write 1 for one row or step.
- **No value** (`key:` with nothing behind) is an error, except where `null` is allowed.
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
        if name == "template":
            title = "`template.targets[…]`, `data.train[…].targets[…]`"
            parts.append(_section(title, TargetRuleConfig, ("template", "targets", 0)))
    return "\n".join(parts)


def config_schema() -> JsonSchema:
    """The JSON schema (draft 2020-12) for editors: all keys with their descriptions, shorthands allowed."""
    schema = copy.deepcopy(raw_schema())
    definitions: dict[str, Any] = schema["$defs"]
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
    lines = [f"## {title}", "", _code(" ".join((kind.__doc__ or "").split())), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        schema = schema_at((*path, name))
        assert schema is not None, name
        default = "required" if field.is_required() else f"`{_shown(schema.get('default'))}`"
        meaning = _code(" ".join((field.description or "").split()))
        lines.append(f"| `{name}` | {_type(schema)} | {default} | {_cell(meaning)} |")
    return "\n".join([*lines, ""])


def _type(schema: JsonSchema) -> str:
    items = resolve(schema.get("items", {}))
    names = choices(schema) or choices(items)
    if len(names) < 15:
        return expected(schema) if not choices(items) else f"a list of {', '.join(names)}"
    return f"one of {', '.join(names)}"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return f"[{', '.join(map(str, default))}]"
    return "null" if default is None else f"{default}"


def _code(text: str) -> str:
    return text.replace("``", "`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
