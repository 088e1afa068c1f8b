"""Runs on the folder of a tiny model whose class may come with its files, and on a file of rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare
from luthier.training.fit import fit


def made_model(folder: Path) -> Any:
    """The model that the folder describes, with the same random weights every time."""
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(folder)).eval()


def config_of(folder: Path, tmp_path: Path, rows: Sequence[dict[str, Any]], **changes: Any) -> RunConfig:
    """A run of 8 steps of one row; ``changes`` are ``section__name=value``."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(folder), "random_init": True},
        "data": {"train": [{"path": str(path)}], "store": str(tmp_path / "store"), "max_length": 256, "workers": 0},
        "train": {
            "max_steps": 8, "learning_rate": 1e-2, "warmup_steps": 0, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
        },
        "output": {"dir": str(tmp_path / "out")},
        "tracking": {"progress": False, "logging_steps": 1},
        "runtime": {"device": "cpu", "seed": 1, "threads": 1},
    }  # fmt: skip
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return RunConfig.model_validate(tree)


def trained(config: RunConfig) -> Any:
    """The result of a run."""
    encoder = Encoder.from_config(config)
    return fit(config, encoder, prepare(config, encoder))
