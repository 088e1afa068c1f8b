"""Whose a token is: found by rendering the row again, laid along the stored tokens, loud where the two differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from luthier.check.selection import Kind, Selection
from luthier.check.show.token_origins import (
    TokenOrigin,
    find_rows,
    leaf_owners,
    row_origins,
    sample_difference,
    segment_origin,
    token_owners,
)
from luthier.check.show.view import RowView
from luthier.config.inputs import SourceConfig
from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError, StoreError
from luthier.loader.settings import Loaded, load_rows
from luthier.preparation import PreparedSet
from luthier.records import (
    Address,
    ControlPiece,
    Conversation,
    Document,
    Message,
    Rendered,
    Sample,
    Text,
    TextPiece,
    Thinking,
    ToolCall,
)
from luthier.sources import RowBytes
from luthier.sources.formats import Layout
from luthier.sources.source import RowReader, Source, open_sources

ADDRESS = Address(file="rows.jsonl", row=1)


def message(role: str, *parts: object) -> Message:
    return Message(role=role, parts=tuple(Text(text=part) if isinstance(part, str) else part for part in parts))  # type: ignore[arg-type]


THINKING_ROW = Conversation(
    messages=(
        message("user", "How many legs has 🙂 a spider?"),
        message("assistant", Thinking(text="A spider is no insect."), "Eight."),
        message("user", "And an ant?"),
        message("assistant", Thinking(text="An ant is one."), "Six 你好."),
    ),
    address=ADDRESS,
)
TOOL_ROW = Conversation(
    messages=(
        message("system", "Be brief."),
        message("user", "Weather?"),
        message("assistant", ToolCall(name="look", arguments={"place": "Bern"})),
        Message(role="tool", parts=(Text(text="rain"),), name="look"),
        message("assistant", "It rains."),
    ),
    tools=({"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}},),
    address=ADDRESS,
)


def run_config(folder: Path, rows: list[dict], *overrides: str):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    text = f"""\
model: preset:tiny-qwen3
data: {{train: {path}, max_length: 128, max_drop: 0.9, workers: 0, store: {folder / "store"}}}
train: {{precision: fp32, per_device_train_batch_size: 2}}
output: {{dir: {folder / "out"}}}
tracking: {{progress: false}}
"""
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load_config(str(folder / "run.yaml"), overrides)


def chat(question: str, *turns: str) -> dict:
    messages = [{"role": "user", "content": question}]
    for number, turn in enumerate(turns):
        messages.append({"role": ("assistant", "user")[number % 2], "content": turn})
    return {"messages": messages}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder.from_config(run_config(tmp_path_factory.mktemp("encoder"), [chat("a", "b")]))


def owners_of(row, encoder: Encoder):
    return leaf_owners(encoder.encode(row), token_owners(encoder.render(row), encoder.tokenizer))


def loaded_of(config) -> Loaded:
    return load_rows(config)


def views(loaded: Loaded, kind: Kind, number: int = 1) -> list[RowView]:
    return Selection(kind=kind, number=number, held_out=False).views(loaded)


# --------------------------------------------------------------------------------------------- pieces along tokens


@pytest.mark.parametrize("row", [THINKING_ROW, TOOL_ROW])
def test_ids_of_owned_tokens_are_the_encoders_runs(row: Conversation, encoder: Encoder) -> None:
    paths = [[token for token, _ in path] for path in token_owners(encoder.render(row), encoder.tokenizer)]
    runs = [segment.input_ids.tolist() for segment in encoder.encode(row).segments()]
    assert sorted(paths) == sorted(runs)


def test_what_a_message_owns_is_what_it_says(encoder: Encoder) -> None:
    pieces = owners_of(THINKING_ROW, encoder)
    assert len(pieces) == 2  # thinking of the first answer is gone once a second question follows
    for segment, owned in zip(encoder.encode(THINKING_ROW).segments(), pieces, strict=True):
        for number, said in enumerate(THINKING_ROW.messages):
            mine = [
                token
                for token, piece in zip(segment.input_ids.tolist(), owned, strict=True)
                if isinstance(piece, TextPiece) and piece.message == number and piece.field == "content"
            ]
            assert encoder.tokenizer.decode(mine) in ("", said.text)
        assert {piece.message for piece, wanted in zip(owned, segment.target, strict=True) if wanted} <= {1, 3}


def test_every_target_weighs_what_its_piece_weighs(encoder: Encoder) -> None:
    for segment, owned in zip(encoder.encode(TOOL_ROW).segments(), owners_of(TOOL_ROW, encoder), strict=True):
        assert [piece.weight > 0 for piece in owned] == segment.target.tolist()  # type: ignore[union-attr]


def test_a_token_over_two_pieces_belongs_to_the_one_it_ends_in(encoder: Encoder) -> None:
    pieces = (TextPiece(text="to"), TextPiece(text="day", field="content", message=0))
    whole = encoder.tokenizer.encode_runs(["today"])[0].tolist()
    ((path),) = token_owners(Rendered(paths=(pieces,)), encoder.tokenizer)
    assert [token for token, _ in path] == whole
    ends = np.cumsum([len(encoder.tokenizer.decode([token])) for token in whole])
    assert [piece is pieces[1] for _, piece in path] == (ends > 2).tolist()


def test_text_breaks_where_the_model_takes_over(encoder: Encoder) -> None:
    pieces = (TextPiece(text="to"), TextPiece(text="day", by_model=True, weight=1.0))
    (path,) = token_owners(Rendered(paths=(pieces,)), encoder.tokenizer)
    apart = [*encoder.tokenizer.encode_runs(["to"])[0], *encoder.tokenizer.encode_runs(["day"])[0]]
    assert [token for token, _ in path] == [int(token) for token in apart]


def test_allowed_control_strings_of_a_text_are_control_tokens(encoder: Encoder) -> None:
    pieces = (TextPiece(text="a<|im_end|>b"),)
    plain, allowed = (
        [
            token
            for path in token_owners(Rendered(paths=(pieces,)), encoder.tokenizer, allowed=names)
            for token, _ in path
        ]
        for names in (frozenset(), frozenset({"<|im_end|>"}))
    )
    end = encoder.tokenizer.control_id("<|im_end|>")
    assert end in allowed and end not in plain
    assert encoder.tokenizer.decode(plain) == encoder.tokenizer.decode(allowed) == "a<|im_end|>b"


def spoilt(sample: Sample, what: str) -> Sample:
    ids, target = sample.input_ids.copy(), sample.target.copy()
    place = int(target.argmax())
    match what:
        case "id":
            ids[place] += 1
        case "target":
            target[place] = False
        case "weight":
            weight = np.ones(len(ids), np.float32)
            weight[place] = 0.5
            return replace(sample, weight=weight)
        case "length":
            first, *rest = sample.branches
            return replace(
                sample,
                input_ids=ids[1:],
                target=target[1:],
                branches=(replace(first, length=first.length - 1), *rest),
            )
    return replace(sample, input_ids=ids, target=target)


@pytest.mark.parametrize("what", ["id", "target", "weight", "length"])
def test_each_way_of_being_another_sample_is_told(what: str, encoder: Encoder) -> None:
    sample = encoder.encode(THINKING_ROW)
    assert sample_difference(sample, encoder.encode(THINKING_ROW), encoder.tokenizer) is None
    told = sample_difference(spoilt(sample, what), sample, encoder.tokenizer)
    assert told is not None and {"id": "token", "length": "branches"}.get(what, what) in told


@pytest.mark.parametrize("what", ["id", "weight", "length"])
def test_pieces_are_not_laid_along_tokens_that_are_not_theirs(what: str, encoder: Encoder) -> None:
    paths = token_owners(encoder.render(THINKING_ROW), encoder.tokenizer)
    with pytest.raises(StoreError, match=r"as rendered now|rendering gives none"):
        leaf_owners(spoilt(encoder.encode(THINKING_ROW), what), paths)


# ------------------------------------------------------------------------------------------------ names of owners


def named(view: RowView) -> list[str]:
    return list(dict.fromkeys(str(token.owner) for token in view.tokens))


def test_owners_of_a_plain_chat_have_their_names(tmp_path: Path) -> None:
    (view,) = views(loaded_of(run_config(tmp_path, [chat("Hi", "Hello")])), Kind.ROW)
    assert [(token.text, str(token.owner)) for token in view.tokens if token.num_tokens] == [
        ("<|im_start|>", "0 user · template"), ("user", "0 user · template"), ("\n", "0 user · template"),
        *[(text, "0 user · content") for text in texts_of(view, "0 user · content")],
        ("<|im_end|>", "0 user · template"), ("\n", "0 user · template"),
        ("<|im_start|>", "1 assistant · template (prompt)"), ("assistant", "1 assistant · template (prompt)"),
        ("\n", "1 assistant · template (prompt)"),
        *[(text, "1 assistant · content") for text in texts_of(view, "1 assistant · content")],
        ("<|im_end|>", "1 assistant · stop"), ("\n", "1 assistant · template"),
    ]  # fmt: skip
    assert "".join(texts_of(view, "0 user · content")) == "Hi"
    assert "".join(texts_of(view, "1 assistant · content")) == "Hello"


def texts_of(view: RowView, owner: str) -> list[str]:
    return [token.text for token in view.tokens if str(token.owner) == owner and token.num_tokens]


def test_tools_calls_results_and_system_have_their_names(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "look", "arguments": {"a": "b"}}}],
            },
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    }
    loaded = loaded_of(run_config(tmp_path, [row], "data.max_length=2000"))
    names = {name for view in views(loaded, Kind.ROW) for name in named(view)}
    assert {"tools", "0 system · content", "1 user · content", "2 assistant · tool_calls", "3 tool · content"} <= names
    assert {"4 assistant · content", "2 assistant · stop", "4 assistant · stop"} <= names


def test_a_system_message_that_the_run_supplies_shifts_no_number(tmp_path: Path) -> None:
    config = run_config(tmp_path, [chat("Hi", "Hello")], "template.default_system=Be kind.")
    (view,) = views(loaded_of(config), Kind.ROW)
    assert "system · template.default_system" in named(view)
    assert "".join(texts_of(view, "system · template.default_system")) == "Be kind."
    assert "".join(texts_of(view, "0 user · content")) == "Hi"


def test_a_document_owns_its_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time.\n", encoding="utf-8")
    config = run_config(tmp_path, [chat("a", "b")], f"data.train={tmp_path / 'text.txt'}", "objective=pt")
    (view,) = views(loaded_of(config), Kind.ROW)
    assert "".join(texts_of(view, "text")) == "Once upon a time." and "stop" in named(view)[-1]


def test_voice_is_who_speaks() -> None:
    assert TokenOrigin(message=1, role="user", field="content").voice == "user"
    assert [
        TokenOrigin(message=1, role="user", field=name).voice for name in ("template", "template (prompt)", "stop")
    ] == ["template"] * 3
    assert TokenOrigin(field="tools").voice == "tools" and str(TokenOrigin(field="tools")) == "tools"


# --------------------------------------------------------------------------------------- packs, batches, cuts, runs


def test_rows_packs_and_batches_agree_on_owners(tmp_path: Path) -> None:
    config = run_config(tmp_path, [chat(f"Question {n}?", f"Answer {n}.") for n in range(9)])
    loaded = loaded_of(config)
    of_row = {
        view.segments[0].address: [(token.id, token.owner) for token in view.tokens]
        for number in range(1, 10)
        for view in views(loaded, Kind.ROW, number)
    }
    seen = 0
    for kind in (Kind.PACK, Kind.BATCH):
        for view in views(loaded, kind):
            for number, segment in enumerate(view.segments):
                assert [(token.id, token.owner) for token in view.of_segment(number)] == of_row[segment.address]
                seen += 1
    assert seen > 4 and all(owner is not None for tokens in of_row.values() for _, owner in tokens)


def test_cuts_of_a_run_keep_the_owners_of_their_tokens(tmp_path: Path) -> None:
    row = chat("first " * 12, "yes " * 12, "second " * 12, "no " * 12)
    loaded = loaded_of(run_config(tmp_path, [row], "data.max_length=40", "data.overflow=split"))
    cut = views(loaded, Kind.ROW)
    (whole,) = row_origins(loaded.prepared.train, [0], loaded.encoder, sources_of(loaded))[0]
    assert len(cut) > 2
    for view in cut:
        (segment,) = view.segments
        assert segment.run_tokens == whole.run_tokens and segment.num_tokens < whole.run_tokens
        stop = segment.start + segment.num_tokens
        assert tuple(token.owner for token in view.tokens) == whole.owners[segment.start : stop]
        assert any("cut by data.max_length" in note for note in segment.notes)


def sources_of(loaded: Loaded) -> list[Source]:
    return open_sources(loaded.config.data.train, seed=0)


def test_runs_say_which_message_they_teach_and_why_there_are_several(tmp_path: Path) -> None:
    row = chat("q", "x", "r", "y")
    row["messages"][1]["reasoning_content"], row["messages"][3]["reasoning_content"] = "hm", "ha"
    shown = views(loaded_of(run_config(tmp_path, [row])), Kind.ROW)
    assert [(one.segments[0].run, one.segments[0].num_runs, one.segments[0].learned) for one in shown] == [
        (1, 2, ("message 1",)),
        (2, 2, ("message 3",)),
    ]
    assert (
        "run 2 of 2" in shown[1].segments[0].notes[0] and "message 3 is learned here" in shown[1].segments[0].notes[0]
    )
    (plain,) = views(loaded_of(run_config(tmp_path, [chat("q", "x", "r", "y")])), Kind.ROW)
    assert plain.segments[0].notes == []


def test_a_row_that_is_cut_away_still_has_owners(tmp_path: Path) -> None:
    config = run_config(tmp_path, [chat("long " * 200, "x"), chat("a", "b")])
    (view,) = views(loaded_of(config), Kind.ROW, 1)
    assert "not trained" in view.title and all(token.owner is not None for token in view.tokens)


# ------------------------------------------------------------------------------------------------------ findings


def lying_set(prepared: PreparedSet) -> PreparedSet:
    """The first row shares the sample of the second: what a store that mixed up its keys would say."""
    return replace(prepared, sample_ids=np.array([prepared.sample_ids[1], *prepared.sample_ids[1:]]))


def test_a_store_that_holds_something_else_is_found_and_its_tokens_are_shown_all_the_same(tmp_path: Path) -> None:
    loaded = loaded_of(run_config(tmp_path, [chat("a", "right"), chat("a", "wrong")]))
    honest = row_origins(loaded.prepared.train, [0, 1], loaded.encoder, sources_of(loaded))
    assert [origin.finding for origins in honest.values() for origin in origins] == [None, None]
    found = row_origins(lying_set(loaded.prepared.train), [0, 1], loaded.encoder, sources_of(loaded))
    assert found[0][0].owners == () and "not what rendering and encoding give now" in str(found[0][0].finding)
    assert "in the store" in str(found[0][0].finding) and "rows.jsonl:1" in str(found[0][0].finding)
    assert found[1][0].finding is None


def test_a_row_that_is_gone_or_broken_is_a_finding(tmp_path: Path) -> None:
    loaded = loaded_of(run_config(tmp_path, [chat("a", "b"), chat("c", "d"), chat("e", "f")]))
    file = tmp_path / "rows.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text(f"{lines[0]}\n{{broken\n", encoding="utf-8")
    found = row_origins(loaded.prepared.train, [0, 1, 2], loaded.encoder, sources_of(loaded))
    assert found[0][0].finding is None
    assert "json" in str(found[1][0].finding)
    assert "not in its file any more" in str(found[2][0].finding)


def test_segment_origin_is_cut_like_its_segment(tmp_path: Path) -> None:
    loaded = loaded_of(run_config(tmp_path, [chat("a", "b")]))
    of_row = row_origins(loaded.prepared.train, [0], loaded.encoder, sources_of(loaded))[0]
    assert segment_origin(loaded.train, 0, of_row) == of_row[0]


# -------------------------------------------------------------------------------------------------- finding rows


@dataclass(frozen=True)
class Counting:
    """Rows that count how many of them were read."""

    size: int
    read: list[int] = field(default_factory=list)

    def rows(self) -> Iterator[RowBytes | RowError]:
        for row in range(1, self.size + 1):
            self.read.append(row)
            yield RowBytes(raw=json.dumps(chat("q", f"a{row}")).encode(), address=Address(file="f", row=row))

    def count(self) -> int:
        return self.size


def test_rows_are_found_without_reading_on(tmp_path: Path) -> None:
    origin = Counting(size=1000)
    source = Source(config=SourceConfig(path="f"), origin=origin, reader=RowReader(layout=layout_of(tmp_path)), seed=0)
    wanted = [Address(file="f", row=row) for row in (7, 3)]
    found = find_rows(source, wanted)
    assert {address.row: row.messages[1].text for address, row in found.items()} == {3: "a3", 7: "a7"}  # type: ignore[union-attr]
    assert origin.read == list(range(1, 8))
    assert find_rows(source, []) == {} and origin.read == list(range(1, 8))
    assert find_rows(source, [Address(file="f", row=1001)]) == {}


def layout_of(folder: Path) -> Layout:
    path = folder / "layout.jsonl"
    path.write_text(json.dumps(chat("q", "a")) + "\n", encoding="utf-8")
    (source,) = open_sources([SourceConfig(path=str(path))], seed=0)
    return source.reader.layout


def test_of_several_files_only_those_that_have_a_row_are_opened(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(json.dumps(chat("q", name)) + "\n", encoding="utf-8")
    (source,) = open_sources([SourceConfig(path=str(tmp_path))], seed=0)
    (tmp_path / "a.jsonl").unlink()  # reading it would be an error
    found = find_rows(source, [Address(file=str(tmp_path / "c.jsonl"), row=1)])
    assert [row.messages[1].text for row in found.values()] == ["c.jsonl"]  # type: ignore[union-attr]


def test_control_pieces_and_documents_are_owned_too(encoder: Encoder) -> None:
    row = Document(parts=(Text(text="Once."),), address=ADDRESS)
    (owned,) = owners_of(row, encoder)
    assert isinstance(owned[-1], ControlPiece) and all(piece.message is None for piece in owned)
