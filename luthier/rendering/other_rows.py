"""Rows that are rendered in another way than a conversation that is learned turn by turn."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Never

from luthier import records
from luthier.config.choices import RowKind, TrainOn
from luthier.errors import RowError
from luthier.rendering import ControlTokens, MediaSlots, kind_of_media, paths, trained_turns
from luthier.rendering.blueprint import Filled, PreferenceData
from luthier.rendering.recordings import RowHistory
from luthier.rendering.targets import closing_weight, cut_answer, part_weight
from luthier.rendering.template import Recording
from luthier.rendering.text_references import common_length

TOOLS_UNSHOWN = "rows with tools, which the chat template does not show"

# --------------------------------------------------------------------------------------------------------------------
# Rows that are compared, as conversations of which only the continuation is learned.
#
#     Preference(prompt, chosen, rejected)   ->   prompt + chosen, prompt + rejected
#     Feedback(prompt, completion)           ->   prompt + completion
#
# At inference the whole prompt is given: what it holds of the assistant's words is context, whatever the row or a
# rule says of them, and of the continuation only the assistant's messages are learned.


ComparedRow = records.Preference | records.Feedback


def continuations(row: ComparedRow) -> dict[str, tuple[records.Message, ...]]:
    """The row's continuations by the names of their fields, the first one first.

    Raises `RowError` (``blank_answer``) where the model would learn to say nothing.
    """
    _refuse_blank(row)
    match row:
        case records.Preference():
            return {"chosen": row.chosen, "rejected": row.rejected}
        case records.Feedback():
            return {"completion": row.completion}


def with_continuation(row: ComparedRow, messages: tuple[records.Message, ...]) -> records.Conversation:
    """The prompt with one continuation, before rules are applied."""
    return records.Conversation(
        messages=(*row.prompt, *messages),
        tools=row.tools,
        address=row.address,
        train_on=TrainOn.ASSISTANT.value,
        rules=row.rules,
        weight=row.weight,
        notes=row.notes,
    )


def only_last(row: records.Conversation, count: int) -> records.Conversation:
    """The conversation with nothing to learn but the assistant's among its last ``count`` messages."""
    first = len(row.messages) - count
    messages = tuple(
        message if index >= first and message.role == "assistant" else unlearned(message)
        for index, message in enumerate(row.messages)
    )
    return replace(row, messages=messages)


def compare(row: ComparedRow, prompt: tuple[records.Message, ...], sides: dict[str, Filled]) -> Filled:
    """The row's continuations as one. ``prompt`` is the one that was rendered, the run's system message included.

    Raises `RowError` where inference would not show one prompt, or not one history, to all that is compared.
    """
    for side, filled in sides.items():
        if len(filled.blueprint.paths) > 1:
            raise RowError(
                "several_contexts",
                f"inference would show {len(filled.blueprint.paths)} different histories to the answers of this "
                "continuation (the template rewrites earlier turns), so it has no one probability: let it have one "
                "answer, or use a template that leaves history as it was",
                field=side,
            )
    first, *others = sides.values()
    users = frozenset(index for index, message in enumerate(prompt) if message.role == "user")
    match row:
        case records.Preference():
            (rejected,) = others
            if first.prompt_text != rejected.prompt_text:
                raise RowError(
                    "prompts_differ",
                    "the template shows the prompt in two ways, one for each continuation, so they do not answer "
                    "the same question: give both thinking, or neither, or set a switch in template.kwargs",
                    field="rejected",
                )
            verdict = 0.0 if row.margin is None else row.margin
            return replace(first, comparison=PreferenceData(verdict=verdict, users=users, rejected=rejected))
        case records.Feedback():
            return replace(first, comparison=PreferenceData(verdict=float(row.desirable), users=users))


def _refuse_blank(row: ComparedRow) -> None:
    """Raise `RowError` where the model would learn to say nothing: an answer of the better kind that is blank.

    A blank answer of the worse kind (rejected, or found bad) says that silence is no answer, which may well be learned.
    """
    match row:
        case records.Preference():
            learned, which = row.chosen, "chosen"
        case records.Feedback():
            learned, which = (row.completion if row.desirable else ()), "completion"
    for message in learned:
        if message.is_blank_answer:
            raise RowError(
                "blank_answer",
                "the preferred answer is blank: take the row out, or set train: true on the message "
                "if silence is what you mean",
                field=which,
            )


def side_by_side(rendered: Sequence[records.Rendered]) -> records.Rendered:
    """The paths of several rows as those of the first, with the media of all."""
    found: list[tuple[records.Piece, ...]] = []
    media: list[records.Media] = []
    for one in rendered:
        found += [tuple(_behind(piece, len(media)) for piece in path) for path in one.paths]
        media += one.media
    return replace(rendered[0], paths=tuple(found), media=tuple(media))


def _behind(piece: records.Piece, num_media: int) -> records.Piece:
    return replace(piece, number=piece.number + num_media) if isinstance(piece, records.MediaPiece) else piece


def as_question(row: records.Conversation) -> records.Conversation:
    """A conversation that ends before an answer as a history to be answered; others stay what they are."""
    return replace(row, add_generation_prompt=True) if row.messages[-1].role in ("user", "tool") else row


def refuse_cut_answer(row: records.Conversation, train_on: TrainOn) -> None:
    """Raise `RowError` where only a part of the last learned answer is learned: a question ends where learning begins,
    so the rest of the answer would be asked with it."""
    index = cut_answer(row, TrainOn(row.train_on) if row.train_on is not None else train_on)
    if index is not None:
        what = "only a part of this answer is learned, and the rest would be shown to the model with the question"
        raise RowError("cut_answer", what, field=f"messages[{index}]")


def nothing_learned(row: records.Conversation, train_on: TrainOn) -> str:
    """Why nothing of a row is trained, in words; ``train_on`` is the run's or, where it has one, the row's own."""
    if any(message.role == "assistant" for message in row.messages):
        if train_on is TrainOn.NONE:
            key = "template.train_on" if row.train_on is None else "train_on of its data set"
            return f"{key} is none, and no message of this row says train: true (set it to assistant)"
        return "no message of this row is trained"
    others = ", ".join(map(str, list(row.columns)[:5]))
    name = (
        f"; if one of its other columns ({others}) is the answer, name it: columns: {{response: …}}" if others else ""
    )
    return f"it has no answer that could be learned (objective rl has the model answer such rows){name}"


def is_unasked(row: records.Conversation, index: int) -> bool:
    """Whether an answer comes before any question, and the row does not insist that it is learned."""
    before = (message.role for message in row.messages[:index])
    return all(role == "system" for role in before) and row.messages[index].train is not True


def refuse(row: records.Row, kind: RowKind) -> Never:
    """Raise `RowError` for a row of a kind that the run's objective cannot learn from."""
    match row:
        case records.Conversation() | records.Document() | records.Tokenized():
            fits = "it teaches an answer: train it with objective sft or pt"
        case records.Preference():
            fits = "it prefers one answer to another: train it with objective dpo or rm (docs/data_formats.md says "
            fits += "which columns to name where only the better answer is to be learned)"
        case records.Feedback():
            fits = "it says how good one answer is: train it with objective kto"
    needs = f"this run's objective learns answers ({'rl' if kind is RowKind.QUESTION else 'sft, pt'})"
    match kind:
        case RowKind.PAIR:
            needs = "this run's objective compares pairs (dpo, rm), so rows need chosen and rejected"
        case RowKind.VERDICT:
            needs = "this run's objective learns from verdicts (kto), so rows need a completion and a label (where a "
            needs += "column called label holds 0 and 1, say that it is a verdict: format: feedback)"
    raise RowError("objective", f"a row of kind {type(row).__name__.lower()}: {fits}; {needs}")


def with_system(messages: tuple[records.Message, ...], default: str | None) -> tuple[records.Message, ...]:
    """The messages behind the run's system message, where it has one and they bring none."""
    if default is None or (messages and messages[0].role == "system"):
        return messages
    return (records.Message(role="system", parts=(records.Text(text=default),), train=False), *messages)


def unlearned(message: records.Message) -> records.Message:
    """The message as context, whatever it or its parts say of their loss."""
    parts = tuple(
        replace(part, train=None)
        if isinstance(part, records.Text | records.Thinking | records.ToolCall) and part.train is not None
        else part
        for part in message.parts
    )
    return replace(message, train=False, parts=parts)


# --------------------------------------------------------------------------------------------------------------------
# Plain text as pieces: no template, only what the tokenizer puts around a text.


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentShape:
    """All of a document but its strings and media.

    parts    of a text what it counts in the loss, of an item its kind
    closing  what the end token counts
    rendered the text has its begin and end tokens in it
    """

    parts: tuple[float | str, ...]
    closing: float
    rendered: bool

    @property
    def weights(self) -> tuple[float, ...]:
        """What each text counts."""
        return tuple(part for part in self.parts if not isinstance(part, str))


def document_shape(document: records.Document) -> DocumentShape:
    """The shape of a document whose rules were applied."""
    parts: list[float | str] = []
    for part in document.parts:
        match part:
            case records.Text():
                parts.append(part_weight(part, is_trained=True) * document.weight)
            case records.Image() | records.Video() | records.Audio():
                parts.append(kind_of_media(part))
            case _:
                raise AssertionError(f"a document has no {type(part).__name__}")
    return DocumentShape(parts=tuple(parts), closing=closing_weight(document), rendered=document.rendered)


def document_path(
    shape: DocumentShape, *, control: ControlTokens, chars: Sequence[str], slots: MediaSlots
) -> tuple[records.Piece, ...]:
    """The pieces of documents of this shape; ``chars`` stand for their texts."""
    path: list[records.Piece] = (
        [] if shape.rendered else [records.ControlPiece(token=token) for token in control.opening]
    )
    texts = iter(chars)
    num_media = 0
    for part in shape.parts:
        match part:
            case str():
                path.extend(_slot(slots.inline[part], slots.tokens[part], num_media, control))
                num_media += 1
            case _:
                by_model = part > 0 or not shape.rendered
                path.append(records.TextPiece(text=next(texts), by_model=by_model, weight=part, field="text"))
    if not shape.rendered:
        path += [records.ControlPiece(token=token, by_model=True, weight=shape.closing) for token in control.closing]
    return tuple(path)


def _slot(inline: str, token: str, number: int, control: ControlTokens) -> Iterator[records.Piece]:
    """``<|vision_start|><|image_pad|><|vision_end|>`` as pieces, the item in the middle."""
    position = 0
    for start, end, found in control.find(inline):
        if position < start:
            yield records.TextPiece(text=inline[position:start])
        yield records.MediaPiece(token=token, number=number) if found == token else records.ControlPiece(token=found)
        position = end
    if position < len(inline):
        yield records.TextPiece(text=inline[position:])


# --------------------------------------------------------------------------------------------------------------------
# ``template.history: one_rendering``: a conversation is rendered once, each answer is learned where it stands in it.
#
# Where the template rewrites history (Qwen3 strips the thoughts of earlier turns), inference shows the model another
# text before an answer than this one. Other tools train this way; here it has to be asked for, and what differs is
# counted.


def one_path(
    history: RowHistory, control: ControlTokens, turns: Sequence[int], *, needs_stop: bool
) -> tuple[paths.Path, frozenset[int]]:
    """The path of the whole row with the completions of ``turns`` in it, and those of them that inference would not
    show or expect so.

    A completion begins behind its turn's header, as generation prompts write it, and ends as in any other path. What
    the template leaves out of earlier turns is not learned. Raises `RowError` where a turn has no header or no stop.
    """
    messages = history.row.messages
    whole = paths.whole_row(history)
    recording = whole.recording
    path = paths.path_of(history, whole, len(messages))
    unfinished = len(messages) - 1 if history.row.continue_final_message else None
    differing = set()
    for index in turns:
        context = _context(history, index, control)
        seam = _seam(history, recording, context, index)
        span = trained_turns.span_of(recording, control, index, seam)
        if index == unfinished:
            span = trained_turns.open_span(recording, index, seam, whole=False)
        if span is None:
            is_last = index == len(messages) - 1
            ended, path.stop = paths.ended_by_next_turn(history, control, whole, index) if is_last else (None, None)
            if ended is not None:
                path.recording = recording = ended.recording
                span = trained_turns.span_of(recording, control, index, seam)
            span = span or trained_turns.open_span(recording, index, seam, whole=path.stop is not None)
            if needs_stop and span.stop == span.end and path.stop is None:
                raise paths.no_stop(control, index)
            path.end = span.end if is_last else None
        if needs_stop:
            paths.require_stop(history, recording, control, span)
        path.spans.append(span)
        left_out = _thoughts_of_its_own_time(context, messages[index], index) if index < turns[-1] else set()
        paths.require_every_part(recording, span, history, but=left_out)
        if not _is_inference(recording, span, context, control):
            differing.add(index)
    if unfinished is not None:
        path.end = trained_turns.open_span(recording, unfinished, 0, whole=False).end
    return path, frozenset(differing)


def _context(history: RowHistory, index: int, control: ControlTokens) -> trained_turns.Context | None:
    """What inference shows before a message; None where the template has no prompt that the turn would continue."""
    try:
        return trained_turns.context_of(history.template, history, index, control)
    except RowError as error:
        if error.reason != "prompt_not_reproduced":
            raise
        return None


def _thoughts_of_its_own_time(context: trained_turns.Context | None, message: records.Message, index: int) -> set[int]:
    """The parts of a message that are thoughts and that the template prints while no turn follows, by number: those it
    may leave out of one rendering. A thought that it never prints is none of them."""
    if context is None:
        return set()
    if not any(isinstance(part, records.Thinking) for part in message.parts):
        return set()
    recording = context.recording
    owners = {recording.owner_table[ord(char)] for char in set(recording.owners)}
    printed = {owner.part for owner in owners if owner.message == index}
    return {
        number for number, part in enumerate(message.parts) if isinstance(part, records.Thinking) and number in printed
    }


def _is_inference(
    recording: Recording,
    span: trained_turns.CompletionSpan,
    context: trained_turns.Context | None,
    control: ControlTokens,
) -> bool:
    """Whether the text up to the end of a completion is what inference would show and expect."""
    if context is None or not recording.sketch.startswith(context.recording.sketch[: context.seam]):
        return False
    alone = trained_turns.span_of(context.recording, control, span.message, context.seam)
    end = len(context.recording.sketch) if alone is None else alone.end
    return recording.sketch[: span.end] == context.recording.sketch[:end]


def _seam(history: RowHistory, recording: Recording, context: trained_turns.Context | None, index: int) -> int:
    """Where the completion of a message begins in the rendering of the whole row: behind the turn's header.

    The header is what a generation prompt adds. Of one that goes on behind it (an opened thought) only so much counts
    as stands there, up to a line's or a tag's end. Templates that add nothing have no header. Raises `RowError` where
    nothing of a header stands there.
    """
    if context is not None and recording.sketch.startswith(context.recording.sketch[: context.seam]):
        return context.seam
    prompt = history.recording(index, generation_prompt=True)
    asked = prompt.sketch
    header = asked[common_length(asked, history.recording(index).sketch) :]
    begin, end = _between(recording, index)
    own = None if header else trained_turns.begin_without_header(prompt, recording, index)
    if own is not None:
        return own
    best = 0, begin
    for place in range(begin, end):
        if recording.sketch[place] == header[:1]:
            length = _whole_marks(header, common_length(header, recording.sketch[place:]))
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


def _whole_marks(header: str, length: int) -> int:
    """The longest beginning of a header, ``length`` characters at most, that ends with it, a line or a tag."""
    if length == len(header):
        return length
    return max((place + 1 for place in range(length) if header[place] in "\n>]"), default=0)
