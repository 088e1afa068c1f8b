"""Image processors that come with a model's files and were written for transformers 4: version 5 loads and calls them.

A name that their file imports and version 5 has no more is added; nothing that it has is changed. Of their class two
things are put as version 5 wants them: which options may be left out, and what the way of resizing is called.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from luthier.media.families.family import Processor


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
