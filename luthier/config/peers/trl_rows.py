"""The data sets of a file of TRL's, and what it does with their rows by the columns that the first one has.

TRL decides by columns whether rows are conversations, texts or pairs. Local files are looked into, nothing is fetched;
what cannot be read is told where rows are read.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from luthier.config import plain
from luthier.config.choices import rows_of_slice
from luthier.config.peers import DEFAULTS, config_of, rows_of_split
from luthier.config.peers.translation import Translator, names_of
from luthier.writing import JsonObject, counted

_BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # what TRL names in place of a data set, beside data_files
_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_NO_LIMIT = 131_072  # tokens, where `max_length: null` asks for no limit and the model tells none
_MOST_FILES = 10_000  # of a folder that one is looked for in
_JSON, _CELLS, _TABLES = {".json", ".jsonl", ".ndjson"}, {".csv": ",", ".tsv": "\t"}, {".parquet"}
_SAY_NOTHING = {  # to TRL: our columns by the kind of rows
    "text": {"weight"}, "messages": {"system", "weight"}, "prompt_completion": {"history", "system", "weight"},
    "feedback": {"history", "query", "system", "weight"}, "preference": {"history", "query", "system", "weight"},
}  # fmt: skip
_FOUND_AS = {"query": {"input"}, "system": {"system", "system_prompt"}, "weight": {"weight", "loss_weight"}}
_FIRST_BYTES = 4 << 20  # of a JSON file: a first row that is longer is not looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class RowColumns:
    """The columns of a row. ``texts`` are those that hold a text."""

    names: frozenset[str]
    texts: frozenset[str] = frozenset()

    @property
    def kind(self) -> str | None:
        """What such rows are, by the names that the trainers of Hugging Face give columns; None: they do not say."""
        for kind, needed in (("preference", {"chosen", "rejected"}), ("feedback", {"completion", "label"}),
                             ("prompt_completion", {"prompt", "completion"})):  # fmt: skip
            if needed <= self.names:
                return kind
        if {"messages", "conversations"} & self.names:
            return "messages"
        return "text" if "text" in self.names else None


def columns_of(path: str, split: str = "train") -> RowColumns | None:
    """The columns of the first row of a file, or of the file of this split in a folder; None where none can be read."""
    file = _first_file(Path(path).expanduser(), split)
    if file is None:
        return None
    try:
        if file.suffix in _TABLES:
            schema = pyarrow.parquet.read_schema(file)
            texts = (name for name in schema.names if pa.types.is_string(schema.field(name).type))
            return RowColumns(names=frozenset(schema.names), texts=frozenset(texts))
        if file.suffix in _CELLS:
            with file.open(encoding="utf-8-sig", newline="") as cells:
                header = frozenset(next(csv.reader(cells, delimiter=_CELLS[file.suffix]), ()))
            return RowColumns(names=header, texts=header)
        return _of_json(file)
    except (OSError, ValueError, RecursionError, csv.Error, pa.ArrowException):
        return None


def _first_file(path: Path, split: str) -> Path | None:
    known = _JSON | set(_CELLS) | _TABLES
    if path.is_file():
        return path if path.suffix in known else None
    seen = sorted(itertools.islice(path.rglob("*"), _MOST_FILES)) if path.is_dir() else []
    files = [file for file in seen if file.suffix in known and not file.name.startswith(("dataset_", "."))]
    of_split = [file for file in files if split in (file.stem.split("-")[0], file.parent.name)]
    return next(iter(of_split or files), None)


def _of_json(file: Path) -> RowColumns | None:
    """The first object of a JSON array, or of lines."""
    with file.open("rb") as content:
        text = content.read(_FIRST_BYTES).decode("utf-8-sig", errors="ignore").lstrip().removeprefix("[").lstrip()
    row, _ = json.JSONDecoder().raw_decode(text)
    if not isinstance(row, dict):
        return None
    there = {name: value for name, value in row.items() if value is not None}
    texts = (name for name, value in there.items() if isinstance(value, str))
    return RowColumns(names=frozenset(there), texts=frozenset(texts))


# ------------------------------------------------------------------ what the other functions ask


def objective_of(reading: Translator) -> str:
    """Our name of what is learned, once it is known."""
    found: Any = plain(reading.tree)
    return str(found["objective"]["name"])


def learns(reading: Translator) -> str | None:
    """What of a row is learned, as ``template.train_on`` says it; None where TRL lets the columns decide."""
    if objective_of(reading) not in ("sft", "pt") or reading.flag("assistant_only_loss"):
        return "assistant"
    whole = reading.take("completion_only_loss")
    return None if whole is None else "assistant" if whole else "all"


def evaluates(reading: Translator) -> bool:
    """Whether TRL looks at held-out rows at all."""
    return str(reading.take("eval_strategy") or "no").lower() not in ("no", "false")


def sources_of(reading: Translator) -> list[JsonObject]:
    """The training sets that are read so far, as we write them."""
    found: Any = plain(reading.tree)
    return list(found.get("data", {}).get("train", ()))


def first_rows(reading: Translator) -> RowColumns | None:
    """The columns of the first data set, where they can be seen."""
    mixture, split = _value(reading, "datasets"), _value(reading, "dataset_train_split")
    first = mixture[0] if isinstance(mixture, list) and mixture else mixture
    if not first:
        first = {"path": _value(reading, "dataset_name"), "split": split or "train"}
    if not isinstance(first, dict) or not isinstance(first.get("path"), str):
        return None
    return _rows_of({**first, "path": _files_of(reading, first)[0]})


def _value(reading: Translator, key: str) -> Any:
    return plain(reading.entries[key]) if key in reading.entries else None


# ------------------------------------------------------------------ data sets


def read_data(reading: Translator) -> None:
    """``dataset_name`` or the mixture ``datasets`` -> ``data.train`` and ``data.eval``."""
    mixture, name = reading.take("datasets"), reading.take("dataset_name")
    if mixture:
        if name is not None:
            reading.passed["dataset_name"] = "TRL passes it over too, where datasets is given"
        _mixture(reading, mixture)
        reading.read |= {"dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"}
    elif name is None:
        reading.refuse("dataset_name", "no data set is named", "for example dataset_name: OWNER/NAME, or a file")
    else:
        _named(reading, str(name))
    if mixture:
        reading.copy("data.eval_split", "test_split_size")
    else:
        reading.pass_over(("test_split_size",), "TRL reads it beside datasets alone; here too, none are held out")
    reading.read |= {"streaming", "dataset_text_field"}


def _named(reading: Translator, name: str) -> None:
    given = {
        "path": name,
        "name": reading.take("dataset_config"),
        "streaming": reading.flag("dataset_streaming"),
    }
    for ours, key in (("data.train", "dataset_train_split"), ("data.eval", "dataset_test_split")):
        split = str(reading.take(key))
        if ours == "data.train" or evaluates(reading):
            if os.path.isfile(name) and (
                _is_other_slice(split) or (ours == "data.eval" and not _is_held_out(reading, split))
            ):
                reading.refuse(key, f"one file has no split {split}, and a run is not evaluated on what it learns",
                               "write dataset_train_split: train[:90%] and dataset_test_split: train[90%:], or "
                               f"datasets: [{{path: {name}}}] and test_split_size: 0.1")  # fmt: skip
            reading.set(ours, [_source(reading, {**given, "split": split})], "dataset_name")
            reading.origins[f"{ours}[0]"] = "dataset_name"
            for field, theirs in (("split", key), ("subset", "dataset_config"), ("streaming", "dataset_streaming")):
                reading.origins[f"{ours}[0].{field}"] = theirs


def _mixture(reading: Translator, mixture: object) -> None:
    listed = mixture if isinstance(mixture, list) else [mixture]
    sources: list[JsonObject] = []
    places: list[str] = []
    shares = [entry.get("fraction") for entry in listed if isinstance(entry, dict)]
    for index, entry in enumerate(listed):
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            reading.refuse(
                f"datasets[{index}]", "this entry names no path", "for example datasets: [{path: OWNER/NAME}]"
            )
            return
        for key in entry.keys() - {"path", "name", "data_dir", "data_files", "split", "columns", "fraction"}:
            reading.refuse(f"datasets[{index}].{key}", "TRL knows no such key of a data set", "remove it")
        for path in _files_of(reading, entry):
            places.append(f"datasets[{index}]")
            if _is_local(path) and _is_other_slice(str(entry.get("split"))):
                what = f"of files, {entry['split']} is not taken"
                reading.refuse(f"datasets[{index}].split", what, "write train[:1000] or train[10%:90%]")
            source = _source(reading, {**entry, "path": path, "streaming": reading.flag("streaming")})
            sources.append({**source, **({"weight": entry.get("fraction") or 1.0} if any(shares) else {})})
    reading.set("data.train", sources, "datasets")
    for index, (source, place) in enumerate(zip(sources, places, strict=True)):
        reading.set(f"data.train[{index}]", source, place)
    if any(shares):
        if len(sources) != len(listed):
            reading.refuse("datasets", "a fraction is given beside an entry of several files",
                           "give each entry one file")  # fmt: skip
        reading.set("data.mixture.by", "rows", "datasets")
        reading.set("data.mixture.stop", "first", "datasets")
        reading.told.append(
            "datasets: the fractions hold in each epoch, each with rows of its own; TRL takes the first"
        )
    if evaluates(reading) and reading.take("test_split_size") is None:
        reading.refuse("eval_strategy", "no rows are held out of datasets", "add test_split_size: 0.05")


def _files_of(reading: Translator, entry: Mapping[str, Any]) -> list[str]:
    """The paths that one entry of ``datasets`` names, as the function ``datasets.load_dataset`` reads it."""
    path, files, folder = str(entry["path"]), entry.get("data_files"), str(entry.get("data_dir") or "")
    if isinstance(files, dict):
        files = files.get(str(entry.get("split") or "train"))
    if not files and not folder and path in _BUILDERS:
        reading.refuse("datasets", f"{path} says how files are written, and no file is named", "add data_files")
    if not files:
        return [str(Path(path) / folder) if folder else path]
    if path in _BUILDERS or _is_local(path):
        start = Path(folder) if path in _BUILDERS else Path(path) / folder
        return [str(start / file) for file in names_of(files)]
    reading.refuse("datasets", f"single files of {path} are on the Hub", "download them, and name their paths")
    return [path]


def _is_local(path: str) -> bool:
    begins = path.startswith(("preset:", "hub:", "/", "./", "../", "~"))
    return begins or path.endswith(_SUFFIXES) or os.path.exists(path)


def _rows_of(given: Mapping[str, Any]) -> RowColumns | None:
    """The columns that an entry names, or that its rows have."""
    if given.get("columns"):
        return RowColumns(names=frozenset(names_of(given["columns"])))
    split = str(given.get("split") or "train").partition("[")[0]
    return columns_of(str(given["path"]), split) if _is_local(str(given["path"])) else None


def _is_held_out(reading: Translator, split: str) -> bool:
    """Whether a split of the one file there is has no rows of the split that is learned, by their brackets."""
    many, taken = 1_000_000, []
    for each in (split, str(reading.take("dataset_train_split"))):
        name, part = rows_of_split(each) or ("", {})
        if name != "train":
            return False
        taken.append(rows_of_slice(part.get("slice") or f":{part.get('first_rows', '')}", many))
    return max(taken[0].start, taken[1].start) >= min(taken[0].stop, taken[1].stop)


def _is_other_slice(split: str) -> bool:
    """Whether a split is cut in a way that is not read of files."""
    return "[" in split and rows_of_split(split) is None


def _source(reading: Translator, given: Mapping[str, Any]) -> JsonObject:
    """One data set as we write it. Columns that say something here and nothing to TRL are not read."""
    source, rows = _formatted(reading, given), _rows_of(given)
    if rows is None or objective_of(reading) == "rl":
        return source
    silent = _SAY_NOTHING.get("text" if source.get("format") == "text" else str(rows.kind), set())
    columns = left_out(silent, rows) | source.get("columns", {})
    return {**source, "columns": columns} if columns else source


def left_out(unread: Iterable[str], rows: RowColumns) -> dict[str, str]:
    """The settings by which those of our columns are not read that rows have, under any of the usual names."""
    return {ours: "none" for ours in sorted(unread) if rows.names & _FOUND_AS.get(ours, {ours})}


def _formatted(reading: Translator, given: Mapping[str, Any]) -> JsonObject:
    """One data set with what TRL does by the columns of its rows."""
    path, split = str(given["path"]), str(given.get("split") or "train")
    local, rows = _is_local(path), _rows_of(given)
    source: JsonObject = {"path": path if local else f"hub:{path}"}
    if local and (cut := rows_of_split(split)):
        split = cut[0]
        source |= cut[1]
    if split != "train" and not os.path.isfile(path):
        source["split"] = split
    if given.get("name") is not None:
        source["subset"] = str(given["name"])
    if given.get("streaming") and not local:
        source["streaming"] = True
    field = _value(reading, "dataset_text_field")
    if field not in (None, "text", "messages", "conversations") and (rows is None or field in rows.names):
        return {**source, "format": "text", "columns": {"text": str(field)}}
    kind = None if rows is None else rows.kind
    if objective_of(reading) != "sft":
        return {**source, "format": kind} if given.get("columns") and kind not in (None, "messages") else source
    if kind == "text":
        source["format"] = "text"
    if kind in ("prompt_completion", "feedback"):
        source["format"] = "prompt_completion"
        if rows is not None and {"prompt", "completion"} <= rows.texts:  # TRL joins them without a template
            source |= {"format": "text", "columns": {"text": "completion", "prompt": "prompt"}}
        if learns(reading) == "all":
            source["train_on"] = "all"
        elif learns(reading) is None and source["format"] != "text":
            source["train_on"] = "assistant"
    return source


# ------------------------------------------------------------------ what is learned of a row, and how long it may be


def read_lessons(reading: Translator) -> None:
    """What is learned of a row: conversations whole, unless told, and of prompt and completion the latter alone."""
    learned, sources, objective = learns(reading), sources_of(reading), objective_of(reading)
    undecided = [source for source in sources if "train_on" not in source and source.get("format") != "text"]
    if objective in ("sft", "pt"):
        of = "completion_only_loss" if _is_given(reading, "completion_only_loss") else "assistant_only_loss"
        reading.set("template.train_on", learned or "all", of)
        if learned is None and undecided:
            from_hub = any(source["path"].startswith("hub:") for source in undecided)
            reading.told.append(
                "assistant_only_loss: TRL learns conversations whole, questions too, unless it is true"
                + ("; set completion_only_loss where rows are prompt and completion" if from_hub else "")
            )
    elif any(source["path"].startswith("hub:") for source in sources) or _has_plain_pairs(reading):
        reading.told.append(
            "prompts and answers that are plain text pass the chat template; TRL joins them as they are"
        )
    if _is_given(reading, "chat_template_path"):
        _template(reading, str(reading.take("chat_template_path")))
    if (token := reading.take("eos_token")) is not None:
        reading.set("data.document_end", str(token), "eos_token")
        reading.told.append("eos_token: it ends plain texts; answers end as the chat template ends them")
    is_whole = learned != "assistant" and (not sources or any("train_on" not in source for source in sources))
    _too_long(reading, is_whole=is_whole)


def _is_given(reading: Translator, key: str) -> bool:
    return reading.take(key) is not None


def _has_plain_pairs(reading: Translator) -> bool:
    rows = first_rows(reading)
    told = {"prompt"} if objective_of(reading) == "rl" else {"chosen", "completion"}
    return rows is not None and bool(told & rows.texts)


def _template(reading: Translator, template: str) -> None:
    """A Jinja file, or a tokenizer's folder that holds one."""
    path = Path(template).expanduser()
    inside = path / "chat_template.jinja"
    if path.is_dir() and inside.is_file():
        reading.set("template.chat_template", str(inside), "chat_template_path")
    elif path.suffix in (".jinja", ".jinja2") or path.is_file():
        reading.set("template.chat_template", template, "chat_template_path")
    else:
        what = f"{template} is no Jinja file, nor a folder with a chat_template.jinja"
        reading.refuse("chat_template_path", what, "download the tokenizer, or name a template (docs/templates.md)")


PACKING_STRATEGIES = ("bfd", "bfd_split", "wrapped", "ffd")  # the last is the first's older name


def _packing(reading: Translator) -> str:
    """``train.packing``."""
    packed, how = reading.flag("packing"), str(reading.take("packing_strategy") or "bfd")
    if how not in PACKING_STRATEGIES:
        hint = f"write one of {', '.join(PACKING_STRATEGIES)}"
        reading.refuse("packing_strategy", f"{how!r} is none of its values", hint)
    sources = sources_of(reading)
    if packed and how == "wrapped" and all(source.get("format") == "text" for source in sources):
        reading.set("objective.name", "pt", "packing_strategy")
    cuts = packed and how == "wrapped" and objective_of(reading) == "pt"
    ours = "split" if cuts else "window" if packed else "none"
    reading.set("train.packing", ours, "packing")
    if packed and how == "wrapped" and not cuts:
        reading.told.append(
            "packing_strategy: rows share packs whole; objective.name=pt cuts plain text where packs end"
        )
    if (both := reading.take("eval_packing")) is not None and bool(both) is not packed:
        reading.passed["eval_packing"] = "held-out rows are packed as the others are: the loss is the same"
    return ours


def _too_long(reading: Translator, *, is_whole: bool) -> None:
    """``data.max_length`` and ``data.overflow``. ``is_whole``: rows are learned whole, their end like any of it."""
    most, objective = reading.take("max_length"), objective_of(reading)
    prompt, answer = (reading.take(key) for key in ("max_prompt_length", "max_completion_length"))
    if objective == "rl" and isinstance(prompt, int):
        most = prompt + (answer if isinstance(answer, int) else DEFAULTS["max_completion_length"])
    is_limit, packing = most is not None, _packing(reading)
    splits = packing == "split" or (packing == "window" and reading.take("packing_strategy") == "bfd_split")
    if not is_limit:
        model = str(plain(reading.entries["model_name_or_path"]))
        most = config_of(model).get("max_position_embeddings", _NO_LIMIT)
    reading.set("data.max_length", most, "max_prompt_length" if objective == "rl" else "max_length")
    reading.set("data.max_drop", 0.5, "max_length")  # their runs never stop for rows that are lost
    if splits:
        overflow, what = "split", "is cut into several"
    elif objective in ("rm", "rl") or not is_limit:
        said = "; TRL cuts the beginning of its prompt off" if objective == "rl" else ", as in TRL"
        overflow, what = "drop", "is dropped" + (said if is_limit else "; TRL has no limit then")
    elif is_whole:
        overflow, what = "truncate", "loses its end, as in TRL"
    else:
        overflow = "keep_answer"
        what = "loses the oldest turns of its prompt, never its answer; TRL cuts the end off"
    reading.set("data.overflow", overflow, "max_length")
    reading.told.append(f"max_length: a row over {counted(most, 'token')} {what}; the report counts such rows")
    if reading.take("truncation_mode") == "keep_end":
        reading.told.append("truncation_mode: the end of a row that is too long is not kept instead of its beginning")


def train_all_parts(reading: Translator, key: str) -> None:
    """All of a multimodal model, its tower too, for tools that freeze none; a model of the Hub tells later."""
    if {"vision_config", "audio_config"} & config_of(str(plain(reading.entries[key]))).keys():
        reading.set("adapter.train_parts", ["language_model", "projector", "tower"], key)
