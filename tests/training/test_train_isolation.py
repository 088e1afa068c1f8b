"""What keeps segments apart is tried on the model; runs are refused where nothing does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, tiny_model, tree
from tiny_runs import make_config, make_data, make_segments
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3ForCausalLM,
)

from luthier.collation import CollateSettings
from luthier.collation.collator import collate_packs, collate_trees
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models.attention import SEGMENTS, AttentionPlan
from luthier.models.isolation import ChosenIsolation, check_rows, choose_isolation
from luthier.models.mixers import Isolation
from luthier.records import Pack
from luthier.training.fit import fit_data

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
HOW = CollateSettings(packed=True, pad_token_id=0)
CPU = torch.device("cpu")


class Forgetful(LlamaForCausalLM):
    """A model that does not look at positions."""

    def forward(self, position_ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        return super().forward(**inputs)


def _by_positions(model: torch.nn.Module) -> ChosenIsolation:
    return choose_isolation(model, make_segments(3), HOW, device=CPU, asked="sdpa")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_isolate_pass_in_every_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for model in (
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    ):
        model.to(dtype).train()
        assert _by_positions(model).isolation is Isolation.POSITIONS
        assert model.training


def test_a_model_that_ignores_positions_is_not_told_by_positions() -> None:
    found = _by_positions(Forgetful(LlamaConfig(**SIZES)))
    assert found.isolation is Isolation.MASKS and "sdpa by positions: changing one" in found.notes[0]


def test_a_real_architecture_that_mixes_segments_is_refused() -> None:
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1))
    with pytest.raises(ModelError, match="GptOssForCausalLM does not keep packed sequences apart"):
        _by_positions(model)


TINY = [segment for seed in (1, 2) for segment in tree(2, 30, seed=seed).segments()]
SHORT: dict[str, Any] = {**SIZES, "vocab_size": 96, "initializer_range": 0.2}


def _choose(model: torch.nn.Module, **more: Any) -> ChosenIsolation:
    return choose_isolation(model, TINY, HOW, device=CPU, **more)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_our_attention_is_taken_where_it_holds(name: str, shared: bool) -> None:
    model = tiny_model(name)
    chosen = _choose(model, shared=shared)
    assert (chosen.isolation, chosen.attention, chosen.notes) == (Isolation.SEGMENTS, SEGMENTS, ())
    assert model.config._attn_implementation == SEGMENTS and model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_leak(dtype: torch.dtype) -> None:
    for name in ("qwen3", "mistral"):
        for shared in (False, True):
            assert _choose(tiny_model(name).to(dtype), shared=shared).isolation is Isolation.SEGMENTS


def test_what_the_user_asks_for_is_taken_or_refused_but_not_replaced() -> None:
    assert _choose(tiny_model("llama"), asked="sdpa").isolation is Isolation.POSITIONS
    assert _choose(tiny_model("llama"), asked="sdpa", shared=True).isolation is Isolation.MASKS
    found = _choose(tiny_model("gpt_oss"), asked="eager")
    assert found.isolation is Isolation.MASKS and found.additive and "by positions: changing one" in found.notes[0]
    with pytest.raises(ModelError, match=r"GptOss.*does not keep packed sequences apart: sdpa by positions(.|\n)*none"):
        _choose(tiny_model("gpt_oss"), asked="sdpa")


def test_a_model_that_computes_no_row_is_not_said_to_mix_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, **inputs: Any) -> Any:
        raise IndexError("no such expert")

    model = tiny_model("llama")
    model.set_attn_implementation("flex_attention")  # as one that is not called before ways of isolation are tried
    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ModelError, match=r"^LlamaForCausalLM cannot compute its first rows: .*no such expert"):
        _choose(model)


def test_chunked_attention_is_left_to_transformers() -> None:
    sizes = {**SHORT, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8}
    chosen = _choose(Llama4ForCausalLM(Llama4TextConfig(**sizes)))
    assert chosen.isolation is Isolation.POSITIONS and "chunked_attention" in chosen.notes[0]


def test_models_that_attend_by_themselves_get_masks_or_rows_of_one_segment() -> None:
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.2}
    falcon = _choose(FalconForCausalLM(FalconConfig(**sizes, num_hidden_layers=2)))
    ways = (Isolation.MASKS, 2), (Isolation.POSITIONS, 1)  # Falcon reads positions as of transformers 5.24
    assert (falcon.isolation, len(falcon.notes)) in ways and "its layers (sdpa)" in falcon.notes[0]
    bloom = _choose(BloomForCausalLM(BloomConfig(**sizes, n_layer=2)))
    assert bloom.isolation is Isolation.PADDED and len(bloom.notes) == 3


def mamba() -> Mamba2ForCausalLM:
    """Nothing but recurrent layers."""
    sizes = {name: SHORT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")}
    torch.manual_seed(0)
    return Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=16))


def test_models_that_are_recurrent_in_all_layers_get_rows_of_one_segment() -> None:
    model = mamba()
    chosen = _choose(model)
    assert chosen.isolation is Isolation.PADDED and chosen.mixers == () and "carry a state" in chosen.notes[0]
    assert _choose(model, shared=True).isolation is Isolation.PADDED
    with pytest.raises(ModelError, match="Mamba2ForCausalLM does not keep branches apart"):
        _choose(model, shared=True, asked="eager")


@pytest.mark.parametrize("shared", [False, True])
def test_such_a_model_computes_each_segment_alone(shared: bool) -> None:
    model = mamba().eval()
    chosen = _choose(model, shared=shared)
    samples = [tree(9, 5, 7, seed=1), tree(6, 11, 4, seed=2)]
    leaves = tuple(leaf for sample in samples for leaf in sample.segments())
    batch = (
        collate_trees([samples], pad_token_id=0)
        if shared
        else collate_packs([Pack(segments=leaves)], packed=True, pad_token_id=0)
    )
    batch = chosen.arranged(batch, pad_token_id=0)
    with torch.no_grad():
        logits_NV = model(**chosen.inputs(batch, device=CPU)).logits.flatten(0, 1)
        alone = [model(input_ids=torch.tensor(leaf.input_ids[None].astype("int64"))).logits[0] for leaf in leaves]
    expected_KV = torch.cat([logits[leaf.target.nonzero()[0] - 1] for logits, leaf in zip(alone, leaves, strict=True)])
    torch.testing.assert_close(logits_NV[batch.targets.positions_K], expected_KV, atol=1e-4, rtol=1e-4)


class Absolute(LlamaForCausalLM):
    """A model that keeps segments apart but counts positions on through the row."""

    def forward(self, position_ids: torch.Tensor, **inputs: Any) -> Any:
        return super().forward(position_ids=torch.arange(position_ids.shape[1])[None] ** 2, **inputs)


def test_control_packed_logits_that_are_not_those_of_the_segment_alone_are_found() -> None:
    with pytest.raises(ModelError, match="packed logits differ by"):
        _choose(Absolute(LlamaConfig(**SHORT)), asked=SEGMENTS)


class Leaky(LlamaForCausalLM):
    """A model that tells its attention that the row is one segment."""

    def forward(self, attention_plan: AttentionPlan | None = None, **inputs: Any) -> Any:
        if attention_plan is not None:
            whole = AttentionPlan(lengths=(sum(attention_plan.lengths),), contexts=((),))
            inputs["attention_plan"] = whole
        return super().forward(**inputs)


@pytest.mark.parametrize("shared", [False, True])
def test_control_a_leaking_plan_is_found_and_the_next_way_is_taken(shared: bool) -> None:
    chosen = _choose(Leaky(LlamaConfig(**SHORT)), shared=shared)
    assert chosen.isolation is (Isolation.MASKS if shared else Isolation.POSITIONS)
    assert "luthier_segments by segments: changing one moved the logits" in chosen.notes[0]


def test_a_model_that_reads_padding_is_refused_where_rows_are_padded(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Qwen3ForCausalLM.forward

    def forward(self: Any, **inputs: Any) -> Any:
        found = read(self, **inputs)
        if (mask := inputs["attention_mask"]).all():
            return found
        found.logits = found.logits + mask.logical_not().sum(1)[:, None, None]
        return found

    def run(size: int) -> None:
        batch = {"train__per_device_train_batch_size": size, "eval__per_device_eval_batch_size": size}
        config = make_config(tmp_path / str(size), train__packing="none", train__max_steps=1, **batch)
        fit_data(config, tokenizer, make_data(make_segments(4)))

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", forward)
    with pytest.raises(ModelError, match="Qwen3ForCausalLM reads a padded row otherwise: padded logits differ by"):
        run(2)
    run(1)


def test_a_model_that_sees_both_ways_is_not_trained_as_one_that_sees_what_is_before() -> None:
    model = BertLMHeadModel(BertConfig(**{**SHORT, "max_position_embeddings": 64}))
    with pytest.raises(ModelError, match="sdpa by masks: packed logits differ by"):
        _choose(model, asked="sdpa")
    with pytest.raises(ModelError, match="BertLMHeadModel sees what comes later in a row: with later tokens"):
        check_rows(model, TINY[0], HOW, padded=False, device=CPU)


SCALED = {
    "floor_scale": 40, "no_rope_layers": [0, 1], "attention_chunk_size": 40, "num_local_experts": 2,
    "intermediate_size_mlp": 64, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("longest", [39, 128])
def test_a_model_whose_attention_counts_places_in_the_row_has_rows_of_one_sequence_where_they_are_long(
    longest: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "model"
    size = {**SIZES, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": None}
    Llama4TextConfig(**size, **SCALED, architectures=["Llama4ForCausalLM"]).save_pretrained(folder)
    model = {"name_or_path": str(folder), "tokenizer_name_or_path": "preset:tiny-qwen3", "random_init": True}
    train = {"train__max_steps": 1, "train__packing": "window"}
    config = make_config(tmp_path / "out", model=model, data__max_length=longest, **train)
    told: list[str] = []
    data = make_data(make_segments(6, longest=longest))
    fit_data(config, tokenizer, data, on_event=lambda event: told.append(getattr(event, "text", "")))
    scaled = [text for text in told if text.endswith("scaled by a token's place in the row, from place 40 on")]
    assert len(scaled) == (longest > 39)
    apart = "by padding, each in a row of its own" if scaled else "by positions that restart"
    assert any(text.endswith(apart) for text in told)
