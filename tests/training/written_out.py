"""Losses written out from their papers in plain torch, and what a step of a run comes to by them.

Nothing of the product takes part but its rows: each answer goes through the model alone, unpadded, in float64, by
transformers' eager attention and whole logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import logsigmoid

from luthier.records import Batch, Sample, Segment
from luthier.training.trainer import Trainer

Numbers = Mapping[str, float]


@dataclass
class Step:
    """What a run's step was asked to do, and what it made of it before the update."""

    batches: list[Batch]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Grows by one with every step of every run."""
    taken: list[Step] = []
    real_read, real_update = Trainer.read_step, Trainer.update

    def read_step(self: Trainer, steps: Iterator[list[Batch]]) -> list[Batch]:
        found = real_read(self, steps)
        taken.append(Step(batches=found))
        return found

    def update(self: Trainer, number: int = 0) -> None:
        plain: Any = self.model
        parameters = dict(plain.named_parameters())
        taken[-1].weights = {name: value.detach().clone() for name, value in plain.state_dict().items()}
        taken[-1].gradients = {name: value.grad.clone() for name, value in parameters.items() if value.grad is not None}
        real_update(self, number)

    monkeypatch.setattr(Trainer, "read_step", read_step)
    monkeypatch.setattr(Trainer, "update", update)
    return taken


def gradient_error(found: Mapping[str, torch.Tensor], model: nn.Module) -> float:
    """Norm of the difference over the norm of what ``model`` got."""
    expected = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert set(found) == set(expected)
    difference = sum(float((found[name] - gradient).square().sum()) for name, gradient in expected.items())
    return math.sqrt(difference / sum(float(gradient.square().sum()) for gradient in expected.values()))


# -------------------------------------------------------------------------------------------------- single answers


def target_logits(model: Any, ids: NDArray[np.int32], target: NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the targets, [n], and the logits that they are predicted by, [n, V]."""
    places = np.flatnonzero(target)
    ids_T = torch.from_numpy(ids.astype(np.int64))
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].double()
    return ids_T[places], logits_TV[places - 1]


def answer_logps(model: Any, segment: Segment) -> torch.Tensor:
    """float64[n]"""
    ids_N, logits_NV = target_logits(model, segment.input_ids, segment.target)
    return logits_NV.log_softmax(dim=1).gather(1, ids_N[:, None]).squeeze(1)


def mean_weight(segment: Segment) -> float:
    return 1.0 if segment.weight is None else float(segment.weight[segment.target].mean())


# ---------------------------------------------------------------------------------------------------------- tokens


def token_loss(name: str, numbers: Numbers, model: Any, reference: Any, rows: Sequence[Sample]) -> torch.Tensor:
    """Per target of all rows: cross-entropy, DFT, EAFT or ASFT with label smoothing and z-loss."""
    total, count, smoothing = torch.zeros(()).double(), 0, numbers["label_smoothing"]
    for segment in (segment for row in rows for segment in row.segments()):
        ids_N, logits_NV = target_logits(model, segment.input_ids, segment.target)
        all_NV = logits_NV.log_softmax(dim=1)
        logps_N = all_NV.gather(1, ids_N[:, None]).squeeze(1)
        losses_N = -(1 - smoothing) * logps_N - smoothing * all_NV.mean(dim=1)
        if name in ("dft", "asft"):
            losses_N = logps_N.detach().exp() * losses_N
        if name == "eaft":
            top_N20 = logits_NV.detach().topk(20, dim=1).values.log_softmax(dim=1)
            losses_N = (-(top_N20.exp() * top_N20).sum(dim=1) / 3) ** numbers["eaft_alpha"] * losses_N
        if name == "asft":
            with torch.no_grad():
                other_NV = target_logits(reference, segment.input_ids, segment.target)[1].log_softmax(dim=1)
            losses_N = losses_N + numbers["asft_alpha"] * (other_NV.exp() * (other_NV - all_NV)).sum(dim=1)
        losses_N = losses_N + numbers["z_loss"] * logits_NV.logsumexp(dim=1) ** 2
        weights_N = (
            torch.ones(len(losses_N)) if segment.weight is None else torch.tensor(segment.weight[segment.target])
        )
        total, count = total + (weights_N.double() * losses_N).sum(), count + len(losses_N)
    return total / count


# ----------------------------------------------------------------------------------------------------------- pairs


@dataclass
class Pairs:
    """Log-probabilities of answers, float64[P]: of the policy ``c`` and ``d``, log-ratios ``rc`` and ``rd``; lengths.
    ``nll`` is the chosen answer's cross-entropy, ``wpo`` the logs of both answers' weights in WPO, ``delta`` the mean
    reward of the steps before."""

    c: torch.Tensor
    d: torch.Tensor
    rc: torch.Tensor
    rd: torch.Tensor
    len_c: torch.Tensor
    len_d: torch.Tensor
    nll: torch.Tensor
    wpo: torch.Tensor
    weights: torch.Tensor
    delta: float = 0.0


def pairs_of(model: Any, reference: Any, rows: Sequence[Sample], *, ld_alpha: float = 1.0) -> Pairs:
    columns: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("c", "d", "rc", "rd", "len_c", "len_d", "nll", "wpo", "w")
    }
    for row in rows:
        chosen, rejected = row.segments()
        policy = [answer_logps(model, segment) for segment in (chosen, rejected)]
        with torch.no_grad():
            asked = [answer_logps(reference, each) if reference else 0.0 for each in (chosen, rejected)]
        shorter = min(map(len, policy))
        counts = [torch.where(torch.arange(len(each)) < shorter, 1.0, ld_alpha).double() for each in policy]
        for side, logps_N, ref_N, counts_N in zip("cd", policy, asked, counts, strict=True):
            columns[side].append((logps_N * counts_N).sum())
            columns[f"r{side}"].append(((logps_N - ref_N) * counts_N).sum())
            columns[f"len_{side}"].append(torch.tensor(len(logps_N)).double())
        columns["nll"].append(-policy[0].sum())
        columns["wpo"].append(_likeness(model, chosen) + _likeness(model, rejected))
        columns["w"].append(torch.tensor(mean_weight(chosen)).double())
    made = {name: torch.stack(values) for name, values in columns.items()}
    return Pairs(**{name: values for name, values in made.items() if name != "w"}, weights=made["w"])


def _likeness(model: Any, segment: Segment) -> torch.Tensor:
    """Mean over the targets of ``log p - log sum q^2``."""
    with torch.no_grad():
        _, logits_NV = target_logits(model, segment.input_ids, segment.target)
        squares_N = logits_NV.softmax(dim=1).square().sum(dim=1)
        return (answer_logps(model, segment) - squares_N.log()).mean()


def pair_losses(name: str, n: Numbers, p: Pairs) -> torch.Tensor:
    """float64[P], as the papers have them; ``n``: the loss's numbers by their names."""
    beta, smoothing = n["beta"], n.get("label_smoothing", 0.0)
    good, bad = beta * p.rc, beta * p.rd

    def smoothed(x: torch.Tensor) -> torch.Tensor:
        return -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)

    def dpo_by(slope: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return smoothed(beta * (slope(p.rc) - slope(p.rd)))

    def without_reference(reward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return smoothed(beta * (reward(p.c / p.len_c) - reward(p.d / p.len_d)) - n.get("gamma", 0.0))

    def odds(logp: torch.Tensor) -> torch.Tensor:
        return logp.exp() / (1 - logp.exp())

    formulas: dict[str, Callable[[], torch.Tensor]] = {
        "sigmoid": lambda: smoothed(good - bad),
        "hinge": lambda: (1 - good + bad).clamp(min=0),
        "ipo": lambda: (p.rc / p.len_c - p.rd / p.len_d - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: smoothed(good / p.len_c - bad / p.len_d),
        "robust": lambda: (
            (-(1 - smoothing) * logsigmoid(good - bad) + smoothing * logsigmoid(bad - good)) / (1 - 2 * smoothing)
        ),
        "exo_pair": lambda: (
            torch.sigmoid(good - bad) * (logsigmoid(good - bad) - math.log(1 - smoothing))
            + torch.sigmoid(bad - good) * (logsigmoid(bad - good) - math.log(smoothing))
        ),
        "nca_pair": lambda: -logsigmoid(good) - (logsigmoid(-good) + logsigmoid(-bad)) / 2,
        "bco_pair": lambda: -logsigmoid(good - p.delta) - logsigmoid(p.delta - bad),
        "mpo": lambda: (
            -(1 - n["bco_share"]) * logsigmoid(good - bad)
            - n["bco_share"] * (logsigmoid(good - p.delta) + logsigmoid(p.delta - bad))
        ),
        "wpo": lambda: p.wpo.exp() * smoothed(good - bad),
        "sppo_hard": lambda: (p.rc - 0.5 / beta) ** 2 + (p.rd + 0.5 / beta) ** 2,
        "aot": lambda: smoothed(beta * ((p.c - p.d).sort().values - (p.c - p.rc - p.d + p.rd).sort().values)),
        "aot_unpaired": lambda: smoothed(beta * (p.rc.sort().values - p.rd.sort().values)),
        "discopop": lambda: (
            -logsigmoid(good - bad) * (1 - torch.sigmoid((good - bad) / n["discopop_tau"]))
            + (bad - good).exp() * torch.sigmoid((good - bad) / n["discopop_tau"])
        ),
        "apo_zero": lambda: 1 - torch.sigmoid(good) + torch.sigmoid(bad),
        "apo_down": lambda: torch.sigmoid(good) + 1 - torch.sigmoid(good - bad),
        "forward_kl": lambda: dpo_by(lambda r: 1 - 1 / r.exp()),
        "js_divergence": lambda: dpo_by(lambda r: (2 * r.exp() / (1 + r.exp())).log()),
        "alpha_divergence": lambda: dpo_by(
            lambda r: (r.exp() ** (n["divergence_alpha"] - 1) - 1) / (n["divergence_alpha"] - 1)
        ),
        "kto_pair": lambda: (
            (1 - torch.sigmoid(good - beta * p.rd.mean().clamp(min=0).detach()))
            + (1 - torch.sigmoid(beta * p.rc.mean().clamp(min=0).detach() - bad))
        ) / 2,
        "simpo": lambda: without_reference(lambda logp: logp),
        "alphapo": lambda: without_reference(
            lambda logp: (1 - logp.exp() ** -n["alphapo_alpha"]) / n["alphapo_alpha"]
        ),
        "orpo": lambda: -beta * logsigmoid((odds(p.c / p.len_c) / odds(p.d / p.len_d)).log()),
        "cpo": lambda: smoothed(beta * (p.c - p.d)),
    }  # fmt: skip
    return formulas[name]() + n["sft_weight"] * p.nll / p.len_c


# -------------------------------------------------------------------------------------------------------- verdicts


def strangers(step: Step, rows: Sequence[Sample]) -> Iterator[Segment]:
    """The answers under foreign prompts that a step's KL is estimated on, found in its batches by what they hold."""
    firsts = {tuple(row.segments()[0].input_ids): row.branches[0].length for row in rows}
    for batch in step.batches:
        held = list(_segments(batch))
        for unit in batch.units:
            own, foreign = (held[number] for number in unit.segments)
            prompt = firsts[tuple(own)]
            assert tuple(own[:prompt]) == tuple(foreign[:prompt]) and tuple(own) != tuple(foreign)
            yield Segment(input_ids=foreign, target=np.arange(len(foreign)) >= prompt)


def _segments(batch: Batch) -> Iterator[NDArray[np.int32]]:
    ids_BT = batch.model_inputs["input_ids"].numpy().astype(np.int32)
    for row, branches in enumerate(batch.branches):
        ends = np.cumsum([branch.length for branch in branches])
        parts = [ids_BT[row, end - branch.length : end] for end, branch in zip(ends, branches, strict=True)]
        parents = {branch.parent for branch in branches}
        for leaf in sorted(set(range(len(branches))) - parents):
            path = [parts[leaf]]
            while (leaf := branches[leaf].parent) >= 0:
                path.insert(0, parts[leaf])
            yield np.concatenate(path)


def verdict_losses(name: str, n: Numbers, ratios: torch.Tensor, good: torch.Tensor, baseline: float) -> torch.Tensor:
    """float64[R] of rows with a verdict; ``baseline``: KTO's KL, or BCO's delta."""
    beta = n["beta"]
    formulas: dict[str, Callable[[], torch.Tensor]] = {
        "kto": lambda: torch.where(
            good, 1 - torch.sigmoid(beta * (ratios - baseline)), 1 - torch.sigmoid(beta * (baseline - ratios))
        ),
        "apo_zero_unpaired": lambda: torch.where(good, 1 - torch.sigmoid(beta * ratios), torch.sigmoid(beta * ratios)),
        "bco": lambda: -torch.where(good, logsigmoid(beta * ratios - baseline), logsigmoid(baseline - beta * ratios)),
    }
    return formulas[name]() * torch.where(good, n["desirable_weight"], n["undesirable_weight"])
