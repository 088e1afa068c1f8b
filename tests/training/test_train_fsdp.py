"""A model divided between two ranks is trained as one that is whole: same losses, gradients, weights and files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_rows import epoch_steps, run_data
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3MoeConfig

from luthier.config.choices import AdapterType
from luthier.config.schema import AdapterConfig
from luthier.encoding.tokenizer import Tokenizer, load_tokenizer
from luthier.errors import ModelError, UserError
from luthier.models.adapters import apply_adapter
from luthier.models.sharding import divisible_layers, refuse_other_ways
from luthier.training.fit import fit_data
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note
from tests.conftest import refused

PROGRAM = Path(__file__).with_name("tiny_shards.py")
ROWS, TURNS = 8, 6  # turns of a rank: more than there is to learn, so that some are idle
PACKED = {"train__packing": "best_fit"}
UNTIED = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
ANSWERS = {"eval__generate_rows": 2, "eval__max_new_tokens": 4}

CASES: dict[str, dict[str, Any]] = {
    "sft": {**PACKED, **ANSWERS, "objective": "sft"},
    "checkpointing": {
        "objective": "sft",
        "train__gradient_checkpointing": True,
        "model__config_overrides": {**UNTIED, "tie_word_embeddings": False},
        "train__max_grad_norm": 0.5,  # below the norm, so that it takes part
    },
    "lora in bf16": {
        **PACKED,
        "objective": "sft",
        "adapter": {"type": "lora", "r": 4},
        "model__dtype": "bfloat16",
        "train__precision": "bf16",  # weights of two types, and products cast
    },
    "lora in 4 bits": {
        **PACKED,
        "objective": "sft",
        "adapter": {"type": "lora", "r": 4},
        "model__quantization": {"type": "nf4", "compute_dtype": "float32"},
        "train__gradient_checkpointing": True,
    },
    # its matrices are not trained, are in no layer, and are saved
    "vera": {**PACKED, "objective": "sft", "adapter": {"type": "vera", "r": 4}},
    "turns": {**PACKED, "objective": "sft", "train__shared_prompts": True},  # trees of several answers
    "dpo": {**PACKED, "objective": "dpo"},  # its reference is precomputed
    "dpo, lora": {"objective": "dpo", "adapter": {"type": "lora", "r": 4}},  # its reference is the base
    "rm": {"objective": "rm"},
    # the reference is a second model; bad rows count little, so that the KL is not clamped to 0
    "kto": {**PACKED, "objective": {"name": "kto", "beta": 0.5, "undesirable_weight": 0.05}},
    # a loss balances the load of its experts, over both ranks
    "experts": {**PACKED, "objective": "sft", "model": {"name_or_path": "experts"}},
    "experts, dpo, lora": {
        "objective": "dpo",
        "adapter": {"type": "lora", "r": 4},
        "model": {"name_or_path": "experts"},
    },
}
TURNS_OF_ROWS = {"turns": 4}
RESUMED = ("sft", "lora in bf16", "lora in 4 bits", "vera")
# Adam divides by the root of what may be next to nothing, so a rounding in a gradient is more in a weight.
WITHIN = {"weights": 1e-5, "steps": 1e-5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """What two ranks did: ``seen`` by each of them, the folder of their runs, and a run of one process."""

    root: Path
    seen: list[dict[str, Any]]
    one: RunResult

    def result(self, name: str) -> RunResult:
        return RunResult.load(self.root / name)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    root = tmp_path_factory.mktemp("shards")
    _model_of_experts(root)
    jobs = [_job(root, case) for case in CASES]
    jobs += [_job(root, case, name=f"{case} again", resume=str(root / case / "checkpoint-2")) for case in RESUMED]
    one = _alone(root, "sft", "sft of one", models=root)
    jobs.append(_job(root, "sft", name="sft from one", resume=str(Path(one.output_dir) / "checkpoint-2")))
    errors = root / "shards.stderr"
    assert run_ranks(PROGRAM, str(root), json.dumps(jobs), errors=errors) == [0, 0], errors.read_text()
    seen = [json.loads((root / f"seen-{rank}.json").read_text()) for rank in range(2)]
    return Ranks(root=root, seen=seen, one=one)


def _model_of_experts(root: Path) -> None:
    torch.manual_seed(0)
    sizes = {**UNTIED, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    ids = {"vocab_size": 2048, "pad_token_id": 2032, "bos_token_id": 1, "eos_token_id": 2034}
    config = Qwen3MoeConfig(**sizes, **experts, **ids, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "experts")


def _changes(case: str, *, turns: int, models: Path) -> dict[str, Any]:
    model = {"model": {"name_or_path": str(models / "experts")}} if "model" in CASES[case] else {}
    return {
        **CASES[case],
        **model,
        "train__max_steps": 3,
        "train__gradient_accumulation_steps": turns,
        "train__per_device_train_batch_size": 1,
        "eval__strategy": "steps",
        "eval__steps": 3,
        "output__save_strategy": "steps",
        "output__save_steps": 2,
    }


def _job(root: Path, case: str, *, name: str | None = None, **output: str) -> dict[str, Any]:
    changes = {**_changes(case, turns=TURNS, models=root), "runtime__sharding": "fsdp"}
    changes |= {f"output__{key}": value for key, value in output.items()}
    store = str(root / f"{case} store")
    return {
        "folder": str(root / (name or case)),
        "store": store,
        "weighted": False,
        "turns": TURNS_OF_ROWS.get(case),
        "mode": "quiet",
        "changes": changes,
    }


def _alone(root: Path, case: str, name: str, *, models: Path, **output: str) -> RunResult:
    changes = _changes(case, turns=2 * TURNS, models=models)
    del changes["objective"]
    del changes["train__gradient_accumulation_steps"], changes["train__max_steps"]
    objective = CASES[case]["objective"]
    objective = {"name": objective} if isinstance(objective, str) else objective
    changes |= {f"output__{key}": value for key, value in output.items()}
    config = epoch_steps(root / name, objective, micro_batches=2 * TURNS, **changes)
    rows = {"rows": range(ROWS), "held_out": range(4, 8), "turns": TURNS_OF_ROWS.get(case)}
    data = run_data(root / f"{case} store of one", config, **rows)
    return fit_data(config, load_tokenizer("preset:tiny-qwen3"), data)


def _weights(result: RunResult) -> dict[str, torch.Tensor]:
    (file,) = (Path(result.output_dir) / "model").glob("*.safetensors")
    return load_file(file)


def _require_same(found: RunResult, expected: RunResult, *, within: dict[str, float] = WITHIN) -> None:
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=within["steps"]), step.step
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=within["steps"]), step.step
    assert found.evals[-1].loss == pytest.approx(expected.evals[-1].loss, rel=within["steps"])
    assert found.evals[-1].measures == pytest.approx(expected.evals[-1].measures, rel=1e-4, abs=1e-5)
    weights, others = _weights(found), _weights(expected)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], atol=within["weights"], rtol=0, msg=lambda m, n=name: n + m)


def test_each_rank_holds_a_half(ranks: Ranks) -> None:
    for seen in ranks.seen:
        assert seen["sharded"] and seen["held"] == seen["all"] / 2
        # embeddings, last norm and head stay gathered after a look, until they are given up
        assert (seen["held after a look"], seen["held again"]) == (3, 0)
        assert seen["loaded"]


def test_whole_weights_are_the_main_rank_s(ranks: Ranks) -> None:
    (names, equal), others = (seen["whole"] for seen in ranks.seen)
    assert names == equal > 20 and others == [0, 0]


@pytest.mark.parametrize("loss", ["token loss", "scores"])
def test_gradients_through_the_head_tap_are_those_of_both_ranks(ranks: Ranks, loss: str) -> None:
    """One of the ranks has no target, and takes part by its anchor alone."""
    assert all(seen[loss] < 1e-5 for seen in ranks.seen)
    assert all(seen[f"{loss} not averaged"] > 1 for seen in ranks.seen)  # the control


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "gpt_oss"])
def test_windows_and_experts_are_divided_as_well(ranks: Ranks, name: str) -> None:
    assert all(seen[name] < 1e-5 for seen in ranks.seen)


def test_what_cannot_be_divided_is_refused(ranks: Ranks) -> None:
    for towers, frozen in (seen["refused"] for seen in ranks.seen):
        assert "Gemma3ForConditionalGeneration has parts beside its decoder" in towers
        assert "no decoder layer of Qwen3ForCausalLM is trained" in frozen


@pytest.mark.parametrize("case", CASES)
def test_a_divided_run_is_the_run_of_one_process(ranks: Ranks, tmp_path: Path, case: str) -> None:
    found, expected = (
        ranks.result(case),
        ranks.one if case == "sft" else _alone(tmp_path, case, case, models=ranks.root),
    )
    assert found.world_size == 2 and found.model.architecture == expected.model.architecture
    assert found.model.parameters == expected.model.parameters
    if "bf16" in case:  # what is computed in bf16 is rounded by row, and rows share micro-batches otherwise
        _require_same(found, expected, within={"weights": 5e-3, "steps": 2e-2})
        return
    _require_same(found, expected)
    for step, other_step in zip(found.steps, expected.steps, strict=True):
        assert step.measures == pytest.approx(other_step.measures, rel=1e-4, abs=1e-5)
        assert ("router_aux_loss" in step.measures) == ("experts" in case)
    for one, other in zip(found.generations, expected.generations, strict=True):
        assert [r.generated for r in one.records] == [r.generated for r in other.records]
    assert len(found.generations) == (2 if "eval__generate_rows" in CASES[case] else 0)


def test_control_another_run_is_told_apart(ranks: Ranks) -> None:
    with pytest.raises(AssertionError):
        _require_same(ranks.result("sft"), ranks.result("checkpointing"))
    with pytest.raises(AssertionError):
        _require_same(ranks.result("dpo"), ranks.result("kto"))


@pytest.mark.parametrize("case", RESUMED)
def test_a_divided_run_goes_on_as_if_nothing_had_happened(ranks: Ranks, case: str) -> None:
    whole, again = ranks.result(case), ranks.result(f"{case} again")
    assert [step.step for step in again.steps] == [1, 2, 3], "the first two were brought along"
    assert again.steps[2].loss == whole.steps[2].loss and again.steps[2].grad_norm == whole.steps[2].grad_norm
    weights = _weights(whole)
    assert all(torch.equal(weight, weights[name]) for name, weight in _weights(again).items())


def test_either_kind_of_run_goes_on_from_the_other(ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = ranks.result("sft from one")
    checkpoint = str(ranks.root / "sft" / "checkpoint-2")
    of_one = _alone(tmp_path, "sft", "from ranks", models=ranks.root, resume=checkpoint)
    weights = _weights(ranks.one)
    for found in (of_ranks, of_one):
        assert [step.step for step in found.steps] == [1, 2, 3]
        assert found.steps[2].loss == pytest.approx(ranks.one.steps[2].loss, rel=1e-5)
        for name, weight in _weights(found).items():
            torch.testing.assert_close(weight, weights[name], atol=1e-5, rtol=0)


def test_what_is_saved_is_loaded_by_transformers(ranks: Ranks) -> None:
    model = AutoModelForCausalLM.from_pretrained(ranks.root / "sft" / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    score = AutoModelForSequenceClassification.from_pretrained(ranks.root / "rm" / "model").score
    assert score.weight.shape[0] == 1  # fewer rows than ranks


@pytest.mark.parametrize("sharding", ["fsdp", "none"])
def test_a_single_process_says_that_it_divides_nothing(tmp_path: Path, tokenizer: Tokenizer, sharding: str) -> None:
    config = epoch_steps(tmp_path / "run", {"name": "sft"}, rows=2, runtime__sharding=sharding)
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    fit_data(config, tokenizer, run_data(tmp_path / "store", config, rows=range(2)), on_event=listen)
    said = "model: not sharded, though runtime.sharding is fsdp: there is one process; torchrun starts several"
    assert (said in notes) == (sharding == "fsdp")


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launcher_that_would_divide_the_model_its_own_way_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "true")
    config = epoch_steps(tmp_path / "run", {"name": "sft"}, rows=2)
    data = run_data(tmp_path / "store", config, rows=range(2))
    with pytest.raises(UserError, match=f"{name}=true(.|\n)*runtime.sharding: fsdp"):
        fit_data(config, tokenizer, data)
    assert not (tmp_path / "run").exists()
    refuse_other_ways({name: "false"})


@pytest.mark.parametrize(("has_output_layer", "tables"), [(True, "[embed_tokens, lm_head]"), (False, "[embed_tokens]")])
def test_rows_of_new_tokens_lead_to_the_tables_that_the_model_has(has_output_layer: bool, tables: str) -> None:
    model: Any = tiny_model("qwen3")
    if not has_output_layer:
        model = AutoModelForSequenceClassification.from_config(model.config)
    adapted = apply_adapter(model, AdapterConfig(type=AdapterType.LORA), new_ids=[5])
    with refused(ModelError, "runtime.sharding", f"adapter.modules_to_save: {tables}"):
        divisible_layers(adapted)
