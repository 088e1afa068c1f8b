"""A stand-in for MiniCPM-V up to 4.5, whose code comes with its files: the interface of its classes, in small."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers as hf
from torch import nn
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

from tests.media.tiny_processors import tiny_tokenizer

MARKS = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
SLOT = "<unk>"
PATCH, SLOTS, SIDE, SIZE = 7, 3, 28, 16
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class MiniCPMVImageProcessor(BaseImageProcessor):
    """A picture in the size nearest to whole patches, and its halves where it is longer than it is high or wide."""

    model_input_names: ClassVar = ["pixel_values"]

    def __init__(self, image_feature_size: int = SLOTS, use_image_id: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.image_feature_size, self.use_image_id = image_feature_size, use_image_id
        self.im_start_token, self.im_end_token, self.slice_start_token, self.slice_end_token, *_ = MARKS

    def get_slice_image_placeholder(self, image_size: Any, image_idx: int = 0) -> str:
        """What the text has for a picture of this (width, height)."""
        slots = SLOT * self.image_feature_size
        number = f"<image_id>{image_idx}</image_id>" if self.use_image_id else ""
        columns, rows = self._grid(image_size)
        line = f"<slice>{slots}</slice>" * columns
        return f"{number}<image>{slots}</image>" + ("\n".join([line] * rows) if columns * rows > 1 else "")

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        pixels, sizes, told = [], [], []
        for of_text in images:
            pixels.append([])
            told.append([])
            for image in of_text:
                for one in self._slices(image.convert("RGB")):
                    array = np.asarray(one, dtype=np.float32).transpose(2, 0, 1) / 255
                    rows, columns = array.shape[1] // PATCH, array.shape[2] // PATCH
                    patches = array.reshape(3, rows, PATCH, columns, PATCH).transpose(0, 2, 1, 3, 4)
                    pixels[-1].append(torch.from_numpy(patches.reshape(3, PATCH, -1).copy()))
                    told[-1].append([rows, columns])
            sizes.append([image.size for image in of_text])
        tgt_sizes = [torch.tensor(one) for one in told]
        return BatchFeature({"pixel_values": pixels, "image_sizes": sizes, "tgt_sizes": tgt_sizes})

    def _grid(self, size: Any) -> tuple[int, int]:
        width, height = size
        return (2, 1) if width > 2 * height else (1, 2) if height > 2 * width else (1, 1)

    def _slices(self, image: Any) -> list[Any]:
        fitted = image.resize(self._whole(*image.size))
        columns, rows = self._grid(image.size)
        if columns * rows == 1:
            return [fitted]
        large = image.resize((SIDE * columns, SIDE * rows))
        boxes = [(SIDE * x, SIDE * y, SIDE * (x + 1), SIDE * (y + 1)) for y in range(rows) for x in range(columns)]
        return [fitted, *(large.crop(box) for box in boxes)]

    def _whole(self, width: int, height: int) -> tuple[int, int]:
        scale = math.sqrt(SIDE * SIDE / (width * height))
        return tuple(max(round(side * scale / PATCH), 1) * PATCH for side in (width, height))  # type: ignore[return-value]


class MiniCPMVProcessor(ProcessorMixin):
    """Writes slots where a text has ``(<image>./</image>)``, and tells where those of each slice begin and end."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, text: Any, images: Any = None) -> BatchFeature:  # type: ignore[override]
        seen = self.image_processor([[] for _ in text] if images is None else images)
        ids, bounds = [], []
        for one, sizes in zip(text, seen["image_sizes"], strict=True):
            written = [self.image_processor.get_slice_image_placeholder(size, n) for n, size in enumerate(sizes)]
            texts = one.split("(<image>./</image>)")
            whole = "".join(text + string for text, string in zip(texts, [*written, ""], strict=True))
            found = torch.tensor(self.tokenizer(whole, add_special_tokens=False)["input_ids"])
            image, image_end, slice_, slice_end, *_ = self.tokenizer.convert_tokens_to_ids(list(MARKS))
            begins = np.isin(found, [image, slice_]).nonzero()[0] + 1
            ends = np.isin(found, [image_end, slice_end]).nonzero()[0]
            ids.append(found)
            bounds.append(torch.from_numpy(np.stack([begins, ends], axis=1)))
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        pictures = {name: seen[name] for name in ("pixel_values", "image_sizes", "tgt_sizes")}
        return BatchFeature({"input_ids": padded, "image_bound": bounds, **pictures})


class MiniCPMVConfig(hf.Qwen2Config):
    """That of its language model, with the number of slots."""

    model_type = "minicpmv"

    def __init__(self, query_num: int = SLOTS, **kwargs: Any) -> None:
        self.query_num = query_num
        super().__init__(**kwargs)


class Resampler(nn.Module):
    """As many features as there are slots, of however many patches."""

    def __init__(self, slots: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(slots, SIZE))
        self.out = nn.Linear(SIZE, hidden)

    def forward(self, seen_LC: torch.Tensor) -> torch.Tensor:
        """[slots, hidden]"""
        return self.out(torch.softmax(self.query @ seen_LC.T, dim=-1) @ seen_LC)


class MiniCPMV(hf.Qwen2PreTrainedModel):
    """Called with one mapping and what its language model takes besides."""

    config_class = MiniCPMVConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.llm = hf.Qwen2ForCausalLM(config)
        self.vpm = nn.Linear(3 * PATCH * PATCH, SIZE)
        self.resampler = Resampler(config.query_num, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """Those of the language model."""
        return self.llm.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Its head."""
        return self.llm.lm_head

    def get_decoder(self) -> Any:
        """The language model."""
        return self.llm

    def get_vllm_embedding(self, data: Any) -> Any:
        """Embeddings [B, T, D] with pictures in their places, and what was seen of each row."""
        words = self.llm.get_input_embeddings()(data["input_ids"])
        if "vision_hidden_states" in data:
            return words, data["vision_hidden_states"]
        seen = []
        for row, slices in enumerate(data["pixel_values"]):
            assert len(slices) == len(data["tgt_sizes"][row]) == len(data["image_bound"][row])
            seen.append([])
            for pixels, (rows, columns), (begin, end) in zip(
                slices, data["tgt_sizes"][row], data["image_bound"][row], strict=True
            ):
                patches = pixels.view(3, PATCH, rows * columns, PATCH).permute(2, 0, 1, 3).flatten(1)
                seen[-1].append(self.resampler(torch.tanh(self.vpm(patches))))
                assert end - begin == len(seen[-1][-1])
                words[row, begin:end] = seen[-1][-1]
        return words, seen

    def forward(self, data: Any, **kwargs: Any) -> Any:
        """Logits [B, T, V]."""
        embedded, _ = self.get_vllm_embedding(data)
        return self.llm(input_ids=None, position_ids=data["position_ids"], inputs_embeds=embedded, **kwargs)

    def generate(self, input_ids: Any, tokenizer: Any = None, **kwargs: Any) -> Any:
        """Its own, which asks for a tokenizer."""
        raise AssertionError("not without a tokenizer")


hf.AutoConfig.register("minicpmv", MiniCPMVConfig, exist_ok=True)
hf.AutoModelForCausalLM.register(MiniCPMVConfig, MiniCPMV, exist_ok=True)
hf.AutoImageProcessor.register(MiniCPMVConfig, slow_image_processor_class=MiniCPMVImageProcessor, exist_ok=True)
hf.AutoProcessor.register(MiniCPMVConfig, MiniCPMVProcessor, exist_ok=True)


def write_folder(folder: Path) -> Path:
    """Processor, tokenizer with its template of texts, and config as its users have them; no weights."""
    tokenizer = tiny_tokenizer("<|im_start|>", "<|im_end|>", SLOT, *MARKS)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT
    MiniCPMVProcessor(MiniCPMVImageProcessor(), tokenizer).save_pretrained(folder)
    MiniCPMVConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)  # fmt: skip
    return folder
