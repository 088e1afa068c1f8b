"""Runs whose head a kernel computes are the runs that chunks compute; a kernel that is not as good is never used.

The kernel is one in plain torch; `test_train_liger` runs this file again with Liger's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_kernel import IS_INTERPRETED, PlainKernel, kernel_under_test
from tiny_models import tiny_model, tree
from tiny_rows import epoch_steps, run_data
from tiny_runs import make_config
from torch import nn

from luthier.collation.collator import collate_packs
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models.passes import OutputHead, find_head
from luthier.objectives import KernelAnswer, KernelTask, LossKernel
from luthier.records import Pack
from luthier.training.fit import fit_data
from luthier.training.losses import objective
from luthier.training.losses.objective import choose_kernel
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note
from luthier.training.report.report import Report

ROWS = 4
TRIALS = 3  # of a kernel, before a run
LORA = {"adapter__type": "lora", "adapter__r": 4}
INPUTS = collate_packs([Pack(segments=(tree(8, 5).segments()[0],))], packed=True, pad_token_id=0).model_inputs
PEFT_NOISE = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


class Counted:
    """A kernel, and what it was asked."""

    def __init__(self, kernel: LossKernel) -> None:
        self.kernel, self.name, self.tasks = kernel, kernel.name, list[KernelTask]()

    def __call__(self, task: KernelTask) -> KernelAnswer:
        self.tasks.append(task)
        return self.kernel(task)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What a run takes for Liger's kernel, on this CPU."""
    counted = Counted(kernel_under_test(monkeypatch))
    monkeypatch.setattr(objective, "LigerKernel", lambda: counted)
    if not IS_INTERPRETED:
        _pretend(monkeypatch)
    return counted


def _pretend(monkeypatch: pytest.MonkeyPatch, *, installed: bool = True, runs: bool = True) -> None:
    monkeypatch.setattr(objective, "liger_is_installed", lambda: installed)
    monkeypatch.setattr(objective, "runs_on", lambda device: runs)


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., tuple[RunResult, list[str]]]:
    """``run(objective, head_kernel, **changes)``: three steps, their evaluation, and what the run said."""

    def train(objective: dict[str, Any], head_kernel: str, **changes: Any) -> tuple[RunResult, list[str]]:
        notes: list[str] = []

        def listen(event: Event) -> None:
            if isinstance(event, Note):
                notes.append(event.text)

        sizes = {"train__per_device_train_batch_size": ROWS, "eval__per_device_eval_batch_size": ROWS}
        evaluating = {"eval__strategy": "steps", "eval__steps": 3}
        changes = {"train__head_kernel": head_kernel, **sizes, **evaluating, **changes}
        config = epoch_steps(tmp_path / head_kernel, objective, rows=ROWS, **changes)
        weighted = objective["name"] == "sft"
        data = run_data(tmp_path / "store", config, rows=range(ROWS), held_out=range(4, 6), weighted=weighted)
        return fit_data(config, tokenizer, data, on_event=listen), notes

    return train


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sft": ({"name": "sft"}, {"train__packing": "best_fit", "train__per_device_train_batch_size": 1}),
    "sft, smoothed, lora": ({"name": "sft", "label_smoothing": 0.1, "z_loss": 1e-3}, LORA),
    "dpo, lora": ({"name": "dpo", "sft_weight": 0.5}, {**LORA, "train__packing": "best_fit"}),
    "dpo, second model": ({"name": "dpo", "reference": "model"}, {}),
    "kto, lora": ({"name": "kto"}, LORA),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_by_the_kernel_is_the_run_by_chunks(kernel: Counted, run: Any, name: str) -> None:
    objective, changes = RUNS[name]
    found, notes = run(objective, "liger", **changes)
    asked = len(kernel.tasks)
    expected, _ = run(objective, "chunked", **changes)
    assert asked >= TRIALS + len(found.steps) and len(kernel.tasks) == asked
    for mine, chunked in zip(found.steps, expected.steps, strict=True):
        assert mine.loss == pytest.approx(chunked.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(chunked.grad_norm, rel=1e-4)
    assert found.evals[-1].loss == pytest.approx(expected.evals[-1].loss, rel=1e-5)
    assert found.evals[-1].token_accuracy == expected.evals[-1].token_accuracy
    assert f"head kernel: {kernel.name}, which agrees with the chunks on the first row" in notes
    assert (found.model.head_kernel, expected.model.head_kernel) == (kernel.name, "chunked")
    assert Report(result=found).to_json()["model"]["head_kernel"] == kernel.name


def test_a_loss_that_the_kernel_does_not_know_stays_with_the_chunks(kernel: Counted, run: Any) -> None:
    found, notes = run({"name": "sft", "loss": "dft"}, "liger")
    expected, _ = run({"name": "sft", "loss": "dft"}, "chunked")
    assert [step.loss for step in found.steps] == [step.loss for step in expected.steps]
    assert "head kernel: chunked, as liger does not know the loss dft" in notes
    assert found.model.head_kernel == "chunked" and kernel.tasks == []


def test_auto_on_a_cpu_says_nothing_and_computes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch)
    head, told = _choose("auto", device="cpu")
    assert (head.kernel, told) == (None, [])


# ------------------------------------------------------------------------------------------------------- the decision


def _choose(
    policy: str,
    *,
    model: nn.Module | None = None,
    head: OutputHead | None = None,
    device: str = "cuda",
    autocast: torch.dtype | None = None,
) -> tuple[OutputHead, list[str]]:
    """What is decided for a model on the CPU by a run that is said to be on ``device``, and what it tells."""
    model = tiny_model("llama") if model is None else model
    config = make_config(Path("run"), train__head_kernel=policy, objective={"name": "dpo"})
    parts: Any = SimpleNamespace(config=config, device=torch.device(device), autocast=autocast)
    told: list[str] = []
    found = choose_kernel(parts, model, find_head(model) if head is None else head, INPUTS, told.append)
    assert model.training
    return found, told


def _lying(monkeypatch: pytest.MonkeyPatch, lie: Any) -> None:
    _pretend(monkeypatch)
    monkeypatch.setattr(objective, "LigerKernel", lambda: PlainKernel(lie))


def _one_percent(answer: KernelAnswer) -> KernelAnswer:
    return replace(answer, losses_K=answer.losses_K * 1.01)


@pytest.mark.parametrize("policy", ["auto", "liger"])
def test_a_kernel_that_is_as_good_is_taken(kernel: Counted, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    _pretend(monkeypatch)
    head, told = _choose(policy)
    assert head.kernel is kernel and told == [
        f"head kernel: {kernel.name}, which agrees with the chunks on the first row"
    ]
    assert {task.hidden_KD.dtype for task in kernel.tasks} == {torch.float32}
    assert {task.needs for task in kernel.tasks} >= {(True, True, False)}, "the weight is trained"


def test_it_is_tried_in_the_type_that_training_computes_in(kernel: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch)
    head, _ = _choose("liger", autocast=torch.bfloat16)
    assert head.kernel is kernel and {task.weight_VD.dtype for task in kernel.tasks} == {torch.bfloat16}


def test_one_that_lies_is_refused_by_name_and_passed_over_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    _lying(monkeypatch, _one_percent)
    with pytest.raises(ModelError, match=r"head_kernel is liger, but a mean loss of \S+ in place of \d") as refused:
        _choose("liger")
    assert refused.value.hint is not None and "set train.head_kernel: auto, or chunked" in refused.value.hint
    head, (told,) = _choose("auto")
    assert head.kernel is None and told.startswith("head kernel: chunked, not liger: a mean loss of ")


def test_a_named_kernel_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, installed=False)
    with pytest.raises(ModelError, match="liger, but liger-kernel is not installed"):
        _choose("liger")
    assert _choose("auto")[0].kernel is None
    _pretend(monkeypatch, runs=False)
    with pytest.raises(ModelError, match="its kernels need a GPU, and the model is on the cpu"):
        _choose("liger", device="cpu")


def test_a_package_without_the_function_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> LossKernel:
        raise ImportError("cannot import name 'fused_linear_cross_entropy_forward'")

    _pretend(monkeypatch)
    monkeypatch.setattr(objective, "LigerKernel", missing)
    with pytest.raises(ModelError, match="liger-kernel cannot be imported: cannot import name 'fused"):
        _choose("liger")
    assert "chunked, not liger: liger-kernel cannot be imported" in _choose("auto")[1][0]


@pytest.mark.filterwarnings(PEFT_NOISE)
def test_a_head_whose_weight_cannot_be_had_is_no_kernels(kernel: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch)
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "lm_head"])).train()
    with pytest.raises(ModelError, match="the output layer is peft's Linear, and a kernel needs its weight"):
        _choose("liger", model=adapted)
    model = tiny_model("llama")
    untapped = OutputHead(layer=find_head(model).layer, tapped=False, note="the model makes its own logits")
    with pytest.raises(ModelError, match="but the model makes its own logits"):
        _choose("liger", model=model, head=untapped)
    assert _choose("auto", model=model, head=untapped) == (untapped, [])
    assert kernel.tasks == []


def test_it_is_tried_with_the_settings_of_the_runs_loss(kernel: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch)
    config = make_config(Path("run"), train__head_kernel="liger", objective={"name": "sft", "label_smoothing": 0.2})
    parts: Any = SimpleNamespace(config=config, device=torch.device("cpu"), autocast=None)
    model = tiny_model("llama")
    choose_kernel(parts, model, find_head(model), INPUTS, lambda text: None)
    assert 0.2 in {task.label_smoothing for task in kernel.tasks}
