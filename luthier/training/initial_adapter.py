"""The first values of an adapter that come from the run's own rows: EVA (arXiv:2410.07170)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import count

import torch
from peft import PeftModel, initialize_lora_eva_weights
from torch import nn

from luthier.collation import CollateSettings, MediaInputs
from luthier.collation.collator import collate_packs
from luthier.errors import ModelError
from luthier.models.passes import ModelPass, casting
from luthier.models.routers import times_shown
from luthier.packing import Segments
from luthier.records import Batch, Pack

ROWS, ROWS_OF_BATCH = 64, 8
MOST_PASSES = 20  # over these rows, until the directions stay the same


def begin_by_activations(
    model: PeftModel, forward: ModelPass, train: Segments, how: CollateSettings, media: MediaInputs | None
) -> None:
    """Let each matrix A begin with the directions in which the inputs of its layer vary most, over the first rows of
    the run; padding counts nowhere. B begins with 0, so the model computes what it did.

    Raises `ModelError` where the rows are too few for the rank, or the directions do not settle.
    """
    settings = model.peft_config["default"]
    batches = [forward.isolation.arranged(each, pad_token_id=how.pad_token_id) for each in _first(train, how, media)]
    fewest = min((int((times_shown(batch) > 0).sum()) for batch in batches), default=0)
    if fewest < settings.r:
        raise ModelError(
            f"adapter.init_lora_weights is eva, and {ROWS_OF_BATCH} rows have {fewest} tokens, fewer than adapter.r, "
            f"{settings.r}",
            hint="set adapter.init_lora_weights: true, or a lower rank",
        )
    calls = count(1)

    def compute(network: nn.Module, batch: Batch) -> None:
        if next(calls) > MOST_PASSES * len(batches):
            what = f"its directions have not settled in {MOST_PASSES} passes over {ROWS} rows"
            raise ModelError(
                f"adapter.init_lora_weights is eva, and {what}", hint="set adapter.init_lora_weights: true"
            )
        with torch.no_grad(), casting(forward.device, forward.autocast):
            network(**forward.isolation.inputs(batch, device=forward.device))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a batch of ours cannot be moved by PEFT, for one; we move it
        initialize_lora_eva_weights(
            model,
            batches,
            forward_fn=compute,
            prepare_model_inputs_fn=lambda batch, _: times_shown(batch).to(forward.device) > 0,
            prepare_layer_inputs_fn=_shown,
            gather_distributed_inputs=False,
            show_progress_bar=False,
        )
    settings.init_lora_weights, settings.eva_config = True, None  # to those who load it, it is a LoRA like any other


def _first(train: Segments, how: CollateSettings, media: MediaInputs | None) -> list[Batch]:
    rows = [train[number] for number in range(min(ROWS, len(train)))]
    packs = [Pack(segments=(row,)) for row in rows]
    size = min(ROWS_OF_BATCH, len(packs))
    # the last ones, if they are too few for a batch, are left out
    return [
        collate_packs(
            packs[begin : begin + size],
            packed=how.packed,
            pad_token_id=how.pad_token_id,
            varlen=how.varlen,
            media=media,
        )
        for begin in range(0, len(packs) - size + 1, size or 1)
    ]


def _shown(layer_input: Sequence[torch.Tensor] | torch.Tensor, shown_N: torch.Tensor, _: str) -> torch.Tensor:
    inputs = layer_input if isinstance(layer_input, torch.Tensor) else layer_input[0]
    inputs_ND = inputs.reshape(-1, inputs.shape[-1])
    return (inputs_ND[shown_N] if len(inputs_ND) == len(shown_N) else inputs_ND).float()
