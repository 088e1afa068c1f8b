"""Axolotl's own preprocessing of rows as messages, without a model. Arguments: model folder, rows, cutoff, folder."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    # imported here, since the processes that axolotl spawns import this file anew
    from axolotl.cli.config import load_cfg
    from axolotl.loaders import load_tokenizer
    from axolotl.utils.data import prepare_datasets
    from metering import Meter, tell

    model, rows, cutoff, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    about = {
        "base_model": model,
        "datasets": [{"path": rows, "ds_type": "json", "type": "chat_template", "field_messages": "messages"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "dataset_num_proc": 1,
        "sequence_len": cutoff,
        "excess_length_strategy": "truncate",
        "sample_packing": True,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "learning_rate": 0.0001,
        "output_dir": str(folder / "output"),
    }
    file = folder / "run.yaml"  # JSON is YAML
    file.write_text(json.dumps(about), encoding="utf-8")
    cfg = load_cfg(str(file), is_preprocess=True)
    tokenizer = load_tokenizer(cfg)
    meter = Meter()
    data = prepare_datasets(cfg, tokenizer)[0]
    cost = meter.read()
    tell(cost, version=version("axolotl"), tokens=sum(map(len, data["input_ids"])), rows=len(data))


if __name__ == "__main__":
    main()
