"""A reader on another machine than the feed's waits as long as the feed gives signs of life, and no longer."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from luthier.errors import StoreError, UserError
from luthier.loader import feed
from luthier.loader.feed import ALIVE, FACTS, FeedFacts, FeedReader
from luthier.preparation import SourceInfo

FOUND = FeedFacts(
    num_rows=[3], sources=(SourceInfo(name="a", weight=1.0),), eval_sources=(), num_eval_portions=0, num_tried=0,
    num_eval_rows=0,
    identity="x", encoder="y",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "SECONDS_WITHOUT_SIGN", 0.5)


def test_a_folder_that_another_machine_does_not_see_is_named_within_a_bound(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="is not there") as caught:
        FeedReader(tmp_path / "feeds" / "abc").facts()
    assert str(tmp_path / "feeds" / "abc") in caught.value.message and "data.store" in str(caught.value.hint)
    assert 0.5 <= time.monotonic() - began < 20


def test_a_feed_that_gives_no_more_signs_is_given_up(tmp_path: Path) -> None:
    (tmp_path / ALIVE).write_text("7")
    with pytest.raises(UserError, match="has not changed"):
        next(FeedReader(tmp_path).portions("train"))


def test_a_feed_that_takes_long_and_gives_signs_is_waited_for(tmp_path: Path) -> None:
    def work() -> None:
        for beat in range(15):
            (tmp_path / ALIVE).write_text(str(beat))
            time.sleep(0.1)
        scratch = tmp_path / "scratch"
        scratch.write_bytes(msgspec.json.encode(FOUND))
        scratch.rename(tmp_path / FACTS)

    thread = threading.Thread(target=work)
    thread.start()
    assert FeedReader(tmp_path).facts() == FOUND
    thread.join()


def test_a_store_that_is_deleted_under_a_running_feed_is_named_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "feeds" / "abc"
    folder.mkdir(parents=True)
    threading.Timer(0.2, lambda: folder.rmdir()).start()
    began = time.monotonic()
    with pytest.raises(StoreError, match="the store is gone") as caught:
        FeedReader(folder, alive=lambda: True).facts()
    assert str(folder) in caught.value.message and caught.value.hint
    assert time.monotonic() - began < 20
