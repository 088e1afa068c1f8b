"""Which messages are learned, and what each of their characters counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luthier.config.schema import HistoryRendering, TrainOn
from luthier.records import Conversation, Document, Message, TargetRule, Text, Thinking, ToolCall
from luthier.rendering.kinds import RowKind
from luthier.rendering.trace import Owner
from luthier.rendering.turns import Span


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

    def __call__(self, owner: Owner, span: Span | None, in_stop: bool) -> float:
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
