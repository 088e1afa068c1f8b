"""Compiled decoder layers: the same losses, a tapped head, and no graph for each batch.

Traced by Dynamo, with its graphs run as they are: code for the machine is the compiler's affair, and takes a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_rows import run_data
from tiny_runs import TINY, make_config, make_data, make_segments
from torch._dynamo import eval_frame
from torch._dynamo.testing import CompileCounter

from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models import attention, sharding
from luthier.models.passes import ModelPass, OutputHead
from luthier.training.fit import fit_data
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note, StepDone

# Dynamo looks at an attribute that torch warns about
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

Train = Callable[..., RunResult]
FULL_ROWS = {"train__packing": "best_fit", "train__pad_to_multiple_of": 64, "data__max_length": 64}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    torch._dynamo.reset()
    counter, compile_module = CompileCounter(), torch.compile
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep all of it
    monkeypatch.setattr(torch, "compile", lambda module, **_: compile_module(module, backend=counter))
    return counter


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> set[OutputHead | None]:
    used, scored = set[OutputHead | None](), ModelPass.scored

    def listening(self: ModelPass, *arguments: Any) -> Any:
        used.add(self.head)
        return scored(self, *arguments)

    monkeypatch.setattr(ModelPass, "scored", listening)
    return used


def assert_same_losses(one: RunResult, other: RunResult) -> None:
    assert len(one.steps) == len(other.steps) > 0
    for mine, its in zip((*one.steps, *one.evals), (*other.steps, *other.evals), strict=True):
        assert mine.loss == pytest.approx(its.loss, rel=1e-5)


def test_compiled_layers_train_alike_with_a_tapped_head(
    train: Train, counter: CompileCounter, heads: set[OutputHead | None]
) -> None:
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    rows = make_data(make_segments(6), make_segments(2, seed=3))
    short = {"train__packing": "best_fit", "train__max_steps": 2, "train__gradient_accumulation_steps": 3}
    short |= {"eval__strategy": "steps", "eval__steps": 2}
    found = train(rows, folder="compiled", train__torch_compile=True, on_event=listen, **short)
    assert counter.frame_count > 0, "something was compiled"
    assert "model: 2 decoder layers are compiled, in the first steps" in notes
    assert not [note for note in notes if note.startswith("head: ")], "nothing is wrong with the head"
    (head,) = heads
    assert head is not None and head.tapped
    if not torch.cuda.is_available():
        assert any("luthier_segments" in note and "kept apart by computing each alone" in note for note in notes)
    assert_same_losses(found, train(rows, folder="plain", **short))


def frames_after_steps(train: Train, counter: CompileCounter, num_steps: int) -> list[int]:
    """How many graphs there were at the end of each step, of which each has rows cut at other places."""
    frames: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            frames.append(counter.frame_count)

    rows = make_data([segment for seed in range(6) for segment in make_segments(4, seed=seed)])
    train(rows, train__torch_compile=True, train__max_steps=num_steps, on_event=listen, **FULL_ROWS)
    assert len(frames) == num_steps
    return frames


def test_where_rows_are_cut_is_nothing_to_the_graphs(train: Train, counter: CompileCounter) -> None:
    first, *_, last = frames_after_steps(train, counter, 5)
    assert first == last > 0


def test_attention_within_the_graphs_would_make_one_for_each_batch(
    train: Train, counter: CompileCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the second batch has a graph of its own already."""
    traced = attention.segments_attention._torchdynamo_orig_callable
    monkeypatch.setattr(attention, "segments_attention", traced)
    first, last = frames_after_steps(train, counter, 2)
    assert first < last


def test_generation_compiles_nothing(tmp_path: Any, tokenizer: Tokenizer, counter: CompileCounter) -> None:
    config = make_config(
        tmp_path / "run", train__torch_compile=True, train__max_steps=1, eval__generate_rows=2, eval__max_new_tokens=12
    )
    frames: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            frames.append(counter.frame_count)

    data = run_data(tmp_path / "rows", config, rows=range(3), held_out=range(3, 5))
    result = fit_data(config, tokenizer, data, on_event=listen)
    assert result.generations, "it generated"
    assert counter.frame_count == frames[0] > 0


def test_pairs_are_compared_alike_with_and_without_an_adapter(
    tmp_path: Any, tokenizer: Tokenizer, counter: CompileCounter
) -> None:
    """The reference is the same layers, their adapters disabled: graphs of their own."""

    def result(*, torch_compile: bool) -> RunResult:
        config = make_config(
            tmp_path / "run",
            # nearly all of the time is Dynamo's
            model__config_overrides={"num_hidden_layers": 1},
            objective={"name": "dpo"},
            adapter={"type": "lora", "r": 4, "target_modules": ["q_proj"]},
            train__max_steps=2,
            train__torch_compile=torch_compile,
            output__overwrite=True,
            **FULL_ROWS,  # of one length, or Dynamo would look at each again
        )
        return fit_data(config, tokenizer, run_data(tmp_path / "rows", config, rows=range(4)))

    found = result(torch_compile=True)
    assert counter.frame_count > 0
    assert_same_losses(found, result(torch_compile=False))


def test_a_model_without_decoder_layers_cannot_be_compiled(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "decoder_layers", lambda model: None)
    with pytest.raises(ModelError, match="has no list of decoder layers"):
        train(make_data(make_segments(2)), train__torch_compile=True, train__max_steps=1)


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_layers_that_are_recomputed_are_compiled_too(
    train: Train, counter: CompileCounter, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    """Where attention runs between the graphs, no graph may hold the checkpoint: it would be no graph at all."""
    in_training, count = list[bool](), CompileCounter.__call__
    recomputed, checkpoint = list[bool](), sharding.checkpoint

    def counting(self: CompileCounter, *arguments: Any) -> Any:
        in_training.append(torch.is_grad_enabled())
        return count(self, *arguments)

    def checking(*arguments: Any, **settings: Any) -> Any:
        recomputed.append(True)
        return checkpoint(*arguments, **settings)

    monkeypatch.setattr(CompileCounter, "__call__", counting)
    monkeypatch.setattr(sharding, "checkpoint", checking)
    rows = make_data(make_segments(6))
    short: dict[str, Any] = {**FULL_ROWS, "train__packing": packing, "train__max_steps": 2}
    short |= {"train__gradient_checkpointing": True}
    found = train(rows, folder="compiled", train__torch_compile=True, **short)
    assert any(in_training) and len(recomputed) == 2 * 2, "two layers in two steps"
    assert_same_losses(found, train(rows, folder="plain", **short))
    assert len(recomputed) == 2 * 2


def test_layers_share_their_graphs_from_the_first_look_on(train: Train, counter: CompileCounter) -> None:
    """With a cache for keys and values each layer would have a graph of its own, and only the first eight any."""
    deep = {**TINY, "num_hidden_layers": 4}
    train(make_data(make_segments(3)), train__torch_compile=True, train__max_steps=1, model__config_overrides=deep)
    assert counter.frame_count == 2, "one without gradients, one with"


def test_recomputed_layers_generate_as_they_are() -> None:
    def stance() -> str:
        return eval_frame._stance.stance

    model = tiny_model("qwen3")
    with sharding.uncompiled(model):
        assert stance() == "default"
    sharding.compile_layers(model, recomputed=True)
    sharding.uncompiled(model)
    assert stance() == "default", "nothing is changed before it is entered"
    with sharding.uncompiled(model):
        assert stance() == "force_eager"
    assert stance() == "default"
