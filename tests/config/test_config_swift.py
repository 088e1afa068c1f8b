"""Files of ms-swift are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peer_files import keys_refused, value_of

import luthier
from luthier.config import MappingNode, parse_path
from luthier.config.loading import dump_translation, load_config_text, load_draft
from luthier.config.peers.swift import SWIFT
from luthier.config.words import schema_at
from luthier.config.yaml_text import parse_yaml
from luthier.encoding.tokenizer import load_tokenizer
from luthier.errors import ConfigError
from luthier.records import Conversation, Preference
from luthier.sources import RawRow
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources

RUN = "model: preset:tiny-qwen3\ndataset: preset:skills\ntuner_type: lora\n"
TABLE: dict[str, Any] = dict(SWIFT.table)
KEYS: list[str] = json.loads(Path(__file__).with_name("other_tools.json").read_text(encoding="utf-8"))["ms-swift"]
ASKED = "rlhf_type: grpo\nreward_funcs: [format]\nper_device_train_batch_size: 8\n"
GRPO = RUN + ASKED
THEIRS = """model: Qwen/Qwen2.5-7B-Instruct
train_type: lora
torch_dtype: bfloat16
attn_impl: flash_attn
dataset:
  - 'AI-ModelScope/alpaca-gpt4-data-zh#500'
  - 'HF::owner/rows:part#9'
split_dataset_ratio: 0.1
max_length: 2048
system: 'You are a helpful assistant.'
model_author: swift
eval_steps: 50
deepspeed: zero2
"""


def test_a_file_of_theirs_becomes_the_run_that_it_describes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.yaml").write_text(THEIRS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    draft = load_draft(tmp_path / "theirs.yaml", check_paths=False)
    run = draft.config
    assert [(each.path, each.subset, each.max_rows) for each in run.data.train] == [
        ("modelscope:AI-ModelScope/alpaca-gpt4-data-zh", None, 500), ("hub:owner/rows", "part", 9),
    ]  # fmt: skip
    assert (run.adapter.r, run.adapter.lora_alpha, run.adapter.lora_dropout) == (8, 32, 0.05)
    assert (run.train.learning_rate, run.train.gradient_accumulation_steps, run.train.packing) == (1e-4, 16, "none")
    assert (run.train.weight_decay, run.train.adam_beta2, run.train.gradient_checkpointing) == (0.1, 0.95, True)
    assert (run.data.max_length, run.data.overflow, run.data.eval_split, run.eval.steps) == (2048, "drop", 0.1, 50)
    assert (run.runtime.sharding, run.train.precision, run.model.attn_implementation) == (
        "fsdp", "bf16", "flash_attention_2",
    )  # fmt: skip
    assert draft.translation is not None and draft.translation.peer == "ms-swift"
    imported = dump_translation(draft.translation, "theirs.yaml")
    assert load_config_text(imported, "run.yaml", check_paths=False) == run


def test_lines_of_the_table_name_keys_that_are_there() -> None:
    assert [ours for ours in TABLE["keys"].values() if schema_at(parse_path(ours) or ("?",)) is None] == []
    passed = [key for keys in TABLE["passed"].values() for key in keys]
    assert len(passed) == len(set(passed)) and not set(passed) & {*TABLE["missing"], *TABLE["keys"]}


@pytest.mark.parametrize(
    "key", sorted((SWIFT.known | {*KEYS}) - {"objective", "objective.name", "model", "dataset", "rlhf_type"})
)
def test_every_key_of_theirs_has_an_outcome_of_its_own(key: str) -> None:
    """It is translated, passed over or refused by its name, whatever its value: never a failure of the reader."""
    values = ("true", "3", "[a, b]", "null", "word", "{a: 1}")
    for base, value in (*((RUN, value) for value in values), (GRPO, "3"), (GRPO, "{a: 1}")):
        lines = "".join(line for line in base.splitlines(keepends=True) if line.split(":")[0] != key)
        try:
            load_config_text(f"{lines}{key}: {value}\n", "theirs.yaml", check_paths=False)
        except ConfigError as error:
            assert all("no such key" not in problem.what for problem in error.problems), error


def test_a_tuner_that_is_not_there_is_the_one_problem_of_the_keys_that_belong_to_it() -> None:
    lines = "target_modules: all-linear\nlora_rank: 8\ninit_weights: true\nvera_rank: 64\nfreeze_vit: true\n"
    assert keys_refused(RUN.replace("lora\n", "adalora\n") + lines) == ["tuner_type"]


def test_data_sets_in_one_text_are_told() -> None:
    assert keys_refused(RUN.replace("preset:skills", "a.jsonl#9 b.jsonl")) == ["dataset"]


@pytest.mark.parametrize(("text", "ours", "value"), [
    ("", "objective.name", "sft"),
    ("rlhf_type: dpo\nrpo_alpha: 0.2\n", "objective.sft_weight", 0.2),
    ("rlhf_type: dpo\n", "objective.beta", 0.1),
    ("rlhf_type: dpo\nadapters: a\n", "objective.reference.source", "base"),
    ("rlhf_type: orpo\nadapters: a\n", "objective.reference.source", "auto"),
    ("rlhf_type: dpo\nadapters: a\nref_adapters: [a]\n", "objective.reference.source", "auto"),
    ("rlhf_type: kto\nadapters: a\nref_adapters: b\n", "objective.reference.name_or_path", "b"),
    ("rlhf_type: dpo\nloss_type: [sigmoid, sft]\nloss_weights: [2, 1]\n", "objective.sft_weight", 0.5),
    ("rlhf_type: dpo\nloss_type: [sigmoid, bco_pair, sft]\n", "objective.loss", "mpo"),
    ("rlhf_type: dpo\nloss_type: ipo\n", "objective.loss", "ipo"),
    ("rlhf_type: cpo\nloss_type: sigmoid\n", "objective.loss", "cpo"),
    ("rlhf_type: kto\nloss_type: kto\n", "objective.loss", "kto"),
    ("loss_type: cross_entropy\n", "objective.name", "sft"),
    ("rlhf_type: simpo\n", "objective.beta", 2.0),
    ("rlhf_type: simpo\n", "objective.sft_weight", 1.0),
    ("rlhf_type: cpo\n", "objective.loss", "cpo"),
    ("rlhf_type: kto\ndesirable_weight: 0.5\n", "objective.desirable_weight", 0.5),
    ("rlhf_type: rm\ncenter_rewards_coefficient: 0.01\n", "objective.center_rewards", 0.01),
    ("enable_dft_loss: true\n", "objective.loss", "dft"),
    ("loss_scale: last_round+ignore_empty_think\n", "template.train_on", "last_assistant"),
    ("loss_scale: all\n", "template.train_on", "all"),
    ("truncation_strategy: left\n", "data.overflow", "keep_answer"),
    ("packing: true\n", "train.packing", "window"),
    ("quant_method: bnb\nquant_bits: 4\n", "model.quantization.type", "nf4"),
    ("quant_bits: 8\n", "model.quantization.type", "int8"),
    ("freeze_vit: false\n", "adapter.train_parts", ["language_model", "tower"]),
    ("freeze_llm: true\nfreeze_aligner: false\n", "adapter.train_parts", ["projector"]),
    ("target_regex: '.*q_proj'\n", "adapter.target_modules", ["regex:.*q_proj"]),
    ("tuner_type: full\n", "train.learning_rate", 1e-5),
    ("train_type: full\n", "adapter.type", "full"),
    ("tuner_type: vera\n", "adapter.r", 256),
    ("resume_from_checkpoint: true\n", "output.resume", "auto"),
    ("resume_from_checkpoint: false\n", "output.resume", "never"),
    ("adapters: [a]\nlora_rank: 4\n", "adapter.name_or_path", "a"),
    ("tuner_type: vera\nadapters: a\n", "adapter.name_or_path", "a"),
    (ASKED + "adapters: a\n", "objective.reference.source", "base"),
    ("init_weights: pissa\n", "adapter.init_lora_weights", "pissa"),
    ("init_weights: lora-ga\n", "adapter.init_lora_weights", "lora_ga"),
    ("freeze_aligner: false\naligner_lr: 1e-5\n", "train.learning_rates", {"projector": 1e-5}),
    ("freeze_aligner: false\naligner_lr: 1e-5\nvit_lr: 1e-6\n", "train.learning_rates", {"projector": 1e-5}),
    ("freeze_vit: true\nvit_lr: 1e-5\naligner_lr: 1e-5\n", "train.learning_rates", {}),
    ("columns: {text: query, answer: response}\n", "data.train", None),
    ("val_dataset: held.jsonl\nsave_strategy: epoch\n", "eval.strategy", "epoch"),
    ("per_device_train_batch_size: 4\n", "train.gradient_accumulation_steps", 4),
    ("gradient_accumulation_steps: 2\nwarmup_ratio: 0.05\n", "train.warmup_steps", 0.05),
    ("report_to: [wandb, tensorboard]\n", "tracking.report_to", ["wandb", "tensorboard"]),
    ("resume_from_checkpoint: out/checkpoint-3\n", "output.resume", "out/checkpoint-3"),
    ("quant_bits: 4\nbnb_4bit_compute_dtype: bfloat16\n", "model.quantization.compute_dtype", "bfloat16"),
    ("torch_compile: true\n", "train.torch_compile", True),
    ("label_smoothing_factor: 0.1\n", "objective.label_smoothing", 0.1),
    ("split_dataset_ratio: 0.1\nload_best_model_at_end: true\nmetric_for_best_model: eval_loss\n",
     "eval.metric_for_best_model", "loss"),
    ("split_dataset_ratio: 0.1\nearly_stop_interval: 3\n", "eval.early_stopping_patience", 3),
    ("loss_scale: hermes\nagent_template: hermes\n", "template.targets[0].weight", 2.0),
    (ASKED, "rollout.answers", 8),
    (ASKED, "rollout.temperature", 0.9),
    (ASKED, "objective.kl_weight", 0.04),
    (ASKED, "adapter.lora_dropout", 0.0),
    (f"{ASKED}gradient_accumulation_steps: 2\n", "rollout.prompts_per_step", 2),
    (f"{ASKED}max_length: 100\nmax_completion_length: 20\n", "data.max_length", 120),
    (f"{ASKED}loss_type: dapo\nepsilon_high: 0.28\n", "objective.clip_high", 0.28),
    (f"{ASKED}dynamic_sample: true\nmax_resample_times: 2\n", "rollout.resample_rounds", 2),
    (f"{ASKED}reward_model: judge\nreward_weights: [1, 0.5]\n", "rollout.rewards[1].weight", 0.5),
    (f"{ASKED}top_p: 0.9\nref_model: other\n", "objective.reference.name_or_path", "other"),
], ids=str)  # fmt: skip
def test_keys_become_what_they_mean_here(text: str, ours: str, value: object) -> None:
    named = {line.split(":")[0] for line in text.splitlines()}
    named |= {"tuner_type"} if "train_type" in named else set()
    lines = "".join(line for line in RUN.splitlines(keepends=True) if line.split(":")[0] not in named)
    assert value_of(lines + text, "objective.name", "objective.name=pt") == "pt" or "rlhf_type" in text
    found = value_of(lines + text, ours)
    if value is None:
        assert isinstance(found, list) and found[0]["columns"] == {"prompt": "text", "response": "answer"}
    else:
        assert found == value


@pytest.mark.parametrize(("text", "key"), [
    ("rlhf_type: ppo\n", "rlhf_type"),
    ("rlhf_type: grpo\n", "reward_funcs"),  # nothing judges the answers
    ("rlhf_type: grpo\nreward_funcs: [polite]\n", "reward_funcs"),
    ("rlhf_type: grpo\nreward_funcs: [format, soft_overlong]\n", "reward_funcs"),
    ("rlhf_type: grpo\nreward_funcs: [format]\nmulti_turn_scheduler: gym\n", "multi_turn_scheduler"),
    ("rlhf_type: grpo\nreward_funcs: [format]\nadvantage_estimator: rloo\n", "advantage_estimator"),
    ("rlhf_type: best\n", "rlhf_type"),
    ("rlhf_type: dpo\nloss_type: [sigmoid, hinge]\n", "loss_type"),
    ("rlhf_type: cpo\nloss_type: hinge\n", "loss_type"),
    ("rlhf_type: orpo\nloss_type: sigmoid\n", "loss_type"),
    ("dataset: swift/self-cognition#500\n", "dataset"),
    ("tuner_type: longlora\n", "tuner_type"),
    ("quant_method: hqq\nquant_bits: 4\n", "quant_bits"),
    ("sequence_parallel_size: 2\n", "sequence_parallel_size"),
    ("loss_scale: react\n", "loss_scale"),
    ("external_plugins: [mine.py]\n", "external_plugins"),
    ("freeze_parameters_ratio: 0.5\n", "freeze_parameters_ratio"),
    ("use_chat_template: false\n", "use_chat_template"),
    ("lora_rank: 0\n", "lora_rank"),
    ("cutoff_len: 5\n", "cutoff_len"),  # another tool's
    ("reward_funcs: [accuracy]\n", "reward_funcs"),
], ids=str)  # fmt: skip
def test_what_is_wrong_or_missing_is_told_by_their_key(text: str, key: str) -> None:
    lines = "".join(line for line in RUN.splitlines(keepends=True) if line.split(":")[0] not in text)
    assert key in keys_refused(lines + text)


@pytest.mark.parametrize(("name", "is_told"), [("zero2", False), ("zero3_offload", True)])
def test_what_deepspeed_would_move_to_the_cpu_is_told_not_to_be(tmp_path: Path, name: str, is_told: bool) -> None:
    (tmp_path / "theirs.yaml").write_text(f"{RUN}deepspeed: {name}\n", encoding="utf-8")
    translation = load_draft(tmp_path / "theirs.yaml", check_paths=False).translation
    assert translation is not None and any("to the CPU" in told for told in translation.told) is is_told


@pytest.mark.parametrize("text", [
    "model: x\ndataset: y\n",  # a slip in a file of ours as likely as one of theirs
    "model: x\ndata: {train: y}\nlora_rank: 5\n",
    "model: x\ntrain_dataset: y\nmicro_batch_size: 1\n",
])  # fmt: skip
def test_files_of_other_tools_are_not_taken_for_it(text: str) -> None:
    tree = parse_yaml(text, "other.yaml").tree
    assert isinstance(tree, MappingNode) and not SWIFT.is_its(tree)


@pytest.mark.parametrize(("row", "found"), [
    ({"query": "a", "response": "b"}, ("alpaca", {"prompt": "query", "response": "response"})),
    ({"messages": []}, ("auto", {})),
    ({"query": "a", "response": "b", "rejected_response": "c"},
     ("preference", {"prompt": "query", "chosen": "response", "rejected": "rejected_response"})),
], ids=str)  # fmt: skip
def test_rows_in_columns_that_they_alone_use_are_read(tmp_path: Path, row: dict[str, object], found: object) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    text = RUN.replace("preset:skills", str(tmp_path / "rows.jsonl"))
    text += "rlhf_type: dpo\n" if "rejected_response" in row else ""
    (source,) = load_config_text(text, "theirs.yaml", check_paths=False).data.train
    assert (source.format, source.columns) == found


@pytest.mark.parametrize("worse", [
    {"rejected_response": "c"},
    {"rejected_messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]},
], ids=["response", "messages"])  # fmt: skip
def test_messages_beside_a_worse_answer_are_a_pair_for_dpo_and_a_conversation_for_sft(
    tmp_path: Path, worse: dict[str, object]
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, **worse}) + "\n", encoding="utf-8")
    text = RUN.replace("preset:skills", str(tmp_path / "rows.jsonl"))
    for kind, wanted in (("rlhf_type: dpo\n", Preference), ("rlhf_type: rm\n", Preference), ("", Conversation)):
        run = load_config_text(text + kind, "theirs.yaml", check_paths=False)
        (source,) = open_sources(run.data.train, seed=0)
        (row,) = source.rows()
        assert isinstance(row, RawRow) and isinstance(source.convert(row), wanted)


@pytest.mark.parametrize(("more", "texts"), [
    ("", "I love music<|im_end|>"),
    ("use_chat_template: false\n", "I love music<|im_end|>"),
    ("use_chat_template: true\n", "<|im_start|>assistant\nI love music<|im_end|>\n"),
])  # fmt: skip
def test_pretraining_learns_the_texts_of_messages_whole(tmp_path: Path, more: str, texts: str) -> None:
    row: dict[str, object] = {"messages": [{"role": "assistant", "content": "I love music"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    text = RUN.replace("preset:skills", str(tmp_path / "rows.jsonl")) + more
    run = load_config_text(text, "theirs.yaml", ["objective.name=pt"], check_paths=False)
    sample = luthier.encode(row, run)
    assert load_tokenizer("preset:tiny-qwen3").decode(sample.input_ids) == texts
    assert sample.target.all()


def test_calls_in_succession_are_one_message_as_ms_swift_joins_them(tmp_path: Path) -> None:
    calls = [{"role": "tool_call", "content": json.dumps({"name": "look", "arguments": {"at": at}})} for at in "ab"]
    results = [{"role": "tool_response", "content": "1"}, {"role": "tool_response", "content": "2"}]
    ends = {"role": "user", "content": "Look."}, {"role": "assistant", "content": "1 and 2."}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [ends[0], *calls, *results, ends[1]]}) + "\n")
    run = load_config_text(RUN.replace("preset:skills", str(tmp_path / "rows.jsonl")), "theirs.yaml", check_paths=False)
    (source,) = open_sources(resolve_sources(run.data)[0], seed=0)
    (row,) = source.rows()
    assert isinstance(row, RawRow)
    found = source.convert(row)
    assert isinstance(found, Conversation)
    assert [(message.role, len(message.parts)) for message in found.messages] == [
        ("user", 1), ("assistant", 2), ("tool", 1), ("tool", 1), ("assistant", 1),
    ]  # fmt: skip


def test_a_file_trains(tmp_path: Path) -> None:
    from luthier.library import train

    rows = [{"query": f"Say {number}.", "response": str(number)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = RUN.replace("preset:skills", f"{tmp_path / 'rows.jsonl'}#6") + "max_length: 256\nreport_to: none\n"
    (tmp_path / "theirs.yaml").write_text(f"{text}output_dir: {tmp_path / 'out'}\n", encoding="utf-8")
    result = train(tmp_path / "theirs.yaml", overrides=[
        "max_steps=2", "gradient_accumulation_steps=1", f"data.store={tmp_path / 'store'}", "tracking.progress=false",
        "dataloader_num_workers=0", "learning_rate=0.01",
    ])  # fmt: skip
    assert result.exit_code == 0 and result.steps[-1].step == 2
