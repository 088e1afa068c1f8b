"""Conversations that the model drew, as token trees: each drawn id is learned once, behind what was sent before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from luthier.config.rollout import RewardConfig
from luthier.encoding import as_prompt
from luthier.encoding.encoder import Encoder
from luthier.encoding.replies import DrawnTurn, end_of_thoughts, prompt_of_turns
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Finish
from luthier.metrics import METRICS
from luthier.presets import tokenizer_folder
from luthier.records import Address, Conversation, Message, Text, Thinking, ToolCall
from luthier.rendering.replies.learning import declared
from luthier.rewards.judging import RewardJudge
from luthier.training.generate import Question, question_of
from luthier.training.rollouts import talks
from luthier.training.rollouts.drawing import Rollouts
from luthier.training.rollouts.held_out import HeldOutTalks
from luthier.training.rollouts.talks import AnswerTree, ModelCall, Trajectory, answer_tree
from tests.oracles.catalogue import catalogue
from tests.oracles.vocabulary import encoder_of

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


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5))
def test_answers_to_one_prompt_stand_side_by_side_as_folding_puts_them(ids: list[list[int]]) -> None:
    answers = [trajectory(sample, (PROMPT, one)) for sample, one in enumerate(ids)]
    quick = tree_of(*answers)
    with mock.patch.object(talks, "_follows", lambda *_: False):
        folded = tree_of(*answers)
    for name in ("input_ids", "target"):
        np.testing.assert_array_equal(getattr(quick.sample, name), getattr(folded.sample, name))
    assert quick.sample.branches == folded.sample.branches and quick.sample.address == folded.sample.address
    assert quick.sample.weight is None and folded.sample.weight is None
    for name in ("logprobs_K", "answers_K", "numbers_K"):
        mine, other = getattr(quick, name), getattr(folded, name)
        np.testing.assert_array_equal(mine, other)
        assert mine.dtype == other.dtype


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


# ------------------------------------------------------------------------- prompts with what was drawn, under templates

TAGS = "And <|im_end|> <|eot_id|> </s> <|im_start|>assistant\n<tool_call> <|start_header_id|> [INST] 🙂 är"
CALL = ToolCall(name="get_weather", arguments={"city": "Köln 🙂", "days": 3}, id="Ab3dE5gH7")
TOOLS = (declared(CALL),)
Tools = tuple[Mapping[str, Any], ...]


def turns_of(name: str) -> tuple[list[Message], Tools]:
    """A question, two calls with results that hold control tokens' text, and an answer; words alone where a template
    has no tools."""
    result = Message(role="tool", parts=(Text(text=TAGS),), name=CALL.name, tool_call_id=CALL.id)
    call = Message(role="assistant", parts=(CALL,))
    answer = Message(role="assistant", parts=(Text(text="It is warm."),))
    question = Message(role="user", parts=(Text(text="So? " + TAGS),))
    if name in WITHOUT_TOOLS:
        words = [Message(role="assistant", parts=(Text(text=text),)) for text in ("Well,\nwhy?", "I see 🙂.")]
        return [question, words[0], question, words[1], question, answer], ()
    return [question, call, result, call, result, answer], TOOLS


def letter_by_letter(ids: NDArray[np.int32], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """The same text in other ids than the tokenizer's own: each letter by itself."""
    control = set(map(tokenizer.control_id, tokenizer.control.tokens))
    found: list[int] = []
    for is_text, run in groupby(ids.tolist(), key=lambda number: number not in control):
        numbers = list(run)
        if is_text:
            numbers = [int(n) for part in tokenizer.encode_runs(list(tokenizer.decode(numbers))) for n in part]
        found += numbers
    return np.array(found, np.int32)


def reply_to(encoder: Encoder, messages: Sequence[Message], tools: Tools) -> NDArray[np.int32]:
    """The last message as training learns it, in other ids."""
    row = Conversation(messages=tuple(messages), tools=tools, train_on="last_assistant")
    (segment,) = encoder.encode(row).segments()
    return letter_by_letter(segment.input_ids[segment.target], encoder.tokenizer)


WITHOUT_TOOLS = ("named/chatml", "named/vicuna", "named/gemma", "named/zephyr")
THINK = ("named/qwen3", "trl/qwen3")
FORMS = ["named/llama3_1", "named/hermes", "named/mistral", "named/glm4", "trl/glm4moe", *THINK, *WITHOUT_TOOLS]


def talk(encoder: Encoder, messages: Sequence[Message], tools: Tools) -> tuple[Trajectory, list[tuple[int, ...]]]:
    """The trajectory of a model that answers as the messages have it, in other ids; and of each call which messages
    were shown otherwise than they were drawn."""
    control = {encoder.tokenizer.control_id(token) for token in encoder.tokenizer.control.tokens}
    turns: dict[int, DrawnTurn] = {}
    calls, changed = [], []
    for number in (n for n, message in enumerate(messages) if message.role == "assistant"):
        history = Conversation(messages=tuple(messages[:number]), tools=tools)
        plain = encoder.encode(as_prompt(history)).input_ids
        assert prompt_of_turns(encoder, history).ids.tolist() == plain.tolist()
        prompt = prompt_of_turns(encoder, history, turns)
        assert encoder.tokenizer.decode(prompt.ids) == encoder.tokenizer.decode(plain)
        assert [n for n in prompt.ids.tolist() if n in control] == [n for n in plain.tolist() if n in control]
        ids = reply_to(encoder, messages[: number + 1], tools)
        calls.append((prompt.ids.tolist(), ids.tolist()))
        changed.append(prompt.changed)
        turns[number] = DrawnTurn(ids=ids, opening=prompt.opening)
    return trajectory(0, *calls), changed


@pytest.mark.parametrize("name", FORMS)
def test_ids_that_were_drawn_stand_in_the_next_prompt_and_are_learned_as_they_are(name: str, tmp_path: Path) -> None:
    encoder = encoder_of(tokenizer_folder("tiny"), tmp_path, catalogue()[name])
    messages, tools = turns_of(name)
    if name in THINK:
        messages = [
            replace(m, parts=(Thinking(text="Hm."), *m.parts)) if m.role == "assistant" else m for m in messages
        ]
    answer, changed = talk(encoder, messages, tools)
    assert changed == [(), (), ()]
    tree = answer_tree(answer.calls[0].prompt, [answer], Address(file="rows.jsonl", row=1))
    assert learned(tree) == drawn(answer)
    assert len(tree.sample.branches) == 1
    canonical = prompt_of_turns(encoder, Conversation(messages=tuple(messages[:-1]), tools=tools)).ids
    assert len(answer.calls[-1].prompt) > len(canonical), "what was drawn is in other ids than the tokenizer's"


@pytest.mark.parametrize("name", [*THINK, "trl/qwen3_5_think", "named/llama3_1"])
def test_the_right_answer_is_told_without_the_empty_thought_that_the_template_writes(name: str, tmp_path: Path) -> None:
    encoder = encoder_of(tokenizer_folder("tiny"), tmp_path, catalogue()[name])
    end = end_of_thoughts(encoder.tokenizer)
    assert end == (None if name == "named/llama3_1" else "</think>")
    messages = tuple(Message(role=role, parts=(Text(text="Five."),)) for role in ("user", "assistant"))
    (segment,) = encoder.encode(Conversation(messages=messages)).segments()
    question = question_of(segment, frozenset(encoder.tokenizer.stop_token_ids))
    assert question is not None
    rollouts: Any = SimpleNamespace(tokenizer=encoder.tokenizer, thought_end=end)
    asked = Rollouts.asked_text(rollouts, 0, question)
    assert (asked.expected, asked.thought_end) == ("Five.", end)


def test_a_held_out_conversation_whose_last_message_thinks_is_right_by_what_it_says(tmp_path: Path) -> None:
    encoder = encoder_of(tokenizer_folder("tiny"), tmp_path, catalogue()["trl/qwen3"])
    asked = Message(role="user", parts=(Text(text="So?"),))
    thinks = Message(role="assistant", parts=(Thinking(text="Hm."), Text(text="Five.")))
    answer, _ = talk(encoder, [asked, thinks], ())
    (expected,) = encoder.tokenizer.encode_runs(["Five."])
    question = Question(prompt=answer.calls[0].prompt, answer=expected, address=Address(file="rows.jsonl", row=1))
    rollouts = object.__new__(Rollouts)
    rollouts.tokenizer, rollouts.thought_end = encoder.tokenizer, end_of_thoughts(encoder.tokenizer)
    rollouts.judge = RewardJudge([RewardConfig(metric="exact")])
    draws: Any = SimpleNamespace(draw=lambda *_, **__: {(0, 0): answer})
    held_out = HeldOutTalks(questions=[question], greedy=draws, drawn=draws, note=lambda *_: None)
    found = held_out.answer_all(0, rollouts, {"exact": METRICS.named("exact")})
    assert found.records[0].equal and "Hm." in found.records[0].generated
    assert [found.metrics[name]["mean"] for name in ("exact", "greedy/reward", "sampled/reward")] == [1, 1, 1]


@pytest.mark.parametrize("name", THINK)
def test_a_thought_that_the_template_leaves_out_of_the_history_begins_a_branch(name: str, tmp_path: Path) -> None:
    encoder = encoder_of(tokenizer_folder("tiny"), tmp_path, catalogue()[name])
    thinks = Message(role="assistant", parts=(Thinking(text="Hm."), Text(text="I see.")))
    question = Message(role="user", parts=(Text(text="So?"),))
    answer, changed = talk(encoder, [question, thinks, question, thinks], ())
    assert changed == [(), (1,)]
    tree = answer_tree(answer.calls[0].prompt, [answer], Address(file="rows.jsonl", row=1))
    assert learned(tree) == drawn(answer)
    assert [branch.parent for branch in tree.sample.branches] == [-1, 0, 0]
