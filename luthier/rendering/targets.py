"""Which messages are learned, and what each of their characters counts."""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from luthier.config.choices import HistoryRendering, RowKind, TrainOn
from luthier.config.inputs import TargetRuleConfig
from luthier.records import Conversation, Document, Message, Part, TargetRule, Text, Thinking, ToolCall
from luthier.rendering.trace import Owner
from luthier.rendering.trained_turns import CompletionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetPolicy:
    """The run's say on what is learned; rows and data sets may override it.

    ``allowed`` are the control strings that are control tokens in the rows' own text too; of the others
    ``forbids_control`` refuses rows, while otherwise they are text. ``kind`` is the kind of row that is learned from.
    ``history`` says in which context an answer is learned.
    """

    train_on: TrainOn = TrainOn.ASSISTANT
    train_stop: bool = True
    default_system: str | None = None
    rules: tuple[TargetRule, ...] = ()
    forbids_control: bool = False
    allowed: frozenset[str] = frozenset()
    kind: RowKind = RowKind.ANSWER
    history: HistoryRendering = HistoryRendering.INFERENCE


def trained_turns(conversation: Conversation, policy: TrainOn) -> list[int]:
    """Indices of the assistant's messages that the model must learn to emit, as a whole or in part."""
    messages = conversation.messages
    whole = _whole_messages(messages, policy)
    return [
        index
        for index, message in enumerate(messages)
        if message.role == "assistant" and (index in whole or _has_trained_part(message))
    ]


def cut_answer(conversation: Conversation, policy: TrainOn) -> int | None:
    """The last of `trained_turns`, where only a part of it is learned."""
    turns = trained_turns(conversation, policy)
    if not turns:
        return None
    spoken = [part for part in conversation.messages[turns[-1]].parts if isinstance(part, Text | Thinking | ToolCall)]
    is_whole = turns[-1] in _whole_messages(conversation.messages, policy)
    return None if is_whole and all(part_weight(part, is_trained=True) for part in spoken) else turns[-1]


def part_weight(part: Text | Thinking | ToolCall, *, is_trained: bool) -> float:
    """What a part counts beside its message, which is trained or not where the part itself does not say."""
    return part.weight if (is_trained if part.train is None else part.train) else 0.0


def closing_weight(document: Document) -> float:
    """What the end token of a document counts: it is learned where any of the text before it is."""
    parts = [part for part in document.parts if isinstance(part, Text)]
    return document.weight if any(part_weight(part, is_trained=True) for part in parts) else 0.0


class Weights:
    """What a character counts in the loss, given its owner and the completion it lies in.

    ``train_on`` is what holds for this conversation (default: the policy's), ``weight`` the conversation's own.
    ``supplied`` are the messages that inference supplies and that are learned all the same, as a whole or in part.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        policy: TargetPolicy,
        *,
        train_on: TrainOn | None = None,
        weight: float = 1.0,
    ) -> None:
        self.messages, self.policy, self.weight = messages, policy, weight
        self.train_on = policy.train_on if train_on is None else train_on
        self.whole = _whole_messages(messages, self.train_on)
        self.supplied = {
            index
            for index, message in enumerate(messages)
            if message.role != "assistant" and (index in self.whole or _has_trained_part(message))
        }
        self._completions_only = False

    def without_supplied(self) -> Weights:
        """The same for paths beside the trunk, where everything but the completions has been counted already."""
        weights = Weights(self.messages, self.policy, train_on=self.train_on, weight=self.weight)
        weights.supplied, weights._completions_only = set(), True
        return weights

    def __call__(self, owner: Owner, span: CompletionSpan | None, in_stop: bool) -> float:
        if span is None:
            return self._supplied(owner)
        if in_stop and not self.policy.train_stop:
            return 0.0
        if in_stop:
            return self._of_message(span.message)
        if owner.message is not None and owner.message != span.message:
            return 0.0  # another message's words inside this turn, as where a template prints tool results in it
        return self._of_part(span.message, owner.part)

    def _supplied(self, owner: Owner) -> float:
        if self._completions_only:
            return 0.0
        # Words are their own message's, also where another one is rendered: a system prompt inside the user's turn.
        index = owner.scope if owner.message is None else owner.message
        if index is None:
            return self.weight if self.train_on is TrainOn.ALL else 0.0
        if self.messages[index].role == "assistant" and self.train_on is not TrainOn.ALL:
            return 0.0  # what is learned of it is in its completion, here or in a path of its own
        return self._of_part(index, owner.part)

    def _of_message(self, index: int) -> float:
        return self.messages[index].weight * self.weight if index in self.whole else 0.0

    def _of_part(self, index: int, part_index: int | None) -> float:
        if part_index is None:
            return self._of_message(index)
        message = self.messages[index]
        part = message.parts[part_index]
        assert isinstance(part, Text | Thinking | ToolCall), "media parts print no characters"
        return part_weight(part, is_trained=index in self.whole) * message.weight * self.weight


def _whole_messages(messages: Sequence[Message], train_on: TrainOn) -> set[int]:
    """The messages that are learned, but for parts that say otherwise."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    match train_on:
        case TrainOn.ALL:
            chosen = set(range(len(messages)))
        case TrainOn.ASSISTANT:
            chosen = set(turns)
        case TrainOn.LAST_ASSISTANT:
            chosen = set(turns[-1:])
        case TrainOn.COMPLETION:
            last_asked = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
            chosen = {index for index in turns if index > last_asked}
        case TrainOn.NONE:
            chosen = set()
        case _:
            raise AssertionError(f"unknown policy {train_on!r}")
    said = ((index, message.train) for index, message in enumerate(messages))
    return {index for index, train in said if (index in chosen if train is None else train)}


def _has_trained_part(message: Message) -> bool:
    return any(isinstance(part, Text | Thinking | ToolCall) and part.train for part in message.parts)


# --------------------------------------------------------------------------------------------------------------------
# Rules on what is learned become flags on the parts of a row, before it is rendered.
#
#     rules    [{role: assistant, weight: 0.5}, {pattern: "[0-9]+", train: false}]
#     row      assistant: Text("It is 42 now.")
#     becomes  assistant, weight 0.5: Text("It is "), Text("42", train=False), Text(" now.")
#
# A rule without ``part`` and ``pattern`` is *wide*: it speaks of whole messages, with their headers and stop tokens.
# All others are *narrow*. For every character the last rule that holds there decides, ``train`` and ``weight`` each
# on their own. What the row says itself is final, but for one thing: ``train: true`` on a message says that it is
# learned, and narrow rules still choose in it. Weights of rows, messages, parts and rules multiply. See
# docs/targets.md.


RuledRow = TypeVar("RuledRow", Conversation, Document)


def rules_from_config(config: Sequence[TargetRuleConfig]) -> tuple[TargetRule, ...]:
    """The rules of a run description."""
    return tuple(TargetRule(**rule.model_dump()) for rule in config)


def apply_rules(row: RuledRow, rules: Sequence[TargetRule]) -> RuledRow:
    """The row with its texts cut and its flags set as ``rules``, then the row's own rules, say.

    A row that no rule changes is returned as it is. One that is changed has no rules left, so that applying them twice
    does no harm. The joined text of every message stays what it was.
    """
    if not rules and not row.rules:
        return row
    ready = _prepare((*rules, *row.rules))
    if isinstance(row, Document):
        return _document(row, ready)
    messages = _messages(row.messages, ready)
    return row if messages is row.messages else replace(row, messages=messages, rules=())


# ----------------------------------------------------------------------------------------------- rules, made ready


@dataclass(frozen=True, kw_only=True, slots=True)
class _CompiledRule:
    """A rule with its pattern compiled. ``weight`` is never 0: that has become ``train=False``."""

    rule: TargetRule
    find: re.Pattern[str] | None
    train: bool | None
    weight: float | None

    @property
    def is_wide(self) -> bool:
        return self.rule.part is None and self.find is None

    def reaches(self, message: Message, *, is_first: bool, is_last: bool) -> bool:
        rule = self.rule
        return (rule.role is None or rule.role == message.role) and (
            rule.turn is None or (is_first if rule.turn == "first" else is_last)
        )

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where in a text the rule holds: everywhere, or where its pattern (its group 1, if it has one) is found."""
        if self.find is None:
            yield 0, len(text)
            return
        group = min(self.find.groups, 1)
        for match in self.find.finditer(text):
            start, end = match.span(group)
            if start < end:  # a group that took no part in the match is at (-1, -1)
                yield start, end


@lru_cache(maxsize=64)
def _prepare(rules: tuple[TargetRule, ...]) -> tuple[_CompiledRule, ...]:
    return tuple(
        _CompiledRule(
            rule=rule,
            find=None if rule.pattern is None else re.compile(rule.pattern),
            train=False if rule.weight == 0 else rule.train,
            weight=rule.weight or None,
        )
        for rule in rules
    )


# ------------------------------------------------------------------------------------------------------- messages


def _messages(messages: tuple[Message, ...], rules: Sequence[_CompiledRule]) -> tuple[Message, ...]:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, message in enumerate(messages):
        first.setdefault(message.role, index)
        last[message.role] = index
    changed = []
    for index, message in enumerate(messages):
        is_first, is_last = first[message.role] == index, last[message.role] == index
        here = [rule for rule in rules if rule.reaches(message, is_first=is_first, is_last=is_last)]
        changed.append(_message(message, here) if here else message)
    return messages if all(map(operator.is_, changed, messages)) else tuple(changed)


def _message(message: Message, rules: Sequence[_CompiledRule]) -> Message:
    train, weight = message.train, 1.0
    for rule in rules:
        if rule.is_wide:
            if rule.train is not None and message.train is None:
                train = rule.train
            weight = rule.weight or weight
    parts = _parts(message, rules, wide_weight=weight)
    if train is message.train and weight == 1 and parts is message.parts:
        return message
    return replace(message, parts=parts, train=train, weight=message.weight * weight)


def _parts(message: Message, rules: Sequence[_CompiledRule], *, wide_weight: float) -> tuple[Part, ...]:
    if all(rule.is_wide for rule in rules):
        return message.parts
    parts: list[Part] = []
    for kind, group in groupby(message.parts, key=type):
        run = list(group)
        holding = [rule for rule in rules if rule.rule.part in (None, _name(kind, message.role))]
        cut = _Cutter(rules=holding, may_choose=message.train is not False, wide_weight=wide_weight)
        parts += cut.run(run) if holding else run
    is_same = len(parts) == len(message.parts) and all(map(operator.is_, parts, message.parts))
    return message.parts if is_same else tuple(parts)


def _name(kind: type[Part], role: str) -> str | None:
    """What rules call a part of this kind in a message of this role."""
    if kind is Thinking:
        return "thinking"
    if kind is ToolCall:
        return "tool_call"
    return "answer" if kind is Text and role == "assistant" else None


def _document(document: Document, rules: Sequence[_CompiledRule]) -> Document:
    """A document is text without role, turn and part, all of it learned: only rules that ask for none of them hold.

    What a wide rule says of ``train`` goes to the parts, as a document has no flag of its own.
    """
    holding = [rule for rule in rules if rule.rule.role is rule.rule.turn is rule.rule.part is None]
    weight = next((rule.weight for rule in reversed(holding) if rule.is_wide and rule.weight is not None), 1.0)
    cut = _Cutter(rules=holding, may_choose=True, wide_weight=weight, is_document=True)
    parts = [part for _, group in groupby(document.parts, key=type) for part in cut.run(list(group))]
    if weight == 1 and len(parts) == len(document.parts) and all(map(operator.is_, parts, document.parts)):
        return document
    return replace(document, parts=tuple(parts), rules=(), weight=document.weight * weight)


# ---------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True, slots=True)
class _RuleEffect:
    """What rules say of a stretch: None is what the message says."""

    train: bool | None = None
    weight: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cutter:
    """Applies the rules that hold for a run of parts of one kind.

    ``may_choose``: the message does not say itself that it is not learned. ``wide_weight``: what wide rules have
    multiplied the message's weight by already. ``is_document``: no message can carry the ``train`` of wide rules.
    """

    rules: Sequence[_CompiledRule]
    may_choose: bool
    wide_weight: float
    is_document: bool = False

    def run(self, parts: Sequence[Part]) -> list[Part]:
        """Neighbouring parts of one kind are searched as one text: how it is cut up does not change what is found."""
        texts = [part.text for part in parts if isinstance(part, Text | Thinking)]
        if not texts:
            return [self._flag(part, self._choice()) for part in parts]
        edges, choices = self._paint("".join(texts))
        changed: list[Part] = []
        start = 0
        for part in parts:
            assert isinstance(part, Text | Thinking), "a run has parts of one kind"
            end = start + len(part.text)
            changed += self._cut(part, start, edges, choices) if start < end else [self._flag(part, self._choice())]
            start = end
        return changed

    def _paint(self, text: str) -> tuple[list[int], list[_RuleEffect]]:
        """Edges ``[0, …, len(text)]``, and the choice for each stretch between two of them."""
        spans = [list(rule.spans(text)) for rule in self.rules]
        edges = sorted({0, len(text)}.union(*(span for found in spans for span in found)))
        choices = [_RuleEffect()] * (len(edges) - 1)
        for rule, found in zip(self.rules, spans, strict=True):
            for start, end in found:
                for place in range(bisect_left(edges, start), bisect_left(edges, end)):
                    choices[place] = self._after(rule, choices[place])
        return edges, choices

    def _choice(self) -> _RuleEffect:
        """The choice for what has no characters that a pattern could be found in."""
        choice = _RuleEffect()
        for rule in self.rules:
            choice = choice if rule.find is not None else self._after(rule, choice)
        return choice

    def _after(self, rule: _CompiledRule, choice: _RuleEffect) -> _RuleEffect:
        """A rule comes after a choice. A wide one says the same of message and part, so the part has nothing to say."""
        train, weight = choice.train, choice.weight
        if rule.train is not None and self.may_choose:
            train = None if rule.is_wide and not self.is_document else rule.train
        if rule.weight is not None:
            weight = None if rule.is_wide else rule.weight
        return _RuleEffect(train, weight)

    def _cut(
        self, part: Text | Thinking, start: int, edges: Sequence[int], choices: Sequence[_RuleEffect]
    ) -> list[Part]:
        """A part that begins at ``start`` of the painted text, cut where the choice changes."""
        end = start + len(part.text)
        cuts: list[tuple[int, int, _RuleEffect]] = []
        for place in range(bisect_left(edges, start + 1) - 1, bisect_left(edges, end)):
            first, last = max(edges[place], start) - start, min(edges[place + 1], end) - start
            if cuts and cuts[-1][2] == choices[place]:
                first = cuts.pop()[0]
            cuts.append((first, last, choices[place]))
        if len(cuts) == 1:
            return [self._flag(part, cuts[0][2])]
        return [self._flag(part.cut(first, last), choice) for first, last, choice in cuts]

    def _flag(self, part: Part, choice: _RuleEffect) -> Part:
        """The part with a choice on it; its own ``train`` is final, its own weight is multiplied."""
        if not isinstance(part, Text | Thinking | ToolCall):
            return part
        train = choice.train if part.train is None else part.train
        factor = 1.0 if choice.weight is None else choice.weight / self.wide_weight
        if train is part.train and factor == 1:
            return part
        return replace(part, train=train, weight=part.weight * factor)
