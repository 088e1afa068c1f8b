"""What an environment is: it answers the model's messages until a conversation is over, and says how good it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

RowDict = Mapping[str, Any]
MessageDict = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Over:
    """The conversation is over. ``reward`` is how good it was; None is no opinion. ``messages`` are the last that the
    environment says, which the model does not answer."""

    reward: float | None
    messages: Sequence[MessageDict] = ()


class DialogueEnvironment(Protocol):
    """A class of this form is what ``rollout.environment`` names. An object of it is made for each conversation.

    Messages are dicts as in a row of OpenAI's form: ``{"role": "user", "content": "…"}``.
    """

    def start(self, row: RowDict) -> Sequence[MessageDict] | None:
        """The messages that a conversation begins with, from the row as its file has it; None for the row's own."""

    def step(self, message: MessageDict) -> Sequence[MessageDict] | Over:
        """What follows the model's message: messages of role ``user`` or ``tool``, or the end."""
