"""One rank of runs that draw their answers: ``python tiny_drawn_ranks.py FOLDER JOBS``, jobs as JSON by name.

Beside a run are its notes, the first gradient, and how many micro-batches each rank has learned from in each step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_rollouts import evenness, micro_batch_counts, step_gradients
from tiny_runs import make_config, make_data, make_segments

from luthier.encoding.tokenizer import load_tokenizer
from luthier.metrics import METRICS, Metric
from luthier.training.fit import fit_data


def main() -> None:
    torch.set_num_threads(1)
    METRICS._rows["evenness"] = Metric(of_row=evenness)
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, changes in jobs.items():
        config = make_config(folder / name, **changes)
        notes: list[str] = []
        data = make_data(make_segments(12), make_segments(3) if config.eval.generate_rows else ())
        with step_gradients() as gradients, micro_batch_counts() as counts:
            fit_data(
                config,
                load_tokenizer("preset:tiny-qwen3"),
                data,
                on_event=lambda event, notes=notes: notes.append(getattr(event, "text", "")),  # type: ignore[misc]
            )
        (folder / f"{name}.rank{os.environ['RANK']}.json").write_text(json.dumps(counts))
        if notes:  # the first rank has something to say
            (folder / f"{name}.notes").write_text("\n".join(notes))
            save_file({"first": gradients[0]}, folder / f"{name}.gradients")


if __name__ == "__main__":
    main()
