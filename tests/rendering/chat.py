"""Short ways to write conversations and templates in tests."""

from __future__ import annotations

from luthier.records import Conversation, Message, Part, Text, Thinking, ToolCall
from luthier.rendering import ControlTokens
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy
from luthier.rendering.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ControlTokens(
    tokens=frozenset({"<|im_start|>", "<|im_end|>", "<think>", "</think>"}),
    special=frozenset({"<|im_start|>", "<|im_end|>"}),
    stops=frozenset({"<|im_end|>"}),
    closing=("<|im_end|>",),
)


def message(role: str, *parts: Part | str, train: bool | None = None, weight: float = 1.0) -> Message:
    return Message(
        role=role,
        parts=tuple(Text(text=part) if isinstance(part, str) else part for part in parts),
        train=train,
        weight=weight,
    )


def user(*parts: Part | str, train: bool | None = None) -> Message:
    return message("user", *parts, train=train)


def assistant(*parts: Part | str, train: bool | None = None, weight: float = 1.0) -> Message:
    return message("assistant", *parts, train=train, weight=weight)


def conversation(
    *messages: Message, train_on: str | None = None, tools: tuple[dict[str, object], ...] = ()
) -> Conversation:
    return Conversation(messages=messages, train_on=train_on, tools=tools)


def renderer(
    template: str = CHATML, control: ControlTokens = CONTROL, policy: TargetPolicy | None = None, **kwargs: object
) -> Renderer:
    return Renderer(ChatTemplate(template, kwargs=kwargs), control, policy or TargetPolicy())


__all__ = [
    "CHATML",
    "CONTROL",
    "Text",
    "Thinking",
    "ToolCall",
    "assistant",
    "conversation",
    "message",
    "renderer",
    "user",
]
