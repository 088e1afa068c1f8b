"""The first values of an adapter that are computed: from the run's own rows by EVA (arXiv:2410.07170), from what a
quantized base has lost by LoftQ (arXiv:2310.08659, with one round of it)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import count

import torch
from peft import LoraConfig, PeftModel, initialize_lora_eva_weights
from peft.tuners.lora import LoraLayer
from torch import nn

from luthier.collation import CollateSettings, MediaInputs, batch_of_packs
from luthier.config.inputs import QuantizationConfig
from luthier.config.schema import RunConfig
from luthier.errors import ModelError
from luthier.models.model import load_model
from luthier.models.passes import ModelPass, casting
from luthier.models.quantized import whole_weight
from luthier.models.routers import times_shown
from luthier.models.vocabulary import Vocabulary
from luthier.packing.settings import Segments
from luthier.records import Batch, Pack
from luthier.writing import counted

ROWS, ROWS_OF_BATCH = 64, 8
MOST_PASSES = 20  # over these rows, until the directions stay the same


def begin_by_activations(
    model: PeftModel, forward: ModelPass, train: Segments, how: CollateSettings, media: MediaInputs | None
) -> None:
    """Let each matrix A begin with the directions in which the inputs of its layer vary most, over the first rows of
    the run; padding counts nowhere. B begins with 0, so the model computes what it did.

    Raises `ModelError` where the rows are too few for the rank, or the directions do not settle.
    """
    settings = model.peft_config["default"]
    batches = [forward.isolation.arranged(each, pad_token_id=how.pad_token_id) for each in _first(train, how, media)]
    fewest = min((int((times_shown(batch) > 0).sum()) for batch in batches), default=0)
    if fewest < settings.r:
        raise ModelError(
            f"adapter.init_lora_weights is eva, and {ROWS_OF_BATCH} rows have "
            f"{counted(fewest, 'token')}, fewer than adapter.r, "
            f"{settings.r}",
            hint="set adapter.init_lora_weights: true, or a lower rank",
        )
    calls = count(1)

    def compute(network: nn.Module, batch: Batch) -> None:
        if next(calls) > MOST_PASSES * len(batches):
            what = f"its directions have not settled in {MOST_PASSES} passes over {ROWS} rows"
            raise ModelError(
                f"adapter.init_lora_weights is eva, and {what}", hint="set adapter.init_lora_weights: true"
            )
        with torch.no_grad(), casting(forward.device, forward.autocast):
            network(**forward.isolation.inputs(batch, device=forward.device))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a batch of ours cannot be moved by PEFT, for one; we move it
        initialize_lora_eva_weights(
            model,
            batches,
            forward_fn=compute,
            prepare_model_inputs_fn=lambda batch, _: times_shown(batch).to(forward.device) > 0,
            prepare_layer_inputs_fn=_shown,
            gather_distributed_inputs=False,
            show_progress_bar=False,
        )


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
            if isinstance(layer, LoraLayer) and "default" in layer.lora_A:
                lost = [a + b for a, b in zip(lost, _begin_layer(layer, whole.get_submodule(name)), strict=True)]
    settings.init_lora_weights = True
    before, after, weights = (math.sqrt(each) for each in lost)
    return before / weights, after / weights


@torch.no_grad()
def _begin_layer(layer: LoraLayer, whole: nn.Module) -> tuple[float, float, float]:
    """Set A and B of one layer; gives the squared norms of what is lost, before and after, and of the weight."""
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight_OI = whole_weight(whole).to(A.device)
    lost_OI = weight_OI - whole_weight(layer.get_base_layer())
    rank, scale = len(A), layer.scaling["default"]
    left, sizes, right = torch.svd_lowrank(lost_OI, q=min(2 * rank, *lost_OI.shape), niter=8)
    roots = (sizes[:rank] / scale).sqrt()
    A.copy_(roots[:, None] * right[:, :rank].T)
    B.copy_(left[:, :rank] * roots)
    rest_OI = lost_OI - scale * (B.float() @ A.float())
    return float(lost_OI.square().sum()), float(rest_OI.square().sum()), float(weight_OI.square().sum())


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
