"""Verification finds every planted fault, by the check that is meant to, and nothing where there is none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from verify_cases import AT, PLAIN, PRESET, ROWS, chat, encoder, folder_with_bos, message, spliced, verify_row
from verify_faults import FAULTS, Fault

from luthier.check.verify import Check
from luthier.check.verify.row import RowVerifier
from luthier.config.inputs import DataConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.records import Conversation, Row
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources

REAL_TOKENIZERS = ("qwen3", "llama3_1", "gemma3")
REAL_DATA = ("alpaca_en_demo#40", "alpaca_zh_demo#40", "identity#20", "glaive_toolcall_en_demo#40", "c4_demo#20")


@cache
def verifier(options: str) -> tuple[Encoder, RowVerifier]:
    under_test = encoder(PRESET, **json.loads(options))
    return under_test, RowVerifier(under_test)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_every_planted_fault_is_found_by_its_check(fault: Fault) -> None:
    under_test, checker = verifier(json.dumps(fault.options))
    row = ROWS[fault.row]
    right = under_test.encode(row)
    assert checker.verify(row, right).violations == ()
    found = checker.verify(row, fault.corrupt(right, under_test)).violations
    assert fault.found_by in {violation.check for violation in found}, [str(violation) for violation in found]
    assert all(violation.address == str(AT) for violation in found)


def test_the_faults_are_many_and_every_check_has_one() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
    elsewhere = {
        Check.SINGLE_BOS,
        Check.DETERMINISTIC,
        Check.WHOLE_TEXT,
        Check.HUGGING_FACE,
        Check.SERVED_TOKENS,
        Check.VERDICT,
        Check.BATCHES,
    }
    of_media = {Check.MEDIA_PLACES, Check.MEDIA_TOKENS, Check.PROCESSOR_TOKENS}
    assert {fault.found_by for fault in FAULTS} | elsewhere | of_media == set(Check)


def test_a_fault_says_where_it_is_and_what_should_stand_there() -> None:
    under_test = encoder()
    sample = under_test.encode(PLAIN)
    wrong = spliced(sample, 5, 6, [int(sample.input_ids[6])])
    [violation] = [v for v in verify_row(PLAIN, wrong, under_test) if v.check is Check.PROMPT_TOKENS and v.message == 2]
    assert (violation.run, violation.index) == (0, 5)
    assert violation.expected is not None and violation.expected.id == sample.input_ids[5]
    assert violation.found is not None and violation.found.id == sample.input_ids[6]
    assert "rows.jsonl:7 messages[2] prompt_tokens" in str(violation)


# ------------------------------------------------------------------------------------------------- begin tokens


@pytest.mark.parametrize("row", ["plain", "thinking", "hostile", "document"])
def test_begin_tokens_are_counted(row: str, tmp_path: Path) -> None:
    under_test = encoder(folder_with_bos(tmp_path))
    checker, sample = RowVerifier(under_test), under_test.encode(ROWS[row])
    bos = under_test.tokenizer.control_id("<|endoftext|>")
    right = checker.verify(ROWS[row], sample)
    assert right.violations == () and Check.SINGLE_BOS in right.applied
    twice = checker.verify(ROWS[row], spliced(sample, 0, 0, [bos])).violations
    assert Check.SINGLE_BOS in {violation.check for violation in twice}
    if row != "document":  # this tokenizer puts none before plain text
        missing = checker.verify(ROWS[row], spliced(sample, 0, 1, [])).violations
        assert Check.SINGLE_BOS in {violation.check for violation in missing}
        assert Check.PROMPT_TOKENS in {violation.check for violation in missing}


def test_a_tokenizer_without_begin_token_is_not_asked_for_one() -> None:
    under_test = encoder()
    assert Check.SINGLE_BOS not in RowVerifier(under_test).verify(PLAIN, under_test.encode(PLAIN)).applied


def test_apply_chat_template_is_a_check_of_its_own() -> None:
    under_test = encoder()
    sample = under_test.encode(PLAIN)
    letters = under_test.tokenizer.encode_runs(list("Hello"))
    start = int(sample.target.argmax())
    (word,) = under_test.tokenizer.encode_runs(["Hello"])
    apart = spliced(sample, start, start + len(word), [int(i) for ids in letters for i in ids], target=True)
    found = {violation.check for violation in verify_row(PLAIN, apart, under_test)}
    assert {Check.WHOLE_TEXT, Check.HUGGING_FACE} <= found


# ------------------------------------------------------------------------------------------------ real tokenizers


@cache
def real(folder: Path, name: str) -> tuple[Encoder, RowVerifier]:
    under_test = encoder(str(folder / "tokenizers" / name))
    return under_test, RowVerifier(under_test)


@cache
def real_rows(folder: Path) -> list[Row]:
    registry = folder / "data" / "demo" / "dataset_info.json"
    reasoning = str(folder / "data" / "demo" / "reason_tool_use_demo_50.jsonl")
    sources, _ = resolve_sources(DataConfig(registry=registry, use=list(REAL_DATA), train=reasoning))
    rows: list[Row] = []
    for source in open_sources(sources, seed=1):
        for item in source.rows():
            assert not isinstance(item, RowError)
            rows.append(source.convert(item))
    return rows


@pytest.mark.shared
@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_real_rows_have_no_fault(shared: Path, name: str) -> None:
    under_test, checker = real(shared, name)
    verified = 0
    for row in real_rows(shared):
        try:
            sample = under_test.encode(row)
        except RowError as error:
            assert error.reason in {"template", "dropped_by_template"}, error
            continue
        assert [str(violation) for violation in checker.verify(row, sample).violations] == []
        verified += 1
    assert verified > 120


# Not those that know the words of the tiny tokenizer, or what its template does with white space.
OF_THE_PRESET = {
    "brackets_of_the_answer_are_lost_by_a_diff", "answer_is_normalised", "words_are_tokenized_one_by_one",
    "question_is_learned", "another_token_ends_the_answer", "answer_is_padded_with_white_space",
    "stop_is_taught_as_the_next_turns_first_token",
}  # fmt: skip
ANYWHERE = [f for f in FAULTS if f.row == "plain" and not f.options and f.name not in OF_THE_PRESET]


@pytest.mark.shared
@pytest.mark.parametrize("fault", ANYWHERE, ids=str)
@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_faults_are_found_with_real_tokenizers_too(shared: Path, name: str, fault: Fault) -> None:
    under_test, checker = real(shared, name)
    right = under_test.encode(PLAIN)
    assert checker.verify(PLAIN, right).violations == ()
    found = checker.verify(PLAIN, fault.corrupt(right, under_test)).violations
    assert fault.found_by in {violation.check for violation in found}, [str(violation) for violation in found]


@pytest.mark.shared
@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_a_mask_off_by_one_is_found_in_every_real_row(shared: Path, name: str) -> None:
    under_test, checker = real(shared, name)
    (shifted,) = [fault for fault in FAULTS if fault.name == "mask_one_too_early"]
    found = 0
    for row in real_rows(shared)[:130]:
        if not isinstance(row, Conversation):
            continue
        try:
            sample = shifted.corrupt(under_test.encode(row), under_test)
        except RowError:
            continue
        checks = {violation.check for violation in checker.verify(row, sample).violations}
        assert {Check.NOTHING_SUPPLIED_TRAINED, Check.STOP_TRAINED} <= checks, row.address
        found += 1
    assert found > 30


@pytest.mark.shared
@pytest.mark.parametrize("name", REAL_TOKENIZERS)
def test_control_strings_of_real_tokenizers_stay_text(shared: Path, name: str) -> None:
    under_test, checker = real(shared, name)
    for token in sorted(under_test.tokenizer.control.tokens)[:40]:
        row = chat(message("user", f"what is {token}?{token}"), message("assistant", f"it is {token}"))
        try:
            sample = under_test.encode(row)
        except RowError:  # of an answer that the template reads as a thought, something would be lost
            assert token in {"<think>", "</think>"}
            continue
        verdict = checker.verify(row, sample)
        if token == "</think>" and name == "qwen3":  # Qwen3's template reads the words before it as a thought
            assert {violation.check for violation in verdict.violations} == {Check.ANSWER_DECODES}
            continue
        assert [str(violation) for violation in verdict.violations] == [], token
        assert verdict.control_strings[token] == 3
