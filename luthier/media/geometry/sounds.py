"""How many tokens a sound takes: what feature extractors and encoders make of its length, from headers alone.

Every public function is the ``measure`` of a `Rule`: (settings, headers of the sounds of one context) -> the entries
that the processor's ``replace_audio_token`` reads; it raises `ValueError` for a sound of which no token is left. N
sounds. A *frame* is a column of the spectrogram, one for every ``hop_length`` samples. Headers are at the file's rate,
samples here at the extractor's, to which decoding brings them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from luthier.errors import ModelError
from luthier.media.families.family import Measured, Settings
from luthier.media.files.decoding import resampled_length
from luthier.records import AudioHeader
from luthier.writing import counted

# Voxtral's encoder halves the frames once, and its projector joins four; dots halves them three times.
FRAMES_A_TOKEN = 8


# ------------------------------------------------------------------------------ spectrograms of Whisper's extractor


def whole_windows(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Filled up to the extractor's full length, halved twice (Qwen2-Audio, Qwen2.5-Omni): ``num_audio_tokens`` [N]."""
    frames = _spectrogram_frames(settings, headers, padded_to=settings["n_samples"])
    return {"num_audio_tokens": _heard(headers, [_pooled_twice(count) for count in frames])}


def window_steps(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """As long as the longest of the context, 13 tokens for every 100 frames (Qwen3-Omni): ``num_audio_tokens`` [N]."""
    frames = _spectrogram_frames(settings, headers)
    window = settings.kwargs.get("n_window") or settings.processor.n_window
    return {"num_audio_tokens": _heard(headers, [_stepped(count, window) for count in frames])}


def padded_window_steps(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """The same where a short sound is filled up to ``min_length`` samples (Qwen3-ASR): ``num_audio_tokens`` [N]."""
    frames = _spectrogram_frames(settings, headers, at_least=settings["min_length"])
    return {"num_audio_tokens": _heard(headers, [_stepped(count, settings["n_window"]) for count in frames])}


def pooled_windows(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Cut into windows that are filled up, then pooled (Audio Flamingo 3, Music Flamingo): ``num_audio_tokens`` [N]."""
    frames = _frames_in_windows(settings, headers)
    return {"num_audio_tokens": _heard(headers, [_pooled_twice(count) for count in frames])}


def merged_windows(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Cut into windows, halved by a convolution, then four joined to one (GLM-ASR): ``num_audio_tokens`` [N]."""
    frames = _frames_in_windows(settings, headers)
    return {"num_audio_tokens": _heard(headers, [((count - 1) // 2 + 1) // 4 for count in frames])}


def whole_chunks(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Filled up to whole chunks of the encoder's length (Voxtral): ``num_audio_tokens`` [N]."""
    positions = settings["max_source_positions"]
    chunk = positions * settings["hop_length"]
    chunks = [-(-_samples(settings, header) // chunk) for header in headers]
    return {"num_audio_tokens": [count * positions // FRAMES_A_TOKEN for count in chunks]}


# ------------------------------------------------------------------------------------------------ other extractors


def fixed_length(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """A number of tokens that no length changes (Gemma 3n); the processor reads nothing."""
    return {}


def valid_frames(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Frames whose window lies within the sound (Gemma 4): ``input_features_mask`` [N] of bool[frames]."""
    limit = half_a_minute(settings)
    before = settings["frame_length"] // 2
    masks = []
    for header in headers:
        length = _samples(settings, header)
        samples = length if limit is None else min(length, limit)
        frames = max(0, (samples + before - settings["frame_length"] - 1) // settings["hop_length"] + 1)
        masks.append(np.ones(frames, dtype=bool))
    _heard(headers, [len(mask) for mask in masks])
    return {"input_features_mask": masks}


def waveform_frames(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Raw samples, so many to a token (Gemma 4 unified): ``input_features_mask`` [N] of bool[frames]."""
    counts = [-(-_samples(settings, header) // settings["audio_samples_per_token"]) for header in headers]
    return {"input_features_mask": [np.ones(count, dtype=bool) for count in counts]}


def waveform_blocks(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """The same by another name (Muse Spark): ``input_values_mask`` [N] of int64[samples]."""
    return {"input_values_mask": [np.ones(_samples(settings, header), dtype=np.int64) for header in headers]}


def long_chunks(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Chunks of ``chunk_length`` seconds, each of whole tokens of eight frames (dots): ``num_audio_tokens`` [N]."""
    chunk, token = settings["n_samples"], settings["hop_length"] * FRAMES_A_TOKEN
    counts = []
    for header in headers:
        whole, rest = divmod(_samples(settings, header), chunk)
        counts.append(whole * -(-chunk // token) + -(-rest // token))
    return {"num_audio_tokens": counts}


def compressed_frames(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Whole windows, then two poolings that round up (Phi-4 multimodal): ``audio_embed_sizes`` [N]."""
    sizes = []
    for header in headers:
        frames = (_samples(settings, header) - settings["win_length"]) // settings["hop_length"] + 1
        tokens = -(-frames * settings["audio_feat_stride"] // settings["audio_compression_rate"])
        sizes.append(-(-tokens // settings["audio_downsample_rate"]))
    return {"audio_embed_sizes": _heard(headers, sizes)}


def projected_blocks(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Blocks of ``projector_window_size`` pairs of frames (Granite Speech): ``audio_embed_sizes`` [N]."""
    window = settings["projector_window_size"]
    per_block = window // settings["projector_downsample_rate"]
    hop = settings["melspec_kwargs"]["hop_length"]
    pairs = [(_samples(settings, header) // hop + 1) // 2 for header in headers]
    return {"audio_embed_sizes": [math.ceil(count / window) * per_block for count in pairs]}


def dmel_frames(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """One token for every frame, the last one filled up (Inkling): ``audio_input_ids_mask`` [N] of bool[frames]."""
    counts = [-(-_samples(settings, header) // settings["hop_length"]) for header in headers]
    return {"audio_input_ids_mask": [np.ones(count, dtype=bool) for count in counts]}


def subsampled_frames(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Frames halved by convolutions, at least one token (Nemotron Omni): ``num_tokens`` [N]."""
    processor = settings.processor
    counts = []
    for header in headers:
        length = 1 + _samples(settings, header) // processor.audio_hop_length
        for _ in range(int(math.log2(processor.audio_subsampling_factor))):
            length = (length - 1) // 2 + 1
        counts.append(max(1, length))
    return {"num_tokens": counts}


def averaged_frames(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """Frames halved by a convolution, groups of which are averaged (MiniCPM-o): ``num_samples`` and
    ``num_audio_tokens`` [N]. A group is ``pool_step`` of 4.5's processor; that of 2.6 does not name its two.
    """
    group = vars(settings.processor).get("pool_step", 2)
    lengths = [_samples(settings, header) for header in headers]
    frames = [-(-length // settings["hop_length"]) for length in lengths]
    tokens = [((count - 1) // 2 + 1) // group for count in frames]
    return {"num_samples": lengths, "num_audio_tokens": _heard(headers, tokens)}


# ---------------------------------------------------------------- the longest sound that is heard, by `Rule.longest`


def one_window(settings: Settings) -> int | None:
    """One window of the extractor, which cuts there unless it is told not to (Qwen2-Audio, Qwen2.5-Omni)."""
    return int(settings["n_samples"]) if settings.kwargs.get("truncation", True) else None


def one_window_if_asked(settings: Settings) -> int | None:
    """The same for extractors that are not told to cut (Qwen3-Omni, Qwen3-ASR)."""
    return int(settings["n_samples"]) if settings.kwargs.get("truncation", False) else None


def all_windows(settings: Settings) -> int:
    """As many whole windows as fit into ``max_audio_len`` seconds (Audio Flamingo 3, Music Flamingo, GLM-ASR)."""
    seconds = settings["chunk_length"]
    return int(settings.processor.max_audio_len // seconds) * int(settings["sampling_rate"] * seconds)


def half_a_minute(settings: Settings) -> int | None:
    """30 s, unless the call says something else (Gemma 3n, Gemma 4)."""
    return (settings.kwargs.get("max_length") or 480_000) if settings.kwargs.get("truncation", True) else None


# ------------------------------------------------------------------------------------------------------------ parts


def _heard(headers: Sequence[AudioHeader], tokens: list[int]) -> list[int]:
    """The counts; raises `ValueError` for a sound of which nothing is left."""
    for header, count in zip(headers, tokens, strict=True):
        if count < 1:
            raise ValueError(f"audio of {header.seconds:.3f} s is too short for this model: no token is left of it")
    return tokens


def _samples(settings: Settings, header: AudioHeader) -> int:
    wanted, own = settings["sampling_rate"], settings.part.sampling_rate
    if wanted != own:
        raise ModelError(
            f"media.sampling_rate is {wanted}, and this model takes {counted(own, 'sample')} a second",
            hint="leave it out",
        )
    return resampled_length(header.num_samples, header.sampling_rate, own)


def _spectrogram_frames(
    settings: Settings, headers: Sequence[AudioHeader], *, padded_to: int | None = None, at_least: int = 0
) -> list[int]:
    """Frames that are not padding. The extractor drops the last one of a batch whose length is no multiple of the hop.

    So the longest sound rounds down and a shorter one up: 1610 and 1530 samples, 160 a frame -> 10 and 10 frames.
    """
    hop = settings["hop_length"]
    lengths = [max(at_least, _samples(settings, header)) for header in headers]
    limit = one_window(settings) if padded_to is not None else one_window_if_asked(settings)
    lengths = [length if limit is None else min(length, limit) for length in lengths]
    multiple = settings.kwargs.get("pad_to_multiple_of") or 1
    padded = -(-max([*lengths, padded_to or 0], default=0) // multiple) * multiple
    return [min(-(-length // hop), padded // hop) for length in lengths]


def _frames_in_windows(settings: Settings, headers: Sequence[AudioHeader]) -> Iterable[int]:
    """Frames of all windows of each sound; sounds longer than ``max_audio_len`` seconds are cut there."""
    seconds = settings["chunk_length"]
    window, hop = int(settings["sampling_rate"] * seconds), settings["hop_length"]
    longest = all_windows(settings)
    for header in headers:
        samples = min(_samples(settings, header), longest)
        full, rest = divmod(samples, window)
        yield full * (window // hop) + -(-rest // hop)


def _pooled_twice(frames: int) -> int:
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _stepped(frames: int, window: int) -> int:
    """Chunks of two windows, each halved three times: 13 tokens for the 100 frames of a full chunk."""
    chunks, rest = divmod(frames, window * 2)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return chunks * 13 + rest
