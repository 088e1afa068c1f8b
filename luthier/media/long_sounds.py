"""Sounds of more seconds than a model hears, as several sounds in the place of one (``media.long_audio: split``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from luthier.config.inputs import LongAudio
from luthier.errors import RowError
from luthier.media.files.access import MediaAccess
from luthier.media.files.probing import probe
from luthier.media.processors.processor import MediaProcessor
from luthier.records import Audio, AudioHeader, Conversation, Document, Feedback, Message, Part, Preference, Row

AnyRow = TypeVar("AnyRow", bound=Row)


def split_long_sounds(row: AnyRow, processor: MediaProcessor | None, access: MediaAccess) -> AnyRow:
    """The row with windows in the place of each sound that the model's extractor would cut, where the run wants that.

    A sound that cannot be read stays as it is, for who reads it next to say so; so does one whose slots the row's own
    text has written.
    """
    if access.config.long_audio is not LongAudio.SPLIT or processor is None:
        return row

    def split(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if not any(isinstance(part, Audio) for part in parts):
            return parts
        return tuple(one for part in parts for one in _windows(part, processor, access))

    return _with_parts(row, split)


def windows(header: AudioHeader, most_seconds: float) -> list[tuple[int, int]]:
    """A sound's samples as the fewest windows [start, end) of about equal length that last at most so many seconds.

    windows(65 s at 16 kHz, 30) -> [(0, 346666), (346666, 693333), (693333, 1040000)]
    """
    most = int(most_seconds * header.sampling_rate)
    total = header.num_samples
    count = -(-total // most)
    bounds = [total * number // count for number in range(count + 1)]
    return list(pairwise(bounds))


def _windows(part: Part, processor: MediaProcessor, access: MediaAccess) -> list[Part]:
    if not isinstance(part, Audio) or part.slots is not None or part.window is not None:
        return [part]
    try:
        header = probe(part, access)
    except RowError:
        return [part]
    assert isinstance(header, AudioHeader), "the header of a sound"
    heard = processor.cut_sound(header)
    return [part] if heard is None else [replace(part, window=window) for window in windows(header, heard)]


def _with_parts(row: AnyRow, change: Callable[[tuple[Part, ...]], tuple[Part, ...]]) -> AnyRow:
    def changed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(replace(message, parts=change(message.parts)) for message in messages)

    match row:
        case Conversation():
            return replace(row, messages=changed(row.messages))
        case Document():
            return replace(row, parts=change(row.parts))
        case Preference():
            return replace(row, prompt=changed(row.prompt), chosen=changed(row.chosen), rejected=changed(row.rejected))
        case Feedback():
            return replace(row, prompt=changed(row.prompt), completion=changed(row.completion))
        case _:
            return row
