"""LLaMA-Factory's own preprocessing of a ShareGPT file, without a model.

Arguments: model folder, rows, cutoff, folder for its files.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
from metering import Meter, tell


def main() -> None:
    model, rows, cutoff, folder = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    about = {"rows": {"file_name": str(rows), "formatting": "sharegpt", "columns": {"messages": "conversations"}}}
    (folder / "dataset_info.json").write_text(json.dumps(about))
    model_args, data_args, training_args, _, _ = get_train_args(
        {
            "stage": "sft",
            "do_train": True,
            "model_name_or_path": model,
            "dataset": "rows",
            "dataset_dir": str(folder),
            "template": "qwen3",
            "cutoff_len": cutoff,
            "neat_packing": True,
            "overwrite_cache": True,
            "output_dir": str(folder / "output"),
            "report_to": "none",
            "use_cpu": True,
        }
    )
    tokenizers = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizers["tokenizer"], data_args)
    meter = Meter()
    data = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokenizers)["train_dataset"]
    cost = meter.read()
    num_tokens = sum(int(sum(1 for place in mask if place)) for mask in data["attention_mask"])
    tell(cost, version=version("llamafactory"), tokens=num_tokens, rows=len(data))


main()
