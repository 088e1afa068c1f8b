"""Prompts are compared with those of a real llama.cpp server, with the vocabularies and templates of real models."""

from __future__ import annotations

import functools
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from llama_cpp import llama_cpp_server, write_gguf
from verify_cases import PLAIN, THINKING, TOOLS, chat, message

from luthier.check.verify import Check, Violation
from luthier.check.verify.plain_template import plain_message
from luthier.check.verify.reference_tokenizer import Dialect, TokenServer, wire_messages
from luthier.check.verify.row import RowVerifier
from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.records import Conversation
from tests.conftest import HANG_SECONDS

pytestmark = pytest.mark.shared
ODD = chat(
    message("user", "Hi  there,\n\n\nl'été 12345.67 <b>x</b>\t日本 👩‍👩‍👧 don't"),
    message("assistant", "  ok\n"),
    message("user", "  def f(x):\n        return {'a': [1, 2]}\r\n"),
    message("assistant", "ok"),
)
ROWS: dict[str, Sequence[Conversation]] = {
    "qwen3": (PLAIN, ODD, TOOLS, THINKING),
    "llama3_1": (PLAIN, ODD),
    "gemma3": (PLAIN, ODD),
}
BEGINS = {"llama3_1": "<|begin_of_text|>", "gemma3": "<bos>"}


@functools.cache
def verifier_of(folder: Path) -> tuple[Encoder, RowVerifier]:
    under_test = Encoder(ModelConfig(name_or_path=str(folder)), TemplateConfig())
    verifier = RowVerifier(under_test)
    verifier.verify(PLAIN, under_test.encode(PLAIN))  # what is slow to load is there before a server waits for it
    return under_test, verifier


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model_of(models: Path, folder: Path, *, add_bos: bool) -> Path:
    path = models / f"{folder.name}-{add_bos}.gguf"
    if not path.exists():
        write_gguf(path, folder, add_bos=add_bos)
    return path


def served_faults(folder: Path, url: str, rows: Sequence[Conversation]) -> tuple[int, list[Violation]]:
    """How many prompts were asked for, and which were not training's."""
    under_test, verifier = verifier_of(folder)
    verifier.server, asked, found = TokenServer(url), 0, list[Violation]()
    for row in rows:
        verdict = verifier.verify(row, under_test.encode(row))
        asked += verdict.notes["prompts_asked"]
        found += verdict.violations
    assert verifier.server.dialect is Dialect.TEMPLATE
    return asked, found


def tokens_of_chat(url: str, row: Conversation, turn: int) -> int:
    """Of how many tokens the prompt is that the server's own chat works with."""
    body = {"messages": wire_messages([plain_message(each) for each in row.messages[:turn]]), "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(asked, timeout=HANG_SECONDS) as response:
        counted: int = json.loads(response.read())["usage"]["prompt_tokens"]
    return counted


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
def test_what_a_real_server_makes_of_messages_is_what_training_has(shared: Path, models: Path, name: str) -> None:
    folder = shared / "tokenizers" / name
    under_test, _ = verifier_of(folder)
    template = under_test.tokenizer.template
    assert template is not None
    with llama_cpp_server(model_of(models, folder, add_bos=name in BEGINS), template.source) as url:
        asked, found = served_faults(folder, url, ROWS[name])
        assert [str(fault) for fault in found] == []
        assert asked == 2 * len(ROWS[name])
        ids = TokenServer(url).prompt_ids(PLAIN.messages[:4], (), {})
        assert len(ids) == tokens_of_chat(url, PLAIN, 4)


@pytest.mark.parametrize("name", ["llama3_1", "gemma3"])
def test_two_begin_tokens_of_a_real_server_are_reported(shared: Path, models: Path, name: str) -> None:
    """The served template writes one more, of which the server takes off one and adds one: its chat really sees two."""
    folder = shared / "tokenizers" / name
    under_test, _ = verifier_of(folder)
    template = under_test.tokenizer.template
    assert template is not None
    with llama_cpp_server(model_of(models, folder, add_bos=True), "{{ bos_token }}" + template.source) as url:
        asked, found = served_faults(folder, url, [PLAIN])
        assert asked == 2 and {fault.check for fault in found} == {Check.SERVED_TOKENS}
        assert len(found) == 2 and found[0].index == 1
        ids = TokenServer(url).prompt_ids(PLAIN.messages[:4], (), {}).tolist()
        assert ids[0] == ids[1] == under_test.tokenizer.encode_whole(BEGINS[name])[0]
        assert len(ids) == tokens_of_chat(url, PLAIN, 4)


def test_a_begin_token_that_the_model_does_not_have_is_reported(shared: Path, models: Path) -> None:
    """A model file converted with a begin token, for a model that has none."""
    folder = shared / "tokenizers" / "qwen3"
    under_test, _ = verifier_of(folder)
    template = under_test.tokenizer.template
    assert template is not None
    with llama_cpp_server(model_of(models, folder, add_bos=True), template.source) as url:
        _, found = served_faults(folder, url, [PLAIN])
    assert {fault.check for fault in found} == {Check.SERVED_TOKENS} and found[0].index == 0
