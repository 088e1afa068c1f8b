"""``data.overflow: keep_answer``: prompts lose their oldest turns, and what is left is what inference shows of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luthier
from luthier.check.show.token_origins import row_origins
from luthier.check.verify import Check
from luthier.check.verify.run import verify
from luthier.config.choices import Overflow
from luthier.config.loading import load_config
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.shortening import (
    ANSWERS_LEFT_OUT,
    END_LEFT_OUT,
    SHORTENED,
    TOKENS_LEFT_OUT,
    longest_learned,
    turn_starts,
)
from luthier.errors import ConfigError, RowDropped
from luthier.packing import UnitKind
from luthier.preparation.prepare import prepare
from luthier.preparation.segments import SegmentIndex
from luthier.records import Conversation, Document, Message, Row, Sample, Text
from luthier.sources.source import open_sources
from tests.conftest import reason_is, refused
from tests.media.media_files import image_file, picture

LIMIT = 140
TOOLS = [{"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}]


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turns(count: int, *, words: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        text = " ".join(rng.choice(["red", "green", "seven", "cat"]) for _ in range(rng.randint(1, words)))
        found += [said("user", f"question {number} {text}"), said("assistant", f"answer {number} {text}")]
    return found


def config_of(folder: Path, rows: list[dict[str, Any]], **sections: Any) -> RunConfig:
    path = folder / "rows.jsonl"
    folder.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(path), "max_length": LIMIT, "overflow": "keep_answer", "workers": 0, "max_drop": 0.99}
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": "preset:tiny-qwen3"},
            "data": {**data, "store": str(folder / "store"), **sections.pop("data", {})},
            "output": {"dir": str(folder / "out")},
            **sections,
        }
    )


def learned(sample: Sample, encoder: Encoder) -> Iterator[tuple[str, str]]:
    """Of each run its text, and what is learned of it."""
    for ids, target in sample.unroll():
        yield encoder.tokenizer.decode(ids), encoder.tokenizer.decode(ids[target])


def encoded(config: RunConfig) -> tuple[Encoder, list[Sample]]:
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder).train
    return encoder, [prepared[row] for row in range(len(prepared))]


LONG: list[dict[str, Any]] = [
    {"messages": [said("system", "Be brief."), *turns(9, seed=1)]},
    {"messages": turns(12, words=3, seed=2), "tools": TOOLS},
    {"messages": [*turns(8, seed=3), said("user", "more"), said("assistant", "<think>\nhm\n</think>\n\nyes " * 3)]},
    {  # thoughts of earlier turns are not shown to later ones, so that turns have contexts of their own
        "messages": [
            message if message["role"] == "user" else {**message, "reasoning_content": "so, " * 6}
            for message in turns(7, seed=4)
        ]
    },
    {
        "messages": [
            *turns(6, words=2, seed=5),
            said("user", "look"),
            said("assistant", "", tool_calls=[{"id": "a", "function": {"name": "find", "arguments": {"what": "x"}}}]),
            said("tool", "found " * 5, tool_call_id="a"),
            said("assistant", "It is there."),
            said("user", "thanks"),
            said("assistant", "Gladly."),
        ],
        "tools": TOOLS,
    },
    {"messages": [said("assistant", "Welcome! " * 9), *turns(7, seed=6)]},
    {"messages": turns(8, seed=7), "train_on": "last_assistant"},
]


def test_shorter_conversations_are_what_inference_shows_of_them_on_an_independent_proof(tmp_path: Path) -> None:
    config = config_of(tmp_path, [*LONG, {"messages": turns(2)}])
    report = verify(config)
    assert report.ok, [str(violation) for row in report.failed_rows for violation in row.violations]
    assert report.notes["shortened_rows"] == len(LONG) and report.longest_run <= LIMIT
    checked = {result.check: result.rows_checked for result in report.checks}
    assert checked[Check.PROMPT_TOKENS] == checked[Check.HUGGING_FACE] == len(LONG) + 1


@pytest.mark.parametrize("number", range(len(LONG)))
def test_every_answer_is_learned_once_and_whole_behind_the_system_message_and_tools(
    number: int, tmp_path: Path
) -> None:
    row = LONG[number]
    config = config_of(tmp_path, [row])
    encoder, (sample,) = encoded(config)
    whole = replace(encoder, keep_answer_within=None).encode(_record(config))
    assert longest_learned(whole) > LIMIT >= longest_learned(sample)

    def targets(of: Sample) -> list[str]:
        return sorted(text for _, text in learned(of, encoder) for text in text.split("<|im_end|>") if text)

    assert targets(sample) == targets(whole)
    for text, answers in learned(sample, encoder):
        if answers:
            assert ("Be brief." in text) == (row["messages"][0]["role"] == "system")
            assert ('"name": "find"' in text.split("question")[0]) == ("tools" in row)
            assert text.count("<tool_response>") <= text.count('{"what": "x"}')
    notes = dict(sample.notes)
    assert notes[SHORTENED] == 1 and notes[TOKENS_LEFT_OUT] == longest_learned(whole) - longest_learned(sample)


def test_as_few_turns_go_as_will_do(tmp_path: Path) -> None:
    config = config_of(tmp_path, [LONG[0]])
    encoder, (sample,) = encoded(config)
    plain = replace(encoder, keep_answer_within=None)
    system, *messages = _record(config).messages
    contexts = [text for text, answers in learned(sample, encoder) if answers]
    for answer in range(1, len(messages), 2):
        lengths = {
            start: longest_learned(plain.encode(_last_learned((system, *messages[start : answer + 1]))))
            for start in range(0, answer, 2)
        }
        first = next(start for start, length in lengths.items() if length <= LIMIT)
        ours = next(text for text in contexts if messages[answer].text in text)
        assert ours.split("<|im_start|>user\n")[1].startswith(messages[first].text), (answer, lengths)


def test_an_answer_behind_a_long_thought_sees_the_turns_that_the_thought_did_not_leave_room_for(tmp_path: Path) -> None:
    thought = said("assistant", "short", reasoning_content="so, " * 24)
    row = {
        "messages": [*turns(4, seed=1), said("user", "think"), thought, said("user", "and"), said("assistant", "ok")]
    }
    config = config_of(tmp_path, [row])
    encoder, (sample,) = encoded(config)
    (of_thought,) = [text for text, answers in learned(sample, encoder) if "short" in answers]
    (of_last,) = [text for text, answers in learned(sample, encoder) if "ok" in answers]
    messages = _record(config).messages
    plain = replace(encoder, keep_answer_within=None)
    for text, end in ((of_thought, 10), (of_last, 12)):
        fitting = [
            start
            for start in range(0, end, 2)
            if longest_learned(plain.encode(_last_learned(messages[start:end]))) <= LIMIT
        ]
        assert text.split("<|im_start|>user\n")[1].startswith(messages[fitting[0]].text), (text, fitting)
    assert of_last.count("question") > of_thought.count("question") and verify(config).ok


@pytest.mark.parametrize("tail", [[], [said("assistant", "answer " * 40, train=False)]])
def test_what_comes_behind_the_last_learned_answer_is_left_out_where_it_is_too_long(
    tail: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = config_of(tmp_path, [{"messages": [*turns(1), said("user", "more " * 100), *tail]}])
    encoder, (sample,) = encoded(config)
    ((text, answers),) = learned(sample, encoder)
    assert answers.startswith("answer 0") and answers in text and "more" not in text
    assert dict(sample.notes) == {END_LEFT_OUT: 1}, "no turn of the prompt is left out"
    report = verify(config)
    assert report.ok, [str(one) for row in report.failed_rows for one in row.violations]


@pytest.mark.parametrize("train_stop", [True, False])
def test_what_the_template_writes_behind_the_last_learned_token_costs_no_turn(tmp_path: Path, train_stop: bool) -> None:
    row, template = {"messages": turns(4)}, {"train_stop": train_stop}
    encoder, (whole,) = encoded(config_of(tmp_path / "w", [row], template=template, data={"max_length": 4096}))
    behind = len(whole.input_ids) - longest_learned(whole)
    assert behind == (1 if train_stop else 2)
    for most, is_whole in ((longest_learned(whole), True), (longest_learned(whole) - 1, False)):
        config = config_of(tmp_path / str(most), [row], template=template, data={"max_length": most})
        encoder, (sample,) = encoded(config)
        assert np.array_equal(sample.input_ids, whole.input_ids) == is_whole
        index = SegmentIndex(prepare(config, encoder).train, max_length=most, overflow=Overflow.KEEP_ANSWER)
        assert index.lengths.max() == most if is_whole else index.lengths.max() < most
        assert SHORTENED not in dict(sample.notes) if is_whole else dict(sample.notes)[SHORTENED] == 1
        report = verify(config)
        assert report.ok, [str(one) for row in report.failed_rows for one in row.violations]


@pytest.mark.parametrize("overflow", [Overflow.DROP, Overflow.TRUNCATE, Overflow.ERROR, Overflow.KEEP_ANSWER])
def test_of_compared_answers_only_what_is_learned_has_to_fit(tmp_path: Path, overflow: Overflow) -> None:
    row = {"prompt": turns(2)[:3], "chosen": "Yes, at once, and more.", "rejected": "No."}
    data = {"overflow": overflow.value, "max_length": 4096}
    _, (whole,) = encoded(config_of(tmp_path / "w", [row], objective="dpo", data=data))
    most = longest_learned(whole)
    assert most == max(map(len, whole.segments())) - 1
    config = config_of(tmp_path / "r", [row], objective="dpo", data={**data, "max_length": most})
    prepared = prepare(config, Encoder.from_config(config)).train
    index = SegmentIndex(prepared, max_length=most, overflow=overflow, units=UnitKind.PAIRS)
    assert len(index) == 2 and index.lengths.max() == most and not index.ledger.notes["prompt_truncated"]
    assert index.num_targets.tolist() == [int(segment.target.sum()) for segment in whole.segments()]
    assert verify(config).ok


def _last_learned(messages: tuple[Message, ...]) -> Conversation:
    return Conversation(messages=messages, train_on="last_assistant")


def _record(config: RunConfig) -> Conversation:
    (source,) = open_sources(config.data.train, seed=0)
    (row,) = source.rows()
    record = source.convert(row)  # type: ignore[arg-type]
    assert isinstance(record, Conversation)
    return record


def test_what_cannot_fit_is_dropped_under_a_reason_of_its_own_and_the_rest_of_a_row_is_kept(tmp_path: Path) -> None:
    huge = said("assistant", "word " * 200)
    rows = [
        {"messages": [*turns(3), said("user", "all"), huge]},
        {"messages": [said("user", "all"), huge]},
        {"text": "word " * 200},
        {"messages": turns(9), "train_on": "all"},
    ]
    config = config_of(tmp_path, rows[:2] + rows[3:])
    prepared = prepare(config, Encoder.from_config(config)).train
    assert dict(prepared.ledger.dropped) == {"still_too_long": 2} and prepared.ledger.prepared == 1
    assert dict(prepared.ledger.notes) == {ANSWERS_LEFT_OUT: 1}, "the answers that are kept see their whole prompts"
    assert verify(config).ok is True
    with pytest.raises(RowDropped, check=reason_is("still_too_long")):
        luthier.encode(Document(parts=(Text(text="word " * 200),)), config)
    index = SegmentIndex(prepared, max_length=LIMIT, overflow=Overflow.KEEP_ANSWER)
    assert index.lengths.max() <= LIMIT and not index.ledger.dropped["too_long"]


PAIR = {"prompt": [said("system", "Be brief."), *turns(9, seed=8), said("user", "now?")]}


@pytest.mark.parametrize(
    ("objective", "answers", "units"),
    [
        ("dpo", {"chosen": "Yes, at once.", "rejected": "No."}, UnitKind.PAIRS),
        ("kto", {"completion": "Yes.", "label": True}, UnitKind.FEEDBACK),
    ],
)
def test_answers_that_are_compared_share_the_shortened_prompt(
    objective: str, answers: dict[str, Any], units: UnitKind, tmp_path: Path
) -> None:
    rows = [{**PAIR, **answers}] * 2
    config = config_of(tmp_path, rows, objective=objective)
    encoder, (sample, _) = encoded(config)
    runs = [text for text, _ in learned(sample, encoder)]
    assert all("Be brief." in text and "now?" in text for text in runs) and longest_learned(sample) <= LIMIT
    assert len({text.split("now?")[0] for text in runs}) == 1 and sample.branches[0].parent == -1
    assert sum(branch.parent < 0 for branch in sample.branches) == 1 and dict(sample.notes)[SHORTENED] == 1
    report = verify(config)
    assert report.ok and report.notes["shortened_rows"] == 2
    index = SegmentIndex(prepare(config, encoder).train, max_length=LIMIT, overflow=Overflow.KEEP_ANSWER, units=units)
    assert len(index) == 2 * len(runs)


class _OneTurnLess:
    """Leaves out one turn more than need be, or encodes the row whole."""

    def __init__(self, encoder: Encoder, limit: int | None) -> None:
        self.encoder = replace(encoder, keep_answer_within=limit)

    def encode(self, row: Row) -> Sample:
        return self.encoder.encode(row)


@pytest.mark.parametrize("limit", [LIMIT - 24, LIMIT + 24, None])
def test_a_prompt_of_another_length_is_found(limit: int | None, tmp_path: Path) -> None:
    config = config_of(tmp_path, LONG[:2])
    report = verify(config, encoder=_OneTurnLess(Encoder.from_config(config), limit))
    assert not report.ok and report.num_failed_rows == 2


@pytest.mark.parametrize("template", [{"default_system": "Be kind."}, {"targets": [{"pattern": "cat", "weight": 2}]}])
def test_the_runs_own_system_message_and_rules_hold_once(template: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"messages": turns(9, seed=9)}], template=template)
    report = verify(config)
    assert report.ok, [str(one) for row in report.failed_rows for one in row.violations] + [report.ledger]
    assert report.notes["shortened_rows"] == 1
    _, (sample,) = encoded(config)
    assert sample.weight is None or set(np.unique(sample.weight).tolist()) == {1.0, 2.0}


def test_owners_are_told_by_the_numbers_of_the_whole_row(tmp_path: Path) -> None:
    config = config_of(tmp_path, [LONG[0]])
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder).train
    (runs,) = row_origins(prepared, [0], encoder, open_sources(config.data.train, seed=0)).values()
    assert not any(run.finding for run in runs)
    answers = {owner.message for run in runs for owner in run.owners if owner.role == "assistant"}
    assert answers == {number for number, one in enumerate(LONG[0]["messages"]) if one["role"] == "assistant"}
    assert {owner.message for owner in runs[-1].owners if owner.field == "content"} >= {0, len(LONG[0]["messages"]) - 1}
    assert len(runs) > 1 and all("data.overflow: keep_answer" in str(run.continuation) for run in runs)


def test_rows_that_fit_are_as_ever_and_other_runs_have_other_stores(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"messages": turns(2)}])
    encoder = Encoder.from_config(config)
    plain = replace(encoder, keep_answer_within=None)
    one, other = encoder.encode(_record(config)), plain.encode(_record(config))
    assert np.array_equal(one.input_ids, other.input_ids) and one.branches == other.branches
    assert len({encoder.fingerprint, plain.fingerprint, replace(encoder, keep_answer_within=5).fingerprint}) == 3


def test_turns_begin_where_somebody_asks_behind_an_answer() -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "system", "user", "user", "assistant"]
    assert turn_starts([Message(role=role, parts=()) for role in roles]) == (1, [1, 5])
    assert turn_starts([Message(role="assistant", parts=()), Message(role="user", parts=())]) == (0, [0, 1])


def test_one_text_for_all_answers_cannot_be_shortened_for_each(tmp_path: Path) -> None:
    config = config_of(tmp_path, LONG).model_dump(mode="json")
    config["template"]["history"] = "one_rendering"
    with refused(ConfigError, "data.overflow"):
        load_config(config)


def test_pictures_go_with_their_turns(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):  # of other numbers of tokens
        (tmp_path / name).write_bytes(image_file(picture(64, 64 + 32 * number)))
    shown = [said("user", f"<image>what is {number}?") for number in range(4)]
    messages = [one for pair in zip(shown, [said("assistant", "blue")] * 4, strict=True) for one in pair]
    config = config_of(
        tmp_path, [{"messages": messages, "images": names}], model={"name_or_path": "preset:tiny-qwen3-vl"}
    )
    encoder, (sample,) = encoded(config)
    whole = replace(encoder, keep_answer_within=None).encode(_record(config))
    tight = config.model_copy(update={"data": config.data.model_copy(update={"max_length": len(whole.input_ids) - 2})})
    encoder, (sample,) = encoded(tight)
    assert [len(segment.media) for segment in sample.segments()] == [3, 3] and len(sample.media) == 6
    for item in sample.media:  # slots stand where the items say
        assert len(set(sample.input_ids[item.start + 1 : item.start + item.length - 1].tolist())) == 1
    report = verify(tight)
    assert report.ok and report.notes["shortened_rows"] == 1
    (runs,) = row_origins(prepare(tight, encoder).train, [0], encoder, open_sources(tight.data.train, seed=0)).values()
    assert not any(run.finding for run in runs)
