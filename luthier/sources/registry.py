"""Registries: files that name data sets. LLaMA-Factory's ``dataset_info.json`` and its v1 YAML form are read.

A registry's entry becomes a `SourceConfig`; nothing of it is left after that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from luthier.config.explain import nearest_names
from luthier.config.schema import DataConfig, Format, SourceConfig
from luthier.errors import RowError, SourceError, install_hint
from luthier.sources.origins import HUB, MODELSCOPE
from luthier.sources.rows import decode_strict

_NAME = re.compile(r"^(?P<name>.+?)(?:#(?P<count>[1-9][0-9]*))?$")
_JSON_KEYS = {
    "file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "formatting", "ranking",
    "subset", "split", "folder", "num_samples", "columns", "tags",
}  # fmt: skip
_YAML_KEYS = {"path", "source", "split", "converter", "size", "weight", "streaming"}
# Ours, in both forms: how its files are read, what is learned of it, and which of its rows.
_OWN_KEYS = (
    "train_on", "targets", "thinking", "thinking_tags", "same_role", "text_limit", "first_rows", "documents",
    "separator",
)  # fmt: skip
_FORMATTINGS = {"alpaca": Format.ALPACA, "sharegpt": Format.SHAREGPT, "openai": Format.MESSAGES}
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
    train = [registry_source(name, entries, data.registry) for name in data.use]
    if data.use_weights:
        weighed = zip(train, data.use_weights, strict=True)
        train = [source.model_copy(update={"weight": weight}) for source, weight in weighed]
    held_out = [registry_source(name, entries, data.registry) for name in data.eval_use]
    return [*data.train, *train], [*data.eval, *held_out]


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
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _FORMATTINGS:
        raise SourceError(f"{where}: formatting {formatting!r} is unknown", hint=f"known are {', '.join(_FORMATTINGS)}")
    kind = _FORMATTINGS[formatting]
    if kind is Format.ALPACA and isinstance(columns, dict) and set(columns) == {"prompt"}:
        kind = Format.AUTO  # {prompt: text} and no response is plain text, if the rows have no answer either
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
