"""Families that hear, as users have them: a folder with processor, template and config, rows in a file, the model."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image

import luthier
from luthier.collation import MediaInputs
from luthier.collation.collator import collate_packs
from luthier.config.choices import Overflow
from luthier.media.families import MediaKind
from luthier.media.processors.processor import MediaProcessor
from luthier.models import find_parts, multimodal_class
from luthier.models.batch_invariance import hear_own_frames
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch, Pack, Segment
from tests.families_matrix.tiny_hearing import CONFIGS, Words
from tests.media.media_files import wav
from tests.media.tiny_av_processors import AUDIO, granite_speech

SEED = int(os.environ.get("LUTHIER_MEDIA_SEED", "1"))
RATE = 16_000
ANSWER = "it is so"
# Classes that take one sound for every text of a call, and no text without one.
ONE_EACH = frozenset({"audioflamingo3", "musicflamingo", "glmasr", "qwen3_asr", "omniasr"})
MARKS = {
    "<|AUDIO|>": "<|audio_bos|>{}<|audio_eos|>",
    "<|IMAGE|>": "<|vision_bos|>{}<|vision_eos|>",
    "<|audio_pad|>": "<|audio_start|>{}<|audio_end|>",
}


@dataclass(frozen=True)
class Heard:
    """A row: what is in it, in order. A number is a sound of so many samples, a pair a picture's width and height."""

    items: tuple[int | tuple[int, int], ...] = ()

    @property
    def sounds(self) -> list[int]:
        return [item for item in self.items if isinstance(item, int)]

    @property
    def pictures(self) -> list[tuple[int, int]]:
        return [item for item in self.items if not isinstance(item, int)]


class Hearing:
    """One family in a folder."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.folder = folder
        self.processor = (AUDIO | {"granite_speech": granite_speech})[family]()
        self.media = MediaProcessor.of(self.processor)
        self._known: dict[tuple[Heard, ...], list[Segment]] = {}
        self._write_model()

    @cached_property
    def config(self) -> Any:
        tokenizer = self.processor.tokenizer
        return CONFIGS[self.family](Words(size=len(tokenizer), number=tokenizer.convert_tokens_to_ids))

    @cached_property
    def inputs(self) -> MediaInputs:
        """Of the folder, as a run has them."""
        return luthier.media_inputs(self.folder / "model", roots=[str(self.folder)])

    def model(self) -> Any:
        """With the same weights every time, none of which are all zeros."""
        torch.manual_seed(0)
        model = multimodal_class(self.config).from_config(self.config).float().eval()
        hear_own_frames(model)
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():
                torch.nn.init.normal_(weight, std=0.1)
        return model

    def segments(self, rows: Sequence[Heard]) -> list[Segment]:
        """The rows from a file into the store and out of it."""
        key = tuple(rows)
        if key not in self._known:
            self._known[key] = self._prepared(rows)
        return self._known[key]

    def batch(self, segments: Sequence[Segment], *, packed: bool) -> Batch:
        """As a run collates them."""
        packs = [Pack(segments=tuple(segments))] if packed else [Pack(segments=(each,)) for each in segments]
        pad = self.processor.tokenizer.pad_token_id
        made = collate_packs(packs, packed=packed, pad_token_id=pad, media=self.inputs)
        assert not made.lost
        return made

    def own(self, rows: Sequence[Heard]) -> dict[str, Any]:
        """What the processor itself gives for the same conversations in one call."""
        template = (self.folder / "model" / "chat_template.jinja").read_text()
        render = self.processor.tokenizer.apply_chat_template
        texts = [render(self.conversation(row), chat_template=template, tokenize=False) for row in rows]
        if self.family == "voxtral":
            return self._transcribed(texts, [samples_of(length) for row in rows for length in row.sounds])
        arguments: dict[str, Any] = {}
        if any(row.sounds for row in rows):
            arguments["audio"] = [samples_of(length) for row in rows for length in row.sounds]
            arguments["audio_kwargs"] = {"return_tensors": "pt"}
        if any(row.pictures for row in rows):
            nested = [[picture_of(size) for size in row.pictures] for row in rows]
            gemma = self.family.startswith("gemma4")
            arguments["images"] = nested if gemma else [picture for row in nested for picture in row]
            arguments["images_kwargs"] = {"return_tensors": "pt"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict(self.processor(text=texts, text_kwargs={"padding": True, "padding_side": "right"}, **arguments))

    def conversation(self, row: Heard) -> list[dict[str, Any]]:
        """A question about all items, files of which are written, and an answer."""
        parts: list[dict[str, Any]] = []
        for item in row.items:
            kind = "audio" if isinstance(item, int) else "image"
            parts += [{"type": kind, kind: self._file(item)}, {"type": "text", "text": " and "}]
        question = [*parts, {"type": "text", "text": f"what of {len(parts)}?"}]
        return [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]

    def _prepared(self, rows: Sequence[Heard]) -> list[Segment]:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"messages": self.conversation(row)}) + "\n" for row in rows))
        prepared = luthier.prepare(
            {
                "model": str(self.folder / "model"),
                "data": {"train": [{"path": str(path)}], "store": str(self.folder / "store"), "workers": 0},
                "output": {"dir": str(self.folder / "run")},
            }
        )
        index = SegmentIndex(prepared.train, max_length=8192, overflow=Overflow.ERROR)
        assert len(index) == len(rows), prepared.train.ledger
        return [index[number] for number in range(len(rows))]

    def _transcribed(self, texts: list[str], sounds: list[np.ndarray]) -> dict[str, Any]:
        """Voxtral leaves ids to mistral-common; here they are 375 tokens for every half minute that a sound begins."""
        pieces = "\0".join(texts).split(self.processor.audio_token)
        slots = [self.processor.audio_token * 375 * -(-len(sound) // 480_000) for sound in sounds]
        whole = pieces[0] + "".join(slot + piece for slot, piece in zip(slots, pieces[1:], strict=True))
        made = dict(self.processor.tokenizer(whole.split("\0"), padding=True, return_tensors="pt"))
        if sounds:
            options = dict(self.processor.audio_kwargs)
            positions = options.pop("max_source_positions")
            made["input_features"] = self.processor._retrieve_input_features(sounds, positions, **options)
        return made

    def _file(self, item: int | tuple[int, int]) -> str:
        """Written once: rows are of the file that was there when they were prepared."""
        path = self.folder / (f"{item}.wav" if isinstance(item, int) else "{}x{}.png".format(*item))
        if path.exists():
            pass
        elif isinstance(item, int):
            rate = 24_000 if self.family == "apertus1p5" else RATE
            path.write_bytes(wav(samples_of(item), rate=rate, coding=3, bits=32))  # as they are, without rounding
        else:
            picture_of(item).save(path)
        return str(path)

    def _write_model(self) -> None:
        folder = self.folder / "model"
        self.processor.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(_template(self.media))
        (folder / "config.json").write_text(
            json.dumps({"model_type": self.config.model_type, **_described(self.config)})
        )
        hf.GenerationConfig(eos_token_id=self.processor.tokenizer.eos_token_id).save_pretrained(folder)


def rows_of(family: str, kind: str) -> list[Heard]:
    """``single``, ``several``, ``text`` or ``mixed`` rows, of lengths that `SEED` draws."""
    rng = random.Random(f"{family} {kind} {SEED}")
    least = 100 if family == "qwen3_omni_moe" else 45  # whose encoder runs shorter ones otherwise beside longer ones
    sizes = [160 * rng.randint(least, 200) for _ in range(4)]  # whole frames; others are not counted alike in company
    first, second, third, fourth = sizes
    match kind:
        case "single":
            return [Heard((first,))]
        case "several":
            return [Heard((first,)), Heard((second,)), Heard((third,))]
        case "several in a row":
            return [Heard((first, second)), Heard((third, fourth))]
        case "text":
            return [Heard(), Heard()]
        case "mixed":
            return [Heard((first,)), Heard(), Heard((second, third)), Heard((fourth,))]
        case "mixed with pictures":
            return [Heard((first, (60, 41))), Heard(), Heard(((40, 80), second, (64, 64))), Heard((third,))]
        case _:
            raise ValueError(kind)


def samples_of(length: int) -> np.ndarray:
    """float32[length]"""
    return np.random.default_rng(length).uniform(-0.5, 0.5, length).astype(np.float32)


def picture_of(size: tuple[int, int]) -> Image.Image:
    width, height = size
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def tower_names(model: Any) -> tuple[str, ...]:
    """The modules that hear."""
    return tuple(name for name in find_parts(model).tower if "vis" not in name and "img" not in name)


def _template(media: MediaProcessor) -> str:
    items = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{MARKS.get(slot, '{}').format(slot)}"
        for kind in (MediaKind.IMAGE, MediaKind.AUDIO)
        if media.family.rule(kind) is not None
        for slot in (media.inline(kind),)
    )
    return (
        "{% for message in messages %}{{ message['role'] }}: "
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if 'text' in part %}{{ part['text'] }}" + items + "{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


def _described(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))
