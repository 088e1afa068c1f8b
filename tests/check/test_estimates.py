"""Estimates of time and memory, against what torch counts while a model really trains a step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
    TrainingArguments,
)

from luthier.check.plan.estimate import (
    DEVICE_NAMES,
    GIB,
    LOSS_CHUNK_BYTES,
    UTILISATION,
    Device,
    Memory,
    check_name,
    device_named,
    estimate_run,
    memory_of,
    operations_of,
    optimizer_bytes,
    present_device,
    table_name,
)
from luthier.check.plan.terminal import duration, estimate_table, size
from luthier.check.plan.work import EpochWork, shape_of
from luthier.config.choices import Offload, Packing
from luthier.config.inputs import QuantizationConfig
from luthier.config.schema import RunConfig, TrainConfig
from luthier.encoding.tokenizer import load_tokenizer
from luthier.errors import ModelError, UserError
from luthier.models.adapters import apply_adapter, count_parameters
from luthier.models.model import build_weightless
from luthier.models.quantized import bytes_when_quantized, held_tensors, kept_modules, loading_config, num_bytes
from luthier.models.vocabulary import Vocabulary
from luthier.packing import PlanSettings, SegmentTable
from luthier.packing.epoch import plan_epoch
from luthier.training.optimizer import make_optimizer

VOCABULARY = 1500
QWEN = Qwen3Config(
    hidden_size=256, num_hidden_layers=4, intermediate_size=768, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=VOCABULARY,
)  # fmt: skip
LLAMA = LlamaConfig(
    hidden_size=256, num_hidden_layers=4, intermediate_size=700, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=VOCABULARY, tie_word_embeddings=True,
)  # fmt: skip
H100 = device_named("h100", in_16_bits=True)
NUM_TOKENS, NUM_TARGETS = 192, 60
FREEZE = {"type": "freeze", "freeze_trainable_layers": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_config(adapter: Any = "full", **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "preset:tiny-qwen3", "data": {"train": "x.jsonl"}, "adapter": adapter, "train": train}
    )


def built(config: Any, run: RunConfig, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return apply_adapter(model, run.adapter)


def one_row(
    num_tokens: int = NUM_TOKENS, num_targets: int = NUM_TARGETS, attended: list[int] | None = None, encoded: int = 0
) -> EpochWork:
    lengths = np.array([num_tokens] if attended is None else attended, dtype=np.int64)
    return EpochWork(
        tokens=num_tokens, targets=num_targets, attended=lengths, steps=1,
        largest_tokens=num_tokens, largest_targets=num_targets, largest_encoded=encoded,
    )  # fmt: skip


@dataclass(eq=False)
class Kept:
    """A tensor that a backward pass needs."""

    tensor: torch.Tensor


def trained_step(model: PreTrainedModel, *, in_16_bits: bool = False) -> tuple[dict[str, int], int]:
    """Operations by kind, and bytes that autograd kept, of one forward and backward pass."""
    held = [each for parameter in model.parameters() for each in held_tensors(parameter)]
    own = {each.untyped_storage().data_ptr() for each in held}
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()  # of a graph that is dropped nothing is kept

    def keep(tensor: torch.Tensor) -> Kept:
        kept.add(held := Kept(tensor))
        return held

    ids = torch.arange(NUM_TOKENS)[None] % VOCABULARY
    targets = torch.arange(NUM_TOKENS - NUM_TARGETS, NUM_TOKENS)
    counter = FlopCounterMode(display=False)
    with counter:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_16_bits),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor),
        ):
            logits = model(input_ids=ids, logits_to_keep=targets, use_cache=False).logits
        while gc.collect():  # what is dropped in a cycle goes in several turns
            pass
        storages = [next(iter(held_tensors(each.tensor))).untyped_storage() for each in kept]
        sizes = {each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in own}
        logits.float().sum().backward()
    by_kind = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    return by_kind, sum(sizes.values())


# -------------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen3", "llama, tied"])
@pytest.mark.parametrize("adapter", ["full", "lora", FREEZE], ids=["full", "lora", "freeze"])
def test_operations_are_those_that_torch_counts(config: Any, adapter: Any) -> None:
    run = run_config(adapter)
    model = built(config, run, attention="eager")
    by_kind, _ = trained_step(model)
    products = sum(count for kind, count in by_kind.items() if kind in ("aten.mm", "aten.addmm"))
    shape = shape_of(model)
    without = operations_of(shape, one_row(attended=[]), run)
    assert without == pytest.approx(products, rel=0.05)
    whole_square = by_kind["aten.bmm"]  # eager attention computes what the mask takes away, too
    attention = operations_of(shape, one_row(), run) - without
    assert attention == pytest.approx(whole_square * (NUM_TOKENS + 1) / (2 * NUM_TOKENS), rel=0.05)


def test_full_training_is_six_times_parameters_times_tokens() -> None:
    run = run_config()
    shape = shape_of(built(QWEN, run))
    assert operations_of(shape, one_row(100, 100, attended=[]), run) == 6 * (shape.body + shape.head) * 100


def test_recomputing_is_one_more_forward_pass() -> None:
    shape = shape_of(built(QWEN, run_config()))
    plain, again = (operations_of(shape, one_row(), run_config(gradient_checkpointing=on)) for on in (False, True))
    head = 6 * shape.head * NUM_TARGETS
    assert (again - head) / (plain - head) == pytest.approx(4 / 3)


def test_attention_counts_pairs_within_segments_and_within_windows() -> None:
    run = run_config()

    def pairs(shape: Any, attended: list[int]) -> float:
        more = operations_of(shape, one_row(attended=attended), run) - operations_of(shape, one_row(attended=[]), run)
        return more / (3 * 4 * shape.queries)

    full = shape_of(built(QWEN, run))
    assert pairs(full, [4]) == 4 * 10  # layers x (1 + 2 + 3 + 4)
    assert pairs(full, [2, 2]) == 4 * 6
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    said = {**QWEN.to_dict(), "use_sliding_window": True, "sliding_window": 2, "layer_types": kinds}
    half = shape_of(built(Qwen3Config(**said), run))
    assert half.windows == (None, None, 2, 2)
    assert pairs(half, [4]) == 2 * 10 + 2 * 7  # 1 + 2 + 2 + 2


def test_of_experts_only_the_chosen_ones_compute() -> None:
    config = MixtralConfig(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=300, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        shape = shape_of(AutoModelForCausalLM.from_config(config))
    attention, router, experts = 2 * 4 * 64 * 64, 2 * 8 * 64, 2 * 8 * 3 * 64 * 96
    assert shape.body == attention + router + experts // 4
    assert shape.feed_forward == 2 * 96


def test_a_model_that_says_nothing_of_its_layers_is_refused() -> None:
    class Words:
        hidden_size = 8
        num_hidden_layers = 2

        def get_text_config(self) -> Words:
            return self

    class Strange:
        config: ClassVar[Words] = Words()

    with pytest.raises(ModelError, match="shape of Strange is not known"):
        shape_of(Strange())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen3", "llama, tied"])
@pytest.mark.parametrize(
    ("adapter", "dtype", "in_16_bits"),
    [
        ("full", torch.float32, False), ("full", torch.float32, True), ("lora", torch.bfloat16, True),
        (FREEZE, torch.float32, False),
    ],
    ids=["32 bits", "16 bits", "lora", "freeze"],
)  # fmt: skip
def test_activations_are_about_what_autograd_keeps(
    config: Any, adapter: Any, dtype: torch.dtype, in_16_bits: bool
) -> None:
    run = run_config(adapter, precision="bf16" if in_16_bits else "fp32")
    model = built(config, run, dtype=dtype)
    _, kept = trained_step(model, in_16_bits=in_16_bits)
    memory = memory_of(shape_of(model), one_row(), run, on_gpu=False)
    assert memory.activations + memory.casts == pytest.approx(kept, rel=0.05)


WIDE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 768,
}  # fmt: skip
OTHERS = {
    "heads wider than the stream": MistralConfig(**WIDE, head_dim=128, sliding_window=None),
    "four norms a layer": Gemma3TextConfig(**WIDE, head_dim=64),
    "norms of what comes out": Olmo2Config(**WIDE),
    "one norm a layer": CohereConfig(**WIDE),
    "matrices in one": Phi3Config(**WIDE, pad_token_id=0),
    "no gate, torch's norms": Starcoder2Config(**WIDE),
    "no gate, a formula": PhiConfig(**WIDE),
    "experts": MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    "small experts": Qwen3MoeConfig(
        **WIDE, head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256
    ),
}


@pytest.mark.parametrize("in_16_bits", [False, True], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("name", OTHERS)
def test_activations_of_layers_of_other_makes_are_counted(name: str, adapter: str, in_16_bits: bool) -> None:
    run = run_config(adapter, precision="bf16" if in_16_bits else "fp32")
    model = built(OTHERS[name], run, dtype=torch.bfloat16 if in_16_bits and adapter == "lora" else torch.float32)
    _, kept = trained_step(model.train(), in_16_bits=in_16_bits)
    memory = memory_of(shape_of(model), one_row(), run, on_gpu=False)
    assert memory.activations + memory.casts == pytest.approx(kept, rel=0.1)


def test_what_encodes_pictures_says_nothing_of_the_language_models_norms_and_is_no_expert() -> None:
    said: dict[str, Any] = {"model": "preset:tiny-qwen3-vl", "data": {"train": "x.jsonl"}}
    config = RunConfig.model_validate(said)
    model = build_weightless(config, Vocabulary.of(load_tokenizer(config.model.name_or_path)))
    shape = shape_of(model)
    kinds = {type(module).__name__ for module in model.modules()}
    assert "LayerNorm" in kinds and any(one.ndim > 2 for one in model.parameters()), "of its encoder"
    assert (shape.norms_by_torch, shape.norms, shape.trained_experts, shape.kept_inside) == (False, 2, 0, 4)


def test_weights_gradients_and_states_are_counted_from_the_parameters() -> None:
    full, lora = run_config(precision="bf16"), run_config("lora", precision="bf16")
    model = built(QWEN, full)
    memory = memory_of(shape_of(model), one_row(), full, on_gpu=True)
    number, _ = count_parameters(model)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * number, 4 * number, 8 * number)
    assert memory.casts == 2 * number
    assert memory.logits == 2 * 2 * NUM_TARGETS * VOCABULARY + LOSS_CHUNK_BYTES
    assert memory.total == sum(getattr(memory, name) for name in memory.__dataclass_fields__)
    adapted = built(QWEN, lora, dtype=torch.bfloat16)
    memory, (whole, trained) = memory_of(shape_of(adapted), one_row(), lora, on_gpu=True), count_parameters(adapted)
    assert memory.weights == 2 * (whole - trained) + 4 * trained  # PEFT keeps adapters in 32 bits
    assert (memory.gradients, memory.optimizer, memory.casts) == (4 * trained, 8 * trained, 2 * trained)


@pytest.mark.parametrize(
    ("name", "per_parameter"),
    [
        ("adamw_torch", 8), ("adamw_torch_fused", 8), ("adamw_8bit", 2), ("adamw_torch_4bit", 1), ("sgd", 0),
        ("adafactor", 0), ("lion_32bit", 4), ("paged_lion_8bit", 1), ("rmsprop", 4), ("ademamix", 12),
    ],
)  # fmt: skip
def test_optimizers_keep_so_many_bytes_a_parameter(name: str, per_parameter: float) -> None:
    shape = shape_of(built(QWEN, run_config()))
    assert optimizer_bytes(TrainConfig(optim=name), shape) == per_parameter * shape.trainable


def test_states_that_are_of_one_layer_or_offloaded_and_gradients_that_are_not_kept_need_no_memory() -> None:
    shape = shape_of(built(QWEN, run_config()))
    assert optimizer_bytes(TrainConfig(optim="badam"), shape) == 8 * shape.trainable / shape.layers

    def memory(**train: object) -> Memory:
        config = run_config()
        changed = config.model_copy(update={"train": config.train.model_copy(update=train)})
        return memory_of(shape, one_row(), changed, on_gpu=True)

    usual, offloaded, during = memory(), memory(offload=[Offload.OPTIMIZER]), memory(optim="lomo")
    assert (usual.optimizer, offloaded.optimizer, during.optimizer) == (8 * shape.trainable, 0, 0)
    assert (offloaded.gradients, during.gradients) == (usual.gradients, 0)


@pytest.mark.parametrize(("optim", "kind"), [
    ("muon", None), ("apollo_adamw", None), ("galore_adafactor", None),
    *(("galore_adamw", kind) for kind in (None, "reverse_std", "right", "left", "full")),
])  # fmt: skip
def test_optimizers_of_hidden_matrices_keep_what_is_counted(optim: str, kind: str | None) -> None:
    """To the last number; Adafactor's own, which are as good as none in larger models, are left out."""
    given = {} if optim == "muon" else {"rank": 8, **({} if kind is None else {"proj_type": kind})}
    run = run_config(optim=optim, optim_args=given)
    model = built(QWEN, run)
    trained_step(model, in_16_bits=False)
    arguments = TrainingArguments(output_dir="unused", report_to=[], use_cpu=True)
    optimizer = make_optimizer(model, arguments, run)
    optimizer.step()
    kept = [each for state in optimizer.state.values() for each in state.values()]
    projections = [each.ortho_matrix for each in kept if hasattr(each, "ortho_matrix")]
    kept += [one for each in projections for one in (each if isinstance(each, list | tuple) else [each])]
    found = sum(each.numel() * each.element_size() for each in kept if torch.is_tensor(each) and each.dim())
    assert optimizer_bytes(run.train, shape_of(model)) == pytest.approx(found, rel=0.4 if "adafactor" in optim else 0)


LORA = {"type": "lora", "r": 8}
OTHER_ADAPTERS: list[dict[str, Any]] = [
    {**LORA, "lora_dropout": 0.05}, {**LORA, "target_modules": ["q_proj", "v_proj"]}, {**LORA, "use_dora": True},
    {**LORA, "use_dora": True, "lora_dropout": 0.05}, {"type": "vera", "r": 64}, {"type": "oft"},
]  # fmt: skip


@pytest.mark.parametrize(("how", "adapter"), [
    *((how, LORA) for how in ("nf4", "nf4, 16 bits", "fp4, plain scales", "int8", "torchao_int8", "torchao_fp8")),
    *((how, adapter) for adapter in OTHER_ADAPTERS for how in ("nf4", "nf4, 16 bits")),
], ids=str)  # fmt: skip
def test_memory_on_a_quantized_base_is_what_a_step_takes(how: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    """Weights, gradients and optimizer state to the byte, and within a tenth with what autograd keeps."""
    kind, _, more = how.partition(", ")
    half = more == "16 bits"
    dtype = torch.bfloat16 if half else torch.float32
    section = {"type": kind, **({"double_quantization": False} if "plain" in more else {})}
    run = run_config(adapter, precision="bf16" if half else "fp32")
    run = run.model_copy(update={"model": run.model.model_copy(update={"quantization": QuantizationConfig(**section)})})
    whole = AutoModelForCausalLM.from_config(QWEN, dtype=dtype)
    whole.save_pretrained(tmp_path)
    found = run.model.quantization
    how_to = loading_config(found, dtype, kept_modules(whole, found))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, quantization_config=how_to)
    model = apply_adapter(model, run.adapter).train()
    weights = sum(map(num_bytes, model.parameters()))
    _, kept = trained_step(model, in_16_bits=half)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    gradients = sum(each.grad.nbytes for each in trained)

    quantized = bytes_when_quantized(whole, found)
    if found.type.library == "bitsandbytes":
        whole.config.quantization_config = how_to.to_dict()
        assert bytes_when_quantized(whole, QuantizationConfig()) == quantized, "it may come so"
        del whole.config.quantization_config
    shape = shape_of(apply_adapter(whole, run.adapter), quantized, keeps_whole=kind.startswith("torchao"))
    memory = memory_of(shape, one_row(), run, on_gpu=False)
    assert (memory.weights, memory.gradients) == (weights, gradients)
    assert memory.optimizer == sum(each.nbytes for each in states)
    assert memory.activations == pytest.approx(kept, rel=0.1)
    model.activation_checkpointing_enable()
    _, inputs = trained_step(model, in_16_bits=half)
    again = run.model_copy(update={"train": run.train.model_copy(update={"gradient_checkpointing": True})})
    less = memory_of(shape, one_row(), again, on_gpu=False).activations
    one_layer = kept / QWEN.num_hidden_layers  # is recomputed when the backward pass comes to it
    widest = (2 if half else 4) * NUM_TOKENS * QWEN.intermediate_size  # a gradient on the way back
    assert less == pytest.approx(inputs + one_layer + widest, rel=0.1)


SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 512,
}  # fmt: skip
EXPERTS = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)

SHARED = Qwen2MoeConfig(
    **{**SIZES, "num_hidden_layers": 4}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
    shared_expert_intermediate_size=512, mlp_only_layers=[0],
)  # fmt: skip


@pytest.mark.parametrize("how", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "config", [EXPERTS, SHARED, Gemma3TextConfig(**SIZES, sliding_window=64)], ids=["experts", "shared", "norms"]
)
def test_what_lora_adds_to_experts_and_further_norms_are_counted(config: PreTrainedConfig, how: str) -> None:
    run = run_config({**LORA, "target_modules": "all-linear"}, precision=how)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if how == "bf16" else torch.float32)
    model = apply_adapter(model, run.adapter).train()
    _, kept = trained_step(model, in_16_bits=how == "bf16")
    found = memory_of(shape_of(model), one_row(), run, on_gpu=False).activations
    assert found == pytest.approx(kept, rel=0.1)


def test_recomputing_needs_less_memory() -> None:
    shape = shape_of(built(QWEN, run_config()))
    plain, again = (
        memory_of(shape, one_row(), run_config(gradient_checkpointing=on), on_gpu=True) for on in (False, True)
    )
    assert again.activations < plain.activations / 2 and again.weights == plain.weights


# -------------------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("packing", [Packing.BEST_FIT, Packing.NONE, Packing.SPLIT])
def test_work_equals_a_naive_recount(packing: Packing) -> None:
    table = SegmentTable.of_lengths([7, 30, 12, 12, 25, 3, 18])
    settings = PlanSettings(packing=packing, capacity=32, rows_per_micro_batch=2, micro_batches_per_step=2)
    plan = plan_epoch(table, settings, epoch=0)
    lengths = [
        [[stop - start for start, stop in row] for row in batch.spans]
        if batch.spans is not None
        else [[int(table.lengths[one]) for one in row] for row in batch.packs]
        for batch in plan
    ]
    widths = [max(map(sum, batch)) * len(batch) for batch in lengths]
    found = EpochWork.of_plan(plan, table)
    assert (found.tokens, found.largest_tokens, found.steps) == (sum(widths), max(widths), plan.num_steps)
    targets = [sum(one - 1 for row in batch for one in row) for batch in lengths]
    assert (found.targets, found.largest_targets) == (sum(targets), max(targets))
    attended = (
        [max(map(sum, batch)) for batch in lengths for _ in batch]
        if packing is Packing.NONE
        else [one for batch in lengths for row in batch for one in row]
    )
    assert sorted(found.attended.tolist()) == sorted(attended)


# ------------------------------------------------------------------------------------------ the whole, and devices


def test_time_is_operations_over_speed_and_grows_with_steps_and_stragglers() -> None:
    run = run_config(precision="bf16")
    shape = shape_of(built(QWEN, run))
    one = estimate_run(run, shape, one_row(), H100, total_steps=10)
    assert one.operations == 10 * operations_of(shape, one_row(), run)
    assert one.seconds == pytest.approx(one.operations / (989e12 * UTILISATION))
    assert one.tokens_per_second == pytest.approx(10 * NUM_TOKENS / one.seconds)
    more = estimate_run(
        run, shape, one_row(), H100, total_steps=20, num_devices=4, straggler_factor=1.2, utilisation=UTILISATION / 2
    )
    assert more.seconds == pytest.approx(one.seconds * 2 * 1.2 * 2 / 4)


def test_precision_decides_the_peak() -> None:
    assert device_named("a100", in_16_bits=True).peak == 312e12
    assert device_named("a100", in_16_bits=False).peak == 19.5e12
    assert H100.memory_bytes == 80 * GIB


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"'h1000'[\s\S]*h100, a100"):
        check_name("h1000")
    for name in (None, *DEVICE_NAMES):
        check_name(name)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA L40S", "l40s"), ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", None), ("NVIDIA T1000", None),
    ],
)  # fmt: skip
def test_devices_are_known_by_the_names_they_say(device: str, name: str | None) -> None:
    assert table_name(device) == name


def test_a_cpu_is_measured() -> None:
    device = present_device("cpu", in_16_bits=False)
    assert device.is_measured and 1e8 < device.peak < 1e15


def test_memory_over_that_of_the_device_is_said() -> None:
    run = run_config(precision="bf16")
    shape = shape_of(built(QWEN, run))
    for memory_bytes, words in ((GIB, "more than the device has"), (64 * GIB, "of 64.0 GiB")):
        device = Device(name="x", peak=1e12, memory_bytes=memory_bytes, is_measured=False)
        console = Console(width=200, record=True, file=StringIO())
        console.print(estimate_table(estimate_run(run, shape, one_row(), device, total_steps=1)))
        told = console.export_text()
        assert words in told and "assumed: 40%" in told
        assert ("more than the device has" in told) is (memory_bytes == GIB)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.5, "0.5 s"), (100, "100 s"), (210, "3.5 min"), (9_000, "2.5 h"), (345_600, "4.0 days")]
)
def test_durations_are_told_in_the_unit_that_people_use(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_sizes_are_told_in_the_unit_that_people_use() -> None:
    assert size(3 * GIB // 2) == "1.5 GiB" and size(310 << 20) == "310 MiB"
