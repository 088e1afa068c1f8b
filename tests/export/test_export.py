"""An exported folder is what was trained, or it is not there: every planted fault is found."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import luthier
from luthier import ExportCheck, ExportOptions, ExportProof
from luthier.__main__ import run as run_command
from luthier.check.golden import PARITY_FILE, Parity, file_faults, read_parity, write_parity
from luthier.encoding.tokenizer import AddedTokens, load_tokenizer
from luthier.errors import CheckpointError, ConfigError, ModelError, UserError
from luthier.export import model_folder, quantizing, taken_down
from luthier.export.proof import prove
from luthier.models import adapter_files
from luthier.models.adapter_files import quiet_peft
from luthier.prediction import open_run
from luthier.presets import model_folder as model_folder_of
from luthier.presets import tokenizer_folder
from luthier.training.folder import RunFiles
from luthier.training.folder.artifacts import LOADING, save_tokenizer
from tests.conftest import refused

WEIGHTS = "model.safetensors"


def description(folder: Path, adapter: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "preset:tiny-qwen3",
        "data": {"train": [{"path": "preset:skills", "first_rows": 40}], "max_drop": 0.5},
        "template": {"kwargs": {"enable_thinking": False}},
        "adapter": adapter,
        "train": {"max_steps": 4, "learning_rate": 0.01, "per_device_train_batch_size": 2, "precision": "fp32"},
        "output": {"dir": str(folder), "save_strategy": "no"},
        "tracking": {"progress": False},
        **more,
    }


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Any:
    """A proof of fewer rows than a user's, which finds the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NUM_ROWS", 12), ("NUM_CONTEXTS", 6), ("NUM_ANSWERS", 3), ("ANSWER_TOKENS", 6)):
            patch.setattr(taken_down, name, value)
        yield


@dataclass(frozen=True, kw_only=True)
class World:
    """An export that was just made, what was taken down for its proof, and the weights before training."""

    run: Path
    folder: Path
    base: Path
    given: dict[str, Any]

    @property
    def parity(self) -> Parity:
        return read_parity(self.folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    place = tmp_path_factory.mktemp("export")
    luthier.train(description(place / "run", {"type": "lora", "target_modules": ["q_proj", "down_proj"]}))
    given: dict[str, Any] = {}

    def listening(folder: Path, parity: Parity, **told: Any) -> ExportProof:
        given.update(told)
        return prove(folder, parity, **told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "prove", listening)
        done = luthier.export_run(place / "run", ExportOptions(to=place / "exported"))
    assert done.ok, done.proof
    return World(run=place / "run", folder=place / "exported", base=place / "run" / "base", given=given)


def change_json(path: Path, **values: Any) -> None:
    said = json.loads(path.read_text(encoding="utf-8"))
    said = {key: value for key, value in (said | values).items() if value is not None}
    path.write_text(json.dumps(said), encoding="utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    weights = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(change(weights), folder / WEIGHTS, metadata={"format": "pt"})


def stale_shard(folder: Path, world: World) -> None:
    change_weights(folder, lambda weights: {name: tensor * 1.01 for name, tensor in weights.items()})


def base_copied(folder: Path, world: World) -> None:
    shutil.copyfile(world.base / WEIGHTS, folder / WEIGHTS)


def half_merged(folder: Path, world: World) -> None:
    base = load_file(world.base / WEIGHTS)
    change_weights(folder, lambda weights: weights | {name: base[name] for name in base if ".layers.1." in name})


def merged_twice(folder: Path, world: World) -> None:
    base = load_file(world.base / WEIGHTS)
    change_weights(folder, lambda weights: {name: 2 * weights[name] - base[name] for name in weights})


def lost_argument(folder: Path, world: World) -> None:
    write_parity(msgspec.structs.replace(world.parity, template_kwargs={}), folder)


def other_end_token(folder: Path, world: World) -> None:
    change_json(folder / "generation_config.json", eos_token_id=5)


def missing_stop(folder: Path, world: World) -> None:
    change_json(folder / "generation_config.json", eos_token_id=None)


def edited_template(folder: Path, world: World) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")


def other_merges(folder: Path, world: World) -> None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said["model"]["merges"] = said["model"]["merges"][::-1]
    path.write_text(json.dumps(said), encoding="utf-8")


def other_vocabulary_order(folder: Path, world: World) -> None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    order = said["model"]["vocab"]
    last = max(order.values())
    said["model"]["vocab"] = {token: last - number for token, number in order.items()}
    path.write_text(json.dumps(said), encoding="utf-8")


def lost_control_token(folder: Path, world: World) -> None:
    """The tokens of a turn are ordinary text for whoever loads the tokenizer."""
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said["added_tokens"] = [token for token in said["added_tokens"] if token["content"] != "<|im_start|>"]
    path.write_text(json.dumps(said), encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    known = config.get("added_tokens_decoder", {})
    kept = {number: token for number, token in known.items() if token["content"] != "<|im_start|>"}
    change_json(folder / "tokenizer_config.json", added_tokens_decoder=kept or None, extra_special_tokens=None)


def lost_special_role(folder: Path, world: World) -> None:
    change_json(folder / "tokenizer_config.json", pad_token=None)


def wrong_special_id(folder: Path, world: World) -> None:
    said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    change_json(folder / "tokenizer_config.json", eos_token=said["pad_token"])


def overwritten_head(folder: Path, world: World) -> None:
    change_json(folder / "config.json", tie_word_embeddings=False)
    change_weights(folder, lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"].flip(0)})


def swapped_dtype(folder: Path, world: World) -> None:
    change_weights(folder, lambda weights: {name: tensor.bfloat16() for name, tensor in weights.items()})


def truncated_shard(folder: Path, world: World) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) * 3 // 4])


def lost_tensor(folder: Path, world: World) -> None:
    change_weights(folder, lambda weights: {name: weights[name] for name in weights if "layers.0.mlp" not in name})


def other_config(folder: Path, world: World) -> None:
    change_json(folder / "config.json", rms_norm_eps=0.1)


def template_of_another_program(folder: Path, world: World) -> None:
    change_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")


def template_of_an_old_processor(folder: Path, world: World) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}), encoding="utf-8")


def template_for_tools(folder: Path, world: World) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}", encoding="utf-8")


def fewer_layers(folder: Path, world: World) -> None:
    change_json(folder / "config.json", num_hidden_layers=1)


def quantization_of_nothing(folder: Path, world: World) -> None:
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    change_json(folder / "config.json", quantization_config=method)


def config_of_no_object(folder: Path, world: World) -> None:
    (folder / "config.json").write_text("[]", encoding="utf-8")


C = ExportCheck
NEW, LATER = {C.WEIGHTS, C.LOGPROBS}, {C.LOGPROBS}
FAULTS: dict[Callable[[Path, World], None], tuple[set[ExportCheck], set[ExportCheck]]] = {
    stale_shard: (NEW, LATER),
    base_copied: (NEW | {C.MERGED, C.DIFFERS}, LATER),
    half_merged: (NEW | {C.MERGED}, LATER),
    merged_twice: (NEW | {C.MERGED}, LATER),
    lost_argument: ({C.TOKENS}, {C.TOKENS}),
    other_end_token: ({C.STOPS}, {C.STOPS}),
    missing_stop: ({C.STOPS}, {C.STOPS}),
    edited_template: ({C.TEMPLATE}, {C.TEMPLATE}),
    other_merges: ({C.TOKENS}, {C.TOKENS}),
    other_vocabulary_order: ({C.TOKENS}, {C.TOKENS}),
    lost_control_token: ({C.TOKENS}, {C.TOKENS}),
    lost_special_role: ({C.SPECIAL_IDS}, {C.SPECIAL_IDS}),
    wrong_special_id: ({C.SPECIAL_IDS}, {C.SPECIAL_IDS}),
    overwritten_head: (NEW, LATER),
    swapped_dtype: ({C.DTYPE}, {C.DTYPE}),
    truncated_shard: ({C.DTYPE, C.LOADS}, {C.DTYPE, C.LOADS}),
    lost_tensor: ({C.LOADS}, {C.LOADS}),
    other_config: ({C.LOGPROBS}, LATER),
    template_of_another_program: ({C.TEMPLATE}, {C.TEMPLATE}),
    template_of_an_old_processor: ({C.TEMPLATE}, {C.TEMPLATE}),
    template_for_tools: ({C.TEMPLATE}, {C.TEMPLATE}),
    fewer_layers: ({C.LOADS}, {C.LOADS}),
    quantization_of_nothing: ({C.DTYPE}, {C.DTYPE}),
    config_of_no_object: ({C.DTYPE, C.TOKENS}, {C.DTYPE, C.TOKENS}),
}


def failed(proof: ExportProof) -> set[ExportCheck]:
    return {result.check for result in proof.results if not result.ok}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_every_planted_fault_is_found_before_the_folder_is_in_place_and_later(
    plant: Callable[[Path, World], None], world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(world.folder, folder)
    plant(folder, world)
    now, later = FAULTS[plant]
    found = prove(folder, read_parity(folder), **world.given)
    assert now <= failed(found), found
    assert all(finding.where and finding.what for result in found.results for finding in result.findings)
    assert bool(file_faults(read_parity(folder), folder)) == (plant is not lost_argument)
    write_parity(read_parity(folder), folder)  # whoever packs it anew lists files that are there
    packed_anew = luthier.check_export(folder)
    assert later <= failed(packed_anew) and C.FILES not in failed(packed_anew)


@pytest.mark.parametrize(
    "change",
    [{"contexts": [], "prompts": []}, {"bound": "coarse"}, {"template_now": "2020-01-01"}, {"notes": ["all is well"]}],
    ids=lambda change: next(iter(change)),
)
def test_golden_cases_that_were_changed_or_taken_away_are_found(
    change: dict[str, Any], world: World, tmp_path: Path
) -> None:
    shutil.copytree(world.folder, tmp_path / "edited")
    assert file_faults(read_parity(tmp_path / "edited"), tmp_path / "edited") == []
    change_json(tmp_path / "edited" / PARITY_FILE, **change)
    assert [name for name, _ in file_faults(read_parity(tmp_path / "edited"), tmp_path / "edited")] == [PARITY_FILE]


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "model.safetensors.index.json",
        "model-q8_0.gguf",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.model",
        "added_tokens.json",
        "preprocessor_config.json",
        "modeling_other.py",
        "custom_generate/generate.py",
        "onnx/model.onnx",
    ],
)
def test_a_file_that_a_program_may_load_beside_those_that_were_written_is_found(
    name: str, world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    shutil.copytree(world.folder, folder)
    for aside in ("notes.md", "LICENSE.txt", "loss.png", ".gitattributes", ".cache/huggingface/refs.json"):
        (folder / aside).parent.mkdir(parents=True, exist_ok=True)
        (folder / aside).write_text("of no program", encoding="utf-8")
    assert file_faults(read_parity(folder), folder) == []
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}", encoding="utf-8")
    ((found, _),) = file_faults(read_parity(folder), folder)
    assert found == name


def test_the_gguf_file_that_was_written_is_checked_and_not_another_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []

    def listening(file: Path, parity: Parity) -> ExportProof:
        checked.append(file)
        return ExportProof(results=())

    monkeypatch.setattr(model_folder.gguf, "prove_gguf", listening)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    write_parity(world.parity, tmp_path)
    assert luthier.check_export(tmp_path).ok
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert failed(luthier.check_export(tmp_path)) == {C.FILES}
    assert [path.name for path in checked] == ["b.gguf", "b.gguf"]


def test_a_folder_of_files_that_is_linked_into_an_export_is_found(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.folder, tmp_path / "exported")
    (tmp_path / "exported" / "additional_chat_templates").symlink_to(tmp_path)
    ((found, _),) = file_faults(world.parity, tmp_path / "exported")
    assert found == "additional_chat_templates"


def test_what_was_exported_holds_later_wherever_it_is_and_is_read_by_transformers_alone(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(world.folder, folder)
    assert luthier.check_export(folder).ok
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    parity = world.parity
    assert parity.template_kwargs == {"enable_thinking": False} and parity.bound == "exact"
    golden = parity.prompts[0]
    told = tokenizer.apply_chat_template(golden.messages, add_generation_prompt=True, enable_thinking=False)
    assert told["input_ids"] == golden.ids
    answer = next(context for context in parity.contexts if context.greedy_from is not None)
    start, length = answer.greedy_from or 0, len(answer.ids)
    out = model.generate(torch.tensor([answer.ids[:start]]), max_new_tokens=length - start, do_sample=False)
    assert out[0].tolist() == answer.ids
    assert (folder / "chat_template.jinja").read_bytes() == (world.run / "model" / "chat_template.jinja").read_bytes()
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "library_name: transformers" in card and '{"enable_thinking": false}' in card
    assert "lora adapter for" not in card and "with a lora adapter merged into it" in card


def test_a_type_of_16_bits_and_small_files_are_proven_by_their_own_bounds(world: World, tmp_path: Path) -> None:
    said = ["export.dtype=bfloat16", "export.max_shard_gb=0.001", f"export.dir={tmp_path / 'small'}"]
    done = luthier.export_run(world.run, overrides=said)
    assert done.ok and done.dtype == "bfloat16"
    parity = read_parity(tmp_path / "small")
    assert parity.bound == "cast" and sum("safetensors" in name for name in parity.files) > 2
    older = next(path for path in (tmp_path / "small").glob("*.safetensors") if path.stat().st_size > 300_000)
    whole, base = older.read_bytes(), load_file(world.base / WEIGHTS)
    names = load_file(older)
    save_file({name: base[name].bfloat16() for name in names}, older, metadata={"format": "pt"})
    assert failed(luthier.check_export(tmp_path / "small")) >= {C.FILES}, "a file of an older export, of its very size"
    older.write_bytes(whole)
    assert luthier.check_export(tmp_path / "small").ok
    shutil.copyfile(world.base / WEIGHTS, tmp_path / "small" / "model-99999-of-99999.safetensors")
    assert failed(luthier.check_export(tmp_path / "small")) >= {C.FILES}, "a stray file of weights"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_layers_are_proven_by_the_bounds_of_their_kind(kind: str, world: World, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    done = luthier.export_run(world.run, ExportOptions(to=folder), overrides=[f"export.quantize={kind}"])
    assert done.ok and done.proof is not None, done.proof
    assert [result.check for result in done.proof.results].count(C.LOGPROBS) == 2, "whole, and quantized"
    assert read_parity(folder).quantization == kind and not (folder / "model").exists()
    weights = load_file(folder / WEIGHTS)
    stored = {name: tensor for name, tensor in weights.items() if name.endswith("_weight_qdata")}
    assert len(stored) == 14 and {tensor.element_size() for tensor in stored.values()} == {1}
    assert weights["model.embed_tokens.weight"].dtype == torch.float32
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter, "it stays in 8 bits"
    assert luthier.check_export(folder).ok
    if kind == "int8":
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            metadata = file.metadata()
        save_file({name: t * (3 if name.endswith("_scale") else 1) for name, t in weights.items()}, folder / WEIGHTS,
                  metadata=metadata)  # fmt: skip
        assert failed(luthier.check_export(folder)) >= {C.FILES, C.LOGPROBS}
        change_json(folder / "config.json", quantization_config=None)
        assert failed(luthier.check_export(folder)) >= {C.FILES, C.DTYPE}


ANOTHER_PYTHON = """#!{python}
import json, runpy, sys, types
from pathlib import Path
if sys.argv[2] == "-c":
    sys.exit(print("0.0"))
import torch
from safetensors.torch import save_file

def oneshot(model, recipe, dataset=None, **told):
    (rounded,) = recipe
    assert (rounded.scheme, rounded.targets) == ("W8A8", "Linear") and len(dataset) == told["num_calibration_samples"]
    def save_pretrained(target, **told):
        assert told["save_compressed"]
        state = {{name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}}
        for name, layer in list(model.named_modules()):
            if isinstance(layer, torch.nn.Linear) and name not in rounded.ignore:
                scale = layer.weight.abs().amax(1, keepdim=True) / 127
                state[name + ".weight"] = (layer.weight / scale).round().to(torch.int8)
                state[name + ".weight_scale"] = scale
        Path(target).mkdir()
        save_file(state, Path(target) / "model.safetensors", metadata={{"format": "pt"}})
        ints = {{"num_bits": 8, "type": "int", "symmetric": True}}
        group = {{"targets": ["Linear"], "weights": {{**ints, "strategy": "channel"}},
                 "input_activations": {{**ints, "strategy": "token", "dynamic": True}}}}
        how = {{"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
               "config_groups": {{"group_0": group}}, "ignore": rounded.ignore}}
        (Path(target) / "config.json").write_text(json.dumps({{"quantization_config": how}}))
    model.save_pretrained = save_pretrained

modifiers = types.ModuleType("llmcompressor.modifiers.quantization")
modifiers.GPTQModifier = modifiers.QuantizationModifier = lambda **told: types.SimpleNamespace(**told)
package = types.ModuleType("llmcompressor")
package.oneshot = oneshot
sys.modules |= {{"llmcompressor": package, "llmcompressor.modifiers": types.ModuleType("llmcompressor.modifiers"),
                "llmcompressor.modifiers.quantization": modifiers}}
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def another_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with a stand-in for llmcompressor, which rounds each weight to 8 bits; the program that it runs is the
    product's own."""
    program = tmp_path_factory.mktemp("another") / "python"
    program.write_text(ANOTHER_PYTHON.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    return program


def test_what_another_environment_quantizes_is_proven_as_it_answers_when_it_is_served(
    world: World, tmp_path: Path, another_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its activations are rounded as well. Calibration sees other contexts than the proof, in the ids of training."""
    given: list[list[list[int]]] = []

    def listening(*args: Any, calibration: list[list[int]], **told: Any) -> str:
        given.append(calibration)
        return quantizing.quantize_folder(*args, calibration=calibration, **told)

    monkeypatch.setattr(model_folder, "quantize_folder", listening)
    folder = tmp_path / "small"
    said = ["export.quantize=w8a8", f"export.llmcompressor={another_python}", "export.calibration_rows=8"]
    done = luthier.export_run(world.run, ExportOptions(to=folder), overrides=said)
    assert done.ok and done.proof is not None, done.proof
    assert any("w8a8, by llmcompressor, calibrated on 8 contexts" in note for note in done.notes)
    parity = read_parity(folder)
    assert parity.quantization == "w8a8" and parity.bound == "8 bits"
    (calibrated,) = given
    assert not {tuple(one.ids) for one in parity.contexts} & set(map(tuple, calibrated))
    assert all("<|im_start|>" in luthier.load_tokenizer(folder).decode(ids) for ids in calibrated)
    loaded = open_run(folder).load().model
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    layer: Any = loaded.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer.quantization_scheme.input_activations.dynamic, "it answers as others serve it"
    assert luthier.check_export(folder).ok
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    weights = {name: t * (1.5 if name.endswith("_scale") else 1) for name, t in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata=metadata)
    assert failed(luthier.check_export(folder)) >= {C.FILES, C.LOGPROBS}


@pytest.mark.parametrize("kind", ["w8a8", "fp8_dynamic", "w4a16"])
def test_a_real_llmcompressor_quantizes_a_run(kind: str, world: World, tmp_path: Path) -> None:
    """``LUTHIER_LLMCOMPRESSOR`` is the Python of an environment that has it: it needs other versions of torch."""
    if (python := os.environ.get("LUTHIER_LLMCOMPRESSOR")) is None:
        pytest.skip("no llmcompressor: LUTHIER_LLMCOMPRESSOR names the Python of an environment that has it")
    said = [f"export.quantize={kind}", f"export.llmcompressor={python}", "export.calibration_rows=16"]
    done = luthier.export_run(world.run, ExportOptions(to=tmp_path / "small"), overrides=said)
    assert done.proof is not None
    print(kind, *(f"{result.check}: {result.told}" for result in done.proof.results), *done.notes, sep="\n")
    # after four steps all tokens are nearly equally likely: coarse weights may lose too much, which is told
    assert done.ok or (kind != "w8a8" and failed(done.proof) <= {C.LOGPROBS, C.ANSWERS}), done.proof
    assert not done.ok or luthier.check_export(tmp_path / "small").ok


def test_a_python_without_llmcompressor_is_refused_before_anything_is_loaded(world: World, tmp_path: Path) -> None:
    said = ["export.quantize=w4a16"]
    with refused(ConfigError, "w4a16", "llmcompressor"):
        luthier.export_run(world.run, ExportOptions(to=tmp_path / "x"), overrides=said)
    for python in (sys.executable, str(tmp_path / "none")):
        with refused(UserError, "export.llmcompressor", python):
            luthier.export_run(
                world.run, ExportOptions(to=tmp_path / "x"), overrides=[*said, f"export.llmcompressor={python}"]
            )
    assert not (tmp_path / "x").exists()


def test_quantized_weights_are_of_folders_alone_and_need_their_package(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(ConfigError, "int8", "q8_0"):
        luthier.export_run(world.run, overrides=["export.format=gguf", "export.quantize=int8"])
    monkeypatch.setattr(quantizing.importlib.util, "find_spec", lambda name: None)
    with refused(UserError, "torchao"):
        luthier.export_run(world.run, ExportOptions(to=tmp_path / "x"), overrides=["export.quantize=int8"])


def test_an_export_that_is_not_what_was_trained_is_not_put_in_place(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says so by its exit code, and what was in the folder before is there still."""
    monkeypatch.setattr(model_folder, "merge_adapter", lambda model, dtype: model.unload())
    target = tmp_path / "exported"
    assert run_command(["export", str(world.run), "--to", str(target), "--json", str(tmp_path / "told.json")]) == 3
    told = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    assert told["folder"] is None and not told["proof"]["checks"]["merged"]["ok"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["told.json"]
    target.mkdir()
    (target / "older").write_text("mine", encoding="utf-8")
    assert run_command(["export", str(world.run), "--to", str(target), "--overwrite"]) == 3
    assert [path.name for path in target.iterdir()] == ["older"]


class Failing(RunFiles):
    """A disk that fails at its n-th operation."""

    def __init__(self, at: int) -> None:
        self.left = at

    def before(self, operation: str, path: Path) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "planted")


def test_wherever_the_disk_fails_all_or_nothing_is_there(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from luthier.training.folder import checkpoint

    target, reached = tmp_path / "exported", 0
    target.mkdir()
    (target / "older").write_text("mine", encoding="utf-8")
    for at in range(1, 40):
        monkeypatch.setattr(checkpoint, "FILES", files := Failing(at))
        try:
            luthier.export_run(world.run, ExportOptions(to=target, proof=False, overwrite=True))
        except CheckpointError:
            reached += 1
            names = {path.name for path in target.iterdir()}
            assert names == {"older"} or PARITY_FILE in names
        if files.left > 0:
            break
    assert reached >= 10
    assert luthier.check_export(target).ok


class Looking(RunFiles):
    """Looks at the disk before each operation, as a process that is killed there would leave it."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.look = look

    def before(self, operation: str, path: Path) -> None:
        self.look()


def test_a_process_killed_at_any_of_50_operations_leaves_the_old_folder_or_the_new_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process that is killed has written stays, and nothing is tidied up: that is the disk at that moment."""
    from luthier.training.folder import checkpoint

    target = tmp_path / "exported"
    target.mkdir()
    (target / "older").write_text("mine", encoding="utf-8")
    seen: list[tuple[str, ...] | None] = []
    between = tmp_path.parent / f"{tmp_path.name}-between"
    copying: list[bool] = []

    def look() -> None:
        if copying:
            return
        if target.is_dir():
            seen.append(tuple(sorted(path.name for path in target.iterdir())))
            return
        seen.append(None)  # between two renames; the next export puts the older one back
        if not between.exists():
            copying.append(True)
            shutil.copytree(tmp_path, between)
            copying.clear()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            look()
            return function(*args, **named)

        return called

    monkeypatch.setattr(checkpoint, "FILES", Looking(look))
    for name in ("open", "mkdir", "replace", "rename", "unlink", "rmdir", "chmod"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr(io, "open", watched(io.open))
    luthier.export_run(world.run, ExportOptions(to=target, proof=False, overwrite=True))
    monkeypatch.undo()
    new = tuple(sorted(path.name for path in target.iterdir()))
    assert len(seen) >= 50 and {kind for kind in seen if kind is not None} == {("older",), new}
    assert seen == sorted(seen, key=[("older",), None, new].index) and None in seen
    assert luthier.check_export(target).ok

    def failing(*_: object) -> None:
        raise CheckpointError("planted")

    monkeypatch.setattr(model_folder, "_write", failing)
    with pytest.raises(CheckpointError):
        luthier.export_run(world.run, ExportOptions(to=between / "exported", proof=False, overwrite=True))
    assert [path.name for path in between.iterdir()] == ["exported"]
    assert [path.name for path in (between / "exported").iterdir()] == ["older"]


def test_a_folder_that_is_there_is_not_written_over_unasked(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    needed = (world.run, world.run.parent, world.run / "model", world.base, world.base.parent)
    for target in (tmp_path, tmp_path / "mine", *needed, None):
        with pytest.raises(UserError):
            luthier.export_run(world.run, ExportOptions(to=target, overwrite=target in needed))
    with pytest.raises(UserError):
        luthier.check_export(tmp_path)


def test_all_weights_of_a_run_are_proven_without_an_adapter(tmp_path: Path) -> None:
    luthier.train(description(tmp_path / "run", {"type": "full"}))
    done = luthier.export_run(
        tmp_path / "run", ExportOptions(to=tmp_path / "exported"), overrides=["export.dtype=float16"]
    )
    assert done.ok and done.proof is not None
    assert C.WEIGHTS in {result.check for result in done.proof.results}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True` as embedding layers found:UserWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("targets", "added"), [
    (["q_proj"], ["<|zap|>"]), (["q_proj", "lm_head"], []), (["embed_tokens"], []), (["embed_tokens", "lm_head"], []),
    (["lm_head"], ["<|zap|>"]),
])  # fmt: skip
def test_adapters_on_the_embedding_and_the_output_layer_are_merged_into_each_alone(
    targets: list[str], added: list[str], tied: bool, tmp_path: Path
) -> None:
    """Where both have one weight, each gets one of its own, if an adapter is on one of them."""
    model = {"name_or_path": "preset:tiny-qwen3", "config_overrides": {"tie_word_embeddings": tied}}
    adapter = {"type": "lora", "target_modules": targets, "r": 4}
    luthier.train(description(tmp_path / "run", adapter, model={**model, "add_special_tokens": added}))
    done = luthier.export_run(tmp_path / "run", ExportOptions(to=tmp_path / "exported"))
    assert done.ok, done.proof
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base")
    base.resize_token_embeddings(exported.get_input_embeddings().num_embeddings, mean_resizing=False)
    with quiet_peft():
        trained = PeftModel.from_pretrained(base, tmp_path / "run" / "model").eval()
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, trained(ids).logits, atol=1e-4, rtol=1e-4)


def test_what_a_run_merges_at_its_end_is_proven_like_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = description(tmp_path / "run", {"type": "lora", "merge": True})
    told: list[object] = []
    result = luthier.train(described, on_event=told.append)
    assert result.merged_dir == "merged"
    assert any(isinstance(event, luthier.Remark) and "merged/ is proven" in event.text for event in told)
    assert luthier.check_export(tmp_path / "run" / "merged").ok
    assert "with a lora adapter merged into it" in (tmp_path / "run" / "merged" / "README.md").read_text("utf-8")
    monkeypatch.setattr("luthier.models.adapter_files.merge_adapter", lambda model: model.unload())
    broken = {**described, "output": {**described["output"], "dir": str(tmp_path / "broken")}}
    with pytest.raises(ModelError, match="merged"):
        luthier.train(broken)
    left = {path.name for path in (tmp_path / "broken").iterdir()}
    assert {"model", "merged.broken", "report.html"} <= left and "merged" not in left


def test_a_base_that_the_adapter_does_not_name_is_told_and_a_whole_model_is_loaded_as_it_is(
    world: World, tmp_path: Path
) -> None:
    base = shutil.copytree(world.base, tmp_path / "another")
    adapter = Path(shutil.copytree(world.run / "model", tmp_path / "adapter"))
    (adapter / "README.md").write_text(f"# It\n\n{LOADING}\n\n```python\n```\n\n## Data\n\nrows\n")

    def exported(model: Path) -> tuple[luthier.Exported, Path]:
        described = {"model": str(model), "data": {"eval": "preset:skills"}, "train": {"enabled": False}}
        path = tmp_path / "described.json"
        path.write_text(json.dumps({**described, "adapter": {"type": "lora", "name_or_path": str(adapter)}}))
        options = ExportOptions(to=tmp_path / "to", overwrite=True, proof=False)
        return luthier.export_run(path, options), tmp_path / "to" / "README.md"

    done, card = exported(base)
    assert any("names" in note and str(world.base) in note for note in done.notes)
    assert "## Data" in card.read_text() and LOADING not in card.read_text()
    assert not any("names" in note for note in exported(world.base)[0].notes)


def test_a_merge_file_of_llama_factory_is_exported_as_it_is(world: World, tmp_path: Path) -> None:
    lines = [f"model_name_or_path: {world.base}", f"adapter_name_or_path: {world.run / 'model'}", "template: qwen3"]
    lines += [
        f"export_dir: {tmp_path / 'theirs'}",
        "export_size: 5",
        "export_device: cpu",
        "export_legacy_format: false",
    ]
    (tmp_path / "theirs.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert run_command(["export", str(tmp_path / "theirs.yaml"), "--json", str(tmp_path / "told.json")]) == 0
    told = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    assert told["proof"]["checks"]["merged"]["ok"] and "preset:skills" in " ".join(told["notes"])
    theirs, ours = load_file(tmp_path / "theirs" / WEIGHTS), load_file(world.folder / WEIGHTS)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_weights_of_16_bits_are_summed_in_float32_where_that_is_what_is_exported() -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder_of("tiny-llama"))
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with quiet_peft():
        model = get_peft_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), settings)
    wanted = {name: weight.detach().float() for name, weight in model.get_base_model().state_dict().items()}
    merged = adapter_files.merge_adapter(copy.deepcopy(model), torch.float32)
    for name, layer in adapter_files.linear_layers(model):
        delta = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
        plain = name.removeprefix("base_model.model.")
        wanted[f"{plain}.weight"] = wanted.pop(f"{plain}.base_layer.weight") + delta * layer.scaling["default"]
    found = merged.state_dict()
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items() if "lora" not in name)


MERGING = """
import gc, sys, threading, torch
from pathlib import Path
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from luthier.models import adapter_files

def resident():
    told = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return int(told.split()[0]) * 1024

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
size = sum(weight.nbytes for weight in model.parameters())
with torch.no_grad():
    model(torch.arange(8)[None])  # all of the file is in memory now
before, peak, ended = resident(), 0, threading.Event()

def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, resident())

watching = threading.Thread(target=watch)
watching.start()
merged = adapter_files.merge_adapter(model)
ended.set()
watching.join()
del model
gc.collect()
print((peak - before) / size, (resident() - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc")
def test_weights_are_merged_one_by_one_and_not_held_beside_those_of_the_file(tmp_path: Path) -> None:
    """150 MB of weights in a mapped file, 4 MB each: their merged ones take the place of what was read of the file."""
    config = AutoConfig.from_pretrained(
        model_folder_of("tiny-llama"), hidden_size=1024, intermediate_size=2048, num_hidden_layers=8
    )
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 8, 128
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", MERGING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, after = map(float, done.stdout.split())
    assert peak < 0.4 and after < 0.2, f"{peak:.2f} of the weights' size more than before, then {after:.2f}"


LEAVING = """
import re, sys, threading, time, torch
from pathlib import Path
from safetensors.torch import load_file
from luthier.models.quantized import leave_files, leaving_files

def resident():
    return int(re.search(r"RssFile:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

weights = load_file(sys.argv[1])
before = resident()
sums = [int(weight.sum()) for weight in weights.values()]
read = resident() - before
leave_files()
left = resident() - before
assert sums == [int(weight.sum()) for weight in weights.values()], "they are read again"
with leaving_files(every=0.01):
    end = time.monotonic() + 60
    while resident() - before > 5 and time.monotonic() < end:
        time.sleep(0.01)
assert "leave-files" not in {thread.name for thread in threading.enumerate()}
print(read, left, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no mapped files")
def test_files_of_weights_that_were_quantized_as_they_were_read_leave_memory(tmp_path: Path) -> None:
    save_file({name: torch.ones(20_000_000, dtype=torch.int8) for name in "ab"}, tmp_path / WEIGHTS)
    command = [sys.executable, "-c", LEAVING, str(tmp_path / WEIGHTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read, *left = map(float, done.stdout.split())
    assert read > 35 and max(left) < 5, f"of 38 MB {read:.0f} were resident, then {left}"


@pytest.mark.parametrize("grown", [False, True], ids=["as it is", "with tokens added"])
@pytest.mark.parametrize("several", [False, True], ids=["one template", "several"])
def test_a_folder_has_no_other_chat_template_than_the_one_of_the_run(
    several: bool, grown: bool, tmp_path: Path
) -> None:
    """Programs differ in which of two templates they use, and use another one beside tools, where there is one."""
    source, theirs = tmp_path / "source", "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    shutil.copytree(tokenizer_folder("tiny-qwen3"), source)
    named = [{"name": "default", "template": theirs}, {"name": "tool_use", "template": theirs}]
    (source / "chat_template.jinja").unlink(missing_ok=True)
    change_json(source / "tokenizer_config.json", chat_template=named if several else theirs)
    added = AddedTokens(ordinary=("<new>",)) if grown else None
    tokenizer = load_tokenizer(source, chat_template="chatml", added=added)
    save_tokenizer(tokenizer, tmp_path / "saved")
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.get_chat_template(tools=[{"type": "function"}]) == tokenizer.files.chat_template
    assert "chat_template" not in json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text("utf-8"))
    if not grown and not several:
        save_tokenizer(load_tokenizer(source), tmp_path / "own")
        written, wanted = (folder / "tokenizer_config.json" for folder in (tmp_path / "own", source))
        assert written.read_bytes() == wanted.read_bytes(), "the template of the run itself stays where it was"


def test_settings_of_the_base_that_change_answers_are_told_and_ids_that_are_none_end_none(tmp_path: Path) -> None:
    base = Path(shutil.copytree(model_folder_of("tiny-qwen3"), tmp_path / "base"))
    shutil.copytree(tokenizer_folder("tiny-qwen3"), base, dirs_exist_ok=True)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(base)
    stops = json.loads((base / "generation_config.json").read_text()).get("eos_token_id")
    named = stops if isinstance(stops, list) else [stops]
    settings = {"eos_token_id": [-1, *named], "suppress_tokens": [30], "temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(settings))
    luthier.train(description(tmp_path / "run", {"type": "full"}, model=str(base)))
    exported = luthier.export_run(tmp_path / "run", ExportOptions(to=tmp_path / "exported"))
    assert exported.proof is not None and exported.proof.ok
    [told] = [note for note in exported.notes if "suppress_tokens" in note]
    assert "temperature" not in told
    written = json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"]
    assert -1 not in (written if isinstance(written, list) else [written])


def test_the_system_message_that_training_gave_is_told_and_in_the_golden_prompts(world: World, tmp_path: Path) -> None:
    """It is no part of the template: whoever uses the folder has to send it."""
    described = {"model": str(world.base), "data": {"eval": "preset:skills"}, "train": {"enabled": False}}
    path, folder, system = tmp_path / "described.json", tmp_path / "exported", "Talk like a pirate."
    path.write_text(json.dumps({**described, "template": {"default_system": system}}))
    done = luthier.export_run(path, ExportOptions(to=folder))
    assert done.ok and any(system in note for note in done.notes)
    assert system in (folder / "README.md").read_text(encoding="utf-8")
    prompts, tokenizer = read_parity(folder).prompts, AutoTokenizer.from_pretrained(folder)
    assert prompts and luthier.check_export(folder).ok
    told = [golden.messages[0] for golden in prompts]
    assert {"role": "system", "content": system} in told and {message["role"] for message in told} == {"system"}
    for golden in prompts:
        asked = {"tools": golden.tools or None, "add_generation_prompt": True}
        assert tokenizer.apply_chat_template(golden.messages, **asked)["input_ids"] == golden.ids
