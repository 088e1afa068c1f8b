"""Which messages are learned, and what each of their characters counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luthier.config.schema import TrainOn
from luthier.records import Conversation, Message, Text, Thinking, ToolCall
from luthier.rendering.trace import Owner
from luthier.rendering.turns import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetPolicy:
    """The run's say on what is learned; rows and data sets may override it."""

    train_on: TrainOn = TrainOn.ASSISTANT
    train_stop: bool = True
    default_system: str | None = None


def trained_turns(conversation: Conversation, policy: TrainOn) -> list[int]:
    """Indices of the messages that the model must learn to emit."""
    messages = conversation.messages
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    match policy:
        case TrainOn.ASSISTANT | TrainOn.ALL:
            chosen = set(turns)
        case TrainOn.LAST_ASSISTANT:
            chosen = set(turns[-1:])
        case TrainOn.COMPLETION:
            last_asked = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
            chosen = {index for index in turns if index > last_asked}
        case TrainOn.NONE:
            chosen = set()
        case _:
            raise AssertionError(f"unknown policy {policy!r}")
    said = {index: messages[index].train for index in turns}
    return [index for index in turns if (index in chosen if said[index] is None else said[index])]


class Weights:
    """What a character counts in the loss, given its owner and the completion it lies in."""

    def __init__(self, messages: Sequence[Message], policy: TargetPolicy, *, everything: bool = False) -> None:
        self.messages, self.policy, self.everything = messages, policy, everything
        self.supplied = {
            index
            for index, message in enumerate(messages)
            if message.role != "assistant" and (everything if message.train is None else message.train)
        }

    def without_supplied(self) -> Weights:
        """The same for paths beside the trunk, where everything but the completions has been counted already."""
        weights = Weights(self.messages, self.policy)
        weights.supplied = set()
        return weights

    def __call__(self, owner: Owner, span: Span | None, in_stop: bool) -> float:
        if span is None:
            return self._supplied(owner)
        message = self.messages[span.message]
        if in_stop:
            return message.weight if self.policy.train_stop else 0.0
        if owner.message is not None and owner.message != span.message:
            return 0.0  # another message's words inside this turn, as where a template prints tool results in it
        return message.weight * self._part(message, owner)

    def _supplied(self, owner: Owner) -> float:
        if owner.scope is None:
            return 1.0 if self.everything else 0.0
        message = self.messages[owner.scope]
        is_trained = owner.scope in self.supplied or (self.everything and message.train is not False)
        return message.weight if is_trained else 0.0

    def _part(self, message: Message, owner: Owner) -> float:
        if owner.part is None:
            return 1.0
        part = message.parts[owner.part]
        assert isinstance(part, Text | Thinking | ToolCall), "media parts print no characters"
        return 0.0 if part.train is False else part.weight
