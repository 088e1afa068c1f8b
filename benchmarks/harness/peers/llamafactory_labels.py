"""The ids and labels that LLaMA-Factory's own data path makes of a training file, without a model.

Arguments: the file, a JSON object of keys that win over it (null removes a key), and a file for the answer: of each row
its sequences, each with ids and labels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer

STAGES = {"dpo": "rm"}  # as its workflow of DPO asks for rows
ON_A_DEVICE = ("bf16", "fp16", "deepspeed", "ddp_timeout", "quantization_bit", "quantization_method", "use_galore",
               "double_quantization", "galore_layerwise", "pure_bf16", "flash_attn", "use_muon", "use_adam_mini",
               "use_badam", "use_apollo", "optim", "enable_liger_kernel", "fsdp", "ref_model", "badam_switch_mode",
               "badam_switch_interval", "badam_verbose", "badam_mode", "galore_target", "galore_rank",
               "galore_scale", "loraplus_lr_ratio")  # fmt: skip


def sequences(row: dict) -> list[dict]:
    """One of plain rows, two of pairs."""
    if "chosen_input_ids" in row:
        return [{"ids": row[f"{side}_input_ids"], "labels": row[f"{side}_labels"]} for side in ("chosen", "rejected")]
    return [{"ids": row["input_ids"], "labels": row.get("labels", row["input_ids"])}]


def main() -> None:
    described = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    described |= {"use_cpu": True, "report_to": "none", "overwrite_cache": True, "preprocessing_num_workers": None}
    for key in ON_A_DEVICE:
        described.pop(key, None)
    for key, value in json.loads(sys.argv[2]).items():
        described.pop(key, None)
        if value is not None:
            described[key] = value
    model_args, data_args, training_args, finetuning_args, _ = get_train_args(described)
    tokenizers = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizers["tokenizer"], data_args)
    stage = STAGES.get(finetuning_args.stage, finetuning_args.stage)
    rows = get_dataset(template, model_args, data_args, training_args, stage=stage, **tokenizers)["train_dataset"]
    Path(sys.argv[3]).write_text(json.dumps([sequences(row) for row in rows]), encoding="utf-8")


main()
