"""Rows that are compared, as conversations of which only the continuation is learned.

    Preference(prompt, chosen, rejected)   ->   prompt + chosen, prompt + rejected
    Feedback(prompt, completion)           ->   prompt + completion

At inference the whole prompt is given: what it holds of the assistant's words is context, whatever the row or a rule
says of them, and of the continuation only the assistant's messages are learned.
"""

from __future__ import annotations

from dataclasses import replace

from luthier.config.schema import TrainOn
from luthier.errors import RowError
from luthier.records import Conversation, Feedback, Message, Preference, Text, Thinking, ToolCall
from luthier.rendering.filled import Comparison, Filled

ComparedRow = Preference | Feedback


def continuations(row: ComparedRow) -> dict[str, tuple[Message, ...]]:
    """The row's continuations by the names of their fields, the first one first.

    Raises `RowError` (``blank_answer``) where the model would learn to say nothing.
    """
    _refuse_blank(row)
    match row:
        case Preference():
            return {"chosen": row.chosen, "rejected": row.rejected}
        case Feedback():
            return {"completion": row.completion}


def with_continuation(row: ComparedRow, messages: tuple[Message, ...]) -> Conversation:
    """The prompt with one continuation, before rules are applied."""
    return Conversation(
        messages=(*row.prompt, *messages),
        tools=row.tools,
        address=row.address,
        train_on=TrainOn.ASSISTANT.value,
        rules=row.rules,
        weight=row.weight,
        notes=row.notes,
    )


def only_last(row: Conversation, count: int) -> Conversation:
    """The conversation with nothing to learn but the assistant's among its last ``count`` messages."""
    first = len(row.messages) - count
    messages = tuple(
        message if index >= first and message.role == "assistant" else _unlearned(message)
        for index, message in enumerate(row.messages)
    )
    return replace(row, messages=messages)


def compare(row: ComparedRow, prompt: tuple[Message, ...], sides: dict[str, Filled]) -> Filled:
    """The row's continuations as one. ``prompt`` is the one that was rendered, the run's system message included.

    Raises `RowError` where inference would not show one prompt, or not one history, to all that is compared.
    """
    for side, filled in sides.items():
        if len(filled.blueprint.paths) > 1:
            raise RowError(
                "several_contexts",
                f"inference would show {len(filled.blueprint.paths)} different histories to the answers of this "
                "continuation (the template rewrites earlier turns), so it has no one probability: let it have one "
                "answer, or use a template that leaves history as it was",
                field=side,
            )
    first, *others = sides.values()
    users = frozenset(index for index, message in enumerate(prompt) if message.role == "user")
    match row:
        case Preference():
            (rejected,) = others
            if first.prompt_text != rejected.prompt_text:
                raise RowError(
                    "prompts_differ",
                    "the template shows the prompt in two ways, one for each continuation, so they are no answers to "
                    "the same question: give both thinking, or neither, or set a switch in template.kwargs",
                    field="rejected",
                )
            verdict = 0.0 if row.margin is None else row.margin
            return replace(first, comparison=Comparison(verdict=verdict, users=users, rejected=rejected))
        case Feedback():
            return replace(first, comparison=Comparison(verdict=float(row.desirable), users=users))


def _refuse_blank(row: ComparedRow) -> None:
    """Raise `RowError` where the model would learn to say nothing: an answer of the better kind that is blank.

    A blank answer of the worse kind (rejected, or found bad) says that silence is no answer, which may well be learned.
    """
    match row:
        case Preference():
            learned, which = row.chosen, "chosen"
        case Feedback():
            learned, which = (row.completion if row.desirable else ()), "completion"
    for message in learned:
        if message.is_blank_answer:
            raise RowError(
                "blank_answer",
                "the answer that should become likelier is blank: take the row out, or set train: true on the message "
                "if silence is what you mean",
                field=which,
            )


def _unlearned(message: Message) -> Message:
    parts = tuple(
        replace(part, train=None) if isinstance(part, Text | Thinking | ToolCall) and part.train is not None else part
        for part in message.parts
    )
    return replace(message, train=False, parts=parts)
