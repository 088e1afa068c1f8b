"""Where in a recorded text each trained turn lies: the seam, where the model takes over, and the stop, where it ends.

For a trained message k the model sees, at inference, ``prompt = render(messages[:k], add_generation_prompt=True)`` and
must emit the rest of the turn up to its stop token. So the seam is where the prompt ends, and the stop is the last stop
token of the turn's own scope, after its last character of content. All positions are in sketches, so they hold for
every row that the recordings stand for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from luthier.errors import RowError
from luthier.records import Conversation, Message, Text, Thinking
from luthier.rendering import ControlTokens, openings
from luthier.rendering.recordings import RowHistory
from luthier.rendering.template import ChatTemplate, MessageSpan, Recording
from luthier.rendering.text_references import common_length, filled_in, is_reference
from luthier.rendering.trace import Guard, Owner

# What templates call the variable that opens or closes thinking: Qwen, GLM, Nemotron; DeepSeek, Granite.
THINKING_SWITCHES = ("enable_thinking", "thinking")
OTHER_WORD = "zqotherqz"
LONGEST_CONTROL_TOKEN = 64  # characters; as far back as a seam looks for one


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionSpan:
    """The completion of one message in a sketch: characters ``[seam, end)``, the stop token being ``[stop, end)``.

    ``is_history``: it is learned in a path of its own; here it is what the model said before.
    """

    message: int
    seam: int
    stop: int
    end: int
    is_history: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """A recording of which a context is made, and what the template was given: so that it can be printed again."""

    recording: Recording
    num_messages: int
    generation_prompt: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What inference sees before message ``k``, and the recording with its turn rendered last.

    ``kwargs`` are the template variables under which the one begins with the other; the seam lies where the prompt
    ends. ``printed`` are the recordings that it is made of.
    """

    recording: Recording
    seam: int
    kwargs: Mapping[str, Any]
    printed: tuple[Printed, ...]


def context_of(template: ChatTemplate, history: RowHistory, index: int, control: ControlTokens) -> Context:
    """The inference context of message ``index``.

    Where the template has a thinking switch that the user left open, the first position that reproduces this turn is
    taken; left open comes first, for that is what inference shows by default. A prompt that the rendered turn does not
    begin with is still the context, as inference prints it, where what the model must emit after it can be told
    (`openings`). Raises `RowError` if it cannot: the row cannot be trained on what inference will show.
    """
    asked: list[_Asked] = []
    header = "" if template.header is None or history.follows_result(index) else template.header
    for kwargs in _switches(template):
        prompt = history.recording(index, generation_prompt=True, **kwargs)
        turn = history.recording(index + 1, **kwargs)
        known = known_tags(template.literals, control)
        usual = header[: openings.ending_of(header, known).header_end].strip()
        one = _Asked(history, index, prompt, turn, kwargs, openings.ending_of(prompt.sketch, known), usual)
        if one.leaves_header():  # the model would have to write it
            continue
        asked.append(one)
        found = one.rendered() or one.behind_header() or one.without_header()
        if found is not None:
            return found
    for one in asked:
        found = one.behind_opened()
        if found is not None:
            return found
    tag = next((tag for one in asked if (tag := one.mentioned_tag()) is not None), None)
    if tag is not None:
        raise RowError(
            "prompt_not_reproduced",
            f"the answer's text has {tag}, which ends or begins a thought in this chat template's generation prompts, "
            "so it would be read as the template's; write it otherwise, or, if it does end a thought, put the thought "
            "into a field of its own (reasoning_content)",
            field=f"messages[{index}]",
        )
    switches = [name for name in THINKING_SWITCHES if name in template.variables]
    hint = f"; template.kwargs ({', '.join(switches)}) may contradict this row" if switches else ""
    raise RowError(
        "prompt_not_reproduced",
        f"the generation prompt {_tail(prompt.sketch, history)!r} is not how the rendered turn begins{hint}",
        field=f"messages[{index}]",
    )


@functools.lru_cache(maxsize=8)
def known_tags(literals: str, control: ControlTokens) -> str:
    """What a template can write itself and the tokenizer's control tokens, in one text that tags are looked for in."""
    return "\0".join((literals, *sorted(control.tokens)))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A turn and its prompt under one position of the template's switches."""

    history: RowHistory
    index: int
    prompt: Recording
    turn: Recording
    kwargs: Mapping[str, Any]
    ending: openings.Ending
    header: str

    def rendered(self) -> Context | None:
        """The turn as rendered, if it begins with the prompt and does not begin the prompt's thought anew."""
        seam = len(self.prompt.sketch)
        if not self.turn.sketch.startswith(self.prompt.sketch) or openings.repeats(self.ending, self.turn.sketch, seam):
            return None
        printed = (Printed(recording=self.turn, num_messages=self.index + 1),)
        return Context(recording=self.turn, seam=seam, kwargs=self.kwargs, printed=printed)

    def leaves_header(self) -> bool:
        """Whether this prompt adds nothing, and the header that others write stands before the turn's first words."""
        sketch, start = self.turn.sketch, len(self.prompt.sketch)
        if not self.header or self.header not in sketch[start:]:
            return False
        stop = next((place for place in range(start, len(sketch)) if is_reference(sketch[place])), len(sketch))
        return self.header in sketch[start:stop] and self._begun() == start

    def behind_header(self) -> Context | None:
        """The turn behind its header, where the prompt opens no thought that the model would have to close."""
        start = None if self.ending.is_open else self._header_end()
        if start is None or (self.ending.closing and (self._thoughts() or self.mentioned_tag() is not None)):
            return None
        if self.ending.closing:
            start = openings.behind_closed(self.ending, self.turn.sketch, start)
        return None if start is None else self._spliced(start)

    def without_header(self) -> Context | None:
        """The turn's own text, where it has no header and only the messages before it are printed otherwise.

        Prompts add nothing at all (Mistral's first templates, which have the system message in the newest question), or
        the template prints a second answer without the header that its prompt has (Gemma 4), from its words on.
        """
        stretch, begun = self.turn.stretches.get(self.index), self._begun()
        if stretch is None or self.ending.closing:
            return None
        if not self.header and begun == len(self.prompt.sketch):
            start = begin_without_header(self.prompt, self.turn, self.index)
            return None if start is None else self._spliced(start)
        owner = self.turn.owner(stretch.begin)
        is_of_words = owner.message == self.index and owner.field is not None and not stretch.is_owned
        return self._spliced(stretch.begin) if is_of_words else None

    def behind_opened(self) -> Context | None:
        """The thought that the prompt opens, the tag that closes it, and the turn behind its header."""
        start = self._header_end() if self.ending.is_open else None
        if start is None:
            return None
        own = openings.behind_opened(self.ending, self.turn.sketch, start)
        if own is not None:  # the turn has the whole thought
            return self._spliced(own)
        if self.mentioned_tag() is not None:
            return None
        thoughts = self._thoughts()
        if thoughts and self._prints_thought(start):  # with other tags than the prompt's
            return None
        if openings.closes(self.ending, self.turn.sketch, start):
            return self._spliced(start, *thoughts)
        closing = openings.closing_text(self.ending, self._with_thought(), self.index)
        start += len(self.turn.sketch[start:]) - len(self.turn.sketch[start:].lstrip())
        return self._spliced(start, *thoughts, (closing, Owner(scope=self.index)))

    def _spliced(self, start: int, *between: tuple[str, Owner]) -> Context:
        """The prompt as inference prints it, and behind it the turn from ``start`` on."""
        begun = self._begun()
        prompt, turn = self.prompt, self.turn
        recording = openings.spliced(
            openings.Stretched(prompt, 0, begun),
            openings.Stretched(prompt, begun, len(prompt.sketch), self.index),
            *between,
            openings.Stretched(turn, start, len(turn.sketch)),
        )
        printed = (
            Printed(recording=prompt, num_messages=self.index, generation_prompt=True),
            Printed(recording=turn, num_messages=self.index + 1),
        )
        return Context(recording=recording, seam=len(prompt.sketch), kwargs=self.kwargs, printed=printed)

    def _begun(self) -> int:
        """Where the prompt goes on behind what the template prints without one."""
        return common_length(self.history.recording(self.index, **self.kwargs).sketch, self.prompt.sketch)

    def _header_end(self) -> int | None:
        stretch = self.turn.stretches.get(self.index)
        begins = [] if stretch is None else [stretch.begin]
        return openings.header_end(self.prompt.sketch, self.ending, self._begun(), self.turn, begins)

    def _thoughts(self) -> list[tuple[str, Owner]]:
        """The thoughts of the row's message that are not blank, each with its owner."""
        found = []
        for part in self.history.parts_of(self.index, Thinking):
            char = self.history.character_of(self.index, part)
            is_blank = not self.history.value(char).strip()
            self.history.note(Guard("blank", (char,), (), is_blank))
            if not is_blank:
                owner = Owner(scope=self.index, message=self.index, field="reasoning_content", part=part)
                found.append((char, owner))
        return found

    def mentioned_tag(self) -> str | None:
        """A tag of the prompt's thought in the answer's text, if any: what the template does with it is not known.

        The text is all of its parts together, which is what the template is given.
        """
        sketch = "".join(
            self.history.character_of(self.index, part) for part in self.history.parts_of(self.index, Text)
        )
        found = None
        for tag in filter(None, (self.ending.opening, self.ending.closing)) if sketch else ():
            has_tag = tag in filled_in(sketch, self.history.value)
            self.history.note(Guard("contains", (sketch, tag), (), has_tag))
            found = tag if has_tag else found
        return found

    def _prints_thought(self, start: int) -> bool:
        owners = (self.turn.owner(place) for place in range(start, len(self.turn.sketch)))
        return any(owner.message == self.index and owner.field == "reasoning_content" for owner in owners)

    def _with_thought(self) -> Recording | None:
        """A turn of nobody's with a thought and an answer, in the place of this one."""
        made_up = Message(role="assistant", parts=(Thinking(text="Hm"), Text(text="So")))
        try:
            return self.history.recording_with(self.index, made_up, **self.kwargs)
        except RowError:
            return None


def begin_without_header(prompt: Recording, turn: Recording, index: int) -> int | None:
    """Where the text of a turn begins whose ``prompt`` adds nothing to the messages before it; None if unclear.

    That is where its scope does. Where no loop of the template stands at the message, it is told by what the template
    prints behind the words of the message before: as much as in the prompt.
    """
    stretch, before = turn.stretches.get(index), index - 1
    if stretch is None or not stretch.is_owned:
        return None if stretch is None else stretch.begin
    if before not in prompt.stretches or before not in turn.stretches:
        return None
    end = turn.stretches[before].content_end
    behind = prompt.sketch[prompt.stretches[before].content_end :]
    return end + len(behind) if turn.sketch.startswith(behind, end) else None


def span_of(recording: Recording, control: ControlTokens, message: int, seam: int) -> CompletionSpan | None:
    """Where the completion of ``message`` ends.

    The stop token is, in this order: the first one of the turn's scope after its content, for there generation ends,
    whatever the template prints behind it; one that follows the scope at once (the next header, as in GLM-like
    templates, or a closing token of the text); the last special token at the end of the scope. None if there is none.
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
    for candidates in (inside, following, special[-1:]):
        if candidates:
            stop, end = candidates[0]
            return CompletionSpan(message=message, seam=seam, stop=stop, end=end)
    return None


def open_span(recording: Recording, message: int, seam: int, *, whole: bool) -> CompletionSpan:
    """The completion of a message without a stop token: up to its last character of content, or its ``whole`` scope."""
    stretch = _stretch(recording, message)
    end = max(seam, stretch.end if whole else stretch.content_end)
    return CompletionSpan(message=message, seam=seam, stop=end, end=end)


def token_after(recording: Recording, control: ControlTokens, message: int) -> str | None:
    """The stop token that begins the header of the turn after ``message``, if there is one."""
    scope_end = _stretch(recording, message).end
    found = _tokens(recording, control, scope_end, scope_end)
    return next((token for start, _, token in found if start == scope_end and token in control.stops), None)


def seam_is_safe(recording: Recording, control: ControlTokens, seam: int, history: RowHistory) -> bool:
    """Whether tokens cannot merge over a seam, whatever the tokenizer.

    At inference a later turn sees the history as one text, so if they could, its tokens would differ from the ones
    that this turn was trained with. A control token ends any run of text; a newline before anything but white space is
    where pre-tokenizers split.
    """
    window = recording.sketch[max(0, seam - LONGEST_CONTROL_TOKEN) : seam]
    if any(end == len(window) for _, end, _ in control.find(window)):
        return True
    return window.endswith("\n") and not _space_follows(recording, seam, history)


def _space_follows(recording: Recording, position: int, history: RowHistory) -> bool:
    for place in range(position, len(recording.sketch)):
        char = recording.sketch[place]
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


def _stretch(recording: Recording, message: int) -> MessageSpan:
    if message not in recording.stretches:
        raise RowError("not_rendered", "the template prints nothing for this message", field=f"messages[{message}]")
    return recording.stretches[message]


def _tokens(recording: Recording, control: ControlTokens, start: int, last: int) -> Iterator[tuple[int, int, str]]:
    """Control tokens that begin in ``[start, last]``."""
    for begin, end, token in control.find(recording.sketch, start):
        if begin > last:
            return
        yield begin, end, token


def _tail(prompt: str, history: RowHistory) -> str:
    text = "".join(map(history.value, prompt[-40:]))
    return text if len(text) <= 40 else "…" + text[-40:]


def notation_of(template: ChatTemplate, row: Conversation, index: int, kwargs: Mapping[str, Any]) -> str:
    """What the template prints of a turn with other words for its texts; "" where it prints its history otherwise."""
    message = row.messages[index]
    parts = (
        replace(one, text=OTHER_WORD) if isinstance(one, Text | Thinking) and one.text.strip() else one
        for one in message.parts
    )
    messages = (*row.messages[:index], replace(message, parts=tuple(parts)))
    try:
        history = template.render(messages[:index], row.tools, **kwargs)
        text = template.render(messages, row.tools, **kwargs)
    except RowError:
        return ""
    return text[len(history) :] if text.startswith(history) else ""
