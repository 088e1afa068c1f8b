"""Views agree with the segments they show, however they were made."""

from __future__ import annotations

import numpy as np
import pytest

from luthier.check.show.view import RowView, show_batch, show_pack, show_sample
from luthier.records import Address, Branch, Pack, Sample, Segment


class Characters:
    """A token per character, 1 is a control token."""

    def decode(self, ids) -> str:
        return "".join("<|end|>" if i == 1 else chr(i) for i in map(int, ids))

    def token(self, token_id: int) -> str:
        return self.decode([token_id])


def segment(context: str, answer: str, *, row: int = 1, weight: float | None = None) -> Segment:
    ids = [*map(ord, context), *map(ord, answer), 1]
    target = [False] * len(context) + [True] * (len(answer) + 1)
    return Segment(
        input_ids=np.array(ids, dtype=np.int32),
        target=np.array(target),
        weight=None if weight is None else np.full(len(ids), weight, dtype=np.float32),
        address=Address(file="rows.jsonl", row=row),
    )


def view_of(*segments: Segment) -> RowView:
    return show_pack(Pack(segments=segments), Characters(), title="pack 1", control=frozenset([1]))


def test_label_is_the_next_token_where_that_is_a_target_and_never_crosses_a_segment() -> None:
    view = view_of(segment("qq", "a"), segment("q", "b", row=2))
    assert [token.label for token in view.tokens] == [None, ord("a"), 1, None, ord("b"), 1, None]
    assert [token.target for token in view.tokens] == [False, False, True, True, False, True, True]
    assert [token.position for token in view.tokens] == [0, 1, 2, 3, 0, 1, 2]
    assert [token.segment for token in view.tokens] == [0, 0, 0, 0, 1, 1, 1]
    assert [(s.address, s.num_tokens, s.num_targets) for s in view.segments] == [
        ("rows.jsonl:1", 4, 2),
        ("rows.jsonl:2", 3, 2),
    ]


def test_weights_belong_to_the_token_that_is_learned() -> None:
    view = view_of(segment("q", "ab", weight=0.5))
    assert [token.weight for token in view.tokens if token.target] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("packed", [True, False])
def test_a_collated_batch_shows_the_same_tokens_as_its_packs(packed: bool) -> None:
    collate = pytest.importorskip("luthier.collation.collator").collate_packs
    rows = [[segment("qq", "abc", weight=2.0), segment("q", "b", row=2)], [segment("q", "a", row=3)]]
    if not packed:
        rows = [[one] for row in rows for one in row]
    packs = [Pack(segments=tuple(row)) for row in rows]
    batch = collate(packs, packed=packed, pad_token_id=0)
    shown = show_batch(batch, Characters(), title="batch 1", control=frozenset([1]))
    for pack, row in zip(packs, shown, strict=True):
        expected = show_pack(pack, Characters(), title="", control=frozenset([1]))
        assert row.tokens == expected.tokens
        assert row.segments == expected.segments
        assert row.num_padding == max(len(one) for one in packs) - len(pack)
    assert sum(row.num_targets for row in shown) == batch.num_targets


def test_each_run_of_a_sample_is_shown_with_its_own_context() -> None:
    sample = Sample(
        input_ids=np.array([*map(ord, "qab")], dtype=np.int32),
        target=np.array([False, True, True]),
        branches=(Branch(parent=-1, length=1), Branch(parent=0, length=1), Branch(parent=0, length=1)),
        address=Address(file="rows.jsonl", row=7),
    )
    views = show_sample(sample, Characters())
    assert ["".join(token.text for token in view.tokens) for view in views] == ["qa", "qb"]
    assert views[1].title == "rows.jsonl:7, run 2 of 2"
