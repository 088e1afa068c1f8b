"""From a config file and overrides to a `RunConfig`, or to all that is wrong with them.

    text -> tree (lines kept) -> shorthands written out -> overrides set -> values checked -> keys checked together

Neither torch nor transformers is imported: a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard, get_args, get_origin

from luthier.config.conflicts import check_conflicts
from luthier.config.draft import Draft, read_draft
from luthier.config.file_text import parse_text, read_text
from luthier.config.machine import check_files, check_machine, check_processes
from luthier.config.schema import RunConfig, Section
from luthier.config.tree import ListNode, MappingNode, Node, Scalar, Where, parse_path, put, show_path, show_value
from luthier.config.yaml_text import Parsed, parse_yaml
from luthier.errors import ConfigError, Problem
from luthier.plugins import load_plugins

IN_MEMORY = "<config>.json"  # what messages call a description that has no file
# A run description as programs may give it: the path of its file, the same as a dict, or what was made of either.
RunDescription = RunConfig | Dictionary[str, Any] | Path | str


def load_config(config: RunDescription, overrides: Sequence[str] = (), *, check_paths: bool = True) -> RunConfig:
    """Read a run description: a ``.yaml`` or ``.json`` file, the same as a dict, or a `RunConfig`, which is checked
    again. Overrides such as ``train.max_steps=10`` win over it.

    Raises ConfigError with every problem of the file and of the overrides. ``check_paths=False`` leaves the file
    system and the number of cores alone, for descriptions of runs that were made elsewhere.
    """
    return load_draft(config, overrides, check_paths=check_paths).config


def load_draft(
    config: RunDescription, overrides: Sequence[str] = (), *, check_paths: bool = True, to_train: bool = False
) -> Draft:
    """`load_config` with the places of all values, for checks that come later. Its ``config`` is whole and sound.

    ``to_train``: the run is to be trained on this machine, now. Problems with that are raised with the others; where
    there are no others the draft has them, to be told together with what only torch can tell.
    """
    if isinstance(config, RunConfig | Dictionary):
        parsed, name = parse_text(_as_text(config), IN_MEMORY), IN_MEMORY
    else:
        path = Path(os.path.expanduser(config))
        parsed, name = parse_text(read_text(path), str(path)), str(path)
    return _build(parsed, name, overrides, check_paths=check_paths, to_train=to_train)


def _as_text(config: RunConfig | Dictionary[str, object]) -> str:
    """JSON, so that the shorthands, checks and messages of files hold. What nobody set stays unset, as checks ask."""
    values = config.model_dump(mode="json", exclude_unset=True) if isinstance(config, RunConfig) else dict(config)
    return json.dumps(values, default=str)


def load_config_text(
    text: str, name: str = "<text>", overrides: Sequence[str] = (), *, check_paths: bool = True
) -> RunConfig:
    """`load_config` for a text; ``name`` stands for the file in messages, and one in .json makes it JSON."""
    return _build(parse_text(text.removeprefix("\ufeff"), name), name, overrides, check_paths=check_paths).config


def _build(parsed: Parsed, name: str, overrides: Sequence[str], *, check_paths: bool, to_train: bool = False) -> Draft:
    load_plugins()
    problems = list(parsed.problems)
    tree = parsed.tree
    if tree is not None and not isinstance(tree, MappingNode):
        problems.append(_no_mapping(tree))
        tree = None
    if tree is None:
        _, more = apply_overrides(MappingNode(where=Where(source=name)), overrides)
        raise ConfigError([*problems, *more])
    long_form, more = apply_overrides(expand(tree), overrides)
    draft, wrong = read_draft(long_form, name)
    problems += [*more, *wrong]
    if draft is not None:
        problems += check_conflicts(draft)
        if check_paths:
            problems += check_files(draft)
            problems += [problem for problem in check_processes(draft) if draft.sound(problem.key)]
        lacking = check_machine(draft) if to_train else []
        if not problems:
            return replace(draft, machine=tuple(lacking))
        problems += lacking
    assert problems, "a description without a draft has problems"
    raise ConfigError(sorted(problems, key=_line))


def _no_mapping(tree: Node) -> Problem:
    hint = "begin with lines such as model: NAME and data: {train: FILE}, with a blank after each colon"
    return Problem(where=str(tree.where), key="", what=f"sections are needed, this is {show_value(tree)}", hint=hint)


def _line(problem: Problem) -> tuple[bool, int]:
    """File first, line by line; overrides last, in their order."""
    line = problem.where.rpartition(":")[2]
    return problem.where.startswith("override "), int(line) if line.isdecimal() else 0


# --------------------------------------------------------------------------------------------------------------------
# Overrides from the command line: ``train.learning_rate=1e-4``, ``data.train[0].path=x.jsonl``.


LONGEST_SHOWN = 80  # characters of an override in a message


def apply_overrides(tree: Node, overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """The tree with every override set, the later over the earlier, and what was wrong with any of them.

    A value is read as YAML: ``1e-4`` is a number, ``[a, b]`` a list, nothing after the ``=`` is null.
    """
    problems: list[Problem] = []
    for override in overrides:
        name = f"override {override if len(override) <= LONGEST_SHOWN else override[: LONGEST_SHOWN - 1] + '…'}"
        key, equals, text = override.partition("=")
        path = parse_path(key.strip().removeprefix("--"))
        if not equals or path is None:
            example = "train.learning_rate=1e-4 or data.train[0].path=rows.jsonl"
            problems.append(Problem(where=name, key="", what="this is not key=value", hint=f"for example {example}"))
            continue
        parsed = parse_yaml(text, name, line_numbers=False)
        problems.extend(parsed.problems)
        if parsed.problems:
            continue
        value = parsed.tree or Scalar(where=Where(source=name), value=None, text="")
        try:
            tree = expand(put(tree, path, value))
        except LookupError as error:
            problems.append(Problem(where=name, key=show_path(path), what=str(error.args[0]), hint=_see(key)))
    return tree, problems


def _see(key: str) -> str:
    return f"entries of a list are {key.split('[')[0]}[0], [1] …" if "[" in key else "look the key up in docs/config.md"


# --------------------------------------------------------------------------------------------------------------------
# Shorthands written out: ``model: NAME`` -> ``model: {name_or_path: NAME}``, one source -> a list of one.
#
# The schema accepts them too; here they are written out in the tree, so that overrides and messages meet one form.


def expand(tree: Node) -> Node:
    """The tree of a run description in its long form."""
    return _expand_section(tree, RunConfig)


def _expand_section(node: Node, section: type[Section]) -> Node:
    if section.shorthand is not None and isinstance(node, Scalar) and isinstance(node.value, str):
        node = MappingNode(where=node.where, entries={section.shorthand: node})
    if not isinstance(node, MappingNode):
        return node
    fields = section.model_fields
    entries = {
        key: _expand_value(value, fields[key].annotation) if key in fields else value
        for key, value in node.entries.items()
    }
    return replace(node, entries=entries)


def _expand_value(node: Node, kind: object) -> Node:
    if _is_section(kind):
        return _expand_section(node, kind)
    if get_origin(kind) is list and _is_section(item := get_args(kind)[0]):
        if isinstance(node, MappingNode) or (isinstance(node, Scalar) and isinstance(node.value, str)):
            node = ListNode(where=node.where, items=(node,))
        if isinstance(node, ListNode):
            return replace(node, items=tuple(_expand_section(entry, item) for entry in node.items))
    return node


def _is_section(kind: object) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)
