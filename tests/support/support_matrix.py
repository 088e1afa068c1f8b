"""What can be trained how, found out by doing it: a step on a tiny random model of each family.

`scripts/write_docs.py` writes `docs/support_matrix.md` from this, and a test sees that the page is what runs say.
"""

from __future__ import annotations

import gc
import re
import warnings
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
from tiny_runs import make_config, make_data, make_segments
from transformers import MambaConfig, PretrainedConfig

from luthier.config.choices import QuantizationType
from luthier.config.optimizers import OPTIMIZERS
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


# ---------------------------------------------------------------------------------------------------------- methods

ELSEWHERE = {"adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision"}
ON_GPU_ALONE = {"galore_adamw_8bit", "galore_adamw_8bit_layerwise"}
HERE = [name for name in OPTIMIZERS if name not in ELSEWHERE | ON_GPU_ALONE]
FAST = {"sgd": 0.5, "lomo": 0.5, "schedule_free_sgd": 2.0, "adagrad": 1e-2, "adalomo": 1e-1}
LORA: dict[str, Any] = {"adapter__type": "lora", "adapter__r": 4}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MOE: dict[str, Any] = {
    "model__name_or_path": "qwen3_moe", "model__random_init": True, "model__config_overrides": {},
}  # fmt: skip
BASES = [each for each in QuantizationType if each not in (QuantizationType.NONE, QuantizationType.TORCHAO_INT4)]
METHOD_OF: dict[str, dict[str, Any]] = {
    "oft": {"adapter__type": "oft", "adapter__oft_block_size": 8},
    "vera": {"adapter__type": "vera", "adapter__r": 64},
}
METHODS: dict[str, dict[str, Any]] = {
    "`adapter.type: full`": {},
    "`adapter.type: freeze`": {"adapter__type": "freeze", "adapter__freeze_trainable_layers": 1},
    "`adapter.type: llama_pro`": {"adapter__type": "llama_pro", "adapter__expand_layers": 1},
    "`adapter.type: lora`": LORA,
    "`adapter.use_rslora`": {**LORA, "adapter__use_rslora": True},
    "`adapter.use_dora`": {**LORA, "adapter__use_dora": True},
    **{f"`adapter.init_lora_weights: {way}`": {**LORA, "adapter__init_lora_weights": way}
       for way in ("pissa", "olora", "orthogonal", "gaussian", "eva", "corda", "lora_ga")},
    "`adapter.loraplus_lr_ratio`": {**LORA, "adapter__loraplus_lr_ratio": 8.0},
    "`adapter.rank_pattern`": {**LORA, "adapter__rank_pattern": {"q_proj": 8}},
    "`adapter.alpha_pattern`": {**LORA, "adapter__alpha_pattern": {"q_proj": 32}},
    "`adapter.target_parameters`": {**LORA, **MOE, "adapter__target_parameters": EXPERTS},
    "`adapter.train_routers: false`": {**MOE, "adapter__train_routers": False},
    "`train.router_aux_loss_coef`": {**MOE, "train__router_aux_loss_coef": 0.01},
    **{f"`model.experts_implementation: {way}`": {**MOE, "model__experts_implementation": way}
       for way in ("eager", "batched_mm", "grouped_mm")},
    "`adapter.modules_to_save`": {**LORA, "adapter__modules_to_save": ["embed_tokens"]},
    **{f"`adapter.type: {kind}`": METHOD_OF[kind] for kind in METHOD_OF},
    **{f"`model.quantization: {how}`": {**LORA, "model__quantization": how.value} for how in BASES},
    "`model.quantization: nf4`, DoRA": {**LORA, "adapter__use_dora": True, "model__quantization": "nf4"},
    **{f"`model.quantization: nf4`, `adapter.type: {kind}`": {**METHOD_OF[kind], "model__quantization": "nf4"}
       for kind in METHOD_OF},
    "`model.quantization: nf4`, `adapter.init_lora_weights: loftq`": {
        **LORA, "adapter__init_lora_weights": "loftq", "model__quantization": "nf4",
    },
    "`train.layer_decay`": {"train__layer_decay": 0.8},
    "`train.learning_rates`": {"train__learning_rates": {"embedding": 1e-3}},
    "`train.learning_rates`, of routers": {**MOE, "train__learning_rates": {"router": 1e-3}},
    "`train.offload`": {"train__offload": ["optimizer", "activations"]},
    **{f"`train.optim: {name}`": {"train__optim": name, "train__learning_rate": FAST.get(name, 1e-2)} for name in HERE},
}  # fmt: skip


def support_methods(root: Path, tokenizer: Tokenizer) -> dict[str, tuple[float, float]]:
    """Of each method the losses of the first and the last step of a short run on four rows."""
    data = make_data(make_segments(4))
    found = {}
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other packages have to say of themselves
        for number, (name, keys) in enumerate(METHODS.items()):
            given = {**keys, "train__learning_rate": keys.get("train__learning_rate", 1e-2)}
            if (folder := given.get("model__name_or_path")) is not None:
                given["model__name_or_path"] = str(root / folder)
            config = make_config(
                root / f"method {number}",
                train__max_steps=12 if "radam" in name else 6,  # it waits for a few steps before it changes a weight
                train__per_device_train_batch_size=4,
                train__lr_scheduler_type="constant",
                runtime__threads=1,
                **given,
            )
            steps = fit_data(config, tokenizer, data).steps
            found[name] = (steps[0].loss, steps[-1].loss)
    return found


def _methods_table() -> str:
    lines = ["## Methods", "", _METHODS, "", "| method | verdict |", "|---|---|"]
    lines += [f"| {name} | learns |" for name in METHODS]
    lines += [f"| `train.optim: {name}` | not tried: it needs a GPU |" for name in sorted(ON_GPU_ALONE)]
    for name in sorted(ELSEWHERE):
        lines.append(f"| `train.optim: {name}` | not tried: it needs {OPTIMIZERS[name].needs[0][1]} |")
    lines.append("| models that come in GPTQ or AWQ | not tried: they need gptqmodel and optimum |")
    return "\n".join(lines)


def support_page(outcomes: Mapping[Cell, Outcome]) -> str:
    """``docs/support_matrix.md``. What it says of methods holds where `support_methods` has found that they learn."""
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
    return f"{_INTRODUCTION}\n" + "\n\n".join(tables) + f"\n\n## Why not\n\n{notes}\n\n{_methods_table()}\n"


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

_METHODS = """Six steps of each on four rows, on a tiny random model and a CPU: the loss of the last is lower than
that of the first. What each is: [adapters and layers](adapters.md), [optimizers](optimizers.md)."""

_INTRODUCTION = """# Support matrix

This page is generated from real runs (`make docs`): one step of training on a tiny random
model of each family, on a CPU, for each objective (`sft`, `rm`, `dpo`, `kto`; `pt` trains as `sft` does). A cell
gives the result of all objectives, or lists them. Loss and gradient of the step are the same in all layouts; a test
compares them.

- **padded**: `train.packing: none`, a row for each answer.
- **packed**: `train.packing: best_fit`; answers share rows and do not see each other.
- **shared**: the same, and what sequences of a row begin with in common is computed once (`train.shared_prompts`): the
  prompt of two answers, and for `sft` the earlier turns of a conversation whose history the template rewrites.
- **falls back**: it trains the same and costs more, for the reason named.
- **refused**: it says so before the first step.

The families cover the main differences: windows in every layer (`mistral`) or in every other (`gemma3`), experts
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
