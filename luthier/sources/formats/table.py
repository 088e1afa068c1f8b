"""The table of formats, to which plugins add theirs (docs/plugins.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from luthier.config.choices import FORMAT_NAMES, Format
from luthier.errors import PluginError
from luthier.plugins import Table
from luthier.records import Row
from luthier.sources.formats.convert import (
    convert_alpaca,
    convert_feedback,
    convert_messages,
    convert_preference,
    convert_prompt_completion,
    convert_text,
)
from luthier.sources.formats.reading import Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRule:
    """What a format is.

    columns   our column name -> the names under which files have it, most usual first
    needs     alternatives: a row must have all columns of one of them
    convert   a row, seen through the layout, to a record; raises `RowError`
    version   of the conversion: rows that are in the store under another one are converted and encoded again. What
              comes with Luthier has the version of the package's own conversion
    detected  of a plugin's format: its columns are unmistakable, so that ``format: auto`` finds it, before all others
    """

    columns: Mapping[str, tuple[str, ...]]
    needs: tuple[tuple[str, ...], ...]
    convert: Callable[[Reading], Row]
    role_key: str = "role"
    content_key: str = "content"
    version: str = ""
    detected: bool = False


_MEDIA = {"images": ("images", "image"), "videos": ("videos", "video"), "audios": ("audios", "audio")}
_WEIGHT = {"weight": ("weight", "loss_weight")}
_LOSS = {"train_on": ("train_on",), "continue_final_message": ("continue_final_message",), **_WEIGHT}
_SHARED = {"system": ("system", "system_prompt"), "tools": ("tools",), **_MEDIA}
_PAIR = {
    "chosen": ("chosen", "chosen_messages"),
    "rejected": ("rejected", "rejected_messages"),
    "margin": ("margin",),
}
_LABEL = {"kto_tag": ("kto_tag",)}
_ALPACA = {"prompt": ("instruction",), "query": ("input",), "history": ("history",)}

_ROWS: Mapping[str, FormatRule] = {
    Format.SHAREGPT: FormatRule(
        columns={
            "messages": ("conversations", "messages", "conversation"),
            **_SHARED,
            **_LOSS,
            **_PAIR,
            "kto_tag": ("kto_tag",),
        },
        needs=(("messages",),),
        convert=convert_messages,
        role_key="from",
        content_key="value",
    ),
    Format.MESSAGES: FormatRule(
        columns={
            "messages": ("messages", "conversations", "conversation"),
            **_SHARED,
            **_LOSS,
            **_PAIR,
            "kto_tag": ("kto_tag",),
        },
        needs=(("messages",),),
        convert=convert_messages,
    ),
    Format.ALPACA: FormatRule(
        columns={**_ALPACA, "response": ("output",), **_SHARED, **_LOSS, **_PAIR, **_LABEL},
        needs=(("prompt", "response"), ("prompt", "chosen", "rejected")),
        convert=convert_alpaca,
    ),
    Format.PROMPT_COMPLETION: FormatRule(
        columns={
            "prompt": ("prompt", "question"),
            "response": ("completion", "response", "answer"),
            **_SHARED,
            **_LOSS,
        },
        needs=(("prompt", "response"),),
        convert=convert_prompt_completion,
    ),
    Format.PREFERENCE: FormatRule(
        columns={
            "messages": ("conversations", "messages"),
            "prompt": ("prompt", "instruction", "question"),
            "query": ("input",),
            "history": ("history",),
            **_SHARED,
            **_WEIGHT,
            **_PAIR,
        },
        needs=(("chosen", "rejected"),),
        convert=convert_preference,
    ),
    Format.FEEDBACK: FormatRule(
        columns={
            "messages": ("messages", "conversations"),
            "prompt": ("prompt", "instruction", "question"),
            "query": ("input",),
            "history": ("history",),
            "response": ("completion", "response", "output"),
            "kto_tag": ("label", "kto_tag"),
            **_SHARED,
            **_WEIGHT,
        },
        needs=(("messages", "kto_tag"), ("prompt", "response", "kto_tag")),
        convert=convert_feedback,
    ),
    Format.TEXT: FormatRule(
        columns={"text": ("text",), "spans": ("spans",), **_WEIGHT, **_MEDIA}, needs=(("text",),), convert=convert_text
    ),
}

FORMATS: Table[FormatRule] = Table("format", _ROWS)

# Other names under which `columns` may speak of our columns.
COLUMN_ALIASES = {"completion": "response", "label": "kto_tag", "conversations": "messages"}


def column_names() -> frozenset[str]:
    """Our names of columns, of all formats."""
    return frozenset(name for rule in FORMATS.values() for name in rule.columns)


def register_format(name: str, rule: FormatRule) -> None:
    """Add a format: ``format: NAME`` of a data set. Raises `PluginError` where there is one, or no version."""
    if not rule.version:
        raise PluginError(f"the format {name!r} has no version", hint="give it one, and another when it changes a row")
    FORMAT_NAMES.add(name, name)
    FORMATS.add(name, rule)
