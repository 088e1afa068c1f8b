"""The loss that balances experts: transformers' own over a whole step, however the step is divided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_runs import losses_by_hand, make_data, make_segments, padded_batch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    set_seed,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from luthier.errors import ModelError
from luthier.models.routers import find_routers, loads_of
from luthier.training.report import RunResult

Train = Callable[..., RunResult]
DATA = make_data(make_segments(12))
SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "router_aux_loss_coef": 0.5,
    "pad_token_id": 2032, "bos_token_id": 1, "eos_token_id": 2034,
}  # fmt: skip
RECOMPUTED = {"train__gradient_checkpointing": True}
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def _folder(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if "gate.weight" in each:
                weight.normal_()
    model.save_pretrained(folder)
    return folder


def test_the_sums_of_a_batch_are_transformers_loss() -> None:
    torch.manual_seed(1)
    logits = tuple(torch.randn(2 * 7, 5) for _ in range(3))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    loads = None
    for each in logits:
        found = loads_of(each, mask.flatten().bool(), 2)
        loads = found if loads is None else loads.plus(found)
    assert loads is not None
    loss = 5 * ((loads.chosen_E / loads.count) * (loads.probability_E / loads.count)).sum()
    assert float(loss) == pytest.approx(float(load_balancing_loss_func(logits, 5, 2, mask)), rel=1e-5)
    assert float(loss) != pytest.approx(float(load_balancing_loss_func(logits, 5, 2)), rel=1e-4), "padding is left out"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_step_has_the_same_loss_and_gradient_however_it_is_divided(
    train: Train, tmp_path: Path, name: str, adapter: str
) -> None:
    model = {"name_or_path": str(_folder(name, tmp_path / "base"))}
    common = {"model": model, "train__max_steps": 2, "adapter__type": adapter}
    if adapter == "lora":
        common["adapter__target_modules"] = ["q_proj"]
    ways = [
        {"train__per_device_train_batch_size": 12},
        {"train__per_device_train_batch_size": 4, "train__gradient_accumulation_steps": 3},
        {"train__packing": "best_fit", "train__gradient_accumulation_steps": 12},
        {"train__per_device_train_batch_size": 6, "train__gradient_accumulation_steps": 2} | RECOMPUTED,
    ]  # fmt: skip
    runs = [train(DATA, folder=f"run{number}", **common, **way) for number, way in enumerate(ways)]
    for other in runs[1:]:
        for mine, theirs in zip(runs[0].steps, other.steps, strict=True):
            assert theirs.measures["router_aux_loss"] == pytest.approx(mine.measures["router_aux_loss"], rel=1e-5)
            assert theirs.grad_norm == pytest.approx(mine.grad_norm, rel=1e-4)
            assert theirs.loss == pytest.approx(mine.loss, rel=1e-5)
    without = train(DATA, folder="without", **common, **ways[0], train__router_aux_loss_coef=0)
    assert "router_aux_loss" not in without.steps[0].measures
    assert without.steps[0].loss == pytest.approx(runs[0].steps[0].loss, rel=1e-6), "loss is the objective's own"
    assert without.steps[0].grad_norm != pytest.approx(runs[0].steps[0].grad_norm, rel=1e-3), "control"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_that_of_transformers_loss(train: Train, tmp_path: Path, name: str) -> None:
    """One batch of all rows: CE per target plus the coefficient times the loss that the model itself computes."""
    folder = _folder(name, tmp_path / "base")
    result = train(
        DATA, model={"name_or_path": str(folder)}, train__max_steps=1, train__per_device_train_batch_size=12,
        train__max_grad_norm=0, train__optim="sgd", train__learning_rate=1.0, train__lr_scheduler_type="constant",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    out = model(**padded_batch(DATA.train, pad=2032), output_router_logits=True)
    assert result.steps[0].measures["router_aux_loss"] == pytest.approx(out.aux_loss.item(), rel=1e-5)
    out.loss.backward()  # with the coefficient of its config times aux_loss
    trained = AutoModelForCausalLM.from_pretrained(result.path / "model").state_dict()
    for each, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach() - weight.grad, trained[each], rtol=1e-3, atol=2e-4, msg=each)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's
@pytest.mark.parametrize("name", CONFIGS)
def test_lora_in_experts_learns_under_the_balance_of_experts_as_with_peft_by_hand(
    train: Train, tmp_path: Path, name: str
) -> None:
    folder = _folder(name, tmp_path / "base")
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    result = train(
        DATA, model={"name_or_path": str(folder)}, train__max_steps=3, train__per_device_train_batch_size=12,
        train__max_grad_norm=0, train__learning_rate=3e-2, train__lr_scheduler_type="constant",
        train__router_aux_loss_coef=0.3, adapter={"type": "lora", "r": 4, "lora_dropout": 0.0, **targets},
    )  # fmt: skip

    def by_hand(coefficient: float) -> list[float]:
        base = AutoModelForCausalLM.from_pretrained(folder, router_aux_loss_coef=coefficient, output_router_logits=True)
        set_seed(1)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, **targets))
        return losses_by_hand(model, padded_batch(DATA.train, pad=2032), 3, 3e-2)

    told = [step.loss + 0.3 * step.measures["router_aux_loss"] for step in result.steps]
    assert told == pytest.approx(by_hand(0.3), abs=1e-5) and told[-1] < told[0] - 0.1
    others = [
        whole + (0.3 - 0.6) * step.measures["router_aux_loss"]
        for whole, step in zip(by_hand(0.6), result.steps, strict=True)
    ]
    assert others[-1] != pytest.approx(told[-1], abs=1e-4), "control: another coefficient"


def test_a_model_without_experts_has_no_such_loss_and_says_so_where_it_is_asked_for() -> None:
    plain = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "router_aux_loss_coef": 0.1}))
    assert find_routers(plain, None) is None
    assert find_routers(plain, 0.0) is None
    with pytest.raises(ModelError, match="no loss that balances experts"):
        find_routers(plain, 0.1)
    assert AutoConfig.for_model("qwen3_moe").router_aux_loss_coef > 0
