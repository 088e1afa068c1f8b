"""Golden cases with pictures: a history, what the processor makes of it, and what the trained model says behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.check.golden import GoldenArray, GoldenPictures, first_difference
from luthier.check.verify.plain_template import plain_message
from luthier.encoding.interface import as_prompt
from luthier.engines.local import LocalEngine
from luthier.export.taken_down import TakenDown, history_of, media_arrays
from luthier.prediction.trained_run import TrainedRun
from luthier.records import Address, Conversation, Image, Message, Part, Row, Sample, Text
from luthier.writing import JsonObject

NUM_PICTURES = 3  # contexts with pictures, whose files are written down
MAX_PICTURE_BYTES = 300_000  # of all pictures of such a context
NUM_SAMPLED = 64  # numbers of an array of pixels
MAX_PIXEL_ERROR = 0.02  # of a normalised pixel; one step of 8 bits is about as much


def golden_pictures(run: TrainedRun, engine: LocalEngine, measured: TakenDown) -> list[GoldenPictures]:
    """Contexts that begin with a history of texts and pictures, with pictures small enough to be written down."""
    return list(islice(_golden_pictures(run, engine, measured), NUM_PICTURES))


def _golden_pictures(run: TrainedRun, engine: LocalEngine, measured: TakenDown) -> Iterator[GoldenPictures]:
    row_of = {str(each.row.address): each.row for each in measured.rows}
    for context in measured.contexts:
        history = _first_history(row_of[context.golden.row]) if context.media else None
        if history is None or engine.media is None:
            continue
        parts = [part for message in history.messages for part in message.parts]
        pictures = [part for part in parts if isinstance(part, Image)]
        if len(pictures) + sum(isinstance(part, Text) for part in parts) < len(parts) or history.tools:
            continue
        files = []
        for picture in pictures:
            with engine.media.access.open(picture.source, picture.root) as content:
                files.append(content.read(0, MAX_PICTURE_BYTES + 1))
        if sum(map(len, files)) > MAX_PICTURE_BYTES:
            continue
        messages = [plain_message(message, parts=True) for message in history.messages]
        sample = run.encoder.encode(as_prompt(with_pictures(messages, files)))
        prompt = sample.input_ids
        if context.golden.ids[: len(prompt)] != prompt.tolist() or len(sample.media) != len(context.media):
            continue
        arrays = media_arrays(engine, prompt, sample.media)
        yield GoldenPictures(
            row=context.golden.row,
            messages=messages,
            pictures=files,
            prompt=prompt.tolist(),
            arrays={name: golden_array(array) for name, array in arrays.items()},
            context=context.golden,
        )


def _first_history(row: Row) -> Conversation | None:
    """What is before a row's first answer, with which its first context begins."""
    if isinstance(row, Conversation):
        roles = [message.role for message in row.messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        return replace(row, messages=row.messages[:first], continue_final_message=False) if first else None
    return history_of(row)


def picture_faults(
    engine: LocalEngine, run: TrainedRun, golden: GoldenPictures
) -> tuple[Sample, list[tuple[str, str]]]:
    """A golden history encoded anew, and where its ids and the model's inputs are not those that were written down.
    Raises `RowError` for a history that is refused."""
    faults = []
    sample = run.encoder.encode(as_prompt(with_pictures(golden.messages, golden.pictures)))
    if sample.input_ids.tolist() != golden.prompt:
        faults.append((golden.row, first_difference(sample.input_ids, golden.prompt)))
    arrays = {name: golden_array(one) for name, one in media_arrays(engine, sample.input_ids, sample.media).items()}
    for name, wanted in golden.arrays.items():
        found = arrays.get(name)
        if found is None or found.shape != wanted.shape:
            shape = "is missing" if found is None else f"has the shape {found.shape}"
            faults.append((golden.row, f"{name} {shape}, trained with {wanted.shape}"))
        elif found.sha256 != wanted.sha256:
            apart = float(np.abs(np.subtract(found.sample, wanted.sample)).max())
            if not apart <= MAX_PIXEL_ERROR:
                faults.append((golden.row, f"{name} is {apart:.2g} away, at most {MAX_PIXEL_ERROR:g} is rounding"))
    return sample, faults


def with_pictures(messages: Sequence[JsonObject], files: Sequence[bytes]) -> Conversation:
    """The conversation of golden messages, with their pictures."""
    left = iter(files)

    def parts(content: Sequence[JsonObject]) -> tuple[Part, ...]:
        return tuple(Image(source=next(left)) if one["type"] == "image" else Text(text=one["text"]) for one in content)

    told = tuple(Message(role=message["role"], parts=parts(message["content"])) for message in messages)
    return Conversation(messages=told, address=Address(file="parity.json", row=1))


def golden_array(array: NDArray[Any]) -> GoldenArray:
    """What is written down of an array."""
    whole = np.ascontiguousarray(array)
    flat = whole.reshape(-1)
    places = np.linspace(0, len(flat) - 1, min(NUM_SAMPLED, len(flat))).astype(np.int64)
    digest = hashlib.sha256(whole.tobytes()).hexdigest()
    return GoldenArray(shape=list(whole.shape), sha256=digest, sample=[float(value) for value in flat[places]])
