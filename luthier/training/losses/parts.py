"""What the objective of a run is made of: the numbers of its loss, and the first rows that its models are tried on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import PreTrainedModel

from luthier.collation import CollateSettings, MediaInputs, batch_of_packs
from luthier.config.objective import LOSSES, ObjectiveConfig
from luthier.config.schema import RunConfig
from luthier.models.isolation import TOKENS_TRIED, ChosenIsolation
from luthier.models.model import LoadedModel
from luthier.models.passes import ModelPass
from luthier.models.submodules import decoder_family
from luthier.models.vocabulary import Vocabulary
from luthier.objectives.answer_losses import FeedbackSettings
from luthier.objectives.measures import Measure, Measures, RunningMean, SequenceLoss, measure
from luthier.objectives.pair_formulas import PairSettings
from luthier.objectives.token_losses import TokenSettings
from luthier.objectives.token_scores import TokenScores
from luthier.packing.settings import Segments
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch, Pack
from luthier.training.losses.step_losses import MicroLoss, Reduce
from luthier.training.report.result import REWARDS
from luthier.training.streams import EvalStream


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
    """What the units of a micro-batch add to the step, told apart by source where there are several."""
    by_source = None
    if num_sources > 1:
        sources_U = torch.tensor([batch.sources[unit.segments[0]] for unit in batch.units], dtype=torch.int64)
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
_BETA, _TOP_K = "gkd_beta", "gkd_top_k"
_ELSEWHERE = ("ld_alpha",)  # acts on the sums over targets, before any loss


def token_settings(objective: ObjectiveConfig) -> TokenSettings:
    """Of an objective whose losses are those of tokens."""
    loss, numbers = objective.loss_name, objective.numbers
    return TokenSettings(
        loss=loss,
        label_smoothing=numbers.get("label_smoothing", 0.0),
        z_loss=numbers.get("z_loss", 0.0),
        alpha=objective.number(_ALPHA_OF[loss]) if loss in _ALPHA_OF else 1.0,
        beta=numbers.get(_BETA, 0.0),
        top_k=int(numbers.get(_TOP_K, 0)),
        own=_others(objective, TokenSettings, *_ALPHA_OF.values(), _BETA, _TOP_K),
    )


def pair_settings(objective: ObjectiveConfig) -> PairSettings:
    """Of an objective that learns from pairs."""
    return PairSettings(**_fields(objective, PairSettings), own=_others(objective, PairSettings))


def feedback_settings(objective: ObjectiveConfig) -> FeedbackSettings:
    """Of an objective that learns from verdicts."""
    return FeedbackSettings(**_fields(objective, FeedbackSettings), own=_others(objective, FeedbackSettings))


def _fields(objective: ObjectiveConfig, kind: type) -> dict[str, float]:
    """The numbers that the settings have a field for."""
    return {key: number for key, number in objective.numbers.items() if key in _names(kind)}


def _others(objective: ObjectiveConfig, kind: type, *known: str) -> dict[str, float]:
    """Those of a plugin's loss."""
    known = (*known, *_names(kind), *_ELSEWHERE)
    return {key: number for key, number in objective.numbers.items() if key not in known}


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
