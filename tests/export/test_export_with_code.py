"""Exports of a model whose code comes with its files: the code goes along, and is run where the user trusts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import luthier
from luthier import ExportCheck as C
from luthier import ExportOptions
from luthier.__main__ import app
from luthier.config.choices import ModelPart
from luthier.errors import UserError
from luthier.export import taken_down
from tests.media.media_files import image_file, picture
from tests.training import tiny_file_runs
from tests.training.tiny_youtu_vl import keep_code_in, write_folder

# what transformers says of files that say "rope_scaling"
pytestmark = pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")
TRUSTED = "model.trust_remote_code=true"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An export of an adapter on a stand-in for Youtu-VL."""
    place = tmp_path_factory.mktemp("exports")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NUM_ROWS", 4), ("NUM_CONTEXTS", 3), ("NUM_ANSWERS", 1), ("ANSWER_TOKENS", 2)):
            patch.setattr(taken_down, name, value)
        keep_code_in(place / "modules", patch)
        patch.chdir(place)
        (place / "a.png").write_bytes(image_file(picture(30, 50)))
        shown = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
        rows: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "so"}]}
            for asked in (shown, "one", "two", "three")
        ]
        config = tiny_file_runs.config_of(
            write_folder(place / "model"), place, rows, adapter__type="lora", adapter__train_parts=list(ModelPart),
            model__trust_remote_code=True, model__random_init=False,
        )  # fmt: skip
        tiny_file_runs.trained(config)
        done = luthier.export_run(str(place / "out"), ExportOptions(to=str(place / "exported")))
        assert done.ok and done.proof is not None
        assert {C.WEIGHTS, C.MERGED, C.PICTURES, C.LOGPROBS} <= {result.check for result in done.proof.results}
        assert done.folder is not None
        yield done.folder


def test_its_code_is_run_where_the_user_trusts_it(exported: Path) -> None:
    found = CliRunner().invoke(app, ["export", "--check", str(exported), TRUSTED, "--json", "-"])
    assert found.exit_code == 0, found.output
    assert luthier.check_export(exported, trust_remote_code=True).ok


def test_its_code_is_not_run_where_nobody_trusts_it_and_the_way_out_is_told(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", asked.append)
    proof = luthier.check_export(exported)
    assert asked == [], "nobody is asked while it is checked"
    last = proof.results[-1]
    assert not proof.ok and last.check in (C.LOADS, C.TOKENS)
    assert "model.trust_remote_code: true" in last.findings[0].what
    assert CliRunner().invoke(app, ["export", "--check", str(exported)]).exit_code == 3


def test_code_that_is_not_the_export_s_is_not_run_even_then(exported: Path) -> None:
    code = exported / "configuration_youtu_vl.py"
    own = code.read_text()
    code.write_text(f"raise RuntimeError('it is run')\n{own}")
    try:
        proof = luthier.check_export(exported, trust_remote_code=True)
    finally:
        code.write_text(own)
    [only] = proof.results
    assert only.check is C.FILES and not only.ok and code.name in json.dumps(proof.to_json())


@pytest.mark.parametrize("said", [["adapter.r=4"], [TRUSTED, "adapter.r=4"], ["output"], ["model.trust_remote_code=1"]])
def test_nothing_else_is_said_beside_a_check(exported: Path, said: list[str]) -> None:
    refused = CliRunner().invoke(app, ["export", "--check", str(exported), *said])
    assert isinstance(refused.exception, UserError) and TRUSTED in refused.exception.message
