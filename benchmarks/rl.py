"""What a step of a run costs that learns from answers of its own: drawing them, learning from them, and all else.

Prompts of about 512 tokens are answered with 64 tokens n times each, by a small model with random weights, which hardly
ever stops by itself. The same steps are taken with each prompt beside each of its answers in a padded batch, and once
for all of them. Beside that, drawing alone: `LocalEngine` and transformers' ``generate``, both with log-probabilities.
CPU-seconds of one thread; medians of three steps or rounds, after one that is not counted.

python -m benchmarks.rl [--prompts 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

import luthier
from luthier.config.schema import GenerateConfig, RunConfig
from luthier.engines.engine import Request
from luthier.engines.local import LocalEngine
from luthier.models.model import load_model
from luthier.models.vocabulary import Vocabulary
from luthier.training.rollouts.drawing import Rollouts
from luthier.training.trainer import Trainer

WORDS, NEW_TOKENS, ROUNDS = 450, 64, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": "none", "per_device_train_batch_size": 8},
    "shared": {"packing": "best_fit", "per_device_train_batch_size": 1},
}
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32}
PARTS = {"drawing": (Rollouts, "_drawn"), "learning": (Trainer, "_learn"), "step": (Trainer, "_take_step")}


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = Table(
        "answers", "drawing", "learning, padded", "learning, shared", "less by", "all else, share of the step"
    )
    drawing = Table("answers", "transformers' generate", "LocalEngine", "faster by")
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        write_rows(rows, options.prompts)
        for answers in (8, 16):
            found = {
                name: step_costs(config(rows, Path(scratch) / f"{name}{answers}", answers, options.prompts, layout))
                for name, layout in LAYOUTS.items()
            }
            padded, shared = found["padded"]["learning"], found["shared"]["learning"]
            whole = found["shared"]["step"]
            rest = whole - found["shared"]["drawing"] - shared
            steps.add_row(
                str(answers), f"{found['shared']['drawing']:.2f}", f"{padded:.2f}", f"{shared:.2f}",
                f"{padded / shared:.1f}", f"{rest / whole:.1%}",
            )  # fmt: skip
            ours, theirs = drawing_costs(config(rows, Path(scratch), answers, options.prompts, {}), answers)
            drawing.add_row(str(answers), f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.1f}")
    for title, table in (("a step, CPU-seconds", steps), ("drawing alone, CPU-seconds", drawing)):
        table.title = title
        Console(width=110).print(table)


def write_rows(path: Path, prompts: int) -> None:
    """Rows of words that come again and again, enough for all steps."""
    rng = np.random.default_rng(0)
    words = ["north", "river", "seven", "green", "paper", "light", "house", "carry"]
    with path.open("w", encoding="utf-8") as lines:
        for _ in range(prompts * (ROUNDS + 1)):
            question = " ".join(rng.choice(words, WORDS))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "green"}]
            lines.write(json.dumps({"messages": turns}) + "\n")


def config(rows: Path, out: Path, answers: int, prompts: int, layout: dict[str, Any]) -> dict[str, Any]:
    """A run of so many steps."""
    return {
        "model": {"name_or_path": "preset:tiny-qwen3", "config_overrides": SIZES},
        "data": {"train": str(rows), "max_length": 8192, "store": str(out.parent / "store")},
        "objective": "rl",
        "rollout": {
            "prompts_per_step": prompts,
            "answers": answers,
            "max_new_tokens": NEW_TOKENS,
            "min_finished": 0,
            "batch_size": 64,
        },
        "train": {"max_steps": ROUNDS + 1, "learning_rate": 1e-6, "precision": "fp32", **layout},
        "eval": {"strategy": "no"},
        "output": {"dir": str(out), "save_strategy": "no"},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu", "threads": 1, "seed": 0},
    }


def step_costs(run: dict[str, Any]) -> dict[str, float]:
    """CPU-seconds of a step by its parts, the median of those after the first."""
    with measuring() as seconds:
        luthier.train(run)
    per_step = {name: found for name, found in seconds.items() if name != "learning"}
    micro = len(seconds["learning"]) // (ROUNDS + 1)
    learning = seconds["learning"]
    per_step["learning"] = [sum(learning[at : at + micro]) for at in range(0, len(learning), micro)]
    return {name: statistics.median(found[1:]) for name, found in per_step.items()}


@contextmanager
def measuring() -> Iterator[dict[str, list[float]]]:
    """CPU-seconds of every call of the `PARTS`."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keys: Any) -> Any:
            start = time.process_time()
            try:
                return real(*args, **keys)
            finally:
                seconds[name].append(time.process_time() - start)

        return call

    before = {name: getattr(owner, method) for name, (owner, method) in PARTS.items()}
    for name, (owner, method) in PARTS.items():
        setattr(owner, method, timed(name, before[name]))
    try:
        yield seconds
    finally:
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, before[name])


def drawing_costs(run: dict[str, Any], answers: int) -> tuple[float, float]:
    """CPU-seconds of drawing the answers of a step: ours, and by transformers, each the median of some rounds."""
    tokenizer = luthier.load_tokenizer("preset:tiny-qwen3")
    described = RunConfig.model_validate(run)
    model = load_model(described, Vocabulary.of(tokenizer, {})).model.eval()
    prompts = np.random.default_rng(0).integers(10, 2000, (described.rollout.prompts_per_step, 512)).astype(np.int32)
    engine = LocalEngine(model, tokenizer, batch_size=described.rollout.batch_size)
    settings = GenerateConfig(do_sample=True, temperature=1.0, max_new_tokens=NEW_TOKENS, seed=0)
    requests = [
        Request(prompt=prompt, settings=settings, key=key, num_samples=answers) for key, prompt in enumerate(prompts)
    ]
    theirs = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS, num_return_sequences=answers,
        eos_token_id=list(tokenizer.stop_token_ids), pad_token_id=tokenizer.pad_token_id, output_logits=True,
        return_dict_in_generate=True, use_cache=True,
    )  # fmt: skip
    inputs = torch.from_numpy(prompts.astype(np.int64))

    @torch.no_grad()
    def by_transformers() -> None:
        found = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=theirs)
        for place, logits in enumerate(found.logits):
            logits.log_softmax(-1).gather(1, found.sequences[:, inputs.shape[1] + place, None])

    return (
        statistics.median([cpu_seconds(lambda: list(engine.generate(requests))) for _ in range(ROUNDS + 1)][1:]),
        statistics.median([cpu_seconds(by_transformers) for _ in range(ROUNDS + 1)][1:]),
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
