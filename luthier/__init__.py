"""Luthier fine-tunes language models and can prove what it trains on.

Public names are loaded on first use, so that ``import luthier`` costs little and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "load_config": "luthier.config.loading",
    "load_tokenizer": "luthier.encoding.tokenizer",
    "encode": "luthier.encoding.interface",
    "encode_many": "luthier.encoding.interface",
    "verify": "luthier.check.verify",
    "prepare": "luthier.loader.interface",
    "plan_packs": "luthier.packing",
    "collate": "luthier.collation.interface",
    "media_inputs": "luthier.collation.interface",
    "Loader": "luthier.loader.loader",
    "token_loss_sum": "luthier.objectives",
    "Conversation": "luthier.records",
    "Message": "luthier.records",
    "Text": "luthier.records",
    "Thinking": "luthier.records",
    "ToolCall": "luthier.records",
    "Sample": "luthier.records",
    "RowError": "luthier.errors",
    "UserError": "luthier.errors",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'luthier' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
