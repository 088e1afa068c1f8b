"""Which layers get an adapter that is heard, beside experts too; trained weights that no loss reaches are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as hf
from peft import PeftModel
from tiny_models import SIZES, VOCABULARY, tiny_model
from tiny_recurrent import RECURRENT_MODELS, recurrent_model
from tiny_runs import make_config, make_data, make_segments
from torch import nn

from luthier.config.choices import AdapterType
from luthier.config.inputs import QuantizationConfig
from luthier.config.schema import AdapterConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models import cast_to, read_past
from luthier.models.adapter_files import quiet_peft
from luthier.models.adapter_targets import collapse, left_out
from luthier.models.adapters import apply_adapter
from luthier.models.quantized import kept_modules, layers_to_quantize, loading_config
from luthier.training.fit import fit_data
from luthier.training.report.events import Note

READ = {
    "bamba": {"mamba.out_proj"},
    "falcon_h1": {"mamba.out_proj"},
    "gemma3n": {"altup.correction_coefs", "altup.prediction_coefs"},
    "granitemoehybrid": {"mamba.out_proj"},
    "jamba": {"mamba.dt_proj"},
    "nemotron_h": {"mixer.out_proj"},
    "zamba2": {"mamba.out_proj"},
}
IDS = torch.arange(3, 3 + 24)[None]
BESIDE = [
    {"type": AdapterType.LORA, "r": 2},
    {"type": AdapterType.LORA, "r": 2, "init_lora_weights": "pissa"},
    {"type": AdapterType.LORA, "r": 2, "use_dora": True},
    {"type": AdapterType.VERA, "r": 8},
    {"type": AdapterType.OFT, "oft_block_size": 4},
]
PEFT_NOISE = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def tiny(name: str) -> Any:
    if name != "gemma3n":
        return recurrent_model(name)
    torch.manual_seed(0)
    return hf.Gemma3nForCausalLM(
        hf.Gemma3nTextConfig(
            **{**SIZES, "intermediate_size": [48, 48]}, layer_types=["sliding_attention", "full_attention"],
            num_kv_shared_layers=0, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
            laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0, 0.0],
        )
    ).train()  # fmt: skip


def ends(names: list[str]) -> set[str]:
    return {".".join(name.split(".")[-2:]) for name in names}


@pytest.mark.parametrize("name", [*RECURRENT_MODELS, "gemma3n"])
def test_layers_whose_weights_are_read_past_them_are_found(name: str) -> None:
    assert {each for each in ends(read_past(tiny(name))) if "self_attn" not in each} == READ.get(name, set())


def test_the_output_of_torchs_attention_is_read_past_its_layer_and_nothing_of_plain_models() -> None:
    class Resampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.out.weight, torch.Tensor) and self.out.weight.shape
            mixed: torch.Tensor = self.attention(hidden, hidden, hidden)[0]
            return self.out(mixed.to(self.out.weight.dtype))  # type: ignore[no-any-return]

    assert read_past(Resampler()) == ["attention.out_proj"]
    for config in (hf.BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=32), hf.LlamaConfig(**SIZES)):
        assert read_past(hf.AutoModelForCausalLM.from_config(config)) == []


@pytest.mark.filterwarnings(PEFT_NOISE)
@pytest.mark.parametrize("keys", BESIDE, ids=lambda keys: " ".join(map(str, keys.values())))
@pytest.mark.parametrize("name", ["jamba", "gemma3n", "falcon_h1"])
def test_an_adapter_begins_as_the_model_and_all_of_it_is_heard(name: str, keys: dict[str, Any]) -> None:
    model, section = tiny(name), AdapterConfig(**keys)
    with torch.no_grad():
        before = model(input_ids=IDS, use_cache=False).logits
    told = ", ".join(collapse(read_past(model)))
    assert left_out(model, section) == [f"{told} (the model takes their weights without calling these layers)"]
    adapted: Any = apply_adapter(model, section).train()
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=IDS, use_cache=False).logits, before, rtol=1e-3, atol=1e-3)
    adapted(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    trained = {each: weight for each, weight in adapted.named_parameters() if weight.requires_grad}
    assert [each for each, weight in trained.items() if weight.grad is None] == []
    named = {each for each in trained for read in READ[name] if f"{read}." in each}
    assert len(trained) > 4 and not named


def test_a_pattern_that_names_nothing_else_is_refused_and_others_go_on_without() -> None:
    with pytest.raises(ModelError, match=r"'dt_proj' names model\.layers\.N\.mamba\.dt_proj.*no effect"):
        apply_adapter(tiny("jamba"), AdapterConfig(type=AdapterType.LORA, target_modules=["dt_proj"]))
    adapted = apply_adapter(tiny("jamba"), AdapterConfig(type=AdapterType.LORA, target_modules=["mamba.*"]))
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert any("mamba.in_proj" in name for name in trained) and not any("dt_proj" in name for name in trained)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["jamba", "gemma3n"])
def test_such_layers_keep_their_bits(name: str, kind: str, tmp_path: Path) -> None:
    section, model = QuantizationConfig(type=kind), tiny(name)
    model.save_pretrained(tmp_path)
    quantized = layers_to_quantize(model, section)
    assert quantized and not ends(list(quantized)) & READ[name]
    how: Any = loading_config(section, torch.float32, kept_modules(model, section))
    loaded = type(model).from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32).train()
    with torch.no_grad():
        few, all_bits = (each(input_ids=IDS, labels=IDS, use_cache=False).loss for each in (loaded, model))
    assert float(few) == pytest.approx(float(all_bits), rel=0.2)


def lfm2_vl() -> Any:
    """A model whose tower is SigLIP 2's."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = hf.Lfm2Config(**size, num_key_value_heads=2, vocab_size=VOCABULARY, layer_types=["conv", "full_attention"])
    seen = hf.Siglip2VisionConfig(**size, patch_size=4, num_patches=64)
    torch.manual_seed(0)
    return hf.Lfm2VlForConditionalGeneration(hf.Lfm2VlConfig(text_config=text, vision_config=seen)).eval()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_pixels_are_not_rounded_to_the_integers_of_a_quantized_layer(kind: str, tmp_path: Path) -> None:
    section, model = QuantizationConfig(type=kind), lfm2_vl()
    assert cast_to(model) == ["model.vision_tower.embeddings.patch_embedding"]
    model.save_pretrained(tmp_path)
    how: Any = loading_config(section, torch.float32, kept_modules(model, section))
    loaded = type(model).from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32).eval()
    shown = {"pixel_attention_mask": torch.ones(1, 64, dtype=torch.int32), "spatial_shapes": torch.tensor([[8, 8]])}
    pixels = torch.rand(1, 64, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        few, all_bits = (
            each.model.vision_tower(pixel_values=pixels, **shown).last_hidden_state.flatten()
            for each in (loaded, model)
        )
    assert torch.nn.functional.cosine_similarity(few, all_bits, dim=0) > 0.95


def test_a_class_that_knows_of_quantized_weights_has_its_layers_quantized() -> None:
    class Knowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if (wanted := self.first.weight.dtype).is_floating_point:
                hidden = hidden.to(wanted)
            return self.second(self.first(hidden))  # type: ignore[no-any-return]

    class Unknowing(Knowing):
        def cast(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.to(self.second.weight.dtype)

    assert (cast_to(Knowing()), cast_to(Unknowing())) == ([], ["second"])


# ------------------------------------------------------------------------------------------------------ experts

DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
NAMES = ["gate_proj", "up_proj", "down_proj"]


def with_experts(name: str) -> Any:
    torch.manual_seed(0)
    match name:
        case "deepseek_v3":
            return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**{**SIZES, **DEEPSEEK}))
        case "qwen3_moe":
            sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **sizes))
        case _:
            return recurrent_model(name)


def adapted_names(model: Any, **keys: Any) -> set[str]:
    """The layers beside which an adapter is, ``experts`` for both of their tensors; numbers of layers are N."""
    adapted = apply_adapter(model, AdapterConfig(type=AdapterType.LORA, r=2, **keys))
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad and "lora_A" in name]
    names = [each.removeprefix("base_model.model.model.").partition(".lora_A")[0] for each in trained]
    return {each.removesuffix(".base_layer").removeprefix("layers.N.") for each in collapse(names)}


def linear_names(model: Any) -> set[str]:
    layers = [name for name, layer in model.model.named_modules() if isinstance(layer, nn.Linear)]
    return {each.removeprefix("layers.N.") for each in collapse(layers)}


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "qwen3_moe"])
def test_all_linear_layers_are_adapted_beside_experts_and_routers_where_they_are_trained(name: str) -> None:
    linear = linear_names(with_experts(name))
    assert adapted_names(with_experts(name)) == linear | {"mlp.experts", "mlp.gate"}
    assert adapted_names(with_experts(name), train_routers=False) == linear | {"mlp.experts"}


def test_experts_that_no_name_means_are_told() -> None:
    for name, told in (("gpt_oss", ["down_proj", "gate_up_proj"]), ("qwen3_moe", [])):
        model = with_experts(name) if name != "gpt_oss" else tiny_model(name)
        section = AdapterConfig(type=AdapterType.LORA, r=2)
        apply_adapter(cast(Any, model), section)
        found = left_out(cast(Any, model), section)
        assert len(found) == bool(told) and all(f"mlp.experts.{each}" in found[0] for each in told)
        assert not found or "adapter.target_parameters names them" in found[0]


def test_names_of_experts_mean_all_layers_of_these_names_and_patterns_what_they_match() -> None:
    shared = {f"mlp.shared_experts.{each}" for each in NAMES}
    dense = {f"mlp.{each}" for each in NAMES}
    assert adapted_names(with_experts("deepseek_v3"), target_modules=NAMES) == shared | dense | {"mlp.experts"}
    assert adapted_names(with_experts("deepseek_v3"), target_modules=["shared_experts.*"]) == shared
    assert adapted_names(with_experts("deepseek_v3"), target_modules=[r"regex:.*\d\.mlp\.\w+_proj"]) == dense
    assert adapted_names(with_experts("qwen3_moe"), target_modules=["q_proj", *NAMES]) == {
        "self_attn.q_proj", "mlp.experts",
    }  # fmt: skip
    with pytest.raises(ModelError, match=r"gate_proj without also targeting up_proj(.|\n)*name all of them"):
        adapted_names(with_experts("qwen3_moe"), target_modules=["gate_proj"])
    with pytest.raises(ModelError, match=r"no linear module matches 'shared_experts\.\*'"):
        adapted_names(with_experts("qwen3_moe"), target_modules=["shared_experts.*"])


@pytest.mark.parametrize("keys", [{}, {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"up_proj": 8.0}}])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_plain_peft_reads_the_adapter_back_and_merges_it(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    model = with_experts(name).eval()
    model.save_pretrained(tmp_path / "base")
    adapted: Any = apply_adapter(model, AdapterConfig(type=AdapterType.LORA, r=2, **keys)).eval()
    ranks = {len(weight) for each, weight in adapted.named_parameters() if "shared" in each and "lora_A" in each}
    assert (3 in ranks) == bool(keys)
    with torch.no_grad():
        for each, weight in adapted.named_parameters():
            if "lora_B" in each:
                weight.normal_(std=0.2)
        found = adapted(input_ids=IDS, use_cache=False).logits
        adapted.save_pretrained(tmp_path / "adapter")
        base = type(model).from_pretrained(tmp_path / "base")
        with quiet_peft():  # which warns of its own settings for experts
            again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        torch.testing.assert_close(again(input_ids=IDS, use_cache=False).logits, found, rtol=0, atol=0)
        merged: Any = again.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=IDS, use_cache=False).logits, found, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings(PEFT_NOISE)
def test_beside_quantized_weights_such_layers_are_left_out_and_told_or_refused(tmp_path: Path) -> None:
    section, whole = QuantizationConfig(type="nf4"), with_experts("deepseek_v3")
    whole.save_pretrained(tmp_path)
    how: Any = loading_config(section, torch.float32, kept_modules(whole, section))

    def loaded() -> Any:
        return type(whole).from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32)

    for patterns in (["all-linear"], ["q_a_proj", *NAMES]):
        model, adapter = loaded(), AdapterConfig(type=AdapterType.LORA, r=2, target_modules=patterns)
        apply_adapter(model, adapter)
        (told,) = left_out(model, adapter)
        assert all(f"mlp.shared_experts.{each}" in told and f"N.mlp.{each}" in told for each in NAMES)
    with pytest.raises(ModelError, match=r"names of model\.layers\.N\.mlp\.shared_experts\.gate_proj"):
        apply_adapter(loaded(), AdapterConfig(type=AdapterType.LORA, target_modules=["shared_experts.*"]))


@pytest.mark.parametrize("start", ["eva", "corda", "lora_ga"])
def test_first_values_of_layers_are_not_for_experts(start: str) -> None:
    with pytest.raises(ModelError, match=rf"init_lora_weights is {start}(.|\n)*name other layers"):
        adapted_names(with_experts("deepseek_v3"), init_lora_weights=start)
    own = adapted_names(with_experts("deepseek_v3"), init_lora_weights=start, target_modules=["q_a_proj"])
    assert own == {"self_attn.q_a_proj"}


def test_routers_alone_are_refused_where_they_are_not_trained() -> None:
    assert adapted_names(with_experts("deepseek_v3"), target_modules=["gate"]) == {"mlp.gate"}
    with pytest.raises(ModelError, match="names routers alone"):
        adapted_names(with_experts("deepseek_v3"), target_modules=["gate"], train_routers=False)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_shared_experts_begin_as_the_model_where_the_base_is_changed(start: str) -> None:
    model = with_experts("deepseek_v3").eval()
    with torch.no_grad():
        before = model(input_ids=IDS, use_cache=False).logits
        keys: dict[str, Any] = {"target_modules": ["shared_experts.*"], "init_lora_weights": start}
        adapted: Any = apply_adapter(model, AdapterConfig(type=AdapterType.LORA, r=2, **keys)).eval()
        torch.testing.assert_close(adapted(input_ids=IDS, use_cache=False).logits, before, rtol=1e-4, atol=1e-4)
    begun = [weight.detach().abs().max() for name, weight in adapted.named_parameters() if "lora_B" in name]
    assert begun and min(begun) > 0.01


@pytest.mark.parametrize(("keys", "told"), [({"lora_dropout": 0.1}, "lora_dropout"), ({"use_dora": True}, "use_dora")])
def test_what_goes_with_layers_only_is_refused_with_the_way_out(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=rf"experts of a layer as tensors(.|\n)*{told}(.|\n)*layers without experts"):
        adapted_names(with_experts("qwen3_moe"), **keys)
    assert adapted_names(with_experts("qwen3_moe"), target_modules=["q_proj"], **keys) == {"self_attn.q_proj"}


# ------------------------------------------------------------------------------------------- weights out of reach


class _WithSpare(nn.Linear):
    """A layer with a weight beside its own that nothing reads, at first or ever."""

    def __init__(self, like: nn.Linear, *, after: int | None) -> None:
        super().__init__(like.in_features, like.out_features, bias=False)
        self.load_state_dict(like.state_dict())
        self.spare, self.after, self.calls = nn.Parameter(torch.zeros(like.out_features)), after, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        found = super().forward(hidden)
        return found + self.spare if self.after is not None and self.calls > self.after else found


@pytest.mark.parametrize(("after", "steps", "told"), [(None, 3, 3), (None, 12, 10), (2, 12, None), (0, 3, None)])
def test_weights_that_no_loss_reaches_are_told_once(
    after: int | None,
    steps: int,
    told: int | None,
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from luthier.training import assemble

    real: Callable[..., Any] = assemble.adapters.apply_adapter

    def with_spare(model: Any, *args: Any, **keys: Any) -> Any:
        for layer in model.model.layers:
            layer.mlp.up_proj = _WithSpare(layer.mlp.up_proj, after=after)
        return real(model, *args, **keys)

    monkeypatch.setattr(assemble.adapters, "apply_adapter", with_spare)
    notes: list[str] = []
    fit_data(
        make_config(tmp_path / "run", train__max_steps=steps, output__save_strategy="no"),
        tokenizer,
        make_data(make_segments(16)),
        on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
    )
    found = [note for note in notes if "no loss has reached" in note]
    assert len(found) == (told is not None)
    if told is not None:
        assert f"in {told} steps" in found[0] and "model.layers.N.mlp.up_proj.spare" in found[0]
