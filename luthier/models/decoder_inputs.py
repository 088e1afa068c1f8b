"""Models whose decoder stands beside an encoder (Nemotron-Parse): called with batches like any other.

Batches call ids ``input_ids`` everywhere in this package. Such a model calls them ``decoder_input_ids``, and has no
positions: its forward is given what its family's row says (`Family.decoder_names`).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from transformers import PreTrainedModel

from luthier.models.parts import decoder_family


def name_decoder_inputs(model: PreTrainedModel) -> bool:
    """Let the model take the names of a batch, if its family says so; it takes its own as before."""
    if decoder_family(model.config) is None:
        return False
    # not a hook: what adapters wrap is called by its ``forward``, which runs none. Bound, so that a copy is the copy's
    model.forward = MethodType(_forward, model)
    return True


def _forward(model: PreTrainedModel, **inputs: Any) -> Any:
    family = decoder_family(model.config)
    assert family is not None
    given = {name: value for name, value in inputs.items() if value is not None}  # adapters fill in all they know
    return type(model).forward(model, **family.named(given))
