"""Rows for the matrix: conversations with pictures and videos of random sizes, as files."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from luthier.media.families import Family
from tests.media.media_files import image_file, video

# LUTHIER_MEDIA_SEED=7 repeats the matrix on other inputs, LUTHIER_MEDIA_SIZES=500 on twenty times as many rows.
SEED = os.environ.get("LUTHIER_MEDIA_SEED", "0")
ROUNDS = max(1, int(os.environ.get("LUTHIER_MEDIA_SIZES", "25")) // 25)

SHAPES: dict[str, tuple[str, ...]] = {
    "one": ("image",), "one more": ("image",), "two": ("image", "image"), "three": ("image", "image", "image"),
    "text": (), "more text": (), "film": ("video",), "another film": ("video",), "picture and film": ("image", "video"),
}  # fmt: skip
PICTURES = {
    "single": ("one", "one more"), "several": ("two", "three"), "text": ("text", "more text"),
    "mixed": ("text", "one", "three", "more text", "two"),
}  # fmt: skip
FILMS = {
    "film": ("film",), "films": ("film", "another film"),
    "everything": ("one", "film", "text", "picture and film", "two", "another film"),
}  # fmt: skip
# Classes whose batches hold videos of as many frames only; SmolVLM's would tell and show more of the others.
OF_ONE_LENGTH = {"internvl", "smolvlm"}
WORDS = ["what", "do", "these", "shapes", "show", "here", "and", "is", "one", "of", "them", "red", "or", "blue", "then"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A conversation: a question with items in it, an answer. ``files`` are those of its items."""

    shape: str
    messages: list[dict[str, Any]]
    files: tuple[Path, ...]

    @property
    def has_video(self) -> bool:
        return any(path.suffix == ".mp4" for path in self.files)


def write_rows(folder: Path, family: Family) -> list[Row]:
    """The rows of all shapes that the family takes, as ``rows.jsonl`` beside their files; in their order."""
    rng = random.Random(f"{family.name} {SEED}")
    rows = []
    for number in range(ROUNDS):
        for shape, kinds in SHAPES.items():
            if "video" not in kinds or (family.video is not None and not ("image" in kinds and family.one_kind)):
                rows.append(_row(folder, f"{number}-{shape.replace(' ', '-')}", shape, rng, family))
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"messages": row.messages}) for row in rows))
    return rows


def _row(folder: Path, name: str, shape: str, rng: random.Random, family: Family) -> Row:
    parts: list[dict[str, Any]] = []
    files = []
    for place, kind in enumerate(SHAPES[shape]):
        path = folder / (f"{name}-{place}.png" if kind == "image" else f"{name}-{place}.mp4")
        _write(path, rng, family)
        files.append(path)
        if place or rng.random() < 0.5:
            parts.append({"type": "text", "text": f"{_words(rng, 1, 3)} "})
        parts.append({"type": kind, kind: path.name})
    if family.name == "paligemma":  # whose pictures come first wherever they stood
        parts = sorted(parts, key=lambda part: part["type"] == "text")
    parts.append({"type": "text", "text": f" {_words(rng, 2, 6)}?"})
    return Row(
        shape=shape,
        messages=[
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": _words(rng, 2, 5)}]},
        ],
        files=tuple(files),
    )


def _words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def _write(path: Path, rng: random.Random, family: Family) -> None:
    width, height = rng.randint(30, 90), rng.randint(30, 90)
    if path.suffix == ".png":
        pixels = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
        path.write_bytes(image_file(Image.fromarray(pixels)))
        return
    side = 28 if family.name == "minimax_m3_vl" else 2  # which does not resize; and videos have even sides
    size = (width // side * side, height // side * side)
    of_one_length = family.name in OF_ONE_LENGTH or (family.video is not None and family.video.stacked)
    video(path, 8 if of_one_length else rng.randint(8, 12), size=size, fps=4)
