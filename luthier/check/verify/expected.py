"""What inference would see and emit for each trained turn of a row, from plain renders and whole encodes alone.

Nothing of the provenance that training relies on is used. For a trained message ``k``

    prompt      ids(render(messages[:k], add_generation_prompt=True))
    completion  ids(the rest of render(messages[: k + 1]), up to and including the first stop token after the answer)

and the answer's end is where a mark put behind each of the turn's strings comes out last. A turn whose history does not
begin as its prompt does (the prompt opens a thought that history drops) is *asked* only: `runs` reads the sample there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from luthier.check.verify.completions import (
    CompletionReading,
    Finding,
    NeutralRow,
    Said,
    added_text,
    mark_ends,
    neutralise,
    strings_of,
)
from luthier.check.verify.findings import Method
from luthier.check.verify.media_slots import ExpandedTemplate, MediaReader, RowMedia, media_of_messages
from luthier.check.verify.plain_template import PlainTemplate, Printer, thinking_switches
from luthier.check.verify.policy import (
    RowPolicy,
    RunPolicy,
    TurnPolicy,
    WeightArray,
    answer_weights,
    as_rendered,
    row_policy,
)
from luthier.check.verify.reference_tokenizer import Ids, ReferenceTokenizer
from luthier.errors import RowError
from luthier.records import Conversation, Message, Text, Thinking, ToolCall

MARK = "zqendqz"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedTurn:
    """One turn that is learned, as a whole or in part; ``message`` is its index, None in a document.

    ``num_stop``  how many of ``completion``'s last tokens are the stop (0: the template has none)
    ``text``      the prompt, as it was rendered
    ``whole``     ids of prompt and completion encoded as one text, as ``apply_chat_template`` gives them; when asked
    ``after``     what the conversation goes on with, where this turn is rendered in it as it is on its own; when asked
    ``kwargs``    the template variables under which the turn is what its prompt leads to
    ``unfinished``  the row says that its last answer goes on, so nothing ends it
    ``weights``   what each token of ``completion`` counts, the stop as if it were learned; NaN where it cannot be told
    ``findings``  what is wrong with prompt and completion, read as an answer
    ``is_derived``  history renders the turn otherwise, so its completion was read from the sample
    ``elsewhere``   it is learned where it stands in one rendering of the row, and inference would show another context
    ``otherwise``   the turn under other positions of the thinking switch, which inference may have as well
    ``asked``       the turn after the prompts of earlier positions, under which history renders it otherwise
    """

    message: int | None
    prompt: Ids
    completion: Ids
    num_stop: int
    text: str
    whole: Callable[[], Ids]
    after: Callable[[], Ids] | None
    kwargs: Mapping[str, Any]
    policy: TurnPolicy
    weights: WeightArray
    unfinished: bool = False
    findings: tuple[Finding, ...] = ()
    is_derived: bool = False
    elsewhere: bool = False
    otherwise: Callable[[], Iterator[ExpectedTurn]] = lambda: iter(())
    asked: Callable[[], AskedTurn] | None = None

    @property
    def ids(self) -> Ids:
        """Prompt and completion, encoded apart: the model is given the one and emits the other."""
        return np.concatenate([self.prompt, self.completion])

    @property
    def open_end(self) -> bool:
        """The template ends the turn with no stop, so where its answer ends cannot be told."""
        return self.message is not None and not self.num_stop and not self.unfinished


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AskedTurn:
    """A turn of which the prompt is known, and not how the template would print what follows it.

    ``prompts``   the prompt's ids under each position of the thinking switch that the run leaves open; ``texts``: read
    ``readings``  for each of them, what is to be read behind it; its completion is not filled in yet
    ``ending``    what the template prints behind the stop of the row's last turn
    """

    message: int
    prompts: tuple[Ids, ...]
    texts: tuple[str, ...]
    kwargs: tuple[Mapping[str, Any], ...]
    readings: tuple[CompletionReading, ...]
    policy: TurnPolicy
    ending: str
    unfinished: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedRow:
    """All turns of a row that are learned, in order.

    ``neutral``         the conversation as the template is shown it; None for a document
    ``policy``          what of the conversation is learned; None for a document
    ``asked``           turns whose completion no rendering has
    ``text_ids``        ids of the whole conversation, rendered and encoded as one text
    ``template``        the template as it prints this row, its media expanded; None for a document
    ``media``           the row's media; None if it has none
    """

    neutral: NeutralRow | None
    policy: RowPolicy | None
    template: Printer | None = None
    media: RowMedia | None = None
    turns: tuple[ExpectedTurn, ...]
    asked: tuple[AskedTurn, ...] = ()
    text_ids: Ids
    method: Method
    control_strings: Mapping[str, int]


def expected_row(
    row: Conversation,
    own_template: PlainTemplate,
    tokenizer: ReferenceTokenizer,
    run_policy: RunPolicy,
    reader: MediaReader | None = None,
) -> ExpectedRow:
    """Recompute a conversation; ``reader`` is needed for one with media. Raises `RowError` if the template refuses it,
    or an item cannot be used.
    """
    policy = row_policy(row, own_template, run_policy)
    row = as_rendered(row, own_template, run_policy)
    meant = tokenizer.files.control if row.rendered else run_policy.allowed
    neutral = neutralise(row, own_template, tokenizer, meant=meant)
    media = None if reader is None else _read_media(row, neutral, own_template, reader)
    printer: Printer = own_template if media is None else ExpandedTemplate(own_template, media)
    whole_text = printer.render(neutral.messages, neutral.tools)
    shown = _Case(printer, tokenizer, neutral, whole_text)
    turns: list[ExpectedTurn] = []
    asked: list[AskedTurn] = []
    for index, turn_policy in policy.turns.items():
        unfinished = row.continue_final_message and index == len(row.messages) - 1
        try:
            cut, prompts = _cut(shown, index)
        except RowError:
            if _is_unasked(row, index):
                continue  # an answer before any question is context where the template cannot ask for it
            raise
        after = partial(_asked_turn, shown, index, prompts, turn_policy, unfinished=unfinished)
        if run_policy.one_rendering and (once := _cut_elsewhere(shown, index, cut, whole_text)) is not None:
            turns.append(_turn_elsewhere(turn_policy, once, whole_text, shown))
            continue
        if cut is None:
            if not _is_unasked(row, index):
                asked.append(after())
            continue
        if unfinished:
            cut = replace(cut, completion=cut.completion[: cut.words], stop=0, unfinished=True)
            whole_text = cut.prompt + cut.completion
        otherwise = partial(_otherwise, shown, cut, turn_policy, whole_text)
        turn = _expected_turn(turn_policy, cut, whole_text, shown)
        turns.append(replace(turn, otherwise=otherwise, asked=after if prompts else None))
    (text,) = neutral.readable([whole_text], tokenizer)
    return ExpectedRow(
        neutral=neutral,
        policy=policy,
        template=printer,
        media=media,
        turns=tuple(turns),
        asked=tuple(asked),
        text_ids=tokenizer.encode([text], forged=neutral.forged)[0],
        method=neutral.method,
        control_strings=neutral.found,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """A turn as rendered, ``prompt + completion + rest``; ``completion`` ends with a stop of ``stop`` characters.

    ``words``: the characters of ``completion`` up to the end of the row's own.
    """

    message: int
    prompt: str
    completion: str
    stop: int
    kwargs: Mapping[str, Any]
    unfinished: bool = False
    words: int = 0


@dataclass(frozen=True, slots=True)
class _Case:
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

    def header(self, index: int, prompt: str, **kwargs: Any) -> str:
        """What the generation prompt adds to the history, control tokens under their secret names."""
        try:
            history = self.printer.render(self.row.messages[:index], self.row.tools, **kwargs) if index else ""
        except RowError:  # some templates render a history only to ask
            history = ""
        return self.tokenizer.hide(added_text(history, prompt))

    def reading(self, index: int, prompt: str, completion: str, **kwargs: Any) -> CompletionReading:
        """A completion that was rendered, to be read as message ``index``.

        Some templates print no header behind the result of a tool, where inference goes on, and one in the history.
        The model has to write it then, and does: it is part of the prompt that other turns have.
        """
        header, shown = cache(partial(self.header, index, prompt, **kwargs)), self.tokenizer.hide(completion)
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
        )


def _is_unasked(row: Conversation, index: int) -> bool:
    return all(message.role == "system" for message in row.messages[:index])


def _read_media(
    row: Conversation, neutral: NeutralRow, template: PlainTemplate, reader: MediaReader
) -> RowMedia | None:
    media = media_of_messages(row.messages)
    if not media:
        return None
    # placeholders that the row's own text may hold are innocent words here
    return reader.read(media, template.render(neutral.messages, neutral.tools))


def _cut(shown: _Case, index: int) -> tuple[_Cut | None, list[tuple[str, Mapping[str, Any]]]]:
    """The turn under the first switch whose prompt it begins with, and the prompts before that, each with its switch.

    Raises `RowError` if the template refuses what would be shown by default.
    """
    prompts: list[tuple[str, Mapping[str, Any]]] = []
    for kwargs in thinking_switches(shown.printer):
        try:
            prompt = shown.prompt(index, **kwargs)
            found = _cut_under(shown, index, prompt, kwargs)
        except RowError:
            if not kwargs:
                raise
            continue
        if found is not None:
            return found, prompts
        prompts.append((prompt, kwargs))
    return None, prompts


def _cut_under(shown: _Case, index: int, prompt: str, kwargs: Mapping[str, Any]) -> _Cut | None:
    """The turn under one switch; None if it does not begin with its prompt. Raises `RowError`."""
    text = shown.turn(index, **kwargs)
    if not text.startswith(prompt) or not _is_before_answer(shown, index, prompt, kwargs):
        return None
    tail = _behind_answer(shown, index, (), kwargs)
    rest = text[len(prompt) :]
    if tail is None or not rest.endswith(tail):
        tail = rest  # nothing is known of where the answer ends
    cut = _Cut(message=index, prompt=prompt, completion=rest, stop=0, kwargs=kwargs, words=len(rest) - len(tail))
    return _completion(shown, cut, tail)


def _cut_elsewhere(shown: _Case, index: int, own: _Cut | None, whole_text: str) -> _Cut | None:
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
    header = added_text(history, shown.prompt(index))
    for length in range(len(header), 0, -1):
        if length < len(header) and header[length - 1] not in "\n>]":
            continue
        place = whole_text.find(header[:length], begin, len(whole_text) - len(tail))
        if place >= 0 and header[:length].strip():
            seam = place + length
            cut = _Cut(message=index, prompt=whole_text[:seam], completion=whole_text[seam:], stop=0, kwargs={})
            return _completion(shown, cut, tail)
    return None


def _turn_elsewhere(policy: TurnPolicy, cut: _Cut, whole_text: str, shown: _Case) -> ExpectedTurn:
    """Such a turn; thoughts that the template leaves out of it are not looked for."""
    message = shown.row.messages[cut.message]
    left_out = [part for part in message.parts if isinstance(part, Thinking) and part.text not in cut.completion]
    if left_out:
        kept = tuple(part for part in message.parts if part not in left_out)
        messages = list(shown.row.messages)
        messages[cut.message] = replace(message, parts=kept)
        shown = replace(shown, row=replace(shown.row, messages=tuple(messages)))
        policy = replace(
            policy,
            parts=tuple(part for part in policy.parts if not isinstance(part, Thinking)),
            pieces=tuple(piece for piece in policy.pieces if not isinstance(piece[0], Thinking)),
        )
    return replace(_expected_turn(policy, cut, whole_text, shown), elsewhere=True)


def _is_before_answer(shown: _Case, index: int, prompt: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a turn begins with its prompt by the template's doing, and not because its own words do.

    ``<m>\\n`` asks, and ``<m>`` heads the turn in the history: of an answer, ``\\nYes``, the line break is its own.
    """
    message = shown.row.messages[index]
    if not any(text[:1].isspace() or text[:1] in "<[" for text in strings_of(message) if text):
        return True
    marked = (*shown.row.messages[:index], mark_ends(message, MARK, begin=True))
    try:
        return shown.printer.render(marked, shown.row.tools, **kwargs).startswith(prompt)
    except RowError:
        return True


def _otherwise(shown: _Case, first: _Cut, policy: TurnPolicy, whole_text: str) -> Iterator[ExpectedTurn]:
    """The turn under every other position of the switch that its prompt begins under."""
    for kwargs in thinking_switches(shown.printer):
        if kwargs == first.kwargs or first.unfinished:
            continue
        try:
            cut = _cut_under(shown, first.message, shown.prompt(first.message, **kwargs), kwargs)
        except RowError:
            continue
        if cut is not None:
            yield _expected_turn(policy, cut, whole_text, shown)


def _asked_turn(
    shown: _Case,
    index: int,
    prompts: Sequence[tuple[str, Mapping[str, Any]]],
    policy: TurnPolicy,
    *,
    unfinished: bool,
) -> AskedTurn:
    row, tokenizer = shown.row, shown.tokenizer
    ids = tokenizer.encode(row.readable([prompt for prompt, _ in prompts], tokenizer), forged=row.forged)

    def as_decoded(text: str) -> str:
        return tokenizer.normalised_hidden(row.restored(tokenizer.hide(text)))

    said = Said.of(row.messages[index].parts, as_decoded)
    text = shown.turn(index)
    stops = [end for start, end in tokenizer.control_spans(text, 0) if text[start:end] in tokenizer.stops]
    return AskedTurn(
        message=index,
        prompts=tuple(ids),
        texts=tuple(prompt for prompt, _ in prompts),
        kwargs=tuple(kwargs for _, kwargs in prompts),
        readings=tuple(
            CompletionReading(
                header=cache(partial(shown.header, index, prompt, **kwargs)),
                prompt=prompt,
                completion="",
                said=said,
                loosely=row.method is Method.READ_BY_TEMPLATE,
            )
            for prompt, kwargs in prompts
        ),
        policy=policy,
        ending=text[stops[-1] :] if stops and index == len(row.messages) - 1 else "",
        unfinished=unfinished,
    )


def _behind_answer(shown: _Case, index: int, following: tuple[Message, ...], kwargs: Mapping[str, Any]) -> str | None:
    """What the template prints behind the last string of a turn; None if the turn has none, or cannot be marked."""
    messages = shown.row.messages
    marked = (*messages[:index], mark_ends(messages[index], MARK), *following)
    try:
        _, mark, behind = shown.printer.render(marked, shown.row.tools, **kwargs).rpartition(MARK)
    except RowError:
        return None
    return behind if mark else None


def _completion(shown: _Case, cut: _Cut, tail: str) -> _Cut:
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


def _stop_before_next(shown: _Case, cut: _Cut, tail: str) -> str | None:
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


def _continued(text: str, shown: _Case) -> Ids:
    (readable,) = shown.row.readable([text], shown.tokenizer)
    return shown.tokenizer.continue_text([readable], forged=shown.row.forged)[0]


def _expected_turn(policy: TurnPolicy, cut: _Cut, whole_text: str, shown: _Case) -> ExpectedTurn:
    neutral, tokenizer = shown.row, shown.tokenizer
    text = cut.prompt + cut.completion
    after_text = whole_text[len(text) :] if whole_text.startswith(text) else None
    body = cut.completion[: len(cut.completion) - cut.stop]
    stop_text = cut.completion[len(body) :]
    (prompt,) = tokenizer.encode(neutral.readable([cut.prompt], tokenizer), forged=neutral.forged)
    readable, shown_stop = neutral.readable([cut.completion, stop_text], tokenizer)
    completion, stop = tokenizer.continue_text([readable, shown_stop], forged=neutral.forged)
    reading = shown.reading(cut.message, cut.prompt, body, **cut.kwargs)
    return ExpectedTurn(
        message=cut.message,
        prompt=prompt,
        completion=completion,
        num_stop=len(stop),
        text=cut.prompt,
        whole=cache(lambda: tokenizer.encode(neutral.readable([text], tokenizer), forged=neutral.forged)[0]),
        after=None if after_text is None else cache(partial(_continued, after_text, shown)),
        kwargs=cut.kwargs,
        policy=policy,
        unfinished=cut.unfinished,
        weights=answer_weights(policy, completion, readable, tokenizer, forged=neutral.forged),
        findings=tuple(reading.faults()),
    )
