"""Options that would be taken and not followed are refused before anything is loaded, each by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from luthier.__main__ import app, run
from luthier.cli import EXCLUDES, NEEDS, PairedCommand
from luthier.export import model_folder

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NOT_FOLLOWED = [
    "predict RUN --model a",
    "chat RUN --model a",
    "export --check RUN --push a/b",
    "export --check RUN --data rows.jsonl",
    "export --check RUN --no-proof",
    "export --check RUN --quantize int8",
    "export RUN --no-proof --push a/b",
    "export RUN --format gguf --max-shard 5GB",
    "export RUN --format hf --llama-cpp DIR",
    "serve RUN --adapter a=b --accept-weights DIR",
    "show RUN --rollouts --split train",
    "show RUN --rollouts --pack 1",
    "verify --golden FILE",
    "verify RUN --token-env NAME",
    "verify --golden FILE --against http://localhost:1 --sample 3",
    "verify --golden FILE --against http://localhost:1 --split train",
    "verify --golden FILE --against http://localhost:1 --stored",
    "verify --golden FILE --against http://localhost:1 --max-failures 1",
]


def flags_of(command: str) -> set[str]:
    options = [option for option in COMMANDS[command].params if option.param_type_name == "option"]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("line", NOT_FOLLOWED)
def test_an_option_that_would_not_be_followed_is_refused_by_its_name(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*line.replace("RUN", str(tmp_path)).split(), "--json", "-"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "UserError" and error["hint"]
    assert all(
        word in error["message"] for word in line.split() if word in ("--model", "--push", "--check", "--golden")
    )


def test_the_rules_name_options_that_there_are() -> None:
    for command in {*NEEDS, *EXCLUDES}:
        assert isinstance(COMMANDS[command], PairedCommand), "else its rules are never looked at"
        pairs = NEEDS.get(command, {}).items()
        named = {flag for pair in pairs for flag in pair}
        for option, excluded in EXCLUDES.get(command, {}).items():
            named |= {option.partition(" ")[0], *(excluded or ())}
        assert named <= flags_of(command), command


def test_each_option_of_an_export_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--modelfile`` once was taken and went nowhere."""
    asked: list[tuple[object, list[str]]] = []

    def export_run(run: object, options: object, *, overrides: list[str], on_progress: object) -> model_folder.Exported:
        asked.append((options, overrides))
        return model_folder.Exported(folder=tmp_path, dtype="float32", proof=None, notes=())

    monkeypatch.setattr(model_folder, "export_run", export_run)
    values = {
        "--to": "x", "--dtype": "float16", "--quantize": "int8", "--llmcompressor": "py", "--max-shard": "5GB",
        "--outtype": "f16", "--llama-cpp": "dir", "--data": "rows.jsonl", "--push": "a/b",
    }  # fmt: skip
    lines = [[flag, value] for flag, value in values.items()]
    lines += [["--format", "gguf"], ["--modelfile"], ["--no-proof"], ["--overwrite"]]
    assert {line[0] for line in lines} == flags_of("export") - {"--check", "--json", "--proof"}
    for line in [[], *lines]:
        assert run(["export", str(tmp_path), *line]) == 0
    assert all(one != asked[0] for one in asked[1:]), "each says something else than none"
