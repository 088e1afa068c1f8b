"""Rows that are compared, verified as what each continuation is at inference: an answer to the whole prompt.

Each continuation and its leaf of the sample are verified as a conversation of which only that answer is learned. What
the prompt holds of the assistant's words is given, so nothing of it may be a target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from luthier.check.verify_policy import RunPolicy, as_rendered
from luthier.check.verify_records import Check, Violation
from luthier.check.verify_rules import ruled_conversation
from luthier.check.verify_template import PlainTemplate
from luthier.records import (
    Branch,
    Conversation,
    Feedback,
    Message,
    Preference,
    Sample,
    Segment,
    Text,
    Thinking,
    ToolCall,
)

ComparedRow = Preference | Feedback


def answers_of(row: ComparedRow) -> tuple[tuple[Message, ...], ...]:
    """The continuations, in the order of the leaves that they should be."""
    return (row.chosen, row.rejected) if isinstance(row, Preference) else (row.completion,)


def as_conversation(
    row: ComparedRow, answer: tuple[Message, ...], template: PlainTemplate, policy: RunPolicy
) -> Conversation:
    """The prompt with one continuation, the run's system message and rules applied, and the prompt taken out."""
    whole = Conversation(
        messages=(*row.prompt, *answer), tools=row.tools, address=row.address, rules=row.rules, weight=row.weight
    )
    added = as_rendered(whole, template, policy).messages[: -len(whole.messages)]
    ruled = ruled_conversation(replace(whole, messages=(*added, *whole.messages)), policy.rules)
    first = len(ruled.messages) - len(answer)
    messages = tuple(
        message if index >= first and message.role == "assistant" else _given(message)
        for index, message in enumerate(ruled.messages)
    )
    return replace(ruled, messages=messages, rules=(), train_on="assistant")


def as_sample(leaf: Segment) -> Sample:
    """A leaf's run as a sample of its own."""
    return Sample(
        input_ids=leaf.input_ids,
        target=leaf.target,
        weight=leaf.weight,
        media=leaf.media,
        branches=(Branch(parent=-1, length=len(leaf)),),
        address=leaf.address,
    )


def comparison_faults(row: ComparedRow, sample: Sample) -> Iterator[Violation]:
    """Whether the sample is a prompt with as many continuations as the row has, and keeps the row's verdict."""
    address, wanted = str(row.address), len(answers_of(row))
    parents = [branch.parent for branch in sample.branches]
    if parents != [-1] + [0] * wanted:
        what = f"a prompt with {wanted} continuations has branches with parents {[-1] + [0] * wanted}, this {parents}"
        yield Violation(check=Check.BRANCHES, address=address, what=what)
        return
    prompt = sample.branches[0].length
    if sample.target[:prompt].any():
        what = f"{int(sample.target[:prompt].sum())} tokens of the prompt that all continuations share are learned"
        yield Violation(check=Check.NOTHING_SUPPLIED_TRAINED, address=address, what=what)
    runs = [segment.input_ids for segment in sample.segments()]
    if len(runs) == 2 and np.array_equal(runs[0], runs[1]):
        yield Violation(check=Check.BRANCHES, address=address, what="both continuations are the same tokens")
    said = float(row.desirable) if isinstance(row, Feedback) else row.margin or 0.0
    if sample.verdict is None or not np.isclose(sample.verdict, said):
        what = f"the row says {said:g} (margin, or 1 for desirable), the sample {sample.verdict}"
        yield Violation(check=Check.VERDICT, address=address, what=what)


def _given(message: Message) -> Message:
    parts = tuple(replace(p, train=None) if isinstance(p, Text | Thinking | ToolCall) else p for p in message.parts)
    return replace(message, train=False, parts=parts)
