"""What a step costs that draws answers and learns from them, beside TRL's GRPO.

Short prompts are those of ``preset:preferences``, answered by the model of ``examples/preferences_sft.yaml``, which
stops where an answer ends. All others are answered by a model with random weights, which hardly ever stops by itself.
Luthier takes the long steps with each prompt beside each of its answers in a padded batch, too. TRL learns from eight
answers at a time, its default, and from all of a short step at once. Each run is a process of its own; CPU-seconds of
one thread, medians of the steps after the first. *Learning* is all of a step that is not drawing, the bookkeeping with
it. Memory is the most that a process had above model and rows.
After that, drawing alone: `LocalEngine` and transformers' ``generate``, both with log-probabilities and as many rows at
a time as there are answers; answers drawn in batches of several sizes and orders, which have to be the same; and
requests to ``luthier serve``, one by one and 16 at once.

python -m benchmarks.rl [--only NAME …] [--steps N] [--model FOLDER] [--peers VENV …]

TRL is looked for here and in the virtual environments that --peers or LUTHIER_PEERS name.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config

from benchmarks.harness.processes import cpu_seconds, load, run
from benchmarks.harness.runs import VOCAB_SIZE, peer_environments, python_with, qwen3_tokenizer
from benchmarks.harness.training_material import short_pairs, write_rows
from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import load_tokenizer
from luthier.engines import Completion, Request
from luthier.engines.local import LocalEngine
from luthier.presets import model_folder, tokenizer_folder

SCRIPTS = Path(__file__).parent / "harness" / "peers"
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
WORDS = ("north", "river", "seven", "green", "paper", "light", "house", "carry")
LAYOUTS: dict[str, dict[str, Any]] = {
    "Luthier, shared": {"packing": "best_fit", "per_device_train_batch_size": 1},
    "Luthier, padded": {"packing": "none", "per_device_train_batch_size": 8},
}
SERVED = 16  # requests at once
TRL: dict[str, int] = {"TRL, eights": 8, "TRL, whole": 0}  # answers that it learns from at a time; 0: all of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Steps of so many prompts, each answered so often. ``words`` of a prompt; 0: those of the preset."""

    name: str
    prompts: int
    answers: int
    new_tokens: int
    words: int = 0
    vocab_size: int = 2048
    tools: tuple[str, ...] = ("Luthier, shared", *TRL)

    @property
    def per_step(self) -> int:
        """Answers."""
        return self.prompts * self.answers


CONTESTS = (
    Contest(name="short-8", prompts=16, answers=8, new_tokens=24),
    Contest(name="short-16", prompts=16, answers=16, new_tokens=24),
    Contest(name="long-8", prompts=4, answers=8, new_tokens=64, words=450, tools=(*LAYOUTS, "TRL, eights")),
    Contest(name="long-16", prompts=4, answers=16, new_tokens=64, words=450, tools=(*LAYOUTS, "TRL, eights")),
    Contest(
        name="memory",
        prompts=1,
        answers=16,
        new_tokens=256,
        words=60,
        vocab_size=VOCAB_SIZE,
        tools=("Luthier, shared", "TRL, eights"),
    ),
)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*(one.name for one in CONTESTS), "drawing", "batches", "served"])
    parser.add_argument("--steps", type=int, default=4, help="of each run, of which the first is not counted")
    parser.add_argument("--model", type=Path, default=Path("output/preferences_sft/model"), help="of short prompts")
    parser.add_argument("--peers", type=Path, nargs="+", default=peer_environments(), metavar="VENV")
    options = parser.parse_args()
    torch.set_num_threads(1)
    peer = python_with("trl", options.peers)
    for contest in CONTESTS:
        if options.only and contest.name not in options.only:
            continue
        if contest.vocab_size == VOCAB_SIZE and qwen3_tokenizer() is None:
            print(f"left out: {contest.name}, which needs the Qwen3 tokenizer (LUTHIER_SHARED)")
            continue
        if not contest.words and not options.model.is_dir():
            print(f"left out: {contest.name}, which needs the model of examples/preferences_sft.yaml (--model)")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            model = policy(folder / "model", contest.vocab_size) if contest.words else options.model.resolve()
            Console(width=130).print(hold(contest, folder, model, options.steps, peer))
    if not options.only or "drawing" in options.only:
        Console(width=130).print(drawing_alone(options.model))
    if (not options.only or "batches" in options.only) and options.model.is_dir():
        Console(width=130).print(in_any_batch(options.model))
    if not options.only or "served" in options.only:
        Console(width=130).print(served(options.model))


def hold(contest: Contest, folder: Path, model: Path, steps: int, peer: Path | None) -> Table:
    """The same steps by all tools that are there."""
    rows = write_rows(folder / "rows.jsonl", itertools.islice(questions(contest), contest.prompts * steps))
    found: dict[str, dict[str, Any]] = {}
    for name in contest.tools:
        if name in TRL and peer is None:
            print(f"left out: {name}, which is not installed")
            continue
        found[name] = measured(contest, name, folder, steps, rows, model, peer)
    table = Table(
        "", "version", "step", "ours is", "drawing", "ours is", "learning", "ours is", "memory MB", "ours is",
        title=f"{contest.name}: {contest.prompts} prompts x {contest.answers} answers of {contest.new_tokens} tokens, "
        f"vocabulary {contest.vocab_size:,}, CPU-seconds, {load()}",
        box=None,
    )  # fmt: skip
    ours = found["Luthier, shared"]
    for name, costs in found.items():
        cells = [name, costs["version"]]
        for part in ("step", "drawing", "learning"):
            cells += [f"{costs[part]:.3f}", f"{costs[part] / ours[part]:.1f}x"]
        table.add_row(*cells, f"{costs['memory'] / 1e6:,.0f}", f"{ours['memory'] / costs['memory']:.2f}")
    table.caption = f"housekeeping of ours: {ours['housekeeping']:.1%} of a step"
    return table


def measured(
    contest: Contest, name: str, folder: Path, steps: int, rows: Path, model: Path, peer: Path | None
) -> dict[str, Any]:
    """One process: medians of the steps after the first, by part, and its memory."""
    out = folder / name.replace(", ", "-")
    job = {
        "rows": str(rows), "model": str(model), "output": str(out), "threads": 1, "steps": steps,
        "prompts": contest.prompts, "answers": contest.answers, "new_tokens": contest.new_tokens,
        "rows_per_batch": TRL.get(name) or contest.per_step,
    }  # fmt: skip
    if name in LAYOUTS:
        job["run"] = description(contest, rows, model, out, steps, LAYOUTS[name])
    file = folder / f"{out.name}.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    python, script = (peer, "trl_rl.py") if name in TRL else (python_with("luthier", []), "luthier_rl.py")
    assert python is not None
    facts = json.loads(run([python, SCRIPTS / script, file], env=QUIET).last_line)
    first = min(1, steps - 1)
    step, drawing, learning = (statistics.median(facts[part][first:]) for part in ("step", "drawing", "learning"))
    return {
        "version": facts["version"],
        "step": step,
        "drawing": drawing,
        "learning": statistics.median(
            whole - drawn for whole, drawn in zip(facts["step"][first:], facts["drawing"][first:], strict=True)
        ),
        "housekeeping": (step - drawing - learning) / step,
        "memory": facts["peak"] - facts["before"],
    }


def policy(folder: Path, vocab_size: int) -> Path:
    """The smallest preset's shape with random weights, and this vocabulary."""
    tokenizer = qwen3_tokenizer() if vocab_size == VOCAB_SIZE else tokenizer_folder("tiny")
    assert tokenizer is not None
    described = json.loads((model_folder("tiny-qwen3") / "config.json").read_text(encoding="utf-8"))
    library = AutoTokenizer.from_pretrained(tokenizer)
    described |= {"vocab_size": vocab_size, "pad_token_id": library.pad_token_id, "eos_token_id": library.eos_token_id}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**described)).save_pretrained(folder)
    library.save_pretrained(folder)
    return folder


def questions(contest: Contest) -> Any:
    """Rows of a question and its answer."""
    if not contest.words:
        for pair in short_pairs(1_000):
            yield {"messages": [*pair["prompt"], *pair["chosen"]]}
    rng = np.random.default_rng(0)
    while True:
        question = " ".join(rng.choice(WORDS, contest.words))
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "green"}]}


def description(
    contest: Contest, rows: Path, model: Path, out: Path, steps: int, layout: dict[str, Any]
) -> dict[str, Any]:
    """A run of so many steps."""
    return {
        "model": {"name_or_path": str(model)},
        "data": {"train": str(rows), "max_length": 8192, "store": str(out.parent / "store")},
        "objective": "rl",
        "rollout": {
            "prompts_per_step": contest.prompts,
            "answers": contest.answers,
            "max_new_tokens": contest.new_tokens,
            "min_finished": 0,
            "batch_size": contest.per_step,
        },
        "train": {"max_steps": steps, "learning_rate": 1e-6, "precision": "fp32", **layout},
        "eval": {"strategy": "no"},
        "output": {"dir": str(out), "save_strategy": "no"},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu", "threads": 1, "seed": 0},
    }


def drawing_alone(short: Path) -> Table:
    """CPU-seconds of drawing the answers of a step: ours, and by transformers, each the median of three rounds.

    ``short`` is the model that answers short prompts; where it is not there, they are left out.
    """
    table = Table(
        "prompts",
        "answers",
        "top_p",
        "generate",
        "LocalEngine",
        "ours is",
        title="drawing alone, CPU-seconds",
        box=None,
    )
    with tempfile.TemporaryDirectory() as scratch:
        random_model = AutoModelForCausalLM.from_pretrained(policy(Path(scratch) / "model", 2048), dtype=torch.float32)
    long = list(np.random.default_rng(0).integers(10, 2000, (4, 512)).astype(np.int32))
    told = [(random_model, long, answers, top_p, 64) for answers, top_p in ((8, 1.0), (16, 1.0), (8, 0.9))]
    if short.is_dir():
        model, library = (
            AutoModelForCausalLM.from_pretrained(short, dtype=torch.float32),
            AutoTokenizer.from_pretrained(short),
        )
        asked = [
            np.array(
                library.apply_chat_template(pair["prompt"], add_generation_prompt=True, return_dict=False), np.int32
            )
            for pair in short_pairs(64)
        ]
        told += [(model, asked[:prompts], answers, 1.0, 24) for prompts, answers in ((16, 8), (64, 8), (16, 16))]
    for model, prompts, answers, top_p, new_tokens in told:
        ours, theirs = drawing_costs(model.eval(), prompts, answers, top_p, new_tokens)
        cells = (str(len(prompts)), str(answers), str(top_p), f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.1f}x")
        table.add_row(*cells)
    return table


def drawing_costs(
    model: Any, prompts: Sequence[Any], answers: int, top_p: float, new_tokens: int
) -> tuple[float, float]:
    """Ours and theirs, of ``answers`` to each of the prompts, int32[T] each."""
    tokenizer = load_tokenizer("preset:tiny-qwen3")
    engine = LocalEngine(model, tokenizer, batch_size=len(prompts) * answers)
    settings = GenerateConfig(do_sample=True, temperature=1.0, top_p=top_p, max_new_tokens=new_tokens, seed=0)
    requests = [
        Request(prompt=prompt, settings=settings, key=key, num_samples=answers) for key, prompt in enumerate(prompts)
    ]
    theirs = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=top_p, max_new_tokens=new_tokens, num_return_sequences=answers,
        eos_token_id=list(tokenizer.stop_token_ids), pad_token_id=tokenizer.pad_token_id, output_logits=True,
        return_dict_in_generate=True, use_cache=True,
    )  # fmt: skip
    width = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), width), tokenizer.pad_token_id)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask_BT[row, width - len(prompt) :] = 1

    @torch.no_grad()
    def by_transformers() -> None:
        found = model.generate(input_ids=ids_BT, attention_mask=mask_BT, generation_config=theirs)
        for place, logits in enumerate(found.logits):
            logits.log_softmax(-1).gather(1, found.sequences[:, width + place, None])

    return median_of(lambda: list(engine.generate(requests))), median_of(by_transformers)


def in_any_batch(folder: Path) -> Table:
    """Eight answers to each of 1,250 prompts in 64s, beside the same in another order, in 7s, and one by one."""
    tokenizer, library = load_tokenizer("preset:tiny-qwen3"), AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = GenerateConfig(do_sample=True, temperature=1.0, max_new_tokens=16, seed=0)
    asked = [
        Request(prompt=np.array(ids, np.int32), settings=settings, key=key, num_samples=8)
        for key, pair in enumerate(short_pairs(1_250))
        for ids in [library.apply_chat_template(pair["prompt"], add_generation_prompt=True, return_dict=False)]
    ]

    def drawn(requests: Sequence[Request], batch_size: int) -> dict[tuple[int, int], Completion]:
        answers = LocalEngine(model, tokenizer, batch_size=batch_size).generate(requests)
        return {(one.key, one.sample): one for one in answers if isinstance(one, Completion)}

    whole, shuffled = drawn(asked, 64), random.Random(0).sample(asked, len(asked))
    others = {
        "64, in another order": drawn(shuffled, 64),
        "7, in another order": drawn(shuffled, 7),
        "each prompt alone": {
            place: one for request in shuffled[:60] for place, one in drawn([request], 1).items()
        },
    }  # fmt: skip
    table = Table("batch", "answers", "the same", "log-probabilities differ by", title="64 beside", box=None)
    for name, found in others.items():
        same = [place for place, one in found.items() if np.array_equal(one.ids, whole[place].ids)]
        gap = max(float(np.abs(found[place].logprobs - whole[place].logprobs).max()) for place in same)
        table.add_row(name, f"{len(found):,}", f"{len(same):,}", f"{gap:.1e}")
    return table


def served(short: Path) -> Table:
    """Sixteen questions to ``luthier serve``, one by one and all at once; the answers have to be the same.

    ``short`` is the model that answers short prompts; random weights answer prompts of 512 tokens, with 64 tokens each.
    """
    table = Table(
        "model", "sampling", "one by one, s", "at once, s", "", "one by one, CPU-s", "at once, CPU-s", "", "the same",
        title=f"{SERVED} requests to luthier serve, medians of three rounds, {load()}", box=None,
    )  # fmt: skip
    asked = [" ".join(np.random.default_rng(key).choice(WORDS, 450)) for key in range(SERVED)]
    with tempfile.TemporaryDirectory() as scratch:
        told = [("random weights", policy(Path(scratch) / "model", 2048), asked, 64)]
        if short.is_dir():
            told.append(("the preset's", short, [pair["prompt"][-1]["content"] for pair in short_pairs(SERVED)], 24))
        for name, model, questions, new_tokens in told:
            for temperature in (0.0, 1.0):
                walls, cpus, same = served_costs(model, questions, new_tokens, temperature)
                cells = [f"{one:.2f}" for one in (*walls, *cpus)]
                cells.insert(2, f"{walls[0] / walls[1]:.1f}x")
                cells.append(f"{cpus[0] / cpus[1]:.1f}x")
                table.add_row(name, "greedy" if not temperature else "sampled", *cells, f"{same} of {SERVED}")
    return table


def served_costs(
    model: Path, questions: Sequence[str], new_tokens: int, temperature: float
) -> tuple[tuple[float, float], tuple[float, float], int]:
    """Seconds one by one and at once, the server's CPU-seconds likewise, and how many answers are the same in both."""
    command = [python_with("luthier", []), "-m", "luthier", "serve", model, "--port", "0", "--json", "-"]
    process = subprocess.Popen([*map(str, command), "runtime.device=cpu", "runtime.threads=1"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **QUIET}, text=True)  # fmt: skip
    try:
        assert process.stdout is not None
        ready = json.loads("".join(itertools.takewhile(lambda line: line != "}\n", process.stdout)) + "}")
        headers = {"Authorization": f"Bearer {ready['token']}"}
        with httpx.Client(base_url=ready["url"], headers=headers, timeout=600) as http:

            def ask(place: int) -> str:
                body = {
                    "messages": [{"role": "user", "content": questions[place]}], "max_tokens": new_tokens,
                    "temperature": temperature, "seed": place,
                }  # fmt: skip
                found = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
                return json.dumps([found["message"], found["finish_reason"]])

            rounds = []
            with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
                for _ in range(4):
                    alone = costs_of(process.pid, lambda: list(map(ask, range(len(questions)))))
                    at_once = costs_of(process.pid, lambda: list(pool.map(ask, range(len(questions)))))
                    rounds.append((alone, at_once))
    finally:
        process.terminate()
        process.wait()
    walls, cpus = (
        [statistics.median(one[way][part] for one in rounds[1:]) for way in (0, 1)] for part in ("wall", "cpu")
    )
    alone, at_once = rounds[-1]
    same = sum(one == other for one, other in zip(alone["answers"], at_once["answers"], strict=True))
    return (walls[0], walls[1]), (cpus[0], cpus[1]), same


def costs_of(pid: int, work: Callable[[], list[str]]) -> dict[str, Any]:
    """Seconds, CPU-seconds of a process, and what came of it."""
    start, before = time.perf_counter(), cpu_seconds(pid)
    answers = work()
    return {"wall": time.perf_counter() - start, "cpu": cpu_seconds(pid) - before, "answers": answers}


def median_of(work: Callable[[], object]) -> float:
    """CPU-seconds of this process, of three rounds after one that is not counted."""
    found = []
    for _ in range(4):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found[1:])


if __name__ == "__main__":
    main()
