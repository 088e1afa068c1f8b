"""A tool declaration is one block of the page, whatever the template writes between its strings."""

from __future__ import annotations

import pytest

from luthier.check.show.html import blocks
from luthier.check.show.token_origins import TOOLS, TokenOrigin
from luthier.check.show.view import TokenView

OWNERS = {
    "t": TokenOrigin(field=TOOLS),
    "u": TokenOrigin(message=0, role="user"),  # what the template writes in the user's turn
    "U": TokenOrigin(message=0, role="user", field="content"),
    "a": TokenOrigin(message=1, role="assistant"),
    "-": TokenOrigin(),
    "?": None,
}


def tokens(owners: str) -> list[TokenView]:
    return [
        TokenView(
            index=place, id=place, text=letter, num_tokens=1, name=letter, control=False, target=False, weight=1.0,
            segment=0, position=place, label=None, owner=OWNERS[letter],
        )
        for place, letter in enumerate(owners)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ("utututuUa", ["u", "tutut", "uU", "a"]),  # declarations inside of a turn
        ("-t-t-U", ["-t-t-", "U"]),  # before all turns
        ("tUt", ["t", "U", "t"]),  # a message's own text parts them
        ("t?t", ["t", "?", "t"]),  # and so does what nobody knows
        ("utu", ["u", "t", "u"]),
        ("uUa", ["uU", "a"]),
    ],
)
def test_what_stands_between_the_strings_of_declarations_is_theirs(owners: str, expected: list[str]) -> None:
    found = blocks(tokens(owners))
    assert ["".join(m.text for s in block.stretches for m in s.marks) for block in found] == expected
    assert all(block.name == TOOLS for block, text in zip(found, expected, strict=True) if "t" in text)
