"""Tiny models of families that came later take the merged features: a picture means the same in company as alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from luthier.media.processors.calling import merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import ImageHeader
from tests.media.test_media_batching import decoded
from tests.media.test_media_families import picture
from tests.media.tiny_later_models import MAKERS
from tests.media.tiny_later_processors import LATER
from tests.media.tiny_processors import BUILDERS

ROWS = ([(60, 41)], [(30, 90), (84, 84)], [], [(120, 40)])
# The codes of its pictures are looked up, so no gradient goes further than to the words for them. Its encoder takes
# means over a picture with what fills it up, so that smaller pictures of a batch get other codes than alone.
LOOKED_UP = {"emu3"}


def inputs_of(media: MediaProcessor, rows: list[list[tuple[int, int]]]) -> tuple[list[int], dict[str, Any]]:
    """Lengths, and the rows padded on the right with their merged features."""
    ids, features = [], []
    for row in rows:
        strings = media.expand([ImageHeader(width=width, height=height) for width, height in row])
        text = "see " + " and ".join(strings) + " that"
        ids.append(torch.tensor(media.processor.tokenizer(text, add_special_tokens=False)["input_ids"]))
        pictures = [picture(*size, 10 * size[0] + place) for place, size in enumerate(row)]
        features.append(media.features(decoded(pictures)))
    shown = [torch.ones(len(one), dtype=torch.long) for one in ids]
    padded = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(shown, batch_first=True),
    }
    merged = {
        key: torch.from_numpy(np.ascontiguousarray(value))
        for key, value in merge_features(media.family, features).items()
    }
    return [len(one) for one in ids], {**padded, **merged}


def tiny(family: str) -> tuple[MediaProcessor, Any]:
    media = MediaProcessor.of({**BUILDERS, **LATER}[family]())
    torch.manual_seed(0)
    tokenizer = media.processor.tokenizer
    return media, MAKERS[family](tokenizer.convert_tokens_to_ids, len(tokenizer)).float().eval()


@pytest.mark.parametrize("family", MAKERS)
def test_pictures_mean_the_same_in_a_batch_as_alone_and_gradients_reach_what_sees(family: str) -> None:
    media, model = tiny(family)
    rows = [[(60, 41)] * len(row) for row in ROWS] if family in LOOKED_UP else list(ROWS)
    lengths, inputs = inputs_of(media, rows)
    logits = model(**inputs, use_cache=False).logits
    for number, row in enumerate(rows):
        _, alone = inputs_of(media, [row])
        expected = model(**alone, use_cache=False).logits[0]
        torch.testing.assert_close(logits[number, : lengths[number]], expected, rtol=1e-4, atol=1e-4)
    logits.logsumexp(-1).sum().backward()
    reached = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    modules = media.family.modules
    for name in (*modules.tower, *modules.projector, *modules.language):
        if "audio" in name or name == "lm_head" or (family in LOOKED_UP and name in modules.tower):
            continue
        model.get_submodule(name)
        assert any(weight.startswith(f"{name}.") for weight in reached), name
