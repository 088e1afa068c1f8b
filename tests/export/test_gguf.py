"""A GGUF file is held against the golden cases by llama.cpp; a stub that answers as its server plants the faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import luthier
from luthier import ExportCheck
from luthier.check.golden import GoldenContext, Parity, read_parity
from luthier.config.schema import ExportConfig
from luthier.engines import Completion, Request
from luthier.errors import ModelError, UserError
from luthier.export import gguf, taken_down
from luthier.export.checks import BOUNDS
from luthier.export.gguf import GGUF_BOUNDS, convert, converter_folder, prove_gguf
from luthier.export.llama_cpp import PROBE, known_name, llama_server
from luthier.export.proof import template_digest
from luthier.prediction import open_run
from luthier.presets import model_folder, tokenizer_folder
from tests.conftest import StubServer
from tests.programs import readme_program

GGUF = partial(ExportConfig, format="gguf")
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
            if self.path == "/tokenize":
                return self._answer({"tokens": [0]})
            told = [{"id": number, "logprob": value} for number, value in answer(body["prompt"]).items()]
            return self._answer({"completion_probabilities": [{"top_logprobs": told}]})

        def _answer(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = StubServer(("127.0.0.1", 0), Handler)
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
    for named in ({}, {"pre_tokenizer": "qwen2"}):
        with pytest.raises(ModelError, match="an unknown model"):
            convert(tmp_path, tmp_path / "out.gguf", GGUF(**named), converter_folder(tmp_path))


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def tokenizer_of(folder: Path, **changes: Any) -> Path:
    spec = json.loads((tokenizer_folder("tiny") / "tokenizer.json").read_bytes())
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({**spec, **changes}), encoding="utf-8")
    return folder


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@pytest.mark.parametrize(("changes", "name"), [
    ({}, "qwen2"),
    ({"normalizer": {"type": "NFC"}}, "qwen2"),
    ({"normalizer": {"type": "Lowercase"}}, None),
    ({"pre_tokenizer": {**BYTES, "use_regex": True}}, "gpt-2"),
    ({"pre_tokenizer": {**BYTES, "use_regex": True, "add_prefix_space": True}}, None),
    ({"pre_tokenizer": sequence(DIGITS, {**BYTES, "use_regex": True})}, "smollm"),
    ({"pre_tokenizer": sequence({**SPLIT, "pattern": {"Regex": r"\w+"}}, BYTES)}, None),
    ({"pre_tokenizer": None}, None),
    ({"model": {"type": "Unigram"}}, None),
])  # fmt: skip
def test_the_way_in_which_a_tokenizer_cuts_texts_has_a_name(
    changes: dict[str, Any], name: str | None, tmp_path: Path
) -> None:
    assert known_name(tokenizer_of(tmp_path / "folder", **changes)) == name


def test_a_pre_tokenizer_is_written_into_gguf_files_alone() -> None:
    with pytest.raises(ValueError, match="format: gguf"):
        ExportConfig(pre_tokenizer="qwen2")


@pytest.fixture(scope="module")
def converter() -> str:
    """A clone of llama.cpp, or what an export has fetched on this machine."""
    named = os.environ.get("LUTHIER_LLAMA_CPP") or str(gguf.kept_converter())
    if not (Path(named) / gguf.SCRIPT).is_file():
        pytest.skip("llama.cpp's converter is not here: LUTHIER_LLAMA_CPP names a clone, or export to GGUF once")
    pytest.importorskip("xllamacpp")
    return named


@pytest.fixture(scope="module")
def run(converter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with a vocabulary that the converter does not know; proofs of few rows."""
    place = tmp_path_factory.mktemp("gguf") / "run"
    described = {
        "model": "preset:tiny-qwen3",
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
    parity = read_parity(tmp_path / "small")
    assert parity.bound == GGUF_BOUNDS[outtype]
    assert list(parity.texts) == [PROBE] and any("qwen2" in note for note in done.notes)
    if outtype == "q8_0":
        assert luthier.check_export(tmp_path / "small").ok
    if outtype == "f32":
        _readmes_program_asks(tmp_path / "small" / files[-1], run)


def _readmes_program_asks(model: Path, run: Path) -> None:
    """The README's program, as it is written, but for the file and an end, gets the answer of the trained run."""
    program = readme_program("xllamacpp").replace("output/gguf/gguf-bf16.gguf", str(model))
    program = program.replace("'temperature': 0", "'temperature': 0, 'max_tokens': 4")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (question,) = re.findall(r"'content': '(.*?)'", program)
    opened = open_run(run)
    prompt = luthier.encode_prompt([{"role": "user", "content": question}], opened.encoder.tokenizer).input_ids
    settings = opened.settings.model_copy(update={"max_new_tokens": 4, "do_sample": False})
    (answer,) = opened.engine(1).generate([Request(prompt=prompt, settings=settings, key=0)])
    assert isinstance(answer, Completion)
    message = luthier.parse_reply(answer.ids, opened.encoder.tokenizer, prompt=prompt)
    assert done.stdout.strip() == message.text.strip()


def written(folder: Path, loaded: Any) -> dict[str, list[int]]:
    """A model with a tokenizer, and the ids of the text of many scripts."""
    config = AutoConfig.from_pretrained(str(model_folder("tiny-qwen3")))
    config.vocab_size, config.pad_token_id = len(loaded), None
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    loaded.save_pretrained(folder)
    return {PROBE: loaded.encode(PROBE, add_special_tokens=False)}


@pytest.mark.timeout(600)
def test_a_wrong_name_for_the_way_in_which_texts_are_cut_is_found(converter: str, tmp_path: Path) -> None:
    tiny = AutoTokenizer.from_pretrained(str(tokenizer_folder("tiny")))
    texts = written(tmp_path, tiny.train_new_from_iterator([PROBE] * 10, 900))
    for section, name, failed in ((GGUF(), "qwen2", set()), (GGUF(pre_tokenizer="gpt-2"), "gpt-2", {C.TOKENS})):
        model = tmp_path / f"{name}.gguf"
        assert convert(tmp_path, model, section, Path(converter)) == name
        proof = prove_gguf(model, msgspec.structs.replace(PARITY, contexts=[], texts=texts))
        found = {result.check for result in proof.results if not result.ok}
        assert found & {C.LOADS, C.TOKENS} == failed


@pytest.mark.shared
@pytest.mark.timeout(600)
def test_a_tokenizer_that_the_converter_knows_keeps_its_name(shared: Path, converter: str, tmp_path: Path) -> None:
    written(tmp_path, AutoTokenizer.from_pretrained(str(shared / "tokenizers" / "qwen3")))
    assert convert(tmp_path, tmp_path / "out.gguf", GGUF(outtype="f32"), Path(converter)) is None
