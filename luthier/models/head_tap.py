"""The output head at the positions of targets alone: no [B, T, V] tensor, in whichever class of model.

For one forward pass a hook on the model's output layer takes the hidden states of the targets, scores them there, and
lets the layer itself run on each row's first token, whose logits nobody reads. All of it happens inside the forward of
whatever wraps the model, so that DDP and FSDP see a head that is used where they expect it.

B rows, T tokens a row, K targets, P positions kept, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import nn

from luthier.errors import ModelError
from luthier.models.submodules import plain_model
from luthier.objectives.head import AnyHead, Head
from luthier.objectives.head_kernels import LossKernel
from luthier.objectives.token_scores import token_scores
from luthier.writing import counted

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


def keeps_logits(model: nn.Module) -> bool:
    """Whether the model can compute its logits at chosen positions only (``logits_to_keep`` of its forward)."""
    return "logits_to_keep" in inspect.signature(plain_model(model).forward).parameters


def find_head(model: nn.Module) -> OutputHead:
    """The output layer of a model, under an adapter or not, and what the model does to its logits, by its config.

    Raises `ModelError` for a model without an output layer.
    """
    plain = plain_model(model)
    layer = plain.get_output_embeddings()
    if layer is None:
        raise ModelError(f"{type(plain).__name__} has no output layer, so it predicts no tokens")
    entries = plain.config.get_text_config().to_dict()
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= entries.get(name) or 1.0
    if divisor := entries.get("logits_scaling"):
        scale *= divisor if plain.config.model_type in _MULTIPLIED_BY_LOGITS_SCALING else 1 / divisor
    softcap = entries.get("final_logit_softcapping")
    return OutputHead(layer=layer, scale=scale, softcap=softcap, keeps=keeps_logits(model))


def prove_head(model: nn.Module, head: OutputHead, inputs: Mapping[str, object]) -> OutputHead:
    """The head as it may be used: compared, on these inputs, with the logits that the model makes by itself.

    ``inputs`` are those of one small batch. Where the two differ, or the layer is not called the way a tap needs, the
    answer is a head that is not tapped, with a note that says so.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            problem = _difference(model, head, inputs)
    finally:
        model.train(training)
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
        score = _log_probabilities_of(ids)
        try:
            found_N = score_targets(model, inputs, positions_N, score, head=head).scores
        except ModelError as error:
            return f"{type(model).__name__}: {error.message}"
        worst = max(worst, float((found_N.float() - expected_N).abs().max()))
    allowed = TOLERANCE[logits_BTV.dtype]
    if worst <= allowed:
        return None
    return f"log-probabilities from the output layer differ by {worst:.2g} from the model's own (allowed {allowed:.2g})"


def _log_probabilities_of(ids_N: torch.Tensor) -> Score[torch.Tensor]:
    def score(hidden_ND: torch.Tensor, head: AnyHead) -> torch.Tensor:
        return token_scores(hidden_ND, head, ids_N).logps_K

    return score
