"""Processors without a row in the table: counted by doing, and batched only where that is plain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from luthier.errors import ModelError
from luthier.media import token_inputs
from luthier.media.families import CAT, Batching, Family, Modules, Packing, Rule, Settings
from luthier.records import ImageHeader

REASON = "it has no row in the table of families, so nothing is known of its attention"


class Everything(Mapping[str, Batching]):
    """Every output is a stack of items along its first axis, which holds for most processors; sizes must agree."""

    def __getitem__(self, name: str) -> Batching:
        return CAT

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)


def unknown_family(processor: Any) -> Family:
    """A family for a class that nobody has described: pictures only, rows padded.

    Raises `ModelError` if the class has no rule of its own for the string of a picture, which is then unknown.
    """
    from transformers import ProcessorMixin

    name = type(processor).__name__
    replace = getattr(type(processor), "replace_image_token", None)
    if replace is None or replace is ProcessorMixin.replace_image_token:
        raise ModelError(
            f"{name} has no row in the table of families, nor a replace_image_token that says what it writes",
            hint="add a row for it (docs/adding_a_family.md), or train on the rows without media",
        )
    kinds = {"mm_token_type_ids": token_inputs.kinds} if processor.return_mm_token_type_ids else {}
    return Family(
        name=f"unknown ({name})",
        processors=(name,),
        image=Rule(measure=measure_blank, replace=read_string),
        batching=Everything(),
        token_inputs=kinds,
        packing=Packing.PADDED,
        reason=REASON,
        modules=Modules(tower=()),
    )


def measure_blank(settings: Settings, headers: Sequence[ImageHeader]) -> dict[str, Any]:
    """What the processor itself writes for black pictures of these sizes: exact, and as slow as it is."""
    from PIL import Image

    blank = [Image.new("RGB", (item.width, item.height)) for item in headers]
    _, strings = settings.processor._process_images(blank, **{**settings.kwargs, "return_tensors": "pt"})
    return {"strings": strings}


def read_string(settings: Settings, measured: dict[str, Any], index: int) -> str:
    """The string of one of these pictures."""
    return str(measured["strings"][index])
