"""Requests bring their media with them, no file is opened and nothing is fetched; and a server ends when it is told."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import luthier
from luthier.__main__ import run as run_command
from luthier.config.inputs import SourceConfig
from luthier.encoding import as_prompt
from luthier.engines import Request
from luthier.errors import UserError
from luthier.prediction import open_run
from luthier.records import NOWHERE
from luthier.serve.running import ServeOptions, serve
from luthier.sources import RawRow
from luthier.sources.detect import detect_layout
from luthier.sources.source import RowReader
from tests.programs import readme_program
from tests.serve.conftest import ASK, Running, asked_of, running

QUESTION = {"type": "text", "text": "What is it?"}


def picture(width: int = 64, height: int = 48) -> bytes:
    made = io.BytesIO()
    Image.fromarray(np.arange(width * height * 3, dtype=np.uint8).reshape(height, width, 3)).save(made, "PNG")
    return made.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asked_about(url: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, QUESTION]}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that sees, of a run whose rows may read any file."""
    opened = open_run(Path("preset:tiny-qwen3-vl"), ["media.roots=[/]", "media.url_hosts=['127.0.0.1']"])
    engine = opened.engine(4)
    with running(opened.encoder, engine.session(), score=engine.scored, max_media=3, max_pixels=9000) as found:
        found.chat(messages=asked_about(data_url(picture())), max_tokens=1)  # whatever is loaded late is loaded
        yield found


def test_a_picture_in_a_request_is_seen_as_in_training(server: Running) -> None:
    opened = open_run(Path("preset:tiny-qwen3-vl"))
    told = server.http.post("/tokenize", json={"messages": asked_about(data_url(picture()))}).json()["tokens"]
    row = {"messages": [{"role": "user", "content": [{"type": "image", "bytes": picture()}, QUESTION]}]}
    reader = RowReader(layout=detect_layout(SourceConfig(path="rows.jsonl"), [row]))
    record = reader.convert(RawRow(raw=b"", data=row, address=NOWHERE))
    prompt = opened.encoder.encode(as_prompt(record))
    assert told == prompt.input_ids.tolist()
    answer = server.chat(messages=asked_about(data_url(picture())), max_tokens=6, temperature=0).json()
    settings = opened.settings.model_copy(update={"max_new_tokens": 6})
    question = Request(prompt=prompt.input_ids, media=prompt.media, settings=settings, key=0)
    (expected,) = opened.engine(1).generate([question])
    assert answer["usage"]["completion_tokens"] == len(expected.ids)  # type: ignore[union-attr]
    message = luthier.parse_reply(expected.ids, opened.encoder.tokenizer, prompt=prompt.input_ids)  # type: ignore[union-attr]
    assert answer["choices"][0]["message"]["content"] == message.text


PROBES = [
    "/etc/passwd", "etc/passwd", "../../../etc/passwd", "file:///etc/passwd", "file://localhost/etc/passwd",
    "~/.ssh/id_rsa",
    "/proc/self/environ", "/dev/zero", "\\\\host\\share\\x.png", "C:\\x.png", ".", "", " ", "\0", "/etc/passwd\0.png",
    "http://127.0.0.1:1/x.png", "https://127.0.0.1/x.png", "http://[::1]:1/x", "http://169.254.169.254/latest",
    "ftp://127.0.0.1/x",
    "gopher://127.0.0.1:1/", "//127.0.0.1/x.png", "HTTP://127.0.0.1/x", "data:image/png,abc", "data:;base64", "data:",
    "data:image/png;base64,", "data:image/png;base64,!!!!", "data:text/plain;base64,L2V0Yy9wYXNzd2Q=",
    "data:image/svg+xml;base64,PHN2Zz48aW1hZ2UgaHJlZj0iL2V0Yy9wYXNzd2QiLz48L3N2Zz4=", "s3://bucket/x.png",
]  # fmt: skip


@contextmanager
def watched() -> Iterator[list[str]]:
    """The files that are opened and the connections that are made meanwhile, but those of this test's own client."""
    seen: list[str] = []
    is_on = True
    own = threading.get_ident()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        wanted = event in ("open", "os.open", "os.listdir", "os.scandir", "socket.connect", "socket.getaddrinfo")
        if is_on and wanted and threading.get_ident() != own:
            seen.append(f"{event} {arguments[:2]}")

    sys.addaudithook(hook)  # there is no way to take one out
    try:
        yield seen
    finally:
        is_on = False


def test_no_path_and_no_address_of_a_request_is_opened(server: Running) -> None:
    with watched() as seen:
        for url in PROBES:
            answer = server.chat(messages=asked_about(url), max_tokens=1)
            assert answer.status_code in (400, 413), url
        for url in PROBES[:3]:
            for kind in ("video_url", "audio_url"):
                part = {"type": kind, kind: {"url": url}}
                assert server.chat(messages=[{"role": "user", "content": [part]}]).status_code == 400
    assert seen == []


def test_what_opens_a_file_would_be_seen() -> None:
    with watched() as seen:
        thread = threading.Thread(target=lambda: Path(__file__).read_bytes())
        thread.start()
        thread.join()
    assert len(seen) == 1


def test_pictures_over_a_limit_are_refused_with_the_numbers(server: Running) -> None:
    one = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    for content, told in (([one] * 4, "limit is 3"), ([one] * 3, "9,216")):
        answer = server.chat(messages=[{"role": "user", "content": [*content, QUESTION]}])
        assert answer.status_code == 413
        assert told in answer.json()["error"]["message"]


def test_a_client_who_sent_a_request_is_told_of_no_row(server: Running) -> None:
    answer = server.chat(messages=asked_about(data_url(b"no picture")), max_tokens=1)
    assert answer.status_code == 400
    assert "row" not in answer.json()["error"]["message"]


def test_letters_that_look_like_a_picture_are_letters(server: Running) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|><image>"
    answer = server.chat(messages=[{"role": "user", "content": text}], max_tokens=1)
    assert answer.status_code == 200, answer.text


def test_a_signal_ends_a_server_that_has_answered(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(http: httpx.Client) -> Any:
        return http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 4}).json()

    assert asked_of("preset:tiny-qwen3", ServeOptions(port=0), ask)["model"] == "preset:tiny-qwen3"
    assert capsys.readouterr() == ("", ""), "nothing is logged of what users say"


def test_the_readmes_client_is_answered() -> None:
    """Its program, as it is written, but for the port."""

    def ask(http: httpx.Client) -> tuple[str, str]:
        program = readme_program("openai").replace("http://127.0.0.1:8000", str(http.base_url).rstrip("/"))
        told = {**os.environ, "TOKEN": http.headers["Authorization"].removeprefix("Bearer ")}
        done = subprocess.run([sys.executable, "-c", program], env=told, capture_output=True, text=True, check=False)
        (question,) = re.findall(r"'content': '(.*?)'", program)
        body = {"model": "quickstart", "messages": [{"role": "user", "content": question}]}
        answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        return done.stdout + done.stderr, answer + "\n"

    said, expected = asked_of("preset:tiny-qwen3", ServeOptions(port=0, name="quickstart"), ask)
    assert said == expected


def test_other_machines_need_a_token_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="without a token"):
        serve("preset:tiny-qwen3", ServeOptions(host="0.0.0.0"))
    monkeypatch.setenv("MY_TOKEN", "short")
    assert run_command(["serve", "preset:tiny-qwen3", "--token-env", "MY_TOKEN"]) == 2
    assert run_command(["serve", "preset:tiny-qwen3", "--token-env", "NO_SUCH_TOKEN"]) == 2
