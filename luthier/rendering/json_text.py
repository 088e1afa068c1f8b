"""``json.dumps`` that keeps track: keys and values in the text still have their owners."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from luthier.rendering.references import is_reference
from luthier.rendering.trace import Trace
from luthier.rendering.tracked import Tracked, concatenate, holds_tracked


def dump_json(
    value: Any,
    trace: Trace,
    *,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Equal to ``json.dumps`` character for character."""
    if not holds_tracked(value):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    item, key = separators or ("," if indent is not None else ", ", ": ")
    step = " " * indent if isinstance(indent, int) else indent
    return concatenate(_JsonWriter(trace, ensure_ascii, step, item, key, sort_keys).write(value, "\n"), trace)


class _JsonWriter:
    def __init__(
        self, trace: Trace, ensure_ascii: bool, step: str | None, item: str, key: str, sort_keys: bool
    ) -> None:
        self.trace, self.ensure_ascii, self.step = trace, ensure_ascii, step
        self.item, self.key, self.sort_keys = item, key, sort_keys

    def write(self, value: Any, newline: str) -> Iterator[str]:
        match value:
            case Tracked():
                yield self._string(value)
            case Mapping() if value:
                pairs = sorted(value.items()) if self.sort_keys else value.items()
                yield from self._block("{}", newline, [(self._key(name), item) for name, item in pairs])
            case list() | tuple() if value:
                yield from self._block("[]", newline, [(None, item) for item in value])
            case _:
                yield json.dumps(value, ensure_ascii=self.ensure_ascii)

    def _block(self, brackets: str, newline: str, items: list[tuple[str | None, Any]]) -> Iterator[str]:
        inner = newline + self.step if self.step is not None else ""
        yield brackets[0] + inner
        for index, (name, item) in enumerate(items):
            if index:
                yield self.item + inner
            if name is not None:
                yield name
                yield self.key
            yield from self.write(item, inner)
        yield (newline if self.step is not None else "") + brackets[1]

    def _key(self, name: Any) -> str:
        if isinstance(name, Tracked):
            return self._string(name)
        text = json.dumps({name: 0}, ensure_ascii=self.ensure_ascii)  # 1 -> "1", true -> "true", as json does it
        return text[1 : text.rindex(":")]

    def _string(self, text: Tracked) -> Tracked:
        pieces: list[str] = ['"']
        for char, owner in zip(text._sketch, text._owners, strict=True):
            escaped = json.dumps(self.trace.value(char), ensure_ascii=self.ensure_ascii)[1:-1]
            if is_reference(char):
                sketch = self.trace.derive(char, "json", self.ensure_ascii)
                pieces.append(Tracked(escaped, sketch, owner, self.trace))
            else:
                pieces.append(Tracked(escaped, escaped, owner * len(escaped), self.trace))
        return concatenate([*pieces, '"'], self.trace)
