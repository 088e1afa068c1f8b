"""Media: references opened, headers probed, items decoded; and how each family of models sees them.

Where a model's processor is (`MediaSource`): a small record, known without any framework, that can be sent to a worker.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from luthier import records
from luthier.config.inputs import LongAudio, MediaConfig, ModelConfig
from luthier.errors import ModelError, RowError, StoreError
from luthier.media.families import Features, MediaKind, Processor
from luthier.media.families.table import family_versions
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import Decoded, decode, probe
from luthier.media.geometry.videos import sampled_frames
from luthier.media.processors.processor import PROCESSOR_FILES, MediaProcessor
from luthier.presets import model_folder, model_names
from luthier.records import Media, MediaHeader
from luthier.sources.origins import modelscope_folder

PRESET = "preset:"
CONFIG = "config.json"
# The model's own template says what goes around an item in texts that no template makes.
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
TOKENS_FILES = ("tokenizer.json", "special_tokens_map.json")  # the processor's own tokenizer knows its placeholders
ITEMS_VERSION = b"4"  # of what a sample says of its media items beside their tokens
DECIDING = ("transformers", "torchvision")  # libraries whose versions decide how many tokens an item takes


@dataclass(frozen=True, kw_only=True)
class MediaSource:
    """A folder with a processor's files, None if the model has none; the options of the run.

    ``config_folder`` has the model's ``config.json``; None: it is where the processor is.
    """

    folder: Path | None
    options: MediaConfig
    trust_remote_code: bool = False
    config_folder: Path | None = None

    @classmethod
    def of_model(cls, tokenizer_folder: Path, model: ModelConfig, options: MediaConfig) -> MediaSource:
        """The model's own folder, or that of its tokenizer, whichever has the processor's files.

        A model of the Hub is described by what came with its tokenizer; where that is from elsewhere, by a few files of
        its own that are fetched.
        """
        own = _own_folder(model)
        places = (tokenizer_folder,) if own is None else (own, tokenizer_folder)
        found = next((folder for folder in places if _has_processor(folder)), None)
        described = next((folder for folder in places if (folder / CONFIG).is_file()), None)
        return cls(folder=found, options=options, trust_remote_code=model.trust_remote_code, config_folder=described)

    @classmethod
    def of_folder(cls, folder: Path, options: MediaConfig) -> MediaSource:
        """A folder that has to have a processor's files. Raises `ModelError`."""
        if not _has_processor(folder):
            raise ModelError(
                f"{folder}: no processor in it ({', '.join(PROCESSOR_FILES)})",
                hint="name the folder of a multimodal model, with the files of its processor",
            )
        return cls(folder=folder, options=options)

    @cached_property
    def fingerprint(self) -> str:
        """Covers all that decides how many tokens stand for an item; of a model without a processor it says so."""
        if self.folder is None:
            return "text"
        digest = hashlib.sha256(ITEMS_VERSION + self.options.model_dump_json(exclude={"cache"}).encode())
        code = sorted(self.folder.glob("*.py")) if self.trust_remote_code else []
        for path in (*(self.folder / name for name in (*PROCESSOR_FILES, *TEMPLATE_FILES, *TOKENS_FILES)), *code):
            digest.update(path.read_bytes() if path.is_file() else b"")
        digest.update("\0".join((self._model_type, *family_versions(self._model_type))).encode())
        for library in DECIDING:
            digest.update(_version(library).encode())
        return digest.hexdigest()

    def model_config(self) -> dict[str, object]:
        """The model's ``config.json``; {} if there is none."""
        folder = self.config_folder or self.folder
        path = None if folder is None else folder / CONFIG
        if path is None or not path.is_file():
            return {}
        found = json.loads(path.read_bytes())
        assert isinstance(found, dict), f"{path} holds no object"
        return found

    def load(self) -> MediaProcessor | None:
        """The processor, None if the model has none. Raises `ModelError` if its files are no processor's."""
        if self.folder is None:
            return None
        return MediaProcessor.load(
            str(self.folder),
            self.options,
            trust_remote_code=self.trust_remote_code,
            model_type=self._model_type,
        )

    @property
    def _model_type(self) -> str:
        return str(self.model_config().get("model_type", ""))


def _own_folder(model: ModelConfig) -> Path | None:
    """Where the model's own files are; None: they came with its tokenizer, or cannot be had."""
    name = model.name_or_path
    if name.startswith(PRESET):
        own = name.removeprefix(PRESET)
        return model_folder(own) if own in model_names() else None  # a tokenizer's name, where no model is needed
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    elsewhere = model.tokenizer_name_or_path not in (None, name)
    return _fetched(name, model) if elsewhere and name.count("/") == 1 else None


def _fetched(name: str, model: ModelConfig) -> Path | None:
    """The files that describe a model of the Hub; None where it cannot be reached, which loading the model will say."""
    wanted = [CONFIG, *PROCESSOR_FILES, *(["*.py"] if model.trust_remote_code else [])]
    revision, cache_dir = model.revision, model.cache_dir
    if (found := modelscope_folder(name, revision=revision, cache_dir=cache_dir, patterns=wanted)) is not None:
        return found
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None


def _has_processor(folder: Path) -> bool:
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


# --------------------------------------------------------------------------------------------------------------------
# The chat template that came with a model's processor, whatever template the run has chosen.


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTemplate:
    """As its tokenizer would run it.

    source          None: the model has none, as models that were not made for chat
    special_tokens  the variables that it is given (``bos_token`` …)
    control         the control tokens of the tokenizer
    """

    source: str | None
    special_tokens: dict[str, str]
    control: frozenset[str]


def own_template(processor: Processor) -> OwnTemplate:
    """That of a transformers processor, else of its tokenizer; of several named ones the default."""
    tokenizer = processor.tokenizer
    found = processor.chat_template or tokenizer.chat_template
    source = found.get("default") if isinstance(found, dict) else found
    return OwnTemplate(
        source=source or None,
        special_tokens={
            name: str(token) for name, token in tokenizer.special_tokens_map.items() if name.endswith("_token")
        },
        control=frozenset(token.content for token in tokenizer.added_tokens_decoder.values()),
    )


# --------------------------------------------------------------------------------------------------------------------
# Items decoded to what a processor takes of them.


def decode_for(
    processor: MediaProcessor, media: records.Media, header: records.MediaHeader, access: MediaAccess
) -> Decoded:
    """Of a video the frames that the processor would choose, and its sound if the run wants it; sound at its own rate.

    Raises `RowError` as `decode` does.
    """
    frames, hears = None, False
    if isinstance(header, records.VideoHeader):
        frames = sampled_frames(processor.settings(MediaKind.VIDEO), header)
        hears = bool(access.config.use_audio_in_video) and header.audio is not None
    heard = hears or isinstance(header, records.AudioHeader)
    rate = int(processor.settings(MediaKind.AUDIO)["sampling_rate"]) if heard else None
    return decode(media, header, access, frame_indices=frames, sampling_rate=rate, with_audio=hears)


# ---------------------------------------------------------------------------- sounds of more seconds than a model hears


AnyRow = TypeVar("AnyRow", bound=records.Row)


def split_long_sounds(row: AnyRow, processor: MediaProcessor | None, access: MediaAccess) -> AnyRow:
    """The row with windows in the place of each sound that the model's extractor would cut, where the run wants that.

    A sound that cannot be read stays as it is, for who reads it next to say so; so does one whose slots the row's own
    text has written.
    """
    if access.config.long_audio is not LongAudio.SPLIT or processor is None:
        return row

    def split(parts: tuple[records.Part, ...]) -> tuple[records.Part, ...]:
        if not any(isinstance(part, records.Audio) for part in parts):
            return parts
        return tuple(one for part in parts for one in _windows(part, processor, access))

    return _with_parts(row, split)


def windows(header: records.AudioHeader, most_seconds: float) -> list[tuple[int, int]]:
    """A sound's samples as the fewest windows [start, end) of about equal length that last at most so many seconds.

    windows(65 s at 16 kHz, 30) -> [(0, 346666), (346666, 693333), (693333, 1040000)]
    """
    most = int(most_seconds * header.sampling_rate)
    total = header.num_samples
    count = -(-total // most)
    bounds = [total * number // count for number in range(count + 1)]
    return list(pairwise(bounds))


def _windows(part: records.Part, processor: MediaProcessor, access: MediaAccess) -> list[records.Part]:
    if not isinstance(part, records.Audio) or part.slots is not None or part.window is not None:
        return [part]
    try:
        header = probe(part, access)
    except RowError:
        return [part]
    assert isinstance(header, records.AudioHeader), "the header of a sound"
    heard = processor.cut_sound(header)
    return [part] if heard is None else [replace(part, window=window) for window in windows(header, heard)]


def _with_parts(row: AnyRow, change: Callable[[tuple[records.Part, ...]], tuple[records.Part, ...]]) -> AnyRow:
    def changed(messages: tuple[records.Message, ...]) -> tuple[records.Message, ...]:
        return tuple(replace(message, parts=change(message.parts)) for message in messages)

    match row:
        case records.Conversation():
            return replace(row, messages=changed(row.messages))
        case records.Document():
            return replace(row, parts=change(row.parts))
        case records.Preference():
            return replace(row, prompt=changed(row.prompt), chosen=changed(row.chosen), rejected=changed(row.rejected))
        case records.Feedback():
            return replace(row, prompt=changed(row.prompt), completion=changed(row.completion))
        case _:
            return row


# ----------------------------------------------------------------------------------------------------------------------
# What a frozen encoder of a model made of media items: one file an item, found again by the item.
#
# <folder>/<first two letters of the key>/<key>.safetensors
#
# An array's name is where the model gets it: ``mm_encoder_outputs.image.pooler_output.0`` is the first entry of the
# field ``pooler_output`` of what `get_image_features` returns. A number in a name is a place in a tuple. Rows of all
# arrays lie along axis 0, so those of several items are joined there. bfloat16, which numpy has not, is kept as
# uint16.


ENCODER_OUTPUTS = "mm_encoder_outputs"  # transformers' name for the input of computed features
_OUTPUTS = "outputs"  # in names within files


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemFeatures:
    """What is kept of a media item.

    outputs  those of its processor that the model's encoder does not take, or that are needed besides (grids)
    encoded  what the encoder made of the others, by name
    """

    outputs: Features
    encoded: Features

    def to_bytes(self) -> bytes:
        from safetensors.numpy import save

        named = {f"{_OUTPUTS}.{name}": value for name, value in self.outputs.items()} | dict(self.encoded)
        return save({name: np.ascontiguousarray(value) for name, value in named.items()})


@dataclass(frozen=True, slots=True)
class FeatureFiles:
    """The files of one model's encoders under one processor."""

    folder: Path

    def path(self, key: str) -> Path:
        """Where the item with this `item_key` is kept."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def keys(self) -> set[str]:
        """Of all items that are there."""
        return {path.stem for path in self.folder.glob("??/*.safetensors")}

    def read(self, media: Media, header: MediaHeader) -> ItemFeatures | None:
        """None if the item is not there. Raises as `load`."""
        path = self.path(item_key(media, header))
        return self.load(path) if path.is_file() else None

    def load(self, path: Path) -> ItemFeatures:
        """A file of the folder. Raises `StoreError` if it is damaged."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(path)
        except SafetensorError as error:
            raise StoreError(f"{path}: damaged: {error}", hint="remove the file; it is computed again") from error
        return ItemFeatures(
            outputs={
                name.removeprefix(f"{_OUTPUTS}."): value for name, value in arrays.items() if not is_encoded(name)
            },
            encoded={name: value for name, value in arrays.items() if is_encoded(name)},
        )


def item_key(media: Media, header: MediaHeader) -> str:
    """40 hex digits, of the reference, of where it leads from the folder of this process, and of the header with the
    version of what it refers to."""
    sources = media.source if isinstance(media.source, tuple) else (media.source,)
    files = [os.path.abspath(each) for each in sources if isinstance(each, str) and "://" not in each]
    told = [type(media).__name__, asdict(media), type(header).__name__, asdict(header), files]
    return blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=20).hexdigest()


def is_encoded(name: str) -> bool:
    """Whether an array is an encoder's output."""
    return name.startswith(f"{ENCODER_OUTPUTS}.")


def join_encoded(items: Sequence[Features]) -> dict[str, NDArray[np.generic]]:
    """The encoders' outputs of several items, or groups of them, one after the other; what else they have is left."""
    names = dict.fromkeys(name for item in items for name in item if is_encoded(name))
    return {name: np.concatenate([item[name] for item in items if name in item]) for name in names}
