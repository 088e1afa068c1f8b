"""What can be said of a sample without rendering anything: its tree, its ids, its weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from luthier.check.verify_records import Check, Token, Violation
from luthier.check.verify_tokens import ReferenceTokenizer
from luthier.records import Sample


def tree_faults(sample: Sample) -> Iterator[Violation]:
    """Whether the token tree is well-formed; where it is not, nothing else can be asked of the sample."""
    address, num_tokens = str(sample.address), len(sample.input_ids)
    lengths = [branch.length for branch in sample.branches]
    arrays = {"target": sample.target, "weight": sample.weight}
    for name, array in arrays.items():
        if array is not None and len(array) != num_tokens:
            yield _fault(Check.BRANCHES, address, f"{num_tokens} tokens, but {name} has {len(array)} entries")
    if sum(lengths) != num_tokens or min(lengths, default=0) < 1:
        yield _fault(Check.BRANCHES, address, f"{num_tokens} tokens, but the branches have {lengths}")
    for number, branch in enumerate(sample.branches):
        if not -1 <= branch.parent < number:
            yield _fault(
                Check.BRANCHES, address, f"branch {number} continues branch {branch.parent}, not an earlier one"
            )
    yield from _media_faults(sample)


def token_faults(sample: Sample, tokenizer: ReferenceTokenizer) -> Iterator[Violation]:
    """Ids that name no token, weights that are no weights, nothing to learn."""
    address = str(sample.address)
    nameless = [i for i in np.unique(sample.input_ids).tolist() if not tokenizer.knows(i)]
    if nameless:
        unknown = np.flatnonzero(np.isin(sample.input_ids, nameless)).tolist()
        first = unknown[0]
        found = Token(id=int(sample.input_ids[first]), text="")
        what = f"id {found.id} names no token of the vocabulary of {len(tokenizer)} ({len(unknown)} such ids)"
        yield Violation(check=Check.IDS_IN_VOCABULARY, address=address, what=what, index=first, found=found)
    if not sample.target.any():
        yield _fault(Check.HAS_TARGETS, address, "the row is kept, and nothing of it is learned")
    if sample.weight is not None:
        learned = sample.weight[sample.target]
        bad = learned[~(np.isfinite(learned) & (learned > 0))]
        if len(bad):
            what = f"{len(bad)} of {len(learned)} targets weigh nothing or no number; the first {bad[0]:g}"
            yield _fault(Check.FINITE_WEIGHTS, address, what)


def begin_faults(sample: Sample, opening: bool, tokenizer: ReferenceTokenizer) -> Iterator[Violation]:
    """Whether each run begins with one begin token, if ``opening``, else with none; never with two."""
    bos, address = tokenizer.bos_id, str(sample.address)
    assert bos is not None, "asked only of tokenizers that name a begin token"
    for number, segment in enumerate(sample.segments()):
        ids = segment.input_ids
        count = int((ids != bos).argmax()) if (ids != bos).any() else len(ids)
        if count != int(opening):
            found = Token(id=int(ids[0]), text=tokenizer.decode(ids[:1]))
            what = f"the sequence begins with {count} begin tokens, inference with {int(opening)}"
            yield Violation(
                check=Check.SINGLE_BOS, address=address, what=what, run=number, index=max(count - 1, 0),
                expected=Token(id=bos, text=tokenizer.decode([bos])) if opening else None, found=found,
            )  # fmt: skip


def same_sample(first: Sample, second: Sample) -> str | None:
    """None if two samples are equal, else in what they differ."""
    if first.branches != second.branches:
        return f"branches {len(first.branches)} and {len(second.branches)}, or of other lengths"
    for name in ("input_ids", "target"):
        one, other = (first.input_ids, second.input_ids) if name == "input_ids" else (first.target, second.target)
        if not np.array_equal(one, other):
            place = int((one != other).argmax()) if len(one) == len(other) else min(len(one), len(other))
            return f"{name} differ from token {place} on"
    if first.media != second.media:
        return f"media items {len(first.media)} and {len(second.media)}, or others, or elsewhere"
    if first.verdict != second.verdict:
        return f"verdicts {first.verdict} and {second.verdict}"
    return None if np.array_equal(_weights(first), _weights(second)) else "weights differ"


def _media_faults(sample: Sample) -> Iterator[Violation]:
    """Whether each item has tokens of its own, all of them in one branch, in the order of the tokens."""
    ends = np.cumsum([branch.length for branch in sample.branches]).tolist()
    taken = 0
    for number, item in enumerate(sample.media):
        stop = item.start + item.length
        where = f"media item {number} stands at tokens {item.start} to {stop - 1}"
        if item.length < 1 or item.start < 0 or stop > len(sample.input_ids):
            yield _fault(Check.MEDIA_PLACES, str(sample.address), f"{where} of {len(sample.input_ids)}")
        elif item.start < taken:
            yield _fault(Check.MEDIA_PLACES, str(sample.address), f"{where}, and the one before it to {taken - 1}")
        elif any(item.start < end < stop for end in ends):
            yield _fault(Check.MEDIA_PLACES, str(sample.address), f"{where}, on two branches")
        taken = max(taken, stop)


def _weights(sample: Sample) -> NDArray[np.float32]:
    return np.ones(len(sample.input_ids), dtype=np.float32) if sample.weight is None else sample.weight


def _fault(check: Check, address: str, what: str) -> Violation:
    return Violation(check=check, address=address, what=what)
