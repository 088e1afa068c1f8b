"""How batches go through the trained model: what a run says of it, and what a compiled model keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_runs import make_data, make_segments
from torch._dynamo.testing import CompileCounter

from luthier.train.events import Event, Note
from luthier.train.head_tap import OutputHead
from luthier.train.passes import ModelPass
from luthier.train.result import RunResult

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
        ("best_fit", "attention: luthier_segments, segments kept apart by segments"),
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


def test_a_compiled_model_keeps_its_attention_and_makes_its_own_logits(
    train: Train, notes: list[str], listen: Callable[[Event], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced by Dynamo, with its graphs run as they are: code for the machine is the compiler's affair, and takes a
    minute. The losses are those of the same run without."""
    torch._dynamo.reset()
    counter, heads = CompileCounter(), set[OutputHead | None]()
    compile_model, real = torch.compile, ModelPass.scored

    def listening(self: ModelPass, *arguments: Any) -> Any:
        heads.add(self.head)
        return real(self, *arguments)

    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_model(model, backend=counter))
    monkeypatch.setattr(ModelPass, "scored", listening)
    segments = make_data(make_segments(6), make_segments(2, seed=3))
    short = {"train__packing": "best_fit", "train__max_steps": 2, "train__gradient_accumulation_steps": 3}
    short |= {"eval__strategy": "steps", "eval__steps": 2}
    compiled = train(segments, folder="compiled", train__torch_compile=True, on_event=listen, **short)
    assert counter.frame_count > 0, "something was compiled"
    assert "attention: sdpa, segments kept apart by positions" in notes
    assert [note for note in notes if note.startswith("head: ")] == [
        "head: the model makes its own logits, where rows have targets: it is compiled as it is"
    ]
    (head,) = heads
    assert head is not None and not head.tapped
    heads.clear()
    plain = train(segments, folder="plain", **short)
    (head,) = heads
    assert head is not None and head.tapped, "control: without a compiler the head is tapped"
    for one, other in zip((*compiled.steps, *compiled.evals), (*plain.steps, *plain.evals), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
