"""Encoders of models that see or hear, for rows that name files of a test's folder."""

from __future__ import annotations

from pathlib import Path

from luthier.config.choices import RowKind
from luthier.config.inputs import MediaConfig, ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder


def encoder_of(folder: Path, media_folder: Path, *, kind: RowKind = RowKind.ANSWER, **options: object) -> Encoder:
    """The encoder of the model in ``folder``; ``options`` are those of the section ``template``."""
    return Encoder(
        ModelConfig(name_or_path=str(folder)),
        TemplateConfig.model_validate(options),
        kind=kind,
        media=MediaConfig.model_validate({"roots": [str(media_folder)]}),
    )
