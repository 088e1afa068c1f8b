"""Rows to token trees, against `tokenizers.encode_batch` alone on the same texts in the same run.

python benchmarks/encoding.py [FOLDER OF A TOKENIZER] [ROWS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import tokenizers
from rich.console import Console
from rich.table import Table

from luthier.config.inputs import ModelConfig, SourceConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.presets import tokenizer_folder
from luthier.records import Conversation
from luthier.sources.source import open_sources

ROUNDS = 3


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else str(tokenizer_folder("tiny"))
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    (source,) = open_sources([SourceConfig(path=f"preset:skills#{limit}")], seed=1)
    rows = [source.convert(row) for row in source.rows()]  # type: ignore[arg-type]  preset rows are well formed
    encoder = Encoder(ModelConfig(name_or_path=folder), TemplateConfig())
    template, plain = encoder.tokenizer.template, tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    assert template is not None
    conversations = [row for row in rows if isinstance(row, Conversation)]
    texts = [template.render(row.messages, row.tools) for row in conversations]
    text_ids = [encoding.ids for encoding in plain.encode_batch(texts, add_special_tokens=False)]
    encoder.expect_many_rows()

    def ours() -> int:
        cold = Encoder(encoder.model, encoder.options)  # nothing recorded yet
        cold.__dict__["tokenizer"] = encoder.tokenizer
        outcomes = list(cold.encode_many(conversations))
        assert not any(isinstance(outcome, RowError) for outcome in outcomes)
        return sum(map(len, text_ids))

    def theirs() -> int:
        return sum(len(encoding.ids) for encoding in plain.encode_batch(texts, add_special_tokens=False))

    table = Table(
        "", "tokens", "CPU seconds", "tokens per CPU second", title=f"{len(rows)} rows, {folder}, best of {ROUNDS}"
    )
    for name, work in (
        ("luthier: render, targets, ids, tree", ours),
        ("tokenizers.encode_batch: ids of texts", theirs),
    ):
        tokens, seconds = measure(work)
        table.add_row(name, f"{tokens:,}", f"{seconds:.2f}", f"{tokens / seconds:,.0f}")
    Console().print(table)


def measure(work: Callable[[], int]) -> tuple[int, float]:
    """Tokens, and the least CPU seconds of all threads over the rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        tokens = work()
        seconds.append(time.process_time() - start)
    return tokens, min(seconds)


if __name__ == "__main__":
    main()
