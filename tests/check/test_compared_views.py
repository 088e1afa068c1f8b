"""Views of pairs and feedback say that targets are scored: a rejected answer is nothing that a model must emit."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from luthier.check.show.html import page_html, tokens_html
from luthier.check.show.view import RowView, show_pack
from luthier.check.terminal import RowText
from luthier.records import Address, Pack, Segment


class Characters:
    """A token per character."""

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))

    def token(self, token_id: int) -> str:
        return chr(token_id)


@pytest.fixture
def conversation() -> RowView:
    segment = Segment(
        input_ids=np.array([*map(ord, "ask tell")], dtype=np.int32),
        target=np.array([False] * 4 + [True] * 4),
        weight=None,
        address=Address(file="rows.jsonl", row=1),
    )
    return show_pack(Pack(segments=(segment,)), Characters(), title="row 1")


@pytest.fixture
def rejected(conversation: RowView) -> RowView:
    said = "the rejected one of two answers to a prompt"
    return replace(conversation, segments=tuple(replace(one, continuation=said) for one in conversation.segments))


def in_a_terminal(row: RowView, *, colours: bool) -> str:
    console = Console(width=100, file=StringIO(), force_terminal=colours, no_color=not colours, record=True)
    console.print(RowText(row=row))
    return console.export_text()


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_names_what_becomes_of_targets(conversation: RowView, rejected: RowView, colours: bool) -> None:
    assert "learned" in in_a_terminal(conversation, colours=colours)
    shown = in_a_terminal(rejected, colours=colours)
    assert "scored" in shown and "learned" not in shown


def test_pages_do_not_say_that_a_rejected_answer_is_learned(conversation: RowView, rejected: RowView) -> None:
    for page in (tokens_html, lambda rows: page_html(rows, title="row 1")):
        assert "the model must emit it" in page([conversation]) and "4 of 8 learned" in page([conversation])
        shown = page([rejected])
        assert "that is to win or to lose" in shown and "4 of 8 scored" in shown
        assert "must emit" not in shown and "learns to emit" not in shown and "of 8 learned" not in shown
