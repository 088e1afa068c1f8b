"""Trees of turns on every kind of model: scores and gradients of their targets are those of each sequence alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import MODELS, VOCABULARY, tiny_model, tree
from tiny_recurrent import RECURRENT_MODELS, recurrent_model
from tiny_vlms import IMAGE, SOUND, VIDEO, VLMS, Seen, seen, tiny_vlm, with_media
from torch import nn

from luthier.collation import CollateSettings
from luthier.collation.collator import collate_trees
from luthier.layout import tree_of_runs
from luthier.layout.position_schemes import token_types
from luthier.models.isolation import choose_isolation
from luthier.models.passes import find_head, score_targets
from luthier.objectives.token_scores import token_scores
from luthier.records import Batch, Branch, Sample, Segment

CPU = torch.device("cpu")
HOW = CollateSettings(packed=True, pad_token_id=0)
WORDS = [segment for seed in (1, 2) for segment in tree(2, 30, seed=seed).segments()]
Gradients = dict[str, torch.Tensor]


def deep_tree(seed: int, *, turns: int) -> Sample:
    """Branches off branches: each turn has an answer of its own, every third one two, and some of these go on again."""
    rng = np.random.default_rng(seed)
    branches = [(-1, 4, False)]
    trunk = 0
    for turn in range(turns):
        branches.append((trunk, int(rng.integers(1, 6)), True))
        branches.append((trunk, int(rng.integers(1, 6)), False))
        trunk = len(branches) - 1
        if turn % 3 == 2:
            branches += [(trunk, 2, False), (len(branches), 3, True), (len(branches), 1, True)]
    branches += [(trunk, 3, True), (trunk, 2, True)]
    total = sum(length for _, length, _ in branches)
    return Sample(
        input_ids=rng.integers(3, VOCABULARY, total).astype(np.int32),
        target=np.concatenate([np.full(length, learned) for _, length, learned in branches]),
        branches=tuple(Branch(parent=parent, length=length) for parent, length, _ in branches),
    )


def scores_of(model: nn.Module, inputs: dict[str, Any], batch: Batch) -> torch.Tensor:
    """float32[K], leaf after leaf, of each its targets."""
    targets = batch.targets
    found = score_targets(
        model,
        inputs,
        targets.positions_K,
        lambda hidden_KD, head: token_scores(hidden_KD, head, targets.ids_K).logps_K,
        head=find_head(model),
    ).scores
    return found[torch.argsort(targets.segments_K, stable=True)]


def alone(model: nn.Module, segment: Segment, more: dict[str, Any]) -> torch.Tensor:
    ids = torch.from_numpy(segment.input_ids.astype(np.int64))
    logits_TV = model(input_ids=ids[None], use_cache=False, **more).logits[0]
    places = torch.from_numpy(np.flatnonzero(segment.target))
    return logits_TV[places - 1].float().log_softmax(-1).gather(1, ids[places, None])[:, 0]


def gradients(model: nn.Module, scores_K: torch.Tensor) -> Gradients:
    """Of a loss that weighs every target differently, so that none could take another's place."""
    model.zero_grad()
    (scores_K * torch.linspace(0.5, 1.5, len(scores_K))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(found_K: torch.Tensor, right_K: torch.Tensor, found: Gradients, right: Gradients, *, close: float) -> None:
    torch.testing.assert_close(found_K, right_K, atol=close, rtol=close)
    assert found.keys() == right.keys()
    largest = max(float(grad.abs().max()) for grad in right.values())
    for name, grad in right.items():  # some are zero but for rounding
        allowed = close * max(float(grad.abs().max()), 1e-1 * largest)
        assert float((found[name] - grad).abs().max()) <= allowed, name


def trees() -> list[list[Sample]]:
    """Two rows; in one of them two trees, of which one has about fifty branches."""
    return [[deep_tree(1, turns=15), deep_tree(2, turns=1)], [deep_tree(3, turns=4)]]


@pytest.mark.parametrize("name", [*MODELS, "qwen3_next", "bamba", "lfm2"])
def test_deep_trees_have_the_scores_and_gradients_of_their_sequences_alone(name: str) -> None:
    is_recurrent = name in RECURRENT_MODELS and name not in MODELS
    make = recurrent_model if is_recurrent else tiny_model
    rows = trees()
    assert max(len(sample.branches) for row in rows for sample in row) >= 45
    segments = [segment for row in rows for sample in row for segment in sample.segments()]
    model = make(name)
    right_K = torch.cat([alone(model, segment, {}) for segment in segments])
    right = gradients(model, right_K)
    model = make(name)
    chosen = choose_isolation(model, WORDS, HOW, device=CPU, shared=True)
    assert chosen.shared
    batch = collate_trees(rows, pad_token_id=0)
    found_K = scores_of(model, chosen.inputs(batch, device=CPU), batch)
    found = gradients(model, found_K)
    check(found_K.detach(), right_K.detach(), found, right, close=1e-4 if is_recurrent else 1e-5)


def joined(name: str, *parts: Seen, learned: int) -> Seen:
    """The parts as one sequence, of which the last ``learned`` tokens are targets."""
    ids = np.concatenate([part.segment.input_ids for part in parts])
    seeing = [part.features for part in parts if part.features]
    features = {key: torch.cat([each[key] for each in seeing], VLMS[name].axis) for key in seeing[0]}
    target = np.arange(len(ids)) >= len(ids) - learned
    return Seen(segment=Segment(input_ids=ids, target=target), features=features)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "qwen3_5", "llava", "gemma3", "gemma4"])
def test_trees_with_pictures_in_several_branches_have_the_scores_and_gradients_of_their_sequences(name: str) -> None:
    first, second, third = (seen(name, before, 4, seed=seed) for before, seed in ((5, 1), (3, 2), (2, 3)))
    answers = [seen(name, 0, length, seed=10 + length, image=False) for length in (3, 5, 4, 2)]
    sizes = [len(each.segment) for each in answers]
    paths = [  # pictures: one; two, one of them in a branch; three; two
        joined(name, first, answers[0], learned=sizes[0]),
        joined(name, first, second, answers[1], learned=sizes[1]),
        joined(name, first, second, third, answers[2], learned=sizes[2]),
        joined(name, first, second, answers[3], learned=sizes[3]),
    ]
    one, two = len(first.segment), len(first.segment) + len(second.segment)
    sample = tree_of_runs([path.segment for path in paths], [0, one, two, two])
    batch = with_media(name, collate_trees([[sample]], pad_token_id=0), [first, second, third])

    model = tiny_vlm(name)
    scores = []
    for path in paths:
        more = dict(path.features)
        if VLMS[name].types is not None:
            types = token_types(path.segment.input_ids, image=[IMAGE], video=[VIDEO], audio=[SOUND])
            more[VLMS[name].types] = torch.from_numpy(types)[None]
        scores.append(alone(model, path.segment, more))
    right_K = torch.cat(scores)
    right = gradients(model, right_K)
    model = tiny_vlm(name)
    chosen = choose_isolation(model, WORDS, HOW, device=CPU, needs=VLMS[name].needs(), shared=True)
    assert chosen.shared
    found_K = scores_of(model, chosen.inputs(batch, device=CPU), batch)
    found = gradients(model, found_K)
    check(found_K.detach(), right_K.detach(), found, right, close=1e-4)
