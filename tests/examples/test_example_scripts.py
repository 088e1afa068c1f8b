"""The example scripts run, offline and quickly; and TRL's loss on our batches is the one of our own loop."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.programs import run_program

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = ("pytorch_loop", "trl_sft")
STEPS = 6
# One process runs them one after the other: each for itself would import torch and transformers anew.
PROGRAM = """
import runpy, sys
folder, names, *arguments = sys.argv[1:]
for name in names.split():
    print("##", name, flush=True)
    sys.argv = [name, *arguments]
    runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script prints; they share a store, as runs do."""
    folder = tmp_path_factory.mktemp("examples")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    arguments = [str(EXAMPLES), " ".join(SCRIPTS), "--steps", str(STEPS), "--out", str(folder / "run")]
    texts = run_program(program, arguments, said=folder / "said", environment=offline).split("## ")[1:]
    assert tuple(text.split()[0] for text in texts) == SCRIPTS
    return dict(zip(SCRIPTS, texts, strict=True))


def losses(text: str) -> tuple[float, float]:
    (found,) = re.findall(r"loss per target: ([\d.]+) at first, ([\d.]+) at last", text)
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_loss_falls(printed: dict[str, str], name: str) -> None:
    first, last = losses(printed[name])
    assert last < first - 0.5


def test_a_trainer_that_shifts_labels_itself_has_the_same_loss(printed: dict[str, str]) -> None:
    ours, theirs = (losses(printed[name])[0] for name in SCRIPTS)
    assert abs(ours - theirs) < 2e-3  # three decimals are printed; TRL rounds its own
