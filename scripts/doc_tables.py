"""The tables of the documentation, as Markdown: each is printed from the table that the code itself reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from luthier.config.inputs import MixtureConfig, Section, SourceConfig, TargetRuleConfig
from luthier.config.loading import load_config_text
from luthier.config.objective import LOSSES, OBJECTIVES, Learned, ReferenceConfig, kind_of
from luthier.config.optimizers import OPTIMIZERS, Default
from luthier.config.rollout import CodeConfig, CorrectionConfig, EngineConfig, RewardActorsConfig, RewardConfig
from luthier.config.schema import RunConfig
from luthier.config.words import JsonSchema, choices, expected, resolve, schema_at
from luthier.errors import ConfigError
from luthier.media.families import Attention, Family, MediaKind, PackingSupport
from luthier.media.families.table import FAMILIES, MODEL_TYPES, PROCESSORS
from luthier.presets.named_templates import EOS, TEMPLATES

# ---------------------------------------- docs/config.md


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
{mistakes}
```

This page is generated from the code by `scripts/write_docs.py`.

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


_WITH_MISTAKES = """\
model: preset:tiny-qwen3
output: {dir: out}
train:
  lr: 1e-4
  max_steps: 2.5
data:
  eval: preset:skills
  eval_split: 0.1
  train: preset:skills
"""


def _mistakes() -> str:
    try:
        load_config_text(_WITH_MISTAKES, "run.yaml", ["adapter=LORA"])
    except ConfigError as error:
        return str(error)
    raise AssertionError("the example has mistakes")


def config_reference() -> str:
    """docs/config.md: one table per section, printed from the schema."""
    parts = [_INTRODUCTION.replace("{mistakes}", _mistakes())]
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


# ---------------------------------------- docs/optimizers.md


def optimizer_table() -> str:
    """Markdown for docs/optimizers.md: every optimizer with what it is, its settings, and what it needs."""
    lines = ["| `train.optim` | what it is | `train.optim_args` | needs | paper |", "|---|---|---|---|---|"]
    for row in OPTIMIZERS.values():
        settings = ", ".join(f"`{name}: {_setting(default)}`" for name, default in row.settings.items())
        packages = ", ".join(package for _, package in row.needs)
        paper = f"[{row.paper}](https://arxiv.org/abs/{row.paper})" if row.paper else ""
        lines.append(f"| `{row.name}` | {row.says} | {settings} | {packages} | {paper} |")
    return "\n".join(lines) + "\n"


def _setting(default: Default) -> str:
    match default:
        case tuple():
            return " or ".join(_setting(each) for each in default)
        case type():
            return "unset"
        case bool():
            return str(default).lower()
        case _:
            return f"{default:g}" if isinstance(default, float) else str(default)


# ---------------------------------------- docs/objectives.md, by kind of rows and reference


def loss_table() -> str:
    """Markdown: every loss with what it is, its formula, its numbers with their defaults, and its paper."""
    groups = groupby(LOSSES, key=lambda name: (LOSSES[name].objectives, LOSSES[name].reference))
    return "\n".join(_losses(families, list(names), reference=reference) for (families, reference), names in groups)


def _losses(families: Sequence[str], names: Sequence[str], *, reference: bool) -> str:
    shared = _shared_numbers([LOSSES[name].numbers for name in names])
    unit = kind_of(families[0]).unit
    unless = f" Unless a row says otherwise: {_spelled(shared)}." if shared else ""
    lines = [
        f"### {', '.join(f'`{family}`' for family in families)}{_compared(families, reference=reference)}",
        "",
        f"{_divided_by(families[0], unit)}{unless}",
        "",
        f"| loss | what it is | formula | {'other ' if shared else ''}numbers | paper |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_loss_row(name, shared) for name in names)]) + "\n"


def _divided_by(family: str, unit: str) -> str:
    row = OBJECTIVES[family]
    if row.on_policy and row.learned is Learned.COMPARED:
        return "A is the advantage of an answer with reward r; m, s: mean and deviation of the rewards of its prompt."
    return f"Divided by the {unit}s of the step."


_DIVISORS = {
    "tokens": "the step's targets",
    "answers": "the step's answers, each the mean of its targets",
    "constant": "the step's answers times `rollout.max_new_tokens`",
    "answer_sums": "the step's answers",
}


def _compared(families: Sequence[str], *, reference: bool) -> str:
    # where no loss of a family knows a reference, none is missed
    if not any(options.reference for options in LOSSES.values() if options.objectives == families):
        return ""
    return ", compared with a reference" if reference else ", without a reference"


def _loss_row(name: str, shared: Mapping[str, float]) -> str:
    row = LOSSES[name]
    defaults = {objective.default_loss for objective in OBJECTIVES.values()}
    own = {key: value for key, value in row.numbers.items() if shared.get(key) != value}
    cells = (
        f"`{name}`{' (default)' if name in defaults else ''}",
        row.says + (f"; divided by {_DIVISORS[row.divisor]}" if "rl" in row.objectives else ""),
        f"`{row.formula}`",
        _spelled(own),
        f"[{row.paper}](https://arxiv.org/abs/{row.paper})" if row.paper else "",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _shared_numbers(defaults: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What all losses of a table have, and most with this default: told once, above it.

    [{beta: 0.1}, {beta: 0.1, tau: 5}, {beta: 2}] -> {beta: 0.1}; of a single loss nothing.
    """
    counts = Counter(number for one in defaults for number in one.items())
    return {
        key: value
        for (key, value), count in counts.items()
        if len(defaults) > 1 and 2 * count > len(defaults) and all(key in one for one in defaults)
    }


def _spelled(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"`{key}: {value:g}`" for key, value in numbers.items())


# ---------------------------------------- docs/families.md


def family_table() -> str:
    """A Markdown table: every family in alphabetical order, with what its row says in words."""
    lines = ["| family | model types | takes | positions | attention | rows | processors |", "|---" * 7 + "|"]
    for family in sorted(FAMILIES.values(), key=lambda row: row.name):
        cells = (
            f"`{family.name}`",
            _code(family.model_types),
            ", ".join(f"{kind.value}s" for kind in MediaKind if family.rule(kind) is not None),
            f"`{family.positions}`" if family.positions else "1-D",
            _attention(family.attention),
            _rows_of(family),
            _code(family.processors),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _attention(attention: Attention) -> str:
    match attention:
        case Attention.CAUSAL:
            return "causal"
        case Attention.IMAGE_BLOCKS:
            return "an item's tokens see each other"
        case Attention.WHOLE_BLOCKS:
            return "an item's tokens see each other, past windows too"
        case Attention.PREFIX:
            return "a prompt sees itself both ways"
        case Attention.CROSS:
            return "images are seen by cross-attention"
        case Attention.ENCODED:
            return "a decoder sees the row's image"
        case _:
            raise AssertionError(f"no word for {attention!r}")


def _rows_of(family: Family) -> str:
    match family.packing:
        case PackingSupport.PACKED:
            return "packed"
        case PackingSupport.PADDED:
            return f"padded: {family.reason}"
        case _:
            raise AssertionError(f"no word for {family.packing!r}")


def refusal_list() -> str:
    """A Markdown list of all of them, reason by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in [*PROCESSORS.items(), *MODEL_TYPES.items()]:
        by_reason.setdefault(reason, []).append(name)
    lines = [f"- {', '.join(f'`{name}`' for name in sorted(names))}: {reason}." for reason, names in by_reason.items()]
    return "\n".join(lines) + "\n"


# ---------------------------------------- docs/templates.md


def templates_table() -> str:
    """The table of ``docs/templates.md``: a row of Markdown for each template, in the order of their names."""
    lines = [
        "| name | for | ends an answer | begin of sequence | system message | tools | thinking |",
        "|---" * 7 + "|",
    ]
    for facts in sorted(TEMPLATES, key=lambda template: template.name):
        cells = (
            ", ".join(f"`{name}`" for name in (facts.name, *facts.aliases)),
            facts.models,
            ", ".join(stop if stop == EOS else f"`{stop}`" for stop in facts.stops),
            facts.bos.value,
            facts.system.value + (", has a default" if facts.default_system else ""),
            "yes" if facts.tools else "",
            "yes" if facts.thinking else "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
