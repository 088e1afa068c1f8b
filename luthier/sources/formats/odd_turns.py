"""Turns that a conversation may have and that rarely were meant: an assistant's first, two of one role, blank answers.

What becomes of them is counted in the row's notes, and nothing else of a conversation is changed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import or_

from luthier.config.choices import SameRole
from luthier.errors import RowError
from luthier.records import BLANK_ANSWER, Message, Text, Thinking, ToolCall

Notes = tuple[tuple[str, int], ...]

_SPEAKERS = ("user", "assistant")  # results of several calls follow each other rightly
_BETWEEN = "\n\n"
_FIRST = "the assistant speaks first"
_SEPARATE = "two {role} messages in a row"
_MERGED = "{role} messages in a row, merged"


def settle_turns(messages: Sequence[Message], policy: SameRole) -> tuple[Sequence[Message], Notes]:
    """The messages as they are trained, and what is worth counting.

    A blank answer (no text but white space, no thought, no call) is context, unless the row says that it is learned.
    Raises `RowError` (``same_role``) where ``policy`` does not take two messages of one role in a row.
    """
    messages, found = _settle_pairs(messages, policy, "messages")
    notes = list(found)
    if _begins_with_the_assistant(messages):
        notes.append((_FIRST, 1))
    num_blank = sum(message.is_blank_answer for message in messages)
    if num_blank:
        messages = [replace(one, train=False) if one.is_blank_answer else one for one in messages]
        notes.append((BLANK_ANSWER, num_blank))
    return messages, tuple(notes)


def settle_compared(
    prompt: tuple[str, Sequence[Message]], answers: Sequence[tuple[str, Sequence[Message]]], policy: SameRole
) -> tuple[Sequence[Message], list[Sequence[Message]], Notes]:
    """Prompt and answers as they are compared, and what is worth counting. Both come with their columns' names.

    The seam between them stays where it is: what the prompt holds is given, so an assistant's message at its end and
    the answer are not merged. Raises `RowError` (``same_role``) as `settle_turns` does.
    """
    column, given = prompt
    asked, notes = _settle_pairs(given, policy, column)
    settled: list[Sequence[Message]] = []
    found = [Counter(dict(notes))]
    for name, answer in answers:
        side, own = _settle_pairs(answer, policy, name)
        settled.append(side)
        found.append(found[0] + Counter(dict(own)))
        if asked[-1].role == answer[0].role:
            _check_seam(policy, name)
            found[-1][_SEPARATE.format(role=answer[0].role)] += 1
    most = reduce(or_, found)  # of two answers the one with more: a row is counted once
    return asked, settled, tuple(most.items())


def _check_seam(policy: SameRole, name: str) -> None:
    if policy is not SameRole.KEEP:
        detail = f"two assistant messages in a row, the prompt's last and this, and data.same_role is {policy.value}"
        raise RowError("same_role", detail, field=name)


def _begins_with_the_assistant(messages: Sequence[Message]) -> bool:
    """What the run makes of it is for the template to say: it is learned where some prompt leads to it."""
    return next((message.role for message in messages if message.role != "system"), "") == "assistant"


def _settle_pairs(messages: Sequence[Message], policy: SameRole, name: str) -> tuple[Sequence[Message], Notes]:
    """The messages of the column ``name`` with two of one role in a row as ``policy`` says, counted."""
    roles = [message.role for message in messages]
    if not any(role == after and role in _SPEAKERS for role, after in pairwise(roles)):
        return messages, ()
    settled: list[Message] = []
    counts: dict[str, int] = {}
    for index, message in enumerate(messages):
        if not settled or message.role not in _SPEAKERS or settled[-1].role != message.role:
            settled.append(message)
            continue
        match policy:
            case SameRole.KEEP:
                settled.append(message)
                what = _SEPARATE
            case SameRole.MERGE:
                settled[-1] = _merged(settled[-1], message, f"{name}[{index}]")
                what = _MERGED
            case SameRole.QUARANTINE:
                detail = f"two {message.role} messages in a row, and data.same_role is {policy.value}"
                raise RowError("same_role", detail, field=f"{name}[{index}]")
            case _:
                raise AssertionError(f"unknown policy {policy!r}")
        note = what.format(role=message.role)
        counts[note] = counts.get(note, 0) + 1
    return settled, tuple(counts.items())


def _merged(first: Message, second: Message, field: str) -> Message:
    """Both as one message. Raises `RowError` where one message cannot say what two did."""
    if (first.train, first.weight, first.name) != (second.train, second.weight, second.name):
        raise _cannot_merge(first.role, field, "they say different things of their loss, or of their names")
    if any(isinstance(part, Thinking) for part in second.parts):
        raise _cannot_merge(first.role, field, "the second one thinks, and thinking comes before the text")
    if any(isinstance(part, ToolCall) for part in first.parts) and any(isinstance(part, Text) for part in second.parts):
        raise _cannot_merge(first.role, field, "the first one calls a tool, and calls come after the text")
    return replace(first, parts=(*first.parts, *second.parts) if _is_apart(first, second) else _joined(first, second))


def _is_apart(first: Message, second: Message) -> bool:
    """Whether nothing stands between them: one of them says nothing, or what meets is no text."""
    return not first.text or not second.text or isinstance(second.parts[0], ToolCall)


def _joined(first: Message, second: Message) -> tuple[Text | Thinking | ToolCall, ...]:
    """A text that ends one message and a text that begins the next become one text, if they count alike."""
    *head, last = first.parts
    begin, *tail = second.parts
    if isinstance(last, Text) and isinstance(begin, Text) and replace(last, text="") == replace(begin, text=""):
        return (*head, replace(last, text=f"{last.text}{_BETWEEN}{begin.text}"), *tail)  # type: ignore[arg-type]
    return (*first.parts, Text(text=_BETWEEN), *second.parts)  # type: ignore[arg-type]


def _cannot_merge(role: str, field: str, why: str) -> RowError:
    detail = f"two {role} messages in a row cannot be merged (data.same_role: merge): {why}"
    return RowError("same_role", detail, field=field)
