"""Adapters on quantized bases, and quantized references, with the libraries themselves on a CPU."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_quantized import experts_in_4_bit_floats, in_8_bit_floats, in_gptq_or_awq, in_packed_ints, write_base
from tiny_rows import epoch_steps, run_data
from tiny_runs import losses_by_hand, make_config, make_data, make_segments, padded_batch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AwqConfig,
    BitsAndBytesConfig,
    GPTQConfig,
    PreTrainedModel,
    set_seed,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from luthier.collation import CollateSettings
from luthier.config.choices import AdapterType, QuantizationType
from luthier.config.inputs import QuantizationConfig
from luthier.config.schema import AdapterConfig, RunConfig
from luthier.encoding.tokenizer import Tokenizer, load_tokenizer
from luthier.errors import ModelError
from luthier.models import quantized
from luthier.models.adapters import apply_adapter, count_parameters
from luthier.models.isolation import choose_isolation
from luthier.models.model import build_weightless, check_quantized, load_model
from luthier.models.quantized import check_stored, is_quantized, quantization_note, settle, whole_weight
from luthier.models.vocabulary import Vocabulary
from luthier.training.assemble import make_model
from luthier.training.fit import fit_data
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note
from luthier.training.streams import World

Train = Callable[..., RunResult]
CHANCE = math.log(2)
TRAINED = [each for each in QuantizationType if each not in (QuantizationType.NONE, QuantizationType.TORCHAO_INT4)]
LORA: dict[str, Any] = {
    "type": "lora",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
}
STEADY: dict[str, Any] = {
    "train__learning_rate": 1e-2, "train__lr_scheduler_type": "constant", "train__max_grad_norm": 0.0,
    "train__per_device_train_batch_size": 4, "train__max_steps": 6,
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A folder with a small model whose weights are far from 0, so that few bits show."""
    return write_base(tmp_path_factory.mktemp("base"), tokenizer)


def _on(base: Path, quantization: object, **more: Any) -> dict[str, Any]:
    return {"model": {"name_or_path": str(base), "quantization": quantization}, "adapter": LORA, **STEADY, **more}


def _losses(result: RunResult) -> list[float]:
    return [step.loss for step in result.steps]


def _batch(count: int) -> dict[str, torch.Tensor]:
    return padded_batch(make_segments(count))


def _by_hand(base: Path, quantization: QuantizationConfigMixin) -> tuple[list[float], nn.Module]:
    """PEFT and bitsandbytes as their own pages show it, and a loop of a few lines."""
    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=torch.float32)
    for layer in plain.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    set_seed(1)
    model = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    return losses_by_hand(model, _batch(4), 6, 1e-2), model


@pytest.mark.parametrize(
    ("asked", "by_hand"),
    [
        ("nf4", BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)),
        (
            {"type": "fp4", "double_quantization": False},
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
        ),
        ("int8", BitsAndBytesConfig(load_in_8bit=True)),
    ],
    ids=["nf4", "fp4", "int8"],
)
def test_a_run_has_the_losses_of_peft_and_bitsandbytes_by_hand(
    base: Path, train: Train, tmp_path: Path, asked: Any, by_hand: BitsAndBytesConfig
) -> None:
    found = train(make_data(make_segments(4)), **_on(base, asked))
    expected, model = _by_hand(base, by_hand)
    assert _losses(found) == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 1, "it learns"
    # what was saved loads through PEFT alone, on the base quantized the same way
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "model", quantization_config=by_hand)
    loaded.eval(), model.eval()
    settle(loaded.get_base_model())
    with torch.no_grad():
        logits = [each(input_ids=_batch(4)["input_ids"]).logits for each in (loaded, model)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def test_control_the_whole_base_has_other_losses(base: Path, train: Train) -> None:
    whole = _losses(train(make_data(make_segments(4)), **_on(base, None)))
    nf4 = _losses(train(make_data(make_segments(4)), folder="nf4", **_on(base, "nf4")))
    assert abs(whole[0] - nf4[0]) > 1e-3


@pytest.mark.parametrize("how", TRAINED)
def test_a_run_goes_on_to_the_bit_and_is_merged_into_the_dequantized_base(
    base: Path, train: Train, tmp_path: Path, how: QuantizationType
) -> None:
    data, saving = make_data(make_segments(4)), {"output__save_strategy": "steps", "output__save_steps": 3}
    adapter = {"adapter__merge": True}
    whole = train(data, **_on(base, how.value, **saving, **adapter))
    train(data, folder="parts", **{**_on(base, how.value, **saving), "train__max_steps": 3})
    parts = train(data, folder="parts", **_on(base, how.value, **saving))
    assert parts.resumed_from is not None and _losses(parts)[-3:] == _losses(whole)[-3:]
    weights = [load_file(tmp_path / run / "model" / "adapter_model.safetensors") for run in ("run", "parts")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # merged: a plain model of whole weights, which answers as the adapter does on the quantized base
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged").eval()
    assert not is_quantized(merged) and merged.dtype == torch.float32
    config = make_config(tmp_path / "again", model={"name_or_path": str(base), "quantization": how.value})
    adapted = PeftModel.from_pretrained(_loaded(config), tmp_path / "run" / "model").eval()
    ids = _batch(4)["input_ids"]
    with torch.no_grad():
        found, expected = merged(input_ids=ids).logits, adapted(input_ids=ids).logits
    # LLM.int8 also rounds what goes into a layer, which a merged model does not
    tolerance = 0.3 if how is QuantizationType.INT8 else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    before = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    changed = {name for name, weight in merged.named_parameters() if not torch.equal(weight, before[name])}
    assert "lm_head.weight" not in changed and any("down_proj" in name for name in changed)


def _loaded(config: RunConfig) -> PreTrainedModel:
    vocabulary = Vocabulary.of(load_tokenizer("preset:tiny-qwen3"))
    return load_model(config.model_copy(update={"adapter": AdapterConfig(type=AdapterType.LORA)}), vocabulary).model


def test_an_adapter_is_gone_on_from_on_a_quantized_base(base: Path, train: Train, tmp_path: Path) -> None:
    data = make_data(make_segments(4))
    first = train(data, **_on(base, "nf4"))
    again = {"type": "lora", "name_or_path": str(tmp_path / "run" / "model")}
    second = train(data, folder="second", **{**_on(base, "nf4"), "adapter": again})
    assert _losses(second)[0] < _losses(first)[-1]


@pytest.mark.parametrize("objective", ["pt", "sft", "rm", "dpo", "kto"])
def test_every_objective_learns_on_a_quantized_base_with_activations_recomputed(
    base: Path, tmp_path: Path, tokenizer: Tokenizer, objective: str
) -> None:
    def losses(folder: str, **more: Any) -> list[float]:
        on = {key: value for key, value in _on(base, "nf4").items() if "batch" not in key and "steps" not in key}
        config = epoch_steps(tmp_path / folder, {"name": objective}, rows=4, **on, **more)
        return _losses(fit_data(config, tokenizer, run_data(tmp_path / "store", config, rows=range(4))))

    found = losses("kept")
    assert found[-1] < found[0]
    assert losses("recomputed", train__gradient_checkpointing=True) == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("how", TRAINED)
def test_dora_learns_on_every_quantized_base(base: Path, train: Train, how: QuantizationType, recomputes: bool) -> None:
    on = {**_on(base, how.value), "adapter": {**LORA, "use_dora": True}}
    losses = _losses(train(make_data(make_segments(4)), **on, train__gradient_checkpointing=recomputes))
    assert len(losses) > 2 and losses[-1] < losses[0]


@pytest.mark.parametrize("how", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
def test_a_model_that_comes_quantized_is_trained_on_and_merged(
    base: Path, train: Train, tmp_path: Path, how: dict[str, Any]
) -> None:
    stored = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(**how))
    stored.save_pretrained(tmp_path / "stored")
    on = {**_on(tmp_path / "stored", None), "model": {"name_or_path": str(tmp_path / "stored")}}
    result = train(make_data(make_segments(4)), **{**on, "adapter": {**LORA, "merge": True}})
    assert _losses(result)[-1] < _losses(result)[0]
    ids = torch.arange(3, 35)[None]
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged", dtype=torch.float32).eval()
    assert not is_quantized(merged) and is_quantized(adapted.get_base_model())
    settle(adapted.get_base_model())
    with torch.no_grad():
        found, expected = merged(input_ids=ids).logits, adapted(input_ids=ids).logits
    allowed = 1e-3 if "load_in_4bit" in how else 5e-2  # in 8 bits inputs of layers are rounded too
    assert (found - expected).abs().max() < allowed * expected.abs().max()


def test_adapters_are_merged_first_into_what_a_quantized_model_computes(
    base: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The next adapter has the numbers of the quantized model with the first one beside it as its base."""
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(base, quantization_config=how).save_pretrained(tmp_path / "stored")
    first = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype=torch.float32),
        LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    ).eval()
    settle(first.get_base_model())
    first.save_pretrained(tmp_path / "first")
    changed = {"adapter": {**LORA, "merge_first": [str(tmp_path / "first")]}, "model": str(tmp_path / "stored")}
    told: list[str] = []
    config = make_config(tmp_path / "run", **changed)
    model = make_model(config, tokenizer, World(rank=0, size=1), lambda event: told.append(str(event))).model.eval()
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        expected = first(input_ids=ids).logits
        found = model(input_ids=ids).logits
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    assert not is_quantized(model.get_base_model()) and any("came quantized" in text for text in told)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_layers_are_freed_one_by_one_as_they_become_whole(
    kind: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    model, again = _quantized_base(base, kind), _quantized_base(base, kind)  # PEFT, asked for a weight, changes it
    wanted = {name: whole_weight(one).to(model.dtype) for name, one in again.named_modules() if isinstance(one, of)}
    alive = [weakref.ref(layer) for layer in model.modules() if isinstance(layer, of)]
    left = list[int]()

    def counting(module: PreTrainedModel, name: str) -> None:
        make_whole(module, name)
        left.append(sum(each() is not None for each in alive))

    make_whole = quantized._make_whole
    monkeypatch.setattr(quantized, "_make_whole", counting)
    gc.disable()
    try:
        whole = quantized.dequantized(model)
    finally:
        gc.enable()
    assert left == [*reversed(range(len(wanted)))] and len(wanted) > 1
    for name, weight_OI in wanted.items():
        assert torch.allclose(whole.get_submodule(name).weight, weight_OI, rtol=1e-2, atol=1e-6), name


@pytest.mark.parametrize("key", ["merge", "merge_first"])
def test_what_cannot_be_made_whole_is_not_merged_into(key: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = AutoConfig.from_pretrained(base)
    stored.quantization_config = BitsAndBytesConfig(load_in_4bit=True).to_dict()
    monkeypatch.setattr("luthier.models.quantized._is_dequantizable", lambda quantizer: False)
    assert check_stored(stored, QuantizationConfig(), merges=None) == "bitsandbytes"
    with pytest.raises(ModelError, match=rf"adapter\.{key} needs"):
        check_stored(stored, QuantizationConfig(), merges=f"adapter.{key}")


needs_gptqmodel = pytest.mark.skipif(
    importlib.util.find_spec("gptqmodel") is None, reason="gptqmodel, which is built from source, is not installed"
)


@needs_gptqmodel
@pytest.mark.filterwarnings("ignore")  # gptqmodel's own
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_model_in_gptq_or_awq_is_trained_on_as_it_is_and_merged(
    base: Path, train: Train, tmp_path: Path, method: str
) -> None:
    stored = tmp_path / "stored"
    expected = in_gptq_or_awq(base, stored, method)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole.load_state_dict(expected, strict=False)
    notes: list[str] = []
    chosen = {**_on(stored, None), "model": {"name_or_path": str(stored)}, "adapter": {**LORA, "merge": True}}
    result = train(make_data(make_segments(4)), on_event=lambda e: notes.append(str(e)), **chosen)
    assert any("14 linear layers quantized" in note for note in notes)
    said = json.loads((stored / "config.json").read_text())["quantization_config"]
    how = (GPTQConfig if said.pop("quant_method") == "gptq" else AwqConfig)(**said, backend="auto_trainable")
    by_hand, model = _by_hand(stored, how)
    assert _losses(result) == pytest.approx(by_hand, abs=1e-5) and by_hand[-1] < by_hand[0] - 1
    set_seed(1)
    dequantized = get_peft_model(whole, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    assert by_hand == pytest.approx(losses_by_hand(dequantized, _batch(4), 6, 1e-2), abs=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged", dtype=torch.float32).eval()
    assert not is_quantized(merged)
    torch.testing.assert_close(merged.model.layers[0].mlp.up_proj.weight, expected["model.layers.0.mlp.up_proj.weight"],
                               rtol=2e-3, atol=1e-4)  # fmt: skip
    with torch.no_grad():
        logits = [each.eval()(input_ids=_batch(4)["input_ids"]).logits for each in (merged, model)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=2e-3)
    on_all = train(make_data(make_segments(4)), folder="all", **{**chosen, "adapter": {"type": "lora", "r": 4}})
    assert on_all.model.trainable_parameters > 3 * result.model.trainable_parameters
    gone_on = {**chosen, "adapter": {"type": "lora", "name_or_path": str(tmp_path / "all" / "model")}}
    more = train(make_data(make_segments(4)), folder="more", **gone_on)
    assert _losses(more)[0] < _losses(on_all)[-1] < _losses(on_all)[0]
    dora = make_config(tmp_path, **{**chosen, "adapter": {**LORA, "use_dora": True}})
    vocabulary = Vocabulary.of(load_tokenizer("preset:tiny-qwen3"))
    with pytest.raises(ModelError, match="no DoRA"):
        check_quantized(dora, build_weightless(dora, vocabulary))


@needs_gptqmodel
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_layers_of_gptq_and_awq_have_a_gradient_after_they_have_answered(
    base: Path, tmp_path: Path, method: str
) -> None:
    """In bfloat16 they would change to a product without a backward pass, which leaves only the paths around them."""
    in_gptq_or_awq(base, tmp_path, method)
    vocabulary = Vocabulary.of(load_tokenizer("preset:tiny-qwen3"))
    config = make_config(tmp_path, model={"name_or_path": str(tmp_path), "dtype": "bfloat16"}, adapter=LORA)
    ids, gradients = _batch(2)["input_ids"], []
    for answers_first in (False, True):
        model = load_model(config, vocabulary).model
        if answers_first:
            with torch.no_grad():
                model.eval()(input_ids=ids)
        given = model.get_input_embeddings()(ids).detach().requires_grad_()
        model.train()(inputs_embeds=given).logits.float().square().mean().backward()
        assert given.grad is not None
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


class _Packed(nn.Module):
    """A layer as GPTQ and AWQ have them: numbers in a buffer, and no ``weight``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("qweight", torch.zeros(layer.in_features // 8, layer.out_features, dtype=torch.int32))


def test_layers_without_a_weight_are_found_and_counted(base: Path) -> None:
    """PEFT's own all-linear does not find them; this stand-in is one that it cannot adapt, and says so."""
    model = AutoModelForCausalLM.from_pretrained(base)
    before = count_parameters(model)[0]
    for layer in model.model.layers:
        layer.mlp.up_proj = _Packed(layer.mlp.up_proj)
    assert count_parameters(model)[0] == before
    assert "2 linear layers quantized" in quantization_note(model)
    with pytest.raises(ModelError, match="_Packed"):
        apply_adapter(model, AdapterConfig(type=AdapterType.LORA))
    with pytest.raises(ModelError, match="no_such_layer"):
        apply_adapter(model, AdapterConfig(type=AdapterType.LORA, target_modules=["no_such_layer"]))


@pytest.mark.parametrize("write", [in_8_bit_floats, in_packed_ints, experts_in_4_bit_floats])
def test_a_form_that_cannot_be_trained_on_is_read_whole(
    base: Path, train: Train, tmp_path: Path, write: Callable[[Path, Path], dict[str, torch.Tensor]]
) -> None:
    stored = tmp_path / "stored"
    expected = write(base, stored)
    config = make_config(tmp_path, model={"name_or_path": str(stored)})
    loaded = load_model(config, Vocabulary.of(load_tokenizer("preset:tiny-qwen3")))
    assert any("comes quantized" in note and "whole" in note for note in loaded.notes)
    found = loaded.model.state_dict()
    assert not is_quantized(loaded.model)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)
    loaded.model.save_pretrained(tmp_path / "whole")
    written = load_file(tmp_path / "whole" / "model.safetensors")
    assert written.keys() == expected.keys() and all(torch.equal(written[name], found[name]) for name in written)
    first = {}
    for kind, more, changed in (
        ("all", {}, {"adapter": {"type": "full"}}),
        ("beside", {}, {"adapter": {**LORA, "merge": True}}),
        ("quantized again", {"quantization": "nf4"}, {}),
    ):
        chosen = {**_on(stored, None), "model": {"name_or_path": str(stored), **more}, **changed}
        result = train(make_data(make_segments(4)), output__dir=str(tmp_path / kind), **chosen)
        assert _losses(result)[-1] < _losses(result)[0]
        first[kind] = _losses(result)[0]
    assert first["all"] == first["beside"] == pytest.approx(first["quantized again"], abs=0.5)
    saved = tmp_path / "all" / "model", tmp_path / "beside" / "merged"
    assert all("quantization_config" not in json.loads((each / "config.json").read_text()) for each in saved)
    for each in saved:  # what was learned is in the files: such a model knows the rows
        again = AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)
        with torch.no_grad():
            assert again(**_batch(4)).loss < first["all"] - 0.1


@pytest.mark.parametrize(("kind", "rslora"), [("nf4", False), ("int8", True), ("torchao_int8", False)])
def test_loftq_begins_with_the_nearest_matrix_of_its_rank_to_what_is_rounded_away(
    base: Path, train: Train, tmp_path: Path, kind: str, rslora: bool
) -> None:
    whole = load_file(base / "model.safetensors")
    adapter = {**LORA, "init_lora_weights": "loftq", "use_rslora": rslora}
    steady = {"train__max_steps": 1, "train__learning_rate": 1e-30, "train__per_device_train_batch_size": 4}
    train(make_data(make_segments(4)), **{**_on(base, kind), **steady, "adapter": adapter})
    saved = PeftModel.from_pretrained(_quantized_base(base, kind), tmp_path / "run" / "model")
    for name, layer in saved.get_base_model().named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        lost = whole[f"{name}.weight"] - whole_weight(layer.get_base_layer())
        left, sizes, right = torch.linalg.svd(lost, full_matrices=False)
        nearest = (left[:, :4] * sizes[:4]) @ right[:4]
        found = layer.get_delta_weight("default").detach()
        assert float((lost - found).norm()) == pytest.approx(float((lost - nearest).norm()), rel=1e-2)
        assert (lost - found).norm() < 0.97 * lost.norm()
    assert json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())["init_lora_weights"] is True


def _quantized_base(base: Path, kind: str) -> PreTrainedModel:
    config = make_config(base.parent / "again", model={"name_or_path": str(base), "quantization": kind}, adapter=LORA)
    return load_model(config, Vocabulary.of(load_tokenizer("preset:tiny-qwen3"))).model


@pytest.mark.parametrize(("kind", "way"), [("int8", "model.quantization"), ("nf4", None)])
def test_rows_that_large_values_bring_together_are_refused_with_the_way_out(
    kind: str, way: str | None, base: Path
) -> None:
    model = _quantized_base(base, kind)
    for name, weight in model.named_parameters():
        if "layernorm" in name:
            weight.data *= 8.0  # columns over 6, which LLM.int8 takes out of all rows that it reads at once
    how = CollateSettings(packed=True, pad_token_id=0)
    if way is None:
        assert choose_isolation(model, make_segments(3), how, device=torch.device("cpu"))
        return
    with pytest.raises(ModelError) as refused:
        choose_isolation(model, make_segments(3), how, device=torch.device("cpu"))
    assert refused.value.hint is not None and way in refused.value.hint and "train.packing" in refused.value.hint


def test_random_weights_are_quantized_too_and_their_base_is_saved_whole(train: Train, tmp_path: Path) -> None:
    result = train(make_data(make_segments(4)), model__quantization="nf4", adapter=LORA, **STEADY)
    assert _losses(result)[-1] < _losses(result)[0]
    saved = load_file(tmp_path / "run" / "base" / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert not list((tmp_path / "run").glob(".whole_model_*"))


def test_what_is_trained_or_named_keeps_all_its_bits(base: Path, tmp_path: Path) -> None:
    section = {"type": "nf4", "skip_modules": ["o_proj"]}
    config = make_config(
        tmp_path, model={"name_or_path": str(base), "quantization": section},
        adapter={"type": "lora", "modules_to_save": ["down_proj"]},
    )  # fmt: skip
    model = load_model(config, Vocabulary.of(load_tokenizer("preset:tiny-qwen3"))).model
    kinds = {name.rpartition(".")[2]: type(layer) for name, layer in model.named_modules()}
    assert kinds["q_proj"] is kinds["up_proj"] is bnb.nn.Linear4bit
    assert kinds["o_proj"] is kinds["down_proj"] is kinds["lm_head"] is nn.Linear
    misspelled = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"quantization": QuantizationConfig(type="nf4", skip_modules=["o_prj"])}
            )
        }
    )
    with pytest.raises(ModelError, match="o_prj"):
        load_model(misspelled, Vocabulary.of(load_tokenizer("preset:tiny-qwen3")))


# -------------------------------------------------------------------------------------------------------- references


def _compared(root: Path, tokenizer: Tokenizer, reference: dict[str, Any], notes: list[str]) -> RunResult:
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
    exact = _compared(tmp_path / "exact", tokenizer, {"source": "model"}, notes)
    assert exact.steps[0].loss == pytest.approx(CHANCE, rel=1e-6) and not any("quantized" in note for note in notes)
    off = []
    for how in (QuantizationType.INT8, QuantizationType.NF4):
        notes.clear()
        found = _compared(tmp_path / how, tokenizer, {"quantization": how.value}, notes)
        assert any("linear layers quantized" in note for note in notes)
        off.append(abs(found.steps[0].loss - CHANCE))
        assert _losses(found) == pytest.approx(_losses(exact), abs=0.1)
        weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("exact", how)]
        assert weights[0].keys() == weights[1].keys()
        assert all(weights[1][name].dtype == torch.float32 for name in weights[1])
    assert 1e-6 < off[0] < off[1] < 0.1, "it is another model, and with 4 bits more so"
