"""One micro-batch through one model: told which tokens see each other, and scored where something is to be learned.

The output head runs at the positions of targets alone, so there is no [B, T, V] tensor, in whichever class of model.
For one forward pass a hook on the model's output layer takes the hidden states of the targets, scores them there, and
lets the layer itself run on each row's first token, whose logits nobody reads. All of it happens inside the forward of
whatever wraps the model, so that DDP and FSDP see a head that is used where they expect it.

B rows, T tokens a row, K targets, S segments, P positions kept, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import nn

from luthier.errors import ModelError
from luthier.layout import leaves
from luthier.models import evaluating, output_layer, plain_model, sharding
from luthier.models.isolation import ChosenIsolation
from luthier.models.model import REWARD_HEAD
from luthier.models.routers import Reduce, Routers
from luthier.models.sharding import local_copy, replicate
from luthier.objectives import AnyHead, Head, LossKernel, tempered
from luthier.objectives.token_scores import TokenScores, token_scores
from luthier.records import Batch, Targets
from luthier.writing import counted

ROUTER_LOSS = "router_aux_loss"  # its name in logs

Scores = TypeVar("Scores")
Score = Callable[[torch.Tensor, AnyHead], Scores]
"""``score(hidden_KD, head)``: anything, made of the hidden states that predict the targets and of the head's logits."""

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""In nats, between two ways to the same log-probability; bfloat16 rounds logits of size 30 to 1/8."""

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, Falcon-H1, Muse
_MULTIPLIED_BY_LOGITS_SCALING = {"hyperclovax", "hyperclovax_vision_v2"}  # Granite divides by the entry of that name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutputHead:
    """Where a model's logits come from.

    tapped   logits are the output layer's times ``scale``, then soft-capped; else the model itself makes them, at the
             columns where some row has a target if it can (``keeps``), else all of them
    softcap  None: there is none
    kernel   computes losses of a tapped head, where it can; None: chunks do
    note     for the run's log, where the head cannot be tapped
    """

    layer: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    tapped: bool = True
    keeps: bool = True
    kernel: LossKernel | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored(Generic[Scores]):
    """``scores`` is what the scorer gave. ``anchor`` is 0.0, to be added to the loss: where a batch has no target it
    reaches every parameter, so that ranks which wait for each other's gradients all get some.
    """

    scores: Scores
    anchor: torch.Tensor


def find_head(model: nn.Module) -> OutputHead:
    """The output layer of a model, under an adapter or not, and what the model does to its logits, by its config.

    Raises `ModelError` for a model without an output layer.
    """
    plain = plain_model(model)
    layer = output_layer(plain)
    if layer is None:
        raise ModelError(f"{type(plain).__name__} has no output layer, so it predicts no tokens")
    entries = plain.config.get_text_config().to_dict()
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= entries.get(name) or 1.0
    if divisor := entries.get("logits_scaling"):
        scale *= divisor if plain.config.model_type in _MULTIPLIED_BY_LOGITS_SCALING else 1 / divisor
    softcap = entries.get("final_logit_softcapping")
    # Whether the model can compute its logits at chosen positions only (``logits_to_keep`` of its forward).
    keeps = "logits_to_keep" in inspect.signature(plain.forward).parameters
    return OutputHead(layer=layer, scale=scale, softcap=softcap, keeps=keeps)


def prove_head(model: nn.Module, head: OutputHead, inputs: Mapping[str, object]) -> OutputHead:
    """The head as it may be used: compared, on these inputs, with the logits that the model makes by itself.

    ``inputs`` are those of one small batch. Where the two differ, or the layer is not called the way a tap needs, the
    answer is a head that is not tapped, with a note that says so.
    """
    with evaluating(model), torch.no_grad():
        problem = _difference(model, head, inputs)
    if problem is None:
        return head
    where = "at the columns of a batch that have targets" if head.keeps else "at all positions"
    note = f"the model makes its own logits, {where}: {problem}"
    return OutputHead(layer=head.layer, tapped=False, keeps=head.keeps, note=note)


def score_targets(
    model: nn.Module, inputs: Mapping[str, Any], positions_K: torch.Tensor, score: Score[Scores], *, head: OutputHead
) -> Scored[Scores]:
    """Run ``model(**inputs)``, which may be wrapped, and ``score`` the hidden states at ``positions_K`` of its B x T.

    The scores are part of the graph of the forward pass. Raises `ModelError` where the model does not call its output
    layer once on all positions; `prove_head` finds that out beforehand.
    """
    if not head.tapped:
        return _score_own_logits(model, inputs, positions_K, score, keeps=head.keeps)
    taken: list[Scores] = []

    def tap(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[torch.Tensor]:
        (hidden_BTD,) = arguments
        if hidden_BTD.shape[:2] != inputs["input_ids"].shape:
            shapes = f"{tuple(hidden_BTD.shape)} for ids of shape {tuple(inputs['input_ids'].shape)}"
            raise ModelError(f"its output layer got hidden states of shape {shapes}")
        taken.append(score(hidden_BTD.flatten(0, 1)[positions_K], _logits_of(head)))
        return (hidden_BTD[:, :1],)

    hook = head.layer.register_forward_pre_hook(tap)
    try:
        logits = model(**inputs).logits
    finally:
        hook.remove()
    if len(taken) != 1:
        raise ModelError(f"its output layer was called {counted(len(taken), 'time')} in one forward pass")
    return Scored(scores=taken[0], anchor=_anchor(logits, positions_K))


def _logits_of(head: OutputHead) -> AnyHead:
    """The head's weights where it is a plain layer, else a function: adapters and quantized layers know their own."""
    layer = head.layer
    if isinstance(layer, ModulesToSaveWrapper):  # a trained copy beside the original
        trained = layer.active_adapters and not layer.disable_adapters
        layer = layer.modules_to_save[layer.active_adapters[0]] if trained else layer.original_module
    if isinstance(layer, TrainableTokensWrapper):  # rows of new tokens beside frozen ones; PEFT leaves out any bias
        trained = layer.active_adapters and not layer.disable_adapters
        weight_VD = (
            layer.token_adapter.get_merged_weights(layer.active_adapters) if trained else layer.original_module.weight
        )
        return Head(weight_VD=weight_VD, scale=head.scale, softcap=head.softcap)
    if type(layer) is nn.Linear:
        return Head(
            weight_VD=layer.weight, bias_V=layer.bias, scale=head.scale, softcap=head.softcap, kernel=head.kernel
        )

    def logits(hidden_CD: torch.Tensor) -> torch.Tensor:
        logits_CV = layer.forward(hidden_CD) * head.scale  # not layer(): that would call the tap
        return logits_CV if head.softcap is None else torch.tanh(logits_CV / head.softcap) * head.softcap

    return logits


def _score_own_logits(
    model: nn.Module, inputs: Mapping[str, Any], positions_K: torch.Tensor, score: Score[Scores], *, keeps: bool
) -> Scored[Scores]:
    width = inputs["input_ids"].shape[1]
    columns_K = positions_K % width
    kept_P = torch.arange(width, device=positions_K.device)
    if keeps:
        kept_P = columns_K.unique() if len(columns_K) else kept_P[:1]
        inputs = {**inputs, "logits_to_keep": kept_P}
    logits_BPV = model(**inputs).logits
    rows_K = positions_K.div(width, rounding_mode="floor") * len(kept_P) + torch.searchsorted(kept_P, columns_K)
    # what is scored are logits already, so that their head is the identity
    scores = score(logits_BPV.flatten(0, 1)[rows_K], lambda logits_CV: logits_CV)
    return Scored(scores=scores, anchor=_anchor(logits_BPV, positions_K))


def _anchor(logits: torch.Tensor, positions_K: torch.Tensor) -> torch.Tensor:
    return logits.new_zeros((), dtype=torch.float32) if len(positions_K) else logits.float().sum() * 0


def _difference(model: nn.Module, head: OutputHead, inputs: Mapping[str, Any]) -> str | None:
    logits_BTV = model(**inputs).logits
    own_NV = logits_BTV.flatten(0, 1).float()
    # every token predicts itself here: any id tells the logits apart, and so do the likeliest ones
    ids_N = inputs["input_ids"].flatten()
    positions_N = torch.arange(len(ids_N), device=ids_N.device)
    worst = 0.0
    for ids in (ids_N, own_NV.argmax(dim=1)):
        expected_N = own_NV.log_softmax(dim=1).gather(1, ids[:, None]).squeeze(1)

        def score(hidden_ND: torch.Tensor, head: AnyHead, ids_N: torch.Tensor = ids) -> torch.Tensor:
            return token_scores(hidden_ND, head, ids_N).logps_K

        try:
            found_N = score_targets(model, inputs, positions_N, score, head=head).scores
        except ModelError as error:
            return f"{type(model).__name__}: {error.message}"
        worst = max(worst, float((found_N.float() - expected_N).abs().max()))
    allowed = TOLERANCE[logits_BTV.dtype]
    if worst <= allowed:
        return None
    return f"log-probabilities from the output layer differ by {worst:.2g} from the model's own (allowed {allowed:.2g})"


Valued = tuple[TokenScores, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelPass:
    """How batches go through a model. ``head`` is None for a reward model, which has no logits; ``autocast`` is
    the type that the run computes in, in evaluation and for references as in training, None: that of the weights;
    ``routers`` of experts whose load a loss balances; ``temperature``: what logits are divided by."""

    isolation: ChosenIsolation
    head: OutputHead | None
    device: torch.device
    pad_token_id: int
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
        with casting(self.device, self.autocast):
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
        with casting(self.device, self.autocast):
            model(**inputs, **kept)
        self._count(batch)

    def _count(self, batch: Batch) -> None:
        if self.routers is not None:
            self.routers.count(batch)

    def token_scores(
        self, model: nn.Module, batch: Batch, *, entropy: bool = False
    ) -> tuple[Scored[TokenScores], Targets]:
        """The log-probability of each target; with ``entropy`` also that of the distribution it is drawn from."""

        def score(hidden_KD: torch.Tensor, head: AnyHead, targets: Targets) -> TokenScores:
            return token_scores(hidden_KD, head, targets.ids_K, entropy=entropy)

        return self.scored(model, batch, score)

    def values(self, model: nn.Module, batch: Batch, head: ValueHead) -> tuple[Scored[Valued], Targets]:
        """`token_scores` with entropies, and what the value head expects at each target, float32[K]."""

        def score(hidden_KD: torch.Tensor, of: AnyHead, targets: Targets) -> Valued:
            return token_scores(hidden_KD, of, targets.ids_K, entropy=True), head(hidden_KD)

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
            with casting(self.device, self.autocast):
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
    are saved for others, are without it. Where ranks share the model's weights, each has all of the head.
    """

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.weight_D = nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))

    def forward(self, hidden_KD: torch.Tensor) -> torch.Tensor:
        """float32[K]."""
        return (hidden_KD.float() * local_copy(self.weight_D)).sum(dim=1) + local_copy(self.bias)

    def numbers(self) -> dict[str, Any]:
        with torch.no_grad():
            return {"weight": local_copy(self.weight_D).tolist(), "bias": local_copy(self.bias).item()}

    def take(self, numbers: Mapping[str, Any]) -> None:
        """Put numbers that `numbers` gave into the weights."""
        with torch.no_grad():
            local_copy(self.weight_D).copy_(torch.tensor(numbers["weight"]))
            local_copy(self.bias).fill_(numbers["bias"])

    def _save_to_state_dict(self, *_: object) -> None:
        """Nothing, and nothing is missed in `_load_from_state_dict`."""

    def _load_from_state_dict(self, *_: object) -> None:
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
    replicate(found, like=model)
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


class RouterBalance:
    """The loss that balances experts, in a run: what is counted before a step, and added to its micro-batches. Nothing
    where a model has no ``routers``."""

    def __init__(self, forward: ModelPass, learned: Callable[[Batch], Batch] | None) -> None:
        """``learned``: what of a batch is learned, where it holds more than that."""
        self._forward, self._routers, self._learned = forward, forward.routers, learned
        self._sum, self._steps = 0.0, 0

    def begin_step(self, model: nn.Module, batches: Sequence[Batch], reduce: Reduce) -> None:
        """Count what routers choose in all micro-batches of a step, on all ranks, in forward passes of their own:
        without dropout, and without drawing random numbers."""
        if (routers := self._routers) is None:
            return
        routers.step = None
        if len(batches) == 1 and not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
            return  # the micro-batch is the whole step, and counts itself
        try:
            with evaluating(model), torch.no_grad(), torch.random.fork_rng(), routers.counting(with_gradients=False):
                for batch in batches:
                    self._forward.counted(model, batch if self._learned is None else self._learned(batch))
        finally:
            sharding.give_up_gathered(model)
        self._note(routers, reduce)

    def counting(self) -> AbstractContextManager[None]:
        """Around the forward pass of a micro-batch."""
        return nullcontext() if self._routers is None else self._routers.counting(with_gradients=True)

    def loss(self) -> torch.Tensor | float:
        """What the micro-batch that was counted last adds to the step's loss."""
        if (routers := self._routers) is None:
            return 0.0
        if routers.step is None:
            self._note(routers, lambda sums: sums)
        return routers.coefficient * routers.loss(routers.taken())

    def _note(self, routers: Routers, reduce: Reduce) -> None:
        routers.step_begins(routers.taken(), reduce)
        assert routers.step is not None
        self._sum += float(routers.loss(routers.step))
        self._steps += 1

    def drain(self) -> dict[str, float]:
        """The mean over the steps since the last time, by its name in logs."""
        if not self._steps:
            return {}
        mean, self._sum, self._steps = self._sum / self._steps, 0.0, 0
        return {ROUTER_LOSS: mean}

    def state(self) -> dict[str, float]:
        """What `drain` would give the mean of; the same on all ranks."""
        return {"sum": self._sum, "steps": self._steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on with what `state` gave."""
        self._sum, self._steps = state["sum"], int(state["steps"])
