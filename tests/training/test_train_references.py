"""Wherever the reference is, it gives the same: under the adapter, in a second model, or computed beforehand."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_quantized import write_base
from tiny_rows import epoch_steps, run_data
from tiny_runs import TINY, make_config

from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models.model import load_model
from luthier.models.passes import ModelPass
from luthier.models.vocabulary import Vocabulary
from luthier.records import Batch
from luthier.training.fit import fit_data
from luthier.training.losses import references
from luthier.training.losses.references import PrecomputedReference, ReferenceModel
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note

LORA = {"adapter__type": "lora", "adapter__r": 4, "train__learning_rate": 2e-2}
CHANCE = math.log(2)  # DPO's loss of a model that is its own reference
Run = Callable[..., RunResult]


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Run:
    """``run(folder, objective, rows=…, store=…, **changes)``: three steps on all rows."""

    def train(
        folder: str, objective: dict[str, Any], *, rows: range = range(8), store: str = "store", **changes: Any
    ) -> RunResult:
        on_event = changes.pop("on_event", None)
        changes = {"train__per_device_train_batch_size": len(rows), **changes}
        config = epoch_steps(tmp_path / folder, objective, rows=len(rows), **changes)
        return fit_data(config, tokenizer, run_data(tmp_path / store, config, rows=rows), on_event=on_event)

    return train


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one each time that the answers of a store are scored."""
    times: list[int] = []
    real = references._compute

    def counting(*arguments: Any) -> Any:
        times.append(1)
        return real(*arguments)

    monkeypatch.setattr(references, "_compute", counting)
    return times


def _losses(result: RunResult) -> list[float]:
    return [step.loss for step in result.steps]


def _require_same(found: RunResult, expected: RunResult) -> None:
    assert _losses(found) == pytest.approx(_losses(expected), rel=1e-5)
    for one, other in zip(found.steps, expected.steps, strict=True):
        # before the first update margins are 0 but for rounding, so that accuracies are chance
        accuracies = {} if one.step > 1 else {"rewards/accuracies": other.measures.get("rewards/accuracies")}
        assert {**one.measures, **accuracies} == pytest.approx(other.measures, rel=1e-3, abs=1e-4)


# ------------------------------------------------------------------------------------------- the same wherever it is


@pytest.mark.parametrize(
    "objective", [{"name": "dpo"}, {"name": "dpo", "ld_alpha": 0.3}, {"name": "kto", "loss": "bco"}]
)
def test_under_the_adapter_in_a_second_model_and_beforehand_it_gives_the_same(
    run: Run, objective: dict[str, Any]
) -> None:
    auto = run("auto", objective, **LORA)
    base = run("base", {**objective, "reference": "base"}, **LORA)
    assert _losses(auto) == _losses(base), "auto is base under a new adapter"
    assert abs(base.steps[2].loss / base.steps[0].loss - 1) > 0.01, "rewards are something after two updates"
    _require_same(run("model", {**objective, "reference": "model"}, **LORA), base)
    _require_same(run("precomputed", {**objective, "reference": "precomputed"}, **LORA), base)


def test_another_model_can_be_the_reference_and_gives_something_else(run: Run, tmp_path: Path) -> None:
    run("other", {"name": "sft"}, runtime__seed=2)
    named = {"name_or_path": str(tmp_path / "other" / "model")}
    plain = run("plain", {"name": "dpo"}, **LORA)
    second = run("second", {"name": "dpo", "reference": {**named, "source": "model"}}, **LORA)
    _require_same(run("before", {"name": "dpo", "reference": {**named, "source": "precomputed"}}, **LORA), second)
    assert plain.steps[0].loss == pytest.approx(CHANCE, rel=1e-6)
    assert abs(second.steps[0].loss - CHANCE) > 1e-3


@pytest.mark.parametrize("source", ["base", "model"])
def test_the_reference_drops_nothing_out(run: Run, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    given: list[torch.Tensor] = []
    training: set[bool] = set()
    real = ReferenceModel.logps

    def listening(self: ReferenceModel, batch: Batch, counts_K: torch.Tensor | None = None) -> torch.Tensor:
        given.append(real(self, batch, counts_K))
        if self.under_adapter:
            training.add(self.model.training)
        return given[-1]

    monkeypatch.setattr(ReferenceModel, "logps", listening)
    objective = {"name": "dpo", "reference": source}
    plain = run("plain", objective, **LORA)
    dropping = run("dropping", objective, **LORA, model__config_overrides={**TINY, "attention_dropout": 0.5})
    assert plain.steps[0].loss == pytest.approx(CHANCE, rel=1e-6)
    assert abs(dropping.steps[0].loss - CHANCE) > 1e-3, "the policy does drop out"
    assert len(given) == 6
    for step in range(3):  # each has its own order of rows
        assert torch.equal(given[step], given[step + 3])
    assert training == ({True} if source == "base" else set()), "the policy goes on in training mode"


# ------------------------------------------------------------------------------------------------------ precomputed


def test_what_was_computed_is_read_the_next_time(run: Run, computed: list[int]) -> None:
    first = run("first", {"name": "dpo"})
    assert len(computed) == 1
    again = run("again", {"name": "dpo", "beta": 0.1}, train__per_device_train_batch_size=2)
    assert len(computed) == 1
    assert _losses(again) == pytest.approx(_losses(first), rel=1e-5)
    run("hinge", {"name": "dpo", "loss": "hinge"}, train__packing="best_fit")
    assert len(computed) == 1, "which loss or layout reads them does not matter"


@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        ({}, {"runtime__seed": 2}),  # other random weights
        ({}, {"model__config_overrides": {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}}),
        ({}, {"data__max_length": 16, "data__overflow": "truncate", "data__max_drop": 0.5}),
        ({"ld_alpha": 0.5}, {}),
    ],
)
def test_it_is_not_read_where_it_would_be_wrong(
    run: Run, computed: list[int], objective: dict[str, Any], changes: dict[str, Any]
) -> None:
    run("first", {"name": "dpo"})
    other = run("other", {"name": "dpo", **objective}, **changes)
    assert len(computed) == 2
    alone = run("alone", {"name": "dpo", **objective}, store="other store", **changes)
    assert _losses(other) == _losses(alone)


def test_a_store_that_has_grown_or_was_written_in_another_order_still_has_it(
    run: Run, computed: list[int], tmp_path: Path
) -> None:
    first = run("first", {"name": "dpo"})
    run("more", {"name": "dpo"}, rows=range(20))
    assert len(computed) == 2, "new rows are computed"
    assert _losses(run("grown", {"name": "dpo"})) == pytest.approx(_losses(first), rel=1e-5)
    assert len(computed) == 2, "and the old ones are still known"
    backwards = run("backwards", {"name": "dpo", "loss": "ipo"}, rows=range(19, -1, -1), store="backwards")
    assert len(computed) == 3
    shutil.rmtree(tmp_path / "backwards" / references.FOLDER)
    shutil.copytree(tmp_path / "store" / references.FOLDER, tmp_path / "backwards" / references.FOLDER)
    copied = run("copied", {"name": "dpo", "loss": "ipo"}, rows=range(19, -1, -1), store="backwards")
    assert len(computed) == 3, "rows are found by their content, not by where they are"
    assert _losses(copied) == pytest.approx(_losses(backwards), rel=1e-5)


def test_only_what_is_new_is_scored_and_what_others_computed_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    real = ReferenceModel.logps

    def counting(self: ReferenceModel, batch: Any, *rest: Any) -> Any:
        scored.append(len(batch.units))
        return real(self, batch, *rest)

    monkeypatch.setattr(ReferenceModel, "logps", counting)
    run("some", {"name": "dpo"}, rows=range(8), train__packing="none")
    assert sum(scored) == 8
    run("others", {"name": "dpo"}, rows=range(8, 14), train__packing="none")
    assert sum(scored) == 14
    run("all", {"name": "dpo"}, rows=range(14), train__packing="none")
    assert sum(scored) == 14, "both tables are one"


def test_only_rows_that_the_steps_will_see_are_scored(
    run: Run, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    real = ReferenceModel.logps

    def counting(self: ReferenceModel, batch: Any, *rest: Any) -> Any:
        scored.append(len(batch.units))
        return real(self, batch, *rest)

    monkeypatch.setattr(ReferenceModel, "logps", counting)

    def steps(number: int, store: str) -> RunResult:
        few = {"train__max_steps": number, "train__per_device_train_batch_size": 2}
        config = make_config(tmp_path / f"{store} {number}", objective={"name": "dpo"}, **few)
        return fit_data(config, tokenizer, run_data(tmp_path / store, config, rows=range(12), held_out=range(12, 15)))

    steps(1, "few")
    assert sum(scored) == 2 + 3, "those of one step, and what is held out"
    more = steps(4, "few")
    assert sum(scored) == 8 + 3, "and those of three more"
    scored.clear()
    whole = steps(9, "all")
    assert sum(scored) == 12 + 3, "each once, however often they come"
    # what is planned for the first steps does not depend on how many there are
    assert _losses(more)[0] == pytest.approx(_losses(whole)[0], rel=1e-6)
    assert len(more.steps) == 4 and _losses(more)[3] < CHANCE


@pytest.mark.parametrize("how", ["nf4", "int8", "torchao_int8", "torchao_fp8"])
def test_a_table_of_a_quantized_model_is_of_its_scales_too(tmp_path: Path, tokenizer: Tokenizer, how: str) -> None:
    """With weights twice as large a model has the same numbers of few bits, and other log-probabilities."""
    base, twice = write_base(tmp_path / "base", tokenizer), write_base(tmp_path / "twice", tokenizer)
    weights = load_file(base / "model.safetensors")
    save_file({name: weight * (1 + name.endswith("_proj.weight")) for name, weight in weights.items()},
              twice / "model.safetensors", metadata={"format": "pt"})  # fmt: skip

    def held(folder: Path) -> list[tuple[str, bytes]]:
        section = {"name_or_path": str(folder), "quantization": how}
        model = load_model(make_config(tmp_path, model=section, adapter="lora"), Vocabulary.of(tokenizer)).model
        reference = ReferenceModel(model=model, forward=cast(ModelPass, None))
        return [(name, bytes(values)) for name, values in references.weights_of(reference)]

    assert held(base) == held(base) != held(twice)


def test_a_damaged_table_is_computed_again(run: Run, computed: list[int], tmp_path: Path) -> None:
    first = run("first", {"name": "dpo"})
    (path,) = (tmp_path / "store" / references.FOLDER).glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    assert _losses(run("again", {"name": "dpo"})) == _losses(first)
    assert len(computed) == 2


def test_wrong_numbers_would_show(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: that losses agree is not because nobody reads the table."""
    first = run("first", {"name": "dpo"})
    real = PrecomputedReference.logps
    monkeypatch.setattr(PrecomputedReference, "logps", lambda self, *rest: real(self, *rest).flip(0))
    assert abs(run("wrong", {"name": "dpo"}).steps[0].loss - first.steps[0].loss) > 1e-3


# -------------------------------------------------------------------------------------- adapters that changed the base


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_a_base_that_the_adapter_has_changed_is_no_reference(run: Run, initial: str) -> None:
    """PiSSA moves a part of the base into the adapter: what training begins with is both together."""
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    changed = {**LORA, "adapter__init_lora_weights": initial}
    result = run("changed", {"name": "dpo"}, **changed, on_event=listen)
    assert result.steps[0].loss == pytest.approx(CHANCE, rel=1e-5)
    assert not any("without its adapter" in note for note in notes)
    run("plain", {"name": "dpo"}, **LORA, on_event=listen)
    assert any("without its adapter" in note for note in notes), "control"
    with pytest.raises(ModelError, match=f"init_lora_weights: {initial} changes the base"):
        run("asked", {"name": "dpo", "reference": "base"}, **changed)


@pytest.mark.parametrize("objective", [{"name": "dpo"}, {"name": "kto"}])
def test_an_adapter_that_is_gone_on_from_is_its_own_reference(
    run: Run, tmp_path: Path, objective: dict[str, Any]
) -> None:
    run("learned", {"name": "sft"}, **LORA)
    on = {
        **LORA,
        "model__name_or_path": str(tmp_path / "learned" / "base"),
        "model__config_overrides": {},
        "adapter__name_or_path": str(tmp_path / "learned" / "model"),
    }
    before = CHANCE if objective["name"] == "dpo" else 0.5
    assert run("on", objective, **on).steps[0].loss == pytest.approx(before, rel=1e-5)
    under = run("under", {**objective, "reference": "base"}, **on)
    assert abs(under.steps[0].loss - before) > 1e-3, "control: what is under the adapter is another model"
