"""What changes between two runs is counted once, under the right name, and shown where it begins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup
from rich.console import Console

from luthier.check.diff import Change, Comparison, ExcerptToken, Lesson, repeats
from luthier.check.diff.runs import (
    EncodedSide,
    Pairing,
    RunDiff,
    changed_settings,
    diff_runs,
    lesson_of,
    pairing_of,
    pairs,
)
from luthier.check.diff.terminal import diff_html, diff_report
from luthier.config.choices import Overflow
from luthier.config.inputs import SourceConfig
from luthier.config.loading import load_config, load_sections
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowDropped, RowError
from luthier.records import Address, Branch, Sample, Segment
from luthier.sources import RowBytes
from luthier.sources.source import RowReader, Source, open_sources


class Characters:
    """A token per character."""

    def decode(self, ids) -> str:
        return "".join(chr(int(i)) for i in ids)

    def token(self, token_id: int) -> str:
        return chr(token_id)


class Words:
    """A token per word: the same texts in another vocabulary."""

    words = ("no such word", "q ", "yes", " sir", "!")

    def decode(self, ids) -> str:
        return "".join(self.words[int(i)] for i in ids)

    def token(self, token_id: int) -> str:
        return self.words[token_id]


def segment(text: str, *, learned: slice = slice(0), weight: float = 1.0) -> Segment:
    target = np.zeros(len(text), dtype=np.bool_)
    target[learned] = True
    weights = None if weight == 1 else np.full(len(text), weight, dtype=np.float32)
    return Segment(input_ids=np.array([ord(c) for c in text], dtype=np.int32), target=target, weight=weights)


def words(ids: list[int], *, learned: slice) -> Segment:
    target = np.zeros(len(ids), dtype=np.bool_)
    target[learned] = True
    return Segment(input_ids=np.array(ids, dtype=np.int32), target=target)


def lesson(*segments: Segment) -> Lesson:
    return Lesson(segments=segments)


REFUSED = Lesson(refusal=RowError("no_stop", "the reason"))
BY_IDS = Comparison(
    vocabulary_a=Characters(),
    vocabulary_b=Characters(),
    control_a=frozenset([ord("!")]),
    control_b=frozenset([ord("!")]),
    by_characters=False,
)
BY_CHARACTERS = Comparison(
    vocabulary_a=Characters(),
    vocabulary_b=Words(),
    control_a=frozenset([ord("!")]),
    control_b=frozenset([4]),
    by_characters=True,
)


# ---------------------------------------------------------------------------------------------------------- one row


@pytest.mark.parametrize(
    ("a", "b", "change"),
    [
        (lesson(segment("qa", learned=slice(1, 2))), lesson(segment("qa", learned=slice(1, 2))), Change.SAME),
        (lesson(segment("qa", learned=slice(1, 2))), lesson(segment("qb", learned=slice(1, 2))), Change.TOKENS),
        (lesson(segment("qa", learned=slice(1, 2))), lesson(segment("qaa", learned=slice(1, 2))), Change.TOKENS),
        (lesson(segment("qab", learned=slice(1, 2))), lesson(segment("qab", learned=slice(1, 3))), Change.TARGETS),
        (
            lesson(segment("qa", learned=slice(1, 2))),
            lesson(segment("qa", learned=slice(1, 2), weight=2)),
            Change.WEIGHTS,
        ),
        (lesson(segment("qa", learned=slice(1, 2)), segment("r")), lesson(segment("r")), Change.TOKENS),
        (REFUSED, lesson(segment("q")), Change.REFUSED_A),
        (lesson(segment("q")), REFUSED, Change.REFUSED_B),
        (REFUSED, REFUSED, Change.REFUSED_BOTH),
    ],
)
def test_each_kind_of_change_has_its_name(a: Lesson, b: Lesson, change: Change) -> None:
    assert BY_IDS.change(a, b) is change


def test_weights_of_what_is_not_learned_change_nothing() -> None:
    one, other = segment("qa", learned=slice(1, 2)), segment("qa", learned=slice(1, 2), weight=1.0)
    context = np.array([9.0, 1.0], dtype=np.float32)
    odd = Segment(input_ids=other.input_ids, target=other.target, weight=context)
    assert BY_IDS.change(lesson(one), lesson(odd)) is Change.SAME


def test_the_first_difference_is_where_an_insertion_begins_and_what_follows_is_alike() -> None:
    a, b = lesson(segment("ask: no", learned=slice(5, 7))), lesson(segment("ask: oh no", learned=slice(5, 10)))
    first = BY_IDS.first_difference(a, b, Change.TOKENS)
    assert first is not None and first.a is not None and first.b is not None
    assert (first.segment, first.index) == (0, 5)
    assert first.b.units[first.b.at].text == "o" and first.b.units[first.b.at].target
    assert "".join(unit.text for unit in first.b.units if unit.differs) == "oh "
    assert "".join(unit.text for unit in first.a.units if unit.differs) == ""
    assert "".join(unit.text for unit in first.a.units) == "ask: no"


def test_a_difference_at_the_end_of_one_side_has_no_unit_there() -> None:
    first = BY_IDS.first_difference(lesson(segment("qa")), lesson(segment("qab")), Change.TOKENS)
    assert first is not None and first.a is not None and first.b is not None
    assert first.a.at == len(first.a.units) == 2 and first.b.units[first.b.at].text == "b"


@pytest.mark.parametrize(
    ("change", "b", "index"),
    [
        (Change.TARGETS, segment("qabc", learned=slice(2, 4)), 1),
        (Change.WEIGHTS, segment("qabc", learned=slice(1, 4), weight=0.5), 1),
        (Change.TOKENS, segment("qaxc", learned=slice(3, 4)), 2),
    ],
)
def test_each_change_is_looked_for_in_what_changed(change: Change, b: Segment, index: int) -> None:
    a = lesson(segment("qabc", learned=slice(1, 4)))
    assert BY_IDS.change(a, lesson(b)) is change
    first = BY_IDS.first_difference(a, lesson(b), change)
    assert first is not None and first.index == index


def test_runs_that_both_have_are_set_aside() -> None:
    first_turn, last_turn = segment("qa", learned=slice(1, 2)), segment("qarb", learned=slice(3, 4))
    first = BY_IDS.first_difference(lesson(first_turn, last_turn), lesson(last_turn), Change.TOKENS)
    assert first is not None and first.b is None and first.a is not None
    assert (first.segment, first.index) == (0, 1)  # what is learned in the run that B has not
    assert "".join(unit.text for unit in first.a.units) == "qa"


def test_long_changes_are_shown_in_part_and_say_so() -> None:
    first = BY_IDS.first_difference(lesson(segment("x" * 5000)), lesson(segment("y" * 5000)), Change.TOKENS)
    assert first is not None and first.a is not None
    assert first.a.is_cut and len(first.a.units) < 400 and first.a.num_units == 5000


def test_other_ids_of_the_same_text_are_the_same() -> None:
    a = lesson(segment("q yes sir", learned=slice(2, 9)))
    assert BY_CHARACTERS.change(a, lesson(words([1, 2, 3], learned=slice(1, 3)))) is Change.SAME


def test_other_spans_of_the_same_text_are_other_targets() -> None:
    a = lesson(segment("q yes sir", learned=slice(2, 9)))
    b = lesson(words([1, 2, 3], learned=slice(1, 2)))
    assert BY_CHARACTERS.change(a, b) is Change.TARGETS
    first = BY_CHARACTERS.first_difference(a, b, Change.TARGETS)
    assert first is not None and first.index == 5 and first.a is not None and first.a.units[first.a.at].id is None


def test_other_text_in_another_vocabulary_is_other_tokens() -> None:
    a = lesson(segment("q yes sir", learned=slice(2, 9)))
    assert BY_CHARACTERS.change(a, lesson(words([1, 2], learned=slice(1, 2)))) is Change.TOKENS


def test_the_same_answer_under_another_prompt_is_told_apart_from_another_answer() -> None:
    a = lesson(segment("q yes sir!", learned=slice(2, 10)))
    assert BY_CHARACTERS.same_answers(a, lesson(words([2, 3, 4], learned=slice(0, 3))))
    assert not BY_CHARACTERS.same_answers(a, lesson(words([1, 2, 3], learned=slice(1, 2))))


# ------------------------------------------------------------------------------------------------------------ cuts


def tree() -> Sample:
    """Two runs: ``qa`` with 1 target, ``qbbbb`` with 4."""
    return Sample(
        input_ids=np.array([ord(c) for c in "qabbbb"], dtype=np.int32),
        target=np.array([False, True, True, True, True, True]),
        branches=(Branch(parent=-1, length=1), Branch(parent=0, length=1), Branch(parent=0, length=4)),
    )


@pytest.mark.parametrize(
    ("overflow", "kept"), [(Overflow.DROP, [2]), (Overflow.ERROR, [2]), (Overflow.TRUNCATE, [2, 3])]
)
def test_lessons_are_cut_as_training_cuts_them(overflow: Overflow, kept: list[int]) -> None:
    cut = lesson_of(tree(), load_sections(data={"train": "-", "max_length": 3, "overflow": overflow}))
    assert [len(one) for one in cut.segments] == kept and cut.refusal is None


@pytest.mark.parametrize("objective", ["dpo", "rm"])
def test_answers_that_are_compared_are_not_cut(objective: str) -> None:
    data = {"train": "-", "max_length": 3, "overflow": "truncate"}
    cut = lesson_of(tree(), load_sections(objective=objective, data=data))  # a prompt without a turn to spare
    assert cut.segments == () and cut.refusal is not None and cut.refusal.reason == "too_long"


def test_a_row_of_which_nothing_is_left_is_refused_for_the_reason() -> None:
    whole = Sample(
        input_ids=np.arange(9, dtype=np.int32), target=np.ones(9, np.bool_), branches=(Branch(parent=-1, length=9),)
    )
    cut = lesson_of(whole, load_sections(data={"train": "-", "max_length": 4}))
    assert cut.segments == () and isinstance(cut.refusal, RowDropped) and cut.refusal.reason == "too_long"


# ----------------------------------------------------------------------------------------------------- which is which


def chat(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"Q {number}"}, {"role": "assistant", "content": f"A {number}"}]}


def written(path: Path, rows: list[dict], **spelling: object) -> str:
    path.write_text("".join(json.dumps(row, **spelling) + "\n" for row in rows), encoding="utf-8")  # type: ignore[arg-type]
    return str(path)


def opened(path: str, **settings: object) -> list[Source]:
    return open_sources([SourceConfig(path=path, **settings)], seed=0)  # type: ignore[arg-type]


def places(found: Iterator) -> list[tuple[int | None, int | None]]:
    return [(pair.a and pair.a.address.row, pair.b and pair.b.address.row) for pair in found]


def test_the_same_files_are_matched_by_address(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [chat(n) for n in range(4)])
    assert pairing_of(opened(path), opened(path)) is Pairing.ADDRESS
    assert places(pairs(opened(path), opened(path))) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert pairing_of(opened(path), opened(path, max_rows=2)) is Pairing.CONTENT


def test_other_files_are_matched_by_content_whatever_the_order_and_the_spelling(tmp_path: Path) -> None:
    rows = [chat(n) for n in range(5)]
    a = written(tmp_path / "a.jsonl", [*rows, rows[1]])
    b = written(tmp_path / "b.jsonl", [rows[3], rows[1], rows[1], chat(9), rows[0]], sort_keys=True, indent=None,
                separators=(",", ":"))  # fmt: skip
    assert pairing_of(opened(a), opened(b)) is Pairing.CONTENT
    expected = [(1, 5), (2, 2), (3, None), (4, 1), (5, None), (6, 3), (None, 4)]
    assert places(pairs(opened(a), opened(b))) == expected


def test_a_sample_is_the_same_choice_wherever_the_rows_are(tmp_path: Path) -> None:
    rows = [chat(n) for n in range(40)]
    a, b = written(tmp_path / "a.jsonl", rows), written(tmp_path / "b.jsonl", rows[::-1])
    some = places(pairs(opened(a), opened(b), sample=7))
    assert len(some) == 7 and all(one is not None and other is not None and one + other == 41 for one, other in some)
    assert len(places(pairs(opened(a), opened(a), sample=7))) == 7
    assert len(places(pairs(opened(a), opened(a), sample=400))) == 40


@dataclass(frozen=True)
class Endless:
    """More rows than any memory holds."""

    read: list[int] = field(default_factory=list, compare=False)

    def rows(self) -> Iterator[RowBytes]:
        row = 0
        while True:
            row += 1
            self.read.append(row)
            yield RowBytes(raw=b"{}", address=Address(file="f", row=row))

    def count(self) -> None:
        return None


def test_rows_of_the_same_files_are_read_one_by_one(tmp_path: Path) -> None:
    reader: RowReader = opened(written(tmp_path / "rows.jsonl", [chat(1)]))[0].reader
    source = Source(config=SourceConfig(path="f"), origin=Endless(), reader=reader, seed=0)
    found = pairs([source], [source])
    assert [next(found).a.address.row for _ in range(3)] == [1, 2, 3]  # type: ignore[union-attr]
    assert source.origin.read == [1, 2, 3]  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------------- whole runs


def config_of(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(
        f"model: preset:tiny-qwen3\ndata: {{train: {folder / 'rows.jsonl'}, store: {folder / 'store'}, workers: 0}}\n"
        f"output: {{dir: {folder / 'out'}}}\n",
        encoding="utf-8",
    )
    return load_config(str(path), overrides)


def compared(a: RunConfig, b: RunConfig, **options: int) -> RunDiff:
    def side(name: str, config: RunConfig) -> EncodedSide:
        sources = open_sources(config.data.train, seed=config.runtime.seed)
        return EncodedSide(name=name, config=config, encoder=Encoder.from_config(config), sources=sources)

    return diff_runs(side("A", a), side("B", b), **options)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [chat(n) for n in range(6)]
    rows[2]["messages"] += [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    rows[4]["messages"][1]["content"] = "long " * 50
    rows.append({"messages": [{"role": "user", "content": "and?"}]})  # nothing to learn
    written(tmp_path / "rows.jsonl", rows)
    return tmp_path


def counts(found: RunDiff) -> dict[str, int]:
    return {change.name: count for change, count in found.counts.items() if count}


def test_the_same_description_changes_nothing(folder: Path) -> None:
    found = compared(config_of(folder), config_of(folder))
    assert counts(found) == {"SAME": 6, "REFUSED_BOTH": 1}
    assert found.num_different == 0 and found.shown == () and found.settings == () and found.num_rows == 7
    assert found.tokens_a == found.tokens_b and found.targets_a == found.targets_b > 0


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("template.train_on=last_assistant", {"SAME": 5, "TARGETS": 1, "REFUSED_BOTH": 1}),
        ("template.train_stop=false", {"TARGETS": 6, "REFUSED_BOTH": 1}),
        ("template.default_system=Be kind.", {"TOKENS": 6, "REFUSED_BOTH": 1}),
        ("template.targets=[{role: assistant, weight: 0.5}]", {"WEIGHTS": 6, "REFUSED_BOTH": 1}),
        ("data.max_length=30", {"SAME": 5, "REFUSED_B": 1, "REFUSED_BOTH": 1}),
        ("template.train_on=all", {"TARGETS": 6, "REFUSED_A": 1}),
    ],
)
def test_what_a_setting_changes_is_counted(folder: Path, override: str, expected: dict[str, int]) -> None:
    found = compared(config_of(folder), config_of(folder, override))
    assert counts(found) == expected
    assert sum(found.counts.values()) == 7
    assert [setting.key for setting in found.settings] == [override.partition("=")[0]] or "targets" in override
    assert found.num_different == sum(n for name, n in expected.items() if name not in ("SAME", "REFUSED_BOTH"))


def test_refusals_have_their_reasons(folder: Path) -> None:
    found = compared(config_of(folder), config_of(folder, "data.max_length=30"))
    assert (found.reasons_a, found.reasons_b) == ({"no_target": 1}, {"too_long": 1, "no_target": 1})
    (row,) = [row for row in found.shown if row.change is Change.REFUSED_B]
    assert row.address_a == row.address_b == f"{folder / 'rows.jsonl'}:5"
    assert row.reason_a is None and row.reason_b is not None and "data.max_length is 30" in row.reason_b


def test_another_prompt_with_the_same_answers_says_so(folder: Path) -> None:
    found = compared(config_of(folder), config_of(folder, "template.default_system=Be kind."))
    assert found.num_same_answers == 6 and all(row.same_answers for row in found.shown)
    assert compared(config_of(folder), config_of(folder)).num_same_answers == 0


def test_rows_that_only_one_side_has_are_missing(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    other = written(folder / "other.jsonl", [*rows[::-1][:5], chat(77)])
    found = compared(config_of(folder), config_of(folder, f"data.train={other}"))
    assert found.pairing is Pairing.CONTENT
    assert counts(found) == {"SAME": 4, "REFUSED_BOTH": 1, "MISSING_A": 1, "MISSING_B": 2}
    missing = {row.change: (row.address_a, row.address_b) for row in found.shown}
    assert missing[Change.MISSING_A] == (None, f"{other}:6")


def test_rows_shown_are_limited_for_each_kind(folder: Path) -> None:
    config = config_of(folder, "template.train_stop=false", "data.max_length=30")
    for limit in (0, 1, 2):
        found = compared(config_of(folder), config, num_shown=limit)
        assert [row.change for row in found.shown] == [Change.TARGETS] * limit + [Change.REFUSED_B] * min(limit, 1)


def test_another_vocabulary_is_compared_by_characters(shared: Path, folder: Path) -> None:
    template = folder / "plain.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )
    a, b = (
        config_of(folder, f"model.tokenizer_name_or_path={shared / 'tokenizers' / name}",
                  f"template.chat_template={template}")
        for name in ("qwen3", "llama3_1")
    )  # fmt: skip
    found = compared(a, b)
    assert found.unit == "character" and counts(found) == {"TOKENS": 6, "REFUSED_BOTH": 1}
    assert found.num_same_answers == 6  # the stop token differs, the answers do not
    first = found.shown[0].first
    assert first is not None and first.a is not None
    assert "".join(unit.text for unit in first.a.units).startswith("[user]\nQ 0<|im_end|>\n[assistant]\nA 0")


# --------------------------------------------------------------------------------------------------------------- looks


def told(found: RunDiff, *, colour: bool = False) -> str:
    file = StringIO()
    console = Console(
        width=80, file=file, force_terminal=colour, color_system="truecolor" if colour else None, _environ={}
    )
    console.print(diff_report(found))
    return file.getvalue()


def test_the_report_says_what_changes_in_80_columns_without_colour(folder: Path) -> None:
    text = told(compared(config_of(folder), config_of(folder, "template.train_stop=false", "data.max_length=30")))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "6 of 7 rows change." in text and "only targets differ" in text and "template.train_stop" in text
    assert "⟦A 0►<|im_end|>⟧" in text and "⟦A 0⟧►<|im_end|>" in text  # the stop is learned in A, only read in B
    assert "B refuses it: too_long" in text


def test_data_without_a_row_in_common_have_no_tokens_to_compare(folder: Path) -> None:
    other = written(folder / "other.jsonl", [chat(77)])
    alike, apart = (
        told(compared(config_of(folder), config_of(folder, *more))) for more in ((), (f"data.train={other}",))
    )
    assert re.search(r"tokens +\d", alike) and not re.search(r"tokens +\d", apart)


def test_nothing_changes_is_said_in_so_many_words(folder: Path) -> None:
    text = told(compared(config_of(folder), config_of(folder)))
    assert "Nothing changes" in text and "differ" not in text.split("Nothing changes")[1]


def test_the_page_escapes_everything_and_needs_nothing_else(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    row = {"messages": [{"role": "user", "content": script}, {"role": "assistant", "content": f'"{script}'}]}
    written(tmp_path / "rows.jsonl", [row])
    page = diff_html(compared(config_of(tmp_path), config_of(tmp_path, f"template.default_system={script}")))
    assert (
        "<script" not in page and page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2
    )  # the setting, and the text of B
    assert not re.search(r"https?://|<link|@import|url\(", page)
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert "1 of 1 row changes" in page and "differs" in page


def test_the_check_of_the_page_can_fail(folder: Path) -> None:
    found = compared(config_of(folder), config_of(folder))
    # what claims to be safe HTML is not escaped
    assert "<script" in diff_html(replace(found, a=Markup("<script>")))


# ------------------------------------------------------------------------------------------------- repeated tokens


def unit(token_id: int | None, *, target: bool = False, differs: bool = False) -> ExcerptToken:
    return ExcerptToken(id=token_id, text=f"<{token_id}>", target=target, weight=1.0, differs=differs)


def counted(units: list[ExcerptToken], **options: int) -> list[tuple[int, int | None, int]]:
    return [(place, one.id, count) for place, one, count in repeats(units, **options)]


def test_a_run_of_one_token_is_told_once() -> None:
    assert counted([unit(1), *[unit(7)] * 50, unit(2)]) == [(0, 1, 1), (1, 7, 50), (51, 2, 1)]
    assert counted([unit(7)] * 3) == [(0, 7, 1), (1, 7, 1), (2, 7, 1)]
    assert counted([unit(7)] * 4 + [unit(7, differs=True)] * 5) == [(0, 7, 4), (4, 7, 5)]


def test_the_place_of_a_difference_and_all_that_is_learned_stand_alone() -> None:
    assert counted([unit(7)] * 9, at=4) == [(0, 7, 4), (4, 7, 1), (5, 7, 4)]
    assert counted([unit(7, target=True)] * 5) == [(place, 7, 1) for place in range(5)]
    assert counted([unit(None)] * 5) == [(place, None, 1) for place in range(5)]


def test_settings_of_media_are_settings() -> None:
    one = RunConfig.model_validate({"model": {"name_or_path": "m"}, "data": {"train": "a.jsonl"}})
    other = one.model_copy(update={"media": one.media.model_copy(update={"max_pixels": 8000})})
    assert [(setting.key, setting.b) for setting in changed_settings(one, other)] == [("media.max_pixels", "8000")]
