"""Recurrent layers on packed rows: they see each segment alone, and all else runs on the row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tree
from tiny_recurrent import RECURRENT_MODELS, recurrent_model
from tiny_rows import run_data
from tiny_runs import make_config, make_data, make_segments
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from luthier.collation import CollateSettings
from luthier.collation.collator import collate_packs, collate_trees
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.models import mixers, set_text_attention
from luthier.models.attention import PLAN, SEGMENTS, AttentionPlan, register_attention
from luthier.models.isolation import ChosenIsolation, choose_isolation
from luthier.models.mixers import MIXERS, Isolation, MixerCall, part_mixers, plan_calls
from luthier.models.passes import find_head, score_targets
from luthier.objectives.token_scores import token_scores
from luthier.records import Batch, Pack
from luthier.training.fit import fit_data
from luthier.training.losses import reference_choice
from luthier.training.report import RunResult
from luthier.training.report.events import Note

CPU = torch.device("cpu")
HOW = CollateSettings(packed=True, pad_token_id=0)
FIRST = [segment for seed in (1, 2) for segment in tree(2, 30, seed=seed).segments()]
# Two pairs, which share nine tokens and six. Rows are of several lengths, and the first row of each batch is padded.
PAIRS = [tree(9, 5, 7, seed=1), tree(6, 31, 4, seed=2)]
LEAVES = [leaf for sample in PAIRS for leaf in sample.segments()]
PACKED = collate_packs(
    [Pack(segments=tuple(LEAVES[:2])), Pack(segments=tuple(LEAVES[2:]))], packed=True, pad_token_id=0
)
SHARED = collate_trees([PAIRS[:1], PAIRS[1:]], pad_token_id=0)
Expected = tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]


def chosen_for(model: nn.Module, **more: Any) -> ChosenIsolation:
    return choose_isolation(model, FIRST, HOW, device=CPU, **more)


def scores_of(model: nn.Module, inputs: dict[str, Any], batch: Batch) -> torch.Tensor:
    """float32[K], in the order of the leaves, of each its targets."""
    targets = batch.targets
    found = score_targets(
        model,
        inputs,
        targets.positions_K,
        lambda hidden_KD, head: token_scores(hidden_KD, head, targets.ids_K).logps_K,
        head=find_head(model),
    ).scores
    return found[torch.argsort(targets.segments_K, stable=True)]


def gradients(model: nn.Module, scores_K: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a loss that weighs every target differently, so that none could take another's place."""
    model.zero_grad()
    (scores_K * torch.linspace(0.5, 1.5, len(scores_K))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@cache
def expected(name: str) -> Expected:
    """Scores of the targets, logits of the leaves, and gradients, of each leaf alone as the model itself has them."""
    model = recurrent_model(name)
    logits, scores = [], []
    for leaf in LEAVES:
        ids = torch.from_numpy(leaf.input_ids.astype(np.int64))
        logits_TV = model(input_ids=ids[None], use_cache=False).logits[0]
        places = torch.from_numpy(np.flatnonzero(leaf.target))
        scores.append(logits_TV[places - 1].log_softmax(-1).gather(1, ids[places, None])[:, 0])
        logits.append(logits_TV.detach())
    scores_K = torch.cat(scores)
    return scores_K.detach(), logits, gradients(model, scores_K)


def check(model: nn.Module, chosen: ChosenIsolation, batch: Batch, right: Expected) -> None:
    scores_K, _, grads = right
    found_K = scores_of(model, chosen.inputs(batch, device=CPU), batch)
    torch.testing.assert_close(found_K, scores_K, atol=1e-4, rtol=1e-4)
    found = gradients(model, found_K)
    assert found.keys() == grads.keys()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():  # some are zero but for rounding
        allowed = 1e-4 * max(float(grad.abs().max()), 1e-2 * largest)
        assert float((found[name] - grad).abs().max()) <= allowed, name


# ---------------------------------------------------------------------------------------------------------- plans


def plan_of(*stretches: tuple[int, tuple[int, ...] | None]) -> AttentionPlan:
    return AttentionPlan(lengths=tuple(n for n, _ in stretches), contexts=tuple(context for _, context in stretches))


def test_segments_of_one_length_share_a_call_and_a_short_one_has_its_own() -> None:
    assert plan_calls(plan_of((700, ()), (30, ()), (650, ()), (4, None))) == (
        MixerCall(width=700, rows=((0,), (2,))),
        MixerCall(width=30, rows=((1,),)),
    )
    assert plan_calls(plan_of((70, ()), (30, ()), (65, ()))) == (MixerCall(width=70, rows=((0,), (2,), (1,))),)


def test_each_leaf_of_a_tree_comes_with_what_it_continues() -> None:
    tree_of_four = plan_of((5, ()), (3, (0,)), (2, (0,)), (1, (0, 2)), (9, None))
    assert plan_calls(tree_of_four) == (MixerCall(width=8, rows=((0, 1), (0, 2, 3))),)


def test_no_division_into_calls_costs_less() -> None:
    """Against all divisions of rows in descending order."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        lengths = sorted(map(int, rng.integers(1, 1000, 7)), reverse=True)

        def cost(cuts: tuple[bool, ...], lengths: list[int] = lengths) -> int:
            starts = [0, *(n for n, cut in enumerate(cuts, start=1) if cut)]
            ends = [*starts[1:], len(lengths)]
            return sum((end - start) * lengths[start] + 100 for start, end in zip(starts, ends, strict=True))

        calls = plan_calls(plan_of(*((length, ()) for length in lengths)), 100)
        assert sorted(row for call in calls for row in call.rows) == [(n,) for n in range(7)]
        found = sum(len(call.rows) * call.width + 100 for call in calls)
        assert found == min(cost(cuts) for cuts in product([False, True], repeat=6))


# -------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("name", RECURRENT_MODELS)
def test_packed_and_shared_rows_have_the_scores_and_gradients_of_segments_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = recurrent_model(name)
    for shared, batch, num_calls in ((False, PACKED, 1), (True, SHARED, 1), (False, PACKED, 3), (True, SHARED, 3)):
        chosen = chosen_for(model, shared=shared)
        assert (chosen.isolation, chosen.attention, chosen.notes) == (Isolation.SEGMENTS, SEGMENTS, ())
        assert chosen.mixers and set(chosen.mixers) <= MIXERS
        monkeypatch.setattr(mixers, "plan_calls", partial(plan_calls, tokens_per_call=256 if num_calls == 1 else 2))
        assert len(mixers.plan_calls(chosen.inputs(batch, device=CPU)[PLAN])) == num_calls
        check(model, chosen, batch, expected(name))


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "bamba", "jamba"])
def test_so_they_have_when_layers_are_computed_again_for_their_gradients(name: str) -> None:
    model = recurrent_model(name)
    chosen = chosen_for(model)
    calls = []
    mixer = next(module for module in model.modules() if type(module).__name__ in MIXERS)
    layer = next(module for module in mixer.modules() if isinstance(module, nn.Linear))
    layer.register_forward_hook(lambda *_: calls.append(0))
    model.activation_checkpointing_enable({"use_reentrant": False})
    check(model, chosen, PACKED, expected(name))
    assert len(calls) == 2, "once forward, and once more in the backward pass"


@pytest.mark.parametrize("name", RECURRENT_MODELS)
def test_control_without_parting_the_same_row_leaks(name: str) -> None:
    register_attention()
    model = recurrent_model(name)
    set_text_attention(model, SEGMENTS)
    plain = ChosenIsolation(isolation=Isolation.SEGMENTS, attention=SEGMENTS, windows={})
    with torch.no_grad():
        found_K = scores_of(model, plain.inputs(PACKED, device=CPU), PACKED)
    assert float((found_K - expected(name)[0]).abs().max()) > 1e-2


def test_each_class_of_the_table_is_tried_here() -> None:
    found = {type(module).__name__ for name in RECURRENT_MODELS for module in recurrent_model(name).modules()}
    assert found & MIXERS == MIXERS


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_under_transformers_own_attention_recurrent_layers_still_get_the_plan(name: str) -> None:
    model = recurrent_model(name)
    chosen = chosen_for(model, asked="sdpa")
    assert chosen.isolation is Isolation.POSITIONS and chosen.mixers
    check(model, chosen, PACKED, expected(name))
    with pytest.raises(ModelError, match=r"does not keep branches apart: its recurrent layers \(.*\) take no masks"):
        chosen_for(model, shared=True, asked="sdpa")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_under_an_adapter_that_is_in_the_recurrent_layers(name: str) -> None:
    layers = {"qwen3_next": ["in_proj_qkvz", "out_proj", "q_proj"], "nemotron_h": ["in_proj", "q_proj"]}[name]
    torch.manual_seed(0)
    model = get_peft_model(recurrent_model(name), LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
    chosen = chosen_for(model)
    assert chosen.isolation is Isolation.SEGMENTS and chosen.mixers
    alone = ChosenIsolation(isolation=Isolation.PADDED, attention=SEGMENTS, windows={})
    parted = alone.arranged(PACKED, pad_token_id=0)
    scores_K = scores_of(model, alone.inputs(parted, device=CPU), parted)
    right = (scores_K.detach(), [], gradients(model, scores_K))
    assert any("lora_" in key and "q_proj" not in key for key in right[2])
    check(model, chosen, PACKED, right)


# ------------------------------------------------------------------------------------------------ the start of runs


def test_a_row_that_still_leaks_is_found_and_gets_rows_of_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: as of a class that is in the table and should not be."""
    whole = (MixerCall(width=48, rows=((0, 1),)),)
    monkeypatch.setattr(mixers, "plan_calls", lambda plan: whole if len(plan.lengths) == 2 else plan_calls(plan))
    model = recurrent_model("qwen3_next")
    chosen = chosen_for(model)
    assert chosen.isolation is Isolation.PADDED and chosen.mixers == ()
    assert "luthier_segments by segments: changing one moved the logits" in chosen.notes[0]
    parted = chosen.arranged(PACKED, pad_token_id=0)
    check(model, chosen, parted, expected("qwen3_next"))


def test_recurrent_layers_that_are_not_known_keep_rows_of_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "lru_width": 32}
    unknown = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(**sizes, num_hidden_layers=2, block_types=["recurrent", "attention"])
    )
    monkeypatch.setattr(mixers, "MIXERS", frozenset())
    for model in (unknown, recurrent_model("bamba")):
        chosen = chosen_for(model)
        assert chosen.isolation is Isolation.PADDED and "carry a state" in chosen.notes[0]


# ------------------------------------------------------------------------------------------------------- the module


def test_without_a_plan_a_model_is_what_it_was() -> None:
    ids = torch.arange(5, 25)[None]
    for name in ("qwen3_next", "minimax", "jamba"):
        model = recurrent_model(name).eval()
        found = []
        for _ in range(2):
            with torch.no_grad():
                found.append((model(input_ids=ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)))
            assert part_mixers(model) == part_mixers(model) != ()
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_copy_of_a_model_computes_with_weights_of_its_own() -> None:
    model = recurrent_model("lfm2")
    chosen = chosen_for(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    check(other, chosen, PACKED, expected("lfm2"))


def test_a_mask_or_a_cache_beside_a_plan_is_refused() -> None:
    model = recurrent_model("lfm2")
    part_mixers(model)
    conv = next(module for module in model.modules() if type(module).__name__ in MIXERS)
    hidden = torch.zeros(1, 4, 32)
    plan = plan_of((2, ()), (2, ()))
    for beside in ("attention_mask", "past_key_values"):
        with pytest.raises(ModelError, match=f"Lfm2ShortConv.* {beside}"):
            conv(hidden, attention_plan=plan, **{beside: torch.ones(1, 4)})
    with pytest.raises(ModelError, match="2 positional inputs"):
        conv(hidden, None, attention_plan=plan)


# ------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model = recurrent_model("qwen3_next")
    model.config.vocab_size = 2048
    type(model)(model.config).save_pretrained(tmp_path / "qwen3_next")
    return str(tmp_path / "qwen3_next")


def test_a_packed_run_learns_as_a_padded_one_and_says_how(train: Callable[..., RunResult], folder: str) -> None:
    notes: list[str] = []
    data = make_data(make_segments(6), make_segments(2, seed=3))
    settings = {
        "model__name_or_path": folder, "model__config_overrides": {}, "train__max_steps": 2, "eval__strategy": "steps",
        "eval__steps": 2, "train__gradient_checkpointing": True,
    }  # fmt: skip
    packed, padded = (
        train(
            data,
            folder=packing,
            on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
            train__packing=packing,
            train__per_device_train_batch_size=6,
            **settings,
        )
        for packing in ("best_fit", "none")
    )
    assert "attention: recurrent layers (Qwen3NextGatedDeltaNet) run segment by segment" in notes
    assert len(packed.steps) == 2
    for one, other in zip((*packed.steps, *packed.evals), (*padded.steps, *padded.evals), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_a_second_model_as_the_reference_sees_segments_alone_too(
    tmp_path: Path, tokenizer: Tokenizer, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first update it is the policy itself, whatever beta is, so KTO's loss is 1 - sigmoid(0)."""

    def loss() -> float:
        config = make_config(
            tmp_path / "run",
            model={"name_or_path": folder},
            objective={"name": "kto", "reference": "model", "beta": 5.0},
            train__packing="best_fit",
            train__max_steps=1,
            output__overwrite=True,
        )
        (step,) = fit_data(config, tokenizer, run_data(tmp_path / "rows", config, rows=range(3))).steps
        return step.loss

    assert loss() == pytest.approx(0.5, rel=1e-4)
    monkeypatch.setattr(reference_choice.mixers, "part_mixers", lambda model: ())
    assert loss() != pytest.approx(0.5, rel=1e-3), "control"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at it
def test_a_packed_run_of_a_compiled_recurrent_model_is_the_same(
    train: Callable[..., RunResult], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counter, compile_module = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **_: compile_module(module, backend=counter))
    settings = {"model__name_or_path": folder, "model__config_overrides": {}, "train__packing": "best_fit"}
    settings |= {"train__max_steps": 2}
    found = train(make_data(make_segments(4)), folder="compiled", train__torch_compile=True, **settings)
    assert counter.frame_count > 0
    plain = train(make_data(make_segments(4)), folder="plain", **settings)
    assert [step.loss for step in found.steps] == pytest.approx([step.loss for step in plain.steps], rel=1e-5)
