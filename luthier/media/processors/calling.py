"""How decoded media are handed to a processor, and what it gives: arguments, and outputs as arrays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from luthier.errors import ModelError, RowError
from luthier.media.families import Family, Features, MediaKind, Options, Outputs, Part, Processor, Rule, Settings
from luthier.media.files.decoding import Decoded, DecodedAudio, DecodedImage, DecodedVideo
from luthier.media.geometry.videos import video_metadata
from luthier.media.processors import sounds_of
from luthier.records import ImageHeader, MediaHeader, VideoHeader
from luthier.writing import counted

if TYPE_CHECKING:
    import PIL.Image

    from luthier.config.inputs import MediaConfig


# ----------------------------------------------------------------------------------------------------------------------
# Image processors that come with a model's files and were written for transformers 4: version 5 loads and calls them.
#
# A name that their file imports and version 5 has no more is added; nothing that it has is changed. Of their class two
# things are put as version 5 wants them: which options may be left out, and what the way of resizing is called.


def offer_older_names() -> None:
    """Let files import from transformers what the options of an image processor were called in version 4, and what it
    said of a video processor's.
    """
    from transformers import image_processing_backends, video_processing_utils
    from transformers.processing_utils import ImagesKwargs

    if not hasattr(image_processing_backends, "DefaultFastImageProcessorKwargs"):
        image_processing_backends.DefaultFastImageProcessorKwargs = ImagesKwargs
    if not hasattr(video_processing_utils, "BASE_VIDEO_PROCESSOR_DOCSTRING"):
        video_processing_utils.BASE_VIDEO_PROCESSOR_DOCSTRING = ""


def call_as_newer(processor: Processor) -> None:
    """Let version 5 call the image processor of this processor, if its class was written for version 4."""
    kind: Any = type(getattr(processor, "image_processor", None))
    own = getattr(kind, "_preprocess", None)
    if own is None or kind.__module__.startswith("transformers.") or "interpolation" not in signature(own).parameters:
        return
    from transformers.image_processing_backends import TorchvisionBackend, pil_torch_interpolation_mapping

    def preprocess(self: Any, images: Any, *args: Any, resample: Any = None, **kwargs: Any) -> Any:
        return own(self, images, *args, interpolation=pil_torch_interpolation_mapping.get(resample, resample), **kwargs)

    # a class of version 5 may choose the size in here, and then takes other arguments than version 4 gives
    resize_own = kind.resize if "image" in signature(kind.resize).parameters else TorchvisionBackend.resize

    def resize(self: Any, image: Any, size: Any, interpolation: Any = None, **kwargs: Any) -> Any:
        return resize_own(self, image, size, **{"resample": interpolation, **kwargs})

    kind._preprocess, kind.resize = preprocess, resize
    # version 4 asked for none of its options, whether or not the class declared that they may be left out
    options: Any = TypedDict
    kind.valid_kwargs = options(kind.valid_kwargs.__name__, dict(kind.valid_kwargs.__annotations__), total=False)


# ----------------------------------------------------------------------------------------------------------------------
# What every processor is called with.


# Named by kind and not for all, since some classes cannot read their own ids as tensors.
AS_TENSORS = {"images_kwargs": "pt", "videos_kwargs": "pt", "audio_kwargs": "pt"}


def media_arguments(
    items: Sequence[tuple[MediaHeader, Decoded]], settings: Mapping[MediaKind, Settings], call: ProcessorKwargs
) -> Options:
    """The arguments of a processor but its text, for the items of one text in the order of their placeholders.

    ``call`` are the run's options. Frames are those that decoding has taken: the processor is told not to choose any,
    and where they stand in their video, which is what timestamps are made from.

    Raises `RowError` under ``media_mismatch`` for frames that are not those that were planned.
    """
    kwargs: ProcessorKwargs = {
        name: {**call.get(name, {}), "return_tensors": tensors} for name, tensors in AS_TENSORS.items()
    }
    arguments: dict[str, object] = {}
    if images := [item.pixels for _, item in items if isinstance(item, DecodedImage)]:
        arguments["images"] = [images]
    videos = [(header, item) for header, item in items if isinstance(item, DecodedVideo)]
    if videos:
        arguments["videos"] = [video.frames for _, video in videos]
        metadata = [_metadata(settings[MediaKind.VIDEO], header, video) for header, video in videos]
        # of one video not as a list, since one class (Nemotron Omni) reads it as it is given
        alone = metadata[0] if len(metadata) == 1 else metadata
        # whose return one class (Cosmos 3 Edge) does not ask for, and then misses
        told = {"video_metadata": alone, "return_metadata": True}
        kwargs["videos_kwargs"] |= {"do_sample_frames": False, **told}
    sounds = [item for _, item in items if isinstance(item, DecodedAudio)]
    if videos and kwargs["videos_kwargs"].get("use_audio_in_video"):
        _, owners = sounds_of([header for header, _ in items], with_tracks=True)
        sounds = [sound for _, item in items if (sound := _sound(item)) is not None]
        arguments["audio_from_video_indices"] = owners
    if sounds:
        arguments["audio"] = [sound.samples for sound in sounds]
    used = {
        name: kwargs[name]
        for name, given in zip(AS_TENSORS, ("images", "videos", "audio"), strict=True)
        if given in arguments
    }
    return {**arguments, **used}


def limited(item: Decoded, limits: AreaLimits) -> Decoded:
    """A picture within limits; anything else as it is."""
    return DecodedImage(pixels=limits.picture(item.pixels)) if isinstance(item, DecodedImage) else item


def _metadata(settings: Settings, header: MediaHeader, video: DecodedVideo) -> object:
    assert isinstance(header, VideoHeader), "a video is planned by the header of a video"
    metadata = video_metadata(settings, header)
    planned, taken = [int(index) for index in metadata.frames_indices], list(video.frame_indices)
    if planned != taken:
        raise RowError(
            "media_mismatch",
            f"{counted(len(planned), 'frame')} of the video were planned, {len(taken)} are there, or others",
        )
    return metadata


def _sound(item: Decoded) -> DecodedAudio | None:
    match item:
        case DecodedAudio():
            return item
        case DecodedVideo():
            return item.audio
        case _:
            return None


# --------------------------------------------------------------------------------------------------------------------
# A run's options under the names that a family's processor has for them.


ProcessorKwargs = dict[str, dict[str, Any]]
# Which options are of which kind of media.
OPTIONS = {
    MediaKind.IMAGE: ("min_pixels", "max_pixels", "crop_to_patches", "pan_and_scan"),
    MediaKind.VIDEO: ("video_min_pixels", "video_max_pixels", "fps", "max_frames", "use_audio_in_video"),
    MediaKind.AUDIO: ("sampling_rate",),
}
# Those that are met without the processor's help where it has no setting for them.
LIMITS = ("min_pixels", "max_pixels")
# Those that a processor without a setting for them may do all the same, so that their `false` has to be met, too.
CUT = ("crop_to_patches",)


def call_options(parts: Mapping[MediaKind, tuple[str, Part]], family: Family, options: MediaConfig) -> ProcessorKwargs:
    """Keyword arguments for the processor: ``max_pixels`` -> ``{"images_kwargs": {"size": {"longest_edge": …}}}``.

    ``parts``: for each kind the argument's name and the part of the processor. Raises `ModelError` for an option that
    is set and that this family has no way to meet; options of kinds that it does not take mean nothing to it.
    """
    call: ProcessorKwargs = {}
    for kind, (name, part) in parts.items():
        if (rule := family.rule(kind)) is None:
            continue
        chosen: dict[str, object] = {}
        for key in OPTIONS[kind]:
            value = getattr(options, key)
            if value is None or (value is False and key not in rule.options and key not in CUT):
                continue
            if key in rule.options:
                _set(chosen, part, rule.options[key], value)
            elif key not in LIMITS:
                raise _unknown_option(key, family, kind, rule)
        if chosen:
            call[name] = chosen
    return call


def area_limits(family: Family, options: MediaConfig) -> AreaLimits | None:
    """The limits of a picture's area that are not the processor's; None if there are none."""
    known = {} if family.image is None else family.image.options
    least = None if "min_pixels" in known else options.min_pixels
    most = None if "max_pixels" in known else options.max_pixels
    return None if least is None and most is None else AreaLimits(least=least, most=most)


def _set(chosen: dict[str, Any], part: Part, target: str, value: object) -> None:
    name, _, entry = target.partition(".")
    chosen[name] = {**dict(chosen.get(name) or getattr(part, name) or {}), entry: value} if entry else value


def _unknown_option(key: str, family: Family, kind: MediaKind, rule: Rule) -> ModelError:
    known = [*rule.options, *(LIMITS if kind is MediaKind.IMAGE else ())]
    return ModelError(
        f"media.{key} is set, and the processor of {family.name} has no such option",
        hint=f"leave it out; for its {kind}s there are {', '.join(dict.fromkeys(known)) or 'none'}",
    )


# --------------------------------------------------------------------------------------------------------------------
# Pictures brought within limits of area before a processor that has no such limits sees them.


@dataclass(frozen=True, kw_only=True, slots=True)
class AreaLimits:
    """Fewest and most pixels; None: no limit. The shape is kept up to a pixel: 400x100 with 10000 at most -> 200x50."""

    least: int | None = None
    most: int | None = None

    def header(self, header: ImageHeader) -> ImageHeader:
        """The header of the picture within the limits."""
        width, height = self._size(header.width, header.height)
        return replace(header, width=width, height=height)

    def picture(self, picture: PIL.Image.Image) -> PIL.Image.Image:
        """The picture within the limits, of the size that `header` says."""
        size = self._size(*picture.size)
        return picture if size == picture.size else picture.resize(size)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        area = width * height
        wanted = min(max(area, self.least or area), self.most or max(area, self.least or area))
        if wanted == area:
            return width, height
        scale = math.sqrt(wanted / area)
        # never over the most that may be, so sides are rounded down; up where there is a least
        tidy = math.floor if wanted < area else math.ceil
        return max(1, tidy(width * scale)), max(1, tidy(height * scale))


# ----------------------------------------------------------------------------------------------- what a processor gives


# Outputs along the tokens of the processor's own text; ours has other tokens, and makes them itself.
TOKEN_OUTPUTS = frozenset(
    (
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "labels",
        "video_metadata",
        "special_tokens_mask",
    )
)


def check_expansion(processor: Processor, planned: Sequence[str], output: Outputs) -> None:
    """Compare what stands for the items in the processor's own ids with the plan.

    The text was placeholders alone, so every control token of the plan must be there as often as it was planned. Raises
    `RowError` under ``media_mismatch`` with the token and both counts.
    """
    tokenizer = processor.tokenizer
    want = Counter(tokenizer("".join(planned), add_special_tokens=False)["input_ids"])
    have = Counter(np.asarray(output["input_ids"][0]).tolist())
    control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for token in sorted(control & set(want)):
        # what the processor puts around a text of its own (a beginning-of-text token) is not the items'
        if have[token] != want[token] and token not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            name = tokenizer.convert_ids_to_tokens(token)
            raise RowError(
                "media_mismatch",
                f"the header promises {counted(want[token], 'token')} {name}, the processor wrote "
                f"{have[token]} for what was "
                "decoded: the file has changed, or the family's row does not describe this processor",
            )


def check_strings(processor: Processor, planned: Sequence[str], written: Sequence[str]) -> None:
    """The same of the strings themselves, where the processor gives them."""
    if list(planned) != list(written):
        ids = processor.tokenizer("".join(written), add_special_tokens=False)["input_ids"]
        check_expansion(processor, planned, {"input_ids": [ids]})
        raise RowError("media_mismatch", f"the header promises {list(planned)}, the processor wrote {list(written)}")


@contextmanager
def refused_rows() -> Iterator[None]:
    """What breaks a processor puts its row aside: sizes that are odd enough are as many as there are processors."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise RowError("media_refused", f"the processor fails on these media: {error}") from error


def as_arrays(family: Family, output: Outputs) -> dict[str, NDArray[np.generic]]:
    """The outputs that are batched by media, as numpy arrays; raises `ModelError` for one the row does not know."""
    arrays = {}
    for key, value in output.items():
        if key in TOKEN_OUTPUTS or key in family.token_inputs or key in family.dropped:
            continue
        if key not in family.batching:
            raise ModelError(
                f"the processor of {family.name} returns {key!r}, and the family's row does not say how it is batched",
                hint=f"it knows {', '.join(family.batching)}; this version of transformers may be newer than the row",
            )
        arrays[key] = as_array(value)
    for key, derive in family.derived.items():
        if key not in arrays and (made := derive(arrays)) is not None:
            arrays[key] = made
    return arrays


def as_array(value: object) -> NDArray[np.generic]:
    """One output of a processor, which may be a tensor, a number or a list of such."""
    import torch

    if type(value) is float:
        return np.asarray(value, dtype=np.float32)  # as torch takes Python's numbers
    if isinstance(value, (list, tuple)):
        return np.asarray([as_array(item) for item in value])
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.float().numpy()  # numpy has no bfloat16; every value of it is a float32
    return np.asarray(value)


# --------------------------------- What a processor makes of single rows, joined to what it would make of them together


def join_features(family: Family, samples: Sequence[Features]) -> dict[str, NDArray[np.generic]]:
    """The outputs for one row of a batch from those of its samples, in their order; {} if none has media.

    Raises `ModelError` if an output's sizes disagree along an axis that the family does not pad.
    """
    return {key: _concatenated(family, key, samples, by_row=False) for key in _keys(samples)}


def merge_features(family: Family, rows: Sequence[Features]) -> dict[str, NDArray[np.generic]]:
    """The outputs for a batch from those of its rows; a row of text alone has {}.

    Outputs that are batched by row get an empty (padded) row for it; the others skip it. Those that a processor leaves
    out where an item is alone, or that say nothing without another one, are left out here too. Raises as
    `join_features`.
    """
    keys = _keys(rows)
    said = [key for key in keys if (family.batching[key].beside or key) in keys]
    merged = {key: _concatenated(family, key, rows, by_row=family.batching[key].by_row) for key in said}
    return {key: value for key, value in merged.items() if key not in family.derived or len(value) > 1}


def _keys(rows: Sequence[Features]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _concatenated(family: Family, key: str, rows: Sequence[Features], *, by_row: bool) -> NDArray[np.generic]:
    batching = family.batching[key]
    arrays = [row[key] for row in rows if key in row]
    if batching.offset is not None:
        arrays = _shifted(key, batching.offset, batching.offset_axes, rows)
    if by_row:
        empty = arrays[0][:, :0] if arrays[0].ndim > 1 else np.zeros_like(arrays[0])
        arrays = [row.get(key, empty) for row in rows]
    axis = 0 if by_row else batching.axis
    if batching.pad is not None:
        arrays = _padded(arrays, axis, batching.pad)
    shapes = {tuple(np.delete(array.shape, axis).tolist()) for array in arrays}
    types = {array.dtype for array in arrays}
    if len(shapes) > 1 or len(types) > 1:
        listed = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise ModelError(
            f"{key!r} of {family.name} cannot be batched along axis {axis}: the rows have {listed}",
            hint="set media.max_frames, so that all videos have as many frames, or train with one row a batch"
            if key == "pixel_values_videos"
            else "declare how it is padded in the family's row, or train with one row a batch",
        )
    if len(arrays) == 1:
        return arrays[0]
    as_it_lies = _one_piece(arrays) if axis == 0 else None
    return np.concatenate(arrays, axis=axis) if as_it_lies is None else as_it_lies


def _one_piece(arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.generic] | None:
    """Arrays that lie one behind the other in the memory of one larger array, as a view of it; None if they do not."""
    whole = arrays[0].base
    if not isinstance(whole, np.ndarray) or not whole.flags.c_contiguous or not whole.size:
        return None
    place = first = (_address(arrays[0]) - _address(whole)) // whole.strides[0]
    for array in arrays:
        same = array.base is whole and array.dtype == whole.dtype and array.shape[1:] == whole.shape[1:]
        if not same or not array.flags.c_contiguous or _address(array) != _address(whole) + place * whole.strides[0]:
            return None
        place += len(array)
    return whole[first:place]


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _shifted(key: str, target: str, axes: int, rows: Sequence[Features]) -> list[NDArray[np.generic]]:
    """Indices into ``target``, counted from the first row on; negative ones mean "none" and stay."""
    arrays: list[NDArray[np.generic]] = []
    before = 0
    for row in rows:
        if key in row:
            arrays.append(np.where(np.less(row[key], 0), row[key], np.add(row[key], before)))
            before += math.prod(row[target].shape[:axes])
    return arrays


def _padded(arrays: list[NDArray[np.generic]], axis: int, pad: float | tuple[float, ...]) -> list[NDArray[np.generic]]:
    """All arrays with the largest size along every axis but ``axis``, filled up at the end."""
    largest = np.max([array.shape for array in arrays], axis=0).tolist()
    padded = []
    for array in arrays:
        shape = [
            have if place == axis % array.ndim else want
            for place, (want, have) in enumerate(zip(largest, array.shape, strict=True))
        ]
        if shape == list(array.shape):
            padded.append(array)
            continue
        full = np.empty(shape, dtype=array.dtype)
        # (1, 0) for 4 -> 1, 0, 0, 0.
        full[...] = pad if isinstance(pad, float | int) else [*pad, *[pad[-1]] * (shape[-1] - len(pad))]
        full[tuple(slice(size) for size in array.shape)] = array
        padded.append(full)
    return padded
