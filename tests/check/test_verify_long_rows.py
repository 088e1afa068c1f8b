"""Long conversations: some answers are rendered and judged, the others are read, and the report says how many."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from verify_cases import chat, encoder, message

from luthier.check.verify import Check, RowVerdict, plain_template
from luthier.check.verify.policy import MOST_TURNS, drawn_turns
from luthier.check.verify.row import RowVerifier
from luthier.records import Conversation, Sample, Thinking

ANSWERS = 200
SECONDS = 60  # of CPU for all of them; it takes one or two, and took minutes when every turn was rendered


@pytest.fixture(scope="module")
def long_row() -> tuple[Conversation, Sample]:
    turns = [
        (message("user", f"question {n}?"), message("assistant", f"The answer to {n} is {7 * n}."))
        for n in range(ANSWERS)
    ]
    row = chat(*(said for turn in turns for said in turn))
    return row, encoder().encode(row)


def verdict(row: Conversation, sample: Sample) -> RowVerdict:
    return RowVerifier(encoder()).verify(row, sample)


def groups(sample: Sample) -> list[tuple[int, int]]:
    """Where each run of targets begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.target, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def passed_over(row: Conversation) -> list[int]:
    """The answers, by their number, that are not rendered."""
    verifier = RowVerifier(encoder())
    expected = verifier.expected(row, verifier.policy)
    assert expected.policy is not None
    return [index // 2 for index in expected.policy.passed]


def test_a_draw_has_both_ends_and_grows_with_the_logarithm() -> None:
    assert drawn_turns(range(MOST_TURNS), seed="a") == frozenset(range(MOST_TURNS))
    for count in (MOST_TURNS + 1, 1_000, 100_000):
        drawn = drawn_turns(range(count), seed="a")
        assert {0, 1, count - 2, count - 1} <= drawn and len(drawn) <= 4 + 2 * count.bit_length()
        assert drawn == drawn_turns(range(count), seed="a") != drawn_turns(range(count), seed="b")


def test_a_long_row_is_true_within_bounded_work_and_says_what_was_judged(long_row: tuple[Conversation, Sample]) -> None:
    begun = process_time()
    found = verdict(*long_row)
    assert process_time() - begun < SECONDS
    assert found.violations == () and Check.NOTHING_SUPPLIED_TRAINED in found.applied
    assert found.notes["long_rows"] == 1 and found.notes["drawn_answers"] == found.num_turns < MOST_TURNS
    assert found.notes["drawn_answers"] + found.notes["passed_answers"] == ANSWERS


def test_faults_of_answers_that_were_not_drawn_are_found(long_row: tuple[Conversation, Sample]) -> None:
    row, sample = long_row
    number = passed_over(row)[50]
    start, stop = groups(sample)[number]

    unlearned = sample.target.copy()
    unlearned[start:stop] = False
    found = verdict(row, replace(sample, target=unlearned)).violations
    assert [(v.check, v.message) for v in found] == [(Check.ANSWER_DECODES, 2 * number + 1)]

    cut = sample.target.copy()
    cut[start : start + 3] = False
    checks = {v.check for v in verdict(row, replace(sample, target=cut)).violations}
    assert checks == {Check.ANSWER_DECODES, Check.NOTHING_SUPPLIED_TRAINED}

    other = sample.input_ids.copy()
    other[start] = other[start + 1]
    assert Check.ANSWER_DECODES in {v.check for v in verdict(row, replace(sample, input_ids=other)).violations}

    supplied = sample.target.copy()
    supplied[start - 8 : start - 6] = True  # of the question
    checks = {v.check for v in verdict(row, replace(sample, target=supplied)).violations}
    assert Check.NOTHING_SUPPLIED_TRAINED in checks


def test_a_wrong_context_is_found_by_the_last_answer(long_row: tuple[Conversation, Sample]) -> None:
    row, sample = long_row
    start, _ = groups(sample)[passed_over(row)[3]]
    ids = sample.input_ids.copy()
    ids[start - 8] = ids[start - 9]
    checks = {v.check for v in verdict(row, replace(sample, input_ids=ids)).violations}
    assert Check.PROMPT_TOKENS in checks


def test_turns_that_a_template_rewrites_are_judged_as_far_as_they_were_rendered() -> None:
    """Its history drops thoughts, so an answer with one ends a branch, in which answers without one may stand."""
    turns = []
    for n in range(ANSWERS):
        thoughts = [Thinking(text="Let me see.")] if n % 3 == 0 else []
        turns += [message("user", f"question {n}?"), message("assistant", *thoughts, f"It is {n}.")]
    row = chat(*turns)
    sample = encoder().encode(row)
    assert len(sample.branches) > 50
    found = verdict(row, sample)
    assert found.violations == () and found.notes["passed_answers"] > 100

    verifier = RowVerifier(encoder())
    expected = verifier.expected(row, verifier.policy)
    drawn = next(turn.completion for turn in expected.turns if turn.message is not None and turn.message > 3)
    ids = sample.input_ids.copy()
    place = next(n for n in range(len(ids)) if np.array_equal(ids[n : n + len(drawn)], drawn))
    ids[place] = ids[place + 1]
    checks = {v.check for v in verdict(row, replace(sample, input_ids=ids)).violations}
    assert {Check.COMPLETION_TOKENS, Check.DECODES} <= checks


def test_a_message_that_is_asked_for_again_is_never_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_template, "MOST_KEPT", 3)
    template = plain_template.PlainTemplate("{{ messages[0].content }}", special_tokens={}, kwargs={})
    kept = message("user", "kept")
    for number in range(50):  # each is gone before the next is made, which may have its address
        other = message("user", f"question {number}")
        assert [each["content"] for each in template.plain([kept, other, kept])] == [
            "kept",
            f"question {number}",
            "kept",
        ]
