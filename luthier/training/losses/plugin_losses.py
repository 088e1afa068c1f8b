"""The losses of a plugin's objective, looked at before anything is made of them.

A mean, a loss without a gradient or a count that is no number would train something else than it says, or end as a bug
of Luthier. Types and shapes are looked at in every micro-batch, values in the first alone, since a GPU may still be
computing them. That a mean was taken shows once, before the first step, on copies of one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from luthier.config.objective import OBJECTIVES
from luthier.errors import LuthierError, PluginError
from luthier.ledger import Ledger
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.settings import train_settings, units_of
from luthier.models import evaluating
from luthier.models.passes import ModelPass, casting
from luthier.objectives import Measure, Measures
from luthier.plugins import failure_of
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch
from luthier.training.losses import AnswerLosses, BothLosses, MicroLoss, ObjectiveParts, Reduce, StepLosses, Tell
from luthier.training.streams import EvalStream, World
from luthier.writing import counted

NAMES = ("forward", "measured", "num_units", "begin_step", "loss", "end_step", "state", "load_state")
FEW, MANY = 2, 4  # copies of a row, of which a sum is twice as large and a mean the same
PAGE = "docs/plugins.md says what an objective gives"
Given = TypeVar("Given")


def checked_losses(
    make: Callable[..., BothLosses], parts: ObjectiveParts, forward: ModelPass, tell: Tell
) -> BothLosses:
    """What the function of a plugin's objective gives, looked at now and in each micro-batch. Raises `PluginError`."""
    name = parts.config.objective.name
    what = f"the objective {name!r} of {OBJECTIVES.added_by(name)}"
    found: object = _called(what, make, parts, forward, tell)
    if not isinstance(found, tuple) or len(found) != 2:
        hint = "return two StepLosses: what training minimises, and what is measured on held-out rows"
        raise PluginError(f"the function of {what} gives {_kind(found)}, where a tuple of two is needed", hint=hint)
    for each in found:
        if lacking := [name for name in NAMES if not hasattr(each, name)]:
            hint = "inherit luthier.Stateless, and write the others; " + PAGE
            raise PluginError(f"{what}: a {type(each).__name__} has no {', '.join(lacking)}", hint=hint)
    if isinstance(found[0], AnswerLosses):  # Luthier's own, of which more is asked than the protocol says
        return found
    first, second = (
        PluginLosses(own=each, what=what, num_sources=sources)
        for each, sources in zip(found, parts.num_sources, strict=True)
    )
    _refuse_means(first, parts)
    return first, second


@dataclass(kw_only=True, slots=True, eq=False)
class PluginLosses:
    """A plugin's `StepLosses`. ``what`` names the objective, ``num_sources`` is how many are to be told apart.

    Each method raises `PluginError` for what the plugin's raises, or gives and should not.
    """

    own: StepLosses
    what: str
    num_sources: int
    _has_looked: bool = False  # at values, too

    @property
    def forward(self) -> ModelPass:
        return self.own.forward

    @property
    def measured(self) -> tuple[str, ...]:
        return self.own.measured

    def num_units(self, batch: Batch) -> int:
        units = self._count(_called(self.what, self.own.num_units, batch), "num_units(batch)")
        if not units and not batch.units and batch.num_targets:  # nothing would be learned, or divided by anything
            hint = "where nothing is compared batch.units is empty: count batch.num_targets, or batch.num_segments"
            raise self._odd(f"num_units(batch) is 0, and the batch has {counted(batch.num_targets, 'target')}", hint)
        return units

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        _called(self.what, self.own.begin_step, model, batches, reduce)

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        found = _called(self.what, self.own.loss, model, batch)
        if not isinstance(found, MicroLoss):
            raise self._odd(f"loss(model, batch) gives {_kind(found)}", "return a luthier.MicroLoss")
        self._check_sum(found.loss_sum)
        told, needed = self._count(found.num_units, "MicroLoss.num_units"), self.num_units(batch)
        if told != needed:
            hint = (
                "both are how many losses are added up in loss_sum; take no mean, Luthier divides by those of the step"
            )
            raise self._odd(f"MicroLoss.num_units is {told}, and num_units(batch) of the same batch {needed}", hint)
        self._check_measures(found.measures)
        self._check_sources(found.by_source)
        self._has_looked = True
        return found

    def end_step(self, reduce: Reduce) -> Measures:
        return _called(self.what, self.own.end_step, reduce)

    def state(self) -> dict[str, Any]:
        return _called(self.what, self.own.state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        _called(self.what, self.own.load_state, state)

    def _check_sum(self, loss_sum: object) -> None:
        if not isinstance(loss_sum, torch.Tensor) or not loss_sum.is_floating_point():
            given = f"MicroLoss.loss_sum is {_kind(loss_sum)}"
            raise self._odd(given, "give a tensor of one number that gradients can be taken of, without .item()")
        if loss_sum.shape != ():
            given = f"MicroLoss.loss_sum is {_kind(loss_sum)}, where a single number is needed, of shape []"
            raise self._odd(given, "add up the losses of the micro-batch: losses.sum()")
        if torch.is_grad_enabled() and not loss_sum.requires_grad:
            hint = "compute it from what forward gives, without .detach(), .item(), .numpy() or torch.no_grad()"
            raise self._odd("MicroLoss.loss_sum has no gradient, so nothing is learned from it", hint)

    def _count(self, given: object, where: str) -> int:
        if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
            shown = _kind(given) if isinstance(given, torch.Tensor) else repr(given)
            raise self._odd(f"{where} is {shown}", "give a whole number, such as len(batch.units) or batch.num_targets")
        return int(given)

    def _check_measures(self, measures: object) -> None:
        if not isinstance(measures, Mapping):
            raise self._odd(
                f"MicroLoss.measures is {_kind(measures)}", "give a dict of names and luthier.measure(values)"
            )
        if lacking := [name for name in self.measured if name not in measures]:
            hint = "each micro-batch gives all that `measured` names; of none is luthier.measure(values[:0])"
            raise self._odd(f"MicroLoss.measures lacks {', '.join(map(repr, lacking))}", hint)
        for name in self.measured:
            found = measures[name]
            if not isinstance(found, Measure):
                raise self._odd(f"MicroLoss.measures[{name!r}] is {_kind(found)}", "give luthier.measure(values)")
            for part, value in (("total", found.total), ("count", found.count)):
                where = f"the {part} of MicroLoss.measures[{name!r}]"
                if not isinstance(value, torch.Tensor) or value.shape != () or value.requires_grad:
                    raise self._odd(
                        f"{where} is {_kind(value)}", "luthier.measure(values) makes single numbers, detached"
                    )
                if (
                    part == "count"
                    and not self._has_looked
                    and not (math.isfinite(number := value.item()) and number >= 0)
                ):
                    raise self._odd(
                        f"{where} is {number}", "count the values that were added up, 0 where there are none"
                    )

    def _check_sources(self, by_source: object) -> None:
        if self.num_sources < 2:
            return
        needed = f"[2, {self.num_sources}]: sums of losses and numbers of units, by data set"
        hint = f"give a tensor of shape {needed}; luthier.micro_loss(…, num_sources=max(parts.num_sources)) makes it"
        if not isinstance(by_source, torch.Tensor) or by_source.ndim != 2 or len(by_source) != 2:
            raise self._odd(f"MicroLoss.by_source is {_kind(by_source)}, where one of shape {needed} is needed", hint)
        if by_source.shape[1] < self.num_sources or by_source.requires_grad:
            raise self._odd(f"MicroLoss.by_source is {_kind(by_source)}, where one of shape {needed} is needed", hint)

    def _odd(self, given: str, hint: str) -> PluginError:
        return PluginError(f"{self.what}: {given}", hint=f"{hint} ({PAGE})")


def _called(what: str, function: Callable[..., Given], *arguments: object) -> Given:
    try:
        return function(*arguments)
    except (LuthierError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise failure_of(what, error) from error


def _kind(given: object) -> str:
    if not isinstance(given, torch.Tensor):
        return f"a {type(given).__name__}"
    gradient = " with a gradient" if given.requires_grad else ""
    return f"a tensor of shape {list(given.shape)} and type {str(given.dtype).removeprefix('torch.')}{gradient}"


# ---------------------------------------------------------------------------------------------- whether a mean is taken


def _refuse_means(losses: PluginLosses, parts: ObjectiveParts) -> None:
    """Raise `PluginError` where the loss of `MANY` copies of a row is that of `FEW`, and not more.

    Nothing is said where it cannot be told: on several ranks, for rows that are not here yet, or where each copy is a
    micro-batch of its own, which a mean does no harm to.
    """
    if World.from_environment().size > 1 or not isinstance(parts.train, SegmentIndex):
        return
    before = losses.state()
    with casting(parts.device, parts.autocast), evaluating(parts.model), torch.no_grad():
        (few, few_batches), (many, many_batches) = (_of_copies(losses, parts, copies) for copies in (FEW, MANY))
    losses.load_state(before)
    if not few_batches or not many_batches:
        return
    as_mean, as_sum = few * many_batches / few_batches, few * MANY / FEW
    if abs(many - as_mean) < 0.1 * abs(as_sum - as_mean):
        what = (
            f"{losses.what}: MicroLoss.loss_sum of {MANY} copies of a row is {many:.4g}, and of {FEW} copies {few:.4g}"
        )
        hint = f"add the losses up, and take no mean: Luthier divides by num_units of the whole step ({PAGE})"
        raise PluginError(what, hint=hint)


def _of_copies(losses: PluginLosses, parts: ObjectiveParts, copies: int) -> tuple[float, int]:
    """The sum of the losses of so many copies of the shortest row, and in how many micro-batches they are."""
    train, data = parts.train, parts.config.data
    assert isinstance(train, SegmentIndex), "rows that are not here yet are not copied"
    row = int(train.row_ids[int(np.argmin(train.lengths))])
    rows = train.prepared.take(np.full(copies, row), ledger=Ledger(read=copies, prepared=copies))
    index = SegmentIndex(rows, max_length=data.max_length, overflow=data.overflow, units=units_of(parts.config))
    stream = EvalStream.of_rows(
        NumberedRows.of_index(index),
        train_settings(parts.config, num_ranks=1),
        parts.how,
        rank=0,
        shared=parts.shared,
        media=parts.media,
    )
    batches = [batch for batch in stream if losses.num_units(batch)]
    losses.begin_step(parts.model, batches, lambda sums: sums)
    total = sum(losses.loss(parts.model, batch).loss_sum.item() for batch in batches)
    losses.end_step(lambda sums: sums)
    return total, len(batches)
