"""Questions in a row about one thing: which of them a split asks."""

from __future__ import annotations

from random import Random

from luthier.presets.quizzes import Quiz, QuizQuestion, QuizSkill, is_held_out, quiz_rows

SHOWN = {"type": "image", "image": {"bytes": b"PNG"}}


def draw(rng: Random) -> Quiz:
    """A picture of which seven things can be asked, each by its key."""
    keys = [str(rng.randrange(10_000)) for _ in range(7)]
    return Quiz(shown=[SHOWN], questions=[QuizQuestion(key=key, question=f"ask {key}", answer=key) for key in keys])


SKILLS = [QuizSkill(name="a", draw=draw, num_train=40, num_test=5), QuizSkill(name="b", draw=draw, num_train=20)]


def answers(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_train_asks_up_to_four_questions_that_are_not_held_out() -> None:
    asked = [answers(row["messages"]) for row in quiz_rows(SKILLS, "train")]
    assert len(asked) == 60 and {len(keys) for keys in asked} <= {1, 2, 3, 4}
    assert not any(is_held_out(key) for keys in asked for key in keys)
    assert all(len(set(keys)) == len(keys) for keys in asked), "no question is asked twice"


def test_test_asks_one_question_that_is_held_out_and_skills_take_turns() -> None:
    rows = list(quiz_rows(SKILLS, "test"))
    assert [row["skill"] for row in rows] == ["a", "b"] * 5 + ["b"] * 25
    for row in rows:
        (key,) = answers(row["messages"])
        assert is_held_out(key)


def test_what_is_shown_stands_before_the_first_question_and_nowhere_else() -> None:
    for row in quiz_rows(SKILLS, "train"):
        first, *rest = row["messages"]
        assert first["content"][0] == SHOWN and first["content"][1]["text"].startswith("ask ")
        assert all(isinstance(message["content"], str) for message in rest)


def test_rows_are_the_same_every_time() -> None:
    assert list(quiz_rows(SKILLS, "train")) == list(quiz_rows(SKILLS, "train"))
