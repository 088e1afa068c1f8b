"""Whether a run's batches have the pixels of media or what frozen towers made of them."""

from __future__ import annotations

from accelerate import PartialState
from transformers import PreTrainedModel

from luthier.collation import MediaInputs
from luthier.config.media import MediaCache
from luthier.config.schema import RunConfig
from luthier.errors import ModelError
from luthier.loader.plan import StreamPlan
from luthier.preparation.segments import SegmentIndex
from luthier.train.arguments import run_precision
from luthier.train.data import RunData
from luthier.train.events import Note
from luthier.train.hooks import Hooks
from luthier.train.streams import needed_segments
from luthier.train.tower_features import TowerWork, kept_features


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
    return kept_features(work, lambda text: hooks.tell(Note(text=text)))


def readable_media(media: MediaInputs | None, plain: PreTrainedModel) -> MediaInputs:
    """What a model reads beside text. Raises `ModelError` where it reads nothing else."""
    if media is None:
        raise ModelError(
            f"media.cache: encoder_features: {type(plain).__name__} has no processor, and so reads text alone",
            hint="remove media.cache, or name the folder of a multimodal model",
        )
    return media
