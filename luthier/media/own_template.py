"""The chat template that came with a model's processor, whatever template the run has chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTemplate:
    """As its tokenizer would run it.

    source          None: the model has none, as models that were not made for chat
    special_tokens  the variables that it is given (``bos_token`` …)
    control         the control tokens of the tokenizer
    """

    source: str | None
    special_tokens: dict[str, str]
    control: frozenset[str]


def own_template(processor: Any) -> OwnTemplate:
    """That of a transformers processor, else of its tokenizer; of several named ones the default."""
    tokenizer = processor.tokenizer
    found = processor.chat_template or tokenizer.chat_template
    source = found.get("default") if isinstance(found, dict) else found
    return OwnTemplate(
        source=source or None,
        special_tokens={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if name.endswith("_token")
        },
        control=frozenset(token.content for token in tokenizer.added_tokens_decoder.values()),
    )
