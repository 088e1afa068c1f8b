"""What became of every row, wherever a run ends. The oracle: addresses of the batches that finished steps took."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tiny_rows import make_row, run_data
from tiny_runs import make_config

from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowError
from luthier.ledger import Ledger
from luthier.records import Address
from luthier.training.fit import fit_data
from luthier.training.folder.artifacts import model_card
from luthier.training.folder.run_folder import LOST_FILE, UNREADABLE_LINE, LostMediaRows, ledger_of_run
from luthier.training.report import Ended, RunResult
from luthier.training.report.events import Event, StepDone
from luthier.training.report.report import Report
from luthier.training.trainer import Trainer

ROWS = 23
Taken = dict[int, set[Address]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """The rows of each step, from 1, as they came out of the stream."""
    found: Taken = defaultdict(set)
    original = Trainer.read_step

    def recorded(self: Trainer, steps: Any) -> Any:
        def watched() -> Any:
            for batches in steps:
                found[self.state.global_step + 1] |= {address for batch in batches for address in batch.addresses}
                yield batches

        return original(self, watched())

    monkeypatch.setattr(Trainer, "read_step", recorded)
    return found


def _run(folder: Path, tokenizer: Tokenizer, *, on_event: Any = None, held_out: int = 0, **changes: Any) -> RunResult:
    changes = {"train__per_device_train_batch_size": 2, **changes}
    config = make_config(folder / "run", **changes)
    data = run_data(folder / "store", config, rows=range(ROWS), held_out=range(ROWS, ROWS + held_out))
    return fit_data(config, tokenizer, data, on_event=on_event)


def _check(result: RunResult, taken: Taken) -> int:
    expected = set().union(*(rows for step, rows in taken.items() if step <= result.global_step))
    ledger, told = result.ledger, Report(result=result).to_json()["ledger"]
    lost = sum(ledger["dropped"].values()) + sum(ledger["quarantined"].values())
    assert ledger["read"] == ledger["prepared"] + lost
    assert ledger["prepared"] == ledger["trained"] + ledger["not_yet_trained"]
    assert ledger["trained"] == len(expected)
    assert [told[key] for key in ("read", "prepared", "trained", "not_yet_trained")] == [
        ledger[key] for key in ("read", "prepared", "trained", "not_yet_trained")
    ]
    assert json.loads((result.path / "result.json").read_text())["ledger"] == ledger
    return len(expected)


@pytest.mark.parametrize("packing", ["none", "best_fit", "window"])
@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_a_run_that_ends_early_says_which_rows_its_steps_saw(
    tmp_path: Path, tokenizer: Tokenizer, taken: Taken, objective: str, packing: str
) -> None:
    size = {"data__max_length": 64, "train__per_device_train_batch_size": 1}
    changes = {"objective__name": objective, "train__packing": packing, **size}
    count = _check(_run(tmp_path, tokenizer, train__max_steps=2, **changes), taken)
    assert 0 < count < ROWS


def test_split_rows_count_once_from_their_first_window_on(tmp_path: Path, tokenizer: Tokenizer, taken: Taken) -> None:
    changes = {"objective__name": "pt", "train__packing": "split", "data__max_length": 16, "data__overflow": "split"}
    assert 0 < _check(_run(tmp_path, tokenizer, train__max_steps=3, **changes), taken) < ROWS


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_answers_of_other_rows_are_no_targets(tmp_path: Path, tokenizer: Tokenizer, loss: str, packing: str) -> None:
    changes = {"objective": {"name": "kto", "loss": loss}, "train__packing": packing}
    result = _run(tmp_path, tokenizer, train__max_steps=None, train__num_train_epochs=1, **changes)
    rows = [make_row(number, continuations=1) for number in range(ROWS)]
    assert sum(step.target_tokens for step in result.steps) == sum(int(row.target.sum()) for row in rows)


def test_several_epochs_count_each_row_once(tmp_path: Path, tokenizer: Tokenizer, taken: Taken) -> None:
    result = _run(tmp_path, tokenizer, train__max_steps=None, train__num_train_epochs=2)
    assert _check(result, taken) == ROWS == result.ledger["trained"]


def test_a_signal_ends_the_count_where_the_last_step_finished(
    tmp_path: Path, tokenizer: Tokenizer, taken: Taken
) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:  # the next step is finished
            os.kill(os.getpid(), signal.SIGTERM)

    cut = _run(tmp_path, tokenizer, train__max_steps=8, on_event=stop)
    assert (cut.ended, cut.global_step) == (Ended.INTERRUPTED, 3)
    before = _check(cut, taken)
    gone_on = _run(tmp_path, tokenizer, train__max_steps=8)
    assert gone_on.resumed_from == "checkpoint-3"
    assert before < _check(gone_on, taken) < ROWS


def test_early_stopping_leaves_rows_that_are_not_yet_trained(
    tmp_path: Path, tokenizer: Tokenizer, taken: Taken
) -> None:
    result = _run(
        tmp_path, tokenizer, held_out=3, train__max_steps=10, train__learning_rate=1e-30, eval__strategy="steps",
        eval__steps=1, eval__early_stopping_patience=1,
    )  # fmt: skip
    assert result.ended is Ended.EARLY_STOPPED
    assert _check(result, taken) < ROWS


def test_the_card_and_the_terminal_tell_the_same(tmp_path: Path, tokenizer: Tokenizer, taken: Taken) -> None:
    result = _run(tmp_path, tokenizer, train__max_steps=2)
    count = _check(result, taken)
    card = model_card(result, make_config(tmp_path / "run"))
    assert f"{ROWS} ({count} trained, {ROWS - count} prepared but not yet trained, 0 dropped or quarantined)" in card


def test_a_row_whose_media_was_lost_is_not_trained_though_a_step_took_it(tmp_path: Path) -> None:
    _lose(tmp_path, 1)
    rows = [Address(file="a", row=1), Address(file="a", row=2)]
    found = ledger_of_run(Ledger(read=3, prepared=3).to_json(), tmp_path, rows)
    assert (found["prepared"], found["trained"], found["not_yet_trained"]) == (2, 1, 1)
    assert found["quarantined"] == {"media_changed": 1}


def _lose(folder: Path, *rows: int) -> bytes:
    """What a run writes that lost these rows."""
    lost = LostMediaRows(folder, {}, max_drop=1.0, tell=lambda _: None)
    for row in rows:
        lost._add(RowError("media_changed", "", address=Address(file="a", row=row)), counted=True)
    return (folder / LOST_FILE).read_bytes()


def test_no_damage_to_the_file_of_lost_rows_takes_another_row(tmp_path: Path) -> None:
    first, second = _lose(tmp_path, 1, 2).splitlines(keepends=True)
    rows = [Address(file="a", row=row) for row in range(1, 10)]
    ledger, told = Ledger(read=9, prepared=9).to_json(), list[Any]()
    for place in range(len(first) - 1):  # the last is the newline
        damaged = bytearray(first)
        damaged[place] ^= 1 << place % 7
        (tmp_path / LOST_FILE).write_bytes(bytes(damaged) + second)
        LostMediaRows(tmp_path, ledger, max_drop=1.0, tell=told.append)
        found = ledger_of_run(ledger, tmp_path, rows)
        unreadable = found["notes"][UNREADABLE_LINE]
        assert unreadable in (1, 2)  # 2 where the flip makes a newline
        assert (found["prepared"], found["trained"], found["quarantined"]) == (8, 8, {"media_changed": 1})
    assert len(told) == len(first) - 1 and LOST_FILE in told[0]
    for line in (b"[]", b"null", b"3", b'{"file": "a"}', b"\xff", b"[" * 100_000):
        (tmp_path / LOST_FILE).write_bytes(first + line + b"\n" + second)
        assert ledger_of_run(ledger, tmp_path, rows)["quarantined"] == {"media_changed": 2}


def test_more_trained_than_prepared_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        ledger_of_run(Ledger(read=1, prepared=1).to_json(), tmp_path, [Address(file="a", row=n) for n in (1, 2)])
