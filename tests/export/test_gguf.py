"""A GGUF file is held against the golden cases by llama.cpp; a stub that answers as its server plants the faults."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

import luthier
from luthier import ExportCheck
from luthier.check.golden import GoldenContext, Parity, read_parity
from luthier.errors import ModelError, UserError
from luthier.export import gguf, taken_down
from luthier.export.bounds import BOUNDS
from luthier.export.gguf import GGUF_BOUNDS, convert, converter_folder, prove_gguf
from luthier.export.llama_server import llama_server
from luthier.export.proof import template_digest

TEMPLATE = "{{ messages }}"
Told = dict[int, float]
CONTEXT = GoldenContext(
    row="rows.jsonl:1",
    ids=[5, 6, 7, 8],
    places=[2, 3],
    top_ids=[[7, 1], [8, 2]],
    top_logprobs=[[-0.1, -3.0], [-0.2, -2.5]],
    greedy_from=2,
)
PARITY = Parity(
    version=1,
    luthier="",
    source="",
    dtype="float32",
    bound=GGUF_BOUNDS["f32"],
    template_kwargs={},
    template_now="",
    template_sha256=template_digest(TEMPLATE),
    stops=[],
    special_ids={},
    prompts=[],
    contexts=[CONTEXT, msgspec.structs.replace(CONTEXT, greedy_from=None)],
)


def trained(ids: list[int]) -> Told:
    at = CONTEXT.places.index(len(ids))
    assert ids == CONTEXT.ids[: len(ids)]
    return dict(zip(CONTEXT.top_ids[at], CONTEXT.top_logprobs[at], strict=True))


def another(ids: list[int]) -> Told:
    return {number: value - 0.01 for number, value in trained(ids).items()}


def another_likeliest(ids: list[int]) -> Told:
    return {**trained(ids), 0: -0.01}


@contextmanager
def stub(answer: Callable[[list[int]], Told], template: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"chat_template": template})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told = [{"id": number, "logprob": value} for number, value in answer(body["prompt"]).items()]
            self._answer({"completion_probabilities": [{"top_logprobs": told}]})

        def _answer(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


C = ExportCheck


@pytest.mark.parametrize(("answer", "template", "failed"), [
    (trained, TEMPLATE, set()),
    (trained, TEMPLATE + " ", {C.TEMPLATE}),
    (another, TEMPLATE, {C.LOGPROBS, C.ANSWERS}),
    (another_likeliest, TEMPLATE, {C.LOGPROBS, C.ANSWERS}),
])  # fmt: skip
def test_what_llama_cpp_does_is_held_against_the_golden_cases(
    answer: Callable[[list[int]], Told], template: str, failed: set[ExportCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "llama_server", lambda model: stub(answer, template))
    monkeypatch.setattr(gguf, "check_installed", lambda: None)
    found = prove_gguf(Path("some.gguf"), PARITY)
    assert {result.check for result in found.results if not result.ok} == failed


def test_every_type_has_a_bound() -> None:
    assert all(name in BOUNDS for name in GGUF_BOUNDS.values())


def test_a_file_that_llama_cpp_does_not_load_is_told(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(ModelError), llama_server(tmp_path / "broken.gguf"):
        pass
    found = prove_gguf(tmp_path / "broken.gguf", PARITY)
    assert [result.check for result in found.results if not result.ok] == [C.LOADS]


def test_a_converter_that_is_none_or_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        converter_folder(tmp_path)
    script = tmp_path / gguf.SCRIPT
    script.write_text("raise NotImplementedError('an unknown model')\n", encoding="utf-8")
    with pytest.raises(ModelError, match="an unknown model"):
        convert(tmp_path, tmp_path / "out.gguf", "f32", converter_folder(tmp_path))


@pytest.fixture(scope="module")
def converter() -> str:
    """A clone of llama.cpp, or what an export has fetched on this machine."""
    named = os.environ.get("LUTHIER_LLAMA_CPP") or str(gguf.kept_converter())
    if not (Path(named) / gguf.SCRIPT).is_file():
        pytest.skip("llama.cpp's converter is not here: LUTHIER_LLAMA_CPP names a clone, or export to GGUF once")
    pytest.importorskip("xllamacpp")
    return named


@pytest.fixture(scope="module")
def run(shared: Path, converter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with a tokenizer that the converter knows; proofs of few rows."""
    place = tmp_path_factory.mktemp("gguf") / "run"
    described = {
        "model": {"name_or_path": "preset:tiny-qwen3", "tokenizer_name_or_path": str(shared / "tokenizers" / "qwen3")},
        "data": {"train": [{"path": "preset:skills", "first_rows": 20}], "max_drop": 0.5},
        "adapter": {"type": "lora"},
        "train": {"max_steps": 2, "learning_rate": 0.01, "per_device_train_batch_size": 2, "precision": "fp32"},
        "output": {"dir": str(place), "save_strategy": "no"},
        "tracking": {"progress": False},
    }
    luthier.train(described)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NUM_ROWS", 6), ("NUM_CONTEXTS", 3), ("NUM_ANSWERS", 2), ("ANSWER_TOKENS", 5)):
            patch.setattr(taken_down, name, value)
        yield place


@pytest.mark.shared
@pytest.mark.timeout(600)
@pytest.mark.parametrize("outtype", GGUF_BOUNDS if "LUTHIER_LLAMA_CPP" in os.environ else ["f32"])  # each takes 10 s
def test_a_run_becomes_a_file_that_llama_cpp_answers_alike(
    outtype: str, run: Path, converter: str, tmp_path: Path
) -> None:
    said = ["export.format=gguf", f"export.outtype={outtype}", f"export.llama_cpp={converter}"]
    done = luthier.export_run(run, luthier.ExportOptions(to=tmp_path / "small"), overrides=said)
    assert done.ok, done.proof
    files = ["README.md", "parity.json", f"small-{outtype}.gguf"]
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == files
    assert read_parity(tmp_path / "small").bound == GGUF_BOUNDS[outtype]
    if outtype == "q8_0":
        assert luthier.check_export(tmp_path / "small").ok
