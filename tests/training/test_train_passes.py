"""How often the models run: each answer once through the policy, a micro-batch once through the reference, and nobody
for a turn in which no rank has anything to learn (`test_train_divisions` has the runs of two ranks)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_rows import epoch_steps, run_data
from tiny_runs import make_config, make_data, make_segments

from luthier.encoding.tokenizer import Tokenizer
from luthier.models.passes import ModelPass
from luthier.records import Batch
from luthier.training.fit import fit_data
from luthier.training.losses import learned_from
from luthier.training.losses.references import ReferenceModel
from luthier.training.report import RunResult

ROWS, STEPS = 8, 3
PADDED = {"train__per_device_train_batch_size": 3, "eval__per_device_eval_batch_size": 3}
PACKED = {"train__packing": "best_fit", "micro_batches": ROWS}
LAYOUTS = {
    "padded": PADDED,
    "packed": {**PACKED, "train__shared_prompts": False},
    "shared": {**PACKED, "train__shared_prompts": True},
}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Batch]]:
    """Grows by every pass, as ``(who, batch)``: the policy ``learning`` or ``looking``, or the ``reference``."""
    seen: list[tuple[str, Batch]] = []
    asked = False
    real_logps, real_scored = ReferenceModel.logps, ModelPass.scored

    @contextmanager
    def reference() -> Iterator[None]:
        nonlocal asked
        asked = True
        yield
        asked = False

    def logps(self: ReferenceModel, batch: Batch, counts_K: torch.Tensor | None = None) -> torch.Tensor:
        with reference():
            return real_logps(self, batch, counts_K)

    def scored(self: ModelPass, model: Any, batch: Batch, score: Any) -> Any:
        seen.append(("reference" if asked else "learning" if torch.is_grad_enabled() else "looking", batch))
        return real_scored(self, model, batch, score)

    monkeypatch.setattr(ReferenceModel, "logps", logps)
    monkeypatch.setattr(ModelPass, "scored", scored)
    return seen


def _run(root: Path, tokenizer: Tokenizer, objective: dict[str, Any], *, held_out: bool, **changes: Any) -> RunResult:
    evaluating = {"eval__strategy": "steps", "eval__steps": STEPS} if held_out else {}
    config = epoch_steps(root / "run", objective, rows=ROWS, **evaluating, **changes)
    data = run_data(root / "store", config, rows=range(ROWS), held_out=range(4, 8) if held_out else range(0))
    return fit_data(config, tokenizer, data)


def _answers(batches: list[Batch]) -> Counter[tuple[int, ...]]:
    """The segments by the ids of their targets."""
    return Counter(
        tuple(batch.targets.ids_K[batch.targets.segments_K == segment].tolist())
        for batch in batches
        for segment in range(batch.num_segments)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kto_runs_each_answer_once_and_asks_the_reference_once(
    tmp_path: Path, tokenizer: Tokenizer, passes: list[tuple[str, Batch]], layout: str
) -> None:
    """A step's own answers where they are learned, the others that its KL is estimated on before; both at once in the
    reference."""
    result = _run(tmp_path, tokenizer, {"name": "kto", "reference": "model"}, held_out=False, **LAYOUTS[layout])
    assert len(result.steps) == STEPS
    learning, looking, reference = (
        [batch for who, batch in passes if who == wanted] for wanted in ("learning", "looking", "reference")
    )
    assert len(learning) == len(looking) == len(reference) > STEPS, "once for each micro-batch"
    assert _answers(learning).total() == _answers(looking).total() == ROWS * STEPS
    assert _answers(learning) + _answers(looking) == _answers(reference)
    assert max(_answers(learning).values()) == STEPS, "the rows' own answers, once in each epoch"


@pytest.mark.parametrize(
    ("objective", "looks"),
    [
        ({"name": "kto"}, True),
        ({"name": "dpo", "loss": "kto_pair"}, True),
        ({"name": "dpo", "loss": "aot", "ld_alpha": 0.5}, True),
        ({"name": "dpo"}, False),
    ],
    ids=["kto", "kto_pair", "aot", "dpo"],
)
def test_the_reference_is_asked_once_for_each_micro_batch_in_training_and_evaluation(
    tmp_path: Path, tokenizer: Tokenizer, passes: list[tuple[str, Batch]], objective: dict[str, Any], looks: bool
) -> None:
    _run(tmp_path, tokenizer, {**objective, "reference": "model"}, held_out=True, **PADDED)
    count = Counter(who for who, _ in passes)
    evaluations = 2  # before the first step and after the last, two micro-batches each
    assert count["learning"] == 3 * STEPS
    assert count["reference"] == count["learning"] + 2 * evaluations
    # in evaluation the policy goes without gradients too
    assert count["looking"] == 2 * evaluations + (count["learning"] + 2 * evaluations) * looks


def test_a_step_of_one_micro_batch_is_sorted_without_a_look_ahead(
    tmp_path: Path, tokenizer: Tokenizer, passes: list[tuple[str, Batch]]
) -> None:
    whole = {"train__per_device_train_batch_size": ROWS}
    _run(tmp_path, tokenizer, {"name": "dpo", "loss": "aot_unpaired", "reference": "model"}, held_out=False, **whole)
    assert Counter(who for who, _ in passes) == {"learning": STEPS, "reference": STEPS}


# -------------------------------------------------------------------------------------------------------- idle turns


def test_turns_are_learned_from_where_any_rank_has_something() -> None:
    batches: list[Any] = ["first", "blank here, learned elsewhere", "blank", "last"]
    counts = torch.tensor([[1, 5], [1, 4], [0, 0], [0, 3]])
    assert learned_from(batches, counts) == ["first", "blank here, learned elsewhere", "last"]
    assert learned_from(batches, torch.zeros(4, 2, dtype=torch.int64)) == ["last"], "ranks meet after the last turn"


@pytest.mark.parametrize("objective", [{"name": "dpo"}, {"name": "kto", "reference": "model"}], ids=["dpo", "kto"])
def test_room_for_more_micro_batches_than_there_are_costs_no_pass_and_changes_nothing(
    tmp_path: Path, tokenizer: Tokenizer, passes: list[tuple[str, Batch]], objective: dict[str, Any]
) -> None:
    found = []
    for accumulation in (ROWS, 20):
        passes.clear()
        changes = {"train__per_device_train_batch_size": 1, "micro_batches": accumulation}
        result = _run(tmp_path / str(accumulation), tokenizer, objective, held_out=False, **changes)
        assert Counter(who for who, _ in passes)["learning"] == ROWS * STEPS
        found.append([(step.loss, step.grad_norm) for step in result.steps])
    assert found[0] == found[1]


def test_a_step_by_its_tokens_may_have_more_or_fewer_micro_batches_than_are_accumulated(
    tmp_path: Path, tokenizer: Tokenizer, passes: list[tuple[str, Batch]]
) -> None:
    """Three or more micro-batches where the loop counts two, and one in the last step of an epoch."""
    by_tokens = {"train__tokens_per_step": 64, "train__max_steps": None, "train__num_train_epochs": 2}
    expected = 2 * sum(int(segment.target[1:].sum()) for segment in make_segments(14))
    for accumulation in (1, 2):
        passes.clear()
        config = make_config(
            tmp_path / str(accumulation), **by_tokens, train__gradient_accumulation_steps=accumulation,
            train__per_device_train_batch_size=1,
        )  # fmt: skip
        result = fit_data(config, tokenizer, make_data(make_segments(14)))
        learned = [batch.num_targets for who, batch in passes if who == "learning"]
        assert all(learned) and len(learned) > 2 * len(result.steps)
        assert sum(learned) == sum(step.target_tokens for step in result.steps) == expected
