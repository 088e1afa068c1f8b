"""The model of a stand-in for Youtu-VL in small, written as code for transformers 4 is.

Version 5 cannot run it as it is, so no test does: `tests.training.tiny_youtu_vl` puts it into a folder.
"""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_youtu_vl import TowerConfig, YoutuVLConfig  # noqa: TID252  beside it, wherever that is

PATCH = 4


class Masked(nn.Module):
    """Attention of all patches of a call, hidden from those of other pictures."""

    def __init__(self, config):
        super().__init__()
        self.parts = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.register_buffer("steps", torch.arange(1, config.hidden_size + 1) / 10, persistent=False)

    def forward(self, hidden, sizes):
        owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes.prod(dim=1))
        places = torch.cat([torch.arange(count) for count in sizes.prod(dim=1).tolist()])
        query, key, value = self.parts(hidden + (places[:, None] * self.steps).sin()).chunk(3, dim=-1)
        scores = (query @ key.T).masked_fill(owners[:, None] != owners, torch.finfo(hidden.dtype).min)
        return hidden + scores.softmax(dim=-1) @ value


ATTENTIONS = {"eager": Masked}


class Tower(PreTrainedModel):
    """Takes patches as [1, P, V]."""

    config_class = TowerConfig
    _supports_sdpa = True  # as its class says, though it has none

    def __init__(self, config):
        super().__init__(config)
        self.patches = nn.Linear(3 * PATCH**2, config.hidden_size)
        self.layer = ATTENTIONS[config._attn_implementation](config)
        self.post_init()

    def forward(self, pixel_values, pixel_attention_mask, spatial_shapes):
        hidden = self.patches(pixel_values).reshape(-1, self.config.hidden_size)
        return BaseModelOutputWithPooling(last_hidden_state=self.layer(hidden, spatial_shapes))


class Layer(nn.Module):
    """Attention with rotary positions, and a network."""

    def __init__(self, config, number):
        super().__init__()
        size = config.hidden_size
        self.config, self.layer_idx, self.is_causal, self.num_key_value_groups = config, number, True, 1
        self.scaling = (size // config.num_attention_heads) ** -0.5
        if config.rope_scaling is not None:
            self.scaling *= config.rope_scaling["factor"]
        self.parts, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.network = nn.Sequential(nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size))

    def forward(self, hidden, mask, cosines, sines, cache, **kwargs):
        rows, length, size = hidden.shape
        parts = self.parts(nn.functional.layer_norm(hidden, (size,))).view(rows, length, 3, -1, size // 4)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        query, key = (each * cosines + _turned(each) * sines for each in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        attend = eager if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        seen, _ = attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **kwargs)
        hidden = hidden + self.out(seen.reshape(rows, length, size))
        return hidden + self.network(nn.functional.layer_norm(hidden, (size,)))


def eager(module, query, key, value, mask, scaling, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if mask is None else scores + mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2), None


def _turned(states):
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class Base(PreTrainedModel):
    """What both halves share."""

    config_class = YoutuVLConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def init_weights(self):
        assert not self.config.pruned_heads
        self.initialize_weights()
        self.tie_weights()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.2)


class Decoder(Base):
    """The language model without its head."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        frequencies, self.attention_scaling = ROPE_INIT_FUNCTIONS["default"](config, None)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.post_init()

    def forward(self, inputs_embeds, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        places = torch.arange(before, before + inputs_embeds.shape[1])
        position_ids = places[None] if position_ids is None else position_ids
        mask = create_causal_mask(
            config=self.config, input_embeds=inputs_embeds, attention_mask=attention_mask, cache_position=places,
            past_key_values=past_key_values, position_ids=position_ids,
        )  # fmt: skip
        angles = position_ids[..., None].float() * torch.cat([self.inv_freq, self.inv_freq])
        cosines, sines = (angles.cos()[:, None], angles.sin()[:, None])
        hidden = inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden, mask, cosines, sines, past_key_values, position_ids=position_ids, **kwargs)
        return hidden


class YoutuVL(Base, GenerationMixin):
    """The whole."""

    _tied_weights_keys = ["lm_head.weight"]  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.siglip2 = Tower._from_config(config.vision_config)
        self.merger = nn.Linear(4 * config.vision_config.hidden_size, config.hidden_size)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_decoder(self):
        return self.model

    def generate(self, *args, img_input=None, **kwargs):
        """What it has drawn, and then marks that it has not."""
        drawn = super().generate(*args, **kwargs)
        return torch.cat([drawn, drawn.new_zeros(len(drawn), 1)], dim=1)

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, pixel_values=None,
        pixel_attention_mask=None, spatial_shapes=None, logits_to_keep=0, use_cache=None, labels=None, **kwargs,
    ):  # fmt: skip
        embedded = self.model.embed_tokens(input_ids)
        if pixel_values is not None:
            seen = self.siglip2(pixel_values, pixel_attention_mask, spatial_shapes).last_hidden_state
            merged = self.merger(seen.reshape(-1, 4 * seen.shape[-1]))
            slots = input_ids == self.config.image_token_id
            if int(slots.sum()) != len(merged):
                raise ValueError("tokens and features of images do not match")
            embedded = embedded.masked_scatter(slots[..., None], merged)
        hidden = self.model(embedded, attention_mask, position_ids, past_key_values, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, kept]), past_key_values=past_key_values)
