"""Sources: raw rows of files, the Hub and presets become conversations, documents, preferences and feedback.

Read in this order: nearest, strict_json, rows, files, text_files, columnar, origins, formats.layout, formats.media,
formats.targets, formats.thinking, formats.tools, formats.turns, formats.reading, formats.convert, formats.table,
detect, source, registry.
"""

from luthier.sources.registry import resolve_sources
from luthier.sources.rows import RawRow, RowBytes
from luthier.sources.source import RowReader, Source, open_sources

__all__ = ["RawRow", "RowBytes", "RowReader", "Source", "open_sources", "resolve_sources"]
