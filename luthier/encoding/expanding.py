"""Runs with media: what the processor writes in an item's place is put between them, and its text joins theirs.

    Look: [video]          Look: <0.0 seconds>            one text, as inference encodes it
                    ->     <|vision_start|> slots <|vision_end|>
    What?                  What?

An expansion that begins or ends with text has it encoded together with the text beside it, as the model's tokenizer
does when it is given the whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from luthier.records import ControlPiece, MediaPiece
from luthier.rendering.blueprint import Run, TextRun
from luthier.rendering.control import ControlTokens


@dataclass(frozen=True, slots=True)
class ControlRun:
    """One control token, ``count`` times; ``number`` is the media item that it belongs to."""

    token: str
    count: int
    number: int


@dataclass(frozen=True, slots=True)
class SlotText:
    """Text inside an expansion, between its control tokens."""

    text: str
    number: int


ExpandedRun = TextRun | ControlPiece | ControlRun | SlotText


def expand_runs(runs: Sequence[Run], texts: Sequence[str], control: ControlTokens) -> list[ExpandedRun]:
    """The runs of a branch with media item ``n`` replaced by ``texts[n]``, which hold a control token at least."""
    found: list[ExpandedRun] = []
    leading = ""  # text at an expansion's end, which goes on in what follows
    for run in runs:
        if isinstance(run, MediaPiece):
            parts = split_expansion(texts[run.number], control)
            first = next(index for index, part in enumerate(parts) if not isinstance(part, str))
            last = max(index for index, part in enumerate(parts) if not isinstance(part, str))
            before = leading + "".join(part for part in parts[:first] if isinstance(part, str))
            _append_text(found, before)
            for part in parts[first : last + 1]:
                found.append(SlotText(part, run.number) if isinstance(part, str) else ControlRun(*part, run.number))
            leading = "".join(part for part in parts[last + 1 :] if isinstance(part, str))
            continue
        if leading and isinstance(run, TextRun) and not run.by_model:
            found.append(replace(run, texts=((leading,), *run.texts), weights=(0.0, *run.weights)))
        else:
            _append_text(found, leading)
            found.append(run)
        leading = ""
    _append_text(found, leading)
    return found


@lru_cache(maxsize=4_000)
def split_expansion(text: str, control: ControlTokens) -> tuple[str | tuple[str, int], ...]:
    """``"<img><pad><pad></img>\n"`` -> ``("<img>", 1), ("<pad>", 2), ("</img>", 1), "\n"``"""
    parts: list[str | tuple[str, int]] = []
    position = 0
    for start, end, token in control.find(text):
        if position < start:
            parts.append(text[position:start])
        last = parts[-1] if parts else None
        if isinstance(last, tuple) and last[0] == token:
            parts[-1] = token, last[1] + 1
        else:
            parts.append((token, 1))
        position = end
    if position < len(text):
        parts.append(text[position:])
    return tuple(parts)


def _append_text(found: list[ExpandedRun], text: str) -> None:
    """Text of the template's side behind what there is: in one run with the text before it, if that is no answer."""
    if not text:
        return
    last = found[-1] if found else None
    if isinstance(last, TextRun) and not last.by_model:
        found[-1] = replace(last, texts=(*last.texts, (text,)), weights=(*last.weights, 0.0))
    else:
        found.append(TextRun(texts=((text,),), weights=(0.0,)))
