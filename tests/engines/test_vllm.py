"""A real vLLM serves an exported run: the prompts, the answers and the adapters that it is given. ``LUTHIER_VLLM`` is
the Python of an environment that has it, as vLLM and Luthier need other versions of the same packages.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import luthier
from luthier.check.golden import read_parity, served_otherwise
from luthier.check.verify.reference_tokenizer import TokenServer
from luthier.errors import UserError
from luthier.presets import dataset_rows
from tests.conftest import HANG_SECONDS

FLAGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--host", "127.0.0.1", "--enforce-eager", "--enable-lora"),
    *("--logprobs-mode", "processed_logprobs", "--chat-template-content-format", "string"),
)
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
pytestmark = pytest.mark.timeout(900)


def described(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": "preset:tiny-qwen3",
        "data": {"train": [{"path": "preset:skills", "first_rows": 40}], "max_drop": 0.5, "max_length": 512},
        "train": {"max_steps": 2, "learning_rate": 0.001, "per_device_train_batch_size": 4, "precision": "fp32"},
        "output": {"dir": str(folder), "save_strategy": "no"},
        "tracking": {"progress": False},
        **more,
    }


@pytest.fixture(scope="module")
def python() -> str:
    if (named := os.environ.get("LUTHIER_VLLM")) is None:
        pytest.skip("no vLLM: LUTHIER_VLLM names the Python of an environment that has it")
    return named


@pytest.fixture(scope="module")
def base(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, exported, and questions."""
    folder = tmp_path_factory.mktemp("vllm")
    rows = [json.dumps(row) for row in islice(dataset_rows("skills", "test"), 24)]
    (folder / "questions.jsonl").write_text("\n".join(rows), encoding="utf-8")
    luthier.train(described(folder / "run"))
    assert luthier.export_run(folder / "run", luthier.ExportOptions(to=folder / "exported")).ok
    return folder


@pytest.fixture(scope="module")
def url(python: str, base: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = base / "vllm.log"
    model = ["--model", str(base / "exported"), "--served-model-name", "policy", "--port", str(port)]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *model, *FLAGS]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as said:
        server = subprocess.Popen(
            command, stdout=said, stderr=said, env={**environment, **SETTINGS}, start_new_session=True
        )
    try:
        await_health(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=HANG_SECONDS)


def await_health(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + HANG_SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text(encoding="utf-8", errors="replace")[-3000:])


def test_vllm_makes_the_ids_of_training(url: str, base: Path) -> None:
    parity = read_parity(base / "exported")
    assert len(parity.prompts) > 20
    assert served_otherwise(parity, TokenServer(url)) == []


def predicted(run: Path, out: Path, engine: str | None = None, model: str | None = None) -> list[list[int]]:
    data = out.parent / "questions.jsonl"
    options = luthier.PredictOptions(data=data, metrics=["exact"], out=out, model=model)
    short = ["generate.max_new_tokens=8", "eval.per_device_eval_batch_size=16"]
    lines = luthier.predict(run, options, overrides=short, engine=engine).predictions.read_text().splitlines()
    return [json.loads(line)["ids"] for line in lines]


def test_vllm_answers_as_the_run_does(url: str, base: Path) -> None:
    assert predicted(base / "run", base / "there", url) == predicted(base / "run", base / "here")


def test_vllm_takes_the_adapters_of_a_run_that_learns_from_its_answers(url: str, base: Path) -> None:
    (base / "rewards.py").write_text("def letters(answer, **more):\n    return float(answer.count('e'))\n")
    rewards = [{"function": f"{base / 'rewards.py'}:letters"}]
    rollout = {"prompts_per_step": 2, "answers": 4, "max_new_tokens": 8, "min_finished": 0.0, "rewards": rewards}
    learned = luthier.train(
        described(
            base / "learned",
            model=str(base / "run" / "model"),
            adapter={"type": "lora", "r": 4},
            train={"max_steps": 3, "learning_rate": 0.05, "precision": "fp32"},
            objective="rl",
            rollout={**rollout, "engine": {"url": url}},
        )
    )
    assert len(learned.steps) == 3  # each delivery is proven by two rows that both sides score
    body = json.dumps({"lora_name": "tuned", "lora_path": str(base / "learned" / "model")}).encode()
    asked = urllib.request.Request(f"{url}/v1/load_lora_adapter", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(asked, timeout=HANG_SECONDS).close()
    with pytest.raises(UserError):  # the base, or the adapter?
        predicted(base / "learned", base / "unnamed", engine=url)
    there = predicted(base / "learned", base / "tuned", engine=url, model="tuned")
    assert there == predicted(base / "learned", base / "alone")
    assert there != predicted(base / "learned", base / "untuned", engine=url, model="policy")
