"""A quantized reference takes less memory and gives nearly the same; what must stay exact does."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_rows import epoch_steps, run_data
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from luthier.config.objective import Quantization
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models.quantized import BLOCK, Int8Linear, NF4Linear, quantize
from luthier.training.fit import fit_data
from luthier.training.report.events import Event, Note
from luthier.training.report.result import RunResult

CHANCE = math.log(2)
# Of log-probabilities, root mean square, in nats; models of initializer_range 0.2 are far from flat.
ALLOWED = {Quantization.INT8: 0.05, Quantization.NF4: 0.6}


def _linear(outputs: int, inputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight)
    return layer.requires_grad_(False)


def _logps(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits.log_softmax(dim=-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


# -------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("inputs", [96, 70])
def test_a_weight_in_int8_is_off_by_half_a_step_at_most(inputs: int) -> None:
    layer = _linear(40, inputs)
    step_O1 = layer.weight.abs().amax(dim=1, keepdim=True) / 127
    off_OI = (Int8Linear(layer).weight - layer.weight).abs()
    assert (off_OI <= step_O1 / 2 * 1.0001).all() and off_OI.max() > step_O1.min() / 4


@pytest.mark.parametrize("inputs", [BLOCK, 70, 2 * BLOCK])
def test_a_weight_in_nf4_is_the_nearest_of_sixteen_times_its_blocks_largest(inputs: int) -> None:
    """NormalFloat written out from the quantiles of its paper, and every weight looked up one by one."""
    ends = torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1], torch.linspace(0.9677083, 0.5, 8).double()[:-1]
    positive, negative = (torch.special.ndtri(end) for end in ends)
    values = torch.cat([-negative, positive.new_zeros(1), positive.flip(0)]).float() / float(positive.max())
    layer = _linear(5, inputs)
    found = NF4Linear(layer).weight
    for row, begin in ((0, 0), (4, inputs - inputs % BLOCK if inputs % BLOCK else 0)):
        block = layer.weight[row, begin : begin + BLOCK]
        largest = block.abs().max().bfloat16().float()
        nearest = (block[:, None] / largest - values).abs().argmin(dim=1)
        torch.testing.assert_close(found[row, begin : begin + BLOCK], values[nearest] * largest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "of_float32"), [(Int8Linear, 0.25), (NF4Linear, 0.125)])
def test_a_layer_takes_a_quarter_and_an_eighth_of_float32(kind: Any, of_float32: float) -> None:
    layer = _linear(256, 512, bias=False)
    kept = kind(layer)
    size = sum(buffer.nbytes for buffer in kept.buffers()) / layer.weight.nbytes
    assert of_float32 <= size < 1.11 * of_float32
    assert not list(kept.parameters()), "nothing there to be trained"


@pytest.mark.parametrize("kind", [Int8Linear, NF4Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_the_weight_that_it_shows(kind: Any, dtype: torch.dtype) -> None:
    layer = _linear(24, 70)
    kept = kind(layer.to(dtype))
    inputs = torch.randn(2, 3, 70, dtype=dtype)
    expected = nn.functional.linear(inputs.float(), kept.weight, layer.bias.float())
    found = kept(inputs)
    assert found.dtype == dtype and (kept.in_features, kept.out_features) == (70, 24)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.3 if dtype is torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("kind", [Int8Linear, NF4Linear])
def test_rows_of_zeros_stay_zeros(kind: Any) -> None:
    layer = _linear(4, BLOCK)
    layer.weight[2] = 0
    assert not kind(layer).weight[2].any() and kind(layer).weight.isfinite().all()


# -------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("how", list(Quantization))
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_moe"])
def test_log_probabilities_stay_near_and_the_rest_of_the_model_as_it_was(name: str, how: Quantization) -> None:
    exact = tiny_model(name)
    kept = copy.deepcopy(exact).requires_grad_(False)
    done = quantize(kept, how)
    ids = torch.arange(3, 67).reshape(2, 32)
    assert _rms(_logps(kept, ids) - _logps(exact, ids)) < ALLOWED[how]
    assert done.layers == sum(isinstance(m, Int8Linear | NF4Linear) for m in kept.modules()) > 0
    assert 0 < done.share < 1 and done.after < done.before
    assert type(kept.get_output_embeddings()) is nn.Linear
    left = dict(kept.named_parameters())
    assert {"embed_tokens", "norm"} <= {part for name in left for part in name.split(".")}
    for name, parameter in exact.named_parameters():
        assert name not in left or torch.equal(left[name], parameter)


def test_fewer_bits_are_further_off_and_wrong_scales_would_show() -> None:
    """Control: the bounds above can be missed."""
    exact, ids = tiny_model("qwen3"), torch.arange(3, 67).reshape(2, 32)
    off = {}
    for how in Quantization:
        kept = copy.deepcopy(exact)
        quantize(kept, how)
        off[how] = _rms(_logps(kept, ids) - _logps(exact, ids))
        for layer in kept.modules():
            if isinstance(layer, Int8Linear | NF4Linear):
                scales = layer.scales_O if isinstance(layer, Int8Linear) else layer.scales_OG
                scales.neg_()
        assert _rms(_logps(kept, ids) - _logps(exact, ids)) > ALLOWED[how]
    assert 5 * off[Quantization.INT8] < off[Quantization.NF4]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_on_a_quantized_model_stay_exact() -> None:
    adapter_config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model("llama"), adapter_config)
    adapter = {name: value.clone() for name, value in model.named_parameters() if "lora_" in name}
    ids = torch.arange(3, 67).reshape(2, 32)
    before = _logps(model, ids)
    quantize(model, Quantization.INT8)
    assert adapter and all(torch.equal(dict(model.named_parameters())[name], value) for name, value in adapter.items())
    assert _rms(_logps(model, ids) - before) < ALLOWED[Quantization.INT8]
    with model.disable_adapter():
        assert _rms(_logps(model, ids) - before) > 0.1, "control: the adapter does something"


def test_a_model_without_linear_layers_is_refused_in_words() -> None:
    """GPT-2 keeps its weights transposed, in layers of its own."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ModelError, match=r"(?s)quantization is int8, and GPT2LMHeadModel has no linear layer.*remove"):
        quantize(model, Quantization.INT8)


# ---------------------------------------------------------------------------------------------------------- runs


def _run(root: Path, tokenizer: Tokenizer, reference: dict[str, Any], notes: list[str]) -> RunResult:
    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    # weights far enough from 0 that answers' log-probabilities are
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = epoch_steps(
        root, {"name": "dpo", "reference": reference}, rows=8, train__per_device_train_batch_size=8,
        model__config_overrides={**shape, "initializer_range": 0.2},
    )  # fmt: skip
    return fit_data(config, tokenizer, run_data(root.parent / "store", config, rows=range(8)), on_event=listen)


def test_a_run_compares_with_the_quantized_model_and_trains_the_exact_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    notes: list[str] = []
    exact = _run(tmp_path / "exact", tokenizer, {"source": "model"}, notes)
    assert exact.steps[0].loss == pytest.approx(CHANCE, rel=1e-6) and not any("int8" in note for note in notes)
    off = []
    for how in Quantization:
        found = _run(tmp_path / how, tokenizer, {"quantization": how.value}, notes)
        assert any(f"linear layers in {how}" in note for note in notes)
        off.append(abs(found.steps[0].loss - CHANCE))
        assert [step.loss for step in found.steps] == pytest.approx([step.loss for step in exact.steps], abs=0.1)
        weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("exact", how)]
        assert weights[0].keys() == weights[1].keys()
        assert all(weights[1][name].dtype == torch.float32 for name in weights[1])
    assert 1e-6 < off[0] < off[1] < 0.1, "it is another model, and with 4 bits more so"
