"""What files of other tools name: models in local folders, splits of data sets, files beside their own, and among
these DeepSpeed's, by which several processes share a model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from luthier.config.peers.translation import Translator
from luthier.config.tree import MappingNode, plain
from luthier.config.yaml_text import parse_yaml
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


def mapping_beside(reading: Translator, key: str, path: object) -> JsonObject:
    """What a YAML file says that theirs names by ``key``; nothing, and a problem, where it is no mapping."""
    if (file := beside(str(path), reading.name)) is None:
        reading.refuse(key, f"there is no such file: {path}", "paths start from the current directory")
        return {}
    try:
        parsed = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, ValueError) as error:
        reading.refuse(key, f"{file} cannot be read: {error}")
        return {}
    reading.problems += parsed.problems
    if not isinstance(parsed.tree, MappingNode):
        reading.refuse(key, f"{file} is no mapping of keys to values")
        return {}
    return {name: plain(value) for name, value in parsed.tree.entries.items()}


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


# ------------------------------------------------------------------------------------------------ files of DeepSpeed's


# axolotl's, LLaMA-Factory's
_ZERO = re.compile(r"(?:^|/)(?:deepspeed_configs/zero|ds_z)([0-3])(?!\w*autotp)\w*\.json$")


def read_sharing(reading: Translator) -> None:
    """How several processes share a model: by a file of DeepSpeed's, or by FSDP."""
    if (settings := reading.take("deepspeed")) is not None:
        share_as_deepspeed(reading, settings)
    if reading.take("fsdp") not in (None, "", False, []):
        reading.set("runtime.sharding", "fsdp", "fsdp")


def share_as_deepspeed(reading: Translator, path: object) -> None:
    """What a file of DeepSpeed's says, or its settings themselves, of sharing a model between processes.

    Axolotl's own files, such as ``deepspeed_configs/zero3_bf16.json``, are known by their names.
    """
    if isinstance(path, dict):
        settings: Any = path
    elif (file := beside(str(path), reading.name)) is None and (known := _ZERO.search(str(path))) is not None:
        settings = {"zero_optimization": {"stage": int(known[1])}}
    elif file is None:
        reading.refuse("deepspeed", f"there is no such file: {path}", "paths start from the current directory")
        return
    else:
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reading.refuse("deepspeed", f"{file} is not JSON: {error}")
            return
    if not isinstance(settings, dict) or not isinstance(zero := settings.get("zero_optimization", {}), dict):
        reading.refuse("deepspeed", "its settings are no mapping with zero_optimization: {stage: 3}")
        return
    stage = zero.get("stage", 0)
    reading.set("runtime.sharding", "fsdp" if stage else "none", "deepspeed")
    if "tensor_parallel" in settings:
        reading.refuse("deepspeed", "its tensor_parallel divides single products", "use a file without it")
    what = "shares weights, gradients and optimizer state (runtime.sharding: fsdp)" if stage else "shares nothing"
    moved = [zero.get(key) for key in ("offload_optimizer", "offload_param")]
    offloads = any(isinstance(each, dict) and each.get("device", "none") != "none" for each in moved)
    alone = "on one GPU, runtime.sharding=none train.offload=optimizer do so"
    kept = f"; nothing is moved to the CPU, which only costs GPU memory ({alone})" if offloads else ""
    reading.told.append(f"deepspeed: ZeRO-{stage} {what}{kept}")
    clip = settings.get("gradient_clipping")
    if isinstance(clip, int | float) and "max_grad_norm" not in reading.entries:
        reading.set("train.max_grad_norm", clip, "deepspeed")
