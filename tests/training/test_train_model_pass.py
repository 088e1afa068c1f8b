"""How batches go through the trained model: what a run says of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_runs import make_data, make_segments

from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note

Train = Callable[..., RunResult]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def listen(notes: list[str]) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    return on_event


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        (
            "best_fit",
            "attention: luthier_segments, segments (sequences that share a row) kept apart by computing each alone",
        ),
        ("none", "model: attention by transformers' choice: no GPU"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said depends on the machine")
def test_a_run_says_once_which_attention_it_has(
    train: Train, notes: list[str], listen: Callable[[Event], None], packing: str, said: str
) -> None:
    """A choice that a later one takes the place of is neither told nor kept."""
    result = train(make_data(make_segments(4)), train__packing=packing, train__max_steps=1, on_event=listen)
    assert [note for note in notes if "attention" in note] == [said]
    assert [note for note in result.model.notes if "attention" in note] == [said.removeprefix("model: ")] * (
        packing == "none"
    )
