"""Where in a recorded text each trained turn lies: the seam, where the model takes over, and the stop, where it ends.

For a trained message k the model sees, at inference, ``prompt = render(messages[:k], add_generation_prompt=True)`` and
must emit the rest of the turn up to its stop token. So the seam is where the prompt ends, and the stop is the last stop
token of the turn's own scope, after its last character of content. All positions are in sketches, so they hold for
every row that the recordings stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from luthier.errors import RowError
from luthier.rendering.control import ControlTokens
from luthier.rendering.guards import Guard
from luthier.rendering.openings import opened_turn
from luthier.rendering.references import is_reference
from luthier.rendering.template import ChatTemplate, Recording, Stretch

# What templates call the variable that opens or closes thinking: Qwen, GLM, Nemotron; DeepSeek, Granite.
THINKING_SWITCHES = ("enable_thinking", "thinking")
LONGEST_CONTROL_TOKEN = 64  # characters; as far back as a seam looks for one


class History(Protocol):
    """The recordings of one row: what its template prints for its first messages."""

    def recording(self, num_messages: int, *, generation_prompt: bool = False, **kwargs: Any) -> Recording:
        """The recording for ``messages[:num_messages]``."""

    def value(self, char: str) -> str:
        """What a character of a sketch stands for in this row."""

    def note(self, guard: Guard) -> None:
        """Note an answer that depends on the row's strings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The completion of one message in a sketch: characters ``[seam, end)``, the stop token being ``[stop, end)``.

    ``is_history``: it is learned in a path of its own; here it is what the model said before.
    """

    message: int
    seam: int
    stop: int
    end: int
    is_history: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What inference sees before message ``k``, and the recording with its turn rendered last.

    ``kwargs`` are the template variables under which the one begins with the other; the seam lies where the prompt
    ends.
    """

    recording: Recording
    seam: int
    kwargs: Mapping[str, Any]


def context_of(template: ChatTemplate, history: History, index: int) -> Context:
    """The inference context of message ``index``.

    Where the template has a thinking switch that the user left open, the first position that reproduces this turn is
    taken; left open comes first, for that is what inference shows by default. An empty thought that the template writes
    into its prompts alone, with the switch as the user has it, is put into the turn (`openings`).
    Raises `RowError` if no generation prompt is the beginning of the rendered turn: it cannot be trained on what
    inference will show.
    """
    for kwargs in _switches(template):
        asked = history.recording(index, generation_prompt=True, **kwargs)
        prompt = asked.sketch
        turn = history.recording(index + 1, **kwargs)
        if turn.sketch.startswith(prompt):
            return Context(recording=turn, seam=len(prompt), kwargs=kwargs)
        if not kwargs and (opened := opened_turn(asked, turn)) is not None:
            return Context(recording=opened, seam=len(prompt), kwargs=kwargs)
    switches = [name for name in THINKING_SWITCHES if name in template.variables]
    hint = f"; template.kwargs ({', '.join(switches)}) may contradict this row" if switches else ""
    raise RowError(
        "prompt_not_reproduced",
        f"the generation prompt {_tail(prompt, history)!r} is not how the rendered turn begins{hint}",
        field=f"messages[{index}]",
    )


def span_of(recording: Recording, control: ControlTokens, message: int, seam: int) -> Span | None:
    """Where the completion of ``message`` ends.

    The stop token is, in this order: the last one of the turn's scope after its content; one that follows the scope
    at once (the next header, as in GLM-like templates, or a closing token of the text); a special token at the end of
    the scope. None if there is none.
    """
    stretch = _stretch(recording, message)
    scope_end = stretch.end
    found = list(_tokens(recording, control, max(seam, stretch.content_end), scope_end))
    inside = [(start, end) for start, end, token in found if end <= scope_end and token in control.stops]
    following = [(start, end) for start, end, token in found if start == scope_end and token in control.stops]
    special = [
        (start, end)
        for start, end, token in found
        if end <= scope_end and token in control.special and not recording.sketch[end:scope_end].strip()
    ]
    for candidates in (inside, following, special):
        if candidates:
            stop, end = candidates[-1]
            return Span(message=message, seam=seam, stop=stop, end=end)
    return None


def open_span(recording: Recording, message: int, seam: int, *, whole: bool) -> Span:
    """The completion of a message without a stop token: up to its last character of content, or its ``whole`` scope."""
    stretch = _stretch(recording, message)
    end = max(seam, stretch.end if whole else stretch.content_end)
    return Span(message=message, seam=seam, stop=end, end=end)


def token_after(recording: Recording, control: ControlTokens, message: int) -> str | None:
    """The stop token that begins the header of the turn after ``message``, if there is one."""
    scope_end = _stretch(recording, message).end
    found = _tokens(recording, control, scope_end, scope_end)
    return next((token for start, _, token in found if start == scope_end and token in control.stops), None)


def seam_is_safe(recording: Recording, control: ControlTokens, seam: int, history: History) -> bool:
    """Whether tokens cannot merge over a seam, whatever the tokenizer.

    At inference a later turn sees the history as one text, so if they could, its tokens would differ from the ones
    that this turn was trained with. A control token ends any run of text; a newline before anything but white space is
    where pre-tokenizers split.
    """
    window = recording.sketch[max(0, seam - LONGEST_CONTROL_TOKEN) : seam]
    if any(end == len(window) for _, end, _ in control.find(window)):
        return True
    return window.endswith("\n") and not _space_follows(recording, seam, history)


def _space_follows(recording: Recording, position: int, history: History) -> bool:
    for char in recording.sketch[position:]:
        if not is_reference(char):
            return char.isspace()
        text = history.value(char)
        leading = "nothing" if not text else "space" if text[0].isspace() else "other"
        history.note(Guard("leading", (char,), (), leading))
        if leading != "nothing":
            return leading == "space"
    return False


def _switches(template: ChatTemplate) -> Iterator[dict[str, Any]]:
    yield {}
    for name in THINKING_SWITCHES:
        if name in template.variables and name not in template.kwargs:
            yield {name: False}
            yield {name: True}


def _stretch(recording: Recording, message: int) -> Stretch:
    if message not in recording.stretches:
        raise RowError("not_rendered", "the template prints nothing for this message", field=f"messages[{message}]")
    return recording.stretches[message]


def _tokens(recording: Recording, control: ControlTokens, start: int, last: int) -> Iterator[tuple[int, int, str]]:
    """Control tokens that begin in ``[start, last]``."""
    for begin, end, token in control.find(recording.sketch, start):
        if begin > last:
            return
        yield begin, end, token


def _tail(prompt: str, history: History) -> str:
    text = "".join(map(history.value, prompt[-40:]))
    return text if len(text) <= 40 else "…" + text[-40:]
