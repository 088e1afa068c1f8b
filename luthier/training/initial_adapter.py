"""The first values of an adapter that are computed: from the run's own rows by EVA (arXiv:2410.07170), CorDA
(arXiv:2406.05223) and LoRA-GA (arXiv:2407.05000), from what a quantized base has lost by LoftQ (arXiv:2310.08659, with
one round of it)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from peft import EvaConfig, LoraConfig, PeftModel, initialize_lora_eva_weights
from peft.tuners.lora import LoraGAConfig, LoraLayer
from peft.tuners.lora.corda import CordaEigens, collect_eigens_for_layer
from peft.tuners.lora.eva import SVDHook
from torch import nn
from transformers.pytorch_utils import Conv1D

from luthier.collation import CollateSettings, MediaInputs
from luthier.collation.collator import batch_of_packs
from luthier.config.inputs import QuantizationConfig
from luthier.config.schema import RunConfig
from luthier.errors import ModelError
from luthier.models import adapter_files, evaluating, passes, quantized, routers
from luthier.models.model import load_model
from luthier.models.vocabulary import Vocabulary
from luthier.packing import Segments
from luthier.records import Batch, Pack
from luthier.training.losses import StepLosses
from luthier.writing import counted

ROWS, ROWS_OF_BATCH = 64, 8
MOST_PASSES = 20  # over these rows, until the directions stay the same


def begin_by_activations(
    model: PeftModel, forward: passes.ModelPass, train: Segments, how: CollateSettings, media: MediaInputs | None
) -> list[str]:
    """Let each matrix A begin with the directions in which the inputs of its layer vary most, over the first rows of
    the run; padding counts nowhere. B begins with 0, so the model computes what it did. Every layer keeps its rank.

    Returns the names of layers that these rows do not call, as a tower without images, which begin as any LoRA does.
    Raises `ModelError` where the rows are too few for the rank, or the directions do not settle.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer) and layer.lora_A}
    ranks = {name: layer.r["default"] for name, layer in layers.items()}
    batches = [forward.isolation.arranged(each, pad_token_id=how.pad_token_id) for each in _first(train, how, media)]
    fewest = min((int((routers.times_shown(batch) > 0).sum()) for batch in batches), default=0)
    if fewest < (highest := max(ranks.values())):
        key = "adapter.r" if highest == model.peft_config["default"].r else "the highest of adapter.rank_pattern"
        raise ModelError(
            f"adapter.init_lora_weights is eva, and {ROWS_OF_BATCH} rows have "
            f"{counted(fewest, 'token')}, fewer than {key}, {highest}",
            hint="set adapter.init_lora_weights: true, or a lower rank",
        )

    def run(batch: Batch) -> None:
        with torch.no_grad(), passes.casting(forward.device, forward.autocast), evaluating(model):
            model(**forward.isolation.inputs(batch, device=forward.device))

    shared = _called_together(layers, batches, run)
    directions = _directions({first: max(ranks[name] for name in names) for first, names in shared.items()},
                             layers, batches, run)  # fmt: skip
    own = {name: directions[first][: ranks[name]] for first, names in shared.items() for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers without directions, which are told
        initialize_lora_eva_weights(model, eva_state_dict=dict(own))
    return [name.removeprefix("base_model.model.") for name in layers if name not in own]


def _called_together(
    layers: Mapping[str, nn.Module], batches: Sequence[Batch], run: Callable[[Batch], None]
) -> dict[str, list[str]]:
    """The layers that are called, by the first of those that have the same input, as a query's, a key's and a value's
    projection have: one search for directions serves all of them."""
    found: dict[str, list[str]] = {}
    called: set[str] = set()
    last: tuple[str, torch.Tensor] | None = None

    def see(name: str, arguments: tuple[torch.Tensor, ...]) -> None:
        nonlocal last
        first = last[0] if last is not None and arguments[0] is last[1] else name
        last = (first, arguments[0])
        if name not in called:
            found.setdefault(first if first in found else name, []).append(name)
        called.add(name)

    hooks = [
        layer.register_forward_pre_hook(lambda _, arguments, name=name: see(name, arguments))
        for name, layer in layers.items()
    ]
    try:
        for batch in batches:
            run(batch)
            if len(called) == len(layers):
                break
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _directions(
    ranks: Mapping[str, int], layers: Mapping[str, nn.Module], batches: Sequence[Batch], run: Callable[[Batch], None]
) -> dict[str, torch.Tensor]:
    """Of each of these layers as many directions as its rank, [R, D]: PEFT's own search, over the batches again and
    again. Raises `ModelError` where they do not settle."""
    searches: dict[str, SVDHook] = {}
    hooks = {}
    for name, rank in ranks.items():
        # a search says which of its directions have stayed the same
        searches[name] = SVDHook(rank, EvaConfig().tau, name=name, prepare_layer_inputs_fn=_shown,
                                 gather_distributed_inputs=False)  # fmt: skip
        hooks[name] = layers[name].register_forward_hook(searches[name])
    try:
        for number in range(MOST_PASSES * len(batches)):
            batch = batches[number % len(batches)]
            shown_N = routers.times_shown(batch) > 0
            for name in hooks:
                searches[name].model_input = shown_N.to(next(layers[name].parameters()).device)
            run(batch)
            for name in [name for name in hooks if bool(searches[name].converged.all())]:
                hooks.pop(name).remove()
            if not hooks:
                return {name: search.svd.components_ for name, search in searches.items()}
    finally:
        for hook in hooks.values():
            hook.remove()
    raise ModelError(
        f"adapter.init_lora_weights is eva, and its directions have not settled in {MOST_PASSES} passes over {ROWS} "
        "rows",
        hint="set adapter.init_lora_weights: true",
    )


def begin_by_weighted_parts(
    model: PeftModel, forward: passes.ModelPass, train: Segments, how: CollateSettings, media: MediaInputs | None
) -> None:
    """Let each B A, scaled, begin as the part of its weight that matters most to the inputs of the layer over the first
    rows (CorDA's ipm), and leave the rest in the base; padding counts nowhere."""
    layers = [layer for _, layer in adapter_files.linear_layers(model)]
    sums: dict[nn.Module, torch.Tensor] = {}
    shown_N = torch.empty(0)

    def add(layer: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs_ND = _shown(arguments, shown_N, "")
        inputs_ND = inputs_ND / inputs_ND.max().abs().clamp(min=torch.finfo(inputs_ND.dtype).tiny)  # as PEFT has it
        sums[layer] = sums.get(layer, 0) + inputs_ND.T @ inputs_ND

    hooks = [layer.get_base_layer().register_forward_pre_hook(add) for layer in layers]
    batches = _first(train, how, media)
    try:
        for batch in batches:
            arranged = forward.isolation.arranged(batch, pad_token_id=how.pad_token_id)
            shown_N = routers.times_shown(arranged).to(forward.device) > 0
            with torch.no_grad(), passes.casting(forward.device, forward.autocast), evaluating(model):
                model(**forward.isolation.inputs(arranged, device=forward.device))
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        base = layer.get_base_layer()
        if base not in sums:  # never called, as an expert that no row was sent to
            continue
        base.covariance_matrix = sums.pop(base) / len(batches)
        found, rank = collect_eigens_for_layer(base, model.peft_config["default"]), layer.r["default"]
        del base.covariance_matrix
        device = base.weight.device
        base.eigens = CordaEigens(
            S_WC=found.S_WC[:rank], U_WC=found.U_WC[:, :rank].to(device), V_WC=found.V_WC[:, :rank].to(device)
        )
        _begin(layer, lambda layer: layer.corda_init("default", "corda"))


def begin_by_gradients(
    model: PeftModel, losses: StepLosses, train: Segments, how: CollateSettings, media: MediaInputs | None
) -> None:
    """Let each A and B begin with the directions of the gradient of its weight over the first rows, and take their
    product out of the base (LoRA-GA). The gradients of all adapted weights are in memory at once.

    Raises `ModelError` where nothing is learned from these rows.
    """
    layers = [layer for _, layer in adapter_files.linear_layers(model)]
    bases = [layer.get_base_layer() for layer in layers]
    batches = _first(train, how, media)
    units = sum(losses.num_units(batch) for batch in batches)
    if units == 0:
        raise ModelError(
            "adapter.init_lora_weights is lora_ga, and the first rows have no gradient, as nothing is learned of them",
            hint="set adapter.init_lora_weights: true",
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _let(trained, have_gradients=False)
    _let([base.weight for base in bases], have_gradients=True)
    try:
        losses.begin_step(model, batches, lambda sums: sums)
        for batch in batches:
            (losses.loss(model, batch).loss_sum / units).backward()
        losses.end_step(lambda sums: sums)
    finally:
        _let([base.weight for base in bases], have_gradients=False)
        _let(trained, have_gradients=True)
    for layer, base in zip(layers, bases, strict=True):
        gradient, base.weight.grad = base.weight.grad, None
        if gradient is not None:
            base._peft_loraga_grad = gradient
            _begin(layer, lambda layer: layer.lora_ga_init("default", LoraGAConfig()))


def _let(weights: Sequence[torch.Tensor], *, have_gradients: bool) -> None:
    for weight in weights:
        weight.requires_grad_(have_gradients)


@torch.no_grad()
def _begin(layer: LoraLayer, begin: Callable[[LoraLayer], None]) -> None:
    """Let PEFT give a layer its values; what is left in the base is, bit for bit, what `take_out_initial` leaves."""
    A, B, whole_OI = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.get_base_layer().weight.data
    dtype = A.dtype
    with torch.random.fork_rng():
        torch.manual_seed(0)  # LoRA-GA's decomposition is a random one, and is to be the same on all ranks
        begin(layer)
    A.data, B.data = A.data.to(dtype), B.data.to(dtype)
    adapter_files.take_out(layer, whole_OI, A, B)


def tell_as_plain(model: PeftModel) -> None:
    """Let an adapter that began by activations, in this run or in the one that it resumes, tell those who load it that
    it is a LoRA like any other."""
    settings = model.peft_config["default"]
    if isinstance(settings, LoraConfig) and settings.init_lora_weights == "eva":
        settings.init_lora_weights, settings.eva_config = True, None


def begin_by_what_is_rounded_away(model: PeftModel, config: RunConfig, vocabulary: Vocabulary) -> tuple[float, float]:
    """Let each B A, scaled, begin as the matrix of its rank that is nearest to what quantization took from its layer.
    The whole weights are read once more, into the machine's memory.

    Returns the norm of what is lost, over that of the weights: before, and with the adapter.
    """
    settings = model.peft_config["default"]
    source: str = model.get_base_model().name_or_path
    as_it_was = {"name_or_path": source, "random_init": False, "quantization": QuantizationConfig()}
    section = config.model.model_copy(update=as_it_was)
    with torch.random.fork_rng():
        whole = load_model(config.model_copy(update={"model": section}), vocabulary).model
        lost = [0.0, 0.0, 0.0]
        for name, layer in model.get_base_model().named_modules():
            is_adapted = isinstance(layer, LoraLayer) and "default" in layer.lora_A
            if is_adapted and isinstance(layer.get_base_layer(), nn.Linear | Conv1D):  # no experts, no embedding
                lost = [a + b for a, b in zip(lost, _begin_layer(layer, whole.get_submodule(name)), strict=True)]
    settings.init_lora_weights = True
    if not lost[0]:
        raise ModelError(
            "adapter.init_lora_weights is loftq, and none of the layers that are adapted is quantized",
            hint="name other layers in adapter.target_modules, or set adapter.init_lora_weights: true",
        )
    before, after, weights = (math.sqrt(each) for each in lost)
    return before / weights, after / weights


@torch.no_grad()
def _begin_layer(layer: LoraLayer, whole: nn.Module) -> tuple[float, float, float]:
    """Set A and B of one layer; gives the squared norms of what is lost, before and after, and of the weight."""
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight_OI = _outputs_first(whole).to(A.device)
    lost_OI = weight_OI - _outputs_first(layer.get_base_layer())
    rank, scale = len(A), layer.scaling["default"]
    left, sizes, right = torch.svd_lowrank(lost_OI, q=min(2 * rank, *lost_OI.shape), niter=8)
    roots = (sizes[:rank] / scale).sqrt()
    # where nothing is lost, as in a layer that keeps its bits, B is 0 and A stays: two matrices of 0 learn nothing
    A.copy_(torch.where(roots[:, None] > 0, roots[:, None] * right[:, :rank].T, A))
    B.copy_(left[:, :rank] * roots)
    rest_OI = lost_OI - scale * (B.float() @ A.float())
    return float(lost_OI.square().sum()), float(rest_OI.square().sum()), float(weight_OI.square().sum())


def _outputs_first(layer: nn.Module) -> torch.Tensor:
    """The weight of a linear layer, of GPT-2's kind too, whose weight has the inputs first."""
    weight = quantized.whole_weight(layer)
    return weight.T if isinstance(layer, Conv1D) else weight


def _first(train: Segments, how: CollateSettings, media: MediaInputs | None) -> list[Batch]:
    rows = [train[number] for number in range(min(ROWS, len(train)))]
    packs = [Pack(segments=(row,)) for row in rows]
    size = min(ROWS_OF_BATCH, len(packs))
    # the last ones, if they are too few for a batch, are left out
    starts = range(0, len(packs) - size + 1, size or 1)
    return [batch_of_packs(packs[begin : begin + size], how, media) for begin in starts]


def _shown(layer_input: Sequence[torch.Tensor] | torch.Tensor, shown_N: torch.Tensor, _: str) -> torch.Tensor:
    inputs = layer_input if isinstance(layer_input, torch.Tensor) else layer_input[0]
    inputs_ND = inputs.reshape(-1, inputs.shape[-1])
    return (inputs_ND[shown_N] if len(inputs_ND) == len(shown_N) else inputs_ND).float()
