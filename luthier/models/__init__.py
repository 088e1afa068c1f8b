"""Models: loaded, adapted, sharded, and told which tokens see each other.

Here are the parts of a multimodal model: towers, projectors, and its language model, which is all the rest.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from luthier.config.choices import ModelPart
from luthier.errors import ModelError
from luthier.layout.position_schemes import position_scheme
from luthier.media.families import Attention, Family, PackingSupport
from luthier.media.families.table import FAMILIES

MODALITIES = ("image", "video", "audio")


def plain_model(model: nn.Module) -> Any:
    """The model of transformers itself, which may be under DDP and an adapter. (transformers publishes no types.)"""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model.get_base_model() if isinstance(model, PeftModel) else model


def unsharded_class(model: nn.Module) -> type[Any]:
    """The class that a model is of; dividing it among ranks makes a class of its own, in a module of torch."""
    kind = type(plain_model(model))
    if not issubclass(kind, FSDPModule):
        return kind
    return next(base for base in kind.__bases__ if base is not FSDPModule)


def output_layer(model: PreTrainedModel) -> Any:
    """What makes logits of hidden states: as the model's class names it, or, where that names none (Nemotron Omni), the
    one of a language model inside of it; None: there is none."""
    within = (model, *(child for child in model.children() if isinstance(child, PreTrainedModel)))
    layers = (each.get_output_embeddings() for each in within)
    return next((layer for layer in layers if layer is not None), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and then in the mode it was in. Of one that is evaluated anyway nothing is touched:
    setting the mode costs 5 microseconds a module, which in a loop of small calls is felt."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\[|\.(?:device|dtype|is_\w+|ndim|numel|shape|size)\b)")


def read_past(model: nn.Module) -> list[str]:
    """Names of the linear layers that are not called, in some pass at least: the module that holds one takes its weight
    and multiplies by it. Such are the time steps of Jamba, the output of Mamba's mixers (its kernels take the weight)
    and of torch's attention, and the corrections of Gemma 3n. An adapter beside one has no effect, and a quantized
    weight is no matrix to multiply by.
    """
    return _linear_children(model, _children_read)


_OF_MODELS = ("transformers.models.", "transformers_modules.")  # not layers of quantizers


def unlike_linear(model: nn.Module) -> list[str]:
    """Names of the linear layers of a model's own classes that give something else than a linear layer: the routers of
    Llama 4 and PhiMoE give the experts that they choose, and DeepSeek V4's attention has an output in groups. There is
    no adapter beside them and no quantized layer in their place.
    """
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name, module in linear if not _gives_what_linear_gives(module)]


def _gives_what_linear_gives(layer: nn.Linear) -> bool:
    kind = type(layer)
    if kind.forward is nn.Linear.forward or not kind.__module__.startswith(_OF_MODELS):
        return True
    rows = 3
    try:
        with torch.device("meta"), torch.no_grad():
            weights = {name: torch.empty(weight.shape, dtype=weight.dtype) for name, weight in layer.named_parameters()}
            rows_RD = torch.empty(rows, layer.in_features, dtype=layer.weight.dtype)
            given = torch.func.functional_call(layer, weights, (rows_RD,))
    except (RuntimeError, IndexError, TypeError, ValueError):  # other inputs are meant
        return False
    return isinstance(given, torch.Tensor) and given.shape == (rows, layer.out_features)


def cast_to(model: nn.Module) -> list[str]:
    """Names of the linear layers by whose weight the module that holds one chooses the type of what it gives them: the
    pixels that SigLIP 2 gives to a quantized layer would be rounded to its integers."""
    return _linear_children(model, _children_cast_to)


def _linear_children(model: nn.Module, named: Callable[..., frozenset[str]]) -> list[str]:
    return [
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        if any(isinstance(each, nn.Linear) for each in module.children())
        for child in sorted(named(module.__class__))
        if isinstance(getattr(module, child, None), nn.Linear)
    ]


_CAST = re.compile(r"\bself\.(\w+)\.weight\.dtype\b")
_KNOWS = re.compile(r"is_floating_point|_pre_quantization_dtype|torch\.u?int8")  # that weights may be quantized


@lru_cache(maxsize=256)
def _children_cast_to(kind: type[nn.Module]) -> frozenset[str]:
    """The attributes whose ``weight.dtype`` a method of a class reads that knows nothing of quantized weights."""
    return frozenset(child for source in _sources(kind) if not _KNOWS.search(source) for child in _CAST.findall(source))


@lru_cache(maxsize=256)
def _children_read(kind: type[nn.Module]) -> frozenset[str]:
    """The attributes whose ``weight`` the methods of a class take as a value, but for those that set it at first."""
    lines = [line for source in _sources(kind) for line in source.splitlines()]
    return frozenset(child for line in lines if "isinstance(" not in line for child in _READ.findall(line))


def _sources(kind: type[nn.Module]) -> list[str]:
    """What the methods of a class are written as, but for those that set weights at first."""
    found = []
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, method in vars(each).items():
            if inspect.isfunction(method) and not name.lstrip("_").startswith(("init", "reset")):
                try:
                    found.append(inspect.getsource(method))
                except (OSError, TypeError):  # made without a file
                    continue
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """Names of the modules that are a model's towers and projectors. Of one inside the other, the inner counts.

    Both are empty for a model of text alone.
    """

    tower: tuple[str, ...] = ()
    projector: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tower or self.projector)

    def of(self, name: str) -> ModelPart:
        """The part that a module or parameter of this name belongs to."""
        tower, projector = _depth(name, self.tower), _depth(name, self.projector)
        if max(tower, projector) == 0:
            return ModelPart.LANGUAGE_MODEL
        return ModelPart.TOWER if tower > projector else ModelPart.PROJECTOR

    def outside(self, model: nn.Module, trained: Sequence[ModelPart]) -> str | None:
        """A regular expression for the names of all modules that are in none of these parts; None: there are none."""
        names = [name for name, module in model.named_modules() if not any(True for _ in module.children())]
        found = sorted({_pattern(name) for name in names if self.of(name) not in trained})
        return "|".join(found) or None


def multimodal_class(config: PretrainedConfig) -> Any | None:
    """transformers' Auto class for models that take images, videos or audio beside text; None: it has none for this.

    A family with a class of its own (`Family.has_own_class`) has it in its files, which name it for `AutoModel` or
    `AutoModelForCausalLM`.

    Audio Flamingo and Music Flamingo have an encoder and a language model like others, but transformers lists them with
    translators of speech alone.
    """
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    if decoder_family(config) is not None:
        return AutoModel
    rows = [row for row in FAMILIES.values() if config.model_type in row.model_types]
    if any(row.has_own_class for row in rows):
        return AutoModelForCausalLM
    return AutoModelForSeq2SeqLM if rows and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING else None


def decoder_family(config: PretrainedConfig) -> Family | None:
    """The row of a model that is a decoder beside an encoder; None: it is not, or has no row."""
    return next((row for row in FAMILIES.values() if row.decoder_names and config.model_type in row.model_types), None)


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether transformers has a class for this config that takes images, videos or audio beside text."""
    return multimodal_class(config) is not None


def families_of(config: PretrainedConfig) -> list[Family]:
    """The rows of the table that are of this kind of model; none for a model of text alone, or of an unknown kind."""
    return [row for row in FAMILIES.values() if config.model_type in row.model_types] if is_multimodal(config) else []


def ungenerated(config: PretrainedConfig) -> str | None:
    """Why such a model generates no answers here; None where it does."""
    if (family := decoder_family(config)) is not None:
        return f"answers of {family.name} are not generated: its decoder stands beside an encoder"
    across = [row.name for row in families_of(config) if row.looks_across]
    why = "its class keeps caches as older versions of transformers had them"
    return f"answers of {across[0]} are not generated: {why}" if across else None


def undrawn(config: PretrainedConfig) -> str | None:
    """Why answers of such a model are not learned from; None where they are."""
    if (family := decoder_family(config)) is not None:
        return f"answers of {family.name} are not drawn: its decoder stands beside an encoder"
    reasons = [f"answers of {row.name} are not drawn: {row.undrawn}" for row in families_of(config) if row.undrawn]
    return reasons[0] if reasons else None


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many positions a model has, where each has a weight of its own, so that it reads no token behind the last."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(known, int) or known < 1:
        return None
    learned = any(
        isinstance(module, nn.Embedding) and known <= module.num_embeddings <= known + 8 and re.search("pos|wpe", name)
        for name, module in model.named_modules()
    )
    return known if learned else None


def stretched_beyond(config: PretrainedConfig) -> int | None:
    """Up to how many tokens rows leave the positions of those beside them as they are; None: whatever their length.

    Where positions are stretched once a row is long (``dynamic``, ``longrope``), transformers lets the longest row of a
    batch stretch those of all. ``dynamic`` with ``alpha`` (HunYuan) is a fixed stretching.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    told = getattr(text, "rope_parameters", None) or {}
    limits: list[int] = []
    for rope in (told, *(each for each in told.values() if isinstance(each, Mapping))):
        kind = str(rope.get("rope_type", ""))
        original = rope.get("original_max_position_embeddings")
        if kind == "longrope" and original:
            limits.append(int(original))
        elif "dynamic" in kind and longest and not rope.get("alpha"):
            limits.append(int(longest) - 1)
    return min(limits, default=None)


def scaled_beyond(config: PretrainedConfig) -> int | None:
    """Up to how many tokens a row's place in a batch changes nothing; None: however many.

    Llama 4 scales attention by the place of a token in its row of the batch, padding and other sequences included.
    """
    text = config.get_text_config()
    scale = getattr(text, "floor_scale", None) if getattr(text, "attn_temperature_tuning", False) else None
    return int(scale) - 1 if scale else None


def alike_in_company(config: PretrainedConfig) -> int | None:
    """Up to how many tokens a model reads a row beside others, padded on the left, as it reads the row alone.

    None: however long the rows are.
    """
    limits = [stretched_beyond(config), scaled_beyond(config)]
    return min((each for each in limits if each is not None), default=None)


def find_parts(model: PreTrainedModel) -> ModelParts:
    """The parts, where the row of the model's family has them, else where transformers finds its encoders."""
    if not is_multimodal(model.config):
        return ModelParts()
    there = {name for name, _ in model.named_modules()}
    for family in families_of(model.config):
        if not there.isdisjoint((*family.modules.tower, *family.modules.projector)):  # of Gemma 4 Unified: no tower
            tower, projector = family.modules.tower, family.modules.projector
            return ModelParts(
                tower=tuple(name for name in tower if name in there),
                projector=tuple(name for name in projector if name in there),
            )
    return _by_encoders(model)


def set_caching(model: Any, use_cache: bool) -> None:
    """Whether a forward pass that is not told keeps keys and values, by the config and that of the language model."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "use_cache"):
            config.use_cache = use_cache


def text_attention(model: Any) -> str:
    """The attention of the language model; towers may have another."""
    return str(model.config.get_text_config()._attn_implementation)


def set_text_attention(model: Any, attention: str) -> None:
    """Give the language model this attention and leave the towers theirs, which know nothing of segments.

    Raises `ModelError` where the model keeps its own.
    """
    config = model.config
    model.set_attn_implementation(_only_text(config, config.get_text_config(), attention))
    if (left := text_attention(model)) != attention:
        raise ModelError(f"its attention is written into its layers ({left})")


def _by_encoders(model: PreTrainedModel) -> ModelParts:
    found = {id(encoder): encoder for kind in MODALITIES if (encoder := model.get_encoder(kind)) is not None}
    names = {id(module): name for name, module in model.named_modules()}
    tower = tuple(names[key] for key in found if names.get(key))  # a model without one answers with itself, named ""
    decoder = names[id(model.get_decoder())]
    kept = {id(model.get_decoder()), id(model.get_input_embeddings()), id(output_layer(model)), *found}
    # what stands beside the towers and is neither decoder nor head takes the one to the other
    around = {name.rpartition(".")[0] for name in tower if name.rpartition(".")[0] == decoder.rpartition(".")[0]}
    projector = tuple(
        f"{owner}.{name}" if owner else name
        for owner in sorted(around)
        for name, module in model.get_submodule(owner).named_children()
        if id(module) not in kept and any(True for _ in module.parameters())
    )
    return ModelParts(tower=tower, projector=projector)


def _only_text(config: PretrainedConfig, text: PretrainedConfig, attention: str) -> dict[str, object]:
    """As transformers takes it: a value for each config inside a config, "" for the config itself."""
    if config is text:
        return {"": attention}
    inner = {key: getattr(config, key) for key in config.sub_configs}
    return {
        key: _only_text(each, text, attention)
        for key, each in inner.items()
        if isinstance(each, PretrainedConfig) and _holds(each, text)
    }


def _holds(config: PretrainedConfig, text: PretrainedConfig) -> bool:
    return config is text or any(
        isinstance(each, PretrainedConfig) and _holds(each, text)
        for each in (getattr(config, key) for key in config.sub_configs)
    )


def _depth(name: str, owners: Iterable[str]) -> int:
    """How long the name of the innermost of these modules is that holds ``name``; 0: none does."""
    return max((len(owner) for owner in owners if name == owner or name.startswith(f"{owner}.")), default=0)


def _pattern(name: str) -> str:
    r"""``blocks.0.mlp.fc1`` -> ``blocks\.\d+\.mlp\.fc1``."""
    return re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", re.escape(name))


# --------------------------------------------------------------------------------------------------------------------
# What a family of multimodal models asks of the run: positions, token types, rows of their own.


TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids")  # what a model calls its token types; it reads one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaNeeds:
    """What a multimodal model asks of positions and attention, as its family's row has it.

    num_positions  rows of ``position_ids`` in a packed batch (`mrope.packed_mrope`); None: one, without an axis for it
    text_row       the first of them is of text
    types          the input of token types by which the tokens of a picture see each other both ways; None: they do not
    whole          they do so past a sliding window, too
    prefix         what is before the answer is seen both ways, as `PREFIX_TYPES` say
    refusal        why segments may not share a row; None: they may
    along          inputs along the tokens beside ids and positions, ``types`` among them
    by_row         features that are kept row by row, so that rows cannot be parted again
    """

    num_positions: int | None = None
    text_row: bool = True
    types: str | None = None
    whole: bool = False
    prefix: bool = False
    refusal: str | None = None
    along: tuple[str, ...] = ()
    by_row: tuple[str, ...] = ()


def model_needs(model: PreTrainedModel) -> MediaNeeds:
    """Of a loaded model: what the rows of the table say of its kind; nothing of one that has no row."""
    families = families_of(model.config)
    return media_needs(families[0], model.config.to_dict()) if families else MediaNeeds()


def media_needs(family: Family, config: Mapping[str, object]) -> MediaNeeds:
    """By the family's row and the model's config (as a dict)."""
    scheme = None if family.positions is None else position_scheme(family.positions, config)
    types = None
    if family.attention in (Attention.IMAGE_BLOCKS, Attention.WHOLE_BLOCKS):
        types = next(name for name in TYPE_INPUTS if name in family.token_inputs)
    refusal = f"family {family.name}: {family.reason}" if family.packing is PackingSupport.PADDED else None
    return MediaNeeds(
        num_positions=None if scheme is None else scheme.text_row + scheme.num_axes,
        text_row=scheme is None or scheme.text_row,
        types=types,
        whole=family.attention is Attention.WHOLE_BLOCKS,
        prefix=family.attention is Attention.PREFIX,
        refusal=refusal,
        along=family.along,
        by_row=tuple(name for name, batching in family.batching.items() if batching.by_row),
    )
