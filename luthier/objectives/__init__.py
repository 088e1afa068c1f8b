"""Scores to losses: always sums, never means; the trainer divides by the whole step's count.

Here is what all objectives share: measures, the call of a loss, and the output head.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Protocol

import torch

from luthier.config.loss_rows import Loss
from luthier.config.objective import LOSSES
from luthier.errors import LuthierError, PluginError
from luthier.plugins import failure_of

# ----------------------------------------------------------------------------------------------------------------------
# What is reported beside the loss, as sums with their counts (a mean is that of a step), and running means.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measure:
    """A sum and how many values it is of: scalar tensors in float64, detached, to be added up (``+``) over a step."""

    total: torch.Tensor
    count: torch.Tensor

    def __add__(self, other: Measure) -> Measure:
        return Measure(total=self.total + other.total, count=self.count + other.count)

    @property
    def mean(self) -> float:
        """The mean; not a number where nothing was counted."""
        return (self.total / self.count).item()


Measures = dict[str, Measure]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceLoss:
    """What a loss over whole answers gives for one micro-batch.

    loss_sum   float32 scalar, differentiable: over pairs or rows, to be divided by their number in the whole step
    losses_U   float32, what it is the sum of, for reports: not differentiable
    measures   by the names that papers and trackers use
    """

    loss_sum: torch.Tensor
    losses_U: torch.Tensor
    measures: Measures

    @property
    def num_units(self) -> int:
        """How many pairs or rows this is of."""
        return len(self.losses_U)


def measure(values: torch.Tensor, where: torch.Tensor | None = None) -> Measure:
    """Sum and count of ``values``, [N]; with ``where``, bool[N], only of those."""
    values = values.detach().double()
    if where is None:
        return Measure(total=values.sum(), count=values.new_tensor(len(values)))
    return Measure(total=torch.where(where, values, 0.0).sum(), count=where.double().sum())


# --------------------------------------------------------------------------------------------------------------------
# The running mean of rewards that BCO compares with; it is part of a run's state.


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMean:
    """The mean of all rewards of the steps so far; a step takes the mean as it stands when the step begins.

    So no micro-batch's rewards move another's baseline, and the loss does not depend on how a step is divided. (TRL
    0.24 and LLaMA-Factory count a micro-batch before they compare with it, and each micro-batch as one reward.)
    """

    total: float = 0.0
    count: float = 0.0

    @property
    def mean(self) -> float:
        """0 before the first step."""
        return self.total / self.count if self.count else 0.0

    def after(self, total: float, count: float) -> RunningMean:
        """With the rewards of a step: their sum and number over all micro-batches and ranks."""
        return RunningMean(total=self.total + total, count=self.count + count)

    def to_state(self) -> dict[str, float]:
        """What a checkpoint holds, as JSON numbers."""
        return {"total": self.total, "count": self.count}

    @staticmethod
    def from_state(state: Mapping[str, float]) -> RunningMean:
        """Read what `to_state` gave. Raises KeyError where a number is missing."""
        return RunningMean(total=float(state["total"]), count=float(state["count"]))


# ----------------------------------------------------------------------------------------------------------------------
# Calls the function of a loss, which may be a plugin's, and looks at what it gives before anything is made of it.
#
# A mean, or a shape that only broadcasts, would train something else than it says. U units: targets, pairs or rows.


def computed_losses(loss: Loss, scores_U: torch.Tensor, unit: str, *arguments: object) -> torch.Tensor:
    """The loss of each unit, [U], from what the function is called with; ``scores_U`` are the scores among it that the
    losses are to have a gradient by, and ``unit`` is what one of them is of: ``"target"``.

    Raises `PluginError` where the function gives something else, or where a plugin's raises. Only the tensor's type and
    shape are looked at, never its values, which a GPU may still be computing.
    """
    try:
        losses_U = loss.compute(*arguments)
    except (LuthierError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if loss.name not in LOSSES.added():
            raise
        raise failure_of(_named(loss), error) from error
    if not isinstance(losses_U, torch.Tensor):
        raise _odd(loss, f"a {type(losses_U).__name__}", scores_U, unit)
    if losses_U.shape != scores_U.shape:
        raise _odd(loss, f"a tensor of shape {list(losses_U.shape)}", scores_U, unit)
    if scores_U.requires_grad and torch.is_grad_enabled() and not losses_U.requires_grad:
        what = f"what {_named(loss)} gives has no gradient, so nothing is learned from it"
        hint = "compute them from what the function is given, without .detach(), .item(), .numpy() or torch.no_grad()"
        raise PluginError(what, hint=hint)
    return losses_U


def _named(loss: Loss) -> str:
    return f"the loss {loss.name!r} of {LOSSES.added_by(loss.name)}"


def _odd(loss: Loss, given: str, scores_U: torch.Tensor, unit: str) -> PluginError:
    what = f"{_named(loss)} gives {given}, where one of shape {list(scores_U.shape)} is needed: a loss for each {unit}"
    hint = (
        f"return one loss for each {unit}, do not take the mean or the sum: luthier adds them up and divides by the "
        f"number of those of the whole step (docs/plugins.md)"
    )
    return PluginError(what, hint=hint)


# ---- Other libraries' kernels for an output head and its cross-entropy in one. K targets, V vocabulary, D hidden size.
#
# They give the loss of each target, the id that the logits rank first, and gradients of the head's inputs, from
# matrices of one 16-bit or 32-bit type. What else a loss may need (entropies, other losses, a reference's distribution)
# they do not, and that is left to the chunks, whichever kernel a run has.


# ----------------------------------------------------------------------------------------------------------------------
# The output head of a language model, a chunk of rows at a time, so that no [K, V] tensor is ever made.
#
# K rows, C rows of a chunk, V vocabulary, D hidden size. One buffer of a chunk's size is used again for every chunk: on
# a CPU fresh memory of that size costs as much as the product that fills it.


KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of the hidden states, the weight and the bias."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelTask:
    """The losses of K targets, at least one: the logits are ``softcap x tanh((hidden @ weight.T + bias) / softcap)``.

    hidden_KD, weight_VD, bias_V  of one of `KERNEL_DTYPES`; the bias, the softcap may be None
    label_smoothing, z_loss       as in `TokenSettings`
    counts_K                      float32: what each target's loss counts in the gradients, at most 1; None: 1
    needs                         which `Gradients` are asked for
    """

    hidden_KD: torch.Tensor
    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    ids_K: torch.Tensor
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    counts_K: torch.Tensor | None = None
    needs: tuple[bool, bool, bool] = (False, False, False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelAnswer:
    """``losses_K`` float32, whatever they count; ``predicted_K`` int64, the first of equals; gradients that are needed,
    of the sum of ``counts x loss``, in the types of the task."""

    losses_K: torch.Tensor
    predicted_K: torch.Tensor
    gradients: Gradients


class LossKernel(Protocol):
    """A kernel. ``name``: the library and its version, for the run's log."""

    @property
    def name(self) -> str: ...

    def __call__(self, task: KernelTask) -> KernelAnswer:
        """Raises what its library raises: a kernel is tried (`training.losses.objective`) before it is used."""
        ...


class LigerKernel:
    """Liger's fused linear cross-entropy (arXiv:2410.10989): in chunks too, with one kernel from logits to gradient.

    It knows what each target counts before it sums the weight's gradient, so one pass does for any weights. In 16 bits
    that gradient is summed in float32 and rounded once, where `head` leaves a float32 weight's as it is.
    """

    def __init__(self) -> None:
        """Raises `ImportError` where the package or Triton is not installed, or has no such function."""
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
        from triton.errors import TritonError

        self._refusal: type[Exception] = TritonError
        self.name = f"liger-kernel {metadata.version('liger-kernel')}"
        self._forward: Callable[..., Any] = fused_linear_cross_entropy_forward

    def __call__(self, task: KernelTask) -> KernelAnswer:
        """See `LossKernel`."""
        try:
            losses_K, predicted_K, gradients = self._run(task)
        except self._refusal as error:
            raise RuntimeError(f"{self.name}: {error}") from error
        hidden_KD, weight_VD, bias_V = (
            gradient if is_needed else None for gradient, is_needed in zip(gradients, task.needs, strict=True)
        )
        return KernelAnswer(losses_K=losses_K, predicted_K=predicted_K, gradients=(hidden_KD, weight_VD, bias_V))

    def _run(self, task: KernelTask) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        # all operands have the type of the computation already
        with torch.no_grad(), torch.autocast(task.hidden_KD.device.type, enabled=False):
            losses_K, _, _, predicted_K, *gradients = self._forward(
                task.hidden_KD,
                task.weight_VD,
                task.ids_K,
                bias=task.bias_V,
                softcap=task.softcap,
                label_smoothing=task.label_smoothing,
                lse_square_scale=task.z_loss,
                reduction="none",
                return_predicted_tokens=True,
                accum_dtype=torch.float32,
                token_grad_output=task.counts_K,
                compute_gradients=any(task.needs),
                weight_requires_grad=task.needs[1],
            )
        return losses_K, predicted_K, gradients


def liger_is_installed() -> bool:
    """Whether the package is there; it is imported by a run that uses it, which takes seconds."""
    return importlib.util.find_spec("liger_kernel") is not None


def runs_on(device: torch.device) -> bool:
    """Whether kernels of Triton run on a device: a GPU, or a CPU under Triton's interpreter (``TRITON_INTERPRET=1``),
    which is slow and for tests."""
    if device.type != "cpu" or importlib.util.find_spec("triton") is None:
        return device.type == "cuda"
    from triton import knobs

    return bool(knobs.runtime.interpret)


# ---- Chunks

CHUNK_ELEMENTS = 2**24  # 64 MiB of float32: at 150k vocabulary 110 rows, enough for the products' full speed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """Hidden states to logits: ``softcap x tanh(scale x (hidden @ weight.T + bias) / softcap)``, or without the cap.

    weight_VD  of the output layer; it may be the input embedding too
    bias_V     or None
    scale      multiplies the logits before the cap (Cohere's ``logit_scale``, 1 / Granite's ``logits_scaling``)
    softcap    Gemma's ``final_logit_softcapping``
    kernel     computes what it can of the head's losses (`LossKernel`); None: chunks do
    """

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    kernel: LossKernel | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the products: autocast's where it is on, else the weight's. Their sums are at least float32."""
        device = self.weight_VD.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight_VD.dtype


AnyHead = Head | Callable[[torch.Tensor], torch.Tensor]
"""A `Head`, or any function hidden_CD -> logits_CV (an adapter on the head): slower, as autograd finds the way back."""


def tempered(head: AnyHead, temperature: float) -> AnyHead:
    """The head with its logits divided by ``temperature``."""
    if temperature == 1:
        return head
    if not isinstance(head, Head):
        return lambda hidden_CD: head(hidden_CD) / temperature
    # softcap x tanh(scale x / softcap) / t = (softcap / t) x tanh((scale / t) x / (softcap / t))
    softcap = None if head.softcap is None else head.softcap / temperature
    return replace(head, scale=head.scale / temperature, softcap=softcap, kernel=None)


class ChunkedHead:
    """A head at work on K rows: logits chunk by chunk, and the gradients back through it.

    Each ``logits`` overwrites what the last one gave.
    """

    def __init__(self, head: Head, hidden_KD: torch.Tensor, *, dtype: torch.dtype) -> None:
        self.hidden_KD = hidden_KD.detach().to(dtype)
        self.weight_VD = head.weight_VD.detach().to(dtype)
        self.exact = torch.promote_types(dtype, torch.float32)
        self.bias_V = None if head.bias_V is None else head.bias_V.detach().to(self.exact)
        self.head = head
        num_rows = min(len(hidden_KD), _rows_of_chunk(len(self.weight_VD)))
        self.buffer_CV = hidden_KD.new_empty(num_rows, len(self.weight_VD), dtype=self.exact)

    def chunks(self) -> Iterator[slice]:
        """The rows, as slices."""
        return chunks_of(len(self.hidden_KD), len(self.weight_VD))

    def logits(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """logits_CV in float32 at least, and with a softcap ``d logits / d (scale x product)``, else None."""
        hidden_CD = self.hidden_KD[rows]
        logits_CV = self.buffer_CV[: len(hidden_CD)]
        if hidden_CD.dtype == self.exact:
            torch.mm(hidden_CD, self.weight_VD.T, out=logits_CV)
        else:
            logits_CV.copy_(hidden_CD @ self.weight_VD.T)
        if self.bias_V is not None:
            logits_CV += self.bias_V
        if self.head.scale != 1.0:
            logits_CV *= self.head.scale
        cap = self.head.softcap
        if cap is None:
            return logits_CV, None
        logits_CV.div_(cap).tanh_()
        slope_CV = 1 - logits_CV.square()
        return logits_CV.mul_(cap), slope_CV


def hand_over_(ctx: Any, factor: torch.Tensor) -> Gradients:
    """What the forward pass of a sum left in ``ctx.gradients``, times ``factor``; `RuntimeError` if it is gone."""
    if ctx.gradients is None:
        raise RuntimeError("the gradient of a loss sum can be asked for once: compute the loss again")
    gradients, ctx.gradients = ctx.gradients, None
    return scaled_(gradients, factor)


def scaled_(gradients: Gradients, factor: torch.Tensor) -> Gradients:
    """In place: a second copy of a 150k vocabulary's gradient would be the largest tensor of the step."""
    of_hidden, of_weight, of_bias = (None if gradient is None else gradient.mul_(factor) for gradient in gradients)
    return of_hidden, of_weight, of_bias


class HeadGradients:
    """Gradients of a head's inputs, summed over chunks in float32 at least; ``needs``: of which of the three."""

    def __init__(self, work: ChunkedHead, hidden_KD: torch.Tensor, needs: tuple[bool, bool, bool]) -> None:
        self._work = work
        weight_VD, bias_V = work.head.weight_VD, work.head.bias_V
        self._hidden_KD = torch.empty_like(hidden_KD) if needs[0] else None
        self._weight_VD = torch.zeros_like(weight_VD, dtype=work.exact) if needs[1] else None
        self._bias_V = torch.zeros_like(bias_V, dtype=work.exact) if needs[2] and bias_V is not None else None

    def add(self, rows: slice, grad_CV: torch.Tensor, slope_CV: torch.Tensor | None) -> None:
        """Take in the gradient of a chunk's logits, which is overwritten."""
        if slope_CV is not None:
            grad_CV *= slope_CV
        if self._work.head.scale != 1.0:
            grad_CV *= self._work.head.scale
        if self._bias_V is not None:
            self._bias_V += grad_CV.sum(dim=0)
        hidden_CD, weight_VD = self._work.hidden_KD[rows], self._work.weight_VD
        product_CV = grad_CV.to(weight_VD.dtype)
        if self._hidden_KD is not None:
            self._hidden_KD[rows] = product_CV @ weight_VD
        if self._weight_VD is not None and product_CV is grad_CV:
            self._weight_VD.addmm_(product_CV.T, hidden_CD)
        elif self._weight_VD is not None:
            self._weight_VD += product_CV.T @ hidden_CD

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of hidden_KD, weight_VD and bias_V, in their types; None where nobody needs one."""
        head = self._work.head
        weight_VD = None if self._weight_VD is None else self._weight_VD.to(head.weight_VD.dtype)
        bias_V = None if self._bias_V is None or head.bias_V is None else self._bias_V.to(head.bias_V.dtype)
        return self._hidden_KD, weight_VD, bias_V


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The softmax of a chunk's logits as ``numerators / sums``, and what is known of the ids it should give.

    numerators_CV  exp(logits - the row's largest)
    sums_C         their sums
    lse_C          log of the sum of exp(logits)
    logps_C        log-probabilities of the ids
    correct_C      bool: the logits rank the id first
    """

    numerators_CV: torch.Tensor
    sums_C: torch.Tensor
    lse_C: torch.Tensor
    logps_C: torch.Tensor
    correct_C: torch.Tensor

    def entropy(self) -> torch.Tensor:
        """Entropy of each row in nats, [C]."""
        # -sum p log p with p = e/s:  log s + sum(-e log e) / s
        # torch.special.entr takes a CPU half as long again; of e = 0 the log is a number here, and e log e is 0
        smallest = torch.finfo(self.numerators_CV.dtype).tiny
        terms_CV = self.numerators_CV.clamp(min=smallest).log_().mul_(self.numerators_CV)
        return self.sums_C.log() - terms_CV.sum(dim=1) / self.sums_C


def softmax_(logits_CV: torch.Tensor, ids_C: torch.Tensor) -> Softmax:
    """The softmax, in the logits' own memory."""
    ids_C1 = ids_C[:, None]
    target_C1 = logits_CV.gather(1, ids_C1)
    # The largest of all but the id itself says both whether the id ranks first and what to subtract: one pass, where
    # argmax costs a CPU seven.
    logits_CV.scatter_(1, ids_C1, -torch.inf)
    others_C1 = logits_CV.amax(dim=1, keepdim=True)
    logits_CV.scatter_(1, ids_C1, target_C1)
    correct_C = (target_C1 > others_C1).squeeze(1)
    tied = torch.nonzero((target_C1 == others_C1).squeeze(1)).squeeze(1)
    if len(tied):  # the first of equals is the one that greedy decoding takes
        correct_C[tied] = logits_CV[tied].argmax(dim=1) == ids_C[tied]
    largest_C1 = torch.maximum(others_C1, target_C1)
    logits_CV.sub_(largest_C1).exp_()
    sums_C1 = logits_CV.sum(dim=1, keepdim=True)
    log_sums_C1 = sums_C1.log()
    return Softmax(
        logits_CV,
        sums_C1.squeeze(1),
        (largest_C1 + log_sums_C1).squeeze(1),
        (target_C1 - largest_C1 - log_sums_C1).squeeze(1),
        correct_C,
    )


def chunks_of(num_rows: int, vocabulary: int) -> Iterator[slice]:
    """``(5, V)`` with room for two rows in a chunk -> 0:2, 2:4, 4:5."""
    size = _rows_of_chunk(vocabulary)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _rows_of_chunk(vocabulary: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocabulary)
