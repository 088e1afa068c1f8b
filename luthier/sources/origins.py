"""Where rows come from: local files, the Hugging Face Hub, or a data set that comes with Luthier.

An origin is small and picklable: it opens what it needs when its rows are asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from luthier.config.choices import Format
from luthier.config.explain import nearest_names
from luthier.config.inputs import DataConfig, SourceConfig
from luthier.errors import ModelError, RowError, SourceError, install_hint
from luthier.records import Address
from luthier.sources import RowBytes, decode_strict
from luthier.sources.columnar import count_columnar_rows, encode_row, read_columnar_file, table_rows
from luthier.sources.detect import NO_COLUMN
from luthier.sources.files import DataFile, find_files
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
        for row, data in enumerate(self._generate(), start=1):
            yield encode_row(data, Address(file=f"{PRESET}{self.name}[{self.split}]", row=row))

    def count(self) -> int:
        return sum(1 for _ in self._generate())

    def _generate(self) -> Iterator[dict[str, object]]:
        from luthier.presets import dataset_rows

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


# -------------------------------------------------------------------------------- registries: files that name data sets


_NAME = re.compile(r"^(?P<name>.+?)(?:#(?P<count>[1-9][0-9]*))?$")
_JSON_KEYS = {
    "file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "formatting", "ranking",
    "subset", "split", "folder", "num_samples", "columns", "tags",
}  # fmt: skip
_YAML_KEYS = {"path", "source", "split", "converter", "size", "weight", "streaming"}
# Ours, in both forms: how its files are read, what is learned of it, and which of its rows.
_OWN_KEYS = (
    "train_on", "targets", "thinking", "thinking_tags", "same_role", "text_limit", "first_rows", "documents",
    "separator", "slice",
)  # fmt: skip
_FORMATTINGS = {"alpaca": Format.ALPACA, "sharegpt": Format.SHAREGPT, "openai": Format.MESSAGES}
# Columns that LLaMA-Factory reads only where an entry names them.
_UNNAMED = {Format.ALPACA: ("system", "tools", "history"), Format.SHAREGPT: ("system", "tools"),
            Format.MESSAGES: ("system", "tools")}  # fmt: skip
_CONVERTERS = {"alpaca": Format.ALPACA, "sharegpt": Format.SHAREGPT, "pair": Format.PREFERENCE}


def resolve_sources(data: DataConfig) -> tuple[list[SourceConfig], list[SourceConfig]]:
    """The sources to train on and to evaluate on: those that the config lists, then those it names of the registry.

    What a source leaves open and ``data`` says for all of them is filled in.
    """
    train, held_out = _listed_and_named(data)
    return [_filled_in(source, data) for source in train], [_filled_in(source, data) for source in held_out]


def _filled_in(source: SourceConfig, data: DataConfig) -> SourceConfig:
    same_role = data.same_role if source.same_role is None else source.same_role
    text_limit = data.text_limit if source.text_limit is None else source.text_limit
    first = data.first_rows if source.first_rows is None else source.first_rows
    root = data.media_root if source.media_root is None else source.media_root
    filled = {"same_role": same_role, "text_limit": text_limit, "first_rows": first, "media_root": root}
    return source.model_copy(update=filled)


def _listed_and_named(data: DataConfig) -> tuple[list[SourceConfig], list[SourceConfig]]:
    named = [*data.use, *data.eval_use]
    if data.registry is None:
        if named:
            hint = "set data.registry, or list paths in data.train"
            raise SourceError(f"data sets are named ({', '.join(named)}), but there is no registry", hint=hint)
        return list(data.train), list(data.eval)
    entries = read_registry(data.registry)
    train = _named("data.use", data.use, entries, data.registry)
    if data.use_weights:
        weighed = zip(train, data.use_weights, strict=True)
        train = [source.model_copy(update={"weight": weight}) for source, weight in weighed]
    return [*data.train, *train], [*data.eval, *_named("data.eval_use", data.eval_use, entries, data.registry)]


def _named(key: str, names: Sequence[str], entries: Mapping[str, object], registry: Path) -> list[SourceConfig]:
    try:
        return [registry_source(name, entries, registry) for name in names]
    except SourceError as error:
        error.key = key
        raise


def read_registry(path: Path) -> dict[str, object]:
    """The entries of a registry by name; raises `SourceError` if it cannot be read."""
    if str(path).startswith(HUB):
        path = _of_hub(str(path), "dataset_info.json")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: the registry cannot be read: {error}") from error
    try:
        entries = decode_strict(text) if path.suffix == ".json" else YAML(typ="safe", pure=True).load(text)
    except (RowError, YAMLError) as error:
        raise SourceError(f"{path}: the registry is not well-formed: {error}") from error
    if not isinstance(entries, dict):
        raise SourceError(f"{path}: a registry is an object: names of data sets, and what each is")
    return entries


def _of_hub(place: str, name: str) -> Path:
    """A file of a data set of the Hub, downloaded; raises `SourceError`."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise SourceError(
            f"{place}: the package 'huggingface_hub' is not installed", hint=install_hint("hub")
        ) from error
    try:
        return Path(hf_hub_download(place.removeprefix(HUB), name, repo_type="dataset"))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        hint = "check the name and the network; the folder of a copy works as a registry too"
        raise SourceError(f"{place}: {name} cannot be downloaded: {error}", hint=hint) from error


def registry_source(name: str, entries: Mapping[str, object], registry: Path) -> SourceConfig:
    """The source called ``name`` (or ``name#1000``: 1000 of its rows); raises `SourceError` that says what is wrong."""
    match = _NAME.match(name)
    key, count = (name, None) if match is None or name in entries else (match["name"], match["count"])
    if key not in entries:
        close = nearest_names(key, map(str, entries))
        hint = f"did you mean {close}?" if close else f"it has: {', '.join(sorted(map(str, entries))[:20])}"
        raise SourceError(f"{registry}: there is no data set called {key!r}", hint=hint)
    entry, where = entries[key], f"{registry}: {key}"
    if not isinstance(entry, dict):
        raise SourceError(f"{where}: an entry is an object with a file_name, hf_hub_url or path")
    fields = _from_yaml(entry, registry, where) if "path" in entry else _from_json(entry, registry, where)
    fields |= {key: entry[key] for key in _OWN_KEYS if key in entry}
    if count is not None:
        fields["max_rows"] = int(count)
    try:
        return SourceConfig.model_validate({field: value for field, value in fields.items() if value is not None})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise SourceError(f"{where}: {faults}") from error


def _from_json(entry: Mapping[str, object], registry: Path, where: str) -> dict[str, object]:
    """An entry of ``dataset_info.json``."""
    _check_keys(entry, _JSON_KEYS, where)
    columns = entry.get("columns") or {}
    formatting = str(entry.get("formatting", "alpaca"))
    if formatting not in _FORMATTINGS:
        raise SourceError(f"{where}: formatting {formatting!r} is unknown", hint=f"known are {', '.join(_FORMATTINGS)}")
    kind = _FORMATTINGS[formatting]
    if kind is Format.ALPACA and isinstance(columns, dict) and set(columns) == {"prompt"}:
        kind = Format.AUTO  # {prompt: text} and no response is plain text, if the rows have no answer either
    elif isinstance(columns, dict):
        columns = dict.fromkeys(_UNNAMED.get(kind, ()), NO_COLUMN) | columns
    path, folder = _json_path(entry, registry, where), entry.get("folder")
    return {
        "path": f"{path}/{folder}" if folder else path,
        "format": kind,
        "columns": columns,
        "tags": entry.get("tags"),
        "split": entry.get("split"),
        "subset": entry.get("subset"),
        "max_rows": entry.get("num_samples"),
    }


def _json_path(entry: Mapping[str, object], registry: Path, where: str) -> str:
    if entry.get("file_name") and str(registry).startswith(HUB):
        return str(_of_hub(str(registry), str(entry["file_name"])))
    if entry.get("file_name"):
        return str(registry.parent / str(entry["file_name"]))
    if entry.get("hf_hub_url"):
        return f"{HUB}{entry['hf_hub_url']}"
    if entry.get("ms_hub_url"):
        return f"{MODELSCOPE}{entry['ms_hub_url']}"
    others = sorted(_JSON_KEYS.intersection(entry) & {"om_hub_url", "script_url", "cloud_file_name"})
    if others:
        hint = "download it and use file_name, or add its hf_hub_url"
        raise SourceError(f"{where}: only {', '.join(others)} is given, which Luthier does not read", hint=hint)
    raise SourceError(f"{where}: says neither file_name nor hf_hub_url")


def _from_yaml(entry: Mapping[str, object], registry: Path, where: str) -> dict[str, object]:
    """An entry of LLaMA-Factory v1's YAML form."""
    _check_keys(entry, _YAML_KEYS, where)
    converter = entry.get("converter")
    if converter is not None and converter not in _CONVERTERS:
        raise SourceError(f"{where}: converter {converter!r} is unknown", hint=f"known are {', '.join(_CONVERTERS)}")
    weight = entry.get("weight")
    match entry.get("source", "hf_hub"):
        case "local":
            path = str(_local_path(str(entry["path"]), registry))
        case "hf_hub":
            path = f"{HUB}{entry['path']}"
        case other:
            raise SourceError(f"{where}: source {other!r} is not read", hint="known are hf_hub, local")
    return {
        "path": path,
        "format": _CONVERTERS.get(converter) if converter else None,
        "split": entry.get("split"),
        "max_rows": entry.get("size"),
        "weight": weight,
        "streaming": entry.get("streaming"),
    }


def _local_path(path: str, registry: Path) -> Path:
    """Paths of v1 stand in ``data/info.yaml`` as ``data/x.jsonl``; relative to the registry's own folder is as good."""
    candidates = [registry.parent / path, registry.parent.parent / path]
    return next((candidate for candidate in candidates if candidate.exists()), candidates[0])


def _check_keys(entry: Mapping[str, object], known: set[str], where: str) -> None:
    known = known.union(_OWN_KEYS)
    for key in entry:
        if key not in known:
            close = nearest_names(str(key), known)
            hint = f"did you mean {close}?" if close else f"known are {', '.join(sorted(known))}"
            raise SourceError(f"{where}: there is no key {key!r}", hint=hint)
