"""Where a model's processor and config are found, wherever its tokenizer is from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from luthier.config.inputs import MediaConfig, ModelConfig
from luthier.encoding.tokenizer_files import find_files
from luthier.loader.worker import MediaSetup
from luthier.media import MediaSource
from tests.media.tiny_folder import write_folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whole"))


def without(folder: Path, whole: Path, *names: str) -> Path:
    shutil.copytree(whole, folder)
    for name in names:
        (folder / name).unlink()
    return folder


def of_model(tokenizer_folder: Path, name: str, **more: Any) -> MediaSource:
    return MediaSource.of_model(tokenizer_folder, ModelConfig(name_or_path=name, **more), MediaConfig())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, whole: Path, tmp_path: Path) -> list[list[str]]:
    """The Hub has the whole folder as ``some/model``, and gives what it is asked for."""
    asked: list[list[str]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        if name != "some/model":
            raise LocalEntryNotFoundError(name)
        asked.append(allow_patterns)
        given = tmp_path / f"snapshot-{len(asked)}"
        given.mkdir()
        for path in whole.iterdir():
            if path.name in allow_patterns:
                shutil.copy(path, given)
        return str(given)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_model_of_the_hub_is_described_by_what_came_with_its_tokenizer(hub: list[list[str]]) -> None:
    files = find_files("some/model", chat_template=None, revision="main", cache_dir=None)
    source = of_model(files.folder, "some/model")
    assert len(hub) == 1 and source.folder == files.folder
    assert source.model_config()["model_type"] == "qwen2_5_vl"
    processor = source.load()
    assert processor is not None and processor.family.name == "qwen2_5_vl"


def test_a_model_of_the_hub_with_a_tokenizer_from_elsewhere_has_its_own_processor(
    hub: list[list[str]], whole: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / name, elsewhere)
    source = of_model(elsewhere, "some/model", tokenizer_name_or_path=str(elsewhere))
    assert len(hub) == 1 and "tokenizer.json" not in hub[0]
    assert source.folder is not None and source.folder != elsewhere
    assert source.model_config()["model_type"] == "qwen2_5_vl"
    gone = of_model(elsewhere, "some/other", tokenizer_name_or_path=str(elsewhere))
    assert gone.folder is None  # what cannot be reached has no processor; loading the model says why


def test_a_processor_beside_the_tokenizer_has_the_config_of_the_model(whole: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    described = json.loads((whole / "config.json").read_text()) | {"model_type": "llavaonevision1_5"}
    (model / "config.json").write_text(json.dumps(described))
    processor = without(tmp_path / "processor", whole, "config.json")
    source = of_model(processor, str(model), tokenizer_name_or_path=str(processor))
    assert (source.folder, source.config_folder) == (processor, model)
    assert source.model_config()["model_type"] == "llavaonevision1_5"
    loaded = source.load()
    assert loaded is not None and loaded.family.name == "llava_onevision1_5"  # one class, two families
    assert source.fingerprint != of_model(processor, str(whole)).fingerprint
    assert MediaSetup.of(source).inputs().source == source  # so workers count positions alike


CHANGED: dict[str, Any] = {
    "max_image_pixels": 10_000, "min_image_side": 8, "max_side_ratio": 4.0, "max_video_frames": 10,
    "max_video_seconds": 1.0, "min_audio_seconds": 1.0, "max_audio_seconds": 2.0, "max_bytes": 1000, "min_pixels": 900,
    "max_pixels": 9000, "video_min_pixels": 900, "video_max_pixels": 9000, "fps": 1.0, "max_frames": 4,
    "sampling_rate": 8000, "use_audio_in_video": True, "crop_to_patches": True, "pan_and_scan": True,
}  # fmt: skip


@pytest.mark.parametrize("option", CHANGED)
def test_no_option_that_decides_what_rows_become_leaves_the_store_as_it_was(option: str, whole: Path) -> None:
    plain, changed = (MediaSource.of_folder(whole, MediaConfig(**more)) for more in ({}, {option: CHANGED[option]}))
    assert plain.fingerprint != changed.fingerprint
    assert plain.fingerprint == MediaSource.of_folder(whole, MediaConfig(cache="encoder_features")).fingerprint


def test_another_processor_in_the_same_folder_is_another(whole: Path, tmp_path: Path) -> None:
    folder = without(tmp_path / "copy", whole)
    before = MediaSource.of_folder(folder, MediaConfig()).fingerprint
    assert before == MediaSource.of_folder(whole, MediaConfig()).fingerprint
    described = json.loads((folder / "processor_config.json").read_text())
    described["image_processor"]["size"]["longest_edge"] += 28 * 28
    (folder / "processor_config.json").write_text(json.dumps(described))
    assert before != MediaSource.of_folder(folder, MediaConfig()).fingerprint


@pytest.mark.parametrize(
    ("file", "trusted"), [("tokenizer.json", False), ("special_tokens_map.json", False), ("processing_own.py", True)]
)
def test_other_tokens_or_code_of_a_processor_make_another(
    file: str, trusted: bool, whole: Path, tmp_path: Path
) -> None:
    """Its own tokenizer knows its placeholders, also where the run has a tokenizer from elsewhere."""
    folder = without(tmp_path / "copy", whole)
    found = []
    for more in ("", " "):
        (folder / file).write_text(((whole / file).read_text() if (whole / file).is_file() else "{}") + more)
        found.append(of_model(whole, str(folder), trust_remote_code=trusted).fingerprint)
    assert found[0] != found[1]
