"""Registries of LLaMA-Factory, in both forms, mean here what they mean there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from luthier.config.choices import Format, SameRole
from luthier.config.inputs import DataConfig, SourceConfig
from luthier.encoding.tokenizer import load_tokenizer
from luthier.errors import ModelError, SourceError
from luthier.presets import tokenizer_folder
from luthier.records import Conversation
from luthier.sources import RawRow
from luthier.sources.origins import modelscope_folder, open_origin, read_registry, resolve_sources
from luthier.sources.source import open_sources
from tests.conftest import refused

FROM_DATA = {
    "same_role": SameRole.KEEP,
    "text_limit": 1_000_000,
    "first_rows": None,
    "media_root": None,
}  # what `data` says for all of its sources
CHAT_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def resolve(
    tmp_path: Path, entry: dict[str, Any], name: str = "mine", registry: str = "dataset_info.json"
) -> SourceConfig:
    path = tmp_path / registry
    path.write_text(json.dumps({"mine": entry, "other": {"file_name": "x.json"}}))
    train, held_out = resolve_sources(DataConfig(registry=path, use=[name]))
    assert held_out == []
    [source] = train
    return source


def test_every_key_of_an_entry_arrives_in_the_source(tmp_path: Path) -> None:
    entry = {
        "file_name": "data/x.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "kto_tag": "label"},
        "tags": CHAT_TAGS,
        "split": "test",
        "subset": "en",
        "num_samples": 50,
    }
    assert resolve(tmp_path, entry) == SourceConfig(
        path=str(tmp_path / "data/x.json"),
        format=Format.SHAREGPT,
        columns={"system": "none", "tools": "none", "messages": "conversations", "kto_tag": "label"},
        tags=CHAT_TAGS,
        split="test",
        subset="en",
        max_rows=50,
        **FROM_DATA,
    )


@pytest.mark.parametrize(("named", "num_texts"), [({}, 2), ({"system": "system", "history": "history"}, 5)])
def test_columns_that_llama_factory_reads_only_where_they_are_named(
    tmp_path: Path, named: dict[str, str], num_texts: int
) -> None:
    row = {"instruction": "Ask", "input": "", "output": "Yes", "system": "Be", "history": [["Hi", "Hello"]]}
    (tmp_path / "x.json").write_text(json.dumps([row]))
    entry = {"file_name": "x.json", "columns": named}
    (source,) = open_sources([resolve(tmp_path, entry)], seed=0)
    (raw,) = source.rows()
    assert isinstance(raw, RawRow)
    conversation = source.convert(raw)
    assert isinstance(conversation, Conversation) and len(conversation.messages) == num_texts


def test_an_entry_may_say_what_is_learned_of_it_in_both_forms(tmp_path: Path) -> None:
    ours: dict[str, Any] = {
        "train_on": "last_assistant",
        "targets": [{"part": "thinking", "train": False}],
        "thinking_tags": ["[T]", "[/T]"],
        "same_role": "merge",
    }
    expected = SourceConfig.model_validate({"path": "x", **ours})
    for entry in ({"file_name": "x.json"}, {"path": "owner/x"}):
        source = resolve(tmp_path, entry | ours)
        assert (source.train_on, source.targets) == (expected.train_on, expected.targets)
        assert source.thinking_tags == ["[T]", "[/T]"]
        assert source.same_role is SameRole.MERGE
    with pytest.raises(SourceError, match=r"targets\.0.*neither train nor weight"):
        resolve(tmp_path, {"file_name": "x.json", "targets": [{"part": "answer"}]})


def test_a_number_behind_the_name_takes_that_many_rows(tmp_path: Path) -> None:
    assert resolve(tmp_path, {"file_name": "x.json", "num_samples": 50}, name="mine#7").max_rows == 7


def test_hub_entries_name_the_hub_and_their_folder(tmp_path: Path) -> None:
    assert resolve(tmp_path, {"hf_hub_url": "a/b", "ms_hub_url": "c/d", "folder": "python"}).path == "hub:a/b/python"
    assert resolve(tmp_path, {"ms_hub_url": "c/d", "folder": "python"}).path == "modelscope:c/d/python"
    with refused(SourceError, "om_hub_url", "hf_hub_url"):
        resolve(tmp_path, {"om_hub_url": "c/d"})


def test_models_come_from_modelscope_where_its_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer and the model, by ModelScope's own function and from its own branch."""
    asked: list[dict[str, Any]] = []

    def snapshot_download(name: str, **how: Any) -> str:
        asked.append({"name": name, **how})
        return str(tokenizer_folder("tiny-qwen3"))

    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    assert load_tokenizer("nobody/nothing").vocab_size == load_tokenizer("preset:tiny-qwen3").vocab_size
    assert modelscope_folder("a/b", revision="v2", cache_dir=None) == tokenizer_folder("tiny-qwen3")
    assert [(call["name"], call["revision"]) for call in asked] == [("nobody/nothing", None), ("a/b", "v2")]
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with refused(ModelError, "USE_MODELSCOPE_HUB", "pip install modelscope"):
        load_tokenizer("nobody/nothing")
    monkeypatch.delenv("USE_MODELSCOPE_HUB")
    assert modelscope_folder("a/b", revision="v2", cache_dir=None) is None


def test_a_data_set_of_modelscope_is_read_by_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class MsDataset:
        @staticmethod
        def load(name: str, **more: Any) -> MsDataset:
            asked.append((name, more))
            return MsDataset()

        def to_hf_dataset(self) -> datasets.Dataset:
            return datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])

    origin = open_origin(SourceConfig(path="modelscope:c/d", split="test"))
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with refused(SourceError, "modelscope:c/d", "pip install"):
        list(origin.rows())
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(MsDataset=MsDataset))
    assert len(list(origin.rows())) == origin.count() == 2
    assert asked[0][0] == "c/d" and asked[0][1]["split"] == "test"


def test_a_registry_of_the_hub_is_downloaded_and_so_are_the_files_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"rows": {"file_name": "x.json"}, "others": {"hf_hub_url": "a/b"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries), encoding="utf-8")

    def download(repo_id: str, filename: str, *, repo_type: str) -> str:
        assert (repo_id, repo_type) == ("owner/rows", "dataset")
        if filename == "gone.json":
            raise OSError("404")
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    train, _ = resolve_sources(DataConfig(registry=Path("hub:owner/rows"), use=["rows", "others"]))
    assert [source.path for source in train] == [str(tmp_path / "x.json"), "hub:a/b"]
    (tmp_path / "dataset_info.json").write_text('{"rows": {"file_name": "gone.json"}}', encoding="utf-8")
    with refused(SourceError, "gone.json", "hub:owner/rows"):
        resolve_sources(DataConfig(registry=Path("hub:owner/rows"), use=["rows"]))


def test_named_sets_have_the_weights_and_the_folder_of_media_that_the_run_says(tmp_path: Path) -> None:
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps({"a": {"file_name": "a.json"}, "b": {"file_name": "b.json"}}), encoding="utf-8")
    data = DataConfig(registry=path, use=["a", "b"], use_weights=[0.7, 0.3], media_root=tmp_path / "media")
    train, _ = resolve_sources(data)
    assert [source.weight for source in train] == [0.7, 0.3]
    assert {source.media_root for source in train} == {tmp_path / "media"}


def test_alpaca_is_the_default_and_a_lone_prompt_column_leaves_the_question_to_the_rows(tmp_path: Path) -> None:
    assert resolve(tmp_path, {"file_name": "x.json"}).format is Format.ALPACA
    assert resolve(tmp_path, {"file_name": "x.json", "columns": {"prompt": "text"}}).format is Format.AUTO
    columns = {"prompt": "question", "response": "answer"}
    assert resolve(tmp_path, {"file_name": "x.json", "columns": columns}).format is Format.ALPACA


def test_openai_formatting_is_messages(tmp_path: Path) -> None:
    assert resolve(tmp_path, {"file_name": "x.json", "formatting": "openai"}).format is Format.MESSAGES


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"file_name": "x.json", "formating": "alpaca"}, r"no key 'formating'[\s\S]*did you mean formatting"),
        ({"file_name": "x.json", "formatting": "shargpt"}, r"'shargpt' is unknown"),
        ({"file_name": "x.json", "formatting": ["alpaca"]}, r"is unknown"),
        ({}, "neither file_name nor hf_hub_url"),
        ({"file_name": "x.json", "num_samples": -3}, "max_rows"),
        ({"file_name": "x.json", "columns": {"prompt": None}}, r"columns\.prompt"),
    ],
)
def test_entries_that_mean_nothing_are_refused_by_name(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        resolve(tmp_path, entry)
    assert "dataset_info.json: mine" in str(caught.value)


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no data set called 'othr'[\s\S]*did you mean other"):
        resolve(tmp_path, {"file_name": "x.json"}, name="othr")


def test_names_without_a_registry_are_refused_and_listed_sources_come_first(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no registry"):
        resolve_sources(DataConfig(use=["mine"]))
    path = tmp_path / "dataset_info.json"
    path.write_text('{"a": {"file_name": "a.json"}, "b": {"file_name": "b.json"}}')
    data = DataConfig(train=["t.jsonl"], eval=["e.jsonl"], registry=path, use=["a"], eval_use=["b"])
    train, held_out = resolve_sources(data)
    assert [Path(source.path).name for source in train] == ["t.jsonl", "a.json"]
    assert [Path(source.path).name for source in held_out] == ["e.jsonl", "b.json"]


def test_the_yaml_form_is_read_with_sizes_weights_and_local_paths(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "x.json").write_text("[]")
    registry = folder / "info.yaml"
    registry.write_text(
        "mine:\n  path: data/x.json\n  source: local\n  converter: alpaca\n  size: 500\n  weight: 2\n"
        "pairs:\n  path: owner/pairs\n  split: train_prefs\n  converter: pair\n  streaming: true\n"
    )
    train, _ = resolve_sources(DataConfig(registry=registry, use=["mine", "pairs"]))
    assert train == [
        SourceConfig(path=str(tmp_path / "data/x.json"), format=Format.ALPACA, max_rows=500, weight=2, **FROM_DATA),
        SourceConfig(
            path="hub:owner/pairs", format=Format.PREFERENCE, split="train_prefs", streaming=True, **FROM_DATA
        ),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.json", "{"),
        ("r.json", '{"a": {}, "a": {}}'),
        ("r.yaml", "a: [1"),
        ("r.yaml", "a: 1\na: 2"),
        ("r.json", "[]"),
    ],
)
def test_a_damaged_registry_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=r"r\.(json|yaml): "):
        read_registry(tmp_path / name)
