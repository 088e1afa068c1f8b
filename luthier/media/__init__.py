"""Media: references opened, headers probed, items decoded; and how each family of models sees them."""

from __future__ import annotations

from luthier.media.families.family import PREFIX_TYPES, Attention, Family, MediaKind
from luthier.media.families.table import decoder_of, opens_prompts
from luthier.media.files.access import MediaAccess
from luthier.media.files.decoding import Decoded, decode
from luthier.media.files.probing import probe
from luthier.media.geometry.videos import sampled_frames
from luthier.media.processors.calling import join_features, merge_features
from luthier.media.processors.media_source import MediaSource, decode_for, own_template, split_long_sounds
from luthier.media.processors.processor import PROCESSOR_FILES, MediaProcessor

__all__ = [
    "PREFIX_TYPES",
    "PROCESSOR_FILES",
    "Attention",
    "Decoded",
    "Family",
    "MediaAccess",
    "MediaKind",
    "MediaProcessor",
    "MediaSource",
    "decode",
    "decode_for",
    "decoder_of",
    "join_features",
    "merge_features",
    "opens_prompts",
    "own_template",
    "probe",
    "sampled_frames",
    "split_long_sounds",
]
