"""Adapters whose first values are computed: what is saved, resumed and refused beside the plainest case."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_quantized import write_base
from tiny_rows import epoch_steps, run_data
from tiny_runs import make_data, make_segments, padded_batch
from transformers import GPT2Config, GPT2LMHeadModel

import luthier
from luthier.config.choices import AdapterType, QuantizationType
from luthier.config.inputs import QuantizationConfig
from luthier.config.schema import AdapterConfig
from luthier.encoding.tokenizer import Tokenizer, load_tokenizer
from luthier.errors import ModelError
from luthier.models import adapters
from luthier.models.quantized import layers_to_quantize
from luthier.training import fit as fit_module
from luthier.training.fit import fit_data
from luthier.training.report import RunResult
from tests.media.media_files import image_file, picture

Train = Callable[..., RunResult]
DATA = make_data(make_segments(8))
IDS = padded_batch(make_segments(4))["input_ids"]
SHORT: dict[str, Any] = {"train__learning_rate": 1e-2, "train__per_device_train_batch_size": 8, "train__max_steps": 4}
UNTIED: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
                          "tie_word_embeddings": False}  # fmt: skip
Look = Callable[[], torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), tokenizer)


@pytest.fixture
def trained_logits(monkeypatch: pytest.MonkeyPatch) -> Look:
    """What the model that was trained makes of `IDS`, looked at just before it is saved."""
    found: list[torch.Tensor] = []
    real = fit_module._save

    def look(run: Any) -> None:
        with torch.no_grad():
            found.append(run.setup.run_model.model.eval()(input_ids=IDS).logits)
        real(run)

    monkeypatch.setattr(fit_module, "_save", look)
    return lambda: found[-1]


@pytest.mark.parametrize("start", ["pissa", "olora", "corda", "lora_ga"])
@pytest.mark.parametrize(
    "more",
    [
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"use_dora": True},
        {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 3}},
    ],
    ids=["saved whole", "embedding", "output layer", "dora", "rslora by pattern"],
)
def test_all_that_is_trained_beside_a_part_of_the_base_is_in_the_saved_adapter(
    start: str, more: dict[str, Any], train: Train, tmp_path: Path, trained_logits: Look
) -> None:
    model = {"name_or_path": "preset:tiny-qwen3", "config_overrides": UNTIED}
    train(DATA, model=model, adapter={"type": "lora", "r": 4, "init_lora_weights": start, **more}, **SHORT)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=IDS).logits, trained_logits(), rtol=1e-4, atol=1e-5)


def test_a_reward_model_keeps_the_head_that_it_has_learned_beside_a_part_of_the_base(
    base: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    adapter = {"type": "lora", "r": 4, "init_lora_weights": "pissa"}
    config = epoch_steps(tmp_path / "run", {"name": "rm"}, rows=4, model={"name_or_path": str(base)}, adapter=adapter)
    fit_data(config, tokenizer, run_data(tmp_path / "store", config, rows=range(4)))
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert any(name.endswith("score.weight") for name in saved)


@pytest.mark.parametrize("start", ["pissa", "corda"])
def test_no_part_is_taken_out_of_a_weight_that_the_model_uses_twice(start: str, train: Train) -> None:
    adapter = {"type": "lora", "r": 4, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": start}
    with pytest.raises(ModelError, match="as its embedding") as refused:
        train(DATA, adapter=adapter)
    assert "lm_head" in str(refused.value.hint)
    train(DATA, folder="plain", adapter={**adapter, "init_lora_weights": True}, train__max_steps=1)


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=96))


def test_layers_of_gpt_2s_kind_begin_only_as_they_can() -> None:
    for start, refused in (("olora", True), ("corda", True), ("lora_ga", True), ("pissa", False), ("eva", False)):
        section = AdapterConfig(type=AdapterType.LORA, r=4, target_modules=["c_proj"], init_lora_weights=start)
        if refused:
            with pytest.raises(ModelError, match="Conv1D"):
                adapters.apply_adapter(_gpt2(), section)
        else:
            adapters.apply_adapter(_gpt2(), section)


@pytest.mark.parametrize("kind", [QuantizationType.TORCHAO_INT8, QuantizationType.TORCHAO_FP8])
def test_torchao_quantizes_no_layers_of_gpt_2s_kind(kind: QuantizationType) -> None:
    with pytest.raises(ModelError, match="no linear layer of a class"):
        layers_to_quantize(_gpt2(), QuantizationConfig(type=kind))
    assert len(layers_to_quantize(_gpt2(), QuantizationConfig(type=QuantizationType.NF4))) == 4


def test_eva_gives_each_layer_the_rank_of_its_pattern_and_goes_on_from_it(train: Train, tmp_path: Path) -> None:
    ranks = {"q_proj": 8, "o_proj": 2}
    keys = {"adapter": {"type": "lora", "r": 4, "init_lora_weights": "eva", "rank_pattern": ranks}, **SHORT}
    saving = {"output__save_strategy": "steps", "output__save_steps": 2}
    whole = train(DATA, **keys, **saving)
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    for name, matrix in saved.items():
        layer = name.split(".")[-3]
        assert ranks.get(layer, 4) == (matrix.shape[0] if "lora_A" in name else matrix.shape[1]), name
        if "lora_A" in name:  # directions are orthogonal, of length 1
            torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)), rtol=0, atol=0.3)
    (tmp_path / "run" / "checkpoint-4" / "manifest.json").unlink()
    again = train(DATA, **keys, **saving)
    assert again.resumed_from == "checkpoint-2"
    assert [step.loss for step in again.steps] == [step.loss for step in whole.steps]


# ---------------------------------------------------------------------------------------------------------- LoftQ


def _loftq(base: Path, kind: str = "nf4", **more: Any) -> dict[str, Any]:
    adapter = {"type": "lora", "r": 4, "init_lora_weights": "loftq", **more}
    return {"model": {"name_or_path": str(base), "quantization": kind}, "adapter": adapter, **SHORT}


def test_a_layer_that_keeps_its_bits_begins_as_any_lora_does_and_learns(
    base: Path, train: Train, tmp_path: Path
) -> None:
    train(DATA, **_loftq(base, target_modules=["q_proj", "lm_head"]))
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert all(float(matrix.abs().max()) > 0 for matrix in saved.values()), "two matrices of 0 have no gradient"
    with pytest.raises(ModelError, match="none of the layers that are adapted is quantized"):
        train(DATA, folder="none", **_loftq(base, target_modules=["lm_head"]))


def _written(folder: Path, model: Any, tokenizer: Tokenizer) -> Path:
    model.save_pretrained(folder)
    for file in tokenizer.files.folder.iterdir():
        if file.name != "config.json" and file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_loftq_turns_layers_of_gpt_2s_kind_the_right_way(train: Train, tmp_path: Path, tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    shape = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=2048, initializer_range=0.1)
    folder = _written(tmp_path / "gpt2", GPT2LMHeadModel(shape), tokenizer)
    # c_attn is not square, attn.c_proj is
    found = train(DATA, **{**_loftq(folder, r=16, target_modules=["all-linear"]), "train__learning_rate": 1e-30})
    plain = train(
        DATA, folder="plain",
        **{**_loftq(folder, r=16, init_lora_weights=True), "train__learning_rate": 1e-30},
    )  # fmt: skip
    whole = train(
        DATA, folder="whole", model={"name_or_path": str(folder)}, adapter={"type": "lora"},
        **{**SHORT, "train__learning_rate": 1e-30},
    )  # fmt: skip
    exact, rounded, begun = (each.steps[0].loss for each in (whole, plain, found))
    assert abs(begun - exact) < abs(rounded - exact)


def test_loftq_leaves_experts_as_any_lora_begins(train: Train, tmp_path: Path, tokenizer: Tokenizer) -> None:
    model: Any = tiny_model("qwen3_moe")
    model.resize_token_embeddings(load_tokenizer("preset:tiny-qwen3").vocab_size)
    folder = _written(tmp_path / "moe", model, tokenizer)
    result = train(DATA, **_loftq(folder))
    assert result.steps[-1].loss < result.steps[0].loss
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert any("experts" in name for name in saved)
    assert json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())["init_lora_weights"] is True


# ------------------------------------------------------------------------------------------------ models that see


@pytest.mark.parametrize("order", ["pictures late", "no pictures"])
def test_eva_begins_layers_by_the_rows_that_call_them_and_says_which_none_does(order: str, tmp_path: Path) -> None:
    for n in range(8):
        (tmp_path / f"{n}.png").write_bytes(image_file(picture(64, 64).rotate(40 * n)))
    texts = [{"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} it is"}]}
             for n in range(8)]  # fmt: skip
    seen = [{"messages": [{"role": "user", "content": f"<image>what is {n}?"}, {"role": "assistant", "content": "red"}],
             "images": [f"{n}.png"]} for n in range(8)]  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in (texts + texts[:2] + seen[:6] if order == "pictures late" else texts))
    )
    parts = ["language_model", "projector", "tower"]
    config = {
        "model": {"name_or_path": "preset:tiny-qwen3-vl", "add_special_tokens": ["<new>"]},
        "data": {"train": str(rows), "max_length": 128, "store": str(tmp_path / "store"), "workers": 0},
        "train": {"max_steps": 1, "per_device_train_batch_size": 8},
        "adapter": {"type": "lora", "r": 2, "init_lora_weights": "eva", "train_parts": parts},
        "output": {"dir": str(tmp_path / "run"), "save_strategy": "no"},
        "runtime": {"device": "cpu"},
        "tracking": {"progress": False},
    }
    told: list[str] = []
    luthier.train(config, on_event=lambda event: told.append(str(event)))
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    directions = [matrix for name, matrix in saved.items() if "visual" in name and "lora_A" in name]
    apart = [torch.allclose(each @ each.T, torch.eye(2), atol=0.1) for each in directions]
    assert all(apart) if order == "pictures late" else not any(apart)
    assert any("do not call" in line and "visual.blocks.N.attn.qkv" in line for line in told) == (
        order != "pictures late"
    )
    assert not any("token_adapter" in line for line in told), "rows of new tokens are no layer without an adapter"
