"""Media: references opened, headers probed, items decoded; and how each family of models sees them.

Read in this order: signatures, remote, access, image_headers, waves, containers, limits, probing, resampling, decoding,
families, resizing, tiling, sampling, geometry, geometry_tiles, geometry_pages, geometry_video, geometry_video_slices,
geometry_audio, rules_video, rules_audio, token_inputs, expansion, interleaving, fast_pixels, quick_pictures, rows_grid,
rows_tiles, rows_fixed, rows_video, rows_omni, odd_calls, rows_audio, rows_pages, rows_senses, unknown, rows_remote,
refusals, table, family_table, area_limits, call_options, calling, outputs, pictures_alone, sounds_together,
own_template, processor_parts, processor, taking, batching, source, feature_files.
"""

from __future__ import annotations

from luthier.media.access import MediaAccess
from luthier.media.batching import join_features, merge_features
from luthier.media.decoding import Decoded, decode
from luthier.media.families import PREFIX_TYPES, Attention, Family, MediaKind
from luthier.media.own_template import own_template
from luthier.media.probing import probe
from luthier.media.processor import PROCESSOR_FILES, MediaProcessor
from luthier.media.sampling import sampled_frames
from luthier.media.source import MediaSource
from luthier.media.table import decoder_of, opens_prompts
from luthier.media.taking import decode_for

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
]
