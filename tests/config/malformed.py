"""Malformed run descriptions, each with what a person must be told: line, key, reason, way out.

Every text is read as ``run.yaml`` in a folder that holds ``rows.jsonl`` and ``dataset_info.json``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A text, and for each problem the start of its line and pieces that it must hold."""

    name: str
    text: str
    expect: tuple[tuple[str, ...], ...]


GOOD = "model: preset:tiny-qwen3\ndata: {train: rows.jsonl}\n"


def _case(name: str, text: str, *expect: tuple[str, ...]) -> Case:
    return Case(name, text, expect)


def _with(name: str, lines: str, *expect: tuple[str, ...]) -> Case:
    return Case(name, GOOD + lines + "\n", expect)


SYNTAX = [
    _case("empty", "", ("run.yaml:1: ", "empty", "model: NAME")),
    _case("only_comments", "# to do\n\n", ("run.yaml:1: ", "empty")),
    _case("only_null", "~\n", ("run.yaml:1: ", "sections are needed", "no value")),
    _case(
        "tabs", "model: x\ndata:\n\ttrain: a\n\teval: b\n", ("run.yaml:3: ", "tab", "spaces"), ("run.yaml:4: ", "tab")
    ),
    _case("two_colons", "model: a: b\n", ("run.yaml:1: ", "second colon", 'model: "a: b"')),
    _case("no_colon", "model: x\ntrain\ndata: y\n", ("run.yaml:3: ", "line 2", "`key: value`")),
    _case("open_quote", "model: 'x\ndata: y\n", ("run.yaml:3: ", "quote that opens on line 1", "close it")),
    _case("open_list", "model: x\ndata: {train: [a, b}\n", ("run.yaml:2: ", "[ that opens on line 2", "commas")),
    _case("open_map", "data: {train: a\n", ("run.yaml:2: ", "{ that opens on line 1")),
    _case("shell_variable", "data: {train: ${HOME}/a}\n", ("run.yaml:1: ", "too early", "quotes", "shell")),
    _case("long_key", "k" * 2000 + ": 1\n", ("run.yaml:1: ", "1,024 characters")),
    _case("windows_path", 'model: "C:\\data"\n', ("run.yaml:1: ", "backslash", "single quotes")),
    _case("at_sign", "model: @x\n", ("run.yaml:1: ", "cannot begin with @", "quotes")),
    _case("percent", "a: 1\nmodel: %x\n", ("run.yaml:2: ", "cannot begin with %", "quotes")),
    _case("indentation", "data:\n  train: a\n eval: b\n", ("run.yaml:3: ", "line up", "line 1", "same indentation")),
    _case("dash_on_line", "data: - a\n", ("run.yaml:1: ", "list entry", "next line")),
    _case("text_after_quote", 'model: "x" y\n', ("run.yaml:1: ", "line up")),
    _case("star", "model: *.jsonl\n", ("run.yaml:1: ", "&.jsonl", 'quotes: "*.jsonl"')),
    _case("loop", "data: &d {train: *d}\n", ("run.yaml:1: ", "inside the value", "write the value out")),
    _case("bell", "model: \x07\n", ("run.yaml:1: ", "control character", "U+0007")),
    _case("nul_escape", 'model: "a\\0b"\n', ("run.yaml:1: ", "NUL")),
    _case("half_character", 'model: x\ndata: "\\ud83d"\n', ("run.yaml:2: ", "character")),
    _case("no_character", 'model: "\\UFFFFFFFF"\n', ("run.yaml:1: ", "not a character")),
    _case("two_documents", "model: x\n---\nmodel: y\n", ("run.yaml:2: ", "second document", "one document")),
    _case("junk_after_end", "model: x\n...\njunk\n", ("run.yaml:3: ", "second document")),
    _case("junk_after_brace", "{model: x}}\n", ("run.yaml:1: ", "after the end")),
    _case("yaml_2", "%YAML 2.0\n---\nmodel: x\n", ("run.yaml:1: ", "not YAML")),
    _case("top_list", "- model: x\n", ("run.yaml:1: ", "a list of 1", "begin with lines")),
    _case("no_blank_before_a_key", "model:x\ndata: {train: a.jsonl}\n", ("run.yaml:1: ", "no blank", "write model: x")),
    _case("no_blank", "model:x\n", ("run.yaml:1: ", '"model:x"', "blank after each colon")),
    _case("tag", "model: !!python/object/apply:os.system ['x']\n", ("run.yaml:1: ", "!!python/object/apply:os.system")),
    _case("str_tag", "model: !!str 5\n", ("run.yaml:1: ", "!!str", "quotes make a text")),
    _case("own_tag", "a: 1\nmodel: !include x.yaml\n", ("run.yaml:2: ", "!include")),
    _case("merge_of_value", "model: x\ndata:\n  <<: 5\n", ("run.yaml:3: ", "<< merges mappings", "5")),
    _case("too_deep", "model: " + "[" * 100 + "]" * 100 + "\n", ("run.yaml:1: ", "more than 64 deep")),
    _case("too_many", "model: [" + "1," * 10_001 + "]\n", ("run.yaml:1: ", "10000 values")),
    _case("number_key", GOOD + "train: {1: 2}\n", ("run.yaml:3 train: ", "must be a text", '"1"')),
    _case("true_key", GOOD + "true: 2\n", ("run.yaml:3: ", "must be a text", "true")),
    _case("list_key", GOOD + "? [a]\n: b\n", ("run.yaml:3: ", "a list of 1", "one word")),
    _case("twice", GOOD + "model: y\n", ("run.yaml:3 model: ", "twice", "line 1", "line 3", "keep one")),
    _case(
        "twice_nested",
        GOOD + "train:\n  max_steps: 1\n  learning_rate: 1\n  max_steps: 2\n",
        ("run.yaml:6 train.max_steps: ", "line 4", "line 6"),
    ),
    _case(
        "twice_in_list",
        "model: preset:tiny-qwen3\ndata:\n  train:\n  - path: rows.jsonl\n    path: rows.jsonl\n",
        ("run.yaml:5 data.train[0].path: ", "line 4", "line 5"),
    ),
]

KEYS = [
    _case("no_model", "data: {train: rows.jsonl}\n", ("run.yaml:1 model: ", "missing", "preset:tiny-qwen3")),
    _case("no_data", "model: preset:tiny-qwen3\n", ("run.yaml:1 data: ", "missing", "rows.jsonl")),
    _case("no_name", "model: {}\ndata: {train: rows.jsonl}\n", ("run.yaml:1 model.name_or_path: ", "missing")),
    _case(
        "no_train", "model: preset:tiny-qwen3\ndata: {}\n", ("run.yaml:2 data.train: ", "no training data", "data.use")
    ),
    _case(
        "no_path",
        "model: preset:tiny-qwen3\ndata:\n  train:\n  - format: alpaca\n",
        ("run.yaml:4 data.train[0].path: ", "missing", "rows.jsonl"),
    ),
    _with("null_section", "train:", ("run.yaml:3 train: ", "no value", "remove the line")),
    _with("number_for_section", "train: 3", ("run.yaml:3 train: ", "a section", "below it, indented")),
    _with("objective_as_section", "dpo: {beta: 0.1}", ("run.yaml:3 dpo: ", "objective: {name: dpo, beta: …}")),
    _with("loss_as_section", "simpo: {}", ("run.yaml:3 simpo: ", "objective: {name: dpo, loss: simpo}")),
    _with("many_digits", f"train: {{max_steps: {10**400}}}", ("run.yaml:3 train.max_steps: ", "401 digits")),
    _with("null_model", "eval: ~", ("run.yaml:3 eval: ", "no value")),
    _with("slip", "train: {learning_rte: 1}", ("run.yaml:3 train.learning_rte: ", "did you mean learning_rate?")),
    _with("slip_section", "trian: {max_steps: 1}", ("run.yaml:3 trian: ", "did you mean train?")),
    _with("camel", "train: {learningRate: 1}", ("run.yaml:3 train.learningRate: ", "did you mean learning_rate?")),
    _with("unknown", "train: {zzzzzz: 1}", ("run.yaml:3 train.zzzzzz: ", "allowed here: enabled, num_train_epochs")),
    _with("elsewhere", "train:\n  max_length: 9", ("run.yaml:4 train.max_length: ", "data.max_length")),
    _with("at_top", "learning_rate: 1e-4", ("run.yaml:3 learning_rate: ", "train.learning_rate")),
    _with("dotted", "train.max_steps: 5", ("run.yaml:3 train.max_steps: ", "nest it", "below train:")),
    _with("near_elsewhere", "eval: {max_stepz: 5}", ("run.yaml:3 eval.max_stepz: ", "train.max_steps")),
    _with("cutoff_len", "cutoff_len: 2048", ("run.yaml:3 cutoff_len: ", "data.max_length")),
    _case(
        "flat",
        "model_name_or_path: x\ndataset: a\nmax_length: 5\n",
        ("run.yaml:1 model_name_or_path: ", "model.name_or_path"),
        ("run.yaml:2 dataset: ", "data.train"),
        ("run.yaml:3 max_length: ", "data.max_length"),
    ),
    _case(
        "half_flat",
        "model_name_or_path: x\nmax_length: 5\n",
        ("run.yaml:1 data: ", "missing"),
        ("run.yaml:1 model_name_or_path: ", "model.name_or_path"),
        ("run.yaml:2 max_length: ", "data.max_length"),
    ),
    _with("report_to_none", "tracking: {report_to: none}", ("run.yaml:3 tracking.report_to: ", "[] for none", "wandb")),
    _with("lora_rank", "lora_rank: 8", ("run.yaml:3 lora_rank: ", "adapter.r")),
    _with(
        "finetuning_type",
        "finetuning_type: lora",
        ("run.yaml:3 finetuning_type: ", "adapter.type", "full, freeze, lora"),
    ),
    _with("stage", "stage: sft", ("run.yaml:3 stage: ", "objective.name", "sft, pt")),
    _with("template", "template: qwen3", ("run.yaml:3 template: ", "a section", "model's own template")),
    _with("sequence_len", "sequence_len: 9", ("run.yaml:3 sequence_len: ", "data.max_length")),
    _with(
        "micro_batch_size",
        "micro_batch_size: 2",
        ("run.yaml:3 micro_batch_size: ", "train.per_device_train_batch_size"),
    ),
    _with("lr", "train: {lr: 1}", ("run.yaml:3 train.lr: ", "train.learning_rate")),
    _with("epochs", "train: {epochs: 1}", ("run.yaml:3 train.epochs: ", "train.num_train_epochs")),
    _with("in_source", "eval: {max_rows: 5}", ("run.yaml:3 eval.max_rows: ", "data.train[0].max_rows")),
]

VALUES = [
    _with(
        "quoted_number",
        "train: {learning_rate: '1e-4'}",
        ("run.yaml:3 train.learning_rate: ", "remove the quotes: 1e-4"),
    ),
    _with(
        "true_number", "train: {max_steps: true}", ("run.yaml:3 train.max_steps: ", "true is not a number", "write 1")
    ),
    _with("yes", "train: {torch_compile: yes}", ("run.yaml:3 train.torch_compile: ", '"yes"', "write true or false")),
    _with("off", "train:\n  torch_compile: off", ("run.yaml:4 train.torch_compile: ", "write true or false")),
    _with(
        "quoted_true", "train: {torch_compile: 'true'}", ("run.yaml:3 train.torch_compile: ", "remove the quotes: true")
    ),
    _with("one_for_true", "train: {torch_compile: 1}", ("run.yaml:3 train.torch_compile: ", "true or false, got 1")),
    _with("octal", "train: {max_steps: 010}", ("run.yaml:3 train.max_steps: ", "octal or decimal", "write 10", "0o10")),
    _with(
        "sexagesimal", "train: {max_steps: 12:30:45}", ("run.yaml:3 train.max_steps: ", '"12:30:45"', "whole number")
    ),
    _with("thousands", "train: {max_steps: '1,000'}", ("run.yaml:3 train.max_steps: ", "write 1000")),
    _with("underscore", "train: {max_steps: 1_000}", ("run.yaml:3 train.max_steps: ", "write 1000")),
    _with("percent_sign", "data: {eval_split: 10%}", ("run.yaml:3 data: ", "twice")),
    _with("percent_share", "eval: {early_stopping_threshold: 5%}", ("run.yaml:3 eval.early", "write 0.05")),
    _with("half_step", "train: {max_steps: 2.5}", ("run.yaml:3 train.max_steps: ", "got 2.5", "write 2 or 3")),
    _with("zero", "train: {max_steps: 0}", ("run.yaml:3 train.max_steps: ", "at least 1", "got 0")),
    _with("negative", "train: {learning_rate: -1}", ("run.yaml:3 train.learning_rate: ", "above 0, got -1", "2e-05")),
    _with("nan", "train: {max_grad_norm: .nan}", ("run.yaml:3 train.max_grad_norm: ", "got .nan")),
    _with("inf", "train: {learning_rate: .inf}", ("run.yaml:3 train.learning_rate: ", "got .inf")),
    _with("too_large", "train: {learning_rate: 1e999}", ("run.yaml:3 train.learning_rate: ", "got 1e999")),
    _with("huge_integer", f"train: {{learning_rate: 1{'0' * 350}}}", ("run.yaml:3 train.learning_rate: ", "above 0")),
    _with("huge_seed", "runtime: {seed: 99999999999}", ("run.yaml:3 runtime.seed: ", "at most 4294967295")),
    _with("ambiguous_one", "train: {warmup_steps: 1.0}", ("run.yaml:3 train.warmup_steps: ", "1.0", "write 1")),
    _with("not_whole", "train: {warmup_steps: 2.5}", ("run.yaml:3 train.warmup_steps: ", "neither a share", "2 or 3")),
    _with(
        "enum",
        "data2: 1\nadapter: LORA",
        ("run.yaml:3 data2: ", "data"),
        ("run.yaml:4 adapter.type: ", "did you mean lora?"),
    ),
    _with("key_with_a_mark", "train: {max_steps\u200b: 1}", ("run.yaml:3 train.max_", "U+200B", "max_steps?", "anew")),
    _with("key_of_letters_alike", "tr\u0430in: {max_steps: 1}", ("run.yaml:3 tr", "U+0430 (cyrillic", "train?")),
    _with("key_turned_around", 'train: {"\u202emax_steps": 1}', ("run.yaml:3 train.", "U+202E", "max_steps?")),
    _with("ends_before_a_value", "train: {max_steps: ", ("run.yaml:4: ", "file ends", "not closed", "close all")),
    _with("export_of_another_form", "export: {outtype: f16}", ("run.yaml:3 export: ", "GGUF", "format: gguf")),
    _with("public_nowhere", "export: {public: true}", ("run.yaml:3 export: ", "push: NAME/MODEL")),
    _case(
        "half_weights",
        "model: {name_or_path: preset:tiny-qwen3, dtype: float16}\ndata: {train: rows.jsonl}\n",
        ("run.yaml:1 model.dtype: ", "float16", "adapter.type (default) is full", "adapter.type: lora"),
    ),
    _case(
        "token_of_two_kinds",
        "model: {name_or_path: preset:tiny-qwen3, add_tokens: [<x>], add_special_tokens: [<x>]}\n"
        "data: {train: rows.jsonl}\n",
        ("run.yaml:1 model.add_special_tokens", "<x>", "model.add_tokens (line 1)", "one of the two"),
    ),
    _with("enum_far", "adapter: qqq", ("run.yaml:3 adapter.type: ", "full, freeze, lora, oft")),
    _with("bool_for_enum", "train: {packing: true}", ("run.yaml:3 train.packing: ", "none, best_fit")),
    _with("optim", "train: {optim: adamw}", ("run.yaml:3 train.optim: ", "did you mean adamw_torch?", "44")),
    _with(
        "scheduler",
        "train: {lr_scheduler_type: cosin}",
        ("run.yaml:3 train.lr_scheduler_type: ", "did you mean cosine?"),
    ),
    _with("tracker", "tracking: {report_to: [wandbb]}", ("run.yaml:3 tracking.report_to[0]: ", "did you mean wandb?")),
    _with("objective", "objective: dpoo", ("run.yaml:3 objective.name: ", '"dpoo"', "sft, pt")),
    _with("number_for_text", "tracking: {run_name: 123}", ("run.yaml:3 tracking.run_name: ", 'quotes: "123"')),
    _with("bool_for_text", "tracking: {run_name: true}", ("run.yaml:3 tracking.run_name: ", 'quotes: "true"')),
    _with("list_for_number", "train: {max_steps: [1]}", ("run.yaml:3 train.max_steps: ", "a list of 1", "one value")),
    _with(
        "mapping_for_list",
        "adapter: {type: lora, target_modules: 5}",
        ("run.yaml:3 adapter.target_modules: ", "a list of"),
    ),
    _with("list_for_section", "train: [1]", ("run.yaml:3 train: ", "a section", "a list of 1")),
    _with("text_for_mapping", "template: {kwargs: thinking}", ("run.yaml:3 template.kwargs: ", "a mapping")),
    _with(
        "null_value", "train: {learning_rate: }", ("run.yaml:3 train.learning_rate: ", "no value", "remove the line")
    ),
    _with("empty_text", "output: {dir: ''}", ("run.yaml:3 output.dir: ", "a path", '""')),
    _with("smoothing", "objective: {label_smoothing: 1}", ("run.yaml:3 objective.label_smoothing: ", "below 1, got 1")),
    _case(
        "number_for_source",
        "model: preset:tiny-qwen3\ndata:\n  train:\n  - rows.jsonl\n  - 5\n",
        ("run.yaml:5 data.train[1]: ", "a section", "got 5"),
    ),
    _case(
        "short",
        "model: preset:tiny-qwen3\ndata:\n  train: rows.jsonl\n  max_length: 1\n",
        ("run.yaml:4 data.max_length: ", "at least 2, got 1"),
    ),
    _case(
        "column_number",
        "model: preset:tiny-qwen3\ndata:\n  train:\n    path: rows.jsonl\n    columns: {messages: 5}\n",
        ("run.yaml:5 data.train[0].columns.messages: ", "a text", 'quotes: "5"'),
    ),
]

RULES = [
    _with(
        "rule_pattern",
        "template:\n  targets:\n  - {part: answer, weight: 2}\n  - {pattern: 'a(', train: false}",
        ("run.yaml:6 template.targets[1].pattern: ", '"a("', "regular expression", "position 1"),
    ),
    _with(
        "rule_pattern_nested_set",
        "template: {targets: {pattern: '[[a]', train: false}}",
        ("run.yaml:3 template.targets[0].pattern: ", "Possible nested set"),
    ),
    _with(
        "rule_pattern_long",
        f"template: {{targets: {{pattern: {'a' * 1001}, train: false}}}}",
        ("run.yaml:3 template.targets[0].pattern: ", "has 1,001 characters, 1000 are allowed"),
    ),
    _with(
        "rule_pattern_empty",
        "template: {targets: {pattern: 'a*', train: false}}",
        ("run.yaml:3 template.targets[0].pattern: ", "matches the empty text"),
    ),
    _with(
        "rule_pattern_forever",
        "template: {targets: {pattern: '^(a+)+$', train: false}}",
        ("run.yaml:3 template.targets[0].pattern: ", "(a+)+", "may take forever"),
    ),
    _with(
        "rule_says_nothing",
        "template:\n  targets:\n  - part: answer",
        ("run.yaml:5 template.targets[0]: ", "neither train nor weight"),
    ),
    _with(
        "rule_contradicts_itself",
        "template: {targets: {role: user, train: true, weight: 0}}",
        ("run.yaml:3 template.targets[0]: ", "train: true and weight: 0"),
    ),
    _with(
        "rule_part_of_user",
        "template: {targets: {role: user, part: answer, train: true}}",
        ("run.yaml:3 template.targets[0]: ", "never applies", "role is user"),
    ),
    _with(
        "rule_pattern_in_calls",
        "template: {targets: {part: tool_call, pattern: a, train: true}}",
        ("run.yaml:3 template.targets[0]: ", "never applies", "not in tool calls"),
    ),
    _with(
        "rule_role",
        "template: {targets: {role: assitant, train: true}}",
        ("run.yaml:3 template.targets[0].role: ", "system, user, assistant, tool", "did you mean assistant?"),
    ),
    _with(
        "rule_weight_negative",
        "template: {targets: {role: user, weight: -1}}",
        ("run.yaml:3 template.targets[0].weight: ", "at least 0", "got -1"),
    ),
    _with(
        "rule_weight_huge",
        "template: {targets: {role: user, weight: 1e7}}",
        ("run.yaml:3 template.targets[0].weight: ", "1e7 is neither 0 nor from 1e-06 to 1e+06"),
    ),
    _with(
        "rule_is_text",
        "template: {targets: thinking}",
        ("run.yaml:3 template.targets[0]: ", '"thinking"', "for example targets: [{part: thinking, train: false}]"),
    ),
    _with(
        "rules_with_two_faults",
        "template:\n  targets:\n  - {role: narrator, train: true}\n  - {part: answer, wieght: 2}",
        ("run.yaml:5 template.targets[0].role: ", "system, user"),
        ("run.yaml:6 template.targets[1].wieght: ", "did you mean weight?"),
    ),
    _case(
        "rules_of_a_source",
        "model: preset:tiny-qwen3\ndata:\n  train:\n    path: rows.jsonl\n    targets: {part: answers, train: true}\n",
        ("run.yaml:5 data.train[0].targets[0].part: ", "did you mean answer?"),
    ),
    _case(
        "lone_thinking_tag",
        "model: preset:tiny-qwen3\ndata:\n  train:\n    path: rows.jsonl\n    thinking_tags: <think>\n",
        ("run.yaml:5 data.train[0].thinking_tags: ", "pair of tags"),
    ),
]

CASES = [*SYNTAX, *KEYS, *VALUES, *RULES]
