"""A llama.cpp server in a process of its own, which a broken model file may bring down without anybody else.

Run as a program it is the server: ``python -m luthier.export.llama_server MODEL.gguf FILE``. It writes its address to
the file, as what it prints may stand within a line of llama.cpp's, and ends when its standard input does, so it does
not outlive the process that started it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from luthier.errors import ModelError
from luthier.writing import write_text

READY_IN = 600.0  # seconds until it listens: a large model is read from disk first
CONTEXT = 8192  # tokens of the longest golden case and more


@contextmanager
def llama_server(model: Path) -> Iterator[str]:
    """The address of a server of a model file, ended with the block. Raises `ModelError` if none comes up."""
    with tempfile.TemporaryDirectory() as folder:
        address, log = Path(folder) / "address", Path(folder) / "log"
        command = [sys.executable, "-m", __name__, str(model), str(address)]
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


if __name__ == "__main__":
    _serve(*sys.argv[1:])
