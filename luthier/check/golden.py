"""``parity.json``: what an exported model did when it was exported, so that it can be held against it ever after.

Nothing but the exported folder is needed to check it: the cases hold messages with the ids of their prompts, and
contexts of ids with the log-probabilities that the trained model gave there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.check.verify.reference_tokenizer import TokenServer
from luthier.errors import UserError
from luthier.writing import JsonObject, counted, write_whole

PARITY_FILE = "parity.json"
PARITY_VERSION = 1
NUM_TOP = 20  # likeliest tokens that are told of a place
ASIDE = (".md", ".rst", ".html", ".pdf", ".log", ".csv", ".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp")
ASIDE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")  # alone, or as .txt


class GoldenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A history and the ids of its generation prompt. ``messages`` are as chat templates take them."""

    row: str
    messages: list[JsonObject]
    tools: list[JsonObject]
    ids: list[int]


class GoldenContext(msgspec.Struct, frozen=True, kw_only=True):
    """Ids, and what the trained model gave at some places of them.

    places        places of ids that are predicted: what is told of place p is the distribution behind ``ids[:p]``
    top_ids       [places][K] the K likeliest tokens there, the likeliest first
    top_logprobs  [places][K] their log-probabilities
    greedy_from   where the greedy answer begins that the model gave to what is before it; None: the ids are a row's
    """

    row: str
    ids: list[int]
    places: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    greedy_from: int | None = None


class GoldenArray(msgspec.Struct, frozen=True, kw_only=True):
    """An array that a processor made: its shape, the SHA-256 of its bytes, and numbers from all over it."""

    shape: list[int]
    sha256: str
    sample: list[float]


class GoldenPictures(msgspec.Struct, frozen=True, kw_only=True):
    """A history with pictures, what the processor made of it, and a context that begins with it.

    messages  in Hugging Face's form, with ``{"type": "image"}`` in the places of the pictures
    pictures  the bytes of their files, in their order
    prompt    the ids of the generation prompt, with the slots that the pictures take
    arrays    what the model is given beside ids: pixel values, grids …
    context   ids and log-probabilities of the trained model
    """

    row: str
    messages: list[JsonObject]
    pictures: list[bytes]
    prompt: list[int]
    arrays: dict[str, GoldenArray]
    context: GoldenContext


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """How far the exported model is from itself with its weights rounded once more to the dtype that they have.

    kl         KL divergence, mean over all places
    kl_at_one  that of the place where it is largest
    same       share of the places that have the same likeliest token
    """

    kl: float
    kl_at_one: float
    same: float


class WrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the folder as it was written."""

    bytes: int
    sha256: str


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """All of ``parity.json``.

    source           what was exported
    dtype            of the weights, by torch's name
    quantization     what its linear layers were quantized to beside that: ``int8``, ``fp8``, or "" for nothing
    bound            by which bounds its numbers are compared: ``exact`` (float32 on both sides), ``cast`` …
    template_kwargs  variables that training gave to the chat template, and that every caller has to give, too
    template_now     the time that the template was told, where it asks
    template_sha256  of the chat template's text; "" where there is none
    stops            ids that end an answer
    special_ids      special tokens by their role, with their ids: ``{"eos_token": 2}``
    texts            texts and their ids without any template, of a tokenizer that stands under another's name
    files            every other file of the folder
    rounding         of a model in 16 bits that loses more by rounding than the bound says; else None
    media            options of the processor that training set and its files do not have
    sha256           of all of the above, as it was written; "" from a Luthier that did not say it
    """

    version: int
    luthier: str
    source: str
    dtype: str
    bound: str
    template_kwargs: JsonObject
    template_now: str
    template_sha256: str
    stops: list[int]
    special_ids: dict[str, int]
    prompts: list[GoldenPrompt]
    contexts: list[GoldenContext]
    quantization: str = ""
    pictures: list[GoldenPictures] = []
    texts: dict[str, list[int]] = {}
    files: dict[str, WrittenFile] = {}
    notes: list[str] = []
    rounding: Rounding | None = None
    media: JsonObject | msgspec.UnsetType = msgspec.UNSET  # unset in the files of a Luthier that did not say it
    sha256: str = ""


def read_parity(path: Path) -> Parity:
    """The golden cases in a folder, or in a file. Raises `UserError` where there are none, or they cannot be read."""
    file = path / PARITY_FILE if path.is_dir() else path
    hint = "name a folder that luthier export has written, or its parity.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Parity)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}", hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no parity.json: {error}", hint=hint) from error
    if found.version != PARITY_VERSION:
        what = f"{file} is of version {found.version}, this Luthier reads {PARITY_VERSION}"
        raise UserError(what, hint="check it with the Luthier that wrote it, which it names")
    return found


def write_parity(parity: Parity, folder: Path) -> None:
    """Write it beside the files that it lists, one golden case a line."""
    files = {
        str(path.relative_to(folder)): WrittenFile(bytes=path.stat().st_size, sha256=digest_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != PARITY_FILE
    }
    parity = msgspec.structs.replace(parity, files=files)
    told = msgspec.to_builtins(msgspec.structs.replace(parity, sha256=_digest(parity)))
    lines = [f"{_json(key)}: {_lines(value)}" for key, value in told.items()]
    write_whole(folder / PARITY_FILE, [("{\n" + ",\n".join(lines) + "\n}\n").encode()])


def _digest(parity: Parity) -> str:
    """Of what is read where this is written."""
    read = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(parity, sha256="")), type=Parity)
    return hashlib.sha256(msgspec.json.encode(read)).hexdigest()


def file_faults(parity: Parity, folder: Path) -> list[tuple[str, str]]:
    """Files of the folder that are not those that were written, ``parity.json`` among them: name, what is wrong. A file
    more is one, unless it is of a kind that no program takes for a part of a model."""
    faults = []
    if parity.sha256 and parity.sha256 != _digest(parity):
        faults.append((PARITY_FILE, "it has other content than was written"))
    for name, written in parity.files.items():
        path = folder / name
        if not path.is_file():
            faults.append((name, "it is missing"))
        elif path.stat().st_size != written.bytes:
            faults.append((name, f"it has {counted(path.stat().st_size, 'byte')}, written were {written.bytes:,}"))
        elif digest_of(path) != written.sha256:
            faults.append((name, "it has other content than was written"))
    more = "it was not written with the others, and programs may load it: remove it"
    there = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return faults + [(name, more) for name in sorted(there) if name not in parity.files and not _is_aside(name)]


def _is_aside(name: str) -> bool:
    """Whether a file, by its path in the folder, is no part of a model: it is hidden, a text about it, or a picture."""
    path = PurePath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    legal = path.name.upper().removesuffix(".TXT") in ASIDE_NAMES
    return hidden or legal or name == PARITY_FILE or path.suffix.lower() in ASIDE


def served_otherwise(parity: Parity, server: TokenServer) -> list[tuple[str, str]]:
    """Golden prompts of which a server makes other ids: row, the first difference. Raises as `TokenServer.ids_of`, and
    `UserError` where there are none."""
    if not parity.prompts:
        raise UserError("parity.json has no golden prompts", hint="export without --no-proof, on text rows (--data)")
    faults = []
    for golden in parity.prompts:
        found = server.ids_of(golden.messages, golden.tools, parity.template_kwargs).tolist()
        if found != golden.ids:
            faults.append((golden.row, first_difference(found, golden.ids)))
    return faults


def first_difference(found: Sequence[int] | NDArray[Any], wanted: Sequence[int] | NDArray[Any]) -> str:
    """Where ids begin to differ from those that were trained with, in words."""
    pairs = enumerate(zip(found, wanted, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(found), len(wanted)))
    here, there = (str(int(ids[at])) if at < len(ids) else "its end" for ids in (found, wanted))
    return (
        f"{counted(len(found), 'id')}, trained with {len(wanted)}; the first difference is at {at}: {here}, not {there}"
    )


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def golden_context(
    row: str, ids: NDArray[np.int32], places: list[int], logprobs_NV: NDArray[np.float32]
) -> GoldenContext:
    """A context with the `NUM_TOP` likeliest tokens of each place."""
    top_NK = np.argsort(-logprobs_NV, axis=1, kind="stable")[:, :NUM_TOP]
    values_NK = np.take_along_axis(logprobs_NV, top_NK, axis=1)
    return GoldenContext(
        row=row,
        ids=ids.tolist(),
        places=places,
        top_ids=top_NK.tolist(),
        top_logprobs=[[round(float(value), 6) for value in values] for values in values_NK],
    )


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _lines(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(_json(item) for item in value) + "\n]"
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        return "{\n" + ",\n".join(f"{_json(key)}: {_json(item)}" for key, item in value.items()) + "\n}"
    return _json(value)
