"""``template.history: one_rendering``: a conversation is rendered once, each answer is learned where it stands in it.

Where the template rewrites history (Qwen3 strips the thoughts of earlier turns), inference shows the model another
text before an answer than this one. Other tools train this way; here it has to be asked for, and what differs is
counted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import itemgetter

from luthier.errors import RowError
from luthier.records import Message, Thinking
from luthier.rendering.control import ControlTokens
from luthier.rendering.paths import Path, ended_by_next_turn, no_stop, path_of, require_every_part, whole_row
from luthier.rendering.recordings import RowHistory
from luthier.rendering.template import Recording
from luthier.rendering.turns import Context, Span, context_of, open_span, span_of


def one_path(
    history: RowHistory, control: ControlTokens, turns: Sequence[int], *, needs_stop: bool
) -> tuple[Path, frozenset[int]]:
    """The path of the whole row with the completions of ``turns`` in it, and those of them that inference would not
    show or expect so.

    A completion begins behind its turn's header, as generation prompts write it, and ends as in any other path. What
    the template leaves out of earlier turns is not learned. Raises `RowError` where a turn has no header or no stop.
    """
    messages = history.row.messages
    whole = whole_row(history)
    recording = whole.recording
    path = path_of(history, whole, len(messages))
    unfinished = len(messages) - 1 if history.row.continue_final_message else None
    differing = set()
    for index in turns:
        context = _context(history, index, control)
        seam = _seam(history, recording, context, index)
        span = span_of(recording, control, index, seam)
        if index == unfinished:
            span = open_span(recording, index, seam, whole=False)
        if span is None:
            is_last = index == len(messages) - 1
            ended, path.stop = ended_by_next_turn(history, control, whole, index) if is_last else (None, None)
            if ended is not None:
                path.recording = recording = ended.recording
                span = span_of(recording, control, index, seam)
            elif path.stop is None and needs_stop:
                raise no_stop(control, index)
            span = span or open_span(recording, index, seam, whole=path.stop is not None)
            if needs_stop and span.stop == span.end and path.stop is None:
                raise no_stop(control, index)
            path.end = span.end if is_last else None
        path.spans.append(span)
        left_out = _thoughts_of_its_own_time(context, messages[index], index) if index < turns[-1] else set()
        require_every_part(recording, span, history, but=left_out)
        if not _is_inference(recording, span, context, control):
            differing.add(index)
    if unfinished is not None:
        path.end = open_span(recording, unfinished, 0, whole=False).end
    return path, frozenset(differing)


def _context(history: RowHistory, index: int, control: ControlTokens) -> Context | None:
    """What inference shows before a message; None where the template has no prompt that the turn would continue."""
    try:
        return context_of(history.template, history, index, control)
    except RowError as error:
        if error.reason != "prompt_not_reproduced":
            raise
        return None


def _thoughts_of_its_own_time(context: Context | None, message: Message, index: int) -> set[int]:
    """The parts of a message that are thoughts and that the template prints while no turn follows, by number: those it
    may leave out of one rendering. A thought that it never prints is none of them."""
    if context is None:
        return set()
    if not any(isinstance(part, Thinking) for part in message.parts):
        return set()
    recording = context.recording
    owners = {recording.owner_table[ord(char)] for char in set(recording.owners[recording.shared :])}
    printed = {owner.part for owner in owners if owner.message == index}
    return {number for number, part in enumerate(message.parts) if isinstance(part, Thinking) and number in printed}


def _is_inference(recording: Recording, span: Span, context: Context | None, control: ControlTokens) -> bool:
    """Whether the text up to the end of a completion is what inference would show and expect."""
    if context is None or not recording.sketch.startswith(context.recording.sketch[: context.seam]):
        return False
    alone = span_of(context.recording, control, span.message, context.seam)
    end = len(context.recording.sketch) if alone is None else alone.end
    return recording.sketch[: span.end] == context.recording.sketch[:end]


def _seam(history: RowHistory, recording: Recording, context: Context | None, index: int) -> int:
    """Where the completion of a message begins in the rendering of the whole row: behind the turn's header.

    The header is what a generation prompt adds. Of one that goes on behind it (an opened thought) only so much counts
    as stands there, up to a line's or a tag's end. Templates that add nothing have no header. Raises `RowError` where
    nothing of a header stands there.
    """
    if context is not None and recording.sketch.startswith(context.recording.sketch[: context.seam]):
        return context.seam
    asked = history.recording(index, generation_prompt=True).sketch
    header = asked[_common(asked, history.recording(index).sketch) :]
    begin, end = _between(recording, index)
    if not header:
        return recording.stretches[index].begin
    best = 0, begin
    for place in range(begin, end):
        if recording.sketch[place] == header[:1]:
            length = _whole_marks(header, _common(header, recording.sketch[place:]))
            best = max(best, (length, place))
    length, place = best
    if not header[:length].strip():
        raise RowError(
            "prompt_not_reproduced",
            f"nothing of the generation prompt's header {header!r} stands before this turn in the conversation",
            field=f"messages[{index}]",
        )
    return place + length


def _between(recording: Recording, index: int) -> tuple[int, int]:
    """Between the last word of the messages before a message and the end of its own: where its header can begin."""
    stretch = recording.stretches.get(index)
    if stretch is None:
        raise RowError("not_rendered", "the template prints nothing for this message", field=f"messages[{index}]")
    known = (recording.stretches.get(number) for number in range(index - 1, -1, -1))
    ends = (other.content_end for other in known if other is not None and other.content_end <= stretch.begin)
    before = next(ends, 0) if _is_in_order(recording) else max(ends, default=0)
    owned = (place for place in range(stretch.begin, stretch.end) if recording.owner(place).message == index)
    return before, next(owned, stretch.end)


@functools.lru_cache(maxsize=4)
def _is_in_order(recording: Recording) -> bool:
    """Whether each message ends behind those before it."""
    ends = [stretch.content_end for _, stretch in sorted(recording.stretches.items(), key=itemgetter(0))]
    return ends == sorted(ends)


def _common(one: str, other: str) -> int:
    """``_common("abc", "abd") -> 2``"""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _whole_marks(header: str, length: int) -> int:
    """The longest beginning of a header, ``length`` characters at most, that ends with it, a line or a tag."""
    if length == len(header):
        return length
    return max((place + 1 for place in range(length) if header[place] in "\n>]"), default=0)
