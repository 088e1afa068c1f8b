"""LLaMA-Factory's own preprocessing of a ShareGPT file with a column of images, without a model.

Arguments: model folder, rows, cutoff, folder for its files. The ids of every row go to ids.jsonl in that folder.
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

NO_LIMIT = 1 << 40  # pixels: it would first resize to 768 * 768 by itself; without, its tokens are the processor's


def main() -> None:
    model, rows, cutoff, folder = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    columns = {"messages": "conversations", "images": "images"}
    about = {"rows": {"file_name": str(rows), "formatting": "sharegpt", "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(about))
    model_args, data_args, training_args, _, _ = get_train_args(
        {
            "stage": "sft",
            "do_train": True,
            "model_name_or_path": model,
            "dataset": "rows",
            "dataset_dir": str(folder),
            "template": "qwen2_vl",
            "cutoff_len": cutoff,
            "image_max_pixels": NO_LIMIT,
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
    with (folder / "ids.jsonl").open("w") as lines:
        for ids in data["input_ids"]:
            lines.write(json.dumps(list(ids)) + "\n")
    num_tokens = sum(len(ids) for ids in data["input_ids"])
    tell(cost, version=version("llamafactory"), tokens=num_tokens, rows=len(data))


main()
