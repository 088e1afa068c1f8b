"""A run description as far as it can be read: what checks between keys work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from luthier.config.explain import explain
from luthier.config.schema import RunConfig
from luthier.config.tree import Node, Path, get, parse_path, plain
from luthier.errors import Problem

# Stand-ins for required values that are missing or wrong, so that the rest can still be checked. Never returned.
_STAND_INS: dict[str, Any] = {
    "model": {"name_or_path": "preset:tiny-qwen3"},
    "data": {},
    "name_or_path": "preset:tiny-qwen3",
    "path": "preset:skills",
}
_RULES = "targets"
MAX_ROUNDS = 4  # a wrong section is removed, then missed, then stood in for


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The values that could be read, with their places; ``faulty`` are the paths that could not. ``machine`` is what
    this machine gives reason for, where the run is to be trained on it (`luthier.config.machine`)."""

    config: RunConfig
    tree: Node
    name: str
    faulty: frozenset[Path] = frozenset()
    machine: tuple[Problem, ...] = ()

    def sound(self, *keys: str) -> bool:
        """True if none of the keys, nothing above and nothing below them, is faulty."""
        paths = [_path(key) for key in keys]
        return not any(faulty[: len(path)] == path[: len(faulty)] for path in paths for faulty in self.faulty)

    def given(self, key: str) -> bool:
        """True if the user wrote the key, with a value other than null."""
        node = get(self.tree, _path(key))
        return node is not None and plain(node) is not None

    def cite(self, key: str) -> str:
        """A key with its place: ``data.eval (line 7)``."""
        node = get(self.tree, _path(key))
        return f"{key} ({'default' if node is None else node.where.short})"

    def problem(self, key: str, what: str, hint: str) -> Problem:
        """A problem at a key, or at the nearest section that was written."""
        path = _path(key)
        while path and get(self.tree, path) is None:
            path = path[:-1]
        node = get(self.tree, path)
        where = str(node.where) if path and node is not None else self.name
        return Problem(where=where, key=key, what=what, hint=hint)


def read_draft(tree: Node, name: str) -> tuple[Draft | None, list[Problem]]:
    """Validate the tree; what is wrong is left out or stood in for, and validated again, until the rest holds.

    Returns None for the draft in the rare case that nothing can be made of it; there are problems then.
    """
    values = plain(tree)
    problems: list[Problem] = []
    told: set[Path] = set()
    faulty: set[Path] = set()
    for _ in range(MAX_ROUNDS):
        try:
            config = RunConfig.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            found = explain(details, tree, name)
            for explained in found:
                known = any(explained.path[: len(path)] == path for path in told)
                if not known and not explained.is_met_by(found):
                    problems.append(explained.problem)
                told.add(explained.path)
                faulty |= {explained.path} if explained.meant is None else {explained.path, explained.meant}
                _mend(values, explained.path)
        else:
            return Draft(config=config, tree=tree, name=name, faulty=frozenset(faulty)), problems
    return None, problems


def _mend(values: Any, path: Path) -> None:
    """Remove the value at ``path``, or put a stand-in where one is required."""
    if _RULES in path:
        path = path[: path.index(_RULES) + 1]  # rules lean on each other: without all of them none is missed
    elif isinstance(path[-1], int) and path[:2] not in (("data", "train"), ("data", "eval")):
        path = path[:-1]  # one text of a list: without the list its default holds
    for step in path[:-1]:
        values = values[step]
    last = path[-1]
    if isinstance(last, int):
        values[last] = {"path": _STAND_INS["path"]}
        return
    values.pop(last, None)
    if last in _STAND_INS:
        values[last] = _STAND_INS[last]


def _path(key: str) -> Path:
    path = parse_path(key)
    assert path is not None, key
    return path
