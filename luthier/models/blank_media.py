"""Ranks that wait for each other's gradients, and a batch without pictures: its towers see a blank one, to no effect.

A parameter that takes no part in a backward pass has no gradient, and ranks whose batches have pictures would wait for
it for ever. So where a micro-batch holds none of a kind (image, video, audio), the model's own encoder for it is run on
one blank item inside the forward pass, and zero times what comes out is added to the embeddings of the words: every
number stays as it is, and every parameter of tower and projector gets a gradient of zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from torch import nn
from transformers import PreTrainedModel

from luthier.collation import MediaInputs
from luthier.config.schema import ModelPart
from luthier.errors import ModelError
from luthier.media import Decoded, MediaKind, MediaProcessor, join_features, merge_features
from luthier.media.files.decoding import DecodedAudio, DecodedImage, DecodedVideo
from luthier.models.submodules import ModelParts, find_parts
from luthier.records import AudioHeader, ImageHeader, MediaHeader, VideoHeader
from luthier.writing import counted

TensorFeatures = Mapping[str, torch.Tensor]
"""What a family's processor makes of one item, a black picture or silence: keyword arguments of the model. Zeros would
not do: some models take a picture of zeros for padding."""

_SIDE, _FRAMES = 64, 4  # pixels, pictures
_UNUSED = {"last_hidden_state", "hidden_states", "attentions"}  # what encoders also give, and no model passes on
_ENCODES = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlankMedia:
    """A blank item of each kind whose encoder is trained, or whose features pass through something that is."""

    features: Mapping[str, TensorFeatures]

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
    """What a run needs whose ranks wait for each other's gradients; None of one process alone, or of words alone.

    ``plain`` is the model under the adapter of ``model``. Raises as `needed_blanks`.
    """
    if media is None or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    if media.processor.family.decoder_names:  # each of its rows has a picture
        return None
    notes: list[str] = []
    features = {
        kind: {name: value.to(device) for name, value in of_kind.items()}
        for kind, of_kind in blank_features(media.processor).items()
    }
    found = needed_blanks(model, find_parts(plain), features, notes)
    for note in notes:
        tell(f"model: {note}")
    return found


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
    needed = {}
    base = "base_model.model." if isinstance(model, PeftModel) else ""
    outside = {name for name in trained if parts.of(name.removeprefix(base)) is not ModelPart.LANGUAGE_MODEL}
    for kind, of_kind in features.items():
        if not outside and not hasattr(_plain(model), _ENCODES[kind]):
            continue  # whatever it is that encodes them, it is not trained
        out = _encoded(model, kind, of_kind)
        if not out.requires_grad:
            continue
        grads = torch.autograd.grad(out, list(trained.values()), allow_unused=True)
        now = {name for name, grad in zip(trained, grads, strict=True) if grad is not None}
        if now - reached:
            needed[kind] = of_kind
        reached |= now
    idle = [name for name in trained if name in outside - reached]
    for name in idle:
        trained[name].requires_grad_(False)
    if idle:
        count = sum(trained[name].numel() for name in idle)
        notes.append(
            f"{counted(count, 'parameter')} of {', '.join(idle[:3])} … take part in nothing, and are not trained"
        )
    return BlankMedia(features=needed)


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

    hook = _plain(model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def _encoded(model: nn.Module, kind: str, features: TensorFeatures) -> torch.Tensor:
    """The sum of all that the model's encoder of this kind, and what takes its features to the words, give."""
    plain = _plain(model)
    encode = getattr(plain, _ENCODES[kind], None)
    if encode is None:
        raise ModelError(
            f"{type(plain).__name__} has no {_ENCODES[kind]}: ranks without any {kind} would make others wait",
            hint="train on one process, or freeze its towers: adapter.train_parts: [language_model]",
        )
    known = inspect.signature(encode).parameters
    output = encode(**{name: value for name, value in features.items() if name in known})
    tensors = [each for each in _tensors(output) if each.is_floating_point()]
    return torch.stack([each.float().sum() for each in tensors]).sum()


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


def _plain(model: nn.Module) -> Any:
    inner: Any = model
    while isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner.module
    return inner.get_base_model() if isinstance(inner, PeftModel) else inner
