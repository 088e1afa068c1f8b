"""The page of families is what the table of families says."""

from __future__ import annotations

from pathlib import Path

from luthier.media.families import MediaKind
from luthier.media.family_table import family_table
from luthier.media.table import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"


def test_the_page_shows_the_table() -> None:
    assert family_table() in PAGE.read_text(encoding="utf-8"), "run `make docs`"


def test_every_family_has_a_line_with_its_kinds_and_reason() -> None:
    lines = {line.split("`")[1]: line for line in family_table().splitlines()[2:]}
    assert list(lines) == sorted(row.name for row in FAMILIES)
    for row in FAMILIES:
        line = lines[row.name]
        assert all((f"{kind.value}s" in line.split("|")[3]) == (row.rule(kind) is not None) for kind in MediaKind)
        assert row.reason in line and all(f"`{name}`" in line for name in (*row.processors, *row.model_types))
