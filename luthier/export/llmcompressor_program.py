"""Quantizes a model folder by llmcompressor, in an environment that has it.

llmcompressor needs other versions of torch and transformers than Luthier. So the Python of that environment runs this
file as a program, which imports nothing of Luthier's; a JSON file, which `luthier.export.quantizing` writes, says what
is to be done.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def compress(job: dict[str, Any]) -> None:
    """Write ``job["target"]`` of the folder ``job["whole"]``, whose weights are whole.

    model_class  its class in transformers
    scheme       a preset of compressed-tensors by its name, or the settings of one group of layers
    ignore       names of linear layers that keep their bits
    ids          token ids to calibrate on, a list for each context; none: the scheme needs no data
    """
    datasets, transformers = importlib.import_module("datasets"), importlib.import_module("transformers")
    llmcompressor = importlib.import_module("llmcompressor")
    modifiers = importlib.import_module("llmcompressor.modifiers.quantization")
    model = getattr(transformers, job["model_class"]).from_pretrained(job["whole"], dtype="auto", local_files_only=True)
    scheme, ids = job["scheme"], job["ids"]
    layers = {"scheme": scheme, "targets": "Linear"} if isinstance(scheme, str) else {"config_groups": {"all": scheme}}
    kind = modifiers.GPTQModifier if ids else modifiers.QuantizationModifier
    calibration = {}
    if ids:
        rows = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
        calibration = {
            "dataset": datasets.Dataset.from_dict(rows),
            "num_calibration_samples": len(ids),
            "max_seq_length": max(map(len, ids)),
            "shuffle_calibration_samples": False,
        }
    llmcompressor.oneshot(model=model, recipe=[kind(**layers, ignore=job["ignore"])], **calibration)
    model.save_pretrained(job["target"], save_compressed=True, max_shard_size=job["max_shard_size"])


if __name__ == "__main__":
    compress(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
