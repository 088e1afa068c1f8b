"""``sft`` and ``pt``: each target for itself. K targets, S segments."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from luthier.models.passes import ModelPass
from luthier.objectives import AnyHead, Measure, Measures, measure
from luthier.objectives.hidden_loss import hidden_loss_sum
from luthier.objectives.loss_sums import TokenLoss, TokenSettings, losses_by_source
from luthier.objectives.token_scores import token_scores
from luthier.records import Batch, Targets
from luthier.training import losses as step_losses
from luthier.training.losses.reference_choice import reference_model
from luthier.training.losses.references import ReferenceModel
from luthier.training.report import ENTROPY


def token_losses(
    parts: step_losses.ObjectiveParts, forward: ModelPass, tell: step_losses.Tell
) -> step_losses.BothLosses:
    """The losses of a run, and those of held-out rows."""
    objective = parts.config.objective
    reference = reference_model(parts, forward, tell) if objective.needs_reference else None
    trained = TokenLosses(
        forward=forward,
        settings=step_losses.token_settings(objective),
        reference=reference,
        num_sources=parts.num_sources[0],
    )
    return trained, held_out_losses(parts, forward)


def held_out_losses(parts: step_losses.ObjectiveParts, forward: ModelPass) -> TokenLosses:
    """Plain cross-entropy of the answers that held-out rows hold, whatever is trained."""
    return TokenLosses(forward=forward, settings=TokenSettings(), num_sources=parts.num_sources[1])


@dataclass(kw_only=True, slots=True, eq=False)
class TokenLosses(step_losses.Stateless):
    """``sft`` and ``pt``: each target for itself. ``reference`` for losses with a KL term.

    Without gradients plain cross-entropy comes with the entropy of what targets are drawn from, and with the mean of
    ``-log p`` in which each target counts once, whatever its weight in the loss.
    """

    forward: ModelPass
    settings: TokenSettings = field(default_factory=TokenSettings)
    reference: ReferenceModel | None = None
    num_sources: int = 1

    @property
    def measured(self) -> tuple[str, ...]:
        return (step_losses.ACCURACY, ENTROPY, step_losses.NLL)

    def num_units(self, batch: Batch) -> int:
        return batch.num_targets

    def loss(self, model: nn.Module, batch: Batch) -> step_losses.MicroLoss:
        reference = None if self.reference is None else self.reference.hidden(batch)
        sources_S = torch.tensor(batch.sources or (0,) * batch.num_segments) if self.num_sources > 1 else None

        def score(hidden_KD: torch.Tensor, head: AnyHead, targets: Targets) -> tuple[TokenLoss, Measures]:
            sources_K = None if sources_S is None else sources_S.to(hidden_KD.device)[targets.segments_K]
            if not torch.is_grad_enabled() and self.settings == TokenSettings():
                return _with_entropy(hidden_KD, head, targets, sources_K, self.num_sources)
            loss = hidden_loss_sum(
                hidden_KD,
                head,
                targets.ids_K,
                targets.weights_K,
                settings=self.settings,
                reference=reference,
                sources_K=sources_K,
                num_sources=self.num_sources,
            )
            nothing = measure(hidden_KD[:0, 0])
            return loss, {ENTROPY: nothing, step_losses.NLL: nothing}

        scored, _ = self.forward.scored(model, batch, score)
        found, further = scored.scores
        correct, count = found.num_correct.double(), found.num_correct.new_tensor(found.num_targets).double()
        return step_losses.MicroLoss(
            loss_sum=found.loss_sum + scored.anchor,
            num_units=found.num_targets,
            measures={step_losses.ACCURACY: Measure(total=correct, count=count), **further},
            by_source=found.by_source,
        )


def _with_entropy(
    hidden_KD: torch.Tensor, head: AnyHead, targets: Targets, sources_K: torch.Tensor | None, num_sources: int
) -> tuple[TokenLoss, Measures]:
    """Plain cross-entropy as `hidden_loss_sum` has it, not differentiable; entropies, and ``-log p`` unweighted."""
    scores = token_scores(hidden_KD, head, targets.ids_K, entropy=True)
    losses_K = -scores.logps_K if targets.weights_K is None else -scores.logps_K * targets.weights_K
    loss = TokenLoss(
        loss_sum=losses_K.sum(),
        num_targets=len(losses_K),
        num_correct=scores.correct_K.sum(dtype=torch.int64),
        by_source=losses_by_source(losses_K, sources_K, num_sources),
    )
    assert scores.entropy_K is not None
    return loss, {ENTROPY: measure(scores.entropy_K), step_losses.NLL: measure(-scores.logps_K)}
