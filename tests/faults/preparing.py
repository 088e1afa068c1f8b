"""Preparing that is killed, or whose disk fails: what is in the store, the ledger and the account of lost rows."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from luthier import store as store_room
from luthier.config.inputs import DataConfig, ModelConfig
from luthier.config.schema import OutputConfig, RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import StoreError
from luthier.preparation import work_units as units_room
from luthier.preparation.prepare import prepare
from luthier.presets import dataset_rows
from luthier.store import SampleStore
from luthier.store.care import verify_store
from luthier.store.disk import Disk
from luthier.store.format import store_folder
from tests.faults.killing import FailsOnce, Findings, Kills, before_each, die_at, has_done, tell_progress

MOST = 60  # operations of the disk between two kills: all of it takes 350, and the first commit is the 26th
SECONDS_MORE = 0.01  # to be in the middle of something
BROKEN_EVERY = 29  # so many rows apart, one that is no JSON and one that answers nothing


@dataclass(frozen=True)
class Account:
    """All that a preparation leaves: a digest of each row's sample, where each row is, the ledger, the lost rows."""

    rows: tuple[tuple[str, str], ...]  # address, digest of ids, targets, weights, branches, notes
    ledger: str
    quarantine: str


@dataclass(frozen=True)
class Preparing:
    """Rows and an encoder, and a folder for each attempt to prepare them."""

    root: Path
    path: Path
    encoder: Encoder

    @classmethod
    def of(cls, root: Path, num_rows: int) -> Preparing:
        """Write rows of the embedded data set, with bad ones among them; commits and units are tiny from here on."""
        store_room.SHARD_BYTES, units_room.UNIT_BYTES = 3_000, 8_000
        path = write_rows(root / "rows.jsonl", num_rows, broken=True)
        rows = cls(root, path, Encoder.from_config(_config(path, root / "warm")))
        rows.account("warm")  # what an encoder learns about its template is learned before anybody forks
        return rows

    def config(self, name: str, out: str = "out") -> RunConfig:
        """A preparation into the folder of this name."""
        return _config(self.path, self.root / name, out)

    def store(self, name: str) -> Path:
        """Its store."""
        return store_folder(self.root / name / "store", self.encoder.fingerprint)

    def prepare(self, name: str, out: str = "out") -> None:
        """Do it."""
        prepare(self.config(name, out), self.encoder)

    def prepare_and_tell(self, name: str, out: str) -> None:
        """Do it, and say how many operations of the disk it has done."""
        count = itertools.count(1)
        with before_each(Disk, lambda *_: tell_progress(self.progress(name, out), next(count))):
            self.prepare(name, out)

    def progress(self, name: str, out: str) -> Path:
        """Where `prepare_and_tell` says it."""
        return self.root / f"{name}-{out}.progress"

    def account(self, name: str, out: str = "out") -> Account:
        """Do it, or what is left of it, and look at everything."""
        prepared = prepare(self.config(name, out), self.encoder)
        rows = prepared.train
        found = []
        for number in range(len(rows)):
            sample = rows[number]
            digest = hashlib.sha256(sample.input_ids.tobytes() + sample.target.tobytes())
            digest.update(b"" if sample.weight is None else sample.weight.tobytes())
            digest.update(repr((sample.branches, sample.notes)).encode())
            found.append((str(rows.address(number)), digest.hexdigest()))
        lost = "" if prepared.quarantine is None else prepared.quarantine.read_text()
        return Account(tuple(found), json.dumps(rows.ledger.to_json(), sort_keys=True), lost)


def write_rows(path: Path, num_rows: int, *, broken: bool) -> Path:
    """Rows of the embedded data set; ``broken``: with bad ones among them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(itertools.islice(dataset_rows("skills", "train"), num_rows)):
            if broken and number % BROKEN_EVERY == BROKEN_EVERY - 1:
                file.write('{"messages": []}\n' if number % 2 else "{broken\n")
            file.write(json.dumps(row) + "\n")
    return path


def compare(findings: Findings, found: Account, expected: Account) -> None:
    """Count what is not as it was without interruption."""
    findings.compare_rows([address for address, _ in found.rows], [address for address, _ in expected.rows])
    there = dict(expected.rows)
    findings.differing += sum(there.get(address) not in (None, digest) for address, digest in found.rows)
    findings.differing += found.ledger != expected.ledger
    findings.differing += found.quarantine != expected.quarantine
    findings.differing += [row for row, _ in found.rows] != [row for row, _ in expected.rows]


def look_at_store(findings: Findings, rows: Preparing, name: str, expected: set[bytes]) -> None:
    """Every byte of the store is sound, and it has each row that is kept, none twice, nothing else."""
    assert not verify_store(rows.store(name)).damaged
    store = SampleStore.open(rows.store(name), fingerprint=rows.encoder.fingerprint)
    found = [key.tobytes() for key in store.keys]
    findings.lost += len(expected - set(found))
    findings.differing += len(set(found) - expected)
    findings.facts["copies"] += len(found) - len(set(found))


def keys_in(rows: Preparing, name: str) -> set[bytes]:
    """The keys of a store."""
    store = SampleStore.open(rows.store(name), fingerprint=rows.encoder.fingerprint)
    return {key.tobytes() for key in store.keys}


def kill_at_random(root: Path, points: int, seed: int, *, processes: int, num_rows: int = 250) -> Findings:
    """Kill one of so many processes at a random time, start it again, until all is done; over and over."""
    rows = Preparing.of(root, num_rows)
    findings = Findings(kind=f"preparing, {processes} process{'es' * (processes > 1)}")
    expected = rows.account("whole")
    keys = keys_in(rows, "whole")
    with Kills(seed) as kills:
        while findings.points < points:
            name = f"attempt-{findings.facts['attempts']}"
            findings.facts["attempts"] += 1
            assert findings.facts["attempts"] < 10 * points, "processes end before they can be killed"
            _kill_until_done(kills, rows, name, findings, processes=processes)
            compare(findings, rows.account(name), expected)
            look_at_store(findings, rows, name, keys)
    return findings


def _kill_until_done(kills: Kills, rows: Preparing, name: str, findings: Findings, *, processes: int) -> None:
    def start(out: str) -> int:
        return kills.start(lambda: rows.prepare_and_tell(name, out), rows.root / f"{name}-errors")

    running = {place: start(f"out-{place}") for place in range(processes)}
    for _ in range(8 * processes):  # then it may finish
        place = kills.rng.randrange(processes)
        once = has_done(rows.progress(name, f"out-{place}"), running[place], num_steps=1 + kills.rng.randrange(MOST))
        if not kills.kill_after(running[place], kills.rng.random() * SECONDS_MORE, once=once):
            break  # it has ended, so all is done
        findings.points += 1
        store = SampleStore.open(rows.store(name), fingerprint=rows.encoder.fingerprint)
        findings.facts["with something committed"] += len(store) > 0
        store.verify()
        running[place] = start(f"out-{place}")
    for pid in running.values():
        kills.wait(pid)


def kill_at_every_operation(root: Path, points: int, seed: int, *, num_rows: int = 40) -> Findings:
    """Kill at the k-th operation of the disk, for all k (``points`` at least), then go on."""
    del seed  # all of them are tried
    rows = Preparing.of(root, num_rows)
    findings = Findings(kind="preparing, at each disk operation")
    expected = rows.account("whole")
    keys = keys_in(rows, "whole")
    with Kills(0) as kills:
        for k in range(10_000):
            name = f"attempt-{k}"

            def dying(k: int = k, name: str = name) -> None:
                with before_each(Disk, die_at(k)):
                    rows.prepare(name)

            if kills.wait(kills.start(dying, rows.root / f"{name}-errors")) == 0:
                break
            findings.points += 1
            compare(findings, rows.account(name), expected)
            look_at_store(findings, rows, name, keys)
    assert findings.points >= min(points, 50), f"only {findings.points} operations"
    return findings


def fail_every_operation(root: Path, points: int, seed: int, *, num_rows: int = 40) -> Findings:
    """The k-th operation of the disk fails, for all k: full, then broken. One error; what was there is; then go on."""
    del seed, points  # all of them are tried
    rows = Preparing.of(root, num_rows)
    findings = Findings(kind="preparing, each disk operation fails")
    expected = rows.account("whole")
    for code in (errno.ENOSPC, errno.EIO):
        for k in range(10_000):
            name = f"attempt-{code}-{k}"
            failing = FailsOnce(k, code)
            with before_each(Disk, failing):
                told = _told(lambda name=name: rows.prepare(name))
            if not failing.has_failed:
                break
            findings.points += 1
            findings.facts["told"] += told is not None
            if told is not None:
                assert str(rows.root / name) in told, told
            compare(findings, rows.account(name), expected)
            assert not verify_store(rows.store(name)).damaged
    return findings


def _told(do: Callable[[], None]) -> str | None:
    try:
        do()
    except StoreError as error:
        assert error.__cause__ is not None and error.hint, error
        return error.message
    return None


def _config(path: Path, folder: Path, out: str = "out") -> RunConfig:
    return RunConfig(
        model=ModelConfig(name_or_path="preset:tiny-qwen3"),
        data=DataConfig(train=[{"path": str(path)}], store=folder / "store", workers=0, max_drop=1000.0),
        output=OutputConfig(dir=folder / out),
    )
