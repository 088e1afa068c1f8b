"""A stand-in for MiniCPM-o, whose code comes with its files: MiniCPM-V's, with an encoder of sounds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray
from torch import nn
from transformers import BatchFeature, ProcessorMixin

from tests.media.tiny_processors import tiny_tokenizer
from tests.training.tiny_minicpmv import CHAT, MARKS, SIZE, SLOT, MiniCPMV, MiniCPMVConfig, MiniCPMVImageProcessor

GROUP, BANDS, LONGEST = 5, 8, 2  # frames of a slot, seconds of a piece
HEARD = {"audio_start": "<|audio_start|>", "audio_end": "<|audio_end|>"}
IMAGE, AUDIO = "<image>./</image>", "<audio>./</audio>"


class MiniCPMOConfig(MiniCPMVConfig):
    """The same, and how much its encoder of sounds sees at once."""

    model_type = "minicpmo"

    def __init__(self, audio_chunk_length: float = 1.0, **kwargs: Any) -> None:
        self.audio_chunk_length = audio_chunk_length
        super().__init__(**kwargs)


class MiniCPMOProcessor(ProcessorMixin):
    """Writes slots for pictures and sounds where a text has marks for them, without parentheses, as 4.5 does."""

    def __init__(
        self, image_processor: Any = None, feature_extractor: Any = None, tokenizer: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, feature_extractor, tokenizer, **kwargs)
        self.pool_step = GROUP

    def get_audio_placeholder(self, audio_lens: int, chunk_input: bool = True) -> str:
        """What the text has for a sound of so many samples; a caller has to say that it is not to be cut."""
        slots = _slots(math.ceil(audio_lens / self.feature_extractor.hop_length))
        assert not chunk_input, "each second between marks of its own"
        return f"{self.tokenizer.audio_start}{SLOT * slots}{self.tokenizer.audio_end}"

    def __call__(self, text: Any, images: Any = None, audios: Any = None) -> BatchFeature:  # type: ignore[override]
        (whole,) = text
        seen = self.image_processor([[]] if images is None else images)
        for number, size in enumerate(seen["image_sizes"][0]):
            whole = whole.replace(IMAGE, self.image_processor.get_slice_image_placeholder(size, number), 1)
        frames, lengths = self._heard([] if audios is None else audios[0])
        for sound in [] if audios is None else audios[0]:
            whole = whole.replace(AUDIO, self.get_audio_placeholder(len(sound), chunk_input=False), 1)
        ids = torch.tensor(self.tokenizer(whole, add_special_tokens=False)["input_ids"])
        pictures = {name: seen[name] for name in ("pixel_values", "image_sizes", "tgt_sizes")}
        opens, closes = [MARKS[0], MARKS[2]], [MARKS[1], MARKS[3]]
        return BatchFeature(
            {
                "input_ids": ids[None],
                "image_bound": [self._bounds(ids, opens, closes)],
                "audio_bounds": [self._bounds(ids, [self.tokenizer.audio_start], [self.tokenizer.audio_end])],
                "audio_features": frames,
                "audio_feature_lens": lengths,
                **pictures,
            }
        )

    def _heard(self, sounds: Sequence[NDArray[np.float32]]) -> tuple[Any, list[Any]]:
        """Pieces [M, bands, frames], filled up to the longest, and how many frames each has."""
        longest = LONGEST * self.feature_extractor.sampling_rate
        pieces = [sound[at : at + longest] for sound in sounds for at in range(0, len(sound), longest)]
        if not pieces:
            return [], [torch.tensor([])]
        made = self.feature_extractor(
            pieces, sampling_rate=16_000, return_attention_mask=True, padding="max_length", return_tensors="pt"
        )
        lengths = made["attention_mask"].sum(dim=1)
        cut = [frames[:, :length].T for frames, length in zip(made["input_features"], lengths, strict=True)]
        return nn.utils.rnn.pad_sequence(cut, batch_first=True).transpose(1, 2), [lengths]

    def _bounds(self, ids: torch.Tensor, opens: list[str], closes: list[str]) -> torch.Tensor:
        begins, ends = (
            np.isin(ids, self.tokenizer.convert_tokens_to_ids(marks)).nonzero()[0] for marks in (opens, closes)
        )
        return torch.from_numpy(np.stack([begins + 1, ends], axis=1))


class MiniCPMO(MiniCPMV):
    """Its encoder of sounds hears all that is in a call: what fills up the shorter sounds too."""

    config_class = MiniCPMOConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.apm = nn.Conv1d(BANDS, SIZE, kernel_size=3, stride=2, padding=1)
        self.audio_projection_layer = nn.Linear(SIZE, config.hidden_size)
        self.post_init()

    def get_audio_embedding(self, data: Any, chunk_length: float = -1) -> list[list[torch.Tensor]]:
        """For each row, [slots, hidden] of each of its sounds."""
        assert chunk_length == self.config.audio_chunk_length
        states = self.apm(data["audio_features"])
        states = torch.tanh(states - states.mean(dim=(1, 2), keepdim=True))
        heard = iter(self.audio_projection_layer(nn.functional.avg_pool1d(states, GROUP).transpose(1, 2)))
        return [[next(heard)[: _slots(int(length))] for length in of_row] for of_row in data["audio_feature_lens"]]

    def get_omni_embedding(self, data: Any, input_embeddings: torch.Tensor, chunk_length: float = -1) -> torch.Tensor:
        """The class's own, which takes lists."""
        embeddings = input_embeddings.clone()
        if len(data["audio_features"]):
            for row, heard in enumerate(self.get_audio_embedding(data, chunk_length)):
                places = torch.cat([torch.arange(begin, end) for begin, end in data["audio_bounds"][row]])
                embeddings[row, places] = torch.cat(heard)
        return embeddings

    def forward(self, data: Any, **kwargs: Any) -> Any:
        """Logits [B, T, V]."""
        embedded, _ = self.get_vllm_embedding(data)
        embedded = self.get_omni_embedding(data, embedded, chunk_length=self.config.audio_chunk_length)
        return self.llm(input_ids=None, position_ids=data["position_ids"], inputs_embeds=embedded, **kwargs)


def _slots(frames: int) -> int:
    return ((frames - 1) // 2 + 1) // GROUP


hf.AutoConfig.register("minicpmo", MiniCPMOConfig, exist_ok=True)
hf.AutoModelForCausalLM.register(MiniCPMOConfig, MiniCPMO, exist_ok=True)
hf.AutoImageProcessor.register(MiniCPMOConfig, slow_image_processor_class=MiniCPMVImageProcessor, exist_ok=True)
hf.AutoProcessor.register(MiniCPMOConfig, MiniCPMOProcessor, exist_ok=True)


def write_folder(folder: Path) -> Path:
    """Processor, tokenizer with its template of texts, and config as its users have them; no weights."""
    tokenizer = tiny_tokenizer("<|im_start|>", "<|im_end|>", SLOT, *MARKS, **HEARD)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT
    extractor = hf.WhisperFeatureExtractor(feature_size=BANDS, chunk_length=LONGEST)
    MiniCPMOProcessor(MiniCPMVImageProcessor(), extractor, tokenizer).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "extra_special_tokens": HEARD}))
    MiniCPMOConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)  # fmt: skip
    return folder
