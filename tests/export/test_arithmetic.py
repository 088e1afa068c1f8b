"""Models of 16 bits are compared by their weights, not by how their sums are rounded; and by no more than rounding."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import luthier
from luthier import ExportCheck, Exported, ExportOptions
from luthier.check.golden import read_parity, write_parity
from luthier.export import checks as arithmetic
from luthier.export import taken_down
from luthier.export.checks import HALF, in_float32
from luthier.presets import dataset_rows, tokenizer_folder
from tests.export.test_proven_families import adapter
from tests.training.tiny_models import MODELS, SIZES

IDS = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(0))
IN_16_BITS, WEIGHTS = torch.bfloat16, "model.safetensors"
MAKERS: dict[str, Callable[[], Any]] = {
    **MODELS,
    "gpt2": lambda: AutoModelForCausalLM.from_config(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4)),
}


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NUM_ROWS", 8), ("NUM_CONTEXTS", 8), ("NUM_ANSWERS", 1), ("ANSWER_TOKENS", 4)):
            patch.setattr(taken_down, name, value)
        yield


def logits_of(model: nn.Module, ids_BT: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids_BT, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_model_of_16_bits_computes_in_float32_what_a_copy_in_float32_does(name: str) -> None:
    torch.manual_seed(0)
    model = MAKERS[name]().eval().to(IN_16_BITS)
    wanted = logits_of(copy.deepcopy(model).float())
    with in_float32(model):
        found = logits_of(model)
    apart, size = float((found - wanted).abs().max()), float(wanted.abs().max())
    assert found.dtype is torch.float32 and apart <= 1e-5 * size
    assert float((logits_of(model).float() - wanted).abs().max()) > 100 * max(apart, 1e-6 * size)
    assert {weight.dtype for weight in model.parameters()} == {IN_16_BITS}


def test_convolutions_compute_in_float32_as_well() -> None:
    torch.manual_seed(0)
    for layer, size in ((nn.Conv1d(4, 6, 3), (8,)), (nn.Conv2d(4, 6, 3), (8, 8)), (nn.Conv3d(4, 6, 2), (4, 4, 4))):
        narrow, numbers = copy.deepcopy(layer).to(IN_16_BITS), torch.randn(2, 4, *size)
        with torch.no_grad(), in_float32(narrow):
            found = narrow(numbers)
        with torch.no_grad():
            assert torch.equal(found, narrow.float()(numbers))


def test_large_weights_are_in_float32_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS["qwen3"]().eval().to(IN_16_BITS)
    wanted = logits_of(copy.deepcopy(model).float())
    monkeypatch.setattr(arithmetic, "PIECE", 100)
    with in_float32(model):
        assert torch.allclose(logits_of(model), wanted, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("piece", [2**24, 700])
def test_weights_are_moved_by_as_much_as_rounding_moves_them(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "PIECE", piece)
    torch.manual_seed(0)
    layer = nn.Linear(256, 64, bias=False)
    exact = layer.weight.detach().clone()
    layer = layer.to(dtype)
    with torch.no_grad(), in_float32(layer, dtype):
        taken = layer(torch.eye(256)).T
    rounded = layer.weight.detach().float()
    moved, by_rounding = (taken / rounded - 1), (rounded / exact - 1)
    assert 0.7 < float(moved.square().mean().sqrt() / by_rounding.square().mean().sqrt()) < 1.4
    assert float(moved.abs().max()) <= torch.finfo(dtype).eps / 2 and float(moved.mean().abs()) < 0.02 * float(
        moved.abs().max()
    )


def test_a_kernel_that_takes_16_bits_gives_way_to_attention_by_torch() -> None:
    def kernel(module: nn.Module, query: torch.Tensor, *others: Any, **more: Any) -> Any:
        assert query.dtype is IN_16_BITS
        used.append(query.dtype)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *others, **more)

    used: list[torch.dtype] = []
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval().to(IN_16_BITS)
    wanted = logits_of(copy.deepcopy(model).float())
    ALL_ATTENTION_FUNCTIONS.register("of_16_bits", kernel)
    model.config._attn_implementation = "of_16_bits"
    with in_float32(model):
        assert torch.allclose(logits_of(model), wanted, atol=1e-6)
    assert not used
    logits_of(model)
    assert used and model.config._attn_implementation == "of_16_bits"


# ------------------------------------------------------------------------------------------------------- whole exports


def test_a_model_with_a_kernel_for_16_bits_is_compared_in_these_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_16_bits(layer: Qwen2MLP, hidden_BTD: torch.Tensor) -> torch.Tensor:
        assert hidden_BTD.dtype is IN_16_BITS, "this kernel takes bfloat16"
        return forward(layer, hidden_BTD)

    forward = Qwen2MLP.forward
    monkeypatch.setattr(Qwen2MLP, "forward", of_16_bits)
    done = exported(Qwen2Config(**{name: value for name, value in SIZES.items() if name != "head_dim"}), tmp_path)
    assert done.ok and done.proof is not None
    told = {result.check: result.told for result in done.proof.results}
    assert "computed in bfloat16, as float32 fails: this kernel takes bfloat16" in told[ExportCheck.LOGPROBS]


def exported(config: Any, tmp_path: Path) -> Exported:
    """A LoRA on a base of random weights in bfloat16, exported in bfloat16."""
    base = tmp_path / "base"
    rows = [json.dumps({"messages": row["messages"]}) for row in islice(dataset_rows("skills", "train"), 12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    shutil.copytree(tokenizer_folder("tiny"), base)
    config.update({"vocab_size": 2048, "eos_token_id": 2034, "pad_token_id": 2032, "bos_token_id": None})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(IN_16_BITS).save_pretrained(base)
    adapter(base, tmp_path / "adapter", "LoRA")
    described = {
        "model": {"name_or_path": str(base), "dtype": "bfloat16"},
        "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}], "max_drop": 0.9},
        "adapter": {"type": "lora", "name_or_path": str(tmp_path / "adapter")},
        "train": {"enabled": False},
        "output": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(described), encoding="utf-8")
    return luthier.export_run(tmp_path / "run.yaml", ExportOptions(to=tmp_path / "exported", overwrite=True))


def failed(proof: luthier.ExportProof) -> set[ExportCheck]:
    return {result.check for result in proof.results if not result.ok}


def test_a_deep_model_whose_sums_are_rounded_by_more_than_the_bound_is_proven_by_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = Qwen2Config(**{**sizes, "num_hidden_layers": 16, "initializer_range": 0.25})
    done = exported(config, tmp_path)
    assert done.ok and done.proof is not None, done.proof
    monkeypatch.setattr(arithmetic, "in_float32", lambda *_: nullcontext())
    shutil.rmtree(tmp_path / "base"), shutil.rmtree(tmp_path / "adapter")
    assert not exported(config, tmp_path).ok  # what the same weights do where sums are rounded to 16 bits


def test_a_mixture_of_experts_is_held_to_what_rounding_does_to_it_and_to_no_more(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 64, "head_dim": 16, "initializer_range": 0.2}
    config = Qwen3MoeConfig(
        **{**sizes, "num_hidden_layers": 3}, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
    )
    done = exported(config, tmp_path)
    assert done.ok and done.proof is not None, done.proof
    parity = read_parity(tmp_path / "exported")
    assert parity.rounding is not None and parity.rounding == done.proof.rounding
    assert 0 < parity.rounding.kl < 1e-2
    assert luthier.check_export(tmp_path / "exported").ok
    file = tmp_path / "exported" / WEIGHTS
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    one, other = (f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1))
    save_file(weights | {one: weights[other], other: weights[one]}, file, metadata={"format": "pt"})
    write_parity(parity, tmp_path / "exported")
    assert failed(luthier.check_export(tmp_path / "exported")) >= {ExportCheck.LOGPROBS}


def test_a_layer_without_its_adapter_is_more_than_rounding_to_a_model_that_rounding_hardly_changes(
    tmp_path: Path,
) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    assert exported(Qwen2Config(**sizes), tmp_path).ok
    folder, parity = tmp_path / "exported", read_parity(tmp_path / "exported")
    weights, base = (
        {name: tensor.clone() for name, tensor in load_file(place / WEIGHTS).items()}
        for place in (folder, tmp_path / "base")
    )
    lost = "model.layers.1.self_attn.o_proj.weight"
    save_file(weights | {lost: base[lost]}, folder / WEIGHTS, metadata={"format": "pt"})
    write_parity(parity, folder)
    proof = luthier.check_export(folder)
    assert failed(proof) >= {ExportCheck.LOGPROBS}
    assert proof.rounding is not None and proof.rounding.kl < 1e-4
