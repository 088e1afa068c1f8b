"""What a plugin's objective gives for a micro-batch is looked at before it is added up, in words for its author."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import luthier
from luthier.config.objective import LOSSES, OBJECTIVES
from luthier.objectives import Measure
from luthier.training.losses import LossSums
from luthier.training.losses.plugin_losses import PluginLosses

ROOT = Path(__file__).resolve().parents[2]
UNITS = 3
BATCH: Any = SimpleNamespace(units=[object()] * UNITS)


def right() -> luthier.MicroLoss:
    losses_U = torch.rand(UNITS, requires_grad=True)
    by_source = torch.stack([torch.zeros(2), torch.tensor([1.0, 2.0])]).double()
    measures = {"seen": luthier.measure(losses_U)}
    return luthier.MicroLoss(loss_sum=losses_U.sum(), num_units=UNITS, measures=measures, by_source=by_source)


class Own(luthier.Stateless):
    forward: Any = None
    measured = ("seen",)

    def __init__(self, loss: Callable[[], Any], units: object = UNITS) -> None:
        self.make, self.units = loss, units

    def num_units(self, batch: luthier.Batch) -> int:
        return self.units  # type: ignore[return-value]

    def loss(self, model: torch.nn.Module, batch: luthier.Batch) -> luthier.MicroLoss:
        found: luthier.MicroLoss = self.make()
        return found


def checked(loss: Callable[[], Any], *, units: object = UNITS, num_sources: int = 2) -> PluginLosses:
    return PluginLosses(own=Own(loss, units), what="the objective 'mine' of a package", num_sources=num_sources)


def spoilt(**changes: Any) -> Callable[[], Any]:
    return lambda: replace(right(), **changes)


def measured(total: Any, count: Any) -> dict[str, Any]:
    return {"measures": {"seen": Measure(total=total, count=count)}}


ONE = torch.ones((), dtype=torch.float64)
ODD: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "no MicroLoss": (lambda: right().loss_sum, ("gives a tensor of shape []", "luthier.MicroLoss")),
    "nothing": (lambda: None, ("gives a NoneType",)),
    "a number": (spoilt(loss_sum=1.5), ("loss_sum is a float", "tensor")),
    "whole numbers": (spoilt(loss_sum=torch.tensor(3)), ("loss_sum", "int64")),
    "a loss for each": (spoilt(loss_sum=torch.rand(UNITS, requires_grad=True)), (f"shape [{UNITS}]", "shape []")),
    "a row of one": (spoilt(loss_sum=torch.rand(1, requires_grad=True)), ("shape [1]", "shape []")),
    "detached": (spoilt(loss_sum=torch.rand(())), ("has no gradient", ".detach()")),
    "counts of one": (spoilt(num_units=1), ("num_units is 1", f"num_units(batch) of the same batch {UNITS}", "mean")),
    "no number of units": (spoilt(num_units=math.nan), ("num_units is nan", "whole number")),
    "a fraction of units": (spoilt(num_units=2.5), ("num_units is 2.5",)),
    "less than none": (spoilt(num_units=-1), ("num_units is -1",)),
    "units as a tensor": (spoilt(num_units=torch.tensor(UNITS)), ("num_units is a tensor", "whole number")),
    "no measures": (spoilt(measures=None), ("measures is a NoneType",)),
    "a measure too few": (spoilt(measures={}), ("lacks 'seen'",)),
    "a measure that is a number": (spoilt(measures={"seen": 0.5}), ("measures['seen'] is a float", "luthier.measure")),
    "a count that is no number": (spoilt(**measured(ONE, ONE * math.nan)), ("the count of", "['seen'] is nan")),
    "a count that is a float": (spoilt(**measured(ONE, 1.0)), ("count of MicroLoss.measures['seen'] is a float",)),
    "a total for each": (spoilt(**measured(torch.ones(UNITS), ONE)), (f"shape [{UNITS}]", "detached")),
    "a total with a gradient": (
        spoilt(**measured(torch.rand((), requires_grad=True), ONE)), ("with a gradient", "detached")
    ),
    "sources not apart": (spoilt(by_source=None), ("by_source is a NoneType", "[2, 2]")),
    "sources the other way": (spoilt(by_source=torch.zeros(3, 2)), ("by_source", "shape [3, 2]", "[2, 2]")),
    "too few sources": (spoilt(by_source=torch.zeros(2, 1)), ("shape [2, 1]", "[2, 2]")),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_sum_with_its_counts_is_refused_in_words_for_its_author(odd: str) -> None:
    loss, told = ODD[odd]
    with pytest.raises(luthier.PluginError, match="'mine' of a package") as caught:
        checked(loss).loss(torch.nn.Identity(), BATCH)
    for words in told:
        assert words in str(caught.value)
    assert caught.value.hint and "docs/plugins.md" in caught.value.hint


def test_what_is_right_is_taken_as_it_is() -> None:
    given = right()
    found = checked(lambda: given)
    assert found.loss(torch.nn.Identity(), BATCH) is given and found.num_units(BATCH) == UNITS
    sums = LossSums(("a", "b"), found.measured, torch.device("cpu"))
    sums.add(found.loss(torch.nn.Identity(), BATCH))
    assert sums.drain(lambda tensor: tensor).num_units == UNITS
    with torch.no_grad():
        detached = replace(given, loss_sum=given.loss_sum.detach())
        assert checked(lambda: detached).loss(torch.nn.Identity(), BATCH) is detached, "held-out rows need no gradient"
    alone = replace(given, by_source=None)
    assert checked(lambda: alone, num_sources=1).loss(torch.nn.Identity(), BATCH) is alone


@pytest.mark.parametrize("units", [math.nan, 2.0, True, None, torch.tensor(2), -1])
def test_a_number_of_units_that_is_none_is_refused(units: object) -> None:
    with pytest.raises(luthier.PluginError, match=r"num_units\(batch\) is .*"):
        checked(right, units=units).num_units(BATCH)


def test_values_are_looked_at_once_for_a_device_may_still_be_computing_them() -> None:
    class Watched(torch.Tensor):
        asked = 0

        def item(self) -> Any:
            Watched.asked += 1
            return super().item()

    count = torch.ones((), dtype=torch.float64).as_subclass(Watched)
    found = checked(spoilt(**measured(ONE, count)))
    for _ in range(4):
        found.loss(torch.nn.Identity(), BATCH)
    assert Watched.asked == 1


def test_what_it_raises_is_told_with_its_line() -> None:
    def broken() -> Any:
        return torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(luthier.PluginError, match=rf"{Path(__file__).name}:\d+.*RuntimeError"):
        checked(broken).loss(torch.nn.Identity(), BATCH)


# ------------------------------------------------------------------------------------------------------- in a run


@pytest.fixture
def _own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for table in (LOSSES, OBJECTIVES):
        monkeypatch.setattr(table, "_rows", dict(table._rows))
        monkeypatch.setattr(table, "_added_by", {})
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "plugin"))
    monkeypatch.chdir(tmp_path)


def run_of(change: Callable[[luthier.MicroLoss, Any], Any], **sections: Any) -> dict[str, Any]:
    """A run of the example's objective, whose loss is changed so."""
    import luthier_quiz.unlikelihood as example  # type: ignore[import-not-found]

    class Changed(example.UnlikelihoodLosses):  # type: ignore[misc]
        def loss(self, model: torch.nn.Module, batch: luthier.Batch) -> Any:
            return change(super().loss(model, batch), batch)

    def make(parts: luthier.ObjectiveParts, forward: luthier.ModelPass, tell: Callable[[str], None]) -> Any:
        numbers, sources = parts.config.objective.numbers, max(parts.num_sources)
        losses = Changed(forward=forward, numbers=numbers, num_sources=sources)
        return losses, losses

    luthier.register_objective(
        luthier.Objective(name="mine", rows=luthier.RowKind.VERDICT, default_loss="of_mine", losses=make)
    )
    luthier.register_loss(
        luthier.Loss(
            name="of_mine", objectives=("mine",), function=example.token_unlikelihood, numbers={"bad_weight": 1.0},
            explained={"bad_weight": "what bad answers count"}, formula="", says="",
        )
    )  # fmt: skip
    rows = [{"prompt": f"{n}?", "completion": f"{n + 1}", "label": n % 2 == 0} for n in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "model": "preset:tiny-qwen3",
        "data": {"train": "rows.jsonl", "max_length": 64, "store": "store"},
        "objective": {"name": "mine"},
        "train": {"max_steps": 2, "warmup_steps": 0},
        "runtime": {"threads": 1, "device": "cpu"},
        "tracking": {"progress": False},
        "output": {"dir": "out", "overwrite": True},
        **sections,
    }


def averaged(found: luthier.MicroLoss, batch: luthier.Batch) -> luthier.MicroLoss:
    return replace(found, loss_sum=found.loss_sum / max(len(batch.units), 1))


@pytest.mark.usefixtures("_own_tables")
def test_a_mean_is_found_before_the_first_step() -> None:
    with pytest.raises(luthier.PluginError, match=r"'mine' of this program.*4 copies of a row") as caught:
        luthier.train(run_of(averaged))
    assert caught.value.hint and "take no mean" in caught.value.hint
    assert not Path("out/log.jsonl").exists() or "loss" not in Path("out/log.jsonl").read_text(encoding="utf-8")


class EachAnswer(luthier.Stateless):
    """Each answer counts the same, whatever its length; nothing is compared."""

    measured = ()

    def __init__(self, forward: luthier.ModelPass, num_sources: int, *, counts_pairs: bool = False) -> None:
        self.forward, self.num_sources, self.counts_pairs = forward, num_sources, counts_pairs

    def num_units(self, batch: luthier.Batch) -> int:
        return len(batch.units) if self.counts_pairs else batch.num_segments

    def loss(self, model: torch.nn.Module, batch: luthier.Batch) -> luthier.MicroLoss:
        scored, targets = self.forward.token_scores(model, batch)
        sums_S = torch.zeros(batch.num_segments).index_add(0, targets.segments_K, -scored.scores.logps_K)
        losses_S = sums_S / torch.bincount(targets.segments_K, minlength=batch.num_segments)
        found = luthier.SequenceLoss(loss_sum=losses_S.sum(), losses_U=losses_S.detach(), measures={})
        return luthier.micro_loss(found, scored.anchor, batch, self.num_sources)


def run_of_answers(**options: bool) -> dict[str, Any]:
    """A run whose objective compares nothing, over two data sets."""
    run = run_of(lambda found, _: found)
    losses = lambda parts, forward, tell: (EachAnswer(forward, max(parts.num_sources), **options),) * 2  # noqa: E731
    OBJECTIVES._rows["mine"] = replace(OBJECTIVES["mine"], rows=luthier.RowKind.ANSWER, losses=losses)
    for name, answer in (("a", "right"), ("b", "left, and then right again")):
        row = {"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}]}
        Path(f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    run["data"] |= {"train": ["a.jsonl", "b.jsonl"]}
    run["train"] = {"max_steps": 1, "per_device_train_batch_size": 8}
    return run


@pytest.mark.usefixtures("_own_tables")
def test_answers_that_are_not_compared_are_counted_one_by_one_and_by_data_set() -> None:
    (first,) = luthier.train(run_of_answers()).steps
    assert first.targets_by_source == {"a.jsonl": 4, "b.jsonl": 4}
    assert first.loss == pytest.approx(sum(first.loss_by_source.values()) / 2)


@pytest.mark.usefixtures("_own_tables")
def test_an_objective_that_counts_what_it_does_not_have_is_refused() -> None:
    with pytest.raises(luthier.PluginError, match="num_units"):
        luthier.train(run_of_answers(counts_pairs=True))


@pytest.mark.usefixtures("_own_tables")
@pytest.mark.parametrize("default_loss", ["nowhere", "cross_entropy"])
def test_an_objective_whose_default_loss_is_none_of_its_own_is_told(default_loss: str) -> None:
    run = run_of(lambda found, _: found)
    OBJECTIVES._rows["mine"] = replace(OBJECTIVES["mine"], default_loss=default_loss)
    with pytest.raises(luthier.UserError, match=default_loss):
        luthier.load_config(run)


@pytest.mark.usefixtures("_own_tables")
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_a_sum_trains_as_without_the_look(monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    rows = {"packing": packing, "max_steps": 2, "warmup_steps": 0, "per_device_train_batch_size": 4}
    run = run_of(lambda found, _: found, train=rows)
    looked = luthier.train(run)
    import luthier.training.losses.objective as objective

    monkeypatch.setattr(objective, "checked_losses", lambda make, *given: make(*given))
    assert [(step.loss, step.grad_norm) for step in luthier.train(run).steps] == [
        (step.loss, step.grad_norm) for step in looked.steps
    ]


@pytest.mark.usefixtures("_own_tables")
def test_a_run_stops_at_a_loss_that_teaches_nothing() -> None:
    with pytest.raises(luthier.PluginError, match="has no gradient"):
        luthier.train(run_of(lambda found, _: replace(found, loss_sum=found.loss_sum.detach())))


@pytest.mark.usefixtures("_own_tables")
@pytest.mark.parametrize("given", [None, (None,), (Own(right), object())])
def test_a_function_that_gives_no_two_losses_is_told(given: object) -> None:
    run = run_of(lambda found, _: found)
    OBJECTIVES._rows["mine"] = replace(OBJECTIVES["mine"], losses=lambda *_: given)
    with pytest.raises(luthier.PluginError, match="'mine' of this program"):
        luthier.train(run)
