"""A Modelfile has a TEMPLATE only where it makes the golden prompts; a folder is pushed without rows nobody chose."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import jinja2
import msgspec
import pytest
from transformers import AutoTokenizer

from luthier.check.golden import GoldenPrompt, Parity
from luthier.errors import ConfigError, UserError
from luthier.export.gguf import modelfile
from luthier.export.model_folder import ExportOptions, check_push, export_run, push
from luthier.presets import tokenizer_folder
from tests.conftest import StubServer, refused

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_GO = (
    '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
    '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
    '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
    "{{ end }}{{ end }}<|im_start|>assistant\n"
)
HISTORY = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Up?"},
    {"role": "assistant", "content": "North."},
    {"role": "user", "content": "Down?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(tokenizer_folder("tiny")))


def parity(tokenizer: Any, *histories: list[dict[str, Any]], **more: Any) -> Parity:
    """Golden prompts of these histories under the tokenizer's template."""
    made = [tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in histories]
    prompts = [
        GoldenPrompt(row=f"rows.jsonl:{number}", messages=messages, tools=[], ids=list(ids))
        for number, (messages, ids) in enumerate(zip(histories, made, strict=True), start=1)
    ]
    said: dict[str, Any] = {"version": 1, "luthier": "", "source": "", "dtype": "float32", "bound": "exact"}
    said |= {"template_kwargs": {}, "template_now": "", "template_sha256": "", "special_ids": {}, "contexts": []}
    return Parity(**said, stops=[tokenizer.convert_tokens_to_ids("<|im_end|>")], prompts=prompts, **more)


def test_a_template_of_texts_around_messages_is_written_in_ollamas_language(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    text, notes = modelfile(Path("/x/some.gguf"), parity(tokenizer, HISTORY, HISTORY[1:2]), tokenizer, 4096)
    assert text == (f'FROM ./some.gguf\nPARAMETER stop "<|im_end|>"\nPARAMETER num_ctx 4096\nTEMPLATE """{IN_GO}"""\n')
    assert len(notes) == 1 and "2" in notes[0]


@pytest.mark.parametrize("family", ["gemma4", "gemma4_text", "nemotron_h"])
def test_no_template_is_written_for_families_whose_prompts_ollama_writes_by_its_own_code(
    family: str, tokenizer: Any
) -> None:
    tokenizer.chat_template = CHATML
    text, (note,) = modelfile(Path("some.gguf"), parity(tokenizer, HISTORY), tokenizer, 4096, family)
    assert "TEMPLATE" not in text and 'PARAMETER stop "<|im_end|>"' in text and family in note


@pytest.mark.parametrize("template", [
    CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
    CHATML.replace("{% for", "{% if messages[0].role != 'system' %}<|im_start|>system\nHi<|im_end|>{% endif %}{% for"),
    CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"),
    CHATML.replace("<|im_end|>\n{% endfor %}", "{{ loop.index }}{% endfor %}"),
    CHATML.replace("{{ m.role }}", "{{ '{{' }}{{ m.role }}"),
    "{{ raise_exception('no') if messages[0].role == 'system' }}" + CHATML,
])  # fmt: skip
def test_a_template_that_does_more_is_left_out_and_that_is_said(template: str, tokenizer: Any) -> None:
    """It changes texts, adds a message, takes blanks away, counts, writes Ollama's own signs, or takes no system."""
    tokenizer.chat_template = template
    asked = [{"role": "user", "content": " Up? "}]
    text, notes = modelfile(Path("some.gguf"), parity(tokenizer, asked), tokenizer, 64)
    assert "TEMPLATE" not in text and text.startswith("FROM ./some.gguf\n") and "TEMPLATE" in notes[0]


def as_ollama_writes(modelfile: str, messages: list[dict[str, Any]]) -> str:
    """The prompt that Ollama makes by a Modelfile: it drops what is not printed, joins messages of one role that follow
    each other, and runs its template, an action of which goes from the first {{ to the next }}. Other actions than
    those that are read here are a mistake, as they are for Go's package text/template."""
    (_, told) = modelfile.split("TEMPLATE ", 1)
    quoted = "".join(letter for letter in told if letter.isprintable() or letter in "\n\r\t").strip()
    (template,) = re.fullmatch(r'"""(.*)"""', quoted, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    texts, jinja, ends = list[str](), "", list[str]()
    for number, part in enumerate(re.split(r"\{\{(.*?)\}\}", template, flags=re.DOTALL)):
        action = part.strip()
        if number % 2 == 0:
            jinja, texts = jinja + f"{{{{ texts[{len(texts)}] }}}}", [*texts, part]
        elif action == "range .Messages":
            jinja, ends = jinja + "{% for one in messages %}", [*ends, "{% endfor %}"]
        elif (found := re.fullmatch(r'(if|else if) eq \.Role ("\w+")', action)) is not None:
            verb, role = found.groups()
            ends += ["{% endif %}"] if verb == "if" else []
            jinja += f"{{% {verb.replace('else if', 'elif')} one.role == {role} %}}"
        elif action == "end":
            jinja += ends.pop()
        else:
            assert action == ".Content", action
            jinja += "{{ one.content }}"
    assert not ends
    joined = list[dict[str, str]]()
    for one in messages:
        if joined and joined[-1]["role"] == one["role"]:
            joined[-1] = {**joined[-1], "content": joined[-1]["content"] + "\n\n" + one["content"]}
        else:
            joined.append(one)
    return jinja2.Template(jinja, keep_trailing_newline=True).render(texts=texts, messages=joined)


LETTERS = ("<|im_start|>", "<|im_end|>", "{", "}", '"', "\n", "\u00a0", "\u200b", *"aé#% " * 4)


def test_what_ollama_makes_of_a_template_is_what_training_makes(tokenizer: Any) -> None:
    """Of chat templates that put any texts around messages, and of histories in which a role speaks twice in a row:
    where there is a TEMPLATE, it makes every golden prompt."""
    rng, written = random.Random(0), 0
    twice = [{"role": "user", "content": "Up?"}, *HISTORY[1:2], {"role": "assistant", "content": "Yes{"}, HISTORY[3]]
    for number in range(100):
        texts = ["".join(rng.choices(LETTERS, k=rng.randrange(4))) for _ in range(7)]
        around = [
            f"{{% if m.role == '{role}' %}}{{{{ {before!r} }}}}{{{{ m.content }}}}{{{{ {behind!r} }}}}{{% endif %}}"
            for role, before, behind in zip(("system", "user", "assistant"), texts[:3], texts[3:6], strict=True)
        ]
        tokenizer.chat_template = (
            f"{{% for m in messages %}}{''.join(around)}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {texts[6]!r} }}}}{{% endif %}}"
        )
        histories = [HISTORY, HISTORY[1:2], *([twice] if number % 10 == 0 else [])]
        told, _ = modelfile(Path("some.gguf"), parity(tokenizer, *histories), tokenizer, 64)
        if "TEMPLATE" in told:
            written += 1
            for history in histories:
                wanted = tokenizer.apply_chat_template(history, add_generation_prompt=True)["input_ids"]
                assert tokenizer(as_ollama_writes(told, history))["input_ids"] == wanted, texts
    assert 20 < written < 80


def test_without_golden_prompts_or_with_tools_there_is_no_template(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    one = parity(tokenizer, HISTORY)
    tools = msgspec.structs.replace(one.prompts[0], tools=[{"type": "function"}])
    for prompts in ([], [tools]):
        text, _ = modelfile(Path("some.gguf"), msgspec.structs.replace(one, prompts=prompts), tokenizer, 64)
        assert "TEMPLATE" not in text


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload asks: who asks, a repository, which files are large, and a commit."""

    seen: dict[str, Any] = {}  # noqa: RUF012  of each test its own

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == "Bearer hf_right"
        self.tell(200 if known else 401, {"name": "ada", "type": "user"} if known else {"error": "no"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        raw = self.rfile.read(int(length)) if length else self.chunks()
        if self.path == "/api/repos/create":
            self.seen["repo"] = json.loads(raw)
            self.tell(200, {"url": "http://127.0.0.1/ada/model", "id": "1"})
        elif self.path == "/api/validate-yaml":
            self.tell(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(raw)["files"]]  # fmt: skip
            self.tell(200, {"files": files})
        elif self.path.endswith("/commit/main") and self.seen.get("fails"):
            self.tell(403, {"error": "not yours"})
        elif self.path.endswith("/commit/main"):
            told = [json.loads(line) for line in raw.splitlines()]
            files = [one["value"] for one in told if one["key"] == "file"]
            self.seen["files"] = {one["path"]: base64.b64decode(one["content"]) for one in files}
            url = "http://127.0.0.1/ada/model/commit/0123"
            self.tell(200, {"commitUrl": url, "commitOid": "0123", "hookOutput": "", "success": True})
        else:
            self.tell(404, {"error": self.path})

    def chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def tell(self, status: int, told: object) -> None:
        raw = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    server = StubServer(("127.0.0.1", 0), Hub)
    Thread(target=lambda: server.serve_forever(0.05), daemon=True).start()
    Hub.seen = {}
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield Hub.seen
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("README.md", "parity.json", "model.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_a_folder_is_pushed_to_a_private_repository_without_rows_that_nobody_chose(
    folder: Path, hub: dict[str, Any]
) -> None:
    check_push("ada/model")
    told = push(folder, "ada/model", public=False, with_parity=False)
    assert hub["repo"]["name"] == "model" and hub["repo"]["organization"] == "ada"
    assert hub["repo"]["visibility"] == "private"
    assert hub["files"] == {name: name.encode() for name in ("README.md", "model.safetensors")}
    assert "parity.json" in told
    push(folder, "ada/model", public=True, with_parity=True)
    assert "parity.json" in hub["files"] and hub["repo"].get("visibility") != "private"


def test_what_cannot_be_pushed_is_told_before_the_export_or_with_what_is_left(
    folder: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(UserError, "export.push", "NAME/MODEL"):
        check_push("ada/my/model")
    hub["fails"] = True
    with refused(UserError, "ada/model", str(folder)):
        push(folder, "ada/model", public=False, with_parity=False)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refused(UserError, "export.push", "HF_TOKEN"):
        check_push("ada/model")


def test_options_that_contradict_are_refused() -> None:
    from luthier.config.loading import load_config

    with refused(ConfigError, "export", "gguf"):
        load_config({"model": "preset:tiny-qwen3", "data": {"train": "preset:skills"}, "export": {"modelfile": True}})


@pytest.mark.parametrize(
    ("given", "data", "named"), [([], "rows.jsonl", "--data"), (["export.llama_cpp=/work"], None, "--llama-cpp")]
)
def test_what_an_export_would_not_follow_is_refused(
    given: list[str], data: str | None, named: str, tmp_path: Path
) -> None:
    described = tmp_path / "run.yaml"
    described.write_text("{model: preset:tiny-qwen3, data: {}, train: {enabled: false}}", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        export_run(described, ExportOptions(to=tmp_path / "x", data=data, proof=False), overrides=given)
    assert named in str(caught.value.hint)


def test_ollama_is_told_the_system_message_of_training(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    text, _ = modelfile(Path("some.gguf"), parity(tokenizer, HISTORY), tokenizer, 64, system="Be brief.")
    assert 'SYSTEM """Be brief."""\n' in text
    left, notes = modelfile(Path("some.gguf"), parity(tokenizer, HISTORY), tokenizer, 64, system='Say """.')
    assert "SYSTEM" not in left and any("SYSTEM" in note for note in notes)
