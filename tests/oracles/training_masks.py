"""One turn, seen twice: Luthier on the template that a model ships, and TRL's copy of it that marks what is learned.

The two agree on the turn and differ, family by family, on its edges: TRL's copies were made by hand, and some begin at
the header or end after the newline that follows the stop. What they differ by is a string before our first target and
one after our last; `CONVENTIONS` names it for each family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jinja2
import tokenizers

from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from tests.oracles.chat_rows import CHATS, Chat, as_conversation
from tests.oracles.families import Stock, family, training_render
from tests.oracles.judged import common_length, fault_of
from tests.oracles.refusals import is_true


class Start(Enum):
    """Where TRL's mask begins, seen from the end of the generation prompt, where ours begins."""

    PROMPT_END = "at the end of the prompt"
    NEWLINE = "one newline earlier, in the header"
    THOUGHT = "at the `<think>` that the prompt supplies"
    HEADER = "at the header of the turn"


POSITIONS: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""Of the thinking switch: a turn is trained behind the prompt of the first position that leads to it."""


class End(Enum):
    """Where TRL's mask ends, seen from the stop token, which is our last target."""

    STOP = "at the stop"
    NEWLINE = "after the newline behind the stop"
    TEXT = "at the end of the text: newline and closing eos"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer with its history: the last message is the one that is compared."""

    case: str
    chat: Chat
    tools: Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one turn.

    verdict  ``equal``, ``seam`` (equal but for a merge over the seam), ``other text`` (TRL's copy renders another text,
             so only ids were compared), ``prompt`` (inference shows another context than the rendered conversation, and
             what is learned behind it reads as the turn), or the reason of a refusal
    edges    what TRL marks before our first target and after our last; ``-`` in front: what it leaves out
    """

    verdict: str
    edges: tuple[str, str] | None = None


def turns() -> Iterator[Turn]:
    """Every answer of every chat, as the last message of its own row."""
    for case, (chat, tools) in CHATS.items():
        for index, message in enumerate(chat):
            if message["role"] == "assistant":
                yield Turn(case=case, chat=chat[: index + 1], tools=tools)


def compare(name: str, turn: Turn, encoder: Encoder, whole: tokenizers.Tokenizer) -> Outcome:
    """Encode a turn and hold it against transformers' render, the library's whole encoding and TRL's mask.

    Raises AssertionError where ids differ, or a refusal is not true.
    """
    stock = family(name)
    try:
        [(ids, target)] = encoder.encode(as_conversation(turn.chat, turn.tools)).unroll()
    except RowError as error:
        assert is_true(error, stock, turn.chat, turn.tools), f"{name} {turn.case}: {error}"
        return Outcome(verdict=error.reason)
    prompt = stock.render(turn.chat[:-1], turn.tools, add_generation_prompt=True)
    if not any(
        _begins_with_its_prompt(stock, turn, **kwargs) for kwargs in POSITIONS
    ):  # no other tool trains such a turn
        first = int(target.argmax())
        learned = _decode(whole, ids[first:][target[first:]])
        assert _decode(whole, ids[:first]) == prompt, f"{name} {turn.case}"
        begun = common_length(prompt, stock.render(turn.chat[:-1], turn.tools))
        assert fault_of(prompt[begun:], learned, turn.chat[-1], stock) is None, f"{name} {turn.case}: {learned}"
        return Outcome(verdict="prompt")
    text = with_stop_of_next_header(stock, stock.render(turn.chat, turn.tools), _decode(whole, ids))
    first, last = int(target.argmax()), len(target) - 1 - int(target[::-1].argmax())
    assert target[first : last + 1].all(), "the targets of one answer are one run"
    start, end = len(_decode(whole, ids[:first])), len(_decode(whole, ids[: last + 1]))
    assert _decode(whole, ids) == text
    exact = whole.encode(text, add_special_tokens=False).ids == ids.tolist()
    prompt, answer = (whole.encode(part, add_special_tokens=False).ids for part in (text[:start], text[start:]))
    assert exact or prompt + answer == ids.tolist()
    marked, spans = _marked(name, turn)
    if marked != text or not spans:
        return Outcome(verdict="other text")
    verdict = "equal" if exact else "seam"
    return Outcome(verdict=verdict, edges=(_edge(marked, spans[-1][0], start), _edge(marked, end, spans[-1][1])))


def _begins_with_its_prompt(stock: Stock, turn: Turn, **kwargs: bool) -> bool:
    prompt = stock.render(turn.chat[:-1], turn.tools, add_generation_prompt=True, **kwargs)
    return stock.render(turn.chat, turn.tools, **kwargs).startswith(prompt)


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that touch become one: a copy may mark a call, its result's place and the stop apart."""
    whole: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if whole and start <= whole[-1][1]:
            start, end = whole[-1][0], max(end, whole.pop()[1])
        whole.append((start, end))
    return whole


def _marked(name: str, turn: Turn) -> tuple[str, list[tuple[int, int]]]:
    try:
        text, spans = training_render(name, turn.chat, turn.tools)
    except jinja2.TemplateError:
        return "", []
    return text, merged(spans)


def with_stop_of_next_header(stock: Stock, text: str, ours: str) -> str:
    """Where a turn ends with the header of the next one, Luthier and TRL write it after the last turn as well."""
    longer = [text + stop for stop in stock.stops.all if stock.header_is_stop]
    return ours if ours in longer else text


def _edge(text: str, start: int, end: int) -> str:
    return text[start:end] if start <= end else "-" + text[end:start]


def _decode(whole: tokenizers.Tokenizer, ids: Sequence[int]) -> str:
    return str(whole.decode(list(ids), skip_special_tokens=False))
