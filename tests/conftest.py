"""Fixtures that all rooms share."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tokenizers

from luthier.errors import RowError

# Tests run beside each other, and models are tiny: more threads than one only wait for each other. Programs that tests
# start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# A wait of so many seconds is a hang. What tests wait for takes an idle machine seconds, but they also run on machines
# that do other work: no test waits for less, unless it is about the length of a wait.
HANG_SECONDS = 600.0


class StubServer(ThreadingHTTPServer):
    """A server of tests. Clients that go away before they are answered are what some tests are about: what its thread
    would print of them would stand in the output of a later test."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a client that has gone away."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


gc.disable()  # until all is imported; it would look through it again and again
SHARE = float(os.environ.get("LUTHIER_EXAMPLES", "0.4"))


def examples(number: int) -> int:
    """How many of so many random examples a test tries: the share of them that LUTHIER_EXAMPLES names (1: all)."""
    return max(1, round(number * SHARE))


# A slow machine is no fault of the code: examples may take their time, and the same ones are tried everywhere.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    max_examples=examples(100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")


def reason_is(reason: str) -> Callable[[RowError], bool]:
    """For ``pytest.raises(RowError, check=reason_is("no_target"))``: a row is refused for this reason, in any words."""
    return lambda error: error.reason == reason


@contextmanager
def refused(kind: type[Exception], *told: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The block raises ``kind`` and tells each of these (reasons, keys, names, places, numbers), in any words."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    lacking = [each for each in told if not re.search(rf"(?<![\w.,]){re.escape(each)}(?![\w]|[.,]\d)", text)]
    assert not lacking, f"{lacking} are not told: {text}"


def pytest_collection_finish() -> None:
    """A full collection would look at thousands of tests and at all that their files import, which takes half a
    second."""
    _leave_to_the_end()


@pytest.hookimpl(optionalhook=True)  # programs that tests start run without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: tests of programs wait for them."""
    return len(os.sched_getaffinity(0)) + 1 if sys.platform == "linux" else (os.cpu_count() or 1)


def _leave_to_the_end() -> None:
    """Python's collector need not look again at what is there now, and seldom at all: a process of tests holds
    gigabytes."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of test assets (real tokenizers and data), or a skip that says what is missing."""
    folder = Path(os.environ.get("LUTHIER_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (folder / "tokenizers").is_dir():
        pytest.skip(f"no test assets in {folder}: set LUTHIER_SHARED")
    return folder


@pytest.fixture(autouse=True, scope="session")
def _a_tokenizer_is_parsed_once() -> Iterator[None]:
    """Hundreds of encoders share a few vocabularies, which nobody writes to: to parse one takes a second or two.

    What is parsed is known by its content, so that a file that a test has changed is another.
    """
    from luthier.check.verify.reference_tokenizer import ReferenceTokenizer
    from luthier.encoding import tokenizer, tokenizer_files
    from luthier.templating import sandbox

    read, build, load = tokenizer_files._tokenizer, tokenizer._build, ReferenceTokenizer._load
    trusted: dict[object, tokenizers.Tokenizer] = {}
    specs: dict[bytes, dict[str, Any]] = {}
    built: dict[tuple[int, str], tuple[Any, tokenizers.Tokenizer]] = {}

    def read_once(folder: Path, name: str) -> dict[str, Any]:
        path = folder / "tokenizer.json"
        if not path.is_file():
            return read(folder, name)
        content = hashlib.sha256(path.read_bytes()).digest()
        num_known = len(specs)
        spec = _once(specs, content, lambda: read(folder, name))
        if len(specs) > num_known and path.stat().st_size > 1_000_000:
            _leave_to_the_end()  # a million lists
        return dict(spec)

    def build_once(spec: dict[str, Any], files: tokenizer_files.TokenizerFiles) -> tokenizers.Tokenizer:
        model = spec["model"]
        if not any(known["model"] is model for known in specs.values()):
            return build(spec, files)
        key = id(model), json.dumps({**spec, "model": None})
        return _once(built, key, lambda: (model, build(spec, files)))[1]

    def load_once(judge: ReferenceTokenizer, *, rename: bool) -> tokenizers.Tokenizer:
        files = judge.files
        names = sorted(files.control), files.model.add_tokens, files.model.add_special_tokens
        key = hashlib.sha256(files.tokenizer_json.encode()).digest(), rename, json.dumps(names)
        return _once(trusted, key, lambda: load(judge, rename=rename))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceTokenizer, "_load", load_once)
        patch.setattr(tokenizer_files, "_tokenizer", read_once)
        patch.setattr(tokenizer, "_build", build_once)
        patch.setattr(sandbox, "KEPT", 4096)  # tests take turns with hundreds of templates, and compile each once
        yield


@pytest.fixture(autouse=True, scope="session")
def _stores_are_those_of_these_tests_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What earlier tests have left in the home folder is not found; what is fetched from elsewhere, and large, is."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    cache = tmp_path_factory.mktemp("cache")
    for name in ("luthier/llama.cpp", "uv", "pip"):
        (kept / name).mkdir(parents=True, exist_ok=True)
        (cache / name).parent.mkdir(exist_ok=True)
        (cache / name).symlink_to(kept / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Tests kill processes, which costs nothing of what the system has taken; they cut no power, so no file need be on
    the disk itself. A tiny run asks for that fourteen times, which takes longer than its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _packages_are_looked_for_once() -> Iterator[None]:
    """Accelerate looks for a package at each step, which takes a tenth of a tiny run."""
    imports = sys.modules.get("accelerate.utils.imports")
    with pytest.MonkeyPatch.context() as patch:
        if imports is not None:
            patch.setattr(imports, "_is_package_available", functools.cache(imports._is_package_available))
        yield


def _once(made: dict[Any, Any], key: object, make: Callable[[], Any]) -> Any:
    """What was made for this key; of the eight that are kept, the one that was asked for longest ago goes first."""
    made[key] = made.pop(key) if key in made else make()
    if len(made) > 8:
        made.pop(next(iter(made)))
    return made[key]


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Whichever tests of whichever files ran before in this process, in whichever order: a test finds the same."""
    before = process_state()
    yield
    assert process_state() == before, "this test changes what other tests of its process find"


def process_state() -> dict[str, object]:
    """What all tests of a process share."""
    state: dict[str, object] = {"folder": os.getcwd()}
    state |= {each.name: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    torch = sys.modules.get("torch")
    is_there = torch is not None and hasattr(torch, "is_grad_enabled")  # or on its way
    state["dtype"] = str(torch.get_default_dtype()) if is_there else "torch.float32"  # as it is when it comes
    state["has gradients"] = torch.is_grad_enabled() if is_there else True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    state["stance"] = "default" if dynamo is None else dynamo._stance.stance  # whether what is compiled is used
    return state


@pytest.fixture(autouse=True, scope="module")
def _leaves_no_process() -> Iterator[None]:
    """What a file's tests have started ends with them: a run ends its processes, though Python goes on."""
    before = children()
    yield
    end = time.monotonic() + HANG_SECONDS / 60
    while (left := children() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left, f"these tests leave processes: {[command_of(pid) for pid in left]}"


def children() -> set[int]:
    """The processes that this one has started and that have not been waited for.

    But for those that `multiprocessing` keeps until the end once they were used, as by tests that ran before.
    """
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found |= {int(pid) for pid in task.read_text().split()}
    kept = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
    return {pid for pid in found if not any(name in command_of(pid) for name in kept)}


def command_of(pid: int) -> bytes:
    """The command line of a process; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def served_json(
    answer: Callable[[str, dict[str, Any] | None], tuple[int, object]],
    *,
    tokenizes: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The address of a server that answers (path, body) with (status, JSON). Unless it ``tokenizes``, it has no
    ``/tokenize``, as some servers have none."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.tell(None)

        def do_POST(self) -> None:
            self.tell(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def tell(self, body: dict[str, Any] | None) -> None:
            knows = tokenizes or self.path != "/tokenize"
            status, told = answer(self.path, body) if knows else (404, {"error": "no such path"})
            raw = json.dumps(told).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            return None

    server = StubServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(HANG_SECONDS)
