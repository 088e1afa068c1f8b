"""The command line on real rows with a real tokenizer: every way to train, and a run that is killed and goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from luthier.__main__ import run
from tests.conftest import HANG_SECONDS
from tests.programs import start_program

pytestmark = pytest.mark.shared

STEPS = 4


@pytest.fixture(scope="module")
def model_folder(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-shaped model with weights, and Qwen3's own tokenizer, in one local folder."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, eos_token_id=151645, pad_token_id=151643,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((shared / "tokenizers" / "qwen3" / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def chat_template(model_folder: Path) -> str:
    """As transformers reads it."""
    return str(transformers.AutoTokenizer.from_pretrained(model_folder).chat_template)


def write_config(folder: Path, model: Path, shared: Path, **overrides: str) -> list[str]:
    """A config file in ``folder`` and the arguments of a run with it."""
    (folder / "run.yaml").write_text(f"""
model: {model}
data:
  registry: {shared / "data" / "demo" / "dataset_info.json"}
  use: ["alpaca_en_demo#30", "glaive_toolcall_en_demo#15", identity]
  eval_split: 10
  max_length: 512
  overflow: truncate
  store: {folder / "store"}
train:
  max_steps: {STEPS}
  gradient_accumulation_steps: 2
  learning_rate: 1.0e-3
eval: {{strategy: "no"}}
output: {{dir: {folder / "run"}, save_strategy: steps, save_steps: 2}}
runtime: {{threads: 1}}
tracking: {{progress: false}}
""")
    return ["train", str(folder / "run.yaml"), *(f"{key}={value}" for key, value in overrides.items())]


def finish(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The command in this process, which has imported what it needs, and all that it prints."""
    code = run(arguments)
    output = "".join(capfd.readouterr())
    assert code == 0, output
    return output


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


def report(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "report.json").read_text())
    return content


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_every_way_to_train_runs_on_real_rows(
    adapter: str,
    packing: str,
    shared: Path,
    model_folder: Path,
    chat_template: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = write_config(tmp_path, model_folder, shared, adapter=adapter, **{"train.packing": packing})
    assert "Traceback" not in finish(arguments, capfd)
    result = report(tmp_path / "run")
    assert result["steps"] == len(result["losses"]) == STEPS
    ledger = result["ledger"]
    assert ledger["read"] == ledger["prepared"] + ledger["dropped"] + ledger["quarantined"]
    assert ledger["prepared"] == 30 + 15 + 91 - 10
    folder = tmp_path / "run" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == chat_template
    if adapter == "full":
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_a_run_killed_with_sigkill_goes_on_with_the_same_losses(
    shared: Path, model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    finish(write_config(whole, model_folder, shared), capfd)
    expected = losses(whole / "run")
    assert [step for step, _, _ in expected] == list(range(1, STEPS + 1))

    arguments, said = write_config(killed, model_folder, shared), tmp_path / "said"
    process = start_program("luthier.__main__", arguments, said=said, environment={**os.environ, "HF_HUB_OFFLINE": "1"})
    deadline = time.monotonic() + HANG_SECONDS
    while not (killed / "run" / "checkpoint-2").is_dir():
        assert process.is_alive() and time.monotonic() < deadline, said.read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (killed / "run" / "report.json").exists()

    output = finish(arguments, capfd)
    assert "training goes on from checkpoint-" in output
    assert losses(killed / "run") == expected
