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

from luthier.check.verify import Check, Method
from luthier.check.verify.completions import CompletionReading, Finding, NeutralRow, Said, neutralise
from luthier.check.verify.cuts import Cut, RenderedCase, cut_elsewhere, cut_turn, cut_under
from luthier.check.verify.media_slots import ExpandedTemplate, MediaReader, RowMedia, media_of_messages
from luthier.check.verify.plain_template import PlainTemplate, Printer, thinking_switches
from luthier.check.verify.policy import RowPolicy, RunPolicy, TurnPolicy, as_rendered, row_policy
from luthier.check.verify.reference_tokenizer import Ids, ReferenceTokenizer
from luthier.check.verify.weights import WeightArray, answer_weights, owned_text
from luthier.errors import RowError
from luthier.records import Conversation, Message, Thinking


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
    ``is_unasked``  it comes before any question, so that it need not be learned
    """

    message: int
    prompts: tuple[Ids, ...]
    texts: tuple[str, ...]
    kwargs: tuple[Mapping[str, Any], ...]
    readings: tuple[CompletionReading, ...]
    policy: TurnPolicy
    ending: str
    unfinished: bool
    is_unasked: bool = False


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
    printed = _placeholders(row, tokenizer, reader)
    neutral = neutralise(row, own_template, tokenizer, meant=meant, placeholders=printed)
    media = None if reader is None else _read_media(row, neutral, own_template, reader)
    printer: Printer = own_template if media is None else ExpandedTemplate(own_template, media)
    whole_text = printer.render(neutral.messages, neutral.tools)
    shown = RenderedCase(printer, tokenizer, neutral, whole_text)
    turns: list[tuple[Cut, ExpectedTurn]] = []
    asked: list[AskedTurn] = []
    for index, turn_policy in policy.turns.items():
        unfinished = row.continue_final_message and index == len(row.messages) - 1
        is_unasked = all(message.role == "system" for message in row.messages[:index])
        try:
            cut, prompts = cut_turn(shown, index)
        except RowError:
            if is_unasked:
                continue  # an answer before any question is context where the template cannot ask for it
            raise
        after = partial(_asked_turn, shown, index, prompts, turn_policy, unfinished=unfinished)
        if run_policy.one_rendering and (once := cut_elsewhere(shown, index, cut, whole_text)) is not None:
            turn = _turn_elsewhere(turn_policy, once, whole_text, shown)
            turns.append((once, _behind_answers(turn, once, turns, shown)))
            continue
        if cut is None:
            asked.append(replace(after(), is_unasked=is_unasked))
            continue
        if unfinished:
            cut = replace(cut, completion=cut.completion[: cut.words], stop=0, unfinished=True)
            whole_text = cut.prompt + cut.completion
        otherwise = partial(_otherwise, shown, cut, turn_policy, whole_text)
        turn = _expected_turn(turn_policy, cut, whole_text, shown)
        if is_unasked and any(check is Check.NOTHING_SUPPLIED_TRAINED for check, _ in turn.findings):
            continue  # its prompt gives no header, so it is context
        turn = replace(turn, otherwise=otherwise, asked=after if prompts else None)
        turns.append((cut, _behind_answers(turn, cut, turns, shown) if run_policy.one_rendering else turn))
    (text,) = neutral.readable([whole_text], tokenizer)
    return ExpectedRow(
        neutral=neutral,
        policy=policy,
        template=printer,
        media=media,
        turns=tuple(turn for _, turn in turns),
        asked=tuple(asked),
        text_ids=tokenizer.encode([text], forged=neutral.forged)[0],
        method=neutral.method,
        control_strings=neutral.found,
    )


def expected_prompt(
    row: Conversation,
    own_template: PlainTemplate,
    tokenizer: ReferenceTokenizer,
    run_policy: RunPolicy,
    reader: MediaReader | None,
) -> tuple[Ids, NeutralRow]:
    """What inference shows of a conversation that ends before an answer, and the row as it was rendered for that.
    Raises `RowError` as `expected_row` does."""
    row = as_rendered(row, own_template, run_policy)
    meant = tokenizer.files.control if row.rendered else run_policy.allowed
    printed = _placeholders(row, tokenizer, reader)
    neutral = neutralise(row, own_template, tokenizer, meant=meant, placeholders=printed)
    media = None if reader is None else _read_media(row, neutral, own_template, reader)
    printer: Printer = own_template if media is None else ExpandedTemplate(own_template, media)
    prompt = RenderedCase(printer, tokenizer, neutral, "").prompt(len(neutral.messages))
    return tokenizer.encode(neutral.readable([prompt], tokenizer), forged=neutral.forged)[0], neutral


def _placeholders(row: Conversation, tokenizer: ReferenceTokenizer, reader: MediaReader | None) -> frozenset[str]:
    """What stands for the media of a row in what the template prints, where it is no control token."""
    if reader is None or not media_of_messages(row.messages):
        return frozenset()
    return frozenset(reader.slots.tokens.values()) - tokenizer.files.control


def _read_media(
    row: Conversation, neutral: NeutralRow, template: PlainTemplate, reader: MediaReader
) -> RowMedia | None:
    media = media_of_messages(row.messages)
    if not media:
        return None
    # placeholders that the row's own text may hold are innocent words here
    return reader.read(media, template.render(neutral.messages, neutral.tools))


def _turn_elsewhere(policy: TurnPolicy, cut: Cut, whole_text: str, shown: RenderedCase) -> ExpectedTurn:
    """Such a turn; thoughts that the template leaves out of it are not looked for."""
    turn = replace(_expected_turn(policy, cut, whole_text, shown), elsewhere=True)
    message = shown.row.messages[cut.message]
    kept = tuple(part for part in message.parts if not isinstance(part, Thinking))
    if turn.findings and len(kept) < len(message.parts):
        messages = list(shown.row.messages)
        messages[cut.message] = replace(message, parts=kept)
        shown = replace(shown, row=replace(shown.row, messages=tuple(messages)))
        policy = replace(
            policy,
            parts=tuple(part for part in policy.parts if not isinstance(part, Thinking)),
            pieces=tuple(piece for piece in policy.pieces if not isinstance(piece[0], Thinking)),
        )
        without = replace(_expected_turn(policy, cut, whole_text, shown), elsewhere=True)
        return turn if without.findings else without
    return turn


def _behind_answers(
    turn: ExpectedTurn, cut: Cut, turns: Sequence[tuple[Cut, ExpectedTurn]], shown: RenderedCase
) -> ExpectedTurn:
    """A turn of one rendering with its context as it is learned there: where the tokenizer would join an earlier answer
    with its header, which the model never does, the two are apart."""
    earlier = [
        (before.prompt, before.prompt + before.completion, one)
        for before, one in turns
        if cut.prompt.startswith(before.prompt + before.completion)
    ]
    if all(np.array_equal(one.whole(), one.ids) for _, _, one in earlier):
        return turn
    row, tokenizer, pieces, place = shown.row, shown.tokenizer, list[Ids](), 0
    for prompt, text, one in (*earlier, (cut.prompt, cut.prompt, turn)):
        (between,) = row.readable([prompt[place:]], tokenizer)
        encode = partial(tokenizer.continue_text, behind=pieces[-1]) if pieces else tokenizer.encode
        pieces += [encode([between], forged=row.forged)[0], one.completion]
        place = len(text)
    return replace(turn, prompt=np.concatenate(pieces[:-1]), elsewhere=True)


def _otherwise(shown: RenderedCase, first: Cut, policy: TurnPolicy, whole_text: str) -> Iterator[ExpectedTurn]:
    """The turn under every other position of the switch that its prompt begins under."""
    for kwargs in thinking_switches(shown.printer):
        if kwargs == first.kwargs or first.unfinished:
            continue
        try:
            cut = cut_under(shown, first.message, shown.prompt(first.message, **kwargs), kwargs)
        except RowError:
            continue
        if cut is not None:
            yield _expected_turn(policy, cut, whole_text, shown)


def _asked_turn(
    shown: RenderedCase,
    index: int,
    prompts: Sequence[tuple[str, Mapping[str, object]]],
    policy: TurnPolicy,
    *,
    unfinished: bool,
) -> AskedTurn:
    row, tokenizer = shown.row, shown.tokenizer
    ids = tokenizer.encode(row.readable([prompt for prompt, _ in prompts], tokenizer), forged=row.forged)

    def as_decoded(text: str) -> str:
        (ids,) = tokenizer.encode([row.restored(tokenizer.hide(text))], forged=True)
        return tokenizer.read(ids)

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


def _expected_turn(policy: TurnPolicy, cut: Cut, whole_text: str, shown: RenderedCase) -> ExpectedTurn:
    neutral, tokenizer = shown.row, shown.tokenizer
    text = cut.prompt + cut.completion
    after_text = whole_text[len(text) :] if whole_text.startswith(text) else None
    body = cut.completion[: len(cut.completion) - cut.stop]
    stop_text = cut.completion[len(body) :]
    (prompt,) = tokenizer.encode(neutral.readable([cut.prompt], tokenizer), forged=neutral.forged)
    readable, shown_stop = neutral.readable([cut.completion, stop_text], tokenizer)
    completion, stop = tokenizer.continue_text([readable, shown_stop], prompt, forged=neutral.forged)
    reading = shown.reading(cut, body)
    message, following = neutral.messages[cut.message], neutral.messages[cut.message + 1 :] if cut.in_row else ()

    def render(marked: Message) -> str:
        messages = (*neutral.messages[: cut.message], marked, *following)
        return cut.behind_prompt(shown.printer.render(messages, neutral.tools, **cut.kwargs))

    owned = owned_text(policy, message, render, (cut.prompt, cut.completion), neutral, tokenizer)
    return ExpectedTurn(
        message=cut.message,
        prompt=prompt,
        completion=completion,
        num_stop=len(stop),
        text=cut.prompt,
        whole=cache(lambda: tokenizer.encode(neutral.readable([text], tokenizer), forged=neutral.forged)[0]),
        after=None if after_text is None else cache(partial(shown.continued, after_text)),
        kwargs=cut.kwargs,
        policy=policy,
        unfinished=cut.unfinished,
        weights=answer_weights(
            policy, completion, readable, tokenizer, forged=neutral.forged, owned=owned, behind=prompt
        ),
        findings=tuple(reading.faults()),
    )
