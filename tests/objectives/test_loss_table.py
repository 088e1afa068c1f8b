"""The page's tables say of each loss what it is, its paper and all its defaults, told once where they are shared."""

from __future__ import annotations

import re

import pytest

from luthier.config.objective import LOSSES
from scripts.doc_tables import loss_table

_NUMBER = re.compile(r"`(\w+): ([0-9.e-]+)`")


def numbers_in(text: str) -> dict[str, float]:
    return {key: float(value) for key, value in _NUMBER.findall(text)}


def told_defaults(page: str) -> dict[str, dict[str, float]]:
    """Of each loss, what a reader finds: the sentence above its table, then its row."""
    told = {}
    for group in page.split("### ")[1:]:
        above, rows = group.split("|---|---|---|---|---|\n")
        for row in rows.strip().splitlines():
            cells = re.split(r"(?<!\\)\|", row)[1:-1]
            name = cells[0].split("`")[1]
            assert name not in told, f"{name} stands there twice"
            told[name] = {**numbers_in(above), **numbers_in(cells[3])}
    return told


def test_a_reader_finds_every_default_of_every_loss_and_no_other() -> None:
    assert told_defaults(loss_table()) == {name: dict(options.numbers) for name, options in LOSSES.items()}


def test_a_default_that_the_sentence_above_a_table_has_wrong_is_seen() -> None:
    wrong = loss_table().replace("otherwise: `beta: 0.1`", "otherwise: `beta: 0.2`")
    assert told_defaults(wrong) != {name: dict(options.numbers) for name, options in LOSSES.items()}


@pytest.mark.parametrize("heading", ["`dpo`, `online_dpo`, compared with a", "`dpo`, `online_dpo`, without", "`rm`\n"])
def test_tables_are_headed_by_objective_and_reference(heading: str) -> None:
    assert f"### {heading}" in loss_table()
    assert ("simpo" in loss_table().split(f"### {heading}")[1].split("###")[0]) == ("without" in heading)
