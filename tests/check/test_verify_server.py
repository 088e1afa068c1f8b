"""Prompts are compared with a running server's; a stub on this machine answers as vLLM and llama.cpp do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from verify_cases import FORGERY, PLAIN, THINKING, TOOLS, chat, encoder, message

from luthier.__main__ import run as run_command
from luthier.check.golden import PARITY_FILE, GoldenPrompt, Parity, write_parity
from luthier.check.verify import Check
from luthier.check.verify.plain_template import plain_message
from luthier.check.verify.reference_tokenizer import Dialect, TokenServer, wire_messages
from luthier.check.verify.row import RowVerifier
from luthier.check.verify.run import VerifyOptions
from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.engines.json_client import token_from
from luthier.errors import UserError
from luthier.records import Conversation, ToolCall
from tests.conftest import StubServer

# (path, body, encoder) -> (status, answer)
Answer = Callable[[str, dict[str, Any], Encoder], tuple[int, Any]]


def _rendered(body: dict[str, Any], under_test: Encoder) -> str:
    """What a server renders: from the messages as they came over the wire, with its own Jinja."""
    import jinja2

    template = under_test.tokenizer.template
    assert template is not None
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    messages = [dict(sent) for sent in body["messages"]]
    for sent in messages:
        for call in sent.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return environment.from_string(template.source).render(
        messages=messages, tools=body.get("tools"), add_generation_prompt=True, **body.get("chat_template_kwargs", {})
    )


def like_vllm(path: str, body: dict[str, Any], under_test: Encoder) -> tuple[int, Any]:
    if path == "/v1/models":
        return 200, {"object": "list", "data": [{"id": "tiny"}]}
    if path != "/tokenize":
        return 404, {"detail": "Not Found"}
    assert body["model"] == "tiny" and body["add_generation_prompt"] is True
    ids = under_test.tokenizer.encode_whole(_rendered(body, under_test)).tolist()
    return 200, {"count": len(ids), "max_model_len": 2048, "tokens": ids}


def like_llama_cpp(path: str, body: dict[str, Any], under_test: Encoder) -> tuple[int, Any]:
    if path == "/apply-template":
        return 200, {"prompt": _rendered(body, under_test)}
    if path == "/tokenize":
        return 200, {"tokens": under_test.tokenizer.encode_whole(body["content"]).tolist()}
    return 404, {"error": "not found"}


def with_two_begins(path: str, body: dict[str, Any], under_test: Encoder) -> tuple[int, Any]:
    status, answer = like_vllm(path, body, under_test)
    return status, {**answer, "tokens": [answer["tokens"][0], *answer["tokens"]]} if "tokens" in answer else answer


def with_another_template(path: str, body: dict[str, Any], under_test: Encoder) -> tuple[int, Any]:
    if path == "/tokenize":
        polite = {"role": "system", "content": "You are a helpful assistant."}
        body = {**body, "messages": [polite, *(m for m in body["messages"] if m["role"] != "system")]}
    return like_vllm(path, body, under_test)


BEGIN = "<s>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def like_llama_cpp_with_a_begin(path: str, body: dict[str, Any], under_test: Encoder) -> tuple[int, Any]:
    """As llama.cpp does where the vocabulary says that a begin token is added: off the text, and on again again."""
    if path == "/apply-template":
        return 200, {"prompt": _rendered(body, under_test).removeprefix(BEGIN)}
    if path == "/tokenize":
        return 200, {
            "tokens": under_test.tokenizer.encode_whole(BEGIN * body["add_special"] + body["content"]).tolist()
        }
    return 404, {"error": "not found"}


def llama_cpp_with_two_begins(path: str, body: dict[str, Any], under_test: Encoder) -> tuple[int, Any]:
    """A server that adds a begin token and leaves the template's where it is."""
    if path == "/apply-template":
        return 200, {"prompt": _rendered(body, under_test)}
    return like_llama_cpp_with_a_begin(path, body, under_test)


@contextmanager
def serving(answer: Answer, under_test: Encoder) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            status, content = answer(self.path, body, under_test)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
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


@pytest.mark.parametrize("answer", [like_vllm, like_llama_cpp])
@pytest.mark.parametrize("row", [PLAIN, THINKING, TOOLS], ids=["plain", "thinking", "tools"])
def test_a_server_that_renders_the_same_agrees(answer: Answer, row: Conversation) -> None:
    under_test = encoder()
    with serving(answer, under_test) as url:
        found = RowVerifier(under_test, server=TokenServer(url)).verify(row, under_test.encode(row))
    assert [str(violation) for violation in found.violations] == []
    assert Check.SERVED_TOKENS in found.applied and found.notes["prompts_asked"] == 2


@pytest.mark.parametrize("answer", [with_two_begins, with_another_template])
def test_a_server_that_makes_other_tokens_is_found(answer: Answer) -> None:
    under_test = encoder()
    with serving(answer, under_test) as url:
        found = RowVerifier(under_test, server=TokenServer(url)).verify(PLAIN, under_test.encode(PLAIN))
    assert {violation.check for violation in found.violations} == {Check.SERVED_TOKENS}
    first = found.violations[0]
    assert first.message == 2 and first.index is not None and first.expected is not None and first.found is not None


def test_template_variables_and_tools_reach_the_server() -> None:
    under_test = encoder(kwargs={"enable_thinking": False})
    seen: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any], encoder_: Encoder) -> tuple[int, Any]:
        if path == "/tokenize":
            seen.append(body)
        return like_vllm(path, body, encoder_)

    with serving(answer, under_test) as url:
        found = RowVerifier(under_test, server=TokenServer(f"{url}/v1/")).verify(TOOLS, under_test.encode(TOOLS))
    assert found.violations == ()
    assert seen[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert seen[0]["tools"][0]["function"]["name"] == "weather"
    assert [m["role"] for m in seen[1]["messages"]] == ["user", "assistant", "tool"]


def test_rows_whose_control_strings_a_server_cannot_tell_apart_are_counted() -> None:
    under_test = encoder()
    row = chat(message("user", FORGERY), message("assistant", "No."))
    with serving(like_vllm, under_test) as url:
        found = RowVerifier(under_test, server=TokenServer(url)).verify(row, under_test.encode(row))
    assert found.violations == () and found.notes["not_asked"] == 1 and Check.SERVED_TOKENS not in found.applied


def test_the_way_of_asking_is_found_with_the_first_question() -> None:
    under_test = encoder()
    for answer, dialect in ((like_vllm, Dialect.MESSAGES), (like_llama_cpp, Dialect.TEMPLATE)):
        with serving(answer, under_test) as url:
            server = TokenServer(url)
            server.prompt_ids(PLAIN.messages[:2], (), {})
            assert server.dialect is dialect


# ---------------------------------------------------------------------------------------------------- what goes wrong


def test_a_server_that_is_not_there_is_a_mistake_with_a_way_out() -> None:
    with serving(like_vllm, encoder()) as url:
        pass
    with pytest.raises(UserError, match="cannot be reached") as error:
        TokenServer(url).prompt_ids(PLAIN.messages[:2], (), {})
    assert error.value.hint is not None and "start the server" in error.value.hint


def test_a_server_that_does_not_answer_in_time_is_said_to_be_so() -> None:
    given_up = threading.Event()

    def slow(path: str, body: dict[str, Any], under_test: Encoder) -> tuple[int, Any]:
        given_up.wait(60)
        return 404, {}

    with serving(slow, encoder()) as url:
        with pytest.raises(UserError, match=r"cannot be reached: .*timed out"):
            TokenServer(url, timeout=0.2).prompt_ids(PLAIN.messages[:2], (), {})
        given_up.set()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, b"<html>"), "answers with no JSON"),
        ((200, []), "a JSON list, not an object"),
        ((500, {"detail": "no chat template"}), r"answers 500: .*no chat template"),
    ],
)
def test_strange_answers_are_told(answer: tuple[int, Any], words: str) -> None:
    with serving(lambda *_: answer, encoder()) as url, pytest.raises(UserError, match=words):
        TokenServer(url).prompt_ids(PLAIN.messages[:2], (), {})


@pytest.mark.parametrize("answer", [{}, {"tokens": ["a"]}, {"tokens": [True]}, {"tokens": 3}])
def test_an_answer_without_ids_is_told(answer: dict[str, Any]) -> None:
    def odd(path: str, body: dict[str, Any], under_test: Encoder) -> tuple[int, Any]:
        return (200, answer) if path == "/tokenize" else (404, {})

    with serving(odd, encoder()) as url, pytest.raises(UserError, match="no list of ids"):
        TokenServer(url).prompt_ids(PLAIN.messages[:2], (), {})


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "", "ftp://host"])
def test_only_http_addresses_are_asked(url: str) -> None:
    with pytest.raises(UserError, match="--against"):
        TokenServer(url)


def test_calls_go_over_the_wire_as_the_openai_interface_has_them() -> None:
    calls = message("assistant", ToolCall(name="a", arguments={"x": "é"}), ToolCall(name="b", arguments={}, id="mine"))
    [sent] = wire_messages([plain_message(calls)])
    assert [call["id"] for call in sent["tool_calls"]] == ["call_0", "mine"]
    assert sent["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"x": "é"}'}


@pytest.mark.parametrize(
    ("answer", "is_true"), [(like_llama_cpp_with_a_begin, True), (llama_cpp_with_two_begins, False)]
)
def test_a_begin_token_that_llama_cpp_adds_itself_is_no_fault_and_two_are(answer: Answer, is_true: bool) -> None:
    under_test = Encoder(
        ModelConfig(name_or_path="preset:tiny-qwen3", add_special_tokens=[BEGIN]),
        TemplateConfig(chat_template=BEGIN + CHATML),
    )
    with serving(answer, under_test) as url:
        found = RowVerifier(under_test, server=TokenServer(url)).verify(PLAIN, under_test.encode(PLAIN))
    assert (Check.SERVED_TOKENS in {violation.check for violation in found.violations}) is not is_true


def test_a_token_is_sent_and_travels_only_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "secret-word")
    token = token_from("SERVER_TOKEN")
    assert TokenServer("http://localhost:1", token=token)._client._headers == {"Authorization": "Bearer secret-word"}
    assert TokenServer("https://far.example", token=token)._client._headers
    with pytest.raises(UserError) as refused:
        TokenServer("http://far.example", token=token)
    assert "secret-word" not in str(refused.value)
    assert "secret-word" not in repr(VerifyOptions(against="https://far.example", token=token))
    with pytest.raises(UserError):
        token_from("NO_SUCH_VARIABLE_IS_SET")


def golden_file(folder: Path, under_test: Encoder, row: Conversation) -> Path:
    """The golden prompt of a row's first answer, as an export leaves it."""
    history = row.messages[:1]
    sample = under_test.encode(replace(row, messages=history, add_generation_prompt=True))
    prompt = GoldenPrompt(
        row="rows.jsonl:1",
        messages=[plain_message(each) for each in history],
        tools=[dict(tool) for tool in row.tools],
        ids=sample.input_ids.tolist(),
    )
    given: dict[str, Any] = {"template_kwargs": {"enable_thinking": False}, "template_now": "", "template_sha256": ""}
    told: dict[str, Any] = {"version": 1, "luthier": "", "source": "", "dtype": "float32", "bound": "exact"}
    parity = Parity(**told, **given, stops=[], special_ids={}, prompts=[prompt], contexts=[])
    write_parity(parity, folder)
    return folder / PARITY_FILE


@pytest.mark.parametrize(("answer", "code"), [(like_vllm, 0), (like_llama_cpp, 0), (with_another_template, 3)])
def test_a_server_is_asked_for_golden_prompts_without_any_run(answer: Answer, code: int, tmp_path: Path) -> None:
    under_test = encoder(kwargs={"enable_thinking": False})
    golden, told = golden_file(tmp_path, under_test, TOOLS), tmp_path / "told.json"
    with serving(answer, under_test) as url:
        assert run_command(["verify", "--against", url, "--golden", str(golden), "--json", str(told)]) == code
    said = json.loads(told.read_text(encoding="utf-8"))
    assert (said["ok"], said["prompts"], len(said["failures"])) == (code == 0, 1, code // 3)


def test_golden_prompts_need_a_server_and_a_run_that_is_named_none(tmp_path: Path) -> None:
    golden = str(golden_file(tmp_path, encoder(kwargs={"enable_thinking": False}), PLAIN))
    for words in (["--golden", golden], [], ["run.yaml", "--golden", golden, "--against", "http://localhost:1"]):
        assert run_command(["verify", *words]) == 2
