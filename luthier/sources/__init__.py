"""Sources: raw rows of files, the Hub and presets become conversations, documents, preferences and feedback."""

from luthier.sources.registry import resolve_sources
from luthier.sources.rows import RawRow, RowBytes
from luthier.sources.source import RowReader, Source, open_sources

__all__ = ["RawRow", "RowBytes", "RowReader", "Source", "open_sources", "resolve_sources"]
