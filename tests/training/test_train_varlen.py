"""FlashAttention's path as a GPU would take it, with a kernel for the CPU in the kernel's place: boundaries, positions,
windows and types are those that keep segments apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_flash import HALF, NAME, Kernel, install
from tiny_models import MODELS, WINDOW, tiny_model, tree
from tiny_rows import epoch_steps, run_data
from torch import nn

from luthier.collation import CollateSettings
from luthier.collation.collator import collate_packs
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models import model as loading
from luthier.models.isolation import choose_isolation
from luthier.models.mixers import Isolation, attention_inputs
from luthier.records import Batch, Pack
from luthier.training.fit import fit_data
from luthier.training.report import RunResult

CPU = torch.device("cpu")
LEAVES = [
    leaf
    for lengths, seed in (((9, 5, 7), 1), ((6, 11, 4), 2), ((8, 6), 3))
    for leaf in tree(*lengths, seed=seed).segments()
]
PACKS = [Pack(segments=tuple(LEAVES[:3])), Pack(segments=tuple(LEAVES[3:]))]
ALONE = [collate_packs([Pack(segments=(leaf,))], packed=False, pad_token_id=0) for leaf in LEAVES]
PACKED = collate_packs(PACKS, packed=True, pad_token_id=0, varlen=True, pad_to_multiple_of=8)
LENGTHS = (14, 16, 17, 1, 10, 14, 24)  # the first row ends in a token of padding, the second in 24
WINDOWED = ("gemma3", "mistral", "gemma2")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel, installed; it takes single precision too, for equalities that rounding does not blur."""
    found = Kernel(dtypes=(*HALF, torch.float32))
    install(monkeypatch, found)
    return found


def log_probabilities(model: nn.Module, batches: list[Batch], isolation: Isolation, **changes: Any) -> torch.Tensor:
    """[K], with their graph."""
    found = []
    for batch in batches:
        inputs = attention_inputs(batch, isolation, windows={})
        logits_NV = model(**{**inputs, **changes}).logits.flatten(0, 1)
        found.append(logits_NV.log_softmax(-1)[batch.targets.positions_K, batch.targets.ids_K])
    return torch.cat(found)


def gradients(model: nn.Module, logps_K: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logps_K.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])  # it takes other kernels only
def test_boundaries_give_what_the_sequences_give_alone(name: str, kernel: Kernel) -> None:
    model = tiny_model(name)
    expected_K = log_probabilities(model, ALONE, Isolation.PADDED)
    expected = gradients(model, expected_K)
    model.set_attn_implementation(NAME)
    found_K = log_probabilities(model, [PACKED], Isolation.POSITIONS)
    torch.testing.assert_close(found_K, expected_K, atol=1e-4, rtol=0)
    for weight, gradient in gradients(model, found_K).items():
        torch.testing.assert_close(gradient, expected[weight], atol=1e-4, rtol=1e-4, msg=lambda m, n=weight: n + m)
    assert set(kernel.lengths) == {LENGTHS} and kernel.dense == 0
    # a window of 4 is the token and three before it; the kernel counts those beside it
    assert ((WINDOW - 1, WINDOW - 1) in kernel.windows) == (name in WINDOWED)


def test_control_a_kernel_that_does_not_look_at_boundaries_is_told_apart(kernel: Kernel) -> None:
    model = tiny_model("llama")
    expected_K = log_probabilities(model, ALONE, Isolation.PADDED).detach()
    model.set_attn_implementation(NAME)
    kernel.leaks = True
    moved_K = (log_probabilities(model, [PACKED], Isolation.POSITIONS).detach() - expected_K).abs()
    first = int(LEAVES[0].target.sum())
    assert moved_K[:first].max() < 1e-4 and moved_K[first:].max() > 1e-2


def choose(model: nn.Module, *, varlen: bool = True, num_rows: int = 1, asked: str = "auto") -> Any:
    how = CollateSettings(packed=True, pad_token_id=0, varlen=varlen)
    return choose_isolation(model, LEAVES, how, device=CPU, asked=asked, num_rows=num_rows)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_moe"])
def test_flash_attention_is_taken_where_it_holds_and_passed_over_where_it_leaks(name: str, kernel: Kernel) -> None:
    model = tiny_model(name)
    model.set_attn_implementation(NAME)
    chosen = choose(model, num_rows=2)
    assert (chosen.isolation, chosen.attention, chosen.notes) == (Isolation.POSITIONS, NAME, ())
    kernel.leaks = True
    assert choose(model).isolation is Isolation.SEGMENTS
    with pytest.raises(ModelError, match="changing one moved the logits of the next"):
        choose(model, asked=NAME)


def test_positions_alone_tell_segments_apart_in_one_row_and_in_no_more(kernel: Kernel) -> None:
    """A model with towers is given no boundaries, and transformers reads positions in batches of one row only."""
    model = tiny_model("llama")
    model.set_attn_implementation(NAME)
    assert choose(model, varlen=False).attention == NAME
    found = choose(model, varlen=False, num_rows=2)
    assert found.isolation is Isolation.SEGMENTS and "moved the logits of the next" in found.notes[0]
    assert kernel.dense > 0


def test_padded_rows_are_unpadded_for_the_kernel(kernel: Kernel) -> None:
    model = tiny_model("mistral")
    expected_K = log_probabilities(model, ALONE, Isolation.PADDED)
    model.set_attn_implementation(NAME)
    padded = collate_packs([Pack(segments=(leaf,)) for leaf in LEAVES], packed=False, pad_token_id=0)
    found_K = log_probabilities(model, [padded], Isolation.PADDED)
    torch.testing.assert_close(found_K, expected_K, atol=1e-4, rtol=0)
    assert set(kernel.lengths) == {tuple(len(leaf) for leaf in LEAVES)}


UNROLLED = {"train__shared_prompts": False}
RUNS: dict[str, dict[str, Any]] = {
    "sft": {"objective": {"name": "sft"}, "train__per_device_train_batch_size": 2},
    "dpo": {"objective": {"name": "dpo"}, **UNROLLED},  # its reference is precomputed, before anything is trained
    "kto": {"objective": {"name": "kto"}, **UNROLLED},  # its reference is a second model, in evaluation too
    "rm": {"objective": {"name": "rm"}, **UNROLLED},
}


def run(root: Path, tokenizer: Tokenizer, name: str, folder: str, **changes: Any) -> RunResult:
    settings = {"train__packing": "best_fit", "train__precision": "bf16", "eval__strategy": "steps", "eval__steps": 3}
    own = {key: value for key, value in RUNS[name].items() if key != "objective"}
    config = epoch_steps(root / folder, RUNS[name]["objective"], micro_batches=8, **{**settings, **own, **changes})
    return fit_data(config, tokenizer, run_data(root / "store", config, rows=range(8), held_out=range(4, 8)))


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel of 16 bits alone, as the real one is, that runs take as they would on a GPU."""
    found = Kernel()
    install(monkeypatch, found)
    monkeypatch.setattr(loading, "_attention", lambda *_: NAME)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_it_from_its_first_look_to_its_last_evaluation(
    tmp_path: Path, tokenizer: Tokenizer, strict: Kernel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = run(tmp_path, tokenizer, name, "flash")
    assert found.model.attn_implementation == NAME and strict.lengths and not strict.dense
    asked = len(strict.lengths)
    monkeypatch.undo()
    expected = run(tmp_path, tokenizer, name, "segments")
    assert expected.model.attn_implementation == "luthier_segments" and len(strict.lengths) == asked
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-2) and step.grad_norm == pytest.approx(
            other.grad_norm, rel=0.1
        )
    assert found.evals[-1].loss == pytest.approx(expected.evals[-1].loss, rel=1e-2)


def test_where_prompts_are_shared_another_attention_is_taken(
    tmp_path: Path, tokenizer: Tokenizer, strict: Kernel
) -> None:
    """A tree is more than boundaries can say, and a run that does not ask for FlashAttention shares what it can."""
    found = run(tmp_path, tokenizer, "dpo", "shared", train__shared_prompts="auto")
    assert found.model.attn_implementation == "luthier_segments" and not strict.lengths


def test_in_single_precision_a_run_takes_another_attention_and_says_so(
    tmp_path: Path, tokenizer: Tokenizer, strict: Kernel
) -> None:
    found = run(tmp_path, tokenizer, "sft", "fp32", train__precision="fp32")
    assert found.model.attn_implementation == "luthier_segments" and not strict.lengths
