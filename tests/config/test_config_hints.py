"""What other tools call things leads where it says: to a key that exists with a value it may have, or to why not."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from luthier.config import parse_path
from luthier.config.explain import TABLE, Meant, value_meant, what_is_meant
from luthier.config.loading import load_config_text
from luthier.config.words import all_keys, known_keys, schema_at
from luthier.encoding.tokenizer import load_tokenizer
from luthier.errors import ConfigError, TemplateError
from tests.conftest import refused

GOOD = "model: preset:tiny-qwen3\ndata: {train: preset:skills}\n"
# Names of the keys of LLaMA-Factory's YAML, transformers' TrainingArguments, TRL's configs, and axolotl's config; those
# of ms-swift are answered in its own files alone.
TOOLS: dict[str, list[str]] = json.loads(Path(__file__).with_name("other_tools.json").read_text(encoding="utf-8"))
del TOOLS["ms-swift"]
OUR_NAMES = {key.rsplit(".", 1)[1] for key in all_keys()}
SECTIONS = "|".join(known_keys(()))
NAMED = re.compile(rf"\b((?:{SECTIONS})\.[a-z_]+(?:\[0\])?(?:\.[a-z_]+)*)(?:: (\{{[^}}]*\}}|\[[^\]]*\]|[\w:.-]*\w))?")


def faults(meant: Meant) -> list[str]:
    """Keys that do not exist, and values that they may not have, among all that this says."""
    text = meant.told or f"{meant.key}" + (f": {meant.value}" if meant.value is not None else "")
    found = []
    for key, value in NAMED.findall(text):
        path = parse_path(key)
        if path is None or schema_at(path) is None:
            found.append(f"there is no {key}")
        elif value and (fault := _fault_of(key, value)):
            found.append(fault)
    if not NAMED.search(text) and meant.told is None:
        found.append(f"{text} names no key")
    return found


def all_meanings() -> list[tuple[str, Meant]]:
    """Everything that the table may answer, each with where it stands."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    answers = [(key, what_is_meant(key)) for key in table["keys"]]
    answers += [(f"{key}={value}", value_meant(key, value)) for key, of in table["values"].items() for value in of]
    found = [(name, meant) for name, meant in answers if meant is not None]
    assert len(found) == len(answers)
    return found + [(pattern, Meant(told=group["why"])) for group in table["told"] for pattern in group["keys"]]


def _fault_of(key: str, value: str) -> str | None:
    try:
        load_config_text(GOOD, "run.yaml", [f"{key}={value}"], check_paths=False)
    except ConfigError as error:
        # what a key needs besides it (an adapter, a loss) is told when it is used
        told = [problem for problem in error.problems if problem.key.startswith(key) and "expected" in problem.what]
        return str(told[0]) if told else None
    return None


def test_every_entry_names_keys_that_exist_and_values_that_they_may_have() -> None:
    different = {meant: name for name, meant in all_meanings()}
    assert len(different) > 200
    assert {name: found for meant, name in different.items() if (found := faults(meant))} == {}


def test_control_a_key_that_is_not_there_and_a_value_that_is_none_are_found_out() -> None:
    assert faults(Meant(key="train.learning_speed")) == ["there is no train.learning_speed"]
    assert faults(Meant(key="train.packing", value="yes"))
    assert faults(Meant(told="write train.precision: bf17 and model.dtype: bfloat16"))
    assert faults(Meant(told="write train.precision: bf16 and model.type: bfloat16"))
    assert not faults(Meant(told="write train.precision: bf16 and model.dtype: bfloat16"))


@pytest.mark.parametrize("tool", TOOLS)
def test_every_key_of_another_tool_is_ours_or_is_answered(tool: str) -> None:
    assert len(TOOLS[tool]) > 100
    assert [key for key in TOOLS[tool] if key not in OUR_NAMES and what_is_meant(key) is None] == []


def test_the_keys_of_transformers_are_those_of_the_version_that_is_installed() -> None:
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments) if not field.name.startswith("_")}
    assert [name for name in sorted(names) if name not in OUR_NAMES and what_is_meant(name) is None] == []


def test_no_pattern_hides_a_key_that_another_line_answers() -> None:
    """Lines are tried in their order; a name stands in one only, but for what a pattern of a later one matches too."""
    plain = [key for key, meant in all_meanings() if meant.told and "=" not in key and not re.search(r"[*?]", key)]
    assert len(plain) == len(set(plain))
    keys = [key for key, meant in all_meanings() if meant.key and "=" not in key]
    assert not set(keys) & set(plain)


def hint_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config_text(GOOD + text, "run.yaml", check_paths=False)
    (problem,) = caught.value.problems
    return str(problem.hint)


ANSWERS = [
    ("cutoff_len: 2048", "data.max_length"),
    ("load_in_4bit: true", "model.quantization: nf4"),
    ("adapter: qlora", "adapter: lora and model.quantization: nf4"),
    ("plot_loss: true", "loss.png"),
    ("ddp_timeout: 180000000", "runtime.rank_timeout"),
    ("use_galore: true", "train.optim: galore_adamw"),
    ("pref_bco_weight: 0.5", "objective.bco_share"),
    ("group_by_length: true", "train.packing"),
    ("train: {lr_scheduler_type: wsd}", "write train.lr_scheduler_type: warmup_stable_decay"),
    ("do_train: true", "luthier train"),
    ("push_to_hub: true", "hf upload"),
    ("bf16: true", "write train.precision: bf16"),
    ("bf16: false", "train.precision is auto"),
    ("flash_attn: fa2", "write model.attn_implementation: flash_attention_2"),
    ("flash_attention: false", "leave it out"),
    ("mix_strategy: interleave_under", "data.mixture.stop: first"),
    ("resume_from_checkpoint: null", "output.resume is auto"),
    ("lora_target: all", "write adapter.target_modules: [all-linear]"),
    ("report_to: none", "write tracking.report_to: []"),
    ("stage: ppo", "objective: {name: rl, loss: ppo}"),
    ("train: {optim: adamw_hf}", "write train.optim: adamw_torch"),
    ("use_dft_loss: true", "write objective.loss: dft"),
    ("pure_bf16: true", "train.precision: bf16 and model.dtype: bfloat16"),
    ("wandb_project: mine", "write tracking.report_to: [wandb]"),
    ("enable_thinking: false", "write template.kwargs: {enable_thinking: false}"),
    ("learning_rate: 1e-4", "train.learning_rate"),
    ("dataset: rows.jsonl", "data.train"),
    ("train: {packing: true}", "write train.packing: window"),
    ("train: {packing: false}", "write train.packing: none"),
    ("train: {max_steps: None}", "write null"),
]


@pytest.mark.parametrize(("text", "piece"), ANSWERS, ids=lambda each: str(each))
def test_a_key_of_another_tool_is_answered_with_what_to_write(text: str, piece: str) -> None:
    assert piece in hint_of(text)


def test_a_section_of_ours_with_another_tools_value_is_answered_too() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text("model: {name_or_path: preset:tiny-qwen3, dtype: bf16}\ndata: {train: preset:skills}\n")
    (problem,) = caught.value.problems
    assert problem.hint == "did you mean bfloat16? write model.dtype: bfloat16"
    assert value_meant("model.dtype", "bfloat16") is None
    assert value_meant("data.eval[3].format", "openai") == Meant(told="write format: messages")


def test_what_is_told_reads_as_yaml_where_it_is_to_be_written() -> None:
    for _, meant in all_meanings():
        if meant.value is not None:
            assert yaml.safe_load(f"x: {meant.value}")["x"] is not None


@pytest.mark.parametrize(("text", "tool"), [
    ("model: Qwen/Qwen3-8B\ntrain_type: lora\nlora_rank: 8\n", "ms-swift"),  # rows are named elsewhere
    ("rlhf_type: dpo\nmcore_model: Qwen3-8B-mcore\ndataset: owner/rows\n", "ms-swift"),
    ("model: {_component_: torchtune.models.llama3.llama3_8b}\nepochs: 1\n", "torchtune"),
    ("model: unsloth/Qwen2.5-0.5B\ndata: {dataset: a}\ntraining: {training_type: lora}\n", "Unsloth"),
    ("top.booster: auto\ntop.template: qwen3\ntrain.batch_size: 2\n", "LLaMA Board"),
    ("model_name_or_path: a/b\ndataset_mixer: {a/b: 1.0}\n", "alignment-handbook"),
])  # fmt: skip
def test_a_file_of_a_tool_that_is_not_read_is_told_by_its_name_alone(text: str, tool: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, check_paths=False)
    (problem,) = caught.value.problems
    assert tool in problem.what and problem.hint and problem.where.endswith(":1")


def test_a_slip_in_a_file_of_ours_is_not_taken_for_another_tool() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(GOOD + "training: {max_steps: 1}\n", check_paths=False)
    assert [problem.key for problem in caught.value.problems] == ["training"]


@pytest.mark.parametrize(("text", "key", "told"), [
    ("train: {learning_rates: {towr: 1e-4}}", "train.learning_rates", "did you mean tower?"),
    ("train: {learning_rates: {language_model: 1e-4}}", "train.learning_rates", "allowed: embedding, "),
    ("adapter: {type: lora, rank_pattern: {'': 4}}", "adapter.rank_pattern", "write a name before the colon"),
    ("train: {learning_rates: {tower: -1}}", "train.learning_rates.tower", "for example tower: 0.5"),
    ("train: {max_steps: 0}", "train.max_steps", "for example max_steps: 1, or null"),
])  # fmt: skip
def test_of_a_mapping_what_is_at_fault_is_told_its_key_or_its_value(text: str, key: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(GOOD + text, "run.yaml", check_paths=False)
    (problem,) = caught.value.problems
    assert problem.key == key and str(problem.hint).startswith(told)
    assert ("as a key" in problem.what) == ("before the colon" in told or key == "train.learning_rates")
    assert ("or null" in str(problem.hint)) == (key == "train.max_steps")


# ------------------------------------------------------------------------------------------------ files of other tools


OF_TOOLS = {
    "LLaMA-Factory": "model_name_or_path: preset:tiny-qwen3\nstage: sft\ndo_train: true\ntemplate: qwen3\n"
    "dataset: rows\nfinetuning_type: lora\noutput_dir: out\n",
    "axolotl": "base_model: preset:tiny-qwen3\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n"
    "datasets: [{path: r.jsonl, type: chat_template}]\n",
    "TRL": "model_name_or_path: preset:tiny-qwen3\ndataset_name: preset:skills\nuse_peft: true\npacking: true\n",
    "ms-swift": "model: preset:tiny-qwen3\ndataset: preset:skills\ntuner_type: lora\n",
}


@pytest.mark.parametrize(("tool", "first", "second"), [
    *((tool, "bf16", "fp16") for tool in OF_TOOLS),
    *((tool, "load_in_4bit", "load_in_8bit") for tool in ("axolotl", "TRL")),
    ("LLaMA-Factory", "mask_history", "train_on_prompt"),
    ("LLaMA-Factory", "use_dft_loss", "use_eaft_loss"),
    ("LLaMA-Factory", "pure_bf16", "bf16"),
])  # fmt: skip
def test_keys_of_a_tool_that_contradict_each_other_are_refused_together(tool: str, first: str, second: str) -> None:
    for one, other, is_fine in ((first, None, True), (first, second, False)):
        lines = "".join(f"{key}: true\n" for key in (one, other) if key is not None)
        try:
            load_config_text(OF_TOOLS[tool] + lines, "theirs.yaml", check_paths=False)
        except ConfigError as error:
            found = [problem for problem in error.problems if problem.key == second]
            assert not is_fine and found and first in found[0].what
        else:
            assert is_fine


@pytest.mark.parametrize(("tool", "key", "theirs"), [
    ("LLaMA-Factory", "micro_batch_size", "per_device_train_batch_size"),
    ("LLaMA-Factory", "sequence_len", "cutoff_len"),
    ("ms-swift", "cutoff_len", "max_length"),
    ("ms-swift", "micro_batch_size", "per_device_train_batch_size"),
    ("axolotl", "cutoff_len", "sequence_len"),
    ("axolotl", "datasets", "type"),
])  # fmt: skip
def test_a_key_of_one_tool_in_a_file_of_another_is_told_by_the_name_that_the_other_has(
    tool: str, key: str, theirs: str
) -> None:
    text = OF_TOOLS[tool]
    text = text.replace("type: chat", "typ: chat") if key == "datasets" else f"{text}{key}: 5\n"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, "theirs.yaml", check_paths=False)
    assert [problem.hint for problem in caught.value.problems if "such key" in problem.what] == [
        f"did you mean {theirs}?"
    ]


KEPT = "mine: &rate 1.0e-3\nshared: &lora {KEY: 4}\n"


@pytest.mark.parametrize(("tool", "rank", "below"), [
    ("LLaMA-Factory", "lora_rank", ""), ("axolotl", "lora_r", ""), ("TRL", "lora_r", ""), ("ms-swift", "lora_rank", ""),
    ("ours", "r", "adapter: {type: lora, <<: *lora}\ntrain: {learning_rate: *rate}\n"),
])  # fmt: skip
def test_a_key_that_keeps_values_for_aliases_is_no_fault_and_one_that_is_misspelt_is(
    tool: str, rank: str, below: str
) -> None:
    text = GOOD if tool == "ours" else OF_TOOLS[tool].replace("lora_r: 8\n", "")
    used = below or "<<: *lora\nlearning_rate: *rate\n"
    kept = KEPT.replace("KEY", rank)
    run = load_config_text(kept + text + used, "run.yaml", ["objective.name=sft"], check_paths=False)
    assert (run.adapter.r, run.train.learning_rate) == (4, 1e-3)
    misspelt = ("modell: &seed 5\n" if tool == "ours" else "learning_rat: &seed 5\n") + text
    misspelt += "runtime: {seed: *seed}\n" if tool == "ours" else "seed: *seed\n"
    for unused in (f"{text}mine: &rate 1.0e-3\n", misspelt):
        with pytest.raises(ConfigError):
            load_config_text(unused, "run.yaml", ["objective.name=sft"], check_paths=False)


@pytest.mark.parametrize(
    "override", ["objective.loss=zzqq", "objective=zzqq", "data.train=[{path: preset:skills, format: zzqq}]"]
)
def test_a_name_that_nothing_resembles_may_be_that_of_a_plugin(override: str) -> None:
    with refused(ConfigError, "a plugin's name?", "installed here"):
        load_config_text(GOOD, "run.yaml", [override], check_paths=False)


def test_a_template_that_nothing_resembles_may_be_that_of_a_plugin() -> None:
    with refused(TemplateError, "a plugin's name?", "installed here"):
        load_tokenizer("preset:tiny-qwen3", chat_template="zzqq")


def test_a_mistyped_name_is_no_plugins() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(GOOD, "run.yaml", ["objective.loss=cross_entrpy"], check_paths=False)
    assert "did you mean cross_entropy?" in str(caught.value) and "plugin" not in str(caught.value)


@pytest.mark.parametrize("given", ["export.llmcompressor=/nope", "export.modelfile=true", "export.public=true"])
def test_keys_of_a_section_that_do_not_go_together_have_a_way_out_that_names_one_of_them(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(GOOD, "run.yaml", [given], check_paths=False)
    (problem,) = caught.value.problems
    assert problem.hint is not None
    assert {word.strip(":") for word in problem.hint.split()} & set(known_keys(("export",)))
    assert "dir" not in problem.hint.split() and "mapping" not in problem.what
