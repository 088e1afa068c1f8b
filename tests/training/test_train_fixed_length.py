"""`train.pad_to_multiple_of`: batches of one length, packed or padded, and the same losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny_runs import make_data, make_segments

from luthier.models.passes import ModelPass
from luthier.records import Batch
from luthier.training.report import RunResult


@pytest.mark.parametrize("packing", ["none", "best_fit", "window"])
def test_all_batches_have_the_length_of_a_full_row(
    train: Callable[..., RunResult], packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: dict[str, set[int]] = {}
    real = ModelPass.scored

    def scored(self: ModelPass, model: Any, batch: Batch, score: Any) -> Any:
        widths.setdefault(folder, set()).add(batch.model_inputs["input_ids"].shape[1])
        return real(self, model, batch, score)

    monkeypatch.setattr(ModelPass, "scored", scored)
    data = make_data(make_segments(12))
    same = {"train__max_steps": 3, "train__packing": packing, "train__per_device_train_batch_size": 2}
    folder = "plain"
    plain = train(data, folder=folder, **same)
    folder = "fixed"
    fixed = train(data, folder=folder, train__pad_to_multiple_of=32, **same)
    assert widths["fixed"] == {32}
    assert widths["plain"] != {32}  # or nothing was tried
    assert [step.loss for step in fixed.steps] == pytest.approx([step.loss for step in plain.steps], rel=1e-5)
