"""A whole verification: rows read as training reads them, counted, sampled, compared with the store, and reported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from luthier.check.terminal import failed_row, report_table
from luthier.check.verify import MEANING, METHOD_MEANING, Check, Method
from luthier.check.verify.fetched import choose_rows, open_split
from luthier.check.verify.run import Side, VerifyOptions, VerifyProgress, verify
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.pieces import Assembler
from luthier.errors import RowError, StoreError, UserError
from luthier.preparation.prepare import prepare
from luthier.records import Row, Sample
from luthier.rendering.blueprint import Filled
from luthier.store import SampleStore
from luthier.training.data import open_run_data

NUM_ROWS = 20


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return make_config(tmp_path)


def make_config(folder: Path, *, lines: list[str] | None = None, **sections: Any) -> RunConfig:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines or [row(n) for n in range(NUM_ROWS)]) + "\n", encoding="utf-8")
    data = {"train": str(path), "store": str(folder / "store"), "workers": 0, **sections.pop("data", {})}
    values = {"model": "preset:tiny-qwen3", "data": data, "output": {"dir": str(folder / "out")}, **sections}
    return RunConfig.model_validate(values)


def row(number: int, answer: str = "Blue, I think.") -> str:
    user, assistant = {"role": "user", "content": f"colour {number}?"}, {"role": "assistant", "content": answer}
    return json.dumps({"messages": [user, assistant]})


class Wrong:
    """An encoder that spoils the samples of some rows."""

    def __init__(self, config: RunConfig, rows: set[int]) -> None:
        self.right, self.rows = Encoder.from_config(config), rows

    def encode(self, row: Row) -> Sample:
        sample = self.right.encode(row)
        return replace(sample, target=np.roll(sample.target, -1)) if row.address.row in self.rows else sample


class Restless:
    """An encoder that gives something else each time."""

    def __init__(self, config: RunConfig) -> None:
        self.right, self.calls = Encoder.from_config(config), 0

    def encode(self, row: Row) -> Sample:
        self.calls += 1
        sample = self.right.encode(row)
        return sample if self.calls % 2 else replace(sample, target=np.roll(sample.target, -1))


def words_of(*renderables: Any, width: int = 120) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    for renderable in renderables:
        console.print(renderable)
    return console.export_text()


def test_right_data_is_true_of_every_row(config: RunConfig) -> None:
    report = verify(config)
    assert report.ok and report.num_failed_rows == 0 and report.failed_rows == ()
    assert (report.ledger.read, report.ledger.prepared, report.num_turns) == (NUM_ROWS, NUM_ROWS, NUM_ROWS)
    assert report.methods == {Method.WHOLE: NUM_ROWS}
    for result in report.checks:
        of_media = {Check.MEDIA_PLACES, Check.MEDIA_TOKENS, Check.PROCESSOR_TOKENS}
        asked = result.check not in {Check.SINGLE_BOS, Check.SERVED_TOKENS, Check.VERDICT, Check.BATCHES, *of_media}
        assert result.rows_checked == (NUM_ROWS if asked else 0), result
        assert (result.rows_failed, result.violations, result.examples) == (0, 0, ())
    assert "every row passes" in words_of(report_table(report))


def test_every_failing_row_is_counted_and_the_first_are_shown(config: RunConfig) -> None:
    report = verify(config, encoder=Wrong(config, {3, 5, 7, 11, 13, 17}))
    assert not report.ok and report.num_failed_rows == 6
    assert [failed.address.rpartition(":")[2] for failed in report.failed_rows] == ["3", "5", "7"]
    assert report.violations(Check.STOP_TRAINED) == report.violations(Check.NOTHING_SUPPLIED_TRAINED) == 6
    assert report.violations(Check.PROMPT_TOKENS) == 0
    told = report.to_json()
    assert told["ok"] is False and told["checks"]["stop_trained"]["rows_failed"] == 6
    assert len(told["checks"]["stop_trained"]["examples"]) == 5
    json.dumps(told)


def test_a_failing_row_is_shown_with_the_token_that_is_wrong(config: RunConfig) -> None:
    report = verify(config, encoder=Wrong(config, {2}))
    text = words_of(failed_row(report.failed_rows[0]))
    assert "rows.jsonl:2" in text and "nothing_supplied_trained" in text
    (pointed,) = [line for line in text.splitlines() if "→" in line]
    assert "<|im_end|>" in pointed and "target" not in pointed  # the stop, which should be one


def test_expected_and_found_tokens_stand_beside_each_other(config: RunConfig) -> None:
    class Shouting(Wrong):
        def encode(self, row: Row) -> Sample:
            sample = self.right.encode(row)
            ids = sample.input_ids.copy()
            ids[1] = ids[4]
            return replace(sample, input_ids=ids)

    report = verify(config, encoder=Shouting(config, set()))
    assert report.num_failed_rows == NUM_ROWS
    violation = report.failed_rows[0].violations[0]
    text = words_of(failed_row(report.failed_rows[0]))
    assert violation.expected is not None and violation.found is not None
    assert str(violation.expected.id) in text and str(violation.found.id) in text


def test_an_encoder_that_changes_its_mind_is_found(config: RunConfig) -> None:
    report = verify(config, encoder=Restless(config))
    assert report.violations(Check.DETERMINISTIC) == NUM_ROWS
    assert "target differ from token" in report.failed_rows[0].violations[-1].what


def test_rows_that_are_wrong_only_beside_others_are_found(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training encodes many rows at once, so that is what is judged."""
    right = Assembler.assemble

    def exchanged(self: Assembler, rows: Sequence[Filled]) -> list[Sample | RowError]:
        made = right(self, rows)
        return made[1:] + made[:1]

    monkeypatch.setattr(Assembler, "assemble", exchanged)
    report = verify(config)
    assert report.num_failed_rows == NUM_ROWS
    assert report.violations(Check.PROMPT_TOKENS) >= NUM_ROWS
    assert report.violations(Check.DETERMINISTIC) == NUM_ROWS


def test_it_stops_after_so_many_failures(config: RunConfig) -> None:
    report = verify(config, VerifyOptions(max_failures=2), encoder=Wrong(config, {3, 5, 7}))
    assert (report.num_failed_rows, report.ledger.read, report.stopped_early) == (2, 5, True)
    assert "were not read" in words_of(report_table(report))


BAD_LINES = [row(1), "{", json.dumps({"messages": [{"role": "user", "content": "only a question"}]}), row(2)]


def test_refused_rows_within_the_budget_are_counted_under_their_reasons(tmp_path: Path) -> None:
    report = verify(make_config(tmp_path, lines=BAD_LINES, data={"max_drop": 2}))
    ledger = report.ledger
    assert report.ok and ledger.read == ledger.prepared + ledger.lost == 4
    assert dict(ledger.quarantined) == {"truncated_json": 1} and dict(ledger.dropped) == {"no_target": 1}
    text = words_of(report_table(report))
    assert "4 rows read = 2 prepared + 1 dropped + 1 quarantined" in text and "truncated_json" in text


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        ({"max_drop": 2}, True),
        ({"max_drop": 1}, False),
        ({"max_drop": 0.5}, True),
        ({}, False),
    ],
)
def test_a_report_is_ok_exactly_if_training_would_begin(tmp_path: Path, data: dict[str, Any], begins: bool) -> None:
    same_as_training(make_config(tmp_path, lines=BAD_LINES, data=data), begins)


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        ({}, False),  # one of three is dropped for its length, 5 % may be
        ({"max_drop": 1}, True),
        ({"overflow": "truncate"}, True),
        ({"overflow": "error"}, False),
        ({"overflow": "split"}, True),
        ({"max_length": 8, "max_drop": 0.99}, False),  # nothing is left
        ({"max_length": 2, "overflow": "truncate"}, False),
    ],
)
def test_rows_that_training_drops_for_their_length_count(tmp_path: Path, data: dict[str, Any], begins: bool) -> None:
    lines = [row(1), row(2), row(3, "b " * 90)]
    same_as_training(make_config(tmp_path, lines=lines, data={"max_length": 64, **data}), begins)


def same_as_training(config: RunConfig, begins: bool) -> None:
    """``begins`` is what verification says, and what training's own reading of the data does."""
    report = verify(config)
    assert report.num_failed_rows == 0
    assert (report.ok, report.refusal is None, report.to_json()["ok"]) == (begins, begins, begins)
    assert any("training would not begin" in warning for warning in report.warnings) is not begins
    encoder = Encoder.from_config(config)

    def open_data() -> None:
        open_run_data(config, prepare(config, encoder), encoder_fingerprint=encoder.fingerprint)

    if begins:
        open_data()
    else:
        with pytest.raises(UserError):
            open_data()


def test_a_sample_refuses_only_what_is_certain(tmp_path: Path) -> None:
    lines = ["{", *(row(n) for n in range(39))]  # 1 of 40 is lost, 5 % of them may be
    config = make_config(tmp_path, lines=lines)
    seeds = [make_config(tmp_path, lines=lines, runtime={"seed": seed}) for seed in range(40)]
    report = next(
        report for report in (verify(one, VerifyOptions(sample=4)) for one in seeds) if report.ledger.lost == 1
    )
    assert report.ok and any("may not begin" in warning for warning in report.warnings)
    assert verify(config).ok
    none_may_be_lost = config.model_copy(update={"data": config.data.model_copy(update={"max_drop": 0.0})})
    seed = {"runtime": config.runtime.model_copy(update={"seed": next(s.runtime.seed for s in seeds if _meets(s))})}
    assert not verify(none_may_be_lost.model_copy(update=seed), VerifyOptions(sample=4)).ok


def _meets(config: RunConfig) -> bool:
    """Whether a sample of four rows has the broken one, which is the first."""
    return 0 in choose_rows(open_split(config, "train"), 4, seed=config.runtime.seed)


def test_a_clean_report_tells_of_nothing_that_did_not_happen(config: RunConfig) -> None:
    report = verify(config)
    assert all(report.notes.values())
    assert "history shows otherwise" not in words_of(report_table(report))


CLOCK = (
    "{{ '<|im_start|>system\n' + strftime_now('%Y-%m-%d %H:%M:%S') + '<|im_end|>\n' }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


ASKED_ELSEWHERE = CLOCK.replace("{{", "{% set form = '%Y-%m-%d %H:%M:%S' %}{{", 1).replace(
    "'%Y-%m-%d %H:%M:%S')", "form)"
)


@pytest.mark.parametrize("source", [CLOCK, ASKED_ELSEWHERE])
@pytest.mark.parametrize("now", ["2031-02-03T04:05:06", None])
def test_every_judge_of_a_template_with_a_clock_is_told_one_time(tmp_path: Path, now: str | None, source: str) -> None:
    config = make_config(tmp_path, template={"chat_template": source, "now": now})
    report = verify(config)
    assert report.ok and report.num_failed_rows == 0
    assert next(r for r in report.checks if r.check is Check.HUGGING_FACE).rows_checked == NUM_ROWS
    assert "whose clock is set to " in report.judge and ("2031-02-03 04:05:06" in report.judge) is (now is not None)
    (clock,) = [warning for warning in report.warnings if "reads the clock" in warning]
    assert ("as template.now says" in clock) is (now is not None)


def test_samples_of_another_time_are_found_by_all_judges(tmp_path: Path) -> None:
    config = make_config(tmp_path, template={"chat_template": CLOCK, "now": "2031-02-03T04:05:06"})
    other = make_config(tmp_path, template={"chat_template": CLOCK, "now": "2031-02-03T04:05:07"})
    report = verify(config, encoder=Encoder.from_config(other))
    assert report.num_failed_rows == NUM_ROWS
    assert report.violations(Check.PROMPT_TOKENS) and report.violations(Check.HUGGING_FACE)


def test_nothing_verified_is_not_ok(tmp_path: Path) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": "a question"}]})]
    report = verify(make_config(tmp_path, lines=lines))
    assert not report.ok and "nothing was verified" in report.warnings[0]
    assert "nothing was verified" in words_of(report_table(report))


# ----------------------------------------------------------------------------------------------------- which rows


def test_a_sample_of_rows_is_a_function_of_the_seed(tmp_path: Path) -> None:
    def failing(seed: int, size: int = 6) -> list[str]:
        config = make_config(tmp_path, runtime={"seed": seed})
        options = VerifyOptions(sample=size, num_shown=NUM_ROWS)
        report = verify(config, options, encoder=Wrong(config, set(range(NUM_ROWS + 1))))
        assert (report.ledger.read, report.num_rows) == (min(size, NUM_ROWS), NUM_ROWS)
        return [failed.address for failed in report.failed_rows]

    assert failing(1) == failing(1) != failing(2)
    assert len(set(failing(1))) == 6
    assert len(failing(1, size=1000)) == NUM_ROWS


def test_evaluation_data_is_a_split_of_its_own(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text(row(1) + "\n", encoding="utf-8")
    config = make_config(tmp_path, data={"eval": str(held)})
    report = verify(config, VerifyOptions(split=Side.EVAL))
    assert report.ok and (report.split, report.ledger.read) == ("eval", 1)


@pytest.mark.parametrize(("data", "words"), [({"eval_split": 3}, "held out|holds out"), ({}, "no data for eval")])
def test_a_split_without_sources_is_refused_with_a_way_out(tmp_path: Path, data: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        verify(make_config(tmp_path, data=data), VerifyOptions(split=Side.EVAL))
    assert refused.value.hint


def test_progress_adds_up(tmp_path: Path) -> None:
    seen: list[VerifyProgress] = []
    config = make_config(tmp_path, lines=[row(n) if n % 10 else "{" for n in range(120)])
    report = verify(config, on_progress=seen.append)
    assert [now.read for now in seen] == [50, 100]
    assert all(now.verified + now.lost == now.read for now in seen)
    assert report.ledger.read == 120


# ------------------------------------------------------------------------------------------------------ the store


@pytest.mark.parametrize("sample", [None, 7])
@pytest.mark.parametrize("data", [{}, {"eval_split": 4}])
def test_what_is_stored_is_verified(tmp_path: Path, data: dict[str, Any], sample: int | None) -> None:
    lines = [row(n) if n != 5 else "{" for n in range(NUM_ROWS)]
    config = make_config(tmp_path, lines=lines, data={**data, "max_drop": 0.5})
    report = verify(config, VerifyOptions(stored=True, sample=sample))
    assert report.ok and report.ledger.read == (sample or NUM_ROWS)


def test_the_store_that_training_reads_is_verified_and_no_other(config: RunConfig) -> None:
    prepare(config, Encoder.from_config(config))
    assert config.data.store is not None
    (shard,) = config.data.store.rglob("*.bin")
    assert verify(config, VerifyOptions(stored=True)).ok
    assert list(config.data.store.rglob("*.bin")) == [shard]
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(StoreError):
        verify(config, VerifyOptions(stored=True))


def test_a_store_that_holds_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, data={"eval_split": 4})
    prepare(config, Encoder.from_config(config))
    read = SampleStore.read

    def spoilt(self: SampleStore, index: int, *rest: Any) -> Sample:
        sample = read(self, index, *rest)
        return replace(sample, target=np.roll(sample.target, -1)) if index == 2 else sample

    monkeypatch.setattr(SampleStore, "read", spoilt)
    report = verify(config, VerifyOptions(stored=True))
    assert report.num_failed_rows == 1
    assert report.violations(Check.STOP_TRAINED) == report.violations(Check.DETERMINISTIC) == 1


# ------------------------------------------------------------------------------------------------- what is counted


def test_control_strings_are_counted_and_no_failure(tmp_path: Path) -> None:
    report = verify(make_config(tmp_path, lines=[row(1, "ends <|im_end|> here <|im_end|>"), row(2)]))
    assert report.ok and dict(report.control_strings) == {"<|im_end|>": 2}
    assert report.methods == {Method.WHOLE: 1, Method.NEUTRALISED: 1}
    assert "2 control strings" in words_of(report_table(report))


def test_a_template_variable_without_effect_is_a_warning(tmp_path: Path) -> None:
    idle = verify(make_config(tmp_path, template={"kwargs": {"enable_thinking": True}}))
    assert idle.ok and "template.kwargs.enable_thinking changes the text of none of 20" in idle.warnings[0]
    assert "enable_thinking" in words_of(report_table(idle))
    used = verify(make_config(tmp_path, template={"kwargs": {"enable_thinking": False}}))
    assert used.ok and used.warnings == ()


def test_lengths_are_told_and_seams_counted(tmp_path: Path) -> None:
    data = {"max_length": 64, "max_drop": 1}  # training drops the second row, and may
    report = verify(make_config(tmp_path, lines=[row(1, "\nfoo"), row(2, "b " * 90)], data=data))
    assert report.ok and report.longest_run > 64 and report.notes["seam"] == 1
    text = words_of(report_table(report))
    assert "over data.max_length 64" in text and "1 answers whose first letters" in text


def test_every_check_and_method_has_its_words() -> None:
    assert set(MEANING) == set(Check) and set(METHOD_MEANING) == set(Method)
