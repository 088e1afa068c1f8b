"""Answers are judged by a model behind a server: what it says is checked, and what it cannot judge is counted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import luthier
from luthier.config.loading import load_config
from luthier.config.schema import JudgeConfig
from luthier.engines import json_client as judging
from luthier.engines.json_client import (
    AnswerScorer,
    JudgedAnswer,
    Judgement,
    ServerLate,
    ServerRefused,
    ServerUnreachable,
    as_read,
)
from luthier.errors import ConfigError, UserError
from luthier.metrics import METRICS, Answered, measured
from luthier.prediction.comparing import compare_predictions as compare
from luthier.prediction.model_scores import judgements, kept_judgements
from luthier.rendering import ControlTokens
from tests.conftest import StubServer, refused, served_json
from tests.prediction.test_compare import answers as some_answers
from tests.prediction.test_compare import prediction

OF_THE_PROMPT = "{question}|{answer}|{low}-{high}\n\nright: {expected}"
ROWS = 4


def reply(text: Any) -> tuple[int, object]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


@contextmanager
def judge_by(answer: Any, **more: Any) -> Iterator[AnswerScorer]:
    """A judge whose server says ``answer(prompt)``, or gives it as it is."""

    def told(path: str, body: dict[str, Any] | None) -> tuple[int, object]:
        if body is None:
            return 200, {"data": [{"id": "the-judge"}]}
        assert path == "/v1/chat/completions" and body["model"] == "the-judge" and body["temperature"] == 0
        (message,) = body["messages"]
        found = answer(message["content"]) if callable(answer) else answer
        return found if isinstance(found, tuple) else reply(found)

    with served_json(told) as url:
        yield AnswerScorer(JudgeConfig(url=url, **{"prompt": OF_THE_PROMPT, **more}))


def answer(text: str = "up", expected: str | None = "Up.") -> JudgedAnswer:
    return JudgedAnswer(question="Which way?", answer=text, expected=expected)


REPLIES: list[tuple[object, float | None, str]] = [
    ("Score: 1 it is at first, but\n**Score:** 8.5/10", 8.5, ""),
    (" 7\n", 7.0, ""),
    ("**8/10**.", 8.0, ""),
    ("Score：8 out of 10", 8.0, ""),
    ("Score: 4/5", None, "another scale"),
    ("Score: 4 out of 5", None, "another scale"),
    ("Final **Score (1-10)**: **9**.", 9.0, ""),
    ('{"score": "6"}', 6.0, ""),
    ("Score: 1e1", 10.0, ""),
    ("It is fine, 8 of 10.", None, "no score"),
    ("It has a score 3 points lower than the best.\nScore: N/A", None, "no score"),
    ("Score: 3 it would be, but the score: it has none", None, "no score"),
    ("Score: 7-8", None, "no score"),
    ("Score: 7,5", None, "no score"),
    (
        (
            200,
            {"choices": [{"finish_reason": "length", "message": {"content": "A right answer has the Score: 9, but"}}]},
        ),
        None,
        "cut off",
    ),
    ((200, {"choices": [{"finish_reason": "abort", "message": {"content": "Score: 1"}}]}), None, "abort"),
    (None, None, "no score"),
    ("score = 11", None, "outside"),
    ("Score: -1", None, "outside"),
    ((400, {"error": "too long"}), None, "400"),
]


def test_a_score_is_what_the_reply_ends_with_if_it_is_on_the_scale() -> None:
    with judge_by(lambda prompt: REPLIES[int(prompt.split("|")[1])][0]) as judge:
        judgements = list(judge.judge([answer(str(number)) for number in range(len(REPLIES))]))
    for found, (_, score, reason) in zip(judgements, REPLIES, strict=True):
        assert found.score == score and reason in found.reason and bool(found.reason) == (score is None)


def test_scores_of_another_model_behind_the_same_address_are_asked_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luthier.engines.json_client.PAUSES", ())
    model, asked = ["one"], list[str]()

    def told(path: str, body: dict[str, Any] | None) -> tuple[int, object]:
        if body is None:
            return 200, {"data": [{"id": model[0]}]}
        asked.append(body["model"])
        return reply("Score: 3")

    line = {"row": "r:1", "turn": 1, "sample": 0, "prompt": "p", "expected": None, "generated": "g"}
    scored = partial(judgements, lines=[line], folder=tmp_path, control=ControlTokens(tokens=frozenset()))
    with served_json(told) as url:
        config = JudgeConfig(url=url)
        for name in ("one", "one", "two"):
            model[0] = name
            assert [one.score for one in scored(AnswerScorer(config)).values()] == [3]
    assert asked == ["one", "two"]
    assert scored(AnswerScorer(config)).keys(), "the server is not needed for what it has said"
    with pytest.raises(ServerUnreachable):
        scored(AnswerScorer(config.model_copy(update={"high": 20})))
    assert scored(AnswerScorer(config.model_copy(update={"model": "two"}))).keys(), "named, it is the same one"


def test_the_judge_is_asked_by_the_prompt_and_texts_of_answers_are_no_places_in_it() -> None:
    asked: list[str] = []
    with judge_by(lambda prompt: asked.append(prompt) or "Score: 2", low=0, high=4) as judge:
        assert [one.score for one in judge.judge([answer("{expected} {low}"), answer("no", None)])] == [2, 2]
    assert sorted(asked) == ["Which way?|no|0-4", "Which way?|{expected} {low}|0-4\n\nright: Up."]


def test_answers_are_judged_at_the_same_time_and_come_in_their_order() -> None:
    def slowly(prompt: str) -> str:
        number = int(prompt.split("|")[1])
        time.sleep(0.05 * (4 - number))
        return f"Score: {number}"

    with judge_by(slowly, batch_size=4, low=0) as judge:
        assert [one.score for one in judge.judge([answer(str(n)) for n in range(4)])] == [0, 1, 2, 3]


def test_a_busy_server_is_asked_again_and_one_that_refuses_or_is_not_there_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("luthier.engines.json_client.PAUSES", (0.01, 0.01, 0.01))
    busy = iter([(503, {}), (429, {}), "Score: 3"])
    with judge_by(lambda _: next(busy)) as judge:
        assert [one.score for one in judge.judge([answer()])] == [3]
    with judge_by((404, {})) as judge, pytest.raises(ServerRefused):
        list(judge.judge([answer()]))
    with judge_by((200, {"said": "fine"})) as judge, refused(UserError, "judge.url"):
        list(judge.judge([answer()]))
    with pytest.raises(ServerUnreachable):  # the server of the last block has gone
        list(judge.judge([answer()]))


class Dripping(BaseHTTPRequestHandler):
    """Sends a byte every now and then, so that no single wait is long."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(100):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_reply_that_never_ends_is_late_and_a_server_of_such_replies_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = StubServer(("127.0.0.1", 0), Dripping)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the judge hangs up
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    judge = AnswerScorer(JudgeConfig(url=f"http://127.0.0.1:{server.server_port}", model="m", timeout=0.2))
    try:
        found = list(judge.judge([answer(), answer()]))
        assert [one.score for one in found] == [None, None] and "time" in found[0].reason
        line = {"row": "r:1", "turn": 1, "sample": 0, "prompt": "p", "expected": None, "generated": "g"}
        judgements(judge, [line], tmp_path, ControlTokens(tokens=frozenset()))
        monkeypatch.setattr(judge, "judge", lambda asked: [Judgement(score=4.0) for _ in asked])
        (again,) = judgements(judge, [line], tmp_path, ControlTokens(tokens=frozenset())).values()
        assert again.score == kept_judgements(tmp_path)[1]["r:1", 1, 0].score == 4, "a late one is asked about again"
        monkeypatch.undo()
        monkeypatch.setattr(judging, "MOST_LATE", 2)
        with pytest.raises(ServerLate):
            list(judge.judge([answer()] * 3))
    finally:
        server.shutdown()
        server.server_close()


def test_a_judge_sees_what_a_reader_sees() -> None:
    control = ControlTokens(tokens=frozenset({"<|im_end|>", "<think>"}))
    assert as_read("<|im_end|>ab<|im_<|im_end|>end|>c", None, control) == "abc"
    call = {"function": {"name": "look", "arguments": '{"at": 1}'}}
    told = {"content": "I look.", "reasoning_content": "hm", "tool_calls": [call]}
    assert as_read("<think>hm…", told, control) == 'I look.\nlook({"at": 1})'


@pytest.mark.parametrize(("section", "told"), [
    ({"url": "http://x", "prompt": "{answr} {answer}"}, ["judge", "answr"]),
    ({"url": "http://x", "prompt": "Is {question} good?"}, ["judge", "answer"]),
    ({"url": "http://x", "low": 5, "high": 5}, ["judge", "5"]),
    ({}, ["eval.metrics", "judge.url"]),
])  # fmt: skip
def test_a_judge_that_cannot_be_asked_is_refused_before_anything_is_loaded(
    section: dict[str, Any], told: list[str]
) -> None:
    described = {
        "model": "preset:tiny-qwen3",
        "data": {"train": "preset:skills", "eval_split": 4},
        "eval": {"generate_rows": 2, "metrics": ["judge"]},
        "judge": section,
    }
    with refused(ConfigError, *told):
        load_config(described)


def test_scores_are_told_with_their_interval_and_rows_without_an_answer_count() -> None:
    found: Any = measured(
        {"judge": METRICS["judge"], "exact": METRICS["exact"]},
        [
            Answered(row="a", expected="x", generated=("x", "y"), scores=(8.0, 4.0)),
            Answered(row="b", expected=None, generated=("z", "z"), scores=(2.0, None)),
        ],
    )
    assert found["judge"]["mean"] == pytest.approx(14 / 3) and found["judge"]["counted"] == 3
    assert found["judge"]["best"] == 5 and found["judge"]["interval"][0] < 14 / 3
    assert found["exact"]["mean"] == 0.5 and "counted" not in found["exact"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, the last of which has no answer."""
    path = tmp_path_factory.mktemp("rows") / "questions.jsonl"
    asked = [{"role": "user", "content": "Which way <|im_end|> is up?"}, {"role": "assistant", "content": "North."}]
    told = [json.dumps({"messages": asked[: 1 if n == ROWS else 2]}) for n in range(1, ROWS + 1)]
    path.write_text("\n".join(told) + "\n", encoding="utf-8")
    return path


def test_predict_asks_a_judge_once_keeps_what_it_said_and_counts_what_has_no_score(rows: Path, tmp_path: Path) -> None:
    described = tmp_path / "base.yaml"
    described.write_text(
        f"model: preset:tiny-qwen3\ndata: {{eval: {rows}}}\ntrain: {{enabled: false}}\n"
        f"generate: {{max_new_tokens: 3}}\noutput: {{dir: {tmp_path / 'base'}}}\n"
    )
    asked: list[str] = []
    is_there = False

    def told(prompt: str) -> object:
        if not is_there and len(asked) == 2:
            return 404, {}
        asked.append(prompt)
        return "Score: 4" if "right" in prompt else "no idea"

    options = luthier.PredictOptions(metrics=["exact", "judge"])
    with judge_by(told, batch_size=1) as judge:
        said = [f"judge.url={judge.config.url}", f"judge.prompt={json.dumps(OF_THE_PROMPT)}", "judge.batch_size=1"]
        with pytest.raises(ServerRefused):
            luthier.predict(described, options, overrides=said)
        kept = tmp_path / "base" / "predictions" / "eval" / "judgements.jsonl"
        assert len(kept.read_text().splitlines()) == 3, "who judges, and two scores"
        kept.write_text(kept.read_text() + '{"row": "torn')
        is_there = True
        found = luthier.predict(described, options, overrides=said)
        assert len(asked) - ROWS in (0, 1), "one may have been on its way when the server refused another"
        before = len(asked)
        assert len(kept.read_text().splitlines()) == 1 + ROWS
        assert luthier.predict(described, options, overrides=said).metrics == found.metrics and len(asked) == before
        again = luthier.predict(described, options, overrides=[*said, "judge.high=5"])
        assert len(asked) == before + ROWS, "another scale asks again"
    assert found.metrics["metrics"]["judge"]["mean"] == 4 and found.metrics["metrics"]["judge"]["counted"] == 3
    assert list(found.metrics["unjudged"].values()) == [1] == list(again.metrics["unjudged"].values())
    assert all("Which way  is up?" in prompt and "<|im_" not in prompt for prompt in asked)
    with refused(UserError, "judge.url"):
        luthier.predict(described, options)


def test_two_predictions_are_compared_by_what_one_judge_said_of_both(tmp_path: Path) -> None:
    folders = [prediction(tmp_path / name, some_answers(True, True, False)) for name in "ab"]

    def judged(folder: Path, by: str, scores: list[float | None]) -> None:
        told = [{"row": f"rows.jsonl:{n}", "turn": 1, "sample": 0, "score": score, "reason": ""}
                for n, score in enumerate(scores, start=1)]  # fmt: skip
        lines = [{"url": by}, *told]
        (folder / "judgements.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    judged(folders[0], "x", [1, 5, None])
    with refused(UserError, "judge.url"):
        compare(*folders, metrics=["judge"])
    judged(folders[1], "x", [4, 5, 2])
    found = compare(*folders, metrics=["judge"])
    (one,) = found.metrics
    assert (one.a, one.b, one.better, one.worse, one.equal) == (3, 4.5, 1, 0, 1), (
        "an answer counts for both or for neither"
    )
    assert [pair.verdicts["judge"] for pair in found.pairs] == ["better", "equal", ""]
    for by, scores in (("y", [4, 5, 2]), ("x", [4, 5])):  # another judge, and one that was stopped
        judged(folders[1], by, scores)
        other = compare(*folders)
        assert "judge" not in {one.name for one in other.metrics} and "judge" in other.not_compared
        with refused(UserError, "judge.url"):
            compare(*folders, metrics=["judge"])


def test_a_run_has_its_answers_judged_and_goes_on_where_the_judge_has_gone(tmp_path: Path) -> None:
    asked: list[str] = []

    def told(prompt: str) -> object:
        asked.append(prompt)
        return "Score: 6" if len(asked) <= ROWS else (404, {})

    with judge_by(told, batch_size=1) as judge:
        result = luthier.train(
            {
                "model": "preset:tiny-qwen3",
                "data": {"train": [{"path": "preset:skills", "first_rows": 30}], "eval_split": ROWS, "max_drop": 0.5},
                "train": {"max_steps": 1, "precision": "fp32"},
                "eval": {"strategy": "no", "generate_rows": ROWS, "metrics": ["judge"]},
                "generate": {"max_new_tokens": 2},
                "judge": {"url": judge.config.url, "batch_size": 1},
                "output": {"dir": str(tmp_path / "run"), "save_strategy": "no"},
                "tracking": {"progress": False},
            }
        )
    first, last = result.generations
    assert first.scores == {"judge": 6} and first.unjudged == {}
    assert last.scores == {} and list(last.unjudged.values()) == [ROWS]
