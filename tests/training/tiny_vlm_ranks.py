"""One of two ranks that train a model that sees, one on words alone: ``python tiny_vlm_ranks.py FOLDER NAME MODE…``.

With each mode, ``averaged`` or ``ddp``, it takes two steps and saves its gradients of the second in
``FOLDER/MODE-RANK.pt``, and of a step of words alone, on both ranks, in ``FOLDER/MODE-words-RANK.pt``. With ``run`` it
trains as ``FOLDER/run.json`` says. It ends with the first mode that fails.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

import torch
from tiny_vlms import TEXT, packed_batch, seen, tiny_vlm
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import luthier
from luthier.config.choices import ModelPart
from luthier.config.schema import AdapterConfig
from luthier.models import sharding
from luthier.models.adapters import apply_adapter
from luthier.models.isolation import ChosenIsolation
from luthier.models.mixers import Isolation
from luthier.models.passes import ModelPass, find_head
from luthier.records import Batch

ALL = AdapterConfig(train_parts=list(ModelPart))


def rank_batch(name: str, rank: int) -> Batch:
    """Of rank 0 with pictures, of rank 1 without."""
    return packed_batch(name, [seen(name, 4, 6, seed=rank, image=rank == 0), seen(name, 7, 3, seed=9, image=rank == 0)])


def trained_vlm(name: str) -> tuple[torch.nn.Module, ModelPass]:
    """All of its parts are trained."""
    model = tiny_vlm(name)
    apply_adapter(model, ALL)
    isolation = ChosenIsolation(isolation=Isolation.POSITIONS, attention="sdpa", windows={})
    forward = ModelPass(
        isolation=isolation, head=find_head(model), device=torch.device("cpu"), pad_token_id=TEXT["pad_token_id"]
    )
    return model, forward


def loss_of(model: torch.nn.Module, forward: ModelPass, batch: Batch) -> torch.Tensor:
    scored, _ = forward.token_scores(model, batch)
    return -scored.scores.logps_K.sum() + scored.anchor


def _rank(folder: Path, name: str, mode: str, rank: int) -> None:
    store = distributed.FileStore(str(folder / f"{mode}.store"), 2)
    timeout = datetime.timedelta(minutes=10)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    model, forward = trained_vlm(name)
    wrapped = DistributedDataParallel(model) if mode == "ddp" else model
    if mode == "averaged":
        model.get_input_embeddings().weight.data *= 1 - rank  # another start on rank 1, which is not to stay
        assert sharding.begin_alike(model)
    for batches in [(0, 1), (0, 1), (1, 1)]:
        model.zero_grad()
        loss_of(wrapped, forward, rank_batch(name, batches[rank])).backward()
        if mode == "averaged":
            sharding.average_gradients(model)
        found = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
        torch.save(found, folder / f"{mode}-{'words-' if batches[0] else ''}{rank}.pt")
    distributed.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    folder, name, *modes = sys.argv[1:]
    for mode in modes:
        if mode == "run":
            luthier.train(json.loads(Path(folder, "run.json").read_text()))
            distributed.destroy_process_group()
            continue
        _rank(Path(folder), name, mode, int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
