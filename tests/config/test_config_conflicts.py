"""Keys that are fine alone and make no sense together: both are named, with their lines."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from luthier.config.adapters import DECIDED_BEFORE, KEYS_OF_TYPE, keys_in_force
from luthier.config.choices import AdapterType
from luthier.config.draft import read_draft
from luthier.config.loading import dump_config, expand, load_config_text, parse_text
from luthier.config.schema import AdapterConfig
from luthier.errors import (
    UNPLACED,
    BudgetError,
    CheckpointError,
    ConfigError,
    ModelError,
    Problem,
    SourceError,
    StoreError,
    TemplateError,
    TokenizerError,
    UserError,
)
from tests.conftest import refused

PLACED = """\
model:
  name_or_path: preset:tiny-qwen3
data:
  train:
    - {path: a.jsonl}
    - path: b.jsonl
  max_length: 99
template:
  chat_template: chatml
train: {lr_scheduler_kwargs: {power: 2}}
"""
# an error that is raised after loading, and where it is told
LATE = [
    (UserError("a row has 5 tokens, data.max_length is 3"), "run.yaml:7 data.max_length: a row has 5"),
    (UserError("data.max_length: too small"), "run.yaml:7 data.max_length: too small"),
    (UserError("of no key at all"), "of no key at all"),
    (UserError("weights of model.vision_tower.layers are missing"), "weights of model.vision_tower.layers"),
    (UserError("/data/model.name_or_path: no such file"), "/data/model.name_or_path: no such file"),
    (UserError("train.lr_scheduler_kwargs.power of 2"), "run.yaml:10 train.lr_scheduler_kwargs.power of 2"),
    (UserError("data.train[1].path and data.train[7].path"), "run.yaml:6 data.train[1].path and"),
    (UserError("the loss is no number", key="train.learning_rate"), "run.yaml:10 train.learning_rate: the loss"),
    (UserError("about a section that is not written", key="output.dir"), "run.yaml output.dir: about"),
    (TemplateError("line 3: 'x' is undefined"), "run.yaml:9 template.chat_template: line 3"),
    (TokenizerError("no tokenizer.json"), "run.yaml:2 model.name_or_path: no tokenizer.json"),
    (ModelError("no weights"), "run.yaml:2 model.name_or_path: no weights"),
    (BudgetError("3 of 4 rows are lost"), "run.yaml:3 data.max_drop: 3 of 4"),
    (StoreError("damaged"), "run.yaml:3 data.store: damaged"),
    (CheckpointError("no checkpoint is whole"), "run.yaml output.dir: no checkpoint"),
    (SourceError("some other file cannot be read"), "some other file"),
    (ConfigError([Problem(where=UNPLACED, key="train.optim", what="not known")]), "run.yaml:10 train.optim: not known"),
]


@pytest.mark.parametrize(("error", "begins"), LATE, ids=lambda value: str(value)[:40])
def test_an_error_of_a_key_is_told_with_the_line_of_the_key_and_no_other_is(error: UserError, begins: str) -> None:
    tree = parse_text(PLACED, "run.yaml").tree
    assert tree is not None
    draft, problems = read_draft(expand(tree), "run.yaml")
    assert draft is not None and problems == []
    with pytest.raises(type(error)) as told, draft.placing():
        raise error
    assert str(told.value).startswith(begins)
    draft.place(error)  # once is enough
    assert str(told.value).startswith(begins)


GOOD = "model: preset:tiny-qwen3\ndata:\n  train: preset:skills\n"


def told(lines: str, data: str = "") -> list[str]:
    """All problems of the good description with more lines in ``data`` (from line 4 on) and after it."""
    try:
        load_config_text(f"{GOOD}{data}{lines}\n", "run.yaml", check_paths=False)
    except ConfigError as error:
        assert all(problem.hint for problem in error.problems)
        return [str(problem) for problem in error.problems]
    return []


EVAL = "  eval_split: 0.1\n"

# (lines after data, lines in data, pieces of the only problem)
CONFLICTS = [
    ("", "  eval_split: 0.1\n  eval: x.jsonl\n", ("run.yaml:4 data.eval_split: ", "data.eval (line 5)", "keep one")),
    ("", "  eval_split: 9\n  eval: [x.jsonl]\n", ("run.yaml:4 data.eval_split: ", "(9)")),
    ("", "  use: [a]\n", ("run.yaml:4 data.use: ", "data.registry is not given", "dataset_info.json")),
    ("", "  eval_use: a\n", ("run.yaml:4 data.eval_use: ", "data.registry is not given")),
    ("", "  registry: r.json\n", ("run.yaml:4 data.registry: ", "neither data.use nor data.eval_use")),
    (
        "eval:\n  load_best_model_at_end: true",
        "",
        ("run.yaml:5 eval.load_best", "no eval data", "data.eval_split: 0.05"),
    ),
    ("eval:\n  early_stopping_patience: 2", "", ("run.yaml:5 eval.early_stopping_patience: ", "no eval data")),
    (
        "eval:\n  early_stopping_patience: 2\n  strategy: no",
        EVAL,
        ("run.yaml:6 eval.early_stopping_patience: ", "eval.strategy (line 7) is no", "epoch or steps"),
    ),
    ("eval: {generate_rows: 5}", "", ("run.yaml:4 eval.generate_rows: ", "no eval data")),
    (
        "eval: {generate_rows: 5}\nobjective: rm",
        EVAL,
        ("run.yaml:5 eval.generate_rows: ", "answers nothing", "objective.name (line 6) is rm"),
    ),
    ("train: {lr_scheduler_type: reduce_lr_on_plateau}", "", ("run.yaml:4 train.lr_scheduler_type: ", "no eval data")),
    (
        "eval: {load_best_model_at_end: true}\noutput:\n  save_strategy: steps",
        EVAL,
        ("run.yaml:5 eval.load_best", "eval.strategy (default) is epoch", "output.save_strategy (line 7) is steps"),
    ),
    (
        "eval: {load_best_model_at_end: true, strategy: steps, steps: 30}\n"
        "output: {save_strategy: steps, save_steps: 50}",
        EVAL,
        ("run.yaml:5 eval.load_best", "output.save_steps (line 6) is 50", "eval.steps (line 5): 30", "save_steps: 30"),
    ),
    (
        "train: {tokens_per_step: 9000, gradient_accumulation_steps: 4}",
        "",
        (
            "run.yaml:4 train.tokens_per_step: ",
            "9,000 tokens",
            "gradient_accumulation_steps (line 4)",
            "4 micro-batches",
        ),
    ),
    (
        "train: {shared_prompts: true}\ntemplate: {history: one_rendering}",
        "",
        ("run.yaml:4 train.shared_prompts: ", "template.history (line 5) is one_rendering", "auto"),
    ),
    ("train: {packing: split}", "", ("run.yaml:4 train.packing: ", "plain text", "objective.name (default) is sft")),
    (
        "",
        "  mixture: {temperature: 2}\n",
        ("run.yaml:4 data.mixture.temperature: ", "data.mixture.by (default) is epochs", "rows or tokens"),
    ),
    ("", "  mixture: {by: epochs, stop: first}\n", ("run.yaml:4 data.mixture.stop: ", "by (line 4) is epochs")),
    (
        "train: {lr_scheduler_type: cosine_with_min_lr}",
        "",
        ("run.yaml:4 train.lr_scheduler", "min_lr", "lr_scheduler_kwargs"),
    ),
    (
        "train: {lr_scheduler_type: warmup_stable_decay}",
        "",
        ("run.yaml:4 train.lr_scheduler_type: ", "num_decay_steps"),
    ),
    (
        "train: {optim: galore_adamw}\nadapter: lora",
        "",
        ("run.yaml:4 train.optim: ", "galore_adamw", "adapter.type (line 5)", "adamw_torch"),
    ),
    (
        "train: {optim: lomo, gradient_accumulation_steps: 2}",
        "",
        ("run.yaml:4 train.gradient_accumulation_steps: ", "train.optim (line 4)", "lomo"),
    ),
    (
        "runtime: {device: cpu}\ntrain: {precision: fp16}",
        "",
        ("run.yaml:5 train.precision: ", "runtime.device (line 4) is cpu", "bf16 or fp32"),
    ),
    (
        "runtime: {device: cpu}\nmodel2: 1",
        "",
        ("run.yaml:5 model2: ", "model"),
    ),
    (
        "adapter:\n  r: 8",
        "",
        ("run.yaml:5 adapter.r: ", "lora", "adapter.type (default) is full", "adapter.type: lora"),
    ),
    ("adapter: {type: full, lora_alpha: 8}", "", ("run.yaml:4 adapter.lora_alpha: ", "adapter.type (line 4) is full")),
    (
        "adapter: {type: lora, init_lora_weights: eva, target_parameters: [experts.down_proj]}",
        "",
        ("run.yaml:4 adapter.init_lora_weights: ", "adapter.target_parameters (line 4)"),
    ),
    (
        "adapter: {type: lora, init_lora_weights: eva}\nruntime: {sharding: fsdp}",
        "",
        ("run.yaml:4 adapter.init_lora_weights: ", "runtime.sharding (line 5)"),
    ),
    (
        "adapter: {type: lora, init_lora_weights: lora_ga}\nobjective: dpo",
        "",
        ("run.yaml:4 adapter.init_lora_weights: ", "dpo compares with the model", "lora_ga changes its base"),
    ),
    (
        "adapter: {type: lora, init_lora_weights: lora_ga}\nobjective: rm",
        "",
        ("run.yaml:4 adapter.init_lora_weights: ", "rm has no such loss"),
    ),
    (
        "adapter: {type: lora, init_lora_weights: corda}\nruntime: {sharding: fsdp}",
        "",
        ("run.yaml:4 adapter.init_lora_weights: ", "runtime.sharding (line 5)"),
    ),
    (
        "adapter: {type: lora, init_lora_weights: loftq}",
        "",
        ("run.yaml:4 adapter.init_lora_weights: ", "nothing is quantized", "model.quantization: nf4"),
    ),
    ("adapter: {type: llama_pro}", "", ("run.yaml:4 adapter.type: ", "adapter.expand_layers", "expand_layers: 4")),
    ("adapter: {type: oft, r: 8}", "", ("run.yaml:4 adapter.r: ", "is oft")),
    ("adapter: {type: oft, init_lora_weights: false}", "", ("run.yaml:4 adapter.init_lora_weights: ", "is oft")),
    (
        "adapter: {type: lora, init_lora_weights: false}\nobjective: dpo",
        "",
        ("run.yaml:4 adapter.init_lora_weights: ", "dpo compares with the model without"),
    ),
    ("adapter: {type: oft, loraplus_lr_ratio: 8}", "", ("run.yaml:4 adapter.loraplus_lr_ratio: ", "lora", "is oft")),
    (
        "adapter: {type: lora, freeze_trainable_layers: 2}",
        "",
        ("run.yaml:4 adapter.freeze_trainable_layers: ", "freeze"),
    ),
    ("adapter: freeze", "", ("run.yaml:4 adapter.type: ", "all weights are frozen", "freeze_trainable_layers: 2")),
    ("adapter: {type: freeze, freeze_trainable_layers: 0}", "", ("run.yaml:4 adapter.type: ", "(line 4) is 0")),
    (
        "output:\n  overwrite: true\n  resume: ./checkpoint",
        "",
        ("run.yaml:5 output.overwrite: ", "output.resume (line 6)", "resume: never"),
    ),
    (
        "output:\n  resume: ./checkpoint\n  save_only_model: true",
        "",
        ("run.yaml:6 output.save_only_model: ", "output.resume (line 5)"),
    ),
    (
        "objective: sft",
        "  eval:\n    path: p.jsonl\n    format: preference\n",
        ("run.yaml:6 data.eval[0].format: ", "sft"),
    ),
    (
        "",
        "  eval:\n    path: p.jsonl\n    thinking: text\n    thinking_tags: [a, b]\n",
        ("run.yaml:7 data.eval[0].thinking_tags: ", "data.eval[0].thinking (line 6)", "thinking: tags"),
    ),
]


@pytest.mark.parametrize(("lines", "data", "pieces"), CONFLICTS)
def test_a_conflict_names_both_keys_with_their_lines(lines: str, data: str, pieces: tuple[str, ...]) -> None:
    problems = told(lines, data)
    assert len(problems) == 1, problems
    assert problems[0].startswith(pieces[0]) and all(piece in problems[0] for piece in pieces), problems[0]


def test_what_belongs_together_is_accepted() -> None:
    assert told("", "  registry: r.json\n  use: [a]\n  eval_use: [b]\n") == []
    assert told("eval: {load_best_model_at_end: true, early_stopping_patience: 2}", EVAL) == []
    steps = "eval: {load_best_model_at_end: true, strategy: steps, steps: 30}\n"
    assert told(steps + "output: {save_strategy: steps, save_steps: 60}", EVAL) == []
    shares = steps.replace("steps: 30", "steps: 0.1")
    assert shares != steps and told(shares + "output: {save_strategy: steps, save_steps: 0.3}", EVAL) == []
    for other in ("0.25", "60"):
        (problem,) = told(shares + f"output: {{save_strategy: steps, save_steps: {other}}}", EVAL)
        assert "eval.load_best" in problem
    assert told("train: {warmup_steps: 100, max_steps: 50}") == []
    assert told("train: {tokens_per_step: 9000, gradient_accumulation_steps: 1, packing: window}") == []
    assert told("objective: pt\ntrain: {packing: split}") == []
    assert told("", "  mixture: tokens\n") == []
    assert told("", "  mixture: {by: rows, temperature: 2, stop: first}\n") == []
    assert told("", "  mixture: {by: epochs, temperature: null, stop: all}\n") == []
    assert told("train: {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}}") == []
    assert told("adapter: {type: lora, r: 8, init_lora_weights: pissa, loraplus_lr_ratio: 16}") == []
    assert told("adapter: {type: lora, init_lora_weights: pissa, use_dora: true}") == []
    assert told("adapter: {type: lora, init_lora_weights: olora, use_rslora: true, rank_pattern: {q_proj: 4}}") == []
    assert told("adapter: {type: freeze, freeze_trainable_layers: -2}") == []
    assert told("adapter: {type: freeze, freeze_trainable_modules: '*norm*'}") == []
    assert told("adapter: {type: oft, oft_block_size: 8, merge: true}") == []
    assert told("adapter: {type: oft, use_dora: false, lora_dropout: 0}") == []
    assert told("adapter: {type: lora, init_lora_weights: false}") == []
    assert (
        told("adapter: {type: lora, init_lora_weights: false}\nobjective: {name: dpo, reference: {source: none}}") == []
    )
    assert told("adapter: {type: full, merge: false, lora_alpha: null}") == []
    assert told("output: {overwrite: true, resume: never, save_only_model: true}") == []
    assert told("runtime: {device: cuda}\ntrain: {precision: fp16}") == []


def test_gpu_kernels_are_refused_on_a_cpu() -> None:
    text = "data: {train: preset:skills}\nruntime: {device: cpu}\nmodel:\n  name_or_path: preset:tiny-qwen3\n"
    for line in (
        "attn_implementation: flash_attention_2",
        "attn_implementation: flex_attention",
        "use_liger_kernel: true",
    ):
        with refused(ConfigError, "run.yaml:5", "runtime.device", "2"):
            load_config_text(text + f"  {line}\n", "run.yaml")
    with refused(ConfigError, "run.yaml:5", "paged_lion_8bit", "runtime.device"):
        load_config_text(text + "train: {optim: paged_lion_8bit}\n", "run.yaml")


def test_learning_nothing_is_refused_unless_rows_or_sources_can_say_what_is_learned() -> None:
    text = (
        "model: preset:tiny-qwen3\ntemplate: {train_on: none}\ndata:\n  train:\n  - {path: x.jsonl, format: {}, %s}\n"
    )

    def load(format: str, more: str = "") -> None:
        load_config_text((text % more).replace("{}", format), "run.yaml", check_paths=False)

    with refused(ConfigError, "run.yaml:2", "template.train_on"):
        load("alpaca")
    with pytest.raises(ConfigError, match="nothing is learned"):
        load("messages", "train_on: none")
    load("messages")
    load("alpaca", "train_on: assistant")


def test_two_counts_of_rows_are_refused() -> None:
    text = "model: preset:tiny-qwen3\ndata:\n  train:\n  - path: x.jsonl#5\n    max_rows: 6\n"
    with refused(ConfigError, "run.yaml:5", "data.train[0].max_rows", "6", "4"):
        load_config_text(text, "run.yaml", check_paths=False)


def test_every_adapter_key_belongs_to_a_type_and_is_refused_for_the_others() -> None:
    values = {"r": "8", "use_dora": "true", "oft_block_size": "8", "target_modules": "[q_proj]", "merge": "true"}
    owned_by = {
        AdapterType.LORA: {"r", "use_dora", "target_modules", "merge"},
        AdapterType.OFT: {"oft_block_size", "target_modules", "merge"},
        AdapterType.VERA: {"r", "target_modules", "merge"},
    }
    for kind, (key, value) in itertools.product(AdapterType, values.items()):
        owned = key in owned_by.get(kind, set())
        more = ", freeze_trainable_layers: 2" if kind is AdapterType.FREEZE else ""
        assert (told(f"adapter: {{type: {kind}, {key}: {value}{more}}}") == []) is owned, (kind, key)


@pytest.mark.parametrize(
    ("line", "says"),
    [("runtime: {device: cpu}", "its kernels need a GPU, and"), ("objective: rm", "a reward model has no output head")],
)
def test_a_head_kernel_that_can_never_be_used_is_refused(line: str, says: str) -> None:
    text = f"data: {{train: preset:skills}}\nmodel: preset:tiny-qwen3\n{line}\ntrain:\n  head_kernel: "
    with pytest.raises(ConfigError, match=rf"run\.yaml:5 train\.head_kernel: .*{says}.*set train\.head_kernel: auto"):
        load_config_text(f"{text}liger\n", "run.yaml")
    for policy in ("auto", "chunked"):
        assert load_config_text(f"{text}{policy}\n", "run.yaml").train.head_kernel == policy


@pytest.mark.parametrize("pattern", ["(", "(a+)+"])
def test_a_pattern_of_modules_that_is_no_regular_expression_is_refused(pattern: str) -> None:
    (problem,) = told(f"adapter: {{type: lora, target_modules: ['regex:q_proj', 'regex:{pattern}']}}")
    assert "adapter.target_modules[1]" in problem
    assert told(f"adapter: {{type: lora, target_modules: ['regex:q_proj', '{pattern}']}}") == []


VALUES = {
    "train_parts": "[language_model]",
    "r": "16", "lora_alpha": "8", "lora_dropout": "0.0", "target_modules": "[q_proj]",
    "modules_to_save": "[lm_head]", "use_rslora": "false", "use_dora": "false", "init_lora_weights": "true",
    "oft_block_size": "32", "loraplus_lr_ratio": "16", "merge": "true", "target_parameters": "[experts.down_proj]",
    "rank_pattern": "{q_proj: 4}", "alpha_pattern": "{q_proj: 4}", "merge_first": "[x]",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["lora", "oft", "vera"])
@pytest.mark.parametrize("name", VALUES)
def test_beside_an_adapter_that_is_there_a_key_decides_something_or_is_refused_where_it_stands(
    kind: str, name: str
) -> None:
    of_type = name in KEYS_OF_TYPE[AdapterType(kind)]
    alone = told(f"adapter:\n  type: {kind}\n  {name}: {VALUES[name]}")
    beside = told(f"adapter:\n  type: {kind}\n  name_or_path: x\n  {name}: {VALUES[name]}")
    if name in ("merge", "merge_first", "loraplus_lr_ratio") and of_type:
        assert alone == beside == []
    elif of_type:
        assert alone == [] and len(beside) == 1
        assert beside[0].startswith(f"run.yaml:7 adapter.{name}: ") and "adapter.name_or_path (line 6)" in beside[0]
    # where the value is a default, the key of another type says nothing


def test_every_key_of_the_adapter_is_in_force_or_decided_before() -> None:
    for kind in (each for each in AdapterType if each.is_beside):
        keys = keys_in_force(AdapterConfig(type=kind, name_or_path="x"))
        assert keys | DECIDED_BEFORE >= KEYS_OF_TYPE[kind] and not keys & DECIDED_BEFORE


def test_a_run_beside_an_adapter_is_dumped_without_what_it_decided() -> None:
    lines = f"{GOOD}adapter:\n  type: lora\n  name_or_path: x\n"
    config = load_config_text(lines, "run.yaml", check_paths=False)
    assert load_config_text(dump_config(config), "dump.yaml", check_paths=False) == config


@pytest.mark.parametrize(
    ("weight", "by", "refused"), [("1e6", "epochs", True), ("1e6", "rows", False), ("50", "epochs", False)]
)
def test_a_weight_that_repeats_each_row_a_million_times_is_refused(weight: str, by: str, refused: bool) -> None:
    data = f"data: {{train: [{{path: x.jsonl, weight: {weight}}}, {{path: y.jsonl}}], mixture: {by}}}\n"
    try:
        load_config_text(f"model: preset:tiny-qwen3\n{data}", "run.yaml", check_paths=False)
        problems = []
    except ConfigError as error:
        problems = error.problems
    assert [problem.key for problem in problems] == ["data.train[0].weight"] * refused


DOES_SOMETHING_ELSE = [
    ("eval.metric_for_best_model", "eval: {metric_for_best_model: accuracy, load_best_model_at_end: true}", EVAL),
    (
        "eval.metric_for_best_model",
        "objective: rm\neval: {metric_for_best_model: perplexity, early_stopping_patience: 1}",
        EVAL,
    ),
    ("train.pad_to_multiple_of", "train: {pad_to_multiple_of: 5000}", ""),
    ("train.weight_decay", "train: {weight_decay: 1e6, learning_rate: 1e-3}", ""),
    (
        "train.lr_scheduler_kwargs",
        "train: {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1.0}}",
        "",
    ),
    (
        "train.lr_scheduler_kwargs",
        "train: {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 2}}",
        "",
    ),
    (
        "train.lr_scheduler_kwargs",
        "train: {max_steps: 50, lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 100}}",
        "",
    ),
    ("objective.label_smoothing", "objective: {name: dpo, label_smoothing: 0.5}", ""),
    (
        "eval.metric_for_best_model",
        "objective: dpo\neval: {metric_for_best_model: perplexity}\ntrain: {lr_scheduler_type: reduce_lr_on_plateau}",
        EVAL,
    ),
    ("template.train_on", "objective: rl\ntemplate: {train_on: all}", ""),
    ("template.train_stop", "objective: {name: best_of_n}\ntemplate: {train_stop: false}", ""),
]
SOUND = [
    ("eval: {metric_for_best_model: token_accuracy, load_best_model_at_end: true}", EVAL),
    ("objective: kto\neval: {metric_for_best_model: accuracy, early_stopping_patience: 1}", EVAL),
    ("train: {pad_to_multiple_of: 4096, weight_decay: 0.1}", ""),
    ("objective: dpo\ntrain: {pad_to_multiple_of: 8192}", ""),
    ("train: {lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}}", ""),
    ("objective: {name: sft, label_smoothing: 0.5}", ""),
]


@pytest.mark.parametrize(("key", "lines", "data"), DOES_SOMETHING_ELSE)
def test_a_run_that_would_do_something_else_than_it_says_is_refused(key: str, lines: str, data: str) -> None:
    (problem,) = told(lines, data)
    assert f" {key}: " in problem


@pytest.mark.parametrize(("lines", "data"), SOUND)
def test_settings_near_those_are_taken(lines: str, data: str) -> None:
    assert told(lines, data) == []


# How a run's answers are drawn and judged: what is wrong, the key, and a piece of what is told.
WRONG_ANSWERS = [
    ("rewards: [{url: 'localhost:8000/score'}]", "rollout.rewards[0].url", "http://localhost:9000"),
    ("rewards: [{url: 'http://here:99999'}]", "rollout.rewards[0].url", "no address|is not the address"),
    ("rewards: [{function: 'code.py:polite', revision: v2}]", "rollout.rewards[0].revision", "of a model of the Hub"),
    ("rewards: [{url: 'http://me:secret@here'}]", "rollout.rewards[0].url", "password"),
    ("rewards: [{function: 'code.py:nosuch'}]", "rollout.rewards[0].function", "defines no 'nosuch'.*polite, Shop"),
    ("rewards: [{function: 'broken.py:polite'}]", "rollout.rewards[0].function", "cannot be read as Python"),
    ("rewards: [{metric: exact, weight: 0}]", "rollout.rewards", "weight 0"),
    ("engine: 'http://[::1'", "rollout.engine.url[0]", "is not the address"),
    ("engine: 'http://me@here:1'", "rollout.engine.url[0]", "before the @"),
    ("tools: [nofile.py]", "rollout.tools[0].code", "FILE.py:NAME"),
    ("tools: ['code.py:nosuch']", "rollout.tools[0].code", "defines no 'nosuch'"),
    ("environment: 'nofile.py:Shop'", "rollout.environment.code", "there is no file nofile.py"),
    ("environment: 'code.py:Shop'\n  tools: ['code.py:polite']", "rollout.tools", "environment"),
]


@pytest.mark.parametrize(("lines", "key", "piece"), WRONG_ANSWERS)
def test_what_draws_and_judges_answers_is_checked_without_running_it(
    lines: str, key: str, piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text("open('was_run', 'w')\n\n\ndef polite(answer): ...\n\n\nclass Shop: ...\n")
    Path("broken.py").write_text("def polite(answer:\n")
    (problem,) = told(f"objective: rl\nrollout:\n  {lines}")
    assert problem.startswith(f"run.yaml:{6 + lines.count(chr(10)) * ('tools' in key)} {key}: ")
    assert re.search(piece, problem)
    assert not Path("was_run").exists()


def test_code_that_may_define_anything_is_left_to_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("from all_of import *", "from one import polite", "if 1:\n    polite = print", "exec('polite = 1')"):
        Path("code.py").write_text(text + "\n")
        assert told("objective: rl\nrollout:\n  rewards: [{function: 'code.py:polite'}]") == []


@pytest.mark.parametrize("url", ["nohost", "http://me:secret@here"])
def test_the_address_of_a_judge_is_checked(url: str) -> None:
    (problem,) = told(f"judge: '{url}'")
    assert problem.startswith("run.yaml:4 judge.url: ")
