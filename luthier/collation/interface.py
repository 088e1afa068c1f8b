"""The Python interface: samples from anywhere become one batch, with nothing else at hand.

batch = luthier.collate([luthier.encode(row, tokenizer) for row in rows])
logits = model(**batch.model_inputs).logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from luthier.collation.collator import collate_packs
from luthier.collation.media_inputs import MediaInputs
from luthier.config.schema import MediaConfig
from luthier.media import MediaProcessor, MediaSource
from luthier.packing.packer import plan_packs
from luthier.records import Batch, Pack, Sample, Segment


def collate(
    samples: Sequence[Sample | Segment],
    *,
    layout: Literal["packed", "padded"] = "packed",
    capacity: int | None = None,
    pad_token_id: int = 0,
    varlen: bool = False,
    pad_to_multiple_of: int = 1,
    media: MediaInputs | None = None,
) -> Batch:
    """One batch of these samples, B rows of T tokens; a sample's token tree becomes one segment for each leaf.

    ``packed``: all segments in one row, one after the other; with ``capacity`` in rows of at most so many tokens, by
    best fit. Segments are kept apart by positions that restart: no ``attention_mask``, ``use_cache=False``.
    ``varlen`` adds what FlashAttention's varlen kernels take (``cu_seq_lens_q`` …).
    ``padded``: one segment a row, right-padded under an ``attention_mask`` int64[B, T].

    ``pad_token_id`` may be any id that the model has: padding is neither attended to nor learned. T is rounded up to
    ``pad_to_multiple_of``. Segments are shortened nowhere.

    ``media`` (`luthier.media_inputs`) decodes the samples' images, videos and audio and adds what a multimodal model
    gets: features, token types, positions of several axes. Segments whose media cannot be had are in ``batch.lost``.
    ``batch.model_inputs`` have the names that the model has for them (``decoder_input_ids`` beside an encoder).

    Raises ``ValueError`` for no samples at all, for arguments that contradict each other, and for samples with media
    without ``media``; `UserError` where a segment is longer than ``capacity``.
    """
    segments = [segment for sample in samples for segment in _segments_of(sample) if len(segment)]
    if not segments:
        raise ValueError("there is no token to collate")
    if layout not in ("packed", "padded"):
        raise ValueError(f"layout is 'packed' or 'padded', not {layout!r}")
    packed = layout == "packed"
    if not packed and (varlen or capacity is not None):
        raise ValueError("varlen and capacity are for layout='packed'")
    if media is None and any(segment.media for segment in segments):
        raise ValueError("these samples have media: give media=luthier.media_inputs(processor, model.config)")
    if media is not None and packed and media.processor.family.decoder_names:
        raise ValueError(f"layout='padded' for {media.processor.family.name}: {media.processor.family.reason}")
    batch = collate_packs(
        _packs(segments, capacity) if packed else [Pack(segments=(segment,)) for segment in segments],
        packed=packed,
        pad_token_id=pad_token_id,
        varlen=varlen,
        pad_to_multiple_of=pad_to_multiple_of,
        media=media,
    )
    return batch if media is None else replace(batch, model_inputs=media.named(batch.model_inputs))


def media_inputs(model: Any, model_config: Any = None, **options: Any) -> MediaInputs:
    """What `collate` and `Loader` need for samples with media: a model's folder; or transformers' processor and the
    model's config. ``options`` are those of the section ``media`` of a run (``roots`` …).

    Raises `ModelError` for a folder or a processor that is none, pydantic's ``ValidationError`` for unknown options.
    """
    media = MediaConfig(**options)
    if isinstance(model, str | Path):
        return MediaInputs(MediaSource.of_folder(Path(model), media))
    processor = model
    if model_config is None:
        raise TypeError("a processor does not say how its model counts positions: give model.config too")
    described = model_config if isinstance(model_config, Mapping) else model_config.to_dict()
    made = MediaProcessor.of(processor, media, model_type=str(described.get("model_type", "")))
    return MediaInputs.of(made, media, described)


def _segments_of(sample: Sample | Segment) -> list[Segment]:
    return [sample] if isinstance(sample, Segment) else sample.segments()


def _packs(segments: list[Segment], capacity: int | None) -> list[Pack]:
    if capacity is None:
        return [Pack(segments=tuple(segments))]
    plan = plan_packs([len(segment) for segment in segments], capacity)
    return [Pack(segments=tuple(segments[i] for i in pack)) for pack in plan]
