"""Servers of rewards, honest and lying, on this machine: what they say is checked, and none of them holds a run up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest

from luthier.config.rollout import RewardConfig
from luthier.rewards.judging import DrawnAnswer, Judged, RewardJudge
from tests.conftest import StubServer


class Lying(BaseHTTPRequestHandler):
    """The path says how it lies; ``seen`` are the requests."""

    seen: list[Any] = []  # noqa: RUF012  emptied by each test

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(asked)
        lengths = [len(one["answer"]) for one in asked["answers"]]
        said: dict[str, str] = {
            "/honest": json.dumps({"rewards": lengths}),
            "/mixed": '{"rewards": [1.5, null, NaN, "good", true]}',
            "/few": json.dumps({"rewards": lengths[1:]}),
            "/text": "fine",
            "/list": json.dumps(lengths),
            "/half": '{"rewards": [1',
            "/huge": " " * 5_000_000,
        }
        if self.path == "/stall":
            time.sleep(30)
        if self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(300):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
        answer = said.get(self.path, said["/honest"]).encode()
        fails = self.path == "/error" or (self.path == "/twice" and len(self.seen) < 3)
        breaks = self.path == "/broken" and len(self.seen) < 3
        self.send_response(500 if fails else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer[:9] if breaks else answer)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = StubServer(("127.0.0.1", 0), Lying)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Lying.seen.clear()


def judged(url: str, count: int = 3, timeout: float = 10.0) -> Judged:
    answers = [
        DrawnAnswer(prompt="?", expected="x", generated="a" * n, finished=True, columns={"level": n})
        for n in range(count)
    ]
    with RewardJudge([RewardConfig(url=url, name="server", timeout=timeout)]) as judge:
        return judge.judge(answers)


def test_a_server_judges_all_answers_in_few_requests(address: str) -> None:
    assert judged(f"{address}/honest", 70).total_N.tolist() == list(range(70))
    assert [len(asked["answers"]) for asked in Lying.seen] == [64, 6]
    first = {"answer": "", "expected": "x", "prompt": "?", "finished": True, "columns": {"level": 0}}
    assert Lying.seen[0]["answers"][0] == first


def test_each_reward_is_looked_at(address: str) -> None:
    found = judged(f"{address}/mixed", 5)
    np.testing.assert_array_equal(found.total_N, [1.5, np.nan, np.nan, np.nan, 1.0])
    assert sum(found.missing.values()) == 1, "null and nan are no opinion, a text is none that counts"


@pytest.mark.parametrize("way", ["twice", "broken"])
def test_a_server_that_fails_for_a_while_is_asked_again(way: str, address: str) -> None:
    assert judged(f"{address}/{way}").total_N.tolist() == [0, 1, 2]
    assert len(Lying.seen) == 3


LIES = {
    "few": "more or fewer",
    "text": "no JSON",
    "list": "no JSON",
    "half": "no JSON",
    "huge": "says more",
    "error": "an error",
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_counted_and_told(lie: str, address: str) -> None:
    found = judged(f"{address}/{lie}")
    assert np.isnan(found.total_N).all()
    ((why, count),) = found.missing.items()
    assert count == 3 and LIES[lie] in why


@pytest.mark.parametrize("lie", ["stall", "drip"])
def test_a_server_that_never_ends_is_given_up(lie: str, address: str) -> None:
    found = judged(f"{address}/{lie}", timeout=1.0)
    assert sum(found.missing.values()) == 3 and np.isnan(found.total_N).all()


def test_a_server_that_is_not_there_is_told(address: str) -> None:
    found = judged("http://127.0.0.1:9/score")
    assert found.missing == {"server: no server answers": 3}
