import json
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pytest

from luthier.config.inputs import SourceConfig
from luthier.errors import RowDropped, RowError
from luthier.ledger import Ledger
from luthier.preparation.resolver import ResolvedPortion, Resolver, conversion_of, read_by_number
from luthier.records import Branch, Sample
from luthier.sources.source import open_sources
from luthier.store import SampleStore
from luthier.store.format import measure_leaves, row_key, store_folder

FINGERPRINT = "ab" * 32


@dataclass
class LetterEncoder:
    """One token a letter; the answer's are targets, none where the question starts with ``-``; ``!`` is an error."""

    asked: list = field(default_factory=list)
    fingerprint: str = FINGERPRINT

    about = {}  # noqa: RUF012

    takes_media = True  # it never does: keys of folders lead to none

    def expect_many_rows(self):
        pass

    def encode_many(self, rows):
        for row in rows:
            question, answer = (message.text for message in row.messages)
            self.asked.append(question)
            if question[0] == "!":
                yield RowError("bad_letter", "starts with !", field="messages[0]", address=row.address)
                continue
            target = [False] * len(question) + [question[0] != "-"] * len(answer)
            yield Sample(
                input_ids=np.array([ord(letter) for letter in question + answer], dtype=np.int32),
                target=np.array(target),
                branches=(Branch(parent=-1, length=len(target)),),
                notes=(("asks", 1),) if question[0] == "?" else (),
                address=row.address,
            )


class ListIndex:
    """A row index in memory."""

    def __init__(self, source):
        self.rows = list(source.row_bytes())

    def __len__(self):
        return len(self.rows)

    def read(self, numbers):
        return [self.rows[number] for number in numbers.tolist()]


def line(question, answer="yes"):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


@pytest.fixture
def make_sources(tmp_path):
    def make(**lines):
        for name, rows in lines.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows), encoding="utf-8")
        sources = open_sources([SourceConfig(path=str(tmp_path / f"{name}.jsonl")) for name in lines], seed=0)
        return sources, [ListIndex(source) for source in sources]

    return make


@pytest.fixture
def folder(tmp_path):
    return store_folder(tmp_path / "store", FINGERPRINT)


def portions_of(*numbers):
    return iter([np.array(some, dtype=np.int64) for some in numbers])


def resolve(sources, indexes, portions, folder, *, encoder=None, workers=0, **how):
    resolver = Resolver(
        sources=sources, encoder=encoder or LetterEncoder(), folder=folder, split="train", eager=True, **how
    )
    return list(resolver.resolve(read_by_number(indexes, portions), workers=workers))


def texts(portion, folder):
    store = SampleStore.open(folder, fingerprint=FINGERPRINT)
    return ["".join(map(chr, store[i].input_ids)) if i >= 0 else None for i in portion.sample_ids.tolist()]


def test_rows_are_resolved_by_global_number_in_the_order_asked_for(make_sources, folder):
    sources, indexes = make_sources(one=[line("a"), line("b")], two=[line("c"), line("d")])
    first, second = resolve(sources, indexes, portions_of([3, 0], [1, 2]), folder)
    assert texts(first, folder) == ["dyes", "ayes"]
    assert texts(second, folder) == ["byes", "cyes"]
    assert first.rows.tolist() == [3, 0]
    assert first.source_ids.tolist() == [1, 0]
    assert first.row_numbers.tolist() == [2, 1]
    assert [path[-9:] for path in first.new_files] == ["two.jsonl", "one.jsonl"]
    assert second.new_files == ()
    assert second.file_ids.tolist() == [1, 0]
    assert (second.ledger.read, second.ledger.prepared) == (2, 2)


def test_what_a_portion_names_is_committed_when_it_is_yielded(make_sources, folder):
    sources, indexes = make_sources(one=[line(f"row {n}") for n in range(6)])
    seen = []
    resolver = Resolver(sources=sources, encoder=LetterEncoder(), folder=folder, split="train", eager=True)
    read = read_by_number(indexes, portions_of([4, 2], [0, 1], [3, 5]))
    with closing(resolver.resolve(read, workers=0)) as portions:
        for portion in portions:
            seen.append(texts(portion, folder))
    assert seen == [["row 4yes", "row 2yes"], ["row 0yes", "row 1yes"], ["row 3yes", "row 5yes"]]


def test_lost_rows_come_with_their_reason_address_and_bytes(make_sources, folder):
    rows = [line("a"), "{broken", line("!b"), line("-c"), line("!b"), line("d")]
    sources, indexes = make_sources(one=rows)
    encoder = LetterEncoder()
    first, second = resolve(sources, indexes, portions_of([0, 1, 2, 3], [4, 3, 5]), folder, encoder=encoder)
    assert encoder.asked == ["a", "!b", "-c", "d"]  # the second !b and -c are known to be lost
    assert [(row.place, row.error.reason) for row in first.lost][1:] == [(2, "bad_letter"), (3, "no_target")]
    assert [str(row.error.address)[-11:] for row in (*first.lost, *second.lost)] == [
        f"one.jsonl:{number}" for number in (2, 3, 4, 5, 4)
    ]
    assert second.lost[0].raw == line("!b").encode()
    assert isinstance(second.lost[1].error, RowDropped)
    assert first.sample_ids.tolist()[1:] == [-1, -1, -1]
    for portion in (first, second):
        portion.ledger.check(max_drop=10)
    assert (first.ledger.read, first.ledger.lost, second.ledger.read, second.ledger.lost) == (4, 3, 3, 2)


def test_a_row_that_could_not_be_read_has_no_key(make_sources, folder):
    sources, indexes = make_sources(one=[line("a"), line("b")])
    indexes[0].rows[1] = RowError("row_too_long", "much", address=indexes[0].rows[1].address)
    (portion,) = resolve(sources, indexes, portions_of([0, 1]), folder)
    assert not portion.keys[1].any()
    assert portion.lost[0].raw is None
    expected = row_key(line("a").encode(), fingerprint=FINGERPRINT, conversion=conversion_of(sources[0]))
    assert portion.keys[0].tobytes() == expected


def test_notes_are_counted_for_new_and_for_known_rows(make_sources, folder):
    sources, indexes = make_sources(one=[line("?a"), line("b"), line("?a")])
    (fresh,) = resolve(sources, indexes, portions_of([0, 1, 2]), folder)
    (known,) = resolve(sources, indexes, portions_of([0, 1, 2]), folder)
    assert fresh.ledger.notes == known.ledger.notes == {"asks": 2}


def test_a_row_under_way_in_one_portion_is_not_encoded_for_the_next(make_sources, folder):
    sources, indexes = make_sources(one=[line("a"), line("a"), line("b")])
    for workers in (0, 2):
        portions = resolve(
            sources, indexes, portions_of([0, 1], [1, 0], [2, 1]), folder / str(workers), workers=workers
        )
        store = SampleStore.open(folder / str(workers), fingerprint=FINGERPRINT)
        assert len(store) == 2
        assert len({int(i) for portion in portions for i in portion.sample_ids}) == 2


def test_a_second_pass_encodes_nothing_and_gives_the_same_numbers(make_sources, folder):
    sources, indexes = make_sources(one=[line(f"row {n}") for n in range(20)])
    first = resolve(sources, indexes, portions_of(np.arange(10), np.arange(10, 20)), folder)
    encoder = LetterEncoder()
    second = resolve(sources, indexes, portions_of(np.arange(20)[::-1]), folder, encoder=encoder)
    assert encoder.asked == []
    assert second[0].sample_ids[::-1].tolist() == [i for portion in first for i in portion.sample_ids.tolist()]


def test_portions_do_not_depend_on_the_number_of_workers(make_sources, folder):
    rows = ["{" if n % 13 == 5 else line(("!" if n % 11 == 3 else "r") + str(n % 50)) for n in range(90)]
    sources, indexes = make_sources(one=rows[:40], two=rows[40:])
    order = np.random.default_rng(1).permutation(90)
    results = []
    for workers in (0, 2):
        reports = []
        portions = resolve(
            sources, indexes, iter(np.array_split(order, 7)), folder / str(workers), workers=workers,
            on_progress=reports.append,
        )  # fmt: skip
        results.append(([portion.to_bytes() for portion in portions], reports))
        assert reports[-1].read == 90 == reports[-1].encoded + reports[-1].reused + reports[-1].lost
    assert results[0] == results[1]


def test_a_portion_survives_the_way_to_another_process(make_sources, folder):
    sources, indexes = make_sources(one=[line("?a"), line("!b"), line("-c"), "{"])
    (portion,) = resolve(sources, indexes, portions_of([0, 1, 2, 3]), folder)
    back = ResolvedPortion.from_bytes(portion.to_bytes())
    for name in ("rows", "sample_ids", "keys", "source_ids", "file_ids", "row_numbers"):
        assert np.array_equal(getattr(back, name), getattr(portion, name)), name
    assert back.new_files == portion.new_files
    assert back.ledger.to_json() == portion.ledger.to_json()
    assert [(str(row.error), type(row.error), row.place, row.raw) for row in back.lost] == [
        (str(row.error), type(row.error), row.place, row.raw) for row in portion.lost
    ]
    assert isinstance(back.ledger, Ledger)


def test_a_row_number_that_no_source_has_is_a_fault(make_sources, folder):
    sources, indexes = make_sources(one=[line("a")])
    with pytest.raises(AssertionError, match="row 1 of 1"):
        resolve(sources, indexes, portions_of([1]), folder)


def test_leaves_are_measured_as_their_segments_would_be():
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(300):
        lengths = rng.integers(rng.integers(2), 5, size=rng.integers(1, 7))
        parents = [-1, *(int(rng.integers(-1, number)) for number in range(1, len(lengths)))]
        target = rng.random(int(lengths.sum())) < 0.6
        tree = Sample(
            input_ids=np.arange(len(target), dtype=np.int32),
            target=target,
            branches=tuple(Branch(parent=p, length=int(n)) for p, n in zip(parents, lengths, strict=True)),
        )
        expected = [(len(one), int(one.target[1:].sum())) for one in tree.segments()]
        assert list(zip(*measure_leaves(tree), strict=True)) == expected
        seen.add(len(expected))
    assert len(seen) > 3
