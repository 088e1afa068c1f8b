"""What a stand-in for Youtu-VL is told, written as code for transformers 4 is."""

from transformers import PretrainedConfig


class TowerConfig(PretrainedConfig):
    """Of the tower."""

    model_type = "tower_of_youtu_vl"

    def __init__(self, hidden_size=16, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size = hidden_size


class YoutuVLConfig(PretrainedConfig):
    """Of the whole; what it says of the language model is beside what it says of all."""

    model_type = "youtu_vl"
    sub_configs = {"vision_config": TowerConfig}  # noqa: RUF012

    def __init__(self, vision_config=None, rope_theta=500.0, rope_scaling=None, image_token_id=0, **kwargs):
        self.vision_config = TowerConfig(**(vision_config or {}))
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.image_token_id = image_token_id
        self.hidden_size, self.num_attention_heads, self.num_hidden_layers = 32, 4, 2
        self.num_key_value_heads, self.vocab_size, self.use_cache = 4, kwargs.pop("vocab_size", 300), True
        super().__init__(**kwargs)
