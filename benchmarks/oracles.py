"""Every chat template against outside implementations: the tables of docs/oracles.md.

python -m benchmarks.oracles [--markdown]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from luthier.errors import RowError
from luthier.presets import tokenizer_folder
from tests.oracles.catalogue import catalogue
from tests.oracles.chat_rows import as_conversation
from tests.oracles.conventions import CONVENTIONS
from tests.oracles.families import family, trained_names
from tests.oracles.hostile import hostile_chats
from tests.oracles.refusals import is_true
from tests.oracles.test_stock_templates import verdict_of
from tests.oracles.text_is_text import TextIsText
from tests.oracles.training_masks import compare, turns
from tests.oracles.vocabulary import encoder_of, whole_tokenizer

Cells = tuple[str, ...]
# of rows that are taken, and the heads of their columns
VERDICTS = {"exact": "exact", "prompt of inference": "prompt", "template reads control strings": "text only"}


def main() -> int:
    """Print both tables; the exit status is 1 where a template is neither exact nor truly refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="as it stands in the documentation")
    write = _markdown if parser.parse_args().markdown else _rich
    with tempfile.TemporaryDirectory() as scratch:
        masks = list(mask_rows(Path(scratch) / "masks"))
        hostile = list(hostile_rows(Path(scratch) / "hostile"))
    columns = (
        "family",
        "TRL's mask begins",
        "TRL's mask ends",
        "equal",
        "seam",
        "other text",
        "prompt",
        "refused",
        "edges",
    )
    write("targets against TRL's training templates", columns, masks)
    write("hostile conversations", ("template", *VERDICTS.values(), "refused", "wrong"), hostile)
    unexplained = sum(row[-1] not in ("", _edges(CONVENTIONS[row[0]].odd)) for row in masks)
    return 1 if unexplained or any(row[-1] != "0" for row in hostile) else 0


def mask_rows(scratch: Path) -> Iterator[Cells]:
    """One row per family: how TRL's mask differs, and how many turns were compared."""
    base = tokenizer_folder("tiny")
    for name in trained_names():
        encoder = encoder_of(base, scratch / name, family(name), train_on="last_assistant")
        outcomes = [compare(name, turn, encoder, whole_tokenizer(base)) for turn in turns()]
        verdicts, convention = Counter(outcome.verdict for outcome in outcomes), CONVENTIONS[name]
        own = ("equal", "seam", "other text", "prompt")
        refused = {verdict: count for verdict, count in verdicts.items() if verdict not in own}
        counts = (str(verdicts[verdict]) for verdict in own)
        odd = _edges(convention.unexplained(outcomes))
        yield name, convention.start.value, convention.end.value, *counts, _counts(refused), odd


def hostile_rows(scratch: Path) -> Iterator[Cells]:
    """One row per template: what became of the hostile conversations, as the test of them judges."""
    base = tokenizer_folder("tiny")
    chats = hostile_chats()
    rows = [as_conversation(chat, tools) for chat, tools in chats.values()]
    for name, stock in catalogue().items():
        oracle = TextIsText(stock, whole_tokenizer(base))
        encoder = encoder_of(base, scratch / name.replace("/", "-"), stock, train_on="last_assistant")
        taken, refused = Counter[str](), Counter[str]()
        for (case, (chat, tools)), outcome in zip(chats.items(), encoder.encode_many(rows), strict=True):
            if isinstance(outcome, RowError):
                refused[outcome.reason] += 1
                taken["wrong"] += not is_true(outcome, stock, chat, tools)
                continue
            try:
                taken[verdict_of(outcome, oracle, chat, tools, case)] += 1
            except AssertionError:
                taken["wrong"] += 1
        yield name, *(str(taken[verdict]) for verdict in VERDICTS), _counts(refused), str(taken["wrong"])


def _counts(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _edges(odd: object) -> str:
    assert isinstance(odd, dict)
    return "; ".join(f"{count}: `{before!r}` … `{after!r}`" for (before, after), count in odd.items())


def _rich(title: str, columns: Cells, rows: list[Cells]) -> None:
    table = Table(*columns, title=title, box=None)
    for row in rows:
        table.add_row(*row)
    Console(width=200).print(table)


def _markdown(title: str, columns: Cells, rows: list[Cells]) -> None:
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, tuple("---" for _ in columns))]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    print(f"## {title}", "", *lines, "", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
