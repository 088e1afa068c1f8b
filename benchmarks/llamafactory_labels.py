"""LLaMA-Factory's training files, unchanged but for paths: the ids and labels of its own data path beside ours.

    LUTHIER_SHARED=… python -m benchmarks.llamafactory_labels --python LLAMA_FACTORYS_PYTHON [--rows 40] [FILE …]

Both read the same rows with the same tokenizer and chat template. A row counts as equal when all of its sequences have
the same ids and the same labels; the first difference of each file is printed. Plain text is compared as one stream,
for LLaMA-Factory cuts all texts together into blocks and throws the last one away.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare
from luthier.records import Sample

SCRIPT = Path(__file__).parent / "harness" / "peers" / "llamafactory_labels.py"
PRESETS = Path(__file__).resolve().parents[1] / "luthier" / "presets" / "models"
IGNORED = -100
# File of their examples -> whose tokenizer: a folder of the shared tokenizers with a template of TRL's, or a preset.
QWEN3, LLAMA3, QWEN3_VL = ("qwen3", "qwen3_instruct_2507"), ("llama3_1", "llama3"), ("tiny-qwen3-vl", None)
FILES: dict[str, tuple[str, str | None]] = {
    "train_lora/qwen3_lora_pretrain.yaml": QWEN3,
    "train_lora/qwen3_lora_sft.yaml": QWEN3,
    "train_lora/qwen3_lora_dpo.yaml": QWEN3,
    "train_lora/qwen3_lora_kto.yaml": QWEN3,
    "train_lora/qwen3_lora_reward.yaml": QWEN3,
    "train_full/qwen3_full_sft.yaml": QWEN3,
    "train_qlora/qwen3_lora_sft_otfq.yaml": QWEN3,
    "extras/loraplus/llama3_lora_sft.yaml": LLAMA3,
    "extras/galore/llama3_full_sft.yaml": LLAMA3,
    "extras/llama_pro/llama3_freeze_sft.yaml": LLAMA3,
    "train_lora/qwen3vl_lora_sft.yaml": QWEN3_VL,
    "train_full/qwen3vl_full_sft.yaml": QWEN3_VL,
}


def model_folder(name: str, template: str | None, shared: Path, folder: Path) -> Path:
    """A folder that both tools take for a model: a tokenizer, a chat template, a small config."""
    made = folder / name
    if made.exists():
        return made
    if template is None:
        shutil.copytree(PRESETS / name, made)
        processor = json.loads((made / "processor_config.json").read_text(encoding="utf-8"))
        processor["image_processor"]["size"] = {"shortest_edge": 65536, "longest_edge": 16777216}  # as Qwen3-VL's
        (made / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
        return made
    shutil.copytree(shared / "tokenizers" / name, made, copy_function=shutil.copyfile)
    made.chmod(0o755)
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    shutil.copyfile(Path(spec.origin).parent / "chat_templates" / f"{template}.jinja", made / "chat_template.jinja")
    config = PRESETS / ("tiny-llama" if name.startswith("llama") else "tiny-qwen3") / "config.json"
    shutil.copyfile(config, made / "config.json")
    return made


def sequences(sample: Sample) -> list[dict[str, list[int]]]:
    """Ids and labels of each path from the root of a sample to a leaf."""
    starts = [0]
    for branch in sample.branches:
        starts.append(starts[-1] + branch.length)
    parents = {branch.parent for branch in sample.branches}
    found = []
    for leaf in (number for number in range(len(sample.branches)) if number not in parents):
        path, number = [], leaf
        while number >= 0:
            path.append(number)
            number = sample.branches[number].parent
        places = [place for number in reversed(path) for place in range(starts[number], starts[number + 1])]
        ids = [int(sample.input_ids[place]) for place in places]
        labels = [token if sample.target[place] else IGNORED for token, place in zip(ids, places, strict=True)]
        found.append({"ids": ids, "labels": labels})
    return found


def ours(file: Path, keys: dict[str, Any], folder: Path) -> list[list[dict[str, list[int]]]]:
    """The rows of the same file, read by Luthier."""
    overrides = [f"{key}={'null' if value is None else value}" for key, value in keys.items()]
    run = load_config(file, [*overrides, f"data.store={folder / 'store'}", "data.workers=0"])
    prepared = prepare(run, Encoder.from_config(run))
    return [sequences(prepared.train[row]) for row in range(len(prepared.train))]


def verdict(theirs: list[dict[str, list[int]]], mine: list[dict[str, list[int]]]) -> str:
    """How the sequences of one row differ."""
    if len(theirs) != len(mine):
        return f"{len(theirs)} sequences, ours {len(mine)}"
    if any(one["ids"] != other["ids"] for one, other in zip(theirs, mine, strict=True)):
        return "other ids"
    if theirs == mine:
        return "equal"
    behind = all(_only_behind_ends(one["labels"], other["labels"]) for one, other in zip(theirs, mine, strict=True))
    return BEHIND if behind else "other labels"


BEHIND = "equal but for the line break behind an answer's end token, which LLaMA-Factory learns, too"


def _only_behind_ends(theirs: list[int], mine: list[int]) -> bool:
    """True if theirs learns one token more behind each stretch that both learn, and nothing else."""
    differ = [place for place, (left, right) in enumerate(zip(theirs, mine, strict=True)) if left != right]
    return all(mine[place] == IGNORED and place and mine[place - 1] == theirs[place - 1] != IGNORED for place in differ)


def compare(theirs: list[Any], mine: list[Any]) -> str:
    """How many rows are equal, and how the first that are not differ."""
    if theirs and len({len(row[0]["ids"]) for row in theirs}) == 1 and len(theirs) < len(mine):
        blocks = [token for row in theirs for token in row[0]["ids"]]
        texts = [token for row in mine for token in row[0]["ids"]]
        what = "are those of our texts" if texts[: len(blocks)] == blocks else "are not those of our texts"
        return f"the {len(blocks)} ids of {len(theirs)} blocks {what}, of {len(texts)}"
    tally = Counter(verdict(left, right) for left, right in zip(theirs, mine, strict=False))
    if (left := len(theirs)) != (right := len(mine)):
        tally[f"LLaMA-Factory has {left} rows, ours {right}"] += 1
    return "; ".join(f"{count} {what}" for what, count in tally.items())


def first_difference(theirs: list[Any], mine: list[Any]) -> str:
    """Where the first row with other ids or labels differs."""
    for number, (left, right) in enumerate(zip(theirs, mine, strict=False)):
        if verdict(left, right).startswith("other"):
            for one, other in zip(left, right, strict=True):
                for key in ("ids", "labels"):
                    pairs = enumerate(zip(one[key], other[key], strict=False))
                    place = next((place for place, (a, b) in pairs if a != b), min(len(one[key]), len(other[key])))
                    if one[key] != other[key]:
                        lengths = f"{len(one[key])}, ours {len(other[key])}"
                        around = one[key][max(0, place - 3) : place + 8], other[key][max(0, place - 3) : place + 8]
                        return f"  row {number + 1}, {key} from {place} (length {lengths}): {around}"
    return ""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--python", required=True)
    options.add_argument("--rows", type=int, default=40)
    options.add_argument("files", nargs="*", default=list(FILES))
    chosen = options.parse_args()
    shared = Path(os.environ["LUTHIER_SHARED"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in chosen.files:
            file = shared / "data" / "peers" / "llamafactory" / "examples" / name
            keys = {
                "model_name_or_path": str(model_folder(*FILES[name], shared, folder)),
                "dataset_dir": str(shared / "data" / "demo"),
                "max_samples": chosen.rows,
                "output_dir": str(folder / "output"),
                "tokenized_path": None,
            }
            answer = folder / "rows.json"
            command = [chosen.python, str(SCRIPT), str(file), json.dumps(keys), str(answer)]
            subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
            theirs = json.loads(answer.read_text(encoding="utf-8"))
            mine = ours(file, keys, folder)
            print(f"{name}: {compare(theirs, mine)}\n{first_difference(theirs, mine)}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
