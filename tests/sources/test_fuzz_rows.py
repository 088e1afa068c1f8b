"""Whatever stands in a row: it becomes a record or a `RowError` with its address, nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.choices import Format
from luthier.config.inputs import SourceConfig
from luthier.errors import RowError
from luthier.records import Address, Conversation, Document, Feedback, Preference, Tokenized
from luthier.sources import RawRow, RowBytes, decode_strict
from luthier.sources.detect import detect_layout
from luthier.sources.formats.table import FORMATS
from luthier.sources.source import RowReader
from tests.conftest import examples, reason_is

ADDRESS = Address(file="rows.jsonl", row=7)
FORMAT_NAMES = sorted(FORMATS)

# Words that the readers know, so that the search gets past the first check.
WORDS = st.sampled_from([
    "role", "content", "from", "value", "user", "assistant", "tool", "human", "gpt", "system", "function_call",
    "observation", "type", "text", "image", "image_url", "video", "input_audio", "thinking", "tool_call", "name",
    "arguments", "function", "id", "tool_calls", "tool_call_id", "weight", "train", "loss_weight", "<image>", "[{}]",
    '{"name": "f"}', '[{"role": "user"}]', "bytes", "path", "reasoning_content", "true", "", "training", "loss",
    "spans", "start", "end", "train_detail", "begin_offset", "end_offset", "<think>a</think>b", "\n</think>\n",
])  # fmt: skip
COLUMNS = st.sampled_from(
    sorted({name for rule in FORMATS.values() for names in rule.columns.values() for name in names})
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5)
)
ROWS = st.dictionaries(COLUMNS, VALUES, max_size=5)

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "<image> and "}, {"type": "image", "image": "b.png"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL], "weight": 0.5},
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    {
        "role": "assistant",
        "content": "<think>a</think>bc",
        "spans": [{"start": 7, "end": 9, "train": False}, {"start": 8, "end": 18, "weight": 0.5}],
    },
    {"role": "user", "content": "So?", "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True}]},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "y"}],
        "train": True,
    },
]
TURNS = [
    {"from": "human", "value": "Hi"},
    {"from": "function_call", "value": '[{"name": "f", "arguments": {}}]'},
    {"from": "observation", "value": "1"},
    {"from": "gpt", "value": "Hello"},
]
TOOLS = [{"name": "add", "parameters": {}}, {"type": "function", "function": {"name": "f"}}]
PAIR = {"chosen": [CHAT[-1]], "rejected": "No"}
# A row of each format with most of what its reader knows; each converts as it stands, the search damages it.
SOUND = {
    Format.ALPACA: {"instruction": "<image>?", "input": "x", "output": "y", "history": [["a", "b"]], "images": ["a"]},
    Format.SHAREGPT: {"conversations": TURNS, "tools": json.dumps(TOOLS), "system": "s"},
    Format.MESSAGES: {"messages": CHAT, "images": ["a.png"], "tools": TOOLS},
    Format.PROMPT_COMPLETION: {"prompt": CHAT[:2], "completion": [CHAT[-1]], "images": [{"path": "a"}]},
    Format.PROMPT: {"prompt": CHAT[:2], "answer": 3, "images": [{"path": "a"}]},
    Format.PREFERENCE: {"prompt": CHAT[:2], **PAIR, "images": ["a.png"], "margin": 0.5},
    Format.FEEDBACK: {"messages": CHAT, "label": True, "images": ["a.png"]},
    Format.TEXT: {"text": "<video> Once", "videos": [["a.png", "b.png"]]},
    Format.TOKENS: {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]},
}  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, row: dict[str, Any]) -> dict[str, Any]:
    """The row with up to three of its values, anywhere inside, replaced, removed or added."""
    row = copy.deepcopy(row)
    for _ in range(draw(st.integers(0, 3))):
        node: Any = row
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and draw(st.booleans()):
                node = node[key]
                continue
            if isinstance(node, dict) and draw(st.booleans()):
                key = draw(WORDS | COLUMNS)
            node[key] = draw(VALUES)
            break
    return row


def reader(kind: Format, row: Any) -> RowReader:
    rows = [row] if isinstance(row, dict) else []
    return RowReader(layout=detect_layout(SourceConfig(path="rows.jsonl", format=kind), rows))


def test_the_rows_that_the_search_starts_from_convert() -> None:
    assert set(SOUND) == set(FORMATS)
    for kind, row in SOUND.items():
        reader(kind, row).convert(RawRow(raw=b"", data=row, address=ADDRESS))


@pytest.mark.parametrize("kind", FORMAT_NAMES)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_any_value_converts_or_is_a_row_error_with_its_address(kind: Format, data: st.DataObject) -> None:
    row = data.draw(damaged(SOUND[kind]) | damaged(SOUND[kind]) | ROWS | VALUES)
    try:
        record = reader(kind, row).convert(RawRow(raw=b"", data=row, address=ADDRESS))
    except RowError as error:
        assert error.address == ADDRESS
        assert error.reason.isidentifier()
    else:
        assert isinstance(record, Conversation | Document | Preference | Feedback | Tokenized)
        assert record.address == ADDRESS


@settings(max_examples=examples(300), deadline=None)
@given(raw=st.binary(max_size=60) | st.text(alphabet='{}[]":,\\ \t1aNnul', max_size=40).map(str.encode))
def test_any_bytes_decode_or_are_a_row_error_with_their_address(raw: bytes) -> None:
    row = RowBytes(raw=raw, address=ADDRESS)
    try:
        decoded = reader(Format.TEXT, None).read(row)
    except RowError as error:
        assert error.address == ADDRESS
    else:
        assert decoded.data == json.loads(raw)


KEYS = st.text(alphabet='ab\\":', max_size=3)
OBJECTS = st.recursive(
    st.integers() | KEYS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


def write(value: Any, rng: Any, repeat: list[str]) -> str:
    """JSON with random blanks, and a repeated key in the objects that ``repeat`` still asks for."""
    blank = rng.choice(["", "", " ", "\t"])
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)}{blank}:{blank}{write(item, rng, repeat)}" for key, item in value.items()]
        if pairs and repeat:
            repeat.pop()
            pairs.append(rng.choice(pairs))
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + f",{blank}".join(write(item, rng, repeat) for item in value) + "]"
    return json.dumps(value)


@settings(max_examples=examples(400), deadline=None)
@given(value=OBJECTS, rng=st.randoms(use_true_random=False), repeats=st.integers(0, 2))
def test_keys_written_twice_are_found_and_only_those(value: Any, rng: Any, repeats: int) -> None:
    todo = ["again"] * repeats
    text = write({"root": value, "also": {"a": 1}}, rng, todo)
    if len(todo) == repeats:
        assert decode_strict(text) == json.loads(text)
    else:
        with pytest.raises(RowError, check=reason_is("duplicate_key")):
            decode_strict(text)
