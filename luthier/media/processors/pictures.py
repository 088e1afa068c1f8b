"""A shorter way through a processor for samples with pictures alone: its picture half, without its text half.

The plain ``__call__`` of transformers is the two halves side by side; the text half (merging options, checking them,
replacing placeholders, tokenizing) takes longer than a small picture and makes nothing that is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from luthier.errors import RowError
from luthier.media.families.family import Family, Rule, Settings
from luthier.media.files.decoding import DecodedImage
from luthier.media.processors.calling import AreaLimits
from luthier.media.processors.outputs import refused_rows
from luthier.records import MediaHeader

if TYPE_CHECKING:
    import PIL.Image

    from luthier.media.files.decoding import Decoded


def has_plain_call(processor: Any, family: Family) -> bool:
    """Whether the class leaves ``__call__`` as it is, and its strings are those of single items."""
    from transformers import ProcessorMixin

    rule = family.image
    alone = family.together is None and family.number is None and family.call is None
    own_rule = rule is not None and rule.replace is None and rule.seam is None
    return type(processor).__call__ is ProcessorMixin.__call__ and alone and own_rule


def pictures_of(items: Sequence[tuple[MediaHeader, Decoded]], limits: AreaLimits | None) -> list[PIL.Image.Image]:
    """The pictures among the items, within the limits."""
    pictures = [item.pixels for _, item in items if isinstance(item, DecodedImage)]
    return pictures if limits is None else [limits.picture(picture) for picture in pictures]


def quick_outputs(
    settings: Settings | None,
    rule: Rule | None,
    samples: Sequence[Sequence[tuple[MediaHeader, Decoded]]],
    limits: AreaLimits | None,
) -> Sequence[dict[str, Any] | None]:
    """What `Rule.quick` makes of each sample; None for each where it does not apply, or one of them breaks it."""
    unknown = [None] * len(samples)
    pictures = [pictures_of(items, limits) for items in samples]
    if settings is None or rule is None or rule.quick is None or list(map(len, pictures)) != list(map(len, samples)):
        return unknown
    try:
        with refused_rows():
            return rule.quick(settings, pictures) or unknown
    except RowError:  # whose fault it is will be found one by one
        return unknown


def process_pictures(settings: Settings, pictures: Sequence[PIL.Image.Image]) -> tuple[dict[str, Any], list[str]]:
    """The outputs for the pictures of one text, and the string that stands for each of them."""
    processor = settings.processor
    images, *_ = processor.prepare_inputs_layout(images=[list(pictures)], text=None)
    outputs, strings = processor._process_images(images, **{**settings.kwargs, "return_tensors": "pt"})
    unused = processor.unused_input_names
    return {key: value for key, value in outputs.items() if key not in unused}, strings


def written_strings(settings: Settings, outputs: dict[str, Any], num_pictures: int) -> list[str]:
    """The string that stands for each of the pictures, by outputs that were made in another way."""
    replace = settings.processor.replace_image_token
    return [replace(outputs, index, **settings.kwargs) for index in range(num_pictures)]
