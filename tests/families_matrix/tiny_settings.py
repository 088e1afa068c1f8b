"""What tiny models of all families are made of: small sizes, and weights large enough for a leak to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# at the usual 0.02 a model hardly looks at other tokens, and every leak is small
SENSITIVE = {"initializer_range": 0.1}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer of a family's processor, as configs want to know it."""

    size: int
    number: Callable[[str], int]

    def ids(self, **tokens: str) -> dict[str, int]:
        """``ids(image="<image>")`` is ``{"image_token_id": 257}``."""
        return {f"{name}_token_id": self.number(token) for name, token in tokens.items()}

    def text(self, **more: Any) -> dict[str, Any]:
        """A language model of two layers over these tokens."""
        return {
            "vocab_size": self.size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "head_dim": 16,
            "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **SENSITIVE, **more,
        }  # fmt: skip


def sees(image_size: int = 28, patch_size: int = 7, **more: Any) -> dict[str, Any]:
    """A tower like CLIP's, for pictures that are squares."""
    return {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": image_size, "patch_size": patch_size, **SENSITIVE, **more,
    }  # fmt: skip


def patches(patch_size: int = 14, **more: Any) -> dict[str, Any]:
    """A tower like Qwen's, for grids of patches."""
    return {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": patch_size,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, **SENSITIVE, **more,
    }  # fmt: skip


MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WOVEN: dict[str, Any] = {**MROPE, "mrope_interleaved": True}
