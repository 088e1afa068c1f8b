"""The path of a row from its file to its loss: each stage is one call, and each hands on one record.

    python examples/path_of_a_row.py [--out output/path_of_a_row]

The commands do the same with processes, a store and a plan between the stages; no other code decides what is trained.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import luthier
from luthier.encoding.encoder import Encoder
from luthier.layout.cutting import cut_segment
from luthier.presets import model_folder
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources

ROW = {
    "messages": [
        {"role": "user", "content": "Which way is north?"},
        {"role": "assistant", "content": "Up the map."},
        {"role": "user", "content": "And south?"},
        {"role": "assistant", "content": "Down, if <|im_end|> is text to you."},
    ]
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("output/path_of_a_row"))
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")

    # 1. The run description: typed, with every default filled in. All its faults are told at once, by line.
    config = luthier.load_config(
        {
            "model": "preset:tiny-qwen3",
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, "store": str(folder / "store")},
            "output": {"dir": str(folder)},
        }
    )

    # 2. sources: the bytes of a file become a dict, and the dict a record. The format was found out from the rows.
    train_sources, _ = resolve_sources(config.data)
    (source,) = open_sources(train_sources, seed=config.runtime.seed)
    raw = next(source.rows())
    assert not isinstance(raw, luthier.RowError), raw  # a row that cannot be read comes as the error that says why
    row = source.convert(raw)
    assert isinstance(row, luthier.Conversation)
    print(f"{row.address}: a {type(row).__name__} of {len(row.messages)} messages")

    # 3. rendering: the chat template runs with strings that know where they came from, so that each piece has an owner.
    encoder = Encoder.from_config(config)
    rendered = encoder.render(row)
    print(f"rendered: {sum(map(len, rendered.paths))} pieces in {len(rendered.paths)} context(s)")

    # 4. encoding: pieces become ids. Text is encoded where no control token is within its reach; what the model itself
    # has to emit is a target, which was decided when the piece was made.
    sample = encoder.encode(row)
    print(f"encoded: {len(sample.input_ids)} tokens, {int(sample.target.sum())} of them targets")
    print(f"learned: {encoder.tokenizer.decode(sample.input_ids[sample.target])!r}")

    # 5. layout: the token tree becomes segments, which attend to nothing but themselves; too long ones are cut here.
    segments = [
        cut
        for segment in sample.segments()
        for cut in cut_segment(segment, max_length=config.data.max_length, overflow=config.data.overflow)
    ]

    # 6. packing: which segments share a row of a batch.
    packs = luthier.plan_packs([len(segment) for segment in segments], config.data.max_length)
    print(f"packed: {len(segments)} segment(s) in {len(packs)} row(s)")

    # 7. collation: tensors. The one place that shifts: the label at position t is the id that t has to predict.
    batch = luthier.collate(segments, capacity=config.data.max_length)
    print(f"collated: {tuple(batch.labels_BT.shape)}, {batch.num_targets} targets, inputs {sorted(batch.model_inputs)}")

    # 8. the model, and the sum of the losses of its targets. It is divided once, by the targets of the whole step.
    torch.manual_seed(config.runtime.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("tiny-qwen3")))
    logits_BTV: torch.Tensor = model(**batch.model_inputs).logits
    found = luthier.token_loss_sum(logits_BTV.flatten(0, 1), batch.labels_BT.flatten())
    print(f"loss per target: {found.loss_sum.item() / found.num_targets:.3f}")


if __name__ == "__main__":
    main()
