"""What llama.cpp does in processes of its own: its server, and its converter with a name for a tokenizer.

Run as a program, ``python -m luthier.export.llama_cpp``, this module is either of them:

    serve MODEL.gguf FILE                              the server, which a broken file may bring down without anybody
                                                       else. It writes its address to FILE, as what it prints may stand
                                                       within a line of llama.cpp's, and ends when its standard input
                                                       does, so it does not outlive the process that started it.
    convert CONVERTER NAME always|unknown ARGUMENTS …  the converter, whose files stay as they are
"""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from luthier.errors import ModelError
from luthier.writing import JsonObject, write_text

READY_IN = 600.0  # seconds until it listens: a large model is read from disk first
CONTEXT = 8192  # tokens of the longest golden case and more


@contextmanager
def llama_server(model: Path) -> Iterator[str]:
    """The address of a server of a model file, ended with the block. Raises `ModelError` if none comes up."""
    with tempfile.TemporaryDirectory() as folder:
        address, log = Path(folder) / "address", Path(folder) / "log"
        command = [sys.executable, "-m", __name__, "serve", str(model), str(address)]
        with (
            log.open("wb") as said,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT) as server,
        ):
            try:
                yield _address(server, address, log)
            finally:
                server.kill()


def _address(server: subprocess.Popen[bytes], address: Path, log: Path) -> str:
    until = time.monotonic() + READY_IN
    while time.monotonic() < until:
        if address.exists():
            return address.read_text(encoding="utf-8")
        if server.poll() is not None:
            break
        time.sleep(0.05)
    said = log.read_text(encoding="utf-8", errors="replace")
    errors = [line.strip() for line in said.splitlines() if "error" in line.lower()]
    raise ModelError(
        f"llama.cpp does not load the file: {(errors or said.strip().splitlines() or ['no word'])[-1][:300]}"
    )


def _serve(model: str, address: str) -> None:
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel = CONTEXT, 1
    params.warmup, params.use_jinja = False, True
    # what is proven is the file: earlier tokens are remembered in float32, as the trained model does, not in float16
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    write_text(Path(address), server.listening_address)
    sys.stdin.buffer.read()


# --------------------------------------------------------------------------------------------------------------------
# Names that llama.cpp has for the ways in which tokenizers cut texts into words. Its converter knows a tokenizer by the
# ids of one fixed text, so it knows no vocabulary of one's own. The name that it asks for only says how texts are cut
# before the vocabulary is used, and that stands in ``tokenizer.json``.

USED = "PRE-TOKENIZER"  # what the program prints where the name was needed
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = _ENDS + _LETTERS + r"|\p{N}" + _SIGNS + _SPACES
_QWEN35 = _ENDS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_LLAMA3 = _ENDS + _LETTERS + r"|\p{N}{1,3}" + _SIGNS + _SPACES


def _cased(ends: str, digits: str) -> str:
    words = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}{ends}" for a, b in (("*", "+"), ("+", "*"))]
    return "|".join([*words, digits]) + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES


# expressions by which a text is cut, one after the other, and whether a word that is in the vocabulary is taken whole
_NAMES: dict[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((r"\p{N}", _GPT2), False): "smollm",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_LLAMA3,), False): "dbrx",
    ((_LLAMA3,), True): "llama-bpe",
    ((_cased(rf"{_ENDS}?", r"\p{N}{1,3}"),), False): "gpt-4o",
    ((_cased("", r"\p{N}"),), True): "tekken",
}

# What a tokenizer that llama.cpp has under another's name is asked for: where the ways to cut texts differ.
PROBE = (
    "I'll say: they'RE here, it's 'mine', 'Tis (so)! \"Quoted\"... x=a+b; f(7)//2 #tag @you a_b C++ HTTPServer iPhone\n"
    "\n\n  two spaces,\ttab,\t\ttwo \n \n\r\nline \r end   \n    1 12 123 1234 12345 3.14 1,000,000 ½ ² Ⅳ ٣٤ 7th v2.0\n"
    "Ünïcödé naïve ÉCOLE straße Ελλάδα Привет, мир! שלום مرحبا नमस्ते สวัสดี 你好,世界。东京タワー 한국어 ——“”‘’… №5 €20 "
    "→x 👍🏽 👩‍👩‍👧 ✅ \u00a0nbsp\u3000wide </br> <b>&amp;</b> https://example.com/a?b=1&c=%20 "
    "''''' ``````` ------ =====  "
)


def known_name(folder: Path) -> str | None:
    """The name that llama.cpp has for the way in which the tokenizer of a folder cuts texts; None: it is not known
    here, or the folder has no ``tokenizer.json`` with a byte-level BPE."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    spec: JsonObject = json.loads(file.read_bytes())
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or (spec.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return None
    return _NAMES.get((_expressions(spec.get("pre_tokenizer")), bool(model.get("ignore_merges"))))


def _expressions(step: JsonObject | None) -> tuple[str, ...]:
    """By which a text is cut; those of a step that is not known are "?"."""
    match step:
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            return tuple(expression for one in steps for expression in _expressions(one))
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return (pattern,)
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}:
            return (pattern,)
        case {"type": "Digits", "individual_digits": True}:
            return (r"\p{N}",)
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(cuts)}:
            return (_GPT2,) if cuts else ()
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return (_GPT2,)
        case _:
            return ("?",)


def _convert(script: str, name: str, always: bool, arguments: list[str]) -> None:
    sys.path.insert(0, str(Path(script).parent))
    program = runpy.run_path(script, run_name="converter")
    models = program["TextModel"] if "TextModel" in program else importlib.import_module("conversion.base").TextModel
    recognised = models.get_vocab_base_pre

    def named(self: Any, tokenizer: Any) -> str:
        if not always:
            try:
                return str(recognised(self, tokenizer))
            except NotImplementedError:
                pass
        print(f"{USED} {name}", flush=True)
        return name

    models.get_vocab_base_pre = named
    sys.argv = [script, *arguments]
    program["main"]()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", model, address]:
            _serve(model, address)
        case ["convert", script, name, when, *arguments]:
            _convert(script, name, when == "always", arguments)
