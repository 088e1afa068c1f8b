"""Where rows come from: local files, the Hugging Face Hub, or a data set that comes with Luthier.

An origin is small and picklable: it opens what it needs when its rows are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from luthier.config.schema import SourceConfig
from luthier.errors import ModelError, RowError, SourceError, install_hint
from luthier.records import Address
from luthier.sources.columnar import count_columnar_rows, encode_row, read_columnar_file, table_rows
from luthier.sources.files import DataFile, find_files
from luthier.sources.rows import RowBytes
from luthier.sources.text_files import read_text_file

if TYPE_CHECKING:
    import datasets

HUB = "hub:"
MODELSCOPE = "modelscope:"
PRESET = "preset:"
_ROWS_PER_BATCH = 1000


def modelscope_folder(
    name: str, *, revision: str, cache_dir: Path | None, patterns: list[str] | None = None
) -> Path | None:
    """The files of a model on ModelScope, fetched by its own library, where ``USE_MODELSCOPE_HUB`` is 1 or true as
    LLaMA-Factory has it; else None. ``patterns`` choose files by their names. Raises `ModelError`."""
    if os.environ.get("USE_MODELSCOPE_HUB", "").lower() not in ("1", "true", "y"):
        return None
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        hint = "pip install modelscope; or unset the variable, and models come from Hugging Face"
        raise ModelError(f"USE_MODELSCOPE_HUB is set, and modelscope, which fetches {name}, is not installed",
                         hint=hint) from error  # fmt: skip
    version = None if revision == "main" else revision  # its own default is called master
    try:
        return Path(snapshot_download(name, revision=version, cache_dir=cache_dir, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} cannot be fetched from ModelScope: {error}",
                         hint="check the name and the network, or unset USE_MODELSCOPE_HUB") from error  # fmt: skip


class Origin(Protocol):
    """The rows of a source, always the same ones in the same order."""

    def rows(self) -> Iterator[RowBytes | RowError]:
        """All rows; raises `SourceError` if the origin cannot be read."""
        ...

    def count(self) -> int | None:
        """How many rows there are; None if only reading a stream to its end would tell."""
        ...


def open_origin(config: SourceConfig) -> Origin:
    """The origin that a source's path means; raises `SourceError` if there is nothing there."""
    if config.path.startswith((HUB, MODELSCOPE)):
        return _hub_origin(config)
    if config.streaming:
        raise SourceError(f"{config.path}: streaming is for the Hub", hint="local files are always read as a stream")
    if config.path.startswith(PRESET):
        return PresetRows(name=config.path.removeprefix(PRESET), split=config.split)
    return LocalFiles(files=find_files(config))


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalFiles:
    """Files of one kind, read one after the other. A file that changes while it is in use is refused."""

    files: tuple[DataFile, ...]

    def rows(self) -> Iterator[RowBytes | RowError]:
        """All rows of all files."""
        for file in self.files:
            file.check_unchanged()
            yield from _read_file(file)
            file.check_unchanged()

    def count(self) -> int:
        """Rows of all files, broken ones too."""
        total = 0
        for file in self.files:
            file.check_unchanged()
            total += count_columnar_rows(file) if file.is_columnar else sum(1 for _ in _read_file(file))
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class HubRows:
    """A split of a data set of the Hub, through the `datasets` library."""

    name: str
    folder: str | None
    subset: str | None
    split: str
    revision: str | None
    streaming: bool
    hub: str = HUB

    def rows(self) -> Iterator[RowBytes | RowError]:
        """All rows; pictures and sounds stay encoded, for they are read as Arrow tables."""
        row = 1
        try:
            for table in self.load().with_format("arrow").iter(batch_size=_ROWS_PER_BATCH):
                yield from table_rows(table, self.address, first_row=row)
                row += table.num_rows
        except OSError as error:
            raise SourceError(f"{self.hub}{self.name}: the stream broke off after row {row - 1}: {error}") from error

    def count(self) -> int | None:
        """The size of the split; None for a stream."""
        return None if self.streaming else int(self.load().num_rows)

    @property
    def address(self) -> str:
        """What the addresses of its rows call it."""
        return f"{self.hub}{self.name}[{self.split}]"

    def load(self) -> datasets.Dataset | datasets.IterableDataset:
        """The data set as `datasets` has it; raises `SourceError`."""
        try:
            import datasets
        except ImportError as error:
            hint = f"{install_hint('hub')}; or download the data set and give its folder"
            raise SourceError(f"{HUB}{self.name}: the package 'datasets' is not installed", hint=hint) from error
        try:
            if self.hub == MODELSCOPE:
                return self._from_modelscope()
            return datasets.load_dataset(
                self.name,
                name=self.subset,
                data_dir=self.folder,
                split=self.split,
                revision=self.revision,
                streaming=self.streaming,
            )
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            hint = "check name, subset, split and the network; a downloaded folder works as a path too"
            raise SourceError(f"{self.hub}{self.name}: cannot be loaded: {error}", hint=hint) from error

    def _from_modelscope(self) -> datasets.Dataset | datasets.IterableDataset:
        """The same from ModelScope, by its own library."""
        try:
            from modelscope import MsDataset
        except ImportError as error:
            hint = "pip install 'modelscope[datasets]'; or download the data set and give its folder"
            raise SourceError(f"{self.hub}{self.name}: the package 'modelscope' is not installed", hint=hint) from error
        found = MsDataset.load(
            self.name,
            subset_name=self.subset,
            data_dir=self.folder,
            split=self.split,
            version=self.revision,
            use_streaming=self.streaming,
        )
        made: datasets.Dataset | datasets.IterableDataset = (
            found.to_hf_dataset() if isinstance(found, MsDataset) else found
        )
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetRows:
    """A data set that comes with Luthier."""

    name: str
    split: str

    def rows(self) -> Iterator[RowBytes | RowError]:
        """All rows of the split."""
        for row, data in enumerate(self._generate(), start=1):
            yield encode_row(data, Address(file=f"{PRESET}{self.name}[{self.split}]", row=row))

    def count(self) -> int:
        """Rows of the split."""
        return sum(1 for _ in self._generate())

    def _generate(self) -> Iterator[dict[str, object]]:
        from luthier.presets.datasets import dataset_rows

        return dataset_rows(self.name, self.split)


def _read_file(file: DataFile) -> Iterator[RowBytes | RowError]:
    return read_columnar_file(file) if file.is_columnar else read_text_file(file)


def _hub_origin(config: SourceConfig) -> HubRows:
    """``hub:owner/name`` or ``hub:name``; a third component and on is a folder: ``hub:owner/name/python``."""
    hub = MODELSCOPE if config.path.startswith(MODELSCOPE) else HUB
    parts = config.path.removeprefix(hub).split("/")
    if not all(parts):
        raise SourceError(f"{config.path}: a data set of the Hub is named {hub}OWNER/NAME")
    return HubRows(
        hub=hub,
        name="/".join(parts[:2]),
        folder="/".join(parts[2:]) or None,
        subset=config.subset,
        split=config.split,
        revision=config.revision,
        streaming=config.streaming,
    )
