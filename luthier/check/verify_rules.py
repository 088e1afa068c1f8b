"""Rules on what is learned (``template.targets``), applied once more, character by character.

Of every character the last rule that holds there decides, ``train`` and ``weight`` each on their own. A rule without
``part`` and ``pattern`` speaks of whole messages. What a row says itself is final, except that ``train: true`` on a
message leaves the choice of parts to rules. Weights multiply. docs/targets.md has the whole story.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from luthier.records import Conversation, Document, Message, Part, TargetRule, Text, Thinking, ToolCall


def ruled_conversation(row: Conversation, rules: Sequence[TargetRule]) -> Conversation:
    """The conversation with flags on its parts as ``rules``, then the row's own rules, say."""
    rules = (*rules, *row.rules)
    roles = [message.role for message in row.messages]
    messages = []
    for index, message in enumerate(row.messages):
        places = {"first": roles.index(message.role) == index, "last": message.role not in roles[index + 1 :]}
        here = [
            rule for rule in rules if rule.role in (None, message.role) and (rule.turn is None or places[rule.turn])
        ]
        messages.append(_message(message, here))
    return replace(row, messages=tuple(messages), rules=())


def ruled_document(row: Document, rules: Sequence[TargetRule]) -> Document:
    """The same for a document, which has no roles, turns and parts: rules that ask for one do not hold."""
    here = [rule for rule in (*rules, *row.rules) if rule.role is rule.turn is rule.part is None]
    weights = [rule.weight for rule in here if _is_wide(rule) and rule.weight]
    wide = weights[-1] if weights else 1.0
    parts = [
        part
        for _, run in groupby(row.parts, key=type)
        for part in _ruled_run(list(run), here, chooses=True, wide_weight=wide, is_document=True)
    ]
    return replace(row, parts=tuple(parts), rules=(), weight=row.weight * wide)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What rules say of a character; None is what its message says."""

    train: bool | None = None
    weight: float | None = None


def _message(message: Message, rules: Sequence[TargetRule]) -> Message:
    wide = [rule for rule in rules if _is_wide(rule)]
    trains = [_train(rule) for rule in wide if _train(rule) is not None]
    weights = [rule.weight for rule in wide if rule.weight]
    train = trains[-1] if trains and message.train is None else message.train
    weight = weights[-1] if weights else 1.0
    parts: list[Part] = []
    for kind, run in groupby(message.parts, key=type):
        name = {Thinking: "thinking", ToolCall: "tool_call"}.get(kind)
        name = "answer" if kind is Text and message.role == "assistant" else name
        here = [rule for rule in rules if rule.part in (None, name)]
        chooses = message.train is not False
        parts += _ruled_run(list(run), here, chooses=chooses, wide_weight=weight, is_document=False)
    return replace(message, parts=tuple(parts), train=train, weight=message.weight * weight)


def _ruled_run(
    parts: Sequence[Part], rules: Sequence[TargetRule], *, chooses: bool, wide_weight: float, is_document: bool
) -> Iterator[Part]:
    """Neighbouring parts of one kind with their flags; patterns are searched in their joined text."""

    def after(choice: _Choice, rule: TargetRule) -> _Choice:
        train, weight = choice.train, choice.weight
        if _train(rule) is not None and chooses:
            train = None if _is_wide(rule) and not is_document else _train(rule)
        if rule.weight:
            weight = None if _is_wide(rule) else rule.weight
        return _Choice(train, weight)

    def flagged(part: Part, choice: _Choice) -> Part:
        assert isinstance(part, Text | Thinking | ToolCall), "asked only of what says something"
        factor = 1.0 if choice.weight is None else choice.weight / wide_weight
        return replace(part, train=choice.train if part.train is None else part.train, weight=part.weight * factor)

    joined = "".join(part.text for part in parts if isinstance(part, Text | Thinking))
    choices = [_Choice()] * len(joined)
    bare = _Choice()  # for what has no characters
    for rule in rules:
        bare = bare if rule.pattern is not None else after(bare, rule)
        for start, end in _found(rule, joined):
            choices[start:end] = [after(choice, rule) for choice in choices[start:end]]
    at = 0
    for part in parts:
        if not isinstance(part, Text | Thinking | ToolCall):
            yield part
        elif isinstance(part, ToolCall) or not part.text:
            yield flagged(part, bare)
        else:
            start = at
            for choice, run in groupby(choices[at : at + len(part.text)]):
                length = len(list(run))
                yield flagged(part.cut(start - at, start - at + length), choice)
                start += length
            at += len(part.text)


def _found(rule: TargetRule, text: str) -> Iterator[tuple[int, int]]:
    """Where a rule holds in a text; a pattern with groups means its first."""
    if rule.pattern is None:
        yield 0, len(text)
        return
    pattern = re.compile(rule.pattern)
    for match in pattern.finditer(text):
        start, end = match.span(min(pattern.groups, 1))
        if start >= 0:  # a group that took no part is at -1
            yield start, end


def _is_wide(rule: TargetRule) -> bool:
    return rule.part is None and rule.pattern is None


def _train(rule: TargetRule) -> bool | None:
    return False if rule.weight == 0 else rule.train
