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
from typing import Any

from luthier.config.conflicts import check_conflicts
from luthier.config.draft import Draft, read_draft
from luthier.config.files import check_files
from luthier.config.machine import check_machine, check_processes
from luthier.config.overrides import apply_overrides
from luthier.config.reading import parse_text, read_text
from luthier.config.schema import RunConfig
from luthier.config.shorthand import expand
from luthier.config.tree import MappingNode, Node, Where, show_value
from luthier.config.yaml_text import Parsed
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


def _as_text(config: RunConfig | Dictionary[str, Any]) -> str:
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
