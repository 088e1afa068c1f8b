"""The syntax trees of the package's files, which several tests look at: each is parsed once."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "luthier"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(package: Path = PACKAGE) -> Iterator[tuple[str, ast.Module]]:
    """Every file of a package, as ``room/module.py``."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), parsed(path)
