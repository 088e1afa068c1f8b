"""A comparison of two runs, in a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from luthier.check.diff import CHARACTERS_PER_TOKEN, Change, Excerpt, ExcerptToken, repeats
from luthier.check.diff.runs import RowChange, RunDiff
from luthier.check.show import CLOSE, OPEN, lines_visible, visible
from luthier.check.show.html import render, spaces_visible
from luthier.terminal import plain_table
from luthier.writing import counted, shortened

TARGET, CHANGED = "bold green", "bold reverse yellow"
LONGEST_VALUE = 60  # characters of a setting
NUM_AROUND = 8  # tokens ahead of the first difference; twice as many behind it

STYLES: Mapping[Change, str] = {
    Change.SAME: "green",
    Change.TOKENS: "bold yellow",
    Change.TARGETS: "bold yellow",
    Change.WEIGHTS: "bold yellow",
    Change.REFUSED_A: "bold red",
    Change.REFUSED_B: "bold red",
    Change.REFUSED_BOTH: "dim",
    Change.MISSING_A: "bold red",
    Change.MISSING_B: "bold red",
}


def diff_report(diff: RunDiff) -> Group:
    """The whole comparison: settings, counts, reasons, and the first rows of each kind of change."""
    parts: list[RenderableType] = [
        Text.assemble(("A ", "bold"), diff.a, "\n", ("B ", "bold"), diff.b),
        Padding(_settings(diff), (1, 0, 0, 2)),
        Padding(_counts(diff), (1, 0, 0, 2)),
    ]
    for name, reasons in (("A", diff.reasons_a), ("B", diff.reasons_b)):
        if reasons:
            words = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
            parts.append(Padding(Text(f"refused in {name}: {words}", style="red"), (0, 0, 0, 2)))
    for row in diff.shown:
        parts.append(Padding(Group(*_row(row, diff.unit)), (1, 0, 0, 0)))
    return Group(*parts, Text(""), verdict(diff))


def verdict(diff: RunDiff) -> Text:
    """One line: whether anything changes."""
    if not diff.num_different:
        return Text(
            f"Nothing changes: {counted(diff.num_rows, 'row gives', 'rows give')} the same tokens, "
            f"targets and weights.",
            style="green",
        )
    return Text(
        f"{diff.num_different:,} of {counted(diff.num_rows, 'row changes', 'rows change')}.", style="bold yellow"
    )


def _settings(diff: RunDiff) -> RenderableType:
    if not diff.settings:
        return Text("model, data, template and media are set alike", style="dim")
    table = plain_table("setting", "A", "B", gap=2)
    for setting in diff.settings:
        table.add_row(setting.key, _short(setting.a), Text(_short(setting.b), style="yellow"))
    return table


def _counts(diff: RunDiff) -> Group:
    table = plain_table(Column(justify="right"), "", gap=2)
    table.add_row(f"{diff.num_rows:,}", Text.assemble("rows, matched ", (diff.pairing.value, "dim")))
    for change, count in diff.counts.items():
        if count or change in (Change.SAME, Change.TOKENS, Change.TARGETS, Change.WEIGHTS):
            words = Text(change.words(unit=diff.unit))
            if change is Change.TOKENS and count:
                words.append(
                    f" · in {diff.num_same_answers:,} of them the text that is learned is the same", style="dim"
                )
            table.add_row(Text(f"{count:,}", style=STYLES[change] if count else "dim"), words)
    if not diff.tokens_a and not diff.tokens_b:
        return Group(table, Text("\nno row is encoded on both sides, so their tokens are not compared", style="dim"))
    sums = plain_table("of rows on both sides", numbers=("A", "B", "change"), gap=2)
    for name, one, other in (("tokens", diff.tokens_a, diff.tokens_b), ("targets", diff.targets_a, diff.targets_b)):
        sums.add_row(name, f"{one:,}", f"{other:,}", f"{other - one:+,}" if other != one else "0")
    return Group(table, Text(""), sums)


def _row(row: RowChange, unit: str) -> Iterator[RenderableType]:
    where = row.address_a or row.address_b or ""
    if row.address_a and row.address_b and row.address_a != row.address_b:
        where = f"{row.address_a} = {row.address_b}"
    yield Text.assemble((where, "bold"), " · ", (row.change.words(unit=unit), STYLES[row.change]))
    for name, reason in (("A", row.reason_a), ("B", row.reason_b)):
        if reason is not None:
            yield Padding(Text(f"{name} refuses it: {reason}", style="red"), (0, 0, 0, 2))
    first = row.first
    if first is None:
        return
    facts = (
        f"first at {unit} {first.index} of segment {first.segment} · A "
        f"{counted(row.tokens_a, 'token')}, {counted(row.targets_a, 'target')} "
        f"· B {counted(row.tokens_b, 'token')}, {counted(row.targets_b, 'target')}"
    )
    yield Padding(Text(facts, style="dim"), (0, 0, 0, 2))
    for name, excerpt in (("A", first.a), ("B", first.b)):
        yield Padding(Text.assemble((f"{name}  ", "bold"), _fact(excerpt, unit)), (0, 0, 0, 2))
        if excerpt is not None:
            yield Padding(_ExcerptText(excerpt), (0, 0, 0, 5))


def _fact(excerpt: Excerpt | None, unit: str) -> Text:
    """``token 17  id 151667  '<think>'  target``: what stands at the first difference."""
    if excerpt is None:
        return Text("has no such segment", style="red")
    place = excerpt.index + excerpt.at
    if excerpt.at >= len(excerpt.units):
        return Text(f"has ended: its segment has {excerpt.num_units} {unit}s", style="red")
    at = excerpt.units[excerpt.at]
    target = ("target" if at.weight == 1 else f"target ×{at.weight:g}") if at.target else "only read"
    number = "" if at.id is None else f"id {at.id}  "
    return Text.assemble(
        f"{unit} {place}  {number}", (repr(at.text), "bold"), "  ", (target, "green" if at.target else "dim")
    )


class _ExcerptText:
    """The text around a difference: green is learned, where it differs is marked; brackets where there is no colour."""

    def __init__(self, excerpt: Excerpt) -> None:
        self._excerpt = excerpt

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        has_colour = console.color_system is not None and not console.no_color
        excerpt = self._excerpt
        around = NUM_AROUND * (1 if excerpt.units and excerpt.units[0].id is not None else CHARACTERS_PER_TOKEN)
        begin = max(0, excerpt.at - around)
        units = excerpt.units[begin : excerpt.at + 2 * around]
        text = Text("… " if excerpt.index + begin else "", overflow="fold")
        before = False
        for place, unit, count in repeats(units, at=excerpt.at - begin):
            is_first = begin + place == excerpt.at
            if not has_colour and unit.target is not before:
                text.append(OPEN if unit.target else CLOSE)
            if not has_colour and is_first:
                text.append("►")
            text.append(visible(unit.text) or "⋯", style=_style(unit, is_first=is_first))
            text.append(f"×{count} " if count > 1 else "", style="dim")
            before = unit.target
        text.append(CLOSE if before and not has_colour else "")
        text.append(" …" if begin + len(units) < len(excerpt.units) or excerpt.is_cut else "", style="dim")
        yield text


def _style(unit: ExcerptToken, *, is_first: bool) -> str:
    if is_first:
        return CHANGED
    return TARGET if unit.target else ""


def _short(value: str) -> str:
    return shortened(visible(value), LONGEST_VALUE)


# --------------------------------------------------------- A comparison of two runs as one page that needs nothing else


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


def _piece(units: Sequence[ExcerptToken], place: int, *, count: int) -> _ExcerptPiece:
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
