"""The data sets of a file of ms-swift's, how their rows are written, and how long they may be."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from luthier.config.peers import SWIFT_DEFAULTS, config_in_cache, config_of, trl_rows
from luthier.config.peers.translation import Translator, names_of
from luthier.writing import counted

_COLUMNS = {"query": "prompt", "response": "response", "system": "system", "messages": "messages", "tools": "tools",
            "images": "images", "videos": "videos", "audios": "audios"}  # fmt: skip
_HUBS = ("HF::", "MS::")


def kind_of(reading: Translator) -> str | None:
    kind = reading.take("rlhf_type")
    return None if kind is None else str(kind)


def _is_pt(reading: Translator) -> bool:
    objective: Any = reading.tree.entries.get("objective")
    return objective is not None and objective.entries["name"].value == "pt"


def read_data(reading: Translator) -> None:
    for key, ours in (("dataset", "data.train"), ("val_dataset", "data.eval")):
        listed = reading.take(key)
        listed = [listed] if isinstance(listed, str) else listed
        if not listed:
            continue
        if not isinstance(listed, list):
            reading.refuse(key, "this is a list of paths and names", f"for example {key}: [rows.jsonl]")
            continue
        sources = [source for index, each in enumerate(listed) if (source := _source(reading, key, index, str(each)))]
        if sources:
            reading.set(ours, sources, key)
    reading.set("data.same_role", "merge", "dataset")
    share, stop = reading.take("split_dataset_ratio"), reading.take("stopping_strategy")
    if share and not reading.take("val_dataset"):
        reading.set("data.eval_split", share, "split_dataset_ratio")
    shares = reading.take("interleave_prob")
    if shares:
        reading.set("data.mixture.by", "rows", "interleave_prob")
        reading.set("data.mixture.stop", "all" if stop == "all_exhausted" else "first", "stopping_strategy")
        weights = shares if isinstance(shares, list) else [shares]
        count = len(names_of(reading.take("dataset")))
        if len(weights) != count:
            what = f"these are {counted(len(weights), 'share')} of {counted(count, 'data set')}"
            return reading.refuse("interleave_prob", what, "give one number for each")
        for index, weight in enumerate(weights):
            reading.set(f"data.train[{index}].weight", weight, "interleave_prob")
    if reading.take("dataset_shuffle") is False:
        reading.told.append("dataset_shuffle: every epoch has an order of its own, which runtime.seed fixes")


def _source(reading: Translator, key: str, index: int, text: str) -> dict[str, object] | None:
    """``ID_OR_PATH:SUBSET#COUNT``, of which the last two may be left out."""
    at = key if isinstance(reading.take(key), str) else f"{key}[{index}]"
    from_hf = text.startswith("HF::") or (reading.flag("use_hf") and not text.startswith("MS::"))
    name, _, count = next((text.removeprefix(hub) for hub in _HUBS if text.startswith(hub)), text).partition("#")
    source: dict[str, object] = {"max_rows": int(count)} if count.isdecimal() else {}
    if source:
        reading.told.append(f"{at}: of a data set with fewer rows all are taken once, where ms-swift repeats them")
    if count and not source:
        reading.refuse(at, f"{count!r} behind # is no number of rows", "several data sets are a list")
    columns = _columns(reading)
    if columns.keys() == {"response"} and _is_pt(reading):
        source |= {"format": "text", "columns": {"text": columns["response"]}}
    elif columns:
        source["columns"] = columns
    if (found := trl_rows.columns_of(name)) is not None and not columns:
        source |= _laid_out(reading, found.names)
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~", "preset:")) or Path(name).suffix:
        return {"path": name, **source}
    name, _, subset = name.partition(":")
    if name == "swift/self-cognition":
        reading.refuse(at, f"{name}: its rows have places for model_name and model_author, which are not filled in",
                       "remove it, or write its rows into a file with the names in their places")  # fmt: skip
        return None
    if subset:
        source["subset"] = subset
    return {"path": f"{'hub' if from_hf else 'modelscope'}:{name}", **source}


def _laid_out(reading: Translator, names: Collection[str]) -> dict[str, object]:
    """Local rows in the columns that ms-swift alone uses."""
    worse = {"rejected_response", "rejected_messages"} & set(names)
    if "messages" in names:  # swift sft learns the messages alone
        return {"columns": {"rejected": "none"}} if worse and kind_of(reading) is None else {}
    if not {"query", "response"} <= set(names):
        return {}
    if worse and kind_of(reading) is not None:
        columns = {"prompt": "query", "chosen": "response", "rejected": "rejected_response"}
        return {"format": "preference", "columns": columns}
    return {"format": "alpaca", "columns": {"prompt": "query", "response": "response"}}


def _columns(reading: Translator) -> dict[str, str]:
    """Theirs say what a column is, ours which column is it."""
    said = reading.take("columns")
    try:
        named = json.loads(said) if isinstance(said, str) else said or {}
    except ValueError:
        named = None
    if not isinstance(named, dict):
        reading.refuse("columns", "this is no mapping of columns to names", 'for example columns: {"text": "query"}')
        return {}
    for name in named.values():
        if name not in _COLUMNS:
            reading.refuse("columns", f"{name} is no column of theirs", f"write one of {', '.join(_COLUMNS)}")
    return {_COLUMNS[name]: str(column) for column, name in named.items() if name in _COLUMNS}


def read_template(reading: Translator) -> None:
    if reading.take("template") is not None:
        reading.told.append(
            "template: the model's own chat template is used, not one that ms-swift has under this name"
        )
    if reading.take("agent_template") is not None:
        reading.told.append("agent_template: tools and calls are written by the model's own chat template")
    for key in ("add_non_thinking_prefix", "preserve_thinking"):
        if reading.take(key) is not None:
            reading.told.append(f"{key}: the model's own chat template says where thoughts stand")
    if (system := reading.take("system")) is not None:
        file, text = Path(str(system)), str(system)
        text = file.read_text(encoding="utf-8") if file.suffix == ".txt" and file.is_file() else text
        reading.set("template.default_system", text.replace("\\n", "\n"), "system")
    scales = names_of(str(reading.take("loss_scale") or "default").replace("+", ","))
    ways = {"last_round": "last_assistant", "all": "all"}
    for scale in scales:
        if scale in ways and reading.take("rlhf_type") is None:
            reading.set("template.train_on", ways[scale], "loss_scale")
        elif scale in ("default", "all"):
            if reading.take("rlhf_type") is not None and "loss_scale" in reading.entries:
                reading.told.append("loss_scale: of a conversation the last answer is judged, not all of them")
        elif scale.startswith("ignore_empty_think"):
            pass  # told below, as it is ms-swift's default for models with a thinking switch
        elif scale == "hermes":
            reading.set("template.targets", [{"part": "tool_call", "weight": 2.0}], "loss_scale")
            reading.told.append("loss_scale: hermes counts a tool call twice; here without the tags around it")
        elif scale not in ways:
            reading.refuse("loss_scale", f"{scale} weighs parts of answers by patterns", "write weights into the "
                           "rows, or rules into the targets of a data set (docs/targets.md)")  # fmt: skip
    is_pt = _is_pt(reading)
    if not is_pt and kind_of(reading) not in ("grpo", "rm"):
        reading.told.append("loss_scale: an empty thought that the chat template puts before an answer is learned, and "
                            "earlier thoughts stand as a chat shows them")  # fmt: skip
    is_written = reading.take("use_chat_template")
    if is_pt and not is_written:  # swift pt joins the texts of messages, and learns all of them
        reading.set("template.chat_template", "plain", "use_chat_template" if is_written is False else "objective.name")
    elif is_written is False and "objective.name" in reading.origins:
        reading.refuse("use_chat_template", "conversations are written by a chat template",
                       "add objective.name=pt to the command if the rows are plain text")  # fmt: skip
    if is_pt and reading.take("loss_scale") is None:
        reading.set("template.train_on", "all", "objective.name")


def read_lengths(reading: Translator) -> None:
    model, asked = str(reading.take("model")), reading.take("max_length")
    config = config_of(model) or config_in_cache(model)
    most = asked or config.get("text_config", config).get("max_position_embeddings")
    if most is None:
        reading.told.append("max_length: 4,096 tokens, Luthier's default; ms-swift has the model's own limit")
    else:
        answer = reading.take("max_completion_length") or SWIFT_DEFAULTS["max_completion_length"]
        if kind_of(reading) == "grpo" and isinstance(asked, int) and isinstance(answer, int):
            most = asked + answer  # theirs is the prompt's alone
        reading.set("data.max_length", most, "max_length")
    how = str(reading.take("truncation_strategy"))
    if kind_of(reading) == "grpo" and "truncation_strategy" in reading.defaults:
        how = "left"
    ways = {"delete": "drop", "left": "keep_answer", "right": "truncate", "split": "split"}
    if how not in ways:
        reading.refuse("truncation_strategy", f"{how} is no way", f"write one of {', '.join(ways)}")
        return
    reading.set("data.overflow", ways[how], "truncation_strategy")
    reading.set("data.max_drop", 0.5, "truncation_strategy")  # their runs never stop for rows that are lost
    if how == "left":
        reading.told.append("truncation_strategy: a row that is too long loses the oldest turns of its prompt, and no "
                            "token of its answer")  # fmt: skip
    is_packed = reading.flag("packing")
    reading.set("train.packing", "window" if is_packed else "none", "packing")
    if (length := reading.take("packing_length")) not in (None, most):
        reading.told.append(f"packing_length: packs have max_length tokens, not {length}")
