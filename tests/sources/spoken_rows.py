"""Short ways to say rows and what they mean."""

from __future__ import annotations

from typing import Any

from luthier.config.choices import Format
from luthier.config.inputs import SourceConfig
from luthier.records import Address, Conversation, Message, Row, Text
from luthier.sources import RawRow
from luthier.sources.detect import detect_layout
from luthier.sources.source import RowReader

ADDRESS = Address(file="data/rows.jsonl", row=1)


def convert(row: Any, **fields: Any) -> Row:
    layout = detect_layout(SourceConfig(path="data/rows.jsonl", **fields), [row] if isinstance(row, dict) else [])
    return RowReader(layout=layout).convert(RawRow(raw=b"", data=row, address=ADDRESS))


def chat(*messages: dict[str, Any], **fields: Any) -> Conversation:
    row = convert({"messages": list(messages), **fields}, format=Format.MESSAGES)
    assert isinstance(row, Conversation)
    return row


def said(role: str, text: str, **fields: Any) -> Message:
    return Message(role=role, parts=(Text(text=text),), **fields)


USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
