"""Rows with photographs, and a Qwen2.5-VL to prepare them for: everything generated, as files that any tool reads.

A photograph is a window of one large scene (smooth shades, edges, grain), saved as JPEG. So it compresses about as
photographs do, and no two are the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((640, 480), (480, 640), (800, 600), (1024, 768), (768, 1024), (1280, 960), (1600, 1200))  # width, height
SCENE = (3000, 2400)
QUALITY = 85
_TEXT = (
    "the a small large old new bright dark red green wooden stone open closed house tree river street window table "
    "person child dog bird boat car bicycle stands lies walks waits behind before beside under over near far left "
    "right morning evening light shadow and with without of in on from to"
)
WORDS = _TEXT.split(" ")
QUESTION_WORDS, ANSWER_WORDS = 15, 60

# Qwen2.5-VL's own, with tools and numbered pictures left out.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def write_photographs(folder: Path, number: int, *, seed: int = 0) -> list[Path]:
    """So many JPEG files, the sizes by turns."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    scene = _scene(rng)
    files = []
    for index, (width, height) in enumerate(itertools.islice(itertools.cycle(SIZES), number)):
        left, top = rng.integers(SCENE[0] - width), rng.integers(SCENE[1] - height)
        file = folder / f"{index}.jpg"
        window = np.ascontiguousarray(scene[top : top + height, left : left + width])
        Image.fromarray(window).save(file, quality=QUALITY)
        files.append(file)
    return files


def write_picture_rows(file: Path, pictures: list[Path], *, seed: int = 0) -> None:
    """A ShareGPT row for each picture: a question that begins with it, and an answer."""
    rng = np.random.default_rng(seed)
    with file.open("w", encoding="utf-8") as lines:
        for picture in pictures:
            question, answer = (_sentence(rng, words) for words in (QUESTION_WORDS, ANSWER_WORDS))
            turns = [{"from": "human", "value": f"<image>{question}"}, {"from": "gpt", "value": answer}]
            lines.write(json.dumps({"conversations": turns, "images": [str(picture)]}) + "\n")


def picture_rows(file: Path) -> Iterator[tuple[str, str, Path]]:
    """Question, answer and picture of each row of such a file."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            question, answer = (turn["value"] for turn in row["conversations"])
            yield question.removeprefix("<image>"), answer, Path(row["images"][0])


def vision_model(folder: Path, tokenizer: Path) -> Path:
    """A folder as users have one: processor, tokenizer and config; no weights, and tiny sizes in the config.

    The processor is Qwen2.5-VL's with the settings of its class: pictures of up to 1,003,520 pixels are not shrunk.
    """
    import transformers as hf

    known = hf.AutoTokenizer.from_pretrained(tokenizer)
    processor: Any = hf.Qwen2_5_VLProcessor(
        hf.Qwen2VLImageProcessor(), known, hf.Qwen2VLVideoProcessor(), chat_template=TEMPLATE
    )
    processor.save_pretrained(folder)
    ids = {name: known.convert_tokens_to_ids(token) for name, token in CONTROL_IDS.items()}
    hf.Qwen2_5_VLConfig(text_config=_text_config(known), vision_config=_VISION, **ids).save_pretrained(folder)
    hf.GenerationConfig(eos_token_id=known.convert_tokens_to_ids("<|im_end|>")).save_pretrained(folder)
    return folder


_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 64,
}


def _text_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer) + 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }


def _scene(rng: np.random.Generator) -> np.ndarray:
    """uint8[height, width, 3]: shades of several scales, a fifth of them with hard edges, and grain."""
    width, height = SCENE
    scene = np.full((height, width, 3), 128.0, dtype=np.float32)
    for scale, strength, how in ((400, 60, Image.BICUBIC), (80, 30, Image.BICUBIC), (30, 15, Image.NEAREST)):
        small = np.clip(rng.normal(128, strength, (height // scale, width // scale, 3)), 0, 255).astype(np.uint8)
        scene += np.asarray(Image.fromarray(small).resize(SCENE, how), dtype=np.float32) - 128
    scene += rng.normal(0, 4, scene.shape).astype(np.float32)
    return np.clip(scene, 0, 255).astype(np.uint8)


def _sentence(rng: np.random.Generator, num_words: int) -> str:
    return " ".join(rng.choice(WORDS, num_words).tolist()).capitalize() + "."
