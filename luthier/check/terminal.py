"""What ``luthier show`` and ``luthier verify`` print in a terminal.

Of a `RowView` the text with its targets and owners in colour, and a table of every token. Where there is no colour
(NO_COLOR, a pipe), targets stand in brackets: nothing is said by colour alone. Of a verification the table of checks,
what became of the rows, and the first rows that failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from luthier.check.plan.terminal import ledger_line
from luthier.check.show import CLOSE, CLOSE_ITEM, OPEN, OPEN_ITEM, lines_visible, visible
from luthier.check.show.token_origins import MEDIA, TEMPLATE
from luthier.check.show.view import RowView, SegmentView, TokenView, shown_spans, span_text
from luthier.check.verify import MEANING, METHOD_MEANING, CheckResult, FailedRow, Method, Token, VerifyReport, Violation
from luthier.records import MediaItem
from luthier.rendering import kind_of_media
from luthier.writing import counted

TARGET = "bold green"
CONTROL_TARGET = "bold green underline"
CONTROL = "magenta"
ITEM = "bold white on dark_cyan"
FINDING = "bold red"
WIDE = 104  # columns; below it the table has one space between its columns
# What is only read has the colour of who said it.
VOICES: Mapping[str, str] = {
    "system": "yellow",
    "user": "blue",
    "assistant": "",
    "tool": "cyan",
    "tools": "dim yellow",
    "text": "",
    MEDIA: "dark_cyan",
    TEMPLATE: "dim",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowText:
    """The row's text, segment by segment, targets in green or, where the terminal has no colours, in brackets; cut
    after ``max_tokens`` tokens, which is said."""

    row: RowView
    max_tokens: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        has_colour = console.color_system is not None and not console.no_color
        row = self.row
        yield Text.assemble((row.title, "bold"), (f" · {_facts(row)}", "dim"))
        yield Padding(_legend(row, has_colour=has_colour), (0, 0, 1, 2))
        shown = row.tokens if self.max_tokens is None else row.tokens[: _num_shown(row, self.max_tokens)]
        for number, segment in enumerate(row.segments):
            tokens = [token for token in shown if token.segment == number]
            if not tokens:
                continue
            if len(row.segments) > 1:
                yield Padding(Text(_segment_line(row, number), style="dim"), (0, 0, 0, 2))
            for note in _notes(segment):
                yield Padding(note, (0, 0, 0, 2))
            yield Padding(_segment_text(tokens, row.media, has_colour=has_colour), (0, 0, 1, 2))
        if len(shown) < len(row.tokens):
            yield Padding(Text(f"… {counted(len(row.tokens) - len(shown), 'more token')}", style="dim"), (0, 0, 0, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """Every token of the row with its numbers, one table a segment, which fits into 80 columns; a character split over
    tokens stands at its first one."""

    row: RowView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, segment in enumerate(self.row.segments):
            tokens = self.row.of_segment(number)
            yield Text(_segment_line(self.row, number), style="bold")
            yield from _notes(segment)
            yield _segment_table(tokens, self.row.media, is_wide=options.max_width >= WIDE)


def _facts(row: RowView) -> str:
    """``120 tokens · 31 targets (25.8 %) · 2 segments``."""
    count = len(row.tokens)
    parts = [
        counted(count, "token"),
        f"{counted(row.num_targets, 'target')} ({100 * row.num_targets / count:.1f} %)",
    ]
    if len(row.segments) > 1:
        parts.append(counted(len(row.segments), "segment"))
    if row.media:
        parts.append(counted(len(row.media), "media item"))
    if row.num_padding:
        parts.append(f"{row.num_padding:,} padding")
    return " · ".join(parts)


def _segment_line(row: RowView, number: int) -> str:
    """``segment 0 · rows.jsonl:7 · 60 tokens · 12 targets``."""
    segment = row.segments[number]
    return (
        f"segment {number} · {segment.address} · {counted(segment.num_tokens, 'token')} · "
        f"{counted(segment.num_targets, 'target')}"
    )


def _notes(segment: SegmentView) -> Iterator[Text]:
    for note in segment.notes:
        yield Text(note, style="italic dim")
    if segment.finding is not None:
        yield Text(f"! {segment.finding}", style=FINDING)


def _legend(row: RowView, *, has_colour: bool) -> Text:
    targets = {token.control for token in row.tokens if token.target}
    word = "scored" if row.is_compared else "learned"
    entries = [(word, TARGET)] if has_colour else [(f"{OPEN}{word}{CLOSE}", "")]
    if has_colour:
        entries += [(f"control token, {word}", CONTROL_TARGET)] if True in targets else []
        beside = [token for token in row.tokens if token.media is None and not token.target]
        entries += [("control token", CONTROL)] if any(token.control for token in beside) else []
        entries += [("media item", ITEM)] if row.media else []
        present = {_voice(token) for token in beside if not token.control}
        entries += [(voice, style) for voice, style in VOICES.items() if voice in present]
    legend = Text("   ").join(Text(name, style=style) for name, style in entries)
    return legend.append("   the rest is only read", style="dim") if not has_colour else legend


def _num_shown(row: RowView, max_tokens: int) -> int:
    """How many tokens are within the limit; a media item counts as one, or it would hide what is asked of it."""
    left, found = max_tokens, 0
    for span in shown_spans(row.tokens):
        left -= 1 if span[0].media is not None else len(span)
        if left < 0:
            break
        found += len(span)
    return found


def _segment_table(tokens: Sequence[TokenView], media: Sequence[MediaItem], *, is_wide: bool) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2 if is_wide else 1, 0, 0))
    for name in ("index", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", min_width=10, max_width=40)
    table.add_column("owner", no_wrap=True, overflow="ellipsis")
    table.add_column("target", no_wrap=True)
    for name in ("position", "label") if is_wide else ("pos", "label"):
        table.add_column(name, justify="right", no_wrap=True)
    for span in shown_spans(tokens):
        if span[0].media is not None:
            table.add_row(*_item_row(span, media))
            continue
        for token in span:
            table.add_row(
                Text(str(token.index), style="dim"),
                str(token.id),
                Text(visible(token.text), style=_style(token)) if token.num_tokens else Text("⋯", style="dim"),
                Text("–" if token.owner is None else str(token.owner), style=VOICES.get(_voice(token), "")),
                Text(_target_words(token), style="green"),
                token.place,
                Text("–", style="dim") if token.label is None else str(token.label),
            )
    return table


def _item_row(span: Sequence[TokenView], media: Sequence[MediaItem]) -> list[RenderableType]:
    """All tokens of a media item in one line, which says how many they are: the numbers of the first, the slot's id."""
    first, last = span[0], span[-1]
    assert first.media is not None, "asked only of a media item"
    (slot, _), *_ = Counter(token.id for token in span).most_common(1)
    return [
        Text(str(first.index), style="dim"),
        str(slot),
        Text(f"{OPEN_ITEM}{kind_of_media(media[first.media].media)} ×{len(span):,}{CLOSE_ITEM}", style=ITEM),
        Text("–" if first.owner is None else str(first.owner), style=VOICES[MEDIA]),
        "",
        first.place,
        Text("–", style="dim") if last.label is None else str(last.label),
    ]


def _target_words(token: TokenView) -> str:
    if not token.target:
        return ""
    return "✓" if token.weight == 1 else f"✓ ×{token.weight:g}"


def _segment_text(tokens: Sequence[TokenView], media: Sequence[MediaItem], *, has_colour: bool) -> Text:
    text = Text(overflow="fold")

    def looks(span: Sequence[TokenView]) -> tuple[int | None, str]:
        first = span[0]
        return first.media, _look(first) if has_colour else OPEN if first.target else ""

    for (item, look), group in groupby(shown_spans(tokens), key=looks):
        words = lines_visible("".join(span_text(span, media) for span in group))
        if item is not None:  # on a line of its own; breaks of the text itself have a sign
            text.append("\n" if text.plain and not text.plain.endswith("\n") else "")
            text.append(words, style=look if has_colour else "").append("\n")
        elif has_colour:
            text.append(words, style=look)
        else:
            text.append(f"{OPEN}{words}{CLOSE}" if look else words)
    return text


def _look(token: TokenView) -> str:
    return _style(token) if token.media is None else ITEM


def _style(token: TokenView) -> str:
    if token.target:
        return CONTROL_TARGET if token.control else TARGET
    return CONTROL if token.control else VOICES.get(_voice(token), "")


def _voice(token: TokenView) -> str:
    return "" if token.owner is None else token.owner.voice


TOKENS_AROUND = 6  # shown before and after the token that differs
VIOLATIONS_SHOWN = 6  # of one row
STRINGS_SHOWN = 8  # control strings that are named

_NOTES = {
    "seam": "answers whose first letters a tokenizer would merge with the prompt; training keeps them apart, as "
    "inference does",
    "derived": "answers that history shows in another form than inference does; they were read behind their prompt",
    "elsewhere_rows": "rows learned in one rendering (template.history: one_rendering), which inference does not show",
    "elsewhere_answers": "answers of these have another context, or another form, at inference",
    "elsewhere_tokens": "target tokens of these answers",
    "long_rows": "long conversations (over 64 answers): judged by their first, their last and some random answers",
    "drawn_answers": "answers of these that were rendered and judged token for token",
    "passed_answers": "answers of these that were not: they are learned once, whole and in order, but their context "
    "was not compared",
    "shortened_rows": "rows that are too long, verified as the shorter conversations that data.overflow: keep_answer "
    "leaves of them; their messages are counted in these",
    "prompts_asked": "prompts compared with the server's",
    "decoded": "sequences whose media were decoded and given, with their text, to the model's processor",
    "marks_vllm_drops": "rows with videos whose outer marks (<|vision_start|> …) transformers leaves and vLLM takes "
    "away: training is transformers' inference there, not vLLM's (docs/media.md)",
    "given_runs": "runs of targets in rows of token ids",
    "given_open_runs": "of these end in no token on which inference stops",
    "given_control": "control tokens in rows of token ids: whether the template or a text wrote them cannot be told",
    "given_otherwise": "rows whose ids are not those that the tokenizer gives their text: another may have made them",
    "media_not_asked": "rows with media, which are not compared with the server",
    "not_asked": "rows not compared with the server: it cannot tell their control strings from the template's",
}


def report_table(report: VerifyReport) -> Group:
    """All of the report but the failed rows."""
    parts: list[RenderableType] = [_headline(report), Padding(_checks(report), (1, 0, 1, 2))]
    parts.append(Padding(Group(*_counted_facts(report)), (0, 0, 1, 2)))
    parts.append(Padding(ledger_line(report.ledger.to_json()), (0, 0, 0, 2)))
    parts += [Padding(Text.assemble(("warning: ", "yellow"), warning), (0, 0, 0, 2)) for warning in report.warnings]
    return Group(*parts)


def failed_row(row: FailedRow) -> Group:
    """What is wrong with one row, and the tokens around the first place where it differs."""
    lines: list[RenderableType] = [Text(row.address, style="bold")]
    for violation in row.violations[:VIOLATIONS_SHOWN]:
        message = "" if violation.message is None else f"messages[{violation.message}] "
        lines.append(Text.assemble("  ", (violation.check.value, "bold red"), f"  {message}{violation.what}"))
    if len(row.violations) > VIOLATIONS_SHOWN:
        lines.append(Text(f"  … and {len(row.violations) - VIOLATIONS_SHOWN} more", style="dim"))
    placed = next((v for v in row.violations if v.index is not None and v.run is not None), None)
    if placed is not None and placed.run is not None and placed.run < len(row.views):
        lines.append(Padding(_around(row.views[placed.run], placed), (1, 0, 1, 4)))
    return Group(*lines)


def _headline(report: VerifyReport) -> Text:
    rows = counted(report.ledger.prepared, "row")
    scope = f"{rows} of {report.num_rows:,}" if report.num_rows is not None else rows
    facts = (
        f"{scope}, {counted(report.num_turns, 'answer')}, {counted(report.num_targets, 'target')} "
        f"in {report.seconds:.1f} s"
    )
    verdict = (
        ("every row passes", "bold green")
        if report.ok
        else (counted(report.num_failed_rows, "row fails", "rows fail"), "bold red")
    )
    if report.refusal is not None and not report.num_failed_rows:
        verdict = ("training would not begin", "bold red")
    if not report.ledger.prepared:
        verdict = ("nothing was verified", "bold red")
    return Text.assemble((f"{report.split} data: ", "bold"), verdict, (f"   {facts}", "dim"))


def _checks(report: VerifyReport) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("violations", justify="right", no_wrap=True)
    table.add_column("what it means", style="dim", overflow="fold")
    for result in report.checks:
        if result.rows_checked or result.violations:
            table.add_row(*_check_row(result))
    return table


def _check_row(result: CheckResult) -> list[RenderableType]:
    name = result.check.value
    meaning = MEANING[result.check]
    if result.violations:
        return [
            Text("✗", style="bold red"), Text(name, style="red"), f"{result.rows_checked:,}",
            Text(f"{result.violations:,}", style="bold red"), meaning,
        ]  # fmt: skip
    return [Text("✓", style="green"), name, f"{result.rows_checked:,}", Text("0", style="green"), meaning]


def _counted_facts(report: VerifyReport) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(f"rendered a second time by {report.judge}", style="dim")]
    idle = [result.check.value for result in report.checks if not result.rows_checked and not result.violations]
    if idle:
        lines.append(Text(f"not applicable to any row: {', '.join(idle)}", style="dim"))
    for method in Method:
        if report.methods[method]:
            lines.append(Text(f"{counted(report.methods[method], 'row')} {METHOD_MEANING[method]}", style="dim"))
    if report.control_strings:
        count = report.control_strings.total()
        named = ", ".join(f"{token} {n:,}×" for token, n in report.control_strings.most_common(STRINGS_SHOWN))
        lines.append(
            Text(
                f"{counted(count, 'control string', 'control strings')} in the "
                f"rows' own text, encoded as ordinary text: {named}"
            )
        )
    for note, count in report.notes.items():
        if count:
            lines.append(Text(f"{count:,} {_NOTES.get(note, note)}", style="dim"))
    fits = "within" if report.longest_run <= report.max_length else "over"
    lines.append(
        Text(f"longest sequence {counted(report.longest_run, 'token')}, {fits} data.max_length {report.max_length:,}")
    )
    lines += [Text(remark, style="dim") for remark in report.remarks]
    if report.stopped_early:
        lines.append(Text("stopped at --max-failures: the rows after this were not read", style="yellow"))
    return lines


def _around(view: RowView, violation: Violation) -> Table:
    """The tokens near the place, one a line; the one that differs is pointed at."""
    assert violation.index is not None, "asked only of violations that have a place"
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("index", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis")
    table.add_column("", no_wrap=True)
    table.add_column("expected", overflow="fold")
    low, high = violation.index - TOKENS_AROUND, violation.index + TOKENS_AROUND
    for token in view.tokens[max(low, 0) : high + 1]:
        here = token.index == violation.index
        table.add_row(*_token_row(token, here=here, expected=violation.expected))
    if violation.index >= len(view.tokens):
        end = Text("(end)", style="red")
        table.add_row(Text("→", style="bold red"), str(violation.index), "", end, "", _expected(violation.expected))
    return table


def _token_row(token: TokenView, *, here: bool, expected: Token | None) -> list[RenderableType]:
    text = visible(token.text) if token.num_tokens else "⋯"
    style = "bold red" if here else "green" if token.target else ""
    return [
        Text("→" if here else "", style="bold red"),
        Text(str(token.index), style="dim"),
        str(token.id),
        Text(text, style=style),
        Text("target" if token.target else "", style="green"),
        _expected(expected) if here else "",
    ]


def _expected(token: Token | None) -> Text:
    return Text("") if token is None else Text(f"{token.id} {visible(token.text)}", style="bold")
