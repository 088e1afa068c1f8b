"""One micro-batch through one model: told which tokens see each other, and scored where something is to be learned.

B rows, T tokens a row, K targets, S segments, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import nn

from luthier.errors import ModelError
from luthier.layout.trees import leaves
from luthier.models.encoders import BlankMedia, with_blanks
from luthier.models.head_tap import OutputHead, Scored, score_targets
from luthier.models.isolation import ChosenIsolation
from luthier.models.model import REWARD_HEAD
from luthier.models.routers import Routers
from luthier.models.submodules import plain_model
from luthier.objectives.head import AnyHead, tempered
from luthier.objectives.token_scores import TokenScores, token_scores
from luthier.records import Batch, Targets
from luthier.writing import counted

Scores = TypeVar("Scores")
Valued = tuple[TokenScores, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelPass:
    """How batches go through a model. ``head`` is None for a reward model, which has no logits; ``blanks`` are for
    models with towers that several ranks train; ``autocast`` is the type that the run computes in, in evaluation and
    for references as in training, None: that of the weights; ``routers`` of experts whose load a loss balances;
    ``temperature``: what logits are divided by."""

    isolation: ChosenIsolation
    head: OutputHead | None
    device: torch.device
    pad_token_id: int
    blanks: BlankMedia | None = None
    autocast: torch.dtype | None = None
    routers: Routers | None = None
    temperature: float = 1.0

    def scored(
        self, model: nn.Module, batch: Batch, score: Callable[[torch.Tensor, AnyHead, Targets], Scores]
    ) -> tuple[Scored[Scores], Targets]:
        """``score(hidden_KD, head, targets)`` at the targets of a batch, which are returned on the device.

        ``model`` is the one that this pass is for, or what wraps it (DDP, compiled).
        """
        assert self.head is not None, "a reward model predicts no tokens"
        batch = self.isolation.arranged(batch, pad_token_id=self.pad_token_id)
        targets = batch.targets.to(self.device)
        inputs = self.isolation.inputs(batch, device=self.device)
        with with_blanks(model, self.blanks, inputs), casting(self.device, self.autocast):
            scored = score_targets(
                model,
                inputs,
                targets.positions_K,
                lambda hidden_KD, head: score(hidden_KD, tempered(head, self.temperature), targets),
                head=self.head,
            )
        self._count(batch)
        return scored, targets

    def counted(self, model: nn.Module, batch: Batch) -> None:
        """A forward pass for what routers do with a batch alone."""
        batch = self.isolation.arranged(batch, pad_token_id=self.pad_token_id)
        inputs = self.isolation.inputs(batch, device=self.device)
        kept = {"logits_to_keep": 1} if self.head is not None and self.head.keeps else {}
        with with_blanks(model, self.blanks, inputs), casting(self.device, self.autocast):
            model(**inputs, **kept)
        self._count(batch)

    def _count(self, batch: Batch) -> None:
        if self.routers is not None:
            self.routers.count(batch)

    def token_scores(
        self, model: nn.Module, batch: Batch, *, entropy: bool = False
    ) -> tuple[Scored[TokenScores], Targets]:
        """The log-probability of each target; with ``entropy`` also that of the distribution it is drawn from."""
        return self.scored(model, batch, _scores_with_entropy if entropy else _log_probabilities)

    def values(self, model: nn.Module, batch: Batch, head: ValueHead) -> tuple[Scored[Valued], Targets]:
        """`token_scores` with entropies, and what the value head expects at each target, float32[K]."""

        def score(hidden_KD: torch.Tensor, of: AnyHead, targets: Targets) -> Valued:
            return _scores_with_entropy(hidden_KD, of, targets), head(hidden_KD)

        return self.scored(model, batch, score)

    def rewards(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """float32[S]: the reward of each segment, which a reward model gives at its last token."""
        assert self.head is None, "a language model gives no rewards"
        batch = self.isolation.arranged(batch, pad_token_id=self.pad_token_id)
        taken: list[torch.Tensor] = []

        def take(layer: nn.Module, arguments: tuple[Any, ...], rewards_BT1: torch.Tensor) -> None:
            taken.append(rewards_BT1)

        hook = reward_head(model).register_forward_hook(take)
        inputs = self.isolation.inputs(batch, device=self.device)
        try:
            with with_blanks(model, self.blanks, inputs), casting(self.device, self.autocast):
                model(**inputs)
        finally:
            hook.remove()
        self._count(batch)
        if len(taken) != 1:
            raise ModelError(f"its reward head was called {counted(len(taken), 'time')} in one forward pass")
        (rewards_BT1,) = taken
        return rewards_BT1.flatten()[segment_ends(batch).to(self.device)].float()


class ValueHead(nn.Module):
    """What a policy expects of an answer at each of its targets: a linear function of the hidden state before it.

    It becomes a part of the model, so that its weights are trained with the others'. The model's own weights, as they
    are saved for others, are without it.
    """

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.weight_D = nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))

    def forward(self, hidden_KD: torch.Tensor) -> torch.Tensor:
        """float32[K]."""
        return (hidden_KD.float() * self.weight_D).sum(dim=1) + self.bias

    def numbers(self) -> dict[str, Any]:
        return {"weight": self.weight_D.tolist(), "bias": self.bias.item()}

    def take(self, numbers: Mapping[str, Any]) -> None:
        """The way back."""
        with torch.no_grad():
            self.weight_D.copy_(torch.tensor(numbers["weight"]))
            self.bias.fill_(numbers["bias"])

    def _save_to_state_dict(self, *_: Any) -> None:
        """Nothing, and nothing is missed in `_load_from_state_dict`."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """See `_save_to_state_dict`."""


def add_value_head(model: nn.Module, forward: ModelPass) -> ValueHead:
    """A new one, which expects 0 everywhere. Raises `ModelError` where hidden states cannot be had."""
    plain = plain_model(model)
    if forward.head is None or not forward.head.tapped:
        raise ModelError(
            f"a value head needs the hidden states before the output layer, and {type(plain).__name__} makes its "
            "logits in a way of its own",
            hint="choose another objective.loss, such as reinforce_pp",
        )
    found = ValueHead(plain.config.get_text_config().hidden_size, forward.device)
    model.add_module("value_head", found)
    return found


def casting(device: torch.device, to: torch.dtype | None) -> AbstractContextManager[object]:
    """Within it products are of the type ``to``; None: of that of their weights, unless somebody else casts."""
    return nullcontext() if to is None else torch.autocast(device.type, dtype=to)


def reward_head(model: nn.Module) -> nn.Module:
    """The module that makes a reward of a hidden state, under whatever wraps the model."""
    found: nn.Module = plain_model(model).get_submodule(REWARD_HEAD)
    return found


def segment_ends(batch: Batch) -> torch.Tensor:
    """int64[S]: where the last token of each segment is in the flattened batch."""
    width = batch.model_inputs["input_ids"].shape[1]
    ends = [
        row * width + list(accumulate(branch.length for branch in branches))[leaf] - 1
        for row, branches in enumerate(batch.branches)
        for leaf in leaves(branches)
    ]
    return torch.tensor(ends)


def _log_probabilities(hidden_KD: torch.Tensor, head: AnyHead, targets: Targets) -> TokenScores:
    return token_scores(hidden_KD, head, targets.ids_K)


def _scores_with_entropy(hidden_KD: torch.Tensor, head: AnyHead, targets: Targets) -> TokenScores:
    return token_scores(hidden_KD, head, targets.ids_K, entropy=True)
