"""Tokens that a run adds are learned: under LoRA as rows of their own, saved with the adapter, read back and merged."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_rows
import torch
import written_out
from peft import PeftModel
from peft.utils.other import TrainableTokensWrapper
from safetensors.torch import load_file
from tiny_runs import TINY, make_config, make_data, make_segments
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from luthier.config.loading import load_config_text
from luthier.encoding.tokenizer import AddedTokens, Tokenizer, load_tokenizer
from luthier.errors import ConfigError, ModelError, TokenizerError
from luthier.models.adapters import apply_adapter
from luthier.models.model import load_model
from luthier.models.passes import find_head, score_targets
from luthier.models.vocabulary import Vocabulary, rows_left_out
from luthier.objectives.token_scores import token_scores
from luthier.presets import tokenizer_folder
from luthier.records import Sample, Segment
from luthier.training.fit import fit_data
from luthier.training.folder.artifacts import LOADING, save_tokenizer, transformers_tokenizer
from luthier.training.report import RunResult
from luthier.training.report.events import Note

OLD = 2048
NEW = [2048, 2049]
LORA = {"type": "lora", "r": 2, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def added() -> Tokenizer:
    return load_tokenizer("preset:tiny-qwen3", added=AddedTokens(ordinary=("zorkmid",), special=("<|act|>",)))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A saved model of as many rows as its tokenizer has ids."""
    folder = tmp_path_factory.mktemp("base")
    overrides = {**TINY, "tie_word_embeddings": request.param, "vocab_size": OLD}
    config = make_config(
        folder, model={"name_or_path": "preset:tiny-qwen3", "config_overrides": overrides}, train__max_steps=1
    )
    fit_data(config, tokenizer, make_data(make_segments(4)))
    return folder / "model"


def _segments() -> list[Segment]:
    """Rows in which both new tokens are read and learned."""
    found = []
    for segment in make_segments(8):
        ids = segment.input_ids.copy()
        ids[1], ids[-2], ids[-3] = NEW[0], NEW[1], NEW[0]
        found.append(Segment(input_ids=ids, target=segment.target, address=segment.address))
    return found


def _train(folder: Path, base: Path, added: Tokenizer, *, on_event: Any = None, **changes: Any) -> RunResult:
    config = make_config(
        folder,
        **{
            "model": {"name_or_path": str(base), "add_tokens": ["zorkmid"], "add_special_tokens": ["<|act|>"]},
            "adapter": LORA,
            "train__learning_rate": 0.05,
            **changes,
        },
    )
    return fit_data(config, added, make_data(_segments()), on_event=on_event)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_rows_are_learned_saved_read_back_and_merged(tmp_path: Path, base: Path, added: Tokenizer) -> None:
    assert added.new_ids == tuple(NEW)
    result = _train(tmp_path / "run", base, added, adapter={**LORA, "merge": True})
    plain = AutoModelForCausalLM.from_pretrained(base)
    tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
    weights = load_file(result.path / "model" / "adapter_model.safetensors")
    rows = {name: value for name, value in weights.items() if "trainable_tokens" in name}
    assert [value.shape[0] for value in rows.values()] == [2] * (1 if tied else 2)
    assert not any("embed_tokens.weight" in name or "lm_head.weight" in name for name in weights), "no whole tables"
    assert result.model.adapter["trainable_token_indices"]
    before = plain.get_input_embeddings().weight[:OLD].mean(dim=0)
    plain.resize_token_embeddings(2050, mean_resizing=False)
    loaded = PeftModel.from_pretrained(plain, result.path / "model")
    merged = AutoModelForCausalLM.from_pretrained(result.path / "merged")
    ids = torch.tensor([[5, NEW[0], 7, NEW[1], 9]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    first, second = merged.get_input_embeddings().weight[NEW]
    assert not torch.allclose(first, second, atol=1e-3), "each has learned its own"
    assert not torch.allclose(first, before, atol=1e-3)
    base_rows = AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight
    assert torch.equal(merged.get_input_embeddings().weight[:OLD], base_rows), "no other row has changed"
    again = _train(
        tmp_path / "again", base, added, adapter={"type": "lora", "name_or_path": str(result.path / "model")},
        train__learning_rate=1e-12,
    )  # fmt: skip
    with torch.no_grad():
        resaved = load_file(again.path / "model" / "adapter_model.safetensors")
    assert all(torch.allclose(resaved[name], value) for name, value in rows.items())


ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("overrides", [{}, ROPE], ids=["as it is", "overridden"])
@pytest.mark.parametrize("grows", [True, False], ids=["grown", "of its size"])
def test_the_model_card_says_how_the_base_becomes_that_of_training(
    tmp_path: Path, base: Path, added: Tokenizer, tokenizer: Tokenizer, overrides: dict[str, Any], grows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = {"name_or_path": str(base), "config_overrides": overrides, "add_tokens": ["zorkmid"] * grows}
    model["add_special_tokens"] = ["<|act|>"] * grows
    config = make_config(
        tmp_path / "run", model=model, adapter={**LORA, "merge": True}, train__learning_rate=0.05, train__max_steps=2
    )
    result = fit_data(config, added if grows else tokenizer, make_data(_segments() if grows else make_segments(8)))
    card = (result.path / "model" / "README.md").read_text()
    assert (LOADING in card) == bool(overrides or grows)
    merged = AutoModelForCausalLM.from_pretrained(result.path / "merged").eval()
    alone: Any = None
    if LOADING in card:
        monkeypatch.chdir(result.path / "model")
        told: dict[str, Any] = {}
        exec(card.partition("```python")[2].partition("```")[0], told)
        alone = told["model"].eval()
    else:
        alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), result.path / "model").eval()
    ids = torch.tensor([[5, NEW[0] if grows else 6, 7, NEW[1] if grows else 8, 9] * 3])
    with torch.no_grad():
        torch.testing.assert_close(alone(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    if overrides and not grows:  # control
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), result.path / "model").eval()
        with torch.no_grad():
            assert (plain(ids).logits - merged(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["Zürichsee", "foo bar", " lead", "ＦＵＬＬ"])
def test_an_added_token_is_found_in_the_same_texts_with_the_saved_tokenizer(name: str, tmp_path: Path) -> None:
    """The tokenizer composes characters (NFC), which is done before or after the token is looked for."""
    source = Path(shutil.copytree(tokenizer_folder("tiny-qwen3"), tmp_path / "source"))
    spec = json.loads((source / "tokenizer.json").read_text("utf-8"))
    (source / "tokenizer.json").write_text(json.dumps({**spec, "normalizer": {"type": "NFC"}}), "utf-8")
    run = load_tokenizer(source, added=AddedTokens(ordinary=(name,), special=("<|act|>",)))
    save_tokenizer(run, tmp_path / "saved")
    theirs, again = AutoTokenizer.from_pretrained(tmp_path / "saved"), load_tokenizer(tmp_path / "saved")
    for form in ("NFC", "NFD", "NFKC"):
        text = f"a {unicodedata.normalize(form, name)} b{unicodedata.normalize(form, name)}c"
        ids = run.encode_runs([text])[0].tolist()
        assert again.encode_runs([text])[0].tolist() == ids
        assert theirs.encode(text, add_special_tokens=False) == ids


def test_a_tokenizer_that_would_be_saved_with_other_ids_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(tokenizer_folder("tiny-qwen3"), tmp_path / "source"))
    spec = json.loads((source / "tokenizer.json").read_text("utf-8"))
    (source / "tokenizer.json").write_text(json.dumps({**spec, "normalizer": {"type": "NFC"}}), "utf-8")
    run = load_tokenizer(source, added=AddedTokens(ordinary=("Zürichsee",)))
    normalized = [AddedToken("Zürichsee", normalized=True)]
    monkeypatch.setattr(Tokenizer, "added_tokens", property(lambda _: normalized))
    with pytest.raises(TokenizerError, match="otherwise than this run"):
        transformers_tokenizer(run)


ENDS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": "pissa"},
    {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"init_lora_weights": "pissa"},
]


@pytest.mark.filterwarnings("ignore")  # PEFT's, of a table that has grown
@pytest.mark.parametrize("more", ENDS, ids=["head", "table", "pissa head", "dora head", "head saved", "both", "pissa"])
def test_an_adapter_of_which_an_end_is_trained_has_all_first_values_of_the_rows(
    more: dict[str, Any], tmp_path: Path, base: Path, added: Tokenizer
) -> None:
    def run(folder: str, **also: Any) -> RunResult:
        return _train(tmp_path / folder, base, added, adapter={**LORA, **more, "merge": True}, **also)

    plain = AutoModelForCausalLM.from_pretrained(base)
    tied = plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
    if tied and (more.get("modules_to_save") == ["lm_head"] or ("lm_head" in str(more) and len(more) > 1)):
        with pytest.raises(ModelError, match="embedding"):
            run("run")
        return
    result = run("run")
    plain.resize_token_embeddings(2050, mean_resizing=False)
    with torch.no_grad():
        plain.get_output_embeddings().weight[NEW] = 7.0  # the adapter says what they are
        plain.get_input_embeddings().weight[NEW] = 7.0
    loaded = PeftModel.from_pretrained(plain, result.path / "model").eval()
    merged = AutoModelForCausalLM.from_pretrained(result.path / "merged").eval()
    ids = torch.tensor([[5, NEW[0], 7, NEW[1], 9]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    weights = load_file(result.path / "model" / "adapter_model.safetensors")
    assert not any("original_module" in name or "modules_to_save" in name for name in weights), "a table is saved once"


def test_an_adapted_output_layer_with_the_rows_of_the_embedding_is_merged_into_whole_weights(
    tmp_path: Path, base: Path, added: Tokenizer
) -> None:
    model = {"name_or_path": str(base), "add_tokens": ["zorkmid"], "add_special_tokens": ["<|act|>"]}
    adapter = {**LORA, "target_modules": ["q_proj", "lm_head"], "merge": True}
    result = _train(tmp_path / "run", base, added, adapter=adapter, model={**model, "quantization": "nf4"})
    merged = AutoModelForCausalLM.from_pretrained(result.path / "merged")
    assert merged.get_input_embeddings().weight.shape[0] == 2050


def test_a_killed_run_goes_on_with_its_rows(tmp_path: Path, base: Path, added: Tokenizer) -> None:
    saving = {"output__save_strategy": "steps", "output__save_steps": 2, "train__max_steps": 4}
    whole = _train(tmp_path / "whole", base, added, **saving)
    _train(tmp_path / "part", base, added, **saving)
    for name in ("checkpoint-4", "model"):
        (tmp_path / "part" / name).rename(tmp_path / name)
    (tmp_path / "part" / "result.json").unlink()
    resumed = _train(tmp_path / "part", base, added, **saving)
    assert resumed.resumed_from == "checkpoint-2"
    first, second = (load_file(r.path / "model" / "adapter_model.safetensors") for r in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def _adapted(base: Path, tmp_path: Path, **adapter: Any) -> Any:
    torch.manual_seed(3)
    config = make_config(tmp_path, model={"name_or_path": str(base), "add_tokens": ["a", "b"]}, adapter=adapter or LORA)
    vocabulary = Vocabulary(size=2050, eos_token_id=2034, pad_token_id=2032, new_ids=tuple(NEW))
    return apply_adapter(load_model(config, vocabulary).model, config.adapter, new_ids=NEW)


def test_the_tapped_head_has_the_rows_and_their_gradients(base: Path, tmp_path: Path) -> None:
    model = _adapted(base, tmp_path).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "trainable_tokens" in name:
                weight.normal_(std=0.5)
    ids = torch.tensor([[5, NEW[0], 7, NEW[1], 9, 11]])
    targets = torch.tensor([NEW[0], 7, NEW[1], 9, 11])
    head = find_head(model)
    scored = score_targets(
        model, {"input_ids": ids}, torch.arange(5), lambda hidden, own: token_scores(hidden, own, targets).logps_K,
        head=head,
    )  # fmt: skip
    rows = [weight for name, weight in model.named_parameters() if "trainable_tokens" in name]
    found = torch.autograd.grad(scored.scores.sum(), rows)
    logps = model(input_ids=ids).logits[0, :5].log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scored.scores, logps, rtol=1e-4, atol=1e-4)
    for one, other in zip(found, torch.autograd.grad(logps.sum(), rows), strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_without_the_adapter_the_rows_are_the_mean_so_that_a_reference_is_the_model_before(
    base: Path, tmp_path: Path
) -> None:
    model = _adapted(base, tmp_path).eval()
    ids = torch.tensor([[5, NEW[0], 7]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for name, weight in model.named_parameters():
            if "trainable_tokens" in name:
                weight.add_(1.0)
        after = model(input_ids=ids).logits
        with model.disable_adapter():
            reference = model(input_ids=ids).logits
            scored = score_targets(
                model, {"input_ids": ids}, torch.arange(2),
                lambda hidden, own: token_scores(hidden, own, ids[0, 1:]).logps_K, head=find_head(model),
            )  # fmt: skip
    assert not torch.allclose(before, after, atol=1e-2)
    torch.testing.assert_close(reference, before)
    expected = before[0, :2].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(scored.scores, expected, rtol=1e-4, atol=1e-4)


class Written:
    """The base model with the adapter written into its weights: ``W + (alpha / r) B A``, and rows of new tokens."""

    def __init__(self, base: Path, weights: dict[str, torch.Tensor], trained: Iterable[str] = ()) -> None:
        plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
        plain.resize_token_embeddings(OLD + len(NEW), mean_resizing=False)
        self.model = plain.eval()
        own = {name: value.double() for name, value in weights.items()}
        self.trained = {name: own[name].requires_grad_() for name in trained}
        self.weights: dict[str, torch.Tensor] = {}
        places = ("", "base_layer.", "original_module.", "token_adapter.base_layer.")
        for name in dict(plain.named_parameters()):
            module, _, kind = f"base_model.model.{name}".rpartition(".")
            weight = next(own[at] for at in (f"{module}.{place}{kind}" for place in places) if at in own)
            if (a := own.get(f"{module}.lora_A.default.{kind}")) is not None:
                weight = weight + 2 * own[f"{module}.lora_B.default.{kind}"] @ a
            if (rows := own.get(f"{module}.token_adapter.trainable_tokens_delta.default")) is not None:
                weight = weight.index_copy(0, torch.tensor(NEW), rows)
            self.weights[name] = weight

    def __call__(self, **inputs: Any) -> Any:
        return torch.func.functional_call(self.model, self.weights, (), inputs, tie_weights=True)


def test_pairs_with_new_tokens_are_learned_as_by_a_loop_written_by_hand(
    base: Path, added: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_row = tiny_rows.make_row

    def with_new_tokens(number: int, **kinds: Any) -> Sample:
        row = plain_row(number, **kinds)
        ids = row.input_ids.copy()
        starts = np.cumsum([0, *(branch.length for branch in row.branches)])[:-1]
        ids[starts] = [NEW[(number + place) % 2] for place in range(len(starts))]
        return replace(row, input_ids=ids)

    monkeypatch.setattr(tiny_rows, "make_row", with_new_tokens)
    steps = written_out.steps_taken(monkeypatch)
    config = make_config(
        tmp_path / "run",
        model={"name_or_path": str(base), "add_tokens": ["zorkmid"], "add_special_tokens": ["<|act|>"]},
        adapter={**LORA, "lora_alpha": 4},
        objective={"name": "dpo", "reference": "base"},
        train__max_steps=2, train__per_device_train_batch_size=4, train__max_grad_norm=1e9,
        train__learning_rate=0.05, train__lr_scheduler_type="constant",
    )  # fmt: skip
    result = fit_data(config, added, tiny_rows.run_data(tmp_path / "store", config, rows=range(4)))
    policy, reference = Written(base, steps[1].weights, steps[1].gradients), Written(base, steps[0].weights)
    rows = [with_new_tokens(number, continuations=2) for number in range(4)]
    pairs = written_out.pairs_of(policy, reference, rows)
    loss = written_out.pair_losses("sigmoid", {"beta": 0.1, "sft_weight": 0.0}, pairs).mean()
    assert result.steps[1].loss == pytest.approx(loss.item(), rel=1e-5)
    assert any("trainable_tokens" in name for name in policy.trained)
    for name, expected in zip(policy.trained, torch.autograd.grad(loss, policy.trained.values()), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(steps[1].gradients[name].double(), expected, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("adapter", "left"),
    [
        ({"type": "freeze", "freeze_trainable_layers": 1}, True),
        ({"type": "freeze", "freeze_trainable_modules": ["*embed_tokens*", "*lm_head*"]}, False),
        ({"type": "oft", "oft_block_size": 4, "target_modules": ["q_proj"]}, True),
        ({"type": "full"}, False),
        ({**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}, False),
        (LORA, False),
    ],
)
def test_rows_that_stay_frozen_are_known(base: Path, tmp_path: Path, adapter: dict[str, Any], left: bool) -> None:
    tied = AutoModelForCausalLM.from_pretrained(base).config.tie_word_embeddings
    if tied and "lm_head" in adapter.get("modules_to_save", ()):
        pytest.skip("PEFT makes two tables of one there")
    if tied and adapter.get("freeze_trainable_modules"):
        adapter = {**adapter, "freeze_trainable_modules": ["*embed_tokens*"]}
    model = _adapted(base, tmp_path, **adapter)
    assert bool(rows_left_out(model, NEW)) is left
    wrapped = [each for each in model.modules() if isinstance(each, TrainableTokensWrapper)]
    assert bool(wrapped) is (adapter == LORA)


def test_frozen_rows_are_told(tmp_path: Path, base: Path, added: Tokenizer) -> None:
    notes: list[str] = []
    _train(
        tmp_path / "run", base, added, train__max_steps=1, adapter={"type": "freeze", "freeze_trainable_layers": 1},
        on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
    )  # fmt: skip
    assert any("2 new tokens" in note and "keep their first values" in note for note in notes)


def test_spare_rows_of_the_table_begin_as_the_mean(tmp_path: Path, base: Path) -> None:
    config = make_config(tmp_path, model={"name_or_path": str(base), "add_tokens": ["a"]})
    model = load_model(config, Vocabulary(size=OLD, eos_token_id=2034, pad_token_id=2032, new_ids=(OLD - 1,))).model
    table = model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(table[OLD - 1], table[: OLD - 1].mean(dim=0))
    assert np.isfinite(table.numpy()).all()


def test_an_output_layer_whose_rows_cannot_be_trained_is_refused(tmp_path: Path, base: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.lm_head = torch.nn.Linear(plain.config.hidden_size, OLD)  # with a bias, which PEFT would leave out
    with pytest.raises(ModelError, match="cannot be trained"):
        apply_adapter(plain, make_config(tmp_path, adapter=LORA).adapter, new_ids=[OLD - 1])


# ------------------------------------------------------------------------------------------------------ first values


def _begun(base: Path, folder: Path, added: Tokenizer, **section: Any) -> list[torch.Tensor]:
    """The new rows of the embedding, and of the output layer, as a run finds them."""
    model = {"name_or_path": str(base), "add_tokens": ["zorkmid"], "add_special_tokens": ["<|act|>"], **section}
    config = make_config(folder, model=model)
    loaded = load_model(config, Vocabulary.of(added, config.model.token_descriptions)).model
    return [end.weight[NEW].detach() for end in (loaded.get_input_embeddings(), loaded.get_output_embeddings())]


def test_a_described_token_begins_as_the_mean_of_its_words_and_others_as_that_of_all(
    tmp_path: Path, base: Path, added: Tokenizer
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    words = [int(word) for word in added.encode_runs(["begins a tool call"])[0]]
    assert len(words) > 1
    begun = _begun(base, tmp_path, added, token_descriptions={"<|act|>": "begins a tool call"})
    for rows, end in zip(begun, (plain.get_input_embeddings(), plain.get_output_embeddings()), strict=True):
        torch.testing.assert_close(rows[0], end.weight[:OLD].mean(dim=0))
        torch.testing.assert_close(rows[1], end.weight[words].mean(dim=0))
        assert not torch.allclose(rows[0], rows[1], atol=1e-3)


def test_noise_keeps_new_tokens_apart_and_is_the_same_at_every_start(
    tmp_path: Path, base: Path, added: Tokenizer
) -> None:
    table = AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight
    first, again = (_begun(base, tmp_path, added, new_token_noise=0.5)[0] for _ in range(2))
    assert torch.equal(first, again) and not torch.allclose(first[0], first[1])
    shift = (first - table.mean(dim=0)) / table.std(dim=0)
    assert 0.3 < shift.std() < 0.7
    assert torch.equal(*_begun(base, tmp_path, added)[0])  # without it they begin alike


def test_a_table_to_which_nothing_is_added_is_not_gone_through(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mean takes a copy of it in float32, which of a large model is two gigabytes."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("nobody asks for a mean")

    config = make_config(tmp_path, model={"name_or_path": str(base)})
    monkeypatch.setattr(torch.Tensor, "mean", fail)
    load_model(config, Vocabulary(size=OLD, eos_token_id=2034, pad_token_id=2032))
    with pytest.raises(AssertionError, match="nobody"):
        load_model(config, Vocabulary(size=OLD, eos_token_id=2034, pad_token_id=2032, new_ids=(OLD - 1,)))


def test_a_description_without_known_words_is_refused(added: Tokenizer) -> None:
    with pytest.raises(ModelError, match=r"model\.token_descriptions"):
        Vocabulary.of(added, {"<|act|>": "zorkmid"})  # which is new itself
    with pytest.raises(ModelError, match="is not new"):
        Vocabulary.of(added, {"the": "an article"})


@pytest.mark.parametrize("keys", ["token_descriptions: {b: words}", "new_token_noise: 0.1"])
def test_first_values_of_tokens_that_are_not_added_are_refused(keys: str) -> None:
    added = "add_tokens: [a], " if "descriptions" in keys else ""
    with pytest.raises(ConfigError) as raised:
        model = f"{{name_or_path: preset:tiny-qwen3, {added}{keys}}}"
        load_config_text(f"model: {model}\ndata: {{train: preset:skills#9}}\n")
    assert raised.value.problems[0].key.startswith(f"model.{keys.partition(':')[0]}")
