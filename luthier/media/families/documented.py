"""The table of docs/families.md, printed from the rows of families."""

from __future__ import annotations

from luthier.media.families.family import Attention, Family, MediaKind, PackingSupport
from luthier.media.families.table import FAMILIES


def family_table() -> str:
    """A Markdown table: every family in alphabetical order, with what its row says in words."""
    lines = ["| family | model types | takes | positions | attention | rows | processors |", "|---" * 7 + "|"]
    for family in sorted(FAMILIES.values(), key=lambda row: row.name):
        cells = (
            f"`{family.name}`",
            _code(family.model_types),
            ", ".join(f"{kind.value}s" for kind in MediaKind if family.rule(kind) is not None),
            f"`{family.positions}`" if family.positions else "1-D",
            _attention(family.attention),
            _rows(family),
            _code(family.processors),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _attention(attention: Attention) -> str:
    match attention:
        case Attention.CAUSAL:
            return "causal"
        case Attention.IMAGE_BLOCKS:
            return "an item's tokens see each other"
        case Attention.WHOLE_BLOCKS:
            return "an item's tokens see each other, past windows too"
        case Attention.PREFIX:
            return "a prompt sees itself both ways"
        case Attention.CROSS:
            return "pictures are seen across"
        case Attention.ENCODED:
            return "a decoder sees the row's picture"
        case _:
            raise AssertionError(f"no word for {attention!r}")


def _rows(family: Family) -> str:
    match family.packing:
        case PackingSupport.PACKED:
            return "packed"
        case PackingSupport.PADDED:
            return f"padded: {family.reason}"
        case _:
            raise AssertionError(f"no word for {family.packing!r}")
