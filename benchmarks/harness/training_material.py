"""What trainers are measured on: real rows, their ids as Luthier makes them, and a small model with fixed weights.

Other tools get the ids themselves, and their targets. So every tool trains the same tokens, whatever its own template
would have made of the rows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from benchmarks.harness.conversations import conversations
from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.loader.settings import units_of
from luthier.preparation.prepare import prepare
from luthier.preparation.segments import SegmentIndex
from luthier.presets import dataset_rows
from luthier.records import IGNORE_INDEX, Segment

HIDDEN, LAYERS, HEADS, KEY_VALUE_HEADS, INNER = 256, 4, 4, 2, 768
PROMPT_TOKENS, ANSWER_TOKENS = 600, 80
SEED = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Rows as files, and how much is in one pass over them.

    rows          as a user has them, for Luthier; ``ids``: the same as ids, for other tools
    num_units     rows, or pairs; ``num_targets`` tokens that are learned
    num_tokens    with the prompts; of pairs each counts its own
    mean_length   tokens of a unit
    """

    rows: Path
    ids: Path
    model: Path
    num_units: int
    num_targets: int
    num_tokens: int

    @property
    def mean_length(self) -> float:
        return self.num_tokens / self.num_units


def small_model(folder: Path, tokenizer: Path, vocab_size: int) -> Path:
    """A Qwen3-shaped model with random weights, saved with its tokenizer. Its embedding is its output layer too."""
    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HIDDEN // HEADS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def exchanges(num_rows: int, tokenizer: Path, text_tokens: tuple[int, int] | None = None) -> Iterator[dict[str, Any]]:
    """The first question and answer of so many real conversations, as they come or of like length."""
    texts = ([turn["value"] for turn in row["conversations"][:2]] for row in conversations(alternating=True))
    if text_tokens is not None:
        texts = _of_length(texts, tokenizer, *text_tokens)
    for question, answer in itertools.islice(texts, num_rows):
        yield {"messages": [_message("user", question), _message("assistant", answer)]}


def _of_length(texts: Iterable[list[str]], tokenizer: Path, least: int, most: int) -> Iterator[list[str]]:
    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    for both in texts:
        if least <= sum(len(library.encode(text, add_special_tokens=False).ids) for text in both) <= most:
            yield both


def long_prompts(num_pairs: int, tokenizer: Path) -> Iterator[dict[str, Any]]:
    """Pairs made of real texts: a prompt of about 600 tokens, and two answers of about 80."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts = (turn["value"] for row in conversations(alternating=True) for turn in row["conversations"])
    ends = list(accumulate([PROMPT_TOKENS, ANSWER_TOKENS, ANSWER_TOKENS]))
    long = (ids for text in texts if len(ids := library.encode(text, add_special_tokens=False).ids) >= ends[-1])
    for ids in itertools.islice(long, num_pairs):
        prompt, chosen, rejected = (library.decode(ids[i:j]) for i, j in pairwise([0, *ends]))
        yield {
            "prompt": [_message("user", prompt)],
            "chosen": [_message("assistant", chosen)],
            "rejected": [_message("assistant", rejected)],
        }


def short_pairs(num_pairs: int) -> Iterator[dict[str, Any]]:
    """The first pairs of ``preset:preferences``."""
    return itertools.islice(dataset_rows("preferences", "train"), num_pairs)


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """As JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def make_material(description: Path, rows: Path, model: Path) -> Material:
    """Encode the rows as the run description says, and write their ids beside them.

    Of a row: ``input_ids`` and ``labels``; of a pair: ``prompt_ids``, ``chosen_ids``, ``rejected_ids``.
    """
    config = load_config(description)
    encoder = Encoder.from_config(config)
    units = units_of(config)
    prepared = prepare(config, encoder).train
    index = SegmentIndex(prepared, max_length=config.data.max_length, overflow=config.data.overflow, units=units)
    segments = [index[number] for number in range(len(index.lengths))]
    size = max(1, units.size)
    written = [
        _pair(*segments[at : at + 2]) if size == 2 else _row(segments[at]) for at in range(0, len(segments), size)
    ]
    return Material(
        rows=rows,
        ids=write_rows(rows.with_suffix(".ids.jsonl"), written),
        model=model,
        num_units=len(written),
        num_targets=sum(int(segment.target.sum()) for segment in segments),
        num_tokens=sum(map(len, segments)),
    )


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _row(segment: Segment) -> dict[str, list[int]]:
    labels = np.where(segment.target, segment.input_ids, IGNORE_INDEX)
    return {"input_ids": segment.input_ids.tolist(), "labels": labels.tolist()}


def _pair(chosen: Segment, rejected: Segment) -> dict[str, list[int]]:
    """Prompt and answers; what follows the last target (a line break of the template) is nobody's target or context."""
    start = int(np.argmax(chosen.target))
    assert start == int(np.argmax(rejected.target)) and (chosen.input_ids[:start] == rejected.input_ids[:start]).all()
    answers = [segment.input_ids[start:][segment.target[start:]] for segment in (chosen, rejected)]
    return {
        "prompt_ids": chosen.input_ids[:start].tolist(),
        "chosen_ids": answers[0].tolist(),
        "rejected_ids": answers[1].tolist(),
    }
