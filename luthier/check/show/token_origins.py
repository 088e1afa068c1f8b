"""Where a segment comes from: its row, found again in its source, and the owner of each of its tokens.

The store keeps ids, targets and weights, no owners: training needs none. So the few rows that are looked at are read
once more, rendered, and laid along the stored tokens. That is also a check: the two agree in every token and weight, or
what was stored is not what rendering gives now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.encoder import Encoder
from luthier.encoding.pieces import split_expansion
from luthier.encoding.shortening import SHORTENED
from luthier.encoding.tokenizer import Behind, Tokenizer
from luthier.errors import RowError, SourceError, StoreError
from luthier.layout import token_weights
from luthier.packing import UnitKind
from luthier.preparation import PreparedSet
from luthier.preparation.segments import SegmentIndex
from luthier.records import (
    Address,
    ControlPiece,
    Conversation,
    Document,
    Feedback,
    MediaPiece,
    Message,
    Piece,
    Preference,
    Rendered,
    Row,
    Sample,
    Segment,
    TextPiece,
    Tokenized,
)
from luthier.rendering import ControlTokens
from luthier.sources import RowBytes
from luthier.sources.origins import LocalFiles, Origin
from luthier.sources.source import Source
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentOrigin:
    """Which part of its row a segment is: tokens ``start`` and on of root-to-leaf run ``run`` of ``num_runs``.

    ``run`` counts from 1. ``owners`` has one entry a token, or none at all where they cannot be known; ``finding``
    then says why. ``run_tokens`` is the length of the whole run: more than the segment has if the run was cut. Of a
    prompt cut between messages its first ``head`` tokens stay as well, and ``start`` is where the rest begins.
    ``continuation``: what it is compared as, None where nothing is compared. ``held``: so many of its first tokens are
    those of the segment before it, and computed once for both.
    """

    run: int
    num_runs: int
    start: int
    run_tokens: int
    owners: tuple[TokenOrigin, ...] = ()
    finding: str | None = None
    continuation: str | None = None
    head: int = 0
    held: int = 0


def row_origins(
    prepared: PreparedSet, rows: Collection[int], encoder: Encoder, sources: Sequence[Source]
) -> dict[int, list[SegmentOrigin]]:
    """For each of these rows of ``prepared`` the origins of its root-to-leaf runs, in order, before any cutting.

    ``sources`` are those that ``prepared`` was read from. Each file is read as far as its last row of interest.
    """
    found: dict[int, Row | RowError] = {}
    for number, source in enumerate(sources):
        here = {prepared.address(row): row for row in rows if prepared.source_ids[row] == number}
        found |= {here[address]: row for address, row in find_rows(source, here).items()}
    return {row: _origins(prepared[row], found.get(row), encoder) for row in rows}


def segment_origin(
    index: SegmentIndex, segment: int, of_row: Sequence[SegmentOrigin], *, shared: bool = False
) -> SegmentOrigin:
    """The origin of a segment of the index, cut as the segment is; ``of_row`` are the runs of its row. ``shared``: it
    stands behind the segment before it, in a row in which segments share their beginnings.

    Of a prompt with another row's completion the owners are not told: its tokens are those of two rows.
    """
    leaf, start, stop = index.place(segment)
    run = of_row[leaf]
    if index.units is UnitKind.FEEDBACK_KL and segment % 2:
        what = "this row's prompt with another row's answer, as many tokens of it as there is room for (KL estimate)"
        return SegmentOrigin(run=1, num_runs=1, start=0, run_tokens=0, continuation=what)
    head = index.head(segment)
    held = int(index.held[segment]) if shared else 0
    return replace(run, start=start, head=head, held=held, owners=run.owners[:head] + run.owners[start:stop])


def find_rows(source: Source, addresses: Collection[Address]) -> dict[Address, Row | RowError]:
    """The rows with these addresses, read again from their source; one that is not there any more is left out.

    A row that cannot be read or converted comes as the `RowError` that says why.
    """
    found: dict[Address, Row | RowError] = {}
    for origin, wanted in _parts(source.origin, addresses):
        for row in _until_found(origin, wanted):
            assert row.address is not None, "rows that are found have an address"
            try:
                if isinstance(row, RowError):
                    raise row
                found[row.address] = source.convert(source.reader.read(row))
            except RowError as error:
                found[row.address] = error
    return found


def _parts(origin: Origin, addresses: Collection[Address]) -> Iterator[tuple[Origin, set[Address]]]:
    """What has to be read, with the addresses to look for in it: of local files only those that have one."""
    if not isinstance(origin, LocalFiles):
        if addresses:
            yield origin, set(addresses)
        return
    for file in origin.files:
        here = {address for address in addresses if address.file == file.path}
        if here:
            yield replace(origin, files=(file,)), here


def _until_found(origin: Origin, wanted: set[Address]) -> Iterator[RowBytes | RowError]:
    for row in origin.rows():
        if row.address in wanted:
            wanted.discard(row.address)
            yield row
            if not wanted:
                return


def _origins(sample: Sample, row: Row | RowError | None, encoder: Encoder) -> list[SegmentOrigin]:
    lengths = [len(segment) for segment in sample.segments()]
    runs = [
        SegmentOrigin(
            run=number, num_runs=len(lengths), start=0, run_tokens=length, continuation=_continuation(sample, number)
        )
        for number, length in enumerate(lengths, start=1)
    ]
    try:
        if row is None:
            raise SourceError(f"{sample.address}: the row is not in its file any more")
        if isinstance(row, RowError):
            raise row
        if isinstance(row, Tokenized):
            _check_same(sample, row, encoder)
            return [replace(run, owners=(TokenOrigin(field=GIVEN),) * run.run_tokens) for run in runs]
        pieces = _checked_pieces(sample, row, encoder)
    except (RowError, SourceError, StoreError) as error:
        return [replace(run, finding=f"owners are not known: {error}") for run in runs]
    speakers = speakers_of(row, default_system=encoder.options.default_system)
    special = encoder.tokenizer.control.special
    owners = [name_owners(run_pieces, speakers, special=special) for run_pieces in pieces]
    return [replace(run, owners=tuple(of_run)) for run, of_run in zip(runs, owners, strict=True)]


def _continuation(sample: Sample, run: int) -> str | None:
    if sample.verdict is None:
        shortened = any(what == SHORTENED for what, _ in sample.notes)
        why = "turns of the prompt are left out so that the answer fits (data.overflow: keep_answer)"
        return why if shortened else None
    if len(sample.branches) == 2:  # a prompt and what follows it
        return f"the answer to a prompt, {'desirable' if sample.verdict else 'undesirable'}"
    margin = f", margin {sample.verdict:g}" if sample.verdict else ""  # one of 0 is as none
    return f"the {'chosen' if run == 1 else 'rejected'} one of two answers to a prompt{margin}"


def _checked_pieces(sample: Sample, row: Row, encoder: Encoder) -> list[list[Piece]]:
    """The pieces of each run. Raises `StoreError` as `_check_same`."""
    _check_same(sample, row, encoder)
    allowed = encoder.renderer.policy.allowed
    texts = [expansion.text for expansion in encoder.expansions(row)] if sample.media else []
    owned = token_owners(encoder.render(row), encoder.tokenizer, allowed=allowed, expansions=texts)
    return leaf_owners(sample, owned)


def _check_same(sample: Sample, row: Row, encoder: Encoder) -> None:
    """Raises `StoreError` if the sample is not what the row is encoded to now."""
    difference = sample_difference(sample, encoder.encode(row), encoder.tokenizer)
    if difference is not None:
        what = "what the store holds of this row is not what rendering and encoding give now"
        raise StoreError(f"{sample.address}: {what}: {difference}", hint=AGAIN)


# --------------------------------------------------------------------------------------------------------------------
# Whose a token is, in words that a person knows: the message, its role, and which field of it.


TEMPLATE = "template"
TOOLS = "tools"
MEDIA = "media"
GIVEN = "input_ids"
PROMPT = "template (prompt)"
STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOrigin:
    """Whose a token is. ``message`` counts from 0, as ``messages[3]`` in error messages does.

    ``field`` is a field of the message (``content``, ``tool_calls``, ``media`` …), ``tools`` for the declarations of
    a conversation, ``text`` of a document, ``input_ids`` of a row that is token ids already; or the template's own:
    ``template``, ``template (prompt)`` for what inference puts before the model's turn, ``stop`` for the token that
    ends it. ``message`` None with a role is the system message that the run supplies (``template.default_system``).
    """

    message: int | None = None
    role: str | None = None
    field: str = TEMPLATE

    def __str__(self) -> str:
        """``3 assistant · content``, or ``tools``."""
        speaker = " ".join(str(part) for part in (self.message, self.role) if part is not None)
        return f"{speaker} · {self.field}" if speaker else self.field

    @property
    def voice(self) -> str:
        """Whose words they are: a role, ``tools``, ``text`` or ``media`` of a document, or ``template`` for its own."""
        if self.field in (TEMPLATE, PROMPT, STOP):
            return TEMPLATE
        return self.role or ("text" if self.field == GIVEN else self.field)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speaker:
    """Who speaks in a message, and its number in the row; None for the system message that the run supplies."""

    message: int | None
    role: str


def speakers_of(row: Row, *, default_system: str | None) -> list[Speaker]:
    """The speakers of a row's messages as they are rendered: with the run's system message, if it supplies one."""
    match row:
        case Conversation() | Preference() | Feedback():
            said = [Speaker(message=number, role=message.role) for number, message in enumerate(_messages(row))]
            is_supplied = default_system is not None and not (said and said[0].role == "system")
            return [Speaker(message=None, role="system"), *said] if is_supplied else said
        case Document() | Tokenized():
            return []
        case _:
            raise AssertionError(f"unknown kind of row {row!r}")


def _messages(row: Conversation | Preference | Feedback) -> tuple[Message, ...]:
    """The row's messages; of two continuations the longer one, for both are numbered on from the prompt."""
    match row:
        case Conversation():
            return row.messages
        case Preference():
            return (*row.prompt, *max(row.chosen, row.rejected, key=len))
        case Feedback():
            return (*row.prompt, *row.completion)


def name_owners(pieces: Sequence[Piece], speakers: Sequence[Speaker], *, special: Collection[str]) -> list[TokenOrigin]:
    """The owner of each token, given the piece of each token in the order of the text.

    ``special`` are the tokens that can end a turn.
    """
    runs = [(run[0], len(run)) for _, group in groupby(pieces, key=id) if (run := list(group))]
    distinct = [piece for piece, _ in runs]
    prompts = _prompts(distinct)
    owners = []
    for place, (piece, count) in enumerate(runs):
        follows = distinct[place + 1] if place + 1 < len(distinct) else None
        if place in prompts:
            field = PROMPT
        elif _is_stop(piece, follows, special):
            field = STOP
        else:
            field = _field(piece)
        owners.extend([_owner(piece, field, speakers)] * count)
    return owners


def _prompts(pieces: Sequence[Piece]) -> set[int]:
    """Places of the template's own text that lies right before what the model emits, in the same message."""
    prompts: set[int] = set()
    for place in range(len(pieces) - 1, 0, -1):
        piece, before = pieces[place], pieces[place - 1]
        opens_turn = place in prompts or _by_model(piece)
        same_message = piece.message is not None and piece.message == before.message
        is_scaffold = isinstance(before, ControlPiece) or (isinstance(before, TextPiece) and before.field is None)
        if opens_turn and same_message and is_scaffold and not _by_model(before):
            prompts.add(place - 1)
    return prompts


def _is_stop(piece: Piece, follows: Piece | None, special: Collection[str]) -> bool:
    ends_turn = follows is None or not _by_model(follows) or follows.message != piece.message
    return isinstance(piece, ControlPiece) and piece.by_model and piece.token in special and ends_turn


def _by_model(piece: Piece) -> bool:
    return isinstance(piece, ControlPiece | TextPiece) and piece.by_model


def _field(piece: Piece) -> str:
    match piece:
        case MediaPiece():
            return MEDIA
        case TextPiece():
            return piece.field or TEMPLATE
        case ControlPiece():
            return TEMPLATE
        case _:
            raise AssertionError(f"unknown piece {piece!r}")


def _owner(piece: Piece, field: str, speakers: Sequence[Speaker]) -> TokenOrigin:
    if piece.message is None or piece.message >= len(speakers):
        return TokenOrigin(field=field)
    speaker = speakers[piece.message]
    if speaker.message is None and field == "content":
        field = "template.default_system"
    return TokenOrigin(message=speaker.message, role=speaker.role, field=field)


OwnedToken = tuple[int, Piece]
AGAIN = "delete the folder of the store and prepare again; please report it, the store should have noticed"


def token_owners(
    rendered: Rendered, tokenizer: Tokenizer, *, allowed: frozenset[str] = frozenset(), expansions: Sequence[str] = ()
) -> list[list[OwnedToken]]:
    """For each path its tokens, as ids with the piece each belongs to. ``expansions`` are the texts of its media.

    A token that reaches over two pieces (``" the"``) belongs to the one it ends in, as its weight does. ``allowed`` are
    strings that are control tokens even in a row's own text, if the run says so. Raises `RowError` where encoding does.
    """
    paths = [list(_with_expansions(path, expansions, tokenizer.control)) for path in rendered.paths]
    return [list(_owned(path, tokenizer, allowed)) for path in paths]


def leaf_owners(sample: Sample, paths: Sequence[Sequence[OwnedToken]]) -> list[list[Piece]]:
    """For each segment of ``sample.segments()`` the piece of every token; ``paths`` come from `token_owners`.

    Where paths share tokens, a token belongs to the piece that makes it a target. Raises `StoreError` if the segments
    are not those paths, or a target does not weigh what its piece does.
    """
    ids = [np.array([token_id for token_id, _ in path], dtype=np.int32) for path in paths]
    taken: set[int] = set()
    return [_pieces_of(segment, number, paths, ids, taken) for number, segment in enumerate(sample.segments())]


def sample_difference(stored: Sample, now: Sample, tokenizer: Tokenizer) -> str | None:
    """The first thing in which two samples differ, in words; None if there is none."""
    if [branch.length for branch in stored.branches] != [branch.length for branch in now.branches]:
        return f"branches of {_lengths(stored)} tokens are stored, {_lengths(now)} come now"
    differs = np.flatnonzero(stored.input_ids != now.input_ids)
    if len(differs):
        place = int(differs[0])
        old, new = int(stored.input_ids[place]), int(now.input_ids[place])
        return f"token {place} is {old} {tokenizer.token(old)!r} in the store, {new} {tokenizer.token(new)!r} now"
    for name, old_values, new_values in (
        ("target", stored.target, now.target),
        ("weight", token_weights(stored), token_weights(now)),
    ):
        differs = np.flatnonzero(old_values != new_values)
        if len(differs):
            place = int(differs[0])
            return f"the {name} of token {place} is {old_values[place]} in the store, {new_values[place]} now"
    if stored.branches != now.branches:
        return "the branches hang together differently"
    return None


@dataclass(frozen=True, slots=True)
class _ExpandedSlots:
    """A control token, ``count`` times, that a media item's expansion has."""

    token: str
    count: int
    owner: MediaPiece


def _with_expansions(
    path: Sequence[Piece], expansions: Sequence[str], control: ControlTokens
) -> Iterator[TextPiece | ControlPiece | _ExpandedSlots]:
    for piece in path:
        if not isinstance(piece, MediaPiece):
            yield piece
            continue
        for part in split_expansion(expansions[piece.number], control):
            if isinstance(part, str):
                yield TextPiece(text=part, message=piece.message, field="media")
            else:
                yield _ExpandedSlots(*part, piece)


def _owned(
    path: Sequence[TextPiece | ControlPiece | _ExpandedSlots], tokenizer: Tokenizer, allowed: frozenset[str]
) -> Iterator[OwnedToken]:
    # Runs are cut as encoding cuts them: at control tokens, and where `by_model` changes.
    behind: Behind = "nothing"
    for _, group in groupby(path, key=lambda piece: piece.by_model if isinstance(piece, TextPiece) else id(piece)):
        pieces = list(group)
        texts = [piece for piece in pieces if isinstance(piece, TextPiece)]
        if texts:
            yield from _owned_run(texts, tokenizer, allowed, bare=tokenizer.is_bare(behind))
        if not texts or any(piece.text for piece in texts):
            behind = "text" if texts else "control token"
        for piece in pieces:
            match piece:
                case ControlPiece():
                    yield tokenizer.control_id(piece.token), piece
                case _ExpandedSlots():
                    token_id = tokenizer.control_id(piece.token)
                    yield from ((token_id, piece.owner) for _ in range(piece.count))


def _owned_run(
    pieces: Sequence[TextPiece], tokenizer: Tokenizer, allowed: frozenset[str], *, bare: bool
) -> Iterator[OwnedToken]:
    starts = np.array(list(accumulate((len(piece.text) for piece in pieces[:-1]), initial=0)))
    for ids, last in _stretches("".join(piece.text for piece in pieces), tokenizer, allowed, bare=bare):
        # [0, 3, 5] starts, a token whose last character is 4 -> piece 1; one that covers nothing belongs to the first
        owners = np.maximum(np.searchsorted(starts, last, side="right") - 1, 0)
        for token_id, owner in zip(ids.tolist(), owners.tolist(), strict=True):
            yield token_id, pieces[owner]


def _stretches(
    text: str, tokenizer: Tokenizer, allowed: frozenset[str], *, bare: bool
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Ids and the last character of each: of the text between allowed control strings, and of these."""
    position = 0
    for start, end, token in tokenizer.control.find(text) if allowed else ():
        if token in allowed:
            ids, last = tokenizer.encode_with_last(text[position:start], bare=bare)
            bare = tokenizer.is_bare("control token")
            yield ids, last + position
            yield np.array([tokenizer.control_id(token)], dtype=np.int32), np.array([end - 1])
            position = end
    ids, last = tokenizer.encode_with_last(text[position:], bare=bare)
    yield ids, last + position


def _pieces_of(
    segment: Segment,
    number: int,
    paths: Sequence[Sequence[OwnedToken]],
    ids: Sequence[NDArray[np.int32]],
    taken: set[int],
) -> list[Piece]:
    whole = (n for n in range(len(paths)) if n not in taken and np.array_equal(ids[n], segment.input_ids))
    home = next(whole, None)
    if home is None:
        raise StoreError(
            f"{segment.address}: run {number + 1} is {counted(len(segment), 'token')} in the store, and rendering "
            f"gives none of these tokens now (it gives {', '.join(str(len(path)) for path in paths)} tokens)",
            hint=AGAIN,
        )
    taken.add(home)
    pieces = [piece for _, piece in paths[home]]
    beside = [
        path
        for path, own in zip(paths, ids, strict=True)
        if len(own) <= len(pieces) and np.array_equal(own, segment.input_ids[: len(own)])
    ]
    weights = np.ones(len(segment), np.float32) if segment.weight is None else segment.weight
    for place in np.flatnonzero(segment.target).tolist():
        # a path that ends on the way has its targets in this run
        able = [pieces[place], *(path[place][1] for path in beside if place < len(path))]
        owner = next((piece for piece in able if np.isclose(_weight(piece), weights[place])), None)
        if owner is None:
            raise StoreError(
                f"{segment.address}: token {place} of run {number + 1} counts {weights[place]:g} in the store, and "
                f"{_weight(pieces[place]):g} as rendered now",
                hint=AGAIN,
            )
        pieces[place] = owner
    return pieces


def _weight(piece: Piece) -> float:
    return 0.0 if isinstance(piece, MediaPiece) else piece.weight


def _lengths(sample: Sample) -> str:
    return ", ".join(str(branch.length) for branch in sample.branches)
