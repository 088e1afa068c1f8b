"""What comes with Luthier, so that a first run needs no network: tiny models, a tokenizer, data sets, and chat
templates.

Models and the tokenizer are ordinary local folders in Hugging Face's layout (a config and no weights; those of models
that see or hear also have their processor and a tokenizer of their own). Data sets of texts are files,
``NAME.SPLIT.jsonl.gz``, which `scripts/write_preset_rows.py` has written; those of pictures and sounds are drawn.
Configs name them ``preset:tiny-qwen3`` and ``preset:skills``. Chat templates by name (``chatml``) are for models that
have none of their own.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from luthier.errors import ModelError, SourceError
from luthier.writing import JsonObject

_FOLDER = Path(__file__).resolve().parent
_TOKENIZER = "tiny"  # models without a tokenizer of their own share it
ROWS_FOLDER = _FOLDER / "rows"
SPLITS = ("train", "test")
_DRAWN = ("pictures", "sounds")


def model_names() -> tuple[str, ...]:
    """The preset models, sorted."""
    return tuple(sorted(config.parent.name for config in _FOLDER.glob("models/*/config.json")))


def model_folder(name: str) -> Path:
    """The folder with ``config.json`` and ``generation_config.json`` of a preset model, and with all files of the
    processor of one that sees or hears; raises `ModelError`.
    """
    if name not in model_names():
        raise _unknown("preset model", name, model_names())
    return _FOLDER / "models" / name


def tokenizer_folder(name: str) -> Path:
    """The folder with ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``; raises `ModelError`.

    ``name`` is the tokenizer's own (``tiny``) or that of a preset model that uses it.
    """
    names = (_TOKENIZER, *model_names())
    if name not in names:
        raise _unknown("preset tokenizer", name, names)
    own = _FOLDER / "models" / name
    return own if (own / "tokenizer.json").is_file() else _FOLDER / "tokenizers" / _TOKENIZER


def _unknown(what: str, name: str, names: tuple[str, ...]) -> ModelError:
    nearest = get_close_matches(name, names, cutoff=0.4)
    return ModelError(
        f"no {what} is named {name!r}; there are {len(names)}: {', '.join(names)}",
        hint=f"did you mean {' or '.join(nearest)}?" if nearest else f"choose one of {', '.join(names)}",
    )


def dataset_names() -> tuple[str, ...]:
    """The preset data sets, sorted."""
    return tuple(sorted([*_DRAWN, *(path.name.partition(".")[0] for path in ROWS_FOLDER.glob("*.train.*"))]))


def dataset_rows(name: str, split: str) -> Iterator[JsonObject]:
    """The rows of a split, ``train`` or ``test``, always the same; raises `SourceError` for other names."""
    names = dataset_names()
    if name not in names:
        there_are = ", ".join(f"preset:{known}" for known in names)
        raise SourceError(f"preset:{name}: there is no such preset", hint=f"there are: {there_are}")
    if split not in SPLITS:
        raise SourceError(f"preset:{name} has no split {split!r}", hint=f"its splits are {' and '.join(SPLITS)}")
    if name not in _DRAWN:
        return _read_rows(ROWS_FOLDER / f"{name}.{split}.jsonl.gz")
    from luthier.presets import quizzes

    return quizzes.picture_rows(split) if name == "pictures" else quizzes.sound_rows(split)


def _read_rows(path: Path) -> Iterator[JsonObject]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)
