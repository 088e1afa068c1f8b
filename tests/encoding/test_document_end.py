"""What ends a plain text is the run's to say, in training and where it is verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from luthier.check.verify.run import verify
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import TemplateError
from luthier.records import Document, Text
from tests.conftest import refused


def config_of(folder: Path, **data: str) -> RunConfig:
    (folder / "rows.txt").write_text("Once upon a time.\n")
    tree = {"train": str(folder / "rows.txt"), "store": str(folder / "store"), "workers": 0, **data}
    return RunConfig.model_validate({"model": {"name_or_path": "preset:tiny-qwen3"}, "data": tree, "objective": "pt"})


@pytest.mark.parametrize(("named", "end"), [("eos", "<|im_end|>"), ("none", ""), ("<|endoftext|>", "<|endoftext|>")])
def test_a_plain_text_ends_as_the_run_says_and_is_verified_so(named: str, end: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, document_end=named)
    encoder = Encoder.from_config(config)
    sample = encoder.encode(Document(parts=(Text(text="Once upon a time."),)))
    assert encoder.tokenizer.decode(sample.input_ids) == f"Once upon a time.{end}" and sample.target.all()
    assert verify(config).ok
    other = Encoder.from_config(config_of(tmp_path, document_end="none" if named == "eos" else "eos"))
    assert other.fingerprint != encoder.fingerprint
    assert not verify(config, encoder=other).ok


def test_an_end_that_is_no_control_token_is_refused(tmp_path: Path) -> None:
    with refused(TemplateError, "data.document_end"):
        Encoder.from_config(config_of(tmp_path, document_end="the end"))
