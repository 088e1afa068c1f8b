"""How counts are told: "1 row", never "1 rows"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from luthier.writing import counted

PACKAGE = Path(__file__).resolve().parents[1] / "luthier"

NOUNS = (
    "answers batches branches bytes characters checkpoints columns conversations devices entries epochs evaluations"
    " files frames groups ids images items layers lines losses messages modules packs pairs parameters pictures places"
    " positions processes prompts questions ranks requests rewards rows samples segments sequences shards sources steps"
    " targets threads tokens turns values videos weights words workers"
)
VERBS = "of|in|is|are|has|have|no|the|at|for|says|names|keep|counts|changes|answers|learns|ends|mean|with"
COUNT_OF = re.compile(rf" (?!(?:\w+ )?(?:{VERBS}) )(?:[a-z-]+ ){{0,2}}?(?:{NOUNS.replace(' ', '|')})\b")
LIMIT = re.compile(r"(\w+\.)*(_?[A-Z][A-Z_]+( \+ 1)?|(max|most)_\w+)")  # a number of ours, which is never 1
NO_COUNTS = (  # a rate, a share, a list, a number that was made a text before, a name
    "self.ratio", "estimate.tokens_per_second", "(rows_now - rows) / seconds", "_short(per_second)", "rows",
    "_lengths(stored)", "', '.join((str(len(path)) for path in paths))", "kind.name.lower()", "window or 'no'",
    "self.counts", "self.mixture.weights", "tokens_per_row[source]", "', '.join((f'{size:,}' for size in num_rows))",
    "role", "message.role", "_number(chars)", "_number(items)", "size(call.value)", "len(filled.blueprint.paths)",
    "longer", "path", "self.client.url", "request.full_url", "number",
)  # fmt: skip


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (counted(1, "row"), "1 row"),
        (counted(0, "row"), "0 rows"),
        (counted(1000, "entry", "entries"), "1,000 entries"),
        (counted(1, "row fails", "rows fail"), "1 row fails"),
        (counted(1.0, "epoch"), "1 epoch"),
        (counted(0.5, "epoch"), "0.5 epochs"),
    ],
)
def test_a_count_of_one_is_singular(told: str, wanted: str) -> None:
    assert told == wanted


def bare_counts(source: str) -> Iterator[str]:
    """Numbers that are told before a noun in the plural, whatever they are: ``{len(rows)} rows``."""
    tree = ast.parse(source)
    for us in [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]:
        us.msg = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        for number, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(number, ast.FormattedValue) and isinstance(text, ast.Constant):
                what = ast.unparse(number.value)
                if (
                    COUNT_OF.match(str(text.value))
                    and number.conversion == -1
                    and not LIMIT.fullmatch(what)
                    and what not in NO_COUNTS
                ):
                    yield f"{what}{str(text.value)[:40]}"


def test_no_message_tells_a_count_but_by_counted() -> None:
    assert list(bare_counts('f"{len(rows)} held-out rows are trained"')) == ["len(rows) held-out rows are trained"]
    found = [
        f"{path.relative_to(PACKAGE)}: {told}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for told in bare_counts(path.read_text())
    ]
    assert found == []
