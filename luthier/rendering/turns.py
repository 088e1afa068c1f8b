"""Where in a rendered text each trained turn lies: the seam, where the model takes over, and the stop, where it ends.

For a trained message k the model sees, at inference, ``prompt = render(messages[:k], add_generation_prompt=True)`` and
must emit the rest of the turn up to its stop token. So the seam is where the prompt ends, and the stop is the last stop
token of the turn's own scope, after its last character of content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luthier.errors import RowError
from luthier.records import Message
from luthier.rendering.control import ControlTokens
from luthier.rendering.template import ChatTemplate, Tools, Traced
from luthier.rendering.tracked import runs

# What templates call the variable that opens or closes thinking: Qwen, GLM, Nemotron; DeepSeek, Granite.
THINKING_SWITCHES = ("enable_thinking", "thinking")
LONGEST_CONTROL_TOKEN = 64  # characters; as far back as a seam looks for one


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The completion of one message in a text: characters ``[seam, end)``, the stop token being ``[stop, end)``."""

    message: int
    seam: int
    stop: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What inference sees before message ``k`` and the text with its turn rendered last.

    ``kwargs`` are the template variables under which the one begins with the other.
    """

    prompt: str
    text: str
    kwargs: Mapping[str, Any]


def context_of(template: ChatTemplate, messages: Sequence[Message], tools: Tools, index: int) -> Context:
    """The inference context of message ``index``.

    Where the template has a thinking switch that the user left open, the position that reproduces this turn is taken.
    Raises `RowError` if no generation prompt is the beginning of the rendered turn: it cannot be trained on what
    inference will show.
    """
    for kwargs in _switches(template):
        prompt = template.render(messages[:index], tools, generation_prompt=True, **kwargs)
        text = template.render(messages[: index + 1], tools, **kwargs)
        if text.startswith(prompt):
            return Context(prompt=prompt, text=text, kwargs=kwargs)
    raise RowError(
        "prompt_not_reproduced",
        f"the generation prompt {_tail(prompt)!r} is not how the rendered turn begins; "
        f"template.kwargs ({' or '.join(THINKING_SWITCHES)}) may contradict this row",
        field=f"messages[{index}]",
    )


def span_of(traced: Traced, control: ControlTokens, message: int, seam: int, *, needs_stop: bool) -> Span:
    """Where the completion of ``message`` ends in a traced text.

    The stop token is, in this order: the last one of the turn's scope after its content; one that follows the scope
    at once (the next header, as in GLM-like templates, or a closing token of the text); the last special token of the
    scope. Raises `RowError` if there is none and the run wants the stop trained.
    """
    begin, scope_end = _last_run_of_scope(traced, message)
    content_end = max(seam, _content_end(traced, begin, scope_end))
    found = list(_scaffold_tokens(traced, control, content_end))
    inside = [(start, end) for start, end, token in found if end <= scope_end and token in control.stops]
    following = [(start, end) for start, end, token in found if start == scope_end and token in control.stops]
    special = [(start, end) for start, end, token in found if end <= scope_end and token in control.special]
    for candidates in (inside, following, special):
        if candidates:
            stop, end = candidates[-1]
            return Span(message=message, seam=seam, stop=stop, end=end)
    if needs_stop:
        raise RowError(
            "no_stop",
            f"the template ends this turn with no stop token ({', '.join(sorted(control.stops)) or 'none is known'}), "
            "so a model trained on it would never stop; set template.train_stop: false to train it all the same",
            field=f"messages[{message}]",
        )
    return Span(message=message, seam=seam, stop=content_end, end=content_end)


def seam_is_safe(traced: Traced, control: ControlTokens, seam: int) -> bool:
    """Whether tokens cannot merge over a seam, whatever the tokenizer.

    At inference a later turn sees the history as one text, so if they could, its tokens would differ from the ones
    that this turn was trained with. A control token ends any run of text; a newline before anything but white space is
    where pre-tokenizers split.
    """
    window = traced.text[max(0, seam - LONGEST_CONTROL_TOKEN) : seam]
    if any(end == len(window) for _, end, _ in control.find(window)):
        return True
    right = traced.text[seam : seam + 1]
    return window.endswith("\n") and not right.isspace()


def _switches(template: ChatTemplate) -> Iterator[dict[str, Any]]:
    yield {}
    for name in THINKING_SWITCHES:
        if name in template.variables and name not in template.kwargs:
            yield {name: False}
            yield {name: True}


def _last_run_of_scope(traced: Traced, message: int) -> tuple[int, int]:
    begin = end = -1
    for start, stop in runs(traced.shadow):
        if traced.owner(start).scope == message:
            begin, end = (begin if start == end else start), stop
    if end < 0:
        raise RowError("not_rendered", "the template prints nothing for this message", field=f"messages[{message}]")
    return begin, end


def _content_end(traced: Traced, begin: int, end: int) -> int:
    spans = runs(traced.shadow[begin:end])
    return max((begin + stop for start, stop in spans if traced.owner(begin + start).field is not None), default=begin)


def _scaffold_tokens(traced: Traced, control: ControlTokens, start: int) -> Iterator[tuple[int, int, str]]:
    for begin, end, token in control.find(traced.text[start:]):
        if is_scaffold(traced, start + begin, start + end, token):
            yield start + begin, start + end, token


def is_scaffold(traced: Traced, start: int, end: int, token: str) -> bool:
    """Whether a control string was written by the template alone; white space it swallows may be anybody's."""
    begin = traced.text.index(token, start, end)
    return all(traced.owners[ord(char)].field is None for char in set(traced.shadow[begin : begin + len(token)]))


def _tail(text: str) -> str:
    return text if len(text) <= 40 else "…" + text[-40:]
