"""Code that comes with a model's files, which transformers 5 loads as it is.

What was written for transformers 4 is helped where a family's row says so (`Family.older_code`). What such code imports
and transformers 5 has no more is there while it is loaded; what it reads of its config, or says of its classes, in the
form of version 4 is put into that of version 5, on the classes of these files.

Of all such code, values that a model computes when it is made and keeps in no file are set again (`restore_buffers`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import PretrainedConfig, PreTrainedModel, masking_utils
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from luthier.errors import ModelError
from luthier.media.families.family import Family
from luthier.models.submodules import families_of

AskedAttention = str | dict[str, str | None] | None  # as transformers takes it: for all of a model, or by config


def in_older_code(auto: Any, config: PretrainedConfig) -> Any:
    """transformers' Auto class for this config; of older code one whose models are made as version 4 made them."""
    family = next((family for family in families_of(config) if family.older_code), None)
    return auto if family is None else _OlderCode(auto=auto, family=family)


def with_tower(config: PretrainedConfig, attention: str | None) -> AskedAttention:
    """The attention to ask for, with one for the tower that its class has (`Family.tower_attention`)."""
    known = next((family.tower_attention for family in families_of(config) if family.tower_attention), ())
    if not known or attention in known:
        return attention
    return {"": attention, "vision_config": known[0]} if attention else {"vision_config": known[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class _OlderCode:
    auto: Any
    family: Family

    def from_pretrained(
        self, source: str, *, config: PretrainedConfig, attn_implementation: str | None, **kwargs: Any
    ) -> Any:
        """As transformers' own."""
        attention = with_tower(config, attn_implementation)
        with older_names(config):
            self._fit(config, kwargs)
            return self.auto.from_pretrained(source, config=config, attn_implementation=attention, **kwargs)

    def from_config(
        self, config: PretrainedConfig, *, attn_implementation: str | None, **kwargs: Any
    ) -> PreTrainedModel:
        """As transformers' own."""
        attention = with_tower(config, attn_implementation)
        with older_names(config):
            self._fit(config, kwargs)
            made: PreTrainedModel = self.auto.from_config(config, attn_implementation=attention, **kwargs)
        return made

    def _fit(self, config: PretrainedConfig, told: Mapping[str, object]) -> None:
        _fit_config(type(config))
        reference = getattr(config, "auto_map", {}).get(self.auto.__name__)
        if reference is None or not told.get("trust_remote_code"):
            return  # no file names its class, or transformers will say that the file is not trusted
        places = {name: told[name] for name in ("revision", "cache_dir") if name in told}
        kind: Any = get_class_from_dynamic_module(reference, config.name_or_path, **places)
        if kind.config_class is not None:  # transformers reads a file again that lies elsewhere, and has two of a class
            _fit_config(kind.config_class)
        if isinstance(kind._tied_weights_keys, list):
            embedding = f"{self.family.modules.language[0]}.embed_tokens.weight"
            kind._tied_weights_keys = dict.fromkeys(kind._tied_weights_keys, embedding)


def _fit_config(kind: Any) -> None:
    """Let configs of this class say of positions and heads what version 4 said, where it had nothing to say."""
    if "rope_scaling" in vars(kind):
        return
    own = PretrainedConfig.rope_scaling

    def scaling(self: PretrainedConfig) -> dict[str, Any] | None:
        # version 5 also writes down here that nothing is scaled, and the base of frequencies
        found: dict[str, Any] | None = own.__get__(self)
        if found and found.get("rope_type", "default") == "default" and not set(found) - {"rope_type", "rope_theta"}:
            return None
        return found

    kind.rope_scaling = property(scaling, own.__set__)
    kind.pruned_heads = {}


@contextmanager
def older_names(config: PretrainedConfig) -> Iterator[None]:
    """Where a model of this config is made: if its code is older, it finds in transformers what version 4 had."""
    if not any(family.older_code for family in families_of(config)):
        yield
        return
    mask, frequencies = masking_utils.create_causal_mask, ROPE_INIT_FUNCTIONS.get("default")
    masking_utils.create_causal_mask = _by_older_names(mask)
    ROPE_INIT_FUNCTIONS.setdefault("default", _usual_frequencies)
    try:
        yield
    finally:
        masking_utils.create_causal_mask = mask
        if frequencies is None:
            del ROPE_INIT_FUNCTIONS["default"]


def _by_older_names(own: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arguments as they were called; what it has no more it works out itself."""
    known = inspect.signature(own).parameters
    renamed = {"input_embeds": "inputs_embeds"}

    @wraps(own)
    def create(*args: Any, **kwargs: Any) -> Any:
        given = {renamed.get(name, name): value for name, value in kwargs.items()}
        return own(*args, **{name: value for name, value in given.items() if name != "cache_position" or name in known})

    return create


def _usual_frequencies(
    config: Any = None, device: torch.device | None = None, seq_len: int | None = None, **_: object
) -> tuple[torch.Tensor, float]:
    """[D / 2] frequencies of rotary positions that nothing scales, and what cosines are multiplied by: nothing."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(size * getattr(config, "partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / size
    theta: float = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    return 1.0 / theta**exponents, 1.0


def restore_buffers(model: PreTrainedModel) -> int:
    """Set the buffers that no file has (positions of patches are an example), of a model whose class is not
    transformers' own, as its class computes them; returns how many there are.

    transformers makes a model without memory, reads its weights, and leaves such buffers unset (`torch.empty`), for the
    class to set them once more in its ``_init_weights``. Its own classes do. A class that comes with a model's files
    was mostly written when buffers were left alone, and would compute with what happens to be in memory. The model is
    made a second time for it, with buffers alone in memory.

    Raises `ModelError` for a buffer that the class then does not compute, or not in that size.
    """
    unsaved = dict(model.named_non_persistent_buffers())
    if type(model).__module__.startswith("transformers.") or not unsaved:
        return 0
    with older_names(model.config), torch.random.fork_rng(), init_empty_weights(include_buffers=False):
        made = dict(type(model)(deepcopy(model.config)).named_buffers())
    for name, buffer in unsaved.items():
        value = made.get(name)
        if value is None or value.is_meta or value.shape != buffer.shape:
            raise ModelError(
                f"{type(model).__name__} does not compute its buffer {name!r} when it is made, and no file has it",
                hint="save it with the weights (persistent=True), or set it in the class's _init_weights",
            )
        buffer.copy_(value)
    return len(unsaved)
