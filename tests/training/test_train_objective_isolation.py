"""For every objective: rows are kept apart by what holds on the model, or the run is refused; and logits stay few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SIZES
from tiny_rows import epoch_steps, run_data
from tiny_runs import TINY
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.models.qwen3 import modeling_qwen3

from luthier import objectives as head
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.training.fit import fit_data
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note
from luthier.training.trainer import Trainer

ROWS = 6
VOCABULARY = 2048
TRANSPOSED_HEAD = (TINY["hidden_size"], VOCABULARY)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"name": "sft"},
    "dpo": {"name": "dpo", "loss": "simpo"},
    "kto": {"name": "kto", "reference": "model"},
    "rm": {"name": "rm"},
}
Run = Callable[..., RunResult]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer, notes: list[str]) -> Run:
    """``run(objective, **changes)``: steps on all rows, packed, with what is compared in trees."""

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    def train(objective: str, *, held_out: range = range(0), **changes: Any) -> RunResult:
        section = OBJECTIVES[objective]
        shared = {} if objective == "sft" else {"train__shared_prompts": True}
        changes = {"train__packing": "best_fit", "micro_batches": ROWS, **shared, **changes}
        folders = len(list(tmp_path.glob("run*")))
        config = epoch_steps(tmp_path / f"run{folders}", section, rows=ROWS, **changes)
        data = run_data(tmp_path / "store", config, rows=range(ROWS), held_out=held_out)
        return fit_data(config, tokenizer, data, on_event=listen)

    return train


def attends_to_all_before(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, *_: Any, **__: Any) -> Any:
    """Qwen3's attention, blind to masks and plans."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    q, k = modeling_qwen3.apply_rotary_pos_emb(q, k, *position_embeddings)
    seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(seen.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_model_that_mixes_what_shares_a_row_gets_rows_of_one_segment_or_is_refused(
    run: Run, notes: list[str], monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    sound = run(objective)
    assert any("kept apart by computing each alone" in note for note in notes), "control"
    notes.clear()
    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", attends_to_all_before)
    mixing = run(objective)
    said = [note for note in notes if note.startswith("attention")]
    assert any(note.startswith("attention: sdpa") and "kept apart by padding" in note for note in said)
    assert said[0].startswith("attention: not luthier_segments by segments: changing one moved the logits of the next")
    for one, other in zip(mixing.steps, sound.steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    kind = "Qwen3ForSequenceClassification" if objective == "rm" else "Qwen3ForCausalLM"
    with pytest.raises(ModelError, match=rf"^{kind} does not keep(.|\n)*model.attn_implementation: auto"):
        run(objective, model__attn_implementation="sdpa")


class Watch(TorchDispatchMode):
    """How many rows the largest tensor has that is as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            is_wide = isinstance(each, torch.Tensor) and each.ndim > 1 and each.shape[-1] == VOCABULARY
            if is_wide and each.shape != TRANSPOSED_HEAD:
                self.most = max(self.most, each.numel() // VOCABULARY)
        return found


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_logits_of_all_targets_never_exist_in_training_or_evaluation(
    run: Run, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    """Chunks of four targets; and of each row of a batch the first token, whose logits the model makes itself."""
    watch, real = Watch(), Trainer.train

    def watched(self: Trainer, *arguments: Any) -> Any:
        with watch:
            return real(self, *arguments)

    monkeypatch.setattr(Trainer, "train", watched)
    everything = {
        "train__per_device_train_batch_size": ROWS, "micro_batches": 1, "eval__per_device_eval_batch_size": ROWS,
        "held_out": range(ROWS), "eval__strategy": "steps", "eval__steps": 3,
    }  # fmt: skip
    run(objective, **everything)
    assert watch.most > 3 * ROWS, "control: with room for all targets they are one chunk"
    watch.most = 0
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 4 * VOCABULARY)
    result = run(objective, **everything)
    assert len(result.evals) == 2 and 0 < watch.most <= ROWS


def test_the_load_of_experts_is_balanced_by_the_models_own_coefficient_unless_the_run_says_otherwise(
    run: Run, notes: list[str], tmp_path: Path
) -> None:
    """The loss was left out, and the run said so; now it is there, whatever transformers' own switch says."""
    sizes = {**SIZES, "vocab_size": VOCABULARY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    losses = []
    for asked, changes in ((False, {}), (True, {}), (False, {"train__router_aux_loss_coef": 0})):
        Qwen3MoeConfig(**sizes, output_router_logits=asked, router_aux_loss_coef=5.0).save_pretrained(
            tmp_path / "experts"
        )
        model = {"name_or_path": str(tmp_path / "experts"), "random_init": True}
        losses.append([step.loss for step in run("sft", model=model, **changes).steps])
        said = [note for note in notes if note.startswith("experts")]
        assert said == ([] if changes else ["experts: their load is balanced by a loss (router_aux_loss_coef 5)"])
        notes.clear()
    assert losses[0] == losses[1] and losses[0][0] == losses[2][0] and losses[0][1:] != losses[2][1:]
    run("sft")
    assert not any(note.startswith("experts") for note in notes), "control"
