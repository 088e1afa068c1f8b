"""The preset data sets by name, as configs write them after ``preset:``."""

from __future__ import annotations

from collections.abc import Iterator

from luthier.errors import SourceError
from luthier.presets.pictures import picture_rows
from luthier.presets.preferences import feedback_rows, preference_rows, preference_sft_rows
from luthier.presets.questions import JsonObject
from luthier.presets.skills import lookup_rows, lookup_sft_rows, skills_rows
from luthier.presets.sounds import sound_rows

_ROWS = {
    "skills": skills_rows,
    "preferences": preference_rows,
    "feedback": feedback_rows,
    "preferences_sft": preference_sft_rows,
    "lookups": lookup_rows,
    "lookups_sft": lookup_sft_rows,
    "pictures": picture_rows,
    "sounds": sound_rows,
}


def dataset_names() -> tuple[str, ...]:
    """The preset data sets, sorted."""
    return tuple(sorted(_ROWS))


def dataset_rows(name: str, split: str) -> Iterator[JsonObject]:
    """The rows of a split, ``train`` or ``test``, always the same; raises `SourceError` for other names."""
    if name not in _ROWS:
        there_are = ", ".join(f"preset:{known}" for known in _ROWS)
        raise SourceError(f"preset:{name}: there is no such preset", hint=f"there are: {there_are}")
    return _ROWS[name](split)
