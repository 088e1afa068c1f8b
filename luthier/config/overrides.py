"""Overrides from the command line: ``train.learning_rate=1e-4``, ``data.train[0].path=x.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence

from luthier.config.shorthand import expand
from luthier.config.tree import Node, Scalar, Where, parse_path, put, show_path
from luthier.config.yaml_text import parse_yaml
from luthier.errors import Problem

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
