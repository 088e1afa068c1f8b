"""The commands on rows with pictures: what is lost is counted, what no row may open stops them all."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from luthier.__main__ import app, run
from tests.media.media_files import image_file, picture

COMMANDS = ("prepare", "train", "plan", "stats", "show", "verify")


def written(folder: Path, *named: str) -> Path:
    """A run over two rows with pictures of their own, and one row for each name; the pictures are in ``rows``."""
    (folder / "rows").mkdir()
    (folder / "rows" / "a.png").write_bytes(image_file(picture(32, 32)))
    inline = "data:image/png;base64," + base64.b64encode(image_file(picture(48, 32))).decode()
    rows: list[dict[str, Any]] = []
    for number, image in enumerate(("a.png", inline, *named)):
        question = [{"type": "image", "image": image}, {"type": "text", "text": f"Which number? {number}"}]
        answer = {"role": "assistant", "content": f"It is {number}."}
        rows.append({"messages": [{"role": "user", "content": question}, answer]})
    (folder / "rows" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(
        f"""\
model: preset:tiny-qwen3-vl
data: {{train: {folder}/rows/rows.jsonl, max_length: 256, max_drop: 0.5, workers: 0, store: {folder}/store}}
train: {{max_steps: 2, precision: fp32}}
output: {{dir: {folder}/out, overwrite: true}}
tracking: {{progress: false}}
runtime: {{threads: 1}}
""",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_what_no_row_may_open_stops_every_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret.png").write_bytes(image_file(picture(32, 32)))
    assert run([command, str(written(tmp_path, "../secret.png"))]) == 2
    told = capsys.readouterr().err
    assert "rows.jsonl:3:images media_outside" in told and "media.roots" in told
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_picture_that_is_not_there_costs_its_row(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command, str(written(tmp_path, "gone.png"))])
    assert result.exit_code == 0, result.output
    if command != "show":
        assert "media_missing" in result.output or "1 quarantined" in result.output
    if command == "train":
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["ledger"]["reasons"]["quarantined"] == {"media_missing": 1}
        assert report["ledger"]["trained"] == 2
