"""A turn of a rendered conversation, cut into what inference shows and what the model emits: prompt and completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from luthier.check.verify import Method
from luthier.check.verify.completions import CompletionReading, NeutralRow, Said, strings_of
from luthier.check.verify.plain_template import Printer, thinking_switches
from luthier.check.verify.policy import changed_strings
from luthier.check.verify.reference_tokenizer import Ids, ReferenceTokenizer
from luthier.errors import RowError
from luthier.records import Message, Text, Thinking, ToolCall

MARK = "zqendqz"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A turn as rendered, ``prompt + completion + rest``; ``completion`` ends with a stop of ``stop`` characters.

    ``words``: the characters of ``completion`` up to the end of the row's own. ``in_row``: it is cut out of
    the rendering of the whole row, behind its ``header`` there. ``history``: what stands before it as rendered, where
    that is not the prompt.
    """

    message: int
    prompt: str
    completion: str
    stop: int
    kwargs: Mapping[str, Any]
    unfinished: bool = False
    words: int = 0
    in_row: bool = False
    header: str = ""
    history: str = ""

    def behind_prompt(self, text: str) -> str:
        """A rendering of the turn with other words, behind the prompt."""
        is_history = self.history and text.startswith(self.history)
        return self.prompt + text[len(self.history) :] if is_history else text


@dataclass(frozen=True, slots=True)
class RenderedCase:
    """A row as its template is shown it, and what turns text into ids."""

    printer: Printer
    tokenizer: ReferenceTokenizer
    row: NeutralRow
    whole_text: str

    def prompt(self, index: int, **kwargs: Any) -> str:
        """What inference shows before message ``index``."""
        return self.printer.render(self.row.messages[:index], self.row.tools, generation_prompt=True, **kwargs)

    def turn(self, index: int, **kwargs: Any) -> str:
        """The conversation up to and including message ``index``."""
        if index == len(self.row.messages) - 1 and not kwargs:
            return self.whole_text
        return self.printer.render(self.row.messages[: index + 1], self.row.tools, **kwargs)

    def continued(self, text: str) -> Ids:
        """The ids of a rendered text that follows another one."""
        (readable,) = self.row.readable([text], self.tokenizer)
        return self.tokenizer.continue_text([readable], forged=self.row.forged)[0]

    def header(self, index: int, prompt: str, **kwargs: Any) -> str:
        """What the generation prompt adds to the history, control tokens under their secret names."""
        try:
            history = self.printer.render(self.row.messages[:index], self.row.tools, **kwargs) if index else ""
        except RowError:  # some templates render a history only to ask
            history = ""
        return self.tokenizer.hide(_added_text(history, prompt))

    def reading(self, cut: Cut, completion: str) -> CompletionReading:
        """The completion of a turn that was rendered, without its stop, to be read as the turn's message.

        Some templates print no header behind the result of a tool, where inference goes on, and one in the history.
        The model has to write it then, and does: it is part of the prompt that other turns have.
        """
        index, prompt, kwargs = cut.message, cut.prompt, cut.kwargs
        header, shown = cache(partial(self.header, index, prompt, **kwargs)), self.tokenizer.hide(completion)
        if cut.in_row:
            header = cache(partial(self.tokenizer.hide, cut.header))
        if index and self.row.messages[index - 1].role == "tool" and not header().strip():
            question = next((i for i, message in enumerate(self.row.messages) if message.role == "user"), None)
            if question is not None and question + 1 < index:
                asked = self.prompt(question + 1, **kwargs)
                usual = self.header(question + 1, asked, **kwargs)
                if usual.strip() and shown.startswith(usual):
                    header, prompt, shown = cache(lambda: usual), asked, shown[len(usual) :]
        return CompletionReading(
            header=header,
            prompt=prompt,
            completion=shown,
            said=Said.of(self.row.messages[index].parts, self.tokenizer.hide),
            loosely=self.row.method is Method.READ_BY_TEMPLATE,
            notation=cache(partial(self._notation, cut)),
        )

    def _notation(self, cut: Cut) -> str:
        """What the template prints of a turn with another word for each of its texts; "" where that is unclear."""
        message = self.row.messages[cut.message]
        parts = tuple(replace(one, text=MARK) if isinstance(one, Text | Thinking) else one for one in message.parts)
        messages = (*self.row.messages[: cut.message], replace(message, parts=parts))
        try:
            text = cut.behind_prompt(self.printer.render(messages, self.row.tools, **cut.kwargs))
        except RowError:
            return ""
        return self.tokenizer.hide(text[len(cut.prompt) :]) if text.startswith(cut.prompt) else ""


def cut_turn(shown: RenderedCase, index: int) -> tuple[Cut | None, list[tuple[str, Mapping[str, object]]]]:
    """The turn under the first switch whose prompt it begins with, and the prompts before that, each with its switch.

    Raises `RowError` if the template refuses what would be shown by default.
    """
    prompts: list[tuple[str, Mapping[str, object]]] = []
    for kwargs in thinking_switches(shown.printer):
        try:
            prompt = shown.prompt(index, **kwargs)
            found = cut_under(shown, index, prompt, kwargs)
        except RowError:
            if not kwargs:
                raise
            continue
        if found is not None:
            return found, prompts
        prompts.append((prompt, kwargs))
    return None, prompts


def cut_under(shown: RenderedCase, index: int, prompt: str, kwargs: Mapping[str, object]) -> Cut | None:
    """The turn under one switch; None if it does not begin with its prompt. Raises `RowError`."""
    text = shown.turn(index, **kwargs)
    history = prompt if text.startswith(prompt) else _history_without_header(shown, index, prompt, text, kwargs)
    if history is None or not _is_before_answer(shown, index, history, kwargs):
        return None
    tail = _behind_answer(shown, index, (), kwargs)
    rest = text[len(history) :]
    if tail is None or not rest.endswith(tail):
        tail = rest  # nothing is known of where the answer ends
    cut = Cut(
        message=index,
        prompt=prompt,
        completion=rest,
        stop=0,
        kwargs=kwargs,
        words=len(rest) - len(tail),
        history="" if history == prompt else history,
    )
    return _completion(shown, cut, tail)


def _history_without_header(
    shown: RenderedCase, index: int, prompt: str, text: str, kwargs: Mapping[str, Any]
) -> str | None:
    """What a turn has before it as rendered, where prompts add nothing to the messages and the template prints these
    otherwise once a turn follows (Mistral has the system message in the newest question, and in no answered one).

    ``…[INST] Be brief. Hi[/INST]`` asks, ``…[INST] Hi[/INST] Yes.</s>`` is the turn: its history ends with what
    stands behind the last words of the message before it. None for any other template.
    """
    if not index or prompt != shown.printer.render(shown.row.messages[:index], shown.row.tools, **kwargs):
        return None
    asked = _behind_answer(shown, index - 1, (), kwargs)
    said = _behind_answer(shown, index - 1, shown.row.messages[index : index + 1], kwargs)
    if asked is None or said is None or not said.startswith(asked) or not text.endswith(said):
        return None
    return text[: len(text) - len(said) + len(asked)]


def cut_elsewhere(shown: RenderedCase, index: int, own: Cut | None, whole_text: str) -> Cut | None:
    """The turn as one rendering of the row has it, where that is another text than inference's (``own``); None where it
    is the same, or has no header there.

    It begins behind its header, which is what the generation prompt adds to the history; of one that goes on (an opened
    thought) as much as stands between the message before it and its own end, up to the end of a line or a tag.
    """
    if own is not None and whole_text.startswith(own.prompt + own.completion[: len(own.completion) - own.stop]):
        return None
    messages = shown.row.messages
    tail = _behind_answer(shown, index, messages[index + 1 :], {})
    if tail is None or not whole_text.endswith(tail):
        return None
    begin = 0
    for before in range(index - 1, -1, -1):
        behind = _behind_answer(shown, before, messages[before + 1 :], {})
        if behind is not None and whole_text.endswith(behind):
            begin = len(whole_text) - len(behind)
            break
    history = shown.printer.render(messages[:index], shown.row.tools) if index else ""
    header = _added_text(history, shown.prompt(index))
    if not header:
        behind = _behind_answer(shown, index - 1, (), {}) if index else None
        seam = begin + len(behind or "")
        if behind is None or not whole_text.startswith(behind, begin):
            return None
        return _cut_at(shown, index, whole_text, seam, tail, header)
    for length in range(len(header), 0, -1):
        if length < len(header) and header[length - 1] not in "\n>]":
            continue
        place = whole_text.find(header[:length], begin, len(whole_text) - len(tail))
        if place >= 0 and header[:length].strip():
            return _cut_at(shown, index, whole_text, place + length, tail, header[:length])
    return None


def _cut_at(shown: RenderedCase, index: int, whole_text: str, seam: int, tail: str, header: str) -> Cut:
    prompt, rest = whole_text[:seam], whole_text[seam:]
    cut = Cut(message=index, prompt=prompt, completion=rest, stop=0, kwargs={}, in_row=True, header=header)
    return _completion(shown, cut, tail)


def _is_before_answer(shown: RenderedCase, index: int, prompt: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a turn begins with its prompt by the template's doing, and not because its own words do.

    ``<m>\\n`` asks, and ``<m>`` heads the turn in the history: of an answer, ``\\nYes``, the line break is its own.
    """
    message = shown.row.messages[index]
    if not any(text[:1].isspace() or text[:1] in "<[" for text in strings_of(message) if text):
        return True
    marked = (*shown.row.messages[:index], _mark_ends(message, begin=True))
    try:
        return shown.printer.render(marked, shown.row.tools, **kwargs).startswith(prompt)
    except RowError:
        return True


def _behind_answer(
    shown: RenderedCase, index: int, following: tuple[Message, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """What the template prints behind the last string of a turn, or behind a text where it prints none of the turn's;
    None if the turn cannot be marked."""
    messages = shown.row.messages
    marked = _mark_ends(messages[index])
    tried = [marked, _with_ids_of(messages[index], marked)]  # some templates ask how long an id is
    if not any(isinstance(part, ToolCall) for part in marked.parts):
        tried.append(replace(messages[index], parts=(*messages[index].parts, Text(text=MARK))))
    for one in tried:
        try:
            text = shown.printer.render((*messages[:index], one, *following), shown.row.tools, **kwargs)
        except RowError:
            continue
        _, mark, behind = text.rpartition(MARK)
        if mark:
            return behind
    return None


def _with_ids_of(message: Message, marked: Message) -> Message:
    parts = tuple(
        replace(part, id=own.id) if isinstance(part, ToolCall) and isinstance(own, ToolCall) else part
        for part, own in zip(marked.parts, message.parts, strict=True)
    )
    return replace(marked, parts=parts, tool_call_id=message.tool_call_id)


def _completion(shown: RenderedCase, cut: Cut, tail: str) -> Cut:
    """``cut`` with its completion shortened to the end of its stop, or with a stop put behind it.

    The stop is the first stop token in ``tail``, which stands behind the answer; else the one with which the template
    goes on where another turn follows (as in GLM, where the next header ends the turn); else the last special token of
    the turn, which the check of stops will report.
    """
    files, rest = shown.tokenizer.files, cut.completion
    found = shown.tokenizer.control_spans(rest, len(rest) - len(tail))
    for start, end in found:
        if rest[start:end] in shown.tokenizer.stops:
            return replace(cut, completion=rest[:end], stop=end - start)
    following = _stop_before_next(shown, cut, tail)
    if following is not None:
        stop = following.rstrip() if following.strip() in shown.tokenizer.stops else following
        before = len(following) - len(following.lstrip())
        return replace(cut, completion=rest + stop, stop=len(stop) - before)
    special = [(start, end) for start, end in found if rest[start:end] in files.special]
    if special:
        start, end = special[-1]
        return replace(cut, completion=rest[:end], stop=end - start)
    return cut


def _stop_before_next(shown: RenderedCase, cut: Cut, tail: str) -> str | None:
    """What ends this turn where another one follows (the row's own, or one made up), up to and with a stop token."""
    index, tokenizer = cut.message, shown.tokenizer
    calls = any(isinstance(part, ToolCall) for part in shown.row.messages[index].parts)
    made_up = Message(role="tool" if calls else "user", parts=(Text(text="…"),))
    for following, kwargs in ((shown.row.messages[index + 1 : index + 2], {}), ((made_up,), cut.kwargs)):
        behind = _behind_answer(shown, index, following, kwargs) if following else None
        if behind is None or not behind.startswith(tail):
            continue
        spans = tokenizer.control_spans(behind, len(tail))
        if spans and not behind[len(tail) : spans[0][0]].strip() and behind[slice(*spans[0])] in tokenizer.stops:
            return behind[len(tail) : spans[0][1]]
    return None


def _added_text(history: str, prompt: str) -> str:
    """What a prompt has behind the history; where it rewrites it, what stands behind their common beginning.

    A tag that both begin with is given back whole: ``<a>x<eos>``, ``<a>x<think>`` -> ``<think>``.
    """
    common = next(
        (at for at, (one, two) in enumerate(zip(history, prompt, strict=False)) if one != two),
        min(len(history), len(prompt)),
    )
    if common < len(history):
        opening = max(prompt.rfind(bracket, max(0, common - 40), common) for bracket in "<[")
        if opening >= 0 and not set(prompt[opening:common]) & set(">] \n"):
            common = opening
    return prompt[common:]


def _mark_ends(message: Message, *, begin: bool = False) -> Message:
    """The message with `MARK` after each of its strings that says something, or before it."""
    return changed_strings(message, lambda text: (MARK + text if begin else text + MARK) if text.strip() else text)
