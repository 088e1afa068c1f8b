"""A rank that shares a model with another, for `test_train_fsdp`: ``python tiny_shards.py FOLDER JOBS``.

First it looks at a model that it holds a part of, and writes what it saw to ``FOLDER/seen-RANK.json``; then it does
``JOBS``, runs as `tiny_process` has them. The exit code is the largest of those of the runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tiny_models import tiny_model
from tiny_process import run_job
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from luthier.errors import ModelError
from luthier.models.passes import find_head, score_targets
from luthier.models.sharding import give_up_gathered, is_sharded, shard, undivided, whole_weights
from luthier.objectives import AnyHead
from luthier.objectives.hidden_loss import hidden_loss_sum
from luthier.objectives.token_scores import token_scores

CPU = torch.device("cpu")
IDS_2BT = torch.randint(3, 96, (2, 2, 10), generator=torch.Generator().manual_seed(0))
OTHERS = ("gemma3", "qwen3_moe", "gpt_oss")
TARGETS = {0: torch.arange(3, 15), 1: torch.arange(0)}  # the second rank has nothing to learn


def main() -> None:
    torch.set_num_threads(1)
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = int(os.environ["RANK"])
    PartialState(cpu=True)
    (folder / f"seen-{rank}.json").write_text(json.dumps(_look(rank)))
    raise SystemExit(max([run_job(job) for job in jobs], default=0))


def _look(rank: int) -> dict[str, Any]:
    model, alone = tiny_model("qwen3"), tiny_model("qwen3")
    shard(model, CPU)
    seen: dict[str, Any] = {
        "sharded": is_sharded(model) and not is_sharded(alone),
        "all": sum(p.numel() for p in alone.parameters()),
        "held": sum(p.to_local().numel() for p in model.parameters()),
        "refused": [_refusal(_towers()), _refusal(_frozen())],
    }
    for name, loss in (("token loss", _token_loss), ("scores", _scores)):
        own, expected = _gradients(model, [rank], loss), _gradients(alone, [0, 1], loss)
        seen[name] = _worst(own, expected)
        seen[f"{name} not averaged"] = _worst(own, {weight: 2 * gradient for weight, gradient in expected.items()})
    for name in OTHERS:
        other = tiny_model(name)
        expected = _gradients(other, [0, 1], _scores)
        shard(other, CPU)
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        seen[name] = _worst(_gradients(other, [rank], _scores), expected) / scale
    with torch.no_grad():
        model(input_ids=IDS_2BT[0])
    seen["held after a look"] = sum(not hasattr(p, "to_local") for p in model.parameters())
    give_up_gathered(model)
    seen["held again"] = sum(not hasattr(p, "to_local") for p in model.parameters())
    whole = whole_weights(model, keep=rank == 0)
    same = [torch.equal(whole[name], weight) for name, weight in alone.state_dict().items()] if whole else []
    seen["whole"] = [len(same), sum(same)]
    model.load_state_dict({name: weight + 1 for name, weight in alone.state_dict().items()})
    seen["loaded"] = all(torch.equal(undivided(p), alone.get_parameter(n) + 1) for n, p in model.named_parameters())
    return seen


def _gradients(model: nn.Module, ranks: list[int], loss: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean over two ranks of the gradients of the sums over their targets; of ``ranks`` only."""
    model.zero_grad()
    for rank in ranks:
        positions_K = TARGETS[rank]
        ids_K = IDS_2BT[rank].flatten().roll(-1)[positions_K]

        def score(hidden_KD: torch.Tensor, head: AnyHead, ids_K: torch.Tensor = ids_K) -> torch.Tensor:
            return loss(hidden_KD, head, ids_K)

        found = score_targets(model, {"input_ids": IDS_2BT[rank]}, positions_K, score, head=find_head(model))
        (found.scores + found.anchor).backward()
    divisor = 1 if is_sharded(model) else 2
    return {name: undivided(p.grad) / divisor for name, p in model.named_parameters() if p.grad is not None}


def _token_loss(hidden_KD: torch.Tensor, head: AnyHead, ids_K: torch.Tensor) -> torch.Tensor:
    return hidden_loss_sum(hidden_KD, head, ids_K).loss_sum


def _scores(hidden_KD: torch.Tensor, head: AnyHead, ids_K: torch.Tensor) -> torch.Tensor:
    return token_scores(hidden_KD, head, ids_K).logps_K.square().sum()


def _worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


def _refusal(model: Any) -> str:
    try:
        shard(model, CPU)
    except ModelError as error:
        return error.message
    return "none"


def _towers() -> nn.Module:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = {**sizes, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 96}
    config = Gemma3Config(text_config=text, vision_config={**sizes, "image_size": 28, "patch_size": 14})
    with torch.device("meta"):
        return Gemma3ForConditionalGeneration(config)


def _frozen() -> nn.Module:
    model = tiny_model("qwen3").requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)
    return model


if __name__ == "__main__":
    main()
