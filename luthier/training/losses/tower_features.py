"""What frozen towers make of the run's images and videos, computed once and kept beside the samples.

<store>/tower_features/<digest>/    one file an item (`media.FeatureFiles`)

The digest covers the towers' weights, the model's settings, the processor and the precision; an item's name covers the
version of its file. So what is found is what would be computed, and a pass that was interrupted goes on with the rest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from accelerate import PartialState
from numpy.typing import NDArray
from transformers import PreTrainedModel

from luthier.collation import MediaInputs
from luthier.collation.collator import collate_packs
from luthier.config.choices import ModelPart, Precision
from luthier.config.inputs import MediaCache
from luthier.config.schema import RunConfig
from luthier.errors import ModelError, RowError, StoreError
from luthier.loader.plan import StreamPlan
from luthier.media import FeatureFiles, ItemFeatures, item_key
from luthier.models import evaluating, find_parts, output_layer
from luthier.models.encoders import Encoders, blank_features, with_encoder_outputs
from luthier.models.model import run_precision
from luthier.preparation.segments import SegmentIndex
from luthier.records import Media, MediaHeader, MediaItem, Pack, Segment
from luthier.store.disk import Disk
from luthier.training.callbacks import Hooks
from luthier.training.data import RunData
from luthier.training.losses.references import SAID_OF_FILES
from luthier.training.streams import needed_segments
from luthier.writing import counted

FOLDER = "tower_features"
# Mean difference over mean size of hidden states, with features and with pixels: one picture is encoded alone, not with
# others, and other shapes round otherwise.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
AUTOCAST_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TowerWork:
    """What is to be computed, with what.

    plain   the model without its adapter's wrapper, on its device
    media   what decodes, and runs the processor
    sides   training and held-out segments, each with the numbers of those that the run needs
    """

    plain: PreTrainedModel
    media: MediaInputs
    sides: Sequence[tuple[SegmentIndex, NDArray[np.int64]]]
    precision: Precision
    device: torch.device


def kept_features(work: TowerWork, tell: Callable[[str], None]) -> MediaInputs:
    """Media inputs that read features; those that are not there are computed now, by all ranks together.

    Raises `ModelError` where the model takes no computed features, where they depend on what is trained, or where it
    gives other hidden states with them than with pixels; `StoreError` if the disk has no room for them.
    """
    encoders = Encoders.of(
        work.plain, work.media.processor.family, device=work.device, autocast=AUTOCAST_DTYPES.get(work.precision)
    )
    with evaluating(work.plain):
        files = FeatureFiles(work.sides[0][0].prepared.store.folder / FOLDER / _digest(work))
        PartialState().wait_for_everyone()
        missing = _missing(work, files.keys())
        _check_frozen(work, encoders, missing.kinds)
        if missing.items:
            _compute(work, encoders, missing, files, tell)
        PartialState().wait_for_everyone()
    return work.media.reading(files)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Missing:
    """Items without features, by key.

    numbers  of each item among all that the run needs, in the order of their keys: every rank gives it the same
    tried    segments that hold some of them, those of several items first
    kinds    ``image``, ``video``, ``audio``: those of all items that the run needs
    """

    items: Mapping[str, MediaItem]
    numbers: Mapping[str, int]
    tried: Sequence[Segment]
    kinds: Set[str]


class _InMemory(dict[str, ItemFeatures]):
    """Features before they are written."""

    def read(self, media: Media, header: MediaHeader, /) -> ItemFeatures | None:
        """See `KeptFeatures`."""
        return self.get(item_key(media, header))


_SEGMENTS_TRIED, _ITEMS_TRIED = 4, 8  # several, as files may have gone; few items, as all are encoded twice


def _missing(work: TowerWork, there: set[str]) -> _Missing:
    items: dict[str, MediaItem] = {}
    needed_keys: set[str] = set()
    kinds: set[str] = set()
    tried: list[Segment] = []
    for index, needed in work.sides:
        has_media = index.prepared.store.have_media(index.sample_ids[needed])
        for number in needed[has_media].tolist():
            segment = index[number]
            of_segment = {item_key(item.media, item.header): item for item in segment.media}
            needed_keys |= of_segment.keys()
            kinds |= {type(item.media).__name__.lower() for item in segment.media}
            new = {key: item for key, item in of_segment.items() if key not in there}
            if new:
                tried = sorted([*tried, segment], key=_rank)[:_SEGMENTS_TRIED]
            items |= new
    numbers = {key: number for number, key in enumerate(sorted(needed_keys)) if key in items}
    return _Missing(items=items, numbers=numbers, tried=tried, kinds=kinds)


def _rank(segment: Segment) -> tuple[bool, int]:
    """What tells most at little cost comes first: 8, 7 … 1 items, then 9, 10 …"""
    too_many = len(segment.media) > _ITEMS_TRIED
    return too_many, len(segment.media) if too_many else -len(segment.media)


def _compute(
    work: TowerWork, encoders: Encoders, missing: _Missing, files: FeatureFiles, tell: Callable[[str], None]
) -> None:
    """This rank's share: by number, so that ranks agree whatever other runs have written meanwhile."""
    known = _proven(work, encoders, missing.tried)
    tokens = sum(item.length for item in missing.items.values())
    sizes = [
        (len(features.to_bytes()), missing.items[key].length) for key, features in known.items() if key in missing.items
    ]
    if sizes:
        size = round(sum(size for size, _ in sizes) / sum(length for _, length in sizes) * tokens)
        tell(
            f"media: features of {counted(len(missing.items), 'item')} ({counted(tokens, 'token')}) "
            f"are computed once and kept: about "
            f"{size / 2**20:,.1f} MiB in {files.folder}"
        )
        _check_room(files.folder, size)
    rank, ranks = PartialState().process_index, PartialState().num_processes
    disk = Disk()
    lost = 0
    for key, item in missing.items.items():
        if missing.numbers[key] % ranks != rank:
            continue
        try:
            features = known.get(key) or encoders.encode(work.media.features([item]))
        except RowError:
            lost += 1  # its row is told of when it is read
            continue
        path = files.path(key)
        disk.make_folder(path.parent)
        disk.publish(path, [features.to_bytes()])
    if lost:
        tell(f"media: {counted(lost, 'item')} could not be read, and have no features")


def _check_room(folder: Path, size: int) -> None:
    there = next(parent for parent in folder.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if size > free:
        raise StoreError(
            f"{folder}: the features take about {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            hint="free space there, choose another folder with data.store, or remove media.cache",
        )


def _check_frozen(work: TowerWork, encoders: Encoders, kinds: Set[str]) -> None:
    trained = {name: parameter for name, parameter in work.plain.named_parameters() if parameter.requires_grad}
    for kind, features in blank_features(work.media.processor).items():
        if kind in kinds and (names := encoders.depends_on(features, trained)):
            raise ModelError(
                f"media.cache: encoder_features: features depend on parameters that are trained: {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                hint="set adapter.train_parts: [language_model] (with adapter.type: lora, if these are parameters of "
                "its own), or remove media.cache",
            )


def _proven(work: TowerWork, encoders: Encoders, tried: Sequence[Segment]) -> _InMemory:
    """The features of the first of these segments whose media can be had, which the model takes for its pixels."""
    for segment in tried:
        try:
            known = _InMemory(
                (item_key(item.media, item.header), encoders.encode(work.media.features([item])))
                for item in segment.media
            )
            work.media.features(segment.media)
        except RowError:
            continue
        pixels = _hidden(work, encoders, segment, work.media)
        try:
            features = _hidden(work, encoders, segment, work.media.reading(known))
        except (ValueError, RuntimeError, AttributeError) as error:  # about numbers of tokens, or fields it has not
            raise _not_alike(work, segment, str(error).strip()) from error
        moved = float((features - pixels).abs().mean() / pixels.abs().mean().clamp_min(1e-12))
        allowed = _TOLERANCE[encoders.autocast or work.plain.dtype]
        if not moved <= allowed:
            raise _not_alike(work, segment, f"they differ by {moved:.1e} of their size, {allowed:.0e} is rounding")
        return known
    return _InMemory()


def _not_alike(work: TowerWork, segment: Segment, why: str) -> ModelError:
    return ModelError(
        f"media.cache: encoder_features: {type(work.plain).__name__} does not make the same of the features of "
        f"{counted(len(segment.media), 'single item')} as of their pixels ({segment.address}): {why}",
        hint="remove media.cache: the towers then run in each step",
    )


def _hidden(work: TowerWork, encoders: Encoders, segment: Segment, media: MediaInputs) -> torch.Tensor:
    """float32[1, T, D]: of a row of this one segment."""
    batch = collate_packs([Pack(segments=(segment,))], packed=False, pad_token_id=0, media=media)
    inputs = {name: value.to(work.device) for name, value in batch.model_inputs.items()}
    with (
        torch.no_grad(),
        torch.autocast(work.device.type, dtype=encoders.autocast, enabled=encoders.autocast is not None),
    ):
        output = encoders.model(**with_encoder_outputs(inputs), use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden.float()


def _digest(work: TowerWork) -> str:
    """Hex digest of all that decides features, but for the items."""
    source = work.media.source
    settings = {key: value for key, value in work.plain.config.to_dict().items() if key not in SAID_OF_FILES}
    how = {
        "model": settings,
        "processor": [work.media.processor.fingerprint, "" if source is None else source.fingerprint],
        "precision": work.precision.value,
        "torch": torch.__version__,
    }
    digest = hashlib.sha256(json.dumps(how, sort_keys=True, default=str).encode())
    for name, tensor in _tower_weights(work.plain):
        raw = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}".encode())
        digest.update(xxhash.xxh3_128_digest(raw.data))
    return digest.hexdigest()[:32]


def _tower_weights(plain: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All that is not of the language model, or that nobody can tell whose it is; what is trained takes no part."""
    parts = find_parts(plain)
    decoder: object = plain.get_decoder()
    embeddings: Any = [plain.get_input_embeddings(), output_layer(plain)]
    of_words = {id(p) for module in (decoder, *embeddings) if module is not None for p in module.parameters()}
    for name, tensor in sorted([*plain.named_parameters(), *plain.named_buffers()]):
        stands_outside = parts.of(name) is not ModelPart.LANGUAGE_MODEL
        if not tensor.requires_grad and (stands_outside or id(tensor) not in of_words):
            yield name, tensor


# --------------------------------------------------------------------------------------------------------------------
# Whether a run's batches have the pixels of media or what frozen towers made of them.


def choose_media(
    config: RunConfig,
    data: RunData,
    plain: PreTrainedModel,
    media: MediaInputs | None,
    schedule: StreamPlan,
    hooks: Hooks,
) -> MediaInputs | None:
    """What fills the run's batches, with ``media.cache: encoder_features`` from files that are computed now.

    ``plain`` is the model without its adapter's wrapper. Raises as `kept_features`, and `ModelError` for rows that are
    not prepared, or a model without a processor.
    """
    match config.media.cache:
        case MediaCache.NONE:
            return media
        case MediaCache.ENCODER_FEATURES:
            pass
        case _:
            raise AssertionError(config.media.cache)
    media = readable_media(media, plain)
    if not isinstance(data.train, SegmentIndex):
        raise ModelError(
            "media.cache: encoder_features are kept with prepared data, and these rows are in memory, or on their way",
            hint="prepare the rows before training, or remove media.cache",
        )
    sides = [(data.train, needed_segments(schedule, data, data.train))]
    if isinstance(data.eval, SegmentIndex):
        sides.append((data.eval, needed_segments(schedule, data, data.eval)))
    device = PartialState().device
    plain.to(device)
    work = TowerWork(plain=plain, media=media, sides=sides, precision=run_precision(config), device=device)
    return kept_features(work, hooks.note)


def readable_media(media: MediaInputs | None, plain: PreTrainedModel) -> MediaInputs:
    """What a model reads beside text. Raises `ModelError` where it reads nothing else."""
    if media is None:
        raise ModelError(
            f"media.cache: encoder_features: {type(plain).__name__} has no processor, and so reads text alone",
            hint="remove media.cache, or name the folder of a multimodal model",
        )
    return media
