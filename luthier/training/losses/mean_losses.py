"""Losses of many micro-batches added up, in all and by data set. S sources."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from luthier.objectives import Measures
from luthier.training.losses.step_losses import ACCURACY, MicroLoss
from luthier.training.report.result import ACCURACIES
from luthier.writing import counted

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
