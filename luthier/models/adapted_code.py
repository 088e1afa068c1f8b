"""Models whose code is helped: code that comes with a model's files, which transformers 5 loads as it is, and classes
that take a batch in another form than this package makes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, masking_utils
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import ModelOutput

from luthier.errors import ModelError
from luthier.media.families import Family
from luthier.models import decoder_family, families_of

# ----------------------------------------------------------------------------------------------------------------------
# Code that comes with a model's files, which transformers 5 loads as it is.
#
# What was written for transformers 4 is helped where a family's row says so (`Family.older_code`). What such code
# imports and transformers 5 has no more is there while it is loaded; what it reads of its config, or says of its
# classes, in the form of version 4 is put into that of version 5, on the classes of these files.
#
# Of all such code, values that a model computes when it is made and keeps in no file are set again (`restore_buffers`).


AskedAttention = str | dict[str, str | None] | None  # as transformers takes it: for all of a model, or by config


def in_older_code(auto: Any, config: PretrainedConfig) -> Any:
    """transformers' Auto class for this config; of older code one whose models are made as version 4 made them."""
    family = next((family for family in families_of(config) if family.older_code), None)
    return auto if family is None else _OlderCode(auto=auto, family=family)


def with_tower(config: PretrainedConfig, attention: str | None) -> AskedAttention:
    """The attention to ask for, with one for the tower that its class has (`Family.tower_attention`)."""
    known = next((family.tower_attention for family in families_of(config) if family.tower_attention), ())
    if not known or attention in known:
        return attention
    return {"": attention, "vision_config": known[0]} if attention else {"vision_config": known[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class _OlderCode:
    auto: Any
    family: Family

    def from_pretrained(
        self, source: str, *, config: PretrainedConfig, attn_implementation: str | None, **kwargs: Any
    ) -> Any:
        """As transformers' own."""
        attention = with_tower(config, attn_implementation)
        with older_names(config):
            self._fit(config, kwargs)
            return self.auto.from_pretrained(source, config=config, attn_implementation=attention, **kwargs)

    def from_config(
        self, config: PretrainedConfig, *, attn_implementation: str | None, **kwargs: Any
    ) -> PreTrainedModel:
        """As transformers' own."""
        attention = with_tower(config, attn_implementation)
        with older_names(config):
            self._fit(config, kwargs)
            made: PreTrainedModel = self.auto.from_config(config, attn_implementation=attention, **kwargs)
        return made

    def _fit(self, config: PretrainedConfig, told: Mapping[str, object]) -> None:
        _fit_config(type(config))
        reference = getattr(config, "auto_map", {}).get(self.auto.__name__)
        if reference is None or not told.get("trust_remote_code"):
            return  # no file names its class, or transformers will say that the file is not trusted
        places = {name: told[name] for name in ("revision", "cache_dir") if name in told}
        kind: Any = get_class_from_dynamic_module(reference, config.name_or_path, **places)
        if kind.config_class is not None:  # transformers reads a file again that lies elsewhere, and has two of a class
            _fit_config(kind.config_class)
        if isinstance(kind._tied_weights_keys, list):
            embedding = f"{self.family.modules.language[0]}.embed_tokens.weight"
            kind._tied_weights_keys = dict.fromkeys(kind._tied_weights_keys, embedding)


def _fit_config(kind: Any) -> None:
    """Let configs of this class say of positions and heads what version 4 said, where it had nothing to say."""
    if "rope_scaling" in vars(kind):
        return
    own = PretrainedConfig.rope_scaling

    def scaling(self: PretrainedConfig) -> dict[str, Any] | None:
        # version 5 also writes down here that nothing is scaled, and the base of frequencies
        found: dict[str, Any] | None = own.__get__(self)
        if found and found.get("rope_type", "default") == "default" and not set(found) - {"rope_type", "rope_theta"}:
            return None
        return found

    kind.rope_scaling = property(scaling, own.__set__)
    kind.pruned_heads = {}


@contextmanager
def older_names(config: PretrainedConfig) -> Iterator[None]:
    """Where a model of this config is made: if its code is older, it finds in transformers what version 4 had."""
    if not any(family.older_code for family in families_of(config)):
        yield
        return
    mask, frequencies = masking_utils.create_causal_mask, ROPE_INIT_FUNCTIONS.get("default")
    masking_utils.create_causal_mask = _by_older_names(mask)
    ROPE_INIT_FUNCTIONS.setdefault("default", _usual_frequencies)
    try:
        yield
    finally:
        masking_utils.create_causal_mask = mask
        if frequencies is None:
            del ROPE_INIT_FUNCTIONS["default"]


def _by_older_names(own: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arguments as they were called; what it has no more it works out itself."""
    known = inspect.signature(own).parameters
    renamed = {"input_embeds": "inputs_embeds", **({"past_key_values": "cache"} if "cache" in known else {})}

    @wraps(own)
    def create(*args: Any, **kwargs: Any) -> Any:
        given = {renamed.get(name, name): value for name, value in kwargs.items()}
        return own(*args, **{name: value for name, value in given.items() if name != "cache_position" or name in known})

    return create


def _usual_frequencies(
    config: Any = None, device: torch.device | None = None, seq_len: int | None = None, **_: object
) -> tuple[torch.Tensor, float]:
    """[D / 2] frequencies of rotary positions that nothing scales, and what cosines are multiplied by: nothing."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(size * getattr(config, "partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / size
    theta: float = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    return 1.0 / theta**exponents, 1.0


def restore_buffers(model: PreTrainedModel) -> int:
    """Set the buffers that no file has (positions of patches are an example), of a model whose class is not
    transformers' own, as its class computes them; returns how many there are.

    transformers makes a model without memory, reads its weights, and leaves such buffers unset (`torch.empty`), for the
    class to set them once more in its ``_init_weights``. Its own classes do. A class that comes with a model's files
    was mostly written when buffers were left alone, and would compute with what happens to be in memory. The model is
    made a second time for it, with buffers alone in memory.

    Raises `ModelError` for a buffer that the class then does not compute, or not in that size.
    """
    unsaved = dict(model.named_non_persistent_buffers())
    if type(model).__module__.startswith("transformers.") or not unsaved:
        return 0
    with older_names(model.config), torch.random.fork_rng(), init_empty_weights(include_buffers=False):
        made = dict(type(model)(deepcopy(model.config)).named_buffers())
    for name, buffer in unsaved.items():
        value = made.get(name)
        if value is None or value.is_meta or value.shape != buffer.shape:
            raise ModelError(
                f"{type(model).__name__} does not compute its buffer {name!r} when it is made, and no file has it",
                hint="save it with the weights (persistent=True), or set it in the class's _init_weights",
            )
        buffer.copy_(value)
    return len(unsaved)


def name_cache(model: PreTrainedModel) -> None:
    """Let code that comes with a model take its cache as transformers' generate hands it over as of 5.24: ``cache``,
    where it was ``past_key_values``."""
    renamed = "cache" in inspect.signature(masking_utils.create_causal_mask).parameters
    names = inspect.signature(model.forward).parameters
    if not renamed or "cache" in names or "past_key_values" not in names:
        return
    own = model.forward.__func__

    @wraps(own)
    def forward(model: PreTrainedModel, *args: object, **inputs: object) -> object:
        if "cache" in inputs:
            inputs["past_key_values"] = inputs.pop("cache")
        return own(model, *args, **inputs)

    model.forward = MethodType(forward, model)


# ----------------------------------------------------------------------------------------------------------------------
# Llama 4, whose class reads in transformers 5.24.0 what its language model does not give, and fails in every call.


def give_image_outputs(model: PreTrainedModel) -> None:
    """Let such a language model give ``image_outputs``: none."""
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.get_submodule("language_model").register_forward_hook(_with_image_outputs)


def _with_image_outputs(module: nn.Module, args: object, outputs: ModelOutput) -> None:
    if not hasattr(outputs, "image_outputs"):
        outputs.image_outputs = None


# ----------------------------------------------------------------------------------------------------------------------
# Models whose class takes a batch in another form than this package makes it: they take ours too.
#
# One section for each form; `take_own_inputs` asks which one a model's family has.


Inputs = dict[str, Any]  # of a model's forward, by name


def take_own_inputs(model: PreTrainedModel) -> bool:
    """Let the model take batches like any other, if its family has a form of its own; whether it has."""
    forms = (name_decoder_inputs, list_pictures, tell_pictures_apart, encode_pictures_apart)
    return any(form(model) for form in forms)


# --------------------------------------------------------------------------------------------------------------------
# Models whose decoder stands beside an encoder (Nemotron-Parse): called with batches like any other.
#
# Batches call ids ``input_ids`` everywhere in this package. Such a model calls them ``decoder_input_ids``, and has no
# positions: its forward is given what its family's row says (`Family.decoder_names`).


def name_decoder_inputs(model: PreTrainedModel) -> bool:
    """Let the model take the names of a batch, if its family says so; it takes its own as before."""
    if decoder_family(model.config) is None:
        return False
    # not a hook: what adapters wrap is called by its ``forward``, which runs none. Bound, so that a copy is the copy's
    model.forward = MethodType(_forward, model)
    return True


def _forward(model: PreTrainedModel, **inputs: Any) -> object:
    family = decoder_family(model.config)
    assert family is not None
    given = {name: value for name, value in inputs.items() if value is not None}  # adapters fill in all they know
    return type(model).forward(model, **family.named(given))


# --------------------------------------------------------------------------------------------------------------------
# Models whose class takes a batch as one mapping, with pictures in lists (MiniCPM-V up to 4.5, MiniCPM-o).
#
# ``forward(data)`` finds in ``data`` the slices of each row's pictures as a list of tensors, their sizes, and where in
# the row the slots of each slice begin and end (``image_bound``). A batch has the slices side by side, their sizes, and
# which tokens are slots: all that is needed to make the lists. Of a batch without pictures the class would encode a
# black one, to add nothing of it; it is told that all is encoded.
#
# MiniCPM-o puts features of sounds into the embeddings by a function of its own, which is replaced. Its encoder hears
# what fills up a shorter sound, as its mask counts frames where the encoder has halved them; so it runs on the sounds
# of rows whose longest one has as many frames, filled up as they are when a row is alone.
#
# B rows, T tokens, D hidden size, N slices of P x W_n pixels, W all of their widths, M sounds of F frames of C bands.


SOUNDS = ("audio_features", "audio_frames")
HEARD_SLOT = 3  # of ``mm_token_type_ids``


def list_pictures(model: PreTrainedModel) -> bool:
    """Let the model take batches like any other, if its family says so (`Family.in_lists`)."""
    families = [family for family in families_of(model.config) if family.in_lists]
    if not families:
        return False
    model.forward = MethodType(_forward_of_lists, model)
    model.generate = MethodType(_generate_of_lists, model)
    if any(family.audio is not None for family in families):
        model.get_omni_embedding = MethodType(_with_sounds, model)
    # MiniCPM-o gives its language model a function that reads caches of older versions; transformers' own does the same
    vars(model.get_decoder()).pop("prepare_inputs_for_generation", None)
    return True


def _forward_of_lists(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **inputs: Any
) -> object:
    data, rest = _lists(input_ids, inputs)
    if position_ids is None:  # which the class does not count
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    return type(model).forward(model, {**data, "position_ids": position_ids}, **rest)


def _generate_of_lists(model: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """int64[B, T + new]: the class's own function wants a tokenizer, and stops where that says."""
    data, rest = _lists(input_ids, inputs)
    embedded_BTD, _ = model.get_vllm_embedding(data)
    if SOUNDS[0] in data:
        embedded_BTD = model.get_omni_embedding(data, embedded_BTD, chunk_length=model.config.audio_chunk_length)
    new: torch.Tensor = model.llm.generate(inputs_embeds=embedded_BTD, **rest)
    return torch.cat([input_ids, new], dim=1)


def _with_sounds(model: Any, data: Inputs, input_embeddings: torch.Tensor, chunk_length: float = -1) -> torch.Tensor:
    """[B, T, D], with features of sounds in their slots."""
    if SOUNDS[0] not in data:
        return input_embeddings
    features_MCF, frames_M2 = (data[name] for name in SOUNDS)
    heard: dict[int, torch.Tensor] = {}
    for most in frames_M2[:, 1].unique().tolist():
        these = (frames_M2[:, 1] == most).nonzero()[:, 0]
        call = {SOUNDS[0]: features_MCF[these, :, :most], "audio_feature_lens": [frames_M2[these, 0]]}
        [embedded] = type(model).get_audio_embedding(model, call, chunk_length)
        heard |= dict(zip(these.tolist(), embedded, strict=True))
    together_SD = torch.cat([heard[number] for number in range(len(frames_M2))]).to(input_embeddings.dtype)
    slots_BT = data["mm_token_type_ids"] == HEARD_SLOT
    assert int(slots_BT.sum()) == len(together_SD), "the family's row counts the slots of sounds otherwise"
    return input_embeddings.masked_scatter(slots_BT[..., None], together_SD)


def _lists(ids_BT: torch.Tensor, inputs: Inputs) -> tuple[Inputs, Inputs]:
    """``data``, but for positions, and the inputs that are for the language model alone."""
    rest = {name: value for name, value in inputs.items() if value is not None}  # adapters fill in all they know
    slots_BT, pixels_3PW, sizes_N2 = (
        rest.pop(name, None) for name in ("mm_token_type_ids", "pixel_values", "target_sizes")
    )
    data: Inputs = {"input_ids": ids_BT, "mm_token_type_ids": slots_BT}
    data |= {name: rest.pop(name) for name in SOUNDS if name in rest}
    if pixels_3PW is None:
        return {**data, "vision_hidden_states": [[]] * len(ids_BT)}, rest
    edges_BT = nn.functional.pad((slots_BT == 1).long(), (1, 1)).diff(dim=1)
    bounds = [
        torch.stack([(edges_T == 1).nonzero()[:, 0], (edges_T == -1).nonzero()[:, 0]], dim=1) for edges_T in edges_BT
    ]
    counts = [len(bound) for bound in bounds]
    slices = pixels_3PW.split((sizes_N2.prod(dim=1) * pixels_3PW.shape[1]).tolist(), dim=-1)
    ends = torch.tensor(counts).cumsum(0).tolist()
    return {
        **data,
        "pixel_values": [list(slices[end - count : end]) for end, count in zip(ends, counts, strict=True)],
        "tgt_sizes": list(sizes_N2.split(counts)),
        "image_bound": bounds,
    }, rest


# --------------------------------------------------------------------------------------------------------------------
# Models that look at pictures across, whose class is told which of them belong to which row (MOSS-VL).
#
# A picture is on one token of the text. The class takes how many pictures each row has, and a mask of those that a
# token does not see (a token sees its own picture and those before); both follow from where the tokens are. It counts
# positions itself: behind a picture they go on by its larger side, so those of a batch are left out. A row without
# pictures in a batch with some sees none, and is what it is alone.
#
# B rows, T tokens, N pictures.


def tell_pictures_apart(model: PreTrainedModel) -> bool:
    """Let the model take batches like any other, if its family says so (`Family.looks_across`)."""
    if not any(family.looks_across for family in families_of(model.config)):
        return False
    model.forward = MethodType(_forward_across, model)
    return True


def _forward_across(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: object = None, **inputs: Any
) -> object:
    given = {name: value for name, value in inputs.items() if value is not None}  # adapters fill in all they know
    if "pixel_values" in given:
        slots_BT = input_ids == model.config.image_token_id
        counts_B = slots_BT.sum(dim=1)
        numbers_N = torch.arange(int(counts_B.max()), device=input_ids.device)
        seen_BTN = (slots_BT.cumsum(dim=1)[..., None] > numbers_N) & attention_mask.bool()[..., None]
        given |= {"media_nums_per_sample": counts_B.tolist(), "cross_attention_mask": ~seen_BTN[:, None]}
    return type(model).forward(model, input_ids=input_ids, attention_mask=attention_mask, **given)


# --------------------------------------------------------------------------------------------------------------------
# Models whose class takes pictures as its processor stacks them, and computes their attention as one (Youtu-VL).
#
# ``forward`` takes the patches of a picture as [1, P, V], a mask of those that are no padding, and their rows and
# columns. A batch has the patches of all its pictures side by side, and no padding. Without flash attention the tower
# computes the scores of all P x P pairs of a call and hides those of two pictures; so each picture goes through it by
# itself. A step of generation after the first has no slots, and then no pictures either.
#
# N pictures of P patches in all, V numbers of a patch.


def encode_pictures_apart(model: PreTrainedModel) -> bool:
    """Let the model take batches like any other, if its family says so (`Family.pictures_apart`)."""
    names = [family.pictures_apart for family in families_of(model.config) if family.pictures_apart]
    if not names:
        return False
    own = type(model).forward

    @wraps(own)  # its signature too: transformers' generate lets only inputs pass that it finds in that
    def forward(model: Any, input_ids: torch.Tensor | None = None, **inputs: Any) -> object:
        return own(model, input_ids=input_ids, **_stacked(model, input_ids, inputs))

    model.forward = MethodType(forward, model)
    model.generate = MethodType(GenerationMixin.generate, model)  # the class's own changes what is drawn
    tower = model.get_submodule(names[0])
    tower.forward = MethodType(_encode_apart, tower)
    return True


def _stacked(model: Any, ids_BT: torch.Tensor | None, inputs: Inputs) -> Inputs:
    """Inputs as the class takes them."""
    given = {name: value for name, value in inputs.items() if value is not None}  # adapters fill in all they know
    pixels_PV = given.pop("pixel_values", None)
    if pixels_PV is None or ids_BT is None or not (ids_BT == model.config.image_token_id).any():
        given.pop("spatial_shapes", None)
        return given
    patches_1PV = pixels_PV.flatten(0, -2)[None]
    there_1P = torch.ones(patches_1PV.shape[:2], dtype=torch.int32, device=patches_1PV.device)
    return {**given, "pixel_values": patches_1PV, "pixel_attention_mask": there_1P}


def _encode_apart(tower: Any, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
    call = inspect.signature(type(tower).forward).bind(tower, *args, **kwargs).arguments
    patches_1PV, there_1P, sizes_N2 = (call.pop(name) for name in PICTURES)
    call.pop("self")
    lengths = sizes_N2.prod(dim=1).tolist()
    parts = zip(patches_1PV.split(lengths, dim=1), there_1P.split(lengths, dim=1), sizes_N2.split(1), strict=True)
    seen = [type(tower).forward(tower, **dict(zip(PICTURES, part, strict=True)), **call) for part in parts]
    return BaseModelOutputWithPooling(last_hidden_state=torch.cat([each.last_hidden_state for each in seen]))


PICTURES = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
