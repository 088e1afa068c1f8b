"""The one place that shortens anything: segments over ``max_length`` under the policy `Overflow`.

Two rules keep counts exact and answers honest:

- The first token of a segment is never a target: the shift pairs a target with the logits before it.
- An answer that a cut leaves without its end does not have its last kept token as a target. (A document that is split
  goes on in the next window, so its windows keep all targets but the first.)

What stands behind the last target (a template's line break behind the stop) makes nothing too long: it is cut off.

Continuations that are compared are never cut. Where one is too long with its prompt, the prompt loses messages from its
beginning (`layout.cut_prompt`), the same ones for all that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Overflow
from luthier.errors import RowDropped, UserError
from luthier.layout import spans_of
from luthier.records import Ints, MediaItem, Segment
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentCut:
    """Tokens ``start:stop`` of a segment, after its first ``head`` ones.

    ``open_end``: the cut is inside an answer, so the last token is no target (of what is learned whole it is one).
    """

    start: int
    stop: int
    open_end: bool
    num_targets: int
    head: int = 0

    def __len__(self) -> int:
        return self.head + self.stop - self.start


def cut_segment(segment: Segment, *, max_length: int, overflow: Overflow) -> list[Segment]:
    """The segment as segments of at most ``max_length`` tokens, each with a target and none on its first token.

    Raises `RowDropped` (``too_long``, or ``no_target_left``) where the policy leaves nothing to train on, and
    `UserError` under ``Overflow.ERROR``.
    """
    windows = plan_windows(segment, max_length=max_length, overflow=overflow)
    kept = [take_window(segment, window) for window in windows if window.num_targets]
    if not kept:
        raise RowDropped("no_target_left", _no_target(len(segment), max_length), address=segment.address)
    return kept


def plan_windows(segment: Segment, *, max_length: int, overflow: Overflow) -> list[SegmentCut]:
    """Where to cut a segment; windows without targets are in the list too. No cut goes through a media item or parts it
    from the tokens that mark it: it is made before them, and what follows is lost with it (truncate) or begins the next
    window (split; no window at all if an item alone is longer than ``max_length``, for what comes after it is about
    something that nobody sees). Items that count together are one in this.

    Raises `RowDropped` (``too_long``) under ``Overflow.DROP`` and ``KEEP_ANSWER``, `UserError` under ``ERROR``.
    """
    target, address = segment.target, segment.address
    assert max_length >= 1, f"max_length must be positive, got {max_length}"
    if len(target) <= max_length:
        return [_window(target, 0, len(target))]
    cuts_answers = overflow in (Overflow.TRUNCATE, Overflow.SPLIT)
    if not cuts_answers and (end := learned_length(target)) <= max_length:
        return [_window(target, 0, end)]
    match overflow:
        case Overflow.ERROR:
            raise UserError(
                f"{address}: a sequence has {counted(len(target), 'token')}, data.max_length is {max_length}",
                hint="raise data.max_length, or set data.overflow to drop, truncate or split",
            )
        case Overflow.DROP | Overflow.KEEP_ANSWER:  # of the latter what could be shortened was, when it was encoded
            raise RowDropped(
                "too_long", f"{counted(len(target), 'token')}, data.max_length is {max_length}", address=address
            )
        case Overflow.TRUNCATE:
            stop = _before_media(_kept_whole(segment.media, max_length), max_length)
            return [_window(target, 0, stop, is_text=_is_text(target))]
        case Overflow.SPLIT:
            wholes = _kept_whole(segment.media, max_length)
            return (
                []
                if any(whole.stop - whole.start > max_length for whole in wholes)
                else _split(segment, max_length, wholes)
            )
        case _:
            raise AssertionError(f"unknown overflow policy {overflow!r}")


def learned_length(target: NDArray[np.bool_]) -> int:
    """How many tokens there are up to the last target, bool[T]; all of them where there is none."""
    return len(target) - int(np.argmax(target[::-1]))


def take_window(segment: Segment, window: SegmentCut) -> Segment:
    """The segment's tokens in the window, with the targets that the two rules leave."""
    whole = window.start == 0 and window.stop == len(segment)
    if whole and not window.open_end and not (len(segment) and segment.target[0]):
        return segment
    kept, own = [slice(0, window.head)] if window.head else [], slice(window.start, window.stop)
    return spans_of(segment, *kept, own, first=False, last=not window.open_end)


def _split(segment: Segment, max_length: int, wholes: Sequence[slice]) -> list[SegmentCut]:
    target = segment.target
    num_tokens = len(target)
    if _is_text(target):  # windows one behind the other
        starts = range(0, num_tokens, max_length)
        return [_window(target, start, min(start + max_length, num_tokens), is_text=True) for start in starts]
    # stops[i]: an answer's last target is at stops[i] - 1, so a window may end there
    stops = np.flatnonzero(target[:-1] & ~target[1:]) + 1
    stops = stops[[_before_media(wholes, int(stop)) == stop for stop in stops]]
    windows = []
    start = 0
    while start < num_tokens:
        limit = start + max_length
        if limit >= num_tokens:
            stop = num_tokens
        else:
            last = int(np.searchsorted(stops, limit, side="right")) - 1
            # [q q A A q q q | A A]: the cut goes behind the second A, not to the limit
            behind = int(stops[last]) if last >= 0 else start
            stop = behind if behind > start else _before_media(wholes, limit)
            assert stop > start, f"a window without a token at {start}"
        windows.append(_window(target, start, stop))
        start = stop
    return windows


def _is_text(target: NDArray[np.bool_]) -> bool:
    """Whether all is learned, as of a document: a cut then goes through no answer."""
    return bool(target[1:].all())


def _window(target: NDArray[np.bool_], start: int, stop: int, *, is_text: bool = False) -> SegmentCut:
    """A window; its end is open where the cut goes through an answer. ``is_text``: all is learned, answers are none."""
    open_end = not is_text and bool(stop < len(target) and target[stop - 1] and target[stop])
    num_targets = int(np.count_nonzero(_trim(target[start:stop], open_end=open_end)))
    return SegmentCut(start=start, stop=stop, open_end=open_end, num_targets=num_targets)


def _trim(target: NDArray[np.bool_], *, open_end: bool) -> NDArray[np.bool_]:
    trimmed = target.copy()
    trimmed[:1] = False
    if open_end:
        trimmed[-1:] = False
    return trimmed


def _kept_whole(media: Sequence[MediaItem], max_length: int) -> list[slice]:
    """The tokens that no cut goes through: each item's, and all from the first to the last that count together."""
    wholes = [item.whole(max_length) for item in media if not item.counts_together]
    if company := [item.whole(max_length) for item in media if item.counts_together]:
        wholes.append(slice(company[0].start, company[-1].stop))
    return wholes


def _before_media(wholes: Sequence[slice], stop: int) -> int:
    """The cut, or the beginning of what it would go through of what is kept whole."""
    return next((whole.start for whole in wholes if whole.start < stop < whole.stop), stop)


def marks_around(spans: Sequence[tuple[int, int]], is_control: NDArray[np.bool_], ends: Ints) -> list[tuple[int, int]]:
    """How many control tokens directly before and behind each media item mark it, ``<start> item <end>``. ``ends``: of
    the branches. Between two items that nothing else parts, the first half of them is the former's.
    A control token that is learned is an answer's, and to be left out of ``is_control``."""
    found: list[tuple[int, int]] = []
    taken = 0
    for start, stop in spans:
        branch = int(np.searchsorted(ends, start, side="right"))
        first = max(taken, int(ends[branch - 1]) if branch else 0)
        opening = _run(is_control[first:start][::-1])
        if found and opening == start - taken:
            opening = (opening + 1) // 2
        closing = min(opening, _run(is_control[stop : ends[branch]]))
        found.append((opening, closing))
        taken = stop
    return found


def _run(is_control: NDArray[np.bool_]) -> int:
    """How many of these are true before the first that is not."""
    return int(np.argmin(np.append(is_control, False)))


def _no_target(num_tokens: int, max_length: int) -> str:
    if num_tokens <= max_length:
        return f"none of its {counted(num_tokens, 'token')} can be a target (a sequence's first token never is)"
    return f"no target among what data.max_length={max_length} keeps of its {counted(num_tokens, 'token')}"
