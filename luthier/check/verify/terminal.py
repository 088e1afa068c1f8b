"""A verification's report in a terminal: the table of checks, what became of the rows, the first rows that failed."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from luthier.check.plan.terminal import ledger_line
from luthier.check.show.token_text import visible
from luthier.check.show.view import RowView, TokenView
from luthier.check.verify import findings
from luthier.writing import counted

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


def report_table(report: findings.VerifyReport) -> Group:
    """All of the report but the failed rows."""
    parts: list[RenderableType] = [_headline(report), Padding(_checks(report), (1, 0, 1, 2))]
    parts.append(Padding(Group(*_facts(report)), (0, 0, 1, 2)))
    parts.append(Padding(ledger_line(report.ledger.to_json()), (0, 0, 0, 2)))
    parts += [Padding(Text.assemble(("warning: ", "yellow"), warning), (0, 0, 0, 2)) for warning in report.warnings]
    return Group(*parts)


def failed_row(row: findings.FailedRow) -> Group:
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


def _headline(report: findings.VerifyReport) -> Text:
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


def _checks(report: findings.VerifyReport) -> Table:
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


def _check_row(result: findings.CheckResult) -> list[RenderableType]:
    name = result.check.value
    meaning = findings.MEANING[result.check]
    if result.violations:
        return [
            Text("✗", style="bold red"), Text(name, style="red"), f"{result.rows_checked:,}",
            Text(f"{result.violations:,}", style="bold red"), meaning,
        ]  # fmt: skip
    return [Text("✓", style="green"), name, f"{result.rows_checked:,}", Text("0", style="green"), meaning]


def _facts(report: findings.VerifyReport) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(f"rendered a second time by {report.judge}", style="dim")]
    idle = [result.check.value for result in report.checks if not result.rows_checked and not result.violations]
    if idle:
        lines.append(Text(f"not applicable to any row: {', '.join(idle)}", style="dim"))
    for method in findings.Method:
        if report.methods[method]:
            lines.append(
                Text(f"{counted(report.methods[method], 'row')} {findings.METHOD_MEANING[method]}", style="dim")
            )
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
    if report.stopped_early:
        lines.append(Text("stopped at --max-failures: the rows after this were not read", style="yellow"))
    return lines


def _around(view: RowView, violation: findings.Violation) -> Table:
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


def _token_row(token: TokenView, *, here: bool, expected: findings.Token | None) -> list[RenderableType]:
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


def _expected(token: findings.Token | None) -> Text:
    return Text("") if token is None else Text(f"{token.id} {visible(token.text)}", style="bold")
