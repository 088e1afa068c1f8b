"""What the model must emit after a prompt that the rendered turn does not begin with.

Inference shows ``render(messages[:k], add_generation_prompt=True)``. Three things of it may differ from how the turn is
rendered in a conversation, and in each the completion is still known:

    the prompt                        the turn, rendered           the completion
    …[mist]<|/results|><m>            …[mist]\n<m>Yes.             Yes.                      other text before it
    <m><think></think>                <m>Yes.                      Yes.                      a thought that it closes
    <m><think>\n                      <m>Yes.                      \n</think>\n\nYes.         a thought that it opens

Context is the prompt as inference prints it, and the completion is the turn behind its header, without what the prompt
did already and with what it leaves open: the row's thought, if it has one, and the tag that closes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from luthier.rendering.template import Recording
from luthier.rendering.trace import Owner

# <think>, [THINK], ◁think▷, <|channel>; of row's strings there are none in a sketch
TAG = r"(?:<[^<>\n\U000F0000-\U0010FFFF]{1,40}>|\[[^\[\]\n\U000F0000-\U0010FFFF]{1,40}\]|◁[^◁▷\n]{1,40}▷)"
_OPEN = re.compile(rf"({TAG})(\w*)(\s*)$")
_CLOSED = re.compile(rf"({TAG})(\w*)(\s*)({TAG})\s*$")
_CLOSE = re.compile(rf"({TAG})\s*$")
LONGEST_TAG = 42  # characters
LONGEST_ENDING = 4_000  # characters; so far back a header's end and a thought's tags are looked for
_SPACE = re.compile(r"\s*")
_MARK = re.compile(TAG)
# A closing tag at the end of a prompt closes a thought only if it says so: `[/INST]` closes a question.
_OF_THOUGHT = re.compile(r"think|thought|reason|cot\b|reflect|analysis", re.IGNORECASE)
# A tag with one of these in its name begins a turn, not a thought.
_OF_TURN = re.compile(
    r"assistant|user|bot\b|model|system|turn|human|inst\b|answer|response|start\b|header|role|tool|gpt|ai\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a generation prompt ends: with a header, which ends at ``header_end``, and perhaps a thought.

    opening, closing  the thought's tags as the template writes them; ``opening`` is "" where the prompt only closes
    space             the white space between the opening tag and what follows it
    is_open           the prompt opens the thought and leaves it to the model to close it
    """

    header_end: int
    opening: str = ""
    closing: str = ""
    space: str = ""
    is_open: bool = False


def ending_of(prompt: str, known: Collection[str] | str) -> Ending:
    """How a generation prompt ends. ``known``: tags that the template or the tokenizer knows, or a text of them.

    ``"<m><think></think>"`` -> a thought that is closed; ``"<m><think>\\n"`` -> one that is open; ``"<m>"`` -> none. A
    tag that does not speak of thinking opens a thought if the tag that would close it is known.
    """
    start = max(0, len(prompt) - LONGEST_ENDING)
    last = _CLOSE.search(prompt, max(start, start + len(prompt[start:].rstrip()) - LONGEST_TAG))
    found = None if last is None else _CLOSED.search(prompt, _tag_before(prompt, start, last.start()))
    if found is not None and found[4] in closings_of(found[1]) and not _is_header(found[1] + found[2]):
        return Ending(header_end=found.start(), opening=found[1] + found[2], closing=found[4], space=found[3])
    found = last
    if found is not None and _OF_THOUGHT.search(found[1]) and (opened := _opened_by(found[1], known)):
        return Ending(header_end=found.start(), opening=opened, closing=found[1])
    found = _OPEN.search(prompt, _tag_before(prompt, start, len(prompt)))
    if found is not None and not _OF_TURN.search(found[1]):
        closings = closings_of(found[1])
        closing = next((tag for tag in closings if tag in known), None)
        if closing is None and closings and _OF_THOUGHT.search(found[1]):
            closing = closings[0]
        if closing is not None:
            opening, space = found[1] + found[2], found[3]
            return Ending(header_end=found.start(), opening=opening, closing=closing, space=space, is_open=True)
    return Ending(header_end=len(prompt))


def _tag_before(prompt: str, start: int, end: int) -> int:
    """Where to look from for a tag that has nothing but a name and white space between it and ``end``: a search from
    ``start`` on would take long."""
    end = start + len(prompt[start:end].rstrip())
    while end > start and (prompt[end - 1].isalnum() or prompt[end - 1] == "_"):
        end -= 1
    return max(start, end - LONGEST_TAG)


def closing_of_thought(prompt: str, known: Collection[str] | str) -> str:
    """The tag that closes the thought which a generation prompt opens; "" where it opens none."""
    ending = ending_of(prompt, known)
    return ending.closing if ending.is_open and _OF_THOUGHT.search(ending.opening) else ""


def is_of_thought(tag: str) -> bool:
    """Whether a tag opens a thought, by its name."""
    return bool(_OF_THOUGHT.search(tag)) and "/" not in tag and not re.search("end|END", tag)


def _is_header(opening: str) -> bool:
    """Whether a tag and the name behind it begin a turn, as ``<|start_header_id|>assistant`` does."""
    return bool(_OF_TURN.search(opening)) and not _OF_THOUGHT.search(opening)


def repeats(ending: Ending, turn: str, seam: int) -> bool:
    """Whether a turn goes on behind its prompt by opening or closing the thought that the prompt opened or closed."""
    if not ending.closing:
        return False
    start = _after_space(turn, seam)
    opens = bool(ending.opening) and turn.startswith(ending.opening, start)
    return opens or (not ending.is_open and turn.startswith(ending.closing, start))


def header_end(prompt: str, ending: Ending, begun: int, turn: Recording, begins: Sequence[int]) -> int | None:
    """Where the header of a turn ends that the prompt announces; None if the turn has another header.

    ``begun`` is where the prompt goes on behind the history without a prompt, ``begins`` are places where the turn may
    begin. White space at the end of the header may differ, but not the header's words: where a turn goes on with more
    of the template's own words, as ``<m>assistant (last)\\n`` does behind ``<m>assistant\\n``, it is another.
    """
    found = _header_end(prompt, ending, begun, turn.sketch, begins)
    if found is None or turn.sketch[:found].endswith(prompt[: ending.header_end][-1:]):
        return found
    place = _after_space(turn.sketch, found)
    if place == len(turn.sketch) or turn.owner(place).field is not None or _MARK.match(turn.sketch, place):
        return found
    return None


def _header_end(prompt: str, ending: Ending, begun: int, turn: str, begins: Sequence[int]) -> int | None:
    whole = prompt[: ending.header_end]
    headers = dict.fromkeys((whole, whole.rstrip()))
    for header in headers:
        if len(header.rstrip()) >= begun and turn.startswith(header):
            return len(header)
    for header in headers:
        own = header[min(begun, len(header)) :]
        places = [place for begin in begins for place in sorted({begin, _after_space(turn, begin)})]
        for begin in places:
            if own.strip() and turn[:begin].endswith(own):
                return begin
            for start in range(len(own)):  # the longest end of the prompt that the turn begins with
                if own[start:].strip() and turn.startswith(own[start:], begin):
                    if start and not _is_edge(own, start):
                        break
                    return begin + len(own) - start
    return None


def behind_closed(ending: Ending, turn: str, start: int) -> int | None:
    """Where a turn goes on behind a thought that its prompt has closed, and that the turn may have once more.

    None if it has a thought with something in it.
    """
    while True:
        place = _after_space(turn, start)
        if ending.opening and turn.startswith(ending.opening, place):
            inner = _after_space(turn, place + len(ending.opening))
            if not turn.startswith(ending.closing, inner):
                return None
            place = inner
        if not turn.startswith(ending.closing, place):
            return start
        start = _after_space(turn, place + len(ending.closing))


def behind_opened(ending: Ending, turn: str, start: int) -> int | None:
    """Where a turn goes on behind the opening tag that its prompt wrote; None if it does not begin with that tag."""
    place = _after_space(turn, start)
    if not turn.startswith(ending.opening, place):
        return None
    place += len(ending.opening)
    return place + len(ending.space) if turn.startswith(ending.space, place) else place


def closes(ending: Ending, turn: str, start: int) -> bool:
    """Whether a turn begins by closing the thought."""
    return turn.startswith(ending.closing, _after_space(turn, start))


def closing_text(ending: Ending, sample: Recording | None, message: int) -> str:
    """What stands between a thought and the answer: as the template writes it in ``sample``, a turn with both.

    A template that never prints a thought has the white space behind its opening tag repeated: ``<think>\\n`` is closed
    with ``\\n</think>\\n\\n``, ``<think>`` with ``</think>``.
    """
    if sample is not None:
        places = [
            place
            for place in range(len(sample.sketch))
            if (owner := sample.owner(place)).message == message and owner.field == "reasoning_content"
        ]
        if places:
            found = re.match(rf"\s*{re.escape(ending.closing)}\s*", sample.sketch[places[-1] + 1 :])
            if found is not None:
                return found[0]
    return ending.space + ending.closing + 2 * ending.space


@dataclass(frozen=True, slots=True)
class Stretched:
    """Characters ``[start, end)`` of a recording; what no message owns of them is said to be ``scope``'s."""

    recording: Recording
    start: int
    end: int
    scope: int | None = None


def spliced(*pieces: Stretched | tuple[str, Owner]) -> Recording:
    """One recording of stretches of others, and of texts with their owners between them."""
    sketches, owners = [], []
    numbers: dict[Owner, str] = {}
    guards = {}
    for piece in pieces:
        if isinstance(piece, tuple):
            text, owner = piece
            sketches.append(text)
            owners.append(numbers.setdefault(owner, chr(len(numbers))) * len(text))
            continue
        recording = piece.recording
        guards.update(dict.fromkeys(recording.guards))
        own = recording.owners_of(piece.start, piece.end)
        table = {}
        for char in set(own):
            owner = recording.owner_table[ord(char)]
            if owner.scope is None and piece.scope is not None:
                owner = Owner(piece.scope, owner.message, owner.field, owner.part)
            table[ord(char)] = numbers.setdefault(owner, chr(len(numbers)))
        sketches.append(recording.sketch[piece.start : piece.end])
        owners.append(own.translate(table))
    return Recording(sketch="".join(sketches), owners="".join(owners), owner_table=tuple(numbers), guards=tuple(guards))


def closings_of(opening: str) -> list[str]:
    """Tags that would close what a tag opens, the likeliest first: ``<think>`` -> ``</think>``, ``<|channel>`` ->
    ``<channel|>``.
    """
    left, name, right = opening[0], opening[1:-1], opening[-1]
    pairs = (("START", "END"), ("start", "end"), ("BEGIN", "END"), ("begin", "end"), ("open", "close"))
    found = [left + name.replace(begin, end) + right for begin, end in pairs if begin in name]
    if name.startswith(("/", "|/")):
        return found
    if name.startswith("|") and name.endswith("|"):
        return [*found, f"{left}|/{name[1:]}{right}", f"{left}/{name[1:-1]}{right}", f"{left}/{name}{right}"]
    if name.startswith("|"):
        return [*found, f"{left}{name[1:]}|{right}", f"{left}/{name}{right}"]
    return [*found, f"{left}/{name}{right}"]


def _opened_by(closing: str, known: Collection[str] | str) -> str:
    """The tag that a closing one closes, or ""; ``known`` need not have it, for some prompts only close."""
    name = closing[1:-1]
    candidates = [closing[0] + name[1:] + closing[-1]] if name.startswith("/") else []
    if name.endswith("|") and not name.startswith("|"):
        candidates.append(f"{closing[0]}|{name[:-1]}{closing[-1]}")
    for begin, end in (("START", "END"), ("start", "end"), ("BEGIN", "END"), ("begin", "end")):
        if end in name:
            candidates.append(closing[0] + name.replace(end, begin) + closing[-1])
    return next((tag for tag in candidates if tag in known), candidates[0] if candidates else "")


def _after_space(sketch: str, start: int) -> int:
    found = _SPACE.match(sketch, start)
    assert found is not None
    return found.end()


def _is_edge(text: str, place: int) -> bool:
    """Whether a text may be cut here without cutting a tag or a word in two."""
    inside = any(found.start() < place < found.end() for found in re.finditer(TAG, text))
    return not inside and not (text[place - 1].isalnum() and text[place].isalnum())
