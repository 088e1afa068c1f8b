"""What a reward model says of sequences of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from luthier.collation import MediaInputs
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.answering import Answerer
from luthier.engines.engine import Ids
from luthier.models.passes import reward_head
from luthier.records import MediaItem


class RewardEngine:
    """Gives rewards one sequence at a time. Not for several threads at once."""

    def __init__(
        self, model: PreTrainedModel | PeftModel, tokenizer: Tokenizer, *, media: MediaInputs | None = None
    ) -> None:
        self._answerer = Answerer(model=model, tokenizer=tokenizer, media=media, batch_size=1, joins=False)

    @torch.no_grad()
    def reward(self, ids: Ids, media: Sequence[MediaItem] = ()) -> float:
        """The reward at the last token, int32[T], which is where training compares. (What transformers returns is
        that of the last token that is no padding, which a stop token may be, too.) Raises `RowError` for media."""
        answerer = self._answerer
        features = {} if answerer.media is None else answerer.media.features(media)
        inputs, _ = answerer.inputs([ids], [features])
        taken: list[torch.Tensor] = []

        def take(layer: torch.nn.Module, arguments: tuple[Any, ...], rewards_1T1: torch.Tensor) -> None:
            taken.append(rewards_1T1)

        hook = reward_head(answerer.model).register_forward_hook(take)
        try:
            answerer.model(**inputs, use_cache=False)
        finally:
            hook.remove()
        return float(taken[-1].flatten()[-1])
