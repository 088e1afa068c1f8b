"""Which weights are trained, what is saved, and what it gives when loaded again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from peft.tuners.lora import LoraGAConfig, corda, preprocess_loraga
from peft.tuners.lora.config import CordaConfig
from safetensors.torch import load_file
from tiny_models import MODELS, tiny_model
from tiny_recurrent import RECURRENT_MODELS
from tiny_runs import losses_by_hand, make_config, make_data, make_segments, padded_batch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LagunaConfig,
    LagunaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from luthier.config.choices import AdapterType
from luthier.config.inputs import QuantizationConfig
from luthier.config.schema import AdapterConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models import adapter_files, adapter_targets, adapters, unlike_linear
from luthier.models.quantized import kept_modules
from luthier.models.routers import choose_experts
from luthier.models.sharding import restore_weights
from luthier.training import fit as fit_module
from luthier.training.fit import fit_data
from luthier.training.report import RunResult

Train = Callable[..., RunResult]
DATA = make_data(make_segments(12))
IDS = torch.from_numpy(DATA.train[0].input_ids.astype(np.int64))[None]
PEFT_NOISE = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def _model(layers: int = 3) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )
    )  # fmt: skip


def _trained(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


# --------------------------------------------------------------------------------------------------------- freeze


def test_freeze_trains_the_last_layers_the_first_layers_and_the_patterns_that_are_named() -> None:
    def freeze(**keys: Any) -> set[str]:
        return _trained(adapters.apply_adapter(_model(), AdapterConfig(type=AdapterType.FREEZE, **keys)))

    names = {name for name, _ in _model().named_parameters()}
    assert freeze(freeze_trainable_layers=2) == {n for n in names if ".layers.1." in n or ".layers.2." in n}
    assert freeze(freeze_trainable_layers=-1) == {n for n in names if ".layers.0." in n}
    assert freeze(freeze_trainable_modules=["*lm_head*", "*q_norm*"]) == {
        n for n in names if "lm_head" in n or "q_norm" in n
    }


def test_a_weight_that_has_two_names_is_trained_by_either_and_told_where_the_second_is_named() -> None:
    for patterns, told in (
        (["lm_head.weight"], {"lm_head.weight": "model.embed_tokens.weight"}),
        (["regex:^lm_head.weight$"], {"lm_head.weight": "model.embed_tokens.weight"}),
        (["model.embed_tokens.weight"], {}),
        (["*embed*", "*lm_head*"], {}),
    ):
        model = _model()
        model.lm_head.weight = model.model.embed_tokens.weight
        section = AdapterConfig(type=AdapterType.FREEZE, freeze_trainable_modules=patterns)
        assert _trained(adapters.apply_adapter(model, section)) == {"model.embed_tokens.weight"}
        assert adapters.tied_by_name(model, patterns) == told


def test_freeze_trains_the_last_layer_of_each_of_as_many_groups_where_it_spreads_them() -> None:
    section = AdapterConfig(type=AdapterType.FREEZE, freeze_trainable_layers=2, freeze_spread=True)
    names = _trained(adapters.apply_adapter(_model(layers=6), section))
    assert names and names == {
        n for n, _ in _model(layers=6).named_parameters() if ".layers.2." in n or ".layers.5." in n
    }


def test_freeze_changes_exactly_what_it_trains(train: Train, tmp_path: Path) -> None:
    frozen = train(DATA, adapter__type="freeze", adapter__freeze_trainable_layers=1, train__learning_rate=1e-2)
    train(DATA, folder="start", train__learning_rate=1e-30, train__max_steps=1)
    before = load_file(tmp_path / "start" / "model" / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = {name for name in after if (after[name] - before[name]).abs().max() > 1e-20}
    assert changed == {name for name in after if ".layers.1." in name}
    assert frozen.model.trainable_parameters == sum(after[name].numel() for name in changed)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"freeze_trainable_modules": ["*nothing*"]},
            r"no parameter matches '\*nothing\*'(.|\n)*model.layers.N.self_attn.q_proj.weight",
        ),
        ({"freeze_trainable_layers": 9}, "is 9, more than the model's 3"),
        ({"freeze_trainable_layers": 2, "freeze_spread": True}, "3 layers cannot be divided into 2 equal parts"),
        ({}, "leaves nothing to train"),
    ],
)  # fmt: skip
def test_freezing_that_cannot_be_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        adapters.apply_adapter(_model(), AdapterConfig(type=AdapterType.FREEZE, **keys))


# ----------------------------------------------------------------------------------------------------------- LoRA

VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_steps": {"init_lora_weights": "pissa_niter_4"},
    "pissa_rslora": {"init_lora_weights": "pissa", "use_rslora": True},
    "olora": {"init_lora_weights": "olora"},
    "loraplus": {"loraplus_lr_ratio": 8.0},
    "saved_head": {"modules_to_save": ["lm_head"]},
    "eva": {"init_lora_weights": "eva"},
    "corda": {"init_lora_weights": "corda", "use_rslora": True},
    "lora_ga": {"init_lora_weights": "lora_ga"},
    "patterns": {"rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2}, "alpha_pattern": {"q_proj": 32}},
    "oft": {"type": "oft", "oft_block_size": 8},
    "vera": {"type": "vera", "r": 64},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns_and_gives_the_same_logits_when_loaded_and_when_merged(
    variant: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[torch.Tensor] = []
    real = fit_module._save

    def look(run: Any) -> None:
        with torch.no_grad():
            logits.append(run.setup.run_model.model.eval()(IDS).logits)
        real(run)

    monkeypatch.setattr(fit_module, "_save", look)
    keys = {"type": "lora", "merge": True, **VARIANTS[variant]}
    keys |= {"r": 4} if keys["type"] == "lora" else {}
    untied = {"model__config_overrides": {**make_config(tmp_path).model.config_overrides, "tie_word_embeddings": False}}
    config = make_config(
        tmp_path,
        train__max_steps=8,
        train__learning_rate=1e-2,
        train__per_device_train_batch_size=12,
        adapter=keys,
        **untied,
    )
    result = fit_data(config, tokenizer, DATA)
    assert result.steps[-1].loss < result.steps[0].loss - 0.005
    assert result.model.trainable_parameters < result.model.parameters
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged(IDS).logits, logits[0], rtol=1e-4, atol=1e-5)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
        assert (base(IDS).logits - logits[0]).abs().max() > 1e-3, "the adapter does something"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_modules_that_are_trained_whole_beside_a_base_in_16_bits_learn_in_32(
    train: Train, tmp_path: Path, precision: str
) -> None:
    """Numbers around 1 are 0.004 apart in bfloat16: no update of a tenth of that would be left."""
    adapter = {"type": "lora", "r": 4, "modules_to_save": ["norm", "mlp"], "merge": True}
    on = {"adapter": adapter, "model__dtype": "bfloat16", "train__precision": precision, "train__max_steps": 4,
          "train__learning_rate": 4e-4, "train__lr_scheduler_type": "constant"}  # fmt: skip
    train(DATA, **on)
    after = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    base = load_file(tmp_path / "run" / "base" / "model.safetensors")
    norms = [name for name in after if "norm" in name]
    assert len(norms) > 4 and {weight.dtype for weight in after.values()} == {torch.float32}
    for name in norms:
        moved = (after[name] - base[name.removeprefix("base_model.model.")].float()).abs()
        assert bool((moved > 0).all()) and float(moved.max()) < 3e-3, name
    merged = load_file(tmp_path / "run" / "merged" / "model.safetensors")
    assert {weight.dtype for weight in merged.values()} == {torch.bfloat16}
    # a run that is stopped goes on with all bits
    train(DATA, folder="halves", **on, output__save_strategy="steps", output__save_steps=2)
    shutil.rmtree(tmp_path / "halves" / "checkpoint-4")
    train(DATA, folder="halves", **on, output__save_strategy="steps", output__save_steps=2)
    again = load_file(tmp_path / "halves" / "model" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in after.items())


pytestmark = pytest.mark.filterwarnings(PEFT_NOISE)  # our own code silences it; loading here is PEFT's alone


def test_pissa_is_a_plain_lora_of_twice_the_rank_when_saved(train: Train, tmp_path: Path) -> None:
    train(DATA, adapter__type="lora", adapter__r=4, adapter__init_lora_weights="pissa")
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in saved.items() if "lora_A" in name} == {8}
    assert '"init_lora_weights": true' in (tmp_path / "run" / "model" / "adapter_config.json").read_text()


@pytest.mark.parametrize("start", ["pissa", "corda", "lora_ga"])
def test_lora_resumes_exactly_where_it_began_with_a_part_of_the_base(start: str, train: Train, tmp_path: Path) -> None:
    keys = {"adapter__type": "lora", "adapter__r": 4, "adapter__init_lora_weights": start, "train__max_steps": 4}
    whole = train(DATA, output__save_strategy="steps", output__save_steps=2, **keys)
    (tmp_path / "run" / "checkpoint-4" / "manifest.json").unlink()
    again = train(DATA, output__save_strategy="steps", output__save_steps=2, **keys)
    assert again.resumed_from == "checkpoint-2"
    assert [s.loss for s in again.steps] == pytest.approx([s.loss for s in whole.steps], rel=1e-6)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # PEFT's own hooks
@pytest.mark.parametrize("start", ["corda", "lora_ga"])
def test_values_of_rows_and_base_are_those_that_peft_computes_by_itself(
    start: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the first eight rows, each by itself, as PEFT's own pages show it; signs of directions are free. LoRA-GA
    decomposes by chance: here it does so exactly, on both sides."""

    def exactly(matrix: torch.Tensor, q: int, niter: int) -> tuple[torch.Tensor, ...]:
        left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, :q], sizes[:q], right[:q].T

    monkeypatch.setattr(torch, "svd_lowrank", exactly)
    train(
        DATA, adapter__type="lora", adapter__r=4, adapter__init_lora_weights=start, train__learning_rate=1e-30,
        train__max_steps=1,
    )  # fmt: skip
    ours = load_file(tmp_path / "run" / "initial_adapter" / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base")
    rows = [DATA.train[number] for number in range(8)]
    settings: dict[str, Any] = {"lora_ga_config": LoraGAConfig()} if start == "lora_ga" else {}
    if start == "corda":
        settings["corda_config"] = CordaConfig()
    told = json.loads((tmp_path / "run" / "initial_adapter" / "adapter_config.json").read_text())
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=told["target_modules"], init_lora_weights=start, **settings)

    def logits(row: Any) -> torch.Tensor:
        return base(torch.from_numpy(row.input_ids.astype(np.int64))[None]).logits[0]

    if start == "lora_ga":
        learned = [torch.from_numpy(np.flatnonzero(row.target)) for row in rows]

        def step() -> None:
            losses = [
                torch.nn.functional.cross_entropy(
                    logits(row)[places - 1],
                    torch.from_numpy(row.input_ids.astype(np.int64))[places],
                    reduction="sum",
                )
                for row, places in zip(rows, learned, strict=True)
            ]
            (torch.stack(losses).sum() / sum(map(len, learned)) * len(rows)).backward()  # PEFT divides by its calls

        preprocess_loraga(base, lora, step)
    else:
        seen: dict[str, list[torch.Tensor]] = {}
        layers = dict(corda.target_modules(base, lora))
        hooks = [
            layer.register_forward_pre_hook(lambda _, inputs, name=name: seen.setdefault(name, []).append(inputs[0][0]))
            for name, layer in layers.items()
        ]
        with torch.no_grad():
            [logits(row) for row in rows]
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            inputs = torch.cat(seen[name])
            layer.covariance_matrix = (inputs / inputs.max().abs()).T @ (inputs / inputs.max().abs())
            layer.corda_method, layer.rank = "ipm", 4
        corda.collect_eigens(base, lora, verbose=False)
        corda.crop_corda_eigens(base, lora)
    theirs = get_peft_model(base, lora)
    for name, values in theirs.state_dict().items():
        if "lora_" in name:
            own = ours[name.replace(".default", "")]
            torch.testing.assert_close(own.abs(), values.abs(), rtol=2e-3, atol=2e-4 * float(values.abs().max()))


@pytest.mark.parametrize("start", ["corda", "lora_ga"])
def test_first_values_are_found_beside_the_checkpoint_of_another_run(start: str, train: Train, tmp_path: Path) -> None:
    keys = {"adapter__type": "lora", "adapter__r": 4, "adapter__init_lora_weights": start, "train__max_steps": 4,
            "output__save_strategy": "steps", "output__save_steps": 2}  # fmt: skip
    whole = train(DATA, **keys)
    again = train(DATA, folder="other", output__resume=str(tmp_path / "run" / "checkpoint-2"), **keys)
    assert [s.loss for s in again.steps] == pytest.approx([s.loss for s in whole.steps], rel=1e-6)
    kept = [tmp_path / folder / "initial_adapter" / "adapter_model.safetensors" for folder in ("run", "other")]
    assert kept[0].read_bytes() == kept[1].read_bytes(), "the other run can go on without the first one's folder"
    saved = [load_file(tmp_path / folder / "model" / "adapter_model.safetensors") for folder in ("run", "other")]
    assert all(torch.allclose(saved[0][name], saved[1][name], atol=1e-5) for name in saved[0])


def test_a_run_whose_first_values_are_lost_does_not_go_on(train: Train, tmp_path: Path) -> None:
    keys = {"adapter__type": "lora", "adapter__init_lora_weights": "lora_ga", "output__save_strategy": "steps",
            "output__save_steps": 2}  # fmt: skip
    train(DATA, train__max_steps=2, **keys)
    file = tmp_path / "run" / "initial_adapter" / "adapter_model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ModelError, match="missing or damaged"):
        train(DATA, train__max_steps=4, **keys)


def test_targets_are_suffixes_or_patterns() -> None:
    def targets(*patterns: str) -> set[str]:
        section = AdapterConfig(type=AdapterType.LORA, target_modules=list(patterns))
        model = adapters.apply_adapter(_model(), section)
        return {n.split(".lora_A")[0].removeprefix("base_model.model.") for n in _trained(model) if "lora_A" in n}

    assert targets("q_proj") == {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}
    assert targets("model.layers.2.mlp.*") == {f"model.layers.2.mlp.{m}_proj" for m in ("gate", "up", "down")}
    assert len(targets("all-linear")) == 3 * 7


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"target_modules": ["q_porj"]}, "no linear module matches 'q_porj'(.|\n)*model.layers.N.self_attn.q_proj"),
        ({"target_modules": ["all-linear", "q_proj"]}, "stands alone"),
        ({"modules_to_save": ["head"]}, "no module 'head'"),
        ({"name_or_path": "nowhere/at/all"}, "is not an adapter"),
        (
            {"target_parameters": ["experts.up"]},
            "no parameter 'experts.up'(.|\n)*model.layers.N.self_attn.q_proj.weight",
        ),
        ({"rank_pattern": {"q_porj": 8}}, "ends with 'q_porj'(.|\n)*model.layers.N.self_attn.q_proj"),
        ({"alpha_pattern": {"lm_head": 8.0}}, "ends with 'lm_head'"),  # it is not adapted
        *[
            ({"target_modules": ["embed_tokens"], "init_lora_weights": start}, "only the embedding")
            for start in ("eva", "lora_ga", "pissa")
        ],
    ],
)
def test_adapters_that_cannot_be_are_refused_with_the_names_there_are(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        adapters.apply_adapter(_model(), AdapterConfig(type=AdapterType.LORA, **keys))


def test_experts_in_one_tensor_are_refused_where_an_adapter_begins_from_the_weights_of_linear_layers() -> None:
    section = AdapterConfig(
        type=AdapterType.LORA,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.down_proj"],
        init_lora_weights="pissa",
    )
    with pytest.raises(ModelError, match="init_lora_weights pissa"):
        adapters.apply_adapter(cast(Any, tiny_model("qwen3_moe")), section)


def _with_unlike_layers(name: str) -> tuple[PreTrainedModel, str]:
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    match name:
        case "llama4":
            experts = {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}
            config = Llama4TextConfig(**size, **heads, **experts, head_dim=16)
            return Llama4ForCausalLM(config), "model.layers.N.feed_forward.router"
        case "phimoe":
            moe = PhimoeConfig(**size, **heads, num_local_experts=4)
            return PhimoeForCausalLM(moe), "model.layers.N.mlp.router"
    latent = {"q_lora_rank": 16, "o_lora_rank": 16, "head_dim": 32, "index_head_dim": 16, "index_n_heads": 2}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    deepseek = DeepseekV4Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, o_groups=2, num_attention_heads=4, **latent, **experts
    )
    return DeepseekV4ForCausalLM(deepseek), "model.layers.N.self_attn.o_a_proj"


@pytest.mark.parametrize("name", ["llama4", "phimoe", "deepseek_v4"])
def test_layers_that_are_linear_by_name_alone_get_no_adapter_and_are_not_quantized(name: str) -> None:
    model, unlike = _with_unlike_layers(name)
    kept = kept_modules(model, QuantizationConfig())
    expected = model.eval()(IDS % 64).logits
    section = AdapterConfig(type=AdapterType.LORA)
    adapted = adapters.apply_adapter(model, section)
    torch.testing.assert_close(adapted.eval()(IDS % 64).logits, expected)
    told = adapter_targets.left_out(model, section)
    assert any(unlike in each and each.endswith("(they give something else than a linear layer)") for each in told)
    assert any(unlike.rpartition(".")[2] in each for each in kept)
    pattern = unlike.rpartition(".")[2]
    refused = AdapterConfig(type=AdapterType.LORA, target_modules=[pattern])
    with pytest.raises(ModelError, match=f"no linear module matches '{pattern}'"):
        adapters.apply_adapter(_with_unlike_layers(name)[0], refused)


@pytest.mark.parametrize("how", ["answered", "continued", "merged"])
def test_modules_that_were_trained_in_32_bits_keep_them_wherever_their_adapter_is_loaded(
    how: str, tmp_path: Path
) -> None:
    section = AdapterConfig(type=AdapterType.LORA, modules_to_save=["norm", "lm_head"])
    trained = adapters.apply_adapter(tiny_model("qwen3").to(torch.bfloat16), section)
    with torch.no_grad():
        for weight in trained.parameters():
            if weight.requires_grad:
                weight += 1e-3  # a quarter of the distance of numbers around 1 in bfloat16
    adapter_files.save_adapter(cast(Any, trained), tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    base = tiny_model("qwen3").to(torch.bfloat16)
    if how == "continued":
        found = adapters.apply_adapter(base, section.model_copy(update={"name_or_path": str(tmp_path)}))
    else:
        found = adapter_files.load_to_answer(base, str(tmp_path))
    if how == "merged":
        found = adapter_files.merge_adapter(cast(PeftModel, found), torch.float32)
    held = {name.replace("modules_to_save.default.", ""): weight for name, weight in found.state_dict().items()}
    prefix = "base_model.model." if how == "merged" else ""
    whole = [name for name in saved if "lora" not in name]
    assert len(whole) > 5
    for name in whole:
        assert torch.equal(held[name.removeprefix(prefix)], saved[name]), name


def test_a_linear_layer_of_a_models_own_code_that_takes_other_inputs_gets_no_adapter() -> None:
    class Gated(torch.nn.Linear):
        __module__ = "transformers_modules.own.modeling_own"

        def forward(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(rows) * gate

    assert unlike_linear(torch.nn.ModuleDict({"plain": torch.nn.Linear(4, 4), "gated": Gated(4, 4)})) == ["gated"]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_layers_of_gpt_2s_kind_are_named_like_linear_ones_and_refused_where_peft_does_not_adapt_them() -> None:
    def model() -> Any:
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=96))

    for kind in (AdapterType.LORA, AdapterType.VERA):
        adapted = adapters.apply_adapter(model(), AdapterConfig(type=kind, target_modules=["c_attn"]))
        assert any("c_attn" in name for name in _trained(adapted))
    with pytest.raises(ModelError, match=r"adapter\.type oft: Target module Conv1D"):
        adapters.apply_adapter(model(), AdapterConfig(type=AdapterType.OFT))


def test_an_existing_adapter_is_gone_on_from(train: Train, tmp_path: Path) -> None:
    first = train(DATA, folder="first", adapter__type="lora", adapter__r=4, train__learning_rate=1e-2)
    adapter = str(tmp_path / "first" / "model")
    again = train(DATA, folder="again", adapter__type="lora", adapter__name_or_path=adapter, train__learning_rate=1e-30)
    fresh = train(DATA, folder="fresh", adapter__type="lora", adapter__r=4, train__learning_rate=1e-30)
    assert first.steps[0].loss == pytest.approx(fresh.steps[0].loss)
    assert again.steps[0].loss < fresh.steps[0].loss - 1e-3
    assert again.model.trainable_parameters == first.model.trainable_parameters
    with pytest.raises(ModelError, match=r"is of type lora, adapter.type is oft"):
        train(DATA, folder="other", adapter__type="oft", adapter__name_or_path=adapter)


@pytest.mark.filterwarnings(PEFT_NOISE)
@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
def test_an_adapter_that_is_gone_on_from_has_the_losses_and_the_weights_of_peft_by_hand(
    train: Train, tmp_path: Path, more: dict[str, Any]
) -> None:
    keys = {"train__max_steps": 3, "train__per_device_train_batch_size": 12, "train__max_grad_norm": 0,
            "train__learning_rate": 1e-2, "train__lr_scheduler_type": "constant"}  # fmt: skip
    adapter = {"type": "lora", "r": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "down_proj"], **more}
    first = train(DATA, folder="first", adapter=adapter, **keys)
    gone_on = {"type": "lora", "name_or_path": str(tmp_path / "first" / "model")}
    base = str(tmp_path / "first" / "base")
    second = train(DATA, folder="second", model={"name_or_path": base}, adapter=gone_on, **keys)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "first" / "model", is_trainable=True
    )
    expected = losses_by_hand(model, padded_batch(DATA.train), 3, 1e-2)
    assert [step.loss for step in second.steps] == pytest.approx(expected, abs=1e-5)
    assert expected[0] < first.steps[-1].loss, "it goes on"
    model.save_pretrained(tmp_path / "by_hand")
    told = [tmp_path / folder for folder in ("second/model", "by_hand")]
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in told)
    assert ours.keys() == theirs.keys() and any("magnitude" in name for name in ours) == ("use_dora" in more)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    settings = [json.loads((folder / "adapter_config.json").read_text()) for folder in told]
    for each in settings:
        each.pop("base_model_name_or_path"), each["target_modules"].sort()
    assert settings[0] == settings[1]


@pytest.mark.filterwarnings(
    PEFT_NOISE, "ignore:Found missing adapter keys:UserWarning"
)  # of what PEFT sets in a resume
def test_matrices_whose_names_peft_takes_for_those_of_the_base_s_files_are_loaded_wherever_an_adapter_is(
    tmp_path: Path,
) -> None:
    size = {"hidden_size": 32, "head_dim": 16, "num_hidden_layers": 2, "moe_intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
    config = LagunaConfig(**size, **heads, intermediate_size=48, shared_expert_intermediate_size=16)
    torch.manual_seed(0)
    base = LagunaForCausalLM(config).eval()

    def copied() -> PreTrainedModel:
        made = LagunaForCausalLM(config).eval()
        made.load_state_dict(base.state_dict())
        return made

    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]  # those of the shared experts are what PEFT renames
    trained = get_peft_model(copied(), LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    adapter_files.save_adapter(trained, tmp_path)
    restored = get_peft_model(copied(), LoraConfig(r=2, target_modules=targets)).eval()
    restore_weights(restored, tmp_path)
    section = AdapterConfig(type=AdapterType.LORA, name_or_path=str(tmp_path), merge_first=[str(tmp_path)])
    wanted = trained(IDS % 64).logits
    for found in (
        restored,
        adapter_files.load_to_answer(copied(), str(tmp_path)),
        adapter_files.continue_adapter(copied(), section, str(tmp_path)).eval(),
        adapter_files.merge_first(copied(), section),
    ):
        torch.testing.assert_close(found(IDS % 64).logits, wanted, rtol=1e-4, atol=1e-5)


def test_ranks_and_scales_by_pattern_are_those_of_peft() -> None:
    keys = VARIANTS["patterns"]
    model = adapters.apply_adapter(_model(), AdapterConfig(type=AdapterType.LORA, r=4, **keys))
    layers = model.base_model.model.model.layers
    assert [layers[1].self_attn.q_proj.r["default"], layers[1].self_attn.q_proj.scaling["default"]] == [8, 4.0]
    assert [layer.mlp.up_proj.r["default"] for layer in layers] == [4, 2, 4]
    assert layers[0].mlp.up_proj.scaling["default"] == 2.0


# ------------------------------------------------------------------------------------------------------------- EVA


def test_eva_begins_with_the_main_directions_of_each_layers_inputs_and_padding_counts_nowhere(
    tmp_path: Path, tokenizer: Tokenizer, train: Train
) -> None:
    keys = {"adapter__type": "lora", "adapter__r": 3, "adapter__init_lora_weights": "eva"}
    train(DATA, folder="eva", train__max_steps=1, train__learning_rate=1e-30, **keys)
    loaded = load_file(tmp_path / "eva" / "model" / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "eva" / "base").eval()
    inputs: list[torch.Tensor] = []
    projection = base.model.layers[1].mlp.down_proj
    hook = projection.register_forward_pre_hook(
        lambda _, given: inputs.append(given[0].reshape(-1, given[0].shape[-1]))
    )
    with torch.no_grad():
        for segment in DATA.train[:8]:  # one batch, which is what 12 rows make
            base(torch.from_numpy(segment.input_ids.astype(np.int64))[None])
    hook.remove()
    rows = torch.cat(inputs)
    directions = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False).Vh[:3]
    ours = loaded["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    alike = (torch.nn.functional.normalize(ours, dim=1) * directions).sum(dim=1).abs()
    assert alike.min() > 0.98
    assert not any(tensor.abs().max() > 1e-20 for name, tensor in loaded.items() if "lora_B" in name)
    assert '"eva_config": null' in (tmp_path / "eva" / "model" / "adapter_config.json").read_text()


def test_eva_resumes_exactly_and_wants_as_many_tokens_as_its_rank(train: Train, tmp_path: Path) -> None:
    keys = {"adapter__type": "lora", "adapter__r": 4, "adapter__init_lora_weights": "eva", "train__max_steps": 4}
    whole = train(DATA, output__save_strategy="steps", output__save_steps=2, **keys)
    saved = {path.name: path.read_bytes() for path in (tmp_path / "run" / "model").glob("adapter_*")}
    (tmp_path / "run" / "checkpoint-4" / "manifest.json").unlink()
    again = train(DATA, output__save_strategy="steps", output__save_steps=2, **keys)
    assert again.resumed_from == "checkpoint-2"
    assert [step.loss for step in again.steps] == [step.loss for step in whole.steps]
    resumed = {path.name: path.read_bytes() for path in (tmp_path / "run" / "model").glob("adapter_*")}
    told = [json.loads(each.pop("adapter_config.json")) for each in (saved, resumed)]
    assert saved == resumed and all(each["init_lora_weights"] is True and each["eva_config"] is None for each in told)
    few = make_data(make_segments(1, longest=8))
    with pytest.raises(ModelError, match=r"fewer than adapter\.r, 32"):
        train(few, folder="few", **{**keys, "adapter__r": 32})


# -------------------------------------------------------------------------------------------------------- experts


def test_fused_experts_learn_beside_their_frozen_weights(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODELS["qwen3_moe"]().config.save_pretrained(tmp_path / "moe")
    keys = {"type": "lora", "r": 2, "target_modules": ["q_proj"], "merge": True}
    keys["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = {"name_or_path": str(tmp_path / "moe"), "random_init": True, "config_overrides": {"vocab_size": 2048}}
    config = make_config(tmp_path / "run", model=model, adapter=keys, train__max_steps=6, train__learning_rate=1e-2)
    fit_data(config, tokenizer, DATA)
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    learned = [name for name, tensor in saved.items() if "experts" in name and "lora_B" in name and tensor.any()]
    assert len(learned) == 2 * result_layers(tmp_path / "run" / "base")
    base = load_file(tmp_path / "run" / "base" / "model.safetensors")
    merged = load_file(tmp_path / "run" / "merged" / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed and all("experts" in name or "q_proj" in name for name in changed)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-5)


def result_layers(folder: Path) -> int:
    count: int = AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers
    return count


def test_experts_are_computed_as_is_asked_for_and_give_the_same() -> None:
    model: Any = MODELS["qwen3_moe"]().eval()
    ids, found = torch.tensor([[5, 6, 7, 8, 9]]), []
    for way in ("eager", "batched_mm", "grouped_mm"):
        choose_experts(model, way)
        assert model.config._experts_implementation == way
        with torch.no_grad():
            found.append(model(ids).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="has no experts"):
        choose_experts(_model(), "eager")


# ----------------------------------------------------------------------------------------------------- new layers


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "qwen3_moe", "mistral", "gpt_oss", "qwen3_next"])
def test_new_layers_change_nothing_at_first_and_are_trained_alone(family: str) -> None:
    model: Any = {**MODELS, **RECURRENT_MODELS}[family]().eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    depth = len(adapters.decoder_layers(model) or ())
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        expected = model(ids).logits
    adapters.apply_adapter(model, AdapterConfig(type=AdapterType.LLAMA_PRO, expand_layers=2))
    layers = adapters.decoder_layers(model) or ()
    assert len(layers) == model.config.get_text_config().num_hidden_layers == depth + 2
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, expected)
    new = [number for number, layer in enumerate(layers) if any(weight.requires_grad for weight in layer.parameters())]
    assert len(new) == 2 and new[-1] == depth + 1  # the last is behind the last
    stack = next(name for name, module in model.named_modules() if module is layers)
    assert _trained(model) == {name for name, _ in model.named_parameters()
                               if any(name.startswith(f"{stack}.{number}.") for number in new)}  # fmt: skip
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    assert sum(weight.numel() for weight in frozen.values()) == sum(weight.numel() for weight in _own(before, model))
    model.train()(ids, labels=ids).loss.backward()
    assert all(any(weight.grad.any() for weight in layers[n].parameters() if weight.grad is not None) for n in new)


def _own(state: dict[str, torch.Tensor], model: Any) -> list[torch.Tensor]:
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    return [
        weight
        for name, weight in state.items()
        if not (tied and name.startswith("lm_head")) and name.rpartition(".")[2] not in buffers
    ]


def test_a_list_that_is_as_long_as_the_layers_by_chance_stays_in_the_config() -> None:
    limits = (0.0, float("inf"))
    shape = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "vocab_size": 96}
    model: Any = Mamba2ForCausalLM(Mamba2Config(**shape, num_hidden_layers=2, time_step_limit=limits))
    adapters.apply_adapter(model, AdapterConfig(type=AdapterType.LLAMA_PRO, expand_layers=2))
    assert model.config.num_hidden_layers == 4 and tuple(model.config.time_step_limit) == limits
    by_layer: Any = tiny_model("gemma3")
    adapters.apply_adapter(by_layer, AdapterConfig(type=AdapterType.LLAMA_PRO, expand_layers=2))
    assert by_layer.config.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2


def test_a_model_with_new_layers_learns_resumes_and_loads_in_transformers(train: Train, tmp_path: Path) -> None:
    train(DATA, folder="start", train__learning_rate=1e-30, train__max_steps=1)
    keys = {"adapter": {"type": "llama_pro", "expand_layers": 2}, "train__learning_rate": 1e-2, "train__max_steps": 6,
            "model": {"name_or_path": str(tmp_path / "start" / "model")}}  # fmt: skip
    keys |= {"output__save_strategy": "steps", "output__save_steps": 3, "train__per_device_train_batch_size": 12}
    whole = train(DATA, folder="whole", **keys)
    assert whole.steps[-1].loss < whole.steps[0].loss - 0.01
    expanded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start" / "model")
    assert expanded.config.num_hidden_layers == 4 == len(expanded.config.layer_types)
    for new, old in ((0, 0), (2, 1)):  # the second and the fourth are new
        for one, other in zip(
            expanded.model.layers[new].parameters(), start.model.layers[old].parameters(), strict=True
        ):
            assert torch.equal(one, other)
    train(DATA, folder="part", **keys)
    for name in ("checkpoint-6", "model"):
        (tmp_path / "part" / name).rename(tmp_path / name)
    (tmp_path / "part" / "result.json").unlink()
    resumed = train(DATA, folder="part", **keys)
    assert resumed.resumed_from == "checkpoint-3"
    assert [step.loss for step in resumed.steps] == [step.loss for step in whole.steps]


def test_new_layers_that_would_do_something_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    section = AdapterConfig(type=AdapterType.LLAMA_PRO, expand_layers=1)
    with pytest.raises(ModelError, match=r"expand_layers is 9, and .* has 3 decoder layers"):
        adapters.apply_adapter(_model(), section.model_copy(update={"expand_layers": 9}))
    monkeypatch.setattr(adapters, "_WRITES", re.compile(r"\.o_proj\.weight$"))
    with pytest.raises(ModelError, match="changes what the model computes"):
        adapters.apply_adapter(_model(), section)


# --------------------------------------------------------------------------------------------- merged before a run


def test_adapters_are_merged_in_their_order_before_a_new_one_is_trained(
    train: Train, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    base, names = tmp_path / "first" / "base", ["first", "second"]
    fast = {"adapter__type": "lora", "adapter__r": 4, "train__learning_rate": 5e-2}
    train(DATA, folder="first", **fast)
    # the norms of DoRA make the order of two adapters matter
    train(DATA, folder="second", model={"name_or_path": str(base)}, adapter__use_dora=True, **fast)
    expected = {}
    for order in (names, names[::-1]):
        model = AutoModelForCausalLM.from_pretrained(base)
        for name in order:
            model = PeftModel.from_pretrained(model, tmp_path / name / "model").merge_and_unload()
        expected[order[0]] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folders = [str(tmp_path / name / "model") for name in names]
    keys = {"adapter__type": "lora", "adapter__merge_first": folders, "adapter__r": 2}
    train(DATA, folder="third", model={"name_or_path": str(base)}, train__learning_rate=1e-2, **keys)
    saved = load_file(tmp_path / "third" / "base" / "model.safetensors")
    assert all(torch.equal(tensor, expected["first"][name]) for name, tensor in saved.items())
    assert any(not torch.equal(tensor, expected["second"][name]) for name, tensor in saved.items())
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "third" / "model")
    assert loaded.peft_config["default"].base_model_name_or_path == str((tmp_path / "third" / "base").resolve())


def test_what_is_merged_first_is_trained_on_whole_too(train: Train, tmp_path: Path) -> None:
    train(DATA, folder="first", adapter__type="lora", adapter__r=4, train__learning_rate=5e-2)
    base, first = str(tmp_path / "first" / "base"), str(tmp_path / "first" / "model")
    on = train(DATA, folder="on", model={"name_or_path": base}, adapter__type="lora", adapter__name_or_path=first)
    whole = train(DATA, folder="whole", model={"name_or_path": base}, adapter__merge_first=[first])
    assert whole.steps[0].loss == pytest.approx(on.steps[0].loss, rel=1e-5)
    assert whole.model.trainable_parameters == whole.model.parameters
    assert not (tmp_path / "whole" / "base").exists()  # a whole model needs none


def test_what_cannot_be_merged_first_is_refused_with_its_place(tmp_path: Path) -> None:
    model = _model()
    for merge in (lambda: adapter_files.merge_first(model, AdapterConfig(merge_first=[str(tmp_path)])),
                  lambda: adapter_files.check_mergeable(model, str(tmp_path), "adapter.merge_first[0]")):  # fmt: skip
        with pytest.raises(ModelError, match=r"adapter\.merge_first\[0\]"):
            merge()
    other = adapters.apply_adapter(Qwen3ForCausalLM(Qwen3Config(**{**_model().config.to_dict(), "hidden_size": 64})),
                                   AdapterConfig(type=AdapterType.LORA, r=4))  # fmt: skip
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"adapter\.merge_first\[0\](.|\n)*the model wants"):
        adapter_files.check_mergeable(model, str(tmp_path / "other"), "adapter.merge_first[0]")
    assert not any("lora" in name for name, _ in model.named_modules())


@pytest.mark.parametrize(("settings", "merges"), [
    (IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"), True),
    (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), False),
])  # fmt: skip
def test_a_type_that_is_not_trained_is_refused_with_a_way_out_that_is_there(
    settings: PeftConfig, merges: bool, tmp_path: Path
) -> None:
    get_peft_model(_model(), settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is of type") as caught:
        adapter_files.check_existing(AdapterConfig(type=AdapterType.LORA), str(tmp_path))
    assert caught.value.hint and "adapter.type" not in caught.value.hint
    assert ("adapter.merge_first" in caught.value.hint) is merges
    section = AdapterConfig(merge_first=[str(tmp_path)])
    if merges:
        adapter_files.check_mergeable(_model(), str(tmp_path), "adapter.merge_first[0]")
        adapter_files.merge_first(_model(), section)
        return
    with pytest.raises(ModelError, match=r"adapter\.merge_first\[0\].*prompt_tuning"):
        adapter_files.merge_first(_model(), section)
    with pytest.raises(ModelError, match=r"adapter\.merge_first\[0\].*prompt_tuning"):
        adapter_files.check_mergeable(_model(), str(tmp_path), "adapter.merge_first[0]")


# -------------------------------------------------------------------------------- adapters of a model of another task


def _judge(base: PreTrainedModel) -> PreTrainedModel:
    """A reward model of the same layers as `_model`'s."""
    torch.manual_seed(1)
    judge = Qwen3ForSequenceClassification(Qwen3Config(**{**base.config.to_dict(), "num_labels": 1, "pad_token_id": 0}))
    judge.model.load_state_dict(cast(Any, base).model.state_dict())
    return judge.eval()


@pytest.mark.parametrize("kind", [AdapterType.LORA, AdapterType.OFT])
@pytest.mark.parametrize("first", ["answers", "judges"])
def test_an_adapter_of_a_model_of_another_task_is_gone_on_from_and_merged(
    kind: AdapterType, first: str, tmp_path: Path
) -> None:
    def made(of: str) -> PreTrainedModel:
        return (_model() if of == "answers" else _judge(_model())).eval()

    then = {"answers": "judges", "judges": "answers"}[first]
    section = AdapterConfig(type=kind, r=4, oft_block_size=4)
    trained = adapters.apply_adapter(made(first), section)
    with torch.no_grad():
        for name, values in trained.named_parameters():
            if ".lora_" in name or ".oft_" in name:
                values.copy_(torch.randn_like(values) / 5)
    adapter_files.save_adapter(trained, tmp_path / "first")
    layers = made(then)
    merged = cast(Any, trained).merge_and_unload()
    cast(Any, layers).model.load_state_dict(merged.model.state_dict())

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return cast(torch.Tensor, model(input_ids=IDS % 128).logits)

    expected = logits(layers)
    assert not torch.allclose(expected, logits(made(then)), atol=1e-3)  # it does something
    on = AdapterConfig(type=kind, name_or_path=str(tmp_path / "first"))
    adapted = adapters.apply_adapter(made(then), on).eval()
    assert torch.allclose(logits(adapted), expected, atol=1e-5)
    assert any("score" in name for name in _trained(adapted)) == (then == "judges")
    adapter_files.save_adapter(adapted, tmp_path / "on")
    assert torch.allclose(logits(PeftModel.from_pretrained(made(then), tmp_path / "on").eval()), expected, atol=1e-5)
    shaped = adapter_files.shape_existing(made(then), on, str(tmp_path / "first"))
    assert _trained(shaped) == _trained(adapted)
    adapter_files.check_mergeable(made(then), str(tmp_path / "first"), "adapter.merge_first[0]")
    whole = adapter_files.merge_first(made(then), AdapterConfig(merge_first=[str(tmp_path / "first")]))
    assert torch.allclose(logits(whole), expected, atol=1e-5)


def test_a_run_named_in_place_of_its_adapter_is_told_where_that_is(train: Train, tmp_path: Path) -> None:
    run = str(tmp_path / "first")
    train(DATA, folder="first", adapter__type="lora", adapter__r=4)
    with pytest.raises(ModelError, match=r"has no adapter_config\.json") as refused:
        train(DATA, folder="again", adapter__type="lora", adapter__name_or_path=run)
    assert refused.value.hint == f"set adapter.name_or_path: {run}/model"
