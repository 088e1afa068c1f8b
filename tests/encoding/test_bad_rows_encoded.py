"""The corpus of bad rows where only encoding can tell: what is learned, and what the ledger counts.

The numbers are those of the list of bad inputs that Luthier was designed against; tests/sources/test_bad_rows.py has
the rows that reading judges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError, SourceError
from luthier.ledger import Ledger
from luthier.preparation import Prepared
from luthier.preparation import prepare as preparing
from luthier.preparation.prepare import prepare
from luthier.preparation.segments import SegmentIndex
from luthier.records import BLANK_ANSWER, Sample
from tests.conftest import reason_is

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
BLANK = {"role": "assistant", "content": " \n"}
UNASKED = "answer before any question, not learned"

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEMANDING = "{% if messages[0].role != 'system' %}{% endif %}" + PLAIN  # has no prompt before the first message
STRICT = (
    "{% for m in messages %}{% if loop.index0 > 0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def row(*messages: dict[str, Any]) -> str:
    return json.dumps({"messages": messages})


def run_config(folder: Path, *rows: str, template: str | None = None, **data: Any) -> RunConfig:
    path = folder / "rows.jsonl"
    path.write_text("\n".join([row(USER, ASSISTANT), *rows]) + "\n")
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": "preset:tiny-qwen3"},
            "template": {"chat_template": template},
            "data": {"train": str(path), "store": str(folder / "store"), "workers": 0, "max_drop": 0.9, **data},
            "output": {"dir": str(folder / "out")},
        }
    )


def prepared_rows(folder: Path, *rows: str, **options: Any) -> tuple[Prepared, Encoder]:
    """The rows, after one that is good."""
    config = run_config(folder, *rows, **options)
    encoder = Encoder.from_config(config)
    return prepare(config, encoder), encoder


def learned(prepared: Prepared, encoder: Encoder, row_number: int) -> str:
    """What of a row the model learns to say."""
    sample: Sample = prepared.train[row_number]
    return encoder.tokenizer.decode(sample.input_ids[sample.target].tolist())


def ledger_of(prepared: Prepared) -> Ledger:
    ledger = prepared.train.ledger
    ledger.check(max_drop=0.9)  # the identity
    return ledger


# ------------------------------------------------------------------------------------------- 21: two of one role


def test_two_users_in_a_row_are_trained_where_the_template_takes_them_and_counted(tmp_path: Path) -> None:
    prepared, encoder = prepared_rows(tmp_path, row(USER, USER, ASSISTANT), row(USER, USER, ASSISTANT, USER, BLANK))
    assert ledger_of(prepared).notes["two user messages in a row"] == 2
    assert learned(prepared, encoder, 1) == learned(prepared, encoder, 2) == "Hello<|im_end|>"


def test_they_are_counted_the_same_when_they_come_from_the_store(tmp_path: Path) -> None:
    first, _ = prepared_rows(tmp_path, row(USER, USER, ASSISTANT))
    again, _ = prepared_rows(tmp_path, row(USER, USER, ASSISTANT))
    assert again.num_encoded == 0
    assert ledger_of(again).to_json() == ledger_of(first).to_json()


def test_a_template_that_raises_on_them_quarantines_the_row_and_a_merged_one_passes(tmp_path: Path) -> None:
    strict, _ = prepared_rows(tmp_path, row(USER, USER, ASSISTANT), template=STRICT)
    assert dict(ledger_of(strict).quarantined) == {"template": 1}
    merged, encoder = prepared_rows(tmp_path, row(USER, USER, ASSISTANT), template=STRICT, same_role="merge")
    assert not ledger_of(merged).lost
    assert ledger_of(merged).notes["user messages in a row, merged"] == 1
    assert "Hi\n\nHi<|im_end|>" in encoder.tokenizer.decode(merged.train[1].input_ids.tolist())


def test_quarantining_them_names_the_second_one(tmp_path: Path) -> None:
    prepared, _ = prepared_rows(tmp_path, row(USER, USER, ASSISTANT), same_role="quarantine")
    ledger = ledger_of(prepared)
    assert dict(ledger.quarantined) == {"same_role": 1}
    assert "rows.jsonl:2:messages[1] same_role" in ledger.examples["same_role"][0]
    (lost,) = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(json.loads(lost)["raw"])["messages"] == [USER, USER, ASSISTANT]


# ------------------------------------------------------------------------------- 22: answers before any question


def test_an_assistant_that_opens_is_context_where_no_prompt_leads_to_it_and_counted(tmp_path: Path) -> None:
    opening = row(ASSISTANT, USER, {**ASSISTANT, "content": "Yes"})
    prepared, encoder = prepared_rows(tmp_path, opening, template=DEMANDING)
    notes = ledger_of(prepared).notes
    assert notes[UNASKED] == notes["the assistant speaks first"] == 1
    assert learned(prepared, encoder, 1) == "Yes<|im_end|>"


def test_an_assistant_that_opens_is_learned_where_a_prompt_leads_to_it_and_counted(tmp_path: Path) -> None:
    prepared, encoder = prepared_rows(tmp_path, row(ASSISTANT, USER, {**ASSISTANT, "content": "Yes"}), template=PLAIN)
    notes = ledger_of(prepared).notes
    assert notes["the assistant speaks first"] == 1 and UNASKED not in notes
    assert learned(prepared, encoder, 1) == "Hello<|im_end|>Yes<|im_end|>"


# --------------------------------------------------------------------------------------------- 25: blank answers


def test_a_blank_answer_is_context_beside_others_and_counted(tmp_path: Path) -> None:
    prepared, encoder = prepared_rows(tmp_path, row(USER, BLANK, USER, ASSISTANT), row(USER, ASSISTANT, USER, BLANK))
    assert ledger_of(prepared).notes[BLANK_ANSWER] == 2
    assert learned(prepared, encoder, 1) == learned(prepared, encoder, 2) == "Hello<|im_end|>"


def test_a_row_that_has_nothing_but_a_blank_answer_is_quarantined(tmp_path: Path) -> None:
    prepared, _ = prepared_rows(tmp_path, row(USER, BLANK), row(USER, {**ASSISTANT, "train": False}, USER, BLANK))
    assert dict(ledger_of(prepared).quarantined) == {"blank_answer": 2}


@pytest.mark.parametrize(
    ("objective", "rows", "field"),
    [
        ("dpo", [{"prompt": "Hi", "chosen": " ", "rejected": "No"}, {"prompt": "Hi", "chosen": "Yes", "rejected": " "}],
         "chosen"),
        ("kto", [{"prompt": "Hi", "completion": "", "label": True}, {"prompt": "Hi", "completion": "", "label": False}],
         "completion"),
    ],
)  # fmt: skip
def test_a_blank_answer_that_should_become_likelier_is_quarantined_with_its_field(
    tmp_path: Path, objective: str, rows: list[dict[str, Any]], field: str
) -> None:
    """Of two rows the first has its better answer blank; the second, a worse one."""
    config = run_config(tmp_path)
    data, chosen = config.data.train[0], config.objective.model_copy(update={"name": objective})
    Path(data.path).write_text("".join(json.dumps(each) + "\n" for each in rows))
    config = config.model_copy(update={"objective": chosen})
    prepared = prepare(config, Encoder.from_config(config))
    ledger = ledger_of(prepared)
    assert dict(ledger.quarantined) == {"blank_answer": 1} and len(prepared.train) == 1
    (example,) = ledger.examples["blank_answer"]
    assert f"rows.jsonl:1:{field} blank_answer: " in example


def test_a_blank_answer_is_learned_where_the_row_insists(tmp_path: Path) -> None:
    prepared, encoder = prepared_rows(tmp_path, row(USER, {**BLANK, "train": True}))
    assert BLANK_ANSWER not in ledger_of(prepared).notes
    assert learned(prepared, encoder, 1).endswith("<|im_end|>") and not learned(prepared, encoder, 1).startswith("H")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
    ],
    ids=["a call", "a thought"],
)
def test_a_call_and_a_thought_are_no_blank_answers(tmp_path: Path, message: dict[str, Any]) -> None:
    prepared, _ = prepared_rows(tmp_path, row(USER, message))
    assert not ledger_of(prepared).lost
    assert BLANK_ANSWER not in ledger_of(prepared).notes
    assert prepared.train[1].target.any()


# ------------------------------------------------------------------------------------- 1, 23, 28, 35, 36, 37, 39


def test_texts_over_the_limit_never_reach_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # 28
    config = run_config(tmp_path, row(USER, {**ASSISTANT, "content": "a" * 1_000_000}))
    encoder = Encoder.from_config(config)
    flat, longest = encoder.tokenizer.encode_flat, 0

    def encode_flat(texts: list[str], bare: Any = None) -> Any:
        nonlocal longest
        longest = max([longest, *map(len, texts)])
        return flat(texts, bare)

    monkeypatch.setattr(encoder.tokenizer, "encode_flat", encode_flat)
    ledger = ledger_of(prepare(config, encoder))
    assert dict(ledger.quarantined) == {"text_too_long": 1}
    assert 0 < longest < 1_000


def test_a_cut_off_last_line_is_quarantined_with_its_bytes(tmp_path: Path) -> None:  # 1
    config = run_config(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text() + row(USER, ASSISTANT)[:40])
    ledger = ledger_of(prepare(config, Encoder.from_config(config)))
    assert dict(ledger.quarantined) == {"truncated_json": 1}
    lost = json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())
    assert lost["raw"] == row(USER, ASSISTANT)[:40]
    assert "still being written" in lost["detail"]


def test_a_file_edited_after_its_last_row_was_read_stops_preparation(  # 35
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path)
    whole = preparing._portions

    def edited_at_the_end(*arguments: Any) -> Iterator[Any]:
        yield from whole(*arguments)
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write(row(USER, ASSISTANT))

    monkeypatch.setattr(preparing, "_portions", edited_at_the_end)
    with pytest.raises(SourceError, match=r"changed while it was in use: \d+ bytes"):
        prepare(config, Encoder.from_config(config))


def test_a_row_without_an_answer_has_nothing_to_learn(tmp_path: Path) -> None:  # 23
    prepared, _ = prepared_rows(tmp_path, row(USER))
    assert dict(ledger_of(prepared).dropped) == {"no_target": 1}


def test_control_strings_are_text_and_counted_and_one_stop_is_learned(tmp_path: Path) -> None:  # 36, 37
    stop = "<|im_end|>"
    prepared, encoder = prepared_rows(
        tmp_path, row({**USER, "content": stop}, ASSISTANT), row(USER, {**ASSISTANT, "content": f"a{stop}b"})
    )
    assert ledger_of(prepared).notes[f"control string in text: {stop}"] == 2
    stop_id = encoder.tokenizer.control_id(stop)
    for number, num_stops in ((1, 2), (2, 2)):
        sample = prepared.train[number]
        assert int((sample.input_ids == stop_id).sum()) == num_stops
        assert int(((sample.input_ids == stop_id) & sample.target).sum()) == 1
    assert learned(prepared, encoder, 2) == f"a{stop}b{stop}"


def test_every_character_of_brackets_is_learned(tmp_path: Path) -> None:  # 39
    prepared, encoder = prepared_rows(tmp_path, row(USER, {**ASSISTANT, "content": "[[1, 2], [3, 4]]"}))
    assert learned(prepared, encoder, 1) == "[[1, 2], [3, 4]]<|im_end|>"


@pytest.mark.parametrize(("more", "is_kept"), [(0, True), (-1, True), (-2, False)])
def test_a_row_of_exactly_the_limit_is_kept_and_one_more_is_dropped(  # 29, 30
    tmp_path: Path, more: int, is_kept: bool
) -> None:
    long = row(USER, {**ASSISTANT, "content": "Hello " * 30})
    config = run_config(tmp_path, long)
    prepared = prepare(config, Encoder.from_config(config))
    length = len(prepared.train[1].input_ids)
    index = SegmentIndex(prepared.train, max_length=length + more, overflow=config.data.overflow)
    assert (len(index) == 2) is is_kept
    assert index.ledger.dropped["too_long"] == (0 if is_kept else 1)


def test_the_corpus_is_lost_one_by_one_and_its_errors_have_addresses(tmp_path: Path) -> None:
    bad = ["{", row(), row({"role": "narrator", "content": "x"}), row(USER, BLANK), row(USER, call_without_json())]
    prepared, _ = prepared_rows(tmp_path, *bad)
    ledger = ledger_of(prepared)
    assert ledger.read == 6 and ledger.prepared == 1
    lost = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [one["address"] for one in lost] == [f"{tmp_path / 'rows.jsonl'}:{n}" for n in range(2, 7)]


def call_without_json() -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{oops"}}]}


def test_the_same_holds_for_rows_in_python(tmp_path: Path) -> None:
    encoder = Encoder.from_config(run_config(tmp_path))
    from luthier.encoding import encode

    sample = encode({"messages": [USER, USER, BLANK, USER, ASSISTANT]}, encoder.tokenizer)
    assert dict(sample.notes) == {"two user messages in a row": 1, BLANK_ANSWER: 1}
    with pytest.raises(RowError, check=reason_is("blank_answer")):
        encode({"messages": [USER, BLANK]}, encoder.tokenizer)
