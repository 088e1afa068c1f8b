"""Every optimizer goes on from its saved state to the last bit, and reads the settings that its row lists. That each
learns is tried for the support matrix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import MODELS
from tiny_runs import TINY, make_config, make_data, make_segments
from tiny_vlms import tiny_vlm
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from luthier.config.choices import AdapterType, ModelPart
from luthier.config.loading import load_config_text
from luthier.config.machine import is_installed
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import AdapterConfig, TrainConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import CheckpointError, ConfigError, ModelError
from luthier.models.adapters import apply_adapter, decoder_layers
from luthier.presets import model_folder
from luthier.training.fit import fit_data
from luthier.training.folder.state import optimizer_state, put_optimizer_state, read_state, write_state
from luthier.training.optimizer import decayed_names, make_optimizer, training_arguments
from luthier.training.report import RunResult
from luthier.training.updates import BackwardUpdates, OffloadedOptimizer
from scripts.doc_tables import optimizer_table

ELSEWHERE = {"adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision"}
ON_GPU_ALONE = {"galore_adamw_8bit", "galore_adamw_8bit_layerwise"}
OURS = {"muon", "badam", "adam_mini", "lomo", "adalomo"}  # made here, as those of GaLore and APOLLO
HERE = [name for name in OPTIMIZERS if name not in ELSEWHERE | ON_GPU_ALONE]
THEIRS = [name for name in HERE if name not in OURS and not name.startswith(("galore", "apollo"))]
DATA = make_data(make_segments(4))
FAST = {"sgd": 0.5, "lomo": 0.5, "schedule_free_sgd": 2.0, "adagrad": 1e-2, "adalomo": 1e-1}
Run = Callable[..., RunResult]

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages have to say of a CPU and of themselves


@pytest.fixture(autouse=True)
def _eager() -> Any:
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its updates, which takes longer than a run
        yield


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Run:
    def train(optim: str, *, folder: str = "run", **changes: Any) -> RunResult:
        changes = {"train__learning_rate": FAST.get(optim, 1e-2), "train__lr_scheduler_type": "constant", **changes}
        changes = {"train__per_device_train_batch_size": 4, **changes}
        config = make_config(tmp_path / folder, train__optim=optim, **changes)
        return fit_data(config, tokenizer, DATA)

    return train


def _require(optim: str) -> None:
    for module, package in OPTIMIZERS[optim].needs:
        if not is_installed(module):
            pytest.skip(f"{package} is not installed")


def _model(**sizes: Any) -> Any:
    """The matrices are as large as states of 8 bits want them."""
    torch.manual_seed(1)
    sizes = {**TINY, "vocab_size": 256, "pad_token_id": 0, "intermediate_size": 128, **sizes}
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("tiny-qwen3"), **sizes))


def _made(model: Any, optim: str, **settings: Any) -> Any:
    train = TrainConfig(optim=optim, learning_rate=1e-2, weight_decay=0.1, optim_args=settings)
    config = make_config(Path("nowhere"), train=train.model_dump())
    arguments = training_arguments(config, max_steps=4, evaluates=False, evaluates_first=False)
    optimizer: Any = make_optimizer(model, arguments, config)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def _steps(model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(number))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------------------- all


def test_no_norm_decays_whatever_it_is_called() -> None:
    model = nn.Module()
    model.norm1, model.ln_pre, model.norm_f = nn.RMSNorm(4), nn.LayerNorm(4), nn.GroupNorm(1, 4)
    model.normed = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    assert decayed_names(model) == {"normed.0.weight"}


def test_a_projection_is_in_the_order_in_which_it_is_written(tmp_path: Path) -> None:
    """Else a run that goes on multiplies with another order of the same numbers, which is rounded otherwise."""
    _require("galore_adamw")
    model = _model()
    optimizer = _made(model, "galore_adamw", rank=4)
    _steps(model, optimizer, range(1))
    matrices = [v["projector"].ortho_matrix for v in optimizer.state.values() if "projector" in v]
    assert matrices and all(matrix.is_contiguous() for matrix in matrices)


def _described(optimizer: Any) -> tuple[Any, ...]:
    """Class, settings, and which weights of the model are in which group."""
    return type(optimizer), [
        ({name: value for name, value in group.items() if name != "params"}, [id(weight) for weight in group["params"]])
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("optim", THEIRS)
def test_what_transformers_makes_is_made_as_its_trainer_does(tmp_path: Path, optim: str) -> None:
    _require(optim)
    config = make_config(tmp_path, train__optim=optim, train__weight_decay=0.1)
    arguments = training_arguments(config, max_steps=4, evaluates=False, evaluates_first=False)
    model = _model()
    theirs = transformers.Trainer(model, arguments).create_optimizer()
    if optim == "stable_adamw":
        theirs.param_groups = [{**group, "triton": False} for group in theirs.param_groups]
    ours = make_optimizer(model, arguments, config)
    assert _described(ours) == _described(theirs)


@pytest.mark.parametrize("optim", HERE)
def test_a_saved_state_goes_on_to_the_last_bit_or_is_refused(tmp_path: Path, optim: str) -> None:
    _require(optim)
    whole, optimizer = _model(), None
    optimizer = _made(whole, optim, **({"switch_every": 2} if optim == "badam" else {}))
    _steps(whole, optimizer, range(3))
    if optim == "grokadamw":  # it keeps its state in its settings, under the weights themselves
        with pytest.raises(CheckpointError):
            write_state(tmp_path, "optimizer", optimizer_state(optimizer, None, sharded=False, keep=True))
        return
    two_points = hasattr(optimizer, "eval")
    trained = [weight.detach().clone() for group in optimizer.param_groups for weight in group["params"]]
    state = optimizer_state(optimizer, trained if two_points else None, sharded=False, keep=True)
    write_state(tmp_path, "optimizer", state)
    resumed = copy.deepcopy(whole)
    again = _made(resumed.requires_grad_(True), optim, **({"switch_every": 2} if optim == "badam" else {}))
    put_optimizer_state(again, read_state(tmp_path, "optimizer"))
    _steps(whole, optimizer, range(3, 6))
    _steps(resumed, again, range(3, 6))
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_state_of_weights_that_had_16_bits_goes_on_beside_weights_that_have_32() -> None:
    """Earlier versions trained modules beside an adapter in the base's type."""
    before, now = _model().to(torch.bfloat16), _model()
    optimizer = _made(before, "adamw_torch")
    for parameter in before.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    again = _made(now, "adamw_torch")
    put_optimizer_state(again, copy.deepcopy(optimizer_state(optimizer, None, sharded=False, keep=True)))
    _steps(now, again, range(2))
    assert {kept["exp_avg"].dtype for kept in again.state.values()} == {torch.float32}


OTHER = {float: 0.5, bool: True, int: 3}


@pytest.mark.parametrize("optim", [name for name in HERE if OPTIMIZERS[name].settings])
def test_every_setting_of_the_row_changes_the_optimizer(optim: str) -> None:
    _require(optim)
    model = _model()
    usual = _described_wholly(_made(model, optim))
    for name, default in OPTIMIZERS[optim].settings.items():
        match default:
            case (_,):
                continue  # there is no other value
            case tuple():
                other: Any = default[-1]
            case type():
                other = OTHER[default]
            case bool():
                other = not default
            case _:
                other = default / 2 or 0.5
                other = type(default)(other)
        more = {"momentum": 0.5} if name == "nesterov" else {}
        model.requires_grad_(True)
        assert _described_wholly(_made(model, optim, **more, **{name: other})) != usual, name


def _described_wholly(optimizer: Any) -> Any:
    own = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str | bool)}
    return _described(optimizer), own


# ------------------------------------------------------------------------------------------------------------ muon


def test_states_of_an_earlier_run_s_embedding_are_not_asked_of_the_next_run_s_weights() -> None:
    """bitsandbytes keeps, for the whole process and by their numbers, whose states have 32 bits."""
    _require("adamw_bnb_8bit")
    whole, part = _model(), _model()
    part.requires_grad_(False).model.layers[0].mlp.requires_grad_(True)
    kinds = []
    for model in (whole, part):
        optimizer = _made(model, "adamw_bnb_8bit")
        _steps(model, optimizer, range(1))
        kinds.append([state["state1"].dtype for state in optimizer.state.values()])
    assert kinds[0][0] == torch.float32 and set(kinds[1]) == {torch.uint8}


def test_muon_updates_hidden_matrices_and_adamw_all_other_weights_as_torch_does() -> None:
    model, expected = _model(), _model()
    hidden = [
        weight for name, weight in expected.named_parameters() if weight.dim() == 2 and "embed" not in name
    ]  # the output layer is the embedding
    rest = [weight for weight in expected.parameters() if not any(weight is each for each in hidden)]
    ids = {id(weight) for weight in hidden}
    by_hand = [
        torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([weight for weight in rest if weight.dim() == 2], lr=1e-2, weight_decay=0.1),
        torch.optim.AdamW([weight for weight in rest if weight.dim() == 1], lr=1e-2, weight_decay=0.0),
    ]
    assert len(ids) == 14  # seven in each of two layers

    class Three:
        def step(self) -> None:
            for each in by_hand:
                each.step()

        def zero_grad(self) -> None:
            expected.zero_grad()

    _steps(model, _made(model, "muon"), range(3))
    _steps(expected, Three(), range(3))
    for (name, one), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(one, other[1]), name


def test_the_output_layer_of_an_untied_model_is_not_muons() -> None:
    model = _model(tie_word_embeddings=False)
    optimizer = _made(model, "muon")
    of_muon = {id(weight) for group in optimizer.param_groups if group["kind"] == "muon" for weight in group["params"]}
    assert id(model.lm_head.weight) not in of_muon and id(model.model.layers[0].mlp.up_proj.weight) in of_muon


# ----------------------------------------------------------------------------------------------------------- badam


def test_badam_trains_one_layer_at_a_time_as_adamw_that_begins_anew() -> None:
    model, expected = _model(), _model()
    optimizer = _made(model, "badam", switch_every=2, switch_mode="descending")
    first, second = (list(layer.parameters()) for layer in decoder_layers(expected) or ())
    for steps, weights in ((range(2), second), (range(2, 4), first), (range(4, 6), second)):
        groups = [
            {"params": [weight for weight in weights if weight.dim() == 2], "weight_decay": 0.1},
            {"params": [weight for weight in weights if weight.dim() == 1], "weight_decay": 0.0},
        ]
        _steps(model, optimizer, steps)
        _steps(expected, torch.optim.AdamW(groups, lr=1e-2), steps)
        expected.zero_grad()
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert [weight.requires_grad for weight in model.model.layers[0].parameters()] == [True] * 11
    assert not any(weight.requires_grad for weight in model.model.layers[1].parameters())


@pytest.mark.parametrize("ends", [False, True])
def test_badam_trains_no_layer_that_is_frozen(ends: bool) -> None:
    model = _model()
    before = copy.deepcopy(model.model.layers)
    model.model.layers[1].requires_grad_(False)
    _steps(model, _made(model, "badam", switch_every=1, ends=ends), range(3))
    same = [
        all(torch.equal(*pair) for pair in zip(layer.parameters(), now.parameters(), strict=True))
        for layer, now in zip(before, model.model.layers, strict=True)
    ]
    assert same == [False, True]


def test_badam_trains_the_rest_as_a_block_of_its_own_where_that_is_asked_for() -> None:
    model = _model()
    before = model.model.embed_tokens.weight.clone()
    _steps(model, _made(model, "badam", switch_every=1, ends=True), range(3))
    assert not torch.equal(before, model.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("train: {optim: badam, learning_rates: {embedding: 1e-5}}", "train.learning_rates.embedding"),
        ("train: {optim: badam}\nadapter: {train_parts: [language_model, tower]}", "adapter.train_parts"),
        ("train: {optim: badam}\nmodel: {name_or_path: preset:tiny-qwen3, add_tokens: [<x>]}", "model.add_tokens"),
    ],
)
def test_what_badam_would_leave_as_it_is_cannot_be_asked_of_it(more: str, key: str) -> None:
    data = "data: {train: preset:skills#20}\n" + ("" if "model:" in more else "model: preset:tiny-qwen3\n")
    with pytest.raises(ConfigError) as raised:
        load_config_text(data + more)
    assert [problem.key for problem in raised.value.problems] == [key]
    load_config_text(data + more.replace("optim: badam", "optim: badam, optim_args: {ends: true}"))


def test_badam_refuses_modules_outside_of_its_layers_that_freeze_has_chosen() -> None:
    section = AdapterConfig(
        type=AdapterType.FREEZE, freeze_trainable_layers=1, freeze_trainable_modules=["model.embed_tokens.weight"]
    )
    with pytest.raises(ModelError, match=r"embed_tokens.*badam"):
        _rates(apply_adapter(_model(), section), {"optim": "badam"}, section)
    assert _rates(apply_adapter(_model(), section), {"optim": "badam", "optim_args": {"ends": True}}, section)


@pytest.mark.parametrize("optim", HERE)
def test_rates_decay_and_freezing_hold_for_every_optimizer(optim: str) -> None:
    """A part with next to no rate and a frozen weight stay; what decays goes elsewhere without decay."""
    _require(optim)
    ended = {}
    for decay in (0.0, 0.5):
        model = _model(tie_word_embeddings=False)
        frozen, embedding = model.model.layers[0].mlp.up_proj.weight, model.model.embed_tokens.weight
        frozen.requires_grad_(False)
        before = [frozen.clone(), embedding.clone(), model.lm_head.weight.clone()]
        train = {"optim": optim, "learning_rate": 1e-2, "weight_decay": decay, "layer_decay": 0.5}
        train |= {"optim_args": {"ends": True, "switch_every": 1} if optim == "badam" else {}}
        config = make_config(Path("nowhere"), train={**train, "learning_rates": {"embedding": 1e-9}})
        optimizer = make_optimizer(
            model, training_arguments(config, max_steps=4, evaluates=False, evaluates_first=False), config
        )
        getattr(optimizer, "train", lambda: None)()
        rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
        of_layers = [rates[id(layer.mlp.down_proj.weight)] for layer in model.model.layers]
        assert of_layers == pytest.approx([2.5e-3, 5e-3])
        _steps(model, optimizer, range(7))
        assert torch.equal(frozen, before[0])
        torch.testing.assert_close(embedding, before[1], rtol=0, atol=1e-5)
        assert (model.lm_head.weight - before[2]).abs().max() > 1e-4
        ended[decay] = model.lm_head.weight.detach().clone()
    assert not torch.equal(ended[0.0], ended[0.5])


@pytest.mark.parametrize("optim", [*sorted(OURS), "adafactor", "apollo_adamw", "galore_adamw"])
def test_schedules_that_read_the_rate_from_the_optimizer_find_it(run: Run, optim: str) -> None:
    _require(optim)
    for schedule, keys in (("polynomial", {"lr_end": 1e-4}), ("cosine_with_min_lr", {"min_lr": 1e-4})):
        changes = {"train__lr_scheduler_type": schedule, "train__lr_scheduler_kwargs": keys, "train__warmup_steps": 0}
        result = run(optim, folder=schedule, train__max_steps=3, **changes)
        rates = [step.learning_rate for step in result.steps]
        assert rates[0] == FAST.get(optim, 1e-2) and rates == sorted(rates, reverse=True) and rates[2] > 1e-4


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial", "inverse_sqrt"])
def test_a_run_may_be_all_warm_up(run: Run, schedule: str) -> None:
    result = run("sgd", train__max_steps=3, train__lr_scheduler_type=schedule, train__warmup_steps=3)
    assert [step.learning_rate for step in result.steps] == pytest.approx([0, FAST["sgd"] / 3, FAST["sgd"] * 2 / 3])


@pytest.mark.parametrize("optim", [name for name in HERE if not OPTIMIZERS[name].in_backward])
def test_micro_batches_of_one_row_take_the_steps_of_one_batch(run: Run, optim: str) -> None:
    _require(optim)
    whole = run(optim, folder="whole", train__max_steps=2, train__learning_rate=1e-3)
    parts = {"train__per_device_train_batch_size": 1, "train__gradient_accumulation_steps": 4}
    divided = run(optim, folder="divided", train__max_steps=2, train__learning_rate=1e-3, **parts)
    assert len(divided.steps) == len(whole.steps) == 2
    for one, other in zip(divided.steps, whole.steps, strict=True):
        assert (one.loss, one.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-3)


@pytest.mark.parametrize("optim", [name for name, row in OPTIMIZERS.items() if row.in_backward])
def test_updates_in_the_backward_pass_refuse_several_micro_batches(optim: str) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        load_config_text(f"{GOOD}train: {{optim: {optim}, gradient_accumulation_steps: 4}}\n")


# ------------------------------------------------------------------------------------------- in the backward pass


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_updates_in_the_backward_pass_are_those_after_it(run: Run, limit: float) -> None:
    """The norm is that of the whole gradient, before clipping; no micro-batch is computed twice for it without need."""
    after = run("sgd", folder="after", train__max_grad_norm=limit, train__gradient_checkpointing=True)
    during = run("lomo", folder="during", train__max_grad_norm=limit, train__gradient_checkpointing=True)
    assert [step.loss for step in during.steps] == pytest.approx([step.loss for step in after.steps], rel=1e-6)
    norms = [step.grad_norm for step in after.steps]
    assert [step.grad_norm for step in during.steps] == pytest.approx(norms, rel=1e-5)
    assert limit == 0.0 or any(norm is not None and norm > limit for norm in norms)


@pytest.mark.parametrize("optim", ["lomo", "adalomo"])
def test_updates_in_the_backward_pass_are_those_of_their_authors(optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("lomo_optim")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # AdaLomo puts its states on a GPU
    expected, model = _model(), _model()
    kind = theirs.AdaLomo if optim == "adalomo" else theirs.Lomo
    by_authors = kind(expected, lr=1e-2)
    optimizer = _made(model, optim)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    updates = BackwardUpdates(model, optimizer.step)
    for number in range(3):
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(number))
        updates.waiting = model(input_ids=ids, labels=ids).loss.backward
        updates.update(torch.inf)
        by_authors.fused_backward(expected(input_ids=ids, labels=ids).loss, 1e-2)
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=name)
        assert one.grad is None


def test_a_gradient_that_is_not_finite_changes_no_weight_in_the_backward_pass() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    updates = BackwardUpdates(model, torch.optim.SGD(model.parameters(), lr=1.0).step)
    updates.waiting = (model(torch.ones(1, 2)) * torch.inf).sum().backward
    assert not torch.isfinite(updates.update(torch.inf))
    assert torch.equal(model.weight, before)


# --------------------------------------------------------------------------------------------------------- offload


@pytest.mark.parametrize("optim", [name for name in HERE if OPTIMIZERS[name].offloads])
def test_an_offloaded_optimizer_takes_the_same_steps_and_goes_on_with_its_state(tmp_path: Path, optim: str) -> None:
    whole, plain = _model(), _model()
    offloaded = OffloadedOptimizer(_made(whole, optim))
    ids = {id(weight) for weight in whole.parameters()}
    assert not any(id(weight) in ids for group in offloaded.param_groups for weight in group["params"])
    _steps(plain, _made(plain, optim), range(5))
    _steps(whole, offloaded, range(3))
    write_state(tmp_path, "optimizer", optimizer_state(offloaded, None, sharded=False, keep=True))
    resumed = copy.deepcopy(whole)
    again = OffloadedOptimizer(_made(resumed, optim))
    put_optimizer_state(again, read_state(tmp_path, "optimizer"))
    _steps(whole, offloaded, range(3, 5))
    _steps(resumed, again, range(3, 5))
    for one, other, third in zip(whole.parameters(), resumed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


def test_states_that_an_optimizer_has_from_the_beginning_are_offloaded() -> None:
    def made(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for number, weight in enumerate(model.parameters(), 1):
            optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, number / 10)
        return optimizer

    plain, whole = _model(), _model()
    offloaded = OffloadedOptimizer(made(whole))
    _steps(plain, made(plain), range(2))
    _steps(whole, offloaded, range(2))
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_run_that_offloads_takes_the_same_steps(run: Run, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    real = torch.autograd.graph.saved_tensors_hooks

    def counted(pack: Any, unpack: Any) -> Any:
        def packing(tensor: torch.Tensor) -> Any:
            found = pack(tensor)
            packed.append(found[1].data_ptr() != tensor.data_ptr())
            return found

        return real(packing, unpack)

    more = {"adapter": {"type": adapter}}
    usual = run("muon", folder="usual", train__neftune_noise_alpha=5.0, **more)
    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", counted)
    less = run(
        "muon", folder="less", train__offload=["optimizer", "activations"], train__neftune_noise_alpha=5.0, **more
    )
    assert [step.loss for step in less.steps] == [step.loss for step in usual.steps]
    assert [step.grad_norm for step in less.steps] == [step.grad_norm for step in usual.steps]
    assert True in packed and False in packed  # activations are moved, weights stay


# ------------------------------------------------------------------------------------------------ rates of their own


def _rates(model: Any, train: dict[str, Any] | None = None, adapter: AdapterConfig | None = None) -> dict[str, float]:
    """The rate of each trained parameter, by name."""
    config = make_config(Path("nowhere"), train={"learning_rate": 1e-3, "weight_decay": 0.1, **(train or {})})
    config = config.model_copy(update={"adapter": adapter or AdapterConfig()})
    arguments = training_arguments(config, max_steps=4, evaluates=False, evaluates_first=False)
    optimizer = make_optimizer(model, arguments, config)
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert optimizer.param_groups[0]["lr"] == 1e-3  # what is logged
    return {names[id(weight)]: group["lr"] for group in optimizer.param_groups for weight in group["params"]}


def test_loraplus_gives_b_its_own_learning_rate() -> None:
    section = AdapterConfig(type=AdapterType.LORA, r=4, loraplus_lr_ratio=16.0)
    model = apply_adapter(_model(), section)
    rates = _rates(model, adapter=section)
    assert set(rates) == {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {rate for name, rate in rates.items() if "lora_B" in name} == {1.6e-2}
    assert {rate for name, rate in rates.items() if "lora_A" in name} == {1e-3}
    section = AdapterConfig(type=AdapterType.OFT, oft_block_size=8, loraplus_lr_ratio=16.0)
    with pytest.raises(ModelError, match="no lora_B"):
        _rates(apply_adapter(_model(), section), adapter=section)


@pytest.mark.parametrize("optim", ["adamw_torch", "muon", "adam_mini"])
def test_layers_further_down_have_lower_rates_and_parts_their_own(optim: str) -> None:
    _require(optim)
    train = {"layer_decay": 0.5, "learning_rates": {"output_layer": 3e-3}, "optim": optim}
    model = _model(tie_word_embeddings=False)
    rates = _rates(model, train)
    expected = {"model.layers.1.": 5e-4, "model.layers.0.": 2.5e-4, "model.embed": 1.25e-4, "model.norm": 1e-3}
    for prefix, rate in {**expected, "lm_head": 3e-3}.items():
        assert {value for name, value in rates.items() if name.startswith(prefix)} == {rate}, prefix
    assert set(rates) == {name for name, _ in model.named_parameters()}


def test_a_layer_decays_with_its_adapter() -> None:
    section = AdapterConfig(type=AdapterType.LORA, r=4, loraplus_lr_ratio=4.0)
    rates = _rates(apply_adapter(_model(), section), {"layer_decay": 0.5}, section)
    assert {rate for name, rate in rates.items() if "layers.0" in name and "lora_B" in name} == {1e-3}
    assert {rate for name, rate in rates.items() if "layers.0" in name and "lora_A" in name} == {2.5e-4}


def test_parts_of_a_model_that_sees_and_routers_have_rates_of_their_own() -> None:
    model = tiny_vlm("llava")
    section = AdapterConfig(train_parts=list(ModelPart))
    rates = _rates(apply_adapter(model, section), {"learning_rates": {"tower": 1e-5, "projector": 1e-2}}, section)
    assert {rate for name, rate in rates.items() if "vision_tower" in name} == {1e-5}
    assert {rate for name, rate in rates.items() if "multi_modal_projector" in name} == {1e-2}
    assert {rate for name, rate in rates.items() if "language_model" in name} == {1e-3}
    rates = _rates(MODELS["qwen3_moe"](), {"learning_rates": {"router": 1e-5, "embedding": 1e-4}})
    assert {name for name, rate in rates.items() if rate == 1e-5} == {name for name in rates if ".gate.weight" in name}
    assert [name for name, rate in rates.items() if rate == 1e-4] == ["model.embed_tokens.weight"]


def test_an_output_layer_that_is_trained_apart_from_its_embedding_has_a_rate() -> None:
    section = AdapterConfig(type=AdapterType.LORA, r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = apply_adapter(_model(tie_word_embeddings=True), section)
    rates = _rates(model, {"learning_rates": {"output_layer": 1e-4}}, section)
    assert {name: rate for name, rate in rates.items() if rate != 1e-3} == {
        "base_model.model.lm_head.modules_to_save.default.weight": pytest.approx(1e-4)
    }


@pytest.mark.parametrize("part", ["output_layer", "router", "tower", "projector"])
def test_a_part_that_is_not_there_or_not_trained_is_refused(part: str) -> None:
    with pytest.raises(ModelError, match=r"train\.learning_rates"):
        _rates(_model(), {"learning_rates": {part: 1e-4}})
    with pytest.raises(ModelError, match="tower"):
        _rates(apply_adapter(tiny_vlm("llava"), AdapterConfig()), {"learning_rates": {"tower": 1e-4}})


def test_routers_are_frozen_where_that_is_asked_for() -> None:
    section = AdapterConfig(train_routers=False)
    frozen = [name for name, weight in apply_adapter(MODELS["qwen3_moe"](), section).named_parameters()
              if not weight.requires_grad]  # fmt: skip
    assert frozen and all(name.endswith(".gate.weight") for name in frozen)
    with pytest.raises(ModelError, match="train_routers"):
        apply_adapter(_model(), section)


# -------------------------------------------------------------------------------------------------------- settings

GOOD = "model: preset:tiny-qwen3\ndata: {train: preset:skills#20}\n"


@pytest.mark.parametrize(
    ("train", "adapter", "key"),
    [
        ("{optim: muon, optim_args: {momentun: 0.9}}", "full", "train.optim_args.momentun"),
        ("{optim: galore_adamw, optim_args: 'rank=0'}", "full", "train.optim_args.rank"),
        ("{optim: rmsprop, optim_args: {alpha: 2.0}}", "full", "train.optim_args.alpha"),
        ("{optim: ademamix, optim_args: {beta3: 1.5}}", "full", "train.optim_args.beta3"),
        ("{optim: galore_adamw, optim_args: {proj_type: up}}", "full", "train.optim_args.proj_type"),
        ("{optim: adamw_torch, optim_args: {rank: 8}}", "full", "train.optim_args.rank"),
        ("{optim: muon, optim_args: {nesterov: 1}}", "full", "train.optim_args.nesterov"),
        ("{optim: muon, optim_args: 'momentum'}", "full", "train.optim_args"),
        ("{optim: galore_adamw_layerwise, tokens_per_step: 64}", "full", "train.tokens_per_step"),
        ("{optim: adalomo, precision: fp16}", "full", "train.precision"),
        ("{optim: badam}", "lora", "train.optim"),
        ("{optim: lomo, offload: optimizer}", "full", "train.offload"),
        ("{optim: adamw_8bit, offload: [optimizer]}", "full", "train.offload"),
        ("{offload: activations, gradient_checkpointing: true}", "lora", "train.offload"),
        ("{offload: activations, torch_compile: true}", "lora", "train.offload"),
        ("{optim: galore_adamw}", "oft", "train.optim"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused_at_its_key(train: str, adapter: str, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config_text(f"{GOOD}train: {train}\nadapter: {adapter}\n")
    (problem,) = raised.value.problems
    assert (problem.key, problem.where.rpartition(":")[2]) == (key, "3")


def test_settings_are_written_as_a_mapping_or_as_other_tools_write_them() -> None:
    asked = [
        load_config_text(f"{GOOD}train: {{optim: galore_adamw, optim_args: {args}}}\n").train.optim_args
        for args in ("{rank: 16, scale: 0.5, proj_type: right}", "'rank=16, scale=0.5, proj_type=right'")
    ]
    assert asked[0] == asked[1] == {"rank": 16, "scale": 0.5, "proj_type": "right"}


def test_the_page_has_every_optimizer_with_what_it_reads() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
    assert optimizer_table() in page.read_text(encoding="utf-8"), "run `make docs`"
