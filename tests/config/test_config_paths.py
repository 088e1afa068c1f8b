"""What a description names in the file system must be there, or be told with the way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from luthier.config.loading import load_config_text
from luthier.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    for name in ("data/train.jsonl", "data/a#b.jsonl", "chat.jinja", "info.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def told(model: str = "preset:tiny-qwen3", train: str = "preset:skills", more: str = "") -> str:
    try:
        load_config_text(f"model: {model}\ndata:\n  train: {train}\n{more}", "run.yaml")
    except ConfigError as error:
        assert len(error.problems) == 1, error
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        ("data/trian.jsonl", ("no such file {cwd}/data/trian.jsonl", "did you mean data/train.jsonl?")),
        ("dta/train.jsonl", ("the folder dta does not exist", "current directory")),
        ("data/*.parquet", ('no file matches "data/*.parquet"', "{cwd}/data/*.parquet")),
        ("data/train.jsonl#0", ('"0" rows', "data/train.jsonl#1000")),
        ("data/train.jsonl#abc", ('"abc" rows', "data/train.jsonl for all")),
        ("data/train.jsonl#-5", ('"-5" rows',)),
        ("data/nope.jsonl#5", ("no such file {cwd}/data/nope.jsonl (",)),
        ("preset:skils", ('no preset "skils"', "did you mean preset:skills?")),
        ("hub:a//c", ("no data set of the Hub", "hub:OWNER/NAME")),
        ("tatsu-lab/alpaca", ("no such file", "hub:tatsu-lab/alpaca")),
        ("https://example.org/x.jsonl", ("an address, not a file", "download")),
    ],
)
def test_training_data_that_is_not_there_is_told(folder: Path, path: str, pieces: tuple[str, ...]) -> None:
    line = told(train=f'"{path}"')
    assert line.startswith("run.yaml:3 data.train[0].path: ")
    assert all(piece.format(cwd=folder) in line for piece in pieces), line


@pytest.mark.parametrize(
    "path", ["data", "data/train.jsonl", "data/train.jsonl#10", "data/*.jsonl", "data/a#b.jsonl", "data/a#b.jsonl#3",
             "hub:tatsu-lab/alpaca", "hub:squad", "hub:owner/name/folder", "preset:skills", "preset:skills#100"],
)  # fmt: skip
def test_training_data_that_is_there_is_accepted(folder: Path, path: str) -> None:
    assert told(train=f'"{path}"') == ""


@pytest.mark.parametrize(
    ("model", "pieces"),
    [
        ("./models/tniy", ("no such folder {cwd}/models/tniy", "did you mean ./models/tiny?")),
        ("models/tinyy", ("no such folder", "did you mean models/tiny?", "for the Hub's models/tinyy")),
        ("/nope/at/all", ("the folder /nope does not exist",)),
        ("a/b/c", ("neither a folder ({cwd}/a/b/c) nor a name on the Hub",)),
        ("preset:tiny-qwen", ('no preset "tiny-qwen"', "did you mean preset:tiny-qwen3?", "tiny-llama")),
        ("chat.jinja", ("is a file", "a model is a folder")),
    ],
)
def test_a_model_that_is_not_there_is_told(folder: Path, model: str, pieces: tuple[str, ...]) -> None:
    line = told(model=model)
    assert line.startswith("run.yaml:1 model.name_or_path: ")
    assert all(piece.format(cwd=folder) in line for piece in pieces), line


@pytest.mark.parametrize("model", ["models/tiny", "Qwen/Qwen3-0.6B", "gpt2", "preset:tiny-llama"])
def test_folders_hub_ids_and_presets_are_models(folder: Path, model: str) -> None:
    assert told(model=model) == ""


@pytest.mark.parametrize(
    ("more", "pieces"),
    [
        ("  registry: inof.json\n  use: [a]\n", ("run.yaml:4 data.registry: ", "did you mean info.json?")),
        ("  registry: data\n  use: [a]\n", ("run.yaml:4 data.registry: ", "is a folder", "data/dataset_info.json")),
        ("  registry: info.json\n  use: [b, 'a#0']\n", ("run.yaml:5 data.use[1]: ", '"0" rows', "a#1000")),
        ("  store: info.json/x\n", ("run.yaml:4 data.store: ", "info.json is a file")),
        (
            "template: {chat_template: chta.jinja}\n",
            ("run.yaml:4 template.chat_template: ", "did you mean chat.jinja?"),
        ),
        ("output: {dir: $HOME/out}\n", ("run.yaml:4 output.dir: ", "$HOME is not replaced", "command line")),
        ("  store: '${HOME}'\n", ("run.yaml:4 data.store: ", "${HOME} is not replaced")),
        ("output: {dir: info.json}\n", ("run.yaml:4 output.dir: ", "info.json is a file", "another folder")),
        (
            "output: {resume: out/checkpoint-5}\n",
            ("run.yaml:4 output.resume: ", "the folder out does not exist", "auto"),
        ),
        ("adapter: {type: lora, name_or_path: ./x}\n", ("run.yaml:4 adapter.name_or_path: ", "no such folder")),
        (
            "objective: {name: dpo, reference: {name_or_path: models/tny}}\n",
            ("run.yaml:4 objective.reference.name_or_path: ", "did you mean models/tiny?"),
        ),
    ],
)
def test_other_paths_that_cannot_be_used_are_told(folder: Path, more: str, pieces: tuple[str, ...]) -> None:
    line = told(more=more)
    assert line.startswith(pieces[0]) and all(piece in line for piece in pieces), line


def test_a_folder_that_holds_only_an_adapter_is_no_model(folder: Path) -> None:
    (folder / "models" / "tiny" / "adapter_config.json").write_text("{}")
    line = told(model="models/tiny")
    assert "holds an adapter, and no model" in line and "adapter: {type: lora, name_or_path: models/tiny}" in line
    (folder / "models" / "tiny" / "config.json").write_text("{}")
    assert told(model="models/tiny") == ""


def test_paths_that_can_be_used_are_accepted(folder: Path) -> None:
    assert told(more="  registry: info.json\n  use: [a, 'b#5']\n  store: new/store\n") == ""
    assert told(more="template: {chat_template: chat.jinja}\n") == ""
    assert told(more="template: {chat_template: '{{ messages }}'}\n") == ""
    assert told(more="output: {dir: new/output, resume: data}\n") == ""
    assert told(more="output: {dir: $5/no$VARIABLE_of_this_name}\n") == ""
    (folder / "$HOME").mkdir()
    assert told(more="output: {dir: $HOME/out}\n") == ""


def test_an_output_folder_without_permission_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    line = told(more="output: {dir: new/output}\n")
    assert line.startswith("run.yaml:4 output.dir: ") and f"no permission in {folder}" in line


def test_a_media_folder_that_is_not_there_is_told(folder: Path) -> None:
    line = told(train="{path: data, media_root: data/imgs}")
    assert line.startswith("run.yaml:3 data.train[0].media_root: ") and "no such folder" in line


def test_an_unknown_home_and_an_endless_name_are_ordinary_missing_files(folder: Path) -> None:
    assert "is not there" in told(train="~nobody-of-that-name/x.jsonl")
    assert "is not there" in told(train="x" * 5000)
    assert "named in data.use" in told(train="identity")
    assert "typographic quotes" in told(train="“rows.jsonl”")
    assert "variables of the shell" in told(train="$NOBODY/rows.jsonl")


def test_the_file_system_is_left_alone_on_request(folder: Path) -> None:
    text = "model: ./nope\ndata: {train: nope.jsonl}\noutput: {dir: info.json, resume: nope}\n"
    config = load_config_text(text, check_paths=False)
    assert config.data.train[0].path == "nope.jsonl"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("key", ["model", "reference", "reward"])
def test_a_model_that_another_run_leaves_is_told_with_that_run(folder: Path, key: str) -> None:
    (folder / "sft.yaml").write_text("model: preset:tiny-qwen3\noutput:\n  dir: output/sft # here\n")
    (folder / "run.yaml").write_text("output:\n  dir: output/other\n")
    named = {
        "model": {"model": "output/sft/model"},
        "reference": {"more": "objective: {name: dpo, reference: {name_or_path: output/sft/model}}\n"},
        "reward": {"more": "objective: rl\nrollout: {rewards: [{model: output/sft/model}]}\n"},
    }[key]
    line = told(**named)
    assert "`luthier train sft.yaml` first" in line and "not there yet" in line, line
    (folder / "sft.yaml").unlink()
    assert "sft.yaml" not in (line := told(**named)) and "output/sft/model" in line, "control: nobody makes it"
    (folder / "output" / "sft" / "model").mkdir(parents=True)
    assert "output/sft/model" not in told(**named)
