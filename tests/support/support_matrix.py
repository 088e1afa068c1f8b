"""What can be trained how, found out by doing it: a step on a tiny random model of each family.

`scripts/write_docs.py` writes `docs/support_matrix.md` from this, and a test sees that the page is what runs say.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tiny_models import MODELS, SIZES
from tiny_recurrent import RECURRENT_MODELS
from tiny_rows import run_data
from tiny_runs import make_config
from transformers import MambaConfig, PretrainedConfig

from luthier.config.schema import RunConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import UserError
from luthier.training.fit import fit_data
from luthier.training.report.events import Event, Note

FAMILIES = ("qwen3", "llama", "gemma3", "qwen3_moe", "mistral", "gpt_oss", "qwen3_next", "mamba")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"name": "sft"},
    "rm": {"name": "rm"},
    "dpo": {"name": "dpo", "sft_weight": 1.0},  # before the first update DPO's own loss is log 2 whatever is done
    "kto": {"name": "kto"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"train__packing": "none"},
    "packed": {"train__packing": "best_fit", "train__shared_prompts": False},
    "shared": {"train__packing": "best_fit", "train__shared_prompts": True},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"adapter__type": "full"},
    "lora": {"adapter__type": "lora", "adapter__r": 4},
    "freeze": {"adapter__type": "freeze", "adapter__freeze_trainable_layers": 1},
}
ROWS = range(3)
ALL_TURNS: dict[str, Any] = {"data__max_length": 64, "train__gradient_accumulation_steps": 6}  # in one step
ATTENTION = "attention: "
HEAD = "head: "


class Verdict(StrEnum):
    """``falls back``: it trains the same, in a way that costs more."""

    OK = "ok"
    FALLS_BACK = "falls back"
    REFUSED = "refused"


@dataclass(frozen=True, order=True)
class Cell:
    """One way to train."""

    family: str
    objective: str
    layout: str
    adapter: str


@dataclass(frozen=True)
class Outcome:
    """What became of it. ``loss`` and ``grad_norm`` are those of the step; None where it was refused."""

    verdict: Verdict
    reason: str = ""
    loss: float | None = None
    grad_norm: float | None = None


def cells() -> list[Cell]:
    """Every objective in every layout with every adapter, on every family."""
    return [Cell(*each) for each in product(FAMILIES, OBJECTIVES, LAYOUTS, ADAPTERS)]


def support_matrix(root: Path, tokenizer: Tokenizer) -> dict[Cell, Outcome]:
    """Everything tried, in folders under ``root``."""
    gc.freeze()  # a full collection looks at all that was ever imported
    for family in FAMILIES:
        _family_config(family).save_pretrained(root / family)
    return {cell: try_cell(root, tokenizer, cell) for cell in cells()}


def try_cell(root: Path, tokenizer: Tokenizer, cell: Cell, *, attention: str = "auto") -> Outcome:
    """One step on all rows. What is no `UserError` is a fault of ours, and raised."""
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    config = _config(root, cell, attention)
    turns = 3 if cell.objective == "sft" else None  # conversations whose history is rewritten: trees, too
    try:
        data = run_data(root / f"rows for {cell.objective}", config, rows=ROWS, turns=turns)
        result = fit_data(config, tokenizer, data, on_event=listen)
    except UserError as error:
        return Outcome(verdict=Verdict.REFUSED, reason=_stable(error.message))
    (step,) = result.steps
    reasons = _fallbacks(notes)
    return Outcome(
        verdict=Verdict.FALLS_BACK if reasons else Verdict.OK,
        reason="; ".join(map(_stable, reasons)),
        loss=step.loss,
        grad_norm=step.grad_norm,
    )


def support_page(outcomes: Mapping[Cell, Outcome]) -> str:
    """``docs/support_matrix.md``."""
    reasons: list[str] = []
    tables = []
    for adapter in ADAPTERS:
        lines = [
            f"## {_TITLES[adapter]}",
            "",
            "| family | " + " | ".join(LAYOUTS) + " |",
            "|---|" + "---|" * len(LAYOUTS),
        ]
        for family in FAMILIES:
            tried = {layout: _tried(outcomes, family, layout, adapter) for layout in LAYOUTS}
            shown = [_cell_text(tried[layout], reasons) for layout in LAYOUTS]
            lines.append(f"| {family} | " + " | ".join(shown) + " |")
        tables.append("\n".join(lines))
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))
    return f"{_INTRODUCTION}\n" + "\n\n".join(tables) + f"\n\n## Why not\n\n{notes}\n"


# ------------------------------------------------------------------------------------------------------------- runs


def _family_config(family: str) -> PretrainedConfig:
    if family == "mamba":
        sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")}
        return MambaConfig(**sizes, state_size=8)
    torch.manual_seed(0)
    found = (MODELS | RECURRENT_MODELS)[family]().config
    assert isinstance(found, PretrainedConfig)
    return found


def _config(root: Path, cell: Cell, attention: str) -> RunConfig:
    folder = root / "-".join((cell.family, cell.objective, cell.layout, cell.adapter))
    model = {"name_or_path": str(root / cell.family), "random_init": True, "attn_implementation": attention}
    more = ALL_TURNS if cell.objective == "sft" else {}
    changes = {**LAYOUTS[cell.layout], **ADAPTERS[cell.adapter], **more}
    return make_config(
        folder,
        model=model,
        objective=OBJECTIVES[cell.objective],
        train__max_steps=1,
        train__per_device_train_batch_size=len(ROWS),
        runtime__threads=1,
        output__overwrite=True,
        **changes,
    )


def _fallbacks(notes: Iterable[str]) -> list[str]:
    """Why a run does not take the way that costs least: Luthier's own attention, and the head at targets only."""
    found = []
    for note in notes:
        if note.startswith(f"{ATTENTION}not "):
            found.append(note.removeprefix(f"{ATTENTION}not "))
        if note.startswith(HEAD):
            found.append(note.removeprefix(HEAD))
    return found


def _stable(reason: str) -> str:
    """The first sentence, without the numbers that differ between machines, and without folders."""
    sentence = re.split(r"\n|(?<=\.) ", reason)[0]
    reason = re.sub(r"\d+\.\d+(e[+-]?\d+)?|\d+e[+-]?\d+", "…", sentence)
    return re.sub(r"'/[^']*/([^'/]+)'", r"'\1'", reason)


# ------------------------------------------------------------------------------------------------------------- page

_TITLES = {"full": "All weights", "lora": "LoRA", "freeze": "Freeze: the last layer only"}

_INTRODUCTION = """# Support matrix

Written by `scripts/write_docs.py` (`make docs`) from runs, not from intentions: one step of training on a tiny random
model of each family, on a CPU, for each objective (`sft`, for which `pt` is trained alike, `rm`, `dpo`, `kto`). A cell
says what all of them came to, or which came to what. Loss and gradient of the step are the same in all layouts; a test
compares them.

- **padded**: `train.packing: none`, a row for each answer.
- **packed**: `train.packing: best_fit`; answers share rows and do not see each other.
- **shared**: the same, and what sequences of a row begin with in common is computed once (`train.shared_prompts`): the
  prompt of two answers, and for `sft` the earlier turns of a conversation whose history the template rewrites.
- **falls back**: it trains the same and costs more, for the reason named.
- **refused**: it says so before the first step.

The families have what tells them apart: windows in every layer (`mistral`) or in every other (`gemma3`), experts
(`qwen3_moe`, `gpt_oss`, `qwen3_next`), attention sinks (`gpt_oss`), a state in some layers (`qwen3_next`) or in all
(`mamba`).
"""


def _tried(outcomes: Mapping[Cell, Outcome], family: str, layout: str, adapter: str) -> dict[str, Outcome]:
    keys = {objective: Cell(family, objective, layout, adapter) for objective in OBJECTIVES}
    return {objective: outcomes[cell] for objective, cell in keys.items() if cell in outcomes}


def _cell_text(tried: Mapping[str, Outcome], reasons: list[str]) -> str:
    """``ok``; ``sft, dpo: ok; rm: refused (1)``. Adds to ``reasons``, where (1) is the first."""
    objectives: dict[str, list[str]] = defaultdict(list)
    for objective, outcome in tried.items():
        mark = str(outcome.verdict)
        if outcome.reason:
            if outcome.reason not in reasons:
                reasons.append(outcome.reason)
            mark += f" ({reasons.index(outcome.reason) + 1})"
        objectives[mark].append(objective)
    if len(objectives) == 1 and list(tried) == list(OBJECTIVES):
        return next(iter(objectives))
    return "; ".join(f"{', '.join(names)}: {mark}" for mark, names in objectives.items())
