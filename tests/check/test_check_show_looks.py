"""How views look: in a terminal with and without colour, and as a page that no text can break out of."""

from __future__ import annotations

import json
import re
from io import StringIO

import numpy as np
from markupsafe import Markup
from rich.console import Console

from luthier.check.show.html import page_html, tokens_html
from luthier.check.show.token_origins import PROMPT, STOP, SegmentOrigin, TokenOrigin
from luthier.check.show.view import RowView, show_pack
from luthier.check.terminal import RowText, TokenTable
from luthier.records import Address, Pack, Segment

SCRIPT = "<script>alert(1)</script>"
USER, PROMPT_OWNER = (
    TokenOrigin(message=0, role="user", field="content"),
    TokenOrigin(message=1, role="assistant", field=PROMPT),
)
ANSWER, STOP_OWNER = (
    TokenOrigin(message=1, role="assistant", field="content"),
    TokenOrigin(message=1, role="assistant", field=STOP),
)


class Characters:
    """A token per character, 1 and 2 are control tokens."""

    def decode(self, ids) -> str:
        return "".join({1: "<|end|>", 2: "<|begin|>"}.get(i) or chr(i) for i in map(int, ids))

    def token(self, token_id: int) -> str:
        return self.decode([token_id])


def view_of(
    *turns: tuple[str, str], weight: float = 1.0, finding: str | None = None, title: str = "pack 1", num_runs: int = 1
) -> RowView:
    """A pack with a segment for each question and answer: ``question <|begin|> answer <|end|>``."""
    segments, origins = [], []
    for row, (question, answer) in enumerate(turns, start=1):
        ids = [*map(ord, question), 2, *map(ord, answer), 1]
        target = [False] * (len(question) + 1) + [True] * (len(answer) + 1)
        segments.append(
            Segment(
                input_ids=np.array(ids, dtype=np.int32),
                target=np.array(target),
                weight=None if weight == 1 else np.full(len(ids), weight, dtype=np.float32),
                address=Address(file="rows.jsonl", row=row),
            )
        )
        owners = (*[USER] * len(question), PROMPT_OWNER, *[ANSWER] * len(answer), STOP_OWNER)
        known = SegmentOrigin(run=1, num_runs=num_runs, start=0, run_tokens=len(ids), owners=owners)
        unknown = SegmentOrigin(run=1, num_runs=num_runs, start=0, run_tokens=len(ids), finding=finding)
        origins.append(known if finding is None else unknown)
    control = frozenset([1, 2])
    return show_pack(Pack(segments=tuple(segments)), Characters(), title=title, control=control, origins=origins)


def terminal(*renderables, width: int = 80, colour: bool = False) -> str:
    file = StringIO()
    console = Console(
        width=width,
        file=file,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        _environ={},  # the tests' own NO_COLOR or COLUMNS must not matter
    )
    console.print(*renderables)
    return file.getvalue()


def page_data(page: str) -> list[dict]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


# ------------------------------------------------------------------------------------------------------- terminal


def test_targets_stand_in_brackets_where_there_is_no_colour_and_only_there() -> None:
    view = view_of(("qq", "abc"))
    assert "qq<|begin|>⟦abc<|end|>⟧" in terminal(RowText(row=view))
    coloured = terminal(RowText(row=view), colour=True)
    assert "⟦" not in coloured and "\x1b[1;32mabc" in coloured  # bold green


def test_no_color_in_the_environment_brings_the_brackets() -> None:
    console = Console(width=80, file=(file := StringIO()), force_terminal=True, _environ={"NO_COLOR": "1"})
    console.print(RowText(row=view_of(("qq", "abc"))))
    assert "⟦" in file.getvalue()


def test_everything_fits_into_80_columns() -> None:
    view = view_of(("q" * 200 + "你好" * 60, "a" * 90), num_runs=3)
    for text in (terminal(RowText(row=view)), terminal(TokenTable(row=view))):
        assert max(Console().measure(line).maximum for line in text.splitlines()) <= 80
        assert "run 1 of 3" in " ".join(text.split())


def test_the_table_has_a_line_for_every_token_with_its_owner_and_label() -> None:
    lines = terminal(TokenTable(row=view_of(("q", "é"), weight=0.5)), width=120).splitlines()
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines if re.match(r"\s*\d", line)]
    assert cells == [
        ["0", "113", "q", "0 user · content", "0", "–"],
        ["1", "2", "<|begin|>", "1 assistant · template (prompt)", "1", "233"],
        ["2", "233", "é", "1 assistant · content", "✓ ×0.5", "2", "1"],
        ["3", "1", "<|end|>", "1 assistant · stop", "✓ ×0.5", "3", "–"],
    ]


def test_no_text_is_read_as_markup_of_the_terminal() -> None:
    text = terminal(RowText(row=view_of(("[red]q[/]\n", "\x1b[31m"))))
    assert "[red]q[/]↵" in text and "␛[31m" in text and "\x1b" not in text


def test_long_rows_are_cut_and_the_rest_is_counted() -> None:
    assert "… 43 more tokens" in terminal(RowText(row=view_of(("q" * 50, "a")), max_tokens=10))


def test_a_finding_is_told_in_the_terminal() -> None:
    view = view_of(("q", "a"), finding="token 3 is another one")
    assert view.findings == ["token 3 is another one"]
    assert "! token 3 is another one" in terminal(RowText(row=view))
    assert "! " not in terminal(RowText(row=view_of(("q", "a"))))


def test_a_terminal_without_colour_has_all_text_and_marks_what_is_learned() -> None:
    shown = terminal(RowText(row=view_of(("q\n", "ab"), ("r", "c"))))
    text = "\n".join(line.strip() for line in shown.splitlines())
    assert "q↵\n<|begin|>⟦ab<|end|>⟧" in text and "r<|begin|>⟦c<|end|>⟧" in text
    assert text.startswith("pack 1 · 10 tokens · 5 targets (50.0 %) · 2 segments")


# ----------------------------------------------------------------------------------------------------------- page


def test_user_text_never_becomes_markup_or_script() -> None:
    class Hostile(Characters):
        def decode(self, ids) -> str:
            return SCRIPT + '" onload="x' if len(ids) else ""

    segment = Segment(
        input_ids=np.array([3], dtype=np.int32), target=np.array([False]), address=Address(file=SCRIPT, row=1)
    )
    owner = TokenOrigin(message=0, role=SCRIPT, field=SCRIPT)
    origin = SegmentOrigin(run=1, num_runs=1, start=0, run_tokens=1, owners=(owner,), finding=SCRIPT)
    view = show_pack(Pack(segments=(segment,)), Hostile(), title=SCRIPT, origins=[origin])
    page = page_html([view], title=SCRIPT, facts={SCRIPT: SCRIPT})
    own = page_html([view_of(("q", "a"))], title="t")
    assert page.count("<script") == own.count("<script") == 2  # ours: the numbers, and what shows them
    assert SCRIPT not in page and SCRIPT not in tokens_html([view])
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 7  # title, heading, address, token, role, fact …
    assert page_data(page)[0]["names"] == [SCRIPT + '" onload="x']
    markup = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert '" onload=' not in markup and '" onload=' not in tokens_html([view])


def test_the_markup_check_can_fail() -> None:
    # what claims to be safe HTML is not escaped
    assert SCRIPT in page_html([view_of(("q", "a"))], title=Markup(SCRIPT))


def test_the_page_needs_nothing_else_and_runs_only_its_own_script() -> None:
    page = page_html([view_of(("q", "a"))], title="t")
    assert not re.search(r"https?://|<link|@import|url\(|<script src|innerHTML", page)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert re.fullmatch(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]{43}='", policy[1])


def test_the_policy_names_the_very_script_of_the_page() -> None:
    import base64
    import hashlib

    page = page_html([view_of(("q", "a"))], title="t")
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    changed = base64.b64encode(hashlib.sha256((script[1] + " ").encode()).digest()).decode()
    assert changed not in page


def test_targets_and_only_they_are_marked_and_the_mark_is_no_colour_alone() -> None:
    page = page_html([view_of(("qr", "ab"))], title="t")
    (text,) = re.findall(r'<div class="block v-assistant">.*?<div class="text">(.*?)</div>', page, re.DOTALL)
    assert re.findall(r"<b[^>]*>([^<]+)</b>", text) == ["a", "b", "&lt;|end|&gt;"]
    assert re.findall(r"<i[^>]*>([^<]+)</i>", text) == ["&lt;|begin|&gt;"]
    style = page[page.index("<style>") : page.index("</style>")]
    assert "underline" in re.findall(r"\.tokens b, \.key b \{([^}]*)\}", style)[0]


def test_the_numbers_of_the_page_are_those_of_the_view() -> None:
    view = view_of(("qr", "ab"), ("s", "c"), weight=0.5)
    for number, data in enumerate(page_data(page_html([view], title="t"))):
        tokens = view.of_segment(number)
        assert data["ids"] == [token.id for token in tokens]
        assert [data["owners"][owner] for owner in data["owner"]] == [str(token.owner) for token in tokens]
        assert [mark == "1" for mark in data["target"]] == [token.target for token in tokens]
        assert data["weights"] == [token.weight for token in tokens]
        assert data["first"] == tokens[0].index and data["segment"] == number
        # null is what follows from the ids and targets
        assert data["positions"] is None and [token.position for token in tokens] == list(range(len(tokens)))
        following = [after.id if after.target else None for after in tokens[1:]] + [None]
        assert data["labels"] is None and [token.label for token in tokens] == following


def test_what_is_no_consequence_is_written_into_the_page() -> None:
    from dataclasses import replace

    view = view_of(("q", "a"))
    moved = tuple(replace(token, position=token.position + 7, label=5) for token in view.tokens)
    (data,) = page_data(page_html([replace(view, tokens=moved)], title="t"))
    assert data["positions"] == [7, 8, 9, 10] and data["labels"] == [5, 5, 5, 5]


def test_messages_are_blocks_with_number_and_role() -> None:
    html = tokens_html([view_of(("q", "a"))])
    blocks = re.findall(
        r'<div class="block v-(\w+)[^"]*"><div class="who"><span class="number">(\d+)</span><strong>(\w+)', html
    )
    assert blocks == [("user", "0", "user"), ("assistant", "1", "assistant")]


def test_weights_and_findings_and_facts_are_on_the_page() -> None:
    page = page_html([view_of(("q", "a"), weight=0.25)], title="t", facts={"model": "m"})
    assert 'class="weighted" style="--w:0.25"' in page and "<dt>model</dt><dd>m</dd>" in page
    assert 'role="alert"' not in page
    found = page_html([view_of(("q", "a"), finding="not what rendering gives")], title="t")
    assert 'role="alert">! not what rendering gives' in found


def test_hidden_spaces_are_shown_and_words_are_left_alone() -> None:
    from luthier.check.show.html import spaces_visible

    assert [spaces_visible(text) for text in (" the", " ", "a  b", "a b ")] == [" the", "·", "a··b", "a b "]


def test_a_page_of_twenty_thousand_tokens_stays_small() -> None:
    page = page_html([view_of(("word " * 2000, "text " * 2000))], title="t")
    assert page_data(page)[0]["ids"].__len__() == 20_002
    assert len(page) < 2_000_000
