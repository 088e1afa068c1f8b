"""What can be trained how, found out by doing it: a step on a tiny random model of each family.

`scripts/write_docs.py` writes `docs/support_matrix.md` from this, and a test sees that the page is what runs say.
"""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tiny_models import MODELS, SIZES
from tiny_quantized import experts_in_4_bit_floats, in_8_bit_floats, in_gptq_or_awq, in_packed_ints, write_base
from tiny_recurrent import RECURRENT_MODELS
from tiny_rows import FINGERPRINT, make_rows
from tiny_runs import TINY, make_config, make_data, make_segments
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MambaConfig, PretrainedConfig

from luthier.config.choices import QuantizationType
from luthier.config.loading import load_draft
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import AddedTokens, Tokenizer, load_tokenizer
from luthier.errors import ConfigError, UserError
from luthier.preparation import Prepared
from luthier.preparation.prepare import prepare
from luthier.training.data import open_run_data
from luthier.training.fit import fit, fit_data
from luthier.training.preflight import check_run
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note
from tests.media.media_files import image_file, picture
from tests.media.tiny_folder import write_folder

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
    try:
        data = open_run_data(config, _prepared(root, cell.objective), encoder_fingerprint=FINGERPRINT)
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


@cache
def _prepared(root: Path, objective: str) -> Prepared:
    turns = 3 if objective == "sft" else None  # conversations whose history is rewritten: trees, too
    rows = make_rows(root / f"rows for {objective}", objective, ROWS, turns=turns)
    return Prepared(train=rows, eval=None, num_encoded=len(rows), num_reused=0, quarantine=None)


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
UNTIED: dict[str, Any] = {"model__config_overrides": {**TINY, "tie_word_embeddings": False}}
SEES: dict[str, Any] = {
    "model__name_or_path": "vision", "model__random_init": True, "model__config_overrides": {},
    "data__train": [{"path": "pictures.jsonl"}], "data__max_length": 64, "data__workers": 0,
    "adapter__train_parts": ["language_model", "projector", "tower"],
}  # fmt: skip
STILL = 1e-12  # a rate at which nothing is learned: what learns beside it has a rate of its own
PARTS: dict[str, dict[str, Any]] = {
    "embedding": {}, "output_layer": UNTIED, "router": MOE, "projector": SEES, "tower": SEES,
}  # fmt: skip
NEW_TOKEN = "<|act|>"
NEW: dict[str, Any] = {"model__add_special_tokens": [NEW_TOKEN]}
FIRST_VALUES: dict[str, dict[str, Any]] = {
    "`model.add_special_tokens`": NEW,
    "`model.token_descriptions`": {**NEW, "model__token_descriptions": {NEW_TOKEN: "begins a tool call"}},
    "`model.new_token_noise`": {**NEW, "model__new_token_noise": 0.1},
}
BASES = [each for each in QuantizationType if each not in (QuantizationType.NONE, QuantizationType.TORCHAO_INT4)]
PACKED = ("gptq", "awq") if find_spec("gptqmodel") is not None else ()
METHOD_OF: dict[str, dict[str, Any]] = {
    "oft": {"adapter__type": "oft", "adapter__oft_block_size": 8},
    "vera": {"adapter__type": "vera", "adapter__r": 64},
}
METHODS: dict[str, dict[str, Any]] = {
    "`adapter.type: full`": {},
    "`adapter.type: freeze`": {"adapter__type": "freeze", "adapter__freeze_trainable_layers": 1},
    "`adapter.freeze_trainable_modules`": {
        "adapter__type": "freeze", "adapter__freeze_trainable_modules": ["*embed_tokens*"],
    },
    "`adapter.type: llama_pro`": {"adapter__type": "llama_pro", "adapter__expand_layers": 1},
    "`adapter.type: lora`": LORA,
    "`adapter.use_rslora`": {**LORA, "adapter__use_rslora": True},
    "`adapter.use_dora`": {**LORA, "adapter__use_dora": True},
    **{f"`adapter.init_lora_weights: {way}`": {**LORA, "adapter__init_lora_weights": way}
       for way in ("pissa", "pissa_niter_16", "olora", "orthogonal", "gaussian", "eva", "corda", "lora_ga")},
    "`adapter.name_or_path`": {"adapter__type": "lora", "adapter__name_or_path": "`adapter.type: lora`"},
    "`adapter.merge_first`, of two adapters": {
        **LORA, "adapter__merge_first": ["`adapter.use_rslora`", "`adapter.use_dora`"],
    },
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
    **{f"a model that comes in {how}": {**LORA, "model__name_or_path": how, "model__config_overrides": {}}
       for how in ("nf4", "int8", "fp8", "mxfp4", "compressed-tensors", *PACKED)},
    "a model that comes in fp8, `model.quantization: nf4`": {
        **LORA, "model__name_or_path": "fp8", "model__config_overrides": {}, "model__quantization": "nf4",
    },
    **FIRST_VALUES,
    **{f"{name}, LoRA": {**LORA, **keys, "train__learning_rate": STILL, "train__learning_rates": {"embedding": 1e-1}}
       for name, keys in FIRST_VALUES.items()},
    "`train.layer_decay`": {"train__layer_decay": 0.8},
    **{f"`train.learning_rates`, of the {part} alone": {
        **keys, "train__learning_rate": STILL, "train__learning_rates": {part: 5e-2},
    } for part, keys in PARTS.items()},
    "`train.gradient_checkpointing`": {"train__gradient_checkpointing": True},
    "`train.neftune_noise_alpha`": {"train__neftune_noise_alpha": 5.0},
    "`train.offload`": {"train__offload": ["optimizer", "activations"]},
    **{f"`train.optim: {name}`": {"train__optim": name, "train__learning_rate": FAST.get(name, 1e-2)} for name in HERE},
}  # fmt: skip


def support_methods(root: Path, tokenizer: Tokenizer) -> dict[str, tuple[float, float]]:
    """Of each method the losses of the first and the last step of a short run on four rows."""
    write_models(root, tokenizer)
    found = {}
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other packages have to say of themselves
        for name, keys in METHODS.items():
            steps = _train_by(root, tokenizer, name, keys).steps
            found[name] = (steps[0].loss, steps[-1].loss)
    return found


def write_models(root: Path, tokenizer: Tokenizer) -> None:
    """Models that come in few bits, each in a folder under ``root`` that is named for its form, and one that sees, with
    its rows."""
    write_folder(root / "vision")
    with (root / "pictures.jsonl").open("w", encoding="utf-8") as rows:
        for number in range(4):
            (root / f"{number}.png").write_bytes(image_file(picture(56 + 28 * number, 56)))
            asked = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "What number?"}]
            said = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {number}."}]
            rows.write(json.dumps({"messages": said}) + "\n")
    base = root / "whole"
    base.mkdir()
    write_base(base, tokenizer)
    for name, how in (("nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}), ("int8", {"load_in_8bit": True})):
        stored = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(**how))
        stored.save_pretrained(root / name)
    in_8_bit_floats(base, root / "fp8")
    in_packed_ints(base, root / "compressed-tensors")
    experts_in_4_bit_floats(base, root / "mxfp4")
    for name in ("gptq", "awq"):
        in_gptq_or_awq(base, root / name, name)


def _train_by(root: Path, tokenizer: Tokenizer, name: str, keys: Mapping[str, Any]) -> RunResult:
    given = {"train__learning_rate": 1e-2, **keys}
    if (root / str(given.get("model__name_or_path"))).is_dir():
        given["model__name_or_path"] = str(root / given["model__name_or_path"])
    if (before := given.get("adapter__name_or_path")) is not None:
        given["adapter__name_or_path"] = str(_method_folder(root, before) / "model")
    if before := given.get("adapter__merge_first"):
        given["adapter__merge_first"] = [str(_method_folder(root, each) / "model") for each in before]
    if rows := given.get("data__train"):
        given["data__train"] = [{"path": str(root / rows[0]["path"])}]
    config = make_config(
        _method_folder(root, name),
        train__max_steps=12 if "radam" in name else 6,  # it waits for a few steps before it changes a weight
        train__per_device_train_batch_size=4,
        train__lr_scheduler_type="constant",
        runtime__threads=1,
        **given,
    )
    if config.data.train:  # pictures, which only a processor can read
        encoder = Encoder.from_config(config)
        return fit(config, encoder, prepare(config, encoder))
    segments = make_segments(4)
    if config.model.add_special_tokens:
        tokenizer = load_tokenizer("preset:tiny-qwen3", added=AddedTokens(special=(NEW_TOKEN,)))
        for segment in segments:
            segment.input_ids[[0, -2]] = tokenizer.new_ids[0]  # it is read, and it is a target
    return fit_data(config, tokenizer, make_data(segments))


def _method_folder(root: Path, name: str) -> Path:
    return root / f"method {list(METHODS).index(name)}"


def refused_methods(root: Path) -> dict[str, str]:
    """What does not run here, each with the words in which a run of it is refused before it begins; ``root`` as
    `write_models` leaves it."""
    named = {name: {**LORA, "model__name_or_path": str(root / name)} for name in ("gptq", "awq") if name not in PACKED}
    asked = {
        **{f"`train.optim: {name}`": {"train__optim": name} for name in sorted(ELSEWHERE | ON_GPU_ALONE)},
        "`model.quantization: torchao_int4`": {**LORA, "model__quantization": "torchao_int4"},
        "`objective.reference.quantization: torchao_int4`": {
            "objective__name": "dpo", "objective__reference": {"quantization": "torchao_int4"},
            "data__train": "preset:preferences#4",
        },
        **{f"a model that comes in {name}": keys for name, keys in named.items()},
    }  # fmt: skip
    found = {}
    for name, keys in asked.items():
        tree: dict[str, Any] = {"model": {"name_or_path": "preset:tiny-qwen3"}, "data": {"train": "preset:skills#4"},
                                "output": {"dir": str(root / "refused")}, "runtime": {"device": "cpu"}}  # fmt: skip
        for key, value in keys.items():
            section, _, inner = key.partition("__")
            tree.setdefault(section, {})[inner] = value
        try:
            check_run(load_draft(tree, to_train=True))
        except ConfigError as error:
            found[name] = f"refused: {_stable(error.problems[0].what)} ({error.problems[0].hint})"
    return found


def _methods_table(refused: Mapping[str, str]) -> str:
    lines = ["## Methods", "", _METHODS, "", "| method | verdict |", "|---|---|"]
    lines += [f"| {name} | learns |" for name in METHODS]
    lines += [f"| {name} | {why} |" for name, why in refused.items()]
    return "\n".join(lines)


def support_page(outcomes: Mapping[Cell, Outcome], refused: Mapping[str, str]) -> str:
    """``docs/support_matrix.md``, with what `refused_methods` gives. What it says of the other methods holds where
    `support_methods` has found that they learn."""
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
    return f"{_INTRODUCTION}\n" + "\n\n".join(tables) + f"\n\n## Why not\n\n{notes}\n\n{_methods_table(refused)}\n"


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
that of the first. What each is: [adapters and layers](adapters.md), [optimizers](optimizers.md). Rows with *alone* have
a rate for that part and next to none for all others. What cannot run there is shown with the words in which Luthier
refuses it."""

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
