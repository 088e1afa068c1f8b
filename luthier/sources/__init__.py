"""Sources: raw rows of files, the Hub and presets become conversations, documents, preferences and feedback.

Read in this order: nearest, strict_json, rows, compressed, files, json_arrays, text_files, columnar, origins, offsets,
open_files, line_rows, spools, record_spool, column_groups, row_index, formats.layout, formats.media_objects,
formats.media, formats.targets, formats.thinking, formats.tools, formats.turns, formats.odd_turns, formats.transcripts,
formats.reading, formats.convert, formats.table, formats.text_limit, formats.written_slots, detect, source, row_ids,
registry.
"""

from luthier.sources.registry import resolve_sources
from luthier.sources.row_ids import RepeatedIds, repeated_ids
from luthier.sources.row_index import RowIndex
from luthier.sources.rows import RawRow, RowBytes
from luthier.sources.source import RowReader, Source, open_sources

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
