import json
import multiprocessing
import os
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from luthier.config.inputs import DataConfig, ModelConfig
from luthier.config.schema import OutputConfig, RunConfig, RuntimeConfig
from luthier.errors import BudgetError, RowError, SourceError, StoreError, UserError
from luthier.packing.order import hold_out_part
from luthier.preparation import num_held_out, resolver, workers
from luthier.preparation.prepare import prepare
from luthier.records import Branch, Conversation, Sample
from tests.conftest import refused


@dataclass
class LetterEncoder:
    """One token a letter; the assistant's are targets. Some first letters of the question make it fail."""

    name: str = "letters"
    asked: list = field(default_factory=list)

    @property
    def fingerprint(self):
        return self.name.encode().hex().ljust(64, "0")

    about = {}  # noqa: RUF012

    takes_media = False

    def expect_many_rows(self):
        pass

    def encode_many(self, rows):
        for row in rows:
            try:
                yield self.encode(row)
            except RowError as error:
                yield error

    def encode(self, row):
        assert isinstance(row, Conversation)
        question, answer = (message.text for message in row.messages)
        self.asked.append(question)
        match question[0]:
            case "!":
                raise RowError("bad_letter", "starts with !", field="messages[0]")
            case "?":
                raise MemoryError("no room")
            case "%":
                os._exit(9)  # what the system does to a process when memory runs out
            case "~":
                time.sleep(600)  # a picture that its decoder never ends with
        target = [False] * len(question) + [question[0] != "-"] * len(answer)
        return Sample(
            input_ids=np.array([ord(letter) for letter in question + answer], dtype=np.int32),
            target=np.array(target),
            branches=(Branch(parent=-1, length=len(target)),),
            address=row.address,
        )


def line(question, answer="yes"):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


@pytest.fixture
def make_config(tmp_path):
    def make(*sources, seed=42, out="out", **data):
        paths = [{"path": str(source)} if not isinstance(source, dict) else source for source in sources]
        return RunConfig(
            model=ModelConfig(name_or_path="preset:tiny-qwen3"),
            data=DataConfig(train=paths, store=tmp_path / "store", **{"max_drop": 1000.0, "workers": 0, **data}),
            output=OutputConfig(dir=tmp_path / out),
            runtime=RuntimeConfig(seed=seed),
        )

    return make


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def texts(prepared_set):
    return ["".join(map(chr, prepared_set[row].input_ids)) for row in range(len(prepared_set))]


def quarantine(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_rows_come_back_in_the_order_in_which_they_were_read_with_their_addresses(tmp_path, make_config):
    one = write(tmp_path / "one.jsonl", [line("a"), line("b")])
    two = write(tmp_path / "two.jsonl", [line("c")])
    prepared = prepare(make_config(one, {"path": str(two), "weight": 2.0}), LetterEncoder())
    assert texts(prepared.train) == ["ayes", "byes", "cyes"]
    assert [str(prepared.train.address(row)) for row in range(3)] == [f"{one}:1", f"{one}:2", f"{two}:1"]
    assert str(prepared.train[2].address) == f"{two}:1"
    assert prepared.train.source_ids.tolist() == [0, 0, 1]
    assert [(source.name, source.weight) for source in prepared.train.sources] == [(str(one), 1.0), (str(two), 2.0)]
    assert prepared.eval is None
    assert prepared.quarantine is None


def test_rows_of_a_file_that_two_data_sets_name_have_its_numbers(tmp_path, make_config):
    file = write(tmp_path / "rows.jsonl", [line("one"), line("!bad"), line("two")])
    config = make_config(file, {"path": str(file), "weight": 2.0})
    prepared = prepare(config, LetterEncoder())
    assert prepared.train.row_numbers.tolist() == [1, 3, 1, 3]
    assert [row["address"] for row in quarantine(prepared.quarantine)] == [f"{file}:2"] * 2


def test_every_row_that_is_read_is_trained_or_in_the_quarantine_file(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a"), "{broken", line("!b"), line("-c"), '{"messages": []}', line("d")])
    prepared = prepare(make_config(rows), LetterEncoder())
    ledger = prepared.train.ledger
    assert (ledger.read, ledger.prepared, ledger.lost) == (6, 2, 4)
    assert ledger.dropped == {"no_target": 1}
    assert ledger.quarantined["bad_letter"] == 1
    lost = quarantine(prepared.quarantine)
    assert [entry["address"] for entry in lost] == [f"{rows}:{n}" for n in (2, 3, 4, 5)]
    assert [entry["fate"] for entry in lost] == ["quarantined", "quarantined", "dropped", "quarantined"]
    assert lost[1]["raw"] == line("!b")
    assert (lost[1]["reason"], lost[1]["field"], lost[1]["split"]) == ("bad_letter", "messages[0]", "train")
    assert texts(prepared.train) == ["ayes", "dyes"]


def test_a_mended_data_set_has_no_quarantine_file_any_more(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("!b")])
    first = prepare(make_config(rows), LetterEncoder())
    write(rows, [line("a"), line("b")])
    assert first.quarantine.exists()
    assert prepare(make_config(rows), LetterEncoder()).quarantine is None
    assert not first.quarantine.exists()


def test_more_losses_than_allowed_stop_the_run_and_name_the_file(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("!b")])
    with refused(BudgetError, "1", "2", "quarantine.jsonl"):
        prepare(make_config(rows, max_drop=0.4), LetterEncoder())
    prepare(make_config(rows, max_drop=0.5), LetterEncoder())  # control: exactly what is allowed


def test_where_no_row_is_left_the_data_are_at_fault_and_not_what_may_be_lost(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("!a"), line("!b")])
    with pytest.raises(BudgetError) as caught:
        prepare(make_config(rows, max_drop=0.4), LetterEncoder())
    assert caught.value.key == "data.train" and "quarantine.jsonl" in caught.value.message
    assert "max_drop" not in str(caught.value)


def test_no_rows_left_is_an_error(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("!a")])
    with pytest.raises(UserError, match="no row is left for train"):
        prepare(make_config(rows), LetterEncoder())
    with pytest.raises(UserError, match="no row is left for train"):
        prepare(make_config(), LetterEncoder())
    with pytest.raises(SourceError):
        prepare(make_config(tmp_path / "missing.jsonl"), LetterEncoder())


# ---------------------------------------------------------------------------------------------- encoded once


def test_what_was_encoded_once_is_not_encoded_again(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("b")])
    first = prepare(make_config(rows), LetterEncoder())
    assert (first.num_encoded, first.num_reused) == (2, 0)
    encoder = LetterEncoder()
    second = prepare(make_config(rows, seed=7, max_length=3, overflow="split"), encoder)
    assert encoder.asked == []
    assert (second.num_encoded, second.num_reused) == (0, 2)
    assert texts(second.train) == texts(first.train)


def test_appended_rows_are_the_only_ones_that_are_encoded(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("b")])
    prepare(make_config(rows), LetterEncoder())
    write(rows, [line("x"), line("a"), line("b"), line("y")])
    encoder = LetterEncoder()
    assert texts(prepare(make_config(rows), encoder).train) == ["xyes", "ayes", "byes", "yyes"]
    assert encoder.asked == ["x", "y"]


def test_rows_with_the_same_bytes_are_encoded_once_and_all_trained(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("!b"), line("a"), line("!b"), line("-c"), line("-c")])
    encoder = LetterEncoder()
    prepared = prepare(make_config(rows), encoder)
    assert encoder.asked == ["a", "!b", "-c"]
    assert texts(prepared.train) == ["ayes", "ayes"]
    assert prepared.train[1].address.row == 3
    assert prepared.train.ledger.notes == {"repeated": 1}
    assert [entry["address"][-1] for entry in quarantine(prepared.quarantine)] == ["2", "4", "5", "6"]


def test_another_encoder_or_another_reading_of_the_rows_encodes_anew(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a")])
    prepare(make_config(rows), LetterEncoder())
    for config, encoder in (
        (make_config(rows), LetterEncoder(name="other")),
        (make_config({"path": str(rows), "train_on": "all"}), LetterEncoder()),
    ):
        prepare(config, encoder)
        assert encoder.asked == ["a"]


def test_damage_to_the_store_is_found_before_training(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a")])
    prepare(make_config(rows), LetterEncoder())
    (manifest,) = (tmp_path / "store").glob("*/manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"shard-", b"shirt-"))
    with pytest.raises(StoreError, match="damaged"):
        prepare(make_config(rows), LetterEncoder())


# --------------------------------------------------------------------------------------------------- evaluation


def test_held_out_rows_are_never_trained_on_and_none_is_lost(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line(f"row {n} ") for n in range(50)])
    for size, number in ((0.2, 10), (7, 7), (0.001, 1)):
        prepared = prepare(make_config(rows, eval_split=size), LetterEncoder())
        train, held = set(texts(prepared.train)), set(texts(prepared.eval))
        assert len(held) == number == prepared.eval.ledger.prepared
        assert len(train) == 50 - number == prepared.train.ledger.prepared
        assert not train & held
        for ledger in (prepared.train.ledger, prepared.eval.ledger):
            ledger.check(max_drop=0)


def test_the_choice_of_held_out_rows_depends_on_the_seed_and_not_on_content_or_store(tmp_path, make_config):
    def held(name, prefix, seed, store="store"):
        rows = write(tmp_path / name, [line(f"{prefix} {n} ") for n in range(40)])
        config = make_config(rows, eval_split=8, seed=seed)
        return prepare(config, LetterEncoder()).eval.row_numbers.tolist()

    first = held("one.jsonl", "row", 1)
    assert first == held("two.jsonl", "other", 1)
    assert first != held("one.jsonl", "row", 2)


def test_rows_with_the_content_of_a_held_out_row_are_not_trained_and_are_accounted_for(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", ["{" if n == 7 else line(f"row {n % 20} ") for n in range(60)])
    prepared = prepare(make_config(rows, eval_split=6), LetterEncoder())
    assert len(prepared.eval) == 6
    assert not set(texts(prepared.train)) & set(texts(prepared.eval))
    ledger, held_contents = prepared.train.ledger, set(texts(prepared.eval))
    same = sum(f"row {n % 20} yes" in held_contents for n in range(60) if n != 7) - 6
    assert (ledger.notes["held_out"], ledger.notes["same_as_held_out"]) == (6, same)
    assert ledger.read == ledger.prepared + ledger.lost == 60 - 6 - same
    assert ledger.prepared == len(prepared.train)


def test_which_rows_are_held_out_is_known_before_any_is_read(tmp_path, make_config):
    lines = ["{" if n % 5 == 2 else line(f"row {n} ") for n in range(40)]
    rows = write(tmp_path / "rows.jsonl", lines)
    prepared = prepare(make_config(rows, eval_split=0.25, seed=3), LetterEncoder())
    sound = [row for row in hold_out_part(40, 0, 40, seed=3).tolist() if row % 5 != 2]
    assert prepared.eval.row_numbers.tolist() == sorted(row + 1 for row in sound[: num_held_out(0.25, 40)])
    tried = hold_out_part(40, 0, 40, seed=3).tolist()
    last = max(tried.index(row) for row in sound[: num_held_out(0.25, 40)])
    assert prepared.train.numbering.held_out.tolist() == sorted(tried[: last + 1]), "in no epoch, lost ones neither"
    assert prepared.train.numbering.counts == (40,)


@pytest.mark.parametrize(
    ("size", "alike", "said"),
    [(0.95, False, "train on$"), (5, False, "train on$"), (0.2, True, "4 other rows are the same")],
)
def test_a_split_with_an_empty_side_is_refused(tmp_path, make_config, size, alike, said):
    rows = write(tmp_path / "rows.jsonl", [line("row" if alike else f"row {n}") for n in range(5)])
    with pytest.raises(UserError, match=rf"data\.eval_split.*{said}".replace("$", "\n")):
        prepare(make_config(rows, eval_split=size), LetterEncoder())


def test_named_evaluation_data_has_its_own_ledger_and_wins_over_the_split(tmp_path, make_config):
    train = write(tmp_path / "train.jsonl", [line("a"), line("b")])
    test = write(tmp_path / "test.jsonl", [line("c"), line("!d")])
    prepared = prepare(make_config(train, eval=[{"path": str(test)}], eval_split=1), LetterEncoder())
    assert texts(prepared.train) == ["ayes", "byes"]
    assert texts(prepared.eval) == ["cyes"]
    assert prepared.eval.ledger.quarantined == {"bad_letter": 1}
    assert quarantine(prepared.quarantine)[0]["split"] == "eval"


# ------------------------------------------------------------------------------------------------------ workers


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_results_do_not_depend_on_the_number_of_workers(tmp_path, make_config, monkeypatch):
    monkeypatch.setattr(resolver, "PORTION_BYTES", 300)
    questions = ["-none" if n % 17 == 3 else "!bad" if n % 11 == 5 else f"row {n % 70} " for n in range(120)]
    rows = write(tmp_path / "rows.jsonl", [line(question) for question in questions])
    results = []
    for number in (0, 1, 2):
        config = make_config(rows, workers=number, out=f"out{number}")
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"store": tmp_path / f"store{number}"})}
        )
        prepared = prepare(config, LetterEncoder())
        results.append(
            (
                texts(prepared.train),
                prepared.train.sample_ids.tolist(),
                prepared.train.ledger.to_json(),
                prepared.num_encoded,
                quarantine(prepared.quarantine),
                contents(tmp_path / f"store{number}"),
            )
        )
    assert results[0] == results[1] == results[2]
    assert results[0][2]["prepared"] + results[0][2]["dropped"]["no_target"] > 90


def test_auto_starts_processes_only_when_enough_is_to_be_encoded(tmp_path, make_config, monkeypatch):
    started = []
    monkeypatch.setattr(resolver, "PORTION_BYTES", 300)
    monkeypatch.setattr(workers, "usable_cores", lambda: 2)

    def elsewhere(chunks, encoder, readers, num_workers):
        started.append(num_workers)
        for chunk in chunks:
            yield chunk.tag, workers.encode_read_rows(encoder, readers, chunk.rows, chunk.source_ids)

    monkeypatch.setattr(workers, "_encode_elsewhere", elsewhere)
    rows = write(tmp_path / "rows.jsonl", [line(f"row {n}") for n in range(40)])
    prepare(make_config(rows, workers="auto"), LetterEncoder())
    monkeypatch.setattr(workers, "BYTES_HERE", 1000)
    small = prepare(make_config(rows, workers="auto"), LetterEncoder())
    assert small.num_encoded == 0  # all known: nothing to start processes for
    prepare(make_config(rows, workers="auto"), LetterEncoder(name="not enough left"))
    assert started == []
    monkeypatch.setattr(workers, "BYTES_WORTH_WORKERS", 1000)
    prepared = prepare(make_config(rows, workers="auto"), LetterEncoder(name="other"))
    assert started == [2]
    assert texts(prepared.train) == texts(small.train)


@pytest.mark.parametrize("number", [0, 1])
def test_a_fault_of_the_encoder_is_raised_at_once_and_names_the_row(tmp_path, make_config, monkeypatch, number):
    monkeypatch.setattr(resolver, "PORTION_ROWS", 1)
    rows, begun = write(tmp_path / "rows.jsonl", [line("a"), line("?b"), line("~c")]), time.monotonic()
    with pytest.raises(MemoryError) as caught:
        prepare(make_config(rows, workers=number), LetterEncoder())
    assert time.monotonic() - begun < 60, "nobody waits for what a worker has begun"
    assert f"while encoding {rows}:2" in caught.value.__notes__


def test_nothing_new_starts_no_process(tmp_path, make_config, monkeypatch):
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("b")])
    prepare(make_config(rows), LetterEncoder())

    def refuse(*args):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(workers.ProcessPoolExecutor, "submit", refuse)
    assert texts(prepare(make_config(rows, workers=2), LetterEncoder()).train) == ["ayes", "byes"]
    with pytest.raises(AssertionError, match="was started"):  # control: something new does
        prepare(make_config(rows, workers=2), LetterEncoder(name="other"))
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    prepare(make_config(rows, workers=2), LetterEncoder(name="other"))  # Python lets daemonic processes start none


def test_a_worker_that_dies_is_reported_with_the_rows_it_was_at(tmp_path, make_config):
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("%b")])
    with refused(UserError, "rows.jsonl:1", "data.workers"):
        prepare(make_config(rows, workers=1), LetterEncoder())


def test_a_worker_that_hangs_is_ended_and_reported(tmp_path, make_config, monkeypatch, capfd):
    monkeypatch.setattr(workers, "LONGEST_CHUNK", 1.0)
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("~b")])
    begun = time.monotonic()
    with refused(UserError, "rows.jsonl:1", "hung"):
        prepare(make_config(rows, workers=1), LetterEncoder())
    assert time.monotonic() - begun < 60
    assert "in encode" in capfd.readouterr().err  # where it was


# ----------------------------------------------------------------------------------------------------- progress


def test_progress_accounts_for_every_row(tmp_path, make_config, monkeypatch):
    monkeypatch.setattr(resolver, "PORTION_ROWS", 4)
    rows = write(tmp_path / "rows.jsonl", [line("!x" if n % 5 == 0 else f"row {n}") for n in range(10)])
    reports = []
    prepared = prepare(make_config(rows), LetterEncoder(), on_progress=reports.append)
    assert [report.read for report in reports] == [4, 8, 10]
    assert reports[-1].num_tokens == sum(len(sample.input_ids) for sample in prepared.train) > 0
    assert all(report.encoded + report.reused + report.lost == report.read for report in reports)
    assert (reports[-1].encoded, reports[-1].lost, reports[-1].source) == (8, 2, str(rows))


def test_a_crash_while_reading_keeps_what_was_encoded(tmp_path, make_config, monkeypatch):
    monkeypatch.setattr(resolver, "PORTION_ROWS", 1)
    monkeypatch.setattr("luthier.store.SHARD_BYTES", 1)
    rows = write(tmp_path / "rows.jsonl", [line("a"), line("!b"), line("?c")])
    with pytest.raises(MemoryError):
        prepare(make_config(rows), LetterEncoder())
    encoder = LetterEncoder()
    write(rows, [line("a"), line("c")])
    prepare(make_config(rows), encoder)
    assert encoder.asked == ["c"]
