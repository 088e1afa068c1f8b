"""Run descriptions for benchmarks, and what a preparation told in its JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import Finished, run
from luthier.presets import model_folder

LUTHIER = (sys.executable, "-m", "luthier.__main__")
SHARED = Path(os.environ.get("LUTHIER_SHARED", Path(__file__).parents[2].parent / "shared"))
VOCAB_SIZE = 151_936  # of Qwen3's models; its tokenizer has some ids fewer


def qwen3_tokenizer() -> Path | None:
    """The folder of the Qwen3 tokenizer, if it is there."""
    folder = SHARED / "tokenizers" / "qwen3"
    return folder if (folder / "tokenizer.json").is_file() else None


def qwen3_model(folder: Path, tokenizer: Path) -> Path:
    """A model folder as transformers wants it, with Qwen3's tokenizer, a tiny config and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    config = json.loads((model_folder("tiny-qwen3") / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE}), encoding="utf-8")
    return folder


def description(
    folder: Path, rows: Path, tokenizer: Path, *, store: str = "store", output: str = "output", **sections: Any
) -> Path:
    """Write a run description into a folder. ``sections`` add to ``model``, ``data``, ``output``, or are new ones."""
    run_description: dict[str, Any] = {
        "model": {
            "name_or_path": "preset:tiny-qwen3",
            "tokenizer_name_or_path": str(tokenizer),
            "config_overrides": {"vocab_size": VOCAB_SIZE},
        },
        "data": {
            "train": [str(rows)],
            "store": str(folder / store),
            "overflow": "truncate",
            "max_drop": 0.9,  # the rows are as people shared them: a few have no answer
        },
        "output": {"dir": str(folder / output), "save_strategy": "no"},
        "tracking": {"progress": False},
    }
    for name, section in sections.items():
        run_description[name] = {**run_description.get(name, {}), **section}
    file = folder / "run.json"
    file.write_text(json.dumps(run_description), encoding="utf-8")
    return file


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A whole process of ``luthier prepare``: its cost, and how many rows it encoded, took from the store, trains."""

    finished: Finished
    num_encoded: int
    num_reused: int
    num_trained: int


def prepare(file: Path, overrides: Sequence[str] = ()) -> Prepared:
    """Raises `processes.FailedError`."""
    result = file.with_name("prepared.json")
    finished = run([*LUTHIER, "prepare", file, *overrides, "--json", result])
    told = json.loads(result.read_text(encoding="utf-8"))
    return Prepared(
        finished=finished,
        num_encoded=told["encoded"],
        num_reused=told["reused"],
        num_trained=told["ledger"]["trained"],
    )


def forget(*folders: Path) -> None:
    """Delete what an earlier round stored."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def peer_environments() -> list[Path]:
    """The virtual environments that LUTHIER_PEERS names, a list as PATH is."""
    return [Path(venv) for venv in os.environ.get("LUTHIER_PEERS", "").split(os.pathsep) if venv]


def python_with(package: str, venvs: Sequence[Path]) -> Path | None:
    """The first Python that has a package: this one, or one of the virtual environments."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    for python in (Path(sys.executable), *(venv / "bin" / "python" for venv in venvs)):
        if python.exists() and subprocess.run([python, "-c", look], check=False).returncode == 0:
            return python
    return None


def about(*packages: str) -> str:
    """Versions, for titles."""
    return ", ".join(f"{name} {version(name)}" for name in packages)
