"""What a step minimises, micro-batch by micro-batch: sums that add up over ranks before anything is divided.

Each objective is a file beside this one (`tokens`, `pairs`, `verdicts`). What a whole step has to know
before any of its losses (KTO's KL estimate, BCO's running mean of rewards) is settled before, so that a micro-batch's
loss does not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from luthier.config.rollout import RolloutConfig
from luthier.models.passes import ModelPass
from luthier.objectives.measures import Measures, measure
from luthier.records import Batch, DrawnInStep
from luthier.training.report.result import ACCURACIES, DRAWING, FINISHED, LENGTH, REWARD
from luthier.writing import counted

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a tensor over all ranks, which have to ask together."""

ACCURACY = "token_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroLoss:
    """What a micro-batch adds to its step.

    loss_sum   float32 scalar, differentiable: over targets, pairs or rows
    num_units  how many
    measures   by the names that papers and trackers use; sums with their counts
    by_source  where the caller told S sources apart, float64[2, S]: sums of losses and numbers of units
    """

    loss_sum: torch.Tensor
    num_units: int
    measures: Measures
    by_source: torch.Tensor | None = None


class StepLosses(Protocol):
    """The losses of one objective."""

    @property
    def forward(self) -> ModelPass:
        """How batches go through the model."""
        ...

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of all measures, in the order in which ranks add them up."""
        ...

    def num_units(self, batch: Batch) -> int:
        """What a batch adds to the number that a step's loss is divided by."""
        ...

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        """Called on all ranks before the losses of a step's micro-batches, which are this rank's; in evaluation before
        those of all held-out rows."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        """The loss of one micro-batch; ``model`` may be wrapped (DDP, compiled)."""
        ...

    def end_step(self, reduce: Reduce) -> Measures:
        """Called on all ranks after the losses of a step; what is measured of the whole step, the same on all."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold for the next step's losses to be the same; {} where nothing."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The way back."""
        ...


def counts_of(losses: StepLosses, batch: Batch) -> tuple[int, int, int]:
    """Of a micro-batch: what its loss is divided by, its targets, and its tokens without padding."""
    return losses.num_units(batch), batch.num_targets, sum(part.length for row in batch.branches for part in row)


def learned_from(batches: Sequence[Batch], counts_T2: torch.Tensor) -> list[Batch]:
    """Of a step's micro-batches on this rank those that are worth a pass over the model, in their order.

    A turn in which no rank has anything to learn is passed over, on all ranks alike, since they wait for each other.
    ``counts_T2``: units and targets of each turn, over all ranks. Where none has any, the last turn stays: gradients
    are added up over ranks after it.
    """
    has_any = counts_T2.any(dim=1).tolist()
    return [batch for batch, is_learned in zip(batches, has_any, strict=True) if is_learned] or [batches[-1]]


class Stateless:
    """Objectives whose losses depend on nothing but the micro-batch."""

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        """Nothing is to be known beforehand."""

    def end_step(self, reduce: Reduce) -> Measures:
        """Nothing is remembered."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


def names_of_drawing(rollout: RolloutConfig) -> tuple[str, ...]:
    """Measures of all answers that were drawn for a step. Where there is one reward, it is `REWARD` but for its
    weight."""
    rewards = (f"{REWARD}/{reward.label}" for reward in rollout.rewards)
    return (REWARD, *rewards, FINISHED, LENGTH, *(DRAWING if rollout.engine.is_elsewhere else ()))


def measures_of_drawing(drawn: DrawnInStep | None, rollout: RolloutConfig, device: torch.device) -> Measures:
    """Of all answers that were drawn for a step, whether they are learned from or not. The first micro-batch of a step
    tells of them, the others count nothing."""
    names = names_of_drawing(rollout)
    found = {name: measure(torch.zeros(0, device=device)) for name in names}
    if drawn is None:
        return found
    columns = (drawn.rewards_N, *drawn.values_NF.unbind(1), drawn.finished_N, drawn.lengths_N)
    for name, values_N in zip(names, columns, strict=False):  # what follows is of the drawing, not of answers
        found[name] = measure(values_N.to(device), ~values_N.isnan().to(device))
    told = {name: measure(torch.tensor([value], device=device)) for name, value in drawn.measures.items()}
    return {**found, **told}


Tell = Callable[[str], None]
BothLosses = tuple[StepLosses, StepLosses]
"""What training minimises, and what is measured on held-out rows."""


# --------------------------------------------- Losses of many micro-batches added up, in all and by data set. S sources


_TOTALS = 2  # loss, units


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanLosses:
    """Losses per unit: per target, pair or row. Weighted by their units, those of the sources have the mean ``loss``.

    measures                            by name; those that nothing was counted for are missing
    loss_by_source, targets_by_source   of the sources that had targets, by name; empty where there is one source
    """

    loss: float
    num_units: int
    measures: dict[str, float] = field(default_factory=dict)
    loss_by_source: dict[str, float] = field(default_factory=dict)
    targets_by_source: dict[str, int] = field(default_factory=dict)

    def to_logs(self, loss: str, targets: str) -> dict[str, float]:
        """``loss``, ``loss/NAME``, ``targets/NAME``, as trackers like them; `by_source` reads them back."""
        of_sources = {f"{loss}/{name}": value for name, value in self.loss_by_source.items()}
        return {
            loss: self.loss,
            **of_sources,
            **{f"{targets}/{name}": value for name, value in self.targets_by_source.items()},
        }

    def of_evaluation(self) -> dict[str, float]:
        """All of it as an evaluation logs it."""
        metrics = {
            **self.to_logs("eval_loss", "eval_num_targets"),
            **{f"eval_{name}": value for name, value in self.measures.items()},
            "eval_num_targets": self.num_units,
        }
        if ACCURACY in self.measures:  # the loss is that of tokens
            metrics["eval_perplexity"] = math.exp(min(self.loss, 700.0))  # a float ends at e^709
        if ACCURACIES in self.measures:
            metrics["eval_accuracy"] = self.measures[ACCURACIES]
        return metrics


def by_source(logs: dict[str, float], key: str) -> dict[str, float]:
    """``({"loss": 2.0, "loss/a": 1.5}, "loss") -> {"a": 1.5}``."""
    return {name.removeprefix(f"{key}/"): value for name, value in logs.items() if name.startswith(f"{key}/")}


class LossSums:
    """Sums over units, kept on the device until they are asked for. Mutable on purpose."""

    def __init__(self, sources: tuple[str, ...], measured: tuple[str, ...], device: torch.device) -> None:
        """``sources`` are the names of the data sets, by their number; ``measured`` those of all measures."""
        self.sources, self.measured = sources, measured
        self._by_source = _TOTALS + 2 * len(measured)  # where these sums begin
        size = self._by_source + (2 * len(sources) if len(sources) > 1 else 0)
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)

    def add(self, found: MicroLoss) -> None:
        """Add a micro-batch; with several sources it has to tell them apart."""
        self._sums[0] += found.loss_sum.detach()
        self._sums[1] += found.num_units
        assert set(self.measured) <= set(found.measures), "each micro-batch tells all measures"
        self.add_measures(found.measures)
        if len(self.sources) > 1:
            assert found.by_source is not None, (
                f"a loss that does not tell {counted(len(self.sources), 'source')} apart"
            )
            self._sums[self._by_source :] += found.by_source[:, : len(self.sources)].flatten()

    def add_measures(self, found: Measures) -> None:
        """Add some of the measures alone."""
        for place, name in enumerate(self.measured):
            if name in found:
                start = _TOTALS + 2 * place
                self._sums[start] += found[name].total
                self._sums[start + 1] += found[name].count

    def drain(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> MeanLosses:
        """The means since the last time; ``reduce`` adds up those of all ranks, which have to ask together."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        loss, units, *rest = reduce(sums).tolist()
        measured, rest = rest[: 2 * len(self.measured)], rest[2 * len(self.measured) :]
        means = zip(self.measured, measured[::2], measured[1::2], strict=True)
        count = len(rest) // 2
        found = [each for each in zip(self.sources, rest[:count], rest[count:], strict=False) if each[2]]
        return MeanLosses(
            loss=loss / max(units, 1),
            num_units=int(units),
            measures={name: total / number for name, total, number in means if number},
            loss_by_source={name: its_loss / its_targets for name, its_loss, its_targets in found},
            targets_by_source={name: int(its_targets) for name, _, its_targets in found},
        )
