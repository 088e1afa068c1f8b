"""The class of a reward model: transformers' own, or, for models that it has none of, one in the same manner.

Most multimodal models have no ``…ForSequenceClassification`` in transformers. Theirs is made here of what transformers
makes the others of: the base model, and a linear layer ``score`` on its hidden states. `reward_class` gives the same
class again, so ``reward_class(config).from_pretrained(folder)`` loads what was saved.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification

from luthier.errors import ModelError
from luthier.models.parts import decoder_family, multimodal_class


def reward_class(model_config: PretrainedConfig) -> Any:
    """What has ``from_pretrained`` and ``from_config`` for reward models of this config.

    Raises `ModelError` for a config that no class with a head is made of.
    """
    kind = type(model_config)
    if kind in AutoModelForSequenceClassification._model_mapping:
        return AutoModelForSequenceClassification
    generating = None if decoder_family(model_config) is not None else multimodal_class(model_config)
    if generating is None:
        raise ModelError(
            f"transformers knows no reward model for a {kind.__name__}, and none that one could be made of",
            hint="train a reward model of another family",
        )
    return _made_of(generating._model_mapping[kind])


@cache
def _made_of(generating: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """``Qwen2_5_VLForConditionalGeneration`` -> ``Qwen2_5_VLForSequenceClassification``."""
    plain = next(each for each in generating.__mro__[1:] if issubclass(each, PreTrainedModel))
    name = generating.__name__.partition("For")[0]
    members = {"__module__": __name__, "from_config": classmethod(_from_config)}
    made: type[PreTrainedModel] = type(
        f"{name}ForSequenceClassification", (GenericForSequenceClassification, plain), members
    )
    # files may call weights otherwise than modules do; which names are which goes by the class
    renamed = get_checkpoint_conversion_mapping(generating.__name__)
    if renamed is not None:
        register_checkpoint_conversion_mapping(made.__name__, renamed, overwrite=True)
    return made


def _from_config(cls: Any, /, model_config: PretrainedConfig, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """As the Auto classes have it; the code is ours, whoever is trusted."""
    return cls._from_config(model_config, **kwargs)
