"""A real llama.cpp server in a process of its own, and the model files that it serves: a tokenizer's vocabulary as it
is, under a network so small that its answers are noise. What is of interest is which tokens the server makes.

Run as a program it is the server: ``python llama_cpp.py MODEL.gguf TEMPLATE.jinja FILE_FOR_ITS_ADDRESS``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from luthier.writing import write_text

READY_IN, ALIVE_FOR = 600.0, 1200.0  # seconds until it listens, and until it ends by itself if nobody ended it
WIDTH = 32  # of the network, one layer of one head
BYTE_PAIRS = {"qwen3": "qwen2", "llama3_1": "llama-bpe"}  # tokenizer -> llama.cpp's name of how it splits words


def write_gguf(path: Path, tokenizer: Path, *, add_bos: bool) -> None:
    """A model file with the vocabulary of the folder ``tokenizer``. ``add_bos``: that a begin token is put before any
    text; what the begin token is says the tokenizer, or is <|endoftext|> where it knows none.
    """
    import gguf
    import numpy as np

    files = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = {
        **files["model"]["vocab"],
        **{token["content"]: token["id"] for token in files["added_tokens"]},
    }
    writer = gguf.GGUFWriter(path, "llama")
    _add_network(writer)
    _add_vocabulary(writer, files, ids, pieces=BYTE_PAIRS.get(tokenizer.name))
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        said = config.get(name) or "<|endoftext|>"
        add(ids[said["content"] if isinstance(said, dict) else said])
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(config["chat_template"])
    rng = np.random.default_rng(0)
    for name, shape in _shapes(max(ids.values()) + 1).items():
        is_norm = len(shape) == 1
        values = np.ones(shape) if is_norm else rng.normal(size=shape, scale=0.05)
        writer.add_tensor(name, values.astype(np.float32 if is_norm else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_network(writer: Any) -> None:
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)


def _shapes(num_tokens: int) -> dict[str, tuple[int, ...]]:
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return {
        "token_embd.weight": (num_tokens, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        **{f"blk.0.{name}.weight": (WIDTH, WIDTH) for name in square},
    }


def _add_vocabulary(writer: Any, files: dict[str, Any], ids: dict[str, int], *, pieces: str | None) -> None:
    """Pairs of bytes with their merges, or SentencePiece's pieces, of which the earlier ones are joined first."""
    from gguf import TokenType

    texts = [f"[PAD{number}]" for number in range(max(ids.values()) + 1)]
    kinds = [TokenType.UNUSED] * len(texts)
    for text, number in ids.items():
        is_byte = pieces is None and len(text) == 6 and text.startswith("<0x")
        texts[number], kinds[number] = text, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in files["added_tokens"]:
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        if pieces is None and not token["special"]:
            texts[token["id"]] = token["content"].replace("▁", " ")  # they are looked for before blanks are replaced
    writer.add_tokenizer_model("llama" if pieces is None else "gpt2")
    writer.add_tokenizer_pre(pieces or "default")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if pieces is None:
        writer.add_token_scores([-float(number) for number in range(len(texts))])
        writer.add_add_space_prefix(False)
    else:
        pairs = files["model"]["merges"]
        writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])


@contextmanager
def llama_cpp_server(model: Path, template: str) -> Iterator[str]:
    """The address of a server of ``model``, which renders with ``template``. It is ended with the block."""
    source, log, address = (model.with_suffix(f".{name}") for name in ("jinja", "log", "address"))
    source.write_text(template, encoding="utf-8")
    address.unlink(missing_ok=True)
    with log.open("wb") as said:
        command = [sys.executable, __file__, str(model), str(source), str(address)]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield _address(server, address, log)
        finally:
            server.kill()
            server.wait(timeout=READY_IN)


def _address(server: subprocess.Popen[bytes], address: Path, log: Path) -> str:
    """What the server wrote to a file: what it prints may stand within a line of llama.cpp's."""
    until = time.monotonic() + READY_IN
    while time.monotonic() < until:
        if address.exists():
            return address.read_text(encoding="utf-8")
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(
        f"no server within {READY_IN:g} s: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
    )


def _serve(model: str, template: str, address: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.chat_template = Path(template).read_text(encoding="utf-8")
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 1, 1
    params.warmup, params.use_jinja = False, True
    server = xllamacpp.Server(params)
    write_text(Path(address), server.listening_address)
    time.sleep(ALIVE_FOR)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
