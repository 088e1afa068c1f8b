"""The paths of one row: one recording for each inference context that the others do not hold."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, count, islice, pairwise, zip_longest
from operator import attrgetter, is_not, itemgetter
from typing import Any

from luthier.errors import RowError
from luthier.records import ControlPiece, MediaPiece, Message, Piece, Text, TextPiece, Thinking, ToolCall
from luthier.rendering import KINDS, ControlTokens, place_media, trained_turns
from luthier.rendering.openings import Stretched, spliced
from luthier.rendering.recordings import RowHistory
from luthier.rendering.template import Recording
from luthier.rendering.text_references import common_length, is_reference
from luthier.rendering.trace import Guard, Owner, owner_runs


@dataclass(kw_only=True, slots=True)
class Path:
    """A recording of the row's first messages, and the spans of the turns that are trained in it, in order.

    ``media`` says where which item of the row stands. ``end`` is where the path ends, ``stop`` a stop token that
    follows there though the template printed none. ``printed`` are the recordings that it is made of.
    """

    recording: Recording
    num_messages: int
    kwargs: Mapping[str, Any]
    printed: tuple[trained_turns.Printed, ...]
    media: Mapping[int, int] = field(default_factory=dict)
    spans: list[trained_turns.CompletionSpan] = field(default_factory=list)
    end: int | None = None
    stop: str | None = None

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """Its own, and those that it is made of."""
        return (self.recording, *(printed.recording for printed in self.printed))


def learned_spans(paths: Iterable[Path]) -> list[tuple[Path, trained_turns.CompletionSpan]]:
    """What is learned, each with the path that trains it."""
    return [(path, span) for path in paths for span in path.spans if not span.is_history]


def cut_paths(paths: Sequence[tuple[Path, Weigh]], control: ControlTokens) -> list[tuple[Piece, ...]]:
    """The paths as pieces. Of two neighbours that begin alike the second gets the pieces of the first, as far as it
    can; so give paths beside each other that share much, and weigh what is not learned in them the same.
    """
    cut: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    before: Path | None = None
    ends: list[int] = []  # where each piece of the path before ends
    for path, weigh in paths:
        num_reused, start = (0, 0) if before is None else _common_pieces(pieces, ends, before, path)
        own = cut_pieces(path.recording, control, path.spans, weigh, media=path.media, start=start, end=path.end)
        pieces[num_reused:] = own
        if path.stop is not None:
            span = next(span for span in reversed(path.spans) if not span.is_history)
            weight = weigh(Owner(scope=span.message), span, True)
            pieces.append(ControlPiece(token=path.stop, by_model=True, weight=weight, message=span.message))
        cut.append(tuple(pieces))
        lengths = [len(one.text if isinstance(one, TextPiece) else one.token) for one in pieces[num_reused:]]
        ends[num_reused:] = list(accumulate(lengths, initial=start))[1:]
        before = path
    return cut


def _common_pieces(pieces: Sequence[Piece], ends: Sequence[int], one: Path, other: Path) -> tuple[int, int]:
    """How many of one path's first pieces, up to a control token, are the other's too, and where they end."""
    mine, theirs = one.recording, other.recording
    alike = 0
    if mine.base is theirs.base is not None:  # up to there both are what the base begins with
        alike = min(mine.shared, theirs.shared, *(path.end for path in (one, other) if path.end is not None))
    limit = alike + common_length(mine.sketch[alike : one.end], theirs.sketch[alike : other.end])
    same = next(compress(count(), map(is_not, one.spans, other.spans)), min(len(one.spans), len(other.spans)))
    # a span that both have is history in both: what is learned is in one path only
    for span, another in zip_longest(one.spans[same:], other.spans[same:]):
        if (span is not another and span != another) or not span.is_history:
            limit = min(limit, *(each.seam for each in (span, another) if each is not None))
            break
    for index in range(bisect_right(ends, limit) - 1, -1, -1):
        if isinstance(pieces[index], ControlPiece):
            return index + 1, ends[index]
    return 0, 0


def paths_of(
    history: RowHistory, control: ControlTokens, turns: Sequence[int], *, needs_stop: bool
) -> tuple[Path, list[Path]]:
    """The path of the whole row, and those of the turns whose inference context it does not hold.

    Raises `RowError` if a turn cannot be trained on as inference would see it.
    """
    num_messages = len(history.row.messages)
    trunk = path_of(history, whole_row(history), num_messages)
    unfinished = num_messages - 1 if history.row.continue_final_message else None
    branches: list[Path] = []
    contexts: dict[int, trained_turns.Context] = {}
    passed = 0  # branches that part from the trunk too late to hold what the trunk does not
    for index in reversed(turns):  # a later turn's path often holds the context of an earlier one
        context = contexts[index] = trained_turns.context_of(history.template, history, index, control)
        while passed < len(branches) and _is_trunk(branches[passed], trunk, context):
            passed += 1
        home = _home(context, (trunk, *branches[passed:]), control, history)
        if home is None:
            home = path_of(history, context, index + 1)
            branches.append(home)
        if home is trunk and context.seam:  # what they begin with is the same; one of them is enough to keep
            contexts[index] = replace(context, recording=trunk.recording)
        if index not in home.recording.stretches:
            require_every_part(
                home.recording, trained_turns.CompletionSpan(message=index, seam=0, stop=0, end=0), history
            )
        span = trained_turns.span_of(home.recording, control, index, context.seam)
        if index == unfinished:
            span = trained_turns.open_span(home.recording, index, context.seam, whole=False)
        if span is None:
            ended, stop = ended_by_next_turn(history, control, context, index)
            if ended is not None or (stop is not None and index < home.num_messages - 1):
                # what follows it here is not what ends it
                branches, passed = [branch for branch in branches if branch is not home or home.spans], 0
                home = path_of(history, ended or context, index + 1)
                branches.append(home)
            home.stop = stop or home.stop
            span = None if ended is None else trained_turns.span_of(home.recording, control, index, context.seam)
            span = span or trained_turns.open_span(home.recording, index, context.seam, whole=stop is not None)
            if needs_stop and span.stop == span.end and stop is None:
                raise no_stop(control, index)
        if needs_stop:
            require_stop(history, home.recording, control, span)
        span = ended_where_inference_ends(home.recording, control, span, history)
        if (home is not trunk and not home.spans) or (home.stop is not None and home.end is None):
            home.end = span.end
        home.spans.insert(0, span)
        require_every_part(home.recording, span, history)
    if unfinished is not None:
        trunk.end = trained_turns.open_span(trunk.recording, unfinished, 0, whole=False).end
    marks = [(index, _mark(trunk, index, contexts[index], control, history)) for index in sorted(contexts)]
    for path in (trunk, *branches):
        kept = len(marks) if path is trunk else _num_alike(path, trunk.recording, marks)
        _mark_history(path, contexts, control, history, marks, kept)
    return trunk, branches[::-1]


def whole_row(history: RowHistory) -> trained_turns.Context:
    """The whole conversation as rendered, as a context of nothing."""
    recording, num_messages = history.recording(len(history.row.messages)), len(history.row.messages)
    printed = (trained_turns.Printed(recording=recording, num_messages=num_messages),)
    return trained_turns.Context(recording=recording, seam=0, kwargs={}, printed=printed)


def prompt_path(history: RowHistory) -> Path:
    """The whole row with a generation prompt behind it, as inference prints it where the template's switches are left
    as they are; nothing of it is learned, so no seam cuts its text."""
    num_messages = len(history.row.messages)
    recording = history.recording(num_messages, generation_prompt=True)
    printed = (trained_turns.Printed(recording=recording, num_messages=num_messages, generation_prompt=True),)
    context = trained_turns.Context(recording=recording, seam=len(recording.sketch), kwargs={}, printed=printed)
    return path_of(history, context, num_messages)


def path_of(history: RowHistory, context: trained_turns.Context, num_messages: int) -> Path:
    """The path of a context, without spans."""
    media: dict[int, int] = {}
    if history.has_media:
        media = place_media(context.recording.sketch, history.row.messages[:num_messages], history.template.slots)
    return Path(
        recording=context.recording,
        num_messages=num_messages,
        kwargs=context.kwargs,
        printed=context.printed,
        media=media,
    )


def can_be_asked(history: RowHistory, index: int, control: ControlTokens) -> bool:
    """Whether some prompt of the template leads to message ``index``: some know none before the first question."""
    try:
        trained_turns.context_of(history.template, history, index, control)
    except RowError as error:
        if error.reason not in ("template", "prompt_not_reproduced"):
            raise
        return False
    return True


def _num_alike(path: Path, trunk: Recording, marks: Sequence[tuple[int, trained_turns.CompletionSpan | None]]) -> int:
    """How many of the trunk's marks a path has too: all but the last in what they share, for a mark may depend on what
    follows it."""
    recording, num_messages = path.recording, path.num_messages
    if recording.base is not trunk:
        return 0
    stretches = recording.stretches
    shared = (n for n in range(num_messages - 1, -1, -1) if n in stretches and stretches[n].end <= recording.shared)
    last_but_one = next(islice(shared, 1, None), None)
    return 0 if last_but_one is None else bisect_left(marks, last_but_one, key=itemgetter(0))


def _mark(
    path: Path, index: int, context: trained_turns.Context, control: ControlTokens, history: RowHistory
) -> trained_turns.CompletionSpan | None:
    """The completion of a message in a path, as what the model said before; None where the path is not cut there."""
    if path.end is not None and path.end < context.seam:
        return None
    recording, prompt = path.recording, context.recording
    shared = min(recording.shared, prompt.shared) if recording.base is prompt.base is not None else 0
    if not recording.sketch.startswith(prompt.sketch[shared : context.seam], shared):
        return None
    if not trained_turns.seam_is_safe(recording, control, context.seam, history):
        return None
    span = trained_turns.span_of(recording, control, index, context.seam)
    return None if span is None else replace(span, is_history=True)


def _mark_history(
    path: Path,
    contexts: Mapping[int, trained_turns.Context],
    control: ControlTokens,
    history: RowHistory,
    marks: Sequence[tuple[int, trained_turns.CompletionSpan | None]],
    kept: int,
) -> None:
    """Cut a path where the model took over in turns that other paths train, so that all share what comes before.

    ``marks`` are the cuts of the trunk, of which the first ``kept`` are the path's too.
    """
    own = {span.message for span in path.spans}
    path.spans += [span for index, span in marks[:kept] if span is not None and index not in own]
    for index, _ in marks[kept : bisect_left(marks, path.num_messages, key=itemgetter(0))]:
        if index in own:
            continue
        span = _mark(path, index, contexts[index], control, history)
        if span is not None:
            path.spans.append(span)
    path.spans.sort(key=attrgetter("seam"))


def _is_trunk(path: Path, trunk: Path, context: trained_turns.Context) -> bool:
    """Whether a path is no other than the trunk as far as a context goes."""
    bases = {id(path.recording.base), id(context.recording.base)}
    return bases == {id(trunk.recording)} and path.recording.shared >= len(context.recording.sketch)


def _home(
    context: trained_turns.Context, paths: Sequence[Path], control: ControlTokens, history: RowHistory
) -> Path | None:
    sketch = context.recording.sketch
    tail = sketch[-200:]  # most paths differ from it there, which is quick to see
    for path in paths:
        own = path.recording.sketch
        if path.end is not None and path.end < len(sketch):
            continue
        if own.endswith(tail, 0, len(sketch)) and own.startswith(sketch):
            if not path.spans or trained_turns.seam_is_safe(path.recording, control, context.seam, history):
                return path
            return None
    return None


def ended_by_next_turn(
    history: RowHistory, control: ControlTokens, context: trained_turns.Context, index: int
) -> tuple[trained_turns.Context | None, str | None]:
    """How this turn ends where another one follows: with a stop of its own, or, as in GLM, with the next header.

    Gives the context with the turn ended as the template ends it in a history, or the token that follows the turn.
    """
    stretch = context.recording.stretches.get(index)
    if stretch is None:
        return None, None
    for recording in _followed(history, context, index):
        token = trained_turns.token_after(recording, control, index)
        if token is not None and not recording.stretches[index].is_owned:
            return None, token
        span = trained_turns.span_of(recording, control, index, 0)
        if span is None:
            continue
        content_end = recording.stretches[index].content_end
        own = context.recording.sketch[stretch.content_end :].rstrip()
        if own and not recording.sketch.startswith(own, content_end):
            continue
        ended = spliced(
            Stretched(context.recording, 0, stretch.content_end),
            Stretched(recording, content_end, span.end, index),
        )
        return replace(context, recording=ended), None
    return None, None


def _followed(history: RowHistory, context: trained_turns.Context, index: int) -> Iterator[Recording]:
    """The turn as rendered where a result, a question or a prompt follows."""
    calls = any(isinstance(part, ToolCall) for part in history.row.messages[index].parts)
    for role in ("tool", "user") if calls else ("user",):
        try:
            yield history.recording_with(index + 1, Message(role=role, parts=(Text(text="…"),)), **context.kwargs)
        except RowError:
            continue
    try:
        yield history.recording(index + 1, generation_prompt=True, **context.kwargs)
    except RowError:
        return


def ended_where_inference_ends(
    recording: Recording, control: ControlTokens, span: trained_turns.CompletionSpan, history: RowHistory
) -> trained_turns.CompletionSpan:
    """The span up to the first stop token of the template in it, where generation ends.

    Raises `RowError` if anything of the row stands behind that token: the model could never say it.
    """
    found = control.find(recording.sketch[span.seam : span.stop])
    early = next(((start, end, token) for start, end, token in found if token in control.stops), None)
    if early is None:
        return span
    start, end = span.seam + early[0], span.seam + early[1]
    for char in filter(is_reference, dict.fromkeys(recording.sketch[end : span.stop])):
        is_blank = not history.value(char).strip()
        history.note(Guard("blank", (char,), (), is_blank))
        if not is_blank:
            raise RowError(
                "answer_lost",
                f"the chat template writes the stop token {early[2]} before the end of this turn, so inference would "
                "end there and never say the rest; use a template that ends a turn once",
                field=f"messages[{span.message}]",
            )
    return replace(span, stop=start, end=end)


def no_stop(control: ControlTokens, index: int) -> RowError:
    """The error of a turn that is learned and that the template does not end."""
    return RowError(
        "no_stop",
        f"the template ends this turn with no stop token ({', '.join(sorted(control.stops)) or 'none is known'}), "
        "so a model trained on it would never stop; set template.train_stop: false to train it all the same",
        field=f"messages[{index}]",
    )


def require_stop(
    history: RowHistory, recording: Recording, control: ControlTokens, span: trained_turns.CompletionSpan
) -> None:
    """Raise `RowError` if a turn ends with a special token on which inference goes on, under a template that ends other
    turns with one on which it stops.

    Where the template writes none of these, the end of its turns is taken for what the model is to stop on.
    """
    last = recording.sketch[span.stop : span.end]
    if not last or last in control.stops or not any(stop in history.template.literals for stop in control.stops):
        return
    raise RowError(
        "no_stop",
        f"the template ends this turn with {last}, and inference stops on {', '.join(sorted(control.stops))}: if the "
        "model is to stop there, add it to eos_token_id in the model's generation_config.json, else take another "
        "template",
        field=f"messages[{span.message}]",
    )


def require_every_part(
    recording: Recording, span: trained_turns.CompletionSpan, history: RowHistory, *, but: Collection[int] = frozenset()
) -> None:
    """A template that prints nothing for a tool call or a thought would have the model learn an empty answer.

    Parts in ``but`` need not be printed. Raises `RowError`.
    """
    printed: dict[int, list[str]] = {}
    for position in range(span.seam, span.end):
        owner = recording.owner(position)
        if owner.message == span.message and owner.part is not None:
            printed.setdefault(owner.part, []).append(recording.sketch[position])
    for index, part in enumerate(history.row.messages[span.message].parts):
        if type(part) in KINDS:
            raise RowError(
                "media_answer",
                "an image, a video or audio in an answer that is learned, and no model here makes any: take it out, or "
                "set the message's train to false",
                field=f"messages[{span.message}]",
            )
        chars = printed.get(index, [])
        if not chars and index in but:
            continue
        if any(history.keeps(char) for char in chars):
            continue
        for char in chars:
            history.note(Guard("true", (char,), (), bool(history.value(char))))
        if any(map(history.value, chars)):
            continue
        if isinstance(part, Text | Thinking):
            is_blank = not part.text.strip()
            history.note(Guard("blank", (history.character_of(span.message, index),), (), is_blank))
            if is_blank:
                continue
        raise RowError(
            "dropped_by_template",
            f"the chat template prints nothing for this {type(part).__name__}, so the model would learn to leave it "
            "out; use a template that knows it, or take these rows out",
            field=f"messages[{span.message}]",
        )


# --------------------------------------------------------------------------------------------------------------------
# A recording cut into pieces, each with one owner. Their texts are sketches still.


# What a character counts in the loss: (its owner, the span it lies in or None, whether it is in the stop token).
Weigh = Callable[[Owner, trained_turns.CompletionSpan | None, bool], float]


def cut_pieces(
    recording: Recording,
    control: ControlTokens,
    spans: Sequence[trained_turns.CompletionSpan],
    weigh: Weigh,
    *,
    media: Mapping[int, int],
    start: int,
    end: int | None,
) -> tuple[Piece, ...]:
    """Control tokens that the template wrote become `ControlPiece`s, all else `TextPiece`s cut at owners and spans.

    ``media`` says which items stand at which control tokens (`rendering.place_media`). No string of the row is in a
    sketch, so what looks like a control token there is one. Gives the pieces from ``start`` on, which is the end of a
    control token, to ``end``.
    """
    sketch = recording.sketch
    end = len(sketch) if end is None else min(end, len(sketch))
    spans = sorted((span for span in spans if span.end > start), key=attrgetter("seam", "end"))
    seams = {start, end, *(span.seam for span in spans if start < span.seam < end)}
    pieces: list[Piece] = []
    for begin, stop in pairwise(sorted(seams)):  # no token reaches over a seam: inference encodes the two sides apart
        position = begin
        for token_start, token_end, token in control.find(sketch[begin:stop]):
            place = begin + token_start
            pieces.extend(_texts(recording, position, place, spans, weigh))
            position = begin + token_end
            span = _span_at(spans, place)
            owner = recording.owner(place)
            if place in media:
                pieces.append(MediaPiece(token=token, number=media[place], message=owner.scope))
                continue
            weight = _weight(weigh, owner, span, place)
            message = span.message if owner.scope is None and span is not None else owner.scope
            pieces.append(ControlPiece(token=token, by_model=span is not None, weight=weight, message=message))
        pieces.extend(_texts(recording, position, stop, spans, weigh))
    return tuple(pieces)


def _texts(
    recording: Recording, start: int, end: int, spans: Sequence[trained_turns.CompletionSpan], weigh: Weigh
) -> Iterator[TextPiece]:
    edges = {start, end}
    edges.update(start + stop for _, stop in owner_runs(recording.owners_of(start, end)))
    seam = attrgetter("seam")
    near = spans[max(0, bisect_right(spans, start, key=seam) - 1) : bisect_left(spans, end, key=seam)]
    edges.update(edge for span in near for edge in (span.seam, span.stop, span.end) if start < edge < end)
    for begin, stop in pairwise(sorted(edges)):
        owner, span = recording.owner(begin), _span_at(spans, begin)
        own = None if span is None else span.message
        yield TextPiece(
            text=recording.sketch[begin:stop],
            by_model=span is not None,
            weight=_weight(weigh, owner, span, begin),
            message=owner.message if owner.field is not None else own if owner.scope is None else owner.scope,
            field=owner.field,
        )


def _weight(weigh: Weigh, owner: Owner, span: trained_turns.CompletionSpan | None, position: int) -> float:
    learned = None if span is None or span.is_history else span
    return weigh(owner, learned, learned is not None and position >= learned.stop)


def _span_at(spans: Sequence[trained_turns.CompletionSpan], position: int) -> trained_turns.CompletionSpan | None:
    number = bisect_right(spans, position, key=attrgetter("seam")) - 1
    return spans[number] if number >= 0 and position < spans[number].end else None
