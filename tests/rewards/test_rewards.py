"""Rewards: metrics, and functions in processes of their own that hang, die, eat memory or answer nonsense."""

from __future__ import annotations

import os
import resource
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier.config.rollout import RewardConfig, RolloutConfig
from luthier.errors import UserError
from luthier.rewards.judging import DrawnAnswer, Judged, RewardJudge, check_columns

HOSTILE = """
import os, sys, threading, time

def length(answer, *, expected, prompt, finished):
    print("noise on stdout", flush=True)
    return len(answer) - len(expected) + len(prompt) * finished

def silent(answer, **_):
    return None

def odd(answer, **_):
    if answer == "hang":
        time.sleep(60)
    if answer == "loop":
        while True:
            pass
    if answer == "exit":
        os._exit(3)
    if answer == "raise":
        raise ValueError("no")
    if answer == "quit":
        sys.exit(1)
    if answer == "memory":
        return len(bytearray(2_000_000_000))
    if answer == "text":
        return "good"
    if answer == "nan":
        return float("nan")
    if answer == "inf":
        return float("inf")
    if answer == "write":
        os.write(1, b"{}\\n" * 100)
    if answer == "forge":
        for number in range(3, 20):
            try:
                os.write(number, b'{"reward": 5}\\n{"call": 2, "reward": 7}\\n')
            except OSError:
                pass
    if answer == "stop":
        os.kill(os.getpid(), 19)
    if answer == "stop later":
        threading.Timer(0.3, os.kill, (os.getpid(), 19)).start()
    if answer == "fork":
        os.fork()
        time.sleep(60)
    return 1.0

not_a_function = 3
"""


GROUPS = """
import sys

def ranks(answers, *, finished, columns):
    assert len(answers) == len(finished)
    return [columns["base"] + sorted(answers).index(one) for one in answers]

def turns(answers, *, conversation):
    return [len(one) for one in conversation]

def turns_alone(answer, *, conversation):
    return len(conversation)

def too_few(answers):
    return answers[1:]

def text(answers):
    return "12"

def unordered(answers):
    return {float(number) for number in range(len(answers))}

def mixed(answers):
    return [1, None, float("nan"), "good"][: len(answers)]

def named(answer, *, prompt):
    return len(prompt)

def positional(answer, columns):
    return columns["base"]

def optional(answer, /, *, other=3, **_):
    return other

def demanding(answer, *, completion_ids):
    return 1.0

def of_trl(prompts, completions, size, **kwargs):
    return [len(c[0]["content"]) + size[0] + len(p[0]["content"]) for p, c in zip(prompts, completions)]

def of_trl_texts(completions, size):
    return [len(c) * s for c, s in zip(completions, size)]

def huge(answer):
    return 10**400

def fork_bomb(answer):
    import os, time
    for _ in range(3):
        os.fork()
    time.sleep(60)
"""


def answer(text: str, expected: str | None = "four", **facts: Any) -> DrawnAnswer:
    return DrawnAnswer(prompt="two and two?", expected=expected, generated=text, finished=True, **facts)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    path = tmp_path / "groups.py"
    path.write_text(GROUPS)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(HOSTILE)
    return path


def judged(rewards: list[RewardConfig], answers: list[DrawnAnswer]) -> Judged:
    with RewardJudge(rewards) as judge:
        return judge.judge(answers)


def test_rewards_are_weighted_and_added_up(file: Path) -> None:
    rewards = [RewardConfig(metric="exact"), RewardConfig(function=f"{file}:length", weight=0.5)]
    found = judged(rewards, [answer("four"), answer("sixteen")])
    np.testing.assert_array_equal(found.values_NF, [[1, 12], [0, 15]])
    np.testing.assert_array_equal(found.total_N, [7, 7.5])
    assert not found.missing


def test_metrics_compare_what_stands_behind_a_thought_and_functions_read_all_of_it(file: Path) -> None:
    drawn = ["<think>\nHm.\n</think>\n\nfour", "<think>\n\n</think>\n\nfour", "four", "<think>\nIt may be four"]
    told = [answer(text, thought_end="</think>") for text in drawn]
    found = judged([RewardConfig(metric="exact"), RewardConfig(function=f"{file}:length")], told)
    assert found.values_NF[:, 0].tolist() == [1, 1, 1, 0]
    assert found.values_NF[:, 1].tolist() == [len(text) - 4 + 12 for text in drawn]
    assert not judged([RewardConfig(metric="exact")], [answer(text) for text in drawn[:2]]).total_N.any()


def test_no_opinion_counts_nothing_and_without_any_there_is_no_reward(file: Path) -> None:
    silent = RewardConfig(function=f"{file}:silent")
    assert judged([RewardConfig(metric="exact"), silent], [answer("four")]).total_N.tolist() == [1.0]
    assert np.isnan(judged([silent], [answer("four")]).total_N).all()


def test_a_reward_of_weight_0_is_told_and_judges_nothing(file: Path) -> None:
    rewards = [RewardConfig(function=f"{file}:silent"), RewardConfig(function=f"{file}:length", weight=0.0)]
    found = judged(rewards, [answer("four")])
    assert np.isnan(found.total_N).all() and found.values_NF[0, 1] == 12 and found.reasons_N != [""]


def test_an_answer_that_nobody_drew_has_its_own_length_and_was_in_no_environment() -> None:
    drawn = answer("four", outcome=1.0, num_tokens=128)
    found = judged([RewardConfig(metric="environment"), RewardConfig(metric="length")], [drawn, drawn.saying("", 1)])
    np.testing.assert_array_equal(found.values_NF, [[1.0, 0.5], [np.nan, 1 / 256]])


def test_hostile_functions_cost_their_answer_its_reward_and_nothing_else(file: Path) -> None:
    odd = RewardConfig(function=f"{file}:odd", timeout=0.5, max_memory=1_500_000_000)
    texts = ["fine", "hang", "fine", "loop", "exit", "raise", "quit", "memory", "text", "nan", "inf", "fork", "write"]
    begun = time.monotonic()
    found = judged([odd], [answer(text) for text in [*texts, "fine"]])
    right = [0, 2, 12, 13]
    assert [n for n in range(14) if not np.isnan(found.total_N[n])] == right, found
    assert time.monotonic() - begun < 60
    assert sum(found.missing.values()) == 14 - len(right) - 2  # nan and inf are no opinion
    assert {why.partition(": ")[2] for why in found.missing} >= {
        "no reward within 0.5 s", "its process ended", "raises ValueError", "raises MemoryError",
    }  # fmt: skip


def test_results_that_a_function_writes_itself_are_not_taken_for_those_of_a_later_call(file: Path) -> None:
    found = judged([RewardConfig(function=f"{file}:odd", timeout=20)], [answer(text) for text in ("forge", "a", "b")])
    assert np.isnan(found.total_N[0]) and found.total_N[1:].tolist() == [1.0, 1.0]


def test_a_process_that_reads_no_more_is_given_up(file: Path) -> None:
    """What it is to be told does not fit into the pipe."""
    odd = RewardConfig(function=f"{file}:odd", timeout=2)
    with RewardJudge([odd]) as judge:
        assert judge.judge([answer("stop later")]).total_N.tolist() == [1.0]
        time.sleep(0.6)
        assert judge.judge([answer("x" * 1_000_000)]).missing == {"odd: no reward within 2 s": 1}
        assert judge.judge([answer("stop"), answer("fine")]).total_N[1] == 1.0


@pytest.mark.parametrize("function", ["nobody", "not_a_function"])
def test_a_file_without_the_function_says_so_for_each_answer(function: str, file: Path) -> None:
    found = judged([RewardConfig(function=f"{file}:{function}")], [answer("a"), answer("b")])
    assert found.missing == {f"{function}: its file has no function {function}": 2}


def test_a_metric_of_all_answers_together_is_no_reward() -> None:
    pytest.importorskip("sacrebleu")
    with pytest.raises(UserError) as caught:
        RewardJudge([RewardConfig(metric="bleu")])
    assert caught.value.key == "rollout.rewards[0].metric"


def test_a_function_is_asked_by_a_process_with_more_than_1024_open_files(file: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    try:
        with ExitStack() as opened:
            for _ in range(1024):
                opened.enter_context(Path(os.devnull).open())
            assert judged([RewardConfig(function=f"{file}:odd")], [answer("fine")]).total_N.tolist() == [1.0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_processes_are_forgotten_when_they_are_closed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[object] = []
    monkeypatch.setattr("atexit.register", waiting.append)
    monkeypatch.setattr("atexit.unregister", waiting.remove)
    with RewardJudge([RewardConfig(function=f"{file}:odd")]) as judge:
        assert not waiting, "there is no process yet"
        judge.judge([answer("exit"), answer("fine"), answer("fine")])
        assert len(waiting) == 1
    assert not waiting


# ------------------------------------------------------------------------------------ all answers to a prompt at once


TWO_GROUPS = [
    answer("b", columns={"base": 10}, group=0),
    answer("a", columns={"base": 10}, group=0),
    answer("c", columns={"base": 20}, group=1),
]


def test_a_function_of_answers_is_asked_of_all_answers_to_a_prompt_at_once(groups: Path) -> None:
    assert judged([RewardConfig(function=f"{groups}:ranks")], TWO_GROUPS).total_N.tolist() == [11, 10, 20]


@pytest.mark.parametrize("name", ["too_few", "text", "unordered"])
def test_a_group_without_a_list_of_as_many_rewards_as_answers_has_none(name: str, groups: Path) -> None:
    found = judged([RewardConfig(function=f"{groups}:{name}")], TWO_GROUPS[:2])
    assert np.isnan(found.total_N).all() and sum(found.missing.values()) == 2


def test_each_answer_of_a_group_may_have_no_reward(groups: Path) -> None:
    found = judged([RewardConfig(function=f"{groups}:mixed")], [answer("a")] * 4)
    assert found.total_N[0] == 1.0 and np.isnan(found.total_N[1:]).all()
    assert found.missing == {"mixed: gives a str, which is no number": 1}


# ---------------------------------------------------------------------------------------------- what functions are told


@pytest.mark.parametrize(("name", "reward"), [("named", 12), ("positional", 10), ("optional", 3)])
def test_functions_are_given_the_keywords_that_they_name(name: str, reward: float, groups: Path) -> None:
    assert judged([RewardConfig(function=f"{groups}:{name}")], TWO_GROUPS[:1]).total_N.tolist() == [reward]


@pytest.mark.parametrize("name", ["turns", "turns_alone"])
def test_functions_are_given_the_conversation_of_each_answer(name: str, groups: Path) -> None:
    said: dict[str, object] = {"role": "user", "content": "…"}
    answers = [answer("a", conversation=[said] * count) for count in (3, 1)]
    assert judged([RewardConfig(function=f"{groups}:{name}")], answers).total_N.tolist() == [3, 1]


def test_a_keyword_that_nobody_offers_is_told(groups: Path) -> None:
    (why,) = judged([RewardConfig(function=f"{groups}:demanding")], [answer("a")]).missing
    assert "completion_ids" in why and "columns" in why


@pytest.mark.parametrize("name", ["huge", "fork_bomb"])
def test_what_a_function_starts_or_says_without_measure_costs_one_reward(name: str, groups: Path) -> None:
    begun = time.monotonic()
    found = judged([RewardConfig(function=f"{groups}:{name}", timeout=0.5)], [answer("a")])
    assert np.isnan(found.total_N).all() and sum(found.missing.values()) == 1 and time.monotonic() - begun < 30


# --------------------------------------------------------------------------------------------------- columns, lengths


def test_a_metric_may_compare_with_a_column_and_has_no_say_without_it() -> None:
    of_column, as_text = (RewardConfig(metric=metric, column="key") for metric in ("number", "exact"))
    rows: list[dict[str, Any]] = [{"key": "It is 1,024."}, {"key": 1024}, {"key": None}, {}]
    found = judged([of_column], [answer("so 1024", columns=columns) for columns in rows])
    np.testing.assert_array_equal(found.total_N, [1, 1, np.nan, np.nan])
    found = judged([as_text], [answer("1024", columns=columns) for columns in rows])
    np.testing.assert_array_equal(found.total_N, [0, 1, np.nan, np.nan])
    assert np.isnan(judged([RewardConfig(metric="exact")], [answer("a", expected=None)]).total_N).all()


@pytest.mark.parametrize(
    ("rewards", "questions", "key"),
    [
        ([{"metric": "exact", "column": "kee"}], [(True, {"key": "1"})], "rollout.rewards[0].column"),
        ([{"metric": "exact", "column": "key"}], [(True, {"key": None})], "rollout.rewards[0].column"),
        (["overlong", "exact"], [(False, {"key": "1"})], "rollout.rewards[1]"),
        (["exact", {"metric": "json", "column": "key"}], [(False, {}), (True, {}), (False, {"key": 1})], None),
        (["overlong", "matches:a+"], [(False, {})], None),
        (["exact"], [], None),
        (["exact", {"metric": "exact", "column": "key"}], [(True, {})], "rollout.rewards[1].column"),
        ([{"function": "f.py:f"}], [(False, {})], None),
    ],
)
def test_what_no_row_has_is_told_before_anything_is_drawn(
    rewards: list[Any], questions: list[tuple[bool, dict[str, Any]]], key: str | None
) -> None:
    configs = RolloutConfig(rewards=rewards).rewards
    if key is None:
        check_columns(configs, questions)
        return
    with pytest.raises(UserError) as caught:
        check_columns(configs, questions)
    assert caught.value.key == key


def test_rewards_of_lengths_are_those_of_the_paper() -> None:
    def found(name: str) -> list[float]:
        with RewardJudge([RewardConfig(metric=name)], max_new_tokens=100) as judge:
            return judge.judge([answer("", num_tokens=count) for count in (1, 80, 90, 100, 300)]).total_N.tolist()

    assert found("length") == [0.01, 0.8, 0.9, 1.0, 3.0]
    assert found("overlong") == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert found("overlong:10") == [0.0, 0.0, 0.0, -1.0, -1.0]
    assert found("overlong:100") == [-0.01, -0.8, -0.9, -1.0, -1.0]
    for wrong in ("overlong:0", "overlong:101", "overlong:x", "length:3"):
        with pytest.raises(UserError) as caught:
            found(wrong)
        assert caught.value.key == "rollout.rewards[0].metric"


@pytest.mark.parametrize(("name", "plain", "rewards"), [("of_trl", False, [24, 25]), ("of_trl_texts", True, [20, 30])])
def test_functions_of_trls_form_are_called_as_trl_calls_them(
    name: str, plain: bool, rewards: list[float], groups: Path
) -> None:
    reward = RewardConfig(function=f"{groups}:{name}", plain=plain)
    answers = [answer(text, columns={"size": 10, "other": 1}) for text in ("ab", "abc")]
    assert judged([reward], answers).total_N.tolist() == rewards


def test_an_answer_matches_a_pattern_as_a_whole() -> None:
    reward = RewardConfig(metric="matches:<a>.*</a>.")
    said = judged([reward], [answer("<a>two\nlines</a>!", None), answer("<a></a>!!", None)])
    assert said.total_N.tolist() == [1, 0]
    with pytest.raises(UserError):
        judged([RewardConfig(metric="matches:(")], [])
