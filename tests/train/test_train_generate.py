"""Questions made of held-out segments, and their greedy answers."""

from __future__ import annotations

import numpy as np
from tiny_runs import make_config, make_segments

from luthier.encoding.tokenizer import Tokenizer
from luthier.records import Address, Segment
from luthier.train.generate import answer_all, choose_questions, question_of
from luthier.train.model import load_model
from luthier.train.vocabulary import Vocabulary

STOP = 9
STOPS = frozenset({STOP})


def _segment(ids: list[int], target: list[int], row: int = 1) -> Segment:
    return Segment(
        input_ids=np.array(ids, dtype=np.int32), target=np.array(target, dtype=bool), address=Address(file="f", row=row)
    )


def test_a_question_is_what_stands_before_the_last_trained_run() -> None:
    question = question_of(_segment([1, 2, STOP, 3, 4, 5, STOP, 6], [0, 1, 1, 0, 1, 1, 1, 0]), STOPS)
    assert question is not None
    assert question.prompt.tolist() == [1, 2, STOP, 3]
    assert question.answer.tolist() == [4, 5]


def test_segments_that_were_cut_or_have_no_prompt_are_no_questions() -> None:
    assert question_of(_segment([1, 2, 3], [0, 1, 1]), STOPS) is None
    assert question_of(_segment([1, STOP], [1, 1]), STOPS) is None
    assert question_of(_segment([1, 2], [0, 0]), STOPS) is None


def test_one_question_a_row_until_there_are_enough() -> None:
    segments = [_segment([1, 2, STOP], [0, 1, 1], row) for row in (1, 1, 2, 3, 4)]
    assert [q.address.row for q in choose_questions(segments, 3, STOPS)] == [1, 2, 3]


def test_answers_do_not_depend_on_the_batch_and_come_in_the_order_asked(tokenizer: Tokenizer, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = load_model(
        make_config(tmp_path), Vocabulary(size=2048, eos_token_id=2034, pad_token_id=tokenizer.pad_token_id)
    ).model
    questions = choose_questions(make_segments(7), 7, frozenset(tokenizer.stop_token_ids))
    rounds = [answer_all(model, questions, tokenizer, step=3, batch_size=size, max_new_tokens=6) for size in (1, 3, 7)]
    assert rounds[0].records == rounds[1].records == rounds[2].records
    assert [record.address for record in rounds[0].records] == [f"rows.jsonl:{row}" for row in range(1, 8)]
    assert model.training, "the model is in the mode it was in"
