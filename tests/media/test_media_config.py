"""The section ``media``: what it refuses, what other tools call its keys; and every reason is explained."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from luthier.config.inputs import MediaConfig
from luthier.config.loading import load_config_text
from luthier.errors import ConfigError

GOOD = "model: preset:tiny-qwen3\ndata: {train: preset:skills}\n"
ROOT = Path(__file__).resolve().parents[2]


def load(media: str) -> MediaConfig:
    return load_config_text(f"{GOOD}media: {media}", "run.yaml", ()).media


def test_by_default_rows_fetch_nothing_and_the_processor_decides() -> None:
    media = load("{}")
    assert (media.roots, media.url_hosts) == ([], [])
    assert {media.min_pixels, media.max_pixels, media.fps, media.max_frames, media.sampling_rate} == {None}
    assert {media.use_audio_in_video, media.crop_to_patches, media.pan_and_scan} == {None}


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    media = load(f"{{roots: {tmp_path}, url_hosts: ['a.org', '10.0.0.5:8000', '[::1]:80'], max_pixels: 1e6, fps: 2}}")
    assert (media.roots, media.max_pixels, media.fps) == ([tmp_path], 1_000_000, 2.0)
    assert media.url_hosts == ["a.org", "10.0.0.5:8000", "[::1]:80"]


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ("{min_pixels: 5, max_pixels: 3}", r"media.min_pixels: at least 5, and media.max_pixels \(line 3\) says.* 3"),
        ("{video_min_pixels: 5, video_max_pixels: 3}", "media.video_min_pixels"),
        ("{max_audio_seconds: 0.001}", "media.min_audio_seconds"),
        ("{url_hosts: 'http://a.org'}", "not a host"),
        ("{url_hosts: ['*']}", "not a host"),
        ("{roots: /no/such/folder}", r"media.roots\[0\].*not there"),
        ("{max_image_pixels: 0}", "at least 1"),
        ("{fps: -1}", "media.fps"),
        ("{image_max_pixels: 9}", "media.max_pixels"),
        ("{video_maxlen: 9}", "media.max_frames"),
        ("{audio_sampling_rate: 9}", "media.sampling_rate"),
        ("{image_do_pan_and_scan: true}", "media.pan_and_scan"),
        ("{image_min_pixels: 9}", "media.min_pixels"),
        ("{video_fps: 9}", "media.fps"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_the_way_out(media: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(media)


def reasons(folder: Path) -> set[str]:
    """Every literal reason of a `RowError` or `RowForbidden` in a folder's code."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            first = node.args[0] if node.args else None
            if node.func.id in ("RowError", "RowForbidden") and isinstance(first, ast.Constant):
                found.add(str(first.value))
    return found


def test_every_reason_is_explained() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    raised = reasons(ROOT / "luthier" / "media")
    assert "media_broken" in raised and "media_outside" in raised
    assert raised - explained == set()
