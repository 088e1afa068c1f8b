"""Media items as bytes of a store, and the way back: references, headers and places, never pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from luthier.records import Audio, AudioHeader, Image, ImageHeader, MediaItem, Video, VideoHeader

MEDIA = {"image": Image, "video": Video, "audio": Audio}
HEADERS = {"image": ImageHeader, "video": VideoHeader, "audio": AudioHeader}


def media_to_bytes(items: Sequence[MediaItem]) -> bytes:
    """Nothing for no items."""
    return msgspec.msgpack.encode([_plain(item) for item in items]) if items else b""


def media_from_bytes(encoded: bytes) -> tuple[MediaItem, ...]:
    """Read what `media_to_bytes` wrote."""
    return tuple(map(_item, msgspec.msgpack.decode(encoded))) if encoded else ()


def _plain(item: MediaItem) -> list[Any]:
    kind = next(kind for kind, of_kind in MEDIA.items() if isinstance(item.media, of_kind))
    return [kind, _values(item.media), _values(item.header), item.start, item.length, item.encoder_length]


def _values(record: Any) -> dict[str, Any]:
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: _values(value) if isinstance(value, AudioHeader) else value for name, value in found.items()}


def _item(plain: list[Any]) -> MediaItem:
    kind, media, header, start, length, encoder_length = plain
    if isinstance(media["source"], list):
        media["source"] = tuple(media["source"])
    if header.get("audio") is not None:
        header["audio"] = AudioHeader(**header["audio"])
    return MediaItem(
        media=MEDIA[kind](**media),
        header=HEADERS[kind](**header),
        start=start,
        length=length,
        encoder_length=encoder_length,
    )
