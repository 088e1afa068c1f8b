"""What rows may open: files inside of their folder, bytes, what an allowed host sends; nothing else is even touched."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from media_files import OPEN, access

from luthier.errors import RowError, RowForbidden
from luthier.media import files as fetching
from tests.conftest import StubServer, reason_is


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file, beside things that are none of its rows' business."""
    (tmp_path / "media" / "deep").mkdir(parents=True)
    (tmp_path / "media" / "a.png").write_bytes(b"inside")
    (tmp_path / "media" / "deep" / "b.png").write_bytes(b"deeper")
    (tmp_path / "media_evil").mkdir()
    (tmp_path / "media_evil" / "a.png").write_bytes(b"sibling")
    (tmp_path / "secret").write_bytes(b"secret")
    return tmp_path / "media"


def refusal(path: str, root: Path | str | None, **config: Any) -> RowError:
    with pytest.raises(RowError) as found, access(**config).open(path, None if root is None else str(root)):
        pass
    return found.value


# -------------------------------------------------------------------------------------------------------------- paths


def test_files_below_the_root_open_by_any_name_that_stays_there(root: Path) -> None:
    (root / "link.png").symlink_to(root / "deep" / "b.png")
    (root.parent / "alias").symlink_to(root)
    for path, text in [
        (root / "a.png", b"inside"),
        (root / "deep" / ".." / "a.png", b"inside"),
        (root / "link.png", b"deeper"),
    ]:
        with OPEN.open(str(path), str(root)) as content:
            assert content.read(0, 100) == text
    with OPEN.open(str(root.parent / "alias" / "a.png"), str(root.parent / "alias")) as content:
        assert content.file().read() == b"inside"


def test_a_relative_root_is_meant_from_the_current_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with OPEN.open("a.png", ".") as content:
        assert content.size == 6


@pytest.mark.parametrize(
    "path",
    ["{root}/../secret", "{root}/../../etc/passwd", "/etc/passwd", "{root}/../media_evil/a.png", "{root}/out.png",
     "{root}/folder/secret", "/proc/self/environ", "\\\\?\\C:\\x", "{root}/../nothing", "~/.ssh/id_rsa"],
)  # fmt: skip
def test_nothing_outside_of_the_root_is_read(path: str, root: Path) -> None:
    (root / "out.png").symlink_to(root.parent / "secret")
    (root / "folder").symlink_to(root.parent)
    error = refusal(path.format(root=root), root)
    assert isinstance(error, RowForbidden)
    assert error.reason == "media_outside"
    assert str(root) in error.detail
    assert "media.roots" in error.detail


def test_absolute_paths_open_inside_of_the_roots_of_the_run_only(root: Path) -> None:
    outside = str(root.parent / "media_evil" / "a.png")
    assert refusal(outside, root).reason == "media_outside"
    with access(roots=[root.parent / "media_evil"]).open(outside, str(root)) as content:
        assert content.read(0, 9) == b"sibling"


def test_rows_without_a_folder_open_no_path(root: Path) -> None:
    assert refusal(str(root / "a.png"), None).reason == "media_outside"


@pytest.mark.parametrize(
    ("make", "reason", "words"),
    [
        (lambda path: None, "media_missing", "No such file"),
        (lambda path: path.write_bytes(b""), "media_empty", "0 bytes"),
        (lambda path: path.mkdir(), "media_path", "a folder"),
        (lambda path: os.mkfifo(path), "media_path", "a named pipe"),
        (lambda path: path.symlink_to(path), "media_path", "symbolic links"),
    ],
)
def test_what_is_no_ordinary_file_is_told_at_once(make: Any, reason: str, words: str, root: Path) -> None:
    make(root / "x")
    begin = time.monotonic()
    error = refusal(str(root / "x"), root)
    assert time.monotonic() - begin < 1
    assert (error.reason, type(error)) == (reason, RowError)
    assert words in error.detail


def test_devices_impossible_names_and_large_files_are_told_too(root: Path) -> None:
    assert refusal("/dev/zero", root, roots=[Path("/dev")]).detail == "/dev/zero is a device, no file"
    assert refusal(f"{root}/a\0.png", root).reason == "media_path"
    assert refusal(f"{root}/{'a' * 5000}", root).reason == "media_path"
    assert "6 bytes, media.max_bytes is 5" in refusal(f"{root}/a.png", root, max_bytes=5).detail
    with pytest.raises(RowError, check=reason_is("media_empty")):
        OPEN.open(b"")


def test_nothing_stays_open(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in ("a.png", "deep", "nothing", "../secret", "out.png"):
        if path == "out.png":
            (root / path).symlink_to(root.parent / "secret")
        try:
            with OPEN.open(str(root / path), str(root)) as content:
                content.file().read()
        except RowError:
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_version_changes_with_the_content(root: Path) -> None:
    def version() -> str:
        with OPEN.open(str(root / "a.png"), str(root)) as content:
            return content.version

    first = version()
    assert version() == first
    os.utime(root / "a.png", ns=(1, 1))
    assert version() != first
    assert OPEN.open(b"one").version == OPEN.open(b"one").version != OPEN.open(b"two").version


# ---------------------------------------------------------------------------------------------------------- addresses


class Server:
    """A server on this machine that counts who asks."""

    def __init__(self, answer: Any) -> None:
        self.hits: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.hits.append(self.path)
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = StubServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def send(request: BaseHTTPRequestHandler, body: bytes, *, promised: int | None = None) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(body) if promised is None else promised))
    request.end_headers()
    request.wfile.write(body)


def redirect(request: BaseHTTPRequestHandler, target: str) -> None:
    request.send_response(302)
    request.send_header("Location", target)
    request.end_headers()


@pytest.fixture
def victim() -> Iterator[Server]:
    server = Server(lambda request: send(request, b"secret"))
    yield server
    server.stop()


def test_no_row_fetches_anything_unless_hosts_are_allowed(victim: Server) -> None:
    error = refusal(f"http://{victim.host}/a.png", None)
    assert isinstance(error, RowForbidden)
    assert error.reason == "media_url"
    assert victim.hits == []


@pytest.mark.parametrize(
    "url",
    ["http://{victim}/", "http://good.example@{victim}/", "http://{victim}\\@good.example/", "file:///etc/passwd",
     "gopher://{victim}/", "http://good.example:1/", "http://2130706433/", "http://0x7f.1/", "http://[::ffff:127.0.0.1]/",
     "http://good.example.evil/", "http:///x", "http://good.example /", "ftp://good.example/", "http://[/",
     "concat://{victim}", "http://good.example:99999/", "http://gооd.example/"],
)  # fmt: skip
def test_only_plain_addresses_of_allowed_hosts_are_asked(
    url: str, victim: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))
    error = refusal(url.format(victim=victim.host), None, url_hosts=["good.example"])
    assert isinstance(error, RowForbidden)
    assert error.reason == "media_url"
    assert victim.hits == []


def test_an_allowed_address_is_fetched_and_known_by_its_content(victim: Server) -> None:
    with access(url_hosts=[victim.host]).open(f"http://{victim.host}/a.png?x=1") as content:
        assert content.read(0, 100) == b"secret"
        assert content.version == OPEN.open(b"secret").version
    assert victim.hits == ["/a.png?x=1"]


def test_a_redirection_is_checked_as_the_address_was(victim: Server) -> None:
    server = Server(lambda request: redirect(request, f"http://{victim.host}/"))
    try:
        assert refusal(f"http://{server.host}/", None, url_hosts=[server.host]).reason == "media_url"
        assert (len(server.hits), victim.hits) == (1, [])
        with access(url_hosts=[server.host, victim.host]).open(f"http://{server.host}/") as content:
            assert content.read(0, 9) == b"secret"
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda request: redirect(request, "/again"), "media_fetch"),
        (lambda request: request.send_error(404), "media_fetch"),
        (lambda request: send(request, b"short", promised=10), "media_fetch"),
        (lambda request: send(request, b"x" * 2000), "media_limit"),
        (lambda request: send(request, b""), "media_empty"),
        (lambda request: request.wfile.write(b"what?\r\n\r\n"), "media_fetch"),
    ],
)
def test_servers_that_misbehave_cost_their_row_only(answer: Any, reason: str) -> None:
    server = Server(answer)
    try:
        error = refusal(f"http://{server.host}/", None, url_hosts=[server.host], max_url_bytes=1000)
        assert (type(error), error.reason) == (RowError, reason)
    finally:
        server.stop()


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1",
     "fd00::1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "2001:0:1:2:3:4:5:6", "64:ff9b:1::a00:1",
     "fec0::1", "::7f00:1", "::ffff:0:7f00:1", "2002:5db8:d70e::", "ff0e::1", "ff02::1", "3fff::1", "5f00::1", "100::1",
     "100:0:0:1::1", "2001:db8::1", "2001:10::1", "2001:20::1", "2001:4:112::1", "2620:4f:8000::1", "4000::1",
     "8000::1",
     "fe00::1", "::", "192.0.0.9", "192.88.99.1", "192.31.196.1", "192.175.48.1", "198.18.0.1", "240.0.0.1",
     "255.255.255.255", "::ffff:169.254.169.254"],
)  # fmt: skip
def test_a_name_that_leads_to_a_private_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 80))
    private = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [public, private])
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("a connection was opened"))
    error = refusal("http://good.example/", None, url_hosts=["good.example"])
    assert isinstance(error, RowForbidden)
    assert f"leads to {address}" in error.detail


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "8.8.8.8", "2606:2800:21f::1", "2a00:1450:4001::1", "::ffff:8.8.8.8"]
)
def test_public_addresses_are_public(address: str) -> None:
    assert fetching._is_public(address)


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["93.184.215.14", "127.0.0.1"])  # a name server that changes its mind
    asked: list[Any] = []

    def connect(address: Any, **_: Any) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (next(answers), 80))])
    monkeypatch.setattr(socket, "create_connection", connect)
    assert refusal("http://good.example/", None, url_hosts=["good.example"]).reason == "media_fetch"
    assert asked == [("93.184.215.14", 80)]


def test_a_server_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "TIMEOUT", 0.2)
    given_up, ended = threading.Event(), threading.Event()

    def never_end(request: BaseHTTPRequestHandler) -> None:
        given_up.wait(60)
        ended.set()

    server = Server(never_end)
    try:
        assert refusal(f"http://{server.host}/", None, url_hosts=[server.host]).reason == "media_fetch"
        assert not ended.is_set(), "it was given up while it still said nothing"
    finally:
        given_up.set()
        server.stop()
