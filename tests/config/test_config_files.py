"""Config files that cannot be read, and JSON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from luthier.config.loading import is_description, load_config, load_config_text
from luthier.errors import ConfigError
from tests.conftest import refused

GOOD = "model: preset:tiny-qwen3\ndata: {train: preset:skills}\n"


def told(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(caught.value.problems) == 1
    return str(caught.value.problems[0])


def test_a_missing_file_is_named_with_its_absolute_path_and_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(GOOD)
    line = told("rnu.yaml")
    assert line.startswith("rnu.yaml: ") and str(tmp_path / "rnu.yaml") in line and "did you mean run.yaml?" in line
    assert "KEY=VALUE" in told("train.max_steps=3"), "a value without a file"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"the folder {tmp_path / 'nope'} does not exist" in told(tmp_path / "nope" / "run.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    (tmp_path / "dataset_info.json").write_text("{}")
    line = told(tmp_path)
    assert "this is a folder" in line and "run.yaml?" in line


def test_a_file_of_rows_is_no_description(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    line = told(tmp_path / "rows.jsonl")
    assert "file of rows" in line and "data.train" in line


def test_a_folder_is_no_description_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "v1.yaml").mkdir()
    assert not is_description(tmp_path / "v1.yaml") and is_description(tmp_path / "run.yaml")


def test_the_folder_of_a_run_leads_to_its_description(tmp_path: Path) -> None:
    for name in ("report.json", "result.json", "config.json", "run_config.json"):
        (tmp_path / name).write_text("{}")
    assert f"did you mean {tmp_path / 'run_config.json'}?" in told(tmp_path)


def test_a_model_is_no_description(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    line = told(tmp_path)
    assert f"luthier.load_tokenizer({str(tmp_path)!r})" in line and "model.name_or_path" in line


def test_a_name_with_nul_or_without_end_is_no_file() -> None:
    assert "cannot be read" in told("a\0b")
    assert "cannot be read" in told("a" * 5000)


def test_an_unreadable_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "run.yaml").write_text(GOOD)
    monkeypatch.setattr(Path, "open", refuse)
    assert "cannot be read: Permission denied" in told(tmp_path / "run.yaml")


def test_a_device_is_no_file() -> None:
    assert "neither a file nor a folder" in told(os.devnull)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_told(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "run.yaml").write_text(GOOD, encoding=encoding)
    assert "UTF-16 (save it as UTF-8)" in told(tmp_path / "run.yaml")


def test_a_file_that_is_no_text_is_not_taken_for_utf_16(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(bytes(range(256)))
    assert "no text has (0x00)" in told(tmp_path / "run.yaml")


@pytest.mark.parametrize("byte", [0, 1, 7, 11, 127])
def test_the_line_of_a_byte_that_no_text_has_is_told(tmp_path: Path, byte: int) -> None:
    (tmp_path / "run.yaml").write_bytes(GOOD.encode() + b"# two\n# th" + bytes([byte]) + b"ree\n")
    assert f"run.yaml:{GOOD.count(chr(10)) + 2}: " in told(tmp_path / "run.yaml")


def test_the_line_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"# one\n# two \xfc\n")
    assert "run.yaml:2: this line is not UTF-8 (byte 0xfc)" in told(tmp_path / "run.yaml")


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD, encoding="utf-8-sig")
    assert load_config(tmp_path / "run.yaml").model.name_or_path == "preset:tiny-qwen3"


def test_a_file_over_one_megabyte_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# " + "x" * 1_000_000)
    assert "larger than 1000000 bytes" in told(tmp_path / "run.yaml")


def test_json_is_read_as_the_same_yaml() -> None:
    text = '{"model":"preset:tiny-qwen3",\n\t"data":{"train":["preset:skills"],"max_length":1e3},\n\t"template":'
    config = load_config_text(text + '{"default_system":"a\\/\\ud83d\\ude00"}}', "run.json")
    assert config.data.max_length == 1000
    assert config.template.default_system == "a/😀"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('{"model": "x",\n}', ("run.json:", "not JSON", "no comma after the last")),
        ("{'model': 1}", ("run.json:1: ", "not JSON", "double quotes")),
        ('{"model": "x"\n "data": 1}', ("run.json:2: ", "delimiter", "comma or a colon")),
        ('{"model": "x"} {"a": 1}', ("run.json:1: ", "extra data", "one value")),
        ("model: x", ("run.json:1: ", "not JSON", "comments need YAML")),
        ("[" * 100_000, ("run.json", "64 deep")),
        (
            '{"model": "preset:tiny-qwen3", "data": {"train": "preset:skills"},\n "model": "x"}',
            ("run.json:2 model: ", "twice"),
        ),
        ('["a"]', ("run.json:1: ", "a list of 1")),
    ],
)
def test_faults_of_json_are_told_with_their_line(text: str, pieces: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, "run.json")
    line = str(caught.value.problems[0])
    assert line.startswith(pieces[0]) and all(piece in line for piece in pieces), line


def test_nan_in_json_is_told_at_its_key() -> None:
    text = '{"model": "preset:tiny-qwen3", "data": {"train": "preset:skills"},\n "train": {"learning_rate": NaN}}'
    with refused(ConfigError, "run.json:2", "train.learning_rate", "0"):
        load_config_text(text, "run.json")
