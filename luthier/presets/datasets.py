"""The preset data sets by name, as configs write them after ``preset:``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from luthier.errors import SourceError
from luthier.presets.quizzes import picture_rows
from luthier.presets.sounds import sound_rows
from luthier.writing import JsonObject

SPLITS = ("train", "test")
# Data sets of texts are files, ``NAME.SPLIT.jsonl.gz``, which `scripts/write_preset_rows.py` has written.
ROWS_FOLDER = Path(__file__).resolve().parent / "rows"
_GENERATED = {"pictures": picture_rows, "sounds": sound_rows}


def dataset_names() -> tuple[str, ...]:
    """The preset data sets, sorted."""
    return tuple(sorted([*_GENERATED, *(path.name.partition(".")[0] for path in ROWS_FOLDER.glob("*.train.*"))]))


def dataset_rows(name: str, split: str) -> Iterator[JsonObject]:
    """The rows of a split, ``train`` or ``test``, always the same; raises `SourceError` for other names."""
    if name not in dataset_names():
        there_are = ", ".join(f"preset:{known}" for known in dataset_names())
        raise SourceError(f"preset:{name}: there is no such preset", hint=f"there are: {there_are}")
    if split not in SPLITS:
        raise SourceError(f"preset:{name} has no split {split!r}", hint=f"its splits are {' and '.join(SPLITS)}")
    return _GENERATED[name](split) if name in _GENERATED else _read_rows(ROWS_FOLDER / f"{name}.{split}.jsonl.gz")


def _read_rows(path: Path) -> Iterator[JsonObject]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)
