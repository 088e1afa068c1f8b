"""Prompts of a conversation that goes on, in which the model's own messages are the ids that it drew.

A message that the template shows as it was drawn stands in the next prompt as those very ids. All else is encoded as
always, and so is a message that the template shows otherwise (its thought is left out, its call is written anew):

    drawn at turn 1    behind  <|im_start|>assistant\\n      hel lo <|im_end|>      (the tokenizer's own is: hello)
    prompt of turn 2   <|im_start|>assistant\\n hel lo <|im_end|> \\n <|im_start|>user\\n … <|im_start|>assistant\\n

Where a message stands is known from the pieces, which have owners; nothing is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.encoder import Encoder
from luthier.encoding.interface import as_prompt
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowError
from luthier.records import Conversation, MediaPiece, Message, Piece, Text, TextPiece

# A control token, by its id, as two surrogates, which no text that can be encoded holds.
_HIGH, _LOW = 0xD800, 0xDC00
_SIGN = re.compile("([\ud800-\udbff][\udc00-\udfff])")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnTurn:
    """What the model drew, int32[N] with the stop token, and the ``opening`` that ended its prompt."""

    ids: NDArray[np.int32]
    opening: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnPrompt:
    """A prompt, int32[T], and its ``opening``, for the `DrawnTurn` that follows. ``changed``: messages that were drawn
    and that the template shows otherwise."""

    ids: NDArray[np.int32]
    opening: str
    changed: tuple[int, ...] = ()


def with_system_message(encoder: Encoder, conversation: Conversation) -> Conversation:
    """The conversation with the run's own system message (``template.default_system``), where it has none."""
    default, messages = encoder.renderer.policy.default_system, conversation.messages
    if default is None or (messages and messages[0].role == "system"):
        return conversation
    system = Message(role="system", parts=(Text(text=default),), train=False)
    return replace(conversation, messages=(system, *messages))


def prompt_of_turns(
    encoder: Encoder, conversation: Conversation, drawn: Mapping[int, DrawnTurn] | None = None
) -> DrawnPrompt:
    """The generation prompt of a history, of which the messages of the numbers ``drawn`` are the model's own.

    Without any it is what `Encoder.encode` makes of the history. The conversation begins with its system message
    (`with_system_message`), as messages are told by their numbers. Raises `RowError` for a history that training
    refuses, and for one with media.
    """
    tokenizer = encoder.tokenizer
    try:
        (pieces,) = encoder.renderer.render(as_prompt(conversation)).paths
        signed = [_signed_piece(piece, tokenizer) for piece in pieces]
    except RowError as error:
        raise error.at(conversation.address) from error
    text = "".join(signed)
    starts = _starts(pieces, signed)
    own = takewhile(lambda pair: pair[0].message is None, zip(reversed(pieces), reversed(signed), strict=True))
    opening = "".join(reversed([sign for _, sign in own]))
    parts: list[NDArray[np.int32]] = []
    changed: list[int] = []
    end = 0
    for number, turn in sorted((drawn or {}).items()):
        shown = _signed(turn.ids, tokenizer)
        place = _place(text, starts.get(number), turn.opening, shown)
        if place is None or place < end:
            changed.append(number)
            continue
        parts += [_encoded(text[end:place], tokenizer), turn.ids]
        end = place + len(shown)
    parts.append(_encoded(text[end:], tokenizer))
    return DrawnPrompt(ids=np.concatenate(parts).astype(np.int32), opening=opening, changed=tuple(changed))


def _place(text: str, start: int | None, opening: str, shown: str) -> int | None:
    """Where a drawn message begins: behind the opening that it was drawn behind. What begins an opening may belong to
    no message, so it may stand before the message's ``start``."""
    if start is None or not _SIGN.fullmatch(shown[-2:]):  # what is behind a control token is encoded by itself
        return None
    for before in range(len(opening) + 1):
        place = start - before + len(opening)
        if text.startswith(opening, start - before, place) and text.startswith(shown, place):
            return place
    return None


def _starts(pieces: Sequence[Piece], signed: Sequence[str]) -> dict[int, int]:
    """Where each message's first piece begins."""
    starts: dict[int, int] = {}
    place = 0
    for piece, sign in zip(pieces, signed, strict=True):
        if piece.message is not None:
            starts.setdefault(piece.message, place)
        place += len(sign)
    return starts


def _signed_piece(piece: Piece, tokenizer: Tokenizer) -> str:
    if isinstance(piece, MediaPiece):
        raise RowError("media_unread", "conversations with images, videos or audio are not drawn turn by turn yet")
    if not isinstance(piece, TextPiece):
        return _sign(tokenizer.control_id(piece.token))
    if _SURROGATE.search(piece.text):
        raise RowError("lone_surrogate", "the text holds half of a surrogate pair, which no tokenizer can encode")
    return piece.text


def _signed(ids: NDArray[np.int32], tokenizer: Tokenizer) -> str:
    """What was drawn as text, in which control tokens are signs."""
    control = {tokenizer.control_id(token) for token in tokenizer.control.tokens}
    found: list[str] = []
    run: list[int] = []
    for number in ids.tolist():
        if number in control:
            found += [tokenizer.decode(run) if run else "", _sign(number)]
            run = []
        else:
            run.append(number)
    return "".join([*found, tokenizer.decode(run) if run else ""])


def _encoded(signed: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    parts = [part for part in _SIGN.split(signed) if part]
    texts = iter(tokenizer.encode_runs([part for part in parts if not _SIGN.fullmatch(part)]))
    arrays = [
        np.array([(ord(part[0]) - _HIGH) * 1024 + ord(part[1]) - _LOW], np.int32)
        if _SIGN.fullmatch(part)
        else next(texts)
        for part in parts
    ]
    return np.concatenate([np.zeros(0, np.int32), *arrays])


def _sign(number: int) -> str:
    return chr(_HIGH + number // 1024) + chr(_LOW + number % 1024)
