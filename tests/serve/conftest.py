"""Servers in this process: with a model, and with a session that says what a test wants."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from luthier.__main__ import Terminated
from luthier.config.loading import load_config
from luthier.config.schema import GenerateConfig, ServeConfig
from luthier.encoding.encoder import Encoder
from luthier.engines import Finish, NewTokens, OnTokens, Request, Session
from luthier.engines.local import RewardEngine, WeightsTaker
from luthier.serve.app import AnsweringModel, Served, application
from luthier.serve.gate import Gate
from luthier.serve.histories import Histories
from luthier.serve.running import HttpServer, Listening, ServeOptions, listening, serve, url_of
from tests.conftest import HANG_SECONDS

TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    config = load_config({"model": "preset:tiny-qwen3", "data": {}, "train": {"enabled": False}})
    return Encoder.from_config(config)


@dataclass
class Scripted:
    """A session that answers each request with the ids that ``script`` gives, ``step`` at a time. ``stop`` ends one;
    ``last`` is what ends one behind its last id."""

    script: Callable[[Request], Iterable[int]]
    step: int = 1
    stop: int = -1
    last: Finish = Finish.LENGTH
    pause: float = 0.0  # seconds between two steps
    working: set[int] = field(default_factory=set)
    asked: list[Request] = field(default_factory=list)

    def submit(self, request: Request, on_tokens: OnTokens) -> None:
        self.asked.append(request)
        self.working.add(request.key)
        threading.Thread(target=self._answer, args=(request, on_tokens), daemon=True).start()

    def cancel(self, key: int) -> None:
        self.working.discard(key)

    def close(self) -> None:
        self.working.clear()

    def _answer(self, request: Request, on_tokens: OnTokens) -> None:
        for sample in range(request.num_samples):
            left = iter(self.script(request))
            some, more = list(islice(left, self.step)), True
            while more and request.key in self.working:
                then = list(islice(left, self.step))
                more = bool(then)
                finish = Finish.STOP if some[-1] == self.stop else None if more else self.last
                on_tokens(new_tokens(request, sample, some, finish))
                some = then
                time.sleep(self.pause)
        self.working.discard(request.key)


def new_tokens(request: Request, sample: int, ids: Sequence[int], finish: Finish | None) -> NewTokens:
    count, tops = len(ids), request.top_logprobs
    return NewTokens(
        key=request.key,
        sample=sample,
        ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(count, -0.5, dtype=np.float32),
        top_ids=np.tile(np.arange(10, 10 + tops, dtype=np.int32), (count, 1)),
        top_logprobs=np.tile(-np.arange(1, 1 + tops, dtype=np.float32), (count, 1)),
        finish=finish,
    )


@dataclass(frozen=True)
class Running:
    """A server that answers, and what a test asks it with."""

    url: str
    gate: Gate
    session: Any
    http: httpx.Client

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": ASK, **body})


ASK = [{"role": "user", "content": "What is 3 + 4?"}]


@contextmanager
def running(
    encoder: Encoder,
    session: Session | RewardEngine,
    *,
    context: int = 2048,
    score: Any = None,
    taker: WeightsTaker | None = None,
    generate: Mapping[str, Any] | None = None,
    **limits: Any,
) -> Iterator[Running]:
    told = ServeConfig(**limits)
    model: Any = session
    if not isinstance(session, RewardEngine):
        stops, section = frozenset(encoder.tokenizer.stop_token_ids), GenerateConfig(seed=1, **(generate or {}))
        settings = section.model_copy(update={"stop_token_ids": [*section.stop_token_ids, *stops]})
        model = AnsweringModel(session=session, score=score, settings=settings, stops=stops)
    served = Served(
        prompts=Histories(encoder, told),
        models={"tiny": model},
        limits=told,
        context=context,
        started=0,
        taker=taker,
    )
    gate, ready = application(served, token=TOKEN), threading.Event()
    with listening(ServeOptions(port=0)) as taken:
        server = HttpServer(gate, ready.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[taken])))
        thread.start()
        try:
            assert ready.wait(HANG_SECONDS)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            with httpx.Client(base_url=url_of(taken), headers=headers, timeout=HANG_SECONDS) as http:
                yield Running(url_of(taken), gate, session, http)
        finally:
            server.should_exit = True
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()
            gate.close()
            if not isinstance(session, RewardEngine):
                session.close()


def asked_of(
    run: str | Path, options: ServeOptions, ask: Callable[[httpx.Client], Any], overrides: Sequence[str] = ()
) -> Any:
    """What ``ask`` gives, asking the server that the command would run, which a signal ends then."""
    told: list[Any] = []

    def ask_and_end(ready: Listening) -> None:
        headers = {"Authorization": f"Bearer {ready.token}"}
        try:
            with httpx.Client(base_url=ready.url, headers=headers, timeout=HANG_SECONDS) as http:
                told.append(ask(http))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(Terminated):
            ask_then = partial(threading.Thread, target=ask_and_end)
            serve(run, options, overrides=overrides, on_ready=lambda ready: ask_then(args=(ready,)).start())
    finally:
        signal.signal(signal.SIGTERM, before)
    return told[0]
