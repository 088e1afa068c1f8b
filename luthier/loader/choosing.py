"""Whether a run's rows are prepared while it trains, and where the process that does so leaves them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from luthier.config.choices import MixtureBy
from luthier.config.inputs import MediaCache
from luthier.config.schema import Packing, RunConfig, SourceConfig
from luthier.errors import SourceError
from luthier.loader.run_settings import units_of
from luthier.sources import resolve_sources
from luthier.sources.files import find_files
from luthier.store.manifest import FEEDS
from luthier.store.store import store_folder

BYTES_WORTH_A_FEED = 32_000_000  # of files: less is prepared in the time that the model takes to load


def prepares_meanwhile(config: RunConfig) -> bool:
    """The answer depends on the config and the files' sizes alone, never on what the store has."""
    if config.train.packing is not Packing.WINDOW or config.data.prepare == "before":
        return False
    if units_of(config).are_compared:  # partners are drawn from the whole set, and pairs are planned as a whole
        return False
    if config.media.cache is not MediaCache.NONE:  # the encoders see all items before training
        return False
    if config.data.mixture.by is MixtureBy.TOKENS:  # shares of tokens need all lengths
        return False
    if config.data.prepare == "meanwhile":
        return True
    return _num_bytes(resolve_sources(config.data)[0]) >= BYTES_WORTH_A_FEED


def feed_folder(config: RunConfig) -> Path:
    """One for each output folder, beside the store: the same on all ranks."""
    name = hashlib.sha256(str(config.output.dir.resolve()).encode()).hexdigest()[:16]
    return store_folder(config.data.store, "").parent / FEEDS / name


def _num_bytes(sources: list[SourceConfig]) -> int:
    total = 0
    for source in sources:
        try:
            total += sum(file.size for file in find_files(source))
        except SourceError:  # not of files, or missing: whoever opens it says so
            return 0
    return total
