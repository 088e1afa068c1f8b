"""What the reference model gives the answers of a batch, wherever the reference is. K targets, S segments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from peft import PeftModel
from torch import nn

from luthier.errors import ModelError
from luthier.models.passes import ModelPass
from luthier.models.sharding import is_sharded
from luthier.objectives import Reference as TokenReference
from luthier.objectives import sequence_scores
from luthier.objectives.head import AnyHead, Head
from luthier.records import Batch, Targets


class Reference(Protocol):
    """The model that an objective compares with."""

    @property
    def on_all_ranks(self) -> bool:
        """Whether all ranks have to ask as often, for batches too that hold nothing to compare."""
        ...

    def logps(self, batch: Batch, counts_K: torch.Tensor | None = None) -> torch.Tensor:
        """float32[S]: log-probability of each segment, the sum over its targets, each times what it counts."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReferenceModel:
    """A model at hand: a second one, or the policy without its adapter. Nothing of it is ever trained here.

    ``under_adapter``: the model is the policy itself, and what it is without the adapter is meant.
    """

    model: nn.Module
    forward: ModelPass
    under_adapter: bool = False

    @property
    def on_all_ranks(self) -> bool:
        """See `Reference`; ranks that hold parts of a model run it together."""
        return is_sharded(self.model)

    def logps(self, batch: Batch, counts_K: torch.Tensor | None = None) -> torch.Tensor:
        """See `Reference`."""
        with self._as_reference():
            scored, targets = self.forward.token_scores(self.model, batch)
        logps_K = scored.scores.logps_K
        return sequence_scores(logps_K, targets.segments_K, batch.num_segments, counts_K=counts_K).logps_S

    def hidden(self, batch: Batch) -> TokenReference:
        """Its hidden states at the targets, with its head, for losses that compare whole distributions."""

        def keep(hidden_KD: torch.Tensor, head: AnyHead, _: Targets) -> TokenReference:
            if not isinstance(head, Head):
                raise ModelError(
                    "a loss that compares whole distributions needs the reference's output layer as it is, and here it "
                    "is adapted, or cannot be told apart from the model",
                    hint="set objective.reference: model, or choose another objective.loss",
                )
            return TokenReference(hidden_KD=hidden_KD, head=head)

        with self._as_reference():
            scored, _ = self.forward.scored(self.model, batch, keep)
        return scored.scores

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        training = self.model.training
        without = nullcontext()
        if self.under_adapter:
            assert isinstance(self.model, PeftModel), "a model without adapter has nothing under it"
            without = self.model.disable_adapter()
        self.model.eval()  # no dropout
        try:
            with torch.no_grad(), without:
                yield
        finally:
            self.model.train(training)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrecomputedReference:
    """Log-probabilities that were computed before training: ``logps_L`` float32, by the number of the leaf."""

    logps_L: torch.Tensor
    device: torch.device

    @property
    def on_all_ranks(self) -> bool:
        """See `Reference`."""
        return False

    def logps(self, batch: Batch, counts_K: torch.Tensor | None = None) -> torch.Tensor:
        """See `Reference`; what targets count was settled when they were computed."""
        leaves = [leaf for unit in batch.units for leaf in unit.leaves]
        return self.logps_L[torch.tensor(leaves, dtype=torch.int64)].to(self.device)
