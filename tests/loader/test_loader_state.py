"""`LoaderState`: small, whole, and particular about what it goes on with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.errors import CheckpointError
from luthier.loader.stream_state import MAX_MARKS, STATE_FILE, LoaderState, RowTrail


def trail_of(contents: list[bytes]) -> RowTrail:
    trail = RowTrail()
    for content in contents:
        trail = trail.after(content)
    return trail


STATE = LoaderState(
    seed=1,
    epoch=2,
    step=1_000_000,
    cursor=123_456_789,
    waiting={"segments": list(range(100)), "rest": {"tokens": 4096}},
    trail=trail_of([bytes([n % 251]) for n in range(1000)]),
    settings={
        "data.max_length": 4096,
        "train.packing": "window",
        "mixture": 0.5,
        "accumulation": None,
        "balance": True,
    },
    data="f" * 64,
)


def test_a_state_is_small_and_reads_back(tmp_path: Path) -> None:
    STATE.save(tmp_path)
    assert LoaderState.load(tmp_path) == STATE
    assert (tmp_path / STATE_FILE).stat().st_size <= 4096
    assert LoaderState.from_json(json.loads(json.dumps(STATE.to_json()))) == STATE


def test_a_state_that_would_be_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="bytes"):
        dataclasses.replace(STATE, waiting={"segments": list(range(2000))}).save(tmp_path)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    STATE.save(tmp_path)
    path = tmp_path / STATE_FILE
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            found = LoaderState.load(tmp_path)
        except CheckpointError:
            continue
        assert found == STATE, place  # only blanks between tokens may change and say the same


@pytest.mark.parametrize("keep", [0, 1, 100, -10])
def test_a_state_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    STATE.save(tmp_path)
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="cannot be read"):
        LoaderState.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "a JSON object is needed"),
        ({"version": 1}, "of version 1, this Luthier reads 3"),
        ({**STATE.to_json(), "seed": 2}, "its checksum should be"),
        ({**STATE.to_json(), "checksum": None}, "its checksum should be None"),
    ],
)
def test_other_content_is_refused_by_name(content: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        LoaderState.from_json(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 2}, "seed: 1 there, 2 here"),
        ({"data": "g"}, "identity of the data: ffff.* there, g here"),
        ({"settings": {**STATE.settings, "data.max_length": 8}}, "data.max_length: 4096 there, 8 here"),
        ({"settings": {**STATE.settings, "new": 1}}, "new: not set there, 1 here"),
    ],
)
def test_another_stream_is_refused_with_all_that_differs(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        STATE.check(dataclasses.replace(STATE, **change))


def test_changed_data_are_told_in_words_with_the_key_that_starts_anew() -> None:
    with pytest.raises(CheckpointError) as caught:
        STATE.check(dataclasses.replace(STATE, data="0123456789abcdef"))
    assert "0123456789ab… here" in caught.value.message
    assert "rows, their tokenizer or their chat template" in str(caught.value.hint)
    assert "output.overwrite: true" in str(caught.value.hint)


def test_another_place_in_the_same_stream_is_fine() -> None:
    STATE.check(dataclasses.replace(STATE, epoch=0, step=0, cursor=0, waiting={}, trail=RowTrail()))


@given(st.integers(1, 300), st.data())
def test_a_trail_says_between_which_steps_rows_differ(num_steps: int, data: st.DataObject) -> None:
    contents = [bytes([n % 256, n // 256]) for n in range(num_steps)]
    changed = data.draw(st.integers(0, num_steps - 1))
    other = [*contents[:changed], b"else", *contents[changed + 1 :]]
    one, two = trail_of(contents), trail_of(other)
    assert one.parts_from(trail_of(contents)) is None
    parting = one.parts_from(two)
    assert parting is not None and parting[0] <= changed < parting[1]
    assert len(one.marks) <= MAX_MARKS
    assert parting[1] - parting[0] <= max(1, 4 * num_steps // MAX_MARKS)
