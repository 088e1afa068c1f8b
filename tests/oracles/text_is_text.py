"""What the ids of a row must be when no text of it can become a control token.

The expectation is made without Luthier: every control string in the row's own text is put out of sight before
transformers renders it, so that whatever control string is left in the rendered text was written by the template; then
the library's own tokenizer reads the text in between with control tokens switched off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from tests.oracles.chat_rows import Chat
from tests.oracles.families import Stock
from tests.oracles.refusals import switches_of
from tests.oracles.vocabulary import tags_of

FIRST_STAND_IN = 0xE100  # private-use characters stand in for control strings while a template runs


class TextIsText:
    """The expected ids of rows under one template; ``whole`` is the tokenizer with all its tokens."""

    def __init__(self, stock: Stock, whole: tokenizers.Tokenizer) -> None:
        self.stock, self.whole = stock, whole
        spec = json.loads(whole.to_str())
        written = tags_of(stock.source)
        self.control = [
            token["content"] for token in spec["added_tokens"] if token["special"] or token["content"] in written
        ]
        for token in spec["added_tokens"]:
            token["special"] = token["content"] in self.control
        self._spec = spec
        self._known: dict[str, list[int]] = {}  # what templates write between control strings comes again and again

    @cached_property
    def _letters(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self._spec))
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.control, key=len, reverse=True))))

    def expected(self, chat: Chat, tools: Sequence[dict[str, Any]]) -> list[list[int]] | None:
        """The ids that a row may have: as one text, or cut where the generation prompt ends.

        None where the template looks for a control string in the text, so that hiding it changes what is printed.
        """
        hidden, hidden_tools = self.hidden(chat), self.hidden(list(tools))
        allowed = []
        for switch in switches_of(self.stock):
            text = self.stock.render(hidden, hidden_tools, **switch)
            if self._show(text) != self.stock.render(chat, tools, **switch):
                return None
            prompt = self.stock.render(hidden[:-1], hidden_tools, add_generation_prompt=True, **switch)
            endings = ["", *(self.stock.stops.all if self.stock.header_is_stop else ())]
            for ending in endings:
                allowed.append(self.ids(text + ending))
                if text.startswith(prompt):
                    allowed.append(self.ids(prompt) + self.ids(text[len(prompt) :] + ending))
        return allowed

    def hidden(self, value: Any) -> Any:
        """A chat, or tools, with every control string out of sight."""
        return self._each_string(value, self._hide)

    def ids(self, text: str) -> list[int]:
        """Control strings in sight as control tokens, the text between them as letters, hidden ones restored."""
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            ids += self._text_ids(text[start : match.start()])
            ids.append(self.whole.token_to_id(match.group()))
            start = match.end()
        return ids + self._text_ids(text[start:])

    def _text_ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = list(self._letters.encode(self._show(text), add_special_tokens=False).ids)
        return self._known[text]

    def _hide(self, text: str) -> str:
        return self._pattern.sub(lambda match: chr(FIRST_STAND_IN + self.control.index(match.group())), text)

    @cached_property
    def _shown(self) -> dict[int, str]:
        return {FIRST_STAND_IN + number: token for number, token in enumerate(self.control)}

    def _show(self, text: str) -> str:
        return text.translate(self._shown)

    def _each_string(self, value: Any, change: Callable[[str], str]) -> Any:
        match value:
            case str():
                return change(value)
            case dict():
                return {change(key): self._each_string(item, change) for key, item in value.items()}
            case list() | tuple():
                return [self._each_string(item, change) for item in value]
            case _:
                return value
