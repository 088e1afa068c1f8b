"""The table of families: all rows, and which of them a processor is."""

from __future__ import annotations

from typing import Any

from luthier.errors import ModelError
from luthier.media import (
    rows_audio,
    rows_fixed,
    rows_grid,
    rows_omni,
    rows_pages,
    rows_remote,
    rows_senses,
    rows_tiles,
    rows_video,
)
from luthier.media.families import Family
from luthier.media.refusals import refusal
from luthier.media.unknown import unknown_family

FAMILIES: tuple[Family, ...] = (
    *rows_grid.ROWS,
    *rows_tiles.ROWS,
    *rows_fixed.ROWS,
    *rows_video.ROWS,
    *rows_omni.ROWS,
    *rows_audio.ROWS,
    *rows_pages.ROWS,
    *rows_senses.ROWS,
    *rows_remote.ROWS,
)


def family_of(processor: Any, model_type: str = "") -> Family:
    """The row that describes a processor; one without a row gets `unknown.unknown_family`.

    Some classes serve several families, which ``model_type`` (of the model's config) tells apart; without it the first
    row is taken. Raises `ModelError` for a model that is refused by name (`refusals`), and if not even the processor's
    own rule for its strings is known.
    """
    if (reason := refusal(type(processor).__name__, model_type)) is not None:
        raise ModelError(
            f"media of {model_type or type(processor).__name__} are refused: {reason}",
            hint="choose another model (docs/families.md), or train on rows without media",
        )
    names = {kind.__name__ for kind in type(processor).__mro__}
    rows = [row for row in FAMILIES if not names.isdisjoint(row.processors)]
    exact = [row for row in rows if type(processor).__name__ in row.processors] or rows
    for row in exact:
        if model_type in row.model_types:
            return row
    return exact[0] if exact else unknown_family(processor)


def opens_prompts(processor_class: str) -> bool:
    """Whether a processor of this class puts a begin-of-sequence token before a prompt that has none."""
    return any(row.opens and processor_class in row.processors for row in FAMILIES)


def decoder_of(processor_class: str | None) -> Family | None:
    """The row that names this class, if its model is a decoder beside an encoder."""
    return next((row for row in FAMILIES if row.decoder_names and processor_class in row.processors), None)


def family_named(name: str) -> Family:
    """The row of this name; raises `ModelError` if there is none."""
    for row in FAMILIES:
        if row.name == name:
            return row
    raise ModelError(f"no family is called {name!r}", hint=f"there are {', '.join(row.name for row in FAMILIES)}")
