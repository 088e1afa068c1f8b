"""TRL's preparation of a data set for SFTTrainer.

Arguments: model folder, rows as messages, cutoff, folder for its files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import trl
from datasets import load_dataset
from metering import Meter, tell
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

COST: dict[str, float] = {}


class Trainer(trl.SFTTrainer):
    """Measures the preparation that its base does when it is made."""

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        meter = Meter()
        data = super()._prepare_dataset(*args, **kwargs)
        COST.update(meter.read())
        return data


def main() -> None:
    model, rows, cutoff, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"  # the one whose answers TRL can find
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    meter = Meter()
    data = load_dataset("json", data_files=rows, split="train", cache_dir=str(folder / "cache"))
    reading = meter.read()
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)),
        args=trl.SFTConfig(
            output_dir=str(folder / "output"),
            max_length=cutoff,
            packing=True,
            assistant_only_loss=True,
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=data,
        processing_class=tokenizer,
    )
    cost = {name: COST[name] + reading[name] for name in COST}
    num_tokens = sum(map(len, trainer.train_dataset["input_ids"]))
    tell(cost, version=trl.__version__, tokens=num_tokens, rows=len(data))


main()
