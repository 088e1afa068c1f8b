"""Scores to the losses of a run: one file an objective (`tokens`, `pairs`, `verdicts`, `policies`), and the models they
compare with.

Here is what a step minimises, micro-batch by micro-batch: sums that add up over ranks before anything is divided.

What a whole step has to know before any of its losses (KTO's KL estimate, BCO's running mean of rewards) is settled
before, so that a micro-batch's loss does not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from luthier.collation import CollateSettings, MediaInputs
from luthier.collation.collator import batch_of_packs
from luthier.config.objective import LOSSES, ObjectiveConfig
from luthier.config.rollout import DeadGroups, RolloutConfig
from luthier.config.schema import RunConfig
from luthier.models import decoder_family
from luthier.models.isolation import TOKENS_TRIED, ChosenIsolation
from luthier.models.model import LoadedModel
from luthier.models.passes import ModelPass
from luthier.models.vocabulary import Vocabulary
from luthier.objectives import Measure, Measures, RunningMean, SequenceLoss, measure
from luthier.objectives.loss_sums import FeedbackSettings, TokenSettings
from luthier.objectives.pair_formulas import PairSettings
from luthier.objectives.token_scores import TokenScores
from luthier.packing import Segments
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch, DrawnInStep, Pack
from luthier.training.report import ACCURACIES, ASKED_ANEW, DRAWING, FINISHED, LENGTH, REWARD, REWARDS
from luthier.training.streams import EvalStream
from luthier.writing import counted

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a tensor over all ranks, which have to ask together."""

ACCURACY = "token_accuracy"
NLL = "nll"  # of targets, each once: what perplexity is made of


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
        those of all held-out rows. `AnswerLosses` are called before each pass over the step (``rollout.passes``)."""
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
        """Go on with what `state` gave when the checkpoint was written."""
        ...


def counts_of(losses: StepLosses, batch: Batch) -> tuple[int, int, int]:
    """Of a micro-batch: what its loss is divided by, the targets that are learned, and its tokens without padding."""
    targets = losses.num_targets(batch) if isinstance(losses, AnswerLosses) else batch.num_targets
    return losses.num_units(batch), targets, sum(part.length for row in batch.branches for part in row)


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
    drawing = DRAWING if rollout.engine.is_elsewhere else ()
    anew = (ASKED_ANEW,) if rollout.dead_groups is DeadGroups.RESAMPLE else ()
    return (REWARD, *rewards, FINISHED, LENGTH, *drawing, *anew)


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
        """All of it as an evaluation logs it. Perplexity counts each target once, whatever its weight in the loss."""
        measures = dict(self.measures)
        is_of_tokens = ACCURACY in measures
        nll = measures.pop(NLL, self.loss) if is_of_tokens else 0.0
        metrics = {
            **self.to_logs("eval_loss", "eval_num_targets"),
            **{f"eval_{name}": value for name, value in measures.items()},
            "eval_num_targets": self.num_units,
        }
        if is_of_tokens:
            metrics["eval_perplexity"] = math.exp(min(nll, 700.0))  # a float ends at e^709
        if ACCURACIES in measures:
            metrics["eval_accuracy"] = measures[ACCURACIES]
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

    def state(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The sums so far over all ranks, which have to ask together."""
        return reduce(self._sums.clone())

    def load_state(self, sums: torch.Tensor, *, keep: bool) -> None:
        """Go on with what `state` gave, which one rank is to ``keep``. Sums of other measures or data sets are passed
        over."""
        if keep and sums.shape == self._sums.shape:
            self._sums = sums.to(self._sums)

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


# ---- What the objective of a run is made of: the numbers of its loss, and the first rows that its models are tried on.


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveParts:
    """What the objective of a run is made of.

    model     the one that is trained, on its device, before anything wraps it
    train     its segments; ``held_out`` those of evaluation, if there are any
    passes    makes streams that go over each of these once, for what is computed beforehand
    needed    int64, ascending: which segments of each of these the run will read
    media     what makes features of media, of a multimodal model
    autocast  the type that training computes in; None: that of the weights
    shared    rows hold token trees whose branches share their beginnings
    """

    config: RunConfig
    model: PreTrainedModel | PeftModel
    loaded: LoadedModel
    vocabulary: Vocabulary
    how: CollateSettings
    device: torch.device
    train: Segments
    held_out: Segments | None
    passes: Callable[[SegmentIndex], EvalStream]
    needed: Callable[[SegmentIndex], NDArray[np.int64]]
    num_sources: tuple[int, int]
    media: MediaInputs | None = None
    autocast: torch.dtype | None = None
    shared: bool = False


def first_inputs(parts: ObjectiveParts, isolation: ChosenIsolation) -> dict[str, object]:
    """What a model is called with for the beginning of the first segment."""
    first = parts.train[0]
    # a decoder beside an encoder computes nothing without its picture, which is in front
    media = None if decoder_family(parts.loaded.model.config) is None else parts.media
    cut = replace(
        first,
        input_ids=first.input_ids[:TOKENS_TRIED],
        target=first.target[:TOKENS_TRIED],
        weight=None,
        media=first.media if media is not None else (),
    )
    batch = batch_of_packs([Pack(segments=(cut,))], parts.how, media)
    return isolation.inputs(isolation.arranged(batch, pad_token_id=parts.how.pad_token_id), device=parts.device)


# ---------------------------------------------------------------------- What losses that compare answers have in common


def pairs_of(batch: Batch) -> torch.Tensor:
    """int64[U, 2]: the segments of each unit, the chosen or own one first."""
    return torch.tensor([unit.segments for unit in batch.units], dtype=torch.int64).reshape(-1, 2)


def weights_of(batch: Batch, device: torch.device) -> torch.Tensor | None:
    """float32[U]: what each unit counts: the mean weight of the targets of its first segment. None: 1.0 everywhere."""
    if batch.targets.weights_K is None:
        return None
    segments_K, weights_K = batch.targets.segments_K, batch.targets.weights_K
    sums_S = torch.zeros(batch.num_segments).index_add(0, segments_K, weights_K)
    counts_S = torch.bincount(segments_K, minlength=batch.num_segments).clamp(min=1)
    first_U = torch.tensor([unit.segments[0] for unit in batch.units], dtype=torch.int64)
    return (sums_S / counts_S)[first_U].to(device)


def entropy_of(scores: TokenScores, where_K: torch.Tensor | None = None) -> Measure:
    """The entropy of the model's choices at K targets, bool ``where_K`` those meant; of none where nobody asked."""
    return measure(scores.logps_K[:0]) if scores.entropy_K is None else measure(scores.entropy_K, where_K)


def micro_loss(found: SequenceLoss, anchor: torch.Tensor, batch: Batch, num_sources: int) -> MicroLoss:
    """What the units of a micro-batch add to the step, told apart by source where there are several. Where nothing is
    compared each segment is a unit."""
    by_source = None
    if num_sources > 1:
        first_U = [unit.segments[0] for unit in batch.units] or range(found.num_units)
        sources_U = torch.tensor([batch.sources[segment] for segment in first_U], dtype=torch.int64)
        counted_2U = torch.stack([found.losses_U, torch.ones_like(found.losses_U)]).double()
        by_source = torch.zeros(2, num_sources, dtype=torch.float64, device=anchor.device)
        by_source.index_add_(1, sources_U.to(anchor.device), counted_2U)
    return MicroLoss(
        loss_sum=found.loss_sum + anchor, num_units=found.num_units, measures=found.measures, by_source=by_source
    )


@dataclass(kw_only=True, slots=True, eq=False)
class AnswerLosses:
    """What losses of compared answers have in common. Some compare with the mean reward of all steps before: that of a
    step is added when the step is over."""

    forward: ModelPass
    name: str
    num_sources: int = 1
    _rewards: RunningMean = field(default_factory=RunningMean)
    _under_way: list[Measures] = field(default_factory=list)  # of the step

    @property
    def needs_delta(self) -> bool:
        return LOSSES.named(self.name).needs_delta

    def num_units(self, batch: Batch) -> int:
        return len(batch.units)

    def num_targets(self, batch: Batch) -> int:
        """Those that are learned."""
        return batch.num_targets

    def note_rewards(self, found: SequenceLoss) -> None:
        """Remember those of a micro-batch that is learned from."""
        if self.needs_delta and torch.is_grad_enabled():
            self._under_way.append(found.measures)

    def end_step(self, reduce: Reduce) -> Measures:
        if self.needs_delta:
            totals = torch.zeros(2, dtype=torch.float64, device=self.forward.device)
            for measures in self._under_way:
                for name in REWARDS:
                    totals += torch.stack([measures[name].total, measures[name].count])
            self._rewards = self._rewards.after(*reduce(totals).tolist())
            self._under_way = []
        return {}

    def state(self) -> dict[str, Any]:
        return {"rewards": self._rewards.to_state()} if self.needs_delta else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if "rewards" in state:
            self._rewards = RunningMean.from_state(state["rewards"])


_ALPHA_OF = {"eaft": "eaft_alpha", "asft": "asft_alpha"}
_Settings = TypeVar("_Settings", PairSettings, FeedbackSettings)


def token_settings(objective: ObjectiveConfig) -> TokenSettings:
    """Of an objective whose losses are those of tokens."""
    loss, numbers = objective.loss_name, objective.numbers
    return TokenSettings(
        loss=loss,
        label_smoothing=numbers.get("label_smoothing", 0.0),
        z_loss=numbers.get("z_loss", 0.0),
        alpha=objective.number(_ALPHA_OF[loss]) if loss in _ALPHA_OF else 1.0,
        beta=numbers.get("gkd_beta", 0.0),
        top_k=int(numbers.get("gkd_top_k", 0)),
        own=_of_plugin(objective),
    )


def answer_settings(objective: ObjectiveConfig, kind: type[_Settings]) -> _Settings:
    """Of an objective that learns from compared answers: the numbers that ``kind`` has a field for."""
    names = {field.name for field in fields(kind)} - {"own"}
    numbers = {key: number for key, number in objective.numbers.items() if key in names}
    return kind(**numbers, own=_of_plugin(objective))


def _of_plugin(objective: ObjectiveConfig) -> dict[str, float]:
    """All numbers of a plugin's loss, by their keys: a field of the settings may mean something else."""
    return objective.numbers if objective.loss_name in LOSSES.added() else {}
