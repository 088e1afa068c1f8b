"""How several processes share a model, in the words of other tools: files of DeepSpeed's, and FSDP."""

from __future__ import annotations

import json
import re
from typing import Any

from luthier.config.peers.named_files import beside
from luthier.config.peers.translation import Translator

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
