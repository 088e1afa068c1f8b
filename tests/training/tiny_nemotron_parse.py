"""A stand-in for Nemotron-Parse, whose code comes with its files: the interface of its classes, in small."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers as hf
from torch import nn
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.models.mbart.modeling_mbart import MBartDecoder

from tests.media.remote_processors import NemotronParseImageProcessor, NemotronParseProcessor
from tests.media.tiny_processors import tiny_tokenizer

TASKS = ("<predict_bbox>", "<predict_classes>", "<output_markdown>", "<output_plain>")
HEIGHT, WIDTH, PATCH, SIZE = 48, 32, 16, 32


class NemotronParseConfig(hf.PretrainedConfig):
    """One config for each half."""

    model_type = "nemotron_parse"
    is_encoder_decoder = True
    sub_configs: ClassVar = {"decoder": hf.MBartConfig}

    def __init__(self, decoder: Any = None, patch_size: int = PATCH, **kwargs: Any) -> None:
        self.decoder = decoder if isinstance(decoder, hf.PretrainedConfig) else hf.MBartConfig(**(decoder or {}))
        self.patch_size = patch_size
        super().__init__(**kwargs)


class Encoder(nn.Module):
    """Patches, then the neck that takes them to the decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model_encoder = nn.Conv2d(3, 16, config.patch_size, stride=config.patch_size)
        self.conv1 = nn.Linear(16, config.decoder.d_model)

    def forward(self, pixels_BCHW: torch.Tensor) -> torch.Tensor:
        """[B, patches, D]"""
        return self.conv1(torch.tanh(self.model_encoder(pixels_BCHW)).flatten(2).transpose(1, 2))


class NoPositions(nn.Module):
    """In the place of embeddings of positions, which this decoder has none of."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Nothing is added."""
        return torch.zeros(1)


class NemotronParseForConditionalGeneration(hf.PreTrainedModel, hf.GenerationMixin):
    """Called with pictures and the decoder's own ids and mask, and with nothing of other names."""

    config_class = NemotronParseConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.decoder = MBartDecoder(config.decoder)
        self.decoder.embed_positions = NoPositions()
        self.lm_head = nn.Linear(config.decoder.d_model, config.decoder.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """Those of the decoder."""
        return self.decoder.embed_tokens

    def get_output_embeddings(self) -> Any:
        """The head."""
        return self.lm_head

    def forward(
        self,
        pixel_values: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
    ) -> Seq2SeqLMOutput:
        """Logits [B, T, V]."""
        assert len(pixel_values) == len(decoder_input_ids), "each row has its picture"
        hidden_BTD = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=self.encoder(pixel_values),
            use_cache=False,
        ).last_hidden_state
        return Seq2SeqLMOutput(logits=self.lm_head(hidden_BTD))


hf.AutoConfig.register("nemotron_parse", NemotronParseConfig, exist_ok=True)
hf.AutoModel.register(NemotronParseConfig, NemotronParseForConditionalGeneration, exist_ok=True)
hf.AutoImageProcessor.register(
    NemotronParseConfig, slow_image_processor_class=NemotronParseImageProcessor, exist_ok=True
)
hf.AutoProcessor.register(NemotronParseConfig, NemotronParseProcessor, exist_ok=True)


def tiny_processor() -> Any:
    """With pictures of 48 x 32 pixels."""
    return NemotronParseProcessor(NemotronParseImageProcessor(final_size=(HEIGHT, WIDTH)), tiny_tokenizer(*TASKS))


def write_folder(folder: Path) -> Path:
    """Processor, tokenizer and config as its users have them; no chat template, no weights."""
    processor = tiny_processor()
    processor.save_pretrained(folder)
    tokenizer = processor.tokenizer
    decoder = hf.MBartConfig(
        vocab_size=len(tokenizer), d_model=SIZE, decoder_layers=2, decoder_ffn_dim=48, decoder_attention_heads=2,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id, init_std=0.3,
    )  # fmt: skip
    NemotronParseConfig(decoder=decoder).save_pretrained(folder)
    hf.GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return folder
