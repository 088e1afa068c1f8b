"""Whose a token is, in words that a person knows: the message, its role, and which field of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from luthier.records import (
    ControlPiece,
    Conversation,
    Document,
    Feedback,
    MediaPiece,
    Message,
    Piece,
    Preference,
    Row,
    TextPiece,
)

TEMPLATE = "template"
TOOLS = "tools"
MEDIA = "media"
PROMPT = "template (prompt)"
STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Whose a token is. ``message`` counts from 0, as ``messages[3]`` in error messages does.

    ``field`` is a field of the message (``content``, ``tool_calls``, ``media`` …), ``tools`` for the declarations of
    a conversation, ``text`` of a document; or the template's own: ``template``, ``template (prompt)`` for what
    inference puts before the model's turn, ``stop`` for the token that ends it. ``message`` None with a role is the
    system message that the run itself supplies (``template.default_system``).
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
        return TEMPLATE if self.field in (TEMPLATE, PROMPT, STOP) else self.role or self.field


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
        case Document():
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


def name_owners(pieces: Sequence[Piece], speakers: Sequence[Speaker], *, special: Collection[str]) -> list[Owner]:
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


def _owner(piece: Piece, field: str, speakers: Sequence[Speaker]) -> Owner:
    if piece.message is None or piece.message >= len(speakers):
        return Owner(field=field)
    speaker = speakers[piece.message]
    if speaker.message is None and field == "content":
        field = "template.default_system"
    return Owner(message=speaker.message, role=speaker.role, field=field)
