"""The arguments of a call as they are drawn: where they begin in a JSON object, and which text they add to it.

{"name": "send", "arguments": {"to": "Ann", …        a call as one object: the walk reads up to "arguments"
{"to": "Ann", …                                      the arguments alone
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from luthier.rendering.replies.form import ObjectKeys, loaded

_TOKEN = re.compile(r'\s+|"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+(?=[\s"{}\[\],:])', re.DOTALL)
WHOLE = ObjectKeys(name=(), arguments=())  # of an object that is the arguments
_SURROGATE = re.compile("[\ud800-\udfff]")


def as_json(value: object) -> str:
    """A value as JSON that can be sent as UTF-8, which half of a surrogate pair cannot but by its number."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def inside_json(text: str) -> str:
    """Some of a text, as it is written between the quotes of a JSON string."""
    return as_json(text)[1:-1]


class ArgumentsWalk:
    """Reads a call's JSON from left to right. ``keys`` are where it has its parts, `WHOLE` of arguments alone; None
    where that is not known.

    Once ``has_begun``, what `read` gives is the arguments' own text, however what it reads is divided. Line ends in
    strings, which models write and JSON does not allow, are written as JSON writes them.
    """

    def __init__(self, keys: ObjectKeys | None) -> None:
        self.keys = keys
        self.name: str | None = None
        self.call_id: str | None = None
        self.has_begun = self.is_over = False
        self.num_read = 0  # characters of the object
        self._path: list[str | None] = []  # of the objects and lists that are open, the key that was read last
        self._is_list: list[bool] = []
        self._is_key_next = False
        self._depth = 0  # of objects and lists that are open in the arguments
        self._is_string = self._is_escape = False

    def read(self, text: str) -> str:
        """What the next characters of the object add to the arguments. ``text`` is all of it behind ``num_read``."""
        place = 0
        while place < len(text) and not self.has_begun and not self.is_over:
            found = _TOKEN.match(text, place)
            if found is None:
                break
            if not self._begins(found.group()):
                place = found.end()
        self.num_read += place
        return self._arguments(text[place:]) if self.has_begun and not self.is_over else ""

    def _begins(self, token: str) -> bool:
        """Go over one token of what stands before the arguments; whether they begin with it."""
        match token[0]:
            case "{" | "[":
                if token == "{" and self.keys is not None and self._are_here(self.keys):
                    self.has_begun = True
                    return True
                self._path.append(None)
                self._is_list.append(token == "[")
                self._is_key_next = token == "{"
            case "}" | "]":
                self._path[-1:], self._is_list[-1:] = [], []
                self.is_over = not self._path
            case ",":
                self._is_key_next = bool(self._is_list) and not self._is_list[-1]
            case ":":
                self._is_key_next = False
            case '"':
                self._take(loaded(token))
        return False

    def _take(self, word: object) -> None:
        """A key, or a text that may be the name or the id of the call."""
        if not isinstance(word, str) or not self._path:
            return
        if self._is_key_next:
            self._path[-1] = word
        elif self.keys is not None and self._is_at(self.keys.name):
            self.name = word
        elif self.keys is not None and self.keys.call_id is not None and self._is_at(self.keys.call_id):
            self.call_id = word

    def _is_at(self, path: Sequence[str]) -> bool:
        return self._path == list(path) and not any(self._is_list)

    def _are_here(self, keys: ObjectKeys) -> bool:
        """Whether an object at this place is the arguments, and all is read that is told before them."""
        has_id = keys.call_id is None or self.call_id is not None
        return self._is_at(keys.arguments) and (keys is WHOLE or (bool(self.name) and has_id))

    def _arguments(self, text: str) -> str:
        told: list[str] = []
        for char in text:
            self.num_read += 1
            if self._is_string:
                if self._is_escape:
                    self._is_escape = False
                elif char < " ":
                    char = inside_json(char)
                else:
                    self._is_escape, self._is_string = char == "\\", char != '"'
            else:
                self._is_string = char == '"'
                self._depth += (char in "{[") - (char in "}]")
            told.append(char)
            if not self._depth:
                self.is_over = True
                break
        return "".join(told)
