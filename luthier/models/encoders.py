"""The encoders of a model that sees, run on single items: what they give, as arrays with names.

Many classes of transformers take what `get_image_features` and `get_video_features` return as an input,
``mm_encoder_outputs``, in the place of pixels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import PreTrainedModel

from luthier.collation import GRIDS
from luthier.errors import ModelError
from luthier.media import ENCODER_OUTPUTS, ItemFeatures, is_encoded
from luthier.media.families import Family, MediaKind
from luthier.media.files.decoding import Decoded, DecodedAudio, DecodedImage, DecodedVideo
from luthier.media.geometry.videos import sampled_frames
from luthier.media.processors.calling import join_features, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import AudioHeader, ImageHeader, MediaHeader, VideoHeader

Value = TypeVar("Value")

# No class takes computed features of sounds. Video comes first: some have one encoder for both, under pixel_values.
_ENCODERS = {"video": "get_video_features", "image": "get_image_features"}
_TAKEN = ("pooler_output", "deepstack_features")  # what forward methods read of an encoder's output
_UNREAD = {"last_hidden_state", "hidden_states", "attentions"}
_PIXELS = "pixel_values"  # so begin the names of what forward methods refuse beside computed features
_OLDER_NAMES = {"pixel_values_images": "pixel_values"}  # what Video-LLaVA's processor calls what its model takes
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
        outputs = {_OLDER_NAMES.get(name, name): value for name, value in outputs.items()}
        kind, taken = self._chosen(outputs)
        if left := [name for name in outputs if name.startswith(_PIXELS) and name not in taken]:
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
            encoded = self._run(kind, tensors)
        grids = {name for names in GRIDS.values() for name in names}
        return ItemFeatures(
            outputs={name: value for name, value in outputs.items() if name not in taken or name in grids},
            encoded={f"{ENCODER_OUTPUTS}.{kind}.{name}": _array(value) for name, value in encoded.items()},
        )

    def depends_on(self, item: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]) -> list[str]:
        """Which of these parameters, by name, the features of an item (a batch of one) depend on."""
        kind, taken = self._chosen({_OLDER_NAMES.get(name, name): value for name, value in item.items()})
        if kind is None:
            return []
        with torch.enable_grad():
            total = torch.stack([value.float().sum() for value in self._run(kind, taken).values()]).sum()
            if not total.requires_grad:
                return []
            grads = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        return [name for name, grad in zip(trained, grads, strict=True) if grad is not None]

    def _run(self, kind: str, taken: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: value.to(self.device) for name, value in taken.items()}
        try:
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                return dict(self._named(self._method(kind)(**tensors, return_dict=True)))
        except (RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(
                f"media.cache: encoder_features: the {kind} encoder of {type(self.model).__name__} does not give what "
                f"can be kept of a single item: {error}",
                hint=_WITHOUT,
            ) from error

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
            if (needed or {plain[0].name}) <= outputs.keys():
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
    outputs = {kind: _EncoderOutputs(**{key: _field(v) for key, v in fields.items()}) for kind, fields in tree.items()}
    return {**others, ENCODER_OUTPUTS: outputs}


class _EncoderOutputs(SimpleNamespace):
    """What an encoder gives, of any class: what the model reads of it."""

    def to_tuple(self) -> tuple[object, ...]:
        """As transformers' own outputs have it."""
        return tuple(vars(self).values())


def _field(value: object) -> object:
    """{"0": a, "1": b} -> (a, b)"""
    if not isinstance(value, dict):
        return value
    return tuple(_field(value[place]) for place in sorted(value, key=int))


# ------------------------------------------------ An item of each kind, to find out which weights features depend on


TensorFeatures = Mapping[str, torch.Tensor]
"""What a family's processor makes of one item, a black picture or silence: keyword arguments of the model. Zeros would
not do: some models take a picture of zeros for padding."""

_SIDE, _FRAMES = 112, 8  # pixels, of which some families want multiples of 28, and pictures


def blank_features(processor: MediaProcessor) -> dict[str, TensorFeatures]:
    """An item of each kind: a small black picture, a black video, a second of silence."""
    kinds = processor.kinds
    items: dict[str, tuple[MediaHeader, Decoded]] = {}
    if MediaKind.IMAGE in kinds:
        pixels = Image.new("RGB", (_SIDE, _SIDE))
        items["image"] = (ImageHeader(width=_SIDE, height=_SIDE), DecodedImage(pixels=pixels))
    if MediaKind.VIDEO in kinds:
        header = VideoHeader(width=_SIDE, height=_SIDE, num_frames=_FRAMES, fps=2.0)
        chosen = tuple(sampled_frames(processor.settings(MediaKind.VIDEO), header))
        frames = np.zeros((len(chosen), _SIDE, _SIDE, 3), dtype=np.uint8)
        items["video"] = (header, DecodedVideo(frames=frames, frame_indices=chosen, fps=header.fps))
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
