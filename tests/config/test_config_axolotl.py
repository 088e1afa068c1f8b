"""Files of axolotl's are read as they are: what is translated, what is refused and why, and what trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment
from peer_files import keys_refused, refused, value_of

import luthier
from luthier.config import parse_path
from luthier.config.explain import what_is_meant
from luthier.config.loading import load_config_text, load_draft
from luthier.config.peers.axolotl import AXOLOTL
from luthier.config.peers.translation import chat_of
from luthier.config.words import schema_at
from luthier.errors import ConfigError
from luthier.presets.named_templates import named_template

TABLE: dict[str, Any] = dict(AXOLOTL.table)
KEYS: list[str] = json.loads(Path(__file__).with_name("other_tools.json").read_text(encoding="utf-8"))["axolotl"]
SFT = """\
base_model: preset:tiny-qwen3
datasets:
- path: preset:skills
  type: chat_template
learning_rate: 1.0e-4
"""

# Files that are refused, and the keys that say why; all others of axolotl's examples are translated.
REFUSED = {
    "distributed-parallel/llama-3_1-8b-hsdp-tp.yaml": ["tensor_parallel_size"],
    **{f"ebft/{name}.yaml": ["rl"] for name in (
        "llama-1b-ebft-opencode", "llama-1b-ebft-strided", "llama-8b-ebft-strided-fft", "qwen35-4b-ebft-structured")},
    **{f"expert_parallel/qwen3_30ba3b_ep_{name}_4gpu.yaml": ["expert_parallel_size"] for name in ("fft", "lora")},
    "falcon-e/falcon-e-3b-ft.yaml": ["use_onebitllms"],
    "falcon-h1/falcon-h1-1b-qlora-cp.yaml": ["context_parapllel_size"],
    "gemma4/26b-a4b-moe-nvfp4-lora.yaml": ["dsv4_fp4_grouped_mode"],
}  # fmt: skip


def with_lines(lines: str, base: str = SFT) -> str:
    """The base file with more lines, which win over its own of the same key."""
    keys = {line.split(":")[0] for line in lines.splitlines() if line[:1].isalpha()}
    kept, is_kept = [], True
    for line in base.splitlines(keepends=True):
        is_kept = line.split(":")[0] not in keys if line[:1].isalpha() else is_kept
        kept += [line] if is_kept else []
    return "".join(kept) + lines


def examples(shared: Path) -> dict[str, Path]:
    folder = shared / "data" / "peers" / "axolotl" / "examples"
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.y*ml"))}
    return {name: path for name, path in files.items() if "base_model:" in path.read_text(encoding="utf-8")}


@pytest.mark.shared
def test_every_example_file_is_translated_or_refused_by_the_key_that_says_why(shared: Path) -> None:
    files = examples(shared)
    assert len(files) == 39
    assert refused(files) == REFUSED


def test_lines_of_the_table_name_keys_that_are_there() -> None:
    assert [ours for ours in TABLE["keys"].values() if schema_at(parse_path(ours) or ("?",)) is None] == []
    listed = [*TABLE["off"], *TABLE["missing"], *(key for keys in TABLE["passed"].values() for key in keys)]
    assert [key for key in listed if key in TABLE["keys"] and key not in TABLE["off"]] == []
    passed = [key for keys in TABLE["passed"].values() for key in keys]
    assert len(passed) == len(set(passed)) and not set(passed) & set(TABLE["missing"])
    styles = {known["style"] for names in TABLE["types"].values() for known in names.values() if "style" in known}
    assert styles == set(TABLE["styles"])


def test_the_table_for_messages_and_the_table_for_files_agree() -> None:
    meant = {key: what_is_meant(key) for key in TABLE["keys"]}
    different = {key: (ours, meant[key]) for key, ours in TABLE["keys"].items()
                 if (found := meant[key]) is not None and found.key is not None and found.key != ours}  # fmt: skip
    assert different == {}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_theirs_has_an_outcome_of_its_own(key: str) -> None:
    """It is translated, passed over or refused by its name: never taken for a slip of the keyboard."""
    assert AXOLOTL.has_key(key)
    try:
        load_config_text(with_lines(f"{key}: true\n"), "theirs.yml", check_paths=False)
    except ConfigError as error:
        assert all("no such key" not in problem.what for problem in error.problems), error


def test_values_of_any_kind_are_taken_or_refused(tmp_path: Path) -> None:
    read_by_functions = [key for key in KEYS if key not in TABLE["missing"] and not any(
        key in keys for keys in TABLE["passed"].values())]  # fmt: skip
    of_rows = [*TABLE["source"]["keys"], *TABLE["source"]["columns"], "path", "data_files", "type", "split", "roles",
               "message_property_mappings", "roles_to_train", "train_on_eos", "field_thinking"]  # fmt: skip
    texts = [with_lines(f"{key}: {value}\n") for key in read_by_functions for value in ("x", "[1, x]", "{a: 1}")]
    texts += [
        f"{SFT}test_datasets: [{{path: x, {key}: {value}}}]\n" for key in of_rows for value in ("1", "[1]", "{a: 1}")
    ]
    for text in texts:
        try:
            load_config_text(text, "theirs.yml", check_paths=False)
        except ConfigError as error:
            assert error.problems


def test_their_defaults_are_written_out() -> None:
    run = load_config_text(SFT, "theirs.yml", check_paths=False)
    assert (run.adapter.type, run.data.max_length, run.data.overflow) == ("full", 512, "drop")
    assert (run.train.packing, run.train.optim, run.train.lr_scheduler_type) == ("none", "adamw_torch_fused", "cosine")
    assert (run.train.num_train_epochs, run.train.per_device_train_batch_size) == (1.0, 1)
    assert (str(run.output.dir), run.output.save_total_limit, run.data.eval_split) == ("model-out", 4, 0)
    assert (run.data.train[0].path, run.data.train[0].format) == ("preset:skills", "messages")


@pytest.mark.parametrize(("lines", "ours", "value"), [
    ("sample_packing: true\n", "train.packing", "window"),
    ("excess_length_strategy: truncate\n", "data.overflow", "truncate"),
    ("excess_length_strategy: raise\n", "data.overflow", "error"),
    ("batch_size: 8\nmicro_batch_size: 2\n", "train.gradient_accumulation_steps", 4),
    ("sequence_len: 500_000\n", "data.max_length", 500_000),
    ("num_epochs:\n", "train.num_train_epochs", 1.0),
    ("adapter: lora\nlora_target_linear: true\n", "adapter.target_modules", ["all-linear"]),
    ("adapter: lora\nlora_target_modules: [q_proj, v_proj]\n", "adapter.target_modules", ["q_proj", "v_proj"]),
    ("adapter: lora\nlora_target_modules: 'layers.[0-3].(q|k)_proj'\n", "adapter.target_modules",
     ["regex:layers.[0-3].(q|k)_proj"]),
    ("adapter: qlora\nload_in_4bit: true\n", "model.quantization.type", "nf4"),
    ("adapter: lora\nload_in_8bit: true\n", "model.quantization.type", "int8"),
    ("adapter: lora\npeft: {loftq_config: {loftq_bits: 4}}\n", "adapter.init_lora_weights", "loftq"),
    ("adapter: qlora\nload_in_4bit: true\nfsdp: [full_shard]\n", "runtime.sharding", "fsdp"),
    ("adapter: lora\nload_in_8bit: true\nfsdp: [full_shard]\n", "runtime.sharding", "none"),
    ("adapter: lora\nload_in_8bit: true\nsample_packing: true\n", "train.packing", "none"),
    ("adapter: qlora\nload_in_4bit: true\nsample_packing: true\n", "train.packing", "window"),
    ("adapter: qlora\nload_in_4bit: true\nbnb_config_kwargs: {bnb_4bit_use_double_quant: false}\n",
     "model.quantization.double_quantization", False),
    ("model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs: {dequantize: true}\n",
     "model.quantization.type", "none"),
    ("adapter: lora\nlora_model_dir: some/adapter\nlora_r: 8\n", "adapter.name_or_path", "some/adapter"),
    ("adapter:\nlora_r: 8\n", "adapter.type", "full"),
    ("unfrozen_parameters: [^lm_head.weight$, 'layers.4[4-9]+.mlp']\n", "adapter.freeze_trainable_modules",
     [r"regex:^lm_head\.weight$.*", r"regex:layers\.4[4-9]+\.mlp.*"]),
    ("deepspeed: deepspeed_configs/zero3_bf16.json\n", "runtime.sharding", "fsdp"),
    ("deepspeed: deepspeed_configs/zero2.json\noptimizer: adamw_bnb_8bit\n", "train.optim", "adamw_torch"),
    ("optimizer: adamw_bnb_8bit\n", "train.optim", "adamw_bnb_8bit"),
    ("fsdp_config: {activation_checkpointing: true}\n", "train.gradient_checkpointing", True),
    ("cosine_min_lr_ratio: 0.1\n", "train.lr_scheduler_kwargs", {"min_lr_rate": 0.1}),
    ("warmup_ratio: 0.1\n", "train.warmup_steps", 0.1),
    ("bf16: true\n", "train.precision", "bf16"),
    ("bf16: auto\n", "train.precision", "auto"),
    ("bf16: false\n", "train.precision", "fp32"),
    ("attn_implementation: eager\n", "model.attn_implementation", "eager"),
    ("flash_attention: true\n", "model.attn_implementation", "auto"),
    ("sdp_attention: true\n", "model.attn_implementation", "sdpa"),
    ("special_tokens: {pad_token: <p>, eos_token: <e>}\n", "model.add_special_tokens", ["<e>"]),
    ("tokens: [<a>, <b>]\n", "model.add_tokens", ["<a>", "<b>"]),
    ("special_tokens: {eos_token: <b>}\ntokens: [<a>, <b>]\n", "model.add_tokens", ["<a>"]),
    ("special_tokens: {eos_token: <b>}\ntokens: [<b>]\n", "model.add_special_tokens", ["<b>"]),
    ("chat_template: chatml\n", "template.chat_template", "chatml"),
    ("chat_template: llama3\n", "template.chat_template", "own_or_llama3"),
    ("chat_template: tokenizer_default_fallback_chatml\n", "template.chat_template", "own_or_chatml"),
    ("chat_template: tokenizer_default\n", "template.chat_template", None),
    ("chat_template_jinja: '{{ messages }}'\n", "template.chat_template", "{{ messages }}"),
    ("train_on_inputs: true\n", "template.train_on", "all"),
    ("use_eaft: true\neaft_alpha: 0.5\n", "objective.eaft_alpha", 0.5),
    ("val_set_size: 0.05\nmicro_batch_size: 3\n", "eval.per_device_eval_batch_size", 3),
    ("val_set_size: 0.05\nevals_per_epoch: 1\n", "eval.strategy", "epoch"),
    ("val_set_size: 0.05\neval_steps: 7\n", "eval.steps", 7),
    ("val_set_size: 0.05\nevals_per_epoch: 4\nnum_epochs: 2\n", "eval.steps", 0.125),
    ("saves_per_epoch: 3\nnum_epochs: 2\n", "output.save_steps", 0.166666),
    ("saves_per_epoch: 1\nnum_epochs: 2\n", "output.save_strategy", "epoch"),
    ("save_steps: 0.1\n", "output.save_steps", 0.1),
    ("save_strategy: no\n", "output.save_strategy", "no"),
    ("wandb_project: mine\nwandb_name: third\n", "tracking.run_name", "third"),
    ("wandb_project:\nwandb_name:\n", "tracking.report_to", []),
    ("auto_resume_from_checkpoints: true\n", "output.resume", "auto"),
    ("val_set_size: 0.1\ngenerate_samples: true\n", "eval.generate_rows", 3),
    ("val_set_size: 0.1\ngenerate_samples: true\n", "generate.temperature", 0.7),
    ("embedding_lr: 1.0e-5\n", "train.learning_rates", {"embedding": 1e-5}),
    ("activation_offloading: true\n", "train.offload", ["activations"]),
    ("gradient_checkpointing: unsloth\n", "train.gradient_checkpointing", True),
], ids=str)  # fmt: skip
def test_keys_become_what_they_mean_here(lines: str, ours: str, value: object) -> None:
    assert value_of(with_lines(lines), ours) == value


WRITTEN_OUT = (
    "path: r.jsonl, type: {prompt_format: '[I] {prompt}', chosen_format: '{chosen}!', rejected_format: '{rejected}!'}"
)


def rows(entry: str, more: str = "", key: str = "datasets") -> str:
    return with_lines(f"{key}:\n- {{{entry}}}\n{more}")


@pytest.mark.parametrize(("text", "ours", "value"), [
    (rows("path: owner/rows, type: chat_template"), "data.train[0].path", "hub:owner/rows"),
    (rows("path: rows.jsonl, type: chat_template"), "data.train[0].path", "rows.jsonl"),
    (rows("path: json, data_files: [a.jsonl, b.jsonl], type: completion"), "data.train[1].path", "b.jsonl"),
    (rows("path: owner/rows, name: small, type: alpaca"), "data.train[0].subset", "small"),
    (rows("path: owner/rows, split: 'train[:1%]', type: alpaca"), "data.train[0].split", "train[:1%]"),
    (rows("path: rows.jsonl, split: 'train[:10]', type: alpaca"), "data.train[0].first_rows", 10),
    (rows("path: rows.jsonl, split: 'train[10%:90%]', type: alpaca"), "data.train[0].slice", "10%:90%"),
    (rows("path: rows.jsonl, split: 'test[-1_000:]', type: alpaca"), "data.train[0].slice", "-1000:"),
    (rows("path: r.jsonl, type: chat_template, field_messages: turns"), "data.train[0].columns", {"messages": "turns"}),
    (rows("path: r.jsonl, type: chat_template, message_property_mappings: {role: from, content: value}"),
     "data.train[0].tags", {"role_tag": "from", "content_tag": "value"}),
    (rows("path: r.jsonl, type: chat_template, message_field_role: who"), "data.train[0].tags", {"role_tag": "who"}),
    (rows("path: r.jsonl, type: chat_template, roles: {user: [customer], assistant: [gpt, model]}"),
     "data.train[0].tags", {"user_tag": "customer"}),
    (rows("path: r.jsonl, type: chat_template, roles_to_train: [gpt]"), "data.train[0].targets", []),
    (rows("path: r.jsonl, type: chat_template, roles_to_train: []"), "data.train[0].train_on", "none"),
    (rows("path: r.jsonl, type: chat_template, train_on_eos: none"), "template.train_stop", False),
    (rows("path: r.jsonl, type: chat_template, train_on_eos: all"), "template.train_stop", True),
    (rows("path: r.jsonl, type: chat_template, message_field_training: weight"), "data.train[0].tags",
     {"train_tag": "weight"}),
    (rows("path: r.jsonl, type: chat_template, shards: 4"), "data.train[0].weight", 0.25),
    (rows("path: r.jsonl, type: alpaca, name: default"), "data.train[0].subset", None),
    (rows("path: r.jsonl, type: chat_template, drop_system_message: true"), "data.train[0].drop_system", True),
    (rows("path: r.jsonl, type: alpaca"), "template.chat_template", "alpaca"),
    (rows("path: r.jsonl, type: 'alpaca:chatml'"), "template.chat_template", "chatml"),
    (rows("path: r.jsonl, type: alpaca_chat.load_qa"), "data.train[0].columns",
     {"prompt": "question", "response": "answer"}),
    (rows("path: r.jsonl, type: sharegpt"), "data.train[0].format", "sharegpt"),
    (with_lines("torch_compile: auto\n"), "train.torch_compile", False),
    (rows("path: r.jsonl, type: sharegpt, conversation: chatml"), "template.chat_template", "chatml"),
    (rows("path: r.jsonl, type: sharegpt, conversation: llama-3"), "template.chat_template", "own_or_llama3"),
    (rows("path: r.jsonl, type: sharegpt, conversation: chatml"), "template.default_system",
     "You are a helpful assistant."),
    (rows("path: r.jsonl, type: sharegpt, conversation: chatml", "default_system_message: Be kind.\n"),
     "template.default_system", "Be kind."),
    (rows("path: r.jsonl, type: completion, field: body"), "data.train[0].columns", {"text": "body"}),
    (rows("path: r.jsonl, type: completion"), "objective.name", "pt"),
    (rows("path: r.jsonl, type: input_output"), "data.train[0].rendered", True),
    (rows("path: r.jsonl, type: input_output"), "objective.name", "sft"),
    (rows("path: r.jsonl, type: completion"), "data.overflow", "split"),
    (rows("path: owner/rows, type: pretrain", key="datasets:\npretraining_dataset"), "data.train[0].streaming", True),
    (rows("path: owner/rows", key="datasets:\npretraining_dataset"), "train.packing", "split"),
    (rows("path: r.jsonl, type: chat_template", key="test_datasets"), "data.eval[0].path", "r.jsonl"),
    (rows("path: r.jsonl, type: chatml.intel", "rl: dpo\n"), "data.train[0].columns", {"prompt": "question"}),
    (rows("path: r.jsonl, type: llama3.icr", "rl: ipo\n"), "template.chat_template", "llama3"),
    (rows("path: r.jsonl, type: chatml.intel", "rl: dpo\nrpo_alpha: 0.2\n"), "objective.sft_weight", 0.2),
    (rows("path: r.jsonl, type: chatml.intel", "rl: dpo\ndpo_label_smoothing: 0.1\n"),
     "objective.label_smoothing", 0.0),
    (rows("path: r.jsonl, type: chatml.intel", "rl: dpo\ndpo_loss_type: [robust]\ndpo_label_smoothing: 0.1\n"),
     "objective.label_smoothing", 0.1),
    (rows("path: r.jsonl, type: chat_template", "dpo_label_smoothing: 0.1\n"), "objective.label_smoothing", 0.0),
    (rows("path: r.jsonl, type: chatml.intel", "rl: dpo\ndpo_loss_type: [sigmoid, sft]\n"
          "dpo_loss_weights: [2, 1]\n"), "objective.sft_weight", 0.5),
    (rows("path: r.jsonl, type: chat_template.default, field_chosen: good", "rl: dpo\n"), "data.train[0].columns",
     {"chosen": "good"}),
    (rows("path: r.jsonl, type: chatml.ultra", "rl: simpo\n"), "objective.gamma", 0.5),
    (rows("path: r.jsonl, type: chatml.ultra", "rl: simpo\n"), "objective.sft_weight", 1.0),
    (rows("path: r.jsonl, type: chat_template.argilla", "rl: orpo\norpo_alpha: 0.2\n"), "objective.beta", 0.2),
    (rows("path: r.jsonl, type: chatml.argilla", "rl: kto\nkto_desirable_weight: 0.3\n"), "objective.desirable_weight",
     0.3),
    (rows("path: r.jsonl, type: bradley_terry.chat_template", "reward_model: true\n"), "objective.name", "rm"),
    (rows(WRITTEN_OUT, "rl: dpo\n"), "template.chat_template", chat_of("{system}", "[I] {prompt}", "{answer}!")),
    (rows("path: r.jsonl, type: {field_instruction: q, field_output: a, format: 'Q: {instruction} A:'}"),
     "data.train[0].columns", {"prompt": "q", "response": "a"}),
], ids=str)  # fmt: skip
def test_data_sets_become_what_they_mean_here(text: str, ours: str, value: object) -> None:
    assert value_of(text, ours) == value


@pytest.mark.parametrize(("text", "key"), [
    (with_lines("rl: ebft\n"), "rl"),
    (with_lines("rl: grpo\nmicro_batch_size: 8\n"), "trl.reward_funcs"),
    (with_lines("rl: grpo\ndatasets: [{path: a/b, type: rewards.rows}]\ntrl: {reward_funcs: [think_format_reward]}\n"
                "gradient_accumulation_steps: 8\n"), "datasets[0].type"),
    (with_lines("adapter: llama-adapter\n"), "adapter"),
    (with_lines("adapter: qlora\n"), "adapter"),
    (with_lines("adapter: lora\npeft: {loftq_config: {loftq_bits: 8}}\n"), "peft"),
    (with_lines("kd_trainer: true\n"), "kd_trainer"),
    (rows("path: r.jsonl, type: chatml.intel", "rl: dpo\ndpo_loss_type: [sigmoid, hinge]\n"), "dpo_loss_type"),
    (with_lines("adapter: lora\nlora_r: 0\n"), "lora_r"),
    (with_lines("learning_rate: fast\n"), "learning_rate"),
    (with_lines("no_such_key: 1\n"), "no_such_key"),
    (with_lines("context_parallel_size: 2\n"), "context_parallel_size"),
    (with_lines("deepspeed: nowhere.json\n"), "deepspeed"),
    (with_lines("model_quantization_config: Mxfp4Config\n"), "model_quantization_config"),
    (with_lines("plugins: [my.own.Plugin]\n"), "plugins[0]"),
    (with_lines("lr_scheduler: rex\n"), "lr_scheduler"),
    (with_lines("unfrozen_parameters: ['embed_tokens.weight$[:32000]']\n"), "unfrozen_parameters[0]"),
    (with_lines("chat_template: no_such\n"), "chat_template"),
    (with_lines("datasets:\n"), "datasets"),
    (rows("path: r.jsonl, type: jeopardy"), "datasets[0].type"),
    (rows("path: r.jsonl, type: stepwise_supervised"), "datasets[0].type"),
    (rows("path: r.jsonl, type: sharegpt, conversation: vicuna_v1.1"), "datasets[0].conversation"),
    (with_lines("adapter: lora\nlora_target_modules: '.*q_proj'\npeft_layers_to_transform: [1]\n"),
     "peft_layers_to_transform"),
    (rows("path: r.jsonl, type: chatml.intel"), "datasets[0].type"),
    (rows("path: r.jsonl, type: chat_template, no_such: 10"), "datasets[0].no_such"),
    (rows("path: r.jsonl, type: chat_template, split: 'train[:1%]+test'"), "datasets[0].split"),
    (rows("path: r.jsonl, type: chat_template, train_on_eos: first"), "datasets[0].train_on_eos"),
    (rows("path: r.jsonl, type: chat_template, roles: {user: [human, customer]}"), "datasets[0].roles.user"),
    (rows("path: s3://bucket/rows.jsonl, type: chat_template"), "datasets[0].path"),
    (rows("path: owner/rows, data_files: x.jsonl, type: chat_template"), "datasets[0].data_files"),
    (rows("path: a.jsonl, type: chat_template, chat_template: chatml}\n- {path: b.jsonl, type: chat_template"),
     "chat_template"),
    (rows("path: a.jsonl, type: {field_prompt: q, rejected_format: 'no {rejected}'}", "rl: dpo\n"),
     "datasets[0].type.rejected_format"),
], ids=str)  # fmt: skip
def test_what_is_wrong_or_missing_is_told_by_their_key_alone(text: str, key: str) -> None:
    assert keys_refused(text) == [key]


TWO = rows("path: a.jsonl, type: alpaca}\n- {path: b.jsonl, type: chat_template, chat_template: chatml")


def test_rows_of_a_second_form_are_written_out_as_axolotl_writes_them() -> None:
    run = load_config_text(TWO, "theirs.yml", check_paths=False)
    written, asked = run.data.train
    assert (run.template.chat_template, asked.prompt_format) == ("chatml", [])
    assert (written.format, written.columns) == ("text", {"text": "output"})
    with_input, without = (pattern.format(instruction="Add.", input="1, 2") for pattern in written.prompt_format)
    assert with_input.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n")
    assert without == f"{INTRO}\n\n### Instruction:\nAdd.\n\n### Response:\n"


@pytest.mark.parametrize(("kind", "patterns"), [
    ("{field_instruction: q, field_output: a, system_format: '', format: 'Q: {instruction} {input}', "
     "no_input_format: 'Q: {instruction}'}",
     ["Q: {q} {input}", "Q: {q}"]),
    ("alpaca_chat.load_no_prompt", ["USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:"]),
    ("alpaca_w_system.load_instruct", [
        "{system}\n\n### Instruction:\n{instruction}\n{input}\n\n### Response:\n",
        "{system}\n\n### Instruction:\n{instruction}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n"]),
], ids=["written out", "bare chat", "with a system message"])  # fmt: skip
def test_patterns_of_a_second_form_name_the_columns_of_its_rows(kind: str, patterns: list[str]) -> None:
    assert value_of(TWO.replace("type: alpaca}", f"type: {kind}}}"), "data.train[0].prompt_format") == patterns


@pytest.mark.parametrize("kind", ["{field_system: system, field_instruction: q, field_input: input, field_output: a}"])
def test_columns_that_a_type_names_and_no_row_has_are_left_out(tmp_path: Path, kind: str) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps({"q": "1 + 1?", "a": "2"}), encoding="utf-8")
    text = rows(f"path: {tmp_path / 'r.jsonl'}, type: {kind}")
    assert value_of(text, "data.train[0].columns") == {"prompt": "q", "response": "a"}


INTRO = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


@pytest.mark.parametrize(("kind", "text"), [
    ("alpaca", f"{INTRO}\n\n### Instruction:\nSay hi.\n\n### Response:\nHi</s>"),
    ("alpaca:chat", f"SYSTEM: {INTRO}\nUSER: Say hi.\nASSISTANT:Hi</s>"),
    ("alpaca:phi", f"<|system|>\n{INTRO}<|end|>\n<|user|>\nSay hi.<|end|>\n<|assistant|>\nHi</s>"),
    ("alpaca_chat.load_no_prompt", "USER: Say hi.\nASSISTANT:Hi</s>"),
    ("{system_prompt: Be kind., field_instruction: instruction, system_format: '<<{system}>>', "
     "format: '[I] {instruction} [/I]'}", "<<Be kind.>>[I] Say hi. [/I]Hi</s>"),
    ("{system_prompt: 'He said \"no\"', system_format: '{system} |', no_input_format: '{instruction}\\n'}",
     'He said "no" |Say hi.\\nHi</s>'),
], ids=str)  # fmt: skip
def test_rows_are_written_as_axolotl_writes_them(kind: str, text: str) -> None:
    run = load_config_text(SFT.replace("chat_template", kind), "theirs.yml", check_paths=False).template
    assert run.chat_template is not None
    source = named_template(run.chat_template) or run.chat_template
    system = [{"role": "system", "content": run.default_system}] if run.default_system else []
    messages = [*system, {"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi"}]
    shown = Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert shown.render(messages=messages, bos_token="<s>", eos_token="</s>").rstrip() == f"<s>{text}"


@pytest.mark.parametrize("modules", [["q_proj", "mlp.up_proj"], "all-linear"], ids=["named", "all"])
@pytest.mark.parametrize(("layers", "pattern"), [([0, 12], None), (1, "blocks"), ([1], ["layers"])], ids=str)
def test_layers_that_are_chosen_by_number_are_those_that_peft_chooses(
    modules: str | list[str], layers: int | list[int], pattern: str | list[str] | None
) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    linear = ["self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"]
    names = [f"{before}.{number}.{each}" for before in ("model.layers", "visual.blocks", "model.layers.1.experts")
             for number in (0, 1, 2, 12) for each in linear] + ["lm_head", "visual.merger.q_proj"]  # fmt: skip
    chosen = value_of(with_lines(
        f"adapter: lora\nlora_target_modules: {json.dumps(modules)}\npeft_layers_to_transform: {layers}\n"
        + (f"peft_layers_pattern: {json.dumps(pattern)}\n" if pattern else "")
    ), "adapter.target_modules")  # fmt: skip
    (regex,) = chosen if isinstance(chosen, list) else ()
    theirs = LoraConfig(target_modules=[each.split(".")[-1] for each in linear] if modules == "all-linear" else modules,
                        layers_to_transform=layers, layers_pattern=pattern)  # fmt: skip
    found = [name for name in names if re.fullmatch(regex.removeprefix("regex:"), name)]
    assert found == [name for name in names if check_target_module_exists(theirs, name)] != []


def test_a_fault_below_a_data_set_names_their_line_and_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(SFT.replace("chat_template", "jeopardy"), "theirs.yml", check_paths=False)
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("theirs.yml:4", "datasets[0].type")
    with pytest.raises(ConfigError) as caught:
        load_config_text(SFT.replace("preset:skills", "nowhere.jsonl"), "theirs.yml")
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("theirs.yml:3", "datasets[0].path") and "data.train[0].path" in problem.what


def test_overrides_use_their_keys_also_below_a_data_set_or_ours() -> None:
    run = load_config_text(SFT, "theirs.yml", ["datasets[0].path=x.jsonl", "micro_batch_size=3", "train.max_steps=2"],
                           check_paths=False)  # fmt: skip
    assert (run.data.train[0].path, run.train.per_device_train_batch_size, run.train.max_steps) == ("x.jsonl", 3, 2)


@pytest.mark.parametrize("text", [
    "model: preset:tiny-qwen3\ndata: {train: preset:skills}\n",
    "model_name_or_path: preset:tiny-qwen3\nstage: sft\ndataset: some\n",
])  # fmt: skip
def test_files_of_ours_and_of_other_tools_are_not_axolotls(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    translation = load_draft(tmp_path / "run.yaml", check_paths=False).translation
    assert translation is None or translation.peer != "axolotl"


def overrides_for(folder: Path, data: Path) -> list[str]:
    return [
        "base_model=preset:tiny-qwen3", f"datasets[0].path={data}", f"output_dir={folder / 'out'}", "max_steps=2",
        "gradient_accumulation_steps=1", "data.first_rows=12", "saves_per_epoch=1", "val_set_size=0", "deepspeed=null",
        f"dataset_prepared_path={folder / 'store'}", "tracking.progress=false", "sequence_len=512",
    ]  # fmt: skip


TURNS = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}


ON_A_CPU = ["optimizer=adamw_torch", "fp16=false", "float16=false", "bf16=true"]  # in place of what needs a GPU
TRAINED = {
    "alpaca_en_demo.json": [
        "archived/code-llama/7b/lora.yml", "archived/code-llama/34b/lora.yml", "archived/openllama-3b/lora.yml",
        "archived/qwen/lora.yml", "archived/qwen/qwen2-moe-lora.yaml", "archived/tiny-llama/lora.yml",
        "archived/tiny-llama/qlora.yml", "archived/yi-34B-chat/qlora.yml", "archived/gptj/qlora.yml",
        "archived/starcoder2/qlora.yml", "archived/stablelm-2/1.6b/fft.yml", "archived/pythia-12b/config.yml",
        "archived/redpajama/config-3b.yml", "archived/mpt-7b/config.yml", "archived/falcon/config-7b.yml",
    ],
    "turns": [
        "gemma2/qlora.yml", "gemma3/gemma-3-1b-qlora.yml", "gemma3/gemma-3-4b-qlora.yml", "eaft/eaft-example.yml",
    ],
    "messages": ["deepcogito/cogito-v1-preview-llama-3B-lora.yml"],
}  # fmt: skip
MESSAGES = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


@pytest.mark.shared
@pytest.mark.parametrize(("name", "data"), [(name, data) for data, names in TRAINED.items() for name in names])
def test_example_files_train(shared: Path, tmp_path: Path, name: str, data: str) -> None:
    """Twenty of them, as they are but for the model, the rows and what needs a GPU: quantized bases stay quantized."""
    from luthier.library import train

    row = MESSAGES if data == "messages" else TURNS
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8, encoding="utf-8")
    rows = shared / "data" / "demo" / data if data.endswith(".json") else tmp_path / "rows.jsonl"
    more = ["wandb_project=null", "warmup_steps=0", *ON_A_CPU]
    result = train(examples(shared)[name], overrides=[*overrides_for(tmp_path, rows), *more])
    assert result.exit_code == 0 and result.steps[-1].step == 2


PAIRS = {"question": "What is 2 + 2?", "system": "Be brief.", "chosen": "4", "rejected": "5"}
VERDICT = {"instruction": "What is 2 + 2?", "completion": "4", "label": True}
SEGMENTS = {"segments": [{"label": False, "text": "2 + 2 = "}, {"label": True, "text": "4"}]}
TEXT = {"body": "Luthiers build and mend violins, guitars and lutes."}


@pytest.mark.parametrize(("lines", "row"), [
    ("rl: dpo\ndatasets: [{path: rows.jsonl, type: chatml.intel}]\nadapter: lora\n", PAIRS),
    ("rl: kto\ndatasets: [{path: rows.jsonl, type: chatml.argilla}]\nadapter: lora\n", VERDICT),
    ("datasets: [{path: rows.jsonl, type: completion, field: body}]\nsample_packing: true\n", TEXT),
    ("datasets: [{path: rows.jsonl, type: input_output}]\n", SEGMENTS),
    ("datasets: [{path: rows.jsonl, type: 'alpaca:chat'}]\n", {"instruction": "Name an instrument.", "output": "Lute"}),
    ("rl: grpo\ndatasets: [{path: rows.jsonl}]\nmicro_batch_size: 2\ngradient_accumulation_steps: 2\n"
     "trl: {num_generations: 2, max_completion_length: 4, reward_funcs: [rewards.long], beta: 0.01}\n",
     {"prompt": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}),
    ("datasets: [{path: rows.jsonl, type: alpaca}, {path: preset:skills, type: chat_template}]\n",
     {"instruction": "Name an instrument.", "input": "of strings", "output": "Lute"}),
], ids=["dpo", "kto", "completion", "input_output", "alpaca:chat", "grpo", "two forms"])  # fmt: skip
def test_objectives_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, row: dict[str, object]) -> None:
    from luthier.library import train

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(
        "def long(completions, solution, **kwargs):\n    return [len(c[0]['content']) for c in completions]\n"
    )
    rows = [{**row, "label": bool(index % 2)} if "label" in row else row for index in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "theirs.yml").write_text(with_lines(f"{lines}max_steps: 2\nsequence_len: 128\n"), encoding="utf-8")
    result = train(tmp_path / "theirs.yml", overrides=[f"data.store={tmp_path / 'store'}", "tracking.progress=false"])
    assert result.exit_code == 0 and len(result.steps) == 2


@pytest.mark.parametrize(("kind", "unread"), [
    ("alpaca", {"history", "system"}), ("alpaca_chat.load_qa", set()), ("alpaca_w_system.load", {"history"}),
    ("{field_instruction: instruction, field_output: output, format: '{instruction}'}", {"history"}),
])  # fmt: skip
def test_columns_that_a_type_does_not_read_are_not_read(tmp_path: Path, kind: str, unread: set[str]) -> None:
    row = {"instruction": "Ask", "input": "", "output": "Yes", "system": "Be", "history": [["Hi", "Hello"]]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row, "question": "Ask", "answer": "Yes"}) + "\n", encoding="utf-8")
    columns: Any = value_of(rows(f"path: {path}, type: {kind}"), "data.train[0].columns")
    assert {name for name, column in columns.items() if column == "none"} == unread


def test_of_a_role_to_train_the_text_is_learned_and_not_its_header(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Ask\nme"}, {"role": "assistant", "content": "Yes"}]
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    text = rows(f"path: {tmp_path / 'rows.jsonl'}, type: chat_template, roles_to_train: [user]")
    source = load_config_text(text, "theirs.yaml", check_paths=False).data.train[0]
    run = {"model": "preset:tiny-qwen3", "data": {"train": source.model_dump(mode="json", exclude_defaults=True)}}
    sample = luthier.prepare({**run, "output": {"dir": str(tmp_path / "out")}}).train[0]
    learned = sample.input_ids[sample.target]
    assert luthier.load_tokenizer("preset:tiny-qwen3").decode(learned) == "Ask\nme"
