"""Whether a refusal says the truth, found out with transformers' own rendering alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jinja2

from luthier.errors import RowError
from tests.oracles.chat_rows import Chat
from tests.oracles.families import Stock

THINKING_SWITCHES = ("enable_thinking", "thinking")
# What a template may raise when it trips over a row.
TROUBLE = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


def is_true(error: RowError, stock: Stock, chat: Chat, tools: Sequence[dict[str, Any]] = ()) -> bool:
    """Whether the reason that a row was refused for holds, for the last message or for the one that is named."""
    number = int(error.field.removeprefix("messages[").rstrip("]")) if error.field else len(chat) - 1
    until, history = chat[: number + 1], chat[:number]
    match error.reason:
        case "template":
            return _raises(stock, chat, tools) or any(
                _raises(stock, chat[:end], tools, add_generation_prompt=True) or _raises(stock, chat[: end + 1], tools)
                for end, message in enumerate(chat)
                if message["role"] == "assistant"
            )
        case "dropped_by_template":
            text = stock.render(until, tools)
            return any(stock.render(changed, tools) == text for changed in _with_one_part_changed(until))
        case "answer_lost" | "answer_changed":
            return not _holds_every_text(stock.render(until, tools), stock.render(history, tools), chat[number])
        case "prompt_not_reproduced":
            return not any(_reproduces(stock, history, until, tools, switch) for switch in _switches())
        case "no_stop":
            return not stock.render(until, tools).rstrip().endswith(stock.stops.all)
        case "not_rendered":
            return stock.render(until, tools) == stock.render(history, tools)
        case "no_target":
            return all(message["role"] != "assistant" for message in chat)
        case _:
            return False


def switches_of(stock: Stock) -> Iterator[dict[str, bool]]:
    """The thinking switches that a template has, in all positions; first left alone."""
    return (switch for switch in _switches() if all(name in stock.source for name in switch))


def _switches() -> Iterator[dict[str, bool]]:
    yield {}
    for name in THINKING_SWITCHES:
        yield from ({name: value} for value in (False, True))


def _holds_every_text(text: str, before: str, message: Any) -> bool:
    """Whether a turn, as rendered, has the message's texts as they are: the thought in tags, the answer behind it."""
    turn = text[len(before) :] if text.startswith(before) else text
    thought, answer = message.get("reasoning_content", "").strip(), message["content"].strip()
    place = turn.find(thought) if thought else 0
    if place < 0 or turn.find(answer, place + len(thought)) < 0:
        return False
    # a tag in the text that the template takes for its own: a thought before it that the row does not have
    return not any(tag in answer or tag in thought for tag in ("<think>", "</think>"))


def _raises(stock: Stock, chat: Chat, tools: Sequence[dict[str, Any]], **kwargs: Any) -> bool:
    try:
        stock.render(chat, tools, **kwargs)
    except TROUBLE:
        return True
    return False


def _reproduces(
    stock: Stock, history: Chat, until: Chat, tools: Sequence[dict[str, Any]], switch: dict[str, bool]
) -> bool:
    prompt = stock.render(history, tools, add_generation_prompt=True, **switch)
    # A prompt's own <think> is no beginning of a <think> that somebody wrote, alike as they look.
    is_written = prompt.rstrip().endswith("<think>") and until[-1]["content"].lstrip().startswith("<think>")
    return stock.render(until, tools, **switch).startswith(prompt) and not is_written


def _with_one_part_changed(chat: Chat) -> Iterator[Chat]:
    *history, last = chat
    for field in ("content", "reasoning_content"):
        if last.get(field):
            yield [*history, {**last, field: "Quite another text."}]
    for index, call in enumerate(last.get("tool_calls", ())):
        calls = list(last["tool_calls"])
        calls[index] = {**call, "function": {"name": "another", "arguments": {"other": "one"}}}
        yield [*history, {**last, "tool_calls": calls}]
