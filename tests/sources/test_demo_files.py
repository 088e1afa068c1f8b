"""LLaMA-Factory's demo data, all of it, in the meaning that its registry gives it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from luthier.config.choices import Format
from luthier.config.inputs import DataConfig, SourceConfig
from luthier.errors import RowError, SourceError
from luthier.records import (
    Audio,
    Conversation,
    Document,
    Feedback,
    Image,
    Preference,
    Row,
    Text,
    Thinking,
    ToolCall,
    Video,
)
from luthier.sources.origins import read_registry, registry_source, resolve_sources
from luthier.sources.source import open_sources

pytestmark = pytest.mark.shared

REGISTERED = {
    "identity": (91, Conversation),
    "alpaca_en_demo": (999, Conversation),
    "alpaca_zh_demo": (1000, Conversation),
    "glaive_toolcall_en_demo": (300, Conversation),
    "glaive_toolcall_zh_demo": (300, Conversation),
    "mllm_demo": (6, Conversation),
    "mllm_audio_demo": (3, Conversation),
    "mllm_video_demo": (3, Conversation),
    "mllm_video_audio_demo": (3, Conversation),
    "dpo_en_demo": (300, Preference),
    "dpo_zh_demo": (300, Preference),
    "kto_en_demo": (300, Feedback),
    "wiki_demo": (30, Document),
    "c4_demo": (300, Document),
}
UNREGISTERED = {
    "v1_sft_demo.jsonl": (500, Conversation, Format.MESSAGES),
    "v1_dpo_demo.jsonl": (10, Preference, Format.PREFERENCE),
    "v1_multimodal_demo.jsonl": (24, Conversation, Format.MESSAGES),
    "reason_tool_use_demo_50.jsonl": (50, Conversation, Format.MESSAGES),
}


@pytest.fixture(scope="module")
def demo(shared: Path) -> Path:
    folder = shared / "data" / "demo"
    if not folder.is_dir():
        pytest.skip(f"no demo data in {folder}")
    return folder


def registered(demo: Path, name: str) -> list[Row]:
    train, _ = resolve_sources(DataConfig(registry=demo / "dataset_info.json", use=[name]))
    return converted(train)


def converted(configs: list[SourceConfig]) -> list[Row]:
    [source] = open_sources(configs, seed=0)
    rows = []
    for row in source.rows():
        assert not isinstance(row, RowError), row
        rows.append(source.convert(row))
    return rows


def unregistered(demo: Path, name: str) -> list[Row]:
    return converted([SourceConfig(path=str(demo / name))])


def test_the_tables_of_this_test_name_every_demo_file(demo: Path) -> None:
    entries = read_registry(demo / "dataset_info.json")
    assert {name for name, entry in entries.items() if "file_name" in entry} == set(REGISTERED)
    files = {path.name for path in demo.iterdir() if path.suffix in (".json", ".jsonl", ".txt")}
    named = {entries[name]["file_name"] for name in REGISTERED} | set(UNREGISTERED) | {"dataset_info.json"}
    assert files == named


@pytest.mark.parametrize("name", REGISTERED)
def test_every_row_of_every_registered_file_converts(demo: Path, name: str) -> None:
    count, kind = REGISTERED[name]
    assert Counter(type(row) for row in registered(demo, name)) == {kind: count}


@pytest.mark.parametrize("name", UNREGISTERED)
def test_every_row_of_every_other_file_converts_with_nothing_said_of_it(demo: Path, name: str) -> None:
    count, kind, form = UNREGISTERED[name]
    [source] = open_sources([SourceConfig(path=str(demo / name))], seed=0)
    assert source.format is form
    assert Counter(type(row) for row in unregistered(demo, name)) == {kind: count}


def test_every_entry_of_the_registry_resolves_or_says_why_not(demo: Path) -> None:
    registry = demo / "dataset_info.json"
    entries = read_registry(registry)
    refused = set()
    for name, entry in entries.items():
        try:
            registry_source(name, entries, registry)
        except SourceError:
            refused.add(name)
            assert not {"file_name", "hf_hub_url", "ms_hub_url"} & set(entry)
    assert len(entries) - len(refused) == sum(
        bool({"file_name", "hf_hub_url", "ms_hub_url"} & set(entry)) for entry in entries.values()
    )
    assert len(refused) < 5


def test_the_yaml_registry_takes_its_samples_from_files_beside_it(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("v1_sft_demo.yaml", "v1_multimodal_demo.yaml", "identity.json", "alpaca_en_demo.json"):
        shutil.copy(demo / name, tmp_path / "data")
    shutil.copy(demo / "v1_multimodal_demo.jsonl", tmp_path / "data")
    sft = DataConfig(registry=tmp_path / "data" / "v1_sft_demo.yaml", use=["identity", "alpaca_en_demo"])
    sources = open_sources(resolve_sources(sft)[0], seed=0)
    assert [sum(1 for _ in source.rows()) for source in sources] == [91, 500]
    media = DataConfig(registry=tmp_path / "data" / "v1_multimodal_demo.yaml", use=["multimodal_demo"])
    assert len(converted(resolve_sources(media)[0])) == 24


def test_values_of_tool_rows(demo: Path) -> None:
    row = registered(demo, "glaive_toolcall_en_demo")[0]
    assert isinstance(row, Conversation)
    assert [message.role for message in row.messages[2:5]] == ["user", "assistant", "tool"]
    arguments = {"ingredients": ["chicken", "bell peppers", "rice"]}
    assert row.messages[3].parts == (ToolCall(name="search_recipes", arguments=arguments),)
    assert row.messages[4].text.startswith('{"recipes": [{"name": "Chicken and Bell Pepper Stir Fry"')
    [tool] = row.tools
    assert (tool["type"], tool["function"]["name"]) == ("function", "search_recipes")


def test_values_of_thinking_rows_with_parallel_calls(demo: Path) -> None:
    rows = unregistered(demo, "reason_tool_use_demo_50.jsonl")
    kinds = Counter(type(part) for row in rows for message in row.messages for part in message.parts)  # type: ignore[union-attr]
    assert kinds == {Thinking: 112, ToolCall: 68, Text: 70 + 59 + 50 + 42}
    parallel = [
        [part.arguments for part in message.parts if isinstance(part, ToolCall)]
        for row in rows
        if isinstance(row, Conversation)
        for message in row.messages
    ]
    assert [{"radius": 1.5}, {"radius": 3}] in parallel


def test_values_of_media_rows(demo: Path) -> None:
    row = registered(demo, "mllm_demo")[0]
    assert isinstance(row, Conversation)
    picture = Image(source=str(demo / "mllm_demo_data/1.jpg"), root=str(demo))
    assert row.messages[0].parts == (picture, Text(text="Who are they?"))
    assert row.messages[2].parts == (Text(text="What are they doing?"), picture)
    assert Path(str(picture.source)).is_file()
    both = registered(demo, "mllm_video_audio_demo")[0]
    assert isinstance(both, Conversation)
    assert [type(part) for part in both.messages[0].parts] == [Video, Audio, Text]
    v1 = unregistered(demo, "v1_multimodal_demo.jsonl")[0]
    assert isinstance(v1, Conversation)
    assert v1.messages[0].parts == (
        Image(source=str(demo / "data/mllm_demo_data/1.jpg"), root=str(demo)),
        Text(text="Who are they?"),
    )


def test_values_of_pairs_and_verdicts(demo: Path) -> None:
    pair = unregistered(demo, "v1_dpo_demo.jsonl")[1]
    assert isinstance(pair, Preference)
    assert [message.role for message in pair.prompt] == ["system", "user"]
    assert [message.text for message in pair.chosen] == ["D: considerate"]
    assert pair.rejected[0].text.startswith(" Based on the context")
    verdicts = registered(demo, "kto_en_demo")
    assert {row.desirable for row in verdicts if isinstance(row, Feedback)} == {True, False}
    [answer] = verdicts[0].completion  # type: ignore[union-attr]
    assert answer.text.startswith("Ooh ooh ah ah!")


def test_values_of_loss_weights_and_plain_text(demo: Path) -> None:
    row = unregistered(demo, "v1_sft_demo.jsonl")[0]
    assert isinstance(row, Conversation)
    assert [(message.text[:2], message.train) for message in row.messages] == [("hi", False), ("He", True)]
    wiki = registered(demo, "wiki_demo")
    assert wiki[0].parts[0].text.startswith("Anarchism is a political philosophy")  # type: ignore[union-attr]
