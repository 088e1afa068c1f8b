"""A comparison of two runs as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from luthier.check.diff.row_changes import Excerpt, ExcerptToken, repeats
from luthier.check.diff.runs import RowChange, RunDiff
from luthier.check.show.html import render, spaces_visible
from luthier.check.show.text import lines_visible

_MOST_IDS = 24  # that a piece tells in words


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExcerptPiece:
    """Neighbouring units that look alike: tokens, or characters."""

    text: str
    target: bool
    weight: float
    differs: bool
    words: str


def diff_html(diff: RunDiff) -> str:
    """The page: what was set differently, how many rows change, and the first rows of each kind, side by side."""
    return render(
        "diff.html.jinja",
        diff=diff,
        counts=[(change.words(unit=diff.unit), count, change.is_difference) for change, count in diff.counts.items()],
        rows=[_laid_out(row, diff.unit) for row in diff.shown],
    )


def _laid_out(row: RowChange, unit: str) -> dict[str, object]:
    first = row.first
    return {
        "row": row,
        "kind": row.change.words(unit=unit),
        "sides": []
        if first is None
        else [
            {
                "name": name,
                "tokens": tokens,
                "targets": targets,
                "excerpt": excerpt,
                "pieces": [] if excerpt is None else _pieces(excerpt),
            }
            for name, tokens, targets, excerpt in (
                ("A", row.tokens_a, row.targets_a, first.a),
                ("B", row.tokens_b, row.targets_b, first.b),
            )
        ],
    }


def _pieces(excerpt: Excerpt) -> list[_ExcerptPiece]:
    counted = repeats(excerpt.units, at=excerpt.at)
    found = []
    for (*_, is_alone), group in groupby(counted, key=_look):
        members = list(group)
        for told in [[one] for one in members] if is_alone else [members]:
            found.append(_piece([unit for _, unit, _ in told], excerpt.index + told[0][0], count=told[0][2]))
    return found


def _look(told: tuple[int, ExcerptToken, int]) -> tuple[bool, float, bool, bool]:
    """What neighbours must have in common to be one piece; tokens that repeat stand alone, with their count."""
    _, unit, count = told
    return unit.target, unit.weight, unit.differs, count > 1


def _piece(units: Sequence[ExcerptToken], place: int, *, count: int = 1) -> _ExcerptPiece:
    """``count``: how many such tokens stand here."""
    first = units[0]
    text = "".join(unit.text for unit in units)
    number = max(count, len(units))
    tokens = f"token {place}" if number == 1 else f"tokens {place} to {place + number - 1}"
    ids = " ".join(str(unit.id) for unit in units[:_MOST_IDS]) + (" …" if len(units) > _MOST_IDS else "")
    words = f"character {place}" if first.id is None else f"{tokens} · id {ids}"
    words += f" · target, weight {first.weight:g}" if first.target else " · only read"
    return _ExcerptPiece(
        text=(lines_visible(spaces_visible(text)) or "⋯") + (f" ×{count}" if count > 1 else ""),
        target=first.target,
        weight=first.weight,
        differs=first.differs,
        words=words + (" · differs" if first.differs else ""),
    )
