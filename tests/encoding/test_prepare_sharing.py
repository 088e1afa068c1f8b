"""Preparing by units: the same rows as one after the other, known again by their bytes, shared between processes."""

import io
import json
import os
import signal
import time
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import msgspec
import numpy as np
import pytest

from luthier.config.inputs import DataConfig, ModelConfig, SourceConfig
from luthier.config.schema import OutputConfig, RunConfig
from luthier.errors import RowError, SourceError
from luthier.preparation import work_units as units_room
from luthier.preparation.prepare import prepare
from luthier.preparation.work_units import WorkUnits
from luthier.records import Branch, Sample
from luthier.sources import RowBytes, text_files
from luthier.sources.files import find_files
from luthier.sources.origins import LocalFiles
from luthier.sources.source import open_sources
from luthier.store.disk import Disk
from tests.conftest import HANG_SECONDS


@dataclass
class SlowLetterEncoder:
    """One token a letter; the answer's are targets. ``!`` is an error. Sleeps ``seconds`` a row."""

    seconds: float = 0.0
    asked: list = field(default_factory=list)
    fingerprint: str = "cd" * 32

    about = {}  # noqa: RUF012

    takes_media = False

    def expect_many_rows(self):
        pass

    def encode_many(self, rows):
        for row in rows:
            question, answer = (message.text for message in row.messages)
            self.asked.append(question)
            time.sleep(self.seconds)
            if question[0] == "!":
                yield RowError("bad_letter", "starts with !", field="messages[0]", address=row.address)
                continue
            yield Sample(
                input_ids=np.array([ord(letter) for letter in question + answer], dtype=np.int32),
                target=np.array([False] * len(question) + [True] * len(answer)),
                branches=(Branch(parent=-1, length=len(question + answer)),),
                notes=(("asks", 1),) if question[0] == "?" else (),
                address=row.address,
            )


def line(question, answer="yes"):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


def config_of(folder, *paths, out="out", **data):
    return RunConfig(
        model=ModelConfig(name_or_path="preset:tiny-qwen3"),
        data=DataConfig(
            train=[{"path": str(path)} for path in paths],
            store=folder / "store",
            **{"max_drop": 1000.0, "workers": 0, **data},
        ),
        output=OutputConfig(dir=folder / out),
    )


def questions(prepared):
    return ["".join(map(chr, prepared.train[row].input_ids)) for row in range(len(prepared.train))]


def write(path, lines):
    path.write_text("".join(text + "\n" for text in lines), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------ rows of units


CONTENTS = {
    "plain": b'{"a": 1}\n{"a": 2}\n{"a": 3}\n',
    "no last newline": b'{"a": 1}\n{"a": 2}',
    "blank lines": b'\n\n{"a": 1}\n  \n\n{"a": 2}\n\n',
    "carriage returns": b'{"a": 1}\r\n{"a": 2}\r\n\r\n{"a":\r3}\r\n',
    "byte order mark": b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n',
    "long lines": b'{"a": 1}\n'
    + b"x" * 90
    + b'\n{"a": 2}\n'
    + b"y" * 41
    + b"\n"
    + b"z" * 40
    + b'\n{"a": 3}\n'
    + b"w" * 70,
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_units_of_any_size_have_the_rows_that_reading_one_after_the_other_gives(tmp_path, monkeypatch, name, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(CONTENTS[name])
    sources = [source_of(path)]
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 40)
    expected = [told(row) for row in sources[0].row_bytes()]
    for size in (1, 2, 3, 7, 8, 9, 10, 25, 64, 1000):
        monkeypatch.setattr(units_room, "UNIT_BYTES", size)
        monkeypatch.setattr(units_room, "SKIP_BYTES", 4)
        units = WorkUnits.of(sources)
        order = range(len(units.units))
        assert [told(row) for number in order for row in rows_of(units, number)] == expected, size
        backwards = [[told(row) for row in rows_of(WorkUnits.of(sources), number)] for number in reversed(order)]
        assert [row for rows in reversed(backwards) for row in rows] == expected, size


def rows_of(units, number):
    return units.cut(units.read(number)).rows


def source_of(path):
    sound = write(path.with_name(f"sound{path.suffix}"), [line("a")])
    source = open_sources([SourceConfig(path=str(sound))], seed=0)[0]
    return replace(source, origin=LocalFiles(files=find_files(SourceConfig(path=str(path)))))


def told(row):
    return (row.raw, str(row.address)) if isinstance(row, RowBytes) else str(row)


def test_a_file_that_is_an_array_by_another_name_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", ["[" + line("a") + "]"])
    with pytest.raises(SourceError, match="JSON array"):
        prepare(config_of(tmp_path, path), SlowLetterEncoder())


def test_sources_without_lines_are_units_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(units_room, "UNIT_ROWS", 2)
    path = tmp_path / "rows.json"
    path.write_text("[" + ",\n".join(line(f"row {n}") for n in range(5)) + "]")
    other = write(tmp_path / "more.jsonl", [line("more"), "{"])
    prepared = prepare(config_of(tmp_path, path, other), SlowLetterEncoder())
    assert questions(prepared) == [*(f"row {n}yes" for n in range(5)), "moreyes"]
    assert str(prepared.train.address(3)) == f"{path}:4"
    assert str(prepared.train.address(5)) == f"{other}:1"
    assert prepared.train.source_ids.tolist() == [0] * 5 + [1]


# ------------------------------------------------------------------------------------------------- known again


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(units_room, "UNIT_BYTES", 500)


@pytest.fixture
def rows_cut(monkeypatch):
    """Lines that were looked at."""
    seen = []
    cut = WorkUnits.cut

    def noted(units, read):
        found = cut(units, read)
        seen.extend(range(found.num_lines))
        return found

    monkeypatch.setattr(WorkUnits, "cut", noted)
    return seen


def rows_for(folder, count=40, name="rows.jsonl"):
    kinds = ("!bad", "?ask", "row", "row")
    return write(folder / name, [line(f"{kinds[n % 4]} {n:04}") if n % 13 else "{broken" for n in range(count)])


def account(prepared):
    lost = prepared.quarantine.read_text() if prepared.quarantine else ""
    return questions(prepared), prepared.train.row_numbers.tolist(), prepared.train.ledger.to_json(), lost


def test_what_was_prepared_is_known_by_its_bytes_with_all_that_came_of_it(tmp_path, small_units, rows_cut):
    path = rows_for(tmp_path)
    first = account(prepare(config_of(tmp_path, path), SlowLetterEncoder()))
    assert rows_cut
    rows_cut.clear()
    encoder = SlowLetterEncoder()
    again = prepare(config_of(tmp_path, path), encoder)
    assert account(again) == first
    assert (rows_cut, encoder.asked, again.num_encoded) == ([], [], 0)
    assert again.num_reused == len(again.train)


def test_lost_rows_are_told_in_the_words_of_the_version_that_runs(tmp_path, small_units, monkeypatch):
    class Reworded(SlowLetterEncoder):
        def encode_many(self, rows):
            for found in super().encode_many(rows):
                yield RowError("odd_letter", "an exclamation mark") if isinstance(found, RowError) else found

    path = rows_for(tmp_path)
    first = prepare(config_of(tmp_path, path), SlowLetterEncoder())
    before = account(first)
    assert account(prepare(config_of(tmp_path, path), Reworded())) == before, "the same version words as it did"
    monkeypatch.setattr(units_room, "__version__", "of another Luthier")
    encoder = Reworded()
    after = prepare(config_of(tmp_path, path), encoder)
    told = after.quarantine.read_text()
    assert "odd_letter" in told and "bad_letter" not in told and "starts with" not in told
    num_odd = first.train.ledger.quarantined["bad_letter"]
    assert after.train.ledger.quarantined["odd_letter"] == num_odd and account(after)[:2] == before[:2]
    assert len(encoder.asked) == num_odd and after.num_encoded == 0, "rows that are in the store are not encoded again"
    again = Reworded()
    assert account(prepare(config_of(tmp_path, path), again)) == account(after) and again.asked == []


def test_appended_rows_cost_their_own_unit(tmp_path, small_units, rows_cut):
    path = rows_for(tmp_path, 40)
    prepare(config_of(tmp_path, path), SlowLetterEncoder())
    rows_cut.clear()
    rows_for(tmp_path, 42)
    again = prepare(config_of(tmp_path, path), SlowLetterEncoder())
    assert 0 < len(rows_cut) < 12
    assert again.num_encoded == 1  # of the two, one is an error
    assert again.train.ledger.read == 42


def test_a_file_edited_under_the_same_size_and_time_is_noticed(tmp_path, small_units):
    path = rows_for(tmp_path)
    first = prepare(config_of(tmp_path, path), SlowLetterEncoder())
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"row 0022", b"new 0022"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = prepare(config_of(tmp_path, path), SlowLetterEncoder())
    assert again.num_encoded == 1
    assert set(questions(again)) - set(questions(first)) == {"new 0022yes"}


def test_every_flipped_bit_and_every_swapped_word_makes_other_units(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", [line("a" * 40), line("b" * 40)])
    units = WorkUnits.of([source_of(path)])
    raw = path.read_bytes()
    stat = path.stat()

    def digest_of(content):
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return units.read(0).digest

    seen = {digest_of(raw)}
    for place in range(len(raw)):
        for bit in (1, 128):
            changed = bytearray(raw)
            changed[place] ^= bit
            seen.add(digest_of(bytes(changed)))
    assert len(seen) == 1 + 2 * len(raw)
    assert digest_of(raw[8:16] + raw[:8] + raw[16:]) not in seen
    assert digest_of(raw) in seen  # control


def test_another_file_with_the_same_bytes_is_known_and_has_its_own_addresses(tmp_path, small_units, rows_cut):
    prepare(config_of(tmp_path, rows_for(tmp_path)), SlowLetterEncoder())
    rows_cut.clear()
    other = rows_for(tmp_path, name="other.jsonl")
    again = prepare(config_of(tmp_path, other), SlowLetterEncoder())
    assert rows_cut == []
    assert {again.train.address(row).file for row in range(len(again.train))} == {str(other)}
    assert all(str(other) in text for texts in again.train.ledger.examples.values() for text in texts)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "another version", "lose the samples"])
def test_what_is_remembered_is_not_needed_and_not_believed_when_damaged(tmp_path, small_units, damage):
    path = rows_for(tmp_path)
    first = account(prepare(config_of(tmp_path, path), SlowLetterEncoder()))
    remembered = sorted((tmp_path / "store").glob("*/units/*"))
    assert len(remembered) > 3
    for file in remembered:
        raw = bytearray(file.read_bytes())
        match damage:
            case "flip":
                raw[len(raw) // 2] ^= 1
                file.write_bytes(raw)
            case "cut":
                file.write_bytes(raw[:-1])
            case "remove":
                file.unlink()
            case "another version":
                Disk().publish_sealed(file, msgspec.msgpack.encode([1, b"", "of another layout"]))
    if damage == "lose the samples":
        for manifest in (tmp_path / "store").glob("*/manifest.json"):
            manifest.unlink()
    encoder = SlowLetterEncoder()
    assert account(prepare(config_of(tmp_path, path), encoder)) == first
    assert bool(encoder.asked) == bool(damage)


# --------------------------------------------------------------------------------------------- several processes


def prepare_elsewhere(folder, path, name, report):
    units_room.UNIT_BYTES = 500
    encoder = SlowLetterEncoder(seconds=0.01)
    prepared = prepare(config_of(folder, path, out=name), encoder)
    report.put((name, account(prepared), len(encoder.asked)))


def test_processes_share_the_work_and_a_killed_one_is_made_good(tmp_path, small_units):
    path = rows_for(tmp_path, 400)
    alone = account(prepare(config_of(tmp_path / "alone", path), SlowLetterEncoder()))
    context = get_context("spawn")
    reports = context.Queue()
    processes = [
        context.Process(target=prepare_elsewhere, args=(tmp_path, path, name, reports)) for name in ("a", "b", "c")
    ]
    for process in processes:
        process.start()
    wait_for_results(tmp_path)
    os.kill(processes[0].pid, signal.SIGKILL)
    results = [reports.get(timeout=HANG_SECONDS) for _ in range(2)]
    for process in processes:
        process.join(timeout=HANG_SECONDS)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0]
    for _, found, _ in results:
        assert found == alone
    assert list((tmp_path / "store").glob("*/shared-work/*")) == []  # the last to leave removed all results
    asked = [count for _, _, count in results]
    assert sum(asked) <= 400 - 31 + 20  # each row once, but for what the killed one had under way
    assert min(asked) > 40


def wait_for_results(folder):
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        if len(list((folder / "store").glob("*/shared-work/*/units/[0-9]*[0-9]"))) >= 6:
            return
        time.sleep(0.01)
    raise AssertionError("no unit was done")


def test_a_file_that_gives_fewer_bytes_than_are_asked_for_is_read_on():
    class Slow(io.BytesIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:3])

    units = WorkUnits(sources=(), units=[])
    for content in (b"0123456789", b"01234"):
        assert bytes(units._fill(Slow(content), 8)) == content[:8]
