"""``kto`` and related losses make good answers likelier than the reference has them, bad ones less. S segments, R rows.

KTO estimates KL(policy, reference) over the whole step before its losses, from answers under prompts that they do not
belong to. Each answer goes through the policy once: these beforehand, without gradients, and the rows' own when their
loss is asked for. The reference is asked once for all of a micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from luthier.collation.collator import beyond_text, only_segments
from luthier.config.objective import LOSSES
from luthier.models.passes import ModelPass, Scored
from luthier.objectives import Measure, Measures, loss_sums, measure
from luthier.objectives.pair_formulas import SequenceScores, sequence_scores
from luthier.objectives.token_scores import TokenScores
from luthier.records import Batch, Targets
from luthier.training import losses as step_losses
from luthier.training.losses.reference_choice import choose_reference
from luthier.training.losses.references import Reference
from luthier.training.report import ACCURACIES, ENTROPY, REWARDS


def feedback_losses(
    parts: step_losses.ObjectiveParts, forward: ModelPass, tell: step_losses.Tell
) -> step_losses.BothLosses:
    """The losses of a run, the same on held-out rows."""
    objective = parts.config.objective
    losses = FeedbackLosses(
        forward=forward,
        name=objective.loss_name,
        settings=step_losses.answer_settings(objective, loss_sums.FeedbackSettings),
        reference=choose_reference(parts, forward, tell),
        num_sources=max(parts.num_sources),
    )
    return losses, losses


@dataclass(kw_only=True, slots=True, eq=False)
class FeedbackLosses(step_losses.AnswerLosses):
    """Single answers with a verdict."""

    settings: loss_sums.FeedbackSettings
    reference: Reference
    _baselines: loss_sums.FeedbackBaselines = field(default_factory=loss_sums.FeedbackBaselines)
    _ref_logps: deque[torch.Tensor] = field(default_factory=deque)  # [S], of the micro-batches that are still to come

    @property
    def measured(self) -> tuple[str, ...]:
        estimated = ("kl",) if LOSSES[self.name].estimates_kl else ()
        return (*REWARDS, ACCURACIES, "logps/chosen", "logps/rejected", "nll", *estimated, ENTROPY)

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: step_losses.Reduce) -> None:
        """Estimate KL(policy, reference) over the whole step, or take the mean reward of the steps before."""
        if self.needs_delta:
            self._baselines = loss_sums.FeedbackBaselines(delta=self._rewards.mean)
        self._ref_logps = deque()
        if LOSSES[self.name].estimates_kl:
            totals = torch.zeros(2, dtype=torch.float64, device=self.forward.device)
            for batch in batches:
                totals += self._kl(model, batch)
            total, count = reduce(totals)
            self._baselines = loss_sums.FeedbackBaselines(kl=loss_sums.kl_baseline(Measure(total=total, count=count)))

    def num_targets(self, batch: Batch) -> int:
        """Those of the rows' own completions."""
        own = torch.tensor([unit.segments[0] for unit in batch.units], dtype=torch.int64)
        return int(torch.isin(batch.targets.segments_K, own).sum())

    def own(self, batch: Batch) -> Batch:
        """The rows' own completions, without those of other rows."""
        return self._only(batch, [unit.segments[0] for unit in batch.units])

    def loss(self, model: nn.Module, batch: Batch) -> step_losses.MicroLoss:
        """See `StepLosses`; where a KL was estimated micro-batches come in the order of `begin_step`."""
        ref_logps_S = self._ref_logps.popleft() if self._ref_logps else self._asked(batch)
        assert len(ref_logps_S) == batch.num_segments, "micro-batches in another order than when the step began"
        ref_logps_R = ref_logps_S[[unit.segments[0] for unit in batch.units]]
        own = self.own(batch)
        policy, scored, targets = self._policy(model, own, entropy=not torch.is_grad_enabled())
        anchor = scored.anchor
        own_R = [unit.segments[0] for unit in own.units]
        scores = loss_sums.FeedbackScores(
            logps_R=policy.logps_S[own_R],
            ref_logps_R=ref_logps_R,
            desirable_R=torch.tensor([unit.verdict > 0 for unit in own.units], dtype=torch.bool, device=anchor.device),
            lengths_R=policy.lengths_S[own_R],
            weights_R=step_losses.weights_of(own, anchor.device),
        )
        found = loss_sums.feedback_loss_sum(scores, self.name, self.settings, self._baselines)
        self.note_rewards(found)
        is_own_K = None
        if scored.scores.entropy_K is not None:
            is_own_K = torch.isin(targets.segments_K, torch.tensor(own_R, dtype=torch.int64, device=anchor.device))
        told = {**self._judged(scores), ENTROPY: step_losses.entropy_of(scored.scores, is_own_K)}
        found = replace(found, measures={**found.measures, **told})
        return step_losses.micro_loss(found, anchor, own, self.num_sources)

    def _kl(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """float64[2]: sum and count over the completions that belong to other prompts."""
        ref_logps_S = self._asked(batch)
        self._ref_logps.append(ref_logps_S)
        drawn = [unit.segments[1] for unit in batch.units if len(unit.segments) > 1]
        others = self._only(batch, drawn)
        with torch.no_grad():
            policy, *_ = self._policy(model, others)
        found_R = [unit.segments[-1] for unit in others.units] if drawn else []
        found = loss_sums.kl_measure(policy.logps_S[found_R], ref_logps_S[drawn])
        return torch.stack([found.total, found.count])

    def _only(self, batch: Batch, segments: Sequence[int]) -> Batch:
        """These segments of the batch, where they are not all of it and can be told apart."""
        if not segments or len(segments) == batch.num_segments or beyond_text(batch):
            return batch
        return only_segments(batch, frozenset(segments), pad_token_id=self.forward.pad_token_id)

    def _policy(
        self, model: nn.Module, batch: Batch, *, entropy: bool = False
    ) -> tuple[SequenceScores, Scored[TokenScores], Targets]:
        scored, targets = self.forward.token_scores(model, batch, entropy=entropy)
        policy = sequence_scores(scored.scores.logps_K, targets.segments_K, batch.num_segments)
        return policy, scored, targets

    def _asked(self, batch: Batch) -> torch.Tensor:
        if not (batch.units or self.reference.on_all_ranks):
            return torch.zeros(batch.num_segments, device=self.forward.device)
        return self.reference.logps(batch)

    def _judged(self, scores: loss_sums.FeedbackScores) -> Measures:
        """Whether good rows are above and bad rows below what they are compared with; and the estimate, if any."""
        known, ratios_R = self._baselines, scores.logps_R.detach() - scores.ref_logps_R
        above_R = self.settings.beta * (ratios_R - known.kl) - known.delta
        told = {ACCURACIES: measure(torch.where(scores.desirable_R, above_R > 0, above_R < 0))}
        if LOSSES[self.name].estimates_kl:
            told["kl"] = measure(ratios_R.new_full(ratios_R.shape, known.kl))
        return told
