"""What a reward model says of sequences of ids.

# B sequences, T tokens, padded on the right: a causal model's last real token sees no padding
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from luthier.collation import MediaInputs
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.answering import Answerer
from luthier.engines.engine import Ids
from luthier.errors import ModelError
from luthier.models.model import REWARD_HEAD
from luthier.models.passes import reward_head
from luthier.models.submodules import plain_model
from luthier.records import MediaItem

TOKENS_AT_ONCE = 16_384  # padding included


class RewardEngine:
    """Gives rewards to sequences, one or many at a time. Not for several threads at once."""

    def __init__(
        self, model: PreTrainedModel | PeftModel, tokenizer: Tokenizer, *, media: MediaInputs | None = None
    ) -> None:
        self._at_each_token = hasattr(plain_model(model), REWARD_HEAD)
        self._answerer = Answerer(model=model, tokenizer=tokenizer, media=media, batch_size=1, joins=False)

    @torch.no_grad()
    def reward(self, ids: Ids, media: Sequence[MediaItem] = ()) -> float:
        """The reward at the last token, int32[T], which is where training compares. (What transformers returns is
        that of the last token that is no padding, which a stop token may be, too.) Raises `RowError` for media."""
        answerer = self._answerer
        features = {} if answerer.media is None else answerer.media.features(media)
        inputs, _ = answerer.inputs([ids], [features])
        return float(self._rewards_BT(inputs)[0, -1])

    @torch.no_grad()
    def rewards(self, sequences: Sequence[Ids]) -> list[float]:
        """The reward of each, without media. Equal sequences have equal rewards, and no order matters: each is computed
        once, beside those of about its length. Raises `ModelError` for a model that gives more than one number."""
        places: dict[bytes, list[int]] = {}
        for place, ids in enumerate(sequences):
            places.setdefault(ids.astype(np.int64).tobytes(), []).append(place)
        once = sorted(places, key=lambda key: (len(key), key))
        found = [0.0] * len(sequences)
        start = 0
        while start < len(once):
            end = start + 1
            while end < len(once) and (end + 1 - start) * len(once[end]) // 8 <= TOKENS_AT_ONCE:
                end += 1
            for key, reward in zip(once[start:end], self._of_some(once[start:end]), strict=True):
                for place in places[key]:
                    found[place] = reward
            start = end
        return found

    def _of_some(self, keys: Sequence[bytes]) -> list[float]:
        some = [np.frombuffer(key, dtype=np.int64) for key in keys]
        ids_BT = np.full((len(some), max(map(len, some))), self._answerer.tokenizer.pad_token_id, dtype=np.int64)
        mask_BT = np.zeros_like(ids_BT)
        for row, ids in enumerate(some):
            ids_BT[row, : len(ids)] = ids
            mask_BT[row, : len(ids)] = 1
        device = next(self._answerer.model.parameters()).device
        inputs = {
            "input_ids": torch.from_numpy(ids_BT).to(device),
            "attention_mask": torch.from_numpy(mask_BT).to(device),
        }
        rewards_BT = self._rewards_BT(inputs)
        last_B = torch.from_numpy(mask_BT.sum(axis=1) - 1).to(rewards_BT.device).clamp(max=rewards_BT.shape[1] - 1)
        rewards: list[float] = rewards_BT.gather(1, last_B[:, None])[:, 0].tolist()
        return rewards

    def _rewards_BT(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32[B, T]: at each token; [B, 1] of a model that gives one number for all of them."""
        model = self._answerer.model
        if not self._at_each_token:
            logits_BN: torch.Tensor = model(**inputs).logits.float()
            if logits_BN.shape[1:] != (1,):
                raise ModelError(f"a reward model gives one number, and this one {tuple(logits_BN.shape[1:])}")
            return logits_BN
        taken: list[torch.Tensor] = []

        def take(layer: torch.nn.Module, arguments: tuple[Any, ...], rewards_BT1: torch.Tensor) -> None:
            taken.append(rewards_BT1)

        hook = reward_head(model).register_forward_hook(take)
        try:
            model(**inputs, use_cache=False)
        finally:
            hook.remove()
        return taken[-1].reshape(inputs["input_ids"].shape).float()
