"""Thinking that is written into an assistant's text, between tags.

    "<think>\\nHm.\\n</think>\\n\\nYes."  ->  Thinking("Hm."), Text("Yes.")

The thought keeps how it was written, so that ``written`` and the text after it are the whole text, to the character.
"""

from __future__ import annotations

from luthier.records import Part, Text, Thinking


def split_thinking(text: str, tags: tuple[str, str] | None) -> list[Part]:
    """An assistant's text as its thinking and its answer; as one text where it does not begin with a whole thought.

    One line break inside each tag, and up to two after the closing one, belong to the tags, as chat templates write
    them. Only the first thought is taken: what follows it is the answer, also where it has tags again. A closing tag
    without an opening one ends the thought that a prompt opened, if it is the only one and has a line of its own.
    """
    if tags is None or tags[1] not in text:
        return [Text(text=text)]
    opening, closing = tags
    blank = len(text) - len(text.lstrip())
    if text.startswith(opening, blank):
        begin = blank + len(opening)
        end = text.find(closing, begin)
        begin += text.startswith("\n", begin)
    else:
        begin, end = 0, _lone_closing(text, opening, closing)
    if end < 0:
        return [Text(text=text)]
    answer = end + len(closing)
    answer += min(2, len(text) - answer - len(text[answer:].lstrip("\n")))
    last = end - 1 if end > begin and text[end - 1] == "\n" else end
    thought = Thinking(text=text[begin:last], written=text[:answer], written_start=begin)
    return [thought, Text(text=text[answer:])] if answer < len(text) else [thought]


def _lone_closing(text: str, opening: str, closing: str) -> int:
    """Where the only tag of a text stands, on a line of its own; -1 if there are others, or it is part of a line."""
    place = text.index(closing)
    after = place + len(closing)
    is_only = opening not in text and closing not in text[after:]
    begins_line = place == 0 or text[place - 1] == "\n"
    return place if is_only and begins_line and text[after : after + 1] in ("", "\n") else -1
