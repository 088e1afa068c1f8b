"""A stand-in for MOSS-VL, whose code comes with its files: the interface of its classes, in small, for images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers as hf
from torch import nn
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.media.tiny_processors import tiny_tokenizer

CODE = Path(__file__).with_name("code_of_moss_vl")
PATCH, SIZE = 4, 32
SLOT, MARK = "<|image_pad|>", "<|image|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class MossVLImageProcessor(BaseImageProcessor):
    """A picture in whole patches, at most four by four, fewer beside others."""

    model_input_names: ClassVar = ["pixel_values"]

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        flat = [image for each in images for image in (each if isinstance(each, list) else [each])]
        most = max(1, 4 // len(flat))
        pixels, grids = [], []
        for image in flat:
            columns, rows = (min(most, max(1, side // 10)) for side in image.size)
            resized = image.convert("RGB").resize((columns * PATCH, rows * PATCH))
            array = np.asarray(resized, dtype=np.float32).transpose(2, 0, 1) / 255
            patches = array.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
            pixels.append(patches.reshape(rows * columns, -1))
            grids.append([1, rows, columns])
        return BatchFeature(
            {"pixel_values": torch.from_numpy(np.concatenate(pixels)), "image_grid_thw": torch.tensor(grids)}
        )


class MossVLProcessor(ProcessorMixin):
    """Writes one slot for each picture; a text without any gets a blank one, which it does not see."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.image_placeholder = SLOT, MARK
        self.image_token_id = tokenizer.convert_tokens_to_ids(SLOT)

    def __call__(self, text: Any, images: Any = None, **kwargs: Any) -> BatchFeature:  # type: ignore[override]
        (one,) = text
        count = one.count(MARK)
        ids = torch.tensor([self.tokenizer(one.replace(MARK, SLOT), add_special_tokens=False)["input_ids"]])
        if count:
            seen = self.image_processor(images)
            pixels, grids = seen["pixel_values"], seen["image_grid_thw"]
        else:
            pixels, grids = torch.zeros(1, 3 * PATCH * PATCH), torch.tensor([[1, 1, 1]])
        shown = (ids == self.image_token_id).cumsum(1)[..., None] > torch.arange(len(grids))
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "grid_thw": grids}
        return BatchFeature({**made, "cross_attention_mask": ~shown[:, None], "media_nums_per_sample": [max(1, count)]})


class MossVLConfig(hf.Qwen2Config):
    """That of its language model, with the id of a slot."""

    model_type = "moss_vl"

    def __init__(self, image_token_id: int = 0, **kwargs: Any) -> None:
        self.image_token_id = image_token_id
        super().__init__(**kwargs)


class Text(hf.Qwen2PreTrainedModel):
    """A decoder, and a layer behind it that looks across."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.decoder = hf.Qwen2Model(config)
        self.query, self.key = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.out = nn.Linear(SIZE, SIZE)
        self.post_init()

    def forward(self, seen_BVD: Any, hidden_BTV: Any, **inputs: Any) -> torch.Tensor:
        """[B, T, D]"""
        states = self.decoder(**inputs, use_cache=False).last_hidden_state
        if seen_BVD is None:
            return states
        scores = self.query(states) @ self.key(seen_BVD).transpose(1, 2)
        sees = ~hidden_BTV.all(dim=-1, keepdim=True)
        weights = scores.masked_fill(hidden_BTV & sees, torch.finfo(scores.dtype).min).softmax(-1)
        return states + sees * self.out(weights @ seen_BVD)


class Inner(hf.Qwen2PreTrainedModel):
    """Counts positions itself, and takes how many pictures each row has and what is hidden from each token."""

    config_class = MossVLConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.visual = nn.ModuleDict({"patches": nn.Linear(3 * PATCH * PATCH, SIZE), "merger": nn.Linear(SIZE, SIZE)})
        self.language_model = Text(config)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """Those of the decoder."""
        return self.language_model.decoder.embed_tokens

    def forward(
        self, input_ids: Any, attention_mask: Any, pixel_values: Any = None, grid_thw: Any = None,
        media_nums_per_sample: Any = None, cross_attention_mask: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """[B, T, D]"""
        slots = input_ids == self.config.image_token_id
        regular = (attention_mask.bool() & ~slots).long()
        positions = regular.cumsum(1) - regular
        seen_BVD = hidden_BTV = None
        if pixel_values is not None:
            patches = self.visual["merger"](torch.tanh(self.visual["patches"](pixel_values)))
            pictures = iter(patches.split(grid_thw.prod(1).tolist()))
            rows = [[next(pictures) for _ in range(count)] for count in media_nums_per_sample]
            sizes = [[len(picture) for picture in row] for row in rows]
            longest = max(map(sum, sizes))
            seen_BVD = torch.stack(
                [nn.functional.pad(torch.cat([*row, patches[:0]]), (0, 0, 0, longest - sum(size)))
                 for row, size in zip(rows, sizes, strict=True)]
            )  # fmt: skip
            hidden_BTV = torch.ones(*input_ids.shape, longest, dtype=torch.bool)
            for row, size in enumerate(sizes):
                mask = cross_attention_mask[row, 0, :, : len(size)]
                hidden_BTV[row, :, : sum(size)] = mask.repeat_interleave(torch.tensor(size, dtype=torch.long), dim=-1)
            steps = torch.zeros_like(positions)
            steps[slots] = grid_thw[:, 1:].amax(1)[: int(slots.sum())] + 1
            positions = positions + steps.cumsum(1) - slots.long()
        return self.language_model(
            seen_BVD, hidden_BTV, inputs_embeds=self.get_input_embeddings()(input_ids), attention_mask=attention_mask,
            position_ids=positions,
        )  # fmt: skip


class MossVL(hf.Qwen2PreTrainedModel, hf.GenerationMixin):
    """With a head."""

    config_class = MossVLConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Inner(config)
        self.lm_head = nn.Linear(SIZE, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """Those of the decoder."""
        return self.model.get_input_embeddings()

    def get_decoder(self) -> Any:
        """What is not the tower."""
        return self.model.language_model

    def forward(self, use_cache: bool = False, **inputs: Any) -> CausalLMOutputWithPast:
        """Logits [B, T, V]; positions are none of its inputs."""
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(**inputs)))


hf.AutoConfig.register("moss_vl", MossVLConfig, exist_ok=True)
hf.AutoModelForCausalLM.register(MossVLConfig, MossVL, exist_ok=True)
hf.AutoImageProcessor.register(MossVLConfig, slow_image_processor_class=MossVLImageProcessor, exist_ok=True)
hf.AutoProcessor.register(MossVLConfig, MossVLProcessor, exist_ok=True)


def write_folder(folder: Path) -> Path:
    """Processor, tokenizer and config as its users have them; no weights."""
    tokenizer = tiny_tokenizer("<|im_start|>", "<|im_end|>", SLOT)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT
    MossVLProcessor(MossVLImageProcessor(), tokenizer).save_pretrained(folder)
    MossVLConfig(
        vocab_size=len(tokenizer), hidden_size=SIZE, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        image_token_id=tokenizer.convert_tokens_to_ids(SLOT),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def write_published(folder: Path) -> Path:
    """The same with its code, written for transformers 4, as its users have it."""
    write_folder(folder)
    for code in CODE.glob("*.py"):
        (folder / code.name).write_text(code.read_text(encoding="utf-8"), encoding="utf-8")
    kinds = {
        "AutoConfig": "configuration_moss_vl.MossVLConfig",
        "AutoModelForCausalLM": "modeling_moss_vl.MossVLForConditionalGeneration",
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": kinds}))
    kinds = {"AutoImageProcessor": "MossVLImageProcessor", "AutoProcessor": "MossVLProcessor"}
    kinds = {auto: f"processing_moss_vl.{kind}" for auto, kind in kinds.items()}
    (folder / "processor_config.json").unlink()
    processor = {"image_processor_type": "MossVLImageProcessor", "processor_class": "MossVLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, "auto_map": kinds}))
    return folder
