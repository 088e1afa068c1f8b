"""A run's objective, put together: how batches go through the model, the reference, what is minimised, and what
computes the output head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from subprocess import SubprocessError
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from luthier.config.choices import HeadKernel
from luthier.config.objective import LOSSES, OBJECTIVES
from luthier.config.schema import RunConfig
from luthier.errors import ModelError, install_hint
from luthier.loader.settings import units_of
from luthier.models import (
    MediaNeeds,
    evaluating,
    families_of,
    media_needs,
    model_needs,
    plain_model,
    routers,
    scaled_beyond,
    sharding,
    text_attention,
)
from luthier.models.isolation import ChosenIsolation, check_rows, choose_isolation
from luthier.models.mixers import Isolation
from luthier.models.model import REWARD_HEAD, is_reward_model
from luthier.models.passes import ModelPass, OutputHead, casting, find_head, prove_head, reward_head, score_targets
from luthier.models.quantized import rounds_inputs
from luthier.objectives import AnyHead, Head, LigerKernel, liger_is_installed, runs_on
from luthier.objectives.hidden_loss import hidden_loss_sum
from luthier.objectives.loss_sums import TokenSettings
from luthier.objectives.token_scores import TokenScores, token_scores, unfit
from luthier.training.losses import BothLosses, ObjectiveParts, Tell, first_inputs, token_settings
from luthier.training.losses.plugin_losses import checked_losses
from luthier.writing import counted


def model_pass(parts: ObjectiveParts, tell: Callable[[str], None]) -> ModelPass:
    """How batches go through the trained model, proven on its first rows. Raises `ModelError`."""
    with casting(parts.device, parts.autocast):  # FlashAttention, for one, runs in 16 bits only
        return _proven_pass(parts, tell)


def _proven_pass(parts: ObjectiveParts, tell: Callable[[str], None]) -> ModelPass:
    compiled = parts.config.train.torch_compile
    if compiled:  # what is proven is what will run
        layers = sharding.compile_layers(parts.model, recomputed=parts.config.train.gradient_checkpointing)
        tell(f"model: {counted(layers, 'decoder layer is', 'decoder layers are')} compiled, in the first steps")
    model = HiddenStates(parts.model) if is_reward_model(parts.config) else parts.model
    if parts.how.packed:
        isolation = _isolation(parts, model, tell)
    else:
        attention = text_attention(parts.loaded.model)
        isolation = ChosenIsolation(isolation=Isolation.PADDED, attention=attention, windows={})
        if parts.media is None and not rounds_inputs(parts.loaded.model):
            is_padded = _num_rows(parts.config) > 1
            check_rows(model, parts.train[0], parts.how, padded=is_padded, device=parts.device)
    for note in isolation.notes:
        tell(f"attention: not {note}")
    if parts.how.packed:
        apart = f"segments (sequences that share a row) kept apart by {isolation.isolation.words}"
        tell(f"attention: {isolation.attention}, {apart}")
    if isolation.mixers:
        tell(f"attention: recurrent layers ({', '.join(isolation.mixers)}) run segment by segment")
    head = None
    if not is_reward_model(parts.config):
        inputs = first_inputs(parts, isolation)
        head = prove_head(parts.model, find_head(parts.model), inputs)
        head = choose_kernel(parts, parts.model, head, inputs, tell)
        if head.note is not None:
            tell(f"head: {head.note}")
    if compiled:
        sharding.forget_graphs()
    return ModelPass(
        isolation=isolation,
        head=head,
        device=parts.device,
        pad_token_id=parts.how.pad_token_id,
        autocast=parts.autocast,
        routers=_routers(parts, tell),
    )


def _routers(parts: ObjectiveParts, tell: Callable[[str], None]) -> routers.Routers | None:
    """Those whose load is balanced by a loss, if any. Raises as `balanced_routers`."""
    found = routers.balanced_routers(parts.loaded.model, parts.config.train)
    if found is None:
        return None
    if parts.config.train.torch_compile:
        tell("experts: no loss balances their load, as what routers do in compiled layers is not seen")
        return None
    tell(f"experts: their load is balanced by a loss (router_aux_loss_coef {found.coefficient:g})")
    return found


def _isolation(parts: ObjectiveParts, model: nn.Module, tell: Callable[[str], None]) -> ChosenIsolation:
    """What keeps segments apart, or branches of trees. Turns of a conversation, which are not compared, are unrolled
    where the model cannot have them as trees; its way of isolation then has ``shared`` unset.
    """
    needs, config = _needs(parts), parts.config
    limit, longest = scaled_beyond(parts.loaded.model.config), config.data.max_length * units_of(config).size
    if limit is not None and longest > limit:
        why = f"it is scaled by a token's place in the row, from place {limit + 1:,} on"
        needs = replace(needs, refusal=f"in rows of several sequences: {why}")
    choose = partial(
        choose_isolation,
        model,
        parts.train,
        parts.how,
        device=parts.device,
        asked=config.model.attn_implementation,
        needs=needs,
        num_rows=min(2, _num_rows(config)),
    )
    if not parts.shared or units_of(config).are_compared:
        return choose(shared=parts.shared)
    why = "what it sees both ways before an answer is another for each answer" if needs.prefix else ""
    if not why:
        try:
            found = choose(shared=True)
        except ModelError as error:
            why = str(error).partition("\n")[0]
        else:
            if found.shared:
                return found
            why = "; ".join(found.notes)
    tell(f"attention: the common beginning of a row's turns is computed once for each turn, in longer rows: {why}")
    return choose(shared=False)


def _num_rows(config: RunConfig) -> int:
    """The most rows that a batch has."""
    return max(config.train.per_device_train_batch_size, config.eval.per_device_eval_batch_size)


def _needs(parts: ObjectiveParts) -> MediaNeeds:
    """By the family's row; of a kind of model without one, by what its processor says."""
    model = parts.loaded.model
    if parts.media is not None and not families_of(model.config):
        return media_needs(parts.media.processor.family, model.config.to_dict())
    return model_needs(model)


def make_losses(parts: ObjectiveParts, forward: ModelPass, tell: Tell) -> BothLosses:
    """What training minimises, and what is measured on held-out rows. Raises `ModelError`, and `PluginError`."""
    objective = parts.config.objective
    make: Callable[..., BothLosses] = objective.kind.make_losses
    is_checked = objective.name in OBJECTIVES.added() and not objective.kind.on_policy
    return checked_losses(make, parts, forward, tell) if is_checked else make(parts, forward, tell)


class HiddenStates(nn.Module):
    """A reward model as one that gives something for each token: its last hidden states in place of logits."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        plain = plain_model(model)
        self.plain, self.config = plain, plain.config
        assert hasattr(plain, REWARD_HEAD), f"{type(plain).__name__} has no {REWARD_HEAD}"

    def _get_name(self) -> str:
        """In messages it is the user's model."""
        return type(self.plain).__name__

    def set_attn_implementation(self, attention: str | dict[str, object]) -> None:
        """As models of transformers do."""
        self.plain.set_attn_implementation(attention)

    def forward(self, **inputs: Any) -> Any:
        """``logits`` [B, T, D]."""
        # the model is called as it is in training: of a sharded one nothing else gathers its embeddings
        taken: list[torch.Tensor] = []

        def take(head: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            taken.append(arguments[0])

        hook = reward_head(self.plain).register_forward_pre_hook(take)
        try:
            output = self.plain(**inputs)
        finally:
            hook.remove()
        (output.logits,) = taken
        return output


# ---- What computes a run's output head: chunks of our own, or another library's kernel, proven on the run's own model.
#
# N tokens, K targets, D hidden size.

TARGETS_TRIED = 48  # of fewer the rounding of 16 bits would not average out
_STRIDE = 104_729  # a prime larger than steps between neighbouring ids: other ids for the same hidden states


def choose_kernel(
    parts: ObjectiveParts, model: nn.Module, head: OutputHead, inputs: Mapping[str, object], tell: Callable[[str], None]
) -> OutputHead:
    """The head with the kernel that computes it in this run, if any; ``inputs`` are those of one small batch.

    Raises `ModelError` where ``train.head_kernel`` names a kernel that is not there, or not as good as the chunks.
    """
    asked, unknown_loss = parts.config.train.head_kernel, _unknown_loss(parts.config)
    match asked:
        case HeadKernel.CHUNKED:
            return head
        case HeadKernel.AUTO:
            is_tried = parts.device.type == "cuda" and liger_is_installed() and head.tapped
            if not is_tried or unknown_loss is not None:
                return head
        case HeadKernel.LIGER:
            if (absence := _absence(parts.device)) is not None:
                raise _refused(asked, absence)
            if unknown_loss is not None:
                tell(f"head kernel: chunked, as {asked} does not know the loss {unknown_loss}")
                return head
        case _:
            raise AssertionError(asked)
    try:
        kernel = LigerKernel()
        problem = _problem(parts, model, replace(head, kernel=kernel), inputs)
    except ImportError as error:
        problem = f"liger-kernel cannot be imported: {error}"
    if problem is None:
        tell(f"head kernel: {kernel.name}, which agrees with the chunks on the first row")
        return replace(head, kernel=kernel)
    if asked is HeadKernel.AUTO:
        tell(f"head kernel: chunked, not liger: {problem}")
        return head
    raise _refused(asked, problem)


def kernel_name(head: OutputHead | None) -> str | None:
    """What computes the head, for the report; None: there is no head."""
    if head is None:
        return None
    return "chunked" if head.kernel is None else head.kernel.name


def _absence(device: torch.device) -> str | None:
    if not liger_is_installed():
        return "liger-kernel is not installed"
    return None if runs_on(device) else f"its kernels need a GPU, and the model is on the {device.type}"


def _problem(parts: ObjectiveParts, model: nn.Module, head: OutputHead, inputs: Mapping[str, Any]) -> str | None:
    """What the kernel does otherwise than the chunks, on the hidden states of a row and in the types of training."""
    if not head.tapped:
        return head.note or "the model makes its own logits"
    next_N = inputs["input_ids"].flatten().roll(-1)
    positions_N = torch.arange(len(next_N), device=next_N.device)
    settings = token_settings(parts.config.objective) if parts.config.objective.kind.by_token else TokenSettings()
    times = -(-TARGETS_TRIED // len(next_N))

    # here and not afterwards: a sharded weight is whole while its layer runs
    def score(hidden_ND: torch.Tensor, logits_of: AnyHead) -> str | None:
        if not isinstance(logits_of, Head):
            return f"the output layer is {_class_of(head)}, and a kernel needs its weight"
        strides_K = torch.arange(times, device=next_N.device).repeat_interleave(len(next_N)) * _STRIDE
        ids_K = (next_N.repeat(times) + strides_K) % len(logits_of.weight_VD)
        return kernel_problem(hidden_ND.repeat(times, 1), logits_of, ids_K, settings=settings)

    autocast = torch.autocast(next_N.device.type, parts.autocast, enabled=parts.autocast is not None)
    with evaluating(model), torch.no_grad(), autocast:
        return score_targets(model, inputs, positions_N, score, head=head).scores


def _unknown_loss(config: RunConfig) -> str | None:
    """The run's loss of single tokens, where kernels do not know it."""
    name = config.objective.loss_name
    return name if config.objective.kind.by_token and not LOSSES.named(name).is_plain else None


def _class_of(head: OutputHead) -> str:
    return f"{type(head.layer).__module__.partition('.')[0]}'s {type(head.layer).__name__}"


def _refused(asked: HeadKernel, problem: str) -> ModelError:
    return ModelError(
        f"train.head_kernel is {asked}, but {problem}",
        hint=f"set train.head_kernel: auto, or chunked; or {install_hint('kernels')}",
    )


# --------------------------------------------------------------------------------------------------------------------
# A kernel compared with the chunks, on hidden states of the run itself. K targets, V vocabulary, D hidden size.


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far two ways to the same numbers may lie apart, with some dozens of targets.

    nats      of one target's log-probability
    share     of a mean loss, or of the length of a gradient: what all targets have in common, so rounding averages out
    distance  between two gradients, as a share of their length
    flags     share of targets that only one of them ranks first: near ties, after rounding
    """

    nats: float
    share: float
    distance: float
    flags: float


LIMITS = {
    torch.float32: Limits(nats=1e-3, share=1e-4, distance=1e-3, flags=0.0),
    torch.float16: Limits(nats=5e-2, share=2e-3, distance=2e-2, flags=0.1),
    torch.bfloat16: Limits(nats=2e-1, share=5e-3, distance=5e-2, flags=0.1),  # a logit of 30 is rounded to 1/8
}

# What kernels raise that a device, a version or a shape does not suit: Triton's own errors are made `RuntimeError`. The
# last two come from machines on which Triton cannot build its launcher: a compiler that finds no Python.h, a cache
# folder that cannot be written.
KERNEL_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError, SubprocessError, OSError)


def kernel_problem(hidden_KD: torch.Tensor, head: Head, ids_K: torch.Tensor, *, settings: TokenSettings) -> str | None:
    """What ``head.kernel`` computes otherwise than the chunks, in numbers, or why it does not run; None: nothing.

    Looks at sums of losses under ``settings``, plain and weighted, at log-probabilities of single targets and at which
    rank first, and at the gradients of the hidden states and of what is trained of the head, for both kinds of loss.
    """
    assert head.kernel is not None and len(ids_K) > 0
    if (reason := unfit(head)) is not None:
        return reason
    limits = LIMITS[head.compute_dtype]
    # every other target counts half
    weights_K = 1 - 0.5 * (torch.arange(len(ids_K), device=ids_K.device) % 2)
    ways: tuple[_Way, ...] = (
        partial(_loss_sum, settings=settings, weights_K=None),
        partial(_loss_sum, settings=settings, weights_K=weights_K),
        _scores,
    )
    for way in ways:
        expected = way(hidden_KD, replace(head, kernel=None), ids_K)
        try:
            found = way(hidden_KD, head, ids_K)
        except KERNEL_REFUSALS as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        problem = next(_differences(found, expected, limits), None)
        if problem is not None:
            return problem
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Seen:
    """``scores`` where it is that of single targets; gradients by what they are of."""

    mean_loss: float
    scores: TokenScores | None = None
    gradients: dict[str, torch.Tensor]


_Way = Callable[[torch.Tensor, Head, torch.Tensor], _Seen]


def _loss_sum(
    hidden_KD: torch.Tensor,
    head: Head,
    ids_K: torch.Tensor,
    *,
    settings: TokenSettings,
    weights_K: torch.Tensor | None,
) -> _Seen:
    hidden_KD, head, leaves = _as_leaves(hidden_KD, head)
    with torch.enable_grad():
        loss_sum = hidden_loss_sum(hidden_KD, head, ids_K, weights_K, settings=settings).loss_sum
    return _Seen(mean_loss=loss_sum.item() / len(ids_K), gradients=_gradients(loss_sum, leaves))


def _scores(hidden_KD: torch.Tensor, head: Head, ids_K: torch.Tensor) -> _Seen:
    """Some targets are made likelier, some less likely, some are left alone."""
    hidden_KD, head, leaves = _as_leaves(hidden_KD, head)
    counts_K = torch.arange(len(ids_K), device=ids_K.device) % 3 - 1.0
    with torch.enable_grad():
        scores = token_scores(hidden_KD, head, ids_K)
        weighted = scores.logps_K @ counts_K
    mean_loss = -scores.logps_K.detach().mean().item()
    return _Seen(mean_loss=mean_loss, scores=scores, gradients=_gradients(weighted, leaves))


def _as_leaves(hidden_KD: torch.Tensor, head: Head) -> tuple[torch.Tensor, Head, dict[str, torch.Tensor]]:
    """The same numbers apart from the model's graph; of the head what is trained needs a gradient here too."""
    hidden_KD = hidden_KD.detach().requires_grad_()
    weight_VD = head.weight_VD.detach().requires_grad_(head.weight_VD.requires_grad)
    bias_V = None if head.bias_V is None else head.bias_V.detach().requires_grad_(head.bias_V.requires_grad)
    leaves = {"the hidden states": hidden_KD, "the weight": weight_VD, "the bias": bias_V}
    return (
        hidden_KD,
        replace(head, weight_VD=weight_VD, bias_V=bias_V),
        {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad},
    )


def _gradients(value: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def _differences(found: _Seen, expected: _Seen, limits: Limits) -> Iterator[str]:
    """What is too far apart; comparisons are such that what is no number is."""
    apart = abs(found.mean_loss - expected.mean_loss)
    if not apart <= limits.share * (1 + expected.mean_loss):
        yield f"a mean loss of {found.mean_loss:.6g} in place of {expected.mean_loss:.6g}"
    if found.scores is not None and expected.scores is not None:
        worst = float((found.scores.logps_K - expected.scores.logps_K).detach().abs().max())
        if not worst <= limits.nats:
            yield f"log-probabilities differ by {worst:.2g} (allowed {limits.nats:.2g})"
        flags = float((found.scores.correct_K != expected.scores.correct_K).float().mean())
        if not flags <= limits.flags:
            yield f"of {flags:.0%} of the targets it is told otherwise whether they rank first"
    for name, gradient in expected.gradients.items():
        length, along, distance = _apart(found.gradients[name], gradient)
        if not (along <= limits.share * length and distance <= limits.distance * length):
            shares = f"{along / length:.2g} in length, {distance / length:.2g} in all" if length else f"{distance:.2g}"
            yield f"the gradient of {name} differs by {shares} (allowed {limits.share:.2g}, {limits.distance:.2g})"


def _apart(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float]:
    """The length of a gradient, how much longer or shorter the other is along it, and how far away."""
    away, expected = (found.float() - expected.float()).flatten(), expected.float().flatten()
    length = float(expected.norm())
    along = abs(float(away @ expected)) / length if length else 0.0
    return length, along, float(away.norm())
