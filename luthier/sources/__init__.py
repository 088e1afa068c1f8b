"""Sources: raw rows of files, the Hub and presets become conversations, documents, preferences and feedback."""

from luthier.sources.origins import resolve_sources
from luthier.sources.row_index import RowIndex
from luthier.sources.rows import RawRow, RowBytes
from luthier.sources.source import RepeatedIds, RowReader, Source, open_sources, repeated_ids

__all__ = [
    "RawRow",
    "RepeatedIds",
    "RowBytes",
    "RowIndex",
    "RowReader",
    "Source",
    "open_sources",
    "repeated_ids",
    "resolve_sources",
]
