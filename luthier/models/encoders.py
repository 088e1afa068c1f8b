"""The encoders of a model that sees, run on single items: what they give, as arrays with names.

Many classes of transformers take what `get_image_features` and `get_video_features` return as an input,
``mm_encoder_outputs``, in the place of pixels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from PIL import Image
from torch import nn
from transformers import PreTrainedModel

from luthier.collation import GRIDS, MediaInputs
from luthier.config.choices import ModelPart
from luthier.errors import ModelError
from luthier.media import ENCODER_OUTPUTS, ItemFeatures, is_encoded
from luthier.media.families import Family, MediaKind
from luthier.media.files.decoding import Decoded, DecodedAudio, DecodedImage, DecodedVideo
from luthier.media.processors.calling import join_features, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.models import TYPE_INPUTS, ModelParts, find_parts, plain_model
from luthier.records import AudioHeader, ImageHeader, MediaHeader, VideoHeader
from luthier.writing import counted

Value = TypeVar("Value")

# No class takes computed features of sounds. Video comes first: some have one encoder for both, under pixel_values.
_ENCODERS = {"video": "get_video_features", "image": "get_image_features"}
_TAKEN = ("pooler_output", "deepstack_features")  # what forward methods read of an encoder's output
_UNREAD = {"last_hidden_state", "hidden_states", "attentions"}
_PIXELS = ("pixel_values", "pixel_values_videos")  # what forward methods refuse beside computed features
_WITHOUT = "remove media.cache: the towers then run in each step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """Those of one model, on its device. ``autocast``: to which type the run's steps cast, as `torch.autocast` does."""

    model: PreTrainedModel
    family: Family
    device: torch.device
    autocast: torch.dtype | None = None

    @classmethod
    def of(
        cls, plain: PreTrainedModel, family: Family, *, device: torch.device, autocast: torch.dtype | None
    ) -> Encoders:
        """Of a model without its adapter's wrapper. Raises `ModelError` if its class takes no computed features."""
        inner: Any = plain.base_model
        for owner in (plain, inner):
            if ENCODER_OUTPUTS in inspect.signature(owner.forward).parameters:
                return cls(model=inner, family=family, device=device, autocast=autocast)
        raise ModelError(
            f"media.cache: encoder_features: {type(plain).__name__} (family {family.name}) takes no computed features",
            hint=_WITHOUT,
        )

    def encode(self, outputs: Mapping[str, NDArray[Any]]) -> ItemFeatures:
        """One item, from the processor's outputs for it. What no encoder takes (of a sound) is kept as it is.

        Raises `ModelError` if pixels are left, or an encoder gives what cannot be told apart by item.
        """
        kind, taken = self._chosen(outputs)
        if left := [name for name in _PIXELS if name in outputs and name not in taken]:
            raise ModelError(
                f"media.cache: encoder_features: no encoder of {type(self.model).__name__} can be called with "
                f"{' and '.join(left)} of a single item ({', '.join(sorted(outputs))})",
                hint=_WITHOUT,
            )
        if kind is None:
            return ItemFeatures(outputs=outputs, encoded={})
        batch = merge_features(self.family, [taken])
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in batch.items()}
        with torch.no_grad():
            given = self._run(kind, tensors)
        grids = {name for names in GRIDS.values() for name in names}
        return ItemFeatures(
            outputs={name: value for name, value in outputs.items() if name not in taken or name in grids},
            encoded={f"{ENCODER_OUTPUTS}.{kind}.{name}": _array(value) for name, value in self._named(given)},
        )

    def depends_on(self, item: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]) -> list[str]:
        """Which of these parameters, by name, the features of an item (a batch of one) depend on."""
        kind, taken = self._chosen(item)
        if kind is None:
            return []
        with torch.enable_grad():
            values = [value for _, value in self._named(self._run(kind, taken))]
            total = torch.stack([value.float().sum() for value in values]).sum()
            if not total.requires_grad:
                return []
            grads = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        return [name for name, grad in zip(trained, grads, strict=True) if grad is not None]

    def _run(self, kind: str, taken: Mapping[str, torch.Tensor]) -> Mapping[str, object]:
        tensors = {name: value.to(self.device) for name, value in taken.items()}
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            given: Mapping[str, Any] = self._method(kind)(**tensors, return_dict=True)
        return given

    def _method(self, kind: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self.model, _ENCODERS[kind])
        return found

    def _chosen(self, outputs: Mapping[str, Value]) -> tuple[str | None, dict[str, Value]]:
        """The encoder that has all it needs among these outputs, and those that it takes."""
        for kind, name in _ENCODERS.items():
            if not hasattr(self.model, name):
                continue
            plain = [
                p for p in inspect.signature(self._method(kind)).parameters.values() if p.kind is not p.VAR_KEYWORD
            ]
            needed = {parameter.name for parameter in plain if parameter.default is parameter.empty}
            if needed and needed <= outputs.keys():
                return kind, {p.name: outputs[p.name] for p in plain if p.name in outputs}
        return None, {}

    def _named(self, given: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Items joined: ``pooler_output`` (a, b) -> ``pooler_output.0``; of the fields of layers each for itself."""
        fields = {name: value for name, value in given.items() if value is not None and name not in _UNREAD}
        if unknown := sorted(fields.keys() - set(_TAKEN)) or ([] if fields else ["nothing to pass on"]):
            raise ModelError(
                f"media.cache: encoder_features: the encoder of {type(self.model).__name__} gives "
                f"{', '.join(unknown)}, which is not kept item by item",
                hint=_WITHOUT,
            )
        for name, value in fields.items():
            if name == "deepstack_features":
                for layer, features in enumerate(value):
                    yield from _joined(f"{name}.{layer}", features)
            else:
                yield from _joined(name, value)


def _joined(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    else:
        yield f"{name}.0", torch.cat(list(value))


def _array(value: torch.Tensor) -> NDArray[np.generic]:
    flat = value.detach().cpu().contiguous()
    found: NDArray[np.generic] = (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy()
    return found


# --------------------------------------------------------------------------------------------------------------------
# Features that an encoder made beforehand, from the batch's flat inputs to what models of transformers take.


def with_encoder_outputs(inputs: Mapping[str, Any]) -> dict[str, object]:
    """The inputs with one ``mm_encoder_outputs`` in the place of all that belong to it.

        mm_encoder_outputs.image.pooler_output.0   ->   mm_encoder_outputs["image"].pooler_output == (features,)

    A number is a place in a tuple; uint16 is bfloat16 (`media.FeatureFiles`).
    """
    tree: dict[str, Any] = {}
    for name, value in inputs.items():
        if is_encoded(name):
            *path, last = name.split(".")[1:]
            branch = tree
            for step in path:
                branch = branch.setdefault(step, {})
            branch[last] = value.view(torch.bfloat16) if value.dtype is torch.uint16 else value
    others = {name: value for name, value in inputs.items() if not is_encoded(name)}
    if not tree:
        return others
    outputs = {kind: SimpleNamespace(**{key: _field(v) for key, v in fields.items()}) for kind, fields in tree.items()}
    return {**others, ENCODER_OUTPUTS: outputs}


def _field(value: object) -> object:
    """{"0": a, "1": b} -> (a, b)"""
    if not isinstance(value, dict):
        return value
    return tuple(_field(value[place]) for place in sorted(value, key=int))


# --- Ranks that wait for each other's gradients, and a batch without pictures: its towers see a blank one, to no effect


TensorFeatures = Mapping[str, torch.Tensor]
"""What a family's processor makes of one item, a black picture or silence: keyword arguments of the model. Zeros would
not do: some models take a picture of zeros for padding."""

_SIDE, _FRAMES = 64, 4  # pixels, pictures
_UNUSED = {"last_hidden_state", "hidden_states", "attentions"}  # what encoders also give, and no model passes on
_ENCODES = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlankMedia:
    """A blank item of each kind whose encoder is trained, or whose features pass through something that is; and
    ``reached``, for each kind the inputs of the blank, and what it reaches of what is trained outside of the language
    model. ``along``: inputs that tokens of words have, too."""

    features: Mapping[str, TensorFeatures]
    reached: Mapping[str, tuple[frozenset[str], tuple[nn.Parameter, ...]]] = field(default_factory=dict)
    along: tuple[str, ...] = TYPE_INPUTS

    def kinds_of(self, inputs: Set[str]) -> list[bool]:
        """For each of ``reached`` whether a batch with these inputs, beyond those of words, may hold some: sounds come
        in those of their blank, and what is seen (videos, features that were kept) in any others."""
        heard = self.reached["audio"][0] if "audio" in self.reached else frozenset[str]()
        return [bool(inputs & heard if kind == "audio" else inputs - heard) for kind in self.reached]

    def missing(self, inputs: Mapping[str, object]) -> dict[str, TensorFeatures]:
        """Those of which a batch has nothing."""
        return {kind: each for kind, each in self.features.items() if inputs.keys().isdisjoint(each)}


def run_blanks(
    model: PreTrainedModel | PeftModel,
    plain: PreTrainedModel,
    media: MediaInputs | None,
    *,
    device: torch.device,
    tell: Callable[[str], None],
) -> BlankMedia | None:
    """What a run needs whose ranks wait for each other's gradients, and one process of which only towers or projectors
    learn: without a picture its loss would reach nothing that is trained. None of another process alone, or of words
    alone.

    ``plain`` is the model under the adapter of ``model``. Raises as `needed_blanks`.
    """
    if media is None or media.processor.family.decoder_names:  # each row of the latter has a picture
        return None
    parts = find_parts(plain)
    is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    if is_alone and ModelPart.LANGUAGE_MODEL in _trained_parts(model, parts).values():
        return None
    notes: list[str] = []
    features = {
        kind: {name: value.to(device) for name, value in of_kind.items()}
        for kind, of_kind in blank_features(media.processor).items()
    }
    found = needed_blanks(model, parts, features, notes)
    for note in notes:
        tell(f"model: {note}")
    return replace(found, along=(*TYPE_INPUTS, *media.processor.family.along))


def _trained_parts(model: nn.Module, parts: ModelParts) -> dict[str, ModelPart]:
    """Which part each parameter that is trained is of, by its name in ``model``."""
    base = "base_model.model." if isinstance(model, PeftModel) else ""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: parts.of(name.removeprefix(base)) for name in names}


def blank_features(processor: MediaProcessor) -> dict[str, TensorFeatures]:
    """An item of each kind that has an encoder of its own: a small black picture (or video), a second of silence."""
    kinds = processor.kinds
    items: dict[str, tuple[MediaHeader, Decoded]] = {}
    if MediaKind.IMAGE in kinds:
        pixels = Image.new("RGB", (_SIDE, _SIDE))
        items["image"] = (ImageHeader(width=_SIDE, height=_SIDE), DecodedImage(pixels=pixels))
    elif MediaKind.VIDEO in kinds:
        frames = np.zeros((_FRAMES, _SIDE, _SIDE, 3), dtype=np.uint8)
        chosen = tuple(range(_FRAMES))
        seen = DecodedVideo(frames=frames, frame_indices=chosen, fps=2.0, total_num_frames=_FRAMES)
        items["video"] = (VideoHeader(width=_SIDE, height=_SIDE, num_frames=_FRAMES, fps=2.0), seen)
    if MediaKind.AUDIO in kinds:
        rate = int(processor.settings(MediaKind.AUDIO)["sampling_rate"])
        heard = DecodedAudio(samples=np.zeros(rate, dtype=np.float32), sampling_rate=rate)
        items["audio"] = (AudioHeader(num_samples=rate, sampling_rate=rate), heard)
    found: dict[str, TensorFeatures] = {}
    for kind, item in items.items():
        joined = join_features(processor.family, [processor.features([item])])
        arrays = merge_features(processor.family, [joined])
        found[kind] = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
    return found


def needed_blanks(
    model: nn.Module, parts: ModelParts, features: Mapping[str, TensorFeatures], notes: list[str]
) -> BlankMedia:
    """The blanks that reach parameters which are trained, and which none before them reaches.

    ``features`` hold an item of each kind that the run may meet.
    Parameters of towers and projectors that no blank reaches are taken by no picture either (layers behind the one
    whose states are used). They are frozen, with a note: ranks would wait for their gradients too.

    Raises `ModelError` for a model that has no function for one of these kinds.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    reached: set[str] = set()
    needed, by_kind = {}, {}
    outside = {name for name, part in _trained_parts(model, parts).items() if part is not ModelPart.LANGUAGE_MODEL}
    for kind, of_kind in features.items():
        if kind == "audio" and getattr(plain_model(model).config, "audio_config", kind) is None:
            continue  # a model that could hear, but does not, as some of Gemma 4
        if not outside and not hasattr(plain_model(model), _ENCODES[kind]):
            continue  # whatever it is that encodes them, it is not trained
        out = _encoded(model, kind, of_kind)
        if not out.requires_grad:
            continue
        grads = torch.autograd.grad(out, list(trained.values()), allow_unused=True)
        now = {name for name, grad in zip(trained, grads, strict=True) if grad is not None}
        if now - reached:
            needed[kind] = of_kind
        reached |= now
        by_kind[kind] = frozenset(of_kind), tuple(trained[name] for name in trained if name in outside & now)
    idle = [name for name in trained if name in outside - reached]
    for name in idle:
        trained[name].requires_grad_(False)
    if idle:
        count = sum(trained[name].numel() for name in idle)
        notes.append(
            f"{counted(count, 'parameter')} of {', '.join(idle[:3])} … take part in nothing, and are not trained"
        )
    return BlankMedia(features=needed, reached=by_kind)


@contextmanager
def with_blanks(model: nn.Module, blanks: BlankMedia | None, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Within it, one forward pass of ``model``, which may be wrapped, on ``inputs`` runs the encoders they lack."""
    missing = blanks.missing(inputs) if blanks is not None and torch.is_grad_enabled() else {}
    if not missing:
        yield
        return

    def add(layer: nn.Module, arguments: tuple[Any, ...], embeddings: torch.Tensor) -> torch.Tensor:
        hook.remove()  # models that look words up twice need it once
        total = sum((_encoded(model, kind, each) for kind, each in missing.items()), embeddings.new_zeros(()))
        return embeddings + 0 * total.to(embeddings.dtype)

    hook = plain_model(model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def _encoded(model: nn.Module, kind: str, features: TensorFeatures) -> torch.Tensor:
    """The sum of all that the model's encoder of this kind, and what takes its features to the words, give."""
    plain = plain_model(model)
    # some classes leave it, or the names of its arguments, to the model inside of them
    encodes = (getattr(each, _ENCODES[kind], None) for each in (plain.base_model, plain))
    known, encode = next(((found, each) for each in encodes if each and (found := _arguments(each))), ({}, None))
    if encode is None:
        raise ModelError(
            f"{type(plain).__name__} has no {_ENCODES[kind]}, by which ranks without any {kind}, or steps that train "
            "no language model, would have gradients",
            hint="train on one process, the language model too, or freeze its towers: adapter.train_parts: "
            "[language_model]",
        )
    given = {name: value for name, value in features.items() if name in known}
    for name, is_needed in known.items():  # Video-LLaVA's pixel_values are pixel_values_images elsewhere
        if is_needed and name not in given:
            given[name] = next(value for feature, value in features.items() if feature.startswith(name))
    output = encode(**given)
    tensors = [each for each in _tensors(output) if each.is_floating_point()]
    if not tensors:  # Llama 4's class gives what its tower makes, and projects it in its own forward
        states = output.last_hidden_state
        for name in find_parts(plain).projector:
            states = plain.get_submodule(name)(states)
        tensors = [states]
    return torch.stack([each.float().sum() for each in tensors]).sum()


def _arguments(encode: Callable[..., object]) -> dict[str, bool]:
    """The names of its arguments, and whether each has to be given; {} where it passes on whatever it gets."""
    parameters = inspect.signature(encode).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return {each.name: each.default is each.empty for each in named}


def _tensors(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for name, each in output.items():
            if name not in _UNUSED:
                yield from _tensors(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors(each)
