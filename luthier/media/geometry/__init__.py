"""How many tokens a media item takes: pure functions of sizes and durations, as the processors compute them.

Here: how pictures are cut into tiles, as grids of (rows, columns), from sizes in pixels alone; and sounds. Each
function is the rule of a group of processors and follows it to the order in which candidates are tried, since ties are
common (a square picture fits 1x1, 2x2 and 3x3 alike). `pictures` has the sizes of pictures that are not cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from luthier.errors import ModelError
from luthier.media.families import Measured, Settings
from luthier.media.files.decoding import resampled_length
from luthier.records import AudioHeader
from luthier.writing import counted

TileGrid = tuple[int, int]  # rows, columns

# Idefics3 and SmolVLM never make a side longer than this.
LONGEST_SIDE = 4096


@lru_cache(maxsize=64)
def grids_of(min_tiles: int, max_tiles: int) -> tuple[TileGrid, ...]:
    """All (rows, columns) with a number of tiles in the range: few tiles first, then few columns.

    1 to 3 -> (1, 1), (2, 1), (1, 2), (3, 1), (1, 3)
    """
    pairs = [(rows, columns) for columns in range(1, max_tiles + 1) for rows in range(1, max_tiles + 1)]
    return tuple(sorted((pair for pair in pairs if min_tiles <= math.prod(pair) <= max_tiles), key=math.prod))


def nearest_shape(height: int, width: int, *, tile_area: float, candidates: Sequence[TileGrid]) -> TileGrid:
    """The grid whose shape is nearest to the picture's; of equal ones a later one if the picture fills half of it.

    (GOT-OCR2, InternVL, Aya Vision, Ovis2, Phi-4 multimodal, LFM2-VL, DeepSeek-OCR2)
    """
    shape, area = width / height, width * height
    best, least = (1, 1), math.inf
    for rows, columns in candidates:
        difference = abs(shape - columns / rows)
        if difference < least:
            best, least = (rows, columns), difference
        elif difference == least and area > 0.5 * tile_area * rows * columns:
            best = (rows, columns)
    return best


@lru_cache(maxsize=64)
def hashed_grids(min_tiles: int, max_tiles: int) -> tuple[TileGrid, ...]:
    """The same grids in the order of processors that sort a *set* of (columns, rows) by the number of tiles alone.

    The order of equal ones is then that of CPython's hash table, which is why the set is built as they build it.
    """
    pairs = {
        (columns, rows)
        for most in range(min_tiles, max_tiles + 1)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if min_tiles <= columns * rows <= max_tiles
    }
    return tuple((rows, columns) for columns, rows in sorted(pairs, key=math.prod))


def least_upscaling(height: int, width: int, *, tile: int, max_tiles: int) -> TileGrid:
    """The grid that the picture fits with the least upscaling, else the least downscaling (Cohere2 Vision)."""
    candidates = grids_of(1, max_tiles)
    best_up, best_down = (math.inf, candidates[0]), (-math.inf, candidates[0])
    for rows, columns in candidates:
        scale = min(columns * tile / width, rows * tile / height)
        if scale >= 1 and scale < best_up[0]:
            best_up = (scale, (rows, columns))
        if scale > best_down[0]:
            best_down = (scale, (rows, columns))
    return best_up[1] if best_up[0] < math.inf else best_down[1]


@lru_cache(maxsize=64)
def _tilings(max_tiles: int) -> tuple[TileGrid, ...]:
    return tuple(sorted(grids_of(1, max_tiles), key=lambda grid: (math.prod(grid), grid[0])))


def least_upscaling_single(height: int, width: int, *, tile: int, max_tiles: int) -> TileGrid:
    """As `least_upscaling`, in single precision and with ties broken on rows (Molmo2)."""
    tilings = _tilings(max_tiles)
    sizes = np.asarray(tilings, dtype=np.float32) * np.float32(tile)
    with np.errstate(divide="ignore"):  # a picture that is all margin fits into anything
        scales = (sizes / np.asarray([height, width], dtype=np.float32)).min(axis=1)
    if (scales < 1).all():
        return tilings[int(scales.argmax())]
    return tilings[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]


def covering(height: int, width: int, *, tile: int, max_tiles: int) -> TileGrid:
    """The fewest tiles that show more than nine tenths of the image's area undistorted (Ovis2).

    The processor makes its candidates as (columns, rows) and then reads the first number as rows when it cuts the
    picture, and as columns when it resizes; so does this.
    """
    scored = []
    for second, first in grids_of(1, max_tiles):
        shown = _shown_area(height, width, first, second, tile) / (width * height)
        scored.append((first, second, shown))
    enough = [grid for grid in scored if grid[2] > 0.9]
    if enough:
        columns, rows, _ = min(enough, key=lambda grid: (grid[0] * grid[1], -grid[2]))
    else:
        columns, rows, _ = min(scored, key=lambda grid: (-grid[2], grid[0] * grid[1]))
    return rows, columns


def _shown_area(height: int, width: int, rows: int, columns: int, tile: int) -> float:
    row_height, column_width = height // rows, width // columns
    total = 0.0
    for row in range(rows):
        for column in range(columns):
            tall = height - row * row_height if row == rows - 1 else row_height
            wide = width - column * column_width if column == columns - 1 else column_width
            long: float = max(wide, tall)
            short: float = min(wide, tall)
            if long > tile:
                short, long = short / long * tile, tile
            total += long * short
    return total


@lru_cache(maxsize=64)
def canvases(max_tiles: int, tile: int) -> tuple[TileGrid, ...]:
    """Llama 4's canvases in pixels, in its order: by shape as it first comes up, most tiles first."""
    by_shape: dict[float, list[TileGrid]] = {}
    for tiles in range(max_tiles, 0, -1):
        for rows in (rows for rows in range(1, tiles + 1) if tiles % rows == 0):
            by_shape.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
    return tuple((rows * tile, columns * tile) for group in by_shape.values() for rows, columns in group)


def best_canvas(height: int, width: int, *, tile: int, max_tiles: int, largest: bool) -> TileGrid:
    """The canvas with the least upscaling (or ``largest``), else the least downscaling; of equal ones the smallest.

    Scales are compared in single precision, as Llama 4's processor does.
    """
    sizes = np.asarray(canvases(max_tiles, tile), dtype=np.float32)
    scales = np.minimum(sizes[:, 0] / np.float32(height), sizes[:, 1] / np.float32(width))
    upscaling = scales[scales >= 1]
    candidates = upscaling if len(upscaling) else scales
    chosen = candidates.min() if len(upscaling) and not largest else candidates.max()
    fitting = sizes[scales == chosen]
    canvas = fitting[int((fitting[:, 0] * fitting[:, 1]).argmin())]
    return int(canvas[0]) // tile, int(canvas[1]) // tile


def fullest_canvas(height: int, width: int, *, tile: int, max_tiles: int) -> TileGrid:
    """The canvas that holds the whole picture and shows it largest, else the largest of its shape (Perception LM)."""
    grids = [(rows, columns) for columns, rows in canvases(max_tiles, 1)]
    holding = [grid for grid in grids if grid[0] * tile >= height and grid[1] * tile >= width]
    if holding:
        # of canvases that show it equally large the last one is taken
        return max(enumerate(holding), key=lambda one: (_shown_side(height, width, one[1], tile), one[0]))[1]
    shape = width / height
    shapes = [columns / rows for rows, columns in grids]
    if shape >= 1:
        nearest = min((one for one in shapes if one <= shape), key=lambda one: abs(one - shape))
    else:
        nearest = min((one for one in shapes if one > shape), key=lambda one: abs(1 / one - 1 / shape))
    return max((grid for grid in grids if grid[1] / grid[0] == nearest), key=math.prod)


def _shown_side(height: int, width: int, canvas: TileGrid, tile: int) -> int:
    """The shorter side of the picture on a canvas, in pixels."""
    rows, columns = canvas
    scale, shape = min(columns * tile / width, rows * tile / height), width / height
    return math.floor(scale * width / shape) if shape > 1 else math.floor(scale * height * shape)


def best_resolution(height: int, width: int, resolutions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Of the resolutions (height, width) the one that keeps the most pixels and wastes the fewest (LLaVA-NeXT)."""
    best, most, least_waste = (0, 0), 0, math.inf
    for target_height, target_width in resolutions:
        scale = min(target_width / width, target_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = target_width * target_height - kept
        if kept > most or (kept == most and waste < least_waste):
            best, most, least_waste = (target_height, target_width), kept, waste
    return best


def split_rows(height: int, width: int, *, longest: int, tile: int) -> TileGrid:
    """Tiles of the picture with its longest side at ``longest``; (0, 0) if it is one tile (Idefics3, SmolVLM)."""
    height, width = fit_longest(height, width, longest)
    shape = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / shape) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * shape) / tile) * tile
    # both are resized once more, as a size in (height, width) and not as a longest side
    return (height // tile, width // tile) if height > tile or width > tile else (0, 0)


def fit_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longest side at ``longest``, the other even, none over `LONGEST_SIDE` (Idefics3)."""
    shape = width / height
    if width >= height:
        width, height = longest, int(longest / shape)
        height += height % 2
    else:
        height, width = longest, int(longest * shape)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    shape = width / height
    if width >= height and width > LONGEST_SIDE:
        width, height = LONGEST_SIDE, int(LONGEST_SIDE / shape)
    elif height > width and height > LONGEST_SIDE:
        height, width = LONGEST_SIDE, int(LONGEST_SIDE * shape)
    return max(height, 1), max(width, 1)


def pan_and_scan(height: int, width: int, *, min_crop: int, max_crops: int, min_ratio: float) -> int:
    """How many crops an elongated picture gets besides itself; 0 for none (Gemma 3)."""
    long, short = max(height, width), min(height, width)
    if long / short < min_ratio:
        return 0
    crops = min(math.floor(long / min_crop), math.floor(long / short + 0.5))  # halves are rounded up
    crops = min(max_crops, max(2, crops))
    return 0 if min(math.ceil(long / crops), short) < min_crop else crops


def slices(height: int, width: int, *, max_slices: int, resolution: int) -> TileGrid | None:
    """MiniCPM-V's slices: the grid of about as many squares of ``resolution`` as the picture has; None if it is one."""
    wanted = min(math.ceil(width * height / (resolution * resolution)), max_slices)
    if wanted <= 1:
        return None
    shape = math.log(width / height)
    best, least = (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > max_slices:
            continue
        for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
            columns = count // rows
            error = abs(shape - math.log(columns / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, columns), error
    return best


# ----------------------------------------------------------------------------------------------------------------------
# How many tokens a sound takes: what feature extractors and encoders make of its length, from headers alone.
#
# Every public function is the ``measure`` of a `Rule`: (settings, headers of the sounds of one context) -> the
# entries that the processor's ``replace_audio_token`` reads; it raises `ValueError` for a sound of which no token is
# left. N sounds. A *frame* is a column of the spectrogram, one for every ``hop_length`` samples. Headers are at the
# file's rate, samples here at the extractor's, to which decoding brings them.


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


def sample_codes(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """The same with a mask of another name (Apertus 1.5): ``padding_mask`` [N] of int64[samples]."""
    return {"padding_mask": waveform_blocks(settings, headers)["input_values_mask"]}


def convolved_frames(settings: Settings, headers: Sequence[AudioHeader]) -> Measured:
    """What one convolution after the other leaves of the samples (OmniASR): ``num_audio_tokens`` [N]."""
    counts = []
    for header in headers:
        length = _samples(settings, header)
        for kernel, stride in zip(settings.processor.conv_kernel, settings.processor.conv_stride, strict=True):
            length = (length - kernel) // stride + 1
        counts.append(length)
    return {"num_audio_tokens": _heard(headers, counts)}


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
