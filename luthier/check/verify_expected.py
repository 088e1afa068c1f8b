"""What inference would see and emit for each trained turn of a row, from plain renders and whole encodes alone.

Nothing of the provenance that training relies on is used. For a trained message ``k``

    prompt      ids(render(messages[:k], add_generation_prompt=True))
    completion  ids(the rest of render(messages[: k + 1]), up to and including the first stop token after the answer)

and the answer's end is where a mark put behind each of the turn's strings comes out last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from luthier.check.verify_neutral import NeutralRow, mark_ends, neutralise
from luthier.check.verify_policy import RowPolicy, TurnPolicy, as_rendered, row_policy
from luthier.check.verify_records import Method
from luthier.check.verify_template import MediaReader, PlainTemplate, RowMedia, expanded
from luthier.check.verify_tokens import Ids, ReferenceTokenizer
from luthier.check.verify_weights import Weights, token_weights
from luthier.errors import RowError
from luthier.records import Conversation, Message, Text, ToolCall
from luthier.rendering.media_slots import media_of
from luthier.rendering.openings import empty_thought
from luthier.rendering.targets import TargetPolicy
from luthier.rendering.template import ChatTemplate
from luthier.rendering.turns import THINKING_SWITCHES

MARK = "zqendqz"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedTurn:
    """One turn that is learned, as a whole or in part; ``message`` is its index, None in a document.

    ``num_stop``  how many of ``completion``'s last tokens are the stop (0: the template has none)
    ``whole``     ids of prompt and completion encoded as one text, as ``apply_chat_template`` gives them
    ``after``     what the conversation goes on with, where this turn is rendered in it as it is on its own
    ``kwargs``    the template variables under which the turn is what its prompt leads to
    ``unfinished``  the row says that its last answer goes on, so nothing ends it
    ``weights``   what each token of ``completion`` counts, the stop as if it were learned; NaN where it cannot be told
    """

    message: int | None
    prompt: Ids
    completion: Ids
    num_stop: int
    whole: Ids
    after: Ids | None
    kwargs: Mapping[str, Any]
    policy: TurnPolicy
    weights: Weights
    unfinished: bool = False

    @property
    def ids(self) -> Ids:
        """Prompt and completion, encoded apart: the model is given the one and emits the other."""
        return np.concatenate([self.prompt, self.completion])

    @property
    def open_end(self) -> bool:
        """The template ends the turn with no stop, so where its answer ends cannot be told."""
        return self.message is not None and not self.num_stop and not self.unfinished


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpectedRow:
    """All turns of a row that are learned, in order.

    ``neutral``         the conversation as the template is shown it; None for a document
    ``policy``          what of the conversation is learned; None for a document
    ``not_reproduced``  turns to which no generation prompt leads
    ``text_ids``        ids of the whole conversation, rendered and encoded as one text
    ``template``        the template as it prints this row, its media expanded; None for a document
    ``media``           the row's media; None if it has none
    """

    neutral: NeutralRow | None
    policy: RowPolicy | None
    template: PlainTemplate | None = None
    media: RowMedia | None = None
    turns: tuple[ExpectedTurn, ...]
    not_reproduced: tuple[int, ...]
    text_ids: Ids
    method: Method
    control_strings: Mapping[str, int]


def expected_row(
    row: Conversation,
    own_template: ChatTemplate,
    tokenizer: ReferenceTokenizer,
    target_policy: TargetPolicy,
    reader: MediaReader | None = None,
) -> ExpectedRow:
    """Recompute a conversation; ``reader`` is needed for one with media. Raises `RowError` if the template refuses it,
    or an item cannot be used.
    """
    policy = row_policy(row, own_template, target_policy)
    row = as_rendered(row, own_template, target_policy)
    meant = tokenizer.control.tokens if row.rendered else target_policy.allowed
    neutral = neutralise(row, own_template, tokenizer, meant=meant)
    media = None if reader is None else _read_media(row, neutral, own_template, reader)
    template = expanded(own_template, media)
    whole_text = template.render(neutral.messages, neutral.tools)
    turns, not_reproduced = [], []
    for index, turn_policy in policy.turns.items():
        is_unasked = all(message.role == "system" for message in neutral.messages[:index])
        try:
            cut = _cut(template, tokenizer, neutral, index)
        except RowError:
            if not is_unasked:
                raise
            cut = None
        if cut is None and is_unasked:
            continue  # an answer before any question is context where the template cannot ask for it
        if cut is None:
            not_reproduced.append(index)
        else:
            if row.continue_final_message and index == len(row.messages) - 1:
                cut = replace(cut, completion=cut.completion[: len(cut.completion) - cut.stop], stop=0, unfinished=True)
                whole_text = cut.prompt + cut.completion
            turns.append(_expected_turn(turn_policy, cut, whole_text, neutral, tokenizer))
    (text,) = neutral.readable([whole_text], tokenizer)
    return ExpectedRow(
        neutral=neutral,
        policy=policy,
        template=template,
        media=media,
        turns=tuple(turns),
        not_reproduced=tuple(not_reproduced),
        text_ids=tokenizer.encode([text], forged=neutral.forged)[0],
        method=neutral.method,
        control_strings=neutral.found,
    )


def answer_weights(policy: TurnPolicy, ids: Ids, text: str, tokenizer: ReferenceTokenizer, *, forged: bool) -> Weights:
    """What each of ``ids`` counts, which are ``text`` as the model emits it; float32[T]."""
    if policy.uniform:
        return np.full(len(ids), policy.scaffold, dtype=np.float32)
    return token_weights(text, tokenizer.continued_spans(text, forged=forged), policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """A turn as rendered, ``prompt + completion + rest``; ``completion`` ends with a stop of ``stop`` characters."""

    message: int
    prompt: str
    completion: str
    stop: int
    kwargs: Mapping[str, Any]
    unfinished: bool = False


def _read_media(row: Conversation, neutral: NeutralRow, template: ChatTemplate, reader: MediaReader) -> RowMedia | None:
    media = media_of(row.messages)
    if not media:
        return None
    # placeholders that the row's own text may hold are innocent words here
    return reader.read(media, template.render(neutral.messages, neutral.tools))


def _cut(template: PlainTemplate, tokenizer: ReferenceTokenizer, row: NeutralRow, index: int) -> _Cut | None:
    """The turn under the first switch that reproduces it; None if there is none."""
    history, turn = row.messages[:index], row.messages[: index + 1]
    for kwargs in _switches(template):
        prompt = template.render(history, row.tools, generation_prompt=True, **kwargs)
        text = template.render(turn, row.tools, **kwargs)
        if not kwargs and (thought := empty_thought(prompt, text)) is not None:
            at, written = thought
            text = text[:at] + written + text[at:]
        if text.startswith(prompt):
            break
    else:
        return None
    tail = _behind_answer(template, row, index, (), kwargs)
    rest = text[len(prompt) :]
    if tail is None or not rest.endswith(tail):
        tail = rest  # nothing is known of where the answer ends
    cut = _Cut(message=index, prompt=prompt, completion=rest, stop=0, kwargs=kwargs)
    return _completion(template, tokenizer, row, cut, tail)


def _switches(template: PlainTemplate) -> Iterator[dict[str, Any]]:
    yield {}
    for name in THINKING_SWITCHES:
        if name in template.variables and name not in template.kwargs:
            yield from ({name: False}, {name: True})


def _behind_answer(
    template: PlainTemplate, row: NeutralRow, index: int, following: tuple[Message, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """What the template prints behind the last string of a turn; None if the turn has none, or cannot be marked."""
    marked = (*row.messages[:index], mark_ends(row.messages[index], MARK), *following)
    try:
        _, mark, behind = template.render(marked, row.tools, **kwargs).rpartition(MARK)
    except RowError:
        return None
    return behind if mark else None


def _completion(template: PlainTemplate, tokenizer: ReferenceTokenizer, row: NeutralRow, cut: _Cut, tail: str) -> _Cut:
    """``cut`` with its completion shortened to the end of its stop, or with a stop put behind it.

    The stop is the first stop token in ``tail``, which stands behind the answer; else the one with which the next turn
    opens (as in GLM, where the next header ends the turn); else the last special token of the turn, which the check of
    stops will report.
    """
    control, rest = tokenizer.control, cut.completion
    found = _control_spans(tokenizer, rest, len(rest) - len(tail))
    for start, end in found:
        if rest[start:end] in control.stops:
            return replace(cut, completion=rest[:end], stop=end - start)
    following = _next_header(template, tokenizer, row, cut, tail)
    if following is not None:
        return replace(cut, completion=rest + following, stop=len(following))
    special = [(start, end) for start, end in found if rest[start:end] in control.special]
    if special:
        start, end = special[-1]
        return replace(cut, completion=rest[:end], stop=end - start)
    return cut


def _next_header(
    template: PlainTemplate, tokenizer: ReferenceTokenizer, row: NeutralRow, cut: _Cut, tail: str
) -> str | None:
    """The stop token with which the turn after this one opens: the row's own next turn, or one made up."""
    index = cut.message
    calls = any(isinstance(part, ToolCall) for part in row.messages[index].parts)
    made_up = Message(role="tool" if calls else "user", parts=(Text(text="…"),))
    for following, kwargs in ((row.messages[index + 1 : index + 2], {}), ((made_up,), cut.kwargs)):
        behind = _behind_answer(template, row, index, following, kwargs)
        if behind is None or not behind.startswith(tail):
            continue
        spans = _control_spans(tokenizer, behind, len(tail))
        if spans and spans[0][0] == len(tail):
            start, end = spans[0]
            if behind[start:end] in tokenizer.control.stops:
                return behind[start:end]
    return None


def _control_spans(tokenizer: ReferenceTokenizer, text: str, start: int) -> list[tuple[int, int]]:
    spans = []
    for token in tokenizer.control_strings(text[start:]):
        begin = text.index(token, start)
        start = begin + len(token)
        spans.append((begin, start))
    return spans


def _expected_turn(
    policy: TurnPolicy, cut: _Cut, whole_text: str, neutral: NeutralRow, tokenizer: ReferenceTokenizer
) -> ExpectedTurn:
    text = cut.prompt + cut.completion
    after_text = whole_text[len(text) :] if whole_text.startswith(text) else None
    stop_text = cut.completion[len(cut.completion) - cut.stop :]
    prompt, whole = tokenizer.encode(neutral.readable([cut.prompt, text], tokenizer), forged=neutral.forged)
    readable, *rest = neutral.readable([cut.completion, stop_text, after_text or ""], tokenizer)
    completion, stop, after = tokenizer.continue_text([readable, *rest], forged=neutral.forged)
    return ExpectedTurn(
        message=cut.message,
        prompt=prompt,
        completion=completion,
        num_stop=len(stop),
        whole=whole,
        after=None if after_text is None else after,
        kwargs=cut.kwargs,
        policy=policy,
        unfinished=cut.unfinished,
        weights=answer_weights(policy, completion, readable, tokenizer, forged=neutral.forged),
    )
