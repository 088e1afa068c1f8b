"""What preference training learns: held-out pairs and answers, before and after, each from the same model after SFT.

examples/preferences_sft.yaml is run once, then each example from the model that it leaves. What a run says of itself is
not believed: the saved models are loaded with transformers, every pair is scored alone, unpacked, and every prompt is
answered greedily. Exits with status 1 if a model ranks fewer than 90 % of the held-out pairs as the rows do, or gives
fewer than 80 % of the chosen answers; the first model has to be near a half in both, or it would prove nothing.

    before   share of pairs whose chosen answer the first model finds likelier (reward models: scored by a new head)
    after    share of pairs whose chosen answer has the higher reward: the log-probability less that of the first model;
             per token for simpo and orpo; the output of a reward model
    answers  share of prompts answered with exactly the chosen answer

KTO is trained on single answers, and measured on the same pairs as the others.

python -m benchmarks.preferences [--only NAME …] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import luthier
from benchmarks.harness.processes import run
from benchmarks.harness.runs import LUTHIER
from luthier.config.loading import load_config
from luthier.config.schema import GenerateConfig, RunConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.presets import dataset_rows
from luthier.records import Segment
from luthier.training.generate import Question, answer_all

SFT = "preferences_sft"
NAMES = ("dpo", "kto", "orpo", "simpo", "reward_model")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ENOUGH, ENOUGH_ANSWERS, CHANCE = 0.9, 0.8, 0.65
PER_TOKEN = ("simpo", "orpo")  # losses whose reward is a mean over the answer

Pair = tuple[Segment, Segment]  # the chosen and the rejected answer, each behind the prompt
Scores = NDArray[np.float64]  # [pairs, 2], chosen and rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """One line of the table; shares between 0 and 1. ``said`` is the run's own held-out accuracy, of rows for KTO."""

    name: str
    loss: str
    before: float
    after: float
    said: float
    answers: float | None
    steps: int
    seconds: float


def main() -> int:
    """Train, measure, print the table; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--out", type=Path, help="keep the runs here; an SFT model that is there is used again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()  # of weights being loaded
    with tempfile.TemporaryDirectory() as scratch:
        return _measure(options.out or Path(scratch), options.only)


def _measure(folder: Path, names: Sequence[str]) -> int:
    sft = folder / SFT
    if not (sft / "report.json").is_file():
        _train(SFT, sft)
    tokenizer = luthier.load_tokenizer(sft / "model")
    pairs = _held_out(tokenizer)
    first = AutoModelForCausalLM.from_pretrained(sft / "model")
    start = Start(tokenizer=tokenizer, pairs=pairs, logps_P2=log_probabilities(first, pairs))
    rows = [_learn(name, sft, folder / name, start) for name in names]
    report = json.loads((sft / "report.json").read_text(encoding="utf-8"))
    title = f"{len(pairs)} held-out pairs, from {SFT}: {report['steps']} steps in {report['seconds']:.0f} s"
    Console(width=130).print(_table(rows, title, _exact(first, start)))
    return 0 if all(_is_learned(row) for row in rows) else 1


def _is_learned(row: Learned) -> bool:
    answers = row.answers is None or row.answers >= ENOUGH_ANSWERS
    return row.before <= CHANCE and row.after >= ENOUGH and answers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Start:
    """What all are compared on, and what the first model finds of it."""

    tokenizer: Tokenizer
    pairs: list[Pair]
    logps_P2: Scores


def _train(name: str, out: Path, *overrides: str) -> None:
    print(f"training: examples/{name}.yaml", file=sys.stderr, flush=True)
    run([*LUTHIER, "train", EXAMPLES / f"{name}.yaml", f"output.dir={out}", "output.overwrite=true", *overrides])


def _learn(name: str, sft: Path, out: Path, start: Start) -> Learned:
    model_override = f"model.name_or_path={sft / 'model'}"
    _train(name, out, model_override, "eval.generate_rows=0")
    config = load_config(EXAMPLES / f"{name}.yaml", [model_override])
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    before, answers = _ranked(start.logps_P2), None
    if config.objective.name == "rm":
        model = AutoModelForSequenceClassification.from_pretrained(out / "model")
        before, rewards_P2 = report["eval"][0]["accuracy"], outputs(model, start.pairs)
    else:
        model = AutoModelForCausalLM.from_pretrained(out / "model")
        rewards_P2, answers = _rewards(config, model, start), _exact(model, start)
    return Learned(
        name=name,
        loss=config.objective.loss_name,
        before=before,
        after=_ranked(rewards_P2),
        said=report["eval"][-1]["accuracy"],
        answers=answers,
        steps=report["steps"],
        seconds=report["seconds"],
    )


# ---------------------------------------------------------------------------------------------------- measuring


def _held_out(tokenizer: Tokenizer) -> list[Pair]:
    pairs = []
    for row in dataset_rows("preferences", "test"):
        chosen, rejected = luthier.encode(row, tokenizer, objective="dpo").segments()
        pairs.append((chosen, rejected))
    return pairs


def _rewards(config: RunConfig, model: PreTrainedModel, start: Start) -> Scores:
    logps_P2 = log_probabilities(model, start.pairs)
    if config.objective.needs_reference:
        return logps_P2 - start.logps_P2
    if config.objective.loss_name in PER_TOKEN:
        lengths_P2 = [[int(segment.target.sum()) for segment in pair] for pair in start.pairs]
        return np.divide(logps_P2, np.array(lengths_P2, dtype=np.float64))
    return logps_P2


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, pairs: Sequence[Pair]) -> Scores:
    """Of each answer, the sum over its targets; one sequence at a time, with the model's own attention and head."""
    model.eval()
    found = np.zeros((len(pairs), 2))
    for place in np.ndindex(found.shape):
        segment = pairs[place[0]][place[1]]
        ids_1T = torch.from_numpy(segment.input_ids.astype(np.int64))[None]
        logps_TV = model(input_ids=ids_1T).logits[0, :-1].double().log_softmax(dim=-1)
        logps_T = logps_TV.gather(1, ids_1T[0, 1:, None])[:, 0]
        found[place] = float(logps_T[torch.from_numpy(segment.target[1:])].sum())
    return found


@torch.no_grad()
def outputs(model: PreTrainedModel, pairs: Sequence[Pair]) -> Scores:
    """Of each answer, the reward model's output for the whole sequence, which transformers reads at the last token."""
    model.eval()
    found = np.zeros((len(pairs), 2))
    for place in np.ndindex(found.shape):
        ids_1T = torch.from_numpy(pairs[place[0]][place[1]].input_ids.astype(np.int64))[None]
        found[place] = float(model(input_ids=ids_1T).logits[0, 0])
    return found


def _ranked(scores_P2: Scores) -> float:
    return float((scores_P2[:, 0] > scores_P2[:, 1]).mean())


def _exact(model: PreTrainedModel, start: Start) -> float:
    questions = []
    for chosen, _ in start.pairs:
        begin, end = np.flatnonzero(chosen.target)[[0, -1]]  # the last target is the stop token
        questions.append(
            Question(prompt=chosen.input_ids[:begin], answer=chosen.input_ids[begin:end], address=chosen.address)
        )
    answered = answer_all(
        model, questions, start.tokenizer, step=0, batch_size=64, settings=GenerateConfig(max_new_tokens=24)
    )
    return answered.exact_match


_WANTED = f"wanted: {ENOUGH:.0%} of the pairs ranked right, {ENOUGH_ANSWERS:.0%} of the answers"


def _table(rows: Sequence[Learned], title: str, answers_before: float) -> Table:
    table = Table("example", "loss", title=title, caption=_WANTED)
    for heading in ("before", "after", "run's own", "answers before", "after", "steps", "seconds"):
        table.add_column(heading, justify="right")
    for row in rows:
        answers = ("", "") if row.answers is None else (f"{answers_before:.1%}", f"{row.answers:.1%}")
        shares = (f"{row.before:.1%}", f"{row.after:.1%}", f"{row.said:.1%}")
        table.add_row(row.name, row.loss, *shares, *answers, f"{row.steps:,}", f"{row.seconds:.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
