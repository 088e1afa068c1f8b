"""A look at the real model before a packed run: may one segment of a row change what is computed for the next?"""

from __future__ import annotations

from dataclasses import replace

import torch
from peft import PeftModel
from torch import nn

from luthier.collation import CollateSettings, collate_packs
from luthier.errors import ModelError
from luthier.records import Pack, Segment
from luthier.train.streams import Segments

TOKENS_TRIED = 24  # of each segment: enough for any attention to reach across
TOLERANCE = 1e-4  # of the largest logit; the same kernels run on the same shapes, so isolated logits do not move at all


def check_isolation(model: nn.Module, segments: Segments, how: CollateSettings, *, device: torch.device) -> None:
    """Pack two segments, change the first, and look at the second's logits.

    Some architectures ignore what keeps segments apart (restarting positions): recurrent layers carry their state on,
    and a few models build their attention mask without positions. Raises `ModelError` for those, by name.
    """
    first, second = _cut(segments[0]), _cut(segments[len(segments) - 1])
    changed = replace(first, input_ids=first.input_ids[::-1] // 2)
    training = model.training
    model.eval()
    with torch.no_grad():
        one, other = (_logits(model, head, second, how, device) for head in (first, changed))
    model.train(training)
    moved = float((one - other).abs().max())
    scale = float(one.abs().max())
    if moved > TOLERANCE * scale:
        plain = model.get_base_model() if isinstance(model, PeftModel) else model
        raise ModelError(
            f"{type(plain).__name__} does not keep packed sequences apart: changing one moved the logits of the next "
            f"in its row by {moved:.2g} (largest logit {scale:.2g})",
            hint="set train.packing: none",
        )


def _cut(segment: Segment) -> Segment:
    """The segment's first tokens, nothing to learn in them."""
    ids = segment.input_ids[:TOKENS_TRIED]
    return Segment(input_ids=ids, target=segment.target[:TOKENS_TRIED] & False, address=segment.address)


def _logits(
    model: nn.Module, first: Segment, second: Segment, how: CollateSettings, device: torch.device
) -> torch.Tensor:
    """[T, V] of the second segment, packed behind the first."""
    batch = collate_packs(
        [Pack(segments=(first, second))], packed=True, pad_token_id=how.pad_token_id, varlen=how.varlen
    )
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.model_inputs.items()}
    logits: torch.Tensor = model(**inputs).logits
    return logits[0, len(first) :].float()
