"""Conversations that the model drew, as token trees: each drawn id is learned once, behind what was sent before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from luthier.engines.engine import Completion, Finish
from luthier.records import Address
from luthier.training.rollouts.trajectories import AnswerTree, ModelCall, Trajectory, answer_tree

PROMPT = [1, 2, 3]


def trajectory(sample: int, *calls: tuple[Sequence[int], Sequence[int]]) -> Trajectory:
    """Calls as (ids sent, ids drawn); an id's log-probability is told by its place."""
    made = []
    for turn, (prompt, ids) in enumerate(calls):
        logprobs = np.array([-(1000 * sample + 100 * turn + place) for place in range(len(ids))], np.float32)
        completion = Completion(
            key=0, sample=sample, ids=np.array(ids, np.int32), logprobs=logprobs, finish=Finish.STOP
        )
        made.append(ModelCall(prompt=np.array(prompt, np.int32), completion=completion, version=0))
    return Trajectory(calls=tuple(made))


def tree_of(*answers: Trajectory) -> AnswerTree:
    return answer_tree(np.array(PROMPT, np.int32), answers, Address(file="rows.jsonl", row=1))


def learned(tree: AnswerTree) -> list[tuple[tuple[int, ...], int, float, int]]:
    """Each target with all that stands before it, its log-probability, and whose it is."""
    found = []
    number = 0
    for segment in tree.sample.segments():
        for place in np.flatnonzero(segment.target).tolist():
            before = tuple(segment.input_ids[:place].tolist())
            logprob, answer = float(tree.logprobs_K[number]), int(tree.answers_K[number])
            found.append((before, int(segment.input_ids[place]), logprob, answer))
            number += 1
    assert number == len(tree.logprobs_K)
    return sorted(found)


def drawn(*answers: Trajectory) -> list[tuple[tuple[int, ...], int, float, int]]:
    """The same, from the calls themselves."""
    found = []
    for number, answer in enumerate(answers):
        for call in answer.calls:
            whole = [*call.prompt.tolist(), *call.completion.ids.tolist()]
            for place, logprob in enumerate(call.completion.logprobs.tolist(), start=len(call.prompt)):
                found.append((tuple(whole[:place]), whole[place], logprob, number))
    return sorted(found)


KEPT = trajectory(0, (PROMPT, [7, 8, 0]), ([*PROMPT, 7, 8, 0, 5, 5], [9, 0]))
REWRITTEN = trajectory(1, (PROMPT, [7, 8, 0]), ([*PROMPT, 8, 0, 5, 5], [7, 0]), ([*PROMPT, 8, 0, 5, 5, 7, 0, 6], [4]))
CASES = {
    "one call": (trajectory(0, (PROMPT, [7, 0])), trajectory(1, (PROMPT, [8, 0]))),
    "one token": (trajectory(0, (PROMPT, [0])),),
    "the same twice": (trajectory(0, (PROMPT, [7, 0])), trajectory(1, (PROMPT, [7, 0]))),
    "history kept": (KEPT,),
    "history rewritten": (REWRITTEN,),
    "alike and rewritten": (KEPT, REWRITTEN, trajectory(2, *[(c.prompt, c.completion.ids) for c in REWRITTEN.calls])),
    "drawn what another was shown": (REWRITTEN, trajectory(1, (PROMPT, [8, 0, 5]))),
}


@pytest.mark.parametrize("case", CASES)
def test_each_drawn_id_is_learned_once_behind_what_was_sent(case: str) -> None:
    answers = CASES[case]
    assert learned(tree_of(*answers)) == drawn(*answers)


def test_a_history_that_is_kept_is_one_line_and_prompts_are_shared() -> None:
    assert len(tree_of(KEPT).sample.branches) == 1
    tree = tree_of(KEPT, trajectory(1, (PROMPT, [7, 0]))).sample
    assert [branch.length for branch in tree.branches] == [3, 7, 2]


def test_no_answers_are_a_tree_without_targets() -> None:
    tree = tree_of()
    assert tree.sample.input_ids.tolist() == PROMPT and not tree.sample.target.any() and not len(tree.answers_K)
