"""Rows of token ids: what can be checked of them, and what cannot.

There is no text and no conversation to render, so nobody can tell whether inference would print the same prompt, nor
whether a control token in it was the template's or a user's. What is left: the ids and targets are the row's own and
in the vocabulary, and what is learned reads as something and ends in a stop token. The last two are counted, not
judged: a row may well go on after its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from luthier.check.verify.findings import Check, Method, RowVerdict, Violation
from luthier.check.verify.reference_tokenizer import ReferenceTokenizer, first_difference, token_faults, tree_faults
from luthier.records import Sample, Tokenized

NOT_PROVEN = (
    "rows of token ids: that inference shows the model the same prompts (promise 1), and that no text of a user became "
    "a control token (promise 3), is not proven of them, as nothing says which messages they were made of"
)
CHARACTERS_SHOWN = 60
APPLIED = frozenset(
    [Check.HAS_TARGETS, Check.FINITE_WEIGHTS, Check.IDS_IN_VOCABULARY, Check.BRANCHES, Check.COMPLETION_TOKENS]
)


def verify_given(row: Tokenized, sample: Sample, tokenizer: ReferenceTokenizer) -> RowVerdict:
    """What can be said of a row of ids and its sample."""
    faults = list(tree_faults(sample))
    if not faults:
        faults += [*token_faults(sample, tokenizer), *_differences(row, sample)]
    known = not any(fault.check in (Check.BRANCHES, Check.IDS_IN_VOCABULARY) for fault in faults)
    return RowVerdict(
        method=Method.GIVEN,
        applied=APPLIED,
        violations=tuple(faults),
        num_turns=len(_learned_runs(sample)) if known else 0,
        num_targets=int(sample.target.sum()),
        longest_run=len(sample.input_ids),
        notes=_counts(sample, tokenizer) if known else Counter(),
    )


def learned_text(sample: Sample, tokenizer: ReferenceTokenizer) -> str:
    """The first thing that a row teaches, as text, shortened: ``'Paris.<|im_end|>'``."""
    start, stop = _learned_runs(sample)[0]
    text = tokenizer.decode(sample.input_ids[start:stop])
    return repr(text if len(text) <= CHARACTERS_SHOWN else text[: CHARACTERS_SHOWN - 2] + " …")


def _differences(row: Tokenized, sample: Sample) -> Iterator[Violation]:
    address = str(row.address)
    if len(sample.branches) != 1:
        what = f"a row of ids is one sequence, and its sample has {len(sample.branches)} branches"
        yield Violation(check=Check.BRANCHES, address=address, what=what)
        return
    for name, said, found in (
        ("input_ids", row.input_ids, sample.input_ids),
        ("target", row.target.astype(np.int32), sample.target.astype(np.int32)),
    ):
        if not np.array_equal(said, found):
            place = first_difference(said.astype(np.int32), found)
            what = f"the sample's {name} are not the row's: {len(found)} and {len(said)} of them, token {place} differs"
            yield Violation(check=Check.COMPLETION_TOKENS, address=address, what=what, run=0, index=place)
    weight = 1.0 if sample.weight is None else sample.weight[sample.target]
    if not np.allclose(weight, row.weight):
        what = f"the row weighs {row.weight:g}, and its targets something else"
        yield Violation(check=Check.FINITE_WEIGHTS, address=address, what=what)


def _counts(sample: Sample, tokenizer: ReferenceTokenizer) -> Counter[str]:
    ids = sample.input_ids
    runs = _learned_runs(sample)
    open_runs = sum(int(ids[stop - 1]) not in tokenizer.stop_ids for _, stop in runs)
    control = np.isin(ids, list(tokenizer.control_ids.values()))
    (again,) = tokenizer.encode([tokenizer.decode(ids)])
    return +Counter(
        given_runs=len(runs),
        given_open_runs=open_runs,
        given_control=int(control.sum()),
        given_otherwise=int(not np.array_equal(again, ids)),
    )


def _learned_runs(sample: Sample) -> list[tuple[int, int]]:
    """Where runs of targets begin and end: ``[., T, T, ., T] -> [(1, 3), (4, 5)]``."""
    edges = np.flatnonzero(np.diff(sample.target, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
