"""The loss of a step is that of its rows, however they are divided: into micro-batches, packs, trees, or over ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_rows import epoch_steps, run_data

from luthier.encoding.tokenizer import Tokenizer
from luthier.loader.settings import units_of
from luthier.training.fit import fit_data
from luthier.training.folder.checkpoint import OBJECTIVE_STATE
from luthier.training.losses import pairs
from luthier.training.report import RunResult

PROGRAM = Path(__file__).with_name("tiny_process.py")
ROWS = 8
# Rows of training: what was learned has a KL, and a row that is there twice may be with two ranks.
HELD_OUT = range(4, 8)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"name": "sft"},
    "turns": {"name": "sft"},
    "smoothed": {"name": "sft", "label_smoothing": 0.1},
    "dpo": {"name": "dpo", "ld_alpha": 0.5},
    "simpo": {"name": "dpo", "loss": "simpo"},
    "rm": {"name": "rm", "center_rewards": 0.01},
    # bad rows count little, so that all answers get likelier and the KL is not clamped to 0
    "kto": {"name": "kto", "beta": 0.5, "undesirable_weight": 0.05},
    "bco_pair": {"name": "dpo", "loss": "bco_pair"},
    "bco": {"name": "kto", "loss": "bco", "undesirable_weight": 0.05},
    "kto_pair": {"name": "dpo", "loss": "kto_pair", "beta": 0.5, "sft_weight": 1.0},
    "aot": {"name": "dpo", "loss": "aot", "beta": 0.5},
    "aot_unpaired": {"name": "dpo", "loss": "aot_unpaired", "beta": 0.5, "label_smoothing": 0.1},
}
WEIGHTED = ("sft", "turns", "dpo", "kto", "aot_unpaired")
TURNS = {"turns": 4}  # the answers of a row, whose history is rewritten behind each of them
PACKED = {"train__packing": "best_fit", "micro_batches": ROWS}
WHOLE = {"train__per_device_train_batch_size": ROWS}
UNROLLED = {**PACKED, "micro_batches": 5 * ROWS, "train__shared_prompts": False}
DIVISIONS: dict[str, dict[str, Any]] = {
    "one row a micro-batch": {"train__per_device_train_batch_size": 1, "eval__per_device_eval_batch_size": 1},
    # 3 + 3 + 2: the last micro-batch is smaller
    "three rows a micro-batch": {"train__per_device_train_batch_size": 3, "eval__per_device_eval_batch_size": 3},
    "two packs a micro-batch": {**PACKED, "train__per_device_train_batch_size": 2, "train__shared_prompts": False},
    "one tree or more a micro-batch": {**PACKED, "train__shared_prompts": True},
}
EVALUATING = {"eval__strategy": "steps", "eval__steps": 3}
SAVING = {"output__save_strategy": "steps", "output__save_steps": 3}


def _run(root: Path, tokenizer: Tokenizer, objective: str, name: str, **changes: Any) -> RunResult:
    saving = SAVING if objective.startswith("bco") else {}  # the others have no state
    config = epoch_steps(root / name, OBJECTIVES[objective], rows=ROWS, **EVALUATING, **saving, **changes)
    data = run_data(
        root / "store",
        config,
        rows=range(ROWS),
        held_out=HELD_OUT,
        weighted=objective in WEIGHTED,
        turns=TURNS.get(objective),
    )
    return fit_data(config, tokenizer, data)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in TURNS])
def test_a_step_does_not_depend_on_how_its_rows_are_divided(
    tmp_path: Path, tokenizer: Tokenizer, objective: str
) -> None:
    whole = _run(tmp_path, tokenizer, objective, "whole", **WHOLE)
    assert len(whole.steps) == 3 and whole.steps[2].loss < whole.steps[0].loss
    config = epoch_steps(tmp_path / "unused", OBJECTIVES[objective], **WHOLE)
    for name, changes in DIVISIONS.items():
        if "tree" in name and units_of(config).size == 1:
            continue  # a row of one answer has nothing to share
        found = _run(tmp_path, tokenizer, objective, name, **changes)
        _require_same(found, whole, name)
    assert bool(_state(whole)) == objective.startswith("bco")


def _require_same(found: RunResult, whole: RunResult, name: str) -> None:
    for step, expected in zip(found.steps, whole.steps, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=1e-4), f"{name}, step {step.step}"
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4), f"{name}, step {step.step}"
    # before the first update rewards are 0 but for rounding, and which of two is larger is chance
    for step, expected in zip(found.steps[1:], whole.steps[1:], strict=True):
        assert step.measures == pytest.approx(expected.measures, rel=1e-3, abs=1e-5), f"{name}, step {step.step}"
    assert found.evals[-1].loss == pytest.approx(whole.evals[-1].loss, rel=1e-4), name
    assert found.evals[-1].measures == pytest.approx(whole.evals[-1].measures, rel=1e-3, abs=1e-5), name
    assert _state(found) == pytest.approx(_state(whole), rel=1e-4), name


def _state(result: RunResult) -> list[float]:
    """What the objective remembers after the last step."""
    path = Path(result.output_dir) / "checkpoint-3" / OBJECTIVE_STATE
    if not path.is_file():
        return []
    return [value for each in json.loads(path.read_text()).values() for value in each.values()]


@pytest.mark.parametrize("objective", ["aot", "aot_unpaired"])
def test_a_loss_that_sorted_micro_batches_would_depend_on_them(
    tmp_path: Path, tokenizer: Tokenizer, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: what the tests above compare can differ."""
    whole = _run(tmp_path, tokenizer, objective, "whole", **WHOLE)
    monkeypatch.setattr(pairs, "_is_whole_step", lambda batches: True)
    single = _run(tmp_path, tokenizer, objective, "single", **DIVISIONS["one row a micro-batch"])
    assert abs(single.steps[2].loss / whole.steps[2].loss - 1) > 1e-3
    with pytest.raises(AssertionError):
        _require_same(single, whole, "single")


def test_the_kl_and_the_mean_reward_of_the_runs_compared_take_part(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A KL that is clamped to 0, or a mean that nobody reads, would be the same under any division."""
    kto = _run(tmp_path, tokenizer, "kto", "kto", **WHOLE)
    assert kto.steps[1].measures["kl"] > 1e-2 and kto.evals[-1].measures["kl"] > 1e-2
    bco = _run(tmp_path, tokenizer, "bco_pair", "bco", **WHOLE)
    assert all(value != 0 and math.isfinite(value) for value in _state(bco))


# ------------------------------------------------------------------------------------------------------------- ranks

IDLE = 5  # turns that each step has to spare
SHARED_OUT = {
    "sft": {**PACKED, "train__per_device_train_batch_size": 2},
    "turns": {**PACKED, "train__shared_prompts": True},
    "dpo": {**PACKED, "train__shared_prompts": True},
    "rm": {"train__per_device_train_batch_size": 3},
    "kto": {**PACKED, "train__shared_prompts": True},
    "bco_pair": {"train__per_device_train_batch_size": 1},
    "aot_unpaired": {"train__per_device_train_batch_size": 3},
}


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_ranks_have_the_steps_of_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Ranks share out micro-batches; the KL, the mean reward and what a loss is divided by are those of all ranks. For
    turns in which neither has anything to learn, of which these steps have many, neither runs its model."""
    first, *others = jobs = [_job(tmp_path, objective, changes) for objective, changes in SHARED_OUT.items()]
    given = json.dumps({**first, "then": others})
    errors = tmp_path / "ranks.stderr"
    assert run_ranks(PROGRAM, given, errors=errors) == [0, 0], errors.read_text()
    for objective, job in zip(SHARED_OUT, jobs, strict=True):
        found = RunResult.load(Path(job["folder"]))
        assert found.world_size == 2
        passes = [json.loads(Path(f"{job['folder']}.passes-{rank}").read_text()) for rank in range(2)]
        assert all(map(any, zip(*passes, strict=True))), objective
        # the answers that a step of kto looks at before, for its KL, are not learned
        assert sum(map(sum, passes)) == sum(step.target_tokens for step in found.steps), objective
        whole = UNROLLED if objective in TURNS else WHOLE
        _require_same(found, _run(tmp_path, tokenizer, objective, f"{objective} alone", **whole), objective)


def _job(root: Path, objective: str, changes: dict[str, Any]) -> dict[str, Any]:
    rows = changes.get("train__per_device_train_batch_size", 1)
    accumulation = -(-changes.get("micro_batches", -(-ROWS // rows)) // 2)
    saving = SAVING if objective.startswith("bco") else {}
    return {
        "folder": str(root / objective),
        "store": str(root / f"{objective} store"),
        "weighted": objective in WEIGHTED,
        "turns": TURNS.get(objective),
        "mode": "quiet",
        "counted": True,
        "changes": {
            **{key: value for key, value in changes.items() if key != "micro_batches"},
            "objective": OBJECTIVES[objective],
            "train__max_steps": 3,
            "train__gradient_accumulation_steps": accumulation + IDLE,
            **EVALUATING,
            **saving,
        },
    }
