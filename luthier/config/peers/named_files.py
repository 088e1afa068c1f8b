"""What files of other tools name: models in local folders, splits of data sets, and files beside their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from luthier.writing import JsonObject


def has_own_template(model: str) -> bool | None:
    """Whether a model in a local folder brings a chat template; None for one that is elsewhere.

    Raises nothing: what cannot be read is told where the model is loaded.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def config_of(model: str) -> JsonObject:
    """The config.json of a model in a local folder; nothing for one that is elsewhere, or cannot be read."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def config_in_cache(model: str) -> JsonObject:
    """The same of a model of the Hub, where it was downloaded before; nothing is asked of the network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return {}
    return config_of(str(Path(file).parent)) if isinstance(file, str) else {}


def beside(path: str, name: str) -> Path | None:
    """A path of theirs starts from the folder that LLaMA-Factory is run in, which is above its examples."""
    starts = [Path(), *Path(name).resolve().parents]
    return next((start / path for start in starts if (start / path).is_file()), None)


def rows_of_split(split: str) -> tuple[str, JsonObject] | None:
    """The name of a split of local files and the keys that take its rows; None for what cannot be read.

    >>> rows_of_split("train[:100]"), rows_of_split("test[90%:]")
    (('train', {'first_rows': 100}), ('test', {'slice': '90%:'}))
    """
    match = re.fullmatch(r"([\w.-]+)(?:\[([-\d_%]*:[-\d_%]*)\])?", split)
    if match is None:
        return None
    part = (match[2] or "").replace("_", "")
    if part in ("", ":"):
        return match[1], {}
    if re.fullmatch(r":[1-9]\d*", part):
        return match[1], {"first_rows": int(part[1:])}
    start, _, end = part.partition(":")
    if "%" in part:  # datasets takes both for shares where one is
        start, end = (f"{number.rstrip('%')}%" if number else "" for number in (start, end))
    return match[1], {"slice": f"{start}:{end}"}
