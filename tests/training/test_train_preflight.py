"""What would stop a run is told before a row is encoded, at the line of the key, all of it at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file

from luthier import library
from luthier.config import machine
from luthier.config.choices import SCHEDULERS, TRACKERS, QuantizationType
from luthier.config.draft import Draft, unread_settings
from luthier.config.loading import load_draft
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import RUN_CONFIG
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import load_tokenizer
from luthier.errors import ConfigError, ModelError, Problem
from luthier.loader import settings as loader_settings
from luthier.models.adapter_files import shape_existing
from luthier.models.adapters import apply_adapter
from luthier.models.model import build_weightless
from luthier.models.vocabulary import Vocabulary
from luthier.presets import model_folder
from luthier.training import preflight
from luthier.training.preflight import check_run

GOOD = """\
model: {name_or_path: preset:tiny-qwen3}
data: {train: preset:skills#20}
output: {dir: out}
"""
RUNS = {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "lomo", "adalomo",
        "muon", "badam"}  # fmt: skip  # with torch and nothing else


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Draft]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "mixed" / "b.csv").write_text("text\nb\n")
    (tmp_path / "run.yaml").write_text(GOOD)

    def describe(*overrides: str, to_train: bool = True) -> Draft:
        draft = load_draft("run.yaml", overrides, to_train=to_train)
        if draft.machine:
            raise ConfigError(list(draft.machine))
        return draft

    return describe


def problems_of(check: Callable[[], object]) -> list[Problem]:
    try:
        check()
    except ConfigError as error:
        return error.problems
    return []


def test_a_run_with_nothing_wrong_passes_without_a_word(described: Callable[..., Draft]) -> None:
    assert check_run(described()) == []


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_every_optimizer_takes_a_step_or_is_refused_at_its_key(optim: str, described: Callable[..., Draft]) -> None:
    found = problems_of(lambda: described(f"train.optim={optim}"))
    if not found:
        found = list(preflight._optimizer(described(f"train.optim={optim}")))
    assert {problem.key for problem in found} <= {"train.optim"}
    assert all(problem.hint and "bug" not in str(problem) for problem in found)
    if optim in RUNS:
        assert found == []


@pytest.mark.parametrize("optim", [name for name, row in OPTIMIZERS.items() if row.needs])
def test_every_optimizer_whose_package_is_missing_is_told_with_what_to_install(
    optim: str, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda module: module in machine.TRAINING)
    (problem,) = [each for each in problems_of(lambda: described(f"train.optim={optim}")) if "needs" in each.what]
    packages = " ".join(package for _, package in OPTIMIZERS[optim].needs)
    assert problem.key == "train.optim" and (problem.hint or "").startswith(f"pip install {packages};")


@pytest.mark.parametrize("key", ["model.quantization", "objective.reference.quantization"])
@pytest.mark.parametrize("how", [each for each in QuantizationType if each.library])
def test_every_quantization_whose_package_is_missing_is_told_with_what_to_install(
    key: str, how: QuantizationType, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda module: module in machine.TRAINING)
    objective = "objective={name: dpo, reference: {source: model}}"
    found = problems_of(lambda: described("adapter=lora", objective, f"{key}={how}"))
    (problem,) = [each for each in found if "needs" in each.what]
    assert problem.key == key and (problem.hint or "").startswith(f"pip install {how.library};")


QUANTIZED_FAULTS = {
    "all weights": (["model.quantization=nf4"], "model.quantization"),
    "some layers": (
        ["model.quantization=int8", "adapter={type: freeze, freeze_trainable_layers: 1}"],
        "model.quantization",
    ),
    "a base that changes": (
        ["model.quantization=nf4", "adapter={type: lora, init_lora_weights: pissa}"],
        "adapter.init_lora_weights",
    ),
    **{
        f"loftq, {why}": (
            ["model.quantization=nf4", "adapter={type: lora, init_lora_weights: loftq}", more],
            "adapter.init_lora_weights",
        )
        for why, more in (("norms apart", "adapter.use_dora=true"), ("a reference", "objective.name=dpo"))
    },
    "sharded": (["model.quantization=int8", "adapter=lora", "runtime.sharding=fsdp"], "model.quantization"),
    "trained by no library": (["model.quantization=torchao_int4", "adapter=lora"], "model.quantization"),
    "settings of 4 bits": (
        ["model.quantization={type: int8, double_quantization: false}", "adapter=lora"],
        "model.quantization.double_quantization",
    ),
    "nothing to leave out": (["model.quantization={skip_modules: [o_proj]}"], "model.quantization.skip_modules"),
    "a name that no layer has": (
        ["model.quantization={type: nf4, skip_modules: [o_prj]}", "adapter=lora"],
        "model.quantization.skip_modules",
    ),
    "a reference that needs a GPU": (
        ["runtime.device=cpu", "objective={name: dpo, reference: {quantization: torchao_int4}}"],
        "objective.reference.quantization",
    ),
    "nothing left to quantize": (
        ["model.quantization={type: nf4, skip_modules: [proj]}", "adapter=lora"],
        "model.quantization",
    ),
}


@pytest.mark.parametrize("fault", QUANTIZED_FAULTS)
def test_quantized_weights_that_cannot_be_trained_so_are_told_at_their_key(
    fault: str, described: Callable[..., Draft]
) -> None:
    overrides, key = QUANTIZED_FAULTS[fault]
    found = problems_of(lambda: check_run(described(*overrides)))
    assert {problem.key for problem in found} == {key} and all(problem.hint for problem in found)


def test_a_model_that_comes_quantized_is_told_what_it_lacks(
    described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.quantization_config.is_compressed_tensors_available", lambda: False)
    folder = Path("quantized")
    shutil.copytree(model_folder("tiny-qwen3"), folder)
    written = json.loads((folder / "config.json").read_text())
    named = [f"model.name_or_path={folder}", "model.tokenizer_name_or_path=preset:tiny-qwen3"]
    for said, package in (
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "pip install -U gptqmodel optimum;"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "gptqmodel"),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "of tomorrow"}, "16 bits"),
    ):
        (folder / "config.json").write_text(json.dumps({**written, "quantization_config": said}))
        problems = problems_of(lambda: check_run(described(*named, "adapter=lora")))
        assert [problem.key for problem in problems] == ["model.name_or_path"], said
        assert package in (problems[0].hint or "") and str(said["quant_method"]) in problems[0].what


def test_a_model_that_comes_quantized_is_not_sharded_but_in_4_bits(described: Callable[..., Draft]) -> None:
    folder = Path("quantized")
    shutil.copytree(model_folder("tiny-qwen3"), folder)
    written = json.loads((folder / "config.json").read_text())
    named = [f"model.name_or_path={folder}", "model.tokenizer_name_or_path=preset:tiny-qwen3", "adapter=lora"]
    for bits, is_refused in (("load_in_8bit", True), ("load_in_4bit", False)):
        said = {"quant_method": "bitsandbytes", bits: True, "bnb_4bit_quant_storage": "float32"}
        (folder / "config.json").write_text(json.dumps({**written, "quantization_config": said}))
        if is_refused:
            (problem,) = problems_of(lambda: check_run(described(*named, "runtime.sharding=fsdp")))
            assert problem.key == "runtime.sharding"
        else:
            assert check_run(described(*named, "runtime.sharding=fsdp")) == []
        assert check_run(described(*named)) == []


def test_control_a_base_may_be_quantized_under_an_adapter(described: Callable[..., Draft]) -> None:
    assert check_run(described("model.quantization=nf4", "adapter=lora")) == []


def test_an_optimizer_that_no_package_is_named_for_needs_none() -> None:
    assert {name for name, row in OPTIMIZERS.items() if not row.needs} == RUNS


@pytest.mark.parametrize("tracker", TRACKERS)
def test_every_tracker_that_is_not_there_is_told_with_what_to_install(
    tracker: str, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda module: module in machine.TRAINING)
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    (problem,) = problems_of(lambda: described(f"tracking.report_to=[{tracker}]"))
    assert problem.key == "tracking.report_to[0]" and (problem.hint or "").startswith(("pip install", "start the run"))
    monkeypatch.setattr(machine, "is_installed", lambda module: True)
    assert tracker == "kubeflow" or problems_of(lambda: described(f"tracking.report_to=[{tracker}]")) == []


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_settings_that_a_schedule_does_not_know_are_told(scheduler: str, described: Callable[..., Draft]) -> None:
    needed = {"cosine_with_min_lr": "min_lr_rate: 0.1", "cosine_warmup_with_min_lr": "min_lr_rate: 0.1",
              "warmup_stable_decay": "num_decay_steps: 10"}.get(scheduler, "")  # fmt: skip
    for more, is_fault in (("", False), ("no_such_setting: 1", True)):
        kwargs = ", ".join(each for each in (needed, more) if each)
        given = (f"train.lr_scheduler_type={scheduler}", f"train.lr_scheduler_kwargs={{{kwargs}}}", "data.eval_split=2")
        draft = described(*given)
        found = list(preflight._schedule(draft))
        assert bool(found) == is_fault, found
        assert {problem.key for problem in found} <= {"train.lr_scheduler_kwargs"}


WRONG = {
    "adapter.target_modules": ["adapter.type=lora", "adapter.target_modules=[q_prj]"],
    "adapter.modules_to_save": ["adapter.type=lora", "adapter.modules_to_save=[lm_haed]"],
    "adapter.freeze_trainable_layers": ["adapter.type=freeze", "adapter.freeze_trainable_layers=99"],
    "adapter.freeze_trainable_modules": ["adapter.type=freeze", "adapter.freeze_trainable_modules=[nothing*]"],
    "adapter.train_parts": ["adapter.train_parts=[tower]"],
    "model.config_overrides.no_such_entry": ["model.config_overrides={no_such_entry: 1}"],
    "train.optim_args": ["train.optim=sgd", "train.optim_args={nesterov: true}"],
    "train.optim_args.no_such_argument": ["train.optim_args=no_such_argument=1"],
    "train.lr_scheduler_kwargs": ["train.lr_scheduler_kwargs={no_such: 1}"],
    "template.chat_template": ["template.chat_template=no_such_template"],
    "adapter.r": ["adapter={type: lora, r: 65536}"],
    "eval.max_new_tokens": ["eval.max_new_tokens=16777216", "eval.generate_rows=2", "data.eval_split=2"],
    "model.experts_implementation": ["model.experts_implementation=eager"],
    "train.router_aux_loss_coef": ["train.router_aux_loss_coef=0.1"],
    "data.eval_split": ["data.eval_split=1e9"],
    "runtime.sharding": ["runtime.sharding=fsdp", "adapter={type: freeze, freeze_trainable_modules: ['*embed*']}"],
    "data.train[0].path": ["data.train=[{path: mixed}]"],
}
SHARES = "[{path: preset:skills#20, weight: WEIGHT}, {path: 'rows.jsonl'}]"
# more faults of the same keys: of data that is counted, or only bounded, and of weights that make no epoch
WRONG_TOO = [
    ("adapter.modules_to_save", ["adapter={type: lora, target_modules: [q_proj], modules_to_save: [self_attn]}"]),
    ("adapter.modules_to_save", ["adapter={type: oft, target_modules: [q_proj, v_proj], modules_to_save: [v_proj]}"]),
    ("adapter.modules_to_save", ["adapter={type: lora, modules_to_save: [layers]}"]),
    ("data.eval_split", ["data.eval_split=20"]),
    ("data.eval_split", ["data.eval_split=0.99"]),
    ("data.eval_split", ["data.eval_split=1e7", "data.train=[rows.jsonl]", "counted=0"]),
    ("data.train", ["data.mixture=rows", f"data.train={SHARES.replace('WEIGHT', '1e9')}"]),
    ("data.train", ["data.mixture={by: tokens}", f"data.train={SHARES.replace('WEIGHT', '1e-12')}"]),
    ("data.train", ["data.train=[{path: preset:skills#20, weight: 1e-9}]"]),
]
# the same settings with numbers that are possible
RIGHT = [
    ["adapter={type: lora, target_modules: [q_proj], modules_to_save: [mlp]}"],
    ["adapter={type: lora, target_modules: [q_proj, v_proj], modules_to_save: [layers.0]}"],
    ["adapter={type: lora, modules_to_save: [q_proj]}"],
    ["data.eval_split=19"],
    ["data.eval_split=0.01"],
    ["data.eval_split=0.1", "data.train=[rows.jsonl]", "counted=0"],
    ["data.mixture=rows", f"data.train={SHARES.replace('WEIGHT', '1000')}"],
    ["data.mixture={by: tokens}", f"data.train={SHARES.replace('WEIGHT', '1000')}"],
    ["data.train=[{path: preset:skills#20, weight: 0.05}]"],
]


def encoded_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a row is encoded")

    monkeypatch.setattr(Encoder, "encode_many", refuse)


@pytest.mark.parametrize("key", WRONG)
def test_each_fault_is_told_at_its_key_before_a_row_is_encoded(
    key: str, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_nothing(monkeypatch)
    found = problems_of(lambda: check_run(described(*WRONG[key])))
    assert [problem.key for problem in found] == [key], found
    assert all(problem.hint and problem.where.startswith(("run.yaml:", "override ")) for problem in found)


def problems_with(given: list[str], described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """``counted=0`` stands for files that are too large to be counted. Of faults of data only data are asked about."""
    Path("rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9)
    if "counted=0" in given:
        monkeypatch.setattr(loader_settings, "COUNTED_BYTES", 0)
    draft = described(*(override for override in given if override != "counted=0"))
    if given[0].startswith("adapter"):
        return problems_of(lambda: check_run(draft))
    return list(loader_settings.data_faults(draft))


@pytest.mark.parametrize(("key", "given"), WRONG_TOO)
def test_what_can_be_known_of_data_and_adapter_is_told_before_a_row_is_encoded(
    key: str, given: list[str], described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_nothing(monkeypatch)
    (problem,) = problems_with(given, described, monkeypatch)
    assert problem.key.startswith(key) and problem.hint and problem.where.startswith("override ")
    assert "combination of mismatched" not in problem.what  # PEFT's own sentence


@pytest.mark.parametrize("command", [library.prepare, library.plan, library.stats, library.show])
@pytest.mark.parametrize("given", [g for key, g in WRONG_TOO if key.startswith("data") and "counted=0" not in g])
def test_every_command_that_loads_rows_tells_what_is_wrong_with_them_before_one_is_encoded(
    command: Callable[..., object],
    given: list[str],
    described: Callable[..., Draft],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded_nothing(monkeypatch)
    Path("rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9)
    described()  # writes the file
    (problem,) = problems_of(lambda: command("run.yaml", overrides=given))
    assert problem.key.startswith("data") and problem.where.startswith("override ")


@pytest.mark.parametrize("given", RIGHT)
def test_data_and_adapters_that_are_possible_pass(
    given: list[str], described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems_with(given, described, monkeypatch) == []


def test_an_adapter_that_does_not_fit_the_model_is_told_before_a_row_is_encoded(
    tmp_path: Path, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_nothing(monkeypatch)
    sizes = "hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8"
    given = "model.config_overrides={%s, num_hidden_layers: %d}"
    config = described(given % (sizes, 2), "adapter={type: lora, r: 4, target_modules: [q_proj]}").config
    vocabulary = Vocabulary.of(Encoder.from_config(config).tokenizer)
    adapted = apply_adapter(build_weightless(config, vocabulary), config.adapter)
    weights = {name: torch.zeros(weight.shape) for name, weight in get_peft_model_state_dict(adapted).items()}
    folder = tmp_path / "adapter"
    adapted.peft_config["default"].save_pretrained(str(folder))
    file, adapter = folder / "adapter_model.safetensors", f"adapter={{type: lora, name_or_path: {folder}}}"

    def refusal(model: str, weights: dict[str, torch.Tensor] = weights) -> str:
        save_file(weights, file)
        config = described(model, adapter).config
        with pytest.raises(ModelError) as told:
            shape_existing(build_weightless(config, vocabulary), config.adapter, str(folder))
        assert told.value.hint
        return told.value.message

    right, first = given % (sizes, 2), min(weights)
    assert "model wants" in refusal(given % (sizes.replace("32", "64"), 2))
    assert "have no place" in refusal(given % (sizes, 1))
    assert "are not in it" in refusal(given % (sizes, 3))
    assert "are not in it" in refusal(right, {name: weights[name] for name in weights.keys() - {first}})
    assert "[8, 32]" in refusal(right, {**weights, first: torch.zeros(8, 32)})
    save_file(weights, file)
    assert check_run(described(right, adapter)) == []
    file.unlink()
    (problem,) = problems_of(lambda: check_run(described(right, adapter)))
    assert problem.key == "adapter.name_or_path" and "are not there" in problem.what and problem.hint


NO_MODEL = {
    "num_hidden_layers": "0", "num_attention_heads": "7", "vocab_size": "3", "head_dim": "3", "hidden_act": "no_such",
    "intermediate_size": "0", "rope_parameters": "{rope_type: yarn}", "layer_types": "[full_attention]",
    "pad_token_id": "99999999", "initializer_range": ".nan", "dtype": "float7", "model_type": "llama",
    "attention_dropout": "2", "use_cache": "maybe", "hidden_size": "1000000000", "no_such_entry": "1",
    "return_dict": "false", "num_key_value_heads": "-1", "sliding_window": "0", "max_position_embeddings": "1.5",
}  # fmt: skip


@pytest.mark.parametrize("entry", NO_MODEL)
def test_an_entry_that_makes_no_model_is_told_at_its_line(
    entry: str, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_nothing(monkeypatch)
    found = problems_of(lambda: check_run(described(f"model.config_overrides={{{entry}: {NO_MODEL[entry]}}}")))
    assert len(found) == 1 and found[0].key.startswith("model.config_overrides"), found
    assert found[0].hint and "bug" not in str(found[0])


def test_control_entries_that_fit_each_other_pass(described: Callable[..., Draft]) -> None:
    sizes = "hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_hidden_layers: 1"
    assert check_run(described(f"model.config_overrides={{{sizes}, rope_parameters: {{rope_theta: 5e5}}}}")) == []


UNREAD = {
    "eval.steps": ["eval.steps=5", "data.eval_split=2"],
    "eval.strategy": ["eval.strategy=steps"],
    "eval.max_new_tokens": ["eval.max_new_tokens=5", "data.eval_split=2"],
    "output.save_steps": ["output.save_steps=5"],
    "train.adam_beta1": ["train.adam_beta1=0.5", "train.optim=sgd"],
    "train.num_train_epochs": ["train.num_train_epochs=2", "train.max_steps=30"],
    "data.prepare": ["data.prepare=meanwhile", "train.packing=none"],
    "model.revision": ["model.revision=v2"],
    "tracking.run_name": ["tracking.run_name=mine"],
    "data.train[0].revision": ["data.train=[{path: rows.jsonl, revision: v2}]"],
    "data.train[0].documents": ["data.train=[{path: rows.jsonl, documents: file}]"],
    "data.train[0].separator": ["data.train=[{path: rows.jsonl, separator: ';'}]"],
    "data.train[0].drop_system": ["data.train=[{path: rows.txt, drop_system: true}]", "objective=pt"],
    "data.train[0].same_role": ["data.train=[{path: rows.jsonl, format: text, same_role: merge}]", "objective=pt"],
    "data.train[0].prompt_format": ["data.train=[{path: rows.jsonl, format: messages, prompt_format: 'Q: {q}'}]"],
    "data.document_end": ["data.train=[{path: rows.jsonl, format: messages}]", "data.document_end=none"],
    "template.history": ["data.train=rows.txt", "objective=pt", "template.history=one_rendering"],
    "output.save_total_limit": ["output.save_total_limit=2", "output.save_strategy=no"],
    "output.resume": ["output.resume=auto", "output.overwrite=true"],
    "output.save_only_model": ["output.save_only_model=true", "output.save_strategy=no"],
    "eval.early_stopping_threshold": ["eval.early_stopping_threshold=0.1"],
    "judge": ["judge=http://localhost:1", "data.eval_split=2", "eval={generate_rows: 1, metrics: [rougeL]}"],
    "generate": ["generate.max_new_tokens=5"],
    "train.adam_epsilon": ["train.adam_epsilon=1e-6", "train.optim=lion_32bit"],
    "objective.reference.revision": ["objective=dpo", "objective.reference.revision=v2"],
    "export.llama_cpp": ["export.llama_cpp=llama.cpp"],
    "export.calibration_rows": ["export.calibration_rows=9", "export.quantize=int8"],
    "template.train_on": ["objective=dpo", "template.train_on=last_assistant"],
    "data.train[0].train_on": ["objective=kto", "data.train=[{path: rows.jsonl, train_on: last_assistant}]"],
    "template.train_stop": ["objective=rm", "template.train_stop=false"],
    "rollout.max_turns": ["objective=rl", "rollout.max_turns=3"],
    "rollout.correction.high": ["objective=rl", "rollout.correction.high=2"],
    "rollout.correction": ["objective=online_dpo", "rollout.correction.how=mask"],
    "rollout.max_gap": ["objective=best_of_n", "rollout.max_gap=0.1"],
    "eval.metric_for_best_model": ["eval.metric_for_best_model=perplexity", "data.eval_split=2"],
}
READ = {
    "template.train_stop": ["objective=dpo", "template.train_stop=false"],
    "rollout.correction.high": ["objective=rl", "rollout.correction={how: mask, high: 2}"],
    "eval.metric_for_best_model": [
        "eval.metric_for_best_model=perplexity",
        "data.eval_split=2",
        "train.lr_scheduler_type=reduce_lr_on_plateau",
    ],
    "data.document_end": ["data.train=[{path: rows.jsonl, format: messages}, rows.txt]", "data.document_end=none"],
    "data.train[0].drop_system": ["data.train=[{path: rows.jsonl, drop_system: true}]"],
    "data.train[0].split": ["data.train=[{path: ., split: train}]"],  # of a folder's files, by their names
    "data.train[0].prompt_format": ["data.train=[{path: rows.jsonl, format: text, prompt_format: 'Q: {q}'}]"],
    "template.history": ["data.train=[rows.txt, rows.jsonl]", "template.history=one_rendering"],
    "output.save_total_limit": ["output.save_total_limit=2", "output.save_strategy=epoch"],
    "output.resume": ["output.resume=auto"],
    "output.save_only_model": ["output.save_only_model=true"],
    "judge": ["judge=http://localhost:1", "data.eval_split=2", "eval={generate_rows: 1, metrics: [judge]}"],
    "data.train[0].weight": ["data.train=[{path: rows.jsonl, weight: 2}]"],
    "train.adam_epsilon": ["train.adam_epsilon=1e-6"],
    "export.llama_cpp": ["export={llama_cpp: llama.cpp, format: gguf}"],
    "train.optim": ["train.optim=schedule_free_adamw", "train.lr_scheduler_type=constant_with_warmup"],
}


@pytest.mark.parametrize("key", UNREAD)
def test_a_setting_that_another_makes_meaningless_is_told(
    key: str, described: Callable[..., Draft], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "rows.txt").write_text("a line\n")
    (note,) = unread_settings(described(*UNREAD[key]))
    assert note.startswith(f"{key} (") and " is not read: " in note


def test_all_that_is_about_shares_is_told_where_there_is_one_training_set(
    described: Callable[..., Draft], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    given = ["data.train=[{path: rows.jsonl, weight: 2}]", "data.mixture={by: rows, temperature: 2, stop: first}"]
    notes = unread_settings(described(*given))
    told = [note.split(" (")[0] for note in notes]
    keys = ["data.mixture.by", "data.mixture.temperature", "data.mixture.stop", "data.train[0].weight"]
    assert sorted(told) == sorted(keys)
    assert sum(" is not read: " in note for note in notes) == 3, "the order of the rows is another by shares"


def test_a_clip_of_ratios_that_cannot_move_is_told(described: Callable[..., Draft]) -> None:
    (note,) = unread_settings(described("objective={name: rl, clip_high: 0.3}"))
    assert note.startswith("objective.clip_high (") and "rollout.updates" in note
    for more in ("rollout.updates=2", "rollout.passes=2", "rollout.engine=http://sampler:8000"):
        assert unread_settings(described("objective={name: rl, clip_high: 0.3}", more)) == []


def test_a_schedule_that_could_only_raise_the_rate_is_told(described: Callable[..., Draft]) -> None:
    greedy = ("train.lr_scheduler_type=greedy", "data.eval_split=2")
    (note,) = unread_settings(described(*greedy))
    assert "min_lr" in note
    assert unread_settings(described(*greedy, "train.lr_scheduler_kwargs={min_lr: 0}")) == []
    assert unread_settings(described(*greedy, "train.learning_rate=1e-2")) == []


def test_questions_that_end_elsewhere_than_before_the_answer_are_told(described: Callable[..., Draft]) -> None:
    asked = ("eval.generate_rows=2", "data.eval_split=2")
    (note,) = unread_settings(described(*asked, "data.train=[{path: preset:skills, train_on: all}]"))
    assert "train_on" in note
    (note,) = unread_settings(described(*asked, "template.targets=[{part: thinking, train: false}]"))
    assert "template.targets" in note
    assert unread_settings(described(*asked, "template.targets=[{turn: first, train: false}]")) == []
    assert unread_settings(described("data.eval_split=2", "template.train_on=all")) == [], "nothing is asked"


def test_a_run_that_ends_within_its_warm_up_is_told(described: Callable[..., Draft]) -> None:
    (note,) = unread_settings(described("train.max_steps=2", "train.warmup_steps=10"))
    assert note.startswith("train.warmup_steps (") and "train.max_steps (" in note and "at 20% of" in note
    assert unread_settings(described("train.max_steps=2", "train.warmup_steps=2")) == []
    assert unread_settings(described("train.max_steps=1", "train.warmup_steps=0.5")) == []


def test_a_falling_rate_beside_an_optimizer_that_needs_no_schedule_is_told(described: Callable[..., Draft]) -> None:
    for given in (["train.lr_scheduler_type=linear"], []):
        (note,) = unread_settings(described("train.optim=schedule_free_adamw", *given))
        assert note.startswith("train.lr_scheduler_type (") and "constant_with_warmup" in note


def test_a_token_that_is_there_already_is_told(described: Callable[..., Draft]) -> None:
    (note,) = check_run(described("model.add_special_tokens=['<|im_end|>', '<|brand_new|>']"))
    assert note.startswith("model.add_special_tokens (") and "<|im_end|> is a token already" in note


@pytest.mark.parametrize("key", READ)
def test_a_setting_that_is_read_is_not_told(key: str, described: Callable[..., Draft], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "rows.txt").write_text("a line\n")
    assert unread_settings(described(*READ[key])) == []


def test_faults_of_model_optimizer_and_schedule_are_told_together(described: Callable[..., Draft]) -> None:
    keys = ["adapter.target_modules", "train.optim_args", "train.lr_scheduler_kwargs"]
    given = dict.fromkeys(text for key in keys for text in WRONG[key])
    assert sorted(problem.key for problem in problems_of(lambda: check_run(described(*given)))) == sorted(keys)


def test_a_machine_without_a_gpu_refuses_what_needs_one(
    described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wishes = {
        "runtime.device": "cuda",
        "train.precision": "fp16",
        "model.attn_implementation": "flash_attention_2",
        "model.use_liger_kernel": "true",
    }
    for key, value in wishes.items():
        found = problems_of(lambda key=key, value=value: described(f"{key}={value}"))
        assert [problem.key for problem in found] == [key], found
    found = problems_of(lambda: described(*(f"{key}={value}" for key, value in wishes.items())))
    assert sorted(problem.key for problem in found) == sorted(wishes)


def test_a_gpu_that_lacks_what_is_asked_is_told(
    described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "is_available": True, "is_bf16_supported": False, "device_count": 1, "get_device_name": "An Old One",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = list(preflight._devices(described("train.precision=bf16", to_train=False)))
    assert [problem.key for problem in found] == ["train.precision", "runtime.device"]
    assert "An Old One" in found[0].what and "--nproc-per-node 1" in str(found[1].hint)


def test_a_folder_that_takes_no_file_is_told(described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", full)
    (problem,) = problems_of(described)
    assert problem.key == "output.dir" and "No space left" in problem.what


def test_a_model_that_sees_is_told_what_its_pictures_need(
    described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda module: module != "torchvision")
    (problem,) = problems_of(lambda: check_run(described("model.name_or_path=preset:tiny-qwen3-vl")))
    assert problem.key == "model.name_or_path" and "torchvision" in problem.what and "[media]" in str(problem.hint)


def test_a_length_beyond_the_models_positions_is_told(described: Callable[..., Draft]) -> None:
    (note,) = check_run(described("data.max_length=1000000"))
    assert "1,000,000" in note and "positions" in note
    found = problems_of(lambda: described("data.max_length=100000000"))
    assert [problem.key for problem in found] == ["data.max_length"]


@pytest.mark.parametrize(("kind", "limit"), [("longrope", "64"), ("dynamic", "63"), ("linear", None)])
def test_answers_that_would_stretch_the_positions_of_one_with_the_same_prompt_are_told(
    kind: str, limit: str | None, described: Callable[..., Draft]
) -> None:
    own = {
        "longrope": ", original_max_position_embeddings: 64, short_factor: [1.0], long_factor: [2.0]",
        "dynamic": ", factor: 4.0",
        "linear": ", factor: 4.0",
    }
    rope = f"{{rope_type: {kind}, rope_theta: 10000.0{own[kind]}}}"
    overrides = [f"model.config_overrides.rope_parameters={rope}", "model.config_overrides.max_position_embeddings=64"]

    def told(*more: str) -> list[str]:
        return [note for note in check_run(described(*overrides, *more)) if "stretches" in note]

    assert [f" {limit} tokens" in note for note in told("data.max_length=128", "objective=dpo")] == [True] * bool(limit)
    for more in (["data.max_length=60", "objective=dpo"], ["data.max_length=128"]):
        assert not told(*more)
    assert not told("data.max_length=128", "objective=dpo", "train.shared_prompts=false")


def test_a_folder_with_another_run_is_told_and_a_longer_run_is_not(described: Callable[..., Draft]) -> None:
    draft = described("train.max_steps=4")
    folder = draft.config.output.dir
    (folder / "checkpoint-4").mkdir(parents=True)
    (folder / RUN_CONFIG).write_text(json.dumps(draft.config.model_dump(mode="json")))
    assert check_run(draft) == []
    assert check_run(described("train.max_steps=8")) == []
    for other in ("train.max_steps=2", "train.learning_rate=1e-3"):
        found = problems_of(lambda other=other: check_run(described("train.max_steps=4", other)))
        assert [problem.key for problem in found] == ["output.dir"], other
    assert check_run(described("train.max_steps=2", "output.overwrite=true")) == []


HUGE = [
    "train.learning_rate=1e300", "train.learning_rate=1e-300", "train.num_train_epochs=1e300", "train.max_steps=1e30",
    "train.per_device_train_batch_size=1e9", "train.gradient_accumulation_steps=1e9", "train.weight_decay=1e300",
    "train.adam_epsilon=1e300", "train.max_grad_norm=1e300", "train.neftune_noise_alpha=1e300", "adapter.r=1e9",
    "adapter.lora_alpha=1e300", "data.max_length=100000000", "data.workers=1000000", "runtime.threads=1000000",
    "runtime.dataloader_num_workers=1000000", "eval.max_new_tokens=1e12", "objective.beta=1e300",
    "train.pad_to_multiple_of=1e12", "train.warmup_steps=1e300", "objective.z_loss=1e300", "media.fps=1e300",
]  # fmt: skip


@pytest.mark.parametrize("override", HUGE)
def test_a_number_beyond_all_sense_is_told_at_its_key(override: str, described: Callable[..., Draft]) -> None:
    key = override.partition("=")[0]
    found = problems_of(lambda: described(override, to_train=False))
    assert [problem.key for problem in found if problem.key == key], found
    assert all(problem.hint for problem in found)


PROCESSES = ("runtime.dataloader_num_workers", "runtime.threads", "data.workers")


@pytest.mark.parametrize("key", PROCESSES)
def test_more_processes_than_the_machine_can_run_are_told_by_every_command(
    key: str, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 loader processes on two cores take minutes to start, and a stop has to wait for them."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    (problem,) = problems_of(lambda: described(f"{key}=500", to_train=False))
    assert problem.key == key and "2 cores" in problem.what and problem.hint
    monkeypatch.setattr(machine, "usable_cores", lambda: 64)
    assert problems_of(lambda: described(f"{key}=500", to_train=False)) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # each rank has workers and threads of its own
    found = problems_of(lambda: described(f"{key}=500", to_train=False))
    assert [problem.key for problem in found] == ([] if key == "data.workers" else [key])
    assert problems_of(lambda: described(f"{key}=16", to_train=False)) == []


def started(folder: Path, *overrides: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """``luthier train`` in a process of its own; the exit code says by 10 more that torch was imported."""
    (folder / "run.yaml").write_text(GOOD)
    code = (
        f"import sys; {before}\nfrom luthier.__main__ import run\n"
        f"code = run(['train', 'run.yaml', *{list(overrides)!r}])\n"
        "sys.exit(code + 10 * ('torch' in sys.modules))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_a_mistake_in_the_description_is_told_without_torch(tmp_path: Path) -> None:
    done = started(tmp_path, "tracking.report_to=[neptune]", "train.optim=adamw_anyprecision", "train.max_steps=many")
    assert done.returncode == 2, done.stderr
    assert "pip install neptune" in done.stderr and "pip install git+" in done.stderr
    assert "train.max_steps" in done.stderr


def test_what_is_missing_is_told_where_torch_is_missing_too(tmp_path: Path) -> None:
    lacking = "from luthier.config import machine; machine.is_installed = lambda module: False"
    done = started(tmp_path, "tracking.report_to=[neptune]", "train.optim=grokadamw", before=lacking)
    assert done.returncode == 2, done.stderr
    assert "pip install neptune" in done.stderr and "pip install grokadamw" in done.stderr
    assert "training needs torch" in done.stderr


def test_what_the_machine_lacks_and_what_the_model_refuses_are_told_together(
    tmp_path: Path, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list, before a row is encoded: package, tracker, kernel, folder, optimizer, LoRA targets, experts."""
    encoded_nothing(monkeypatch)
    monkeypatch.setattr(machine, "is_installed", lambda module: module in machine.TRAINING)
    monkeypatch.setattr(machine, "gpu_is_absent", lambda: "this machine has none")
    (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "out" / RUN_CONFIG).write_text("{}")
    given = {
        "tracking.report_to[0]": "tracking.report_to=[neptune]",
        "train.head_kernel": "train.head_kernel=liger",
        "model.attn_implementation": "model.attn_implementation=flex_attention",
        "train.optim": "train.optim=grokadamw",
        "train.lr_scheduler_kwargs": "train.lr_scheduler_kwargs={no_such: 1}",
        "train.router_aux_loss_coef": "train.router_aux_loss_coef=0.1",
        "adapter.target_modules": "adapter={type: lora, target_modules: [q_prj]}",
        "output.dir": "output.dir=out",
        "media.cache": "media.cache=encoder_features",
    }
    draft = load_draft("run.yaml", list(given.values()), to_train=True)
    found = problems_of(lambda: check_run(draft))
    assert sorted(problem.key for problem in found) == sorted(given)
    assert all(problem.hint and problem.where.startswith(("run.yaml:", "override ")) for problem in found)


def test_a_coefficient_for_experts_is_refused_only_where_there_are_none(described: Callable[..., Draft]) -> None:
    for coefficient, refused in (("0.1", True), ("0", False), ("null", False)):
        found = problems_of(lambda given=f"train.router_aux_loss_coef={coefficient}": check_run(described(given)))
        assert [problem.key for problem in found] == ["train.router_aux_loss_coef"] * refused


def test_an_adapter_of_another_type_is_told_before_a_row_is_encoded(
    tmp_path: Path, described: Callable[..., Draft]
) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "adapter_config.json").write_text('{"peft_type": "OFT", "base_model_name_or_path": "x"}')
    found = problems_of(lambda: check_run(described("adapter={type: lora, name_or_path: before}")))
    assert [problem.key for problem in found] == ["adapter.name_or_path"]
    (tmp_path / "before" / "adapter_model.safetensors").write_bytes(b"no tensors")
    (problem,) = problems_of(lambda: check_run(described("adapter={type: oft, name_or_path: before}")))
    assert problem.key == "adapter.name_or_path" and "cannot be read" in problem.what


def test_a_reference_with_other_tokens_is_told_before_a_row_is_encoded(described: Callable[..., Draft]) -> None:
    pairs = ("data.train=preset:preferences#20", "objective=dpo")
    assert check_run(described(*pairs)) == []
    pissa = "adapter={type: lora, init_lora_weights: pissa}"
    found = problems_of(lambda: check_run(described(*pairs, pissa, "objective.reference=base")))
    assert [problem.key for problem in found] == ["objective.reference"]


def test_a_named_reference_with_other_tokens_is_told_before_a_row_is_encoded(
    tmp_path: Path, described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_nothing(monkeypatch)
    folder = tmp_path / "other"
    shutil.copytree(load_tokenizer("preset:tiny-qwen3").files.folder, folder)
    shutil.copy(model_folder("tiny-qwen3") / "config.json", folder)
    pairs = ["data.train=preset:preferences#20", f"objective={{name: dpo, reference: {{name_or_path: {folder}}}}}"]
    assert check_run(described(*pairs)) == []
    whole = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (problem,) = problems_of(lambda: check_run(described(*pairs)))
    assert problem.key == "objective.reference.name_or_path" and "2 of" in problem.what and problem.hint


def test_a_model_without_layers_to_compile_is_told_before_a_row_is_encoded(
    described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_nothing(monkeypatch)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")  # a compiler is there
    assert problems_of(lambda: check_run(described("train.torch_compile=true"))) == []
    monkeypatch.setattr("luthier.models.sharding.decoder_layers", lambda model: None)
    (problem,) = problems_of(lambda: check_run(described("train.torch_compile=true")))
    assert problem.key == "train.torch_compile" and problem.hint


class Unwritable(torch.Tensor):
    """A tensor of a library's own kind, as optimizers of 8 bits may keep."""


class KeepsItsOwnKind(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["exp_avg"] = torch.zeros(3).as_subclass(Unwritable)


def test_an_optimizer_whose_state_no_checkpoint_can_hold_is_told_before_a_row_is_encoded(
    described: Callable[..., Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(preflight._optimizer(described("train.optim=sgd"))) == []
    monkeypatch.setattr(preflight, "make_optimizer", lambda model, *_, **__: KeepsItsOwnKind(model.parameters(), 0.1))
    (problem,) = preflight._optimizer(described("train.optim=sgd"))
    assert problem.key == "train.optim" and "Unwritable" in problem.what and problem.hint
    for lifted in ("output.save_only_model=true", "output.save_strategy=no"):
        assert list(preflight._optimizer(described("train.optim=sgd", lifted))) == []


NO_USE = {
    "template.now": ["template.now=2026-01-01"],
    "media.max_pixels": ["media.max_pixels=1000"],
    "data.media_root": ["data.media_root=."],
    "media.long_audio": ["model=preset:tiny-qwen3-vl", "media.long_audio=split"],
    "media.sampling_rate": ["model=preset:tiny-qwen3-vl", "media.sampling_rate=8000"],
    "media.fps": ["model=preset:tiny-qwen2-audio", "media.fps=2"],
    "train.warmup_steps": ["train.lr_scheduler_type=constant", "train.warmup_steps=2"],
    "data.train[1]": ["data.train=[preset:skills#20, preset:skills#20]"],
    "train.offload": ["train.offload=[optimizer, activations]", "runtime.device=cpu"],
}


@pytest.mark.parametrize("key", NO_USE)
def test_what_the_model_or_the_data_make_meaningless_is_told(key: str, described: Callable[..., Draft]) -> None:
    (note,) = check_run(described(*NO_USE[key]))
    assert note.startswith(f"{key} (")
