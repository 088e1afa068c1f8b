"""What the objective of a run is made of, and the first rows that its models are tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import PreTrainedModel

from luthier.collation import CollateSettings, MediaInputs, collate_packs
from luthier.config.schema import RunConfig
from luthier.models.isolation import TOKENS_TRIED, ChosenIsolation
from luthier.models.model import LoadedModel
from luthier.models.submodules import decoder_family
from luthier.models.vocabulary import Vocabulary
from luthier.packing import Segments
from luthier.preparation.segments import SegmentIndex
from luthier.records import Pack
from luthier.training.streams import EvalStream


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveParts:
    """What the objective of a run is made of.

    model     the one that is trained, on its device, before anything wraps it
    train     its segments; ``held_out`` those of evaluation, if there are any
    passes    makes streams that go over each of these once, for what is computed beforehand
    needed    int64, ascending: which segments of each of these the run will read
    media     what makes features of media, of a multimodal model
    autocast  the type that training computes in; None: that of the weights
    shared    rows hold token trees whose branches share their beginnings
    """

    config: RunConfig
    model: PreTrainedModel | PeftModel
    loaded: LoadedModel
    vocabulary: Vocabulary
    how: CollateSettings
    device: torch.device
    train: Segments
    held_out: Segments | None
    passes: Callable[[SegmentIndex], EvalStream]
    needed: Callable[[SegmentIndex], NDArray[np.int64]]
    num_sources: tuple[int, int]
    media: MediaInputs | None = None
    autocast: torch.dtype | None = None
    shared: bool = False


def first_inputs(parts: ObjectiveParts, isolation: ChosenIsolation) -> dict[str, object]:
    """What a model is called with for the beginning of the first segment."""
    first = parts.train[0]
    # a decoder beside an encoder computes nothing without its picture, which is in front
    media = None if decoder_family(parts.loaded.model.config) is None else parts.media
    cut = replace(
        first,
        input_ids=first.input_ids[:TOKENS_TRIED],
        target=first.target[:TOKENS_TRIED],
        weight=None,
        media=first.media if media is not None else (),
    )
    batch = collate_packs(
        [Pack(segments=(cut,))],
        packed=parts.how.packed,
        pad_token_id=parts.how.pad_token_id,
        varlen=parts.how.varlen,
        media=media,
    )
    return isolation.inputs(isolation.arranged(batch, pad_token_id=parts.how.pad_token_id), device=parts.device)
