"""Losses of many micro-batches added up, in all and by data set. S sources."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from luthier.objectives import TokenLoss

_TOTALS = 3  # loss, targets, correct targets


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanLosses:
    """Losses per target. Weighted by the targets, those of the sources have the mean ``loss``.

    loss_by_source, targets_by_source   of the sources that had targets, by name; empty where there is one source
    """

    loss: float
    num_targets: int
    num_correct: int
    loss_by_source: dict[str, float] = field(default_factory=dict)
    targets_by_source: dict[str, int] = field(default_factory=dict)

    def to_logs(self, loss: str, targets: str) -> dict[str, float]:
        """``loss``, ``loss/NAME`` and ``targets/NAME``, as trackers like them; `by_source` reads them back."""
        of_sources = {f"{loss}/{name}": value for name, value in self.loss_by_source.items()}
        return {
            loss: self.loss,
            **of_sources,
            **{f"{targets}/{name}": value for name, value in self.targets_by_source.items()},
        }


def by_source(logs: dict[str, float], key: str) -> dict[str, float]:
    """``({"loss": 2.0, "loss/a": 1.5}, "loss") -> {"a": 1.5}``."""
    return {name.removeprefix(f"{key}/"): value for name, value in logs.items() if name.startswith(f"{key}/")}


def distinct_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """A name for each of ``count`` data sets, no two the same.

    ``(["a", "b", "a"], 3) -> ("a", "b", "a (2)")``, ``([], 2) -> ("source 1", "source 2")``
    """
    given = [*names, *(f"source {number}" for number in range(len(names) + 1, count + 1))]
    found: list[str] = []
    for name in given:
        copies = (f"{name} ({number})" for number in itertools.count(2))
        found.append(name if name not in found else next(copy for copy in copies if copy not in given + found))
    return tuple(found)


class LossSums:
    """Sums over targets, kept on the device until they are asked for. Mutable on purpose."""

    def __init__(self, sources: tuple[str, ...], device: torch.device) -> None:
        """``sources`` are the names of the data sets, by their number."""
        self.sources = sources
        size = _TOTALS + (2 * len(sources) if len(sources) > 1 else 0)
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)

    def add(self, found: TokenLoss) -> None:
        """Add a micro-batch; with several sources it has to tell them apart."""
        self._sums[0] += found.loss_sum.detach()
        self._sums[1] += found.num_targets
        self._sums[2] += found.num_correct
        if len(self.sources) > 1:
            assert found.by_source is not None, f"a loss that does not tell {len(self.sources)} sources apart"
            self._sums[_TOTALS:] += found.by_source.flatten()

    def drain(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> MeanLosses:
        """The means since the last time; ``reduce`` adds up those of all ranks, which have to ask together."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        loss, targets, correct, *rest = reduce(sums).tolist()
        count = len(rest) // 2
        found = [each for each in zip(self.sources, rest[:count], rest[count:], strict=False) if each[2]]
        return MeanLosses(
            loss=loss / max(targets, 1),
            num_targets=int(targets),
            num_correct=int(correct),
            loss_by_source={name: its_loss / its_targets for name, its_loss, its_targets in found},
            targets_by_source={name: int(its_targets) for name, _, its_targets in found},
        )
