"""What a step draws of a run that learns from answers of its own (``objective: rl``)."""

from __future__ import annotations

from dataclasses import dataclass

from luthier.check.loaded import Loaded
from luthier.check.plan.estimate import computes_in_16_bits, shape_of_run
from luthier.config.objective import OBJECTIVES
from luthier.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawingPlan:
    """On all ``num_ranks`` devices together, where nothing else is said.

    prompts, answers  of a step, and of each prompt
    most_tokens       that are drawn, if no answer ends before ``rollout.max_new_tokens``
    longest_prompt    tokens of the longest prompt
    micro_batches     of a step on each device, at most
    cache_bytes       of keys and values of the answers that a device draws at once, at most; None: not known
    """

    prompts: int
    answers: int
    most_tokens: int
    longest_prompt: int
    micro_batches: int
    cache_bytes: int | None


def drawing_of(loaded: Loaded, *, num_ranks: int, device: str | None) -> DrawingPlan | None:
    """The plan of a run's drawing on a named ``device`` or the one that is here; None where it draws nothing. What its
    cache takes is not known of a model whose config cannot be read."""
    from luthier.models.model import run_device  # torch is loaded where it is needed

    config, index = loaded.config, loaded.train
    if not OBJECTIVES[config.objective.name].on_policy:
        return None
    on_gpu = device is not None or run_device(config) == "cuda"
    try:
        shape = shape_of_run(config, loaded.encoder.tokenizer)
    except ModelError:
        shape = None
    rollout, table = config.rollout, index.table()
    prompts, longest = rollout.prompts_per_step, int((table.lengths - table.num_targets).max())
    of_device, cache = -(-prompts // num_ranks), None
    if shape is not None:
        length = longest + rollout.max_new_tokens
        held = sum(min(length, length if window is None else window) for window in shape.windows)
        at_once = min(rollout.batch_size, of_device * rollout.answers * rollout.updates)
        cache = at_once * held * 2 * shape.keys * (2 if computes_in_16_bits(config, on_gpu=on_gpu) else 4)
    return DrawingPlan(
        prompts=prompts,
        answers=rollout.answers,
        most_tokens=prompts * rollout.answers * rollout.max_new_tokens,
        longest_prompt=longest,
        micro_batches=-(-of_device // config.train.per_device_train_batch_size),
        cache_bytes=cache,
    )
