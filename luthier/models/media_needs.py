"""What a family of models that see or hear asks of the run: positions, token types, rows of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from luthier.layout import position_scheme
from luthier.media.families import Attention, Family, Packing
from luthier.models.parts import families_of

TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids")  # what a model calls its token types; it reads one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaNeeds:
    """What a model that sees or hears asks of positions and attention, as its family's row has it.

    num_positions  rows of ``position_ids`` in a packed batch (`layout.packed_mrope`); None: one, without an axis for it
    text_row       the first of them is of text
    types          the input of token types by which the tokens of a picture see each other both ways; None: they do not
    whole          they do so past a sliding window, too
    prefix         what is before the answer is seen both ways, as `PREFIX_TYPES` say
    refusal        why segments may not share a row; None: they may
    along          inputs along the tokens beside ids and positions, ``types`` among them
    by_row         features that are kept row by row, so that rows cannot be parted again
    """

    num_positions: int | None = None
    text_row: bool = True
    types: str | None = None
    whole: bool = False
    prefix: bool = False
    refusal: str | None = None
    along: tuple[str, ...] = ()
    by_row: tuple[str, ...] = ()


def model_needs(model: PreTrainedModel) -> MediaNeeds:
    """Of a loaded model: what the rows of the table say of its kind; nothing of one that has no row."""
    families = families_of(model.config)
    return media_needs(families[0], model.config.to_dict()) if families else MediaNeeds()


def media_needs(family: Family, config: Mapping[str, Any]) -> MediaNeeds:
    """By the family's row and the model's config (as a dict)."""
    scheme = None if family.positions is None else position_scheme(family.positions, config)
    types = None
    if family.attention in (Attention.IMAGE_BLOCKS, Attention.WHOLE_BLOCKS):
        types = next(name for name in TYPE_INPUTS if name in family.token_inputs)
    refusal = f"family {family.name}: {family.reason}" if family.packing is Packing.PADDED else None
    return MediaNeeds(
        num_positions=None if scheme is None else scheme.text_row + scheme.num_axes,
        text_row=scheme is None or scheme.text_row,
        types=types,
        whole=family.attention is Attention.WHOLE_BLOCKS,
        prefix=family.attention is Attention.PREFIX,
        refusal=refusal,
        along=family.along,
        by_row=tuple(name for name, batching in family.batching.items() if batching.by_row),
    )
